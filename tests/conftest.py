"""What every test shares: the GPU marker, the worker count, and the hypothesis profiles."""

from __future__ import annotations

import functools
import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

# One BLAS thread a worker: with -n auto there is a worker for each core already.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# JAX takes three quarters of a GPU's memory at its first call unless told not to; CuPy and torch
# share the card with it here.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Eight devices on the CPU, for what JAX spreads over several; set before JAX starts.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

settings.register_profile(
    "ci",
    deadline=None,  # two busy cores: a slow example is no failure
    derandomize=True,  # a change is judged by the same examples before and after
    max_examples=60,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@functools.cache
def gpu_count() -> tuple[int, str]:
    """How many CUDA devices CuPy can use, and where it is none the reason why."""
    if importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return 0, f"CuPy finds no CUDA device ({error})"
    return count, "CuPy finds no CUDA device" if count == 0 else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-pool",
        action="store_true",
        help="switch CuPy's memory pool off, so that compute-sanitizer sees every over-run",
    )
    parser.addoption(
        "--racecheck",
        action="store_true",
        help="compile kernels so that racecheck follows their barriers; see kernels_cu/ptx/thread.cuh",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-pool"):
        import cupy

        cupy.cuda.set_allocator(None)
    if config.getoption("--racecheck"):
        from la_cupy import compile

        own = compile.options
        compile.options = lambda: (*own(), "-DLA_RACECHECK", "-lineinfo")


def pytest_xdist_auto_num_workers() -> int | None:
    """One process where there is a GPU: tests there measure the memory and time of the device.

    None leaves the count to pytest-xdist, which takes one worker for each core.
    """
    return 0 if gpu_count()[0] else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            wanted = marker.kwargs.get("devices", 1)
            found, why_none = gpu_count()
            if found < wanted:
                reason = why_none or f"needs {wanted} CUDA devices, and there is {found}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def warm_kernels(request: pytest.FixtureRequest) -> None:
    """Compiles, side by side, the kernels of every GPU test that was collected with a `case`."""
    import gpu_helpers

    items = [item for item in request.session.items if item.get_closest_marker("gpu")]
    params = [
        item.callspec.params
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    gpu_helpers.compile_for(dict.fromkeys(p["case"] for p in params if "case" in p))
