"""A step of many sequences, compiled: what a plan takes from the pool, and what committing or undoing it does.

Each is one pass over arrays of handles. `survey_batch` looks at what a plan would take and changes nothing;
`make_plan` takes it.
The names of the arrays are those of blocks, prefix_cache and sequences.
"""

import numpy as np

from .blocks import (HAS_HOST, HASH, NEXT, NUM_CACHED, NUM_COPIED, NUM_EVICTED, NUM_FREE, REFS, UID, drop_block,
                     new_uid)
from .compiled import bare, inlined, prefetch_row
from .errors import OutOfBlocks
from .plan import NO_COPIES, NO_SLOTS, Plan
from .prefix_cache import append_tokens, evict_block, hash_prefix, prefetch_place, take_block, unpublish_block
from .sequences import (CHAIN, HANDLE, KNOWN, LENGTH, LIVE, NUM_BLOCKS, PLANNED, STATE, SWAPPED, keep_blocks,
                        num_hidden, row_of, slide_window)
from .spec import NO_WINDOW

FINE, GONE, AWAY, BUSY, TWICE, TOO_FEW, TOO_LONG = range(7)
"""What is wrong with a sequence of a plan: nothing; its handle names no sequence; it is swapped out; it is in an open
plan; it is named twice; its count is below 1; it would be longer than `max_length`."""

_MARK = -1
"""The PLANNED of a sequence that the plan being surveyed has named already."""


@inlined
def _refusal(rows, row, seq, count, max_length):
    if rows[row, HANDLE] != seq or not LIVE <= rows[row, STATE] <= SWAPPED:
        return GONE
    if rows[row, STATE] == SWAPPED:
        return AWAY
    if rows[row, PLANNED]:
        return TWICE if rows[row, PLANNED] == _MARK else BUSY
    if count < 1:
        return TOO_FEW
    return TOO_LONG if count > max_length - rows[row, LENGTH] else FINE


@inlined
def _tail(rows, table, row, block_size):
    """The last block of a row that no plan holds, if it has a free slot, else -1."""
    num_blocks = rows[row, NUM_BLOCKS]
    return table[row, num_blocks - 1] if rows[row, LENGTH] < num_blocks * block_size else -1


@bare
def unmark(rows, seqs):
    """Undo what `_survey` marks."""
    for seq in seqs:
        rows[row_of(rows, seq), PLANNED] = 0


@bare
def _survey(blocks, counts, rows, table, seqs, num_new, num_lookahead, max_length, block_size, copied):
    """What a plan would take: (code, sequence, and what `survey_batch` returns).

    The sequence is the one that the code is about, the first that cannot be planned; if there is none, the rows stay
    marked as being planned. Marks in `copied` which rows must
    copy their last block before they write to it: others hold it too, or it is published (`own`: and no other row holds
    it). Of several rows of one plan that share a block the last to go may write in place, unless it would overwrite
    tokens of one that went before, which gets the block back if the plan is undone.
    """
    code, num_rows = FINE, 0
    num_needed = num_copied = num_own = num_tokens = width = 0
    for i in range(seqs.size):
        row, count = row_of(rows, seqs[i]), num_new[i if num_new.size > 1 else 0]
        code = _refusal(rows, row, seqs[i], count, max_length)
        if code:
            break
        rows[row, PLANNED], num_rows = _MARK, i + 1
        length, num_blocks = rows[row, LENGTH], rows[row, NUM_BLOCKS]
        stop = min(length + count + num_lookahead, max_length)
        if stop > num_blocks * block_size:
            num_blocks = (stop + block_size - 1) // block_size
            num_needed += num_blocks - rows[row, NUM_BLOCKS]
        width, num_tokens = max(width, num_blocks), num_tokens + count
        tail = _tail(rows, table, row, block_size)
        # A block in use is in no list; until this function ends, NEXT is the length of the longest row that copies it.
        copied[i] = tail >= 0 and (blocks[tail, REFS] > 1 or blocks[tail, HASH] != 0 or blocks[tail, NEXT] > length)
        if copied[i]:
            num_copied += 1
            num_own += blocks[tail, REFS] == 1 and blocks[tail, HASH] != 0 and blocks[tail, NEXT] == 0
            blocks[tail, REFS] -= 1
            blocks[tail, NEXT] = max(blocks[tail, NEXT], length)
    for i in range(num_rows if num_copied else 0):
        if copied[i]:
            tail = _tail(rows, table, row_of(rows, seqs[i]), block_size)
            blocks[tail, REFS] += 1
            blocks[tail, NEXT] = 0
    if code:
        unmark(rows, seqs[:num_rows])
    num_needed += num_copied
    num_available = counts[NUM_FREE] + counts[NUM_CACHED]
    evicts_own = num_needed > num_available and num_own > 0
    if evicts_own:
        num_needed, num_copied = num_needed - num_own, num_copied - num_own
    return code, num_rows, num_needed, num_available, num_copied, evicts_own, num_tokens, width


