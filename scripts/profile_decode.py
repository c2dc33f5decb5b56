"""Decode steps of a paged cache under a profiler, with an NVTX range around each step, its plan and each layer.

    nsys profile -c cudaProfilerApi -t cuda,nvtx -o decode --force-overwrite true \\
        python scripts/profile_decode.py --batch 64 --context 8192 --group 4
    nsys stats -r nvtx_gpu_proj_sum,cuda_gpu_kern_sum decode.nsys-rep

The first steps compile and warm up; only those between the profiler's start and stop are recorded.
"""

import argparse
import sys

import numpy as np

from device_cases import BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS, Gpu

import numba_paged as npg
from numba_paged.formats import FORMATS

COUNTS = {"batch": 64, "context": 8192, "group": 4, "layers": 4, "warmup": 3, "steps": 10}
"""Options, and what they are if not given."""


def prepare(backend, options):
    """A cache whose sequences are `context` tokens long, with nothing written: zeros take as long to read."""
    spec = npg.AttentionSpec(options.group * NUM_KV_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, options.kv_dtype)
    longest = options.context + options.warmup + options.steps
    num_blocks = options.batch * -(-longest // spec.block_size)
    cache = npg.PagedKVCache(spec, options.layers, num_blocks, backend, max_sequences=options.batch)
    seqs = [cache.add() for _ in range(options.batch)]
    cache.commit(cache.plan(seqs, num_new=options.context))
    return cache, seqs


def step(cache, seqs, q, k, span):
    """One new token for every sequence."""
    with span("step"):
        with span("plan"):
            plan = cache.plan(seqs)
        for layer in range(cache.num_layers):
            with span(f"layer {layer}"):
                cache.attend(layer, q, k, k, plan)
        cache.commit(plan)


def run(backend, options, span, profile):
    """Warm up, then take the steps that are recorded.

    Parameters
    ----------
    backend : Backend
        Where attention runs.
    options : argparse.Namespace
        See `main`.
    span : callable
        ``span(name)`` is a context manager that marks a range.
    profile : callable
        ``profile()`` is a context manager: what is recorded happens in it.
    """
    cache, seqs = prepare(backend, options)
    rng = np.random.default_rng(0)
    q, k = (backend.array(rng.standard_normal((options.batch, heads, HEAD_DIM)).astype(np.float16))
            for heads in (options.group * NUM_KV_HEADS, NUM_KV_HEADS))
    for _ in range(options.warmup):
        step(cache, seqs, q, k, span)
    with profile():
        for _ in range(options.steps):
            step(cache, seqs, q, k, span)


def main(arguments=None):
    """Run on the GPU; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in COUNTS.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--kv-dtype", choices=list(FORMATS), default="float16")
    options = parser.parse_args(arguments)
    try:
        place = Gpu()
    except RuntimeError as error:
        print(f"There is no GPU to profile: {error}")
        return 1
    from cupyx.profiler import profile, time_range

    run(place.backend, options, time_range, profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
