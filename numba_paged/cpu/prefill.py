"""Attention over the paged cache for items with many query rows: the vector kernel for prompts.

A unit is an item of the plan and a kv head; threads take units from a counter. With R query rows (query tokens x the
heads that share the kv head) and TILE keys at a time:

    query [head_dim, R]                                the rows, transposed once
    for each tile:
        scores [TILE, R] = keys @ query                keys by the addresses of their rows: float32, and bfloat16 for the
                                                       dot instruction, straight from the pages; others widened first
        score, mask                                    `score.make_score`; masks only where a tile has hidden keys
        soften_panel                                   the online softmax, a row a lane (arXiv:1805.02867)
        out [R, head_dim] = out · factors + scores^T @ values
    finish each row: to the output, or to the partials if the sequence was split

Invariants: those of `attend`; rows past the last query token are zeros and never written.
"""

import functools

import numpy as np
from numba import cfunc, njit, types
from numba.extending import overload

from ..plan import NUM_QUERIES, POSITION, QUERY, SEQ, START, STOP
from ..score import make_score
from ..softmax import NEG_INF
from .attend import ARGUMENTS, see_from
from .decode import begin_rows, find_rows, finish_row
from .elementary import tanh
from .machine import SOURCES
from .memory import as_bits
from .numbers import FLOAT32
from .panels import multiply_panels, panel_vectors, soften_panel, widen_row
from .rows import pack_row
from .threads import take_unit

TILE = 64
"""Keys per step of the online softmax."""

_ZERO = np.float32(0)


def _score_panel(scores, num_keys, first, positions, sees, slopes, factors, hides, has_cap, has_bias):
    """Turn dot products [keys, rows] into scores, hidden keys into -inf."""
    raise NotImplementedError("compiled code only")


@overload(_score_panel, prefer_literal=True, jit_options={"error_model": "numpy"})
def _score_panel_of(scores, num_keys, first, positions, sees, slopes, factors, hides, has_cap, has_bias):
    if not (hasattr(has_cap, "literal_value") and hasattr(has_bias, "literal_value")):
        return None
    score = njit(make_score(bool(has_cap.literal_value), bool(has_bias.literal_value), tanh))

    def implementation(scores, num_keys, first, positions, sees, slopes, factors, hides, has_cap, has_bias):
        inner, outer, _ = factors
        for key in range(num_keys):
            at, row_scores = first + key, scores[key]
            for row in range(row_scores.size):
                distance = np.float32(at - positions[row])
                row_scores[row] = score(row_scores[row], inner, outer, slopes[row], distance)
            if hides:
                for row in range(row_scores.size):
                    seen = sees[row, 0] <= at and at < sees[row, 1]
                    row_scores[row] = row_scores[row] if seen else NEG_INF

    return implementation


@njit(error_model="numpy")
def _all_finite(rows):
    """Whether there is neither NaN nor infinity."""
    largest = 0
    for row in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            largest = max(largest, np.int32(as_bits(rows[row, d]) & 0x7F800000))
    return largest < 0x7F800000


@njit(error_model="numpy")
def _weigh_seen(weights, values, first, last, sees, out):
    """Add the weighted values that each row sees, row by row: 0 · NaN would spread what is hidden."""
    for row in range(out.shape[0]):
        for key in range(max(first, sees[row, 0]), min(last, sees[row, 1])):
            weight = weights[key - first, row]
            for d in range(out.shape[1]):
                out[row, d] += weight * values[key - first, d]


