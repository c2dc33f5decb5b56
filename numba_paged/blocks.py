"""BlockPool: which blocks are free, which are cached, and how many references the others have.

A block is always in exactly one of three states:

- *free*: no references, on the free stack;
- *cached*: no references, but it holds a published prefix (its `hashes` entry is not 0), so it waits in the list of the
  least recently used, from which `prefix_cache` takes it back when it is asked for again, or evicts it;
- *in use*: one reference for each table entry that names it, and for each open plan that may need it for a rollback.

All state is flat arrays and the loops over them are compiled. Compiled functions take the arrays of a `BlockPool` by
these names:

- ``blocks`` int32 [num_blocks + 1, 4]: what a step touches of a block, a quarter of a cache line. Columns: REFS
  (references), NEXT and PREV (while cached, the blocks that are evicted after and before it; else 0), HASH (of the
  prefix under which it is published; 0 while it is not). The last row is no block: there the list of cached blocks
  begins and ends;
- ``ids`` int64 [num_blocks, 2]. Columns: UID (names what the block holds; never used again for anything else), PARENT
  (while published, the uid of the block before it in the prefix, or of a root);
- ``stack`` int32 [num_blocks]: the free blocks, the next to be taken last;
- ``counts`` int64 [6]: NUM_FREE and those after it.
"""

import numpy as np

from .compiled import bare, inlined, making
from .errors import CorruptState, OutOfBlocks
from .scalars import whole_number

REFS, NEXT, PREV, HASH = range(4)
UID, PARENT = range(2)
NUM_FREE, NUM_CACHED, LAST_UID, NUM_EVICTED, NUM_COPIED, HAS_HOST = range(6)


@inlined
def new_uid(counts):
    """A number that was never given out before."""
    counts[LAST_UID] += 1
    return counts[LAST_UID]


@inlined
def pop_free(blocks, ids, stack, counts):
    """Take the top of the free stack, with one reference; the caller knows that there is one."""
    counts[NUM_FREE] -= 1
    block = stack[counts[NUM_FREE]]
    blocks[block, REFS] = 1
    ids[block, UID] = new_uid(counts)
    return block


@inlined
def push_free(stack, counts, block):
    """Put a block without references onto the free stack."""
    stack[counts[NUM_FREE]] = block
    counts[NUM_FREE] += 1


@inlined
def push_cached(blocks, counts, block):
    """Put a published block without references at the end of the list, to be evicted last."""
    end = blocks.shape[0] - 1
    last = blocks[end, PREV]
    blocks[last, NEXT], blocks[block, PREV] = block, last
    blocks[block, NEXT], blocks[end, PREV] = end, block
    counts[NUM_CACHED] += 1


@inlined
def unlink_cached(blocks, counts, block):
    """Take a block out of the list of cached ones."""
    after, before = blocks[block, NEXT], blocks[block, PREV]
    blocks[before, NEXT], blocks[after, PREV] = after, before
    blocks[block, NEXT] = blocks[block, PREV] = 0
    counts[NUM_CACHED] -= 1


@inlined
def share_block(blocks, counts, block):
    """Add a reference to a block that is in use or cached."""
    if blocks[block, REFS] == 0:
        unlink_cached(blocks, counts, block)
    blocks[block, REFS] += 1


@inlined
def drop_block(blocks, stack, counts, block):
    """Take one reference off a block; after the last it is cached if it is published, else free."""
    blocks[block, REFS] -= 1
    if blocks[block, REFS] == 0:
        if blocks[block, HASH]:
            push_cached(blocks, counts, block)
        else:
            push_free(stack, counts, block)


@bare
def _pop_blocks(blocks, ids, stack, counts, out):
    for i in range(out.size):
        out[i] = pop_free(blocks, ids, stack, counts)


@bare
def _drop_blocks(blocks, stack, counts, dropped):
    """The last first: what `allocate` gave goes back in its order."""
    for i in range(dropped.size - 1, -1, -1):
        drop_block(blocks, stack, counts, dropped[i])


