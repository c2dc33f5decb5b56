"""Partial results over disjoint sets of keys, merged into the result over all of them."""

import functools
from dataclasses import dataclass

from numba import cuda

from ..softmax import NEG_INF
from .codecs import FLOAT32, ITEMSIZE
from .compile import Kernel
from .intrinsics import block_x, maximum, reciprocal, thread_index
from .memory import load_global, load_i32, store_global
from .registers import each, fill
from .warp import U32, U64, ZERO, add_sink, anchor, exp, log

NUM_WARPS = 4


@dataclass(frozen=True)
class MergeSpec:
    """What the merge kernel is compiled for.

    `part_code` and `out_code` are formats (`codecs`), `width` numbers (1, 2, 4) are loaded at once.
    """

    part_code: int
    out_code: int
    head_dim: int
    width: int
    has_sinks: bool


PARAMETERS = {
    "merges": U64, "num_rows": U32, "num_q_heads": U32,
    "outs": U64, "out_first": U64, "out_part": U64, "out_head": U32,
    "lses": U64, "lse_first": U64, "lse_part": U64, "lse_head": U32,
    "merged": U64, "merged_token": U32, "merged_head": U32, "merged_lse": U64, "sinks": U64,
}


@cuda.jit(device=True)
def add_scaled(total, number, factor):
    return total + number * factor


@cuda.jit(device=True)
def times(number, factor):
    return number * factor


def make_merge(spec):
    """The kernel for a `MergeSpec`.

    Grid: x = NUM_WARPS rows (a query head of a query token), a warp each. Parameters: `PARAMETERS`, strides in bytes.
    ``merges`` int32 [num_tokens, 3]: token, first part, number of parts; the part p of a token lies at
    ``outs + first * out_first + p * out_part``, its lse likewise::

        top = max(lse of the parts);   total = sum of exp(lse - top)
        out = sum of out * exp(lse - top) / total;   lse = top + log(total);   then the sink, once

    Invariant: a part without keys (lse -inf) weighs nothing; if all are empty, out is 0 and lse -inf.

    Source: arXiv:2205.14135, section 3.1; arXiv:2501.01005, section 2.2.
    """
    part_code, out_code, head_dim, width = spec.part_code, spec.out_code, spec.head_dim, spec.width
    has_sinks, part_itemsize, out_itemsize = spec.has_sinks, ITEMSIZE[spec.part_code], ITEMSIZE[spec.out_code]

    def merge(merges, num_rows, num_q_heads, outs, out_first, out_part, out_head, lses, lse_first, lse_part, lse_head,
              merged, merged_token, merged_head, merged_lse, sinks):
        thread = thread_index()
        lane = U32(thread % U32(32))
        row = U32(block_x() * U32(NUM_WARPS) + thread // U32(32))
        if row >= num_rows:
            return
        entry, head = merges + U64(U32(row // num_q_heads)) * U64(12), U32(row % num_q_heads)
        token, first, num_parts = U32(load_i32(entry)), U32(load_i32(entry + U64(4))), U32(load_i32(entry + U64(8)))
        part_lses = lses + U64(first) * lse_first + U64(head) * U64(lse_head)
        top, part = NEG_INF, U32(0)
        while part < num_parts:
            top = maximum(top, load_global(FLOAT32, 1, part_lses + U64(part) * lse_part)[0])
            part = U32(part + U32(1))
        base = anchor(top)
        total, part = ZERO, U32(0)
        while part < num_parts:
            total += exp(load_global(FLOAT32, 1, part_lses + U64(part) * lse_part)[0] - base)
            part = U32(part + U32(1))
        lse, factor = NEG_INF, ZERO
        if total != ZERO:
            lse, factor = base + log(total), reciprocal(total)
            if has_sinks:
                lse, share = add_sink(lse, load_global(FLOAT32, 1, sinks + U64(head) * U64(4))[0])
                factor = factor * share
        if lane == U32(0) and merged_lse != U64(0):
            at = U64(token) * U64(num_q_heads) + U64(head)
            store_global(FLOAT32, False, merged_lse + at * U64(4), (lse,))

        part_outs = outs + U64(first) * out_first + U64(head) * U64(out_head)
        target = merged + U64(token) * U64(merged_token) + U64(head) * U64(merged_head)
        at = U32(lane * U32(width))
        while at < U32(head_dim):
            numbers, part = fill(width, ZERO), U32(0)
            while part < num_parts:
                part_lse = load_global(FLOAT32, 1, part_lses + U64(part) * lse_part)[0]
                if part_lse != NEG_INF:  # an empty part's out is not even read
                    address = part_outs + U64(part) * out_part + U64(at * U32(part_itemsize))
                    numbers = each(add_scaled, numbers, load_global(part_code, width, address), exp(part_lse - base))
                part = U32(part + U32(1))
            store_global(out_code, False, target + U64(at * U32(out_itemsize)), each(times, numbers, factor))
            at = U32(at + U32(32 * width))

    return merge


@functools.cache
def merge_kernel(spec):
    """The `Kernel` of a `MergeSpec`."""
    return Kernel("merge", make_merge, spec, PARAMETERS, 32 * NUM_WARPS)
