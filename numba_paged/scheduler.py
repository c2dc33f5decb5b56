"""Request, Step, Scheduler: which sequences run next, and which give way when the pool runs out of blocks.

Continuous batching (Orca, OSDI 2022) with prompts in chunks (Sarathi-Serve, arXiv:2403.02310); admission and preemption
as in section 4.5 of the vLLM paper (arXiv:2309.06180).
"""

from bisect import insort
from dataclasses import dataclass, field, replace

import numpy as np

from .errors import OutOfBlocks
from .plan import Plan
from .scalars import whole_number
from .sizing import num_blocks_for
from .spec import NO_WINDOW

POLICIES = {"fcfs": lambda request: 0, "priority": lambda request: request.priority}


@dataclass(eq=False)
class Sample:
    """One continuation of a request.

    Attributes
    ----------
    request : Request
    index : int
        Which of the request's samples it is.
    tokens : list of int
        What was generated so far; a stop token stays at the end.
    finish_reason : {None, "stop", "length", "abort"}
        Why it ended; None while it has not.
    num_computed : int
        Its tokens, prompt included, whose keys and values are in the cache.
    """

    request: "Request" = field(repr=False)
    index: int
    tokens: list = field(default_factory=list)
    finish_reason: str | None = None
    num_computed: int = 0
    _rank: tuple = field(default=(), repr=False)
    _seq: int | None = field(default=None, repr=False)
    _num_seen: int = field(default=0, repr=False)  # the most tokens that it ever had in the cache

    @property
    def num_pending(self):
        """Known tokens that are not computed yet; 1 while decoding."""
        return self._num_known - self.num_computed

    @property
    def _num_known(self):
        return self.request.tokens.size + len(self.tokens)

    def _known(self):
        return np.append(self.request.tokens, np.array(self.tokens, np.int32))

    def _next(self, count):
        """The next `count` tokens to run."""
        start = self.num_computed - self.request.tokens.size
        return self.tokens[start:][:count] if start >= 0 else self._known()[self.num_computed :][:count].tolist()

    def _group(self):
        """The samples that its sequence stands for: all of the request's until the prompt is computed, then itself."""
        return [self] if self.tokens else self.request.samples

    def _append(self, token):
        if self.finish_reason is None:
            self.tokens.append(token)
            if token in self.request.stop_tokens:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.request.max_new_tokens:
                self.finish_reason = "length"


@dataclass(eq=False)
class Request:
    """A prompt to continue.

    Parameters
    ----------
    tokens : sequence of int
        The prompt's token ids, at least one.
    max_new_tokens : int
        The most tokens to generate in each sample, at least 1.
    n : int
        How many samples; they share the prompt's blocks.
    priority : int
        With ``policy="priority"`` the smallest number goes first.
    stop_tokens : collection of int
        A sample ends after any of them.
    salt : hashable, optional
        The namespace of its prefix in the cache (a tenant, an adapter).

    Attributes
    ----------
    samples : list of Sample
        Its continuations, in `add` made and in each `update` extended.

    Raises
    ------
    ValueError
        If the prompt is empty or not a row of numbers, or a count is less than 1.

    Examples
    --------
    >>> request = Request([5, 6, 7], max_new_tokens=20, n=2, stop_tokens={0})
    >>> request.tokens, request.finished
    (array([5, 6, 7], dtype=int32), False)
    """

    tokens: np.ndarray
    max_new_tokens: int
    n: int = 1
    priority: int = 0
    stop_tokens: frozenset = frozenset()
    salt: object = None
    samples: list = field(default_factory=list, init=False, repr=False)
    _scheduler: object = field(default=None, init=False, repr=False)  # the one that it was added to

    def __post_init__(self):
        tokens = np.asarray(self.tokens)
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be a row of at least one token id, got {tokens.dtype.name} {tokens.shape}")
        if tokens.min() < 0 or tokens.max() >= 2**31:
            raise ValueError(f"tokens must be from 0 to 2**31 - 1, got {tokens.min()} to {tokens.max()}")
        self.tokens = tokens.astype(np.int32)
        self.max_new_tokens = whole_number("max_new_tokens", self.max_new_tokens)
        self.n = whole_number("n", self.n)
        self.stop_tokens = frozenset(self.stop_tokens)

    @property
    def finished(self):
        """Whether every sample has ended."""
        return bool(self.samples) and all(sample.finish_reason for sample in self.samples)


