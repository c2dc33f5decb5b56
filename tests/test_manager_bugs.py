"""What went wrong in other block managers, each with its whole kind; most kinds have their test where they belong.

In test_prefix_cache, which names are left out of below:

- a hash that can be made to collide serves another prompt (vllm#12621, #54727): test_equal_hashes_change_nothing;
- namespaces that meet (vllm#17045, #44701, #3264): test_salts_separate; weights that changed (vllm#42125):
  test_cleared_prefixes_are_gone_for_good;
- a prompt that is found whole leaves nothing to compute (vllm#11186, nano-vllm#144): test_whole_blocks_are_found_but_...;
- blocks found before they are computed (nano-vllm#208, vllm#7822): test_nothing_is_found_before_the_step_...;
- equal blocks twice (nano-vllm#219): test_two_sequences_that_compute_the_same_share_it_afterwards;
- an evicted block that is still found (kvcached#362, vllm#4761): test_an_evicted_parent_is_not_taken_for_another;
- hits given to others by the admission that found them (vllm#44409, mini-sglang#52):
  test_a_found_block_is_not_evicted_by_the_same_admission;
- partial blocks push prefixes out (vllm#42656): test_blocks_without_a_prefix_do_not_push_others_out; the middle of a
  prefix goes first (LMCache#443): test_a_prefix_is_evicted_from_its_end;
- what only the end of a window serves (vllm#48435, #57610): test_only_the_visible_part_of_a_prefix_is_held,
  test_what_a_slid_prefix_leaves_behind_is_not_found_but_evicted;
- recomputation counted as hits (vllm#25780): test_a_preempted_prompt_is_counted_apart.

In test_kv_cache:

- drafts in the index (vllm#18668, #19006): test_accepted_drafts_stay_and_the_others_go; look-ahead past the longest
  length (vllm-ascend#9098): test_look_ahead_ends_at_the_longest_length;
- fork and window (vllm#1556): test_a_fork_keeps_its_window; the window of tokens that are in flight
  (vllm-ascend#13501): test_the_window_is_that_of_committed_tokens;
- two ways to release (sglang#12224): test_handles_are_never_given_out_again; blocks given back while a step runs
  (vllm#45357, #46283): test_freed_after_a_plan.

In test_scheduler, whose tests name the reports: requests that never fit (vllm#39734), prompts admitted by a chunk
(vllm#21809), spare blocks (vllm#44594), prompts that wait for each other (vllm#45388), the head of the line
(vllm#35852), resumed requests (nano-vllm#211, #217), groups that give way (vllm#14759, #787), aborts (vllm#32255,
#46283). Steps do not overlap, so no victim's blocks can be late (vllm#49674).

Elsewhere: resources kept by a call that failed (vllm#11565, sglang#16067): every test_refused_with_nothing_changed;
groups swapped block by block (vllm#787): test_shared_blocks_move_once; state that takes as long as it is large
(vllm#5411, #7209): the curves of benchmarks/bench_manager.py. Nodes are whole blocks and are never split, so a lock
cannot be lost by that (bytedance-iaas/sglang#508, sglang#38480).

Here are the others.
"""

import numpy as np
import pytest

import numba_paged as npg
from array_backend import ArrayBackend
from caches import keys_of, prompt, run, small_cache


@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
def test_no_length_leaks_a_block(block_size):
    """Page arithmetic of unaligned prefixes (sglang#4977, #6731)."""
    cache = small_cache(num_blocks=60, block_size=block_size, num_host_blocks=60)
    for length in range(1, 18):
        for kept in range(length + 1):
            seq = prompt(cache, list(range(length)))
            child = cache.fork(seq)
            cache.truncate(seq, kept)
            run(cache, seq, [50, 51])
            cache.swap_out(child)
            cache.free(seq)
            cache.swap_in(child)
            cache.free(child)
            cache.check()
            assert cache.num_available == 60


def test_conservation():
    """Free, cached and used are all there is, shared blocks counted once (sglang#35270)."""
    cache = small_cache(num_blocks=10)
    seq = prompt(cache, list(range(10)))
    children = [cache.fork(seq) for _ in range(5)]
    for child in [seq, *children]:
        stats = cache.stats()
        assert stats.num_free + stats.num_cached + stats.num_used == 10
        assert cache.num_available == 7
        cache.free(child)
    assert cache.num_available == 10


