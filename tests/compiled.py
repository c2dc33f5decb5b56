"""Kernels compiled for the tests: kept on disk for a week, and lowered once for all compute capabilities.

Numba's interface types and lowers a function anew for each target, though what comes of it is the same for all; that is
nine tenths of the time a kernel takes.
"""

import contextlib
import functools
import time
from pathlib import Path
from unittest import mock

from numba_paged.cuda.compile import compile_cubin, compile_ptx
from numba_paged.cuda.cubin_cache import kept, kernel_key

DIRECTORY = Path(__file__).parent / "__pycache__" / "kernels"
KEPT_SECONDS = 7 * 24 * 3600
"""How old a file may get; after a week a kernel is compiled anew, and what no one asks for is gone."""


@functools.cache
def directory():
    """Where compiled kernels are kept, cleared of what is old."""
    for path in DIRECTORY.glob("*.*"):
        with contextlib.suppress(FileNotFoundError):  # another process clears too
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()
    return DIRECTORY


@functools.lru_cache(maxsize=128)
def _lowered(kernel):
    """Where the code of a kernel is put once it is lowered."""
    return []


@contextlib.contextmanager
def lowered_once(kernel):
    """Meanwhile Numba lowers nothing but this kernel, and that only if it never did."""
    from numba.cuda import compiler

    real, place = compiler._compile_pyfunc_with_fixup, _lowered(kernel)

    def lower(*args, **kwargs):
        if not place:
            place.append(real(*args, **kwargs))
        return place[0]

    with mock.patch.object(compiler, "_compile_pyfunc_with_fixup", lower):
        yield


def _compiled(kernel, cc, suffix, make):
    def compiled():
        with lowered_once(kernel):
            return make(kernel, cc)

    return kept(directory() / f"{kernel_key(kernel, cc)}.{suffix}", compiled)


def ptx_of(kernel, cc):
    """The PTX of a kernel for a compute capability (str)."""
    return _compiled(kernel, cc, "ptx", lambda *target: compile_ptx(*target).encode()).decode()


def cubin_of(kernel, cc):
    """The machine code of a kernel for a compute capability (bytes)."""
    return _compiled(kernel, cc, "cubin", compile_cubin)
