"""Link a module into one flat program: calls inlined, names resolved, blocks in reconvergence order."""

import gc
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from .errors import PtxUnsupported
from .layout import reorder
from .module import Address, Call, Instr, Int, Label, Name, Not, Pair, Reg, Symbol, Vector
from .syntax import parse

_FLOAT_TYPES = {"f16", "f32", "f64", "bf16", "f16x2", "bf16x2", "f32x2", "tf32"}


@dataclass(eq=False)
class Program:
    """What one kernel executes.

    `registers` maps a unique register name to its type; `locals` and `shared` map variable names to `Var`.
    `global_variables` are the module's own, constant ones included.
    """

    name: str
    target: str
    params: list
    directives: dict
    global_variables: list
    instrs: list = field(default_factory=list)
    registers: dict = field(default_factory=dict)
    locals: dict = field(default_factory=dict)
    shared: dict = field(default_factory=dict)


@contextmanager
def garbage_kept():
    """Meanwhile no garbage is collected: where all that is made stays, looking for it takes as long as making it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@lru_cache(maxsize=512)
@garbage_kept()
def load_program(text, entry=None):
    """Parse and link PTX text; `entry` names the kernel where the module has several."""
    return reorder(fold_constants(link(parse(text), entry)))


def link(module, entry=None):
    """One flat `Program` of a parsed module."""
    if entry is None and len(module.entries) != 1:
        raise PtxUnsupported(f"the module has kernels {module.entries}: name one")
    if entry is not None and entry not in module.entries:
        raise PtxUnsupported(f"no kernel {entry} in the module, which has {module.entries}")
    return _Linker(module, module.functions[entry or module.entries[0]]).program


class _Names:
    """What the names in one function mean: registers and variables, unique in the program by a prefix.

    `alias` maps the function's parameters to the caller's variables.
    """

    def __init__(self, program, function, prefix, alias):
        self.program, self.function, self.prefix, self.alias = program, function, prefix, alias
        self._known = {}

    def resolve(self, o):
        """An operand with its names replaced."""
        if isinstance(o, Name):
            if o not in self._known:
                self._known[o] = self._meaning(o)
            return self._known[o]
        if isinstance(o, Address):
            return Address(self.resolve(o.base), o.offset)
        if isinstance(o, Vector):
            return Vector([self.resolve(x) for x in o.items])
        if isinstance(o, Pair):
            return Pair(self.resolve(o.first), self.resolve(o.second))
        if isinstance(o, Not):
            return Not(self.resolve(o.operand))
        return o

    def _meaning(self, o):
        own = self.prefix + o.name
        kind = self.function.register_type(o.name)
        if kind:
            self.program.registers[own] = kind
            return Reg(own)
        return Symbol(self.alias.get(o.name, own if own in self.program.locals else o.name), o.offset)


class _Linker:
    def __init__(self, module, kernel):
        self.module = module
        own = [v for v in module.variables.values() if v.space in ("global", "const")]
        self.program = Program(kernel.name, module.target, kernel.params, kernel.directives, own)
        self.program.shared.update((v.name, v) for v in module.variables.values() if v.space == "shared")
        self.labels = {}
        self.num_calls = 0
        self._emit(kernel, "", {}, ())
        instrs = self.program.instrs
        if not instrs or instrs[-1].name not in ("ret", "exit") or instrs[-1].guard:
            instrs.append(Instr("ret", [], text="ret (end of body)"))
        for instr in instrs:
            if instr.name in ("bra", "brx"):
                instr.target = next(self.labels[n] for n in instr.operands if n in self.labels)

    def _emit(self, function, prefix, alias, stack):
        """Append a function's instructions; `stack` has the names of its callers."""
        if function.name in stack:
            raise PtxUnsupported(f"recursive call of {function.name}")
        program = self.program
        for name, variable in function.variables.items():
            if variable.space == "shared":
                program.shared[name] = variable
            elif name not in alias and not (function.entry and variable in function.params):
                program.locals[prefix + name] = variable
        names, end = _Names(program, function, prefix, alias), prefix + "<end>"
        for item in function.body:
            if isinstance(item, Label):
                self.labels[prefix + item.name] = len(program.instrs)
            elif item.name == "call":
                self._call(item, names, (*stack, function.name))
            else:
                program.instrs.append(self._resolved(item, names, end if stack else None))
        self.labels[end] = len(program.instrs)

    def _resolved(self, item, names, end):
        """A copy of an instruction with final names; a device function's `ret` jumps to its `end`."""
        guard = (names.resolve(item.guard[0]), item.guard[1]) if item.guard else None
        op, operands = item.op, item.operands
        if item.name in ("bra", "brx"):
            label = names.prefix + operands[0].name
            operands = [f"{label}@{number}" for number in reversed(item.scopes)] + [label]
        elif item.name == "ret" and end:
            op, operands = "bra.uni", [end]
        else:
            operands = [names.resolve(o) for o in operands]
        return Instr(op, operands, guard, item.line, item.text, item.source)

    def _call(self, item, names, stack):
        operands = list(item.operands)
        results = operands.pop(0).items if isinstance(operands[0], Call) else []
        name = operands[0].name
        arguments = operands[1].items if len(operands) > 1 and isinstance(operands[1], Call) else []
        callee = self.module.functions.get(name)
        if callee is None or "extern" in callee.directives or item.guard:
            raise PtxUnsupported(f"call of {name} (external, indirect or predicated) at {item.place}")
        self.num_calls += 1
        pairs = [*zip(callee.params, arguments), *zip(callee.returns, results)]
        alias = {parameter.name: names.resolve(given).name for parameter, given in pairs}
        self._emit(callee, f"{names.prefix}{callee.name[:24]}#{self.num_calls}/", alias, stack)


def fold_constants(program):
    """Replace registers that only hold an integer constant where instructions of no float type read them.

    NVVM keeps byte selectors and shuffle distances in registers; decoders do better with the numbers.
    """
    writes = Counter(r for instr in program.instrs for r in _registers(instr.operands[:1]))
    constants = {}
    for instr in program.instrs:
        if instr.name == "mov" and not instr.guard and isinstance(instr.operands[1], Int):
            [target] = _registers(instr.operands[:1]) or [None]
            if writes[target] == 1:
                constants[target] = instr.operands[1]
    for instr in program.instrs:
        if not _FLOAT_TYPES.intersection(instr.parts):
            first = 0 if instr.name in ("bar", "barrier") else 1
            sources = instr.operands[first:]
            instr.operands[first:] = [constants.get(o, o) if isinstance(o, Reg) else o for o in sources]
    return program


def _registers(operands):
    """The registers among operands, those in vectors and pairs included."""
    found = []
    for o in operands:
        if isinstance(o, Reg):
            found.append(o)
        elif isinstance(o, (Vector, Pair)):
            found += _registers(o.items if isinstance(o, Vector) else o)
    return found
