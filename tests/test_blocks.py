"""BlockPool: the free stack, references, and a check that notices whatever is wrong with them."""

import numpy as np
import pytest

import numba_paged as npg
from caches import prompt, small_cache
from numba_paged.blocks import HASH, NEXT, NUM_CACHED, NUM_FREE, PREV, REFS


def test_blocks_are_given_out_once_and_come_back():
    pool = npg.BlockPool(5)
    blocks = pool.allocate(5)
    assert sorted(blocks.tolist()) == list(range(5)) and blocks.dtype == np.int32
    assert pool.num_free == 0
    pool.release(blocks[1:3])
    assert pool.num_free == 2
    assert sorted(pool.allocate(2).tolist()) == sorted(blocks[1:3].tolist())
    pool.check()


def test_what_was_freed_last_is_used_next():
    pool = npg.BlockPool(100)
    blocks = pool.allocate(10)
    pool.release(blocks[[3]])
    pool.release(blocks[[7]])
    assert pool.allocate(2).tolist() == blocks[[7, 3]].tolist()


def test_released_in_the_order_of_allocation():
    pool = npg.BlockPool(10)
    blocks = pool.allocate(4)
    pool.release(blocks)
    assert pool.allocate(4).tolist() == blocks.tolist()


def test_a_block_is_free_after_its_last_reference():
    pool = npg.BlockPool(2)
    blocks = pool.allocate(1)
    pool.share([blocks[0], blocks[0]])
    for free in (1, 1, 2):
        pool.release(blocks)
        assert pool.num_free == free
        pool.check()


def test_repeated_ids_count_each_time():
    pool = npg.BlockPool(3)
    a, b = pool.allocate(2)
    pool.share([a, b, a])
    pool.release([a, a, b])
    assert pool.num_free == 1
    pool.release([b, a])
    assert pool.num_free == 3
    pool.check()


@pytest.mark.parametrize("empty", [[], np.empty(0, np.int32), ()])
def test_nothing_is_allowed(empty):
    pool = npg.BlockPool(1)
    assert pool.allocate(0).size == 0
    pool.share(empty)
    pool.release(empty)
    pool.check()


def refused(pool, call, error, match):
    """The call raises, and the pool is as it was."""
    before = [array.copy() for array in pool.arrays]
    with pytest.raises(error, match=match):
        call()
    for array, old in zip(pool.arrays, before):
        np.testing.assert_array_equal(array, old)
    pool.check()


@pytest.mark.parametrize(("call", "error", "match"), [
    (lambda pool: pool.allocate(3), npg.OutOfBlocks, "3 blocks wanted, 2 of 4 are free"),
    (lambda pool: pool.allocate(-1), ValueError, "n must be a whole number >= 0, got -1"),
    (lambda pool: pool.allocate(1.5), ValueError, "n must be a whole number >= 0, got 1.5"),
    (lambda pool: pool.share([0, 4]), ValueError, "block 4 is out of range for a pool of 4 blocks"),
    (lambda pool: pool.share([-1]), ValueError, "block -1 is out of range for a pool of 4 blocks"),
    (lambda pool: pool.share([0, 3]), ValueError, "block 3 is not in use"),
    (lambda pool: pool.share([0.0]), TypeError, "blocks must be integers, got float64"),
    (lambda pool: pool.release([0, 3]), ValueError, "block 3 is not in use"),
    (lambda pool: pool.release([0, 1, 0]), ValueError, "block 0 is released 2 times but has 1 references"),
    (lambda pool: pool.release([2**31]), ValueError, "block 2147483648 is out of range"),
    (lambda pool: pool.release(["a"]), TypeError, "blocks must be integers"),
])
def test_refused_with_nothing_changed(call, error, match):
    pool = npg.BlockPool(4)
    pool.allocate(2)
    refused(pool, lambda: call(pool), error, match)


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31 - 1, 1.5])
def test_a_size_that_is_none(num_blocks):
    with pytest.raises(ValueError, match="num_blocks must be a whole number from 1 to"):
        npg.BlockPool(num_blocks)


