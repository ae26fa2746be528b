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
from lm_mesh import first_process_first
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
    first_process_first(lambda: _open(folder, asked, corpus))
    with Checkpoints(folder) as checkpoints:
        first = checkpoints.latest or 0
        tree = checkpoints.restore(trainer) if first else trainer.initial()
        if first and writer:
            print(f"goes on from the checkpoint of step {first} in {folder}", flush=True)
        with Log(folder / LOG if writer else None, first) as log:
            loop = _Loop(trainer, corpus, schedule, checkpoints, log, first)
            return list(loop.steps(tree))


def _open(folder: Path, asked: dict[str, Any], corpus: Corpus) -> bool:
    """Makes the folder of a new run; or finds it, and that it is of the same run."""
    if (folder / ABOUT).exists():
        check_about(folder, asked)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(corpus.tokenizer, folder)  # generate.py needs nothing from elsewhere
        write_about(folder, asked)
    return True


class _Loop:
    """The steps of a run, and what is said about them."""

    def __init__(
        self,
        trainer: Trainer,
        corpus: Corpus,
        schedule: Schedule,
        checkpoints: Checkpoints,
        log: Log,
        first: int,
    ) -> None:
        self._trainer, self._corpus, self._schedule = trainer, corpus, schedule
        self._checkpoints, self._log = checkpoints, log
        self._tokens = trainer.recipe.batch * trainer.config.length  # of a step
        self._last = trainer.recipe.steps
        self._writer = jax.process_index() == 0
        self._rate = Rate(first * self._tokens)
        self._bar = progress(first, self._last, quiet=not self._writer)

    def steps(self, tree: Tree) -> Iterator[float]:
        """Trains the tree from the first step on; the loss of each step."""
        recipe, schedule, length = self._trainer.recipe, self._schedule, self._trainer.config.length
        waiting: list[tuple[int, Any]] = []
        for step in self._bar:
            windows = self._corpus.batch(recipe.seed, step, recipe.batch, length)
            tree, loss = self._trainer.step(tree, *self._trainer.put(windows))
            waiting.append((step, loss))
            keep, judge = (
                self._due(step, every) for every in (schedule.checkpoint, schedule.validate)
            )
            keep |= step + 1 == self._last
            # Losses are read one step late, while the device has its next step; but the log has
            # all that lies behind a checkpoint, which a resumed run does not repeat.
            ready, waiting = (waiting, []) if keep or judge else (waiting[:-1], waiting[-1:])
            for number, value in ready:
                yield self._record(number, float(value))
            if judge:
                self._judge(step, tree["parameters"])
            if keep:
                self._checkpoints.save(step + 1, tree)

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and ((step + 1) % every == 0 or step + 1 == self._last)

    def _record(self, step: int, loss: float) -> float:
        """Writes down the loss of a step, where it is time to; stops a run that has gone astray."""
        if not np.isfinite(loss):
            raise UserError(
                f"the loss of step {step} is {loss}: start again with a smaller --learning-rate"
            )
        if step == 0 or self._due(step, self._schedule.log):
            tokens = (step + 1) * self._tokens
            speed, memory = self._rate.at(tokens), memory_gib()
            record = {"step": step, "tokens": tokens, "loss": loss}
            self._log.write(
                {**record, "tokens_per_s": round(speed), "memory_gib": round(memory, 3)}
            )
            words = f"loss {loss:.4f}  {speed:9,.0f} tokens/s  {memory:.2f} GiB"
            self._bar.set_postfix_str(words)
            if self._bar.disable and self._writer:
                print(f"step {step:6d}  {words}", flush=True)
        return loss

    def _judge(self, step: int, parameters: Tree) -> None:
        start = time.perf_counter()
        loss = validate(self._trainer, self._corpus, parameters, self._schedule.validation_batches)
        tokens = (step + 1) * self._tokens
        self._log.write({"step": step, "tokens": tokens, "validation": loss})
        self._rate.pause(time.perf_counter() - start)


def validate(trainer: Trainer, corpus: Corpus, parameters: Tree, batches: int) -> float:
    """Mean loss over windows of text on which nothing is trained."""
    size, length = trainer.recipe.batch, trainer.config.length
    losses = [
        trainer.evaluate(parameters, *trainer.put(windows))
        for windows in corpus.held_out(size, length, batches)
    ]
    return float(np.mean([float(x) for x in losses]))
