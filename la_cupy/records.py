"""From names, strides and sizes to the bytes of a launch's parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from . import dtypes
from .kernels import (
    KeyValueSpec,
    RelevelSpec,
    ScanSpec,
    Spec,
    StateSpec,
    StreamSpec,
    SweepSpec,
    WalkSpec,
)
from .params import (
    DTYPE_CODES,
    MAP_BYTES,
    MAPS,
    MAX_RANK,
    PARAMS,
    PHASES,
    RELEVEL_PARAMS,
    RELEVEL_ROWS,
    SCAN_PARAMS,
    SCAN_WIDTH,
    STATE_FIELDS,
    STREAM_PARAMS,
)
from .problem import Problem
from .tensor_maps import ALIGNMENT, TensorMap, encode

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """Rows of a buffer; strides in elements, `lead` over the leading axes of the result."""

    buffer: str
    dtype: str
    lead: Strides
    row: int


@dataclass(frozen=True)
class RowRef:
    """Numbers that belong to rows, in a buffer of the accumulators' type."""

    buffer: str
    lead: Strides


@dataclass(frozen=True)
class StateRef:
    """The four parts of a state: buffers, leading strides, elements before the first."""

    buffers: tuple[str, ...]
    leads: tuple[Strides, ...]
    shifts: tuple[int, ...]

    def slot(self, index: int, d: int, e: int) -> "StateRef":
        """The same workspace from slot `index` on."""
        sizes = (d * e, d, e, 1)
        shifts = tuple(s + index * size for s, size in zip(self.shifts, sizes, strict=True))
        return StateRef(self.buffers, self.leads, shifts)


@dataclass(frozen=True)
class Axes:
    """Leading axes: `outer` make the blocks of a launch, `group` are summed over in a block."""

    sizes: tuple[int, ...]
    outer: tuple[int, ...]
    group: tuple[int, ...]

    @property
    def heads(self) -> int:
        """Heads that have blocks of their own."""
        return prod(self.sizes[i] for i in self.outer)


