"""A float64 reference in O(N) for large inputs, on NumPy or CuPy arrays.

The formulas of design.md over all chunks at once: inside a chunk the weights themselves, before it
the exclusive cumulative sum of what the chunks leave behind. It is checked against
la_cupy.reference (test_gpu_helpers.py) and shares nothing with the kernels.

For N = M, a length that `chunk` divides, leading axes equal, and no states.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from inputs import Case

from la_cupy.results import Gradients, State


def chunked(
    case: Case, q: Any, k: Any, v: Any, dout: Any, chunk: int = 64, xp: Any = np
) -> tuple[Any, State, Any, Gradients]:
    """(out, final state, den, gradients) for the options of `case`."""
    n = q.shape[-2]
    assert k.shape[:-1] == v.shape[:-1] == q.shape[:-1], (q.shape, k.shape, v.shape)
    assert n % chunk == 0, f"{chunk} does not divide {n}"

    def cut(x: Any) -> Any:
        return widen(x, xp).reshape(*x.shape[:-2], n // chunk, chunk, x.shape[-1])

    def join(x: Any) -> Any:
        return x.reshape(*x.shape[:-3], n, x.shape[-1])

    qf, pull_q = _features(cut(q), case, xp)
    kf, pull_k = _features(cut(k), case, xp)
    v, dout = cut(v), cut(dout)
    a, b = case.a, case.b
    mask = xp.tril(xp.ones((chunk, chunk))) if case.causal else xp.zeros((chunk, chunk))

    # What each chunk leaves behind, and what the chunks before it (all, if not causal) left.
    sums = [_t(kf) @ v, kf.sum(-2), v.sum(-2), xp.full(v.shape[:-2], float(chunk))]
    axes = [-3, -2, -2, -1]
    kv, k_sum, v_sum, count = (
        _before(x, axis, case.causal, xp) for x, axis in zip(sums, axes, strict=True)
    )
    weights = mask * (a + b * (qf @ _t(kf)))
    num = weights @ v + a * v_sum[..., None, :] + b * (qf @ kv)
    den = weights.sum(-1) + a * count[..., None] + b * (qf @ k_sum[..., None])[..., 0]
    if case.normalize:
        safe = xp.where(den == 0, 1, den)[..., None]
        out = xp.where(den[..., None] == 0, 0, num / safe)
        g = xp.where(den[..., None] == 0, 0, dout / safe)
        delta = (out * g).sum(-1)
    else:
        out, g = num, dout
        delta = xp.zeros(den.shape)

    dw = mask * (g @ _t(v) - delta[..., None])
    qg, q_delta, g_sum = (
        _after(x, axis, case.causal, xp)
        for x, axis in ((_t(qf) @ g, -3), ((delta[..., None] * qf).sum(-2), -2), (g.sum(-2), -2))
    )
    dq = b * (dw @ kf + g @ _t(kv) - delta[..., None] * k_sum[..., None, :])
    dk = b * (_t(dw) @ qf + v @ _t(qg) - q_delta[..., None, :])
    dv = _t(weights) @ g + a * g_sum[..., None, :] + b * (kf @ qg)
    grads = Gradients(join(pull_q(dq)), join(pull_k(dk)), join(dv), None)
    state = State(*(x.sum(axis) for x, axis in zip(sums, axes, strict=True)))
    return join(out), state, den.reshape(*den.shape[:-2], n), grads


def widen(x: Any, xp: Any = np) -> Any:
    """x in float64; bfloat16 through its bits, so that no cast of CuPy's own has to exist."""
    if str(x.dtype) == "bfloat16":
        bits = xp.ascontiguousarray(x).view(xp.uint16).astype(xp.uint32) << 16
        x = bits.view(xp.float32)
    return x.astype(xp.float64)


def _t(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def _before(x: Any, axis: int, causal: bool, xp: Any) -> Any:
    """Sums over the chunks before each chunk; over all of them if nothing is masked."""
    if causal:
        return xp.cumsum(x, axis) - x
    return _everywhere(x, axis, xp)


def _after(x: Any, axis: int, causal: bool, xp: Any) -> Any:
    if causal:
        return x.sum(axis, keepdims=True) - xp.cumsum(x, axis)
    return _everywhere(x, axis, xp)


def _everywhere(x: Any, axis: int, xp: Any) -> Any:
    return xp.ascontiguousarray(xp.broadcast_to(x.sum(axis, keepdims=True), x.shape))


def _features(x: Any, case: Case, xp: Any) -> tuple[Any, Any]:
    """phi(norm(x)) and the function that takes a gradient back through both."""
    y, length = x, None
    if case.qk_norm == "l2":
        length = xp.sqrt((x * x).sum(-1, keepdims=True))
        length = xp.where(length == 0, xp.inf, length)
        y = x / length
    value, slope = _PHI[case.feature_map](y, xp)

    def pull(d: Any) -> Any:
        d = d * slope
        return d if length is None else (d - y * (y * d).sum(-1, keepdims=True)) / length

    return value, pull


def _silu(x: Any, xp: Any) -> tuple[Any, Any]:
    s = 1 / (1 + xp.exp(-x))
    return x * s, s * (1 + x * (1 - s))


_PHI = {
    "identity": lambda x, xp: (x, xp.ones_like(x)),
    "elu1": lambda x, xp: (
        xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, 0))),
        xp.where(x > 0, 1, xp.exp(xp.minimum(x, 0))),
    ),
    "relu": lambda x, xp: (xp.maximum(x, 0), (x > 0).astype(xp.float64)),
    "silu": _silu,
    "exp": lambda x, xp: (xp.exp(x), xp.exp(x)),
}
