"""One attention call: which kernel serves which item, and the arrays as the addresses and strides that kernels take."""

import functools

import numpy as np
from numba import njit, types

from ..formats import FORMATS
from ..plan import NUM_QUERIES
from ..score import score_factors
from ..spec import NO_WINDOW
from .attend import load_attend
from .conversion import BFLOAT16, FLOAT8_E4M3, FLOAT32, KINDS, NO_TABLE, TABLES
from .decode import load_decode
from .machine import HAS_BFLOAT16_DOT, LANES
from .merge import load_merge
from .prefill import load_prefill
from .units import load_run

PANEL_ROWS = 32
"""Query rows (tokens x heads of a group) of an item from which on the kernel for many rows is the faster one."""

PANEL_PAIRS_PER_THREAD = 16
"""(item, kv head) pairs that a thread should find there: each of them is work for a long time."""

_BYTE = np.dtype(np.uint8)
_NOTHING = np.empty(0, np.float32)
_NO_LSE = np.empty((0, 0), np.float32)
_NO_PARTS = np.empty((0, 0, 0), np.float32), _NO_LSE

_TABLES = {KINDS[name]: TABLES.get(name, NO_TABLE) for name in FORMATS}
_KINDS = {f.dtype: KINDS[f.name] for f in FORMATS.values()}


def address_of(array):
    """The address of an array's first number."""
    return array.__array_interface__["data"][0]


def rows_of(array):
    """A [num_tokens, num_heads, head_dim] array as the kernels take it: address, kind, strides."""
    return address_of(array), _KINDS[array.dtype], array.strides[0], array.strides[1]


def pool_of(array):
    """One layer of the pool as the kernels take it: address, strides, block_size."""
    return address_of(array), *array.strides[:3], array.shape[1]


def _outputs_of(out, lse):
    """Where results go: `out` as `rows_of`, then address and strides of `lse`, or zeros."""
    return *rows_of(out), *((0, 0, 0) if lse is None else (address_of(lse), *lse.strides))


@njit([types.int64(types.Array(types.int32, 2, "C", readonly=True))], cache=True)
def _most_queries(items):
    """The most query tokens of an item."""
    most = 1
    for i in range(items.shape[0]):
        most = max(most, np.int64(items[i, NUM_QUERIES]))
    return most


@functools.lru_cache
def _factors(scale, k_scale, v_scale, soft_cap):
    return *score_factors(scale, k_scale, soft_cap), np.float32(v_scale)


def attend(q, keys, values, plan, options, out, lse):
    """Attend as a plan says; see `backend.Backend`.

    Parameters
    ----------
    q, keys, values : array
        As there.
    plan : Plan
        Tables, lengths and work.
    options : AttentionOptions
        What this call does.
    out, lse : array
        Filled.
    """
    work = plan.work
    num_q_heads, head_dim = q.shape[1:]
    group = num_q_heads // keys.shape[2]
    kind, q_kind = _KINDS[keys.dtype], _KINDS[q.dtype]
    is_dot = HAS_BFLOAT16_DOT and q_kind == kind == BFLOAT16
    features = options.soft_cap is not None, options.alibi_slopes is not None
    parts, part_lses = _NO_PARTS if work.num_parts == 0 else (
        np.empty((work.num_parts, num_q_heads, head_dim), np.float32), np.empty((work.num_parts, num_q_heads), np.float32))
    slopes = _NOTHING if options.alibi_slopes is None else options.alibi_slopes
    sinks = _NOTHING if options.sinks is None else options.sinks
    factors = _factors(options.scale, options.k_scale, options.v_scale, options.soft_cap)

    def run(kernel, items, most_queries):
        load_run()(
            kernel.address, q.view(_BYTE), q_kind, keys.view(_BYTE), values.view(_BYTE), out.view(_BYTE),
            _NO_LSE if lse is None else lse, (head_dim, most_queries), plan.block_tables, plan.lengths, items, factors,
            _TABLES[kind], slopes, sinks, parts, part_lses, NO_WINDOW if options.window is None else options.window,
            options.causal)

    most_queries = _most_queries(work.items)
    if LANES == 0 or (LANES < 16 and head_dim % 8):  # no vector code, or it would need masks
        run(load_attend(min(kind, FLOAT8_E4M3), *features), work.items, most_queries)
    elif most_queries * group < PANEL_ROWS:
        run(load_decode(LANES, kind, int(is_dot), *features), work.items, most_queries)
    else:
        many = work.items[:, NUM_QUERIES] * group >= PANEL_ROWS
        run(load_prefill(LANES, kind, int(is_dot and head_dim % 2 == 0), *features), work.items[many], most_queries)
        if not many.all():
            run(load_decode(LANES, kind, int(is_dot), *features), work.items[~many], -(-PANEL_ROWS // group))
    if work.num_parts:
        places = (address_of(parts), FLOAT32, parts.strides[0], parts.strides[0], parts.strides[1],
                  address_of(part_lses), part_lses.strides[0], part_lses.strides[0], part_lses.strides[1])
        load_merge()(places, _outputs_of(out, lse), work.merges, num_q_heads, head_dim, sinks)


def merge(outs, lses, out, lse):
    """Merge partials over disjoint keys; see `backend.Backend`.

    Parameters
    ----------
    outs, lses, out, lse : array
        As there.
    """
    num_parts, num_tokens, num_q_heads, head_dim = outs.shape
    merges = np.empty((num_tokens, 3), np.int32)
    merges[:, 0] = merges[:, 1] = np.arange(num_tokens)
    merges[:, 2] = num_parts
    part_stride, first_stride, head_stride = outs.strides[:3]
    lse_part_stride, lse_first_stride, lse_head_stride = lses.strides
    places = (address_of(outs), _KINDS[outs.dtype], first_stride, part_stride, head_stride,
              address_of(lses), lse_first_stride, lse_part_stride, lse_head_stride)
    load_merge()(places, _outputs_of(out, lse), merges, num_q_heads, head_dim, _NOTHING)
