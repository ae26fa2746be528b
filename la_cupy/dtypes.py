"""The four element types, by name, and how they promote.

The rest of the library speaks of types by name ("bfloat16"), so that plans and kernel
names print well and need neither NumPy nor ml_dtypes.
"""

import ml_dtypes
import numpy as np

NAMES = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

_DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy (and CuPy) dtype called `name`."""
    return _DTYPES[name]


def name_of(dtype: np.dtype) -> str | None:
    """The name of `dtype`; None where it is not one of the four in native byte order."""
    return _NAME_OF.get(dtype)


def promote(*names: str) -> str:
    """The type that holds all of `names`: NumPy's rule, and float32 for bfloat16 with float16.

    >>> promote("bfloat16", "float16"), promote("bfloat16", "bfloat16")
    ('float32', 'bfloat16')
    """
    distinct = set(names)
    if len(distinct) == 1:
        return names[0]
    return "float64" if "float64" in distinct else "float32"


def state_dtype(compute: str) -> str:
    """The type of states, normalizers and sums for arithmetic in `compute`."""
    return "float64" if compute == "float64" else "float32"
