"""The public functions: dispatch, refusals and what comes back; with a fake backend.

Right numbers are the business of the tests of the backends.
"""

import dataclasses
import doctest
import inspect
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from fakes import Array, Backend, make_state, ndarray, on_gpu, qkv

import la_cupy as la
from la_cupy import api, arrays, checked, checks, dtypes

backends, cpu, gpu = fakes.backends, fakes.cpu, fakes.gpu


# -- what comes back, and what the backend is given ----------------------------------------


@pytest.mark.parametrize("library", ["numpy", "cupy"])
def test_results_come_in_the_order_out_state_normalizer(
    backends: dict[str, Backend], library: str
) -> None:
    x = qkv() if library == "numpy" else on_gpu(qkv())
    out = la.linear_attention(*x)
    assert isinstance(out, Array) and out.shape == (3, 5, 4)
    out, state = la.linear_attention(*x, return_state=True)
    assert isinstance(state, la.State) and state.kv.shape == (3, 8, 4)
    _, den = la.linear_attention(*x, return_normalizer=True)
    assert den == "den"
    _, state, den = la.linear_attention(*x, return_state=np.bool_(True), return_normalizer=True)
    assert isinstance(state, la.State) and den == "den"
    assert [call[-1] for call in backends[library].calls] == [False, True, False, True]
    assert not backends["cupy" if library == "numpy" else "numpy"].calls


def test_the_backend_is_given_the_arrays_themselves(gpu: Backend) -> None:
    q, k, v = on_gpu(qkv())
    state = on_gpu(make_state(3))
    out = ndarray(np.zeros((3, 5, 4), np.float32))
    assert la.linear_attention(q, k, v, initial_state=tuple(state), out=out) is out
    _, *given, target, want = gpu.calls[-1]
    assert given[:3] == [q, k, v] and given[3] == state and isinstance(given[3], la.State)
    assert target is out and want is False


def test_vjp_passes_everything_on(gpu: Backend) -> None:
    x = on_gpu((np.zeros((3, 5, 4)), *qkv()))
    den = ndarray(np.zeros((3, 5)))
    state, dstate = on_gpu(make_state(3)), on_gpu(make_state())
    options = {"normalizer": den, "initial_state": state, "dstate": dstate, "b": 2, "causal": True}
    assert la.linear_attention_vjp(*x, **options).q == "dq"
    problem, *given = gpu.calls[-1]
    assert given == [*x, den, state, dstate]
    assert problem.dout is not None and problem.options.b == 2.0
    la.linear_attention_vjp(*x)
    assert gpu.calls[-1][1:] == (*x, None, None, None)


def test_wide_heads_are_for_the_cpu_only(backends: dict[str, Backend]) -> None:
    wide = np.zeros((5, 257), np.float32)
    assert la.linear_attention(wide, wide, wide).shape == (5, 257)
    with pytest.raises(ValueError, match="q has D = 257, but the GPU kernels take D up to 256"):
        la.linear_attention(*on_gpu((wide, wide, wide)))
    with pytest.raises(ValueError, match="q has D = 257"):
        la.linear_attention_vjp(*on_gpu((wide, wide, wide, wide)))
    x = on_gpu((wide[:, :256], wide[:, :256], wide))
    with pytest.raises(ValueError, match="v has E = 257"):
        la.linear_attention(*x)


@pytest.mark.parametrize("option", ["causal", "a", "qk_norm", "out", "initial_state"])
def test_options_are_keyword_only(option: str) -> None:
    for function in (la.linear_attention, la.linear_attention_vjp, la.explain):
        parameters = inspect.signature(function).parameters
        if option in parameters:
            assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
    with pytest.raises(TypeError, match="positional"):
        la.linear_attention(*qkv(), True)  # type: ignore[call-overload]


# -- which arrays are taken ----------------------------------------------------------------


class Quantity(np.ndarray):
    pass


class Subclass(ndarray):
    __module__ = "mine"


class Tensor:
    __module__ = "torch"
    dtype, shape = "float32", (5, 8)

    def __dlpack__(self) -> None: ...


class ArrayImpl(Tensor):
    __module__ = "jaxlib._jax"


