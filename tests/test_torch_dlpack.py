"""Arrays between PyTorch, la_cupy and JAX on the host, and the examples that show it.

The same on a GPU, with bfloat16, is in test_gpu_torch.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_examples import run_example

torch = pytest.importorskip("torch")
from la_cupy.interop import from_dlpack
from la_cupy.interop.torch import linear_attention
from torch_helpers import VIEWS

import la_cupy as la

SHAPES = [(2, 3, 40, 16), (1, 1, 1, 16), (1, 1, 7, 1)]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_torch_to_la_cupy_to_jax_and_back(view: str, shape: Any, dtype: str) -> None:
    jax = pytest.importorskip("jax")
    x = [VIEWS[view](torch.rand(shape).to(getattr(torch, dtype))) for _ in range(3)]
    arrays = [from_dlpack(t) for t in x]
    assert all(a.ctypes.data == t.data_ptr() for a, t in zip(arrays, x, strict=True))
    out = la.linear_attention(*arrays, causal=True)
    with jax.default_device(jax.devices("cpu")[0]):
        there = jax.dlpack.from_dlpack(out)
        doubled = jax.jit(lambda y: y * 2)(there)
    assert there.shape == shape and str(there.dtype) == dtype
    back = torch.from_dlpack(doubled)
    assert torch.equal(back, linear_attention(*x, causal=True) * 2)
    assert from_dlpack(doubled).ctypes.data == back.data_ptr()
    assert torch.from_dlpack(out).data_ptr() == out.ctypes.data


@pytest.mark.parametrize("view", VIEWS)
def test_bfloat16_to_la_cupy(view: str) -> None:
    x = VIEWS[view](torch.rand(2, 3, 40, 16).bfloat16())
    array = from_dlpack(x)
    assert array.dtype == ml_dtypes.bfloat16 and array.ctypes.data == x.data_ptr()
    out = la.linear_attention(array, array, array, causal=True)
    found = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found, linear_attention(x, x, x, causal=True))


def test_the_layer_learns(tmp_path: Path) -> None:
    done = run_example("torch_layer.py", "--steps", "60", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = re.findall(r"loss ([0-9.]+) -> ([0-9.]+)", done.stdout)[0]
    assert float(first) > 2.5 and float(last) < 0.5 * float(first)
    assert "60/60" in done.stderr and done.stdout.count("step ") >= 5


def test_the_roundtrip_shares_memory(tmp_path: Path) -> None:
    done = run_example("dlpack_roundtrip.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    hand_overs = [
        line for line in done.stdout.splitlines() if "-> la_cupy" in line or "-> t" in line
    ]
    assert len(hand_overs) >= 2 and all("shared: True" in line for line in hand_overs)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [(), ("--compile",)], ids=str)
def test_the_layer_learns_on_a_gpu(arguments: tuple[str, ...], tmp_path: Path) -> None:
    if arguments:
        pytest.importorskip("triton")
    done = run_example("torch_layer.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = re.findall(r"loss ([0-9.]+) -> ([0-9.]+)", done.stdout)[0]
    assert "training on cuda" in done.stderr and float(last) < 0.5 * float(first)
