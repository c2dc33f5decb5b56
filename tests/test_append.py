"""append against the oracle, over the whole pool: what is written, how it rounds, and that nothing else changes."""

import numpy as np
import pytest

import numba_paged as npg
import reference
from inputs import DTYPES, KV_DTYPES, LAYOUTS, Q_DTYPES, Shape, make_pool, normal

SCALES = [{}, {"k_scale": 0.25, "v_scale": 0.37}]


def assert_same_numbers(got, want):
    """The same bits, except that one NaN is as good as another."""
    bits = f"u{got.dtype.itemsize}"
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    got, want = np.ascontiguousarray(got).view(bits), np.ascontiguousarray(want).view(bits)
    np.testing.assert_array_equal(np.where(nan, 0, got), np.where(nan, 0, want))


def check(backend, k, v, keys, values, slots, **scales):
    """Append, and compare both pools with the oracle's; returns them."""
    want_keys = reference.append(k, keys, slots, scales.get("k_scale", 1.0))
    want_values = reference.append(v, values, slots, scales.get("v_scale", 1.0))
    keys, values = backend.asarray(keys), backend.asarray(values)
    returned = npg.append(backend.asarray(k), backend.asarray(v), keys, values, backend.asarray(slots), **scales)
    assert returned is None
    keys, values = backend.asnumpy(keys), backend.asnumpy(values)
    assert_same_numbers(keys, want_keys)
    assert_same_numbers(values, want_values)
    return keys, values


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("scales", SCALES, ids=["plain", "scaled"])
def test_append(backend, q_dtype, kv_dtype, layout, scales):
    rng = np.random.default_rng(0)
    for head_dim, block_size in [(64, 16), (20, 3), (1, 1), (13, 5)]:
        shape = Shape(num_kv_heads=3, head_dim=head_dim, block_size=block_size, kv_dtype=kv_dtype)
        keys, values = make_pool(shape, 9, layout, "nan")
        slots = rng.permutation(9 * block_size)[:8].astype(np.int64)
        slots[2] = -1
        k, v = normal((2, 8, 3, head_dim), q_dtype, rng)
        check(backend, k, v, keys, values, slots, **scales)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 64.0])
def test_every_number_of_16_bits(backend, q_dtype, kv_dtype, scale):
    """All 65536 patterns: subnormals, ties, overflow, infinities, NaN."""
    k = np.arange(2**16, dtype=np.uint16).view(DTYPES[q_dtype]).reshape(64, 4, 256)
    keys, values = make_pool(Shape(num_kv_heads=4, head_dim=256, kv_dtype=kv_dtype), 4, "NHD", "zero")
    check(backend, k, k[::-1].copy(), keys, values, np.arange(64), k_scale=scale, v_scale=scale)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_float32_patterns(backend, kv_dtype):
    rng = np.random.default_rng(1)
    k = rng.integers(0, 2**32, (64, 4, 256), dtype=np.uint32).view(np.float32)
    v = (rng.integers(-600, 600, k.shape) / 2.0 ** rng.integers(0, 20, k.shape)).astype(np.float32)  # many ties
    keys, values = make_pool(Shape(num_kv_heads=4, head_dim=256, kv_dtype=kv_dtype), 4, "NHD", "zero")
    check(backend, k, v, keys, values, np.arange(64))


@pytest.mark.parametrize("dtype", Q_DTYPES)
def test_unscaled_writes_in_the_same_dtype_copy_bits(backend, dtype):
    """Payloads of NaN and the sign of zero included."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**16, (32, 2, 64 * DTYPES[dtype].itemsize // 2), dtype=np.uint16)
    k = bits.view(DTYPES[dtype])
    keys, values = make_pool(Shape(kv_dtype=dtype), 2, "NHD", "zero")
    keys, values = check(backend, k, k, keys, values, np.arange(32))
    assert keys.tobytes() == values.tobytes() == k.tobytes()


def test_saturation_by_hand(backend):
    x = np.array([1e9, -1e9, np.inf, -np.inf, np.nan, 2.5, 3.5, -0.5], np.float32).reshape(1, 1, 8)
    for kv_dtype, want in {
        "float8_e4m3fn": [448, -448, 448, -448, np.nan, 2.5, 3.5, -0.5],
        "float8_e5m2": [57344, -57344, 57344, -57344, np.nan, 2.5, 3.5, -0.5],
        "float16": [65504, -65504, 65504, -65504, np.nan, 2.5, 3.5, -0.5],
        "int8": [127, -128, 127, -128, 0, 2, 4, 0],
    }.items():
        keys, values = make_pool(Shape(num_kv_heads=1, head_dim=8, kv_dtype=kv_dtype), 1, "NHD", "zero")
        keys, _ = check(backend, x, x, keys, values, np.array([3]))
        np.testing.assert_array_equal(keys[0, 3, 0].astype(np.float32), want)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_may_be_int32_or_int64(backend, dtype):
    rng = np.random.default_rng(3)
    keys, values = make_pool(Shape(), 3, "HND", "nan")
    k, v = normal((2, 4, 2, 64), "float32", rng)
    check(backend, k, v, keys, values, np.array([47, 0, -1, 16], dtype))


def test_nothing_to_append(backend):
    keys, values = make_pool(Shape(), 2, "NHD", "nan")
    empty = np.zeros((0, 2, 64), np.float32)
    check(backend, empty, empty, keys, values, np.zeros(0, np.int64))


def test_views_of_a_fused_projection(backend):
    """k and v are slices of one [num_tokens, heads, head_dim] array."""
    rng = np.random.default_rng(4)
    keys, values = make_pool(Shape(), 2, "NHD", "nan")
    fused = backend.asarray(normal((6, 8, 64), "float32", rng))
    slots = np.array([3, 1, 30, 9, 8, 2])
    want = [reference.append(backend.asnumpy(fused)[:, a : a + 2], p, slots) for a, p in ((4, keys), (6, values))]
    keys, values = backend.asarray(keys), backend.asarray(values)
    npg.append(fused[:, 4:6], fused[:, 6:8], keys, values, backend.asarray(slots))
    for got, pool in zip((keys, values), want, strict=True):
        assert_same_numbers(backend.asnumpy(got), pool)


def test_what_is_appended_is_what_decode_reads(backend):
    rng = np.random.default_rng(5)
    shape = Shape(kv_dtype="float8_e4m3fn", q_dtype="bfloat16")
    keys, values = (backend.asarray(p) for p in make_pool(shape, 4, "NHD", "nan"))
    k, v = normal((2, 20, 2, 64), "bfloat16", rng)
    q = normal((1, 4, 64), "bfloat16", rng)
    table, lengths = np.array([[3, 1]], np.int32), np.array([20], np.int32)
    slots = table[0, np.arange(20) // 16] * 16 + np.arange(20) % 16
    scales = {"k_scale": 0.02, "v_scale": 0.01}
    npg.append(*map(backend.asarray, (k, v)), keys, values, backend.asarray(slots), **scales)
    got = npg.decode(backend.asarray(q), keys, values, *map(backend.asarray, (table, lengths)), **scales)
    out, _ = reference.attention(q, k, v)
    assert np.abs(backend.asnumpy(got).astype(np.float32) - out).max() < 2.0**-4 * np.abs(v.astype(np.float32)).max()
