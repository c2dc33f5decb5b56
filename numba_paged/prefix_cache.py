"""PrefixCache: from the beginning of a prompt to the blocks that hold it already.

The index is an exact trie whose nodes are blocks. A published block is found by (uid of the block before it, its token
ids): since a uid is never given out twice, equal keys mean equal token ids from position 0 on. Ids are compared, not
only their hash, so no prompt can be made that is taken for another. Each salt has a root uid of its own: namespaces
cannot meet. Sources: hash-addressed blocks as in vLLM (arXiv:2309.06180), a tree of prefixes as in SGLang's
RadixAttention (arXiv:2312.07104); a trie of whole blocks is both.

What is evicted is the block that was unused for longest. Sequences drop their blocks from the end, and hold the parent
of each block they hold, so a block is always cached before its parent and evicted before it: the list needs no search
for leaves. (Where a window slides, parents go first; what they leave behind cannot be found and is evicted in its
turn.)

Compiled functions take the arrays of a `PrefixCache` by these names, after those of a `BlockPool`:

- ``index`` int64 [3 * num_blocks // 2]: a hash table with open addressing. An entry is a block below its hash, so that
  others need not be looked at; or EMPTY;
- ``ids_of`` int32 [num_blocks, block_size]: the token ids of each published block;
- ``factors`` uint64 [block_size + 1]: of the hash.
"""

import numpy as np

from .blocks import (HASH, NEXT, NUM_CACHED, NUM_EVICTED, NUM_FREE, PARENT, PREV, REFS, UID, drop_block, new_uid,
                     pop_free, push_free, share_block, unlink_cached)
from .compiled import bare, entry, inlined, making, prefetch, prefetch_row
from .sequences import (CHAIN, FORKED, FREE, KNOWN, LENGTH, NO_BLOCK, NUM_BLOCKS, START, STATE, UNKNOWN, copy_values,
                        keep_blocks, num_hidden)
from .sizing import num_blocks_for

EMPTY = 0

_AHEAD = 4
"""How many blocks ahead of their eviction or publication memory is asked for."""


@inlined
def hash_prefix(factors, parent, tokens, start):
    """A hash of (parent, a block's token ids), never 0.

    The high bits of a sum of products with secret factors: whoever chose two keys that differ, they collide with a
    probability of about 2**-31 (multilinear hashing, Lemire and Kaser, arXiv:1202.4961).
    """
    total = np.uint64(parent) * factors[0]
    for i in range(factors.size - 1):
        total += np.uint64(np.uint32(tokens[start + i])) * factors[i + 1]
    return np.int32(np.uint32(total >> np.uint64(32)) | np.uint32(1))


@inlined
def pack(number, hashed):
    """A number of 32 bits below a hash: an entry of the index, if it is a block's; never EMPTY, since no hash is 0."""
    return np.int64(hashed) << 32 | np.int64(number)


@inlined
def unpack(packed):
    """(The number, the hash.)"""
    return np.int64(packed & 0xFFFFFFFF), np.int32(packed >> 32)


@inlined
def _home(index, hashed):
    """Where the search for a hash begins."""
    return np.int64((np.uint64(np.uint32(hashed)) * np.uint64(index.size)) >> np.uint64(32))


@inlined
def prefetch_place(index, hashed):
    """Ask for the place in the index where the search for a hash begins."""
    prefetch(index.ctypes.data + 8 * _home(index, hashed), 3)


@inlined
def prefetch_column(ids, index, ids_of, factors, table, row, column, tokens, start):
    """Ask for what the publication of a row's block will write, if the one before it is published as it is."""
    prefetch_place(index, hash_prefix(factors, ids[table[row, column - 1], UID], tokens, start))
    prefetch_row(ids_of, table[row, column])


@inlined
def _next(index, place):
    return place + 1 if place + 1 < index.size else 0


@inlined
def _distance(index, first, last):
    return last - first if last >= first else last - first + index.size


@inlined
def _same_tokens(ids_of, block, tokens, start):
    for i in range(ids_of.shape[1]):
        if ids_of[block, i] != tokens[start + i]:
            return False
    return True


