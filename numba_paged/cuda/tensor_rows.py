"""Query rows of the tensor-core kernels: staged as 16-bit operands, bounded, folded into an online softmax.

A row is one query head of one query token of an item; rows are numbered token by token, head by head. Where an element
of a fragment belongs to the row `owners[element]` of the lane, per-row numbers are spread over it (`make_spread`), and
elements are collected per row (`make_collect`).

The weights enter their product in 16 bits. In float16 they are kept times 2**14, so that all down to 2**-28 of the
largest keep their precision; float32 sums hold what comes of it, and so does the maximum that is kept with them.
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from .. import score
from .codecs import BFLOAT16, FLOAT16, FLOAT32, ITEMSIZE
from .intrinsics import F32, I32, SHARED, block_x, blocks_x, call_llvm, f32, fma, literal, maximum, u32
from .memory import load_global, load_i32, load_shared, store_shared, store_words
from .registers import count_up, each, max_over_lanes
from .rows import make_query_tokens
from .tensor import TILE, make_collect, make_spread, operand_code, place_in_operand
from .warp import LOG2E, NEG_INF, ZERO, anchor, tanh, visible_start, weight

U32, U64, SIGNED = types.uint32, types.uint64, types.int32
ONE = np.float32(1)


@cuda.jit(device=True)
def read_item(items, number):
    """(seq, query, num_queries, start, stop, part, part_stride, position) of an item, see `plan.Work`; int32."""
    item = items + U64(number) * U64(32)
    return (load_i32(item), load_i32(item + U64(4)), load_i32(item + U64(8)), load_i32(item + U64(12)),
            load_i32(item + U64(16)), load_i32(item + U64(20)), load_i32(item + U64(24)), load_i32(item + U64(28)))


def make_block_rows(group, num_rows):
    """``block_rows(num_queries, num_q_heads) -> (kv head, first row, rows)`` of a block, by its x in the grid.

    x counts kv heads, and of each the runs of `num_rows` of the item's rows; past its last row there are 0 rows.
    """

    @cuda.jit(device=True)
    def block_rows(num_queries, num_q_heads):
        blocks = U32(U32(blocks_x() * U32(group)) // num_q_heads)
        first = SIGNED(block_x() % blocks * U32(num_rows))
        count = max(SIGNED(0), min(SIGNED(num_rows), SIGNED(num_queries * SIGNED(group) - first)))
        return U32(block_x() // blocks), U32(first), U32(count)

    return block_rows


def needs_factors(spec):
    """Whether queries have a wider range than their operands: bfloat16 against a pool of float16 or float8."""
    return spec.query_code == BFLOAT16 and operand_code(spec.kv_code) == FLOAT16


def headroom(kv_code):
    """The binary logarithm of what the weights are multiplied with."""
    return np.float32(14 if operand_code(kv_code) == FLOAT16 else 0)


@intrinsic
def range_factor(typingctx, largest):
    """(factor, 1 / factor), a power of two that brings `largest` into [2**14, 2**15)."""

    def codegen(context, builder, sig, args):
        exponent = builder.lshr(builder.bitcast(args[0], I32), I32(23))
        exponent = builder.select(builder.icmp_unsigned("<", exponent, I32(15)), I32(15), exponent)
        fields = builder.sub(I32(268), exponent), builder.sub(exponent, I32(14))
        return cgutils.pack_array(builder, [builder.bitcast(builder.shl(x, I32(23)), F32) for x in fields])

    return types.UniTuple(f32, 2)(f32), codegen


@intrinsic
def size(typingctx, x):
    """|x|."""
    return f32(f32), lambda context, builder, sig, args: call_llvm(builder, "llvm.nvvm.fabs.f", F32, args)


def make_stage_rows(spec, num_rows, num_warps, pitch):
    """``stage_rows(target, factors, q, ...)``: query rows as 16-bit operands into shared memory, a warp a row.

    Row r is the head ``head + (first_row + r) % group`` of the item's token ``(first_row + r) // group``; from row
    `num_valid` on there are zeros. Where bfloat16 queries meet float16 operands, each row is multiplied with a power of
    two that makes its largest number fill the range; what to multiply scores with lies at ``factors + 4 * row``.
    """
    code, operand, head_dim, group = spec.query_code, operand_code(spec.kv_code), spec.head_dim, spec.group
    kv_code, itemsize, scaled = spec.kv_code, ITEMSIZE[spec.query_code], needs_factors(spec)
    place = cuda.jit(device=True)(place_in_operand) if ITEMSIZE[kv_code] == 1 else None
    _, token_of, _, _ = make_query_tokens(spec)

    @cuda.jit(device=True)
    def row_factor(factors, source, row, is_valid, lane):
        largest, at = ZERO, lane
        while is_valid and at < U32(head_dim):
            largest = maximum(largest, size(load_global(code, 1, source + U64(at * U32(itemsize)))[0]))
            at = U32(at + U32(32))
        (largest,) = max_over_lanes(1, 32, (largest,))
        factor, inverse = range_factor(largest)
        if lane == U32(0):
            store_shared(FLOAT32, False, U32(factors + row * U32(4)), (inverse,))
        return factor

    @cuda.jit(device=True)
    def stage_rows(target, factors, q, token_bytes, head_bytes, token, head, first_row, num_valid, warp, lane):
        row = warp
        while row < U32(num_rows):
            number = U32(first_row + row)
            source = q + U64(token_of(token, U32(number // U32(group)))) * U64(token_bytes)
            source = source + U64(U32(head + number % U32(group))) * U64(head_bytes)
            is_valid, factor = row < num_valid, ONE
            if scaled:
                factor = row_factor(factors, source, row, is_valid, lane)
            at = lane
            while at < U32(head_dim):
                x = ZERO
                if is_valid:
                    x = load_global(code, 1, source + U64(at * U32(itemsize)))[0]
                    if scaled:
                        x = x * factor
                column = at
                if place is not None:
                    column = place(kv_code, at)
                store_shared(operand, False, U32(target + row * U32(pitch) + U32(column) * U32(2)), (x,))
                at = U32(at + U32(32))
            row = U32(row + U32(num_warps))

    return stage_rows


def make_row_facts(spec, owners):
    """``row_facts(rows, ...)`` and ``limits(first_row, last_row, ...)``: what holds for rows, counted from the item's first.

    The facts of the lane's `rows`, spread over the elements that they own: what to multiply products with, slope (base
    2), position, and the visible positions [low, high). The limits of a run of rows, all within [start, stop): what one
    of them sees, and what each of them sees: (low of one, high of one, low of all, high of all).
    """
    group, has_window, has_bias, causal = spec.group, spec.has_window, spec.has_bias, spec.causal
    scaled, spread = needs_factors(spec), make_spread(owners)
    _, _, token_position, _ = make_query_tokens(spec)

    @cuda.jit(device=True)
    def position_of(row, token, position):
        return token_position(token, position, U32(row // U32(group)))

    @cuda.jit(device=True)
    def low_of(position, start, window):
        if has_window:
            return U32(max(SIGNED(start), SIGNED(visible_start(position, window))))
        return start

    @cuda.jit(device=True)
    def high_of(position, stop):
        if causal:
            return U32(max(SIGNED(0), min(SIGNED(stop), SIGNED(position + SIGNED(1)))))
        return stop

    @cuda.jit(device=True)
    def slope_of(row, slopes, head):
        return load_global(FLOAT32, 1, slopes + U64(U32(head + row % U32(group))) * U64(4))[0] * LOG2E

    @cuda.jit(device=True)
    def inner_of(row, first_row, factors, inner):
        if scaled:
            return inner * load_shared(FLOAT32, 1, U32(factors + U32(row - first_row) * U32(4)))[0]
        return inner

    @cuda.jit(device=True)
    def row_facts(rows, first_row, token, position, start, stop, window, factors, inner, slopes, head):
        positions = each(position_of, rows, token, position)
        slope = spread(each(slope_of, rows, slopes, head)) if has_bias else ZERO
        low, high = spread(each(low_of, positions, start, window)), spread(each(high_of, positions, stop))
        return spread(each(inner_of, rows, first_row, factors, inner)), slope, spread(positions), low, high

    @cuda.jit(device=True)
    def limits(first_row, last_row, token, position, start, stop, window):
        earliest, latest = position_of(first_row, token, position), position_of(last_row, token, position)
        return low_of(earliest, start, window), high_of(latest, stop), low_of(latest, start, window), high_of(earliest, stop)

    return row_facts, limits


@cuda.jit(device=True)
def distance_of(key, position):
    return f32(SIGNED(key) - position)


@cuda.jit(device=True)
def unless_outside(score, key, low, high):
    return score if low <= key < high else NEG_INF


def make_finish_scores(spec, token_of, num_scores):
    """``finish_scores(dots, masked, base, ...)``: scores in base 2 of products, hidden ones -inf if they are `masked`.

    Element e of the lane is of the token ``token_of(e, base)``; `facts` are those of
    `make_row_facts`.
    """
    has_bias = spec.has_bias
    score_of = cuda.jit(device=True)(score.make_score(spec.has_cap, has_bias, tanh))

    @cuda.jit(device=True)
    def finish_scores(dots, masked, base, outer, facts):
        factor, slope, positions, low, high = facts
        if has_bias:
            distances = each(distance_of, each(token_of, count_up(num_scores), base), positions)
            scores = each(score_of, dots, factor, outer, slope, distances)
        else:
            scores = each(score_of, dots, factor, outer, ZERO, ZERO)
        if masked:
            scores = each(unless_outside, scores, each(token_of, count_up(num_scores), base), low, high)
        return scores

    return finish_scores


@cuda.jit(device=True)
def less(x, y):
    return x - y


def make_fold(spec, owners, first, last):
    """``fold(top, total, scores) -> (top, total, decay, weights)``: one step of the online softmax of a lane's rows.

    A row's scores are with the lanes that differ in the bits from `first` to below `last`; `total` stays the lane's own.
    """
    spread, row_max, row_sum = make_spread(owners), make_collect(owners, "maximum"), make_collect(owners, "add")
    room = headroom(spec.kv_code)
    has_room = bool(room)

    @cuda.jit(device=True)
    def fold(top, total, scores):
        top_now = each(maximum, top, max_over_lanes(first, last, row_max(scores)))
        base = each(anchor, top_now)
        decay = each(weight, top, base)
        if has_room:
            base = each(less, base, room)
        weights = each(weight, scores, spread(base))
        return top_now, each(fma, total, decay, row_sum(weights)), decay, weights

    return fold


@dataclass(frozen=True)
class StateLayout:
    """How a row's float32 sums lie in shared memory for `rows.make_finish`: one run, with room against bank conflicts."""

    width: int
    dim_lanes: int = 1
    units: int = 1


