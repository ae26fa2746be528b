"""A training run from its first step, or its last checkpoint, to its end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lm_checkpoints import ABOUT, Checkpoints, about, check_about, write_about
from lm_config import UserError
from lm_corpus import Corpus
from lm_log import LOG, Log, Rate, memory_gib, progress
from lm_training import Trainer

Tree = Any


@dataclass(frozen=True)
class Schedule:
    """How often a run looks up from training; 0 is never (checkpoints: at the end only)."""

    log: int = 10
    validate: int = 100
    checkpoint: int = 500
    validation_batches: int = 8


def train(trainer: Trainer, corpus: Corpus, folder: Path, schedule: Schedule) -> list[float]:
    """Trains to the recipe's end and returns the loss of every step that was made here.

    Where the folder has a checkpoint of the same run, goes on from it, to the same losses.
    """
    corpus.check(trainer.config.length)
    writer = jax.process_index() == 0
    asked = about(trainer, corpus.name)
    if (folder / ABOUT).exists():
        check_about(folder, asked)
    elif writer:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(corpus.tokenizer, folder)  # generate.py needs nothing from elsewhere
        write_about(folder, asked)
    with Checkpoints(folder) as checkpoints:
        first = checkpoints.latest or 0
        tree = checkpoints.restore(trainer) if first else trainer.initial()
        if first and writer:
            print(f"goes on from the checkpoint of step {first} in {folder}", flush=True)
        with Log(folder / LOG if writer else None, first) as log:
            return list(_steps(trainer, corpus, schedule, checkpoints, log, tree, first))


def _steps(
    trainer: Trainer,
    corpus: Corpus,
    schedule: Schedule,
    checkpoints: Checkpoints,
    log: Log,
    tree: Tree,
    first: int,
) -> Iterator[float]:
    recipe, length = trainer.recipe, trainer.config.length
    tokens, rate = recipe.batch * length, Rate()
    waiting: list[tuple[int, Any]] = []
    bar = progress(first, recipe.steps, quiet=jax.process_index() > 0)
    for step in bar:
        windows = corpus.batch(recipe.seed, step, recipe.batch, length)
        tree, loss = trainer.step(tree, *trainer.put(windows))
        waiting.append((step, loss))
        rate.add(tokens)
        done, last = step + 1, step + 1 == recipe.steps
        keep = _due(done, schedule.checkpoint) or last
        # Losses are read one step late, while the device has its next step; but none is left out
        # of the log that a checkpoint has behind it.
        ready, waiting = (waiting, []) if keep else (waiting[:-1], waiting[-1:])
        for number, value in ready:
            yield _record(log, bar, schedule, rate, number, float(value), tokens, recipe.steps)
        if keep:
            checkpoints.save(done, tree)
        if _due(done, schedule.validate) or (last and schedule.validate):
            start = time.perf_counter()
            log.write({"step": step, "tokens": done * tokens, "validation": validate(
                trainer, corpus, tree["parameters"], schedule.validation_batches)})  # fmt: skip
            rate.pause(time.perf_counter() - start)


def _record(
    log: Log,
    bar: Any,
    schedule: Schedule,
    rate: Rate,
    step: int,
    loss: float,
    tokens: int,
    steps: int,
) -> float:
    """Writes down the loss of a step, where it is time to; stops a run that has gone astray."""
    if not np.isfinite(loss):
        raise UserError(
            f"the loss of step {step} is {loss}: start again with a smaller --learning-rate"
        )
    if step == 0 or _due(step + 1, schedule.log) or step + 1 == steps:
        speed, memory = rate.take(), memory_gib()
        record = {"step": step, "tokens": (step + 1) * tokens, "loss": loss}
        log.write({**record, "tokens_per_s": round(speed), "memory_gib": round(memory, 3)})
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, {memory:.2f} GiB")
        if bar.disable and jax.process_index() == 0:
            print(f"step {step:6d}  loss {loss:.4f}  {speed:9,.0f} tokens/s  {memory:.2f} GiB",
                  flush=True)  # fmt: skip
    return loss


def validate(trainer: Trainer, corpus: Corpus, parameters: Tree, batches: int) -> float:
    """Mean loss over windows of text on which nothing is trained."""
    size, length = trainer.recipe.batch, trainer.config.length
    losses = [
        trainer.evaluate(parameters, *trainer.put(windows))
        for windows in corpus.held_out(size, length, batches)
    ]
    return float(np.mean([float(x) for x in losses]))


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
