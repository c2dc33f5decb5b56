"""A step of many sequences, compiled: what a plan takes from the pool, and what committing or undoing it does.

Each is one pass over arrays of handles. `survey_batch` looks at what a plan would take and changes nothing;
`make_plan` takes it.
The names of the arrays are those of blocks, prefix_cache and sequences.
"""

import numpy as np

from .batches import INT32, INT64
from .blocks import (HAS_HOST, HASH, NEXT, NUM_CACHED, NUM_COPIED, NUM_EVICTED, NUM_FREE, REFS, UID, drop_block,
                     new_uid)
from .compiled import bare, entry, inlined, prefetch_row
from .errors import OutOfBlocks
from .plan import NO_COPIES, NO_SLOTS, Plan
from .prefix_cache import (append_tokens, evict_block, hash_prefix, pack, prefetch_place, publish_column, take_block,
                           unpack, unpublish_block)
from .sequences import (CHAIN, FORKED, HANDLE, KNOWN, LENGTH, LIVE, NUM_BLOCKS, PLANNED, STATE, SWAPPED, copy_tables,
                        empty_tables, keep_blocks, num_hidden, row_of, slide_window)
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
    """Undo what `survey_batch` marks."""
    for seq in seqs:
        rows[row_of(rows, seq), PLANNED] = 0


@inlined
def _must_copy(blocks, tail, length):
    """Whether a row must copy its last block before it writes to it: others hold it too, or it is published, or a row
    of the same plan that held it has tokens past `length` in it."""
    return tail >= 0 and (blocks[tail, REFS] > 1 or blocks[tail, HASH] != 0 or blocks[tail, NEXT] > length)


@inlined
def _leave(blocks, tail, length):
    """Note that a row of that length will copy its last block; whether it could write if the block was not published.

    A block in use is in no list: until `_leave_none`, NEXT is the length of the longest row that leaves the block.
    """
    is_own = blocks[tail, REFS] == 1 and blocks[tail, HASH] != 0 and blocks[tail, NEXT] == 0
    blocks[tail, REFS] -= 1
    blocks[tail, NEXT] = max(blocks[tail, NEXT], length)
    return is_own


@bare
def _leave_none(blocks, rows, table, seqs, block_size, copied):
    """Undo each `_leave`."""
    for i in range(seqs.size):
        if copied[i]:
            tail = _tail(rows, table, row_of(rows, seqs[i]), block_size)
            blocks[tail, REFS] += 1
            blocks[tail, NEXT] = 0


@bare
def survey_batch(blocks, counts, rows, table, seqs, num_new, num_lookahead, max_length, block_size, copied, touched):
    """What a plan would take, or why there is none; afterwards `unmark` the sequences, or plan them.

    Of several rows of one plan that share their last block the last to go may write in place, unless it would overwrite
    tokens of one that went before, which gets the block back if the plan is undone.

    Parameters
    ----------
    blocks, counts, rows, table
        As in blocks and sequences.
    seqs : int64 [num_seqs]
        Handles.
    num_new : int64 [num_seqs] or [1]
        New tokens of each, or of every one.
    num_lookahead, max_length, block_size : int
        As in `PagedKVCache.plan`, the first at most the second.
    copied : bool [max_sequences + 1]
        Filled: which sequences copy their last block.
    touched : int64 [max_sequences + 1]
        Filled from its beginning: those that need something of the pool, few in a batch that adds a token each.

    Returns
    -------
    code, num_fine : int
        What is wrong with the sequence after the first `num_fine` ones, or FINE; only then are they marked as planned.
    num_needed, num_available : int
        Blocks that it takes, and that there are.
    num_copied : int
        Of the blocks that it takes, those that are copies.
    evicts_own : bool
        Whether the blocks do not suffice if published ones that only their sequence holds (`num_own`) are copied.
    num_tokens, width, num_touched : int
        New tokens, blocks of the longest sequence, and entries of `touched`.
    """
    code, num_fine = FINE, 0
    num_needed = num_copied = num_own = num_tokens = width = num_touched = 0
    for i in range(seqs.size):
        row, count = row_of(rows, seqs[i]), num_new[i if num_new.size > 1 else 0]
        code = _refusal(rows, row, seqs[i], count, max_length)
        if code:
            break
        rows[row, PLANNED], num_fine = _MARK, i + 1
        length, num_blocks = rows[row, LENGTH], rows[row, NUM_BLOCKS]
        stop = min(length + count + num_lookahead, max_length)
        num_more = (stop + block_size - 1) // block_size - num_blocks if stop > num_blocks * block_size else 0
        copied[i] = rows[row, STATE] == FORKED and _must_copy(blocks, _tail(rows, table, row, block_size), length)
        if copied[i]:
            num_copied, num_own = num_copied + 1, num_own + _leave(blocks, _tail(rows, table, row, block_size), length)
        if num_more or copied[i] or (counts[HAS_HOST] and length < num_blocks * block_size):
            touched[num_touched], num_touched = i, num_touched + 1
        num_needed, num_tokens = num_needed + num_more, num_tokens + count
        width = max(width, num_blocks + num_more)
    if num_copied:
        _leave_none(blocks, rows, table, seqs[:num_fine], block_size, copied)
    if code:
        unmark(rows, seqs[:num_fine])
    num_needed += num_copied
    num_available = counts[NUM_FREE] + counts[NUM_CACHED]
    evicts_own = num_needed > num_available and num_own > 0
    if evicts_own:
        num_needed, num_copied = num_needed - num_own, num_copied - num_own
    return code, num_fine, num_needed, num_available, num_copied, evicts_own, num_tokens, width, num_touched


