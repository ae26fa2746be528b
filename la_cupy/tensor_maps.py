"""Maps of arrays for the tensor memory accelerator of sm_90, made by the driver.

See kernels_cu/ptx/tma.cuh, and cuTensorMapEncodeTiled in the CUDA driver API.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from . import dtypes
from .params import MAP_BYTES

ALIGNMENT = 16
"""Bytes of which an array's address and its strides must be multiples."""

BOX = (64, 64)
"""Elements of a row, and rows, of what is copied at once."""

_AXES = 3  # leading ones
_DTYPES = {"bfloat16": 9, "float16": 6}
_SWIZZLE_128 = 3
_PROMOTE_128 = 2  # the second level cache fetches whole lines


@dataclass(frozen=True)
class TensorMap:
    """A map without an address: `sizes` and `strides` (bytes, but of the first) from columns to leading axes."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        dtype: str,
        columns: int,
        rows: int,
        row: int,
        lead: Sequence[int],
        sizes: Sequence[int],
    ) -> "tuple[TensorMap, tuple[int, ...]] | None":
        """The map of an array with strides `row` and `lead` (in elements), and the leading axes that it has.

        None if there is no such map.
        """
        item = dtypes.ITEMSIZE[dtype]
        axes = tuple(i for i, stride in enumerate(lead) if stride != 0)
        if len(axes) > _AXES or dtype not in _DTYPES or not 0 < rows < 1 << 31:
            return None
        spare = _AXES - len(axes)
        steps = [row if rows > 1 else 0, *(lead[i] for i in axes)]
        counts = [rows, *(sizes[i] for i in axes)]
        strides = [ALIGNMENT if n == 1 else s * item for s, n in zip(steps, counts, strict=True)]
        if any(s <= 0 or s % ALIGNMENT or s >= 1 << 40 for s in strides):
            return None
        found = cls(dtype, (columns, *counts, *[1] * spare), (*strides, *[ALIGNMENT] * spare))
        return found, axes


@lru_cache(maxsize=4096)
def encode(tensor_map: TensorMap, address: int) -> bytes:
    """The map of the array at `address`, as kernels take it."""
    rank = len(tensor_map.sizes)
    memory = ctypes.create_string_buffer(2 * MAP_BYTES)
    shift = -ctypes.addressof(memory) % 64
    u32, u64 = ctypes.c_uint32 * rank, ctypes.c_uint64 * rank
    failed = _encoder()(
        ctypes.addressof(memory) + shift,
        _DTYPES[tensor_map.dtype],
        rank,
        address,
        u64(*tensor_map.sizes),
        u64(*tensor_map.strides),
        u32(*BOX, *[1] * (rank - 2)),
        u32(*[1] * rank),
        0,  # not interleaved
        _SWIZZLE_128,
        _PROMOTE_128,
        0,  # zeros outside
    )
    if failed:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled returned {failed} for {tensor_map} at {address:#x}"
        )
    return memory.raw[shift : shift + MAP_BYTES]


@cache
def _encoder() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, number, number, pointer, *[pointer] * 4, *[number] * 4]
    return function
