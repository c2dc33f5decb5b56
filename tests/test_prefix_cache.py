"""The prefix index: what is found, what never is, what is evicted when, and that equal hashes change nothing."""

import numpy as np
import pytest

import numba_paged as npg
from caches import keys_of, prompt, refused, run, small_cache, write
from numba_paged.invariants import check_prefixes
from numba_paged.prefix_cache import unpublish_block

LONG = list(range(100, 120))


def matched(cache, tokens, salt=None):
    return cache.match(tokens, salt).num_tokens


# ---------------------------------------------------------------- lookup and publication


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("length", range(1, 20, 3))
def test_whole_blocks_are_found_but_never_the_whole_prompt(block_size, length):
    cache = small_cache(num_blocks=64, block_size=block_size)
    prompt(cache, LONG)
    tokens = LONG[:length]
    found = (length - 1) // block_size * block_size
    seq = cache.add(tokens)
    assert cache.length(seq) == found
    assert keys_of(cache, seq) == tokens[:found]
    run(cache, seq, tokens[found:])
    assert keys_of(cache, seq) == tokens
    cache.check()


@pytest.mark.parametrize("form", [list, tuple, np.array, np.int32, np.uint8])
def test_token_ids_in_any_form(form):
    cache = small_cache()
    prompt(cache, form(LONG))
    assert matched(cache, form(LONG)) == 16


def test_a_block_is_found_only_after_its_whole_prefix():
    cache = small_cache()
    prompt(cache, LONG[:12])
    assert matched(cache, LONG[:8] + [0]) == 8
    assert matched(cache, LONG[4:12] + [0]) == 0, "the same block at another place"
    assert matched(cache, [0] * 4 + LONG[4:12] + [0]) == 0
    assert matched(cache, LONG[:3] + [0] + LONG[4:]) == 0
    assert matched(cache, []) == 0 and matched(cache, [1]) == 0


def test_a_prompt_is_found_however_it_was_computed():
    """In one step, in chunks, token by token."""
    for chunks in ([20], [3, 1, 9, 7], [1] * 20, [4] * 5):
        cache = small_cache()
        seq, start = cache.add(LONG), 0
        for chunk in chunks:
            run(cache, seq, LONG[start : start + chunk])
            start += chunk
            cache.check()
        assert matched(cache, LONG + [0]) == 20


def test_nothing_is_found_before_the_step_that_computes_it_is_committed():
    cache = small_cache()
    first, second = cache.add(LONG), cache.add(LONG)
    plan = cache.plan([first], 20)
    assert matched(cache, LONG) == 0
    cache.rollback(plan)
    assert matched(cache, LONG) == 0
    run(cache, first, LONG)
    assert matched(cache, LONG) == 16 and cache.length(second) == 0


def test_tokens_that_were_not_told_are_not_published_nor_what_follows():
    cache = small_cache(num_blocks=16)
    seq = cache.add()
    run(cache, seq, LONG[:6])
    run(cache, seq, LONG[6:10], told=False)
    run(cache, seq, LONG[10:])
    assert matched(cache, LONG) == 4
    cache.truncate(seq, 6)
    run(cache, seq, LONG[6:])
    assert matched(cache, LONG) == 16, "back to where all ids were told"
    cache.check()


def test_generated_tokens_are_found_too():
    cache = small_cache()
    seq = prompt(cache, LONG[:5])
    for token in LONG[5:12]:
        run(cache, seq, [token])
    assert matched(cache, LONG) == 12


def test_two_sequences_that_compute_the_same_share_it_afterwards():
    cache = small_cache()
    a, b = cache.add(LONG[:10]), cache.add(LONG[:10])
    plan = cache.plan([a, b], 10)
    assert cache.stats().num_used == 6
    write(cache, plan, LONG[:10] * 2)
    cache.commit(plan, LONG[:10] * 2)
    cache.check()
    assert cache.stats().num_used == 4 and cache.stats().num_shared == 2
    assert cache.blocks(a)[:2].tolist() == cache.blocks(b)[:2].tolist()
    assert keys_of(cache, b) == LONG[:10]


def test_a_cached_block_that_is_computed_again_is_taken_from_the_cache():
    cache = small_cache()
    blocks = cache.blocks(seq := prompt(cache, LONG[:8]))
    cache.free(seq)
    seq = cache.add()
    run(cache, seq, LONG[:8])
    assert cache.blocks(seq).tolist() == blocks.tolist() and cache.stats().num_cached == 0
    cache.check()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_match_tells_what_a_prompt_takes(prefix_caching):
    cache = small_cache(num_blocks=12, prefix_caching=prefix_caching)
    seq = prompt(cache, LONG)
    if not prefix_caching:
        assert cache.match(LONG) == (0, 5)
        assert cache.length(cache.add(LONG)) == 0
        return
    assert cache.match(LONG + [1, 2]) == (20, 1)
    child = cache.fork(seq)
    cache.truncate(child, 8)
    cache.free(seq)
    assert cache.match(LONG + [1, 2]) == (20, 1 + 3), "three of the blocks are cached, two in use"
    available = cache.num_available
    other = cache.add(LONG + [1, 2])
    cache.commit(cache.plan([other], 2))
    assert available - cache.num_available == 4
    cache.check()


