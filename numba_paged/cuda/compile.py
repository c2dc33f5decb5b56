"""From a kernel to PTX and to a cubin, for any compute capability, without a driver.

Both come out of nvJitLink, from the same intermediate code: the PTX that the tests execute is what it hands to its own
assembler. Assembling the text instead would give other machine code on compute capability 8: without the knowledge that
it is the whole program, every shuffle is guarded against divergent warps, which takes registers and even stack.
"""

import gc
import re
from collections.abc import Callable, Hashable
from contextlib import contextmanager
from dataclasses import dataclass

from cuda.bindings import nvjitlink
from numba import cuda
from numba.cuda import dispatcher, types
from numba.cuda.core.compiler_lock import global_compiler_lock

ENTRY = re.compile(r"^\.visible \.entry ([\w$]+)\(", re.MULTILINE)
MANGLED = re.compile(rb"\0\.text\.([\w$]+)\0")
ENVIRONMENT = re.compile(r"^\.common \.global .* _ZN08NumbaEnv\w+;\n", re.MULTILINE)
"""A variable that Numba declares for every function, for interpreters; kernels never use it."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel to compile: its factory and what the factory is given, not yet the function itself.

    Kernels are told apart by identity: make them in a cached function of the spec.

    Parameters
    ----------
    name : str
        What profilers and logs show.
    make : callable
        ``make(spec)`` returns the kernel, plain Python; called only if the compiled kernel is in no cache.
    spec : hashable
        The facts that are frozen into the kernel; its ``repr`` must say all of them.
    parameters : dict of str to numba type
        The kernel's parameters, scalars only.
    num_threads : int
        Threads of a block.
    shared_bytes : int
        Dynamic shared memory of a block.
    min_blocks : int
        Blocks that a multiprocessor should be able to hold at once, which bounds the registers; 0 leaves it open.
    """

    name: str
    make: Callable
    spec: Hashable
    parameters: dict
    num_threads: int
    shared_bytes: int = 0
    min_blocks: int = 0


@contextmanager
def _compiling_for(cc):
    """Numba asks the current device what its device functions are compiled for; meanwhile this answers.

    Nor is garbage collected: typing makes very many objects and hardly any garbage, a sixth of the time went into it.
    """

    class Device:
        compute_capability = cc

    with global_compiler_lock:
        current, dispatcher.get_current_device = dispatcher.get_current_device, Device
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            dispatcher.get_current_device = current
            if collecting:
                gc.enable()


def _intermediate(kernel, cc):
    """The LTO-IR of a kernel (bytes)."""
    bounds = (kernel.num_threads, kernel.min_blocks) if kernel.min_blocks else kernel.num_threads
    with _compiling_for(cc):
        function = kernel.make(kernel.spec)
        signature = types.void(*kernel.parameters.values())
        code, _ = cuda.compile(function, signature, device=False, abi="numba", cc=cc, output="ltoir", launch_bounds=bounds)
    return code


def _link(code, cc, *options):
    """Optimise and assemble LTO-IR; with the option "-ptx", give the assembler's input instead (bytes)."""
    options = [f"-arch=sm_{cc[0]}{cc[1]}", "-lto", *options]
    linker = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.LTOIR, code, len(code), "kernel")
        nvjitlink.complete(linker)
        as_ptx = "-ptx" in options
        size = (nvjitlink.get_linked_ptx_size if as_ptx else nvjitlink.get_linked_cubin_size)(linker)
        linked = bytearray(size)
        (nvjitlink.get_linked_ptx if as_ptx else nvjitlink.get_linked_cubin)(linker, linked)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        raise RuntimeError(f"the kernel cannot be assembled for compute capability {cc[0]}.{cc[1]}: {error} "
                           f"{log.rstrip(bytes(1)).decode()}") from error
    finally:
        nvjitlink.destroy(linker)
    return bytes(linked)


def compile_ptx(kernel, cc):
    """The PTX of a kernel; its entry point is called like the kernel.

    Parameters
    ----------
    kernel : Kernel
        What to compile.
    cc : (int, int)
        Compute capability.

    Returns
    -------
    str

    Raises
    ------
    RuntimeError
        If it cannot be assembled; the message has the assembler's own.
    """
    ptx = _link(_intermediate(kernel, cc), cc, "-ptx").rstrip(bytes(1)).decode()
    return ENVIRONMENT.sub("", ptx).replace(ENTRY.search(ptx)[1], kernel.name)


def compile_cubin(kernel, cc):
    """The machine code of a kernel; its entry point is called like the kernel.

    Parameters
    ----------
    kernel : Kernel
        What to compile.
    cc : (int, int)
        Compute capability.

    Returns
    -------
    bytes
        A cubin.

    Raises
    ------
    RuntimeError
        If it cannot be assembled; the message has the assembler's own.
    """
    cubin = _link(_intermediate(kernel, cc), cc)
    mangled = MANGLED.search(cubin)[1]
    # the name stands in the tables of names only: a shorter one, closed by zeros, can take its place
    return cubin.replace(mangled, kernel.name.encode().ljust(len(mangled), bytes(1)))
