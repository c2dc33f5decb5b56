"""The pieces of a PTX module: operands, instructions, variables, functions."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
}
SPACES = ("global", "shared", "local", "param", "const")


class Name(NamedTuple):
    """An identifier whose meaning (register or variable) the linker decides."""

    name: str
    offset: int = 0


class Reg(NamedTuple):
    name: str


class Symbol(NamedTuple):
    """The address of a variable, plus bytes."""

    name: str
    offset: int = 0


class Special(NamedTuple):
    """A special register such as %tid.x."""

    name: str


class Int(NamedTuple):
    value: int


class Float(NamedTuple):
    """A floating-point immediate by its bits; `width` is 32 or 64."""

    bits: int
    width: int


class Address(NamedTuple):
    """[base + offset]"""

    base: object
    offset: int


class Vector(NamedTuple):
    """{a, b, ...}"""

    items: list


class Call(NamedTuple):
    """(a, b, ...): the arguments or results of a call."""

    items: list


class Pair(NamedTuple):
    """a|b: two destinations."""

    first: object
    second: object


class Not(NamedTuple):
    """!a"""

    operand: object


class Sink(NamedTuple):
    """_: a destination nobody wants."""


class Label(NamedTuple):
    name: str


@dataclass
class Var:
    """A variable or parameter; `size` is in bytes, -1 for an extern shared array of any length."""

    name: str
    space: str
    type: str
    size: int
    align: int
    init: bytes = None


@dataclass(slots=True, eq=False)
class Instr:
    """One instruction.

    `guard` is None or (operand, negated); `source` the (file, line) of the Python source when compiled with lineinfo;
    `scopes` the numbers of the braces it stands in; `target` the program counter a branch goes to, set by the linker.
    `name` is the opcode without modifiers, `type` its last modifier: the type that most instructions work in.
    """

    op: str
    operands: list
    guard: tuple = None
    line: int = 0
    text: str = ""
    source: tuple = None
    scopes: tuple = ()
    target: int = None
    parts: list = field(init=False)
    name: str = field(init=False)
    type: str = field(init=False)

    def __post_init__(self):
        self.parts = self.op.split(".")
        self.name, self.type = self.parts[0], self.parts[-1]

    @property
    def place(self):
        """Where it stands, for messages."""
        source = f" ({self.source[0].rsplit('/', 1)[-1]}:{self.source[1]})" if self.source else ""
        return f'PTX line {self.line}: "{self.text}"{source}'

    @property
    def space(self):
        """The state space of a memory instruction; "generic" where it names none."""
        return next((p for p in (q.split("::")[0] for q in self.parts[1:]) if p in SPACES), "generic")


@dataclass
class Function:
    """A kernel or device function. `registers` maps a name, or a prefix with "<" for ``%r<9>``, to its type."""

    name: str
    entry: bool
    params: list
    returns: list
    body: list = field(default_factory=list)
    registers: dict = field(default_factory=dict)
    variables: dict = field(default_factory=dict)
    directives: dict = field(default_factory=dict)

    def register_type(self, name):
        """The type of a register, or None where the name is not one."""
        if name in self.registers:
            return self.registers[name]
        numbered = re.match(r"^(.*?)\d+$", name)
        return self.registers.get(numbered.group(1) + "<") if numbered else None


@dataclass
class Module:
    """A parsed PTX file."""

    target: str = ""
    functions: dict = field(default_factory=dict)
    variables: dict = field(default_factory=dict)

    @property
    def entries(self):
        """Names of the kernels."""
        return [f.name for f in self.functions.values() if f.entry]