def test_without_prefix_caching_nothing_is_kept():
    cache = small_cache(prefix_caching=False)
    cache.free(prompt(cache, LONG))
    assert cache.stats().num_cached == 0 and cache.stats().num_free == 8
    for call in (lambda: cache.add(LONG, salt="a"), lambda: cache.match(LONG, "a"), lambda: cache.resume(LONG, "a")):
        refused(cache, call, ValueError, "salt 'a' is a namespace of prefixes, and prefix_caching is off")
    cache.clear_prefixes()
    cache.check()


# ---------------------------------------------------------------- namespaces


def test_salts_separate():
    cache = small_cache(num_blocks=64)
    salts = [None, "X", ("lora", "X"), ("tenant", "X"), b"X", 0, frozenset({1})]
    for i, salt in enumerate(salts):
        assert cache.length(seq := cache.add(LONG, salt)) == 0
        run(cache, seq, [token + i for token in LONG])
        cache.free(seq)
        cache.check()
    for i, salt in enumerate(salts):
        assert matched(cache, [token + i for token in LONG], salt) == 16
    assert matched(cache, LONG, "Y") == 0


def test_a_salt_holds_for_the_whole_sequence_and_its_forks():
    cache = small_cache(num_blocks=32)
    seq = prompt(cache, LONG[:6], "a")
    child = cache.fork(seq)
    run(cache, child, LONG[6:])
    assert matched(cache, LONG, "a") == 16 and matched(cache, LONG) == 0
    run(cache, seq, [7] * 6)
    assert matched(cache, LONG[:6] + [7] * 6 + [0], "a") == 12


def test_a_salt_for_each_request_does_not_fill_the_memory():
    cache = small_cache(num_blocks=4)
    kept = prompt(cache, LONG[:5], "kept")
    for i in range(5000):
        cache.free(cache.add([1, 2], salt=i))
    assert len(cache._prefixes.roots) <= 1100
    cache.check()
    assert matched(cache, LONG, "kept") == 4
    cache.truncate(kept, 0)
    run(cache, kept, LONG[:5])
    assert matched(cache, LONG, "kept") == 4


# ---------------------------------------------------------------- eviction


def test_the_least_recently_used_goes_first():
    cache = small_cache(num_blocks=6, block_size=2)
    for start in (0, 10, 20):
        cache.free(prompt(cache, [start, start + 1, start + 2]))
    cache.free(cache.add([0, 1, 2]))
    found = {start: matched(cache, [start, start + 1, 0]) for start in (0, 10, 20)}
    assert found == {0: 2, 10: 2, 20: 2}
    cache.commit(cache.plan([cache.add()], 8))
    found = {start: matched(cache, [start, start + 1, 0]) for start in (0, 10, 20)}
    assert found == {0: 2, 10: 0, 20: 2}
    assert cache.stats().num_evicted == 1
    cache.check()


def test_a_prefix_is_evicted_from_its_end():
    cache = small_cache(num_blocks=6)
    cache.free(prompt(cache, LONG))
    for num_found in (20, 16, 12, 8, 4, 0):
        cache.plan([cache.add()], 4)
        assert matched(cache, LONG + [0]) == num_found
        cache.check()


def test_a_found_block_is_not_evicted_by_the_same_admission():
    cache = small_cache(num_blocks=5)
    cache.free(prompt(cache, LONG[:8]))
    cache.free(prompt(cache, [9] * 8))
    seq = cache.add(LONG[:8] + [1] * 12)
    cache.check()
    run(cache, seq, [1] * 12)
    assert keys_of(cache, seq) == LONG[:8] + [1] * 12 and cache.stats().num_evicted == 2
    cache.check()


def test_blocks_without_a_prefix_do_not_push_others_out():
    cache = small_cache(num_blocks=4)
    cache.free(prompt(cache, LONG[:8]))
    for _ in range(10):
        seq = cache.add()
        run(cache, seq, [5, 6])
        cache.free(seq)
    assert matched(cache, LONG) == 8 and cache.stats().num_evicted == 0


