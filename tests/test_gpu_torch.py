"""The PyTorch adapter on a GPU: streams, threads, graphs, devices, memory and time."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from cases import BY_NAME, Case, check, make_inputs, reference_results
from gpu_helpers import cp, same_bits

torch = pytest.importorskip("torch")
from la_cupy.interop import from_dlpack
from la_cupy.interop.torch import linear_attention, scaled_dot_product_attention
from torch_helpers import VIEWS, Tensors, buffer_bytes, call, to_host, tracked

import la_cupy as la

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warm_kernels")]

LONG = {"q": (2, 2, 3000, 32), "k": (2, 1, 3000, 32), "v": (2, 1, 3000, 32)}
CASES = [
    Case(
        f"torch-{dtype}-{causal}", **LONG, dtype=dtype, causal=causal, initial="full", dstate="full"
    )
    for dtype, causal in (("float32", True), ("bfloat16", True), ("bfloat16", False))
]
COPIED = BY_NAME["causal-transposed-float32"]
SUMMED = BY_NAME["causal-k-v-on-different-axes"]


def both(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=str)


def random(*shape: int, dtype: Any = torch.bfloat16, seed: int = 0, device: str = "cuda") -> Any:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def busy(milliseconds: float = 0.3) -> None:
    """Keep torch's current stream busy for about this long."""
    torch.cuda._sleep(int(milliseconds * 2e6))


# --- streams and threads -------------------------------------------------------------------------


