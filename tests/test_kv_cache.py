"""PagedKVCache: sequences, plans, copies on write, windows, statistics."""

import numpy as np
import pytest

import numba_paged as npg
from caches import keys_of, prompt, refused, run, small_cache, write
from numba_paged.compiled import entry
from numba_paged.sequences import free_row


def num_free(cache):
    return cache.stats().num_free


# ---------------------------------------------------------------- plans


def test_a_plan_says_where_each_token_goes():
    cache = small_cache(block_size=4)
    a, b = cache.add(), cache.add()
    run(cache, a, [1, 2, 3])
    plan = cache.plan([b, a], [2, 3])
    assert plan.query_starts.tolist() == [0, 2, 5]
    assert plan.lengths.tolist() == [2, 6]
    assert plan.positions.tolist() == [0, 1, 3, 4, 5]
    assert plan.block_tables.shape == (2, 2)
    tables = plan.block_tables
    assert plan.slots.tolist() == [4 * tables[0, 0], 4 * tables[0, 0] + 1, 4 * tables[1, 0] + 3, 4 * tables[1, 1],
                                   4 * tables[1, 1] + 1]
    assert plan.seqs.tolist() == [b, a] and plan.copies.shape == (0, 2) and plan.lookahead_slots.shape == (0, 0)
    dtypes = {name: getattr(plan, name).dtype.name for name in ("query_starts", "lengths", "block_tables", "positions",
                                                                 "slots", "copies", "seqs", "lookahead_slots")}
    assert dtypes == {"query_starts": "int32", "lengths": "int32", "block_tables": "int32", "positions": "int32",
                      "slots": "int64", "copies": "int32", "seqs": "int64", "lookahead_slots": "int64"}
    assert cache.length(a) == 3, "planned tokens do not count yet"
    cache.commit(plan)
    assert (cache.length(a), cache.length(b)) == (6, 2)


def test_a_plan_is_a_value():
    cache = small_cache()
    seqs = np.array([cache.add()])
    plan = cache.plan(seqs)
    tables = plan.block_tables.copy()
    seqs[0] = 99
    cache.commit(plan)
    run(cache, int(plan.seqs[0]), [5] * 9)
    assert plan.seqs.tolist() != [99] and plan.block_tables.tolist() == tables.tolist()
    with pytest.raises(AttributeError):
        plan.lengths = None


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda seqs: np.array(seqs, np.int32), iter])
def test_handles_in_any_form(form):
    cache = small_cache()
    seqs = form([cache.add(), cache.add()])
    if form is iter:
        refused(cache, lambda: cache.plan(seqs), TypeError, "seqs must be whole numbers")
    else:
        assert cache.plan(seqs).num_tokens == 2


def test_handles_past_32_bits_after_one_of_32_bits():
    """The compiled way in is found for the types of the first call, and kept."""
    entry.pop(free_row, None)
    cache = small_cache()
    cache.free(np.int32(cache.add()))
    assert free_row in entry
    cache._sequences.handles += 2**40
    seq = cache.add()
    assert seq > 2**40
    cache.free(seq)
    with pytest.raises(npg.UnknownSequence):
        cache.free(seq)
    cache.check()


def test_one_handle_and_no_handle():
    cache = small_cache()
    cache.commit(cache.plan(cache.add()))
    plan = cache.plan([])
    assert plan.num_tokens == 0 and plan.work.items.shape == (0, 8)
    cache.commit(plan, [])
    cache.check()


def test_work_is_cut_when_it_is_asked_for():
    cache = small_cache(block_size=4)
    seq = cache.add()
    plan = cache.plan([seq], 10)
    assert "work" not in vars(plan)
    assert plan.work is plan.work
    assert plan.work.items[:, 0].tolist() == [0, 0] and plan.work.items[:, 2].sum() == 10


def test_all_or_nothing():
    cache = small_cache(num_blocks=3, block_size=2)
    a, b = cache.add(), cache.add()
    refused(cache, lambda: cache.plan([a, b], [4, 4]), npg.OutOfBlocks, "4 blocks wanted, 3 of 3 are available")
    assert cache.plan([a, b], [4, 2]).num_tokens == 6


def test_rollback_gives_everything_back_in_its_order():
    cache = small_cache(num_blocks=20)
    a = prompt(cache, list(range(6)))
    b, c = cache.fork(a), cache.add()
    stack, tables = cache._pool.stack[: num_free(cache)].tolist(), [cache.blocks(seq).tolist() for seq in (a, b, c)]
    plan = cache.plan([a, b, c], [7, 1, 30], num_lookahead=5)
    write(cache, plan, [99] * 38)
    cache.rollback(plan)
    cache.check()
    assert cache._pool.stack[: num_free(cache)].tolist() == stack
    assert [cache.blocks(seq).tolist() for seq in (a, b, c)] == tables
    assert keys_of(cache, a) == keys_of(cache, b) == list(range(6))


