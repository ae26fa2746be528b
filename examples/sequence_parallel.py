"""A sequence over several devices: time and memory of value and gradient, on one device and on all.

    python examples/sequence_parallel.py [--rows 1048576 2097152] [--heads 16] [--width 128]

Each device holds a piece of the rows of q, k and v; what they exchange is a state each. With no GPU
eight devices of the CPU are made up, and sizes are small.
Over several hosts: jax.distributed.initialize() first, the same program on each host.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # one device may need it all

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from la_cupy.interop.jax import linear_attention

Array = Any


def gradient(mesh: Any) -> Any:
    """dq, dk, dv of a causal sequence whose rows lie along the mesh's axis "seq"."""
    rows = P(None, "seq")
    attention = jax.shard_map(
        partial(linear_attention, causal=True, axis_name="seq"),
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
    )

    def pull(q: Array, k: Array, v: Array, dout: Array) -> Any:
        return jax.vjp(attention, q, k, v)[1](dout)

    return jax.jit(pull)


def inputs(mesh: Any, heads: int, rows: int, width: int, dtype: Any) -> list[Array]:
    """q, k, v, dout, each made where it lies."""
    sharding = NamedSharding(mesh, P(None, "seq"))
    make = jax.jit(
        lambda key: jax.random.normal(key, (heads, rows, width), dtype), out_shardings=sharding
    )
    return [make(jax.random.key(seed)) for seed in range(4)]


def check(devices: list[Any], width: int) -> None:
    """On all devices as on one, or SystemExit."""
    results = []
    for some in (devices[:1], devices):
        mesh = jax.make_mesh((len(some),), ("seq",), devices=some)
        x = inputs(mesh, 2, 60 * len(devices), width, jnp.float32)
        results.append([np.asarray(g, np.float64) for g in gradient(mesh)(*x)])
    for one, all_ in zip(*results, strict=True):
        error = np.abs(one - all_).max() / np.abs(one).max()
        if not error <= 1e-5:
            raise SystemExit(f"WRONG: gradients on {len(devices)} devices differ by {error:.1e}")


def measure(devices: list[Any], heads: int, rows: int, width: int) -> tuple[float, float]:
    """Median milliseconds of a call, and GiB that it takes of a device."""
    mesh = jax.make_mesh((len(devices),), ("seq",), devices=devices)
    x = inputs(mesh, heads, rows, width, jnp.bfloat16)
    function = gradient(mesh).lower(*x).compile()
    plan = function.memory_analysis()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(function(*x))
        times.append((time.perf_counter() - start) * 1e3)
    size = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return statistics.median(times), size / 2**30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", help="lengths of the whole sequence")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--width", type=int)
    options = parser.parse_args(arguments)
    devices = jax.devices()
    small = devices[0].platform == "cpu"
    lengths = options.rows or ([4096] if small else [2**20, 2**21])
    heads = options.heads or (2 if small else 16)
    width = options.width or (16 if small else 128)
    for length in lengths:
        if length % len(devices):
            parser.error(f"--rows {length} is no multiple of the {len(devices)} devices")
    check(devices, width)
    print(f"{devices[0].device_kind}, {heads} heads, D = {width}, bfloat16, value and gradient")
    print("| rows | devices | ms | GiB a device |\n|---|---|---|---|")
    for length in lengths:
        for some in (devices[:1], devices):
            try:
                milliseconds, size = measure(some, heads, length, width)
                found = f"{milliseconds:.1f} | {size:.2f}"
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                found = "does not fit | "
            print(f"| {length} | {len(some)} | {found} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
