"""The operator in plain JAX: chunks of rows, O(N D) memory, whatever XLA compiles for.

With one column more the operator is the unnormalised one, for queries q^ = [b q~, a], keys
k^ = [k~, 1] and values v^ = [v, 1], and a single matrix is the state (see la_cupy/cpu.py):

    S = sum_j k^[j] v^[j]^T = [[kv, k_sum], [v_sum, count]]
    [num, den][i] = S^T q^[i] + sum_j (q^[i] . k^[j]) v^[j]        the chunk's keys j <= i

Values are taken less their mean c, which is added to out again: that changes no derivative, but
what must cancel in them is then small. [kv', v_sum'] = [kv, v_sum] - [k_sum, count] c^T.

Derivatives are JAX's own. Chunks are checkpointed, so that only S is kept for each of them:
D E numbers for every CHUNK rows, O(N D) in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from la_cupy import dtypes
from la_cupy.problem import Options
from la_cupy.results import State

from ._jax_axes import alike, vary, varying

Array = Any
CHUNK = 128  # rows and keys of a causal step
LONG_CHUNK = 512  # rows or keys of a step without weights


def attention(
    q: Array, k: Array, v: Array, initial: State | None, options: Options, want_state: bool = True
) -> tuple[Array, State | None, Array]:
    """(out, final state or None, den) for arguments that have been checked.

    Inside shard_map, zeros that nothing is added to count as different from device to device, as
    every other result does.
    """
    parts = {} if initial is None else {f"state.{f}": x for f, x in initial._asdict().items()}
    q, k, v, *initial_parts = alike(q=q, k=k, v=v, **parts)
    n, m, causal = q.shape[-2], k.shape[-2], options.causal
    walk = _Walk(q, k, v, options)
    total = walk.initial(initial_parts)
    ahead, blind = max(m - n, 0), max(n - m, 0)  # keys that all rows see, rows that see no key
    pieces = []
    if not causal:
        total, _ = walk.run(total, None, (0, m))
        _, rows = walk.run(total, (0, n), None)
        pieces.append(rows)
    else:
        total, _ = walk.run(total, None, (0, ahead))
        if blind:
            pieces.append(walk.run(total, (0, blind), None)[1])
        total, rows = walk.run(total, (blind, n), (ahead, m))
        pieces.append(rows)
    out, den = (
        jnp.concatenate(parts, axis) for parts, axis in zip(_unzip(pieces), (-2, -1), strict=True)
    )
    total = walk.shift(total, 1)
    state = State(
        total[..., :-1, :-1], total[..., :-1, -1], total[..., -1, :-1], total[..., -1, -1]
    )
    return out, state if want_state else None, den


def _unzip(pairs: list[tuple[Array, Array]]) -> tuple[list[Array], list[Array]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


class _Walk:
    """Goes through rows and keys, chunk by chunk, with S in hand."""

    def __init__(self, q: Array, k: Array, v: Array, options: Options) -> None:
        self.arrays, self.options = (q, k, v), options
        self.out_dtype = dtypes.numpy_dtype(dtypes.promote(*(x.dtype.name for x in (q, k, v))))
        self.dtype = dtypes.numpy_dtype(dtypes.state_dtype(self.out_dtype.name))
        # float32 means float32: by default the tensor cores must not round the operands
        exact = options.precision != "tf32"
        precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
        self.dot = partial(jnp.matmul, precision=precision)
        self.centre = None  # [c, 0]: nothing is taken off the column of ones
        if options.normalize and v.shape[-2]:
            mean = jnp.mean(v.astype(self.dtype), -2, keepdims=True)
            self.centre = _with_column(lax.stop_gradient(mean), 0.0)

    def initial(self, state: list[Array]) -> Array:
        """S before all keys, with all leading axes that it will have."""
        _, k, v = self.arrays
        lead = np.broadcast_shapes(k.shape[:-2], v.shape[:-2])
        if not state:
            zeros = jnp.zeros((*lead, k.shape[-1] + 1, v.shape[-1] + 1), self.dtype)
            zeros = vary(zeros, varying(k, v))
            return alike(k=k, v=v, **{"state.kv": zeros})[-1]
        kv, k_sum, v_sum, count = (x.astype(self.dtype) for x in state)
        matrices = kv, k_sum[..., None], v_sum[..., None, :], count[..., None, None]
        lead = np.broadcast_shapes(lead, *(x.shape[:-2] for x in matrices))
        kv, k_sum, v_sum, count = (jnp.broadcast_to(x, lead + x.shape[-2:]) for x in matrices)
        top, bottom = (jnp.concatenate(row, -1) for row in ((kv, k_sum), (v_sum, count)))
        _, _, total = alike(k=k, v=v, **{"state.kv": jnp.concatenate((top, bottom), -2)})
        return self.shift(total, -1)

    def shift(self, total: Array, sign: int) -> Array:
        """S for values to which c is added, or from which it is taken."""
        if self.centre is None:
            return total
        return total + sign * total[..., -1:] * self.centre

    def run(
        self, total: Array, rows: tuple[int, int] | None, keys: tuple[int, int] | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """S after these keys, and (out, den) of these rows; with both, row i sees keys up to i."""
        q, k, v = self.arrays
        begin, end = rows or keys or (0, 0)
        lead = np.broadcast_shapes(q.shape[:-2], total.shape[:-2])
        if begin == end:
            none = q[..., :0, :1].astype(self.dtype) * total[..., :1, :-1]  # no rows
            return total, (none.astype(self.out_dtype), none[..., 0])
        size = min(CHUNK if rows and keys else LONG_CHUNK, end - begin)
        count = -(-(end - begin) // size)
        chunks = (
            _chunks(q, rows, size) if rows else None,
            _chunks(k, keys, size) if keys else None,
            _chunks(v, keys, size) if keys else None,
            # what pads the last chunk is no key
            jnp.arange(count * size).reshape(count, size, 1) < end - begin if keys else None,
        )
        if count == 1:  # nothing to save by a checkpoint, and XLA compiles faster
            total, (out, den) = self.step(total, jax.tree.map(lambda x: x[0], chunks))
            return total, (out, den)
        step = jax.checkpoint(self.step, prevent_cse=False)
        total, (out, den) = lax.scan(step, total, chunks)
        if not rows:
            return total, (out, den)
        out = jnp.moveaxis(out, 0, -3).reshape(*lead, count * size, v.shape[-1])
        den = jnp.moveaxis(den, 0, -2).reshape(*lead, count * size)
        return total, (out[..., : end - begin, :], den[..., : end - begin])

    def step(
        self, total: Array, chunk: tuple[Array | None, ...]
    ) -> tuple[Array, tuple[Array | None, Array | None]]:
        """One chunk of rows, of keys, or of both."""
        q, k, v, valid = chunk
        out = den = keys = values = None
        if k is not None and v is not None:
            keys = jnp.where(valid, _with_column(self.features(k), 1.0), 0)
            values = _with_column(v.astype(self.dtype), 1.0)
            if self.centre is not None:
                values = values - self.centre
        if q is not None:
            queries = _with_column(self.options.b * self.features(q), self.options.a)
            sums = self.dot(queries, total)
            if keys is not None:
                weights = jnp.tril(self.dot(queries, keys.mT))
                sums = sums + self.dot(weights, values)
            out, den = sums[..., :-1], sums[..., -1]
            if self.options.normalize:
                centre = None if self.centre is None else self.centre[..., :-1]
                out = _divide(out, den[..., None], centre)
            out = out.astype(self.out_dtype)
        if keys is not None:
            total = total + self.dot(keys.mT, values)
        return total, (out, den)

    def features(self, x: Array) -> Array:
        """phi(norm(x)) in the type of the sums."""
        x = x.astype(self.dtype)
        if self.options.qk_norm == "l2":
            x = _unit(x)
        return FEATURES[self.options.feature_map](x)


def _chunks(x: Array, rows: tuple[int, int], size: int) -> Array:
    """Rows [begin, end) of x as [count, ..., size, D], padded with zeros."""
    begin, end = rows
    x = lax.slice_in_dim(x, begin, end, axis=-2)
    rest = -(end - begin) % size
    if rest:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rest), (0, 0)])
    x = x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])
    return jnp.moveaxis(x, -3, 0)


def _with_column(x: Array, value: float) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)], constant_values=value)


def _divide(x: Array, den: Array, more: Array | None) -> Array:
    """x / den + more, and 0 with gradient 0 where den is exactly 0."""
    zero = den == 0
    quotient = x / jnp.where(zero, 1, den)
    return jnp.where(zero, 0, quotient if more is None else quotient + more)


def _unit(x: Array) -> Array:
    """x / |x| row by row; a row of zeros stays zero, with gradient 0.

    Rows are first scaled by a power of two, which rounds nothing, so that squares neither vanish
    nor overflow.
    """
    size = jnp.max(jnp.abs(lax.stop_gradient(x)), -1, keepdims=True)
    exponent = jnp.clip(jnp.frexp(size)[1], -125, 125)
    x = x * jnp.ldexp(jnp.ones_like(size), -exponent)
    squares = jnp.sum(x * x, -1, keepdims=True)
    zero = squares == 0  # where the root has no slope
    root = jnp.sqrt(jnp.where(zero, 1, squares))
    # The second `where` keeps XLA from making x / sqrt(y) into x * rsqrt(y), so that a row of width
    # 1 becomes exactly +-1, and weights of 1 - 1 exactly 0.
    return jnp.where(zero, 0, x / jnp.where(zero, 1, root))


def _elu1(y: Array) -> Array:
    positive = y > 0  # for these the exponential must not overflow in what is not taken
    return jnp.where(positive, y + 1, jnp.exp(jnp.where(positive, 0, y)))


FEATURES: dict[str, Callable[[Array], Array]] = {
    "identity": lambda y: y,
    "elu1": _elu1,
    "relu": lambda y: jnp.where(y > 0, y, 0),
    "silu": lambda y: y * jax.nn.sigmoid(y),
    "exp": jnp.exp,
}
"""phi, with slopes as in la_cupy/features.py: that of relu at 0 is 0."""
