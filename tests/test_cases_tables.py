"""Inputs that broke other kernels, sections D and E: tables, lengths, indices, writes. See `test_cases.py`."""

import numpy as np
import pytest

import numba_paged as npg
import reference
import tolerances
from inputs import DTYPES, Shape, decode_problem, make_pool, normal, place, prefill_problem, sequences


def contents(backend, *arrays):
    """The bytes of arrays as they are now."""
    return [backend.asnumpy(x).tobytes() for x in arrays]


@pytest.mark.parametrize("length", [16, 32, 48])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_case_21_page_allocated_ahead_is_not_attended(backend, kind, length):
    """At length % block_size == 0 the table may have one more, stale page (pegainfer-project/pegainfer#291)."""
    make = decode_problem if kind == "decode" else lambda *a, **k: prefill_problem(*a, 5, **k)
    problem = make(Shape(), [length], poison="largest")
    tables = problem.block_tables.copy()
    tables[0, length // 16 :] = np.setdiff1d(np.arange(len(problem.keys)), tables[0])[0]
    assert problem.check(backend).out.tobytes() == problem.replace(block_tables=tables).attend(backend).out.tobytes()


def test_case_23_unused_table_entries_are_not_read(backend):
    """-1 and 2**31 - 1 past the live range (gittensor-ai-lab/sparkinfer#152)."""
    problem = decode_problem(Shape(block_size=4), [3, 12])
    tables = np.full((2, 3), -1, np.int32)
    tables[0, 0], tables[0, 2], tables[1] = problem.block_tables[0, 0], 2**31 - 1, problem.block_tables[1, :3]
    problem.replace(block_tables=tables).check(backend)


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, -(2**31), "num_blocks"])
@pytest.mark.parametrize("row, column", [(0, 0), (1, 0), (1, 2)])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_case_23_bad_id_in_the_live_range_raises(backend, kind, bad, row, column):
    """The error names the row, the entry, the id and the bound; nothing is written."""
    problem = decode_problem(Shape(block_size=4), [3, 12])
    if kind == "prefill":
        problem = problem.replace(query_starts=np.int32([0, 1, 2]))
    num_blocks = len(problem.keys)
    bad = num_blocks if bad == "num_blocks" else bad
    problem.block_tables[row, column] = bad
    out = backend.asarray(np.full_like(problem.q, 7.0))
    function = npg.decode if kind == "decode" else npg.prefill
    with pytest.raises(ValueError, match=rf"block_tables\[{row}, ?{column}\].*{bad}.*{num_blocks}"):
        function(*map(backend.asarray, problem.arguments()), out=out)
    assert (backend.asnumpy(out) == 7.0).all()


@pytest.mark.parametrize("lengths, row", [([33], 0), ([5, 32, 33], 2), ([1000, 33], 0), ([3, 2**31 - 1], 1)], ids=str)
def test_case_24_longer_than_the_table(backend, lengths, row):
    """2 columns of 16 hold 32 tokens (Dao-AILab/flash-attention#2709)."""
    problem = decode_problem(Shape(), [32] * len(lengths))
    problem = problem.replace(block_tables=problem.block_tables[:, :2].copy(), lengths=np.int32(lengths))
    with pytest.raises(ValueError, match=rf"lengths\[{row}\].*{lengths[row]}.*32"):
        problem.attend(backend)


def test_case_25_slot_past_the_pool_raises(backend):
    """One block of 16, position 16 (gittensor-ai-lab/sparkinfer#41); the cache's answer is in `test_cases_cache.py`."""
    keys, values = (backend.asarray(p) for p in make_pool(Shape(), 1, "NHD", "zero"))
    before = contents(backend, keys, values)
    new = backend.asarray(np.ones((1, 2, 64), np.float32))
    with pytest.raises(ValueError, match=r"slots\[0\].*16"):
        npg.append(new, new, keys, values, backend.asarray(np.array([16])))
    assert contents(backend, keys, values) == before


HUGE = (131_072 + 2, 16, 8, 128)
"""A pool whose last blocks start past 2**31 elements."""