def test_a_block_that_slid_out_belongs_to_others():
    """A stale entry frees a living block (sglang#27586)."""
    cache = small_cache(num_blocks=5, block_size=2, window=2, prefix_caching=False)
    old = cache.add()
    run(cache, old, list(range(8)))
    new = cache.add()
    run(cache, new, [20, 21])
    child = cache.fork(old)
    cache.truncate(old, 0)
    cache.free(child)
    cache.free(old)
    cache.check()
    other = cache.add()
    run(cache, other, [30, 31])
    assert cache.blocks(new)[-1] != cache.blocks(other)[-1]
    assert keys_of(cache, new)[-1] == 21


def test_a_row_that_is_used_again_has_no_old_blocks():
    """Stale ids past the length (sparkinfer#146, sglang#35401), and a resumed row appended to (LMCache#1361)."""
    cache = small_cache(num_blocks=30, max_sequences=2, num_host_blocks=30)
    for _ in range(3):
        long, short = prompt(cache, list(range(40))), cache.add()
        assert cache.plan([long, short]).block_tables[1, 1:].tolist() == [-1] * 10
        cache.rollback(next(iter(cache._open_plans)))
        cache.swap_out(long)
        cache.swap_in(long)
        assert cache.blocks(long).size == 10
        cache.free(long)
        cache.free(short)
        cache.check()


@pytest.mark.parametrize("window", [None, 4])
def test_block_0_is_a_block_like_any_other(window):
    """It neither stands for "no block" nor for padding (vllm#35431, #36939): a pool of one block serves a sequence."""
    cache = small_cache(num_blocks=1, window=window)
    plan = cache.plan([cache.add()], 3)
    assert plan.block_tables.tolist() == [[0]] and plan.slots.tolist() == [0, 1, 2]
    cache.rollback(plan)
    seq = prompt(cache, [7, 8, 9])
    run(cache, seq, [6])
    assert keys_of(cache, seq) == [7, 8, 9, 6] and cache.stats().num_used == 1 and cache.num_available == 0
    cache.free(seq)
    assert cache.match([7, 8, 9, 6, 5]).num_tokens == 4


class NoMemory(ArrayBackend):
    """Pools of any size, that hold nothing."""

    def zeros(self, shape, dtype):
        return np.broadcast_to(np.zeros((), dtype), shape)


def test_slots_past_32_bits():
    """block * block_size overflows (vllm#1486, #50427)."""
    block_size, num_blocks = 2**20, 4096
    spec = npg.AttentionSpec(1, 1, 1, block_size=block_size)
    cache = npg.PagedKVCache(spec, 1, num_blocks, NoMemory(), prefix_caching=False, max_sequences=1, max_length=2**21)
    cache._pool.stack[:] = cache._pool.stack[::-1].copy()  # the last blocks first
    plan = cache.plan([cache.add()], 2, num_lookahead=1)
    assert plan.block_tables.tolist() == [[4095]]
    assert plan.slots.tolist() == [4095 * 2**20, 4095 * 2**20 + 1] and plan.slots[0] > 2**31
    assert plan.lookahead_slots.tolist() == [[4095 * 2**20 + 2]]
    cache.check()


def test_a_hit_that_is_cached_counts_as_taken():
    """Capacity checked without the hits that nobody holds (vllm#11310)."""
    cache = small_cache(num_blocks=4)
    prompt(cache, [50, 51])
    cache.free(prompt(cache, list(range(12))))
    assert cache.match(list(range(16))).num_blocks == 4 > cache.num_available == 3
    seq = cache.add(list(range(16)))
    with pytest.raises(npg.OutOfBlocks, match="1 blocks wanted, 0 of 4 are available"):
        cache.plan([seq], 4)
    cache.check()
    cache.free(seq)
    assert cache.num_available == 3


def test_the_last_child_goes_on_in_its_parents_place():
    """Copies although nobody shares any more (vllm#417)."""
    cache = small_cache()
    parent = prompt(cache, [1, 2])
    child = cache.fork(parent)
    cache.free(parent)
    assert len(run(cache, child, [3]).copies) == 0 and cache.stats().num_copied == 0
