"""Partials put together: the splits of a sequence, or the parts that a caller made.

One thread a (query token, head):

    top = the largest lse of its parts
    weights = exp(lse - top);  out = weights . parts / sum of the weights;  lse = top + log(sum)
    the sink, if there is one, joins the denominator now: once, whatever the number of splits
"""

import functools
import math

import numpy as np
from numba import njit, prange, types

from ..softmax import NEG_INF
from .conversion import read_query, write_query
from .machine import SOURCES
from .memory import load, store
from .units import add_sink, anchor_of

_ZERO = np.float32(0)
_ONE = np.float32(1)


@njit(error_model="numpy")
def _merge_row(parts, first, count, head, row, outputs, token, sink):
    """Merge `count` partial rows from `first` on into one row of the output; `row` is scratch [head_dim]."""
    address, kind, first_stride, part_stride, head_stride = parts[:5]
    lse_address, lse_first_stride, lse_part_stride, lse_head_stride = parts[5:]
    address += first * first_stride + head * head_stride
    lse_address += first * lse_first_stride + head * lse_head_stride
    top = NEG_INF
    for part in range(count):
        top = max(top, load(np.float32, lse_address + part * lse_part_stride, 0))
    base, total = anchor_of(top), _ZERO
    row[:] = _ZERO
    for part in range(count):
        weight = math.exp(load(np.float32, lse_address + part * lse_part_stride, 0) - base)
        total += weight
        if weight != _ZERO:  # a part without keys may hold anything
            for d in range(row.size):
                row[d] += weight * read_query(address + part * part_stride, d, kind)
    lse, factor = NEG_INF, _ZERO
    if total != _ZERO:
        lse, factor = base + math.log(total), _ONE
        if sink != NEG_INF:
            lse, factor = add_sink(lse, sink)
        factor /= total
    out_address, out_kind, out_stride, out_head_stride, out_lse, out_lse_stride, out_lse_head_stride = outputs
    for d in range(row.size):
        write_query(out_address + token * out_stride + head * out_head_stride, d, out_kind, row[d] * factor)
    if out_lse:
        store(out_lse + token * out_lse_stride + head * out_lse_head_stride, 0, lse)


_SIGNATURE = types.void(
    types.UniTuple(types.int64, 9),  # parts: address, kind, first, part and head stride; lses: address and strides
    types.UniTuple(types.int64, 7),  # outputs, as in the attention kernel
    types.Array(types.int32, 2, "C", readonly=True),  # merges [num_merges, 3]: query token, first part, parts
    types.int64,  # num_q_heads
    types.int64,  # head_dim
    types.Array(types.float32, 1, "A", readonly=True),  # sinks [num_q_heads] or empty
)


@functools.cache
def load_merge():
    """The kernel; parameters as in `_SIGNATURE`. A part's place is first · first stride + number · part stride."""
    sources = SOURCES

    @njit(_SIGNATURE, parallel=True, cache=True, nogil=True, error_model="numpy")
    def merge(parts, outputs, merges, num_heads, head_dim, sinks):
        sources  # see machine.SOURCES
        for pair in prange(merges.shape[0] * num_heads):
            entry, head = merges[pair // num_heads], pair % num_heads
            row = np.empty(head_dim, np.float32)
            sink = sinks[head] if sinks.size else NEG_INF
            _merge_row(parts, np.int64(entry[1]), np.int64(entry[2]), head, row, outputs, np.int64(entry[0]), sink)

    return merge
