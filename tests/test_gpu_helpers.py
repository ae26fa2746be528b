"""The helpers of the GPU tests, tested where there is no GPU: on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import BY_NAME, CASES, Case, check, errors, make_inputs, name_results, reference_results
from chunked import chunked, widen
from emulation.backend import H200
from gpu_helpers import MOAT, SANITIZER, call, device_errors, in_moat, plans, same_bits, specs
from measures import gradient_scale

from la_cupy.kernels import KEYS, ROLES, STREAM, WGMMA, WalkSpec
from la_cupy.plan import backward_plan, forward_plan
from la_cupy.problem import backward_problem, forward_problem

PLAIN = [
    case
    for case in CASES
    if case.q[:-1] == case.k[:-1] == case.v[:-1]
    and case.initial is None
    and case.dstate is None
    and 0 not in case.q
    and case.q[-2] < 1000
    and case.data != "tiny_product"  # its dq is the rounding of an exact zero
]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_chunked_reference_is_the_reference(case: Case) -> None:
    inputs = make_inputs(case)
    n = case.q[-2]
    chunk = max(c for c in range(1, max(2, n // 2 + 1)) if n % c == 0)
    out, state, den, grads = chunked(case, inputs.q, inputs.k, inputs.v, inputs.dout, chunk)
    results = name_results(out=out, state=state, den=den, grads=grads)
    scale = gradient_scale(inputs)
    for name, ref in reference_results(case, inputs).items():
        size = max(abs(ref).max(), scale if name in ("dq", "dk", "dv") else 0)
        assert abs(results[name] - ref).max() <= 1e-11 * size, name


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_widening_is_exact(kind: str) -> None:
    x = make_inputs(BY_NAME[f"causal-{kind}"]).q
    assert np.array_equal(widen(x), x.astype(np.float64))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_moat_changes_no_value_stride_or_alignment(case: Case) -> None:
    inputs = make_inputs(case)
    moat = in_moat(inputs, np)
    for x, y, parent in zip(inputs.arrays(), moat.inputs.arrays(), moat.parents, strict=True):
        assert x.tobytes() == y.tobytes() and x.dtype == y.dtype and x.shape == y.shape
        if x.size == 0:
            continue
        assert x.strides == y.strides
        assert np.shares_memory(y, parent)
        assert np.isnan(parent[:MOAT]).all() and np.isnan(parent[-MOAT:]).all()
        base = parent.ctypes.data
        assert (x.ctypes.data - (y.ctypes.data - base)) % 16 == 0 or x.itemsize > 8
    before = moat.bits()
    assert before == moat.bits()
    if moat.parents[0].size:
        moat.parents[0][0] = 0
        assert before != moat.bits()


@pytest.mark.parametrize("name", ["causal-biased-float32", "causal-biased-bfloat16"])
def test_errors_on_the_device_are_those_of_the_table(name: str) -> None:
    case = BY_NAME[name]
    inputs = make_inputs(case)
    results, expected = call(case, inputs), reference_results(case, inputs)
    for result, measured in errors(case, inputs, results, expected).items():
        if result not in ("out", "dq", "dk", "dv"):
            continue
        scale = 0.0 if result == "out" else gradient_scale(inputs)
        found = device_errors(results[result], expected[result], scale, np)
        assert set(found) == set(measured)
        for measure, (error, _) in measured.items():
            assert found[measure] == pytest.approx(error, rel=1e-6), (result, measure)


def test_errors_on_the_device_see_nan() -> None:
    x = np.ones((2000, 3), np.float32)
    assert device_errors(x * np.float32("nan"), x.astype(float), 0.0, np)["max"] == np.inf
    assert device_errors(x[:5], x.astype(float), 0.0, np)["max"] == np.inf


@pytest.mark.parametrize("name", ["causal-float32-state", "causal-grouped-bfloat16", "N<M"])
def test_one_call_of_everything(name: str) -> None:
    case = BY_NAME[name]
    inputs = make_inputs(case)
    results: dict[str, Any] = call(case, inputs)
    check(case, inputs, results, reference_results(case, inputs))
    again = call(case, inputs)
    assert same_bits(results, again) == []
    again["dk"].flat[-1] += 1
    assert same_bits(results, again) == ["dk"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_need_no_inputs(case: Case) -> None:
    """The plans are those of the real inputs: all that is compiled ahead is what runs."""
    x = make_inputs(case)
    options = {**case.options, "initial_state": x.initial_state}
    for plan, problem in zip(
        plans(case, H200),
        (
            forward_problem(x.q, x.k, x.v, **options),
            backward_problem(x.dout, x.q, x.k, x.v, dstate=x.dstate, **options),
        ),
        strict=True,
    ):
        real = forward_plan if problem.dout is None else backward_plan
        launches = real(problem, H200, True).launches
        assert [x.spec for x in plan.launches] == [x.spec for x in launches]


def test_the_kernels_of_cases_are_found_once() -> None:
    one = specs([BY_NAME["causal-float32"]], H200)
    assert one and len(one) == len(set(one))
    assert specs([BY_NAME["causal-float32"]] * 3, H200) == one


def test_the_reduced_set_reaches_every_kernel() -> None:
    """The sanitizer sees walks of all roles, pre-passes, scan and relevel, segments and split columns."""
    made = [plan for name in SANITIZER for plan in plans(BY_NAME[name], H200)]
    used = [launch.spec for plan in made for launch in plan.launches]
    sources = {
        "sweep.cu",
        "stream.cu",
        "stream_key_value.cu",
        "ring.cu",
        "ring_sums.cu",
        "step.cu",
        "accumulate.cu",
        "scan.cu",
        "relevel.cu",
    }
    assert {spec.source for spec in used} == sources
    walks = {(spec.arith, spec.role, spec.causal) for spec in used if isinstance(spec, WalkSpec)}
    assert {arith for arith, *_ in walks} >= {"Bf16"}  # of wide rows, and of heads that are shared
    for arith in (WGMMA, STREAM, "Tf32", "Tf32x3", "F64"):
        for role in ("Forward", "GradQ") if arith == STREAM else ROLES:
            assert {(arith, role, False), (arith, role, True)} <= walks, (arith, role)
    assert {(STREAM, role, True) for role in (KEYS, "Queries", "GradKV")} <= walks
    assert (STREAM, "GradKV", False) in walks
    assert any("segments" in reason for plan in made for reason in plan.reasons)
    assert any(name.startswith("dots.") for plan in made for name in plan.workspace)
