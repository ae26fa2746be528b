"""The launches of a call, one after the other: what forward and backward have in common."""

from dataclasses import dataclass, replace
from math import prod

from . import costs, dtypes
from .device import DeviceInfo
from .kernels import (
    EXPONENTIAL,
    KEYS,
    QUERIES,
    KeyValueSpec,
    RingSpec,
    RingStateSpec,
    StateSpec,
    StepSpec,
    StreamedSpec,
    StreamSpec,
    SweepSpec,
    WalkSpec,
    arithmetic,
    key_value_spec,
    resident_blocks,
    ring_spec,
    ring_state_spec,
    state_spec,
    stream_spec,
    sweep_spec,
)
from .layouts import Arrays, Buffer
from .params import DOTS, STEP_KEYS
from .problem import Problem
from .records import (
    Axes,
    Course,
    Launch,
    RowRef,
    StateRef,
    Tensor,
    Walk,
    relevel_launch,
    scan_launch,
    step_launch,
    stream_launch,
    walk_launch,
)

GRANULE = 64
"""Segments are cut at multiples of this many positions, which every chunk length divides."""

_STEP_ROWS = 64
"""Rows of q for a state that `step` takes one after the other, before it takes longer than to read the state again."""

# `stream` multiplies a / b, or a and b, with lengths of rows and counts: 1e30 and 1e5 are in range then.
_FARTHEST = 1e3
_LONG_SEGMENT = 2048
_ONE_CHUNK = "one chunk does not fill the warps that it has for several"
_BY_QUERY = ("Forward", "GradQ")  # whose rows are queries
_MAKES_VALUES = {"Forward": True, "GradV": True, "GradQ": False, "GradK": False}  # E columns, or D


@dataclass(frozen=True)
class Cut:
    """The segments of a walk, and the state with which each begins."""

    length: int  # positions in a segment
    start: StateRef | None
    pieces: int = 0  # slots of `start` that a segment has; 0: there is one state for all
    scan: Launch | None = None  # of slots that `stream` adds up itself: for `sweep` in its place

    @property
    def states(self) -> dict[str, StateRef]:
        return {} if self.start is None else {"start": self.start}


