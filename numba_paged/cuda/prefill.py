"""Attention of any number of query tokens per sequence over the paged cache."""

import functools
from dataclasses import dataclass

from numba import cuda
from numba.cuda import types

from .compile import Kernel
from .intrinsics import (block_x, block_y, block_z, blocks_y, copies_commit, copies_wait_all, copies_wait_all_but_one,
                         shared_address, shuffle_from, sync_block, thread_index)
from .layout import WARP, TileLayout, tile_layout
from .memory import load_i32
from .registers import count_up, each, fill, planes_bytes, scale_rows, store_weights
from .rows import OUTPUTS, make_finish, make_keep_state, make_query_tokens, make_stage_queries, state_bytes
from .warp import (F32, I32, INPUTS, NEG_INF, U32, U64, ZERO, make_add_values, make_copy_tile, make_find_rows,
                   make_fold, make_load_slopes, make_score_tile, visible_start, visible_stop, zero_tiles)

TILE_BYTES = 8192
"""About what a block has in flight of keys, and again of values."""

NUM_WARPS = 8

PARAMETERS = {**INPUTS, **OUTPUTS}


@dataclass(frozen=True)
class PrefillShape:
    """How a prefill kernel is laid out: query rows of a warp, bytes of shared memory.

    Each number of a key or value that a warp reads from shared memory is used `warp_rows` times.
    """

    layout: TileLayout
    warp_rows: int
    queries: int
    weights: int
    ring: int

    @property
    def num_rows(self):
        """Query rows of a block."""
        return self.warp_rows * NUM_WARPS

    @property
    def num_threads(self):
        """Threads of a block."""
        return WARP * NUM_WARPS

    @property
    def shared_bytes(self):
        """Dynamic shared memory of a block: queries, each warp's weights, the ring; in the end the state instead."""
        return max(self.queries + NUM_WARPS * self.weights + self.ring, state_bytes(self.layout, self.num_rows))


@functools.cache
def prefill_shape(spec):
    """The `PrefillShape` of an `AttendSpec`."""
    warp_rows = 8 if spec.head_dim <= 128 else 4
    layout = tile_layout(spec.head_dim, spec.kv_code, warp_rows, TILE_BYTES)
    return PrefillShape(layout, warp_rows, queries=NUM_WARPS * warp_rows * layout.query_row,
                        weights=planes_bytes(warp_rows, layout.tokens), ring=3 * layout.tile)


