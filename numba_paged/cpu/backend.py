"""The CPU backend: what a plan says, handed to the kernels as addresses and strides.

Any physical order of the pool is served. The fast one has a block's rows of one kv head beside each other
[num_blocks, num_kv_heads, block_size, head_dim]: a tile of keys is then one run of memory. Where tokens come first, decode
takes 1.1 to 1.2 times as long in float32 and 1.3 to 1.4 times in bfloat16 (``benchmarks/results/decode.txt``).
"""

import functools
from contextlib import nullcontext

import numba
import numpy as np

from ..arrays import host_array
from ..formats import FORMATS
from ..plan import Tiling
from . import launch, threads
from .append import FLOATS, load_append

threads.load_tbb()  # before Numba starts its threads
numba.get_num_threads()

_TILE_ROWS = 128
"""Query rows (tokens x heads of a group) that share one reading of the keys and values."""

_PAIRS_PER_THREAD = 64
"""(item, kv head) pairs that a thread should find: an item is worked on for all kv heads, of which there are about 8."""


_NOTHING_TO_DO = nullcontext()


class CpuBackend:
    """The backend of NumPy arrays; see `backend.Backend` for the verbs."""

    name = "cpu"

    def on(self, **arrays):
        """Nothing to do: there is one host.

        Parameters
        ----------
        **arrays : numpy.ndarray
            Any.

        Returns
        -------
        context manager
        """
        return _NOTHING_TO_DO

    def view(self, array, name):
        """A NumPy array over the caller's memory.

        Parameters
        ----------
        array : object
            A NumPy array, or a host object with ``__dlpack__``.
        name : str
            The argument's name, for the error.

        Returns
        -------
        numpy.ndarray
        """
        return host_array(array, name)

    to_host = view

    def array(self, values):
        """A NumPy array where the backend computes: as it is.

        Parameters
        ----------
        values : numpy.ndarray
            Any.

        Returns
        -------
        numpy.ndarray
        """
        return values

    def empty(self, shape, dtype):
        """An array, not filled.

        Parameters
        ----------
        shape : tuple of int
            Its shape.
        dtype : dtype-like
            Its dtype.

        Returns
        -------
        numpy.ndarray
        """
        return np.empty(shape, dtype)

    def zeros(self, shape, dtype):
        """An array of zeros; NumPy puts large ones on huge pages where the system offers them.

        Parameters
        ----------
        shape : tuple of int
            Its shape.
        dtype : dtype-like
            Its dtype.

        Returns
        -------
        numpy.ndarray
        """
        return np.zeros(shape, dtype)

    def tiling(self, group, max_queries):
        """How work is to be cut.

        Parameters
        ----------
        group : int
            Query heads that share one kv head.
        max_queries : int
            The longest run of query tokens of a sequence: many make work enough without splits.

        Returns
        -------
        Tiling
        """
        pairs = _PAIRS_PER_THREAD if max_queries * group < launch.PANEL_ROWS else launch.PANEL_PAIRS_PER_THREAD
        return _tiling(group, pairs * threads.num_threads())

    def append(self, k, v, keys, values, slots, k_scale, v_scale, plan=None):
        """Write new keys and values to their slots.

        Parameters
        ----------
        k, v : array [num_tokens, num_kv_heads, head_dim]
            New keys and values.
        keys, values : array [num_blocks, block_size, num_kv_heads, head_dim]
            One layer of the pool.
        slots : array [num_tokens] of int
            Where each token is written; -1 writes nothing.
        k_scale, v_scale : float
            What is stored is the number divided by its scale.
        plan : Plan, optional
            Of no use here.
        """
        slots = slots.astype(np.int64, copy=False)
        for new, pool, scale in ((k, keys, k_scale), (v, values, v_scale)):
            name = pool.dtype.name
            load_append()(
                launch.rows_of(new), launch.pool_of(pool), slots, *new.shape[1:], pool.itemsize,
                FLOATS.get(name, (0, 0, 0)), FORMATS[name].max, scale, new.dtype == pool.dtype and scale == 1)

    def copy_blocks(self, keys, values, sources, targets):
        """Copy whole blocks, all reads before all writes.

        Parameters
        ----------
        keys, values : array [num_layers, num_blocks, ...]
            The pools.
        sources, targets : array [num_copies] of int
            Block ids.
        """
        for pool in (keys, values):
            bits = pool.view(FORMATS[pool.dtype.name].bits)
            bits[:, targets] = bits[:, sources]  # the right side is a copy of its own

    def read_blocks(self, pool, blocks):
        """The bits of whole blocks.

        Parameters
        ----------
        pool : array [num_layers, num_blocks, ...]
            Keys or values.
        blocks : array [num_read] of int
            Block ids.

        Returns
        -------
        numpy.ndarray [num_layers, num_read, ...] of `Format.bits`
            A copy.
        """
        return pool.view(FORMATS[pool.dtype.name].bits)[:, blocks]

    def write_blocks(self, pool, blocks, bits):
        """Write what `read_blocks` gave.

        Parameters
        ----------
        pool : array [num_layers, num_blocks, ...]
            Keys or values.
        blocks : array [num_written] of int
            Block ids.
        bits : array [num_layers, num_written, ...] of `Format.bits`
            What they hold from now on.
        """
        pool.view(bits.dtype)[:, blocks] = bits

    def attend(self, q, keys, values, plan, options, out, lse):
        """Attend as the plan says.

        Parameters
        ----------
        q : array [num_tokens, num_q_heads, head_dim]
            Queries.
        keys, values : array [num_blocks, block_size, num_kv_heads, head_dim]
            One layer of the pool.
        plan : Plan
            Tables, lengths and work.
        options : AttentionOptions
            What this call does.
        out : array like q
            Filled.
        lse : array [num_tokens, num_q_heads] of float32, or None
            Filled if it is there.
        """
        launch.attend(q, keys, values, plan, options, out, lse)

    def merge(self, outs, lses, out, lse):
        """Merge partials over disjoint keys.

        Parameters
        ----------
        outs : array [num_parts, num_tokens, num_q_heads, head_dim]
            Outputs of the parts.
        lses : array [num_parts, num_tokens, num_q_heads] of float32
            Their logarithms of sums of exponentials.
        out, lse : array
            Filled.
        """
        launch.merge(outs, lses, out, lse)


@functools.lru_cache
def _tiling(group, num_workers):
    return Tiling(max(1, _TILE_ROWS // group), num_workers)
