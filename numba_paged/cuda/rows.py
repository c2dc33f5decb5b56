"""Query rows on their way in and out: staged in shared memory before the loop, merged and written after it.

A row is one query head of one query token; rows are numbered token by token, head by head. A warp's *state* of its rows
is what the loop leaves: per row a maximum (`top`), a sum of weights (`total`) and weighted values (`sums`).
"""

from numba import cuda
from numba.cuda import types

from ..softmax import NEG_INF
from .codecs import FLOAT32, ITEMSIZE
from .intrinsics import exp2, log2, maximum, reciprocal, sync_block
from .memory import load_global, load_i32, load_shared, store_global, store_shared
from .registers import store_runs, sum_over_lanes
from .warp import LN2, U32, U64, ZERO, add_sink, anchor

OUTPUTS = {
    "out": types.uint64, "out_token": types.uint32, "out_head": types.uint32, "lse": types.uint64,
    "part_out": types.uint64, "part_lse": types.uint64, "num_q_heads": types.uint32, "v_scale": types.float32,
    "sinks": types.uint64,
}
"""Parameters of a kernel that say where results go, in the order in which `finish` takes them."""


def make_query_tokens(spec):
    """``first_of(items, num_items, query)``, and what follows from it for an item's n-th query token.

    ``token_of(first, n)`` is its number in q and out, ``position_of(first, position, n)`` its position in its sequence,
    ``part_of(first, part, part_step, n)`` its row in the partial buffers. Gathered ones are listed behind the items
    (`plan.Work.shared_tokens`), and `first` (uint64) is the address of the item's first one there; else `first` is
    its number.
    """
    if spec.gathered:

        @cuda.jit(device=True)
        def first_of(items, num_items, query):
            return items + U64(num_items) * U64(32) + U64(query) * U64(16)

        @cuda.jit(device=True)
        def token_of(first, n):
            return U32(load_i32(first + U64(n) * U64(16)))

        @cuda.jit(device=True)
        def position_of(first, position, n):
            return load_i32(first + U64(n) * U64(16) + U64(4))

        @cuda.jit(device=True)
        def part_of(first, part, part_step, n):
            return U32(load_i32(first + U64(n) * U64(16) + U64(8)) + part)

    else:

        @cuda.jit(device=True)
        def first_of(items, num_items, query):
            return U64(query)

        @cuda.jit(device=True)
        def token_of(first, n):
            return U32(U32(first) + n)

        @cuda.jit(device=True)
        def position_of(first, position, n):
            return types.int32(position + types.int32(n))

        @cuda.jit(device=True)
        def part_of(first, part, part_step, n):
            return U32(U32(part) + n * U32(part_step))

    return first_of, token_of, position_of, part_of


def sums_row(layout):
    """Bytes of a row's float32 sums in shared memory."""
    return 4 * layout.dim_lanes * layout.units * layout.width


def state_bytes(layout, num_rows):
    """Shared memory of the states of `num_rows` rows in all: sums, and per row top, total and factor."""
    return num_rows * (sums_row(layout) + 12)


