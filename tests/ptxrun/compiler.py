"""Compile a Numba kernel to PTX, and assemble PTX, without a GPU or a driver.

A kernel is typed and lowered once; its PTX for each compute capability comes from the same LLVM code, as numba-cuda's
own lowering does not depend on it (from 8.0 on). That is a third of the time for three targets.
"""

from contextlib import contextmanager
from functools import lru_cache

_OPTIONS = ("fastmath", "lineinfo", "opt", "debug", "launch_bounds")  # of a dispatcher, that are kept
_compiled, _lowered = {}, {}


@lru_cache(maxsize=1)
def missing():
    """Why kernels cannot be compiled here, or None. It takes numba-cuda and NVIDIA's compiler libraries, no driver."""
    try:
        from cuda.bindings import nvjitlink
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
        nvjitlink.version()
    except Exception as error:  # any failure to load them means the same: not here
        return f"no CUDA compiler: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def compile_kernel(kernel, sig, cc=(9, 0), *, lto=False, **options):
    """PTX of a Python function or ``@cuda.jit`` kernel; the same call again gives the same text.

    numba-cuda's float16, bfloat16 and float8 operations are CUDA C++ functions, which NVRTC compiles at launch. Kernels
    that call them, and all kernels with `lto`, are linked by nvJitLink, which then writes the PTX.

    Parameters
    ----------
    kernel : function or dispatcher
        A dispatcher's own options are kept.
    sig : str or numba signature
    cc : (int, int)
        Compute capability.
    lto : bool
        Optimise as ``@cuda.jit`` does at launch. By default the text is what ``cuda.compile_ptx`` gives.
    **options
        fastmath, lineinfo, opt, debug, launch_bounds, as ``cuda.compile`` takes them.

    Raises
    ------
    ValueError
        The PTX does not assemble for its target.
    """
    own = getattr(kernel, "targetoptions", {})
    options = {k: own[k] for k in _OPTIONS if own.get(k) is not None} | options
    function = getattr(kernel, "py_func", kernel)
    key = function, str(sig), tuple(sorted(options.items()))
    if (key, cc, lto) not in _compiled:
        text = "" if lto else _lower(key, function, sig, options).get_asm_str(cc=tuple(cc))
        if lto or ".extern .func" in text:
            text = _link(function, sig, cc, options)
        assemble(text, f"sm_{cc[0]}{cc[1]}" + ("a" if cc >= (9, 0) else ""))
        _compiled[key, cc, lto] = text
    return _compiled[key, cc, lto]


def _lower(key, function, sig, options):
    """numba-cuda's code library of a kernel, for any compute capability."""
    from numba.cuda.compiler import _compile_pyfunc_with_fixup

    if key not in _lowered:
        with _device((9, 0)):
            _lowered[key], _ = _compile_pyfunc_with_fixup(
                function, sig, device=False, cc=(9, 0), abi="numba", **options
            )
    return _lowered[key]


@contextmanager
def _device(cc):
    """Device functions ask the current device for its compute capability: answer without a driver."""
    from numba.cuda import dispatcher

    class Device:
        compute_capability = cc

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: Device
    try:
        yield
    finally:
        dispatcher.get_current_device = real


def _link(function, sig, cc, options):
    """PTX by way of LTO-IR. Line information is left out: nvJitLink 13.5 fails on it."""
    from numba import cuda

    options = {k: v for k, v in options.items() if k != "lineinfo"}
    with _device(cc):
        codes, _ = cuda.compile_all(function, sig, cc=cc, device=False, abi="numba", output="ltoir", **options)
    with _linker([f"-arch=sm_{cc[0]}{cc[1]}", "-lto", "-ptx"]) as (nvjitlink, handle):
        for number, code in enumerate(codes):
            code = code if isinstance(code, bytes) else code.code
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), f"part{number}")
        nvjitlink.complete(handle)
        text = bytearray(nvjitlink.get_linked_ptx_size(handle))
        nvjitlink.get_linked_ptx(handle, text)
    return bytes(text).rstrip(b"\0").decode()


def assemble(ptx, target):
    """The cubin of PTX text for a target such as "sm_90a"; ValueError with the assembler's messages on an error."""
    code = ptx.encode()
    with _linker([f"-arch={target}"]) as (nvjitlink, handle):
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), "kernel")
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            log = bytearray(nvjitlink.get_error_log_size(handle))
            nvjitlink.get_error_log(handle, log)
            raise ValueError(f"{target}: {bytes(log).decode(errors='replace').strip(chr(0))}") from error
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    return bytes(cubin)


@contextmanager
def _linker(flags):
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(len(flags), flags)
    try:
        yield nvjitlink, handle
    finally:
        nvjitlink.destroy(handle)


def signature(args):
    """The signature of a kernel for launch arguments."""
    from numba.core import types
    from numba.cuda.typing.typeof import Purpose, typeof

    from .memory import Buf, SparseBuf

    def kind(arg):
        if isinstance(arg, SparseBuf) or (isinstance(arg, Buf) and arg.pointer):
            return types.uint64
        return typeof(arg.array if isinstance(arg, Buf) else arg, Purpose.argument)

    return types.void(*map(kind, args))
