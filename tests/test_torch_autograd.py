"""Derivatives and transforms of the PyTorch adapter: autograd, torch.func, torch.compile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
import torch_helpers
from la_cupy.interop import _torch_formula
from la_cupy.interop.torch import linear_attention
from measures import BUDGETS, max_error
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch_helpers import EmulatedGpu

from la_cupy.problem import make_options

emulated_gpu = torch_helpers.emulated_gpu
close = torch.testing.assert_close


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(n: int = 9, m: int | None = None, dtype: Any = torch.float64) -> list[Any]:
    m = n if m is None else m
    shapes = (2, 3, n, 4), (2, 1, m, 4), (2, 1, m, 5)
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def initial_state(*lead: int, dtype: Any = torch.float64) -> list[Any]:
    """With a count large enough to keep den positive."""
    shapes = (*lead, 4, 5), (*lead, 4), (*lead, 5), lead
    parts = [normal(*shape, seed=9 + i, dtype=dtype) for i, shape in enumerate(shapes)]
    return [*parts[:3], parts[3].abs() + 10]


def attend(*x: Any, **options: Any) -> Any:
    """(out, state, den) as one tuple; x is q, k, v and perhaps the four parts of a state."""
    out, state, den = linear_attention(
        *x[:3], initial_state=x[3:] or None, return_state=True, return_normalizer=True, **options
    )
    return (out, *state, den)


def causal(*x: Any) -> Any:
    return linear_attention(*x, causal=True)


def loss(*x: Any) -> Any:
    return causal(*x).square().sum()


OPTIONS = [
    {"causal": False},
    {"causal": True, "feature_map": "elu1", "a": 1.3, "b": 0.7},
    {"causal": True, "normalize": False, "qk_norm": None},
    {"causal": False, "feature_map": "silu"},
    {"causal": True, "feature_map": "exp", "qk_norm": None, "b": 0.1},
]


# --- autograd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 6), (6, 3)])
@pytest.mark.parametrize("with_state", [False, True])
def test_first_and_second_derivatives(
    options: dict[str, Any], n: int, m: int, with_state: bool
) -> None:
    x = [t.requires_grad_() for t in (*qkv(n, m), *(initial_state(2, 1) if with_state else ()))]

    def results(*x: Any) -> Any:
        return attend(*x, **options)[:-1]

    assert torch.autograd.gradcheck(results, x, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(results, x, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("causal_", [False, True])
def test_derivatives_over_several_chunks(causal_: bool) -> None:
    """The formula cuts rows into chunks of 16 at these widths."""
    x = [t.requires_grad_() for t in qkv(37, 45)]
    results = lambda *x: linear_attention(*x, causal=causal_)
    assert torch.autograd.gradgradcheck(results, x, fast_mode=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formula_is_the_operator(options: dict[str, Any]) -> None:
    chosen = make_options(**options)
    for n, m in ((9, 9), (40, 33), (20, 50), (0, 7), (7, 0)):
        for state in ((), initial_state(), initial_state(2, 1)):
            x = (*qkv(n, m), *state)
            close(_torch_formula.linear_attention(chosen, *x), attend(*x, **options)[:-1])


@pytest.mark.parametrize("feature_map", ["identity", "relu", "elu1"])
def test_rows_of_zeros_have_no_second_derivative(feature_map: str) -> None:
    x = qkv()
    x[0][..., ::2, :] = 0
    x[1][..., ::3, :] = 0
    x = [t.requires_grad_() for t in x]
    out = linear_attention(*x, causal=True, feature_map=feature_map)
    first = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), x)
    for g in (*first[:2], *second[:2]):
        assert g.isfinite().all()
    assert (first[0][..., ::2, :] == 0).all() and (second[0][..., ::2, :] == 0).all()


def test_second_derivatives_take_memory_in_proportion_to_rows() -> None:
    def peak(n: int) -> int:
        x = [normal(1, n, 16, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
        with torch.profiler.profile(profile_memory=True) as profile:
            first = torch.autograd.grad(loss(*x), x, create_graph=True)
            torch.autograd.grad(sum(g.square().sum() for g in first), x)
        total, most = 0, 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                total += event.nbytes()
                most = max(most, total)
        return most

    short, long = peak(4096), peak(16384)
    assert 16384 * 16 * 4 < long <= 4.4 * short
    assert long < 16384 * 16384


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_second_derivatives_in_narrow_types(dtype: str) -> None:
    def second(x: list[Any]) -> Any:
        first = torch.autograd.grad(causal(*x).double().square().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), x)

    x = [t.to(getattr(torch, dtype)).requires_grad_() for t in qkv(200)]
    wide = [t.detach().double().requires_grad_() for t in x]
    for found, expected in zip(second(x), second(wide), strict=True):
        assert found.dtype == getattr(torch, dtype)
        error = max_error(found.double().numpy(), expected.numpy())
        assert error <= BUDGETS[dtype].gradient


def test_forward_mode_without_gradients_in_reverse() -> None:
    x = qkv()
    expected = jvp(causal, tuple(x), tuple(map(torch.ones_like, x)))[1]
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) for t in x]
        found = torch.autograd.forward_ad.unpack_dual(causal(*dual)).tangent
    close(found, expected)


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k, v = qkv()
    k.requires_grad_()
    out = causal(q, k, v)
    out.sum().backward()
    assert q.grad is None and v.grad is None and k.grad.shape == k.shape
    with torch.no_grad():
        assert not causal(q, k, v).requires_grad
    with torch.inference_mode():
        assert not causal(q, k, v).requires_grad


def test_gradients_through_each_result_alone() -> None:
    x = [t.requires_grad_() for t in qkv()]
    out, *state, den = attend(*x, causal=True)
    assert not den.requires_grad
    together = torch.autograd.grad([out, *state], x, [torch.ones_like(t) for t in (out, *state)])
    apart = []
    for result in (out, *state):
        results = attend(*x, causal=True)
        again = next(t for t in results if t.shape == result.shape and torch.equal(t, result))
        found = torch.autograd.grad(again, x, torch.ones_like(again), allow_unused=True)
        apart.append(
            [torch.zeros_like(t) if g is None else g for t, g in zip(x, found, strict=True)]
        )
    for total, *parts in zip(together, *apart, strict=True):
        close(sum(parts), total)


def test_pieces_through_the_state_equal_the_whole() -> None:
    x = [t.requires_grad_() for t in qkv(20)]
    whole = causal(*x)
    expected = torch.autograd.grad(whole.square().sum(), x)
    state, outs = None, []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 20)):
        pieces = (t[..., rows, :] for t in x)
        out, state = linear_attention(*pieces, causal=True, initial_state=state, return_state=True)
        outs.append(out)
    joined = torch.cat(outs, -2)
    close(joined, whole)
    close(torch.autograd.grad(joined.square().sum(), x), expected)


def test_backward_in_another_thread() -> None:
    x = [t.requires_grad_() for t in qkv()]
    expected = torch.autograd.grad(loss(*x), x)
    value, found = loss(*x), []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(value, x)))
    thread.start()
    thread.join()
    close(tuple(found), expected)


def test_checkpoint_and_saved_tensor_hooks() -> None:
    x = [t.requires_grad_() for t in qkv()]
    expected = torch.autograd.grad(loss(*x), x)
    for reentrant in (False, True):
        value = torch.utils.checkpoint.checkpoint(loss, *x, use_reentrant=reentrant)
        if reentrant:
            for t in x:
                t.grad = None
            value.backward()
            found = tuple(t.grad for t in x)
        else:
            found = torch.autograd.grad(value, x)
        close(found, expected)
    with torch.autograd.graph.save_on_cpu():
        close(torch.autograd.grad(loss(*x), x), expected)


def test_an_input_changed_before_backward_is_noticed() -> None:
    x = [t.requires_grad_() for t in qkv()]
    value = loss(*x)
    with torch.no_grad():
        x[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


# --- torch.func ----------------------------------------------------------------------------------


def test_grad_vjp_jvp_and_jacobians() -> None:
    x = tuple(qkv())
    leaves = [t.clone().requires_grad_() for t in x]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    close(grad(loss, (0, 1, 2))(*x), expected)
    value, pull = vjp(loss, *x)
    close(pull(torch.ones_like(value)), expected)
    along = tuple(normal(*t.shape, seed=20 + i) for i, t in enumerate(x))
    value, derivative = jvp(loss, x, along)
    close(derivative, sum((g * t).sum() for g, t in zip(expected, along, strict=True)))
    close(jacfwd(loss, (0, 1, 2))(*x), expected)
    close(jacrev(causal, (0, 1, 2))(*x), jacfwd(causal, (0, 1, 2))(*x))


def test_hessian() -> None:
    x = tuple(t[0, 0, :3] for t in qkv())
    found = hessian(loss, (0, 1, 2))(*x)
    expected = torch.autograd.functional.hessian(loss, x)
    for row, other in zip(found, expected, strict=True):
        close(row, other)


def test_grad_of_grad() -> None:
    x = tuple(qkv())
    leaves = [t.clone().requires_grad_() for t in x]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    expected = torch.autograd.grad(first[0].square().sum(), leaves)
    found = grad(lambda *x: grad(loss)(*x).square().sum(), (0, 1, 2))(*x)
    close(found, expected)


BATCHES = [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 1), (2, None, 0), (1, 2, 3)]


@pytest.mark.parametrize("dims", BATCHES, ids=str)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("kv_lead", [(), (1,), (2, 3)], ids=str)
def test_vmap_of_values_and_gradients(dims: Any, with_state: bool, kv_lead: Any) -> None:
    """Equal to a loop over the examples, whatever leading axes each input has."""
    size, n = 3, 5
    state = initial_state(*kv_lead) if with_state else []
    shapes = [(2, 3, n, 4), (*kv_lead, n, 4), (n, 5), *(t.shape for t in state)]
    dims = [min(d, len(s)) if d is not None else None for d, s in zip(dims, shapes, strict=False)]
    dims += [0 if i % 2 else None for i in range(len(state))]
    x = []
    for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
        shape = list(shape)
        if dim is not None:
            shape.insert(dim, size)
        x.append(normal(*shape, seed=i) if i < 6 else 10 + normal(*shape, seed=i).abs())

    def value(*x: Any) -> Any:
        return sum(t.square().sum() for t in attend(*x, causal=True)[:-1])

    def examples(i: int) -> list[Any]:
        return [t if d is None else t.select(d, i) for t, d in zip(x, dims, strict=True)]

    arguments = tuple(range(len(x)))
    for function in (lambda *x: attend(*x, causal=True), grad(value, arguments)):
        found = vmap(function, tuple(dims))(*x)
        loop = [function(*examples(i)) for i in range(size)]
        close(found, tuple(map(torch.stack, zip(*loop, strict=True))))
    found = grad(lambda *x: vmap(value, tuple(dims))(*x).sum(), arguments)(*x)
    leaves = [t.clone().requires_grad_() for t in x]
    x = leaves
    close(found, torch.autograd.grad(sum(value(*examples(i)) for i in range(size)), leaves))


def test_vmap_of_vmap_and_of_forward_mode() -> None:
    x = [t.expand(2, 3, *t.shape[2:]).clone() for t in qkv()]
    close(vmap(vmap(causal))(*x), causal(*x))
    tangents = [normal(*t.shape, seed=30 + i) for i, t in enumerate(x)]
    found = vmap(lambda *p: jvp(causal, p[:3], p[3:])[1])(*x, *tangents)
    close(found, jvp(causal, tuple(x), tuple(tangents))[1])


# --- compilers -----------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_compile(backend: str, dynamic: bool) -> None:
    def function(*x: Any) -> Any:
        *results, den = attend(*(t * 1.5 for t in x[:3]), *x[3:], causal=True, a=0.5)
        return (*(t + 1 for t in results), den)

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (9, 17):
        x = [t.requires_grad_() for t in (*qkv(n), *initial_state(2, 1))]
        found, expected = compiled(*x), function(*x)
        close(found, expected)
        assert not found[-1].requires_grad
        found, expected = (sum(t.square().sum() for t in y[:-1]) for y in (found, expected))
        close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))
    with torch.no_grad():
        close(compiled(*x), function(*x))


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_of_lazily_negated_and_mixed_types() -> None:
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    q, k, v = qkv()
    negated = torch.complex(q, q).conj().imag
    assert negated.is_neg()
    close(compiled(negated, k, v), causal(-q, k, v))
    mixed = q.float(), k.bfloat16(), v.half()
    assert compiled(*mixed).dtype == torch.float32
    close(compiled(*mixed), causal(*mixed))


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_of_vmap_and_refusal_of_derivatives_inside() -> None:
    x = [t.expand(2, 3, *t.shape[2:]).clone() for t in qkv()]
    close(torch.compile(vmap(causal), fullgraph=True, backend="aot_eager")(*x), causal(*x))
    tangents = tuple(map(torch.ones_like, x))
    for function in (grad(loss), lambda *x: jvp(causal, x, tangents)[1]):
        with pytest.raises(Exception, match="torch.func differentiates linear_attention inside"):
            torch.compile(function, fullgraph=True, backend="aot_eager")(*x)


@pytest.mark.usefixtures("fresh_compiler")
def test_errors_come_out_of_the_compiler() -> None:
    q, k, v = qkv()
    with pytest.raises(Exception, match="q has D = 4 in its last axis and k has D = 3"):
        torch.compile(causal, fullgraph=True, backend="aot_eager")(q, k[..., :3], v)


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return causal(q, k, v)

    x = tuple(qkv())
    program = torch.export.export(Layer(), x)
    close(program.module()(*x), causal(*x))
    assert "la_cupy.forward" in str(program.graph)


def op_arguments(requires_grad: bool, with_state: bool) -> tuple[tuple[Any, ...], ...]:
    options = (True, 1.0, 0.5, "l2", "elu1", True, "highest")
    x = [t[:, :2].detach() for t in qkv(5)]
    state = [t[:, :2].detach() for t in initial_state(2, 1)] if with_state else []
    out, den, *final = torch.ops.la_cupy.forward(*x, state, True, *options)
    for t in (*x, *state):
        t.requires_grad_(requires_grad)
    dstate = final if with_state else []
    return (*x, state, True, *options), (out, *x, den, state, dstate, *options)


@pytest.mark.parametrize(
    ("requires_grad", "with_state"), [(False, False), (False, True), (True, False)]
)
def test_opcheck(requires_grad: bool, with_state: bool) -> None:
    forward, backward = op_arguments(requires_grad, with_state)
    torch.library.opcheck(torch.ops.la_cupy.forward.default, forward)
    torch.library.opcheck(torch.ops.la_cupy.vjp.default, backward)


# --- the GPU's path ------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
def test_transforms_on_an_emulated_gpu(emulated_gpu: type[EmulatedGpu]) -> None:
    assert torch.empty(5).isnan().all(), "memory is poisoned"
    x = [t.requires_grad_() for t in qkv(dtype=torch.float32)]
    wide = [t.detach().double().requires_grad_() for t in x]
    expected = torch.autograd.grad(loss(*wide), wide)
    functions: list[Callable[..., Any]] = [
        loss,
        torch.compile(loss, fullgraph=True, backend="aot_eager"),
        lambda *x: vmap(loss)(*x).sum(),
    ]
    for function in functions:
        found = torch.autograd.grad(function(*x), x)
        for g, other in zip(found, expected, strict=True):
            assert max_error(g.numpy(), other.numpy()) <= BUDGETS["float32"].gradient
    assert emulated_gpu.plans
    forward, backward = op_arguments(True, True)
    torch.library.opcheck(torch.ops.la_cupy.forward.default, forward)
    torch.library.opcheck(
        torch.ops.la_cupy.vjp.default, backward, test_utils=("test_schema", "test_faketensor")
    )


# --- who looks on ---------------------------------------------------------------------------------


def test_modes_and_subclasses_see_the_ops() -> None:
    """Eager calls go past the dispatcher, but not where it has something to do."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.ops.append(str(op))
            return op(*args, **(kwargs or {}))

    q, k, v = (torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with Seen() as seen:
        linear_attention(q, k, v, causal=True).sum().backward()
    named = [name for name in seen.ops if name.startswith("la_cupy")]
    assert named == ["la_cupy.forward.default", "la_cupy.vjp.default"]

    class Logged(torch.Tensor):
        ops: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.ops.append(str(op))
            return super().__torch_function__(op, types, args, kwargs)

    linear_attention(q.detach().as_subclass(Logged), k.detach(), v.detach())
    assert "la_cupy.forward.default" in Logged.ops


# --- digits, and what a caller of the op leaves out -----------------------------------------------


@pytest.mark.parametrize("is_causal", [True, False])
def test_second_derivatives_and_forward_mode_where_v_is_far_from_zero(is_causal: bool) -> None:
    """A constant on v is no part of what q and k are told."""
    wide = qkv(600)
    wide[2] = 1000 + wide[2]
    narrow = [x.float() for x in wide]
    exact = [x.double() for x in narrow]

    def derivatives(x: list[Any]) -> list[Any]:
        def function(q: Any, k: Any) -> Any:
            return linear_attention(q, k, x[2], causal=is_causal)

        tangents = x[0].cos(), x[1].sin()
        along = jvp(function, (x[0], x[1]), tangents)[1]
        first = grad(lambda q, k: function(q, k).square().mean(), argnums=(0, 1))
        return [along, *vjp(first, x[0], x[1])[1](tangents)]

    limit = BUDGETS["float32"].gradient
    for found, expected in zip(derivatives(narrow), derivatives(exact), strict=True):
        assert max_error(found.detach().numpy(), expected.detach().numpy()) <= limit


def test_the_op_without_a_normalizer() -> None:
    """It makes den itself, under gradients and vmap, too."""
    x = [t.requires_grad_() for t in qkv(9)]
    dout = normal(2, 3, 9, 5, seed=8, dtype=torch.float64)
    options = (True, 1.0, 1.0, "l2", "identity", True, "highest")

    def op(dout: Any, *x: Any) -> Any:
        return torch.ops.la_cupy.vjp(dout, *x, None, [], [], *options)

    expected = torch.autograd.grad(causal(*x), x, dout, create_graph=True)
    close(op(dout, *x), list(expected))
    close(vmap(op)(dout, *(t.detach() for t in x)), [t.detach() for t in expected])
    second, known = (
        torch.autograd.grad(sum(g.square().sum() for g in grads), x)
        for grads in (op(dout, *x), expected)
    )
    close(second, known)
