"""The case table on CuPy, in a moat of NaN, with poisoned memory; and cases too large for a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from cases import BY_NAME, CASES, DTYPES, LONG, Case, check, make_inputs, name_results
from cases import reference_results as reference
from chunked import chunked
from gpu_helpers import (
    SANITIZER,
    call,
    cp,
    device_errors,
    in_moat,
    on_gpu,
    poison,
    same_bits,
    to_host,
)
from measures import BUDGETS, Budget

import la_cupy as la

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warm_kernels")]


def _param(case: Case) -> Any:
    marks = [pytest.mark.sanitizer] if case.name in SANITIZER else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [_param(case) for case in CASES])
def test_case(case: Case) -> None:
    """Right; nothing read beside the inputs, nothing left unwritten, nothing modified; twice."""
    inputs = make_inputs(case)
    moat = in_moat(inputs)
    before = moat.bits()
    with poison():
        results = call(case, moat.inputs)
        again = call(case, moat.inputs)
    check(case, inputs, to_host(results), reference(case, inputs))
    assert same_bits(results, again) == [], "a second run gave other bits"
    assert moat.bits() == before, "an input was modified"


@pytest.mark.parametrize(
    "case",
    [BY_NAME[f"causal-{x}"] for x in ("float32-state", "bfloat16", "N<M", "unnormalised")],
    ids=str,
)
def test_gradients_without_the_normalizer(case: Case) -> None:
    inputs = make_inputs(case)
    x = in_moat(inputs).inputs
    with poison():
        grads = la.linear_attention_vjp(
            *(x.dout, x.q, x.k, x.v),
            dstate=x.dstate,
            initial_state=x.initial_state,
            **case.options,
        )
    names = ["dq", "dk", "dv"]
    found = to_host(name_results(grads=grads))
    check(case, inputs, found, reference(case, inputs), names)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long(case: Case) -> None:
    """Sums that grow or cancel, against float64: by size, in Frobenius norm, in the last quarter."""
    inputs = make_inputs(case)
    x = on_gpu(inputs)
    with poison():
        results = call(case, x)
    out, state, den, grads = chunked(case, x.q, x.k, x.v, x.dout, xp=cp)
    expected = name_results(out=out, state=state, den=den, grads=grads)
    check(case, inputs, to_host(results), to_host(expected), set(expected))


LARGE = {"q": (2, 3, 4096, 32), "k": (2, 1, 4096, 32), "v": (2, 1, 4096, 32)}
AGAINST_CPU = [
    Case(f"{kind}-{causal}", **LARGE, dtype=kind, causal=causal, initial="full", dstate="full")
    for kind in ("float32", "bfloat16")
    for causal in (False, True)
]


@pytest.mark.parametrize("case", AGAINST_CPU, ids=str)
def test_against_the_cpu(case: Case) -> None:
    """Grouped heads and states over many segments, against the CPU backend in float64."""
    inputs = make_inputs(case)
    results = to_host(call(case, on_gpu(inputs)))
    wide = inputs.map(lambda x: x.astype("float64"))
    check(case, inputs, results, call(case, wide))


@pytest.fixture
def memory_given_back() -> Iterator[None]:
    """The tests that follow, some in other processes, need memory too."""
    yield
    cp.get_default_memory_pool().free_all_blocks()


def _random(case: Case) -> list[Any]:
    """q, k, v, dout of a case, made on the GPU."""
    rng = cp.random.default_rng(len(case.name))
    shapes = (case.q, case.k, case.v, (*case.lead, case.q[-2], case.v[-1]))
    return [rng.standard_normal(s, dtype=cp.float32).astype(DTYPES[case.dtype]) for s in shapes]


MANY_HEADS = Case("70000-heads", *[(70_000, 16, 16)] * 3, causal=True)
FIVE_MILLION = Case("N=5e6", *[(1, 5_000_000, 16)] * 3, causal=True)


@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize(
    ("case", "chunk"), [(MANY_HEADS, 16), (FIVE_MILLION, 32)], ids=lambda x: str(x)
)
def test_beyond_the_limits_of_a_grid(case: Case, chunk: int) -> None:
    q, k, v, dout = _random(case)
    with poison():
        out, den = la.linear_attention(q, k, v, causal=True, return_normalizer=True)
        grads = la.linear_attention_vjp(dout, q, k, v, normalizer=den, causal=True)
    found = {"out": out, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    out64, _, den64, grads64 = chunked(case, q, k, v, dout, chunk, cp)
    expected = {"out": out64, "dq": grads64.q, "dk": grads64.k, "dv": grads64.v}
    scale = float(abs(dout).max()) * max(float(abs(v).max()), 1) / math.sqrt(case.k[-2])
    for name, x in found.items():
        measured = device_errors(x, expected[name], 0.0 if name == "out" else scale)
        if case.q[-2] < 1000:
            measured = {"max": measured["max"]}
        for measure, error in measured.items():
            assert error <= _limit(BUDGETS["float32"], name, measure), (name, measure, error)
    assert float(abs(den - den64).max() / abs(den64).max()) <= 1e-5


def _limit(budget: Budget, name: str, measure: str) -> float:
    if measure == "max":
        return budget.out if name == "out" else budget.gradient
    return budget.out_long if name == "out" else budget.gradient_long


WIDE_OFFSETS = Case("2^31-elements", *[(17, 1 << 20, 128)] * 3, dtype="bfloat16", causal=True)


@pytest.mark.usefixtures("memory_given_back")
@pytest.mark.parametrize("case", [WIDE_OFFSETS], ids=str)
def test_offsets_of_64_bits(case: Case) -> None:
    """Every head holds the same numbers, the last beyond 2^31 elements: the same bits come out."""
    free = cp.cuda.Device().mem_info[0]
    if free < 60e9:
        pytest.skip(f"needs 60 GB of free GPU memory, and there are {free / 1e9:.0f}")
    heads, *rows = case.q
    one = cp.random.default_rng(0).standard_normal((4, *rows), dtype=cp.float32)
    arrays = [cp.empty(case.q, DTYPES["bfloat16"]) for _ in range(4)]
    for array, head in zip(arrays, one.astype(DTYPES["bfloat16"]), strict=True):
        for i in range(heads):
            array[i].data.copy_from_device_async(head.data, head.nbytes)
    q, k, v, dout = arrays
    out, state, den = la.linear_attention(
        q, k, v, causal=True, return_state=True, return_normalizer=True
    )
    grads = la.linear_attention_vjp(dout, q, k, v, normalizer=den, causal=True)
    for x in (out, den, grads.q, grads.k, grads.v, state.kv):
        bits = x.view(cp.uint16 if x.itemsize == 2 else cp.uint32)
        assert bool((bits[-1] == bits[0]).all()) and bool(bits[0].any())
