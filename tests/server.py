"""A scheduler driven by a model that knows a sequence only by what it reads out of the cache, every step checked."""

import zlib

import numpy as np

import numba_paged as npg
from array_backend import ArrayBackend

VOCABULARY = 5
PREEMPTIONS = [{"preemption": "recompute"}, {"preemption": "swap", "num_host_blocks": 20},
               {"preemption": "swap", "num_host_blocks": 3}]
"""Options of `Server` for both kinds, and for a host pool that is soon full."""


def next_token(tokens, index, window=None):
    """What the model says after these tokens in sample `index`: any change in what it sees would change it."""
    seen = [int(token) for token in tokens][-(window or 0) :]
    return zlib.crc32(repr((len(tokens), seen, index)).encode()) % VOCABULARY


def alone(request, index, window=None):
    """The tokens of a sample that runs without a cache, a scheduler or others."""
    known = request.tokens.tolist()
    start = len(known)
    while len(known) < start + request.max_new_tokens:
        known.append(next_token(known, index, window))
        if known[-1] in request.stop_tokens:
            break
    return known[start:]


class Server:
    """A small cache, a scheduler over it, and the model between `schedule` and `update`.

    The keys in the pool are the token ids and the values their positions, so a wrong block, a copy that was not made
    or a block given away too early changes the output.
    """

    def __init__(self, num_blocks, block_size=2, *, window=None, num_host_blocks=0, prefix_caching=True,
                 max_sequences=64, max_length=None, **options):
        spec = npg.AttentionSpec(1, 1, 1, block_size=block_size, kv_dtype="float32", window=window)
        self.cache = npg.PagedKVCache(spec, 1, num_blocks, ArrayBackend(), prefix_caching=prefix_caching,
                                      max_sequences=max_sequences, max_length=max_length,
                                      num_host_blocks=num_host_blocks)
        self.prefix_caching = prefix_caching
        self.scheduler = npg.Scheduler(self.cache, **options)
        self.requests, self.trace = [], []

    def add(self, tokens, max_new_tokens=3, **options):
        """Queue a request; refused ones leave no trace."""
        request = npg.Request(tokens, max_new_tokens, **options)
        try:
            self.requests.append(self.scheduler.add(request))
        finally:
            self.cache.check()
        return request

    def schedule(self):
        """The next step, or None, after all that it promises was checked."""
        step = self.scheduler.schedule()
        self.cache.check()
        waiting = [request for request in self.requests if not request.finished]
        if step is None:
            assert not waiting
            return None
        self.check_limits(step)
        self.check_rows(step)
        if self.scheduler.policy == "fcfs":
            assert waiting[0] in {sample.request for sample in step.running}, "the oldest request has to wait"
        self.trace.append((step.plan.seqs.tolist(), step.tokens.tolist(), step.plan.positions.tolist()))
        return step

    def check_limits(self, step):
        scheduler, stats = self.scheduler, self.scheduler.stats()
        assert 1 <= step.plan.num_tokens == step.tokens.size <= scheduler.max_batch_tokens
        assert len(step.running) == step.plan.seqs.size <= stats.num_running <= scheduler.max_batch_size
        assert sum(1 if sample.tokens else sample.request.n for sample in step.running) <= scheduler.max_batch_size
        if any(count > 1 for count in np.diff(step.plan.query_starts)):  # a decode never waits for a prompt
            assert len(step.running) == stats.num_running or scheduler.max_batch_tokens == step.tokens.size

    def check_rows(self, step):
        """A sequence's tokens are those of its sample, and its last known one is sampled for all who need it."""
        plan, rows, samples = step.plan, [], []
        assert len(set(map(id, step.running))) == len(step.running)
        for sample, start, stop, length in zip(step.running, plan.query_starts, plan.query_starts[1:], plan.lengths):
            known = [*sample.request.tokens.tolist(), *sample.tokens]
            assert sample.finish_reason is None
            assert plan.positions[start:stop].tolist() == list(range(length - (stop - start), length))
            assert step.tokens[start:stop].tolist() == known[length - (stop - start) : length]
            if length == len(known):
                group = [sample] if sample.tokens else sample.request.samples
                rows += [stop - 1] * len(group)
                samples += group
        assert step.logit_rows.tolist() == rows
        assert list(map(id, step.samples)) == list(map(id, samples))

    def model(self, step):
        """Write the step's tokens to the pool, read each sampled sequence back, say what comes next."""
        plan, window = step.plan, self.cache.spec.window
        new = step.tokens.reshape(-1, 1, 1).astype(np.float32)
        at = plan.positions.reshape(-1, 1, 1).astype(np.float32)
        self.cache.attend(0, new, new, at, plan)
        keys, values = (pool(0)[..., 0, 0] for pool in (self.cache.keys, self.cache.values))
        size, next_tokens = keys.shape[1], []
        for row, sample in zip(step.logit_rows, step.samples):
            place = np.searchsorted(plan.query_starts, row, side="right") - 1
            positions = np.arange(plan.lengths[place])
            positions = positions[-(window or 0) :]
            blocks, offsets = plan.block_tables[place][positions // size], positions % size
            assert values[blocks, offsets].tolist() == positions.tolist()
            hidden = [0] * (plan.lengths[place] - positions.size)
            next_tokens.append(next_token(hidden + keys[blocks, offsets].tolist(), sample.index, window))
        return next_tokens

    def update(self, step):
        """Run the model and hand its tokens in; returns the finished requests."""
        finished = self.scheduler.update(step, self.model(step))
        self.cache.check()
        assert all(request.finished for request in finished)
        assert all(not sample.num_computed for request in self.requests for sample in request.samples
                   if sample.finish_reason is not None)
        return finished

    def step(self):
        """A whole step; returns it, or None when there is nothing to do."""
        step = self.schedule()
        if step is not None:
            self.update(step)
        return step

    def abort(self, request):
        """End a request; what it generated until then stays."""
        tokens = [list(sample.tokens) for sample in request.samples]
        self.scheduler.abort(request)
        self.cache.check()
        assert request.finished and tokens == [sample.tokens for sample in request.samples]

    def drain(self):
        """Run until all requests have finished, then look at what they got and at what is left behind."""
        todo = sum(request.n * (request.tokens.size + request.max_new_tokens) for request in self.requests)
        for _ in range(todo + 1):
            if self.step() is None:
                break
        else:
            raise AssertionError(f"more than {todo} steps: nothing comes to an end")
        self.check_outputs()
        stats = self.cache.stats()
        assert stats.num_sequences == stats.num_used == 0
        assert self.cache.num_available == stats.num_blocks

    def check_outputs(self):
        for request in self.requests:
            for sample in request.samples:
                want = alone(request, sample.index, self.cache.spec.window)
                if sample.finish_reason == "abort":
                    assert sample.tokens == want[: len(sample.tokens)]
                else:
                    assert sample.tokens == want
                    assert sample.finish_reason == ("stop" if want[-1] in request.stop_tokens else "length")
