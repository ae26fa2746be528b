"""How near the copy bandwidth does la_cupy run? Checks first, then times; see --help.

The roof is the time that moving what must be moved would take at the copy bandwidth of the same
run: q, k, v and out for the forward pass, and q, k, v, dout, dq, dk, dv for the backward pass. A
result that is over its error budget gets no time, and the exit status is then 1.

    python examples/benchmark.py                        # the shapes of the README's table, on a GPU
    python examples/benchmark.py --shapes sweep         # N from 128 to 131072
    python examples/benchmark.py --shapes 8x4096x16x128:bfloat16,quick
    python examples/benchmark.py --device cpu           # NumPy, against masked softmax
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from _bench_cases import (
    Case,
    Inputs,
    make_inputs,
    named_cases,
    positive,
    select_cases,
    sets_needed,
    widen,
)
from _bench_check import BUDGETS, Weights, faults, measure_errors
from _bench_device import CpuDevice, Device, GpuDevice
from _bench_report import HEADER, Row, cpu_ratios, plot, provenance, table_line, write_json
from _bench_rivals import Rival, numpy_softmax, torch_rivals

import la_cupy as la

Precision = Literal["highest", "tf32"]

# A rival's result need only show that it computes what we say it does.
RIVAL_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Session:
    """What stays the same for all rows of a run."""

    device: Device
    bandwidth: float
    repeats: int
    layout: str

    def inputs(self, case: Case, seed: int) -> Inputs:
        return make_inputs(self.device.xp, case, seed, self.layout)

    def input_sets(self, case: Case, first: Inputs) -> list[Inputs]:
        count = sets_needed(case, self.device.l2_bytes)
        return [first] + [self.inputs(case, seed) for seed in range(1, count)]


def forward(x: Inputs, precision: Precision) -> Any:
    return la.linear_attention(x.q, x.k, x.v, causal=True, precision=precision)


def forward_and_backward(x: Inputs, precision: Precision) -> tuple[Any, ...]:
    out, den = la.linear_attention(
        x.q, x.k, x.v, causal=True, precision=precision, return_normalizer=True
    )
    grads = la.linear_attention_vjp(
        x.dout, x.q, x.k, x.v, normalizer=den, causal=True, precision=precision
    )
    return out, grads.q, grads.k, grads.v


def our_row(session: Session, case: Case, precision: Precision) -> Row:
    op = "la_cupy" if precision == "highest" else f"la_cupy {precision}"
    device, inputs = session.device, session.inputs(case, 0)
    results = forward_and_backward(inputs, precision)
    errors = measure_errors(device.xp, case, inputs, results, Weights())
    alone = measure_errors(device.xp, case, inputs, (forward(inputs, precision),), Weights())
    del results
    budget = BUDGETS["tf32" if precision == "tf32" else case.dtype]
    found = faults(errors, budget, case.n) or faults(alone, budget, case.n)
    shown = {name: asdict(error) for name, error in errors.items()}
    if found:
        return Row(op, **asdict(case), errors=shown, fault="; ".join(found))

    peak = device.peak_extra_bytes(lambda: forward_and_backward(inputs, precision), inputs.nbytes)
    sets = session.input_sets(case, inputs)
    fwd = device.measure(lambda i: forward(sets[i], precision), len(sets), session.repeats)
    both = device.measure(
        lambda i: forward_and_backward(sets[i], precision), len(sets), session.repeats
    )
    row = Row.of(op, case, session.bandwidth, fwd, both, peak, shown)
    predicted_fwd, predicted_both = predicted(inputs, precision)
    return replace(row, predicted_fwd_ms=predicted_fwd, predicted_both_ms=predicted_both)


def predicted(x: Inputs, precision: Precision) -> tuple[float | None, float | None]:
    """Milliseconds of the kernels, forward and both ways, where the plans say any."""
    plans = (
        la.explain(x.q, x.k, x.v, dout=dout, causal=True, precision=precision)
        for dout in (None, x.dout)
    )
    fwd, bwd = (plan.predicted_ms for plan in plans)
    return fwd, None if fwd is None or bwd is None else fwd + bwd


def rival_row(session: Session, case: Case, rival: Rival) -> Row:
    device, inputs = session.device, session.inputs(case, 0)
    if rival.positive:
        inputs = replace(inputs, q=positive(inputs.q), k=positive(inputs.k))
    prepared = rival.prepare(inputs)
    error = rival_error(device.xp, case, inputs, rival, rival.ours(rival.forward(prepared)))
    if not error <= RIVAL_TOLERANCE:
        return Row(rival.name, **asdict(case), fault=f"its result is off by {error:.1e}")
    both, peak, run_both = None, None, rival.both
    if run_both is not None and rival.peak is not None:
        peak = rival.peak(lambda: run_both(prepared))
    sets = [prepared] + [rival.prepare(x) for x in session.input_sets(case, inputs)[1:]]
    fwd = device.measure(lambda i: rival.forward(sets[i]), len(sets), session.repeats)
    if run_both is not None:
        both = device.measure(lambda i: run_both(sets[i]), len(sets), session.repeats)
    return Row.of(rival.name, case, session.bandwidth, fwd, both, peak, {"out": error})


def rival_error(xp: Any, case: Case, inputs: Inputs, rival: Rival, out: Any) -> float:
    """Relative Frobenius error; for softmax, of the last rows of the first head."""
    if rival.weights is not None:
        return measure_errors(xp, case, inputs, (out,), rival.weights)["out"].norm
    rows = slice(max(0, case.n - 64), case.n)
    q, k, v, got = (widen(x[0, 0]) for x in (inputs.q, inputs.k, inputs.v, out))
    seen = xp.arange(case.n) <= xp.arange(rows.start, rows.stop)[:, None]
    scores = xp.where(seen, xp.exp(q[rows] @ k.T / case.d**0.5), 0.0)
    wanted = scores @ v / scores.sum(-1, keepdims=True)
    return float(xp.linalg.norm(got[rows] - wanted) / xp.linalg.norm(wanted))


def decode_step(
    session: Session, heads: tuple[int, int] = (64, 16), d: int = 128
) -> dict[str, Any]:
    """One token with the state in and out: the time to read the state and write it, and the host's."""
    case = Case(heads[0], 64, heads[1], d, "bfloat16")
    x = session.inputs(case, 0)
    q, k, v = (part[..., -1:, :] for part in (x.q, x.k, x.v))
    _, state = la.linear_attention(x.q, x.k, x.v, causal=True, return_state=True)
    states = [state, type(state)(*(part.copy() for part in state))]
    timing = session.device.measure(
        lambda i: la.linear_attention(
            q, k, v, causal=True, initial_state=states[i], return_state=True
        ),
        len(states),
        max(session.repeats, 50),
    )
    moved = 2 * sum(part.nbytes for part in state)
    ratio = moved / (1e-3 * timing.ms) / session.bandwidth
    facts = {"b": case.b, "h": case.h, "d": d, "dtype": case.dtype, "state_ratio": ratio}
    return facts | timing._asdict()


