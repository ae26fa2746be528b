"""What is checked in every call, and what once for all calls alike."""

import threading
import time
from typing import Any

import fakes
import ml_dtypes
import numpy as np
import pytest
from fakes import Backend, make_state, ndarray, on_gpu, qkv

import la_cupy as la
from la_cupy import arrays, checked

backends, cpu, gpu = fakes.backends, fakes.cpu, fakes.gpu


class Quantity(np.ndarray):
    pass


# -- out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_out_must_not_share_memory(backends: dict[str, Backend], library: str) -> None:
    buffer = np.zeros(4096, np.float32)

    def at(offset: int, *shape: int) -> Any:
        host = buffer[offset : offset + int(np.prod(shape))].reshape(shape)
        return host if library == "numpy" else ndarray(host)

    q, k, v = at(0, 3, 5, 8), at(120, 3, 7, 8), at(288, 3, 7, 4)
    state = la.State(at(1000, 3, 8, 4), at(1100, 3, 8), at(1200, 3, 4), at(1300, 3))
    for offset in (372, 940, 2000):  # first directly behind v, then directly before kv
        for _ in range(2):
            la.linear_attention(q, k, v, initial_state=state, out=at(offset, 3, 5, 4))
    for offset, name in ((0, "q"), (119, "q"), (200, "k"), (371, "v"), (941, "initial_state.kv"),
                         (1302, "initial_state.count")):  # fmt: skip
        for _ in range(2):  # the second call finds the checks of the first
            with pytest.raises(ValueError, match=f"out shares memory with {name}, but"):
                la.linear_attention(q, k, v, initial_state=state, out=at(offset, 3, 5, 4))


def test_overlap_of_reversed_and_empty_views(gpu: Backend) -> None:
    buffer = np.zeros(400, np.float32)
    q, k, v = (ndarray(np.zeros(shape, np.float32)) for shape in ((5, 4), (5, 4), (5, 4)))
    up, down = buffer[:20].reshape(5, 4), buffer[20:40].reshape(5, 4)[::-1, ::-1]
    la.linear_attention(ndarray(up[::-1]), k, v, out=ndarray(down))
    with pytest.raises(ValueError, match="out shares memory with q"):
        la.linear_attention(ndarray(buffer[19:39].reshape(5, 4)[::-1]), k, v, out=ndarray(down))
    inside = ndarray(buffer[30:30].reshape(0, 4))
    la.linear_attention(inside, k, v, out=ndarray(buffer[10:10].reshape(0, 4)))
    la.linear_attention(q, inside, ndarray(buffer[25:25].reshape(0, 4)), out=ndarray(down))


def test_out_must_be_writable(cpu: Backend) -> None:
    out = np.zeros((3, 5, 4), np.float32)
    la.linear_attention(*qkv(), out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"out is read-only, but is written to.*out.copy\(\)"):
        la.linear_attention(*qkv(), out=out)


# -- the fast path -------------------------------------------------------------------------


