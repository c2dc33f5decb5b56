"""Attention of one query token per sequence over the paged cache."""

import functools
from dataclasses import dataclass

from numba import cuda
from numba.cuda import types

from .compile import Kernel
from .intrinsics import (block_x, block_y, block_z, blocks_y, copies_commit, copies_wait_all, copies_wait_all_but_one,
                         shared_address, shuffle_from, sync_block, sync_warp, thread_index)
from .layout import WARP, TileLayout, tile_layout
from .memory import load_i32
from .registers import each, fill, planes_bytes, scale_rows, store_weights
from .rows import OUTPUTS, make_finish, make_keep_state, make_stage_queries, state_bytes
from .warp import (F32, I32, INPUTS, NEG_INF, U32, U64, ZERO, make_add_values, make_copy_tile, make_find_rows,
                   make_fold, make_load_slopes, make_score_tile, unless_hidden, visible_start, zero_tiles)

TILE_BYTES = 4096
"""About what a warp has in flight of keys, and again of values."""

PARAMETERS = {**INPUTS, **OUTPUTS}


@dataclass(frozen=True)
class DecodeShape:
    """How a decode kernel is laid out: rows (query heads) of a block, tiles of heads, warps, bytes of shared memory."""

    layout: TileLayout
    num_rows: int
    num_tiles: int
    num_warps: int
    queries: int
    weights: int
    ring: int

    @property
    def num_threads(self):
        """Threads of a block."""
        return WARP * self.num_warps

    @property
    def shared_bytes(self):
        """Dynamic shared memory of a block: queries, then each warp's weights, then each warp's ring; in the end the
        states take their place."""
        states = state_bytes(self.layout, self.num_rows * self.num_warps)
        return max(self.queries + self.num_warps * (self.weights + self.ring), states)


