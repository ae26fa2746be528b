"""States on the CPU: the four parts as one matrix [[kv, k_sum], [v_sum, count]], and its centring.

The backward takes values less a constant c per head. That changes no gradient, but it keeps large
terms from cancelling. The matrix S of sums, and the matrix T of gradients, follow suit:

    S[:, :E] - S[:, E] c^T          T[:, E] + T[:, :E] c
"""

from typing import Any

import numpy as np

from .results import State

Array = Any
Shape = tuple[int, ...]


def pack(parts: State | None, lead: Shape, d: int, e: int) -> Array:
    """The float64 matrix [..., D + 1, E + 1] of a state, or of none: zeros."""
    matrix = np.zeros((*lead, d + 1, e + 1))
    if parts is not None:
        for entries, part in zip(unpack(matrix), parts, strict=True):
            entries[...] = part
    return matrix


def unpack(matrix: Array) -> State:
    """The four parts, as views of the matrix."""
    return State(
        kv=matrix[..., :-1, :-1],
        k_sum=matrix[..., :-1, -1],
        v_sum=matrix[..., -1, :-1],
        count=matrix[..., -1, -1],
    )


def centre_sums(matrix: Array, centre: Array | None, sign: int = 1) -> Array:
    """Sums over v - sign * centre from sums over v; centre is [..., 1, E], or None for 0."""
    if centre is None:
        return matrix
    centred = matrix.astype(np.float64)
    centred[..., :-1] -= matrix[..., -1:] * (sign * centre)
    return centred


def centre_gradients(matrix: Array, centre: Array | None, sign: int = 1) -> Array:
    """Gradients of sums over v - sign * centre from gradients of sums over v."""
    if centre is None:
        return matrix
    centred = matrix.astype(np.float64)
    centred[..., -1:] += matrix[..., :-1] @ np.swapaxes(sign * centre, -1, -2)
    return centred
