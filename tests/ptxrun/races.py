"""Happens-before race detection.

Memory is watched in cells, each as wide as the program's narrowest access but at most 4 bytes. A cell remembers the
last write and the last reads since: one by anybody, one by another lane of that reader's warp, one by another warp, and
one that was relaxed or volatile. Each is packed into 63 bits as epoch:20 | clock:12 | pc:16 | thread:15. The epoch
counts the block barriers a thread has passed; the clock counts its warp barriers, and `known[thread, lane]` is the
clock of that lane of its warp that the thread has synchronised with.

An earlier access is ordered before one now if it is of an earlier epoch of the same block, or by the same thread, or by
a lane of the same warp whose later clock is known.
"""

import numpy as np
from numba import njit

MAX_THREADS, MAX_INSTRUCTIONS = 1 << 15, 1 << 16
_TID, _PC_SHIFT, _CLOCK_SHIFT, _EPOCH_SHIFT = MAX_THREADS - 1, 15, 31, 43
_MAX_CLOCK = 4095
_WRITE, _READ = range(2)  # what a cell remembers in `common`
_READ_LANE, _READ_WARP, _READ_RELAXED = range(3)  # and in `rare`


class Clocks:
    """What each thread has synchronised with."""

    def __init__(self, num_threads):
        self.epoch = np.ones(num_threads, np.int64)
        self.clock = np.zeros(num_threads, np.int64)
        self.known = np.zeros((num_threads, 32), np.int64)
        self.stamp = np.zeros(num_threads, np.int64)  # an access now, without its pc
        self._tid = np.arange(num_threads)
        self._ticked = False
        self._restamp(slice(None))

    def _restamp(self, threads):
        clock = np.minimum(self.clock[threads], _MAX_CLOCK)
        self.stamp[threads] = (self.epoch[threads] << _EPOCH_SHIFT) | (clock << _CLOCK_SHIFT) | self._tid[threads]

    def block_barrier(self, threads):
        """These threads (all of their blocks) passed a block barrier."""
        self.epoch[threads] += 1
        if self._ticked:
            self.clock[threads] = 0
            self.known[threads] = 0
        self._restamp(threads)

    def warp_barrier(self, threads, group):
        """These threads passed a warp barrier, each with those of its group (numbers from 0)."""
        self._ticked = True
        _join(threads, group, self.clock, self.known)
        self._restamp(threads)


@njit(cache=True)
def _join(threads, group, clock, known):
    """Each thread of a group ticks, and gets to know what any of the group knows."""
    common = np.zeros((group.max() + 1, 32), np.int64)
    for i in range(len(threads)):
        t = threads[i]
        clock[t] += 1
        known[t, t & 31] = clock[t]
        for lane in range(32):
            common[group[i], lane] = max(common[group[i], lane], known[t, lane])
    for i in range(len(threads)):
        known[threads[i]] = common[group[i]]


class Shadow:
    """The accesses that the cells of one memory space remember."""

    def __init__(self, size, cell_bytes, machine, segment=None):
        """Watch `size` bytes of shared memory, or of a segment of global memory."""
        self.machine, self.segment = machine, segment
        self.shift = cell_bytes.bit_length() - 1
        cells = (size >> self.shift) + 1
        self.common, self.rare = np.zeros((cells, 2), np.int64), np.zeros((cells, 3), np.int64)
        self.rare_used = np.zeros(1, np.bool_)  # whether `rare` holds anything
        self.atomic = np.zeros(cells, np.bool_)

    def _state(self):
        m = self.machine
        cells = self.common, self.rare, self.rare_used, self.atomic
        return *cells, m.clocks.known, m.clocks.stamp, m.block_of, self.segment is not None

    def read(self, offset, size, tid, pc, relaxed=False):
        """Check and note a read."""
        first = np.zeros(3, np.int64)
        races = _read(offset >> self.shift, max(1, size >> self.shift), tid, pc, relaxed, first, *self._state())
        if races:
            self._report("read after write", races, first, pc)

    def write(self, offset, size, tid, pc, values=None, atomic=False, note=True):
        """Check and, unless told otherwise, note a write.

        Threads that write the same value of `values` [threads, ...] to the same place at once do not race.
        """
        cells, found = (offset >> self.shift, max(1, size >> self.shift)), np.zeros((3, 3), np.int64)
        counts = _write(*cells, tid, pc, atomic, note, found, *self._state())
        for what, count, first in zip(("write after write", "write after read"), counts, found):
            if count:
                self._report(what, count, first, pc)
        if counts[2] and not atomic:
            what = _collision(offset, values)
            if what:
                self._report(what, counts[2], found[2], pc)

    def _report(self, what, count, first, pc):
        earlier, tid, cell = first.tolist()
        offset = cell << self.shift
        if self.segment is None:
            space, address = "shared", offset % self.machine.shared.stride
        else:
            space, address = "global", offset + self.segment.start
        other = (earlier >> _PC_SHIFT) & 0xFFFF, earlier & _TID
        self.machine.hazard("race", f"{space} {what}", pc, tid, address, other, count)


