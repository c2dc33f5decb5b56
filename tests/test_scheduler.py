"""The scheduler: one test for each rule that it follows, and for each kind of bug that others have had.

The issues named are those of vLLM, SGLang, nano-vllm and LMCache on GitHub where the bug was reported.
"""

import numpy as np
import pytest

import numba_paged as npg
from server import PREEMPTIONS, Server, next_token

# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("wrong, message", [
    ({"tokens": []}, "tokens must be a row of at least one token id"),
    ({"tokens": [[1, 2]]}, "tokens must be a row of at least one token id"),
    ({"tokens": [0.5]}, "tokens must be a row of at least one token id"),
    ({"tokens": [3, -1]}, "tokens must be from 0 to 2..31 - 1, got -1 to 3"),
    ({"tokens": [2**31, 0]}, "tokens must be from 0 to 2..31 - 1, got 0 to 2147483648"),
    ({"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
    ({"n": 0}, "n must be a whole number >= 1, got 0"),
    ({"n": 1.5}, "n must be a whole number >= 1, got 1.5"),
])
def test_a_wrong_request_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        npg.Request(**{"tokens": [1], "max_new_tokens": 1} | wrong)


@pytest.mark.parametrize("wrong, message", [
    ({"max_batch_tokens": 0}, "max_batch_tokens must be a whole number >= 1, got 0"),
    ({"max_batch_size": 0}, "max_batch_size must be a whole number >= 1, got 0"),
    ({"policy": "lifo"}, "policy must be one of fcfs, priority, got 'lifo'"),
    ({"preemption": None}, "preemption must be one of recompute, swap, got None"),
    ({"watermark": 1}, "watermark must be from 0 to below 1, got 1"),
])
def test_a_wrong_option_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Server(4, **wrong)


def test_what_can_never_run_is_refused_with_the_numbers():
    """A request longer than the pool would wait for ever and hold up those behind it (vllm#39734)."""
    server = Server(4, block_size=2, max_length=20)
    with pytest.raises(ValueError, match="7 tokens and max_new_tokens 3 make 9 to store, 5 blocks of a pool of 4"):
        server.add([0] * 7, 3)
    with pytest.raises(ValueError, match="n is 5, max_batch_size is 4"):
        Server(4, max_batch_size=4).add([0], 1, n=5)
    with pytest.raises(ValueError, match="5 tokens and max_new_tokens 3 make 7 to store, max_length is 6"):
        Server(4, max_length=6).add([0] * 5, 3)
    with pytest.raises(ValueError, match="salt 'a' is a namespace of prefixes, and prefix_caching is off"):
        Server(4, prefix_caching=False).add([0], 1, salt="a")
    request = server.add([0] * 2, 1)
    with pytest.raises(ValueError, match="added before"):
        server.scheduler.add(request)
    assert server.scheduler.stats().num_waiting == 1


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_what_just_fits_runs(num_tokens):
    """The last token is sampled but never stored: at max_length and at the pool's last slot (vllm-ascend#9098)."""
    for server in (Server(4, block_size=2), Server(9, block_size=2, max_length=8)):
        server.add([1] * num_tokens, 9 - num_tokens)
        server.drain()


def test_calls_out_of_turn_are_refused_and_change_nothing():
    server = Server(8)
    server.add([1, 0, 1], 2, n=2)
    step = server.schedule()
    with pytest.raises(ValueError, match="a step is open"):
        server.scheduler.schedule()
    for wrong in ([1], [1, 2, 3], [[1], [2]], [0.5, 0.5]):
        with pytest.raises(ValueError, match="next_tokens must be 2 token ids"):
            server.scheduler.update(step, wrong)
    server.update(step)
    for call in (lambda: server.scheduler.update(step, [1, 1]), lambda: server.scheduler.cancel(step),
                 lambda: server.scheduler.update(None, [])):
        with pytest.raises(ValueError, match="step is not open"):
            call()
    with pytest.raises(ValueError, match="not added to this scheduler"):
        server.scheduler.abort(npg.Request([1], 1))
    server.drain()
    server.scheduler.abort(server.requests[0])  # it has finished: a late abort is no error
    assert server.scheduler.schedule() is None


# ---------------------------------------------------------------- one step


def test_a_long_prompt_runs_in_chunks_and_decodes_go_first():
    server = Server(20, max_batch_tokens=4)
    server.add([1, 0], 8)
    server.step()
    server.add([0, 1] * 5, 2)
    ran = []
    while step := server.step():
        ran.append((np.diff(step.plan.query_starts).tolist(), len(step.samples)))
    # the first has a token a step; the second 3, 3, 3 and 1 of its prompt, of which only the last is sampled
    assert ran[:4] == [([1, 3], 1)] * 3 + [([1, 1], 2)]
    server.check_outputs()


