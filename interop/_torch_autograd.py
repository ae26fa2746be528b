"""Gradients of the custom ops, for autograd, torch.func and torch.compile.

`Forward` is differentiated by the op `vjp`, inside `Backward`, which is differentiated by the
formula in torch operations: every derivative is right, and the first is the kernels' own. Eager
code calls them; the same are registered with the ops, for the tracer of torch.compile, which
takes ops as they are. (`register_autograd` would be shorter, but has no forward mode, in silence.)
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from la_cupy.problem import Options
from la_cupy.results import state_cores

from . import _torch_batch as batch
from . import _torch_formula as formula
from . import _torch_ops as ops
from . import _torch_run as run
from ._torch_run import promoted

Part: TypeAlias = "Tensor | None"
Counts = tuple[int, int]
"""How many parts, 0 or 4, of an initial state and of dstate there are."""


def forward(
    options: Options, want_state: bool, q: Tensor, k: Tensor, v: Tensor, *initial: Tensor
) -> tuple[Tensor, ...]:
    """(out, den), and the four parts of the final state if they are wanted."""
    if torch.compiler.is_compiling():
        return tuple(ops.forward(options, q, k, v, initial, want_state))
    return _apply(Forward, options, want_state, q, k, v, *initial)


def _apply(function: Any, *arguments: Any) -> tuple[Tensor, ...]:
    """`function.apply` on two settings and tensors, by the shortest way that will do."""
    _, _, *tensors = arguments
    if torch._C._are_functorch_transforms_active():
        results: tuple[Tensor, ...] = function.apply(*arguments)
    elif forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    ):  # what apply comes to outside torch.func, after 25 µs of inspect.signature
        results = super(torch.autograd.Function, function).apply(*arguments)
    else:  # nothing to remember
        results = function.forward(*arguments)
    return results


class Forward(torch.autograd.Function):  # type: ignore[misc]
    """(options, want_state, q, k, v, *initial_state) -> (out, den, *state)."""

    @staticmethod
    def forward(
        options: Options, want_state: bool, q: Tensor, k: Tensor, v: Tensor, *initial: Tensor
    ) -> tuple[Tensor, ...]:
        if ops.is_eager(q, k, v, *initial):
            return tuple(run.forward(options, q, k, v, initial, want_state))
        with torch._C._AutoDispatchBelowAutograd():  # past what is registered with the op
            return tuple(ops.forward(options, q, k, v, initial, want_state))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, ctx.want_state, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], *tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, dout: Part, _: Part, *dstate: Part) -> Any:
        den, q, k, v, *initial = ctx.saved_tensors
        dout, parts = _cotangents(den, q, k, v, dout, dstate)
        counts = len(initial), len(parts)
        return (
            None,
            None,
            *_apply(Backward, ctx.options, counts, den, dout, q, k, v, *initial, *parts),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Part) -> Any:
        function = _Fixed(formula.linear_attention, ctx.options)
        out, *state = formula.push_forward(function, ctx.saved_tensors, tangents[2:])
        return out, None, *(state if ctx.want_state else ())

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, want_state: bool, *tensors: Tensor) -> Any:
        moved = batch.align_forward(tensors, in_dims[2:])
        results = _apply(Forward, options, want_state, *moved)
        return batch.split_forward(results, tensors, in_dims[2:])


def _cotangents(
    den: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Part, dstate: tuple[Part, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """dout, zero if it is missing, and all four parts of dstate, or none where none came."""
    if dout is None:
        dtype = promoted(q, k, v)
        dout = q.new_zeros((), dtype=dtype).expand(*den.shape, v.shape[-1])
    given = [x for x in dstate if x is not None]
    if not given:
        return dout, ()
    pairs = zip(dstate, state_cores(k.shape[-1], v.shape[-1]), strict=True)
    zero = given[0].new_zeros(())
    return dout, tuple(zero.expand(core) if x is None else x for x, core in pairs)


class Backward(torch.autograd.Function):  # type: ignore[misc]
    """(options, counts, den, dout, q, k, v, *initial_state, *dstate) -> (dq, dk, dv, ...).

    den is a function of the other inputs, and has no gradient of its own; None where it is to be
    computed again.
    """

    @staticmethod
    def forward(
        options: Options, counts: Counts, den: Part, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        arguments = _vjp_arguments(options, counts, den, *tensors)
        if ops.is_eager(*tensors if den is None else (den, *tensors)):
            return tuple(run.vjp(*arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(ops.vjp(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, ctx.counts, _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        function = _Fixed(formula.gradients, ctx.options, ctx.counts)
        _, pull = torch.func.vjp(function, *ctx.saved_tensors)
        return None, None, None, *pull(cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Part) -> Any:
        function = _Fixed(formula.gradients, ctx.options, ctx.counts)
        return formula.push_forward(function, ctx.saved_tensors, tangents[3:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, counts: Counts, *tensors: Tensor) -> Any:
        moved = batch.align_backward(tensors, in_dims[2:], counts, info.batch_size)
        results = _apply(Backward, options, counts, *moved)
        return batch.split_backward(results, tensors, in_dims[2:])


def _vjp_arguments(
    options: Options, counts: Counts, den: Part, dout: Tensor, *tensors: Tensor
) -> tuple[Any, ...]:
    """Those of the op `vjp`, from those of `Backward`."""
    rows = den if options.normalize else None
    q, k, v, *states = tensors
    return options, dout, q, k, v, rows, tuple(states[: counts[0]]), tuple(states[counts[0] :])


class _Fixed:
    """A formula with its first arguments given: a function of tensors."""

    def __init__(self, function: Any, *first: Any) -> None:
        self.function, self.first = function, first

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = self.function(*self.first, *tensors)
        return results


# --- what is registered with the ops -------------------------------------------------------------


def _autograd_forward(
    q: Tensor, k: Tensor, v: Tensor, initial: list[Tensor], want_state: bool, *options: Any
) -> list[Tensor]:
    _refuse_transforms()
    return list(_apply(Forward, Options(*options), want_state, q, k, v, *initial))


def _autograd_vjp(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    den: Part,
    initial: list[Tensor],
    dstate: list[Tensor],
    *options: Any,
) -> list[Tensor]:
    _refuse_transforms()
    counts = len(initial), len(dstate)
    tensors = (den, dout, q, k, v, *initial, *dstate)
    return list(_apply(Backward, Options(*options), counts, *tensors))


def _refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "torch.func differentiates linear_attention inside torch.compile, where derivatives "
            "of custom ops are lost: call torch.func without torch.compile, or use "
            "torch.autograd.grad on the results of the compiled function"
        )


def _vmap_forward(
    info: Any,
    in_dims: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: list[Tensor],
    want_state: bool,
    *options: Any,
) -> Any:
    tensors, dims = (q, k, v, *initial), (*in_dims[:3], *(in_dims[3] or ()))
    q, k, v, *parts = batch.align_forward(tensors, dims)
    results = ops.forward(Options(*options), q, k, v, tuple(parts), want_state)
    outputs, out_dims = batch.split_forward(results, tensors, dims)
    return list(outputs), list(out_dims)


def _vmap_vjp(
    info: Any,
    in_dims: Any,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    den: Part,
    initial: list[Tensor],
    dstate: list[Tensor],
    *options: Any,
) -> Any:
    rows = dout[..., 0] if den is None else den  # where there is none, something of its shape
    rows_dim = in_dims[0] if den is None else in_dims[4]
    tensors = (rows, dout, q, k, v, *initial, *dstate)
    dims = (rows_dim, *in_dims[:4], *(in_dims[5] or ()), *(in_dims[6] or ()))
    counts = len(initial), len(dstate)
    rows, *aligned = batch.align_backward(tensors, dims, counts, info.batch_size)
    den = None if den is None else rows
    results = ops.vjp(*_vjp_arguments(Options(*options), counts, den, *aligned))
    outputs, out_dims = batch.split_backward(results, tensors, dims)
    return list(outputs), list(out_dims)


ops.library.impl("forward", _autograd_forward, "Autograd")
ops.library.impl("vjp", _autograd_vjp, "Autograd")
torch.library.register_vmap("la_cupy::forward", _vmap_forward)
torch.library.register_vmap("la_cupy::vjp", _vmap_vjp)
