"""Compiling ahead: which kernels a choice of types and widths needs."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np

from . import dtypes
from .checks import FEATURE_MAPS
from .device import DeviceInfo
from .kernels import Spec
from .layouts import contiguous_strides
from .plan import backward_plan, forward_plan
from .problem import backward_problem, forward_problem
from .results import Array, State

KINDS = ("bfloat16", "float16", "float32", "tf32", "float64")
"""Types of arithmetic to compile for; "tf32" is float32 with precision="tf32"."""
STANDARD_KINDS = ("bfloat16", "float16", "float32")
STANDARD_WIDTHS = (64, 128)
STANDARD_FEATURES = ("identity",)
ALL_WIDTHS = (32, 64, 128, 256)
ALL_FEATURES = tuple(FEATURE_MAPS)

_LENGTH = 1 << 20
"""Long enough for a plan to cut the sequence into segments: then every kernel takes part."""


def specs(device: DeviceInfo, kind: str, width: int, feature: str) -> list[Spec]:
    """The kernels for D = E = `width`, causal or not, forward and backward, with states, k and v of
    a head's own or shared; and for single steps.

    Lengths, batches, strides and the other options need no kernels of their own, and neither
    does a width that is padded to the same power of two.
    """
    dtype = "float32" if kind == "tf32" else kind
    sums = dtypes.state_dtype(dtype)
    rows = _stand_in(dtype, 1, _LENGTH, width)
    state = State(*(_stand_in(sums, 1, *own) for own in ((width, width), (width,), (width,), ())))
    found: dict[Spec, None] = {}
    for causal, heads in product((False, True), (1, 2)):
        queries = _stand_in(dtype, heads, _LENGTH, width)
        options: dict[str, Any] = {
            "causal": causal,
            "feature_map": feature,
            "precision": "tf32" if kind == "tf32" else "highest",
            "initial_state": state,
        }
        forward = forward_problem(queries, rows, rows, **options)
        backward = backward_problem(queries, queries, rows, rows, dstate=state, **options)
        for plan in (forward_plan(forward, device, True), backward_plan(backward, device, True)):
            found |= {spec: None for launch in plan.launches for spec in launch.specs}
    one = _stand_in(dtype, 1, 1, width)
    step = forward_plan(forward_problem(one, one, one, initial_state=state), device, True)
    found |= {launch.spec: None for launch in step.launches}
    return list(found)


def choices(
    device: DeviceInfo,
    kinds: Iterable[str] = STANDARD_KINDS,
    widths: Iterable[int] = STANDARD_WIDTHS,
    features: Iterable[str] = STANDARD_FEATURES,
) -> dict[str, list[Spec]]:
    """{"bfloat16, width 64, identity": its kernels}; a kernel may be in several."""
    return {
        f"{kind}, width {width}, {feature}": specs(device, kind, width, feature)
        for kind, width, feature in product(kinds, widths, features)
    }


def _stand_in(dtype: str, *shape: int) -> Array:
    """A contiguous array of this shape, as a plan sees it; of memory it has one element."""
    kind = dtypes.numpy_dtype(dtype)
    strides = [stride * kind.itemsize for stride in contiguous_strides(shape)]
    return np.lib.stride_tricks.as_strided(np.zeros(1, kind), shape, strides, writeable=False)
