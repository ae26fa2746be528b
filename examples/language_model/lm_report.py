"""What the measuring programs share: what they ran on, a clock with an end, a table, JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12}
"""Dense bfloat16 products a second, from the makers' data sheets, by the start of the name."""


class Budget:
    """Seconds that a program may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        return self.left >= seconds


def peak_flops(device: str) -> float | None:
    """Of a device by its name; None where it is not known."""
    return next((rate for name, rate in PEAK_FLOPS.items() if device.startswith(name)), None)


def machine() -> dict[str, Any]:
    """The device, versions and commit that figures are worth nothing without."""
    import jax

    versions = {}
    for package in ("jax", "jaxlib", "flax", "optax", "numpy", "la_cupy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # la_cupy may be on the path only
            versions[package] = "not installed"
    devices = jax.devices()
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "versions": versions,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """Of this checkout, with "+changes" where tracked files differ from it."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def training_case(preset: str, kind: str, length: int, batch: int, remat: str) -> Any:
    """A trainer of a preset on one device, its state, and one batch of random tokens.

    In bfloat16 on a GPU, as train.py has it. Every token is as likely as another, which changes
    nothing in how long a step takes.
    """
    import jax
    from lm_config import PRESETS, Recipe
    from lm_mesh import make_mesh
    from lm_training import make_trainer

    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    model = PRESETS[preset].model
    config = dataclasses.replace(model, length=length, attention=kind, dtype=dtype)
    trainer = make_trainer(config, Recipe(1000, batch, 1e-4, warmup=1), make_mesh(1), remat)
    shape = batch, length + 1
    tokens = np.random.default_rng(0).integers(config.vocabulary, size=shape, dtype=np.int32)
    return trainer, trainer.initial(), trainer.put(tokens)


def timed(function: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call that waits for its result."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """In Markdown, as the README has it."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(str(x) for x in line) + " |" for line in lines)


def write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def axes(title: str, x: str, y: str) -> Any:
    """A figure and its axes; (None, None) where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None, None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, made = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    made.set(title=title, xlabel=x, ylabel=y)
    made.grid(alpha=0.3)
    return figure, made
