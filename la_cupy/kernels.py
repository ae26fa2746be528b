"""Which specialisation of a kernel runs: its C++ name, its threads and its shared memory.

A specialisation is fixed by types and padded widths. Lengths, batches, strides, a and b
are parameters of the launch: a new length never compiles.
"""

from dataclasses import dataclass

from .device import DeviceInfo

ARITHMETIC = {"bfloat16": "Bf16", "float16": "Tf32", "float64": "F64"}
"""float16 is computed in TF32, which holds its numbers exactly and its sums without overflow."""
FEATURES = {"identity": "Identity", "elu1": "Elu1", "relu": "Relu", "silu": "Silu", "exp": "Exp"}
ROLES = ("Forward", "GradQ", "GradV", "GradK")

_ELEMENT = {"Bf16": 2, "Tf32": 4, "Tf32x3": 4, "F64": 8}
_MAX_COLUMNS = 128
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
    halves: int

    @property
    def element(self) -> int:
        """Bytes of an element of a shared tile."""
        return _ELEMENT[self.arith]

    @property
    def accumulator(self) -> int:
        """Bytes of an accumulator."""
        return 8 if self.arith == "F64" else 4

    @property
    def column_warps(self) -> int:
        """Warps that share the result's columns among them."""
        return self.columns // (8 * self.slices)

    @property
    def warps(self) -> int:
        return self.column_warps * self.halves

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def _tile(self, width: int) -> int:
        return self.chunk * width * self.element


@dataclass(frozen=True)
class SweepSpec(KernelSpec):
    """`sweep`: the walk that makes out, dq, dk or dv."""

    role: str
    row: int
    causal: bool

    source = "sweep.cu"

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return (
            f"la::sweep<la::SweepConfig<la::{self.arith}, la::{self.role}, la::{FEATURES[self.feature]}, "
            f"{self.inner}, {self.columns}, {self.row}, {self.chunk}, {self.slices}, "
            f"{self.halves}, {str(self.causal).lower()}>>"
        )

    @property
    def through_features(self) -> bool:
        return self.role in ("GradQ", "GradK")

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of the configuration."""
        tiles = self._tile(self.inner) + self._tile(self.columns)  # A and the stage
        if self.causal:
            weights = max(self.chunk, 128 // self.element)
            tiles += self._tile(self.inner) + self._tile(self.columns) + self._tile(weights)
        if self.through_features:
            tiles += self._tile(self.columns)
        if self.halves == 2:
            tiles += self.chunk * self.columns * self.accumulator  # what the halves exchange
        row_blocks = self.chunk // 16
        groups = max(1, min(row_blocks, self.warps // row_blocks))
        numbers = 6 * self.inner + 2 * self.columns + self.warps * (self.inner + self.columns)
        numbers += self.chunk * (groups + 4 + 3 * self.warps + 2)
        return tiles + 64 + numbers * self.accumulator

    @property
    def registers(self) -> int:
        """A rough count of the registers a thread needs for data; see _BUDGET."""
        words = self.accumulator // 4
        state = self.slices * self.inner // 4 // self.halves
        partial = self.chunk // 16 * 4 * self.slices
        own = partial // self.halves * (2 if self.role == "GradQ" else 1)
        if self.role in ("GradV", "GradK") and self.halves == 2:
            own += partial  # kept from member to member of a group
        columns = self.row if self.through_features else self.columns
        rows = self.inner * (2 if self.causal else 1)
        rows += columns * (self.causal + self.through_features)
        waiting = self.chunk * rows * self.element // (4 * self.threads)
        return words * (state + max(partial, own)) + waiting


@dataclass(frozen=True)
class StateSpec(KernelSpec):
    """`accumulate`: what a piece of the sequence adds to the state."""

    reversed: bool

    source = "accumulate.cu"

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return (
            f"la::accumulate<la::StateConfig<la::{self.arith}, la::{FEATURES[self.feature]}, "
            f"{str(self.reversed).lower()}, {self.inner}, {self.columns}, {self.chunk}, "
            f"{self.slices}, {self.halves}>>"
        )

    @property
    def shared_bytes(self) -> int:
        """kSharedBytes of the configuration."""
        numbers = self.warps * (self.inner + self.columns + 1)
        return self._tile(self.inner) + self._tile(self.columns) + numbers * self.accumulator

    @property
    def registers(self) -> int:
        """As of SweepSpec."""
        words = self.accumulator // 4
        state = self.slices * self.inner // 4 // self.halves
        rows = self.chunk * (self.inner + self.columns) * self.element // (4 * self.threads)
        return words * state + rows


@dataclass(frozen=True)
class ScanSpec:
    """`scan`: from the pieces' sums to the states before them."""

    double: bool

    source = "scan.cu"
    threads = 256
    shared_bytes = 0

    @property
    def name(self) -> str:
        """The kernel's C++ name."""
        return f"la::scan<{'double' if self.double else 'float'}>"


