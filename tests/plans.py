"""Plans of invented problems, and what must hold for every plan."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case, make_inputs
from specialisations import register_limit

from la_cupy.device import DeviceInfo
from la_cupy.dtypes import ITEMSIZE
from la_cupy.kernels import (
    KEYS,
    QUERIES,
    KernelSpec,
    KeyValueSpec,
    NoKernelError,
    RelevelSpec,
    ScanSpec,
    Spec,
    StateSpec,
    StepSpec,
    StreamedSpec,
    WalkSpec,
    resident_blocks,
)
from la_cupy.params import (
    PARAMS,
    RELEVEL_PARAMS,
    RELEVEL_ROWS,
    SCAN_NUMBERS,
    SCAN_PARAMS,
    SCAN_WIDTH,
    STEP_KEYS,
    STEP_PARAMS,
    STREAM_PARAMS,
)
from la_cupy.plan import Plan, backward_plan, forward_plan
from la_cupy.problem import Problem, backward_problem, forward_problem
from la_cupy.records import Launch

GRID_LIMIT = 2**31 - 1


def array(*shape: int, dtype: str = "bfloat16") -> Any:
    """A contiguous array as a plan sees it: shape and strides; of memory it has one element."""
    kind = DTYPES[dtype]
    strides = [kind.itemsize * prod(shape[i + 1 :]) for i in range(len(shape))]
    one = np.zeros(1, kind)
    return np.lib.stride_tricks.as_strided(one, shape, strides, writeable=False)


def problems(
    lead: tuple[int, ...] = (2,),
    n: int = 100,
    m: int | None = None,
    d: int = 64,
    e: int | None = None,
    *,
    dtype: str = "bfloat16",
    kv_lead: tuple[int, ...] | None = None,
    **options: Any,
) -> tuple[Problem, Problem]:
    """Forward and backward."""
    kv_lead = lead if kv_lead is None else kv_lead
    m, e = n if m is None else m, d if e is None else e
    q, dout = array(*lead, n, d, dtype=dtype), array(*lead, n, e, dtype=dtype)
    k, v = array(*kv_lead, m, d, dtype=dtype), array(*kv_lead, m, e, dtype=dtype)
    return forward_problem(q, k, v, **options), backward_problem(dout, q, k, v, **options)


def lacks_plan(problem: Problem, device: DeviceInfo) -> bool:
    """What has no kernel: causal float64, wide, on a device whose blocks have 99 KiB of shared memory.

    The forward walk has D inner columns; the backward walks have D (dv) or E (dq, dk). A few positions
    behind a state need no walk.
    """
    few = problem.initial_state is not None and 1 <= min(problem.n, problem.m)
    if problem.dout is None and few and max(problem.n, problem.m) <= STEP_KEYS:
        return False
    inner = problem.d if problem.dout is None else max(problem.d, problem.e)
    masked = problem.options.causal and prod(problem.lead) > 0
    little = device.shared_per_block == 101376
    return masked and problem.compute == "float64" and inner > 128 and little


def planned(
    make: Callable[..., Plan], problem: Problem, device: DeviceInfo, flag: bool = False
) -> list[Plan]:
    """The plan of a problem; none if it lacks one, which must be exactly the set of `lacks_plan`."""
    if not lacks_plan(problem, device):
        return [make(problem, device, flag)]
    with pytest.raises(NoKernelError) as caught:
        make(problem, device, flag)
    assert_explains(caught.value, problem.d, problem.e, device)
    return []


def assert_explains(error: NoKernelError, d: int, e: int, device: DeviceInfo) -> None:
    """One sentence: what arrived, what the device has, what to do instead."""
    message = str(error)
    assert isinstance(error, ValueError) and "\n" not in message and ". " not in message
    for part in (
        "float64",
        f"D = {d} ",
        f"E = {e} ",
        str(device.shared_per_block),
        f"sm_{device.arch}",
        "float32",
        "up to 128",
    ):
        assert part in message, message


def plans(device: DeviceInfo, *shape: Any, want_state: bool = True, **options: Any) -> list[Plan]:
    """Forward; backward with den passed and without."""
    forward, backward = problems(*shape, **options)
    return [
        *planned(forward_plan, forward, device, want_state),
        *planned(backward_plan, backward, device, True),
        *planned(backward_plan, backward, device),
    ]


def case_plans(case: Case, device: DeviceInfo) -> list[Plan]:
    x = make_inputs(case)
    options = {**case.options, "initial_state": x.initial_state}
    forward = forward_problem(x.q, x.k, x.v, **options)
    backward = backward_problem(x.dout, x.q, x.k, x.v, dstate=x.dstate, **options)
    return [
        *planned(forward_plan, forward, device, True),
        *planned(backward_plan, backward, device, True),
        *planned(backward_plan, backward, device),
    ]


def record(launch: Launch) -> Any:
    """The parameters of a launch; of `stream` and `step` those that every walk has."""
    if isinstance(launch.spec, StreamedSpec):
        return np.frombuffer(launch.record, STREAM_PARAMS)[0]["p"]
    if isinstance(launch.spec, StepSpec):
        return np.frombuffer(launch.record, STEP_PARAMS)[0]["p"]
    kinds = {ScanSpec: SCAN_PARAMS, RelevelSpec: RELEVEL_PARAMS}
    return np.frombuffer(launch.record, kinds.get(type(launch.spec), PARAMS))[0]


def all_launches(plan: Plan) -> list[Launch]:
    """With those that run where an array is not aligned."""
    return [x for launch in plan.launches for x in (launch, *launch.instead)]


def sums(spec: Spec) -> bool:
    """Whether it only sums over a piece of the sequence: `accumulate`, or another in that role."""
    return isinstance(spec, StateSpec) or getattr(spec, "role", None) in (KEYS, QUERIES)


# --- what holds for every plan


def assert_runnable(plan: Plan) -> None:
    """Each launch fits the device, and its blocks cover all there is, once."""
    made = {*plan.outputs, *plan.workspace, *plan.copies}
    given = {"q", "k", "v", "dout", "den", "out"}
    for launch in all_launches(plan):
        spec, p = launch.spec, record(launch)
        assert 0 < launch.grid <= GRID_LIMIT, f"{spec.name}: {launch.grid} blocks"
        assert_fits(spec, plan.device)
        names = {name for _, name, _ in launch.pointers}
        strange = {
            x for x in names - made - given if not x.startswith(("initial_state.", "dstate."))
        }
        assert not strange, f"{spec.name} uses {strange}, which nobody makes"
        walks = isinstance(spec, KernelSpec | StepSpec)
        heads = prod(p["size"][: p["outer"] if walks else p["rank"]].tolist())
        if isinstance(spec, ScanSpec):
            of_block = SCAN_WIDTH * SCAN_NUMBERS
            blocks, of_kv = launch.grid / heads - 1, int(p["d"]) * int(p["e"])
            assert (blocks - 1) * of_block < of_kv <= blocks * of_block
            for name in names & {"keys", "queries"}:
                item = ITEMSIZE[plan.workspace[name].dtype]
                last = max(shift for _, of, shift in launch.pointers if of == name)
                room = prod(plan.workspace[name].shape) * item
                assert last + heads * int(p["pieces"]) * item <= room, f"{name} has no room"
        elif isinstance(spec, RelevelSpec):
            assert spec.threads == 32 * RELEVEL_ROWS
            assert launch.grid == heads * -(-(int(p["d"]) + 1) // RELEVEL_ROWS)
        elif isinstance(spec, StepSpec):
            assert spec.threads >= plan.problem.d and int(p["segments"]) == 1
            assert max(plan.problem.n, plan.problem.m) <= STEP_KEYS
            assert launch.grid == heads * int(p["splits"])
            assert_covers_columns(plan.problem, spec, p)
        else:
            parts = heads * int(p["segments"]) * int(p["splits"])
            if isinstance(spec, StreamedSpec):  # whose blocks go on from part to part
                parts = min(parts, resident_blocks(spec, plan.device))
                assert_has_maps(launch)
            assert launch.grid == parts
            assert_covers_columns(plan.problem, spec, p)
            assert_covers_rows(plan, spec, p)
            if getattr(spec, "causal", False):
                start = PARAMS.fields["start"][1]
                start += STREAM_PARAMS.fields["p"][1] if isinstance(spec, StreamedSpec) else 0
                begins = {name for at, name, _ in launch.pointers if at == start}
                assert not begins & {*plan.outputs}, (
                    f"{spec.name} begins with the sum of everything"
                )


def assert_has_maps(launch: Launch) -> None:
    """Of all that `stream` reads; and what runs without them makes the same of the same arrays."""
    spec = launch.spec
    mapped = {name for _, name, _ in launch.maps}
    assert mapped <= {name for _, name, _ in launch.pointers}
    queries, keys = {"q"} if spec.role == "Forward" else {"q", "dout"}, {"k", "v"}
    read = keys if spec.role in (KEYS, "GradKV") else queries
    if spec.causal and not sums(spec):
        read = queries | keys
    results = {"out", *(x for name in ("dq", "dk", "dv") for x in (name, f"{name}.heads"))}
    assert mapped - results == read
    both = isinstance(spec, KeyValueSpec) and not sums(spec)
    roles = ("GradK", "GradV") if both else (spec.role,)
    p = record(launch)
    scans = [x for x in launch.instead if isinstance(x.spec, ScanSpec)]
    assert len(scans) == p["adds"] and [*launch.instead[: len(scans)]] == scans
    if scans:  # of the slots that the walk adds up
        assert record(scans[0])["pieces"] == p["segments"] * p["pieces"]
        assert record(scans[0])["summed"] == (p["segments"] - 1) * p["pieces"]
    instead = launch.instead[len(scans) :]
    for other, role in zip(instead, roles, strict=True):
        assert not other.maps and not other.instead
        assert other.spec.source == ("accumulate.cu" if sums(spec) else "sweep.cu")
        assert other.spec.feature == spec.feature
        assert sums(spec) or (other.spec.role, other.spec.causal) == (role, spec.causal)
    shift, second = (STREAM_PARAMS.fields[name][1] for name in ("p", "second"))
    dst = PARAMS.fields["dst"][1]
    made = {(at - shift, *rest) for at, *rest in launch.pointers if at != second}
    assert made == {*instead[0].pointers}
    if both:
        assert results & mapped == {name for at, name, _ in launch.pointers if at == second} | {
            name for at, name, _ in made if at == dst
        }, "both results have maps"
        made = {(at, *rest) for at, *rest in made if at != dst}
        made |= {(dst, *rest) for at, *rest in launch.pointers if at == second}
        if not spec.causal:
            made = {x for x in made if x[0] != PARAMS.fields["v"][1]}  # dv does not need v
        assert made == {*instead[1].pointers}


def assert_fits(spec: Spec, device: DeviceInfo) -> None:
    assert spec.shared_bytes <= device.shared_per_block, f"{spec.name} on {device}"
    assert spec.threads % 32 == 0 and 32 <= spec.threads <= 1024, spec.name
    if isinstance(spec, KernelSpec):
        others = getattr(spec, "loaders", 0)
        if isinstance(spec, StreamedSpec):
            others = 12 if sums(spec) or spec.has_scores else 8
        assert spec.workers >= 1 and spec.threads == 32 * (spec.workers + others), spec.name
        # Those of `stream` are shared out anew when it has begun.
        least = 96 if isinstance(spec, StreamedSpec) else 128
        assert spec.resident >= 1 and register_limit(spec) >= least, spec.name


def width_of_result(problem: Problem, spec: WalkSpec | StateSpec | StepSpec) -> int:
    over_d = isinstance(spec, WalkSpec) and spec.role in ("GradQ", "GradK")
    return problem.d if over_d else problem.e


def assert_covers_columns(problem: Problem, spec: WalkSpec | StateSpec | StepSpec, p: Any) -> None:
    """The splits are blocks of the result's columns; in the pre-pass, times blocks of kv's rows."""
    width, splits, row_blocks = width_of_result(problem, spec), int(p["splits"]), 1
    if isinstance(spec, KeyValueSpec):  # both results, of one padded width
        assert splits == 1 and spec.inner == spec.columns >= max(problem.d, problem.e), spec.name
    if isinstance(spec, StateSpec):
        assert spec.row >= problem.d, f"{spec.name}: features of D = {problem.d} need whole rows"
        assert spec.inner <= 128 and spec.row % spec.inner == 0, spec.name
        row_blocks = next(i for i in range(1, problem.d + 2) if i * spec.inner >= problem.d)
    elif not isinstance(spec, StepSpec):
        inner = problem.d + problem.e - width
        assert spec.inner >= inner, f"{spec.name}: {inner} inner columns"
    assert splits % row_blocks == 0, f"{spec.name}: {splits} splits for D = {problem.d}"
    blocks = splits // row_blocks
    assert (blocks - 1) * spec.columns < width <= blocks * spec.columns, (
        f"{spec.name}: {blocks} blocks of {spec.columns} columns for {width}"
    )


def span(plan: Plan, p: Any, chunk: int, queries: bool, segment: int) -> tuple[int, int]:
    """[begin, end) of the rows that the blocks of one segment treat, as chunk/block.cuh has it."""
    each, chunks = int(p["chunks_per_segment"]), int(p["chunks"])
    first, last = segment * each, min(chunks, (segment + 1) * each)
    assert first < last or chunks == 0, "a segment without chunks"
    shift = int(p["query_shift"]) if queries else 0
    rows = plan.problem.n if queries else plan.problem.m
    begin, end = (int(p["origin"]) + x * chunk - shift for x in (first, last))
    return max(0, min(begin, rows)), max(0, min(end, rows))


def assert_covers_rows(plan: Plan, spec: WalkSpec | StateSpec, p: Any) -> None:
    """Segment after segment, with no row between two of them and none in both."""
    problem = plan.problem
    if sums(spec):
        queries = (getattr(spec, "reversed", False),)  # the piece that nobody reads may be left out
    else:
        rows = spec.role in ("Forward", "GradQ")
        queries = (False, True) if spec.causal else (rows,)
    for is_query in queries:
        spans = [span(plan, p, spec.chunk, is_query, i) for i in range(int(p["segments"]))]
        for (_, end), (begin, _) in pairwise(spans):
            assert begin == end, f"{spec.name}: {spans}"
        if not sums(spec):
            whole = (0, problem.n if is_query else problem.m)
            assert (spans[0][0], spans[-1][1]) == whole, f"{spec.name}: {spans} of {whole}"
