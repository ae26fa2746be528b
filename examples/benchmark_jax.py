"""What a call through the JAX adapter costs: host time per call, and GPU time beside the array API.

    python examples/benchmark_jax.py [--out benchmark_jax.json]

Host time is that of a small forward pass, alone in a jit and in a chain of 20 in one jit, with
XLA's command buffers (CUDA graphs) and without, each in a process of its own, since XLA reads its
flags once. "ffi" is the route of the adapter, "callback" the same plan through JAX's
buffer_callback, "jit" a trivial program. Results are checked first; a wrong one gets no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CHAIN, SMALL, LARGE = 20, (1, 128, 64), (8, 16, 4096, 128)
FLAGS = {
    # a chain is recorded from one command on, so that "alone" is measured in a command buffer, too
    "command buffers": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL"
    " --xla_gpu_graph_min_graph_size=1",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
    "XLA's defaults": "",
}


def per_call(function: Callable[[], Any], calls: int, repeats: int = 30) -> float:
    """Microseconds of host time for each of `calls` calls of the operator: the median."""
    import jax

    for _ in range(5):
        jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(10):
            result = function()
        times.append((time.perf_counter() - start) / 10 / calls * 1e6)
        jax.block_until_ready(result)
    return statistics.median(times)


def through_callback(q: Any, k: Any, v: Any) -> Any:
    """The forward pass with the plan of the adapter, through buffer_callback."""
    import jax
    from jax.experimental.buffer_callback import buffer_callback
    from la_cupy.interop import _jax_cuda, _jax_ops

    from la_cupy.problem import make_options

    call = _jax_ops.Call(make_options(causal=True), False, False)
    operands = [(n, str(x.dtype), tuple(x.shape)) for n, x in (("q", q), ("k", k), ("v", v))]
    program = _jax_cuda.Program(call, tuple(operands), _jax_cuda.CUDA.device())
    _jax_cuda.CUDA.load(program)
    text = program.encode().encode()
    buffers = list(program.results.values())
    types = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in buffers]

    def callback(context: Any, made: Any, *given: Any) -> None:
        arrays = (*given, *made)
        addresses = [x.__cuda_array_interface__["data"][0] for x in arrays]
        _jax_cuda._launch(text, 0, context.stream, addresses)

    made = buffer_callback(callback, types, command_buffer_compatible=True)(q, k, v)
    return made[list(program.results).index("out")]


def host_times() -> dict[str, float]:
    """Of this process, with the flags that it was started with."""
    import jax
    import jax.numpy as jnp
    from la_cupy.interop.jax import linear_attention

    from la_cupy import reference

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(x) for x in rng.standard_normal((3, *SMALL), np.float32))
    expected = reference.linear_attention(*map(np.asarray, (q, k, v)), causal=True)[0]

    def ffi(q: Any, k: Any, v: Any) -> Any:
        return linear_attention(q, k, v, causal=True)

    def chain(function: Any) -> Any:
        def program(q: Any, k: Any, v: Any) -> Any:
            for _ in range(CHAIN):  # each needs the one before
                q = function(q, k, v)
            return q

        return jax.jit(program)

    found = {}
    for name, function in (("ffi", ffi), ("callback", through_callback)):
        alone = jax.jit(function)
        error = np.abs(np.asarray(alone(q, k, v)) - expected).max() / np.abs(expected).max()
        if not error <= 1e-5:
            sys.exit(f"{name} is wrong by {error:.2g}: no figures")
        chained = chain(function)
        found[f"{name}, alone"] = per_call(lambda f=alone: f(q, k, v), 1)  # type: ignore[misc]
        found[f"{name}, chain of {CHAIN}"] = per_call(
            lambda f=chained: f(q, k, v),  # type: ignore[misc]
            CHAIN,
        )
    found["ffi, outside jit"] = per_call(lambda: ffi(q, k, v), 1)
    trivial = jax.jit(lambda q: q + 1)
    found["jit, alone"] = per_call(lambda: trivial(q), 1)
    return found


def gpu_times() -> dict[str, float]:
    """Milliseconds of forward + backward at the large shape, bfloat16, causal."""
    import cupy as cp
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    from la_cupy.interop.jax import linear_attention

    import la_cupy as la

    rng = cp.random.default_rng(0)
    arrays = [
        rng.standard_normal(LARGE, dtype=cp.float32).astype(ml_dtypes.bfloat16) for _ in range(4)
    ]

    def array_api() -> Any:
        q, k, v, dout = arrays
        out, den = la.linear_attention(q, k, v, causal=True, return_normalizer=True)
        return out, la.linear_attention_vjp(dout, q, k, v, normalizer=den, causal=True)

    @jax.jit
    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda *x: linear_attention(*x, causal=True), q, k, v)
        return out, pull(dout)

    shared = [jnp.from_dlpack(x) for x in arrays]
    out, grads = array_api()
    out_jax, grads_jax = both(*shared)
    for ours, other in zip((out, *grads[:3]), (out_jax, *grads_jax), strict=True):
        difference = jnp.abs(jnp.from_dlpack(ours).astype(jnp.float32) - other.astype(jnp.float32))
        if not float(difference.max()) <= 1e-2 * float(jnp.abs(other).max()):
            sys.exit("the adapter and the array API differ: no figures")

    def time_of(function: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
        times = []
        for _ in range(12):
            wait(function())
            start = time.perf_counter()
            for _ in range(20):  # queued without waiting: the GPU is never idle
                result = function()
            wait(result)
            times.append((time.perf_counter() - start) / 20 * 1e3)
        return statistics.median(times)

    api = time_of(array_api, lambda _: cp.cuda.Device().synchronize())
    ours = time_of(lambda: both(*shared), jax.block_until_ready)
    return {"array API": api, "JAX": ours, "JAX / array API": ours / api}


def measured(what: str, flags: str) -> dict[str, float]:
    """`what` ("host" or "gpu") in a process of its own, with these flags of XLA."""
    command = [sys.executable, __file__, "--only", what]
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{what} with {flags!r}: failed")
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Host and GPU time of the JAX adapter")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--only", choices=("host", "gpu"), help="measure this here, print JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(host_times() if options.only == "host" else gpu_times()))
        return
    import jax

    if jax.default_backend() != "gpu":
        sys.exit("JAX sees no GPU, and there is nothing to measure without one")
    import cupy as cp

    properties = cp.cuda.runtime.getDeviceProperties(0)
    print(f"{properties['name'].decode()}, CUDA {cp.cuda.runtime.runtimeGetVersion()}")
    print(f"JAX {jax.__version__}, CuPy {cp.__version__}, NumPy {np.__version__}")
    report: dict[str, Any] = {"jax": jax.__version__, "host us per call": {}}
    for name, flags in FLAGS.items():
        report["host us per call"][name] = measured("host", flags)
        print(f"\nhost time per call, {name}")
        for case, value in report["host us per call"][name].items():
            print(f"  {case:24} {value:8.1f} us")
    report["gpu ms"] = measured("gpu", "")
    print(f"\nforward + backward, B, H, N, D = {LARGE}, bfloat16, causal")
    for case, value in report["gpu ms"].items():
        print(f"  {case:24} {value:8.3f}{'' if '/' in case else ' ms'}")
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