def test_a_second_call_is_not_checked_again(
    backends: dict[str, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, state = on_gpu(qkv()), on_gpu(make_state(3))
    dout = ndarray(np.zeros((3, 5, 4)))
    la.linear_attention(*x, initial_state=state, causal=True)
    la.linear_attention_vjp(dout, *x, causal=True)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(checked, "forward_problem", fail)
    monkeypatch.setattr(checked, "backward_problem", fail)
    la.linear_attention(*on_gpu(qkv()), initial_state=on_gpu(make_state(3)), causal=True)
    la.linear_attention_vjp(ndarray(np.zeros((3, 5, 4))), *on_gpu(qkv()), causal=True)
    first, *_ = backends["cupy"].calls
    assert len(backends["cupy"].calls) == 4 and first[0] is backends["cupy"].calls[2][0]


def variants() -> dict[str, Any]:
    q, k, v = qkv()
    state = make_state(3)
    turned = np.zeros((3, 8, 7), np.float32).swapaxes(1, 2)
    return {
        "same": (q, k, v, {}),
        "causal": (q, k, v, {"causal": True}),
        "a": (q, k, v, {"a": 2.0}),
        "b": (q, k, v, {"b": 2.0}),
        "qk_norm": (q, k, v, {"qk_norm": None}),
        "feature_map": (q, k, v, {"feature_map": "relu"}),
        "normalize": (q, k, v, {"normalize": False}),
        "precision": (q, k, v, {"precision": "tf32"}),
        "state": (q, k, v, {"initial_state": state}),
        "state dtype": (q, k, v, {"initial_state": state._replace(count=np.zeros(3, "f4"))}),
        "q dtype": (q.astype(ml_dtypes.bfloat16), k, v, {}),
        "k strides": (q, turned, v, {}),
        "v shape": (q, k, np.zeros((3, 7, 5), np.float32), {}),
        "N": (qkv(6)[0], k, v, {}),
    }


def test_whatever_the_checks_depend_on_is_told_apart(cpu: Backend) -> None:
    problems = {}
    for _ in range(2):
        for name, (q, k, v, options) in variants().items():
            la.linear_attention(q, k, v, **options)
            problems.setdefault(name, []).append(cpu.calls[-1][0])
    assert all(first is second for first, second in problems.values())
    assert len({first for first, _ in problems.values()}) == len(problems)


def test_the_cache_is_bounded(cpu: Backend) -> None:
    cache = arrays.Cache[int](limit=3)
    for i in range(10):
        cache.put((i,), i)
    assert cache.entries == {(7,): 7, (8,): 8, (9,): 9} and cache.get((9,)) == 9
    for n in range(1, checked._forward.limit + 20):
        la.linear_attention(*qkv(n))
    assert len(checked._forward.entries) == checked._forward.limit


def test_threads_share_the_cache(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked._forward, "limit", 4)  # so that entries come and go all the time
    failures = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        for i in range(150):
            n = 1 + (seed + i) % 8
            if la.linear_attention(*qkv(n)).shape != (3, n, 4):
                failures.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(cpu.calls) == 8 * 150 and len(checked._forward.entries) <= 4


def test_a_decode_step_costs_microseconds_of_checks(gpu: Backend) -> None:
    """About 4 us on an idle core; the bound leaves room for a busy one, not for a full check."""
    q, k, v = on_gpu([np.zeros((2, 4, 1, 64), np.float32)] * 3)
    state = on_gpu(make_state(2, 4, d=64, e=64))
    gpu.forward = lambda problem, q, k, v, state, out, want: (q, state, None)  # type: ignore[method-assign]

    def cost(repeats: int = 200) -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            la.linear_attention(q, k, v, causal=True, initial_state=state, return_state=True)
        return (time.perf_counter() - began) / repeats

    cost(1)
    assert min(cost() for _ in range(10)) < 12e-6


@pytest.mark.parametrize("one", [1, True, np.float32(1), np.int32(1), np.array(1.0)])
def test_equal_numbers_share_one_problem(cpu: Backend, one: Any) -> None:
    x = qkv()
    la.linear_attention(*x, a=1.0, b=1.0)
    la.linear_attention(*x, a=one, b=one)
    la.linear_attention(*x)
    first, second, third = (call[0] for call in cpu.calls)
    assert first is second is third
    la.linear_attention(*x, a=2 * one)
    assert cpu.calls[-1][0].options.a == 2.0


def test_a_cached_call_lets_no_wrong_type_pass(cpu: Backend) -> None:
    """1 == True and hash(1) == hash(True): a cache keyed by values alone would accept these."""
    x = qkv()
    la.linear_attention(*x, causal=True)
    for wrong in ({"causal": 1}, {"normalize": 1.0}, {"return_state": 1}, {"qk_norm": ["l2"]}):
        with pytest.raises(TypeError):
            la.linear_attention(*x, **wrong)
    plain = np.ones((1, 1))
    la.linear_attention(plain, plain, plain)
    with pytest.raises(TypeError, match="Quantity"):
        la.linear_attention(plain, plain, plain.view(Quantity))
    with pytest.raises(ValueError, match="nan"):
        la.linear_attention(*x, a=float("nan"))