def survey_batch(pool, sequences, seqs, num_new, num_lookahead, max_length, copied):
    """What a plan would take, or why there is none; afterwards `unmark` the sequences, or plan them.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    sequences : SequenceTables
        The sequences.
    seqs : int64 [num_seqs]
        Handles.
    num_new : int64 [num_seqs] or [1]
        New tokens of each, or of every one.
    num_lookahead, max_length : int
        As in `PagedKVCache.plan`, the first at most the second.
    copied : bool [max_sequences + 1]
        Filled: which sequences copy their last block.

    Returns
    -------
    num_needed, num_available : int
        Blocks that it takes, and that there are.
    num_copied : int
        Of the blocks that it takes, those that are copies.
    evicts_own : bool
        Whether the blocks do not suffice if published ones that only their sequence holds are copied.
    num_tokens, width : int
        New tokens, and blocks of the longest sequence.

    Raises
    ------
    UnknownSequence
        If a handle names no living sequence.
    ValueError
        If a sequence is named twice, is swapped out or in an open plan, or a count or a length is out of its range.
    """
    if seqs.size >= copied.size:  # more than there can be: one of these is named twice
        seqs = seqs[: copied.size]
    code, index, num_needed, num_available, num_copied, evicts_own, num_tokens, width = _survey(
        pool.blocks, pool.counts, sequences.rows, sequences.table, seqs, num_new, num_lookahead, max_length,
        sequences.block_size, copied)
    if code == FINE:
        return num_needed, num_available, num_copied, evicts_own, num_tokens, width
    seq, count = int(seqs[index]), int(num_new[index if num_new.size > 1 else 0])
    if code == GONE:
        raise sequences.unknown(seq)
    length = int(sequences.lengths[sequences.row_of(seq)]) + count
    raise ValueError({
        AWAY: f"sequence {seq} is swapped out; swap it in first",
        BUSY: f"sequence {seq} is in an open plan; commit or roll it back first",
        TWICE: f"seqs names sequence {seq} twice",
        TOO_FEW: f"num_new must be at least 1, got {count} for sequence {seq}",
        TOO_LONG: f"sequence {seq} would have {length} tokens, max_length is {max_length}",
    }[code])


@bare
def _evict_own(blocks, stack, counts, index, rows, table, seqs, block_size, copied):
    """Evict what is cached and unpublish the last blocks that only their row holds, so that they are written in
    place."""
    while counts[NUM_CACHED]:
        evict_block(blocks, stack, counts, index)
    for i in range(seqs.size):
        tail = _tail(rows, table, row_of(rows, seqs[i]), block_size)
        if copied[i] and blocks[tail, REFS] == 1 and blocks[tail, HASH]:
            unpublish_block(blocks, index, tail)
            counts[NUM_EVICTED] += 1
            copied[i] = False


@inlined
def _copy_tail(blocks, ids, stack, counts, index, rows, table, row, copies):
    """Give a row a block of its own for its last one; the plan keeps the reference to the old one, for a rollback."""
    column = rows[row, NUM_BLOCKS] - 1
    block = take_block(blocks, ids, stack, counts, index)
    copies[0], copies[1] = table[row, column], block
    table[row, column] = block


