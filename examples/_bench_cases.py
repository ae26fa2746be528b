"""The shapes that are timed, the inputs made for them, and the bytes each must move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# A unit is the size of one of q, k, v, out. Forward reads q, k, v and writes out; backward reads
# q, k, v, dout and writes dq, dk, dv. Whatever else a program moves is its own loss.
FORWARD_UNITS = 4
BACKWARD_UNITS = 7


@dataclass(frozen=True)
class Case:
    """One shape: batch B, N tokens, H heads, width D = E, and a type."""

    b: int
    n: int
    h: int
    d: int
    dtype: str

    @property
    def unit_bytes(self) -> int:
        return self.b * self.n * self.h * self.d * int(DTYPES[self.dtype].itemsize)

    def roof_ms(self, units: int, bytes_per_second: float) -> float:
        """The time that moving `units` takes at the copy bandwidth measured in the same run."""
        return 1e3 * units * self.unit_bytes / bytes_per_second

    def __str__(self) -> str:
        return f"{self.b}x{self.n}x{self.h}x{self.d}:{self.dtype}"


@dataclass(frozen=True)
class Inputs:
    """q, k, v, dout, each seen as (B, H, N, D) whatever order its memory has."""

    q: Any
    k: Any
    v: Any
    dout: Any

    @property
    def nbytes(self) -> int:
        return sum(int(x.nbytes) for x in (self.q, self.k, self.v, self.dout))


def _cases(text: str) -> list[Case]:
    return [parse_case(word) for word in text.split()]


def parse_case(text: str) -> Case:
    """BxNxHxD:dtype, as in 8x4096x16x128:bfloat16."""
    sizes, _, dtype = text.partition(":")
    parts = sizes.split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"a shape is written BxNxHxD:dtype, as in 8x4096x16x128:bfloat16: {text}")
    if dtype not in DTYPES:
        raise ValueError(f"the dtype of a shape is one of {', '.join(DTYPES)}: {text}")
    b, n, h, d = (int(part) for part in parts)
    return Case(b, n, h, d, dtype)


def named_cases() -> dict[str, list[Case]]:
    """The sets that --shapes knows by name."""
    return {
        # what the README's table is made of, and what the published baselines were measured on
        "baselines": _cases(
            "8x2048x16x128:bfloat16 8x4096x16x128:bfloat16 8x4096x16x128:float16 "
            "32x512x16x128:bfloat16 1x8192x64x128:bfloat16 1x131072x16x128:bfloat16 "
            "4x16384x16x64:bfloat16 4x1024x16x64:float32 "
            "4x4096x16x64:float32 4x16384x16x64:float32 4x65536x16x64:float32"
        ),
        # the same number of tokens in ever fewer sequences: short ones show the fixed costs
        "sweep": [Case(2**18 // n, n, 16, 128, "bfloat16") for n in (2**p for p in range(7, 18))],
        "quick": _cases("8x4096x16x128:bfloat16 4x16384x16x64:float32"),
        "cpu": _cases("1x4096x8x64:float32 1x8192x8x64:float32 1x16384x8x64:float32"),
        "cpu-quick": _cases("1x128x2x16:float32 1x256x2x16:float32 2x100x2x24:bfloat16"),
    }


def select_cases(text: str | None, device: str, quick: bool) -> list[Case]:
    """--shapes: names of sets and shapes, separated by commas; by default what suits the device."""
    if text is None:
        text = {"gpu": "quick" if quick else "baselines", "cpu": "cpu-quick" if quick else "cpu"}[
            device
        ]
    named = named_cases()
    chosen = [c for word in text.split(",") for c in named.get(word) or [parse_case(word)]]
    return list(dict.fromkeys(chosen))


def make_inputs(xp: Any, case: Case, seed: int, layout: str = "bhnd") -> Inputs:
    """Normally distributed inputs; layout "bnhd" lays the heads inside the tokens in memory."""
    rng = xp.random.default_rng(seed)
    shape = {"bhnd": (case.b, case.h, case.n, case.d), "bnhd": (case.b, case.n, case.h, case.d)}
    wide = np.float64 if case.dtype == "float64" else np.float32

    def draw() -> Any:
        x = narrow(rng.standard_normal(shape[layout], dtype=wide), case.dtype)
        return x if layout == "bhnd" else x.swapaxes(1, 2)

    return Inputs(draw(), draw(), draw(), draw())


def narrow(x: Any, dtype: str) -> Any:
    """float32 or float64 rounded to `dtype`, to nearest even.

    bfloat16 goes through its bits, which works under every version of every array library.
    """
    if dtype != "bfloat16":
        return x.astype(DTYPES[dtype], copy=False)
    bits = x.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16).view(DTYPES["bfloat16"])


def widen(x: Any) -> Any:
    """Any of our types as float64, exactly."""
    if x.dtype != DTYPES["bfloat16"]:
        return x.astype(np.float64)
    bits = x.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64)


def positive(x: Any) -> Any:
    """|x|; for bfloat16 by clearing the sign bit."""
    if x.dtype != DTYPES["bfloat16"]:
        return abs(x)
    return (x.view(np.uint16) & np.uint16(0x7FFF)).view(DTYPES["bfloat16"])


def sets_needed(case: Case, l2_bytes: int, at_most: int = 16) -> int:
    """How many input sets to rotate among, so that none is still in the L2 when it comes again."""
    return min(at_most, max(2, math.ceil(3 * l2_bytes / (FORWARD_UNITS * case.unit_bytes))))
