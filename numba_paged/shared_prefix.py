"""Sequences that share their first blocks: found in the block tables, to attend what they share together.

Items of one query token each would read a shared block once for each sequence. As rows of one tile they read it once,
and each sequence's result is merged with that over its own blocks (arXiv:2402.05099; with several levels in
arXiv:2501.01005). Sequences share a prefix with one group only; the group is chosen that saves the most.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .score import visible_start

_visible_start = njit(visible_start)


class Shared(NamedTuple):
    """Groups of sequences that share a prefix.

    Attributes
    ----------
    num_groups : int
        How many.
    prefixes : int64 [num_seqs]
        Tokens that a sequence attends with its group; 0 if it is in none.
    members : int64 [num_members]
        The sequences of the groups, one group after the other.
    starts : int64 [num_groups + 1]
        Group g has the members ``starts[g]`` up to ``starts[g + 1]``.
    """

    num_groups: int
    prefixes: np.ndarray
    members: np.ndarray
    starts: np.ndarray


@njit(cache=True)
def nothing_shared(num_seqs):
    """A `Shared` without groups."""
    return Shared(0, np.zeros(num_seqs, np.int64), np.empty(0, np.int64), np.zeros(1, np.int64))


@njit(cache=True)
def _chain_by_first_block(block_tables, usable):
    """(first, following): sequences whose first block is the same, as chains; `first` are the chains' first ones.

    `usable` are each sequence's whole blocks before its query tokens; without one it is in no chain.
    """
    size = 16
    while size < 2 * usable.size:
        size *= 2
    heads, lasts = np.full(size, -1, np.int64), np.empty(size, np.int64)
    following, first, count = np.full(usable.size, -1, np.int64), np.empty(usable.size, np.int64), 0
    for seq in range(usable.size):
        if usable[seq] == 0:
            continue
        block = block_tables[seq, 0]
        at = (block * np.int64(2654435761) >> 7) & (size - 1)
        while heads[at] >= 0 and block_tables[heads[at], 0] != block:
            at = (at + 1) & (size - 1)
        if heads[at] < 0:
            heads[at] = seq
        else:
            if heads[at] == lasts[at]:  # the second of its chain
                first[count] = heads[at]
                count += 1
            following[lasts[at]] = seq
        lasts[at] = seq
    return first[:count], following


@njit(cache=True)
def _common_blocks(block_tables, usable, seqs, common):
    """How many blocks each of the sequences has in common with the first of them."""
    for i in range(seqs.size):
        most, blocks = min(usable[seqs[0]], usable[seqs[i]]), 0
        while blocks < most and block_tables[seqs[0], blocks] == block_tables[seqs[i], blocks]:
            blocks += 1
        common[i] = blocks


@njit(cache=True)
def _best_prefix(common):
    """How many blocks the first sequence should share with those that have as many in common with it, to save the most."""
    ordered = np.sort(common[1:])[::-1]
    best = saved = 0
    for i in range(ordered.size):
        if ordered[i] * (i + 1) > saved:
            best, saved = ordered[i], ordered[i] * (i + 1)
    return best


@njit(cache=True)
def find_shared(query_starts, lengths, block_tables, block_size, query_tile, part_cost, window, min_saved):
    """The groups that save more than `min_saved` tokens of keys and values, see `plan.Tiling`.

    Only whole blocks before the query tokens are shared, and none by a sequence whose window hides its first key.
    """
    num_seqs = lengths.size
    num_queries = query_starts[1:] - query_starts[:-1]
    usable = np.zeros(num_seqs, np.int64)
    for seq in range(num_seqs):
        if 0 < num_queries[seq] <= query_tile and _visible_start(lengths[seq] - 1, window) <= 0:
            usable[seq] = (lengths[seq] - num_queries[seq]) // block_size
    first, following = _chain_by_first_block(block_tables, usable)
    shared = nothing_shared(num_seqs)
    if first.size == 0:
        return shared
    members, starts = np.empty(num_seqs, np.int64), np.zeros(num_seqs + 1, np.int64)
    chain, common = np.empty(num_seqs, np.int64), np.empty(num_seqs, np.int64)
    num_groups = num_members = 0
    for seq in first:
        size = 0
        while seq >= 0:
            chain[size] = seq
            seq = following[seq]
            size += 1
        while size > 1:
            _common_blocks(block_tables, usable, chain[:size], common)
            blocks, tokens, kept, joined = _best_prefix(common[:size]), 0, 0, num_members
            for i in range(size):
                if common[i] >= blocks:
                    members[joined] = chain[i]
                    joined += 1
                    tokens += num_queries[chain[i]]
            readings = joined - num_members - (tokens + query_tile - 1) // query_tile
            is_group = blocks * block_size * readings - 2 * part_cost * tokens >= min_saved
            for i in range(1, size):
                if not is_group or common[i] < blocks:
                    chain[kept] = chain[i]
                    kept += 1
            size = kept
            if is_group:
                shared.prefixes[members[num_members:joined]] = blocks * block_size
                num_groups, num_members = num_groups + 1, joined
                starts[num_groups] = joined
    return Shared(num_groups, shared.prefixes, members[:num_members], starts[: num_groups + 1])


@njit(cache=True)
def group_size(query_starts, shared, group):
    """(query tokens, tokens of the prefix) of a group."""
    members = shared.members[shared.starts[group] : shared.starts[group + 1]]
    tokens = 0
    for seq in members:
        tokens += query_starts[seq + 1] - query_starts[seq]
    return tokens, shared.prefixes[members[0]]


@njit(cache=True)
def fill_shared(query_starts, lengths, shared, query_tile, split, num_items, first_parts):
    """`Work.shared_items` and `Work.shared_tokens`; `first_parts` are each sequence's first partial row and number."""
    num_tokens = 0
    for seq in shared.members:
        num_tokens += query_starts[seq + 1] - query_starts[seq]
    items, tokens = np.zeros((num_items, 8), np.int32), np.zeros((num_tokens, 4), np.int32)
    item = row = 0
    for group in range(shared.num_groups):
        first_row = row
        for seq in shared.members[shared.starts[group] : shared.starts[group + 1]]:
            num_queries = query_starts[seq + 1] - query_starts[seq]
            for token in range(num_queries):
                tokens[row, 0] = query_starts[seq] + token
                tokens[row, 1] = lengths[seq] - num_queries + token
                tokens[row, 2] = first_parts[seq, 0] + token * first_parts[seq, 1]
                row += 1
        count, prefix = group_size(query_starts, shared, group)
        num_tiles = (count + query_tile - 1) // query_tile
        for tile in range(num_tiles):
            first, last = tile * count // num_tiles, (tile + 1) * count // num_tiles
            for part in range((prefix + split - 1) // split):
                items[item, 0] = shared.members[shared.starts[group]]
                items[item, 1] = first_row + first
                items[item, 2] = last - first
                items[item, 3] = part * split
                items[item, 4] = min(prefix, (part + 1) * split)
                items[item, 5] = part
                item += 1
    return items, tokens
