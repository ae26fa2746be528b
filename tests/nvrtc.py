"""Compile kernels for any GPU on a machine that has none, and look at what came out.

NVRTC and the disassembler are those of the wheels in the `test` extra, so that what a test finds
does not depend on a CUDA toolkit of the machine.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

from cuda.bindings import nvrtc

from la_cupy import compile as la_compile
from la_cupy.kernels import Spec


class CompileError(Exception):
    """What NVRTC had to say."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one arch, with ptxas's account of it."""

    cubin: bytes
    log: str

    def _numbers(self, pattern: str) -> list[int]:
        found = [int(x) for x in re.findall(pattern, self.log)]
        assert found, f"no {pattern!r} in the log of ptxas: {self.log}"
        return found

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return max(self._numbers(r"Used (\d+) registers"))

    @property
    def spilled(self) -> int:
        """Bytes of registers that are kept in memory for want of room."""
        return sum(self._numbers(r"(\d+) bytes spill (?:stores|loads)"))

    @property
    def notes(self) -> list[str]:
        """What ptxas has to say of wgmma: that it makes products wait for each other."""
        return re.findall(r"C75\d\d\D[^\n]*", self.log)

    @property
    def stack(self) -> int:
        """Bytes of local memory a thread: spills, and arrays that did not become registers."""
        return sum(self._numbers(r"(\d+) bytes stack frame"))

    def instructions(self) -> Counter[str]:
        """How many instructions of each kind ("HMMA", "LDG", ...) the machine code has."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(self.cubin)
            command = [str(_cuobjdump()), "--dump-sass", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        # as in "/*0a30*/   @!P0 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;"
        instruction = r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)"
        return Counter(re.findall(instruction, done.stdout, re.MULTILINE))


def compile_kernel(spec: Spec, arch: str) -> Compiled:
    """`spec` for `arch` ("sm_90a"), as la_cupy.compile has it compiled; CompileError says why not."""
    # -ftz=true is what CuPy adds
    options = [*la_compile.options(), f"-arch={arch}", "-ftz=true", "--ptxas-options=-v"]
    encoded = [option.encode() for option in options]
    source = la_compile.source_text(spec).encode()
    program = _checked(nvrtc.nvrtcCreateProgram(source, b"la_cupy.cu", 0, [], []))
    try:
        _checked(nvrtc.nvrtcAddNameExpression(program, spec.name.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode().rstrip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{spec.name} for {arch}: {text}")
        cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, text)


def _checked(result: tuple) -> object:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC returned {status!r}")
    return values[0] if values else None


@cache
def _cuobjdump() -> Path:
    files = distribution("nvidia-cuda-cuobjdump").files or []
    (found,) = (file for file in files if file.name == "cuobjdump")
    return Path(found.locate())
