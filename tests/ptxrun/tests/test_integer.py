"""Integer instructions against Python integers."""

import numpy as np
import pytest

from ptxrun.tests.ptxcase import run

rng = np.random.default_rng(7)
N = 1024
UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def integers(bits):
    """Random bits with the edges of the format, small numbers and shift counts mixed in, in all pairings."""
    a = rng.integers(0, 2**64 - 1, N, dtype=np.uint64, endpoint=True)
    top = 1 << (bits - 1)
    edges = np.array([0, 1, 2, 3, 2 * top - 1, 2 * top - 2, top, top - 1, 5, 31, 32, 33, 63, 64, 255, 256], np.uint64)
    a[:16] = edges
    a[16:272] = np.repeat(edges, 16)
    return rng.permutation(a).astype(UNSIGNED[bits])


def as_signed(x, bits):
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def check(body, bits, f, inputs=2, out_bits=None, signed=False):
    """body's %o0 equals f of the inputs, modulo the width."""
    out_bits = out_bits or bits
    xs = [integers(bits) for _ in range(inputs)]
    (out,) = run(body, xs, [UNSIGNED[out_bits]])
    for i, row in enumerate(zip(*[x.tolist() for x in xs])):
        values = [as_signed(v, bits) for v in row] if signed else row
        assert int(out[i]) == f(*values) & ((1 << out_bits) - 1), (body, [hex(v) for v in row], hex(int(out[i])))


def truncated_quotient(a, b):
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["s", "u"])
def test_arithmetic(bits, sign):
    ty, signed = f"{sign}{bits}", sign == "s"
    for body, f, inputs in (
        (f"add.{ty} %o0, %i0, %i1;", lambda a, b: a + b, 2),
        (f"sub.{ty} %o0, %i0, %i1;", lambda a, b: a - b, 2),
        (f"mul.lo.{ty} %o0, %i0, %i1;", lambda a, b: a * b, 2),
        (f"mul.hi.{ty} %o0, %i0, %i1;", lambda a, b: (a * b) >> bits, 2),
        (f"mad.lo.{ty} %o0, %i0, %i1, %i2;", lambda a, b, c: a * b + c, 3),
        (f"min.{ty} %o0, %i0, %i1;", min, 2),
        (f"max.{ty} %o0, %i0, %i1;", max, 2),
        (f"or.b{bits} %o0, %i1, 1; div.{ty} %o0, %i0, %o0;", lambda a, b: truncated_quotient(a, b | 1), 2),
        (
            f"or.b{bits} %o0, %i1, 1; rem.{ty} %o0, %i0, %o0;",
            lambda a, b: a - (b | 1) * truncated_quotient(a, b | 1),
            2,
        ),
    ):
        check(body, bits, f, inputs, signed=signed)
    if bits < 64:
        check(f"mul.wide.{ty} %o0, %i0, %i1;", bits, lambda a, b: a * b, out_bits=2 * bits, signed=signed)


def test_mad_wide_and_sat():
    check("cvt.s64.s32 %d0, %i2; mad.wide.s32 %o0, %i0, %i1, %d0;", 32, lambda a, b, c: a * b + c, 3, 64, signed=True)
    check("add.sat.s32 %o0, %i0, %i1;", 32, lambda a, b: max(min(a + b, 2**31 - 1), -(2**31)), signed=True)
    check("sub.sat.s32 %o0, %i0, %i1;", 32, lambda a, b: max(min(a - b, 2**31 - 1), -(2**31)), signed=True)
    check("sad.u32 %o0, %i0, %i1, %i2;", 32, lambda a, b, c: c + abs(a - b), 3)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["s", "u"])
def test_shifts_by_registers(bits, sign):
    amount = {16: "cvt.u32.u16 %r0, %i1;", 32: "mov.b32 %r0, %i1;", 64: "cvt.u32.u64 %r0, %i1;"}[
        bits
    ] + "and.b32 %r0, %r0, 127;"
    check(f"{amount} shr.{sign}{bits} %o0, %i0, %r0;", bits, lambda a, b: a >> (b & 127), signed=sign == "s")
    check(f"{amount} shl.b{bits} %o0, %i0, %r0;", bits, lambda a, b: a << (b & 127))


