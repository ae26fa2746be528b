"""Four JAX primitives: the operator, its gradient, and the derivatives of both.

With x = (q, k, v, initial state), y = (out, state) and F: x -> y,

    forward    F(x), den        CUDA kernels on a GPU, plain JAX elsewhere
    tangent    F'(x) t          linear in t; plain JAX
    backward   F'(x)^T c        linear in c = (dout, dstate); CUDA kernels on a GPU, as forward
    curvature  (F'(x)^T c)' t   linear in t, and symmetric; plain JAX

The derivative of forward is tangent, whose transpose is backward; the derivative of backward is
backward along c and curvature along x. So every derivative of every order is right, forward mode
too, reverse mode runs the kernels, and x and den are all that is kept for it. den counts as a
function of x that is kept, not as an operand: it has no derivative of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec

from la_cupy import dtypes
from la_cupy.problem import Options, Problem, backward_problem, forward_problem
from la_cupy.results import State

from . import _jax_chunked as chunked
from ._jax_axes import core_axes, specs_of, split_of

Array = Any
Arrays = Sequence[Array]


@dataclass(frozen=True)
class Call:
    """What a primitive is told besides its operands, which come in the order of `names`."""

    options: Options
    initial: bool  # x has an initial state
    state: bool  # y has a state, and c one of that shape
    moved: tuple[bool, ...] = ()  # which of x have a t; others do not move
    heads: int = 0  # leading axes that lie behind the rows in memory: 1 for (B, N, H, D)

    @property
    def x(self) -> tuple[str, ...]:
        return ("q", "k", "v") + (_state("initial_state") if self.initial else ())

    @property
    def y(self) -> tuple[str, ...]:
        return ("out",) + (_state("state") if self.state else ())

    @property
    def c(self) -> tuple[str, ...]:
        return ("dout",) + (_state("dstate") if self.state else ())

    @property
    def t(self) -> tuple[str, ...]:
        return tuple(name for name, moved in zip(self.x, self.moved, strict=True) if moved)


def _state(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for part in State._fields)


@dataclass(frozen=True)
class Op:
    """A primitive with the names of its operands and results, and what computes it in plain JAX."""

    primitive: Primitive
    operands: Callable[[Call], tuple[str, ...]]
    results: Callable[[Call], tuple[str, ...]]
    plain: Callable[..., Arrays]

    @property
    def name(self) -> str:
        return str(self.primitive.name)

    def bind(self, *operands: Array, call: Call) -> list[Array]:
        """The results; under shard_map all operands are first made to vary over the same axes."""
        wanted = varying(*operands)
        same = [
            jax.lax.pcast(x, tuple(sorted(more)), to="varying")
            if (more := wanted - varying(x))
            else x
            for x in operands
        ]
        results: list[Array] = self.primitive.bind(*same, call=call)
        return results

    def problem(self, call: Call, operands: Arrays) -> Problem:
        """The Problem of these operands, whether arrays or only their types."""
        named = dict(zip(self.operands(call), operands, strict=True))
        return problem_of(call, {name: Abstract.of(x) for name, x in named.items()})


def varying(*arrays: Array) -> frozenset[str]:
    """The axes of a shard_map over which any of the arrays differs from device to device."""
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


@dataclass(frozen=True)
class Abstract:
    """An array as la_cupy.problem looks at it: `order` has its axes as they lie in memory."""

    dtype: np.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, order: tuple[int, ...] = ()) -> Abstract:
        return cls(np.dtype(x.dtype), tuple(x.shape), order or tuple(range(len(x.shape))))

    @property
    def strides(self) -> tuple[int, ...]:
        strides, step = [0] * len(self.shape), self.dtype.itemsize
        for axis in reversed(self.order):
            strides[axis] = step
            step *= self.shape[axis]
        return tuple(strides)


def problem_of(call: Call, named: dict[str, Abstract], limit: int | None = None) -> Problem:
    """The Problem of a forward or, where there is a dout, of a backward pass."""
    o = call.options
    options: dict[str, Any] = dict(vars(o), width_limit=limit)
    q, k, v = named["q"], named["k"], named["v"]
    if call.initial:
        options["initial_state"] = State(*(named[name] for name in _state("initial_state")))
    if "dout" not in named:
        return forward_problem(q, k, v, **options)
    if call.state:
        options["dstate"] = State(*(named[name] for name in _state("dstate")))
    return backward_problem(named["dout"], q, k, v, **options)


def wide_as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """float64 stays float64 in `function`, which XLA may have traced in a thread without x64."""

    def traced(*operands: Array) -> Any:
        given = any(x.dtype == np.float64 for x in operands)
        with jax.enable_x64(given or jax.config.jax_enable_x64):
            return function(*operands)

    return traced


# --- what computes them where there are no kernels ------------------------------------------


def _split(call: Call, x: Arrays) -> tuple[Array, Array, Array, State | None]:
    q, k, v, *initial = x
    return q, k, v, State(*initial) if call.initial else None


def _function(call: Call) -> Callable[..., list[Array]]:
    """F: x -> y."""

    def function(*x: Array) -> list[Array]:
        out, state, _ = chunked.attention(*_split(call, x), call.options, call.state)
        return [out, *(state or ())]

    return function


def _gradient(call: Call, c: Arrays) -> Callable[..., list[Array]]:
    """x -> F'(x)^T c."""
    return lambda *x: list(jax.vjp(_function(call), *x)[1](list(c)))


