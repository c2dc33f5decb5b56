"""Random calls to a cache and its model, which must agree after each: hypothesis finds the shortest that differ."""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_pair import Pair

CHOICE = st.integers(0, 2**16)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class CacheMachine(RuleBasedStateMachine):
    """Sequences, steps, and a pool that is nearly always too small."""

    @initialize(num_blocks=st.integers(2, 14), block_size=st.integers(1, 4), max_length=st.integers(4, 40) | st.none())
    def begin(self, num_blocks, block_size, max_length):
        self.pair = Pair(num_blocks, block_size, max_length=max_length, prefix_caching=False)

    def pick(self, choice):
        seqs = self.pair.seqs
        return seqs[choice % len(seqs)]

    @rule()
    def add(self):
        self.pair.add()

    @precondition(lambda self: self.pair.seqs)
    @rule(choice=CHOICE)
    def fork(self, choice):
        self.pair.fork(self.pick(choice))

    @precondition(lambda self: self.pair.seqs)
    @rule(choice=CHOICE, new=st.lists(TOKENS, min_size=1, max_size=4), same=st.booleans())
    def plan(self, choice, new, same):
        seqs = self.pair.seqs
        order = [seqs[(choice + i * (1 + choice % 5)) % len(seqs)] for i in range(len(new))]
        self.pair.plan(order if same else list(dict.fromkeys(order)), new if same else new[: len(set(order))])

    @precondition(lambda self: self.pair.plans)
    @rule(choice=CHOICE)
    def attend(self, choice):
        self.pair.attend(choice % len(self.pair.plans))

    @precondition(lambda self: self.pair.plans)
    @rule(choice=CHOICE, told=st.booleans())
    def commit(self, choice, told):
        self.pair.commit(choice % len(self.pair.plans), told)

    @precondition(lambda self: self.pair.plans)
    @rule(choice=CHOICE)
    def rollback(self, choice):
        self.pair.rollback(choice % len(self.pair.plans))

    @precondition(lambda self: self.pair.seqs)
    @rule(choice=CHOICE, length=st.integers(-1, 24))
    def truncate(self, choice, length):
        self.pair.truncate(self.pick(choice), length)

    @precondition(lambda self: self.pair.seqs)
    @rule(choice=CHOICE)
    def free(self, choice):
        self.pair.free(self.pick(choice))

    @rule(choice=CHOICE)
    def gone(self, choice):
        """A handle that was freed or never given out is refused by each verb."""
        pair = self.pair
        handle = choice % 64 - 8
        if handle not in pair.seqs:
            pair.fork(handle)
            pair.truncate(handle, 0)
            pair.free(handle)
            pair.plan([*pair.seqs[:1], handle], [[0]] * (1 + bool(pair.seqs)))

    @invariant()
    def agree(self):
        if hasattr(self, "pair"):
            self.pair.check()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=int(os.environ.get("NPG_EXAMPLES", 100)), stateful_step_count=40, deadline=None,
                                     suppress_health_check=list(HealthCheck))