@both(CASES)
def test_side_streams_without_synchronisation(case: Case) -> None:
    """Forward here, backward in autograd's thread, on the side stream; inputs arrive late and are
    overwritten as soon as the call is queued."""
    sets = [Tensors(case, make_inputs(case, seed), "cuda").inputs for seed in range(3)]
    expected = [call(case, x) for x in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    results = []
    for repeat in range(50):
        chosen = repeat % 3
        with torch.cuda.stream(streams[chosen]):
            busy()
            x = sets[chosen].map(torch.clone)
            results.append((chosen, on_device(case, x)))
            for tensor in x.arrays():
                tensor.detach().fill_(float("nan"))
            del x, tensor
    torch.cuda.synchronize()
    for repeat, (chosen, found) in enumerate(results):
        assert same_bits(expected[chosen], to_host(found)) == [], f"repeat {repeat}"


def on_device(case: Case, inputs: Any) -> dict[str, Any]:
    """`call`, with its results left on the GPU: nothing waits."""
    x = tracked(inputs)
    options = {"return_state": True, "return_normalizer": True, **case.options}
    out, state, den = linear_attention(x.q, x.k, x.v, initial_state=x.initial_state, **options)
    results, cotangents = [out], [x.dout]
    for part, dpart in zip(state, x.dstate or (), strict=False):
        results.append(part)
        cotangents.append(dpart.expand(part.shape))
    grads = torch.autograd.grad(results, (*x[:3], *(x.initial_state or ())), cotangents)
    names = ("dq", "dk", "dv", *(f"dinitial.{part}" for part in la.State._fields))
    found = {"out": out, "den": den, **{f"state.{n}": p for n, p in state._asdict().items()}}
    return {n: t.detach() for n, t in (found | dict(zip(names, grads, strict=False))).items()}


@both(CASES[:2])
def test_threads(case: Case) -> None:
    x = Tensors(case, make_inputs(case), "cuda").inputs
    expected = call(case, x)
    torch.cuda.synchronize()
    found: list[Any] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = on_device(case, x)
            stream.synchronize()
        found.append(to_host(results))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8, "a thread raised"
    assert all(same_bits(expected, results) == [] for results in found)


@both([*CASES, COPIED, SUMMED])
def test_no_call_waits_for_the_device(case: Case) -> None:
    x = Tensors(case, make_inputs(case), "cuda").inputs
    on_device(case, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy(50)
        mark = torch.cuda.Event()
        started = time.perf_counter()
        on_device(case, x)
        took = time.perf_counter() - started
        mark.record()
        assert not mark.query(), f"the call waited ({1e3 * took:.1f} ms)"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@both([*CASES, COPIED, SUMMED])
def test_twenty_runs_are_bitwise_equal(case: Case) -> None:
    x = Tensors(case, make_inputs(case), "cuda").inputs
    expected = call(case, x)
    for _ in range(20):
        assert same_bits(expected, call(case, x)) == []


# --- graphs --------------------------------------------------------------------------------------


@both([*CASES, COPIED, SUMMED])
def test_capture_and_replay(case: Case) -> None:
    """Forward and backward in one torch.cuda.graph after a warm-up; inputs refilled three times."""
    sets = [Tensors(case, make_inputs(case, seed), "cuda") for seed in range(4)]
    expected = [call(case, x.inputs) for x in sets]
    static, *refills = sets
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_device(case, static.inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = on_device(case, static.inputs)
    for refill, wanted in zip(refills, expected[1:], strict=True):
        for target, source in zip(static.parents, refill.parents, strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(wanted, to_host(results)) == []


@both(CASES[:1])
def test_compile_on_the_gpu(case: Case) -> None:
    pytest.importorskip("triton")
    torch._dynamo.reset()
    x = Tensors(case, make_inputs(case), "cuda").inputs
    for options in ({}, {"mode": "reduce-overhead"}):
        compiled = torch.compile(linear_attention, fullgraph=True, **options)
        for _ in range(3):
            found = call(case, x, compiled)
        assert same_bits(found, call(case, x)) == []


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.gpu(devices=2)
@both([CASES[1], SUMMED])
def test_inputs_on_another_device_than_the_current(case: Case) -> None:
    tensors = Tensors(case, make_inputs(case), "cuda:1")
    with torch.cuda.device(0):
        results = on_device(case, tensors.inputs)
        assert torch.cuda.current_device() == 0 and cp.cuda.runtime.getDevice() == 0
        with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
            torch.cuda.current_stream("cuda:1").wait_stream(torch.cuda.default_stream("cuda:1"))
            on_the_side = on_device(case, tensors.inputs)
        torch.cuda.synchronize("cuda:1")
    assert all(x.device == torch.device("cuda:1") for x in results.values())
    here = call(case, Tensors(case, make_inputs(case), "cuda:0").inputs)
    assert same_bits(here, to_host(results)) == []
    assert same_bits(here, to_host(on_the_side)) == []


@pytest.mark.gpu(devices=2)
def test_inputs_on_two_devices_are_refused() -> None:
    q, k, v = (random(2, 9, 16, device=f"cuda:{i}") for i in (0, 1, 0))
    with pytest.raises(ValueError, match=r"q is on device cuda:0 and k on device cuda:1, .*write"):
        linear_attention(q, k, v)


def test_refusals_of_the_gpu() -> None:
    q = random(2, 9, 16)
    with pytest.raises(ValueError, match="q is on device cuda:0 and k on device cpu"):
        linear_attention(q, q.cpu(), q)
    wide = random(2, 9, 257)
    with pytest.raises(ValueError, match="q has D = 257, but the GPU kernels take D up to 256"):
        linear_attention(wide, wide, wide)
    with pytest.raises(TypeError, match="a is a tensor"):
        linear_attention(q, q, q, a=torch.ones((), device="cuda"))


def test_autocast_and_grouped_heads() -> None:
    q, k, v = (
        random(2, 6, 500, 64, dtype=torch.float32),
        *(random(2, 2, 500, 64, dtype=torch.float32, seed=i) for i in (1, 2)),
    )
    x = [t.requires_grad_() for t in (q, k, v)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().square().sum(), x)
    repeated = [x[0], *(t.repeat_interleave(3, 1) for t in x[1:])]
    wide = linear_attention(*(t.double() for t in repeated), causal=True)
    expected = torch.autograd.grad(wide.square().sum(), x)
    for found, other in ((out, wide), *zip(grads, expected, strict=True)):
        error = (found.double() - other).abs().max() / other.abs().max()
        assert float(error) <= 4e-2


def test_second_derivatives_on_the_gpu() -> None:
    x = [random(1, 2, 37, 16, dtype=torch.float64, seed=i).requires_grad_() for i in range(3)]
    attend: Callable[..., Any] = lambda *x: linear_attention(*x, causal=True)
    assert torch.autograd.gradcheck(attend, x, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, x, fast_mode=True)


# --- DLPack --------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(2, 3, 40, 16), (1, 1, 1, 16), (1, 1, 7, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_to_la_cupy_to_jax_and_back(view: str, shape: Any, dtype: str) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    x = [VIEWS[view](random(*shape, dtype=getattr(torch, dtype), seed=i)) for i in range(3)]
    arrays = [from_dlpack(t) for t in x]
    assert all(a.data.ptr == t.data_ptr() for a, t in zip(arrays, x, strict=True))
    out = la.linear_attention(*arrays, causal=True)
    cp.cuda.get_current_stream().synchronize()
    there = jax.dlpack.from_dlpack(out)
    assert there.shape == shape and str(there.dtype) == dtype
    doubled = jax.jit(lambda y: y * 2)(there)
    back = torch.from_dlpack(doubled)
    assert back.dtype == x[0].dtype and back.is_cuda
    expected = linear_attention(*x, causal=True) * 2
    assert torch.equal(back, expected)
    again = from_dlpack(doubled)
    assert type(again) is cp.ndarray
    assert again.data.ptr == back.data_ptr() and again.dtype == arrays[0].dtype
    straight = torch.from_dlpack(out)
    assert straight.data_ptr() == out.data.ptr and torch.equal(straight * 2, expected)


# --- memory --------------------------------------------------------------------------------------


def peak(function: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that torch was asked for beyond those before, and what is kept."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    kept = function()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, kept


@pytest.mark.parametrize("layout", ["contiguous", "fused", "grouped"])
def test_no_input_is_copied(layout: str) -> None:
    """bfloat16 in and out: only results and the plan's workspaces, in torch's memory alone."""
    n = 32768
    if layout == "fused":
        fused = random(1, n, 4, 8, 64)
        x = [fused[:, :, i].transpose(1, 2) for i in range(4)]
    else:
        heads = (8, 1) if layout == "grouped" else (8, 8)
        x = [random(1, h, n, 64, seed=i) for i, h in enumerate((heads[0], *heads[1:] * 2, 8))]
    q, k, v, dout = x
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    arrays = [from_dlpack(t.detach()) for t in x]
    plans = {
        "forward": la.explain(*arrays[:3], causal=True),
        "backward": la.explain(*arrays[:3], dout=arrays[3], causal=True),
    }
    pool = cp.get_default_memory_pool()

    def forward() -> Any:
        return linear_attention(*leaves, causal=True)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    out = forward()
    backward()
    used = pool.used_bytes()
    for name, function in (("forward", forward), ("backward", backward)):
        plan = plans[name]
        assert plan.copies == ()
        most, kept = peak(function)
        results, workspace = buffer_bytes(plan.outputs), buffer_bytes(plan.workspace)
        print(
            f"{layout} {name}: peak {most / q.nbytes:.2f} of q, workspace {workspace / q.nbytes:.2f}"
        )
        assert results <= most <= results + workspace, (most, results, workspace)
        if layout != "grouped":  # whose workspace is small beside q, but not beside k
            assert workspace < 0.75 * q.nbytes, "the bound would not see a copy"
        del kept
    assert pool.used_bytes() == used, "CuPy's pool was used"


# --- time ----------------------------------------------------------------------------------------


def host_times(*functions: Callable[[], Any], rounds: int = 100) -> dict[str, list[float]]:
    """µs of Python of a call, round by round, by the function's name.

    The functions take turns, forth and back, so that a round's times are of the same moment: a
    clock that drifts, or threads that wake up slowly for a while, are in all of them. A turn is
    the median of a few calls, and begins with an empty queue.
    """
    costs: dict[str, list[float]] = {f.__name__: [] for f in functions}
    gc.disable()
    try:
        for i in range(10 + rounds):
            for function in functions if i % 2 else reversed(functions):
                torch.cuda.synchronize()
                turn = []
                for _ in range(5):
                    started = time.perf_counter()
                    function()
                    turn.append(time.perf_counter() - started)
                costs[function.__name__].append(statistics.median(turn) * 1e6)
    finally:
        gc.enable()
    return {name: found[10:] for name, found in costs.items()}


class Arrays(torch.autograd.Function):
    """The array API, called with arrays that are ready, where torch calls an operation.

    For a backward this is in a thread of autograd's, on a core of its own, where Python that has
    just run elsewhere takes twice its time, whoever's it is.
    """

    @staticmethod
    def forward(ctx: Any, arrays: Any, q: Any, k: Any, v: Any) -> Any:
        ctx.arrays = arrays
        _, ctx.den = la.linear_attention(*arrays[:3], causal=True, return_normalizer=True)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        inputs = (ctx.arrays[3], *ctx.arrays[:3])
        la.linear_attention_vjp(*inputs, normalizer=ctx.den, causal=True)
        return None, dout, dout, dout


def test_host_time_of_a_call(capsys: Any) -> None:
    """Added to what the array API takes: at most 40 µs a call."""
    x = [random(4, 8, 64, 64, seed=i) for i in range(3)]
    dout = random(4, 8, 64, 64, seed=3)
    leaves = [t.clone().requires_grad_() for t in x]
    arrays = [from_dlpack(t) for t in (*x, dout)]

    def array_forward() -> Any:
        return la.linear_attention(*arrays[:3], causal=True, return_normalizer=True)

    def forward() -> Any:
        return linear_attention(*leaves, causal=True)

    def forward_without_gradient() -> Any:
        with torch.no_grad():
            return linear_attention(*leaves, causal=True)

    def forward_and_backward() -> Any:
        return torch.autograd.grad(forward(), leaves, dout)

    def arrays_forward_and_backward() -> Any:
        return torch.autograd.grad(Arrays.apply(arrays, *leaves), leaves, dout)

    times = host_times(
        *(array_forward, forward, forward_without_gradient),
        *(arrays_forward_and_backward, forward_and_backward),
    )

    def added(one: str, other: str) -> float:
        """The median of what rounds took more for `one` than for `other`."""
        return statistics.median(x - y for x, y in zip(times[one], times[other], strict=True))

    forwards = added("forward", "array_forward")
    both_ways = added("forward_and_backward", "arrays_forward_and_backward")
    medians = {name: statistics.median(found) for name, found in times.items()}
    with capsys.disabled():
        print("\nhost time, µs: " + ", ".join(f"{n} {t:.1f}" for n, t in medians.items()))
        print(f"added: forward {forwards:.1f}, forward and backward {both_ways:.1f}")
    assert forwards <= 40
    assert both_ways <= 2 * 40


def device_time(functions: dict[str, Callable[[], Any]], calls: int = 10) -> dict[str, float]:
    """Median ms of a call on the device, in turn, each batch queued behind a busy stream."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(3):
            function()
    for _ in range(15):
        for name, function in functions.items():
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            busy(10)
            start.record()
            for _ in range(calls):
                function()
            stop.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(stop) / calls)
    return {name: statistics.median(times) for name, times in found.items()}


def test_gpu_time_is_that_of_the_array_api(capsys: Any) -> None:
    """B = 8, H = 16, N = 4096, D = 128, bfloat16, causal: forward and backward within 3 %."""
    x = [random(8, 16, 4096, 128, seed=i) for i in range(4)]
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    arrays = [from_dlpack(t) for t in x]

    def array_api() -> Any:
        _, den = la.linear_attention(*arrays[:3], causal=True, return_normalizer=True)
        return la.linear_attention_vjp(arrays[3], *arrays[:3], normalizer=den, causal=True)

    def adapter() -> Any:
        return torch.autograd.grad(linear_attention(*leaves, causal=True), leaves, x[3])

    # CuPy works in its own null stream, which is torch's default stream
    times = device_time({"array API": array_api, "adapter": adapter})
    with capsys.disabled():
        print("\nforward + backward, ms: " + ", ".join(f"{n} {t:.3f}" for n, t in times.items()))
    assert times["adapter"] <= 1.03 * times["array API"]


# --- a model -------------------------------------------------------------------------------------


def test_llama_on_the_gpu() -> None:
    transformers = pytest.importorskip("transformers")
    from la_cupy.interop.torch import register_transformers

    register_transformers("la_cupy")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="la_cupy")
    ids = torch.randint(0, 50, (2, 300))
    expected = model(ids, labels=ids).loss
    model = model.cuda()
    found = model(ids.cuda(), labels=ids.cuda()).loss
    found.backward()
    assert abs(float(found) - float(expected)) <= 1e-4
    assert all(p.grad.isfinite().all() for p in model.parameters())


@both([CASES[1]])
def test_results_are_right_at_length(case: Case) -> None:
    tensors = Tensors(case, make_inputs(case), "cuda")
    results = call(case, tensors.inputs)
    inputs = tensors.moat.inputs
    tensors.assert_unchanged()
    check(case, inputs, results, reference_results(case, inputs))
