"""Leading axes as the kernels get them, and the kernels' structures as the host packs them."""

from __future__ import annotations

import shutil
from math import prod
from typing import Any

import numpy as np
import pytest
from emulation import runner
from emulation.backend import emulated_map, filled
from plans import array, assert_runnable
from specialisations import A100, ARITHMETICS, B200, H200, KERNELS, L40, specialisations

from la_cupy.kernels import (
    RelevelSpec,
    RingSpec,
    RingStateSpec,
    ScanSpec,
    StepSpec,
    StreamSpec,
    SweepSpec,
)
from la_cupy.params import (
    MAP_BYTES,
    MAPS,
    MAX_RANK,
    PARAMS,
    RELEVEL_PARAMS,
    RELEVEL_ROWS,
    SCAN_NUMBERS,
    SCAN_PARAMS,
    SCAN_WIDTH,
    STEP_KEYS,
    STEP_PARAMS,
    STEP_QUERIES,
    STEP_WIDTH,
    STREAM_PARAMS,
)
from la_cupy.plan import forward_plan
from la_cupy.problem import forward_problem
from la_cupy.records import Axes, Parameters, merge

# --- leading axes


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(7 * prod(shape[i + 1 :]) for i in range(len(shape)))


def offsets(sizes: list[int], strides: list[int]) -> list[int]:
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in np.ndindex(*sizes)
    ]  # fmt: skip


def test_axes_that_step_alike_become_one() -> None:
    axes = Axes((2, 3, 4), (0, 1, 2), ())
    sizes, outer, merged = merge(axes, [strides_of((2, 3, 4)), (12, 4, 1)])
    assert (sizes, outer, merged) == ([24], 1, [[7], [1]])


def test_broadcast_axes_stay_apart() -> None:
    axes = Axes((2, 3, 4), (0, 1, 2), ())
    sizes, outer, merged = merge(axes, [(12, 4, 1), (4, 0, 1)])
    assert (sizes, outer, merged) == ([2, 3, 4], 3, [[12, 4, 1], [4, 0, 1]])


def test_axes_of_one_vanish() -> None:
    axes = Axes((1, 5, 1, 1), (0, 1, 2, 3), ())
    assert merge(axes, [(99, 3, 99, 99)]) == ([5], 1, [[3]])
    assert merge(Axes((1, 1), (0, 1), ()), [(1, 1), (2, 2)]) == ([], 0, [[], []])
    assert merge(Axes((), (), ()), [()]) == ([], 0, [[]])


def test_groups_do_not_merge_with_outer_axes() -> None:
    axes = Axes((2, 3, 4), (0, 1), (2,))
    sizes, outer, merged = merge(axes, [(12, 4, 1)])
    assert (sizes, outer, merged) == ([6, 4], 1, [[4, 1]])


@pytest.mark.parametrize("seed", range(20))
def test_merged_axes_reach_the_same_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(x) for x in rng.integers(1, 4, size=rng.integers(1, 6)))
    arrays = [
        tuple(int(s) * int(keep) for s, keep in zip(strides_of(shape), rng.integers(0, 2, len(shape)),
                                                    strict=True))
        for _ in range(3)
    ]  # fmt: skip
    sizes, _, merged = merge(Axes(shape, tuple(range(len(shape))), ()), arrays)
    for strides, fewer in zip(arrays, merged, strict=True):
        assert offsets(list(shape), list(strides)) == offsets(sizes, fewer)


def test_more_axes_than_kernels_take() -> None:
    count = MAX_RANK + 1
    shape = (2,) * count
    q = array(*shape, 4, 8)
    # every second axis of k broadcasts, so that no two merge
    k = array(*(1 if i % 2 else 2 for i in range(count)), 4, 8)
    problem = forward_problem(q, k, k)
    with pytest.raises(ValueError, match=rf"{count} axes .* take {MAX_RANK}.*contiguous") as caught:
        forward_plan(problem, H200)
    assert "\n" not in str(caught.value)
    fewer = forward_problem(q[0], k[0], k[0])
    assert_runnable(forward_plan(fewer, H200))
    many = array(*(2,) * 12, 4, 8)  # merge into one
    assert_runnable(forward_plan(forward_problem(many, many, many), H200))


