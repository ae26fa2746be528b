"""Compile kernels with g++ against the emulated ptx wrappers, and launch them.

    library = build(["sweep<Config<bf16, 64>>"], includes=["forward.cu"])
    library.launch(0, grid=8, threads=128, shared_bytes=49152, params=bytes(params))

Pointers in `params` are host addresses (`array.ctypes.data`); the arrays must outlive the launch.
Threads of a block run one after the other in a fixed order, so a result is the same in every run; a
launch with `order="reverse"` runs them the other way round, and differs where a barrier is missing.
What runs beside the threads (products of wgmma, copies of boxes) ends as late as it may in both, and
as early with `order="early"`, where threads run as in "forward".
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels_cu"

# What else the kernels would do on a GPU, or must not do there, as options of g++:
FLAGS = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    # -O2 runs a matrix kernel 1.2 times as fast and compiles a sweep in 1.4 times the time: the
    # machine's inner loops, where the time goes, are optimised fully in any case.
    "-O1",
    "-g1",  # line numbers, to name the place of a trap
    # Registers that were not written read as -1.7e38, not as what a fiber's stack happens to hold.
    "-ftrivial-auto-var-init=pattern",
    # Misaligned pointers and indices out of bounds end the launch (machine/traps.hpp).
    "-fsanitize=alignment,bounds,shift,integer-divide-by-zero,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
    # Each library keeps its machine and its templates to itself.
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    # Fibers jump where the hardened ways of calling and returning do not expect it.
    "-fcf-protection=none",
    "-Wall",
    "-Wextra",
    "-Werror=return-type",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",  # about passing vectors between compilers; there is only one here
)

ORDERS = ("forward", "reverse", "early")

_PROT_NONE = 0  # of <sys/mman.h>; the mmap module leaves it out

# One launch at a time: the signal handlers that turn a trap into a message are the whole process's.
_launching = threading.Lock()


class Library:
    """Kernels of one `build`, by index or by name expression."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self.names = tuple(names)
        self._dll = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self._dll.la_emulation_run.argtypes = [
            ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t,
            ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
        ]  # fmt: skip
        self._dll.la_emulation_run.restype = ctypes.c_int
        self._dll.la_emulation_message.restype = ctypes.c_char_p
        self._dll.la_emulation_fault.restype = ctypes.c_size_t

    def launch(
        self,
        kernel: int | str,
        grid: int,
        threads: int,
        shared_bytes: int,
        params: bytes,
        *,
        order: Literal["forward", "reverse", "early"] = "forward",
    ) -> None:
        """Run `grid` blocks of `threads`; a RuntimeError says what a kernel did wrong."""
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}, allowed: {', '.join(map(repr, ORDERS))}")
        index = (
            self.names.index(kernel) if isinstance(kernel, str) else range(len(self.names))[kernel]
        )
        with _launching:
            failed = self._dll.la_emulation_run(
                index, params, len(params), grid, threads, shared_bytes, ORDERS.index(order)
            )
            message = self._dll.la_emulation_message().decode() if failed else ""
            offset = self._dll.la_emulation_fault() if failed else 0
        if failed:
            place = _source_lines(self.path, offset)
            raise RuntimeError(f"{self.names[index]}: {message}{place and f' ({place})'}")


def build(
    names: Sequence[str],
    includes: Sequence[str | Path] = (),
    extra_sources: Sequence[str] = (),
    *,
    replace: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    flags: Sequence[str] = (),
) -> Library:
    """A library of the kernels `names`: C++ name expressions, seen from namespace la.

    `includes` are files of kernels_cu ("forward.cu") or absolute paths, `extra_sources` C++ text
    behind them. `replace` maps a file of kernels_cu to (old, new) texts, to see what a mutation
    does; a text that does not occur is a ValueError. `flags` go behind the usual ones. The result
    is cached by content. Threads may build at the same time.
    """
    names = list(names)
    tree = _source_tree(replace or {})
    for number, path in enumerate(includes):
        if Path(path).is_absolute():  # staged as well, so that its text counts for the cache
            tree[f"unit/{number}/{Path(path).name}"] = Path(path).read_text()
    tree["unit/unit.cpp"] = _unit(names, includes, extra_sources)
    options = [*FLAGS, *_machine_flags(), *flags]
    key = hashlib.sha256(repr((sorted(tree.items()), options, _compiler())).encode()).hexdigest()
    target = _cache_directory() / f"{key[:32]}.so"
    if not target.exists():
        _compile(tree, options, target)
    return Library(target, names)


