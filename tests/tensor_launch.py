"""Attend a test problem with the kernels of `cuda.choose`, one launch at a time, on the PTX machine."""

import numpy as np

import reference
import tolerances
from numba_paged.cuda.choose import choose
from numba_paged.cuda.codecs import code_of
from numba_paged.cuda.warp import AttendSpec
from numba_paged.plan import Tiling, cut_work
from numba_paged.score import score_factors
from numba_paged.spec import NO_WINDOW, AttentionOptions
from ptx_device import PtxDevice


def spec_of(shape, cc, options):
    """The `AttendSpec` of a problem, of pools that allow the widest accesses."""
    return AttendSpec(code_of(shape.q_dtype), code_of(shape.kv_dtype, cc), shape.head_dim,
                      shape.num_q_heads // shape.num_kv_heads, shape.block_size, 16, options.soft_cap is not None,
                      options.alibi_slopes is not None, options.window is not None, options.sinks is not None,
                      options.causal)


def attend(problem, cc=(9, 0), query_tile=1, pool_rows=None, **options):
    """(out, lse, launch) of one launch over all items, partials merged by the oracle; any hazard fails.

    Only the blocks `pool_rows` of the pool exist, if it is given.
    """
    shape, device = problem.shape, PtxDevice(cc)
    options = AttentionOptions(**{"scale": shape.head_dim**-0.5, **problem.scales, **options})
    choice = choose(spec_of(shape, cc, options), cc, query_tile)
    starts, lengths = problem.query_starts, problem.lengths
    starts = np.arange(len(lengths) + 1, dtype=np.int32) if starts is None else starts
    work = cut_work(starts, lengths, problem.block_tables, shape.block_size, shape.num_kv_heads, Tiling(query_tile, 1),
                    options.causal, options.window, options.split_size)
    out, lse = device.empty(problem.q.shape, problem.q.dtype), device.empty(problem.q.shape[:2], np.float32)
    parts = device.empty((work.num_parts, *problem.q.shape[1:]), np.float32)
    part_lses = device.empty((work.num_parts, shape.num_q_heads), np.float32)
    place = {name: (device.memory.add(x, name=name, rows=rows), *x.strides[:-1])
             for name, x, rows in (("q", problem.q, None), ("keys", problem.keys, pool_rows),
                                   ("values", problem.values, pool_rows))}
    slopes, sinks = (0 if x is None else device.memory.add(x) for x in (options.alibi_slopes, options.sinks))
    items, tables = device.upload(work.items, problem.block_tables).addresses
    inner, outer = score_factors(options.scale, options.k_scale, options.soft_cap)
    arguments = (items, len(work.items), tables, problem.block_tables.strides[0], *place["q"], *place["keys"],
                 *place["values"], inner, outer, NO_WINDOW if options.window is None else options.window, slopes,
                 device.address(out), *out.strides[:-1], device.address(lse), device.address(parts),
                 device.address(part_lses), shape.num_q_heads, np.float32(options.v_scale), sinks)
    device.launch(choice.kernel, (shape.num_kv_heads * choice.blocks_per_head, len(work.items)), arguments)
    _merge(work.merges, parts.host, part_lses.host, options.sinks, out.host, lse.host)
    return out.host, lse.host, device.launches[0]


def _merge(merges, parts, part_lses, sinks, out, lse):
    """What the merge kernel does, in NumPy."""
    for token, first, count in merges:
        row, row_lse = reference.merge(parts[first : first + count], part_lses[first : first + count])
        seen = np.isfinite(row_lse)
        if sinks is not None and seen.any():
            total = np.logaddexp(row_lse, sinks, where=seen, out=row_lse.copy())
            row[seen] *= np.exp(row_lse - total, where=seen, out=np.zeros_like(total))[seen, None]
            row_lse = total
        out[token], lse[token] = row, row_lse


def check(problem, cc=(9, 0), query_tile=1, **options):
    """Attend and compare with the oracle; returns the launch."""
    out, lse, launch = attend(problem, cc, query_tile, **options)
    rounding = tolerances.tensor_weight_rounding(problem.shape.q_dtype, problem.shape.kv_dtype)
    tolerances.assert_attention(out, lse, problem.expected(**options), problem.q.dtype, problem.shape.head_dim,
                                options.get("soft_cap"), rounding)
    return launch