@intrinsic
def store_columns(typingctx, code, head_dim, row_bytes, address, sums):
    """Sums of `add_values_by_weights` into shared memory, a query a row; for lane 4 r + c, address is of row 2 c.

    Float8 fragments have an even number of the head and its neighbour in a lane: stored together, at ``address + 8 r``;
    else numbers r and r + 8 lie at ``address + 4 r``.
    """
    code_, head_dim_, row_bytes_ = literal(code), literal(head_dim), literal(row_bytes)
    if None in (code_, head_dim_, row_bytes_):
        return None
    num_tiles = sums.count // (4 * (head_dim_ // TILE))

    def codegen(context, builder, sig, args):
        words = [builder.bitcast(x, I32) for x in cgutils.unpack_tuple(builder, args[4])]
        for i in range(0, len(words), 4):
            step, tile = divmod(i // 4, num_tiles)
            for column in range(2):
                at = (8 * tile + column) * row_bytes_ + 64 * step
                pair = [words[i + column], words[i + column + 2]]
                if ITEMSIZE[code_] == 1:
                    store_words(builder, SHARED, builder.add(args[3], I32(at)), pair, 8)
                else:
                    for half in range(2):
                        store_words(builder, SHARED, builder.add(args[3], I32(at + 32 * half)), pair[half:], 4)
        return context.get_dummy_value()

    return types.void(code, head_dim, row_bytes, u32, sums), codegen


@intrinsic
def store_rows(typingctx, code, head_dim, row_bytes, address, sums):
    """Sums of `add_weights_by_values` into shared memory; for lane 4 r + c, address is of row r, number 2 c or, of
    float8, 4 c."""
    code_, head_dim_, row_bytes_ = literal(code), literal(head_dim), literal(row_bytes)
    if None in (code_, head_dim_, row_bytes_):
        return None

    def codegen(context, builder, sig, args):
        words = [builder.bitcast(x, I32) for x in cgutils.unpack_tuple(builder, args[4])]
        for step in range(head_dim_ // TILE):
            for row in range(2):
                even, odd = (words[8 * step + 4 * half + 2 * row :][:2] for half in range(2))
                at = builder.add(args[3], I32(8 * row * row_bytes_ + 64 * step))
                if ITEMSIZE[code_] == 1:
                    store_words(builder, SHARED, at, [even[0], odd[0], even[1], odd[1]], 16)
                else:
                    store_words(builder, SHARED, at, even, 8)
                    store_words(builder, SHARED, builder.add(at, I32(32)), odd, 8)
        return context.get_dummy_value()

    return types.void(code, head_dim, row_bytes, u32, sums), codegen