def test_an_evicted_parent_is_not_taken_for_another():
    cache = small_cache(num_blocks=2, block_size=2)
    cache.free(prompt(cache, [1, 2, 3, 4]))
    cache.free(prompt(cache, [5, 6, 7, 8]))
    assert matched(cache, [1, 2, 3, 4, 0]) == 0
    assert matched(cache, [5, 6, 3, 4, 0]) == 2
    cache.check()


def test_equal_hashes_change_nothing():
    """All keys collide: everything is still found, evicted and told apart."""
    cache = small_cache(num_blocks=12, block_size=2)
    cache._prefixes.factors[:] = 0
    rng = np.random.default_rng(0)
    living = {}
    for step in range(200):
        tokens = rng.integers(0, 2, 7).tolist()
        try:
            seq = prompt(cache, tokens, salt=int(rng.integers(2)))
        except npg.OutOfBlocks:
            for seq in list(living):
                cache.free(seq)
            living.clear()
            continue
        living[seq] = tokens
        assert keys_of(cache, seq) == tokens
        cache.check()
    assert cache.stats().num_hits > 100 and cache.stats().num_evicted > 50


# ---------------------------------------------------------------- what was published and is written again


def test_a_truncated_block_is_copied_before_it_is_written():
    cache = small_cache()
    seq = prompt(cache, LONG[:8])
    cache.truncate(seq, 6)
    plan = run(cache, seq, [0])
    assert len(plan.copies) == 1
    assert matched(cache, LONG) == 8
    other = prompt(cache, LONG[:9])
    assert keys_of(cache, other) == LONG[:9] and keys_of(cache, seq) == LONG[:6] + [0]
    cache.check()


def test_it_is_written_in_place_when_there_is_no_room_for_a_copy():
    cache = small_cache(num_blocks=2)
    seq = prompt(cache, LONG[:8])
    cache.truncate(seq, 7)
    assert cache.blocks_needed([seq]) == 0
    plan = run(cache, seq, [0])
    assert len(plan.copies) == 0 and cache.stats().num_evicted == 1
    assert matched(cache, LONG) == 4, "what was written over is not served"
    assert keys_of(cache, seq) == LONG[:7] + [0]
    assert matched(cache, LONG[:7] + [0, 0]) == 8
    cache.check()


def test_truncated_siblings_without_room():
    cache = small_cache(num_blocks=2)
    seq = prompt(cache, LONG[:8])
    cache.truncate(seq, 7)
    child = cache.fork(seq)
    refused(cache, lambda: cache.plan([child]), npg.OutOfBlocks, "1 blocks wanted, 0 of 2 are available")
    refused(cache, lambda: cache.plan([seq, child]), npg.OutOfBlocks, "2 blocks wanted, 0 of 2 are available")
    cache.free(seq)
    run(cache, child, [0])
    assert keys_of(cache, child) == LONG[:7] + [0]
    cache.check()


def test_after_a_truncation_the_other_branch_is_published_as_well():
    cache = small_cache(num_blocks=16)
    seq = prompt(cache, LONG)
    cache.truncate(seq, 10)
    run(cache, seq, [1] * 6)
    assert matched(cache, LONG + [0]) == 20
    assert matched(cache, LONG[:10] + [1] * 6 + [0]) == 16
    cache.check()


# ---------------------------------------------------------------- clearing, statistics


def test_cleared_prefixes_are_gone_for_good():
    cache = small_cache(num_blocks=32)
    cache.free(prompt(cache, [9] * 8))
    living, waiting, planned = prompt(cache, LONG[:10]), cache.add(LONG), cache.add([3] * 9)
    plan = cache.plan([planned], 9)
    cache.clear_prefixes()
    cache.check()
    assert cache.stats().num_cached == 0
    assert matched(cache, LONG) == matched(cache, [9] * 9) == 0
    cache.commit(plan, [3] * 9)
    run(cache, living, LONG[10:])
    assert matched(cache, LONG) == matched(cache, [3] * 9) == 0, "computed on top of what was cleared, or before"
    run(cache, waiting, LONG[8:])
    cache.check()
    cache.free(living)
    prompt(cache, LONG)
    assert matched(cache, LONG + [0]) == 20, "computed afterwards"
    cache.check()


def test_a_sequence_that_had_nothing_computed_is_published_after_a_clearing():
    cache = small_cache()
    seq = cache.add([1] * 9)
    cache.clear_prefixes()
    run(cache, seq, [1] * 9)
    assert matched(cache, [1] * 9) == 8


def test_a_preempted_prompt_is_counted_apart():
    cache = small_cache()
    cache.free(prompt(cache, LONG))
    cache.add(LONG)
    cache.resume(LONG)
    stats = cache.stats()
    assert (stats.num_queried, stats.num_hits) == (40, 16)
    assert (stats.num_requeried, stats.num_rehits) == (20, 16)


# ---------------------------------------------------------------- with a window


