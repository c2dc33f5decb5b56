"""What the benchmarks share: paired timing without contended samples, the machine's own limits, inputs, the oracle.

A shared machine changes its speed from one second to the next. So competitors take turns inside a round, in reversed
order every other round, and only ratios within a round count (medians). A sample is thrown away and taken again when
this process's threads had to wait for a CPU during more than 2 % of it, as the kernel's scheduler counts.
"""

import os
import time
from typing import NamedTuple

import ml_dtypes
import numba
import numpy as np
from numba import njit, prange

from numba_paged.compiled import prefetch
from numba_paged.cpu import threads
from numba_paged.cpu.memory import load

threads.load_tbb()  # before the first parallel region

TOLERATED = 0.02
"""The share of a sample that threads may have waited for a CPU."""

TRIES = 6
"""Attempts at an uncontended sample."""



DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
          "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}


def waited():
    """Seconds that this process's threads were ready to run but had no CPU, up to now; 0 where nobody counts."""
    total = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
    except (OSError, IndexError):
        pass
    return total * 1e-9


samples = {"clean": 0, "contended": 0}
"""How many samples ran undisturbed, and how many had to be taken although they did not."""


def sample(function):
    """Seconds of one call that ran undisturbed; of the least disturbed one when none of TRIES did."""
    best = np.inf, np.nan
    for attempt in range(TRIES):
        before, start = waited(), time.perf_counter()
        function()
        elapsed, delay = time.perf_counter() - start, waited() - before
        if delay <= TOLERATED * elapsed + 20e-6:
            samples["clean"] += 1
            return elapsed
        best = min(best, (delay / elapsed, elapsed))
        time.sleep(0.01 * (attempt + 1))
    samples["contended"] += 1
    return best[1]


def summary():
    """A line about the samples, to be printed at the end."""
    share = samples["contended"] / max(1, sum(samples.values()))
    trust = "; the figures are not to be trusted" if share > 0.2 else ""
    return f"{samples['clean']} samples ran undisturbed, {samples['contended']} did not{trust}"


def paired(functions, rounds=9, flush=None):
    """Time competitors in turns.

    Parameters
    ----------
    functions : dict of str to callable
        The competitors; each is called once before.
    rounds : int
        Samples of each.
    flush : callable, optional
        Called before every sample.

    Returns
    -------
    dict of str to array [rounds]
        Seconds.
    """
    for function in functions.values():
        function()
    times = {name: np.empty(rounds) for name in functions}
    for turn in range(rounds):
        for name in list(functions)[:: -1 if turn % 2 else 1]:
            if flush is not None:
                flush()
            time.sleep(0.004)  # other pools' threads stop spinning
            times[name][turn] = sample(functions[name])
    return times


def ratio(times, other):
    """The median over the rounds of times / other."""
    return float(np.median(times / other))


@njit(nogil=True)
def _sum(words):
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


@njit(parallel=True, nogil=True, cache=True)
def stream(words, num_threads):
    """Read uint64 words once, a consecutive share per thread: the most that memory gives."""
    size = words.size // num_threads
    totals = np.zeros(num_threads, np.uint64)
    for thread in prange(num_threads):
        totals[thread] = _sum(words[thread * size:(thread + 1) * size])
    return totals.sum()


@njit(nogil=True)
def _sum_shuffled(words, chunks, chunk_size, ahead):
    """Sum chunks of words in their order, fetching each line into L2 `ahead` words before it is read."""
    total = np.uint64(0)
    for n in range(chunks.size):
        start = chunks[n] * chunk_size
        later, offset = min(n + 1, chunks.size - 1), chunks[n] * chunk_size + ahead
        after = chunks[later] * chunk_size + ahead - chunk_size
        for line in range(0, chunk_size, 8):
            place = offset + line if line + ahead < chunk_size else after + line
            prefetch(words.ctypes.data + 8 * place, 2)
            for i in range(8):
                total += load(np.uint64, words.ctypes.data, start + line + i)
    return total


@njit(parallel=True, nogil=True, cache=True)
def shuffled(words, chunks, chunk_size, ahead, num_threads):
    """Read chunks of uint64 words in a given order, with prefetch: the most that shuffled blocks give."""
    count = chunks.size // num_threads
    totals = np.zeros(num_threads, np.uint64)
    for thread in prange(num_threads):
        totals[thread] = _sum_shuffled(words, chunks[thread * count:(thread + 1) * count], chunk_size, ahead)
    return totals.sum()


