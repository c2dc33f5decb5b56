"""Threads: the layer that carries them (Intel TBB where its wheel is installed), and workers called by address.

Numba's own layer takes 90 us to enter a parallel region, TBB 2 us. The wheel `tbb` puts its library where the dynamic
linker does not look, so it is loaded here, before Numba looks for it. Which layer runs stays the user's choice
(``NUMBA_THREADING_LAYER``): a library that nobody asks for does nothing.
"""

import ctypes
import importlib.metadata

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

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


@intrinsic
def call_worker(typingctx, address, arguments):
    """Call the C function at an address with a tuple of arguments.

    Numba optimises the body of a parallel function once for each of the layers that it wraps around it. So a parallel
    region is compiled apart from its workers, once, and calls them by address: a third of the compile time.
    """

    def generate(context, builder, signature, values):
        address, packed = values
        kinds = [context.get_value_type(kind) for kind in signature.args[1]]
        function = builder.inttoptr(address, ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        builder.call(function, [builder.extract_value(packed, i) for i in range(len(kinds))])
        return context.get_dummy_value()

    return types.void(address, arguments), generate


@intrinsic
def take_unit(typingctx, counter):
    """The next number of a counter [1] of int64 that threads share."""

    def generate(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate
