"""Plans for GPUs that are not here: every shape has one, it fits, and it covers every row once."""

from __future__ import annotations

import pickle
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from cases import CASES, DTYPES
from plans import (
    all_launches,
    array,
    assert_explains,
    assert_fits,
    assert_runnable,
    case_plans,
    plans,
    problems,
    record,
    span,
    sums,
)
from specialisations import (
    A100,
    ARITHMETICS,
    DEVICES,
    H200,
    KERNELS,
    RTX50,
    lacks_kernel,
    matrix_spec,
    widths,
)

from la_cupy import dtypes
from la_cupy.device import DeviceInfo
from la_cupy.kernels import (
    STREAM,
    WGMMA,
    NoKernelError,
    RingSpec,
    RingStateSpec,
    ScanSpec,
    StateSpec,
    StreamSpec,
    SweepSpec,
    WalkSpec,
    padded,
)
from la_cupy.plan import Plan, backward_plan
from la_cupy.results import State

on_every_device = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)


# --- every shape has a plan


@on_every_device
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda x: f"{x[0]}-causal" if x[1] else x[0])
@pytest.mark.parametrize("arith", ARITHMETICS)
def test_every_width_has_a_kernel(arith: str, kernel: tuple[str, bool], device: DeviceInfo) -> None:
    some = [*range(1, 257, 15), *(1 << i for i in range(9)), *((1 << i) + 1 for i in range(8))]
    for d, e in product(sorted({*some, 255}), repeat=2):
        if lacks_kernel(kernel, arith, d, e, device):
            with pytest.raises(NoKernelError) as caught:
                matrix_spec(kernel, arith, "identity", d, e, device)
            assert_explains(caught.value, d, e, device)
            continue
        spec = matrix_spec(kernel, arith, "identity", d, e, device)
        assert_fits(spec, device)
        inner, width = (e, d) if kernel[0] in ("GradQ", "GradK") else (d, e)
        if isinstance(spec, StateSpec):  # a block holds some of kv's rows, but reads whole rows
            assert spec.row >= d and spec.inner == min(128, spec.row)
            assert spec.row * spec.element % 128 == 0, "tiles have whole 128-byte lines"
        else:
            assert spec.inner >= inner
        assert spec.columns % 8 == 0 and spec.chunk % 16 == 0
        for columns in (spec.inner, spec.columns):
            assert columns * spec.element % 128 == 0, "tiles have whole 128-byte lines"
        if isinstance(spec, SweepSpec) and spec.through_features:
            assert spec.row >= width, "features need whole rows"


@on_every_device
@pytest.mark.parametrize("feature_map", ["elu1", "relu", "silu", "exp"])
def test_feature_map_changes_the_name_only(feature_map: str, device: DeviceInfo) -> None:
    """But that `stream` has none with exponentials, and one walk for dk and dv only for identity."""
    for kernel, arith, mapped in product(KERNELS, ARITHMETICS, (False, True)):
        spec = matrix_spec(kernel, arith, feature_map, 64, 64, device, mapped=mapped)
        mapped = mapped and isinstance(spec, StreamSpec | RingSpec | RingStateSpec)
        plain = matrix_spec(kernel, arith, "identity", 64, 64, device, mapped=mapped)
        assert spec.name == plain.name.replace("Identity", feature_map.capitalize())


