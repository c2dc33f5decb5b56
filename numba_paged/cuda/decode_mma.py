"""Attention of a few query rows per kv head over the paged cache, on tensor cores."""

import functools
from dataclasses import dataclass

from numba import cuda
from numba.cuda import types

from .codecs import FLOAT32
from .compile import Kernel
from .intrinsics import (block_y, block_z, blocks_y, copies_commit, copies_wait_all, copies_wait_all_but_one,
                         shared_address, shuffle_from, sync_block, sync_warp, thread_index)
from .layout import WARP
from .memory import store_shared
from .registers import count_up, each, fill, sum_over_lanes
from .rows import OUTPUTS, make_finish, make_query_tokens, state_bytes
from .tensor import (TILE, add_values_by_weights, any_lane, differ, fragment_place, kept, keys_by_queries, make_spread,
                     multiply, operand_code, pack_columns)
from .tensor_guard import all_finite, make_add_visible_columns
from .tensor_rows import (StateLayout, headroom, make_block_rows, make_finish_scores, make_fold, make_row_facts,
                          make_stage_rows, read_item, store_columns)
from .tensor_tiles import (CopyLayout, copy_layout, make_copy_rows, make_find_rows, make_lane_places, make_read_entries,
                           row_bounds, row_pitch)
from .warp import INPUTS, NEG_INF, U32, U64, ZERO, AttendSpec

PARAMETERS = {**INPUTS, **OUTPUTS}


@dataclass(frozen=True)
class DecodeMmaSpec:
    """What a kernel is compiled for: attention, and how many tiles of 8 query rows a block serves (1 or 2)."""

    attend: AttendSpec
    num_tiles: int = 1


@dataclass(frozen=True)
class DecodeMmaShape:
    """How a kernel is laid out: tiles of 8 query rows, warps, bytes of shared memory."""

    copy: CopyLayout
    state: StateLayout
    num_tiles: int
    num_warps: int
    query_pitch: int

    @property
    def num_rows(self):
        """Query rows of a block."""
        return 8 * self.num_tiles

    @property
    def num_threads(self):
        """Threads of a block."""
        return WARP * self.num_warps

    @property
    def tile(self):
        """Bytes of a tile of keys or of values."""
        return TILE * row_pitch(self.copy.row)

    @property
    def queries(self):
        """Bytes of the staged queries; behind them are the rows' factors."""
        return self.num_rows * self.query_pitch

    @property
    def shared_bytes(self):
        """Dynamic shared memory: queries and factors, then each warp's ring; in the end the states take their place."""
        rings = self.queries + 16 * self.num_tiles * 2 + self.num_warps * 3 * self.tile
        return max(rings, state_bytes(self.state, self.num_rows * self.num_warps))


@functools.cache
def decode_mma_shape(spec):
    """The `DecodeMmaShape` of a `DecodeMmaSpec`; past 384 bytes a row, shared memory has room for two warps."""
    head_dim, copy = spec.attend.head_dim, copy_layout(spec.attend, TILE)
    return DecodeMmaShape(copy, StateLayout(head_dim + 4), spec.num_tiles, num_warps=4 if copy.row <= 384 else 2,
                          query_pitch=row_pitch(2 * head_dim))


