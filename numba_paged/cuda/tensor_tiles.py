"""Tiles of keys and values for the tensor cores: where their blocks lie, and how they get into shared memory.

A worker (a warp) copies the same few rows, 16 or 8 tokens, of every tile it takes part in. In shared memory rows are
`pitch` bytes apart, an odd number of 16-byte chunks: so eight rows' chunks at the same place lie in different banks, and
that is how they are written (eight lanes, eight rows) and read (`ldmatrix`).
"""

from dataclasses import dataclass

from numba import cuda
from numba.cuda import types

from .codecs import ITEMSIZE
from .intrinsics import shuffle_from
from .layout import WARP
from .memory import load_u32
from .tensor import COPY_LANES, copy_row

U32, U64, I32 = types.uint32, types.uint64, types.int32


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
    """``read_entries(table, at, lane, stop)``: the table's entries for a warp's rows of its next tiles, one a lane.

    The rows of the i-th tile begin at position ``at + i * step``; lane ``i * layout.entries`` has their (first) block.
    Entries for positions from `stop` on are not read.
    """
    entries, granule, block_size = layout.entries, layout.granule, spec.block_size

    @cuda.jit(device=True)
    def read_entries(table, at, lane, stop):
        pos = U32(at + lane // U32(entries) * U32(step) + lane % U32(entries) * U32(granule))
        block = U32(0)
        if pos < stop:
            block = load_u32(table + U64(pos // U32(block_size)) * U64(4))
        return block

    return read_entries


def make_find_rows(spec, layout):
    """``find_rows(blocks, slot, pos, first, stop, lane)``: (block, offset, valid) of the lane's row, for each turn.

    `blocks` is of `read_entries`, `slot` the lane that has the tile's first entry, `pos` the position of the warp's
    first row. `valid` is 16, or 0 for rows outside of [first, stop), which become zeros and are not read.
    """
    turns, granule, block_size = layout.turns, layout.granule, spec.block_size

    @cuda.jit(device=True)
    def find_row(blocks, slot, pos, first, stop, row):
        entry = U32(row // U32(granule))
        offset = U32(0)
        if block_size != granule:
            offset = U32((pos + entry * U32(granule)) % U32(block_size))
        valid = U32(16) if U32(pos + row - first) < U32(stop - first) else U32(0)
        return shuffle_from(blocks, U32(slot + entry)), offset, valid

    @cuda.jit(device=True)
    def find_rows(blocks, slot, pos, first, stop, lane):
        row = U32(lane % U32(ROWS))
        block, offset, valid = find_row(blocks, slot, pos, first, stop, row)
        if turns == 1:
            return block, offset, valid, block, offset, valid
        row = U32(row + U32(ROWS))
        if granule > ROWS:
            next_valid = U32(16) if U32(pos + row - first) < U32(stop - first) else U32(0)
            return block, offset, valid, block, offset, next_valid
        next_block, next_offset, next_valid = find_row(blocks, slot, pos, first, stop, row)
        return block, offset, valid, next_block, next_offset, next_valid

    return find_rows


def make_copy_rows(layout):
    """``copy_rows(target, source, where, block_bytes, token_bytes, lane)``: start copying the warp's rows of a tile.

    `where` is of `find_rows`, `source` of `lane_source`, `target` the lane's place, both for its first row.
    """
    row_bytes, turns, pitch = layout.row, layout.turns, row_pitch(layout.row)
    same_block = layout.granule > ROWS

    @cuda.jit(device=True)
    def address(source, block, offset, block_bytes, token_bytes):
        return source + U64(block) * U64(block_bytes) + U64(offset) * U64(token_bytes)

    @cuda.jit(device=True)
    def copy_rows(target, source, where, block_bytes, token_bytes, lane):
        chunk = U32(lane // U32(ROWS))
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

