"""A transformer block of Flax NNX whose attention is la_cupy's, trained on data made here.

    pip install -e ".[jax]" flax
    python examples/jax_layer.py [--steps 150]

Each sequence counts upwards in strides of its own, modulo the size of the vocabulary. To say what
comes next, a position must find the stride from what came before it. Prints the loss as it falls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed: pip install 'jax>=0.10' flax")

from la_cupy.interop.jax import dot_product_attention

VOCABULARY, LENGTH, WIDTH, HEADS = 16, 64, 64, 4


class Block(nnx.Module):
    """Attention and a multilayer perceptron, each on normalised input and added to it."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS,
            in_features=WIDTH,
            decode=False,
            # the one line that makes a transformer linear in the length of its sequence
            attention_fn=partial(dot_product_attention, feature_map="exp", a=0.0),
            rngs=rngs,
        )
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.narrow(nnx.gelu(self.wide(self.norms[1](x))))


class Model(nnx.Module):
    """Tokens and their positions, two blocks, and a guess of the next token."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.guess = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.guess(x)


def batch(rng: np.random.Generator, size: int = 32) -> Any:
    """Sequences (size, LENGTH + 1) of tokens."""
    start, stride = rng.integers(VOCABULARY, size=(2, size, 1))
    return jnp.asarray((start + stride * np.arange(LENGTH + 1)) % VOCABULARY)


def loss(model: Model, tokens: Any) -> Any:
    """Mean cross entropy of the next token."""
    guesses = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(guesses, tokens[:, 1:]).mean()


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer[Model], tokens: Any) -> Any:
    """One step of training, compiled as a whole; the loss before it."""
    value, gradient = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, gradient)
    return value


def progress(steps: int) -> Iterable[int]:
    """A progress bar where there is a terminal to draw it on."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return range(steps)
    bar: Iterable[int] = tqdm(range(steps), desc="training", disable=not sys.stderr.isatty())
    return bar


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train a small transformer with la_cupy's attention"
    )
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args(arguments).steps
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    print(f"on {jax.devices()[0]}; a blind guess costs {np.log(VOCABULARY):.3f}")
    losses = []
    for i in progress(steps):
        losses.append(float(step(model, optimizer, batch(rng))))
        if i % 25 == 0 or i == steps - 1:
            print(f"step {i:4d}  loss {losses[-1]:.3f}")
    if not losses[-1] < losses[0]:
        sys.exit("the loss did not fall")


if __name__ == "__main__":
    main()
