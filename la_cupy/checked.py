"""Calls that have been checked, kept by all that the checks depend on.

Checking costs more than a decode step may. A Problem depends only on the options and on
types, dtypes, shapes, strides and devices, so that a second call with the same ones finds it
by these. Only what depends on addresses, `out`, is looked at in every call.
"""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import arrays, checks
from .arrays import signature
from .problem import GPU_WIDTH_LIMIT, Options, Problem, backward_problem, forward_problem
from .results import Array, State

BACKENDS = {"numpy": "la_cupy.cpu", "cupy": "la_cupy.launch"}


class Checked(NamedTuple):
    """What checking one call found out: enough to run it again."""

    problem: Problem
    backend: ModuleType
    plain: bool  # every array is a numpy.ndarray or cupy.ndarray proper: nothing to convert


_forward: arrays.Cache[Checked] = arrays.Cache(limit=1024)
_backward: arrays.Cache[Checked] = arrays.Cache(limit=1024)
_NO_STATE = (None, None, None, None)
_FORWARD_INPUTS = ("q", "k", "v", *(f"initial_state.{field}" for field in State._fields))


def forward(
    options: Options, q: Array, k: Array, v: Array, state: State | None, out: Array | None
) -> Checked:
    """Check the arguments of `linear_attention`."""
    key, found = _find(_forward, options, q, k, v, out, *(state or _NO_STATE))
    if found is None:
        named = _named({"q": q, "k": k, "v": v}, initial_state=state, out=out)
        library = arrays.library(named)
        keywords = _keywords(library, options)
        problem = forward_problem(q, k, v, initial_state=state, out=out, **keywords)
        found = _remember(_forward, key, library, problem, named)
    if out is not None:
        arrays.writable("out", out)
        arrays.disjoint("out", out, _FORWARD_INPUTS, (q, k, v, *(state or ())))
    return found


def backward(
    options: Options,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    normalizer: Array | None,
    state: State | None,
    dstate: State | None,
) -> Checked:
    """Check the arguments of `linear_attention_vjp`."""
    states = (*(state or _NO_STATE), *(dstate or _NO_STATE))
    key, found = _find(_backward, options, dout, q, k, v, normalizer, *states)
    if found is None:
        named = _named(
            {"q": q, "k": k, "v": v, "dout": dout},
            normalizer=normalizer,
            initial_state=state,
            dstate=dstate,
        )
        library = arrays.library(named)
        problem = backward_problem(
            dout,
            q,
            k,
            v,
            normalizer=normalizer,
            initial_state=state,
            dstate=dstate,
            **_keywords(library, options),
        )
        found = _remember(_backward, key, library, problem, named)
    return found


def plain(x: Array | None) -> Array | None:
    """A numpy.memmap, or the scalar that indexing took from a state, as a numpy.ndarray."""
    return np.asarray(x) if isinstance(x, (np.memmap, np.generic)) else x


def plain_state(state: State | None) -> State | None:
    """The same for the four parts of a state."""
    return None if state is None else State(*map(plain, state))


def as_state(name: str, state: Any) -> State | None:
    """A State, from one or from a tuple of four arrays."""
    return None if state is None else checks.state_parts(name, state)


def _find(
    cache: arrays.Cache[Checked], options: Options, *inputs: Array | None
) -> tuple[arrays.Key | None, Checked | None]:
    """The key of a call and what is known of it; no key where the checks will find a fault."""
    try:
        key = (options, *[None if x is None else signature(x) for x in inputs])
        return key, cache.get(key)
    except (AttributeError, TypeError):  # no array; an option that cannot be hashed
        return None, None


def _keywords(library: str, options: Options) -> dict[str, Any]:
    limit = GPU_WIDTH_LIMIT if library == "cupy" else None
    return dict(options._asdict(), width_limit=limit)


def _remember(
    cache: arrays.Cache[Checked],
    key: arrays.Key | None,
    library: str,
    problem: Problem,
    named: dict[str, Array],
) -> Checked:
    is_plain = library == "cupy" or all(type(x) is np.ndarray for x in named.values())
    found = Checked(problem, importlib.import_module(BACKENDS[library]), is_plain)
    if key is not None:
        cache.put(key, found)
    return found


def _named(required: dict[str, Any], **optional: Array | State | None) -> dict[str, Any]:
    """Each array by the name that errors call it; states become their four parts."""
    named = dict(required)
    for name, x in optional.items():
        if isinstance(x, State):
            named |= {f"{name}.{field}": part for field, part in x._asdict().items()}
        elif x is not None:
            named[name] = x
    return named
