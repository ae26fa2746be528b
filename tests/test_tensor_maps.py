"""Which arrays the tensor memory accelerator takes, and what is said of them to the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from plans import array, assert_runnable
from specialisations import H200

from la_cupy import tensor_maps
from la_cupy.layouts import lead_strides
from la_cupy.plan import forward_plan
from la_cupy.planner import GRANULE
from la_cupy.problem import forward_problem
from la_cupy.tensor_maps import ALIGNMENT, BOX, TensorMap, encode


def map_of(x: Any, dtype: str = "bfloat16") -> tuple[TensorMap, tuple[int, ...]] | None:
    """Of an array that a plan sees; leading axes that broadcast have stride 0."""
    strides = tuple(s // x.itemsize for s in x.strides)
    lead = lead_strides(x.shape[:-2], strides[:-2], x.shape[:-2])
    return TensorMap.of(dtype, x.shape[-1], x.shape[-2], strides[-2], lead, x.shape[:-2])


MAPPED: dict[str, Callable[[], Any]] = {
    "contiguous": lambda: array(2, 3, 70, 64),
    "no leading axes": lambda: array(70, 64),
    "three leading axes": lambda: array(2, 3, 4, 70, 16),
    "swapaxes": lambda: array(2, 70, 3, 64).swapaxes(1, 2),
    "fused": lambda: array(2, 3, 70, 192)[..., 64:128],
    "columns that are no packets": lambda: array(2, 3, 70, 24)[..., :19],
    "broadcast": lambda: np.broadcast_to(array(3, 1, 70, 64), (3, 5, 70, 64)),
    "four leading axes, two that broadcast": lambda: np.broadcast_to(
        array(3, 1, 2, 1, 70, 64), (3, 5, 2, 4, 70, 64)
    ),
    "every other row": lambda: array(2, 140, 64)[:, ::2],
    "one row": lambda: array(2, 3, 1, 64),
    "one row of an odd stride": lambda: array(7, 20)[3:4],
    "one element": lambda: array(1, 1),
}

NOT_MAPPED: dict[str, Callable[[], Any]] = {
    "four leading axes": lambda: array(2, 3, 4, 2, 7, 16),
    "rows backwards": lambda: array(2, 70, 64)[:, ::-1],
    "heads backwards": lambda: array(2, 70, 64)[::-1],
    "odd rows": lambda: array(2, 70, 20),
    "odd heads": lambda: array(2, 1, 20),
    "all rows are one": lambda: np.broadcast_to(array(2, 1, 64), (2, 70, 64)),
    "no rows": lambda: array(2, 0, 64),
    "too many rows": lambda: array(2**31, 64),
    "too far apart": lambda: array(2, 2**34, 64)[:, :5],
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_map_reaches_every_element(name: str) -> None:
    x = MAPPED[name]()
    found, axes = map_of(x)  # type: ignore[misc]
    assert found.sizes[:2] == (x.shape[-1], x.shape[-2])
    assert len(found.sizes) == 5 and len(found.strides) == 4, "of any array, five axes"
    assert all(size > 0 for size in found.sizes)
    assert all(0 < stride < 2**40 and stride % ALIGNMENT == 0 for stride in found.strides)
    rng = np.random.default_rng(0)
    lead = len(x.shape) - 2
    assert axes == tuple(i for i in range(lead) if x.strides[i] != 0 and x.shape[i] != 1)
    assert found.sizes[2:] == (*(x.shape[i] for i in axes), *[1] * (3 - len(axes)))
    for _ in range(50):
        index = [int(rng.integers(n)) for n in x.shape]
        place = [index[-2], *(index[i] for i in axes)]
        reached = sum(i * s for i, s in zip(place, found.strides, strict=False))
        offset = sum(i * s for i, s in zip(index, x.strides, strict=True))
        assert reached + index[-1] * x.itemsize == offset


@pytest.mark.parametrize("name", NOT_MAPPED)
def test_what_has_no_map(name: str) -> None:
    assert map_of(NOT_MAPPED[name]()) is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_types_that_have_no_map(dtype: str) -> None:
    assert map_of(array(2, 70, 64, dtype=dtype), dtype) is None
    found, _ = map_of(array(2, 70, 64, dtype="float16"), "float16")  # type: ignore[misc]
    assert found.dtype == "float16" and found.strides[0] == 128


# --- what plans make of it


def kernels_of(x: Any, *, causal: bool, which: str) -> list[str]:
    """The kernels of a forward pass where `x` is one of q, k and v, and the others are contiguous."""
    arrays = {name: x if name == which else array(*x.shape) for name in ("q", "k", "v")}
    plan = forward_plan(forward_problem(*arrays.values(), causal=causal), H200, True)
    assert_runnable(plan)
    return [launch.spec.source for launch in plan.launches]


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_stream_runs_where_there_are_maps(causal: bool, which: str) -> None:
    for make in (*MAPPED.values(), *NOT_MAPPED.values()):
        x = make()
        if x.shape[-2] <= GRANULE or x.size > 2**31 or x.ndim > 5:
            continue  # one chunk runs on sweep, and more axes may merge
        mapped = map_of(x) is not None and map_of(array(*x.shape)) is not None
        found = kernels_of(x, causal=causal, which=which)
        if causal:
            assert ("stream.cu" in found) == mapped, (x.shape, x.strides, found)
        elif mapped:
            assert set(found) <= {"stream.cu", "scan.cu"}, (x.shape, x.strides, found)


def test_axes_that_only_states_keep_apart_count() -> None:
    """Leading axes merge where all arrays of a launch step alike; where states do not, a map may be missing."""
    q, k = array(2, 2, 2, 2, 2, 2, 70, 64), array(2, 1, 2, 1, 2, 1, 70, 64)
    for causal in (False, True):
        plan = forward_plan(forward_problem(q, k, k, causal=causal), H200, True)
        assert_runnable(plan)
        assert "sweep.cu" in [launch.spec.source for launch in plan.launches]


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_weights_beyond_a_float_take_sweep(causal: bool) -> None:
    """`stream` divides a by b."""
    x = array(2, 70, 64)

    def walk(a: float, b: float) -> str:
        plan = forward_plan(forward_problem(x, x, x, a=a, b=b, causal=causal), H200)
        assert_runnable(plan)
        return plan.launches[-1].spec.source

    for a, b in ((1, 1), (1, 0), (-1e30, 0), (0, 1e-30), (1e3, 1), (-1e-5, -1e-8), (1e-20, 1)):
        assert walk(a, b) == "stream.cu", (a, b)
    for a, b in ((1.01e3, 1), (-1e16, 1), (1, 1e-16), (1e-10, -1e-30)):
        assert walk(a, b) == "sweep.cu", (a, b)


# --- the driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A driver that makes maps of the numbers 0 to 127, and remembers what it was asked for."""
    asked: list[dict[str, Any]] = []

    def numbers(kind: Any, count: int, array: Any) -> tuple[int, ...]:
        return tuple(ctypes.cast(array, ctypes.POINTER(kind))[:count])

    def function(memory: int, dtype: int, rank: int, address: int, *rest: Any) -> int:
        sizes, strides, box, steps, interleave, swizzle, promotion, outside = rest
        asked.append(
            {
                "memory": memory,
                "dtype": dtype,
                "address": address,
                "sizes": numbers(ctypes.c_uint64, rank, sizes),
                "strides": numbers(ctypes.c_uint64, rank - 1, strides),
                "box": numbers(ctypes.c_uint32, rank, box),
                "steps": numbers(ctypes.c_uint32, rank, steps),
                "options": (interleave, swizzle, promotion, outside),
            }
        )
        ctypes.memmove(memory, bytes(range(128)), 128)
        return 0 if address % ALIGNMENT == 0 else 1

    monkeypatch.setattr(tensor_maps, "_encoder", lambda: function)
    encode.cache_clear()
    yield asked
    encode.cache_clear()


