"""How the host's loops are compiled."""

from llvmlite import ir
from numba import njit, typeof, types
from numba.extending import intrinsic

_BARE = {"cache": True, "_nrt": False, "error_model": "numpy"}

bare = njit(**_BARE)
"""For functions that make and return no arrays: without the counting of references to those they are given, which would
take ten times as long as the loops themselves. (Numba's own sorting is compiled like this.)"""

inlined = njit(**_BARE, inline="always")
"""For bare functions of a few lines that are called in loops."""

making = njit(cache=True)
"""For functions that make arrays: they leave the loops to bare ones."""


class _Entries(dict):
    """From a compiled function to a quick way into it.

    Numba looks at the types of all arguments to find the version that was compiled for them, which for fifteen arrays
    takes longer than handing them over. The quick way skips that after the first call, so it is only for functions
    whose callers always pass the same types: the state's own arrays, and what `batches` makes of a caller's.
    """

    def __missing__(self, function):
        def first_call(*arguments):
            result = function(*arguments)
            self[function] = function.overloads[tuple(map(typeof, arguments))].entry_point
            return result

        return first_call


entry = _Entries()
"""``entry[function](...)`` calls a bare function whose arguments always have the same types."""


@intrinsic(prefer_literal=True)
def prefetch(typingctx, address, locality):
    """Ask for the cache line of an address before it is needed, into the first cache (`locality` 3) or the second (2).

    A large pool's blocks are rarely in a cache.
    """
    if not isinstance(locality, types.IntegerLiteral):
        return None
    level = locality.literal_value

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        builder.call(fetch, [builder.inttoptr(arguments[0], pointer), number(0), number(level), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64, locality), generate


@inlined
def prefetch_row(array, row):
    """Ask for a row of an array with two axes."""
    prefetch(array.ctypes.data + row * array.strides[0], 3)
