"""cp.async: sizes, partial sources, ignored sources, groups, and what happens without the waits."""

import numpy as np
import pytest

from ptxrun import MemoryFault
from ptxrun.tests.ptxcase import kernel, launch_pointers

rng = np.random.default_rng(17)
ADDRESSES = """.shared .align 16 .b8 sm[512]; mov.u32 %r10, sm; mad.lo.u32 %r1, %r0, {size}, %r10;
        mad.wide.u32 %d2, %r0, {size}, %d0;
    mad.wide.u32 %d3, %r0, {size}, %d1; """


def copied(copy, wait="cp.async.wait_all; bar.sync 0;", size=16, setup=""):
    """Each thread copies `size` bytes through shared memory; it reads what its neighbour copied."""
    words = max(1, size // 4)
    registers = [f"%r{20 + i}" for i in range(words)]
    vector, values = ("", registers[0]) if words == 1 else (f".v{words}", "{" + ", ".join(registers) + "}")
    body = ADDRESSES.format(size=size) + setup + copy + wait
    body += f"xor.b32 %r2, %r0, 1; mad.lo.u32 %r3, %r2, {size}, %r10; mad.wide.u32 %d3, %r2, {size}, %d1;"
    return kernel(body + f"ld.shared{vector}.b32 {values}, [%r3]; st.global{vector}.b32 [%d3], {values};", ["a", "o"])


def through(text, a, **options):
    out = np.full_like(a, 77)
    result = launch_pointers(text, 1, 32, [a, out], **options)
    return out, result


@pytest.mark.parametrize("form,size", [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_sizes(form, size):
    a = rng.integers(0, 256, 32 * size).astype(np.uint8)
    out, result = through(copied(f"cp.async.{form}.shared.global.L2::128B [%r1], [%d2], {size};", size=size), a)
    result.assert_clean()
    assert (out == a).all() and result.stats.loads.bytes == a.nbytes and result.stats.by_class["cp.async"] == 2


def test_partial_source_is_zero_filled():
    """The first 6 bytes in thread 3, nothing in threads 24..31: what is not read need not exist."""
    setup = "setp.lt.u32 %p0, %r0, 24; selp.u32 %r4, 16, 0, %p0; setp.eq.u32 %p1, %r0, 3; @%p1 mov.u32 %r4, 6;"
    a = rng.integers(0, 65536, (24, 8)).astype(np.uint16)
    out = np.full((32, 8), 77, np.uint16)
    text = copied("cp.async.cg.shared.global [%r1], [%d2], 16, %r4;", setup=setup)
    stats = launch_pointers(text, 1, 32, [a, out]).assert_clean().stats
    expected = np.zeros((32, 8), np.uint16)
    expected[:24] = a
    expected[3, 3:] = 0
    assert (out == expected).all() and stats.loads.requests == 1 and stats.by_buffer["#0"].loaded == 23 * 16 + 6


def test_partial_source_past_the_end():
    setup = "mov.u32 %r4, 8;"
    a = np.zeros(32 * 16 - 9, np.uint8)
    with pytest.raises(MemoryFault, match=r"out-of-bounds global load .*thread \(31, 0, 0\)"):
        launch_pointers(
            copied("cp.async.cg.shared.global [%r1], [%d2], 16, %r4;", setup=setup), 1, 32, [a, np.zeros(512, np.uint8)]
        )


def test_ignored_source():
    """A predicate instead of a size: true means zeros, and the source is not read."""
    a = rng.integers(1, 65536, (32, 8)).astype(np.uint16)
    setup = "and.b32 %r4, %r0, 1; setp.ne.u32 %p0, %r4, 0;"
    out, result = through(copied("cp.async.cg.shared.global [%r1], [%d2], 16, %p0;", setup=setup), a)
    result.assert_clean()
    assert (out[::2] == a[::2]).all() and (out[1::2] == 0).all() and result.stats.by_buffer["#0"].loaded == 16 * 16


def test_with_a_cache_policy():
    setup = "createpolicy.fractional.L2::evict_first.b64 %d4, 1.0; mov.u32 %r4, 4;"
    a = rng.integers(1, 2**32, (32, 4), dtype=np.uint64).astype(np.uint32)
    out, result = through(copied("cp.async.cg.shared.global.L2::cache_hint [%r1], [%d2], 16, %d4;", setup=setup), a)
    assert (out == a).all()
    out, result = through(
        copied("cp.async.cg.shared.global.L2::cache_hint [%r1], [%d2], 16, %r4, %d4;", setup=setup), a
    )
    assert (out[:, 0] == a[:, 0]).all() and (out[:, 1:] == 0).all()


COPY = "cp.async.cg.shared.global [%r1], [%d2], 16;"


def test_groups_are_waited_for_in_order():
    """After wait_group 1, the older of two groups is there and the newer is not."""
    first = "cp.async.ca.shared.global [%r1], [%d2], 8; cp.async.commit_group; "
    second = (
        "cp.async.ca.shared.global [%r1+8], [%d2+8], 8; cp.async.commit_group; cp.async.wait_group {n}; bar.sync 0;"
    )
    a = rng.integers(1, 2**32, (32, 4), dtype=np.uint64).astype(np.uint32)
    out, result = through(copied(first + second.format(n=0), ""), a)
    assert (out == a).all() and not result.hazards
    out, result = through(copied(first + second.format(n=1), ""), a)
    assert (out[:, :2] == a[:, :2]).all() and result.of("cp.async")
    assert "load of bytes that a cp.async has yet to write" in str(result.of("cp.async")[0])


@pytest.mark.parametrize(
    "wait,kind,what",
    [
        ("bar.sync 0;", "cp.async", "load of bytes that a cp.async has yet to write"),
        (
            "cp.async.wait_group 0; bar.sync 0;",
            "cp.async",
            "load of bytes that a cp.async has yet to write",
        ),  # never committed
        ("cp.async.wait_all;", "race", "read after write"),  # visible to its own thread only
        ("cp.async.wait_all; bar.sync 0; st.shared.u32 [%r1], %r0;", "race", "read after write"),
        (
            COPY + "cp.async.wait_all; bar.sync 0;",
            "cp.async",
            "cp.async store of bytes that a cp.async has yet to write",
        ),
        (
            "st.shared.u32 [%r1], %r0; cp.async.wait_all; bar.sync 0;",
            "cp.async",
            "shared store of bytes that a cp.async has yet to write",
        ),
    ],
)
def test_missing_waits(wait, kind, what):
    a = rng.integers(1, 2**32, (32, 4), dtype=np.uint64).astype(np.uint32)
    result = through(copied(COPY, wait), a)[1]
    assert any(what in h.what for h in result.of(kind)), result.hazards


def test_a_copy_nobody_waits_for():
    body = ADDRESSES.format(size=16) + COPY + "cp.async.commit_group;"
    result = launch_pointers(kernel(body, ["a", "o"]), 1, 32, [np.zeros((32, 4), np.uint32), np.zeros(1)])
    assert "nobody waited for" in str(result.of("cp.async")[0])


def test_refill_before_the_others_have_read():
    """The next tile is started while a neighbour may still read the last one."""
    a = rng.integers(1, 2**32, (32, 4), dtype=np.uint64).astype(np.uint32)
    again = "ld.shared.u32 %r5, [%r3]; {barrier}" + COPY + "cp.async.wait_all; bar.sync 0;"
    wait = "cp.async.wait_all; bar.sync 0; xor.b32 %r2, %r0, 1; mad.lo.u32 %r3, %r2, 16, %r10;" + again
    assert through(copied(COPY, wait.format(barrier="")), a)[1].of("race")
    through(copied(COPY, wait.format(barrier="bar.sync 0;")), a)[1].assert_clean()
