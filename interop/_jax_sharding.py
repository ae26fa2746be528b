"""How the primitives are split over devices under plain jit: along their leading axes.

Every leading axis is a batch axis: each device computes its own part, and nothing is gathered.
Only rows and columns (N, M, D, E) are needed whole. Gradients of operands that lack an axis which
is split are summed over the devices along it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._jax_axes import Split, extents, lead_axes, names_of, specs_of, split_of
from ._jax_ops import BACKWARD, CURVATURE, Call, Op, wide_as_given

Array = Any


def partitioned(op: Op, call: Call) -> Callable[..., list[Array]]:
    """The primitive as XLA's partitioner takes it."""

    def whole(*operands: Array) -> list[Array]:
        return op.bind(*operands, call=call)

    function = custom_partitioning(whole)
    function.def_partition(
        partition=partial(_partition, op, call),
        infer_sharding_from_operands=partial(_infer, op, call),
        sharding_rule=partial(_rule, op, call),
    )
    result: Callable[..., list[Array]] = function
    return result


def _rule(op: Op, call: Call, mesh: Mesh, operands: Any, results: Any) -> SdyShardingRule:
    """What moves along with what, for Shardy: full leading axes, and no others."""
    shapes = [tuple(x.shape) for x in (*operands, *results)]
    names = (*op.operands(call), *op.results(call))
    extent = extents(names, shapes)
    mappings, alone = [], 0
    for name, shape in zip(names, shapes, strict=True):
        lead = lead_axes(name, shape)
        mapping = []
        for i, size in enumerate(shape):
            axis = lead[i] if i < len(lead) else None
            if axis is not None and size == extent[axis]:
                mapping.append(f"lead{axis}")
            else:
                mapping.append(f"own{alone}")
                alone += 1
        mappings.append(tuple(mapping))
    count = len(operands)
    return SdyShardingRule(tuple(mappings[:count]), tuple(mappings[count:]))


def _all(op: Op, call: Call, operands: Any, results: Any) -> tuple[Any, Any, Any]:
    names = (*op.operands(call), *op.results(call))
    types = (*operands, *results)
    return names, types, [x.shape for x in types]


def _infer(op: Op, call: Call, mesh: Mesh, operands: Any, results: Any) -> Any:
    """How the results are split, from the operands; for GSPMD."""
    names, _, shapes = _all(op, call, operands, results)
    split = split_of(names[: len(operands)], operands)
    specs = specs_of(names, shapes, split)[len(operands) :]
    return [NamedSharding(mesh, spec) for spec in specs]


def _partition(op: Op, call: Call, mesh: Mesh, operands: Any, results: Any) -> Any:
    """The program of one device, and what part of each array it takes and makes."""
    names, types, shapes = _all(op, call, operands, results)
    split = split_of(names, types)
    specs = specs_of(names, shapes, split)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    count = len(operands)

    def one(*parts: Array) -> list[Array]:
        if op not in (BACKWARD, CURVATURE):
            return op.bind(*parts, call=call)
        parts = _count_dstate_once(op, call, parts, operands, split)
        made = op.bind(*parts, call=call)
        return [
            jax.lax.psum(x, missing) if (missing := _missing(spec, split)) else x
            for x, spec in zip(made, specs[count:], strict=True)
        ]

    return mesh, wide_as_given(one), shardings[count:], tuple(shardings[:count])


def _missing(spec: PartitionSpec, split: Split) -> tuple[str, ...]:
    """The mesh axes along which others are split and this array is not."""
    own = {name for entry in spec for name in names_of(entry)}
    return tuple(name for along in split.values() for name in along if name not in own)


def _count_dstate_once(
    op: Op, call: Call, parts: tuple[Array, ...], operands: Any, split: Split
) -> tuple[Array, ...]:
    """Devices that share a state head, with rows of q of their own: dstate counts on the first."""
    names = op.operands(call)
    lead = op.problem(call, operands).state_lead
    state_axes = {len(lead) - 1 - i for i, size in enumerate(lead) if size != 1}
    shared = [name for axis, along in split.items() if axis not in state_axes for name in along]
    if not shared:
        return parts
    first = sum(jax.lax.axis_index(name) for name in shared) == 0
    return tuple(
        jax.numpy.where(first, x, 0) if name.startswith("dstate") else x
        for name, x in zip(names, parts, strict=True)
    )
