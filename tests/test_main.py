"""The command line: what it prints, its exit codes, and that the self-test can fail."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from emulation.backend import H200, SMALL_SHARED

import la_cupy as la
from la_cupy import __main__ as main
from la_cupy import compile, cpu, dtypes, info, selftest, warm
from la_cupy.plan import backward_plan, forward_plan
from la_cupy.problem import backward_problem, forward_problem


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "devices", lambda: ([], "CuPy finds no CUDA device"))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "devices", lambda: ([H200, H200], ""))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were asked for; none is compiled."""
    asked: list[Any] = []
    monkeypatch.setattr(compile, "kernel", lambda spec, device: asked.append((spec, device)))
    monkeypatch.setattr(compile, "is_cached", lambda spec, device: (spec, device) in asked)
    return asked


def test_info_names_versions_sources_and_why_there_is_no_gpu(no_gpu: None, capsys: Any) -> None:
    assert main.main([]) == 0
    printed = capsys.readouterr().out
    for part in (la.__version__, np.__version__, compile.tree_hash()[:16], "no CUDA device"):
        assert part in printed, printed


def test_info_without_cupy(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "cupy" else real(name)
    )
    assert main.main(["info"]) == 0
    assert "CuPy is not installed" in capsys.readouterr().out
    assert main.main(["compile"]) == 1
    assert "CuPy is not installed" in capsys.readouterr().err


