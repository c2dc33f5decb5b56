"""cpu/conversion.py and cpu/elementary.py: every bit pattern of the small formats, and the elementary functions."""

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from numba_paged.cpu import conversion, elementary
from numba_paged.cpu.append import FLOATS

UNIT = 2.0**-24


@njit
def each(function, x):
    out = np.empty(x.size, np.float32)
    for i in range(x.size):
        out[i] = function(x[i])
    return out


@njit
def exp2(x):
    return elementary.exp2(x)


@njit
def round_all(x, mantissa_bits, smallest_exponent):
    out = np.empty(x.size, np.int64)
    for i in range(x.size):
        out[i] = conversion.round_bits(x[i], mantissa_bits, smallest_exponent)
    return out


def same_floats(got, want):
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    kept = ~np.isnan(want)
    np.testing.assert_array_equal(got[kept].view(np.uint32), want[kept].view(np.uint32))


def test_half_to_float_is_exact_for_every_half():
    bits = np.arange(65536, dtype=np.uint16)
    same_floats(each(conversion.half_to_float, bits), bits.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_tables_hold_the_values_of_the_8_bit_formats(name):
    want = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name, None) or name).astype(np.float32)
    same_floats(conversion.TABLES[name], want)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_to_nearest_even(name):
    """Every number of the format, every midpoint between two of them, and their neighbours on either side."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    bits = np.arange(2 ** (8 * dtype.itemsize - 1), dtype=np.uint16 if dtype.itemsize == 2 else np.uint8)
    values = bits.view(dtype).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middles = (values[:-1].astype(np.float64) + values[1:]) / 2
    assert (middles.astype(np.float32) == middles).all()
    middles = middles.astype(np.float32)
    x = np.concatenate([values, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0))])
    mantissa_bits, smallest_exponent, _ = FLOATS[name]
    got = round_all(x, mantissa_bits, smallest_exponent)
    np.testing.assert_array_equal(got, x.astype(dtype).view(bits.dtype))


def test_exp2_is_accurate_where_weights_are():
    x = -np.abs(np.random.default_rng(0).standard_normal(1 << 16) * 20).astype(np.float32)
    error = each(exp2, x).astype(np.float64) / 2.0 ** x.astype(np.float64) - 1
    assert np.abs(error).max() <= 2 * 2 * UNIT


def test_exp2_at_the_edges():
    x = np.array([0, -126, -126.5, -1e9, -np.inf], np.float32)
    np.testing.assert_array_equal(each(exp2, x), np.array([1, 2.0**-126, 0, 0, 0], np.float32))
    payloads = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(each(exp2, payloads)).all()


def test_tanh_is_accurate_near_zero_and_far_out():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(1 << 16) * rng.choice([1e-6, 0.01, 0.3, 1, 4, 20], 1 << 16)).astype(np.float32)
    error = each(elementary.tanh, x).astype(np.float64) / np.tanh(x.astype(np.float64)) - 1
    assert np.abs(error).max() <= 6 * UNIT
    edges = np.array([0, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(each(elementary.tanh, edges), np.array([0, 1, -1, np.nan], np.float32))
