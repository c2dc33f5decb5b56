"""Loads and stores: where an access goes, whether it may, what it counts as."""

from typing import NamedTuple

import numpy as np

from .errors import MemoryFault
from .inner import BAD_FLAGS, CLASH, MISALIGNED, check_access, count_sectors, count_wavefronts
from .races import Shadow
from .spaces import (
    DEFINED,
    LOADED,
    LOADED_NC,
    LOCAL_WINDOW,
    MAPPED,
    PENDING,
    READONLY,
    SHARED_WINDOW,
    STORED,
    UNSIGNED,
    row_dtype,
)


class Rule(NamedTuple):
    """What the bytes of an access must be, must not be and become; what is noted, and what it clashes with."""

    verb: str
    need: int
    forbid: int
    grant: int
    mark: int
    clash: int = 0
    clashes: str = ""


LOAD = Rule("load", MAPPED | DEFINED, PENDING, 0, LOADED)
LOAD_NC = Rule("load", MAPPED | DEFINED, PENDING, 0, LOADED_NC, STORED, "ld.global.nc of bytes this kernel wrote")
_REREAD = LOADED_NC, "store to bytes this kernel reads with ld.global.nc"
STORE = Rule("store", MAPPED, READONLY | PENDING, DEFINED, STORED, *_REREAD)
ATOMIC = Rule("atomic", MAPPED | DEFINED, READONLY | PENDING, DEFINED, STORED, *_REREAD)
COPY_TO = Rule("cp.async store", MAPPED, READONLY | PENDING, PENDING, 0)  # the bytes arrive with a wait


