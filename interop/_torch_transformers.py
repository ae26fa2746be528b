"""The attention and mask functions that Hugging Face Transformers calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Attend = Callable[..., Tensor]

_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some models pass to change the weights; linear attention has none of these."""


def register(name: str, attend: Attend, options: dict[str, Any]) -> None:
    """Register `attend` as the attention implementation `name`, with its mask function."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register_transformers needs Hugging Face Transformers: pip install transformers"
        ) from error
    AttentionInterface.register(name, _attention(attend, options))
    AttentionMaskInterface.register(name, _mask)


def _attention(attend: Attend, options: dict[str, Any]) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """(B, H, N, D) in, (B, N, H, E) out."""
        if attention_mask is not None:
            raise ValueError(
                "attention_mask is a mask, but linear attention cannot apply one: pass whole "
                "sequences of one length"
            )
        if dropout:
            raise ValueError(
                f"dropout is {dropout}, but linear attention never forms the weights that it "
                f"would apply to: set attention_dropout=0.0 in the model's config"
            )
        for argument in _UNKNOWN:
            if others.get(argument) is not None:
                raise ValueError(
                    f"{argument} came with a value, but linear attention has no such thing: "
                    f"choose a model without it"
                )
        chosen = dict(options)
        if scaling is not None and options.get("qk_norm", "l2") is None:
            chosen["b"] = options.get("b", 1.0) * scaling
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = attend(query, key, value, True, causal=causal, **chosen)
        return out.transpose(1, 2), None

    return attention


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> None:
    """No mask, where causal or none at all is what is wanted; else ValueError."""
    from transformers import masking_utils

    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if mask_function is not None and mask_function not in plain:
        raise ValueError(
            "the model asks for a mask that is not merely causal, such as of packed sequences or a "
            "sliding window (which Transformers takes for granted while torch.compile traces a "
            "model without a cache), but linear attention cannot apply one: pass one sequence a "
            "row (and use_cache=True), or choose another attention implementation for this model"
        )
    is_causal = mask_function is not masking_utils.bidirectional_mask_function
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if is_causal and not aligned:
        raise ValueError(
            f"the cache holds {kv_length} keys beside {q_length} rows at {q_offset}, but the last "
            f"row must see the last key: use a dynamic cache, not a static one"
        )
    if attention_mask is not None and torch.compiler.is_compiling():
        raise ValueError(
            "attention_mask came while torch.compile traces the model, when its values are not "
            "known, but linear attention cannot leave out padding: leave the mask out"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask hides some tokens, but linear attention cannot leave out padding: "
            "pass whole sequences of one length, or one sequence at a time"
        )
