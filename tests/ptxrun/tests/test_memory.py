"""The address space: views, flags, several launches, buffers that exist only in part, counters by buffer."""

import numpy as np
import pytest

from ptxrun import Buf, Memory, MemoryFault, SparseBuf, launch, virtual_array
from ptxrun.tests.ptxcase import HEADER, SCRATCH, assembles, elementwise, kernel

COPY = elementwise("mov.u32 %o0, %i0;", [4], [4])
rng = np.random.default_rng(19)


def test_addresses_last():
    """What one launch writes the next one reads; the host sees it, and what the host writes the kernel sees."""
    memory = Memory()
    a, b, c = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    pa, pb, pc = memory.add(a), memory.add(b, init=False), memory.add(c, init=False)
    launch(COPY, 2, 32, [pa, pb], memory=memory).assert_clean()
    a[:] = 0
    assert (b == np.arange(64)).all()
    b[5] = 99
    launch(COPY, 2, 32, [pb, pc], memory=memory).assert_clean()
    assert c[5] == 99 and c[6] == 6 and [memory.add(x) for x in (a, b, c)] == [pa, pb, pc]


def test_views_share_an_address_range():
    memory = Memory()
    pool = np.zeros((4, 2, 8), np.float32)
    keys, values = pool[:, 0], pool[:, 1]
    assert memory.add(values) - memory.add(keys) == 32
    assert memory.add(pool) == memory.add(keys) and memory.add(pool[3, 1]) - memory.add(pool) == 3 * 64 + 32
    assert memory.add(pool[::-1]) - memory.add(pool) == 3 * 64
    assert memory.add(np.zeros(4)) % 256 == 0


def test_unmapped_part_of_an_array():
    """Only the registered view exists, not the rest of the array it is a view of."""
    whole, out = np.arange(96, dtype=np.uint32), np.zeros(64, np.uint32)
    memory = Memory()
    args = [memory.add(whole[:32], name="front"), memory.add(out)]
    with pytest.raises(MemoryFault, match="0 bytes past the end of buffer front of 128 bytes"):
        launch(COPY, 2, 32, args, memory=memory)
    memory.add(whole[32:64])
    launch(COPY, 2, 32, args, memory=memory).assert_clean()
    assert (out == whole[:64]).all()


def test_gap_between_the_elements_of_a_view():
    """Padding that no array covers does not exist."""
    padded, out = np.zeros((8, 8), np.uint32), np.zeros(64, np.uint32)
    memory = Memory()
    args = [memory.add(padded[:, :7], name="rows"), memory.add(out)]
    launch(COPY, 1, 7, args, memory=memory).assert_clean()
    with pytest.raises(MemoryFault, match="byte 28 of buffer rows of 252 bytes"):
        launch(COPY, 1, 8, args, memory=memory)


def test_a_new_view_leaves_known_bytes_as_they_are():
    """A slice of an array without data has none either; its neighbour, seen for the first time, has."""
    pool, out = np.zeros((2, 2, 16), np.uint32), np.zeros(32, np.uint32)
    memory = Memory()
    memory.add(pool[:, 0], init=False)
    args = [memory.add(pool[1]), memory.add(out)]
    assert launch(COPY, 1, 32, args, memory=memory).of("uninit")[0].count == 16
    memory.add(pool[1], init=True)
    launch(COPY, 1, 32, args, memory=memory).assert_clean()


def test_init_and_readonly_by_element():
    memory = Memory()
    a, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    args = [memory.add(a, init=np.arange(32) % 4 != 0), memory.add(out)]
    assert launch(COPY, 1, 32, args, memory=memory).of("uninit")[0].count == 8
    memory.set_init(a, True)
    launch(COPY, 1, 32, args, memory=memory).assert_clean()
    memory.set_init(a, np.arange(32) < 30)
    assert launch(COPY, 1, 32, args, memory=memory).of("uninit")[0].count == 2
    memory.add(out, readonly=np.arange(32) == 9)
    with pytest.raises(MemoryFault, match=r"read-only .* 1 threads .*thread \(9, 0, 0\)"):
        launch(COPY, 1, 32, args, memory=memory)


