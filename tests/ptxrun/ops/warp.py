"""Warp-wide instructions: shuffles, votes, matches, reductions, the warp barrier."""

from functools import lru_cache

import numpy as np

from ..errors import PtxUnsupported, SyncError
from ..module import Int, Pair
from ..opcodes import opcode
from ..threads import Active

ALL_LANES = 0xFFFFFFFF


def first_and_second(operand):
    """The destinations of p|q, the second None where there is one only."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def together(m, instr, pc, mask, execute, key=None):
    """Wait until the lanes that a member mask names are here, then execute(act, mask), the mask None for whole warps.

    Lanes of one warp may hold different masks and then form several groups. `key` joins the waits of different
    instructions; by default lanes meet at the same instruction only.
    """
    key = pc if key is None else key
    constant = isinstance(mask, Int) and mask.value & ALL_LANES == ALL_LANES
    read_mask = m.read(mask, "u32")

    def run(act):
        waiting = m.warp_waits.get(key, ())
        if not len(waiting) and act.whole_warps and (constant or (read_mask(act) == ALL_LANES).all()):
            execute(act, None)
            return None
        m.wait_pc[act.tid] = pc
        m.wait_mask[act.tid] = read_mask(act)
        merged = len(waiting) > 0
        if merged:
            act = m.merge([act, Active(m.every, waiting)])
        _check_members(m, instr, act)
        mask = m.wait_mask[act.tid] & m.live_lanes[act.warp]
        bit = np.int64(1) << (act.tid & 31)
        group = group_numbers(act, mask)
        here = np.bincount(group, weights=bit).astype(np.int64)[group]
        ready = (here & mask) == mask
        m.warp_waits[key] = act.tid[~ready]
        if ready.all() and not merged:
            execute(act, mask)
            return None
        act, mask = act.sub(ready), mask[ready]
        if act.n:
            execute(act, mask)
        pcs = m.wait_pc[act.tid]
        return [(int(at) + 1, act.sub(pcs == at)) for at in np.unique(pcs)]

    return run


def _check_members(m, instr, act):
    """A lane must be in its own mask, and no exited lane may be."""
    mask, lane = m.wait_mask[act.tid], act.tid & 31
    outside = (mask >> lane) & 1 == 0
    if outside.any():
        i = int(np.flatnonzero(outside)[0])
        what = f"lane {lane[i]} executes this but its mask 0x{int(mask[i]):08x} does not name it"
        raise SyncError(what, instr, m.who(act.tid[i]))
    gone = mask & ~m.live_lanes[act.warp]
    if gone.any() and m.options.exited_lanes == "error":
        i = int(np.flatnonzero(gone)[0])
        what = f"mask 0x{int(mask[i]):08x} names lanes 0x{int(gone[i]):08x} that have exited or do not exist"
        raise SyncError(what, instr, m.who(act.tid[i]))


def group_numbers(act, mask):
    """The number of each thread's group: its warp, or the lanes of its warp with the same mask."""
    if mask is None:
        return np.r_[0, np.cumsum(act.breaks)]
    return np.unique((act.warp << 32) | mask, return_inverse=True)[1]


def lane_bits(act, group, which):
    """The lanes of each thread's group that a bool array selects, as a bit mask."""
    bits = np.where(which, np.int64(1) << (act.tid & 31), 0)
    return np.bincount(group, weights=bits).astype(np.int64)[group]


def warp_barrier(m, instr, pc):
    """bar.warp.sync: lanes may wait for each other at different ones."""

    def execute(act, mask):
        m.stats.warp_syncs += act.num_warps
        m.clocks.warp_barrier(act.tid, group_numbers(act, mask))

    return together(m, instr, pc, instr.operands[-1], execute, key="bar.warp")


@opcode("shfl")
def shuffle(m, instr, pc):
    """Read a register of another lane; out of range, a lane reads its own."""
    if instr.parts[1] != "sync":
        raise PtxUnsupported(instr.place)
    mode = instr.parts[2]
    target, source, offset, clamp, members = instr.operands
    target, valid = first_and_second(target)
    write, write_valid = m.write(target, "b32"), m.write(valid, "pred") if valid else None
    read, read_offset, read_clamp = m.read(source, "b32"), m.read(offset, "u32"), m.read(clamp, "u32")
    fixed = None
    if isinstance(offset, Int) and isinstance(clamp, Int):
        fixed = _whole_warps(*_source_lanes(mode, np.arange(32), np.int64(offset.value), np.int64(clamp.value)))

    def execute(act, mask):
        values, tid = read(act), act.tid
        if fixed and mask is None:
            source, ok = fixed(act.n)
            write(act, values.take(source))
            if write_valid:
                write_valid(act, ok)
            return
        lane = tid & 31
        source_lane, ok = _source_lanes(mode, lane, read_offset(act).astype(np.int64), read_clamp(act).astype(np.int64))
        if mask is not None:
            _check_sources(m, pc, act, source_lane, mask)
        everyone = np.zeros(len(m.every), np.uint32)
        everyone[tid] = values
        write(act, everyone[tid - lane + source_lane])
        if write_valid:
            write_valid(act, ok)

    return together(m, instr, pc, members, execute)


