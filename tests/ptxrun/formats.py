"""Number formats and correctly rounded arithmetic on NumPy arrays.

Fused multiply-adds into narrower formats go through float64: the product of two 24-bit significands is exact there, and
rounding the sum to odd first makes rounding it again right (S. Boldo and G. Melquiond, "Emulation of a FMA and
correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans. Computers 57(4), 2008).
"""

import numpy as np

from .inner import flush32

INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
ROUNDINGS = ("rn", "rz", "rm", "rp")


# -- fused multiply-add -------------------------------------------------------
def fma_odd(a, b, c):
    """a*b+c for operands of at most 26 significant bits, as float64 rounded to odd, which can be rounded again."""
    product = np.multiply(a, b, dtype=np.float64)
    c = np.asarray(c, np.float64)
    total = product + c
    return _to_odd(total, _sum_error(product, c, total))


def fma64(a, b, c):
    """float64 a*b+c by error-free transforms; off by one unit in the last place in rare double roundings."""
    product = a * b
    a_high, b_high = (t - (t - x) for x, t in ((a, 134217729.0 * a), (b, 134217729.0 * b)))
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    result = total + (error + _sum_error(product, c, total))
    return np.where(np.isfinite(result), result, total)


def _sum_error(a, b, total):
    """Exactly a + b - total, for total = fl(a + b)."""
    b_virtual = total - a
    return (a - (total - b_virtual)) + (b - b_virtual)


def _to_odd(total, error):
    """`total` where it is exact or its last bit is odd, else its neighbour towards total + error."""
    fix = (error != 0) & ((total.view(np.uint64) & np.uint64(1)) == 0) & np.isfinite(total)
    return np.where(fix, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


# -- float16, bfloat16, float8 ------------------------------------------------
def decode_bf16(bits):
    """bfloat16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_bf16(x):
    """float32 or float64 to bfloat16 bits, nearest even. NaN becomes 0x7fff, as in PTX."""
    if x.dtype == np.float64:
        x = _float32_to_odd(x)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def encode_f16(x):
    """float32 or float64 to float16, nearest even. NaN becomes 0x7fff, as in PTX."""
    half = x.astype(np.float16)
    nan = np.isnan(half)
    if nan.any():
        half = np.where(nan, np.uint16(0x7FFF).view(np.float16), half)
    return half


def _float32_to_odd(x):
    """float64 to float32 rounded to odd."""
    single = x.astype(np.float32)
    error = x - single.astype(np.float64)
    fix = (error != 0) & ((single.view(np.uint32) & np.uint32(1)) == 0) & np.isfinite(single)
    towards = np.where(error > 0, np.float32(np.inf), np.float32(-np.inf))
    return np.where(fix, np.nextafter(single, towards), single)


def _float8_values(exponent_bits, mantissa_bits, bias, has_infinity):
    """The float32 value of each of the 256 codes."""
    values = np.zeros(256, np.float32)
    for code in range(256):
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        fraction = (code & ((1 << mantissa_bits) - 1)) / 2**mantissa_bits
        value = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        if has_infinity and exponent == (1 << exponent_bits) - 1:
            value = np.nan if fraction else np.inf
        if not has_infinity and code & 0x7F == 0x7F:
            value = np.nan
        values[code] = -value if code & 0x80 else value
    return values


_E4M3, _E5M2 = _float8_values(4, 3, 7, False), _float8_values(5, 2, 15, True)
_FLOAT8 = {"e4m3": (_E4M3, 0x7E), "e5m2": (_E5M2, 0x7B)}  # values, code of the largest finite one


def decode_float8(codes, fmt):
    """Codes (uint8) of "e4m3" or "e5m2" to float32."""
    return _FLOAT8[fmt][0][codes]


def encode_float8(x, fmt):
    """Nearest even, saturating to the largest finite value (.satfinite); NaN becomes 0x7f."""
    values, top = _FLOAT8[fmt]
    positive = values[: top + 1].astype(np.float64)
    midpoints = (positive[1:] + positive[:-1]) / 2
    size = np.abs(x.astype(np.float64))
    code = np.searchsorted(midpoints, size, "left")
    tie = size == midpoints[np.minimum(code, len(midpoints) - 1)]
    code = np.minimum(code + (tie & (code % 2 == 1)), top)
    return np.where(np.isnan(x), 0x7F, code | np.signbit(x) * 0x80).astype(np.uint8)


# -- modifiers ----------------------------------------------------------------
def flush_subnormals(x, tiny=2.0**-126):
    """.ftz: what is smaller than the smallest normal number becomes zero of the same sign."""
    if x.dtype == np.float32 and tiny == 2.0**-126:
        return flush32(x)
    flush = (np.abs(x) < tiny) & (x != 0)
    return np.where(flush, np.copysign(x.dtype.type(0), x), x) if np.logical_or.reduce(flush) else x


def saturate(x):
    """.sat: clamp to [0, 1], NaN to 0."""
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1)).astype(x.dtype)


def rectify(x):
    """.relu: negative values to +0, NaN stays."""
    return np.where(x > 0, x, np.where(np.isnan(x), x, x.dtype.type(0)))


def maximum(a, b, nan=False):
    """Float max: a NaN operand loses unless `nan`; +0 beats -0."""
    return _extreme(a, b, np.fmax, np.logical_and, nan)


def minimum(a, b, nan=False):
    """Float min: a NaN operand loses unless `nan`; -0 beats +0."""
    return _extreme(a, b, np.fmin, np.logical_or, nan)


def _extreme(a, b, pick, negative_zero, nan):
    result = pick(a, b)
    if not np.logical_and.reduce(result):  # a zero
        zeros = (result == 0) & (a == b)
        zero = np.where(negative_zero(np.signbit(a), np.signbit(b)), result.dtype.type(-0.0), result.dtype.type(0.0))
        result = np.where(zeros, zero, result)
    return np.where(np.isnan(a) | np.isnan(b), result.dtype.type(np.nan), result) if nan else result


def narrow(x, dtype, mode):
    """Float to a narrower float type with rounding rn, rz, rm or rp."""
    result = x.astype(dtype)
    if mode == "rn":
        return result
    exact, back = x.astype(np.float64), result.astype(np.float64)
    wrong = {"rz": np.abs(back) > np.abs(exact), "rm": back > exact, "rp": back < exact}[mode]
    towards = np.asarray({"rz": 0.0, "rm": -np.inf, "rp": np.inf}[mode], dtype)
    return np.where(wrong & ~np.isnan(exact), np.nextafter(result, towards), result)


def to_integer(x, dtype):
    """An integral float64 to an integer type, saturating; NaN becomes 0."""
    info = np.iinfo(dtype)
    above, below = x >= 2.0 ** (info.bits - (info.min < 0)), x < float(info.min)
    inside = np.where(above | below | np.isnan(x), 0.0, x)
    if info.max == 2**64 - 1:
        upper = inside >= 2.0**63
        low = np.where(upper, inside - 2.0**63, inside).astype(np.int64).view(np.uint64)
        result = low + upper.astype(np.uint64) * np.uint64(1 << 63)
    else:
        result = inside.astype(dtype)
    return np.where(above, dtype(info.max), np.where(below, dtype(info.min), result))
