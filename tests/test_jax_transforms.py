"""The JAX adapter inside JAX's transformations, against the plain function and the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

import jax_cases
from la_cupy.interop.jax import linear_attention, linear_attention_xla

from la_cupy import State, reference

Array = Any
jit = partial(jax.jit, compiler_options=jax_cases.QUICK)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def like(tree: Any, seed: int) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, [normal(*x.shape, seed=seed + i) for i, x in enumerate(leaves)]
    )


def assert_close(found: Any, expected: Any, rtol: float = 1e-10) -> None:
    """Each array within rtol of the largest entry of what is expected."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        size = float(np.abs(y).max(initial=0)) or 1.0
        assert float(np.abs(x - y).max(initial=0)) <= rtol * size


def inputs() -> tuple[Array, Array, Array, State]:
    """Grouped heads, more keys than rows, an initial state of other leading axes."""
    count = 30 + jnp.arange(3.0)
    state = State(normal(4, 5, seed=4), normal(2, 1, 4, seed=5), normal(5, seed=6), count)
    return normal(2, 3, 10, 4), normal(2, 1, 12, 4, seed=1), normal(3, 12, 5, seed=2), state


def everything(attention: Any, *x: Any, causal: bool = True) -> tuple[Array, State]:
    q, k, v, state = x
    result: tuple[Array, State] = attention(
        q, k, v, causal=causal, feature_map="elu1", initial_state=state, return_state=True
    )
    return result


def loss(attention: Any, *x: Any) -> Array:
    out, state = everything(attention, *x)
    return (out**2).sum() + 1e-2 * sum((part**3).sum() for part in state)


def gradient(attention: Any) -> Callable[..., Any]:
    return jax.jit(jax.grad(partial(loss, attention), argnums=(0, 1, 2, 3)))


def along(attention: Any, directions: Any) -> Callable[..., Array]:
    """A number whose gradient is a second derivative."""

    def function(*x: Any) -> Array:
        pairs = zip(
            jax.tree.leaves(gradient(attention)(*x)), jax.tree.leaves(directions), strict=True
        )
        return sum((g * d).sum() for g, d in pairs)

    return function


# --- derivatives


def test_gradient_outside_and_inside_jit() -> None:
    x = inputs()
    every = (0, 1, 2, 3)
    found, expected = (
        jit(jax.value_and_grad(partial(loss, f), argnums=every))(*x)
        for f in (linear_attention, linear_attention_xla)
    )
    assert_close(found, expected)
    results, pull = jax.vjp(partial(everything, linear_attention), *x)
    cotangents = like(results, seed=50)
    compiled = jit(lambda c, *x: jax.vjp(partial(everything, linear_attention_xla), *x)[1](c))
    assert_close(pull(cotangents), compiled(cotangents, *x))


@pytest.mark.parametrize("argument", range(3))
def test_gradient_of_one_argument(argument: int) -> None:
    x = inputs()
    found = jax.grad(partial(loss, linear_attention), argnums=argument)(*x)
    assert_close(found, gradient(linear_attention_xla)(*x)[argument])


def test_forward_mode() -> None:
    x = inputs()
    t = like(x, seed=20)
    found, expected = (
        jit(lambda x, t, f=f: jax.jvp(partial(everything, f), x, t))(x, t)
        for f in (linear_attention, linear_attention_xla)
    )
    assert_close(found, expected)
    jacobians = [
        jit(jacobian(lambda q, f=f: f(q, x[1][0], x[2][0], causal=True)))(x[0][0, 0])
        for f in (linear_attention, linear_attention_xla)
        for jacobian in (jax.jacfwd, jax.jacrev)
    ]
    for found in jacobians[:3]:
        assert_close(found, jacobians[3])


def test_second_derivatives() -> None:
    x = inputs()
    t = like(x, seed=30)
    every = tuple(range(4))
    found = jit(jax.grad(along(linear_attention, t), argnums=every))(*x)
    expected = jit(jax.grad(along(linear_attention_xla, t), argnums=every))(*x)
    assert_close(found, expected)
    # against differences of the first derivative, too
    step = 1e-5
    compiled = jit(along(linear_attention, t))
    ahead = compiled(*jax.tree.map(lambda a, b: a + step * b, x, t))
    behind = compiled(*jax.tree.map(lambda a, b: a - step * b, x, t))
    slope = sum(
        (g * d).sum() for g, d in zip(jax.tree.leaves(found), jax.tree.leaves(t), strict=True)
    )
    np.testing.assert_allclose((ahead - behind) / (2 * step), slope, rtol=1e-6)


