"""Small caches without attention, and the shortest way to run tokens through one."""

import numpy as np
import pytest

import numba_paged as npg
from array_backend import ArrayBackend
from cache_pair import state_of


def small_cache(num_blocks=8, block_size=4, window=None, **options):
    """A cache of one layer with one head of one number."""
    spec = npg.AttentionSpec(1, 1, 1, block_size=block_size, kv_dtype="float32", window=window)
    return npg.PagedKVCache(spec, 1, num_blocks, ArrayBackend(), **options)


def run(cache, seq, tokens, told=True):
    """Plan, write and commit the next tokens of a sequence; the key of a token is its id."""
    plan = cache.plan([seq], len(tokens))
    write(cache, plan, tokens)
    cache.commit(plan, tokens if told else None)
    return plan


def write(cache, plan, tokens):
    """Write the tokens' ids as keys, and their negatives as values."""
    k = np.asarray(tokens, np.float32).reshape(-1, 1, 1)
    cache.attend(0, k, k, -k, plan)


def prompt(cache, tokens, salt=None):
    """Add a sequence and run what was not found of its prompt."""
    seq = cache.add(tokens, salt)
    run(cache, seq, tokens[cache.length(seq) :])
    return seq


def keys_of(cache, seq):
    """What a query would read through the table."""
    size, length = cache.spec.block_size, cache.length(seq)
    keys = cache.keys(0)[..., 0, 0]
    return [float(keys[cache.blocks(seq)[i // size], i % size]) for i in range(length)]


def refused(cache, call, error, match):
    """The call raises, and nothing has changed: neither the host's state nor the pool's contents."""
    before = state_of(cache)
    with pytest.raises(error, match=match):
        call()
    assert state_of(cache) == before
    cache.check()
