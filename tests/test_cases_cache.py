"""Inputs that broke other cache managers (section I and those of D that need a manager). See `test_cases.py`."""

from importlib.util import find_spec

import numpy as np
import pytest

import numba_paged as npg
from steps import Driver


def spec(block_size=16, **options):
    """A small model's attention."""
    return npg.AttentionSpec(2, 1, 8, block_size=block_size, kv_dtype="float32", **options)


@pytest.mark.parametrize("num_sequences, error", [(2, npg.OutOfBlocks), (1, ValueError)])
def test_case_25_growing_past_the_allocated_blocks(backend, num_sequences, error):
    """Position 16 takes a block or raises; the last is never used instead (gittensor-ai-lab/sparkinfer#41).

    A lone sequence that fills the pool has reached the default of `max_length`.
    """
    driver = Driver(backend, spec(), num_sequences)
    seqs = [driver.add() for _ in range(num_sequences)]
    driver.step(seqs, 16)
    before = driver.cache.stats(), [driver.cache.length(seq) for seq in seqs]
    with pytest.raises(error):
        driver.cache.plan(seqs[:1])
    driver.cache.check()
    assert (driver.cache.stats(), [driver.cache.length(seq) for seq in seqs]) == before
    if num_sequences > 1:
        driver.free(seqs[1])
        assert driver.step(seqs[:1]).copies.size == 0


def test_case_26_row_of_the_table_reused(backend):
    """A long sequence, freed, then a short one: its table ends where it ends (gittensor-ai-lab/sparkinfer#146)."""
    driver = Driver(backend, spec(block_size=4), 310, max_sequences=2)
    long, other = driver.add(), driver.add()
    driver.step([long, other], [1200, 5])
    driver.free(long)
    short = driver.add()
    plan = driver.step([short, other], [14, 1])
    assert plan.block_tables.shape[1] == 4 and (plan.block_tables[1, 2:] == -1).all()
    driver.step([short, other])


def test_case_29_plan_of_another_cache(backend):
    """Slots made for blocks of 16 are not taken by a cache of blocks of 4 (vllm-project/vllm#47056)."""
    ours, other = Driver(backend, spec(16), 8), Driver(backend, spec(4), 32)
    plan = ours.cache.plan([ours.add()], 3)
    with pytest.raises(ValueError, match="plan"):
        other.attend(plan)
    with pytest.raises(ValueError, match="plan"):
        other.cache.commit(plan)
    ours.attend(plan)
    ours.cache.commit(plan)


def test_case_53_plans_made_one_after_another(backend):
    """Each attend sees its own plan's tables (sgl-project/mini-sglang#103)."""
    driver = Driver(backend, spec(), 40)
    a, b, c = (driver.add() for _ in range(3))
    driver.step([a, b, c], [40, 3, 17])
    for _ in range(20):
        plans = [driver.cache.plan([a]), driver.cache.plan([c, b], [2, 1])]
        driver.cache.check()
        for plan in plans:
            driver.attend(plan)
        for plan in reversed(plans):
            driver.cache.commit(plan)
        driver.cache.check()


@pytest.mark.skipif(find_spec("numba_paged.prefix_cache") is None, reason="the prefix cache is not there yet")
@pytest.mark.parametrize("length", [32, 33, 47, 48, 16, 1])
def test_case_56_fully_cached_prompt_leaves_a_query(backend, length):
    """Even where every block hits, at least the last token is computed (GeeeekExplorer/nano-vllm#144)."""
    driver = Driver(backend, spec(), 20)
    tokens = list(range(100, 100 + length))
    first = driver.add(tokens=tokens)
    assert driver.cache.length(first) == 0
    driver.step([first], length, tokens)
    second = driver.cache.add(tokens=tokens)
    cached = driver.cache.length(second)
    assert cached == (length - 1) // 16 * 16
    driver.k[second], driver.v[second] = driver.k[first][:cached], driver.v[first][:cached]
    driver.step([second], length - cached, tokens[cached:])
    assert driver.cache.length(second) == length


@pytest.mark.parametrize("length", [21, 16, 31, 32, 1])
@pytest.mark.parametrize("together", [True, False])
def test_case_57_shared_tail_block_is_copied_before_it_is_written(backend, length, together):
    """Both sides of a fork append; what the parent had stays (Avarok-Cybersecurity/atlas#1193)."""
    driver = Driver(backend, spec(), 20)
    parent = driver.add()
    driver.step([parent], length)
    before = driver.cache.stats().num_used
    children = [driver.fork(parent) for _ in range(3)]
    assert driver.cache.stats().num_used == before
    everyone = [parent, *children]
    for _ in range(20):
        if together:
            driver.step(everyone)
        else:
            for seq in reversed(everyone):
                driver.step([seq])
    for seq in children:
        driver.free(seq)
    driver.step([parent], 3)


@pytest.mark.parametrize("window", [1, 4, 5, 16])
def test_case_59_window_reads_in_logical_order(backend, window):
    """Window 4, prefill 2, decode 8 (huggingface/transformers#47708)."""
    driver = Driver(backend, spec(block_size=4, window=window), 20)
    seq = driver.add()
    driver.step([seq], 2)
    for _ in range(30):
        driver.step([seq])
    driver.step([seq], 7)


def test_case_60_nothing_leaks(backend):
    """1000 cycles of add, grow, fork, free: every block is free again, a second free raises (kekzl/imp#1115)."""
    driver = Driver(backend, spec(block_size=2), 64, prefix_caching=False)
    cache = driver.cache
    for cycle in range(1000):
        seq = cache.add()
        plan = cache.plan([seq], 1 + cycle % 7)
        if cycle % 3 == 0:
            cache.rollback(plan)
        else:
            cache.commit(plan)
        child = cache.fork(seq)
        if cycle % 2:
            cache.commit(cache.plan([child], 3))
        cache.free(seq)
        cache.free(child)
        cache.check()
        with pytest.raises(npg.UnknownSequence):
            cache.free(seq)
    assert cache.stats().num_used == 0 and cache.stats().num_free == 64


def test_case_61_freed_blocks_are_as_good_as_new(backend):
    """B gets A's blocks with a shorter length, and knows nothing of A (vllm-project/vllm#47305)."""
    driver = Driver(backend, spec(block_size=4), 5)
    a = driver.add()
    used = set(driver.step([a], 20).block_tables.ravel().tolist())
    for layer in (driver.cache.keys(0), driver.cache.values(0)):
        layer[...] = np.nan
    driver.free(a)
    b = driver.add()
    assert set(driver.step([b], 9).block_tables.ravel().tolist()) <= used
    driver.step([b])
