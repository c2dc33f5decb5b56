"""Run compiled PTX on the CPU, with the checks of compute-sanitizer and the counters of Nsight Compute.

A whole grid runs in lockstep on NumPy vectors. The text that runs is the text that is assembled for a GPU, so what a
kernel computes, reads and writes is tested without one::

    import ptxrun

    result = ptxrun.launch(kernel, grid=(8, 4), block=128, args=[q, keys, out, 0.125], cc=(9, 0))   # NumPy arrays
    result.assert_clean()                                       # no hazards; out holds what the kernel wrote
    print(result.stats.report())

`kernel` is PTX text, a Python function or a ``@cuda.jit`` kernel; where the latter two cannot be compiled, `missing()`
says why. Kernels that take addresses run in a `Memory`, which outlives a launch::

    memory = ptxrun.Memory()
    address = memory.add(keys, init=written, readonly=True, name="keys")     # written: bool, broadcasts against keys
    target = memory.add(out, init=False)
    ptxrun.launch(ptx, grid, block, [address, target, num_tokens], memory=memory, shared_bytes=4096, entry="decode")

Arrays are used in place. All views of one array lie in one range, and only what was added exists. A pool larger than
the machine's memory is a `virtual_array`, or a `SparseBuf` (``memory.add_sparse``), of which only some parts exist.

A fault ends the run with a `PtxError`, which names the PTX line, the block and thread, and the address: an access out
of bounds, misaligned or to a read-only buffer; threads that wait for each other for ever; a trap. Hazards are
collected:

============ ==========================================================================================================
race         accesses of several threads to the same bytes, one of them a write, that nothing orders. Shared memory;
             global memory with ``global_races=True``
uninit       a read of bytes that nobody wrote: shared and local memory, arrays added with `init`
cp.async     an access to bytes that an asynchronous copy has yet to write
nc-coherence ld.global.nc of bytes that the kernel writes
sync         a barrier that exited threads never reach, a shuffle from a lane outside of its mask
div-by-zero  integer division
============ ==========================================================================================================

Counted are warp instructions by class, sectors and bytes of global memory by instruction, bytes asked for and distinct
ones by buffer, passes through the shared-memory banks, barriers, divergence (`Stats`).

Instructions: what NVVM makes of Numba kernels for sm_80 to sm_100, and inline PTX of loads and stores of all widths,
conversions to and from float16, bfloat16, float8 and tf32, cp.async, ldmatrix, stmatrix, movmatrix and mma m16n8. An
instruction that the module's target lacks is refused. Results are those of a GPU to the bit, but for three things:
.approx functions are rounded correctly (``approximation=1`` moves them by the error that the PTX ISA allows), mma sums
in float64, and float64 fma may be off by one unit in the last place.

Not modelled: anything below PTX (registers, spills, occupancy, time, caches), missing fences, races on paths that the
data did not take; mbarrier, bulk and tensor copies, wgmma, tcgen05, clusters. The counters are not calibrated against
Nsight Compute.

How it works, from the bottom up: `syntax` parses text into a `module`; `program` links it, `layout` orders its blocks;
`spaces`, `segments` and `memory` hold bytes and their flags; `races` has clocks and shadow memory, `inner` the loops
over threads that Numba compiles; `operands` and `access` are what instructions are made of, `ops` the instructions;
`scheduler` and `machine` run them; `compiler` and `launch` are the outside.
"""

from .compiler import assemble, compile_kernel, missing
from .errors import Hazard, Livelock, MemoryFault, PtxError, PtxUnsupported, SyncError, Trap
from .launch import Result, launch
from .machine import Options
from .memory import Buf, Memory, SparseBuf
from .spaces import virtual_array

__all__ = [
    "Buf", "Hazard", "Livelock", "Memory", "MemoryFault", "Options", "PtxError", "PtxUnsupported", "Result",
    "SparseBuf", "SyncError", "Trap", "assemble", "compile_kernel", "launch", "missing", "virtual_array",
]