def test_metadata_is_small():
    """At most 48 bytes a block without token ids, 112 with those of 16 tokens."""
    cache = small_cache(num_blocks=1000, block_size=16)
    pool, prefixes = cache._pool, cache._prefixes
    without = sum(array.nbytes for array in pool.arrays) + prefixes.index.nbytes
    assert without <= 48 * 1000 + 100
    assert without + prefixes.ids_of.nbytes <= 112 * 1000 + 100


# ---------------------------------------------------------------- check


def busy_pool():
    """A pool with blocks in each state: 0 and 1 in use, 2 free, and cached ones."""
    cache = small_cache(num_blocks=6)
    cache.free(prompt(cache, list(range(12))))
    prompt(cache, [100, 101])
    pool = cache._pool
    pool.check()
    assert (pool.num_free, pool.num_cached) == (2, 3)
    return pool


def cached(pool, index=0):
    return int(pool.cached_blocks()[index])


def free(pool):
    return int(pool.stack[0])


def used(pool):
    return int(np.flatnonzero(pool.refs)[0])


BREAKAGES = {
    "a count of free blocks": (lambda pool: pool.counts.__setitem__(NUM_FREE, 7), "num_free is 7"),
    "a negative count": (lambda pool: pool.counts.__setitem__(NUM_FREE, -1), "num_free is -1"),
    "a count of cached blocks": (lambda pool: pool.counts.__setitem__(NUM_CACHED, 99), "num_cached is 99"),
    "a cached block too many": (lambda pool: pool.counts.__setitem__(NUM_CACHED, 4), "list of cached blocks breaks"),
    "a cached block too few": (lambda pool: pool.counts.__setitem__(NUM_CACHED, 2), "list of cached blocks breaks"),
    "a lost block": (lambda pool: pool.counts.__setitem__(NUM_FREE, 1), "neither free nor cached"),
    "an id on the stack": (lambda pool: pool.stack.__setitem__(0, 6), "free stack holds an id out of range"),
    "a block twice on the stack": (lambda pool: pool.stack.__setitem__(0, pool.stack[1]), "on the free stack 2 times"),
    "a reference of a free block": (lambda pool: pool.refs.__setitem__(free(pool), 1), "on the free stack and has 1"),
    "a reference of a cached block": (lambda pool: pool.refs.__setitem__(cached(pool), 1), "list of cached blocks and"),
    "a reference of a block in use": (lambda pool: pool.refs.__setitem__(used(pool), 0), "neither free nor cached"),
    "a negative reference": (lambda pool: pool.refs.__setitem__(used(pool), -1), "in use and has -1 references"),
    "a free block that is published": (lambda pool: pool.hashes.__setitem__(free(pool), 5), "free but published"),
    "a cached block that is not": (lambda pool: pool.hashes.__setitem__(cached(pool), 0), "but not published"),
    "a link of a block in use": (lambda pool: pool.blocks.__setitem__((used(pool), NEXT), 3), "linked but not in"),
    "a link forth": (lambda pool: pool.blocks.__setitem__((cached(pool), NEXT), cached(pool)), "list of cached blocks"),
    "a link back": (lambda pool: pool.blocks.__setitem__((cached(pool, 1), PREV), 0), "list of cached blocks breaks"),
    "a link to nowhere": (lambda pool: pool.blocks.__setitem__((cached(pool), NEXT), -7), "list of cached blocks"),
    "the end of the list": (lambda pool: pool.blocks.__setitem__((6, PREV), cached(pool)), "list of cached blocks"),
}


@pytest.mark.parametrize(("damage", "match"), BREAKAGES.values(), ids=BREAKAGES)
def test_check_notices(damage, match):
    pool = busy_pool()
    damage(pool)
    with pytest.raises(npg.CorruptState, match=match):
        pool.check()


def test_the_columns_are_what_they_are_called():
    pool = busy_pool()
    np.testing.assert_array_equal(pool.refs, pool.blocks[:-1, REFS])
    np.testing.assert_array_equal(pool.hashes, pool.blocks[:-1, HASH])