@functools.cache
def load_prefill(width, kind, is_dot, has_cap, has_bias):
    """The kernel for a vector width, a format of the pool, the bfloat16 dot and the features in use."""
    sources = SOURCES
    direct = bool(is_dot)
    column = width * panel_vectors(width)
    pair = 2 if is_dot else 1

    @cfunc(types.void(types.int64, types.int64, *ARGUMENTS), cache=True, error_model="numpy")
    def prefill(thread, num_threads, q, keys, values, outputs, tables, lengths, items, geometry, factors, numbers,
                slopes, sinks, parts, part_lses, window, causal, counter):
        sources  # see machine.SOURCES
        num_heads, group, head_dim, max_queries, _ = geometry
        q_address, q_kind, q_stride, q_head_stride = q
        padded = (head_dim + 2 * width - 1) // (2 * width) * (2 * width)
        most = (max_queries * group + column - 1) // column * column
        query = np.empty((padded, most), np.float32)
        scores = np.empty((TILE, most), np.float32)
        out = np.empty((most, padded), np.float32)
        key_rows, value_rows = np.empty((TILE, padded), np.float32), np.zeros((TILE, padded), np.float32)
        state = np.empty((3, most), np.float32)
        row = np.empty(padded, np.float32)
        positions, sees = np.zeros(most, np.int64), np.zeros((most, 2), np.int64)
        row_slopes = np.zeros(most, np.float32)
        places, key_places, weight_places = np.empty(TILE, np.int64), np.empty(TILE, np.int64), np.empty(most, np.int64)
        for key in range(TILE):
            key_places[key] = key_rows[key].ctypes.data
        unit = take_unit(counter)
        while unit < items.shape[0] * num_heads:
            item, head = items[unit // num_heads], unit % num_heads
            rows, table, stop = item[NUM_QUERIES] * group, tables[item[SEQ]], np.int64(item[STOP])
            wide = (rows + column - 1) // column * column
            begin_rows(item, head, group, np.int64(lengths[item[SEQ]]), window, causal, slopes, positions, sees,
                       row_slopes)
            panel = query.reshape(padded * most)[:padded * wide].reshape(padded, wide)
            tile = scores.reshape(TILE * most)[:TILE * wide].reshape(TILE, wide)
            panel[:] = _ZERO
            for r in range(rows):
                source = (q_address + (item[QUERY] + r // group) * q_stride
                          + (head * group + r % group) * q_head_stride)
                row[:] = _ZERO
                pack_row(width, FLOAT32, is_dot, q_kind, source, row.ctypes.data, 0, 1, head_dim)
                for d in range((head_dim + pair - 1) // pair):
                    panel[d, r] = row[d]
            for r in range(wide):
                weight_places[r] = tile[0, r:].ctypes.data
            out[:wide] = _ZERO
            state[0, :wide] = NEG_INF
            state[1, :wide] = _ZERO
            first = max(np.int64(item[START]), see_from(np.int64(item[POSITION]), window))
            while first < stop:
                last = min(first + TILE, stop)
                num_keys = last - first
                find_rows(table, keys, first, stop, places)
                for key in range(TILE):
                    places[key] += head * keys[3]
                    if not direct:
                        if key < num_keys:
                            widen_row(width, kind, places[key], key_rows[key].ctypes.data, head_dim)
                multiply_panels(width, is_dot, (places if direct else key_places).ctypes.data, 4, panel.ctypes.data,
                                wide * 4, (head_dim + pair - 1) // pair, tile.ctypes.data, wide * 4, num_keys, wide, False)
                hides = last > sees[0, 1] or first < sees[rows - 1, 0]
                _score_panel(tile, num_keys, first, positions, sees, row_slopes, factors, hides, has_cap, has_bias)
                if soften_panel(width, tile.ctypes.data, num_keys, wide, state[0].ctypes.data, state[1].ctypes.data,
                                state[2].ctypes.data):
                    for r in range(rows):
                        factor = state[2, r]
                        for d in range(padded):
                            out[r, d] *= factor
                find_rows(table, values, first, stop, places)
                for key in range(num_keys):
                    widen_row(width, kind, places[key] + head * values[3], value_rows[key].ctypes.data, head_dim)
                if hides and not _all_finite(value_rows[:num_keys]):
                    _weigh_seen(tile, value_rows, first, last, sees, out[:rows])
                    first = last
                    continue
                multiply_panels(width, 0, weight_places.ctypes.data, wide * 4, value_rows.ctypes.data, padded * 4,
                                num_keys, out.ctypes.data, padded * 4, rows, padded, True)
                first = last
            for r in range(rows):
                finish_row(width, FLOAT32, item, r, head, group, out[r], state[0, r], state[1, r], head_dim, factors[2],
                           sinks, outputs, parts, part_lses)
            unit = take_unit(counter)

    return prefill
