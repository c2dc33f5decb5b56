"""PagedKVCache: joins the host's state (which sequence has which blocks) with a backend's pool of keys and values."""

from dataclasses import dataclass

import numpy as np

from . import checks
from .backend import load_backend
from .blocks import BlockPool, SequenceTables, assign_blocks, count_blocks, drop_blocks, undo_blocks
from .errors import CorruptState
from .plan import Plan, cut_work
from .sizing import kv_bytes_per_token, num_blocks_for
from .spec import AttentionOptions, AttentionSpec


@dataclass(frozen=True)
class CacheStats:
    """How the pool is used, at one moment.

    Attributes
    ----------
    num_blocks, num_free, num_used : int
        Blocks in all, free, and in use.
    num_shared : int
        Blocks that more than one sequence holds.
    num_sequences, num_tokens : int
        Living sequences, and the tokens that they store, shared ones counted once per sequence.
    num_wasted : int
        Slots in the sequences' blocks that hold no token.
    num_copied : int
        Blocks copied on write since the cache was made.
    block_bytes : int
        Bytes that one block takes, keys and values of all layers.
    """

    num_blocks: int
    num_free: int
    num_used: int
    num_shared: int
    num_sequences: int
    num_tokens: int
    num_wasted: int
    num_copied: int
    block_bytes: int


