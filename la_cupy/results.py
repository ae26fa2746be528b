"""What the public functions return, besides plain arrays."""

from typing import Any, NamedTuple, TypeAlias

Array: TypeAlias = Any
"""A ``numpy.ndarray`` or a ``cupy.ndarray``; CuPy need not be installed, so it cannot be named."""


class State(NamedTuple):
    """What a sequence leaves behind: all that later rows need to know about its keys.

    With M keys ``k~ = phi(norm(k))`` and values ``v`` (``...`` are the leading axes
    ``broadcast(k, v, initial_state)``, never those of q alone)::

        kv[..., D, E] = sum_j k~[j] v[j]^T        k_sum[..., D] = sum_j k~[j]
        count[...]    = number of keys            v_sum[..., E] = sum_j v[j]

    ``a`` and ``b`` are not folded in. The type is float32, or float64 where the inputs are
    float64. In the result of ``linear_attention_vjp`` the same four fields hold gradients.
    """

    kv: Array
    k_sum: Array
    v_sum: Array
    count: Array


STATE_RANKS = (2, 1, 1, 0)
"""How many axes kv, k_sum, v_sum and count have behind the leading ones."""


def state_cores(d: int, e: int) -> tuple[tuple[int, ...], ...]:
    """The extents of these axes."""
    return (d, e), (d,), (e,), ()


class Gradients(NamedTuple):
    """Gradients with the shape and dtype of the inputs; ``initial_state`` is None if none came."""

    q: Array
    k: Array
    v: Array
    initial_state: State | None