@dataclass(frozen=True, eq=False)
class Step:
    """What a model runs next.

    Attributes
    ----------
    plan : Plan
        Positions, slots and query starts of the tokens; open in the scheduler's cache.
    tokens : int32 [num_tokens]
        The token ids to run, one sequence after the other.
    running : list of Sample, [num_seqs]
        Whose tokens they are.
    logit_rows : int32 [num_samples]
        Rows among `tokens` whose logits are needed: the last one of each sequence whose known tokens are all computed
        then. The row that ends the prompt of a request with n samples is there n times.
    samples : list of Sample, [num_samples]
        What each of those rows is sampled for.
    """

    plan: Plan
    tokens: np.ndarray
    running: list
    logit_rows: np.ndarray
    samples: list


@dataclass
class SchedulerStats:
    """What a scheduler did so far.

    Attributes
    ----------
    num_waiting, num_running : int
        Samples waiting (preempted ones too) and running now; a request's samples are one until its prompt is computed.
    num_steps, num_tokens : int
        Updated steps, and the tokens that they ran.
    num_recomputed : int
        Those of the tokens that had been computed before a preemption; the rest was new.
    num_preempted, num_swapped : int
        Preemptions, and those of them that went to the host's memory.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_recomputed: int = 0
    num_preempted: int = 0
    num_swapped: int = 0


class Scheduler:
    """Continuous batching over a cache: decides each step anew who runs.

    Parameters
    ----------
    cache : PagedKVCache
        Where the sequences live; the caller may have others in it.
    max_batch_tokens : int
        The most tokens in a step; longer prompts run in chunks.
    max_batch_size : int
        The most sequences that run at a time; each of a request's n samples is one. Never more than
        `max_batch_tokens`, as each of them needs a token in every step.
    policy : {"fcfs", "priority"}
        Who goes first: the request added first, or of the smallest priority number the one added first. A request that
        has to wait for blocks holds up those behind it, so none is passed over for ever.
    preemption : {"recompute", "swap"}
        How a sequence gives way: its blocks are freed and computed again later, or they go to the host's memory (and
        are computed again all the same where that is full).
    watermark : float
        Share of the pool's blocks that an admission leaves free, so that what runs can grow; not while nothing runs.

    Raises
    ------
    ValueError
        If an option or a number is out of its range.

    Notes
    -----
    Each step: what runs grows first, sequences with one token to run (decodes) before prompts; while blocks are
    short, the last in the order goes back to wait. Then the head of the waiting is admitted, once the whole of what is
    known of it and of all that run fits. The first in the order is never stopped by others, and what could not run
    alone is refused by `add`: every request comes to its end.

    Examples
    --------
    >>> import numba_paged as npg
    >>> spec = npg.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=4, block_size=4, kv_dtype="float32")
    >>> scheduler = npg.Scheduler(npg.PagedKVCache(spec, num_layers=1, num_blocks=8, backend="cpu"))
    >>> request = scheduler.add(npg.Request([1, 2, 3], max_new_tokens=2, n=2))
    >>> while step := scheduler.schedule():
    ...     logits_of = step.tokens[step.logit_rows]  # a model would run here
    ...     finished = scheduler.update(step, logits_of + 1)
    >>> [sample.tokens for sample in request.samples]
    [[4, 5], [4, 5]]
    """

    def __init__(self, cache, max_batch_tokens=2048, max_batch_size=256, policy="fcfs", preemption="recompute",
                 watermark=0.01):
        for name, value, known in (("policy", policy, POLICIES), ("preemption", preemption, ("recompute", "swap"))):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be from 0 to below 1, got {watermark!r}")
        self.cache, self.policy, self.preemption = cache, policy, preemption
        self.max_batch_tokens = whole_number("max_batch_tokens", max_batch_tokens)
        self.max_batch_size = min(whole_number("max_batch_size", max_batch_size), self.max_batch_tokens)
        self._num_blocks, self._block_size = cache.stats().num_blocks, cache.spec.block_size
        self._window = NO_WINDOW if cache.spec.window is None else cache.spec.window
        self._watermark = int(watermark * self._num_blocks)
        # With a window, what slides out goes back between chunks: short ones fit, however long the sequence becomes.
        room = (self._num_blocks - 1) * self._block_size - self._window + 1
        self._slides = room > 0
        self._max_chunk = min(self.max_batch_tokens, room) if self._slides else self.max_batch_tokens
        self._waiting, self._running = [], []  # samples, both in the order of their ranks
        self._step, self._num_added, self._stats = None, 0, SchedulerStats()

    def add(self, request):
        """Queue a request; it may come at any time.

        Parameters
        ----------
        request : Request

        Returns
        -------
        Request
            The same, with its `samples`.

        Raises
        ------
        ValueError
            If it was added before, or could never run: it is longer than the cache's `max_length`, or than the pool
            even with nobody else there, or has more samples than `max_batch_size`.
        """
        if request._scheduler is not None:
            raise ValueError("request was added before; every request is added once")
        length = request.tokens.size + request.max_new_tokens - 1  # the last token's keys are never needed
        asked = f"{request.tokens.size} tokens and max_new_tokens {request.max_new_tokens} make {length} to store"
        if length > self.cache.max_length:
            raise ValueError(f"request can never run: {asked}, max_length is {self.cache.max_length}")
        needed = num_blocks_for(length, self._block_size)
        if needed > self._num_blocks and not self._slides:
            raise ValueError(f"request can never run: {asked}, {needed} blocks of a pool of {self._num_blocks}")
        if request.n > self.max_batch_size:
            raise ValueError(f"request can never run: n is {request.n}, max_batch_size is {self.max_batch_size}")
        self.cache.match(request.tokens, request.salt)  # raises where the salt is of no use
        rank = (POLICIES[self.policy](request), self._num_added)
        request.samples = [Sample(request, index, _rank=(*rank, index)) for index in range(request.n)]
        request._scheduler, self._num_added = self, self._num_added + 1
        insort(self._waiting, request.samples[0], key=_rank)
        return request

    def schedule(self):
        """Decide the next step.

        Returns
        -------
        Step or None
            With at least one token to run; None when there is nothing to do.

        Raises
        ------
        ValueError
            If a step is open: `update` or `cancel` it first.
        OutOfBlocks
            If nothing can run, because the cache's blocks or sequences are held by others than this scheduler.
        """
        if self._step is not None:
            raise ValueError("a step is open; update or cancel it first")
        batch = self._grow()
        self._admit(batch)
        if not batch:
            return None
        plan = self.cache.plan(*_arrays(batch))
        tokens, rows, samples = [], [], []
        for sample, count in batch:
            tokens += sample._next(count)
            if count == sample.num_pending:
                group = sample._group()
                rows += [len(tokens) - 1] * len(group)
                samples += group
        tokens, rows = np.array(tokens, np.int32), np.array(rows, np.int32)
        self._step = Step(plan, tokens, [sample for sample, _ in batch], rows, samples)
        return self._step

    def _grow(self):
        """The batch [(sample, tokens to run)] of those that run already; the last give way while blocks are short."""
        while True:
            batch, budget = [], self.max_batch_tokens
            for sample in sorted(self._running, key=lambda sample: sample.num_pending > 1):
                count = min(sample.num_pending, budget, self._max_chunk)
                if count:
                    batch.append((sample, count))
                    budget -= count
            if len(self._running) < 2 or self.cache.blocks_needed(*_arrays(batch)) <= self.cache.num_available:
                return batch
            self._preempt(self._running.pop())

    def _preempt(self, sample):
        """Send a running sample back to wait."""
        swapped = self.preemption == "swap"
        if swapped:
            try:
                self.cache.swap_out(sample._seq)
            except OutOfBlocks:  # the host's memory is full
                swapped = False
        if not swapped:
            self._drop(sample)
        self._stats.num_preempted += 1
        self._stats.num_swapped += swapped
        insort(self._waiting, sample, key=_rank)

    def _admit(self, batch):
        """Admit the heads of the waiting, and add them to the batch, while they fit."""
        budget = self.max_batch_tokens - sum(count for _, count in batch)
        num_places = self.max_batch_size - sum(len(sample._group()) for sample in self._running)
        while self._waiting and budget and len(self._waiting[0]._group()) <= num_places:
            sample = self._waiting[0]
            try:
                self._enter(sample)
            except OutOfBlocks:
                if not self._running:
                    raise
                return
            insort(self._running, self._waiting.pop(0), key=_rank)
            count = min(sample.num_pending, budget, self._max_chunk)
            batch.append((sample, count))
            budget -= count
            num_places -= len(sample._group())

    def _enter(self, sample):
        """Bring a waiting sample into the cache if all of its known tokens fit, or raise with nothing changed.

        What the others still need for their known tokens counts too: two half computed prompts never wait for each
        other's blocks.
        """
        cache, size, swapped, known = self.cache, self._block_size, sample._seq is not None, sample._known()
        if swapped:
            num_computed = sample.num_computed  # the blocks wholly out of the window do not come back
            needed = num_blocks_for(known.size, size) - max(0, num_computed + 1 - self._window) // size
        else:
            num_computed, needed = cache.match(known, sample.request.salt)
        num_held = num_computed + self._num_held(num_computed, known.size)
        needed -= num_blocks_for(known.size, size) - num_blocks_for(num_held, size)
        if self._running:
            held = [(other, self._num_held(other.num_computed, other._num_known)) for other in self._running]
            needed += self._watermark + cache.blocks_needed(*_arrays(held))
        if needed > cache.num_available:
            raise OutOfBlocks(f"{needed} blocks wanted to admit the next request, {cache.num_available} are available")
        if swapped:
            cache.swap_in(sample._seq)
        else:
            sample._seq = (cache.resume if sample._num_seen else cache.add)(known, sample.request.salt)
            sample.num_computed = num_computed

    def _num_held(self, num_computed, num_known):
        """Tokens to make room for: all that are pending; with a window no more than are visible, or in a chunk."""
        num_pending = num_known - num_computed
        return min(num_pending, max(self._max_chunk, self._window - num_computed)) if self._slides else num_pending

    def _drop(self, sample, after=None):
        """Take a sample's sequence out of the cache."""
        self.cache.free(sample._seq, after=after)
        sample._seq, sample.num_computed = None, 0

    def update(self, step, next_tokens):
        """Take in what a step computed: its tokens are in the cache, the sampled ones are appended.

        Parameters
        ----------
        step : Step
            The open step, after the model ran.
        next_tokens : sequence of int, [num_samples]
            One token for each of ``step.samples``.

        Returns
        -------
        list of Request
            Those that finished with this step.

        Raises
        ------
        ValueError
            If the step is not the open one, or there are more or fewer tokens than samples.
        """
        self._require_open(step)
        next_tokens = np.asarray(next_tokens)
        if next_tokens.shape != step.logit_rows.shape or next_tokens.dtype.kind not in "iu" and next_tokens.size:
            raise ValueError(f"next_tokens must be {step.logit_rows.size} token ids, one for each sample, got "
                             f"{next_tokens.dtype.name} {next_tokens.shape}")
        self.cache.commit(step.plan, step.tokens)
        self._step = None
        self._stats.num_steps += 1
        self._stats.num_tokens += step.tokens.size
        tokens, finished = iter(next_tokens.tolist()), []
        starts = step.plan.positions[step.plan.query_starts[:-1]]
        for sample, start, length in zip(step.running, starts.tolist(), step.plan.lengths.tolist()):
            sampled = sample._group() if length == sample._num_known else []
            for member in sampled:
                member._append(next(tokens))
            self._stats.num_recomputed += max(0, min(length, sample._num_seen) - start)
            if sample._seq is not None:  # it was not aborted meanwhile
                sample.num_computed, sample._num_seen = length, max(length, sample._num_seen)
                self._settle(sample, sampled, finished)
        return finished

    def _settle(self, sample, sampled, finished):
        """After its token: a prompt's sequence is forked for the other samples, an ended one leaves the cache."""
        for member in sampled:
            if member is not sample and member.finish_reason is None:
                self._fork(sample, member)
        if sample.finish_reason is not None:
            self._running.remove(sample)
            self._drop(sample)
            if sample.request.finished:
                finished.append(sample.request)

    def _fork(self, parent, child):
        child._num_seen = parent.num_computed
        try:
            child._seq, child.num_computed = self.cache.fork(parent._seq), parent.num_computed
        except OutOfBlocks:  # the cache has no place for another sequence: it begins like one that was preempted
            insort(self._waiting, child, key=_rank)
        else:
            insort(self._running, child, key=_rank)

    def cancel(self, step):
        """Undo a step that did not run (the model failed, or was interrupted): its tokens will be scheduled again.

        Parameters
        ----------
        step : Step
            The open step.

        Raises
        ------
        ValueError
            If the step is not the open one.
        """
        self._require_open(step)
        self.cache.rollback(step.plan)
        self._step = None

    def abort(self, request):
        """End a request now, also while a step is open; what was generated stays in its samples.

        Parameters
        ----------
        request : Request
            If it has finished, nothing happens.

        Raises
        ------
        ValueError
            If it was not added to this scheduler.
        """
        if request._scheduler is not self:
            raise ValueError("request was not added to this scheduler")
        self._waiting = [sample for sample in self._waiting if sample.request is not request]
        self._running = [sample for sample in self._running if sample.request is not request]
        for sample in request.samples:
            if sample.finish_reason is None:
                sample.finish_reason = "abort"
                if sample._seq is not None:
                    self._drop(sample, after=self._step and self._step.plan)

    def stats(self):
        """What was done so far.

        Returns
        -------
        SchedulerStats
        """
        return replace(self._stats, num_waiting=len(self._waiting), num_running=len(self._running))

    def _require_open(self, step):
        if step is None or step is not self._step:
            raise ValueError("step is not open in this scheduler: it was updated or cancelled, or made by another")


def _rank(sample):
    return sample._rank


def _arrays(batch):
    """Handles and counts of a batch [(sample, tokens to run)], as `PagedKVCache.plan` takes them."""
    return np.array([sample._seq for sample, _ in batch], np.int64), np.array([count for _, count in batch], np.int64)
