"""The custom ops `la_cupy::forward` and `la_cupy::vjp`, for eager code, tracers and compilers.

They are defined in a `torch.library.Library`, since a call through `custom_op` costs 15 µs more,
and know nothing of gradients; these are in `_torch_autograd`.
"""

from typing import Any

import torch
from torch import Tensor

from la_cupy.problem import Options, backward_problem, forward_problem
from la_cupy.results import state_cores

from . import _torch_run as run

_OPTIONS = (
    "bool causal, float a, float b, str? qk_norm, str feature_map, bool normalize, str precision"
)
library = torch.library.Library("la_cupy", "DEF")
library.define(
    f"forward(Tensor q, Tensor k, Tensor v, Tensor[] initial_state, bool want_state, {_OPTIONS})"
    " -> Tensor[]"
)
library.define(
    "vjp(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? normalizer, Tensor[] initial_state, "
    f"Tensor[] dstate, {_OPTIONS}) -> Tensor[]"
)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, initial: list[Tensor], want_state: bool, *options: Any
) -> list[Tensor]:
    return run.forward(Options(*options), q, k, v, tuple(initial), want_state)


def _vjp(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    den: Tensor | None,
    initial: list[Tensor],
    dstate: list[Tensor],
    *options: Any,
) -> list[Tensor]:
    return run.vjp(Options(*options), dout, q, k, v, den, tuple(initial), tuple(dstate))


# One implementation for every device: those that it cannot use are refused with a sentence.
library.impl("forward", _forward, "CompositeExplicitAutograd")
library.impl("vjp", _vjp, "CompositeExplicitAutograd")


# --- shapes and types, for tracers -------------------------------------------------------------


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, initial: list[Tensor], want_state: bool, *options: Any
) -> list[Tensor]:
    run.check_tensors(run.named_inputs(q, k, v, tuple(initial)))
    if _is_concrete(options, q, k, v, *initial):
        forward_problem(
            *map(run.describe, (q, k, v)),
            initial_state=run.describe_state(tuple(initial)),
            **Options(*options)._asdict(),
        )
    d, e = q.shape[-1], v.shape[-1]
    cores = state_cores(d, e)
    leads = [k.shape[:-2], v.shape[:-2]]
    leads += [x.shape[: x.ndim - len(core)] for x, core in zip(initial, cores, strict=False)]
    state_lead = torch.broadcast_shapes(*leads)
    lead = torch.broadcast_shapes(q.shape[:-2], state_lead)
    dtype = run.promoted(q, k, v)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    out = q.new_empty((*lead, q.shape[-2], e), dtype=dtype)
    den = q.new_empty((*lead, q.shape[-2]), dtype=sums)
    parts = cores if want_state else ()
    return [out, den, *(q.new_empty((*state_lead, *core), dtype=sums) for core in parts)]


def _fake_vjp(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    den: Tensor | None,
    initial: list[Tensor],
    dstate: list[Tensor],
    *options: Any,
) -> list[Tensor]:
    named = run.named_inputs(q, k, v, tuple(initial), dout=dout, normalizer=den)
    run.check_tensors(named | run.named_parts("dstate", tuple(dstate)))
    if _is_concrete(options, dout, q, k, v, *initial, *dstate):
        backward_problem(
            *map(run.describe, (dout, q, k, v)),
            initial_state=run.describe_state(tuple(initial)),
            dstate=run.describe_state(tuple(dstate)),
            **Options(*options)._asdict(),
        )
    return [x.new_empty(x.shape) for x in (q, k, v, *initial)]


torch.library.register_fake("la_cupy::forward", _fake_forward)
torch.library.register_fake("la_cupy::vjp", _fake_vjp)


def _is_concrete(options: tuple[Any, ...], *tensors: Tensor) -> bool:
    """Whether all sizes and numbers are known, so that the checks of a real call can be made."""
    _, a, b, *_ = options
    numbers = [a, b, *(n for x in tensors for n in (*x.shape, *x.stride()))]
    return all(type(n) in (int, float) for n in numbers)


# --- how the rest of the adapter calls them ----------------------------------------------------


def is_eager(*tensors: Tensor) -> bool:
    """Whether nothing looks on, so that a call may go past the dispatcher, which takes 30 µs.

    No mode, profiler, tracer or transform is active, and no tensor is a subclass or a view that
    stands for other numbers than its memory holds.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or torch.autograd._profiler_enabled()
    ):
        return False
    for x in tensors:  # all() of a generator takes as long again
        if type(x) not in _PLAIN or x.is_meta or x.is_neg() or x._is_zerotensor():
            return False
    return True


_PLAIN = (Tensor, torch.nn.Parameter)


def forward(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: tuple[Tensor, ...],
    want_state: bool,
) -> list[Tensor]:
    """[out, den], and the four parts of the final state if they are wanted."""
    results: list[Tensor] = torch.ops.la_cupy.forward.default(
        q, k, v, initial, want_state, *options
    )
    return results


def vjp(
    options: Options,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    den: Tensor | None,
    initial: tuple[Tensor, ...],
    dstate: tuple[Tensor, ...],
) -> list[Tensor]:
    """[dq, dk, dv], and the gradients of the initial state if there is one."""
    results: list[Tensor] = torch.ops.la_cupy.vjp.default(
        dout, q, k, v, den, initial, dstate, *options
    )
    return results
