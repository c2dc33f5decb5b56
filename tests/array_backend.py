"""A backend of NumPy arrays that stores and moves keys and values but attends nothing: for tests of the host's
state."""

from contextlib import nullcontext

import numpy as np

from numba_paged.plan import Tiling


class ArrayBackend:
    """The verbs of `backend.Backend` that a manager needs, for float32."""

    name = "array"

    def on(self, **arrays):
        return nullcontext()

    def view(self, array, name):
        return array

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)

    def tiling(self, group, max_queries):
        return Tiling(8, 8)

    def append(self, k, v, keys, values, slots, k_scale, v_scale, plan=None):
        for new, pool in ((k, keys), (v, values)):
            pool[slots // pool.shape[1], slots % pool.shape[1]] = new

    def copy_blocks(self, keys, values, sources, targets):
        for pool in (keys, values):
            pool[:, targets] = pool[:, sources]

    def read_blocks(self, pool, blocks):
        return pool.view(np.uint32)[:, blocks]

    def write_blocks(self, pool, blocks, data):
        pool.view(np.uint32)[:, blocks] = data

    def attend(self, q, keys, values, plan, options, out, lse):
        pass
