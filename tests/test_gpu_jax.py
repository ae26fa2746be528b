"""The JAX adapter on a GPU: the table, what the compiled program holds, streams, graphs, caches."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import BY_NAME, CASES, Case, check, make_inputs, reference_results
from gpu_helpers import cp, run_script

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

import jax_cases
from la_cupy.interop import from_dlpack
from la_cupy.interop.jax import (
    dot_product_attention,
    linear_attention,
    linear_attention_xla,
)

import la_cupy as la

pytestmark = pytest.mark.gpu

Array = Any
CALL = 'custom_call_target="la_cupy_cuda"'


@pytest.fixture(autouse=True, scope="module")
def jax_sees_the_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_close(found: Any, expected: Any, rtol: float = 1e-4) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        size = float(np.abs(y).max(initial=0)) or 1.0
        assert float(np.abs(x - y).max(initial=0)) <= rtol * size


def loss(attention: Any, *x: Array) -> Array:
    return (attention(*x, causal=True).astype(jnp.float32) ** 2).sum()


gradient = jax.jit(jax.grad(partial(loss, linear_attention), argnums=(0, 1, 2)))
plain_gradient = jax.jit(jax.grad(partial(loss, linear_attention_xla), argnums=(0, 1, 2)))


# --- values

# All that JAX can be given: its arrays have one layout, and dout has the type of out.
TABLE = [
    case
    for case in CASES
    if case.layout in ("contiguous", "swapaxes")
    and case.dout_layout in (None, "swapaxes")
    and case.dout_dtype is None
]


@pytest.mark.usefixtures("warm_kernels")
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_table(case: Case) -> None:
    x = make_inputs(case)
    results = jax_cases.call(case, x, linear_attention, jax_cases.QUICK)
    check(case, x, results, reference_results(case, x))


@pytest.mark.parametrize(
    "case",
    [BY_NAME[x] for x in ("causal-float32", "bfloat16-state", "causal-grouped-float32")],
    ids=str,
)
def test_the_plain_function_on_a_gpu(case: Case) -> None:
    x = make_inputs(case)
    check(case, x, jax_cases.call(case, x, linear_attention_xla), reference_results(case, x))


def test_the_same_bits_as_the_array_api() -> None:
    x = [normal(2, 3, 300, 64, seed=i, dtype=jnp.bfloat16) for i in range(4)]
    q, k, v, dout = (from_dlpack(y) for y in x)
    out, den = la.linear_attention(q, k, v, causal=True, return_normalizer=True)
    grads = la.linear_attention_vjp(dout, q, k, v, normalizer=den, causal=True)
    found, pull = jax.vjp(partial(linear_attention, causal=True), *x[:3])
    for ours, theirs in zip((found, *pull(x[3])), (out, *grads[:3]), strict=True):
        bits = cp.asnumpy(theirs.view(cp.uint16))
        assert np.array_equal(np.asarray(ours).view(np.uint16), bits)


def test_second_derivatives_and_forward_mode() -> None:
    x = [normal(2, 300, 32, seed=i) for i in range(3)]
    t = [normal(2, 300, 32, seed=5 + i) for i in range(3)]

    def second(attention: Any, *x: Array) -> Array:
        grads = jax.grad(partial(loss, attention), argnums=(0, 1, 2))(*x)
        return sum((g * d).sum() for g, d in zip(grads, t, strict=True))

    found, expected = (
        jax.jit(
            lambda *y, f=f: (
                jax.grad(partial(second, f), argnums=(0, 1, 2))(*y),
                jax.jvp(partial(f, causal=True), y, tuple(t)),
            )
        )(*x)
        for f in (linear_attention, linear_attention_xla)
    )
    assert_close(found, expected, rtol=1e-3)


def test_in_one_program_with_everything_else() -> None:
    q, k, v = normal(3, 200, 16), normal(200, 16, seed=1), normal(3, 200, 16, seed=2)

    def program(attention: Any, q: Array, k: Array, v: Array) -> Array:
        @jax.checkpoint
        def layer(x: Array, _: None) -> tuple[Array, None]:
            return x + jax.vmap(partial(attention, causal=True), (0, None, 0))(x, k, v), None

        return (jax.lax.scan(layer, q, None, length=3)[0] ** 2).sum()

    every = (0, 1, 2)
    expected = jax.jit(jax.value_and_grad(partial(program, linear_attention_xla), every))(q, k, v)
    compiled = jax.jit(
        jax.value_and_grad(partial(program, linear_attention), every), donate_argnums=0
    )
    assert_close(compiled(q + 0, k, v), expected)


def test_eight_queries_a_key() -> None:
    """(B, T, N, H), grouped heads: forward without any copy of q, k, v or out."""
    q, k, v = normal(2, 200, 8, 32), normal(2, 200, 1, 32, seed=1), normal(2, 200, 1, 32, seed=2)
    attention = partial(dot_product_attention, is_causal=True)
    text = jax.jit(attention).lower(q, k, v).compile().as_text()
    assert CALL in text and not re.search(r"= \S+ (?:copy|transpose|fusion)\(", text)
    repeated = (x.swapaxes(1, 2) for x in (q, jnp.repeat(k, 8, 2), jnp.repeat(v, 8, 2)))
    expected = linear_attention_xla(*repeated, causal=True).swapaxes(1, 2)
    assert_close(jax.jit(attention)(q, k, v), expected, rtol=1e-5)


# --- the compiled program


def test_the_program_holds_our_calls() -> None:
    """Forward and backward are custom calls, and no loop of the plain function is there."""
    x = [normal(2, 300, 32, seed=i) for i in range(3)]
    text = gradient.lower(*x).compile().as_text()
    assert text.count(CALL) == 2
    assert not re.search(r"\bwhile\(", text)
    eager = jax.jit(partial(linear_attention, causal=True)).lower(*x).compile().as_text()
    assert eager.count(CALL) == 1


def test_widths_that_no_kernel_takes() -> None:
    x = normal(3, 257)
    with pytest.raises(ValueError, match="q has D = 257.* up to 256.*linear_attention_xla"):
        linear_attention(x, x, x)
    assert linear_attention_xla(x, x, x).shape == (3, 257)


def test_fifty_lengths_compile_no_further_kernel() -> None:
    from la_cupy import compile

    jax.block_until_ready(gradient(*[normal(1, 700, 32)] * 3))
    before = len(compile._kernels)
    for n in range(20, 1020, 200):
        jax.block_until_ready(gradient(*[normal(1, n, 32)] * 3))
    assert len(compile._kernels) - before <= 4  # short sequences need no pre-pass, long ones do


# --- memory, streams


def test_memory_is_that_of_the_results() -> None:
    """Temporaries of the gradient: out, dout, den and a few small workspaces; nothing of q, k, v."""
    x = [normal(8, 16, 2048, 128, seed=i, dtype=jnp.bfloat16) for i in range(3)]

    def both(q: Array, k: Array, v: Array, dout: Array) -> Any:
        out, pull = jax.vjp(partial(linear_attention, causal=True), q, k, v)
        return out, pull(dout)

    analysis = jax.jit(both).lower(*x, x[0]).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= 0.5 * x[0].nbytes


def test_fifty_repeats_with_other_work_around_it() -> None:
    """On XLA's stream, forward and backward: what is queued before and after sees and is seen."""
    sets = [[normal(4, 2000, 64, seed=3 * s + i) for i in range(3)] for s in range(3)]

    def function(*x: Array) -> Array:
        q, k, v = (jnp.sin(y) for y in x)
        return jnp.cos(linear_attention(q, k, v, causal=True))

    @jax.jit
    def program(*x: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(function, *x)
        return out, *pull(jnp.sin(3 * out))

    def to_host(results: tuple[Array, ...]) -> list[bytes]:
        return [np.asarray(y).tobytes() for y in results]

    expected = [to_host(program(*x)) for x in sets]
    for repeat in range(50):
        queued = [program(*x) for x in sets]  # before anything waits for the first
        assert [to_host(y) for y in queued] == expected, f"repeat {repeat}"


def test_results_repeat_bit_for_bit() -> None:
    x = [normal(2, 1000, 64, seed=i, dtype=jnp.bfloat16) for i in range(3)]
    first = [np.asarray(g).tobytes() for g in gradient(*x)]
    for _ in range(20):
        assert [np.asarray(g).tobytes() for g in gradient(*x)] == first


def test_current_device_and_stream_are_left_alone() -> None:
    with cp.cuda.Stream() as stream:
        jax.block_until_ready(gradient(*[normal(1, 50, 16)] * 3))
        assert cp.cuda.get_current_stream() == stream
        assert cp.cuda.runtime.getDevice() == 0


# --- other processes

CHAIN = """
import sys, numpy as np, jax, jax.numpy as jnp
from functools import partial
from la_cupy.interop import _jax_cuda
from la_cupy.interop.jax import linear_attention, linear_attention_xla
launches = []
ready = _jax_cuda._ready
def counted(text, device):
    launches.append(text)
    return ready(text, device)
_jax_cuda._ready = counted
def program(attention, q, k, v):
    for _ in range(6):
        q = attention(q, k, v, causal=True)
    return (q ** 2).sum()
every = (0, 1, 2)
x = [jnp.asarray(np.random.default_rng(i).standard_normal((2, 300, 32)), np.float32) for i in range(3)]
f = jax.jit(jax.value_and_grad(partial(program, linear_attention), every))
f = f.lower(*x).compile()
launches.clear()
counts = []
for i in range(6):
    y = [a + i for a in x]          # other values, and buffers at other addresses
    found = f(*y)
    jax.block_until_ready(found)
    counts.append(len(launches))
    expected = jax.jit(jax.value_and_grad(partial(program, linear_attention_xla), every))(*y)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert float(jnp.abs(a - b).max()) <= 1e-3 * float(jnp.abs(b).max()), i
launches.clear()
for i in range(10):                 # the same values at the same addresses
    if i == 5: launches.clear()
    jax.block_until_ready(f(*x))
print("launches", *counts, "and", len(launches))
"""


@pytest.mark.parametrize("graphs", [True, False])
def test_command_buffers(graphs: bool) -> None:
    """A chain of calls, recorded in a CUDA graph and not: right, also with new values and buffers."""
    kinds = "FUSION,CUBLAS,CUSTOM_CALL" if graphs else ""
    flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    done = run_script(CHAIN, XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert done.returncode == 0, done.stderr
    *counts, later = [int(x) for x in re.findall(r"\d+", done.stdout.split("launches")[1])]
    assert counts[0] > 0
    if graphs:  # the handler runs when the graph is recorded or updated, not at every call
        assert later < 5 * 12
    else:
        assert [*counts, later] == [*(12 * (i + 1) for i in range(6)), 5 * 12]


CACHED = """
import sys, time, numpy as np, jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
from la_cupy.interop.jax import linear_attention, linear_attention_xla
x = [jnp.asarray(np.random.default_rng(i).standard_normal((2, 300, 32)), np.float32) for i in range(3)]
f = jax.jit(jax.grad(lambda *x: (linear_attention(*x, causal=True) ** 2).sum(), (0, 1, 2)))
events.clear()
found = jax.block_until_ready(f(*x))
print("hit" if any(e.endswith("cache_hits") for e in events) else "miss")
expected = jax.grad(lambda *x: (linear_attention_xla(*x, causal=True) ** 2).sum(), (0, 1, 2))(*x)
for a, b in zip(found, expected):
    assert float(jnp.abs(a - b).max()) <= 1e-4 * float(jnp.abs(b).max())
"""


def test_the_persistent_cache(tmp_path: Path) -> None:
    """The second process takes the program from the cache, and it runs."""
    for expected in ("miss", "hit"):
        done = run_script(CACHED, tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


EXPORT = """
import sys, numpy as np, jax, jax.numpy as jnp
from la_cupy.interop.jax import linear_attention
x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 300, 32)), np.float32)
f = jax.jit(lambda q: linear_attention(q, q, q, causal=True))
check = jax.export.DisabledSafetyCheck.custom_call("la_cupy_cuda")
open(sys.argv[1], "wb").write(jax.export.export(f, disabled_checks=[check])(x).serialize())
np.save(sys.argv[2], f(x))
"""

RUN_EXPORT = """
import sys, numpy as np, jax, jax.numpy as jnp
import la_cupy.interop.jax
x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 300, 32)), np.float32)
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
found = jax.jit(exported.call)(x)
assert np.asarray(found).tobytes() == np.load(sys.argv[2]).tobytes()
"""


def test_export(tmp_path: Path) -> None:
    """Exported in one process, run in another, which never saw the function."""
    pytest.importorskip("flatbuffers")
    for script in (EXPORT, RUN_EXPORT):
        done = run_script(script, tmp_path / "program", tmp_path / "out.npy")
        assert done.returncode == 0, done.stderr


BESIDE = """
import numpy as np, jax, jax.numpy as jnp
from la_cupy.interop.jax import linear_attention
x = [jax.random.normal(jax.random.key(i), (8, 65536, 128), jnp.bfloat16) for i in range(3)]
f = jax.jit(jax.grad(lambda *x: linear_attention(*x, causal=True).astype(jnp.float32).sum(), (0, 1, 2)))
for g in f(*x):
    assert bool(jnp.isfinite(g.astype(jnp.float32)).all())
"""


def test_beside_the_preallocation_of_xla() -> None:
    cp.get_default_memory_pool().free_all_blocks()
    done = run_script(
        BESIDE, XLA_PYTHON_CLIENT_PREALLOCATE="true", XLA_PYTHON_CLIENT_MEM_FRACTION=".75"
    )
    assert done.returncode == 0, done.stderr


# --- exchange


def test_layouts_of_cupy_through_the_adapter() -> None:
    """Transposed and sliced arrays of CuPy: JAX takes them as what they are, or says no."""
    x = cp.random.default_rng(0).standard_normal((40, 64), dtype=cp.float32)
    refused = BufferError, ValueError, jax.errors.JaxRuntimeError
    taken = []
    for name, view in {"all": x, "transposed": x.T, "columns": x[:, :32], "rows": x[::2]}.items():
        try:
            q = jnp.from_dlpack(view)
        except refused as error:
            assert re.search("strid|layout|contiguous", str(error))
            continue
        taken.append(name)
        expected = la.linear_attention(view, view, view, causal=True)
        assert_close(
            linear_attention(q, q, q, causal=True), jnp.asarray(cp.asnumpy(expected)), 1e-5
        )
    assert taken[:2] == ["all", "transposed"]


def test_arrays_of_extent_one_in_jit() -> None:
    x = cp.ones((1, 1, 1, 8), cp.float32)
    y = jnp.from_dlpack(x)
    assert_close(jax.jit(linear_attention)(y, y, y), jnp.ones((1, 1, 1, 8)))


# --- several devices


@pytest.mark.gpu(devices=2)
def test_the_device_of_the_arrays() -> None:
    """Committed to device 1: computed there, and the current device is that which JAX leaves."""
    x = [jax.device_put(normal(2, 300, 32, seed=i), jax.devices()[1]) for i in range(3)]
    expected = [np.asarray(g) for g in plain_gradient(*x)]
    current = cp.cuda.runtime.getDevice()
    found = gradient(*x)
    assert {g.device for g in found} == {jax.devices()[1]}
    assert_close([np.asarray(g) for g in found], expected)
    assert cp.cuda.runtime.getDevice() == current


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("axis", [0, 1])
def test_sharded_over_two_devices(axis: int) -> None:
    """Batch or heads: the calls run where their part is, and nothing is gathered."""
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2,), ("part",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = normal(2, 4, 300, 32), normal(2, 4, 300, 32, seed=1), normal(2, 4, 300, 32, seed=2)
    spec = NamedSharding(mesh, P(*(None,) * axis, "part"))
    args = [jax.device_put(y, spec) for y in x]
    text = gradient.lower(*args).compile().as_text()
    assert text.count(CALL) == 2
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    found = gradient(*args)
    assert all(g.sharding.is_equivalent_to(spec, 4) for g in found)
    assert_close([np.asarray(g) for g in found], [np.asarray(g) for g in plain_gradient(*x)])
    split = jax.shard_map(
        partial(linear_attention, causal=True),
        mesh=mesh,
        in_specs=(spec.spec,) * 3,
        out_specs=spec.spec,
    )
    inside = jax.jit(jax.grad(lambda *y: (split(*y) ** 2).sum(), argnums=(0, 1, 2)))(*args)
    assert_close([np.asarray(g) for g in inside], [np.asarray(g) for g in found])


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("causal", [True, False])
def test_one_sequence_over_two_devices(causal: bool) -> None:
    """Value, gradients and final state are those of one device, by our kernels."""
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = [normal(3, 2 * 333, 64, seed=i) for i in range(3)]
    options: dict[str, Any] = {"causal": causal, "return_state": True}
    split = jax.shard_map(
        partial(linear_attention, axis_name="seq", **options),
        mesh=mesh,
        in_specs=P(None, "seq"),
        out_specs=(P(None, "seq"), P()),
    )

    def loss(function: Any, *x: Any) -> Any:
        out, state = function(*x)
        return (out**2).sum() + 1e-3 * sum((part**2).sum() for part in state), out

    def results(function: Any) -> Any:
        gradient = jax.value_and_grad(partial(loss, function), argnums=(0, 1, 2), has_aux=True)
        program = jax.jit(gradient).lower(*x).compile()
        assert program.as_text().count("la_cupy_cuda") >= 2
        (total, out), grads = program(*x)
        return [np.asarray(y) for y in (total, out, *grads)]

    assert_close(results(split), results(partial(linear_attention, **options)))