def test_the_driver_is_asked_for_the_array(driver: list[dict[str, Any]]) -> None:
    found, _ = map_of(array(2, 3, 70, 104)[..., :72])  # type: ignore[misc]
    assert found is not None
    for address in (1 << 44, 1 << 20):
        assert encode(found, address) == bytes(range(128))
    assert encode(found, 1 << 20) == bytes(range(128))
    assert [x["address"] for x in driver] == [1 << 44, 1 << 20], "each once"
    for x in driver:
        assert x["memory"] % 64 == 0
        assert x["dtype"] == 9, "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"
        assert x["sizes"] == (72, 70, 2, 3, 1)
        assert x["strides"] == (208, 3 * 70 * 208, 70 * 208, 16)
        assert x["box"] == (*BOX, 1, 1, 1) and x["steps"] == (1,) * 5
        assert x["options"] == (0, 3, 2, 0)


def test_a_refusal_of_the_driver_is_an_error(driver: list[dict[str, Any]]) -> None:
    found, _ = map_of(array(70, 64))  # type: ignore[misc]
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled returned 1 for .* at 0x1002"):
        encode(found, 0x1002)


@pytest.mark.gpu
def test_the_driver_makes_maps_of_all_that_has_one() -> None:
    import cupy as cp

    memory = cp.zeros(1 << 20, np.uint8)
    for make, dtype in product(MAPPED.values(), ("bfloat16", "float16")):
        found, _ = map_of(make(), dtype)  # type: ignore[misc]
        first = encode(found, memory.data.ptr)
        assert len(first) == 128 and first != encode(found, memory.data.ptr + 16)
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled returned"):
        encode(found, memory.data.ptr + 2)
