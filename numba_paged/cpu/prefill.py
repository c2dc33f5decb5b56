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
from .conversion import FLOAT32
from .elementary import tanh
from .machine import SOURCES
from .memory import as_bits
from .panels import multiply_panels, panel_vectors, soften_panel, widen_row
from .rows import pack_row
from .threads import take_unit
from .units import ARGUMENTS, find_rows, finish_row, see_from, see_rows

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


def _read_queries(panel, row, item, head, q, group, head_dim, width, is_dot):
    """The query rows of an item for one kv head, transposed: a row a column (or, for the dot, pairs of numbers)."""
    raise NotImplementedError("compiled code only")


@overload(_read_queries, prefer_literal=True, jit_options={"error_model": "numpy"})
def _read_queries_of(panel, row, item, head, q, group, head_dim, width, is_dot):
    if not hasattr(width, "literal_value"):
        return None
    lanes, dot = width.literal_value, is_dot.literal_value

    def implementation(panel, row, item, head, q, group, head_dim, width, is_dot):
        address, kind, stride, head_stride = q
        panel[:] = _ZERO
        row[:] = _ZERO
        for r in range(item[NUM_QUERIES] * group):
            token, q_head = item[QUERY] + r // group, head * group + r % group
            pack_row(lanes, FLOAT32, dot, kind, address + token * stride + q_head * head_stride, row.ctypes.data, 0, 1,
                     head_dim)
            for d in range(panel.shape[0]):
                panel[d, r] = row[d]

    return implementation


def _dot_panel(tile, num_keys, panel, places, offset, key_rows, head_dim, width, kind, is_dot):
    """Dot products [keys, rows] of the keys whose rows are at `places` + `offset` with all query rows."""
    raise NotImplementedError("compiled code only")


@overload(_dot_panel, prefer_literal=True, jit_options={"error_model": "numpy"})
def _dot_panel_of(tile, num_keys, panel, places, offset, key_rows, head_dim, width, kind, is_dot):
    if not hasattr(width, "literal_value"):
        return None
    lanes, pool, dot = width.literal_value, kind.literal_value, is_dot.literal_value

    def implementation(tile, num_keys, panel, places, offset, key_rows, head_dim, width, kind, is_dot):
        for key in range(places.size):
            places[key] += offset
            if not dot:
                widen_row(lanes, pool, places[key], key_rows[key].ctypes.data, head_dim)
                places[key] = key_rows[key].ctypes.data
        stride = tile.shape[1] * 4
        multiply_panels(lanes, dot, places.ctypes.data, 4, panel.ctypes.data, stride, panel.shape[0], tile.ctypes.data,
                        stride, num_keys, tile.shape[1], False)

    return implementation


def _weigh_panel(out, tile, first, last, sees, hides, places, offset, value_rows, weight_places, head_dim, width, kind):
    """out += weights^T @ values, the values' rows at `places` + `offset`."""
    raise NotImplementedError("compiled code only")


@overload(_weigh_panel, prefer_literal=True, jit_options={"error_model": "numpy"})
def _weigh_panel_of(out, tile, first, last, sees, hides, places, offset, value_rows, weight_places, head_dim, width,
                    kind):
    if not hasattr(width, "literal_value"):
        return None
    lanes, pool = width.literal_value, kind.literal_value

    def implementation(out, tile, first, last, sees, hides, places, offset, value_rows, weight_places, head_dim, width,
                       kind):
        num_keys, stride = last - first, out.shape[1] * 4
        for key in range(num_keys):
            widen_row(lanes, pool, places[key] + offset, value_rows[key].ctypes.data, head_dim)
        if hides and not _all_finite(value_rows[:num_keys]):
            _weigh_seen(tile, value_rows, first, last, sees, out)
        else:
            multiply_panels(lanes, 0, weight_places.ctypes.data, tile.shape[1] * 4, value_rows.ctypes.data, stride,
                            num_keys, out.ctypes.data, stride, out.shape[0], out.shape[1], True)

    return implementation


