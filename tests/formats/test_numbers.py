"""Decoding agrees with torch for every value of every type, and differences mean what they say."""

import numpy as np
import pytest

from ckptdrill.formats import numbers
from ckptdrill.formats.layout import ITEM_SIZE_BYTES

torch = pytest.importorskip("torch")

SMALL = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
OTHERS = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]


def decoded(tensor: "torch.Tensor", dtype: str) -> "numbers.Numbers":
    raw = np.array(tensor.contiguous().view(torch.uint8).flatten().tolist(), np.uint8)
    found = numbers.decode(raw.reshape(-1, ITEM_SIZE_BYTES[dtype]), dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", SMALL)
def test_all_values_of_the_8_bit_floats(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype))
    wanted = codes.float().double().numpy()
    np.testing.assert_array_equal(decoded(codes, dtype), wanted)


@pytest.mark.parametrize("dtype", OTHERS)
def test_the_other_types(dtype: str) -> None:
    values = torch.tensor([0, 1, 3, 77, 100]).to(getattr(torch, dtype))
    np.testing.assert_array_equal(decoded(values, dtype), values.double().numpy())


def test_types_without_one_number_per_element_have_none() -> None:
    for dtype in ("float4_e2m1fn_x2", "quint4x2", "complex32"):
        assert numbers.decode(np.zeros((2, ITEM_SIZE_BYTES[dtype]), np.uint8), dtype) is None


def test_differences() -> None:
    nan, inf = float("nan"), float("inf")
    a = np.array([1.0, 0.0, nan, nan, inf, inf, -0.0, 2.0])
    b = np.array([1.5, 0.0, nan, 1.0, inf, -inf, 0.0, -2.0])
    absolute, relative = numbers.distance(a, b)
    assert absolute.tolist() == [0.5, 0, 0, inf, 0, inf, 0, 4]
    assert relative.tolist()[:3] == [0.5 / 1.5, 0, 0]
    assert not np.isnan(relative).any()


def test_integers_are_subtracted_exactly() -> None:
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    a, b = np.array([low, 2**60, 5]), np.array([high, 2**60 + 1, 5])
    assert numbers.distance(a, b)[0].tolist() == [2.0**64, 1, 0]
    unsigned = np.array([0], np.uint8), np.array([255], np.uint8)
    assert numbers.distance(*unsigned)[0].tolist() == [255]
