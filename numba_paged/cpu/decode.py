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

from ..plan import NUM_QUERIES, PART, PART_STRIDE, POSITION, QUERY, SEQ, START, STOP
from ..score import LOG2E, make_score
from ..softmax import NEG_INF
from .attend import ARGUMENTS, close_row, see_from, see_to
from .elementary import tanh
from .machine import SOURCES
from .memory import store
from .rows import pack_row, write_row
from .threads import take_unit
from .tiles import ROWS, TILE, dot_tile, soften_tile, weigh_tile

_ZERO = np.float32(0)
_LOG2E = np.float32(LOG2E)


@njit(error_model="numpy")
def find_rows(table, pool, first, stop, addresses):
    """The addresses of the rows of the keys from `first` on, for kv head 0; past the last key they repeat it."""
    address, block_stride, offset_stride, _, block_size = pool
    block, offset = first // block_size, first % block_size
    row = address + np.int64(table[block]) * block_stride + offset * offset_stride
    for j in range(addresses.size):
        addresses[j] = row
        if first + j + 1 < stop:
            offset += 1
            row += offset_stride
            if offset == block_size:
                block, offset = block + 1, 0
                row = address + np.int64(table[block]) * block_stride


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


@njit(error_model="numpy")
def _common_keys(sees, rows, first, last):
    """The keys of the tile [first, last) that every one of the rows sees, counted from `first`."""
    low, high = first, last
    for row in range(rows):
        low, high = max(low, sees[row, 0]), min(high, sees[row, 1])
    return low - first, max(low, high) - first


@njit(error_model="numpy")
def begin_rows(item, head, group, length, window, causal, slopes, positions, sees, row_slopes):
    """What each query row of an item sees, and its bias, for one kv head."""
    for row in range(item[NUM_QUERIES] * group):
        at = np.int64(item[POSITION]) + row // group
        positions[row] = at
        sees[row, 0] = see_from(at, window)
        sees[row, 1] = min(np.int64(item[STOP]), see_to(at, length, causal))
        row_slopes[row] = slopes[head * group + row % group] * _LOG2E if slopes.size else _ZERO


