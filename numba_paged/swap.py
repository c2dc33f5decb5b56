"""HostPool: blocks that were moved out of the pool, to make room, and are moved back.

A host block remembers the block that it is a copy of, by its number and the uid of what it held. As long as that block
still holds the same, the two are equal: the next sequence that shares it is moved out without another copy, and comes
back to the shared block. A uid is never used twice, so a block that was written or given away since is noticed.
Source: swapping of sequence groups, vLLM paper (arXiv:2309.06180, section 4.5).
"""

import numpy as np

from .blocks import HAS_HOST, HASH, NUM_CACHED, NUM_FREE, REFS, UID, BlockPool, drop_block, share_block
from .compiled import bare
from .errors import OutOfBlocks
from .prefix_cache import find_block, hash_prefix, publish_block, take_block
from .sequences import CHAIN, FORKED, KNOWN, NO_BLOCK, START, STATE, SWAPPED


@bare
def _move_out(blocks, stack, counts, rows, table, row, hosts):
    """Write the host blocks into a row's table, and drop the blocks that were there."""
    start = rows[row, START]
    for i in range(hosts.size - 1, -1, -1):
        drop_block(blocks, stack, counts, table[row, start + i])
        table[row, start + i] = hosts[i]
    rows[row, STATE] = SWAPPED


@bare
def _find_resident(blocks, ids, counts, index, ids_of, factors, rows, table, row, origins, origin_uids, host_ids_of,
                   found):
    """Fill `found` with the blocks of the pool that equal a row's host blocks, or NO_BLOCK: (blocks to take,
    available).

    A block whose ids are known is the one published for them, if there is one; another is the one that was moved out.
    """
    block_size, start = host_ids_of.shape[1], rows[row, START]
    parent, num_needed, unbroken = rows[row, CHAIN], 0, True
    for i in range(found.size):
        host = table[row, start + i]
        block = NO_BLOCK
        if (start + i + 1) * block_size <= rows[row, KNOWN]:
            if unbroken:
                hashed = hash_prefix(factors, parent, host_ids_of[host], 0)
                block = find_block(ids, index, ids_of, parent, host_ids_of[host], 0, hashed)
                unbroken = block != NO_BLOCK
                parent = ids[block, UID]
        else:
            origin = origins[host]
            if ids[origin, UID] == origin_uids[host] and (blocks[origin, REFS] or blocks[origin, HASH]):
                block = origin
        num_needed += block == NO_BLOCK or blocks[block, REFS] == 0
        found[i] = block
    return num_needed, counts[NUM_FREE] + counts[NUM_CACHED]


@bare
def _move_in(blocks, ids, stack, counts, index, ids_of, factors, rows, table, row, host_ids_of, found):
    """Give a row the blocks that were found, then new ones for the rest, and publish these again."""
    block_size, start = host_ids_of.shape[1], rows[row, START]
    for i in range(found.size):
        if found[i] != NO_BLOCK:
            share_block(blocks, counts, found[i])
    for i in range(found.size):
        host, block = table[row, start + i], found[i]
        if block == NO_BLOCK:
            block = take_block(blocks, ids, stack, counts, index)
        table[row, start + i] = block
        if (start + i + 1) * block_size <= rows[row, KNOWN]:
            if found[i] == NO_BLOCK:
                parent = rows[row, CHAIN]
                hashed = hash_prefix(factors, parent, host_ids_of[host], 0)
                publish_block(blocks, ids, index, ids_of, block, parent, host_ids_of[host], 0, hashed)
            rows[row, CHAIN] = ids[block, UID]
    rows[row, STATE] = FORKED


