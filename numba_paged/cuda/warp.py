"""What a warp does with a tile of keys and values: find its rows, copy it, score it, fold it into an online softmax.

Each function here makes device functions for one spec; `decode` and `prefill` are built from them. A query row is one
query head of one query token; a warp keeps its rows' state in registers, the same in every lane:

    top[row]      running maximum of the scores (base 2)      total[row]   this lane's share of the sum of weights
    sums[row, e]  weighted values of the numbers that the lane owns, sum over tokens of its group

(Online softmax: arXiv:1805.02867; over tiles of keys: arXiv:2205.14135.)
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.cuda import types

from .. import score, softmax
from .codecs import FLOAT32
from .intrinsics import exp2, fma, log2, maximum, reciprocal, shuffle_from
from .memory import load_global, load_u32, start_copy, zero_shared
from .registers import add_dots, add_weighted, count_up, each, fill, max_over_lanes, sum_over_lanes

U32, U64, F32, I32 = types.uint32, types.uint64, types.float32, types.int32
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
LOG2E, LN2, TWO_LOG2E = np.float32(score.LOG2E), np.float32(score.LN2), np.float32(2 * score.LOG2E)
NEG_INF = softmax.NEG_INF

INPUTS = {
    "items": U64, "num_items": U32, "tables": U64, "table_bytes": U32, "q": U64, "q_token": U32, "q_head": U32,
    "keys": U64, "key_block": U32, "key_token": U32, "key_head": U32,
    "values": U64, "value_block": U32, "value_token": U32, "value_head": U32,
    "inner": F32, "outer": F32, "window": I32, "slopes": U64,
}
"""Parameters of an attention kernel that say what it reads; the rest are `rows.OUTPUTS`."""

MAX_UNROLLED = 256
"""Multiply-adds of one loop body: enough to hide its overhead."""


@dataclass(frozen=True)
class AttendSpec:
    """What attention kernels are compiled for; everything else is an argument.

    `query_code` and `kv_code` are formats (`codecs`), `copy_bytes` is the widest access (16, 8, 4, 2, 1) that rows,
    strides and addresses of the pool allow; the flags say which options are on. The query tokens of an item follow each
    other in one sequence, or are `gathered` from several: then they are listed, see `rows.make_query_tokens`.
    """

    query_code: int
    kv_code: int
    head_dim: int
    group: int
    block_size: int
    copy_bytes: int
    has_cap: bool = False
    has_bias: bool = False
    has_window: bool = False
    has_sinks: bool = False
    causal: bool = True
    gathered: bool = False


@cuda.jit(device=True)
def tanh(x):
    """Absolute error of a few 2**-24; the instruction tanh.approx has 2**-11."""
    return ONE - TWO * reciprocal(exp2(x * TWO_LOG2E) + ONE)


@cuda.jit(device=True)
def exp(x):
    return exp2(x * LOG2E)


@cuda.jit(device=True)
def log(x):
    return log2(x) * LN2


@cuda.jit(device=True)
def weight(x, anchor):
    return exp2(x - anchor)


@cuda.jit(device=True)
def unless_hidden(x, visible):
    return x if visible else NEG_INF


anchor = cuda.jit(device=True)(softmax.anchor)
visible_start = cuda.jit(device=True)(score.visible_start)
visible_stop = cuda.jit(device=True)(score.visible_stop)
add_sink = cuda.jit(device=True)(softmax.make_add_sink(exp, log))


@cuda.jit(device=True)
def zero_tiles(tiles, num_bytes, worker, num_workers):
    """Tiles are zeros before the first copy: lanes read past the end of a row, and NaN times 0 is NaN."""
    at = U32(worker * U32(16))
    while at < num_bytes:
        zero_shared(16, U32(tiles + at))
        at = U32(at + U32(16 * num_workers))


def make_load_slopes(num_rows, row_heads):
    """``load_slopes(slopes, head, first_row, num_heads)``: the ALiBi slopes of the rows' heads in base 2."""

    @cuda.jit(device=True)
    def slope_of(row, slopes, head, first_row, last):
        place = min(U32((first_row + row) % U32(row_heads)), last)
        return load_global(FLOAT32, 1, slopes + U64(U32(head + place)) * U64(4))[0] * LOG2E

    @cuda.jit(device=True)
    def load_slopes(slopes, head, first_row, num_heads):
        return each(slope_of, count_up(num_rows), slopes, head, first_row, U32(num_heads - U32(1)))

    return load_slopes


