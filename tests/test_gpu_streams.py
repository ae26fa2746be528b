"""Streams, threads, graphs and devices: whatever the order of work on the GPU, the same bits."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from typing import Any

import pytest
from cases import BY_NAME, Case, check, make_inputs, reference_results
from gpu_helpers import call, cp, in_moat, on_gpu, same_bits, spin, to_host

import la_cupy as la

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warm_kernels")]

LONG = {"q": (2, 2, 3000, 32), "k": (2, 1, 3000, 32), "v": (2, 1, 3000, 32)}
CASES = [
    Case(f"{dtype}-{causal}", **LONG, dtype=dtype, causal=causal, initial="full", dstate="full")
    for dtype, causal in (("float32", True), ("bfloat16", True), ("bfloat16", False))
]
"""Several launches each: segments and their scan, two passes, sums over grouped heads."""


def both(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=str)


@both(CASES)
def test_side_streams_without_synchronisation(case: Case) -> None:
    """The inputs arrive late, are overwritten as soon as the call is queued, and are freed."""
    sets = [on_gpu(make_inputs(case, seed)) for seed in range(3)]
    expected = [to_host(call(case, x)) for x in sets]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in sets]
    spin(0.1)
    cp.cuda.Device().synchronize()
    results = []
    for repeat in range(50):
        chosen = repeat % 3
        with streams[chosen]:
            spin(0.3)
            x = sets[chosen].map(_copied)
            results.append((chosen, call(case, x)))
            for array in x.arrays():
                array.data.memset_async(0xFF, array.nbytes)
            del x, array
    cp.cuda.Device().synchronize()
    for repeat, (chosen, found) in enumerate(results):
        assert same_bits(expected[chosen], to_host(found)) == [], f"repeat {repeat}"


def _copied(x: Any) -> Any:
    """x in memory of its own, written in stream order."""
    copy = cp.empty(x.shape, x.dtype)
    copy.data.copy_from_device_async(x.data, x.nbytes)
    return copy


@both(CASES)
def test_backward_in_another_thread(case: Case) -> None:
    """As automatic differentiation does: forward here, backward there, one stream, no waiting."""
    x = on_gpu(make_inputs(case))
    expected = to_host(call(case, x))
    stream = cp.cuda.Stream(non_blocking=True)
    options = {**case.options, "initial_state": x.initial_state}
    spin(0.1)
    cp.cuda.Device().synchronize()
    for repeat in range(10):
        found: list[Any] = []
        with stream:
            spin(0.3)
            _, den = la.linear_attention(x.q, x.k, x.v, return_normalizer=True, **options)

        def backward(den: Any = den, found: list[Any] = found) -> None:
            with stream:
                found.append(
                    la.linear_attention_vjp(
                        *(x.dout, x.q, x.k, x.v), normalizer=den, dstate=x.dstate, **options
                    )
                )

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        stream.synchronize()
        assert found, "the thread raised"
        for name, gradient in zip(("dq", "dk", "dv"), found[0], strict=False):
            assert to_host(gradient).tobytes() == expected[name].tobytes(), (name, repeat)


CAPTURED = [
    *CASES,
    replace(BY_NAME["causal-transposed-float32"], name="copied-inputs"),
    replace(BY_NAME["causal-k-v-on-different-axes"], name="summed-gradients"),
]


@both(CAPTURED)
def test_capture_and_replay(case: Case) -> None:
    """Forward and backward in a CUDA graph after one warm-up; the inputs refilled three times."""
    moats = [in_moat(make_inputs(case, seed)) for seed in range(4)]
    expected = [to_host(call(case, moat.inputs)) for moat in moats]
    static, *refills = moats
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    # A pool of its own, as every graph needs: what the graph writes to is nobody else's.
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc), stream:
        call(case, static.inputs)
        stream.begin_capture()
        results = call(case, static.inputs)
        graph = stream.end_capture()
    for refill, wanted in zip(refills, expected[1:], strict=True):
        for target, source in zip(static.parents, refill.parents, strict=True):
            target.data.copy_from_device_async(source.data, source.nbytes, stream)
        graph.launch(stream)
        stream.synchronize()
        assert same_bits(wanted, to_host(results)) == []


UNSYNCHRONISED = [
    BY_NAME[f"causal-{name}"]
    for name in (
        *("float64-state", "float32-state", "bfloat16", "float16", "grouped-bfloat16"),
        *("k-v-on-different-axes", "state-float64", "state-bfloat16", "transposed-float32"),
        *("reversed_last-bfloat16", "q-bfloat16-k-float16", "bfloat16-dout-float32", "N=0-M=9"),
    )
] + [BY_NAME["bfloat16-state"], BY_NAME["grouped-float32"], *CASES]


@both(UNSYNCHRONISED)
def test_no_call_waits_for_the_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is kept busy: every call must be back, and none may have asked to wait."""
    x = on_gpu(make_inputs(case))
    call(case, x)  # warm: kernels, plans and memory
    waits: list[str] = []
    runtime = cp.cuda.runtime
    for name in ("deviceSynchronize", "streamSynchronize", "eventSynchronize", "memcpy"):
        real = getattr(runtime, name)
        monkeypatch.setattr(
            runtime, name, lambda *args, real=real, name=name: (waits.append(name), real(*args))[1]
        )
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        call(case, x)
        spin(0.1)
        stream.synchronize()
        waits.clear()
        spin(50)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, as it misses some: not the only means
            import cupyx

            with cupyx.allow_synchronize(False):
                results = call(case, x)
        is_busy = not stream.done
        assert waits == []
        assert is_busy, "the device was done before the calls were back"
        del results


@pytest.mark.gpu(devices=2)
@both([BY_NAME["causal-float32-state"], BY_NAME["causal-grouped-bfloat16"]])
def test_arrays_on_another_device(case: Case) -> None:
    inputs = make_inputs(case)
    with cp.cuda.Device(1):
        x = on_gpu(inputs)
    with cp.cuda.Device(0):
        results = call(case, x)
        assert cp.cuda.runtime.getDevice() == 0
    assert {array.device.id for array in results.values()} == {1}
    with cp.cuda.Device(1):
        check(case, inputs, to_host(results), reference_results(case, inputs))


@pytest.mark.gpu(devices=2)
@both([BY_NAME["causal-float32"]])
def test_inputs_on_different_devices(case: Case) -> None:
    inputs = make_inputs(case)
    with cp.cuda.Device(1):
        there = on_gpu(inputs)
    with cp.cuda.Device(0):
        here = on_gpu(inputs)
    for mixed in ((here.q, there.k, here.v), (there.q, there.k, here.v)):
        with pytest.raises(ValueError, match=r"device 0.*device 1|device 1.*device 0"):
            la.linear_attention(*mixed)
    with pytest.raises(ValueError, match="device"):
        la.linear_attention_vjp(here.dout, there.q, there.k, there.v)
    with pytest.raises(ValueError, match="device"):
        la.linear_attention(there.q, there.k, there.v, out=here.q)
