"""Moves, conversions, comparisons and selections."""

import numpy as np

from .. import formats
from ..access import space_of
from ..errors import PtxUnsupported
from ..module import TYPE_BYTES, Pair, Vector
from ..opcodes import opcode
from ..operands import DTYPE
from ..spaces import LOCAL_WINDOW, SHARED_WINDOW, UNSIGNED
from .floats import FLOATS, encode_float, read_float, rounding

_FLOAT8 = ("e4m3x2", "e5m2x2")
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def bits_type(size):
    """The untyped PTX type of a size in bytes."""
    return f"b{8 * size}"


# -- moves ----------------------------------------------------------------------
@opcode("mov")
def move(m, instr, pc):
    target, source = instr.operands
    if not isinstance(target, Vector) and not isinstance(source, Vector):
        return m.compute(lambda x: x, target, instr.type, (source, instr.type))
    size = TYPE_BYTES[instr.type]
    if isinstance(target, Vector):
        return _unpack(m, target.items, source, size)
    return _pack(m, target, source.items, size)


def _unpack(m, targets, source, size):
    """{a, b, ...} = a wider word, the first target the lowest bits."""
    part = size // len(targets)
    read, writes = m.read(source, bits_type(size)), [m.write(t, bits_type(part)) for t in targets]

    def run(act):
        parts = read(act).view(UNSIGNED[part]).reshape(-1, len(targets))
        for i, write in enumerate(writes):
            write(act, np.ascontiguousarray(parts[:, i]))

    return run


def _pack(m, target, sources, size):
    part = size // len(sources)
    reads, write = [m.read(s, bits_type(part)) for s in sources], m.write(target, bits_type(size))

    def run(act):
        parts = np.empty((act.n, len(sources)), UNSIGNED[part])
        for i, read in enumerate(reads):
            parts[:, i] = read(act)
        write(act, parts.view(UNSIGNED[size]).ravel())

    return run


@opcode("cvta")
def convert_address(m, instr, pc):
    """Between addresses in a state space and generic ones."""
    target, source = instr.operands
    base = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(instr.space, 0)
    base = np.int64(-base if "to" in instr.parts else base)
    size = TYPE_BYTES[instr.type]
    if size != 8:
        raise PtxUnsupported(instr.place)
    return m.compute(lambda x: x + base, target, "s64", (source, "s64"))


@opcode("isspacep")
def is_in_space(m, instr, pc):
    target, source = instr.operands
    number = {"global": 0, "shared": 1, "local": 2, "const": 3}[instr.space]
    return m.compute(lambda x: space_of(x) == number, target, "pred", (source, "s64"))


# -- conversions ------------------------------------------------------------------
@opcode("cvt")
def convert(m, instr, pc):
    to, source = instr.parts[-2:]
    if to in _FLOAT8:
        return _to_float8(m, instr, to[:4], source)
    if source in _FLOAT8:
        encode = encode_float(to)
        return _converted(m, instr, lambda x: encode(formats.decode_float8(x.view(np.uint8), source[:4])), "b16")
    if to == "tf32":
        return _converted(m, instr, _to_tf32("rna" in instr.parts), "f32", "b32")
    if len(instr.operands) == 3:
        return _pack_pair(m, instr, to)
    if source not in FLOATS:
        return _from_integer(m, instr, to, source)
    return _from_float(m, instr, to, source)


def _converted(m, instr, f, source_type, target_type=None):
    target, source = instr.operands
    return m.compute(f, target, target_type or instr.parts[-2], (source, source_type))


def _to_float8(m, instr, fmt, source):
    """Two float32 (the first operand is the upper byte) or a pair of halves to two float8."""
    write = m.write(instr.operands[0], "b16")
    if source == "f32":
        high, low = (m.read(o, "f32") for o in instr.operands[1:])

        def pairs(act):
            return np.stack([low(act), high(act)], axis=1).ravel()

    else:
        pairs = read_float(m, instr.operands[1], source)
    rectifies = "relu" in instr.parts

    def run(act):
        values = pairs(act)
        values = formats.rectify(values) if rectifies else values
        write(act, formats.encode_float8(values, fmt).view(np.uint16))

    return run


def _to_tf32(ties_away):
    """float32 to 10 fraction bits, nearest; ties away from zero or to even."""

    def rounded(x):
        bits = x.view(np.uint32)
        tie = np.uint32(0x1000) if ties_away else np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        return np.where(np.isfinite(x), (bits + tie) & np.uint32(0xFFFFE000), bits)

    return rounded


def _pack_pair(m, instr, to):
    """Two float32 to a pair of halves; the first operand is the upper one."""
    high, low = (m.read(o, "f32") for o in instr.operands[1:])
    write, encode = m.write(instr.operands[0], to), encode_float(to, rounding(instr), "satfinite" in instr.parts)
    rectifies = "relu" in instr.parts

    def run(act):
        values = np.stack([low(act), high(act)], axis=1).ravel()
        write(act, encode(formats.rectify(values) if rectifies else values))

    return run


