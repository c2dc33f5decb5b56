"""Tiles of keys and values for the tensor cores: where their blocks lie, and how they get into shared memory.

A worker (a warp) copies the same few rows, 16 or 8 tokens, of every tile it takes part in. In shared memory rows are
`pitch` bytes apart, an odd number of 16-byte chunks: so eight rows' chunks at the same place lie in different banks, and
that is how they are written (eight lanes, eight rows) and read (`ldmatrix`).
"""

from dataclasses import dataclass

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .codecs import ITEMSIZE
from .intrinsics import assembly, literal, shuffle_from, u32, u64
from .layout import WARP
from .memory import load_u32
from .tensor import kept

U32, U64 = types.uint32, types.uint64

COPY_LANES = 4
"""Lanes that copy a row together, 16 bytes each: two whole sectors of memory."""

ROWS = WARP // COPY_LANES
"""Rows that a warp copies at once."""


def row_pitch(row_bytes):
    """Bytes from a row to the next in shared memory."""
    return row_bytes + 16 * (1 - row_bytes // 16 % 2)


@dataclass(frozen=True)
class CopyLayout:
    """How a warp copies `tokens` (16 or 8) rows of `row` bytes, of which `granule` never straddle two blocks."""

    tokens: int
    row: int
    granule: int

    @property
    def turns(self):
        """How often a lane goes to another row."""
        return self.tokens // ROWS

    @property
    def entries(self):
        """Entries of the block table that the rows take, at most."""
        return self.tokens // self.granule


def copy_layout(spec, tokens):
    """The `CopyLayout` of an `AttendSpec`."""
    granule = tokens if spec.block_size % tokens == 0 else ROWS
    return CopyLayout(tokens, spec.head_dim * ITEMSIZE[spec.kv_code], granule)


def make_read_entries(spec, layout, step):
    """``first_entries(...)`` and ``next_entries(entries, ...)``: the block-table entries of a warp's rows, tile by tile.

    `entries` is (slot, blocks, blocks ahead, position of those ahead). Lanes hold the entries of 32 // layout.entries
    tiles, and of as many ahead; `slot` is the lane that has the tile's first. The rows of the first tile begin at `at`,
    those of the next ones `step` tokens further; entries for positions from `stop` on are not read.
    """
    count, granule, block_size = layout.entries, layout.granule, spec.block_size
    round_tokens = WARP // layout.entries * step

    @cuda.jit(device=True)
    def read(table, at, lane, stop):
        pos = U32(at + lane // U32(count) * U32(step) + lane % U32(count) * U32(granule))
        block = U32(0)
        if pos < stop:
            block = load_u32(table + U64(pos // U32(block_size)) * U64(4))
        return block

    @cuda.jit(device=True)
    def first_entries(table, at, lane, stop):
        ahead = U32(at + U32(round_tokens))
        return U32(0), read(table, at, lane, stop), read(table, ahead, lane, stop), ahead

    @cuda.jit(device=True)
    def next_entries(entries, table, lane, stop):
        slot, blocks, blocks_ahead, ahead = entries
        slot = U32(slot + U32(count))
        if slot == U32(WARP):
            slot, blocks, ahead = U32(0), blocks_ahead, U32(ahead + U32(round_tokens))
            blocks_ahead = read(table, ahead, lane, stop)
        return slot, blocks, blocks_ahead, ahead

    return first_entries, next_entries


@cuda.jit(device=True)
def row_bounds(first, stop, lane):
    """What `find_rows` compares with, for rows that are copied if they are in [first, stop)."""
    return kept(U32(lane % U32(ROWS) - first)), kept(U32(stop - first))


def make_find_rows(spec, layout):
    """``find_rows(entries, pos, bounds, lane)``: (block, offset, valid) of the lane's row, for each turn.

    `entries` is of `make_read_entries`, `pos` the position of the warp's first row in the tile, `bounds` of
    `row_bounds`. `valid` is 16, or 0 for rows outside of them, which become zeros and are not read.
    """
    turns, granule, block_size = layout.turns, layout.granule, spec.block_size

    @cuda.jit(device=True)
    def find_row(entries, pos, row):
        entry = U32(row // U32(granule))
        offset = U32(0)
        if block_size != granule:
            offset = U32((pos + entry * U32(granule)) % U32(block_size))
        return shuffle_from(entries[1], U32(entries[0] + entry)), offset

    @cuda.jit(device=True)
    def find_rows(entries, pos, bounds, lane):
        row, at = U32(lane % U32(ROWS)), U32(pos + bounds[0])
        block, offset = find_row(entries, pos, row)
        valid = U32(16) if at < bounds[1] else U32(0)
        if turns == 1:
            return block, offset, valid, block, offset, valid
        next_valid = U32(16) if U32(at + U32(ROWS)) < bounds[1] else U32(0)
        if granule > ROWS:
            return block, offset, valid, block, offset, next_valid
        next_block, next_offset = find_row(entries, pos, U32(row + U32(ROWS)))
        return block, offset, valid, next_block, next_offset, next_valid

    return find_rows


@intrinsic
def copy_row(typingctx, num_bytes, target, source, valid, chunk):
    """Start copying a row of `num_bytes`, with the lanes that have `chunk` (uint32) 0 to 3; zeros if `valid` is 0, not 16.

    ``target`` (uint32) and ``source`` (uint64) are the lane's: 16 bytes further for each chunk.
    """
    size = literal(num_bytes)
    if size is None:
        return None

    def codegen(context, builder, sig, args):
        for at in range(0, size, 16 * COPY_LANES):
            text = f"cp.async.cg.shared.global.L2::128B [$0+{at}], [$1+{at}], 16, $2;"
            lanes, operands, constraints = (size - at) // 16, args[1:4], "r,l,r"
            if lanes < COPY_LANES:
                text = f"{{ .reg .pred p; setp.lt.u32 p, $3, {lanes}; @p {text} }}"
                operands, constraints = args[1:], "r,l,r,r"
            assembly(builder, ir.VoidType(), operands, text, constraints + ",~{memory}", side_effect=True)
        return context.get_dummy_value()

    return types.void(num_bytes, u32, u64, u32, u32), codegen


def make_copy_rows(layout):
    """``copy_rows(wanted, target, source, where, block_bytes, token_bytes, lane)``: start copying the warp's rows of a tile.

    `where` is of `find_rows`, `source` of `lane_source`, `target` the lane's place, both for its first row.
    """
    row_bytes, turns, pitch = layout.row, layout.turns, row_pitch(layout.row)
    same_block = layout.granule > ROWS

    @cuda.jit(device=True)
    def address(source, block, offset, block_bytes, token_bytes):
        return source + U64(block) * U64(block_bytes) + U64(offset) * U64(token_bytes)

    @cuda.jit(device=True)
    def copy_rows(wanted, target, source, where, block_bytes, token_bytes, lane):
        chunk = U32(lane // U32(ROWS))
        if wanted:
            at = address(source, where[0], where[1], block_bytes, token_bytes)
            copy_row(row_bytes, target, at, where[2], chunk)
            if turns == 2:
                if same_block:
                    at = at + U64(ROWS) * U64(token_bytes)
                else:
                    at = address(source, where[3], where[4], block_bytes, token_bytes)
                copy_row(row_bytes, U32(target + U32(ROWS * pitch)), at, where[5], chunk)

    return copy_rows


def make_lane_places(layout):
    """``lane_source(pool, token_bytes, lane)`` and ``lane_target(tile, lane)``: where the lane's first row begins."""
    pitch = row_pitch(layout.row)

    @cuda.jit(device=True)
    def lane_source(pool, token_bytes, lane):
        return pool + U64(lane % U32(ROWS)) * U64(token_bytes) + U64(lane // U32(ROWS) * U32(16))

    @cuda.jit(device=True)
    def lane_target(tile, lane):
        return U32(tile + lane % U32(ROWS) * U32(pitch) + lane // U32(ROWS) * U32(16))

    return lane_source, lane_target

