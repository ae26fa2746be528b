"""Where the arrays of a call lie: inputs, results and workspaces as the launches refer to them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from .params import state_names
from .problem import Layout, Problem
from .records import Axes, RowRef, StateRef, Strides, Tensor
from .results import STATE_RANKS, state_cores


@dataclass(frozen=True)
class Buffer:
    """An array that a plan makes; contiguous."""

    shape: tuple[int, ...]
    dtype: str


def contiguous_strides(shape: tuple[int, ...]) -> Strides:
    """Strides, in elements, of a C-contiguous array.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def lead_strides(shape: tuple[int, ...], strides: Strides, lead: tuple[int, ...]) -> Strides:
    """Strides on the axes `lead` of an array with leading axes `shape`: 0 where it broadcasts."""
    own = (0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return (0,) * (len(lead) - len(shape)) + tuple(own)


def summed_axes(shape: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
    """The axes of `shape` that an array of shape `own` lacks or has as 1, broadcast to it.

    >>> summed_axes((2, 3, 4), (1, 4))
    (0, 1)
    """
    extra = len(shape) - len(own)
    ones = (extra + i for i, size in enumerate(own) if size == 1 != shape[extra + i])
    return (*range(extra), *ones)


def state_part_fits(layout: Layout, inner: int, dtype: str) -> bool:
    """Whether the kernels can read this part of a state, with `inner` axes of its own, in place."""
    shape = layout.shape[len(layout.shape) - inner :]
    strides = layout.strides[len(layout.shape) - inner :]
    expected = contiguous_strides(shape)
    fits = all(n == 1 or s == t for n, s, t in zip(shape, strides, expected, strict=True))
    return fits and layout.dtype == dtype


def misfits(problem: Problem) -> list[str]:
    """Parts of given states that are to be converted before the launch; these are small."""
    given = {"initial_state": problem.initial_state, "dstate": problem.dstate}
    return [
        part
        for name, layouts in given.items()
        if layouts is not None
        for part, layout, inner in zip(state_names(name), layouts, STATE_RANKS, strict=True)
        if not state_part_fits(layout, inner, problem.state_dtype)
    ]


@dataclass
class Arrays:
    """The arrays of one call, collected while its launches are planned."""

    problem: Problem
    copies: list[str] = field(default_factory=list)  # inputs to be made contiguous first
    outputs: dict[str, Buffer] = field(default_factory=dict)
    workspace: dict[str, Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.problem
        self.lead = p.lead
        self.state_lead = (1,) * (len(p.lead) - len(p.state_lead)) + p.state_lead
        # Axes of q alone: gradients of k and v are summed over them inside a block.
        pairs = enumerate(zip(self.lead, self.state_lead, strict=True))
        group = tuple(i for i, (size, state) in pairs if state == 1 and size != 1)
        every = tuple(range(len(self.lead)))
        self.query_axes = Axes(self.lead, every, ())
        self.state_axes = Axes(self.lead, tuple(i for i in every if i not in group), group)

    def tensor(self, name: str) -> Tensor:
        """An input; its contiguous copy, if its last axis is not contiguous."""
        layout: Layout = getattr(self.problem, name)
        shape, strides = layout.shape, layout.strides
        if strides[-1] != 1 and prod(shape) != 0:
            if name not in self.copies:
                self.copies.append(name)
            strides = contiguous_strides(shape)
        lead = lead_strides(shape[:-2], strides[:-2], self.lead)
        return Tensor(name, layout.dtype, lead, strides[-2] if shape[-2] > 1 else 0)

    def made(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A contiguous result or temporary."""
        strides = contiguous_strides(shape)
        return Tensor(name, dtype, lead_strides(shape[:-2], strides[:-2], self.lead), strides[-2])

    def out(self, given: Layout | None) -> Tensor:
        """The result of the forward pass: the caller's array if its last axis is contiguous."""
        p = self.problem
        if given is None or given.strides[-1] != 1:
            self.outputs["out"] = Buffer(p.out_shape, p.dtype)
            return self.made("out", p.out_shape, p.dtype)
        lead = lead_strides(given.shape[:-2], given.strides[:-2], self.lead)
        return Tensor("out", p.dtype, lead, given.strides[-2])

    def rows(self, name: str, lead: tuple[int, ...], rows: int, numbers: int = 1) -> RowRef:
        """`numbers` numbers for each of `rows` rows of each head in `lead`."""
        strides = contiguous_strides((*lead, rows * numbers))
        return RowRef(name, lead_strides(lead, strides[:-1], self.lead))

    def given_state(self, name: str) -> StateRef:
        """A state of the caller's; parts that do not fit are converted before the launch."""
        leads = []
        for layout, inner in zip(getattr(self.problem, name), STATE_RANKS, strict=True):
            rank = len(layout.shape) - inner
            strides = layout.strides
            if not state_part_fits(layout, inner, self.problem.state_dtype):
                strides = contiguous_strides(layout.shape)
            leads.append(lead_strides(layout.shape[:rank], strides[:rank], self.lead))
        return StateRef(state_names(name), tuple(leads), (0,) * 4)

    def new_state(self, name: str) -> StateRef:
        """A contiguous state over the state's leading axes, one of the results."""
        p = self.problem
        leads = []
        for part, inner in zip(state_names(name), state_cores(p.d, p.e), strict=True):
            shape = (*p.state_lead, *inner)
            self.outputs[part] = Buffer(shape, p.state_dtype)
            strides = contiguous_strides(shape)[: len(p.state_lead)]
            leads.append(lead_strides(p.state_lead, strides, self.lead))
        return StateRef(state_names(name), tuple(leads), (0,) * 4)

    def relevelled(self, given: StateRef) -> StateRef:
        """The state `given`, with another k_sum and count for each head."""
        sizes, heads = (self.problem.d, 1), prod(self.state_lead)
        self.workspace["relevelled"] = Buffer((heads * sum(sizes),), self.problem.state_dtype)
        strides = contiguous_strides(self.state_lead)
        k_sum, count = (
            lead_strides(self.state_lead, tuple(s * size for s in strides), self.lead)
            for size in sizes
        )
        kv, _, v_sum, _ = given.leads
        return StateRef(
            (given.buffers[0], "relevelled", given.buffers[2], "relevelled"),
            (kv, k_sum, v_sum, count),
            (given.shifts[0], 0, given.shifts[2], heads * self.problem.d),
        )

    def slots(self, name: str, count: int) -> StateRef:
        """A workspace of `count` states a head, slot after slot within each part."""
        p = self.problem
        sizes = (p.d * p.e, p.d, p.e, 1)
        heads = prod(self.state_lead)
        # A backward that has to find den itself cuts twice, each time in its own way.
        before = self.workspace.get(name, Buffer((0,), p.state_dtype)).shape[0]
        size = max(before, heads * count * sum(sizes))
        self.workspace[name] = Buffer((size,), p.state_dtype)
        strides = contiguous_strides(self.state_lead)
        leads, shifts, at = [], [], 0
        for size in sizes:
            own = tuple(stride * count * size for stride in strides)
            leads.append(lead_strides(self.state_lead, own, self.lead))
            shifts.append(at)
            at += heads * count * size
        return StateRef((name,) * 4, tuple(leads), tuple(shifts))