class HostPool:
    """Blocks on the host, each a copy of one that was in the pool.

    Parameters
    ----------
    num_blocks : int
        How many.
    keys, values : array [num_layers, num_blocks, block_size, num_kv_heads, head_dim]
        The pool whose blocks are moved.
    bits : numpy.dtype
        The integers that its numbers are moved as.
    backend : Backend
        Moves them.
    prefixes : PrefixCache
        The blocks' states and prefixes.
    sequences : SequenceTables
        The sequences.

    Raises
    ------
    ValueError
        If num_blocks is not a whole number >= 1.
    """

    def __init__(self, num_blocks, keys, values, bits, backend, prefixes, sequences):
        self.blocks = BlockPool(num_blocks)
        self._pools, self._backend = (keys, values), backend
        self._prefixes, self._sequences, self._pool = prefixes, sequences, prefixes.pool
        n, block_size = self.blocks.num_blocks, keys.shape[2]
        self._stores = tuple(np.zeros((keys.shape[0], n, *keys.shape[2:]), bits) for _ in range(2))
        self._ids_of = np.zeros((n, block_size), np.int32)
        self._origins, self._origin_uids = np.zeros(n, np.int32), np.zeros(n, np.int64)
        self._copies = np.zeros(self._pool.num_blocks, np.int32)  # where a block's copy is, if it has one
        self.num_moved_out = self.num_moved_in = 0
        self._pool.counts[HAS_HOST] = 1

    def held(self, row):
        """The host blocks of a row that is swapped out.

        Parameters
        ----------
        row : int
            The row.

        Returns
        -------
        numpy.ndarray of int32
            A view.
        """
        return self._sequences.blocks(row)[self._sequences.starts[row] :]

    def move_out(self, row):
        """Move a row's blocks to the host; one that has an equal there is only counted.

        Parameters
        ----------
        row : int
            A live row that no plan holds.

        Raises
        ------
        OutOfBlocks
            If the host pool has too few free blocks; nothing was changed.
        """
        pool, sequences = self._pool, self._sequences
        blocks = self.held(row)
        hosts = self._copies[blocks]
        equal = ((self.blocks.refs[hosts] > 0) & (self._origins[hosts] == blocks)
                 & (self._origin_uids[hosts] == pool.uids[blocks]))
        moved = blocks[~equal]
        if moved.size > self.blocks.num_free:
            raise OutOfBlocks(f"{moved.size} blocks wanted in the host pool, {self.blocks.num_free} of "
                              f"{self.blocks.num_blocks} are free")
        with self._backend.on(keys=self._pools[0], values=self._pools[1]):
            data = [self._backend.read_blocks(array, moved) for array in self._pools]
        self.blocks.share(hosts[equal])
        hosts[~equal] = new = self.blocks.allocate(moved.size)
        for store, bits in zip(self._stores, data):
            store[:, new] = bits
        self._copies[moved], self._origins[new], self._origin_uids[new] = new, moved, pool.uids[moved]
        if self._prefixes.enabled:
            self._ids_of[new] = self._prefixes.ids_of[moved]
        if sequences.starts[row] < sequences.known[row] // sequences.block_size:
            sequences.chains[row] = pool.parents[blocks[0]]
        self.num_moved_out += moved.size
        _move_out(pool.blocks, pool.stack, pool.counts, sequences.rows, sequences.table, row, hosts)

    def move_in(self, row):
        """Move a row's blocks back; one that has an equal in the pool shares it instead.

        Parameters
        ----------
        row : int
            A row that is swapped out.

        Raises
        ------
        OutOfBlocks
            If the pool has too few available blocks; nothing was changed.
        """
        pool, sequences, index = self._pool, self._sequences, self._prefixes.arrays
        hosts = self.held(row).copy()
        found = np.empty(hosts.size, np.int32)
        needed, available = _find_resident(pool.blocks, pool.ids, pool.counts, *index, sequences.rows, sequences.table,
                                           row, self._origins, self._origin_uids, self._ids_of, found)
        if needed > available:
            raise OutOfBlocks(f"{needed} blocks wanted to swap the sequence in, {available} of {pool.num_blocks} are "
                              f"available")
        _move_in(*pool.arrays, *index, sequences.rows, sequences.table, row, self._ids_of, found)
        missing = found == NO_BLOCK
        new, sources = self.held(row)[missing], hosts[missing]
        with self._backend.on(keys=self._pools[0], values=self._pools[1]):
            for array, store in zip(self._pools, self._stores):
                self._backend.write_blocks(array, new, store[:, sources])
        self._origins[sources], self._origin_uids[sources] = new, pool.uids[new]
        self._copies[new] = sources
        self.num_moved_in += new.size
        self.blocks.release(hosts)

    def drop(self, row):
        """Give back the host blocks of a row that is swapped out; then it holds none.

        Parameters
        ----------
        row : int
            The row.
        """
        self.blocks.release(self.held(row))
        self._sequences.blocks(row)[:] = NO_BLOCK
        self._sequences.num_blocks[row] = self._sequences.starts[row] = 0
