"""The threading layer: Intel TBB where its wheel is installed.

Numba's own layer takes 90 us to enter a parallel region, TBB 2 us. The wheel `tbb` puts its library where the dynamic
linker does not look, so it is loaded here, before Numba looks for it. Which layer runs stays the user's choice
(``NUMBA_THREADING_LAYER``): a library that nobody asks for does nothing.
"""

import ctypes
import importlib.metadata

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
