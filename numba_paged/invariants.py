"""What must always hold between the blocks, the sequences, the prefix index and the open plans.

Each check raises `CorruptState` with the first thing that it finds wrong. What holds inside of the pool or of the rows
alone is proved there.
"""

import numpy as np

from .blocks import HASH, LAST_UID, PARENT, UID
from .compiled import bare
from .errors import CorruptState
from .prefix_cache import EMPTY, find_block, hash_prefix
from .sequences import CHAIN, FREE, KNOWN, LEAVING, LIVE, NO_BLOCK, START, STATE, SWAPPED, UNKNOWN


def _check_counts(pool, held, what, holders):
    """The references of a pool are the times that its blocks are held."""
    if held.size and not (held.min() >= 0 and held.max() < pool.num_blocks):
        raise CorruptState(f"a table holds a {what} out of range: {held.min()}..{held.max()}")
    counted = np.bincount(held, minlength=pool.num_blocks)
    wrong = np.flatnonzero(counted != pool.refs)
    if wrong.size:
        block = wrong[0]
        raise CorruptState(f"{what} {block} has {pool.refs[block]} references, {holders} hold {counted[block]}")


def check_references(pool, sequences, plans, host_blocks):
    """Each block has one reference for each table entry and each open plan that holds it, here and on the host.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    sequences : SequenceTables
        Whose tables hold them.
    plans : iterable of Plan
        The open plans, that hold the sources of their copies.
    host_blocks : BlockPool or None
        The blocks on the host.

    Raises
    ------
    CorruptState
        If a block has more or fewer.
    """
    held, states = sequences.held(), sequences.states
    resident = sequences.table[held & (sequences.in_pool() | (states == LEAVING))[:, None]]
    holds = np.concatenate([resident, *(plan.copies[:, 0] for plan in plans)])
    _check_counts(pool, holds, "block", "tables and open plans")
    if host_blocks is not None:
        host_blocks.check()
        swapped = sequences.table[held & (states == SWAPPED)[:, None]]
        _check_counts(host_blocks, swapped, "host block", "swapped out sequences")


def check_tails(pool, sequences):
    """A block that is written without another look at it is held by one row only, and not published.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    sequences : SequenceTables
        Whose last blocks they are.

    Raises
    ------
    CorruptState
        If there is one that is not.
    """
    free_slots = sequences.num_blocks * sequences.block_size - sequences.lengths
    rows = np.flatnonzero((sequences.states == LIVE) & (sequences.planned == 0) & (free_slots > 0))
    tails = sequences.table[rows, sequences.num_blocks[rows] - 1]
    wrong = np.flatnonzero((pool.refs[tails] != 1) | (pool.hashes[tails] != 0))
    if wrong.size:
        block = tails[wrong[0]]
        raise CorruptState(f"block {block} is sequence {sequences.handles[rows[wrong[0]]]}'s own last one, but is "
                           f"published or has {pool.refs[block]} references")


def _num_reserved(plan):
    """Positions past its new tokens that a plan has blocks for, of each sequence."""
    return (plan.lookahead_slots >= 0).sum(axis=1) if plan.lookahead_slots.size else 0


def check_plans(sequences, open_plans):
    """The planned positions are those of the open plans, the leaving rows those that a plan closes.

    Parameters
    ----------
    sequences : SequenceTables
        The rows.
    open_plans : dict of Plan to list of int
        Each open plan, and the rows that are freed when it is closed.

    Raises
    ------
    CorruptState
        If they are not.
    """
    planned = np.zeros_like(sequences.planned)
    for plan in open_plans:
        rows = plan.seqs & (sequences.num_rows - 1)
        planned[rows] += plan.lengths - sequences.lengths[rows] + _num_reserved(plan)
    wrong = np.flatnonzero(planned != sequences.planned)
    if wrong.size:
        row = wrong[0]
        raise CorruptState(f"sequence {sequences.handles[row]} has {sequences.planned[row]} planned positions, open "
                           f"plans have {planned[row]}")
    leaving = sorted(row for rows in open_plans.values() for row in rows)
    if leaving != np.flatnonzero(sequences.states == LEAVING).tolist():
        raise CorruptState(f"the rows that are leaving are not those that wait for an open plan: {leaving}")