def run(
    session: Session, cases: list[Case], rivals: list[Rival], show: Callable[[Row], None]
) -> None:
    """Every row, in order; `show` sees each as soon as it is there."""
    for case in cases:
        precisions: list[Precision] = ["highest"]
        if case.dtype == "float32" and session.device.xp is not np:
            precisions.append("tf32")
        for precision in precisions:
            show(our_row(session, case, precision))
        for rival in rivals:
            if rival.applies(case):
                show(rival_row(session, case, rival))


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    device: Device = GpuDevice() if options.device == "gpu" else CpuDevice()
    rivals: list[Rival] = []
    if not options.no_rivals:
        rivals = [numpy_softmax()] if options.device == "cpu" else torch_rivals(device.xp, print)
    cases = select_cases(options.shapes, options.device, options.quick)
    session = Session(device, device.copy_bandwidth(), options.repeats, options.layout)
    report = provenance(device.facts(), arguments)
    report |= {"layout": options.layout, "copy_bytes_per_s": session.bandwidth}
    for name in ("gpu", "cpu", "driver", "cuda", "commit"):
        if name in report:
            print(f"{name}: {report[name]}")
    print("versions: " + ", ".join(f"{k} {v}" for k, v in report["versions"].items()))
    print(f"copy bandwidth: {session.bandwidth / 1e12:.3f} TB/s\n\n{HEADER}")

    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(table_line(row), flush=True)
        write_json(options.out, report, rows)  # now, so that an interruption loses one row

    run(session, cases, rivals, show)

    step = report["decode_step"] = decode_step(session)
    print(
        f"\ndecode step, B {step['b']} H {step['h']} D {step['d']}: {step['host_us']:.0f} µs on the host, "
        f"{1e3 * step['ms']:.0f} on the device, which reads and writes the state at "
        f"{step['state_ratio']:.2f} of the copy bandwidth"
    )
    if options.device == "cpu":
        report["ratios"] = cpu_ratios(rows)
        for name, ratio in report["ratios"].items():
            print(f"{name}: {ratio:.2f}")
    write_json(options.out, report, rows)
    plot(options.out.with_suffix(".png"), rows, f"la_cupy on {report.get('gpu', 'the CPU')}")
    wrong = [row for row in rows if row.fault is not None and row.op.startswith("la_cupy")]
    for row in wrong:
        print(f"WRONG: {row.op} at {row.b}x{row.n}x{row.h}x{row.d}:{row.dtype}: {row.fault}")
    return 1 if wrong else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), help="default: gpu if CuPy sees one")
    parser.add_argument(
        "--shapes", help=f"names ({', '.join(named_cases())}) and BxNxHxD:dtype, comma-separated"
    )
    parser.add_argument("--quick", action="store_true", help="two shapes, few repeats")
    parser.add_argument("--repeats", type=int, help="timed calls of each kind")
    parser.add_argument("--layout", choices=("bhnd", "bnhd"), default="bhnd", help="in memory")
    parser.add_argument("--no-rivals", action="store_true", help="time la_cupy alone")
    parser.add_argument("--out", type=Path, default=Path("benchmark.json"), help="also a .png")
    options = parser.parse_args(arguments)
    if options.device is None:
        options.device = "gpu" if gpu_is_here() else "cpu"
        print(f"device: {options.device}")
    if options.repeats is None:
        options.repeats = {"gpu": 30, "cpu": 5}[options.device] if not options.quick else 10
    return options


def gpu_is_here() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.is_available())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
