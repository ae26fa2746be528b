"""The PyTorch adapter as a user meets it: types, layouts, errors, autocast, sdpa, Transformers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import typing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from la_cupy.interop import _torch_run
from la_cupy.interop import torch as adapter
from la_cupy.interop.torch import linear_attention, scaled_dot_product_attention

import la_cupy as la

close = torch.testing.assert_close


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(dtype: Any = torch.float32, heads: int = 2, n: int = 9) -> list[Any]:
    return [normal(2, heads, n, 8, seed=i, dtype=dtype) for i in range(3)]


# --- results -------------------------------------------------------------------------------------


def test_every_form_of_the_call_gives_the_same() -> None:
    x = qkv()
    out = linear_attention(*x, causal=True)
    out_1, state = linear_attention(*x, causal=True, return_state=True)
    out_2, den = linear_attention(*x, causal=True, return_normalizer=True)
    both = linear_attention(*x, causal=True, return_state=True, return_normalizer=True)
    assert isinstance(state, la.State) and den.shape == (2, 2, 9)
    close((out_1, out_2, both[0]), (out, out, out), rtol=0, atol=0)
    close((both[1], both[2]), (state, den), rtol=0, atol=0)
    zeros = tuple(map(torch.zeros_like, state))
    close(linear_attention(*x, causal=True, initial_state=zeros), out, rtol=0, atol=0)


def test_it_is_the_array_api() -> None:
    x = qkv()
    arrays = [t.numpy() for t in x]
    options: dict[str, Any] = {"causal": True, "a": 2, "b": np.float32(0.5), "feature_map": "elu1"}
    found = linear_attention(*x, **options)
    assert np.array_equal(found.numpy(), la.linear_attention(*arrays, **options))
    hints = typing.get_type_hints(adapter.OperatorOptions)
    assert set(hints) == set(typing.get_type_hints(la.api.OperatorOptions))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_memory_is_shared_with_numpy_not_copied(dtype: str) -> None:
    x = normal(3, 4, dtype=getattr(torch, dtype)).T
    array = _torch_run.to_numpy(x)
    assert array.ctypes.data == x.data_ptr() and str(array.dtype) == dtype
    assert [s // array.itemsize for s in array.strides] == list(x.stride())
    back = _torch_run.to_torch(array.T)
    assert back.data_ptr() == x.data_ptr() and back.dtype == x.dtype and torch.equal(back.T, x)


def test_lazily_negated_tensors() -> None:
    q, k, v = qkv()
    negated = torch.complex(q, k).conj().imag
    assert negated.is_neg()
    negated.requires_grad_()
    close(linear_attention(negated, k, v), linear_attention(-k, k, v))
    (found,) = torch.autograd.grad(linear_attention(q, negated, v).sum(), negated)
    plain = (-k).requires_grad_()
    (expected,) = torch.autograd.grad(linear_attention(q, plain, v).sum(), plain)
    close(found, expected)


def test_parts_of_a_complex_tensor_and_of_a_fused_projection() -> None:
    fused = normal(2, 9, 3, 2, 8).requires_grad_()
    x = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    copies = [t.detach().contiguous().requires_grad_() for t in x]
    out, expected = linear_attention(*x, causal=True), linear_attention(*copies, causal=True)
    close(out, expected)
    found = torch.autograd.grad(out.square().sum(), fused)[0]
    grads = torch.autograd.grad(expected.square().sum(), copies)
    close(found, torch.stack([g.transpose(1, 2) for g in grads], 2))
    real = torch.view_as_complex(normal(2, 2, 9, 8, 2)).real  # stride 2 in the last axis
    close(linear_attention(real, real, real), linear_attention(*[real.contiguous()] * 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: Any) -> None:
    x = [t.requires_grad_() for t in qkv()]
    state = la.State(*(t.double() for t in linear_attention(*x, return_state=True)[1]))
    with torch.autocast("cpu", dtype=dtype):
        out = linear_attention(*x, causal=True)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(*x).dtype == dtype
        out.float().sum().backward()
        assert all(t.grad.dtype == torch.float32 for t in x)
        assert linear_attention(*(t.double() for t in x)).dtype == torch.float64
        _, after = linear_attention(*x, initial_state=state, return_state=True)
        assert after.kv.dtype == torch.float32
        first = torch.autograd.grad(
            linear_attention(*x).float().square().sum(), x, create_graph=True
        )
        torch.autograd.grad(first[0].sum(), x)
        with torch.autocast("cpu", enabled=False):
            assert linear_attention(*x).dtype == torch.float32
    rounded = linear_attention(*(t.detach().to(dtype) for t in x), causal=True)
    close(out, rounded, rtol=0, atol=0)


def test_parameters_and_requires_grad() -> None:
    x = [torch.nn.Parameter(t) for t in qkv()]
    linear_attention(*x, causal=True).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in x)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (lambda q, k, v: (q.numpy(), k, v), {}, TypeError, "q is a numpy.ndarray, but PyTorch ten"),
        (lambda q, k, v: (q, k, None), {}, TypeError, "v is a builtins.NoneType"),
        (lambda q, k, v: (q.int(), k, v), {}, TypeError, "q has dtype int32, but must be one of"),
        (lambda q, k, v: (q, k.bool(), v), {}, TypeError, "k has dtype bool"),
        (lambda q, k, v: (q, k, v.cfloat()), {}, TypeError, "v has dtype complex64"),
        (lambda q, k, v: (q.to(torch.float8_e5m2), k, v), {}, TypeError, "q has dtype float8_e5m2"),
        (
            lambda q, k, v: (q.to_sparse(), k, v),
            {},
            TypeError,
            "q has layout sparse_coo, .*to_dense",
        ),
        (lambda q, k, v: (q, k.to("meta"), v), {}, ValueError, "q is on device cpu and k on devic"),
        (lambda q, k, v: (q, k[..., :3], v), {}, ValueError, "q has D = 8 in its last axis and k"),
        (lambda q, k, v: (q, k, v[..., :3, :]), {}, ValueError, "k has 9 rows and v has 3"),
        (lambda q, k, v: (q[0, 0, 0], k, v), {}, ValueError, "q has shape .8,., but needs at"),
        (lambda q, k, v: (q, k.repeat(1, 2, 1, 1)[:, :3], v), {}, ValueError, "do not broadcast"),
        (lambda *x: x, {"causal": 1}, TypeError, "causal is 1 of type int"),
        (lambda *x: x, {"return_state": None}, TypeError, "return_state is None"),
        (lambda *x: x, {"a": torch.ones(())}, TypeError, "a is a tensor, but must be a number"),
        (lambda *x: x, {"b": float("nan")}, ValueError, "b is nan, but must be finite"),
        (lambda *x: x, {"qk_norm": "l1"}, ValueError, "qk_norm is 'l1'"),
        (lambda *x: x, {"feature_map": torch.relu}, TypeError, "feature_map is"),
        (lambda *x: x, {"precision": "low"}, ValueError, "precision is 'low'"),
        (lambda *x: x, {"initial_state": [1]}, TypeError, "initial_state is a list of 1"),
        (
            lambda *x: x,
            {"initial_state": (1, 2, 3, 4)},
            TypeError,
            "initial_state.kv is a builtins",
        ),
        (lambda *x: x, {"initial_state": [None] * 4}, TypeError, "initial_state is a list of 4"),
    ],
)
def test_refusals(change: Any, options: dict[str, Any], error: Any, message: str) -> None:
    """The array API's sentences; one exception, one line."""
    with pytest.raises(error, match=message) as info:
        linear_attention(*change(*qkv()), **options)
    assert "\n" not in str(info.value)