@inlined
def find_block(ids, index, ids_of, parent, tokens, start, hashed):
    """The block published under (parent, tokens[start : start + block_size]), or NO_BLOCK."""
    place, found = _home(index, hashed), np.int64(NO_BLOCK)
    while index[place] != EMPTY:
        block, hashed_there = unpack(index[place])
        if hashed_there == hashed and ids[block, PARENT] == parent and _same_tokens(ids_of, block, tokens, start):
            found = block
            break
        place = _next(index, place)
    return found


@inlined
def publish_block(blocks, ids, index, ids_of, block, parent, tokens, start, hashed):
    """Enter a block that `find_block` did not find."""
    blocks[block, HASH], ids[block, PARENT] = hashed, parent
    for i in range(ids_of.shape[1]):
        ids_of[block, i] = tokens[start + i]
    place = _home(index, hashed)
    while index[place] != EMPTY:
        place = _next(index, place)
    index[place] = pack(block, hashed)


@inlined
def unpublish_block(blocks, index, block):
    """Take a block out of the index; entries that had to give way to it move up, so that no search ends too early."""
    hashed = blocks[block, HASH]
    entry, gap = pack(block, hashed), _home(index, hashed)
    while index[gap] != entry:
        gap = _next(index, gap)
    blocks[block, HASH] = 0
    place = _next(index, gap)
    while index[place] != EMPTY:
        home = _home(index, unpack(index[place])[1])
        moves = _distance(index, home, place) >= _distance(index, gap, place)
        index[gap] = index[place] if moves else entry  # not a branch, that would be guessed wrong half of the time
        gap = place if moves else gap
        place = _next(index, place)
    index[gap] = EMPTY


@inlined
def evict_block(blocks, ids, stack, counts, index):
    """Turn the cached block that was unused for longest into a free one; the caller knows that there is one."""
    end = blocks.shape[0] - 1
    block = blocks[end, NEXT]
    unlink_cached(blocks, counts, block)
    unpublish_block(blocks, index, block)
    push_free(stack, counts, block)
    counts[NUM_EVICTED] += 1
    soon = blocks[end, NEXT]  # for what is evicted a few blocks later, memory is asked for now
    for _ in range(_AHEAD):
        soon = blocks[soon, NEXT]
    prefetch_place(index, blocks[soon, HASH])
    prefetch_row(blocks, blocks[soon, NEXT])
    prefetch_row(ids, soon)


@inlined
def take_block(blocks, ids, stack, counts, index):
    """A block with one reference: a free one, or the next to be evicted; the caller knows that there is one."""
    if counts[NUM_FREE] == 0:
        evict_block(blocks, ids, stack, counts, index)
    return pop_free(blocks, ids, stack, counts)


@inlined
def append_tokens(blocks, ids, stack, counts, index, ids_of, factors, rows, tails, table, row, tokens, start, stop):
    """Take in the ids tokens[start:stop] of a row's next positions, from a block's edge, and publish what they fill."""
    block_size = ids_of.shape[1]
    column = rows[row, KNOWN] // block_size
    rows[row, KNOWN] += stop - start
    while start + block_size <= stop:
        if start + (_AHEAD + 1) * block_size <= stop:
            prefetch_column(ids, index, ids_of, factors, table, row, column + _AHEAD, tokens,
                            start + _AHEAD * block_size)
        hashed = hash_prefix(factors, rows[row, CHAIN], tokens, start)
        publish_column(blocks, ids, stack, counts, index, ids_of, rows, table, row, column, tokens, start, hashed)
        start, column = start + block_size, column + 1
    for i in range(start, stop):
        tails[row, i - start] = tokens[i]


@inlined
def publish_column(blocks, ids, stack, counts, index, ids_of, rows, table, row, column, tokens, start, hashed):
    """Publish a block of a row under the one before it.

    Where an equal one is published already, the row takes that and drops its own: one is enough, and whoever holds a
    block goes on holding its parent.
    """
    block, parent = table[row, column], rows[row, CHAIN]
    found = find_block(ids, index, ids_of, parent, tokens, start, hashed)
    if found == NO_BLOCK:
        publish_block(blocks, ids, index, ids_of, block, parent, tokens, start, hashed)
    else:
        share_block(blocks, counts, found)
        table[row, column] = found
        drop_block(blocks, stack, counts, block)
    rows[row, CHAIN] = ids[table[row, column], UID]


