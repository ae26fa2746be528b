"""Checks of single arguments: options, dtypes, shapes. Each raises one exception, one sentence."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import dtypes
from .features import FEATURES
from .results import Array, State, state_cores

QK_NORMS = ("l2", None)
FEATURE_MAPS = tuple(FEATURES)
PRECISIONS = ("highest", "tf32")
FLOAT32_MAX = float(np.finfo(np.float32).max)

Shape = tuple[int, ...]


def flag(name: str, value: Any) -> bool:
    """`value` as a bool; numbers and arrays are refused, since they are likely misplaced."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} is {value!r} of type {_type(value)}, but must be True or False")


def choice(name: str, value: Any, allowed: Sequence[str | None]) -> Any:
    """`value`, which must be one of the strings (or None) in `allowed`."""
    if value is None or isinstance(value, str):
        if value in allowed:
            return value if value is None else str(value)
        error: type[Exception] = ValueError
    else:
        error = TypeError
    raise error(f"{name} is {value!r}, but must be one of {', '.join(map(repr, allowed))}")


def scalar(name: str, value: Any) -> float:
    """`value` as a finite Python float: a real number or a 0-d NumPy array of one."""
    if type(value) is float and math.isfinite(value):
        return value + 0.0  # -0.0 becomes 0.0: equal options must mean the same thing
    if type(value).__module__.partition(".")[0] == "cupy":
        raise TypeError(
            f"{name} is a CuPy array, but must be a number on the host, since reading it "
            f"would wait for the GPU: write float({name}) yourself, outside the loop"
        )
    number: Any = value
    if isinstance(value, np.ndarray) and value.ndim == 0 and type(value) is np.ndarray:
        number = value[()]
    if not isinstance(number, (numbers.Real, np.bool_)) and not _is_ml_float(number):
        raise TypeError(
            f"{name} is a {_type(value)}, but must be a real number, such as {name}=1.0"
        )
    try:
        result = float(number)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name} is {number}, but must be finite, such as {name}=1.0")
    return result + 0.0


def dtype(name: str, x: Array) -> str:
    """The name of the dtype of `x`, which must be one of the four float types."""
    found = dtypes.name_of(x.dtype)
    if found is not None:
        return found
    if dtypes.name_of(x.dtype.newbyteorder("=")) is not None:
        raise TypeError(
            f"{name} has dtype {x.dtype.str} in foreign byte order, but native byte order is "
            f"needed: write {name}.astype({name}.dtype.newbyteorder('='))"
        )
    raise TypeError(
        f"{name} has dtype {x.dtype}, but must be one of {', '.join(dtypes.NAMES)}: "
        f"write {name}.astype('float32')"
    )


def strides(name: str, x: Array, last_is_core: bool = True) -> Shape:
    """The strides of `x` in elements.

    An axis of extent 1 gets 0, as if it were broadcast, whatever the producer left there, so
    that equal layouts compare equal; the last one gets 1 unless it is a leading axis.
    """
    item = x.dtype.itemsize
    last = len(x.shape) - 1
    result = []
    for axis, (extent, step) in enumerate(zip(x.shape, x.strides, strict=True)):
        if extent == 1:
            result.append(1 if axis == last and last_is_core else 0)
        elif step % item:
            raise ValueError(
                f"{name} has strides {tuple(x.strides)} in bytes, but multiples of its item "
                f"size {item} are needed: pass a contiguous copy, {name}.copy()"
            )
        else:
            result.append(step // item)
    return tuple(result)


def min_ndim(name: str, x: Array, axes: str) -> None:
    """`x` must have the two axes named in `axes`, after any leading ones, and a last axis."""
    if len(x.shape) < 2:
        hint = f": write {name}[None, :] for a single row" if len(x.shape) == 1 else ""
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, but needs at least 2 axes, (..., {axes}){hint}"
        )
    if x.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, but its last axis, {axes[-1]}, must be at least 1"
        )


def kv_lead(q: Array, k: Array, v: Array) -> Shape:
    """broadcast(k, v) of the leading axes, which must also broadcast with q's."""
    leads = [tuple(x.shape[:-2]) for x in (q, k, v)]
    try:
        np.broadcast_shapes(*leads)
    except ValueError:
        raise ValueError(
            f"the leading axes of q {leads[0]}, k {leads[1]} and v {leads[2]} do not broadcast"
            + _grouped_query_hint(tuple(q.shape), leads[1], leads[2])
        ) from None
    return np.broadcast_shapes(*leads[1:])


def result_lead(q: Array, state_lead: Shape) -> Shape:
    """broadcast(q, state_lead) of the leading axes, where state_lead includes initial_state's."""
    q_lead = tuple(q.shape[:-2])
    try:
        return np.broadcast_shapes(q_lead, state_lead)
    except ValueError:
        raise ValueError(
            f"the leading axes of q {q_lead} do not broadcast with those of initial_state with "
            f"k and v, {state_lead}: a state has the leading axes of k and v, never those of q"
        ) from None


