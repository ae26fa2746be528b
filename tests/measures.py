"""How far a result may be from the reference: measures, budgets, and the check of a whole case.

Errors are measured as README.md says ("Errors"): by size, and over 1000 rows or more also by
Frobenius norm, of the whole and of the last quarter of the rows, which a maximum would hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from inputs import Case, Inputs, state_dtype

from la_cupy import reference
from la_cupy.results import State

RESULTS = ("out", "den", *(f"state.{x}" for x in State._fields))
GRADIENTS = ("dq", "dk", "dv", *(f"dinitial.{x}" for x in State._fields))


def reference_results(case: Case, inputs: Inputs) -> dict[str, Any]:
    """Every result of the case in float64, by the names of RESULTS and GRADIENTS."""
    options = {**case.reference_options, "initial_state": inputs.initial_state}
    out, state, den = reference.linear_attention(inputs.q, inputs.k, inputs.v, **options)
    grads = reference.linear_attention_vjp(
        inputs.dout, inputs.q, inputs.k, inputs.v, dstate=inputs.dstate, **options
    )
    return name_results(out=out, state=state, den=den, grads=grads)


def name_results(out: Any = None, state: Any = None, den: Any = None, grads: Any = None) -> dict:
    """Results of a backend under the names that ``check`` knows."""
    results = {"out": out, "den": den}
    if state is not None:
        results |= {f"state.{name}": part for name, part in state._asdict().items()}
    if grads is not None:
        results |= {"dq": grads.q, "dk": grads.k, "dv": grads.v}
        if grads.initial_state is not None:
            parts = grads.initial_state._asdict()
            results |= {f"dinitial.{name}": part for name, part in parts.items()}
    return {name: x for name, x in results.items() if x is not None}


@dataclass(frozen=True)
class Budget:
    """Largest errors allowed: by size (1), and with N >= 1000 by Frobenius norm (2)."""

    out: float
    gradient: float
    out_long: float
    gradient_long: float


BUDGETS = {
    "float64": Budget(1e-11, 1e-10, 1e-11, 1e-10),
    "float32": Budget(1e-5, 1e-4, 1e-5, 1e-4),
    "tf32": Budget(5e-3, 1e-2, 1e-3, 5e-3),
    "float16": Budget(4e-3, 1e-2, 1e-3, 4e-3),
    "bfloat16": Budget(2e-2, 4e-2, 5e-3, 1e-2),
}


def max_error(x: Any, ref: Any, scale: float = 0.0) -> float:
    """max|x - ref| / max(max|ref|, scale); infinite where x is not finite or of another shape."""
    x, ref = _float64(x), _float64(ref)
    _require_finite(ref)
    if x.shape != ref.shape or not np.isfinite(x).all():
        return math.inf
    if x.size == 0:
        return 0.0
    error, size = np.abs(x - ref).max(), max(np.abs(ref).max(), scale)
    return 0.0 if error == 0 else math.inf if size == 0 else float(error / size)


def frobenius_error(x: Any, ref: Any) -> float:
    """|x - ref| / |ref| over all entries; infinite where x is not finite or of another shape."""
    x, ref = _float64(x), _float64(ref)
    _require_finite(ref)
    if x.shape != ref.shape or not np.isfinite(x).all():
        return math.inf
    error, size = np.linalg.norm(x - ref), np.linalg.norm(ref)
    return 0.0 if error == 0 else math.inf if size == 0 else float(error / size)


def gradient_scale(inputs: Inputs) -> float:
    """Size below which a gradient is judged by its absolute error."""
    m = inputs.k.shape[-2]
    dout, v = (np.abs(_float64(x)).max(initial=0) for x in (inputs.dout, inputs.v))
    return float(dout * max(v, 1) / math.sqrt(max(m, 1)))


def errors(case: Case, inputs: Inputs, results: Mapping, expected: Mapping) -> dict:
    """{name: {measure: (error, budget)}} for all results."""
    scale = gradient_scale(inputs)
    report: dict[str, dict[str, tuple[float, float]]] = {}
    for name, x in results.items():
        gradient = name in GRADIENTS
        out_budget, long_budget = _budgets(case, name, x)
        ref = expected[name]
        measures = {"max": (max_error(x, ref, scale if gradient else 0.0), out_budget)}
        # a gradient that is zero but for the reference's own rounding has no relative error
        judged = name in ("out", "dq", "dk", "dv") and np.abs(ref).max(initial=0) > 1e-11 * scale
        if judged and np.ndim(ref) > 1 and np.shape(ref)[-2] >= 1000:
            rows = np.shape(ref)[-2]
            tail = (..., slice(rows - rows // 4, None), slice(None))
            measures["Frobenius"] = (frobenius_error(x, ref), long_budget)
            measures["Frobenius, last quarter"] = (
                frobenius_error(_float64(x)[tail], _float64(ref)[tail]),
                long_budget,
            )
        report[name] = measures
    return report


def check(
    case: Case,
    inputs: Inputs,
    results: Mapping[str, Any],
    expected: Mapping[str, Any],
    names: Iterable[str] | None = None,
) -> None:
    """Assert that every result (or those named) is there, of the right type, and within budget."""
    wanted = set(expected if names is None else names)
    assert wanted <= set(results), f"{case}: no result for {sorted(wanted - set(results))}"
    chosen = {name: results[name] for name in sorted(wanted)}
    for name, x in chosen.items():
        assert np.shape(x) == np.shape(expected[name]), (
            f"{case}: {name} has shape {np.shape(x)}, expected {np.shape(expected[name])}"
        )
        dtype = _result_dtype(case, name)
        assert str(x.dtype) == dtype, f"{case}: {name} has dtype {x.dtype}, expected {dtype}"
    failures = []
    for name, measures in errors(case, inputs, chosen, expected).items():
        for measure, (error, budget) in measures.items():
            if not error <= budget:  # so written that NaN fails
                where = _worst(chosen[name], expected[name])
                failures.append(f"{name}: {measure} error {error:.3g} > {budget:.0e} ({where})")
    assert not failures, f"{case}: " + "; ".join(failures)


def _budgets(case: Case, name: str, x: Any) -> tuple[float, float]:
    """Those of the arithmetic or of the result's own type, whichever is looser.

    Gradients also stand on the den of the forward pass, whose arithmetic may be narrower.
    """
    stored = str(x.dtype)
    kinds = [BUDGETS[case.forward_compute], *([BUDGETS[stored]] if stored in BUDGETS else [])]
    if name in GRADIENTS:
        kinds.append(BUDGETS[case.compute])
        return max(b.gradient for b in kinds), max(b.gradient_long for b in kinds)
    return max(b.out for b in kinds), max(b.out_long for b in kinds)


def _result_dtype(case: Case, name: str) -> str:
    q, k, v = case.dtypes
    if name.startswith("dinitial."):
        return case.initial_dtype or state_dtype(case)
    fixed = {"out": case.out_dtype, "dq": q, "dk": k, "dv": v}
    return fixed.get(name, state_dtype(case))


def _worst(x: Any, ref: Any) -> str:
    x, ref = _float64(x), _float64(ref)
    if not np.isfinite(x).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
        return f"{x[at]} at {at}, expected {ref[at]:.6g}"
    at = tuple(int(i) for i in np.unravel_index(np.abs(x - ref).argmax(), x.shape))
    return f"{x[at]:.9g} at {at}, expected {ref[at]:.9g}"


def _float64(x: Any) -> Any:
    x = x.get() if hasattr(x, "get") else x
    return np.asarray(x).astype(np.float64)


def _require_finite(ref: Any) -> None:
    assert np.isfinite(ref).all(), "the reference itself is not finite: the case is unsound"
