"""One array through three libraries without a copy: PyTorch -> la_cupy -> JAX -> PyTorch.

On a GPU the array in the middle is CuPy's, on a CPU NumPy's. Every hand-over prints the address
of the memory, which stays the same, but that JAX on a CPU copies what is not aligned to 64 bytes.
JAX is left out where it is not installed or sees no GPU.

    python examples/dlpack_roundtrip.py
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from la_cupy.interop import from_dlpack

import la_cupy as la


def address(x: Any) -> int:
    """Of the first element."""
    if isinstance(x, torch.Tensor):
        return int(x.data_ptr())
    if hasattr(x, "unsafe_buffer_pointer"):
        return int(x.unsafe_buffer_pointer())
    return int(x.ctypes.data if hasattr(x, "ctypes") else x.data.ptr)


def show(step: str, x: Any, came_from: Any = None) -> None:
    """What `x` is, where it lies, and whether that is where `came_from` lies."""
    shared = "" if came_from is None else f"  shared: {address(x) == address(came_from)}"
    kind = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
    print(f"{step:28s} {kind:16s} {x.dtype!s:16s} {hex(address(x))}{shared}")


def jax_on(device: str) -> Any:
    """JAX, or None where it cannot read arrays of this device."""
    if importlib.util.find_spec("jax") is None:
        print("JAX is not installed, so it is left out (pip install jax).")
        return None
    import jax

    if device == "cuda" and jax.default_backend() != "gpu":
        print("JAX sees no GPU, so it is left out.")
        return None
    return jax


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # Heads in front of the rows of a (B, N, H, D) array, as layers have them: a view, no copy.
    q, k, v = (torch.randn(2, 500, 4, 64, device=device).transpose(1, 2) for _ in range(3))
    arrays = [from_dlpack(x) for x in (q, k, v)]
    show("torch", q)
    show("  -> la_cupy", arrays[0], q)

    out = la.linear_attention(*arrays, causal=True)
    show("linear_attention", out)
    tensor = torch.from_dlpack(out)
    show("  -> torch", tensor, out)

    jax = jax_on(device)
    if jax is not None:
        there = jax.dlpack.from_dlpack(out)
        show("  -> JAX", there, out)
        doubled = jax.jit(lambda y: 2 * y)(there)
        show("jit(2 * out)", doubled)
        back = torch.from_dlpack(doubled)
        show("  -> torch", back, doubled)
        print(f"the largest difference from 2 * out is {float((back - 2 * tensor).abs().max())}")

    if device == "cuda":  # bfloat16 as well, which NumPy's DLPack does not know
        half = from_dlpack(q.bfloat16())
        show("bfloat16", half)
        show("  -> torch", torch.from_dlpack(half), half)


if __name__ == "__main__":
    main()
