"""Accuracy of associative recall and of copying, with softmax and with options of linear attention.

    python examples/language_model/measure_recall.py [--steps 2000] [--rates 2e-3]

A model of two layers for each variant, task and rate; the best rate counts. Variants are "softmax",
"linear", or linear with options, as "linear:a=0,feature_map=exp". What --budget seconds do not reach
is left out, and said to be. Writes recall.json and recall.png to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from lm_config import ModelConfig, UserError, variant
from lm_model import Transformer, rebuild
from lm_report import Budget, axes, machine, table, write
from lm_tasks import Task, copying, recall

Array = Any
Tree = Any

VARIANTS = (
    "softmax",
    "linear",
    "linear:a=0,feature_map=exp,qk_norm=none",
    "linear:a=0,feature_map=elu1,qk_norm=none",
    "linear:feature_map=relu,qk_norm=none",
    "linear:a=0,feature_map=exp",
    "linear:feature_map=relu",
    "linear:feature_map=silu",
    "linear:b=0.5",
)
"""The kinds of weights that the operator has: flat and steep, positive and not, bounded and not."""


class Experiment:
    """A model and a task, compiled once for all rates.

    All steps run in one program, data included; the host sees the mean loss of each tenth.
    """

    def __init__(self, config: ModelConfig, task: Task, batch: int, steps: int) -> None:
        self._config = config
        self._model = rebuild(lambda: Transformer(config, nnx.Rngs(0)))
        self._task, self._batch, self._steps = task, batch, steps
        # The rate is an argument: Adam's direction times it is Adam at that rate.
        shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps, 0.1)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b2=0.98),
            optax.add_decayed_weights(0.01),
            optax.scale_by_schedule(lambda count: -shape(count)),
        )
        self._train: Callable[..., Any] = jax.jit(self._run)
        self._accuracy: Callable[..., Any] = jax.jit(self._correct)

    def run(self, rate: float, seed: int = 0) -> tuple[float, list[float]]:
        """Accuracy on sequences that were never seen, and the losses."""
        parameters, losses = self._train(rate, seed)
        correct = [float(self._accuracy(parameters, jax.random.key(10**6 + i))) for i in range(8)]
        return sum(correct) / len(correct), [round(float(x), 4) for x in losses]

    def _run(self, rate: Array, seed: Array) -> tuple[Tree, Array]:
        start, key = jax.random.split(jax.random.key(seed))
        parameters = nnx.to_pure_dict(nnx.state(Transformer(self._config, nnx.Rngs(start))))

        def step(carry: Any, i: Array) -> tuple[Any, Array]:
            parameters, state = carry
            tokens, targets = self._task.draw(jax.random.fold_in(key, i), self._batch)
            loss, gradient = jax.value_and_grad(self._loss)(parameters, tokens, targets)
            updates, state = self._optimizer.update(gradient, state, parameters)
            updates = jax.tree.map(lambda x: rate * x, updates)
            return (optax.apply_updates(parameters, updates), state), loss

        carry = parameters, self._optimizer.init(parameters)
        (parameters, _), losses = jax.lax.scan(step, carry, jnp.arange(self._steps))
        tenth = max(self._steps // 10, 1)
        return parameters, losses[: self._steps // tenth * tenth].reshape(-1, tenth).mean(axis=1)

    def _loss(self, parameters: Tree, tokens: Array, targets: Array) -> Array:
        logits = self._model(parameters)(tokens)
        asked = targets >= 0
        each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
        return (each * asked).sum() / asked.sum()

    def _correct(self, parameters: Tree, key: Array) -> Array:
        tokens, targets = self._task.draw(key, self._batch)
        guessed = self._model(parameters)(tokens).argmax(-1)
        return ((guessed == targets) & (targets >= 0)).sum() / (targets >= 0).sum()


def tasks_from(options: argparse.Namespace) -> list[Task]:
    some = [recall(pairs, options.length, options.vocabulary) for pairs in options.pairs]
    return some + [copying(symbols) for symbols in options.symbols]


def config_for(options: argparse.Namespace, task: Task, name: str) -> ModelConfig:
    on_gpu = jax.default_backend() == "gpu"
    base = ModelConfig(
        task.vocabulary,
        options.layers,
        options.width,
        options.heads,
        task.length,
        dtype="bfloat16" if on_gpu else "float32",
    )
    return variant(base, name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--pairs", type=int, nargs="*", default=[8], help="recall: of keys")
    parser.add_argument("--length", type=int, default=64, help="recall: tokens of a sequence")
    parser.add_argument("--vocabulary", type=int, default=128, help="recall: keys and values")
    parser.add_argument("--symbols", type=int, nargs="*", default=[64], help="copying: tokens")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3])
    parser.add_argument("--budget", type=float, default=560, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("measurements"))
    options = parser.parse_args(arguments)
    try:
        configs = [
            (name, task, config_for(options, task, name))
            for name in options.variants
            for task in tasks_from(options)
        ]
    except UserError as error:
        print(f"error: {error}")
        return 2
    budget, longest, rows = Budget(options.budget), 0.0, []
    for name, task, config in configs:
        if not budget.allows(longest * 1.1):
            print(f"{name}, {task.name}: no time left", flush=True)
            continue
        start = time.monotonic()
        experiment = Experiment(config, task, options.batch, options.steps)
        tries = {rate: experiment.run(rate) for rate in options.rates}
        seconds = time.monotonic() - start
        longest = max(longest, seconds)
        rows.append({"variant": name, "task": task.name, "seconds": round(seconds, 1),
                     "accuracy": max(accuracy for accuracy, _ in tries.values()),
                     "rates": {str(rate): found for rate, found in tries.items()}})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        about = {k: v for k, v in vars(options).items() if k not in ("out", "variants")}
        write(options.out / "recall.json", {**about, **machine(), "rows": rows})
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found = {(row["variant"], row["task"]): row["accuracy"] for row in rows}
    draw(found, options.out / "recall.png")
    names = list(dict.fromkeys(row["variant"] for row in rows))
    cells = [[f"{found[n, t]:.3f}" if (n, t) in found else "" for t in tasks] for n in names]
    print(table(("variant", *tasks), [[n, *c] for n, c in zip(names, cells, strict=True)]))
    return 0


def draw(found: dict[tuple[str, str], float], path: Path) -> None:
    figure, plane = axes("", "accuracy", "")
    if figure is None:
        return
    names = list(dict.fromkeys(name for name, _ in found))[::-1]
    tasks = list(dict.fromkeys(task for _, task in found))
    height = 0.8 / len(tasks)
    for i, task in enumerate(tasks):
        places = [j - i * height for j in range(len(names))]
        plane.barh(places, [found.get((n, task), 0.0) for n in names], height, label=task)
    plane.set_yticks(range(len(names)), names, fontsize=7)
    plane.set_xlim(0, 1)
    plane.legend(fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