def _whole_warps(source, ok):
    """A function of a number of threads in whole warps: (positions that they read, whether in range)."""

    @lru_cache(maxsize=8)
    def positions(count):
        return (np.arange(0, count, 32)[:, None] + source).ravel(), np.tile(ok, count // 32)

    return positions


def _source_lanes(mode, lane, offset, clamp):
    """(the lane that each lane reads, whether it is in range)."""
    offset = offset & 31
    segment, clamp = (clamp >> 8) & 31, clamp & 31
    limit = (lane & segment) | (clamp & ~segment)
    if mode == "idx":
        source = (lane & segment) | (offset & ~segment)
    else:
        source = {"up": lane - offset, "down": lane + offset, "bfly": lane ^ offset}[mode]
    ok = source >= limit if mode == "up" else source <= limit
    return np.where(ok, source, lane), ok


def _check_sources(m, pc, act, source_lane, mask):
    unnamed = (mask >> source_lane) & 1 == 0
    if unnamed.any():
        i = int(np.flatnonzero(unnamed)[0])
        what = f"shfl reads lane {source_lane[i]}, which its mask 0x{int(mask[i]):08x} does not name"
        m.hazard("sync", what, pc, act.tid[i], count=int(unnamed.sum()))


@opcode("vote")
def vote(m, instr, pc):
    target, source, members = instr.operands
    mode, ty = instr.parts[2], instr.type
    read, write = m.read(source, "pred"), m.write(target, ty)

    def execute(act, mask):
        group = group_numbers(act, mask)
        yes, every = lane_bits(act, group, read(act)), lane_bits(act, group, True)
        if mode == "ballot":
            write(act, yes.astype(np.uint32))
        else:
            write(act, {"all": yes == every, "any": yes != 0, "uni": (yes == 0) | (yes == every)}[mode])

    return together(m, instr, pc, members, execute)


@opcode("activemask")
def active_mask(m, instr, pc):
    write = m.write(instr.operands[0], "b32")
    return lambda act: write(act, lane_bits(act, group_numbers(act, None), True).astype(np.uint32))


@opcode("match")
def match(m, instr, pc):
    """The lanes that hold the same value; for .all, every lane or none."""
    target, source, members = instr.operands
    target, all_same = first_and_second(target)
    write, write_same = m.write(target, "b32"), m.write(all_same, "pred") if all_same else None
    read = m.read(source, instr.type)

    def execute(act, mask):
        group = group_numbers(act, mask)
        value = np.unique(read(act), return_inverse=True)[1]
        _, alike = np.unique(group * (value.max() + 1) + value, return_inverse=True)
        same = lane_bits(act, alike, True)
        if instr.parts[1] == "any":
            return write(act, same.astype(np.uint32))
        every = lane_bits(act, group, True)
        write(act, np.where(same == every, every, 0).astype(np.uint32))
        if write_same:
            write_same(act, same == every)

    return together(m, instr, pc, members, execute)


@opcode("redux")
def reduce_warp(m, instr, pc):
    target, source, members = instr.operands
    ty = instr.type
    read, write = m.read(source, ty), m.write(target, ty)
    operator = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[instr.parts[2]]
    if ty == "f32":
        operator = {"min": np.fmin, "max": np.fmax}[instr.parts[2]]

    def execute(act, mask):
        group = group_numbers(act, mask)
        order = np.argsort(group, kind="stable")
        starts = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0])
        values = read(act)
        write(act, operator.reduceat(values[order], starts).astype(values.dtype)[group])

    return together(m, instr, pc, members, execute)


@opcode("elect")
def elect(m, instr, pc):
    """One lane of the mask is chosen: here the lowest."""
    target, members = instr.operands
    lane, chosen = first_and_second(target)
    write_lane, write_chosen = m.write(lane, "b32"), m.write(chosen, "pred")

    def execute(act, mask):
        group = group_numbers(act, mask)
        leader = np.full(group.max() + 1, len(m.every))
        np.minimum.at(leader, group, act.tid)
        write_lane(act, (leader[group] & 31).astype(np.uint32))
        write_chosen(act, leader[group] == act.tid)

    return together(m, instr, pc, members, execute)
