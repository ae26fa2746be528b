"""Linear attention on the CPU against masked softmax attention in NumPy: ratios, in one run.

    python examples/benchmark_cpu.py

Softmax attention is timed at N = 4096 and scaled by (N / 4096)^2, which flatters it: at the full
length its scores would not fit into memory. Nothing is reported unless the result is right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import la_cupy as la

Array = Any  # numpy.ndarray of float32


class Ratios(NamedTuple):
    """Times as ratios: they mean the same on every machine."""

    softmax: float  # masked softmax attention, scaled to N, over linear attention at N
    skipping: float  # the same, for one that skips the blocks behind the mask
    doubling: float  # linear attention at 2 N over N
    backward: float  # backward over forward, at N


def masked_softmax(q: Array, k: Array, v: Array) -> Array:
    """softmax(q k^T / sqrt(D)) v with a causal mask: batched BLAS, exponentials in place."""
    n, d = q.shape[-2:]
    scores = (q * np.float32(d**-0.5)) @ k.swapaxes(-1, -2)
    scores += np.triu(np.full((n, n), -np.inf, np.float32), 1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    out: Array = scores @ v
    out /= total
    return out


def skipping_softmax(q: Array, k: Array, v: Array, rows: int = 256) -> Array:
    """The same by blocks of rows, each against the keys that it can see: half of the work."""
    out = np.empty_like(v)
    for start in range(0, q.shape[-2], rows):
        stop = min(start + rows, q.shape[-2])
        size = stop - start
        scaled = q[..., start:stop, :] * np.float32(q.shape[-1] ** -0.5)
        scores = scaled @ k[..., :stop, :].swapaxes(-1, -2)
        scores[..., start:] += np.triu(np.full((size, size), -np.inf, np.float32), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        out[..., start:stop, :] = scores @ v[..., :stop, :]
        out[..., start:stop, :] /= total
    return out


def best_time(function: Callable[[], Any], repeats: int) -> float:
    """The least of a few times in seconds, after one call to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def check(heads: int, width: int) -> None:
    """Raise unless short attention agrees with its definition, written out, to 1e-5."""
    q, k, v, _ = draw(heads, 500, width)
    unit_q, unit_k = (x / np.linalg.norm(x.astype(float), axis=-1, keepdims=True) for x in (q, k))
    weights = np.tril(1 + unit_q @ unit_k.swapaxes(-1, -2))
    expected = weights @ v / weights.sum(axis=-1, keepdims=True)
    error = np.abs(la.linear_attention(q, k, v, causal=True) - expected).max()
    if not error <= 1e-5 * np.abs(expected).max():
        raise SystemExit(f"wrong result, no speed reported: error {error:.2g}")
    softmax_error = np.abs(masked_softmax(q, k, v) - skipping_softmax(q, k, v)).max()
    if not softmax_error <= 1e-5:
        raise SystemExit(f"the two softmax attentions differ by {softmax_error:.2g}")


def draw(heads: int, n: int, width: int) -> list[Array]:
    """q, k, v and dout, of shape (heads, n, width)."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((heads, n, width), dtype=np.float32) for _ in range(4)]


def measure(
    heads: int = 8, n: int = 16384, width: int = 64, softmax_n: int = 4096, repeats: int = 3
) -> Ratios:
    """Time everything once the results are checked."""
    check(heads, width)
    q, k, v, dout = draw(heads, n, width)
    _, den = la.linear_attention(q, k, v, causal=True, return_normalizer=True)
    forward = best_time(lambda: la.linear_attention(q, k, v, causal=True), repeats)
    backward = best_time(
        lambda: la.linear_attention_vjp(dout, q, k, v, normalizer=den, causal=True), repeats
    )
    twice = draw(heads, 2 * n, width)[:3]
    forward_twice = best_time(lambda: la.linear_attention(*twice, causal=True), repeats)
    short = draw(heads, softmax_n, width)[:3]
    scale = (n / softmax_n) ** 2
    softmax = best_time(lambda: masked_softmax(*short), 2) * scale
    skipping = best_time(lambda: skipping_softmax(*short), 2) * scale
    return Ratios(
        softmax / forward, skipping / forward, forward_twice / forward, backward / forward
    )


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--n", type=int, default=16384)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--softmax-n", type=int, default=4096)
    options = parser.parse_args()
    ratios = measure(options.heads, options.n, options.width, options.softmax_n)
    print(
        f"float32, causal, H={options.heads} N={options.n} D={options.width}, NumPy {np.__version__}"
    )
    print(f"masked softmax attention, scaled to N:            {ratios.softmax:6.1f} x the time")
    print(f"the same, skipping blocks behind the mask:        {ratios.skipping:6.1f} x the time")
    print(f"linear attention at 2 N:                          {ratios.doubling:6.2f} x the time")
    print(f"its backward pass:                                {ratios.backward:6.2f} x the time")


if __name__ == "__main__":
    main()
