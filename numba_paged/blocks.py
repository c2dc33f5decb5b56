"""BlockPool: the free stack and the reference counts. SequenceTables: which sequence has which blocks.

All state is flat NumPy arrays; the loops over them are compiled. A block is free (reference count 0, on the stack) or in
use (one reference per table entry that names it, and one per open plan that still needs it).
"""

import numpy as np
from numba import njit

from .errors import CorruptState, OutOfBlocks, UnknownSequence
from .sizing import num_blocks_for

FREE_TABLE_ENTRY = -1
"""What the table holds past a sequence's blocks; no kernel reads it."""


@njit(cache=True)
def take_blocks(free, num_free, refs, out):
    """Pop `out.size` blocks off the free stack with one reference each; the caller has checked that they are there."""
    for i in range(out.size):
        num_free[0] -= 1
        block = free[num_free[0]]
        refs[block] = 1
        out[i] = block


@njit(cache=True)
def drop_block(free, num_free, refs, block):
    """Take one reference off a block; the last one puts it onto the free stack."""
    refs[block] -= 1
    if refs[block] == 0:
        free[num_free[0]] = block
        num_free[0] += 1


@njit(cache=True)
def drop_blocks(free, num_free, refs, blocks):
    """Take one reference off each block, the last first: what `take_blocks` gave goes back in its order."""
    for i in range(blocks.size - 1, -1, -1):
        drop_block(free, num_free, refs, blocks[i])


class BlockPool:
    """Which blocks are free, and how many references the others have.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool, ids 0 up to ``num_blocks - 1``; none is special.

    Raises
    ------
    ValueError
        If it is not a whole number >= 1.

    Notes
    -----
    Allocation pops a stack, so it costs the same at any pool size, and the block freed last is used next, while it is
    still in the caches. Source: the block allocator of the vLLM paper (arXiv:2309.06180, section 4.2).

    Examples
    --------
    >>> pool = BlockPool(4)
    >>> blocks = pool.allocate(2)
    >>> pool.share(blocks[:1])
    >>> pool.release(blocks)
    >>> blocks.tolist(), pool.num_free
    ([0, 1], 3)
    """

    def __init__(self, num_blocks):
        if int(num_blocks) != num_blocks or not 1 <= num_blocks < 2**31:
            raise ValueError(f"num_blocks must be a whole number from 1 to 2**31 - 1, got {num_blocks!r}")
        self.num_blocks = int(num_blocks)
        self.refs = np.zeros(self.num_blocks, np.int32)
        self.free = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self.top = np.array([self.num_blocks])

    @property
    def num_free(self):
        """Blocks that can be allocated now."""
        return int(self.top[0])

    def allocate(self, n):
        """Take n blocks, each with one reference.

        Parameters
        ----------
        n : int
            How many.

        Returns
        -------
        numpy.ndarray of int32, [n]

        Raises
        ------
        ValueError
            If n is negative.
        OutOfBlocks
            If fewer are free; none was taken.
        """
        if int(n) != n or n < 0:
            raise ValueError(f"n must be a whole number >= 0, got {n!r}")
        self.require(n)
        blocks = np.empty(int(n), np.int32)
        take_blocks(self.free, self.top, self.refs, blocks)
        return blocks

    def require(self, n):
        """Raise unless n blocks are free.

        Parameters
        ----------
        n : int
            How many are wanted.

        Raises
        ------
        OutOfBlocks
            If fewer are free.
        """
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks wanted, {self.num_free} of {self.num_blocks} are free")

    def share(self, blocks):
        """Add one reference to each block, once for each time it is named.

        Parameters
        ----------
        blocks : sequence of int
            Blocks in use.

        Raises
        ------
        ValueError
            If an id is out of range or its block is free; nothing was changed.
        """
        blocks, counts = self._used(blocks)
        self.refs[blocks] += counts

    def release(self, blocks):
        """Take one reference off each block, once for each time it is named; those left without are free again.

        Parameters
        ----------
        blocks : sequence of int
            Blocks in use.

        Raises
        ------
        ValueError
            If an id is out of range, or is named more often than it has references; nothing was changed.
        """
        unique, counts = self._used(blocks)
        over = np.flatnonzero(counts > self.refs[unique])
        if over.size:
            block, count = unique[over[0]], counts[over[0]]
            raise ValueError(f"blocks: block {block} is released {count} times but has {self.refs[block]} references")
        drop_blocks(self.free, self.top, self.refs, np.asarray(blocks, np.int32).ravel())

    def _used(self, blocks):
        """The distinct blocks and how often each is named, all in use."""
        blocks = np.asarray(blocks)
        if blocks.size and blocks.dtype.kind not in "iu":
            raise TypeError(f"blocks must be integers, got {blocks.dtype.name}")
        unique, counts = np.unique(blocks.astype(np.int64), return_counts=True)
        if unique.size and not (unique[0] >= 0 and unique[-1] < self.num_blocks):
            bad = unique[0] if unique[0] < 0 else unique[-1]
            raise ValueError(f"blocks: block {bad} is out of range for a pool of {self.num_blocks} blocks")
        free = unique[self.refs[unique] == 0]
        if free.size:
            raise ValueError(f"blocks: block {free[0]} is free")
        return unique, counts.astype(np.int32)

    def check(self):
        """Prove the invariants: every block is either on the free stack, once, or has references.

        Raises
        ------
        CorruptState
            If one does not hold.
        """
        if not 0 <= self.num_free <= self.num_blocks:
            raise CorruptState(f"num_free is {self.num_free}, out of range for {self.num_blocks} blocks")
        stack = self.free[: self.num_free]
        if stack.size and not (stack.min() >= 0 and stack.max() < self.num_blocks):
            raise CorruptState(f"the free stack holds an id out of range: {stack.min()}..{stack.max()}")
        on_stack = np.bincount(stack, minlength=self.num_blocks)
        if (on_stack > 1).any():
            raise CorruptState(f"block {on_stack.argmax()} is on the free stack {on_stack.max()} times")
        wrong = np.flatnonzero((on_stack == 1) != (self.refs == 0))
        if wrong.size:
            block = wrong[0]
            place = "on the free stack" if on_stack[block] else "not on the free stack"
            raise CorruptState(f"block {block} is {place} but has {self.refs[block]} references")


