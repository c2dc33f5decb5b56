"""Launch a kernel on NumPy arrays."""

import struct
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from . import ops  # noqa: F401 (fills the table of opcodes)
from .compiler import compile_kernel, signature
from .counters import Stats
from .machine import Options, machine_for
from .memory import Buf, Memory, SparseBuf
from .program import load_program
from .targets import max_shared_bytes

_STATIC_SHARED = 48 << 10


@dataclass
class Result:
    """What a launch did, and what was wrong with it."""

    stats: Stats
    hazards: list = field(default_factory=list)
    ptx: str = ""

    def of(self, kind):
        """The hazards of a kind."""
        return [h for h in self.hazards if h.kind == kind]

    def assert_clean(self):
        """Fail with all hazards if there are any; else give the result back."""
        if self.hazards:
            raise AssertionError("\n".join(map(str, self.hazards)))
        return self


def launch(kernel, grid, block, args, *, shared_bytes=0, memory=None, entry=None, sig=None, cc=(9, 0),
           compile_options=None, **options):
    """Run a kernel over a grid.

    Parameters
    ----------
    kernel : str, function or dispatcher
        PTX text, or a Python function or ``@cuda.jit`` kernel to compile.
    grid, block : int or tuple of int
        Blocks, and threads a block.
    args : sequence
        NumPy arrays and `Buf` (Numba's array struct, or a bare address), `SparseBuf` (a bare address), numbers.
    shared_bytes : int
        Dynamic shared memory.
    memory : Memory, optional
        An address space to launch in: numbers among the arguments may be its addresses. By default a new one.
    entry : str, optional
        The kernel's name in PTX text that has several.
    sig, cc, compile_options
        For compiling: the signature (by default from the arguments), the compute capability, and what `compile_kernel`
        takes.
    **options
        See `Options`.

    Returns
    -------
    Result

    Raises
    ------
    PtxError
        A fault, a deadlock or a trap. What was stored until then stays.
    PtxUnsupported
        The program uses what the machine does not model.
    """
    grid, block = _extents(grid), _extents(block)
    if isinstance(kernel, str):
        ptx = kernel
    else:
        ptx = compile_kernel(kernel, sig or signature(args), cc, **(compile_options or {}))
    program = load_program(ptx, entry)
    _check_limits(program, block, shared_bytes)
    memory = Memory() if memory is None else memory
    params = _pack_parameters(program, _flatten(args), memory)
    machine = machine_for(program, Options(**options))
    with _module_variables(program, memory) as symbols:
        machine.run(grid, block, params, memory, shared_bytes, symbols)
    return Result(machine.stats, machine.hazards, ptx)


def _extents(x):
    x = tuple(int(v) for v in np.ravel(x)) + (1, 1)
    return x[:3]


def _check_limits(program, block, shared_bytes):
    """Raise where a GPU would refuse the launch."""
    threads = int(np.prod(block))
    for directive in ("maxntid", "reqntid"):
        bound = program.directives.get(directive)
        if bound and (threads > np.prod(bound) or (directive == "reqntid" and threads != np.prod(bound))):
            raise ValueError(f"block of {block}: the kernel is compiled for .{directive} {bound}")
    if threads > 1024:
        raise ValueError(f"block of {block}: {threads} threads, at most 1024 fit")
    static = sum(max(v.size, 0) for v in program.shared.values())
    fits = max_shared_bytes(program.target)
    if static > _STATIC_SHARED or static + shared_bytes > fits:
        raise ValueError(
            f"{static} bytes of static and {shared_bytes} of dynamic shared memory: {program.target} has "
            f"{_STATIC_SHARED} of the former and {fits} of both"
        )


@contextmanager
def _module_variables(program, memory):
    """The addresses of the module's variables, which live as long as the launch."""
    arrays = {}
    for variable in program.global_variables:
        arrays[variable.name] = array = np.zeros(max(variable.size, 1), np.uint8)
        array[: len(variable.init or b"")] = np.frombuffer(variable.init or b"", np.uint8)
    constant = {v.name for v in program.global_variables if v.space == "const"}
    try:
        yield {name: memory.add(array, readonly=name in constant, name=name) for name, array in arrays.items()}
    finally:
        for array in reversed(arrays.values()):
            memory.free(array)


def _flatten(args):
    for arg in args:
        if isinstance(arg, tuple):
            yield from _flatten(arg)
        else:
            yield arg


def _pack_parameters(program, args, memory):
    """{parameter name: bytes}, with arrays registered and expanded as numba-cuda passes them."""
    values = []
    for number, arg in enumerate(args):
        if isinstance(arg, SparseBuf):
            values.append(memory.add_sparse(arg.nbytes, arg.chunks, arg.readonly, arg.name or f"#{number}"))
        elif isinstance(arg, (np.ndarray, Buf)):
            buf = arg if isinstance(arg, Buf) else Buf(arg)
            address = memory.add(buf.array, buf.init, buf.readonly, buf.name or f"#{number}", buf.rows)
            values += [address] if buf.pointer else _array_struct(buf.array, address)
        else:
            values.append(arg)
    if len(values) != len(program.params):
        raise TypeError(f"{program.name} takes {len(program.params)} parameters, {len(values)} given")
    return {p.name: _pack(p, v, i) for i, (p, v) in enumerate(zip(program.params, values))}


def _array_struct(array, address):
    """meminfo, parent, size, itemsize, data, shape and strides."""
    return [0, 0, array.size, array.itemsize, address, *array.shape, *array.strides]


def _pack(parameter, value, number):
    """The bytes of a parameter."""
    size = parameter.size
    if isinstance(value, np.generic) and value.nbytes == size:
        return value.tobytes()
    if parameter.type[0] == "f" or isinstance(value, (float, np.floating)):
        if parameter.type[0] != "f":
            raise TypeError(f"parameter {number} is .{parameter.type}, {value!r} is a float")
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    value = int(value)
    if not -(1 << (8 * size - 1)) <= value < 1 << 8 * size:
        raise OverflowError(f"parameter {number} is .{parameter.type}, {value} does not fit")
    return (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