@bare
def _find_lost(blocks, ids, index, ids_of, factors, published):
    """A published block that is not found under its own key, or NO_BLOCK."""
    for block in published:
        parent, tokens = ids[block, PARENT], ids_of[block]
        hashed = hash_prefix(factors, parent, tokens, 0)
        if hashed != blocks[block, HASH] or find_block(ids, index, ids_of, parent, tokens, 0, hashed) != block:
            return block
    return NO_BLOCK


@bare
def _find_stray(blocks, ids, rows, table, block_size):
    """A block (row, column) all of whose ids are known but that is not published under the one before it, or (-1,
    -1)."""
    for row in range(rows.shape[0]):
        if rows[row, STATE] == FREE or rows[row, STATE] == SWAPPED or rows[row, KNOWN] == UNKNOWN:
            continue
        first, last = rows[row, START], rows[row, KNOWN] // block_size - 1
        for column in range(first, last + 1):
            block = table[row, column]
            above = ids[table[row, column - 1], UID] if column > first else ids[block, PARENT]
            if blocks[block, HASH] == 0 or ids[block, PARENT] != above:
                return row, column
        if last >= first and rows[row, CHAIN] != ids[table[row, last], UID]:
            return row, last
    return -1, -1


def check_prefixes(prefixes, sequences, sliding):
    """The index holds the published blocks, and sequences' blocks are published under each other.

    Parameters
    ----------
    prefixes : PrefixCache
        The index.
    sequences : SequenceTables
        The sequences.
    sliding : bool
        Whether a window slides: then parents are dropped before their children.

    Raises
    ------
    CorruptState
        If that does not hold.
    """
    pool = prefixes.pool
    published = np.flatnonzero(pool.hashes)
    entered = np.sort(prefixes.index[prefixes.index != EMPTY] & 0xFFFFFFFF)
    if not np.array_equal(entered, published):
        wrong = np.setxor1d(entered, published)
        raise CorruptState(f"the index holds {entered.size} blocks, {published.size} are published; the first that "
                           f"differs is {wrong[0] if wrong.size else 'there twice'}")
    lost = _find_lost(pool.blocks, pool.ids, *prefixes.arrays, published)
    if lost != NO_BLOCK:
        raise CorruptState(f"block {lost} is not what the index finds for its prefix")
    if np.unique(pool.uids[published]).size < published.size or pool.uids.max() > pool.counts[LAST_UID]:
        raise CorruptState("two published blocks have the same uid, or one a uid that was not given out")
    if not sliding:
        _check_parents(prefixes, published)
    row, column = _find_stray(pool.blocks, pool.ids, sequences.rows, sequences.table, prefixes.ids_of.shape[1])
    if row >= 0:
        raise CorruptState(f"block {sequences.table[row, column]}, number {column} of sequence "
                           f"{sequences.handles[row]}, is not published under the block before it")


def _check_parents(prefixes, published):
    """Each parent is a root or published, held at least as often as its children, and evicted after them."""
    pool = prefixes.pool
    order = np.zeros(pool.num_blocks, np.int64)
    cached = pool.cached_blocks()
    order[cached] = np.arange(cached.size)
    block_of = dict(zip(pool.uids[published].tolist(), published.tolist()))
    roots = set(prefixes.roots.values())
    for block in published.tolist():
        uid = int(pool.parents[block])
        parent = block_of.get(uid)
        if parent is None and uid not in roots:
            raise CorruptState(f"block {block} is published under {uid}, which is neither a root nor published")
        if parent is None:
            continue
        if pool.refs[parent] < pool.refs[block]:
            raise CorruptState(f"block {block} has {pool.refs[block]} references, the one before it, {parent}, only "
                               f"{pool.refs[parent]}")
        if pool.refs[parent] == 0 and order[parent] < order[block]:
            raise CorruptState(f"block {parent} would be evicted before block {block}, which is found through it")