class SequenceTables:
    """The rows of the living sequences: handle, length, blocks.

    A handle is ``row + generation * max_sequences``: the row is found by a remainder, and a handle is never given out
    twice, so that a stale one is noticed.

    Parameters
    ----------
    max_sequences : int
        Rows.
    block_size : int
        Slots per block.

    Attributes
    ----------
    handles : int64 [max_sequences]
        The handle that a row's sequence has (or, where `alive` is False, the next one will have).
    alive : bool [max_sequences]
        Whether the row holds a sequence.
    lengths : int32 [max_sequences]
        Tokens stored.
    num_blocks : int32 [max_sequences]
        Table entries in use.
    table : int32 [max_sequences, width]
        Position to block; -1 past a row's blocks. Grows as sequences do.
    """

    def __init__(self, max_sequences, block_size):
        if int(max_sequences) != max_sequences or max_sequences < 1:
            raise ValueError(f"max_sequences must be a whole number >= 1, got {max_sequences!r}")
        self.block_size = block_size
        self.handles = np.arange(max_sequences, dtype=np.int64)
        self.alive = np.zeros(max_sequences, bool)
        self.lengths = np.zeros(max_sequences, np.int32)
        self.num_blocks = np.zeros(max_sequences, np.int32)
        self.table = np.full((max_sequences, 16), FREE_TABLE_ENTRY, np.int32)
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    def open(self):
        """Give a row to a new, empty sequence.

        Returns
        -------
        int
            The row.

        Raises
        ------
        OutOfBlocks
            If all rows are taken.
        """
        if not self._free_rows:
            raise OutOfBlocks(f"all {self.alive.size} sequences are in use (max_sequences)")
        row = self._free_rows.pop()
        self.alive[row] = True
        return row

    def close(self, row):
        """Take the row back; its blocks have been released.

        Parameters
        ----------
        row : int
            A living row.
        """
        self.table[row, : self.num_blocks[row]] = FREE_TABLE_ENTRY
        self.lengths[row] = self.num_blocks[row] = 0
        self.alive[row] = False
        self.handles[row] += self.alive.size
        self._free_rows.append(row)

    def rows_of(self, seqs):
        """The rows of living sequences.

        Parameters
        ----------
        seqs : int64 [num_seqs]
            Handles.

        Returns
        -------
        numpy.ndarray of int64, [num_seqs]

        Raises
        ------
        UnknownSequence
            If a handle names no living sequence.
        """
        rows = seqs % self.alive.size
        bad = np.flatnonzero(~self.alive[rows] | (self.handles[rows] != seqs))
        if bad.size:
            seq = int(seqs[bad[0]])
            known = 0 <= seq < self.handles[rows[bad[0]]]
            raise UnknownSequence(f"sequence {seq} {'was freed' if known else 'does not exist'}")
        return rows

    def reserve_width(self, num_blocks):
        """Make the table at least `num_blocks` wide, doubling so that growing costs little per block.

        Parameters
        ----------
        num_blocks : int
            Blocks of the longest sequence to come.
        """
        width = self.table.shape[1]
        if num_blocks > width:
            wider = np.full((self.alive.size, max(num_blocks, 2 * width)), FREE_TABLE_ENTRY, np.int32)
            wider[:, :width] = self.table
            self.table = wider

    def blocks(self, row):
        """The blocks of a row, in the order of positions.

        Parameters
        ----------
        row : int
            A living row.

        Returns
        -------
        numpy.ndarray of int32
            A view.
        """
        return self.table[row, : self.num_blocks[row]]

    def check(self, planned):
        """Prove the invariants of the rows.

        Parameters
        ----------
        planned : int32 [max_sequences]
            Tokens that open plans will add to each row.

        Raises
        ------
        CorruptState
            If a row has more or fewer blocks than its tokens need, or an entry where none may be.
        """
        needed = num_blocks_for(self.lengths + planned, self.block_size)
        wrong = np.flatnonzero(needed != self.num_blocks)
        if wrong.size:
            row = wrong[0]
            raise CorruptState(f"sequence {self.handles[row]} has {self.num_blocks[row]} blocks, needs {needed[row]} for "
                               f"{self.lengths[row]} tokens and {planned[row]} planned")
        used = np.arange(self.table.shape[1]) < self.num_blocks[:, None]
        if ((self.table == FREE_TABLE_ENTRY) == used).any():
            row = np.argwhere((self.table == FREE_TABLE_ENTRY) == used)[0][0]
            raise CorruptState(f"the table of sequence {self.handles[row]} does not end where its blocks do")
        if self.lengths[~self.alive].any():
            raise CorruptState("a row without a sequence has a length")
        if sorted(self._free_rows) != np.flatnonzero(~self.alive).tolist():
            raise CorruptState("the free rows are not those without a sequence")


