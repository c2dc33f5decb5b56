"""Float arithmetic against the C library, exact rationals and IEEE rules."""

import math
from fractions import Fraction

import numpy as np
import pytest

from ptxrun.tests import oracles
from ptxrun.tests.ptxcase import run, same

rng = np.random.default_rng(7)
N = 1024
SPECIALS = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.0], np.float32)
PAIRS = np.repeat(SPECIALS, 16), np.tile(np.repeat(SPECIALS, 2), 8)


def edges():
    return oracles.float32_edges(rng, N)


def test_basic_float32():
    a, b = edges(), rng.permutation(edges())
    with np.errstate(all="ignore"):
        for body, expected in (
            ("add.f32 %o0, %i0, %i1;", a + b),
            ("sub.rn.f32 %o0, %i0, %i1;", a - b),
            ("mul.f32 %o0, %i0, %i1;", a * b),
            ("div.rn.f32 %o0, %i0, %i1;", a / b),
            ("sqrt.rn.f32 %o0, %i0;", np.sqrt(a)),
            ("rcp.rn.f32 %o0, %i0;", np.float32(1) / a),
            ("neg.f32 %o0, %i0;", -a),
            ("abs.f32 %o0, %i0;", np.abs(a)),
            ("copysign.f32 %o0, %i1, %i0;", np.copysign(a, b)),
        ):
            (out,) = run(body, [a, b], [np.float32])
            assert same(out, expected).all(), body


def test_fma_is_fused():
    a, b, c = edges(), rng.permutation(edges()), rng.permutation(edges())
    x = rng.integers(0, 1 << 24, N).astype(np.float32) * np.float32(2.0**-12)
    y = (1 + rng.integers(0, 1 << 12, N) * 2.0**-12).astype(np.float32)
    tiny = np.float32(2.0**-100) * y
    subnormal = (c.view(np.uint32) & np.uint32(0x807FFFFF)).view(np.float32)
    for row in ((a, b, c), (x, y, -(x * y)), (x, y, np.float32(2.0**30) * y), (a, tiny, subnormal)):
        (out,) = run("fma.rn.f32 %o0, %i0, %i1, %i2;", row, [np.float32])
        assert same(out, oracles.fmaf(*row)).all()


def test_fma_beside_a_midpoint():
    """The exact sum lies just beside a float32 midpoint: rounding twice goes wrong."""
    a = np.full(N, 1 + 2.0**-12, np.float32)  # its square is a midpoint
    c = np.where(np.arange(N) % 2, 2.0**-70, -(2.0**-70)).astype(np.float32)
    (out,) = run("fma.rn.f32 %o0, %i0, %i0, %i1;", [a, c], [np.float32])
    assert (out == oracles.fmaf(a, a, c)).all() and len(set(out.tolist())) == 2


def test_packed_float32():
    a, b, c = (rng.standard_normal((N, 2)).astype(np.float32) for _ in range(3))
    body = "add.rn.f32x2 %o0, %i0, %i1; mul.rn.f32x2 %o1, %i0, %i1; fma.rn.f32x2 %o2, %i0, %i1, %i2;"
    outs = run(body, [x.view(np.uint64).ravel() for x in (a, b, c)], [np.uint64] * 3, target="sm_100a")
    expected = a + b, a * b, oracles.fmaf(a.ravel(), b.ravel(), c.ravel()).reshape(N, 2)
    for out, e in zip(outs, expected):
        assert (out.view(np.float32).reshape(N, 2) == e).all()


