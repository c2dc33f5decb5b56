"""decode and prefill against the oracle: formats, geometries, lengths, splits; what must be equal bit for bit."""

import numpy as np
import pytest

import numba_paged as npg
import tolerances
from covering import pairwise
from inputs import DTYPES, KV_DTYPES, LAYOUTS, Q_DTYPES, Shape, decode_problem, place, prefill_problem, sequences

HEADS = [(2, 2), (4, 2), (6, 2), (8, 2), (5, 1), (12, 2), (28, 4), (8, 1), (48, 8), (96, 8), (16, 1)]
HEAD_DIMS = [1, 2, 8, 20, 64, 80, 96, 100, 112, 120, 128, 192, 256]
BLOCK_SIZES = [1, 3, 8, 16, 17, 32, 64, 256, 544]


def same_bits(a, b):
    """Equal to the last bit, the sign of zero included."""
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def matrix():
    """Rows in which every two of (formats, group, layout) meet, each with one of the head dims and block sizes."""
    params = []
    rows = pairwise(q_dtype=Q_DTYPES, kv_dtype=KV_DTYPES, heads=HEADS, layout=LAYOUTS)
    for i, row in enumerate(rows):
        num_q_heads, num_kv_heads = row.pop("heads")
        layout = row.pop("layout")
        head_dim, block_size = HEAD_DIMS[i % len(HEAD_DIMS)], BLOCK_SIZES[i % len(BLOCK_SIZES)]
        shape = Shape(num_q_heads, num_kv_heads, head_dim, block_size, **row)
        label = f"{shape.q_dtype}-{shape.kv_dtype}-{num_q_heads}/{num_kv_heads}-d{head_dim}-b{block_size}-{layout}"
        params.append(pytest.param(shape, layout, id=label))
    return params


def edge_lengths(block_size):
    """Empty, one, around the first block's edge, and a few blocks with a tail."""
    return sorted({0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size + 5})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape, layout", matrix())
def test_decode(backend, shape, layout):
    decode_problem(shape, edge_lengths(shape.block_size), layout=layout).check(backend)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape, layout", matrix())
def test_prefill(backend, shape, layout):
    lengths = edge_lengths(shape.block_size)
    num_queries = [min(length, 1 + 4 * row) for row, length in enumerate(lengths)]
    prefill_problem(shape, lengths, num_queries, layout=layout).check(backend)


def test_every_value_is_in_the_matrix():
    shapes = [row.values[0] for row in matrix()]
    assert {s.head_dim for s in shapes} == set(HEAD_DIMS) and {s.block_size for s in shapes} == set(BLOCK_SIZES)
    assert {(s.q_dtype, s.kv_dtype) for s in shapes} == {(q, kv) for q in Q_DTYPES for kv in KV_DTYPES}


@pytest.mark.long
@pytest.mark.parametrize("head_dim", range(1, 257))
def test_every_head_dim(backend, head_dim):
    shape = Shape(head_dim=head_dim, block_size=8, q_dtype="float16", kv_dtype="float16")
    decode_problem(shape, [1, 21]).check(backend)
    prefill_problem(shape, [21], 9).check(backend)


