"""dot_product_attention in the signature of JAX and Flax, and inside Flax's attention layer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

from la_cupy.interop.jax import dot_product_attention

from la_cupy import reference

Array = Any
EXAMPLE = Path(__file__).parent.parent / "examples" / "jax_layer.py"


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


def expected_of(q: Any, k: Any, v: Any, **options: Any) -> Any:
    groups = q.shape[-2] // k.shape[-2]
    k, v = (np.repeat(np.asarray(x), groups, -2) for x in (k, v))
    heads_first = (np.asarray(x, float).swapaxes(-2, -3) for x in (q, k, v))
    return reference.linear_attention(*heads_first, **options)[0].swapaxes(-2, -3)


@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
@pytest.mark.parametrize("key_heads", [6, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_and_layout(lead: tuple[int, ...], key_heads: int, causal: bool) -> None:
    q, k, v = (
        normal(*lead, 9, heads, width, seed=i)
        for i, (heads, width) in enumerate(((6, 8), (key_heads, 8), (key_heads, 4)))
    )
    found = jax.jit(partial(dot_product_attention, is_causal=causal, feature_map="elu1"))(q, k, v)
    expected = expected_of(q, k, v, causal=causal, feature_map="elu1")
    assert found.shape == (*lead, 9, 6, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_more_keys_than_queries() -> None:
    q, k, v = normal(2, 5, 2, 4), normal(2, 9, 2, 4, seed=1), normal(2, 9, 2, 4, seed=2)
    np.testing.assert_allclose(
        dot_product_attention(q, k, v), expected_of(q, k, v), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ValueError, match="is_causal needs as many keys as queries"):
        dot_product_attention(q, k, v, is_causal=True)


def test_what_cannot_be_honoured_is_refused() -> None:
    q = normal(2, 5, 2, 4)
    attention = partial(dot_product_attention, q, q, q)
    impossible: dict[str, Any] = {
        "bias": q, "mask": jnp.ones((2, 2, 5, 5), bool), "scale": 0.5, "local_window_size": 3,
        "query_seq_lengths": jnp.ones(2, int), "key_value_seq_lengths": jnp.ones(2, int),
        "return_residual": True, "module": object(),
    }  # fmt: skip
    for name, value in impossible.items():
        with pytest.raises(ValueError, match=f"{name} cannot be honoured"):
            attention(**{name: value})
        attention(**{name: False if name == "return_residual" else None})
    with pytest.raises(ValueError, match="dropout_rate is 0.1"):
        attention(dropout_rate=0.1)
    attention(dropout_rate=0.1, deterministic=True)
    with pytest.raises(TypeError, match="no argument windows"):
        attention(windows=3)
    with pytest.raises(ValueError, match="precision is 'fast'"):
        attention(precision="fast")
    with pytest.raises(ValueError, match="query has 7 heads, key 2 and value 2"):
        dot_product_attention(normal(2, 5, 7, 4), q, q)
    with pytest.raises(ValueError, match=re.escape("key has shape (5, 4)")):
        dot_product_attention(q, q[0, :, 0], q)


def test_batches_broadcast() -> None:
    q, k = normal(1, 5, 4, 8), normal(2, 5, 2, 8, seed=1)
    for x in ((q, k, k), (k, k[:1], k[:1]), (k[:1], k, k)):
        expected = expected_of(*(jnp.broadcast_to(y, (2, *y.shape[1:])) for y in x))
        np.testing.assert_allclose(dot_product_attention(*x), expected, rtol=1e-5, atol=1e-5)


def test_errors_name_what_the_caller_wrote() -> None:
    q = normal(2, 5, 4, 8)
    calls: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "query (3,), key (2,) and value (2,) do not", (normal(3, 5, 4, 8), q, q), {}),
        (ValueError, "query has H = 8 in its last axis and key has H = 3", (q, q[..., :3], q), {}),
        (ValueError, "key has 5 rows and value has 3", (q, q, q[:, :3]), {}),
        (ValueError, "value has shape (2, 5, 4, 0), but its last axis", (q, q, q[..., :0]), {}),
        (TypeError, "query has dtype int32, but must be", (q.astype(int), q, q), {}),
        (TypeError, "key has dtype key<fry>, but must be", (q, jax.random.key(0), q), {}),
        (TypeError, "is_causal is 1 of type int", (q, q, q), {"is_causal": 1}),
        (TypeError, "precision is ['highest'], but", (q, q, q), {"precision": ["highest"]}),
    ]
    for kind, words, args, options in calls:
        with pytest.raises(kind, match=re.escape(words)):
            dot_product_attention(*args, **options)
    assert dot_product_attention(q.astype(int), q, q, dtype="bfloat16").dtype == jnp.bfloat16


def test_a_traced_rate_of_dropout_is_refused() -> None:
    q = normal(2, 5, 2, 4)
    with pytest.raises(TypeError, match="dropout_rate or deterministic is traced"):
        jax.jit(lambda rate: dot_product_attention(q, q, q, dropout_rate=rate))(0.0)


@pytest.mark.parametrize("precision", [None, "highest", "tf32", *jax.lax.Precision])
def test_precision_of_jax(precision: Any) -> None:
    q = normal(2, 5, 2, 4)
    found = dot_product_attention(q, q, q, precision=precision)
    np.testing.assert_allclose(found, expected_of(q, q, q), rtol=1e-5, atol=1e-5)


def test_attention_fn_of_flax() -> None:
    """In nnx.MultiHeadAttention: the layer's own projections around the reference's attention."""
    nnx = pytest.importorskip("flax.nnx")
    x = normal(2, 7, 12)

    def layer(attention: Any) -> Any:
        return nnx.MultiHeadAttention(
            num_heads=3, in_features=12, decode=False, attention_fn=attention, rngs=nnx.Rngs(0)
        )

    def slow(query: Array, key: Array, value: Array, is_causal: bool = False, **_: Any) -> Array:
        weights = 1 + jnp.einsum("bthd,bshd->bhts", *(_unit(y) for y in (query, key)))
        if is_causal:
            weights = jnp.tril(weights)
        return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), value)

    for causal in (False, True):
        found, expected = (
            nnx.jit(nnx.value_and_grad(lambda m, x, c=causal: (m(x, is_causal=c) ** 2).sum()))(
                layer(f), x
            )
            for f in (dot_product_attention, slow)
        )
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    mask = nnx.make_causal_mask(x[..., 0])
    with pytest.raises(ValueError, match="mask cannot be honoured"):
        layer(dot_product_attention)(x, mask=mask)


def _unit(x: Array) -> Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def test_the_example_trains() -> None:
    pytest.importorskip("flax.nnx")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "40"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) >= 3 and losses[-1] < 0.8 * losses[0]
