"""What a case is, and the arrays that go into it.

Values are drawn in float64, rounded to the case's types and laid out in memory as it asks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from la_cupy import reference
from la_cupy.results import State

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

LAYOUTS = (
    "contiguous",
    "swapaxes",  # the head axis of a (B, N, H, D) array brought forward
    "fused",  # columns of a wider row, 16-byte aligned, NaN on both sides (a QKV projection)
    "unaligned",  # the same, one element off: no vector load is possible
    "reversed",  # negative stride over the rows
    "reversed_last",  # negative stride over the columns
    "transposed",  # columns not contiguous
    "stride0",  # leading axes of stride 0
    "stride0_rows",  # row axis of stride 0: all rows are one row
    "scalar",  # every stride 0, as the gradient of a sum is
)


@dataclass(frozen=True)
class Case:
    """One call of the operator and of its gradient. Shapes are those of the arrays passed."""

    name: str
    q: tuple[int, ...] = (2, 33, 16)
    k: tuple[int, ...] = (2, 33, 16)
    v: tuple[int, ...] = (2, 33, 16)
    dtype: str = "float32"
    k_dtype: str | None = None
    v_dtype: str | None = None
    dout_dtype: str | None = None  # default: the type of out
    causal: bool = False
    a: float = 1.0
    b: float = 1.0
    qk_norm: str | None = "l2"
    feature_map: str = "identity"
    normalize: bool = True
    precision: str = "highest"
    initial: str | None = None  # "full": leading axes of k with v; "shared": none; "wide": q's
    initial_dtype: str | None = None  # default: the state's type
    dstate: str | None = None  # "full" or "shared"
    layout: str = "contiguous"
    dout_layout: str | None = None  # default: layout
    data: str = "normal"
    dout_scale: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the public functions."""
        return {**self.reference_options, "precision": self.precision}

    @property
    def reference_options(self) -> dict[str, Any]:
        """Keywords of the reference, which knows one precision."""
        names = ("causal", "a", "b", "qk_norm", "feature_map", "normalize")
        return {name: getattr(self, name) for name in names}

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """Types of q, k, v."""
        return self.dtype, self.k_dtype or self.dtype, self.v_dtype or self.dtype

    @property
    def out_dtype(self) -> str:
        """Type of out."""
        return promote(*self.dtypes)

    @property
    def compute(self) -> str:
        """What the arithmetic is done for: a key of BUDGETS."""
        compute = promote(self.out_dtype, self.dout_dtype or self.out_dtype)
        return "tf32" if compute == "float32" and self.precision == "tf32" else compute

    @property
    def forward_compute(self) -> str:
        """The same for the forward pass, which knows nothing of dout."""
        return (
            "tf32" if self.out_dtype == "float32" and self.precision == "tf32" else self.out_dtype
        )

    @property
    def small(self) -> bool:
        """Cheap enough for a backend that emulates every thread of a GPU."""
        n, m, width = self.q[-2], self.k[-2], max(self.q[-1], self.v[-1])
        heads = math.prod(self.lead)
        return max(n, m) <= 80 and (
            (width <= 72 and heads <= 12) or (max(n, m) <= 50 and heads <= 2)
        )

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of out."""
        return np.broadcast_shapes(
            self.q[:-2], self.k[:-2], self.v[:-2], *(x[0] for x in self.initial_shapes or ())
        )

    @property
    def state_lead(self) -> tuple[int, ...]:
        """Leading axes of the final state."""
        return np.broadcast_shapes(
            self.k[:-2], self.v[:-2], *(x[0] for x in self.initial_shapes or ())
        )

    @property
    def initial_shapes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None:
        """(leading axes, own axes) of each part of the initial state."""
        if self.initial is None:
            return None
        lead = {
            "full": np.broadcast_shapes(self.k[:-2], self.v[:-2]),
            "shared": (),
            "wide": np.broadcast_shapes(self.q[:-2], self.k[:-2], self.v[:-2]),
        }[self.initial]
        d, e = self.q[-1], self.v[-1]
        return tuple((lead, own) for own in ((d, e), (d,), (e,), ()))

    def __str__(self) -> str:
        return self.name


class Inputs(NamedTuple):
    """NumPy arrays of one case."""

    q: Any
    k: Any
    v: Any
    dout: Any
    initial_state: State | None
    dstate: State | None

    def map(self, f: Callable[[Any], Any]) -> Inputs:
        """The same with ``f`` applied to each array, for instance to bring it to a device."""
        state, dstate = (
            None if s is None else State(*(f(part) for part in s))
            for s in (self.initial_state, self.dstate)
        )
        return Inputs(f(self.q), f(self.k), f(self.v), f(self.dout), state, dstate)

    def arrays(self) -> list[Any]:
        """All arrays there are."""
        return [
            *(self.q, self.k, self.v, self.dout),
            *(self.initial_state or ()),
            *(self.dstate or ()),
        ]


def promote(*names: str) -> str:
    """Result type of an operation on these types."""
    kinds = set(names)
    if len(kinds) == 1:
        return names[0]
    return "float64" if "float64" in kinds else "float32"


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """The arrays of a case; the same for the same case and seed, whatever the backend."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    q, k, v = _values(case, rng)
    dout = case.dout_scale * rng.standard_normal((*case.lead, case.q[-2], case.v[-1]))
    dtypes = (*case.dtypes, case.dout_dtype or case.out_dtype)
    layouts = (case.layout,) * 3 + (case.dout_layout or case.layout,)
    arrays = [
        lay_out(_round(x, dtype), layout)
        for x, dtype, layout in zip((q, k, v, dout), dtypes, layouts, strict=True)
    ]
    return Inputs(*arrays, _initial_state(case, rng), _dstate(case, rng))


