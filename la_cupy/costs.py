"""What kernels take, in microseconds: what cuts are chosen by, and what a plan predicts.

Fitted to 1000 plans for shapes of 1 to 512 heads and 512 to 131072 positions, which they foretell
within 5 % (root mean square) on an H200. On another GPU they are as far from the truth as its
memory is from an H200's.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .kernels import (
    KEYS,
    QUERIES,
    RingSpec,
    RingStateSpec,
    StateSpec,
    StreamedSpec,
    WalkSpec,
)

LAUNCH = 5.2
"""Of a kernel, besides its parts: ramp and drain."""
FURTHER = 2.0
"""Of a cut, besides what it takes on the device: a further launch is work for the host, too."""
PART = 1.4
"""Of a part that a block has, besides its granules: its description, its state."""
ALONE = 0.85
"""The part of a granule's time that it takes where few blocks share the memory."""

# A granule of `stream` or `stream_key_value`: (role, causal), the wider of D and E; or both of a block, where it matters which.
_STREAM: dict[tuple[str, bool], dict[int | tuple[int, int], float]] = {
    ("Forward", True): {64: 1.23, 128: 2.19, (128, 64): 1.84},
    ("Forward", False): {64: 0.7, 128: 1.35},
    ("GradQ", True): {64: 2.18, 128: 3.53},
    ("GradQ", False): {64: 1.3, 128: 2.49},
    ("GradKV", True): {64: 2.14, 128: 4.11},
    ("GradKV", False): {64: 1.4, 128: 2.49},
    (KEYS, True): {64: 0.58, 128: 1.02},
    (QUERIES, True): {64: 0.67, 128: 1.0},
}
# About, for all types and widths: nothing is predicted from these.
_SWEEP = 4.0
_ACCUMULATE = 1.6
# About, for all widths: of `ring` in TF32, one of the blocks of a multiprocessor; not causal; in 3xTF32.
_RING = {"Forward": 9.0, "GradQ": 15.0, "GradV": 9.5, "GradK": 13.0}
_RING_SUMS = 4.0
_UNMASKED, _IN_THREE = 0.5, 1.4
# Of `scan`: besides, a megabyte that it reads or writes, and a piece.
_SCAN = 1.1
_SCAN_MEGABYTE = 0.53
_SCAN_PIECE = 0.27
# Of a block that adds up the sums of pieces: a megabyte of them (GradQ has its columns across those of memory); and what of that
# goes on while its first chunk is on its way.
_ADD_MEGABYTE = {"Forward": 24.0, "GradQ": 38.0, "GradKV": 27.0}
_ADD_HIDDEN = 2.0
# Of `step`: besides, a megabyte of the states that it reads or writes, and of these a further position.
_STEP = 4.5
_STEP_MEGABYTE = 0.335
_STEP_POSITION = 0.04


def granule(spec: WalkSpec | StateSpec) -> float:
    """Of a block for a granule, where all of the GPU is busy."""
    if isinstance(spec, StreamedSpec):
        found, widths = _STREAM[spec.role, spec.causal], (spec.inner, spec.columns)
        return found.get(widths, found[max(widths)])
    if isinstance(spec, RingSpec | RingStateSpec):
        own = _RING[spec.role] if isinstance(spec, RingSpec) else _RING_SUMS
        unmasked = isinstance(spec, RingSpec) and not spec.causal
        return own * (_UNMASKED if unmasked else 1) * (_IN_THREE if spec.arith == "Tf32x3" else 1)
    return _ACCUMULATE if isinstance(spec, StateSpec) else _SWEEP


def shared_out(parts: int, granules: int, room: int, cost: float, together: int = 1) -> float:
    """Of blocks, for which there is `room`, that share out `parts` parts of `granules` each.

    `cost` is that of a granule. `together`: blocks that share a multiprocessor's time. One of which
    there are fewer is done sooner.
    """
    rounds = max(1, -(-parts * together // room) / together)
    busy = min(parts, room) / room
    return rounds * (granules * cost * (ALONE + (1 - ALONE) * busy) + PART)


@dataclass(frozen=True)
class Segments:
    """Into how many segments a walk is cut, and what it takes with all that this needs."""

    count: int
    time: float


def segments(
    blocks: int,
    resident: int,
    granules: int,
    cost: float,
    prepass: Callable[[int], float] | None = None,
    together: int = 1,
) -> Segments:
    """The cut of least time of `granules` for each of `blocks` blocks, with room for `resident`.

    `cost` is that of a granule; `prepass` says what it takes to sum up what comes before each of
    so many segments, if that must be.
    """

    def time(count: int) -> float:
        walk = shared_out(blocks * count, -(-granules // count), resident, cost, together)
        return walk + (prepass(count) if prepass is not None and count > 1 else 0)

    # Enough pieces for two rounds of blocks; beyond that only the overheads grow.
    most = min(granules, max(1, 2 * resident // max(1, blocks)))
    count = min(range(1, max(1, most) + 1), key=time)
    return Segments(count, time(count))


def walk(spec: StreamedSpec, parts: int, granules: int, room: int, added: int) -> float:
    """Of a launch on the blocks that there is `room` for, which share out `parts` parts of `granules` each.

    At most, a part begins with the sum of `added` bytes.
    """
    took = LAUNCH + shared_out(parts, granules, room, granule(spec))
    if added:
        took += adding(spec, parts, room, added)
    return took


def adding(spec: StreamedSpec, parts: int, room: int, most: int) -> float:
    """Of blocks that share out `parts` parts, to add up `most` bytes before one at most."""
    return -(-parts // room) * max(0.0, most * 1e-6 * _ADD_MEGABYTE[spec.role] - _ADD_HIDDEN)


def scan(moved: int, pieces: int) -> float:
    """Of `scan`, which reads and writes `moved` bytes, one of `pieces` after the other.

    It takes less than LAUNCH: it begins while the sums drain.
    """
    return _SCAN + moved * 1e-6 * _SCAN_MEGABYTE + pieces * _SCAN_PIECE


def step(moved: int, positions: float) -> float:
    """Of `step`, which reads and writes `moved` bytes of states, for so many positions each."""
    return _STEP + moved * 1e-6 * (_STEP_MEGABYTE + (positions - 1) * _STEP_POSITION)
