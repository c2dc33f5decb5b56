"""A picture of the pool: which blocks are whose, shared, cached and free, and how full they are."""

from html import escape

import numpy as np

from .sequences import LEAVING

CELL, GAP, PER_ROW, TOP = 14, 2, 64, 30
MOST_CELLS = 4096
"""Blocks past these are not drawn: a picture of more has no use, and would be megabytes."""

SHARED, CACHED, FREE = "#444444", "#c9d4e0", "#ffffff"


def _color(handle):
    """A sequence's color: neighbors are far apart on the color wheel (by the golden angle)."""
    return f"hsl({handle * 137.508 % 360:.0f}, 65%, 55%)"


def _owners(sequences):
    """For each block that sequences hold: [(handle, tokens of the sequence in the block)]."""
    owners, block_size = {}, sequences.block_size
    for row in np.flatnonzero(sequences.in_pool() | (sequences.states == LEAVING)):
        length = int(sequences.lengths[row])
        for column, block in enumerate(sequences.blocks(row).tolist()):
            if block >= 0:
                filled = min(max(length - column * block_size, 0), block_size)
                owners.setdefault(block, []).append((int(sequences.handles[row]), filled))
    return owners


class Drawing:
    """A picture of the pool at one moment, shown by notebooks.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    sequences : SequenceTables
        Who holds them.

    Notes
    -----
    A block is a square in the color of its sequence, as high as it is full; dark where several hold it, gray-blue where
    it is cached for its prefix, white where it is free. Its description says more.
    """

    def __init__(self, pool, sequences):
        cells = self._cells(pool, sequences)
        counts = {"free": pool.num_free, "cached": pool.num_cached, "shared": int((pool.refs > 1).sum())}
        counts["of one sequence"] = pool.num_blocks - sum(counts.values())
        colors = {"of one sequence": _color(0), "shared": SHARED, "cached": CACHED, "free": FREE}
        legend = [_key(f"{counts[name]} {name}", color, 170 * i) for i, (name, color) in enumerate(colors.items())]
        if pool.num_blocks > MOST_CELLS:
            legend.append(f'<text x="690" y="15">the first {MOST_CELLS} of {pool.num_blocks} blocks</text>')
        width = PER_ROW * (CELL + GAP)
        height = TOP + -(-len(cells) // PER_ROW) * (CELL + GAP)
        self._svg = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 0 {width + 2} {height}" width="{width}" '
                     f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#f4f4f4"/>'
                     f'{"".join(legend)}{"".join(cells)}</svg>')

    def _cells(self, pool, sequences):
        owners, cached = _owners(sequences), set(pool.cached_blocks().tolist())
        cells = []
        for block, refs in enumerate(pool.refs[:MOST_CELLS].tolist()):
            held = owners.get(block, [])
            if refs == 0:
                is_cached = block in cached
                cells.append(_cell(block, CACHED if is_cached else FREE, 1, "cached" if is_cached else "free"))
            elif refs > 1:
                names = ", ".join([str(handle) for handle, _ in held] + ["an open plan"] * (refs > len(held)))
                cells.append(_cell(block, SHARED, 1, f"{refs} references: sequences {names}"))
            else:
                handle, filled = held[0] if held else (-1, 0)
                what = f"sequence {handle}, {filled} of {sequences.block_size} slots" if held else "an open plan"
                cells.append(_cell(block, _color(handle), filled / sequences.block_size, what))
        return cells

    def _repr_svg_(self):
        return self._svg

    def __str__(self):
        return self._svg


def _key(text, color, x):
    return (f'<rect x="{x + 4}" y="4" width="{CELL}" height="{CELL}" fill="{color}" stroke="#999999"/>'
            f'<text x="{x + CELL + 10}" y="15">{escape(text)}</text>')


def _cell(block, color, filled, what):
    """One block: a frame, and in it a part as high as the block is full."""
    x, y = block % PER_ROW * (CELL + GAP), TOP + block // PER_ROW * (CELL + GAP)
    part = CELL * filled
    return (f'<g><title>block {block}: {escape(what)}</title>'
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{FREE}" stroke="#999999"/>'
            f'<rect x="{x}" y="{y + CELL - part:g}" width="{CELL}" height="{part:g}" fill="{color}"/></g>')
