"""The machine: decodes a program once, then runs launches of it.

The threads of many blocks are one NumPy vector. Each instruction is decoded into a function of the active threads,
which returns None (go on to the next instruction), an int (all jump there) or a list of (program counter, threads) to
schedule.
"""

import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .access import Accesses
from .counters import Stats
from .errors import Hazard, PtxUnsupported
from .module import TYPE_BYTES
from .opcodes import OPCODES
from .operands import Operands
from .program import garbage_kept
from .races import MAX_INSTRUCTIONS, MAX_THREADS, Clocks, Shadow
from .scheduler import Scheduler
from .spaces import LOCAL_FIRST, SHARED_FIRST, Window
from .targets import check_target


@dataclass(frozen=True)
class Options:
    """How to run.

    Parameters
    ----------
    races : bool
        Look for races in shared memory.
    global_races : bool
        Look for unordered accesses of different threads to the same bytes of global memory.
    uninit : bool
        Look for reads of shared and local memory that nobody wrote.
    fill : int or None
        What unwritten shared and local bytes hold; 0xff makes floats NaN.
    exited_lanes : {"error", "allow"}
        A member mask that names lanes which have exited.
    atomic_order : {"forward", "reverse"}
        The order in which colliding atomics of one instruction happen.
    approximation : float
        What .approx functions add to the correctly rounded result, in units of the greatest relative error that the PTX
        ISA documents: -1 and 1 are the extremes that hardware may produce.
    chunk_threads : int
        Blocks run together up to this many threads.
    max_steps, patience : int
        The step limit, and how many jumps back a group may take before the others get a turn.
    """

    races: bool = True
    global_races: bool = False
    uninit: bool = True
    fill: int = 0xFF
    exited_lanes: str = "error"
    atomic_order: str = "forward"
    approximation: float = 0.0
    chunk_threads: int = 8192
    max_steps: int = 20_000_000
    patience: int = 100_000


@lru_cache(maxsize=512)
@garbage_kept()
def machine_for(program, options):
    """The machine that runs a program with certain options, decoded once."""
    return Machine(program, options)


