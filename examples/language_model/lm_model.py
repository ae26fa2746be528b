"""A decoder-only transformer in Flax NNX, with linear or softmax attention.

Rotary positions, root-mean-square norms before each part, no biases. Layers are stacked along a
first axis and run by one scan, so that a program compiles as fast for 24 of them as for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from la_cupy.interop.jax import dot_product_attention, linear_attention
from lm_config import ModelConfig, UserError
from lm_mesh import ROWS, constrain

Array = Any
Tree = Any
Turns = tuple[Array, Array]
Cache = Any
"""What a layer remembers of earlier tokens: a State, or (keys, values) of all positions."""


def operator_options(config: ModelConfig) -> dict[str, Any]:
    """Those of linear attention, as its functions take them."""
    names = ("a", "b", "qk_norm", "feature_map")
    return {name: getattr(config, name) for name in names}


def turns(config: ModelConfig, rows: int, start: Any = 0) -> Turns:
    """Cosines and sines (rows, 1, D / 2) of angles that grow with the row, from `start` on."""
    half = config.head_width // 2
    rates = 10000.0 ** (-jnp.arange(half) / half)
    angles = (start + jnp.arange(rows))[:, None, None] * rates
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, by: Turns) -> Array:
    """Rotary positions: columns i and i + D / 2 of (B, N, H, D) turn as a point of the plane."""
    cos, sin = by
    u, w = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([u * cos - w * sin, u * sin + w * cos], axis=-1).astype(x.dtype)


def softmax(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """JAX's attention; by cuDNN where a GPU and the types allow it, and no mask is needed."""
    fast = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16)
    fast = fast and "mask" not in options and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0
    implementation = "cudnn" if fast else "xla"
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)


class Attention(nnx.Module):
    """Causal self-attention of (B, N, width)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, mesh: Any = None) -> None:
        self.config, self.mesh = config, mesh
        self.query, self.key, self.value = (
            linear(config, config.width, config.width, rngs) for _ in range(3)
        )
        self.out = linear(config, config.width, config.width, rngs, gain=added_gain(config))

    def __call__(
        self, x: Array, by: Turns, start: Any = 0, cache: Cache = None
    ) -> tuple[Array, Cache]:
        heads = (*x.shape[:2], self.config.heads, self.config.head_width)
        q, k, v = (part(x).reshape(heads) for part in (self.query, self.key, self.value))
        q, k = rotate(q, by), rotate(k, by)
        if cache is None:
            out = self._whole(q, k, v)
        elif self.config.attention == "linear":
            out, cache = self._through_state(q, k, v, cache)
        else:
            out, cache = self._through_keys(q, k, v, start, cache)
        return self.out(out.reshape(x.shape)), cache

    def _whole(self, q: Array, k: Array, v: Array) -> Array:
        """Of sequences that are all there, as in training."""
        if self.config.attention == "softmax":
            return softmax(q, k, v, is_causal=True)
        options = operator_options(self.config)
        if self.mesh is None or self.mesh.shape["seq"] == 1:
            # Reads q, k, v with the heads behind the rows, as the projections leave them. Named,
            # the result is kept as it lies, and not with the heads before the rows.
            out = dot_product_attention(q, k, v, is_causal=True, **options)
            return checkpoint_name(out, "attention")

        def piece(q: Array, k: Array, v: Array) -> Array:
            heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
            out = linear_attention(*heads_first, causal=True, axis_name="seq", **options)
            return out.swapaxes(1, 2)

        return jax.shard_map(piece, mesh=self.mesh, in_specs=ROWS, out_specs=ROWS)(q, k, v)

    def _through_state(self, q: Array, k: Array, v: Array, state: Cache) -> tuple[Array, Cache]:
        heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
        out, state = linear_attention(
            *heads_first,
            causal=True,
            initial_state=state,
            return_state=True,
            **operator_options(self.config),
        )
        return out.swapaxes(1, 2), state

    def _through_keys(
        self, q: Array, k: Array, v: Array, start: Any, cache: Cache
    ) -> tuple[Array, Cache]:
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)
            for old, new in zip(cache, (k, v), strict=True)
        )
        if isinstance(start, int) and start == 0:  # nothing is remembered yet
            return softmax(q, k, v, is_causal=True), (keys, values)
        row = start + jnp.arange(q.shape[1])
        mask = jnp.arange(keys.shape[1]) <= row[:, None]
        return softmax(q, keys, values, mask=mask[None, None]), (keys, values)


class Block(nnx.Module):
    """Attention and a multilayer perceptron, each on normalised input and added to it."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, mesh: Any = None) -> None:
        self.mesh = mesh
        self.norm1, self.norm2 = (norm(config, rngs) for _ in range(2))
        self.attention = Attention(config, rngs, mesh)
        self.wide = linear(config, config.width, 4 * config.width, rngs)
        self.narrow = linear(config, 4 * config.width, config.width, rngs, gain=added_gain(config))

    def __call__(
        self, x: Array, by: Turns, start: Any = 0, cache: Cache = None
    ) -> tuple[Array, Cache]:
        attended, cache = self.attention(self.norm1(x), by, start, cache)
        x = x + attended
        x = x + self.narrow(nnx.gelu(self.wide(self.norm2(x))))
        return constrain(self.mesh, x), cache


