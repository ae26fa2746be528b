"""Gradients of the custom ops, for autograd, torch.func and torch.compile.

`Forward` is differentiated by the op `vjp`, inside `Backward`, which is differentiated by the
formula in torch operations: every derivative is right, and the first is the kernels' own.
(`register_autograd` would be shorter, but gives wrong results in forward mode, in silence.)
"""

from typing import Any

import torch
from torch import Tensor

from . import _torch_batch as batch
from . import _torch_formula as formula
from . import _torch_ops as ops
from ._torch_run import Options

Counts = tuple[int, int]
"""How many parts, 0 or 4, of an initial state and of dstate there are."""
Gradient = Tensor | None


def forward(
    options: Options, want_state: bool, q: Tensor, k: Tensor, v: Tensor, *initial: Tensor
) -> tuple[Tensor, ...]:
    """(out, den), and the four parts of the final state if they are wanted."""
    if torch.compiler.is_compiling():  # whose tracer refuses functions that have a jvp
        results: tuple[Tensor, ...] = Forward.apply(options, want_state, q, k, v, *initial)
        return results
    return _apply(ForwardMode, options, want_state, q, k, v, *initial)


def _apply(function: Any, *arguments: Any) -> tuple[Tensor, ...]:
    """`function.apply`, less the 25 µs in which that binds its arguments by inspect.signature."""
    transformed = torch._C._are_functorch_transforms_active()
    apply = function.apply if transformed else super(torch.autograd.Function, function).apply
    results: tuple[Tensor, ...] = apply(*arguments)
    return results


class Forward(torch.autograd.Function):
    """(options, want_state, q, k, v, *initial_state) -> (out, den, *state)."""

    @staticmethod
    def forward(
        options: Options, want_state: bool, q: Tensor, k: Tensor, v: Tensor, *initial: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(ops.forward(options, q, k, v, initial, want_state))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        options, want_state, *tensors = inputs
        ctx.options = options
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *tensors)
        if not torch.compiler.is_compiling():
            ctx.want_state = want_state
            ctx.set_materialize_grads(False)
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, dout: Gradient, _: Gradient, *dstate: Gradient) -> Any:
        den, q, k, v, *initial = ctx.saved_tensors
        if dout is None:  # the state alone was used
            lead = den.shape[:-1]
            dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
            dout = q.new_zeros((), dtype=dtype).expand(*lead, q.shape[-2], v.shape[-1])
        parts = _complete(dstate, k, v)
        counts = len(initial), len(parts)
        arguments = ctx.options, counts, den, dout, q, k, v, *initial, *parts
        if torch.compiler.is_compiling():
            return None, None, *Backward.apply(*arguments)
        return None, None, *_apply(BackwardMode, *arguments)

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, want_state: bool, *tensors: Tensor) -> Any:
        moved = batch.align(tensors, in_dims[2:], batch.INPUTS[: len(tensors)])
        results = Forward.apply(options, want_state, *moved)
        return batch.split_forward(results, tensors, in_dims[2:])


def _complete(dstate: tuple[Gradient, ...], k: Tensor, v: Tensor) -> list[Tensor]:
    """All four parts, or none where no part has a gradient."""
    if all(x is None for x in dstate):
        return []
    d, e = k.shape[-1], v.shape[-1]
    like = next(x for x in dstate if x is not None)
    cores = ((d, e), (d,), (e,), ())
    return [
        like.new_zeros(()).expand(core) if x is None else x
        for x, core in zip(dstate, cores, strict=True)
    ]


class Backward(torch.autograd.Function):
    """(options, counts, den, dout, q, k, v, *initial_state, *dstate) -> (dq, dk, dv, ...).

    den is a function of the other inputs, and has no gradient of its own.
    """

    @staticmethod
    def forward(
        options: Options,
        counts: Counts,
        den: Tensor,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        initial, dstate = states[: counts[0]], states[counts[0] :]
        rows = den if options[5] else None  # only normalised gradients need it
        return tuple(ops.vjp(options, dout, q, k, v, rows, initial, dstate))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        options, counts, _, *tensors = inputs
        ctx.options, ctx.counts = options, counts
        ctx.save_for_backward(*tensors)
        if not torch.compiler.is_compiling():
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        options, counts = ctx.options, ctx.counts
        _, pull = torch.func.vjp(
            lambda *x: formula.gradients(options, counts, *x), *ctx.saved_tensors
        )
        return None, None, None, *pull(cotangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, counts: Counts, *tensors: Tensor) -> Any:
        cores = (1, 2, *batch.INPUTS[: 3 + counts[0]], *batch.STATE[: counts[1]])
        shared = 5 + counts[0]  # the inputs of the operator, of which each example has a gradient
        moved = batch.align(tensors, in_dims[2:], cores, info.batch_size, expand=shared)
        results = Backward.apply(options, counts, *moved)
        inputs, dims = tensors[2:shared], in_dims[4 : 2 + shared]
        return batch.split_backward(results, inputs, dims, info.batch_size)


class ForwardMode(Forward):
    """The same with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Gradient) -> Any:
        primals = ctx.saved_tensors
        tangents = tuple(map(_tangent, tangents[2:], primals))
        out, *state = formula.push_forward(
            lambda *x: formula.linear_attention(ctx.options, *x), primals, tangents
        )
        return out, None, *(state if ctx.want_state else ())


class BackwardMode(Backward):
    """The same with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Gradient) -> Any:
        primals = ctx.saved_tensors
        tangents = tuple(map(_tangent, tangents[3:], primals))
        return formula.push_forward(
            lambda *x: formula.gradients(ctx.options, ctx.counts, *x), primals, tangents
        )


def _tangent(tangent: Gradient, primal: Tensor) -> Tensor:
    return torch.zeros_like(primal) if tangent is None else tangent
