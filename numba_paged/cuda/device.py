"""Where kernels run: the `Device` that `CudaBackend` talks to, and `CudaDevice`, the one with a driver.

This is the only file that touches a driver or CuPy, and it does so when a `CudaDevice` is made, not when imported.
`CudaBackend` sees nothing but the methods of `Device`; the tests give it another one, which runs the same kernels' PTX
on NumPy arrays. A launch::

    with device.on(q=q, keys=keys, values=values, out=out):                     # one GPU for all, made the current one
        items, tables = device.tables(plan, plan.work.items, plan.block_tables)          # addresses; uploaded once
        device.launch(kernel, (num_kv_heads, num_items), (items, num_items, tables, device.address(q), ...))
"""

import ctypes
import struct
import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..arrays import host_array, place_of
from .compile import Kernel
from .cubin_cache import load_cubin

OLDEST = (8, 0)
"""The compute capability that asynchronous copies to shared memory (cp.async) and bfloat16 conversions need."""

OLDEST_CUPY = 14
"""The first CuPy that knows bfloat16."""

UPLOAD_ALIGNMENT = 16
"""Bytes: what an uploaded array's address is a multiple of."""


class Device(Protocol):
    """What a backend asks of the place where its kernels run.

    Arrays are CuPy's (in the tests NumPy's): ``shape``, ``strides`` in bytes, ``dtype`` (an ml_dtypes one for bfloat16
    and float8), ``view(dtype)``, slices. Everything happens on the current device, in the order of the caller's current
    stream.
    """

    compute_capability: tuple[int, int]
    """Of the current device."""

    num_multiprocessors: int
    """Of the current device."""

    def on(self, **arrays) -> AbstractContextManager:
        """Make the device of these arrays the current one; TypeError if they are on several. None does not count."""

    def view(self, array, name) -> Any:
        """The device's own kind of array over the caller's memory, nothing copied; `name` is for the error."""

    def array(self, values) -> Any:
        """A NumPy array, copied to the device."""

    def to_host(self, array, name) -> Any:
        """An array, on the device or not, as NumPy."""

    def empty(self, shape, dtype) -> Any:
        """An array on the current device, not filled."""

    def zeros(self, shape, dtype) -> Any:
        """An array of zeros on the current device."""

    def address(self, array) -> int:
        """Where an array begins, for a kernel; 0 for None."""

    def upload(self, *arrays) -> "Upload":
        """NumPy arrays, brought to the device in one copy; keep the result until the kernels are launched."""

    def tables(self, owner, *arrays, what="work") -> tuple[int, ...]:
        """The addresses of an upload that is made once for an owner (a plan) and lives as long as it does.

        The arrays must not change, and an owner always comes with the same ones under the name `what`.
        """

    def prepare(self, kernel: Kernel) -> None:
        """Compile and load a kernel ahead of its first launch."""

    def launch(self, kernel: Kernel, grid, arguments) -> None:
        """Run a kernel.

        Parameters
        ----------
        kernel : Kernel
            What to run; it says how many threads a block has, and how much shared memory.
        grid : tuple of int
            Blocks, one to three numbers; without blocks there is nothing to run.
        arguments : tuple of numbers
            One for each of ``kernel.parameters``, in their order.
        """


@dataclass(frozen=True)
class Upload:
    """Arrays that were brought to the device together."""

    addresses: tuple[int, ...]
    memory: Any