def test_a_call_like_an_earlier_one_is_checked_for_what_it_differs_in() -> None:
    q, k, v = qkv()
    linear_attention(q, k, v)
    with pytest.raises(TypeError, match="dtype int32"):
        linear_attention(q.view(torch.int32), k, v)
    with pytest.raises(ValueError, match="device meta"):
        linear_attention(q, k.to("meta"), v)


def test_the_array_api_names_the_adapter() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match="call la_cupy.interop.torch.linear_attention"):
        la.linear_attention(q, k, v)


def test_the_rest_of_the_library_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import la_cupy, la_cupy.interop, la_cupy.cpu\n"
        "import numpy as np; x = np.ones((3, 2)); la_cupy.linear_attention(x, x, x)\n"
        "try:\n    import la_cupy.interop.torch\n"
        "except ImportError: pass\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the way to CuPy -----------------------------------------------------------------------------


class FakeCupy:
    """CuPy and CUDA with two devices, as far as the adapter looks at them."""

    def __init__(self) -> None:
        self.device = 0
        runtime = SimpleNamespace(getDevice=lambda: self.device)
        self.cuda = SimpleNamespace(runtime=runtime, Device=self.guard)

    @contextlib.contextmanager
    def guard(self, index: int) -> Any:
        before, self.device = self.device, index
        yield
        self.device = before


