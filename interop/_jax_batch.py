"""vmap of the four primitives: a mapped axis becomes the first leading axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from ._jax_axes import core_axes
from ._jax_ops import BACKWARD, CURVATURE, FORWARD, TANGENT, Array, Arrays, Call, Op


def _lead_first(name: str, x: Array, axis: int | None, rank: int) -> Array:
    """x with its mapped axis in front of `rank` leading axes; as it is without one."""
    if axis is None:
        return x
    x = jnp.moveaxis(x, axis, 0)
    ones = (1,) * (rank - (x.ndim - 1 - core_axes(name)))
    return x.reshape(x.shape[0], *ones, *x.shape[1:])


def _sizes(operands: Arrays, axes: Sequence[int | None]) -> tuple[int, list[Any]]:
    """The length of the mapped axis, and the types of the operands without it."""
    size, types = 0, []
    for x, axis in zip(operands, axes, strict=True):
        shape = list(x.shape)
        if axis is not None:
            size = shape.pop(axis)
        types.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype))
    return size, types


def _forward_batch(operands: Arrays, axes: Any, *, call: Call) -> tuple[Arrays, list[int | None]]:
    """Operands that are not mapped are broadcast, like any other leading axis."""
    size, types = _sizes(operands, axes)
    p = FORWARD.problem(call, types)
    placed = [
        _lead_first(name, x, axis, len(p.lead))
        for name, x, axis in zip(call.x, operands, axes, strict=True)
    ]
    results = FORWARD.bind(*placed, call=call)
    # the state has no axes of q's own
    state_mapped = any(a is not None for a in axes[1:])
    shapes = {"out": p.out_shape, "den": (*p.lead, p.n)}
    made: list[Array] = []
    where: list[int | None] = []
    for name, x in zip(FORWARD.results(call), results, strict=True):
        mapped = name in shapes or state_mapped
        core = x.shape[x.ndim - core_axes(name) :]
        shape = shapes.get(name, (*p.state_lead, *core))
        made.append(x.reshape(size, *shape) if mapped else x)
        where.append(0 if mapped else None)
    return made, where


def _backward_batch(operands: Arrays, axes: Any, *, call: Call) -> tuple[Arrays, list[int]]:
    """Every gradient is wanted for each entry of the axis, so that every operand needs the axis."""
    size, types = _sizes(operands, axes)
    p = BACKWARD.problem(call, types)
    names = BACKWARD.operands(call)
    placed = []
    for name, x, axis in zip(names, operands, axes, strict=True):
        if axis is None:
            x, axis = jnp.broadcast_to(x, (size, *x.shape)), 0
        placed.append(_lead_first(name, x, axis, len(p.lead)))
    shapes = {name: x.shape for name, x in zip(names, types, strict=True)}
    results = BACKWARD.bind(*placed, call=call)
    made = [x.reshape(size, *shapes[name]) for name, x in zip(call.x, results, strict=True)]
    return made, [0] * len(made)


def _plain_batch(op: Op, operands: Arrays, axes: Any, *, call: Call) -> tuple[Arrays, list[int]]:
    results = jax.vmap(partial(op.plain, call=call), in_axes=tuple(axes))(*operands)
    return results, [0] * len(results)


batching.primitive_batchers[FORWARD.primitive] = _forward_batch
batching.primitive_batchers[BACKWARD.primitive] = _backward_batch
batching.primitive_batchers[TANGENT.primitive] = partial(_plain_batch, TANGENT)
batching.primitive_batchers[CURVATURE.primitive] = partial(_plain_batch, CURVATURE)