class BlockPool:
    """Which blocks are free, and how many references the others have.

    Parameters
    ----------
    num_blocks : int
        Blocks in the pool, ids 0 up to ``num_blocks - 1``; none is special.

    Raises
    ------
    ValueError
        If it is not a whole number from 1 to 2**31 - 2.

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
        self.num_blocks = n = whole_number("num_blocks", num_blocks, 1, 2**31 - 2)
        self.blocks, self.ids = np.zeros((n + 1, 4), np.int32), np.zeros((n, 2), np.int64)
        self.blocks[n, [NEXT, PREV]] = n  # the empty list
        self.stack = np.arange(n - 1, -1, -1, dtype=np.int32)
        self.counts = np.zeros(6, np.int64)
        self.counts[NUM_FREE] = n
        self.refs, self.hashes = self.blocks[:n, REFS], self.blocks[:n, HASH]
        self.uids, self.parents = self.ids[:, UID], self.ids[:, PARENT]
        self.arrays = self.blocks, self.ids, self.stack, self.counts  # as compiled functions take them

    @property
    def num_free(self):
        """Blocks on the free stack."""
        return int(self.counts[NUM_FREE])

    @property
    def num_cached(self):
        """Blocks that hold a published prefix and have no references."""
        return int(self.counts[NUM_CACHED])

    @property
    def num_available(self):
        """Blocks that can be taken: the free ones, and the cached ones, which are then evicted."""
        return self.num_free + self.num_cached

    def allocate(self, n):
        """Take n free blocks, each with one reference.

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
        n = whole_number("n", n, 0)
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = np.empty(n, np.int32)
        _pop_blocks(*self.arrays, blocks)
        return blocks

    def share(self, blocks):
        """Add one reference to each block, once for each time it is named.

        Parameters
        ----------
        blocks : sequence of int
            Blocks in use.

        Raises
        ------
        ValueError
            If an id is out of range or its block is not in use; nothing was changed.
        TypeError
            If they are not integers.
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
        TypeError
            If they are not integers.
        """
        unique, counts = self._used(blocks)
        over = np.flatnonzero(counts > self.refs[unique])
        if over.size:
            block, count = unique[over[0]], counts[over[0]]
            raise ValueError(f"blocks: block {block} is released {count} times but has {self.refs[block]} references")
        _drop_blocks(self.blocks, self.stack, self.counts, np.asarray(blocks, np.int32).ravel())

    def _used(self, blocks):
        """The distinct blocks and how often each is named, all in use."""
        blocks = np.asarray(blocks)
        if blocks.size and blocks.dtype.kind not in "iu":
            raise TypeError(f"blocks must be integers, got {blocks.dtype.name}")
        unique, counts = np.unique(blocks.astype(np.int64), return_counts=True)
        if unique.size and not (unique[0] >= 0 and unique[-1] < self.num_blocks):
            bad = unique[0] if unique[0] < 0 else unique[-1]
            raise ValueError(f"blocks: block {bad} is out of range for a pool of {self.num_blocks} blocks")
        unused = unique[self.refs[unique] == 0]
        if unused.size:
            raise ValueError(f"blocks: block {unused[0]} is not in use")
        return unique, counts.astype(np.int32)

    def cached_blocks(self):
        """The cached blocks in the order in which they will be evicted.

        Returns
        -------
        numpy.ndarray of int32

        Raises
        ------
        CorruptState
            If the list does not end where it should.
        """
        blocks, whole = _walk_cached(self.blocks, self.num_cached)
        if not whole:
            raise CorruptState(f"the list of cached blocks breaks after {blocks.size} of {self.num_cached} blocks")
        return blocks

    def check(self):
        """Prove the invariants: every block is free, cached or in use, and in one of them only.

        Raises
        ------
        CorruptState
            If one does not hold.
        """
        n = self.num_blocks
        for name, count in (("free", self.num_free), ("cached", self.num_cached)):
            if not 0 <= count <= n:
                raise CorruptState(f"num_{name} is {count}, out of range for {n} blocks")
        stack = self.stack[: self.num_free]
        if stack.size and not (stack.min() >= 0 and stack.max() < n):
            raise CorruptState(f"the free stack holds an id out of range: {stack.min()}..{stack.max()}")
        on_stack, in_list = np.bincount(stack, minlength=n), np.zeros(n, bool)
        if (on_stack > 1).any():
            raise CorruptState(f"block {on_stack.argmax()} is on the free stack {on_stack.max()} times")
        in_list[self.cached_blocks()] = True
        published, used, linked = self.hashes != 0, self.refs != 0, (self.blocks[:n, [NEXT, PREV]] != 0).any(axis=1)
        for is_wrong, what in (
            ((on_stack == 1) & used, "on the free stack"),
            (in_list & used, "in the list of cached blocks"),
            ((on_stack == 0) & ~in_list & ~used, "neither free nor cached"),
            ((on_stack == 1) & published, "free but published"),
            (in_list & ~published, "in the list of cached blocks but not published"),
            (~in_list & linked, "linked but not in the list of cached blocks"),
            (self.refs < 0, "in use"),
        ):
            if is_wrong.any():
                block = is_wrong.argmax()
                raise CorruptState(f"block {block} is {what} and has {self.refs[block]} references")


@making
def _walk_cached(blocks, num_cached):
    """The list from its beginning, and whether each link goes both ways and the end comes after `num_cached` blocks."""
    end = blocks.shape[0] - 1
    order = np.empty(num_cached, np.int32)
    last = end
    for i in range(num_cached):
        block = blocks[last, NEXT]
        if not (0 <= block < end and blocks[block, PREV] == last):
            return order[:i], False
        order[i] = last = block
    return order, blocks[last, NEXT] == end and blocks[end, PREV] == last