def _values(case: Case, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    q, k, v = (rng.standard_normal(shape) for shape in (case.q, case.k, case.v))
    match case.data:
        case "normal":
            pass
        case "biased":  # what trips a backward that takes delta from the stored out
            q, k, v = abs(q), abs(k), 1 + v
        case "positive":  # weights of one sign without norm
            q, k = 0.1 + abs(q), 0.1 + abs(k)
        case "offset":
            v = 1000 + v
        case "mean16":
            v = 16 + v
        case "zero_rows":
            q[..., ::3, :] = 0
            k[..., ::4, :] = 0
            v[..., ::5, :] = 0
        case "zero_keys":
            k[:] = 0
        case "zeros":
            q[:], k[:], v[:] = 0, 0, 0
        case "tiny":  # squares are below the smallest float32
            q, k = q * 1e-25, k * 1e-25
        case "huge":  # squares are above the largest float32
            q, k = q * 1e25, k * 1e25
        case "mixed_sizes":  # both, and plain rows, in one array
            for x in (q, k):
                x[..., ::3, :] *= 1e-25
                x[..., 1::3, :] *= 1e25
        case "eights":  # sums beyond the largest float16
            q[:], k[:], v[:] = 1 / 64, 8, 8
        case "small_product":  # q . k of about +-1e-6
            q[:] = 1e-6 * np.sign(q) / q.shape[-1]
            k[:] = 1
        case "tiny_product":
            q[:] = 1e-8 * np.sign(q[..., :1]) / q.shape[-1]
            k[:] = 1
        case other:
            raise ValueError(f"unknown data kind {other!r}")
    return q, k, v


def _initial_state(case: Case, rng: np.random.Generator) -> State | None:
    """The state that ten keys of the case's kind would have left, so that den stays positive."""
    if case.initial_shapes is None:
        return None
    lead = case.initial_shapes[0][0]
    d, e = case.q[-1], case.v[-1]
    before = replace(case, q=(*lead, 0, d), k=(*lead, 10, d), v=(*lead, 10, e), initial=None)
    q, k, v = _values(before, rng)
    _, state, _ = reference.linear_attention(q, k, v, **case.reference_options)
    dtype = case.initial_dtype or state_dtype(case)
    return State(*(lay_out(_round(part, dtype), _state_layout(case.layout)) for part in state))


def _dstate(case: Case, rng: np.random.Generator) -> State | None:
    if case.dstate is None:
        return None
    lead = case.state_lead if case.dstate == "full" else ()
    d, e = case.q[-1], case.v[-1]
    parts = (rng.standard_normal((*lead, *own)) for own in ((d, e), (d,), (e,), ()))
    return State(
        *(lay_out(_round(x, state_dtype(case)), _state_layout(case.layout)) for x in parts)
    )


def state_dtype(case: Case) -> str:
    """Type of states, of their gradients unless given otherwise, and of the normaliser."""
    return "float64" if case.out_dtype == "float64" else "float32"


def _round(x: Any, dtype: str) -> Any:
    return np.asarray(x).astype(DTYPES[dtype])


def _state_layout(layout: str) -> str:
    return {"swapaxes": "contiguous", "stride0_rows": "stride0", "scalar": "stride0"}.get(
        layout, layout
    )


def lay_out(x: Any, layout: str) -> Any:
    """The values of x (for stride 0: those of its first entry) in another memory layout."""
    lead = max(x.ndim - 2, 0)
    if layout == "contiguous" or x.ndim == 0 or x.size == 0:
        return x
    if layout == "swapaxes":
        return x.swapaxes(-3, -2).copy().swapaxes(-3, -2) if x.ndim > 2 else x
    if layout in ("fused", "unaligned"):
        before = 8 if layout == "fused" else 1
        width = before + x.shape[-1] + before
        width += -width % 8 if layout == "fused" else 0
        parent = np.full((*x.shape[:-1], width), np.nan, x.dtype)
        parent[..., before : before + x.shape[-1]] = x
        return parent[..., before : before + x.shape[-1]]
    if layout == "reversed":
        return x[::-1].copy()[::-1] if x.ndim == 1 else x[..., ::-1, :].copy()[..., ::-1, :]
    if layout == "reversed_last":
        return x[..., ::-1].copy()[..., ::-1]
    if layout == "transposed":
        return x.swapaxes(-1, -2).copy().swapaxes(-1, -2) if x.ndim > 1 else x
    if layout == "stride0":
        return np.broadcast_to(x[(slice(0, 1),) * lead].copy(), x.shape)
    if layout == "stride0_rows":
        return np.broadcast_to(x[..., :1, :].copy(), x.shape)
    if layout == "scalar":
        return np.broadcast_to(x.ravel()[:1].copy().reshape(()), x.shape)
    raise ValueError(f"unknown layout {layout!r}; there are {LAYOUTS}")


def copy_with_strides(x: Any, xp: Any = np) -> Any:
    """x on another array module (CuPy), at the same strides, in memory of its own."""
    if x.size == 0:
        return xp.asarray(np.ascontiguousarray(x))
    upward = x[tuple(slice(None, None, -1 if s < 0 else 1) for s in x.strides)]
    reach = sum(s * (n - 1) for s, n in zip(upward.strides, x.shape, strict=True))
    flat = np.lib.stride_tricks.as_strided(upward, (reach // x.itemsize + 1,), (x.itemsize,))
    parent = xp.asarray(flat.copy())
    first = sum(-s * (n - 1) for s, n in zip(x.strides, x.shape, strict=True) if s < 0)
    if xp is np:
        return np.ndarray(x.shape, x.dtype, buffer=parent, offset=first, strides=x.strides)
    return xp.ndarray(x.shape, x.dtype, memptr=parent.data + first, strides=x.strides)
