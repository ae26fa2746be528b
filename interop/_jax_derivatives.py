"""The derivatives of the four primitives, in terms of one another; see _jax_ops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad

from ._jax_ops import BACKWARD, CURVATURE, FORWARD, TANGENT, Array, Arrays, Call, Op


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero)


def _zero_tangent(x: Array) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _moved(call: Call, tangents: Arrays) -> tuple[Call, list[Array]]:
    moved = tuple(not _is_zero(t) for t in tangents)
    return replace(call, moved=moved), [t for t in tangents if not _is_zero(t)]


def _forward_jvp(x: Arrays, tangents: Arrays, *, call: Call) -> tuple[Arrays, Arrays]:
    *y, den = FORWARD.bind(*x, call=call)
    along, t = _moved(call, tangents)
    no_den = _zero_tangent(den)
    return [*y, den], [*TANGENT.bind(*x, den, *t, call=along), no_den]


def _tangent_transpose(cotangents: Arrays, *operands: Any, call: Call) -> Arrays:
    (*x, den), t = operands[: len(call.x) + 1], operands[len(call.x) + 1 :]
    given = replace(call, moved=(), state=not all(map(_is_zero, cotangents[1:])))
    c = map(ad.instantiate_zeros, cotangents[: len(given.c)])
    gradients = dict(zip(call.x, BACKWARD.bind(*c, *x, den, call=given), strict=True))
    return _for_linear(operands, t, [gradients[name] for name in call.t])


def _for_linear(operands: Arrays, linear: Arrays, gradients: Arrays) -> Arrays:
    """Cotangents of all operands, of which the last are linear; some of those may be known."""
    wanted = map(ad.is_undefined_primal, linear)
    none: list[Any] = [None] * (len(operands) - len(linear))
    return none + [g if w else None for g, w in zip(gradients, wanted, strict=True)]


def _backward_jvp(operands: Arrays, tangents: Arrays, *, call: Call) -> tuple[Arrays, Arrays]:
    count = len(call.c)
    c, (*x, den) = operands[:count], operands[count:]
    dc, dx = tangents[:count], tangents[count:-1]
    gradients = BACKWARD.bind(*operands, call=call)
    terms = []
    if not all(map(_is_zero, dc)):
        # without a tangent of the state there is less to do
        along = replace(call, state=not all(map(_is_zero, dc[1:])))
        some = map(ad.instantiate_zeros, dc[: len(along.c)])
        terms.append(BACKWARD.bind(*some, *x, den, call=along))
    if not all(map(_is_zero, dx)):
        along, t = _moved(call, dx)
        terms.append(CURVATURE.bind(*c, *x, *t, call=along))
    if not terms:  # only den moved
        return gradients, [_zero_tangent(g) for g in gradients]
    tangent = terms[0]
    for term in terms[1:]:
        tangent = [ad.add_jaxvals(*pair) for pair in zip(tangent, term, strict=True)]
    return gradients, tangent


def _backward_transpose(cotangents: Arrays, *operands: Any, call: Call) -> Arrays:
    count = len(call.c)
    c, (*x, den) = operands[:count], operands[count:]
    along, t = _moved(call, cotangents)
    results = TANGENT.bind(*x, den, *t, call=along)
    wanted = map(ad.is_undefined_primal, c)
    return [r if w else None for r, w in zip(results, wanted, strict=True)] + [None] * (len(x) + 1)


def _curvature_transpose(cotangents: Arrays, *operands: Any, call: Call) -> Arrays:
    rest = operands[: len(call.c) + len(call.x)]
    along, t = _moved(call, cotangents)
    gradients = dict(zip(call.x, CURVATURE.bind(*rest, *t, call=along), strict=True))
    return _for_linear(operands, operands[len(rest) :], [gradients[name] for name in call.t])


def _plain_jvp(op: Op, operands: Arrays, tangents: Arrays, *, call: Call) -> tuple[Arrays, Arrays]:
    """Third derivatives are those of the plain functions."""
    along = [ad.instantiate_zeros(t) for t in tangents]
    results: tuple[Arrays, Arrays] = jax.jvp(partial(op.plain, call=call), list(operands), along)
    return results


ad.primitive_jvps[FORWARD.primitive] = _forward_jvp
ad.primitive_jvps[BACKWARD.primitive] = _backward_jvp
ad.primitive_jvps[TANGENT.primitive] = partial(_plain_jvp, TANGENT)
ad.primitive_jvps[CURVATURE.primitive] = partial(_plain_jvp, CURVATURE)
ad.primitive_transposes[TANGENT.primitive] = _tangent_transpose
ad.primitive_transposes[BACKWARD.primitive] = _backward_transpose
ad.primitive_transposes[CURVATURE.primitive] = _curvature_transpose