@inlined
def _write_slots(table, row, column, offset, count, block_size, slots, at):
    """Write the slots from an offset in a row's block on to slots[at : at + count]."""
    for i in range(at, at + count):
        slots[i] = np.int64(table[row, column]) * block_size + offset
        offset += 1
        if offset == block_size:
            column, offset = column + 1, 0


@bare
def _take(blocks, ids, stack, counts, index, rows, table, seqs, num_new, num_lookahead, max_length, block_size, copied,
         query_starts, lengths, block_tables, positions, slots, copies):
    """Give each row the blocks that it needs, and write the plan: what was surveyed and has room."""
    copy = token = 0
    for i in range(seqs.size):
        row, count = row_of(rows, seqs[i]), num_new[i if num_new.size > 1 else 0]
        length = rows[row, LENGTH]
        if copied[i]:
            _copy_tail(blocks, ids, stack, counts, index, rows, table, row, copies[copy])
            copy += 1
        elif counts[HAS_HOST]:
            tail = _tail(rows, table, row, block_size)
            if tail >= 0:
                ids[tail, UID] = new_uid(counts)  # it will be written: a copy on the host is no longer equal to it
        column = rows[row, NUM_BLOCKS] - (length < rows[row, NUM_BLOCKS] * block_size)
        stop = min(length + count + num_lookahead, max_length)
        while rows[row, NUM_BLOCKS] * block_size < stop:
            table[row, rows[row, NUM_BLOCKS]] = take_block(blocks, ids, stack, counts, index)
            rows[row, NUM_BLOCKS] += 1
        rows[row, PLANNED] = stop - length
        query_starts[i], lengths[i] = token, length + count
        for j in range(count):
            positions[token + j] = length + j
        _write_slots(table, row, column, length - column * block_size, count, block_size, slots, token)
        token += count
        for column in range(block_tables.shape[1]):
            block_tables[i, column] = table[row, column]
    query_starts[seqs.size] = token
    counts[NUM_COPIED] += copy


@bare
def _reserve_slots(table, seqs, lengths, num_lookahead, max_length, block_size, slots):
    """Write the slots of the positions after a plan's new tokens, up to `max_length`."""
    for i in range(seqs.size):
        column, num_slots = lengths[i] // block_size, min(num_lookahead, max_length - lengths[i])
        offset = lengths[i] - column * block_size
        _write_slots(table, row_of(table, seqs[i]), column, offset, num_slots, block_size, slots, i * num_lookahead)


def make_plan(pool, sequences, index, seqs, num_new, num_lookahead, max_length, copied, cut):
    """Take what a plan needs.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    sequences : SequenceTables
        The sequences.
    index : int64 [3 * num_blocks // 2]
        Of the prefix cache.
    seqs, num_new, num_lookahead, max_length, copied
        As in `survey_batch`, but any look-ahead.
    cut : callable
        As in `Plan`.

    Returns
    -------
    Plan
        Its copies are still to be made.

    Raises
    ------
    OutOfBlocks
        If too few blocks are available.
    UnknownSequence, ValueError
        As `survey_batch`.
    """
    num_reserved = min(num_lookahead, max_length) if num_lookahead else 0
    num_needed, num_available, num_copied, evicts_own, num_tokens, width = survey_batch(
        pool, sequences, seqs, num_new, num_reserved, max_length, copied)
    num_seqs, block_size, rows = seqs.size, sequences.block_size, sequences.rows
    try:
        if num_needed > num_available:
            raise OutOfBlocks(f"{num_needed} blocks wanted, {num_available} of {pool.num_blocks} are available")
        if width > sequences.table.shape[1]:
            sequences.reserve_width(width)
        query_starts, lengths = np.empty(num_seqs + 1, np.int32), np.empty(num_seqs, np.int32)
        positions, slots = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.int64)
        block_tables = np.empty((num_seqs, width), np.int32)
        copies = np.empty((num_copied, 2), np.int32) if num_copied else NO_COPIES
        lookahead_slots = np.full((num_seqs, num_lookahead), -1, np.int64) if num_lookahead else NO_SLOTS
    except BaseException:
        unmark(rows, seqs)
        raise
    table = sequences.table
    if evicts_own:
        _evict_own(pool.blocks, pool.stack, pool.counts, index, rows, table, seqs, block_size, copied)
    _take(*pool.arrays, index, rows, table, seqs, num_new, num_reserved, max_length, block_size, copied, query_starts,
          lengths, block_tables, positions, slots, copies)
    if num_lookahead:
        _reserve_slots(table, seqs, lengths, num_lookahead, max_length, block_size, lookahead_slots.ravel())
    return Plan(query_starts, lengths, block_tables, cut, seqs, positions, slots, copies, lookahead_slots)