@njit
def _rescale(out, factors):
    for row in range(out.shape[0]):
        factor = factors[row]
        for d in range(out.shape[1]):
            out[row, d] *= factor


@njit
def _make_scratch(rows, padded):
    """What a thread needs, once: query panel, scores, out, a tile of keys, one of values, the softmax's state."""
    return (np.empty(rows * padded, np.float32), np.empty(rows * TILE, np.float32), np.empty((rows, padded), np.float32),
            np.empty((TILE, padded), np.float32), np.zeros((TILE, padded), np.float32), np.empty((3, rows), np.float32))


@functools.cache
def load_prefill(width, kind, is_dot, has_cap, has_bias):
    """The kernel for a vector width, a format of the pool, the bfloat16 dot and the features in use."""
    sources = SOURCES
    column = width * panel_vectors(width)
    pair = 2 if is_dot else 1

    @cfunc(types.void(*ARGUMENTS), cache=True, error_model="numpy")
    def prefill(q, keys, values, outputs, tables, lengths, items, geometry, factors, numbers,
                slopes, sinks, parts, part_lses, window, causal, counter):
        sources  # see machine.SOURCES
        num_heads, group, head_dim, max_queries, _ = geometry
        padded = (head_dim + 2 * width - 1) // (2 * width) * (2 * width)
        most = (max_queries * group + column - 1) // column * column
        query, scores, out, key_rows, value_rows, state = _make_scratch(most, padded)
        row, row_slopes = np.empty(padded, np.float32), np.zeros(most, np.float32)
        positions, sees = np.zeros(most, np.int64), np.zeros((most, 2), np.int64)
        places, weight_places = np.empty(TILE, np.int64), np.empty(most, np.int64)
        depth = (head_dim + pair - 1) // pair
        unit = take_unit(counter)
        while unit < items.shape[0] * num_heads:
            item, head = items[unit // num_heads], unit % num_heads
            rows, table, stop = item[NUM_QUERIES] * group, tables[item[SEQ]], np.int64(item[STOP])
            wide = (rows + column - 1) // column * column
            panel, tile = query[:depth * wide].reshape(depth, wide), scores[:TILE * wide].reshape(TILE, wide)
            see_rows(item, head, group, np.int64(lengths[item[SEQ]]), window, causal, slopes, positions, sees, row_slopes)
            _read_queries(panel, row, item, head, q, group, head_dim, width, is_dot)
            for r in range(wide):
                weight_places[r] = tile[0, r:].ctypes.data
            out[:wide], state[0, :wide], state[1, :wide] = _ZERO, NEG_INF, _ZERO
            first = max(np.int64(item[START]), see_from(np.int64(item[POSITION]), window))
            while first < stop:
                last = min(first + TILE, stop)
                hides = last > sees[0, 1] or first < sees[rows - 1, 0]
                find_rows(table, keys, first, stop, places)
                _dot_panel(tile, last - first, panel, places, head * keys[3], key_rows, head_dim, width, kind, is_dot)
                _score_panel(tile, last - first, first, positions, sees, row_slopes, factors, hides, has_cap, has_bias)
                if soften_panel(width, tile.ctypes.data, last - first, wide, state[0].ctypes.data, state[1].ctypes.data,
                                state[2].ctypes.data):
                    _rescale(out[:rows], state[2])
                find_rows(table, values, first, stop, places)
                _weigh_panel(out[:rows], tile, first, last, sees, hides, places, head * values[3], value_rows,
                             weight_places, head_dim, width, kind)
                first = last
            for r in range(rows):
                finish_row(item, r, head, group, out[r], state[0, r], state[1, r], head_dim, factors[2], sinks, outputs,
                           parts, part_lses, width, FLOAT32)
            unit = take_unit(counter)

    return prefill
