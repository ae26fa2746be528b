"""Rows of q and k on the CPU: x -> phi(norm(x)) and back, for one chunk of rows at a time.

Rows carry one more column than the maths has, so that each matrix product also yields the sum
that goes with it: keys end in 1, values in 1, queries in a (and are scaled by b). Then

    [b q~, a] . [k~, 1] = a + b q~ . k~ = w,    sum_j w [v, 1] = [num, den].
"""

from functools import lru_cache
from typing import Any

import numpy as np

from .features import FEATURES
from .problem import Options

Array = Any


class FeatureRows:
    """phi(norm(x)) of a chunk x[..., C, D], in the type of the arithmetic."""

    def __init__(self, x: Array, options: Options, dtype: np.dtype) -> None:
        self._map = None if options.feature_map == "identity" else FEATURES[options.feature_map]
        self._x = x.astype(dtype, copy=False)
        self._length: Array | None = None
        self._exponent: Array | None = None
        if options.qk_norm == "l2":
            self._x, self._length, self._exponent = _lengths(self._x)

    def augmented(self, scale: float = 1.0, last: float = 1.0) -> Array:
        """[scale phi(norm(x)), last], of shape [..., C, D + 1]."""
        rows = np.empty((*self._x.shape[:-1], self._x.shape[-1] + 1), self._x.dtype)
        value = rows[..., :-1]
        if self._map is not None:
            value[...] = self._map.forward(self._norm())
        elif self._length is not None:
            divide(self._x, self._length, out=value)
        else:
            value[...] = self._x
        if scale != 1:
            value *= value.dtype.type(scale)
        rows[..., -1] = last
        return rows

    def pullback(self, df: Array) -> Array:
        """The gradient of x for that of phi(norm(x)); overwrites and returns df.

        dy = df phi'(y);  dx = (dy - y (y . dy)) / |x|,  0 where x is 0.
        """
        y = self._norm()
        if self._map is not None:
            df *= self._map.derivative(y)
        if self._length is not None:
            df -= y * row_dot(y, df)
            divide(df, self._length, out=df)
            if self._exponent is not None:
                np.ldexp(df, -self._exponent, out=df)
        return df

    def _norm(self) -> Array:
        return self._x if self._length is None else divide(self._x, self._length)


def augment_values(v: Array, centre: Array | None, dtype: np.dtype) -> Array:
    """[v - centre, 1], of shape [..., C, E + 1]; centre [..., 1, E] may have more heads than v."""
    lead = v.shape[:-2] if centre is None else np.broadcast_shapes(v.shape[:-2], centre.shape[:-2])
    rows = np.empty((*lead, v.shape[-2], v.shape[-1] + 1), dtype)
    if centre is None:
        rows[..., :-1] = v
    else:
        np.subtract(v.astype(dtype, copy=False), centre, out=rows[..., :-1])
    rows[..., -1] = 1
    return rows


def causal(weights: Array) -> Array:
    """weights[..., C, C] with those of later keys set to 0, in place."""
    weights *= _lower_triangle(weights.shape[-1], weights.dtype)
    return weights


@lru_cache(maxsize=16)
def _lower_triangle(size: int, dtype: np.dtype) -> Array:
    return np.tri(size, dtype=dtype)


def running_sums(rows: Array) -> Array:
    """Of rows [..., C, D]: row i is the sum of the rows 0..i. (As a product: cumsum is slower.)"""
    sums: Array = _lower_triangle(rows.shape[-2], rows.dtype) @ rows
    return sums


def divide(x: Array, den: Array, out: Array | None = None) -> Array:
    """x / den, and 0 where den[..., 1] is exactly 0."""
    quotient = np.divide(x, den, out=out)
    zero = den == 0
    if zero.any():
        np.copyto(quotient, 0, where=zero)
    return quotient


def row_dot(x: Array, y: Array) -> Array:
    """Dot products of rows: [..., C, D], [..., C, D] -> [..., C, 1]."""
    return np.einsum("...d,...d->...", x, y)[..., None]


def _lengths(x: Array) -> tuple[Array, Array, Array | None]:
    """(x', |x'|, exponent) with x = x' 2^exponent row by row; exponent None means 0.

    Squares of very small or large entries would vanish or overflow. Only then are rows scaled by
    powers of two, which rounds nothing: a row's result does not depend on its neighbours.
    """
    squares = row_dot(x, x)
    exponent = None
    low, high = _safe_squares(x.dtype)
    if squares.size and not (squares.min() >= low and squares.max() <= high):
        exponent = np.frexp(np.abs(x).max(axis=-1, keepdims=True))[1]
        x = np.ldexp(x, -exponent)
        squares = row_dot(x, x)
    return x, np.sqrt(squares), exponent


@lru_cache
def _safe_squares(dtype: np.dtype) -> tuple[float, float]:
    info = np.finfo(dtype)
    return float(info.tiny) / float(info.eps), float(info.max) * float(info.eps)
