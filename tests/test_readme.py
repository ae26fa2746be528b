"""The README says what is so, and the examples in docstrings print what they claim."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import la_cupy as la

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What a module may need that is not there; it is imported only when such arrays arrive.
OPTIONAL = {"cupy", "jax", "torch"}


def run_doctests(finder_result: list[doctest.DocTest]) -> int:
    """Run them all; the number of examples that ran."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in finder_result:
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    return runner.tries


def test_readme_examples_print_what_it_says() -> None:
    parser = doctest.DocTestParser()
    assert run_doctests([parser.get_doctest(README, {}, "README.md", "README.md", 0)]) >= 9


def module_names() -> list[str]:
    """All modules of the package, as users import them; of `__main__` only the name is special."""
    found = pkgutil.walk_packages(la.__path__, "la_cupy.")
    names = {module.name for module in found if not module.name.endswith("__main__")}
    for folder in ("interop", "kernels_cu"):  # beside la_cupy/ in a checkout
        names.add(f"la_cupy.{folder}")
        path = list(importlib.import_module(f"la_cupy.{folder}").__path__)
        names |= {m.name for m in pkgutil.walk_packages(path, f"la_cupy.{folder}.")}
    return ["la_cupy", *sorted(names)]


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert module.__doc__, f"{name} has no docstring"
    run_doctests(doctest.DocTestFinder(exclude_empty=True).find(module, name))


def test_first_screen() -> None:
    screen = "\n".join(README.splitlines()[:32])
    assert "sum_j w[i,j] v[j]" in screen
    commands = [
        "pip install -e . && python examples/quickstart.py",
        'pip install -e ".[test]" && pytest',
    ]
    for command in commands:
        assert command in screen
    example = re.search(r"```python\n(.*?)```", screen, re.DOTALL)
    assert example is not None and example.group(1).count(">>> ") == 6


def test_ci_runs_the_readme_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "pip install -q -e . && python examples/quickstart.py" in script
    for command in ('pip install -q -e ".[test]"', "pytest", "ruff check", "mypy"):
        assert f"step '{command}" in script, command


def test_every_option_is_in_the_readme() -> None:
    options = re.search(r"## Options\n(.*?)\n## ", README, re.DOTALL)
    assert options is not None
    for function in (la.linear_attention, la.linear_attention_vjp):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and name not in ("normalizer", "dstate"):
                assert f"`{name}`" in options.group(1), name


def test_defaults_in_the_readme() -> None:
    parameters = inspect.signature(la.linear_attention).parameters
    rows = re.findall(r"^\| (`[^|]+) \| (`[^|]+) \|", README, re.MULTILINE)
    checked = 0
    for names, values in rows:
        defaults = [value.strip("` ") for value in values.split(",")]
        for i, name in enumerate(x.strip("` ") for x in names.split(",")):
            if name in parameters:
                default = defaults[min(i, len(defaults) - 1)].replace('"', "'")
                assert repr(parameters[name].default) == default, name
                checked += 1
    assert checked >= 10


def test_named_files_exist() -> None:
    """No page names a file that is not there."""
    for page in ("README.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text()
        for path in re.findall(r"(?:[a-z_.]+/)+[a-z_]+\.(?:py|cuh|cu|md)\b", text):
            assert (ROOT / path).exists(), f"{page} names {path}"
    layout = re.search(r"## How the code is laid out\n(.*?)\n\*\*To add", README, re.DOTALL)
    assert layout is not None
    for name in re.findall(r"\b([a-z_]+\.py)\b", layout.group(1)):
        assert any((ROOT / folder / name).exists() for folder in ("la_cupy", "tests", "examples"))


def test_named_extras_exist() -> None:
    extras = set(re.findall(r'-e "\.\[([a-z0-9]+)\]"', README))
    assert extras and extras <= set(PROJECT["project"]["optional-dependencies"])


def test_versions_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert PROJECT["project"]["version"] == la.__version__
    assert f"\nversion: {la.__version__}\n" in citation
    assert la.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert "2510.21956" in citation and "2510.21956" in README


def test_core_needs_numpy_and_ml_dtypes_only() -> None:
    names = {re.split(r"[<>=\[]", need)[0] for need in PROJECT["project"]["dependencies"]}
    assert names == {"numpy", "ml_dtypes"}
