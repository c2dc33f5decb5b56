"""A cache with splits of a fixed size: a token's result depends on its sequence alone, to the last bit."""

import numpy as np
import pytest

import numba_paged as npg

NUM_TOKENS, SPLIT_SIZE = 40, 16


def attended(backend, chunks, window, beside=()):
    """The outputs of a sequence whose tokens come in chunks, with other sequences in each step."""
    rng = np.random.default_rng(0)
    q, (k, v) = rng.standard_normal((NUM_TOKENS, 4, 8), np.float32), rng.standard_normal((2, NUM_TOKENS, 2, 8), np.float32)
    spec = npg.AttentionSpec(4, 2, 8, block_size=4, kv_dtype="float32", window=window)
    cache = npg.PagedKVCache(spec, 1, 64, backend=backend.name, split_size=SPLIT_SIZE)
    others, seq, outs, first = [cache.add() for _ in beside], cache.add(), [], 0
    for count in chunks:
        stop = first + count
        plan = cache.plan([*others, seq], [*beside, count])
        rows = np.concatenate([*(np.arange(other) for other in beside), np.arange(first, stop)])
        out = cache.attend(0, *(backend.asarray(x[rows]) for x in (q, k, v)), plan)
        cache.commit(plan)
        outs.append(backend.asnumpy(out)[-count:])
        first = stop
    return np.concatenate(outs)


@pytest.mark.parametrize("window", [None, 10])
def test_steps_and_batch_do_not_matter(backend, window):
    """Prompts of so many query rows that another kernel would serve them; chunks on and off the blocks' edges."""
    whole = attended(backend, [NUM_TOKENS], window)
    for chunks, beside in (([20, 20], ()), ([7, 1, 1, 23, 8], (3,)), ([1] * 3 + [36, 1], (1, 17))):
        np.testing.assert_array_equal(attended(backend, chunks, window, beside).view(np.uint32), whole.view(np.uint32))


def test_the_cache_says_what_its_splits_are():
    spec = npg.AttentionSpec(1, 1, 8)
    assert npg.PagedKVCache(spec, 1, 1, backend="cpu").split_size is None
    cache = npg.PagedKVCache(spec, 1, 8, backend="cpu", split_size=20)
    items = cache.plan([cache.add()], 40).work.items
    assert (items[:, npg.plan.NUM_QUERIES] == 1).all() and set(items[:, npg.plan.START].tolist()) == {0, 32}
    with pytest.raises(ValueError, match="split_size must be a whole number >= 1, got 0"):
        npg.PagedKVCache(spec, 1, 1, backend="cpu", split_size=0)
