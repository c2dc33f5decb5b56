"""The cutting of attention into items: every query token sees each of its keys once, whatever is split or shared."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from numba_paged import plan
from numba_paged.plan import NUM_QUERIES, PART, PART_STRIDE, POSITION, QUERY, SEQ, START, STOP, Tiling, cut_work

BLOCK = 4


def batch(rows, prefixes=()):
    """(query_starts, lengths, tables) of (length, query tokens) a sequence; {sequences: blocks} share their first ones."""
    lengths, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    width = int(-(-lengths.max() // BLOCK)) + 1
    tables = np.arange(lengths.size * width, dtype=np.int32).reshape(lengths.size, width)
    for seqs, blocks in dict(prefixes).items():
        tables[list(seqs), :blocks] = tables[seqs[0], :blocks]
    return np.r_[0, np.cumsum(counts)].astype(np.int32), lengths, tables


def seen_keys(work, query_starts, lengths, tables, causal, window):
    """{(token, partial row or -1): [(block, offset)]} of all items; a shared item has the blocks of its first sequence."""
    seen = {}

    def see(token, position, length, part, item):
        low = 0 if window is None else max(0, position - window + 1)
        high = position + 1 if causal else length
        table = tables[item[SEQ]]
        keys = range(max(item[START], low), min(item[STOP], high))
        seen.setdefault((token, part), []).extend((int(table[k // BLOCK]), k % BLOCK) for k in keys)

    for item in work.items:
        for n in range(item[NUM_QUERIES]):
            part = item[PART] + n * item[PART_STRIDE] if item[PART] >= 0 else -1
            see(item[QUERY] + n, item[POSITION] + n, lengths[item[SEQ]], part, item)
    for item in work.shared_items:
        for token, position, part, _ in work.shared_tokens[item[QUERY] : item[QUERY] + item[NUM_QUERIES]]:
            see(token, position, position + 1, part + item[PART], item)
    return seen


def check(rows, prefixes, tiling, causal=True, window=None, split_size=None):
    """Cut, and hold every query token's keys and partial rows against the definition; returns the `Work`."""
    query_starts, lengths, tables = batch(rows, prefixes)
    work = cut_work(query_starts, lengths, tables, BLOCK, 1, tiling, causal, window, split_size)
    seen = seen_keys(work, query_starts, lengths, tables, causal, window)
    merged = {int(token): range(first, first + count) for token, first, count in work.merges}
    assert sorted(row for rows in merged.values() for row in rows) == list(range(work.num_parts))
    for seq, (length, count) in enumerate(rows):
        for n in range(count):
            token, position = query_starts[seq] + n, length - count + n
            low, high = 0 if window is None else max(0, position - window + 1), position + 1 if causal else length
            wanted = [(int(tables[seq, k // BLOCK]), k % BLOCK) for k in range(low, high)]
            places = merged.get(int(token), (-1,))
            assert sorted(key for place in places for key in seen.pop((token, place))) == sorted(wanted)
    assert not seen
    return work


ROWS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 7)).map(lambda row: (row[0], min(row))), min_size=1, max_size=9)


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(ROWS, st.data(), st.integers(1, 5), st.integers(1, 40), st.booleans(), st.none() | st.integers(1, 60),
       st.none() | st.integers(1, 30))
def test_every_key_is_seen_once(rows, data, query_tile, num_workers, causal, window, split_size):
    seqs = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    groups = [tuple(seqs[a:b]) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True) if b - a > 1]
    prefixes = {}
    for group in groups:
        most = min(rows[seq][0] for seq in group) // BLOCK
        prefixes[group] = data.draw(st.integers(0, most))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MIN_SAVED", 1)
        patch.setattr(plan, "MIN_SPLIT", 8)
        check(rows, prefixes, Tiling(query_tile, num_workers, data.draw(st.integers(0, 1))), causal, window, split_size)


@pytest.fixture
def any_saving(monkeypatch):
    """Groups that save a token are made."""
    monkeypatch.setattr(plan, "MIN_SAVED", 1)


def shared(rows, prefixes, tiling=Tiling(4, 1, 1), **options):
    """[sequences of an item, tokens of it] of the shared items."""
    work = check(rows, prefixes, tiling, **options)
    seq_of = np.repeat(np.arange(len(rows)), [count for _, count in rows])
    return [(sorted(set(seq_of[work.shared_tokens[i[QUERY] : i[QUERY] + i[NUM_QUERIES], 0]].tolist())),
             int(i[STOP] - i[START])) for i in work.shared_items]


def test_a_group_is_found_among_others(any_saving):
    assert shared([(50, 1), (60, 1), (50, 1), (70, 1)], {(0, 2): 10, (1, 3): 12}) == [([0, 2], 40), ([1, 3], 48)]


def test_the_prefix_that_saves_most_is_taken(any_saving):
    """Of five that share some blocks, two share 20: 4 · 4 blocks are saved against 1 · 20, and 4 · 8."""
    rows = [(100, 1)] * 5
    assert shared(rows, {(0, 1, 2, 3, 4): 4, (0, 1): 20}, Tiling(8, 1, 1)) == [([0, 1], 80), ([2, 3, 4], 16)]
    assert shared(rows, {(0, 1, 2, 3, 4): 8, (0, 1): 20}, Tiling(8, 1, 1)) == [([0, 1, 2, 3, 4], 32)]


def test_only_whole_blocks_before_the_queries_are_shared(any_saving):
    assert shared([(41, 1), (41, 1)], {(0, 1): 10}) == [([0, 1], 40)]
    assert shared([(40, 1), (41, 1)], {(0, 1): 10}) == [([0, 1], 36)]
    assert shared([(43, 3), (60, 1)], {(0, 1): 10}) == [([0, 1], 40)]


def test_more_tokens_than_a_tile_are_cut_evenly(any_saving):
    assert [len(seqs) for seqs, _ in shared([(50, 1)] * 9, {tuple(range(9)): 10})] == [3, 3, 3]


@pytest.mark.parametrize("options", [
    {"split_size": 16}, {"window": 49}, {"tiling": Tiling(4, 1)}, {"tiling": Tiling(1, 1, 1)},
])  # fmt: skip
def test_nothing_is_shared(options, any_saving):
    """With a fixed split, where a window hides the first key, where the backend does not ask for it, or saves nothing."""
    assert shared([(50, 1), (50, 1)], {(0, 1): 10}) and not shared([(50, 1), (50, 1)], {(0, 1): 10}, **options)


def test_sharing_must_save_enough():
    def is_shared(num_seqs, blocks, part_cost=1):
        return bool(shared([(1100, 1)] * num_seqs, {tuple(range(num_seqs)): blocks}, Tiling(64, 1, part_cost)))

    least = -(-(plan.MIN_SAVED + 2 * 16) // (15 * BLOCK))
    assert is_shared(16, least) and not is_shared(16, least - 1)
    assert not is_shared(16, least, part_cost=64)
