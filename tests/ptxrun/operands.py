"""Readers and writers of operands, built once an instruction.

Everything an instruction can read lives in a slot: a register, a constant, a special register, a kernel parameter, an
address of a variable. `slots` holds one array a slot, with the value of every thread, so a reader is one list access.
A slot's dtype is the one most instructions want, which spares them a conversion; arrays in slots are never written in
place, so two slots may share one.
"""

from collections import Counter

import numpy as np

from .errors import PtxUnsupported
from .module import TYPE_BYTES, Address, Float, Int, Not, Reg, Sink, Special, Symbol, Vector
from .spaces import UNSIGNED
from .threads import special_register

DTYPE = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32,
    "f32x2": np.uint64,
}
DTYPE = {name: np.dtype(dtype) for name, dtype in DTYPE.items()}
CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


def scattered(old, index, values):
    """A copy of `old` with new values at some threads."""
    new = old.copy()
    new[index] = values
    return new


class Operands:
    """The slots of a program. Subclassed by the machine, which says who runs."""

    def __init__(self, program):
        self.program = program
        self.slots = []
        self._sources = []  # what a slot holds: ("register", name), ("constant", bits), ("special", name), ...
        self._dtypes = []
        self._numbers = {}  # source -> slot
        dtypes = _register_dtypes(program)
        for name in program.registers:
            self._slot(("register", name), dtypes[name])

    def _slot(self, source, dtype):
        number = self._numbers.get(source)
        if number is None:
            number = self._numbers[source] = len(self._sources)
            self._sources.append(source)
            self._dtypes.append(dtype)
            self.slots.append(None)
        return number

    def fill_slots(self):
        """Set every slot for the threads that run now: registers to zero, the rest to their values."""
        n = len(self.every)
        zeros = {dtype: np.zeros(n, dtype) for dtype in set(self._dtypes)}
        for number, (source, dtype) in enumerate(zip(self._sources, self._dtypes)):
            kind, what = source[:2]
            if kind == "register":
                self.slots[number] = zeros[dtype]
            elif kind == "special":
                self.slots[number] = special_register(what, self).astype(dtype)
            elif kind == "param":
                self.slots[number] = np.full(n, np.frombuffer(self.params[what], dtype, 1, source[2])[0])
            else:
                bits = self.symbols[what] + source[2] if kind == "symbol" else what
                raw = (bits & ((1 << 8 * dtype.itemsize) - 1)).to_bytes(dtype.itemsize, "little")
                self.slots[number] = np.full(n, np.frombuffer(raw, dtype)[0])

    # -- reading ----------------------------------------------------------------
    def slot_of(self, operand, ty):
        """(slot number, its dtype) of an operand read as a PTX type."""
        dtype = DTYPE[ty]
        if isinstance(operand, Reg):
            number = self._numbers["register", operand.name]
            return number, self._dtypes[number]
        if isinstance(operand, Special):
            return self._slot(("special", operand.name, dtype), dtype), dtype
        if isinstance(operand, Symbol):
            if operand.name not in self.symbols and operand.name not in self.global_names:
                raise PtxUnsupported(f"unknown symbol {operand.name}")
            return self._slot(("symbol", operand.name, operand.offset, dtype), dtype), dtype
        return self._slot(("constant", constant_bits(operand, dtype), dtype), dtype), dtype

    def read(self, operand, ty):
        """A reader: act -> array of the PTX type's dtype, one value a thread."""
        if isinstance(operand, Not):
            inner = self.read(operand.operand, ty)
            return lambda act: ~inner(act)
        if isinstance(operand, Special) and operand.name in CLOCKS:
            return lambda act: np.full(act.n, self.stats.steps, DTYPE[ty])
        wanted = DTYPE[ty]
        number, dtype = self.slot_of(operand, ty)
        slots = self.slots
        if dtype == wanted:
            return lambda act: slots[number] if act.index is None else slots[number].take(act.index)
        if dtype.itemsize == wanted.itemsize:
            return lambda act: (slots[number] if act.index is None else slots[number].take(act.index)).view(wanted)
        low, raw = UNSIGNED[wanted.itemsize], UNSIGNED[dtype.itemsize]  # a narrower or wider register: its low bits

        def resized(act):
            values = slots[number] if act.index is None else slots[number].take(act.index)
            return values.view(raw).astype(low).view(wanted)

        return resized

    def read_parameter(self, name, offset, ty):
        """A reader of a kernel parameter."""
        number = self._slot(("param", name, offset, DTYPE[ty]), DTYPE[ty])
        return lambda act: self.slots[number] if act.index is None else self.slots[number].take(act.index)

    def address(self, operand):
        """A reader of [base + offset]: act -> int64 array."""
        base, offset = operand
        if isinstance(base, Symbol):
            return self.read(Symbol(base.name, base.offset + offset), "s64")
        if isinstance(base, Int):
            return self.read(Int(base.value + offset), "s64")
        width = TYPE_BYTES[self.program.registers[base.name]]
        if width == 8:
            value = self.read(base, "s64")
        else:
            narrow = self.read(base, "u32")

            def value(act):
                return narrow(act).astype(np.int64)

        return (lambda act: value(act) + offset) if offset else value

    # -- writing ----------------------------------------------------------------
    def write(self, operand, ty):
        """A writer: (act, array of the PTX type's dtype). A wider register gets the value extended as the type says."""
        if isinstance(operand, Sink):
            return lambda act, values: None
        if not isinstance(operand, Reg):
            raise PtxUnsupported(f"destination {operand}")
        given = DTYPE[ty]
        number = self._numbers["register", operand.name]
        dtype, slots = self._dtypes[number], self.slots

        def put(act, values):
            slots[number] = values if act.index is None else scattered(slots[number], act.index, values)

        if dtype == given:
            return put
        if dtype.itemsize == given.itemsize:
            return lambda act, values: put(act, values.view(dtype))
        extended = np.dtype(f"{'i' if given.kind == 'i' else 'u'}{dtype.itemsize}")
        raw = given if given.kind in "iu" else UNSIGNED[given.itemsize]
        return lambda act, values: put(act, values.view(raw).astype(extended).view(dtype))

    # -- the shape of most instructions --------------------------------------------
    def compute(self, f, target, target_type, *sources):
        """A closure for target = f(*sources), each source an (operand, type); f must return the target type's dtype."""
        direct = [self._direct(*s) for s in sources]
        out = self._direct(target, target_type)
        if None in direct or out is None:
            readers, write = [self.read(*s) for s in sources], self.write(target, target_type)
            return lambda act: write(act, f(*[r(act) for r in readers]))
        slots = self.slots
        if len(direct) == 1:
            (x,) = direct

            def run(act):
                i = act.index
                slots[out] = f(slots[x]) if i is None else scattered(slots[out], i, f(slots[x].take(i)))

        elif len(direct) == 2:
            x, y = direct

            def run(act):
                i = act.index
                if i is None:
                    slots[out] = f(slots[x], slots[y])
                else:
                    slots[out] = scattered(slots[out], i, f(slots[x].take(i), slots[y].take(i)))

        else:

            def run(act):
                i = act.index
                if i is None:
                    slots[out] = f(*[slots[x] for x in direct])
                else:
                    slots[out] = scattered(slots[out], i, f(*[slots[x].take(i) for x in direct]))

        return run

    def _direct(self, operand, ty):
        """The slot of an operand that needs no conversion, or None."""
        if isinstance(operand, (Not, Sink)) or (isinstance(operand, Special) and operand.name in CLOCKS):
            return None
        number, dtype = self.slot_of(operand, ty)
        return number if dtype == DTYPE[ty] else None