@on_every_device
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("precision", ["highest", "tf32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape_has_a_plan(
    dtype: str, precision: str, causal: bool, device: DeviceInfo
) -> None:
    sizes = (1, 3, 16, 33, 64, 72, 96, 128, 129, 192, 256)
    for d, e in product(sizes, sizes):
        for plan in plans(device, (2, 3), 100, None, d, e, dtype=dtype, precision=precision,
                          causal=causal):  # fmt: skip
            assert_runnable(plan)


@on_every_device
def test_every_case_of_the_table_has_a_plan(device: DeviceInfo) -> None:
    for case in CASES:
        for plan in case_plans(case, device):
            assert_runnable(plan)


@pytest.mark.parametrize("arith", ARITHMETICS)
def test_padded_widths(arith: str) -> None:
    sizes = [padded(width, arith) for width in range(1, 257)]
    assert all(size >= width for width, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and sizes[-1] == 256
    assert len(set(sizes)) <= 8, "few kernels serve all widths"
    element = matrix_spec(KERNELS[0], arith, "identity", 1, 1, H200).element
    assert all(size * element % 128 == 0 for size in sizes)
    assert len(widths(arith, H200)) <= 8


# --- lengths

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 640, 1031)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("device", [H200, RTX50], ids=lambda device: device.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_ragged_lengths(dtype: str, device: DeviceInfo, causal: bool) -> None:
    for n, m in product(LENGTHS, LENGTHS):
        for plan in plans(device, (3,), n, m, 24, causal=causal, dtype=dtype):
            assert_runnable(plan)


@on_every_device
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_long_and_many(causal: bool, device: DeviceInfo) -> None:
    shapes = (
        ((70000,), 16, 16),
        ((1,), 5_000_000, 16),
        ((1000, 64), 333, 64),
        ((1,), 2**31 + 5, 16),
        ((3,), 10**9 + 7, 128),
        ((1 << 20,), 1, 8),
        ((70000,), 16, 256),
        ((1, 16), 131072, 128),
    )
    for dtype, (lead, n, d) in product(("bfloat16", "float32"), shapes):
        for plan in plans(device, lead, n, None, d, causal=causal, dtype=dtype):
            assert_runnable(plan)


@cache
def fifty_lengths() -> tuple[int, ...]:
    return tuple(sorted({int(x) for x in np.geomspace(1, 200_000, 60)}))[:50]


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_length_compiles_nothing(dtype: str, causal: bool) -> None:
    assert len(fifty_lengths()) == 50
    names: dict[object, set[str]] = {}
    for n, lead in product(fifty_lengths(), ((1,), (4, 8), (3, 1, 2))):
        for plan in plans(H200, lead, n, None, 64, causal=causal, dtype=dtype):
            for launch in plan.launches:
                spec = launch.spec
                role = getattr(spec, "role", getattr(spec, "reversed", "scan"))
                names.setdefault((type(spec), role), set()).add(spec.name)
    assert {key: len(found) for key, found in names.items()} == dict.fromkeys(names, 1), names


# --- the sequence in segments


def walks(plan: Plan) -> dict[str, Any]:
    made = (x for x in plan.launches if isinstance(x.spec, WalkSpec) and not sums(x.spec))
    return {x.spec.role: record(x) for x in made}


@on_every_device
def test_segments_where_heads_are_few(device: DeviceInfo) -> None:
    forward, backward, _ = plans(device, (1, 16), 131072, None, 128, causal=True)
    for plan in (forward, backward):
        for role, p in walks(plan).items():
            assert p["segments"] > 1, f"{role}: {plan}"
            assert 16 * int(p["segments"]) * int(p["splits"]) >= device.multiprocessors / 2, str(
                plan
            )
    assert any("segments" in reason for reason in forward.reasons)
    for plan in plans(device, (64, 64), 4096, None, 128, causal=True):
        assert all(p["segments"] == 1 for p in walks(plan).values()), str(plan)
    for plan in plans(device, (1,), 64, None, 128, causal=True):
        assert all(p["segments"] == 1 for p in walks(plan).values()), str(plan)


@pytest.mark.parametrize("lead", [(1,), (4,), (2, 3)], ids=str)
@pytest.mark.parametrize("n,m", [(1000, 1000), (700, 3000), (3000, 700), (5000, 4999)])
def test_pieces_are_the_segments(lead: tuple[int, ...], n: int, m: int) -> None:
    """A causal walk begins each segment with the sum of the pieces before it: they must be cut alike."""
    for device, plan in ((d, p) for d in DEVICES for p in plans(d, lead, n, m, 32, causal=True)):
        found: dict[bool, tuple[int, int, int]] = {}
        for launch in all_launches(plan):
            spec, p = launch.spec, record(launch)
            if sums(spec):
                length = int(p["chunks_per_segment"]) * spec.chunk
                found[getattr(spec, "reversed", False)] = (
                    int(p["origin"]),
                    length,
                    int(p["segments"]),
                )
            if isinstance(spec, WalkSpec) and p["pieces"]:
                origin, length, count = found[spec.role in ("GradK", "GradV", "GradKV")]
                assert int(p["chunks_per_segment"]) * spec.chunk == length * int(p["pieces"])
                assert (int(p["origin"]) - origin) % length == 0
                assert count >= int(p["segments"]) - 1, f"{spec.role} on {device}: {plan}"


@on_every_device
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_walk_does_not_begin_with_a_result(dtype: str, device: DeviceInfo) -> None:
    """Nor where there is one segment, whose sum is that of everything; see assert_runnable."""
    parts = ((2, 32, 16), (2, 32), (2, 16), (2,))
    state = State(*(array(*shape, dtype="float32") for shape in parts))
    for n, m in ((40, 40), (40, 90), (90, 40), (3000, 3000)):
        for plan in plans(
            device, (2,), n, m, 32, 16, causal=True, dtype=dtype, initial_state=state
        ):
            assert_runnable(plan)


@pytest.mark.parametrize("n,m", [(1, 1), (100, 70), (70, 100), (1000, 5000), (7, 129)])
def test_sums_over_everything_are_whole(n: int, m: int) -> None:
    for plan in plans(H200, (2,), n, m, 32, causal=False):
        for launch in all_launches(plan):
            if sums(spec := launch.spec):
                queries = getattr(spec, "reversed", False)
                p, rows = record(launch), n if queries else m
                spans = [span(plan, p, spec.chunk, queries, i) for i in range(int(p["segments"]))]
                assert (spans[0][0], spans[-1][1]) == (0, rows)


# --- a plan as a value


def same(x: Plan, y: Plan) -> bool:
    return x == y and str(x) == str(y) and [a.record for a in x.launches] == [
        b.record for b in y.launches
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["causal-grouped-float32", "q-broadcast", "transposed-bfloat16"])
@on_every_device
def test_plans_are_pure_printable_picklable(name: str, device: DeviceInfo) -> None:
    (case,) = (case for case in CASES if case.name == name)
    for first, again in zip(case_plans(case, device), case_plans(case, device), strict=True):
        assert same(first, again)
        assert same(pickle.loads(pickle.dumps(first)), first)
        text = str(first)
        assert device.name in text and "\n" in text and "0x" not in text
        for launch in first.launches:
            assert launch.spec.name in text and str(launch.grid) in text
        assert all(len(line) < 250 for line in text.splitlines())


def test_plans_say_why() -> None:
    plan = plans(H200, (1,), 131072, None, 128, causal=True)[0]
    assert plan.reasons and all(reason in str(plan) for reason in plan.reasons)


def test_memory_is_linear() -> None:
    """Workspace beyond the results: den and delta, and one state a head and segment."""
    b, h, n, d = 8, 16, 4096, 128
    for plan in plans(H200, (b, h), n, None, d, causal=True, want_state=False):
        segments = max((int(p["segments"]) for p in walks(plan).values()), default=1)
        state = 4 * b * h * (segments + 1) * (d * d + 2 * d + 1)
        assert plan.workspace_bytes <= 2 * state + 2 * 4 * b * h * n + 3 * 4 * b * h * n, str(plan)


def test_no_copy_where_the_last_axis_is_contiguous() -> None:
    for case in CASES:
        for plan in case_plans(case, H200):
            expected = {
                name
                for name in ("q", "k", "v", "dout")
                if (x := getattr(plan.problem, name)) is not None
                and prod(x.shape)
                and x.shape[-1] > 1
                and x.strides[-1] != 1
            }
            assert set(plan.copies) <= expected, f"{case}: copies {plan.copies}"


def test_grouped_queries_share_keys() -> None:
    """8 query heads on each key head: k and v are read in place, and nothing is made per query head."""
    for plan in plans(H200, (2, 4, 8), 512, None, 64, causal=True, kv_lead=(2, 4, 1)):
        assert not plan.reductions and not plan.copies
        made = plan.outputs | plan.workspace
        for name in ("dk", "dv"):
            assert name not in made or made[name].shape == (2, 4, 1, 512, 64)
        largest = max(
            prod(x.shape) * dtypes.ITEMSIZE[x.dtype] for x in plan.workspace.values()
        ) if plan.workspace else 0  # fmt: skip
        assert largest < 2 * 4 * 8 * 512 * 64 * 2


@on_every_device
@pytest.mark.parametrize("causal", [False, True])
def test_wgmma_where_there_is_some(device: DeviceInfo, causal: bool) -> None:
    """On sm_90, in bfloat16 up to 128 columns, but where heads are summed over; the plan says so."""

    def walks_of(width: int, heads: int, **of: Any) -> tuple[dict[str, str], str]:
        made = plans(device, (3, heads), 300, None, width, causal=causal, kv_lead=(3, 1), **of)
        specs = [x.spec for plan in made for x in plan.launches]
        reasons = "\n".join(reason for plan in made for reason in plan.reasons)
        found = {x.role: x.arith for x in specs if isinstance(x, WalkSpec) and not sums(x)}
        return found, reasons

    best = WGMMA if device.arch == 90 else "Bf16"
    stream = STREAM if device.arch == 90 else "Bf16"
    queries = {"Forward": stream, "GradQ": stream}
    arithmetic, reasons = walks_of(104, 1)
    two = {"GradK": best, "GradV": best}
    one = {"GradKV": stream} if device.arch == 90 else two
    assert arithmetic == queries | one and "share k and v" not in reasons
    assert walks_of(104, 1, feature_map="relu")[0] == queries | two
    arithmetic, reasons = walks_of(104, 2)
    assert arithmetic == queries | (dict.fromkeys(two, "Bf16") if causal else one)
    assert ("share k and v" in reasons) == (causal and device.arch == 90)
    assert set(walks_of(129, 1)[0].values()) == {"Bf16"}


# --- states before segments


@on_every_device
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scan_reads_the_sums_that_are_made(dtype: str, device: DeviceInfo) -> None:
    """Of every length: as many as the pre-pass has pieces, none of them empty."""
    shorter = 0
    for heads, n, d in product((1, 2), (*range(66, 3000, 64), 4001, 9000, 17000), (16, 64)):
        for plan in plans(device, (heads,), n, None, d, dtype=dtype, causal=True, want_state=False):
            found = [
                record(x)
                for launch in plan.launches
                for x in ([launch] if sums(launch.spec) else [launch, *launch.instead])
                if sums(x.spec) or isinstance(x.spec, ScanSpec)
            ]
            for made, scan in zip(found[::2], found[1::2], strict=True):
                assert made["segments"] == scan["summed"]
                assert (made["segments"] - 1) * made["chunks_per_segment"] < made["chunks"]
                shorter += made["chunks"] % made["chunks_per_segment"] != 0
    assert shorter > 0


@pytest.mark.parametrize(
    "heads,n,d,e,dtype",
    [
        (32, 8192, 64, 128, "bfloat16"),
        (1, 65536, 128, 64, "float32"),
        (2, 8192, 128, 64, "float32"),
    ],
)
def test_a_backward_that_finds_den_has_room_for_both_cuts(
    heads: int, n: int, d: int, e: int, dtype: str
) -> None:
    """Its forward has segments of its own, but the same workspace."""
    _, backward = problems((heads,), n, None, d, e, dtype=dtype, causal=True)
    for device in (H200, A100):
        assert_runnable(backward_plan(backward, device, has_normalizer=False))
