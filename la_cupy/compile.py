"""KernelSpec -> loaded kernel: NVRTC through cupy.RawModule, with CuPy's cache on disk.

CuPy keys its cache by source, options, compiler and arch, but not by what the source
includes; so a hash of the whole kernels_cu tree stands in the source, and an edit anywhere
in it compiles anew.
"""

import hashlib
import threading
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from .kernels import Spec



@lru_cache(maxsize=1)
def source_folder() -> Path:
    """Where the .cu files are."""
    return Path(str(files("la_cupy.kernels_cu")))


@lru_cache(maxsize=1)
def tree_hash() -> str:
    """A hash of every kernel source, names and contents."""
    digest = hashlib.sha256()
    for path in sorted(source_folder().rglob("*.cu*")):
        digest.update(path.relative_to(source_folder()).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def source_text(spec: Spec) -> str:
    """The translation unit of one specialisation."""
    return f'// {tree_hash()}\n#include "{spec.source}"\n'


def options() -> tuple[str, ...]:
    """What NVRTC is told besides the arch, which CuPy adds."""
    return ("-std=c++17", f"-I{source_folder()}")


_lock = threading.Lock()
_kernels: dict[tuple[Spec, int], Any] = {}


def kernel(spec: Spec, device: int) -> Any:
    """The loaded kernel on CUDA device `device`, compiled if it is in no cache.

    One object for each (spec, device): CuPy's get_function makes a new one at every call.
    """
    found = _kernels.get((spec, device))
    if found is None:
        with _lock:
            found = _kernels.get((spec, device))
            if found is None:
                found = _kernels[spec, device] = _load(spec, device)
    return found


def _load(spec: Spec, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        module = cupy.RawModule(
            code=source_text(spec), options=options(), name_expressions=(spec.name,)
        )
        function = module.get_function(spec.name)
        if spec.shared_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = spec.shared_bytes
    return function
