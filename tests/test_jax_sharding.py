"""The JAX adapter on eight devices of the CPU: shard_map, and plain jit without an all-gather."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

import jax_cases
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from la_cupy.interop.jax import (
    dot_product_attention,
    linear_attention,
    linear_attention_xla,
)

from la_cupy import State

Array = Any
jit = partial(jax.jit, compiler_options=jax_cases.QUICK)
COLLECTIVES = r"\b(all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\("


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Any:
    return make_mesh(request.param)


def make_mesh(kind: Any) -> Any:
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("JAX was started with fewer than 8 devices on the CPU")
    return jax.make_mesh((4, 2), ("batch", "head"), axis_types=(kind,) * 2, devices=devices[:8])


def normal(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def assert_close(found: Any, expected: Any, rtol: float = 1e-10) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        size = float(np.abs(y).max(initial=0)) or 1.0
        assert float(np.abs(np.asarray(x) - np.asarray(y)).max(initial=0)) <= rtol * size


def place(mesh: Any, x: Array) -> Array:
    """Leading axes over ("batch", "head"), where they are not broadcast."""
    lead = x.ndim - 2
    names = ("batch", "head")[2 - lead :]
    spec = [name if size > 1 else None for name, size in zip(names, x.shape, strict=False)]
    return jax.device_put(x, NamedSharding(mesh, P(*spec, None, None)))


def function(attention: Any, q: Array, k: Array, v: Array, state: State) -> tuple[Array, State]:
    result: tuple[Array, State] = attention(
        q, k, v, causal=True, initial_state=state, return_state=True
    )
    return result


def loss(attention: Any, *x: Any) -> Array:
    out, state = function(attention, *x)
    return (out**2).sum() + 1e-2 * sum((part**2).sum() for part in state)


SHAPES = {
    "heads": ((4, 2, 6, 4), (4, 2, 8, 4), (4, 2, 8, 5)),
    "grouped": ((4, 2, 6, 4), (4, 1, 8, 4), (4, 1, 8, 5)),
    "shared-keys": ((4, 2, 6, 4), (8, 4), (2, 8, 5)),
    "shared-queries": ((6, 4), (4, 1, 8, 4), (2, 8, 5)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_plain_jit_keeps_the_sharding(mesh: Any, shapes: Any) -> None:
    """Value and gradient are right, split as the inputs are; nothing is gathered.

    Gradients of what is shared along a split axis are summed over it, and by nothing else.
    """
    x = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    state = State(normal(4, 5, seed=3), normal(4, seed=4), normal(5, seed=5), jnp.asarray(30.0))
    args = (*(place(mesh, y) for y in x), jax.device_put(state, NamedSharding(mesh, P())))
    every = (0, 1, 2, 3)
    forward = jit(partial(function, linear_attention))
    gradient = jit(jax.grad(partial(loss, linear_attention), argnums=every))
    with jax.set_mesh(mesh):
        out, final = forward(*args)
        grads = gradient(*args)
        programs = [f.lower(*args).compile().as_text() for f in (forward, gradient)]
    assert_close((out, final), jit(partial(function, linear_attention_xla))(*x, state))
    expected = jit(jax.grad(partial(loss, linear_attention_xla), argnums=every))(*x, state)
    assert_close(grads, expected)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("batch", "head")), out.ndim)
    for g, y in zip(grads[:3], args[:3], strict=True):
        assert g.sharding.is_equivalent_to(y.sharding, g.ndim)
    found = [set(re.findall(COLLECTIVES, text)) for text in programs]
    assert found[0] == set()
    assert found[1] <= {"all-reduce"}


def test_derivatives_of_what_is_sharded() -> None:
    mesh = make_mesh(AxisType.Auto)
    x = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES["grouped"])]
    state = State(normal(4, 5, seed=3), normal(4, seed=4), normal(5, seed=5), jnp.asarray(30.0))
    t = [normal(*shape, seed=7 + i) for i, shape in enumerate(SHAPES["grouped"])]
    args = [place(mesh, y) for y in x]

    def second(attention: Any, *x: Array) -> Array:
        grads = jax.grad(partial(loss, attention), argnums=(0, 1, 2, 3))(*x, state)
        leaves = jax.tree.leaves(grads)
        return sum((g * d).sum() for g, d in zip(leaves, [*t, *state], strict=True))

    results = [
        jit(
            lambda *y, f=f: (
                jax.grad(partial(second, f), argnums=(0, 1, 2))(*y),
                jax.jvp(lambda *z: function(f, *z, state), y, tuple(t)),
            )
        )(*y)
        for f, y in ((linear_attention, args), (linear_attention_xla, x))
    ]
    assert_close(*results)


EXPLICIT = {
    "q": (P("batch", "head"), P(), P()),
    "v": (P(), P(), P("batch", "head")),
    "all": (P("batch"), P(None, "head"), P("batch")),
}


@pytest.mark.parametrize("split", EXPLICIT.values(), ids=EXPLICIT)
def test_plain_derivatives_on_an_explicit_mesh(split: Any) -> None:
    """What runs as plain JAX takes operands that are split differently."""
    mesh = make_mesh(AxisType.Explicit)
    x = [normal(4, 2, 6, 4, seed=i) for i in range(3)]
    state = State(normal(4, 4, seed=3), normal(4, seed=4), normal(4, seed=5), jnp.asarray(30.0))

    def results(*x: Array) -> Any:
        along = partial(function, linear_attention, state=state)

        def scaled(s: Array) -> Array:
            return (along(x[0] * s, x[1], x[2] * s)[0] ** 3).sum()

        def one(t: Array) -> Any:
            return jax.jvp(along, x, (x[0] * t, x[1] * t, x[2]))

        third = jax.grad(jax.hessian(scaled))
        plain = function(linear_attention_xla, *x, state)
        return plain, third(jnp.asarray(1.1)), jax.vmap(one)(jnp.arange(1.0, 3.0))

    expected = jit(results)(*x)
    with jax.set_mesh(mesh):
        args = [jax.device_put(y, NamedSharding(mesh, s)) for y, s in zip(x, split, strict=True)]
        found = jit(results)(*args)
    assert_close(found, expected)


def test_rows_that_are_split_are_put_together() -> None:
    """The one thing that needs a collective: N or M over devices."""
    mesh = make_mesh(AxisType.Auto)
    x = [normal(2, 8, 4, seed=i) for i in range(3)]
    args = [jax.device_put(y, NamedSharding(mesh, P(None, "batch"))) for y in x]
    assert_close(jit(linear_attention)(*args), jit(linear_attention_xla)(*x))


def test_batches_that_do_not_divide() -> None:
    mesh = make_mesh(AxisType.Auto)
    x = [normal(3, 8, 4, seed=i) for i in range(3)]

    def program(attention: Any, *x: Array) -> Array:
        x = tuple(jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("batch"))) for y in x)
        return (attention(*x) ** 2).sum()

    found = jit(jax.grad(partial(program, linear_attention), argnums=(0, 1, 2)))(*x)
    plain = jax.grad(lambda *y: (linear_attention_xla(*y) ** 2).sum(), argnums=(0, 1, 2))
    assert_close(found, jit(plain)(*x))


# --- heads in groups, split over devices


def heads_mesh(kind: Any, devices: int) -> Any:
    make_mesh(kind)  # skips where there are not eight
    return jax.make_mesh((devices,), ("h",), axis_types=(kind,), devices=jax.devices()[:devices])


def value_and_gradient(attention: Any) -> Any:
    every = (0, 1, 2)
    gradient = jax.grad(lambda *x: (attention(*x) ** 2).sum(), argnums=every)
    return lambda *x: (attention(*x), gradient(*x))


GROUPS = [(8, 8, 2), (2, 6, 3), (4, 4, 2), (2, 4, 1)]  # devices, heads of query, of key and value


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_query_heads_are_split_within_a_group(groups: Any, kind: Any) -> None:
    """(B, T, N, H) split along N: part of a mesh axis falls to the groups, part to their heads."""
    devices, heads, key_heads = groups
    mesh = heads_mesh(kind, devices)
    q, k, v = (normal(2, 6, n, 4, seed=n + i) for i, n in enumerate((heads, key_heads, key_heads)))
    expected = jit(value_and_gradient(dot_product_attention))(q, k, v)
    with jax.set_mesh(mesh):
        args = jax.device_put((q, k, v), NamedSharding(mesh, P()))
        args = (jax.device_put(q, NamedSharding(mesh, P(None, None, "h"))), *args[1:])
        found = jit(value_and_gradient(dot_product_attention))(*args)
        text = jit(dot_product_attention).lower(*args).compile().as_text()
    assert_close(found, expected)
    gathered = (groups, kind) == ((2, 6, 3), AxisType.Auto)  # neither 3 nor 2 are split over 2
    assert set(re.findall(COLLECTIVES, text)) == ({"all-gather"} if gathered else set())


@pytest.mark.parametrize("lead", [(2, 4), (4, 2), (2, 3), (3, 2)], ids=str)
def test_an_axis_of_the_mesh_that_is_split_over_two_axes(lead: tuple[int, int]) -> None:
    """8 on 8 devices, reshaped to 2 x 4: each is split along a part of the axis."""
    heads = lead[0] * lead[1]
    mesh = heads_mesh(AxisType.Auto, heads)
    x = [normal(heads, 6, 4, seed=i) for i in range(3)]

    def program(*x: Array) -> Array:
        return linear_attention(*(y.reshape(*lead, 6, 4) for y in x)).reshape(heads, 6, 4)

    args = [jax.device_put(y, NamedSharding(mesh, P("h"))) for y in x]
    run = jit(value_and_gradient(program))
    assert_close(run(*args), run(*x))
    text = run.lower(*args).compile().as_text()
    if lead != (3, 2):  # the parts of 6 are taken as 2 x 3
        assert not re.findall(COLLECTIVES, text)


# --- shard_map


SPECS = {
    "all": (P("batch", "head"), P("batch", "head"), P("batch", "head")),
    "replicated-keys": (P("batch", "head"), P(), P("batch")),
    "replicated-queries": (P(), P("batch", "head"), P("batch")),
}


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_shard_map(specs: Any) -> None:
    """Values and gradients, with operands that all devices share."""
    mesh = make_mesh(AxisType.Auto)
    x = []
    for i, spec in enumerate(specs):
        lead = [size for size, name in zip((4, 2), [*spec, None, None], strict=False) if name]
        x.append(
            normal(
                *lead,
                *(1,) * (len(spec) - len(lead)),
                *((1,) if len(lead) == 1 else ()),
                8,
                4,
                seed=i,
            )
        )

    def total(attention: Any, split: bool, *x: Array) -> Array:
        inner = partial(attention, causal=True)
        if split:
            inner = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=P("batch", "head"))
        return (inner(*x) ** 2).sum()

    every = (0, 1, 2)
    found = jit(jax.value_and_grad(partial(total, linear_attention, True), argnums=every))(*x)
    whole = jit(jax.value_and_grad(partial(total, linear_attention_xla, False), argnums=every))(*x)
    assert_close(found, whole)


def test_shard_map_second_derivatives_and_forward_mode() -> None:
    mesh = make_mesh(AxisType.Auto)
    x = normal(4, 8, 4), normal(8, 4, seed=1), normal(4, 8, 4, seed=2)
    t = tuple(normal(*y.shape, seed=5 + i) for i, y in enumerate(x))
    specs = P("batch"), P(), P("batch")

    def total(attention: Any, split: bool, *x: Array) -> Array:
        inner = partial(attention, causal=True)
        if split:
            inner = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=P("batch"))
        return (inner(*x) ** 2).sum()

    def both(attention: Any, split: bool) -> Any:
        function = partial(total, attention, split)
        inner = jax.grad(function, argnums=(0, 1, 2))
        second = jax.grad(
            lambda *y: sum((g * d).sum() for g, d in zip(inner(*y), t, strict=True)),
            argnums=(0, 1, 2),
        )
        return jit(lambda *y: (second(*y), jax.jvp(function, y, t)))(*x)

    assert_close(both(linear_attention, True), both(linear_attention_xla, False))


@pytest.mark.parametrize("attention", [linear_attention, linear_attention_xla])
def test_a_state_is_the_same_on_devices_that_share_keys(attention: Any) -> None:
    """With q split, and k and v not: results, gradients, and the state as the carry of a scan."""
    mesh = make_mesh(AxisType.Auto)
    q, k, v = normal(4, 8, 4), normal(8, 4, seed=1), normal(8, 5, seed=2)
    first = State(*(jnp.ones(shape) for shape in ((4, 5), (4,), (5,), ())))

    def pieces(*x: Any) -> tuple[Array, State]:
        def step(state: State, piece: Any) -> tuple[State, Array]:
            out, state = attention(*piece, causal=True, initial_state=state, return_state=True)
            return state, out

        rows = [jnp.moveaxis(y.reshape(*y.shape[:-2], 2, 4, -1), -3, 0) for y in x[:3]]
        state, outs = jax.lax.scan(step, x[3], rows)
        return jnp.moveaxis(outs, 0, -3).reshape(*x[0].shape[:-2], 8, 5), state

    def total(run: Any, *x: Any) -> Array:
        out, state = run(*x)
        return (out**2).sum() + 1e-2 * sum((part**2).sum() for part in state)

    def results(run: Any) -> Any:
        gradient = jax.grad(partial(total, run), argnums=(0, 1, 2, 3))
        return jit(lambda *x: (run(*x), gradient(*x)))(q, k, v, first)

    whole = results(partial(function, linear_attention_xla))
    for run in (partial(function, attention), pieces):
        split = jax.shard_map(
            run, mesh=mesh, in_specs=(P("batch"), P(), P(), P()), out_specs=(P("batch"), P())
        )
        assert_close(results(split), whole)


def test_wrong_out_specs_are_refused() -> None:
    mesh = make_mesh(AxisType.Auto)
    q, k = normal(4, 8, 4), normal(8, 4, seed=1)
    specs = P("batch"), P(), P()
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(linear_attention, mesh=mesh, in_specs=specs, out_specs=P())(q, k, k)
    found = jax.shard_map(
        linear_attention, mesh=mesh, in_specs=specs, out_specs=P("batch"), check_vma=False
    )(q, k, k)
    assert_close(found, linear_attention_xla(q, k, k))