def _from_integer(m, instr, to, source):
    mode = rounding(instr)
    if to not in FLOATS:
        dtype = DTYPE[to]
        if "sat" not in instr.parts:
            return _converted(m, instr, lambda x: x.astype(dtype), source)
        info = np.iinfo(dtype)
        return _converted(
            m, instr, lambda x: np.array([min(max(v, info.min), info.max) for v in x.tolist()], dtype), source
        )
    if mode == "rn" and to in ("f32", "f64"):
        return _converted(m, instr, lambda x: x.astype(DTYPE[to]), source)
    if TYPE_BYTES[source] == 8:
        raise PtxUnsupported(f"{instr.place}: it would round twice")
    encode = encode_float(to, mode)
    return _converted(m, instr, lambda x: encode(x.astype(np.float64)), source)


def _from_float(m, instr, to, source):
    parts = instr.parts
    flush, saturates, rectifies = "ftz" in parts and source == "f32", "sat" in parts, "relu" in parts
    integral = next((formats.INTEGRAL[p] for p in parts if p in formats.INTEGRAL), None)
    read, write = read_float(m, instr.operands[1], source), m.write(instr.operands[0], to)
    if to not in FLOATS:
        encode, integral = lambda x: formats.to_integer(x, DTYPE[to].type), integral or np.trunc
    else:
        encode = encode_float(to, "rn" if integral else rounding(instr), "satfinite" in parts)

    def run(act):
        x = read(act)
        x = formats.flush_subnormals(x) if flush else x
        x = integral(x.astype(np.float64)).astype(x.dtype) if integral else x
        x = formats.saturate(x) if saturates else x
        x = formats.rectify(x) if rectifies else x
        x = encode(x)
        write(act, formats.flush_subnormals(x) if "ftz" in parts and to == "f32" else x)

    return run


# -- comparisons and selections -------------------------------------------------------
def _comparison(name, is_float):
    """The function of a comparison; for floats, plain ones are false with a NaN, those ending in u are true."""
    if not is_float:
        return _COMPARE[name]
    if name in ("num", "nan"):
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == (name == "nan")
    if name == "ne":
        return lambda x, y: (x != y) & ~(np.isnan(x) | np.isnan(y))
    if name in _COMPARE:
        return _COMPARE[name]
    ordered = _COMPARE[name[:-1]]
    return lambda x, y: ordered(x, y) | np.isnan(x) | np.isnan(y)


@opcode("setp")
def set_predicate(m, instr, pc):
    """p|q = compare(x, y), and its opposite, both combined with another predicate if there is one."""
    target, x, y, *rest = instr.operands
    ty, parts = instr.type, instr.parts
    compare = _comparison(parts[1], ty in FLOATS)
    combine = next((_COMBINE[p] for p in parts if p in _COMBINE), None)
    if not isinstance(target, Pair) and combine is None and "ftz" not in parts and ty not in ("f16", "bf16"):
        return m.compute(compare, target, "pred", (x, ty), (y, ty))
    read_x, read_y = read_float(m, x, ty), read_float(m, y, ty)
    other = m.read(rest[0], "pred") if combine else None
    writes = [m.write(t, "pred") for t in (target if isinstance(target, Pair) else [target])]
    packed = ty in ("f16x2", "bf16x2")
    if packed and combine:
        raise PtxUnsupported(instr.place)

    def run(act):
        operands = read_x(act), read_y(act)
        if "ftz" in parts:
            operands = [formats.flush_subnormals(v) for v in operands]
        result = compare(*operands)
        results = [result[0::2].copy(), result[1::2].copy()] if packed else [result, ~result]
        for write, value in zip(writes, results):
            write(act, combine(value, other(act)) if combine else value)

    return run


@opcode("set")
def set_value(m, instr, pc):
    """All ones, or 1.0 for a float type, where the comparison holds; else 0."""
    target, x, y = instr.operands
    to, ty = instr.parts[-2:]
    compare = _comparison(instr.parts[1], ty in FLOATS)
    zero = DTYPE[to].type(0)
    one = DTYPE[to].type(1) if to[0] == "f" else ~zero
    return m.compute(lambda x, y: np.where(compare(x, y), one, zero), target, to, (x, ty), (y, ty))


@opcode("selp")
def select(m, instr, pc):
    target, x, y, predicate = instr.operands
    ty = instr.type
    return m.compute(lambda x, y, p: np.where(p, x, y), target, ty, (x, ty), (y, ty), (predicate, "pred"))


@opcode("slct")
def select_by_sign(m, instr, pc):
    target, x, y, c = instr.operands
    ty = bits_type(TYPE_BYTES[instr.parts[1]])
    return m.compute(lambda x, y, c: np.where(c >= 0, x, y), target, ty, (x, ty), (y, ty), (c, instr.type))