def test_broadcast_init_mask():
    """A mask of blocks, as a paged cache has it: [num_blocks, 1]."""
    pool, out = np.zeros((4, 8), np.uint32), np.zeros(32, np.uint32)
    memory = Memory()
    args = [memory.add(pool, init=np.array([[1], [0], [1], [1]], bool)), memory.add(out)]
    hazard = launch(COPY, 1, 32, args, memory=memory).of("uninit")[0]
    assert hazard.count == 8 and hazard.thread[1] == (8, 0, 0)


def test_free():
    memory = Memory()
    a, b = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    pa, pb = memory.add(a), memory.add(b)
    memory.free(a)
    with pytest.raises(MemoryFault, match="out-of-bounds global load"):
        launch(COPY, 1, 32, [pa, pb], memory=memory)
    memory.free(b)
    assert memory.add(np.zeros(8)) == pb  # the last range is used again
    with pytest.raises(ValueError, match="not registered"):
        memory.free(np.zeros(3))


def test_overlap_without_a_common_owner():
    raw = bytearray(64)
    memory = Memory()
    memory.add(np.frombuffer(raw, np.uint8, 32))
    with pytest.raises(ValueError, match="register the whole first"):
        memory.add(np.frombuffer(raw, np.uint8))


def test_empty_array():
    memory = Memory()
    args = [memory.add(np.zeros(0, np.uint32)), memory.add(np.zeros(32, np.uint32))]
    with pytest.raises(MemoryFault, match="out-of-bounds"):
        launch(COPY, 1, 32, args, memory=memory)


# -- buffers that exist only in part ------------------------------------------------
def gather(wide):
    """out[t] = base[index[t]] (uint32 elements), the byte offset computed in 64 or, wrongly, in 32 bits."""
    widen = "mul.lo.u64 %d5, %d4, 4;" if wide else "cvt.u32.u64 %r2, %d4; mul.lo.u32 %r2, %r2, 4; cvt.u64.u32 %d5, %r2;"
    body = f"""mad.wide.u32 %d3, %r0, 8, %d1; ld.global.u64 %d4, [%d3]; {widen} add.u64 %d6, %d0, %d5;
        ld.global.u32 %r3, [%d6]; mad.wide.u32 %d7, %r0, 4, %d2; st.global.u32 [%d7], %r3;"""
    return kernel(body, ["base", "index", "out"])


def test_elements_past_two_to_the_32():
    """A 40 GiB buffer of which three pieces exist."""
    chunks = {
        0: np.arange(8, dtype=np.uint32),
        4 << 31: np.arange(8, 16, dtype=np.uint32),
        4 << 33: np.arange(16, 24, dtype=np.uint32),
    }
    index = np.array([3, (1 << 31) + 5, (1 << 33) + 7, (1 << 31) + 1] * 8, np.uint64)
    out = np.zeros(32, np.uint32)
    args = [SparseBuf(40 << 30, chunks, name="pool"), Buf(index, pointer=True), Buf(out, pointer=True)]
    result = launch(gather(wide=True), 1, 32, args).assert_clean()
    assert out[:4].tolist() == [3, 13, 23, 9]
    pool = result.stats.by_buffer["pool"]
    assert pool.loaded == 128 and pool.distinct_loaded == 16
    launch(gather(wide=False), 1, 32, args)
    assert out[:4].tolist() == [3, 5, 7, 1]  # a wrapped offset gives other elements


def test_a_wrapped_offset_faults_where_nothing_exists():
    args = [
        SparseBuf(16 << 30, {8 << 30: np.zeros(64, np.uint32)}, name="pool"),
        Buf(np.full(32, (1 << 31) + 9, np.uint64), pointer=True),
    ]
    out = Buf(np.zeros(32, np.uint32), pointer=True)
    launch(gather(wide=True), 1, 32, [*args, out]).assert_clean()
    with pytest.raises(MemoryFault, match="byte 36 of buffer pool of 17179869184 bytes"):
        launch(gather(wide=False), 1, 32, [*args, out])


