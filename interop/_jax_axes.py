"""The leading axes of the operator's arrays, which come by their names: "q", "state.kv", "den"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, reshard

Axis = int  # a leading axis, counted from the last one: 0, 1, ...
Split = dict[Axis, tuple[str, ...]]  # names of the mesh's axes along which it is split


def core_axes(name: str) -> int:
    """How many axes an array has behind its leading ones."""
    if name == "den":
        return 1
    return {"kv": 2, "k_sum": 1, "v_sum": 1, "count": 0}.get(name.partition(".")[2], 2)


def memory_order(name: str, rank: int, heads: int) -> tuple[int, ...]:
    """The axes of an array, outermost in memory first, with its last `heads` leading axes behind rows.

    >>> memory_order("q", 4, heads=1)          # (B, H, N, D), as (B, N, H, D) lies in memory
    (0, 2, 1, 3)
    """
    if name not in ("q", "k", "v", "dout", "out"):
        return tuple(range(rank))
    rows = rank - 2
    first = max(rows - heads, 0)
    return (*range(first), rows, *range(first, rows), rank - 1)


def lead_axes(name: str, shape: Sequence[int]) -> list[Axis]:
    rank = len(shape) - core_axes(name)
    return list(range(rank - 1, -1, -1))


def extents(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[Axis, int]:
    """The size of each leading axis where it is not broadcast."""
    extent: dict[Axis, int] = {}
    for name, shape in zip(names, shapes, strict=True):
        for axis, size in zip(lead_axes(name, shape), shape, strict=False):
            if extent.get(axis, 1) == 1:
                extent[axis] = size
    return extent


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def split_of(names: Sequence[str], types: Sequence[Any]) -> Split:
    """How leading axes are split: as the first array says that is split there."""
    extent = extents(names, [x.shape for x in types])
    split: Split = {}
    used: set[str] = set()
    for name, x in zip(names, types, strict=True):
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
        for axis, along in zip(lead_axes(name, x.shape), spec, strict=False):
            along = names_of(along)
            parts = 1
            for mesh_axis in along:
                parts *= x.sharding.mesh.shape[mesh_axis]
            if parts == 1 or axis in split or used & set(along) or extent[axis] % parts:
                continue
            split[axis] = along
            used |= set(along)
    return split


def specs_of(names: Sequence[str], shapes: Sequence[Sequence[int]], split: Split) -> list[Any]:
    """The part of each array on a device."""
    extent = extents(names, shapes)
    specs = []
    for name, shape in zip(names, shapes, strict=True):
        lead = zip(lead_axes(name, shape), shape, strict=False)
        entries = [split.get(axis) if size == extent[axis] else None for axis, size in lead]
        specs.append(PartitionSpec(*entries, *(None,) * core_axes(name)))
    return specs


def varying(*arrays: Any) -> frozenset[str]:
    """The axes of a shard_map over which any of the arrays differs from device to device."""
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary(x: Any, axes: frozenset[str]) -> Any:
    """x, as what differs from device to device along these axes of a shard_map, too."""
    more = axes - varying(x)
    return jax.lax.pcast(x, tuple(sorted(more)), to="varying") if more else x


def alike(**named: Any) -> list[Any]:
    """The arrays, split alike along explicit axes of the mesh, which JAX wants of a product's."""
    types = [jax.typeof(x) for x in named.values()]
    specs = specs_of(list(named), [x.shape for x in types], split_of(list(named), types))
    return [
        x if tuple(spec) == tuple(t.sharding.spec) else reshard(x, spec)
        for x, t, spec in zip(named.values(), types, specs, strict=True)
    ]
