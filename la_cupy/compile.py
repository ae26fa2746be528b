"""KernelSpec -> loaded kernel: NVRTC through cupy.RawModule, with CuPy's cache on disk.

CuPy keys its cache by source, options, compiler and arch, but not by what the source
includes; so a hash of the whole kernels_cu tree stands in the source, and an edit anywhere
in it compiles anew.
"""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
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
    """What NVRTC is told besides the arch."""
    return ("-std=c++17", f"-I{source_folder()}")


_kernels: dict[tuple[Spec, int], Any] = {}
_locks: dict[tuple[Spec, int], threading.Lock] = {}


def kernel(spec: Spec, device: int) -> Any:
    """The loaded kernel on CUDA device `device`, compiled if it is in no cache.

    One object for each (spec, device): CuPy's get_function makes a new one at every call.
    """
    key = spec, device
    found = _kernels.get(key)
    if found is None:
        # A lock for each kernel: different ones compile at the same time, in their threads.
        with _locks.setdefault(key, threading.Lock()):
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _load(spec, device)
    return found


def load_each(specs: Iterable[Spec], device: int, workers: int | None = None) -> Iterator[Spec]:
    """Load several kernels at once; yields each as it is ready.

    Compiling takes a second or two each, on a core each: it is done in threads.
    """
    distinct = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        waiting = {pool.submit(kernel, spec, device): spec for spec in distinct}
        try:
            for done in as_completed(waiting):
                done.result()
                yield waiting[done]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def load_all(specs: Iterable[Spec], device: int) -> None:
    """Load those of the kernels that are not yet loaded; a single one needs no threads."""
    missing = [spec for spec in dict.fromkeys(specs) if (spec, device) not in _kernels]
    if len(missing) > 1:
        for _ in load_each(missing, device):
            pass


def _load(spec: Spec, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        try:
            function = _function(spec)
        except OSError:  # CuPy could not write its cache: a home directory that is read-only
            with _cache_in_memory():
                function = _function(spec)
        if spec.shared_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = spec.shared_bytes
    return function


def _function(spec: Spec) -> Any:
    import cupy

    # Behind the arch of the device, which CuPy adds, ours counts: sm_90 has wgmma as sm_90a only.
    arch = (f"-arch={spec.target}",) if spec.target else ()
    module = cupy.RawModule(
        code=source_text(spec), options=(*options(), *arch), name_expressions=(spec.name,)
    )
    return module.get_function(spec.name)


_environment = threading.Lock()


@contextmanager
def _cache_in_memory() -> Iterator[None]:
    """CuPy reads and writes no cache on disk."""
    name = "CUPY_CACHE_IN_MEMORY"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


class _LookedForError(Exception):
    """The name under which CuPy looked for a kernel."""


class _Probe:
    """Stands in for CuPy's cache on disk, to learn under which name a kernel is looked for."""

    def load(self, name: str) -> bytes | None:
        raise _LookedForError(name)


def is_cached(spec: Spec, device: int) -> bool | None:
    """Whether the kernel is loaded or in CuPy's cache on disk; None where CuPy does not say.

    Only CuPy knows the name of its file. Not for use beside threads that compile.
    """
    if (spec, device) in _kernels:
        return True
    import cupy
    from cupy.cuda import compiler

    cache = getattr(compiler, "_kernel_cache_backend", None)
    if cache is None or os.environ.get("CUPY_CACHE_IN_MEMORY", "0") != "0":
        return None
    compiler._kernel_cache_backend = _Probe()
    try:
        with cupy.cuda.Device(device):
            _function(spec)
    except _LookedForError as name:
        return cache.load(*name.args) is not None
    finally:
        compiler._kernel_cache_backend = cache
    return True  # CuPy had the module loaded