def test_info_counts_compiled_kernels_once_for_like_gpus(
    two_gpus: None, compiled: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(info, "_cuda_versions", lambda: "CuPy")
    compiled += [(spec, 0) for spec in warm.specs(H200, "bfloat16", 64, "identity")]
    count = len(compiled)
    assert main.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.count("sm_90, bfloat16, width 64, identity") == 1
    assert f"sm_90, bfloat16, width 64, identity: {count} of {count}" in printed
    assert "device 1: NVIDIA H200, sm_90, 132 multiprocessors, 227 KiB" in printed
    assert "sm_90, float32, width 64, identity: 0 of" not in printed, "scan is common to both"


def test_compile_asks_for_every_kernel_once(
    two_gpus: None, compiled: list[Any], capsys: Any
) -> None:
    assert main.main(["compile", "--dtype", "float32", "tf32", "--widths", "32,64"]) == 0
    chosen = warm.choices(H200, ("float32", "tf32"), (32, 64)).values()
    assert {spec for spec, _ in compiled} == {spec for specs in chosen for spec in specs}
    assert len(set(compiled)) == len(compiled)
    assert {device for _, device in compiled} == {0}, "GPUs of one kind share what is compiled"
    assert f"{len(compiled)} kernels ready for NVIDIA H200" in capsys.readouterr().out


def test_compile_without_tqdm_prints_lines(
    two_gpus: None, compiled: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(main, "find_spec", lambda name: None)
    assert main.main(["compile", "--widths", "32"]) == 0
    error = capsys.readouterr().err
    assert f"kernels for sm_90: {len(compiled)} of {len(compiled)}" in error
    assert 1 < error.count("\n") <= 12


def test_compile_shows_what_does_not_compile(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: Any, device: int) -> None:
        raise ZeroDivisionError(spec.name)

    monkeypatch.setattr(compile, "kernel", fail)
    with pytest.raises(ZeroDivisionError, match="la::"):
        main.main(["compile", "--widths", "32"])


@pytest.mark.parametrize("kind", warm.KINDS)
def test_one_choice_is_all_a_length_or_a_batch_can_ask_for(kind: str) -> None:
    """What is compiled ahead serves any shape of that width."""
    ahead = set(warm.specs(SMALL_SHARED, kind, 32, "identity"))
    precision = "tf32" if kind == "tf32" else "highest"
    dtype = dtypes.numpy_dtype("float32" if kind == "tf32" else kind)
    for lead, n in (((1,), 1), ((700, 3), 17), ((1,), 300_000)):
        x = np.broadcast_to(np.zeros(20, dtype), (*lead, n, 20))
        for causal in (False, True):
            options = {"causal": causal, "precision": precision}
            problem = forward_problem(x, x, x, **options)
            plan = forward_plan(problem, SMALL_SHARED, True)
            assert {spec for launch in plan.launches for spec in launch.specs} <= ahead
            problem = backward_problem(x, x, x, x, **options)
            plan = backward_plan(problem, SMALL_SHARED, True)
            assert {spec for launch in plan.launches for spec in launch.specs} <= ahead


def test_kernels_compile_side_by_side_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Any] = []
    meeting = threading.Barrier(2, timeout=20)  # breaks unless two are in there together

    def load(spec: Any, device: int) -> Any:
        loads.append(spec)
        meeting.wait()
        return f"kernel {spec}"

    monkeypatch.setattr(compile, "_load", load)
    monkeypatch.setattr(compile, "_kernels", {})
    wanted = warm.specs(H200, "bfloat16", 32, "identity")[:2]
    ready = list(compile.load_each(wanted * 4, 0, workers=4))
    assert sorted(map(str, ready)) == sorted(map(str, wanted))
    assert sorted(map(str, loads)) == sorted(map(str, wanted))

    results: list[Any] = []
    monkeypatch.setattr(compile, "_load", lambda spec, device: time.sleep(0.05) or object())
    monkeypatch.setattr(compile, "_kernels", {})
    threads = [
        threading.Thread(target=lambda: results.append(compile.kernel(wanted[0], 0)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(set(map(id, results))) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compile", "--widths", "0"], "numbers from 1 to 256 separated by commas"),
        (["compile", "--widths", "64;128"], "but got '64;128'"),
        (["compile", "--dtype", "int8"], "int8"),
        (["selftest", "--device", "tpu"], "tpu"),
        (["tune"], "tune"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments: list[str], sentence: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1, error


def test_selftest_passes_on_the_cpu(no_gpu: None, capsys: Any) -> None:
    assert main.main(["selftest"]) == 0
    printed = capsys.readouterr().out
    assert "so the CPU is checked" in printed
    assert f"fine: {len(selftest.CHECKS)} checks passed on the CPU" in printed


def test_selftest_for_a_gpu_that_is_not_there(no_gpu: None, capsys: Any) -> None:
    assert main.main(["selftest", "--device", "gpu"]) == 1
    assert "NOT fine: there is no GPU to check" in capsys.readouterr().err


def _scaled_dk(grads: Any, x: dict[str, Any]) -> Any:
    return grads._replace(k=(grads.k * 1.01).astype(grads.k.dtype))


def _nan_in_dv(grads: Any, x: dict[str, Any]) -> Any:
    grads.v[..., -1, 0] = np.nan
    return grads


def _changed_input(grads: Any, x: dict[str, Any]) -> Any:
    x["q"][..., 0, 0] += 1
    return grads


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_scaled_dk, "dk is off by"),
        (_nan_in_dv, "dv is off by inf"),
        (_changed_input, "an input was modified"),
    ],
)
def test_selftest_sees_a_fault(
    fault: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real = cpu.vjp

    def faulty(problem: Any, dout: Any, q: Any, *rest: Any) -> Any:
        grads = real(problem, dout, q, *rest)
        return fault(grads, {"q": q}) if problem.dtype == "float32" else grads

    monkeypatch.setattr(cpu, "vjp", faulty)
    assert main.main(["selftest", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    wrong = [line for line in printed.splitlines() if said in line]
    assert wrong and all(line.startswith(("float32", "tf32")) for line in wrong), printed
    assert f"NOT fine: {len(wrong)} of {len(selftest.CHECKS)} checks failed" in printed


def test_selftest_sees_results_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = cpu.forward, []

    def noisy(*inputs: Any) -> Any:
        out, state, den = real(*inputs)
        calls.append(out)
        return (np.nextafter(out, 9) if len(calls) % 2 else out), state, den

    monkeypatch.setattr(cpu, "forward", noisy)
    float64 = selftest.CHECKS[0]
    outcome = selftest.run(float64, np.asarray, np.asarray)
    assert outcome.faults == ("a second run gave other bits",)


def test_selftest_takes_a_gpu_where_there_is_one(
    two_gpus: None, compiled: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(selftest, "on_gpu", selftest.on_cpu)
    assert main.main(["selftest"]) == 0
    assert "checks passed on the GPU NVIDIA H200 (sm_90)" in capsys.readouterr().out
    assert {spec for spec, _ in compiled} == set(selftest.specs(H200))
    assert len(compiled) < 60, "the self-test must end within a minute, compilation included"


def test_the_command_line_runs_without_cupy_installed() -> None:
    """As a process of its own, in which importing CuPy fails."""
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.partition('.')[0] in ('cupy', 'cupy_backends', 'cupyx', 'tqdm'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *r: None if n in ('cupy', 'tqdm') else real(n, *r)\n"
        "from la_cupy.__main__ import main\n"
        "sys.exit(main([]) or main(['selftest']))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "CuPy is not installed" in run.stdout and "fine: " in run.stdout


def test_asking_whether_a_kernel_is_cached_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("cupy.cuda.compiler")
    names: list[str] = []

    class Cache:
        def load(self, name: str) -> bytes | None:
            names.append(name)
            return b"cubin" if len(names) > 1 else None

    cache = Cache()
    monkeypatch.setattr(compiler, "_kernel_cache_backend", cache)
    monkeypatch.setattr("cupy.cuda.Device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(
        compile, "_function", lambda spec: compiler._kernel_cache_backend.load("its name")
    )
    monkeypatch.setattr(compile, "_kernels", {})
    spec = warm.specs(H200, "bfloat16", 32, "identity")[0]
    assert compile.is_cached(spec, 0) is False
    assert compile.is_cached(spec, 0) is True
    assert names == ["its name"] * 2 and compiler._kernel_cache_backend is cache
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert compile.is_cached(spec, 0) is None


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    seen: list[str | None] = []

    class Function:
        max_dynamic_shared_size_bytes = 0

    def function(spec: Any) -> Any:
        seen.append(os.environ.get("CUPY_CACHE_IN_MEMORY"))
        if seen[-1] is None:
            raise PermissionError("read-only")
        return Function()

    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setattr("cupy.cuda.Device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(compile, "_function", function)
    spec = warm.specs(H200, "float32", 128, "identity")[0]
    loaded = compile._load(spec, 0)
    assert seen == [None, "1"] and "CUPY_CACHE_IN_MEMORY" not in os.environ
    assert loaded.max_dynamic_shared_size_bytes in (0, spec.shared_bytes)
