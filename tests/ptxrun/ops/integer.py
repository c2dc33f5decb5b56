"""Integer arithmetic, logic, shifts and bit operations."""

import numpy as np

from ..errors import PtxUnsupported
from ..module import TYPE_BYTES, Int
from ..opcodes import opcode
from ..operands import DTYPE
from ..spaces import UNSIGNED
from .floats import FLOATS, float_arithmetic

_SIMPLE = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "abs": np.abs, "neg": np.negative,
}
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@opcode("add", "sub", "mul", "div", "rem", "fma", "mad", "min", "max", "abs", "neg", "addc", "subc", "madc", "sad")
def arithmetic(m, instr, pc):
    """Arithmetic of any type; floats are decoded elsewhere."""
    if instr.type in FLOATS:
        return float_arithmetic(m, instr, pc)
    name, ty = instr.name, instr.type
    target, *sources = instr.operands
    typed = [(o, ty) for o in sources]
    if name in ("addc", "subc", "madc") or "cc" in instr.parts:
        return _with_carry(m, instr)
    if "sat" in instr.parts:
        sign = 1 if name == "add" else -1
        return m.compute(
            lambda x, y: _clamped(x.astype(np.int64) + sign * y.astype(np.int64), np.int32), target, ty, *typed
        )
    if name in ("mul", "mad"):
        return _multiply(m, instr, target, typed)
    if name in ("div", "rem"):
        return _divide(m, instr, pc)
    if name == "sad":
        return m.compute(lambda x, y, z: z + (np.maximum(x, y) - np.minimum(x, y)), target, ty, *typed)
    return m.compute(_SIMPLE[name], target, ty, *typed)


def _clamped(x, dtype):
    info = np.iinfo(dtype)
    return np.clip(x, info.min, info.max).astype(dtype)


def _multiply(m, instr, target, typed):
    """mul and mad: .lo, .hi or .wide."""
    ty = instr.type
    if "wide" in instr.parts:
        wide = f"{ty[0]}{2 * int(ty[1:])}"
        dtype = DTYPE[wide]
        if instr.name == "mul":
            return m.compute(lambda x, y: np.multiply(x, y, dtype=dtype), target, wide, *typed)
        last = (typed[2][0], wide)
        return m.compute(lambda x, y, z: np.multiply(x, y, dtype=dtype) + z, target, wide, *typed[:2], last)
    product = high_product(ty) if "hi" in instr.parts else np.multiply
    if instr.name == "mul":
        return m.compute(product, target, ty, *typed)
    return m.compute(lambda x, y, z: product(x, y) + z, target, ty, *typed)


def high_product(ty):
    """The upper half of the product of two integers of a type."""
    dtype = DTYPE[ty]
    if dtype.itemsize < 8:
        wide = np.int64 if dtype.kind == "i" else np.uint64
        shift = wide(8 * dtype.itemsize)
        return lambda x, y: (np.multiply(x, y, dtype=wide) >> shift).astype(dtype)

    def high(x, y):
        result = _high_product64(x.view(np.uint64), y.view(np.uint64))
        if dtype.kind == "i":
            result = result - np.where(x < 0, y, 0).view(np.uint64) - np.where(y < 0, x, 0).view(np.uint64)
        return result.view(dtype)

    return high


def _high_product64(x, y):
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    return x1 * y1 + (middle >> half) + ((x0 * y1 + (middle & low)) >> half)


def _divide(m, instr, pc):
    """div and rem, which truncate. Division by zero is a hazard and gives all ones."""
    ty, remainder = instr.type, instr.name == "rem"
    target, x, y = instr.operands
    read_x, read_y, write = m.read(x, ty), m.read(y, ty), m.write(target, ty)

    def run(act):
        x, y = read_x(act), read_y(act)
        zero = y == 0
        if zero.any():
            lane = int(np.flatnonzero(zero)[0])
            m.hazard("div-by-zero", "integer division by zero", pc, act.tid[lane], count=int(zero.sum()))
            y = np.where(zero, y.dtype.type(1), y)
        quotient = np.floor_divide(x, y)
        if ty[0] == "s":
            inexact = (x - quotient * y != 0) & ((x ^ y) < 0)
            quotient = quotient + inexact.astype(quotient.dtype)
        result = x - quotient * y if remainder else quotient
        write(act, np.where(zero, ~np.zeros_like(result), result))

    return run


