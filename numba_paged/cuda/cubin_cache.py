"""Compiled kernels, kept on disk: a kernel is compiled once per machine, not once per process.

A file is named by everything that decides what is in it, so nothing in it is ever out of date, and a file of another
version is never read. Files appear whole (written aside, then renamed); one that is damaged is compiled anew.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import logging
import os
import re
import threading
import time
from pathlib import Path

from cuda.bindings import nvjitlink

from . import compile
from .compile import compile_cubin

PACKAGE = Path(__file__).parents[1]
IMPORT = re.compile(r"^\s*from (\.*)([\w.]*) import ([\w, ]*)", re.MULTILINE)
COMPILERS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink",
             "nvidia-nvjitlink-cu12")
"""Distributions that take part in compiling; those of the other CUDA version are not there."""

logger = logging.getLogger("numba_paged")


def cache_directory():
    """Where compiled kernels are kept.

    Returns
    -------
    pathlib.Path
        ``NUMBA_PAGED_CACHE_DIR`` if that is set, else the user's cache directory as the platform has it.
    """
    named = os.environ.get("NUMBA_PAGED_CACHE_DIR")
    if named:
        return Path(named)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser() / "numba_paged" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "numba_paged"


@functools.cache
def _compilers():
    """What compiles, by versions."""
    versions = []
    for name in COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((name, importlib.metadata.version(name)))
    if not any("nvjitlink" in name for name, _ in versions):  # it comes from a toolkit: asking it means loading it
        versions.append(("nvjitlink", nvjitlink.version()))
    return versions


def _imported(path, text):
    """The files of the package that a source file imports by ``from ... import``."""
    for dots, module, names in IMPORT.findall(text):
        if not dots and module.split(".")[0] != PACKAGE.name:
            continue
        base = (path.parents[len(dots) - 1] if dots else PACKAGE.parent).joinpath(*module.split("."))
        candidates = [base, *(base / name for name in re.findall(r"\w+", names))]
        yield from (file for c in candidates if (file := c.with_name(f"{c.name}.py")).exists())


@functools.cache
def _sources(factory_file):
    """A hash of the sources of a kernel: the file of its factory, and what of the package that imports."""
    sources, left = {}, [Path(factory_file), Path(compile.__file__)]
    while left:
        path = left.pop()
        if path not in sources:
            sources[path] = path.read_text()
            left += _imported(path, sources[path])
    return hashlib.sha256("".join(sorted(sources.values())).encode()).hexdigest()


def kernel_key(kernel, cc):
    """What names a compiled kernel: a hash of all that decides what it is.

    Parameters
    ----------
    kernel : Kernel
        Which.
    cc : (int, int)
        Compute capability.

    Returns
    -------
    str
    """
    parameters = [(name, str(kind)) for name, kind in kernel.parameters.items()]
    facts = (cc, kernel.name, kernel.make.__qualname__, repr(kernel.spec), parameters, kernel.num_threads,
             kernel.min_blocks, _compilers(), _sources(inspect.getfile(kernel.make)))
    return f"{kernel.name}-sm{cc[0]}{cc[1]}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:40]}"


def kept(path, make):
    """What a file holds, or else what `make` gives, which the file then holds.

    Parameters
    ----------
    path : pathlib.Path
        The file; its directory is made.
    make : callable
        Gives bytes. Called if the file is not there or not whole.

    Returns
    -------
    bytes
    """
    content = _read(path)
    if content is None:
        content = make()
        _write(path, content)
    return content


def _read(path):
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, content = stored[:32], stored[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def _write(path, content):
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        logger.warning("a compiled kernel is not kept for the next start: %s", error)


def load_cubin(kernel, cc):
    """The machine code of a kernel, from the cache or compiled now, which the log then says.

    Parameters
    ----------
    kernel : Kernel
        Which.
    cc : (int, int)
        Compute capability.

    Returns
    -------
    bytes
        A cubin.

    Raises
    ------
    RuntimeError
        If it cannot be compiled.
    """

    def compiled():
        logger.info("compiling %s for compute capability %d.%d: %s", kernel.name, *cc, kernel.spec)
        start = time.perf_counter()
        cubin = compile_cubin(kernel, cc)
        logger.info("compiled %s in %.1f s", kernel.name, time.perf_counter() - start)
        return cubin

    return kept(cache_directory() / f"{kernel_key(kernel, cc)}.cubin", compiled)
