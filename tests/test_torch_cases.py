"""The PyTorch adapter on the one table of cases: CPU tensors, an emulated GPU, a GPU."""

from __future__ import annotations

import pytest
from cases import BY_NAME, SMALL, Case, check, make_inputs, reference_results

pytest.importorskip("torch")
import torch_helpers
from torch_helpers import EmulatedGpu, Tensors, call

emulated_gpu = torch_helpers.emulated_gpu

EMULATED = [
    f"{prefix}{name}"
    for prefix in ("", "causal-")
    for name in (
        "bfloat16-state",
        "float32",
        "float64-state",
        "unnormalised",
        "grouped-bfloat16",
        "grouped-float32",
        "k-v-on-different-axes",
        "k-broadcast",
        "q-broadcast",
        "state-shared",
        "state-wide",
        "state-float64",
        "state-bfloat16",
        "qk-float32-v-bfloat16",
        "transposed-float32",
        "transposed-bfloat16",
        "unaligned-bfloat16",
        "stride0-float32",
        "scalar-float32",
        "swapaxes-bfloat16",
        "N<M",
        "N>M",
        "M=0-state",
        "N=0-M=9",
        "B=0",
        "no-queries",
        "no-lead",
        "ones",
    )
]
"""Every way in which the adapter makes, copies, sums and converts buffers."""


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_cpu(case: Case) -> None:
    tensors = Tensors(case, make_inputs(case))
    results = call(case, tensors.inputs)
    tensors.assert_unchanged()
    check(case, tensors.moat.inputs, results, reference_results(case, tensors.moat.inputs))


@pytest.mark.parametrize("case", [BY_NAME[name] for name in EMULATED], ids=str)
def test_emulated_gpu(case: Case, emulated_gpu: type[EmulatedGpu]) -> None:
    tensors = Tensors(case, make_inputs(case))
    results = call(case, tensors.inputs)
    assert len(emulated_gpu.plans) == 2, "forward and backward"
    tensors.assert_unchanged()
    check(case, tensors.moat.inputs, results, reference_results(case, tensors.moat.inputs))


@pytest.mark.gpu
@pytest.mark.usefixtures("warm_kernels")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_gpu(case: Case) -> None:
    tensors = Tensors(case, make_inputs(case), "cuda")
    results = call(case, tensors.inputs)
    tensors.assert_unchanged()
    check(case, tensors.moat.inputs, results, reference_results(case, tensors.moat.inputs))
