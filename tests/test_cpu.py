"""The CPU backend: the whole table, and what the operator promises beyond single values."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tracemalloc
from typing import Any

import benchmark_cpu
import numpy as np
import pytest
from cases import (
    BY_NAME,
    CASES,
    DTYPES,
    LONG,
    Case,
    Inputs,
    check,
    make_inputs,
    name_results,
    reference_results,
)
from measures import frobenius_error
from piecewise import piecewise_results

import la_cupy as la
from la_cupy import _cpu_blocks
from la_cupy.problem import forward_problem


def run(case: Case, x: Inputs) -> dict[str, Any]:
    """All results of a case, as a user gets them."""
    options = {**case.options, "initial_state": x.initial_state}
    out, state, den = la.linear_attention(
        x.q, x.k, x.v, return_state=True, return_normalizer=True, **options
    )
    grads = la.linear_attention_vjp(
        x.dout, x.q, x.k, x.v, normalizer=den, dstate=x.dstate, **options
    )
    return name_results(out=out, state=state, den=den, grads=grads)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit, signs of zero included."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.tobytes() == expected[name].tobytes(), name


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table(case: Case) -> None:
    x = make_inputs(case)
    before = [array.tobytes() for array in x.arrays()]
    results = run(case, x)
    assert [array.tobytes() for array in x.arrays()] == before, "an input was modified"
    check(case, x, results, reference_results(case, x))


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_sequences(case: Case) -> None:
    x = make_inputs(case)
    check(case, x, run(case, x), piecewise_results(case, x))


# --- state


@pytest.mark.parametrize(
    "name", ["causal-float32-state", "causal-grouped-float32", "causal-unnormalised"]
)
@pytest.mark.parametrize("cuts", [(0, 1), (13,), (5, 6, 20)], ids=str)
def test_pieces_through_the_state_equal_the_whole(name: str, cuts: tuple[int, ...]) -> None:
    case = BY_NAME[name]
    x = make_inputs(case)
    bounds = [0, *cuts, x.q.shape[-2]]
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    state, outs, dens, states = x.initial_state, [], [], []
    for rows in parts:
        states.append(state)
        q, k, v = (t[..., rows, :] for t in (x.q, x.k, x.v))
        out, state, den = la.linear_attention(
            q, k, v, initial_state=state, return_state=True, return_normalizer=True, **case.options
        )
        outs.append(out)
        dens.append(den)
    dstate, pieces = x.dstate, []
    for rows, before, den in zip(parts[::-1], states[::-1], dens[::-1], strict=True):
        q, k, v = (t[..., rows, :] for t in (x.q, x.k, x.v))
        grads = la.linear_attention_vjp(
            x.dout[..., rows, :],
            *(q, k, v),
            normalizer=den,
            initial_state=before,
            dstate=dstate,
            **case.options,
        )
        dstate = grads.initial_state
        pieces.insert(0, grads)
    joined = la.Gradients(
        *(np.concatenate([grads[i] for grads in pieces], axis=-2) for i in range(3)), dstate
    )
    out, den = np.concatenate(outs, axis=-2), np.concatenate(dens, axis=-1)
    results = name_results(out=out, state=state, den=den, grads=joined)
    check(case, x, results, reference_results(case, x))


def test_many_decode_steps_equal_one_pass() -> None:
    q, k, v = (normal(2, 1500, 8, seed=i, dtype="bfloat16") for i in range(3))
    options: dict[str, Any] = {"causal": True, "feature_map": "elu1"}
    whole, final = la.linear_attention(q, k, v, return_state=True, **options)
    state, rows = None, []
    for i in range(q.shape[-2]):
        one = (t[:, i : i + 1] for t in (q, k, v))
        out, state = la.linear_attention(*one, initial_state=state, return_state=True, **options)
        rows.append(out)
    steps = np.concatenate(rows, axis=-2).astype(np.float64)
    np.testing.assert_allclose(steps, whole.astype(np.float64), rtol=2**-7, atol=1e-6)
    for found, expected in zip(state or (), final, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_keys_without_rows_update_the_state() -> None:
    k, v = normal(2, 9, 4), normal(2, 9, 3, seed=1)
    out, state = la.linear_attention(k[:, :0], k, v, return_state=True)
    assert out.shape == (2, 0, 3)
    assert (state.count == 9).all()
    np.testing.assert_allclose(state.v_sum, v.sum(1), rtol=1e-6)


def test_no_keys_pass_the_state_through() -> None:
    k, v = normal(2, 9, 4), normal(2, 9, 3, seed=1)
    _, state = la.linear_attention(k, k, v, return_state=True)
    for shape in ((2, 5, 4), (2, 0, 4)):
        q, none = np.ones(shape, np.float32), (k[:, :0], v[:, :0])
        _, same = la.linear_attention(q, *none, initial_state=state, return_state=True)
        assert_same(same._asdict(), state._asdict())


# --- what is returned, and where


def test_every_form_of_the_call_gives_the_same() -> None:
    q = k = v = normal(2, 40, 8)
    out = la.linear_attention(q, k, v, causal=True)
    out_1, state = la.linear_attention(q, k, v, causal=True, return_state=True)
    out_2, den = la.linear_attention(q, k, v, causal=True, return_normalizer=True)
    both = la.linear_attention(q, k, v, causal=True, return_state=True, return_normalizer=True)
    assert_same({"1": out_1, "2": out_2, "3": both[0]}, {"1": out, "2": out, "3": out})
    assert_same(both[1]._asdict(), state._asdict())
    assert_same({"den": both[2]}, {"den": den})
    zeros = la.State(*(np.zeros_like(part) for part in state))
    assert_same(
        {"out": la.linear_attention(q, k, v, causal=True, initial_state=zeros)}, {"out": out}
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [1, 2])
def test_out_is_written_and_returned(dtype: str, step: int) -> None:
    q, k, v = (normal(3, 30, 8, seed=i, dtype=dtype) for i in range(3))
    expected = la.linear_attention(q, k, v, causal=True)
    parent = np.full((3, 30 * step, 8), np.nan, DTYPES[dtype])
    out = parent[:, ::step]
    assert la.linear_attention(q, k, v, causal=True, out=out) is out
    assert_same({"out": np.ascontiguousarray(out)}, {"out": expected})
    assert np.isnan(parent[:, 1::2].astype(np.float32)).all() or step == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_results_are_rounded_once(dtype: str) -> None:
    q, k, v, dout = (normal(2, 100, 8, seed=i, dtype=dtype) for i in range(4))
    wide = [t.astype(np.float32) for t in (q, k, v, dout)]
    out = la.linear_attention(q, k, v, causal=True)
    assert_same(
        {"out": out}, {"out": la.linear_attention(*wide[:3], causal=True).astype(DTYPES[dtype])}
    )
    found = la.linear_attention_vjp(dout, q, k, v, causal=True)
    expected = la.linear_attention_vjp(wide[3], *wide[:3], causal=True)
    for name in ("q", "k", "v"):
        rounded = getattr(expected, name).astype(DTYPES[dtype])
        assert_same({name: getattr(found, name)}, {name: rounded})


@pytest.mark.parametrize("name", ["causal-float32-state", "N<M", "causal-zero_rows-a=0.0"])
def test_a_normalizer_that_is_not_passed_is_recomputed(name: str) -> None:
    case = BY_NAME[name]
    x = make_inputs(case)
    grads = la.linear_attention_vjp(
        x.dout, *(x.q, x.k, x.v), dstate=x.dstate, initial_state=x.initial_state, **case.options
    )
    expected = run(case, x)
    found = name_results(grads=grads)
    assert_same(found, {name: expected[name] for name in found})


# --- numbers


def test_small_signed_sums() -> None:
    options: dict[str, Any] = {"a": 0.0, "qk_norm": None, "return_normalizer": True}
    v = normal(4, 1, 3)
    k = np.ones((4, 1, 2), np.float32)
    q = np.zeros((4, 1, 2), np.float32)
    q[:, 0, 0] = [1e-6, -1e-6, 1e-8, -1e-8]
    out, den = la.linear_attention(q, k, v, **options)
    np.testing.assert_allclose(out, v, rtol=1e-6)
    q[1] = [1, -1]  # the sum is exactly zero in this head only
    out, den = la.linear_attention(q, k, v, **options)
    grads = la.linear_attention_vjp(np.ones_like(v), q, k, v, a=0.0, qk_norm=None)
    assert (den[1] == 0).all() and (out[1] == 0).all()
    assert all((g[1] == 0).all() for g in grads[:3])
    np.testing.assert_allclose(out[[0, 2, 3]], v[[0, 2, 3]], rtol=1e-6)
    assert all(np.isfinite(g).all() for g in grads[:3])


def test_b_zero_is_the_running_mean() -> None:
    q, k, v, dout = (normal(2, 50, 4, seed=i) for i in range(4))
    out = la.linear_attention(q, k, v, causal=True, b=0.0)
    mean = v.astype(np.float64).cumsum(1) / np.arange(1, 51)[:, None]
    np.testing.assert_allclose(out, mean, rtol=1e-5, atol=1e-6)
    grads = la.linear_attention_vjp(dout, q, k, v, causal=True, b=0.0)
    assert (grads.q == 0).all() and (grads.k == 0).all()


@pytest.mark.parametrize("constant", [1.0, 100.0, 1024.0])
def test_a_constant_in_v_changes_neither_dq_nor_dk(constant: float) -> None:
    q, k, v, dout = (normal(2, 600, 16, seed=i) for i in range(4))
    v = np.round(v * 256) / 256  # so that v + constant is exact, and all that changes is the mean
    before = la.linear_attention_vjp(dout, q, k, v, causal=True)
    after = la.linear_attention_vjp(dout, q, k, v + np.float32(constant), causal=True)
    for name in ("q", "k"):
        expected = getattr(before, name)
        error = np.linalg.norm(getattr(after, name) - expected) / np.linalg.norm(expected)
        assert error <= 1e-5, name


def test_a_trend_in_v_costs_no_accuracy() -> None:
    # one mean for all keys would leave ten times the error in dq: the backward's must run along
    n, shape = 16384, (1, 16384, 32)
    case = Case("trend", q=shape, k=shape, v=shape, causal=True, data="biased")
    x = make_inputs(case)
    x = x._replace(v=x.v + np.linspace(-20, 20, n, dtype=np.float32)[:, None])
    results, expected = run(case, x), piecewise_results(case, x)
    check(case, x, results, expected)
    assert frobenius_error(results["dq"], expected["dq"]) <= 1e-5


@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_head(where: str, value: float) -> None:
    x = {name: normal(3, 70, 8, seed=i) for i, name in enumerate(("q", "k", "v", "dout"))}
    before = la.linear_attention_vjp(x["dout"], x["q"], x["k"], x["v"], causal=True)
    out = la.linear_attention(x["q"], x["k"], x["v"], causal=True)
    x[where][1, 20, 3] = value
    after = la.linear_attention_vjp(x["dout"], x["q"], x["k"], x["v"], causal=True)
    bad = la.linear_attention(x["q"], x["k"], x["v"], causal=True)
    assert where == "dout" or not np.isfinite(bad[1]).all()
    assert not all(np.isfinite(g[1]).all() for g in after[:3])
    others = [0, 2]
    assert_same({"out": bad[others]}, {"out": out[others]})
    for a, b in zip(after[:3], before[:3], strict=True):
        assert_same({"gradient": a[others]}, {"gradient": b[others]})


def test_results_repeat_bit_for_bit() -> None:
    case = BY_NAME["causal-grouped-float32"]
    x = make_inputs(case)
    first = run(case, x)
    for _ in range(5):
        assert_same(run(case, x), first)


def test_grouped_queries_equal_repeated_keys() -> None:
    q, dout = normal(2, 6, 40, 8), normal(2, 6, 40, 8, seed=1)
    k, v = normal(2, 2, 40, 8, seed=2), normal(2, 2, 40, 8, seed=3)
    repeated = [np.repeat(t, 3, axis=1) for t in (k, v)]
    grouped = [t[:, :, None] for t in (k, v)]
    split = (2, 2, 3, 40, 8)
    out = la.linear_attention(q.reshape(split), *grouped, causal=True)
    expected = la.linear_attention(q, *repeated, causal=True)
    np.testing.assert_allclose(out.reshape(q.shape), expected, rtol=1e-5, atol=1e-6)
    grads = la.linear_attention_vjp(dout.reshape(split), q.reshape(split), *grouped, causal=True)
    plain = la.linear_attention_vjp(dout, q, *repeated, causal=True)
    np.testing.assert_allclose(grads.q.reshape(q.shape), plain.q, rtol=1e-4, atol=1e-6)
    for name in ("k", "v"):
        summed = getattr(plain, name).reshape(2, 2, 3, 40, 8).sum(2, keepdims=True)
        np.testing.assert_allclose(getattr(grads, name), summed, rtol=1e-4, atol=1e-5)


# --- how the work is cut up must not show


@pytest.mark.parametrize("chunk", [1, 16, 100, 193, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_every_chunk_size_gives_the_same(
    chunk: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (2, 193, 16)
    fields: dict[str, Any] = {"initial": "full", "dstate": "full", "data": "biased"}
    case = Case("chunks", q=shape, k=shape, v=shape, causal=causal, **fields)
    x = make_inputs(case)
    monkeypatch.setattr(_cpu_blocks, "CHUNK", chunk)
    monkeypatch.setattr(_cpu_blocks, "LONG_CHUNK", chunk)
    check(case, x, run(case, x), reference_results(case, x))


@pytest.mark.parametrize(
    "case", [c for c in CASES if len(c.lead) > 1 and not c.causal and min(c.lead)], ids=str
)
def test_heads_in_blocks_of_one_give_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu_blocks, "WORKING_SET", 0)
    x = make_inputs(case)
    check(case, x, run(case, x), reference_results(case, x))


def test_blocks_cover_every_head_once() -> None:
    for lead in ((), (1,), (7,), (3, 1, 5), (2, 300, 3), (0, 4), (4, 0)):
        for case in (BY_NAME["causal-float32"], BY_NAME["float32"], BY_NAME["length-1"]):
            x = make_inputs(case)
            problem = forward_problem(x.q, x.k, x.v, causal=case.causal)
            seen = np.zeros(lead, int)
            for block in _cpu_blocks.blocks(lead, problem):
                seen[block] += 1
            assert (seen == 1).all()


def test_many_short_heads() -> None:
    case = Case("many", q=(7000, 16, 4), k=(7000, 16, 4), v=(7000, 16, 4), causal=True)
    x = make_inputs(case)
    check(case, x, run(case, x), reference_results(case, x))


# --- memory and time


def peak_of(function: Any) -> int:
    """Bytes allocated at most, beyond what was there before."""
    function()
    tracemalloc.start()
    function()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_results_only(causal: bool) -> None:
    n, heads, d = 32768, 4, 16
    q, dout = normal(heads, n, d), normal(heads, n, d, seed=1)
    k, v = normal(1, n, d, seed=2), normal(1, n, d, seed=3)
    results = q.nbytes + heads * n * 4
    room = 3 * _cpu_blocks.WORKING_SET
    out = np.empty_like(q)
    den = la.linear_attention(q, k, v, causal=causal, return_normalizer=True)[1]
    forward = peak_of(lambda: la.linear_attention(q, k, v, causal=causal, out=out))
    assert forward <= den.nbytes + room
    backward = peak_of(
        lambda: la.linear_attention_vjp(dout, q, k, v, normalizer=den, causal=causal)
    )
    assert backward <= results + k.nbytes + v.nbytes + room


def test_the_benchmark_runs_as_it_is() -> None:
    command = [sys.executable, benchmark_cpu.__file__, "--heads", "2", "--n", "1024"]
    done = subprocess.run(
        [*command, "--softmax-n", "512"], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout and "2 N" in done.stdout


def test_the_benchmark_reports_no_speed_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = la.linear_attention
    monkeypatch.setattr(
        la, "linear_attention", lambda *args, **options: 1.001 * right(*args, **options)
    )
    with pytest.raises(SystemExit, match="wrong result"):
        benchmark_cpu.measure(heads=1, n=100, width=8, softmax_n=50)


@pytest.mark.slow
def test_time_is_linear_and_far_below_softmax_attention() -> None:
    # other work on the machine can spoil a measurement, but cannot make three too good
    for attempt in range(3):
        ratios = benchmark_cpu.measure()
        if ratios.softmax >= 50 and ratios.doubling <= 2.3:
            return
        print(f"attempt {attempt}: {ratios}")
    raise AssertionError(f"{ratios}: softmax must be at least 50, doubling at most 2.3")
