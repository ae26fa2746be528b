"""Each step by which warps of `stream` and `stream_key_value` wait for each other is needed.

Every statement that waits, arrives, fences or synchronises is left out in turn: a fault of the
emulated machine, or a result that changes in one of the orders, must tell. Nothing is compiled for
that: one build has a switch at each step.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from cases import Case, make_inputs
from emulation import runner
from emulation.backend import H200, filled
from plans import sums
from test_kernels_emulated import Emulation
from test_stream import ONE_BLOCK, SIZES, a_case, far_apart, scaled

from la_cupy.device import DeviceInfo
from la_cupy.kernels import StreamedSpec
from la_cupy.params import PARAMS, STREAM_PARAMS
from la_cupy.plan import Plan
from la_cupy.problem import backward_problem, forward_problem
from la_cupy.records import Launch

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

STEP = re.compile(
    r"(?<![\w>=] )"  # neither defined here, nor asked for a value
    r"\b(?:Pipe::|Base::|tma_|wgmma_|mbarrier_)?(?:wait|arrive|fence|sync|commit)\w*\([^;{]*\);"
)
SOURCES = ("stream.cu", "stream_key_value.cu")
FILES = sorted((runner.KERNELS / "stream").glob("*.cuh"))


@dataclass(frozen=True)
class Step:
    """A statement of a file of kernels_cu/stream: the `occurrence`-th of this text there."""

    file: str
    text: str
    occurrence: int = 0

    def __str__(self) -> str:
        return f"{self.file}: {self.text}" + (
            f" ({self.occurrence + 1})" if self.occurrence else ""
        )


_ONE_BEHIND_THE_OTHER = "lanes of a warp run one behind the other, up to where they meet anyway"
_FENCED_AGAIN = "who writes other lines of the same tiles fences these too"
UNSEEN = {
    Step("pipe.cuh", "fence_async()"): _FENCED_AGAIN,
    Step("kv_pipe.cuh", "fence_async()"): "barriers are seen at once by all that use them",
    Step("kv_score.cuh", "sync_warp()"): _ONE_BEHIND_THE_OTHER,
    Step("kv_state.cuh", "sync_warp()"): _ONE_BEHIND_THE_OTHER,
    Step("kv_supply.cuh", "sync_warp()"): _ONE_BEHIND_THE_OTHER,
    Step("kv_length.cuh", "sync_warp()"): _ONE_BEHIND_THE_OTHER,
    Step("kv_length.cuh", "sync_warp()", 1): _ONE_BEHIND_THE_OTHER,
    Step("centre.cuh", "sync_warp()"): _ONE_BEHIND_THE_OTHER,
    Step("centre.cuh", "sync_warp()", 1): _ONE_BEHIND_THE_OTHER,
    Step("centre.cuh", "sync_warp()", 2): _ONE_BEHIND_THE_OTHER,
    Step("centre.cuh", "sync_warp()", 3): _ONE_BEHIND_THE_OTHER,
    Step("state.cuh", "sync_warp()"): _ONE_BEHIND_THE_OTHER,
    Step("state.cuh", "sync_warp()", 1): _ONE_BEHIND_THE_OTHER,
    Step("supply.cuh", "sync_warp()"): _ONE_BEHIND_THE_OTHER,
    Step("supply.cuh", "sync_warp()", 1): _ONE_BEHIND_THE_OTHER,
    Step(
        "state.cuh", "Pipe::wait(Pipe::kRowsFull, now.rows)"
    ): "rows come with the sources, which are made ready first",
    Step("state.cuh", "wgmma_commit()", 1): "the next group takes its products in",
    Step("kv_score.cuh", "Pipe::wait(Pipe::kReady, now.slot)"): "rows are measured later still",
    Step("kv_state.cuh", "Pipe::wait(Pipe::kReady, now.slot)"): "weights are made later still",
    Step(
        "kv_state.cuh", "Pipe::wait(Pipe::kRowsFull, now.rows)"
    ): "the suppliers have waited for it",
    Step("kv_state.cuh", "wgmma_commit()"): "the next group takes its products in",
    Step("kv_state.cuh", "wgmma_fence()", 1): "that of the products before is enough",
    Step("supply.cuh", "sync()", 1): "no thread gives way between reading a row and writing it",
}
"""Steps that the hardware needs, or may need, and why the emulation cannot see that they are missing."""


@cache
def steps() -> tuple[Step, ...]:
    """Every step, in the order in which `switched` numbers them."""
    found = []
    for path in FILES:
        seen: dict[str, int] = {}
        for match in STEP.finditer(path.read_text()):
            text = match[0][:-1]
            found.append(Step(path.name, text, seen.setdefault(text, 0)))
            seen[text] += 1
    return tuple(found)


@cache
def switched() -> dict[str, Any]:
    """For `replace`: steps happen unless `la_missing_step` is their number."""
    numbers = iter(range(len(steps())))
    changes = {}
    for path in FILES:
        text = path.read_text()
        new = STEP.sub(
            lambda match: f"{{ if (la_missing_step != {next(numbers)}) {match[0]} }}", text
        )
        if path.name == "config.cuh":
            variable = '__attribute__((visibility("default"), used)) int la_missing_step = -1;'
            new = new.replace("namespace la {", f'extern "C" inline {variable}\nnamespace la {{', 1)
        changes[f"stream/{path.name}"] = [(text, new)]
    return changes


@cache
def included(source: str) -> frozenset[str]:
    """A file of kernels_cu and all that it includes."""
    found = re.findall(r'#include "(?!ptx/)(.*)"', (runner.KERNELS / source).read_text())
    return frozenset({source}).union(*(included(name) for name in found))


class Recorder(Emulation):
    """Keeps what the launches have read and written."""

    def run(self, plan: Plan, buffers: dict[str, Any]) -> None:
        super().run(plan, buffers)
        self.buffers = buffers


class Watched:
    """One launch on `stream` or `stream_key_value`, all that it may read, and what it makes of it."""

    def __init__(self, launch: Launch, buffers: dict[str, Any]) -> None:
        self.launch, self.buffers = launch, buffers
        self.expected = self.run()

    def written(self) -> Iterator[str]:
        """The buffers of the results."""
        role, fields = self.launch.spec.role, STREAM_PARAMS.fields or {}
        results = {"dst", "final"} | {"Forward": {"den"}, "GradQ": {"delta"}}.get(role, set())
        for at, name, _ in self.launch.pointers:
            inside = [
                x
                for x, (_, begin, *_) in (PARAMS.fields or {}).items()
                if begin + fields["p"][1] <= at
            ]
            if at == fields["second"][1] or (at >= fields["p"][1] and inside[-1] in results):
                yield name

    def run(self, missing: int = -1, order: str = "forward") -> dict[str, bytes]:
        """The bytes of the results, without the step of the number `missing`."""
        spec, buffers = self.launch.spec, dict(self.buffers)
        names = list(self.written())
        for name in names:
            empty = np.empty_like(buffers[name])
            empty.reshape(-1).view(np.uint8).fill(0xFF)
            buffers[name] = runner.fenced(empty)
        addresses = {name: buffers[name].ctypes.data for _, name, _ in self.launch.pointers}
        record = filled(self.launch, addresses)
        library = runner.build([spec.name], includes=[spec.source], replace=switched())
        with left_out(library, missing):
            library.launch(
                spec.name, self.launch.grid, spec.threads, spec.shared_bytes, record, order=order
            )
        return {name: buffers[name].tobytes() for name in names}

    def notices(self, missing: int, order: str) -> bool:
        """Whether a result changes, or the machine stops, without the step."""
        try:
            return self.run(missing, order) != self.expected
        except RuntimeError:
            return True


@contextmanager
def left_out(library: runner.Library, step: int) -> Iterator[None]:
    variable = ctypes.c_int.in_dll(library._dll, "la_missing_step")
    variable.value = step
    try:
        yield
    finally:
        variable.value = -1


CASES: dict[str, tuple[Case, DeviceInfo]] = {
    "causal": (a_case(170, 200, lead=(5,), initial="full", causal=True), ONE_BLOCK),
    "not causal": (a_case(170, lead=(5,), initial="full"), ONE_BLOCK),
    "features": (a_case(100, lead=(5,), causal=True, b=0.0, feature_map="relu"), ONE_BLOCK),
    "far from zero": (
        a_case(230, 200, lead=(5,), initial="full", dstate="full", causal=True, data="mean16"),
        ONE_BLOCK,
    ),
    "sizes": (a_case(100, 70, lead=(5,), initial="full", causal=True, b=0.0), ONE_BLOCK),
    "levels": (a_case(70, d=64, e=64, lead=(5,), causal=True, data="mean16"), ONE_BLOCK),
    "wide": (a_case(170, d=128, e=128, lead=(5,), causal=True), ONE_BLOCK),
    "segments": (a_case(2500, lead=(1,), causal=True, data="biased"), H200),
}
"""One of which must tell."""


@cache
def watched(name: str) -> tuple[Watched, ...]:
    """The launches of a case, forward and backward."""
    case, device = CASES[name]
    x = scaled(case, SIZES["mixed"]) if name == "sizes" else make_inputs(case)
    x = far_apart(x) if name == "levels" else x
    options = {**case.options, "initial_state": x.initial_state}
    forward, backward = Recorder(device), Recorder(device)
    problem = forward_problem(x.q, x.k, x.v, **options)
    _, _, den = forward.forward(problem, x.q, x.k, x.v, x.initial_state, None, True)
    problem = backward_problem(x.dout, x.q, x.k, x.v, normalizer=den, dstate=x.dstate, **options)
    backward.vjp(problem, x.dout, x.q, x.k, x.v, den, x.initial_state, x.dstate)
    return tuple(
        Watched(launch, emulation.buffers)
        for emulation in (forward, backward)
        for launch in emulation.plans[-1].launches
        if isinstance(launch.spec, StreamedSpec)
    )


@pytest.mark.parametrize("name", CASES)
def test_orders_make_no_difference_where_no_step_is_missing(name: str) -> None:
    for one in watched(name):
        assert one.expected
        for order in runner.ORDERS:
            assert one.run(order=order) == one.expected, f"{one.launch.spec.name}, {order}"
        for result in (
            () if sums(one.launch.spec) else one.written()
        ):  # sums are then scanned in place
            assert one.expected[result] == one.buffers[result].tobytes(), result


def test_every_kernel_is_watched() -> None:
    roles = {(x.launch.spec.role, x.launch.spec.causal) for name in CASES for x in watched(name)}
    walks = {(x, causal) for x in ("Forward", "GradQ", "GradKV") for causal in (False, True)}
    assert roles == walks | {("Keys", True), ("Queries", True)}


def test_every_step_is_one_of_a_kernel() -> None:
    assert set(UNSEEN) <= set(steps()), "UNSEEN has steps that there are no more"
    for step in steps():
        assert any(f"stream/{step.file}" in included(source) for source in SOURCES), step


@pytest.mark.parametrize("step", [step for step in steps() if step not in UNSEEN], ids=str)
def test_a_missing_step_is_noticed(step: Step) -> None:
    """In one of the orders: by a fault of the machine, or by a result that changes."""
    number = steps().index(step)
    for name, order in product(CASES, runner.ORDERS):
        for one in watched(name):
            concerned = f"stream/{step.file}" in included(one.launch.spec.source)
            if concerned and one.notices(number, order):
                return
    pytest.fail(f"{step}: makes no difference")
