"""A cache and its model, driven by the same calls: they must agree on results, errors, sharing and contents."""

import zlib
from dataclasses import dataclass

import numpy as np

import numba_paged as npg
from array_backend import ArrayBackend
from model_cache import ModelCache
from numba_paged.prefix_cache import PrefixCache
from numba_paged.sequences import SequenceTables
from numba_paged.swap import HostPool

HOSTS_STATE = (npg.PagedKVCache, npg.BlockPool, SequenceTables, PrefixCache, HostPool)
SCRATCH = ("_backend", "_copied", "_listed")
ERRORS = (npg.OutOfBlocks, npg.UnknownSequence, ValueError)
COUNTERS = ("num_copied", "num_evicted", "num_swapped_out", "num_swapped_in", "num_free", "num_host_free")


def state_of(value):
    """Everything that a cache holds on the host, and the contents of its pool, as something to compare."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(state_of(key), state_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [state_of(item) for item in value]
    if isinstance(value, HOSTS_STATE):
        return state_of({name: item for name, item in vars(value).items() if name not in SCRATCH})
    return value


@dataclass(eq=False)
class Told:
    """What a sequence was told and has written: a token id and a key for each position."""

    salt: object
    history: list
    written: list

    def copy(self):
        return Told(self.salt, list(self.history), list(self.written))


class Pair:
    """A small cache, the model of it, and what each sequence has been told."""

    def __init__(self, num_blocks=12, block_size=3, max_sequences=6, max_length=None, window=None, **options):
        spec = npg.AttentionSpec(1, 1, 1, block_size=block_size, kv_dtype="float32", window=window)
        self.cache = npg.PagedKVCache(spec, 1, num_blocks, ArrayBackend(), max_sequences=max_sequences,
                                      max_length=max_length, **options)
        self.model = ModelCache(num_blocks, block_size, max_sequences, max_length, window=window, **options)
        self.block_size = block_size
        self.told = {}  # by handle
        self.plans = []  # (plan, model's plan, what the sequences were told, new tokens of each)
        self.handles = set()
        self.epoch = 0

    @property
    def seqs(self):
        return list(self.told)

    def attempt(self, ours, model):
        """Do the same on both sides: (result, model's result), or None if both refused and nothing changed."""
        before = state_of(self.cache)
        try:
            result = ours()
        except ERRORS as refused:
            error = refused
        else:
            return result, model()
        assert state_of(self.cache) == before, f"changed by a call that raised {error!r}"
        try:
            model()
        except ERRORS as theirs:
            assert isinstance(error, npg.OutOfBlocks) == isinstance(theirs, npg.OutOfBlocks), (error, theirs)
            return None
        raise AssertionError(f"raised {error!r}, the model did not")

    def key(self, salt, history):
        """The key of a sequence's last token: it depends on all before it, and on the weights of the time."""
        return float(zlib.crc32(repr((salt, self.epoch, history)).encode()) % 2**23 + 1)

    # ---------------------------------------------------------------- the calls

    def add(self, tokens=None, salt=None, resumed=False):
        handle = None

        def ours():
            nonlocal handle
            match = None if tokens is None else self.cache.match(tokens, salt)
            handle = self.cache.resume(tokens, salt) if resumed else self.cache.add(tokens, salt)
            assert match is None or self.cache.length(handle) == match.num_tokens

        if self.attempt(ours, lambda: self.model.add(handle, tokens, salt, resumed)):
            history = list(tokens or [])[: self.cache.length(handle)]
            self._remember(handle, Told(salt, history, [self.key(salt, history[: i + 1]) for i in range(len(history))]))
        return handle

    def fork(self, seq):
        child = None

        def ours():
            nonlocal child
            child = self.cache.fork(seq)

        if self.attempt(ours, lambda: self.model.fork(seq, child)):
            self._remember(child, self.told[seq].copy())
        return child

    def _remember(self, handle, told):
        assert handle not in self.handles, "a handle was given out twice"
        self.handles.add(handle)
        self.told[handle] = told

    def plan(self, seqs, new, num_lookahead=0):
        """Plan; `new` are the token ids of each sequence."""
        counts = [len(tokens) for tokens in new]
        count = counts[0] if len(set(counts)) == 1 else counts
        needed = self.attempt(lambda: self.cache.blocks_needed(seqs, count, num_lookahead),
                              lambda: self.model.blocks_needed(seqs, counts, num_lookahead))
        assert needed is None or needed[0] == needed[1]
        fits = needed is not None and needed[0] <= self.cache.num_available
        done = self.attempt(lambda: self.cache.plan(seqs, count, num_lookahead),
                            lambda: self.model.plan(seqs, counts, num_lookahead))
        assert fits == (done is not None), "blocks_needed is not what decides"
        if done:
            self.plans.append((*done, [self.told[seq] for seq in seqs], [list(tokens) for tokens in new]))
            self._check_plan(*self.plans[-1])
        return done

    def _check_plan(self, plan, model_plan, told, new):
        size, counts = self.block_size, [len(tokens) for tokens in new]
        starts = [len(one.history) for one in told]
        assert plan.query_starts.tolist() == np.cumsum([0, *counts]).tolist()
        assert plan.lengths.tolist() == [start + count for start, count in zip(starts, counts)]
        assert plan.positions.tolist() == [start + i for start, count in zip(starts, counts) for i in range(count)]
        rows = np.repeat(np.arange(len(told)), counts)
        slots = plan.block_tables[rows, plan.positions // size] * size + plan.positions % size
        assert plan.slots.tolist() == slots.tolist()
        assert len(plan.copies) == len(model_plan.copies)
        for table, length, slots in zip(plan.block_tables, plan.lengths, plan.lookahead_slots):
            for position, slot in enumerate(slots.tolist(), length):
                reserved = position < self.model.max_length
                assert slot == (table[position // size] * size + position % size if reserved else -1)

    def attend(self, index):
        """Write the keys of a plan's new tokens, and their negatives as values; the keys of each sequence."""
        plan, _, told, new = self.plans[index]
        keys = [[self.key(one.salt, one.history + tokens[: i + 1]) for i in range(len(tokens))]
                for one, tokens in zip(told, new)]
        k = np.array(sum(keys, []), np.float32).reshape(-1, 1, 1)
        self.cache.attend(0, k, k, -k, plan)
        return keys

    def commit(self, index, told=True, accepted=None):
        keys = self.attend(index)
        plan, model_plan, sequences, new = self.plans.pop(index)
        tokens = sum(new, []) if told else None
        self.cache.commit(plan, tokens, accepted)
        self.model.commit(model_plan, tokens, accepted)
        for i, sequence in enumerate(sequences):
            kept = len(new[i]) if accepted is None else accepted[i]
            sequence.history += new[i][:kept]
            sequence.written += keys[i][:kept]

    def rollback(self, index):
        plan, model_plan, _, _ = self.plans.pop(index)
        self.cache.rollback(plan)
        self.model.rollback(model_plan)

    def truncate(self, seq, length):
        if self.attempt(lambda: self.cache.truncate(seq, length), lambda: self.model.truncate(seq, length)):
            del self.told[seq].history[length:], self.told[seq].written[length:]

    def free(self, seq, index=None):
        """Free, or let the plan of that index free it when it is closed."""
        plan, model_plan = (None, None) if index is None else self.plans[index][:2]
        if self.attempt(lambda: self.cache.free(seq, plan), lambda: self.model.free(seq, model_plan)):
            del self.told[seq]

    def reparent(self, seqs, parents):
        if self.attempt(lambda: self.cache.reparent(seqs, parents), lambda: self.model.reparent(seqs, parents)):
            self.told |= zip(seqs, [self.told[parent].copy() for parent in parents])

    def swap_out(self, seq):
        self.attempt(lambda: self.cache.swap_out(seq), lambda: self.model.swap_out(seq))

    def swap_in(self, seq):
        self.attempt(lambda: self.cache.swap_in(seq), lambda: self.model.swap_in(seq))

    def clear_prefixes(self):
        self.cache.clear_prefixes()
        self.model.clear_prefixes()
        self.epoch += 1

    # ---------------------------------------------------------------- agreement

    def check(self):
        """The cache is whole, looks like the model, and holds what was written."""
        self.cache.check()
        stats, model = self.cache.stats(), self.model
        assert self.cache.num_available == model.num_available()
        assert {name: getattr(stats, name) for name in COUNTERS} == {name: getattr(model, name) for name in COUNTERS}
        assert (stats.num_queried, stats.num_hits) == (model.queried[False], model.hits[False])
        assert (stats.num_requeried, stats.num_rehits) == (model.queried[True], model.hits[True])
        ours, theirs = {}, {}
        resident = [seq for seq in self.seqs if not model.sequences[seq].swapped]
        for seq in self.seqs:
            assert self.cache.length(seq) == model.sequences[seq].length == len(self.told[seq].history)
        for seq in resident:
            blocks, model_blocks = self.cache.blocks(seq).tolist(), model.sequences[seq].blocks
            assert len(blocks) == len(model_blocks)
            for block, model_block in zip(blocks, model_blocks):
                assert (block == -1) == (model_block is None)
                if model_block is not None:
                    assert ours.setdefault(block, model_block) is model_block, f"{block} is shared, not in the model"
                    assert theirs.setdefault(model_block, block) == block, f"{block} is shared in the model only"
            self._check_contents(seq, blocks)
        held = self._held()
        assert stats.num_used == len(held)
        assert stats.num_shared == sum(model.holders(block) > 1 for block in held)
        assert stats.num_sequences == len(self.told)
        out = [sum(block is None for block in model.sequences[seq].blocks) * self.block_size for seq in resident]
        assert stats.num_tokens == sum(len(self.told[seq].history) for seq in resident) - sum(out)

    def _held(self):
        """The blocks that somebody holds, each once."""
        model = self.model
        rows = [*model.sequences.values(), *(sequence for plan in model.open_plans for sequence in plan.leaving)]
        blocks = [block for sequence in rows if not sequence.swapped for block in sequence.blocks if block]
        return dict.fromkeys(blocks + [source for plan in model.open_plans for source, _ in plan.copies])

    def _check_contents(self, seq, blocks):
        """What a query would read through the table is what the sequence has written."""
        keys, values = (pool(0)[..., 0, 0] for pool in (self.cache.keys, self.cache.values))
        for position, key in enumerate(self.told[seq].written):
            block, offset = blocks[position // self.block_size], position % self.block_size
            if block >= 0:
                assert keys[block, offset] == key, f"position {position} of sequence {seq}"
                assert values[block, offset] == -key
