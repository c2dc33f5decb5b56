"""cp.async: copies from global to shared memory that are visible to their thread after a wait."""

from dataclasses import dataclass

import numpy as np

from ..access import COPY_TO
from ..errors import PtxUnsupported
from ..module import TYPE_BYTES, Int, Reg
from ..opcodes import opcode
from ..spaces import DEFINED, MAPPED, row_dtype
from .memory import operands_of

_SIZES = {"ca": (4, 8, 16), "cg": (16,)}


@dataclass
class Copy:
    """The copies that one instruction started; the data was read then, and arrives when its thread waits."""

    tid: np.ndarray
    offset: np.ndarray
    data: np.ndarray  # one item of the copy's size a thread
    group: np.ndarray  # commit groups of the thread when it started
    open: np.ndarray  # not waited for yet
    pc: int


@opcode("cp")
def copy(m, instr, pc):
    parts = instr.parts
    if parts[1] == "async" and parts[2] == "commit_group":
        return _commit(m)
    if parts[1] == "async" and parts[2] in ("wait_group", "wait_all"):
        return _wait(m, None if parts[2] == "wait_all" else instr.operands[0].value)
    if parts[1] == "async" and parts[2] in _SIZES:
        return _start(m, instr, pc)
    raise PtxUnsupported(f"{instr.place}: bulk and tensor copies are not modelled")


def _commit(m):
    def run(act):
        m.async_group[act.tid] += 1

    return run


def _wait(m, allowed):
    """Wait until at most `allowed` groups of the thread are pending; None waits for copies outside of groups, too."""

    def run(act):
        here = np.zeros(len(m.every), np.bool_)
        here[act.tid] = True
        for started in m.async_copies:
            ready = started.open & here[started.tid]
            if allowed is not None:
                ready &= started.group < m.async_group[started.tid] - allowed
            if ready.any():
                _finish(m, started, ready)
        m.async_copies = [c for c in m.async_copies if c.open.any()]

    return run


def _finish(m, started, ready):
    size, offset = started.data.itemsize, started.offset[ready]
    m.shared.rows(size)[offset // size] = started.data[ready]
    m.shared.rows(size, "flags")[offset // size] = np.frombuffer(bytes([MAPPED | DEFINED]) * size, started.data.dtype)
    if m.shared_shadow:
        m.shared_shadow.write(offset, size, started.tid[ready], started.pc)
    started.open &= ~ready


def _source_length(m, instr, size):
    """A reader of the bytes to copy, by the operand after the size: a count, or a predicate to ignore the source."""
    extra = operands_of(instr)[3:]
    if not extra:
        return None
    operand = extra[0]
    if isinstance(operand, Reg) and TYPE_BYTES[m.program.registers[operand.name]] == 1:
        ignore = m.read(operand, "pred")
        return lambda act: np.where(ignore(act), 0, size)
    count = m.read(operand, "u32")
    return lambda act: np.minimum(count(act).astype(np.int64), size)


def _start(m, instr, pc):
    if not isinstance(instr.operands[2], Int) or instr.operands[2].value not in _SIZES[instr.parts[2]]:
        raise PtxUnsupported(instr.place)
    size = instr.operands[2].value
    target, source = m.address(instr.operands[0]), m.address(instr.operands[1])
    length = _source_length(m, instr, size)

    def run(act):
        addresses, sources = target(act), source(act)
        [(_, offset, _)] = m.enter("shared", addresses, size, act, pc, COPY_TO)
        lengths = np.full(act.n, size) if length is None else length(act)
        if (lengths == size).all():
            data = m.load("global", sources, min(size, 8), max(1, size // 8), act, pc)
        else:
            data = m.load_prefix(sources, lengths, size, act, pc)
        data = data.view(row_dtype(size)).ravel()
        if m.shared_shadow:  # overwriting what others may still read is a race already now
            m.shared_shadow.write(offset, size, act.tid, pc, note=False)
        started = np.ones(act.n, np.bool_)
        m.async_copies.append(Copy(act.tid.copy(), offset, data, m.async_group[act.tid], started, pc))

    return run
