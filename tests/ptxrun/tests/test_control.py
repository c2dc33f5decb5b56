"""Branches, guards, exits, traps, special registers, and the limits of a launch."""

import numpy as np
import pytest

from ptxrun import Livelock, Options, Trap, launch
from ptxrun.tests.ptxcase import kernel, launch_pointers, run


def test_guards_and_branches():
    """Collatz steps: every thread takes its own way, and all meet at the end."""
    body = """mov.u32 %r1, %i0; mov.u32 %o0, 0;
        LOOP: setp.eq.u32 %p0, %r1, 1; @%p0 bra DONE; and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0;
        @%p1 shr.u32 %r1, %r1, 1; @!%p1 mad.lo.u32 %r1, %r1, 3, 1; add.u32 %o0, %o0, 1; bra.uni LOOP;
        DONE:"""
    x = np.arange(1, 129, dtype=np.uint32)

    def steps(n):
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    (out,) = run(body, [x], [np.uint32])
    assert out.tolist() == [steps(n) for n in x.tolist()]


def test_guarded_exit():
    """Threads that leave early store nothing; the others go on."""
    body = """mad.wide.u32 %d1, %r0, 4, %d0; and.b32 %r1, %r0, 1; setp.eq.u32 %p0, %r1, 0; @%p0 exit;
        st.global.u32 [%d1], 5; setp.lt.u32 %p1, %r0, 16; @%p1 ret; st.global.u32 [%d1], 6;"""
    out = np.zeros(32, np.uint32)
    stats = launch_pointers(kernel(body, ["out"]), 1, 32, [out]).assert_clean().stats
    assert (out == np.where(np.arange(32) % 2 == 0, 0, np.where(np.arange(32) < 16, 5, 6))).all()
    assert stats.thread_counts[-2] == 8 and stats.lanes_per_instruction < 32


def test_a_loop_without_an_end():
    with pytest.raises(Livelock, match=r"more than 500 steps by block \(0, 0, 0\) thread \(0, 0, 0\) at PTX line"):
        launch(kernel("LOOP: bra.uni LOOP;", ["a"]), 1, 32, [0], max_steps=500)


def test_a_trap_names_its_threads():
    body = "setp.gt.u32 %p0, %r0, 20; @%p0 trap;"
    with pytest.raises(Trap, match=r"trap: 11 threads by block \(0, 0, 0\) thread \(21, 0, 0\)"):
        launch(kernel(body, ["a"]), 1, 32, [0])


def test_special_registers():
    names = "tid.x tid.y ctaid.x ctaid.z ntid.x ntid.y nctaid.z laneid warpid nwarpid dynamic_smem_size".split()
    stores = "".join(f"mov.u32 %r5, %{name}; st.global.u32 [%d1+{4 * i}], %r5;\n" for i, name in enumerate(names))
    body = f"""mov.u32 %r1, %ntid.x; mov.u32 %r2, %ntid.y; mov.u32 %r3, %tid.y; mad.lo.u32 %r4, %r3, %r1, %r0;
        mul.lo.u32 %r1, %r1, %r2; mov.u32 %r2, %ctaid.z; mov.u32 %r6, %nctaid.x; mov.u32 %r7, %ctaid.x;
        mad.lo.u32 %r2, %r2, %r6, %r7; mad.lo.u32 %r4, %r2, %r1, %r4; mad.wide.u32 %d1, %r4, {4 * len(names)}, %d0;
        {stores} mov.u64 %d2, %clock64;"""
    out = np.zeros((3, 2, 6, 8, len(names)), np.uint32)  # z, x of the grid; y, x of the block
    launch_pointers(kernel(body, ["out"]), (2, 1, 3), (8, 6), [out], shared_bytes=96).assert_clean()
    z, c, y, x = np.indices(out.shape[:4])
    place = y * 8 + x
    expected = x, y, c, z, 8, 6, 3, place % 32, place // 32, 2, 96
    for i, value in enumerate(expected):
        assert (out[..., i] == value).all(), names[i]


def test_partial_last_warp():
    """40 threads: the second warp has 8 lanes, and masks may name no others."""
    body = """setp.lt.u32 %p0, %r0, 32; selp.u32 %r2, 0xffffffff, 0xff, %p0; setp.ge.u32 %p1, %r0, 0;
        vote.sync.ballot.b32 %r1, %p1, %r2; mad.wide.u32 %d1, %r0, 4, %d0; st.global.u32 [%d1], %r1;"""
    out = np.zeros(40, np.uint32)
    stats = launch_pointers(kernel(body, ["out"]), 1, 40, [out]).assert_clean().stats
    assert (out == np.where(np.arange(40) < 32, 0xFFFFFFFF, 0xFF)).all() and stats.warps == 2


def test_limits_of_a_launch():
    text = kernel("st.global.u32 [%d0], 1;", ["a"])
    bounded = text.replace(")\n{", ")\n.maxntid 64, 1, 1\n{", 1)
    with pytest.raises(ValueError, match="compiled for .maxntid"):
        launch_pointers(bounded, 1, 96, [np.zeros(1)])
    with pytest.raises(ValueError, match="1056 threads, at most 1024"):
        launch_pointers(text, 1, 1056, [np.zeros(1)])
    for target, fits in (("sm_80", 163), ("sm_90a", 227)):
        text = kernel(".shared .align 4 .b8 sm[1024]; st.global.u32 [%d0], 1;", ["a"], target)
        launch_pointers(text, 1, 32, [np.zeros(1)], shared_bytes=(fits - 1) << 10).assert_clean()
        with pytest.raises(ValueError, match=f"1024 bytes of static .* {target} has 49152 .* and {fits << 10} of both"):
            launch_pointers(text, 1, 32, [np.zeros(1)], shared_bytes=fits << 10)
    too_much = text.replace("sm[1024]", "sm[50000]")
    with pytest.raises(ValueError, match="50000 bytes of static"):
        launch_pointers(too_much, 1, 32, [np.zeros(1)])


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'fastmath'"):
        launch(kernel("", ["a"]), 1, 32, [0], fastmath=True)
    assert Options().races and Options(races=False) != Options()
