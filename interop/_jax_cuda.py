"""From a primitive to one custom call that carries a plan out, on a GPU.

The call's attribute says all that its plan depends on, as text: whatever process runs the
program, from XLA's cache or from an export, makes the same plan of it. Results and workspaces of
the plan are results of the custom call, so that XLA owns all memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from la_cupy import checks, dtypes
from la_cupy.device import DeviceInfo, device_info
from la_cupy.layouts import Buffer, summed_axes
from la_cupy.plan import Plan, backward_plan, forward_plan
from la_cupy.problem import GPU_WIDTH_LIMIT, Layout, Options, Problem

from . import _jax_ffi
from ._jax_axes import memory_order
from ._jax_ops import Abstract, Call, Op, problem_of

Array = Any


@dataclass(frozen=True)
class Program:
    """One custom call: which operator on which operands, planned for which GPU."""

    call: Call
    operands: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape
    device: DeviceInfo

    @property
    def names(self) -> tuple[str, ...]:
        """The buffers of the plan, in the order of the custom call's operands and results."""
        return (*(name for name, _, _ in self.operands), *self.results)

    @property
    def results(self) -> dict[str, Any]:
        """What the custom call returns: results, then workspaces."""
        plan = self.plan
        made = plan.outputs | plan.workspace
        if self.is_forward:  # laid out as the plan was told
            made["out"] = Buffer(plan.problem.out_shape, plan.problem.dtype)
        return made

    def order(self, name: str, rank: int) -> tuple[int, ...]:
        """The axes of a buffer as they lie in memory."""
        return memory_order(name, rank, self.call.heads)

    @property
    def plan(self) -> Plan:
        return _plan(self)

    @property
    def is_forward(self) -> bool:
        return all(name != "dout" for name, _, _ in self.operands)

    def encode(self) -> str:
        """As text, from which `decode` makes an equal Program in any process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Program:
        values = json.loads(text)
        call = values["call"]
        call = Call(**{**call, "options": Options(*call["options"]), "moved": tuple(call["moved"])})
        operands = ((name, dtype, tuple(shape)) for name, dtype, shape in values["operands"])
        return cls(call, tuple(operands), DeviceInfo(**values["device"]))


@lru_cache(maxsize=1024)
def _plan(program: Program) -> Plan:
    named = {
        name: Abstract(dtypes.numpy_dtype(dtype), shape, program.order(name, len(shape)))
        for name, dtype, shape in program.operands
    }
    problem = problem_of(program.call, named, GPU_WIDTH_LIMIT)
    if program.is_forward:
        return forward_plan(problem, program.device, program.call.state, _out(program, problem))
    return backward_plan(problem, program.device, has_normalizer=True)


def _out(program: Program, problem: Problem) -> Layout:
    shape = problem.out_shape
    order = program.order("out", len(shape))
    out = Abstract(dtypes.numpy_dtype(problem.dtype), shape, order)
    return Layout(problem.dtype, shape, checks.strides("out", out))


@dataclass(frozen=True)
class Route:
    """A custom-call target, and the GPU that plans for it are made for."""

    target: str
    device: Callable[[], DeviceInfo]
    load: Callable[[Program], None]  # makes ready what a launch must not wait for


def lower(route: Route, op: Op, call: Call) -> Callable[..., list[Array]]:
    """The primitive as a function whose one heavy operation is the custom call."""

    def run(*operands: Array) -> list[Array]:
        names = op.operands(call)
        described = tuple(
            (name, x.dtype.name, tuple(x.shape)) for name, x in zip(names, operands, strict=True)
        )
        program = Program(call, described, route.device())
        route.load(program)
        plan = program.plan
        assert not plan.copies, f"XLA's arrays are contiguous, but {plan.copies} are to be copied"
        # States and den are read in the type of the sums; they are small.
        state_dtype = dtypes.numpy_dtype(plan.problem.state_dtype)
        given = [
            x.astype(state_dtype)
            if "." in name or name == "den"
            # undoes the caller's transposition, if heads lie behind rows: XLA cancels the two
            else jnp.transpose(x, program.order(name, x.ndim))
            for name, x in zip(names, operands, strict=True)
        ]
        orders = [
            program.order(name, len(buffer.shape)) for name, buffer in program.results.items()
        ]
        types = [
            jax.ShapeDtypeStruct(
                [buffer.shape[axis] for axis in order], dtypes.numpy_dtype(buffer.dtype)
            )
            for buffer, order in zip(program.results.values(), orders, strict=True)
        ]
        attributes = {_jax_ffi.ATTRIBUTE: program.encode()}
        made = jax.ffi.ffi_call(route.target, types)(*given, **attributes)
        buffers = {
            name: jnp.transpose(x, [order.index(axis) for axis in range(x.ndim)])
            for name, x, order in zip(program.results, made, orders, strict=True)
        }
        for r in plan.reductions:
            buffers[r.result] = _sum_to(buffers[r.source], r.shape, dtypes.numpy_dtype(r.dtype))
        return [buffers[_result(op, name)] for name in op.results(call)]

    return run


def _result(op: Op, name: str) -> str:
    """The plan's name of a result."""
    return f"d{name}" if op.name.endswith("backward") else name


