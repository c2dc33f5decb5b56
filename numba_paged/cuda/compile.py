"""From a kernel to PTX and to a cubin, for any compute capability, without a driver.

The PTX that the tests execute is the text that is assembled here for the GPU.
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
    """
    bounds = (kernel.num_threads, kernel.min_blocks) if kernel.min_blocks else kernel.num_threads
    with _compiling_for(cc):
        function = kernel.make(kernel.spec)
        signature = types.void(*kernel.parameters.values())
        ptx, _ = cuda.compile_ptx(function, signature, cc=cc, launch_bounds=bounds)
    return ENVIRONMENT.sub("", ptx).replace(ENTRY.search(ptx)[1], kernel.name)


def assemble(ptx, cc):
    """The machine code of PTX.

    Parameters
    ----------
    ptx : str
        What to assemble.
    cc : (int, int)
        Compute capability.

    Returns
    -------
    bytes
        A cubin.

    Raises
    ------
    RuntimeError
        If it is refused; the message has the assembler's own.
    """
    text = ptx.encode()
    linker = nvjitlink.create(1, [f"-arch=sm_{cc[0]}{cc[1]}"])
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text, len(text), "kernel")
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        raise RuntimeError(f"PTX cannot be assembled for compute capability {cc[0]}.{cc[1]}: {error} "
                           f"{log.rstrip(bytes(1)).decode()}") from error
    finally:
        nvjitlink.destroy(linker)
    return bytes(cubin)


def compile_cubin(kernel, cc):
    """The machine code of a kernel.

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
        If it cannot be assembled.
    """
    return assemble(compile_ptx(kernel, cc), cc)