def packed(arrays):
    """NumPy arrays in one run of bytes.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
        Any dtypes and shapes.

    Returns
    -------
    (numpy.ndarray of uint8, list of int)
        The bytes, and where in them each array begins, in C order, at a multiple of `UPLOAD_ALIGNMENT`.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // UPLOAD_ALIGNMENT) * UPLOAD_ALIGNMENT
    together = np.empty(size, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        together[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return together, starts


# ------------------------------------------------------------------- with a driver


def _load_cupy():
    """CuPy with a driver and a device behind it, or a RuntimeError that says what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"CuPy cannot be imported ({error}): install numba_paged[cuda13x], or numba_paged[cuda12x] "
                           "where the driver is for CUDA 12") from error
    if int(cupy.__version__.split(".")[0]) < OLDEST_CUPY:
        raise RuntimeError(f"CuPy {cupy.__version__} is too old: {OLDEST_CUPY} is the first that knows bfloat16")
    runtime = cupy.cuda.runtime
    built, driver = runtime.runtimeGetVersion(), runtime.driverGetVersion()
    if driver == 0:
        raise RuntimeError("there is no NVIDIA driver on this machine")
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if driver // 1000 < built // 1000:
            raise RuntimeError(f"the NVIDIA driver is for CUDA {_version(driver)}, CuPy for CUDA {_version(built)}: "
                               "update the driver, or install the CuPy that is made for it") from error
        raise RuntimeError(f"there is a driver, but it gives no CUDA device: {error}") from error
    if count == 0:
        raise RuntimeError("there is a driver, but no CUDA device; CUDA_VISIBLE_DEVICES may hide it")
    return cupy


def _version(number):
    return f"{number // 1000}.{number % 1000 // 10}"


def _done(result, what):
    """What a call of the driver returned, or a RuntimeError that says what failed and has the driver's own word."""
    error, *values = result
    if error != 0:
        raise RuntimeError(f"the CUDA driver cannot {what}: {error.name}")
    return values[0] if values else None


@dataclass(frozen=True)
class _Facts:
    """What is asked of a device once."""

    compute_capability: tuple[int, int]
    num_multiprocessors: int
    max_shared_bytes: int


class _Arguments(threading.local):
    """A kernel's arguments as the driver wants them: each in 8 bytes of a buffer, and an array of pointers to them.

    One for each thread; a launch is over with them when it returns.
    """

    CODES = {"uint64": "Q", "int64": "q", "uint32": "I4x", "int32": "i4x", "float32": "f4x"}

    def __init__(self, kernel, runtime):
        runtime.setDevice(runtime.getDevice())  # a thread that never called CUDA has no context yet
        self.pack = struct.Struct("<" + "".join(self.CODES[str(kind)] for kind in kernel.parameters.values())).pack_into
        count = len(kernel.parameters)
        self.buffer = ctypes.create_string_buffer(8 * count)
        first = ctypes.addressof(self.buffer)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.address = ctypes.addressof(self.pointers)


def _explain(kernel, arguments):
    """Say which argument of a kernel does not fit its type."""
    if len(arguments) != len(kernel.parameters):
        return TypeError(f"{kernel.name} takes {len(kernel.parameters)} arguments, got {len(arguments)}")
    for (name, kind), value in zip(kernel.parameters.items(), arguments, strict=True):
        try:
            struct.pack("<" + _Arguments.CODES[str(kind)], value)
        except struct.error:
            return ValueError(f"{kernel.name}: {name} is {value!r}, which is no {kind}")
    return None


@dataclass(frozen=True)
class _Loaded:
    """A kernel on a device."""

    function: Any
    arguments: _Arguments
    num_threads: int
    shared_bytes: int


