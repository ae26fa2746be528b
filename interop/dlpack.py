"""Import an array without copying it, through DLPack or an array interface."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

# DLDeviceType: memory the host can read, and memory a CUDA device can
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
# DLDataTypeCode
_UINT, _BFLOAT = 1, 4


def from_dlpack(x: Any) -> Any:
    """The memory of `x` as an array that `la_cupy` computes with.

    Nothing is copied: the result sees later writes to `x`. It keeps `x` alive, and is
    read-only where its producer says so. What the producer has queued on its CUDA stream is
    done before what is queued afterwards on CuPy's current stream of that device.

    Parameters
    ----------
    x : object
        With ``__dlpack__`` and ``__dlpack_device__``, such as an array of PyTorch (without
        requires_grad), JAX (on one device), TensorFlow or MLX; or, failing these, with
        ``__cuda_array_interface__`` or ``__array_interface__``. NumPy and CuPy arrays are
        returned as they are.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        NumPy for host memory, pinned memory included, CuPy for memory of a CUDA device. Same
        shape, strides and dtype, bfloat16 as that of ml_dtypes.

    Raises
    ------
    TypeError
        `x` offers none of the protocols, or its producer or consumer refuses the exchange.
    ImportError
        `x` is on a CUDA device and CuPy is not installed.

    Examples
    --------
    >>> import array, numpy as np
    >>> from la_cupy.interop import from_dlpack
    >>> class Producer:
    ...     def __init__(self, x): self.x = x
    ...     def __dlpack__(self, **options): return self.x.__dlpack__(**options)
    ...     def __dlpack_device__(self): return self.x.__dlpack_device__()
    >>> x = np.arange(3.0)
    >>> y = from_dlpack(Producer(x))
    >>> x[0] = 7
    >>> y
    array([7., 1., 2.])
    """
    kind = type(x)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("x is a masked array, whose mask would be lost: write x.filled(0)")
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if kind.__module__ == "cupy" and kind.__name__ == "ndarray":
        return x
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        return _cupy(x).asarray(x)
    if hasattr(x, "__array_interface__"):
        return np.asarray(x)
    raise TypeError(
        f"x is a {_name(x)}, but must have __dlpack__ with __dlpack_device__, "
        f"__cuda_array_interface__ or __array_interface__: write numpy.asarray(x)"
    )


def _from_dlpack(x: Any) -> Any:
    if hasattr(x, "is_neg") and x.is_neg():
        # PyTorch exports a lazily negated view as if it were not negated.
        x = x.resolve_neg()
    try:
        device_type, device = x.__dlpack_device__()
        if device_type in (_CPU, _CUDA_HOST):
            return _to_numpy(x, (int(device_type), device))
        if device_type in (_CUDA, _CUDA_MANAGED):
            return _cupy(x).from_dlpack(x)
    except (BufferError, RuntimeError, ValueError) as error:
        raise TypeError(
            f"x is a {_name(x)} that cannot be shared ({error}): pass a plain, dense array of "
            f"float16, bfloat16, float32 or float64 on one device, without gradient tracking"
        ) from error
    raise TypeError(
        f"x is a {_name(x)} on DLPack device type {int(device_type)}, but must be in host memory "
        f"(1, 3) or on a CUDA device (2, 13): copy it there with its own library"
    )


def _cupy(x: Any) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"x is a {_name(x)} on a CUDA device, but CuPy is missing: "
            f"pip install 'la_cupy[cuda12]' or 'la_cupy[cuda13]', as the driver allows"
        ) from error
    return cupy


def _name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _to_numpy(x: Any, device: tuple[int, int]) -> np.ndarray:
    """numpy.from_dlpack, which knows no bfloat16: it is shown uint16 instead."""
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = x.__dlpack__()
    dtype = _tensor(capsule).dtype
    is_bfloat16 = (dtype.code, dtype.bits, dtype.lanes) == (_BFLOAT, 16, 1)
    if is_bfloat16:
        # The struct was made for this export, and is read by nobody else.
        dtype.code = _UINT
    array: np.ndarray = np.from_dlpack(_Export(capsule, device))
    return array.view(ml_dtypes.bfloat16) if is_bfloat16 else array


class _Export:
    """A capsule in hand, as an object that numpy.from_dlpack takes."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned of dlpack.h; its elder, DLManagedTensor, begins with the tensor."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _tensor(capsule: Any) -> _Tensor:
    """The DLTensor in a capsule that nobody has consumed yet."""
    if _is_valid(capsule, b"dltensor_versioned"):
        address = _pointer(capsule, b"dltensor_versioned")
        tensor: _Tensor = _Versioned.from_address(address).tensor
        return tensor
    return _Tensor.from_address(_pointer(capsule, b"dltensor"))