@functools.cache
def decode_shape(spec):
    """The `DecodeShape` of an `AttendSpec`.

    All query heads of a kv head are served by one block, so that its keys and values are read once; past 15 heads (past
    8 if they are wider than 128, for want of registers) they are shared among blocks of at least 8.
    """
    if spec.head_dim <= 128:
        num_tiles = max(1, spec.group // 8)
        num_rows = -(-spec.group // num_tiles)
    else:
        num_rows = min(8, spec.group)
        num_tiles = -(-spec.group // num_rows)
    layout = tile_layout(spec.head_dim, spec.kv_code, num_rows, TILE_BYTES)
    return DecodeShape(layout, num_rows, num_tiles, num_warps=4 if layout.row <= 512 else 2,
                       queries=num_rows * layout.query_row, weights=planes_bytes(num_rows, layout.tokens),
                       ring=3 * layout.tile)


def make_decode(spec):
    """The kernel for an `AttendSpec`.

    Grid: x = kv head · num_tiles + tile of query heads, (y, z) = item. Block: as `decode_shape` says. Parameters:
    `PARAMETERS`, strides in bytes::

        stage the group's query rows in shared memory
        warp w takes the tiles w, w + num_warps, ... of the item's keys:        # a tile: a run of token slots
            copy the next tile's keys, then its values, while this one is worked on
            scores = q · k, a token a lane; hidden tokens -inf
            top, total, weights = one step of the online softmax
            sums = sums * 2 ** (old top - top) + weights · values
        merge the warps' states; write out and lse, or a partial of them

    Invariant: a slot outside of the item's visible range is never read. The ring of each warp has three tiles: while
    one is worked on, two are on their way. Keys and values are read once for all query heads of a block.

    Source: PagedAttention, arXiv:2309.06180, section 4.1; online softmax, arXiv:1805.02867; split keys and their
    partials, arXiv:2501.01005, section 3.
    """
    shape = decode_shape(spec)
    layout = shape.layout
    num_rows, num_tiles, num_warps, num_threads = shape.num_rows, shape.num_tiles, shape.num_warps, shape.num_threads
    tokens, tile, padded, group = layout.tokens, layout.tile, layout.padded, spec.group
    has_window, has_bias = spec.has_window, spec.has_bias
    num_sums, weights_bytes, ring_bytes = num_rows * layout.numbers, shape.weights, shape.ring
    weights_at, ring_at = shape.queries, shape.queries + num_warps * shape.weights
    find_rows = make_find_rows(spec.block_size, tokens)
    copy_tile = make_copy_tile(spec, layout, WARP)
    stage_queries = make_stage_queries(spec, layout, num_rows, num_rows, num_threads)
    load_slopes = make_load_slopes(num_rows, num_rows)
    score_tile = make_score_tile(spec, layout, num_rows)
    fold = make_fold(layout)
    add_values = make_add_values(layout, num_rows, False)
    keep_state = make_keep_state(layout, num_rows, num_rows * num_warps)
    finish = make_finish(spec, layout, num_rows, num_rows, num_warps, num_threads)

    def decode(items, num_items, tables, table_bytes, q, q_token, q_head, keys, key_block, key_token, key_head,
               values, value_block, value_token, value_head, inner, outer, window, slopes,
               out, out_token, out_head, lse, part_out, part_lse, num_q_heads, v_scale, sinks):
        number = U32(block_z() * blocks_y() + block_y())
        if number >= num_items:
            return
        item = items + U64(number) * U64(32)
        seq, token = U32(load_i32(item)), U32(load_i32(item + U64(4)))
        start, stop = U32(load_i32(item + U64(12))), U32(load_i32(item + U64(16)))
        part, position = load_i32(item + U64(20)), load_i32(item + U64(28))
        kv_head, tile_number = U32(block_x() // U32(num_tiles)), U32(block_x() % U32(num_tiles))
        num_valid = U32(min(num_rows, group - I32(tile_number) * num_rows))
        head = U32(kv_head * U32(group) + tile_number * U32(num_rows))
        thread = thread_index()
        lane = U32(thread % U32(32))
        warp = shuffle_from(U32(thread // U32(32)), U32(0))  # the same in all lanes, and known to be

        shared = shared_address(cuda.shared.array(0, types.uint64, 16))
        weights_here = U32(shared + U32(weights_at) + warp * U32(weights_bytes))
        ring = U32(shared + U32(ring_at) + warp * U32(ring_bytes))
        if padded:
            zero_tiles(ring, ring_bytes, lane, 32)
        stage_queries(shared, q, q_token, q_head, token, head, U32(0), num_valid, thread)
        sync_block()
        table = tables + U64(seq) * U64(table_bytes)
        key_base, value_base = keys + U64(kv_head) * U64(key_head), values + U64(kv_head) * U64(value_head)
        slope = load_slopes(slopes, head, U32(0), num_valid) if has_bias else ZERO
        first = U32(max(I32(start), I32(visible_start(position, window)))) if has_window else start
        top, total, sums = fill(num_rows, NEG_INF), fill(num_rows, ZERO), fill(num_sums, ZERO)

        step = U32(num_warps * tokens)
        pos = U32(start + (first - start) // U32(tokens) * U32(tokens) + warp * U32(tokens))
        keys_at, values_at, free_at = ring, U32(ring + U32(tile)), U32(ring + U32(2 * tile))
        block, offset = find_rows(table, lane, pos, first, stop)
        if pos < stop:
            copy_tile(keys_at, key_base, block, offset, key_block, key_token, pos, first, stop, lane)
        copies_commit()
        if pos < stop:
            copy_tile(values_at, value_base, block, offset, value_block, value_token, pos, first, stop, lane)
        copies_commit()
        block, offset = find_rows(table, lane, U32(pos + step), first, stop)
        while pos < stop:
            ahead = U32(pos + step)
            copies_wait_all_but_one()
            sync_warp()  # this tile's keys are here, and the tile before is no longer read
            if ahead < stop:
                copy_tile(free_at, key_base, block, offset, key_block, key_token, ahead, first, stop, lane)
            copies_commit()
            key_pos = U32(pos + lane % U32(tokens))
            distance = F32(I32(key_pos) - position)
            scores = score_tile(keys_at, shared, lane, inner, outer, slope, distance)
            scores = each(unless_hidden, scores, first <= key_pos < stop)
            top, total, decay, weights = fold(top, total, scores)
            if lane < U32(tokens):
                store_weights(tokens, weights_here, lane, weights)
            copies_wait_all_but_one()
            sync_warp()  # this tile's values and weights are here, its keys are no longer read
            if ahead < stop:
                copy_tile(keys_at, value_base, block, offset, value_block, value_token, ahead, first, stop, lane)
            copies_commit()
            block, offset = find_rows(table, lane, U32(ahead + step), first, stop)
            sums = add_values(scale_rows(sums, decay), values_at, weights_here, lane)
            keys_at, values_at, free_at = free_at, keys_at, values_at
            pos = ahead
        copies_wait_all()
        sync_block()  # nothing is read from here on: the states take the place of queries and tiles
        keep_state(shared, U32(warp * U32(num_rows)), lane, top, total, sums)
        sync_block()
        finish(shared, token, head, U32(0), num_valid, part, U32(0), thread, out, out_token, out_head, lse,
               part_out, part_lse, num_q_heads, v_scale, sinks)

    return decode


@functools.cache
def decode_kernel(spec):
    """The `Kernel` of an `AttendSpec`."""
    shape = decode_shape(spec)
    min_blocks = 3 if shape.num_rows <= 4 else 2
    return Kernel("decode", make_decode, spec, PARAMETERS, shape.num_threads, shape.shared_bytes, min_blocks)
