"""How a tile of keys or values lies in shared memory, and which lane works on what: chosen on the host, per spec.

A *tile* is a run of `tokens` token slots of one kv head. It is copied row by row; rows are `pitch` bytes apart.

- For the scores a lane owns one token: lane = part * tokens + token, and reads every `parts`-th 16-byte chunk of it.
- For the weighted values a lane owns numbers of the head: lane = group * dim_lanes + dim_lane, and of every
  `groups`-th token reads `units` runs of `width` numbers, `dim_lanes` runs apart.

Both ways are free of bank conflicts: `pitch` is made so.
"""

import functools
from dataclasses import dataclass

from .codecs import ITEMSIZE

WARP = 32
MAX_ACCUMULATORS = 32
"""Registers of a lane for the weighted values, where there is a choice: more would crowd out resident warps."""

TOKENS_A_WARP = 64
"""About the fewest tokens a warp attends before its results are added up."""


@dataclass(frozen=True)
class TileLayout:
    """See the module. Sizes are in bytes, `tokens`, `parts`, `groups`, `units`, `width` are counts."""

    tokens: int
    parts: int
    chunks: int
    dim_lanes: int
    units: int
    width: int
    row: int
    pitch: int
    itemsize: int
    code: int

    @property
    def groups(self):
        """Tokens whose values a warp reads at once."""
        return WARP // self.dim_lanes

    @property
    def chunk_numbers(self):
        """Numbers in 16 bytes."""
        return 16 // self.itemsize

    @property
    def query_row(self):
        """Bytes of a query row in shared memory, float32, filled up with zeros to whole chunks."""
        return 4 * self.chunks * self.parts * self.chunk_numbers

    @property
    def tile(self):
        """Bytes of a tile."""
        return self.tokens * self.pitch

    @property
    def padded(self):
        """Whether lanes read past the end of a row, where there must be zeros."""
        return max(_score_bytes(self), _value_bytes(self)) > self.row

    @property
    def numbers(self):
        """Numbers of a head that a lane accumulates."""
        return self.units * self.width


def _score_bytes(layout):
    return 16 * layout.chunks * layout.parts


def _value_bytes(layout):
    return layout.units * layout.dim_lanes * layout.width * layout.itemsize


def wavefronts(addresses, size):
    """Passes that a shared access of 32 lanes takes: 32 banks of 4 bytes, lanes on the same word share it.

    Accesses of 8 bytes are served by half warps, of 16 bytes by quarter warps.
    """
    lanes = {8: 16, 16: 8}.get(size, WARP)
    passes = 0
    for first in range(0, len(addresses), lanes):
        words = {(a + i) // 4 for a in addresses[first : first + lanes] for i in range(0, max(size, 4), 4)}
        banks = [word % 32 for word in words]
        passes += max(banks.count(bank) for bank in set(banks))
    return passes


def _conflicts(layout):
    """Passes of one score access and one value access beyond what their sizes need."""
    score = [lane % layout.tokens * layout.pitch + lane // layout.tokens * 16 for lane in range(WARP)]
    size = layout.width * layout.itemsize
    value = [lane // layout.dim_lanes * layout.pitch + lane % layout.dim_lanes * size for lane in range(WARP)]
    needed = {8: 2, 16: 4}
    return wavefronts(score, 16) - 4 + wavefronts(value, size) - needed.get(size, 1)


def _value_ways(head_dim, itemsize, tokens, rows):
    """(cost, numbers, dim_lanes, units, width) of every way to share a head's numbers among lanes, the cheapest first.

    The cost is in instructions for one token: conversions, multiply-adds, loads of values and of weights, and a share
    of adding up the groups at the end (over TOKENS_A_WARP tokens).
    """
    ways = []
    for dim_lanes in (32, 16, 8, 4, 2, 1):
        groups = WARP // dim_lanes
        for width in (16, 8, 4, 2, 1):
            units = -(-head_dim // (dim_lanes * width))
            numbers = units * width
            if width * itemsize <= 16 and groups <= tokens:
                cost = (numbers * (1 + rows) + units + -(-rows // 4)) / groups
                cost += 2 * numbers * rows * (groups.bit_length() - 1) / TOKENS_A_WARP
                excess = max(0, rows * numbers - MAX_ACCUMULATORS)
                ways.append((excess, cost, numbers, dim_lanes, units, width))
    return [way[3:] for way in sorted(ways)]


@functools.cache
def tile_layout(head_dim, code, rows, tile_bytes):
    """The layout of a kernel that keeps `rows` query rows in a warp.

    Parameters
    ----------
    head_dim : int
        Numbers of a row.
    code : int
        The pool's format, as in `codecs`.
    rows : int
        Query rows that a lane keeps scores and accumulators of.
    tile_bytes : int
        About what a tile may take.

    Returns
    -------
    TileLayout
    """
    itemsize = ITEMSIZE[code]
    row = head_dim * itemsize
    tokens = next((t for t in (32, 16) if t * row <= tile_bytes), 8)
    parts = WARP // tokens
    chunks = -(-row // (16 * parts))
    for dim_lanes, units, width in _value_ways(head_dim, itemsize, tokens, rows):
        for extra in range(8):
            layout = TileLayout(tokens, parts, chunks, dim_lanes, units, width, row, 0, itemsize, code)
            need = max(_score_bytes(layout), _value_bytes(layout))
            layout = TileLayout(tokens, parts, chunks, dim_lanes, units, width, row,
                                -(-need // 16) * 16 + 16 * extra, itemsize, code)
            if _conflicts(layout) == 0:
                return layout
    raise AssertionError(f"no layout without bank conflicts for head_dim {head_dim}, itemsize {itemsize}")
