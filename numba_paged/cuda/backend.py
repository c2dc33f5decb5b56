"""The CUDA backend: which kernels a call needs, their grids and arguments. Where they run is `device`'s business."""

import functools
import weakref
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..formats import QUERY_FORMATS, format_of
from ..plan import NUM_QUERIES, Tiling
from ..score import score_factors
from ..spec import NO_WINDOW
from . import append, merge
from .choose import choose, item_sizes
from .codecs import FLOAT32, ITEMSIZE, code_of
from .device import CudaDevice
from .warp import AttendSpec

QUERY_ROWS = 64
"""Query rows (tokens x heads of a group) of an item: what a prefill block keeps."""

PART_COST = 4
"""Tokens of 16-bit keys and values for a query head's partial in float32: as many numbers twice as wide, both ways."""

MAX_GRID_Y = 32768
"""Blocks along the y axis of a grid of items; the z axis takes the rest."""


# Asked for by every launch, and nearly always with the same arguments: making them anew takes microseconds.
_factors = functools.lru_cache(maxsize=256)(score_factors)
_attend_spec, _merge_spec = functools.cache(AttendSpec), functools.cache(merge.MergeSpec)


class _Bucket(NamedTuple):
    """A plan's items that one kernel takes: those of at most so many query tokens, and of more than the bucket before.

    `items` are int32 as a kernel reads them: rows of `plan.Work`, and behind them the tokens of gathered ones, filled up
    for the rows of the last block that are of no token.
    """

    items: np.ndarray
    num_items: int
    most_queries: int
    gathered: bool


def _sort_items(work, group, head_dim):
    """Items by the kernel that takes them."""
    items, shared = work.items, work.shared_items
    counts = items[:, NUM_QUERIES]
    sizes = item_sizes(group, head_dim, int(counts.max(initial=1)))
    masks = [(counts > least) & (counts <= most) for least, most in zip((0, *sizes), sizes, strict=False)]
    buckets = [_Bucket(items[mask], int(mask.sum()), most, False) for mask, most in zip(masks, sizes, strict=True)]
    if len(shared):
        both = np.concatenate([shared.ravel(), work.shared_tokens.ravel(), np.zeros(4 * QUERY_ROWS, np.int32)])
        buckets.append(_Bucket(both, len(shared), max(2, int(shared[:, NUM_QUERIES].max())), True))
    return tuple(bucket for bucket in buckets if bucket.num_items)


@functools.cache
def _gathered(spec):
    """What attends a prefix that sequences share: all of them see all of it, and sinks are added once, later."""
    return replace(spec, has_window=False, has_sinks=False, causal=False, gathered=True)


def _strides(array, name):
    """Strides in bytes of all axes but the last, 0 where an axis has one entry and its stride means nothing."""
    return _checked_strides(tuple(array.shape), tuple(array.strides), name)


@functools.lru_cache(maxsize=4096)  # every launch asks, and nearly always the same
def _checked_strides(shape, strides, name):
    counted = tuple(stride if size > 1 else 0 for size, stride in zip(shape[:-1], strides, strict=False))
    if min(counted, default=0) < 0 or max(counted, default=0) >= 2**32:
        raise ValueError(f"{name}: the CUDA kernels take strides from 0 to 2**32 - 1 bytes, got {strides}")
    return counted


@functools.cache
def _code(dtype, cc):
    """The number of a format, by the dtype: a dtype's name takes microseconds."""
    return code_of(dtype.name, cc)


def _alignment(*numbers):
    """The largest power of two, at most 16, that divides all the numbers."""
    bits = functools.reduce(int.__or__, numbers, 16)
    return bits & -bits


@functools.cache
def _run(head_dim, *accesses):
    """How many numbers a thread handles at once, given (alignment, itemsize) of every array it touches."""
    return next(n for n in (16, 8, 4, 2, 1) if head_dim % n == 0 and all(n * size <= align or n == 1
                                                                         for align, size in accesses))


