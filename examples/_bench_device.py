"""Where the work runs: clocks, the copy bandwidth, and the memory a call takes, on GPU or CPU."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

Call = Callable[[int], object]  # runs the work on input set number i and returns its results


class Timing(NamedTuple):
    """Medians: the time on the device, and what the host spends to ask for it."""

    ms: float
    host_us: float


class Device(Protocol):
    """What the benchmark needs to know of a device."""

    @property
    def xp(self) -> Any: ...  # the array library: numpy or cupy
    @property
    def l2_bytes(self) -> int: ...
    def facts(self) -> dict[str, Any]: ...
    def copy_bandwidth(self) -> float: ...
    def measure(self, call: Call, sets: int, repeats: int) -> Timing: ...
    def peak_extra_bytes(self, call: Callable[[], object], own_bytes: int) -> int: ...


class Marks(Protocol):
    """The events and the spin that EventClock works with; CUDA's, or a simulation in the tests."""

    def spin(self, seconds: float) -> None: ...
    def record(self) -> Any: ...
    def reached(self, event: Any) -> bool: ...
    def milliseconds(self, start: Any, stop: Any) -> float: ...
    def synchronize(self) -> None: ...


@dataclass
class EventClock:
    """Times calls between two events each, with the host kept ahead of the device.

    A batch is queued behind a kernel that only spins. If the spin is over before the whole batch
    is queued, the device may have waited for the host inside an interval: the batch is thrown
    away and queued again behind a longer spin.
    """

    marks: Marks
    batch: int = 10
    longest_spin: float = 4.0
    host_clock: Callable[[], float] = time.perf_counter

    def measure(self, call: Call, sets: int, repeats: int) -> Timing:
        # Results live until their set comes round again, so that outputs rotate as inputs do.
        held: deque[object] = deque(maxlen=sets)
        for i in range(sets + 3):
            held.append(call(i % sets))
        self.marks.synchronize()
        spin = 2e-3
        device_ms: list[float] = []
        host_s: list[float] = []
        while len(device_ms) < repeats:
            self.marks.spin(spin)
            spun = self.marks.record()
            events, calls_s = [], []
            for i in range(self.batch):
                start = self.marks.record()
                asked = self.host_clock()
                held.append(call((len(device_ms) + i) % sets))
                calls_s.append(self.host_clock() - asked)
                events.append((start, self.marks.record()))
            ahead = not self.marks.reached(spun)
            self.marks.synchronize()
            if ahead:
                device_ms += [self.marks.milliseconds(*pair) for pair in events]
                host_s += calls_s
            elif spin < self.longest_spin:
                spin *= 2
            else:
                raise RuntimeError(
                    f"the host needs over {spin:.0f} s to queue {self.batch} calls, "
                    "so device times would include waits for the host: is a call synchronous?"
                )
        return Timing(statistics.median(device_ms), 1e6 * statistics.median(host_s))


class GpuDevice:
    """The current CUDA device, through CuPy, on the default stream (which torch uses as well)."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self.id = cupy.cuda.Device().id
        self.properties = cupy.cuda.runtime.getDeviceProperties(self.id)
        self.l2_bytes = int(self.properties["l2CacheSize"])
        self.clock = EventClock(CudaMarks(cupy))

    def facts(self) -> dict[str, Any]:
        runtime = self.xp.cuda.runtime
        return {
            "gpu": self.properties["name"].decode(),
            "driver": _driver_release(),
            "driver_cuda": runtime.driverGetVersion(),
            "cuda": runtime.runtimeGetVersion(),
            "l2_bytes": self.l2_bytes,
        }

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second by a device-to-device copy of 2 GiB."""
        source = self.xp.zeros(2**31, np.uint8)
        target = self.xp.empty_like(source)
        copied: Call = lambda _: target.data.copy_from_device_async(source.data, source.nbytes)
        return 2e3 * 2**31 / self.clock.measure(copied, 1, 20).ms

    def measure(self, call: Call, sets: int, repeats: int) -> Timing:
        return self.clock.measure(call, sets, repeats)

    def peak_extra_bytes(self, call: Callable[[], object], own_bytes: int) -> int:
        """Most device memory in use during `call` beyond the `own_bytes` the caller holds.

        Counts every block of CuPy's pool, those kept from earlier calls too.
        """
        held = self.xp.get_default_memory_pool().used_bytes() - own_bytes
        with _counting_hook(self.xp) as counter:
            result = call()
            self.xp.cuda.Device().synchronize()
            del result
        return int(held + counter.peak)


class CudaMarks:
    """CUDA events on the current stream of CuPy."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.kernel = cupy.RawKernel(
            'extern "C" __global__ void spin(long long clocks) {'
            " long long start = clock64(); while (clock64() - start < clocks) {} }",
            "spin",
        )

    def spin(self, seconds: float) -> None:
        # 2 GHz is above the clock of every GPU so far: the spin lasts at least this long.
        self.kernel((1,), (1,), (np.int64(seconds * 2e9),))

    def record(self) -> Any:
        event = self.cupy.cuda.Event()
        event.record()
        return event

    def reached(self, event: Any) -> bool:
        return bool(event.done)

    def milliseconds(self, start: Any, stop: Any) -> float:
        return float(self.cupy.cuda.get_elapsed_time(start, stop))

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()


def _counting_hook(cupy: Any) -> Any:
    """A CuPy memory hook that follows how many bytes are live, and the most that were."""

    class Counter(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "la_cupy benchmark"
        live = 0
        peak = 0

        def malloc_postprocess(self, **event: Any) -> None:
            self.live += event["mem_size"]
            self.peak = max(self.peak, self.live)

        def free_postprocess(self, **event: Any) -> None:
            self.live -= event["mem_size"]

    return Counter()


def _driver_release() -> str:
    """The kernel driver's release, as 580.159.04; "unknown" where the machine does not tell."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            words = file.readline().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


class CpuDevice:
    """NumPy on this machine's processor; the host is the device."""

    xp = np

    def __init__(self, copy_bytes: int = 2**27) -> None:
        self.l2_bytes = 0
        self.copy_bytes = copy_bytes

    def facts(self) -> dict[str, Any]:
        return {"cpu": _cpu_name()}

    def copy_bandwidth(self) -> float:
        source = np.zeros(self.copy_bytes, np.uint8)
        target = np.empty_like(source)
        timing = self.measure(lambda _: np.copyto(target, source), 1, 10)
        return 2e3 * self.copy_bytes / timing.ms

    def measure(self, call: Call, sets: int, repeats: int) -> Timing:
        for i in range(sets + 1):  # memory that is touched for the first time is slow
            call(i % sets)
        times = []
        for i in range(repeats):
            start = time.perf_counter()
            call(i % sets)
            times.append(time.perf_counter() - start)
        median = statistics.median(times)
        return Timing(1e3 * median, 1e6 * median)

    def peak_extra_bytes(self, call: Callable[[], object], own_bytes: int) -> int:
        """Most memory that Python and NumPy allocated during `call`."""
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "unknown"
