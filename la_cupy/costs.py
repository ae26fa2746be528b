"""What kernels take, in microseconds: what cuts are chosen by, and what a plan predicts.

Fitted to what the README's shapes take on an H200 ("Performance"). On another GPU they are as far
from the truth as its memory is from an H200's.
"""

from dataclasses import dataclass

from .kernels import KEYS, QUERIES, StateSpec, StreamedSpec, WalkSpec

LAUNCH = 9.0
"""Of a kernel, besides its parts: ramp and drain."""
PART = 0.9
"""Of a part that a block has, besides its granules: its description, its state."""

# A granule of `stream` or `stream_key_value`: (role, causal), the wider of D and E; or both of a block, where it matters which.
_STREAM: dict[tuple[str, bool], dict[int | tuple[int, int], float]] = {
    ("Forward", True): {64: 1.25, 128: 2.17, (128, 64): 1.76},
    ("Forward", False): {64: 0.7, 128: 1.0},
    ("GradQ", True): {64: 2.35, 128: 4.42},
    ("GradQ", False): {64: 1.4, 128: 2.4},
    ("GradKV", True): {64: 2.35, 128: 4.5},
    ("GradKV", False): {64: 1.5, 128: 2.6},
    (KEYS, True): {64: 0.6, 128: 1.42},
    (QUERIES, True): {64: 0.95, 128: 1.17},
}
# About, for all types and widths: nothing is predicted from these.
_SWEEP = 4.0
_ACCUMULATE = 1.6
# A launch of `scan`, and a megabyte that it reads or writes.
_SCAN = 6.0
_SCAN_MEGABYTE = 0.4


def granule(spec: WalkSpec | StateSpec) -> float:
    """Of a block for a granule, where all of the GPU is busy."""
    if isinstance(spec, StreamedSpec):
        found, widths = _STREAM[spec.role, spec.causal], (spec.inner, spec.columns)
        return found.get(widths, found[max(widths)])
    return _ACCUMULATE if isinstance(spec, StateSpec) else _SWEEP


def shared_out(parts: int, granules: int, blocks: int, cost: float) -> float:
    """Of `blocks` blocks that share out `parts` parts of `granules` each, at `cost` a granule."""
    rounds = -(-parts // blocks)
    return rounds * (granules * cost + PART)


@dataclass(frozen=True)
class Segments:
    """Into how many segments a walk is cut, and what it takes with all that this needs."""

    count: int
    time: float


def segments(
    blocks: int, resident: int, granules: int, cost: float, prepass: float | None
) -> Segments:
    """The cut of least time of `granules` for each of `blocks` blocks, with room for `resident`.

    `cost` is that of a granule, `prepass` the same of the pre-pass, if there must be one.
    """

    def time(count: int) -> float:
        walk = shared_out(blocks * count, -(-granules // count), resident, cost)
        if prepass is None or count == 1:
            return walk
        share = prepass * granules * blocks / resident
        return walk + share * (count - 1) / count + 2 * LAUNCH

    # Enough pieces for two rounds of blocks; beyond that only the overheads grow.
    most = min(granules, max(1, 2 * resident // max(1, blocks)))
    count = min(range(1, max(1, most) + 1), key=time)
    return Segments(count, time(count))


def walk(spec: StreamedSpec, parts: int, granules: int, blocks: int) -> float:
    """Of a launch on `blocks` blocks, which share out `parts` parts of `granules` each."""
    return LAUNCH + shared_out(parts, granules, blocks, granule(spec))


def scan(moved: int) -> float:
    """Of a launch of `scan` that reads and writes `moved` bytes."""
    return _SCAN + moved * 1e-6 * _SCAN_MEGABYTE
