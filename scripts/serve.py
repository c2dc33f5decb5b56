"""Many requests at once: continuous batching of a model over a paged cache, by the library's scheduler."""

import time
from dataclasses import dataclass

import numpy as np

from report import bold, counted, print_samples, size


@dataclass(frozen=True)
class Service:
    """What `serve` did.

    Attributes
    ----------
    seconds : float
        From the first step to the last.
    num_sampled : int
        Tokens that were generated.
    mean_batch : float
        Sequences in a step, on average.
    most_blocks : int
        Blocks that were in use at a time, at most.
    scheduler, cache : SchedulerStats, CacheStats
        As they were at the end.
    """

    seconds: float
    num_sampled: int
    mean_batch: float
    most_blocks: int
    scheduler: object
    cache: object


def serve(model, scheduler, requests, sampling, advance=lambda step: None):
    """Run requests to their ends; each has the samples that it would have alone.

    Parameters
    ----------
    model : Model
    scheduler : Scheduler
        Over a cache whose layers and heads are the model's.
    requests : list of Request
        They are added, all before the first step.
    sampling : Sampling
    advance : callable
        Called with each step when it is done; for a progress bar.

    Returns
    -------
    Service
        The texts are in the requests' samples.
    """
    cache, num_run, num_sampled, most_blocks = scheduler.cache, 0, 0, 0
    streams = {scheduler.add(request): sampling.streams(request.n) for request in requests}
    started = time.perf_counter()
    while step := scheduler.schedule():
        logits = model.forward(step.tokens, step.plan.positions, last=step.logit_rows,
                               attend=lambda layer, q, k, v: cache.attend(layer, q, k, v, step.plan))
        next_tokens = [sampling.pick(row, streams[sample.request][sample.index])
                       for row, sample in zip(logits, step.samples)]
        most_blocks = max(most_blocks, cache.stats().num_used)
        scheduler.update(step, np.array(next_tokens, np.int32))
        num_run += len(step.running)
        num_sampled += len(next_tokens)
        advance(step)
    stats = scheduler.stats()
    return Service(time.perf_counter() - started, num_sampled, num_run / stats.num_steps, most_blocks, stats,
                   cache.stats())


def print_requests(texts, requests, decode):
    """The samples of each request."""
    for number, (text, request) in enumerate(zip(texts, requests), 1):
        print(bold(f"Request {number}") + "\n")
        print_samples(text, [decode(sample.tokens) for sample in request.samples])


def print_service(requests, service):
    """The final statistics: what was computed, what was spared, and what the pool held."""
    stats, cache = service.scheduler, service.cache
    num_prompt = sum(request.tokens.size for request in requests)
    most = service.most_blocks
    rows = [
        ("prompt tokens", f"{num_prompt}, once for all samples; {cache.num_hits} found in the cache"),
        ("sampled tokens", f"{service.num_sampled}, {service.num_sampled / service.seconds:.1f} per second"),
        ("steps", f"{stats.num_steps}, {service.mean_batch:.1f} sequences in each on average"),
        ("preemptions", f"{stats.num_preempted}, {stats.num_recomputed} tokens computed again"),
        ("most blocks in use", f"{most} of {cache.num_blocks}, {size(most * cache.block_bytes)}"),
        ("blocks copied on write", cache.num_copied),
    ]
    print(bold(f"{counted(len(requests), 'request')} in {service.seconds:.2f} s"))
    for label, value in rows:
        print(f"  {label:<24}{value}")