class PagedKVCache:
    """A KV cache in fixed-size blocks for all layers of a model, and the attention over it.

    Parameters
    ----------
    spec : AttentionSpec
        Geometry, block size, format and standing options.
    num_layers : int
        Layers that have keys and values.
    num_blocks : int
        Blocks in the pool; each holds `spec.block_size` tokens in all layers.
    backend : {"auto", "cpu", "cuda"} or Backend
        Where keys and values live and attention runs.
    prefix_caching : bool
        Whether full blocks are kept for other sequences that begin with the same tokens.
    max_sequences : int
        How many sequences may live at the same time.
    max_length : int, optional
        The longest a sequence may grow, in tokens; the pool's size if not given.

    Raises
    ------
    ValueError
        If a number is out of its range.
    RuntimeError
        If the backend cannot be loaded.

    Notes
    -----
    A step is: `plan` (the host decides: blocks are taken, shared blocks that will be written are copied), `attend` once
    per layer, `commit` (or `rollback`). Several plans may be open as long as no sequence is in two of them. Source: the
    vLLM paper (arXiv:2309.06180), sections 4.2 to 4.4.

    Examples
    --------
    >>> import numpy as np, numba_paged as npg
    >>> spec = npg.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=4, block_size=2, kv_dtype="float32")
    >>> cache = npg.PagedKVCache(spec, num_layers=1, num_blocks=8, backend="cpu")
    >>> seq = cache.add()
    >>> plan = cache.plan([seq], num_new=3)
    >>> q, k = np.ones((3, 2, 4), np.float32), np.ones((3, 1, 4), np.float32)
    >>> out = cache.attend(0, q, k, k, plan)
    >>> cache.commit(plan)
    >>> cache.length(seq), cache.stats().num_used
    (3, 2)
    """

    def __init__(self, spec, num_layers, num_blocks, backend="auto", prefix_caching=True, max_sequences=1024,
                 max_length=None):
        if not isinstance(spec, AttentionSpec):
            raise TypeError(f"spec must be an AttentionSpec, got {type(spec).__name__}")
        if int(num_layers) != num_layers or num_layers < 1:
            raise ValueError(f"num_layers must be a whole number >= 1, got {num_layers!r}")
        self.spec = spec
        self.num_layers = int(num_layers)
        self._pool = BlockPool(num_blocks)
        self._tables = SequenceTables(max_sequences, spec.block_size)
        capacity = self._pool.num_blocks * spec.block_size
        self.max_length = capacity if max_length is None else int(max_length)
        if self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length!r}")
        self._backend = load_backend(backend) if isinstance(backend, str) else backend
        self._keys, self._values = (self._new_pool() for _ in range(2))
        self._planned = np.zeros(max_sequences, np.int32)
        self._open_plans = {}
        self._num_copied = 0

    def _new_pool(self):
        """[num_layers, num_blocks, block_size, num_kv_heads, head_dim]; a head's slots of a block lie together."""
        spec = self.spec
        shape = (self.num_layers, self._pool.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        return self._backend.zeros(shape, spec.kv_format.dtype).swapaxes(2, 3)

    # ---------------------------------------------------------------- sequences

    def add(self, tokens=None, salt=None):
        """Begin a sequence.

        Parameters
        ----------
        tokens : sequence of int, optional
            The token ids of its prompt: blocks that hold a cached prefix of them are shared.
        salt : hashable, optional
            The namespace of prefixes to look in (a tenant, an adapter).

        Returns
        -------
        int
            The sequence's handle; `length` says how many tokens are there already.

        Raises
        ------
        OutOfBlocks
            If `max_sequences` are alive.
        """
        row = self._tables.open()
        return int(self._tables.handles[row])

    def fork(self, seq):
        """Begin a sequence that has all tokens of another: its blocks are shared, none is allocated or copied.

        Parameters
        ----------
        seq : int
            The parent's handle.

        Returns
        -------
        int
            The child's handle.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence.
        ValueError
            If the parent is in an open plan.
        OutOfBlocks
            If `max_sequences` are alive.
        """
        parent = self._settled_row(seq, "fork")
        row = self._tables.open()
        tables, count = self._tables, self._tables.num_blocks[parent]
        blocks = tables.blocks(parent)
        self._pool.refs[blocks] += 1
        tables.table[row, :count] = blocks
        tables.num_blocks[row] = count
        tables.lengths[row] = tables.lengths[parent]
        return int(tables.handles[row])

    def truncate(self, seq, length):
        """Forget a sequence's last tokens; blocks that it no longer needs are released.

        Parameters
        ----------
        seq : int
            The handle.
        length : int
            How many tokens stay.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence.
        ValueError
            If the sequence is in an open plan, or is not that long.
        """
        row = self._settled_row(seq, "truncate")
        tables = self._tables
        if int(length) != length or not 0 <= length <= tables.lengths[row]:
            raise ValueError(f"length must be from 0 to {tables.lengths[row]} for sequence {seq}, got {length!r}")
        kept = num_blocks_for(int(length), self.spec.block_size)
        dropped = tables.table[row, kept : tables.num_blocks[row]]
        drop_blocks(self._pool.free, self._pool.top, self._pool.refs, dropped)
        dropped[:] = -1
        tables.num_blocks[row], tables.lengths[row] = kept, length

    def free(self, seq):
        """End a sequence; blocks that no other holds are free again.

        Parameters
        ----------
        seq : int
            The handle; it is never given out again.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence (a second free, for example).
        ValueError
            If the sequence is in an open plan.
        """
        row = self._settled_row(seq, "free")
        drop_blocks(self._pool.free, self._pool.top, self._pool.refs, self._tables.blocks(row))
        self._tables.close(row)

    def length(self, seq):
        """How many tokens of a sequence are in the cache.

        Parameters
        ----------
        seq : int
            The handle.

        Returns
        -------
        int
            Tokens; those of an open plan do not count yet.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence.
        """
        return int(self._tables.lengths[self._row(seq)])

    def blocks(self, seq):
        """The blocks of a sequence, in the order of positions.

        Parameters
        ----------
        seq : int
            The handle.

        Returns
        -------
        numpy.ndarray of int32
            A copy.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence.
        """
        return self._tables.blocks(self._row(seq)).copy()

    # ---------------------------------------------------------------- a step

    def plan(self, seqs, num_new=1):
        """Decide one step: take the blocks that the new tokens need, and copy shared ones that will be written.

        Parameters
        ----------
        seqs : sequence of int
            Handles, none twice and none in another open plan.
        num_new : int or sequence of int
            New tokens of each (or of every) sequence, at least 1.

        Returns
        -------
        Plan

        Raises
        ------
        UnknownSequence
            If a handle names no living sequence.
        ValueError
            If a sequence is named twice or is in an open plan, or a count or a length is out of its range.
        OutOfBlocks
            If the pool has too few free blocks. In every case nothing was changed.
        """
        seqs, rows, num_new = self._check_batch(seqs, num_new)
        tables, pool, block_size = self._tables, self._pool, self.spec.block_size
        needed, num_copied, copied = self._count_blocks(rows, num_new)
        pool.require(needed)
        num_tokens = int(num_new.sum())
        copies, positions = np.empty((num_copied, 2), np.int32), np.empty(num_tokens, np.int32)
        slots, query_starts = np.empty(num_tokens, np.int64), np.empty(rows.size + 1, np.int32)
        lengths = tables.lengths[rows] + num_new
        tables.reserve_width(num_blocks_for(int(lengths.max(initial=0)), block_size))
        assign_blocks(rows, num_new, tables.lengths, tables.num_blocks, tables.table, pool.refs, block_size, copied,
                      pool.free, pool.top, copies, positions, slots, query_starts)
        if num_copied:
            self._backend.copy_blocks(self._keys, self._values, copies[:, 0], copies[:, 1])
            self._num_copied += num_copied
        block_tables = tables.table[rows, : tables.num_blocks[rows].max(initial=0)]
        tiling = self._backend.tiling(self.spec.group, int(num_new.max(initial=0)))
        work = cut_work(query_starts, lengths, block_size, self.spec.num_kv_heads, tiling, True, self.spec.window)
        plan = Plan(query_starts, lengths, block_tables, work, seqs, positions, slots, copies)
        self._planned[rows] = num_new
        self._open_plans[plan] = rows
        return plan

    def _count_blocks(self, rows, num_new):
        copied = np.empty(rows.size, bool)
        tables = self._tables
        return *count_blocks(rows, num_new, tables.lengths, tables.num_blocks, tables.table, self._pool.refs,
                             self.spec.block_size, copied), copied

    def blocks_needed(self, seqs, num_new=1):
        """How many blocks `plan` would take, copies on write included; compare with `num_available`.

        Parameters
        ----------
        seqs, num_new
            As in `plan`, and refused as there.

        Returns
        -------
        int
            Blocks.
        """
        _, rows, num_new = self._check_batch(seqs, num_new)
        return int(self._count_blocks(rows, num_new)[0])

    @property
    def num_available(self):
        """Blocks that `plan` can take now."""
        return self._pool.num_free

    def _check_batch(self, seqs, num_new):
        """Handles, rows and counts of a plan, refused before anything changes."""
        seqs = np.array(seqs, np.int64, ndmin=1)
        rows = self._tables.rows_of(seqs)
        num_new = np.asarray(num_new)
        if num_new.dtype.kind not in "iu" or num_new.ndim > 1 or (num_new.ndim and num_new.size != seqs.size):
            raise ValueError(f"num_new must be one whole number, or one for each of {seqs.size} sequences")
        if num_new.size and num_new.min() < 1:
            raise ValueError(f"num_new must be at least 1, got {num_new.min()}")
        num_new = np.broadcast_to(num_new.astype(np.int64), seqs.shape)
        if np.unique(rows).size < rows.size:
            twice = seqs[np.flatnonzero(np.bincount(rows)[rows] > 1)[0]]
            raise ValueError(f"seqs names sequence {twice} twice")
        busy = np.flatnonzero(self._planned[rows])
        if busy.size:
            raise ValueError(f"sequence {seqs[busy[0]]} is in an open plan; commit or roll it back first")
        too_long = np.flatnonzero(self._tables.lengths[rows] + num_new > self.max_length)
        if too_long.size:
            row = too_long[0]
            raise ValueError(f"sequence {seqs[row]} would have {self._tables.lengths[rows[row]] + num_new[row]} tokens, "
                             f"max_length is {self.max_length}")
        return seqs, rows, num_new.astype(np.int32)

    def attend(self, layer, q, k, v, plan, *, alibi_slopes=None, sinks=None, k_scale=1.0, v_scale=1.0, out=None,
               return_lse=False):
        """Write a layer's new keys and values to the plan's slots, then attend its queries over the cache.

        Parameters
        ----------
        layer : int
            Which layer.
        q : array [num_tokens, num_q_heads, head_dim]
            Queries of the plan's tokens, float32, float16 or bfloat16.
        k, v : array [num_tokens, num_kv_heads, head_dim]
            Their keys and values.
        plan : Plan
            An open plan of this cache.
        alibi_slopes, sinks, k_scale, v_scale, out, return_lse
            As in `decode`; keys and values are stored divided by their scale.

        Returns
        -------
        out : array like q
        lse : array [num_tokens, num_q_heads] of float32
            Only with `return_lse`.

        Raises
        ------
        ValueError
            If a shape does not fit, the layer is out of range, or the plan is not open.
        TypeError
            If a dtype is not supported, or an array is not where the cache is.
        """
        self._require_open(plan)
        backend, spec = self._backend, self.spec
        q, k, v = (backend.view(array, name) for array, name in ((q, "q"), (k, "k"), (v, "v")))
        checks.check_query(q, spec.num_kv_heads, spec.head_dim)
        checks.check_rows(q, "q", (plan.num_tokens, spec.num_q_heads))
        checks.check_new(k, v, (spec.num_kv_heads, spec.head_dim))
        checks.check_rows(k, "k", (plan.num_tokens,))
        if out is not None:
            out = backend.view(out, "out")
            checks.check_out(out, q)
        slopes = checks.alibi_slopes(backend, alibi_slopes, spec.num_q_heads)
        sinks = checks.sinks(backend, sinks, spec.num_q_heads)
        options = AttentionOptions(spec.scale, spec.soft_cap, spec.window, slopes, sinks, k_scale, v_scale)
        keys, values = self.keys(layer), self.values(layer)
        backend.append(k, v, keys, values, plan.slots, options.k_scale, options.v_scale)
        out = backend.empty(q.shape, q.dtype) if out is None else out
        lse = backend.empty(q.shape[:2], np.dtype(np.float32)) if return_lse else None
        backend.attend(q, keys, values, plan, options, out, lse)
        return (out, lse) if return_lse else out

    def commit(self, plan, tokens=None):
        """Make a plan's tokens part of their sequences.

        Parameters
        ----------
        plan : Plan
            An open plan of this cache.
        tokens : sequence of int, optional
            The ids of the plan's new positions, in plan order; without them those positions are never found by their
            prefix.

        Raises
        ------
        ValueError
            If the plan is not open, or there are more or fewer tokens than it has.
        """
        self._require_open(plan)
        if tokens is not None and len(tokens) != plan.num_tokens:
            raise ValueError(f"tokens must have {plan.num_tokens} ids, one for each new position, got {len(tokens)}")
        rows = self._close_plan(plan)
        self._tables.lengths[rows] = plan.lengths
        drop_blocks(self._pool.free, self._pool.top, self._pool.refs, plan.copies[:, 0])

    def rollback(self, plan):
        """Give a plan's blocks back: the state is as before `plan`.

        Parameters
        ----------
        plan : Plan
            An open plan of this cache.

        Raises
        ------
        ValueError
            If the plan is not open.
        """
        self._require_open(plan)
        rows = self._close_plan(plan)
        tables, pool = self._tables, self._pool
        undo_blocks(rows, tables.lengths, tables.num_blocks, tables.table, pool.refs, self.spec.block_size, pool.free,
                    pool.top, plan.copies)

    # ---------------------------------------------------------------- views, statistics, proofs

    def keys(self, layer):
        """The keys of a layer.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array [num_blocks, block_size, num_kv_heads, head_dim]
            A view of the pool, for the functions on arrays.

        Raises
        ------
        ValueError
            If the layer is out of range.
        """
        return self._keys[self._layer(layer)]

    def values(self, layer):
        """The values of a layer.

        Parameters
        ----------
        layer : int
            Which layer.

        Returns
        -------
        array [num_blocks, block_size, num_kv_heads, head_dim]
            A view of the pool, for the functions on arrays.

        Raises
        ------
        ValueError
            If the layer is out of range.
        """
        return self._values[self._layer(layer)]

    def stats(self):
        """How the pool is used now.

        Returns
        -------
        CacheStats
        """
        tables, pool, spec = self._tables, self._pool, self.spec
        per_token = kv_bytes_per_token(self.num_layers, spec.num_kv_heads, spec.head_dim, spec.kv_dtype)
        num_tokens = int(tables.lengths.sum())
        return CacheStats(
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_used=pool.num_blocks - pool.num_free,
            num_shared=int((pool.refs > 1).sum()),
            num_sequences=int(tables.alive.sum()),
            num_tokens=num_tokens,
            num_wasted=int(tables.num_blocks.sum()) * spec.block_size - num_tokens,
            num_copied=self._num_copied,
            block_bytes=per_token * spec.block_size,
        )

    def check(self):
        """Prove every invariant of the host's state.

        Raises
        ------
        CorruptState
            If one does not hold; the message names it.
        """
        self._pool.check()
        self._tables.check(self._planned)
        used = np.arange(self._tables.table.shape[1]) < self._tables.num_blocks[:, None]
        holds = [self._tables.table[used], *(plan.copies[:, 0] for plan in self._open_plans)]
        counted = np.bincount(np.concatenate(holds), minlength=self._pool.num_blocks)
        wrong = np.flatnonzero(counted != self._pool.refs)
        if wrong.size:
            block = wrong[0]
            raise CorruptState(f"block {block} has {self._pool.refs[block]} references, tables and open plans hold "
                               f"{counted[block]}")
        planned = np.zeros_like(self._planned)
        for plan, rows in self._open_plans.items():
            planned[rows] += np.diff(plan.query_starts)
        if (planned != self._planned).any():
            raise CorruptState("the rows marked as planned are not those of the open plans")

    # ---------------------------------------------------------------- what is refused

    def _row(self, seq):
        return int(self._tables.rows_of(np.array([seq], np.int64))[0])

    def _settled_row(self, seq, verb):
        row = self._row(seq)
        if self._planned[row]:
            raise ValueError(f"cannot {verb} sequence {seq}: it is in an open plan; commit or roll it back first")
        return row

    def _layer(self, layer):
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be from 0 to {self.num_layers - 1}, got {layer!r}")
        return layer

    def _require_open(self, plan):
        if plan not in self._open_plans:
            raise ValueError("plan is not open in this cache: it was committed or rolled back, or made by another")

    def _close_plan(self, plan):
        rows = self._open_plans.pop(plan)
        self._planned[rows] = 0
        return rows
