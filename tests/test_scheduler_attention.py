"""Real attention under the scheduler: what each request gets alone, whatever shares, gives way or is evicted.

With a fixed `split_size` that is so bit for bit: whether a token is computed in a prompt, in a chunk of one, by itself
or again after a preemption. Without it the last bits may differ, the tokens may not.
"""

import functools

import numpy as np
import pytest

import numba_paged as npg

VOCABULARY, HIDDEN, HEAD_DIM, NUM_LAYERS = 11, 16, 8, 2
SPLIT_SIZE = 8


def rows(x, weight):
    """x @ weight with each row's sum in one fixed order, however many rows there are."""
    return (x[:, :, None] * weight).sum(axis=1)


class TinyModel:
    """Two layers of attention, four query heads over two kv heads, with random weights."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.embedding, self.positions = (rng.standard_normal((rows, HIDDEN), np.float32) for rows in (VOCABULARY, 64))
        self.output = rng.standard_normal((HIDDEN, VOCABULARY), np.float32)
        self.qkv = rng.standard_normal((NUM_LAYERS, HIDDEN, 8 * HEAD_DIM), np.float32) / HIDDEN**0.5
        self.out = rng.standard_normal((NUM_LAYERS, 4 * HEAD_DIM, HIDDEN), np.float32) / HIDDEN**0.5

    def logits(self, cache, plan, tokens, logit_rows):
        """[num_rows, VOCABULARY] of an open plan."""
        x = self.embedding[tokens] + self.positions[plan.positions]
        for layer in range(NUM_LAYERS):
            heads = rows(x, self.qkv[layer]).reshape(len(x), 8, HEAD_DIM)
            attended = cache.attend(layer, heads[:, :4], heads[:, 4:6], heads[:, 6:], plan)
            x = x + rows(attended.reshape(len(x), -1), self.out[layer])
        return rows(x[logit_rows], self.output)


MODEL = TinyModel()


def make_cache(num_blocks, window=None, **options):
    spec = npg.AttentionSpec(4, 2, HEAD_DIM, block_size=4, kv_dtype="float32", window=window)
    return npg.PagedKVCache(spec, NUM_LAYERS, num_blocks, backend="cpu", max_length=64, **options)


def pick(logits, sample):
    """The most likely token; the first of sample i is the i-th most likely, so that samples differ."""
    place = sample.index if not sample.tokens else 0
    return int(np.argsort(-logits, kind="stable")[place])


def make_requests():
    """Prompts with beginnings in common, samples, and lengths on and off the blocks' edges."""
    rng = np.random.default_rng(1)
    system = rng.integers(0, VOCABULARY, 9).tolist()
    ends = [rng.integers(0, VOCABULARY, count).tolist() for count in (3, 0, 8, 5, 1, 12)]
    return [npg.Request((system if i % 3 else system[:4]) + end, 10 - i, n=1 + i % 3) for i, end in enumerate(ends)]


def run_alone(request, index, window, exact):
    """A sample in a cache of its own, its whole prompt in one step: [(token, bits of its logits)]."""
    cache = make_cache(16, window, prefix_caching=False, split_size=SPLIT_SIZE if exact else None)
    known, count = request.tokens.tolist(), request.tokens.size
    seq, sample, seen = cache.add(), npg.scheduler.Sample(request, index), []
    while len(seen) < request.max_new_tokens:
        plan = cache.plan([seq], count)
        logits = MODEL.logits(cache, plan, known[-count:], plan.query_starts[1:] - 1)[0]
        cache.commit(plan)
        sample.tokens.append(pick(logits, sample))
        seen.append((sample.tokens[-1], logits.tobytes()))
        known.append(sample.tokens[-1])
        count = 1
    return seen


def run_together(scheduler, requests):
    """All requests to their ends: {(request, sample): [(token, bits of its logits)]}."""
    for request in requests:
        scheduler.add(request)
    seen = {}
    while step := scheduler.schedule():
        logits = MODEL.logits(scheduler.cache, step.plan, step.tokens, step.logit_rows)
        next_tokens = [pick(row, sample) for row, sample in zip(logits, step.samples)]
        for row, token, sample in zip(logits, next_tokens, step.samples):
            seen.setdefault((requests.index(sample.request), sample.index), []).append((token, row.tobytes()))
        scheduler.update(step, next_tokens)
        scheduler.cache.check()
    return seen


@functools.cache
def alone(window, exact):
    """What each sample of `make_requests` gets by itself."""
    return {(number, index): run_alone(request, index, window, exact)
            for number, request in enumerate(make_requests()) for index in range(request.n)}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("num_host_blocks", [0, 6, 24])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("window, num_blocks", [(None, 9), (7, 5)])
def test_outputs_are_those_of_each_request_alone(window, num_blocks, prefix_caching, num_host_blocks, exact):
    """Preemption of both kinds, prefix hits, eviction, forks, chunks, and blocks that slide out of a window."""
    cache = make_cache(num_blocks, window, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks,
                       split_size=SPLIT_SIZE if exact else None)
    preemption = "swap" if num_host_blocks else "recompute"
    scheduler = npg.Scheduler(cache, max_batch_tokens=7, watermark=0, preemption=preemption)
    together = run_together(scheduler, make_requests())
    for key, want in alone(window, exact).items():
        got = together.pop(key)
        assert (got == want) if exact else ([token for token, _ in got] == [token for token, _ in want])
    stats = scheduler.stats()
    assert not together and stats.num_preempted > 0 and cache.stats().num_copied > 0
    assert (stats.num_swapped > 0) == (num_host_blocks > 0)
    assert (cache.stats().num_hits > 0) == (cache.stats().num_evicted > 0) == prefix_caching
    assert cache.num_available == num_blocks
