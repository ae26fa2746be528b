"""The examples run as they are, and the benchmark's judgement is sound."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import benchmark
import numpy as np
import pytest
from _bench_cases import Case, named_cases
from _bench_report import git_commit

import la_cupy as la

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(
        command, cwd=cwd, check=False, capture_output=True, text=True, timeout=280
    )


# --- quickstart


def test_quickstart_runs_as_it_is(tmp_path: Path) -> None:
    done = run_example("quickstart.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "CPU: numpy.ndarray, float32" in done.stdout
    found = re.findall(r"(?:whole|it) by ([0-9.e+-]+)", done.stdout)
    assert len(found) >= 2
    assert all(float(x) < 1e-5 for x in found), done.stdout


@pytest.mark.gpu
def test_quickstart_prints_both_array_types(tmp_path: Path) -> None:
    done = run_example("quickstart.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "numpy.ndarray, float32" in done.stdout
    assert "cupy.ndarray, float32" in done.stdout
    assert all(float(x) < 1e-5 for x in re.findall(r"(?:whole|it) by ([0-9.e+-]+)", done.stdout))


# --- the benchmark as a program


def test_benchmark_on_the_cpu(tmp_path: Path) -> None:
    done = run_example(
        "benchmark.py", "--device", "cpu", "--quick", "--repeats", "2", "--out", "b.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "b.json").read_text())
    ours = [row for row in report["rows"] if row["op"] == "la_cupy"]
    assert [Case(r["b"], r["n"], r["h"], r["d"], r["dtype"]) for r in ours] == named_cases()[
        "cpu-quick"
    ]
    for row in ours:
        assert row["fault"] is None
        assert set(row["errors"]) == {"out", "dq", "dk", "dv"}
        assert row["fwd_ms"] > 0 and row["both_ms"] > 0 and row["peak_units"] > 0
        # the table's line has the same numbers
        assert f"| {row['fwd_ms']:.3f} | {row['both_ms']:.3f} |" in done.stdout
    assert any("softmax" in name for name in report["ratios"])
    assert any(name == "la_cupy at N=256 over N=128" for name in report["ratios"])
    assert report["copy_bytes_per_s"] > 0 and report["decode_step"]["host_us"] > 0
    assert report["versions"]["la_cupy"] == la.__version__
    assert report["commit"] == git_commit()
    if "matplotlib" in report["versions"] or (tmp_path / "b.png").exists():
        assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.slow
def test_benchmark_on_the_gpu(tmp_path: Path) -> None:
    done = run_example(
        "benchmark.py", "--quick", "--no-rivals", "--shapes",
        "2x1000x4x128:bfloat16,2x1000x4x64:float32", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert [row["op"] for row in report["rows"]] == ["la_cupy", "la_cupy", "la_cupy tf32"]
    assert all(0 < row["fwd_roof"] < 2 for row in report["rows"])


def spoil_last_row(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[..., -1, 0] = np.nan
    return x


@pytest.mark.parametrize("victim", ["forward", "forward alone", "gradient", "nan"])
def test_no_speed_for_a_wrong_result(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forward(q: object, k: object, v: object, **options: object) -> object:
        result = la.linear_attention(q, k, v, **options)
        if victim == "forward alone" and not isinstance(result, tuple):
            return result * np.float32(1.01)
        if victim in ("forward", "nan") and isinstance(result, tuple):
            spoiled = result[0] * np.float32(1.01) if victim == "forward" else result[0]
            return (spoil_last_row(spoiled) if victim == "nan" else spoiled, *result[1:])
        return result

    def vjp(*arrays: object, **options: object) -> la.Gradients:
        grads = la.linear_attention_vjp(*arrays, **options)
        return grads._replace(k=grads.k * np.float32(1.01)) if victim == "gradient" else grads

    monkeypatch.setattr(
        benchmark, "la", SimpleNamespace(linear_attention=forward, linear_attention_vjp=vjp)
    )
    out = tmp_path / "wrong.json"
    arguments = ["--device", "cpu", "--no-rivals", "--repeats", "2", "--out", str(out)]
    status = benchmark.main([*arguments, "--shapes", "1x64x2x16:float32"])
    assert status == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert row["fwd_ms"] is None and row["both_ms"] is None and row["fwd_roof"] is None
    printed = capsys.readouterr().out
    name = "dk" if victim == "gradient" else "out"
    assert f"no speed: {name}: error" in printed and "WRONG: la_cupy at 1x64x2x16" in printed


# --- a sequence over several devices


def test_sequence_parallel(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    done = run_example(
        "sequence_parallel.py", "--rows", "256", "--width", "8", cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| 256 \| (\d+) \| [\d.]+ \| [\d.]+ \|$", done.stdout, re.MULTILINE)
    assert rows[0] == "1" and len(rows) == 2 and int(rows[1]) > 1


def test_examples_are_small_files() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 400, path
    assert os.access(EXAMPLES / "quickstart.py", os.R_OK)
