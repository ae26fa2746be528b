"""Properties of the CPU backend over drawn shapes, strides, types and options."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import DTYPES, LAYOUTS, Case, check, make_inputs, name_results, reference_results
from hypothesis import assume, given, note
from hypothesis import strategies as st

import la_cupy as la
from la_cupy import reference

kinds = st.sampled_from(sorted(DTYPES))
sizes = st.sampled_from([0, 1, 2, 3, 7, 16, 33, 63, 64, 65, 90, 130])
widths = st.integers(1, 12)
seeds = st.integers(0, 2**16)


@st.composite
def leads(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Leading axes of q, k, v that broadcast, each with axes of extent 1 or missing axes."""
    full = draw(st.lists(st.sampled_from([1, 2, 3, 0]), max_size=3))
    result = []
    for _ in range(3):
        own = [n if draw(st.booleans()) else 1 for n in full]
        drop = draw(st.integers(0, len(full)))
        while drop and any(n != 1 for n in own[:drop]):
            drop -= 1
        result.append(tuple(own[drop:]))
    return tuple(result)


@st.composite
def operators(draw: st.DrawFn) -> dict[str, Any]:
    """Options for which every weight is positive or nearly so: den is not far below sum |w|."""
    norm = draw(st.sampled_from(["l2", "l2", None]))
    feature_map = draw(st.sampled_from(["identity", "elu1", "relu", "silu", "exp"]))
    signed = feature_map in ("identity", "silu")
    small = 0.02 if norm is None and signed else 0.9
    b = draw(st.floats(-small if norm == "l2" and signed else 0.0, small))
    a = draw(st.sampled_from([1.0, 3.0, 0.25])) if not signed else draw(st.floats(1, 3))
    return {
        "a": a,
        "b": b,
        "qk_norm": norm,
        "feature_map": feature_map,
        "causal": draw(st.booleans()),
        "normalize": draw(st.booleans()),
    }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    q, k, v = draw(leads())
    n, m, d, e = draw(sizes), draw(sizes), draw(widths), draw(widths)
    fields: dict[str, Any] = {
        "dtype": draw(kinds),
        "k_dtype": draw(st.none() | kinds),
        "v_dtype": draw(st.none() | kinds),
        "dout_dtype": draw(st.none() | kinds),
        "initial": draw(st.sampled_from([None, "full", "shared", "wide"])),
        "initial_dtype": draw(st.none() | st.sampled_from(["float32", "float64"])),
        "dstate": draw(st.sampled_from([None, "full", "shared"])),
        "layout": draw(st.sampled_from([x for x in LAYOUTS if x != "scalar"])),
        "dout_layout": draw(st.sampled_from([x for x in LAYOUTS if x != "swapaxes"])),
        **draw(operators()),
    }
    case = Case("drawn", q=(*q, n, d), k=(*k, m, d), v=(*v, m, e), **fields)
    note(repr(case))
    return case


def conditioned(x: Any, case: Case) -> bool:
    """Whether den is not far below the sum of |w|, as the budgets ask."""
    options = {**case.reference_options, "initial_state": x.initial_state}
    _, _, den = reference.linear_attention(x.q, x.k, x.v, **options)
    keys = x.k.shape[-2] + (10 if x.initial_state is not None else 0)
    seen = den[den != 0]
    return (
        not case.normalize or seen.size == 0 or bool((np.abs(seen) >= 0.05 * case.a).all() and keys)
    )


@given(cases(), seeds)
def test_results_and_gradients_match_the_reference(case: Case, seed: int) -> None:
    x = make_inputs(case, seed)
    assume(conditioned(x, case))
    before = [array.tobytes() for array in x.arrays()]
    options = {**case.options, "initial_state": x.initial_state}
    out, state, den = la.linear_attention(
        x.q, x.k, x.v, return_state=True, return_normalizer=True, **options
    )
    grads = la.linear_attention_vjp(
        x.dout, x.q, x.k, x.v, normalizer=den, dstate=x.dstate, **options
    )
    assert [array.tobytes() for array in x.arrays()] == before, "an input was modified"
    check(case, x, name_results(out, state, den, grads), reference_results(case, x))


@given(st.integers(2, 150), st.data(), kinds, seeds, st.booleans())
def test_cut_anywhere(n: int, data: st.DataObject, kind: str, seed: int, elu1: bool) -> None:
    cut = data.draw(st.integers(0, n))
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, n, 5)).astype(DTYPES[kind]) for _ in range(3))
    feature_map = "elu1" if elu1 else "identity"
    options: dict[str, Any] = {"causal": True, "b": 0.9, "feature_map": feature_map}
    whole, final = la.linear_attention(q, k, v, return_state=True, **options)
    first, middle = la.linear_attention(
        *(x[:, :cut] for x in (q, k, v)), return_state=True, **options
    )
    second, end = la.linear_attention(
        *(x[:, cut:] for x in (q, k, v)), initial_state=middle, return_state=True, **options
    )
    pieces = np.concatenate([first, second], axis=-2).astype(np.float64)
    step = 2.0**-7 if kind in ("bfloat16", "float16") else 2e-5
    np.testing.assert_allclose(pieces, whole.astype(np.float64), rtol=step, atol=step)
    for found, expected in zip(end, final, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@given(st.integers(1, 140), st.integers(1, 140), seeds)
def test_without_a_mask_the_order_of_keys_does_not_matter(n: int, m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((n, 6)), rng.standard_normal((m, 6)), rng.standard_normal((m, 4))
    order = rng.permutation(m)
    a = la.linear_attention(q, k, v, feature_map="elu1")
    b = la.linear_attention(q, k[order], v[order], feature_map="elu1")
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@given(st.integers(1, 140), st.integers(1, 140), st.data(), seeds)
def test_a_row_sees_no_later_key(n: int, m: int, data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((rows, 4)).astype(np.float32) for rows in (n, m, m))
    row = data.draw(st.integers(0, n - 1))
    last = row + m - n
    before = la.linear_attention(q, k, v, causal=True)
    k[max(last + 1, 0) :], v[max(last + 1, 0) :] = 7.0, -1e6
    after = la.linear_attention(q, k, v, causal=True)
    assert after[: row + 1].tobytes() == before[: row + 1].tobytes()


@given(st.integers(1, 140), st.integers(1, 140), st.booleans(), seeds)
def test_linear_in_v(n: int, m: int, causal: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v, u = (rng.standard_normal((rows, 4)) for rows in (n, m, m, m))
    a, b, both = (
        la.linear_attention(q, k, x, causal=causal, feature_map="elu1") for x in (v, u, 2 * v + u)
    )
    np.testing.assert_allclose(2 * a + b, both, rtol=1e-10, atol=1e-11)
