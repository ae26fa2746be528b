"""What the tests of the PyTorch adapter share: tensors of a case, one call of everything, and a
GPU that is emulated on the host, so that all of the adapter's GPU path but CUDA itself runs in CI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from cases import Case, Inputs
from emulation import runner
from emulation.backend import H200, filled
from gpu_helpers import Moat, in_moat
from measures import name_results

import la_cupy as la
from la_cupy.layouts import Buffer
from la_cupy.plan import Plan, backward_plan, forward_plan
from la_cupy.records import suited

torch = pytest.importorskip("torch")
from la_cupy.interop import _torch_run
from la_cupy.interop.torch import linear_attention


class Tensors:
    """The inputs of a case as tensors at the same strides, in memory full of NaN."""

    def __init__(self, case: Case, inputs: Inputs, device: str = "cpu") -> None:
        self.case = case
        self.moat: Moat = in_moat(inputs.map(upward), np)
        self.parents = [_torch_run.to_torch(x.copy()).to(device) for x in self.moat.parents]
        placed = zip(self.moat.inputs.arrays(), self.moat.parents, self.parents, strict=True)
        views = {id(x): _view(x, parent, tensor) for x, parent, tensor in placed}
        self.inputs = self.moat.inputs.map(lambda x: views[id(x)])

    def assert_unchanged(self) -> None:
        """Every byte, around the inputs too."""
        found = [_torch_run.to_numpy(x.cpu()).tobytes() for x in self.parents]
        assert found == self.moat.bits(), "an input was modified"


def upward(x: Any) -> Any:
    """`x` in a copy if it has negative strides, which torch does not know."""
    return np.array(x) if any(s < 0 for s in x.strides) else x


def _view(x: Any, parent: Any, tensor: Any) -> Any:
    strides = [s // x.itemsize for s in x.strides]
    offset = (x.ctypes.data - parent.ctypes.data) // x.itemsize if x.size else 0
    return tensor.as_strided(x.shape, strides, offset).detach()


def tracked(inputs: Inputs) -> Inputs:
    """Leaves that require gradients, but dout and dstate."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    state = inputs.initial_state
    if state is not None:
        state = la.State(*(x.detach().requires_grad_() for x in state))
    return inputs._replace(q=q, k=k, v=v, initial_state=state)


def call(case: Case, x: Inputs, attend: Callable[..., Any] = linear_attention) -> dict[str, Any]:
    """Every result of the operator and its gradients, by the names of measures.py."""
    x = tracked(x)
    out, state, den = attend(
        x.q,
        x.k,
        x.v,
        initial_state=x.initial_state,
        return_state=True,
        return_normalizer=True,
        **case.options,
    )
    assert not den.requires_grad and isinstance(state, la.State)
    results, cotangents = [out], [x.dout.to(out.dtype)]
    for part, dpart in zip(state, x.dstate or (), strict=False):
        results.append(part)
        cotangents.append(dpart.expand(part.shape))
    leaves = (*x[:3], *(x.initial_state or ()))
    found = torch.autograd.grad(results, leaves, cotangents, allow_unused=False)
    initial = la.State(*found[3:]) if x.initial_state else None
    for leaf, grad in zip(leaves, found, strict=True):
        assert grad.device == leaf.device
    grads = la.Gradients(*found[:3], initial)
    return to_host(name_results(out=out, state=state, den=den, grads=grads))


def to_host(results: Mapping[str, Any]) -> dict[str, Any]:
    """NumPy arrays of tensors."""
    return {name: _torch_run.to_numpy(x.cpu()) for name, x in results.items()}


VIEWS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "heads": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3),
    "sliced": lambda x: torch.cat((x, x, x), -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every-other": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "expanded": lambda x: x[:1].expand_as(x),
}
"""Layouts that PyTorch hands over."""


class EmulatedGpu(_torch_run.Cuda):
    """Runs an H200's plans on CPU tensors: the adapter's GPU path without CUDA."""

    plans: ClassVar[list[Plan]] = []

    @classmethod
    def _prepare(cls, plan: Plan) -> Any:
        cls.plans.append(plan)
        return SimpleNamespace(plan=plan)

    @classmethod
    def prepare_forward(cls, problem: Any, device: Any, want_state: bool) -> Any:
        return cls._prepare(forward_plan(problem, H200, want_state))

    @classmethod
    def prepare_backward(cls, problem: Any, device: Any, has_normalizer: bool) -> Any:
        return cls._prepare(backward_plan(problem, H200, has_normalizer))

    @classmethod
    def queue(cls, prepared: Any, addresses: Mapping[str, int], device: Any) -> None:
        launches = [x for launch in prepared.plan.launches for x in suited(launch, addresses)]
        if not launches:
            return
        names = list(dict.fromkeys(launch.spec.name for launch in launches))
        sources = list(dict.fromkeys(launch.spec.source for launch in launches))
        library = runner.build(names, includes=sources)
        for launch in launches:
            spec = launch.spec
            record = filled(launch, addresses)
            library.launch(spec.name, launch.grid, spec.threads, spec.shared_bytes, record)


@pytest.fixture
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[EmulatedGpu]]:
    """CPU tensors are computed as a GPU's are; memory that torch hands out is full of NaN."""
    monkeypatch.setitem(_torch_run.MACHINES, "cpu", EmulatedGpu)
    monkeypatch.setattr(EmulatedGpu, "plans", [])
    _torch_run._calls.entries.clear()
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield EmulatedGpu
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
    _torch_run._calls.entries.clear()


def buffer_bytes(buffers: Mapping[str, Buffer]) -> int:
    """Of all outputs, or all workspaces, of a plan."""
    return sum(math.prod(b.shape) * getattr(torch, b.dtype).itemsize for b in buffers.values())
