"""Plan: one model step's decisions as arrays, and the cutting of attention into items of work.

The host decides, a plan carries, a kernel obeys: a backend sees the spec, the pool, q, k, v, the output and a plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit

from .score import visible_start, visible_stop
from .shared_prefix import fill_shared, find_shared, group_size, nothing_shared
from .spec import NO_WINDOW

ITEM_FIELDS = ("seq", "query", "num_queries", "start", "stop", "part", "part_stride", "position")
"""The columns of `Work.items`."""

SEQ, QUERY, NUM_QUERIES, START, STOP, PART, PART_STRIDE, POSITION = range(8)

MIN_SPLIT = 128
"""Tokens below which a split is not worth its partial (FlashInfer's smallest chunk, arXiv:2501.01005)."""

MIN_SAVED = 2048
"""Tokens of keys and values that sharing a prefix must save, beyond what its partials cost: it takes two launches more."""

_visible_start = njit(visible_start)
_visible_stop = njit(visible_stop)


@dataclass(frozen=True)
class Tiling:
    """How a backend wants its work cut.

    Parameters
    ----------
    query_tile : int
        The most query tokens of a sequence that one item attends.
    num_workers : int
        How many (item, kv head) pairs it takes to fill the machine; fewer, and long sequences are split.
    part_cost : int
        In how many tokens' keys and values are as many bytes as in a query token's partial, written and read. Where it
        is known, sequences attend a prefix that they share together, if that saves more than the partials cost; at 0
        they never do.
    """

    query_tile: int
    num_workers: int
    part_cost: int = 0


@dataclass(frozen=True, eq=False)
class Work:
    """A plan's attention, cut into items that any worker can take in any order.

    Attributes
    ----------
    items : int32 [num_items, 8]
        One row an item: a tile of one sequence's query tokens against one split of its keys. Columns: seq (row of the
        block tables), query (its first query token), num_queries, start and stop (key positions, start on a block's
        edge), part (its first partial row, or -1 where it writes straight to the output), part_stride (partial rows
        between its query tokens), position (of its first query token in the sequence).
    merges : int32 [num_merges, 3]
        Query token, first partial row, number of partial rows (consecutive), for each query token that was split.
    num_parts : int
        Partial rows in all; each is [num_q_heads, head_dim] of out and [num_q_heads] of lse, float32.
    shared_items : int32 [num_shared_items, 8]
        Items of several sequences' query tokens against a split of the prefix that they share, all of which they see.
        Columns as in `items`, but query is the first row of `shared_tokens`, part the number of the split, and there is
        no part_stride and no position.
    shared_tokens : int32 [num_shared_tokens, 4]
        Query token, its position, its first partial row (of the first split), 0.
    """

    items: np.ndarray
    merges: np.ndarray
    num_parts: int
    shared_items: np.ndarray
    shared_tokens: np.ndarray


_NOTHING = {dtype: np.empty(0, dtype) for dtype in (np.int32, np.int64)}
NO_COPIES = np.empty((0, 2), np.int32)
NO_SLOTS = np.empty((0, 0), np.int64)


@dataclass(frozen=True, eq=False, init=False)
class Plan:
    """One step's decisions, immutable: which tokens, where they are written, what they attend.

    Attributes
    ----------
    query_starts : int32 [num_seqs + 1]
        The query tokens of sequence i are ``query_starts[i]`` up to ``query_starts[i + 1]``; they are its last
        positions.
    lengths : int32 [num_seqs]
        Tokens in the cache, the query tokens included.
    block_tables : int32 [num_seqs, max_blocks]
        Position to block; entries past the length are never read.
    cut : callable
        Makes the `work` from query_starts, lengths and block_tables.
    seqs : int64 [num_seqs]
        The handles of the sequences; empty for a plan made from arrays.
    positions : int32 [num_tokens]
        Each new token's position in its sequence (what rotary embeddings need).
    slots : int64 [num_tokens]
        Where each new token's key and value are written; -1 writes nothing.
    copies : int32 [num_copies, 2]
        The copy-on-write pairs (source block, target block) that were copied when the plan was made.
    lookahead_slots : int64 [num_seqs, num_lookahead]
        Where the positions after the new tokens may be written while the plan is open; -1 past the longest length.
    """

    query_starts: np.ndarray
    lengths: np.ndarray
    block_tables: np.ndarray
    cut: Callable[[np.ndarray, np.ndarray, np.ndarray], Work]
    seqs: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    copies: np.ndarray
    lookahead_slots: np.ndarray

    def __init__(self, query_starts, lengths, block_tables, cut, seqs=_NOTHING[np.int64], positions=_NOTHING[np.int32],
                 slots=_NOTHING[np.int64], copies=NO_COPIES, lookahead_slots=NO_SLOTS):
        # One update, since nine assignments to a frozen object take as long as planning a batch of fifty.
        self.__dict__.update(query_starts=query_starts, lengths=lengths, block_tables=block_tables, cut=cut, seqs=seqs,
                             positions=positions, slots=slots, copies=copies, lookahead_slots=lookahead_slots)

    @cached_property
    def work(self):
        """The attention, cut into items (`Work`) when it is first asked for: a step that attends nothing pays
        nothing."""
        return self.cut(self.query_starts, self.lengths, self.block_tables)

    @property
    def num_tokens(self):
        """New (query) tokens of all sequences together."""
        return int(self.query_starts[-1])


@njit(cache=True)
def _tile_range(position, num_queries, length, block_size, causal, window):
    """The keys that a tile of queries sees, from a block's edge: (start, stop), equal when it sees none."""
    start = _visible_start(position, window) // block_size * block_size
    stop = _visible_stop(position + num_queries - 1, length, causal)
    return (start, stop) if start < stop else (0, 0)


@njit(cache=True)
def _num_splits(start, stop, split, origin):
    """Splits that [start, stop) takes part in, at least one; their edges are multiples of `split` from `origin` on."""
    return max(1, (stop - origin + split - 1) // split - (start - origin) // split)


@njit(cache=True)
def _count(query_starts, lengths, shared, block_size, query_tile, split, causal, window):
    """How many items, merges, partial rows and shared items a split length makes."""
    num_items = num_merges = num_parts = num_shared = 0
    for seq in range(lengths.size):
        num_queries, prefix = query_starts[seq + 1] - query_starts[seq], shared.prefixes[seq]
        for first in range(0, num_queries, query_tile):
            tile = min(query_tile, num_queries - first)
            position = lengths[seq] - num_queries + first
            start, stop = _tile_range(position, tile, lengths[seq], block_size, causal, window)
            own = _num_splits(max(start, prefix), stop, split, prefix)
            parts = own + (prefix + split - 1) // split
            num_items += own
            if parts > 1:
                num_merges += tile
                num_parts += tile * parts
    for group in range(shared.num_groups):
        tokens, prefix = group_size(query_starts, shared, group)
        num_shared += (tokens + query_tile - 1) // query_tile * ((prefix + split - 1) // split)
    return num_items, num_merges, num_parts, num_shared


@njit(cache=True)
def _fill(query_starts, lengths, shared, block_size, query_tile, split, causal, window, items, merges, first_parts):
    """Write the items and merges that `_count` counted, and each sequence's first partial row and number of them."""
    item = merge = part_row = 0
    for seq in range(lengths.size):
        num_queries, prefix = query_starts[seq + 1] - query_starts[seq], shared.prefixes[seq]
        before = (prefix + split - 1) // split
        for first in range(0, num_queries, query_tile):
            tile = min(query_tile, num_queries - first)
            query = query_starts[seq] + first
            position = lengths[seq] - num_queries + first
            start, stop = _tile_range(position, tile, lengths[seq], block_size, causal, window)
            start = max(start, prefix)
            own = _num_splits(start, stop, split, prefix)
            parts = before + own
            for part in range(own):
                edge = prefix + ((start - prefix) // split + part) * split
                items[item, 0] = seq
                items[item, 1] = query
                items[item, 2] = tile
                items[item, 3] = max(start, edge)
                items[item, 4] = min(stop, edge + split)
                items[item, 5] = part_row + before + part if parts > 1 else -1
                items[item, 6] = parts
                items[item, 7] = position
                item += 1
            first_parts[seq] = part_row, parts
            if parts > 1:
                for token in range(tile):
                    merges[merge, 0] = query + token
                    merges[merge, 1] = part_row + token * parts
                    merges[merge, 2] = parts
                    merge += 1
                part_row += tile * parts


@njit(cache=True)
def _choose_split(query_starts, lengths, shared, block_size, query_tile, max_items, causal, window, min_split):
    """The smallest split, in whole blocks and at least `min_split` tokens, that makes at most `max_items` items."""
    low = (min_split + block_size - 1) // block_size
    high = max(low, (lengths.max() + block_size - 1) // block_size) if lengths.size else low
    while low < high:
        middle = (low + high) // 2
        counts = _count(query_starts, lengths, shared, block_size, query_tile, middle * block_size, causal, window)
        if counts[0] + counts[3] <= max_items:
            high = middle
        else:
            low = middle + 1
    return low * block_size


@njit(cache=True)
def _cut(query_starts, lengths, block_tables, block_size, num_kv_heads, query_tile, num_workers, part_cost, causal,
         window, split, min_split, min_saved):
    shared = nothing_shared(lengths.size)
    if split == 0:
        if part_cost > 0:
            shared = find_shared(query_starts, lengths, block_tables, block_size, query_tile, part_cost, window,
                                 min_saved)
        max_items = max(1, num_workers // num_kv_heads)
        split = _choose_split(query_starts, lengths, shared, block_size, query_tile, max_items, causal, window, min_split)
    num_items, num_merges, num_parts, num_shared = _count(
        query_starts, lengths, shared, block_size, query_tile, split, causal, window)
    items, merges = np.empty((num_items, 8), np.int32), np.empty((num_merges, 3), np.int32)
    first_parts = np.empty((lengths.size, 2), np.int64)
    _fill(query_starts, lengths, shared, block_size, query_tile, split, causal, window, items, merges, first_parts)
    cost = (items[:, 4] - items[:, 3]) * items[:, 2]
    if cost.size and cost.min() < cost.max():
        items = items[np.argsort(-cost, kind="mergesort")]  # the longest first, so that none is left to the end
    shared_items, shared_tokens = fill_shared(query_starts, lengths, shared, query_tile, split, num_shared, first_parts)
    return items, merges, num_parts, shared_items, shared_tokens


def cut_work(query_starts, lengths, block_tables, block_size, num_kv_heads, tiling, causal=True, window=None,
             split_size=None):
    """Cut the attention of a batch into items of work.

    Sequences are tiled by query tokens, and each tile's visible keys are cut into splits when the batch alone does not
    fill the machine, or always where `split_size` fixes their length: then the cuts depend on nothing but the
    sequence itself, and so do the results, bit for bit. Elsewhere, a prefix whose blocks several sequences share may be
    cut out, to be attended by all of them together (`Tiling.part_cost`).

    Parameters
    ----------
    query_starts : int32 [num_seqs + 1]
        As in `Plan`.
    lengths : int32 [num_seqs]
        Tokens in the cache.
    block_tables : int32 [num_seqs, max_blocks]
        As in `Plan`.
    block_size, num_kv_heads : int
        Geometry.
    tiling : Tiling
        What the backend wants.
    causal : bool
        Whether a query sees only the keys up to its own position.
    window : int, optional
        Visible keys, the query's own included.
    split_size : int, optional
        A fixed split length in tokens, rounded up to whole blocks.

    Returns
    -------
    Work

    Examples
    --------
    >>> lengths, tables = np.array([1000], np.int32), np.arange(63, dtype=np.int32)[None]
    >>> work = cut_work(np.array([0, 1], np.int32), lengths, tables, 16, 1, Tiling(1, 4), split_size=512)
    >>> work.items[:, [START, STOP]].tolist(), work.merges.tolist()
    ([[0, 512], [512, 1000]], [[0, 0, 2]])
    """
    split = 0 if split_size is None else -(-split_size // block_size) * block_size
    return Work(*_cut(query_starts, lengths, block_tables, block_size, num_kv_heads, tiling.query_tile, tiling.num_workers,
                      tiling.part_cost, causal, NO_WINDOW if window is None else window, split, MIN_SPLIT, MIN_SAVED))
