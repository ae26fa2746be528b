"""One sequence over several devices: the JAX adapter's axis_name, on eight devices of the CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

import jax_cases
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from la_cupy.interop.jax import linear_attention, linear_attention_xla

from la_cupy import State

Array = Any
jit = partial(jax.jit, compiler_options=jax_cases.QUICK)
HEADS, D, E = 2, 4, 5


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield


@pytest.fixture
def mesh() -> Any:
    """Pieces of the sequence by heads."""
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("JAX was started with fewer than 8 devices on the CPU")
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("seq", "head"), axis_types=kinds, devices=devices[:8])


def normal(*shape: int, seed: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def inputs(n: int, m: int, grouped: bool) -> tuple[Any, ...]:
    """q, k, v and a state; `grouped`: all heads of q share those of k and v."""
    shared = 1 if grouped else HEADS
    q, k, v = (
        normal(HEADS, n, D, seed=0),
        normal(shared, m, D, seed=1),
        normal(shared, m, E, seed=2),
    )
    state = State(normal(D, E, seed=3), normal(D, seed=4), normal(E, seed=5), jnp.asarray(3.0))
    return q, k, v, state


def whole(attention: Any, options: dict[str, Any], q: Array, k: Array, v: Array, s: Any) -> Any:
    results = attention(
        q, k, v, initial_state=s, return_state=True, return_normalizer=True, **options
    )
    return tuple(results)


def pieces(mesh: Any, grouped: bool, attention: Any, options: dict[str, Any]) -> Any:
    rows, keys = P("head", "seq"), P(None if grouped else "head", "seq")
    total = P(None if grouped else "head")
    return jax.shard_map(
        partial(whole, attention, options | {"axis_name": "seq"}),
        mesh=mesh,
        in_specs=(rows, keys, keys, P()),
        out_specs=(rows, State(total, total, total, total), P("head", "seq")),
    )


def loss(function: Any, *x: Any) -> Array:
    out, state, _ = function(*x)
    return (out**2).sum() + 1e-2 * sum((part**2).sum() for part in state)


def assert_close(found: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11 * max(1.0, float(np.abs(y).max())))


CASES = {
    "causal": (28, 28, False, {"causal": True}),
    "causal-grouped": (12, 12, True, {"causal": True, "qk_norm": None, "feature_map": "elu1"}),
    "plain-sums": (20, 20, False, {"causal": True, "normalize": False, "a": 0.0, "b": 0.3}),
    "one-row-each": (4, 4, False, {"causal": True}),
    "all-keys": (12, 28, False, {}),
    "all-keys-grouped": (28, 4, True, {"a": 2.0}),
}


@pytest.mark.parametrize("attention", [linear_attention, linear_attention_xla])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_the_whole(mesh: Any, case: Any, attention: Any) -> None:
    n, m, grouped, options = case
    x = inputs(n, m, grouped)
    split, plain = pieces(mesh, grouped, attention, options), partial(whole, attention, options)
    assert_close(jit(split)(*x), jit(plain)(*x))
    every = (0, 1, 2, 3)
    found = jit(jax.grad(partial(loss, split), argnums=every))(*x)
    assert_close(found, jit(jax.grad(partial(loss, plain), argnums=every))(*x))


def test_forward_mode_and_second_derivatives(mesh: Any) -> None:
    options: dict[str, Any] = {"causal": True}
    x = inputs(12, 12, True)
    t = jax.tree.map(jnp.cos, x)

    def results(function: Any) -> Any:
        gradient = jax.grad(partial(loss, function), argnums=(0, 1, 2, 3))
        return jit(lambda *y: (jax.jvp(function, y, t)[1][:2], jax.jvp(gradient, y, t)))(*x)

    split = pieces(mesh, True, linear_attention, options)
    assert_close(results(split), results(partial(whole, linear_attention, options)))


def collectives(program: str) -> list[tuple[str, int]]:
    """Each collective and how many numbers a device gets by it."""
    found = re.findall(r"= (.*?) (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", program)
    sizes = [
        (name, sum(math.prod(map(int, s.split(","))) if s else 1 for s in shapes))
        for types, name in found
        if (shapes := re.findall(r"\w\d+\[([\d,]*)\]", types))
    ]
    return sorted(sizes)


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_exchanged_does_not_grow_with_the_sequence(mesh: Any, causal: bool) -> None:
    """At most the states of all devices, once in each direction."""
    split = pieces(mesh, False, linear_attention, {"causal": causal})
    gradient = jit(jax.grad(lambda *x: (split(*x)[0] ** 2).sum(), argnums=(0, 1, 2)))
    texts = [gradient.lower(*inputs(n, n, False)).compile().as_text() for n in (32, 320)]
    short, long = map(collectives, texts)
    assert short and short == long
    state = D * E + D + E + 1
    assert sum(size for _, size in short) <= 2 * 4 * state * (HEADS // 2)


def test_a_nan_stays_behind_where_it_is(mesh: Any) -> None:
    """Rows of earlier pieces do not see the state of a later one."""
    q, k, v, _ = inputs(16, 16, False)
    cut = partial(linear_attention, causal=True, axis_name="seq")
    split = jax.shard_map(cut, mesh=mesh, in_specs=P("head", "seq"), out_specs=P("head", "seq"))
    out = np.asarray(split(q, k, v.at[:, 9].set(jnp.nan)))
    assert np.isfinite(out[:, :8]).all() and np.isnan(out[:, 12:]).all()


def test_errors(mesh: Any) -> None:
    q, k, v, _ = inputs(8, 16, False)
    with pytest.raises(ValueError, match=r"axis_name is 'seq', but must name an axis .*shard_map"):
        linear_attention(q, k, v, axis_name="seq")
    spec = P("head", "seq")
    run = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match=r"axis_name is 'rows'"):
        run(partial(linear_attention, axis_name="rows"))(q, k, v)
    with pytest.raises(ValueError, match="q has 2 rows and k has 4 on each device.*same places"):
        run(partial(linear_attention, causal=True, axis_name="seq"))(q, k, v)
    for wrong in (3, (), ("seq", 1)):
        with pytest.raises(TypeError, match=r"axis_name is .*, but must be a string or a tuple"):
            run(partial(linear_attention, axis_name=wrong))(q, k, v)
