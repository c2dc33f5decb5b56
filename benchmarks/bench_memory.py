"""What a KV cache's memory holds: Figure 2 of the vLLM paper, the price of the block size, the savings of sharing.

No model runs. Requests with the length statistics of the paper's two data sets keep each system saturated, one token a
running sequence a step, and the slots of the pool are counted. Orca's contiguous chunks come from a buddy allocator;
the paged part is this library's `Scheduler` over its `PagedKVCache`, with OPT-13B's 12 GiB of slots.

The paper (arXiv:2309.06180) gives the mean lengths (Figure 11), not their spread. Outputs are gamma, inputs lognormal;
the spreads (`WORKLOADS`) are chosen so that the contiguous systems give the published bars and batch sizes, and they
stay the same for everything else here: the paged bars and the savings of parallel sampling are predictions. Beams have
one more free number, `REPLACEMENTS`, chosen so that the savings of both data sets come out.

    python benchmarks/bench_memory.py [--quick]      # plots and a table in benchmarks/results
"""

import argparse
import pathlib
import sys

import numpy as np
from tqdm import tqdm

import numba_paged as npg
import plot_memory

RESULTS = pathlib.Path(__file__).parent / "results"
SLOTS = 12 * 2**30 // npg.kv_bytes_per_token(40, 40, 128)  # OPT-13B on one 40 GB card, Table 1 of the paper
MAX_LENGTH = 2048
BLOCK_SIZE = 16
REPLACEMENTS = 6
"""How often a beam goes on from a beam of its group, chosen at random, while a sequence of mean length is generated."""

WORKLOADS = {  # mean and coefficient of variation of inputs, of outputs, and where outputs are cut
    "ShareGPT": (161.31, 1.1, 337.99, 0.92, 1200),
    "Alpaca": (19.31, 0.6, 58.45, 1.05, 1024),
}
CLASSES = ("token states", "reservation", "internal fragmentation", "external & others")
FIGURE_2 = {  # % of the pool for each of CLASSES, and the mean batch (Figure 13)
    "Orca (Max)": ((20.4, 13.3, 57.3, 8.9), 7.00),
    "Orca (Pow2)": ((26.8, 17.9, 13.6, 41.6), 9.81),
    "Orca (Oracle)": ((38.2, 25.2, 0.0, 36.6), 13.62),
    "paged": ((96.3, None, None, None), 30.42),  # only the tokens are labelled; and its batch was not saturated
}
SAVINGS = {  # % of blocks saved (Figure 15), by sequences of a group; for ShareGPT the text gives the ends
    ("parallel", "Alpaca"): {2: 6.09, 4: 8.53, 6: 9.79},
    ("beam", "Alpaca"): {2: 37.56, 4: 53.13, 6: 55.16},
    ("parallel", "ShareGPT"): {2: 16.2, 4: None, 6: 30.5},
    ("beam", "ShareGPT"): {2: 44.3, 4: None, 6: 66.3},
}
BEST_BLOCK_SIZES = {"ShareGPT": (16, 128), "Alpaca": (16, 32)}  # by latency, Figure 18b


def lengths(workload, count, seed=0):
    """Input and output lengths of `count` requests, cut to what fits, with the workload's means."""
    rng = np.random.default_rng(seed)
    input_mean, input_cv, output_mean, output_cv, longest = WORKLOADS[workload]
    variance = np.log(1 + input_cv**2)
    inputs = rng.lognormal(np.log(input_mean) - variance / 2, variance**0.5, 3 * count)
    outputs = rng.gamma(output_cv**-2, output_mean * output_cv**2, 3 * count)
    kept = (inputs <= 1024) & (outputs <= longest)
    inputs, outputs = (np.maximum(1, np.rint(x[kept] * mean / x[kept].mean())).astype(int)
                       for x, mean in ((inputs, input_mean), (outputs, output_mean)))
    fits = inputs + outputs <= MAX_LENGTH
    return inputs[fits][:count].tolist(), outputs[fits][:count].tolist()


def power_of_two(number):
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


class Buddy:
    """A buddy allocator: chunks are powers of two at multiples of their size, halved and joined in pairs."""

    def __init__(self, num_slots):
        self.top = power_of_two(num_slots)
        self.free = {1 << order: set() for order in range(self.top.bit_length())}
        start = 0
        for size in sorted(self.free, reverse=True):  # the pool's size in binary
            if num_slots & size:
                self.free[size].add(start)
                start += size

    def allocate(self, size):
        """The start of a chunk of `size`, a power of two, or None."""
        split = size
        while split <= self.top and not self.free[split]:
            split *= 2
        if split > self.top:
            return None
        start = min(self.free[split])
        self.free[split].remove(start)
        while split > size:
            split //= 2
            self.free[split].add(start + split)
        return start

    def release(self, start, size):
        """Give a chunk back."""
        while size < self.top and start ^ size in self.free[size]:
            self.free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self.free[size].add(start)


