"""Feature maps phi, element by element, with their derivatives, for the CPU backend.

identity  y                  elu1  y + 1 for y > 0, else exp(y)      relu  max(y, 0)
silu      y / (1 + exp(-y))  exp   exp(y)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True)
class Feature:
    """phi(y) and phi'(y); each gives a new array of y's type."""

    forward: Callable[[Array], Array]
    derivative: Callable[[Array], Array]


def _elu1(y: Array) -> Array:
    # for y > 0 the exponential is 1, below it the maximum is 0: no branch, and no overflow
    return np.maximum(y, 0) + np.exp(np.minimum(y, 0))


def _elu1_derivative(y: Array) -> Array:
    return np.exp(np.minimum(y, 0))


def _relu(y: Array) -> Array:
    return np.maximum(y, 0)


def _relu_derivative(y: Array) -> Array:
    return (y > 0).astype(y.dtype)


def _silu(y: Array) -> Array:
    return y / (1 + np.exp(-y))


def _silu_derivative(y: Array) -> Array:
    sigmoid = 1 / (1 + np.exp(-y))
    return sigmoid * (1 + y * (1 - sigmoid))


FEATURES = {
    "identity": Feature(np.copy, np.ones_like),
    "elu1": Feature(_elu1, _elu1_derivative),
    "relu": Feature(_relu, _relu_derivative),
    "silu": Feature(_silu, _silu_derivative),
    "exp": Feature(np.exp, np.exp),
}
