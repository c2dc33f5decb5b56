"""Block barriers."""

import numpy as np

from ..errors import PtxUnsupported, SyncError
from ..module import Int
from ..opcodes import opcode
from .warp import warp_barrier


@opcode("bar", "barrier")
def barrier(m, instr, pc):
    """bar.sync, bar.red and their `barrier` spellings; bar.warp.sync is a warp instruction."""
    if "warp" in instr.parts:
        return warp_barrier(m, instr, pc)
    reduces = "red" in instr.parts
    numbers = instr.operands[1:-1] if reduces else instr.operands
    if "arrive" in instr.parts or "cluster" in instr.parts or not all(isinstance(o, Int) for o in numbers):
        raise PtxUnsupported(f"{instr.place}: only bar.sync and bar.red with constant operands are modelled")
    name = numbers[0].value if numbers else 0
    expected = numbers[1].value if len(numbers) > 1 else None
    predicate = m.read(instr.operands[-1], "pred") if reduces else None
    if reduces:
        m.barrier_results[pc] = _reduction(m, instr)

    def run(act):
        if reduces:
            m.barrier_votes[act.tid] = predicate(act)
        waits_for = None if expected == m.threads else expected
        if waits_for is None and not m.block_waits and act.n == len(m.live_in_block) * m.threads:
            _pass_barrier(m, np.ones(len(m.live_in_block), np.bool_))
            if reduces:
                m.barrier_results[pc](act)
            return None
        m.block_waits.setdefault((name, waits_for), []).append((act, pc))
        return release_barriers(m)

    return run


def _reduction(m, instr):
    """bar.red: what the threads that passed get, from the votes of their block's live threads."""
    is_predicate = instr.type == "pred"
    write = m.write(instr.operands[0], instr.type)

    def finish(act):
        voters = np.flatnonzero(m.live)
        blocks, num_blocks = m.block_of[voters], len(m.live_in_block)
        yes = np.bincount(blocks, weights=m.barrier_votes[voters], minlength=num_blocks).astype(np.int64)
        if "popc" in instr.parts:
            result = yes
        else:
            result = yes == np.bincount(blocks, minlength=num_blocks) if "and" in instr.parts else yes > 0
        mine = result[m.block_of[act.tid]]
        write(act, mine if is_predicate else mine.astype(np.uint32))

    return finish


def _pass_barrier(m, blocks):
    """The blocks of a mask completed a barrier."""
    m.stats.barriers += int(blocks.sum())
    m.clocks.block_barrier(slice(None) if blocks.all() else blocks[m.block_of])


def release_barriers(m):
    """Groups that may go on because every thread that their barrier expects has arrived: [(pc, threads)]."""
    released = []
    for key in list(m.block_waits):
        arrived, expected = m.block_waits[key], key[1]
        count = sum(np.bincount(m.block_of[act.tid], minlength=len(m.live_in_block)) for act, _ in arrived)
        wanted = m.live_in_block if expected is None else np.full(len(count), expected)
        if (count > wanted).any():
            act, pc = arrived[-1]
            what = f"barrier {key[0]}: more threads arrived than it expects"
            raise SyncError(what, m.program.instrs[pc], m.who(act.tid[0]))
        done = (count == wanted) & (count > 0)
        if done.any():
            released += _release(m, key, done)
    return released


def _release(m, key, done):
    """Let the threads of the blocks in `done` pass one barrier."""
    passing, staying = [], []
    for act, pc in m.block_waits.pop(key):
        go = done[m.block_of[act.tid]]
        if go.any():
            passing.append((pc, act.sub(go)))
        if not go.all():
            staying.append((act.sub(~go), pc))
    if staying:
        m.block_waits[key] = staying
    _check_aligned(m, passing)
    early = done & (m.live_in_block < m.threads)
    if key[1] is None and early.any():
        pc, act = passing[0]
        missing = m.threads - int(m.live_in_block[np.flatnonzero(early)[0]])
        m.hazard("sync", f"barrier passed although {missing} threads of the block have exited", pc, act.tid[0])
    _pass_barrier(m, done)
    for pc, act in passing:
        if pc in m.barrier_results:
            m.barrier_results[pc](act)
    return [(pc + 1, act) for pc, act in passing]


def _check_aligned(m, passing):
    """bar and .aligned barriers need all lanes of a warp at the same instruction."""
    first = {}  # warp -> pc
    for pc, act in passing:
        instr = m.program.instrs[pc]
        aligned = instr.name == "bar" or "aligned" in instr.parts
        for warp in np.unique(act.warp).tolist():
            other = first.setdefault(warp, pc)
            if other != pc and aligned:
                where = m.program.instrs[other].place
                raise SyncError(
                    f"divergent warp at an aligned barrier: other lanes are at {where}", instr, m.who(act.tid[0])
                )
