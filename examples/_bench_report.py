"""Rows of results: as a Markdown table, as JSON with where they come from, and as a plot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _bench_cases import BACKWARD_UNITS, FORWARD_UNITS, Case
from _bench_device import Timing

PACKAGES = ("la_cupy", "numpy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton")
RIVAL_PACKAGES = ("flash-linear-attention", "fla-core")


@dataclass(frozen=True)
class Row:
    """One operator on one shape. A wrong result has a fault and no times."""

    op: str
    b: int
    n: int
    h: int
    d: int
    dtype: str
    fwd_ms: float | None = None
    both_ms: float | None = None
    fwd_host_us: float | None = None
    both_host_us: float | None = None
    fwd_roof: float | None = None
    both_roof: float | None = None
    peak_units: float | None = None
    predicted_fwd_ms: float | None = None  # by la.explain
    predicted_both_ms: float | None = None
    errors: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None

    @classmethod
    def of(
        cls,
        op: str,
        case: Case,
        bandwidth: float,
        fwd: Timing,
        both: Timing | None,
        peak_bytes: int | None,
        errors: dict[str, Any],
    ) -> Row:
        fwd_roof = case.roof_ms(FORWARD_UNITS, bandwidth)
        both_roof = case.roof_ms(FORWARD_UNITS + BACKWARD_UNITS, bandwidth)
        return cls(
            op,
            **asdict(case),
            fwd_ms=fwd.ms,
            both_ms=both and both.ms,
            fwd_host_us=fwd.host_us,
            both_host_us=both and both.host_us,
            fwd_roof=fwd_roof / fwd.ms,
            both_roof=both and both_roof / both.ms,
            peak_units=None if peak_bytes is None else peak_bytes / case.unit_bytes,
            errors=errors,
        )


HEADER = (
    "| op | B | N | H | D | type | fwd ms | fwd+bwd ms | fwd/roof | fwd+bwd/roof | peak, units "
    "| host µs, fwd | fwd+bwd | predicted ms, fwd | fwd+bwd |\n|" + "---|" * 15
)


def table_line(row: Row) -> str:
    """The row as a line of the table under HEADER."""
    shape = f"| {row.op} | {row.b} | {row.n} | {row.h} | {row.d} | {row.dtype} |"
    if row.fault is not None:
        return f"{shape} no speed: {row.fault} |" + " |" * 8
    cells = [
        _cell(row.fwd_ms, ".3f"),
        _cell(row.both_ms, ".3f"),
        _cell(row.fwd_roof, ".3f"),
        _cell(row.both_roof, ".3f"),
        _cell(row.peak_units, ".2f"),
        _cell(row.fwd_host_us, ".0f"),
        _cell(row.both_host_us, ".0f"),
        _cell(row.predicted_fwd_ms, ".3f"),
        _cell(row.predicted_both_ms, ".3f"),
    ]
    return f"{shape} {' | '.join(cells)} |"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def provenance(facts: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Where the numbers come from: machine, versions, commit, date, command."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES + RIVAL_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        **facts,
        "platform": platform.platform(),
        "versions": versions,
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arguments": arguments,
    }


def git_commit() -> str:
    """The commit of this checkout, with "+changes" where tracked files differ from it."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_json(path: Path, report: dict[str, Any], rows: list[Row]) -> None:
    path.write_text(json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def cpu_ratios(rows: list[Row]) -> dict[str, float]:
    """Ratios within one run: our time against scaled softmax, and against our own at half the N."""
    ours, softmax = (
        {
            row.n: row.fwd_ms
            for row in rows
            if row.op == op and row.fwd_ms and row.dtype == "float32"
        }
        for op in ("la_cupy", "numpy softmax")
    )
    ratios: dict[str, float] = {}
    if softmax and ours:
        base, longest = max(softmax), max(ours)
        scaled = softmax[base] * (longest / base) ** 2
        name = f"softmax at N={base} scaled to N={longest}, over la_cupy"
        ratios[name] = scaled / ours[longest]
    for n in sorted(ours):
        if 2 * n in ours:
            ratios[f"la_cupy at N={2 * n} over N={n}"] = ours[2 * n] / ours[n]
    return ratios


def plot(path: Path, rows: list[Row], title: str) -> bool:
    """Roof ratio against N, a line for each operator, width and type; False if there is none."""
    rows = [row for row in rows if row.fwd_roof is not None]
    if not rows:
        return False
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{row.op}, D={row.d} {row.dtype}", []).append(row)
    for panel, name, key in zip(
        panels, ("forward", "forward + backward"), ("fwd_roof", "both_roof"), strict=True
    ):
        for label, members in lines.items():
            points = sorted((r.n, getattr(r, key)) for r in members if getattr(r, key) is not None)
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", label=label)
        panel.set(title=name, xlabel="N", xscale="log")
        panel.grid(alpha=0.3)
        panel.axhline(1.0, color="black", linewidth=0.8)
    panels[0].set_ylabel("roof ÷ time (1 = copy bandwidth)")
    panels[0].set_ylim(bottom=0.0)
    panels[0].legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
