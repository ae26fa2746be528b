"""From names, strides and sizes to the bytes of a launch's parameters, and what it should take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from . import costs, dtypes
from .checks import FEATURE_MAPS
from .kernels import (
    KeyValueSpec,
    RelevelSpec,
    RingSpec,
    ScanSpec,
    Spec,
    StateSpec,
    StepSpec,
    StreamedSpec,
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
    SCAN_NUMBERS,
    SCAN_PARAMS,
    SCAN_WIDTH,
    STATE_FIELDS,
    STEP_PARAMS,
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
    microseconds: float | None = None  # predicted; see costs.py

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
    """A record under construction, with the places where addresses belong.

    Fields of a walk are called by their names in Params, also where the record has more than these.
    """

    def __init__(self, dtype: np.dtype, state_dtype: str) -> None:
        self.dtype = dtype
        self.values = np.zeros(1, dtype)
        self.itemsize = dtypes.ITEMSIZE[state_dtype]
        self.pointers: list[tuple[int, str, int]] = []
        self.aligned: list[tuple[int, str, int]] = []
        self.maps: list[tuple[int, str, TensorMap]] = []

    @property
    def walk(self) -> Any:
        """The parameters of a walk, beside which stands what only `stream` or `step` has."""
        return self.values[0]["p"] if self._own("p") else self.values[0]

    def _own(self, name: str) -> bool:
        return name in (self.dtype.names or ())

    def field(self, name: str) -> Any:
        return self.values[0][name] if self._own(name) else self.walk[name]

    def offset(self, *path: str) -> int:
        at, dtype = 0, self.dtype
        for name in path if self._own(path[0]) else ("p", *path):
            assert dtype.fields is not None
            dtype, inner = dtype.fields[name][:2]
            at += inner
        return at

    def tensor(self, name: str, tensor: Tensor, lead: list[int], packet: int) -> None:
        record = self.field(name)
        record["lead"][: len(lead)] = lead
        record["row"] = tensor.row
        record["dtype"] = DTYPE_CODES[tensor.dtype]
        self.pointers.append((self.offset(name, "data"), tensor.buffer, 0))
        if all(stride % packet == 0 for stride in (*lead, tensor.row)):
            size = packet * dtypes.ITEMSIZE[tensor.dtype]
            self.aligned.append((self.offset(name, "aligned"), tensor.buffer, size))

    def map(self, name: str, tensor: Tensor, found: TensorMap, axes: tuple[int, ...]) -> None:
        """The map of an array of `stream`, and which leading axes it has."""
        which = MAPS.index(name)
        self.values[0]["axes"][which] = [*axes, *[-1] * (3 - len(axes)), 1]
        self.maps.append((which * MAP_BYTES, tensor.buffer, found))

    def rows(self, name: str, ref: RowRef, lead: list[int]) -> None:
        self.field(name)["lead"][: len(lead)] = lead
        self.pointers.append((self.offset(name, "data"), ref.buffer, 0))

    def state(self, name: str, ref: StateRef, leads: list[list[int]]) -> None:
        for field, buffer, lead, shift in zip(
            STATE_FIELDS, ref.buffers, leads, ref.shifts, strict=True
        ):
            self.field(name)[f"{field}_lead"][: len(lead)] = lead
            self.pointers.append((self.offset(name, field), buffer, shift * self.itemsize))

    def launch(self, spec: Spec, grid: int) -> Launch:
        pointers, aligned, maps = tuple(self.pointers), tuple(self.aligned), tuple(self.maps)
        return Launch(spec, grid, self.values.tobytes(), pointers, aligned, maps)


@dataclass(frozen=True)
class Course:
    """What a walk over the sequence covers, and in how many blocks; see params.cuh."""

    origin: int
    query_shift: int
    chunks: int
    each: int  # chunks in a segment
    splits: int
    pieces: int = 0  # slots of a segment
    adds: bool = False  # whether a walk begins with the sum of the slots before a segment
    phase: str = "whole"
    levelled: bool = False  # whether v is taken less its level

    @property
    def segments(self) -> int:
        return -(-self.chunks // self.each) if self.chunks else 1


@dataclass(frozen=True)
class Walk:
    """A walk over the sequence: the course, and the arrays by the names of its parameters.

    Of the tensors, "second" is the other result of a kernel that makes two: dv, where "dst" is dk.
    """

    axes: Axes
    course: Course
    tensors: dict[str, Tensor]
    rows: dict[str, RowRef]
    states: dict[str, StateRef]

    @property
    def grid(self) -> int:
        """Parts that blocks of their own may have."""
        return self.axes.heads * self.course.segments * self.course.splits


def walk_launch(problem: Problem, spec: SweepSpec | RingSpec | StateSpec, walk: Walk) -> Launch:
    """The launch of `sweep`, `ring`, `accumulate` or `ring_sums`."""
    record = _Record(PARAMS, problem.state_dtype)
    _put_walk(record, problem, spec, walk)
    return record.launch(spec, walk.grid)


def stream_launch(problem: Problem, spec: StreamedSpec, walk: Walk, most: int) -> Launch | None:
    """The launch of `stream`, of `most` blocks at most: they go on from part to part.

    None if there is no map of an array that it reads, or of a result that it has to write by one.
    """
    record = _Record(STREAM_PARAMS, problem.state_dtype)
    sizes, leads = _put_walk(record, problem, spec, walk)
    for name, tensor in walk.tensors.items():
        rows, columns = _shape(problem, spec, name)
        made = TensorMap.of(tensor.dtype, columns, rows, tensor.row, leads[name], sizes)
        if made is not None:
            record.map(name, tensor, *made)
        elif name != "dst" or isinstance(spec, KeyValueSpec):  # `stream` can write row by row
            return None
    blocks = min(walk.grid, most)
    course, state = walk.course, problem.d * problem.e * dtypes.ITEMSIZE[problem.state_dtype]
    slots = (course.segments - 1) * course.pieces if course.adds else 0
    added = slots * state // course.splits
    took = costs.walk(spec, walk.grid, course.each, most, added) if blocks else None
    return replace(record.launch(spec, blocks), microseconds=took)


def _shape(problem: Problem, spec: StreamedSpec, name: str) -> tuple[int, int]:
    """Rows and columns of an array of `stream`."""
    if name == "dst":
        name = {"Forward": "dout", "GradQ": "q", "GradKV": "k"}[spec.role]
    elif name == "second":
        name = "v"
    rows = problem.m if name in ("k", "v") else problem.n
    return rows, problem.d if name in ("q", "k") else problem.e


def _put_walk(
    record: _Record, problem: Problem, spec: WalkSpec | StateSpec | StepSpec, walk: Walk
) -> tuple[list[int], dict[str, list[int]]]:
    """Fill in a walk; returns the sizes of the leading axes, and the tensors' strides on them."""
    strides = [t.lead for t in walk.tensors.values()] + [r.lead for r in walk.rows.values()]
    strides += [lead for s in walk.states.values() for lead in s.leads]
    sizes, outer, merged = merge(walk.axes, strides)
    leads = dict(zip(walk.tensors, merged, strict=False))
    taken = iter(merged)
    for name, tensor in walk.tensors.items():
        record.tensor(name, tensor, next(taken), spec.packet)
    for name, ref in walk.rows.items():
        record.rows(name, ref, next(taken))
    for name, state in walk.states.items():
        record.state(name, state, [next(taken) for _ in STATE_FIELDS])
    p, options, course = record.walk, problem.options, walk.course
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
    p["adds"] = course.adds
    return sizes, leads


