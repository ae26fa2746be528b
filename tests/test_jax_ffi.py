"""The JAX adapter's GPU path, on the CPU: handler, plans, buffers and layouts, kernels emulated."""

from __future__ import annotations

import ctypes
import pickle
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import BY_NAME, CASES, Case, check, make_inputs, reference_results

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

import jax_cases
from emulation.backend import H200
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_emulated import ROUTE, TARGET, emulated
from la_cupy.interop import _jax_cuda, _jax_ffi, _jax_lowering, _jax_ops
from la_cupy.interop._jax_cuda import Program, Route
from la_cupy.interop.jax import (
    dot_product_attention,
    linear_attention,
    linear_attention_xla,
)

from la_cupy.problem import make_options

Array = Any


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def calls() -> Iterator[list[Program]]:
    with emulated() as found:
        yield found


def normal(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


def assert_close(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        size = float(np.abs(y).max(initial=0)) or 1.0
        assert float(np.abs(x - y).max(initial=0)) <= rtol * size


EMULATED = [
    BY_NAME[name]
    for name in (
        *("causal-float64-state", "bfloat16-state", "causal-float16", "causal-unnormalised"),
        *("causal-grouped-float32", "k-v-on-different-axes", "q-broadcast", "state-wide"),
        *("causal-state-float64", "causal-N>M-state", "N=0-M=9", "causal-no-queries", "B=0"),
        *("causal-q-bfloat16-k-float16", "causal-state-shared"),
    )
]


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_table(case: Case, calls: list[Program]) -> None:
    """One custom call forward and one backward, and everything right; memory is NaN at first."""
    x = make_inputs(case)
    calls.clear()
    results = jax_cases.call(case, x, linear_attention, jax_cases.QUICK)
    check(case, x, results, reference_results(case, x))
    assert sorted(program.is_forward for program in calls) == [False, True] or 0 in case.lead


def loss(attention: Any, *x: Array) -> Array:
    return (attention(*x, causal=True) ** 2).sum()


def test_in_one_program_with_everything_else(calls: list[Program]) -> None:
    """jit of grad of scan of checkpoint of vmap."""
    q, k, v = normal(3, 8, 4), normal(8, 4, seed=1), normal(3, 8, 4, seed=2)

    def program(attention: Any, q: Array, k: Array, v: Array) -> Array:
        @jax.checkpoint
        def layer(x: Array, _: None) -> tuple[Array, None]:
            return x + jax.vmap(partial(attention, causal=True), (0, None, 0))(x, k, v), None

        return (jax.lax.scan(layer, q, None, length=3)[0] ** 2).sum()

    calls.clear()
    every = (0, 1, 2)
    found = jax.jit(jax.value_and_grad(partial(program, linear_attention), every))(q, k, v)
    assert len(calls) == 9  # three steps: forward, forward again for the gradient, backward
    assert_close(
        found, jax.jit(jax.value_and_grad(partial(program, linear_attention_xla), every))(q, k, v)
    )


@pytest.mark.parametrize("axes", [(0, None, 0), (None, 1, None)], ids=str)
def test_vmap_of_grad(axes: tuple[int | None, ...], calls: list[Program]) -> None:
    x = [
        normal(*((8, 4) if a is None else (2, 8, 4) if a == 0 else (8, 2, 4)), seed=i)
        for i, a in enumerate(axes)
    ]
    found, expected = (
        jax.jit(jax.vmap(jax.grad(partial(loss, f), argnums=(0, 1, 2)), axes))(*x)
        for f in (linear_attention, linear_attention_xla)
    )
    assert_close(found, expected)


def test_second_derivatives(calls: list[Program]) -> None:
    """The second derivative runs the kernels for what is linear in dout."""
    x = [normal(8, 4, seed=i) for i in range(3)]

    def second(attention: Any, *x: Array) -> Array:
        return sum((g**2).sum() for g in jax.grad(partial(loss, attention), argnums=(0, 1, 2))(*x))

    found, expected = (
        jax.jit(jax.grad(partial(second, f), argnums=(0, 1, 2)))(*x)
        for f in (linear_attention, linear_attention_xla)
    )
    assert_close(found, expected, rtol=1e-3)


@pytest.mark.parametrize("explicit", [False, True])
def test_sharded(explicit: bool, calls: list[Program]) -> None:
    """Each device runs custom calls on its own heads; nothing is gathered."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(
        (4, 2), ("batch", "head"), axis_types=(kind,) * 2, devices=jax.devices("cpu")
    )
    x = normal(4, 2, 6, 4), normal(4, 1, 6, 4, seed=1), normal(4, 1, 6, 4, seed=2)
    specs = P("batch", "head"), P("batch"), P("batch")
    args = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in zip(x, specs, strict=True)]
    gradient = jax.jit(jax.grad(partial(loss, linear_attention), argnums=(0, 1, 2)))
    with jax.set_mesh(mesh):
        text = gradient.lower(*args).compile().as_text()
        calls.clear()
        found = jax.block_until_ready(gradient(*args))
    assert text.count(f'custom_call_target="{TARGET}"') == 2
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    assert len(calls) == 16
    assert {{n: s for n, _, s in c.operands}["q"] for c in calls} == {(1, 1, 6, 4)}
    assert_close(
        [np.asarray(g) for g in found],
        jax.jit(jax.grad(partial(loss, linear_attention_xla), argnums=(0, 1, 2)))(*x),
    )


def test_shard_map(calls: list[Program]) -> None:
    mesh = jax.make_mesh(
        (8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")
    )
    x = normal(8, 6, 4), normal(6, 4, seed=1), normal(8, 6, 4, seed=2)
    specs = P("batch"), P(), P("batch")
    split = jax.shard_map(
        partial(linear_attention, causal=True), mesh=mesh, in_specs=specs, out_specs=P("batch")
    )
    found = jax.jit(jax.grad(lambda *y: (split(*y) ** 2).sum(), argnums=(0, 1, 2)))(*x)
    assert_close(
        [np.asarray(g) for g in found],
        jax.jit(jax.grad(partial(loss, linear_attention_xla), argnums=(0, 1, 2)))(*x),
    )


# --- memory layout


@pytest.mark.parametrize("key_heads", [4, 2])
def test_no_transposition_on_the_way_to_the_kernels(key_heads: int, calls: list[Program]) -> None:
    """(B, T, N, H) goes in and comes out as it lies in memory; three gradients are transposed."""
    q, k, v = (
        normal(2, 20, 4, 8),
        normal(2, 20, key_heads, 8, seed=1),
        normal(2, 20, key_heads, 16, seed=2),
    )
    attention = partial(dot_product_attention, is_causal=True)

    def repeated(q: Array, k: Array, v: Array) -> Array:
        k, v = (jnp.repeat(x, 4 // key_heads, -2) for x in (k, v))
        heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
        return linear_attention_xla(*heads_first, causal=True).swapaxes(1, 2)

    text = jax.jit(attention).lower(q, k, v).compile().as_text()
    assert TARGET in text and not re.search(r"= \S+ (?:copy|transpose|fusion)\(", text)
    found, expected = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) ** 2).sum(), argnums=(0, 1, 2)))(q, k, v)
        for f in (attention, repeated)
    )
    assert_close(found, expected)


# --- what the call carries


@pytest.mark.parametrize("case", [c for c in CASES if c.small][::7], ids=str)
def test_a_program_is_the_same_in_every_process(case: Case) -> None:
    x = make_inputs(case)
    options = make_options(**case.options)
    call = _jax_ops.Call(options, x.initial_state is not None, x.dstate is not None)
    given = [x.q, x.k, x.v, *(x.initial_state or ())]
    dout = [x.dout, *(x.dstate or ())]
    den = np.zeros((*case.lead, case.q[-2]), np.float32)
    for op, arrays in ((_jax_ops.FORWARD, given), (_jax_ops.BACKWARD, [*dout, *given, den])):
        names = op.operands(call)
        operands = tuple((n, a.dtype.name, a.shape) for n, a in zip(names, arrays, strict=True))
        program = Program(call, operands, H200)
        again = Program.decode(program.encode())
        assert again == program and again.plan == program.plan
        assert pickle.loads(pickle.dumps(program)) == program


def test_export(calls: list[Program]) -> None:
    """An exported program carries all that its calls need."""
    pytest.importorskip("flatbuffers")
    x = normal(2, 10, 4)
    function = jax.jit(partial(loss, linear_attention))
    known = jax.export.DisabledSafetyCheck.custom_call(TARGET)
    stored = jax.export.export(function, disabled_checks=[known])(x, x, x).serialize()
    jax.clear_caches()
    calls.clear()
    found = jax.jit(jax.export.deserialize(stored).call)(x, x, x).block_until_ready()
    assert len(calls) == 1
    assert_close(found, loss(linear_attention_xla, x, x, x))


# --- errors


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_a_launcher_raises_comes_out(kind: type[BaseException]) -> None:
    """Ctrl-C, too, which must not get through to the C++ that calls the launcher."""

    def broken(text: bytes, device: int, stream: int, addresses: list[int]) -> None:
        raise kind("the launcher's own words")

    target = f"la_cupy_broken_{kind.__name__}"
    _jax_ffi.register(target, "cpu", broken, capturable=False)
    x = normal(3, 4)
    with emulated():
        _jax_lowering.ROUTES["cpu"] = Route(target, ROUTE.device, ROUTE.load)
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=f"{kind.__name__}: the launcher's own words"
        ):
            jax.jit(linear_attention)(x, x, x).block_until_ready()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_on_entry_comes_out() -> None:
    """Ctrl-C while XLA's C++ runs is raised before the first line of the Python that it calls."""
    _jax_ffi.register("la_cupy_interrupted", "cpu", lambda *_: None, capturable=False)
    messages = []

    def error_create(address: int) -> int:
        arguments = _jax_ffi._ErrorArguments.from_address(address)
        messages.append(arguments.message)
        return 1234

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            raise KeyboardInterrupt

    api = _jax_ffi._Api(error_create=_jax_ffi._Function(error_create))
    frame = _jax_ffi._CallFrame(api=ctypes.pointer(api), stage=_jax_ffi._EXECUTE)
    handler, address = _jax_ffi._registered[-1], ctypes.addressof(frame)
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        found = handler(address)
    finally:
        sys.settrace(before)
    assert found == 1234
    assert messages == [b"KeyboardInterrupt: the call was interrupted before it began"]


def test_widths_that_no_kernel_takes(calls: list[Program]) -> None:
    x = normal(3, 257)
    with pytest.raises(ValueError, match="q has D = 257.* up to 256.*linear_attention_xla"):
        jax.jit(linear_attention)(x, x, x)


def test_lowering_for_a_gpu_needs_one() -> None:
    """Never a silent fallback: a program for CUDA has the kernels, or there is no program."""
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError:
        pass
    else:
        pytest.skip("there is a GPU")
    x = normal(3, 4)
    traced = jax.jit(linear_attention).trace(x, x, x)
    with pytest.raises(RuntimeError, match="lowered for CUDA, but JAX has no CUDA device here"):
        traced.lower(lowering_platforms=("cuda",))
    assert _jax_lowering.ROUTES["cuda"] is _jax_cuda.CUDA


def test_nothing_is_emulated_outside() -> None:
    with emulated():
        pass
    x = normal(3, 4)
    assert TARGET not in jax.jit(linear_attention).lower(x, x, x).as_text()
