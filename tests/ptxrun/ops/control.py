"""Branches, exits and traps."""

import numpy as np

from ..errors import Trap
from ..opcodes import opcode
from .barrier import release_barriers


@opcode("bra")
def branch(m, instr, pc):
    target, guard = instr.target, m.guard(instr)
    if guard is None:
        return lambda act: target

    def run(act):
        taken = guard(act)
        count = m.stats.branches[pc]
        count[0] += act.num_warps
        num_taken = np.count_nonzero(taken)
        if num_taken == act.n:
            return target
        if num_taken == 0:
            return None
        jumping, staying = act.sub(taken), act.sub(~taken)
        count[1] += jumping.num_warps + staying.num_warps - act.num_warps
        return [(target, jumping), (pc + 1, staying)]

    return run


@opcode("goto")
def goto(m, instr, pc):
    """Put in by `layout.reorder`; not an instruction of the program."""
    target = instr.target
    return lambda act: target


@opcode("ret", "exit")
def leave(m, instr, pc):
    guard = m.guard(instr)

    def run(act):
        scheduled = []
        if guard is not None:
            leaving = guard(act)
            if not leaving.any():
                return None
            if not leaving.all():
                scheduled.append((pc + 1, act.sub(~leaving)))
                act = act.sub(leaving)
        gone = act.tid
        m.live[gone] = False
        m.live_in_block -= np.bincount(m.block_of[gone], minlength=len(m.live_in_block))
        np.bitwise_and.at(m.live_lanes, gone >> 5, ~(np.int64(1) << m.lane[gone]))
        if m.block_waits:
            scheduled += release_barriers(m)
        if m.warp_waits:
            scheduled += m.rearrive(gone)
        return scheduled

    return run


@opcode("trap")
def trap(m, instr, pc):
    def run(act):
        raise Trap(f"{act.n} threads", instr, m.who(act.tid[0]))

    return run