class Transformer(nnx.Module):
    """Tokens (B, N) to the logits (B, N, vocabulary) of what comes next, in float32."""

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, mesh: Any = None, remat: str = "none"
    ) -> None:
        self.config, self.mesh, self.remat = config, mesh, remat
        self.embed = nnx.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nnx.initializers.normal(1.0),
            rngs=rngs,
        )

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs, mesh)

        self.blocks = stack(rngs)
        self.norm = norm(config, rngs)
        # so small that at first every token is about as likely as another
        self.head = linear(config, config.width, config.vocabulary, rngs, gain=0.1)

    def __call__(self, tokens: Array) -> Array:
        if tokens.shape[1] > self.config.length:
            raise UserError(
                f"a sequence has {tokens.shape[1]} tokens, but the model is configured for "
                f"{self.config.length}: cut it, or train with a larger --length"
            )
        x = constrain(self.mesh, lookup(self.embed.embedding[...], tokens, self.config.dtype))
        definition, stacked = nnx.split(self.blocks)
        by = turns(self.config, tokens.shape[1])  # once, for all layers

        def layer(x: Array, parameters: Any) -> tuple[Array, None]:
            return nnx.merge(definition, parameters)(x, by)[0], None

        x, _ = jax.lax.scan(rematerialised(layer, self.remat), x, stacked)
        return self.logits(x)

    def logits(self, x: Array) -> Array:
        """Summed in float32 and left there: a softmax over 50 k needs more than 8 bits."""
        x = self.norm(x)
        return wide_product(x, self.head.kernel[...].astype(x.dtype))


@jax.custom_vjp
def wide_product(x: Array, matrix: Array) -> Array:
    """x (..., W) times a matrix (W, V) in float32, whatever the types of both.

    JAX's own gradient would multiply its float32 with the other operand, so in float32, too; here
    it is rounded first, and the tensor cores take it.
    """
    return jnp.matmul(x, matrix, preferred_element_type=jnp.float32)


def _wide_forward(x: Array, matrix: Array) -> tuple[Array, tuple[Array, Array]]:
    return wide_product(x, matrix), (x, matrix)


def _wide_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, matrix = kept
    gradient = gradient.astype(x.dtype)
    return gradient @ matrix.T, jnp.einsum("...w,...v->wv", x, gradient)


wide_product.defvjp(_wide_forward, _wide_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: Array, tokens: Array, dtype: str) -> Array:
    """Rows of a table (V, W).

    Their gradient is a product with what is 1 at each token. Adding up rows at the places of
    tokens would be a scatter, which on a GPU adds in another order each time.
    """
    return table[tokens].astype(dtype)


def _lookup_forward(table: Array, tokens: Array, dtype: str) -> tuple[Array, tuple[Array, int]]:
    return lookup(table, tokens, dtype), (tokens, table.shape[0])


def _lookup_backward(dtype: str, kept: tuple[Array, int], gradient: Array) -> tuple[Array, None]:
    tokens, rows = kept
    ones = jax.nn.one_hot(tokens, rows, dtype=dtype)
    table = jnp.einsum("...v,...w->vw", ones, gradient, preferred_element_type=jnp.float32)
    return table, None


lookup.defvjp(_lookup_forward, _lookup_backward)


def rematerialised(layer: Any, remat: str) -> Any:
    """A layer that computes again in the backward pass what it did not keep.

    "dots" keeps the results of products and of attention, "layers" the input of each layer only.
    """
    if remat == "none":
        return layer
    policy = keep_products if remat == "dots" else None
    # Inside a scan nothing can be merged with the first computation, so no barrier is needed.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def keep_products(primitive: Any, *_: Any, **__: Any) -> bool:
    """Of products, attention (this library's and cuDNN's) and named arrays: what "dots" keeps."""
    name = str(primitive.name)
    return name in ("dot_general", "name", "la_cupy_forward") or "attention_fwd" in name


def rebuild(make: Callable[[], nnx.Module]) -> Callable[[Tree], Any]:
    """A function from a plain tree of arrays to the module of `make` with these parameters."""
    definition, variables = nnx.split(nnx.eval_shape(make))

    def module(parameters: Tree) -> Any:
        state = jax.tree.map(lambda x: x, variables)  # a copy, since the next line writes to it
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(definition, state)

    return module


def linear(
    config: ModelConfig, width: int, out: int, rngs: nnx.Rngs, gain: float = 1.0
) -> nnx.Linear:
    """A matrix without bias that at first multiplies the size of its input by `gain`.

    A fixed 0.02 is gain 1 at width 2048; at width 64 a model that starts with it has not learned
    to recall after 5000 steps, and with this after 300.
    """
    start = nnx.initializers.normal(gain / math.sqrt(width))
    return nnx.Linear(width, out, use_bias=False, kernel_init=start, dtype=config.dtype, rngs=rngs)


def added_gain(config: ModelConfig) -> float:
    """Of a matrix whose result is added, twice a layer: so that the sum is as large as a part."""
    return 1 / math.sqrt(2 * config.layers)


def norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