def _register_dtypes(program):
    """The dtype of its width that most instructions want each register in."""
    wanted = Counter((name, DTYPE[kind]) for name, kind in program.registers.items())
    for instr in program.instrs:
        types = [instr.type] * len(instr.operands)
        if instr.name in ("cvt", "set"):
            types[0] = instr.parts[-2]
        for operand, ty in zip(instr.operands, types):
            if isinstance(operand, Address):
                operand, ty = operand.base, "b64"
            for part in operand.items if isinstance(operand, Vector) else [operand]:
                if isinstance(part, Reg) and ty in DTYPE:
                    wanted[part.name, DTYPE[ty]] += 1
    chosen = {name: DTYPE[kind] for name, kind in program.registers.items()}
    for (name, dtype), count in wanted.items():
        if dtype.itemsize == chosen[name].itemsize and count > wanted[name, chosen[name]]:
            chosen[name] = dtype
    return chosen


def constant_bits(operand, dtype):
    """The bits of an immediate as a value of `dtype`."""
    if isinstance(operand, Int):
        if dtype.kind == "f":
            return int.from_bytes(np.asarray(operand.value, dtype).tobytes(), "little")
        return operand.value != 0 if dtype.kind == "b" else operand.value & ((1 << 8 * dtype.itemsize) - 1)
    if isinstance(operand, Float):
        if operand.width == 64 and dtype.itemsize == 4:
            return int(np.uint64(operand.bits).view(np.float64).astype(np.float32).view(np.uint32))
        if operand.width == 32 and dtype.itemsize == 8:
            return int(np.uint32(operand.bits).view(np.float32).astype(np.float64).view(np.uint64))
        return operand.bits
    raise PtxUnsupported(f"operand {operand}")
