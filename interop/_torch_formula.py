"""The operator in differentiable torch operations, for second derivatives and forward mode.

Chunks of C rows, all at once, in O(N (C + D E / C)) memory. With one column more the operator is
the unnormalised one, for q^ = [b q~, a], k^ = [k~, 1], v^ = [v, 1], and a matrix is the state:

    S = sum_j k^[j] v^[j]^T = [[kv, k_sum], [v_sum, count]]
    [num, den][i] = q^[i] (S before i's chunk) + sum_{j <= i of the chunk} (q^[i] . k^[j]) v^[j]
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as nnf

from la_cupy.problem import Options

from ._torch_run import promoted


def linear_attention(
    options: Options, q: Tensor, k: Tensor, v: Tensor, *initial: Tensor
) -> tuple[Tensor, ...]:
    """(out, kv, k_sum, v_sum, count): out in the promoted type, states as wide as sums are."""
    with torch.autocast(q.device.type, enabled=False):
        return _linear_attention(options, q, k, v, *initial)


def _linear_attention(
    options: Options, q: Tensor, k: Tensor, v: Tensor, *initial: Tensor
) -> tuple[Tensor, ...]:
    causal, a, b, qk_norm, feature_map, normalize, _ = options
    dtype = promoted(q, k, v)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    queries = _features(q.to(sums), qk_norm, feature_map)
    queries = nnf.pad(b * queries, (0, 1), value=a)
    keys = nnf.pad(_features(k.to(sums), qk_norm, feature_map), (0, 1), value=1.0)
    values = v.to(sums)
    # What normalised rows get added to all values does not change derivatives of q and k, and
    # would take digits from them: it comes off before, and back on behind.
    centred = normalize and v.shape[-2] > 0
    centre = values.detach().mean(-2, keepdim=True) if centred else values.new_zeros(())
    values = nnf.pad(values - centre, (0, 1), value=1.0)
    shift = nnf.pad(centre, (0, 1)) if centred else centre

    before = _pack(*(x.to(sums) for x in initial)) if initial else keys.new_zeros(())
    if before.ndim:
        before = before - before[..., -1:] * shift
    if causal:
        rows, total = _causal(queries, keys, values, before)
    else:
        total = before + keys.mT @ values
        rows = queries @ total
    num, den = rows[..., :-1], rows[..., -1:]
    if normalize:
        zero = den == 0
        num = torch.where(zero, 0.0, num / torch.where(zero, 1.0, den) + centre)
    total = total + total[..., -1:] * shift
    state = (total[..., :-1, :-1], total[..., :-1, -1], total[..., -1, :-1], total[..., -1, -1])
    return num.to(dtype), *state


def gradients(
    options: Options,
    counts: tuple[int, int],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *states: Tensor,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dinitial_state): `states` are counts[0] parts of that state, counts[1] of dstate."""
    inputs = (q, k, v, *states[: counts[0]])
    results, pull = torch.func.vjp(lambda *x: linear_attention(options, *x), *inputs)
    given = (dout, *states[counts[0] :])
    cotangents = [x.to(y.dtype).expand(y.shape) for x, y in zip(given, results, strict=False)]
    cotangents += [torch.zeros_like(y) for y in results[len(given) :]]
    found: tuple[Tensor, ...] = pull(tuple(cotangents))
    return found


def push_forward(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The derivative of `function` along `tangents`, where None is zero.

    The pullback is linear, so its own pullback is the derivative: torch.func.jvp would do, were it
    not refused inside forward-mode autograd.
    """
    results, pull = torch.func.vjp(function, *inputs)
    _, push = torch.func.vjp(pull, tuple(map(torch.zeros_like, results)))
    pairs = zip(inputs, tangents, strict=True)
    along = tuple(torch.zeros_like(x) if tangent is None else tangent for x, tangent in pairs)
    found: tuple[Tensor, ...] = push(along)[0]
    return found


def _pack(kv: Tensor, k_sum: Tensor, v_sum: Tensor, count: Tensor) -> Tensor:
    lead = torch.broadcast_shapes(kv.shape[:-2], k_sum.shape[:-1], v_sum.shape[:-1], count.shape)
    d, e = kv.shape[-2:]
    last = (k_sum[..., None].expand(*lead, d, 1), count[..., None, None].expand(*lead, 1, 1))
    left = torch.cat((kv.expand(*lead, d, e), v_sum[..., None, :].expand(*lead, 1, e)), -2)
    return torch.cat((left, torch.cat(last, -2)), -1)


def _causal(queries: Tensor, keys: Tensor, values: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [num, den], and the final S."""
    n, d, e = queries.shape[-2], queries.shape[-1], values.shape[-1]
    chunk = min(256, max(16, 1 << round(math.log2(d * e) / 2)))
    length = -(-max(n, keys.shape[-2], 1) // chunk) * chunk
    # aligned at the end, as the mask is: what is put in front are zeros, no keys
    queries, keys, values = (
        nnf.pad(x, (0, 0, length - x.shape[-2], 0)).unflatten(-2, (length // chunk, chunk))
        for x in (queries, keys, values)
    )
    own = keys.mT @ values
    start = nnf.pad(own[..., :-1, :, :], (0, 0, 0, 0, 1, 0)).cumsum(-3)
    start = start + (before.unsqueeze(-3) if before.ndim else before)
    rows = queries @ start + (queries @ keys.mT).tril() @ values
    rows = rows.flatten(-3, -2)[..., length - n :, :]
    return rows, start[..., -1, :, :] + own[..., -1, :, :]


def _features(x: Tensor, qk_norm: str | None, feature_map: str) -> Tensor:
    return _FEATURES[feature_map](_unit(x) if qk_norm == "l2" else x)


def _unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis; rows of zeros stay so, with zero gradient."""
    # |x| does not change x/|x|, so a constant may divide x first: no square over- or underflows
    size = x.detach().abs().amax(-1, keepdim=True)
    zero = size == 0
    x = x / torch.where(zero, 1.0, size)
    squares = (x * x).sum(-1, keepdim=True)
    return torch.where(zero, 0.0, x / torch.where(zero, 1.0, squares).sqrt())


_FEATURES = {
    "identity": lambda y: y,
    "elu1": lambda y: torch.relu(y) + torch.exp(torch.clamp(y, max=0.0)),
    "relu": torch.relu,
    "silu": nnf.silu,
    "exp": torch.exp,
}
