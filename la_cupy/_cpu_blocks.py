"""How the CPU backend walks through a problem: blocks of heads, and steps along the sequence."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .problem import Problem

Array = Any
Shape = tuple[int, ...]
Block = tuple[slice, ...]  # one slice for each leading axis of the result

CHUNK = 64  # rows and keys of a causal step: its C x C weights cost about as much as the state
LONG_CHUNK = 512  # rows or keys of a step without weights
WORKING_SET = 2 << 20  # bytes that the heads of a block may touch in a step: a second-level cache


class Step(NamedTuple):
    """Rows that look at the state and at keys[0..i], and keys that then go into the state."""

    rows: slice
    keys: slice

    @property
    def has_rows(self) -> bool:
        return bool(self.rows.start < self.rows.stop)

    @property
    def has_keys(self) -> bool:
        return bool(self.keys.start < self.keys.stop)


def steps(problem: Problem) -> list[Step]:
    """The walk along the sequence; the backward's second pass takes it in reverse.

    Not causal: all keys, then all rows. Causal, aligned at the end: keys that every row sees or
    rows that see no key come first, then rows and keys together.
    """
    n, m = problem.n, problem.m
    none = slice(0, 0)
    if not problem.options.causal:
        return [
            *(Step(none, keys) for keys in _chunks(0, m, LONG_CHUNK)),
            *(Step(rows, none) for rows in _chunks(0, n, LONG_CHUNK)),
        ]
    ahead, blind = max(m - n, 0), max(n - m, 0)
    together = zip(_chunks(blind, n, CHUNK), _chunks(ahead, m, CHUNK), strict=True)
    return [
        *(Step(none, keys) for keys in _chunks(0, ahead, LONG_CHUNK)),
        *(Step(rows, none) for rows in _chunks(0, blind, LONG_CHUNK)),
        *(Step(rows, keys) for rows, keys in together),
    ]


def _chunks(start: int, stop: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def blocks(lead: Shape, problem: Problem) -> Iterator[Block]:
    """Slices of the leading axes whose heads fit the working set together.

    Inner axes are taken whole, one axis in parts, the axes outside it entry by entry.
    """
    d, e = problem.d, problem.e
    longest = max(problem.n, problem.m)
    chunk, weights = min(LONG_CHUNK, longest), 0
    if problem.options.causal:
        chunk = min(CHUNK, longest)
        weights = chunk * chunk
    itemsize = np.dtype(problem.state_dtype).itemsize
    head = itemsize * (2 * chunk * (d + e) + weights) + (8 + itemsize) * (d + 1) * (e + 1)
    room = max(1, WORKING_SET // head)
    parts: list[list[slice]] = []
    for extent in reversed(lead):
        size = max(1, min(extent, room))
        parts.append(_chunks(0, extent, size))
        room = room // size if size == extent else 1
    yield from itertools.product(*reversed(parts))


def align(x: Array, lead: Shape, core: int) -> Array:
    """x with leading axes of extent 1 put in front, so that there are as many as in lead."""
    x = np.asarray(x)
    return x[(None,) * (len(lead) - (x.ndim - core)) + (...,)]


def take(x: Array, block: Block) -> Array:
    """A block of an aligned array: where the array broadcasts, its one entry."""
    return x[(*(s if n != 1 else slice(None) for s, n in zip(block, x.shape, strict=False)), ...)]


def block_shape(lead: Shape, block: Block) -> Shape:
    """The leading axes that ``take`` leaves of an array with these aligned leading axes."""
    return tuple(s.stop - s.start if n != 1 else 1 for s, n in zip(block, lead, strict=True))


def sum_to(x: Array, lead: Shape) -> Array:
    """Sum x over those of its leading axes that are 1 in lead, keeping them."""
    axes = tuple(i for i, n in enumerate(lead) if n == 1 and x.shape[i] != 1)
    return x.sum(axis=axes, keepdims=True) if axes else x


class Sink:
    """Where the gradient of one input is gathered, block by block and chunk by chunk.

    Entries that broadcasting shares between heads are added up in the arithmetic's type and
    rounded once, at the end; others are written in place.
    """

    def __init__(self, like: Array, lead: Shape, core: int, dtype: Any) -> None:
        own_lead = align(like, lead, core).shape[: len(lead)]
        self._adds = own_lead != lead
        self._dtype = like.dtype
        self._total = np.zeros(like.shape, dtype if self._adds else like.dtype)
        self._aligned = align(self._total, lead, core)
        self._core = core

    def put(self, block: Block, value: Array, rows: slice | None = None) -> None:
        """Write or add the gradient of a block, or of some of its rows: [..., rows, :]."""
        target = take(self._aligned, block)
        if rows is not None:
            target = target[..., rows, :]
        if self._adds:
            target += sum_to(value, target.shape[: target.ndim - self._core])
        else:
            target[...] = value

    def result(self) -> Array:
        """The gradient, in its input's type."""
        return self._total.astype(self._dtype, copy=False)