@pytest.mark.parametrize("kv_dtype", ["int8", "float16"])
def test_case_27_offsets_past_int32(backend, kv_dtype):
    """Block 131072 of [16, 8, 128] starts at element 2**31 (vllm-project/vllm#50427)."""
    shape = Shape(8, 8, 128, 16, "float16", kv_dtype)
    pool = backend.pool(HUGE, DTYPES[kv_dtype], [0, 1, 131_072, 131_073])  # keys and values at once
    scales = shape.default_scales
    rng = np.random.default_rng(0)
    k, q = normal((20, 8, 128), "float16", rng), normal((1, 8, 128), "float16", rng)
    table, lengths = np.int32([[131_072, 131_073]]), np.int32([20])
    slots = table[0, np.arange(20) // 16].astype(np.int64) * 16 + np.arange(20) % 16
    assert slots[0] * 8 * 128 == 2**31
    npg.append(backend.asarray(k), backend.asarray(k), pool, pool, backend.asarray(slots), **scales)
    stored = reference.quantise(k, scales.get("k_scale", 1.0), DTYPES[kv_dtype])
    high = backend.asnumpy(pool[131_072:])
    np.testing.assert_array_equal(high.reshape(-1, 8, 128)[:20].astype(np.float32), stored.astype(np.float32))
    got = npg.decode(backend.asarray(q), pool, pool, *map(backend.asarray, (table, lengths)), **scales)
    npg.copy_blocks(pool, pool, *(backend.asarray(np.int32(x)) for x in ([131_072, 131_073], [1, 0])))
    low = npg.decode(backend.asarray(q), pool, pool, *map(backend.asarray, (np.int32([[1, 0]]), lengths)), **scales)
    assert contents(backend, got) == contents(backend, low)
    numbers = stored.astype(np.float64) * scales.get("k_scale", 1.0)
    want = reference.explain(q, numbers, numbers)
    rounding = backend.weight_rounding("float16", kv_dtype)
    tolerance = tolerances.out_tolerance(want, np.float16, 128, weight_rounding=rounding)
    tolerances.assert_within(backend.asnumpy(got), want.out, tolerance, "out")


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_case_29_slots_made_for_other_blocks(backend, block_size):
    """Slot 75849 is row 4740 of blocks of 16; a pool with fewer slots refuses it (vllm-project/vllm#47056)."""
    keys, values = (backend.asarray(p) for p in make_pool(Shape(block_size=block_size), 4741, "NHD", "zero"))
    before = contents(backend, keys, values)
    new = backend.asarray(np.ones((2, 2, 64), np.float32))
    with pytest.raises(ValueError, match=rf"slots\[1\].*75849.*{4741 * block_size}"):
        npg.append(new, new, keys, values, backend.asarray(np.array([3, 75849])))
    assert contents(backend, keys, values) == before


@pytest.mark.parametrize("length", [1, 15, 16, 17, 96, 97, 100, 112])
def test_case_31_tokens_in_the_last_page(backend, length):
    """((length - 1) % block_size) + 1 of them (flashinfer-ai/flashinfer#320): 4 at length 100, a full page at 112."""
    assert 16 - npg.waste(length, 16) == (length - 1) % 16 + 1
    problem = decode_problem(Shape(), [length])
    one_hot = np.zeros((1, 4, 64), np.float32)
    values = np.full_like(problem.values, np.nan)
    last = problem.block_tables[0, (length - 1) // 16]
    for block in problem.block_tables[0, : -(-length // 16)]:
        values[block] = 0.0
    values[last, : (length - 1) % 16 + 1], values[last, (length - 1) % 16 + 1 :] = 1.0, np.nan
    got = problem.replace(q=one_hot, values=values).attend(backend)
    np.testing.assert_allclose(got.out, ((length - 1) % 16 + 1) / length, rtol=1e-6)


def test_case_31_negative_length_raises(backend):
    """The last page cannot hold 0 or fewer tokens."""
    with pytest.raises(ValueError, match=r"lengths\[1\].*-1"):
        decode_problem(Shape(), [5, 5]).replace(lengths=np.int32([5, -1])).attend(backend)


@pytest.mark.parametrize("length, num_queries", [(9, 8), (9, 9), (9, 1), (1, 1), (15, 15), (3, 2)])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
def test_case_32_sequences_shorter_than_a_page(backend, length, num_queries, q_dtype):
    """14 query heads, 2 kv heads, 9 tokens (flashinfer-ai/flashinfer#3106)."""
    shape = Shape(14, 2, 64, 16, q_dtype, q_dtype)
    prefill_problem(shape, [length], num_queries).check(backend)
    decode_problem(shape, [length]).check(backend)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_case_33_padding_slots_write_nothing(backend, dtype):
    """slots 0, -1, 5, -1 (flashinfer-ai/flashinfer#3647)."""
    keys, values = (backend.asarray(p) for p in make_pool(Shape(block_size=4), 3, "NHD", "zero"))
    new = backend.asarray(np.ones((4, 2, 64), np.float32))
    npg.append(new, new, keys, values, backend.asarray(np.array([0, -1, 5, -1], dtype)))
    for pool in (keys, values):
        written = backend.asnumpy(pool).reshape(12, -1).any(axis=1)
        assert np.flatnonzero(written).tolist() == [0, 5]


VIEWS = {
    "half of a joint pool": ((5, 2, 4, 2, 16), lambda b: b[:, 0]),
    "head-major half": ((5, 2, 2, 4, 16), lambda b: b[:, 1].swapaxes(1, 2)),
    "padded rows": ((5, 4, 2, 24), lambda b: b[..., 4:20]),
    "every other block": ((10, 4, 2, 16), lambda b: b[::2]),
    "every other head": ((5, 4, 4, 16), lambda b: b[:, :, 1::2]),
    "blocks backwards": ((5, 4, 2, 16), lambda b: b[::-1]),
}


def test_case_35_cuda_kernels_refuse_what_runs_backwards(backend):
    """Their strides are unsigned, which saves instructions at every access."""
    if backend.name == "cpu":
        pytest.skip("the CPU kernels follow any stride: the next test")
    pool = backend.asarray(np.zeros((5, 4, 2, 16), np.float32))
    new = backend.asarray(np.ones((1, 2, 16), np.float32))
    with pytest.raises(ValueError, match=r"^keys: the CUDA kernels take strides from 0 to .*got \(-512, "):
        npg.append(new, new, pool[::-1], pool[::-1], np.array([3]))
    assert not backend.asnumpy(pool).any()


@pytest.mark.parametrize("storage, view", VIEWS.values(), ids=VIEWS)
def test_case_35_writes_follow_the_strides(backend, storage, view):
    """keys = buffer[:, 0] of [num_blocks, 2, ...]: the sibling stays (flashinfer-ai/flashinfer#527)."""
    if backend.name == "cuda" and view is VIEWS["blocks backwards"][1]:
        pytest.skip("refused: the test before")
    rng = np.random.default_rng(0)
    want, buffer = (np.full(storage, np.nan, np.float32) for _ in "ab")
    buffer = backend.asarray(buffer)
    k, slots = normal((20, 2, 16), "float32", rng), rng.permutation(20)
    view(want)[...] = reference.append(k, view(want), slots)
    k_there, other = backend.asarray(k), view(backend.asarray(want.copy()))
    npg.append(k_there, k_there, view(buffer), other, backend.asarray(slots))
    np.testing.assert_array_equal(backend.asnumpy(buffer), want)
    q = normal((1, 2, 16), "float32", rng)
    table, lengths = np.int32([[3, 0, 4]]), np.int32([10])
    out = npg.decode(backend.asarray(q), view(buffer), view(buffer), *map(backend.asarray, (table, lengths)))
    expected = reference.paged(q, view(want), view(want), table, lengths)
    tolerances.assert_within(
        backend.asnumpy(out), expected.out, tolerances.out_tolerance(expected, np.float32, 16), "out"
    )


def test_case_36_copies_in_a_chain(backend):
    """(0 to 1), (1 to 2): block 2 becomes what block 1 was (vllm-project/vllm-gaudi#329)."""
    start = np.arange(3, dtype=np.float32).reshape(3, 1, 1, 1)
    keys, values = backend.asarray(start), backend.asarray(start + 10)
    npg.copy_blocks(keys, values, *(backend.asarray(np.int32(x)) for x in ([0, 1], [1, 2])))
    assert backend.asnumpy(keys).ravel().tolist() == [0, 0, 1]
    assert backend.asnumpy(values).ravel().tolist() == [10, 10, 11]


def test_case_36_target_named_twice_raises(backend):
    """The result would depend on the order."""
    keys, values = (backend.asarray(p) for p in make_pool(Shape(), 5, "NHD", "largest"))
    before = contents(backend, keys, values)
    with pytest.raises(ValueError, match="targets.*3"):
        npg.copy_blocks(keys, values, *(backend.asarray(np.int32(x)) for x in ([0, 1, 2], [3, 4, 3])))
    assert contents(backend, keys, values) == before


@pytest.mark.parametrize("shape", [(2, 16, 192), (2, 16, 257), (2, 15, 256), (2, 4096)], ids=str)
def test_case_37_new_tokens_of_another_shape(backend, shape):
    """hidden 3072 / 16 heads is not the model's head_dim of 256 (vllm-project/vllm#2622)."""
    keys, values = (backend.asarray(p) for p in make_pool(Shape(16, 16, 256), 2, "NHD", "zero"))
    new = backend.asarray(np.ones(shape, np.float32))
    right = backend.asarray(np.ones((2, 16, 256), np.float32))
    for k, v, name in ((new, new, "k"), (right, new, "v")):
        with pytest.raises(ValueError, match=rf"^{name}\b.*"):
            npg.append(k, v, keys, values, backend.asarray(np.array([0, 1])))
    assert not backend.asnumpy(keys).any() and not backend.asnumpy(values).any()


def test_case_26_rows_reused_by_shorter_sequences(backend):
    """A row of 300 blocks, then 4: the stale tail is not read (gittensor-ai-lab/sparkinfer#146)."""
    shape = Shape(block_size=4)
    long, short = (place(shape, sequences(shape, [length])) for length in (1200, 14))
    stale = long.block_tables[:, :300].copy()
    stale[0, :4] = short.block_tables[0, :4]
    assert short.check(backend).out.tobytes() == short.replace(block_tables=stale).attend(backend).out.tobytes()
