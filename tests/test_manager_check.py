"""check() notices whatever is wrong between the sequences, the blocks, the plans and the host pool."""

import pytest

import numba_paged as npg
from caches import prompt, small_cache
from numba_paged.sequences import LEAVING, LIVE, SWAPPED


def busy_cache():
    """Sequences that share, a plan with a copy, one that leaves, one that is swapped out."""
    cache = small_cache(num_blocks=16, max_sequences=6, num_host_blocks=4)
    a = prompt(cache, list(range(6)))
    b = cache.fork(a)
    out = prompt(cache, [50] * 6)
    cache.swap_out(out)
    plan = cache.plan([b])
    cache.free(cache.add(), after=plan)
    cache.check()
    return cache, cache._sequences, a, b, out


BREAKAGES = {
    "a length": (lambda s, a, b, out: s.lengths.__setitem__(a, 9), "has more or fewer blocks than its tokens"),
    "a negative length": (lambda s, a, b, out: s.lengths.__setitem__(a, -1), "has a negative length or plan"),
    "a number of blocks": (lambda s, a, b, out: s.num_blocks.__setitem__(a, 1), "has more or fewer blocks"),
    "planned positions": (lambda s, a, b, out: s.planned.__setitem__(b, 2), "2 planned positions, open plans have 1"),
    "a plan that is not": (lambda s, a, b, out: s.planned.__setitem__(a, 1), "1 planned positions, open plans have 0"),
    "a missing block": (lambda s, a, b, out: s.table.__setitem__((a, 0), -1), "where there is no block"),
    "a block too many": (lambda s, a, b, out: s.table.__setitem__((a, 2), 1), "where there is no block"),
    "a wrong block": (lambda s, a, b, out: s.table.__setitem__((a, 0), 15), "references, tables and open plans hold"),
    "a block out of range": (lambda s, a, b, out: s.table.__setitem__((a, 0), 16), "holds a block out of range: .*16"),
    "a slid block": (lambda s, a, b, out: s.starts.__setitem__(a, 1), "lacks a block inside of its window"),
    "known ids": (lambda s, a, b, out: s.known.__setitem__(a, 7), "more known token ids than tokens"),
    "a handle": (lambda s, a, b, out: s.handles.__setitem__(a, 1), "does not belong to its row"),
    "a state": (lambda s, a, b, out: s.states.__setitem__(a, 9), "is in no state"),
    "a sequence that is gone": (lambda s, a, b, out: s.states.__setitem__(a, 0), "free rows are not those"),
    "a free row": (lambda s, a, b, out: s.free_rows.pop(), "free rows are not those"),
    "a last block that is shared": (lambda s, a, b, out: s.states.__setitem__(a, LIVE), "own last one, but .* 2 ref"),
    "a sequence that leaves": (lambda s, a, b, out: s.states.__setitem__(a, LEAVING), "rows that are leaving"),
    "a sequence on the host": (lambda s, a, b, out: s.states.__setitem__(a, SWAPPED), "references, .* hold"),
    "a host block": (lambda s, a, b, out: s.table.__setitem__((out, 0), 3), "host block . has . references"),
    "a host block out of range": (lambda s, a, b, out: s.table.__setitem__((out, 0), 4), "host block out of range"),
}


@pytest.mark.parametrize(("damage", "match"), BREAKAGES.values(), ids=BREAKAGES)
def test_check_notices(damage, match):
    cache, sequences, a, b, out = busy_cache()
    damage(sequences, a, b, out)
    with pytest.raises(npg.CorruptState, match=match):
        cache.check()


def test_check_notices_a_reference_and_a_forgotten_plan():
    cache, _, a, *_ = busy_cache()
    cache._pool.refs[cache.blocks(a)[0]] += 1
    with pytest.raises(npg.CorruptState, match=r"block \d+ has 3 references, tables and open plans hold 2"):
        cache.check()
    cache = busy_cache()[0]
    cache._open_plans.popitem()
    with pytest.raises(npg.CorruptState, match="tables and open plans hold"):
        cache.check()
    cache = busy_cache()[0]
    cache._host.blocks.refs[0] += 1
    with pytest.raises(npg.CorruptState, match="host block 0 has 2 references, swapped out sequences hold 1"):
        cache.check()
