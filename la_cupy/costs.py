"""What kernels take, in microseconds: what cuts are chosen by, and what a plan predicts.

Fitted to 900 plans for shapes of 1 to 512 heads and 512 to 131072 positions, which they foretell
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

LAUNCH = 9.8
"""Of a kernel, besides its parts: ramp and drain."""
PART = 2.5
"""Of a part that a block has, besides its granules: its description, its state."""

# A granule of `stream` or `stream_key_value`: (role, causal), the wider of D and E; or both of a block, where it matters which.
_STREAM: dict[tuple[str, bool], dict[int | tuple[int, int], float]] = {
    ("Forward", True): {64: 1.14, 128: 2.05, (128, 64): 1.6},
    ("Forward", False): {64: 0.7, 128: 1.18},
    ("GradQ", True): {64: 2.08, 128: 3.34},
    ("GradQ", False): {64: 1.3, 128: 2.3},
    ("GradKV", True): {64: 2.1, 128: 4.0},
    ("GradKV", False): {64: 1.4, 128: 2.4},
    (KEYS, True): {64: 0.54, 128: 1.01},
    (QUERIES, True): {64: 0.835, 128: 1.08},
}
# About, for all types and widths: nothing is predicted from these.
_SWEEP = 4.0
_ACCUMULATE = 1.6
# About, for all widths: of `ring` in TF32, one of the blocks of a multiprocessor; not causal; in 3xTF32.
_RING = {"Forward": 9.0, "GradQ": 15.0, "GradV": 9.5, "GradK": 13.0}
_RING_SUMS = 4.0
_UNMASKED, _IN_THREE = 0.5, 1.4
# Of `scan`: a megabyte that it reads or writes, and a piece.
_SCAN_MEGABYTE = 0.77
_SCAN_PIECE = 0.24


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


def shared_out(parts: int, granules: int, blocks: int, cost: float, together: int = 1) -> float:
    """Of `blocks` blocks that share out `parts` parts of `granules` each, at `cost` a granule.

    `together`: blocks that share a multiprocessor's time. One of which there are fewer is done sooner.
    """
    rounds = max(1, -(-parts * together // blocks) / together)
    return rounds * (granules * cost + PART)


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


def walk(spec: StreamedSpec, parts: int, granules: int, blocks: int) -> float:
    """Of a launch on `blocks` blocks, which share out `parts` parts of `granules` each."""
    return LAUNCH + shared_out(parts, granules, blocks, granule(spec))


def scan(moved: int, pieces: int) -> float:
    """Of `scan`, which reads and writes `moved` bytes, one of `pieces` after the other.

    That it is a launch of its own did not show: it begins while the sums drain.
    """
    return moved * 1e-6 * _SCAN_MEGABYTE + pieces * _SCAN_PIECE