def fenced(array: NDArray[Any], side: Literal["before", "behind"] = "behind") -> NDArray[Any]:
    """A C-contiguous copy that ends (or begins) where accessible memory does: to go on is a fault.

    It starts at a multiple of 16 bytes, as device memory does and packets must, so up to 15 bytes
    behind it are still accessible. They are 0xff, which reads as NaN.
    """
    page = mmap.PAGESIZE
    room = -(-array.nbytes // 16) * 16
    pages = -(-room // page) * page
    memory = mmap.mmap(-1, pages + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[page : page + pages] = b"\xff" * pages
    start = page if side == "before" else page + pages - room
    whole = np.frombuffer(memory, np.uint8)  # keeps the mapping alive
    base = whole.ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (base, base + page + pages):
        if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    copy = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _source_tree(replace: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, str]:
    """All sources, {path from the staging directory: text}, mutated as `replace` says.

    kernels_cu/ptx stays out: a quoted include looks beside the including file before it looks into
    the include path, and would find the real wrappers there.
    """
    tree = {}
    for path in sorted([*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")]):
        relative = path.relative_to(KERNELS)
        if relative.parts[0] != "ptx":
            tree[f"kernels_cu/{relative.as_posix()}"] = path.read_text()
    for path in sorted([*HERE.glob("ptx/*.cuh"), *HERE.glob("machine/*.hpp")]):
        tree[f"emulation/{path.relative_to(HERE).as_posix()}"] = path.read_text()
    for file, changes in replace.items():
        name = f"kernels_cu/{file}"
        if name not in tree:
            raise ValueError(
                f"replace names {file!r}, which is not a file of kernels_cu outside ptx/"
            )
        for old, new in changes:
            if old not in tree[name]:
                raise ValueError(f"replace: {old!r} does not occur in {file}")
            tree[name] = tree[name].replace(old, new)
    return tree


def _unit(
    names: Sequence[str], includes: Sequence[str | Path], extra_sources: Sequence[str]
) -> str:
    """The translation unit: the sources, a table of the kernels, and the functions Python calls."""
    lines = ['#include "machine/launch.hpp"', '#include "ptx/all.cuh"']
    for number, path in enumerate(includes):
        inner = f"{number}/{Path(path).name}" if Path(path).is_absolute() else str(path)
        lines.append(f'#include "{inner}"')
    lines += extra_sources
    entries = ",\n".join(f"  {{&Entry<&{n}>::call, Entry<&{n}>::params_bytes}}" for n in names)
    # The table stands in a namespace of its own, where the using-directive reaches the kernels'
    # names and does not change what the sources mean.
    lines.append(f"""
namespace la {{}}
namespace la_emulation_unit {{
using namespace la;
using emulation::Entry;
static const emulation::Kernel kernels[] = {{
{entries}
}};
}}

#define LA_EXPORT extern "C" __attribute__((visibility("default")))
LA_EXPORT int la_emulation_run(int index, const void* params, std::size_t bytes, int grid,
                               int threads, int shared_bytes, int order) {{
  const emulation::Kernel& kernel = la_emulation_unit::kernels[index];
  return !emulation::launch(kernel, params, bytes, grid, threads, shared_bytes, order == 1,
                            order == 2);
}}
LA_EXPORT const char* la_emulation_message() {{ return emulation::machine.message; }}
LA_EXPORT std::size_t la_emulation_fault() {{ return emulation::fault_offset(); }}
""")
    return "\n".join(lines)


def _compile(tree: Mapping[str, str], options: Sequence[str], target: Path) -> None:
    """Compile the staged tree into `target`.

    The compiler runs inside the staging directory, so that its messages name the files as the
    repository does.
    """
    stage = Path(tempfile.mkdtemp(prefix="stage-", dir=target.parent))
    try:
        for name, text in tree.items():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).write_text(text)
        command = ["g++", "-Iemulation", "-Ikernels_cu", *options, f"-fdebug-prefix-map={stage}=."]
        command += ["unit/unit.cpp", "-o", "unit.so", "-ldl"]
        done = subprocess.run(command, cwd=stage, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        # Another process may build the same: a rename replaces the whole file or nothing.
        os.replace(stage / "unit.so", target)
    finally:
        shutil.rmtree(stage)


def _source_lines(library: Path, offset: int) -> str:
    """Where in the kernel an instruction stands: its line, and those it is inlined into."""
    if offset == 0 or shutil.which("addr2line") is None:
        return ""
    command = ["addr2line", "-i", "-e", str(library), hex(offset)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.removeprefix("./") for line in done.stdout.splitlines()]
    return " in ".join(line for line in lines if not line.startswith(("emulation/", "?")))


@cache
def _compiler() -> str:
    done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


@cache
def _machine_flags() -> tuple[str, ...]:
    """Vectors of 8 floats, for the emulated mma, where the processor has them."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return ()
    found = set(cpuinfo.read_text().split())
    return ("-mavx2", "-mfma", "-mf16c") if {"avx2", "fma", "f16c"} <= found else ()


def _cache_directory() -> Path:
    given = os.environ.get("LA_CUPY_EMULATION_CACHE")
    path = Path(given or Path(tempfile.gettempdir()) / f"la_cupy-emulation-{os.getuid()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():  # libraries are loaded from here: they must be ours
        raise RuntimeError(f"{path} belongs to another user; set LA_CUPY_EMULATION_CACHE")
    return path
