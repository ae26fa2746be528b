"""Where arrays lie: a mesh of three axes, and the shardings of batches and parameters on it.

data   batches are split, parameters are on each device
fsdp   batches are split, and so is every parameter; XLA gathers a layer's as it needs them
seq    sequences are split; linear attention then exchanges states (`axis_name="seq"`)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lm_config import UserError

Result = TypeVar("Result")

AXES = ("data", "fsdp", "seq")
BATCH = ("data", "fsdp")
ROWS = P(BATCH, "seq")
"""Of arrays (batch, length, ...)."""


def make_mesh(data: int | None = None, fsdp: int = 1, seq: int = 1, devices: Any = None) -> Any:
    """A mesh over data * fsdp * seq of the devices (all); without `data`, as many as there are."""
    devices = devices or jax.devices()
    for name, size in (("data", data), ("fsdp", fsdp), ("seq", seq)):
        if size is not None and size < 1:
            raise UserError(f"--{name} is {size}, but must be 1 or more")
    if data is None:
        data = max(len(devices) // (fsdp * seq), 1)
    wanted = data * fsdp * seq
    if wanted > len(devices) or (jax.process_count() > 1 and wanted != len(devices)):
        raise UserError(
            f"a mesh of --data {data} --fsdp {fsdp} --seq {seq} has {wanted} devices, but there "
            f"are {len(devices)}: choose sizes whose product is {len(devices)}"
        )
    # JAX 0.11 makes axes explicit unless told otherwise; here XLA finds the shardings.
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh((data, fsdp, seq), AXES, devices=devices[:wanted], axis_types=types)


def check_mesh(mesh: Any, attention: str, batch: int, length: int) -> None:
    """What can be split over this mesh, or one sentence."""
    parts, pieces = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["seq"]
    if batch % parts:
        raise UserError(
            f"a batch of {batch} cannot be split over --data times --fsdp = {parts} devices: "
            f"choose a multiple of {parts}"
        )
    if length % pieces:
        raise UserError(
            f"a length of {length} cannot be split over --seq {pieces} devices: choose a multiple "
            f"of {pieces}"
        )
    if pieces > 1 and attention != "linear":
        raise UserError(
            f"--seq is {pieces}, but {attention} attention needs all keys on each device: write "
            f"--attention linear or --seq 1"
        )


def single(mesh: Any) -> bool:
    """Whether there is nothing to split."""
    return bool(mesh.size == 1)


def parameter_shardings(mesh: Any, tree: Any) -> Any:
    """For each array of a tree the sharding of its longest axis that "fsdp" divides.

    Vectors stay whole: gathering them costs more than keeping them. So does the first axis of
    stacked layers, which are taken one after the other.
    """
    size = mesh.shape["fsdp"]

    def sharding(path: Any, x: Any) -> NamedSharding:
        stacked = any("blocks" in str(key) for key in path)
        spec: list[str | None] = [None] * len(x.shape)
        candidates = [i for i, n in enumerate(x.shape) if n % size == 0 and i >= stacked]
        if size > 1 and len(x.shape) - stacked >= 2 and candidates:
            spec[max(candidates, key=lambda i: int(x.shape[i]))] = "fsdp"
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def put_batch(mesh: Any, rows: np.ndarray[Any, Any]) -> Any:
    """An array over the mesh; each process hands over what its own devices hold."""
    sharding = NamedSharding(mesh, ROWS)
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def first_process_first(make: Callable[[], Result]) -> Result:
    """What `make` returns: in other processes called once the first has left its files behind."""
    first = jax.process_index() == 0
    result = make() if first else None
    multihost_utils.sync_global_devices("first process first")
    return make() if result is None else result


def constrain(mesh: Mesh | None, x: Any) -> Any:
    """Keeps activations split as batches are, where XLA could prefer the parameters' axes."""
    if mesh is None or math.prod(mesh.shape.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, ROWS))