Spec = SweepSpec | StateSpec | ScanSpec


def _column_choices(width: int, arith: str) -> list[int]:
    """Column blocks to try: the whole width first, then cut, then wider than need be."""
    first = min(padded(width, arith), _MAX_COLUMNS)
    smallest = padded(1, arith)
    smaller = [first >> i for i in range(1, 8) if first >> i >= smallest]
    larger = [first << i for i in range(1, 8) if first << i <= _MAX_COLUMNS]
    return [first, *larger, *smaller]


def _slices(arith: str, inner: int) -> int:
    # 16 columns of a float64 state with 256 inner columns would not fit a warp's registers.
    return 1 if arith == "F64" and inner >= 128 else 2


class NoKernelError(Exception):
    """No specialisation fits this device: a fault of the tables here, not of the caller."""


# What data may take of a thread's registers, by warps that share columns: 1 with 255 registers, 2
# with 128. The rest is for operands and addresses; measured with ptxas, so that nothing spills.
_BUDGET = {
    "Bf16": {1: 144, 2: 90},
    "Tf32": {1: 144, 2: 80},
    "Tf32x3": {1: 144, 2: 64},
    "F64": {1: 144, 2: 0},
}


def _tilings(arith: str) -> list[tuple[int, int]]:
    """(chunk, halves) to try, the fastest first."""
    return [(64, 2), (64, 1), (32, 2), (32, 1), (16, 1)]


def sweep_spec(
    role: str, arith: str, feature: str, d: int, e: int, causal: bool, device: DeviceInfo
) -> SweepSpec:
    """The specialisation of `sweep` for widths d and e on `device`."""
    key_features = role in ("Forward", "GradV")
    inner = padded(d if key_features else e, arith)
    width = e if key_features else d
    for columns in _column_choices(width, arith):
        row = columns if key_features else max(columns, padded(width, arith))
        for chunk, halves in _tilings(arith):
            spec = SweepSpec(
                arith=arith,
                feature=feature,
                inner=inner,
                columns=columns,
                chunk=chunk,
                slices=_slices(arith, inner),
                halves=halves,
                role=role,
                row=row,
                causal=causal,
            )
            if _fits(spec, device):
                return spec
    raise NoKernelError(f"sweep {role} {arith} D={d} E={e} on {device}")


def state_spec(
    arith: str, feature: str, d: int, e: int, is_reversed: bool, device: DeviceInfo
) -> StateSpec:
    """The specialisation of `accumulate` for widths d and e on `device`."""
    inner = padded(d, arith)
    for columns in _column_choices(e, arith):
        for chunk, halves in _tilings(arith):
            spec = StateSpec(
                arith=arith,
                feature=feature,
                inner=inner,
                columns=columns,
                chunk=chunk,
                slices=_slices(arith, inner),
                halves=halves,
                reversed=is_reversed,
            )
            if _fits(spec, device):
                return spec
    raise NoKernelError(f"accumulate {arith} D={d} E={e} on {device}")


def _fits(spec: SweepSpec | StateSpec, device: DeviceInfo) -> bool:
    row_blocks, warps = spec.chunk // 16, spec.warps
    tiles = warps % row_blocks == 0 or row_blocks % warps == 0
    if spec.halves == 2:
        tiles = tiles and spec.chunk >= 32 and spec.inner >= 64 and spec.threads <= 512
    budget = _BUDGET[spec.arith][spec.halves]
    return tiles and spec.shared_bytes <= device.shared_per_block and spec.registers <= budget


def resident_blocks(spec: SweepSpec | StateSpec, device: DeviceInfo) -> int:
    """Blocks that run at once on the device: the registers and the shared memory bound them."""
    by_registers = max(1, (512 if spec.halves == 2 else 256) // spec.threads)
    by_shared = device.shared_per_multiprocessor // (spec.shared_bytes + _BLOCK_RESERVED)
    return device.multiprocessors * max(1, min(by_registers, by_shared))
