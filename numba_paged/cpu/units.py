"""What the attention kernels share: their arguments, how threads run them, what a row sees, where it ends up."""

import functools
import math

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from ..plan import NUM_QUERIES, PART, PART_STRIDE, POSITION, QUERY, STOP
from ..score import LN2, LOG2E, visible_start, visible_stop
from ..softmax import NEG_INF, anchor, make_add_sink
from .conversion import FLOAT32
from .machine import SOURCES
from .memory import store
from .rows import write_row
from .threads import make_call, new_counter, num_threads

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LN2 = np.float32(LN2)
_LOG2E = np.float32(LOG2E)

see_from = njit(visible_start)
see_to = njit(visible_stop)
anchor_of = njit(anchor)
add_sink = njit(make_add_sink(math.exp, math.log), error_model="numpy")

_FLOATS = types.Array(types.float32, 1, "A", readonly=True)
_INT32 = types.Array(types.int32, 1, "A", readonly=True)


def _integers(count):
    return types.UniTuple(types.int64, count)


ARGUMENTS = (
    _integers(4),  # q: address, kind, token stride, head stride (all strides in bytes)
    _integers(5),  # keys: address, block stride, offset stride, head stride, block_size
    _integers(5),  # values
    _integers(7),  # outputs: out as q, lse address or 0, token stride, head stride
    types.Array(types.int32, 2, "A", readonly=True),  # tables [num_seqs, max_blocks]
    _INT32,  # lengths [num_seqs]
    types.Array(types.int32, 2, "C", readonly=True),  # items [num_items, 8]
    _integers(5),  # geometry: num_kv_heads, group, head_dim, the most query tokens of an item, kv heads of a unit
    types.UniTuple(types.float32, 3),  # factors: of the score before and after the cap, of the values
    types.Array(types.float32, 1, "C", readonly=True),  # numbers [256] of an 8-bit format
    _FLOATS,  # slopes [num_q_heads] or empty
    _FLOATS,  # sinks [num_q_heads] or empty
    types.Array(types.float32, 3, "C"),  # parts [num_parts, num_q_heads, head_dim]
    types.Array(types.float32, 2, "C"),  # part_lses [num_parts, num_q_heads]
    types.int64,  # window
    types.boolean,  # causal
    types.int64,  # address of the counter of the units that threads have taken
)


def _bytes(ndim):
    return types.Array(types.uint8, ndim, "A", readonly=True)


_keep, _call = make_call(ARGUMENTS)

_UNITS_PER_THREAD = 4
"""Units of work a thread should find, so that an unlucky one is made up for."""


