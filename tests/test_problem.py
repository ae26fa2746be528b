"""(arrays, options) -> Problem: what it holds, and one sentence for every misuse."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from la_cupy import State
from la_cupy.problem import Layout, Problem, backward_problem, forward_problem, make_options

Array = np.ndarray


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def qkv(
    q: tuple[int, ...] = (2, 3, 5, 8),
    k: tuple[int, ...] = (2, 3, 7, 8),
    v: tuple[int, ...] = (2, 3, 7, 4),
    dtype: Any = np.float32,
) -> tuple[Array, Array, Array]:
    return zeros(*q, dtype=dtype), zeros(*k, dtype=dtype), zeros(*v, dtype=dtype)


def state(*lead: int, d: int = 8, e: int = 4, dtype: Any = np.float32) -> State:
    shapes = ((*lead, d, e), (*lead, d), (*lead, e), lead)
    return State(*(np.zeros(shape, dtype) for shape in shapes))


def one_sentence(info: pytest.ExceptionInfo[Exception]) -> None:
    """What arrived and what is allowed, in one sentence, and no other exception before it."""
    message = str(info.value)
    assert "\n" not in message and not message.endswith("."), message
    assert message[0].islower() or message.startswith("("), message
    assert info.value.__context__ is None or info.value.__suppress_context__


# -- what a Problem holds ------------------------------------------------------------------


def test_sizes_and_broadcast_leads() -> None:
    q, k, v = qkv((4, 2, 3, 5, 8), (4, 2, 1, 7, 8), (2, 1, 7, 6))
    p = forward_problem(q, k, v, causal=True)
    assert (p.lead, p.state_lead) == ((4, 2, 3), (4, 2, 1))
    assert (p.n, p.m, p.d, p.e) == (5, 7, 8, 6)
    assert p.out_shape == (4, 2, 3, 5, 6)
    assert p.options.causal is True
    assert p.dout is p.initial_state is p.dstate is None


def test_an_initial_state_extends_the_leads() -> None:
    q, k, v = qkv((5, 8), (7, 8), (7, 4))
    p = forward_problem(q, k, v, initial_state=state(3))
    assert p.lead == p.state_lead == (3,)
    parts = state(3)._replace(count=zeros(2, 1))
    assert forward_problem(q, k, v, initial_state=parts).state_lead == (2, 3)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("float32", "float32", "bfloat16"), ("float32", "float32", "float32")),
        (("float16", "bfloat16", "bfloat16"), ("float32", "float32", "float32")),
        (("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "float32")),
        (("float16", "float64", "float16"), ("float64", "float64", "float64")),
    ],
)
def test_types_promote(types: tuple[str, str, str], expected: tuple[str, str, str]) -> None:
    named = {"bfloat16": ml_dtypes.bfloat16}
    q, k, v = (x.astype(named.get(t, t)) for x, t in zip(qkv(), types, strict=True))
    p = forward_problem(q, k, v, initial_state=state(2, 3, dtype=np.float64))
    assert (p.dtype, p.compute, p.state_dtype) == expected
    assert (p.q.dtype, p.k.dtype, p.v.dtype) == types


def test_dout_widens_the_arithmetic_but_not_the_result() -> None:
    q, k, v = qkv(dtype=np.float16)
    p = backward_problem(zeros(2, 3, 5, 4, dtype=np.float64), q, k, v, dstate=state())
    assert (p.dtype, p.compute, p.state_dtype) == ("float16", "float64", "float64")
    assert p.dout is not None and p.dout.dtype == "float64"
    assert p.dstate is not None and p.dstate[0].shape == (8, 4)


def test_strides_count_elements_and_ignore_axes_of_extent_one() -> None:
    fused = zeros(5, 3, 2, 24, dtype=np.float16)
    q, k, v = (fused[..., i * 8 : i * 8 + 8].transpose(1, 2, 0, 3) for i in range(3))
    p = forward_problem(
        q[::-1], np.broadcast_to(k[:1, :1], k.shape), v[:, :, :1, :1][:, :, [0] * 5]
    )
    assert p.q == Layout("float16", (3, 2, 5, 8), (-48, 24, 144, 1))
    assert p.k.strides == (0, 0, 144, 1)
    odd = np.lib.stride_tricks.as_strided(zeros(4), (1, 4, 1), (12345, 4, 999))
    assert forward_problem(odd, odd, odd).q.strides == (0, 1, 1)


def test_empty_axes_are_shapes_like_any_other() -> None:
    assert forward_problem(*qkv((0, 5, 8), (0, 7, 8), (1, 7, 4))).out_shape == (0, 5, 4)
    assert forward_problem(*qkv((2, 0, 8), (2, 7, 8), (2, 7, 4))).out_shape == (2, 0, 4)
    assert forward_problem(*qkv((2, 5, 8), (2, 0, 8), (2, 0, 4))).m == 0


def test_equal_calls_make_equal_problems() -> None:
    first, second = (forward_problem(*qkv(), initial_state=state()) for _ in range(2))
    assert first == second and hash(first) == hash(second) and first is not second
    assert first != forward_problem(*qkv())
    assert "causal=False" in repr(first)


def test_pickle_carries_no_hash_into_another_process() -> None:
    """str hashes differ between processes, and a Problem remembers its own."""
    p = forward_problem(*qkv(), initial_state=state())
    hash(p)
    code = (
        "import pickle, sys; p = pickle.load(sys.stdin.buffer); q = pickle.loads(pickle.dumps(p));"
        "assert p == q and hash(p) == hash(q) and '_hash' in vars(p);"
        "from dataclasses import replace; assert hash(replace(p)) == hash(p)"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(p), check=True)


# -- options -------------------------------------------------------------------------------


ONES = [1, 1.0, True, np.float32(1), np.int32(1), np.bool_(True), np.float16(1), np.longdouble(1)]
ONES += [
    np.array(1.0),
    np.array(1, np.int8),
    ml_dtypes.bfloat16(1),
    np.array(1, ml_dtypes.bfloat16),
]


@pytest.mark.parametrize("one", ONES)
def test_equal_numbers_are_equal_options(one: Any) -> None:
    options = make_options(a=one, b=one)
    assert options == make_options()
    assert type(options.a) is type(options.b) is float


def test_minus_zero_is_zero() -> None:
    assert str(make_options(a=-0.0).a) == "0.0"
    assert str(make_options(a=np.float32(-0.0)).a) == "0.0"


class ndarray:  # stands in for cupy.ndarray
    __module__ = "cupy"
    ndim = 0
    dtype = np.dtype(np.float32)


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"a": float("nan")}, ValueError, "a is nan, but must be finite"),
    ({"b": float("-inf")}, ValueError, "b is -inf, but must be finite"),
    ({"b": np.array(np.inf)}, ValueError, "b is inf, but must be finite"),
    ({"a": 10**400}, ValueError, "must be finite"),
    ({"a": "1"}, TypeError, "a is a str, but must be a real number"),
    ({"a": None}, TypeError, "a is a NoneType, but must be a real number"),
    ({"a": 1j}, TypeError, "a is a complex, but must be a real number"),
    ({"a": np.array(1j)}, TypeError, "must be a real number"),
    ({"b": [1.0]}, TypeError, "b is a list, but must be a real number"),
    ({"b": np.ones(1)}, TypeError, "b is a ndarray, but must be a real number"),
    ({"b": np.array("1")}, TypeError, "must be a real number"),
    ({"b": np.array(1, object)[None]}, TypeError, "must be a real number"),
    ({"b": np.ma.masked}, TypeError, "must be a real number"),
    ({"b": ndarray()}, TypeError, "b is a CuPy array.*wait for the GPU.*write float.b."),
    ({"causal": 1}, TypeError, "causal is 1 of type int, but must be True or False"),
    ({"causal": None}, TypeError, "must be True or False"),
    ({"normalize": "yes"}, TypeError, "normalize is 'yes' of type str, but must be True or False"),
    ({"qk_norm": "L2"}, ValueError, "qk_norm is 'L2', but must be one of 'l2', None"),
    ({"qk_norm": False}, TypeError, "qk_norm is False, but must be one of 'l2', None"),
    ({"feature_map": "elu"}, ValueError, "feature_map is 'elu', but must be one of .*'elu1'"),
    ({"feature_map": None}, ValueError, "feature_map is None, but must be one of"),
    ({"feature_map": np.exp}, TypeError, "but must be one of"),
    ({"feature_map": ["relu"]}, TypeError, "but must be one of"),
    (
        {"precision": "high"},
        ValueError,
        "precision is 'high', but must be one of 'highest', 'tf32'",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as info:
        forward_problem(*qkv(), **options)
    one_sentence(info)


def test_numpy_strings_and_bools_become_plain() -> None:
    options = make_options(causal=np.bool_(True), feature_map=np.str_("relu"))
    assert type(options.causal) is bool and type(options.feature_map) is str


def test_a_factor_beyond_float32_needs_float64() -> None:
    with pytest.raises(ValueError, match=r"a is 1e\+300, but must be at most 3.4e\+38") as info:
        forward_problem(*qkv(), a=1e300)
    one_sentence(info)
    assert forward_problem(*qkv(dtype=np.float64), a=1e300).options.a == 1e300


# -- arrays --------------------------------------------------------------------------------


def forward(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Problem:
    given = [usual if x is None else x for x, usual in zip((q, k, v), qkv(), strict=True)]
    return forward_problem(*given, **options)


def backward(dout: Array | None = None, **options: Any) -> Problem:
    return backward_problem(zeros(2, 3, 5, 4) if dout is None else dout, *qkv(), **options)


def overlapping() -> Array:
    return np.lib.stride_tricks.as_strided(zeros(64), (2, 3, 5, 4), (80, 32, 16, 8))


VALUE_ERRORS: dict[str, tuple[Callable[[], Problem], str]] = {
    "0 axes": (lambda: forward(q=np.float32(1)), r"q has shape \(\), but needs at least 2"),
    "1 axis": (
        lambda: forward(k=zeros(8)),
        r"k has shape \(8,\).*\(\.\.\., M, D\).*write k\[None, :\]",
    ),
    "v 1 axis": (lambda: forward(v=zeros(8)), r"v has shape \(8,\).*\(\.\.\., M, E\)"),
    "D differs": (lambda: forward(k=zeros(2, 3, 7, 9)), "q has D = 8 .* and k has D = 9"),
    "M differs": (lambda: forward(v=zeros(2, 3, 6, 4)), "k has 7 rows and v has 6"),
    "D is 0": (lambda: forward(q=zeros(2, 3, 5, 0)), "its last axis, D, must be at least 1"),
    "E is 0": (lambda: forward(v=zeros(2, 3, 7, 0)), "its last axis, E, must be at least 1"),
    "leads": (
        lambda: forward(v=zeros(2, 2, 7, 4)),
        r"q \(2, 3\), k \(2, 3\) and v \(2, 2\) do not broadcast",
    ),
    "6 on 2 heads": (
        lambda: forward(zeros(2, 6, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 4)),
        r"q.reshape\(2, 2, 3, 5, 8\) with k\[\.\.\., None, :, :\] and v\[\.\.\., None, :, :\]",
    ),
    "7 on 2 heads": (
        lambda: forward(zeros(2, 7, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 4)),
        r"\(7\) must be a multiple of .*key heads \(2\).*q.reshape\(\.\.\., 2, G, N, D\)",
    ),
    "no query heads": (
        lambda: forward(zeros(2, 0, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 4)),
        "do not broadcast",
    ),
    "batches": (
        lambda: forward(zeros(3, 5, 8), zeros(2, 7, 8), zeros(2, 7, 4)),
        "do not broadcast",
    ),
    "packed fields": (
        lambda: forward(zeros(2, 3, 5, 8, dtype="f4,i2")["f0"]),
        r"q has strides .* q.copy\(\)",
    ),
    "width D": (lambda: forward(width_limit=7), "q has D = 8, but the GPU kernels take D up to 7"),
    "width E": (
        lambda: forward(v=zeros(2, 3, 7, 9), width_limit=8),
        "v has E = 9, but .* E up to 8",
    ),
    "out shape": (
        lambda: forward(out=zeros(2, 3, 7, 4)),
        r"out has shape \(2, 3, 7, 4\), but must have .*\(2, 3, 5, 4\)",
    ),
    "out lead": (lambda: forward(out=zeros(3, 5, 4)), "out has shape"),
    "out dtype": (
        lambda: forward(out=zeros(2, 3, 5, 4, dtype="f8")),
        "out has dtype float64, but .* has float32",
    ),
    "out stride 0": (
        lambda: forward(out=np.broadcast_to(zeros(4), (2, 3, 5, 4))),
        "elements overlap each other",
    ),
    "out overlaps itself": (
        lambda: forward(out=overlapping()),
        "out has .* elements overlap each other",
    ),
    "state kv": (
        lambda: forward(initial_state=state(d=4, e=8)),
        r"initial_state.kv has shape \(4, 8\), but must have \(\.\.\., D, E\) with D = 8, E = 4",
    ),
    "state v_sum": (
        lambda: forward(initial_state=state()._replace(v_sum=zeros(8))),
        "initial_state.v_sum has shape",
    ),
    "state lead": (
        lambda: forward(initial_state=state(5)),
        r"initial_state .*kv \(5,\).* do not broadcast with those of k and v, \(2, 3\)",
    ),
    "state parts": (
        lambda: forward(initial_state=state(3)._replace(count=zeros(2))),
        r"count \(2,\)",
    ),
    "state of q": (
        lambda: forward(q=zeros(4, 5, 8), k=zeros(7, 8), v=zeros(7, 4), initial_state=state(3)),
        "never those of q",
    ),
    "dout shape": (
        lambda: backward(zeros(2, 3, 7, 4)),
        r"dout has shape \(2, 3, 7, 4\), but must have the shape of out, \(2, 3, 5, 4\)",
    ),
    "dout broadcast": (lambda: backward(zeros(5, 4)), "dout has shape"),
    "normalizer shape": (
        lambda: backward(normalizer=zeros(2, 3, 5, 1)),
        r"normalizer has shape \(2, 3, 5, 1\), but .*\(2, 3, 5\)",
    ),
    "dstate core": (lambda: backward(dstate=state(d=7)), r"dstate.kv has shape \(7, 4\)"),
    "dstate too large": (
        lambda: backward(dstate=state(4, 2, 3)),
        r"dstate .* do not broadcast to the final state's, \(2, 3\)",
    ),
    "dstate wider axis": (
        lambda: backward_problem(
            zeros(5, 4), zeros(5, 8), zeros(7, 8), zeros(7, 4), dstate=state(2)
        ),
        "dstate",
    ),
}
TYPE_ERRORS: dict[str, tuple[Callable[[], Problem], str]] = {
    "integers": (
        lambda: forward(zeros(2, 3, 5, 8, dtype=int)),
        r"q has dtype int64.*write q.astype\('float32'\)",
    ),
    "bool": (lambda: forward(k=zeros(2, 3, 7, 8, dtype=bool)), "k has dtype bool"),
    "complex": (lambda: forward(v=zeros(2, 3, 7, 4, dtype="c8")), "v has dtype complex64"),
    "object": (lambda: forward(zeros(2, 3, 5, 8, dtype=object)), "q has dtype object"),
    "float8": (
        lambda: forward(zeros(2, 3, 5, 8, dtype=ml_dtypes.float8_e5m2)),
        "q has dtype float8_e5m2",
    ),
    "struct": (lambda: forward(zeros(2, 3, 5, 8, dtype="f4,f4")), "q has dtype"),
    "byte order": (
        lambda: forward(zeros(2, 3, 5, 8, dtype=">f4")),
        "q has dtype >f4 in foreign byte order",
    ),
    "out int": (lambda: forward(out=zeros(2, 3, 5, 4, dtype=int)), "out has dtype int64"),
    "state type": (
        lambda: forward(initial_state=zeros(8, 4)),
        "initial_state is a ndarray, but must be a State",
    ),
    "state list": (
        lambda: forward(initial_state=list(state())),
        "initial_state is a list of 4, but must be a State",
    ),
    "state of 3": (
        lambda: forward(initial_state=tuple(state())[:3]),
        "initial_state is a tuple of 3",
    ),
    "state part": (
        lambda: forward(initial_state=state()._replace(count=None)),
        "initial_state.count is None.*pass zeros",
    ),
    "state dtype": (
        lambda: forward(initial_state=state(dtype=int)),
        "initial_state.kv has dtype int64",
    ),
    "dout dtype": (lambda: backward(zeros(2, 3, 5, 4, dtype=int)), "dout has dtype int64"),
    "normalizer dtype": (
        lambda: backward(normalizer=zeros(2, 3, 5, dtype=int)),
        "normalizer has dtype int64",
    ),
    "dstate type": (lambda: backward(dstate=1.0), "dstate is a float, but must be a State"),
    "dstate part": (lambda: backward(dstate=state()._replace(kv=None)), "dstate.kv is None"),
}


@pytest.mark.parametrize(("call", "message"), VALUE_ERRORS.values(), ids=VALUE_ERRORS)
def test_wrong_values(call: Callable[[], Problem], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        call()
    one_sentence(info)


@pytest.mark.parametrize(("call", "message"), TYPE_ERRORS.values(), ids=TYPE_ERRORS)
def test_wrong_types(call: Callable[[], Problem], message: str) -> None:
    with pytest.raises(TypeError, match=message) as info:
        call()
    one_sentence(info)


def test_the_suggested_reshape_works() -> None:
    q, k, v = qkv((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 4))
    p = forward_problem(q.reshape(2, 2, 3, 5, 8), k[..., None, :, :], v[..., None, :, :])
    assert (p.lead, p.state_lead) == ((2, 2, 3), (2, 2, 1))


@pytest.mark.parametrize(
    "view",
    [
        lambda: zeros(2, 5, 3, 4).swapaxes(1, 2),
        lambda: zeros(2, 3, 5, 12)[..., 4:8],
        lambda: zeros(2, 3, 10, 8)[:, :, ::-2, ::2],
        lambda: zeros(4, 5, 3, 2).T,
        lambda: np.lib.stride_tricks.as_strided(zeros(120), (2, 3, 5, 4), (240, 80, 16, 4)),
    ],
)
def test_out_may_be_any_ordinary_view(view: Callable[[], Array]) -> None:
    assert forward(out=view()).out_shape == (2, 3, 5, 4)


def test_a_state_may_be_a_tuple_and_broadcast() -> None:
    p = backward(initial_state=tuple(state(3, dtype=np.float16)), dstate=tuple(state(2, 1)))
    assert p.initial_state is not None and p.initial_state[3] == Layout("float16", (3,), (1,))
    assert p.dstate is not None and p.dstate[3] == Layout("float32", (2, 1), (1, 0))
    assert p.state_lead == (2, 3)
