"""Which implementation a primitive becomes, decided as a program is lowered for a platform."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# JAX tells a lowering rule the devices of its program only where the primitive is in this set,
# which has no public name; custom_partitioning needs them.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.interpreters import mlir

from . import _jax_cuda, _jax_sharding
from ._jax_ops import BACKWARD, FORWARD, OPS, Call, Op, wide_as_given

ROUTES = {"cuda": _jax_cuda.CUDA}
"""Platforms on which value and gradient are custom calls; on all others they are plain JAX."""


def _rule(op: Op, platform: str | None) -> Callable[..., Any]:
    def rule(context: Any, *operands: Any, call: Call) -> Any:
        route = ROUTES.get(platform or "") if op in (FORWARD, BACKWARD) else None
        function: Callable[..., Any]
        if _is_split(context):
            function = _jax_sharding.partitioned(op, call)
        elif route is not None:
            function = _jax_cuda.lower(route, op, call)
        else:
            function = partial(op.plain, call=call)
        return mlir.lower_fun(wide_as_given(function), multiple_results=True)(context, *operands)

    return rule


def _is_split(context: Any) -> bool:
    """Whether XLA is to split the program over several devices; not so under shard_map."""
    axes = context.module_context.axis_context
    return len(getattr(axes, "device_assignment", None) or ()) > 1


for _op in OPS:
    prim_requires_devices_during_lowering.add(_op.primitive)
    for _platform in ("cpu", "cuda", None):
        mlir.register_lowering(_op.primitive, _rule(_op, _platform), platform=_platform)