@pytest.mark.parametrize("k", [0, 5, 31, 32, 40])
def test_shifts_by_constants(k):
    check(f"shl.b32 %o0, %i0, {k};", 32, lambda a: a << k, 1)
    check(f"shr.u32 %o0, %i0, {k};", 32, lambda a: a >> k, 1)
    check(f"shr.s32 %o0, %i0, {k};", 32, lambda a: a >> k, 1, signed=True)


def extracted(a, position, length, bits, signed):
    position, length = position & 255, length & 255
    sign = (a >> min(position + length - 1, bits - 1)) & 1 if signed and length else 0
    result = 0
    for i in range(bits):
        result |= ((a >> (position + i)) & 1 if i < length and position + i < bits else sign) << i
    return result


def inserted(a, b, position, length, bits):
    for i in range(length):
        if position + i < bits:
            b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return b


@pytest.mark.parametrize("sign", ["s", "u"])
def test_bit_fields(sign):
    signed = sign == "s"
    check(f"bfe.{sign}32 %o0, %i0, %i1, %i2;", 32, lambda a, p, n: extracted(a, p, n, 32, signed), 3)
    to32 = "cvt.u32.u64 %r0, %i1; cvt.u32.u64 %r1, %i2;"
    check(f"{to32} bfe.{sign}64 %o0, %i0, %r0, %r1;", 64, lambda a, p, n: extracted(a, p, n, 64, signed), 3)
    split = "and.b32 %r0, %i2, 63; shr.u32 %r1, %i2, 26;"
    check(f"{split} bfi.b32 %o0, %i0, %i1, %r0, %r1;", 32, lambda a, b, c: inserted(a, b, c & 63, c >> 26, 32), 3)


def permuted(a, b, selector):
    both, result = b << 32 | a, 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 255
        result |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return result


@pytest.mark.parametrize("selector", ["%i2", "0x5410", "0x7632", "0x3210", "0x9b37"])
def test_prmt(selector):
    fixed = None if selector == "%i2" else int(selector, 16)
    check(f"prmt.b32 %o0, %i0, %i1, {selector};", 32, lambda a, b, c: permuted(a, b, c if fixed is None else fixed), 3)


@pytest.mark.parametrize("table", [0x96, 0xE8, 0x1B, 0xC0, 0x3C])
def test_lop3(table):
    def f(a, b, c):
        return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))

    check(f"lop3.b32 %o0, %i0, %i1, %i2, {table};", 32, f, 3)


def test_bit_counts():
    check("popc.b32 %o0, %i0;", 32, lambda a: a.bit_count(), 1)
    check("popc.b64 %o0, %i0;", 64, lambda a: a.bit_count(), 1, out_bits=32)
    check("clz.b32 %o0, %i0;", 32, lambda a: 32 - a.bit_length(), 1)
    check("clz.b64 %o0, %i0;", 64, lambda a: 64 - a.bit_length(), 1, out_bits=32)
    check("brev.b32 %o0, %i0;", 32, lambda a: int(f"{a:032b}"[::-1], 2), 1)
    check("bfind.u32 %o0, %i0;", 32, lambda a: a.bit_length() - 1, 1)
    check("bfind.s32 %o0, %i0;", 32, lambda a: (~a if a < 0 else a).bit_length() - 1, 1, signed=True)
    check("bfind.shiftamt.u32 %o0, %i0;", 32, lambda a: 32 - a.bit_length() if a else -1, 1)


def test_funnel_shift():
    check("shf.l.wrap.b32 %o0, %i0, %i1, %i2;", 32, lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32, 3)
    check("shf.r.clamp.b32 %o0, %i0, %i1, %i2;", 32, lambda a, b, c: (b << 32 | a) >> min(c, 32), 3)
    check("shf.r.wrap.b32 %o0, %i0, %i1, 7;", 32, lambda a, b: (b << 32 | a) >> 7)