def _derivative(function: Callable[..., list[Array]], call: Call, x: Arrays, t: Arrays) -> Arrays:
    """Along those of x that move."""

    def of_moved(*some: Array) -> list[Array]:
        given = iter(some)
        return function(*(next(given) if m else y for y, m in zip(x, call.moved, strict=True)))

    moving = [y for y, m in zip(x, call.moved, strict=True) if m]
    tangents: Arrays = jax.jvp(of_moved, moving, list(t))[1]
    return tangents


def _plain_forward(*x: Array, call: Call) -> Arrays:
    out, state, den = chunked.attention(*_split(call, x), call.options, call.state)
    return [out, *(state or ()), den]


def _plain_tangent(*operands: Array, call: Call) -> Arrays:
    x, (_, *t) = operands[: len(call.x)], operands[len(call.x) :]
    return _derivative(_function(call), call, x, t)


def _plain_backward(*operands: Array, call: Call) -> Arrays:
    c, (*x, _) = operands[: len(call.c)], operands[len(call.c) :]
    return _gradient(call, c)(*x)


def _plain_curvature(*operands: Array, call: Call) -> Arrays:
    c, rest = operands[: len(call.c)], operands[len(call.c) :]
    x, t = rest[: len(call.x)], rest[len(call.x) :]
    return _derivative(_gradient(call, c), call, x, t)


def _op(name: str, operands: Any, results: Any, plain: Any) -> Op:
    primitive = Primitive(f"la_cupy_{name}")
    primitive.multiple_results = True
    op = Op(primitive, operands, results, plain)
    primitive.def_impl(partial(_run, op))
    primitive.def_abstract_eval(partial(_types, op))
    return op


def _run(op: Op, *operands: Array, call: Call) -> list[Array]:
    """Outside jit: compiled all the same, since there is no other way to run a kernel."""
    with jax.disable_jit(False):
        return _compiled(op, call)(*operands)


@lru_cache(maxsize=1024)
def _compiled(op: Op, call: Call) -> Callable[..., list[Array]]:
    compiled: Callable[..., list[Array]] = jax.jit(partial(op.primitive.bind, call=call))
    return compiled


def _types(op: Op, *operands: Any, call: Call) -> list[Any]:
    """The types of the results."""
    p = op.problem(call, operands)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        name: (x.shape, x.dtype) for name, x in zip(op.operands(call), operands, strict=True)
    }
    cores = zip(_state("state"), ((p.d, p.e), (p.d,), (p.e,), ()), strict=True)
    shapes |= {name: ((*p.state_lead, *core), np.dtype(p.state_dtype)) for name, core in cores}
    shapes["out"] = p.out_shape, dtypes.numpy_dtype(p.dtype)
    shapes["den"] = (*p.lead, p.n), np.dtype(p.state_dtype)
    like = operands[0]
    return [
        like.update(
            shape=shape,
            dtype=dtype,
            weak_type=False,
            sharding=NamedSharding(like.sharding.mesh, spec),
        )
        for (shape, dtype), spec in zip(
            (shapes[name] for name in op.results(call)),
            _specs(op, call, operands, shapes),
            strict=True,
        )
    ]


def _specs(op: Op, call: Call, operands: Any, shapes: dict[str, Any]) -> list[PartitionSpec]:
    """Where a mesh has explicit axes: leading axes as in the operands, gradients as their inputs."""
    names, results = op.operands(call), op.results(call)
    own = {name: x.sharding.spec for name, x in zip(names, operands, strict=True)}
    if results == call.x:
        return [own[name] for name in results]
    split = split_of(names, operands)
    every = (*names, *results)
    return specs_of(every, [shapes[name][0] for name in every], split)[len(names) :]


FORWARD = _op("forward", lambda call: call.x, lambda call: (*call.y, "den"), _plain_forward)
TANGENT = _op(
    "tangent", lambda call: (*call.x, "den", *call.t), lambda call: call.y, _plain_tangent
)
BACKWARD = _op(
    "backward", lambda call: (*call.c, *call.x, "den"), lambda call: call.x, _plain_backward
)
CURVATURE = _op(
    "curvature", lambda call: (*call.c, *call.x, *call.t), lambda call: call.x, _plain_curvature
)
OPS = (FORWARD, TANGENT, BACKWARD, CURVATURE)