def make_find_rows(block_size, tokens):
    """``find_rows(table, lane, pos, first, stop) -> (block, offset)``: where the tile at `pos` lies.

    If blocks are whole tiles, that is the tile's block and the offset of its first token, in every lane. Else lane t
    has the block and the offset of token t; tokens outside of [first, stop) have block 0 and are never looked up.
    """
    aligned = block_size % tokens == 0

    @cuda.jit(device=True)
    def find_rows(table, lane, pos, first, stop):
        if aligned:
            at, found = pos, pos < stop
        else:
            at = U32(pos + lane % U32(tokens))
            found = first <= at < stop
        block = U32(0)
        if found:
            block = load_u32(table + U64(at // U32(block_size)) * U64(4))
        return block, U32(at % U32(block_size))

    return find_rows


def make_place_access(layout, access, num_workers):
    """``place_access(i, worker)``: the row and the byte in it of a worker's i-th access to a tile.

    Rows that are no multiple of 128 bytes are taken eight at once: eight lanes with a row each, which `pitch` puts into
    different banks, where lanes side by side in memory would collide at the end of each row. That needs rows of whole
    sectors of 32 bytes, as no access of a warp is wider.
    """
    per_row = layout.row // access
    even = num_workers % per_row == 0  # then a worker stays at its place in the row
    rows_a_round = num_workers // per_row

    @cuda.jit(device=True)
    def along_rows(i, worker):
        if even:
            return U32(worker // U32(per_row) + U32(i * rows_a_round)), U32(worker % U32(per_row) * U32(access))
        index = U32(worker + U32(i * num_workers))
        return U32(index // U32(per_row)), U32(index % U32(per_row) * U32(access))

    @cuda.jit(device=True)
    def across_rows(i, worker):
        index = U32(worker // U32(8) + U32(i * (num_workers // 8)))
        return U32(index // U32(per_row) * U32(8) + worker % U32(8)), U32(index % U32(per_row) * U32(access))

    return across_rows if layout.row % 128 and layout.row % 32 == 0 and access >= 8 else along_rows


def make_copy_tile(spec, layout, num_workers):
    """``copy_tile(target, source, ...)``: start copying a tile's rows, each worker every `num_workers`-th access.

    Rows outside of [first, stop) become zeros and are not read: nothing unwritten enters shared memory.
    """
    access = spec.copy_bytes
    num_accesses = layout.row // access * layout.tokens
    rounds = -(-num_accesses // num_workers)
    ragged = num_accesses % num_workers != 0
    pitch, tokens = layout.pitch, layout.tokens
    aligned = spec.block_size % tokens == 0
    place_access = make_place_access(layout, access, num_workers)

    @cuda.jit(device=True)
    def access_of(i, worker, source, block, offset, block_bytes, token_bytes):
        """A worker's i-th access: row, byte in the row, address; whether it is still within the tile."""
        token, byte = place_access(i, worker)
        if aligned:  # one sum for all rows of a worker, and a constant number of rows more for each
            at = source + U64(block) * U64(block_bytes) + U64(offset) * U64(token_bytes) + U64(token) * U64(token_bytes)
        else:
            block, offset = shuffle_from(block, token), shuffle_from(offset, token)
            at = source + U64(block) * U64(block_bytes) + U64(offset) * U64(token_bytes)
        return token, byte, at + U64(byte), not ragged or U32(worker + U32(i * num_workers)) < U32(num_accesses)

    @cuda.jit(device=True)
    def copy_tile(target, source, block, offset, block_bytes, token_bytes, pos, first, stop, worker):
        if first <= pos and U32(pos + U32(tokens)) <= stop:  # the whole tile, as nearly always
            for i in range(rounds):
                token, byte, at, within = access_of(i, worker, source, block, offset, block_bytes, token_bytes)
                if within:
                    start_copy(access, U32(target + token * U32(pitch) + byte), at, True)
        else:
            for i in range(rounds):
                token, byte, at, within = access_of(i, worker, source, block, offset, block_bytes, token_bytes)
                if within:
                    wanted = U32(pos + token - first) < U32(stop - first)
                    start_copy(access, U32(target + token * U32(pitch) + byte), at, wanted)

    return copy_tile


def unrolled(rounds, size):
    """How many rounds of a loop, of `size` multiply-adds each, to write out: less overhead, but no endless code."""
    return next(n for n in range(rounds, 0, -1) if rounds % n == 0 and (n * size <= MAX_UNROLLED or n == 1))


def make_score_tile(spec, layout, num_rows):
    """``score_tile(keys, queries, lane, inner, outer, slopes, distance)``: a tuple of scores, of the lane's token."""
    code, chunk, chunks, tokens, parts = layout.code, layout.chunk_numbers, layout.chunks, layout.tokens, layout.parts
    pitch, query_row, has_bias = layout.pitch, layout.query_row, spec.has_bias
    step, repeat = 16 * parts, unrolled(chunks, num_rows * chunk)
    score_of = cuda.jit(device=True)(score.make_score(spec.has_cap, spec.has_bias, tanh))

    @cuda.jit(device=True)
    def score_tile(keys, queries, lane, inner, outer, slopes, distance):
        part = U32(lane // U32(tokens))
        key = U32(keys + lane % U32(tokens) * U32(pitch) + part * U32(16))
        query = U32(queries + part * U32(4 * chunk))
        dots = fill(num_rows, ZERO)
        done = U32(0)  # counted apart from the addresses, so that the loop is seen to be the same in all lanes
        while done < U32(chunks):
            dots = add_dots(dots, code, chunk, repeat, key, step, query, query_row)
            key = U32(key + U32(repeat * step))
            query = U32(query + U32(4 * chunk * parts * repeat))
            done = U32(done + U32(repeat))
        dots = sum_over_lanes(tokens, 32, dots)
        if has_bias:
            return each(score_of, dots, inner, outer, slopes, distance)
        return each(score_of, dots, inner, outer, ZERO, ZERO)

    return score_tile


def make_fold(layout):
    """``fold(top, total, scores) -> (top, total, decay, weights)``: one step of the online softmax."""
    tokens = layout.tokens

    @cuda.jit(device=True)
    def fold(top, total, scores):
        top_now = each(maximum, top, max_over_lanes(1, tokens, scores))
        base = each(anchor, top_now)
        decay = each(weight, top, base)
        weights = each(weight, scores, base)
        return top_now, each(fma, total, decay, weights), decay, weights

    return fold


def make_add_values(layout, num_rows, guarded):
    """``add_values(sums, values, weights, lane)``: sums plus the tile's values times their weights.

    With `guarded`, a value of weight 0 adds nothing even if it is not a number.
    """
    code, width, units, pitch = layout.code, layout.width, layout.units, layout.pitch
    dim_lanes, groups, tokens = layout.dim_lanes, layout.groups, layout.tokens
    run = width * layout.itemsize
    distance = dim_lanes * run
    repeat = unrolled(tokens // groups, num_rows * layout.numbers)
    value_step = groups * pitch

    @cuda.jit(device=True)
    def add_values(sums, values, weights, lane):
        token = U32(lane // U32(dim_lanes))
        value = U32(values + token * U32(pitch) + lane % U32(dim_lanes) * U32(run))
        done = U32(0)
        while done < U32(tokens):
            sums = add_weighted(sums, code, width, units, distance, repeat, value, value_step, tokens, weights, token,
                                groups, guarded)
            value = U32(value + U32(repeat * value_step))
            token = U32(token + U32(repeat * groups))
            done = U32(done + U32(repeat * groups))
        return sums

    return add_values