class Other(Tensor):
    __module__ = "mlx.core"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([[1.0]], r"q is list.*numpy.asarray\(q, dtype='float32'\).*la_cupy.interop"),
        (1.0, "q is float.*la_cupy.interop"),
        (None, "q is NoneType.*la_cupy.interop"),
        (np.float32(1), "q is float32"),
        (
            Tensor(),
            r"q is a torch.Tensor.*la_cupy.interop.torch.linear_attention.*from_dlpack\(q\)",
        ),
        (ArrayImpl(), "q is a jaxlib.ArrayImpl.*la_cupy.interop.jax.linear_attention"),
        (Other(), r"q is a mlx.Other.*write la_cupy.interop.from_dlpack\(q\)"),
        (np.ones((1, 1)).view(np.matrix), r"q is a numpy.matrix, a subclass.*numpy.asarray\(q\)"),
        (np.ma.ones((1, 1)), r"q is a numpy.MaskedArray, whose mask.*q.filled\(0\)"),
        (np.ones((1, 1)).view(Quantity), r"Quantity, a subclass of numpy.ndarray"),
        (np.rec.array(np.ones((1, 1))), r"recarray, a subclass"),
        (Subclass(np.ones((1, 1))), r"q is a mine.Subclass, a subclass of cupy.ndarray"),
    ],
)
def test_other_arrays_are_refused(backends: dict[str, Backend], wrong: Any, message: str) -> None:
    x = np.ones((1, 1))
    for call in (
        lambda: la.linear_attention(wrong, x, x),
        lambda: la.linear_attention_vjp(x, wrong, x, x),
        lambda: la.explain(wrong, x, x),
    ):
        with pytest.raises(TypeError, match=message) as info:
            call()
        assert info.value.__context__ is None and "\n" not in str(info.value)


def test_every_array_argument_is_looked_at(backends: dict[str, Backend]) -> None:
    q, k, v = qkv()
    dout, den, state = np.zeros((3, 5, 4)), np.zeros((3, 5)), make_state(3)
    bad_state = state._replace(v_sum=[1.0])
    for name, call in {
        "k": lambda: la.linear_attention(q, [1.0], v),
        "v": lambda: la.linear_attention(q, k, [1.0]),
        "out": lambda: la.linear_attention(q, k, v, out=[1.0]),
        "initial_state.v_sum": lambda: la.linear_attention(q, k, v, initial_state=bad_state),
        "dout": lambda: la.linear_attention_vjp([1.0], q, k, v),
        "normalizer": lambda: la.linear_attention_vjp(dout, q, k, v, normalizer=[1.0]),
        "dstate.v_sum": lambda: la.linear_attention_vjp(
            dout, q, k, v, normalizer=den, initial_state=state, dstate=bad_state
        ),
    }.items():
        with pytest.raises(TypeError, match=f"^{name} is list"):
            call()


def test_numpy_with_cupy_is_refused(backends: dict[str, Backend]) -> None:
    q, k, v = qkv()
    gq, gk, gv = on_gpu((q, k, v))
    with pytest.raises(
        TypeError, match="q is a NumPy array and k a CuPy array.*asarray.q.*asnumpy.k."
    ):
        la.linear_attention(q, gk, v)
    with pytest.raises(
        TypeError, match="q is a CuPy array and v a NumPy array.*asarray.v.*asnumpy.q."
    ):
        la.linear_attention(gq, gk, v)
    with pytest.raises(TypeError, match="q is a CuPy array and out a NumPy array"):
        la.linear_attention(gq, gk, gv, out=np.zeros((3, 5, 4), np.float32))
    with pytest.raises(TypeError, match="initial_state.kv a NumPy array"):
        la.linear_attention(gq, gk, gv, initial_state=make_state(3))
    with pytest.raises(TypeError, match="q is a CuPy array and dout a NumPy array"):
        la.linear_attention_vjp(np.zeros((3, 5, 4)), gq, gk, gv)


def test_devices_must_agree(gpu: Backend) -> None:
    q, k, v = qkv()
    la.linear_attention(*on_gpu((q, k, v), device=1))
    mixed = (ndarray(q), ndarray(k, device=1), ndarray(v))
    with pytest.raises(ValueError, match=r"q is on device 0 and k on device 1.*Device\(0\)"):
        la.linear_attention(*mixed)
    with pytest.raises(ValueError, match="q is on device 0 and out on device 2"):
        out = ndarray(np.zeros((3, 5, 4), np.float32), device=2)
        la.linear_attention(*on_gpu((q, k, v)), out=out)
    with pytest.raises(ValueError, match="initial_state.kv on device 3"):
        state = on_gpu(make_state(3), device=3)
        la.linear_attention(*on_gpu((q, k, v)), initial_state=state)
    with pytest.raises(ValueError, match="q is on device 0 and dout on device 1"):
        la.linear_attention_vjp(ndarray(np.zeros((3, 5, 4)), device=1), *on_gpu((q, k, v)))