def refuse(sequences, seqs, num_new, max_length, code, index):
    """Raise what `survey_batch` found.

    Parameters
    ----------
    sequences : SequenceTables
        The sequences.
    seqs, num_new, max_length
        As in `survey_batch`.
    code, index : int
        What is wrong with which.

    Raises
    ------
    UnknownSequence
        If the handle names no living sequence.
    ValueError
        If the sequence is named twice, is swapped out or in an open plan, or a count or a length is out of its range.
    """
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
def _evict_own(blocks, ids, stack, counts, index, rows, table, seqs, block_size, copied):
    """Evict what is cached and unpublish the last blocks that only their row holds, so that they are written in
    place."""
    while counts[NUM_CACHED]:
        evict_block(blocks, ids, stack, counts, index)
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
def _last_column(rows, row, position, block_size):
    """Which of a row's blocks a position is in that is one of the last."""
    column = rows[row, NUM_BLOCKS] - 1
    while column * block_size > position:
        column -= 1
    return column


@inlined
def _write_tokens(table, row, column, length, stop, block_size, positions, slots, at):
    """Write the positions `length` up to `stop` of a row and their slots, the first in block `column`, from `at` on."""
    while length < stop:
        base, end = (np.int64(table[row, column]) - column) * block_size, min(stop, (column + 1) * block_size)
        for position in range(length, end):
            positions[at + position - length], slots[at + position - length] = position, base + position
        at, length, column = at + end - length, end, column + 1


@inlined
def _take(blocks, ids, stack, counts, index, rows, table, row, stop, copied, block_size):
    """Give a row the blocks that it needs up to position `stop`, once it has a copy of its last one if it must."""
    tail = _tail(rows, table, row, block_size)
    if counts[HAS_HOST] and tail >= 0 and not copied:
        ids[tail, UID] = new_uid(counts)  # it will be written: a copy on the host is no longer equal to it
    while rows[row, NUM_BLOCKS] * block_size < stop:
        table[row, rows[row, NUM_BLOCKS]] = take_block(blocks, ids, stack, counts, index)
        rows[row, NUM_BLOCKS] += 1


@bare
def _make(blocks, ids, stack, counts, index, rows, table, seqs, num_new, num_lookahead, max_length, block_size, copied,
          touched, num_touched, query_starts, lengths, block_tables, positions, slots, copies):
    """Give the rows the blocks that they need, and write the plan: what was surveyed and has room."""
    copy = token = 0
    for i in touched[:num_touched]:
        row, count = row_of(rows, seqs[i]), num_new[i if num_new.size > 1 else 0]
        if copied[i]:
            _copy_tail(blocks, ids, stack, counts, index, rows, table, row, copies[copy])
            copy += 1
        stop = min(rows[row, LENGTH] + count + num_lookahead, max_length)
        _take(blocks, ids, stack, counts, index, rows, table, row, stop, copied[i], block_size)
    counts[NUM_COPIED] += copy
    for i in range(seqs.size):
        row, count = row_of(rows, seqs[i]), num_new[i if num_new.size > 1 else 0]
        length = rows[row, LENGTH]
        rows[row, STATE], rows[row, PLANNED] = LIVE, min(count + num_lookahead, max_length - length)
        query_starts[i], lengths[i] = token, length + count
        column = _last_column(rows, row, length, block_size)
        if count == 1:  # as in most steps: a loop would take longer
            positions[token], slots[token] = length, (np.int64(table[row, column]) - column) * block_size + length
        else:
            _write_tokens(table, row, column, length, length + count, block_size, positions, slots, token)
        token += count
    query_starts[seqs.size] = token
    copy_tables(table, seqs, block_tables)


@bare
def _reserve_slots(table, seqs, lengths, num_lookahead, max_length, block_size, slots):
    """Write the slots of the positions after a plan's new tokens, up to `max_length`."""
    for i in range(seqs.size):
        row = row_of(table, seqs[i])
        for ahead in range(min(num_lookahead, max_length - lengths[i])):
            column = (lengths[i] + ahead) // block_size
            slots[i, ahead] = np.int64(table[row, column]) * block_size + lengths[i] + ahead - column * block_size


