"""The picture of the pool shows each block once, as what it is."""

import xml.etree.ElementTree as xml

from caches import prompt, small_cache
from numba_paged.draw import MOST_CELLS

SVG = "{http://www.w3.org/2000/svg}"


def cells(cache):
    """The description of each block, and the share of it that is colored."""
    groups = xml.fromstring(cache.draw()._repr_svg_()).findall(f"{SVG}g")
    return [(group.find(f"{SVG}title").text, float(group.findall(f"{SVG}rect")[1].get("height")) / 14)
            for group in groups]


def test_each_block_is_what_it_is():
    cache = small_cache(num_blocks=9)
    cache.free(prompt(cache, [9] * 5))
    seq = prompt(cache, list(range(10)))
    child = cache.fork(seq)
    other = cache.add()
    plan = cache.plan([child, other])
    shown = dict(text.removeprefix("block ").split(": ", 1) for text, _ in cells(cache))
    assert list(shown) == [str(i) for i in range(9)]
    blocks = cache.blocks(seq)
    assert [shown[str(block)] for block in blocks[:2]] == [f"2 references: sequences {seq}, {child}"] * 2
    assert shown[str(plan.copies[0, 0])] == f"2 references: sequences {seq}, an open plan"
    assert shown[str(cache.blocks(other)[0])] == f"sequence {other}, 0 of 4 slots"
    assert sorted(shown.values()).count("free") == cache.stats().num_free
    assert list(shown.values()).count("cached") == 1
    cache.commit(plan)
    assert (f"block {blocks[2]}: sequence {seq}, 2 of 4 slots", 0.5) in cells(cache)


def test_a_large_pool_is_drawn_in_part():
    cache = small_cache(num_blocks=MOST_CELLS + 5)
    assert len(cells(cache)) == MOST_CELLS
    assert f"the first {MOST_CELLS} of {MOST_CELLS + 5} blocks" in str(cache.draw())
