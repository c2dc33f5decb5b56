"""Attention over the paged cache, the plain kernel: any machine, any format, any head_dim.

Per (item, kv head), a thread of its own:

    q, out = the tile's query rows, zeros           # rows: query tokens x the heads that share this kv head
    for each tile of TILE keys:
        keys = the tile's keys as float32           # read from their blocks once for all rows
        for each row: scores = q . keys, masked     # online softmax (arXiv:1805.02867)
            rescale out and the sum to the new maximum; weights = exp2(scores - maximum)
        values = the tile's values as float32       # likewise
        for each row: out += weights . values
    out / sum -> the output, or a partial if the sequence was split

Nothing is gathered: a tile of keys, then of values, is all that exists beside the pool (PagedAttention, arXiv:2309.06180).
Invariant: tile edges count from the first key that the tile's queries see, each row visits its visible keys in order
of their positions, and no number crosses from one pair to another: a row's result depends on its own keys alone.
"""

import functools

import numpy as np
from numba import cfunc, njit, types
from numba.extending import overload

from ..plan import NUM_QUERIES, PART, PART_STRIDE, POSITION, QUERY, SEQ, START, STOP
from ..score import LOG2E, make_score
from ..softmax import NEG_INF
from .conversion import read_number, read_query, write_query
from .elementary import exp2, tanh
from .machine import SOURCES
from .memory import store
from .threads import take_unit
from .units import ARGUMENTS, anchor_of, close_row, see_from, see_to

TILE = 32
"""Keys per step of the online softmax: at head_dim 128 a tile in float32 is 16 KiB, half an L1 cache."""

_ZERO = np.float32(0)
_LOG2E = np.float32(LOG2E)


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def _dot(a, b):
    total = _ZERO
    for d in range(a.size):
        total += a[d] * b[d]
    return total


@njit(fastmath={"contract"}, error_model="numpy")
def _add_scaled(out, weight, row):
    for d in range(out.size):
        out[d] += weight * row[d]


def _read_rows(target, pool, table, head, start, stop, kind, numbers):
    """Keys or values [start, stop) of a sequence and kv head as float32 rows."""
    raise NotImplementedError("compiled code only")


