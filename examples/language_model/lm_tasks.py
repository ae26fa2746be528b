"""Two tasks that ask what attention can find again: associative recall, and copying.

Both are drawn anew for each step on the device itself, from a key: (tokens, targets), each (B, N),
where a target of -1 is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from lm_config import UserError

Array = Any


@dataclass(frozen=True)
class Task:
    """What `draw` needs and what a model must have for it."""

    name: str
    vocabulary: int
    length: int
    draw: Callable[[Array, int], tuple[Array, Array]]


def recall(pairs: int, length: int, vocabulary: int = 512) -> Task:
    """Multi-query associative recall: `pairs` of key and value, then keys whose value is asked for.

    Keys are from the lower half of the vocabulary, values from the upper. After the pairs, keys
    among them come in any order, each followed by its value, until the row is full.
    """
    half, queries = vocabulary // 2, (length - 2 * pairs) // 2
    if pairs >= half or queries < 1:
        raise UserError(
            f"{pairs} pairs need more than {2 * pairs} tokens and a vocabulary above {2 * pairs}, "
            f"but there are {length} and {vocabulary}: ask for fewer pairs"
        )

    def row(key: Array) -> tuple[Array, Array]:
        keys, values, order = jax.random.split(key, 3)
        k = jax.random.choice(keys, half, (pairs,), replace=False)
        v = half + jax.random.randint(values, (pairs,), 0, half)
        asked = jax.random.randint(order, (queries,), 0, pairs)
        shown = jnp.stack([jnp.append(k, k[asked]), jnp.append(v, v[asked])], axis=1).reshape(-1)
        # the target of a key is the value that follows it
        targets = jnp.full(shown.shape, -1).at[2 * pairs :: 2].set(v[asked])
        return shown.astype(jnp.int32), targets.astype(jnp.int32)

    name = f"recall, {pairs} pairs, N = {2 * (pairs + queries)}"
    return Task(name, vocabulary, 2 * (pairs + queries), _rows(row))


def copying(symbols: int, vocabulary: int = 64) -> Task:
    """`symbols` random tokens, a mark, and the same tokens again, which are asked for."""

    def row(key: Array) -> tuple[Array, Array]:
        x = jax.random.randint(key, (symbols,), 1, vocabulary)
        tokens = jnp.concatenate([x, jnp.zeros(1, x.dtype), x])[:-1]
        targets = jnp.concatenate([jnp.full(symbols, -1), x])
        return tokens.astype(jnp.int32), targets.astype(jnp.int32)

    return Task(f"copying, {symbols} tokens", vocabulary, 2 * symbols, _rows(row))


def _rows(row: Callable[[Array], tuple[Array, Array]]) -> Callable[[Array, int], Any]:
    return lambda key, batch: jax.vmap(row)(jax.random.split(key, batch))
