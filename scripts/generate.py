"""Sampling from a model whose keys and values lie in a paged cache."""

import time
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked.

    Parameters
    ----------
    temperature : float
        Logits are divided by it; 0 takes the most likely token.
    top_k : int
        Only this many of the most likely tokens are candidates; 0 means all.
    seed : int
        Of the random numbers; each sample has its own stream, so it does not depend on how many there are.
    """

    temperature: float
    top_k: int
    seed: int

    def streams(self, num_samples):
        """One random generator for each sample."""
        return [np.random.default_rng([self.seed, index]) for index in range(num_samples)]

    def pick(self, logits, random):
        """The id of the next token, for logits [vocab_size]."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        num_candidates = min(self.top_k or logits.size, logits.size)
        candidates = np.argpartition(logits, -num_candidates)[-num_candidates:]
        # The largest of (logit + Gumbel noise) is a draw from the softmax of the logits.
        noisy = logits[candidates] / self.temperature + random.gumbel(size=num_candidates)
        return int(candidates[np.argmax(noisy)])


@dataclass(frozen=True)
class Generation:
    """What `generate` did."""

    samples: list  # of lists of token ids; an end token is still there
    prefill_seconds: float
    decode_seconds: float
    forked: object  # CacheStats when every sample shared the prompt
    finished: object  # CacheStats when every sample was complete

    @property
    def num_decoded(self):
        """Tokens that took a decode step: each sample's first comes out of the prefill."""
        return sum(len(sample) - 1 for sample in self.samples)


def step(model, cache, plan, tokens):
    """One model step over a plan.

    Parameters
    ----------
    model : Model
    cache : PagedKVCache
        Its layers and heads are the model's.
    plan : Plan
        Of this cache; it is committed.
    tokens : sequence of int, [num_tokens]
        The ids of the plan's new positions, sequence after sequence.

    Returns
    -------
    array of float32, [num_seqs, vocab_size]
        The logits of the token that comes next in each of the plan's sequences.
    """
    logits = model.forward(tokens, plan.positions, last=plan.query_starts[1:] - 1,
                           attend=lambda layer, q, k, v: cache.attend(layer, q, k, v, plan))
    cache.commit(plan, tokens)
    return logits


def generate(model, cache, prompt, num_samples, num_tokens, sampling, advance=lambda: None):
    """Several continuations of one prompt, which is prefilled once and shared by all of them.

    Parameters
    ----------
    model, cache
        As in `step`; the cache has room for the prompt and the samples.
    prompt : list of int
        Token ids, at least one.
    num_samples, num_tokens : int
        How many continuations, and the most tokens in each; one that ends by itself is shorter.
    sampling : Sampling
    advance : callable
        Called once for each sampled token; for a progress bar.

    Returns
    -------
    Generation
        The sequences stay in the cache.
    """
    streams = sampling.streams(num_samples)
    samples = [[] for _ in range(num_samples)]
    started = time.perf_counter()
    first = cache.add()
    logits = step(model, cache, cache.plan([first], num_new=len(prompt)), prompt)
    prefilled = time.perf_counter()
    seqs = [first] + [cache.fork(first) for _ in range(num_samples - 1)]
    forked = cache.stats()
    running, logits = range(num_samples), np.repeat(logits, num_samples, axis=0)
    while running:
        for index, row in zip(running, logits):
            samples[index].append(sampling.pick(row, streams[index]))
            advance()
        running = [index for index in running
                   if len(samples[index]) < num_tokens and samples[index][-1] not in model.end_tokens]
        if running:
            plan = cache.plan([seqs[index] for index in running], num_new=1)
            logits = step(model, cache, plan, [samples[index][-1] for index in running])
    return Generation(samples, prefilled - started, time.perf_counter() - prefilled, forked, cache.stats())