class CudaDevice:
    """The GPUs, by CuPy's arrays, allocator, streams and current device, and the driver's launches; see `Device`.

    Raises
    ------
    RuntimeError
        If CuPy, a driver or a device is missing, or the device is too old.
    """

    def __init__(self):
        self._cupy = _load_cupy()
        from cuda.bindings import driver

        self._driver, self._runtime = driver, self._cupy.cuda.runtime
        self._facts, self._loaded = {}, {}
        self._uploads = weakref.WeakKeyDictionary()  # owner: {(what, device, stream): Upload}
        self._current()

    def _current(self):
        """The facts of the current device."""
        device = self._runtime.getDevice()
        facts = self._facts.get(device)
        if facts is None:
            facts = self._facts[device] = self._ask(device)
        return facts

    def _ask(self, device):
        def ask(name):
            attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return _done(self._driver.cuDeviceGetAttribute(attribute, device), f"say the {name} of GPU {device}")

        cc = ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")
        if cc < OLDEST:
            raise RuntimeError(f"GPU {device} has compute capability {cc[0]}.{cc[1]}; the kernels' asynchronous copies "
                               f"to shared memory and bfloat16 conversions need {OLDEST[0]}.{OLDEST[1]}")
        return _Facts(cc, ask("MULTIPROCESSOR_COUNT"), ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"))

    @property
    def compute_capability(self):
        """Of the current device: (major, minor)."""
        return self._current().compute_capability

    @property
    def num_multiprocessors(self):
        """Of the current device."""
        return self._current().num_multiprocessors

    # ---------------------------------------------------------------- arrays

    def on(self, **arrays):
        """Make the device of these arrays the current one.

        Parameters
        ----------
        **arrays : cupy.ndarray or None
            By argument name.

        Returns
        -------
        context manager

        Raises
        ------
        TypeError
            If they are on several devices.
        """
        devices = {name: array.data.device_id for name, array in arrays.items() if array is not None}
        if len(set(devices.values())) > 1:
            listed = ", ".join(f"{name} on GPU {device}" for name, device in devices.items())
            raise TypeError(f"arrays of several GPUs are mixed: {listed}")
        return self._cupy.cuda.Device(next(iter(devices.values()), None))

    def view(self, array, name):
        """A CuPy array over the caller's memory.

        Parameters
        ----------
        array : object
            A CuPy array, or a device array with ``__dlpack__`` or ``__cuda_array_interface__``.
        name : str
            The argument's name, for the error.

        Returns
        -------
        cupy.ndarray

        Raises
        ------
        TypeError
            If it is a host array, or has a dtype that CuPy cannot take over.
        """
        if isinstance(array, self._cupy.ndarray):
            return array
        if place_of(array, name) == "cpu":
            raise TypeError(f"host and device arrays are mixed: {name} is on the host; bring it with cupy.asarray")
        try:
            return (self._cupy.from_dlpack if hasattr(array, "__dlpack__") else self._cupy.asarray)(array)
        except (TypeError, ValueError, BufferError, NotImplementedError) as error:
            raise TypeError(f"{name}: {type(array).__name__} cannot be viewed as a CuPy array: {error} "
                            "(bring float8 as uint8, then .view(ml_dtypes.float8_e4m3fn))") from error

    def array(self, values):
        """A NumPy array, copied to the current device.

        Parameters
        ----------
        values : numpy.ndarray
            Any dtype of 1, 2, 4 or 8 bytes.

        Returns
        -------
        cupy.ndarray
        """
        return self._cupy.asarray(values.view(_bits(values))).view(values.dtype)

    def to_host(self, array, name):
        """An array as NumPy; waits for the current stream.

        Parameters
        ----------
        array : object
            What `view` takes, or a host array.
        name : str
            The argument's name, for the error.

        Returns
        -------
        numpy.ndarray
        """
        if not isinstance(array, self._cupy.ndarray) and place_of(array, name) == "cpu":
            return host_array(array, name)
        array = self.view(array, name)
        return self._cupy.asnumpy(array.view(_bits(array))).view(array.dtype)

    def empty(self, shape, dtype):
        """An array on the current device, not filled, from CuPy's current allocator.

        Parameters
        ----------
        shape : tuple of int
            Its shape.
        dtype : dtype-like
            Its dtype.

        Returns
        -------
        cupy.ndarray
        """
        return self._cupy.empty(shape, dtype)

    def zeros(self, shape, dtype):
        """An array of zeros on the current device, from CuPy's current allocator.

        Parameters
        ----------
        shape : tuple of int
            Its shape.
        dtype : dtype-like
            Its dtype.

        Returns
        -------
        cupy.ndarray
        """
        return self._cupy.zeros(shape, dtype)

    def address(self, array):
        """Where an array begins.

        Parameters
        ----------
        array : cupy.ndarray or None
            Which.

        Returns
        -------
        int
            0 for None.
        """
        return 0 if array is None else array.data.ptr

    def upload(self, *arrays):
        """NumPy arrays, brought to the current device in one copy.

        CuPy copies them to pinned memory of its own, which it does not use again before the copy has ended.

        Parameters
        ----------
        *arrays : numpy.ndarray
            Any dtypes and shapes.

        Returns
        -------
        Upload
            Keep it until the kernels that read it are launched.
        """
        together, starts = packed(arrays)
        memory = self._cupy.asarray(together)
        first = memory.data.ptr
        return Upload(tuple(first + start for start in starts), memory)

    def tables(self, owner, *arrays, what="work"):
        """The addresses of arrays that are uploaded once for an owner; see `Device`.

        Each stream has its own upload: so what a kernel reads was written on its own stream, and is not overwritten
        before the kernel has ended when the owner is gone.

        Parameters
        ----------
        owner : object
            A plan.
        *arrays : numpy.ndarray
            What it carries.
        what : str
            Which of the things that it carries.

        Returns
        -------
        tuple of int
        """
        uploads = self._uploads.get(owner)
        if uploads is None:
            uploads = self._uploads[owner] = {}
        stream = self._cupy.cuda.get_current_stream()
        place = (what, self._runtime.getDevice(), stream.ptr)
        if place not in uploads:
            uploads[place] = self.upload(*arrays)
        return uploads[place].addresses

    # ---------------------------------------------------------------- kernels

    def prepare(self, kernel):
        """Compile and load a kernel for the current device.

        Parameters
        ----------
        kernel : Kernel
            Which.

        Raises
        ------
        RuntimeError
            If it cannot be compiled, or the device has too little shared memory for it.
        """
        self._load(kernel, self._runtime.getDevice())

    def _load(self, kernel, device):
        driver, facts = self._driver, self._current()
        if kernel.shared_bytes > facts.max_shared_bytes:
            raise RuntimeError(f"{kernel.name} needs {kernel.shared_bytes} bytes of shared memory, GPU {device} has "
                               f"{facts.max_shared_bytes}: {kernel.spec}")
        cubin = load_cubin(kernel, facts.compute_capability)
        library = _done(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"load {kernel.name}")
        handle = _done(driver.cuLibraryGetKernel(library, kernel.name.encode()), f"find {kernel.name}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _done(driver.cuKernelSetAttribute(limit, kernel.shared_bytes, handle, device),
              f"give {kernel.name} {kernel.shared_bytes} bytes of shared memory")
        loaded = _Loaded(driver.CUfunction(int(handle)), _Arguments(kernel, self._runtime), kernel.num_threads,
                         kernel.shared_bytes)
        self._loaded[kernel, device] = loaded
        return loaded

    def launch(self, kernel, grid, arguments):
        """Run a kernel on the current device, ordered on the caller's current stream.

        Parameters
        ----------
        kernel : Kernel
            What to run.
        grid : tuple of int
            Blocks, one to three numbers.
        arguments : tuple of numbers
            One for each parameter.

        Raises
        ------
        ValueError
            If an argument does not fit its type.
        RuntimeError
            If the kernel cannot be loaded, or the driver refuses the launch.
        """
        device = self._runtime.getDevice()
        loaded = self._loaded.get((kernel, device)) or self._load(kernel, device)
        x, y, z = (*grid, 1, 1)[:3]
        if x * y * z == 0:
            return
        block = loaded.arguments
        try:
            block.pack(block.buffer, 0, *arguments)
        except struct.error as error:
            raise _explain(kernel, arguments) from error
        stream = self._cupy.cuda.get_current_stream().ptr
        result = self._driver.cuLaunchKernel(loaded.function, x, y, z, loaded.num_threads, 1, 1, loaded.shared_bytes,
                                             stream, block.address, 0)
        if result[0] != 0:
            _done(result, f"launch {kernel.name} with {x} x {y} x {z} blocks")


def _bits(array):
    """The unsigned integer of the width of an array's numbers: a dtype that every library knows."""
    return np.dtype(f"u{array.dtype.itemsize}")