def test_only_the_visible_part_of_a_prefix_is_held():
    cache = small_cache(num_blocks=12, block_size=2, window=4)
    first = prompt(cache, LONG[:12])
    assert cache.stats().num_used == 2 and cache.stats().num_cached == 4
    second = cache.add(LONG)
    assert cache.length(second) == 12 and (cache.blocks(second) == -1).sum() == 4
    assert cache.stats().num_used == 2 and cache.stats().num_cached == 4
    cache.check()
    run(cache, second, LONG[12:])
    assert keys_of(cache, second)[-2:] == LONG[-2:]
    cache.free(first)
    cache.check()


def test_what_a_slid_prefix_leaves_behind_is_not_found_but_evicted():
    cache = small_cache(num_blocks=6, block_size=2, window=2)
    seq = prompt(cache, LONG[:8])
    cache.plan([cache.add()], 10)
    cache.check()
    assert matched(cache, LONG) == 0
    cache.free(seq)
    cache.check()
    cache.plan([cache.add()], 2)
    cache.check()


# ---------------------------------------------------------------- what check() notices


def busy_cache():
    cache = small_cache(num_blocks=16, block_size=2)
    cache.free(prompt(cache, LONG[:6]))
    seq = prompt(cache, [7] * 7)
    cache.check()
    return cache, cache._prefixes, cache._pool, cache._sequences, seq


def place(prefixes, block):
    return int(np.flatnonzero((prefixes.index & 0xFFFFFFFF == block) & (prefixes.index != 0))[0])


def lose(cache, x, pool, rows, seq):
    x.index[place(x, cache.blocks(seq)[0])] = 0


def enter_twice(cache, x, pool, rows, seq):
    x.index[np.flatnonzero(x.index == 0)[0]] = x.index[place(x, cache.blocks(seq)[0])]


def at_another_place(cache, x, pool, rows, seq):
    old = place(x, cache.blocks(seq)[0])
    x.index[np.flatnonzero((x.index == 0) & (np.arange(x.index.size) != old + 1))[-1]], x.index[old] = x.index[old], 0


def other_ids(cache, x, pool, rows, seq):
    x.ids_of[cache.blocks(seq)[1], 0] = 99


def other_hash(cache, x, pool, rows, seq):
    pool.hashes[cache.blocks(seq)[1]] ^= 2


def other_parent(cache, x, pool, rows, seq):
    pool.parents[cache.blocks(seq)[2]] = 10**6


def same_uid(cache, x, pool, rows, seq):
    pool.uids[cache.blocks(seq)[2]] = pool.uids[cache.blocks(seq)[1]]


def uid_of_the_future(cache, x, pool, rows, seq):
    pool.uids[cache.blocks(seq)[2]] = 10**6


def unpublished(cache, x, pool, rows, seq):
    unpublish_block(pool.blocks, x.index, cache.blocks(seq)[2])


def other_chain(cache, x, pool, rows, seq):
    rows.chains[rows.row_of(seq)] += 1


def lost_root(cache, x, pool, rows, seq):
    x.roots.clear()


def wrong_order(cache, x, pool, rows, seq):
    """The blocks of the cached prefix the other way round."""
    order, end = pool.cached_blocks()[::-1], pool.num_blocks
    ring = [end, *order.tolist(), end]
    for before, after in zip(ring, ring[1:]):
        pool.blocks[before, 1], pool.blocks[after, 2] = after, before


@pytest.mark.parametrize(("damage", "match"), [
    (lose, "the index holds 5 blocks, 6 are published; the first that differs is"),
    (enter_twice, "the index holds 7 blocks, 6 are published; the first that differs is there twice"),
    (at_another_place, "is not what the index finds for its prefix"),
    (other_ids, "is not what the index finds for its prefix"),
    (other_hash, "is not what the index finds for its prefix"),
    (other_parent, "is not what the index finds for its prefix"),
    (same_uid, "same uid|not published under the block before it"),
    (uid_of_the_future, "a uid that was not given out"),
    (unpublished, "is not published under the block before it"),
    (other_chain, "is not published under the block before it"),
    (lost_root, "neither a root nor published"),
    (wrong_order, "would be evicted before block"),
])
def test_check_notices(damage, match):
    state = busy_cache()
    damage(*state)
    with pytest.raises(npg.CorruptState, match=match):
        state[0].check()


def test_check_notices_a_parent_with_fewer_references():
    cache, prefixes, pool, sequences, seq = busy_cache()
    cache.fork(seq)
    pool.refs[cache.blocks(seq)[0]] -= 1
    with pytest.raises(npg.CorruptState, match=r"block \d+ has 2 references, the one before it, \d+, only 1"):
        check_prefixes(prefixes, sequences, sliding=False)
