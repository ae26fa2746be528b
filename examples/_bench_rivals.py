"""What la_cupy is compared with: flash-linear-attention and torch's softmax, or NumPy's softmax.

A rival runs the operator it has, which is not always ours; its result is checked against the
member of the family that it claims to compute.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from _bench_cases import DTYPES, Case, Inputs
from _bench_check import Weights

# Softmax takes time in N squared; beyond these it tells nothing that the shorter ones do not.
LONGEST_SOFTMAX = 32768
LONGEST_NUMPY_SOFTMAX = 4096


@dataclass(frozen=True)
class Rival:
    """One function of another library.

    prepare(inputs) turns arrays of ours into its own, outside the timed region;
    forward(prepared) and both(prepared) are timed, and forward's result can be read by `ours`.
    `weights` says what it computes; None is softmax attention.
    """

    name: str
    prepare: Callable[[Inputs], Any]
    forward: Callable[[Any], Any]
    both: Callable[[Any], Any] | None
    ours: Callable[[Any], Any]
    weights: Weights | None
    peak: Callable[[Callable[[], object]], int] | None = None  # bytes, by its own allocator's count
    longest: int | None = None  # the largest N it is timed at

    @property
    def positive(self) -> bool:
        """Needs positive q and k, since it divides by a sum of their products."""
        return self.weights is not None and self.weights.normalize

    def applies(self, case: Case) -> bool:
        return self.longest is None or case.n <= self.longest


def numpy_softmax() -> Rival:
    """Masked softmax attention as well as NumPy can do it: batched BLAS, one buffer of weights."""

    def prepare(inputs: Inputs) -> Inputs:
        # BLAS has no 16-bit floats
        x = (inputs.q, inputs.k, inputs.v, inputs.dout)
        return Inputs(*(part.astype(np.result_type(part, np.float32), copy=False) for part in x))

    def forward(inputs: Inputs) -> Any:
        n, d = inputs.q.shape[-2:]
        scores = inputs.q @ inputs.k.swapaxes(-1, -2)
        scores *= scores.dtype.type(d**-0.5)
        np.copyto(scores, -np.inf, where=~np.tri(n, dtype=bool))
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        out = scores @ inputs.v
        out /= scores.sum(-1, keepdims=True)
        return out

    return Rival(
        "numpy softmax", prepare, forward, None, lambda x: x, None, longest=LONGEST_NUMPY_SOFTMAX
    )


def torch_rivals(xp: Any, report: Callable[[str], None]) -> list[Rival]:
    """Those installed here, for arrays of `xp`; `report` is told of the others."""
    for package in ("torch", "fla"):
        if importlib.util.find_spec(package) is None:
            report(f"not compared: {package} is not installed")
            if package == "torch":
                return []
    import torch

    rivals = [_torch_rival(xp, "torch.sdpa causal", _sdpa(torch), "bhnd", None)]
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn

        plain = Weights(a=0.0, b=1.0, l2=False, normalize=False)
        divided = Weights(a=0.0, b=1.0, l2=False, normalize=True)
        for function, weights in (
            (chunk_linear_attn, plain),
            (chunk_linear_attn, divided),
            (fused_chunk_linear_attn, plain),
        ):
            name = f"fla.{function.__name__.removesuffix('_attn')}(norm={weights.normalize})"
            run = _fla(function, weights.normalize)
            rivals.append(_torch_rival(xp, name, run, "bnhd", weights))
    return rivals


def _sdpa(torch: Any) -> Callable[..., Any]:
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda q, k, v: attention(q, k, v, is_causal=True)


def _fla(function: Callable[..., Any], normalize: bool) -> Callable[..., Any]:
    return lambda q, k, v: function(q, k, v, scale=1.0, normalize=normalize)[0]


def _torch_rival(
    xp: Any, name: str, run: Callable[..., Any], layout: str, weights: Weights | None
) -> Rival:
    import torch

    def prepare(inputs: Inputs) -> list[Any]:
        tensors = [_to_torch(torch, x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        if layout == "bnhd":
            # No copy where our arrays are laid out so (--layout bnhd); else one, not timed.
            tensors = [x.transpose(1, 2).contiguous() for x in tensors]
        return [x.requires_grad_() for x in tensors[:3]] + tensors[3:]

    def forward(tensors: list[Any]) -> Any:
        with torch.no_grad():
            return run(*tensors[:3])

    def both(tensors: list[Any]) -> Any:
        out = run(*tensors[:3])
        return out, torch.autograd.grad(out, tensors[:3], tensors[3])

    def ours(out: Any) -> Any:
        return _from_torch(xp, torch, out.transpose(1, 2) if layout == "bnhd" else out)

    def peak(call: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return int(torch.cuda.max_memory_allocated() - before)

    longest = LONGEST_SOFTMAX if weights is None else None
    return Rival(name, prepare, forward, both, ours, weights, peak, longest)


def _to_torch(torch: Any, x: Any) -> Any:
    """An array as a tensor of the same memory; bfloat16 by way of its bits."""
    if x.dtype == DTYPES["bfloat16"]:
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def _from_torch(xp: Any, torch: Any, x: Any) -> Any:
    if x.dtype == torch.bfloat16:
        return xp.from_dlpack(x.view(torch.int16)).view(DTYPES["bfloat16"])
    return xp.from_dlpack(x)
