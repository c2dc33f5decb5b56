"""Bits to float32 and back, for every number format: LLVM IR builders, used by the loads and stores of `memory`.

Decoding is exact in every format. Encoding rounds to nearest even; with `saturate`, numbers past the largest finite one
become that one, and NaN stays NaN (0 in int8). float8 is made of integer arithmetic, which every device has; only the
decoding of float8_e4m3fn has an instruction of its own (compute capability 8.9), because attention does it all the time.
"""

from llvmlite import ir

from ..formats import FORMATS
from .intrinsics import F32, I16, I32, assembly, call_llvm

F16 = ir.HalfType()
FLOAT32, FLOAT16, BFLOAT16, E4M3, E5M2, INT8, E4M3_PORTABLE = range(7)
"""Numbers for the formats, as constants that a kernel may hold."""

_NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "float8_e4m3fn")
ITEMSIZE = tuple(FORMATS[name].itemsize for name in _NAMES)
_LARGEST = tuple(FORMATS[name].max for name in _NAMES)


def code_of(name, cc=(0, 0)):
    """The number of a format, by its name, for a compute capability."""
    code = _NAMES.index(name)
    return E4M3_PORTABLE if code == E4M3 and cc < (8, 9) else code


def _float(x):
    return ir.Constant(F32, x)


def _bytes_as_halves(builder, word, selector):
    """Two bytes of a word as the high bytes of a pair of 16-bit numbers."""
    return call_llvm(builder, "llvm.nvvm.prmt", I32, [word, I32(0), I32(selector)])


def _halves(builder, word):
    """A pair of float16 in a word, as float32."""
    pair = builder.bitcast(word, ir.VectorType(F16, 2))
    return [builder.fpext(builder.extract_element(pair, I32(i)), F32) for i in range(2)]


def _decode_float16(builder, word):
    return _halves(builder, word)


def _decode_bfloat16(builder, word):
    low, high = builder.shl(word, I32(16)), builder.and_(word, I32(0xFFFF0000))
    return [builder.bitcast(x, F32) for x in (low, high)]


def _decode_e5m2(builder, word):
    """float8_e5m2 is the upper half of a float16."""
    return [x for selector in (0x1404, 0x3424) for x in _halves(builder, _bytes_as_halves(builder, word, selector))]


def _decode_e4m3(builder, word):
    pairs = assembly(builder, ir.LiteralStructType([I32, I32]), [word],
                     "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
                     "=r,=r,r")
    return [x for i in range(2) for x in _halves(builder, builder.extract_value(pairs, i))]


def _decode_e4m3_portable(builder, word):
    """As a float16 with the exponent's bias still that of float8 (off by 2**8); the code for NaN looks like 480."""
    numbers = []
    for selector in (0x1404, 0x3424):
        pair = _bytes_as_halves(builder, word, selector)
        sign = builder.and_(pair, I32(0x80008000))
        magnitude = builder.lshr(builder.and_(pair, I32(0x7F007F00)), I32(1))
        numbers += _halves(builder, builder.or_(sign, magnitude))
    scaled = [builder.fmul(x, _float(256.0)) for x in numbers]
    sizes = [builder.and_(builder.bitcast(x, I32), I32(0x7FFFFFFF)) for x in scaled]
    is_nan = [builder.icmp_unsigned("==", size, I32(0x43F00000)) for size in sizes]  # 480
    return [builder.select(nan, _float(float("nan")), x) for nan, x in zip(is_nan, scaled, strict=True)]


def _decode_int8(builder, word):
    """A byte, offset by 128, is put into the mantissa of 2**23: one instruction instead of a slow conversion."""
    shifted = builder.xor(word, I32(0x80808080))
    magic = I32(0x4B000000)
    bits = [call_llvm(builder, "llvm.nvvm.prmt", I32, [shifted, magic, I32(0x7540 + i)]) for i in range(4)]
    return [builder.fsub(builder.bitcast(b, F32), _float(2.0**23 + 128)) for b in bits]


_DECODE = {FLOAT16: _decode_float16, BFLOAT16: _decode_bfloat16, E4M3: _decode_e4m3, E5M2: _decode_e5m2,
           INT8: _decode_int8, E4M3_PORTABLE: _decode_e4m3_portable,
           FLOAT32: lambda builder, word: [builder.bitcast(word, F32)]}


def decode(builder, code, words, count):
    """The first `count` numbers in a list of 32-bit words, as float32."""
    return [x for word in words for x in _DECODE[code](builder, word)][:count]


def _clamp(builder, x, low, high):
    """x within the bounds, NaN kept."""
    y = call_llvm(builder, "llvm.minnum.f32", F32, [x, _float(high)])
    y = call_llvm(builder, "llvm.maxnum.f32", F32, [y, _float(low)])
    return builder.select(builder.fcmp_unordered("uno", x, x), x, y)


def _encode_float8(builder, x, mantissa_bits, bias):
    """Round the float32 x, already within the format's range, to the 8 bits of a float8.

    A normal number drops the mantissa's low bits after adding just under half a unit (and the last kept bit, for ties
    to even). A subnormal one is a whole number of steps: adding 2**23 steps rounds it there.
    """
    bits = builder.bitcast(x, I32)
    size = builder.and_(bits, I32(0x7FFFFFFF))
    drop = 23 - mantissa_bits
    odd = builder.and_(builder.lshr(size, I32(drop)), I32(1))
    rounded = builder.lshr(builder.add(builder.add(size, I32((1 << drop - 1) - 1)), odd), I32(drop))
    normal = builder.sub(rounded, I32((127 - bias) << mantissa_bits))
    steps = builder.fadd(builder.bitcast(size, F32), _float(2.0 ** (23 + 1 - bias - mantissa_bits)))
    subnormal = builder.and_(builder.bitcast(steps, I32), I32(0xFF))
    smallest_normal = I32((127 + 1 - bias) << 23)
    code = builder.select(builder.icmp_unsigned("<", size, smallest_normal), subnormal, normal)
    code = builder.select(builder.fcmp_unordered("uno", x, x), I32(0x7F), code)
    return builder.or_(code, builder.and_(builder.lshr(bits, I32(24)), I32(0x80)))


def _encode_int8(builder, x):
    whole = assembly(builder, I32, [x], "cvt.rni.s32.f32 $0, $1;", "=r,f")  # NaN becomes 0
    whole = builder.select(builder.icmp_signed("<", whole, I32(127)), whole, I32(127))
    whole = builder.select(builder.icmp_signed(">", whole, I32(-128)), whole, I32(-128))
    return builder.and_(whole, I32(0xFF))


def _encode_16(builder, x, instruction):
    return builder.zext(assembly(builder, I16, [x], instruction + " $0, $1;", "=h,f"), I32)


def encode(builder, code, x, saturate):
    """The bits of the float32 x in a format, as an i32."""
    if code == INT8:
        return _encode_int8(builder, x)
    if saturate or ITEMSIZE[code] == 1:
        x = _clamp(builder, x, -_LARGEST[code], _LARGEST[code])
    if code == FLOAT32:
        return builder.bitcast(x, I32)
    if code == FLOAT16:
        return _encode_16(builder, x, "cvt.rn.f16.f32")
    if code == BFLOAT16:
        return _encode_16(builder, x, "cvt.rn.bf16.f32")
    return _encode_float8(builder, x, *((2, 15) if code == E5M2 else (3, 7)))
