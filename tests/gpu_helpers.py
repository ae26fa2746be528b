"""What the GPU tests share: moats and poison, one call of everything, errors, timing.

CuPy is imported here where it is installed, and used only inside tests marked `gpu`, which are
skipped where it has no device.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import numpy as np
from cases import BY_NAME
from chunked import widen
from inputs import DTYPES, Case, Inputs, lay_out, state_dtype
from measures import name_results

import la_cupy as la
from la_cupy import compile
from la_cupy.device import DeviceInfo, device_info
from la_cupy.kernels import NoKernelError, Spec
from la_cupy.layouts import contiguous_strides
from la_cupy.plan import Plan, backward_plan, forward_plan
from la_cupy.problem import GPU_WIDTH_LIMIT, backward_problem, forward_problem
from la_cupy.results import State

cp: Any = importlib.import_module("cupy") if importlib.util.find_spec("cupy") else None


SANITIZER = [
    f"{prefix}{name}"
    for prefix in ("", "causal-")
    for name in (
        *(f"{kind}-state" for kind in ("float64", "float32", "tf32", "bfloat16", "float16")),
        *(f"grouped-{kind}" for kind in ("float32", "bfloat16")),
        *(f"unaligned-{kind}" for kind in ("float32", "bfloat16")),
        *("bfloat16", "N<M", "N>M-state", "k-broadcast", "k-v-on-different-axes", "N=0-M=9"),
        *("reversed-bfloat16", "transposed-float32", "a=-0.2-b=0.37-float32"),
    )
] + [
    *("length-129", "length-1031", "width-72-bfloat16", "width-3-float32", "wide-256x160-bfloat16"),
    *("step-grouped-5", "step-3-float64"),
]
"""The reduced set that compute-sanitizer runs: all arithmetics and roles, segments, split columns."""
assert set(SANITIZER) <= set(BY_NAME), set(SANITIZER) - set(BY_NAME)


# --- arrays --------------------------------------------------------------------------------


class Moat(NamedTuple):
    """Arrays in the middle of memory that is full of NaN."""

    inputs: Inputs
    parents: list[Any]  # flat, with all that lies between and around the arrays

    def bits(self) -> list[bytes]:
        """Every byte of every parent."""
        return [_host(parent).tobytes() for parent in self.parents]


MOAT = 4096
"""Elements of NaN on both sides: more than a tile's rows of any width reach past an end."""


def in_moat(inputs: Inputs, xp: Any = None) -> Moat:
    """The inputs on the GPU at the same strides and alignment, each in a moat of NaN."""
    parents: dict[int, Any] = {}

    def place(x: Any) -> Any:
        view, parent = _place(x, MOAT, cp if xp is None else xp)
        parents[id(view)] = parent
        return view

    placed = inputs.map(place)
    return Moat(placed, [parents[id(view)] for view in placed.arrays()])


def on_gpu(inputs: Inputs) -> Inputs:
    """The inputs on the GPU, at the same strides, in memory of their own."""
    return inputs.map(lambda x: _place(x, 0, cp)[0])


