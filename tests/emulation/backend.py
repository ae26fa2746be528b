"""The GPU path on the host: the library's own plans, its own kernels, executed by the emulation.

`forward` and `vjp` have the signatures of la_cupy.cpu and la_cupy.launch and take NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from emulation import runner
from la_cupy import dtypes
from la_cupy.device import DeviceInfo
from la_cupy.layouts import state_part_fits
from la_cupy.params import MAP_BYTES, STATE_FIELDS
from la_cupy.plan import Plan, backward_plan, forward_plan
from la_cupy.problem import Layout, Problem
from la_cupy.records import Launch, Parameters, suited
from la_cupy.results import Gradients, State
from la_cupy.tensor_maps import ALIGNMENT, BOX, TensorMap

H200 = DeviceInfo("NVIDIA H200", 90, 132, 232448, 233472)
SMALL_SHARED = DeviceInfo("99 KiB", 120, 82, 101376, 102400)


class Backend:
    """Runs plans for `device`; `replace` mutates kernel sources (see runner.build)."""

    def __init__(
        self, device: DeviceInfo = H200, replace: Any = None, order: str = "forward", seed: int = 0
    ) -> None:
        self.device, self.replace, self.order = device, replace, order
        self.plans: list[Plan] = []

    def forward(
        self,
        problem: Problem,
        q: Any,
        k: Any,
        v: Any,
        initial_state: Any = None,
        out: Any = None,
        want_state: bool = False,
    ) -> tuple[Any, State | None, Any]:
        layout = None
        if out is not None:
            strides = tuple(s // out.itemsize for s in out.strides)
            layout = Layout(problem.dtype, out.shape, strides)
        plan = forward_plan(problem, self.device, want_state, layout)
        buffers = {"q": q, "k": k, "v": v, "out": out}
        self._states(buffers, problem, initial_state=initial_state)
        self.run(plan, buffers)
        if out is not None and buffers["out"] is not out:
            out[...] = buffers["out"]
        state = State(*(buffers[f"state.{part}"] for part in STATE_FIELDS)) if want_state else None
        return buffers["out"], state, buffers["den"]

    def vjp(
        self,
        problem: Problem,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        normalizer: Any = None,
        initial_state: Any = None,
        dstate: Any = None,
    ) -> Gradients:
        plan = backward_plan(problem, self.device, normalizer is not None)
        buffers = {"q": q, "k": k, "v": v, "dout": dout}
        if normalizer is not None:
            dtype = dtypes.numpy_dtype(problem.state_dtype)
            buffers["den"] = np.ascontiguousarray(normalizer.astype(dtype))
        self._states(buffers, problem, initial_state=initial_state, dstate=dstate)
        self.run(plan, buffers)
        state = None
        if initial_state is not None:
            state = State(*(buffers[f"dinitial_state.{part}"] for part in STATE_FIELDS))
        return Gradients(buffers["dq"], buffers["dk"], buffers["dv"], state)

    @staticmethod
    def _states(buffers: dict[str, Any], problem: Problem, **states: Any) -> None:
        dtype = dtypes.numpy_dtype(problem.state_dtype)
        for name, state in states.items():
            if state is None:
                continue
            layouts = getattr(problem, name)
            for part, x, layout, inner in zip(
                STATE_FIELDS, state, layouts, (2, 1, 1, 0), strict=True
            ):
                if not state_part_fits(layout, inner, problem.state_dtype):
                    x = np.array(x, dtype, order="C")
                buffers[f"{name}.{part}"] = x

    def run(self, plan: Plan, buffers: dict[str, Any]) -> None:
        """Carry a plan out: as la_cupy.launch does, with NumPy arrays full of NaN to begin with."""
        self.plans.append(plan)
        for name in plan.copies:
            buffers[name] = np.ascontiguousarray(buffers[name])
        for name, buffer in (plan.outputs | plan.workspace).items():
            array = np.empty(buffer.shape, dtypes.numpy_dtype(buffer.dtype))
            array.view(np.uint8).fill(0xFF) if array.size and array.ndim else array.fill(np.nan)
            buffers[name] = array
        addresses = {name: _address(x) for name, x in buffers.items() if x is not None}
        launches = [x for launch in plan.launches for x in suited(launch, addresses)]
        names = list(dict.fromkeys(launch.spec.name for launch in launches))
        sources = list(dict.fromkeys(launch.spec.source for launch in launches))
        if not names:
            return self.reduce(plan, buffers)
        library = runner.build(names, includes=sources, replace=self.replace)
        for launch in launches:
            record = filled(launch, addresses)
            spec = launch.spec
            library.launch(
                spec.name,
                launch.grid,
                spec.threads,
                spec.shared_bytes,
                record,
                order=self.order,
            )
        self.reduce(plan, buffers)

    @staticmethod
    def reduce(plan: Plan, buffers: dict[str, Any]) -> None:
        for r in plan.reductions:
            x = buffers[r.source]
            extra = x.ndim - len(r.shape)
            axes = tuple(range(extra)) + tuple(
                extra + i for i, size in enumerate(r.shape) if size == 1 != x.shape[extra + i]
            )
            wide = x.astype(np.float64 if x.dtype == np.float64 else np.float32).sum(axis=axes)
            buffers[r.result] = wide.astype(dtypes.numpy_dtype(r.dtype)).reshape(r.shape)


def filled(launch: Launch, addresses: Mapping[str, int]) -> bytes:
    """The parameters of one launch, with the buffers' addresses in their places."""
    parameters = Parameters(launch)
    parameters.fill(addresses, emulated_map)
    return bytes(parameters.bytes)


def emulated_map(tensor_map: TensorMap, address: int) -> bytes:
    """What la_cupy.tensor_maps.encode makes, for tests/emulation/ptx/tma.cuh."""
    assert address % ALIGNMENT == 0
    item = dtypes.ITEMSIZE[tensor_map.dtype]
    numbers = np.zeros(1, _MAP)
    numbers[0]["data"], numbers[0]["strides"] = address, tensor_map.strides
    numbers[0]["sizes"], numbers[0]["box"] = tensor_map.sizes, (*BOX, 1, 1, 1)
    numbers[0]["item"] = item
    return numbers.tobytes()


_MAP = np.dtype(
    [
        ("data", np.uint64),
        ("strides", np.uint64, 4),
        ("sizes", np.uint32, 5),
        ("box", np.uint32, 5),
        ("item", np.uint32),
        ("unused", np.uint64, 5),
    ],
    align=True,
)
assert _MAP.itemsize == MAP_BYTES


def _address(array: Any) -> int:
    return array.ctypes.data if prod(array.shape) else 0
