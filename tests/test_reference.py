"""The reference against what is simpler still: loops over single weights, and central differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, make_inputs, name_results, reference_results
from piecewise import piecewise, piecewise_results

from la_cupy.reference import linear_attention, linear_attention_vjp
from la_cupy.results import State

TINY = Case("tiny", q=(2, 5, 3), k=(2, 6, 3), v=(2, 6, 2), dtype="float64")
OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "a": -0.2, "b": 0.37},
    {"causal": True, "normalize": False, "a": 3.0, "b": 0.37},
    {"qk_norm": None, "b": 0.1},
    *({"feature_map": name, "causal": True} for name in ("elu1", "relu", "silu", "exp")),
    *({"feature_map": name, "qk_norm": None, "b": 0.1} for name in ("elu1", "relu", "silu", "exp")),
]
SHAPES: list[dict[str, Any]] = [
    {},
    {"initial": "full", "dstate": "full"},
    {"q": (2, 3, 4, 3), "k": (2, 1, 4, 3), "v": (1, 3, 4, 2), "initial": "wide"},
    {"q": (4, 3), "k": (2, 4, 3), "v": (4, 2), "initial": "shared", "dstate": "shared"},
    {"q": (2, 7, 3), "k": (2, 4, 3), "v": (2, 4, 2), "initial": "full", "dstate": "shared"},
]


def plain(q: Any, k: Any, v: Any, state: State | None, case: Case) -> tuple[Any, Any]:
    """(out, den) of one head, one weight at a time."""

    def features(x: Any) -> list[float]:
        length = math.sqrt(sum(t * t for t in x)) if case.qk_norm else 1.0
        y = [t / length for t in x]
        phi = {
            "identity": lambda t: t,
            "elu1": lambda t: t + 1 if t > 0 else math.exp(t),
            "relu": lambda t: max(t, 0.0),
            "silu": lambda t: t / (1 + math.exp(-t)),
            "exp": math.exp,
        }[case.feature_map]
        return [phi(t) for t in y]

    n, m = len(q), len(k)
    out, dens = np.zeros((n, v.shape[1])), np.zeros(n)
    for i in range(n):
        fq = features(q[i])
        num, den = np.zeros(v.shape[1]), 0.0
        for j in range(m):
            if case.causal and j > i + (m - n):
                continue
            w = case.a + case.b * math.fsum(x * y for x, y in zip(fq, features(k[j]), strict=True))
            num, den = num + w * v[j], den + w
        if state is not None:
            num = num + case.a * state.v_sum + case.b * np.asarray(fq) @ state.kv
            den = den + case.a * state.count + case.b * np.asarray(fq) @ state.k_sum
        dens[i] = den
        if not case.normalize:
            out[i] = num
        elif den != 0:
            out[i] = num / den
    return out, dens


def variant(options: dict[str, Any], shapes: dict[str, Any]) -> Case:
    fields = {"q": TINY.q, "k": TINY.k, "v": TINY.v, **shapes, **options}
    return Case("variant", dtype="float64", **fields)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_weight_by_itself(options: dict[str, Any], shapes: dict[str, Any]) -> None:
    case = variant(options, shapes)
    x = make_inputs(case)
    out, _, den = linear_attention(
        x.q, x.k, x.v, initial_state=x.initial_state, **case.reference_options
    )
    lead = case.lead
    q, k, v = (np.broadcast_to(t, (*lead, *t.shape[-2:])) for t in (x.q, x.k, x.v))
    for head in np.ndindex(lead):
        state = None
        if x.initial_state is not None:
            own = (2, 1, 1, 0)
            state = State(
                *(
                    np.broadcast_to(part, (*lead, *part.shape[part.ndim - n :]))[head]
                    for part, n in zip(x.initial_state, own, strict=True)
                )
            )
        expected_out, expected_den = plain(q[head], k[head], v[head], state, case)
        np.testing.assert_allclose(out[head], expected_out, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(den[head], expected_den, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_central_differences(options: dict[str, Any], shapes: dict[str, Any]) -> None:
    case = variant(options, shapes)
    x = make_inputs(case)

    def value(arrays: list[Any]) -> float:
        state = State(*arrays[3:]) if len(arrays) > 3 else None
        out, final, _ = linear_attention(*arrays[:3], initial_state=state, **case.reference_options)
        total = (out * x.dout).sum()
        for part, weight in zip(final, x.dstate or (), strict=False):
            total += (part * weight).sum()
        return float(total)

    grads = linear_attention_vjp(
        x.dout,
        *(x.q, x.k, x.v),
        dstate=x.dstate,
        initial_state=x.initial_state,
        **case.reference_options,
    )
    arrays = [np.array(t, dtype=np.float64) for t in (x.q, x.k, x.v, *(x.initial_state or ()))]
    found = [*grads[:3], *(grads.initial_state or ())]
    h = 1e-5
    for array, gradient in zip(arrays, found, strict=True):
        assert gradient.shape == array.shape
        expected = np.zeros(array.shape)
        for at in np.ndindex(array.shape):
            kept = array[at]
            array[at] = kept + h
            above = value(arrays)
            array[at] = kept - h
            below = value(arrays)
            array[at] = kept
            expected[at] = (above - below) / (2 * h)
        scale = max(np.abs(expected).max(), 1.0)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=3e-8 * scale)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("piece", [1, 3, 16])
def test_pieces_through_the_state_equal_the_whole(options: dict[str, Any], piece: int) -> None:
    shape = (2, 17, 4)
    fields = {"q": shape, "k": shape, "v": shape, "initial": "full", "dstate": "full", **options}
    case = Case("pieces", dtype="float64", **fields)
    x = make_inputs(case)
    whole, pieces = reference_results(case, x), piecewise_results(case, x, piece)
    for name, expected in whole.items():
        np.testing.assert_allclose(pieces[name], expected, rtol=1e-10, atol=1e-11, err_msg=name)


def test_pieces_without_states() -> None:
    shape = (1, 40, 4)
    case = Case("pieces-alone", q=shape, k=shape, v=shape, dtype="float64", causal=True)
    x = make_inputs(case)
    out, state, den, grads = piecewise(case, x, 16)
    pieces = name_results(out=out, state=state, den=den, grads=grads)
    for name, expected in reference_results(case, x).items():
        np.testing.assert_allclose(pieces[name], expected, rtol=1e-10, atol=1e-11, err_msg=name)


def test_rows_without_a_key_are_zero_with_zero_gradient() -> None:
    case = Case("blind", q=(10, 3), k=(7, 3), v=(7, 2), dtype="float64", causal=True)
    x = make_inputs(case)
    out, _, den = linear_attention(x.q, x.k, x.v, causal=True)
    grads = linear_attention_vjp(x.dout, x.q, x.k, x.v, causal=True)
    assert (den[:3] == 0).all() and (out[:3] == 0).all() and (grads.q[:3] == 0).all()
    assert (den[3:] != 0).all() and (out[3:] != 0).all() and (grads.q[3:] != 0).all()


@pytest.mark.parametrize("size", [1e-300, 1e-25, 1e25, 1e300])
def test_the_norm_takes_rows_of_any_size(size: float) -> None:
    x = make_inputs(TINY)
    expected = linear_attention(x.q, x.k, x.v)[0]
    found = linear_attention(x.q * size, x.k * size, x.v)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_the_normalised_operator_does_not_notice_a_constant_in_v() -> None:
    x = make_inputs(TINY)
    before = linear_attention_vjp(x.dout, x.q, x.k, x.v)
    after = linear_attention_vjp(x.dout, x.q, x.k, x.v + 100)
    np.testing.assert_allclose(after.q, before.q, atol=1e-12)
    np.testing.assert_allclose(after.k, before.k, atol=1e-12)


def test_every_case_of_the_table_is_sound() -> None:
    for case in CASES:
        x = make_inputs(case)
        for name, value in reference_results(case, x).items():
            assert np.isfinite(value).all(), f"{case}: {name}"
