"""What is refused before anything is changed: pools, queries, tables, slots and copies that no kernel could serve.

Every error names the argument, the row, the value and the bound. Arrays are views of the backend's kind; tables, slots
and copies are NumPy.
"""

import numpy as np
from numba import njit

from .arrays import check_last_axis, check_ndim, check_shape, host_floats, host_integers
from .compiled import bare
from .formats import QUERY_FORMATS, format_of
from .scalars import LARGEST_FLOAT32
from .score import visible_start
from .spec import NO_WINDOW, check_heads

_visible_start = njit(visible_start)

_INT32 = np.dtype(np.int32)
_MOST_GEOMETRIES = 1024


def integers(backend, values, name, ndim, dtypes=(_INT32,)):
    """Tables, lengths and slots as NumPy on the host, wherever they were."""
    if type(values) is np.ndarray and values.dtype is dtypes[0] and values.ndim == ndim:
        return values
    if not isinstance(values, (np.ndarray, list, tuple, range)):
        values = backend.to_host(values, name)
    return host_integers(values, name, ndim, dtypes)


def alibi_slopes(backend, values, num_q_heads):
    """One finite float32 per query head where the backend computes, or None."""
    return _floats(backend, values, "alibi_slopes", num_q_heads, -LARGEST_FLOAT32)


def sinks(backend, values, num_q_heads):
    """One float32 per query head where the backend computes, or None; a sink of -inf takes nothing."""
    return _floats(backend, values, "sinks", num_q_heads, -np.inf)


def _floats(backend, values, name, size, lowest):
    if values is not None and not isinstance(values, (np.ndarray, list, tuple)):
        values = backend.to_host(values, name)
    values = host_floats(values, name, size, lowest)
    return None if values is None else backend.array(values)


def check_pool(keys, values, ndim=4, writeable=False):
    """Keys and values: one shape, one supported dtype, a contiguous last axis."""
    check_ndim(keys, "keys", ndim)
    check_shape(values, "values", keys.shape)
    format_of(keys.dtype, "keys")
    if values.dtype != keys.dtype:
        raise TypeError(f"values must be {keys.dtype.name} like keys, got {values.dtype.name}")
    for name, pool in (("keys", keys), ("values", values)):
        check_last_axis(pool, name)
        if writeable:
            _check_writeable(pool, name)
    if min(keys.shape[-3:]) < 1:
        raise ValueError(f"keys must have slots, heads and a head_dim of at least 1, got shape {tuple(keys.shape)}")


_served = set()
"""Geometries that have passed `check_layer`: what a decoder asks for is like the last time, and looked up faster."""


def check_layer(q, keys, values):
    """Queries and one layer of the pool, as `check_pool` and `check_query` see them."""
    geometry = q.shape, q.strides, q.dtype, keys.shape, keys.strides, keys.dtype, values.shape, values.strides, values.dtype
    if geometry not in _served:
        check_pool(keys, values)
        check_query(q, *keys.shape[2:])
        if len(_served) >= _MOST_GEOMETRIES:
            _served.clear()
        _served.add(geometry)


def check_new(k, v, heads):
    """New keys and values [num_tokens, num_kv_heads, head_dim] that fit a pool's (num_kv_heads, head_dim)."""
    check_ndim(k, "k", 3)
    check_shape(k, "k", (k.shape[0], *heads))
    check_shape(v, "v", k.shape)
    format_of(k.dtype, "k", QUERY_FORMATS)
    if v.dtype != k.dtype:
        raise TypeError(f"v must be {k.dtype.name} like k, got {v.dtype.name}")
    check_last_axis(k, "k")
    check_last_axis(v, "v")


def check_query(q, num_kv_heads, head_dim):
    """Queries [num_tokens, num_q_heads, head_dim] that fit a pool."""
    check_ndim(q, "q", 3)
    format_of(q.dtype, "q", QUERY_FORMATS)
    check_shape(q, "q", (*q.shape[:2], head_dim))
    check_heads(q.shape[1], num_kv_heads, head_dim)
    check_last_axis(q, "q")


