"""Threads: the layer that carries them (Intel TBB where its wheel is installed), and workers called by address.

Numba's own layer takes 90 us to enter a parallel region, TBB 2 us. The wheel `tbb` puts its library where the dynamic
linker does not look, so it is loaded here, before Numba looks for it. Which layer runs stays the user's choice
(``NUMBA_THREADING_LAYER``): a library that nobody asks for does nothing.
"""

import ctypes
import importlib.metadata

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_LIBRARY_NAMES = ("libtbb.so.12", "libtbb.12.dylib", "tbb12.dll")


def _installed_library():
    """Where the wheel `tbb` put its library, or None."""
    try:
        files = importlib.metadata.files("tbb") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((file.locate() for file in files if file.name in _LIBRARY_NAMES), None)


def load_tbb():
    """Load the library of the wheel `tbb`, so that Numba finds it by name.

    Returns
    -------
    bool
        Whether it is there and could be loaded.
    """
    path = _installed_library()
    if path is None:
        return False
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # built for another system: Numba falls back to its other layers
        return False
    return True


def make_call(arguments):
    """Functions that call workers by address, so that a parallel region is compiled apart from them, once.

    Numba optimises the body of a parallel function once for each of the layers that it wraps around it; and it takes
    arrays apart for each thread. So the region knows neither the worker nor the arguments, only where they are: a third
    of the compile time.

    Parameters
    ----------
    arguments : sequence of numba.types.Type
        What every worker is given.

    Returns
    -------
    keep : callable
        ``keep(tuple)``: the address of a tuple of those types, which lasts until the caller of `keep` returns.
    call : callable
        ``call(worker, address)``: call the C function at the address `worker` with what `keep` kept.
    """
    packed = types.Tuple(arguments)

    @intrinsic
    def keep(typingctx, values):
        def generate(context, builder, signature, given):
            return builder.ptrtoint(cgutils.alloca_once_value(builder, given[0]), ir.IntType(64))

        return types.int64(packed), generate

    @intrinsic
    def call(typingctx, worker, address):
        def generate(context, builder, signature, given):
            worker, address = given
            kind = context.get_value_type(packed)
            values = builder.load(builder.inttoptr(address, kind.as_pointer()), typ=kind)
            function = ir.FunctionType(ir.VoidType(), kind.elements)
            parts = [builder.extract_value(values, i) for i in range(len(kind.elements))]
            builder.call(builder.inttoptr(worker, function.as_pointer()), parts)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return keep, call


@intrinsic
def _masked_threads(typingctx):
    """What ``numba.get_num_threads`` gives, without the ctypes pointer that keeps functions out of the disk cache."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(context.get_value_type(types.intc), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "get_num_threads"), [])

    return types.intc(), generate


@njit(cache=True)
def num_threads():
    """How many threads a parallel region has; Numba's threads must have been started."""
    return types.int64(_masked_threads())


@intrinsic
def new_counter(typingctx):
    """The address of an int64, 0, which lasts until the function that asks for it returns."""

    def generate(context, builder, signature, arguments):
        number = ir.IntType(64)
        return builder.ptrtoint(cgutils.alloca_once_value(builder, number(0)), number)

    return types.int64(), generate


@intrinsic
def take_unit(typingctx, counter):
    """The next number of a counter, given by its address, that threads share."""

    def generate(context, builder, signature, arguments):
        number = ir.IntType(64)
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], number.as_pointer()), number(1), "monotonic")

    return types.int64(types.int64), generate
