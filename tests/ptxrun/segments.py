"""The bytes of host arrays at device addresses, and who they belong to."""

import ctypes
from dataclasses import dataclass

import numpy as np

from .spaces import DEFINED, LOADED, LOADED_NC, MAPPED, READONLY, STORED, Space, lazy_zeros


@dataclass
class Buffer:
    """What counters and messages call by name: an array, or the chunks of a sparse buffer, and the bytes it spans."""

    name: str
    address: int
    nbytes: int
    array: np.ndarray
    layout: tuple = None

    def __post_init__(self):
        self.layout = layout_of(self.array)


class Segment(Space):
    """The bytes of one host array at a device address.

    `tags` says whose byte it is where several buffers share it. The segments that the launch touched are in `touched`.
    """

    def __init__(self, start, array, touched):
        super().__init__("global", host_bytes(array))
        self.start, self.owner, self.touched = start, array, touched
        self.buffers = []
        self.tags = None
        self.reset()

    def reset(self):
        """Forget what the last launch did."""
        self._trace = None
        self._rows = {key: rows for key, rows in self._rows.items() if key[1] != "trace"}
        self.asked = {"load": [0] * len(self.buffers), "store": [0] * len(self.buffers)}

    @property
    def trace(self):
        """What this launch did with each byte; made when the first access needs it."""
        if self._trace is None:
            self._trace = lazy_zeros(self.size)
            self.touched.append(self)
        return self._trace

    def count(self, kind, offset, size):
        """Add the bytes of an access to the counters of the buffers they belong to."""
        asked = self.asked[kind]
        if self.tags is None:
            asked[0] += len(offset) * size
        else:
            for tag, count in enumerate(np.bincount(self.tags[offset], minlength=len(asked)).tolist()):
                asked[tag] += count * size

    def distinct(self, kind):
        """Bytes of each buffer that the last launch loaded or stored."""
        marks = np.uint8(STORED if kind == "store" else LOADED | LOADED_NC)
        counts = []
        for number, buffer in enumerate(self.buffers):
            once = buffer.array[tuple(slice(1) if step == 0 else slice(None) for step in buffer.array.strides)]
            touched = (self._elements(self.trace, once) & marks) != 0
            if self.tags is not None:
                touched &= self._elements(self.tags, once) == number
            counts.append(int(np.count_nonzero(touched)))
        return counts

    def attach(self, buffer, init=None, readonly=None):
        """Add a buffer. The elements of its array become its bytes; new ones hold data unless `init` says no."""
        self.buffers.append(buffer)
        for asked in self.asked.values():
            asked.append(0)
        if len(self.buffers) > 1:
            if self.tags is None:
                self.tags = lazy_zeros(self.size, np.uint16)
            self._elements(self.tags, buffer.array)[...] = len(self.buffers) - 1
        flags = self._elements(self.flags, buffer.array)
        as_new = MAPPED | DEFINED | (0 if buffer.array.flags.writeable else READONLY)
        flags |= ((flags & MAPPED) == 0) * np.uint8(as_new)
        self.set_flags(buffer.array, init, readonly)

    def set_flags(self, array, init=None, readonly=None):
        """Set or clear flags of the elements of an array in this segment, each as a bool or an array of them."""
        for value, flag in ((init, DEFINED), (readonly, READONLY)):
            if value is not None:
                flags = self._elements(self.flags, array)
                value = np.asarray(value)
                value = np.broadcast_to(value, array.shape)[..., None] if value.ndim else value
                flags[...] = (flags & np.uint8(0xFF ^ flag)) | (value * np.uint8(flag))

    def _elements(self, field, array):
        """The entries of a per-byte field for the elements of an array in this segment: [*array.shape, itemsize]."""
        start = pointer(array) - pointer(self.data)
        strides = [stride * field.itemsize for stride in (*array.strides, 1)]
        return np.lib.stride_tricks.as_strided(field[start:], (*array.shape, array.itemsize), strides)


def layout_of(array):
    """Equal for views that are the same elements of the same memory."""
    return pointer(array), array.shape, array.strides, array.dtype


def pointer(array):
    """The host address of an array's first element."""
    return array.__array_interface__["data"][0]


def span(array):
    """First host address of an array's bytes, and one past the last."""
    low = high = pointer(array)
    for extent, stride in zip(array.shape, array.strides):
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
    return low, high + array.itemsize


def host_bytes(array):
    """The bytes an array spans, in place."""
    low, high = span(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
