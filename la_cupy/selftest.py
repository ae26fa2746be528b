"""`python -m la_cupy selftest`: does this machine compute what the definition says?

Every check makes inputs, runs both public functions twice, and compares all results with the
float64 reference, by the measure and the budgets that the tests of the library use.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import dtypes, reference
from .api import linear_attention, linear_attention_vjp
from .device import DeviceInfo
from .kernels import NoKernelError, Spec
from .plan import backward_plan, forward_plan
from .problem import backward_problem, forward_problem
from .results import Array, Gradients, State

BUDGETS = {
    "float64": (1e-11, 1e-10),
    "float32": (1e-5, 1e-4),
    "tf32": (5e-3, 1e-2),
    "float16": (4e-3, 1e-2),
    "bfloat16": (2e-2, 4e-2),
}
"""Largest errors of out, den and states, and of gradients."""


@dataclass(frozen=True)
class Check:
    """One call of the operator and of its gradient."""

    name: str
    kind: str  # a key of BUDGETS
    causal: bool
    q: tuple[int, ...] = (2, 100, 32)
    k: tuple[int, ...] = (2, 100, 32)
    e: int = 32
    feature_map: str = "identity"
    qk_norm: str | None = "l2"
    normalize: bool = True
    states: bool = True

    @property
    def options(self) -> dict[str, Any]:
        names = ("causal", "feature_map", "qk_norm", "normalize")
        return {name: getattr(self, name) for name in names}

    @property
    def precision(self) -> str:
        return "tf32" if self.kind == "tf32" else "highest"


CHECKS = (
    *(
        Check(f"{kind}, {'causal' if causal else 'all keys'}", kind, causal)
        for kind in ("float64", "float32", "bfloat16")
        for causal in (False, True)
    ),
    Check("tf32, causal", "tf32", True),
    Check("float16, elu1", "float16", True, feature_map="elu1"),
    Check("bfloat16, grouped queries", "bfloat16", True, q=(2, 3, 70, 32), k=(2, 1, 70, 32)),
    Check("float32, fewer queries than keys", "float32", True, q=(1, 30, 20), k=(1, 170, 20)),
    Check("float32, long", "float32", True, q=(1, 2000, 32), k=(1, 2000, 32), states=False),
    Check("float32, qk_norm=None", "float32", True, qk_norm=None, normalize=False),
    Check("float32, not normalized", "float32", True, normalize=False),
    Check("bfloat16, width 64", "bfloat16", True, q=(2, 80, 64), k=(2, 80, 64), e=64),
)


class _Inputs:
    """The arrays of a check, in NumPy."""

    def __init__(self, check: Check) -> None:
        rng = np.random.default_rng(len(check.name))
        dtype = dtypes.numpy_dtype("float32" if check.kind == "tf32" else check.kind)
        sums = np.float64 if check.kind == "float64" else np.float32
        values = (*check.k[:-1], check.e)
        self.q, self.k, self.v, self.dout = (
            rng.standard_normal(shape).astype(dtype)
            for shape in (check.q, check.k, values, (*check.q[:-1], check.e))
        )
        self.initial_state: State | None = None
        self.dstate: State | None = None
        if check.states:
            # What some keys left behind: any numbers at all might bring den near 0.
            keys = [rng.standard_normal((*s[:-2], 10, s[-1])) for s in (check.k, values)]
            no_query = np.zeros((*check.k[:-2], 0, check.k[-1]))
            _, state, _ = reference.linear_attention(no_query, *keys, **check.options)
            self.initial_state = State(*(part.astype(sums) for part in state))
            self.dstate = State(*(rng.standard_normal(x.shape).astype(sums) for x in state))

    def arrays(self) -> list[Array]:
        states = (*(self.initial_state or ()), *(self.dstate or ()))
        return [self.q, self.k, self.v, self.dout, *states]

    def move(self, to: Callable[[Array], Array]) -> None:
        for name in ("q", "k", "v", "dout"):
            setattr(self, name, to(getattr(self, name)))
        for name in ("initial_state", "dstate"):
            state = getattr(self, name)
            setattr(self, name, None if state is None else State(*map(to, state)))


@dataclass(frozen=True)
class Outcome:
    """What a check found: the largest errors, and what is wrong, if anything is."""

    check: Check
    error: float
    gradient_error: float
    faults: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "; ".join(self.faults) or "ok"
        errors = f"out {self.error:.1e}  gradients {self.gradient_error:.1e}"
        return f"{self.check.name:34} {errors}  {verdict}"


def run(check: Check, to: Callable[[Array], Array], back: Callable[[Array], Array]) -> Outcome:
    """Run one check on the arrays that `to` makes of NumPy arrays; `back` is its inverse."""
    x = _Inputs(check)
    before = [a.copy() for a in x.arrays()]
    expected = _reference(check, x)
    scale = float(
        np.abs(_float64(x.dout)).max()
        * max(np.abs(_float64(x.v)).max(), 1.0)
        / np.sqrt(check.k[-2])
    )
    x.move(to)
    results, again = ({name: back(a) for name, a in _call(check, x).items()} for _ in range(2))
    x.move(back)

    faults = []
    errors = {False: 0.0, True: 0.0}
    for name, ref in expected.items():
        gradient = name.startswith("d") and name != "den"
        error = _error(_float64(results[name]), ref, scale if gradient else 0.0)
        errors[gradient] = max(errors[gradient], error)
        budget = BUDGETS[check.kind][gradient]
        if not error <= budget:
            faults.append(f"{name} is off by {error:.1e}, more than {budget:.0e}")
    if any(results[name].tobytes() != again[name].tobytes() for name in results):
        faults.append("a second run gave other bits")
    if any(a.tobytes() != b.tobytes() for a, b in zip(before, x.arrays(), strict=True)):
        faults.append("an input was modified")
    return Outcome(check, errors[False], errors[True], tuple(faults))


def on_cpu(checks: Iterable[Check] = CHECKS) -> Iterable[Outcome]:
    """Run the checks on NumPy arrays."""
    return (run(check, np.asarray, np.asarray) for check in checks)


def on_gpu(checks: Iterable[Check] = CHECKS) -> Iterable[Outcome]:
    """Run the checks on CuPy arrays, on the current device."""
    import cupy

    for check in checks:
        try:
            yield run(check, cupy.asarray, cupy.asnumpy)
        except (
            NoKernelError,
            cupy.cuda.compiler.CompileException,
            cupy.cuda.driver.CUDADriverError,
            cupy.cuda.runtime.CUDARuntimeError,
        ) as error:
            first = str(error).strip().splitlines()[0]
            yield Outcome(check, np.inf, np.inf, (f"{type(error).__name__}: {first}",))


def specs(device: DeviceInfo, checks: Iterable[Check] = CHECKS) -> list[Spec]:
    """The kernels that the checks run on `device`, to be compiled at once beforehand."""
    found: dict[Spec, None] = {}
    for check in checks:
        x = _Inputs(check)
        options = {
            **check.options,
            "precision": check.precision,
            "initial_state": x.initial_state,
        }
        forward = forward_problem(x.q, x.k, x.v, **options)
        backward = backward_problem(x.dout, x.q, x.k, x.v, dstate=x.dstate, **options)
        for plan in (forward_plan(forward, device, True), backward_plan(backward, device, True)):
            found |= {spec: None for launch in plan.launches for spec in launch.specs}
    return list(found)


def verdict(place: str, outcomes: list[Outcome], started: float) -> tuple[bool, str]:
    """Whether all is fine, and the sentence that says so."""
    failed = [outcome for outcome in outcomes if outcome.faults]
    seconds = time.perf_counter() - started
    if failed:
        return False, (
            f"NOT fine: {len(failed)} of {len(outcomes)} checks failed on {place}: do not trust "
            f"its results, and report this with the output of python -m la_cupy"
        )
    return True, f"fine: {len(outcomes)} checks passed on {place} in {seconds:.1f} s"


def _call(check: Check, x: _Inputs) -> dict[str, Array]:
    options = {**check.options, "precision": check.precision, "initial_state": x.initial_state}
    out, state, den = linear_attention(
        x.q, x.k, x.v, return_state=True, return_normalizer=True, **options
    )
    grads = linear_attention_vjp(x.dout, x.q, x.k, x.v, normalizer=den, dstate=x.dstate, **options)
    return _named(out, state, den, grads)


def _reference(check: Check, x: _Inputs) -> dict[str, Array]:
    options = {**check.options, "initial_state": x.initial_state}
    out, state, den = reference.linear_attention(x.q, x.k, x.v, **options)
    grads = reference.linear_attention_vjp(x.dout, x.q, x.k, x.v, dstate=x.dstate, **options)
    return _named(out, state, den, grads)


def _named(out: Array, state: State, den: Array, grads: Gradients) -> dict[str, Array]:
    named = {"out": out, "den": den, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    named |= {f"state.{name}": part for name, part in state._asdict().items()}
    if grads.initial_state is not None:
        parts = grads.initial_state._asdict()
        named |= {f"dinitial_state.{name}": part for name, part in parts.items()}
    return named


def _float64(x: Array) -> Array:
    return np.asarray(x).astype(np.float64)


def _error(x: Array, ref: Array, scale: float) -> float:
    """max|x - ref| / max(max|ref|, scale); infinite where x is not finite or has another shape."""
    if x.shape != ref.shape or not np.isfinite(x).all():
        return float("inf")
    return float(np.abs(x - ref).max() / max(np.abs(ref).max(), scale))
