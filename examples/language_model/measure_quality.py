"""Validation loss against tokens: the same model, text and number of tokens with each attention.

    python examples/language_model/measure_quality.py [--preset 120m] [--steps 1500]

Variants are "softmax", "linear", or linear with options, as "linear:a=0,feature_map=exp". Where all
of them would not end within --budget seconds, every one gets as many steps fewer. Writes
quality.json and quality.png to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from lm_config import PRESETS, REMATS, Recipe, UserError, prepare_gpu, variant
from lm_corpus import Corpus, prepare
from lm_log import LOG, plot, read
from lm_mesh import check_mesh, make_mesh
from lm_report import Budget, machine, table, timed, write
from lm_run import Schedule, train
from lm_training import Trainer, make_trainer

VARIANTS = ("linear", "linear:a=0,feature_map=exp,qk_norm=none", "softmax")
"""The defaults of the operator, the options of it that copy best, and softmax."""

AROUND = 12.0
"""Seconds that a variant takes besides its steps: compiling validation, a checkpoint, a plot."""


def prepare_trainers(options: argparse.Namespace, steps: int) -> dict[str, Trainer]:
    preset = PRESETS[options.preset]
    on_gpu = jax.default_backend() == "gpu"
    base = dataclasses.replace(
        preset.model,
        length=options.length or preset.model.length,
        dtype="bfloat16" if on_gpu else "float32",
    )
    recipe: Recipe = dataclasses.replace(
        preset.recipe,
        steps=steps,
        warmup=max(steps // 20, 1),
        batch=options.batch or preset.recipe.batch,
    )
    mesh = make_mesh(options.data)
    check_mesh(mesh, "linear", recipe.batch, base.length)
    return {
        name: make_trainer(variant(base, name), recipe, mesh, options.remat)
        for name in options.variants
    }


def step_seconds(trainer: Trainer, corpus: Corpus) -> tuple[float, float]:
    """Of compiling, and of a step."""
    tree = trainer.initial()
    recipe, length = trainer.recipe, trainer.config.length
    x = trainer.put(corpus.batch(recipe.seed, 0, recipe.batch, length))

    def once() -> None:
        nonlocal tree
        tree, loss = trainer.step(tree, *x)
        float(loss)

    start = time.perf_counter()
    once()
    return time.perf_counter() - start, timed(once, 5)


def affordable(
    trainers: dict[str, Trainer], corpus: Corpus, steps: int, validations: float, budget: Budget
) -> int:
    """As many steps as all variants can make in the time that is left."""
    taken = [step_seconds(trainer, corpus) for trainer in trainers.values()]
    for name, (compiling, step) in zip(trainers, taken, strict=True):
        print(f"{name}: compiled in {compiling:.0f} s, {step * 1e3:.1f} ms a step", flush=True)
    # a validation costs a third of a step for each of its batches, since nothing goes backwards
    each = sum(step for _, step in taken) * (1 + validations / 3)
    if budget.allows(each * steps + AROUND * len(taken)):
        return steps
    again = sum(compiling for compiling, _ in taken)  # other steps are another program
    return int((budget.left - again - AROUND * len(taken)) / each)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="120m")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--data", type=int, default=1, help="devices")
    parser.add_argument("--text", type=Path, help="a folder of UTF-8 files")
    parser.add_argument("--corpus-mb", type=int)
    parser.add_argument("--remat", choices=REMATS, default="none")
    parser.add_argument("--validations", type=int, default=20, help="in all")
    parser.add_argument("--budget", type=float, default=560, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("measurements"))
    options = parser.parse_args(arguments)
    budget = Budget(options.budget)
    preset = PRESETS[options.preset]
    try:
        start = time.perf_counter()
        vocabulary = preset.model.vocabulary
        corpus = prepare(options.text, vocabulary, options.corpus_mb or preset.corpus_mb)
        print(
            f"{len(corpus.train) / 1e6:.1f} M tokens of text, prepared in "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )
        trainers = prepare_trainers(options, options.steps)
        every = max(options.steps // options.validations, 1)
        steps = affordable(trainers, corpus, options.steps, 8 / every, budget)
        if steps < 1:
            raise UserError(f"--budget {options.budget:.0f} leaves no time for a step: raise it")
        if steps < options.steps:
            print(f"time for {steps} steps each, not {options.steps}", flush=True)
            trainers = prepare_trainers(options, steps)
        report = run(options, trainers, corpus, steps)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [
        [r["variant"], r["parameters_m"], r["tokens_m"], r["validation"], r["training"], r["rate"]]
        for r in report["rows"]
    ]
    names = ("variant", "parameters, M", "tokens, M", "validation loss", "training loss, last 50")
    print(table((*names, "tokens/s"), rows))
    return 0


def run(
    options: argparse.Namespace, trainers: dict[str, Trainer], corpus: Corpus, steps: int
) -> dict[str, Any]:
    """Trains each variant to its end; the report, which is on disk after each of them."""
    every = max(steps // options.validations, 1)
    schedule = Schedule(log=max(every // 5, 1), validate=every, checkpoint=0)
    report: dict[str, Any] = {"preset": options.preset, "steps": steps, **machine(), "rows": []}
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, trainer in trainers.items():
        with tempfile.TemporaryDirectory() as folder:
            losses = train(trainer, corpus, Path(folder), schedule)
            curves[name] = read(Path(folder) / LOG)
        speeds = sorted(r["tokens_per_s"] for r in curves[name] if "tokens_per_s" in r)
        last = losses[-50:]
        report["rows"].append(
            {
                "variant": name,
                "parameters_m": round(trainer.config.parameters / 1e6, 1),
                "tokens_m": round(steps * trainer.recipe.batch * trainer.config.length / 1e6, 1),
                "validation": round([r for r in curves[name] if "validation" in r][-1]["validation"], 4),
                "training": round(sum(last) / len(last), 4),
                "rate": speeds[len(speeds) // 2],
                "curve": curves[name],
            }
        )  # fmt: skip
        write(options.out / "quality.json", report)
        plot(curves, options.out / "quality.png", f"{options.preset}, Python sources")
    return report


if __name__ == "__main__":
    prepare_gpu()
    raise SystemExit(main())
