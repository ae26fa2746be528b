"""PyTorch: `linear_attention` on tensors, with gradients of every order and torch.compile.

CUDA tensors are read where they are (copied only where the last axis is not contiguous), in
torch's current stream; results and workspaces come from torch's allocator. CPU tensors are
computed by the NumPy path.

>>> import torch
>>> from la_cupy.interop.torch import linear_attention
>>> q, k, v = torch.randn(3, 8, 100, 16, requires_grad=True).unbind()
>>> out = linear_attention(q, k, v, causal=True)
>>> out.shape
torch.Size([8, 100, 16])
>>> out.sum().backward()
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from la_cupy import checks
from la_cupy.api import OperatorOptions
from la_cupy.problem import Options, make_options
from la_cupy.results import State

from . import _torch_autograd as autograd

__all__ = ["linear_attention", "register_transformers", "scaled_dot_product_attention"]


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[False] = False,
    return_normalizer: Literal[False] = False,
    **options: Unpack[OperatorOptions],
) -> Tensor: ...
@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[True],
    return_normalizer: Literal[False] = False,
    **options: Unpack[OperatorOptions],
) -> tuple[Tensor, State]: ...
@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[False] = False,
    return_normalizer: Literal[True],
    **options: Unpack[OperatorOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: Literal[True],
    return_normalizer: Literal[True],
    **options: Unpack[OperatorOptions],
) -> tuple[Tensor, State, Tensor]: ...
@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_state: bool = False,
    return_normalizer: bool = False,
    **options: Unpack[OperatorOptions],
) -> Any: ...


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> Any:
    """Attention with weights ``a + b (q~ . k~)``, in time linear in the number of rows.

    For each row i of q, with ``q~ = phi(norm(q))`` and ``k~ = phi(norm(k))``::

        w[i, j] = a + b (q~[i] . k~[j]),   0 where causal and j > i + (M - N)
        num[i]  = sum_j w[i, j] v[j]       + a v_sum + b q~[i] kv       (initial state)
        den[i]  = sum_j w[i, j]            + a count + b q~[i] . k_sum
        out[i]  = num[i] / den[i]  (normalize)  or  num[i]

    This is `la_cupy.linear_attention` on tensors, with the same meaning of every option. Results
    and the state are differentiable; first derivatives in reverse mode are the kernels' own,
    second ones and forward mode are computed by torch operations in O(N D) memory.

    Parameters
    ----------
    q, k, v : torch.Tensor
        Queries ``(..., N, D)``, keys ``(..., M, D)`` and values ``(..., M, E)`` on one device,
        CPU or CUDA, of float16, bfloat16, float32 or float64. Leading axes broadcast as in
        torch.matmul; any strides. Under torch.autocast they are cast to its type, as
        torch's own scaled_dot_product_attention does, unless they are float64.
    causal, a, b, qk_norm, feature_map, normalize, precision
        As in `la_cupy.linear_attention`.
    initial_state : la_cupy.State or tuple of four tensors, optional
        What earlier keys left behind.
    return_state, return_normalizer : bool
        Also return the State of tensors after these keys, and den ``(..., N)``, in this order.

    Returns
    -------
    out : torch.Tensor ``(broadcast(q, k, v, initial_state), N, E)``
        In the promoted type of q, k and v.
    state : State, if return_state
        float32, or float64 for float64 inputs; differentiable.
    normalizer : torch.Tensor ``(..., N)``, if return_normalizer
        den, in the type of the state; not differentiable.

    Raises
    ------
    TypeError, ValueError
        As `la_cupy.linear_attention`; also for tensors on several devices, or on others than
        CPU and CUDA.

    Examples
    --------
    >>> import torch
    >>> q = k = torch.eye(2)
    >>> linear_attention(q, k, torch.tensor([[1.0], [4.0]]))
    tensor([[2.],
            [3.]])
    """
    options = Options(causal, a, b, qk_norm, feature_map, normalize, precision)
    if not torch.compiler.is_compiling():  # the op's checks run when it is traced
        options = _checked(options)
        return_state = checks.flag("return_state", return_state)
        return_normalizer = checks.flag("return_normalizer", return_normalizer)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
    q, k, v = _autocast(q, k, v)
    initial: tuple[Tensor, ...] = ()
    if initial_state is not None:
        initial = checks.state_parts("initial_state", initial_state)
        for field, x in zip(State._fields, initial, strict=True):
            _check_tensor(f"initial_state.{field}", x)
    out, den, *parts = autograd.forward(options, return_state, q, k, v, *initial)
    if return_state:
        state = State(*parts)
        return (out, state, den) if return_normalizer else (out, state)
    return (out, den) if return_normalizer else out


def _checked(options: Options) -> Options:
    for name in ("a", "b"):
        if isinstance(getattr(options, name), Tensor):
            raise TypeError(
                f"{name} is a tensor, but must be a number on the host, since reading it may wait "
                f"for a GPU: write float({name}) yourself, outside the loop"
            )
    return make_options(*options)


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        kind = type(x)
        raise TypeError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, but PyTorch tensors are needed: "
            f"write torch.as_tensor({name}), or call la_cupy.linear_attention for arrays"
        )
    if x.layout != torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(
            f"{name} has layout {layout}, but must be a dense tensor: write {name}.to_dense(), or "
            f"pad what is nested with torch.nested.to_padded_tensor"
        )


def _autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that autocast asks for on the device of the first."""
    device = inputs[0].device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return inputs
    dtype = torch.get_autocast_dtype(device)
    castable = [x.is_floating_point() and x.dtype != torch.float64 for x in inputs]
    return tuple(x.to(dtype) if cast else x for x, cast in zip(inputs, castable, strict=True))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, computed as linear attention.

    The weights are ``a + b (q~ . k~)`` instead of ``exp(scale q . k)``; one import swaps it in.

    Parameters
    ----------
    query, key, value : torch.Tensor
        ``(..., Hq, L, D)``, ``(..., H, S, D)`` and ``(..., H, S, E)``.
    attn_mask, dropout_p
        None and 0, since the weights are never formed one by one.
    is_causal : bool
        Row i sees the keys j <= i, counted from the first, as in torch; L is at most S.
    scale : None
        The rows of q and k have length 1; the slope of the weight is the option b.
    enable_gqa : bool
        Hq is a multiple of H: groups of heads of the query share a key and a value, which are not
        repeated in memory.
    options
        a, b, qk_norm, feature_map, normalize and precision of `linear_attention`.

    Returns
    -------
    torch.Tensor ``(..., Hq, L, E)``

    Raises
    ------
    TypeError
        For other options; as `linear_attention`.
    ValueError
        For attn_mask, dropout_p and scale, and for is_causal where L > S; as `linear_attention`.

    Examples
    --------
    >>> import torch
    >>> q, k = torch.randn(1, 8, 10, 16), torch.randn(1, 2, 10, 16)
    >>> scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).shape
    torch.Size([1, 8, 10, 16])
    """
    _refuse_unknown("scaled_dot_product_attention", options)
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, x)
        if x.ndim < 2:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but needs at least 2 axes, (..., rows, width): "
                f"write {name}[None, :] for a single row"
            )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key has {key.shape[-2]} rows and value {value.shape[-2]}, but there must be one value "
            f"for each key: pass equally many"
        )
    is_causal, enable_gqa = (
        checks.flag(name, x) for name, x in (("is_causal", is_causal), ("enable_gqa", enable_gqa))
    )
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is a mask, but linear attention never forms the weights that it would "
            "apply to: leave it out, and pass is_causal=True for a causal mask"
        )
    if dropout_p:
        raise ValueError(
            f"dropout_p is {dropout_p}, but linear attention never forms the weights that it would "
            f"apply to: pass dropout_p=0.0, and drop entries of the result instead"
        )
    if scale is not None:
        raise ValueError(
            f"scale is {scale}, but linear attention scales the rows of q and k to length 1: "
            f"leave it out; the slope of the weight is the option b"
        )
    if is_causal:
        rows, keys = query.shape[-2], key.shape[-2]
        if rows > keys:
            raise ValueError(
                f"is_causal came with {rows} rows of query and {keys} of key, but takes no more "
                f"rows than keys: call linear_attention, whose mask is aligned at the end"
            )
        if rows < keys:  # no row sees the others
            key, value = key[..., :rows, :], value[..., :rows, :]
    return _attend(query, key, value, enable_gqa, causal=is_causal, **options)


def _attend(query: Tensor, key: Tensor, value: Tensor, grouped: bool, **options: Any) -> Tensor:
    """Heads of the query that share keys become one more leading axis, which k and v lack."""
    if not grouped or min(query.ndim, key.ndim) < 3 or query.shape[-3] == key.shape[-3]:
        out: Tensor = linear_attention(query, key, value, **options)
        return out
    heads, shared = query.shape[-3], key.shape[-3]
    if shared == 0 or heads % shared:
        raise ValueError(
            f"query has {heads} heads and key has {shared}, but the first must be a multiple of "
            f"the second: split the heads evenly"
        )
    query = query.unflatten(-3, (shared, heads // shared))
    out = linear_attention(query, key.unsqueeze(-3), value.unsqueeze(-3), **options)
    return out.flatten(-4, -3)


def _refuse_unknown(function: str, options: dict[str, Any]) -> None:
    """Of the operator's options, those that say how rows are weighted."""
    for name in options:
        if name not in _WEIGHTS:
            raise TypeError(
                f"{function} has no option {name}: leave it out, or call linear_attention; the "
                f"options are {', '.join(_WEIGHTS)}"
            )


