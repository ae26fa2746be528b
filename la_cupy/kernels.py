"""Which specialisation of a kernel runs: its C++ name, its threads and its shared memory.

A specialisation is fixed by types and padded widths. Lengths, batches, strides, a and b
are parameters of the launch: a new length never compiles.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

from .checks import FEATURE_MAPS
from .device import DeviceInfo
from .params import DOTS, MAX_RANK, STEP_KEYS, STEP_QUERIES, STEP_WIDTH

ARITHMETIC = {"bfloat16": "Bf16", "float16": "Tf32", "float64": "F64"}
"""float16 is computed in TF32, which holds its numbers exactly and its sums without overflow."""
WGMMA = "Bf16Wgmma"
"""What takes the place of Bf16 on sm_90a for D and E up to 128: see kernels_cu/chunk/warpgroup.cuh."""
STREAM = "Bf16Stream"
"""The same, in `stream`: see kernels_cu/stream.cu."""
EXPONENTIAL = ("elu1", "exp", "silu")
"""Feature maps for which `stream` has too few warps: 0.50 ms on `sweep`, 0.74 on `stream`, on an H200."""
FEATURES = {name: name.capitalize() for name in FEATURE_MAPS}
"""The policies of kernels_cu/chunk/features.cuh."""
ROLES = ("Forward", "GradQ", "GradV", "GradK")
KEYS = "Keys"
"""The role of `stream` that makes no result: it sums over keys, as `accumulate` does."""

QUERIES = "Queries"
"""The same of `stream_key_value`, over queries."""

RING_CHUNK = 32
"""Rows of a chunk of `ring`. With 64, fewer of its blocks have room on a multiprocessor: 1.13 ms
instead of 0.75 at 4 x 16384 x 16 x 64 on an H200."""

_ELEMENT = {"Bf16": 2, WGMMA: 2, STREAM: 2, "Tf32": 4, "Tf32x3": 4, "F64": 8}
_STREAM_SHARED = 232448  # shared memory of a block on sm_90
_RING_SHARED = 233472  # that of a multiprocessor, for which `ring` is compiled
_BLOCK_RESERVED = 1024  # shared memory that CUDA itself takes from a multiprocessor for a block


def arithmetic(compute: str, precision: str) -> str:
    """The arithmetic policy (kernels_cu/tile/arith.cuh) for `compute` numbers."""
    if compute == "float32":
        return "Tf32x3" if precision == "highest" else "Tf32"
    return ARITHMETIC[compute]


def padded(width: int, arith: str) -> int:
    """The width of a tile that holds `width` columns: a power of two, whole 128-byte lines."""
    return max(32, 128 // _ELEMENT[arith], 1 << (width - 1).bit_length())


@dataclass(frozen=True)
class KernelSpec:
    """One specialisation of `sweep` or `accumulate`; see kernels_cu/chunk/config.cuh."""

    arith: str
    feature: str
    inner: int
    columns: int
    chunk: int
    slices: int

    @property
    def target(self) -> str | None:
        """The arch to compile for, where that of the device is not enough."""
        return "sm_90a" if self.arith in (WGMMA, STREAM) else None

    @property
    def element(self) -> int:
        """Bytes of an element of a shared tile."""
        return _ELEMENT[self.arith]

    @property
    def packet(self) -> int:
        """Elements of a row that are read together."""
        return 16 // self.element

    @property
    def accumulator(self) -> int:
        """Bytes of an accumulator."""
        return 8 if self.arith == "F64" else 4

    @property
    def workers(self) -> int:
        """Warps that share the result's columns among them."""
        return self.columns // (8 * self.slices)

    def _tile(self, width: int) -> int:
        return self.chunk * width * self.element