def make_stage_queries(spec, layout, num_rows, row_heads, num_threads):
    """``stage_queries(target, q, ...)``: rows as float32 into shared memory.

    Row r is the head ``head + (first_row + r) % row_heads`` of the item's token ``(first_row + r) // row_heads``; past the
    head's end and from row `num_valid` on there are zeros.
    """
    _, token_of, _, _ = make_query_tokens(spec)
    code, head_dim, width = spec.query_code, spec.head_dim, layout.query_row // 4
    itemsize = ITEMSIZE[code]

    @cuda.jit(device=True)
    def stage_queries(target, q, token_bytes, head_bytes, token, head, first_row, num_valid, thread):
        index = thread
        while index < U32(num_rows * width):
            row, at = U32(index // U32(width)), U32(index % U32(width))
            number = (ZERO,)
            if row < num_valid and at < U32(head_dim):
                row = U32(first_row + row)
                address = q + U64(token_of(token, U32(row // U32(row_heads)))) * U64(token_bytes)
                address += U64(U32(head + row % U32(row_heads))) * U64(head_bytes) + U64(at * U32(itemsize))
                number = load_global(code, 1, address)
            store_shared(FLOAT32, False, U32(target + index * U32(4)), number)
            index = U32(index + U32(num_threads))

    return stage_queries


def make_keep_state(layout, num_rows, num_all):
    """``keep_state(states, first, lane, top, total, sums)``: a warp's rows, summed over its lanes, into shared memory.

    They are the rows `first` and following of `num_all`.
    """
    row_bytes, run = sums_row(layout), 4 * layout.width
    distance = layout.dim_lanes * run
    dim_lanes, width, units = layout.dim_lanes, layout.width, layout.units
    tokens = layout.tokens

    @cuda.jit(device=True)
    def keep_state(states, first, lane, top, total, sums):
        total, sums = sum_over_lanes(1, tokens, total), sum_over_lanes(dim_lanes, 32, sums)
        tops = U32(states + U32(num_all * row_bytes) + first * U32(4))
        if lane == U32(0):
            store_runs(1, num_rows, 4, 0, tops, top)
            store_runs(1, num_rows, 4, 0, U32(tops + U32(4 * num_all)), total)
        if lane < U32(dim_lanes):
            store_runs(width, units, distance, row_bytes, U32(states + first * U32(row_bytes) + lane * U32(run)), sums)

    return keep_state


@cuda.jit(device=True)
def shared_number(address):
    return load_shared(FLOAT32, 1, address)[0]


def make_merge_states(spec, num_rows, num_states, sums_bytes):
    """``merge_states(states, row, is_part, ...) -> lse``: put the states of a row together.

    Leaves for each state what its sums are to be multiplied with. A row without a visible key has lse -inf, factors 0.
    """
    has_sinks = spec.has_sinks
    tops_at, step = num_states * num_rows * sums_bytes, 4 * num_rows
    totals_at = tops_at + num_states * step
    factors_at = totals_at + num_states * step

    @cuda.jit(device=True)
    def merge_states(states, row, is_part, v_scale, sink):
        at = U32(states + row * U32(4))
        best = NEG_INF
        for i in range(num_states):
            best = maximum(best, shared_number(U32(at + U32(tops_at + i * step))))
        base = anchor(best)
        whole = ZERO
        for i in range(num_states):
            share = exp2(shared_number(U32(at + U32(tops_at + i * step))) - base)
            whole += share * shared_number(U32(at + U32(totals_at + i * step)))
        lse, factor = NEG_INF, ZERO
        if whole != ZERO:
            lse, factor = (base + log2(whole)) * LN2, v_scale * reciprocal(whole)
            if has_sinks and not is_part:
                lse, share = add_sink(lse, load_global(FLOAT32, 1, sink)[0])
                factor = factor * share
        for i in range(num_states):
            share = exp2(shared_number(U32(at + U32(tops_at + i * step))) - base)
            store_shared(FLOAT32, False, U32(at + U32(factors_at + i * step)), (factor * share,))
        return lse

    return merge_states


def make_finish(spec, layout, num_rows, row_heads, num_states, num_threads):
    """``finish(states, ...)``: merge `num_states` states of `num_rows` rows, write out and lse, or partials of them.

    Rows are numbered as in `make_stage_queries`. A partial goes to row ``part_of(...)`` of the partial buffers, unless
    part is -1. The block's threads must have met after the last `keep_state`.
    """
    code, head_dim, itemsize = spec.query_code, spec.head_dim, ITEMSIZE[spec.query_code]
    sums_bytes = sums_row(layout)
    merge_states = make_merge_states(spec, num_rows, num_states, sums_bytes)
    factors_at = num_states * num_rows * (sums_bytes + 8)

    _, token_of, _, part_of = make_query_tokens(spec)

    @cuda.jit(device=True)
    def part_number(token, part, part_step, row_token, num_q_heads, head):
        return U64(part_of(token, part, part_step, row_token)) * U64(num_q_heads) + U64(head)

    @cuda.jit(device=True)
    def finish(states, token, head, first_row, num_valid, part, part_step, thread, out, out_token, out_head, lse,
               part_out, part_lse, num_q_heads, v_scale, sinks):
        is_part = part >= 0
        if thread < num_valid:
            row = U32(first_row + thread)
            row_token, row_head = U32(row // U32(row_heads)), U32(head + row % U32(row_heads))
            row_lse = merge_states(states, thread, is_part, v_scale, sinks + U64(row_head) * U64(4))
            if is_part:
                number = part_number(token, part, part_step, row_token, num_q_heads, row_head)
                store_global(FLOAT32, False, part_lse + number * U64(4), (row_lse,))
            elif lse != U64(0):
                number = U64(token_of(token, row_token)) * U64(num_q_heads) + U64(row_head)
                store_global(FLOAT32, False, lse + number * U64(4), (row_lse,))
        sync_block()
        index = thread
        while index < U32(num_valid * U32(head_dim)):
            row, at = U32(index // U32(head_dim)), U32(index % U32(head_dim))
            number = ZERO
            for i in range(num_states):
                place = U32(row + U32(i * num_rows))
                factor = shared_number(U32(states + U32(factors_at) + place * U32(4)))
                number += factor * shared_number(U32(states + place * U32(sums_bytes) + at * U32(4)))
            row = U32(first_row + row)
            row_token, row_head = U32(row // U32(row_heads)), U32(head + row % U32(row_heads))
            if is_part:
                place = part_number(token, part, part_step, row_token, num_q_heads, row_head) * U64(4 * head_dim)
                store_global(FLOAT32, False, part_out + place + U64(at * U32(4)), (number,))
            else:
                address = out + U64(token_of(token, row_token)) * U64(out_token) + U64(row_head) * U64(out_head)
                store_global(code, False, address + U64(at * U32(itemsize)), (number,))
            index = U32(index + U32(num_threads))

    return finish