def reserved_length(system, num_input, num_output):
    """How many slots a contiguous system reserves for a request (section 6.1 of the paper)."""
    if system == "Orca (Max)":
        return MAX_LENGTH
    return min(MAX_LENGTH, num_input + (num_output if system == "Orca (Oracle)" else power_of_two(num_output)))


def contiguous(system, workload, num_steps):
    """Shares of CLASSES (%) and mean batch of a contiguous system, first come first served."""
    buddy, running, shares, batch = Buddy(SLOTS), [], np.zeros(4), 0
    waiting = zip(*lengths(workload, num_steps))
    request = next(waiting)
    warm_up = num_steps // 10
    for now in tqdm(range(num_steps), desc=system, leave=False):
        while True:
            reserved = reserved_length(system, *request)
            size = power_of_two(reserved)
            start = buddy.allocate(size)
            if start is None:
                break
            num_input, num_output = request
            running.append((now + num_output, num_input - now + 1, num_input + num_output, reserved, start, size))
            request = next(waiting)
        if now >= warm_up:
            written = sum(since + now for _, since, *_ in running)
            final, chunks = (sum(entry[column] for entry in running) for column in (2, 3))
            shares += written, final - written, chunks - final, SLOTS - chunks
            batch += len(running)
        for entry in running:
            if entry[0] == now + 1:
                buddy.release(*entry[4:])
        running = [entry for entry in running if entry[0] > now + 1]
    return shares / SLOTS / (num_steps - warm_up) * 100, batch / (num_steps - warm_up)


def make_cache(num_blocks, block_size, max_sequences):
    """A pool of the smallest keys and values that there are: only its tables matter here."""
    spec = npg.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, block_size=block_size, kv_dtype="int8")
    return npg.PagedKVCache(spec, 1, num_blocks, backend="cpu", prefix_caching=False, max_sequences=max_sequences)


