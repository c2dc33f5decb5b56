"""Bytes with a flag byte each: the storage behind global, shared and local memory."""

import mmap

import numpy as np

MAPPED, DEFINED, READONLY, PENDING = 1, 2, 4, 8  # flags of a byte
LOADED, LOADED_NC, STORED = 1, 2, 4  # what a launch did with it
SHARED_WINDOW = 0x7E0000000000  # generic addresses of shared and local memory; everything below is global
LOCAL_WINDOW = 0x7D0000000000
SHARED_FIRST = 0x400  # the driver keeps 1 KiB of shared memory to itself on sm_80 and newer
LOCAL_FIRST = 0x100
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_LARGE = 1 << 26
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def virtual_array(shape, dtype):
    """An array of zeros that takes memory only where it is touched, larger than the machine's memory if need be."""
    nbytes = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return np.frombuffer(pages, dtype).reshape(shape)


def lazy_zeros(count, dtype=np.uint8):
    """Zeros, of which large ones take memory only where they are touched."""
    return virtual_array((count,), dtype) if count > _LARGE else np.zeros(count, dtype)


def row_dtype(size):
    """The dtype that moves `size` bytes at once."""
    return np.dtype(UNSIGNED.get(size, f"V{size}"))


class Space:
    """A range of bytes. Accesses are aligned, so an access of `size` bytes at an offset is row `offset // size`."""

    def __init__(self, name, data):
        self.name, self.data = name, data
        self.size = len(data)
        self.flags = lazy_zeros(self.size)
        self._rows = {}

    def rows(self, size, field="data"):
        """The bytes, or another field, in rows of `size`; what does not fill a row is left out."""
        rows = self._rows.get((size, field))
        if rows is None:
            rows = getattr(self, field)[: self.size // size * size].view(row_dtype(size))
            self._rows[size, field] = rows
        return rows


class Window(Space):
    """Shared memory of every block, or local memory of every thread: `count` equal ranges, one after the other."""

    def __init__(self, name, count, first, end, align, defined, fill):
        self.stride = (end + align - 1) // align * align + align
        super().__init__(name, np.zeros(count * self.stride, np.uint8))
        self.flags.reshape(count, -1)[:, first:end] = MAPPED | (DEFINED if defined else 0)
        if fill is not None:
            self.data[:] = fill
