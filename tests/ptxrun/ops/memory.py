"""Loads, stores, atomics and cache hints."""

import numpy as np

from .. import formats
from ..access import ATOMIC, LOAD, LOAD_NC, STORE, space_of
from ..errors import PtxUnsupported
from ..module import TYPE_BYTES, Sink, Symbol, Vector
from ..opcodes import opcode
from ..operands import DTYPE
from ..spaces import LOCAL_WINDOW, SHARED_WINDOW, UNSIGNED
from .floats import encode_float

_RELAXED = {"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"}
_ATOMIC = {
    "add": lambda old, b, c: old + b, "exch": lambda old, b, c: b, "and": lambda old, b, c: old & b,
    "or": lambda old, b, c: old | b, "xor": lambda old, b, c: old ^ b,
    "cas": lambda old, b, c: np.where(old == b, c, old),
    "inc": lambda old, b, c: np.where(old >= b, 0, old + 1).astype(old.dtype),
    "dec": lambda old, b, c: np.where((old == 0) | (old > b), b, old - 1).astype(old.dtype),
    "min": lambda old, b, c: (formats.minimum if old.dtype.kind == "f" else np.minimum)(old, b),
    "max": lambda old, b, c: (formats.maximum if old.dtype.kind == "f" else np.maximum)(old, b),
}


def vector_length(instr):
    """Elements of a .v2 .v4 .v8 access, else 1."""
    return next((int(p[1:]) for p in instr.parts if p in ("v2", "v4", "v8")), 1)


def operands_of(instr):
    """The operands without a cache policy at the end."""
    return instr.operands[:-1] if "L2::cache_hint" in instr.parts else instr.operands


def by_space(m, instr, operand, access):
    """Run access(space, act, addresses), once for each space that generic addresses fall in."""
    address = m.address(operand)
    if instr.space != "generic":
        space = {"const": "global", "param": "local"}.get(instr.space, instr.space)
        return lambda act: access(space, act, address(act), None)

    def run(act):
        addresses = address(act)
        which = space_of(addresses)
        for number, (space, base) in enumerate((("global", 0), ("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW))):
            lanes = which == number
            count = np.count_nonzero(lanes)
            if count == act.n:
                access(space, act, addresses - base, None)
            elif count:
                access(space, act.sub(lanes), addresses[lanes] - base, lanes)

    return run


@opcode("ld", "ldu")
def load(m, instr, pc):
    target, source = operands_of(instr)
    ty, count = instr.type, vector_length(instr)
    targets = target.items if isinstance(target, Vector) else [target]
    writes = [m.write(t, ty) for t in targets]
    size, dtype = TYPE_BYTES[ty], DTYPE[ty]
    if (
        instr.space == "param"
        and isinstance(source.base, Symbol)
        and source.base.name in {p.name for p in m.program.params}
    ):
        reads = [m.read_parameter(source.base.name, source.offset + i * size, ty) for i in range(count)]
        return _each(reads, writes)
    rule = LOAD_NC if "nc" in instr.parts or instr.name == "ldu" else LOAD
    relaxed = not _RELAXED.isdisjoint(instr.parts)

    def access(space, act, address, lanes):
        values = m.load(space, address, size, count, act, pc, rule, relaxed)
        if count == 1:
            return writes[0](act, values.view(dtype))
        for write, column in zip(writes, np.ascontiguousarray(values.T)):
            write(act, column.view(dtype))

    return by_space(m, instr, source, access)


def _each(reads, writes):
    def run(act):
        for read, write in zip(reads, writes):
            write(act, read(act))

    return run


@opcode("st")
def store(m, instr, pc):
    target, source = operands_of(instr)
    size, count = TYPE_BYTES[instr.type], vector_length(instr)
    sources = source.items if isinstance(source, Vector) else [source]
    reads = [m.read(s, f"b{8 * size}") for s in sources]
    relaxed = not _RELAXED.isdisjoint(instr.parts)

    def access(space, act, address, lanes):
        if count == 1:
            values = reads[0](act)
        else:
            values = np.empty((act.n, count), UNSIGNED[size])
            for i, read in enumerate(reads):
                values[:, i] = read(act)
        m.store(space, address, values, size, count, act, pc, relaxed)

    return by_space(m, instr, target, access)


@opcode("prefetch", "prefetchu", "applypriority", "discard", "membar", "fence", "nanosleep", "pmevent")
@opcode("griddepcontrol", "setmaxnreg")
def hint(m, instr, pc):
    """Hints and fences: program order is the only order here, so they change nothing."""
    return lambda act: None


@opcode("createpolicy")
def create_policy(m, instr, pc):
    write = m.write(instr.operands[0], "b64")
    return lambda act: write(act, np.zeros(act.n, np.uint64))


@opcode("atom", "red")
def atomic(m, instr, pc):
    """Threads that collide go one after the other, in the order of `Options.atomic_order`."""
    operands = list(operands_of(instr))
    target = operands.pop(0) if instr.name == "atom" else Sink()
    address, *values = operands
    what, ty, update = _atomic_update(instr)
    size = TYPE_BYTES[ty]
    write, reads = m.write(target, ty), [m.read(v, ty) for v in values]
    dtype, rule = DTYPE[ty], STORE if what == "exch" else ATOMIC

    def access(space, act, addresses, lanes):
        old = np.empty(act.n, dtype)
        given = [read(act) for read in reads]
        for where, offset, part in m.enter(space, addresses, size, act, pc, rule):
            part = slice(None) if part is None else part
            some = act if isinstance(part, slice) else act.sub(part)
            shadow = m.shadow_of(where)
            if shadow:
                shadow.write(offset, size, some.tid, pc, atomic=True)
            memory = where.rows(size).view(dtype)
            old[part] = _in_turn(m, memory, offset // size, update, [g[part] for g in given])
        write(act, old)

    return by_space(m, instr, address, access)


def _atomic_update(instr):
    """(operation, type to read and write memory in, function(old, b, c))."""
    if vector_length(instr) != 1:
        raise PtxUnsupported(instr.place)
    what, ty = next(p for p in instr.parts[1:] if p in _ATOMIC), instr.type
    if what in ("exch", "cas"):
        return what, f"b{8 * TYPE_BYTES[ty]}", _ATOMIC[what]
    if ty not in ("f16", "bf16", "f16x2", "bf16x2"):
        return what, ty, _ATOMIC[what]
    encode, dtype = encode_float(ty), DTYPE[ty]

    def decoded(bits):
        bits = np.ascontiguousarray(bits)
        return formats.decode_bf16(bits.view(np.uint16)) if ty[0] == "b" else bits.view(np.float16).astype(np.float32)

    return what, ty, lambda old, b, c: encode(_ATOMIC[what](decoded(old), decoded(b), None)).view(dtype)


def _in_turn(m, memory, rows, update, given):
    """Apply an update to memory[rows], colliding rows one after the other; give what each found there."""
    order = np.argsort(rows, kind="stable")
    if m.options.atomic_order == "reverse":
        order = order[::-1]
    sorted_rows = rows[order]
    place = np.arange(len(rows))
    first = np.r_[True, sorted_rows[1:] != sorted_rows[:-1]]
    turn = place - np.maximum.accumulate(np.where(first, place, 0))
    old = np.empty(len(rows), memory.dtype)
    for t in range(int(turn.max()) + 1):
        now = order[turn == t]
        old[now] = memory[rows[now]]
        memory[rows[now]] = update(old[now], given[0][now], given[1][now] if len(given) > 1 else None)
    return old
