"""Which library and device an array belongs to, its cache key, and whether memory is shared."""

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np

from .results import Array

Value = TypeVar("Value")
Key = tuple[Any, ...]

_cupy_types: set[type] = set()  # cupy.ndarray, once seen; CuPy is never imported here
_NUMPY_TYPES = (np.ndarray, np.memmap)
_TITLE = {"numpy": "NumPy", "cupy": "CuPy"}


def _is_cupy(kind: type) -> bool:
    found = kind.__module__ == "cupy" and kind.__name__ == "ndarray"
    if found:
        _cupy_types.add(kind)
    return found


def signature(x: Array) -> Key:
    """All that validation depends on: type, dtype, shape, strides and device.

    Raises AttributeError where `x` is no array; this runs for every array of every call.
    """
    kind = type(x)
    if kind is np.ndarray:
        return x.dtype, x.shape, x.strides
    if kind in _cupy_types or _is_cupy(kind):
        return kind, x.dtype, x.shape, x.strides, x.data.device_id
    return kind, x.dtype, x.shape, x.strides


class Cache(Generic[Value]):
    """A dict of bounded size that drops its oldest entry; threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: dict[Key, Value] = {}
        self.get = self.entries.get  # one lookup of a dict is atomic: no lock on the way of a hit
        self._lock = threading.Lock()

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            while len(self.entries) >= self.limit:
                del self.entries[next(iter(self.entries))]
            self.entries[key] = value


def library(arrays: dict[str, Any]) -> str:
    """The library, "numpy" or "cupy", that all `arrays` (name -> array) must belong to.

    CuPy arrays must also be on one device.
    """
    libraries = {name: _library_of(name, x) for name, x in arrays.items()}
    first, found = next(iter(libraries.items()))
    for name, other in libraries.items():
        if other != found:
            there, here = (name, first) if other == "numpy" else (first, name)
            raise TypeError(
                f"{first} is a {_TITLE[found]} array and {name} a {_TITLE[other]} array, but all "
                f"must be of one library: write cupy.asarray({there}) or cupy.asnumpy({here})"
            )
    if found == "cupy":
        device = arrays[first].data.device_id
        for name, x in arrays.items():
            if x.data.device_id != device:
                raise ValueError(
                    f"{first} is on device {device} and {name} on device {x.data.device_id}, but "
                    f"all must be on one: under cupy.cuda.Device({device}), "
                    f"write cupy.asarray({name})"
                )
    return found


def _library_of(name: str, x: Any) -> str:
    kind = type(x)
    if kind in _NUMPY_TYPES:
        return "numpy"
    if _is_cupy(kind):
        return "cupy"
    if isinstance(x, np.generic) and "." in name:
        return "numpy"  # a part of a State: the count of one head, taken out of an array
    module = kind.__module__.partition(".")[0]
    title = f"{name} is a {module}.{kind.__name__}"
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{title}, whose mask would be ignored: write {name}.filled(0)")
    if isinstance(x, np.ndarray):
        raise TypeError(
            f"{title}, a subclass of numpy.ndarray whose meaning would be lost: "
            f"write numpy.asarray({name})"
        )
    if any(_is_cupy(base) for base in kind.__mro__):
        raise TypeError(
            f"{title}, a subclass of cupy.ndarray whose meaning would be lost: "
            f"write {name}.view(cupy.ndarray)"
        )
    if module in ("torch", "jax", "jaxlib"):
        adapter = "torch" if module == "torch" else "jax"
        raise TypeError(
            f"{title}, but NumPy or CuPy arrays are needed: call la_cupy.interop.{adapter}."
            f"linear_attention, or write la_cupy.interop.from_dlpack({name})"
        )
    if hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
        way = f"la_cupy.interop.from_dlpack({name})"
    else:
        title = f"{name} is {kind.__name__}"
        way = f"numpy.asarray({name}, dtype='float32'), or la_cupy.interop.from_dlpack for arrays"
    raise TypeError(f"{title}, but NumPy or CuPy arrays are needed: write {way}")


def writable(name: str, x: Array) -> None:
    """NumPy arrays can be read-only; CuPy's cannot."""
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name} is read-only, but is written to: pass a copy, {name}.copy()")


def disjoint(name: str, x: Array, other_names: Sequence[str], others: Sequence[Array]) -> None:
    """The addresses from the first to the last byte of `x` must hold nothing of `others`."""
    if isinstance(x, np.ndarray):
        shared = [np.may_share_memory(x, other) for other in others]
    else:
        low, high = _span(x)
        spans = map(_span, others)
        shared = [max(low, first) < min(high, last) for first, last in spans]
    if any(shared):
        raise ValueError(
            f"{name} shares memory with {other_names[shared.index(True)]}, but inputs are never "
            f"modified: pass an array of its own as {name}"
        )


def _span(x: Array) -> tuple[int, int]:
    """Addresses of the first byte of `x` and of the one after its last; equal if it is empty."""
    low, high = _offsets(x.shape, x.strides, x.dtype.itemsize)
    address = x.data.ptr
    return address + low, address + high


@lru_cache(maxsize=1024)
def _offsets(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """The same, from the address of element 0."""
    if 0 in shape:
        return 0, 0
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize
