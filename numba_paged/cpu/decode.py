"""Attention over the paged cache at the memory's speed, for items with few query rows: the vector kernel.

A unit is an item of the plan and a range of kv heads; threads take units from a counter:

    for each tile of TILE keys, for each kv head of the unit:    # tile outside, head inside: a block is read in one go
        for each four query rows of the head:                    # query tokens x the heads that share the kv head
            dot_tile      scores = q . keys,     fetching the keys that are read next
            score, mask   `score.make_score`
            soften_tile   the online softmax (arXiv:1805.02867)
            weigh_tile    out = out · factors + weights . values, fetching the values that are read next
    finish each row: to the output, or to the partials if the sequence was split

Keys and values go from memory to registers, converted there (PagedAttention, arXiv:2309.06180, without the gather).
Invariants: those of `attend`; rows past a tile's last key repeat it, and never reach the softmax.
"""

import functools

import numpy as np
from numba import cfunc, njit, types
from numba.extending import overload

from ..plan import NUM_QUERIES, POSITION, QUERY, SEQ, START, STOP
from ..score import make_score
from ..softmax import NEG_INF
from .elementary import tanh
from .machine import SOURCES
from .rows import pack_row
from .threads import take_unit
from .tiles import ROWS, TILE, dot_tile, soften_tile, weigh_tile
from .units import ARGUMENTS, common_keys, find_rows, finish_row, see_from, see_rows

_ZERO = np.float32(0)
_ONE = np.float32(1)


def _score_tile(scores, rows, first, positions, sees, slopes, factors, has_cap, has_bias):
    """Turn up to ROWS rows of dot products into scores, hidden keys into -inf."""
    raise NotImplementedError("compiled code only")


@overload(_score_tile, prefer_literal=True, jit_options={"error_model": "numpy"})
def _score_tile_of(scores, rows, first, positions, sees, slopes, factors, has_cap, has_bias):
    if not (hasattr(has_cap, "literal_value") and hasattr(has_bias, "literal_value")):
        return None
    score = njit(make_score(bool(has_cap.literal_value), bool(has_bias.literal_value), tanh))

    def implementation(scores, rows, first, positions, sees, slopes, factors, has_cap, has_bias):
        inner, outer, _ = factors
        for row in range(rows):
            low, high = np.int32(sees[row, 0] - first), np.int32(sees[row, 1] - first)
            slope, distance = slopes[row], np.int32(first - positions[row])
            if low <= 0 and high >= TILE:
                for j in range(TILE):
                    scores[row, j] = score(scores[row, j], inner, outer, slope, np.float32(distance + j))
            else:
                for j in range(TILE):
                    value = score(scores[row, j], inner, outer, slope, np.float32(distance + j))
                    scores[row, j] = value if low <= j and j < high else NEG_INF

    return implementation


def _begin_unit(item, heads, q, group, head_dim, length, window, causal, slopes, scratch, width, kind, is_dot):
    """Read the query rows of an item for the kv heads [start, stop), and start their softmax from nothing."""
    raise NotImplementedError("compiled code only")


@overload(_begin_unit, prefer_literal=True, jit_options={"error_model": "numpy"})
def _begin_unit_of(item, heads, q, group, head_dim, length, window, causal, slopes, scratch, width, kind, is_dot):
    if not hasattr(width, "literal_value"):
        return None
    lanes, pool, dot = width.literal_value, kind.literal_value, is_dot.literal_value

    def implementation(item, heads, q, group, head_dim, length, window, causal, slopes, scratch, width, kind, is_dot):
        query, out, state, _, positions, sees, row_slopes = scratch
        address, q_kind, stride, head_stride = q
        rows = item[NUM_QUERIES] * group
        for h in range(heads[1] - heads[0]):
            head = heads[0] + h
            see_rows(item, head, group, length, window, causal, slopes, positions, sees, row_slopes[h])
            query[h], out[h], state[h, :, 0], state[h, :, 1] = _ZERO, _ZERO, NEG_INF, _ZERO
            for row in range(rows):
                token, q_head = item[QUERY] + row // group, head * group + row % group
                pack_row(lanes, pool, dot, q_kind, address + token * stride + q_head * head_stride,
                         query[h, row // ROWS].ctypes.data, row % ROWS, _tile_rows(rows - row // ROWS * ROWS), head_dim)

    return implementation


@njit
def _tile_rows(rows):
    """The register tile that the next rows take."""
    return rows if rows < 3 else ROWS


def _attend_tile(first, last, h, head, rows, head_dim, strides, places, fetched, scratch, factors, width, kind, is_dot,
                 has_cap, has_bias):
    """Attend the keys [first, last) for all rows of one kv head."""
    raise NotImplementedError("compiled code only")


# Inlined, with all that it calls: handing over as many arrays takes longer than the arithmetic of a tile does.
@overload(_attend_tile, prefer_literal=True, jit_options={"error_model": "numpy", "_nrt": False, "forceinline": True})
def _attend_tile_of(first, last, h, head, rows, head_dim, strides, places, fetched, scratch, factors, width, kind, is_dot,
                    has_cap, has_bias):
    if not hasattr(width, "literal_value"):
        return None
    lanes, pool, dot = width.literal_value, kind.literal_value, is_dot.literal_value
    cap, bias = has_cap.literal_value, has_bias.literal_value

    def implementation(first, last, h, head, rows, head_dim, strides, places, fetched, scratch, factors, width, kind,
                       is_dot, has_cap, has_bias):
        query, out, state, scores, positions, sees, row_slopes = scratch
        key_rows, value_rows = places[0].ctypes.data, places[1].ctypes.data
        key_offset, value_offset = head * strides[0], head * strides[1]
        next_keys, next_values, next_key_offset, next_value_offset = fetched
        num_keys, out_stride = last - first, out.strides[2]
        for g in range((rows + ROWS - 1) // ROWS):
            start, real = g * ROWS, min(ROWS, rows - g * ROWS)
            count = _tile_rows(real)
            dot_tile(pool, lanes, dot, count, query[h, g].ctypes.data, key_rows, key_offset, next_keys, next_key_offset,
                     num_keys, head_dim, scores.ctypes.data)
            low, high = common_keys(sees[start:], real, first, last)
            lacking = factors[0]
            if cap or bias or high - low < TILE:  # without them a score is its dot product times a factor
                _score_tile(scores, real, first, positions[start:], sees[start:], row_slopes[h, start:], factors, cap, bias)
                lacking = _ONE
            changed = soften_tile(lanes, count, scores.ctypes.data, state[h, g].ctypes.data, lacking)
            if high - low == num_keys:
                weigh_tile(pool, lanes, count, scores.ctypes.data, value_rows, value_offset, next_values,
                           next_value_offset, num_keys, head_dim, state[h, g].ctypes.data, changed,
                           out[h, g].ctypes.data, out_stride)
            else:  # each row over its own keys: 0 · NaN would spread what is hidden
                for row in range(real):
                    low, high = common_keys(sees[start + row:], 1, first, last)
                    own = places[1, low:].ctypes.data
                    weigh_tile(pool, lanes, 1, scores[row, low:].ctypes.data, own, value_offset, own, value_offset,
                               high - low, head_dim, state[h, g, 0, row:].ctypes.data, changed,
                               out[h, g, row].ctypes.data, out_stride)
            # the first rows fetched what is read next; for the others it is these same keys
            next_keys, next_values = key_rows, value_rows
            next_key_offset, next_value_offset = key_offset, value_offset

    return implementation


@njit
def _make_scratch(num_heads, num_rows, padded):
    """What a thread needs, once: query rows, out rows, the softmax's state, scores, positions, keys seen, slopes."""
    groups = (num_rows + ROWS - 1) // ROWS
    return (np.empty((num_heads, groups, ROWS * padded), np.float32),
            np.empty((num_heads, groups, ROWS, padded), np.float32),
            np.empty((num_heads, groups, 3, ROWS), np.float32), np.empty((ROWS, TILE), np.float32),
            np.empty(num_rows, np.int64), np.empty((num_rows, 2), np.int64), np.empty((num_heads, num_rows), np.float32))


def _attend_units(q, keys, values, outputs, tables, lengths, items, geometry, factors, slopes, sinks, parts, part_lses,
                  window, causal, counter, scratch, places, width, kind, is_dot, has_cap, has_bias):
    """Take units and attend them until there are none."""
    raise NotImplementedError("compiled code only")


# Without the counting of references to arrays, which takes longer than a tile's arithmetic does.
@overload(_attend_units, prefer_literal=True, jit_options={"error_model": "numpy", "_nrt": False})
def _attend_units_of(q, keys, values, outputs, tables, lengths, items, geometry, factors, slopes, sinks, parts, part_lses,
                     window, causal, counter, scratch, places, width, kind, is_dot, has_cap, has_bias):
    if not hasattr(width, "literal_value"):
        return None
    lanes, pool, dot = width.literal_value, kind.literal_value, is_dot.literal_value
    cap, bias = has_cap.literal_value, has_bias.literal_value

    def implementation(q, keys, values, outputs, tables, lengths, items, geometry, factors, slopes, sinks, parts,
                       part_lses, window, causal, counter, scratch, places, width, kind, is_dot, has_cap,
                       has_bias):
        num_heads, group, head_dim, max_queries, unit_heads = geometry
        out, state = scratch[1], scratch[2]
        ranges = (num_heads + unit_heads - 1) // unit_heads
        unit = take_unit(counter)
        while unit < items.shape[0] * ranges:
            item, start = items[unit // ranges], unit % ranges * unit_heads
            heads = start, min(start + unit_heads, num_heads)
            rows, table, stop = item[NUM_QUERIES] * group, tables[item[SEQ]], np.int64(item[STOP])
            _begin_unit(item, heads, q, group, head_dim, np.int64(lengths[item[SEQ]]), window, causal, slopes, scratch,
                        lanes, pool, dot)
            first = max(np.int64(item[START]), see_from(np.int64(item[POSITION]), window))
            following, turn = places[0], 0
            if first < stop:
                find_rows(table, keys, first, stop, following[0])
                find_rows(table, values, first, stop, following[1])
            while first < stop:
                last = min(first + TILE, stop)
                turn = 1 - turn
                here, following = following, places[turn]
                if last < stop:
                    find_rows(table, keys, last, stop, following[0])
                    find_rows(table, values, last, stop, following[1])
                for head in range(heads[0], heads[1]):
                    ahead, then = (here, head + 1) if head + 1 < heads[1] else (following, heads[0])
                    fetched = ahead[0].ctypes.data, ahead[1].ctypes.data, then * keys[3], then * values[3]
                    _attend_tile(first, last, head - heads[0], head, rows, head_dim, (keys[3], values[3]), here, fetched,
                                 scratch, factors, lanes, pool, dot, cap, bias)
                first = last
            for head in range(heads[0], heads[1]):
                for row in range(rows):
                    h, g, r = head - heads[0], row // ROWS, row % ROWS
                    finish_row(item, row, head, group, out[h, g, r], state[h, g, 0, r], state[h, g, 1, r], head_dim,
                               factors[2], sinks, outputs, parts, part_lses, lanes, pool)
            unit = take_unit(counter)

    return implementation


@functools.cache
def load_decode(width, kind, is_dot, has_cap, has_bias):
    """The kernel for a vector width, a format of the pool, the bfloat16 dot and the features in use."""
    sources = SOURCES

    @cfunc(types.void(*ARGUMENTS), cache=True, error_model="numpy")
    def decode(q, keys, values, outputs, tables, lengths, items, geometry, factors, numbers,
               slopes, sinks, parts, part_lses, window, causal, counter):
        sources  # see machine.SOURCES
        _, group, head_dim, max_queries, unit_heads = geometry
        padded = (head_dim + 2 * width - 1) // (2 * width) * (2 * width)
        scratch = _make_scratch(unit_heads, max_queries * group, padded)
        places = np.empty((2, 2, TILE), np.int64)  # rows of keys and of values: of a tile, and of the next one
        _attend_units(q, keys, values, outputs, tables, lengths, items, geometry, factors, slopes, sinks, parts, part_lses,
                      window, causal, counter, scratch, places, width, kind, is_dot, has_cap, has_bias)

    return decode
