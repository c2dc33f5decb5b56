"""exp2 and tanh of float32 without branches or calls, so that any vectoriser can take them; one polynomial for both."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .memory import as_bits, as_float

_ONE = np.float32(1)
_TWO = np.float32(2)
_ZERO = np.float32(0)
_TWO_LOG2E = np.float32(2.8853900817779268)

_SMALLEST_EXPONENT = -126.0
"""Below it, powers of two are no normal numbers."""

_ROUND_TO_BIASED = 1.5 * 2**23 + 127
"""Adding it leaves round(x) + 127 in the low bits: shifted up by 23, they are the bits of 2 ** round(x)."""

_COEFFICIENTS = (0.6931472057372686, 0.24022646890634677, 0.055503287769636304, 0.009618488957041028,
                 0.0013399931219698897, 0.00015345812024200356)
"""2**f - 1 on [-1/2, 1/2], divided by f: the relative error of 2**f stays below 2**-28 (Remez exchange)."""


def _call(builder, name, *arguments):
    kind = arguments[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    function = builder.module.globals.get(f"llvm.{name}.{suffix}") or ir.Function(
        builder.module, ir.FunctionType(kind, [kind] * len(arguments)), f"llvm.{name}.{suffix}")
    return builder.call(function, arguments)


def emit_constant(kind, number):
    """A constant of a float32 scalar or vector type."""
    number = float(np.float32(number))
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _emit_split(builder, x):
    """LLVM code for (2**n, (2**f - 1) / f, f) of x = n + f, |f| <= 1/2; x is a float32 or a vector of them."""
    kind = x.type
    bits = ir.VectorType(ir.IntType(32), kind.count) if isinstance(kind, ir.VectorType) else ir.IntType(32)
    bias = emit_constant(kind, _ROUND_TO_BIASED)
    shifted = builder.fadd(x, bias)
    f = builder.fsub(x, builder.fsub(shifted, bias))
    rest = emit_constant(kind, _COEFFICIENTS[-1])
    for coefficient in _COEFFICIENTS[-2::-1]:
        rest = _call(builder, "fma", rest, f, emit_constant(kind, coefficient))
    places = ir.Constant(bits, [23] * kind.count if isinstance(kind, ir.VectorType) else 23)
    power = builder.bitcast(builder.shl(builder.bitcast(shifted, bits), places), kind)
    return power, rest, f


def emit_exp2(builder, x):
    """LLVM code for 2**x, x <= 0, of a float32 or a vector of them: to 2 units in the last place, NaN for NaN.

    Results that are no normal numbers are 0.
    """
    power, rest, f = _emit_split(builder, x)
    value = builder.fmul(_call(builder, "fma", rest, f, emit_constant(x.type, 1)), power)
    small = builder.fcmp_ordered("<", x, emit_constant(x.type, _SMALLEST_EXPONENT))
    return builder.select(small, emit_constant(x.type, 0), value)


@intrinsic
def exp2(typingctx, x):
    """2**x for x <= 0; see `emit_exp2`."""
    return types.float32(types.float32), lambda context, builder, signature, arguments: emit_exp2(builder, *arguments)


@intrinsic
def _exp2_less_1(typingctx, x):
    """(2**n, 2**f - 1) for x = n + f."""

    def generate(context, builder, signature, arguments):
        power, rest, f = _emit_split(builder, arguments[0])
        return context.make_tuple(builder, signature.return_type, [power, builder.fmul(rest, f)])

    return types.UniTuple(types.float32, 2)(types.float32), generate


@njit(error_model="numpy")
def tanh(x):
    """Hyperbolic tangent, to a few units in the last place also near 0."""
    size = as_float(as_bits(x) & 0x7FFFFFFF)
    exponent = -_TWO_LOG2E * size
    exponent = np.float32(_SMALLEST_EXPONENT) if exponent < _SMALLEST_EXPONENT else exponent
    power, rest = _exp2_less_1(exponent)
    decay = power * rest + (power - _ONE)  # exp(-2 |x|) - 1
    value = -decay / (_TWO + decay)
    return as_float(as_bits(value) | (as_bits(x) & 0x80000000))
