"""The emulation that the kernel tests stand on: each ptx wrapper against NumPy, and the faults.

Fragment layouts are written out here a second time, as index formulas of the PTX manual.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulation import runner
from emulation.backend import emulated_map

from la_cupy.tensor_maps import TensorMap

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")

SELFCHECK = runner.HERE / "selfcheck.cu"
FAULTS = {
    0: r"thread 40 returns from the kernel, but thread 0 waits at sync_block \(.*check.cu:\d+\)",
    1: r"thread 40 returns from the kernel, but thread 0 waits at sync_block",
    2: r"thread 1 returns from the kernel, but thread 0 waits at sync_warp",
    3: r"thread 32 is at sync_block \(.*\), but thread 0 waits at sync_block",
    4: r"thread 3 returns from the kernel, but thread 0 waits at shuffle_xor",
    5: r"thread 3 is at sync_block .*, but thread 0 waits at shuffle_xor",
    6: r"thread 3 is at warp_any .*, but thread 0 waits at sync_warp",
    7: r"wrote behind its 256 bytes of shared memory, first at offset 256",
    8: r"uses memory that is not there, at 0x",
    9: r"uses memory that is not there, at 0x8",
    10: r"divides|undefined behaviour",
    11: r"load_16 at 0x\w+, which is not a multiple of 16",
    12: r"store_4, which is for global memory, at 0x\w+ in shared memory",
    13: r"gives ldmatrix the row 0x\w+, at offset 248 of 256 bytes",
    14: r"gives ldmatrix a row at offset 4, no multiple of 16",
    15: r"undefined behaviour: .*an index out of bounds",
    16: r"undefined behaviour: a misaligned pointer",
    17: r"uses memory that is not there",  # a stack that overflows
    18: r"uses memory that is not there",  # global memory: behind a fenced array, and before one
    19: r"uses memory that is not there",
    20: r"a deadlock: threads 0 to 31 wait at sync_named 1 \(.*\), threads 32 to 63 .* sync_named 2",
    21: r"a deadlock: threads 0 to 31 wait at sync_named 1 .*, threads 32 to 63 wait at sync_block",
    22: r"is at sync_named 1 \(.*\) for 32 threads, but thread 0 waits there \(.*\) for 64",
    23: r"thread 31 is at sync_named 1 \(.*\) for 64 threads, but thread 0 waits there .* for 32",
    24: r"thread 1 is at sync_named 2 \(.*\), but thread 0 waits at sync_named 1",
    25: r"is one more than the 32 threads of sync_named 1 \(.*\): thread 0 .* met there without it",
    26: r"thread 32 returns from the kernel, but thread 0 waits at sync_named 1",
    27: r"thread 3 is at sync_named 1 \(.*\), but thread 0 waits at sync_named 1",
    28: r"is at sync_named 0 \(.*\), allowed: 1 to 15",
    29: r"is at sync_named 1 \(.*\) for 48 threads, allowed: multiples of 32 up to 64",
}
WGMMA_FAULTS = {
    0: r"returns from the kernel, but no wgmma_commit follows wgmma \(.*check.cu:\d+\)",
    1: r"returns from the kernel, but no wgmma_wait follows wgmma \(",
    2: r"waits for products \(.*check.cu:\d+\), but no wgmma_commit follows wgmma \(",
    3: r"is at wgmma \(.*\), but no wgmma_fence opens the run of products",
    4: r"is at wgmma \(.*\), but no wgmma_fence opens the run of products",
    5: r"is at wgmma \(.*\), but no fence_async follows the last writes to a in shared memory",
    6: r"waits for products \(.*\), but lane 8 has written registers of wgmma \(.*\) meanwhile",
    7: r"is at wgmma \(.*\), where lane 3 gives a = .*, but lane 0 ",
    8: r"gives wgmma \(.*\) a = .*, but thread 31 of its warpgroup ",
    9: r"returns from the kernel, but thread 31 of its warpgroup was at wgmma \(",
    10: r"gives wgmma \(.*\) b = 0x8\w+, swizzle mode 2, allowed: mode 1",
    11: r"gives wgmma \(.*\) a at offsets 8192 to 16384 of 9216 bytes of shared memory",
    12: r"gives wgmma \(.*\) b at offset 32 of shared memory, allowed: multiples of 1024$",
    13: r"gives wgmma \(.*\) b at offset 128 .*: multiples of 1024, and 32, 64 or 96 behind",
    14: r"is at wgmma \(.*\) for registers of which products still queued have a part",
    15: r"gives wgmma_operand 0x\w+, at offset 9216 of 9216 bytes",
    16: r"gives wgmma_operand 0x\w+, at offset 8 of 9216 bytes .*, allowed: multiples of 16",
    17: r"gives stmatrix the row 0x\w+, at offset 9208 of 9216 bytes",
    18: r"gives wgmma \(.*\) b with atoms side by side 16 bytes apart, allowed: multiples of 1024",
    19: r"gives wgmma \(.*\) b at offsets 0 to 10240 of 9216 bytes of shared memory",
    20: r"gives wgmma_operand atoms side by side 1032 bytes apart, allowed: multiples of 16 up to",
}
MBARRIER_FAULTS = {
    0: r"thread 0 is at mbarrier_arrive \(.*check.cu:\d+\) for offset 80 .*no mbarrier_init was",
    1: r"thread 0 is at mbarrier_wait \(.*\) for offset 80 .*, where no mbarrier_init was",
    2: r"at mbarrier_init \(.*\) for offset 72 .* an mbarrier is there already \(.*check.cu:\d+\)",
    3: r"is at mbarrier_init \(.*\) with 0 arrivals, allowed: 1 to 1048575",
    4: r"thread 32 is at mbarrier_arrive \(.*\) for offset 64 .*, but its mbarrier was overwritten",
    5: r"thread 2 is at mbarrier_arrive \(.*\) and one more than the 2 arrivals .* at offset 64 has",
    6: r"a deadlock: threads 0 to 31 wait at mbarrier_wait \(.*check.cu:\d+\) for parity 0 at "
    r"offset 64, which lacks 2 of 2 arrivals, threads 32 to 39 wait at sync_warp \(.*\), thread 40 "
    r"waits at mbarrier_wait \(.*\) for parity 0 at offset 72, which lacks 1 of 1 arrivals, "
    r"threads 41 to 63 wait at sync_warp \(.*\)$",
    7: r"thread 63 was the last .* deadlock: threads 0 to 31 wait at .*, which lacks 1 of 2 arrivals$",
    8: r"is at mbarrier_wait \(.*\) for parity 2, allowed: 0 and 1",
    9: r"gives mbarrier_arrive \(.*\) offset 68 of shared memory, no multiple of 8",
    10: r"gives mbarrier_wait \(.*\) 0x\w+, at offset 256 of 256 bytes of shared memory",
    11: r"thread 0 is at mbarrier_arrive \(.*\) and ends a phase of the mbarrier at offset 64, but "
    r"thread 1, which waited for the one before at mbarrier_wait \(.*\), has not gone on",
}
COPY_FAULTS = {
    9: r"waits for copies, but offset 0 of shared memory, where one goes, was written meanwhile",
    10: r"uses copy_16 to offset 4 of shared memory, no multiple of 16",
    11: r"uses copy_16_or_zero to 0x\w+, at offset 2048 of 1024 bytes of shared memory",
    12: r"uses copy_16_or_zero at 0x\w+, which is not a multiple of 16",
    13: r"uses copy_16_or_zero, which is for global memory, at 0x\w+ in shared memory",
    14: r"uses memory that is not there",  # when it copies, not when it waits
    15: r"uses copy_16_or_zero of 17 bytes, allowed: 0 to 16",
    17: r"thread 3 uses memory that is not there",
}
BOX_FAULTS = {
    0: r"gives tma_load \(.*check.cu:\d+\) offset 512 of 9248 bytes .*, allowed: multiples of 1024",
    1: r"gives tma_load \(.*\) offset 2048 of 9248 bytes of shared memory",
    2: r"is at tma_load \(.*\) for offset 9224 of shared memory, where no mbarrier_init was",
    3: r"is at tma_load \(.*\) and brings 8192 bytes to the .* at offset 9216, which expects 0",
    4: r"is at mbarrier_arrive_expect \(.*\) and one more than the 1 arrivals",
    5: r"a deadlock: .* at offset 9216, which lacks 0 of 1 arrivals and 16 bytes$",
    6: r"is at tma_load \(.*\) and brings 8192 bytes to the .* at offset 9216, which expects 8176",
    7: r"is at tma_store \(.*\), but no fence_async follows the last writes to shared memory",
    8: r"is at tma_store \(.*\), but no fence_async follows the last writes to shared memory",
    9: r"gives tma_store \(.*\) coordinate -1 of axis 1, allowed: 0 and more",
    10: r"gives tma_store \(.*\) coordinate -1 of axis 4, allowed: 0 and more",
    11: r"is at tma_wait_read \(.*\), but no tma_commit follows tma_store \(.*check.cu:\d+\)",
    12: r"returns from the kernel, but no tma_commit follows tma_store \(",
    13: r"returns from the kernel, but no tma_wait_read follows tma_store \(",
    14: r"gives tma_store \(.*\) offset 512 of 9248 bytes of shared memory",
}
# Columns of the product, and where a comes from.
WGMMA_FORMS = [
    (columns, f"FromShared<{a}, {b}>")
    for columns in (8, 32, 64, 72, 128)
    for a in ("kAlongK", "kAcross") for b in ("kAlongK", "kAcross")
] + [
    (columns, f"FromRegisters<{b}>") for columns in (64, 72) for b in ("kAlongK", "kAcross")
]  # fmt: skip
WRAPPERS = [
    "Indices", "MmaBf16", "MmaTf32", "MmaF64", "Ldmatrix<false>", "Ldmatrix<true>",
    "Stmatrix<false>", "Stmatrix<true>", "Shuffles", "Conversions", "Memory", "Maths",
]  # fmt: skip
KERNELS = [
    *(f"per_lane<{wrapper}>" for wrapper in WRAPPERS),
    *(f"faulty<{number}>" for number in FAULTS),
    *(f"faulty_wgmma<{number}>" for number in WGMMA_FAULTS),
    *(f"warpgroup<{columns}, {form}>" for columns, form in WGMMA_FORMS),
    *(f"in_flight<{case}>" for case in range(7)),
    "unfenced_wgmma<128>", "unfenced_wgmma<64>",
    "gemm<64>", "exchange<true>", "exchange<false>", "la::unwritten",
    "roles<true>", "roles<false>", "bystander<true>", "bystander<false>",
    "writers<true>", "writers<false>", "la::alone",
    *(f"ring<{forgotten}>" for forgotten in range(5)),
    *(f"faulty_mbarrier<{number}>" for number in MBARRIER_FAULTS),
    *(f"copies<{case}>" for case in range(18)),
    "la::box_load", "box_store<true>", "box_store<false>",
    *(f"faulty_box<{number}>" for number in BOX_FAULTS),
]  # fmt: skip


class LaneParams(ctypes.Structure):
    _fields_ = [
        ("in_", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("in_words", ctypes.c_int),
        ("out_words", ctypes.c_int),
        ("mask", ctypes.c_int),
    ]


class GemmParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("repeats", ctypes.c_int),
    ]


class WgmmaParams(ctypes.Structure):
    _fields_ = [
        ("image", ctypes.c_void_p),
        ("registers", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("d", ctypes.c_void_p),
        ("words", ctypes.c_int),
        ("a", ctypes.c_int),
        ("b", ctypes.c_int),
        ("aside", ctypes.c_int),
        ("keep", ctypes.c_int),
    ]


class RingParams(ctypes.Structure):
    _fields_ = [("in_", ctypes.c_void_p), ("out", ctypes.c_void_p)]


class FaultParams(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("zero", ctypes.c_int)]


@pytest.fixture(scope="module")
def library() -> runner.Library:
    return runner.build(KERNELS, includes=[SELFCHECK])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def per_lane(library, wrapper, words, out_words, *, blocks=1, mask=0, shared_bytes=0):
    """Run one wrapper on `words` [blocks * threads, in_words]; [blocks * threads, out_words]."""
    words = runner.fenced(np.asarray(words, dtype=np.uint32))
    out = runner.fenced(np.zeros((len(words), out_words), np.uint32))
    params = LaneParams(words.ctypes.data, out.ctypes.data, words.shape[1], out_words, mask)
    threads = len(words) // blocks
    library.launch(f"per_lane<{wrapper}>", blocks, threads, shared_bytes, bytes(params))
    return out


def fault(library, kernel, *, out=None, **launch):
    out = np.zeros(64, np.float32) if out is None else out
    launch = {"grid": 1, "threads": 64, "shared_bytes": 256} | launch
    library.launch(kernel, params=bytes(FaultParams(out.ctypes.data, 0)), **launch)
    return out


def bf16_words(x):
    """Pairs along the last axis, the first in the low half."""
    return np.ascontiguousarray(x.astype(ml_dtypes.bfloat16)).view(np.uint32)


LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def test_thread_and_block_count_up(library):
    out = per_lane(library, "Indices", np.zeros((3 * 96, 1)), 3, blocks=3)
    np.testing.assert_array_equal(out[:, 0], np.repeat(np.arange(3), 96))
    np.testing.assert_array_equal(out[:, 1], np.tile(np.arange(96), 3))
    np.testing.assert_array_equal(out[:, 2], 3)


def accumulators(c):
    """The four accumulators of each lane out of c [16, 8]."""
    return np.stack([c[G, 2 * T], c[G, 2 * T + 1], c[G + 8, 2 * T], c[G + 8, 2 * T + 1]], axis=1)


def test_mma_bf16_multiplies_16x8x16(library, rng):
    a, b = rng.normal(size=(16, 16)), rng.normal(size=(16, 8))
    a, b = (x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b))
    c = rng.normal(size=(16, 8)).astype(np.float32)
    pair = np.stack([2 * T, 2 * T + 1], axis=1)
    a_words = [
        bf16_words(a[row[:, None], pair + k]) for row, k in [(G, 0), (G + 8, 0), (G, 8), (G + 8, 8)]
    ]
    b_words = [bf16_words(b[pair + k, G[:, None]]) for k in (0, 8)]
    words = np.concatenate([*a_words, *b_words, accumulators(c).view(np.uint32)], axis=1)
    out = per_lane(library, "MmaBf16", words, 4).view(np.float32)
    np.testing.assert_allclose(out, accumulators(c + a @ b), rtol=0, atol=4e-6)


def test_mma_tf32_multiplies_16x8x8_and_cuts_its_operands(library, rng):
    a = rng.normal(size=(16, 8)).astype(np.float32)
    b = rng.normal(size=(8, 8)).astype(np.float32)
    c = rng.normal(size=(16, 8)).astype(np.float32)
    a_lanes = np.stack([a[G, T], a[G + 8, T], a[G, T + 4], a[G + 8, T + 4]], axis=1)
    b_lanes = np.stack([b[T, G], b[T + 4, G]], axis=1)
    words = np.concatenate([a_lanes, b_lanes, accumulators(c)], axis=1).view(np.uint32)
    out = per_lane(library, "MmaTf32", words, 4).view(np.float32)
    cut_a, cut_b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
    exact = c + cut_a.astype(np.float64) @ cut_b.astype(np.float64)
    np.testing.assert_allclose(out, accumulators(exact), rtol=0, atol=4e-6)
    assert np.abs(out - accumulators(c + a @ b)).max() > 1e-4  # not float32 in disguise


def test_mma_f64_multiplies_8x8x4(library, rng):
    a, b, c = rng.normal(size=(8, 4)), rng.normal(size=(4, 8)), rng.normal(size=(8, 8))
    lanes = np.stack([a[G, T], b[T, G], c[G, 2 * T], c[G, 2 * T + 1]], axis=1)
    out = per_lane(library, "MmaF64", lanes.view(np.uint32), 4).view(np.float64)
    exact = c + a @ b
    np.testing.assert_allclose(
        out, np.stack([exact[G, 2 * T], exact[G, 2 * T + 1]], axis=1), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "trans"])
def test_ldmatrix_gives_each_lane_two_neighbours_of_each_matrix(library, rng, transposed):
    matrices = rng.integers(0, 1 << 16, size=(4, 8, 8), dtype=np.uint16)
    words = matrices.reshape(32, 8).view(np.uint32)  # lane 8i + r brings row r of matrix i
    name = f"Ldmatrix<{'true' if transposed else 'false'}>"
    out = per_lane(library, name, words, 4, shared_bytes=512).view(np.uint16).reshape(32, 4, 2)
    seen = matrices.swapaxes(1, 2) if transposed else matrices
    for i in range(4):
        np.testing.assert_array_equal(out[:, i, 0], seen[i][G, 2 * T])
        np.testing.assert_array_equal(out[:, i, 1], seen[i][G, 2 * T + 1])


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "trans"])
def test_stmatrix_writes_what_ldmatrix_would_read(library, rng, transposed):
    matrices = rng.integers(0, 1 << 16, size=(4, 8, 8), dtype=np.uint16)
    seen = matrices.swapaxes(1, 2) if transposed else matrices
    lanes = np.stack([seen[:, G, 2 * T], seen[:, G, 2 * T + 1]], axis=2)  # [4, 32, 2]
    words = np.ascontiguousarray(lanes.swapaxes(0, 1)).view(np.uint32)[:, :, 0]
    name = f"Stmatrix<{'true' if transposed else 'false'}>"
    out = per_lane(library, name, words, 4, shared_bytes=512)
    np.testing.assert_array_equal(out, matrices.reshape(32, 8).view(np.uint32))


def atoms(lines):
    """Shared memory, as bfloat16, where `lines` [8 n, 64] lie as wgmma wants them swizzled."""
    line, element = np.indices(lines.shape)
    packet = element // 8 ^ line % 8
    memory = np.empty(lines.size, ml_dtypes.bfloat16)
    memory[line // 8 * 512 + line % 8 * 64 + packet * 8 + element % 8] = lines
    return memory


def fragments(x):
    """What the lanes of a warpgroup hold of x [64, N], eight columns at a time: [128, N / 2]."""
    row = np.arange(4)[:, None] * 16 + G  # [warp, lane]
    values = [
        x[row + 8 * half, 8 * i + 2 * T + j]
        for i in range(x.shape[1] // 8)
        for half in (0, 1)
        for j in (0, 1)
    ]
    return np.ascontiguousarray(np.stack(values, axis=-1).reshape(128, -1))


@pytest.mark.parametrize("order", runner.ORDERS)
@pytest.mark.parametrize("keep", [False, True], ids=["anew", "keep"])
@pytest.mark.parametrize(("columns", "form"), WGMMA_FORMS)
def test_wgmma_multiplies_swizzled_operands(library, rng, columns, form, keep, order):
    a, b = rng.normal(size=(64, 64)), rng.normal(size=(64, columns))
    a, b = (x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b))
    c = rng.normal(size=(64, columns)).astype(np.float32)
    a_lines = a.T if "<kAcross" in form else a
    # What lies around the operands is NaN. a from registers: four fragments of 64 x 16.
    gap = np.full(512, np.nan, ml_dtypes.bfloat16)
    if form.endswith("kAcross>"):  # lines of 64 columns, whatever the product takes of them
        b_lines = np.pad(b, ((0, 0), (0, -columns % 64)), constant_values=np.nan)
        sides = np.split(b_lines, b_lines.shape[1] // 64, axis=1)
        b_atoms = [part for lines in sides for part in (atoms(lines), gap)]
    else:
        b_atoms = [atoms(b.T), gap]
    image = runner.fenced(np.concatenate([gap, atoms(a_lines), gap, *b_atoms]))
    steps = [fragments(a[:, 16 * k : 16 * k + 16]) for k in range(4)]
    registers = runner.fenced(bf16_words(np.stack(steps)))
    before = runner.fenced(fragments(c))
    out = runner.fenced(np.zeros_like(before))
    params = WgmmaParams(
        image.ctypes.data, registers.ctypes.data, before.ctypes.data, out.ctypes.data,
        image.nbytes // 4, 1024, 1024 + 8192 + 1024, 8192 + 1024, keep,
    )  # fmt: skip
    kernel = f"warpgroup<{columns}, {form}>"
    library.launch(kernel, 1, 128, image.nbytes, bytes(params), order=order)
    exact = fragments(a @ b + c * keep)
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("order", runner.ORDERS)
@pytest.mark.parametrize(
    ("case", "seen"),
    [(0, 16), (1, np.nan), (2, 64), (3, 16), (4, np.nan), (5, np.nan), (6, 32)],
)
def test_wgmma_runs_as_late_or_as_early_as_it_may(library, case, seen, order):
    if case == 2 and order == "early":
        seen = 16  # before its operands are overwritten
    out = np.zeros(128, np.float32)
    launch = {"threads": 128, "shared_bytes": 9216, "order": order}
    fault(library, f"in_flight<{case}>", out=out, **launch)
    np.testing.assert_array_equal(out, np.float32(seen))


@pytest.mark.parametrize("number", WGMMA_FAULTS)
def test_faults_of_wgmma_are_reported(library, number):
    launch = {"threads": 128, "shared_bytes": 9216}
    with pytest.raises(RuntimeError, match=WGMMA_FAULTS[number]):
        fault(library, f"faulty_wgmma<{number}>", **launch)
    out = fault(library, "in_flight<0>", out=np.zeros(128, np.float32), **launch)  # starts afresh
    np.testing.assert_array_equal(out, 16)


def test_wgmma_needs_a_fence_and_a_warpgroup(library):
    with pytest.raises(RuntimeError, match="no fence_async follows the last writes to a"):
        fault(library, "unfenced_wgmma<128>", threads=128, shared_bytes=9216)
    with pytest.raises(RuntimeError, match="its warpgroup has 2 of four warps"):
        fault(library, "unfenced_wgmma<64>", threads=64, shared_bytes=9216)


def test_a_fence_does_not_vouch_for_what_others_write_behind_it(library):
    launch = {"threads": 192, "shared_bytes": 3 * 9216 + 32}
    for order in ("forward", "reverse"):
        out = np.zeros(128, np.float32)
        fault(library, "writers<true>", out=out, order=order, **launch)
        np.testing.assert_array_equal(out, 16 * (1 + 2 + 4 + 8))
    # In reverse the fence of the one warp comes behind what the other writes, and vouches for it.
    with pytest.raises(RuntimeError, match=WGMMA_FAULTS[5].replace("to a", "to b")):
        fault(library, "writers<false>", out=out, **launch)


def ring(library, rng, forgotten, order):
    x = rng.normal(size=(6, 64, 4)).astype(np.float32)
    rows, out = runner.fenced(x), np.zeros((64, 4), np.float32)
    params = RingParams(rows.ctypes.data, out.ctypes.data)
    library.launch(f"ring<{forgotten}>", 1, 128, 2048 + 32, bytes(params), order=order)
    return out, np.einsum("t,tni->ni", [1, 2, 3, 0, 5, 6], x[:, np.arange(64) ^ 32])


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_mbarriers_hand_slots_from_warp_to_warp(library, rng, order):
    np.testing.assert_allclose(*ring(library, rng, 0, order), rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("forgotten", "message"),
    [
        (1, r"at mbarrier_arrive .* one more than the 2 arrivals .* nobody has waited for it"),
        (2, r"at mbarrier_arrive .* one more than the 2 arrivals .* nobody has waited for it"),
        (3, r"waits for copies, but offset \d+ .* was written meanwhile"),  # by the turn before
    ],
)
def test_a_ring_that_forgets_to_wait_is_noticed(library, rng, forgotten, message, order):
    with pytest.raises(RuntimeError, match=message):
        ring(library, rng, forgotten, order)


def test_a_slot_that_is_given_back_too_early_is_noticed_in_one_order(library, rng):
    assert np.isnan(ring(library, rng, 4, "reverse")[0]).any()  # who copies goes first


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_lane_may_wait_alone(library, order):
    np.testing.assert_array_equal(fault(library, "la::alone", order=order), 3)


@pytest.mark.parametrize("number", MBARRIER_FAULTS)
def test_faults_of_mbarriers_are_reported(library, number):
    with pytest.raises(RuntimeError, match=MBARRIER_FAULTS[number]):
        fault(library, f"faulty_mbarrier<{number}>")
    np.testing.assert_array_equal(fault(library, "la::alone"), 3)  # starts afresh


def copies(library, rng, case):
    x = runner.fenced(rng.normal(size=(3, 32, 4)).astype(np.float32))
    out = np.zeros((32, 4), np.float32)
    params = RingParams(x.ctypes.data, out.ctypes.data)
    library.launch(f"copies<{case}>", 1, 32, 1024, bytes(params))
    return out, x[0]


def test_copies_end_as_late_as_they_may(library, rng):
    for case in (0, 2, 5, 7):  # waited for
        np.testing.assert_array_equal(*copies(library, rng, case))
    for case in (1, 3, 4, 8):  # not: at all, of this group, of no group, at all
        assert np.isnan(copies(library, rng, case)[0]).all(), case
    np.testing.assert_array_equal(copies(library, rng, 6)[0], 0)
    part, whole = copies(library, rng, 16)
    whole.view(np.uint8)[np.arange(16) >= np.arange(32)[:, None] % 16] = 0
    np.testing.assert_array_equal(part.view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("case", COPY_FAULTS)
def test_faults_of_copies_are_reported(library, rng, case):
    with pytest.raises(RuntimeError, match=COPY_FAULTS[case]):
        copies(library, rng, case)
    np.testing.assert_array_equal(*copies(library, rng, 0))


def run_box(library, kernel, x, image, at=(0, 0, 0, 0, 0), rows=0, order="forward"):
    """Between an array of bfloat16 [..., rows, columns] and an image of shared memory."""
    *lead, row, one = (stride // x.itemsize for stride in x.strides)
    assert one == 1
    sizes = x.shape[:-2]
    found, axes = TensorMap.of("bfloat16", x.shape[-1], rows or x.shape[-2], row, lead, sizes)
    assert axes == tuple(range(len(lead)))
    params = emulated_map(found, x.ctypes.data) + image.ctypes.data.to_bytes(8, "little")
    params += np.array(at, np.int32).tobytes()
    library.launch(
        kernel, 1, 32 if "faulty" in kernel else 64, 9248, params.ljust(192, b"\0"), order=order
    )


def in_moat(x, side):
    """The same in rows of 104 elements, which are whole packets, and NaN behind; fenced."""
    parent = np.full((*x.shape[:-1], 104), np.nan, x.dtype)
    parent[..., : x.shape[-1]] = x
    parent = runner.fenced(parent, side)
    return parent[..., : x.shape[-1]], parent[..., x.shape[-1] :]


PLACES = [
    (column, row, *lead)
    for column in (0, 64, 128, -64)
    for row in (0, 5, 64, 69, 70, 1000, -1, -64, -1000)
    for lead in ((0, 0, 0), (1, 2, 0), (2, 0, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1))
]


def lines_at(x, place):
    """The 64 rows of 64 columns from there on, zeros where there is nothing."""
    column, row, *lead = place
    lines = np.zeros((64, 64), x.dtype)
    leads = (*x.shape[-3::-1], 1, 1)[:3]  # axes of a map go from the inner to the outer
    if all(0 <= i < n for i, n in zip(lead, leads, strict=True)):
        inner = x[tuple(lead[: x.ndim - 2][::-1])]
        rows, columns = np.arange(row, row + 64), np.arange(column, column + 64)
        there = (rows >= 0) & (rows < x.shape[-2]), (columns >= 0) & (columns < x.shape[-1])
        lines[np.ix_(*there)] = inner[np.ix_(rows[there[0]], columns[there[1]])]
    return lines


@pytest.mark.parametrize("side", ["before", "behind"])
def test_boxes_are_loaded_swizzled_and_zeros_outside(library, rng, side):
    x, _ = in_moat(rng.normal(size=(2, 3, 70, 100)).astype(ml_dtypes.bfloat16), side)
    for place in PLACES:
        image = np.zeros((64, 64), ml_dtypes.bfloat16)
        # TensorMap.of takes the leading axes in any order: here from the inner to the outer
        run_box(library, "la::box_load", x.swapaxes(0, 1), image, place)
        np.testing.assert_array_equal(
            image.view(np.uint16).ravel(), atoms(lines_at(x, place)).view(np.uint16), str(place)
        )


@pytest.mark.parametrize("side", ["before", "behind"])
def test_boxes_are_stored_where_there_is_something(library, rng, side):
    for place in PLACES:
        if min(place) < 0:
            continue  # an illegal instruction, see BOX_FAULTS
        x, moat = in_moat(rng.normal(size=(2, 3, 70, 100)).astype(ml_dtypes.bfloat16), side)
        lines = rng.normal(size=(64, 64)).astype(ml_dtypes.bfloat16)
        before, around = x.copy(), moat.tobytes()
        run_box(library, "box_store<true>", x.swapaxes(0, 1), atoms(lines), place)
        numbers = np.arange(1, x.size + 1, dtype=np.float64).reshape(x.shape)  # where it goes
        where = lines_at(numbers, place)
        before.reshape(-1)[where[where > 0].astype(int) - 1] = lines[where > 0]
        np.testing.assert_array_equal(x.view(np.uint16), before.view(np.uint16), str(place))
        assert moat.tobytes() == around, "wrote between the rows"


@pytest.mark.parametrize("order", runner.ORDERS)
def test_a_store_reads_as_late_or_as_early_as_it_may(library, rng, order):
    lines = rng.normal(size=(64, 64)).astype(ml_dtypes.bfloat16)
    late = lines if order == "early" else np.ones_like(lines)
    for waits, seen in (("true", lines), ("false", late)):
        x = runner.fenced(np.zeros((64, 64), ml_dtypes.bfloat16))
        run_box(library, f"box_store<{waits}>", x, atoms(lines), order=order)
        np.testing.assert_array_equal(x.view(np.uint16), seen.view(np.uint16))


@pytest.mark.parametrize("number", BOX_FAULTS)
def test_faults_of_boxes_are_reported(library, rng, number):
    x = runner.fenced(rng.normal(size=(64, 64)).astype(ml_dtypes.bfloat16))
    image = np.zeros((64, 64), ml_dtypes.bfloat16)
    with pytest.raises(RuntimeError, match=BOX_FAULTS[number]):
        run_box(library, f"faulty_box<{number}>", x, image)
    run_box(library, "la::box_load", x, image)  # starts afresh
    np.testing.assert_array_equal(image.view(np.uint16).ravel(), atoms(x).view(np.uint16))


def test_a_map_of_more_than_there_is_is_noticed(library, rng):
    x = runner.fenced(rng.normal(size=(64, 64)).astype(ml_dtypes.bfloat16))
    image = np.zeros((64, 64), ml_dtypes.bfloat16)
    for kernel in ("la::box_load", "box_store<true>"):
        with pytest.raises(RuntimeError, match="uses memory that is not there"):
            run_box(library, kernel, x, image, (0, 32, 0, 0, 0), rows=65)


@pytest.mark.parametrize("mask", [1, 2, 4, 8, 16, 31])
def test_shuffle_and_vote_stay_in_their_warp(library, rng, mask):
    words = rng.integers(8, 1 << 32, size=(64, 4), dtype=np.uint32)
    words[40, 0] = 7  # the number that warp_any looks for, in the second warp only
    out = per_lane(library, "Shuffles", words, 5, mask=mask)
    np.testing.assert_array_equal(out[:, :4], words[np.arange(64) ^ mask])
    np.testing.assert_array_equal(out[:, 4], np.arange(64) >= 32)


def test_conversions_round_as_numpy_and_ml_dtypes_do(library, rng):
    x = rng.normal(size=(32, 2)) * 10.0 ** rng.integers(-9, 9, size=(32, 2))
    x = x.astype(np.float32)
    # Ties in bfloat16, in float16 and in TF32; overflow; zeros and infinities; a NaN.
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 65520, 1 + 2**-11, -1 - 2**-11]
    x[:12, 0] = [*ties, 3.4e38, 0, -0.0, np.inf, -np.inf, 1e-45, np.nan]
    x[:12, 1] = x[11::-1, 0]
    out = per_lane(library, "Conversions", x.view(np.uint32), 8)
    with np.errstate(over="ignore"):
        bf16, f16 = x.astype(ml_dtypes.bfloat16), x.astype(np.float16)
    np.testing.assert_array_equal(out[:, 4:6].view(np.float32), bf16.astype(np.float32))
    np.testing.assert_array_equal(out[:, 6:8].view(np.float32), f16.astype(np.float32))
    numbers = ~np.isnan(x)  # of a NaN the sign and payload are the instruction's own
    halves = out.view(np.uint16)
    np.testing.assert_array_equal(halves[:, 0:2][numbers], bf16.view(np.uint16)[numbers])
    np.testing.assert_array_equal(halves[:, 2:4][numbers], f16.view(np.uint16)[numbers])
    np.testing.assert_array_equal(halves[:, 6], halves[:, 0])
    np.testing.assert_array_equal(halves[:, 7], halves[:, 3])
    # TF32, to nearest and ties away: the float64 mantissa leaves room to add half a unit exactly.
    mantissa, exponent = np.frexp(x[:, 0].astype(np.float64))
    nearest = np.ldexp(np.trunc(mantissa * 2**11 + np.copysign(0.5, mantissa)), exponent - 11)
    normal = (np.abs(x[:, 0]) > 1e-37) & (np.abs(x[:, 0]) < 1e38)
    np.testing.assert_array_equal(out[:, 2].view(np.float32)[normal], nearest[normal])
    assert normal.sum() > 20
    assert np.isnan(out[11, 2].view(np.float32))


def test_memory_moves_every_width(library, rng):
    words = rng.integers(0, 1 << 32, size=(32, 8), dtype=np.uint32)
    np.testing.assert_array_equal(per_lane(library, "Memory", words, 8), words)


def test_maths_agrees_with_numpy(library, rng):
    x = np.abs(rng.normal(size=(32, 1))).astype(np.float32)
    out = per_lane(library, "Maths", x.view(np.uint32), 10)
    z = x.astype(np.float64)
    exact = np.concatenate([np.exp(z), 1 / np.sqrt(z), z * z + z], axis=1)
    np.testing.assert_allclose(out[:, :3].view(np.float32), exact, rtol=3e-7)
    np.testing.assert_array_equal(out[:, 3:4].view(np.float32), np.sqrt(x))
    np.testing.assert_allclose(np.ascontiguousarray(out[:, 4:]).view(np.float64), exact, rtol=1e-15)


def gemm(library, rng, *, repeats=1, blocks=8, order="forward"):
    x, y = (
        runner.fenced(rng.normal(size=(blocks, 64, 64)).astype(ml_dtypes.bfloat16))
        for _ in range(2)
    )
    out = runner.fenced(np.full((blocks, 64, 64), np.nan, np.float32))
    params = GemmParams(x.ctypes.data, y.ctypes.data, out.ctypes.data, repeats)
    shared_bytes = 2 * 64 * (64 + 8) * 2
    library.launch("gemm<64>", blocks, 128, shared_bytes, bytes(params), order=order)
    return out, x.astype(np.float64) @ y.astype(np.float64).swapaxes(1, 2)


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_matrix_kernel_runs_as_on_a_gpu(library, rng, order):
    out, exact = gemm(library, rng, repeats=2, order=order)
    np.testing.assert_allclose(out, 2 * exact, rtol=0, atol=2e-4)


def test_the_portable_context_switch_works_too(rng):
    library = runner.build(
        ["gemm<64>", "faulty<1>", "faulty<8>"], [SELFCHECK], flags=["-DLA_EMULATION_UCONTEXT"]
    )
    for number in (1, 8):
        with pytest.raises(RuntimeError, match=FAULTS[number]):
            fault(library, f"faulty<{number}>")
        out, exact = gemm(library, rng, blocks=2)
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", FAULTS)
def test_faults_are_reported(library, number):
    out = runner.fenced(np.zeros(16, np.float32), side="before" if number == 19 else "behind")
    with pytest.raises(RuntimeError, match=FAULTS[number]):
        fault(library, f"faulty<{number}>", out=out)


@pytest.mark.parametrize("side", ["before", "behind"])
def test_a_fenced_array_is_a_copy_like_any_other(rng, side):
    x = rng.normal(size=(5, 7)).astype(ml_dtypes.bfloat16)
    copy = runner.fenced(x, side=side)
    assert copy.dtype == x.dtype and copy.flags.writeable and copy.ctypes.data % 16 == 0
    np.testing.assert_array_equal(copy.view(np.uint16), x.view(np.uint16))
    assert runner.fenced(x[:0]).shape == (0, 7)


def test_a_launch_after_a_fault_starts_afresh(library, rng):
    for number in (1, 8, 15):
        with pytest.raises(RuntimeError):
            fault(library, f"faulty<{number}>")
        out, exact = gemm(library, rng, blocks=1)
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-4)


def test_the_place_of_a_trap_is_named(library):
    if shutil.which("addr2line") is None:
        pytest.skip("naming the line of a trap needs addr2line of binutils")
    text = SELFCHECK.read_text().splitlines()
    line = next(i for i, words in enumerate(text, 1) if "x[zero + 4]" in words)
    with pytest.raises(RuntimeError, match=rf"selfcheck\.cu:{line}\)$"):
        fault(library, "faulty<15>")


def test_shared_memory_is_nan_at_the_start_of_every_block(library):
    out = fault(library, "la::unwritten", grid=2, threads=32)
    assert np.isnan(out).all()


def test_the_two_orders_disagree_where_a_barrier_is_missing(library):
    right = (np.arange(64) + 32) % 64
    for order in ("forward", "reverse"):
        np.testing.assert_array_equal(fault(library, "exchange<true>", order=order), right)
    forward, reverse = (fault(library, "exchange<false>", order=o) for o in ("forward", "reverse"))
    assert np.isnan(forward[:32]).all() and np.isnan(reverse[32:]).all()


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_groups_of_warps_meet_at_barriers_of_their_own(library, order):
    launch = {"threads": 128, "shared_bytes": 1024, "order": order}
    right = 5 * np.arange(64) + 100 * (0 + 1 + 2 + 3 + 4)
    np.testing.assert_array_equal(fault(library, "roles<true>", **launch), right)
    unmet = fault(library, "roles<false>", **launch)  # the first to run reads too early
    assert np.isnan(unmet[32:] if order == "forward" else unmet[:32]).all()
    assert fault(library, "bystander<false>", **launch)[:32].all()
    with pytest.raises(RuntimeError, match="thread 64 (returns|has returned) from the kernel"):
        fault(library, "bystander<true>", **launch)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"threads": 48}, "threads = 48, allowed: multiples of 32"),
        ({"threads": 2048}, "threads = 2048, allowed: up to 1024"),
        ({"grid": 0}, "grid = 0"),
        ({"shared_bytes": 1 << 20}, "shared_bytes = 1048576, allowed: up to 232448"),
    ],
)
def test_launches_that_hardware_refuses_are_refused(library, launch, message):
    with pytest.raises(RuntimeError, match=message):
        fault(library, "exchange<true>", **launch)


def test_params_of_another_size_are_refused(library):
    with pytest.raises(RuntimeError, match="params of 8 bytes, Params has 16"):
        library.launch("exchange<true>", 1, 64, 256, bytes(8))


SMALL = """
namespace la {
struct Out { int* out; };
template <int x> LA_KERNEL(32, 1) set(const Out params) { params.out[ptx::thread()] = VALUE; }
}
"""


def run_small(library):
    out = np.zeros(32, np.int32)
    library.launch(0, 1, 32, 0, bytes(ctypes.c_void_p(out.ctypes.data)))
    return out


def test_a_build_is_cached_by_its_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("LA_CUPY_EMULATION_CACHE", str(tmp_path))
    first = runner.build(["set<3>"], extra_sources=[SMALL.replace("VALUE", "x")])
    again = runner.build(["set<3>"], extra_sources=[SMALL.replace("VALUE", "x")])
    other = runner.build(["set<3>"], extra_sources=[SMALL.replace("VALUE", "x + 1")])
    assert first.path == again.path != other.path
    assert sorted(tmp_path.iterdir()) == sorted([first.path, other.path])  # no stage is left
    assert (run_small(again) == 3).all() and (run_small(other) == 4).all()


def test_a_source_can_be_mutated(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "small.cu").write_text(SMALL.replace("VALUE", "x"))
    monkeypatch.setattr(runner, "KERNELS", tmp_path / "kernels")
    monkeypatch.setenv("LA_CUPY_EMULATION_CACHE", str(tmp_path / "cache"))
    mutated = runner.build(["set<3>"], ["small.cu"], replace={"small.cu": [("= x", "= -x")]})
    assert (run_small(mutated) == -3).all()
    assert (run_small(runner.build(["set<3>"], ["small.cu"])) == 3).all()
    with pytest.raises(ValueError, match="'= y' does not occur in small.cu"):
        runner.build(["set<3>"], ["small.cu"], replace={"small.cu": [("= y", "")]})
    with pytest.raises(ValueError, match="'large.cu', which is not a file of kernels_cu"):
        runner.build(["set<3>"], ["small.cu"], replace={"large.cu": [("x", "y")]})


def test_a_source_that_does_not_compile_is_an_error():
    with pytest.raises(RuntimeError, match=r"(?s)g\+\+ .* failed:.*nonsense"):
        runner.build([], extra_sources=["nonsense;"])


def signatures(directory: Path) -> dict[str, set[str]]:
    """The functions of each wrapper file: result, name and parameters, without their marks."""
    found = {}
    for path in sorted(directory.glob("*.cuh")):
        text = path.read_text()
        text = re.sub(r"(?s)namespace emulation \{.*?\}  // namespace emulation", "", text)
        text = re.sub(r"(, )?LA_EMULATION_SITE", "", text)
        marks = r"^(template <[^<>]*> )?(LA_DEVICE|LA_EMULATION_INLINE|inline) +"
        text = re.sub(marks, "", text, flags=re.MULTILINE)
        lines = re.findall(r"^(\w[\w ]*\*? \w+\([^{;]*\)) \{", text, re.MULTILINE)
        found[path.name] = {" ".join(line.split()) for line in lines}
    return found


def test_the_emulated_wrappers_are_the_real_ones_by_name_and_type():
    real, emulated = signatures(runner.KERNELS / "ptx"), signatures(runner.HERE / "ptx")
    assert real == emulated
    assert sum(map(len, real.values())) > 30
