"""Attention to be timed on a device: inputs that fill its memory, a prepared plan, the oracle's check, the clock.

`Gpu` is the real place; `Simulator` runs the same steps on the tests' PTX machine, where times mean nothing.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import reference  # noqa: E402
import tolerances  # noqa: E402
from numba_paged.backend import load_backend  # noqa: E402
from numba_paged.cuda.backend import CudaBackend  # noqa: E402
from numba_paged.cuda.choose import choose, choose_plain  # noqa: E402
from numba_paged.cuda.codecs import code_of  # noqa: E402
from numba_paged.cuda.warp import AttendSpec  # noqa: E402
from numba_paged.formats import FORMATS  # noqa: E402
from numba_paged.plan import Plan, cut_work  # noqa: E402
from numba_paged.spec import AttentionOptions  # noqa: E402

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
PATTERN = 64
"""Blocks of random numbers; the pool repeats them."""

CHUNK = 512
"""Query tokens of each sequence in a prefill: a chunk at the end of the context."""

CHECKED = 16
"""Query tokens of the first sequence, its last ones, that are compared with the oracle."""


@dataclass(frozen=True)
class Case:
    """What is timed. Sizes are in tokens."""

    operation: str
    group: int
    batch: int
    context: int
    kv_dtype: str

    @property
    def num_queries(self):
        """Query tokens of a sequence."""
        return 1 if self.operation == "decode" else min(CHUNK, self.context)

    @property
    def num_bytes(self):
        """Bytes of keys and values, each read once."""
        return self.batch * self.context * 2 * NUM_KV_HEADS * HEAD_DIM * FORMATS[self.kv_dtype].itemsize

    @property
    def num_flops(self):
        """Multiplications and additions of q·k and p·v over the visible keys."""
        keys = self.context - (self.num_queries - 1) / 2
        return 4 * HEAD_DIM * self.group * NUM_KV_HEADS * self.batch * self.num_queries * keys


class Ready:
    """A case's arrays and plan, on a place.

    Attributes
    ----------
    q : array [num_tokens, num_q_heads, head_dim] of float16
        Queries.
    pools : array [num_blocks, num_kv_heads, block_size, head_dim], twice
        Keys and values as they lie in memory.
    tables : NumPy int32 [batch, blocks]
        Block tables, shuffled.
    """

    def __init__(self, case, place, seed=0):
        rng = np.random.default_rng(seed)
        self.case, self.place, self.backend = case, place, place.backend
        blocks = -(-case.context // BLOCK_SIZE)
        num_blocks = case.batch * blocks
        pattern = rng.standard_normal((2, min(PATTERN, num_blocks), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), np.float32)
        pattern = pattern.astype(FORMATS[case.kv_dtype].dtype)
        self.pools = [place.repeated(part, num_blocks) for part in pattern]
        self.keys, self.values = (pool.swapaxes(1, 2) for pool in self.pools)
        self.tables = rng.permutation(num_blocks).astype(np.int32).reshape(case.batch, blocks)
        num_tokens = case.batch * case.num_queries
        queries = rng.standard_normal((num_tokens, case.group * NUM_KV_HEADS, HEAD_DIM), np.float32)
        self.q = self.backend.array(queries.astype(np.float16))
        self.out = self.backend.empty(self.q.shape, self.q.dtype)
        self.options = AttentionOptions(HEAD_DIM**-0.5)
        self.plan = self._plan()

    def _plan(self):
        case = self.case
        query_starts = np.arange(case.batch + 1, dtype=np.int32) * np.int32(case.num_queries)
        lengths = np.full(case.batch, case.context, np.int32)
        tiling = self.backend.tiling(case.group, case.num_queries)
        return Plan(query_starts, lengths, self.tables,
                    lambda *arrays: cut_work(*arrays, BLOCK_SIZE, NUM_KV_HEADS, tiling))

    @property
    def on_tensor_cores(self):
        """Whether tensor cores serve the case, so that plain ones are another way."""
        case, cc = self.case, self.place.cc
        spec = AttendSpec(code_of("float16"), code_of(case.kv_dtype, cc), HEAD_DIM, case.group, BLOCK_SIZE, 16)
        return choose(spec, cc, case.num_queries).kernel is not choose_plain(spec, cc, case.num_queries).kernel

    def attend(self):
        """One attention call through the prepared plan."""
        self.backend.attend(self.q, self.keys, self.values, self.plan, self.options, self.out, None)

    def attend_plain(self):
        """The same without tensor cores."""
        self.place.plain.attend(self.q, self.keys, self.values, self.plan, self.options, self.out, None)

    def check(self):
        """Compare the first sequence's last queries at the first kv head with the oracle; AssertionError if off."""
        case = self.case
        count = min(CHECKED, case.num_queries)
        rows = slice(case.num_queries - count, case.num_queries)
        q, out = (self.backend.to_host(array[rows], "array")[:, : case.group] for array in (self.q, self.out))
        k, v = (self.place.taken(pool, self.tables[0])[:, 0].reshape(-1, 1, HEAD_DIM) for pool in self.pools)
        expected = reference.explain(q, k[: case.context], v[: case.context])
        rounding = tolerances.tensor_weight_rounding("float16", case.kv_dtype)
        tolerance = tolerances.out_tolerance(expected, q.dtype, HEAD_DIM, weight_rounding=rounding)
        tolerances.assert_within(out, expected.out, tolerance, "out")


