"""Which threads run next.

The runnable threads form groups with one program counter each. The group with the lowest counter runs until it
branches, blocks, exits or meets the next group, with which it then merges; so divergent threads reconverge at the first
instruction they share.
"""

import heapq

import numpy as np

from .errors import Livelock, SyncError
from .threads import Active


class Scheduler:
    """The machine's way through its decoded functions. Subclassed by the machine."""

    def merge(self, parts):
        """The union of several groups of threads."""
        together = np.zeros(len(self.every), np.bool_)
        for part in parts:
            together[part.tid] = True
        return Active(self.every, np.flatnonzero(together))

    def run_chunk(self):
        """Run the threads that are set up until all have exited."""
        ready, order = [(0, 0, Active(self.every, np.flatnonzero(self.live)))], 0
        jumps = 0
        while ready:
            pc, _, act = heapq.heappop(ready)
            turn = -1
            if jumps > self.options.patience and ready:  # let the others run: they may be what is waited for
                order += 1
                waiting, (pc, _, act) = (pc, order, act), heapq.heappop(ready)
                heapq.heappush(ready, waiting)
                jumps, turn = 0, 2000
            elif ready and ready[0][0] == pc:
                same = [act]
                while ready and ready[0][0] == pc:
                    same.append(heapq.heappop(ready)[2])
                act = self.merge(same)
            limit = ready[0][0] if ready and turn < 0 else len(self.functions)
            result, pc, jumps = self._run_group(pc, act, limit, turn, jumps, bool(ready))
            for at, threads in [(pc, act)] if result is None else result:
                if threads.n:
                    order += 1
                    heapq.heappush(ready, (at, order, threads))
        self._check_all_done()

    def _run_group(self, pc, act, limit, turn, jumps, others):
        """Run one group to `limit`, for `turn` instructions, or until it splits: (groups or None, pc, jumps back)."""
        functions, stats = self.functions, self.stats
        warp_counts, thread_counts = stats.warp_counts, stats.thread_counts
        num_warps, n, patience, max_steps = act.num_warps, act.n, self.options.patience, self.options.max_steps
        while True:
            warp_counts[pc] += num_warps
            thread_counts[pc] += n
            stats.steps += 1
            result = functions[pc](act)
            if result is None:
                pc += 1
            elif result.__class__ is int:
                if result <= pc:
                    jumps += 1
                    if stats.steps > max_steps:
                        raise Livelock(f"more than {max_steps} steps", self.program.instrs[pc], self.who(act.tid[0]))
                    if jumps > patience and others:
                        limit = -1
                pc = result
            else:
                return result, pc, jumps
            turn -= 1
            if pc >= limit or turn == 0:
                return None, pc, jumps

    def rearrive(self, gone):
        """Threads `gone` exited: lanes of their warps that wait for a member mask look again."""
        woken, hit = [], np.zeros(len(self.live_lanes), np.bool_)
        hit[gone >> 5] = True
        for key, waiting in self.warp_waits.items():
            selected = hit[waiting >> 5]
            self.warp_waits[key] = waiting[~selected]
            for pc in np.unique(self.wait_pc[waiting[selected]]).tolist():
                act = Active(self.every, waiting[selected & (self.wait_pc[waiting] == pc)])
                self.stats.warp_counts[pc] -= act.num_warps  # this instruction was already counted once
                self.stats.thread_counts[pc] -= act.n
                woken.append((pc, act))
        return woken

    def _check_all_done(self):
        """Nothing can run: fine unless somebody waits."""
        at = {}  # waiting thread -> pc
        for arrived in self.block_waits.values():
            for act, pc in arrived:
                at.update(dict.fromkeys(act.tid.tolist(), pc))
        in_warps = [int(t) for waiting in self.warp_waits.values() for t in waiting]
        at.update((t, int(self.wait_pc[t])) for t in in_warps)
        if at:
            self._deadlock(at, in_warps)
        for copy in self.async_copies:
            if copy.open.any():
                thread = copy.tid[np.flatnonzero(copy.open)[0]]
                self.hazard("cp.async", "kernel ends with a cp.async nobody waited for", copy.pc, thread)
                return

    def _deadlock(self, at, in_warps):
        instrs = self.program.instrs
        first = in_warps[0] if in_warps else min(at)
        pc = at[first]
        if in_warps:
            base, mask = first & ~31, int(self.wait_mask[first])
            missing = [i for i in range(32) if mask >> i & 1 and at.get(base + i) != pc]
            elsewhere = sorted({at[base + i] for i in missing if base + i in at})
            why = f"its mask 0x{mask:08x} names lanes {missing}"
            why += "".join(f", some of which wait at {instrs[p].place}" for p in elsewhere)
        else:
            alive = int(self.live_in_block[first // self.padded_threads])
            places = ", ".join(instrs[p].place for p in sorted(set(at.values())))
            why = f"{alive} threads of the block are alive, they wait at {places}"
        raise SyncError(f"deadlock: {len(at)} threads wait for ever; {why}", instrs[pc], self.who(first))
