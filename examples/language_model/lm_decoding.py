"""Text from a trained model, a token at a time, from what its layers remember.

Linear attention remembers a State, whose size does not depend on how much there was to read;
softmax attention the keys and values of all tokens. Layers are apart here, not stacked: slices of
a stack would be copied for each token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lm_config import ModelConfig, UserError
from lm_model import Block, norm, rebuild, turns, wide_product

from la_cupy.results import State

Array = Any
Tree = Any
Caches = Any

CHUNK = 32
"""Tokens that are decoded by one program, without a word to the host."""


class Decoder:
    """A model whose parameters are laid out for decoding, in the type that it computes in.

    Parameters
    ----------
    config : ModelConfig
    parameters : dict
        As `lm_checkpoints.parameters_of` returns them.
    capacity : int
        The most tokens, prompt included, for which softmax attention keeps room.
    """

    def __init__(self, config: ModelConfig, parameters: Tree, capacity: int) -> None:
        self.config, self.capacity = config, capacity
        self.parameters = jax.jit(partial(_apart, config))(parameters)
        self._block = rebuild(lambda: Block(config, nnx.Rngs(0)))
        self._norm = rebuild(lambda: norm(config, nnx.Rngs(0)))
        self._read = jax.jit(self._run, static_argnums=2)
        self._step = jax.jit(self._run)
        self._decode = jax.jit(self._tokens, static_argnums=(4, 5), donate_argnums=3)

    def empty(self, batch: int) -> Caches:
        """What the layers remember before there is anything to remember."""
        c = self.config
        if c.attention == "linear":
            lead, d = (batch, c.heads), c.head_width
            shapes = State((*lead, d, d), (*lead, d), (*lead, d), lead)
            return [State(*(jnp.zeros(s, jnp.float32) for s in shapes)) for _ in range(c.layers)]
        shape = batch, self.capacity, c.heads, c.head_width
        return [tuple(jnp.zeros(shape, c.dtype) for _ in range(2)) for _ in range(c.layers)]

    def remembered(self, batch: int) -> int:
        """Bytes of what the layers remember."""
        leaves = jax.tree.leaves(jax.eval_shape(lambda: self.empty(batch)))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    def read(self, prompt: np.ndarray[Any, Any]) -> tuple[Array, Caches]:
        """Logits (B, vocabulary) of what follows a prompt (B, N), and what is remembered of it."""
        result: tuple[Array, Caches] = self._read(
            self.parameters, jnp.asarray(prompt), 0, self.empty(len(prompt))
        )
        return result

    def step(
        self, tokens: np.ndarray[Any, Any], start: int, caches: Caches
    ) -> tuple[Array, Caches]:
        """As `read`, of tokens (B, N) that come after `start` others."""
        result: tuple[Array, Caches] = self._step(
            self.parameters, jnp.asarray(tokens), jnp.asarray(start), caches
        )
        return result

    def decode(
        self, token: Array, start: int, caches: Caches, steps: int, temperature: float, key: Array
    ) -> tuple[Array, Array, Caches]:
        """`steps` tokens after `token` (B,), which is at place `start`: (steps, B), last, caches."""
        result: tuple[Array, Array, Caches] = self._decode(
            self.parameters, (token, jnp.asarray(start)), key, caches, steps, temperature
        )
        return result

    def _run(self, parameters: Tree, tokens: Array, start: Any, caches: Caches) -> Any:
        """Logits after the last of tokens (B, N), which begin at place `start`."""
        x = parameters["embed"]["embedding"][tokens]
        by = turns(self.config, tokens.shape[1], start)
        new = []
        for part, cache in zip(parameters["blocks"], caches, strict=True):
            x, cache = self._block(part)(x, by, start, cache)
            new.append(cache)
        x = self._norm(parameters["norm"])(x[:, -1])
        return wide_product(x, parameters["head"]["kernel"]), new

    def _tokens(
        self, parameters: Tree, place: Any, key: Array, caches: Caches, steps: int, temperature: Any
    ) -> Any:
        def one(carry: Any, key: Array) -> Any:
            token, start, caches = carry
            logits, caches = self._run(parameters, token[:, None], start, caches)
            token = sample(logits, temperature, key)
            return (token, start + 1, caches), token

        carry = (*place, caches)
        (token, _, caches), tokens = jax.lax.scan(one, carry, jax.random.split(key, steps))
        return tokens, token, caches


def _apart(config: ModelConfig, parameters: Tree) -> Tree:
    """Layers apart, matrices in the type of products."""
    stacked = parameters["blocks"]
    blocks = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.layers)]
    return jax.tree.map(
        lambda x: x.astype(config.dtype) if x.ndim > 1 else x, {**parameters, "blocks": blocks}
    )


def sample(logits: Array, temperature: float, key: Array) -> Array:
    """The likeliest token at temperature 0; else one drawn from the softmax of logits / it."""
    if temperature == 0:
        return jnp.argmax(logits, -1)
    return jax.random.categorical(key, logits / temperature)


def generate(
    decoder: Decoder, prompt: list[int], tokens: int, temperature: float = 0.0, seed: int = 0
) -> Iterator[list[int]]:
    """The tokens that follow a prompt, a few at a time."""
    if not prompt:
        raise UserError("the prompt is empty: give --prompt at least one character")
    if decoder.config.attention == "softmax" and len(prompt) + tokens > decoder.capacity:
        raise UserError(
            f"prompt and text have {len(prompt) + tokens} tokens, but there is room for "
            f"{decoder.capacity}: ask for fewer --tokens"
        )
    key = jax.random.key(seed)
    logits, caches = decoder.read(np.asarray([prompt]))
    key, now = jax.random.split(key)
    token = sample(logits, temperature, now)
    yield [int(token[0])]
    done = 1
    while done < tokens:
        key, now = jax.random.split(key)
        # all chunks have one length, so that one program decodes them; what is over is dropped
        start = len(prompt) + done - 1
        some, token, caches = decoder.decode(token, start, caches, CHUNK, temperature, now)
        found = [int(t) for t in np.asarray(some)[: tokens - done, 0]]
        yield found
        done += len(found)


def capacity_for(prompt: int, tokens: int) -> int:
    """Room for a prompt and so many tokens in whole chunks."""
    return prompt + CHUNK * -(-tokens // CHUNK)


class Words:
    """Tokens to text as they come: characters of several tokens are held back until whole."""

    def __init__(self, tokenizer: Any) -> None:
        alphabet = byte_of_letter()
        self._bytes = [
            bytes(alphabet.get(letter, 0) for letter in tokenizer.id_to_token(i) or "")
            for i in range(tokenizer.get_vocab_size())
        ]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens complete; a token that stands for none gives none."""
        found = (self._bytes[t] for t in tokens if 0 < t < len(self._bytes))
        return self._decoder.decode(b"".join(found))


def byte_of_letter() -> dict[str, int]:
    """Byte-level tokens write each byte as a visible letter: itself, or the next from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
