"""The operator as an executable definition: float64, every weight written out, O(N M) memory.

Symbols as in the README: q[..., N, D], k[..., M, D], v[..., M, E], leading axes broadcast.

    q~ = phi(norm(q)),  k~ = phi(norm(k))
    w[i,j] = a + b (q~[i] . k~[j]),  0 where causal and j > i + (M - N)
    num[i] = sum_j w[i,j] v[j]  +  a v_sum + b q~[i] kv           (kv, k_sum, v_sum, count:
    den[i] = sum_j w[i,j]       +  a count + b q~[i] . k_sum       the initial state, if any)
    out[i] = num[i] / den[i],  0 where den[i] == 0;  num[i] when not normalised

This file is what every backend is measured against. It shares no code with any of them, not even
the feature maps, and takes the formulas in the order in which they are written above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .results import Gradients, State

Array = NDArray[np.float64]


class _Features(NamedTuple):
    """Features of x, and the map from a gradient of the features to one of x."""

    value: Array
    pullback: Callable[[Array], Array]


class _Terms(NamedTuple):
    """Everything the forward pass names, kept for the gradient."""

    q: _Features
    k: _Features
    v: Array
    initial: tuple[Array, Array, Array, Array]
    visible: NDArray[np.bool_]
    weights: Array
    num: Array
    den: Array


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    a: float = 1.0,
    b: float = 1.0,
    qk_norm: str | None = "l2",
    feature_map: str = "identity",
    normalize: bool = True,
    initial_state: Any = None,
) -> tuple[Array, State, Array]:
    """The result, the final state and the normaliser (sum of the weights), all in float64.

    q[..., N, D], k[..., M, D], v[..., M, E] -> out[..., N, E],
    State(kv[..., D, E], k_sum[..., D], v_sum[..., E], count[...]) and den[..., N].
    """
    t = _forward(q, k, v, causal, a, b, qk_norm, feature_map, initial_state)
    den = t.den[..., None]
    out = np.where(den != 0, t.num / np.where(den != 0, den, 1), 0) if normalize else t.num
    return out, _final_state(t), t.den


def linear_attention_vjp(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dstate: Any = None,
    causal: bool = False,
    a: float = 1.0,
    b: float = 1.0,
    qk_norm: str | None = "l2",
    feature_map: str = "identity",
    normalize: bool = True,
    initial_state: Any = None,
) -> Gradients:
    """Gradients of ``sum(out * dout) + sum(final_state * dstate)``, in float64.

    Each gradient has the shape of its input: it is summed over the axes that broadcasting added.
    ``Gradients.initial_state`` is None when no initial state is given.
    """
    t = _forward(q, k, v, causal, a, b, qk_norm, feature_map, initial_state)
    kv, k_sum, _, _ = t.initial
    v = t.v
    dout = _float64(dout)

    if normalize:
        some = t.den != 0
        safe = np.where(some, t.den, 1)
        out = np.where(some[..., None], t.num / safe[..., None], 0)
        g = np.where(some[..., None], dout / safe[..., None], 0)
        delta = np.where(some, (out * dout).sum(-1) / safe, 0)
    else:
        g = dout
        delta = np.zeros(t.den.shape)

    # dw[i,j] = g[i] . v[j] - delta[i]: what one weight more would change
    dw = np.where(t.visible, g @ _t(v) - delta[..., None], 0)
    dq_features = b * (dw @ t.k.value)
    dq_features = dq_features + b * (g @ _t(kv) - delta[..., None] * k_sum[..., None, :])
    dk_features = b * (_t(dw) @ t.q.value)
    dv = _t(t.weights) @ g

    dq = t.q.pullback(_sum_to(dq_features, t.q.value.shape))
    dk_total = _sum_to(dk_features, t.k.value.shape)
    dv_total = _sum_to(dv, v.shape)

    dkv = b * (_t(t.q.value) @ g)
    dk_sum = -b * (delta[..., None] * t.q.value).sum(-2)
    dv_sum = a * g.sum(-2)
    dcount = -a * delta.sum(-1)
    parts = [
        _sum_to(d, s.shape) for d, s in zip((dkv, dk_sum, dv_sum, dcount), t.initial, strict=True)
    ]

    if dstate is not None:
        shapes = [part.shape for part in _final_state(t)]
        ekv, ek_sum, ev_sum, ecount = (
            np.broadcast_to(_float64(part), shape)
            for part, shape in zip(dstate, shapes, strict=True)
        )
        dk_total = dk_total + _sum_to(v @ _t(ekv) + ek_sum[..., None, :], t.k.value.shape)
        dv_total = dv_total + _sum_to(t.k.value @ ekv + ev_sum[..., None, :], v.shape)
        parts = [
            d + _sum_to(e, s.shape)
            for d, e, s in zip(parts, (ekv, ek_sum, ev_sum, ecount), t.initial, strict=True)
        ]

    dinitial = None if initial_state is None else State(*parts)
    return Gradients(dq, t.k.pullback(dk_total), dv_total, dinitial)


def _forward(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    a: float,
    b: float,
    qk_norm: str | None,
    feature_map: str,
    initial_state: Any,
) -> _Terms:
    q, k, v = _float64(q), _float64(k), _float64(v)
    n, m, d, e = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if initial_state is None:
        initial = (np.zeros((d, e)), np.zeros(d), np.zeros(e), np.zeros(()))
    else:
        kv0, k_sum0, v_sum0, count0 = (_float64(part) for part in initial_state)
        initial = (kv0, k_sum0, v_sum0, count0)
    kv, k_sum, v_sum, count = initial

    fq = _features(q, qk_norm, feature_map)
    fk = _features(k, qk_norm, feature_map)
    i, j = np.arange(n)[:, None], np.arange(m)[None, :]
    visible = (j <= i + (m - n)) if causal else np.ones((n, m), dtype=bool)
    weights = np.where(visible, a + b * (fq.value @ _t(fk.value)), 0)
    num = weights @ v + a * v_sum[..., None, :] + b * (fq.value @ kv)
    den = weights.sum(-1) + a * count[..., None] + b * (fq.value * k_sum[..., None, :]).sum(-1)
    den = np.broadcast_to(den, num.shape[:-1])
    return _Terms(fq, fk, v, initial, visible, weights, num, den)


def _final_state(t: _Terms) -> State:
    """What the sequence leaves behind; its leading axes are those of k, v and the initial state."""
    kv, k_sum, v_sum, count = t.initial
    m = t.v.shape[-2]
    kv = kv + _t(t.k.value) @ t.v
    lead = np.broadcast_shapes(kv.shape[:-2], k_sum.shape[:-1], v_sum.shape[:-1], count.shape)
    return State(
        np.broadcast_to(kv, lead + kv.shape[-2:]),
        np.broadcast_to(k_sum + t.k.value.sum(-2), lead + k_sum.shape[-1:]),
        np.broadcast_to(v_sum + t.v.sum(-2), lead + v_sum.shape[-1:]),
        np.broadcast_to(count + m, lead),
    )


def _features(x: Array, qk_norm: str | None, feature_map: str) -> _Features:
    """phi(norm(x)) and its pullback: df -> df phi'(y), then (dy - y (y . dy)) / |x|."""
    if qk_norm is None:
        y, length = x, None
    elif qk_norm == "l2":
        # the largest entry goes first, so that squares neither vanish nor overflow
        largest = np.abs(x).max(-1, keepdims=True, initial=0)
        scaled = x / np.where(largest == 0, 1, largest)
        length = largest * np.sqrt((scaled * scaled).sum(-1, keepdims=True))
        y = np.where(length == 0, 0, x / np.where(length == 0, 1, length))
    else:
        raise ValueError(f"qk_norm is {qk_norm!r}; it may be 'l2' or None.")

    # the unused branch of np.where must not overflow: exp sees min(y, 0) only
    if feature_map == "identity":
        value, slope = y, np.ones(y.shape)
    elif feature_map == "elu1":
        value = np.where(y > 0, y + 1, np.exp(np.minimum(y, 0)))
        slope = np.where(y > 0, 1, np.exp(np.minimum(y, 0)))
    elif feature_map == "relu":
        value, slope = np.where(y > 0, y, 0), np.where(y > 0, 1.0, 0.0)
    elif feature_map == "silu":
        sigmoid = np.where(y > 0, 1, np.exp(np.minimum(y, 0))) / (1 + np.exp(-np.abs(y)))
        value, slope = y * sigmoid, sigmoid * (1 + y * (1 - sigmoid))
    elif feature_map == "exp":
        value, slope = np.exp(y), np.exp(y)
    else:
        raise ValueError(f"feature_map is {feature_map!r}, which the reference does not know.")

    def pullback(df: Array) -> Array:
        dy = df * slope
        if length is None:
            return dy
        dx = (dy - y * (y * dy).sum(-1, keepdims=True)) / np.where(length == 0, 1, length)
        return np.where(length == 0, 0, dx)

    return _Features(value, pullback)


def _float64(x: Any) -> Array:
    return np.asarray(x).astype(np.float64)


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that broadcasting from ``shape`` added or widened."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    widened = tuple(
        i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want
    )
    total: Array = x.sum(axis=widened, keepdims=True)
    return total