def test_a_number_on_the_gpu_is_not_read(backends: dict[str, Backend]) -> None:
    with pytest.raises(TypeError, match="b is a CuPy array.*wait for the GPU"):
        la.linear_attention(*qkv(), b=ndarray(np.array(1.0)))


def test_memmaps_and_numpy_scalars_become_arrays(cpu: Backend, tmp_path: Path) -> None:
    q, k, v = qkv()
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=q.shape)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(3, 5, 4))
    for _ in range(2):
        state = la.State(*(part[0] for part in make_state(3)))  # its count is a numpy.float64
        assert la.linear_attention(mapped, k, v, initial_state=state, out=out) is out
        _, *given, target, _ = cpu.calls[-1]
        assert all(type(x) is np.ndarray for x in (*given[:3], *given[3], target))
        assert np.shares_memory(given[0], mapped) and np.shares_memory(target, out)
    dout = np.memmap(tmp_path / "dout", np.float32, "w+", shape=(3, 5, 4))
    la.linear_attention_vjp(dout, q, k, v, dstate=state)
    assert all(type(x) is np.ndarray for x in (cpu.calls[-1][1], *cpu.calls[-1][-1]))


# -- explain -------------------------------------------------------------------------------


def test_explain_on_the_cpu() -> None:
    q, k, v = qkv()
    plan = la.explain(q, k, v, causal=True, return_state=True, initial_state=make_state(3))
    assert isinstance(plan, api.CpuPlan) and "NumPy" in plan.reason
    text = str(plan)
    assert text.startswith("forward on the CPU") and "causal=True" in text and plan.reason in text
    text = str(la.explain(q, k, v, dout=np.zeros((3, 5, 4)), dstate=make_state()))
    assert text.startswith("backward on the CPU")


def test_explain_on_the_gpu_asks_the_launcher(gpu: Backend) -> None:
    plan = la.explain(*on_gpu(qkv()), b=2)
    assert plan.startswith("plan of Problem(options=Options(causal=False, a=1.0, b=2.0")
    assert not gpu.calls


def test_explain_raises_what_the_call_would() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        la.explain(q, k, v, casual=True)
    with pytest.raises(ValueError, match="feature_map"):
        la.explain(q, k, v, feature_map="none")
    with pytest.raises(ValueError, match="k has 7 rows"):
        la.explain(q, k, v[:, :6])
    with pytest.raises(TypeError, match="dstate came without dout"):
        la.explain(q, k, v, dstate=make_state())


# -- the package ---------------------------------------------------------------------------


def test_public_names() -> None:
    for name in la.__all__:
        assert getattr(la, name) is not None
    assert la.State._fields == ("kv", "k_sum", "v_sum", "count")
    assert la.Gradients._fields == ("q", "k", "v", "initial_state")


def test_options_are_the_same_everywhere() -> None:
    forward = inspect.signature(la.linear_attention).parameters
    backward = inspect.signature(la.linear_attention_vjp).parameters
    assert [*forward][-4:] == ["return_state", "return_normalizer", "precision", "out"]
    assert len(forward) == 14
    shared = [name for name in forward if name in backward and name not in "qkv"]
    assert len(shared) == 8
    assert all(forward[name].default == backward[name].default for name in shared)
    assert set(api.OperatorOptions.__annotations__) == set(shared)
    documented = inspect.getdoc(la.linear_attention) or ""
    assert all(f'"{name}"' in documented for name in checks.FEATURE_MAPS)


def test_public_results_are_picklable() -> None:
    plan = la.explain(*qkv())
    grads = la.Gradients(*qkv(), make_state())
    for x in (plan, plan.problem):
        assert pickle.loads(pickle.dumps(x)) == x
        with pytest.raises(dataclasses.FrozenInstanceError):
            x.reason = ""
    assert type(pickle.loads(pickle.dumps(grads)).initial_state) is la.State


@pytest.mark.parametrize(
    "module", [api, arrays, checked, checks, dtypes, la], ids=lambda m: m.__name__
)
def test_docstrings_run(module: types.ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_imports_and_computes_with_nothing_else_installed() -> None:
    code = """
import sys
blocked = {"cupy", "cupyx", "cupy_backends", "jax", "jaxlib", "torch", "tqdm"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
import numpy as np, la_cupy
x = np.ones((3, 4), np.float32)
assert (la_cupy.linear_attention(x, x, x) == 1).all()
la_cupy.explain(x, x, x)
assert not blocked & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
