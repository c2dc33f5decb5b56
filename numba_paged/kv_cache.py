"""PagedKVCache: joins the host's state (which sequence has which blocks) with a backend's pool of keys and values."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from . import batches, checks, steps
from .backend import load_backend
from .blocks import BlockPool
from .compiled import entry
from .draw import Drawing
from .errors import OutOfBlocks
from .invariants import check_plans, check_prefixes, check_references, check_tails
from .plan import cut_work
from .prefix_cache import PrefixCache, truncate_row
from .scalars import whole_number
from .sequences import (SWAPPED, UNKNOWN, SequenceTables, copy_tables, empty_tables, find_rows, fork_row, free_row,
                        keep_blocks, reparent_rows)
from .sizing import kv_bytes_per_token
from .spec import NO_WINDOW, AttentionOptions, AttentionSpec
from .stats import collect
from .swap import HostPool

_LONGEST = 2**31 - 1
_NO_TOKENS = np.empty(0, np.int32)
_ALL_ACCEPTED = np.empty(0, np.int64)


class PrefixMatch(NamedTuple):
    """How much of a prompt is in the cache already.

    Attributes
    ----------
    num_tokens : int
        Tokens that a sequence would not have to compute.
    num_blocks : int
        Available blocks that the sequence would take for the whole prompt: new ones, and cached ones that it shares.
    """

    num_tokens: int
    num_blocks: int


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
        The longest a sequence may grow, in tokens; if not given the pool's size, or with a window 2**31 - 1.
    num_host_blocks : int
        Blocks of the host's memory that `swap_out` may fill.
    split_size : int, optional
        A fixed length, in tokens, of the splits that `attend` makes of a sequence, as in `decode`. Each new token is
        then attended by itself, so that its result depends to the last bit on nothing but its sequence: not on what
        else is in the batch, how a prompt is cut into steps, or what was preempted; prompts take longer for it.

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
                 max_length=None, num_host_blocks=0, split_size=None):
        if not isinstance(spec, AttentionSpec):
            raise TypeError(f"spec must be an AttentionSpec, got {type(spec).__name__}")
        self.spec = spec
        self.num_layers = whole_number("num_layers", num_layers)
        num_host_blocks = whole_number("num_host_blocks", num_host_blocks, 0)
        self.split_size = None if split_size is None else whole_number("split_size", split_size)
        self._pool = BlockPool(num_blocks)
        self._sequences = SequenceTables(max_sequences, spec.block_size)
        if max_length is None:
            capacity = self._pool.num_blocks * spec.block_size
            max_length = min(capacity, _LONGEST) if spec.window is None else _LONGEST
        self.max_length = whole_number("max_length", max_length, 1, _LONGEST)
        self._prefixes = PrefixCache(self._pool, spec.block_size, bool(prefix_caching))
        self._window = NO_WINDOW if spec.window is None else spec.window
        self._backend = load_backend(backend) if isinstance(backend, str) else backend
        self._keys, self._values = (self._new_pool() for _ in range(2))
        self._host = None
        if num_host_blocks:
            self._host = HostPool(num_host_blocks, self._keys, self._values, spec.kv_format.bits, self._backend,
                                  self._prefixes, self._sequences)
        self._copied = np.empty(self._sequences.max_sequences + 1, bool)  # which of a batch copy their last block
        self._listed = np.empty(self._sequences.max_sequences + 1, np.int64)  # some of a batch
        self._open_plans = {}  # each plan, and the rows that are freed when it is closed

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
            The token ids of its prompt: blocks that hold the beginning of it are shared, but never all of it, since the
            last token must be computed. Pass the ids to `commit` too, when they have been.
        salt : hashable, optional
            The namespace of its prefixes (a tenant, an adapter): only sequences with an equal salt share blocks.

        Returns
        -------
        int
            The sequence's handle; `length` says how many tokens are there already.

        Raises
        ------
        ValueError
            If there are more tokens than `max_length`, or a salt without prefix caching.
        TypeError
            If the ids are not integers, or the salt is not hashable.
        OutOfBlocks
            If `max_sequences` are alive.

        Notes
        -----
        Without prefix caching no token is ever found: the sequence begins empty.

        Examples
        --------
        >>> import numpy as np, numba_paged as npg
        >>> spec = npg.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, block_size=4)
        >>> cache = npg.PagedKVCache(spec, num_layers=1, num_blocks=8, backend="cpu")
        >>> prompt = np.arange(10)
        >>> seq = cache.add(prompt)
        >>> cache.commit(cache.plan([seq], num_new=10), prompt)
        >>> cache.length(cache.add(prompt))
        8
        """
        return self._add(tokens, salt, resumed=False)

    def resume(self, tokens, salt=None):
        """Begin a sequence again that was freed to make room: `add`, but `stats` counts its prompt apart.

        Parameters
        ----------
        tokens, salt
            As in `add`.

        Returns
        -------
        int
            The handle of a new sequence.

        Raises
        ------
        ValueError, TypeError, OutOfBlocks
            As `add`.
        """
        return self._add(tokens, salt, resumed=True)

    def _add(self, tokens, salt, resumed):
        tokens = _NO_TOKENS if tokens is None else batches.token_ids(tokens, "tokens")
        if tokens.size > self.max_length:
            raise ValueError(f"tokens has {tokens.size} ids, max_length is {self.max_length}")
        row = self._prefixes.begin(self._sequences, tokens, salt, self._window, resumed)
        return int(self._sequences.handles[row])

    def match(self, tokens, salt=None):
        """How much of a prompt is in the cache, and how many blocks it would take; nothing is changed.

        Parameters
        ----------
        tokens, salt
            As in `add`.

        Returns
        -------
        PrefixMatch
            Compare `num_blocks` with `num_available` to know whether the whole prompt fits.

        Raises
        ------
        ValueError
            If a salt is given without prefix caching.
        TypeError
            If the ids are not integers, or the salt is not hashable.
        """
        return PrefixMatch(*self._prefixes.match(batches.token_ids(tokens, "tokens"), salt, self._window))

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
            If the parent is in an open plan or swapped out.
        OutOfBlocks
            If `max_sequences` are alive.
        """
        parent, sequences = self._settled_row(seq, "fork"), self._sequences
        child = sequences.open(UNKNOWN, 0)
        fork_row(self._pool.blocks, *sequences.arrays, parent, child)
        return int(sequences.handles[child])

    def reparent(self, seqs, parents):
        """Make each sequence a copy of another, all at once: the surviving beams of a beam search.

        Parameters
        ----------
        seqs : sequence of int
            Handles, none twice.
        parents : sequence of int, as many
            For each the handle of the sequence that it continues; often several the same one, and often its own.

        Raises
        ------
        UnknownSequence
            If a handle names no living sequence.
        ValueError
            If a sequence is named twice in `seqs`, or one is in an open plan or swapped out, or the numbers differ.

        Examples
        --------
        >>> import numpy as np, numba_paged as npg
        >>> spec = npg.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, block_size=4)
        >>> cache = npg.PagedKVCache(spec, num_layers=1, num_blocks=8, backend="cpu")
        >>> beams = [cache.add() for _ in range(3)]
        >>> cache.commit(cache.plan(beams, num_new=[1, 2, 3]))
        >>> cache.reparent(beams, np.array(beams)[[2, 2, 0]])
        >>> [cache.length(beam) for beam in beams]
        [3, 3, 1]
        """
        seqs, parents = batches.handles(seqs, "seqs"), batches.handles(parents, "parents")
        if seqs.size != parents.size:
            raise ValueError(f"parents must name one sequence for each of {seqs.size}, got {parents.size}")
        rows = [np.array([self._settled_row(seq, "reparent") for seq in names.tolist()], np.int64)
                for names in (seqs, parents)]
        batches.no_twins(seqs, "seqs")
        pool = self._pool
        reparent_rows(pool.blocks, pool.stack, pool.counts, *self._sequences.arrays, *rows)

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
            If the sequence is in an open plan or swapped out, or is not that long, or tokens that a query at that
            length sees slid out of the window.
        """
        row = self._settled_row(seq, "truncate")
        length = whole_number(f"length of sequence {seq}", length, 0, int(self._sequences.lengths[row]))
        if not truncate_row(*self._pool.arrays, self._prefixes.ids_of, *self._sequences.arrays, row, length,
                            self._window):
            first = int(self._sequences.starts[row]) * self.spec.block_size
            raise ValueError(f"length {length} of sequence {seq} needs tokens that slid out of the window of "
                             f"{self._window}: position {first} is the first that is left")

    def free(self, seq, after=None):
        """End a sequence; blocks that no other holds are free again, or cached if they are published.

        Parameters
        ----------
        seq : int
            The handle; it names no sequence from now on, and is never given out again.
        after : Plan, optional
            An open plan that may be running: the blocks are given back when it is committed or rolled back.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence (a second free, for example).
        ValueError
            If the sequence is in an open plan other than `after`, or `after` is not open.
        """
        pool, sequences = self._pool, self._sequences
        row, seq = sequences.place_of(seq), int(seq)
        if after is None and entry[free_row](pool.blocks, pool.stack, pool.counts, sequences.rows, sequences.table, row,
                                             seq):
            sequences.free_rows.append(row)
        else:
            self._free_specially(seq, after)

    def _free_specially(self, seq, after):
        """Free a sequence that is swapped out or may be in an open plan; or refuse to."""
        sequences = self._sequences
        row = sequences.row_of(seq)
        if after is not None:
            self._require_open(after)
        if sequences.planned[row] and (after is None or seq not in after.seqs):
            raise ValueError(f"cannot free sequence {seq}: it is in an open plan; commit or roll it back first, or "
                             f"pass it as `after`")
        swapped = sequences.states[row] == SWAPPED
        sequences.retire(row)
        if swapped:
            self._host.drop(row)
            sequences.close(row)
        else:
            self._open_plans[after].append(row)

    def swap_out(self, seq):
        """Move a sequence's blocks to the host pool, to make room; a block that others share is moved once.

        Parameters
        ----------
        seq : int
            The handle.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence.
        ValueError
            If the sequence is in an open plan, or swapped out already.
        OutOfBlocks
            If the host pool has too few free blocks, or there is none; nothing was changed.
        """
        row = self._settled_row(seq, "swap out")
        if self._host is None:
            raise OutOfBlocks("there is no host pool to swap to: num_host_blocks is 0")
        self._host.move_out(row)

    def swap_in(self, seq):
        """Move a sequence's blocks back; those that are in the pool still, or again, are shared.

        Parameters
        ----------
        seq : int
            The handle.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence.
        ValueError
            If the sequence is not swapped out.
        OutOfBlocks
            If too few blocks are available; nothing was changed.
        """
        row = self._sequences.row_of(seq)
        if self._sequences.states[row] != SWAPPED:
            raise ValueError(f"sequence {seq} is not swapped out")
        self._host.move_in(row)

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
        return int(self._sequences.lengths[self._sequences.row_of(seq)])

    def blocks(self, seq):
        """The blocks of a sequence, in the order of positions.

        Parameters
        ----------
        seq : int
            The handle.

        Returns
        -------
        numpy.ndarray of int32
            A copy; -1 where a block slid out of the window.

        Raises
        ------
        UnknownSequence
            If the handle names no living sequence.
        ValueError
            If the sequence is swapped out.
        """
        row = self._sequences.row_of(seq)
        if self._sequences.states[row] == SWAPPED:
            raise ValueError(f"sequence {seq} is swapped out: it has no blocks in the pool")
        return self._sequences.blocks(row).copy()

    def block_tables(self, seqs):
        """The blocks of several sequences, as the array functions take them.

        Parameters
        ----------
        seqs : sequence of int
            Handles.

        Returns
        -------
        numpy.ndarray of int32, [num_seqs, max_blocks]
            A copy; -1 past the blocks of a sequence, and where one slid out of the window.

        Raises
        ------
        UnknownSequence
            If a handle names no living sequence.
        ValueError
            If a sequence is swapped out.
        """
        seqs, sequences = batches.handles(seqs, "seqs"), self._sequences
        bad, width = find_rows(sequences.rows, seqs)
        if bad >= 0:
            self.blocks(int(seqs[bad]))  # raises what is wrong with it
        tables = empty_tables(seqs.size, width)
        copy_tables(sequences.table, seqs, tables)
        return tables

    def clear_prefixes(self):
        """Forget all prefixes, after the model's weights changed for example: nothing computed so far is shared again.

        Blocks that living sequences compute on top of earlier ones are not published either.
        """
        self._prefixes.clear(self._sequences)

    # ---------------------------------------------------------------- a step

    @property
    def num_available(self):
        """Blocks that can be taken now: the free ones, and the cached ones, which are evicted for it."""
        return self._pool.num_available

    def blocks_needed(self, seqs, num_new=1, num_lookahead=0):
        """How many blocks `plan` would take, copies on write included: it succeeds if they are available.

        Parameters
        ----------
        seqs, num_new, num_lookahead
            As in `plan`, and refused as there.

        Returns
        -------
        int
            Blocks; compare with `num_available`.
        """
        seqs, num_new, num_lookahead = self._batch(seqs, num_new, num_lookahead)
        pool, sequences = self._pool, self._sequences
        code, num_fine, num_needed, *_ = steps.survey_batch(
            pool.blocks, pool.counts, sequences.rows, sequences.table, seqs, num_new,
            min(num_lookahead, self.max_length), self.max_length, self.spec.block_size, self._copied, self._listed)
        if code:
            steps.refuse(sequences, seqs, num_new, self.max_length, code, num_fine)
        steps.unmark(self._sequences.rows, seqs)
        return num_needed

    def plan(self, seqs, num_new=1, num_lookahead=0):
        """Decide one step: take the blocks that the new tokens need, and copy those that must not be written.

        Parameters
        ----------
        seqs : sequence of int
            Handles, none twice and none in another open plan.
        num_new : int or sequence of int
            New tokens of each (or of every) sequence, at least 1.
        num_lookahead : int
            Positions after the new tokens that get slots too, up to `max_length`, until the plan is closed: for drafts.

        Returns
        -------
        Plan

        Raises
        ------
        UnknownSequence
            If a handle names no living sequence.
        ValueError
            If a sequence is named twice, is swapped out or in an open plan, or a count or a length is out of its range.
        OutOfBlocks
            If too few blocks are available. In every case nothing was changed.

        Notes
        -----
        A block is copied before it is written if others hold it, or if it is published (the sequence was truncated into
        it). When the blocks do not suffice for that, a published block that only its sequence holds is written in
        place, and with it all cached blocks are evicted.
        """
        seqs, num_new, num_lookahead = self._batch(seqs, num_new, num_lookahead)
        plan = steps.make_plan(self._pool, self._sequences, self._prefixes.index, seqs, num_new, num_lookahead,
                               self.max_length, self._copied, self._listed, self._cut_work)
        if plan.copies.size:
            self._copy_blocks(plan)
        self._open_plans[plan] = []
        return plan

    def _copy_blocks(self, plan):
        """Copy on write; if that fails, the plan is undone."""
        try:
            self._backend.copy_blocks(self._keys, self._values, plan.copies[:, 0], plan.copies[:, 1])
        except BaseException:
            self._undo(plan)
            raise

    def _undo(self, plan):
        pool, sequences = self._pool, self._sequences
        steps.undo(pool.blocks, pool.stack, pool.counts, sequences.rows, sequences.table, plan.seqs, plan.copies,
                   self.spec.block_size)

    def _cut_work(self, query_starts, lengths, block_tables):
        longest = int(np.diff(query_starts).max(initial=0))
        spec, tiling = self.spec, self._backend.tiling(self.spec.group, longest)
        if self.split_size is not None:
            tiling = replace(tiling, query_tile=1)
        return cut_work(query_starts, lengths, block_tables, spec.block_size, spec.num_kv_heads, tiling, True, spec.window,
                        self.split_size)

    def _batch(self, seqs, num_new, num_lookahead):
        """What the caller gave, as the arrays that a step takes."""
        seqs = batches.handles(seqs, "seqs")
        return seqs, batches.new_counts(num_new, seqs.size), whole_number("num_lookahead", num_lookahead, 0)

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
        keys, values = self.keys(layer), self.values(layer)
        with backend.on(q=q, k=k, v=v, keys=keys, values=values, out=out):
            slopes = checks.alibi_slopes(backend, alibi_slopes, spec.num_q_heads)
            sinks = checks.sinks(backend, sinks, spec.num_q_heads)
            options = AttentionOptions(spec.scale, spec.soft_cap, spec.window, slopes, sinks, k_scale, v_scale)
            out = backend.empty(q.shape, q.dtype) if out is None else out
            lse = backend.empty(q.shape[:2], np.dtype(np.float32)) if return_lse else None
            backend.append(k, v, keys, values, plan.slots, options.k_scale, options.v_scale, plan)
            backend.attend(q, keys, values, plan, options, out, lse)
        return (out, lse) if return_lse else out

    def commit(self, plan, tokens=None, accepted=None):
        """Make a plan's tokens part of their sequences, and publish the blocks that are full.

        Parameters
        ----------
        plan : Plan
            An open plan of this cache.
        tokens : sequence of int, optional
            The ids of the plan's new positions, in plan order; without them those positions are never found by their
            prefix.
        accepted : sequence of int, [num_seqs], optional
            How many of each sequence's new tokens stay, the first ones; the others are dropped, as drafts that were
            rejected. All of them if not given.

        Raises
        ------
        ValueError
            If the plan is not open, or there are more or fewer tokens than it has, or a count is out of its range.
        TypeError
            If the ids or counts are not integers.
        """
        self._require_open(plan)
        tokens = _NO_TOKENS if tokens is None else batches.token_ids(tokens, "tokens", plan.slots.size)
        accepted = _ALL_ACCEPTED if accepted is None else batches.accepted_counts(accepted, plan.query_starts)
        entry[steps.commit](*self._pool.arrays, *self._prefixes.arrays, *self._sequences.arrays, plan.seqs,
                            plan.query_starts, tokens, accepted, plan.copies, self._window, self._listed)
        self._close_plan(plan)

    def rollback(self, plan):
        """Give a plan's blocks back: the state is as before `plan`, but for cached blocks that it evicted.

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
        self._undo(plan)
        self._close_plan(plan)

    def _close_plan(self, plan):
        pool, sequences = self._pool, self._sequences
        for row in self._open_plans.pop(plan):
            keep_blocks(pool.blocks, pool.stack, pool.counts, sequences.rows, sequences.table, row, 0)
            sequences.close(row)

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
        return self._keys[whole_number("layer", layer, 0, self.num_layers - 1)]

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
        return self._values[whole_number("layer", layer, 0, self.num_layers - 1)]

    def stats(self):
        """How the cache is used now.

        Returns
        -------
        CacheStats
            Made by looking at every block: not for each step (`num_available` is).
        """
        spec = self.spec
        per_token = kv_bytes_per_token(self.num_layers, spec.num_kv_heads, spec.head_dim, spec.kv_dtype)
        return collect(self._pool, self._sequences, self._prefixes, self._host, per_token)

    def draw(self):
        """A picture of the pool, which notebooks show.

        Returns
        -------
        Drawing
            ``str`` of it is an SVG.

        Examples
        --------
        >>> import numba_paged as npg
        >>> spec = npg.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, block_size=4)
        >>> cache = npg.PagedKVCache(spec, num_layers=1, num_blocks=8, backend="cpu")
        >>> plan = cache.plan([cache.add()], num_new=3)
        >>> str(cache.draw())[:4]
        '<svg'
        """
        return Drawing(self._pool, self._sequences)

    def check(self):
        """Prove every invariant of the host's state.

        Raises
        ------
        CorruptState
            If one does not hold; the message names it.
        """
        self._pool.check()
        self._sequences.check(self._window)
        check_references(self._pool, self._sequences, self._open_plans, self._host and self._host.blocks)
        check_tails(self._pool, self._sequences)
        check_plans(self._sequences, self._open_plans)
        if self._prefixes.enabled:
            check_prefixes(self._prefixes, self._sequences, sliding=self.spec.window is not None)

    # ---------------------------------------------------------------- what is refused

    def _settled_row(self, seq, verb):
        row = self._sequences.row_of(seq)
        if self._sequences.planned[row]:
            raise ValueError(f"cannot {verb} sequence {seq}: it is in an open plan; commit or roll it back first")
        if self._sequences.states[row] == SWAPPED:
            raise ValueError(f"cannot {verb} sequence {seq}: it is swapped out; swap it in first")
        return row

    def _require_open(self, plan):
        if plan not in self._open_plans:
            raise ValueError("plan is not open in this cache: it was committed or rolled back, or made by another")
