"""The JAX adapter on the CPU: the whole table, and what the operator promises besides values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import BY_NAME, CASES, SMALL, Case, check, make_inputs, reference_results

jax = pytest.importorskip("jax")

import jax_cases
from la_cupy.interop.jax import linear_attention, linear_attention_xla


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def run(case: Case, attention: Any, options: dict[str, str] | None = None) -> None:
    # dout has the type of out in JAX
    if case.dout_dtype is not None:
        case = Case(**{**vars(case), "dout_dtype": None})
    x = make_inputs(case)
    before = [array.tobytes() for array in x.arrays()]
    results = jax_cases.call(case, x, attention, options)
    assert [array.tobytes() for array in x.arrays()] == before, "an input was modified"
    check(case, x, results, reference_results(case, x))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_table(case: Case) -> None:
    run(case, linear_attention, jax_cases.QUICK)


# The plain functions are what the table runs on a CPU; here they are differentiated by JAX.
PLAIN = [
    BY_NAME[f"{prefix}{name}"]
    for prefix in ("", "causal-")
    for name in (
        *("float64-state", "bfloat16-state", "float16", "grouped-float32", "N<M", "N>M-state"),
        *("k-v-on-different-axes", "zero_rows-a=0.0", "relu-None", "state-wide", "mixed_sizes"),
    )
]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_functions(case: Case) -> None:
    run(case, linear_attention_xla)


LARGER = [
    case for case in CASES if not case.small and ("biased" in case.name or "1031" in case.name)
]


@pytest.mark.parametrize("case", LARGER, ids=str)
def test_more_rows_than_a_chunk(case: Case) -> None:
    run(case, linear_attention, jax_cases.QUICK)
