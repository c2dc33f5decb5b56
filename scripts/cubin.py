"""What is in a kernel's machine code: registers, stack, SASS, loops, and how many blocks fit on a multiprocessor."""

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

WARP = 32
REGISTER_FILE = 65536
BLOCK_RESERVE = 1024
"""Bytes of shared memory that the driver keeps of each block, from compute capability 8.0 on."""

LIMITS = {  # compute capability: warps, blocks, bytes of shared memory of a multiprocessor (CUDA C++ Programming Guide)
    (8, 0): (64, 32, 164 << 10), (8, 6): (48, 16, 100 << 10), (8, 7): (48, 16, 164 << 10), (8, 9): (48, 24, 100 << 10),
    (9, 0): (64, 32, 228 << 10), (10, 0): (64, 32, 228 << 10), (10, 3): (64, 32, 228 << 10),
    (12, 0): (48, 24, 100 << 10), (12, 1): (48, 24, 100 << 10),
}  # fmt: skip

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
LABEL = re.compile(r"^(\.L_\w+):")
TARGET = re.compile(r"\((\.L_\w+)\)")
MEMORY = ("LDG", "LDGSTS", "STG", "LDS", "STS", "LDL", "STL", "LDSM", "ATOMG", "RED")
WHOLE_NAMES = (*MEMORY, "HMMA", "MUFU", "SHFL")
"""Instructions that are told apart by their modifiers too."""


@dataclass(frozen=True)
class Instruction:
    """One line of SASS."""

    address: int
    opcode: str
    operands: str

    @property
    def name(self):
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def access_bytes(self):
        """Bytes that a thread's load or store moves; 0 for what is none."""
        if self.name not in MEMORY:
            return 0
        if self.name == "LDSM":
            return 4 * {"1": 1, "2": 2, "4": 4}[self.opcode[-1]]
        bits = re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", self.opcode)
        return int(bits[1]) // 8 if bits else 4


@dataclass(frozen=True)
class Resources:
    """What a thread or a block takes: registers and bytes."""

    registers: int
    stack: int
    shared: int
    local: int


def tool(name):
    """The path of one of NVIDIA's tools.

    Parameters
    ----------
    name : {"nvdisasm", "cuobjdump"}
        Which.

    Returns
    -------
    str

    Raises
    ------
    FileNotFoundError
        If it is neither in the environment's packages nor on the path.
    """
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = next(packages.glob(f"*/bin/{name}"), None) or shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is missing: pip install nvidia-cuda-{name}, or put a CUDA toolkit on the path")
    return str(found)


def _run(name, cubin, *flags):
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([tool(name), *flags, file], capture_output=True, text=True, check=True).stdout


def resources(cubin, name):
    """The `Resources` of a kernel."""
    usage = _run("cuobjdump", cubin, "--dump-resource-usage")
    row = re.search(rf"Function {name}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    return Resources(*map(int, row.groups()))


def disassemble(cubin, name):
    """The SASS of a kernel, without the functions that it calls.

    Returns
    -------
    (list of Instruction, dict of str to int)
        The code, and the addresses of its labels.
    """
    code, labels, waiting = [], {}, []
    sections = re.split(r"^\.text\.(\w+):$", _run("nvdisasm", cubin, "-c"), flags=re.MULTILINE)
    for line in sections[sections.index(name) + 1].splitlines():
        if label := LABEL.match(line.strip()):
            waiting.append(label[1])
        elif found := INSTRUCTION.search(line):
            code.append(Instruction(int(found[1], 16), found[3], found[4].strip()))
            labels.update(dict.fromkeys(waiting, code[-1].address))
            waiting = []
    return code, labels


def loops(code, labels):
    """The instructions of every loop: from the target of a backward branch up to the branch."""
    found = []
    for branch in code:
        target = TARGET.search(branch.operands) if branch.name == "BRA" else None
        if target and labels.get(target[1], branch.address) < branch.address:
            found.append([i for i in code if labels[target[1]] <= i.address <= branch.address])
    return found


def loaded_bytes(code):
    """Bytes of global memory that a warp asks for when it runs each of these instructions once."""
    return WARP * sum(i.access_bytes for i in code if i.name in ("LDG", "LDGSTS"))


def main_loop(code, labels):
    """The loop that asks for the most bytes of global memory, or an inner one that asks for a third of them.

    So it is for a loop that stands, with the first copies ahead of it, in a loop of its own. Empty if none asks for any.
    """
    asking = [loop for loop in loops(code, labels) if loaded_bytes(loop)]
    most = max(map(loaded_bytes, asking), default=0)
    return min((loop for loop in asking if 3 * loaded_bytes(loop) >= most), key=len, default=[])


def mix(code):
    """How often each kind of instruction stands in the code, the most frequent first."""
    return dict(Counter(i.opcode if i.name in WHOLE_NAMES else i.name for i in code).most_common())


def resident_blocks(cc, registers, num_threads, shared_bytes):
    """How many blocks of a kernel a multiprocessor holds at once.

    Parameters
    ----------
    cc : (int, int)
        Compute capability.
    registers : int
        Of a thread.
    num_threads, shared_bytes : int
        Of a block; all its shared memory.

    Returns
    -------
    int
    """
    warps, blocks, shared = LIMITS[cc]
    block_warps = -(-num_threads // WARP)
    warp_registers = -(-registers * WARP // 256) * 256  # given out in units of 256
    by_registers = REGISTER_FILE // 4 // warp_registers * 4 // block_warps  # each quarter has its own
    return min(blocks, warps // block_warps, by_registers, shared // (shared_bytes + BLOCK_RESERVE))
