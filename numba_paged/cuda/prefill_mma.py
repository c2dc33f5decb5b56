"""Attention of many query rows per kv head over the paged cache, on tensor cores."""

import functools
from dataclasses import dataclass

from numba import cuda
from numba.cuda import types

from .codecs import FLOAT16, FLOAT32, ITEMSIZE
from .compile import Kernel
from .intrinsics import (block_y, block_z, blocks_y, copies_commit, copies_wait_all, copies_wait_all_but_one,
                         shared_address, shuffle_from, sync_block, thread_index)
from .layout import WARP
from .memory import store_shared
from .registers import fill, sum_over_lanes
from .rows import OUTPUTS, make_finish, make_query_tokens, state_bytes
from .tensor import (TILE, add_weights_by_values, any_lane, differ, fragment_place, kept, make_spread, multiply,
                     operand_code, pack_rows, queries_by_keys)
from .tensor_guard import all_finite, any_thread, make_add_visible_rows
from .tensor_rows import (StateLayout, headroom, make_block_rows, make_finish_scores, make_fold, make_row_facts,
                          make_stage_rows, read_item, store_rows)
from .tensor_tiles import (CopyLayout, copy_layout, make_copy_rows, make_find_rows, make_lane_places, make_read_entries,
                           row_bounds, row_pitch)
from .warp import INPUTS, NEG_INF, U32, U64, ZERO

NUM_WARPS = 4
NUM_ROWS = TILE * NUM_WARPS
"""Query rows of a block: a warp has the 16 rows of a product."""

PARAMETERS = {**INPUTS, **OUTPUTS}


@dataclass(frozen=True)
class PrefillMmaShape:
    """How a kernel is laid out: tokens of a tile, bytes of shared memory."""

    copy: CopyLayout
    state: StateLayout
    query_pitch: int

    @property
    def tokens(self):
        """Tokens of a tile of keys or of values."""
        return NUM_WARPS * self.copy.tokens

    @property
    def tile(self):
        """Bytes of a tile."""
        return self.tokens * row_pitch(self.copy.row)

    @property
    def queries(self):
        """Bytes of the staged queries; behind them are the rows' factors."""
        return NUM_ROWS * self.query_pitch

    @property
    def shared_bytes(self):
        """Dynamic shared memory: queries, factors and the ring; in the end the state takes their place."""
        return max(self.queries + 4 * NUM_ROWS + 3 * self.tile, state_bytes(self.state, NUM_ROWS))