@njit(cache=True)
def _unordered(earlier, tid, now, known, blocks, is_global):
    """Whether another thread's earlier access is not ordered before the access `now` of thread `tid`."""
    other = earlier & _TID
    if is_global and blocks[other] != blocks[tid]:
        return True
    if earlier >> _EPOCH_SHIFT != now >> _EPOCH_SHIFT:
        return False
    clock = (earlier >> _CLOCK_SHIFT) & _MAX_CLOCK
    return other >> 5 != tid >> 5 or (min(known[tid, other & 31], _MAX_CLOCK) <= clock and clock < _MAX_CLOCK)


@njit(cache=True)
def _note(found, count, earlier, tid, cell):
    """Keep the first race; give the new count."""
    if count == 0:
        found[0], found[1], found[2] = earlier, tid, cell
    return count + 1


@njit(cache=True)
def _read(
    first_cell, count, tids, pc, relaxed, found, common, rare, rare_used, atomic, known, stamps, blocks, is_global
):
    """The number of races; `found` gets the first of them as (earlier access, thread, cell)."""
    races = 0
    for i in range(len(tids)):
        tid = tids[i]
        now = stamps[tid] | (pc << _PC_SHIFT)
        for cell in range(first_cell[i], first_cell[i] + count):
            earlier = common[cell, _WRITE]
            if earlier != 0 and earlier & _TID != tid and not (relaxed and atomic[cell]):
                if _unordered(earlier, tid, now, known, blocks, is_global):
                    races = _note(found, races, earlier, tid, cell)
            if relaxed:
                rare[cell, _READ_RELAXED] = now
                rare_used[0] = True
                continue
            earlier = common[cell, _READ]
            common[cell, _READ] = now
            if earlier != 0 and (earlier ^ now) & _TID != 0 and (earlier ^ now) >> _EPOCH_SHIFT == 0:
                rare[cell, _READ_LANE if ((earlier ^ now) & _TID) >> 5 == 0 else _READ_WARP] = earlier
                rare_used[0] = True
    return races


@njit(cache=True)
def _write(
    first_cell,
    count,
    tids,
    pc,
    is_atomic,
    note,
    found,
    common,
    rare,
    rare_used,
    atomic,
    known,
    stamps,
    blocks,
    is_global,
):
    """Races with writes, with reads, and with writes of this pc, perhaps just now; `found` gets the first of each."""
    writes, reads, again = 0, 0, 0
    for i in range(len(tids)):
        tid = tids[i]
        now = stamps[tid] | (pc << _PC_SHIFT)
        for cell in range(first_cell[i], first_cell[i] + count):
            earlier = common[cell, _WRITE]
            if earlier != 0 and earlier & _TID != tid and not (is_atomic and atomic[cell]):
                if _unordered(earlier, tid, now, known, blocks, is_global):
                    if earlier == stamps[earlier & _TID] | (pc << _PC_SHIFT):
                        again = _note(found[2], again, earlier, tid, cell)
                    else:
                        writes = _note(found[0], writes, earlier, tid, cell)
            earlier = common[cell, _READ]
            if earlier != 0 and earlier & _TID != tid and _unordered(earlier, tid, now, known, blocks, is_global):
                reads = _note(found[1], reads, earlier, tid, cell)
            if rare_used[0]:
                for kind in range(2 if is_atomic else 3):
                    earlier = rare[cell, kind]
                    if (
                        earlier != 0
                        and earlier & _TID != tid
                        and _unordered(earlier, tid, now, known, blocks, is_global)
                    ):
                        reads = _note(found[1], reads, earlier, tid, cell)
                    if note:
                        rare[cell, kind] = 0
            if note:
                common[cell, _WRITE], common[cell, _READ] = now, 0
                atomic[cell] = is_atomic
    return writes, reads, again


def _collision(offset, values):
    """What to call a write to a cell that the same instruction wrote: another lane just now, or some time ago."""
    order = np.argsort(offset, kind="stable")
    same = offset[order][1:] == offset[order][:-1]
    if not same.any():
        return "write after write"
    if values is None:
        return "two threads write at once"
    values = values.reshape(len(offset), -1)[order]
    return "two threads write at once" if (same & (values[1:] != values[:-1]).any(axis=1)).any() else None
