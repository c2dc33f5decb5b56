"""Races in shared and global memory: what orders accesses and what does not."""

import numpy as np
import pytest

from ptxrun import SyncError
from ptxrun.tests.ptxcase import kernel, launch_pointers

SHARED = ".shared .align 16 .b8 sm[4096]; mov.u32 %r1, sm; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; "
NEIGHBOUR = "xor.b32 %r4, %r0, 32; mad.lo.u32 %r5, %r4, 4, %r1; "  # the same lane of the other warp


def races(body, block=64, **options):
    """The races of a kernel of one block, and its 64 words of output."""
    out = np.zeros(64, np.uint32)
    text = kernel(SHARED + NEIGHBOUR + body + "mad.wide.u32 %d1, %r0, 4, %d0; st.global.u32 [%d1], %r6;", ["out"])
    result = launch_pointers(text, 1, block, [out], **options)
    assert {h.kind for h in result.hazards} <= {"race"}
    return [h.what for h in result.hazards], out


def test_a_block_barrier_orders_warps():
    write, read = "st.shared.u32 [%r3], %r0; ", "ld.shared.u32 %r6, [%r5]; "
    found, out = races(write + "bar.sync 0; " + read)
    assert not found and (out == np.arange(64) ^ 32).all()
    assert races(write + read)[0] == ["shared read after write"]
    assert races(write + "bar.warp.sync -1; " + read)[0] == ["shared read after write"]
    assert races(write + read, races=False)[0] == []


def test_reads_before_a_write_are_remembered():
    """The first of several readers, of other warps and of the writer's own, collides with a write."""
    read = "mov.u32 %r6, 0; st.shared.u32 [%r3], %r0; bar.sync 0; ld.shared.u32 %r6, [sm+4]; "
    write = "setp.eq.u32 %p0, %r0, {thread}; @%p0 st.shared.u32 [sm+4], 7; "
    for thread in (0, 31, 32, 63):
        assert races(read + write.format(thread=thread))[0] == ["shared write after read"]
        assert not races(read + "bar.sync 0; " + write.format(thread=thread))[0]
    own = read + "bar.warp.sync -1; " + write.format(thread=5)  # orders its own warp, not the other
    assert races(own)[0] == ["shared write after read"]


@pytest.mark.parametrize("width,values", [("u32", "%r7"), ("v4.u32", "{%r7, %r7, %r7, %r7}")])
def test_threads_that_write_one_place_at_once(width, values):
    """Different values race, equal ones do not."""
    for value, found in (("%r0", ["shared two threads write at once"]), ("9", [])):
        assert races(f"mov.u32 %r6, 0; mov.u32 %r7, {value}; st.shared.{width} [sm+16], {values}; ")[0] == found


def test_one_instruction_writes_a_place_in_two_iterations():
    """Thread k writes word k, then word k + 1: no two threads at once, but nobody waited."""
    loop = """mov.u32 %r6, 0; LOOP: st.shared.u32 [%r3], %r0; add.u32 %r3, %r3, 128; {barrier} add.u32 %r6, %r6, 1;
        setp.lt.u32 %p0, %r6, 2; @%p0 bra LOOP; """
    assert races(loop.format(barrier=""))[0] == ["shared write after write"]
    assert not races(loop.format(barrier="bar.sync 0;"))[0]


def test_atomics_do_not_race_with_each_other():
    count = "setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.u32 [sm], 0; bar.sync 0; red.shared.add.u32 [sm], 1; "
    found, out = races(count + "bar.sync 0; ld.shared.u32 %r6, [sm]; ")
    assert not found and (out == 64).all()
    assert races(count + "ld.shared.u32 %r6, [sm]; ")[0] == ["shared read after write"]
    assert not races(count + "ld.relaxed.cta.shared.u32 %r6, [sm]; ")[0]  # may see any count
    assert races(count + "st.shared.u32 [sm], 3; mov.u32 %r6, 0; ")[0] == ["shared write after write"]


def test_named_barriers():
    """Each warp waits at its own barrier of 32 threads: nothing is ordered between them."""
    halves = """setp.lt.u32 %p0, %r0, 32; mov.u32 %r6, 0; st.shared.u32 [%r3], %r0;
        @%p0 bra A; bar.sync 2, 32; bra.uni B; A: bar.sync 1, 32; B: """
    xor = "xor.b32 %r7, %r0, {bit}; mad.lo.u32 %r8, %r7, 4, %r1; ld.shared.u32 %r6, [%r8]; "
    found, out = races(halves + xor.format(bit=1))
    assert not found and (out == np.arange(64) ^ 1).all()
    with pytest.raises(SyncError, match="more threads arrived than it expects"):
        races("mov.u32 %r6, 0; bar.sync 1, 32; ")
    with pytest.raises(SyncError, match="deadlock: 64 threads wait for ever"):
        races("mov.u32 %r6, 0; bar.sync 1, 96; ")


def test_barrier_reductions():
    body = """and.b32 %r7, %r0, 3; setp.eq.u32 %p0, %r7, 0; bar.red.popc.u32 %r6, 0, %p0; bar.red.or.pred %p1, 0, %p0;
        bar.red.and.pred %p2, 0, %p0; selp.u32 %r7, 100, 0, %p1; add.u32 %r6, %r6, %r7; selp.u32 %r7, 1000, 0, %p2;
        add.u32 %r6, %r6, %r7; """
    found, out = races(body)
    assert not found and (out == 16 + 100).all()


def test_global_races():
    """Blocks are never ordered; threads of a block by its barriers."""
    body = "mov.u32 %r1, %ctaid.x; mul.wide.u32 %d1, %r1, {stride}; add.s64 %d1, %d0, %d1; st.global.u32 [%d1], %r1;"
    for stride, blocks, clean in ((0, 4, False), (4, 4, True), (0, 1, True)):
        text = kernel(body.format(stride=stride), ["out"])
        result = launch_pointers(text, blocks, 32, [np.zeros(4, np.uint32)], global_races=True)
        assert bool(result.of("race")) != clean
        launch_pointers(text, blocks, 32, [np.zeros(4, np.uint32)]).assert_clean()
    exchange = """mad.wide.u32 %d1, %r0, 4, %d0; st.global.u32 [%d1], %r0; {barrier} xor.b32 %r1, %r0, 32;
        mad.wide.u32 %d2, %r1, 4, %d0; ld.global.u32 %r2, [%d2]; st.global.u32 [%d1+256], %r2;"""
    for barrier, clean in (("bar.sync 0;", True), ("", False)):
        text = kernel(exchange.format(barrier=barrier), ["out"])
        result = launch_pointers(text, 1, 64, [np.zeros(128, np.uint32)], global_races=True)
        assert bool(result.of("race")) != clean


def test_a_report_names_both_sides():
    write, read = "mov.u32 %r6, 0; st.shared.u32 [%r3], %r0; ", "ld.shared.u32 %r6, [%r5]; "
    out = np.zeros(64, np.uint32)
    text = kernel(SHARED + NEIGHBOUR + write + read, ["out"])
    (hazard,) = launch_pointers(text, 1, 64, [out]).of("race")
    assert hazard.count == 64 and hazard.thread == ((0, 0, 0), (0, 0, 0)) and hazard.address == 0x400 + 4 * 32
    assert "block (0, 0, 0) thread (32, 0, 0) at PTX line" in hazard.other and "st.shared" in hazard.other
    assert "ld.shared" in hazard.instr.text and str(hazard).startswith("race: shared read after write x64")
