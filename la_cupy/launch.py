"""The GPU path: carry out a plan on CuPy arrays, on their device and the current stream.

Nothing here waits for the device or reads its memory. Workspaces come from CuPy's pool,
which is ordered by stream, and may go back to it as soon as the launches are queued.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import cupy
import numpy as np
from cupy.cuda.function import CNumpyArray

from . import dtypes
from .arrays import Cache
from .compile import kernel, load_all
from .device import device_info
from .layouts import misfits, summed_axes
from .params import state_names
from .plan import Plan, backward_plan, forward_plan
from .problem import Layout, Problem
from .records import Launch, Parameters, suited
from .results import Array, Gradients, State

Buffers = dict[str, Any]


class Ready:
    """A launch with its kernel loaded: addresses are all that a call adds."""

    def __init__(self, launch: Launch, device: int) -> None:
        with cupy.cuda.Device(device):
            self.function = kernel(launch.spec, device).kernel  # else looked up in every call
        self.grid, self.block = (launch.grid,), (launch.spec.threads,)
        self.shared = launch.spec.shared_bytes
        self.launch, self.device = launch, device
        self._spare: list[_Arguments] = []

    def __call__(self, addresses: Mapping[str, int], stream: Any) -> None:
        if self.launch.maps and suited(self.launch, addresses)[0] is not self.launch:
            for ready in self.instead:
                ready(addresses, stream)
            return
        try:
            arguments = self._spare.pop()
        except IndexError:
            arguments = _Arguments(self.launch)
        arguments.parameters.fill(addresses)
        self.function(
            self.grid, self.block, arguments.values, shared_mem=self.shared, stream=stream
        )
        self._spare.append(arguments)

    @cached_property
    def instead(self) -> "tuple[Ready, ...]":
        """What runs where arrays are not aligned, loaded when it first does."""
        return tuple(Ready(launch, self.device) for launch in self.launch.instead)


class _Arguments:
    """A kernel's one argument, for one call at a time.

    The driver copies it before a launch returns, but lets other threads run meanwhile: each
    that is in a launch has its own.
    """

    def __init__(self, launch: Launch) -> None:
        self.parameters = Parameters(launch)
        record = np.frombuffer(self.parameters.bytes, np.dtype((np.void, len(launch.record))))
        self.values = (CNumpyArray(record),)  # which CuPy would make of it at every launch


Make = tuple[str, tuple[int, ...], np.dtype]
_BESIDE_KV = {"den", *state_names("state")[1:], *state_names("dinitial_state")[1:]}


def _may_share(name: str, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether an output may share memory with others, which live on while it does.

    out, gradients and kv have memory of their own, so that they hold nothing else; of the others
    each that is small adds 1 MiB at most to what one of them holds.
    """
    return name in _BESIDE_KV and prod(shape) * dtype.itemsize <= 1 << 20


