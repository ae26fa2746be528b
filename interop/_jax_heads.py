"""The arguments of dot_product_attention: what jax.nn's and Flax's mean for linear attention."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from la_cupy import checks

from ._jax_axes import names_of

Array = Any


def check_heads(query: Array, key: Array, value: Array, causal: bool) -> None:
    """Types and shapes, by the names and in the layout of dot_product_attention."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.dtype(name, x)
        if x.ndim < 3 or x.ndim != query.ndim:
            raise ValueError(
                f"{name} has shape {x.shape}, but query, key and value need the axes "
                f"([B,] T, N, H), ([B,] S, K, H) and ([B,] S, K, Hv)"
            )
        checks.min_ndim(name, x, "N, H")
    leads = [x.shape[:-3] for x in (query, key, value)]
    try:
        np.broadcast_shapes(*leads)
    except ValueError:
        raise ValueError(
            f"the leading axes of query {leads[0]}, key {leads[1]} and value {leads[2]} do not "
            f"broadcast: equal them, or give the axis to broadcast over extent 1"
        ) from None
    (rows, heads, width), (keys, key_heads, key_width) = query.shape[-3:], key.shape[-3:]
    values, value_heads = value.shape[-3:-1]
    if width != key_width:
        raise ValueError(
            f"query has H = {width} in its last axis and key has H = {key_width}, but they must "
            f"be equal: query is ([B,] T, N, H), key is ([B,] S, K, H)"
        )
    if keys != values:
        raise ValueError(
            f"key has {keys} rows and value has {values}, but each key needs one value: "
            f"key is ([B,] S, K, H), value is ([B,] S, K, Hv)"
        )
    if causal and rows != keys:
        raise ValueError(
            f"is_causal needs as many keys as queries, but there are {keys} and {rows}, which JAX "
            f"aligns at the first row and la_cupy at the last: call linear_attention, whose "
            f"causal=True is aligned at the last"
        )
    if key_heads != value_heads or (heads and not key_heads) or (key_heads and heads % key_heads):
        raise ValueError(
            f"query has {heads} heads, key {key_heads} and value {value_heads}, but key and value "
            f"need equally many, and query a multiple of that"
        )


def key_repeats(query: Array, key_heads: int) -> int:
    """How often a head of key and value must be there for each device to have whole groups.

    Only an explicit axis of the mesh is seen here, and only along one does JAX refuse to cut the
    heads into groups: 6 on 3, over 2 devices.
    """
    if key_heads == 1:
        return 1  # one group, which may lie on several devices
    sharding = jax.typeof(query).sharding
    parts: int = math.prod(sharding.mesh.shape[name] for name in names_of(sharding.spec[-2]))
    return parts // math.gcd(parts, key_heads)


_PRECISIONS = {
    None: "highest",
    jax.lax.Precision.HIGHEST: "highest",
    jax.lax.Precision.HIGH: "tf32",
    jax.lax.Precision.DEFAULT: "tf32",
}


def precision(given: Any) -> Any:
    """la_cupy's name of JAX's precision; anything else as it is, for make_options to judge."""
    of_jax = given is None or isinstance(given, jax.lax.Precision)
    return _PRECISIONS[given] if of_jax else given


_WITHOUT_EFFECT = ("dropout_rng", "broadcast_dropout", "implementation", "promote_dtype")
_IMPOSSIBLE = {
    "bias": "linear attention has no logits to add it to",
    "mask": "linear attention can mask future keys only, by is_causal=True",
    "scale": "the slope of the weights is b",
    "query_seq_lengths": "all rows are computed: cut them off afterwards",
    "key_value_seq_lengths": "all keys count",
    "local_window_size": "linear attention has no window",
    "return_residual": "linear attention has no softmax",
    "module": "linear attention forms no weights to sow",
}


def refuse_dropout(rate: Any, deterministic: Any) -> None:
    try:
        dropped = bool(not deterministic and rate)
    except jax.errors.TracerBoolConversionError as error:
        raise TypeError(
            "dropout_rate or deterministic is traced, but both must be known when a program is "
            "traced: pass Python numbers, or make them static arguments of jax.jit"
        ) from error
    if dropped:
        raise ValueError(
            f"dropout_rate is {rate}, but linear attention forms no weights to drop: "
            f"pass 0, or deterministic=True"
        )


def refuse(**arguments: Any) -> None:
    """Arguments that cannot be honoured must not be there."""
    for name, value in arguments.items():
        if name not in _IMPOSSIBLE and name not in _WITHOUT_EFFECT:
            raise TypeError(f"dot_product_attention has no argument {name}: leave it out")
        if name in _IMPOSSIBLE and value is not None and value is not False:
            raise ValueError(f"{name} cannot be honoured, since {_IMPOSSIBLE[name]}: pass None")