@functools.cache
def load_decode(width, kind, is_dot, has_cap, has_bias):
    """The kernel for a vector width, a format of the pool, the bfloat16 dot and the features in use."""

    sources = SOURCES

    @cfunc(types.void(types.int64, types.int64, *ARGUMENTS), cache=True, error_model="numpy")
    def decode(thread, num_threads, q, keys, values, outputs, tables, lengths, items, geometry, factors, numbers,
               slopes, sinks, parts, part_lses, window, causal, counter):
        sources  # see machine.SOURCES
        num_heads, group, head_dim, max_queries, heads_per_unit = geometry
        q_address, q_kind, q_stride, q_head_stride = q
        padded = (head_dim + 2 * width - 1) // (2 * width) * (2 * width)
        max_groups = (max_queries * group + ROWS - 1) // ROWS
        query = np.empty((heads_per_unit, max_groups, ROWS * padded), np.float32)
        out = np.empty((heads_per_unit, max_groups, ROWS, padded), np.float32)
        state = np.empty((heads_per_unit, max_groups, 3, ROWS), np.float32)
        scores = np.empty((ROWS, TILE), np.float32)
        places = np.empty((4, TILE), np.int64)
        positions, sees = np.empty(max_groups * ROWS, np.int64), np.empty((max_groups * ROWS, 2), np.int64)
        row_slopes = np.empty((heads_per_unit, max_groups * ROWS), np.float32)
        ranges = (num_heads + heads_per_unit - 1) // heads_per_unit
        unit = take_unit(counter)
        while unit < items.shape[0] * ranges:
            item = items[unit // ranges]
            head_start = unit % ranges * heads_per_unit
            num_unit_heads = min(heads_per_unit, num_heads - head_start)
            rows, table, stop = item[NUM_QUERIES] * group, tables[item[SEQ]], np.int64(item[STOP])
            groups = (rows + ROWS - 1) // ROWS
            for h in range(num_unit_heads):
                begin_rows(item, head_start + h, group, np.int64(lengths[item[SEQ]]), window, causal, slopes,
                            positions, sees, row_slopes[h])
                query[h] = _ZERO
                for row in range(rows):
                    in_group, g = row % ROWS, row // ROWS
                    real = min(ROWS, rows - g * ROWS)
                    source = (q_address + (item[QUERY] + row // group) * q_stride
                              + ((head_start + h) * group + row % group) * q_head_stride)
                    pack_row(width, kind, is_dot, q_kind, source, query[h, g].ctypes.data, in_group,
                             real if real < 3 else ROWS, head_dim)
                out[h, :groups] = _ZERO
                state[h, :groups, 0] = NEG_INF
                state[h, :groups, 1] = _ZERO
            first = max(np.int64(item[START]), see_from(np.int64(item[POSITION]), window))
            if first < stop:
                find_rows(table, keys, first, stop, places[2])
                find_rows(table, values, first, stop, places[3])
            while first < stop:
                last = min(first + TILE, stop)
                places[:2] = places[2:]
                find_rows(table, keys, last if last < stop else first, stop, places[2])
                find_rows(table, values, last if last < stop else first, stop, places[3])
                for h in range(num_unit_heads):
                    this, following = head_start + h, head_start + h + 1
                    ahead = 0
                    if h + 1 == num_unit_heads:
                        following, ahead = head_start, 2
                    for g in range(groups):
                        real = min(ROWS, rows - g * ROWS)
                        count = real if real < 3 else ROWS
                        if g > 0:  # the first four rows fetched what comes next
                            following, ahead = this, 0
                        dot_tile(kind, width, is_dot, count, query[h, g].ctypes.data, places[0].ctypes.data,
                                 this * keys[3], places[ahead].ctypes.data, following * keys[3], last - first,
                                 head_dim, scores.ctypes.data)
                        _score_tile(scores, real, first, positions[g * ROWS:], sees[g * ROWS:],
                                    row_slopes[h, g * ROWS:], factors, has_cap, has_bias)
                        changed = soften_tile(width, count, scores.ctypes.data, state[h, g].ctypes.data)
                        low, high = _common_keys(sees[g * ROWS:], real, first, last)
                        if high - low == last - first:
                            weigh_tile(kind, width, count, scores.ctypes.data, places[1].ctypes.data,
                                       this * values[3], places[ahead + 1].ctypes.data, following * values[3],
                                       last - first, head_dim, state[h, g].ctypes.data, changed,
                                       out[h, g].ctypes.data, padded * 4)
                            continue
                        for row in range(real):  # each over its own keys: 0 · NaN would spread what is hidden
                            low, high = _common_keys(sees[g * ROWS + row:], 1, first, last)
                            weigh_tile(kind, width, 1, scores[row, low:].ctypes.data, places[1, low:].ctypes.data,
                                       this * values[3], places[1, low:].ctypes.data, this * values[3], high - low,
                                       head_dim, state[h, g, 0, row:].ctypes.data, changed,
                                       out[h, g, row].ctypes.data, padded * 4)
                first = last
            for h in range(num_unit_heads):
                for row in range(rows):
                    finish_row(width, kind, item, row, head_start + h, group, out[h, row // ROWS, row % ROWS],
                                state[h, row // ROWS, 0, row % ROWS], state[h, row // ROWS, 1, row % ROWS],
                                head_dim, factors[2], sinks, outputs, parts, part_lses)
            unit = take_unit(counter)

    return decode


def finish_row(width, kind, item, row, head, group, out, maximum, total, head_dim, value_scale, sinks, outputs, parts,
                part_lses):
    """Finish a row: to the output, or to the partials if the sequence was split."""
    raise NotImplementedError("compiled code only")


@overload(finish_row, prefer_literal=True, jit_options={"error_model": "numpy"})
def finish_row_of(width, pool_kind, item, row, head, group, out, maximum, total, head_dim, value_scale, sinks, outputs, parts,
                   part_lses):
    if not hasattr(width, "literal_value"):
        return None
    lanes, pool = width.literal_value, pool_kind.literal_value

    def implementation(width, pool_kind, item, row, head, group, out, maximum, total, head_dim, value_scale, sinks, outputs,
                       parts, part_lses):
        address, kind, stride, head_stride, lse_address, lse_stride, lse_head_stride = outputs
        token, q_head = row // group, head * group + row % group
        if item[PART] >= 0:
            part = item[PART] + token * item[PART_STRIDE]
            lse, factor = close_row(maximum, total, NEG_INF, value_scale)
            part_lses[part, q_head] = lse
            write_row(lanes, pool, 0, out.ctypes.data, parts[part, q_head].ctypes.data, factor, head_dim)
        else:
            lse, factor = close_row(maximum, total, sinks[q_head] if sinks.size else NEG_INF, value_scale)
            token += item[QUERY]
            write_row(lanes, pool, kind, out.ctypes.data, address + token * stride + q_head * head_stride, factor, head_dim)
            if lse_address:
                store(lse_address + token * lse_stride + q_head * lse_head_stride, 0, lse)

    return implementation