def paged(workload, block_size, num_steps):
    """Shares of CLASSES (%) and mean batch of the scheduler, saturated: some are always waiting."""
    places = 1024
    scheduler = npg.Scheduler(make_cache(SLOTS // block_size, block_size, places), max_batch_tokens=SLOTS,
                              max_batch_size=places)
    shares, batch, warm_up = np.zeros(4), 0, num_steps // 10
    requests = zip(*lengths(workload, 8 * num_steps))
    for now in tqdm(range(num_steps), desc=f"{workload}, blocks of {block_size}", leave=False):
        while scheduler.stats().num_waiting < 64:
            num_input, num_output = next(requests)
            scheduler.add(npg.Request(np.zeros(num_input, int), num_output))
        step = scheduler.schedule()
        if now >= warm_up:
            written, held = int(step.plan.lengths.sum()), scheduler.cache.stats().num_used * block_size
            shares += written, 0, held - written, SLOTS - held
            batch += len(step.running)
        scheduler.update(step, np.zeros(step.logit_rows.size, int))
    return shares / SLOTS / (num_steps - warm_up) * 100, batch / (num_steps - warm_up)


def groups_cache(inputs, outputs, width):
    """Room for all groups of `width` sequences at once, nothing shared."""
    num_blocks = width * sum(-(-(i + o) // BLOCK_SIZE) for i, o in zip(inputs, outputs))
    return make_cache(num_blocks, BLOCK_SIZE, width * len(inputs))


class Savings:
    """Blocks in use, against those that the sequences would take without sharing, added up over steps."""

    def __init__(self, cache):
        self.cache, self.used, self.unshared = cache, 0, 0

    def count(self):
        """Add the cache as it is now."""
        now = self.cache.stats()
        self.used += now.num_used
        self.unshared += (now.num_tokens + now.num_wasted) // BLOCK_SIZE

    @property
    def percent(self):
        return 100 * (1 - self.used / self.unshared)


def parallel_saving(workload, width, num_groups):
    """% of blocks saved by `width` samples that share their prompt."""
    inputs, outputs = lengths(workload, num_groups)
    cache = groups_cache(inputs, outputs, width)
    savings = Savings(cache)
    scheduler = npg.Scheduler(cache, max_batch_tokens=sum(inputs), max_batch_size=num_groups * width)
    for num_input, num_output in zip(inputs, outputs):
        scheduler.add(npg.Request(np.zeros(num_input, int), num_output, n=width))
    while step := scheduler.schedule():
        scheduler.update(step, np.zeros(step.logit_rows.size, int))
        if cache.stats().num_used:
            savings.count()
    return savings.percent


def beam_saving(workload, width, num_groups):
    """% of blocks saved by `width` beams that share what they have in common; all end at the same length."""
    rng, rate = np.random.default_rng(0), REPLACEMENTS / WORKLOADS[workload][2]
    inputs, outputs = lengths(workload, num_groups)
    cache = groups_cache(inputs, outputs, width)
    savings = Savings(cache)
    firsts = [cache.add() for _ in inputs]
    cache.commit(cache.plan(firsts, inputs))
    groups = [([first] + [cache.fork(first) for _ in range(width - 1)], num_output)
              for first, num_output in zip(firsts, outputs)]
    for now in range(max(outputs)):
        for group, num_output in groups:
            if num_output == now:
                for seq in group:
                    cache.free(seq)
        groups = [entry for entry in groups if entry[1] > now]
        seqs = np.concatenate([group for group, _ in groups])
        if now:
            first = np.arange(seqs.size) // width * width
            parents = np.where(rng.random(seqs.size) < rate, first + rng.integers(width, size=seqs.size),
                               np.arange(seqs.size))
            changed = np.flatnonzero(parents != np.arange(seqs.size))
            cache.reparent(seqs[changed], seqs[parents[changed]])
        cache.commit(cache.plan(seqs))
        savings.count()
    return savings.percent


class Report:
    """Lines of measured values beside the paper's; knows whether all of them are within their limits."""

    def __init__(self):
        self.lines, self.missed = [], []

    def line(self, text=""):
        self.lines.append(text)
        tqdm.write(text)

    def compare(self, label, ours, paper, limit):
        """One cell; a difference over the limit is marked."""
        if paper is None:
            return f"{ours:5.1f} (  - )  "
        if abs(ours - paper) > limit:
            self.missed.append(f"{label}: {ours:.1f}, the paper has {paper:.1f}")
        return f"{ours:5.1f} ({paper:4.1f}){'  ' if abs(ours - paper) <= limit else ' !'}"


def figure_2(report, quick):
    """The bars of Figure 2; returns {system: shares}."""
    report.line(f"Figure 2: % of {SLOTS} slots, ShareGPT, ours (paper)")
    report.line(f"{'':16}{'tokens':16}{'reservation':16}{'internal':16}{'external':16}mean batch")
    bars = {}
    for system, (paper, paper_batch) in FIGURE_2.items():
        if system == "paged":
            shares, batch = paged("ShareGPT", BLOCK_SIZE, 3000 if quick else 20_000)
            cells = f"{shares[0]:5.1f} ({paper[0]:4.1f})  "
            cells += "".join(report.compare(system, share, None, 0) for share in shares[1:])
            if shares[0] < 96:
                report.missed.append(f"paged: token states {shares[0]:.1f}, wanted 96 at least")
        else:
            shares, batch = contiguous(system, "ShareGPT", 100_000 if quick else 400_000)
            cells = "".join(report.compare(f"{system}, {name}", share, published, 2)
                            for name, share, published in zip(CLASSES, shares, paper))
        report.line(f"{system:16}{cells} {batch:5.2f} ({paper_batch:5.2f})")
        bars[system] = shares
    return bars


def block_sizes(report, quick):
    """Token states (%) by block size; returns {workload: {block_size: share}}."""
    sizes = (1, 4, 16, 64, 256) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    report.line("Block size: % of the slots that hold tokens, saturated")
    report.line(f"{'':16}" + "".join(f"{size:7}" for size in sizes))
    shares = {}
    for workload, num_steps in {"ShareGPT": 6000, "Alpaca": 1500}.items():
        num_steps = num_steps // 4 if quick else num_steps
        shares[workload] = {size: paged(workload, size, num_steps)[0][0] for size in sizes}
        report.line(f"{workload:16}" + "".join(f"{share:7.1f}" for share in shares[workload].values()))
    return shares


def sharing(report, quick):
    """The savings of Figure 15; returns {(kind, workload): {width: saving}}."""
    report.line("Sharing: % of blocks saved, ours (paper)")
    report.line(f"{'':20}" + "".join(f"{f'{width} sequences':16}" for width in (2, 4, 6)))
    savings = {}
    for (kind, workload), paper in tqdm(SAVINGS.items(), desc="Sharing", leave=False):
        measure = parallel_saving if kind == "parallel" else beam_saving
        num_groups = {"ShareGPT": 300, "Alpaca": 1500}[workload] // (5 if quick else 1)
        savings[kind, workload] = {width: measure(workload, width, num_groups) for width in paper}
        report.line(f"{kind + ', ' + workload:20}" + "".join(
            report.compare(f"{kind}, {workload}, {width}", saving, paper[width], 3)
            for width, saving in savings[kind, workload].items()))
    return savings


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and sizes; the numbers scatter more")
    quick = parser.parse_args().quick
    report = Report()
    bars = figure_2(report, quick)
    report.line()
    shares = block_sizes(report, quick)
    report.line()
    savings = sharing(report, quick)
    report.line()
    for text in report.missed or ["within 2 points of the paper's (savings: 3), and the paged pool at least 96 % full"]:
        report.line(f"{'missed' if report.missed else 'all'}: {text}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.txt").write_text("\n".join(report.lines) + "\n")
    plot_memory.figure_2(RESULTS / "memory_figure_2.png", CLASSES, bars, FIGURE_2)
    plot_memory.block_sizes(RESULTS / "memory_block_size.png", shares, BEST_BLOCK_SIZES)
    plot_memory.sharing(RESULTS / "memory_sharing.png", savings, SAVINGS)
    sys.exit(bool(report.missed))


if __name__ == "__main__":
    main()