def test_several_plans_are_open_and_end_in_any_order():
    cache = small_cache(num_blocks=9)
    seqs = [cache.add() for _ in range(3)]
    plans = [cache.plan([seq], 4 + seq) for seq in seqs]
    cache.check()
    cache.commit(plans[1])
    cache.rollback(plans[0])
    cache.check()
    cache.commit(plans[2])
    assert [cache.length(seq) for seq in seqs] == [0, 5, 6]
    cache.check()


def test_look_ahead_slots_are_there_until_the_plan_is_closed():
    cache = small_cache(num_blocks=4, block_size=4)
    seq = cache.add()
    plan = cache.plan([seq], 3, num_lookahead=4)
    slots = np.concatenate([plan.slots, plan.lookahead_slots[0]])
    assert slots.tolist() == [4 * plan.block_tables[0, i // 4] + i % 4 for i in range(7)]
    assert cache.blocks(seq).size == 2 and num_free(cache) == 2
    cache.check()
    cache.commit(plan)
    assert cache.blocks(seq).size == 1 and num_free(cache) == 3
    cache.check()


def test_look_ahead_ends_at_the_longest_length():
    cache = small_cache(num_blocks=4, block_size=4, max_length=5)
    a, b = cache.add(), cache.add()
    plan = cache.plan([a, b], [4, 1], num_lookahead=3)
    assert (plan.lookahead_slots >= 0).tolist() == [[True, False, False], [True] * 3]
    cache.rollback(plan)
    assert num_free(cache) == 4
    assert cache.blocks_needed([a, b], [4, 1], 3) == 3


def test_accepted_drafts_stay_and_the_others_go():
    cache = small_cache(num_blocks=8, block_size=2)
    a, b, c = cache.add(), cache.add(), cache.add()
    plan = cache.plan([a, b, c], [5, 3, 2])
    tokens = [10, 11, 12, 13, 14, 20, 21, 22, 30, 31]
    write(cache, plan, tokens)
    cache.commit(plan, tokens, accepted=[3, 0, 2])
    cache.check()
    assert [cache.length(seq) for seq in (a, b, c)] == [3, 0, 2]
    assert keys_of(cache, a) == [10, 11, 12] and keys_of(cache, c) == [30, 31]
    assert [cache.blocks(seq).size for seq in (a, b, c)] == [2, 0, 1]
    run(cache, a, [99])
    assert keys_of(cache, a) == [10, 11, 12, 99]
    assert cache.length(cache.add([10, 11, 12, 99, 0])) == 4, "what was accepted is published"
    assert cache.length(cache.add([10, 11, 12, 13, 0])) == 2, "what was rejected is not"


# ---------------------------------------------------------------- copy on write


def test_fork_allocates_nothing():
    cache = small_cache(num_blocks=2)
    parent = prompt(cache, list(range(7)))
    children = [cache.fork(parent) for _ in range(5)]
    assert num_free(cache) == 0 and cache.stats().num_shared == 2
    assert all(cache.blocks(child).tolist() == cache.blocks(parent).tolist() for child in children)
    cache.check()


def test_one_of_two_copies_before_it_writes():
    cache = small_cache()
    parent = prompt(cache, [1, 2, 3, 4, 5])
    child = cache.fork(parent)
    plan = run(cache, child, [6])
    assert len(plan.copies) == 1 and cache.stats().num_copied == 1
    assert keys_of(cache, parent) == [1, 2, 3, 4, 5] and keys_of(cache, child) == [1, 2, 3, 4, 5, 6]
    assert (cache.blocks(parent) == cache.blocks(child)).tolist() == [True, False]
    assert len(run(cache, parent, [7]).copies) == 0, "alone with its block now"
    cache.check()


def test_a_full_block_is_shared_without_a_copy():
    cache = small_cache()
    parent = prompt(cache, [1, 2, 3, 4])
    child = cache.fork(parent)
    assert len(run(cache, child, [5]).copies) == 0


def test_of_several_writers_in_one_plan_the_last_writes_in_place():
    cache = small_cache()
    seqs = [prompt(cache, [1, 2])]
    seqs += [cache.fork(seqs[0]) for _ in range(3)]
    tail = cache.blocks(seqs[0])[0]
    plan = cache.plan(seqs)
    assert plan.copies[:, 0].tolist() == [tail] * 3 and cache.blocks(seqs[-1]).tolist() == [tail]
    write(cache, plan, [10, 11, 12, 13])
    cache.commit(plan)
    assert [keys_of(cache, seq) for seq in seqs] == [[1, 2, 10 + i] for i in range(4)]
    cache.check()


def test_a_shorter_sibling_does_not_overwrite_what_a_rollback_needs():
    cache = small_cache()
    longer = prompt(cache, [1, 2, 3])
    shorter = cache.fork(longer)
    cache.truncate(shorter, 1)
    plan = cache.plan([longer, shorter])
    write(cache, plan, [8, 9])
    assert len(plan.copies) == 2
    cache.rollback(plan)
    assert keys_of(cache, longer) == [1, 2, 3] and keys_of(cache, shorter) == [1]
    plan = cache.plan([shorter, longer])
    assert len(plan.copies) == 1, "the longer one writes past all that the other needs"
    cache.rollback(plan)
    cache.check()


def test_a_source_is_held_until_its_plan_is_closed():
    cache = small_cache(num_blocks=4, block_size=4)
    parent = prompt(cache, [1, 2])
    child = cache.fork(parent)
    plan = cache.plan([child])
    other = cache.plan([parent])
    assert len(other.copies) == 1, "the first plan may need the block again"
    write(cache, other, [7])
    cache.rollback(plan)
    assert keys_of(cache, child) == [1, 2]
    cache.commit(other)
    assert keys_of(cache, parent) == [1, 2, 7]
    cache.check()


def test_a_copy_that_fails_undoes_the_plan():
    cache = small_cache()
    parent = prompt(cache, [1, 2])
    child = cache.fork(parent)

    def fail(*_):
        raise RuntimeError("no device")

    cache._backend.copy_blocks = fail
    used, copied = cache.stats().num_used, cache.blocks(child).tolist()
    with pytest.raises(RuntimeError, match="no device"):
        cache.plan([child])
    cache.check()
    assert cache.stats().num_used == used and cache.blocks(child).tolist() == copied


def test_beams_go_on_from_their_parents():
    cache = small_cache(num_blocks=32, block_size=2)
    beams = [prompt(cache, [1, 2, 3])]
    beams += [cache.fork(beams[0]) for _ in range(3)]
    history = [[1, 2, 3] for _ in beams]
    rng = np.random.default_rng(0)
    for _ in range(12):
        plan = cache.plan(beams)
        tokens = rng.integers(0, 3, 4).tolist()
        write(cache, plan, tokens)
        cache.commit(plan, tokens)
        parents = rng.integers(0, 4, 4)
        cache.reparent(beams, np.array(beams)[parents])
        cache.check()
        history = [told + [token] for told, token in zip(history, tokens)]
        history = [list(history[parent]) for parent in parents]
        assert [keys_of(cache, beam) for beam in beams] == history


def test_reparent_to_oneself_and_in_a_ring():
    cache = small_cache(num_blocks=12)
    seqs = [prompt(cache, [i] * (i + 3)) for i in range(3)]
    tables = [cache.blocks(seq).tolist() for seq in seqs]
    cache.reparent(seqs, seqs)
    assert [cache.blocks(seq).tolist() for seq in seqs] == tables
    cache.reparent(seqs, seqs[1:] + seqs[:1])
    assert [cache.blocks(seq).tolist() for seq in seqs] == tables[1:] + tables[:1]
    cache.check()


# ---------------------------------------------------------------- sliding window


def test_blocks_out_of_the_window_go_back():
    cache = small_cache(num_blocks=4, block_size=2, window=3, prefix_caching=False)
    seq = cache.add()
    for token in range(50):
        plan = cache.plan([seq])
        seen = range(max(0, token - 2), token + 1)
        assert all(plan.block_tables[0, i // 2] >= 0 for i in seen)
        write(cache, plan, [token])
        cache.commit(plan)
        cache.check()
        assert cache.stats().num_used <= 3
    assert (cache.blocks(seq) == -1).sum() == 24
    assert cache.stats().num_tokens == 50 - 48


def test_the_window_is_that_of_committed_tokens():
    """With window 128 and blocks of 32, the query at position 158 sees position 31; the one at 159 does not."""
    cache = small_cache(num_blocks=8, block_size=32, window=128)
    seq = cache.add()
    run(cache, seq, list(range(158)))
    plan = cache.plan([seq], 4)
    assert plan.block_tables[0, 0] >= 0
    cache.commit(plan, accepted=[0])
    assert cache.blocks(seq)[0] >= 0, "the rejected drafts do not move the window"
    run(cache, seq, [158])
    assert cache.blocks(seq)[0] == -1
    cache.check()


def test_a_fork_keeps_its_window():
    cache = small_cache(num_blocks=8, block_size=2, window=2)
    seq = cache.add()
    run(cache, seq, list(range(6)))
    child = cache.fork(seq)
    run(cache, seq, list(range(6)))
    cache.check()
    assert keys_of(cache, child)[-1] == 5
    run(cache, child, [77, 78])
    assert keys_of(cache, child)[-2:] == [77, 78]
    cache.check()


def test_truncation_only_to_what_the_window_still_holds():
    cache = small_cache(num_blocks=16, block_size=2, window=4)
    seq = cache.add()
    run(cache, seq, list(range(20)))
    assert (cache.blocks(seq) == -1).sum() == 8
    refused(cache, lambda: cache.truncate(seq, 18), ValueError, "position 16 is the first that is left")
    cache.truncate(seq, 19)
    run(cache, seq, [3])
    cache.truncate(seq, 0)
    assert cache.stats().num_used == 0
    run(cache, seq, [1, 2, 3])
    cache.check()


# ---------------------------------------------------------------- the end of a sequence


def test_handles_are_never_given_out_again():
    cache = small_cache(max_sequences=2)
    seen = set()
    for _ in range(20):
        seq = cache.add()
        assert seq not in seen
        seen.add(seq)
        cache.free(seq)
        refused(cache, lambda seq=seq: cache.free(seq), npg.UnknownSequence, f"sequence {seq} was freed")


def test_freed_after_a_plan():
    cache = small_cache(num_blocks=4, block_size=2)
    seq = cache.add()
    plan = cache.plan([seq], 3)
    cache.free(seq, after=plan)
    refused(cache, lambda: cache.length(seq), npg.UnknownSequence, "was freed")
    refused(cache, lambda: cache.free(seq, after=plan), npg.UnknownSequence, "was freed")
    assert cache.stats().num_used == 2 and cache.stats().num_sequences == 0
    write(cache, plan, [5, 6, 7])
    cache.commit(plan, [5, 6, 7])
    cache.check()
    assert (cache.stats().num_used, cache.stats().num_cached) == (0, 1), "what was computed can be found"


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_another_sequence_freed_after_a_plan(end):
    cache = small_cache(num_blocks=4, block_size=2, max_sequences=2)
    a, b = prompt(cache, [1, 2]), cache.add()
    plan = cache.plan([b])
    cache.free(a, after=plan)
    refused(cache, lambda: cache.add(), npg.OutOfBlocks, "max_sequences")
    getattr(cache, end)(plan)
    assert cache.stats().num_sequences == 1
    cache.add()
    cache.check()


# ---------------------------------------------------------------- statistics


def test_statistics():
    cache = small_cache(num_blocks=10, block_size=4, num_host_blocks=3)
    a = prompt(cache, list(range(10)))
    b = cache.fork(a)
    run(cache, b, [77])
    c = prompt(cache, [9] * 5)
    cache.free(c)
    d = prompt(cache, [8] * 2)
    cache.swap_out(d)
    stats = cache.stats()
    assert (stats.num_blocks, stats.num_free, stats.num_cached, stats.num_used) == (10, 5, 1, 4)
    assert stats.num_shared == 2 and stats.num_sequences == 3
    assert stats.num_tokens == 10 + 11 and stats.num_wasted == 2 + 1
    assert stats.num_copied == 1 and stats.block_bytes == 2 * 4 * 4
    assert (stats.num_host_blocks, stats.num_host_free, stats.num_swapped_out, stats.num_swapped_in) == (3, 2, 1, 0)
    assert (stats.num_queried, stats.num_hits) == (10 + 5 + 2, 0)
    assert cache.num_available == 6


def test_block_tables_of_any_sequences():
    cache = small_cache(num_blocks=10, num_host_blocks=2)
    seqs = [prompt(cache, [i] * (3 * i + 1)) for i in range(3)]
    tables = cache.block_tables([seqs[2], seqs[0], seqs[2]])
    assert tables.tolist() == [cache.blocks(seqs[2]).tolist(), [cache.blocks(seqs[0])[0], -1],
                               cache.blocks(seqs[2]).tolist()]
    assert cache.block_tables([]).shape == (0, 0) and tables.dtype == np.int32
    cache.swap_out(seqs[0])
    cache.free(seqs[1])
    refused(cache, lambda: cache.block_tables(seqs), ValueError, f"sequence {seqs[0]} is swapped out")
    refused(cache, lambda: cache.block_tables(seqs[1:]), npg.UnknownSequence, f"sequence {seqs[1]} was freed")


def test_the_table_grows_with_the_longest_sequence():
    cache = small_cache(num_blocks=300, block_size=1)
    seq = cache.add()
    for _ in range(5):
        run(cache, seq, list(range(50)))
        cache.check()
    assert keys_of(cache, seq) == list(range(50)) * 5
    refused(cache, lambda: cache.plan([seq], 51), ValueError, "would have 301 tokens, max_length is 300")
