"""The worked examples of three introductions to paged attention, as this library does them.

"PagedAttention by hand": one decode step over three blocks and a copy-on-write, by hand. "The PagedAttention Algorithm"
(M. Brenndoerfer): two sequences with scattered blocks. "How to Implement Paged Attention in PyTorch and vLLM"
(S. Dutta): a look-up traced, and the memory arithmetic.
"""

import numpy as np
import pytest

import numba_paged as npg
import reference
from inputs import Shape, decode_problem
from steps import Driver

TABLE = np.array([[2, 0, 1]], np.int32)
Q = np.array([[[1, 2]]], np.float32)


@pytest.fixture
def pool(backend):
    """9 blocks of 2 slots; 5 tokens in blocks 2, 0, 1; what no token was written to holds NaN."""
    keys, values = np.full((2, 9, 2, 1, 2), np.nan, np.float32)
    keys[[2, 0, 1], :, 0] = [[[1, 0], [0, 1]], [[1, 1], [2, 0]], [[0, 2], [np.nan, np.nan]]]
    values[[2, 0, 1], :, 0] = [[[1, 1], [2, 2]], [[3, 3], [4, 4]], [[5, 5], [np.nan, np.nan]]]
    return keys, values


def attend(backend, keys, values, length, **options):
    """The hand-made query, unscaled as in the article: (out, lse)."""
    arrays = map(backend.asarray, (Q, keys, values, TABLE, np.array([length], np.int32)))
    out, lse = npg.decode(*arrays, scale=1.0, return_lse=True, **options)
    return backend.asnumpy(out), float(backend.asnumpy(lse)[0, 0])


def test_by_hand_scores_and_probabilities(backend, pool):
    """A row that sees one key has that key's score as its lse."""
    scores = np.array([attend(backend, *pool, length, window=1)[1] for length in range(1, 6)])
    np.testing.assert_allclose(scores, [1, 2, 3, 2, 4], rtol=1e-6)
    probabilities = np.exp(scores - attend(backend, *pool, 5)[1])
    assert [f"{p:.4f}" for p in probabilities] == ["0.0295", "0.0802", "0.2179", "0.0802", "0.5923"]
    assert probabilities.sum() == pytest.approx(1, abs=1e-6)  # nothing is left for the sixth slot


def test_by_hand_output(backend, pool):
    """4.1256; the article's sum by hand, of probabilities rounded to 4 digits, is 4.1259."""
    out, _ = attend(backend, *pool, 5)
    assert [f"{x:.4f}" for x in out.ravel()] == ["4.1256", "4.1256"]
    rounded = np.array([0.0295, 0.0802, 0.2179, 0.0802, 0.5923]) @ np.arange(1, 6)
    assert f"{rounded:.4f}" == "4.1259"


def test_by_hand_unused_slot_has_no_weight(backend, pool):
    """Whatever lies there, the result keeps its bits."""
    out, lse = attend(backend, *pool, 5)
    for rubbish in (0.0, np.inf, 1e30):
        keys, values = (p.copy() for p in pool)
        keys[1, 1], values[1, 1] = rubbish, rubbish
        again = attend(backend, keys, values, 5)
        assert again[0].tobytes() == out.tobytes() and again[1] == lse


def test_by_hand_score_of_zero_would_dilute(backend, pool):
    """An empty slot left at score 0 takes about 1% of the mass: what length 6 over a zeroed slot gives."""
    keys, values = (p.copy() for p in pool)
    keys[1, 1], values[1, 1] = 0.0, 0.0
    (right, right_lse), (diluted, diluted_lse) = (attend(backend, keys, values, length) for length in (5, 6))
    absorbed = 1 - np.exp(right_lse - diluted_lse)
    assert 0.010 < absorbed < 0.011
    np.testing.assert_allclose(diluted, right * (1 - absorbed), rtol=1e-5)


def test_by_hand_copy_on_write(backend):
    """Two samples of a prompt of 5 tokens in blocks of 2: two blocks stay shared, one is copied, B writes in place."""
    driver = Driver(backend, npg.AttentionSpec(1, 1, 2, block_size=2, kv_dtype="float32"), num_blocks=9)
    a = driver.add()
    prompt = driver.step([a], 5).block_tables[0].tolist()
    b = driver.fork(a)
    assert len(prompt) == 3 and driver.cache.stats().num_shared == 3 and driver.cache.stats().num_used == 3
    written_by_a, written_by_b = driver.step([a]), driver.step([b])
    ((source, target),) = written_by_a.copies.tolist()
    assert source == prompt[2] and target not in prompt
    assert written_by_a.slots.tolist() == [target * 2 + 1]
    assert written_by_b.copies.tolist() == [] and written_by_b.slots.tolist() == [prompt[2] * 2 + 1]
    assert driver.cache.stats().num_shared == 2 and driver.cache.stats().num_used == 4
    np.testing.assert_array_equal(written_by_a.block_tables[0, :2], written_by_b.block_tables[0, :2])
    keys = backend.asnumpy(driver.cache.keys(0))
    np.testing.assert_array_equal(keys[target, 0], keys[prompt[2], 0])  # k5 was copied, k6 differs
    assert (keys[target, 1] != keys[prompt[2], 1]).all()


def test_by_hand_both_samples_in_one_step(backend):
    """One plan for both: still one copy."""
    driver = Driver(backend, npg.AttentionSpec(1, 1, 2, block_size=2, kv_dtype="float32"), num_blocks=9)
    a = driver.add()
    driver.step([a], 5)
    plan = driver.step([a, driver.fork(a)])
    assert len(plan.copies) == 1 and driver.cache.stats().num_shared == 2 and driver.cache.stats().num_used == 4


