"""Compiled Numba kernels in both PTX dialects (NVVM 7 up to sm_90, newer for sm_100): results, hazards, counters."""

import numpy as np
import pytest

from ptxrun import Buf, MemoryFault, SyncError, launch, missing

if missing():
    pytest.skip(missing(), allow_module_level=True)

from numba import cuda

from ptxrun.tests import kernels

rng = np.random.default_rng(3)
pytestmark = pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)], ids=["sm_80", "sm_90", "sm_100"])


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def test_add(cc):
    a, b, c = normal(1000), normal(1000), np.zeros(1000, np.float32)
    stats = launch(kernels.add, 8, 128, [a, b, Buf(c, init=False)], cc=cc).assert_clean().stats
    assert (c == a + b).all()
    assert stats.warps == 32 and stats.loads.requests == 64 and stats.loads.sectors == stats.loads.ideal == 250
    assert stats.loads.bytes == stats.distinct_loaded == 8000 and stats.stores.sectors == 125
    assert stats.by_buffer["#1"].distinct_loaded == 4000 and stats.divergent_branches == 1


def test_strided_and_overlapping_arguments(cc):
    base = normal(40, 50)
    a, b = base[::2, 1::3][3], base[1]
    c = np.zeros(len(a), np.float32)
    launch(kernels.add, 1, 32, [a, b, c], cc=cc)
    assert (c == a + b[: len(a)]).all()


def test_tree_sum(cc):
    a, out = normal(1000), np.zeros(1, np.float32)
    stats = launch(kernels.tree_sum, 4, 256, [a, out], cc=cc).assert_clean().stats
    assert abs(out[0] - a.sum()) < 1e-3 and stats.barriers == 4 * 9 and stats.bank_conflicts == 0


def test_missing_barrier(cc):
    result = launch(kernels.tree_sum_without_barrier, 4, 256, [normal(1000), np.zeros(1, np.float32)], cc=cc)
    assert "shared" in str(result.of("race")[0]) and "against block" in str(result.of("race")[0])
    launch(
        kernels.tree_sum_without_barrier, 4, 256, [normal(1000), np.zeros(1, np.float32)], cc=cc, races=False
    ).assert_clean()


def test_shuffle_sum(cc):
    a, out = normal(1024), np.zeros(32, np.float32)
    stats = launch(kernels.shuffle_sum, 8, 128, [a, out], cc=cc).assert_clean().stats
    assert np.allclose(out, a.reshape(-1, 32).sum(1), atol=1e-5) and stats.by_class["shuffle"] == 5 * 32


def test_out_of_bounds(cc):
    with pytest.raises(
        MemoryFault,
        match=r"global load of 4 bytes \(0 bytes past .* 400 bytes.*28 threads.*thread \(100, 0, 0\).*kernels.py",
    ):
        launch(kernels.increment, 1, 128, [normal(100), normal(128)], cc=cc, compile_options={"lineinfo": True})
    with pytest.raises(MemoryFault, match="out-of-bounds global store"):
        launch(kernels.increment, 1, 128, [normal(128), normal(100)], cc=cc)


def test_uninitialised_shared(cc):
    a = normal(64)
    (hazard,) = launch(kernels.uninitialised_shared, 1, 64, [a], cc=cc).of("uninit")
    assert hazard.thread[1] == (5, 0, 0) and np.isnan(a[5])
    launch(kernels.uninitialised_shared, 1, 64, [normal(64)], cc=cc, uninit=False).assert_clean()


def test_missing_participant(cc):
    with pytest.raises(SyncError, match="mask 0xffffffff names lanes 0xffff0000 that have exited"):
        launch(kernels.half_warp_shuffle, 1, 32, [normal(32), normal(32)], cc=cc)
    launch(kernels.half_warp_shuffle, 1, 32, [normal(32), normal(32)], cc=cc, exited_lanes="allow").assert_clean()


def test_lanes_wait_for_different_things(cc):
    with pytest.raises(SyncError, match=r"names lanes \[(0|16), "):
        launch(kernels.skewed_shuffle, 1, 32, [normal(32), normal(32), 3], cc=cc)


def test_warp_barrier_orders_one_warp(cc):
    a, out = normal(128), np.zeros(128, np.float32)
    launch(kernels.warp_exchange, 1, 128, [a, out, True], cc=cc).assert_clean()
    assert (out == a.reshape(-1, 2)[:, ::-1].ravel()).all()
    assert launch(kernels.warp_exchange, 1, 128, [a, out, False], cc=cc).of("race")
    assert launch(kernels.block_exchange, 1, 128, [a, out], cc=cc).of("race")


def test_divergent_barrier(cc):
    with pytest.raises(SyncError, match="divergent warp at an aligned barrier"):
        launch(kernels.barrier_in_branch, 1, 64, [normal(64)], cc=cc)


def test_exit_before_a_barrier(cc):
    (hazard,) = launch(kernels.early_exit, 1, 64, [normal(64)], cc=cc).of("sync")
    assert "16 threads of the block have exited" in hazard.what


def test_bank_conflicts(cc):
    a, out = normal(32, 32), np.zeros(32, np.float32)
    stats = launch(kernels.column_sum, 1, 32, [a, out], cc=cc).assert_clean().stats
    assert np.allclose(out, a.sum(1), atol=1e-4)
    loads = [c for pc, c in stats.shared_access.items() if stats.instrs[pc].name == "ld"]
    assert sum(c.wavefronts for c in loads) == 32 * 32 or stats.bank_conflicts >= 31 * 8  # one word at a time, or four


