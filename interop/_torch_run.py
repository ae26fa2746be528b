"""Run a Problem on tensors: NumPy's views of host memory, or kernels on addresses of a GPU.

Both have `forward` and `vjp` and give lists of new, contiguous tensors: (out, den, state...) and
(dq, dk, dv, dinitial_state...). What is found out about a call is kept by all that it depends on,
so that a second one like it costs its allocations and launches only.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from la_cupy import cpu, dtypes
from la_cupy.arrays import Cache
from la_cupy.layouts import misfits, summed_axes
from la_cupy.params import state_names
from la_cupy.problem import GPU_WIDTH_LIMIT, Options, Problem, backward_problem, forward_problem
from la_cupy.results import State

TORCH_DTYPES = {name: getattr(torch, name) for name in dtypes.NAMES}
_NUMPY_DTYPES = {dtype: dtypes.numpy_dtype(name) for name, dtype in TORCH_DTYPES.items()}


# --- what the checks see of a tensor ---------------------------------------------------------


def promoted(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The type of out."""
    return torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)


class Described(NamedTuple):
    """A tensor as `problem` takes arrays: no data, strides in bytes."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def describe(x: Tensor) -> Described:
    """The dtype, shape and strides of a tensor in NumPy's terms."""
    dtype = _NUMPY_DTYPES[x.dtype]
    return Described(dtype, tuple(x.shape), tuple(step * dtype.itemsize for step in x.stride()))


def describe_state(state: tuple[Tensor, ...]) -> State | None:
    """The same for the parts of a state; None where there are none."""
    return State(*map(describe, state)) if state else None


def check_tensors(named: Mapping[str, Tensor]) -> torch.device:
    """The device that all tensors are on; an error if it, or a type, is not one that is computed."""
    first, x = next(iter(named.items()))
    for name, other in named.items():
        if other.device != x.device:
            raise ValueError(
                f"{first} is on device {x.device} and {name} on device {other.device}, but all "
                f"must be on one: write {name}.to({first}.device)"
            )
        if other.dtype not in _NUMPY_DTYPES:
            found = str(other.dtype).removeprefix("torch.")
            raise TypeError(
                f"{name} has dtype {found}, but must be one of {', '.join(TORCH_DTYPES)}: "
                f"write {name}.float()"
            )
    if x.device.type not in (*MACHINES, "meta"):
        raise ValueError(
            f"{first} is on device {x.device}, but CPU and CUDA tensors are computed: "
            f"write {first}.cpu() or {first}.cuda()"
        )
    return x.device


def named_inputs(
    q: Tensor, k: Tensor, v: Tensor, initial: tuple[Tensor, ...], **more: Tensor | None
) -> dict[str, Tensor]:
    """Each tensor by the name that errors and plans call it."""
    named = {"q": q, "k": k, "v": v}
    named |= {name: x for name, x in more.items() if x is not None}
    return named | named_parts("initial_state", initial)


