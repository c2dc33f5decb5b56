"""The manager: a step, admission, freeing and tables, beside the published algorithm of nano-vllm in plain Python.

    python benchmarks/bench_manager.py [--quick] [--plot FILE]

Blocks of 16 tokens, a pool of 200,000 in which nothing is free: all that nobody uses is cached, so each new block is
evicted from a prefix. A step is plan and commit of one new token of each sequence, with the tables, slots and positions
of the plan, blocks published as they fill; its time is the mean of 64 in a row, at lengths from 64 to 1104. Competitors
take turns, and a sample counts only if its thread had a CPU all the time (as in `common`); times are medians.
"""

import argparse
import time
from functools import partial

import numpy as np

import common
import numba_paged as npg
from plain_manager import PlainManager, Sequence

BLOCK_SIZE = 16
NUM_BLOCKS = 200_000
STEPS, WARM_UP = 64, 16
"""Steps of a sample, in which each sequence fills four blocks, and steps before it, in which each fills one."""


class NoPool:
    """A backend without memory: only the host's work is measured."""

    name = "none"

    def zeros(self, shape, dtype):
        return np.broadcast_to(np.zeros((), dtype), shape)


def make_cache(num_blocks=NUM_BLOCKS, num_cached=None, seed=1):
    """A cache in which as many blocks as told, or all, are cached prefixes."""
    spec = npg.AttentionSpec(1, 1, 1, block_size=BLOCK_SIZE)
    cache = npg.PagedKVCache(spec, 1, num_blocks, NoPool(), max_sequences=2048, max_length=2**20)
    rng = np.random.default_rng(seed)
    left = num_blocks if num_cached is None else num_cached
    while left:
        count = min(left, 1024)
        run(cache, rng.integers(0, 50_000, count * BLOCK_SIZE, np.int32), free=True)
        left -= count
    return cache


def run(cache, tokens, free=False):
    """Run a prompt."""
    seq = cache.add(tokens)
    rest = tokens[cache.length(seq) :]
    cache.commit(cache.plan([seq], len(rest)), rest)
    return cache.free(seq) if free else seq


def prompts(count, shortest, longest, seed=0):
    """Random token ids of random lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50_000, length, np.int32) for length in rng.integers(shortest, longest + 1, count)]


class Clock:
    """Times what runs inside of it, and how long it had to wait for a CPU."""

    def __enter__(self):
        self.waited, self.start = common.waited(), time.perf_counter()

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self.start
        self.waited = common.waited() - self.waited


def sample(function):
    """Seconds of the part of a call that the clock saw, undisturbed; of the least disturbed one if none was."""
    tries = []
    for _ in range(common.TRIES):
        clock = Clock()
        function(clock)
        tries.append((clock.waited / clock.seconds, clock.seconds))
        if clock.waited <= common.TOLERATED * clock.seconds + 20e-6:
            common.samples["clean"] += 1
            return clock.seconds
    common.samples["contended"] += 1
    return min(tries)[1]


def turns(functions, rounds):
    """Seconds of each of the functions, which take turns, round by round; each does its work inside of a clock."""
    for function in functions.values():
        function(Clock())
    times = {name: np.empty(rounds) for name in functions}
    for turn in range(rounds):
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            times[name][turn] = sample(functions[name])
    return times


def report(label, times, calls, bound):
    """Print a line: our time of a call, what it may be, and the yardstick's multiple."""
    ours = np.median(times["ours"]) / calls * 1e6
    plain = f"{common.ratio(times['plain'], times['ours']):8.0f}x" if "plain" in times else ""
    print(f"{label:44s} {ours:8.1f} us   bound {bound:6d} us {plain}", flush=True)


def advance(clock, cache, seqs, rng):
    """Run steps, some of them before the clock."""
    tokens = rng.integers(0, 50_000, (WARM_UP + STEPS, seqs.size), np.int32)
    for row in tokens[:WARM_UP]:
        cache.commit(cache.plan(seqs), row)
    with clock:
        for row in tokens[WARM_UP:]:
            cache.commit(cache.plan(seqs), row)