@dataclass(frozen=True)
class Launch:
    """One kernel on one grid: the parameters' bytes, and where addresses go in them."""

    spec: Spec
    grid: int
    record: bytes
    pointers: tuple[tuple[int, str, int], ...]  # offset in the record, buffer, bytes added
    aligned: tuple[tuple[int, str, int], ...]  # offset in the record, buffer, alignment
    maps: tuple[tuple[int, str, TensorMap], ...] = ()  # offset in the record, buffer
    instead: "tuple[Launch, ...]" = ()  # what runs where a map's array is not aligned

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The kernels that may run."""
        return (self.spec, *(launch.spec for launch in self.instead))


def merge(axes: Axes, strides: list[Strides]) -> tuple[list[int], int, list[list[int]]]:
    """Axes that step alike in every array become one.

    Returns the sizes, how many of them are outer, and for each array its strides. More than
    MAX_RANK axes that do not merge are the one layout that the kernels do not take.
    """
    sizes: list[int] = []
    steps: list[list[int]] = []  # per merged axis, the strides of all arrays
    outer = 0
    for kind in (axes.outer, axes.group):
        begin = len(sizes)
        for axis in kind:
            size = axes.sizes[axis]
            own = [s[axis] for s in strides]
            if size == 1:
                continue
            if len(sizes) > begin and steps[-1] == [x * size for x in own]:
                sizes[-1] *= size
                steps[-1] = own
            else:
                sizes.append(size)
                steps.append(own)
        if kind is axes.outer:
            outer = len(sizes)
    if len(sizes) > MAX_RANK:
        raise ValueError(
            f"the leading axes {axes.sizes} of these arrays come to {len(sizes)} axes that do not "
            f"merge, but the GPU kernels take {MAX_RANK}: pass contiguous copies"
        )
    return (
        sizes,
        outer,
        [list(column) for column in zip(*steps, strict=True)] if steps else [[] for _ in strides],
    )


class _Record:
    """A record under construction, with the places where addresses belong."""

    def __init__(self, dtype: np.dtype, state_dtype: str) -> None:
        self.dtype = dtype
        self.values = np.zeros(1, dtype)
        self.itemsize = dtypes.ITEMSIZE[state_dtype]
        self.pointers: list[tuple[int, str, int]] = []
        self.aligned: list[tuple[int, str, int]] = []

    def offset(self, *path: str) -> int:
        at, dtype = 0, self.dtype
        for name in path:
            assert dtype.fields is not None
            dtype, inner = dtype.fields[name][:2]
            at += inner
        return at

    def tensor(self, name: str, tensor: Tensor, lead: list[int], packet: int) -> None:
        record = self.values[0][name]
        record["lead"][: len(lead)] = lead
        record["row"] = tensor.row
        record["dtype"] = DTYPE_CODES[tensor.dtype]
        self.pointers.append((self.offset(name, "data"), tensor.buffer, 0))
        if all(stride % packet == 0 for stride in (*lead, tensor.row)):
            size = packet * dtypes.ITEMSIZE[tensor.dtype]
            self.aligned.append((self.offset(name, "aligned"), tensor.buffer, size))

    def rows(self, name: str, ref: RowRef, lead: list[int]) -> None:
        self.values[0][name]["lead"][: len(lead)] = lead
        self.pointers.append((self.offset(name, "data"), ref.buffer, 0))

    def state(self, name: str, ref: StateRef, leads: list[list[int]]) -> None:
        for field, buffer, lead, shift in zip(
            STATE_FIELDS, ref.buffers, leads, ref.shifts, strict=True
        ):
            self.values[0][name][f"{field}_lead"][: len(lead)] = lead
            self.pointers.append((self.offset(name, field), buffer, shift * self.itemsize))

    def launch(self, spec: Spec, grid: int) -> Launch:
        pointers, aligned = tuple(self.pointers), tuple(self.aligned)
        return Launch(spec, grid, self.values.tobytes(), pointers, aligned)


@dataclass(frozen=True)
class Course:
    """What a walk over the sequence covers, and in how many blocks; see params.cuh."""

    origin: int
    query_shift: int
    chunks: int
    each: int  # chunks in a segment
    splits: int
    pieces: int = 0
    phase: str = "whole"
    levelled: bool = False  # whether v is taken less its level

    @property
    def segments(self) -> int:
        return -(-self.chunks // self.each) if self.chunks else 1


def walk_launch(
    problem: Problem,
    spec: SweepSpec | StateSpec,
    axes: Axes,
    course: Course,
    tensors: dict[str, Tensor],
    rows: dict[str, RowRef],
    states: dict[str, StateRef],
) -> Launch:
    """The launch of `sweep` or `accumulate`."""
    return _walk(problem, spec, axes, course, tensors, rows, states)[0]


def stream_launch(
    problem: Problem,
    spec: StreamSpec | KeyValueSpec,
    axes: Axes,
    course: Course,
    tensors: dict[str, Tensor],
    rows: dict[str, RowRef],
    states: dict[str, StateRef],
    most: int,
) -> Launch | None:
    """The launch of `stream`, of `most` blocks at most: they go on from part to part.

    None if there is no map of an array that it reads.
    """
    launch, merged, sizes = _walk(problem, spec, axes, course, tensors, rows, states)
    return _with_maps(replace(launch, grid=min(launch.grid, most)), problem, tensors, merged, sizes)


def _walk(
    problem: Problem,
    spec: WalkSpec | StateSpec,
    axes: Axes,
    course: Course,
    tensors: dict[str, Tensor],
    rows: dict[str, RowRef],
    states: dict[str, StateRef],
) -> tuple[Launch, list[list[int]], list[int]]:
    leads = [t.lead for t in tensors.values()] + [r.lead for r in rows.values()]
    leads += [lead for s in states.values() for lead in s.leads]
    sizes, outer, merged = merge(axes, leads)
    record = _Record(PARAMS, problem.state_dtype)
    taken = iter(merged)
    for name, tensor in tensors.items():
        lead = next(taken)
        if name in PARAMS.names:  # type: ignore[operator]
            record.tensor(name, tensor, lead, 16 // spec.element)
    for name, ref in rows.items():
        record.rows(name, ref, next(taken))
    for name, state in states.items():
        record.state(name, state, [next(taken) for _ in STATE_FIELDS])
    p, options = record.values[0], problem.options
    p["size"][: len(sizes)] = sizes
    p["outer"], p["rank"] = outer, len(sizes)
    p["n"], p["m"], p["d"], p["e"] = problem.n, problem.m, problem.d, problem.e
    p["query_shift"], p["origin"] = course.query_shift, course.origin
    p["chunks"], p["chunks_per_segment"] = course.chunks, course.each
    p["segments"], p["splits"], p["pieces"] = course.segments, course.splits, course.pieces
    p["unit_norm"], p["normalize"] = options.qk_norm == "l2", options.normalize
    p["levelled"], p["phase"] = course.levelled, PHASES[course.phase]
    p["a"], p["b"] = options.a, options.b
    p["a_float"], p["b_float"] = options.a, options.b
    return record.launch(spec, axes.heads * course.segments * course.splits), merged, sizes


def _with_maps(
    launch: Launch,
    problem: Problem,
    tensors: dict[str, Tensor],
    merged: list[list[int]],
    sizes: list[int],
) -> Launch | None:
    """The launch of `stream`: its maps and their axes stand before the parameters of the walk.

    None if there is no map of an array that it reads, or of a result that it cannot write otherwise.
    """
    assert isinstance(launch.spec, StreamSpec | KeyValueSpec)
    role = launch.spec.role
    values = np.zeros(1, STREAM_PARAMS)
    values[0]["p"] = np.frombuffer(launch.record, PARAMS)[0]
    maps = []
    extra: tuple[tuple[int, str, int], ...] = ()
    for (name, tensor), lead in zip(tensors.items(), merged, strict=False):
        which = MAPS.index(name)
        wide = name in ("q", "k") or (name == "dst" and role in ("GradQ", "GradKV"))
        by_key = name in ("k", "v", "second") or (name == "dst" and role == "GradKV")
        rows = problem.m if by_key else problem.n
        columns = problem.d if wide else problem.e
        made = TensorMap.of(tensor.dtype, columns, rows, tensor.row, lead, sizes)
        if made is None:
            if name == "dst" and isinstance(launch.spec, StreamSpec):
                continue  # then it is written row by row
            return None
        found, axes = made
        values[0]["axes"][which] = [*axes, *[-1] * (3 - len(axes)), 1]
        maps.append((which * MAP_BYTES, tensor.buffer, found))
        if name == "second":
            part = values[0]["second"]
            part["lead"][: len(lead)], part["row"] = lead, tensor.row
            second = STREAM_PARAMS.fields["second"][1]  # type: ignore[index]
            extra = ((second, tensor.buffer, 0),)
    shift = STREAM_PARAMS.fields["p"][1]  # type: ignore[index]
    pointers = tuple((at + shift, name, added) for at, name, added in launch.pointers)
    aligned = tuple((at + shift, name, size) for at, name, size in launch.aligned)
    pointers += extra
    return Launch(launch.spec, launch.grid, values.tobytes(), pointers, aligned, tuple(maps))


def scan_launch(
    problem: Problem,
    axes: Axes,
    pieces: int,
    summed: int,
    is_reversed: bool,
    states: dict[str, StateRef],
    v: Tensor | None,
) -> Launch:
    """The launch of `scan` over `slots`, with `start` and `total` where there are any.

    With `v`, `start` is made relative to the level of v.
    """
    record = _Record(SCAN_PARAMS, problem.state_dtype)
    _by_state_head(record, problem, axes, states, v)
    p = record.values[0]
    p["pieces"], p["summed"], p["reversed"] = pieces, summed, is_reversed
    numbers = problem.d * problem.e + problem.d + problem.e + 1
    grid = axes.heads * -(-numbers // SCAN_WIDTH)
    return record.launch(ScanSpec(problem.state_dtype == "float64"), grid)


def relevel_launch(
    problem: Problem, axes: Axes, states: dict[str, StateRef], v: Tensor, sign: int
) -> Launch:
    """The launch of `relevel` from the state "from" to the state "to"."""
    record = _Record(RELEVEL_PARAMS, problem.state_dtype)
    _by_state_head(record, problem, axes, states, v)
    record.values[0]["sign"] = sign
    grid = axes.heads * -(-(problem.d + 1) // RELEVEL_ROWS)
    return record.launch(RelevelSpec(problem.state_dtype == "float64"), grid)


def _by_state_head(
    record: _Record, problem: Problem, axes: Axes, states: dict[str, StateRef], v: Tensor | None
) -> None:
    """What the launches have in common that have a block or more for each head of the states."""
    leads = [lead for s in states.values() for lead in s.leads] + ([v.lead] if v else [])
    sizes, _, merged = merge(Axes(axes.sizes, axes.outer, ()), leads)
    taken = iter(merged)
    for name, state in states.items():
        record.state(name, state, [next(taken) for _ in STATE_FIELDS])
    if v is not None:
        record.tensor("v", v, next(taken), 1)
    p = record.values[0]
    p["size"][: len(sizes)], p["rank"] = sizes, len(sizes)
    p["m"], p["d"], p["e"] = problem.m, problem.d, problem.e


def suited(launch: Launch, addresses: Mapping[str, int]) -> tuple[Launch, ...]:
    """The launch itself, or what runs instead where an array does not lie as a map of it must."""
    if any(addresses[name] % ALIGNMENT for _, name, _ in launch.maps):
        return launch.instead
    return (launch,)


def fill(
    launch: Launch,
    addresses: Mapping[str, int],
    encode: Callable[[TensorMap, int], bytes] = encode,
) -> bytearray:
    """The parameters of one launch, with the buffers' addresses in their places."""
    filled = bytearray(launch.record)
    words = memoryview(filled).cast("Q")
    for offset, name, shift in launch.pointers:
        words[offset >> 3] = addresses[name] + shift
    flags = memoryview(filled).cast("i")
    for offset, name, size in launch.aligned:
        flags[offset >> 2] = addresses[name] % size == 0
    for offset, name, tensor_map in launch.maps:
        filled[offset : offset + MAP_BYTES] = encode(tensor_map, addresses[name])
    return filled