def _pool_bytes(name: str, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """What CuPy's pool takes for an array, in the units to which it aligns them."""
    return -(-prod(shape) * dtype.itemsize // 512) * 512


@dataclass(frozen=True)
class Prepared:
    """A plan with its kernels loaded on one device."""

    plan: Plan
    launches: tuple[Ready, ...]
    makes: tuple[Make, ...]  # outputs and workspaces that have memory of their own
    shares: tuple[tuple[Make, int], ...]  # outputs in one allocation, and where in it they begin
    shared_bytes: int
    misfits: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan, device: int) -> "Prepared":
        load_all((launch.spec for launch in plan.launches), device)
        made = (plan.outputs | plan.workspace).items()
        makes = [(name, b.shape, dtypes.numpy_dtype(b.dtype)) for name, b in made]
        small = [make for make in makes if make[0] in plan.outputs and _may_share(*make)]
        *begins, end = accumulate((_pool_bytes(*make) for make in small), initial=0)
        return cls(
            plan,
            launches=tuple(Ready(launch, device) for launch in plan.launches),
            makes=tuple(make for make in makes if make not in small),
            shares=tuple(zip(small, begins, strict=True)),
            shared_bytes=end,
            misfits=tuple(misfits(plan.problem)),
        )

    def run(self, buffers: Buffers) -> None:
        """Carry the plan out; results and workspaces join the inputs in `buffers`."""
        for name in self.plan.copies:
            buffers[name] = cupy.ascontiguousarray(buffers[name])
        for name in self.misfits:
            dtype = dtypes.numpy_dtype(self.plan.problem.state_dtype)
            buffers[name] = cupy.ascontiguousarray(buffers[name].astype(dtype, copy=False))
        for name, shape, dtype in self.makes:
            buffers[name] = cupy.ndarray(shape, dtype)
        if self.shares:
            memory = cupy.cuda.alloc(self.shared_bytes)  # takes longer than to make an array
            for (name, shape, dtype), begin in self.shares:
                buffers[name] = cupy.ndarray(shape, dtype, memory + begin)
        self.launch({name: x.data.ptr for name, x in buffers.items()})
        for r in self.plan.reductions:
            buffers[r.result] = sum_to(buffers[r.source], r.shape, dtypes.numpy_dtype(r.dtype))

    def launch(self, addresses: Mapping[str, int], stream: int | None = None) -> None:
        """Queue the kernels, on the current device, for buffers at these addresses.

        Named are the inputs, outputs and workspaces of the plan. Its copies are the caller's to
        make before, its reductions afterwards. `stream` is the address of another library's
        stream; None stands for CuPy's current one.
        """
        external = None if stream is None else _external(stream)
        for launch in self.launches:
            launch(addresses, external)


class _External:
    """Another library's stream, as CuPy takes these."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@lru_cache(maxsize=256)
def _external(address: int) -> Any:
    return cupy.cuda.Stream.from_external(_External(address))


def sum_to(x: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """The sum of `x` over the axes that `shape` lacks or has as 1, in float32 or wider."""
    wide = x.dtype if x.dtype.itemsize > 2 else np.dtype(np.float32)
    axes = summed_axes(x.shape, shape)
    total = x.astype(wide, copy=False).sum(axis=axes) if axes else x
    return total.astype(dtype, copy=False).reshape(shape)


_prepared: Cache[Prepared] = Cache(limit=1024)


def prepare_forward(
    problem: Problem, device: int, want_state: bool, out: Layout | None = None
) -> Prepared:
    """The plan of `linear_attention` on a CUDA device, ready to run."""
    key = problem, want_state, out, device
    return _prepare(key, lambda info: forward_plan(problem, info, want_state, out), device)


def prepare_backward(problem: Problem, device: int, has_normalizer: bool) -> Prepared:
    """The plan of `linear_attention_vjp` on a CUDA device, ready to run."""
    key = problem, has_normalizer, None, device
    return _prepare(key, lambda info: backward_plan(problem, info, has_normalizer), device)


def _prepare(key: Any, make: Callable[[Any], Plan], device: int) -> Prepared:
    found = _prepared.get(key)
    if found is None:
        found = Prepared.of(make(device_info(device)), device)
        _prepared.put(key, found)
    return found


def _add_state(buffers: Buffers, name: str, state: State | None) -> None:
    if state is not None:
        buffers.update(zip(state_names(name), state, strict=True))


def _state_of(name: str, buffers: Buffers) -> State:
    return State(*map(buffers.__getitem__, state_names(name)))


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    initial_state: State | None,
    out: Array | None,
    want_state: bool,
) -> tuple[Array, State | None, Array]:
    """out, the final state if wanted, and den; see `la_cupy.linear_attention`."""
    device = q.data.device_id
    if device != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(device):
            return forward(problem, q, k, v, initial_state, out, want_state)
    layout = None
    if out is not None:
        strides = tuple(s // out.itemsize for s in out.strides)
        layout = Layout(problem.dtype, out.shape, strides)
    prepared = prepare_forward(problem, device, want_state, layout)
    buffers = {"q": q, "k": k, "v": v}
    if out is not None:
        buffers["out"] = out
    _add_state(buffers, "initial_state", initial_state)
    prepared.run(buffers)
    result = buffers["out"]
    if out is not None and result is not out:  # its last axis is not contiguous
        out[...] = result
    return result, _state_of("state", buffers) if want_state else None, buffers["den"]


def vjp(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    normalizer: Array | None,
    initial_state: State | None,
    dstate: State | None,
) -> Gradients:
    """The gradients; see `la_cupy.linear_attention_vjp`."""
    device = q.data.device_id
    if device != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(device):
            return vjp(problem, dout, q, k, v, normalizer, initial_state, dstate)
    prepared = prepare_backward(problem, device, normalizer is not None)
    buffers = {"q": q, "k": k, "v": v, "dout": dout}
    if normalizer is not None:
        dtype = dtypes.numpy_dtype(problem.state_dtype)
        buffers["den"] = cupy.ascontiguousarray(normalizer.astype(dtype, copy=False))
    _add_state(buffers, "initial_state", initial_state)
    _add_state(buffers, "dstate", dstate)
    prepared.run(buffers)
    state = None if initial_state is None else _state_of("dinitial_state", buffers)
    return Gradients(buffers["dq"], buffers["dk"], buffers["dv"], state)


def explain(problem: Problem, want_state: bool = False) -> Plan:
    """The plan that would run on the current device."""
    info = device_info(cupy.cuda.runtime.getDevice())
    if problem.dout is not None:
        return backward_plan(problem, info, has_normalizer=True)
    return forward_plan(problem, info, want_state)