@dataclass(frozen=True)
class SweepSpec(KernelSpec):
    """`sweep`: the walk that makes out, dq, dk or dv."""

    role: str
    row: int
    loaders: int  # warps that bring the rows
    causal: bool

    source = "sweep.cu"

    @property
    def threads(self) -> int:
        return 32 * (self.workers + self.loaders)

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return (
            f"la::sweep<la::SweepConfig<la::{self.arith}, la::{self.role}, la::{FEATURES[self.feature]}, "
            f"{self.inner}, {self.columns}, {self.row}, {self.chunk}, {self.slices}, "
            f"{self.loaders}, {str(self.causal).lower()}>>"
        )

    @property
    def through_features(self) -> bool:
        return self.role in ("GradQ", "GradK")

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of the configuration."""
        tiles = self._tile(self.inner) + self.through_features * self._tile(self.columns)
        if self.causal:
            tiles += self._tile(self.inner) + self._tile(self.columns)
        copies = 1 if self.arith == "F64" else 2
        tiles = copies * tiles + 2 * self._tile(self.columns)  # the stage exists twice in any case
        if self.causal:
            ones = self.arith == WGMMA and self.role == "GradQ"
            tiles += (1 + ones) * self._tile(max(self.chunk, 128 // self.element))
        if self.arith == WGMMA:  # eight lines for vectors, and twice for delta
            tiles += 8 * (self.inner + 2 * 64) * self.element
        row_blocks = self.chunk // 16
        groups = max(1, min(row_blocks, self.workers // row_blocks))
        numbers = (6 + self.loaders) * self.inner + 2 * self.columns
        numbers += max(self.loaders * self.columns, self.inner if self.role == "GradQ" else 0)
        numbers += self.chunk * (groups + 8 + DOTS * self.workers + 4)
        return tiles + 192 + numbers * self.accumulator

    @property
    def waiting(self) -> int:
        """Registers of a loader in which rows wait for their turn."""
        columns = self.row if self.through_features else self.columns
        if self.arith == "F64":  # fetched one by one
            return self.chunk * max(self.inner, columns) * self.element // (4 * 32 * self.loaders)
        widths = self.inner + self.through_features * columns
        widths += self.causal * (self.inner + columns)
        return self.chunk * widths * self.element // (4 * 32 * self.loaders)

    @property
    def resident(self) -> int:
        """Blocks for which a multiprocessor has registers; kMinBlocks of the configuration."""
        if max(self.inner, self.row) * self.element >= 512 or self.arith == "F64":
            return 1
        if self.arith == WGMMA and self.inner == 128:
            return 1
        return max(1, (384 if 2 * self.loaders <= self.workers else 512) // self.threads)


@dataclass(frozen=True)
class RingSpec(KernelSpec):
    """`ring`: what `sweep` does, over arrays of float32; see kernels_cu/ring/config.cuh."""

    role: str
    causal: bool

    source = "ring.cu"

    @property
    def threads(self) -> int:
        return 32 * self.workers

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return (
            f"la::ring<la::RingConfig<la::{self.arith}, la::{self.role}, la::{FEATURES[self.feature]}, "
            f"{self.inner}, {self.columns}, {self.chunk}, {str(self.causal).lower()}>>"
        )

    @property
    def through_features(self) -> bool:
        return self.role in ("GradQ", "GradK")

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of the configuration."""
        through, by_query = self.through_features, self.role in ("Forward", "GradQ")
        inner, columns, chunk, workers = self.inner, self.columns, self.chunk, self.workers
        tiles = self._tile(inner) + through * self._tile(columns)
        tiles += self.causal * (self._tile(inner) + self._tile(columns))
        weights = self.causal * self._tile(max(chunk, 32))
        groups = max(1, min(chunk // 16, workers // (chunk // 16)))
        numbers = (2 + 4 * (self.role == "GradQ") + through) * inner + 2 * columns
        numbers += chunk * (by_query * groups + 8 + 4 * through)
        summed = {"Forward": inner, "GradQ": inner, "GradK": columns, "GradV": 0}[self.role]
        dots = {"Forward": 1, "GradQ": DOTS, "GradK": DOTS, "GradV": 0}[self.role]
        numbers += workers * max(self.causal * summed, chunk * dots)
        return 2 * tiles + weights + 192 + 4 * numbers

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor; kMinBlocks of the configuration."""
        return _ring_blocks(self)


def _ring_blocks(spec: "RingSpec | RingStateSpec") -> int:
    """Blocks of a multiprocessor: `ring_blocks` of kernels_cu/ring/config.cuh."""
    many = spec.inner > 64 or (spec.feature in EXPONENTIAL and spec.arith == "Tf32x3")
    room = _RING_SHARED // (spec.shared_bytes + _BLOCK_RESERVED)
    return max(1, min(room, (256 if many else 384) // spec.threads))


@dataclass(frozen=True)
class _RoleWarpsSpec(KernelSpec):
    """A walk on sm_90a, chunks passing through warps with roles of their own."""

    role: str

    resident = 1

    @property
    def has_rows(self) -> bool:
        """Whether it makes results, and not only sums."""
        return self.role not in (KEYS, QUERIES)

    @property
    def suppliers(self) -> int:
        """Warps that transform rows; kSupplyWarps of the configuration."""
        return 4 if self.has_rows else 8

    @property
    def has_scores(self) -> bool:
        """Whether there are score warps."""
        return self.has_rows

    @property
    def threads(self) -> int:
        return 32 * (self.workers + 4 * self.has_scores + self.suppliers + 4)


@dataclass(frozen=True)
class StreamSpec(_RoleWarpsSpec):
    """`stream`: what `sweep` does for out and dq, and the sums over keys."""

    causal: bool

    source = "stream.cu"

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return (
            f"la::stream<la::StreamConfig<la::{self.arith}, la::{self.role}, "
            f"la::{FEATURES[self.feature]}, {self.inner}, {self.columns}, {str(self.causal).lower()}>>"
        )

    @property
    def _behind(self) -> int:
        """Bytes of shared memory behind the slots."""
        gradient, workers = self.role == "GradQ", self.workers
        weights = self.causal * ((2 if self.has_rows else 1) * 72 * 128 + gradient * 64 * 128)
        stage = (self.has_rows and not gradient) * self._tile(self.columns)
        numbers = (10 if gradient else 4) * 64
        numbers += (self.causal and not gradient) * 8 * self.inner
        numbers += gradient * (6 * self.inner + (workers + 4) * 64)
        return weights + stage + 4 * numbers + 16 * 224 + 8 * 48

    @property
    def _rows(self) -> int:
        """Bytes of a chunk's rows."""
        x = self.role == "GradQ" and self._tile(self.columns)
        return self.has_rows * 72 * self.inner * self.element + x

    @property
    def _sources(self) -> int:
        return self.causal * (72 * self.inner * self.element + self._tile(self.columns))

    @property
    def row_slots(self) -> int:
        """Chunks whose rows are there or on their way; kRowSlots of the configuration."""
        if self.role == "GradQ" and self.causal:
            return min(3, (_STREAM_SHARED - self._behind) // (self._rows + self._sources))
        return self.slots

    @property
    def slots(self) -> int:
        """The same of sources, and of rows where they come together; kSlots of the configuration."""
        room = _STREAM_SHARED - self._behind
        if self.role == "GradQ" and self.causal:
            return min(6, (room - self.row_slots * self._rows) // self._sources)
        return min(6, room // (self._rows + self._sources))

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of the configuration."""
        return self.slots * self._sources + self.row_slots * self._rows + self._behind


@dataclass(frozen=True)
class KeyValueSpec(_RoleWarpsSpec):
    """`stream_key_value`: dk and dv in one walk backwards, and the sums over queries."""

    causal: bool

    source = "stream_key_value.cu"
    reversed = True

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return (
            f"la::stream_key_value<la::KeyValueConfig<la::{self.arith}, la::{self.role}, "
            f"la::{FEATURES[self.feature]}, {self.inner}, {str(self.causal).lower()}>>"
        )

    @property
    def has_scores(self) -> bool:
        """Where rows meet queries; kOwnRows of the configuration."""
        return self.has_rows and self.causal

    @property
    def slots(self) -> int:
        """Chunks of sources, or else of rows, that are there or on their way; kSlots of the configuration."""
        if self.inner == 64 or not self.has_rows:
            return 6
        return 3 if self.causal else 5

    @property
    def row_slots(self) -> int:
        """The same of rows; kRowSlots of the configuration."""
        if self.has_scores:
            return 2 if self.inner == 128 else 4
        return self.slots if self.has_rows else 1

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of the configuration."""
        slots, rows, tile = self.slots, self.row_slots, self._tile(self.inner)
        tiles = 2 * slots * tile
        tiles += self.has_scores * (2 * rows * tile + 2 * 72 * 128)
        tiles += self.inner * self.inner * 2 if self.has_rows else 2 * slots * 8 * 128
        numbers = (2 * slots + 3 * rows) * 64 + self.inner // 2 + (self.workers + 1) * 64
        numbers += self.suppliers
        return tiles + 4 * numbers + 16 * 240 + 8 * 48


@dataclass(frozen=True)
class StateSpec(KernelSpec):
    """`accumulate`: what a piece of the sequence adds to the state."""

    row: int
    reversed: bool

    source = "accumulate.cu"

    @property
    def threads(self) -> int:
        return 32 * self.workers

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return (
            f"la::accumulate<la::StateConfig<la::{self.arith}, la::{FEATURES[self.feature]}, "
            f"{str(self.reversed).lower()}, {self.inner}, {self.row}, {self.columns}, {self.chunk}, "
            f"{self.slices}>>"
        )

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of the configuration."""
        numbers = self.workers * (self.inner + self.columns + 1)
        return self._tile(self.inner) + self._tile(self.columns) + numbers * self.accumulator

    @property
    def waiting(self) -> int:
        """Registers of a thread in which rows wait for their turn."""
        return self.chunk * (self.row + self.columns) * self.element // (4 * self.threads)

    @property
    def resident(self) -> int:
        """Blocks for which a multiprocessor has registers."""
        return max(1, 256 // self.threads)


@dataclass(frozen=True)
class RingStateSpec(StateSpec):
    """`ring_sums`: what `accumulate` does, over arrays of float32."""

    source = "ring_sums.cu"

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return (
            f"la::ring_sums<la::RingSumsConfig<la::{self.arith}, la::{FEATURES[self.feature]}, "
            f"{str(self.reversed).lower()}, {self.inner}, {self.columns}, {self.chunk}>>"
        )

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of the configuration."""
        return 2 * (-(-super().shared_bytes // 128) * 128)  # of both slots

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor; kMinBlocks of the configuration."""
        return _ring_blocks(self)


@dataclass(frozen=True)
class ScanSpec:
    """`scan`: from the pieces' sums to the states before them."""

    double: bool

    target = None
    source = "scan.cu"
    threads = 256
    shared_bytes = 0

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return f"la::scan<{'double' if self.double else 'float'}>"


@dataclass(frozen=True)
class RelevelSpec:
    """`relevel`: what the caller gives or gets of a state's gradient, and what the kernels use."""

    double: bool

    target = None
    source = "relevel.cu"
    threads = 256
    shared_bytes = 0

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return f"la::relevel<{'double' if self.double else 'float'}>"


@dataclass(frozen=True)
class StepSpec:
    """`step`: the forward pass of a few positions that follow a state."""

    double: bool
    d: int  # of its threads; all widths have one kernel

    target = None
    source = "step.cu"

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return f"la::step<{'double' if self.double else 'float'}>"

    @property
    def threads(self) -> int:
        return -(-self.d // 32) * 32

    @property
    def packet(self) -> int:
        """Numbers that are read together; kVector of the kernel."""
        return 2 if self.double else 4

    @property
    def columns(self) -> int:
        """Columns of a state that a block has; kColumns of the kernel."""
        return 16 * self.packet

    @property
    def shared_bytes(self) -> int:
        """Of struct Shared of the kernel."""
        keys, queries, width, size = STEP_KEYS, STEP_QUERIES, STEP_WIDTH, 8 if self.double else 4
        numbers = (keys + queries + 1) * width + (keys + 1 + queries * width // 32) * self.columns
        return (numbers + queries) * size + 20 * queries + 4 * MAX_RANK + 8


StreamedSpec = StreamSpec | KeyValueSpec  # whose arrays need tensor maps
WalkSpec = SweepSpec | RingSpec | StreamedSpec
Spec = WalkSpec | StateSpec | ScanSpec | RelevelSpec | StepSpec


def _slices(arith: str, inner: int) -> int:
    # 16 columns of a float64 state with 256 inner columns would not fit a warp's registers.
    return 1 if arith == "F64" and inner >= 128 else 2


class NoKernelError(ValueError):
    """No specialisation fits the device: wide float64 where a block has little shared memory."""

    def __init__(self, arith: str, d: int, e: int, device: DeviceInfo) -> None:
        kind = {"F64": "float64"}.get(arith, arith)
        super().__init__(
            f"{kind} arrays with D = {d} and E = {e} need more shared memory than the "
            f"{device.shared_per_block} bytes a block has on this GPU (sm_{device.arch}): "
            f"use float32, or D and E up to 128"
        )


# (rows of a chunk, loaders for each worker) to try, the fastest first, by arithmetic and the wider of inner axis and row.
# Measured on an H200, and with ptxas so that nothing spills; registers and shared memory decide among them.
_Tilings = tuple[tuple[int, float], ...]
_HALF: _Tilings = ((32, 0.5), (16, 0.5))
_SHORT: _Tilings = ((16, 1), (16, 0.5))
_FLOAT32: dict[int, _Tilings] = {32: _SHORT, 64: _SHORT, 128: ((16, 1),), 256: ((16, 1),)}
_SWEEPS: dict[str, dict[int, _Tilings]] = {
    "Bf16": {64: _HALF, 128: _HALF, 256: ((16, 1),)},
    WGMMA: {64: ((64, 1),), 128: ((64, 1),)},  # but see sweep_spec
    "Tf32": _FLOAT32,
    "Tf32x3": _FLOAT32,
    "F64": {width: ((16, 1),) for width in (32, 64, 128, 256)},
}
# Tried where nothing else fits: with little shared memory there is room for few columns, whose one or two loaders are too few
# for the rows.
_LAST: _Tilings = ((16, 2),)
_STATE_CHUNKS = {"Bf16": (64, 32, 16), "Tf32": (32, 16), "Tf32x3": (32, 16), "F64": (16,)}


def _widest(arith: str, width: int) -> int:
    """Columns of a block that has registers and warps for rows of `width` columns."""
    return 64 if width * _ELEMENT[arith] >= 512 or arith == "F64" else 128


def _columns(width: int, arith: str, widest: int) -> list[int]:
    """Column blocks to try: the whole width, if a block can hold the state; wider; narrower.

    A block of few columns has few loaders, which may be too few for the width of the rows.
    """
    first, smallest = min(padded(width, arith), widest), padded(1, arith)
    wider = [first << i for i in range(1, 8) if first << i <= widest]
    return [first, *wider, *(first >> i for i in range(1, 8) if first >> i >= smallest)]


def sweep_spec(
    role: str,
    arith: str,
    feature: str,
    d: int,
    e: int,
    causal: bool,
    device: DeviceInfo,
    shared: bool = False,
) -> SweepSpec:
    """The specialisation of `sweep` for widths d and e on `device`.

    `shared`: several heads of q have k and v in common.
    """
    sums_heads = causal and shared and role in ("GradV", "GradK")
    if arith == "Bf16" and device.arch == 90 and max(d, e) <= 128 and not sums_heads:
        arith = WGMMA
    key_features = role in ("Forward", "GradV")
    inner = padded(d if key_features else e, arith)
    width = e if key_features else d
    slices = _slices(arith, inner)
    widest = max(inner, 0 if key_features else padded(width, arith))
    blocks = _columns(width, arith, _widest(arith, widest))
    for columns, (chunk, share) in (
        *product(blocks, _SWEEPS[arith][widest]),
        *product(blocks, _LAST if arith != WGMMA else ()),
    ):
        row = columns if key_features else max(columns, padded(width, arith))
        workers = columns // (8 * slices)
        if arith == WGMMA and role == "GradQ" and inner == columns == 128:
            share = 0.5  # with two results it has most to do, and needs the registers
        spec = SweepSpec(
            arith=arith,
            feature=feature,
            inner=inner,
            columns=columns,
            chunk=chunk,
            slices=slices,
            role=role,
            row=row,
            loaders=max(1, int(workers * share)),
            causal=causal,
        )
        if _fits(spec, device):
            return spec
    raise NoKernelError(arith, d, e, device)


def stream_spec(
    role: str, arith: str, feature: str, d: int, e: int, causal: bool, device: DeviceInfo
) -> StreamSpec | None:
    """The specialisation of `stream`, where there is one."""
    if (
        arith != "Bf16"
        or device.arch != 90
        or max(d, e) > 128
        or role not in ("Forward", "GradQ", KEYS)
    ):
        return None
    if feature in EXPONENTIAL:
        return None
    inner, columns = (e, d) if role == "GradQ" else (d, e)
    spec = StreamSpec(
        arith=STREAM,
        feature=feature,
        inner=padded(inner, STREAM),
        columns=padded(columns, STREAM),
        chunk=64,
        slices=2,
        role=role,
        causal=causal,
    )
    return spec if spec.shared_bytes <= device.shared_per_block else None


def key_value_spec(
    role: str, arith: str, feature: str, d: int, e: int, causal: bool, device: DeviceInfo
) -> KeyValueSpec | None:
    """The specialisation of `stream_key_value`, where there is one."""
    width = padded(d, STREAM)
    if arith != "Bf16" or device.arch != 90 or max(d, e) > 128 or feature != "identity":
        return None
    if width != padded(e, STREAM):
        return None
    spec = KeyValueSpec(STREAM, feature, width, width, 64, 2, role, causal)
    return spec if spec.shared_bytes <= device.shared_per_block else None


def _has_ring(arith: str, d: int, e: int, device: DeviceInfo) -> bool:
    return arith in ("Tf32", "Tf32x3") and device.arch == 90 and max(d, e) <= 128


def _ring_widths(arith: str, inner: int, columns: int) -> tuple[int, int]:
    """Padded: a warp has 16 columns, and two of them too few registers for rows of 128."""
    rows = padded(inner, arith)
    return rows, max(padded(columns, arith), rows // 2)


def ring_spec(
    role: str, arith: str, feature: str, d: int, e: int, causal: bool, device: DeviceInfo
) -> RingSpec | None:
    """The specialisation of `ring`, where there is one; its arrays must be of float32."""
    if not _has_ring(arith, d, e, device):
        return None
    widths = _ring_widths(arith, *((d, e) if role in ("Forward", "GradV") else (e, d)))
    spec = RingSpec(arith, feature, *widths, RING_CHUNK, 2, role, causal)
    return spec if spec.shared_bytes <= device.shared_per_block else None


def ring_state_spec(
    arith: str, feature: str, d: int, e: int, is_reversed: bool, device: DeviceInfo
) -> RingStateSpec | None:
    """The specialisation of `ring_sums`, where there is one; its arrays must be of float32."""
    if not _has_ring(arith, d, e, device):
        return None
    inner, columns = _ring_widths(arith, d, e)
    spec = RingStateSpec(arith, feature, inner, columns, RING_CHUNK, 2, inner, is_reversed)
    return spec if spec.shared_bytes <= device.shared_per_block else None


def state_spec(
    arith: str, feature: str, d: int, e: int, is_reversed: bool, device: DeviceInfo
) -> StateSpec:
    """The specialisation of `accumulate` for widths d and e on `device`."""
    row = padded(d, arith)
    inner = min(row, 128)
    for columns in _columns(e, arith, 64 if arith == "F64" else 128):
        for chunk in _STATE_CHUNKS[arith]:
            spec = StateSpec(
                arith=arith,
                feature=feature,
                inner=inner,
                columns=columns,
                chunk=chunk,
                slices=_slices(arith, inner),
                row=row,
                reversed=is_reversed,
            )
            if _fits(spec, device):
                return spec
    raise NoKernelError(arith, d, e, device)


def _fits(spec: SweepSpec | StateSpec, device: DeviceInfo) -> bool:
    if spec.shared_bytes > device.shared_per_block:
        return False
    if spec.arith == "F64" and spec.threads > 256:  # it needs all of 255 registers
        return False
    row_blocks, warps = spec.chunk // 16, spec.workers
    tiles = warps % row_blocks == 0 or row_blocks % warps == 0
    if spec.arith == WGMMA:
        return True
    if isinstance(spec, StateSpec):
        few = spec.reversed or (spec.arith == "Tf32x3" and device.arch == 120)
        most = 64 if spec.arith == "F64" else 24 if few else 32
    elif spec.resident == 1 and spec.threads <= 256:  # 255 registers, half of them for what waits
        most = 48 if spec.arith == "F64" and spec.threads < 256 else 128
    elif 2 * spec.loaders <= spec.workers:  # 168
        most = 72
    else:  # 128
        most = 31 if spec.role == "GradK" else 39
    return tiles and spec.waiting <= most


@cache
def resident_blocks(spec: WalkSpec | StateSpec, device: DeviceInfo) -> int:
    """Blocks that run at once on the device: the registers and the shared memory bound them."""
    by_shared = device.shared_per_multiprocessor // (spec.shared_bytes + _BLOCK_RESERVED)
    return device.multiprocessors * max(1, min(spec.resident, by_shared))
