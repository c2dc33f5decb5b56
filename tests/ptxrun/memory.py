"""Global memory: NumPy arrays at made-up device addresses, used in place, checked byte by byte.

An address stays valid until the array is freed. All views of one array share its range, so overlapping buffers alias as
they do on a GPU; what no view covers does not exist. Ranges lie far apart, and never so that an offset that lost its
upper 32 bits would lead from one small array into another.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from .segments import Buffer, Segment, layout_of, pointer, span
from .spaces import LOCAL_WINDOW

_BASE, _ALIGN, _GAP = 0x100000000000, 256, 5 << 28
_LARGEST = 1 << 32


@dataclass
class Buf:
    """A kernel argument that is an array, with properties.

    Parameters
    ----------
    array : ndarray
    init : bool or ndarray of bool, optional
        Which elements hold data; reading another one is a hazard. Broadcasts against the array. None: all of them, but
        bytes that the memory knows already stay as they are.
    readonly : bool, optional
        A store faults.
    name : str, optional
    pointer : bool
        Pass the bare address (a uint64 parameter), not Numba's array struct.
    rows : sequence of int, optional
        Only these indices of the first axis exist: the rest of the array is never touched (see `virtual_array`).
    """

    array: np.ndarray
    init: object = None
    readonly: bool = None
    name: str = None
    pointer: bool = False
    rows: object = None


@dataclass
class SparseBuf:
    """A pointer to `nbytes` bytes of which only some exist: `chunks` maps byte offsets to contiguous arrays."""

    nbytes: int
    chunks: dict = field(default_factory=dict)
    readonly: bool = None
    name: str = None


@dataclass
class _Host:
    """Registered host memory [low, high) at a device address; no segment where only some rows exist."""

    low: int
    high: int
    address: int
    segment: Segment = None


class Memory:
    """The address space of a device.

    Examples
    --------
    >>> memory = Memory()
    >>> address = memory.add(np.arange(4.0), name="x")
    >>> memory.add_sparse(1 << 36, {1 << 35: np.zeros(8)}) > address
    True
    """

    def __init__(self):
        self._next = _BASE
        self._segments, self._starts = [], np.zeros(0, np.int64)  # by device address
        self._hosts = []  # by host address
        self.touched = []  # segments that the last launch touched

    # -- buffers ----------------------------------------------------------------
    def add(self, array, init=None, readonly=None, name=None, rows=None):
        """Register an array (see `Buf`) and give its address; an array known already keeps its address.

        Raises
        ------
        ValueError
            The array overlaps registered memory that was reached through another, smaller array; it has more than
            4 GiB and no `rows`; or it has, is known already, and comes with another `init`.
        """
        if array.nbytes == 0:
            return _BASE - _ALIGN
        host = self._host(array)
        if host is None and rows is not None:
            return self._add_rows(array, rows, init, readonly, name)
        host = host or self._adopt(array)
        address = host.address + pointer(array) - host.low
        segment = host.segment
        if segment is None:
            if init is not None or readonly is not None:
                raise ValueError("init and readonly of an array with rows are set when it is first added")
        elif layout_of(array) in (b.layout for b in segment.buffers):
            segment.set_flags(array, init, readonly)
        else:
            low, high = span(array)
            name = name or f"#{len(self._segments) - 1}"
            segment.attach(Buffer(name, host.address + low - host.low, high - low, array), init, readonly)
        return address

    def add_sparse(self, nbytes, chunks, readonly=None, name=None):
        """Reserve `nbytes` bytes of which only the chunks exist, {byte offset: contiguous array}; give the address."""
        start = self._reserve(nbytes)
        name = name or f"#{len(self._segments)}"
        end = 0
        for offset, chunk in sorted(chunks.items()):
            if offset % 32 or offset < end or offset + chunk.nbytes > nbytes or not chunk.flags.c_contiguous:
                raise ValueError(
                    f"chunk of {chunk.nbytes} bytes at byte {offset}: it must be contiguous, start at a multiple of "
                    f"32, not before byte {end} where the one before it ends, and end by byte {nbytes}"
                )
            end = offset + chunk.nbytes
            segment = self._insert(Segment(start + offset, chunk, self.touched))
            segment.attach(Buffer(name, start, nbytes, chunk), None, readonly)
        return start

    def free(self, array):
        """Forget the memory that an array lies in, with every view of it."""
        host = self._host(array)
        if host is None:
            raise ValueError(f"the array at host address 0x{pointer(array):x} is not registered")
        self._hosts.remove(host)
        stop = host.address + host.high - host.low
        first, last = np.searchsorted(self._starts, [host.address, stop])
        del self._segments[first:last]
        self._starts = np.delete(self._starts, slice(first, last))
        if stop == self._end:
            self._next = host.address

    def set_init(self, array, init):
        """Say which elements of a registered array hold data, after the host wrote or recycled them."""
        self.add(array, init=init)

    def _host(self, array):
        """The registered host memory that an array lies in, or None."""
        low, high = span(array)
        i = bisect_right(self._hosts, low, key=lambda h: h.low) - 1
        if i >= 0 and high <= self._hosts[i].high:
            return self._hosts[i]
        if any(h.low < high and low < h.high for h in self._hosts):
            raise ValueError("the array overlaps registered memory without lying inside it: register the whole first")
        return None

    def _adopt(self, array):
        """Give the memory that an array is a view of an address range."""
        if array.nbytes > _LARGEST:
            raise ValueError(f"an array of {array.nbytes} bytes takes as many for its flags: say which rows exist")
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self._host(owner)
        low, high = span(owner)
        host = _Host(low, high, self._reserve(high - low))
        host.segment = self._insert(Segment(host.address, owner, self.touched))
        insort(self._hosts, host, key=lambda h: h.low)
        return host

    def _add_rows(self, array, rows, init, readonly, name):
        """Register a contiguous array of which only some rows exist."""
        low, high = span(array)
        chunks = {int(row) * array.strides[0]: array[int(row)] for row in rows}
        host = _Host(low, high, self.add_sparse(high - low, chunks, readonly, name))
        insort(self._hosts, host, key=lambda h: h.low)
        if init is not None:
            mask = np.broadcast_to(init, array.shape)
            for row in rows:
                chunk = array[int(row)]
                self.segment_at(host.address + pointer(chunk) - low).set_flags(chunk, mask[int(row)])
        return host.address

    def _reserve(self, nbytes):
        start = self._next
        self._end = start + nbytes
        self._next = -(-(self._end + _GAP) // _ALIGN) * _ALIGN
        if self._next > LOCAL_WINDOW:
            raise ValueError(f"no device addresses left for {nbytes} bytes")
        return start

    def _insert(self, segment):
        i = int(np.searchsorted(self._starts, segment.start))
        self._starts = np.insert(self._starts, i, segment.start)
        self._segments.insert(i, segment)
        return segment

    # -- for the machine ----------------------------------------------------------
    def reset(self):
        """Forget what the last launch did; contents and flags stay."""
        for segment in self.touched:
            segment.reset()
        self.touched.clear()

    def segment_at(self, address):
        """The segment that starts last before or at the address, or None."""
        i = int(self._starts.searchsorted(address, "right")) - 1
        return self._segments[i] if i >= 0 else None

    def pieces(self, address, size):
        """[(segment, offsets, lanes or None for all)] of an access; a lane outside of every segment is in no piece."""
        segment = self.segment_at(int(address[0]))
        if segment is not None:
            offset = address - segment.start
            if int(np.maximum.reduce(offset.view(np.uint64))) <= segment.size - size:
                return [(segment, offset, None)]
        found = []
        which = self._starts.searchsorted(address, "right") - 1
        for i in np.unique(which[which >= 0]).tolist():
            segment = self._segments[i]
            lanes = np.flatnonzero((which == i) & (address - segment.start <= segment.size - size))
            if len(lanes):
                found.append((segment, address[lanes] - segment.start, lanes))
        return found

    def describe(self, address):
        """Where an address lies, for messages."""
        buffers = [b for s in self._segments for b in s.buffers]
        if not buffers:
            return "no buffer is registered"
        nearest = min(buffers, key=lambda b: max(b.address - address, address - b.address - b.nbytes + 1, 0))
        text = f"buffer {nearest.name} of {nearest.nbytes} bytes"
        after = address - nearest.address - nearest.nbytes
        if after >= 0:
            return f"{after} bytes past the end of {text}"
        if address < nearest.address:
            return f"{nearest.address - address} bytes before {text}"
        return f"byte {address - nearest.address} of {text}"
