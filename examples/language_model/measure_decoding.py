"""Tokens a second of decoding, and what has to be remembered, against what was read before.

    python examples/language_model/measure_decoding.py [--preset 1.4b] [--contexts 2048 32768]

Linear attention decodes from a State, softmax attention from a cache of keys and values. Parameters
are random: speed does not depend on them. Checks first that decoding says what the whole model
says. Writes decoding.json to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lm_config import ATTENTIONS, PRESETS, ModelConfig, prepare_gpu
from lm_decoding import CHUNK, Decoder
from lm_model import Transformer, rebuild
from lm_report import Budget, machine, table, timed, write

Tree = Any


def wrong(config: ModelConfig) -> str:
    """What is wrong with decoding: the logits after a prompt in two pieces, against the whole."""
    small = dataclasses.replace(config, layers=2, vocabulary=1024, length=64, dtype="float32")
    parameters = parameters_of(small)
    tokens = np.random.default_rng(0).integers(1024, size=(2, 49))
    whole = rebuild(lambda: Transformer(small, nnx.Rngs(0)))(parameters)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(whole(jnp.asarray(tokens)))
        decoder = Decoder(small, parameters, 64)
        first, caches = decoder.read(tokens[:, :-1])
        last, _ = decoder.step(tokens[:, -1:], 48, caches)
    error = max(
        float(np.abs(np.asarray(found) - of).max() / np.abs(of).max())
        for found, of in ((first, expected[:, -2]), (last, expected[:, -1]))
    )
    return "" if error <= 1e-4 else f"WRONG: logits differ by {error:.1e}: no speed"


def parameters_of(config: ModelConfig) -> Tree:
    """Random ones."""
    make = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(0)))))
    return make()


def measure(config: ModelConfig, parameters: Tree, batch: int, context: int) -> dict[str, Any]:
    """As if `context` tokens had been read; reading them is not measured."""
    decoder = Decoder(config, parameters, context + CHUNK)
    caches = decoder.empty(batch)
    token, key = jnp.ones(batch, jnp.int32), jax.random.key(0)

    def once() -> None:
        nonlocal caches, token
        tokens, token, caches = decoder.decode(token, context, caches, CHUNK, 0.0, key)
        jax.block_until_ready(tokens)

    start = time.perf_counter()
    once()
    compiling = time.perf_counter() - start
    seconds = timed(once, 5)
    return {
        "ms_a_token": seconds / CHUNK * 1e3,
        "tokens_per_s": batch * CHUNK / seconds,
        "remembered_mib": decoder.remembered(batch) / 2**20,
        "compile_s": compiling,
    }


def measured(config: ModelConfig, parameters: Tree, batch: int, context: int) -> dict[str, Any]:
    """As `measure`, or that the memory of the device does not do."""
    try:
        return {"fault": None, **measure(config, parameters, batch, context)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"fault": "does not fit"}


def line(row: dict[str, Any]) -> list[Any]:
    """A row as the table has it."""
    context = row["context"] if row["attention"] == "softmax" else "any"
    about = [row["attention"], row["batch"], context]
    if row["fault"]:
        return [*about, row["fault"], "", ""]
    speed, size = f"{row['tokens_per_s']:,.0f}", f"{row['remembered_mib']:,.1f}"
    return [*about, f"{row['ms_a_token']:.2f}", speed, size]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="1.4b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--budget", type=float, default=400, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("measurements"))
    options = parser.parse_args(arguments)
    budget, longest, rows = Budget(options.budget), 0.0, []
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    base = dataclasses.replace(PRESETS[options.preset].model, dtype=dtype)
    parameters = parameters_of(base)
    for kind in ATTENTIONS:
        config = dataclasses.replace(base, attention=kind)
        if fault := wrong(config):
            print(f"{kind}: {fault}")
            return 1
        # what was read before makes no difference to a State
        contexts = options.contexts if kind == "softmax" else options.contexts[:1]
        for batch in options.batches:
            for context in contexts:
                about = {"attention": kind, "batch": batch, "context": context}
                if not budget.allows(longest):
                    print(f"{about}: no time left", flush=True)
                    continue
                start = time.monotonic()
                rows.append({**about, **measured(config, parameters, batch, context)})
                longest = max(longest, time.monotonic() - start)
                print(rows[-1], flush=True)
                write(
                    options.out / "decoding.json",
                    {"preset": options.preset, **machine(), "rows": rows},
                )
    names = ("attention", "batch", "tokens before", "ms a step", "tokens/s", "remembered MiB")
    print(table(names, [line(row) for row in rows]))
    return 0


if __name__ == "__main__":
    prepare_gpu()
    raise SystemExit(main())
