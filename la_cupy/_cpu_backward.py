"""The gradient on the CPU, for one block of heads: a walk forward for dq, one back for dk and dv.

With the extra column of _cpu_rows and g^ = [g, -delta], where g = dout / den:

    S = sum_j k^[j] v^[j]^T                     T = [[dkv, dk_sum], [dv_sum, dcount]]
        over the keys before the chunk              + sum_i q^[i] g^[i]^T over the rows after it
    dq^[i] = S g^[i]   + sum_j (v^[j] . g^[i]) k^[j]            the chunk's keys j <= i
    dk^[j] = T v^[j]   + sum_i (v^[j] . g^[i]) q^[i]            the chunk's rows i >= j
    dv^[j] = T^T k^[j] + sum_i (q^[i] . k^[j]) g^[i]
    and T over all rows is the gradient of the initial state.

delta[i] = g[i] . out[i] is not taken from the stored out. With y = dq^ where delta counts as 0,

    delta[i] = (q^[i] . y[i]) / den[i],   dq^[i] = y[i] - delta[i] sum_j k^[j]

so that what must cancel in dq has been rounded alike. Values are taken less a constant, which
changes no gradient and leaves little to cancel: dk sums over later rows and takes the mean of all
values, dq sums over earlier keys and takes the mean of those before the chunk (a trend in v is
then harmless, too).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ._cpu_blocks import steps, sum_to
from ._cpu_rows import FeatureRows, augment_values, causal, divide, row_dot, running_sums
from ._cpu_state import centre_sums
from .problem import Problem

Array = Any
Put = Callable[[Array, slice], None]  # takes the gradient of some rows


class Operands(NamedTuple):
    """The arrays of one block of heads, where needed with axes of extent 1."""

    q: Array
    k: Array
    v: Array
    dout: Array
    normalizer: Array | None  # None: not normalised
    centre: Array | None  # [..., 1, E], taken off v


def query_pass(p: Problem, x: Operands, total: Array, compute: Any, put_dq: Put) -> Array:
    """Give dq to put_dq, chunk by chunk, and return delta [..., N]; total is S before all keys."""
    delta = np.zeros(x.dout.shape[:-1], compute)
    for step in steps(p):
        keys = values = None
        centre, shift = _running_mean(total, x.centre)
        if step.has_keys:
            keys = FeatureRows(x.k[..., step.keys, :], p.options, compute).augmented()
            values = augment_values(x.v[..., step.keys, :], centre, compute)
        if step.has_rows:
            rows = FeatureRows(x.q[..., step.rows, :], p.options, compute)
            state = centre_sums(total, shift).astype(compute, copy=False)
            g = _g(x, step.rows, compute)
            y = g @ _t(state[..., :-1])
            if keys is not None and values is not None:
                y += causal(g @ _t(values[..., :-1])) @ keys
            if x.normalizer is not None:
                queries = rows.augmented(p.options.b, p.options.a)
                deltas = divide(row_dot(queries, y), _den(x, step.rows, compute))
                key_sum = _t(state[..., -1:])
                if keys is not None:
                    key_sum = key_sum + running_sums(keys)
                y -= deltas * key_sum
                if shift is not None:
                    deltas = deltas + row_dot(g, shift.astype(compute))
                delta[..., step.rows] = deltas[..., 0]
            df = compute.type(p.options.b) * y[..., :-1]
            put_dq(rows.pullback(sum_to(df, x.q.shape[:-2])), step.rows)
        if keys is not None and values is not None:
            total += centre_sums(_t(keys) @ values, shift, sign=-1)
    return delta


def _running_mean(total: Array, centre: Array | None) -> tuple[Array | None, Array | None]:
    """(mean of the values so far, its distance from centre); total is centred at centre.

    The distance is exact, in float64: values and state must be centred at the same numbers.
    """
    if centre is None:
        return None, None
    count = total[..., -1:, -1:]
    mean = centre + np.divide(total[..., -1:, :-1], np.where(count > 0, count, np.inf))
    mean = mean.astype(centre.dtype)
    return mean, mean - centre.astype(np.float64)


def key_pass(
    p: Problem, x: Operands, total: Array, delta: Array, compute: Any, put_dk: Put, put_dv: Put
) -> None:
    """Give dk and dv to put_dk and put_dv; total goes from T after all rows to T before them."""
    for step in reversed(steps(p)):
        queries = g = None
        if step.has_rows:
            rows = FeatureRows(x.q[..., step.rows, :], p.options, compute)
            queries = rows.augmented(p.options.b, p.options.a)
            g = np.empty((*x.dout.shape[:-2], queries.shape[-2], x.dout.shape[-1] + 1), compute)
            g[..., :-1] = _g(x, step.rows, compute)
            g[..., -1] = -delta[..., step.rows]
        if step.has_keys:
            key_rows = FeatureRows(x.k[..., step.keys, :], p.options, compute)
            keys = key_rows.augmented()
            values = augment_values(x.v[..., step.keys, :], x.centre, compute)
            state = total.astype(compute, copy=False)
            df = sum_to(values @ _t(state[..., :-1, :]), x.k.shape[:-2])
            dv = sum_to(keys @ state[..., :-1], x.v.shape[:-2])
            if queries is not None and g is not None:
                slopes = _t(causal(g @ _t(values))) @ queries[..., :-1]
                df = df + sum_to(slopes, x.k.shape[:-2])
                dv = dv + sum_to(_t(causal(queries @ _t(keys))) @ g[..., :-1], x.v.shape[:-2])
            put_dk(key_rows.pullback(df), step.keys)
            put_dv(dv, step.keys)
        if queries is not None:
            total += sum_to(_t(queries) @ g, total.shape[:-2])


def _g(x: Operands, rows: slice, compute: Any) -> Array:
    """dout / den, 0 where den is 0."""
    dout = x.dout[..., rows, :].astype(compute)
    return dout if x.normalizer is None else divide(dout, _den(x, rows, compute), out=dout)


def _den(x: Operands, rows: slice, compute: Any) -> Array:
    assert x.normalizer is not None
    return x.normalizer[..., rows, None].astype(compute, copy=False)


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)
