"""Names of element types and how they promote."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from la_cupy import dtypes


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_names_and_dtypes_are_inverse(name: str) -> None:
    dtype = dtypes.numpy_dtype(name)
    assert dtypes.name_of(dtype) == name
    assert dtype.itemsize == dtypes.ITEMSIZE[name]


@pytest.mark.parametrize(
    "dtype",
    ["int32", "bool", "complex64", "O", "S4", ">f4", "longdouble", "f4,f4", "datetime64[s]"],
)
def test_other_dtypes_have_no_name(dtype: str) -> None:
    if np.dtype(dtype) == np.dtype(np.float64):
        pytest.skip("long double is double here")
    assert dtypes.name_of(np.dtype(dtype)) is None


def test_float8_has_no_name() -> None:
    assert dtypes.name_of(np.dtype(ml_dtypes.float8_e4m3fn)) is None


@pytest.mark.parametrize(
    "names", list(itertools.product(("float16", "float32", "float64"), repeat=3)), ids="-".join
)
def test_promotion_is_numpys_for_its_own_floats(names: tuple[str, ...]) -> None:
    assert dtypes.promote(*names) == np.result_type(*names).name


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("bfloat16",), "bfloat16"),
        (("bfloat16", "bfloat16"), "bfloat16"),
        (("bfloat16", "float16"), "float32"),
        (("float16", "bfloat16", "float16"), "float32"),
        (("bfloat16", "float32"), "float32"),
        (("float64", "bfloat16", "float16"), "float64"),
    ],
)
def test_promotion_with_bfloat16(names: tuple[str, ...], expected: str) -> None:
    assert dtypes.promote(*names) == expected
    assert dtypes.promote(*reversed(names)) == expected


def test_states_are_wider_than_the_inputs() -> None:
    found = {name: dtypes.state_dtype(name) for name in dtypes.NAMES}
    assert found.pop("float64") == "float64"
    assert set(found.values()) == {"float32"}