@functools.cache
def prefill_mma_shape(spec):
    """The `PrefillMmaShape` of an `AttendSpec`: tiles of 64 tokens, of 32 for wide heads, for want of registers."""
    copy = copy_layout(spec, 16 if spec.head_dim <= 128 else 8)
    spare = 8 if ITEMSIZE[spec.kv_code] == 2 else 16 * (1 - spec.head_dim // 16 % 2)
    return PrefillMmaShape(copy, StateLayout(spec.head_dim + spare), row_pitch(2 * spec.head_dim))


def make_prefill_mma(spec):
    """The kernel for an `AttendSpec`.

    Grid: x = kv head · tiles + tile of `NUM_ROWS` of the item's rows (a row is one query head of one token), (y, z) =
    item. Block: `NUM_WARPS` warps. Parameters: `PARAMETERS`, strides in bytes::

        stage the rows' queries in shared memory, in 16 bits; a warp has 16 of them
        for each tile of keys that one of the rows sees, all warps together:
            copy the next tile's keys, then its values, while this one is worked on
            S = Q K^T; hidden scores -inf, in tiles that have any
            top, total, P = one step of the online softmax, P in 16 bits
            O = O * 2 ** (old top - top) + P V
        write out and lse, or a partial of them

    Invariant: a slot that none of the rows sees is never read, and keys and values are read once for all of them, twice
    if sums are infinite or NaN: then without 0 times infinity, see `tensor_guard`. Tiles that are hidden from all rows
    are skipped. The ring of the block has three tiles: two are on their way while one is worked on. A warp copies the
    same rows of every tile; their block-table entries are read 32 at a time, a round ahead.

    Source: FlashAttention-2, arXiv:2307.08691; over pages and with the heads of a group as rows, arXiv:2501.01005.
    """
    shape = prefill_mma_shape(spec)
    code, head_dim, group, operand = spec.kv_code, spec.head_dim, spec.group, operand_code(spec.kv_code)
    copy, tokens, copy_tokens, tile_bytes = shape.copy, shape.tokens, shape.copy.tokens, shape.tile
    pitch, query_pitch, row_bytes = row_pitch(copy.row), shape.query_pitch, 4 * shape.state.width
    num_scores, num_sums = tokens // 2, head_dim // 2
    factors_at, ring_at, tops_at = shape.queries, shape.queries + 4 * NUM_ROWS, NUM_ROWS * row_bytes
    number_bytes, room, totals_after = 16 // ITEMSIZE[code], headroom(code), 4 * NUM_ROWS

    owners = [0, 0, 1, 1] * (tokens // 8)  # the lane's rows of a score
    over_sums = make_spread([0, 0, 1, 1] * (num_sums // 4))
    first_entries, next_entries = make_read_entries(spec, copy, tokens)
    find_rows, copy_rows = make_find_rows(spec, copy), make_copy_rows(copy)
    lane_source, lane_target = make_lane_places(copy)
    stage_rows = make_stage_rows(spec, NUM_ROWS, NUM_WARPS, query_pitch)
    row_facts, limits = make_row_facts(spec, owners)
    block_rows = make_block_rows(group, NUM_ROWS)
    fold = make_fold(spec, owners, 1, 4)
    finish = make_finish(spec, shape.state, NUM_ROWS, group, 1, WARP * NUM_WARPS)
    add_visible = make_add_visible_rows(code, head_dim, pitch, tokens)
    place = cuda.jit(device=True)(fragment_place)
    first_of, _, _, _ = make_query_tokens(spec)

    @cuda.jit(device=True)
    def token_of(element, base):
        return U32(base + element // U32(4) * U32(8) + element % U32(2))

    finish_scores = make_finish_scores(spec, token_of, num_scores)

    @cuda.jit(device=True)
    def keep_state(states, warp, lane, top, total, sums):
        """A warp's rows into shared memory, as `finish` expects them."""
        row = U32(warp * U32(TILE) + lane // U32(4))
        address = U32(states + row * U32(row_bytes) + lane % U32(4) * U32(number_bytes))
        store_rows(code, head_dim, row_bytes, address, sums)
        total = sum_over_lanes(1, 4, total)
        if lane % U32(4) == U32(0):
            at = U32(states + U32(tops_at) + row * U32(4))
            store_shared(FLOAT32, False, at, (top[0] - room,))
            store_shared(FLOAT32, False, U32(at + U32(32)), (top[1] - room,))
            store_shared(FLOAT32, False, U32(at + U32(totals_after)), (total[0],))
            store_shared(FLOAT32, False, U32(at + U32(totals_after + 32)), (total[1],))

    @cuda.jit(device=True)
    def attend_tiles(guarded, begin, seen, seen_by_all, bounds, ring, query_place, warp, lane, table, key_source, key_block,
                     key_token, value_source, value_block, value_token, outer, facts):
        """The loop over tiles, from the one at `begin` on: (top, total, sums) of the warp's rows."""
        stop, warp_row = seen[1], U32(warp * U32(copy_tokens))
        target = kept(lane_target(U32(ring + warp_row * U32(pitch)), lane))
        key_place = kept(U32(ring + place(code, True, U32(pitch), lane)))
        value_place = kept(U32(ring + place(code, False, U32(pitch), lane)))
        pos = begin
        entries = first_entries(table, U32(pos + warp_row), lane, stop)
        where = find_rows(entries, U32(pos + warp_row), bounds, lane)
        top, total, sums = fill(2, NEG_INF), fill(2, ZERO), fill(num_sums, ZERO)
        keys_at, values_at, free_at = U32(0), U32(tile_bytes), U32(2 * tile_bytes)
        copy_rows(pos < stop, target, key_source, where, key_block, key_token, lane)
        copies_commit()
        copy_rows(pos < stop, U32(target + values_at), value_source, where, value_block, value_token, lane)
        copies_commit()
        while pos < stop:
            ahead = U32(pos + U32(tokens))
            entries = next_entries(entries, table, lane, stop)
            where = find_rows(entries, U32(ahead + warp_row), bounds, lane)
            copies_wait_all_but_one()
            sync_block()  # this tile's keys are here, and the values of the tile before are no longer read
            copy_rows(ahead < stop, U32(target + free_at), key_source, where, key_block, key_token, lane)
            copies_commit()
            dots = queries_by_keys(code, head_dim, tokens, pitch, query_place, U32(key_place + keys_at))
            masked = pos < seen_by_all[2] or U32(pos + U32(tokens)) > seen_by_all[3]
            scores = finish_scores(dots, masked, U32(pos + lane % U32(4) * U32(2)), outer, facts)
            top_before = top
            top, total, decay, weights = fold(top, total, scores)
            weights = pack_rows(operand, weights)
            copies_wait_all_but_one()
            sync_block()  # this tile's values are here, its keys are no longer read
            copy_rows(ahead < stop, U32(target + keys_at), value_source, where, value_block, value_token, lane)
            copies_commit()
            if any_lane(differ(top_before, top)):
                sums = multiply(sums, over_sums(decay))
            if guarded and masked:
                sums = add_visible(sums, U32(ring + values_at), weights, lane)
            else:
                sums = add_weights_by_values(sums, code, head_dim, pitch, weights, U32(value_place + values_at))
            keys_at, values_at, free_at = free_at, keys_at, values_at
            pos = ahead
        copies_wait_all()
        return top, total, sums

    def prefill_mma(items, num_items, tables, table_bytes, q, q_token, q_head, keys, key_block, key_token, key_head,
                    values, value_block, value_token, value_head, inner, outer, window, slopes,
                    out, out_token, out_head, lse, part_out, part_lse, num_q_heads, v_scale, sinks):
        number = U32(block_z() * blocks_y() + block_y())
        if number >= num_items:
            return
        seq, token, num_queries, start, stop, part, part_step, position = read_item(items, number)
        kv_head, first_row, num_valid = block_rows(num_queries, num_q_heads)
        if num_valid == U32(0):
            return
        token, start, stop, head = first_of(items, num_items, token), U32(start), U32(stop), U32(kv_head * U32(group))
        thread = thread_index()
        lane = U32(thread % U32(32))
        warp = shuffle_from(U32(thread // U32(32)), U32(0))  # the same in all lanes, and known to be

        shared = shared_address(cuda.shared.array(0, types.uint64))
        factors, ring = U32(shared + U32(factors_at)), U32(shared + U32(ring_at))
        stage_rows(shared, factors, q, q_token, q_head, token, head, first_row, num_valid, warp, lane)
        sync_block()
        row = U32(first_row + warp * U32(TILE))
        rows = U32(row + lane // U32(4)), U32(row + lane // U32(4) + U32(8))
        facts = row_facts(rows, first_row, token, position, start, stop, window, factors, inner, slopes, head)
        seen_by_all = limits(row, U32(row + U32(TILE - 1)), token, position, start, stop, window)
        seen = limits(first_row, U32(first_row + num_valid - U32(1)), token, position, start, stop, window)
        table = tables + U64(seq) * U64(table_bytes)
        key_source = lane_source(keys + U64(kv_head) * U64(key_head), key_token, lane)
        value_source = lane_source(values + U64(kv_head) * U64(value_head), value_token, lane)
        query_row = U32(shared + warp * U32(TILE * query_pitch))
        query_place = kept(U32(query_row + place(FLOAT16, False, U32(query_pitch), lane)))
        begin = U32(start + (seen[0] - start) // U32(tokens) * U32(tokens))
        bounds = row_bounds(seen[0], seen[1], lane)
        top, total, sums = fill(2, NEG_INF), fill(2, ZERO), fill(num_sums, ZERO)
        done, guarded = False, False
        while not done:
            top, total, sums = attend_tiles(guarded, begin, seen, seen_by_all, bounds, ring, query_place, warp, lane, table,
                                            key_source, key_block, key_token, value_source, value_block, value_token,
                                            outer, facts)
            done = not any_thread(not all_finite(sums)) or guarded  # the threads meet here
            guarded = True
        # nothing is read from here on: the state takes the place of queries and tiles
        keep_state(shared, warp, lane, top, total, sums)
        sync_block()
        finish(shared, token, head, first_row, num_valid, part, part_step, thread, out, out_token, out_head, lse,
               part_out, part_lse, num_q_heads, v_scale, sinks)

    return prefill_mma


@functools.cache
def prefill_mma_kernel(spec):
    """The `Kernel` of an `AttendSpec`."""
    return Kernel("prefill_mma", make_prefill_mma, spec, PARAMETERS, WARP * NUM_WARPS,
                  prefill_mma_shape(spec).shared_bytes)