def test_a_prompt_of_higher_priority_does_not_stop_a_decode():
    server = Server(20, max_batch_tokens=4, policy="priority")
    server.add([1, 0], 8, priority=1)
    server.step()
    server.add([0, 1] * 5, 2, priority=0)
    for _ in range(4):
        assert len(server.step().running) == 2
    server.drain()


def test_prompts_of_different_salts_share_nothing():
    server = Server(20)
    for salt in ("a", "b", "a"):
        server.add([1, 0, 1, 0, 1], 1, salt=salt)
        server.drain()
    assert [positions for _, _, positions in server.trace] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [4]]


def test_samples_share_the_prompt_and_its_last_logits():
    server = Server(20, block_size=4)
    request = server.add([1, 0, 1, 1, 0], 3, n=3)
    step = server.step()
    assert step.logit_rows.tolist() == [4, 4, 4] and step.samples == request.samples
    assert server.cache.stats().num_shared == server.cache.stats().num_used == 2
    server.step()
    assert server.cache.stats().num_copied == 2  # the last of the three writes in place
    server.drain()


def test_a_last_sample_copies_nothing():
    """Nothing is shared any more when the others ended with the prompt (vllm#417)."""
    server = Server(20)
    request = npg.Request([1, 0, 1], 4, n=2)
    ends = {next_token([1, 0, 1], 0)} - {next_token([1, 0, 1], 1)}
    assert ends, "pick a prompt whose samples begin differently"
    server.add([1, 0, 1], 4, n=2, stop_tokens=ends)
    server.drain()
    assert [len(sample.tokens) for sample in server.requests[0].samples][0] == 1
    assert server.cache.stats().num_copied == 0


def test_stop_tokens_and_lengths_end_a_sample():
    server = Server(20)
    for token in range(5):
        server.add([1, 0, 1], 12, stop_tokens=[token], salt=token)
    finished = []
    while step := server.schedule():
        finished += server.update(step)
    assert sorted(map(id, finished)) == sorted(map(id, server.requests))
    server.check_outputs()
    assert {request.samples[0].finish_reason for request in server.requests} == {"stop", "length"}


# ---------------------------------------------------------------- admission


def test_a_prompt_enters_as_a_whole_or_not_at_all():
    """Room for its next chunk alone is not enough: it would be stopped half way, again and again (vllm#21809)."""
    server = Server(6, max_batch_tokens=4, watermark=0, prefix_caching=False)
    first = server.add([1] * 4, 6)
    server.add([0] * 10, 2)
    while not first.finished:
        server.step()
        assert server.scheduler.stats().num_running == (not first.finished)
    server.drain()
    assert server.scheduler.stats().num_preempted == 0


def test_two_half_computed_prompts_never_wait_for_each_other():
    """What the first still needs for its prompt is not given to the second (vllm#45388)."""
    server = Server(8, max_batch_tokens=4, watermark=0, prefix_caching=False)
    first = server.add([1] * 12, 2)
    server.add([0] * 12, 2)
    server.step()
    assert server.cache.num_available >= 6  # enough for the second, were it not for the first
    while not first.finished:
        assert server.scheduler.stats().num_running == 1
        server.step()
    server.drain()
    assert server.scheduler.stats().num_preempted == 0


def test_with_a_window_a_sequence_may_be_longer_than_the_pool():
    """Its prompt comes in chunks that fit beside what is visible; half computed ones do not push each other out."""
    server = Server(9, block_size=2, window=9, max_length=100, max_batch_tokens=20, watermark=0)
    for tokens in ([0, 1, 1] * 12, [1, 0, 1, 1] * 9):
        server.add(tokens, 12)
    server.drain()
    assert server.scheduler.stats().num_preempted == 0
    with pytest.raises(ValueError, match="36 tokens and max_new_tokens 1 make 36 to store, 18 blocks of a pool of 9"):
        Server(9, block_size=2, window=17, max_length=100).add([0] * 36, 1)


def test_the_watermark_is_for_admissions_but_not_the_first():
    """Growth may use the spare blocks, and a request that takes nearly all of them runs when alone (vllm#44594)."""
    server = Server(8, watermark=0.5)
    server.add([1] * 13, 4)
    server.add([0], 1)
    server.step()
    for _ in range(3):
        assert server.scheduler.stats().num_running == 1 and server.scheduler.stats().num_waiting == 1
        assert server.cache.num_available < 4
        server.step()
    server.drain()
    assert server.scheduler.stats().num_preempted == 0