def _with_carry(m, instr):
    """add.cc addc sub.cc subc mad.cc madc: unsigned arithmetic with a carry flag in each thread."""
    name, parts = instr.name, instr.parts
    size = TYPE_BYTES[instr.type]
    dtype = UNSIGNED[size]
    readers, write = [m.read(o, f"u{8 * size}") for o in instr.operands[1:]], m.write(instr.operands[0], f"u{8 * size}")
    sets, uses = "cc" in parts, name.endswith("c")
    product = high_product(instr.type) if "hi" in parts else np.multiply

    def run(act):
        x, y, *rest = (read(act) for read in readers)
        if rest:
            signed = DTYPE[instr.type]
            x, y = product(x.view(signed), y.view(signed)).view(dtype), rest[0]
        carry_in = m.carry[act.tid].astype(dtype) if uses else dtype(0)
        if name.startswith("sub"):
            partial = x - y
            result = partial - carry_in
            carry = (x < y) | (partial < carry_in)
        else:
            partial = x + y
            result = partial + carry_in
            carry = (partial < x) | (result < partial)
        if sets:
            m.carry[act.tid] = carry
        write(act, result)

    return run


@opcode("and", "or", "xor", "not")
def logic(m, instr, pc):
    target, *sources = instr.operands
    return m.compute(_LOGIC[instr.name], target, instr.type, *[(o, instr.type) for o in sources])


@opcode("shl", "shr")
def shift(m, instr, pc):
    """Shifts by more than the width give 0, or the sign."""
    target, value, amount = instr.operands
    ty = instr.type
    dtype = DTYPE[ty]
    bits = 8 * dtype.itemsize
    operator = np.left_shift if instr.name == "shl" else np.right_shift
    fills = instr.name == "shr" and dtype.kind == "i"
    if isinstance(amount, Int) and 0 <= amount.value < bits:
        return m.compute(operator, target, ty, (value, ty), (amount, ty))

    def shifted(x, k):
        result = operator(x, np.minimum(k, np.uint32(bits - 1)).astype(dtype))
        return result if fills else np.where(k < bits, result, dtype.type(0))

    return m.compute(shifted, target, ty, (value, ty), (amount, "u32"))


@opcode("shf")
def funnel_shift(m, instr, pc):
    target, low, high, amount = instr.operands
    wrap, left = "wrap" in instr.parts, instr.parts[1] == "l"

    def shifted(low, high, k):
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        k = (k & np.uint32(31) if wrap else np.minimum(k, np.uint32(32))).astype(np.uint64)
        return ((both << k) >> np.uint64(32) if left else both >> k).astype(np.uint32)

    return m.compute(shifted, target, "u32", (low, "u32"), (high, "u32"), (amount, "u32"))


def _low_bits(count):
    """Masks of the lowest 0 to 64 bits."""
    one = np.uint64(1)
    return np.where(count >= 64, ~np.uint64(0), (one << np.minimum(count, 63).astype(np.uint64)) - one)


