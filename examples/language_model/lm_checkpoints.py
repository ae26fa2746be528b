"""Checkpoints of a run by Orbax, and the file beside them that says what they are of."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from lm_config import ModelConfig, UserError, as_json, differences
from lm_training import Trainer

Tree = Any
ABOUT = "run.json"


class Checkpoints:
    """The checkpoints of a run: written beside training, whole or not at all."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports each file it opens
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(
            (folder / "checkpoints").absolute(),
            item_handlers=ocp.StandardCheckpointHandler(),  # without it there is no metadata
            options=options,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """How many steps the newest whole checkpoint has behind it."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, step: int, tree: Tree) -> None:
        """Copies the tree before it returns, and writes it while training goes on."""
        if self.latest != step:
            self._manager.save(step, args=ocp.args.StandardSave(tree))

    def restore(self, trainer: Trainer) -> Tree:
        """The newest tree, laid out over the trainer's mesh, whatever mesh it was saved from."""
        step = self._manager.latest_step()
        return self._manager.restore(step, args=ocp.args.StandardRestore(trainer.abstract))

    def restore_parameters(self) -> Tree:
        """The newest parameters, as they were saved, on one device."""
        step = self._manager.latest_step()
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        metadata = self._manager.item_metadata(step)
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), metadata.tree
        )
        tree: Tree = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return tree["parameters"]


def write_about(folder: Path, sections: dict[str, Any]) -> None:
    """What the run is of: {"model": ..., "recipe": ..., "corpus": ...}."""
    (folder / ABOUT).write_text(json.dumps(sections, indent=1) + "\n")


def read_about(folder: Path) -> dict[str, Any]:
    """What `write_about` wrote, or one sentence."""
    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} has no {ABOUT} that can be read: name a folder that train.py wrote"
        ) from error
    return about


def check_about(folder: Path, asked: dict[str, Any]) -> None:
    """The run in this folder must be the one that is asked for."""
    found = read_about(folder)
    told = [
        difference
        for section in asked
        for difference in differences(_section(asked[section]), _section(found.get(section)))
    ]
    if told:
        raise UserError(
            f"the checkpoint in {folder} has {', '.join(told)}: repeat the flags that it was "
            f"started with, name another folder with --run, or start again with --fresh"
        )


def _section(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"text": value}


def model_of(folder: Path) -> ModelConfig:
    """The configuration of the model that was trained in this folder."""
    about = read_about(folder).get("model", {})
    try:
        return ModelConfig(**about)
    except TypeError as error:
        raise UserError(
            f"{folder / ABOUT} describes a model that this version does not know ({error}): "
            f"use the version that trained it"
        ) from error


def about(trainer: Trainer, corpus: str) -> dict[str, Any]:
    """The three things that decide a run's losses."""
    return {"model": as_json(trainer.config), "recipe": as_json(trainer.recipe), "corpus": corpus}


def parameters_of(folder: Path) -> tuple[ModelConfig, Tree]:
    """The model that was trained in this folder and its newest parameters."""
    config = model_of(folder)
    with Checkpoints(folder) as checkpoints:
        if checkpoints.latest is None:
            raise UserError(f"{folder} has no checkpoint yet: train a little longer first")
        parameters = checkpoints.restore_parameters()
    found = {"vocabulary": shape(parameters, ("head", "kernel"))[1]}
    found["width"] = shape(parameters, ("head", "kernel"))[0]
    found["layers"] = shape(parameters, ("blocks", "wide", "kernel"))[0]
    told = differences({name: getattr(config, name) for name in found}, found)
    if told:
        raise UserError(
            f"the checkpoint in {folder} has {', '.join(told)}, so {ABOUT} belongs to another run"
        )
    return config, parameters


def shape(tree: Tree, names: Iterable[str]) -> tuple[int, ...]:
    for name in names:
        tree = tree[name]
    return tuple(tree.shape)
