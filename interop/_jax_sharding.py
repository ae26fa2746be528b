"""How the primitives are split over devices under plain jit: along their leading axes.

Every leading axis is a batch axis: each device computes its own part, and nothing is gathered.
Only rows and columns (N, M, D, E) are needed whole. Gradients of operands that lack an axis which
is split are summed over the devices along it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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
        decode_shardings=False,  # JAX knows whole axes of the mesh only: see _factored
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
    mesh, operands = _factored(mesh, operands)
    names, _, shapes = _all(op, call, operands, results)
    split = split_of(names[: len(operands)], operands)
    specs = specs_of(names, shapes, split)[len(operands) :]
    return [NamedSharding(mesh, spec) for spec in specs]


def _partition(op: Op, call: Call, mesh: Mesh, operands: Any, results: Any) -> Any:
    """The program of one device, and what part of each array it takes and makes."""
    names, types, shapes = _all(op, call, operands, results)
    mesh, types = _factored(mesh, types)
    split = split_of(names, types)
    specs = specs_of(names, shapes, split)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    count = len(operands)

    def one(*parts: Array) -> list[Array]:
        # JAX 0.11 would ask for the sharding of every value along the caller's explicit axes
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return of_parts(*parts)

    def of_parts(*parts: Array) -> list[Array]:
        if op not in (BACKWARD, CURVATURE):
            return op.bind(*parts, call=call)
        parts = _count_dstate_once(op, call, parts, operands, split)
        made = op.bind(*parts, call=call)
        return [
            jax.lax.psum(x, missing) if (missing := _missing(spec, split)) else x
            for x, spec in zip(made, specs[count:], strict=True)
        ]

    return mesh, wide_as_given(one), shardings[count:], tuple(shardings[:count])


def _factored(mesh: Mesh, types: Sequence[Any]) -> tuple[Mesh, list[Any]]:
    """The mesh with axes of prime lengths, and the types with how they are split along these.

    An array can be split along a part of an axis: (B, 8 heads) split over 8 devices, seen as
    (B, 2, 4 heads), is split over 2 x 4. What does not fit these axes either counts as not split.
    """
    known = [x for x in types if x.sharding is not None]
    if not known:
        return mesh, list(types)
    devices = list(_parts(known[0].sharding, len(known[0].shape)))  # in the program's order
    sizes = mesh.devices.shape if mesh.size == len(devices) else (len(devices),)
    lengths = [p for size in sizes for p in _primes(size)]
    grid = np.array(devices).reshape(lengths)
    factored = Mesh(grid, [f"part{i}" for i in range(len(lengths))])
    return factored, [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_along(factored, x)) for x in types
    ]


def _primes(size: int) -> list[int]:
    factors, p = [], 2
    while size > 1:
        while size % p == 0:
            factors.append(p)
            size //= p
        p += 1
    return factors


def _along(mesh: Mesh, x: Any) -> NamedSharding:
    """How x is split, by the names of this mesh's axes."""
    whole = NamedSharding(mesh, PartitionSpec())
    if x.sharding is None:
        return whole
    rank = len(x.shape)
    wanted = _parts(x.sharding, rank)
    first = mesh.devices[(0,) * mesh.devices.ndim]
    entries: list[Any] = [[] for _ in range(rank)]
    for i, name in enumerate(mesh.axis_names):
        second = mesh.devices[tuple(int(i == j) for j in range(mesh.devices.ndim))]
        for entry, a, b in zip(entries, wanted[first], wanted[second], strict=True):
            if a != b:
                entry.append((b.start - (a.start or 0), name))
    along = [tuple(name for _, name in sorted(e, reverse=True)) for e in entries]
    if sum(map(len, along)) > len(set().union(*along)):  # one axis of the mesh along two of x's
        return whole
    found = NamedSharding(mesh, PartitionSpec(*along))
    return found if _parts(found, rank) == wanted else whole


def _parts(sharding: Any, rank: int) -> dict[Any, tuple[slice, ...]]:
    """Which part each device has, of an array of a shape that every number of parts divides."""
    parts: dict[Any, tuple[slice, ...]]
    parts = sharding.devices_indices_map((len(sharding.device_set),) * rank)
    return parts


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
