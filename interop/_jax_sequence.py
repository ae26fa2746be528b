"""One sequence over several devices: each has a piece of the rows, and only states are exchanged.

A state is all that rows see of keys elsewhere. So each device sums up its own keys, (D, E) numbers
a head whatever the length; all devices get all sums, and each adds up those before its piece (or
those of all others, where nothing is masked) to the state that its rows begin with. JAX transposes
this: gradients of states go back the same way, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from la_cupy.results import State

AxisName: TypeAlias = str | tuple[str, ...]
"""The axis, or axes, of the mesh along which a sequence is cut, in order."""


def check_pieces(axis_name: Any, causal: bool, n: int, m: int) -> None:
    """The axis must be one that is mapped here; causal pieces of q and k must be of one length."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"axis_name is {axis_name!r}, but must be a string or a tuple of strings: write the "
            f"name of the mesh's axis along which the sequence is cut"
        )
    try:
        jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name is {axis_name!r}, but must name an axis that is mapped here: call "
            f"linear_attention inside jax.shard_map over a mesh with this axis"
        ) from error
    if causal and n != m:
        raise ValueError(
            f"q has {n} rows and k has {m} on each device, but a causal sequence over {axis_name!r} "
            f"needs as many of both: cut q, k and v at the same places"
        )


def exchange(
    own: State, axis_name: AxisName, causal: bool, initial: State | None, want_total: bool
) -> tuple[State, State | None]:
    """The state that the rows of this device begin with, and the one behind the whole sequence."""
    first = State(0, 0, 0, 0) if initial is None else initial
    here = jax.lax.axis_index(axis_name)

    def others(x: Any, pieces: Any) -> Any:
        device = jnp.arange(pieces.shape[0])
        seen = device < here if causal else device != here
        seen = seen.reshape(-1, *(1,) * (pieces.ndim - 1))
        return x + jnp.where(seen, pieces, 0).sum(axis=0)  # not times 0: later rows may be NaN

    start = _each(others, first, jax.lax.all_gather(own, axis_name))
    total = _each(jnp.add, first, jax.lax.psum(own, axis_name)) if want_total else None
    return start, total


def _each(function: Callable[[Any, Any], Any], x: State, y: State) -> State:
    return State(*map(function, x, y))