def _place(x: Any, moat: int, xp: Any) -> tuple[Any, Any]:
    """(x at its strides inside a new flat parent, the parent)."""
    if x.size == 0:
        return xp.asarray(np.ascontiguousarray(x)), xp.asarray(np.zeros(0, x.dtype))
    upward = x[(..., *(slice(None, None, -1 if s < 0 else 1) for s in x.strides))]
    reach = sum(s * (n - 1) for s, n in zip(upward.strides, x.shape, strict=True))
    size = reach // x.itemsize + 1
    flat = np.lib.stride_tricks.as_strided(upward, (size,), (x.itemsize,))
    odd = (upward.ctypes.data // x.itemsize) % (16 // x.itemsize)  # keep what is not aligned so
    host = np.full(moat + odd + size + moat, np.nan, x.dtype)
    host[moat + odd : moat + odd + size] = flat
    parent = xp.asarray(host)
    first = sum(-s * (n - 1) for s, n in zip(x.strides, x.shape, strict=True) if s < 0)
    first += (moat + odd) * x.itemsize
    if xp is np:
        return np.ndarray(x.shape, x.dtype, parent, first, x.strides), parent
    return xp.ndarray(x.shape, x.dtype, memptr=parent.data + first, strides=x.strides), parent


def _host(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else cp.asnumpy(x)


def to_host(x: Any) -> Any:
    """Arrays, or tuples of them, in NumPy; None stays None."""
    if x is None:
        return None
    if isinstance(x, dict):
        return {name: _host(a) for name, a in x.items()}
    if isinstance(x, tuple):
        parts = [to_host(a) for a in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return _host(x)


def call(case: Case, x: Inputs, **more: Any) -> dict[str, Any]:
    """Every result of both public functions, by the names of measures.py."""
    options = {**case.options, "initial_state": x.initial_state}
    out, state, den = la.linear_attention(
        x.q, x.k, x.v, return_state=True, return_normalizer=True, **options, **more
    )
    grads = la.linear_attention_vjp(
        x.dout, x.q, x.k, x.v, normalizer=den, dstate=x.dstate, **options
    )
    return name_results(out=out, state=state, den=den, grads=grads)


def same_bits(x: Mapping[str, Any], y: Mapping[str, Any]) -> list[str]:
    """The names of the results that differ in any bit."""
    assert set(x) == set(y), (set(x), set(y))
    return [name for name in x if _host(x[name]).tobytes() != _host(y[name]).tobytes()]


# --- kernels -------------------------------------------------------------------------------


def plans(case: Case, device: DeviceInfo) -> tuple[Plan, Plan]:
    """Of `call(case, ...)`, forward and backward; no memory is taken for the inputs."""

    def stand_in(dtype: str, *shape: int) -> Any:
        row = np.zeros(shape[-1:] if 0 not in shape else (), DTYPES[dtype])
        return np.broadcast_to(row, shape)

    def lying(dtype: str, shape: tuple[int, ...], layout: str) -> Any:
        kind = DTYPES[dtype]
        if layout != "contiguous":  # none of the long cases
            return lay_out(np.zeros(shape, kind), layout)
        strides = [kind.itemsize * x for x in contiguous_strides(shape)]
        return np.lib.stride_tricks.as_strided(np.zeros(1, kind), shape, strides, writeable=False)

    d, e = case.q[-1], case.v[-1]
    dtypes = (*case.dtypes, case.dout_dtype or case.out_dtype)
    shapes = (case.q, case.k, case.v, (*case.lead, case.q[-2], e))
    layouts = (case.layout,) * 3 + (case.dout_layout or case.layout,)
    q, k, v, dout = (lying(*x) for x in zip(dtypes, shapes, layouts, strict=True))
    initial = dstate = None
    if case.initial_shapes is not None:
        dtype = case.initial_dtype or state_dtype(case)
        initial = State(*(stand_in(dtype, *lead, *own) for lead, own in case.initial_shapes))
    if case.dstate is not None:
        lead = case.state_lead if case.dstate == "full" else ()
        own = ((d, e), (d,), (e,), ())
        dstate = State(*(stand_in(state_dtype(case), *lead, *axes) for axes in own))
    options = {**case.options, "initial_state": initial, "width_limit": GPU_WIDTH_LIMIT}
    forward = forward_problem(q, k, v, **options)
    backward = backward_problem(dout, q, k, v, dstate=dstate, **options)
    return forward_plan(forward, device, True), backward_plan(backward, device, True)


def specs(cases: Iterable[Case], device: DeviceInfo) -> list[Spec]:
    """All kernels of these cases, each once; a case without a plan fails in its own test."""
    found: dict[Spec, None] = {}
    for case in cases:
        with suppress(NoKernelError):
            for plan in plans(case, device):
                found |= {spec: None for launch in plan.launches for spec in launch.specs}
    return list(found)


def compile_for(cases: Iterable[Case]) -> None:
    """Compile the kernels of the cases in threads; afterwards no test waits for NVRTC.

    What does not compile fails in the tests that need it.
    """

    def load(spec: Spec) -> None:
        with suppress(cp.cuda.compiler.CompileException):
            compile.kernel(spec, 0)

    started, wanted = time.perf_counter(), specs(cases, device_info(0))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(load, wanted))
    print(f"\n{len(wanted)} kernels ready in {time.perf_counter() - started:.1f} s")


# --- poison and accounts -------------------------------------------------------------------


def poison() -> AbstractContextManager[Any]:
    """Whatever is taken from CuPy's pool inside is full of NaN at first (not with --no-pool)."""
    return _Poison()


def measure_memory() -> AbstractContextManager[Any]:
    """Gives an object whose `peak` is the most bytes in use at once of those taken inside."""
    return _Account()


def _hooks() -> tuple[Any, Any]:
    class Poison(cp.cuda.MemoryHook):
        name = "la_cupy tests: poison"

        def malloc_postprocess(self, **block: Any) -> None:
            if block["mem_ptr"]:
                stream = cp.cuda.get_current_stream().ptr
                cp.cuda.runtime.memsetAsync(block["mem_ptr"], 0xFF, block["mem_size"], stream)

    class Account(cp.cuda.MemoryHook):
        name = "la_cupy tests: account"

        def __init__(self) -> None:
            self.blocks: dict[int, int] = {}
            self.peak = 0

        def malloc_postprocess(self, **block: Any) -> None:
            self.blocks[block["mem_ptr"]] = block["mem_size"]
            self.peak = max(self.peak, sum(self.blocks.values()))

        def free_postprocess(self, **block: Any) -> None:
            self.blocks.pop(block["mem_ptr"], None)  # taken before, if it is not there

    return Poison, Account


_Poison, _Account = _hooks() if cp is not None else (None, None)


# --- errors on the device ------------------------------------------------------------------


def device_errors(x: Any, ref: Any, scale: float = 0.0, xp: Any = None) -> dict[str, float]:
    """The measures of measures.errors, taken where the arrays are, for those too large to move."""
    xp = cp if xp is None else xp
    x = widen(x, xp)
    if x.shape != ref.shape or not bool(xp.isfinite(x).all()):
        return {"max": math.inf}
    size = max(float(abs(ref).max()), scale)
    rows = ref.shape[-2]
    tail = (..., slice(rows - rows // 4, None), slice(None))
    difference = x - ref
    return {
        "max": float(abs(difference).max()) / size,
        "Frobenius": _norm(difference, xp) / _norm(ref, xp),
        "Frobenius, last quarter": _norm(difference[tail], xp) / _norm(ref[tail], xp),
    }


def _norm(x: Any, xp: Any) -> float:
    return math.sqrt(float((x * x).sum()))


# --- time ----------------------------------------------------------------------------------

_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


def spin(milliseconds: float) -> None:
    """Keep the current stream busy for about this long (on a clock of 2 GHz)."""
    cycles = np.int64(milliseconds * 2e6)
    cp.RawKernel(_SPIN, "spin")((1,), (1,), (cycles,))


def run_script(script: str, *arguments: Any, **environment: str) -> subprocess.CompletedProcess:
    """A Python process of its own that sees the same modules."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
