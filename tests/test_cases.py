"""Inputs that broke other kernels, sections A to C: garbage in slots, softmax numerics, log-sum-exp, splits.

Each test is named by its number in the list of cases; its docstring cites the report. The inputs are ours.
"""

import numpy as np
import pytest

import numba_paged as npg
import tolerances
from inputs import DTYPES, Shape, decode_problem, place, prefill_problem, sequences

FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
KINDS = ("decode", "prefill")


def make(kind, shape, lengths, num_queries=4, **placement):
    """A decode problem, or a prefill with up to `num_queries` queries a sequence."""
    if kind == "decode":
        return decode_problem(shape, lengths, **placement)
    return prefill_problem(shape, lengths, np.minimum(lengths, num_queries), **placement)


def constant(x, like):
    """An array like `like` that holds x everywhere."""
    return np.full(like.shape, x, np.float32).astype(like.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", FLOATS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 65504.0])
def test_case_01_garbage_in_the_tail_of_the_last_block(backend, kind, kv_dtype, garbage):
    """0 · NaN must not reach the sum (vllm-project/vllm#641)."""
    clean = make(kind, Shape(1, 1, 64, 4, "float16", kv_dtype), [13], poison="zero")
    last = clean.block_tables[0, 3]
    keys, values = clean.keys.copy(), clean.values.copy()
    for pool in (keys, values):
        pool[last, 1:] = constant(garbage, pool[last, 1:])
    want, got = clean.check(backend), clean.replace(keys=keys, values=values).attend(backend)
    assert np.isfinite(got.out.astype(np.float32)).all()
    assert got.out.tobytes() == want.out.tobytes() and got.lse.tobytes() == want.lse.tobytes()


@pytest.mark.parametrize("length", [1, 100, 255, 257])
@pytest.mark.parametrize("causal", [None, True, False], ids=["decode", "causal", "not causal"])
def test_case_03_tail_lanes_in_the_denominator(backend, length, causal):
    """q = 0 gives the mean of the valid values (flashinfer-ai/flashinfer#3716)."""
    problem = make("decode" if causal is None else "prefill", Shape(8, 8, 128, 16, "bfloat16", "bfloat16"), [length], 1)
    problem = problem.replace(q=constant(0, problem.q))
    got = problem.check(backend, **({} if causal is None else {"causal": causal}))
    np.testing.assert_allclose(got.lse, np.log(length), atol=1e-6)


def test_case_04_padding_rows_and_block_0(backend):
    """Padding writes go nowhere, and what block 0 holds is nobody's (sgl-project/sglang#36207)."""
    shape = Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, block_size=4)
    row = sequences(shape, [9])
    alone = place(shape, row)
    want = alone.check(backend)
    keys, values = (np.concatenate([np.full((1, 4, 1, 16), np.nan, np.float32), p]) for p in (alone.keys, alone.values))
    tables = np.zeros((2, 8), np.int32)
    tables[1, :3] = alone.block_tables[0, :3] + 1
    keys, values = backend.asarray(keys), backend.asarray(values)
    before = [backend.asnumpy(p).tobytes() for p in (keys, values)]
    new = backend.asarray(np.full((2, 1, 16), np.nan, np.float32))
    npg.append(new, new, keys, values, backend.asarray(np.array([-1, -1])))
    assert before == [backend.asnumpy(p).tobytes() for p in (keys, values)]
    q = np.concatenate([np.full_like(alone.q, np.nan), alone.q])
    out = npg.decode(backend.asarray(q), keys, values, *map(backend.asarray, (tables, np.int32([0, 9]))))
    out = backend.asnumpy(out)
    assert (out[0] == 0).all() and out[1].tobytes() == want.out[0].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[0, 5], [5, 0], [0, 0, 300, 0], [0]], ids=str)
def test_case_05_sequence_of_length_zero(backend, kind, lengths):
    """out 0, lse -inf, and the others as if it were not there (flashinfer-ai/flashinfer#363)."""
    shape = Shape()
    rows = sequences(shape, lengths)
    options = {"split_size": 64}
    got = place(shape, rows, decode=kind == "decode").check(backend, **options)
    for i, length in enumerate(lengths):
        if length == 0:
            assert (got.out[i] == 0).all() and (got.lse[i] == -np.inf).all()
        else:
            alone = place(shape, [rows[i]], decode=kind == "decode").attend(backend, **options)
            assert got.out[i].tobytes() == alone.out[0].tobytes()


@pytest.mark.parametrize("num_queries, num_keys", [(5, 2), (40, 1), (2, 1), (17, 16), (3, 0)])
def test_case_07_causal_rows_that_see_nothing(backend, num_queries, num_keys):
    """More queries than keys: the first rows are empty (flashinfer-ai/flashinfer#4452)."""
    problem = prefill_problem(Shape(), [num_keys], [num_queries])
    got = problem.check(backend)
    empty = num_queries - num_keys
    assert (got.out[:empty] == 0).all() and (got.lse[:empty] == -np.inf).all() and np.isfinite(got.lse[empty:]).all()
    if num_keys:
        first = problem.values[problem.block_tables[0, 0], 0]
        np.testing.assert_array_equal(got.out[empty], np.repeat(first, 2, axis=0))  # it sees key 0 alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 4, 15, 16])