def _sum_to(x: Array, shape: Sequence[int], dtype: np.dtype) -> Array:
    """The sum of x over the axes that `shape` lacks or has as 1, in float32 or wider."""
    axes = summed_axes(x.shape, shape)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.sum(x.astype(wide), axes).astype(dtype).reshape(shape)


# --- CUDA -----------------------------------------------------------------------------------


def _device() -> DeviceInfo:
    """The GPU that a program is lowered for: the default one, and all of a process are alike."""
    return device_info(_local_devices()[0])


def _local_devices() -> list[int]:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise RuntimeError(
            "linear_attention is lowered for CUDA, but JAX has no CUDA device here, and a plan "
            "depends on the GPU: lower on the machine that has it, or use linear_attention_xla"
        ) from error
    return [device.local_hardware_id for device in devices]


def _load(program: Program) -> None:
    """Compile and load the kernels, on every device of this process: the program may run on any.

    In a command buffer a launch is only recorded, when no module can be loaded any more.
    """
    text = program.encode().encode()
    for device in _local_devices():
        _ready(text, device)


@lru_cache(maxsize=4096)
def _ready(text: bytes, device: int) -> tuple[tuple[str, ...], Any, Any]:
    """(names of the buffers, the prepared plan, the device) of one custom call."""
    import cupy

    from la_cupy import launch

    program = Program.decode(text)
    here = device_info(device)
    if here != program.device:
        raise RuntimeError(
            f"this program was lowered for {program.device}, but runs on {here}: lower it again, "
            f"on the machine that runs it"
        )
    problem = program.plan.problem
    out = _out(program, problem)
    with _capture_allows_loading():
        if program.is_forward:
            prepared = launch.prepare_forward(problem, device, program.call.state, out)
        else:
            prepared = launch.prepare_backward(problem, device, True)
    return program.names, prepared, cupy.cuda.Device(device)


class _capture_allows_loading:
    """Lets this thread load modules while XLA records a command buffer on it."""

    _RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

    def __enter__(self) -> None:
        import ctypes

        self._exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        self._mode = ctypes.c_int(self._RELAXED)
        self._swap()

    def __exit__(self, *exception: object) -> None:
        self._swap()  # the mode that was there before

    def _swap(self) -> None:
        import ctypes

        if status := self._exchange(ctypes.byref(self._mode)):
            raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with error {status}")


def _launch(text: bytes, device: int, stream: int, addresses: list[int]) -> None:
    names, prepared, there = _ready(text, device)
    with there:
        prepared.launch(dict(zip(names, addresses, strict=True)), stream)


CUDA = Route("la_cupy_cuda", _device, _load)
_jax_ffi.register(CUDA.target, "CUDA", _launch, capturable=True)
