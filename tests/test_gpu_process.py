"""Processes and threads: what compiles when, and what a first call needs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from cases import BY_NAME, Case, make_inputs
from gpu_helpers import call, cp, on_gpu, run_script, same_bits, to_host

import la_cupy as la
from la_cupy import checked, compile
from la_cupy.arrays import Cache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warm_kernels")]

BF16 = BY_NAME["causal-bfloat16"]
F32 = BY_NAME["causal-float32-state"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The library as a new process finds it; gives the kernels that it loads from now on."""
    from la_cupy import launch

    found: list[Any] = []
    real = compile._load

    def load(spec: Any, device: int) -> Any:
        found.append(spec)
        return real(spec, device)

    monkeypatch.setattr(compile, "_load", load)
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(launch, "_prepared", Cache(limit=1024))
    monkeypatch.setattr(checked, "_forward", Cache(limit=1024))
    monkeypatch.setattr(checked, "_backward", Cache(limit=1024))
    return found


@pytest.mark.parametrize("case", [BF16], ids=str)
def test_fifty_lengths_compile_each_configuration_once(case: Case, loads: list[Any]) -> None:
    lengths = [*range(1, 80, 2), 127, 128, 129, 1000, 1031, 4096, 10_007, 40_000, 65_536, 100_003]
    assert len(lengths) == 50
    x = cp.zeros((1, max(lengths), 32), np.float32).astype(make_inputs(case).q.dtype)
    for n in lengths:
        y = x[:, -n:]
        la.linear_attention_vjp(y, y, y, y, **case.options)
        for heads in (2, 3):
            more = cp.lib.stride_tricks.as_strided(y, (heads, n, 32), (0, *y.strides[1:]))
            la.linear_attention(more, y, y, **(case.options | {"a": 0.5 + heads}))
    assert len(loads) == len(set(loads)), "a kernel was compiled twice"
    kernels = Counter((spec.source, getattr(spec, "role", None)) for spec in loads)
    kernels["accumulate.cu", None] -= 1  # one for each direction
    assert max(kernels.values()) == 1, f"one kernel for each role should do: {loads}"


@pytest.mark.parametrize("case", [F32, BF16], ids=str)
def test_eight_threads_make_the_first_call(case: Case, loads: list[Any]) -> None:
    x = on_gpu(make_inputs(case))
    cp.cuda.Device().synchronize()
    start = threading.Barrier(8)
    results: list[Any] = []

    def first() -> None:
        start.wait()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            found = call(case, x)
            stream.synchronize()
        results.append(found)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8, "a thread raised"
    expected = to_host(results[0])
    assert all(same_bits(expected, to_host(found)) == [] for found in results[1:])
    assert len(loads) == len(set(loads)), "two threads compiled the same kernel"


FIRST_RESULT = """
import sys, time
import cupy, ml_dtypes, numpy
from cupy.cuda import compiler
compiled, real = [], compiler._compile_using_nvrtc_no_warning
def counted(*args, **more):
    compiled.append(args[0])
    return real(*args, **more)
compiler._compile_using_nvrtc_no_warning = counted
import la_cupy as la
x = cupy.asarray(numpy.ones((2, 100, 32), ml_dtypes.bfloat16))
out = cupy.asnumpy(la.linear_attention(x, x, x, causal=True))
seconds = time.time() - float(sys.argv[1])
assert abs(out.astype("float32") - 1).max() < 0.01, out
"""
WITH_GRADIENTS = """
grads = la.linear_attention_vjp(x, x, x, x, causal=True)
assert numpy.isfinite(cupy.asnumpy(grads.v).astype("float32")).all()
"""


@pytest.mark.parametrize("case", [BF16], ids=str)
def test_a_second_process_compiles_nothing_and_is_soon_there(case: Case) -> None:
    call(case, on_gpu(make_inputs(case)))  # the cache is warm
    for _ in range(2):  # the first reads the libraries from the disk
        script = FIRST_RESULT + WITH_GRADIENTS + "print(seconds, len(compiled))"
        run = run_script(script, time.time())
        assert run.returncode == 0, run.stderr
        seconds, compiled = run.stdout.split()
        assert int(compiled) == 0, "a kernel was compiled again"
    print(f"first result in a new process after {float(seconds):.2f} s")
    assert float(seconds) < 3


def test_a_home_directory_that_is_read_only() -> None:
    """/proc is a folder that not even root can write to."""
    script = FIRST_RESULT + "print('right')"
    run = run_script(script, time.time(), HOME="/proc", CUPY_CACHE_DIR="/proc")
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["right"]


FORK = """
import os, sys
import cupy, numpy
import la_cupy as la
x = numpy.ones((2, 100, 32), numpy.float32)
host = la.linear_attention(x, x, x, causal=True)
child = os.fork()
if child == 0:
    y = cupy.asarray(x)
    out = cupy.asnumpy(la.linear_attention(y, y, y, causal=True))
    os._exit(0 if abs(out - host).max() < 1e-6 else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""


def test_fork_and_compute_in_the_child() -> None:
    run = run_script(FORK)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0"], run.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["selftest", "--device", "gpu"]], ids=["info", "selftest"]
)
def test_the_command_line(arguments: list[str], capsys: Any) -> None:
    from la_cupy.__main__ import main

    started = time.perf_counter()
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert time.perf_counter() - started < 60
    if arguments:
        assert "checks passed on the GPU" in printed
    else:
        assert "multiprocessors" in printed and "does not say" not in printed


KNOWN = """
import cupy, ml_dtypes, numpy
import la_cupy as la
from la_cupy import compile
x = cupy.asarray(numpy.ones((2, 100, 32), ml_dtypes.bfloat16))
specs = [launch.spec for launch in la.explain(x, x, x, causal=True).launches]
print([compile.is_cached(spec, 0) for spec in specs])
compile.tree_hash = lambda: "that of other sources"
print([compile.is_cached(spec, 0) for spec in specs])
"""


@pytest.mark.parametrize("case", [BF16], ids=str)
def test_what_is_on_disk_is_known_by_the_name_that_cupy_gave_it(case: Case) -> None:
    call(case, on_gpu(make_inputs(case)))
    run = run_script(KNOWN)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["[True]", "[False]"]