def _grouped_query_hint(q_shape: Shape, k_lead: Shape, v_lead: Shape) -> str:
    if not k_lead or k_lead != v_lead or len(q_shape) < 3 or 0 in (q_shape[-3], k_lead[-1]):
        return ": equal them, or give the axis to broadcast over extent 1, as in numpy.matmul"
    heads, kv_heads = q_shape[-3], k_lead[-1]
    if heads % kv_heads:
        return (
            f"; for grouped queries the number of query heads ({heads}) must be a multiple of the "
            f"number of key heads ({kv_heads}): then write q.reshape(..., {kv_heads}, G, N, D) "
            f"with k[..., None, :, :] and v[..., None, :, :]"
        )
    grouped = (*q_shape[:-3], kv_heads, heads // kv_heads, *q_shape[-2:])
    return (
        f": for grouped queries write q.reshape{grouped} with k[..., None, :, :] "
        f"and v[..., None, :, :]"
    )


def exact_shape(name: str, x: Array, shape: Shape, meaning: str) -> None:
    """`x` must have `shape`."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, but must have {meaning}, {shape}")


def state_parts(name: str, state: Any) -> State:
    """`state` as a State: it must be one, or a 4-tuple in the same order."""
    if not isinstance(state, tuple) or len(state) != len(State._fields):
        size = f" of {len(state)}" if isinstance(state, (tuple, list)) else ""
        raise TypeError(
            f"{name} is a {_type(state)}{size}, but must be a State or a tuple of four arrays: "
            f"write la_cupy.State(kv, k_sum, v_sum, count)"
        )
    for i, part in enumerate(state):
        if part is None:
            field = State._fields[i]
            raise TypeError(f"{name}.{field} is None, but all four parts are needed: pass zeros")
    return state if isinstance(state, State) else State(*state)


def state_lead(name: str, state: State, d: int, e: int, outer: Shape, extend: bool) -> Shape:
    """Check the shapes of `state`; broadcast(outer, its leads), to be `outer` unless `extend`."""
    cores = state_cores(d, e)
    symbols = ("(..., D, E)", "(..., D)", "(..., E)", "(...)")
    leads = [outer]
    for field, part, core, symbol in zip(State._fields, state, cores, symbols, strict=True):
        shape = tuple(part.shape)
        split = len(shape) - len(core)
        if split < 0 or shape[split:] != core:
            raise ValueError(
                f"{name}.{field} has shape {shape}, but must have {symbol} with D = {d}, E = {e}"
            )
        leads.append(shape[:split])
    try:
        result = np.broadcast_shapes(*leads)
        fits = extend or result == outer
    except ValueError:
        fits = False
    if fits:
        return result
    parts = ", ".join(f"{f} {x}" for f, x in zip(State._fields, leads[1:], strict=True))
    what = "broadcast with those of k and v," if extend else "broadcast to the final state's,"
    raise ValueError(f"the leading axes of {name} ({parts}) do not {what} {outer}")


def single_writes(name: str, x: Array) -> None:
    """No two elements of `x` may lie at one address, since each is written once.

    Sufficient, not necessary: each axis must step over all that the finer axes span, which
    every slice, transpose and reversal of an ordinary array does.
    """
    if 0 in x.shape:
        return
    axes = sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1)
    span = x.dtype.itemsize
    for step, extent in axes:
        if step < span:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {tuple(x.strides)}, whose elements "
                f"overlap each other, but each needs its own memory: pass an array of its own"
            )
        span += step * (extent - 1)


def width(name: str, symbol: str, value: int, limit: int | None) -> None:
    """D and E are bounded on the GPU."""
    if limit is not None and value > limit:
        raise ValueError(
            f"{name} has {symbol} = {value}, but the GPU kernels take {symbol} up to {limit}: "
            f"split the heads, or use what has no limit, la_cupy.linear_attention with NumPy "
            f"arrays or, in JAX, linear_attention_xla"
        )


def representable(name: str, value: float, compute: str) -> None:
    """Sums are float32 unless the inputs are float64, so larger factors would be infinite."""
    if compute != "float64" and abs(value) > FLOAT32_MAX:
        raise ValueError(
            f"{name} is {value}, but must be at most {FLOAT32_MAX:.3g} in size, the largest "
            f"float32: scale v instead, or pass float64 arrays"
        )


def _is_ml_float(value: Any) -> bool:
    return isinstance(value, np.generic) and dtypes.name_of(value.dtype) is not None


def _type(value: Any) -> str:
    return type(value).__name__
