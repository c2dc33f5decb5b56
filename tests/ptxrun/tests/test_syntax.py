"""Parsing, linking and block order."""

import numpy as np
import pytest

from ptxrun import PtxUnsupported, launch
from ptxrun.module import Address, Float, Int, Name, Pair, Sink, Special, Vector
from ptxrun.program import load_program
from ptxrun.syntax import number, parse, split_commas
from ptxrun.tests.ptxcase import HEADER, kernel, launch_pointers


def first_instruction(line):
    return next(i for i in parse(kernel_of(line)).functions["k"].body if i.op != "ret")


def kernel_of(body):
    return (
        HEADER.format(target="sm_90a") + f".visible .entry k(.param .u64 a)\n{{\n.reg .b32 %r<9>;\n{body}\nret;\n}}\n"
    )


def test_numbers():
    for text, value in (
        ("12", 12),
        ("-3", -3),
        ("0x1F", 31),
        ("0b101", 5),
        ("017", 15),
        ("0", 0),
        ("4294967295U", 2**32 - 1),
        ("~0", -1),
    ):
        assert number(text) == Int(value)
    assert number("0f3F800000") == Float(0x3F800000, 32) and number("-0f3F800000") == Float(0xBF800000, 32)
    assert number("0d3FF0000000000000") == Float(0x3FF0000000000000, 64) == number("1.0")
    assert number("%r1") is None and number("x7") is None


def test_commas_inside_of_brackets():
    assert split_commas("{a, b}, [c+4], d|e") == ["{a, b}", "[c+4]", "d|e"] and split_commas(" ") == []


def test_operands():
    instr = first_instruction("mma.x {%r1, %r2}, [%r3+-8], %r4|_, 0x10, %tid.x, sym+4, [sym], [%r1-4];")
    vector, down, pair, constant, special, symbol, plain, minus = instr.operands
    assert vector == Vector([Name("%r1"), Name("%r2")]) and down == Address(Name("%r3"), -8)
    assert isinstance(pair, Pair) and isinstance(pair.second, Sink) and constant == Int(16)
    assert isinstance(special, Special) and symbol == Name("sym", 4) and plain == Address(Name("sym"), 0)
    assert minus == Address(Name("%r1"), -4)


def test_lines_guards_and_comments():
    text = "// a comment; with } braces\n/* two\nlines */ @!%r1 add.s32 %r2, %r3,\n  4; // trailing\n"
    text += "L1: L2:\n sub.s32 %r4, %r5, %r6;"
    add, label, other, sub = parse(kernel_of(text)).functions["k"].body[:4]
    offset = kernel_of(text)[: kernel_of(text).index("// a")].count("\n")
    assert add.guard == (Name("%r1"), True) and add.line == offset + 3 and add.text == "@!%r1 add.s32 %r2, %r3, 4"
    assert (label.name, other.name) == ("L1", "L2") and sub.line == offset + 6


def test_source_lines():
    text = kernel_of(
        ".loc 2 17 5\nadd.s32 %r1, %r2, %r3;\nadd.s32 %r1, %r2, %r3;\n"
        ".loc 2 18 1, function_name $L__info0, inlined_at 2 3 4\nneg.s32 %r1, %r2;"
    )
    body = (
        parse(text + '.file 2 "/somewhere/kernels.py"\n.section .debug_str\n{\n$L__info0:\n.b8 95\n}\n')
        .functions["k"]
        .body
    )
    assert [i.source for i in body[:3]] == [("/somewhere/kernels.py", n) for n in (17, 17, 18)]
    assert body[2].place.endswith("(kernels.py:18)")


