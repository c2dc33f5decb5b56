"""The oracle: attention by its definition, in float64 NumPy, on contiguous arrays.

It shares no line with the package: no tiles, no online softmax, no splits, base e throughout. Besides the result it
returns the magnitudes that the tolerances are made of (`tolerances.py`).
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np


class Expected(NamedTuple):
    """What attention should give, and how large the terms were that made it.

    `out` [num_tokens, num_q_heads, head_dim] and `lse` [num_tokens, num_q_heads] are the result (float64, natural
    log). The rest bounds rounding errors: `visible` [num_tokens] keys seen, `score_size` [num_tokens, num_q_heads] the
    largest sum of |terms| behind one score, `value_size` and `value_norm` (shaped like `out`) the sum over the keys of
    p·|v| and the root of the sum of (p·(|v| + |out|))²: what independent errors of the weights p add up to.
    """

    out: np.ndarray
    lse: np.ndarray
    visible: np.ndarray
    score_size: np.ndarray
    value_size: np.ndarray
    value_norm: np.ndarray


def mask(num_queries, num_keys, window=None, causal=True):
    """True where query i (the queries are the last positions) sees key j; [num_queries, num_keys]."""
    i = np.arange(num_keys - num_queries, num_keys)[:, None]
    j = np.arange(num_keys)[None, :]
    seen = np.ones((num_queries, num_keys), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= j > i - min(window, 2**31)
    return seen


def explain(q, k, v, *, scale=None, soft_cap=None, window=None, alibi_slopes=None, sinks=None, causal=True):
    """Attention of one sequence with the magnitudes of its terms.

    Parameters
    ----------
    q : array [num_queries, num_q_heads, head_dim]
    k, v : array [num_keys, num_kv_heads, head_dim]
        Numbers as they count: already dequantised.

    Returns
    -------
    Expected
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    num_queries, num_q_heads, head_dim = q.shape
    group = num_q_heads // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    seen = mask(num_queries, len(k), window, causal)
    k, v = (np.where(seen.any(axis=0)[:, None, None], x, 0.0) for x in (k, v))  # what nobody sees may hold anything
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)

    scores = scale * np.einsum("ihd,jhd->ihj", q, k)
    sizes = abs(scale) * np.einsum("ihd,jhd->ihj", abs(q), abs(k))
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        distance = np.arange(len(k))[None, :] - np.arange(len(k) - num_queries, len(k))[:, None]
        bias = np.asarray(alibi_slopes, np.float64)[None, :, None] * distance[:, None, :]
        scores, sizes = scores + bias, sizes + abs(bias)
    scores = np.where(seen[:, None, :], scores, -np.inf)
    sizes = np.where(seen[:, None, :], sizes, 0.0)

    peak = scores.max(axis=2, initial=-np.inf)
    empty = peak == -np.inf
    if sinks is not None:
        peak = np.maximum(peak, np.asarray(sinks, np.float64))
    peak = np.where(empty, 0.0, peak)
    weights = np.exp(scores - peak[:, :, None])
    total = weights.sum(axis=2)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64) - peak)
    weights /= np.where(empty, 1.0, total)[:, :, None]
    lse = np.where(empty, -np.inf, peak + np.log(np.where(empty, 1.0, total)))
    out = np.einsum("ihj,jhd->ihd", weights, v)
    squares = np.einsum("ihj,jhd->ihd", weights**2, v**2) + 2 * abs(out) * np.einsum("ihj,jhd->ihd", weights**2, abs(v))
    return Expected(
        out=out,
        lse=lse,
        visible=seen.sum(axis=1),
        score_size=sizes.max(axis=2, initial=0.0),
        value_size=np.einsum("ihj,jhd->ihd", weights, abs(v)),
        value_norm=np.sqrt(squares + (weights**2).sum(axis=2)[..., None] * out**2),
    )


def attention(q, k, v, **options):
    """(out, lse) of one sequence; see `explain`."""
    return explain(q, k, v, **options)[:2]


def gather(pool, block_table, length, scale=1.0):
    """The first `length` tokens of a sequence as numbers: [length, num_kv_heads, head_dim] float64."""
    block_size = pool.shape[1]
    positions = np.arange(length)
    blocks = np.asarray(block_table)[positions // block_size]
    return np.asarray(pool)[blocks, positions % block_size].astype(np.float64) * scale


def paged(q, keys, values, block_tables, lengths, query_starts=None, *, k_scale=1.0, v_scale=1.0, **options):
    """Attention through block tables; without `query_starts` every sequence has one query (decode).

    Returns
    -------
    Expected
    """
    if query_starts is None:
        query_starts = np.arange(len(lengths) + 1)
    parts = []
    for row, length in enumerate(lengths):
        queries = q[query_starts[row] : query_starts[row + 1]]
        k = gather(keys, block_tables[row], length, k_scale)
        v = gather(values, block_tables[row], length, v_scale)
        parts.append(explain(queries, k, v, **options))
    return Expected(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def merge(outs, lses):
    """One attention result out of parts over disjoint keys: each weighs exp(its lse); an empty part weighs nothing."""
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    peak = lses.max(axis=0)
    empty = peak == -np.inf
    weights = np.exp(lses - np.where(empty, 0.0, peak))
    total = np.where(empty, 1.0, weights.sum(axis=0))
    outs = np.where(weights[..., None] > 0, outs, 0.0)
    out = (weights[..., None] * outs).sum(axis=0) / total[..., None]
    return out, np.where(empty, -np.inf, np.where(empty, 0.0, peak) + np.log(total))


def quantise(x, scale, dtype):
    """What `append` stores for x: x / scale to the nearest number of the format, ties to even, kept to the largest."""
    x, dtype = np.asarray(x), np.dtype(dtype)
    if x.dtype == dtype and scale == 1.0:
        return x.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.astype(np.float32) / np.float32(scale)
    if dtype == np.int8:
        return np.clip(np.rint(np.nan_to_num(scaled, nan=0.0)), -128, 127).astype(np.int8)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(scaled, -largest, largest).astype(dtype)


def append(new, pool, slots, scale=1.0):
    """The pool after `append`: a copy with the new tokens in their slots; slot -1 writes nothing."""
    pool = pool.copy()
    for token, slot in zip(quantise(new, scale, pool.dtype), slots, strict=True):
        if slot >= 0:
            pool[slot // pool.shape[1], slot % pool.shape[1]] = token
    return pool


def copy_blocks(pool, sources, targets):
    """The pool after `copy_blocks`: all reads before all writes."""
    after = pool.copy()
    after[targets] = pool[sources]
    return after
