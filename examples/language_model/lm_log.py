"""What a run says while it trains: a progress bar, a line of JSON for each record, curves."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Self

LOG = "log.jsonl"


class Log:
    """Records of a run, a line of JSON each: {"step", "loss", ...} or {"step", "validation"}.

    A resumed run repeats the steps after its checkpoint, so records of these are dropped first.
    `path` is None in processes that have nothing to write.
    """

    def __init__(self, path: Path | None, from_step: int) -> None:
        self._file = None
        if path is not None:
            kept = [record for record in read(path) if record["step"] < from_step]
            path.write_text("".join(json.dumps(record) + "\n" for record in kept))
            self._file = path.open("a")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """At once, so that a killed run has said all it knew."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that was cut off is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class Rate:
    """Tokens a second since it was last asked."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._start = tokens, time.perf_counter()

    def at(self, tokens: int) -> float:
        """With so many tokens behind since the run began."""
        now = time.perf_counter()
        rate = (tokens - self._tokens) / max(now - self._start, 1e-9)
        self._tokens, self._start = tokens, now
        return rate

    def pause(self, seconds: float) -> None:
        """Time that was spent on something else, such as validation."""
        self._start += seconds


def memory_gib() -> float:
    """The most that the first GPU has held; on a CPU, what this process holds now."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return float(stats["peak_bytes_in_use"]) / 2**30
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def progress(first: int, last: int, quiet: bool = False) -> Any:
    """A bar over the steps from `first` on, drawn where there is a terminal."""
    from tqdm import tqdm

    hidden = quiet or not sys.stderr.isatty()
    return tqdm(range(first, last), desc="training", initial=first, total=last, disable=hidden)


def plot(curves: dict[str, list[dict[str, Any]]], path: Path, title: str = "") -> bool:
    """Loss against tokens for each named log; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for i, (name, records) in enumerate(curves.items()):
        for key, style in (("loss", {"alpha": 0.35, "lw": 0.8}), ("validation", {"marker": "."})):
            some = [(r["tokens"], r[key]) for r in records if key in r]
            if some:
                label = f"{name}, {'training' if key == 'loss' else key}"
                axes.plot(*zip(*some, strict=True), color=f"C{i}", label=label, **style)
    axes.set(xlabel="tokens", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