@bare
def truncate_row(blocks, ids, stack, counts, ids_of, rows, tails, table, row, length, window):
    """Drop a row's tokens past `length`; False, and nothing done, if a block that the next query sees has slid out."""
    block_size = tails.shape[1]
    kept = (length + block_size - 1) // block_size
    if num_hidden(length, window, block_size) < min(kept, rows[row, START]):
        return False
    if length < rows[row, KNOWN]:
        _forget_tokens(ids, ids_of, rows, tails, table, row, length)
    keep_blocks(blocks, stack, counts, rows, table, row, kept)
    rows[row, STATE], rows[row, LENGTH] = FORKED, length
    return True


@bare
def _forget_tokens(ids, ids_of, rows, tails, table, row, length):
    """What is known of a row's tokens shrinks to `length`, still with its blocks."""
    block_size = tails.shape[1]
    column = length // block_size
    if column < rows[row, KNOWN] // block_size:
        block = table[row, column]
        if block == NO_BLOCK:  # what the next block would follow has slid out of the window
            rows[row, KNOWN] = UNKNOWN
            return
        rows[row, CHAIN] = ids[block, PARENT]
        copy_values(ids_of[block], tails[row])
    rows[row, KNOWN] = length


@bare
def _match(ids, index, ids_of, factors, root, tokens, found):
    """Fill `found` with the published blocks that hold the beginning of the tokens, never all of them; how many."""
    block_size, parent = ids_of.shape[1], root
    num_most = max(0, tokens.size - 1) // block_size
    for column in range(num_most):
        start = column * block_size
        hashed = hash_prefix(factors, parent, tokens, start)
        block = find_block(ids, index, ids_of, parent, tokens, start, hashed)
        if block == NO_BLOCK:
            return column
        found[column] = block
        parent = ids[block, UID]
    return num_most


@bare
def _count_cached(blocks, found):
    count = 0
    for block in found:
        count += blocks[block, REFS] == 0
    return count


@making
def match_prompt(blocks, ids, index, ids_of, factors, root, tokens, window):
    """(Tokens that are found, available blocks that all would take)."""
    block_size = ids_of.shape[1]
    num_blocks = (tokens.size + block_size - 1) // block_size
    found = np.empty(num_blocks, np.int32)
    num_found = _match(ids, index, ids_of, factors, root, tokens, found)
    shared = found[num_hidden(num_found * block_size, window, block_size) : num_found]
    return num_found * block_size, num_blocks - num_found + _count_cached(blocks, shared)


@bare
def admit_prompt(blocks, ids, counts, index, ids_of, factors, rows, table, row, root, tokens, window):
    """Make an empty row share the published blocks that hold the beginning of the tokens; of how many tokens."""
    block_size, found = ids_of.shape[1], table[row]
    num_found = _match(ids, index, ids_of, factors, root, tokens, found)
    length = num_found * block_size
    if num_found:
        rows[row, CHAIN] = ids[found[num_found - 1], UID]
    hidden = min(num_hidden(length, window, block_size), num_found)
    found[:hidden] = NO_BLOCK
    for column in range(hidden, num_found):
        share_block(blocks, counts, found[column])
    rows[row, START], rows[row, NUM_BLOCKS] = hidden, num_found
    rows[row, LENGTH] = rows[row, KNOWN] = length
    return length