def step(num_seqs, rounds):
    """Plan and commit of one token of each sequence."""
    texts = prompts(num_seqs, 64, 1024)
    cache, plain = make_cache(), PlainManager(NUM_BLOCKS, BLOCK_SIZE)
    rng = np.random.default_rng(2)

    def ours(clock):
        seqs = np.array([run(cache, text) for text in texts])
        advance(clock, cache, seqs, rng)
        for seq in seqs:
            cache.free(seq)

    def theirs(clock):
        tokens = rng.integers(0, 50_000, (STEPS, num_seqs)).tolist()
        texts = prompts(num_seqs, 64, 1024, seed=rng)  # new ones: it takes minutes to find what was freed
        sequences = [plain.run(text.tolist()) for text in texts]
        with clock:
            for row in tokens:
                for sequence, token in zip(sequences, row, strict=True):
                    plain.append(sequence, token)
                plain.prepare(sequences)
        for sequence in sequences:
            plain.release(sequence)

    times = turns({"ours": ours, "plain": theirs}, rounds)
    cache.check()
    report(f"step of {num_seqs} sequences", times, STEPS, {256: 15, 1024: 50}[num_seqs])


def tables(rounds):
    """Padded tables of 1024 sequences."""
    texts = prompts(1024, 64, 1024)
    cache, plain = make_cache(num_cached=0), PlainManager(NUM_BLOCKS, BLOCK_SIZE)
    seqs = np.array([run(cache, text) for text in texts])
    sequences = [plain.run(text.tolist()) for text in texts]

    def ours(clock):
        with clock:
            for _ in range(STEPS):
                cache.block_tables(seqs)

    def theirs(clock):
        with clock:
            for _ in range(STEPS):
                plain.prepare(sequences)

    report("tables of 1024 sequences", turns({"ours": ours, "plain": theirs}, rounds), STEPS, 25)


def admission_found(kind, rounds, count=8):
    """Admission of 2048 tokens of which all but the last block are found, in use or cached."""
    cache, plain = make_cache(), PlainManager(NUM_BLOCKS, BLOCK_SIZE)
    text = prompts(1, 2048, 2048, seed=3)[0]
    ids = text.tolist()
    run(cache, text, free=kind == "cached")
    sequence = plain.run(ids)
    if kind == "cached":
        plain.release(sequence)

    def ours(clock):
        seconds = waited = 0
        for i in range(1 + count):
            with clock:
                seq = cache.add(text)
                plan = cache.plan([seq], text.size - cache.length(seq))
            if i:  # the first one is a warm-up
                seconds, waited = seconds + clock.seconds, waited + clock.waited
            cache.rollback(plan)
            cache.free(seq)
        clock.seconds, clock.waited = seconds, waited

    def theirs(clock):
        total = 0
        for _ in range(count):
            with clock:
                sequence = Sequence(ids)
                plain.admit(sequence)
            total += clock.seconds
            plain.release(sequence)
        clock.seconds = total

    times = turns({"ours": ours, "plain": theirs}, rounds)
    cache.check()
    report(f"admission of 2048 tokens, found {kind}", times, count, 25)


def admission_missed(rounds, count=8):
    """Admission of 2048 tokens of which nothing is found, and their publication."""
    cache, plain = make_cache(), PlainManager(NUM_BLOCKS, BLOCK_SIZE)
    rng = np.random.default_rng(3)

    def ours(clock):
        texts = rng.integers(0, 50_000, (1 + count, 2048), np.int32)
        seqs = [run(cache, texts[0])]
        with clock:
            seqs += [run(cache, text) for text in texts[1:]]
        for seq in seqs:
            cache.free(seq)

    def theirs(clock):
        texts = rng.integers(0, 50_000, (count, 2048)).tolist()
        with clock:
            sequences = [plain.run(text) for text in texts]
        for sequence in sequences:
            plain.release(sequence)

    times = turns({"ours": ours, "plain": theirs}, rounds)
    cache.check()
    report("admission of 2048 tokens, nothing found", times, count, 40)


