"""Step time, tokens/s, model-FLOPs utilisation and peak memory of training steps.

    python examples/language_model/measure_speed.py [--preset 1.4b] [--lengths 2048 8192 32768]

Linear against softmax attention at each length, a batch of --tokens tokens, or the largest power of
two that fits. Each case has a process of its own, so that its peak of memory is its own, and ends
before --budget does. Writes speed.json and speed.png to --out.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lm_config import ATTENTIONS, PRESETS, REMATS, prepare_gpu
from lm_report import Budget, axes, machine, peak_flops, table, timed, training_case, write

ENOUGH = 60.0
"""Seconds that a case needs at least, most of them for compiling."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One case, in this process."""
    import jax
    from lm_log import memory_gib

    kind, length, batch = options.only[0], int(options.only[1]), options.batch
    trainer, tree, x = training_case(options.preset, kind, length, batch, options.remat)
    start = time.perf_counter()
    step = trainer.step.lower(tree, *x).compile()
    compiling = time.perf_counter() - start
    losses: list[float] = []

    def once() -> None:
        nonlocal tree
        tree, loss = step(tree, *x)
        losses.append(float(loss))

    for _ in range(3):
        once()
    seconds = timed(once, options.repeats)
    # a step that does not learn its own batch is no training step, however fast
    expected = math.log(trainer.config.vocabulary)
    if not (abs(losses[0] - expected) < 1 and losses[-1] < losses[0]):
        return {"fault": f"WRONG: losses {losses[0]:.3f} to {losses[-1]:.3f}: no speed"}
    tokens = batch * length
    device = jax.devices()[0].device_kind
    peak = peak_flops(device)
    flops = trainer.config.flops_per_token(length) * tokens
    plan = step.memory_analysis()
    return {
        "fault": None,
        "step_ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "flops": flops,
        "mfu": flops / seconds / peak if peak else None,
        "peak_gib": memory_gib(),
        "planned_gib": (plan.argument_size_in_bytes + plan.temp_size_in_bytes) / 2**30,
        "compile_s": compiling,
        "losses": [losses[0], losses[-1]],
        "machine": machine(),
    }


def case(options: argparse.Namespace, kind: str, length: int, budget: Budget) -> dict[str, Any]:
    """One case in a process of its own.

    A batch that does not fit is halved; a single sequence that does not is computed again layer
    by layer in the backward pass.
    """
    batch, remat = max(options.tokens // length, 1), options.remat
    while True:
        found = _child(options, kind, length, batch, remat, budget)
        row = {"attention": kind, "length": length, "batch": batch, "remat": remat, **found}
        last = batch == 1 and remat == "layers"
        if found["fault"] != "does not fit" or last or not budget.allows(ENOUGH):
            return row
        batch, remat = (batch // 2, remat) if batch > 1 else (1, "layers")


def _child(
    options: argparse.Namespace, kind: str, length: int, batch: int, remat: str, budget: Budget
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", kind, str(length), "--batch", str(batch)]
    command += ["--preset", options.preset, "--remat", remat]
    command += ["--repeats", str(options.repeats)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=budget.left
        )
    except subprocess.TimeoutExpired:
        return {"fault": "out of time"}
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    if "RESOURCE_EXHAUSTED" in done.stderr or "Out of memory" in done.stderr:
        return {"fault": "does not fit"}
    print(done.stderr[-3000:], file=sys.stderr)
    return {"fault": f"exit {done.returncode}"}


COLUMNS = (
    "attention",
    "N",
    "batch",
    "remat",
    "step ms",
    "tokens/s",
    "MFU",
    "peak GiB",
    "against softmax",
)


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as a table prints them, each beside softmax attention of the same length."""
    softmax = {
        row["length"]: row["tokens_per_s"]
        for row in rows
        if row["attention"] == "softmax" and not row["fault"]
    }
    made = []
    for row in rows:
        line = [row["attention"], str(row["length"]), str(row["batch"]), row["remat"]]
        if row["fault"]:
            made.append([*line, row["fault"], "", "", "", ""])
            continue
        other = softmax.get(row["length"])
        ratio = f"{row['tokens_per_s'] / other:.2f}" if other else ""
        mfu = f"{row['mfu']:.3f}" if row["mfu"] else ""
        made.append(
            [*line, f"{row['step_ms']:.1f}", f"{row['tokens_per_s']:,.0f}", mfu,
             f"{row['peak_gib']:.1f}", ratio]
        )  # fmt: skip
    return made


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    figure, plane = axes(title, "tokens of a sequence", "tokens/s")
    if figure is None:
        return
    for kind in ATTENTIONS:
        some = [(r["length"], r["tokens_per_s"]) for r in rows
                if r["attention"] == kind and not r["fault"]]  # fmt: skip
        if some:
            plane.plot(*zip(*sorted(some), strict=True), marker="o", label=kind)
    plane.set_xscale("log", base=2)
    plane.set_ylim(bottom=0)
    plane.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="1.4b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 2048, 32768])
    parser.add_argument("--attention", choices=ATTENTIONS, nargs="+", default=list(ATTENTIONS))
    parser.add_argument("--tokens", type=int, default=16384, help="a step, at least one sequence")
    parser.add_argument("--remat", choices=REMATS, default="dots")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--budget", type=float, default=570, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("measurements"))
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        print(json.dumps(measure(options)))
        return 0
    budget, rows = Budget(options.budget), []
    for length in options.lengths:
        for kind in options.attention:
            if not budget.allows(ENOUGH):
                print(f"{kind} at {length}: no time left", flush=True)
                continue
            rows.append(case(options, kind, length, budget))
            print(f"{kind} at {length}: {json.dumps(rows[-1])}", flush=True)
            write(options.out / "speed.json", {"preset": options.preset, "rows": rows})
    draw(rows, options.out / "speed.png", f"training steps of {options.preset}")
    print(table(COLUMNS, lines(sorted(rows, key=lambda r: (r["length"], r["attention"])))))
    return 0 if rows and not any(str(row["fault"]).startswith("WRONG") for row in rows) else 1


if __name__ == "__main__":
    prepare_gpu()
    raise SystemExit(main())
