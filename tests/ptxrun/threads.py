"""Thread numbers: who runs an instruction together, and what the special registers hold.

The threads of the blocks that run together are numbered block by block, each block padded to whole warps. Lane, warp
and block follow from the number.
"""

import numpy as np

NUM_SMS = 132  # what %nsmid says


class Active:
    """The threads that run an instruction together. `index` holds their sorted numbers, or is None for every thread."""

    __slots__ = ("every", "index", "n", "_warp", "_breaks", "_num_warps", "_ideal")

    def __init__(self, every, index=None):
        """`every` is the numbers of all threads."""
        if index is not None and len(index) == len(every):
            index = None
        self.every, self.index = every, index
        self.n = len(every) if index is None else len(index)
        self._warp = self._breaks = self._num_warps = None
        self._ideal = {}

    @property
    def tid(self):
        """The thread numbers, sorted."""
        return self.every if self.index is None else self.index

    @property
    def warp(self):
        """Each thread's warp number."""
        if self._warp is None:
            self._warp = self.tid >> 5
        return self._warp

    @property
    def breaks(self):
        """Whether the next thread is of another warp."""
        if self._breaks is None:
            self._breaks = self.warp[1:] != self.warp[:-1]
        return self._breaks

    @property
    def num_warps(self):
        if self._num_warps is None:
            self._num_warps = int(np.count_nonzero(self.breaks)) + 1 if self.n else 0
        return self._num_warps

    @property
    def whole_warps(self):
        """Whether all 32 lanes of every warp are here."""
        return self.n == 32 * self.num_warps

    def ideal_sectors(self, size):
        """32-byte sectors that accesses of `size` bytes a thread need at least, one request a warp."""
        ideal = self._ideal.get(size)
        if ideal is None:
            lanes = np.diff(np.r_[0, np.flatnonzero(self.breaks) + 1, self.n])
            ideal = self._ideal[size] = int(((lanes * size + 31) // 32).sum())
        return ideal

    def sub(self, mask):
        """The threads that a boolean array, one entry a thread, or an array of positions selects."""
        return Active(self.every, self.tid[mask])


def special_register(name, m):
    """The values of a special register for every thread of machine `m`, uint64."""
    base, _, axis = name[1:].partition(".")
    i = "xyz".index(axis) if axis in ("x", "y", "z") else None
    place = m.every % m.padded_threads
    block = m.every // m.padded_threads + m.first_block
    lane = (m.every & 31).astype(np.uint64)
    bit = np.uint64(1) << lane
    if base == "tid":
        values = place // int(np.prod(m.block[:i])) % m.block[i]
    elif base == "ctaid":
        values = block // int(np.prod(m.grid[:i])) % m.grid[i]
    elif base in ("ntid", "nctaid"):
        values = np.full(len(place), (m.block if base == "ntid" else m.grid)[i])
    elif base == "laneid":
        values = lane
    elif base == "warpid":
        values = place >> 5
    elif base == "smid":
        values = block % NUM_SMS
    elif base.startswith("lanemask_"):
        masks = {"eq": bit, "lt": bit - np.uint64(1), "le": 2 * bit - np.uint64(1)}
        masks |= {"gt": masks["le"] ^ np.uint64(0xFFFFFFFF), "ge": masks["lt"] ^ np.uint64(0xFFFFFFFF)}
        values = masks[base[-2:]]
    else:
        constants = {
            "nwarpid": m.padded_threads // 32, "nsmid": NUM_SMS, "gridid": 1, "total_smem_size": m.shared_end,
            "dynamic_smem_size": m.dynamic_shared, "clusterid": 0, "nclusterid": 1, "cluster_ctarank": 0,
            "cluster_nctarank": 1,
        }
        values = np.full(len(place), constants[base])
    return values.astype(np.uint64)
