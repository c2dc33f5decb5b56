"""Random calls to a cache and its model, which must agree after each: hypothesis finds the shortest that differ."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from cache_pair import Pair

WEIGHTS = {"prefill": 6, "decode": 6, "draft": 3, "plan": 3, "attend": 1, "commit": 4, "rollback": 2, "add": 1,
           "fork": 3, "truncate": 3, "free": 2, "free_after": 2, "reparent": 2, "swap_out": 3, "swap_in": 4, "gone": 1,
           "clear_prefixes": 0.3}
CALLS = st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(int(weight * 10))])
NUMBER = st.integers(0, 2**16)
SALTS = [None, None, None, "tenant", ("tenant",)]
PROMPTS = [[0] * 24, [0, 1] * 12, [0] * 6 + [1] * 18, [0] * 12 + [1] * 12]


class CacheMachine(RuleBasedStateMachine):
    """Sequences, steps, and a pool that is nearly always too small; a rule is one call, its numbers pick the
    arguments."""

    @initialize(num_blocks=st.integers(2, 16), block_size=st.integers(1, 4), max_length=st.integers(8, 40) | st.none(),
                window=st.none() | st.integers(1, 9), prefix_caching=st.sampled_from([True, True, True, False]),
                num_host_blocks=st.sampled_from([0, 3, 12, 12]))
    def begin(self, **options):
        self.pair = Pair(**options)

    @rule(name=CALLS, a=NUMBER, b=NUMBER, c=NUMBER)
    def call(self, name, a, b, c):
        getattr(self, name)(a, b, c)
        self.pair.check()

    # ---------------------------------------------------------------- one call each

    def seq(self, number):
        seqs = self.pair.seqs
        return seqs[number % len(seqs)] if seqs else -1

    def some(self, a, b):
        """A few sequences, none twice; a handle that is none where there are no others."""
        return list(dict.fromkeys(self.seq(a + i * (1 + b % 5)) for i in range(1 + b % 4)))

    def new(self, seq, count):
        """The next tokens of a sequence: it goes on with the prompt that it began with."""
        told = self.pair.told.get(seq)
        at = len(told.history) if told else 0
        prompt = next((prompt for prompt in PROMPTS if told and prompt[:at] == told.history), PROMPTS[0])
        return (prompt[at:] + [1] * 64)[:count]

    def prefill(self, a, b, c):
        """A prompt, all at once or its beginning."""
        tokens = PROMPTS[a % 4][: 1 + b % 24]
        seq = self.pair.add(tokens, SALTS[c % 5] if self.pair.cache._prefixes.enabled else None, resumed=bool(c % 2))
        if seq is not None:
            tokens = tokens[len(self.pair.told[seq].history) :]
            if self.pair.plan([seq], [tokens[: 1 + c % 30]]) and c % 3:
                self.pair.commit(-1)

    def decode(self, a, b, c):
        """All sequences that are free for it, one token each."""
        seqs = [seq for seq in self.pair.seqs if not self.pair.model.sequences[seq].swapped
                and not self.pair.model.sequences[seq].plan]
        new = [self.new(seq, 1) if a % 2 else [(a + seq) % 2] for seq in seqs]
        if seqs and self.pair.plan(seqs, new) and b % 4:
            self.pair.commit(-1, told=c % 8 > 0)

    def draft(self, a, b, c):
        """Some sequences try a few tokens, of which some are taken."""
        seqs = self.some(a, b)
        counts = [1 + (c + i) % 6 for i in range(len(seqs))]
        if self.pair.plan(seqs, [self.new(seq, count) for seq, count in zip(seqs, counts)]):
            self.pair.commit(-1, accepted=[a // (i + 1) % (count + 1) for i, count in enumerate(counts)])

    def plan(self, a, b, c):
        seqs = self.some(a, b) if c % 10 else [self.seq(a), self.seq(b), self.seq(c)]
        self.pair.plan(seqs, [self.new(seq, (c + i) % 8) for i, seq in enumerate(seqs)], [0, 0, 0, 1, 5][c % 5])

    def attend(self, a, b, c):
        if self.pair.plans:
            self.pair.attend(a % len(self.pair.plans))

    def commit(self, a, b, c):
        if self.pair.plans:
            self.pair.commit(a % len(self.pair.plans), told=b % 5 > 0)

    def rollback(self, a, b, c):
        if self.pair.plans:
            self.pair.rollback(a % len(self.pair.plans))

    def add(self, a, b, c):
        self.pair.add(None if a % 2 else PROMPTS[a % 4][: b % 50], SALTS[c % 5])

    def fork(self, a, b, c):
        self.pair.fork(self.seq(a))

    def truncate(self, a, b, c):
        self.pair.truncate(self.seq(a), b % 26 - 1)

    def free(self, a, b, c):
        self.pair.free(self.seq(a))

    def free_after(self, a, b, c):
        if self.pair.plans:
            self.pair.free(self.seq(a), b % len(self.pair.plans))

    def reparent(self, a, b, c):
        seqs = self.some(a, b)
        self.pair.reparent(seqs, [self.seq(c + i * (1 + c % 3)) for i in range(len(seqs))])

    def swap_out(self, a, b, c):
        self.pair.swap_out(self.seq(a))

    def swap_in(self, a, b, c):
        swapped = [seq for seq in self.pair.seqs if self.pair.model.sequences[seq].swapped]
        self.pair.swap_in(swapped[a % len(swapped)] if swapped and b % 8 else self.seq(a))

    def clear_prefixes(self, a, b, c):
        self.pair.clear_prefixes()

    def gone(self, a, b, c):
        """A handle that was freed or never given out is refused by each verb."""
        pair, handle = self.pair, a % 64 - 8
        if handle not in pair.seqs:
            for verb in (pair.fork, pair.free, pair.swap_out, pair.swap_in):
                verb(handle)
            pair.truncate(handle, 0)
            pair.reparent([handle], [handle])
            pair.plan([*pair.seqs[:1], handle], [[0]] * (1 + bool(pair.seqs)))


def run(max_examples, num_rules):
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=max_examples, stateful_step_count=num_rules,
                                                              deadline=None, suppress_health_check=list(HealthCheck)))


def test_the_cache_is_its_model():
    run(150, 50)


@pytest.mark.long
def test_the_cache_is_its_model_long():
    run(2000, 50)