@pytest.mark.parametrize("num_splits", range(1, 8))
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_decode_in_splits(backend, num_splits, kv_dtype):
    shape = Shape(head_dim=32, kv_dtype=kv_dtype)
    length = 700
    problem = decode_problem(shape, [length, 3, 0, length // 2])
    problem.check(backend, split_size=-(-length // num_splits))


@pytest.mark.parametrize("split_size", [1, 16, 100, 10**6])
def test_prefill_in_splits(backend, split_size):
    problem = prefill_problem(Shape(head_dim=32), [200, 5, 0, 33], [40, 5, 0, 1])
    problem.check(backend, split_size=split_size)


@pytest.mark.parametrize("lengths", [[4097], [1, 300, 4097], [0], [0, 0], [2000] * 5], ids=str)
def test_decode_chooses_its_own_splits(backend, lengths):
    shape = Shape(num_q_heads=8, num_kv_heads=1, head_dim=64, q_dtype="bfloat16", kv_dtype="bfloat16")
    decode_problem(shape, lengths).check(backend)


def test_no_sequence_at_all(backend):
    shape = Shape()
    problem = decode_problem(shape, [5]).replace(
        q=np.zeros((0, 4, 64), np.float32), block_tables=np.zeros((0, 1), np.int32), lengths=np.zeros(0, np.int32)
    )
    out, lse = problem.attend(backend)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_rows_without_queries(backend):
    problem = prefill_problem(Shape(), [20, 7, 0, 30], [0, 7, 0, 2])
    assert len(problem.q) == 9
    problem.check(backend)


def test_nothing_stored_anywhere(backend):
    """A pool without blocks, and tables without columns, are fine while every length is 0."""
    problem = decode_problem(Shape(), [5, 3]).replace(lengths=np.zeros(2, np.int32))
    for changes in (
        {"keys": problem.keys[:0], "values": problem.values[:0]},
        {"block_tables": np.zeros((2, 0), np.int32)},
    ):
        out, lse = problem.replace(**changes).check(backend)
        assert (out == 0).all() and (lse == -np.inf).all()


def test_validation_changes_no_result(backend):
    problem = prefill_problem(Shape(), [40, 9], [6, 9])
    assert same_bits(problem.attend(backend), problem.attend(backend, validate=False))


def test_what_comes_later_cannot_be_seen(backend):
    """NaN in the key and value of position 40 reaches no query before it."""
    problem = prefill_problem(Shape(), [60], 60)
    at = problem.block_tables[0, 40 // 16], 40 % 16
    for pool in (problem.keys, problem.values):
        pool[at] = np.nan
    hit = np.isnan(problem.attend(backend).out).any(axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(hit), np.arange(40, 60))


@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_than_keys(backend, causal):
    got = prefill_problem(Shape(), [2, 0, 30], [5, 3, 4]).check(backend, causal=causal)
    unseen = [0, 1, 2, 5, 6, 7] if causal else [5, 6, 7]
    assert (got.out[unseen] == 0).all() and (got.lse[unseen] == -np.inf).all()


@pytest.mark.parametrize("chunks", [[50], [1] * 50, [16, 16, 18], [7, 31, 12]], ids=len)
@pytest.mark.parametrize("options", [{}, {"window": 9}], ids=["plain", "window"])
def test_chunked_prefill_is_the_whole(backend, chunks, options):
    shape = Shape(head_dim=32, q_dtype="float16", kv_dtype="float16")
    whole = prefill_problem(shape, [50], 50)
    want = whole.expected(**options)
    stops = np.cumsum(chunks)
    parts = []
    for stop, count in zip(stops, chunks, strict=True):
        chunk = whole.replace(
            q=whole.q[stop - count : stop], lengths=np.int32([stop]), query_starts=np.int32([0, count])
        )
        parts.append(chunk.attend(backend, **options))
    out, lse = (np.concatenate(x) for x in zip(*parts, strict=True))
    rounding = backend.weight_rounding("float16", "float16")
    tolerances.assert_attention(out, lse, want, DTYPES["float16"], 32, weight_rounding=rounding)


def test_prefill_of_single_queries_is_decode(backend):
    shape = Shape(num_q_heads=6, num_kv_heads=2)
    rows = sequences(shape, [0, 1, 40, 16])
    decoded = place(shape, rows).check(backend)
    prefilled = place(shape, rows, decode=False).check(backend)
    np.testing.assert_allclose(prefilled.out, decoded.out, atol=1e-5)


LENGTHS = [300, 0, 37, 16, 1, 512]


@pytest.mark.parametrize("split_size", [64, 10_000])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_queries", [None, 12], ids=["decode", "prefill"])
def test_fixed_split_makes_results_independent_of_the_batch(backend, split_size, kv_dtype, num_queries):
    shape = Shape(kv_dtype=kv_dtype)
    rows = sequences(shape, LENGTHS, 1 if num_queries is None else np.minimum(LENGTHS, num_queries))

    def attend(order, **placement):
        problem = place(shape, [rows[i] for i in order], decode=num_queries is None, **placement)
        got = problem.check(backend, split_size=split_size)
        starts = np.cumsum([0, *(len(rows[i].q) for i in order)])
        return {i: (got.out[a:b], got.lse[a:b]) for i, a, b in zip(order, starts, starts[1:], strict=False)}

    together = attend(range(6))
    for other in (attend([3, 5, 1, 0, 4, 2]), attend(range(6), seed=9), attend(range(6), layout="HND")):
        assert all(same_bits(together[i], other[i]) for i in range(6))
    for i in range(6):
        assert same_bits(together[i], attend([i], seed=i)[i])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("poison", ["nan", "inf", "largest"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("num_queries", [None, 5], ids=["decode", "prefill"])
def test_unwritten_slots_reach_nothing(backend, poison, kv_dtype, num_queries):
    shape = Shape(head_dim=20, kv_dtype=kv_dtype)
    rows = sequences(shape, [37, 1, 16, 0], 1 if num_queries is None else np.minimum([37, 1, 16, 0], num_queries))
    placement = {"decode": num_queries is None}
    for options in ({}, {"split_size": 16}, {"window": 5}, {"causal": False} if num_queries else {"window": 1}):
        clean = place(shape, rows, poison="zero", **placement).attend(backend, **options)
        assert same_bits(clean, place(shape, rows, poison=poison, **placement).attend(backend, **options))


def test_blocks_out_of_the_window_are_not_read(backend):
    """A manager may hand them to others: their numbers, and their ids in the table, must not matter."""
    problem = decode_problem(Shape(), [100, 80])
    want = problem.check(backend, window=20)
    keys, values, tables = problem.keys.copy(), problem.values.copy(), problem.block_tables.copy()
    for row, length in enumerate(problem.lengths):
        dead = tables[row, : (length - 20) // 16]
        keys[dead], values[dead] = np.nan, np.inf
    assert same_bits(want, problem.replace(keys=keys, values=values).attend(backend, window=20))


def test_out_is_filled_and_returned(backend):
    problem = decode_problem(Shape(q_dtype="float16"), [40, 0, 5])
    out = backend.asarray(np.full(problem.q.shape, np.nan, np.float16))
    arrays = [backend.asarray(x) for x in problem.arguments()]
    returned = npg.decode(*arrays, out=out)
    assert returned is out
    assert backend.asnumpy(out).tobytes() == problem.attend(backend).out.tobytes()


def test_out_may_be_strided(backend):
    problem = prefill_problem(Shape(), [40, 9], [6, 9])
    wide = backend.asarray(np.full((15, 4, 80), np.nan, np.float32))
    npg.prefill(*map(backend.asarray, problem.arguments()), out=wide[:, :, 8:72])
    wide = backend.asnumpy(wide)
    assert wide[:, :, 8:72].tobytes() == problem.attend(backend).out.tobytes()
    assert np.isnan(wide[:, :, :8]).all() and np.isnan(wide[:, :, 72:]).all()


@pytest.mark.parametrize("num_queries", [None, 4], ids=["decode", "prefill"])
def test_lse_costs_nothing_and_inputs_stay(backend, num_queries):
    shape = Shape(q_dtype="bfloat16", kv_dtype="int8")
    problem = decode_problem(shape, [70, 4]) if num_queries is None else prefill_problem(shape, [70, 4], num_queries)
    arrays = [backend.asarray(x) for x in problem.arguments()]
    before = [backend.asnumpy(x).tobytes() for x in arrays]
    out = (npg.decode if num_queries is None else npg.prefill)(*arrays, **problem.scales)
    assert backend.asnumpy(out).tobytes() == problem.attend(backend).out.tobytes()
    assert before == [backend.asnumpy(x).tobytes() for x in arrays]