def test_hessian() -> None:
    q, k, v = normal(3, 2), normal(3, 2, seed=1), normal(3, 2, seed=2)
    hessians = [
        jit(jax.hessian(lambda q, k, f=f: (f(q, k, v, causal=True) ** 2).sum(), argnums=(0, 1)))(
            q, k
        )
        for f in (linear_attention, linear_attention_xla)
    ]
    assert_close(*hessians)
    assert float(np.abs(hessians[0][0][0]).max()) > 1e-3  # no silent zeros


def test_third_derivatives() -> None:
    x = inputs()
    t = like(x, seed=40)

    def third(attention: Any) -> Any:
        second = jax.grad(along(attention, t), argnums=1)
        return jit(jax.grad(lambda *x: (second(*x) ** 2).sum()))(*x)

    assert_close(third(linear_attention), third(linear_attention_xla))


def test_the_normalizer_has_no_gradient() -> None:
    q, k, v, _ = inputs()
    den = jax.grad(lambda q: linear_attention(q, k, v, return_normalizer=True)[1].sum())(q)
    assert (den == 0).all()


def test_second_derivatives_in_linear_memory() -> None:
    """N = 16384 against the reference's N^2: values at the size, and temporaries of a few N D."""
    n, d = 16384, 32
    q, k, v, t = (normal(n, d, seed=i, dtype=np.float32) for i in range(4))

    def function(attention: Any) -> Any:
        inner = jax.grad(lambda *x: (attention(*x, causal=True) ** 2).sum(), argnums=(0, 1, 2))
        return jit(jax.grad(lambda *x: sum((g * t).sum() for g in inner(*x)), argnums=(0, 1, 2)))

    compiled = function(linear_attention).lower(q, k, v).compile()
    units = compiled.memory_analysis().temp_size_in_bytes / q.nbytes
    assert units < 60, f"temporaries of {units:.1f} times the size of q"
    found = compiled(q, k, v)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    t = t.astype(np.float64)
    expected = function(linear_attention_xla)(*wide)
    for x, y in zip(found, expected, strict=True):
        assert float(np.linalg.norm(x - y) / np.linalg.norm(y)) <= 1e-4


# --- vmap


MAPPED = [(0, None, None), (None, 0, None), (None, None, 1), (2, None, 1), (2, 0, 1)]


@pytest.mark.parametrize("axes", MAPPED, ids=str)
def test_vmap_with_mixed_axes(axes: tuple[int | None, ...]) -> None:
    shapes = ((3, 7, 4), (9, 4), (3, 9, 5))
    args = []
    for i, (shape, axis) in enumerate(zip(shapes, axes, strict=True)):
        full = shape if axis is None else (*shape[:axis], 2, *shape[axis:])
        args.append(normal(*full, seed=i))

    def total(attention: Any, *x: Array) -> Array:
        out, state = attention(*x, causal=True, return_state=True)
        return (out**2).sum() + sum((part**2).sum() for part in state)

    results = []
    for attention in (linear_attention, linear_attention_xla):
        plain = partial(attention, causal=True, return_state=True)
        each = jax.grad(partial(total, attention), argnums=(0, 1, 2))

        def of_mapped(*x: Array, plain: Any = plain) -> Array:
            return sum((part**2).sum() for part in jax.tree.leaves(jax.vmap(plain, axes)(*x)))

        results.append(
            jit(
                lambda *x, plain=plain, each=each, of_mapped=of_mapped: (
                    jax.vmap(plain, axes)(*x),
                    jax.vmap(each, axes)(*x),
                    jax.grad(of_mapped, argnums=(0, 1, 2))(*x),
                )
            )(*args)
        )
    assert_close(*results)


def test_vmap_of_vmap_with_a_state() -> None:
    q, k, v = normal(3, 2, 6, 4), normal(2, 6, 4, seed=1), normal(3, 6, 5, seed=2)
    state = State(normal(2, 4, 5, seed=3), normal(4, seed=4), normal(5, seed=5), jnp.asarray(20.0))

    def one(attention: Any, q: Array, k: Array, v: Array, kv: Array) -> Any:
        return attention(
            q, k, v, causal=True, initial_state=state._replace(kv=kv), return_state=True
        )

    def mapped(attention: Any) -> Any:
        inner = jax.vmap(partial(one, attention), (0, 0, None, 0))
        return jit(jax.vmap(inner, (0, None, 0, None)))(q, k, v, state.kv)

    assert_close(mapped(linear_attention), mapped(linear_attention_xla))


def test_keys_are_not_repeated_under_vmap() -> None:
    """A mapped q on keys that are not mapped: no array of the size of all keys per entry."""
    q, k = normal(16, 40, 8), normal(40, 8, seed=1)
    text = str(jax.make_jaxpr(jax.vmap(linear_attention, (0, None, None)))(q, k, k))
    assert "la_cupy_forward" in text and "broadcast_in_dim" not in text


# --- in one program with everything else


