"""torch.vmap's axis as one more leading axis of the operator, which broadcasts these anyway."""

from collections.abc import Sequence

from torch import Tensor

from la_cupy.results import STATE_RANKS

_FORWARD = (2, 2, 2, *STATE_RANKS)  # q, k, v, initial state
Dims = Sequence[int | None]


def align_forward(tensors: Sequence[Tensor], dims: Dims) -> list[Tensor]:
    """q, k, v, initial state with the batch's axis in front, where they have it."""
    return _align(tensors, dims, _FORWARD[: len(tensors)])


def align_backward(
    tensors: Sequence[Tensor], dims: Dims, counts: tuple[int, int], size: int
) -> list[Tensor]:
    """den, dout, q, k, v, initial state and dstate with the batch's axis in front.

    Each example has gradients of its own: all but dstate get the axis, by stride 0.
    """
    cores = (1, 2, *_FORWARD[: 3 + counts[0]], *STATE_RANKS[: counts[1]])
    needed = len(tensors) - counts[1]
    wide = [
        x.expand(size, *x.shape) if dim is None and i < needed else x
        for i, (x, dim) in enumerate(zip(tensors, dims, strict=True))
    ]
    new_dims = [0 if dim is None and i < needed else dim for i, dim in enumerate(dims)]
    return _align(wide, new_dims, cores)


def _align(tensors: Sequence[Tensor], dims: Dims, cores: Sequence[int]) -> list[Tensor]:
    """The batch's axis in front of as many leading axes as any tensor has in one example."""
    leads = _leads(tensors, dims, cores)
    most = max(leads)
    return [
        x if dim is None else x.movedim(dim, 0)[(slice(None), *(None,) * (most - lead))]
        for x, dim, lead in zip(tensors, dims, leads, strict=True)
    ]


def split_forward(
    results: Sequence[Tensor], tensors: Sequence[Tensor], dims: Dims
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """(out, den, state) with the axes that one example has, and where the batch's axis is."""
    out, den, *state = results
    if all(dim is None for dim in dims[1:]):  # it is q's alone
        return (out, den, *state), (0, 0, *(None for _ in state))
    own = max(_leads(tensors[1:], dims[1:], _FORWARD[1 : len(tensors)]))
    state = [_drop(x, x.ndim - core - 1 - own) for x, core in zip(state, STATE_RANKS, strict=False)]
    return (out, den, *state), (0,) * len(results)


def split_backward(
    results: Sequence[Tensor], tensors: Sequence[Tensor], dims: Dims
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Gradients with the axes of their inputs in one example, and where the batch's axis is."""
    inputs = zip(results, tensors[2:], dims[2:], strict=False)
    own = tuple(_drop(x, x.ndim - like.ndim - (dim is None)) for x, like, dim in inputs)
    return own, (0,) * len(own)


def _leads(tensors: Sequence[Tensor], dims: Dims, cores: Sequence[int]) -> list[int]:
    """How many leading axes each tensor has in one example."""
    each = zip(tensors, dims, cores, strict=True)
    return [x.ndim - core - (dim is not None) for x, dim, core in each]


def _drop(x: Tensor, count: int) -> Tensor:
    """`x` without `count` axes of extent 1 behind the batch's."""
    return x.squeeze(tuple(range(1, 1 + count))) if count else x
