"""Floating-point arithmetic and special functions.

float16 and bfloat16 are computed in float32, which has more than twice their significant bits, so that rounding again
is right; fused operations go through float64 rounded to odd. Packed types hold two values a thread.
"""

import numpy as np

from .. import formats
from ..errors import PtxUnsupported
from ..inner import fma32
from ..module import TYPE_BYTES
from ..opcodes import opcode
from ..operands import DTYPE

FLOATS = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2", "f32x2")
_SIGN = {"f32": 1 << 31, "f64": 1 << 63, "f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_SPECIAL = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}
# Greatest relative error of the .approx float32 functions as the PTX ISA documents it; for sin and cos, and for lg2
# near 1, it documents an absolute one
_ERROR = {
    "ex2": 2**-22, "lg2": 2**-22, "rcp": 2**-23, "sqrt": 2**-23, "rsqrt": 2**-22.9, "sin": 2**-20.5, "cos": 2**-20.5,
    "tanh": 2**-11, "div": 2**-22,
}


def read_float(m, operand, ty):
    """A reader of float32 values (float64 for f64); packed types give two a thread, the lower half first."""
    read = m.read(operand, ty)
    if ty == "f16":
        return lambda act: read(act).astype(np.float32)
    if ty == "bf16":
        return lambda act: formats.decode_bf16(read(act))
    if ty == "f16x2":
        return lambda act: read(act).view(np.float16).astype(np.float32)
    if ty == "bf16x2":
        return lambda act: formats.decode_bf16(read(act).view(np.uint16))
    if ty == "f32x2":
        return lambda act: read(act).view(np.float32)
    return read


def encode_float(ty, mode="rn", finite=False):
    """A function from float32 or float64 values to the array that `write` of a type takes.

    `mode` is a rounding modifier; `finite` is .satfinite: what is too large becomes the largest finite value.
    """
    if ty in ("f32", "f64"):
        dtype = DTYPE[ty]
        return lambda x: formats.narrow(x, dtype, mode) if x.dtype != dtype else x
    if ty == "f32x2":
        return lambda x: x.view(np.uint64)
    half, packed = ty.removesuffix("x2"), ty.endswith("x2")
    largest = 65504.0 if half == "f16" else float.fromhex("0x1.fep127")

    def encode(x):
        if finite:
            x = np.clip(x, x.dtype.type(-largest), x.dtype.type(largest))
        if mode == "rn":
            bits = formats.encode_f16(x) if half == "f16" else formats.encode_bf16(x)
        elif half == "f16":
            bits = formats.encode_f16(formats.narrow(x, np.float16, mode))
        else:
            bits = formats.encode_bf16(_truncated_bf16(x, mode))
        return np.ascontiguousarray(bits).view(np.uint32) if packed else bits

    return encode


def _truncated_bf16(x, mode):
    if mode != "rz":
        raise PtxUnsupported(f"rounding {mode} to bfloat16")
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def rounding(instr):
    """The rounding modifier of an instruction."""
    return next((p for p in instr.parts if p in formats.ROUNDINGS), "rn")


def _float_operation(m, instr, f, sources):
    """target = f(sources) in the instruction's type, with the .ftz .sat .relu modifiers."""
    ty, parts = instr.type, instr.parts
    flush, saturates, rectifies = "ftz" in parts, "sat" in parts, "relu" in parts
    if ty in ("f32", "f64") and not (flush or saturates or rectifies):
        return m.compute(f, instr.operands[0], ty, *[(o, ty) for o in sources])
    readers, write = [read_float(m, o, ty) for o in sources], m.write(instr.operands[0], ty)
    encode = encode_float(ty)
    tiny = np.finfo({"f16": np.float16, "f16x2": np.float16, "f64": np.float64}.get(ty, np.float32)).tiny

    def run(act):
        values = [read(act) for read in readers]
        if flush:
            values = [formats.flush_subnormals(x, tiny) for x in values]
        result = f(*values)
        if saturates:
            result = formats.saturate(result)
        if rectifies:
            result = formats.rectify(result)
        if flush:
            result = formats.flush_subnormals(result, tiny)
        write(act, encode(result))

    return run


def float_arithmetic(m, instr, pc):
    """add sub mul div fma mad min max abs neg of a float type."""
    name, ty, parts, sources = instr.name, instr.type, instr.parts, instr.operands[1:]
    mode = rounding(instr)
    if name in ("fma", "mad"):
        return _float_operation(m, instr, _fused(ty, mode), sources)
    if name in ("abs", "neg"):
        if "ftz" in parts:
            return _float_operation(m, instr, np.abs if name == "abs" else np.negative, sources)
        bits = f"b{8 * TYPE_BYTES[ty]}"
        sign = DTYPE[bits].type(_SIGN[ty])
        flip = (lambda x: x & ~sign) if name == "abs" else (lambda x: x ^ sign)
        return m.compute(flip, instr.operands[0], bits, (sources[0], bits))
    if name in ("min", "max"):
        pick, nan = formats.minimum if name == "min" else formats.maximum, "NaN" in parts
        if len(sources) == 3:
            return _float_operation(m, instr, lambda x, y, z: pick(pick(x, y, nan), z, nan), sources)
        return _float_operation(m, instr, lambda x, y: pick(x, y, nan), sources)
    if name == "div" and "approx" in parts:
        return _float_operation(m, instr, _approximate_division(m.options.approximation), sources)
    return _float_operation(m, instr, _directed(_ARITHMETIC[name], ty, mode), sources)


def _fused(ty, mode):
    if ty == "f64":
        return formats.fma64
    if mode != "rn":
        return lambda x, y, z: formats.narrow(formats.fma_odd(x, y, z), np.float32, mode)
    return fma32 if ty in ("f32", "f32x2") else formats.fma_odd


def _directed(f, ty, mode):
    """A binary operation with a rounding mode (other than nearest for float32 only)."""
    if mode == "rn":
        return f
    if ty != "f32":
        raise PtxUnsupported(f"rounding {mode} in {ty}")
    if f in (np.add, np.subtract):
        sign = np.float32(1 if f is np.add else -1)
        return lambda x, y: formats.narrow(formats.fma_odd(y, sign, x), np.float32, mode)
    return lambda x, y: formats.narrow(f(x, y, dtype=np.float64), np.float32, mode)


def _approximate_division(approximation):
    """div.approx: a finite divisor beyond 2**126 gives 0, or NaN below an infinity."""

    def divide(x, y):
        result = np.divide(x, y, dtype=np.float64) * (1 + approximation * _ERROR["div"])
        large = (np.abs(y) > 2.0**126) & np.isfinite(y)
        zero = np.copysign(np.where(np.isfinite(x), 0.0, np.nan), result)
        return np.where(large, zero, result).astype(np.float32)

    return divide


@opcode("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh")
def special_function(m, instr, pc):
    """Computed in float64 and rounded once; how far hardware's .approx may be off is in `Options.approximation`."""
    ty, mode = instr.type, rounding(instr)
    function = _SPECIAL[instr.name]
    if ty == "f64":
        return _float_operation(m, instr, function, instr.operands[1:])
    factor = 1 + m.options.approximation * _ERROR[instr.name] if "approx" in instr.parts else 1.0

    def rounded(x):
        exact = function(x.astype(np.float64))
        exact = exact * factor if factor != 1.0 else exact
        return formats.narrow(exact, np.float32, mode) if ty == "f32" else exact

    return _float_operation(m, instr, rounded, instr.operands[1:])


@opcode("copysign")
def copy_sign(m, instr, pc):
    return _float_operation(m, instr, lambda sign, x: np.copysign(x, sign), instr.operands[1:])


@opcode("testp")
def test_property(m, instr, pc):
    target, source = instr.operands
    tests = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda x: ~np.isnan(x), "notanumber": np.isnan,
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    }
    return m.compute(tests[instr.parts[1]], target, "pred", (source, instr.type))
