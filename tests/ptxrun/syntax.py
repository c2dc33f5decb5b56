"""PTX text -> `Module`: a scanner for statements and braces, and a parser for each kind of statement."""

import re
import struct
from bisect import bisect_right

from .errors import PtxUnsupported
from .module import (
    TYPE_BYTES,
    Address,
    Call,
    Float,
    Function,
    Instr,
    Int,
    Label,
    Module,
    Name,
    Not,
    Pair,
    Sink,
    Special,
    Var,
    Vector,
)

_NAME = r"[A-Za-z_$%][\w$]*"
_BRACKET = re.compile(r"[{(\[]")
_COMMENT = re.compile(r'"[^"]*"|//[^\n]*|/\*.*?\*/', re.S)
_TOKEN = re.compile(r'"[^"]*"|[\n;{}()\[\]]|[^\n;{}()\[\]"]+')
_LABEL = re.compile(rf"\s*({_NAME})\s*:(?!:)")
_HEADER = re.compile(rf"^(?:\.\w+\s+)*?\.(entry|func)\s*(\([^)]*\))?\s*({_NAME})\s*(\(.*?\))?([^()]*)$", re.S)
_VARIABLE = re.compile(r"^(?:\.(?:visible|extern|weak|common)\s+)*\.(global|const|shared|local|param)\b(.*)$", re.S)
_DECLARATOR = re.compile(r"^\s*(?:\.(v2|v4)\s+)?\.(\w+)\s+([\w$%.]+)\s*((?:\[\d*\])*)\s*$")
_SPECIAL = re.compile(
    r"^%(n?tid|n?ctaid|n?clusterid|cluster_n?ctarank|laneid|n?warpid|n?smid|gridid|clock|clock64|clock_hi|"
    r"globaltimer(_lo|_hi)?|lanemask_\w+|dynamic_smem_size|total_smem_size)(\.[xyzw])?$"
)
_GUARDED = re.compile(rf"^@(!?)({_NAME})\s+(.*)$")
_OPCODE = re.compile(r"^([a-z][\w.:]*)\s*(.*)$")
_ADDRESS = re.compile(r"^\[\s*([\w$%.]+)\s*(?:([+-])\s*(-?\s*\w+)\s*)?\]$")
_INTEGER = re.compile(r"^([-~]?)\s*(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_BITS = re.compile(r"^(-?)0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))$")
_DECIMAL = re.compile(r"^-?\d+\.\d*([eE][-+]?\d+)?$")


def parse(text):
    """Parse a PTX file."""
    return _Parser(text).module


def split_commas(text):
    """The parts between the commas outside of brackets."""
    if not _BRACKET.search(text):
        return [part.strip() for part in text.split(",")] if text.strip() else []
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return parts + [text[start:].strip()] if text.strip() else []