@opcode("bfe")
def extract_field(m, instr, pc):
    """Bits [position, position + length), sign- or zero-extended."""
    target, value, position, length = instr.operands
    ty, bits = instr.type, 8 * TYPE_BYTES[instr.type]
    signed, dtype = ty[0] == "s", UNSIGNED[bits // 8]

    def field(x, position, length):
        x = x.astype(np.uint64)
        position, length = ((v & np.uint32(0xFF)).astype(np.int64) for v in (position, length))
        mask = _low_bits(np.clip(np.minimum(length, bits - position), 0, 64))
        result = (x >> np.minimum(position, 63).astype(np.uint64)) & mask
        if signed:
            sign = (x >> np.clip(position + length - 1, 0, bits - 1).astype(np.uint64)) & np.uint64(1)
            result |= np.where((length > 0) & (sign == 1), ~mask, np.uint64(0))
        return result.astype(dtype)

    return m.compute(field, target, f"u{bits}", (value, f"u{bits}"), (position, "u32"), (length, "u32"))


@opcode("bfi")
def insert_field(m, instr, pc):
    target, field, base, position, length = instr.operands
    ty = instr.type

    def inserted(field, base, position, length):
        position, length = ((v & np.uint32(0xFF)).astype(np.int64) for v in (position, length))
        by = np.minimum(position, 63).astype(np.uint64)
        mask = np.where(position < 64, _low_bits(length) << by, np.uint64(0))
        return ((base.astype(np.uint64) & ~mask) | ((field.astype(np.uint64) << by) & mask)).astype(DTYPE[ty])

    return m.compute(inserted, target, ty, (field, ty), (base, ty), (position, "u32"), (length, "u32"))


@opcode("prmt")
def permute_bytes(m, instr, pc):
    """Pick four of the eight bytes of two words; bit 3 of a selector replicates the byte's sign."""
    if instr.type != "b32" or len(instr.parts) > 2:
        raise PtxUnsupported(instr.place)
    target, low, high, selector = instr.operands
    if isinstance(selector, Int) and not selector.value & 0x8888:
        return m.compute(_fixed_permutation(selector.value), target, "u32", (low, "u32"), (high, "u32"))

    def picked(low, high, selector):
        bytes_ = np.stack([low, high], axis=1).view(np.uint8)
        nibble = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
        chosen = np.take_along_axis(bytes_, (nibble & np.uint32(7)).astype(np.int64), axis=1)
        sign = np.where(chosen & np.uint8(0x80), np.uint8(0xFF), np.uint8(0))
        return np.where(nibble & np.uint32(8), sign, chosen).view(np.uint32).ravel()

    return m.compute(picked, target, "u32", (low, "u32"), (high, "u32"), (selector, "u32"))


def _fixed_permutation(selector):
    """The function of a constant selector; it moves pairs of bytes where the selector does."""
    picks = [selector >> shift & 7 for shift in (0, 4, 8, 12)]
    pairs = all(picks[i] % 2 == 0 and picks[i + 1] == picks[i] + 1 for i in (0, 2))
    part, picks = (np.uint16, [p // 2 for p in picks[::2]]) if pairs else (np.uint8, picks)
    each = len(picks)  # parts of a word

    def permuted(low, high):
        out = np.empty(len(low), np.uint32)
        columns = out.view(part).reshape(-1, each)
        for column, pick in enumerate(picks):
            columns[:, column] = (low, high)[pick // each].view(part)[pick % each :: each]
        return out

    return permuted


@opcode("lop3")
def logic3(m, instr, pc):
    """Any function of three bits: bit 4a+2b+c of the table is the result."""
    target, *sources, table = instr.operands

    def combined(x, y, z):
        result = np.zeros_like(x)
        for term in range(8):
            if table.value >> term & 1:
                result |= (x if term & 4 else ~x) & (y if term & 2 else ~y) & (z if term & 1 else ~z)
        return result

    return m.compute(combined, target, "u32", *[(o, "u32") for o in sources])


def _bits(x):
    """The bits of unsigned integers, most significant first: uint8 [threads, width]."""
    return np.unpackbits(x.astype(x.dtype.newbyteorder(">")).view(np.uint8).reshape(len(x), -1), axis=1)


def _leading_zeros(x):
    bits = _bits(x)
    return np.where(x != 0, np.argmax(bits, axis=1), bits.shape[1])


@opcode("popc", "clz", "bfind")
def count_bits(m, instr, pc):
    target, source = instr.operands
    ty, width = instr.type, 8 * TYPE_BYTES[instr.type]
    dtype = UNSIGNED[width // 8]

    def counted(x):
        if instr.name == "popc":
            return _bits(x).sum(axis=1).astype(np.uint32)
        if instr.name == "clz":
            return _leading_zeros(x).astype(np.uint32)
        unsigned = np.where(x < 0, ~x, x).view(dtype)
        zeros = _leading_zeros(unsigned)
        position = zeros if "shiftamt" in instr.parts else width - 1 - zeros
        return np.where(unsigned != 0, position, -1).astype(np.uint32)

    return m.compute(counted, target, "u32", (source, ty if instr.name == "bfind" else f"u{width}"))


@opcode("brev")
def reverse_bits(m, instr, pc):
    target, source = instr.operands
    width = 8 * TYPE_BYTES[instr.type]

    def reversed_(x):
        packed = np.packbits(_bits(x)[:, ::-1], axis=1)
        return packed.view(np.dtype(UNSIGNED[width // 8]).newbyteorder(">")).ravel().astype(UNSIGNED[width // 8])

    return m.compute(reversed_, target, f"u{width}", (source, f"u{width}"))


@opcode("dp4a")
def dot_bytes(m, instr, pc):
    """c + sum of four products of bytes, each operand's bytes signed or not."""
    target, *sources = instr.operands
    kinds = [{"u32": np.uint8, "s32": np.int8}[p] for p in instr.parts[1:3]]

    def dot(x, y, c):
        products = [v.view(k).reshape(-1, 4).astype(np.int64) for v, k in zip((x, y), kinds)]
        return (c + (products[0] * products[1]).sum(axis=1)).astype(np.uint32)

    return m.compute(dot, target, "u32", *[(o, "u32") for o in sources])
