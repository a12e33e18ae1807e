"""Turns raw elements into numbers that can be subtracted, for every type torch can store.

numpy knows most types. bfloat16 is the upper half of a float32; an 8-bit float is looked up in a
table of its 256 values. What has no one number per element (packed 4-bit types, quantised ones) is
None.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]
_PLAIN = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "complex64": "<c8",
    "complex128": "<c16",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "u1",
}
# Exponent bits, mantissa bits, bias, and how infinity and NaN are coded.
_EIGHT_BITS = {
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fn": (4, 3, 7, "last"),
    "float8_e5m2fnuz": (5, 2, 16, "negative zero"),
    "float8_e4m3fnuz": (4, 3, 8, "negative zero"),
}


def decode(raw: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> Numbers | None:
    """The numbers of an array of shape (elements, bytes of one): float64, complex128 or integers.

    None for a type whose elements are no single numbers.
    """
    packed = np.ascontiguousarray(raw)
    if dtype in _EIGHT_BITS:
        return _table(dtype)[packed.reshape(-1)]
    if dtype == "bfloat16":
        upper = packed.view("<u2").reshape(-1).astype(np.uint32) << 16
        return _wide(upper.view(np.float32))
    return _wide(packed.view(_PLAIN[dtype]).reshape(-1)) if dtype in _PLAIN else None


def _wide(found: Numbers) -> Numbers:
    """Floats with all their values kept; integers as they are."""
    wide = {"f": np.float64, "c": np.complex128}.get(found.dtype.kind)
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return found if wide is None else found.astype(wide)


def distance(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
    """(absolute, relative) difference of each element, as float64.

    Two NaNs, and two equal infinities, are no difference; a NaN on one side only is infinite.
    Integers of one type are subtracted exactly before they become floats.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if a.dtype == b.dtype and a.dtype.kind in "iu":
            unsigned = np.dtype(f"u{a.dtype.itemsize}")
            gap = np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)
            absolute = gap.astype(np.float64)
        else:
            a, b = _floating(a), _floating(b)
            absolute = np.abs(a - b)
            absolute[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
            absolute[np.isnan(absolute)] = np.inf
        size = np.maximum(np.abs(_floating(a)), np.abs(_floating(b)))
        relative = np.where(absolute == 0, 0.0, absolute / size)
        relative[np.isnan(relative)] = np.inf
    return absolute, relative


def _floating(values: Numbers) -> Numbers:
    return values if values.dtype.kind == "c" else values.astype(np.float64)


@cache
def _table(dtype: str) -> Numbers:
    return np.array([_eight_bits(code, *_EIGHT_BITS[dtype]) for code in range(256)])


def _eight_bits(
    code: int, exponent_bits: int, mantissa_bits: int, bias: int, special: str
) -> float:
    sign = -1.0 if code & 128 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    ones = (1 << exponent_bits) - 1
    if special == "negative zero" and code == 128:
        return float("nan")
    if special == "last" and code & 127 == 127:
        return float("nan")
    if special == "ieee" and exponent == ones:
        return sign * float("inf") if mantissa == 0 else float("nan")
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - bias))
    return float(sign * (1 + fraction) * 2.0 ** (exponent - bias))
