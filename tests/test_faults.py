"""Faults that users of such libraries met, one test a line of faults.md, on both array types.

What the case table covers (lengths, strides, broadcasting, mixed types, empty arrays, factors,
16-bit overflow) is not repeated here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import BY_NAME, Case, check, make_inputs, name_results, reference_results
from gpu_helpers import call, cp, same_bits, to_host
from inputs import Inputs, copy_with_strides

import la_cupy as la

F32 = BY_NAME["causal-float32"]
BF16 = BY_NAME["causal-bfloat16"]


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """The array module under test."""
    if request.param == "numpy":
        return np
    request.getfixturevalue("warm_kernels")
    return cp


def on(xp: Any, inputs: Inputs) -> Inputs:
    """The inputs as arrays of `xp`, in memory of their own."""
    return inputs.map(lambda x: copy_with_strides(x, xp) if x.ndim else xp.array(x))


def both(*cases: Case) -> Any:
    """The test for each of these cases."""
    return pytest.mark.parametrize("case", cases, ids=str)


PIECES = [
    Case(f"{dtype}-{norm}", *[(2, 193, 16)] * 3, dtype=dtype, causal=True, qk_norm=norm, b=b)
    for dtype in ("float32", "bfloat16")
    for norm, b in (("l2", 1.0), (None, 0.03))
]


@both(*(replace(case, initial="full", dstate="full") for case in PIECES))
@pytest.mark.parametrize("cuts", [(1,), (64,), (192,), (5, 5, 70, 129)], ids=str)
def test_pieces_carried_through_the_state_equal_the_whole(
    case: Case, cuts: tuple[int, ...], xp: Any
) -> None:
    """Values and all gradients, wherever the sequence is cut; an empty piece among them."""
    inputs = make_inputs(case)
    x = on(xp, inputs)
    ends = [0, *cuts, case.q[-2]]
    parts = [slice(i, j) for i, j in itertools.pairwise(ends)]
    state, states, outs, dens = x.initial_state, [], [], []
    for part in parts:
        states.append(state)
        out, state, den = la.linear_attention(
            *(a[..., part, :] for a in (x.q, x.k, x.v)),
            initial_state=state,
            return_state=True,
            return_normalizer=True,
            **case.options,
        )
        outs.append(out)
        dens.append(den)
    dstate, grads = x.dstate, []
    for part, before, den in zip(reversed(parts), reversed(states), reversed(dens), strict=True):
        grads.append(
            la.linear_attention_vjp(
                *(a[..., part, :] for a in (x.dout, x.q, x.k, x.v)),
                normalizer=den,
                initial_state=before,
                dstate=dstate,
                **case.options,
            )
        )
        dstate = grads[-1].initial_state
    dq, dk, dv = (np.concatenate([to_host(g[i]) for g in grads[::-1]], -2) for i in range(3))
    results = name_results(
        out=np.concatenate([to_host(out) for out in outs], -2),
        den=np.concatenate([to_host(den) for den in dens], -1),
        state=to_host(state),
        grads=la.Gradients(dq, dk, dv, to_host(dstate)),
    )
    check(case, inputs, results, reference_results(case, inputs))


DECODE = [
    Case(f"decode-{dtype}-{feature}", *[(2, 3, 300, 16)] * 3, dtype=dtype, causal=True,
         feature_map=feature)
    for dtype, feature in (("float32", "identity"), ("bfloat16", "identity"), ("bfloat16", "elu1"))
]  # fmt: skip


@both(*DECODE)
def test_hundreds_of_decode_steps_equal_one_pass(case: Case, xp: Any) -> None:
    inputs = make_inputs(case)
    x = on(xp, inputs)
    state, outs = None, []
    for i in range(case.q[-2]):
        out, state = la.linear_attention(
            *(a[..., i : i + 1, :] for a in (x.q, x.k, x.v)),
            initial_state=state,
            return_state=True,
            **case.options,
        )
        outs.append(out)
    results = name_results(
        out=np.concatenate([to_host(out) for out in outs], -2), state=to_host(state)
    )
    check(case, inputs, results, reference_results(case, inputs), set(results))


@both(F32, BF16)
def test_an_option_left_out_is_its_neutral_value(case: Case, xp: Any) -> None:
    x = on(xp, make_inputs(case))
    plain = {"causal": True}
    neutral = {
        **plain,
        "a": 1.0,
        "b": 1.0,
        "qk_norm": "l2",
        "feature_map": "identity",
        "normalize": True,
        "precision": "highest",
        "initial_state": None,
    }
    out = la.linear_attention(x.q, x.k, x.v, **plain)
    grads = la.linear_attention_vjp(x.dout, x.q, x.k, x.v, **plain)
    ways = {
        "options": la.linear_attention(x.q, x.k, x.v, **neutral),
        "state": la.linear_attention(x.q, x.k, x.v, **plain, return_state=True)[0],
        "normalizer": la.linear_attention(x.q, x.k, x.v, **plain, return_normalizer=True)[0],
        "out": la.linear_attention(x.q, x.k, x.v, **neutral, out=xp.empty_like(out)),
    }
    for name, other in ways.items():
        assert to_host(other).tobytes() == to_host(out).tobytes(), name
    other = la.linear_attention_vjp(x.dout, x.q, x.k, x.v, **neutral, normalizer=None, dstate=None)
    assert same_bits(name_results(grads=grads), name_results(grads=other)) == []


@both(F32)
def test_a_state_of_zeros_is_no_state(case: Case, xp: Any) -> None:
    inputs = make_inputs(case)
    x = on(xp, inputs)
    d, e = case.q[-1], case.v[-1]
    zeros = la.State(*(xp.zeros((2, *own), np.float32) for own in ((d, e), (d,), (e,), ())))
    results = call(case, x._replace(initial_state=zeros, dstate=zeros))
    expected = reference_results(case, inputs)
    check(case, inputs, to_host(results), expected, set(expected))


@both(F32)
@pytest.mark.parametrize(
    "one", [1, np.float32(1), np.int32(1), np.float64(1), np.array(1.0), np.array(1, np.int64)]
)
def test_scalars_of_any_kind(case: Case, one: Any, xp: Any) -> None:
    x = on(xp, make_inputs(case))
    expected = la.linear_attention(x.q, x.k, x.v, a=1.0, b=1.0)
    out = la.linear_attention(x.q, x.k, x.v, a=one, b=one)
    assert to_host(out).tobytes() == to_host(expected).tobytes()


EIGHTS = Case(
    "eights-4096", *[(1, 4096, 16)] * 3, dtype="float16", a=0.0, qk_norm=None, data="eights"
)


@both(EIGHTS, replace(EIGHTS, name="eights-4096-causal", causal=True))
def test_sums_beyond_float16(case: Case, xp: Any) -> None:
    x = on(xp, make_inputs(case))
    results = to_host(call(case, x))
    assert (results["out"] == 8).all()
    assert all(np.isfinite(results[name]).all() for name in ("dq", "dk", "dv", "den"))


GROUPED = [
    Case(
        f"6-on-2-{dtype}", (2, 3, 40, 16), (2, 1, 40, 16), (2, 1, 40, 24), dtype=dtype, causal=True
    )
    for dtype in ("float32", "bfloat16")
]


@both(*GROUPED)
def test_grouped_heads_equal_repeated_ones(case: Case, xp: Any) -> None:
    """6 query heads on 2 key heads; dk and dv are those of the repeated heads, summed."""
    x = make_inputs(case)
    repeated = x._replace(k=np.repeat(x.k, 3, axis=1), v=np.repeat(x.v, 3, axis=1))
    results, longer = (to_host(call(case, on(xp, y))) for y in (x, repeated))
    tolerance = 1e-5 if case.dtype == "float32" else 2e-2
    for name in ("out", "dq", "den"):
        a, b = (y[name].astype(float) for y in (results, longer))
        assert abs(a - b).max() <= tolerance * abs(b).max(), name
    for name in ("dk", "dv"):
        a, b = results[name].astype(float), longer[name].astype(float).sum(1, keepdims=True)
        assert abs(a - b).max() <= 2 * tolerance * abs(b).max(), name


@both(GROUPED[0])
def test_heads_that_do_not_divide(case: Case, xp: Any) -> None:
    q, k = xp.zeros((7, 40, 16), np.float32), xp.zeros((2, 40, 16), np.float32)
    with pytest.raises(ValueError, match="7"):
        la.linear_attention(q, k, k)


@both(F32, BF16)
@pytest.mark.parametrize("causal", [False, True])
def test_without_slope_out_is_the_running_mean(case: Case, causal: bool, xp: Any) -> None:
    case = replace(case, b=0.0, causal=causal)
    inputs = make_inputs(case)
    results = to_host(call(case, on(xp, inputs)))
    v = inputs.v.astype(np.float64)
    n = v.shape[-2]
    running = v.cumsum(-2) / np.arange(1, n + 1)[:, None]
    mean = running if causal else np.broadcast_to(v.mean(-2, keepdims=True), v.shape)
    check(case, inputs, results, reference_results(case, inputs) | {"out": mean})
    assert not results["dq"].any() and not results["dk"].any()


REPEATS = [
    Case(f"repeats-{dtype}-{causal}", (2, 2, 3000, 32), (2, 1, 3000, 32), (1, 2, 3000, 32),
         dtype=dtype, causal=causal, initial="full", dstate="full")
    for dtype, causal in (("float32", True), ("bfloat16", True), ("bfloat16", False))
]  # fmt: skip


@both(*REPEATS)
def test_runs_are_bitwise_equal(case: Case, xp: Any) -> None:
    """Segments, states, and gradients summed over different axes of k and v."""
    x = on(xp, make_inputs(case))
    first = to_host(call(case, x))
    for run in range(1, 20 if xp is cp else 3):
        assert same_bits(first, to_host(call(case, x))) == [], f"run {run}"


@both(F32, BF16)
def test_out_is_written_where_it_lies(case: Case, xp: Any) -> None:
    """Contiguous, rows apart, heads apart, transposed, reversed; and nothing beside it."""
    x = on(xp, make_inputs(case))
    options = {"causal": True}
    expected = to_host(la.linear_attention(x.q, x.k, x.v, **options))
    heads, n, e = expected.shape

    def parent(*shape: int) -> Any:
        return xp.full(shape, -7, np.float32).astype(expected.dtype)

    memory = [parent(heads, n, e), parent(heads, n, 3 * e), parent(n, heads, e)]
    memory += [parent(heads, e, n), parent(heads, n, e), parent(heads, n, e + 1)]
    views = [
        memory[0],
        memory[1][..., e : 2 * e],
        memory[2].swapaxes(0, 1),
        memory[3].swapaxes(1, 2),
        memory[4][:, ::-1],
        memory[5][..., 1:],
    ]
    for whole, out in zip(memory, views, strict=True):
        result, _ = la.linear_attention(x.q, x.k, x.v, out=out, return_normalizer=True, **options)
        assert result is out
        assert np.array_equal(to_host(out).astype(float), expected.astype(float)), out.strides
        beside = (to_host(whole).astype(float) == -7).sum()
        assert beside == whole.size - out.size, out.strides


@both(F32)
def test_out_that_cannot_take_the_result(case: Case, xp: Any) -> None:
    x = on(xp, make_inputs(case))
    wide = xp.empty((*x.q.shape[:-1], 2 * x.q.shape[-1]), np.float32)
    for out in (x.q, x.v[..., ::-1], wide, wide[:1], xp.empty(x.q.shape, np.float16)):
        with pytest.raises(ValueError, match="out"):
            la.linear_attention(x.q, x.k, x.v, out=out)


@both(replace(F32, name="one-head-of-nan", initial="full", dstate="full"))
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nothing_spreads_from_head_to_head(case: Case, xp: Any) -> None:
    """NaN in one head of k, v and dout leaves the bits of every other head alone."""
    clean, spoilt = on(xp, make_inputs(case)), on(xp, make_inputs(case))
    for x in (spoilt.k, spoilt.v, spoilt.dout):
        x[0, 3] = float("nan")
    before, after = (to_host(call(case, x)) for x in (clean, spoilt))
    for name, x in before.items():
        assert x[1:].tobytes() == after[name][1:].tobytes(), name


@both(F32, BF16)
def test_a_constant_on_v_leaves_dq_and_dk(case: Case, xp: Any) -> None:
    """8 is added exactly: v is rounded to eighths before."""
    inputs = make_inputs(case)
    v = (np.round(inputs.v.astype(float) * 8) / 8).astype(inputs.v.dtype)
    x = on(xp, inputs._replace(v=v))
    shifted = on(xp, inputs._replace(v=v + np.asarray(8, v.dtype)))
    plain, moved = to_host(call(case, x)), to_host(call(case, shifted))
    tolerance = 1e-4 if case.dtype == "float32" else 4e-2
    for name in ("dq", "dk"):
        a, b = plain[name].astype(float), moved[name].astype(float)
        assert abs(a - b).max() <= tolerance * abs(a).max(), name