def step_launch(problem: Problem, spec: StepSpec, walk: Walk) -> Launch:
    """The launch of `step`, which is a walk of one turn."""
    record = _Record(STEP_PARAMS, problem.state_dtype)
    _put_walk(record, problem, spec, walk)
    record.values[0]["feature"] = FEATURE_MAPS.index(problem.options.feature_map)
    size = problem.d * problem.e * dtypes.ITEMSIZE[problem.state_dtype]
    moved = len(walk.states) * walk.axes.heads * size
    queries = problem.n * prod(walk.axes.sizes[i] for i in walk.axes.group)
    positions = (queries + problem.m) / 2
    return replace(record.launch(spec, walk.grid), microseconds=costs.step(moved, positions))


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
    kv = problem.d * problem.e
    grid = axes.heads * (-(-kv // (SCAN_WIDTH * SCAN_NUMBERS)) + 1)
    launch = record.launch(ScanSpec(problem.state_dtype == "float64"), grid)
    numbers, slots = kv + problem.d + problem.e + 1, summed + pieces + len(states) - 1
    moved = axes.heads * numbers * slots * dtypes.ITEMSIZE[problem.state_dtype]
    return replace(launch, microseconds=costs.scan(moved, pieces))


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
        assert launch.instead
        return launch.instead
    return (launch,)


class Parameters:
    """The parameters of a launch in memory, of which a call changes the addresses only."""

    def __init__(self, launch: Launch) -> None:
        self.bytes = bytearray(launch.record)
        view = memoryview(self.bytes)
        self._words, self._flags = view.cast("Q"), view.cast("i")
        self._pointers = [(offset >> 3, name, shift) for offset, name, shift in launch.pointers]
        self._aligned = [(offset >> 2, name, size) for offset, name, size in launch.aligned]
        self._maps = launch.maps
        self._mapped = [-1] * len(launch.maps)  # the address that each map here was made for

    def fill(
        self,
        addresses: Mapping[str, int],
        encode: Callable[[TensorMap, int], bytes] = encode,
    ) -> None:
        """Put the buffers' addresses, and all that follows from them, in their places."""
        words, flags = self._words, self._flags
        for at, name, shift in self._pointers:
            words[at] = addresses[name] + shift
        for at, name, size in self._aligned:
            flags[at] = addresses[name] % size == 0
        for i, (offset, name, tensor_map) in enumerate(self._maps):
            address = addresses[name]
            if self._mapped[i] != address:  # making a map takes longer than all the rest
                self.bytes[offset : offset + MAP_BYTES] = encode(tensor_map, address)
                self._mapped[i] = address