# --- the host's account of a kernel is the kernel's


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("arith", ARITHMETICS)
def test_shared_memory_and_threads_as_the_kernels_have_them(arith: str) -> None:
    specs = {
        spec.name: spec
        for device in (A100, L40, H200, B200)
        for spec in specialisations(device, (arith,), KERNELS, ("identity",))
    }
    assert specs
    lines = []
    for spec in specs.values():
        config = spec.name.partition("<")[2][:-1]
        lines.append(f"static_assert({config}::kSharedBytes == {spec.shared_bytes});")
        lines.append(f"static_assert({config}::kThreads == {spec.threads});")
        if isinstance(spec, SweepSpec):
            lines.append(f"static_assert({config}::kMinBlocks == {spec.resident});")
            lines.append(f"static_assert({config}::kLoaders == {spec.loaders});")
        if isinstance(spec, RingSpec | RingStateSpec):
            lines.append(f"static_assert({config}::kMinBlocks == {spec.resident});")
        if isinstance(spec, StreamSpec):
            lines.append(f"static_assert({config}::kSlots == {spec.slots});")
            lines.append(f"static_assert({config}::kRowSlots == {spec.row_slots});")
    sources = {spec.source for spec in specs.values()}
    runner.build(["la::scan<float>"], ["scan.cu", *sorted(sources)], lines)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_records_as_the_kernels_have_them() -> None:
    lines = [
        f"static_assert(la::kMaxRank == {MAX_RANK} && la::kScanWidth == {SCAN_WIDTH});",
        f"static_assert(la::kScanWidth == {ScanSpec(False).threads});",
        f"static_assert(la::kScanNumbers == {SCAN_NUMBERS});",
        f"static_assert(la::kRelevelRows == {RELEVEL_ROWS});",
        f"static_assert(32 * la::kRelevelRows == {RelevelSpec(False).threads});",
        f"static_assert(la::kStepWidth == {STEP_WIDTH} && la::kStepKeys == {STEP_KEYS});",
        f"static_assert(la::kStepQueries == {STEP_QUERIES});",
    ]
    for double, acc in ((False, "float"), (True, "double")):
        spec, step = StepSpec(double, 100), f"la::Step<{acc}>"
        lines.append(f"static_assert(sizeof({step}::Shared) == {spec.shared_bytes});")
        lines.append(f"static_assert({step}::kColumns == {spec.columns});")
        lines.append(f"static_assert({step}::kVector == {spec.packet});")
    records = {
        "Params": PARAMS,
        "ScanParams": SCAN_PARAMS,
        "RelevelParams": RELEVEL_PARAMS,
        "StepParams": STEP_PARAMS,
    }
    for name, kind in records.items():
        lines.append(f"static_assert(sizeof(la::{name}) == {kind.itemsize});")
        for field, (_, offset, *_) in (kind.fields or {}).items():
            lines.append(f"static_assert(offsetof(la::{name}, {field}) == {offset});")
    fields = STREAM_PARAMS.fields or {}
    lines.append(f"static_assert(sizeof(la::StreamParams) == {STREAM_PARAMS.itemsize});")
    places = {"axes": fields["axes"][1], "of_second": fields["second"][1], "p": fields["p"][1]}
    places |= {name: i * MAP_BYTES for i, name in enumerate(MAPS)}
    for field, offset in places.items():
        lines.append(f"static_assert(offsetof(la::StreamParams, {field}) == {offset});")
    runner.build(["la::scan<float>"], ["scan.cu", "relevel.cu", "step.cu", "sweep.cu"], lines)


# --- addresses


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parameters_filled_again_are_as_new(dtype: str) -> None:
    """Nothing of a call stays behind for the next; maps that are there already are not made anew."""
    x = array(2, 3, 200, 64, dtype=dtype)
    plan = forward_plan(forward_problem(x, x, x, causal=True), H200, True)
    assert any(launch.maps for launch in plan.launches) == (dtype == "bfloat16")
    made = []

    def encode(*arguments: Any) -> bytes:
        made.append(arguments)
        return emulated_map(*arguments)

    rng = np.random.default_rng(0)
    for launch in plan.launches:
        parameters = Parameters(launch)
        names = {name for _, name, _ in launch.pointers}
        for unit in (128, 128, 16) if not launch.maps else (128, 128):
            addresses = {name: unit * int(rng.integers(1 << 30)) for name in names}
            for new in (len(launch.maps), 0):
                made.clear()
                parameters.fill(addresses, encode)
                assert parameters.bytes == filled(launch, addresses)
                assert len(made) == new