def test_by_hand_waste_is_bounded_by_a_block():
    """50 prompt tokens and 10 more in a reservation of 2048 waste 1988 slots; blocks of 16 waste 4, never over 15."""
    assert 2048 - 60 == 1988 and npg.waste(60, 16) == 4
    assert npg.waste(np.arange(20_001), 16).max() == 15
    assert npg.waste(5, 2) == 1


def test_by_hand_bytes_of_a_block():
    """16 tokens of 128 numbers of 2 bytes are 4096 bytes for the keys of one head; a block holds values as well."""
    assert npg.kv_bytes_per_token(1, 1, 128, "float16") * 16 == 2 * 4096
    assert npg.kv_bytes_per_token(1, 1, 128, "float16") == 2 * 256


def test_two_sequences_with_scattered_blocks(backend):
    """Tables [0, 3, 5] and [1, 7] padded with 0, lengths 10 and 7, 2 heads of 8, blocks of 4."""
    rng = np.random.default_rng(42)
    keys, values = rng.standard_normal((2, 8, 4, 2, 8), np.float32)
    q = rng.standard_normal((2, 2, 8), np.float32)
    tables = np.array([[0, 3, 5, 0, 0, 0, 0, 0], [1, 7, 0, 0, 0, 0, 0, 0]], np.int32)
    lengths = np.array([10, 7], np.int32)
    out = backend.asnumpy(npg.decode(*map(backend.asarray, (q, keys, values, tables, lengths))))
    assert out.shape == (2, 2, 8)
    contiguous = [
        (np.concatenate([keys[0], keys[3], keys[5, :2]]), np.concatenate([values[0], values[3], values[5, :2]])),
        (np.concatenate([keys[1], keys[7, :3]]), np.concatenate([values[1], values[7, :3]])),
    ]
    for row, (k, v) in enumerate(contiguous):
        np.testing.assert_allclose(out[row], reference.attention(q[row : row + 1], k, v)[0][0], atol=1e-6)


def test_lookup_trace_in_a_table(backend):
    """Blocks of 4, table [5, 2], 7 tokens: token 7 goes to block 2 at offset 3, token 8 into a new block, 9."""
    rng = np.random.default_rng(0)
    keys, values = (backend.asarray(np.full((10, 4, 1, 8), np.nan, np.float32)) for _ in "kv")
    k, v = rng.standard_normal((2, 9, 1, 8), np.float32)
    table = np.array([5, 2, 9])
    slots = table[np.arange(9) // 4] * 4 + np.arange(9) % 4
    assert slots[6:].tolist() == [2 * 4 + 2, 2 * 4 + 3, 9 * 4 + 0]
    for part in (slice(0, 7), slice(7, 8), slice(8, 9)):
        npg.append(*map(backend.asarray, (k[part], v[part])), keys, values, backend.asarray(slots[part]))
        out = npg.decode(
            backend.asarray(k[:1]), keys, values, *map(backend.asarray, (np.int32([[5, 2, 9]]), np.int32([part.stop])))
        )
        want = reference.attention(k[:1], k[: part.stop], v[: part.stop])[0]
        np.testing.assert_allclose(backend.asnumpy(out), want, atol=1e-6)
    np.testing.assert_array_equal(backend.asnumpy(keys)[[2, 9], [3, 0]], k[7:9])


def test_lookup_trace_in_the_cache(backend):
    """The same trace with the cache as the manager."""
    driver = Driver(backend, npg.AttentionSpec(1, 1, 8, block_size=4, kv_dtype="float32"), num_blocks=10)
    seq = driver.add()
    first, second = driver.step([seq], 7).block_tables[0, :2].tolist()
    assert driver.step([seq]).slots.tolist() == [second * 4 + 3]
    plan = driver.step([seq])
    third = plan.block_tables[0, 2]
    assert third not in (first, second) and plan.slots.tolist() == [third * 4]
    assert driver.cache.length(seq) == 9


def test_lifecycle(backend):
    """Freed sequences give their blocks back, an exhausted pool raises, interleaved growth leaks nothing."""
    driver = Driver(backend, npg.AttentionSpec(1, 1, 8, block_size=4, kv_dtype="float32"), num_blocks=6)
    a, b = driver.add(), driver.add()
    for _ in range(12):
        driver.step([a, b])
    with pytest.raises(npg.OutOfBlocks):
        driver.cache.plan([a, b])
    driver.free(a)
    driver.step([b], 12)
    driver.free(b)
    assert driver.cache.stats().num_free == 6


def test_memory_of_a_model():
    """32 layers, 8 kv heads, head_dim 128, float16: 512 MB for 4096 tokens, 128 GB for 256 such sequences."""
    model = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "kv_dtype": "float16"}
    assert npg.kv_bytes_per_token(**model) == 2 * 32 * 8 * 128 * 2
    assert npg.contiguous_bytes(1, 4096, **model) == 512 * 2**20
    assert npg.contiguous_bytes(256, 4096, **model) == 128 * 2**30
    assert npg.blocks_that_fit(512 * 2**20, 16, **model) == 256  # what a sequence of 4096 tokens needs
    assert npg.waste(200, 16) == 13 * 16 - 200


def test_oracle_equivalence(backend):
    """Scattered blocks and grouped heads against contiguous attention, in the article's three formats."""
    for dtype, tolerance in (("float32", 1e-5), ("float16", 1e-3), ("bfloat16", 5e-3)):
        problem = decode_problem(Shape(8, 2, 64, 16, dtype, dtype), [100, 33])
        got = problem.check(backend)
        np.testing.assert_allclose(got.out.astype(np.float64), problem.expected().out, atol=tolerance, rtol=0)
