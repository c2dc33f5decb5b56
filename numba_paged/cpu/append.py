"""New keys and values into their slots: converted, rounded to nearest even, saturated; one thread a token."""

import functools

import numpy as np
from numba import njit, prange, types

from .conversion import read_query, round_bits
from .machine import SOURCES
from .memory import as_bits, copy_bytes, store

_ZERO = np.float32(0)

FLOATS = {"float32": (23, -126, 0x7FC00000), "float16": (10, -14, 0x7E00), "bfloat16": (7, -126, 0x7FC0),
          "float8_e4m3fn": (3, -6, 0x7F), "float8_e5m2": (2, -14, 0x7E)}
"""Bits of the mantissa, exponent of the smallest normal number, bits of a NaN."""


@njit(error_model="numpy")
def _encode(x, mantissa_bits, smallest_exponent, nan, largest, itemsize):
    """The bits of a float32 in the pool's format; no mantissa means int8."""
    if mantissa_bits == 0:
        return np.int64(min(max(np.rint(x), np.float32(-128)), np.float32(127))) & 0xFF if x == x else np.int64(0)
    sign = np.int64(as_bits(x) >> 31) << (8 * itemsize - 1)
    if x != x:
        return nan | sign
    x = min(max(x, -largest), largest)
    if mantissa_bits == 23:
        return np.int64(as_bits(x))
    return round_bits(x, mantissa_bits, smallest_exponent) | sign


@njit(error_model="numpy")
def _encode_row(source, source_kind, target, head_dim, scale, encoding, largest, itemsize):
    """Divide a row by the scale and write it in the pool's format."""
    mantissa_bits, smallest_exponent, nan = encoding
    for d in range(head_dim):
        bits = _encode(read_query(source, d, source_kind) / scale, mantissa_bits, smallest_exponent, nan, largest, itemsize)
        if itemsize == 4:
            store(target, d, np.uint32(bits))
        elif itemsize == 2:
            store(target, d, np.uint16(bits))
        else:
            store(target, d, np.uint8(bits))


@njit(error_model="numpy")
def _write_token(new, pool, token, slot, num_heads, head_dim, itemsize, encoding, largest, scale, same):
    """Write the rows of all heads of a token to its slot."""
    source, kind, token_stride, source_head_stride = new
    target, block_stride, offset_stride, head_stride, block_size = pool
    for head in range(num_heads):
        row = source + token * token_stride + head * source_head_stride
        place = target + slot // block_size * block_stride + slot % block_size * offset_stride + head * head_stride
        if same:
            copy_bytes(place, row, head_dim * itemsize)
        else:
            _encode_row(row, kind, place, head_dim, scale, encoding, largest, itemsize)


_SIGNATURE = types.void(
    types.UniTuple(types.int64, 4),  # new rows: address, kind, token stride, head stride (bytes)
    types.UniTuple(types.int64, 5),  # pool: address, block stride, offset stride, head stride, block_size
    types.Array(types.int64, 1, "A", readonly=True),  # slots [num_tokens], -1 writes nothing
    types.int64,  # num_kv_heads
    types.int64,  # head_dim
    types.int64,  # bytes per number of the pool
    types.UniTuple(types.int64, 3),  # encoding: see FLOATS; zeros for int8
    types.float32,  # the format's largest number
    types.float32,  # scale
    types.boolean,  # whether rows are copied as they are
)


@functools.cache
def load_append():
    """The kernel that writes row (token, head) to slot ``slots[token]`` of the pool; parameters as in `_SIGNATURE`."""
    sources = SOURCES

    @njit(_SIGNATURE, parallel=True, cache=True, nogil=True, error_model="numpy")
    def append(new, pool, slots, num_heads, head_dim, itemsize, encoding, largest, scale, same):
        sources  # see machine.SOURCES
        for token in prange(slots.size):
            if slots[token] >= 0:
                _write_token(new, pool, token, slots[token], num_heads, head_dim, itemsize, encoding, largest, scale, same)

    return append