@njit(cache=True)
def count_blocks(rows, num_new, lengths, num_blocks, table, refs, block_size, copied):
    """How many blocks a plan needs; marks in `copied` the rows that must copy their last block before writing to it.

    A row copies when it would write into a block that others hold too. Of several rows of one plan that share a block,
    the last one to go may write in place, unless it would overwrite tokens of one that went before (which needs them
    again if the plan is rolled back).
    """
    needed = num_copied = 0
    for i in range(rows.size):
        row, length = rows[i], lengths[rows[i]]
        needed += (length + num_new[i] + block_size - 1) // block_size - num_blocks[row]
        copied[i] = False
        if length % block_size:
            tail = table[row, length // block_size]
            copied[i] = refs[tail] > 1
            if num_copied and not copied[i]:
                copied[i] = _would_overwrite(i, tail, rows, lengths, table, block_size, copied)
            if copied[i]:
                num_copied += 1
                refs[tail] -= 1
    for i in range(rows.size):
        if copied[i]:
            refs[table[rows[i], lengths[rows[i]] // block_size]] += 1
    return needed + num_copied, num_copied


@njit(cache=True)
def _would_overwrite(i, tail, rows, lengths, table, block_size, copied):
    """Whether row i, writing in place, would overwrite a token of an earlier row that copied the same block."""
    for j in range(i):
        length = lengths[rows[j]]
        if copied[j] and length > lengths[rows[i]] and table[rows[j], length // block_size] == tail:
            return True
    return False


@njit(cache=True)
def assign_blocks(rows, num_new, lengths, num_blocks, table, refs, block_size, copied, free, top, copies, positions,
                  slots, query_starts):
    """Take the blocks that `count_blocks` counted, and write what the plan says: copies, positions and slots.

    A copied row's reference to the old block stays with the plan, which needs it for a rollback.
    """
    token = copy = 0
    block = np.empty(1, np.int32)
    query_starts[0] = 0
    for i in range(rows.size):
        row, length = rows[i], lengths[rows[i]]
        if copied[i]:
            take_blocks(free, top, refs, block)
            copies[copy, 0], copies[copy, 1] = table[row, length // block_size], block[0]
            table[row, length // block_size] = block[0]
            copy += 1
        for column in range(num_blocks[row], (length + num_new[i] + block_size - 1) // block_size):
            take_blocks(free, top, refs, block)
            table[row, column] = block[0]
            num_blocks[row] += 1
        for position in range(length, length + num_new[i]):
            positions[token] = position
            slots[token] = np.int64(table[row, position // block_size]) * block_size + position % block_size
            token += 1
        query_starts[i + 1] = token


@njit(cache=True)
def undo_blocks(rows, lengths, num_blocks, table, refs, block_size, free, top, copies):
    """Give back, in the opposite order, what `assign_blocks` took."""
    copy = copies.shape[0]
    for i in range(rows.size - 1, -1, -1):
        row, length = rows[i], lengths[rows[i]]
        kept = (length + block_size - 1) // block_size
        for column in range(num_blocks[row] - 1, kept - 1, -1):
            drop_block(free, top, refs, table[row, column])
            table[row, column] = FREE_TABLE_ENTRY
        num_blocks[row] = kept
        if copy and length % block_size and table[row, kept - 1] == copies[copy - 1, 1]:
            copy -= 1
            table[row, kept - 1] = copies[copy, 0]
            drop_block(free, top, refs, copies[copy, 1])