def test_scopes_hide_names():
    """Registers and labels of inner braces, as inline assembly has them, are not those outside."""
    body = """mov.u32 %r1, 1; mov.u32 %r5, 0;
        { .reg .b32 t; mov.u32 t, 2; L: add.u32 t, t, 1; setp.lt.u32 %p0, t, 5; @%p0 bra L; add.u32 %r5, %r5, t; }
        { .reg .b32 t<3>; mov.u32 t1, 30; mov.u32 t2, 40; add.u32 t1, t1, t2; setp.lt.u32 %p0, t1, 0; @%p0 bra L;
        L: add.u32 %r5, %r5, t1; }
        add.u32 %r5, %r5, %r1; mad.wide.u32 %d1, %r0, 4, %d0; st.global.u32 [%d1], %r5;"""
    out = np.zeros(32, np.uint32)
    launch_pointers(kernel(body, ["o"]), 1, 32, [out]).assert_clean()
    assert (out == 5 + 70 + 1).all()


def test_calls_that_cannot_be_inlined():
    external = ".extern .func (.param .b32 r) f(.param .b32 x);\n"
    body = "{ .param .b32 p; .param .b32 q; st.param.b32 [p], %r1; call (q), f, (p); }"
    text = kernel_of(body).replace(".visible", external + ".visible")
    with pytest.raises(PtxUnsupported, match="call of f .*external"):
        launch(text, 1, 1, [0])


def test_constants_in_registers_are_folded():
    """Only where the register holds nothing else, and never into float instructions: a number is not its bits."""
    body = """mov.u32 %r1, 5; mov.u32 %r2, 6; mov.u32 %r3, 0x3f800000; @%p0 mov.u32 %r2, 7; shl.b32 %r4, %r0, %r1;
        shl.b32 %r5, %r0, %r2;
        add.f32 %r6, %r3, %r3; mad.wide.u32 %d1, %r0, 4, %d0; add.u32 %r4, %r4, %r5; add.u32 %r4, %r4, %r6;
        st.global.u32 [%d1], %r4;"""
    text = kernel("setp.eq.u32 %p0, %r0, 3;" + body, ["o"])
    shifts = [i for i in load_program(text).instrs if i.name == "shl"]
    assert shifts[0].operands[2] == Int(5) and shifts[1].operands[2] != Int(6)
    out = np.zeros(32, np.uint32)
    launch_pointers(text, 1, 32, [out]).assert_clean()
    t = np.arange(32, dtype=np.uint32)
    assert (out == (t << 5) + (t << np.where(t == 3, 7, 6)) + 0x40000000).all()


def test_a_block_behind_the_exit_costs_no_reconvergence():
    """Newer NVVM puts rare blocks behind the exit; threads that skip one wait for the others at the join."""
    body = """and.b32 %r1, %r0, 1; setp.ne.u32 %p0, %r1, 0; mov.u32 %r2, 5; mad.wide.u32 %d1, %r0, 4, %d0;
        @%p0 bra COLD;
        JOIN: st.global.u32 [%d1], %r2; ret;
        COLD: mov.u32 %r2, 9; bra.uni JOIN;"""
    out = np.zeros(32, np.uint32)
    stats = launch_pointers(kernel(body, ["o"]), 1, 32, [out]).assert_clean().stats
    assert (out == np.where(np.arange(32) % 2, 9, 5)).all()
    assert stats.warp_instructions == 2 + 5 + 2 + 2  # the store and the exit run once, not twice
    assert stats.by_class["branch"] == 3 and stats.divergent_branches == 1


def test_loops_finish_before_what_follows():
    """Threads that leave a loop early wait for the others behind it."""
    body = """mov.u32 %r1, 0; mad.wide.u32 %d1, %r0, 4, %d0;
        LOOP: add.u32 %r1, %r1, 1; setp.le.u32 %p0, %r1, %r0; @%p0 bra LOOP; st.global.u32 [%d1], %r1;"""
    out = np.zeros(32, np.uint32)
    stats = launch_pointers(kernel(body, ["o"]), 1, 32, [out]).assert_clean().stats
    assert (out == np.arange(32) + 1).all() and stats.by_class["st.global"] == 1
