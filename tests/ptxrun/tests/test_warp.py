"""Shuffles, votes, matches, reductions and warp barriers, with whole and partial member masks."""

import numpy as np
import pytest

from ptxrun import SyncError
from ptxrun.tests.ptxcase import kernel, launch_pointers, run

rng = np.random.default_rng(3)


def warps(x):
    return x.reshape(-1, 32)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("fixed", [True, False])
def test_shuffle(mode, width, fixed):
    """An offset that is a constant or a register, segments of a warp, and the predicate that says "in range"."""
    x = rng.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    offset = rng.integers(0, width, 64).astype(np.uint32)
    offset[:] = offset[0] if fixed or mode != "idx" else offset
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    by = offset[0] if fixed else "%i1"
    out, valid = run(
        f"shfl.sync.{mode}.b32 %o0|%p0, %i0, {by}, {clamp}, -1; selp.u32 %o1, 1, 0, %p0;", [x, offset], [np.uint32] * 2
    )
    for thread in range(64):
        lane, base, k = thread % 32, thread % 32 // width * width, int(offset[thread])
        source = {"up": lane - k, "down": lane + k, "bfly": lane ^ k, "idx": base + k}[mode]
        ok = base <= source < base + width
        assert valid[thread] == ok and out[thread] == warps(x)[thread // 32, source if ok else lane]


def test_shuffle_of_half_a_warp():
    """Lanes 0-15 shuffle among themselves while the others take another way."""
    x = np.arange(32, dtype=np.uint32)
    body = "mov.u32 %r1, %laneid; mov.u32 %o0, %i0; setp.lt.u32 %p0, %r1, 16; @!%p0 bra DONE;"
    (out,) = run(body + "shfl.sync.bfly.b32 %o0, %i0, 3, 31, 0xffff; DONE:", [x], [np.uint32])
    assert (out[:16] == x[:16] ^ 3).all() and (out[16:] == x[16:]).all()


def test_shuffle_from_a_lane_outside_the_mask_is_a_hazard():
    from ptxrun.tests.ptxcase import elementwise

    body = """mov.u32 %r1, %laneid; mov.u32 %o0, 0; setp.lt.u32 %p0, %r1, 16;
        @%p0 shfl.sync.idx.b32 %o0, %i0, 20, 31, 0xffff;"""
    result = launch_pointers(
        elementwise(body, [4], [4]), 1, 32, [np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)]
    )
    (hazard,) = result.of("sync")
    assert "reads lane 20" in str(hazard) and hazard.count == 16


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0000FF0F])
def test_vote_and_match(mask):
    """For the lanes in the mask; the others skip all of it."""
    x = rng.integers(0, 4, 64).astype(np.uint32)
    skip = f"mov.u32 %r1, %lanemask_eq; and.b32 %r1, %r1, {mask}; setp.eq.u32 %p3, %r1, 0; @%p3 bra DONE;"
    body = f"""mov.u32 %o0, 0; mov.u32 %o1, 0; mov.u32 %o2, 0; mov.u32 %o3, 0; mov.u32 %o4, 0; {skip}
        setp.eq.u32 %p0, %i0, 2; vote.sync.ballot.b32 %o0, %p0, {mask}; match.any.sync.b32 %o1, %i0, {mask};
        setp.lt.u32 %p1, %i0, 4; vote.sync.all.pred %p2, %p1, {mask}; @%p2 add.u32 %o2, %o2, 1;
        setp.gt.u32 %p1, %i0, 4; vote.sync.any.pred %p2, %p1, {mask}; @%p2 add.u32 %o2, %o2, 2;
        vote.sync.uni.pred %p2, %p1, {mask}; @%p2 add.u32 %o2, %o2, 4;
        match.all.sync.b32 %o3|%p2, %i0, {mask}; @%p2 add.u32 %o2, %o2, 8;
        mov.u32 %r2, 7; match.all.sync.b32 %o4, %r2, {mask};
        DONE:"""
    ballot, any_same, flags, all_different, all_same = run(body, [x], [np.uint32] * 5)
    members = [i for i in range(32) if mask >> i & 1]
    for thread in range(64):
        values = warps(x)[thread // 32]
        if thread % 32 not in members:
            assert ballot[thread] == any_same[thread] == flags[thread] == 0
            continue
        assert ballot[thread] == sum(1 << i for i in members if values[i] == 2)
        assert any_same[thread] == sum(1 << i for i in members if values[i] == x[thread])
        assert flags[thread] == 1 + 4 and all_different[thread] == 0 and all_same[thread] == mask


def test_match_64_bit():
    x = (rng.integers(0, 2, 32) << 40).astype(np.uint64) + np.uint64(5)
    (out,) = run("match.any.sync.b64 %o0, %i0, -1;", [x], [np.uint32])
    assert (out == [sum(1 << i for i in range(32) if x[i] == v) for v in x]).all()


@pytest.mark.parametrize("op,f", [("add", np.add), ("min", np.minimum), ("max", np.maximum)])
def test_redux_signed(op, f):
    x = rng.integers(-100, 100, 64).astype(np.int32)
    (out,) = run(f"redux.sync.{op}.s32 %o0, %i0, -1;", [x], [np.int32])
    assert (warps(out) == f.reduce(warps(x), axis=1)[:, None]).all()


@pytest.mark.parametrize("op,f", [("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)])
def test_redux_bits(op, f):
    x = rng.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    (out,) = run(f"redux.sync.{op}.b32 %o0, %i0, -1;", [x], [np.uint32])
    assert (warps(out) == f.reduce(warps(x), axis=1)[:, None]).all()


def test_masks_and_elect():
    body = """mov.u32 %o0, %lanemask_lt; activemask.b32 %o1; elect.sync %o2|%p0, 0xffffffff; selp.u32 %o3, 1, 0, %p0;
        mov.u32 %r1, %lanemask_ge; mov.u32 %r2, %lanemask_gt; sub.u32 %o4, %r1, %r2;"""
    less, active, leader, chosen, equal = run(body, [np.zeros(32, np.uint32)], [np.uint32] * 5)
    lanes = np.arange(32)
    assert (less == 2**lanes - 1).all() and (active == 0xFFFFFFFF).all() and (equal == 2**lanes).all()
    assert chosen.sum() == 1 and (leader == np.flatnonzero(chosen)[0]).all()


EXCHANGE = """.shared .align 4 .b8 sm[128]; mov.u32 %r1, sm; mad.lo.u32 %r2, %r0, 4, %r1; xor.b32 %r3, %r0, 1;
    mad.lo.u32 %r4, %r3, 4, %r1; mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 4, %d1; ld.global.u32 %r5, [%d2];
    st.shared.u32 [%r2], %r5; {barrier} ld.shared.u32 %r6, [%r4]; st.global.u32 [%d3], %r6;"""


@pytest.mark.parametrize(
    "barrier,clean",
    [
        ("bar.warp.sync 0xffffffff;", True),
        ("setp.lt.u32 %p0, %r0, 16; selp.u32 %r7, 0xffff, 0xffff0000, %p0; bar.warp.sync %r7;", True),  # halves apart
        (
            "and.b32 %r7, %r0, 1; setp.eq.u32 %p0, %r7, 0; selp.u32 %r7, 0x55555555, 0xaaaaaaaa, %p0; "
            "bar.warp.sync %r7;",
            False,
        ),
        ("", False),
    ],
    ids=["warp", "halves", "even and odd", "none"],
)
def test_warp_barrier_orders_its_members(barrier, clean):
    """Neighbours exchange a word; a barrier orders only the lanes that its mask names together."""
    x, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    result = launch_pointers(kernel(EXCHANGE.format(barrier=barrier), ["a", "o"]), 1, 32, [x, out])
    assert (out == x ^ 1).all() and bool(result.of("race")) != clean


def test_lanes_meet_at_different_warp_barriers():
    """bar.warp.sync of the same mask in two branches is one barrier."""
    barrier = "setp.lt.u32 %p0, %r0, 16; @%p0 bra A; bar.warp.sync -1; bra.uni B; A: bar.warp.sync -1; B:"
    x, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    launch_pointers(kernel(EXCHANGE.format(barrier=barrier), ["a", "o"]), 1, 32, [x, out]).assert_clean()
    assert (out == x ^ 1).all()


def test_a_lane_outside_of_its_own_mask():
    with pytest.raises(SyncError, match="lane 16 executes this but its mask 0x0000ffff does not name it"):
        run("bar.warp.sync 0xffff; mov.u32 %o0, 0;", [np.zeros(32, np.uint32)], [np.uint32])


def test_lanes_that_never_meet():
    body = (
        "mov.u32 %r1, %laneid; setp.lt.u32 %p0, %r1, 16; @%p0 bra A; shfl.sync.bfly.b32 %o0, %i0, 1, 31, -1; bra.uni B;"
    )
    body += "A: vote.sync.any.pred %p1, %p0, -1; B: mov.u32 %o0, 0;"
    with pytest.raises(SyncError, match=r"deadlock.*names lanes .*some of which wait at"):
        run(body, [np.zeros(32, np.uint32)], [np.uint32])
