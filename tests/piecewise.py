"""The reference for long sequences: the same executable definition, piece by piece through the state.

O(N) time and memory in float64. That pieces equal the whole is tested where both can be computed
(test_reference.py), so this adds no second definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from inputs import Case, Inputs
from measures import name_results

from la_cupy import reference
from la_cupy.results import Gradients, State

PIECE = 256


def piecewise_results(case: Case, inputs: Inputs, piece: int = PIECE) -> dict[str, Any]:
    """As ``reference_results``, for cases without broadcasting and, if causal, with N = M."""
    out, state, den, grads = piecewise(case, inputs, piece)
    return name_results(out=out, state=state, den=den, grads=grads)


def piecewise(case: Case, inputs: Inputs, piece: int = PIECE) -> tuple[Any, State, Any, Gradients]:
    """(out, final state, den, gradients)."""
    options = case.reference_options
    n, m, lead = inputs.q.shape[-2], inputs.k.shape[-2], case.lead
    d, e = inputs.q.shape[-1], inputs.v.shape[-1]
    rows, keys = _pieces(n, piece), _pieces(m, piece)
    none = slice(0, 0)
    if case.causal:
        assert n == m, "the pieces of rows and keys must be the same"
        walk = list(zip(rows, keys, strict=True))
    else:
        walk = [(none, part) for part in keys] + [(part, none) for part in rows]

    state = inputs.initial_state or _zero_state(lead, d, e)
    states, outs, dens = [], [], []
    for r, s in walk:
        states.append(state)
        q, k, v = inputs.q[..., r, :], inputs.k[..., s, :], inputs.v[..., s, :]
        out, state, den = reference.linear_attention(q, k, v, initial_state=state, **options)
        outs.append(out)
        dens.append(den)

    dstate = inputs.dstate or _zero_state(lead, d, e)
    gradients = []
    for (r, s), before in zip(reversed(walk), reversed(states), strict=True):
        q, k, v = inputs.q[..., r, :], inputs.k[..., s, :], inputs.v[..., s, :]
        grads = reference.linear_attention_vjp(
            inputs.dout[..., r, :], q, k, v, dstate=dstate, initial_state=before, **options
        )
        dstate = grads.initial_state
        gradients.append(grads)
    gradients.reverse()
    dq, dk, dv = (np.concatenate([g[i] for g in gradients], axis=-2) for i in range(3))
    dinitial = None if inputs.initial_state is None else dstate
    out, den = np.concatenate(outs, axis=-2), np.concatenate(dens, axis=-1)
    return out, state, den, Gradients(dq, dk, dv, dinitial)


def _pieces(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _zero_state(lead: tuple[int, ...], d: int, e: int) -> State:
    return State(*(np.zeros((*lead, *own)) for own in ((d, e), (d,), (e,), ())))