@pytest.mark.parametrize("split_size", [None, 16, 32])
def test_case_08_tiles_and_splits_out_of_the_window(backend, kind, window, split_size):
    """(-inf) - (-inf) is NaN where a whole tile is masked (ggml-org/llama.cpp#6438)."""
    for lengths in ([40], [40, 400]):
        problem = make(kind, Shape(), lengths, 24)
        got = problem.check(backend, window=window, **({} if split_size is None else {"split_size": split_size}))
        assert np.isfinite(got.out).all() and np.isfinite(got.lse).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split_size", [None, 4096])
def test_case_10_values_and_products_past_float16(backend, kind, split_size):
    """Sums and scores pass 65504; accumulation is float32 (NVIDIA/kvpress#250)."""
    options = {} if split_size is None else {"split_size": split_size}
    problem = make(kind, Shape(1, 1, 64, 16, "float16", "float16"), [65536], 2)
    full = {"values": constant(3e4, problem.values)}
    assert (problem.replace(**full).check(backend, **options).out == 3e4).all()
    large = {"q": constant(100, problem.q), "keys": constant(100, problem.keys)}
    got = problem.replace(**full, **large).attend(backend, **options)
    assert (got.out == 3e4).all()
    np.testing.assert_allclose(got.lse, 100 * 100 * 64 / 8 + np.log(65536), rtol=1e-6)


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_case_11_partials_stay_float32(backend, kind, q_dtype):
    """Splitting must not misround more elements than one pass does (flashinfer-ai/flashinfer#5107)."""
    problem = make(kind, Shape(8, 2, 128, 16, q_dtype, q_dtype), [4096], 1)
    problem = problem.replace(values=(problem.values.astype(np.float32) * 0.1 + 1).astype(problem.values.dtype))
    rounded_once = problem.expected().out.astype(problem.q.dtype)
    misrounded = [(problem.check(backend, split_size=s).out != rounded_once).sum() for s in (4096, 512)]
    assert misrounded[1] <= misrounded[0] + 0.01 * rounded_once.size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 8, 1000])
def test_case_13_natural_logarithm(backend, kind, length):
    """8 keys of logit 0 have lse log(8) = 2.0794, not 3 (flashinfer-ai/flashinfer#2113)."""
    problem = make(kind, Shape(), [length], 1)
    got = problem.replace(q=constant(0, problem.q)).check(backend)
    np.testing.assert_allclose(got.lse, np.log(length), atol=1e-6)


def test_case_13_prefix_and_suffix_merge_to_the_whole(backend):
    """3072 tokens of prefix and 64 of suffix (flashinfer-ai/flashinfer#2113)."""
    whole = decode_problem(Shape(), [3072 + 64])
    prefix = whole.replace(lengths=np.int32([3072]))
    suffix = whole.replace(lengths=np.int32([64]), block_tables=whole.block_tables[:, 192:].copy())
    parts = [p.attend(backend) for p in (prefix, suffix)]
    out, lse = npg.merge(*(backend.asarray(np.stack(x)) for x in zip(*parts, strict=True)))
    tolerances.assert_attention(backend.asnumpy(out), backend.asnumpy(lse), whole.expected(), DTYPES["float32"], 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_case_14_lse_whatever_the_splits(backend, kind, num_splits):
    """With and without lse the same out; the lse of each split count is right (flashinfer-ai/flashinfer#50)."""
    problem = make(kind, Shape(), [640, 77], 3)
    got = problem.check(backend, split_size=640 // num_splits)
    function = npg.decode if kind == "decode" else npg.prefill
    out = function(*map(backend.asarray, problem.arguments()), split_size=640 // num_splits)
    assert backend.asnumpy(out).tobytes() == got.out.tobytes()


@pytest.mark.parametrize("window", [1, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("split_size", [None, 16, 32])
def test_case_15_blocks_in_a_window(backend, window, split_size):
    """A window of 32 touches 2 blocks of 16 at length 64, and 3 at 50 (openvinotoolkit/openvino#38034)."""
    options = {"window": window} if split_size is None else {"window": window, "split_size": split_size}
    for lengths in ([64, 50], [50, 64], [64, 49, 50, 51, 47, 33, 32, 31, 16, 15]):
        decode_problem(Shape(), lengths).check(backend, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split_size", [4097, 2049, 513, 16, None])
def test_case_17_ragged_lengths_in_splits(backend, kind, split_size):
    """lengths 1, 300, 4097 in 1, 2, 8 and many splits, and as the library likes (Dao-AILab/flash-attention#1217)."""
    options = {} if split_size is None else {"split_size": split_size}
    make(kind, Shape(4, 1, 32), [1, 300, 4097]).check(backend, **options)