def make_limits(spec):
    """What a row sees: ``first_of(row, ...)``, ``stop_of(row, ...)`` within the item's keys, and ``unless_hidden``."""
    group, causal, has_window = spec.group, spec.causal, spec.has_window

    @cuda.jit(device=True)
    def first_of(row, position, start, window):
        if has_window:
            return U32(max(I32(start), I32(visible_start(position + I32(row // U32(group)), window))))
        return start

    @cuda.jit(device=True)
    def stop_of(row, position, stop):
        return U32(visible_stop(position + I32(row // U32(group)), I32(stop), causal))

    @cuda.jit(device=True)
    def unless_hidden(score, row, first_row, key, position, start, stop, window):
        row = U32(first_row + row)
        return score if first_of(row, position, start, window) <= key < stop_of(row, position, stop) else NEG_INF

    return first_of, stop_of, unless_hidden


def make_distance(spec):
    """``distance(row, first_row, token, position, key)``: the key's position less that of the row's query, as float32."""
    group = spec.group
    _, _, position_of, _ = make_query_tokens(spec)

    @cuda.jit(device=True)
    def distance(row, first_row, token, position, key):
        return F32(I32(key) - position_of(token, position, U32(U32(first_row + row) // U32(group))))

    return distance


def make_prefill(spec):
    """The kernel for an `AttendSpec`.

    Grid: x = kv head, (y, z) = item. Block: as `prefill_shape` says. Parameters: `PARAMETERS`, strides in bytes::

        for each run of the item's rows (a query head of a query token), as many as a block keeps:
            stage them in shared memory; a warp takes `warp_rows` of them
            for each tile of keys that one of the rows sees, all warps together:
                copy the next tile's keys, then its values, while this one is worked on
                scores = q · k, a token a lane; hidden ones -inf, where the tile has any
                top, total, weights = one step of the online softmax
                sums = sums * 2 ** (old top - top) + weights · values
            write out and lse, or a partial of them

    Invariant: a slot that none of the rows sees is never read, and what a row does not see adds nothing to it, be it
    NaN. Tiles that are hidden from all rows are skipped. The ring of a block has three tiles: while one is worked on,
    two are on their way.

    Source: as `decode`; causal tiles over a paged cache, arXiv:2501.01005, section 3.
    """
    shape = prefill_shape(spec)
    layout, num_rows, num_threads, group = shape.layout, shape.num_rows, shape.num_threads, spec.group
    tokens, tile, padded, warp_rows, has_bias = layout.tokens, layout.tile, layout.padded, shape.warp_rows, spec.has_bias
    num_sums, weights_bytes, ring_bytes = warp_rows * layout.numbers, shape.weights, shape.ring
    queries_bytes, weights_at = warp_rows * layout.query_row, shape.queries
    ring_at = shape.queries + NUM_WARPS * shape.weights
    first_of, stop_of, unless_hidden = make_limits(spec)
    distance_of = make_distance(spec)
    first_token, _, _, _ = make_query_tokens(spec)
    find_rows = make_find_rows(spec.block_size, tokens)
    copy_tile = make_copy_tile(spec, layout, num_threads)
    stage_queries = make_stage_queries(spec, layout, num_rows, group, num_threads)
    load_slopes = make_load_slopes(warp_rows, group)
    score_tile = make_score_tile(spec, layout, warp_rows)
    fold = make_fold(layout)
    add_values = make_add_values(layout, warp_rows, False)
    add_visible_values = make_add_values(layout, warp_rows, True)
    keep_state = make_keep_state(layout, warp_rows, num_rows)
    finish = make_finish(spec, layout, num_rows, group, 1, num_threads)

    @cuda.jit(device=True)
    def attend_tiles(shared, warp, lane, thread, table, keys, key_block, key_token, values, value_block, value_token,
                     token, position, start, item_stop, block_row, last_row, inner, outer, window, slope):
        """The loop over tiles: the state of the warp's rows, those of the block being block_row to last_row."""
        first_row = U32(block_row + warp * U32(warp_rows))
        queries_here = U32(shared + warp * U32(queries_bytes))
        weights_here = U32(shared + U32(weights_at) + warp * U32(weights_bytes))
        first, stop = first_of(block_row, position, start, window), stop_of(last_row, position, item_stop)
        seen_by_all = first_of(last_row, position, start, window), stop_of(block_row, position, item_stop)
        top, total, sums = fill(warp_rows, NEG_INF), fill(warp_rows, ZERO), fill(num_sums, ZERO)

        pos = U32(start + (first - start) // U32(tokens) * U32(tokens))
        keys_at = U32(shared + U32(ring_at))
        values_at, free_at = U32(keys_at + U32(tile)), U32(keys_at + U32(2 * tile))
        block, offset = find_rows(table, lane, pos, first, stop)
        if pos < stop:
            copy_tile(keys_at, keys, block, offset, key_block, key_token, pos, first, stop, thread)
        copies_commit()
        if pos < stop:
            copy_tile(values_at, values, block, offset, value_block, value_token, pos, first, stop, thread)
        copies_commit()
        block, offset = find_rows(table, lane, U32(pos + U32(tokens)), first, stop)
        while pos < stop:
            ahead = U32(pos + U32(tokens))
            copies_wait_all_but_one()
            sync_block()  # this tile's keys are here, and the tile before is no longer read
            if ahead < stop:
                copy_tile(free_at, keys, block, offset, key_block, key_token, ahead, first, stop, thread)
            copies_commit()
            key = U32(pos + lane % U32(tokens))
            distance = each(distance_of, count_up(warp_rows), first_row, token, position, key) if has_bias else ZERO
            scores = score_tile(keys_at, queries_here, lane, inner, outer, slope, distance)
            whole = seen_by_all[0] <= pos and ahead <= seen_by_all[1]
            if not whole:
                scores = each(unless_hidden, scores, count_up(warp_rows), first_row, key, position, start, item_stop,
                              window)
            top, total, decay, weights = fold(top, total, scores)
            if lane < U32(tokens):
                store_weights(tokens, weights_here, lane, weights)
            copies_wait_all_but_one()
            sync_block()  # this tile's values and weights are here, its keys are no longer read
            if ahead < stop:
                copy_tile(keys_at, values, block, offset, value_block, value_token, ahead, first, stop, thread)
            copies_commit()
            block, offset = find_rows(table, lane, U32(ahead + U32(tokens)), first, stop)
            sums = scale_rows(sums, decay)
            if whole:
                sums = add_values(sums, values_at, weights_here, lane)
            else:
                sums = add_visible_values(sums, values_at, weights_here, lane)
            keys_at, values_at, free_at = free_at, keys_at, values_at
            pos = ahead
        copies_wait_all()
        return top, total, sums

    def prefill(items, num_items, tables, table_bytes, q, q_token, q_head, keys, key_block, key_token, key_head,
                values, value_block, value_token, value_head, inner, outer, window, slopes,
                out, out_token, out_head, lse, part_out, part_lse, num_q_heads, v_scale, sinks):
        number = U32(block_z() * blocks_y() + block_y())
        if number >= num_items:
            return
        item = items + U64(number) * U64(32)
        seq, all_rows = U32(load_i32(item)), load_i32(item + U64(8)) * group
        token = first_token(items, num_items, load_i32(item + U64(4)))
        start, stop = U32(load_i32(item + U64(12))), U32(load_i32(item + U64(16)))
        part, part_step = load_i32(item + U64(20)), U32(load_i32(item + U64(24)))
        position, kv_head = load_i32(item + U64(28)), block_x()
        head = U32(kv_head * U32(group))
        thread = thread_index()
        lane = U32(thread % U32(32))
        warp = shuffle_from(U32(thread // U32(32)), U32(0))  # the same in all lanes, and known to be
        shared = shared_address(cuda.shared.array(0, types.uint64, 16))
        table = tables + U64(seq) * U64(table_bytes)
        key_base, value_base = keys + U64(kv_head) * U64(key_head), values + U64(kv_head) * U64(value_head)

        block_row = U32(0)
        while block_row < U32(all_rows):
            num_valid = U32(min(num_rows, all_rows - I32(block_row)))
            if padded:
                zero_tiles(U32(shared + U32(ring_at)), ring_bytes, thread, num_threads)
            stage_queries(shared, q, q_token, q_head, token, head, block_row, num_valid, thread)
            first_row = U32(block_row + warp * U32(warp_rows))
            slope = load_slopes(slopes, head, first_row, U32(group)) if has_bias else ZERO
            sync_block()
            top, total, sums = attend_tiles(shared, warp, lane, thread, table, key_base, key_block, key_token,
                                            value_base, value_block, value_token, token, position, start, stop, block_row,
                                            U32(block_row + num_valid - U32(1)), inner, outer, window, slope)
            sync_block()  # nothing is read from here on: the state takes the place of queries and tiles
            keep_state(shared, U32(warp * U32(warp_rows)), lane, top, total, sums)
            sync_block()
            finish(shared, token, head, block_row, num_valid, part, part_step, thread, out, out_token, out_head, lse,
                   part_out, part_lse, num_q_heads, v_scale, sinks)
            sync_block()
            block_row = U32(block_row + U32(num_rows))

    return prefill


@functools.cache
def prefill_kernel(spec):
    """The `Kernel` of an `AttendSpec`."""
    shape = prefill_shape(spec)
    # one block is asked for, or the assembler would rather spill a little than hold only one
    return Kernel("prefill", make_prefill, spec, PARAMETERS, shape.num_threads, shape.shared_bytes, min_blocks=1)
