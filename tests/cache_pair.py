"""A cache and its model, driven by the same calls: they must agree on results, errors, sharing and contents."""

import zlib

import numpy as np

import numba_paged as npg
from array_backend import ArrayBackend
from model_cache import ModelCache

ERRORS = (npg.OutOfBlocks, npg.UnknownSequence, ValueError)
UNTOLD = -1


def state_of(value):
    """Everything that a cache holds on the host, and the contents of its pool, as something to compare."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(state_of(key), state_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [state_of(item) for item in value]
    if isinstance(value, (npg.PagedKVCache, npg.BlockPool)) or type(value).__name__ in ("SequenceTables",):
        return state_of({name: item for name, item in vars(value).items() if name != "_backend"})
    return value


class Pair:
    """A small cache, the model of it, and what each sequence has been told and has written."""

    def __init__(self, num_blocks=12, block_size=3, max_sequences=6, max_length=None, window=None, **options):
        spec = npg.AttentionSpec(1, 1, 1, block_size=block_size, kv_dtype="float32", window=window)
        self.cache = npg.PagedKVCache(spec, 1, num_blocks, ArrayBackend(), max_sequences=max_sequences,
                                      max_length=max_length, **options)
        self.model = ModelCache(num_blocks, block_size, max_sequences, max_length, window=window, **options)
        self.block_size = block_size
        self.histories, self.written, self.salts = {}, {}, {}
        self.handles = set()
        self.plans = []  # (plan, model's plan, handles, new tokens of each)
        self.epoch = 0

    @property
    def seqs(self):
        return list(self.histories)

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

    def value(self, salt, history):
        """What the key of a sequence's last token is: it depends on all before it, and on the weights of the time."""
        return float(zlib.crc32(repr((salt, self.epoch, history)).encode()) % 2**23 + 1)

    # ---------------------------------------------------------------- the calls

    def add(self, tokens=None, salt=None):
        handle = None

        def ours():
            nonlocal handle
            handle = self.cache.add(tokens, salt) if tokens is not None or salt is not None else self.cache.add()
            return handle

        done = self.attempt(ours, lambda: self.model.add(handle, tokens, salt))
        if done:
            assert handle not in self.handles, "a handle was given out twice"
            self.handles.add(handle)
            length = self.cache.length(handle)
            self.histories[handle] = list(tokens[:length]) if tokens is not None else []
            self.written[handle] = [self.value(salt, self.histories[handle][: i + 1]) for i in range(length)]
            self.salts[handle] = salt
        return handle

    def fork(self, seq):
        handle = None

        def ours():
            nonlocal handle
            handle = self.cache.fork(seq)

        if self.attempt(ours, lambda: self.model.fork(seq, handle)):
            assert handle not in self.handles, "a handle was given out twice"
            self.handles.add(handle)
            self._copy(seq, handle)
        return handle

    def _copy(self, seq, child):
        self.histories[child], self.written[child] = list(self.histories[seq]), list(self.written[seq])
        self.salts[child] = self.salts[seq]

    def plan(self, seqs, new, **options):
        """Plan; `new` are the token ids of each sequence."""
        counts = [len(tokens) for tokens in new]
        count = counts[0] if len(set(counts)) == 1 else counts
        done = self.attempt(lambda: self.cache.plan(seqs, count, **options),
                            lambda: self.model.plan(seqs, counts, **options))
        if done:
            self.plans.append((*done, list(seqs), [list(tokens) for tokens in new]))
        return done

    def attend(self, index):
        plan, _, seqs, new = self.plans[index]
        values = []
        for seq, tokens in zip(seqs, new):
            history = self.histories[seq]
            values += [self.value(self.salts[seq], history + tokens[: i + 1]) for i in range(len(tokens))]
        assert plan.positions.tolist() == [len(self.histories[seq]) + i for seq, tokens in zip(seqs, new)
                                           for i in range(len(tokens))]
        k = np.array(values, np.float32).reshape(-1, 1, 1)
        self.cache.attend(0, k, k, -k, plan)
        return values

    def commit(self, index, told=True, accepted=None):
        values = self.attend(index)
        plan, model_plan, seqs, new = self.plans.pop(index)
        tokens = sum(new, []) if told else None
        options = {} if accepted is None else {"accepted": accepted}
        self.cache.commit(plan, tokens, **options)
        self.model.commit(model_plan, tokens, **options)
        for i, (seq, ids) in enumerate(zip(seqs, new)):
            kept = len(ids) if accepted is None else accepted[i]
            if seq in self.histories:
                self.histories[seq] += ids[:kept]
                self.written[seq] += values[:kept]
            del values[: len(ids)]

    def rollback(self, index):
        plan, model_plan, _, _ = self.plans.pop(index)
        self.cache.rollback(plan)
        self.model.rollback(model_plan)

    def truncate(self, seq, length):
        if self.attempt(lambda: self.cache.truncate(seq, length), lambda: self.model.truncate(seq, length)):
            del self.histories[seq][length:], self.written[seq][length:]

    def free(self, seq):
        if self.attempt(lambda: self.cache.free(seq), lambda: self.model.free(seq)):
            del self.histories[seq], self.written[seq], self.salts[seq]

    # ---------------------------------------------------------------- agreement

    def check(self):
        """The cache is whole, looks like the model, and holds what was written."""
        self.cache.check()
        stats, model = self.cache.stats(), self.model
        assert stats.num_free == model.num_free
        assert self.cache.num_available == model.num_available()
        assert stats.num_copied == model.num_copied
        ours, theirs = {}, {}
        for seq in self.seqs:
            sequence = model.sequences[seq]
            assert self.cache.length(seq) == sequence.length == len(self.histories[seq])
            blocks = self.cache.blocks(seq).tolist()
            assert len(blocks) == len(sequence.blocks)
            for block, model_block in zip(blocks, sequence.blocks):
                assert (block == -1) == (model_block is None)
                if model_block is not None:
                    assert ours.setdefault(block, model_block) is model_block, f"block {block} is shared, not in the model"
                    assert theirs.setdefault(model_block, block) == block, f"block {block} is shared in the model"
            self.check_contents(seq, blocks)
        assert stats.num_shared == sum(model.holders(block) > 1 for block in self.held())
        assert stats.num_tokens == sum(len(history) for history in self.histories.values())

    def held(self):
        """The blocks that somebody holds, each once."""
        sequences = list(self.model.sequences.values())
        blocks = [block for sequence in sequences for block in sequence.blocks]
        return dict.fromkeys(blocks + [source for plan in self.model.open_plans for source, _ in plan.copies])

    def check_contents(self, seq, blocks):
        """What a query would read through the table is what the sequence has written."""
        written, size = self.written[seq], self.block_size
        keys, values = (pool(0)[..., 0, 0] for pool in (self.cache.keys, self.cache.values))
        for position, value in enumerate(written):
            block = blocks[position // size]
            if block >= 0:
                assert keys[block, position % size] == value, f"position {position} of sequence {seq}"
                assert values[block, position % size] == -value