def make_decode_mma(spec):
    """The kernel for a `DecodeMmaSpec`.

    Grid: x = kv head · tiles + tile of the item's rows (a row is one query head of one token), (y, z) = item. Block: as
    `decode_mma_shape` says. Parameters: `PARAMETERS`, strides in bytes::

        stage the rows' queries in shared memory, in 16 bits
        warp w takes the tiles w, w + num_warps, ... of the item's keys:            # a tile: 16 token slots
            copy the next tile's keys, then its values, while this one is worked on
            S^T = K Q^T, tokens as the 16 rows of the product and queries as its 8 columns; hidden scores -inf
            top, total, P^T = one step of the online softmax, P^T in 16 bits
            O^T = O^T * 2 ** (old top - top) + V^T P^T
        merge the warps' states; write out and lse, or a partial of them

    Invariant: a slot outside of what the block's rows see is never read; keys and values are read once for all of its
    rows, twice if sums are infinite or NaN: then without 0 times infinity, see `tensor_guard`. The ring of each warp has
    three tiles: two are on their way while one is worked on. Block-table entries are read 32 at a time, one round ahead.

    Source: queries of a group as columns of one product, arXiv:2501.01005, section 3; online softmax, arXiv:1805.02867.
    """
    attend, shape = spec.attend, decode_mma_shape(spec)
    code, head_dim, group, operand = attend.kv_code, attend.head_dim, attend.group, operand_code(attend.kv_code)
    copy, num_tiles, num_rows, num_warps = shape.copy, shape.num_tiles, shape.num_rows, shape.num_warps
    pitch, query_pitch, tile_bytes = row_pitch(copy.row), shape.query_pitch, shape.tile
    num_columns, num_sums = 2 * num_tiles, head_dim // TILE * 4 * num_tiles
    step = TILE * shape.num_warps
    factors_at, rings_at = shape.queries, shape.queries + 32 * num_tiles
    num_states = num_rows * num_warps
    tops_at = num_states * 4 * shape.state.width
    number_bytes, room = (8 if copy.row == head_dim else 4), headroom(code)
    row_bytes = 4 * shape.state.width

    owners = [2 * (i // 4) + i % 2 for i in range(4 * num_tiles)]  # the lane's columns of a score and of a sum
    over_sums = make_spread(owners * (head_dim // TILE))
    first_entries, next_entries = make_read_entries(attend, copy, step)
    find_rows, copy_rows = make_find_rows(attend, copy), make_copy_rows(copy)
    lane_source, lane_target = make_lane_places(copy)
    stage_rows = make_stage_rows(attend, num_rows, num_warps, query_pitch)
    row_facts, limits = make_row_facts(attend, owners)
    block_rows = make_block_rows(group, num_rows)
    fold = make_fold(attend, owners, 4, 32)
    finish = make_finish(attend, shape.state, num_rows, group, num_warps, shape.num_threads)
    add_visible = make_add_visible_columns(code, head_dim, pitch)
    place = cuda.jit(device=True)(fragment_place)
    first_of, _, _, _ = make_query_tokens(attend)

    @cuda.jit(device=True)
    def token_of(element, base):
        return U32(base + element % U32(4) // U32(2) * U32(8))

    finish_scores = make_finish_scores(attend, token_of, 4 * num_tiles)

    @cuda.jit(device=True)
    def row_of_column(column, first_row, lane):
        return U32(first_row + column // U32(2) * U32(8) + lane % U32(4) * U32(2) + column % U32(2))

    @cuda.jit(device=True)
    def keep_state(states, warp, lane, top, total, sums):
        """A warp's rows into shared memory, as `finish` expects them."""
        first = U32(warp * U32(num_rows) + lane % U32(4) * U32(2))
        address = U32(states + first * U32(row_bytes) + lane // U32(4) * U32(number_bytes))
        store_columns(code, head_dim, row_bytes, address, sums)
        total = sum_over_lanes(4, 32, total)
        if lane < U32(4):
            at = U32(states + U32(tops_at) + first * U32(4))
            for i in range(num_columns):
                here = U32(at + U32(i // 2 * 32 + i % 2 * 4))
                store_shared(FLOAT32, False, here, (top[i] - room,))
                store_shared(FLOAT32, False, U32(here + U32(4 * num_states)), (total[i],))

    @cuda.jit(device=True)
    def attend_tiles(guarded, begin, seen, bounds, ring, queries, lane, table, key_source, key_block, key_token,
                     value_source, value_block, value_token, outer, facts):
        """The loop over the warp's tiles, from the one at `begin` on: (top, total, sums) of the block's rows."""
        _, stop, all_low, all_high = seen
        target = kept(lane_target(ring, lane))
        key_place = kept(U32(ring + U32(place(code, False, U32(pitch), lane))))
        value_place = kept(U32(ring + U32(place(code, True, U32(pitch), lane))))
        pos = begin
        entries = first_entries(table, pos, lane, stop)
        where = find_rows(entries, pos, bounds, lane)
        top, total, sums = fill(num_columns, NEG_INF), fill(num_columns, ZERO), fill(num_sums, ZERO)
        keys_at, values_at, free_at = U32(0), U32(tile_bytes), U32(2 * tile_bytes)
        copy_rows(pos < stop, target, key_source, where, key_block, key_token, lane)
        copies_commit()
        copy_rows(pos < stop, U32(target + values_at), value_source, where, value_block, value_token, lane)
        copies_commit()
        while pos < stop:
            ahead = U32(pos + U32(step))
            entries = next_entries(entries, table, lane, stop)
            where = find_rows(entries, ahead, bounds, lane)
            copies_wait_all_but_one()
            sync_warp()  # this tile's keys are here, and the values of the tile before are no longer read
            copy_rows(ahead < stop, U32(target + free_at), key_source, where, key_block, key_token, lane)
            copies_commit()
            dots = keys_by_queries(code, head_dim, num_tiles, query_pitch, U32(key_place + keys_at), queries)
            masked = pos < all_low or U32(pos + U32(TILE)) > all_high
            scores = finish_scores(dots, masked, U32(pos + lane // U32(4)), outer, facts)
            top_before = top
            top, total, decay, weights = fold(top, total, scores)
            columns = pack_columns(operand, weights)
            copies_wait_all_but_one()
            sync_warp()  # this tile's values are here, its keys are no longer read
            copy_rows(ahead < stop, U32(target + keys_at), value_source, where, value_block, value_token, lane)
            copies_commit()
            if any_lane(differ(top_before, top)):
                sums = multiply(sums, over_sums(decay))
            if guarded and masked:
                sums = add_visible(sums, U32(ring + values_at), weights, lane)
            else:
                sums = add_values_by_weights(sums, code, head_dim, U32(value_place + values_at), columns)
            keys_at, values_at, free_at = free_at, keys_at, values_at
            pos = ahead
        copies_wait_all()
        return top, total, sums

    def decode_mma(items, num_items, tables, table_bytes, q, q_token, q_head, keys, key_block, key_token, key_head,
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
        factors = U32(shared + U32(factors_at))
        ring = U32(shared + U32(rings_at) + warp * U32(3 * tile_bytes))
        stage_rows(shared, factors, q, q_token, q_head, token, head, first_row, num_valid, warp, lane)
        sync_block()
        queries = kept(U32(shared + lane % U32(8) * U32(query_pitch) + lane // U32(8) * U32(16)))
        rows = each(row_of_column, count_up(num_columns), first_row, lane)
        facts = row_facts(rows, first_row, token, position, start, stop, window, factors, inner, slopes, head)
        last_row = U32(first_row + num_valid - U32(1))
        seen = limits(first_row, last_row, token, position, start, stop, window)
        table = tables + U64(seq) * U64(table_bytes)
        key_source = lane_source(keys + U64(kv_head) * U64(key_head), key_token, lane)
        value_source = lane_source(values + U64(kv_head) * U64(value_head), value_token, lane)
        begin = U32(start + (seen[0] - start) // U32(TILE) * U32(TILE) + warp * U32(TILE))
        bounds = row_bounds(seen[0], seen[1], lane)
        top, total, sums = fill(num_columns, NEG_INF), fill(num_columns, ZERO), fill(num_sums, ZERO)
        done, guarded = False, False
        while not done:
            sync_warp()
            top, total, sums = attend_tiles(guarded, begin, seen, bounds, ring, queries, lane, table, key_source, key_block,
                                            key_token, value_source, value_block, value_token, outer, facts)
            done = guarded or not any_lane(not all_finite(sums))
            guarded = True
        sync_block()  # nothing is read from here on: the states take the place of queries and tiles
        keep_state(shared, warp, lane, top, total, sums)
        sync_block()
        finish(shared, token, head, first_row, num_valid, part, part_step, thread, out, out_token, out_head, lse,
               part_out, part_lse, num_q_heads, v_scale, sinks)

    return decode_mma


@functools.cache
def decode_mma_kernel(spec):
    """The `Kernel` of a `DecodeMmaSpec`."""
    shape = decode_mma_shape(spec)
    return Kernel("decode_mma", make_decode_mma, spec, PARAMETERS, shape.num_threads, shape.shared_bytes)
