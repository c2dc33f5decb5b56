"""A device without a GPU: the compiled PTX of the kernels, run on NumPy arrays by `ptxrun`.

`PtxDevice` has the interface of `numba_paged.cuda.device.Device`, so the whole `CudaBackend` (grids, the order of
arguments, plans) runs as on a GPU. Every launch is checked: a fault, a race or a read of bytes that nothing wrote fails
the test. Its arrays cannot be read like NumPy's, as those of a GPU cannot.
"""

import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import numpy as np
import ptxrun

import tolerances
from compiled import ptx_of
from numba_paged import attention, kv_cache
from numba_paged.arrays import host_array, place_of
from numba_paged.cuda.backend import CudaBackend
from numba_paged.cuda.compile import Kernel
from numba_paged.cuda.device import Upload


class DeviceArray:
    """As much of a CuPy array as the package uses. `host` is the NumPy array whose memory it is."""

    def __init__(self, host):
        self.host = host

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)

    @property
    def __cuda_array_interface__(self):
        return {**self.host.__array_interface__, "version": 3}

    def __len__(self):
        return len(self.host)

    def __getitem__(self, index):
        return DeviceArray(self.host[index])

    def __setitem__(self, index, values):
        self.host[index] = values

    def view(self, dtype):
        return DeviceArray(self.host.view(dtype))

    def reshape(self, *shape):
        return DeviceArray(self.host.reshape(*shape))

    def swapaxes(self, first, second):
        return DeviceArray(self.host.swapaxes(first, second))


@dataclass(frozen=True)
class Launch:
    """What ran, and what it did."""

    kernel: Kernel
    grid: tuple
    arguments: dict
    result: ptxrun.Result


class PtxDevice:
    """See the module.

    Parameters
    ----------
    cc : (int, int)
        Compute capability that kernels are compiled for.
    num_multiprocessors : int
        As the backend is told: decides how work is cut.
    **options
        What `ptxrun.launch` takes.

    Attributes
    ----------
    memory : ptxrun.Memory
        The address space; it keeps every array it was given.
    launches : list of Launch
        Everything that ran, in order; empty it at will.
    """

    def __init__(self, cc=(9, 0), num_multiprocessors=4, **options):
        self.compute_capability = cc
        self.num_multiprocessors = num_multiprocessors
        self.options = options
        self.memory = ptxrun.Memory()
        self.launches = []
        self._uploads = weakref.WeakKeyDictionary()

    def on(self, **arrays):
        """There is one device; what is given must live there."""
        wrong = [name for name, array in arrays.items() if not isinstance(array, DeviceArray | None)]
        assert not wrong, f"not on the device: {wrong}"
        return nullcontext()

    def view(self, array, name):
        """A `DeviceArray` as it is."""
        if place_of(array, name) == "cpu":
            raise TypeError(f"host and device arrays are mixed: {name} is on the host")
        return array

    def array(self, values):
        """A copy, its bytes written."""
        copy = np.array(values)
        self.memory.add(copy)
        return DeviceArray(copy)

    def to_host(self, array, name):
        """A copy, as NumPy."""
        return array.host.copy() if isinstance(array, DeviceArray) else host_array(array, name)

    def empty(self, shape, dtype):
        """An array whose bytes must be written before they are read."""
        host = np.empty(shape, dtype)
        host.view(f"u{host.itemsize}").fill(2 ** (8 * host.itemsize) - 1)  # NaN in the formats that have one
        return self._new(host, False)

    def zeros(self, shape, dtype):
        """An array of zeros."""
        return self._new(np.zeros(shape, dtype), True)

    def _new(self, host, init):
        self.memory.add(host, init=init)
        return DeviceArray(host)

    def address(self, array):
        """An address of `memory`; 0 for None."""
        return 0 if array is None else self.memory.add(array.host)

    def upload(self, *arrays):
        """Copies that kernels may only read, each for itself, so that none is read past its end."""
        copies = [np.array(array, order="C") for array in arrays]
        return Upload(tuple(self.memory.add(copy, readonly=True) for copy in copies), copies)

    def tables(self, owner, *arrays, what="work"):
        """An upload once for an owner, who must always come with the same arrays of a name."""
        uploads = self._uploads.setdefault(owner, {})
        if what not in uploads:
            uploads[what] = self.upload(*arrays)
        upload = uploads[what]
        assert all(np.array_equal(a, b) for a, b in zip(arrays, upload.memory, strict=True))
        return upload.addresses

    def prepare(self, kernel):
        """Compile a kernel."""
        ptx_of(kernel, self.compute_capability)

    def launch(self, kernel, grid, arguments):
        """Run a kernel, and fail if there was a hazard."""
        grid = (*grid, 1, 1)[:3]
        assert max(grid[1:]) <= 65535 and grid[0] < 2**31, grid
        if 0 in grid:
            return
        result = ptxrun.launch(ptx_of(kernel, self.compute_capability), grid, kernel.num_threads, arguments,
                               shared_bytes=kernel.shared_bytes, memory=self.memory, **self.options)
        named = dict(zip(kernel.parameters, arguments, strict=True))
        self.launches.append(Launch(kernel, grid, named, result))
        result.assert_clean()


class OnPtx:
    """The library on a device of its own, as a problem of `inputs` takes a backend; see `PtxDevice` for the parameters."""

    def __init__(self, cc=(9, 0), num_multiprocessors=4, **options):
        self.device = PtxDevice(cc, num_multiprocessors, **options)
        self.backend = CudaBackend(self.device)

    asarray = staticmethod(DeviceArray)

    def asnumpy(self, array):
        return array.host

    def weight_rounding(self, q_dtype, kv_dtype):
        tensor = any(launch.kernel.name.endswith("_mma") for launch in self.device.launches)
        return tolerances.tensor_weight_rounding(q_dtype, kv_dtype) if tensor else 0.0

    def check(self, problem, **options):
        """Attend, compare with the oracle; the launches are in `device.launches`."""
        with used_for_device_arrays(self.backend):
            return problem.check(self, **options)


@contextmanager
def used_for_device_arrays(backend):
    """Meanwhile `backend` is what ``load_backend("cuda")`` gives to the package's functions and caches."""
    real = attention.load_backend

    def load(name):
        return backend if name == "cuda" else real(name)

    with mock.patch.object(attention, "load_backend", load), mock.patch.object(kv_cache, "load_backend", load):
        yield