def _item_grid(num_heads, num_items):
    return num_heads, min(num_items, MAX_GRID_Y), -(-num_items // MAX_GRID_Y)


class CudaBackend:
    """The backend of arrays on a GPU; see `backend.Backend` for the verbs.

    Parameters
    ----------
    device : device.Device, optional
        Where the kernels run; the GPUs of this machine if not given.
    choose : callable
        Which kernel attends what: `choose.choose`, or `choose.choose_plain`.

    Raises
    ------
    RuntimeError
        If there is no GPU, or nothing to drive it with.
    """

    name = "cuda"

    def __init__(self, device=None, choose=choose):
        self._device, self._choose = CudaDevice() if device is None else device, choose
        self._buckets = weakref.WeakKeyDictionary()
        self.on, self.view = self._device.on, self._device.view
        self.array, self.to_host = self._device.array, self._device.to_host
        self.empty, self.zeros = self._device.empty, self._device.zeros

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
        resident = 4 if group <= 4 else 3
        return Tiling(max(1, QUERY_ROWS // group), resident * self._device.num_multiprocessors, PART_COST * group)

    def warmup(self, spec, q_dtype="float16", alibi=False, sinks=False):
        """Compile and load the kernels of a model ahead of the first call.

        Parameters
        ----------
        spec : AttentionSpec
            The model's attention.
        q_dtype : dtype-like
            The format of queries.
        alibi, sinks : bool
            Whether calls will have slopes or sinks.
        """
        cc = self._device.compute_capability
        q_code, kv_code = code_of(format_of(q_dtype, "q_dtype", QUERY_FORMATS).name, cc), code_of(spec.kv_dtype, cc)
        access = _alignment(spec.head_dim * spec.kv_format.itemsize)
        attend = AttendSpec(q_code, kv_code, spec.head_dim, spec.group, spec.block_size, access,
                            spec.soft_cap is not None, alibi, spec.window is not None, sinks, True)
        sizes = item_sizes(spec.group, spec.head_dim, self.tiling(spec.group, 1).query_tile)
        kernels = {self._choose(attend, cc, size).kernel for size in sizes}
        kernels |= {self._choose(_gathered(attend), cc, size).kernel for size in sizes if size > 1}
        run = _run(spec.head_dim, (16, ITEMSIZE[q_code]), (16, ITEMSIZE[kv_code]))
        new = append.AppendSpec(q_code, kv_code, spec.num_kv_heads, spec.head_dim, spec.block_size, run, False)
        width = _run(spec.head_dim, (16, 4))
        for kernel in (*kernels, append.append_kernel(new),
                       merge.merge_kernel(merge.MergeSpec(FLOAT32, q_code, spec.head_dim, width, sinks))):
            self._device.prepare(kernel)

    def append(self, k, v, keys, values, slots, k_scale, v_scale, plan=None):
        """Write new keys and values to their slots.

        Parameters
        ----------
        k, v : array [num_tokens, num_kv_heads, head_dim]
            New keys and values.
        keys, values : array [num_blocks, block_size, num_kv_heads, head_dim]
            One layer of the pool.
        slots : numpy.ndarray [num_tokens] of int
            Where each token is written; -1 writes nothing.
        k_scale, v_scale : float
            What is stored is the number divided by its scale.
        plan : Plan, optional
            Whose slots they are: they travel once for all layers.
        """
        num_tokens, num_heads, head_dim = k.shape
        address = self._device.address
        with self._device.on(k=k, v=v, keys=keys, values=values):
            cc = self._device.compute_capability
            places = [(address(k), *_strides(k, "k")), (address(v), *_strides(v, "v")),
                      (address(keys), *_strides(keys, "keys")), (address(values), *_strides(values, "values"))]
            new, pool = _code(k.dtype, cc), _code(keys.dtype, cc)
            run = _run(head_dim, (_alignment(*places[0], *places[1]), ITEMSIZE[new]),
                       (_alignment(*places[2], *places[3]), ITEMSIZE[pool]))
            kernel = append.append_kernel(append.AppendSpec(new, pool, num_heads, head_dim, keys.shape[1], run,
                                                            (k_scale, v_scale) != (1.0, 1.0)))
            slots = slots.astype(np.int64, copy=False)
            if plan is None:
                upload = self._device.upload(slots)  # kept until the launch
                (place,) = upload.addresses
            else:
                (place,) = self._device.tables(plan, slots, what="slots")
            num_blocks = -(-num_tokens * num_heads * (head_dim // run) // append.NUM_THREADS)
            arguments = (place, num_tokens * num_heads, *sum(places, ()), k_scale, v_scale)
            self._device.launch(kernel, (num_blocks, 2), arguments)

    def copy_blocks(self, keys, values, sources, targets):
        """Copy whole blocks, all reads before all writes: what is both read and written goes through a third place.

        Parameters
        ----------
        keys, values : array [num_layers, num_blocks, ...]
            The pools.
        sources, targets : numpy.ndarray [num_copies] of int
            Block ids; no target twice.
        """
        pairs = np.stack([sources, targets], axis=1).astype(np.int32)[sources != targets]
        chained = np.isin(pairs[:, 0], pairs[:, 1])
        simple, chained = pairs[~chained], pairs[chained]
        with self._device.on(keys=keys, values=values):
            if len(chained):
                numbers = np.arange(len(chained), dtype=np.int32)
                shape = (keys.shape[0], len(chained), *keys.shape[2:4], keys.shape[4] * keys.dtype.itemsize)
                spare = self.empty(shape, np.dtype(np.uint8)), self.empty(shape, np.dtype(np.uint8))
                self._copy((keys, values), spare, np.stack([chained[:, 0], numbers], axis=1))
            self._copy((keys, values), (keys, values), simple)
            if len(chained):
                self._copy(spare, (keys, values), np.stack([numbers, chained[:, 1]], axis=1))

    def _copy(self, sources, targets, pairs):
        """Copy blocks of a pair of pools into another pair of pools."""
        num_layers, _, block_size, num_heads, _ = targets[0].shape
        row_bytes = targets[0].shape[-1] * targets[0].dtype.itemsize
        places = [(self._device.address(pool), *_strides(pool, name)) for pools in zip(sources, targets, strict=True)
                  for pool, name in zip(pools, ("keys", "values"), strict=True)]
        spec = append.CopySpec(block_size, num_heads, row_bytes, _alignment(row_bytes, *sum(places, ())))
        upload = self._device.upload(pairs)
        self._device.launch(append.copy_kernel(spec), (len(pairs) * spec.num_chunks, 2 * num_layers),
                            (upload.addresses[0], *sum(places, ())))

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
        num_q_heads, head_dim = q.shape[1:]
        num_kv_heads, address = keys.shape[2], self._device.address
        buckets = self._buckets.get(plan)
        if buckets is None:
            buckets = self._buckets[plan] = _sort_items(plan.work, num_q_heads // num_kv_heads, head_dim)
        with self._device.on(q=q, keys=keys, values=values, out=out, lse=lse):
            *item_places, tables, merges = self._device.tables(
                plan, *(bucket.items for bucket in buckets), plan.block_tables, plan.work.merges)
            part_out = part_lse = None
            if plan.work.num_parts:
                part_out = self.empty((plan.work.num_parts, num_q_heads, head_dim), np.dtype(np.float32))
                part_lse = self.empty((plan.work.num_parts, num_q_heads), np.dtype(np.float32))
            places = (address(keys), *_strides(keys, "keys"), address(values), *_strides(values, "values"))
            spec = self._attend_spec(q, keys, places, options)
            inner, outer = _factors(options.scale, options.k_scale, options.soft_cap)
            window = NO_WINDOW if options.window is None else min(options.window, NO_WINDOW)
            rest = (tables, 4 * plan.block_tables.shape[1], address(q), *_strides(q, "q"), *places, inner, outer, window,
                    address(options.alibi_slopes), address(out), *_strides(out, "out"), address(lse),
                    address(part_out), address(part_lse), num_q_heads, options.v_scale, address(options.sinks))
            for bucket, place in zip(buckets, item_places, strict=True):
                here = _gathered(spec) if bucket.gathered else spec
                choice = self._choose(here, self._device.compute_capability, bucket.most_queries)
                grid = _item_grid(num_kv_heads * choice.blocks_per_head, bucket.num_items)
                self._device.launch(choice.kernel, grid, (place, bucket.num_items, *rest))
            if plan.work.num_parts:
                row = 4 * num_q_heads * head_dim
                self._merge(merges, len(plan.work.merges), (address(part_out), row, row, 4 * head_dim),
                            (address(part_lse), 4 * num_q_heads, 4 * num_q_heads, 4), FLOAT32, out, lse, options.sinks)

    def _attend_spec(self, q, keys, places, options):
        """What the kernels of a call are compiled for."""
        cc = self._device.compute_capability
        head_dim = q.shape[2]
        access = _alignment(head_dim * keys.dtype.itemsize, *places)
        return _attend_spec(_code(q.dtype, cc), _code(keys.dtype, cc), head_dim, q.shape[1] // keys.shape[2],
                            keys.shape[1], access, options.soft_cap is not None, options.alibi_slopes is not None,
                            options.window is not None, options.sinks is not None, options.causal)

    def merge(self, outs, lses, out, lse):
        """Merge partials over disjoint keys.

        Parameters
        ----------
        outs : array [num_parts, num_tokens, num_q_heads, head_dim]
            The outputs over each set of keys.
        lses : array [num_parts, num_tokens, num_q_heads] of float32
            Their log-sum-exp.
        out : array [num_tokens, num_q_heads, head_dim]
            Filled.
        lse : array [num_tokens, num_q_heads] of float32
            Filled.
        """
        num_parts, num_tokens = outs.shape[:2]
        with self._device.on(outs=outs, lses=lses, out=out, lse=lse):
            tokens = np.arange(num_tokens, dtype=np.int32)
            upload = self._device.upload(np.stack([tokens, tokens, np.full_like(tokens, num_parts)], axis=1))
            out_part, out_token, out_head = _strides(outs, "outs")
            lse_part, lse_token = _strides(lses, "lses")
            lse_head = lses.strides[-1] if lses.shape[-1] > 1 else 0
            code = _code(outs.dtype, self._device.compute_capability)
            self._merge(upload.addresses[0], num_tokens, (self._device.address(outs), out_token, out_part, out_head),
                        (self._device.address(lses), lse_token, lse_part, lse_head), code, out, lse, None)

    def _merge(self, merges, num_tokens, outs, lses, part_code, out, lse, sinks):
        """Merge the parts that `merges` names; places of outs and lses: address, strides of first, part and head."""
        address, (num_q_heads, head_dim) = self._device.address, out.shape[1:]
        target = address(out), *_strides(out, "out")
        code = _code(out.dtype, self._device.compute_capability)
        width = _run(head_dim, (_alignment(*outs), ITEMSIZE[part_code]), (_alignment(*target), ITEMSIZE[code]))
        kernel = merge.merge_kernel(_merge_spec(part_code, code, head_dim, width, sinks is not None))
        num_rows = num_tokens * num_q_heads
        arguments = (merges, num_rows, num_q_heads, *outs, *lses, *target, address(lse), address(sinks))
        self._device.launch(kernel, (-(-num_rows // merge.NUM_WARPS), 1), arguments)
