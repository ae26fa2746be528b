"""from_dlpack: no copy, the right library, every one of our types, and a clear refusal."""

import ctypes
import doctest
import gc
import subprocess
import sys
import weakref
from typing import Any

import la_cupy.interop.dlpack
import ml_dtypes
import numpy as np
import pytest
from la_cupy.interop import from_dlpack

from la_cupy import dtypes

TYPES = list(dtypes.NAMES)


class Producer:
    """A third library: exchanges through DLPack, and is no NumPy array itself."""

    def __init__(self, x: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.x, self.device = x, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OldProducer(Producer):
    """From before DLPack 1.0, which brought max_version."""

    def __dlpack__(self, stream: None = None) -> Any:
        return self.x.__dlpack__()


class Bfloat16Producer(Producer):
    """Exports uint16 as bfloat16, in a capsule of either kind."""

    def __init__(self, x: np.ndarray, versioned: bool) -> None:
        super().__init__(x)
        self.versioned = versioned

    def __dlpack__(self, max_version: tuple[int, int] | None = None, **options: Any) -> Any:
        capsule = self.x.__dlpack__(max_version=(1, 0) if self.versioned else None)
        la_cupy.interop.dlpack._tensor(capsule).dtype.code = 4
        return capsule


@pytest.mark.parametrize("kind", [Producer, OldProducer])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_producer_is_shared_not_copied(kind: type[Producer], dtype: str) -> None:
    x = np.arange(24).astype(dtype).reshape(2, 3, 4)
    for view in (x, x.T, x[:, ::-1, ::2], x[:, :0], x[0, 0, 0:1].reshape(())):
        y = from_dlpack(kind(view))
        assert type(y) is np.ndarray and y.dtype == view.dtype and y.shape == view.shape
        assert np.array_equal(y, view) and np.shares_memory(y, view) == bool(view.size)
    y = from_dlpack(kind(x))
    x[1, 2, 3] = 99
    assert y[1, 2, 3] == 99


@pytest.mark.parametrize("versioned", [True, False])
def test_bfloat16_of_any_producer(versioned: bool) -> None:
    x = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    y = from_dlpack(Bfloat16Producer(x.view(np.uint16).T, versioned))
    assert y.dtype == ml_dtypes.bfloat16 and y.strides == x.T.strides
    assert np.array_equal(y.astype(np.float32), x.T.astype(np.float32))
    assert np.shares_memory(y, x)


@pytest.mark.parametrize("dtype", TYPES)
def test_our_own_arrays_come_back_as_they_are(dtype: str) -> None:
    x = np.ones((2, 3), dtypes.numpy_dtype(dtype))
    assert from_dlpack(x) is x
    x.flags.writeable = False  # NumPy does not export these
    assert from_dlpack(x) is x
    assert type(from_dlpack(x.view(np.matrix))) is np.ndarray


def test_memory_outlives_its_producer() -> None:
    x = np.arange(5.0)
    alive = weakref.ref(x)
    y = from_dlpack(Producer(x))
    del x
    gc.collect()
    assert alive() is not None and y.tolist() == [0, 1, 2, 3, 4]
    del y
    gc.collect()
    assert alive() is None


def test_memory_is_released_after_a_refusal() -> None:
    class Unheard(Producer):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = super().__dlpack__(**options)
            la_cupy.interop.dlpack._tensor(capsule).dtype.code = 77
            return capsule

    x = np.ones(5)
    alive = weakref.ref(x)
    with pytest.raises(TypeError, match="cannot be shared"):
        from_dlpack(Unheard(x))
    del x
    gc.collect()
    assert alive() is None


def test_array_interface_alone_is_enough() -> None:
    x = np.arange(6.0).reshape(2, 3)[:, ::2]

    class Interface:
        __array_interface__ = x.__array_interface__

    y = from_dlpack(Interface())
    assert np.shares_memory(x, y) and y.strides == x.strides


class Refuses(Producer):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("requires gradient")


class OnlyArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.ones(3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1.0], r"x is a builtins.list, but must have __dlpack__.*write numpy.asarray\(x\)"),
        (None, "x is a builtins.NoneType"),
        (1.0, "x is a builtins.float"),
        (OnlyArray(), "OnlyArray, but must have __dlpack__"),
        (np.ma.ones(3), r"masked array, whose mask would be lost: write x.filled\(0\)"),
        (Refuses(None), r"Refuses that cannot be shared \(requires gradient\)"),
        (Producer(None, device=(10, 0)), r"on DLPack device type 10, but must be in host memory"),
    ],
)
def test_everything_else_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message) as info:
        from_dlpack(wrong)
    assert "\n" not in str(info.value)