_WEIGHTS = tuple(name for name in Options._fields if name != "causal")


def register_transformers(name: str = "la_cupy", **options: Any) -> None:
    """Make linear attention an attention implementation of Hugging Face Transformers.

    Afterwards ``AutoModelForCausalLM.from_config(config, attn_implementation=name)`` (or
    ``from_pretrained``) builds models that use it. The mask is causal, aligned at the last key,
    so that a cache works, or none where the model asks for none. Padded batches, packed sequences,
    sliding windows, static caches and dropout raise ValueError. The models' own factor of the
    scores has no effect, as the rows of q and k are scaled to length 1; with qk_norm=None it
    multiplies b.

    Parameters
    ----------
    name : str
        What the implementation is to be called.
    options
        a, b, qk_norm, feature_map, normalize and precision of `linear_attention`.

    Raises
    ------
    ImportError
        Transformers is not installed.
    TypeError, ValueError
        An option that `linear_attention` would refuse.

    Examples
    --------
    >>> from la_cupy.interop.torch import register_transformers
    >>> register_transformers("la_cupy", feature_map="elu1")  # doctest: +SKIP
    """
    _refuse_unknown("register_transformers", options)
    make_options(**options)
    from . import _torch_transformers

    _torch_transformers.register(name, _attend, options)
