"""Ragged batches for the tests, and the two ways to attend them: the library's and the oracle's.

Contents and placement are drawn apart, from fixed seeds: the same sequences can lie in other blocks, in another
physical order or in another batch. Whatever no sequence owns is poisoned: unwritten slots and spare blocks with NaN (or
what `poison` says), table entries past a sequence's blocks with ids that do not exist.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import ml_dtypes
import numpy as np

import numba_paged as npg
import reference
import tolerances

DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
}
Q_DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = tuple(DTYPES)
LAYOUTS = ("NHD", "HND", "joint", "padded")
GARBAGE_IDS = (-1, 2**31 - 1, -(2**31), 1_000_000)
SPARE_BLOCKS = 3
INT8_STEP = 1 / 32


@dataclass(frozen=True)
class Shape:
    """The geometry of one layer: what stays the same for every sequence."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    q_dtype: str = "float32"
    kv_dtype: str = "float32"

    @property
    def default_scales(self):
        """k_scale and v_scale that bring the stored numbers back to a standard normal."""
        return {"k_scale": INT8_STEP, "v_scale": INT8_STEP} if self.kv_dtype == "int8" else {}


class Sequence(NamedTuple):
    """One sequence as stored: q [num_queries, num_q_heads, head_dim], k and v [length, num_kv_heads, head_dim]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


class Result(NamedTuple):
    """What a call returned, on the host."""

    out: np.ndarray
    lse: np.ndarray


def normal(shape, dtype, rng):
    """Standard normal numbers as `dtype` stores them (int8: in steps of `INT8_STEP`)."""
    x = rng.standard_normal(shape, np.float32)
    if dtype == "int8":
        return np.clip(np.rint(x / INT8_STEP), -128, 127).astype(np.int8)
    return x.astype(DTYPES[dtype])


def sequences(shape, lengths, num_queries=1, seed=0):
    """One `Sequence` for each length; each has its own stream of numbers, so that it is the same in any batch."""
    counts = np.broadcast_to(num_queries, len(lengths))
    made = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rng = np.random.default_rng([seed, row])
        kv = (length, shape.num_kv_heads, shape.head_dim)
        q = normal((count, shape.num_q_heads, shape.head_dim), shape.q_dtype, rng)
        made.append(Sequence(q, normal(kv, shape.kv_dtype, rng), normal(kv, shape.kv_dtype, rng)))
    return made


def poisoned(dtype, poison):
    """The number that fills what no sequence owns."""
    dtype = DTYPES[dtype]
    if poison == "zero":
        return np.zeros((), dtype)[()]
    if dtype == np.int8:
        return np.int8(127)
    if poison == "largest" or (poison == "inf" and dtype == DTYPES["float8_e4m3fn"]):
        return ml_dtypes.finfo(dtype).max
    return np.array(np.nan if poison == "nan" else np.inf, np.float32).astype(dtype)[()]


def make_pool(shape, num_blocks, layout, poison):
    """(keys, values) [num_blocks, block_size, num_kv_heads, head_dim], views of storage in a physical order."""
    n, b, h, d = num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim
    filled = {"dtype": DTYPES[shape.kv_dtype], "fill_value": poisoned(shape.kv_dtype, poison)}
    if layout == "joint":
        storage = np.full((n, 2, b, h, d), **filled)
        return storage[:, 0], storage[:, 1]
    if layout == "HND":
        return tuple(np.full((n, h, b, d), **filled).transpose(0, 2, 1, 3) for _ in "kv")
    extra = 3 if layout == "padded" else 0
    return tuple(np.full((n, b, h, d + extra), **filled)[..., :d] for _ in "kv")


@dataclass(frozen=True)
class Problem:
    """One call's arrays; `query_starts` is None for decode."""

    shape: Shape
    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    block_tables: np.ndarray
    lengths: np.ndarray
    query_starts: np.ndarray | None
    scales: dict = field(default_factory=dict)

    def arguments(self):
        """The positional arguments of `decode` or `prefill`."""
        arrays = [self.q, self.keys, self.values, self.block_tables, self.lengths]
        return arrays if self.query_starts is None else [*arrays, self.query_starts]

    def attend(self, backend, **options):
        """The library's answer as a `Result`."""
        function = npg.decode if self.query_starts is None else npg.prefill
        options = {name: as_argument(backend, value) for name, value in {**self.scales, **options}.items()}
        got = function(*map(backend.asarray, self.arguments()), **options, return_lse=True)
        return Result(*map(backend.asnumpy, got))

    def expected(self, **options):
        """The oracle's answer as `reference.Expected`."""
        for ignored in ("split_size", "validate"):
            options.pop(ignored, None)
        return reference.paged(*self.arguments(), **{**self.scales, **options})

    def check(self, backend, **options):
        """Attend, compare with the oracle, and return the `Result`."""
        got = self.attend(backend, **options)
        rounding = backend.weight_rounding(self.shape.q_dtype, self.shape.kv_dtype)
        q_dtype, head_dim, soft_cap = self.q.dtype, self.shape.head_dim, options.get("soft_cap")
        assert got.out.dtype == q_dtype and got.lse.dtype == np.float32
        tolerances.assert_attention(*got, self.expected(**options), q_dtype, head_dim, soft_cap, rounding)
        return got

    def replace(self, **changes):
        """The same problem with other arrays."""
        return replace(self, **changes)


def as_argument(backend, value):
    """Arrays go where the backend wants them, other options stay."""
    return backend.asarray(value) if isinstance(value, np.ndarray) else value


def place(shape, rows, *, decode=True, seed=0, layout="NHD", poison="nan"):
    """Put sequences into a pool at random blocks, and write the tables; returns a `Problem`."""
    rng = np.random.default_rng(seed)
    lengths = np.array([len(row.k) for row in rows], np.int32)
    counts = -(-lengths // shape.block_size)
    num_blocks = int(counts.sum()) + SPARE_BLOCKS
    free = rng.permutation(num_blocks)
    keys, values = make_pool(shape, num_blocks, layout, poison)
    tables = np.resize(np.array(GARBAGE_IDS, np.int32), (len(rows), int(counts.max(initial=0)) + 2))
    for row, sequence in enumerate(rows):
        blocks, free = free[: counts[row]], free[counts[row] :]
        tables[row, : counts[row]] = blocks
        at = np.arange(len(sequence.k))
        keys[blocks[at // shape.block_size], at % shape.block_size] = sequence.k
        values[blocks[at // shape.block_size], at % shape.block_size] = sequence.v
    starts = None if decode else np.cumsum([0, *(len(row.q) for row in rows)], dtype=np.int32)
    q = np.concatenate([row.q for row in rows])
    return Problem(shape, q, keys, values, tables, lengths, starts, shape.default_scales)


def decode_problem(shape, lengths, *, seed=0, **placement):
    """A decode batch: one query a sequence."""
    return place(shape, sequences(shape, lengths, seed=seed), seed=seed, **placement)


def prefill_problem(shape, lengths, num_queries, *, seed=0, **placement):
    """A prefill batch: `num_queries` (a number, or one for each sequence) last positions ask."""
    return place(shape, sequences(shape, lengths, num_queries, seed), decode=False, seed=seed, **placement)