def named_parts(name: str, state: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The same of a state's parts."""
    return dict(zip(state_names(name), state, strict=True)) if state else {}


# --- the two operations ------------------------------------------------------------------------

_calls: Cache[Callable[..., list[Tensor]]] = Cache(limit=1024)


def _signature(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.device


def forward(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: tuple[Tensor, ...],
    want_state: bool,
) -> list[Tensor]:
    """[out, den], and the four parts of the final state if they are wanted."""
    key = (options, want_state, *map(_signature, (q, k, v, *initial)))
    run = _calls.get(key)
    if run is None:
        device = check_tensors(named_inputs(q, k, v, initial))
        problem = forward_problem(
            *map(describe, (q, k, v)),
            initial_state=describe_state(initial),
            width_limit=MACHINES[device.type].width_limit,
            **options._asdict(),
        )
        run = MACHINES[device.type].forward(problem, device, want_state)
        _calls.put(key, run)
    return run(q, k, v, initial)


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
    rows = None if den is None else _signature(den)
    tensors = (dout, q, k, v, *initial, *dstate)
    key = (options, rows, len(initial), *map(_signature, tensors))
    run = _calls.get(key)
    if run is None:
        named = named_inputs(q, k, v, initial, dout=dout, normalizer=den)
        device = check_tensors(named | named_parts("dstate", dstate))
        problem = backward_problem(
            *map(describe, (dout, q, k, v)),
            normalizer=None if den is None else describe(den),
            initial_state=describe_state(initial),
            dstate=describe_state(dstate),
            width_limit=MACHINES[device.type].width_limit,
            **options._asdict(),
        )
        run = MACHINES[device.type].vjp(problem, device, den is not None)
        _calls.put(key, run)
    return run(dout, q, k, v, den, initial, dstate)


# --- host memory -------------------------------------------------------------------------------


class Host:
    """NumPy views of CPU tensors; results are NumPy's memory, not copied."""

    width_limit: int | None = None

    @staticmethod
    def forward(
        problem: Problem, device: torch.device, want_state: bool
    ) -> Callable[..., list[Tensor]]:
        """A function (q, k, v, initial) -> [out, den, ...]."""

        def run(q: Tensor, k: Tensor, v: Tensor, initial: tuple[Tensor, ...]) -> list[Tensor]:
            state = State(*map(to_numpy, initial)) if initial else None
            x, y, z = map(to_numpy, (q, k, v))
            out, final, den = cpu.forward(problem, x, y, z, state, want_state=want_state)
            return [to_torch(x) for x in (out, den, *(final or ()))]

        return run

    @staticmethod
    def vjp(
        problem: Problem, device: torch.device, has_normalizer: bool
    ) -> Callable[..., list[Tensor]]:
        """A function (dout, q, k, v, den, initial, dstate) -> [dq, dk, dv, ...]."""

        def run(
            dout: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            den: Tensor | None,
            initial: tuple[Tensor, ...],
            dstate: tuple[Tensor, ...],
        ) -> list[Tensor]:
            g, x, y, z = map(to_numpy, (dout, q, k, v))
            rows = None if den is None else to_numpy(den)
            state, final = (State(*map(to_numpy, s)) if s else None for s in (initial, dstate))
            grads = cpu.vjp(problem, g, x, y, z, rows, state, final)
            return [to_torch(x) for x in (*grads[:3], *(grads.initial_state or ()))]

        return run


def to_numpy(x: Tensor) -> np.ndarray:
    """The memory of a CPU tensor as an array, at the same strides."""
    x = x.detach()
    if x.dtype == torch.bfloat16:  # which torch does not show to NumPy
        bits: np.ndarray = x.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: np.ndarray = x.numpy()
    return array


def to_torch(x: np.ndarray) -> Tensor:
    """The memory of an array as a contiguous tensor."""
    x = np.asarray(x, order="C")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


# --- a GPU -------------------------------------------------------------------------------------


class Cuda:
    """Kernels on CUDA tensors, in torch's current stream of their device."""

    width_limit: int | None = GPU_WIDTH_LIMIT

    @classmethod
    def forward(
        cls, problem: Problem, device: torch.device, want_state: bool
    ) -> Callable[..., list[Tensor]]:
        """A function (q, k, v, initial) -> [out, den, ...]."""
        kernels = _Kernels(cls, cls.prepare_forward(problem, device, want_state), device)
        inputs = ("q", "k", "v", *_parts("initial_state", problem.initial_state))
        results = ("out", "den", *_parts("state", want_state))

        def run(q: Tensor, k: Tensor, v: Tensor, initial: tuple[Tensor, ...]) -> list[Tensor]:
            buffers = kernels(dict(zip(inputs, (q, k, v, *initial), strict=True)))
            return [buffers[name] for name in results]

        return run

    @classmethod
    def vjp(
        cls, problem: Problem, device: torch.device, has_normalizer: bool
    ) -> Callable[..., list[Tensor]]:
        """A function (dout, q, k, v, den, initial, dstate) -> [dq, dk, dv, ...]."""
        kernels = _Kernels(cls, cls.prepare_backward(problem, device, has_normalizer), device)
        states = *_parts("initial_state", problem.initial_state), *_parts("dstate", problem.dstate)
        inputs = ("dout", "q", "k", "v", *states)
        results = ("dq", "dk", "dv", *_parts("dinitial_state", problem.initial_state))
        sums = TORCH_DTYPES[problem.state_dtype]

        def run(
            dout: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            den: Tensor | None,
            initial: tuple[Tensor, ...],
            dstate: tuple[Tensor, ...],
        ) -> list[Tensor]:
            buffers = dict(zip(inputs, (dout, q, k, v, *initial, *dstate), strict=True))
            if den is not None:
                buffers["den"] = den.to(sums).contiguous()
            buffers = kernels(buffers)
            return [buffers[name] for name in results]

        return run

    @staticmethod
    def prepare_forward(problem: Problem, device: torch.device, want_state: bool) -> Any:
        """A `la_cupy.launch.Prepared`."""
        return _launch(device).prepare_forward(problem, device.index, want_state)

    @staticmethod
    def prepare_backward(problem: Problem, device: torch.device, has_normalizer: bool) -> Any:
        """A `la_cupy.launch.Prepared`."""
        return _launch(device).prepare_backward(problem, device.index, has_normalizer)

    @classmethod
    def queue(cls, prepared: Any, addresses: Mapping[str, int], device: torch.device) -> None:
        """Queue the kernels in torch's current stream of `device`."""
        import cupy

        if cupy.cuda.runtime.getDevice() != device.index:
            with torch.cuda.device(device), cupy.cuda.Device(device.index):
                return cls.queue(prepared, addresses, device)
        # torch.cuda.current_stream takes 6 µs to make an object of it
        prepared.launch(addresses, torch._C._cuda_getCurrentRawStream(device.index))
        return None


def _parts(name: str, given: Any) -> tuple[str, ...]:
    """The names of a state's parts, where there is one."""
    return state_names(name) if given else ()


def _launch(device: torch.device) -> Any:
    try:
        from la_cupy import launch
    except ImportError as error:
        raise ImportError(
            f"the tensors are on {device}, but CuPy, which runs the kernels, is missing: "
            f"pip install 'la_cupy[cuda12]' or 'la_cupy[cuda13]', as the driver allows"
        ) from error
    return launch


class _Kernels:
    """A prepared plan: makes the buffers that it names, and carries it out."""

    def __init__(self, machine: type[Cuda], prepared: Any, device: torch.device) -> None:
        plan = prepared.plan
        self.queue, self.prepared, self.device = machine.queue, prepared, device
        self.copies, self.reductions = plan.copies, plan.reductions
        # empty_like takes half of empty's time: the models are single numbers, stretched
        self.makes = [
            (name, torch.empty((), dtype=TORCH_DTYPES[b.dtype], device=device).expand(b.shape))
            for name, b in (plan.outputs | plan.workspace).items()
        ]
        self.sums = TORCH_DTYPES[plan.problem.state_dtype]
        self.misfits = misfits(plan.problem)

    def __call__(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        device = self.device
        for name in self.copies:
            buffers[name] = buffers[name].contiguous()
        for name in self.misfits:
            buffers[name] = buffers[name].to(self.sums).contiguous()
        for name, model in self.makes:
            buffers[name] = torch.empty_like(model, memory_format=torch.contiguous_format)
        addresses = {name: x.data_ptr() for name, x in buffers.items()}
        self.queue(self.prepared, addresses, device)
        for r in self.reductions:
            buffers[r.result] = sum_to(buffers[r.source], r.shape, TORCH_DTYPES[r.dtype])
        return buffers


def sum_to(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The sum of `x` over the axes that `shape` lacks or has as 1, in float32 or wider."""
    axes = summed_axes(x.shape, shape)
    if axes:
        x = x.sum(axes, dtype=x.dtype if x.dtype.itemsize > 2 else torch.float32)
    return x.to(dtype).reshape(shape)


MACHINES: dict[str, Any] = {"cpu": Host, "cuda": Cuda}
"""By device type; the tests put the emulation of a GPU in the place of the host."""
