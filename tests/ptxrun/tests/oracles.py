"""Independent references for float formats: exact rationals and the C library's fused multiply-add."""

import ctypes
import ctypes.util
import math
from fractions import Fraction

import numpy as np

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fmaf.restype, _libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3

# significant bits, least exponent of a normal number, largest finite value
FORMATS = {
    "f32": (24, -126, (2 - Fraction(1, 2**23)) * 2**127),
    "f16": (11, -14, Fraction(65504)),
    "bf16": (8, -126, (2 - Fraction(1, 2**7)) * 2**127),
    "e4m3": (4, -6, Fraction(448)),
    "e5m2": (3, -14, Fraction(57344)),
}


def fmaf(a, b, c):
    return np.array([_libm.fmaf(*map(float, row)) for row in zip(a, b, c)], np.float32)


def fma(a, b, c):
    return np.array([_libm.fma(*map(float, row)) for row in zip(a, b, c)])


def rounded(x, fmt, mode="rn"):
    """The value of a format nearest to a rational: ties to even, subnormals kept, no bound on the exponent above.

    `mode` "rz" rounds towards zero instead.
    """
    precision, least, _ = FORMATS[fmt]
    if x == 0:
        return Fraction(0)
    sign, size = (-1 if x < 0 else 1), abs(Fraction(x))
    exponent = max(math.floor(math.log2(size)), least)
    while Fraction(2) ** exponent > size and exponent > least:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - precision + 1)
    count, rest = divmod(size, unit)
    if mode == "rn" and (rest * 2 > unit or (rest * 2 == unit and count % 2)):
        count += 1
    return sign * count * unit


def saturated(x, fmt):
    """The nearest finite value of a format."""
    largest = FORMATS[fmt][2]
    return max(min(rounded(x, fmt), largest), -largest)


def float32_edges(rng, count):
    """Random float32 bits, with zeros, infinities, NaN, subnormals and powers of two in front."""
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    edges = [
        0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000,
        0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x33800000, 0x4B800000, 0x34000000, 0x3F000000, 0x40490FDB, 0x00FFFFFF,
        0xFFC00001,
    ]
    bits[: len(edges)] = edges
    return bits.view(np.float32)
