"""Swapping: every bit moves, what is shared moves once, and what comes back is what left."""

import ml_dtypes
import numpy as np
import pytest

import numba_paged as npg
from caches import keys_of, prompt, refused, run, small_cache


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8])
def test_swapping_moves_every_bit(dtype):
    spec = npg.AttentionSpec(2, 2, 8, block_size=2, kv_dtype=dtype)
    cache = npg.PagedKVCache(spec, 3, 6, backend="cpu", num_host_blocks=4)
    rng = np.random.default_rng(0)
    seq = cache.add()
    cache.commit(cache.plan([seq], 7))
    for layer in range(3):
        for pool in (cache.keys(layer), cache.values(layer)):
            bits = pool.view(spec.kv_format.bits)
            bits[...] = rng.integers(0, 100, bits.shape)
    before = [np.array(pool(layer).view(spec.kv_format.bits)[cache.blocks(seq)])
              for layer in range(3) for pool in (cache.keys, cache.values)]
    cache.swap_out(seq)
    assert cache.stats().num_free == 6 and cache.length(seq) == 7
    for layer in range(3):
        cache.keys(layer).view(spec.kv_format.bits)[...] = 0
    cache.swap_in(seq)
    after = [pool(layer).view(spec.kv_format.bits)[cache.blocks(seq)]
             for layer in range(3) for pool in (cache.keys, cache.values)]
    np.testing.assert_array_equal(after, before)
    cache.check()


@pytest.mark.parametrize("told", [True, False])
def test_shared_blocks_move_once(told):
    cache = small_cache(num_blocks=6, num_host_blocks=6)
    parent = cache.add()
    run(cache, parent, list(range(10)), told)
    children = [parent, cache.fork(parent), cache.fork(parent)]
    for seq in children:
        cache.swap_out(seq)
        cache.check()
    assert cache.stats().num_swapped_out == 3 and cache.stats().num_host_free == 3
    for seq in children[::-1]:
        cache.swap_in(seq)
        cache.check()
    assert len({tuple(cache.blocks(seq)) for seq in children}) == 1
    assert cache.stats().num_host_free == 6 and cache.stats().num_used == 3
    assert [keys_of(cache, seq) for seq in children] == [list(range(10))] * 3


def test_a_block_that_was_written_since_is_not_taken_for_its_copy():
    cache = small_cache(num_blocks=6, num_host_blocks=6)
    a = cache.add()
    run(cache, a, [1, 2])
    b = cache.fork(a)
    cache.swap_out(a)
    run(cache, b, [3])
    cache.swap_in(a)
    run(cache, a, [4])
    assert keys_of(cache, a) == [1, 2, 4] and keys_of(cache, b) == [1, 2, 3]
    cache.swap_out(b)
    cache.swap_out(a)
    cache.swap_in(a)
    cache.swap_in(b)
    assert keys_of(cache, a) == [1, 2, 4] and keys_of(cache, b) == [1, 2, 3]
    cache.check()


def test_a_block_that_is_still_cached_comes_back_without_moving():
    cache = small_cache(num_blocks=6, num_host_blocks=6)
    seq = prompt(cache, list(range(9)))
    blocks = cache.blocks(seq)
    cache.swap_out(seq)
    assert cache.stats().num_cached == 2
    cache.swap_in(seq)
    assert cache.blocks(seq)[:2].tolist() == blocks[:2].tolist() and cache.stats().num_swapped_in == 1
    cache.check()


def test_what_comes_back_is_published_again():
    cache = small_cache(num_blocks=3, num_host_blocks=3)
    seq = prompt(cache, list(range(9)))
    cache.swap_out(seq)
    other = prompt(cache, [50] * 12)
    cache.free(other)
    cache.swap_in(seq)
    cache.check()
    assert cache.length(cache.add(list(range(9)))) == 8
    assert keys_of(cache, seq) == list(range(9))
    run(cache, seq, [9, 10, 11])
    assert cache.match(list(range(13))).num_tokens == 12


def test_a_full_host_pool():
    cache = small_cache(num_blocks=6, num_host_blocks=2)
    seq = prompt(cache, list(range(9)))
    refused(cache, lambda: cache.swap_out(seq), npg.OutOfBlocks, "3 blocks wanted in the host pool, 2 of 2 are free")


def test_a_pool_without_room_to_swap_in():
    cache = small_cache(num_blocks=3, num_host_blocks=3)
    seq = prompt(cache, list(range(9)))
    cache.swap_out(seq)
    prompt(cache, [50] * 5)
    refused(cache, lambda: cache.swap_in(seq), npg.OutOfBlocks, "3 blocks wanted to swap the sequence in, 1 of 3 are")
    cache.free(seq)
    assert cache.stats().num_host_free == 3
    cache.check()