def test_chunk_bounds():
    """One byte before a chunk and one after it do not exist."""
    chunk = np.arange(8, dtype=np.uint32)
    for element, ok in ((255, False), (256, True), (263, True), (264, False)):
        args = [
            SparseBuf(1 << 20, {1024: chunk}),
            Buf(np.array([element], np.uint64), pointer=True),
            Buf(np.zeros(1, np.uint32), pointer=True),
        ]
        if ok:
            launch(gather(wide=True), 1, 1, args).assert_clean()
        else:
            with pytest.raises(MemoryFault, match="out-of-bounds global load of 4 bytes"):
                launch(gather(wide=True), 1, 1, args)


@pytest.mark.parametrize(
    "chunks", [{8: np.zeros(4)}, {0: np.zeros(8), 32: np.zeros(4)}, {96: np.zeros(8)}, {0: np.zeros(8)[::2]}]
)
def test_bad_chunks(chunks):
    with pytest.raises(ValueError, match="chunk of"):
        Memory().add_sparse(128, chunks)


def test_stores_to_a_sparse_buffer():
    body = """mul.wide.u32 %d1, %r0, 0x40000000; mul.lo.u64 %d1, %d1, 8; add.u64 %d2, %d0, %d1;
        st.global.u32 [%d2], %r0; atom.global.add.u32 %r1, [%d2+4], 5;"""
    chunks = {i << 33: np.zeros(8, np.uint32) for i in range(4)}
    memory = Memory()
    address = memory.add_sparse(1 << 36, chunks)
    launch(kernel(body, ["a"]), 1, 4, [address], memory=memory).assert_clean()
    assert [c[:2].tolist() for c in chunks.values()] == [[i, 5] for i in range(4)]


def test_rows_of_a_virtual_array():
    """A pool larger than the machine's memory, with two blocks in it; views have addresses, too."""
    pool = virtual_array((1 << 20, 16, 8, 128), np.uint32)  # 64 GiB
    pool[7], pool[-1] = 7, 9
    memory, last = Memory(), (1 << 20) - 1
    address = memory.add(pool, rows=[7, last], name="pool")
    assert memory.add(pool) == address and memory.add(pool[last]) == address + last * 65536
    element = np.array([7 * 16384, 7 * 16384 + 16383, last * 16384, last * 16384 + 16383], np.uint64)
    out = np.zeros(4, np.uint32)
    launch(gather(wide=True), 1, 4, [address, memory.add(element), memory.add(out)], memory=memory).assert_clean()
    assert out.tolist() == [7, 7, 9, 9]
    element[1] += 1
    with pytest.raises(MemoryFault, match="of buffer pool of 68719476736 bytes"):
        launch(gather(wide=True), 1, 4, [address, memory.add(element), memory.add(out)], memory=memory)


def test_large_arrays_without_rows_are_refused():
    pool = virtual_array((1 << 20, 8192), np.uint8)
    with pytest.raises(ValueError, match="8589934592 bytes .* say which rows exist"):
        Memory().add(pool)
    memory, out = Memory(), np.zeros(32, np.uint32)
    args = [memory.add(pool[5, :128].view(np.uint32)), memory.add(out)]  # a small part of it is as good as any array
    stats = launch(COPY, 1, 32, args, memory=memory).assert_clean().stats
    assert stats.distinct_loaded == 128


def test_broadcast_array():
    """Elements that share their bytes are counted once."""
    a, out = np.broadcast_to(np.arange(4, dtype=np.uint32), (8, 4)), np.zeros(4, np.uint32)
    memory = Memory()
    stats = launch(COPY, 1, 4, [memory.add(a, name="a"), memory.add(out)], memory=memory).assert_clean().stats
    assert out.tolist() == [0, 1, 2, 3] and stats.by_buffer["a"].distinct_loaded == 16