def freeing(rounds, count=256):
    """Freeing 256 sequences of 128 blocks."""
    cache, plain = make_cache(), PlainManager(NUM_BLOCKS, BLOCK_SIZE)
    texts = prompts(count, 2048, 2048, seed=4)
    lists = [text.tolist() for text in texts]

    def ours(clock):
        seqs = [run(cache, text) for text in texts]
        with clock:
            for seq in seqs:
                cache.free(seq)

    def theirs(clock):
        sequences = [plain.run(text) for text in lists[: count // 16]]  # finding what was freed would take minutes
        with clock:
            for sequence in sequences:
                plain.release(sequence)
        clock.seconds *= 16

    report("freeing 256 sequences of 128 blocks", turns({"ours": ours, "plain": theirs}, rounds), 1, 300)


def curve(label, caches, rounds):
    """The time of a step of 256 sequences in each of the caches, taking turns."""
    rng = np.random.default_rng(2)

    def steps(clock, cache, seqs):
        advance(clock, cache, seqs, rng)
        for seq in seqs.tolist():
            cache.truncate(seq, 64)

    functions = {}
    for size, cache in caches.items():
        seqs = np.array([run(cache, text) for text in prompts(256, 64, 79)])
        functions[size] = partial(steps, cache=cache, seqs=seqs)
    times = turns(functions, rounds)
    points = {size: np.median(times[size]) / STEPS * 1e6 for size in caches}
    print(f"{label:34s} " + "  ".join(f"{size:,}: {time:.1f}" for size, time in points.items()) + "  us", flush=True)
    return points


def plot(curves, path):
    """One line for each curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, points in curves.items():
        axes.plot([max(size, 1) for size in points], points.values(), "o-", label=label)
    axes.set(xscale="log", ylim=0, xlabel="blocks, or cached prefixes", ylabel="µs", title="A step of 256 sequences")
    axes.legend()
    figure.savefig(path, dpi=120)


def memory():
    """Bytes of a block, and what it takes to make a large pool."""
    cache = make_cache(num_cached=0)
    pool, prefixes = cache._pool, cache._prefixes
    without = sum(array.nbytes for array in pool.arrays) + prefixes.index.nbytes
    with_ids = without + prefixes.ids_of.nbytes
    print(f"metadata: {without / NUM_BLOCKS:.0f} bytes a block, {with_ids / NUM_BLOCKS:.0f} with prefixes' token ids")

    def ours(clock):
        with clock:
            make_cache(1_000_000, 0)

    report("a cache of 1,000,000 blocks is made", turns({"ours": ours}, 5), 1, 100_000)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller curves")
    parser.add_argument("--plot", metavar="FILE", help="where to draw the curves")
    options = parser.parse_args()
    rounds = 5 if options.quick else 15
    memory()
    step(256, rounds)
    step(1024, rounds)
    admission_found("in use", rounds)
    admission_found("cached", min(rounds, 5), 4)
    admission_missed(rounds)
    freeing(rounds)
    tables(rounds)
    sizes = [10_000, 100_000] if options.quick else [10_000, 30_000, 100_000, 300_000, 1_000_000]
    curves = {
        "blocks in the pool, all cached": curve("pools of so many blocks", {n: make_cache(n) for n in sizes}, rounds),
        "cached blocks in the largest pool": curve(f"so many cached of {sizes[-1]:,}",
                                                   {n: make_cache(sizes[-1], n) for n in [0, *sizes[:-1]]}, rounds),
    }
    if options.plot:
        plot(curves, options.plot)
    print(common.summary())


if __name__ == "__main__":
    main()