def make_plan(pool, sequences, index, seqs, num_new, num_lookahead, max_length, copied, touched, cut):
    """Take what a plan needs.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    sequences : SequenceTables
        The sequences.
    index : int64 [3 * num_blocks // 2]
        Of the prefix cache.
    seqs, num_new, num_lookahead, max_length, copied, touched
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
        As `refuse`.
    """
    num_reserved = min(num_lookahead, max_length) if num_lookahead else 0
    num_seqs, block_size, rows = seqs.size, sequences.block_size, sequences.rows
    code, num_fine, num_needed, num_available, num_copied, evicts_own, num_tokens, width, num_touched = entry[survey_batch](
        pool.blocks, pool.counts, rows, sequences.table, seqs, num_new, num_reserved, max_length, block_size, copied,
        touched)
    if code:
        refuse(sequences, seqs, num_new, max_length, code, num_fine)
    try:
        if num_needed > num_available:
            raise OutOfBlocks(f"{num_needed} blocks wanted, {num_available} of {pool.num_blocks} are available")
        if width > sequences.table.shape[1]:
            sequences.reserve_width(width)
        query_starts, lengths = np.empty(num_seqs + 1, INT32), np.empty(num_seqs, INT32)
        positions, slots = np.empty(num_tokens, INT32), np.empty(num_tokens, INT64)
        block_tables = empty_tables(num_seqs, width)
        copies = np.empty((num_copied, 2), INT32) if num_copied else NO_COPIES
        lookahead_slots = np.full((num_seqs, num_lookahead), -1, INT64) if num_lookahead else NO_SLOTS
    except BaseException:
        unmark(rows, seqs)
        raise
    table = sequences.table
    if evicts_own:
        _evict_own(*pool.arrays, index, rows, table, seqs, block_size, copied)
    entry[_make](*pool.arrays, index, rows, table, seqs, num_new, num_reserved, max_length, block_size, copied, touched,
                 num_touched, query_starts, lengths, block_tables, positions, slots, copies)
    if num_lookahead:
        _reserve_slots(table, seqs, lengths, num_reserved, max_length, block_size, lookahead_slots)
    return Plan(query_starts, lengths, block_tables, cut, seqs, positions, slots, copies, lookahead_slots)


@inlined
def _learn(blocks, ids, index, ids_of, factors, rows, tails, table, row, tokens, first, count):
    """Take in the ids of a row's new tokens, up to the end of a block; the hash under which that is to be published, or
    0 if they do not fill it.

    What its publication will need is asked for ahead.
    """
    block_size, known, hashed = tails.shape[1], rows[row, KNOWN], np.int32(0)
    column = _last_column(rows, row, known, block_size)
    filled = known - column * block_size
    tails[row, filled] = tokens[first]  # nearly always the only one; if it was rejected, the next one overwrites it
    for i in range(1, min(count, block_size - filled)):
        tails[row, filled + i] = tokens[first + i]
    if filled + count < block_size:
        rows[row, KNOWN] = known + count
    else:
        block, hashed = table[row, column], hash_prefix(factors, rows[row, CHAIN], tails[row], 0)
        prefetch_place(index, hashed)
        prefetch_row(blocks, block)
        prefetch_row(ids, block)
        prefetch_row(ids_of, block)
    return hashed


@inlined
def _publish(blocks, ids, stack, counts, index, ids_of, factors, rows, tails, table, row, tokens, first, stop, hashed):
    """Publish the block that `_learn` found full, and those that the rest of tokens[first:stop] fill."""
    block_size = tails.shape[1]
    column = _last_column(rows, row, rows[row, KNOWN], block_size)
    publish_column(blocks, ids, stack, counts, index, ids_of, rows, table, row, column, tails[row], 0, hashed)
    edge = (column + 1) * block_size
    first += edge - rows[row, KNOWN]
    rows[row, KNOWN] = edge
    if first < stop:
        append_tokens(blocks, ids, stack, counts, index, ids_of, factors, rows, tails, table, row, tokens, first, stop)


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
        count, hashed = accepted[i] if accepted.size else query_starts[i + 1] - first, np.int32(0)
        if tokens.size and rows[row, KNOWN] == rows[row, LENGTH]:
            hashed = _learn(blocks, ids, index, ids_of, factors, rows, tails, table, row, tokens, first, count)
        if hashed:
            filling[num_filling], num_filling = pack(i, hashed), num_filling + 1
        else:
            _advance(blocks, stack, counts, rows, table, row, count, window, block_size)
    for packed in filling[:num_filling]:
        i, hashed = unpack(packed)
        row, first = row_of(rows, seqs[i]), query_starts[i]
        count = accepted[i] if accepted.size else query_starts[i + 1] - first
        _publish(blocks, ids, stack, counts, index, ids_of, factors, rows, tails, table, row, tokens, first,
                 first + count, hashed)
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
        if rows[row, STATE] == LIVE:
            rows[row, STATE] = FORKED
        keep_blocks(blocks, stack, counts, rows, table, row, kept)
        if copy and rows[row, LENGTH] % block_size and table[row, kept - 1] == copies[copy - 1, 1]:
            copy -= 1
            table[row, kept - 1] = copies[copy, 0]
            drop_block(blocks, stack, counts, copies[copy, 1])
