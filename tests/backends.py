"""The backends that every test body runs on: the one place that lists them."""

from contextlib import contextmanager, nullcontext

import numpy as np
import ptxrun
import pytest

import tolerances
from numba_paged.backend import load_backend


class CPU:
    """NumPy arrays on the CPU backend."""

    id = name = "cpu"
    marks = ()

    def active(self):
        """What must hold while a test uses the backend; a test is skipped by raising here."""
        return nullcontext()

    def asarray(self, x):
        """A NumPy array as the backend takes it, strides kept."""
        return x

    def asnumpy(self, x):
        """The backend's array on the host."""
        assert isinstance(x, np.ndarray)
        return x

    def pool(self, shape, dtype, blocks):
        """Zeros, of which only some blocks are used, so that it may be larger than the memory of the machine."""
        return np.zeros(shape, dtype)

    def weight_rounding(self, q_dtype, kv_dtype):
        """Half a unit in the last place of the format that carried the softmax weights into p·V (0: float32).

        On the CPU they are always float32: its vector paths keep the tolerances of the plain ones.
        """
        return 0.0


class Ptx:
    """The CUDA backend on a device that runs its kernels' PTX on the CPU and fails at any hazard.

    Arrays are the host's own memory, in a wrapper that keeps NumPy from reading it.
    """

    name = "cuda"

    def __init__(self, cc, *marks):
        self.id, self.cc, self.marks = f"sm_{cc[0]}{cc[1]}", cc, marks

    @contextmanager
    def active(self):
        if ptxrun.missing():
            pytest.skip(ptxrun.missing())
        from ptx_device import OnPtx, used_for_device_arrays

        self.here = OnPtx(self.cc)
        self.asarray, self.asnumpy, self.weight_rounding = self.here.asarray, self.here.asnumpy, self.here.weight_rounding
        with used_for_device_arrays(self.here.backend):
            yield

    def pool(self, shape, dtype, blocks):
        array = ptxrun.virtual_array(shape, dtype)
        self.here.device.memory.add(array, rows=blocks)
        return self.asarray(array)


class Cuda:
    """CuPy arrays on a GPU."""

    id = name = "cuda"
    marks = (pytest.mark.gpu,)

    def active(self):
        try:
            self.device = load_backend("cuda")._device
        except (ImportError, RuntimeError) as error:
            pytest.skip(str(error))
        return nullcontext()

    def asarray(self, x):
        """The memory that x is a view of is copied whole, so that its strides mean there what they mean here."""
        import cupy

        owner = x
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if not owner.flags.c_contiguous:
            owner = x = np.ascontiguousarray(x)
        storage = cupy.asarray(owner.reshape(-1).view(np.uint8))
        offset = x.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        return cupy.ndarray(x.shape, x.dtype, storage.data + offset, x.strides)

    def asnumpy(self, x):
        return self.device.to_host(x, "x")

    def pool(self, shape, dtype, blocks):
        return self.device.zeros(shape, dtype)

    def weight_rounding(self, q_dtype, kv_dtype):
        return tolerances.tensor_weight_rounding(q_dtype, kv_dtype)


BACKENDS = (CPU(), Ptx((9, 0)), Ptx((8, 0), pytest.mark.long), Ptx((10, 0), pytest.mark.long), Cuda())
