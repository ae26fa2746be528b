"""torch.vmap's axis as one more leading axis of the operator, which broadcasts these anyway."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STATE = (2, 1, 1, 0)
"""Own axes of kv, k_sum, v_sum, count."""
INPUTS = (2, 2, 2, *STATE)
"""Own axes of q, k, v and the parts of an initial state."""

Dims = Sequence[int | None]


def align(
    tensors: Sequence[Tensor],
    dims: Dims,
    cores: Sequence[int],
    size: int = 0,
    expand: int = 0,
) -> list[Tensor]:
    """The batch axis in front, before as many leading axes in each tensor that has it.

    The first `expand` tensors are given it, by stride 0, where they lack it.
    """
    ranks = [
        x.ndim - core - (dim is not None)
        for x, dim, core in zip(tensors, dims, cores, strict=True)
    ]
    most = max(ranks)
    moved = []
    for i, (x, dim, rank) in enumerate(zip(tensors, dims, ranks, strict=True)):
        if dim is None and i < expand:
            x, dim = x.expand(size, *x.shape), 0
        if dim is not None:
            x = x.movedim(dim, 0)
            x = x[(slice(None), *(None,) * (most - rank))]
        moved.append(x)
    return moved


def split_forward(
    results: Sequence[Tensor], tensors: Sequence[Tensor], dims: Dims
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Results of the aligned call with the axes that one example has, and where the batch is."""
    out, den, *state = results
    if all(dim is None for dim in dims[1:]):
        return (out, den, *state), (0, 0, *(None for _ in state))
    leads = [
        (x.ndim - core - (dim is not None))
        for x, dim, core in zip(tensors[1:], dims[1:], INPUTS[1 : len(tensors)], strict=True)
    ]
    own = max(leads)  # leading axes of an example's state
    state = [_drop(x, 1, x.ndim - core - 1 - own) for x, core in zip(state, STATE, strict=False)]
    return (out, den, *state), (0,) * len(results)


def split_backward(
    results: Sequence[Tensor], inputs: Sequence[Tensor], dims: Dims, size: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Gradients of the aligned call, each with the axes of its input in one example."""
    own = []
    for x, input, dim in zip(results, inputs, dims, strict=True):
        rank = input.ndim + (dim is None)
        own.append(_drop(x, 1, x.ndim - rank))
    return tuple(own), (0,) * len(own)


def _drop(x: Tensor, axis: int, count: int) -> Tensor:
    """`x` without `count` axes of extent 1 from `axis` on."""
    return x.squeeze(tuple(range(axis, axis + count))) if count else x
