"""Plan: one model step's decisions as arrays, and the cutting of attention into items of work.

The host decides, a plan carries, a kernel obeys: a backend sees the spec, the pool, q, k, v, the output and a plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit

from .score import visible_start, visible_stop
from .spec import NO_WINDOW

ITEM_FIELDS = ("seq", "query", "num_queries", "start", "stop", "part", "part_stride", "position")
"""The columns of `Work.items`."""

SEQ, QUERY, NUM_QUERIES, START, STOP, PART, PART_STRIDE, POSITION = range(8)

MIN_SPLIT = 128
"""Tokens below which a split is not worth its partial (FlashInfer's smallest chunk, arXiv:2501.01005)."""

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
    """

    query_tile: int
    num_workers: int


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
    """

    items: np.ndarray
    merges: np.ndarray
    num_parts: int


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
        Makes the `work` from query_starts and lengths.
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
    cut: Callable[[np.ndarray, np.ndarray], Work]
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
        return self.cut(self.query_starts, self.lengths)

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
def _count(query_starts, lengths, block_size, query_tile, split, causal, window):
    """How many items, merges and partial rows a split length makes."""
    num_items = num_merges = num_parts = 0
    for seq in range(lengths.size):
        num_queries = query_starts[seq + 1] - query_starts[seq]
        for first in range(0, num_queries, query_tile):
            tile = min(query_tile, num_queries - first)
            position = lengths[seq] - num_queries + first
            start, stop = _tile_range(position, tile, lengths[seq], block_size, causal, window)
            parts = max(1, (stop + split - 1) // split - start // split)
            num_items += parts
            if parts > 1:
                num_merges += tile
                num_parts += tile * parts
    return num_items, num_merges, num_parts


@njit(cache=True)
def _fill(query_starts, lengths, block_size, query_tile, split, causal, window, items, merges):
    """Write the items and merges that `_count` counted; split edges are multiples of `split` from position 0."""
    item = merge = part_row = 0
    for seq in range(lengths.size):
        num_queries = query_starts[seq + 1] - query_starts[seq]
        for first in range(0, num_queries, query_tile):
            tile = min(query_tile, num_queries - first)
            query = query_starts[seq] + first
            position = lengths[seq] - num_queries + first
            start, stop = _tile_range(position, tile, lengths[seq], block_size, causal, window)
            parts = max(1, (stop + split - 1) // split - start // split)
            for part in range(parts):
                edge = (start // split + part) * split
                items[item, 0] = seq
                items[item, 1] = query
                items[item, 2] = tile
                items[item, 3] = max(start, edge)
                items[item, 4] = min(stop, edge + split)
                items[item, 5] = part_row + part if parts > 1 else -1
                items[item, 6] = parts
                items[item, 7] = position
                item += 1
            if parts > 1:
                for token in range(tile):
                    merges[merge, 0] = query + token
                    merges[merge, 1] = part_row + token * parts
                    merges[merge, 2] = parts
                    merge += 1
                part_row += tile * parts


@njit(cache=True)
def _choose_split(query_starts, lengths, block_size, query_tile, max_items, causal, window, min_split):
    """The smallest split, in whole blocks and at least `min_split` tokens, that makes at most `max_items` items."""
    low = (min_split + block_size - 1) // block_size
    high = max(low, (lengths.max() + block_size - 1) // block_size) if lengths.size else low
    while low < high:
        middle = (low + high) // 2
        items, _, _ = _count(query_starts, lengths, block_size, query_tile, middle * block_size, causal, window)
        if items <= max_items:
            high = middle
        else:
            low = middle + 1
    return low * block_size


@njit(cache=True)
def _cut(query_starts, lengths, block_size, num_kv_heads, query_tile, num_workers, causal, window, split, min_split):
    if split == 0:
        max_items = max(1, num_workers // num_kv_heads)
        split = _choose_split(query_starts, lengths, block_size, query_tile, max_items, causal, window, min_split)
    num_items, num_merges, num_parts = _count(query_starts, lengths, block_size, query_tile, split, causal, window)
    items = np.empty((num_items, 8), np.int32)
    merges = np.empty((num_merges, 3), np.int32)
    _fill(query_starts, lengths, block_size, query_tile, split, causal, window, items, merges)
    cost = (items[:, 4] - items[:, 3]) * items[:, 2]
    if cost.size and cost.min() < cost.max():
        items = items[np.argsort(-cost, kind="mergesort")]  # the longest first, so that none is left to the end
    return items, merges, num_parts


def cut_work(query_starts, lengths, block_size, num_kv_heads, tiling, causal=True, window=None, split_size=None):
    """Cut the attention of a batch into items of work.

    Sequences are tiled by query tokens, and each tile's visible keys are cut into splits when the batch alone does not
    fill the machine, or always where `split_size` fixes their length: then the cuts depend on nothing but the
    sequence itself, and so do the results, bit for bit.

    Parameters
    ----------
    query_starts : int32 [num_seqs + 1]
        As in `Plan`.
    lengths : int32 [num_seqs]
        Tokens in the cache.
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
    >>> lengths = np.array([1000], np.int32)
    >>> work = cut_work(np.array([0, 1], np.int32), lengths, 16, 1, Tiling(1, 4), split_size=512)
    >>> work.items[:, [START, STOP]].tolist(), work.merges.tolist()
    ([[0, 512], [512, 1000]], [[0, 0, 2]])
    """
    split = 0 if split_size is None else -(-split_size // block_size) * block_size
    return Work(*_cut(query_starts, lengths, block_size, num_kv_heads, tiling.query_tile, tiling.num_workers, causal,
                      NO_WINDOW if window is None else window, split, MIN_SPLIT))