@overload(_read_rows, prefer_literal=True, jit_options={"error_model": "numpy"})
def _read_rows_of(target, pool, table, head, start, stop, kind, numbers):
    if not hasattr(kind, "literal_value"):
        return None
    fixed = kind.literal_value

    def implementation(target, pool, table, head, start, stop, kind, numbers):
        address, block_stride, offset_stride, head_stride, block_size = pool
        for position in range(start, stop):
            block = np.int64(table[position // block_size])
            row = address + block * block_stride + position % block_size * offset_stride + head * head_stride
            for d in range(target.shape[1]):
                target[position - start, d] = read_number(row, d, fixed, numbers)

    return implementation


def _score_row(scores, keys, q, inner, outer, slope, distance, has_cap, has_bias):
    """Scores of one row against consecutive keys, the first at `distance` from the query."""
    raise NotImplementedError("compiled code only")


@overload(_score_row, prefer_literal=True, jit_options={"error_model": "numpy"})
def _score_row_of(scores, keys, q, inner, outer, slope, distance, has_cap, has_bias):
    if not (hasattr(has_cap, "literal_value") and hasattr(has_bias, "literal_value")):
        return None
    score = njit(make_score(bool(has_cap.literal_value), bool(has_bias.literal_value), tanh))

    def implementation(scores, keys, q, inner, outer, slope, distance, has_cap, has_bias):
        for j in range(scores.size):
            scores[j] = _dot(q, keys[j])
        for j in range(scores.size):
            scores[j] = score(scores[j], inner, outer, slope, np.float32(distance + j))

    return implementation


@njit(error_model="numpy")
def _soften(scores, out, maximum, total):
    """One step of the online softmax: scores become weights, `out` is rescaled; returns the new maximum and sum."""
    top = maximum
    for j in range(scores.size):
        top = max(top, scores[j])
    if top != maximum:
        factor = exp2(maximum - top)
        total *= factor
        for d in range(out.size):
            out[d] *= factor
    base = anchor_of(top)
    for j in range(scores.size):
        scores[j] = exp2(scores[j] - base)
    for j in range(scores.size):
        total += scores[j]
    return top, total


@njit(error_model="numpy")
def _write_rows(item, head, group, num_rows, out, maxima, totals, value_scale, sinks, outputs, parts, part_lses):
    """Finish the rows of a pair: to the output, or to the partials if the sequence was split."""
    address, kind, stride, head_stride, lse_address, lse_stride, lse_head_stride = outputs
    for row in range(num_rows):
        token, q_head = row // group, head * group + row % group
        split = item[PART] >= 0
        sink = sinks[q_head] if sinks.size and not split else NEG_INF
        lse, factor = close_row(maxima[row], totals[row], sink, value_scale)
        for d in range(out.shape[1]):
            out[row, d] = out[row, d] * factor if factor != _ZERO else _ZERO
        if split:
            part = item[PART] + token * item[PART_STRIDE]
            part_lses[part, q_head] = lse
            for d in range(out.shape[1]):
                parts[part, q_head, d] = out[row, d]
            continue
        token += item[QUERY]
        for d in range(out.shape[1]):
            write_query(address + token * stride + q_head * head_stride, d, kind, out[row, d])
        if lse_address:
            store(lse_address + token * lse_stride + q_head * lse_head_stride, 0, lse)


@njit(error_model="numpy")
def _begin_rows(rows, out, maxima, totals, q, query, head, group):
    """Read the query rows of a pair, and start their softmax from nothing."""
    address, kind, stride, head_stride = q
    for row in range(rows.shape[0]):
        source = address + (query + row // group) * stride + (head * group + row % group) * head_stride
        for d in range(rows.shape[1]):
            rows[row, d] = read_query(source, d, kind)
            out[row, d] = _ZERO
        maxima[row], totals[row] = NEG_INF, _ZERO


@njit
def _make_scratch(num_rows, head_dim):
    """What a thread needs, once: query rows, out rows, scores, one tile, maxima, sums."""
    return (np.empty((num_rows, head_dim), np.float32), np.empty((num_rows, head_dim), np.float32),
            np.empty((num_rows, TILE), np.float32), np.empty((TILE, head_dim), np.float32),
            np.empty(num_rows, np.float32), np.empty(num_rows, np.float32))


@functools.cache
def load_attend(kind, has_cap, has_bias):
    """The kernel for a kind of pool and the features in use."""
    sources = SOURCES

    @cfunc(types.void(*ARGUMENTS), cache=True, error_model="numpy")
    def attend(q, keys, values, outputs, tables, lengths, items, geometry, factors, numbers,
               slopes, sinks, parts, part_lses, window, causal, counter):
        sources  # see machine.SOURCES
        num_heads, group, head_dim, num_queries, _ = geometry
        inner, outer, value_scale = factors
        rows, out, scores, tile, maxima, totals = _make_scratch(num_queries * group, head_dim)
        pair = take_unit(counter)
        while pair < items.shape[0] * num_heads:
            item, head = items[pair // num_heads], pair % num_heads
            table, length, position = tables[item[SEQ]], np.int64(lengths[item[SEQ]]), np.int64(item[POSITION])
            num_rows, stop = item[NUM_QUERIES] * group, np.int64(item[STOP])
            _begin_rows(rows[:num_rows], out, maxima, totals, q, item[QUERY], head, group)
            for first in range(max(np.int64(item[START]), see_from(position, window)), stop, TILE):
                last = min(first + TILE, stop)
                _read_rows(tile, keys, table, head, first, last, kind, numbers)
                for row in range(num_rows):
                    at = position + row // group
                    low = max(first, see_from(at, window)) - first
                    high = min(last, see_to(at, length, causal)) - first
                    if low < high:
                        slope = slopes[head * group + row % group] * _LOG2E if slopes.size else _ZERO
                        _score_row(scores[row, low:high], tile[low:high], rows[row], inner, outer, slope,
                                   first + low - at, has_cap, has_bias)
                        maxima[row], totals[row] = _soften(scores[row, low:high], out[row], maxima[row], totals[row])
                _read_rows(tile, values, table, head, first, last, kind, numbers)
                for row in range(num_rows):
                    at = position + row // group
                    for j in range(max(first, see_from(at, window)) - first,
                                   min(last, see_to(at, length, causal)) - first):
                        _add_scaled(out[row], scores[row, j], tile[j])
            _write_rows(item, head, group, num_rows, out, maxima, totals, value_scale, sinks, outputs, parts, part_lses)
            pair = take_unit(counter)

    return attend
