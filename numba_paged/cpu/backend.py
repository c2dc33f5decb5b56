"""The CPU backend: what a plan says, handed to the kernels as addresses and strides."""

import numba
import numpy as np

from ..arrays import host_array
from ..formats import FORMATS
from ..plan import Tiling
from ..score import score_factors
from ..spec import NO_WINDOW
from . import threads

threads.load_tbb()  # before Numba's first parallel region

from .append import FLOATS, append_rows  # noqa: E402
from .attend import load_attend, run_workers  # noqa: E402
from .merge import merge_parts  # noqa: E402
from .numbers import BYTE, KINDS, NO_TABLE, TABLES  # noqa: E402

_TILE_ROWS = 64
"""Query rows (tokens x heads of a group) that share one reading of the keys and values."""

_PAIRS_PER_THREAD = 8
"""Pairs of work a thread should find, so that an unlucky one is made up for."""

_NOTHING = np.empty(0, np.float32)


def _address(array):
    return array.__array_interface__["data"][0]


def _place(array):
    """Address and strides of all axes but the last, which is contiguous."""
    return _address(array), *array.strides[:-1]


def _rows(array):
    """A [num_tokens, num_heads, head_dim] array as the kernels take it."""
    address, *strides = _place(array)
    return address, KINDS[array.dtype.name], *strides


def _pool(array):
    """One layer of the pool as the kernels take it."""
    return *_place(array), array.shape[1]


def _outputs(out, lse):
    return *_rows(out), *((0, 0, 0) if lse is None else (_address(lse), *lse.strides))


class CpuBackend:
    """The backend of NumPy arrays; see `backend.Backend` for the verbs."""

    name = "cpu"

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
        """An array of zeros.

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
            The longest run of query tokens of a sequence; the cut of a sequence must not depend on it.

        Returns
        -------
        Tiling
        """
        return Tiling(max(1, _TILE_ROWS // group), _PAIRS_PER_THREAD * numba.get_num_threads())

    def append(self, k, v, keys, values, slots, k_scale, v_scale):
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
        """
        slots = slots.astype(np.int64, copy=False)
        for new, pool, scale in ((k, keys, k_scale), (v, values, v_scale)):
            name = pool.dtype.name
            append_rows(_rows(new), _pool(pool), slots, *new.shape[1:], pool.itemsize, FLOATS.get(name, (0, 0, 0)),
                        FORMATS[name].max, scale, new.dtype == pool.dtype and scale == 1)

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
        work = plan.work
        num_q_heads, head_dim = q.shape[1:]
        num_kv_heads = keys.shape[2]
        group = num_q_heads // num_kv_heads
        slopes = _NOTHING if options.alibi_slopes is None else options.alibi_slopes
        sinks = _NOTHING if options.sinks is None else options.sinks
        parts = np.empty((work.num_parts, num_q_heads, head_dim), np.float32)
        part_lses = np.empty((work.num_parts, num_q_heads), np.float32)
        outputs = _outputs(out, lse)
        name = keys.dtype.name
        kernel = load_attend(KINDS.get(name, BYTE), options.soft_cap is not None, options.alibi_slopes is not None)
        run_workers(kernel.address, numba.get_num_threads(), _rows(q), _pool(keys), _pool(values), outputs, plan.block_tables,
                    plan.lengths, work.items, (num_kv_heads, group, head_dim, max(1, _TILE_ROWS // group)),
                    (*score_factors(options.scale, options.k_scale, options.soft_cap), options.v_scale),
                    TABLES.get(name, NO_TABLE), slopes, sinks, parts, part_lses,
                    NO_WINDOW if options.window is None else options.window, options.causal)
        if len(work.merges):
            head_stride, lse_head_stride = parts.strides[1], part_lses.strides[1]
            places = (_address(parts), KINDS["float32"], parts.strides[0], parts.strides[0], head_stride,
                      _address(part_lses), part_lses.strides[0], part_lses.strides[0], lse_head_stride)
            merge_parts(places, outputs, work.merges, num_q_heads, head_dim, sinks)

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
        num_parts, num_tokens, num_q_heads, head_dim = outs.shape
        merges = np.empty((num_tokens, 3), np.int32)
        merges[:, 0] = merges[:, 1] = np.arange(num_tokens)
        merges[:, 2] = num_parts
        part_stride, first_stride, head_stride = outs.strides[:3]
        lse_part_stride, lse_first_stride, lse_head_stride = lses.strides
        places = (_address(outs), KINDS[outs.dtype.name], first_stride, part_stride, head_stride,
                  _address(lses), lse_first_stride, lse_part_stride, lse_head_stride)
        merge_parts(places, _outputs(out, lse), merges, num_q_heads, head_dim, _NOTHING)
