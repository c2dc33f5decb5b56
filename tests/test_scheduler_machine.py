"""Random requests, aborts and cancelled steps in random small pools: each request gets what it would get alone."""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from server import PREEMPTIONS, Server

CHOICE = st.integers(0, 2**16)
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted and run, in a pool that is nearly always too small."""

    @initialize(data=st.data())
    def begin(self, data):
        draw = lambda name, strategy: data.draw(strategy, label=name)  # noqa: E731
        self.server = Server(
            num_blocks=draw("num_blocks", st.integers(2, 12)),
            block_size=draw("block_size", st.integers(1, 4)),
            max_length=draw("max_length", st.sampled_from([None, 12, 40])),
            window=draw("window", st.none() | st.integers(1, 9)),
            prefix_caching=draw("prefix_caching", st.booleans()),
            max_sequences=draw("max_sequences", st.integers(3, 12)),
            max_batch_tokens=draw("max_batch_tokens", st.integers(1, 16)),
            max_batch_size=draw("max_batch_size", st.integers(1, 8)),
            policy=draw("policy", st.sampled_from(["fcfs", "priority"])),
            watermark=draw("watermark", st.sampled_from([0.0, 0.2])),
            **draw("preemption", st.sampled_from(PREEMPTIONS)),
        )
        self.open = None
        self.salts = draw("salts", st.integers(1, 2)) if self.server.prefix_caching else 0

    @rule(tokens=PROMPT, max_new_tokens=st.integers(1, 8), n=st.integers(1, 3), priority=st.integers(0, 2),
          stops=st.sets(st.integers(0, 4), max_size=1), salt=st.integers(0, 1))
    def add(self, tokens, max_new_tokens, n, priority, stops, salt):
        before = self.server.scheduler.stats()
        try:
            self.server.add(tokens, max_new_tokens, n=n, priority=priority, stop_tokens=stops,
                            salt=salt % self.salts if self.salts else None)
        except ValueError:
            assert self.server.scheduler.stats() == before
            assert n > self.server.scheduler.max_batch_size or self.too_long(len(tokens) + max_new_tokens - 1)

    def too_long(self, length):
        """Whether no sequence of that length fits: with a window, one token more than it must."""
        cache = self.server.cache
        held = length if cache.spec.window is None else min(length, cache.spec.window + cache.spec.block_size)
        return length > cache.max_length or held > cache.stats().num_blocks * cache.spec.block_size

    @precondition(lambda self: self.open is None)
    @rule(count=st.integers(1, 5))
    def steps(self, count):
        for _ in range(count):
            self.server.step()

    @precondition(lambda self: self.open is None)
    @rule()
    def schedule(self):
        self.open = self.server.schedule()

    @precondition(lambda self: self.open is not None)
    @rule(keep=st.booleans())
    def finish(self, keep):
        if keep:
            self.server.update(self.open)
        else:
            self.server.scheduler.cancel(self.open)
            self.server.cache.check()
        self.open = None

    @precondition(lambda self: self.server.requests)
    @rule(choice=CHOICE)
    def abort(self, choice):
        request = self.server.requests[choice % len(self.server.requests)]
        if not request.finished:
            self.server.abort(request)

    def teardown(self):
        if hasattr(self, "server"):
            if self.open is not None:
                self.server.update(self.open)
            self.server.drain()



TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=int(os.environ.get("NPG_EXAMPLES", 100)), stateful_step_count=25,
                                         deadline=None, suppress_health_check=list(HealthCheck))
