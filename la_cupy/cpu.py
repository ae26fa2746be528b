"""The CPU backend: chunks of rows, matrix products, O(N D + D E) memory.

With one column more (see _cpu_rows) the operator is the unnormalised one, for queries
q^ = [b q~, a], keys k^ = [k~, 1] and values v^ = [v, 1], and a single matrix is the state:

    S = sum_j k^[j] v^[j]^T = [[kv, k_sum], [v_sum, count]]
    [num, den][i] = S^T q^[i] + sum_j (q^[i] . k^[j]) v^[j]        the chunk's keys j <= i

Products are taken in float32 (float64 for float64); running sums are kept in float64.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from . import dtypes
from ._cpu_backward import Operands, key_pass, query_pass
from ._cpu_blocks import Block, Shape, Sink, align, block_shape, blocks, steps, take
from ._cpu_rows import FeatureRows, augment_values, causal, divide
from ._cpu_state import centre_gradients, centre_sums, pack, unpack
from .problem import Problem
from .results import STATE_RANKS, Gradients, State

Array = Any


@np.errstate(all="ignore")  # non-finite inputs give non-finite results in silence, as on a GPU
def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    initial_state: State | None = None,
    out: Array | None = None,
    want_state: bool = True,
) -> tuple[Array, State | None, Array]:
    """(out, final state or None, den) of a checked problem; out is written where it is given."""
    p = problem
    sums = dtypes.numpy_dtype(p.state_dtype)
    if out is None:
        out = np.empty(p.out_shape, dtypes.numpy_dtype(p.dtype))
    den = np.empty((*p.lead, p.n), sums)
    if want_state and 0 in p.lead and 0 not in p.state_lead:
        # no query, but keys all the same: nothing to write but the state
        no_rows = replace(p, lead=p.state_lead, n=0)
        _, state, _ = forward(no_rows, np.empty((0, p.d), q.dtype), k, v, initial_state)
        return out, state, den

    state = _empty_state(p, sums) if want_state else None
    initial, final = _align_state(initial_state, p.lead), _align_state(state, p.lead)
    arrays = [align(x, p.lead, 2) for x in (q, k, v)]
    for block in blocks(p.lead, p):
        total = pack(_take_state(initial, block), _state_shape(p, block), p.d, p.e)
        qs, ks, vs = (take(x, block) for x in arrays)
        _forward_block(p, qs, ks, vs, total, take(out, block), take(den, block))
        if final is not None:
            for part, value in zip(final, unpack(total), strict=True):
                take(part, block)[...] = value
    return out, state, den


def _forward_block(
    p: Problem, q: Array, k: Array, v: Array, total: Array, out: Array, den: Array
) -> None:
    """Write out[..., N, E] and den[..., N] of some heads; total goes from the first to the last S."""
    compute = dtypes.numpy_dtype(p.state_dtype)
    for step in steps(p):
        keys = values = None
        if step.has_keys:
            keys = FeatureRows(k[..., step.keys, :], p.options, compute).augmented()
            values = augment_values(v[..., step.keys, :], None, compute)
        if step.has_rows:
            rows = FeatureRows(q[..., step.rows, :], p.options, compute)
            queries = rows.augmented(p.options.b, p.options.a)
            sums = queries @ total.astype(compute, copy=False)
            if keys is not None:
                sums += causal(queries @ keys.swapaxes(-1, -2)) @ values
            divisor = sums[..., -1:].copy()  # apart from num, or dividing makes a copy of both
            den[..., step.rows] = divisor[..., 0]
            num, target = sums[..., :-1], out[..., step.rows, :]
            if not p.options.normalize:
                target[...] = num
            elif target.dtype == compute:
                divide(num, divisor, out=target)
            else:
                target[...] = divide(num, divisor, out=num)
        if keys is not None:
            total += keys.swapaxes(-1, -2) @ values


@np.errstate(all="ignore")
def vjp(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    normalizer: Array | None = None,
    initial_state: State | None = None,
    dstate: State | None = None,
) -> Gradients:
    """Gradients of sum(out dout) + sum(state dstate) of a checked problem."""
    p = problem
    compute = dtypes.numpy_dtype(p.state_dtype)
    if 0 in p.lead and 0 not in p.state_lead:
        # no query, but dstate reaches the keys all the same
        no_rows = replace(p, lead=p.state_lead, n=0)
        none = np.empty((*p.state_lead, 0, p.e), compute), np.empty((0, p.d), q.dtype)
        grads = vjp(no_rows, *none, k, v, None, initial_state, dstate)
        return grads._replace(q=np.zeros(q.shape, q.dtype))
    if not p.options.normalize:
        normalizer = None
    elif normalizer is None:
        # by the forward's own arithmetic, so that a sum is exactly zero here where it is there
        _, _, normalizer = forward(p, q, k, v, initial_state, want_state=False)

    sinks = [Sink(x, p.lead, 2, compute) for x in (q, k, v)]
    state_sinks = [
        Sink(np.asarray(part), p.lead, core, np.float64)
        for part, core in zip(initial_state or (), STATE_RANKS, strict=False)
    ]
    arrays = [align(x, p.lead, 2) for x in (q, k, v)]
    initial, final = _align_state(initial_state, p.lead), _align_state(dstate, p.lead)
    for block in blocks(p.lead, p):
        qs, ks, vs = (take(x, block) for x in arrays)
        dens = None if normalizer is None else take(normalizer, block)
        x = Operands(qs, ks, vs, take(dout, block), dens, _centre(p, vs, compute))
        put_q, put_k, put_v = (partial(sink.put, block) for sink in sinks)

        total = pack(_take_state(initial, block), _state_shape(p, block), p.d, p.e)
        delta = query_pass(p, x, centre_sums(total, x.centre), compute, put_q)

        # heads of q in other blocks may share this state: dstate counts once
        given = _take_state(final, block) if _is_first(p, block) else None
        total = pack(given, _state_shape(p, block), p.d, p.e)
        total = centre_gradients(total, x.centre)
        key_pass(p, x, total, delta, compute, put_k, put_v)
        total = centre_gradients(total, x.centre, sign=-1)
        for sink, value in zip(state_sinks, unpack(total), strict=False):
            sink.put(block, value)
    parts = [sink.result() for sink in state_sinks]
    dq, dk, dv = (sink.result() for sink in sinks)
    return Gradients(dq, dk, dv, State(*parts) if parts else None)


def _centre(p: Problem, v: Array, compute: Any) -> Array | None:
    """The mean of all values [..., 1, E], where a constant added to them changes no gradient."""
    if not p.options.normalize or not p.m:
        return None
    mean: Array = v.mean(axis=-2, keepdims=True, dtype=np.float64).astype(compute)
    return mean


def _empty_state(p: Problem, dtype: Any) -> State:
    cores = ((p.d, p.e), (p.d,), (p.e,), ())
    return State(*(np.empty((*p.state_lead, *core), dtype) for core in cores))


def _align_state(state: State | None, lead: Shape) -> State | None:
    if state is None:
        return None
    return State(*(align(x, lead, core) for x, core in zip(state, STATE_RANKS, strict=True)))


def _take_state(state: State | None, block: Block) -> State | None:
    return None if state is None else State(*(take(part, block) for part in state))


def _state_lead(p: Problem) -> Shape:
    return (1,) * (len(p.lead) - len(p.state_lead)) + p.state_lead


def _state_shape(p: Problem, block: Block) -> Shape:
    """The leading axes of a block's state: 1 where only q or nothing has an extent."""
    return block_shape(_state_lead(p), block)


def _is_first(p: Problem, block: Block) -> bool:
    """Whether no earlier block has the same state heads."""
    return all(s.start == 0 for s, n in zip(block, _state_lead(p), strict=True) if n == 1)