def test_a_cuda_array_without_cupy_names_the_extra() -> None:
    code = """
import sys
sys.modules["cupy"] = None
from la_cupy.interop import from_dlpack
class Dlpack:
    def __dlpack__(self, **options): raise AssertionError
    def __dlpack_device__(self): return 2, 0
class Interface:
    __cuda_array_interface__ = {}
for x in Dlpack(), Interface():
    try:
        from_dlpack(x)
    except ImportError as error:
        assert "CUDA device, but CuPy is missing: pip install 'la_cupy[cuda12]'" in str(error)
    else:
        raise AssertionError(x)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_structures_are_those_of_dlpack_h() -> None:
    module = la_cupy.interop.dlpack
    assert ctypes.sizeof(module._Tensor) == 48
    assert module._Tensor.dtype.offset == 20
    assert module._Versioned.tensor.offset == 32


def test_docstring_runs() -> None:
    assert doctest.testmod(la_cupy.interop.dlpack).failed == 0


# -- the libraries themselves --------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(12, dtype=getattr(torch, dtype)).reshape(3, 4).T[::2]
    y = from_dlpack(x)
    assert y.dtype == dtypes.numpy_dtype(dtype) and y.ctypes.data == x.data_ptr()
    assert y.astype(np.float64).tolist() == x.double().tolist()
    y[0, 0] = 7
    assert x[0, 0] == 7


def test_torch_semantics_that_dlpack_cannot_carry() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="require gradient"):
        from_dlpack(torch.ones(3, requires_grad=True))
    with pytest.raises(TypeError, match="cannot be shared"):
        from_dlpack(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="cannot be shared"):
        from_dlpack(torch.ones(3, dtype=torch.float8_e4m3fn))
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg() and from_dlpack(negated).tolist() == [-2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        x = jax.numpy.arange(6, dtype=dtype).reshape(2, 3)
    y = from_dlpack(x)
    assert y.dtype == dtypes.numpy_dtype(dtype) and y.ctypes.data == x.unsafe_buffer_pointer()
    assert not y.flags.writeable  # JAX arrays never change
    assert y.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_torch_on_a_gpu(dtype: str) -> None:
    import cupy

    torch = pytest.importorskip("torch")
    x = torch.arange(12, dtype=getattr(torch, dtype), device="cuda").reshape(3, 4).T[::2]
    y = from_dlpack(x)
    assert type(y) is cupy.ndarray and y.dtype == dtypes.numpy_dtype(dtype)
    assert y.data.ptr == x.data_ptr()
    assert y.get().astype(np.float64).tolist() == x.double().tolist()


@pytest.mark.gpu
def test_cuda_array_interface_alone_is_enough() -> None:
    import cupy

    x = cupy.arange(6.0).reshape(2, 3)[:, ::2]

    class Interface:
        __cuda_array_interface__ = x.__cuda_array_interface__

    y = from_dlpack(Interface())
    assert type(y) is cupy.ndarray and y.data.ptr == x.data.ptr and y.strides == x.strides
    assert from_dlpack(x) is x


@pytest.mark.gpu
def test_pinned_memory_is_host_memory() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3).pin_memory()
    y = from_dlpack(x)
    assert type(y) is np.ndarray and y.ctypes.data == x.data_ptr()


@pytest.mark.gpu
def test_what_the_producer_queued_is_done_first() -> None:
    import cupy

    torch = pytest.importorskip("torch")
    for _ in range(10):
        side = torch.cuda.Stream()
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x += 1
            y = from_dlpack(x)
        with cupy.cuda.Stream.null:
            assert int(y.sum()) == 1 << 20


@pytest.mark.gpu(devices=2)
def test_an_array_stays_on_its_device() -> None:
    import cupy

    torch = pytest.importorskip("torch")
    x = torch.ones(3, device="cuda:1", dtype=torch.bfloat16)
    with cupy.cuda.Device(0):
        y = from_dlpack(x)
        assert y.device.id == 1 and cupy.cuda.Device().id == 0
    assert y.get().tolist() == [1, 1, 1]
