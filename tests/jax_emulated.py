"""The JAX adapter's GPU path on the CPU: the same handler, the kernels executed by the emulation.

Inside `emulated()` programs that are lowered for the CPU get the custom call that they would get
on an H200. Only what starts the kernels differs, and that nothing is on a stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from emulation import runner
from emulation.backend import H200, filled
from la_cupy.interop import _jax_cuda, _jax_ffi, _jax_lowering
from la_cupy.interop._jax_cuda import Program, Route

from la_cupy.records import Launch, suited

TARGET = "la_cupy_emulated"
launched: list[Program] = []
"""Every custom call that ran."""


_one_at_a_time = threading.Lock()  # the emulated machine is one; XLA's devices are threads


def _launch(text: bytes, device: int, stream: int, addresses: list[int]) -> None:
    program = Program.decode(text)
    launched.append(program)
    named = dict(zip(program.names, addresses, strict=True))
    plan = program.plan
    for name, buffer in program.results.items():  # XLA's memory holds anything at first
        size = int(np.prod(buffer.shape)) * np.dtype(buffer.dtype).itemsize
        if size:
            ctypes.memset(named[name], 0xFF, size)
    launches = [x for launch in plan.launches for x in suited(launch, named)]
    names = list(dict.fromkeys(launch.spec.name for launch in launches))
    sources = list(dict.fromkeys(launch.spec.source for launch in launches))
    library = runner.build(names, includes=sources) if names else None
    with _one_at_a_time:
        _run(launches, library, named)


def _run(launches: list[Launch], library: Any, named: dict[str, int]) -> None:
    for launch in launches:
        record = filled(launch, named)
        spec = launch.spec
        library.launch(
            spec.name, launch.grid, spec.threads, spec.shared_bytes, record, order="forward"
        )


ROUTE = Route(TARGET, lambda: H200, lambda program: None)
_jax_ffi.register(TARGET, "cpu", _launch, capturable=False)


@contextmanager
def emulated() -> Iterator[list[Program]]:
    """Lowers for the emulation; gives the list of the calls that ran inside."""
    assert _jax_cuda.CUDA.target != TARGET
    _jax_lowering.ROUTES["cpu"] = ROUTE
    jax.clear_caches()  # also of what has been lowered otherwise
    launched.clear()
    try:
        yield launched
    finally:
        del _jax_lowering.ROUTES["cpu"]
        jax.clear_caches()
