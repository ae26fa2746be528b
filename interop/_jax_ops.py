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
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from la_cupy import dtypes
from la_cupy.params import state_names
from la_cupy.problem import Options, Problem, backward_problem, forward_problem
from la_cupy.results import State

from . import _jax_chunked as chunked
from ._jax_axes import specs_of, split_of, vary, varying

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
        return ("q", "k", "v") + (state_names("initial_state") if self.initial else ())

    @property
    def y(self) -> tuple[str, ...]:
        return ("out",) + (state_names("state") if self.state else ())

    @property
    def c(self) -> tuple[str, ...]:
        return ("dout",) + (state_names("dstate") if self.state else ())

    @property
    def t(self) -> tuple[str, ...]:
        return tuple(name for name, moved in zip(self.x, self.moved, strict=True) if moved)


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
        same = (vary(x, wanted) for x in operands)
        results: list[Array] = self.primitive.bind(*same, call=call)
        return results

    def problem(self, call: Call, operands: Arrays) -> Problem:
        """The Problem of these operands, whether arrays or only their types."""
        named = dict(zip(self.operands(call), operands, strict=True))
        return problem_of(call, {name: Abstract.of(x) for name, x in named.items()})


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
    options: dict[str, Any] = dict(o._asdict(), width_limit=limit)
    q, k, v = named["q"], named["k"], named["v"]
    if call.initial:
        options["initial_state"] = State(*(named[name] for name in state_names("initial_state")))
    if "dout" not in named:
        return forward_problem(q, k, v, **options)
    if call.state:
        options["dstate"] = State(*(named[name] for name in state_names("dstate")))
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
    """x -> F'(x)^T c; what is empty adds nothing, and XLA of JAX 0.11 crashes on it in shard_map."""
    function = _function(call)

    def some(*x: Array) -> list[Array]:
        return [y for y, d in zip(function(*x), c, strict=True) if d.size]

    return lambda *x: list(jax.vjp(some, *x)[1]([d for d in c if d.size]))


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
    cores = zip(state_names("state"), ((p.d, p.e), (p.d,), (p.e,), ()), strict=True)
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