def test_a_state_is_the_carry_of_a_scan() -> None:
    """Pieces through the state, in a scan, checkpointed and not: the whole, values and gradients."""
    q, k, v = (normal(2, 24, 4, seed=i) for i in range(3))
    first = State(*(jnp.zeros(shape) for shape in ((2, 4, 4), (2, 4), (2, 4), (2,))))

    def pieces(checkpoint: bool, q: Array, k: Array, v: Array) -> Array:
        def step(state: State, x: Any) -> tuple[State, Array]:
            out, state = linear_attention(*x, causal=True, initial_state=state, return_state=True)
            return state, out

        body = jax.checkpoint(step) if checkpoint else step
        chunks = [jnp.moveaxis(x.reshape(2, 4, 6, 4), 1, 0) for x in (q, k, v)]
        _, outs = jax.lax.scan(body, first, chunks)
        return jnp.moveaxis(outs, 0, 1).reshape(2, 24, 4)

    whole = partial(linear_attention, causal=True)
    for function in (partial(pieces, False), partial(pieces, True)):
        results = [
            jit(jax.value_and_grad(lambda *x, f=f: (f(*x) ** 2).sum(), argnums=(0, 1, 2)))(q, k, v)
            for f in (function, whole)
        ]
        assert_close(*results)


def test_all_in_one_program() -> None:
    """jit of grad of scan of checkpoint of vmap, with donated arguments."""
    q, k, v = normal(3, 8, 4), normal(8, 4, seed=1), normal(3, 8, 4, seed=2)

    def program(attention: Any, q: Array, k: Array, v: Array) -> Array:
        @jax.checkpoint
        def layer(x: Array, _: None) -> tuple[Array, None]:
            return x + jax.vmap(partial(attention, causal=True), (0, None, 0))(x, k, v), None

        return (jax.lax.scan(layer, q, None, length=3)[0] ** 2).sum()

    expected = jax.grad(partial(program, linear_attention_xla), argnums=(0, 1, 2))(q, k, v)
    compiled = jit(
        jax.grad(partial(program, linear_attention), argnums=(0, 1, 2)), donate_argnums=(0,)
    )
    assert_close(compiled(q + 0, k, v), expected)


def test_only_the_inputs_and_den_are_kept() -> None:
    """Residuals of the gradient: q, k, v and one number per row."""
    q, k, v = (normal(2, 50, 8, seed=i, dtype=np.float32) for i in range(3))
    _, pull = jax.vjp(partial(linear_attention, causal=True), q, k, v)
    shapes = sorted(x.shape for x in jax.tree.leaves(pull))
    assert shapes == [(2, 50), *[(2, 50, 8)] * 3]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("x64", [False, True])
def test_types(dtype: str, x64: bool) -> None:
    if dtype == "float64" and not x64:
        pytest.skip("there is no float64 without x64")
    with jax.enable_x64(x64):
        q, k, v = (normal(2, 20, 8, seed=i, dtype=dtype) for i in range(3))
        function = partial(linear_attention, causal=True, return_state=True, return_normalizer=True)
        (out, state, den), pull = jax.vjp(function, q, k, v)
        grads = pull(jax.tree.map(jnp.ones_like, (out, state, den)))
    sums = "float64" if dtype == "float64" else "float32"
    assert {str(x.dtype) for x in (out, *grads)} == {dtype}
    assert {str(x.dtype) for x in (*state, den)} == {sums}
    expected, _, _ = reference.linear_attention(
        *(np.asarray(x, float) for x in (q, k, v)), causal=True
    )
    budget = {"float16": 4e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-11}[dtype]
    error = np.abs(np.asarray(out, float) - expected).max() / np.abs(expected).max()
    assert error <= budget


def test_every_form_of_the_call_gives_the_same() -> None:
    q, k, v, _ = inputs()
    for attention in (linear_attention, linear_attention_xla):
        out = attention(q, k, v)
        with_state, state = attention(q, k, v, return_state=True)
        with_den, den = attention(q, k, v, return_normalizer=True)
        both = attention(q, k, v, return_state=True, return_normalizer=True)
        assert_close((with_state, with_den, *both), (out, out, out, state, den))
        assert isinstance(state, State) and den.shape == out.shape[:-1]


def test_without_jit() -> None:
    q, k, v, _ = inputs()
    with jax.disable_jit():
        found = linear_attention(q, k, v, causal=True)
    assert_close(found, linear_attention_xla(q, k, v, causal=True))