def granules(length: int) -> int:
    return -(-length // GRANULE)


def segment_length(length: int, count: int, step: int = 1) -> int:
    """Positions in each of `count` segments, whole steps of granules; the last one may have fewer."""
    return max(1, -(-granules(length) // (count * step))) * step * GRANULE


class Planner:
    """Adds launch after launch; what forward and backward have in common."""

    def __init__(self, problem: Problem, device: DeviceInfo) -> None:
        self.p = problem
        self.device = device
        self.arrays = Arrays(problem)
        self.arith = arithmetic(problem.compute, problem.options.precision)
        self.launches: list[Launch] = []
        self.reasons: list[str] = []
        # With no query there is nothing to mask, and no head to walk for.
        self.causal = problem.options.causal and prod(problem.lead) > 0

    def spec(self, role: str) -> SweepSpec | RingSpec | StreamSpec:
        p, o = self.p, self.p.options
        widths = p.d, p.e, self.causal, self.device
        ring = ring_spec(role, self.arith, o.feature_map, *widths)
        if ring is not None and not self.narrow_arrays:
            return ring
        if ring is not None:
            self.reasons.append(
                f"{role} does not run on `ring`, which has rows of float32 only: {self.narrow_arrays}"
            )
        if stream_spec(role, self.arith, "identity", *widths) is None:
            return self.sweep_spec(role)
        why = self.why_not_stream(role)
        stream = None if why else stream_spec(role, self.arith, o.feature_map, *widths)
        if stream is not None:
            return stream
        self.reasons.append(f"{role} does not run on `stream`: {why}")
        return self.sweep_spec(role)

    def why_not_stream(self, role: str) -> str:
        """What of the options and the length keeps a walk from it that could be one of `stream`."""
        o = self.p.options
        if o.feature_map in EXPONENTIAL:
            return f"it has too few warps for the exponentials of feature_map={o.feature_map!r}"
        if self.positions(role in _BY_QUERY)[2] <= GRANULE:
            return _ONE_CHUNK
        if o.b != 0 and abs(o.a) > _FARTHEST * abs(o.b):
            return f"it divides a by b, here {o.a:g} by {o.b:g}"
        return ""

    @property
    def narrow_arrays(self) -> str:
        """The arrays that are not of float32, where there is a `ring` for others."""
        named = ("q", "k", "v", "dout")
        layouts = ((name, getattr(self.p, name)) for name in named)
        return ", ".join(
            f"{name} of {x.dtype}" for name, x in layouts if x is not None and x.dtype != "float32"
        )

    def sweep_spec(self, role: str) -> SweepSpec:
        p, axes = self.p, self.axes(role)
        shared = prod(axes.sizes[i] for i in axes.group) > 1
        of = role, self.arith, p.options.feature_map, p.d, p.e, self.causal, self.device
        spec = sweep_spec(*of, shared=shared)
        if shared and (alone := sweep_spec(*of)).arith != spec.arith:
            self.reasons.append(
                f"{role} sums over the heads that share k and v, which {spec.arith} does and "
                f"{alone.arith} does not"
            )
        return spec

    def axes(self, role: str) -> Axes:
        return self.arrays.query_axes if role in _BY_QUERY else self.arrays.state_axes

    def splits(self, spec: WalkSpec) -> int:
        if isinstance(spec, KeyValueSpec):
            return 1
        width = self.p.e if _MAKES_VALUES[spec.role] else self.p.d
        return -(-width // spec.columns)

    def positions(self, queries: bool) -> tuple[int, int, int]:
        """(origin, query_shift, length) of a walk over queries or keys; see params.cuh."""
        p = self.p
        if not self.causal:
            return 0, 0, p.n if queries else p.m
        shift = p.m - p.n
        return min(0, shift), shift, p.m - min(0, shift)

    def segments(self, spec: WalkSpec) -> costs.Segments:
        """Into how many the walk of `spec` is cut."""
        is_reversed = spec.role not in _BY_QUERY
        blocks = self.axes(spec.role).heads * self.splits(spec)
        length = granules(self.positions(not is_reversed)[2])
        cost, room = costs.granule(spec), resident_blocks(spec, self.device)
        together = self.together(spec)
        if not self.causal:
            return costs.segments(blocks, room, length, cost, together=together)
        sums = self.prepass_spec(is_reversed)
        most = self.most_pieces(sums, self.state_blocks(sums))

        def prepass(count: int) -> float:
            span, pieces = -(-length * (count - 1) // count), count - 1
            fine = [1 << i for i in range(8) if i == 0 or pieces << i <= most]
            return (
                costs.LAUNCH
                + costs.FURTHER
                + min(self.sums_time(spec, span, count, x) for x in fine)
            )

        return costs.segments(blocks, room, length, cost, prepass, together)

    def together(self, spec: WalkSpec | StateSpec) -> int:
        """Blocks that share a multiprocessor's time, where they are small ones."""
        if not isinstance(spec, RingSpec | RingStateSpec):
            return 1
        return resident_blocks(spec, self.device) // self.device.multiprocessors

    def most_pieces(self, spec: StateSpec | StreamedSpec, blocks: int) -> int:
        """Pieces that a pre-pass may have, each with so many blocks.

        Where some multiprocessors have three blocks and others two, small ones even it out.
        """
        rounds = 1 if self.together(spec) == 1 else 4
        return rounds * resident_blocks(spec, self.device) // max(1, blocks)

    def sums_time(self, walk: WalkSpec, span: int, segments: int, fine: int) -> float:
        """Of the pre-pass of `walk`, `fine` pieces a segment, and of what then joins these; besides launches.

        It is over `span` granules, those of all `segments` but one.
        """
        spec, pieces = self.prepass_spec(walk.role not in _BY_QUERY), (segments - 1) * fine
        blocks, room = self.state_blocks(spec) * pieces, resident_blocks(spec, self.device)
        each = -(-span // pieces)
        cost, together = costs.granule(spec), self.together(spec)
        sums = costs.shared_out(blocks, each, room, cost, together)
        return sums + self.joining(walk, segments, fine)[0]

    def joining(self, walk: WalkSpec, segments: int, fine: int) -> tuple[float, bool]:
        """What it takes to get from sums of pieces to states before segments, and whether `walk` does it.

        It can where the states begin with zeros and the total is not wanted; `scan` always can.
        """
        p, pieces = self.p, (segments - 1) * fine
        state = (p.d + 1) * (p.e + 1) * dtypes.ITEMSIZE[p.state_dtype]
        scan = costs.scan(2 * pieces * self.arrays.state_axes.heads * state, pieces)
        given = p.initial_state or (walk.role not in _BY_QUERY and p.dstate)
        if given or not isinstance(walk, StreamedSpec):
            return scan, False
        parts = self.axes(walk.role).heads * self.splits(walk) * segments
        room = resident_blocks(walk, self.device)
        add = costs.adding(walk, parts, room, pieces * state // self.splits(walk))
        return min((scan, False), (add, True))

    def walk_segment(self, spec: WalkSpec) -> int:
        """Positions in a segment of the walk of `spec`."""
        length = self.positions(spec.role in _BY_QUERY)[2]
        count = self.segments(spec).count
        # Long segments can be summed in two or four pieces each, see most_pieces.
        several = self.together(spec) > 1 and length >= count * _LONG_SEGMENT
        segment = segment_length(length, count, 4 if several else 1)
        if segment < length:
            blocks = self.axes(spec.role).heads * self.splits(spec)
            self.reasons.append(
                f"{spec.role} has {blocks} blocks for {resident_blocks(spec, self.device)} places, "
                f"so that its sequence is cut into {-(-length // segment)} segments"
            )
        return segment

    def narrowed(
        self, spec: SweepSpec | RingSpec | StreamSpec
    ) -> SweepSpec | RingSpec | StreamSpec:
        """`spec`, or with half the columns, where to split them takes less time than to cut the sequence."""
        if not (self.causal and isinstance(spec, StreamSpec) and spec.columns == 128):
            return spec
        halves = replace(spec, columns=64)
        if self.segments(halves).time >= self.segments(spec).time:
            return spec
        self.reasons.append(
            f"{spec.role} has a block for each half of the columns: to cut the sequence takes longer"
        )
        return halves

    def states(
        self,
        name: str,
        is_reversed: bool,
        segment: int,
        rows: dict[str, RowRef],
        start: StateRef | None,
        total: StateRef | None,
        walk: WalkSpec | None = None,
    ) -> Cut:
        """Pre-pass and scan: a slot for each segment, with the state before it (behind, reversed).

        The segment that is last in the walk is only summed for the total. Where there are too few
        segments for the GPU, they are summed in several pieces, if it takes less time. No scan
        where `walk`, which begins with the states, is quicker to add up the sums before each.
        """
        p, length_of_segment = self.p, segment
        origin, shift, length = self.positions(is_reversed)
        pieces = max(1, -(-length // segment))
        fine, adds = 1, False
        if walk is not None and total is None and pieces > 1:
            spec = self.prepass_spec(is_reversed)
            blocks = self.state_blocks(spec) * (pieces - 1)
            room = max(1, self.most_pieces(spec, blocks))
            whole = segment // GRANULE

            def fits(count: int) -> bool:
                """Whole, and none empty: a reversed walk's last segment is summed, and may be shorter."""
                if whole % count:
                    return False
                return not is_reversed or -(-length // (segment // count)) == pieces * count

            def time(count: int) -> float:
                return self.sums_time(walk, whole * (pieces - 1), pieces, count)

            fine = min(filter(fits, range(1, room + 1)), key=time)
            adds = self.joining(walk, pieces, fine)[1]
            if adds:
                self.reasons.append(
                    f"{walk.role} adds up the sums before each segment itself: a scan takes longer"
                )
        segment, pieces = segment // fine, pieces * fine
        skip = fine if total is None else 0  # pieces left out: the first if reversed, or the last
        begin = segment * skip if is_reversed else 0
        end = length if is_reversed else min(length, segment * (pieces - skip))
        some = end > begin and prod(p.lead if is_reversed else p.state_lead) != 0
        # The sum is the total; but a causal walk begins with what is before its first segment.
        sole = some and pieces == 1 and start is None and not self.causal
        alone = total if sole else None
        slots = alone or self.arrays.slots(name, pieces)
        if some:
            into = alone or slots.slot(skip if is_reversed else 0, p.d, p.e)
            span = Course(origin + begin, shift, end - begin, segment, 1, levelled=p.levelled)
            self.launches.append(self.sum_pieces(is_reversed, span, rows, into))
        if alone:
            return Cut(length_of_segment, slots, fine)
        states = {"slots": slots}
        states |= {"start": start} if start is not None else {}
        states |= {"total": total} if total is not None else {}
        given = self.p.levelled and not is_reversed and start is not None
        v = self.arrays.tensor("v") if given else None
        summed = some * (pieces - skip)
        scan = scan_launch(p, self.arrays.state_axes, pieces, summed, is_reversed, states, v)
        if adds:
            return Cut(length_of_segment, slots, fine, scan)
        if scan.grid:
            self.launches.append(scan)
        return Cut(length_of_segment, slots, fine)

    def sum_pieces(
        self, is_reversed: bool, span: Course, rows: dict[str, RowRef], into: StateRef
    ) -> Launch:
        """The pre-pass over `span`, whose chunks have one position each."""
        p, axes = self.p, self.arrays.state_axes
        names = ("q", "dout") if is_reversed else ("k", "v")
        tensors = {x: self.arrays.tensor(x) for x in names}

        def walk(spec: StateSpec | StreamedSpec) -> Walk:
            splits = -(-p.e // spec.columns) * -(-p.d // spec.inner)
            chunks, each = -(-span.chunks // spec.chunk), span.each // spec.chunk
            course = replace(span, chunks=chunks, each=each, splits=splits)
            return Walk(axes, course, tensors, rows, {"final": into})

        stream = self.prepass_spec(is_reversed)
        if isinstance(stream, StateSpec):
            return walk_launch(p, stream, walk(stream))
        spec = self.state_spec(is_reversed)
        launch = walk_launch(p, spec, walk(spec))
        made = stream_launch(p, stream, walk(stream), resident_blocks(stream, self.device))
        return launch if made is None else replace(made, instead=(launch,))

    def state_blocks(self, spec: StateSpec | StreamedSpec) -> int:
        """Blocks of a pre-pass for each piece."""
        splits = -(-self.p.e // spec.columns) * -(-self.p.d // spec.inner)
        return self.arrays.state_axes.heads * splits

    def relevel(self, given: StateRef, made: StateRef, sign: int) -> None:
        """The gradient of a state, from relative to 0 to relative to the level of v, or back."""
        states = {"from": given, "to": made}
        v = self.arrays.tensor("v")
        launch = relevel_launch(self.p, self.arrays.state_axes, states, v, sign)
        if launch.grid:
            self.launches.append(launch)

    def state_spec(self, is_reversed: bool) -> StateSpec:
        p = self.p
        feature = p.options.feature_map
        return state_spec(self.arith, feature, p.d, p.e, is_reversed, self.device)

    def prepass_spec(self, is_reversed: bool) -> StateSpec | StreamedSpec:
        """What sums over a piece: `stream` or `stream_key_value` where they can."""
        of = self.arith, self.p.options.feature_map, self.p.d, self.p.e
        ring = ring_state_spec(*of, is_reversed, self.device)
        if ring is not None and not self.narrow_arrays:
            return ring
        stream: StreamedSpec | None
        if not is_reversed:
            stream = stream_spec(KEYS, *of, True, self.device)
        elif self.why_not_key_value(QUERIES):
            stream = None
        else:
            stream = key_value_spec(QUERIES, *of, True, self.device)
        return stream or self.state_spec(is_reversed)

    def total(
        self,
        name: str,
        is_reversed: bool,
        rows: dict[str, RowRef],
        start: StateRef | None,
        result: StateRef | None,
    ) -> StateRef:
        """The sum over the whole sequence: what every row sees where nothing is masked."""
        spec = self.prepass_spec(is_reversed)
        length = self.positions(is_reversed)[2]
        room, cost = resident_blocks(spec, self.device), costs.granule(spec)
        blocks, together = self.state_blocks(spec), self.together(spec)
        cut = costs.segments(blocks, room, granules(length), cost, together=together)
        segment = segment_length(length, cut.count)
        total = result if result is not None else self.arrays.slots(f"{name}.total", 1)
        self.states(name, is_reversed, segment, rows, start, total)
        return total

    def course(self, spec: WalkSpec, cut: Cut, phase: str = "whole") -> Course:
        origin, shift, length = self.positions(spec.role in _BY_QUERY)
        return Course(
            origin=origin,
            query_shift=shift,
            chunks=-(-length // spec.chunk),
            each=cut.length // spec.chunk,
            splits=self.splits(spec),
            pieces=cut.pieces,
            adds=cut.scan is not None and isinstance(spec, StreamedSpec),
            phase=phase,
            levelled=self.p.levelled,
        )

    def walk(
        self,
        spec: SweepSpec | RingSpec | StreamSpec,
        cut: Cut,
        tensors: dict[str, Tensor],
        rows: dict[str, RowRef],
        final: StateRef | None = None,
    ) -> tuple[Launch, ...]:
        """The walk of one role; with `stream`, also that of `sweep`, for arrays without maps."""
        states = cut.states | ({"final": final} if final is not None else {})
        if isinstance(spec, StreamSpec):
            instead = self.walk(self.sweep_spec(spec.role), cut, tensors, rows, final)
            return self.stream(spec, cut, tensors, rows, states, instead)
        phases = ["whole"]
        if spec.through_features and self.splits(spec) > 1:
            # Its sums over a row cross blocks: they are made first.
            phases = ["dots", "apply"]
            rows = rows | {"dots": self.dots(spec)}
        walks = (
            Walk(self.axes(spec.role), self.course(spec, cut, phase), tensors, rows, states)
            for phase in phases
        )
        return tuple(walk_launch(self.p, spec, walk) for walk in walks if walk.grid)

    def dots(self, spec: SweepSpec | RingSpec) -> RowRef:
        """A workspace for the sums over a row of each split."""
        queries, splits = spec.role in _BY_QUERY, self.splits(spec)
        lead = self.arrays.lead if queries else self.arrays.state_lead
        count = self.p.n if queries else self.p.m
        name = f"dots.{spec.role}"
        self.arrays.workspace[name] = Buffer((*lead, count, splits, DOTS), self.p.state_dtype)
        return self.arrays.rows(name, lead, count, DOTS * splits)

    def stream(
        self,
        spec: StreamedSpec,
        cut: Cut,
        tensors: dict[str, Tensor],
        rows: dict[str, RowRef],
        states: dict[str, StateRef],
        instead: tuple[Launch, ...],
    ) -> tuple[Launch, ...]:
        """One launch, and what runs `instead` where addresses rule it out; that alone if strides do."""
        if cut.scan is not None:
            instead = (cut.scan, *instead)
        walk = Walk(self.axes(spec.role), self.course(spec, cut), tensors, rows, states)
        launch = stream_launch(self.p, spec, walk, resident_blocks(spec, self.device))
        if launch is not None:
            return (replace(launch, instead=instead),) if launch.grid else ()
        self.reasons.append(
            f"{spec.role} has no tensor maps: they take up to 3 leading axes, and strides that "
            f"are positive multiples of 16 bytes"
        )
        return instead

    def key_value_spec(self) -> KeyValueSpec | None:
        """What makes dk and dv in one walk, where there is such a kernel and nothing speaks against it."""
        of = self.p.d, self.p.e, self.causal, self.device
        spec = key_value_spec("GradKV", self.arith, "identity", *of)
        if spec is not None and (why := self.why_not_key_value("GradKV")):
            self.reasons.append(f"dk and dv are made in two walks: {why}")
            return None
        return spec

    def why_not_key_value(self, role: str) -> str:
        """What of the options, the heads and the length keeps dk and dv from being made in one walk."""
        axes, o = self.arrays.state_axes, self.p.options
        if o.feature_map != "identity":
            return (
                f"one walk makes them for the identity only, not for feature_map={o.feature_map!r}"
            )
        if self.positions(False)[2] <= GRANULE:
            return _ONE_CHUNK
        if o.qk_norm is not None and not 1 / _FARTHEST <= max(abs(o.a), abs(o.b)) <= _FARTHEST:
            return f"one walk multiplies a and b, here {o.a:g} and {o.b:g}, with lengths of rows"
        if role != QUERIES and not self.causal:
            return ""  # of queries, it only has their total
        if prod(axes.sizes[i] for i in axes.group) > 1:
            return "one walk does not sum over heads that share k and v"
        if o.b != 0 and abs(o.a) > _FARTHEST * abs(o.b):
            return f"one walk divides a by b, here {o.a:g} by {o.b:g}"
        return ""

    def forward(self, out: Tensor | None, den: RowRef, final: StateRef | None) -> None:
        """den, and where they are given a place, out and the final state."""
        p, arrays = self.p, self.arrays
        if out is not None and self.is_step():
            self.launches.append(self.step(out, den, final))
            return
        spec = self.spec("Forward")
        if out is not None:
            spec = self.narrowed(spec)
        initial = arrays.given_state("initial_state") if p.initial_state else None
        segment = self.walk_segment(spec)
        length = self.positions(True)[2]
        cut = Cut(segment, initial)
        if not self.causal:
            cut, final = Cut(segment, self.total("keys", False, {}, initial, final)), None
        elif segment < length:
            cut = self.states("keys", False, segment, {}, initial, None, spec)
        tensors = {"q": arrays.tensor("q")}
        if self.causal:
            tensors |= {"k": arrays.tensor("k"), "v": arrays.tensor("v")}
        if out is not None:
            tensors["dst"] = out
        self.launches += self.walk(spec, cut, tensors, {"den": den}, final)

    def is_step(self) -> bool:
        """Whether a few positions follow a state, so that it takes the time to read and write this."""
        p = self.p
        rows = p.n * prod(p.lead[i] for i in self.arrays.state_axes.group)
        return (
            p.initial_state is not None
            and 1 <= p.n <= STEP_KEYS
            and 1 <= p.m <= STEP_KEYS
            and 1 <= rows <= _STEP_ROWS
            and prod(p.state_lead) > 0
        )

    def step(self, out: Tensor, den: RowRef, final: StateRef | None) -> Launch:
        p, arrays = self.p, self.arrays
        self.reasons.append(
            f"{p.n} queries and {p.m} keys follow a state, which one launch reads and writes once"
        )
        spec = StepSpec(p.state_dtype == "float64", p.d)
        states = {"start": arrays.given_state("initial_state")}
        states |= {"final": final} if final is not None else {}
        shift = p.m - p.n if self.causal else p.m
        course = Course(0, shift, chunks=1, each=1, splits=-(-p.e // spec.columns))
        tensors = {name: arrays.tensor(name) for name in ("q", "k", "v")} | {"dst": out}
        walk = Walk(arrays.state_axes, course, tensors, {"den": den}, states)
        return step_launch(p, spec, walk)
