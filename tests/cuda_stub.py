"""CuPy and a driver that do nothing but keep a record: what `CudaDevice` asks of them, without a GPU.

A launch's arguments are read back from the addresses that the driver was given, as a GPU would find them.
"""

import ctypes
import enum
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import cuda.bindings
import numpy as np

from ptx_device import DeviceArray


class Array(DeviceArray):
    """A CuPy array of a GPU: memory that the host reaches only as `host`."""

    def __init__(self, host, gpu=0):
        super().__init__(host)
        self.data = SimpleNamespace(ptr=host.__array_interface__["data"][0], device_id=gpu)

    def view(self, dtype):
        return Array(self.host.view(dtype), self.data.device_id)


class Current:
    """A GPU, made the current one for a block of code."""

    def __init__(self, machine, gpu):
        self.machine, self.gpu = machine, machine.gpu if gpu is None else gpu

    def __enter__(self):
        self.before, self.machine.gpu = self.machine.gpu, self.gpu

    def __exit__(self, *error):
        self.machine.gpu = self.before


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class Attribute(enum.IntEnum):
    """Of the driver's, by their names; the numbers are not the driver's."""

    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 0
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 1
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 2
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 3


class Status(enum.IntEnum):
    """What the driver answers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_IMAGE = 200


@dataclass
class Machine:
    """GPUs by their compute capabilities, and a record of what was done with them.

    Attributes
    ----------
    gpu, stream : int
        What is current.
    loaded : list of (int, str)
        GPU and name of the kernels that were loaded.
    limits : list of int
        Bytes of shared memory that kernels were allowed.
    launches : list of tuple
        (GPU, grid, block, shared bytes, stream, arguments as the bytes of 8 each) of every launch.
    answer : Status
        What the driver answers to a launch or to loading a kernel.
    num_parameters : int
        How many arguments are read back; a driver knows it from the kernel.
    before_launch : callable
        Called with every launch, before the arguments are read.
    """

    capabilities: tuple = ((9, 0),)
    driver: int = 13000
    version: str = "14.2.0"
    count_fails: bool = False
    gpu: int = 0
    stream: int = 7
    loaded: list = field(default_factory=list)
    limits: list = field(default_factory=list)
    launches: list = field(default_factory=list)
    answer: Status = Status.CUDA_SUCCESS
    num_parameters: int = 0
    before_launch: Callable = lambda: None

    # ---------------------------------------------------------------- CuPy

    def cupy(self):
        """What `import cupy` gives."""
        runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, runtimeGetVersion=lambda: 13000,
                                  driverGetVersion=lambda: self.driver, getDeviceCount=self._count,
                                  getDevice=lambda: self.gpu, setDevice=self._set)
        cuda_part = SimpleNamespace(runtime=runtime, Device=lambda gpu=None: Current(self, gpu),
                                    get_current_stream=self._current_stream)
        return SimpleNamespace(__version__=self.version, ndarray=Array, cuda=cuda_part, from_dlpack=self._from_dlpack,
                               asarray=lambda x: Array(np.array(x), self.gpu),
                               asnumpy=lambda x: x.host.copy(), empty=lambda *a: Array(np.empty(*a), self.gpu),
                               zeros=lambda *a: Array(np.zeros(*a), self.gpu))

    def _count(self):
        if self.count_fails:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return len(self.capabilities)

    def _set(self, gpu):
        self.gpu = gpu

    def _current_stream(self):
        return SimpleNamespace(ptr=self.stream)

    def _from_dlpack(self, array):
        raise TypeError("Unsupported dtype. dtype code: 10")

    # ---------------------------------------------------------------- the driver

    def bindings(self):
        """What `cuda.bindings.driver` is."""
        limit = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="limit")
        return SimpleNamespace(CUdevice_attribute=Attribute, CUfunction=lambda x: x, CUfunction_attribute=limit,
                               cuDeviceGetAttribute=self._ask, cuLibraryLoadData=lambda cubin, *_: (self.answer, cubin),
                               cuLibraryGetKernel=self._find, cuKernelSetAttribute=self._limit,
                               cuLaunchKernel=self._launch)

    def _ask(self, attribute, gpu):
        return Status.CUDA_SUCCESS, (*self.capabilities[gpu], 132, 232448)[attribute]

    def _find(self, cubin, name):
        assert name in cubin
        self.loaded.append((self.gpu, name.decode()))
        return Status.CUDA_SUCCESS, len(self.loaded)

    def _limit(self, attribute, value, kernel, gpu):
        assert (attribute, gpu) == ("limit", self.gpu)
        self.limits.append(value)
        return (Status.CUDA_SUCCESS,)

    def _launch(self, function, gx, gy, gz, bx, by, bz, shared_bytes, stream, arguments, extra):
        self.before_launch()
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        read = [ctypes.string_at(pointers[i], 8) for i in range(self.num_parameters)]
        self.launches.append((self.gpu, (gx, gy, gz), (bx, by, bz), shared_bytes, stream, read))
        return (self.answer,)

    @contextmanager
    def installed(self):
        """Meanwhile `CudaDevice` finds this machine; gives the driver's bindings."""
        driver = self.bindings()
        with mock.patch.dict(sys.modules, cupy=self.cupy()):
            with mock.patch.object(cuda.bindings, "driver", driver, create=True):
                yield driver
