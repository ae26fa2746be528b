"""Train a language model with linear or softmax attention, on any folder of text files.

    python examples/language_model/train.py --preset tiny
    python examples/language_model/train.py --preset 120m --attention softmax --text ~/books

Needs `pip install -e ".[examples]"`, and jax[cuda13] for a GPU. With no --text it reads the Python
sources of this machine. A run that was stopped goes on where its last checkpoint was, with the
same command. It leaves log.jsonl, loss.png and checkpoints in --run; generate.py reads them.
Several hosts: the same command with --distributed on each.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

try:
    import jax
    from lm_checkpoints import ABOUT
    from lm_config import ATTENTIONS, PRESETS, REMATS, ModelConfig, Recipe, UserError, prepare_gpu
    from lm_corpus import Corpus, prepare
    from lm_log import LOG, plot, read
    from lm_mesh import check_mesh, first_process_first, make_mesh
    from lm_run import Schedule, train
    from lm_training import make_trainer
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed: pip install -e '.[examples]'")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What the programs of this folder have in common: which model, of which kind."""
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="where to start from")
    parser.add_argument("--attention", choices=ATTENTIONS, default="linear")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--a", type=float, default=1.0, help="constant of linear attention")
    parser.add_argument("--b", type=float, default=1.0, help="slope of linear attention")
    parser.add_argument("--feature-map", default="identity")
    parser.add_argument("--qk-norm", choices=("l2", "none"), default="l2")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, float32 on a CPU"
    )


def model_from(options: argparse.Namespace) -> ModelConfig:
    """The preset's model with what the flags change."""
    model = PRESETS[options.preset].model
    on_gpu = jax.default_backend() == "gpu"
    return dataclasses.replace(
        model,
        length=options.length or model.length,
        attention=options.attention,
        a=options.a,
        b=options.b,
        qk_norm=None if options.qk_norm == "none" else options.qk_norm,
        feature_map=options.feature_map,
        dtype=options.dtype or ("bfloat16" if on_gpu else "float32"),
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_flags(parser)
    parser.add_argument("--text", type=Path, help="a folder of UTF-8 files")
    parser.add_argument("--corpus-mb", type=int, help="read no more text than this")
    parser.add_argument("--run", type=Path, help="where to write; runs/PRESET-ATTENTION")
    parser.add_argument("--fresh", action="store_true", help="delete what is in --run first")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="sequences a step, over all devices")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--remat", choices=REMATS, help="what is computed again to save memory")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--validate-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--data", type=int, help="devices for parts of a batch; all that are left")
    parser.add_argument("--fsdp", type=int, default=1, help="devices that share the parameters")
    parser.add_argument("--seq", type=int, default=1, help="devices for pieces of a sequence")
    parser.add_argument(
        "--distributed",
        nargs="*",
        metavar=("HOST:PORT", "COUNT INDEX"),
        help="this is one of several hosts: of the first one an address, how many, and which; "
        "nothing where a cluster's manager knows",
    )
    return parser.parse_args(arguments)


def recipe_from(options: argparse.Namespace) -> Recipe:
    """The preset's recipe with what the flags change."""
    recipe = PRESETS[options.preset].recipe
    steps = options.steps if options.steps is not None else recipe.steps
    return dataclasses.replace(
        recipe,
        steps=steps,
        batch=options.batch if options.batch is not None else recipe.batch,
        learning_rate=options.learning_rate or recipe.learning_rate,
        warmup=min(recipe.warmup, steps // 10),
        seed=options.seed,
    )


def corpus_from(options: argparse.Namespace) -> Corpus:
    """The text that the flags name, as tokens of the preset's vocabulary."""
    preset = PRESETS[options.preset]
    return prepare(options.text, preset.model.vocabulary, options.corpus_mb or preset.corpus_mb)


def keep_programs(folder: Path) -> None:
    """Compiled programs stay beside the checkpoints, so that a resumed run has the same ones.

    XLA chooses among algorithms by timing them on a GPU, and another choice rounds differently.
    """
    if jax.default_backend() == "gpu":
        jax.config.update("jax_compilation_cache_dir", str(folder.absolute() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        if hasattr(jax.config, "jax_remove_custom_partitioning_ptr_from_cache_key"):
            jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


def join(words: list[str]) -> None:
    """Makes this process one of several, before JAX looks for its devices."""
    if len(words) not in (0, 3) or not all(word.isdecimal() for word in words[1:]):
        raise UserError(
            f"--distributed has {' '.join(words)!r}, but takes nothing, or HOST:PORT COUNT INDEX "
            f"as in --distributed 10.0.0.1:1234 2 0"
        )
    if words:
        jax.distributed.initialize(words[0], int(words[1]), int(words[2]))
    else:
        jax.distributed.initialize()


def run(options: argparse.Namespace) -> list[float]:
    """Trains as the flags say; the losses of this call's steps."""
    if options.distributed is not None:
        join(options.distributed)
    config, recipe = model_from(options), recipe_from(options)
    mesh = make_mesh(options.data, options.fsdp, options.seq)
    check_mesh(mesh, config.attention, recipe.batch, config.length)
    folder: Path = options.run or Path("runs", f"{options.preset}-{options.attention}")
    if options.fresh and (folder / ABOUT).exists() and jax.process_index() == 0:
        shutil.rmtree(folder)
    keep_programs(folder)
    corpus = first_process_first(lambda: corpus_from(options))
    if jax.process_index() == 0:
        print(
            f"{config.parameters / 1e6:.1f} M parameters, {config.attention} attention, "
            f"{len(corpus.train) / 1e6:.2f} M tokens of text, on {mesh.size} x "
            f"{jax.devices()[0].device_kind}",
            flush=True,
        )
    remat = options.remat or PRESETS[options.preset].remat
    trainer = make_trainer(config, recipe, mesh, remat)
    schedule = Schedule(options.log_every, options.validate_every, options.checkpoint_every)
    return train(trainer, corpus, folder, schedule)


def report(options: argparse.Namespace) -> None:
    """Draws the curves, and says how far the loss has fallen since the first step of the run."""
    folder = options.run or Path("runs", f"{options.preset}-{options.attention}")
    records: list[dict[str, Any]] = read(folder / LOG)
    plot({options.attention: records}, folder / "loss.png", f"{options.preset}")
    validations = [r["validation"] for r in records if "validation" in r]
    if validations:
        print(f"validation: first {validations[0]:.4f}, last {validations[-1]:.4f}")
    losses = [r["loss"] for r in records if "loss" in r]
    print(f"loss: first {losses[0]:.4f}, last {losses[-1]:.4f}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if jax.process_index() == 0:
        report(options)
    return 0


if __name__ == "__main__":
    prepare_gpu(exact=True)
    raise SystemExit(main())
