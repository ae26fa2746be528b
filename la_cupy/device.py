"""What the plan needs to know about a GPU."""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU, as far as plans depend on it."""

    name: str
    arch: int  # compute capability, 90 for 9.0
    multiprocessors: int
    shared_per_block: int  # bytes of shared memory a block can opt in to
    shared_per_multiprocessor: int


@lru_cache(maxsize=64)
def device_info(index: int) -> DeviceInfo:
    """The DeviceInfo of CUDA device `index`; needs CuPy and the device."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(index)
    return DeviceInfo(
        name=properties["name"].decode(),
        arch=10 * properties["major"] + properties["minor"],
        multiprocessors=properties["multiProcessorCount"],
        shared_per_block=properties["sharedMemPerBlockOptin"],
        shared_per_multiprocessor=properties["sharedMemPerMultiprocessor"],
    )