def test_logic_and_signs():
    check("xor.b32 %o0, %i0, %i1; and.b32 %o0, %o0, 0xffff00f0;", 32, lambda a, b: (a ^ b) & 0xFFFF00F0)
    check("not.b32 %o0, %i0;", 32, lambda a: ~a, 1)
    check("neg.s32 %o0, %i0;", 32, lambda a: -a, 1)
    check("abs.s32 %o0, %i0;", 32, lambda a: abs(a), 1, signed=True)


def test_dp4a():
    def dot(a, b, c):
        return c + sum(as_signed(a >> s, 8) * as_signed(b >> s, 8) for s in (0, 8, 16, 24))

    check("dp4a.s32.s32 %o0, %i0, %i1, %i2;", 32, dot, 3)


def test_carry_chains():
    halves = "cvt.u32.u64 %r0, %i0; cvt.u32.u64 %r1, %i1; shr.u64 %d0, %i0, 32; shr.u64 %d1, %i1, 32;"
    halves += "cvt.u32.u64 %r2, %d0; cvt.u32.u64 %r3, %d1;"
    joined = "mov.b64 %o0, {%r4, %r5};"
    check(f"{halves} add.cc.u32 %r4, %r0, %r1; addc.u32 %r5, %r2, %r3; {joined}", 64, lambda a, b: a + b)
    check(f"{halves} sub.cc.u32 %r4, %r0, %r1; subc.u32 %r5, %r2, %r3; {joined}", 64, lambda a, b: a - b)
    wide = "mad.lo.cc.u32 %r0, %i0, %i1, %i2; madc.hi.u32 %r1, %i0, %i1, 0; mov.b64 %o0, {%r0, %r1};"
    check(wide, 32, lambda a, b, c: a * b + c, 3, out_bits=64)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["s", "u"])
def test_setp_and_selp(bits, sign):
    for name, f in (
        ("lt", lambda a, b: a < b),
        ("le", lambda a, b: a <= b),
        ("ge", lambda a, b: a >= b),
        ("eq", lambda a, b: a == b),
        ("ne", lambda a, b: a != b),
    ):
        body = f"setp.{name}.{sign}{bits} %p0, %i0, %i1; selp.b{bits} %o0, %i0, %i1, %p0;"
        check(body, bits, lambda a, b: a if f(a, b) else b, signed=sign == "s")


def test_setp_with_two_targets_and_a_combination():
    both = """setp.lt.s32 %p1, %i2, 0; setp.gt.and.s32 %p0|%p2, %i0, %i1, %p1;
        selp.u32 %o0, 1, 0, %p0; @%p2 or.b32 %o0, %o0, 2;"""
    check(both, 32, lambda a, b, c: (a > b and c < 0) | (2 * (not a > b and c < 0)), 3, signed=True)
    negated = "setp.lt.s32 %p1, %i1, 0; setp.gt.or.u32 %p0, %i0, 77, !%p1; selp.u32 %o0, 1, 0, %p0;"
    check(negated, 32, lambda a, b: a > 77 or not b >> 31)


def test_division_by_zero_is_a_hazard():
    from ptxrun.tests.ptxcase import elementwise, launch_pointers

    x, y, out = np.full(32, 7, np.uint32), np.where(np.arange(32) == 9, 0, 2).astype(np.uint32), np.zeros(32, np.uint32)
    result = launch_pointers(elementwise("div.u32 %o0, %i0, %i1;", [4, 4], [4]), 1, 32, [x, y, out])
    (hazard,) = result.of("div-by-zero")
    assert hazard.thread == ((0, 0, 0), (9, 0, 0)) and hazard.count == 1
    assert out[9] == 0xFFFFFFFF and (np.delete(out, 9) == 3).all()