# --- derivatives ----------------------------------------------------------------------------


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero)


def _zero_tangent(x: Array) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _moved(call: Call, tangents: Arrays) -> tuple[Call, list[Array]]:
    moved = tuple(not _is_zero(t) for t in tangents)
    return replace(call, moved=moved), [t for t in tangents if not _is_zero(t)]


def _forward_jvp(x: Arrays, tangents: Arrays, *, call: Call) -> tuple[Arrays, Arrays]:
    *y, den = FORWARD.bind(*x, call=call)
    along, t = _moved(call, tangents)
    no_den = _zero_tangent(den)
    return [*y, den], [*TANGENT.bind(*x, den, *t, call=along), no_den]


def _tangent_transpose(cotangents: Arrays, *operands: Any, call: Call) -> Arrays:
    (*x, den), t = operands[: len(call.x) + 1], operands[len(call.x) + 1 :]
    given = replace(call, moved=(), state=not all(map(_is_zero, cotangents[1:])))
    c = map(ad.instantiate_zeros, cotangents[: len(given.c)])
    gradients = dict(zip(call.x, BACKWARD.bind(*c, *x, den, call=given), strict=True))
    return _for_linear(operands, t, [gradients[name] for name in call.t])


def _for_linear(operands: Arrays, linear: Arrays, gradients: Arrays) -> Arrays:
    """Cotangents of all operands, of which the last are linear; some of those may be known."""
    wanted = map(ad.is_undefined_primal, linear)
    none: list[Any] = [None] * (len(operands) - len(linear))
    return none + [g if w else None for g, w in zip(gradients, wanted, strict=True)]


def _backward_jvp(operands: Arrays, tangents: Arrays, *, call: Call) -> tuple[Arrays, Arrays]:
    count = len(call.c)
    c, (*x, den) = operands[:count], operands[count:]
    dc, dx = tangents[:count], tangents[count:-1]
    gradients = BACKWARD.bind(*operands, call=call)
    terms = []
    if not all(map(_is_zero, dc)):
        # without a tangent of the state there is less to do
        along = replace(call, state=not all(map(_is_zero, dc[1:])))
        some = map(ad.instantiate_zeros, dc[: len(along.c)])
        terms.append(BACKWARD.bind(*some, *x, den, call=along))
    if not all(map(_is_zero, dx)):
        along, t = _moved(call, dx)
        terms.append(CURVATURE.bind(*c, *x, *t, call=along))
    if not terms:  # only den moved
        return gradients, [_zero_tangent(g) for g in gradients]
    return gradients, [ad.add_jaxvals(*pair) for pair in zip(*terms, strict=True)] if terms[
        1:
    ] else terms[0]


def _backward_transpose(cotangents: Arrays, *operands: Any, call: Call) -> Arrays:
    count = len(call.c)
    c, (*x, den) = operands[:count], operands[count:]
    along, t = _moved(call, cotangents)
    results = TANGENT.bind(*x, den, *t, call=along)
    wanted = map(ad.is_undefined_primal, c)
    return [r if w else None for r, w in zip(results, wanted, strict=True)] + [None] * (len(x) + 1)


def _curvature_transpose(cotangents: Arrays, *operands: Any, call: Call) -> Arrays:
    rest = operands[: len(call.c) + len(call.x)]
    along, t = _moved(call, cotangents)
    gradients = dict(zip(call.x, CURVATURE.bind(*rest, *t, call=along), strict=True))
    return _for_linear(operands, operands[len(rest) :], [gradients[name] for name in call.t])


def _plain_jvp(op: Op, operands: Arrays, tangents: Arrays, *, call: Call) -> tuple[Arrays, Arrays]:
    """Third derivatives are those of the plain functions."""
    along = [ad.instantiate_zeros(t) for t in tangents]
    results: tuple[Arrays, Arrays] = jax.jvp(partial(op.plain, call=call), list(operands), along)
    return results


ad.primitive_jvps[FORWARD.primitive] = _forward_jvp
ad.primitive_jvps[BACKWARD.primitive] = _backward_jvp
ad.primitive_jvps[TANGENT.primitive] = partial(_plain_jvp, TANGENT)
ad.primitive_jvps[CURVATURE.primitive] = partial(_plain_jvp, CURVATURE)
ad.primitive_transposes[TANGENT.primitive] = _tangent_transpose
ad.primitive_transposes[BACKWARD.primitive] = _backward_transpose
ad.primitive_transposes[CURVATURE.primitive] = _curvature_transpose


# --- vmap: a mapped axis becomes the first leading axis --------------------------------------


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