@functools.cache
def load_run():
    """The function that runs a kernel, given by its address, on all threads.

    It takes arrays, as bytes, apart into the addresses and strides of ARGUMENTS, and hands those to the threads.
    """
    sources = SOURCES

    @njit(
        types.void(
            types.int64,  # address of the kernel
            _bytes(3), types.int64,  # q [num_tokens, num_q_heads, bytes], its kind
            _bytes(4), _bytes(4),  # keys, values [num_blocks, block_size, num_kv_heads, bytes]
            _bytes(3), types.Array(types.float32, 2, "A"),  # out as q, lse [num_tokens, num_q_heads] or empty
            types.UniTuple(types.int64, 2),  # head_dim, the most query tokens of an item
            *ARGUMENTS[4:7], *ARGUMENTS[8:-1],
        ),
        parallel=True, cache=True, nogil=True,
    )
    def run(worker, q, q_kind, keys, values, out, lse, sizes, tables, lengths, items, factors, numbers, slopes, sinks,
            parts, part_lses, window, causal):
        sources  # see machine.SOURCES
        head_dim, most_queries = sizes
        num_heads, threads = keys.shape[2], num_threads()
        ranges = min(num_heads, max(1, _UNITS_PER_THREAD * threads // max(1, items.shape[0])))
        geometry = num_heads, q.shape[1] // num_heads, head_dim, most_queries, (num_heads + ranges - 1) // ranges
        queries = np.int64(q.ctypes.data), q_kind, q.strides[0], q.strides[1]
        key_pool = np.int64(keys.ctypes.data), keys.strides[0], keys.strides[1], keys.strides[2], keys.shape[1]
        value_pool = np.int64(values.ctypes.data), values.strides[0], values.strides[1], values.strides[2], keys.shape[1]
        lse_address = np.int64(lse.ctypes.data) if lse.size else 0
        outputs = (np.int64(out.ctypes.data), q_kind, out.strides[0], out.strides[1], lse_address, lse.strides[0],
                   lse.strides[1])
        kept = _keep((queries, key_pool, value_pool, outputs, tables, lengths, items, geometry, factors, numbers, slopes,
                      sinks, parts, part_lses, window, causal, new_counter()))
        for _ in prange(threads):
            _call(worker, kept)

    return run


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


@njit(error_model="numpy")
def see_rows(item, head, group, length, window, causal, slopes, positions, sees, row_slopes):
    """What each query row of an item sees, and its bias, for one kv head."""
    for row in range(item[NUM_QUERIES] * group):
        at = np.int64(item[POSITION]) + row // group
        positions[row] = at
        sees[row, 0] = see_from(at, window)
        sees[row, 1] = min(np.int64(item[STOP]), see_to(at, length, causal))
        row_slopes[row] = slopes[head * group + row % group] * _LOG2E if slopes.size else _ZERO


@njit(error_model="numpy")
def common_keys(sees, rows, first, last):
    """The keys of the tile [first, last) that every one of the rows sees, counted from `first`."""
    low, high = first, last
    for row in range(rows):
        low, high = max(low, sees[row, 0]), min(high, sees[row, 1])
    return low - first, max(low, high) - first


@njit(error_model="numpy")
def close_row(maximum, total, sink, value_scale):
    """What a row has come to: its lse (natural logarithm), and the factor that its sum of values still lacks."""
    if total == _ZERO:  # no key was visible
        return NEG_INF, _ZERO
    lse, factor = anchor_of(maximum) * _LN2 + math.log(total), _ONE
    if sink != NEG_INF:
        lse, factor = add_sink(lse, sink)
    return lse, factor * (value_scale / total)


def finish_row(item, row, head, group, out, maximum, total, head_dim, value_scale, sinks, outputs, parts, part_lses,
               width, order):
    """Finish a row: to the output, or to the partials if the sequence was split.

    `width` and `order`, compile-time constants, are as for `rows.write_row`.
    """
    raise NotImplementedError("compiled code only")


@overload(finish_row, prefer_literal=True, jit_options={"error_model": "numpy"})
def _finish_row_of(item, row, head, group, out, maximum, total, head_dim, value_scale, sinks, outputs, parts, part_lses,
                   width, order):
    if not hasattr(width, "literal_value"):
        return None
    lanes, kind_of_order = width.literal_value, order.literal_value

    def implementation(item, row, head, group, out, maximum, total, head_dim, value_scale, sinks, outputs, parts,
                       part_lses, width, order):
        address, kind, stride, head_stride, lse_address, lse_stride, lse_head_stride = outputs
        token, q_head = row // group, head * group + row % group
        if item[PART] >= 0:
            part = item[PART] + token * item[PART_STRIDE]
            lse, factor = close_row(maximum, total, NEG_INF, value_scale)
            part_lses[part, q_head] = lse
            write_row(lanes, kind_of_order, FLOAT32, out.ctypes.data, parts[part, q_head].ctypes.data, factor, head_dim)
        else:
            lse, factor = close_row(maximum, total, sinks[q_head] if sinks.size else NEG_INF, value_scale)
            token += item[QUERY]
            write_row(lanes, kind_of_order, kind, out.ctypes.data, address + token * stride + q_head * head_stride, factor,
                      head_dim)
            if lse_address:
                store(lse_address + token * lse_stride + q_head * lse_head_stride, 0, lse)

    return implementation