class Gpu:
    """The current CUDA device and its clock.

    Raises
    ------
    RuntimeError
        If there is none.
    """

    def __init__(self):
        self.backend = load_backend("cuda")
        self.plain = CudaBackend(choose=choose_plain)
        import cupy

        self.xp = cupy
        device = cupy.cuda.Device()
        properties = cupy.cuda.runtime.getDeviceProperties(device.id)
        self.name = properties["name"].decode()
        self.cc = properties["major"], properties["minor"]
        self.flushed = cupy.empty(max(4 * properties["l2CacheSize"], 256 << 20), np.uint8)

    def repeated(self, pattern, count):
        """`count` rows made of a pattern's, on the device."""
        bits = self.xp.asarray(pattern.view(FORMATS[pattern.dtype.name].bits))
        return bits[self.xp.arange(count) % len(pattern)].view(pattern.dtype)

    def taken(self, pool, rows):
        """Some rows of an array, on the host."""
        bits = pool.view(FORMATS[pool.dtype.name].bits)[self.xp.asarray(rows)]
        return self.xp.asnumpy(bits).view(pool.dtype)

    def seconds(self, function, limit=0.5, most=30, fewest=5):
        """The median time on the device, with the L2 cache flushed before every run.

        The flush keeps the device busy while the host launches, so that no launch is in the time.
        """
        function()
        first = self._events(function)
        first[1].synchronize()
        estimate = self.xp.cuda.get_elapsed_time(*first) / 1e3
        count = int(min(most, max(fewest, limit / max(estimate, 1e-6))))
        pairs = [self._events(function) for _ in range(count)]
        pairs[-1][1].synchronize()
        return float(np.median([self.xp.cuda.get_elapsed_time(*pair) for pair in pairs])) / 1e3

    def _events(self, function):
        pair = self.xp.cuda.Event(), self.xp.cuda.Event()
        self.flushed.data.memset_async(0, self.flushed.nbytes)
        pair[0].record()
        function()
        pair[1].record()
        return pair

    def host_seconds(self, function, count=100):
        """The mean time that the host needs for a call, the device lagging behind."""
        self.xp.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(count):
            function()
        elapsed = time.perf_counter() - start
        self.xp.cuda.get_current_stream().synchronize()
        return elapsed / count

    def copy_bandwidth(self, num_bytes=1 << 30):
        """Bytes per second of a device-to-device copy, what is read and what is written counted."""
        source, target = (self.xp.zeros(num_bytes, np.uint8) for _ in range(2))
        return 2 * num_bytes / self.seconds(lambda: target.data.copy_from_device_async(source.data, num_bytes))


class Simulator:
    """The PTX machine of the tests in the place of a GPU: everything runs, nothing is timed.

    Parameters
    ----------
    cc : (int, int)
        Compute capability that kernels are compiled for.
    """

    name = "PTX on the CPU (dry run)"

    def __init__(self, cc=(9, 0)):
        from ptx_device import PtxDevice

        self.device = PtxDevice(cc)
        self.cc = cc
        self.backend, self.plain = CudaBackend(self.device), CudaBackend(self.device, choose_plain)

    def repeated(self, pattern, count):
        """As `Gpu.repeated`."""
        return self.device.array(pattern[np.arange(count) % len(pattern)])

    def taken(self, pool, rows):
        """As `Gpu.taken`."""
        return pool.host[rows]

    def seconds(self, function):
        """NaN, after one run."""
        function()
        return float("nan")

    def host_seconds(self, function):
        """NaN."""
        return float("nan")

    def copy_bandwidth(self):
        """NaN."""
        return float("nan")
