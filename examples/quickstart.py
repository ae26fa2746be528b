"""Linear attention on every array type this machine has: NumPy always, CuPy where it sees a GPU.

Run me as I am:  python examples/quickstart.py
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

import la_cupy as la

HEADS, TOKENS, WIDTH, CUT = 4, 1000, 64, 600


def show(xp: Any, where: str) -> None:
    """Forward, backward and a state carried from one piece to the next, on the arrays of `xp`."""
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4, HEADS, TOKENS, WIDTH), dtype=np.float32)
    q, k, v, dout = (xp.asarray(x) for x in draws)

    out, den = la.linear_attention(q, k, v, causal=True, return_normalizer=True)
    grads = la.linear_attention_vjp(dout, q, k, v, normalizer=den, causal=True)

    # The same sequence in two pieces: what the first leaves behind is all the second needs.
    first, state = la.linear_attention(
        q[:, :CUT], k[:, :CUT], v[:, :CUT], causal=True, return_state=True
    )
    second = la.linear_attention(
        q[:, CUT:], k[:, CUT:], v[:, CUT:], causal=True, initial_state=state
    )
    pieces = xp.concatenate([first, second], axis=-2)

    print(f"{where}: {type(out).__module__.split('.')[0]}.{type(out).__name__}, {out.dtype}")
    print(f"  out            {out.shape}, last row begins {float_list(out[0, -1, :3])}")
    print(f"  dq, dk, dv     norms {float_list([(g * g).sum() ** 0.5 for g in grads[:3]])}")
    print(f"  state          {int(state.count[0])} keys in {state.kv.nbytes // 1024} KiB of kv")
    print(f"  two pieces     differ from the whole by {float(abs(pieces - out).max()):.1e}")
    print(f"  definition     differs from it by {difference_from_definition(out, q, k, v):.1e}\n")


def difference_from_definition(out: Any, q: Any, k: Any, v: Any) -> float:
    """The largest difference from the quadratic formula in float64, over the first head."""
    q64, k64, v64 = (np.asarray(host(x[0]), dtype=np.float64) for x in (q, k, v))
    q64 /= np.linalg.norm(q64, axis=-1, keepdims=True)
    k64 /= np.linalg.norm(k64, axis=-1, keepdims=True)
    weights = np.tril(1 + q64 @ k64.T)
    wanted = weights @ v64 / weights.sum(axis=-1, keepdims=True)
    return float(abs(host(out[0]) - wanted).max())


def host(x: Any) -> Any:
    """The array as a NumPy array."""
    return x if isinstance(x, np.ndarray) else x.get()


def float_list(values: Any) -> str:
    return ", ".join(f"{float(x):.4f}" for x in values)


def gpu_arrays() -> Any:
    """CuPy, or None where it is not installed or sees no GPU."""
    if importlib.util.find_spec("cupy") is None:
        print("CuPy is not installed, so NumPy arrays only (pip install 'la_cupy[cuda13]').")
        return None
    import cupy

    if not cupy.is_available():
        print("CuPy sees no GPU here, so NumPy arrays only.")
        return None
    return cupy


if __name__ == "__main__":
    show(np, "CPU")
    cupy = gpu_arrays()
    if cupy is not None:
        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
        show(cupy, name)