def test_kernels_are_queued_on_torchs_stream_of_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    pointers = {0: 50, 1: 51}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", pointers.__getitem__, raising=False)
    launched: list[Any] = []

    def launch(addresses: Any, stream: int) -> None:
        launched.append((cupy.device, stream, addresses))

    prepared = SimpleNamespace(launch=launch)
    for index in (0, 1, 1, 0):
        _torch_run.Cuda.queue(prepared, {"q": index}, torch.device("cuda", index))
        assert cupy.device == 0, "the current device is as it was"
    assert launched == [(i, 50 + i, {"q": i}) for i in (0, 1, 1, 0)]
    pointers[0] = 70
    _torch_run.Cuda.queue(prepared, {}, torch.device("cuda", 0))
    assert launched[-1] == (0, 70, {})


def test_cuda_tensors_without_cupy_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "la_cupy.launch", raising=False)
    monkeypatch.delattr(la, "launch", raising=False)
    with pytest.raises(ImportError, match=r"the tensors are on cuda:0, but CuPy.*la_cupy.cuda12"):
        _torch_run.Cuda.prepare_forward(None, torch.device("cuda", 0), False)


# --- scaled_dot_product_attention ----------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(9, 9), (4, 9)])
def test_sdpa_groups_heads_as_torch_does(is_causal: bool, rows: int, keys: int) -> None:
    q = normal(2, 6, rows, 8).requires_grad_()
    k, v = (normal(2, 2, keys, 8, seed=i).requires_grad_() for i in (1, 2))
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    repeated = [t.repeat_interleave(3, dim=1) for t in (k, v)]
    unit = [t / t.norm(dim=-1, keepdim=True) for t in (q, repeated[0])]
    weights = 1 + unit[0] @ unit[1].mT
    weights = weights.tril() if is_causal else weights  # aligned at the first key, as in torch
    expected = weights / weights.sum(-1, keepdim=True) @ repeated[1]
    close(out, expected)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    close(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), rtol=1e-4, atol=1e-5)


def test_sdpa_has_the_signature_of_torch() -> None:
    x = qkv()
    positional = scaled_dot_product_attention(*x, None, 0.0, True)
    close(positional, linear_attention(*x, causal=True))
    torchs = torch.nn.functional.scaled_dot_product_attention
    names = ("query", "key", "value")
    by_name = dict(zip(names, x, strict=True))
    more = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": None}
    assert (
        scaled_dot_product_attention(**by_name, **more, enable_gqa=False).shape
        == torchs(**by_name, **more, enable_gqa=False).shape
    )
    elu = scaled_dot_product_attention(*x, feature_map="elu1", b=0.5)
    close(elu, linear_attention(*x, feature_map="elu1", b=0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.ones(9, 9).bool()}, "attn_mask is a mask"),
        ({"dropout_p": 0.1}, "dropout_p is 0.1"),
        ({"scale": 0.5}, "scale is 0.5"),
    ],
)
def test_sdpa_refuses_what_it_cannot_honour(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        scaled_dot_product_attention(*qkv(), **options)
    assert "\n" not in str(info.value)


def test_sdpa_refuses_shapes() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="is_causal came with 9 rows of query and 3 of key"):
        scaled_dot_product_attention(q, k[..., :3, :], v[..., :3, :], is_causal=True)
    with pytest.raises(ValueError, match="query has 7 heads and key has 2"):
        scaled_dot_product_attention(normal(2, 7, 9, 8), k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="do not broadcast"):
        scaled_dot_product_attention(normal(2, 6, 9, 8), k, v)
    with pytest.raises(ValueError, match="key has 9 rows and value 7"):
        scaled_dot_product_attention(q[..., :4, :], k, v[..., :7, :], is_causal=True)
    with pytest.raises(ValueError, match=r"key has shape \(8,\), but needs at least 2 axes"):
        scaled_dot_product_attention(q, k[0, 0, 0], v, is_causal=True)
    with pytest.raises(ValueError, match="do not broadcast"):
        scaled_dot_product_attention(normal(2, 7, 9, 8), k[0, 0], v, enable_gqa=True)