def test_a_refused_admission_gives_everything_back():
    """Blocks that it would have shared are neither held nor counted as taken (vllm#11565, sglang#16067)."""
    server = Server(6, watermark=0)
    server.add([1, 0, 1, 0, 1], 1)
    server.drain()
    server.add([0] * 7, 2)
    server.step()
    server.add([1, 0, 1, 0, 1, 1, 1], 2)
    before = server.cache.num_available, server.cache.stats().num_sequences
    step = server.schedule()
    server.scheduler.cancel(step)
    assert (server.cache.num_available, server.cache.stats().num_sequences) == before
    assert server.scheduler.stats().num_waiting == 1
    server.drain()


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_a_prompt_that_is_cached_still_runs_a_token(num_tokens):
    """Also at a block's edge, where all of it could be found (vllm#11186, nano-vllm#144)."""
    server = Server(8)
    for _ in range(2):
        server.add(range(num_tokens), 2)
        server.step()
        server.drain()
    first, *_, last = [positions for _, _, positions in server.trace if len(positions) > 1 or positions[0] < num_tokens]
    assert first == list(range(num_tokens))
    assert last == list(range((num_tokens - 1) // 2 * 2, num_tokens))


def test_prompts_of_one_step_do_not_share_what_is_not_computed_yet():
    """nano-vllm#208: published after the step, so the second finds nothing in the same step."""
    server = Server(20)
    server.add([1, 0, 1, 0, 1], 3)
    server.add([1, 0, 1, 0, 1], 3)
    step = server.schedule()
    assert step.plan.positions.tolist() == [0, 1, 2, 3, 4] * 2
    server.update(step)
    server.drain()


def test_a_big_request_at_the_head_holds_up_small_ones():
    """First come, first served is strict, so that it cannot starve (vllm#35852 asks for a choice: priorities)."""
    for policy in ("fcfs", "priority"):
        server = Server(8, policy=policy, watermark=0)
        running = server.add([1] * 9, 5, priority=1)
        server.step()
        big, small = server.add([0] * 9, 2, priority=1), server.add([0, 1], 1, priority=0)
        server.step()
        assert not running.finished and not big.samples[0].num_computed
        assert small.finished == (policy == "priority")
        server.drain()


# ---------------------------------------------------------------- giving way


@pytest.mark.parametrize("policy, victim", [("fcfs", 2), ("priority", 0)])
def test_the_last_gives_way_and_only_as_many_as_needed(policy, victim):
    """One block each is short, one victim has two: not one more goes (sglang#6731 counted tokens, not blocks)."""
    server = Server(6, policy=policy, watermark=0)
    for priority in (2, 0, 1):
        server.add([1, priority, 1], 6, priority=priority)
    server.step()
    server.step()
    step = server.step()
    assert server.scheduler.stats().num_preempted == 1
    assert {0, 1, 2} - {server.requests.index(sample.request) for sample in step.running} == {victim}
    server.drain()


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_tokens", range(1, 7))
def test_after_a_preemption_a_request_goes_on_as_if_nothing_had_happened(num_tokens, prefix_caching):
    """Its row is a new one, what is found cached is not run, and its last logits are the next token's: nano-vllm#211
    and #217, LMCache#1361."""
    server = Server(6, prefix_caching=prefix_caching, watermark=0)
    server.add([1] * num_tokens, 10 - num_tokens)
    server.add([0] * num_tokens, 10 - num_tokens)
    server.drain()
    assert server.scheduler.stats().num_preempted > 0


@pytest.mark.parametrize("max_batch_tokens", [3, 100])
def test_recomputation_is_counted_apart(max_batch_tokens):
    """vllm#25780: what a preemption makes to be computed again is neither new work nor a hit."""
    server = Server(6, prefix_caching=False, watermark=0, max_batch_tokens=max_batch_tokens)
    for tokens in ([1] * 3, [0] * 3, [1, 0]):
        server.add(tokens, 6)
    server.drain()
    stats = server.scheduler.stats()
    assert stats.num_recomputed > 0
    assert stats.num_tokens - stats.num_recomputed == sum(
        request.tokens.size + len(sample.tokens) - 1 for request in server.requests for sample in request.samples)


def test_prompts_of_resumed_requests_are_no_queries():
    """The hit rate is that of the requests, however often they give way and look for their own prefix."""
    server = Server(6, watermark=0)
    for tokens in ([1] * 3, [0] * 3, [1, 0]):
        server.add(tokens, 6)
    server.drain()
    stats = server.cache.stats()
    assert stats.num_queried == 8 and stats.num_requeried > 0


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", [4, 5, 6, 7])
def test_who_comes_back_from_the_host_runs(num_blocks, num_tokens):
    """Room for what was computed is not enough, its next token must fit too; else it would be moved to and fro
    (vllm#8824)."""
    server = Server(num_blocks, preemption="swap", num_host_blocks=20, prefix_caching=False, watermark=0)
    for token in (0, 1):
        server.add([token] * num_tokens, 8 - num_tokens + token)
    num_moved = 0
    while step := server.schedule():
        returned, num_moved = server.cache.stats().num_swapped_in > num_moved, server.cache.stats().num_swapped_in
        assert not returned or server.requests[1].samples[0] in step.running
        server.update(step)
    assert num_moved
    server.check_outputs()


@pytest.mark.parametrize("num_host_blocks", [0, 1, 2, 20])
def test_a_full_host_pool_means_recomputation(num_host_blocks):
    """Swapping never fails and never stalls (vllm#787, #5578)."""
    server = Server(6, preemption="swap", num_host_blocks=num_host_blocks, prefix_caching=False, watermark=0)
    for tokens in ([1] * 3, [0] * 3, [1, 0]):
        server.add(tokens, 6)
    server.drain()
    stats = server.scheduler.stats()
    assert stats.num_preempted > 0
    assert (stats.num_swapped > 0) == (num_host_blocks >= 2)
    assert (stats.num_recomputed > 0) == (num_host_blocks < 20)


@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_samples_give_way_one_by_one(preemption):
    """Each carries its own tokens and comes back alone (vllm#14759, #546)."""
    server = Server(7, watermark=0, **preemption)
    server.add([1, 0, 1], 8, n=3)
    server.add([0, 1], 8, n=2)
    server.drain()
    assert server.scheduler.stats().num_preempted > 0


def test_samples_without_a_place_in_the_cache_wait_for_one():
    server = Server(20, max_sequences=2, prefix_caching=False)
    request = server.add([1, 0, 1], 4, n=4)
    server.drain()
    stats = server.scheduler.stats()
    assert stats.num_recomputed == 2 * 3 and stats.num_preempted == 0
    assert stats.num_tokens - stats.num_recomputed == 3 + sum(len(sample.tokens) - 1 for sample in request.samples)


# ---------------------------------------------------------------- ends, and others in the cache


def test_an_abort_in_flight_keeps_the_blocks_until_the_step_is_over():
    """The step still writes to them: given away at once, they would be overwritten (vllm#45357, #32255)."""
    for end in ("update", "cancel"):
        server = Server(6, prefix_caching=False, watermark=0)
        first, second = server.add([1] * 3, 4), server.add([0] * 3, 4)
        server.step()
        step = server.schedule()
        before = server.cache.num_available
        server.abort(second)
        assert server.cache.num_available == before
        if end == "update":
            server.update(step)
            assert len(second.samples[0].tokens) == 1  # what the step sampled for it is not wanted any more
        else:
            server.scheduler.cancel(step)
            server.cache.check()
        assert server.cache.num_available == before + 2
        server.drain()
        assert [request.samples[0].finish_reason for request in (first, second)] == ["length", "abort"]


@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_an_abort_finds_a_request_wherever_it_is(preemption):
    """Waiting, preempted, swapped out, half computed or forked: nothing is left behind (vllm#46283)."""
    for num_steps in range(12):
        server = Server(6, max_batch_tokens=4, watermark=0, **preemption)
        requests = [server.add(tokens, 6, n=n) for tokens, n in (([1] * 3, 2), ([0] * 5, 1), ([1, 0], 1))]
        for _ in range(num_steps):
            server.step()
        for request in requests:
            if not request.finished:
                server.abort(request)
        server.drain()


def test_a_cancelled_step_comes_again():
    server = Server(8)
    server.add([1, 0, 1], 3, n=2)
    server.add([0, 0], 3)
    server.step()
    step = server.schedule()
    server.scheduler.cancel(step)
    again = server.schedule()
    assert again.tokens.tolist() == step.tokens.tolist() and again.samples == step.samples
    server.update(again)
    server.drain()


def test_it_says_so_when_others_hold_what_it_needs():
    """Sequences of the caller's own in the same cache can stop it, and it goes on when they are gone."""
    server = Server(4)
    cache = server.cache
    seq = cache.add()
    cache.commit(cache.plan([seq], num_new=6))
    request = server.add([1, 0, 1], 2)
    with pytest.raises(npg.OutOfBlocks, match="2 blocks wanted to admit the next request, 1 are available"):
        server.scheduler.schedule()
    cache.truncate(seq, 4)
    server.step()
    server.step()
    assert request.finished
    server.add([1, 0, 1], 4)
    server.step()
    server.step()
    with pytest.raises(npg.OutOfBlocks, match="1 blocks wanted, 0 of 4 are available"):
        server.scheduler.schedule()
    cache.free(seq)
    server.drain()


def test_the_same_requests_run_in_the_same_steps():
    traces = []
    for _ in range(2):
        server = Server(9, max_batch_tokens=6, max_batch_size=4)
        rng = np.random.default_rng(0)
        for _ in range(12):
            server.add(rng.integers(0, 2, rng.integers(1, 8)), int(rng.integers(1, 7)), n=int(rng.integers(1, 4)))
        server.drain()
        traces.append(server.trace)
    assert traces[0] == traces[1]
