"""Linear attention for JAX: `from la_cupy.interop.jax import linear_attention`.

The CUDA kernels on a GPU, on XLA's own stream and memory; `linear_attention_xla`, plain JAX that
XLA compiles, on everything else. Which of the two is chosen as a program is lowered, so that the
same program runs anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from la_cupy import checks, dtypes
from la_cupy.api import OperatorOptions
from la_cupy.problem import Options, make_options
from la_cupy.results import State

from . import (  # noqa: F401  rules of the primitives register themselves
    _jax_batch,
    _jax_chunked,
    _jax_derivatives,
    _jax_heads,
    _jax_lowering,
    _jax_ops,
    _jax_sequence,
)
from ._jax_axes import varying
from ._jax_sequence import AxisName

__all__ = ["dot_product_attention", "linear_attention", "linear_attention_xla"]

Array: TypeAlias = jax.Array


class JaxOptions(OperatorOptions, total=False):
    """The options of the operator, and the axis of a mesh along which a sequence is cut."""

    axis_name: AxisName | None


@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: Literal[False] = False,
    return_normalizer: Literal[False] = False,
    **options: Unpack[JaxOptions],
) -> Array: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: Literal[True],
    return_normalizer: Literal[False] = False,
    **options: Unpack[JaxOptions],
) -> tuple[Array, State]: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: Literal[False] = False,
    return_normalizer: Literal[True],
    **options: Unpack[JaxOptions],
) -> tuple[Array, Array]: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: Literal[True],
    return_normalizer: Literal[True],
    **options: Unpack[JaxOptions],
) -> tuple[Array, State, Array]: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_state: bool = False,
    return_normalizer: bool = False,
    **options: Unpack[JaxOptions],
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
    axis_name: AxisName | None = None,
) -> Any:
    """Attention with weights ``a + b (q~ . k~)``, in time linear in the number of rows.

    For each row i of q, with ``q~ = phi(norm(q))`` and ``k~ = phi(norm(k))``::

        w[i, j] = a + b (q~[i] . k~[j]),   0 where causal and j > i + (M - N)
        num[i]  = sum_j w[i, j] v[j]       + a v_sum + b q~[i] kv       (initial state)
        den[i]  = sum_j w[i, j]            + a count + b q~[i] . k_sum
        out[i]  = num[i] / den[i]  (normalize)  or  num[i]

    It composes with jit, grad, vmap, scan, checkpoint and shard_map like any JAX function, and
    keeps the sharding of leading axes under jit. Its value and its gradient run the CUDA kernels
    on a GPU. Forward mode and second derivatives are right, too, in O(N D) memory, and compiled
    by XLA from plain JAX everywhere.

    Parameters
    ----------
    q, k, v : jax.Array or numpy.ndarray
        Queries ``(..., N, D)``, keys ``(..., M, D)`` and values ``(..., M, E)``, of float16,
        bfloat16, float32 or float64. Leading axes broadcast as in numpy.matmul; grouped queries
        are ``q.reshape(B, Hkv, G, N, D)`` on ``k[:, :, None]``. D and E are at most 256 on a GPU.
    causal, a, b, qk_norm, feature_map, normalize, precision
        As in `la_cupy.linear_attention`: fixed when a program is traced, so never tracers.
    initial_state : State or tuple of four arrays, optional
        What earlier keys left behind; its leading axes broadcast with those of k and v.
    return_state, return_normalizer : bool
        Also return the State after these keys, and den ``(..., N)``, in this order. A State is a
        pytree, and can be the carry of a scan. den has no gradient.
    axis_name : str or tuple of str, optional
        Inside jax.shard_map, the axis of the mesh along which the sequence is cut: q, k and v are
        this device's piece, in order; where causal, of one length. Results and gradients are those
        of the whole sequence. What devices exchange is a state each, whatever N is. initial_state
        is the same on all of them, and the state that is returned is the one behind all pieces.

    Returns
    -------
    out : jax.Array ``(broadcast(q, k, v, initial_state), N, E)``
        In the promoted type of q, k and v: NumPy's rule, float32 for bfloat16 with float16.
    state : State, if return_state
        float32, or float64 for float64 inputs, as is the normalizer.
    normalizer : jax.Array ``(..., N)``, if return_normalizer

    Raises
    ------
    TypeError, ValueError
        As `la_cupy.linear_attention`, when a program is traced; a D or E that the kernels do not
        take when it is lowered for a GPU.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from la_cupy.interop.jax import linear_attention
    >>> q = k = jnp.eye(2)
    >>> v = jnp.array([[1.0], [4.0]])
    >>> print(linear_attention(q, k, v, causal=True))
    [[1.]
     [3.]]
    >>> print(jax.grad(lambda v: linear_attention(q, k, v).sum())(v))
    [[1.]
     [1.]]
    """
    options = make_options(causal, a, b, qk_norm, feature_map, normalize, precision)
    arguments = q, k, v, initial_state, return_state, return_normalizer
    return _over_devices(_by_kernels, options, axis_name, *arguments)


def linear_attention_xla(
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
    axis_name: AxisName | None = None,
) -> Any:
    """`linear_attention` in plain JAX, for XLA to compile on any platform.

    Arguments, results and errors are the same, and so are the numbers within the library's error
    budgets; only D and E have no limit. A scan over chunks of rows, in O(N D) memory. Everything
    that JAX can do to a function it can do to this one.

    Parameters
    ----------
    q, k, v, causal, a, b, qk_norm, feature_map, normalize, initial_state, return_state,
    return_normalizer, precision
        As in `linear_attention`.

    Returns
    -------
    out, state, normalizer
        As in `linear_attention`.

    Raises
    ------
    TypeError, ValueError
        As `linear_attention`.
    """
    options = make_options(causal, a, b, qk_norm, feature_map, normalize, precision)
    arguments = q, k, v, initial_state, return_state, return_normalizer
    return _over_devices(_by_xla, options, axis_name, *arguments)


def _by_kernels(
    options: Options, q: Any, k: Any, v: Any, initial_state: Any, return_state: bool
) -> tuple[Array, State | None, Array]:
    x, call = _checked(options, q, k, v, initial_state, return_state)
    if return_state and not varying(x[0]) <= varying(*x[1:]):
        # Inside shard_map, all results of one call vary over all that q does; a state must not.
        state = _state_of_keys(_by_kernels, options, x[0], x[1], x[2], initial_state)
        out, den = _jax_ops.FORWARD.bind(*x, call=dataclasses.replace(call, state=False))
        return out, state, den
    out, *parts, den = _jax_ops.FORWARD.bind(*x, call=call)
    return out, State(*parts) if parts else None, den


def _state_of_keys(
    attend: Callable[..., tuple[Array, State | None, Array]],
    options: Options,
    q: Array,
    k: Array,
    v: Array,
    initial_state: Any,
) -> Any:
    """The state after these keys; of q, only its type counts.

    A row of zeros takes its place, not one of q's, whose heads may be on other devices; and not no
    row, with which XLA (JAX 0.11.2 on a CPU) dies of a segmentation fault as it compiles gradients.
    """
    row = jnp.zeros_like(k[..., :1, :], q.dtype)
    return attend(options, row, k, v, initial_state, True)[1]


def _by_xla(
    options: Options, q: Any, k: Any, v: Any, initial_state: Any, return_state: bool
) -> tuple[Array, State | None, Array]:
    x, _ = _checked(options, q, k, v, initial_state, return_state)
    initial = State(*x[3:]) if x[3:] else None
    results: tuple[Array, State | None, Array]
    results = _plain(x[0], x[1], x[2], initial, options, return_state)
    return results


_plain = jax.jit(_jax_chunked.attention, static_argnums=(4, 5))


def _over_devices(
    attend: Callable[..., tuple[Array, State | None, Array]],
    options: Options,
    axis_name: AxisName | None,
    q: Any,
    k: Any,
    v: Any,
    initial_state: Any,
    return_state: bool,
    return_normalizer: bool,
) -> Any:
    """What `attend` gives, for this device's piece of a sequence if there is an axis_name."""
    return_state = checks.flag("return_state", return_state)
    return_normalizer = checks.flag("return_normalizer", return_normalizer)
    if axis_name is None:
        out, state, den = attend(options, q, k, v, initial_state, return_state)
        return _results(out, state, den, return_state, return_normalizer)
    x, _ = _checked(options, q, k, v, initial_state, return_state)
    q, k, v, initial = x[0], x[1], x[2], State(*x[3:]) if x[3:] else None
    _jax_sequence.check_pieces(axis_name, options.causal, q.shape[-2], k.shape[-2])
    own = _state_of_keys(attend, options, q, k, v, None)
    before, final = _jax_sequence.exchange(own, axis_name, options.causal, initial, return_state)
    out, _, den = attend(options, q, k, v, before, False)
    return _results(out, final, den, return_state, return_normalizer)


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: None = None,
    mask: None = None,
    *,
    is_causal: bool = False,
    a: float = 1.0,
    b: float = 1.0,
    qk_norm: str | None = "l2",
    feature_map: str = "identity",
    normalize: bool = True,
    precision: Any = None,
    dtype: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    **unused: Any,
) -> Array:
    """Linear attention in the signature and layout of `jax.nn.dot_product_attention`.

    It can be the ``attention_fn`` of Flax's ``nnx.MultiHeadAttention``. Nothing is transposed in
    memory on the way to the kernels, and keys and values are not repeated for grouped heads.

    Parameters
    ----------
    query, key, value : jax.Array
        ``([B,] T, N, H)``, ``([B,] S, K, H)`` and ``([B,] S, K, Hv)``; N is a multiple of K, and
        B broadcasts.
    is_causal : bool
        Row i sees the keys j <= i; needs T = S.
    a, b, qk_norm, feature_map, normalize
        As in `linear_attention`.
    precision : None, "highest", "tf32" or jax.lax.Precision, optional
        None is "highest"; JAX's DEFAULT and HIGH are "tf32".
    dtype : dtype, optional
        What query, key and value are converted to first.
    dropout_rate, deterministic
        A rate is refused unless deterministic: there are no weights to drop.
    bias, mask, **unused
        Other arguments of the functions of JAX and Flax. Linear attention cannot honour bias, mask,
        scale, query_seq_lengths, key_value_seq_lengths, local_window_size, return_residual or
        module: they must be None or left out.

    Returns
    -------
    jax.Array ``([B,] T, N, Hv)``

    Raises
    ------
    TypeError
        An argument that neither function has; as `linear_attention`.
    ValueError
        An argument that linear attention cannot honour; as `linear_attention`.
    """
    _jax_heads.refuse(bias=bias, mask=mask, **unused)
    _jax_heads.refuse_dropout(dropout_rate, deterministic)
    causal = checks.flag("is_causal", is_causal)
    options = make_options(
        causal, a, b, qk_norm, feature_map, normalize, _jax_heads.precision(precision)
    )
    q, k, v = (_as_jax(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if dtype is not None:
        q, k, v = (x.astype(dtype) for x in (q, k, v))
    _jax_heads.check_heads(q, k, v, causal)
    heads, key_heads = q.shape[-2], k.shape[-2]
    repeats = _jax_heads.key_repeats(q, key_heads)
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, -2) for x in (k, v))
        key_heads *= repeats
    grouped = heads != key_heads
    if grouped:
        q = q.reshape(*q.shape[:-2], key_heads, heads // key_heads, q.shape[-1])
        k, v = k[..., None, :], v[..., None, :]
    rows = -4 if grouped else -3
    q, k, v = (jnp.moveaxis(x, rows, -2) for x in (q, k, v))
    x, call = _checked(options, q, k, v, None, False)
    call = dataclasses.replace(call, heads=2 if grouped else 1)
    out = jnp.moveaxis(_jax_ops.FORWARD.bind(*x, call=call)[0], -2, rows)
    return out.reshape(*out.shape[:-3], heads, out.shape[-1]) if grouped else out


def _checked(
    options: Options, q: Any, k: Any, v: Any, initial_state: Any, return_state: bool
) -> tuple[list[Array], _jax_ops.Call]:
    """The arrays, and what a primitive is told about them; or the error that a caller deserves."""
    x = [_as_jax(name, y) for name, y in (("q", q), ("k", k), ("v", v))]
    if initial_state is not None:
        parts = checks.state_parts("initial_state", initial_state)._asdict().items()
        x += [_as_jax(f"initial_state.{field}", part) for field, part in parts]
    call = _jax_ops.Call(options, initial_state is not None, return_state)
    _jax_ops.FORWARD.problem(call, x)
    return x, call


def _as_jax(name: str, x: Any) -> Array:
    if isinstance(x, jax.Array):  # tracers are, too
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # of which NumPy knows nothing
            raise TypeError(
                f"{name} has dtype {x.dtype}, but must be one of {', '.join(dtypes.NAMES)}: "
                f"draw numbers with a key first, as by jax.random.normal"
            )
        return x
    if type(x) is np.ndarray or isinstance(x, np.generic):
        checks.dtype(name, x)
        return jnp.asarray(x)
    module = type(x).__module__.partition(".")[0]
    raise TypeError(
        f"{name} is a {module}.{type(x).__name__}, but JAX or NumPy arrays are needed: "
        f"write jax.numpy.asarray({name})"
    )


def _results(
    out: Array, state: State | None, den: Array, return_state: bool, return_normalizer: bool
) -> Any:
    den = jax.lax.stop_gradient(den)
    if return_state:
        return (out, state, den) if return_normalizer else (out, state)
    return (out, den) if return_normalizer else out
