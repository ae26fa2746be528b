"""What a call costs beside its kernels: memory beyond the results, and the time of Python."""

from __future__ import annotations

import gc
import statistics
import time
from math import prod
from typing import Any

import pytest
from cases import DTYPES, Case
from gpu_helpers import cp, measure_memory

import la_cupy as la
from la_cupy import dtypes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warm_kernels")]

N = 32768
FUSED = Case("fused-qkv", *[(1, 8, N, 64)] * 3, dtype="bfloat16", causal=True)
GROUPED = Case(
    "grouped-8:1", (1, 1, 8, N, 64), *[(1, 1, 1, N, 64)] * 2, dtype="bfloat16", causal=True
)
ODD = Case("D=72", *[(1, 8, N, 72)] * 3, dtype="bfloat16", causal=True)


def _arrays(case: Case) -> list[Any]:
    """q, k, v, dout; of the fused case, slices of one projection in (B, N, 3, H, D) order."""
    dtype = DTYPES[case.dtype]
    rng = cp.random.default_rng(0)
    if case is FUSED:
        batch, heads, n, d = case.q
        fused = rng.standard_normal((batch, n, 4, heads, d), dtype=cp.float32).astype(dtype)
        return [fused[:, :, i].swapaxes(1, 2) for i in range(4)]
    shapes = (case.q, case.k, case.v, (*case.lead, case.q[-2], case.v[-1]))
    return [rng.standard_normal(s, dtype=cp.float32).astype(dtype) for s in shapes]


def _bytes(buffer: Any) -> int:
    """What CuPy's pool takes for it."""
    return -(-prod(buffer.shape) * dtypes.ITEMSIZE[buffer.dtype] // 512) * 512


@pytest.mark.parametrize(
    ("case", "floats"),
    [(FUSED, 8), (GROUPED, 2), (ODD, 8)],
    ids=lambda x: str(x) if isinstance(x, Case) else None,
)
def test_no_input_is_copied(case: Case, floats: int) -> None:
    """Beyond the results: states of segments, and a few floats a row; less than any input is."""
    q, k, v, dout = _arrays(case)
    options = {"causal": True}
    plans = {
        "forward": la.explain(q, k, v, **options),
        "backward": la.explain(q, k, v, dout=dout, **options),
    }
    _, den = la.linear_attention(q, k, v, return_normalizer=True, **options)
    calls = {
        "forward": lambda: la.linear_attention(q, k, v, return_normalizer=True, **options),
        "backward": lambda: la.linear_attention_vjp(dout, q, k, v, normalizer=den, **options),
    }
    rows = prod(case.lead) * N + prod(case.state_lead) * N
    smallest = min(x.nbytes for x in (q, k, v))
    assert 4 * floats * rows < 0.75 * smallest, "the bound would not see a copy"
    for name, make in calls.items():
        make()
        with measure_memory() as memory:
            kept = make()
        plan = plans[name]
        assert plan.copies == ()
        results = sum(map(_bytes, plan.outputs.values()))
        workspace = sum(map(_bytes, plan.workspace.values()))
        slots = sum(_bytes(b) for b in plan.workspace.values() if len(b.shape) == 1)
        beyond = memory.peak - results - slots
        print(f"{case} {name}: {memory.peak / q.nbytes:.2f} of q, {beyond / q.nbytes:.3f} beyond")
        assert results <= memory.peak <= results + workspace, (memory.peak, results, workspace)
        assert beyond <= 4 * floats * rows, (beyond, rows)
        del kept


STEP = Case("decode", *[(4, 8, 1, 64)] * 3, dtype="bfloat16", causal=True)


@pytest.mark.parametrize("case", [STEP], ids=str)
def test_python_cost_of_a_decode_step(case: Case, capsys: Any) -> None:
    """N = 1, state in and out; the host is never held up, as the queue is emptied in between."""
    q, k, v, _ = _arrays(case)
    _, state = la.linear_attention(q, k, v, causal=True, return_state=True)

    def step(state: Any) -> Any:
        return la.linear_attention(q, k, v, causal=True, initial_state=state, return_state=True)[1]

    for _ in range(50):
        state = step(state)
    costs = []
    gc.disable()
    try:
        for _ in range(20):
            cp.cuda.Device().synchronize()
            for _ in range(50):
                started = time.perf_counter()
                state = step(state)
                costs.append(time.perf_counter() - started)
    finally:
        gc.enable()
    median = statistics.median(costs) * 1e6
    with capsys.disabled():
        print(f"\na decode step costs {median:.1f} us of Python (quickest {min(costs) * 1e6:.1f})")
    assert float(state.count.ravel()[0]) == 1 + 50 + 20 * 50
    assert median <= 60


@pytest.mark.parametrize("case", [STEP], ids=str)
def test_a_step_leaves_nothing_behind(case: Case) -> None:
    """No memory is kept from call to call."""
    q, k, v, _ = _arrays(case)
    la.linear_attention(q, k, v, causal=True)
    pool = cp.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    for _ in range(10):
        la.linear_attention(q, k, v, causal=True, return_state=True)
    gc.collect()
    assert pool.used_bytes() <= before


@pytest.mark.parametrize("case", [STEP], ids=str)
def test_a_result_that_is_kept_holds_little_else(case: Case) -> None:
    """Small results share an allocation, but none of them holds kv, and out holds itself alone."""
    q, k, v, _ = _arrays(case)
    options = {"causal": True, "return_state": True, "return_normalizer": True}
    la.linear_attention(q, k, v, **options)
    pool = cp.get_default_memory_pool()
    for name in ("out", "den", "k_sum", "v_sum", "count"):
        gc.collect()
        before = pool.used_bytes()
        out, state, den = la.linear_attention(q, k, v, **options)
        large = state.kv.nbytes
        kept = {"out": out, "den": den, **state._asdict()}[name]
        del out, state, den
        held = pool.used_bytes() - before
        assert kept.nbytes <= held <= (kept.nbytes if name == "out" else large / 8), (name, held)
        del kept