def test_fma64():
    a, b, c = (rng.standard_normal(N) for _ in range(3))
    c[: N // 2] = -(a * b)[: N // 2]
    (out,) = run("fma.rn.f64 %o0, %i0, %i1, %i2;", [a, b, c], [np.float64])
    assert (out == oracles.fma(a, b, c)).mean() > 0.999


@pytest.mark.parametrize("op,f", [("add", lambda x, y: x + y), ("mul", lambda x, y: x * y)])
def test_directed_rounding(op, f):
    a, b = (rng.standard_normal(N).astype(np.float32) for _ in range(2))
    down, up, zero = run(
        f"{op}.rm.f32 %o0, %i0, %i1; {op}.rp.f32 %o1, %i0, %i1; {op}.rz.f32 %o2, %i0, %i1;", [a, b], [np.float32] * 3
    )
    for i in range(N):
        exact = f(Fraction(float(a[i])), Fraction(float(b[i])))
        assert Fraction(float(down[i])) <= exact <= Fraction(float(up[i]))
        assert down[i] == up[i] or np.nextafter(down[i], np.float32(np.inf)) == up[i]
        assert zero[i] == (down[i] if exact > 0 else up[i])


def test_min_max():
    a, b = PAIRS
    body = "max.f32 %o0, %i0, %i1; min.f32 %o1, %i0, %i1; max.NaN.f32 %o2, %i0, %i1; min.NaN.f32 %o3, %i0, %i1;"
    for x, y, highest, lowest, highest_nan, lowest_nan in zip(a, b, *run(body, [a, b], [np.float32] * 4)):
        if math.isnan(x) or math.isnan(y):
            other = y if math.isnan(x) else x
            assert same(highest, other) and same(lowest, other) and math.isnan(highest_nan) and math.isnan(lowest_nan)
            continue
        ordered = sorted([x, y], key=lambda v: (float(v), math.copysign(1, v)))
        assert same(highest, ordered[1]) and same(lowest, ordered[0])
        assert same(highest_nan, ordered[1]) and same(lowest_nan, ordered[0])


def test_three_operand_max():
    a, b, c = (rng.standard_normal(N).astype(np.float32) for _ in range(3))
    (out,) = run("max.f32 %o0, %i0, %i1, %i2;", [a, b, c], [np.float32], target="sm_100a")
    assert (out == np.maximum(np.maximum(a, b), c)).all()


def test_comparisons():
    a, b = PAIRS
    nan = np.isnan(a) | np.isnan(b)
    with np.errstate(all="ignore"):
        for name, expected in (
            ("eq", a == b), ("ne", (a != b) & ~nan), ("lt", a < b), ("le", a <= b), ("gt", a > b), ("ge", a >= b),
            ("equ", (a == b) | nan), ("neu", (a != b) | nan), ("ltu", (a < b) | nan), ("leu", (a <= b) | nan),
            ("gtu", (a > b) | nan), ("geu", (a >= b) | nan), ("num", ~nan), ("nan", nan),
        ):
            (out,) = run(f"setp.{name}.f32 %p0, %i0, %i1; selp.u32 %o0, 1, 0, %p0;", [a, b], [np.uint32])
            assert (out == expected).all(), name


def test_test_property():
    a = edges()
    tests = "finite infinite number notanumber normal subnormal".split()
    body = "".join(f"testp.{t}.f32 %p0, %i0; selp.u32 %o{i}, 1, 0, %p0; " for i, t in enumerate(tests))
    finite, infinite, number, nan, normal, subnormal = run(body, [a], [np.uint32] * 6)
    assert (finite == np.isfinite(a)).all() and (infinite == np.isinf(a)).all()
    assert (number == ~np.isnan(a)).all() and (nan == np.isnan(a)).all()
    small = np.abs(a) < 2.0**-126
    assert (normal == (np.isfinite(a) & ~small)).all() and (subnormal == (small & (a != 0))).all()


def test_flush_and_saturate():
    a = edges()
    one = np.full(N, 1.0, np.float32)
    flushed, saturated = run("mul.ftz.f32 %o0, %i0, %i1; add.sat.f32 %o1, %i0, %i1;", [a, one], [np.float32] * 2)
    subnormal = (np.abs(a) < 2.0**-126) & (a != 0)
    assert subnormal.any() and same(flushed, np.where(subnormal, np.copysign(np.float32(0), a), a)).all()
    with np.errstate(all="ignore"):
        assert (saturated == np.where(np.isnan(a), 0, np.clip(a + one, 0, 1))).all()


SPECIAL = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions_are_rounded_once(name):
    x = np.abs(rng.standard_normal(N)).astype(np.float32) + np.float32(0.01)
    (out,) = run(f"{name}.approx.f32 %o0, %i0;", [x], [np.float32])
    assert (out == SPECIAL[name](x.astype(np.float64)).astype(np.float32)).all()


@pytest.mark.parametrize("name,bound", [("ex2", 2**-22), ("rcp", 2**-23), ("tanh", 2**-11), ("lg2", 2**-22)])
def test_special_functions_at_their_documented_error(name, bound):
    """Options.approximation moves every result by the error that hardware may have."""
    x = np.abs(rng.standard_normal(N)).astype(np.float32) + np.float32(1.5)
    exact = SPECIAL[name](x.astype(np.float64))
    for sign in (-1, 1):
        (out,) = run(f"{name}.approx.f32 %o0, %i0;", [x], [np.float32], approximation=sign)
        relative = (out / exact - 1) * sign
        assert (relative > bound / 2 - 2**-24).all() and (relative < bound + 2**-24).all()
    (out,) = run("rcp.rn.f32 %o0, %i0;", [x], [np.float32], approximation=1)  # not an .approx
    assert (out == 1 / x).all()


def test_ex2_edges():
    x = np.linspace(-160, 140, N).astype(np.float32)
    x[:6] = [-np.inf, np.inf, np.nan, 0.0, -0.0, -200]
    plain, flushed = run("ex2.approx.f32 %o0, %i0; ex2.approx.ftz.f32 %o1, %i0;", [x], [np.float32] * 2)
    assert plain[0] == 0 and plain[1] == np.inf and np.isnan(plain[2]) and plain[3] == plain[4] == 1 and plain[5] == 0
    subnormal = (plain != 0) & (np.abs(plain) < 2.0**-126)
    assert subnormal.any() and (flushed[subnormal] == 0).all() and same(flushed, plain)[~subnormal].all()


def test_reciprocal_and_division_edges():
    a, b = PAIRS
    with np.errstate(all="ignore"):
        for body, expected in (
            ("rcp.approx.ftz.f32 %o0, %i0;", 1 / a),
            ("div.approx.f32 %o0, %i0, %i1;", a / b),
            ("div.full.f32 %o0, %i0, %i1;", a / b),
        ):
            (out,) = run(body, [a, b], [np.float32])
            assert same(out, expected).all(), body
    big = np.full(4, 2.0**127, np.float32)
    (out,) = run("div.approx.f32 %o0, %i0, %i1;", [np.array([1, np.inf, -3, np.nan], np.float32), big], [np.float32])
    assert same(out, np.array([0, np.nan, -0.0, np.nan], np.float32)).all()  # documented: no quotient for such divisors
    (out,) = run("div.full.f32 %o0, %i0, %i1;", [big, big], [np.float32])
    assert (out == 1).all()


def decode(ty, bits):
    return bits.view(np.float16).astype(np.float32) if ty == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)