def test_exact_zeros() -> None:
    """A row that sees no key, relu at 0, a zero vector under the norm: 0 with gradient 0."""
    q, k = jnp.zeros((3, 2)), jnp.zeros((2, 2))
    v = normal(2, 2)
    for feature_map, norm in (("relu", "l2"), ("relu", None), ("identity", "l2")):
        for attention in (linear_attention, linear_attention_xla):
            function = partial(attention, causal=True, a=0.0, feature_map=feature_map, qk_norm=norm)
            pulled = jit(lambda *x, f=function: jax.vjp(f, *x)[1](jnp.ones((3, 2))))
            assert (function(q, k, v) == 0).all()
            assert all((g == 0).all() for g in pulled(q, k, v))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_of_width_one_are_exact(dtype: str) -> None:
    """q~ and k~ are +-1, so that den counts the keys of q's sign twice and the others not at all."""
    q, k, v = (normal(300, 1, seed=i, dtype=dtype) for i in range(3))
    expected = 2 * ((q > 0) == (k > 0).T).sum(1)
    _, den = linear_attention(q, k, v, return_normalizer=True)
    assert (den == expected).all()
    out = linear_attention(jnp.abs(q), -jnp.abs(k), v, causal=True)
    assert (out == 0).all()


@pytest.mark.parametrize("constant", [1.0, 1024.0])
def test_a_constant_in_v_changes_neither_dq_nor_dk(constant: float) -> None:
    q, k, v = (normal(2, 300, 8, seed=i, dtype=np.float32) for i in range(3))
    v = jnp.round(v * 256) / 256
    dout = normal(2, 300, 8, seed=3, dtype=np.float32)
    before, after = (
        jit(lambda *x: jax.vjp(partial(linear_attention, causal=True), *x)[1](dout))(q, k, v + c)
        for c in (np.float32(0), np.float32(constant))
    )
    for x, y in zip(before[:2], after[:2], strict=True):
        assert float(np.linalg.norm(x - y) / np.linalg.norm(x)) <= 1e-5


def test_results_repeat_bit_for_bit() -> None:
    x = [normal(2, 70, 8, seed=i, dtype=np.float32) for i in range(3)]
    function = jit(jax.grad(lambda *x: (linear_attention(*x, causal=True) ** 2).sum(), (0, 1, 2)))
    first = [g.tobytes() for g in function(*x)]
    assert all([g.tobytes() for g in function(*x)] == first for _ in range(5))


# --- errors


def test_errors_are_those_of_the_array_api() -> None:
    """ValueError and TypeError while tracing, with the same sentences."""
    import la_cupy as la

    x, y, z = np.ones((3, 4), np.float32), np.ones((2, 3, 5), np.float32), np.ones(3, np.int32)
    state = (np.ones((4, 4), np.float32), *[np.ones(4, np.float32)] * 2)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, y, y), {}),
        ((x, x, y[0, :2]), {}),
        ((x, x[None].repeat(6, 0), x[None].repeat(4, 0)), {}),
        ((x[None].repeat(7, 0), x[None].repeat(2, 0), x[None].repeat(2, 0)), {}),
        ((x[0], x, x), {}),
        ((z, x, x), {}),
        ((x, x, x), {"a": np.inf}),
        ((x, x, x), {"b": "1"}),
        ((x, x, x), {"causal": 1}),
        ((x, x, x), {"feature_map": "tanh"}),
        ((x, x, x), {"qk_norm": "l1"}),
        ((x, x, x), {"precision": "low"}),
        ((x, x, x), {"return_state": "yes"}),
        ((x, x, x), {"initial_state": state}),
        ((x, x, x), {"initial_state": (state[0][:3], *state[1:], np.float32(2))}),
        ((x, x, x), {"initial_state": (*state, None)}),
    ]
    for args, options in calls:
        with pytest.raises((TypeError, ValueError)) as expected:
            la.linear_attention(*args, **options)
        for attention in (linear_attention, linear_attention_xla):
            with pytest.raises(expected.type, match=re.escape(str(expected.value))):
                jit(lambda *a, f=attention, o=options: f(*a, **o))(*args)


def test_what_is_no_array_is_refused() -> None:
    x = normal(3, 4)
    for wrong in ([[1.0]], 1.0, None, np.ma.masked_array(np.ones((3, 4)))):
        with pytest.raises(TypeError, match="k is a .*JAX or NumPy arrays are needed"):
            linear_attention(x, wrong, x)


def test_keys_of_random_numbers_are_refused() -> None:
    x, key = normal(3, 4), jax.random.key(0)
    for attention in (linear_attention, linear_attention_xla):
        with pytest.raises(TypeError, match="q has dtype key<fry>, but must be one of float16"):
            attention(key, x, x)


def test_options_are_no_tracers() -> None:
    x = normal(3, 4)
    with pytest.raises(TypeError, match="a is a .*Tracer, but must be a real number"):
        jit(lambda a: linear_attention(x, x, x, a=a))(1.0)


def test_arrays_of_numpy_are_taken() -> None:
    x = np.random.default_rng(0).standard_normal((5, 4))
    expected, _, _ = reference.linear_attention(x, x, x)
    np.testing.assert_allclose(linear_attention(x, x, x), expected, rtol=1e-11)