def check_rows(array, name, counts):
    """An array whose first axes are the plan's."""
    check_shape(array, name, (*counts, *array.shape[len(counts) :]))


def check_out(out, q):
    """An output like the queries."""
    check_shape(out, "out", q.shape)
    if out.dtype != q.dtype:
        raise TypeError(f"out must be {q.dtype.name} like q, got {out.dtype.name}")
    check_last_axis(out, "out")
    _check_writeable(out, "out")


def _check_writeable(array, name):
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name} is read-only")


def check_query_starts(query_starts, num_tokens):
    """Starts that rise from 0 to the number of query tokens."""
    if query_starts[0] != 0:
        raise ValueError(f"query_starts[0] must be 0, got {query_starts[0]}")
    falls = np.flatnonzero(np.diff(query_starts) < 0)
    if falls.size:
        row = int(falls[0])
        raise ValueError(f"query_starts must not fall: [{row}] is {query_starts[row]}, [{row + 1}] {query_starts[row + 1]}")
    if query_starts[-1] != num_tokens:
        raise ValueError(f"query_starts[-1] must be the number of query tokens {num_tokens}, got {query_starts[-1]}")


def check_tables(block_tables, query_starts, lengths, num_blocks, block_size, window=None):
    """Lengths that the tables hold, and a block id in every entry that will be read."""
    row, column = _first_fault(block_tables, query_starts, lengths, num_blocks, block_size,
                               NO_WINDOW if window is None else window)
    if column >= 0:
        raise ValueError(f"block_tables[{row}, {column}] is {block_tables[row, column]}, out of range for a pool of "
                         f"{num_blocks} blocks (sequence {row} has {lengths[row]} tokens)")
    if row >= 0:
        capacity = block_tables.shape[1] * block_size
        raise ValueError(f"lengths[{row}] is {lengths[row]}, out of range for a table of {block_tables.shape[1]} blocks "
                         f"of {block_size} slots (capacity {capacity} tokens)")


@bare
def _first_fault(block_tables, query_starts, lengths, num_blocks, block_size, window):
    """The first length that the tables do not hold, as (row, -1), or else the first entry that will be read and names
    no block, as (row, column), or (-1, -1)."""
    for seq in range(lengths.size):
        if not 0 <= lengths[seq] <= block_tables.shape[1] * block_size:
            return seq, -1
    for seq in range(lengths.size):
        first_query = lengths[seq] - (query_starts[seq + 1] - query_starts[seq])
        start = _visible_start(first_query, window) // block_size
        for column in range(start, (lengths[seq] + block_size - 1) // block_size):
            if not 0 <= block_tables[seq, column] < num_blocks:
                return seq, column
    return -1, -1


def check_slots(slots, num_blocks, block_size):
    """Slots inside of the pool (or -1), no two alike: which of two writes stays would be left to chance."""
    num_slots = num_blocks * block_size
    if slots.size and not (-1 <= slots.min() and slots.max() < num_slots):
        row = int(np.flatnonzero((slots < -1) | (slots >= num_slots))[0])
        raise ValueError(f"slots[{row}] is {slots[row]}, out of range for a pool of {num_blocks} blocks of {block_size} "
                         f"slots ({num_slots} in all; -1 writes nothing)")
    ordered = np.sort(slots)
    twice = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    if twice.size:
        rows = np.flatnonzero(slots == ordered[twice[0]])
        raise ValueError(f"slots[{rows[0]}] and slots[{rows[1]}] are both {ordered[twice[0]]}; a slot is written once")


def check_copies(sources, targets, num_blocks):
    """Block ids inside of the pool, no target named twice."""
    for name, blocks in (("sources", sources), ("targets", targets)):
        bad = np.flatnonzero((blocks < 0) | (blocks >= num_blocks))
        if bad.size:
            raise ValueError(f"{name}[{bad[0]}] is {blocks[bad[0]]}, out of range for a pool of {num_blocks} blocks")
    unique, counts = np.unique(targets, return_counts=True)
    if unique.size < targets.size:
        raise ValueError(f"targets name block {unique[counts.argmax()]} {counts.max()} times; each is written once")