def pack(low, high):
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


@pytest.mark.parametrize("ty", ["f16", "bf16"])
def test_half_arithmetic(ty):
    singles = [np.ldexp(rng.standard_normal(N), rng.integers(-6, 6, N)).astype(np.float32) for _ in range(3)]
    a, b, c = run("".join(f"cvt.rn.{ty}.f32 %o{i}, %i{i}; " for i in range(3)), singles, [np.uint16] * 3)
    body = f"add.{ty} %o0, %i0, %i1; mul.{ty} %o1, %i0, %i1; fma.rn.{ty} %o2, %i0, %i1, %i2;"
    results = run(body, [a, b, c], [np.uint16] * 3)
    for i in range(N):
        x, y, z = (Fraction(float(decode(ty, v)[i])) for v in (a, b, c))
        for got, exact in zip(results, (x + y, x * y, x * y + z)):
            assert Fraction(float(decode(ty, got)[i])) == oracles.rounded(exact, ty)
    (packed,) = run(f"fma.rn.{ty}x2 %o0, %i0, %i1, %i2;", [pack(a, b), pack(b, c), pack(c, a)], [np.uint32])
    (low,) = run(f"fma.rn.{ty} %o0, %i0, %i1, %i2;", [a, b, c], [np.uint16])
    (high,) = run(f"fma.rn.{ty} %o0, %i0, %i1, %i2;", [b, c, a], [np.uint16])
    assert (packed == pack(low, high)).all()


@pytest.mark.parametrize("ty", ["f16", "bf16"])
def test_half_max_neg_and_special(ty):
    x = rng.standard_normal(N).astype(np.float32)
    a, b = run(f"cvt.rn.{ty}.f32 %o0, %i0; cvt.rn.{ty}.f32 %o1, %i1;", [x, x[::-1].copy()], [np.uint16] * 2)
    low, high = decode(ty, a), decode(ty, b)
    (largest,) = run(f"max.{ty}x2 %o0, %i0, %i1;", [pack(a, b), pack(b, a)], [np.uint32])
    halves = largest.view(np.uint16)
    assert (decode(ty, halves[0::2].copy()) == np.maximum(low, high)).all() and (halves[0::2] == halves[1::2]).all()
    (negated,) = run(f"neg.{ty}x2 %o0, %i0;", [pack(a, b)], [np.uint32])
    assert (negated == pack(a ^ 0x8000, b ^ 0x8000)).all()
    (power,) = run(f"ex2.approx{'.ftz' if ty == 'bf16' else ''}.{ty}x2 %o0, %i0;", [pack(a, b)], [np.uint32])
    exact = np.exp2(low.astype(np.float64))
    assert (np.abs(decode(ty, power.view(np.uint16)[0::2].copy()) / exact - 1) <= 2.0 ** -oracles.FORMATS[ty][0]).all()
    (less,) = run(
        f"setp.lt.{ty}x2 %p0|%p1, %i0, %i1; selp.u32 %o0, 1, 0, %p0; @%p1 or.b32 %o0, %o0, 2;",
        [pack(a, b), pack(b, a)], [np.uint32],
    )
    assert (less == (low < high) + 2 * (high < low)).all()
