"""Conversions: float and integer, float16, bfloat16 and float8 in both directions, packing."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from ptxrun.tests import oracles
from ptxrun.tests.ptxcase import run, same

rng = np.random.default_rng(11)
N = 1024
ALL16 = np.arange(65536, dtype=np.uint16)
FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def halves(ty, bits):
    return bits.view(np.float16 if ty == "f16" else ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize(
    "ty,lowest,highest,dtype",
    [("s32", -(2**31), 2**31 - 1, np.int32), ("u32", 0, 2**32 - 1, np.uint32), ("s64", -(2**63), 2**63 - 1, np.int64),
     ("u64", 0, 2**64 - 1, np.uint64)],
)
@pytest.mark.parametrize("mode,f", [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)])
def test_float_to_integer(mode, f, ty, lowest, highest, dtype):
    x = oracles.float32_edges(rng, N)
    x[100:400] = rng.standard_normal(300) * 1000
    x[400:420] = np.arange(-10, 10) / 2
    (out,) = run(f"cvt.{mode}.{ty}.f32 %o0, %i0;", [x], [dtype])
    for value, got in zip(x.tolist(), out.tolist()):
        if math.isnan(value):
            expected = 0
        elif math.isinf(value):
            expected = lowest if value < 0 else highest
        else:
            expected = min(max(int(f(value)), lowest), highest)
        assert got == expected, value


def test_integer_to_float():
    bits = rng.integers(0, 2**32, N, dtype=np.uint64).astype(np.uint32)
    signed, unsigned, half = run(
        "cvt.rn.f32.s32 %o0, %i0; cvt.rn.f32.u32 %o1, %i0; "
        "cvt.s32.s8 %r0, %i0; cvt.rn.f16.s32 %h0, %r0; mov.b16 %o2, %h0;",
        [bits], [np.float32, np.float32, np.float16],
    )
    assert (signed == bits.view(np.int32).astype(np.float32)).all() and (unsigned == bits.astype(np.float32)).all()
    assert (half == bits.astype(np.int8).astype(np.float16)).all()


def test_integer_to_integer():
    x = rng.integers(0, 2**32, N, dtype=np.uint64).astype(np.uint32)
    body = """cvt.s64.s32 %o0, %i0; cvt.u64.u32 %o1, %i0; cvt.s32.s8 %o2, %i0; cvt.u32.u16 %o3, %i0;
        cvt.sat.s8.s32 %o4, %i0;"""
    outs = run(body, [x], [np.int64, np.uint64, np.int32, np.uint32, np.int32])
    signed = x.view(np.int32)
    for out, expected in zip(outs, (signed, x, x.astype(np.int8), x & 0xFFFF, np.clip(signed, -128, 127))):
        assert (out == expected).all()


def test_rounding_to_integral():
    x = np.r_[rng.standard_normal(N - 20) * 100, np.arange(-10, 10) / 2].astype(np.float32)
    outs = run(
        "cvt.rni.f32.f32 %o0, %i0; cvt.rmi.f32.f32 %o1, %i0; cvt.rzi.ftz.f32.f32 %o2, %i0;", [x], [np.float32] * 3
    )
    for out, expected in zip(outs, (np.rint(x), np.floor(x), np.trunc(x))):
        assert same(out, expected).all()


@pytest.mark.parametrize("ty,target", [("f16", "sm_80"), ("bf16", "sm_90a")])
def test_every_half_to_float32_and_back(ty, target):
    (wide,) = run(f"cvt.f32.{ty} %o0, %i0;", [ALL16], [np.float32], target=target)
    assert same(wide, halves(ty, ALL16)).all()
    (back,) = run(f"cvt.rn.{ty}.f32 %o0, %i0;", [wide], [np.uint16], target=target)
    nan = np.isnan(wide)
    assert (back[~nan] == ALL16[~nan]).all() and (back[nan] == 0x7FFF).all()


@pytest.mark.parametrize("ty", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_float32_to_half(ty, mode):
    """Normal and subnormal results, ties, overflow; alone and as a pair."""
    _, least, largest = oracles.FORMATS[ty]
    x = np.ldexp(rng.standard_normal(N), rng.integers(least - 14, least + 20, N)).astype(np.float32)
    x[:256] = rng.standard_normal(256)
    codes = rng.integers(0x100, 0x7000, 256).astype(np.uint16)
    x[256:512] = (halves(ty, codes) + halves(ty, codes + 1)) / 2
    x[512:520] = [np.inf, -np.inf, np.nan, 0.0, -0.0, float(largest), -float(largest), 2.0**-149]
    single, pair = run(
        f"cvt.{mode}.{ty}.f32 %o0, %i0; cvt.{mode}.{ty}x2.f32 %o1, %i1, %i0;",
        [x, x[::-1].copy()],
        [np.uint16, np.uint32],
    )
    assert (
        pair == single.astype(np.uint32) | single[::-1].astype(np.uint32) << 16
    ).all()  # the first source is the upper half
    for value, got in zip(x.tolist(), halves(ty, single).tolist()):
        if not math.isfinite(value):
            assert got == value or (math.isnan(got) and math.isnan(value))
        else:
            assert Fraction(got) == oracles.rounded(Fraction(value), ty, mode) and math.copysign(
                1, got
            ) == math.copysign(1, value)


def test_ties_to_even_and_overflow():
    """1 + half a unit, 1 + 3 halves; what overflows is infinite, or with .satfinite the largest number."""
    for ty, bits in (("f16", 11), ("bf16", 8)):
        unit = 2.0 ** (1 - bits)
        x = np.array([1 + unit / 2, 1 + 3 * unit / 2, 3e38, -3e38] * 8, np.float32)
        if ty == "bf16":
            x[2::4], x[3::4] = np.float32(3.4e38), np.float32(-3.4e38)
        plain, finite = run(f"cvt.rn.{ty}.f32 %o0, %i0; cvt.rn.satfinite.{ty}.f32 %o1, %i0;", [x], [np.uint16] * 2)
        largest = float(oracles.FORMATS[ty][2])
        assert halves(ty, plain)[:4].tolist() == [1, 1 + 2 * unit, np.inf, -np.inf]
        assert halves(ty, finite)[:4].tolist() == [1, 1 + 2 * unit, largest, -largest]


def test_relu():
    x = np.array([-1.5, 2.5, -0.0, np.nan] * 8, np.float32)
    (pair,) = run("cvt.rn.relu.f16x2.f32 %o0, %i0, %i0;", [x], [np.uint32])
    assert same(halves("f16", pair.view(np.uint16)[:8:2].copy()), np.array([0, 2.5, 0, np.nan], np.float32)).all()


@pytest.mark.parametrize("fmt", FLOAT8)
def test_every_float8_to_half(fmt):
    codes = np.arange(256, dtype=np.uint16)
    (pair,) = run(f"cvt.rn.f16x2.{fmt}x2 %o0, %i0;", [codes | (codes[::-1] << 8)], [np.uint32])
    expected = codes.astype(np.uint8).view(FLOAT8[fmt]).astype(np.float16)
    both = pair.view(np.float16).reshape(-1, 2)
    assert same(both[:, 0], expected).all() and same(both[:, 1], expected[::-1]).all()


@pytest.mark.parametrize("fmt", FLOAT8)
def test_float32_to_float8(fmt):
    """Every midpoint of two codes and its neighbours, subnormals, saturation, infinities and NaN."""
    codes = np.arange(0x80, dtype=np.uint8).view(FLOAT8[fmt]).astype(np.float64)
    codes = codes[np.isfinite(codes)]
    middle = ((codes[1:] + codes[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(s), dtype=np.float32) for s in (0, np.inf)]
    x = np.r_[middle, *beside, codes.astype(np.float32), 1e6, np.inf, 2.0**-30, 0.0].astype(np.float32)
    x = np.r_[x, -x, np.float32(np.nan)]
    x = np.r_[x, rng.standard_normal(-len(x) % 128).astype(np.float32)]
    (out,) = run(f"cvt.rn.satfinite.{fmt}x2.f32 %o0, %i1, %i0;", [x, x[::-1].copy()], [np.uint16], block=128)
    low = (out & 0xFF).astype(np.uint8)
    assert ((out >> 8) == low[::-1]).all()
    for value, code, got in zip(x.tolist(), low, low.view(FLOAT8[fmt]).astype(np.float64).tolist()):
        if math.isnan(value):
            assert code == 0x7F
        else:
            exact = (
                oracles.FORMATS[fmt][2]
                if value == math.inf
                else -oracles.FORMATS[fmt][2]
                if value == -math.inf
                else Fraction(value)
            )
            assert Fraction(got) == oracles.saturated(exact, fmt) and math.copysign(1, got) == math.copysign(
                1, value
            ), value


@pytest.mark.parametrize("fmt", FLOAT8)
def test_half_pairs_to_float8(fmt):
    finite = ALL16[np.isfinite(ALL16.view(np.float16))]
    finite = finite[: len(finite) // 128 * 128]
    (out,) = run(f"cvt.rn.satfinite.{fmt}x2.f16x2 %o0, %i0;", [finite.astype(np.uint32)], [np.uint16], block=128)
    got = (out & 0xFF).astype(np.uint8).view(FLOAT8[fmt]).astype(np.float32)
    top = float(oracles.FORMATS[fmt][2])
    expected = np.clip(finite.view(np.float16).astype(np.float32), -top, top).astype(FLOAT8[fmt]).astype(np.float32)
    assert same(got, expected).all()


def test_tf32():
    """Ten fraction bits, ties away from zero."""
    x = np.r_[rng.standard_normal(N - 32), 1 + (np.arange(32) + 0.5) * 2.0**-10].astype(np.float32)
    (out,) = run("cvt.rna.tf32.f32 %o0, %i0;", [x], [np.float32])
    unit = 2.0 ** (np.floor(np.log2(np.abs(x))) - 10)
    assert (out == np.trunc(x / unit + np.copysign(0.5, x)) * unit).all()


def test_packing():
    x = rng.integers(0, 2**64 - 1, N, dtype=np.uint64)
    body = """mov.b64 {%r0, %r1}, %i0; mov.b64 %o0, {%r1, %r0};
        mov.b32 {%h0, %h1}, %r0; mov.b32 %o1, {%h1, %h0}; mov.b16 %o2, %h1;"""
    swapped, halves_swapped, upper = run(body, [x], [np.uint64, np.uint32, np.uint16])
    low = x.astype(np.uint32)
    assert (swapped == (x >> np.uint64(32) | x << np.uint64(32))).all()
    assert (halves_swapped == (low >> 16 | low << 16)).all() and (upper == low >> 16).all()


def test_set_and_slct():
    a, b = (rng.standard_normal(N).astype(np.float32) for _ in range(2))
    body = "set.gt.u32.f32 %o0, %i0, %i1; set.gt.f32.f32 %o1, %i0, %i1; slct.f32.f32 %o2, %i0, %i1, %i1;"
    ones, floats, chosen = run(body, [a, b], [np.uint32, np.float32, np.float32])
    assert (ones == np.where(a > b, 0xFFFFFFFF, 0)).all() and (floats == (a > b)).all()
    assert (chosen == np.where(b >= 0, a, b)).all()
