"""What the manager refuses: the message names the argument, the sequence, the value and the bound; nothing has
changed."""

from typing import NamedTuple

import numpy as np
import pytest

import numba_paged as npg
from array_backend import ArrayBackend
from caches import prompt, refused, run, small_cache


class Kinds(NamedTuple):
    """A cache, one sequence of each kind, and an open plan of two tokens."""

    cache: npg.PagedKVCache
    live: int
    planned: int
    swapped: int
    freed: int
    plan: npg.Plan


def one_of_each():
    cache = small_cache(num_blocks=5, max_sequences=4, max_length=20, num_host_blocks=2)
    live, planned, swapped, freed = (cache.add() for _ in range(4))
    run(cache, live, [1, 2, 3])
    run(cache, swapped, [4, 5])
    cache.swap_out(swapped)
    cache.free(freed)
    return Kinds(cache, live, planned, swapped, freed, cache.plan([planned], 2))


@pytest.mark.parametrize(("call", "error", "match"), [
    (lambda s: s.cache.plan([s.live, s.freed]), npg.UnknownSequence, "sequence 3 was freed"),
    (lambda s: s.cache.plan([s.live, 77]), npg.UnknownSequence, "sequence 77 does not exist"),
    (lambda s: s.cache.plan([-5]), npg.UnknownSequence, "sequence -5 does not exist"),
    (lambda s: s.cache.free(2**70), npg.UnknownSequence, "does not exist"),
    (lambda s: s.cache.length("a"), TypeError, "seq must be a handle, a whole number, got str"),
    (lambda s: s.cache.length(0.0), TypeError, "seq must be a handle, a whole number, got float"),
    (lambda s: s.cache.plan([[s.live]]), ValueError, r"seqs must have 1 axis, got shape \(1, 1\)"),
    (lambda s: s.cache.plan([0.5]), TypeError, "seqs must be whole numbers, got float64"),
    (lambda s: s.cache.plan([s.live, s.live]), ValueError, "seqs names sequence 0 twice"),
    (lambda s: s.cache.plan([s.live] * 50), ValueError, "seqs names sequence 0 twice"),
    (lambda s: s.cache.plan([s.live, s.planned]), ValueError, "sequence 1 is in an open plan; commit or roll"),
    (lambda s: s.cache.plan([s.swapped]), ValueError, "sequence 2 is swapped out; swap it in first"),
    (lambda s: s.cache.plan([s.live], 0), ValueError, "num_new must be at least 1, got 0 for sequence 0"),
    (lambda s: s.cache.plan([s.live], [-1]), ValueError, "num_new must be at least 1, got -1 for sequence 0"),
    (lambda s: s.cache.plan([s.live], [1, 2]), ValueError, "num_new must be one count, or one for each of 1 sequences"),
    (lambda s: s.cache.plan([s.live], 1.5), TypeError, "num_new must be whole numbers, got float64"),
    (lambda s: s.cache.plan([s.live], 18), ValueError, "sequence 0 would have 21 tokens, max_length is 20"),
    (lambda s: s.cache.plan([s.live], 2**62), ValueError, "sequence 0 would have .* tokens, max_length is 20"),
    (lambda s: s.cache.plan([s.live], 1, -1), ValueError, "num_lookahead must be a whole number >= 0, got -1"),
    (lambda s: s.cache.plan([s.live], 1, 0.5), ValueError, "num_lookahead must be a whole number >= 0, got 0.5"),
    (lambda s: s.cache.plan([s.live], 2**63 - 1), ValueError, "sequence 0 would have .* tokens, max_length is 20"),
    (lambda s: s.cache.plan([s.live], 17), npg.OutOfBlocks, "4 blocks wanted, 3 of 5 are available"),
    (lambda s: s.cache.blocks_needed([s.live, s.live]), ValueError, "seqs names sequence 0 twice"),
    (lambda s: s.cache.fork(s.planned), ValueError, "cannot fork sequence 1: it is in an open plan"),
    (lambda s: s.cache.fork(s.swapped), ValueError, "cannot fork sequence 2: it is swapped out"),
    (lambda s: s.cache.fork(s.freed), npg.UnknownSequence, "sequence 3 was freed"),
    (lambda s: s.cache.truncate(s.planned, 0), ValueError, "cannot truncate sequence 1: it is in an open plan"),
    (lambda s: s.cache.truncate(s.live, 4), ValueError, "length of sequence 0 must be a whole number from 0 to 3, got 4"),
    (lambda s: s.cache.truncate(s.live, -1), ValueError, "length of sequence 0 must be a whole number from 0 to 3, got -1"),
    (lambda s: s.cache.truncate(s.live, 1.5), ValueError,
     "length of sequence 0 must be a whole number from 0 to 3, got 1.5"),
    (lambda s: s.cache.free(s.planned), ValueError, "cannot free sequence 1: it is in an open plan; commit or"),
    (lambda s: s.cache.free(s.live, after="plan"), ValueError, "plan is not open in this cache"),
    (lambda s: s.cache.swap_out(s.planned), ValueError, "cannot swap out sequence 1: it is in an open plan"),
    (lambda s: s.cache.swap_out(s.swapped), ValueError, "cannot swap out sequence 2: it is swapped"),
    (lambda s: s.cache.swap_in(s.live), ValueError, "sequence 0 is not swapped out"),
    (lambda s: s.cache.blocks(s.swapped), ValueError, "sequence 2 is swapped out: it has no blocks"),
    (lambda s: s.cache.reparent([s.live], []), ValueError, "parents must name one sequence for each of 1, got 0"),
    (lambda s: s.cache.reparent([s.live, s.live], [s.live, s.live]), ValueError, "seqs names sequence 0 twice"),
    (lambda s: s.cache.reparent([s.live], [s.planned]), ValueError, "cannot reparent sequence 1: it is in an open"),
    (lambda s: s.cache.reparent([s.swapped], [s.live]), ValueError, "cannot reparent sequence 2: it is"),
    (lambda s: s.cache.add(range(21)), ValueError, "tokens has 21 ids, max_length is 20"),
    (lambda s: s.cache.add([0.5]), TypeError, "tokens must be whole numbers, got float64"),
    (lambda s: s.cache.add([[1]]), ValueError, r"tokens must have 1 axis, got shape \(1, 1\)"),
    (lambda s: s.cache.add([1, 2**31]), ValueError, r"tokens\[1\] is 2147483648, out of range for a token id of 32"),
    (lambda s: s.cache.add([1], salt=[]), TypeError, "unhashable"),
    (lambda s: s.cache.commit(s.plan, [1]), ValueError,
     "tokens must have 2 ids, one for each new position, got 1"),
    (lambda s: s.cache.commit(s.plan, ["a", "b"]), TypeError, "tokens must be whole numbers"),
    (lambda s: s.cache.commit(s.plan, accepted=[]), ValueError,
     "accepted must have 1 counts, one for each sequence, got 0"),
    (lambda s: s.cache.commit(s.plan, accepted=[3]), ValueError,
     r"accepted\[0\] is 3, out of range for 2 new tokens"),
    (lambda s: s.cache.commit(s.plan, accepted=[-1]), ValueError, r"accepted\[0\] is -1, out"),
    (lambda s: s.cache.commit(s.plan, accepted=[1.0]), TypeError, "accepted must be whole"),
    (lambda s: s.cache.commit(None), ValueError, "plan is not open in this cache"),
    (lambda s: s.cache.rollback(None), ValueError, "plan is not open in this cache"),
    (lambda s: s.cache.keys(1), ValueError, "layer must be a whole number from 0 to 0, got 1"),
    (lambda s: s.cache.keys(0.5), ValueError, "layer must be a whole number from 0 to 0, got 0.5"),
    (lambda s: s.cache.values(-1), ValueError, "layer must be a whole number from 0 to 0, got -1"),
])
def test_refused_with_nothing_changed(call, error, match):
    kinds = one_of_each()
    refused(kinds.cache, lambda: call(kinds), error, match)


