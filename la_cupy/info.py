"""What `python -m la_cupy` says: versions, devices, and which kernels are compiled already."""

import importlib.util
import os
import platform
from pathlib import Path

import ml_dtypes
import numpy as np

from . import __version__, compile, warm
from .device import DeviceInfo, device_info


def devices() -> tuple[list[DeviceInfo], str]:
    """The GPUs that CuPy can use; where there is none, a sentence that says why."""
    if importlib.util.find_spec("cupy") is None:
        return [], "CuPy is not installed: pip install 'la_cupy[cuda13]' (or cuda12) for GPU arrays"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return [], f"CuPy finds no CUDA device: {error}"
    if count == 0:
        return [], "CuPy finds no CUDA device"
    return [device_info(index) for index in range(count)], ""


def cache_folder() -> Path:
    """Where CuPy keeps compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()


def report() -> list[str]:
    """The lines that `python -m la_cupy` prints."""
    found, why_none = devices()
    lines = [
        f"la_cupy {__version__} in {Path(__file__).parent}",
        _python_versions(),
    ]
    if importlib.util.find_spec("cupy") is not None:
        lines.append(_cuda_versions())
    lines += [why_none] if why_none else []
    for index, device in enumerate(found):
        lines.append(
            f"device {index}: {device.name}, sm_{device.arch}, {device.multiprocessors} "
            f"multiprocessors, {device.shared_per_block // 1024} KiB of shared memory a block"
        )
    lines.append(f"kernel sources {compile.tree_hash()[:16]} in {compile.source_folder()}")
    if found:
        lines += _cached(found)
    return lines


def _python_versions() -> str:
    python, numpy, types = platform.python_version(), np.__version__, ml_dtypes.__version__
    return f"Python {python}, NumPy {numpy}, ml_dtypes {types}"


def _cuda_versions() -> str:
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    runtime = _version(cupy.cuda.runtime.runtimeGetVersion())
    driver = _version(cupy.cuda.runtime.driverGetVersion())
    compiler = ".".join(map(str, nvrtc.getVersion()))
    return f"CuPy {cupy.__version__}, CUDA runtime {runtime}, driver {driver}, NVRTC {compiler}"


def _version(number: int) -> str:
    """
    >>> _version(13020), _version(0)
    ('13.2', 'none')
    """
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def _cached(found: list[DeviceInfo]) -> list[str]:
    folder = cache_folder()
    writable = "" if os.access(folder, os.W_OK) else " (not writable)"
    lines = [f"compiled kernels in {folder}{writable}"]
    # GPUs of one kind share what is compiled.
    for device in dict.fromkeys(found):
        index = found.index(device)
        for choice, specs in warm.choices(device).items():
            known = [compile.is_cached(spec, index) for spec in specs]
            text = (
                "CuPy does not say which are there"
                if None in known
                else f"{sum(map(bool, known))} of {len(specs)}"
            )
            lines.append(f"  sm_{device.arch}, {choice}: {text}")
    return [*lines, "python -m la_cupy compile makes those that are missing"]