class PrefixCache:
    """The index of published blocks, and the roots of its salts.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    block_size : int
        Slots per block.
    enabled : bool
        Without it nothing is ever published, and no memory is taken.
    """

    def __init__(self, pool, block_size, enabled):
        self.pool, self.enabled = pool, enabled
        num_blocks = pool.num_blocks if enabled else 0
        self.index = np.zeros(3 * num_blocks // 2, np.int64)
        self.ids_of = np.zeros((num_blocks, block_size), np.int32)
        self.factors = np.random.default_rng().integers(2**64, size=block_size + 1, dtype=np.uint64)
        self.arrays = self.index, self.ids_of, self.factors  # as compiled functions take them
        self.roots, self._most_roots = {}, 1024
        self.queried, self.hits = {False: 0, True: 0}, {False: 0, True: 0}  # by whether the prompt was resumed

    def begin(self, sequences, tokens, salt, window, resumed):
        """Begin a sequence that shares the published beginning of its prompt.

        Parameters
        ----------
        sequences : SequenceTables
            Where it gets a row.
        tokens : int32 [num_tokens]
            Token ids.
        salt : hashable
            Equal salts share prefixes, others never do.
        window : int
            Visible keys; blocks out of it are not shared.
        resumed : bool
            Whether it is counted apart, as a prompt that was computed before.

        Returns
        -------
        int
            The row.

        Raises
        ------
        ValueError
            If there is a salt but no prefix caching.
        TypeError
            If the salt is not hashable.
        OutOfBlocks
            If all rows are taken.
        """
        self._check_salt(salt)
        sequences.require_row()
        if not self.enabled:
            return sequences.open(UNKNOWN, 0)
        root = self._root(salt, sequences)
        row = sequences.open(0, root)
        if tokens.size:
            sequences.reserve_width(num_blocks_for(tokens.size, sequences.block_size))
            pool = self.pool
            self.hits[resumed] += entry[admit_prompt](pool.blocks, pool.ids, pool.counts, *self.arrays, sequences.rows,
                                                      sequences.table, row, root, tokens, window)
            self.queried[resumed] += tokens.size
        return row

    def _check_salt(self, salt):
        if salt is not None and not self.enabled:
            raise ValueError(f"salt {salt!r} is a namespace of prefixes, and prefix_caching is off")
        hash(salt)

    def _root(self, salt, sequences):
        """The uid of the root of a salt's prefixes."""
        uid = self.roots.get(salt)
        if uid is None:
            if len(self.roots) >= self._most_roots:
                self._forget_roots(sequences)
            uid = self.roots[salt] = int(new_uid(self.pool.counts))
        return uid

    def _forget_roots(self, sequences):
        """Drop the salts under which nothing is published and no sequence lives: there may be a new one each
        request."""
        pool = self.pool
        kept = {*sequences.chains[sequences.states != FREE].tolist(), *pool.parents[pool.hashes != 0].tolist()}
        self.roots = {salt: uid for salt, uid in self.roots.items() if uid in kept}
        self._most_roots = max(1024, 2 * len(self.roots))

    def match(self, tokens, salt, window):
        """How much of a prompt is published.

        Parameters
        ----------
        tokens : int32 [num_tokens]
            Token ids.
        salt : hashable
            Its namespace.
        window : int
            Visible keys; blocks out of it are not shared.

        Returns
        -------
        num_tokens : int
            Tokens that a sequence would find.
        num_blocks : int
            Available blocks that the whole prompt would take: new ones, and cached ones that it would share.

        Raises
        ------
        ValueError
            If there is a salt but no prefix caching.
        TypeError
            If the salt is not hashable.
        """
        self._check_salt(salt)
        if not self.enabled:
            return 0, num_blocks_for(tokens.size, self.ids_of.shape[1])
        return match_prompt(self.pool.blocks, self.pool.ids, *self.arrays, self.roots.get(salt, 0), tokens, window)

    def clear(self, sequences):
        """Unpublish every block, and no longer publish those that living sequences compute on top of them.

        Parameters
        ----------
        sequences : SequenceTables
            The sequences.
        """
        pool, cached = self.pool, self.pool.cached_blocks()
        num_free, links = pool.num_free, pool.blocks[:, [NEXT, PREV]]
        pool.stack[num_free : num_free + cached.size] = cached[::-1]
        pool.counts[NUM_FREE] += cached.size
        pool.counts[NUM_CACHED] = 0
        links[cached], links[-1] = 0, pool.num_blocks
        pool.blocks[:, [NEXT, PREV]] = links
        pool.hashes[:] = 0
        self.index[:] = EMPTY
        sequences.known[(sequences.lengths > 0) | (sequences.planned > 0)] = UNKNOWN
