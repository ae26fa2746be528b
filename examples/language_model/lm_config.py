"""What a model is, and how it is trained: two frozen dataclasses and the presets that fill them."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from la_cupy.problem import make_options

ATTENTIONS = ("linear", "softmax")
REMATS = ("none", "dots", "layers")


class UserError(Exception):
    """A mistake in what was asked for: one sentence, which the programs print without a trace."""


def prepare_gpu(exact: bool = False) -> None:
    """Environment of JAX and XLA, to be set before they look for devices.

    The state of a large model takes most of a GPU, of which JAX leaves a quarter unless told not
    to. `exact` leaves out algorithms that add in another order each time, such as cuDNN's usual
    gradient of softmax attention, so that a resumed run has the losses of one that was not stopped.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    flags = os.environ.get("XLA_FLAGS", "")
    if exact and "xla_gpu_exclude_nondeterministic_ops" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_exclude_nondeterministic_ops=true".strip()


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. a, b, qk_norm and feature_map are those of linear attention."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    length: int  # the longest sequence that it takes
    attention: str = "linear"
    a: float = 1.0
    b: float = 1.0
    qk_norm: str | None = "l2"
    feature_map: str = "identity"
    dtype: str = "bfloat16"  # of activations and products; parameters are float32

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UserError(
                f"attention is {self.attention!r}, but must be one of {', '.join(ATTENTIONS)}"
            )
        if self.width % self.heads or self.head_width % 2:
            raise UserError(
                f"width is {self.width} and heads is {self.heads}, but a head must have an even "
                f"number of columns: choose a width that is a multiple of {2 * self.heads}"
            )
        try:
            make_options(True, self.a, self.b, self.qk_norm, self.feature_map)
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def matrix_parameters(self) -> int:
        """Numbers that every token is multiplied with: all but the table of embeddings."""
        return 12 * self.layers * self.width**2 + self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All matrices; the scales of the norms add less than a thousandth."""
        return self.matrix_parameters + self.width * self.vocabulary

    def flops_per_token(self, length: int) -> float:
        """Of forward and backward together, as model-FLOPs utilisation counts them.

        A matrix costs 6 for each of its numbers. Softmax attention has two products with the half
        of `length` keys that the mask leaves, linear attention two with a state of head_width rows:
        k into it, and q with it. What is computed again (remat, or inside a
        kernel) does not count.
        """
        keys = length / 2 if self.attention == "softmax" else self.head_width
        attention = 6 * 2 * self.layers * self.width * keys
        return 6 * self.matrix_parameters + attention


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. With the text, it decides every loss: a resumed run must agree."""

    steps: int
    batch: int
    learning_rate: float
    warmup: int = 100
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be 1 or more")


@dataclass(frozen=True)
class Preset:
    """Where the flags of train.py start from."""

    model: ModelConfig
    recipe: Recipe
    corpus_mb: int  # no more text than this is read
    remat: str = "none"


def _preset(
    vocabulary: int,
    layers: int,
    width: int,
    heads: int,
    length: int,
    steps: int,
    batch: int,
    rate: float,
    corpus_mb: int = 256,
    **other: Any,
) -> Preset:
    model = ModelConfig(vocabulary, layers, width, heads, length)
    recipe = Recipe(steps, batch, rate, warmup=min(steps // 10, 1000))
    return Preset(model, recipe, corpus_mb, **other)


PRESETS = {
    # a minute on two cores
    "tiny": _preset(2048, 4, 128, 2, 128, 300, 8, 3e-3, corpus_mb=8),
    "10m": _preset(8192, 8, 256, 4, 512, 2000, 64, 2e-3, corpus_mb=64),
    "30m": _preset(16384, 10, 384, 6, 1024, 3000, 64, 1.5e-3),
    "120m": _preset(16384, 12, 768, 6, 1024, 3000, 64, 1e-3),
    "350m": _preset(32768, 24, 1024, 8, 2048, 20000, 64, 6e-4, remat="dots"),
    # 24 layers of width 2048 as in Pythia-1.4B; 50304 = 393 * 128 is 50 k for the tensor cores
    "1.4b": _preset(50304, 24, 2048, 16, 2048, 100000, 512, 2e-4, remat="dots"),
}


def variant(config: ModelConfig, text: str) -> ModelConfig:
    """`config` with the attention that a word describes.

    "softmax", "linear", or with options as in "linear:a=0,feature_map=exp,qk_norm=none".
    """
    kind, _, options = text.partition(":")
    changes: dict[str, Any] = {"attention": kind}
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name in ("a", "b"):
            try:
                changes[name] = float(value)
            except ValueError as error:
                raise UserError(f"{text!r} has {option!r}: {name} must be a number") from error
        elif name in ("feature_map", "qk_norm"):
            changes[name] = None if value == "none" else value
        else:
            raise UserError(
                f"{text!r} has {option!r}, but the options are a, b, feature_map and qk_norm"
            )
    return dataclasses.replace(config, **changes)


def as_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, for a log or beside a checkpoint."""
    return dataclasses.asdict(value)


def differences(asked: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The fields in which two configurations differ, in words."""
    names = dict.fromkeys((*asked, *found))
    return [
        f"{name} {found.get(name)!r} where {asked.get(name)!r} is asked for"
        for name in names
        if asked.get(name) != found.get(name)
    ]
