"""SequenceTables: the rows of the sequences: handle, length, blocks, and what is known of their tokens.

Compiled functions take the arrays by these names:

- ``rows`` int64 [num_rows, 8], a row a cache line. Columns: HANDLE (of the row's sequence, or of the next one that
  will get the row), STATE (FREE and those after it), LENGTH (tokens stored), NUM_BLOCKS (table entries in use), START
  (how many of them slid out of the window: the first ones), PLANNED (positions past the length that an open plan has
  blocks for), KNOWN (token ids known from position 0 on without a gap, or UNKNOWN), CHAIN (the uid under which the next
  full block is published; of a SWAPPED row, its first block);
- ``tails`` int32 [num_rows, block_size]: ids of the known tokens past the last full block;
- ``table`` int32 [num_rows, width]: position to block, NO_BLOCK where there is none.
"""

import operator

import numpy as np

from .batches import INT32
from .blocks import REFS, drop_block
from .compiled import bare, inlined, making
from .errors import CorruptState, OutOfBlocks, UnknownSequence
from .scalars import whole_number
from .sizing import num_blocks_for

HANDLE, STATE, LENGTH, NUM_BLOCKS, START, PLANNED, KNOWN, CHAIN = range(8)

FREE, LIVE, FORKED, SWAPPED, LEAVING = range(5)
"""The states of a row: without a sequence; in the pool; in the pool, and its last block may have other holders or be
published, if tokens fit in still; in the host pool; freed, but its last plan is still open."""

NO_BLOCK = -1
"""What a table holds past a sequence's blocks, and where a block slid out of the window; no kernel reads it."""

_LARGE = 1 << 14
"""Entries of tables that are not small."""

UNKNOWN = -1
"""The KNOWN of a sequence whose blocks can no longer be published."""


@inlined
def row_of(rows, seq):
    """The row that a handle's sequence has, if it lives; there are a power of two of them."""
    return seq & (rows.shape[0] - 1)


@bare
def keep_blocks(blocks, stack, counts, rows, table, row, kept):
    """Drop all but the first `kept` blocks of a row, the last first, so that a prefix is evicted from its end."""
    for column in range(rows[row, NUM_BLOCKS] - 1, max(kept, rows[row, START]) - 1, -1):
        drop_block(blocks, stack, counts, table[row, column])
        table[row, column] = NO_BLOCK
    rows[row, NUM_BLOCKS] = min(rows[row, NUM_BLOCKS], kept)
    rows[row, START] = min(rows[row, START], kept)


@inlined
def _in_pool(rows, row):
    return LIVE <= rows[row, STATE] <= FORKED


@bare
def find_rows(rows, seqs):
    """(The first handle that names no sequence in the pool, or -1; the most blocks that one of them has)."""
    width = 0
    for i in range(seqs.size):
        row = row_of(rows, seqs[i])
        if rows[row, HANDLE] != seqs[i] or not _in_pool(rows, row):
            return i, 0
        width = max(width, rows[row, NUM_BLOCKS])
    return -1, width


def empty_tables(num_seqs, width):
    """An array for the beginnings of rows, not filled.

    A large one is part of one that is a little larger, so that it has the same size while the longest sequence grows by
    a few blocks: new sizes are new memory, which the system clears page by page, and that takes longer than the step.
    """
    if num_seqs * width < _LARGE:
        return np.empty((num_seqs, width), INT32)
    flat = np.empty(num_seqs * (width + 63 & -64), INT32)
    return flat[: num_seqs * width].reshape(num_seqs, width)


@bare
def copy_tables(table, seqs, tables):
    """Copy the beginning of the sequences' rows."""
    for i in range(seqs.size):
        row = row_of(table, seqs[i])
        for column in range(tables.shape[1]):
            tables[i, column] = table[row, column]


@inlined
def num_hidden(length, window, block_size):
    """How many blocks the query at position `length` does not see, nor any after it."""
    return max(0, length + 1 - window) // block_size


@bare
def slide_window(blocks, stack, counts, rows, table, row, hidden):
    """Drop the blocks of a row that slid out of the window, the last first."""
    hidden = min(hidden, rows[row, NUM_BLOCKS])
    for column in range(hidden - 1, rows[row, START] - 1, -1):
        drop_block(blocks, stack, counts, table[row, column])
        table[row, column] = NO_BLOCK
    rows[row, START] = max(rows[row, START], hidden)


@bare
def copy_values(source, target):
    """Copy one array with one axis into another."""
    for i in range(source.size):
        target[i] = source[i]