def test_sdpa_refuses_types_and_options() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"value is a builtins.NoneType, but PyTorch tensors"):
        scaled_dot_product_attention(q, k, None, is_causal=True)
    with pytest.raises(TypeError, match="enable_gqa is"):
        scaled_dot_product_attention(q, k, v, enable_gqa="no")
    with pytest.raises(TypeError, match="has no option return_state"):
        scaled_dot_product_attention(q, k, v, return_state=True)
    with pytest.raises(TypeError, match="register_transformers has no option causal"):
        adapter.register_transformers("wrong", causal=True)
    ragged = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    with pytest.raises(TypeError, match="k has layout nested.*pad"):
        linear_attention(q, ragged, v)
    with pytest.raises(TypeError, match="v has layout sparse_csr"):
        linear_attention(q, k, torch.eye(8).to_sparse_csr())


def test_sdpa_compiles() -> None:
    torch._dynamo.reset()
    q, k, v = normal(2, 6, 9, 8), *qkv()[1:]
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    close(compiled(q, k, v, **options), scaled_dot_product_attention(q, k, v, **options))


# --- Transformers --------------------------------------------------------------------------------


@pytest.fixture
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    adapter.register_transformers("la_cupy")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="la_cupy")


def tokens(n: int = 12) -> Any:
    return torch.randint(1, 50, (2, n), generator=torch.Generator().manual_seed(0))


def definition(module: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    """Causal linear attention, every weight written out."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    weights = (1 + q @ k.mT).tril(k.shape[-2] - q.shape[-2])
    return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2), None


def test_llama_trains_and_is_what_it_says(llama: Any) -> None:
    from transformers import AttentionInterface

    ids = tokens()
    results = llama(ids, labels=ids)
    results.loss.backward()
    grads = [p.grad.clone() for p in llama.parameters()]
    llama.zero_grad()
    AttentionInterface.register("definition", definition)
    llama.set_attn_implementation("definition")
    expected = llama(ids, labels=ids)
    expected.loss.backward()
    close(results.logits, expected.logits, rtol=1e-4, atol=1e-5)
    for found, p in zip(grads, llama.parameters(), strict=True):
        close(found, p.grad, rtol=1e-3, atol=1e-5)
    assert float(grads[1].abs().max()) > 0


def test_llama_generates_with_a_cache(llama: Any) -> None:
    llama.eval()
    ids = tokens()
    mask = torch.ones_like(ids)
    found = llama.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    again = llama(found).logits.argmax(-1)[:, ids.shape[1] - 1 : -1]
    assert torch.equal(found[:, ids.shape[1] :], again)


def test_llama_refuses_what_it_cannot_honour(llama: Any) -> None:
    llama.eval()
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="attention_mask hides some tokens"):
        llama(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask is a mask"):
        llama(ids, attention_mask=torch.zeros(2, 1, 12, 12))
    packed = torch.arange(12).remainder(6)[None]
    with pytest.raises(ValueError, match="not merely causal"):
        llama(ids, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="use a dynamic cache"):
        llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            cache_implementation="static",
        )
    llama.train()
    llama.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout is 0.1"):
        llama(ids)


def test_options_of_register_transformers(llama: Any) -> None:
    ids = tokens()
    plain = llama(ids).logits
    adapter.register_transformers("la_cupy_elu1", feature_map="elu1", b=0.5)
    llama.set_attn_implementation("la_cupy_elu1")
    assert not torch.allclose(llama(ids).logits, plain)
    with pytest.raises(ValueError, match="feature_map is 'gelu'"):
        adapter.register_transformers("wrong", feature_map="gelu")