class Case(NamedTuple):
    """One layer's inputs: physical order [num_blocks, num_kv_heads, block_size, head_dim], blocks shuffled."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    query_starts: np.ndarray

    @property
    def group(self):
        """Query heads per kv head."""
        return self.q.shape[1] // self.keys.shape[2]

    @property
    def num_bytes(self):
        """Bytes of keys and values that must be read once."""
        return int(self.lengths.sum()) * 2 * self.keys.shape[2] * self.keys.shape[3] * self.keys.itemsize

    @property
    def num_operations(self):
        """Floating-point operations of causal attention: two products, a multiplication and an addition each."""
        queries = np.diff(self.query_starts).astype(np.int64)
        pairs = queries * (self.lengths - queries) + queries * (queries + 1) // 2
        return 4 * int(pairs.sum()) * self.q.shape[1] * self.q.shape[2]

    def limits(self):
        """Functions that read as many bytes as the case has: consecutive ones, and in blocks in the tables' order."""
        num_threads = numba.get_num_threads()
        words = np.concatenate([pool.swapaxes(1, 2).reshape(-1).view(np.uint64) for pool in (self.keys, self.values)])
        block = words.size // 2 // self.keys.shape[0]
        used = np.concatenate([row[:-(-length // self.keys.shape[1])]
                               for row, length in zip(self.tables, self.lengths, strict=True)]).astype(np.int64)
        chunks = np.stack([used, used + self.keys.shape[0]], axis=1).ravel()
        ahead = min(1024, block)
        return (lambda: stream(words[:self.num_bytes // 8], num_threads),
                lambda: shuffled(words, chunks, block, ahead, num_threads))


def make_case(lengths, num_queries=1, kv_heads=8, group=4, head_dim=128, block=16, dtype="float32", q_dtype=None, seed=0):
    """Random numbers in a pool of shuffled blocks."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    counts = -(-lengths // block)
    shape = (int(counts.sum()), kv_heads, block, head_dim)
    pattern = rng.standard_normal((min(shape[0], 64), *shape[1:]), np.float32)
    pattern = (np.clip(pattern * 32, -127, 127) if dtype == "int8" else pattern).astype(DTYPES[dtype])
    keys, values = (np.empty(shape, DTYPES[dtype]) for _ in range(2))
    for i in range(0, shape[0], len(pattern)):  # repeated: making hundreds of megabytes of noise takes minutes
        keys[i:i + len(pattern)] = pattern[:shape[0] - i]
        values[i:i + len(pattern)] = pattern[::-1][:shape[0] - i]
    tables = np.zeros((lengths.size, int(counts.max())), np.int32)
    order, start = rng.permutation(shape[0]).astype(np.int32), 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[start:start + count]
        start += count
    queries = np.broadcast_to(num_queries, lengths.shape)
    q_dtype = q_dtype or (dtype if dtype in ("float16", "bfloat16") else "float32")
    q = rng.standard_normal((int(queries.sum()), kv_heads * group, head_dim), np.float32)
    q = (q / 32 if dtype == "int8" else q).astype(DTYPES[q_dtype])  # scores as large as in the other formats
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return Case(q, keys.swapaxes(1, 2), values.swapaxes(1, 2), tables, lengths, starts)


def gathered(case, dtype):
    """Attention as the textbook has it: gather the blocks, multiply; in float64 the oracle, in float32 a competitor."""
    q, keys, values, tables, lengths, starts = case
    block, kv_heads, head_dim = keys.shape[1:]
    out = np.empty(q.shape, dtype)
    for row, length in enumerate(lengths):
        blocks = tables[row, :-(-length // block)]
        k, v = (pool[blocks].reshape(-1, kv_heads, head_dim)[:length].astype(dtype, copy=False) for pool in (keys, values))
        queries = q[starts[row]:starts[row + 1]].astype(dtype, copy=False)
        count = len(queries)
        rows = queries.reshape(count, kv_heads, case.group, head_dim).transpose(1, 2, 0, 3)
        scores = rows @ k.transpose(1, 2, 0)[:, None] * dtype(head_dim**-0.5)
        if count > 1:
            scores[..., np.arange(length) > np.arange(length - count, length)[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = weights @ v.transpose(1, 0, 2)[:, None]
        out[starts[row]:starts[row + 1]] = attended.transpose(2, 0, 1, 3).reshape(count, -1, head_dim)
    return out


def check(case, out):
    """Compare a result with the float64 oracle; returns the largest error."""
    error = float(np.abs(out.astype(np.float64) - gathered(case, np.float64)).max())
    size = float(np.abs(out.astype(np.float64)).max())
    bound = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}[out.dtype.name] * max(size, 1.0)
    if not error <= bound:
        raise AssertionError(f"wrong result: off by {error:.2e} from the oracle, bound {bound:.1e}")
    return error


def make_flush(megabytes=96):
    """A function that reads more than the last-level cache holds."""
    words, num_threads = np.ones(megabytes << 17, np.uint64), numba.get_num_threads()
    return lambda: stream(words, num_threads)