@bare
def fork_row(blocks, rows, tails, table, parent, child):
    """Make an empty row hold what another holds: every block is shared, none is copied."""
    for column in range(rows[parent, START], rows[parent, NUM_BLOCKS]):
        blocks[table[parent, column], REFS] += 1
    rows[parent, STATE] = rows[child, STATE] = FORKED
    copy_values(rows[parent, LENGTH:], rows[child, LENGTH:])
    copy_values(tails[parent], tails[child])
    copy_values(table[parent], table[child])


@bare
def free_row(blocks, stack, counts, rows, table, row, seq):
    """Drop the blocks of a row and make its handle one that names no sequence; False if it is not live and settled."""
    if rows[row, HANDLE] != seq or not _in_pool(rows, row) or rows[row, PLANNED]:
        return False
    keep_blocks(blocks, stack, counts, rows, table, row, 0)
    rows[row, HANDLE] += rows.shape[0]
    rows[row, STATE], rows[row, LENGTH] = FREE, 0
    return True


@bare
def _share_rows(blocks, rows, table, parents):
    for row in parents:
        rows[row, STATE] = FORKED
        for column in range(rows[row, START], rows[row, NUM_BLOCKS]):
            blocks[table[row, column], REFS] += 1


@bare
def _empty_rows(blocks, stack, counts, rows, table, children):
    for row in children:
        keep_blocks(blocks, stack, counts, rows, table, row, 0)
        rows[row, STATE] = FORKED


@making
def reparent_rows(blocks, stack, counts, rows, tails, table, children, parents):
    """Make each child row hold what its parent row held, all at once; parents may be children too."""
    moved = children != parents
    children, parents = children[moved], parents[moved]
    new_rows, new_tails, new_table = rows[parents], tails[parents], table[parents]
    _share_rows(blocks, rows, table, parents)
    _empty_rows(blocks, stack, counts, rows, table, children)
    for i in range(children.size):
        rows[children[i], LENGTH:] = new_rows[i, LENGTH:]
        tails[children[i]], table[children[i]] = new_tails[i], new_table[i]