def number(text):
    """An `Int` or `Float` immediate, or None where the text is neither."""
    if m := _INTEGER.match(text):
        digits = m.group(2)
        octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
        value = int(digits, 8 if octal else 0)
        return Int({"": value, "-": -value, "~": ~value}[m.group(1)])
    if m := _BITS.match(text):
        width = 32 if m.group(2) else 64
        return Float(int(m.group(2) or m.group(3), 16) ^ (1 << (width - 1) if m.group(1) else 0), width)
    if _DECIMAL.match(text):
        return Float(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None


class _Parser:
    def __init__(self, text):
        self.module = Module()
        self.function = None
        self.scopes = []  # (number, {name: unique name}) of the open braces inside the function
        self.num_scopes = 0
        self.sources = []  # (PTX line, (file, source line)) in order
        self.operands = {}  # text -> operand, outside of inner scopes
        self._scan(self._take_lines(_COMMENT.sub(_blank_comment, text)))

    def _take_lines(self, text):
        """Read the directives that end with their line, and blank them."""
        files, kept, in_section = {}, [], False
        for line_number, line in enumerate(text.split("\n"), 1):
            words = line.replace(",", " ").split()
            first = words[0] if words else ""
            if in_section or first == ".section":
                in_section = "}" not in line
                line = ""
            elif first == ".target":
                self.module.target = words[1]
                line = ""
            elif first == ".file":
                files[words[1]] = line.split('"')[1]
                line = ""
            elif first == ".loc":
                self.sources.append((line_number, words[1], int(words[2])))
                line = ""
            elif first in (".version", ".address_size"):
                line = ""
            kept.append(line)
        self.sources = [(at, (files.get(file, "?"), source_line)) for at, file, source_line in self.sources]
        return "\n".join(kept)

    # -- statements -----------------------------------------------------------
    def _scan(self, text):
        """Cut the text at semicolons and at the braces of functions and scopes."""
        line, depth, pending, start = 1, 0, "", 1
        for token in _TOKEN.findall(text):
            if token == "\n":
                line += 1
            if not pending.strip():
                pending, start = "", line
            if token == "{" and depth == 0:
                pending, start = self._labels(pending, start)
                if _HEADER.match(pending):
                    self.function = self._header(pending)
                elif not pending:
                    self.num_scopes += 1
                    self.scopes.append((self.num_scopes, {}))
                else:
                    depth, pending = 1, pending + token
                    continue
                pending = ""
            elif token == "}" and depth == 0:
                self._labels(pending, start)
                pending = ""
                if self.scopes:
                    self.scopes.pop()
                else:
                    self.function = None
            elif token == ";" and depth == 0:
                self._statement(*self._labels(pending, start))
                pending = ""
            else:
                depth += (token in "{[(") - (token in "}])")
                pending += token

    def _labels(self, text, line):
        """Take the labels off the front: (rest, its line)."""
        while self.function and (m := _LABEL.match(text)):
            self.function.body.append(Label(m.group(1) + self._tag()))
            rest = text[m.end() :]
            line += text[: len(text) - len(rest.lstrip())].count("\n")
            text = rest.lstrip()
        return text.strip(), line

    def _tag(self):
        return f"@{self.scopes[-1][0]}" if self.scopes else ""

    def _statement(self, text, line):
        text = " ".join(text.split())
        if _HEADER.match(text):
            function = self._header(text, external=True)
            self.module.functions.setdefault(function.name, function)
        elif text.startswith(".reg"):
            self._registers(text)
        elif _VARIABLE.match(text):
            self._declare(self._variable(text))
        elif text and not text.startswith(".") and self.function:
            self.function.body.append(self._instruction(text, line))

    def _header(self, text, external=False):
        kind, returns, name, params, rest = _HEADER.match(text).groups()
        listed = [[self._variable(p) for p in split_commas((s or "()").strip()[1:-1])] for s in (params, returns)]
        function = Function(name, kind == "entry", *listed)
        for directive, values in re.findall(r"\.(\w+)\s*([\d,\s]*)", rest):
            function.directives[directive] = tuple(int(v) for v in values.split(",") if v.strip())
        function.variables = {v.name: v for v in function.params + function.returns}
        if external:
            function.directives["extern"] = True
        else:
            self.module.functions[name] = function
        return function

    def _registers(self, text):
        kind, names = re.match(r"^\.reg\s*\.(\w+)\s+(.*)$", text).groups()
        for name in split_commas(names):
            numbered = re.match(r"^(.*)<(\d+)>$", name)
            if not self.scopes:
                self.function.registers[numbered.group(1) + "<" if numbered else name] = kind
                continue
            count = range(int(numbered.group(2))) if numbered else [""]
            for i in count:
                local = f"{numbered.group(1) if numbered else name}{i}"
                self.scopes[-1][1][local] = local + self._tag()
                self.function.registers[local + self._tag()] = kind

    def _declare(self, variable):
        if not self.function:
            self.module.variables[variable.name] = variable
            return
        unique = variable.name + self._tag()
        self.function.variables[unique] = variable
        if self.scopes:
            self.scopes[-1][1][variable.name] = unique

    def _variable(self, text):
        space, rest = _VARIABLE.match(text.strip()).groups()
        rest, _, init = rest.partition("=")
        align = re.search(r"\.align\s+(\d+)", rest)
        rest = re.sub(r"\.align\s+\d+|\.attribute\([^)]*\)|\.ptr(\s+\.(global|shared|const|local))?", " ", rest)
        vector, kind, name, dims = _DECLARATOR.match(rest).groups()
        unit = TYPE_BYTES[kind]
        size = unit * (int(vector[1]) if vector else 1)
        for extent in re.findall(r"\[(\d*)\]", dims):
            size = size * int(extent) if extent else -1
        variable = Var(name, space, kind, size, int(align.group(1)) if align else unit)
        if init:
            values = [number(v) for v in split_commas(init.strip().strip("{}"))]
            if None in values:
                raise PtxUnsupported(f"initialiser of {name}: {init.strip()[:80]}")
            bits = (v.bits if isinstance(v, Float) else v.value & ((1 << 8 * unit) - 1) for v in values)
            variable.init = b"".join(b.to_bytes(unit, "little") for b in bits).ljust(size, b"\0")
        return variable

    # -- instructions ---------------------------------------------------------
    def _instruction(self, text, line):
        guarded = _GUARDED.match(text)
        guard = (self._operand(guarded.group(2)), guarded.group(1) == "!") if guarded else None
        m = _OPCODE.match(guarded.group(3) if guarded else text)
        if not m:
            raise PtxUnsupported(f'PTX line {line}: cannot parse "{text}"')
        after = bisect_right(self.sources, line, key=lambda s: s[0])
        source = self.sources[after - 1][1] if after else None
        operands = [self._operand(o) for o in split_commas(m.group(2))]
        return Instr(m.group(1), operands, guard, line, text, source, tuple(number for number, _ in self.scopes))

    def _operand(self, text):
        """An operand; outside of inner scopes, the same text is the same operand."""
        if self.scopes:
            return self._new_operand(text)
        if text not in self.operands:
            self.operands[text] = self._new_operand(text)
        return self.operands[text]

    def _new_operand(self, text):
        if text == "_":
            return Sink()
        if text[0] in "{(":
            return (Vector if text[0] == "{" else Call)([self._operand(t) for t in split_commas(text[1:-1])])
        if text[0] == "[":
            m = _ADDRESS.match(text)
            if not m:
                raise PtxUnsupported(f"address operand {text}")
            offset = int((m.group(3) or "0").replace(" ", ""), 0)
            return Address(self._operand(m.group(1)), -offset if m.group(2) == "-" else offset)
        if text[0] == "!":
            return Not(self._operand(text[1:].strip()))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        if _SPECIAL.match(text):
            return Special(text)
        if text == "WARP_SZ":
            return Int(32)
        return number(text) or self._name(text)

    def _name(self, text):
        name, _, offset = text.partition("+")
        name = name.strip()
        for _, names in reversed(self.scopes):
            if name in names:
                name = names[name]
                break
        return Name(name, int(offset, 0) if offset else 0)


def _blank_comment(match):
    text = match.group()
    return text if text[0] == '"' else "\n" * text.count("\n")
