"""The public functions: check the arguments, choose the backend, run it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict, Unpack, overload

from . import checked, checks
from .problem import Options, Problem, make_options
from .results import Array, Gradients, State


class OperatorOptions(TypedDict, total=False):
    """The options of the operator, as `linear_attention` documents them."""

    causal: bool
    a: float
    b: float
    qk_norm: Literal["l2"] | None
    feature_map: Literal["identity", "elu1", "relu", "silu", "exp"]
    normalize: bool
    precision: Literal["highest", "tf32"]
    initial_state: State | tuple[Array, Array, Array, Array] | None


class ForwardOptions(OperatorOptions, total=False):
    """All options of `linear_attention` but those that change what it returns."""

    out: Array | None


@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: Literal[False] = False,
    return_normalizer: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> Array: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: Literal[True],
    return_normalizer: Literal[False] = False,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, State]: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: Literal[False] = False,
    return_normalizer: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[Array, Array]: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: Literal[True],
    return_normalizer: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[Array, State, Array]: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: bool = False,
    return_normalizer: bool = False,
    **options: Unpack[ForwardOptions],
) -> Any: ...


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    a: float = 1.0,
    b: float = 1.0,
    qk_norm: str | None = "l2",
    feature_map: str = "identity",
    normalize: bool = True,
    initial_state: Any = None,
    return_state: bool = False,
    return_normalizer: bool = False,
    precision: str = "highest",
    out: Array | None = None,
) -> Any:
    """Attention with weights ``a + b (q~ . k~)``, in time linear in the number of rows.

    For each row i of q, with ``q~ = phi(norm(q))`` and ``k~ = phi(norm(k))``::

        w[i, j] = a + b (q~[i] . k~[j]),   0 where causal and j > i + (M - N)
        num[i]  = sum_j w[i, j] v[j]       + a v_sum + b q~[i] kv       (initial state)
        den[i]  = sum_j w[i, j]            + a count + b q~[i] . k_sum
        out[i]  = num[i] / den[i]  (normalize)  or  num[i]

    With the defaults this is the operator of the paper, whose weights lie in [0, 2]. A row
    whose den is exactly 0 as computed, such as one that sees no key, is 0. Inputs are never
    modified. NumPy arrays are computed on the CPU, CuPy arrays on their device, in the
    current stream and without waiting for it.

    Parameters
    ----------
    q, k, v : numpy.ndarray or cupy.ndarray
        Queries ``(..., N, D)``, keys ``(..., M, D)`` and values ``(..., M, E)``, of float16,
        bfloat16 (ml_dtypes), float32 or float64. Leading axes broadcast as in numpy.matmul;
        grouped queries are ``q.reshape(B, Hkv, G, N, D)`` on ``k[:, :, None]``. Any strides.
        D and E are at least 1, on a GPU at most 256. Subclasses are refused, except
        numpy.memmap, which is read as the plain array that it is.
    causal : bool
        Row i sees the keys j <= i + (M - N): aligned at the bottom right.
    a, b : float
        Constant and slope of the weight: a host number or 0-d NumPy array, finite.
    qk_norm : "l2" or None
        Scale every row of q and k to length 1 (a zero row stays zero), or leave them.
    feature_map : "identity", "elu1", "relu", "silu" or "exp"
        phi, applied to each element after the norm; elu1 is elu(x) + 1.
    normalize : bool
        Divide by the sum of the weights.
    initial_state : State or tuple of four arrays, optional
        What earlier keys left behind; every row sees them, causal or not. Its leading axes
        broadcast with those of k and v.
    return_state, return_normalizer : bool
        Also return the State after these keys, and den ``(..., N)``, in this order.
    precision : "highest" or "tf32"
        float32 on a GPU: "highest" is float32 throughout (error below 1e-5), "tf32" lets the
        tensor cores round their operands to 11 bits. No effect on other types or the CPU.
    out : array, optional
        Where to write the result; its exact shape and dtype, sharing no memory with an input.

    Returns
    -------
    out : array ``(broadcast(q, k, v, initial_state), N, E)``
        In the promoted type of q, k and v: NumPy's rule, float32 for bfloat16 with float16.
    state : State, if return_state
        Sums over all keys so far; leading axes broadcast(k, v, initial_state). float32, or
        float64 for float64 inputs, as is the normalizer.
    normalizer : array ``(..., N)``, if return_normalizer
        den, which `linear_attention_vjp` can use; it has no gradient of its own.

    Raises
    ------
    TypeError
        Arrays of other libraries (see la_cupy.interop) or of both libraries at once; dtypes
        other than the four; options of the wrong type.
    ValueError
        Shapes that do not match, options outside their range, arrays on different devices,
        D or E over 256 on a GPU, an `out` that cannot take the result.

    References
    ----------
    Gerami and Duraiswami, Transformer Based Linear Attention with Optimized GPU Kernel
    Implementation, arXiv 2510.21956: the normalized weights a + b x and their linear-time sums.

    Examples
    --------
    >>> import numpy as np
    >>> import la_cupy as la
    >>> q = k = np.eye(2, dtype=np.float32)
    >>> v = np.array([[1.0], [4.0]], dtype=np.float32)
    >>> la.linear_attention(q, k, v)          # weights 2 and 1, then 1 and 2
    array([[2.],
           [3.]], dtype=float32)
    >>> la.linear_attention(q, k, v, causal=True)
    array([[1.],
           [3.]], dtype=float32)

    A sequence in two pieces, joined by the state:

    >>> first, state = la.linear_attention(q[:1], k[:1], v[:1], causal=True, return_state=True)
    >>> la.linear_attention(q[1:], k[1:], v[1:], causal=True, initial_state=state)
    array([[3.]], dtype=float32)
    """
    a, b = checks.scalar("a", a), checks.scalar("b", b)
    causal, normalize = checks.flag("causal", causal), checks.flag("normalize", normalize)
    return_state = checks.flag("return_state", return_state)
    return_normalizer = checks.flag("return_normalizer", return_normalizer)
    state = checked.as_state("initial_state", initial_state)
    options = Options(causal, a, b, qk_norm, feature_map, normalize, precision)

    problem, backend, plain = checked.forward(options, q, k, v, state, out)
    target = out
    if not plain:
        q, k, v, target = map(checked.plain, (q, k, v, out))
        state = checked.plain_state(state)
    result, final, den = backend.forward(problem, q, k, v, state, target, return_state)
    if out is not None:
        result = out
    if return_state:
        return (result, final, den) if return_normalizer else (result, final)
    return (result, den) if return_normalizer else result


def linear_attention_vjp(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    normalizer: Array | None = None,
    dstate: Any = None,
    causal: bool = False,
    a: float = 1.0,
    b: float = 1.0,
    qk_norm: str | None = "l2",
    feature_map: str = "identity",
    normalize: bool = True,
    initial_state: Any = None,
    precision: str = "highest",
) -> Gradients:
    """Gradients of ``sum(out * dout)``, and of ``sum(state * dstate)`` where dstate is given.

    ``out`` and ``state`` are what `linear_attention` returns for the same arguments. With
    ``g = dout / den`` and ``delta = (out . dout) / den`` (g = dout, delta = 0 if not
    normalized), the gradients before the feature map and the norm are::

        dw[i, j] = g[i] . v[j] - delta[i]
        dq~[i]   = b sum_j dw[i, j] k~[j]     + b (kv g[i] - delta[i] k_sum)   (initial state)
        dk~[j]   = b sum_i dw[i, j] q~[i]     + dkv v[j] + dk_sum              (dstate)
        dv[j]    = sum_i w[i, j] g[i]         + dkv^T k~[j] + dv_sum           (dstate)

    and those of the initial state ``dkv + b sum_i q~[i] g[i]^T``,
    ``dk_sum - b sum_i delta[i] q~[i]``, ``dv_sum + a sum_i g[i]``,
    ``dcount - a sum_i delta[i]``. Sums over broadcast axes are taken in a fixed order.

    Parameters
    ----------
    dout : array ``(..., N, E)``
        Gradient with respect to out, exactly of its shape; any of the four types.
    q, k, v, causal, a, b, qk_norm, feature_map, normalize, initial_state, precision
        As in `linear_attention`.
    normalizer : array ``(..., N)``, optional
        What `linear_attention` returned for return_normalizer; recomputed if it is missing.
    dstate : State or tuple of four arrays, optional
        Gradient with respect to the returned state; leading axes broadcast to the state's.

    Returns
    -------
    Gradients
        q, k, v and initial_state (None if none came), each of the shape and dtype of its input.

    Raises
    ------
    TypeError, ValueError
        As `linear_attention`; also where dout, normalizer or dstate do not fit the result.

    References
    ----------
    Gerami and Duraiswami, arXiv 2510.21956: the analytical backward pass, O(N D) memory.

    Examples
    --------
    >>> import numpy as np
    >>> import la_cupy as la
    >>> q = k = np.eye(2)
    >>> v = np.array([[1.0], [4.0]])
    >>> grads = la.linear_attention_vjp(np.ones((2, 1)), q, k, v)
    >>> grads.v                       # the column sums of the weights 2/3 1/3, 1/3 2/3
    array([[1.],
           [1.]])
    """
    a, b = checks.scalar("a", a), checks.scalar("b", b)
    causal, normalize = checks.flag("causal", causal), checks.flag("normalize", normalize)
    state = checked.as_state("initial_state", initial_state)
    final = checked.as_state("dstate", dstate)
    options = Options(causal, a, b, qk_norm, feature_map, normalize, precision)

    problem, backend, plain = checked.backward(options, dout, q, k, v, normalizer, state, final)
    if not plain:
        dout, q, k, v, normalizer = map(checked.plain, (dout, q, k, v, normalizer))
        state, final = checked.plain_state(state), checked.plain_state(final)
    gradients: Gradients = backend.vjp(problem, dout, q, k, v, normalizer, state, final)
    return gradients


@dataclasses.dataclass(frozen=True)
class CpuPlan:
    """The plan for NumPy arrays: there is one way, chunked BLAS."""

    problem: Problem
    reason: str
    predicted_ms: None = None

    def __str__(self) -> str:
        p = self.problem
        return (
            f"{'forward' if p.dout is None else 'backward'} on the CPU, chunked BLAS: "
            f"lead {p.lead}, N {p.n}, M {p.m}, D {p.d}, E {p.e}, {p.dtype} in, "
            f"{p.state_dtype} sums\n  {p.options}\n  because {self.reason}"
        )


def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    dout: Array | None = None,
    dstate: Any = None,
    initial_state: Any = None,
    return_state: bool = False,
    return_normalizer: bool = False,
    **options: Any,
) -> Any:
    """The plan that `linear_attention` would run for these arguments, without running it.

    Printing it says which kernels run, on how many blocks, with how much memory, and why; on
    Hopper, where `stream` does all of it, also how long the launches take: `predicted_ms`, else
    None. With `dout` it is the plan of `linear_attention_vjp` with the normalizer given. Arguments, and errors, are those of
    these two functions.

    >>> import numpy as np
    >>> import la_cupy as la
    >>> x = np.ones((3, 4), np.float32)
    >>> print(la.explain(x, x, x).reason)
    q, k and v are NumPy arrays
    """
    checks.flag("return_state", return_state)
    checks.flag("return_normalizer", return_normalizer)
    chosen = make_options(**options)
    state = checked.as_state("initial_state", initial_state)
    if dout is not None:
        final = checked.as_state("dstate", dstate)
        problem, backend, _ = checked.backward(chosen, dout, q, k, v, None, state, final)
    elif dstate is not None:
        raise TypeError("dstate came without dout, but belongs to the backward pass: pass dout too")
    else:
        problem, backend, _ = checked.forward(chosen, q, k, v, state, None)
    if backend.__name__ == checked.BACKENDS["cupy"]:
        return backend.explain(problem)
    return CpuPlan(problem, "q, k and v are NumPy arrays")