class SequenceTables:
    """The rows of the living sequences.

    A handle is ``row + generation * num_rows``, and `num_rows` a power of two: the row is found by its last bits, and a
    handle is never given out twice, so that a stale one is noticed.

    Parameters
    ----------
    max_sequences : int
        How many may have a row at a time.
    block_size : int
        Slots per block.
    """

    def __init__(self, max_sequences, block_size):
        self.block_size, self.max_sequences = block_size, whole_number("max_sequences", max_sequences, 1, 2**31 - 1)
        self.num_rows = 1 << (self.max_sequences - 1).bit_length()
        self.rows = np.zeros((self.num_rows, 8), np.int64)
        self.tails = np.zeros((self.num_rows, block_size), np.int32)
        self.table = np.full((self.num_rows, 16), NO_BLOCK, np.int32)
        self.arrays = self.rows, self.tails, self.table  # as compiled functions take them
        (self.handles, self.states, self.lengths, self.num_blocks, self.starts, self.planned, self.known,
         self.chains) = self.rows.T
        self.handles[:] = np.arange(self.num_rows)
        self.free_rows = list(range(self.max_sequences - 1, -1, -1))

    def require_row(self):
        """Raise unless a row is free.

        Raises
        ------
        OutOfBlocks
            If all rows are taken.
        """
        if not self.free_rows:
            raise OutOfBlocks(f"all {self.max_sequences} sequences are in use (max_sequences)")

    def open(self, known, chain):
        """Give a row to a new, empty sequence.

        Parameters
        ----------
        known : int
            0, or UNKNOWN if its blocks cannot be published.
        chain : int
            The uid of the root of its prefixes.

        Returns
        -------
        int
            The row.

        Raises
        ------
        OutOfBlocks
            If all rows are taken.
        """
        self.require_row()
        row = self.free_rows.pop()
        self.states[row], self.known[row], self.chains[row] = LIVE, known, chain
        return row

    def retire(self, row):
        """Make a row's handle one that names no living sequence any more; its blocks are dropped later.

        Parameters
        ----------
        row : int
            A row with a sequence.
        """
        self.handles[row] += self.num_rows
        self.states[row] = LEAVING

    def close(self, row):
        """Let another sequence have a row whose sequence is gone.

        Parameters
        ----------
        row : int
            The row, without blocks.
        """
        self.states[row], self.lengths[row] = FREE, 0
        self.free_rows.append(row)

    def place_of(self, seq):
        """The row that a handle's sequence has, if it lives.

        Parameters
        ----------
        seq : int
            Any number.

        Returns
        -------
        int

        Raises
        ------
        TypeError
            If it is not a whole number.
        UnknownSequence
            If it is too large for a handle.
        """
        try:
            seq = operator.index(seq)
        except TypeError:
            raise TypeError(f"seq must be a handle, a whole number, got {type(seq).__name__}") from None
        if not -(2**63) <= seq < 2**63:
            raise self.unknown(seq)
        return seq & (self.num_rows - 1)

    def row_of(self, seq):
        """The row of a living sequence.

        Parameters
        ----------
        seq : int
            Its handle.

        Returns
        -------
        int

        Raises
        ------
        UnknownSequence
            If it names no living sequence.
        TypeError
            If it is not a whole number.
        """
        row = self.place_of(seq)
        if self.handles[row] != seq or not LIVE <= self.states[row] <= SWAPPED:
            raise self.unknown(seq)
        return row

    def unknown(self, seq):
        """The error for a handle that names no living sequence.

        Parameters
        ----------
        seq : int
            The handle.

        Returns
        -------
        UnknownSequence
        """
        known = 0 <= seq < self.handles[seq & (self.num_rows - 1)]
        return UnknownSequence(f"sequence {seq} {'was freed' if known else 'does not exist'}")

    def reserve_width(self, num_blocks):
        """Make the table at least `num_blocks` wide, doubling so that growing costs little per block.

        Parameters
        ----------
        num_blocks : int
            Blocks of the longest sequence to come.
        """
        width = self.table.shape[1]
        if num_blocks > width:
            num_lines = -(-max(num_blocks, 2 * width) // 16) | 1  # odd: rows a power of two apart share a cache's sets
            wider = np.full((self.num_rows, 16 * num_lines), NO_BLOCK, np.int32)
            wider[:, :width] = self.table
            self.table = wider
            self.arrays = self.rows, self.tails, wider

    def blocks(self, row):
        """The blocks of a row, in the order of positions.

        Parameters
        ----------
        row : int
            A row with a sequence.

        Returns
        -------
        numpy.ndarray of int32
            A view.
        """
        return self.table[row, : self.num_blocks[row]]

    def check(self, sliding_window):
        """Prove the invariants of the rows.

        Parameters
        ----------
        sliding_window : int
            Visible keys.

        Raises
        ------
        CorruptState
            If a row has more or fewer blocks than its tokens need, or an entry where none may be.
        """
        used = self.states != FREE
        if sorted(self.free_rows) != np.flatnonzero(~used[: self.max_sequences]).tolist():
            raise CorruptState("the free rows are not those without a sequence")
        hidden = np.maximum(0, self.lengths + 1 - sliding_window) // self.block_size
        needed = num_blocks_for(self.lengths + self.planned, self.block_size)
        for is_wrong, what in (
            (self.handles % self.num_rows != np.arange(self.num_rows), "does not belong to its row"),
            ((self.states < FREE) | (self.states > LEAVING), "is in no state"),
            (~used & ((self.lengths != 0) | (self.planned != 0)), "has a length but no sequence"),
            ((self.lengths < 0) | (self.planned < 0), "has a negative length or plan"),
            (self.num_blocks != needed, "has more or fewer blocks than its tokens and planned positions need"),
            ((self.starts < 0) | (self.starts > np.minimum(hidden, needed)), "lacks a block inside of its window"),
            (used & ((self.known < UNKNOWN) | (self.known > self.lengths)), "has more known token ids than tokens"),
            (((self.table == NO_BLOCK) == self.held()).any(axis=1), "has an entry where there is no block, or none"),
        ):
            if is_wrong.any():
                row = is_wrong.argmax()
                raise CorruptState(f"sequence {self.handles[row]} {what}: length {self.lengths[row]}, "
                                   f"{self.planned[row]} planned, {self.num_blocks[row]} blocks from number "
                                   f"{self.starts[row]} on, {self.known[row]} known ids, table {self.blocks(row)}")

    def in_pool(self):
        """Which rows have a sequence whose blocks are in the pool.

        Returns
        -------
        numpy.ndarray of bool, [num_rows]
        """
        return (self.states == LIVE) | (self.states == FORKED)

    def held(self):
        """Which entries of the table name a block.

        Returns
        -------
        numpy.ndarray of bool, like the table
        """
        columns = np.arange(self.table.shape[1])
        return (columns >= self.starts[:, None]) & (columns < self.num_blocks[:, None])
