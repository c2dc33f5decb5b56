"""Number formats: how their bits become float32, and back; a kernel knows a format by its `kind`, a small number."""

import numpy as np
from numba import njit
from numba.extending import overload

from ..formats import FORMATS
from .memory import as_bits, as_float, load, store

KINDS = {name: kind for kind, name in enumerate(FORMATS)}

FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, INT8 = KINDS.values()

TABLES = {name: np.arange(256, dtype=np.uint8).view(f.dtype).astype(np.float32)
          for name, f in FORMATS.items() if f.itemsize == 1}
"""The value of every bit pattern of the 8-bit formats."""

NO_TABLE = np.zeros(256, np.float32)
"""For the other formats."""

_HALF_BIAS = np.float32(2.0**112)
_HALF_LIMIT = np.float32(65536)


@njit
def half_to_float(bits):
    """The float32 of a float16's bits, by arithmetic that needs no such instruction."""
    value = as_float((bits & 0x7FFF) << 13) * _HALF_BIAS  # exact, denormals too
    magnitude = as_bits(value) | (0x7F800000 if value >= _HALF_LIMIT else 0)
    return as_float(magnitude | ((bits & 0x8000) << 16))


def read_number(address, index, kind, table):
    """The number `index` of a row at an address as float32; `kind` is a compile-time constant.

    The 8-bit formats have one kind here, the table of their 256 values says which.
    """
    raise NotImplementedError("compiled code only")


@overload(read_number, prefer_literal=True)
def _read_number(address, index, kind, table):
    if kind.literal_value == FLOAT32:
        return lambda address, index, kind, table: load(np.float32, address, index)
    if kind.literal_value == FLOAT16:
        return lambda address, index, kind, table: half_to_float(load(np.uint16, address, index))
    if kind.literal_value == BFLOAT16:
        return lambda address, index, kind, table: as_float(load(np.uint16, address, index) << 16)
    return lambda address, index, kind, table: table[load(np.uint8, address, index)]


@njit
def read_query(address, index, kind):
    """As `read_number`, with the kind known at run time only: for the few numbers of a query."""
    if kind == FLOAT32:
        return load(np.float32, address, index)
    bits = load(np.uint16, address, index)
    return half_to_float(bits) if kind == FLOAT16 else as_float(bits << 16)


@njit
def round_bits(x, mantissa_bits, smallest_exponent):
    """The bits of x in a narrower format, to the nearest, ties to even; the format must hold the exponent.

    Parameters
    ----------
    x : float32
        Not NaN; its magnitude rounds to no more than the format's largest number or, where it has one, infinity.
    mantissa_bits, smallest_exponent : int
        The format: explicit bits of the mantissa, exponent of the smallest normal number.

    Returns
    -------
    int64
        The bits without the sign.
    """
    bits = np.int64(as_bits(x) & 0x7FFFFFFF)
    shift = 23 - mantissa_bits
    if bits >= (smallest_exponent + 127) << 23:
        bits += (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)
        return (bits >> shift) - ((smallest_exponent + 126) << mantissa_bits)
    # below the normal numbers the steps are even: a number whose own step is that long does the rounding
    step = as_float(np.uint32((smallest_exponent + shift + 127) << 23))
    return np.int64(as_bits(as_float(np.uint32(bits)) + step)) - np.int64(as_bits(step))


@njit
def write_query(address, index, kind, x):
    """Round a float32 once to the kind of the queries and store it."""
    if kind == FLOAT32:
        store(address, index, x)
        return
    sign = (as_bits(x) >> 16) & 0x8000
    if x != x:
        bits = np.int64(0x7E00 if kind == FLOAT16 else 0x7FC0)
    elif kind == FLOAT16:
        bits = min(round_bits(x, 10, -14), 0x7C00)
    else:
        bits = round_bits(x, 7, -126)
    store(address, index, np.uint16(bits | sign))
