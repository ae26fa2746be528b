"""Is the result right? A float64 reference for any array library, and the error budgets.

The weights are w[i,j] = a + b q~[i].k~[j] for j <= i, with q~ = q/|q| where `l2`. The reference
takes the sequence in pieces: inside a piece every weight is written out, and what came before it
enters through sums. Its memory is O(N (D + piece)), so it reaches N = 131072. It shares nothing
with la_cupy; the tests compare it with the quadratic definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from _bench_cases import Case, Inputs, widen

PIECE = 512
# The heads that are checked at a time hold at most this many elements an array.
GROUP_ELEMENTS = 2**26
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Weights:
    """Which member of the family: w = a + b q~.k~, with or without the division by its sum."""

    a: float = 1.0
    b: float = 1.0
    l2: bool = True
    normalize: bool = True


class Budget(NamedTuple):
    """The largest errors allowed: of the maximum and of the Frobenius norm."""

    out_max: float
    grad_max: float
    out_norm: float
    grad_norm: float


BUDGETS = {
    "float64": Budget(1e-11, 1e-10, 1e-11, 1e-10),
    "float32": Budget(1e-5, 1e-4, 1e-5, 1e-4),
    "tf32": Budget(5e-3, 1e-2, 1e-3, 5e-3),
    "float16": Budget(4e-3, 1e-2, 1e-3, 4e-3),
    "bfloat16": Budget(2e-2, 4e-2, 5e-3, 1e-2),
}


def reference(xp: Any, q: Any, k: Any, v: Any, dout: Any, weights: Weights) -> tuple[Any, ...]:
    """(out, dq, dk, dv) of the causal operator for float64 inputs (G, N, D)."""
    q_length, k_length = _lengths(xp, q, weights), _lengths(xp, k, weights)
    q, k = q / q_length, k / k_length
    a, b = weights.a, weights.b
    out, g, delta = xp.empty_like(v), xp.empty_like(v), xp.zeros_like(v[..., :1])
    dq, dk, dv = xp.empty_like(q), xp.empty_like(k), xp.empty_like(v)
    groups, n, d = q.shape
    e = v.shape[-1]
    pieces = [slice(i, min(i + PIECE, n)) for i in range(0, n, PIECE)]

    kv, k_sum, v_sum = xp.zeros((groups, d, e)), xp.zeros((groups, d, 1)), xp.zeros((groups, 1, e))
    for s in pieces:
        w = xp.tril(a + b * (q[:, s] @ _t(k[:, s])))
        num = w @ v[:, s] + a * v_sum + b * (q[:, s] @ kv)
        if weights.normalize:
            den = w.sum(-1, keepdims=True) + a * s.start + b * (q[:, s] @ k_sum)
            out[:, s] = num / den
            g[:, s] = dout[:, s] / den
            delta[:, s] = (out[:, s] * g[:, s]).sum(-1, keepdims=True)
        else:
            out[:, s], g[:, s] = num, dout[:, s]
        dw = xp.tril(g[:, s] @ _t(v[:, s]) - delta[:, s])
        dq[:, s] = b * (dw @ k[:, s] + g[:, s] @ _t(kv) - delta[:, s] * _t(k_sum))
        kv += _t(k[:, s]) @ v[:, s]
        k_sum += _t(k[:, s].sum(-2, keepdims=True))
        v_sum += v[:, s].sum(-2, keepdims=True)

    qg, q_delta, g_sum = xp.zeros_like(kv), xp.zeros_like(k_sum), xp.zeros_like(v_sum)
    for s in reversed(pieces):
        w = xp.tril(a + b * (q[:, s] @ _t(k[:, s])))
        dw = xp.tril(g[:, s] @ _t(v[:, s]) - delta[:, s])
        dk[:, s] = b * (_t(dw) @ q[:, s] + v[:, s] @ _t(qg) - _t(q_delta))
        dv[:, s] = _t(w) @ g[:, s] + a * g_sum + b * (k[:, s] @ qg)
        qg += _t(q[:, s]) @ g[:, s]
        q_delta += _t(q[:, s]) @ delta[:, s]
        g_sum += g[:, s].sum(-2, keepdims=True)

    if weights.l2:
        dq = (dq - q * (q * dq).sum(-1, keepdims=True)) / q_length
        dk = (dk - k * (k * dk).sum(-1, keepdims=True)) / k_length
    return out, dq, dk, dv


def _lengths(xp: Any, x: Any, weights: Weights) -> Any:
    return xp.sqrt((x * x).sum(-1, keepdims=True)) if weights.l2 else xp.ones_like(x[..., :1])


def _t(x: Any) -> Any:
    return x.swapaxes(-1, -2)


@dataclass
class _Sums:
    """What the errors of one array are made of, gathered over groups of heads."""

    worst: float = 0.0
    largest: float = 0.0
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tail_squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, error: Any, wanted: Any) -> None:
        # max() may drop a NaN; it stays in the squares, where no comparison with it holds.
        self.worst = max(self.worst, float(abs(error).max()))
        self.largest = max(self.largest, float(abs(wanted).max()))
        tail = error.shape[-2] * 3 // 4
        for sums, start in ((self.squares, 0), (self.tail_squares, tail)):
            sums[0] += float((error[..., start:, :] ** 2).sum())
            sums[1] += float((wanted[..., start:, :] ** 2).sum())


@dataclass(frozen=True)
class Errors:
    """Of one array against float64: maximum, and Frobenius norm of all and of the last quarter."""

    maximum: float
    norm: float
    tail_norm: float

    def within(self, maximum: float, norm: float) -> bool:
        return self.maximum <= maximum and self.norm <= norm and self.tail_norm <= norm


def measure_errors(
    xp: Any, case: Case, inputs: Inputs, results: tuple[Any, ...], weights: Weights
) -> dict[str, Errors]:
    """The errors of `results`: (out,) or (out, dq, dk, dv), each (B, H, N, D)."""
    heads = [(b, h) for b in range(case.b) for h in range(case.h)]
    at_a_time = max(1, GROUP_ELEMENTS // (case.n * case.d))
    sums = [_Sums() for _ in results]
    for first in range(0, len(heads), at_a_time):
        group = heads[first : first + at_a_time]
        picked = [
            xp.stack([widen(x[b, h]) for b, h in group])
            for x in (inputs.q, inputs.k, inputs.v, inputs.dout, *results)
        ]
        q, k, v, dout = picked[:4]
        wanted = reference(xp, q, k, v, dout, weights)
        for entry, x, ref in zip(sums, picked[4:], wanted, strict=False):
            entry.add(x - ref, ref)
    largest_dout = float(abs(widen(inputs.dout)).max())
    largest_v = float(abs(widen(inputs.v)).max())
    # A true zero among the gradients is judged by the size its terms have.
    grad_scale = largest_dout * max(largest_v, 1.0) / case.n**0.5
    errors = {}
    for name, entry in zip(NAMES, sums, strict=False):
        scale = max(entry.largest, 0.0 if name == "out" else grad_scale)
        errors[name] = Errors(
            _ratio(entry.worst, scale),
            _ratio(entry.squares[0] ** 0.5, entry.squares[1] ** 0.5),
            _ratio(entry.tail_squares[0] ** 0.5, entry.tail_squares[1] ** 0.5),
        )
    return errors


def _ratio(error: float, size: float) -> float:
    return error / size if size else (0.0 if error == 0 else float("inf"))


def faults(errors: dict[str, Errors], budget: Budget, n: int) -> list[str]:
    """One sentence for each array that is over its budget; norms count from N = 1000 on."""
    found = []
    for name, error in errors.items():
        maximum = budget.out_max if name == "out" else budget.grad_max
        norm = budget.out_norm if name == "out" else budget.grad_norm
        if not error.within(maximum, norm if n >= 1000 else float("inf")):
            found.append(
                f"{name}: error {error.maximum:.1e} (at most {maximum:.0e}), "
                f"norm {error.norm:.1e}, last quarter {error.tail_norm:.1e} (at most {norm:.0e})"
            )
    return found
