"""The kernels themselves, executed on the host: the library's plans, its .cu files, every thread.

Results and workspaces end at the edge of accessible memory and are full of NaN to begin with, so a
row that is not written and a write behind an array both fail, in every test of this file.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from cases import (
    BY_NAME,
    CASES,
    SMALL,
    Case,
    Inputs,
    check,
    make_inputs,
    name_results,
    reference_results,
)
from emulation import runner
from emulation.backend import H200, Backend
from plans import record, sums
from specialisations import A100, RTX50

from la_cupy.device import DeviceInfo
from la_cupy.kernels import WalkSpec
from la_cupy.plan import Plan
from la_cupy.problem import backward_problem, forward_problem

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

# Room for one block at a time: nothing is gained by cutting a sequence.
ONE_BLOCK = DeviceInfo("one block", 90, 1, 232448, 1)


class Emulation(Backend):
    """Runs plans launch by launch, in memory that is fenced.

    A library for each kernel: cases have kernels in common more often than whole plans.
    """

    def run(self, plan: Plan, buffers: dict[str, Any]) -> None:
        super().run(replace(plan, launches=(), reductions=()), buffers)
        self.plans[-1] = plan
        for name in (*plan.outputs, *plan.workspace):
            buffers[name] = runner.fenced(buffers[name])
        rest = replace(plan, copies=(), outputs={}, workspace={}, reductions=())
        for launch in plan.launches:
            super().run(replace(rest, launches=(launch,)), buffers)
            self.plans.pop()
        self.reduce(plan, buffers)


def run(case: Case, x: Inputs, backend: Backend | None = None, pass_den: bool = True) -> dict:
    """All results of a case."""
    backend = backend or Emulation()
    options = {**case.options, "initial_state": x.initial_state}
    problem = forward_problem(x.q, x.k, x.v, **options)
    out, state, den = backend.forward(problem, x.q, x.k, x.v, x.initial_state, None, True)
    normalizer = den if pass_den else None
    problem = backward_problem(
        x.dout, x.q, x.k, x.v, normalizer=normalizer, dstate=x.dstate, **options
    )
    grads = backend.vjp(problem, x.dout, x.q, x.k, x.v, normalizer, x.initial_state, x.dstate)
    return name_results(out=out, state=state, den=den, grads=grads)


def check_case(case: Case, backend: Backend | None = None, pass_den: bool = True) -> Inputs:
    """Run a case and compare it with the reference; its inputs must come back as they were."""
    x = make_inputs(case)
    before = [array.tobytes() for array in x.arrays()]
    results = run(case, x, backend, pass_den)
    assert [array.tobytes() for array in x.arrays()] == before, "an input was modified"
    expected = reference_results(case, x)
    check(case, x, results, expected)
    return x


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_table(case: Case) -> None:
    check_case(case)


# --- every tiling and every way to cut the sequence


def segments(plan: Plan) -> int:
    """The largest number of segments of a causal walk in the plan."""
    walks = [x for x in plan.launches if getattr(x.spec, "causal", False) and not sums(x.spec)]
    return max(int(record(x)["segments"]) for x in walks)


LONG_CASES = (
    Case(
        "segments-grouped",
        q=(2, 3, 650, 16),
        k=(2, 1, 650, 16),
        v=(2, 1, 650, 24),
        causal=True,
        initial="full",
        dstate="full",
    ),
    Case(
        "segments-N<M",
        q=(1, 900, 16),
        k=(1, 1300, 16),
        v=(1, 1300, 8),
        causal=True,
        dtype="bfloat16",
        dstate="full",
    ),
    Case("segments-N>M", q=(1, 900, 8), k=(1, 600, 8), v=(1, 600, 8), causal=True, initial="full"),
    Case(
        "segments-unnormalised",
        q=(700, 8),
        k=(2, 700, 8),
        v=(2, 700, 8),
        causal=True,
        normalize=False,
        feature_map="silu",
        b=0.3,
    ),
    BY_NAME["length-1031"],
    BY_NAME["length-1031-bfloat16"],
)


@pytest.mark.parametrize("device", [H200, ONE_BLOCK], ids=["segments", "whole"])
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_sequence_in_segments_and_whole(case: Case, device: DeviceInfo) -> None:
    backend = Emulation(device)
    check_case(case, backend)
    for plan in backend.plans:
        assert (segments(plan) > 1) == (device is H200), str(plan)


FAR_FROM_ZERO = [
    pytest.param(case, device, id=f"{case}-{name}")
    for case in CASES
    if case.data in ("offset", "mean16") and not case.small
    for name, device in (("segments", H200), ("portable", A100), ("whole", ONE_BLOCK))
    if name == "segments" or (case.causal if name == "whole" else case.dtype == "bfloat16")
]


@pytest.mark.parametrize("case,device", FAR_FROM_ZERO)
def test_values_far_from_zero(case: Case, device: DeviceInfo) -> None:
    check_case(case, Emulation(device))


def test_sum_of_everything_in_pieces() -> None:
    case = BY_NAME["ragged-both"]
    backend = Emulation(H200)
    check_case(replace(case, causal=False), backend)
    for plan in backend.plans:
        made = [record(x) for x in plan.launches if sums(x.spec)]
        assert max(int(p["segments"]) for p in made) > 1


@pytest.mark.parametrize(
    "dtype,blocks,n,segments", [("float32", 2, 640, 5), ("bfloat16", 4, 1230, 2)]
)
def test_segments_summed_in_pieces(dtype: str, blocks: int, n: int, segments: int) -> None:
    """Where there are few segments, in both directions."""
    shape = (2, n, 16)
    case = Case("few segments", q=shape, k=shape, v=shape, dtype=dtype, causal=True)
    backend = Emulation(DeviceInfo("few blocks", 90, blocks, 232448, 233472))
    check_case(case, backend)
    walks = {
        launch.spec.role: record(launch)
        for launch in backend.plans[-1].launches
        if isinstance(launch.spec, WalkSpec) and not sums(launch.spec)
    }
    assert len(walks) == (2 if dtype == "bfloat16" else 3)
    assert all((p["segments"], p["pieces"]) == (segments, 2) for p in walks.values())


@pytest.mark.parametrize("device", [A100, RTX50], ids=lambda device: device.name)
@pytest.mark.parametrize(
    "name",
    [
        "causal-float64-state",
        "causal-grouped-float32",
        "length-193-bfloat16",
        "length-193",
        "wide-128x256-float32",
        "wide-256x256-float32",
        "wide-256x160-bfloat16",
        "wide-32x256-bfloat16",
    ],
)
def test_less_shared_memory(name: str, device: DeviceInfo) -> None:
    check_case(BY_NAME[name], Emulation(device))


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("d,e", [(130, 20), (20, 130), (200, 200), (256, 256)])
def test_float64_wider_than_a_block(d: int, e: int, causal: bool) -> None:
    """Columns of a result are split over blocks, and the sums over a row taken first."""
    shapes = {"q": (20, d), "k": (20, d), "v": (20, e)}
    check_case(
        Case("wide", **shapes, causal=causal, dtype="float64", initial="full", dstate="full")
    )


# --- what a caller may leave out or bring along


@pytest.mark.parametrize(
    "name", ["causal-float32-state", "bfloat16-state", "causal-k-v-on-different-axes", "N>M"]
)
def test_normalizer_is_made_again_if_not_passed(name: str) -> None:
    check_case(BY_NAME[name], pass_den=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("view", ["wider", "unaligned", "swapped", "reversed", "transposed"])
def test_out_of_the_caller(dtype: str, view: str) -> None:
    case = Case("out", q=(2, 3, 20, 16), k=(2, 3, 20, 16), v=(2, 3, 20, 12), dtype=dtype)
    x = make_inputs(case)
    expected = run(case, x)["out"]
    whole = np.full((2, 3, 20, 40), 7, expected.dtype)
    out = {
        "wider": whole[..., 8:20],
        "unaligned": whole[..., 3:15],
        "swapped": np.full((2, 20, 3, 12), 7, expected.dtype).swapaxes(1, 2),
        "reversed": whole[::-1, :, ::-1, :12],
        "transposed": np.full((2, 3, 12, 20), 7, expected.dtype).swapaxes(2, 3),
    }[view]
    problem = forward_problem(x.q, x.k, x.v, out=out, **case.options)
    returned, _, _ = Emulation().forward(problem, x.q, x.k, x.v, None, out, False)
    assert returned.tobytes() == out.tobytes()
    if (dtype, view) == ("bfloat16", "unaligned"):  # made by another kernel, see Launch.instead
        check(case, x, {"out": out}, reference_results(case, x), names=["out"])
    else:
        assert out.tobytes() == expected.tobytes()
    assert (whole == 7).sum() in (whole.size, whole.size - out.size), "wrote beside out"


# --- races, over-reads, repeatability

RACY = (
    "causal-float32-state",
    "causal-bfloat16-state",
    "float16-state",
    "causal-float64-state",
    "causal-grouped-bfloat16",
    "causal-grouped-float32",
    "causal-N>M-state",
    "width-72-bfloat16",
    "wide-256x160-bfloat16",
    "length-129",
)


@pytest.mark.parametrize("name", RACY)
def test_order_of_the_threads_does_not_matter(name: str) -> None:
    """It would where a barrier is missing; and a second run gives the same bits again."""
    case = BY_NAME[name]
    x = make_inputs(case)
    expected = run(case, x)
    assert_same(run(case, x), expected)
    assert_same(run(case, x, Emulation(order="reverse")), expected)


@pytest.mark.parametrize("side", ["behind", "before"])
@pytest.mark.parametrize(
    "name",
    [
        "causal-float32-state",
        "causal-bfloat16-state",
        "float64-state",
        "causal-N<M",
        "causal-N>M-state",
        "width-3-float32",
        "width-3-bfloat16",
        "width-20-float32",
        "width-40-bfloat16",
        "width-72-bfloat16",
        "widths-40x1-float32",
        "widths-1x40-bfloat16",
        "length-65",
        "length-17-bfloat16",
        "causal-q-bfloat16-k-float16",
        "k-broadcast",
    ],
)
def test_reads_stay_inside_the_inputs(name: str, side: Literal["before", "behind"]) -> None:
    case = BY_NAME[name]
    x = make_inputs(case)
    assert_same(run(case, x.map(lambda array: runner.fenced(array, side))), run(case, x))


# --- the tests above would notice


def mutation(file: str, pattern: str, new: str) -> dict[str, list[tuple[str, str]]]:
    """For `replace`: what `pattern` finds first in a file of kernels_cu becomes `new`."""
    found = re.search(pattern, (runner.KERNELS / file).read_text())
    if found is None:
        raise ValueError(f"{file} has no {pattern!r} any more: break its successor instead")
    return {file: [(found[0], found.expand(new))]}


FAULTS = {  # the case that notices, the file, what is replaced, by what
    "no causal mask": (
        "causal-float32-state",
        ("chunk/weights.cuh", r".*// the causal mask\n", ""),
    ),
    "no causal mask in a step": (
        "step-N<M",
        ("step.cu", r"at \+ p\.query_shift \+ 1", "p.m"),
    ),
    "state never updated": (
        "length-129",
        ("chunk/products.cuh", r"(x = ptx::fma\()scale(, sum)", r"\1Acc(0)\2"),
    ),
    "padding counts as keys": (
        "float32-state",
        ("chunk/gather.cuh", r" && rows\.holds\(row\)", ""),
    ),
    "initial state not relative to the level": (
        "causal-offset-float32-1031-initial",
        ("scan.cu", r"p\.v\.data == 0 \|\| of == 0", "true"),
    ),
    "its gradient relative to the level": (
        "offset-float32-state",
        ("relevel.cu", r"Acc\(p\.sign\) \* sum", "(p.sign > 0 ? sum : Acc(0))"),
    ),
    "pieces in the wrong order": (
        "length-1031",
        ("scan.cu", r"p\.reversed \? p\.pieces - 1 - s : s", "s"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str) -> None:
    name, change = FAULTS[fault]
    with pytest.raises(AssertionError, match="error"):
        check_case(BY_NAME[name], Emulation(replace=mutation(*change)))


BARRIER = re.compile(r"sync_(block|named)\([^;]*\);")


def barriers() -> list[tuple[str, int]]:
    """Every barrier of the kernels: a file, and which of the barriers there."""
    found = []
    folders = [path for name in ("chunk", "ring") for path in runner.KERNELS.glob(f"{name}/*.cuh")]
    for path in sorted([*folders, runner.KERNELS / "step.cu"]):
        name = path.relative_to(runner.KERNELS).as_posix()
        found += [(name, i) for i, _ in enumerate(BARRIER.finditer(path.read_text()))]
    return found


@pytest.mark.parametrize("file,index", barriers())
def test_a_missing_barrier_is_noticed(file: str, index: int) -> None:
    """Not in each order of the threads, but by comparing two; so each barrier is also needed."""
    text = (runner.KERNELS / file).read_text()
    barrier = list(BARRIER.finditer(text))[index]
    changes = {file: [(text, f"{text[: barrier.start()]};{text[barrier.end() :]}")]}
    cases = (
        *("length-129", "causal-grouped-bfloat16", "float32-state"),
        "causal-float64-state",  # alone meets at kDone
        "causal-grouped-float32",  # alone has three turns in `ring_sums`
        "causal-q-bfloat16-k-float16",  # alone has a pre-pass in TF32 that is not `ring_sums`
        "elu1-bfloat16",  # alone takes products of rows with sums, where not causal
        "step-grouped-5",
    )
    for name in cases:
        x = make_inputs(BY_NAME[name])
        backends = [Emulation(replace=changes, order=order) for order in ("forward", "reverse")]
        try:
            forward, reverse = (run(BY_NAME[name], x, backend) for backend in backends)
        except RuntimeError as error:  # barriers that do not match, or an address not yet written
            assert "g++" not in str(error), error
            return
        if any(forward[result].tobytes() != reverse[result].tobytes() for result in forward):
            return
        if any(np.isnan(x).any() for x in forward.values()):  # of shared memory not yet written
            return
    pytest.fail(f"{barrier[0]} number {index} of {file} makes no difference")
