"""What a run can find wrong. A fault ends the run; a hazard is collected, and the run goes on.

Each names the PTX line, the block and thread, and the address where there is one.
"""

from dataclasses import dataclass


class PtxUnsupported(NotImplementedError):
    """The PTX uses something this machine does not model, or something its own target does not have."""


class PtxError(RuntimeError):
    """The program did something a GPU would fault on, hang on, or leave undefined."""

    kind = "error"

    def __init__(self, message, instr=None, thread=None, address=None):
        self.instr, self.thread, self.address = instr, thread, address
        who = f" by block {thread[0]} thread {thread[1]}" if thread else ""
        where = f" address 0x{address:x}" if address is not None else ""
        super().__init__(f"{self.kind}: {message}{who}{where}" + (f" at {instr.place}" if instr else ""))


class MemoryFault(PtxError):
    """An access outside the buffers, misaligned, or a store to a read-only buffer."""

    kind = "memcheck"


class SyncError(PtxError):
    """A barrier or a warp-wide instruction whose threads can never meet."""

    kind = "synccheck"


class Livelock(PtxError):
    """The step limit was passed."""

    kind = "livelock"


class Trap(PtxError):
    """The program executed ``trap``."""

    kind = "trap"


@dataclass
class Hazard:
    """Something that gave a result here but is undefined on a GPU.

    `kind` is one of race, uninit, sync, nc-coherence, cp.async, div-by-zero; `other` describes the access it races
    with.
    """

    kind: str
    what: str
    instr: object
    thread: tuple
    address: int = None
    other: str = ""
    count: int = 1

    def __str__(self):
        address = f" address 0x{self.address:x}" if self.address is not None else ""
        text = f"{self.kind}: {self.what} x{self.count}, block {self.thread[0]} thread {self.thread[1]}{address}"
        return f"{text} at {self.instr.place}" + (f"; against {self.other}" if self.other else "")
