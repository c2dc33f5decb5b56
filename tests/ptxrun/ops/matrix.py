"""Tensor-core instructions: fragments in and out of shared memory, transposes, products.

In an 8x8 matrix of 16-bit elements, lane l holds row l // 4, columns 2 * (l % 4) and the next. A 16-row fragment of the
m16n8 products is made of 32-bit registers that hold, for lane l = 4 * g + t, row g or g + 8 and consecutive columns of
the t-th quarter.
"""

import numpy as np

from .. import formats
from ..errors import PtxUnsupported
from ..module import Int, Vector
from ..opcodes import opcode
from ..operands import DTYPE
from ..spaces import SHARED_WINDOW
from .warp import ALL_LANES, together

_ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_DECODE = {
    "f16": lambda u: u.view(np.float16),
    "bf16": lambda u: formats.decode_bf16(u.view(np.uint16)),
    "tf32": lambda u: (u & np.uint32(0xFFFFE000)).view(np.float32),
    "e4m3": lambda u: formats.decode_float8(u.view(np.uint8), "e4m3"),
    "e5m2": lambda u: formats.decode_float8(u.view(np.uint8), "e5m2"),
    "s8": lambda u: u.view(np.int8),
    "u8": lambda u: u.view(np.uint8),
}


def _to_registers(matrices):
    """uint16 [warps, 8, 8] to one uint32 a lane."""
    return np.ascontiguousarray(matrices).view(np.uint32).ravel()


def _to_matrices(registers):
    """One uint32 a lane to uint16 [warps, 8, 8]."""
    return registers.view(np.uint16).reshape(-1, 8, 8)


@opcode("ldmatrix", "stmatrix")
def move_matrices(m, instr, pc):
    """Load or store 8x8 matrices of 16-bit elements whose 16-byte rows lie at the addresses of lanes 0-7, 8-15, ..."""
    parts, loads = instr.parts, instr.name == "ldmatrix"
    if "m8n8" not in parts or instr.type != "b16":
        raise PtxUnsupported(instr.place)
    address, registers = (instr.operands[1], instr.operands[0]) if loads else instr.operands
    registers = registers.items if isinstance(registers, Vector) else [registers]
    count = int(next(p for p in parts if p in ("x1", "x2", "x4"))[1])
    read_address, transposed = m.address(address), "trans" in parts
    access = [m.write(r, "b32") for r in registers] if loads else [m.read(r, "b32") for r in registers]

    def execute(act, mask):
        rows = (act.tid & 31) < 8 * count
        at, lanes = read_address(act)[rows], act if count == 4 else act.sub(rows)
        at = np.where(at >= SHARED_WINDOW, at - SHARED_WINDOW, at)
        if loads:
            matrices = m.load("shared", at, 8, 2, lanes, pc).view(np.uint16).reshape(-1, count, 8, 8)
            matrices = matrices.transpose(0, 1, 3, 2) if transposed else matrices
            for i, write in enumerate(access):
                write(act, _to_registers(matrices[:, i]))
        else:
            matrices = np.stack([_to_matrices(read(act)) for read in access], axis=1)
            matrices = matrices.transpose(0, 1, 3, 2) if transposed else matrices
            m.store("shared", at, np.ascontiguousarray(matrices).view(np.uint64).reshape(-1, 2), 8, 2, lanes, pc)

    return together(m, instr, pc, Int(ALL_LANES), execute)


@opcode("movmatrix")
def transpose_matrix(m, instr, pc):
    """Transpose an 8x8 matrix that a warp holds in registers."""
    if not {"m8n8", "trans", "b16"} <= set(instr.parts):
        raise PtxUnsupported(instr.place)
    target, source = instr.operands
    write, read = m.write(target, "b32"), m.read(source, "b32")

    def execute(act, mask):
        write(act, _to_registers(_to_matrices(read(act)).transpose(0, 2, 1)))

    return together(m, instr, pc, Int(ALL_LANES), execute)


@opcode("mma")
def multiply_matrices(m, instr, pc):
    """D = A @ B + C, summed in float64 and rounded once; tensor cores differ in the last bits."""
    parts = instr.parts
    to, a_type, b_type, c_type = parts[-4:]
    depth = int(next(p for p in parts if p.startswith("m16n8k"))[6:])
    if "row" not in parts or "col" not in parts or to not in ("f32", "f16", "s32") or c_type not in (to, "f16"):
        raise PtxUnsupported(instr.place)
    target, *sources = (o.items for o in instr.operands)
    read_a, read_b, read_c = ([m.read(r, "b32") for r in s] for s in sources)
    writes = [m.write(r, "b32" if to == "f16" else to) for r in target]
    per_register = 4 // _ELEMENT_BYTES[a_type]
    columns = depth // (4 * per_register)  # registers along the depth
    if len(read_a) != 2 * columns or len(read_b) != columns:
        raise PtxUnsupported(instr.place)

    def values(act, reads, ty):
        """[warps, 8 (g), 4 (t), registers, elements a register]"""
        words = np.stack([read(act) for read in reads], axis=1)
        return _DECODE[ty](words).astype(np.float64).reshape(-1, 8, 4, len(reads), per_register)

    def execute(act, mask):
        a = values(act, read_a, a_type).reshape(-1, 8, 4, columns, 2, per_register)
        a = a.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, depth)
        b = values(act, read_b, b_type).transpose(0, 3, 2, 4, 1).reshape(-1, depth, 8)
        product = (a @ b).reshape(-1, 2, 8, 4, 2)  # row half, g, t, column
        total = product.transpose(0, 2, 3, 1, 4).reshape(-1, 4) + _accumulator(act, read_c, c_type)
        if to == "f16":
            total = formats.encode_f16(total).view(np.uint32)
        for i, write in enumerate(writes):
            write(act, np.ascontiguousarray(total[:, i]).astype(DTYPE["b32" if to == "f16" else to], copy=False))

    return together(m, instr, pc, Int(ALL_LANES), execute)


def _accumulator(act, reads, ty):
    """C as float64 [threads, 4]: row g, columns 2t and 2t+1, then row g + 8."""
    words = np.stack([read(act) for read in reads], axis=1)
    return words.view(np.float16 if ty == "f16" else DTYPE[ty]).astype(np.float64)
