"""Where the time of a training step goes: attention kernels, matrix products, the rest.

    python examples/language_model/measure_profile.py [--preset 1.4b] [--length 2048]

Profiles a few steps of both kinds of attention, each in a process of its own, and sorts the kernels
that ran by their names. Command buffers (CUDA graphs) are off, so that each kernel is seen. What
lies around attention, such as turning q and k by their positions or transposing a gradient, is
fused with other things by XLA, and counts as the rest. Writes profile.json and profile.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_config import ATTENTIONS, PRESETS, REMATS, prepare_gpu
from lm_report import Budget, axes, machine, table, training_case, write

KINDS = {
    # this library's kernels live in namespace la (mangled: 2la); the others are cuDNN's
    "attention": r"\bla::|N2la|la_cupy|sdpa|flash|fmha|mha_|cudnn_generated",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|\bdot|splitk|matmul|ynn",
}
"""A kernel's kind by its name, the first that fits; what fits none is the rest."""


def kind_of(name: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "rest"


def split(events: Iterable[tuple[str, float]], steps: int) -> dict[str, Any]:
    """Milliseconds a step of each kind, and the kernels that take most of them."""
    kernels: Counter[str] = Counter()
    for name, seconds in events:
        kernels[name] += seconds / steps * 1e3  # type: ignore[assignment]
    kinds = {kind: 0.0 for kind in (*KINDS, "rest")}
    for name, milliseconds in kernels.items():
        kinds[kind_of(name)] += milliseconds
    top = [[name[:160], kind_of(name), ms] for name, ms in kernels.most_common(40)]
    return {"ms": kinds, "kernels": top}


def events_of(folder: Path) -> list[tuple[str, float]]:
    """(name, seconds) of all that ran on the first device while it was profiled."""
    import jax

    path = max(folder.rglob("*.xplane.pb"))
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU:0")]
    found = []
    for plane in gpus or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):  # other lines tell the same again
                continue
            for event in line.events:
                # on a CPU, loops and calls contain what runs in them
                outer = re.match(r"(while|call|conditional|fusion\.clone|end: )", event.name)
                if gpus or (not outer and any(name == "hlo_op" for name, _ in event.stats)):
                    found.append((event.name, event.duration_ns / 1e9))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One kind of attention, in this process."""
    import jax

    batch = max(options.tokens // options.length, 1)
    case = options.preset, options.only, options.length, batch, options.remat
    trainer, tree, x = training_case(*case)
    for _ in range(3):
        tree, loss = trainer.step(tree, *x)
    jax.block_until_ready(tree)
    start = time.perf_counter()
    for _ in range(options.steps):
        tree, loss = trainer.step(tree, *x)
    jax.block_until_ready(tree)
    unprofiled = (time.perf_counter() - start) / options.steps * 1e3
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(options.steps):
                tree, loss = trainer.step(tree, *x)
            jax.block_until_ready(tree)
        found = split(events_of(Path(folder)), options.steps)
    if not math.isfinite(float(loss)):
        return {"fault": f"WRONG: the loss is {float(loss)}: no figures"}
    return {"fault": None, "step_ms": unprofiled, **found, "machine": machine()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="1.4b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--attention", choices=ATTENTIONS, nargs="+", default=list(ATTENTIONS))
    parser.add_argument("--remat", choices=REMATS, default="dots")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=float, default=400, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("measurements"))
    parser.add_argument("--only", choices=ATTENTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        print(json.dumps(measure(options)))
        return 0
    budget = Budget(options.budget)
    rows: dict[str, Any] = {}
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    for kind in options.attention:
        command = [sys.executable, __file__, "--only", kind]
        for name in ("preset", "length", "tokens", "remat", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        environment = {**os.environ, "XLA_FLAGS": flags.strip()}
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=False,
                timeout=max(budget.left, 1),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            rows[kind] = {"fault": "out of time"}
            continue
        fault = {"fault": f"exit {done.returncode}"}
        rows[kind] = fault if done.returncode else json.loads(done.stdout.splitlines()[-1])
    about = {name: getattr(options, name) for name in ("preset", "length", "tokens", "remat")}
    write(options.out / "profile.json", {**about, "rows": rows})
    good = {kind: row for kind, row in rows.items() if not row["fault"]}
    draw(good, options.out / "profile.png", f"{options.preset}, N = {options.length}")
    for kind, row in good.items():
        print(f"\n{kind}: the kernels that take most")
        for name, what, ms in row["kernels"][:12]:
            print(f"  {ms:8.2f} ms  {what:9}  {name[:90]}")
    print()
    print(table(("attention", "step ms", *KINDS, "rest", "between kernels"), lines(rows)))
    return 0 if len(good) == len(options.attention) else 1


def lines(rows: dict[str, Any]) -> list[list[str]]:
    """Milliseconds a step; "between kernels" is what the step takes beyond their sum."""
    made = []
    for kind, row in rows.items():
        if row["fault"]:
            made.append([kind, row["fault"], *[""] * 4])
            continue
        numbers = [row["step_ms"], *row["ms"].values()]
        numbers.append(row["step_ms"] - sum(row["ms"].values()))
        made.append([kind, *(f"{x:.1f}" for x in numbers)])
    return made


def draw(rows: dict[str, Any], path: Path, title: str) -> None:
    figure, plane = axes(title, "milliseconds of a step", "")
    if figure is None or not rows:
        return
    left = [0.0] * len(rows)
    for what in (*KINDS, "rest"):
        widths = [row["ms"][what] for row in rows.values()]
        plane.barh(list(rows), widths, left=left, label=what)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    plane.set_ylim(-0.5, len(rows))  # room for the legend
    plane.legend(loc="upper center", ncols=3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    prepare_gpu()
    raise SystemExit(main())