class Accesses:
    """The machine's way to memory. Subclassed by the machine, which owns the spaces and the clocks."""

    def load(self, space, address, element, count, act, pc, rule=LOAD, relaxed=False):
        """`count` unsigned elements of `element` bytes a thread: [threads], or [threads, count] for a vector.

        `relaxed` marks an access that other threads may race with (volatile, relaxed, acquire).
        """
        size = element * count
        pieces = self.enter(space, address, size, act, pc, rule)
        if pieces[0][2] is None:
            rows = self._load_piece(*pieces[0][:2], size, act, pc, relaxed)
        else:
            rows = np.empty(act.n, row_dtype(size))
            for where, offset, lanes in pieces:
                rows[lanes] = self._load_piece(where, offset, size, act.sub(lanes), pc, relaxed)
        return rows.view(UNSIGNED[element]).reshape(-1, count) if count > 1 else rows

    def _load_piece(self, where, offset, size, act, pc, relaxed):
        shadow = self.shadow_of(where)
        if shadow:
            shadow.read(offset, size, act.tid, pc, relaxed)
        return where.rows(size).take(offset // size)

    def load_prefix(self, address, lengths, size, act, pc):
        """One request for the first `lengths` bytes at each global address: uint8 [threads, size], zero-filled."""
        values = np.zeros((act.n, size), np.uint8)
        some = np.flatnonzero(lengths > 0)
        if len(some) == 0:
            return values
        asked = act.sub(some)
        self._count_global(address[some], size, asked, pc)
        if (address[some] & (size - 1)).any():
            self._misaligned("global", address[some], size, asked, pc, LOAD)
        for byte in range(int(lengths.max())):
            lanes = np.flatnonzero(lengths > byte)
            readers = act.sub(lanes)
            for where, offset, part in self._place("global", address[lanes] + byte, 1, readers, pc, LOAD):
                part = np.arange(len(lanes)) if part is None else part
                self._check(where, offset, 1, readers.sub(part), pc, LOAD)
                values[lanes[part], byte] = self._load_piece(where, offset, 1, readers.sub(part), pc, False)
        return values

    def store(self, space, address, values, element, count, act, pc, relaxed=False):
        """Store unsigned elements: [threads], or [threads, count] for a vector."""
        size = element * count
        rows = values.view(row_dtype(size)).ravel() if count > 1 else values
        for where, offset, lanes in self.enter(space, address, size, act, pc, STORE):
            given, some = (rows, act) if lanes is None else (rows[lanes], act.sub(lanes))
            shadow = self.shadow_of(where)
            if shadow:
                shadow.write(offset, size, some.tid, pc, given, relaxed)
            where.rows(size)[offset // size] = given

    def shadow_of(self, where):
        """The race detector of a space, or None."""
        if where.name == "shared":
            return self.shared_shadow
        if where.name == "global" and self.options.global_races:
            key = id(where)
            if key not in self.global_shadows:
                self.global_shadows[key] = Shadow(where.size, self.cell_bytes["global"], self, where)
            return self.global_shadows[key]
        return None

    # -- where an access goes -----------------------------------------------------
    def enter(self, space, address, size, act, pc, rule):
        """Check, note and count an access: [(space, offsets, lanes or None for all)]."""
        pieces = self._place(space, address, size, act, pc, rule)
        for where, offset, lanes in pieces:
            self._check(where, offset, size, act if lanes is None else act.sub(lanes), pc, rule)
        if space == "global":
            self._count_global(address, size, act, pc)
        elif space == "shared":
            count = self.stats.shared_access[pc]
            wavefronts, ideal = count_wavefronts(pieces[0][1], size, act.tid)
            count.requests += act.num_warps
            count.wavefronts += wavefronts
            count.ideal += ideal
        return pieces

    def _place(self, space, address, size, act, pc, rule):
        if space == "global":
            pieces = self.memory.pieces(address, size)
            if not pieces or (pieces[0][2] is not None and sum(len(lanes) for _, _, lanes in pieces) < act.n):
                outside = np.ones(act.n, np.bool_)
                for _, _, lanes in pieces:
                    outside[lanes] = False
                self._out_of_bounds(space, address, outside, size, act, pc, rule)
            return pieces
        where, base = (self.shared, self.shared_base) if space == "shared" else (self.local, self.local_base)
        if int(np.maximum.reduce(address.view(np.uint64))) >= where.stride:
            outside = address.view(np.uint64) >= where.stride
            self._out_of_bounds(space, address, outside, size, act, pc, rule)
        return [(where, address + (base if act.index is None else base[act.index]), None)]

    def _count_global(self, address, size, act, pc):
        count = self.stats.global_access[pc]
        count.requests += act.num_warps
        count.sectors += count_sectors(address, act.tid)
        count.ideal += act.ideal_sectors(size)
        count.bytes += act.n * size

    # -- whether it may --------------------------------------------------------------
    def _check(self, where, offset, size, act, pc, rule):
        flags = where.flags, where.rows(8, "flags")
        if where.name == "global":
            mark, trace, trace8 = rule.mark, where.trace, where.rows(8, "trace")
        else:
            mark, trace, trace8 = 0, *flags
        found = check_access(offset, size, *flags, rule.need, rule.forbid, rule.grant, trace, trace8, mark, rule.clash)
        if found & MISALIGNED:
            self._misaligned(where.name, self._address(where, offset, act), size, act, pc, rule)
        if found & BAD_FLAGS:
            self._explain_flags(where, offset, size, act, pc, rule)
        if found & CLASH:
            hit = (trace[offset[:, None] + np.arange(size)] & rule.clash) != 0
            self._hazard_of("nc-coherence", rule.clashes, hit, where, offset, act, pc)
        if mark:
            where.count("load" if rule in (LOAD, LOAD_NC) else "store", offset, size)

    def _misaligned(self, space, address, size, act, pc, rule):
        lane = int(np.flatnonzero(address & (size - 1))[0])
        self._fault(f"misaligned {space} {rule.verb} of {size} bytes", act, lane, address, pc)

    def _fault(self, message, act, lane, address, pc):
        raise MemoryFault(message, self.program.instrs[pc], self.who(act.tid[lane]), int(address[lane]))

    def _out_of_bounds(self, space, address, outside, size, act, pc, rule):
        lane = int(np.flatnonzero(outside)[0])
        where = (
            self.memory.describe(int(address[lane])) if space == "global" else f"{space} memory is {self.extent(space)}"
        )
        count = int(np.count_nonzero(outside))
        self._fault(
            f"out-of-bounds {space} {rule.verb} of {size} bytes ({where}), {count} threads", act, lane, address, pc
        )

    def _explain_flags(self, where, offset, size, act, pc, rule):
        """Fault where a byte is not mapped, or read-only; a hazard where one was never written or is to arrive."""
        bytes_ = offset[:, None] + np.arange(size)
        flags = where.flags[bytes_]
        address = self._address(where, offset, act)
        unmapped = ((flags & MAPPED) == 0).any(axis=1)
        if unmapped.any():
            self._out_of_bounds(where.name, address, unmapped, size, act, pc, rule)
        readonly = ((flags & rule.forbid & READONLY) != 0).any(axis=1)
        if readonly.any():
            lane, count = int(np.flatnonzero(readonly)[0]), int(readonly.sum())
            what = f"{where.name} {rule.verb} to a read-only buffer ({self.memory.describe(int(address[lane]))})"
            self._fault(f"{what}, {count} threads", act, lane, address, pc)
        pending = (flags & rule.forbid & PENDING) != 0
        undefined = (~flags & rule.need & DEFINED != 0) & ~pending
        self._hazard_of("uninit", f"{where.name} {rule.verb} of bytes never written", undefined, where, offset, act, pc)
        what = f"shared {rule.verb} of bytes that a cp.async has yet to write"
        self._hazard_of("cp.async", what, pending, where, offset, act, pc)
        where.flags[bytes_] |= np.uint8(rule.grant)

    def _hazard_of(self, kind, what, bytes_, where, offset, act, pc):
        """Report the first of the threads with a byte of a mask [threads, size]."""
        lanes = bytes_.any(axis=1)
        count = int(np.count_nonzero(lanes))
        if count:
            lane = int(np.flatnonzero(lanes)[0])
            self.hazard(kind, what, pc, act.tid[lane], int(self._address(where, offset, act)[lane]), count=count)

    def _address(self, where, offset, act):
        """Back from offsets to what the program would call them."""
        if where.name == "global":
            return offset + where.start
        return offset - (self.shared_base if where.name == "shared" else self.local_base)[act.tid]


def space_of(address):
    """0 global, 1 shared, 2 local: where generic addresses point."""
    return np.where(address >= SHARED_WINDOW, 1, np.where(address >= LOCAL_WINDOW, 2, 0))