@inlined
def _learn(index, ids_of, factors, rows, tails, table, row, tokens, first, count):
    """Take in the ids of a row's new tokens; False if they fill a block, which is still to be published.

    Where that block will be entered is asked for ahead.
    """
    block_size, known = tails.shape[1], rows[row, KNOWN]
    column = rows[row, NUM_BLOCKS] - 1
    while column * block_size > known:
        column -= 1
    filled = known - column * block_size
    fills = filled + count >= block_size
    for i in range(min(count, block_size - filled)):
        tails[row, filled + i] = tokens[first + i]
    if fills:
        prefetch_place(index, hash_prefix(factors, rows[row, CHAIN], tails[row], 0))
        prefetch_row(ids_of, table[row, column])
    else:
        rows[row, KNOWN] = known + count
    return not fills


@inlined
def _advance(blocks, stack, counts, rows, table, row, count, window, block_size):
    """Make a row longer by `count` tokens; what it needs no longer is dropped."""
    length = rows[row, LENGTH] + count
    rows[row, LENGTH] = length
    if rows[row, PLANNED] != count:
        keep_blocks(blocks, stack, counts, rows, table, row, (length + block_size - 1) // block_size)
    rows[row, PLANNED] = 0
    if window != NO_WINDOW:
        slide_window(blocks, stack, counts, rows, table, row, num_hidden(length, window, block_size))


@bare
def commit(blocks, ids, stack, counts, index, ids_of, factors, rows, tails, table, seqs, query_starts, tokens,
           accepted, copies, window, filling):
    """Make the accepted tokens of a plan part of their rows; those rows that fill a block come last (`filling`)."""
    block_size, num_filling = tails.shape[1], 0
    for i in range(seqs.size):
        row, first = row_of(rows, seqs[i]), query_starts[i]
        count = accepted[i] if accepted.size else query_starts[i + 1] - first
        is_told = tokens.size and rows[row, KNOWN] == rows[row, LENGTH]
        if not is_told or _learn(index, ids_of, factors, rows, tails, table, row, tokens, first, count):
            _advance(blocks, stack, counts, rows, table, row, count, window, block_size)
        else:
            filling[num_filling], num_filling = i, num_filling + 1
    for i in filling[:num_filling]:
        row, first = row_of(rows, seqs[i]), query_starts[i]
        count = accepted[i] if accepted.size else query_starts[i + 1] - first
        append_tokens(blocks, ids, stack, counts, index, ids_of, factors, rows, tails, table, row, tokens, first,
                      first + count)
        _advance(blocks, stack, counts, rows, table, row, count, window, block_size)
    for i in range(copies.shape[0] - 1, -1, -1):
        drop_block(blocks, stack, counts, copies[i, 0])


@bare
def undo(blocks, stack, counts, rows, table, seqs, copies, block_size):
    """Give back, in the opposite order, what a plan took."""
    copy = copies.shape[0]
    for i in range(seqs.size - 1, -1, -1):
        row = row_of(rows, seqs[i])
        kept = (rows[row, LENGTH] + block_size - 1) // block_size
        rows[row, PLANNED] = 0
        keep_blocks(blocks, stack, counts, rows, table, row, kept)
        if copy and rows[row, LENGTH] % block_size and table[row, kept - 1] == copies[copy - 1, 1]:
            copy -= 1
            table[row, kept - 1] = copies[copy, 0]
            drop_block(blocks, stack, counts, copies[copy, 1])