@pytest.mark.parametrize("stride,sectors", [(1, 4), (2, 8), (8, 32), (16, 32)])
def test_sectors_a_request(cc, stride, sectors):
    a, b = normal(32 * stride), np.zeros(32, np.float32)
    stats = launch(kernels.strided_copy, 1, 32, [a, b, stride], cc=cc).assert_clean().stats
    assert (b == a[::stride]).all() and stats.loads.sectors == sectors and stats.loads.ideal == 4


def test_softmax(cc):
    x = normal(5, 300)
    x[2, 7:] = -np.inf
    y = np.zeros_like(x)
    launch(kernels.softmax_rows, 5, 128, [x, Buf(y, init=False)], cc=cc).assert_clean()
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.abs(y - e / e.sum(1, keepdims=True)).max() < 1e-6


def decode_case(num_kv_heads, group, lengths, num_blocks=64):
    """q, keys, values, tables, lengths; unused table entries are -1, unused slots NaN."""
    num_seqs, per_seq = len(lengths), -(-max(lengths) // kernels.BLOCK)
    pool = (num_blocks, kernels.BLOCK, num_kv_heads, kernels.DIM)
    q, keys, values = (
        normal(num_seqs, num_kv_heads * group, kernels.DIM),
        np.full(pool, np.nan, np.float32),
        np.full(pool, np.nan, np.float32),
    )
    tables, free = np.full((num_seqs, per_seq), -1, np.int32), iter(rng.permutation(num_blocks))
    written = np.zeros(pool[:2] + (1, 1), bool)
    for seq, length in enumerate(lengths):
        for position in range(length):
            if position % kernels.BLOCK == 0:
                tables[seq, position // kernels.BLOCK] = next(free)
            slot = tables[seq, position // kernels.BLOCK], position % kernels.BLOCK
            keys[slot], values[slot], written[slot] = normal(*pool[2:]), normal(*pool[2:]), True
    return q, keys, values, tables, np.array(lengths, np.int32), written


def decode_reference(q, keys, values, tables, lengths, scale):
    out = np.zeros(q.shape)
    for seq, length in enumerate(lengths):
        k, v = (x[tables[seq]].reshape(-1, *x.shape[2:])[:length].astype(np.float64) for x in (keys, values))
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            s = k[:, kv_head] @ q[seq, head] * scale
            p = np.exp(s - s.max())
            out[seq, head] = p / p.sum() @ v[:, kv_head]
    return out


@pytest.mark.parametrize("lengths", [[100] * 4, [64, 65, 127, 99]])
def test_paged_decode(cc, lengths):
    """Reads K and V of the sequences once a query head, and nothing that was not written."""
    q, keys, values, tables, n, written = decode_case(8, 2, lengths)
    out = np.zeros_like(q)
    cache = [Buf(x, init=written, readonly=True, name=name) for x, name in ((keys, "keys"), (values, "values"))]
    args = [q, *cache, tables, n, Buf(out, init=False), np.float32(0.125)]
    stats = launch(kernels.paged_decode, (8, 4), 128, args, cc=cc).assert_clean().stats
    assert np.abs(out - decode_reference(q, keys, values, tables, n, 0.125)).max() < 1e-5
    tokens = sum(lengths) * 8 * kernels.DIM * 4
    for name in ("keys", "values"):
        assert stats.by_buffer[name].distinct_loaded == tokens and stats.by_buffer[name].loaded == 2 * tokens
    assert stats.lanes_per_instruction > 31


def test_paged_decode_follows_a_bad_table(cc):
    q, keys, values, tables, n, _ = decode_case(2, 1, [70])
    tables[0, 4] = 64  # one past the last block
    with pytest.raises(MemoryFault, match="out-of-bounds global load"):
        launch(kernels.paged_decode, (2, 1), 128, [q, keys, values, tables, n, np.zeros_like(q), np.float32(1)], cc=cc)


def test_paged_decode_reads_one_token_too_many(cc):
    q, keys, values, tables, n, written = decode_case(2, 1, [70])
    n[0] = 71
    args = [q, Buf(keys, init=written), Buf(values, init=written), tables, n, np.zeros_like(q), np.float32(1)]
    assert launch(kernels.paged_decode, (2, 1), 128, args, cc=cc).of("uninit")


def test_spinning_on_another_block(cc):
    data, flag, out = (np.zeros(1, np.int32) for _ in range(3))
    launch(kernels.publish, 2, 1, [data, flag, out], cc=cc, patience=50)
    assert out[0] == 42


def test_chunks_of_blocks_agree(cc):
    a, outs = normal(1024), [np.zeros(32, np.float32) for _ in range(2)]
    results = [launch(kernels.shuffle_sum, 8, 128, [a, o], cc=cc, chunk_threads=n) for o, n in zip(outs, (8192, 384))]
    assert (outs[0] == outs[1]).all() and results[0].stats.warp_instructions == results[1].stats.warp_instructions


def test_two_dimensional_blocks(cc):
    def kernel(out):
        x, y = cuda.grid(2)
        out[y, x] = cuda.threadIdx.x + 10 * cuda.threadIdx.y + 100 * cuda.blockIdx.x + 1000 * cuda.blockIdx.y

    out = np.zeros((6, 8), np.int32)
    launch(kernel, (2, 3), (4, 2), [out], cc=cc).assert_clean()
    y, x = np.mgrid[:6, :8]
    assert (out == x % 4 + 10 * (y % 2) + 100 * (x // 4) + 1000 * (y // 2)).all()