def test_rows_with_an_init_mask():
    pool = virtual_array((1 << 20, 8), np.uint32)
    mask = np.zeros((1 << 20, 1), bool)
    mask[5] = True
    index, out = np.array([40, 47, 48], np.uint64), np.zeros(3, np.uint32)
    args = [Buf(pool, rows=[5, 6], init=mask, pointer=True), Buf(index, pointer=True), Buf(out, pointer=True)]
    assert launch(gather(wide=True), 1, 3, args).of("uninit")[0].count == 1


# -- counters -----------------------------------------------------------------------
def test_bytes_by_buffer():
    """Two views of one array are counted apart; what several threads load is asked for often and distinct once."""
    pool = np.arange(64, dtype=np.uint32).reshape(8, 2, 4)
    keys, values, out = pool[:, 0], pool[:, 1], np.zeros(32, np.uint32)
    body = """and.b32 %r1, %r0, 3; mad.wide.u32 %d3, %r1, 4, %d0; ld.global.u32 %r2, [%d3]; ld.global.u32 %r3, [%d3+32];
        and.b32 %r1, %r0, 1; mad.wide.u32 %d4, %r1, 4, %d1; ld.global.nc.u32 %r4, [%d4];
        mad.wide.u32 %d5, %r0, 4, %d2; add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; st.global.u32 [%d5], %r2;"""
    memory = Memory()
    args = [memory.add(a, name=n) for a, n in ((keys, "keys"), (values, "values"), (out, "out"))]
    stats = launch(kernel(body, ["k", "v", "o"]), 1, 32, args, memory=memory).assert_clean().stats
    counts = stats.by_buffer
    assert (counts["keys"].loaded, counts["keys"].distinct_loaded) == (2 * 128, 2 * 16)
    assert (counts["values"].loaded, counts["values"].distinct_loaded) == (128, 8)
    assert (counts["out"].stored, counts["out"].distinct_stored, counts["out"].loaded) == (128, 128, 0)
    assert stats.loads.bytes == 3 * 128 and stats.distinct_loaded == 40
    assert "keys: loaded 256 bytes (32 distinct)" in stats.report()
    again = launch(kernel(body, ["k", "v", "o"]), 1, 32, args, memory=memory).stats
    assert again.by_buffer == counts  # a launch starts from zero


def test_parameters_are_checked():
    text = (
        HEADER.format(target="sm_90a") + ".visible .entry k(.param .u32 a, .param .f32 b, .param .u64 o)\n{\n" + SCRATCH
    )
    text += """ld.param.u32 %r1, [a]; ld.param.f32 %f1, [b]; ld.param.u64 %d1, [o];
        st.global.u32 [%d1], %r1; st.global.f32 [%d1+4], %f1; ret; }\n"""
    assembles(text, "sm_90a")
    out = np.zeros(2, np.uint32)
    launch(text, 1, 1, [-1, 0.5, Buf(out, pointer=True)]).assert_clean()
    assert out[0] == 0xFFFFFFFF and out[1:].view(np.float32)[0] == 0.5
    for args, error, message in (
        ([1 << 32, 0.5, 0], OverflowError, "parameter 0 is .u32, 4294967296 does not fit"),
        ([0.5, 0.5, 0], TypeError, "parameter 0 is .u32, 0.5 is a float"),
        ([1, 0.5], TypeError, "takes 3 parameters, 2 given"),
    ):
        with pytest.raises(error, match=message):
            launch(text, 1, 1, args)


def test_several_entries():
    one = kernel("st.global.u32 [%d0], 1;", ["a"]).replace("entry k", "entry first")
    two = kernel("st.global.u32 [%d0], 2;", ["a"]).replace("entry k", "entry second")
    text = one + two[two.index(".visible") :]
    out = np.zeros(1, np.uint32)
    launch(text, 1, 1, [Buf(out, pointer=True)], entry="second")
    assert out[0] == 2
    for entry in (None, "third"):
        with pytest.raises(NotImplementedError, match=r"\['first', 'second'\]"):
            launch(text, 1, 1, [Buf(out, pointer=True)], entry=entry)
