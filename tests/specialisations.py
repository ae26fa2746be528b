"""Invented GPUs, every specialisation that plans can choose on them, and small covers of these."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations, product

from la_cupy.device import DeviceInfo
from la_cupy.kernels import (
    ARITHMETIC,
    FEATURES,
    KEYS,
    QUERIES,
    ROLES,
    STREAM,
    NoKernelError,
    RelevelSpec,
    RingSpec,
    RingStateSpec,
    ScanSpec,
    Spec,
    StateSpec,
    StepSpec,
    WalkSpec,
    key_value_spec,
    ring_spec,
    ring_state_spec,
    state_spec,
    stream_spec,
    sweep_spec,
)
from la_cupy.params import STEP_WIDTH

A100 = DeviceInfo("A100", 80, 108, 166912, 167936)
L40 = DeviceInfo("L40", 89, 142, 101376, 102400)
H200 = DeviceInfo("H200", 90, 132, 232448, 233472)
B200 = DeviceInfo("B200", 100, 148, 232448, 233472)
RTX50 = DeviceInfo("RTX 5090", 120, 170, 101376, 102400)
DEVICES = (A100, L40, H200, B200, RTX50)

ARITHMETICS = (*dict.fromkeys((*ARITHMETIC.values(), "Tf32x3")),)
KERNELS = (
    *((role, causal) for role in ROLES for causal in (False, True)),
    ("keys", False),
    ("queries", False),
)
"""(role of a walk, causal), or what `accumulate` sums over."""

MatrixSpec = WalkSpec | StateSpec
OTHERS: tuple[Spec, ...] = (
    ScanSpec(True),
    RelevelSpec(True),
    StepSpec(False, STEP_WIDTH),
    StepSpec(True, STEP_WIDTH),
)
"""Kernels of which there is one for each type of the sums; `scan` and `relevel` need most registers in float64."""


def matrix_spec(
    kernel: tuple[str, bool],
    arith: str,
    feature: str,
    d: int,
    e: int,
    device: DeviceInfo,
    shared: bool = False,
    mapped: bool = True,
) -> MatrixSpec:
    """What a plan takes for one of KERNELS, where k and v are `shared` by heads or not.

    `mapped`: `stream` has maps of the arrays, and `ring` finds them to be of float32.
    """
    role, causal = kernel
    ring: RingSpec | RingStateSpec | None
    if role in ROLES:
        ring = ring_spec(role, arith, feature, d, e, causal, device)
    else:
        ring = ring_state_spec(arith, feature, d, e, role == "queries", device)
    if mapped and ring is not None:
        return ring
    if role in ROLES:
        stream = stream_spec(role, arith, feature, d, e, causal, device)
        if role in ("GradK", "GradV") and not (causal and shared):  # in one walk
            stream = key_value_spec("GradKV", arith, feature, d, e, causal, device)
        if mapped and stream is not None:
            return stream
        return sweep_spec(role, arith, feature, d, e, causal, device, shared)
    if mapped and role == "keys":
        stream = stream_spec(KEYS, arith, feature, d, e, True, device)
        if stream is not None:
            return stream
    if mapped and not shared and role == "queries":
        both = key_value_spec(QUERIES, arith, feature, d, e, True, device)
        if both is not None:
            return both
    return state_spec(arith, feature, d, e, role == "queries", device)


def lacks_kernel(kernel: tuple[str, bool], arith: str, d: int, e: int, device: DeviceInfo) -> bool:
    """Causal walks in float64 over wide inner axes, where a block has 99 KiB of shared memory."""
    role, causal = kernel
    inner = e if role in ("GradQ", "GradK") else d
    return causal and arith == "F64" and inner > 128 and device.shared_per_block == 101376


def register_limit(spec: Spec) -> int:
    """Registers of a thread, with as many blocks on a multiprocessor as the kernel asks for."""
    resident = spec.resident if isinstance(spec, MatrixSpec) else 1
    return min(255, 65536 // (spec.threads * resident) // 8 * 8)  # they are given out by eights


@cache
def widths(arith: str, device: DeviceInfo) -> tuple[int, ...]:
    """The largest of the widths 1 .. 256 in each class of widths that plans treat alike."""

    def treatment(width: int) -> list[MatrixSpec | None]:
        every = product(KERNELS, ((width, 1), (1, width)), (False, True))
        return [
            _spec(kernel, arith, "identity", *pair, device, False, mapped)
            for kernel, pair, mapped in every
        ]

    classes = {str(treatment(width)): width for width in range(1, 257)}
    return tuple(sorted(classes.values()))


def _spec(kernel: tuple[str, bool], *where: object) -> MatrixSpec | None:
    try:
        return matrix_spec(kernel, *where)  # type: ignore[arg-type]
    except NoKernelError:  # test_plan.py has exactly those of lacks_kernel
        return None


@cache
def specialisations(
    device: DeviceInfo,
    arithmetics: Sequence[str] = ARITHMETICS,
    kernels: Sequence[tuple[str, bool]] = KERNELS,
    features: Sequence[str] = tuple(FEATURES),
) -> tuple[MatrixSpec, ...]:
    """All that plans choose on `device`, for widths 1 .. 256; without OTHERS, which have no choices."""
    found: dict[MatrixSpec, None] = {}
    for arith in arithmetics:
        sizes = widths(arith, device)
        for kernel, feature, d, e, shared, mapped in product(
            kernels, features, sizes, sizes, (False, True), (False, True)
        ):
            spec = _spec(kernel, arith, feature, d, e, device, shared, mapped)
            if spec is not None:
                found[spec] = None
    return tuple(found)


def choices(spec: MatrixSpec) -> tuple[tuple[str, object], ...]:
    """What was chosen, as (name, value): that of which a cover has all pairs."""
    walks = isinstance(spec, WalkSpec) and spec.role not in (KEYS, QUERIES)
    sums = not walks and ("queries" if getattr(spec, "reversed", False) else "keys")
    kernel = spec.role if walks else sums
    causal = spec.causal if walks else None
    # `stream` has code and registers of its own for each walk and both widths.
    streams = spec.arith == STREAM
    rings = isinstance(spec, RingSpec | RingStateSpec)
    return (
        ("arithmetic", spec.arith),
        ("kernel", kernel),
        ("causal", causal),
        ("stream", (kernel, causal) if streams else None),
        ("ring", rings),
        ("both widths", (spec.inner, spec.columns) if streams else None),
        ("feature", spec.feature),
        ("inner", spec.inner),
        ("columns", spec.columns),
        ("chunk", spec.chunk),
    )


def pairwise(specs: Iterable[MatrixSpec]) -> list[MatrixSpec]:
    """Few of `specs`, in which every two choices occur together that do so in one of `specs`.

    Greedy: for the first pair that is still missing, the spec that brings most missing pairs, of
    which rare ones count for more. Of some orders of the pairs, the one with which fewest are taken.
    """
    pairs = {spec: frozenset(combinations(choices(spec), 2)) for spec in specs}
    having: dict[object, list[MatrixSpec]] = {}
    for spec, own in pairs.items():
        for pair in sorted(own, key=str):
            having.setdefault(pair, []).append(spec)
    rarity = {pair: 1_000_000 // len(own) for pair, own in having.items()}

    def attempt(seed: int) -> list[MatrixSpec]:
        order = sorted(having, key=str)
        random.Random(seed).shuffle(order)
        missing, taken = set(having), []
        # Pairs that few specs have come first: those leave no choice, the others are then often met.
        for pair in sorted(order, key=lambda pair: len(having[pair])):
            if pair in missing:
                best = max(
                    having[pair], key=lambda spec: sum(rarity[x] for x in pairs[spec] & missing)
                )
                missing -= pairs[best]
                taken.append(best)
        return taken

    return min(map(attempt, range(20)), key=len)


@cache
def cover(device: DeviceInfo) -> tuple[Spec, ...]:
    """A pairwise cover of the specialisations on `device`, and OTHERS."""
    return (*pairwise(specialisations(device)), *OTHERS)
