"""CuPy arrays and backends that compute nothing, to test what happens before a backend."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import la_cupy as la
from la_cupy import checked, dtypes

Array = np.ndarray


class Memory:
    """cupy.cuda.MemoryPointer, as far as we look at it."""

    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id


class ndarray:
    """Stands in for cupy.ndarray: known by its module and name, with no data a host could read."""

    __module__ = "cupy"

    def __init__(self, host: Array, device: int = 0) -> None:
        self.host = host
        self.dtype, self.shape, self.strides = host.dtype, host.shape, host.strides
        self.data = Memory(host.ctypes.data, device)


class Backend(types.ModuleType):
    """Takes what a backend takes, remembers it, and returns empty results of the right shapes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []

    def forward(
        self, problem: Any, q: Any, k: Any, v: Any, state: Any, out: Any, want_state: bool
    ) -> tuple[Any, Any, Any]:
        self.calls.append((problem, q, k, v, state, out, want_state))
        dtype = dtypes.numpy_dtype(problem.dtype)
        result = np.zeros(problem.out_shape, dtype) if out is None else out
        return result, make_state(*problem.state_lead) if want_state else None, "den"

    def vjp(self, problem: Any, *inputs: Any) -> la.Gradients:
        self.calls.append((problem, *inputs))
        return la.Gradients("dq", "dk", "dv", None)

    def explain(self, problem: Any) -> str:
        return f"plan of {problem}"


def make_state(*lead: int, d: int = 8, e: int = 4) -> la.State:
    return la.State(*(np.zeros(x) for x in ((*lead, d, e), (*lead, d), (*lead, e), lead)))


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Backend]]:
    caches = (checked._forward, checked._backward)
    for cache in caches:
        cache.entries.clear()
    fakes = {library: Backend(name) for library, name in checked.BACKENDS.items()}
    for fake in fakes.values():
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    yield fakes
    for cache in caches:
        cache.entries.clear()


@pytest.fixture
def cpu(backends: dict[str, Backend]) -> Backend:
    return backends["numpy"]


@pytest.fixture
def gpu(backends: dict[str, Backend]) -> Backend:
    return backends["cupy"]


def qkv(n: int = 5, dtype: Any = np.float32) -> tuple[Array, Array, Array]:
    return np.zeros((3, n, 8), dtype), np.zeros((3, 7, 8), dtype), np.zeros((3, 7, 4), dtype)


def on_gpu(xs: Any, device: int = 0) -> Any:
    made = [ndarray(x, device) for x in xs]
    return la.State(*made) if isinstance(xs, la.State) else made