class Machine(Operands, Accesses, Scheduler):
    """Runs one program, any number of times. What belongs to a launch or to a chunk of blocks is set anew each time."""

    def __init__(self, program, options):
        super().__init__(program)
        if len(program.instrs) > MAX_INSTRUCTIONS:
            raise PtxUnsupported(f"{len(program.instrs)} instructions, {MAX_INSTRUCTIONS} at most")
        self.options = options
        self.symbols = {}
        self.global_names = {v.name for v in program.global_variables}
        self._lay_out_variables()
        self.cell_bytes = {space: self._narrowest_access(space) for space in ("shared", "global")}
        self.barrier_results = {}  # pc -> what to do once a bar.red completes
        self.functions = self._decode()

    def _lay_out_variables(self):
        position = SHARED_FIRST
        for variable in self.program.shared.values():
            if variable.size >= 0:
                position = -(-position // variable.align) * variable.align
                self.symbols[variable.name] = position
                position += variable.size
        self.static_shared_end = -(-position // 16) * 16
        for variable in self.program.shared.values():
            if variable.size < 0:
                self.symbols[variable.name] = self.static_shared_end
        position = self.local_first = LOCAL_FIRST if self.program.locals else 0
        for name, variable in self.program.locals.items():
            position = -(-position // variable.align) * variable.align
            self.symbols[name] = position
            position += variable.size
        self.local_end = position

    def _narrowest_access(self, space):
        """Bytes of the narrowest access to a space, at most 4."""
        accesses = (i for i in self.program.instrs if i.name in ("ld", "st", "atom", "red"))
        return min([4, *(TYPE_BYTES.get(i.type, 4) for i in accesses if i.space in (space, "generic"))])

    def _decode(self):
        functions = []
        for pc, instr in enumerate(self.program.instrs):
            decoder = OPCODES.get(instr.name)
            if decoder is None:
                raise PtxUnsupported(f"opcode at {instr.place}")
            check_target(instr, self.program.target)
            try:
                function = decoder(self, instr, pc)
            except (KeyError, IndexError, ValueError, AttributeError, StopIteration) as error:
                raise PtxUnsupported(f"{instr.place} ({type(error).__name__}: {error})") from error
            if instr.guard and instr.name not in ("bra", "ret", "exit"):
                function = self._guarded(function, instr, pc)
            functions.append(function)
        return functions

    def guard(self, instr):
        """A reader of an instruction's guard, or None."""
        if instr.guard is None:
            return None
        read, negated = self.read(instr.guard[0], "pred"), instr.guard[1]
        return (lambda act: ~read(act)) if negated else read

    def _guarded(self, function, instr, pc):
        guard = self.guard(instr)

        def run(act):
            taken = guard(act)
            count = np.count_nonzero(taken)
            if count == act.n:
                return function(act)
            if count == 0:
                return None
            result = function(act.sub(taken))
            return None if result is None else result + [(pc + 1, act.sub(~taken))]

        return run

    # -- a launch -------------------------------------------------------------------
    def run(self, grid, block, params, memory, shared_bytes=0, symbols=None):
        """Run a grid. `params` maps parameter names to bytes, `symbols` the module's global variables to addresses."""
        start = time.perf_counter()
        self.grid, self.block, self.params, self.memory = grid, block, params, memory
        self.symbols.update(symbols or {})
        self.dynamic_shared, self.shared_end = shared_bytes, self.static_shared_end + shared_bytes
        self.threads = int(np.prod(block))
        self.padded_threads = -(-self.threads // 32) * 32
        self.stats = Stats(self.program.instrs)
        self.hazards, self._hazard_keys = [], {}
        self.global_shadows = {}
        memory.reset()
        blocks = int(np.prod(grid))
        together = max(1, min(self.options.chunk_threads, MAX_THREADS) // self.padded_threads)
        try:
            with np.errstate(all="ignore"):
                for first in range(0, blocks, together):
                    self._set_up(first, min(together, blocks - first))
                    self.run_chunk()
        finally:
            self._let_go()
        for pc, instr in enumerate(self.program.instrs):
            if instr.op == "goto":  # not an instruction of the program
                self.stats.warp_counts[pc] = self.stats.thread_counts[pc] = 0
        self.stats.add_buffers(memory.touched)
        self.stats.seconds = time.perf_counter() - start

    def _set_up(self, first, count):
        """The state of the threads of blocks first ... first + count - 1."""
        num_threads = count * self.padded_threads
        self.first_block = first
        self.every = np.arange(num_threads)
        self.block_of = self.every // self.padded_threads
        self.lane = self.every & 31
        self.live = self.every % self.padded_threads < self.threads
        self.live_in_block = np.full(count, self.threads)
        self.live_lanes = (self.live.reshape(-1, 32) << np.arange(32)).sum(axis=1)
        self.carry = np.zeros(num_threads, np.bool_)
        defined, fill = not self.options.uninit, self.options.fill
        self.shared = Window("shared", count, SHARED_FIRST, self.shared_end, 128, defined, fill)
        self.local = Window("local", num_threads, self.local_first, self.local_end, 32, defined, fill)
        self.shared_base, self.local_base = self.block_of * self.shared.stride, self.every * self.local.stride
        self.clocks = Clocks(num_threads)
        self.shared_shadow = None
        if self.options.races:
            self.shared_shadow = Shadow(self.shared.size, self.cell_bytes["shared"], self)
        self.block_waits = {}  # (barrier, expected threads) -> [(threads, pc)]
        self.barrier_votes = np.zeros(num_threads, np.bool_)  # operands of bar.red
        self.warp_waits = {}  # pc, or "bar.warp" -> thread numbers
        self.wait_pc, self.wait_mask = np.zeros(num_threads, np.int64), np.zeros(num_threads, np.int64)
        self.async_copies = []
        self.async_group = np.zeros(num_threads, np.int64)
        self.stats.warps += num_threads >> 5
        self.fill_slots()

    def _let_go(self):
        """Drop the arrays of the launch: the machine outlives it."""
        self.slots[:] = [None] * len(self.slots)
        self.shared = self.local = self.clocks = self.shared_shadow = self.memory = None
        self.global_shadows, self.async_copies = {}, []

    # -- reports --------------------------------------------------------------------
    def who(self, tid):
        """((block indices), (thread indices)) of a thread number."""
        place, block = int(tid) % self.padded_threads, int(tid) // self.padded_threads + self.first_block
        (gx, gy, _), (bx, by, _) = self.grid, self.block
        return (block % gx, block // gx % gy, block // (gx * gy)), (place % bx, place // bx % by, place // (bx * by))

    def extent(self, space):
        """The addresses of shared or local memory, for messages."""
        first, end = (SHARED_FIRST, self.shared_end) if space == "shared" else (self.local_first, self.local_end)
        return f"0x{first:x}..0x{end:x}"

    def hazard(self, kind, what, pc, tid, address=None, other=None, count=1):
        """Note a hazard; `other` is the (pc, thread number) it collides with. The same one again only counts."""
        key = (kind, what, pc, other and other[0])
        if key in self._hazard_keys:
            self._hazard_keys[key].count += count
            return
        against = ""
        if other is not None:
            block, thread = self.who(other[1])
            against = f"block {block} thread {thread} at {self.program.instrs[other[0]].place}"
        found = Hazard(kind, what, self.program.instrs[pc], self.who(tid), address, against, count)
        self._hazard_keys[key] = found
        self.hazards.append(found)