def test_no_more_than_max_sequences():
    cache = small_cache(max_sequences=3)
    seq = prompt(cache, [1, 2])
    cache.fork(seq)
    cache.add()
    for call in (lambda: cache.fork(seq), cache.add, lambda: cache.add([1, 2, 3], "salt"), lambda: cache.resume([1])):
        refused(cache, call, npg.OutOfBlocks, r"all 3 sequences are in use \(max_sequences\)")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_plan_is_closed_once_and_by_its_own_cache(end):
    cache, other = small_cache(), small_cache()
    plan = cache.plan([cache.add()])
    other.plan([other.add()])
    refused(other, lambda: getattr(other, end)(plan), ValueError, "plan is not open in this cache")
    getattr(cache, end)(plan)
    for verb in (cache.commit, cache.rollback):
        refused(cache, lambda verb=verb: verb(plan), ValueError, "plan is not open in this cache")
    k = np.zeros((1, 1, 1), np.float32)
    refused(cache, lambda: cache.attend(0, k, k, k, plan), ValueError, "plan is not open in this cache")


def test_a_sequence_that_an_open_plan_holds_is_freed_after_that_plan_only():
    cache = small_cache()
    a, b = cache.add(), cache.add()
    plan, other = cache.plan([a]), cache.plan([b])
    refused(cache, lambda: cache.free(a, after=other), ValueError, "cannot free sequence 0: it is in an open plan")
    cache.free(a, after=plan)
    cache.rollback(plan)
    refused(cache, lambda: cache.free(b, after=plan), ValueError, "plan is not open in this cache")


@pytest.mark.parametrize(("options", "error", "match"), [
    ({"num_layers": 0}, ValueError, "num_layers must be a whole number >= 1, got 0"),
    ({"num_blocks": 0}, ValueError, "num_blocks must be a whole number from 1"),
    ({"max_sequences": 0}, ValueError, "max_sequences must be a whole number from 1"),
    ({"max_length": 0}, ValueError, "max_length must be a whole number from 1 to 2147483647, got 0"),
    ({"max_length": 2**31}, ValueError, "max_length must be a whole number from 1 to 2147483647, got 2147483648"),
    ({"max_length": 1.5}, ValueError, "max_length must be a whole number from 1 to 2147483647, got 1.5"),
    ({"num_host_blocks": -1}, ValueError, "num_host_blocks must be a whole number >= 0, got -1"),
    ({"spec": None}, TypeError, "spec must be an AttentionSpec, got NoneType"),
    ({"backend": "tpu"}, ValueError, "backend must be one of auto, cpu, cuda"),
])
def test_constructor_refuses(options, error, match):
    arguments = {"spec": npg.AttentionSpec(1, 1, 1), "num_layers": 1, "num_blocks": 2, "backend": ArrayBackend()}
    with pytest.raises(error, match=match):
        npg.PagedKVCache(**arguments | options)


def test_swapping_needs_a_host_pool():
    cache = small_cache()
    seq = prompt(cache, [1])
    refused(cache, lambda: cache.swap_out(seq), npg.OutOfBlocks, "no host pool to swap to: num_host_blocks is 0")
