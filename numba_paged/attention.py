"""decode, prefill, append, copy_blocks, merge: functions on arrays, for those who bring their own manager.

They check the arguments, pick the backend by where the arrays live, and hand it a plan. The math is that of the vLLM
paper's PagedAttention (arXiv:2309.06180, section 4.1) with an online softmax.
"""

from functools import lru_cache, partial

import numpy as np

from . import checks
from .arrays import check_last_axis, check_ndim, check_shape, common_place
from .backend import load_backend
from .formats import QUERY_FORMATS, format_of
from .plan import Plan, cut_work
from .spec import AttentionOptions, scale_of

_FLOAT32 = np.dtype(np.float32)


def decode(q, keys, values, block_tables, lengths, *, scale=None, soft_cap=None, window=None, alibi_slopes=None,
           sinks=None, k_scale=1.0, v_scale=1.0, split_size=None, out=None, return_lse=False, validate=True):
    """Attention of one query token per sequence, its last, over the paged cache.

    Parameters
    ----------
    q : array [num_seqs, num_q_heads, head_dim] of float32, float16 or bfloat16
        The query of each sequence's last token, at position ``lengths[i] - 1``.
    keys, values : array [num_blocks, block_size, num_kv_heads, head_dim]
        One layer of the pool: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8, any strides with a
        contiguous last axis.
    block_tables : array [num_seqs, max_blocks] of int32
        Position to block; entries past ``ceil(length / block_size)`` are never read.
    lengths : array [num_seqs] of int32
        Tokens in the cache, the query's own included.
    scale : float, optional
        What scores are multiplied with; ``head_dim ** -0.5`` if not given.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(score / soft_cap)``, after the scale.
    window : int, optional
        How many keys a query sees, its own included.
    alibi_slopes : array [num_q_heads] of float32, optional
        ``slope * (key position - query position)`` is added to the scores.
    sinks : array [num_q_heads] of float32, optional
        An extra logit in the softmax's denominator, not scaled, added once.
    k_scale, v_scale : float
        What stored keys and values are multiplied with when read.
    split_size : int, optional
        A fixed split length in tokens, rounded up to whole blocks: a sequence's result is then bit-equal whatever else
        is in the batch, and wherever its blocks lie.
    out : array like q, optional
        Where to write the output.
    return_lse : bool
        Whether to return the log-sum-exp too.
    validate : bool
        Whether to check lengths and block ids (their values; shapes and dtypes are always checked).

    Returns
    -------
    out : array like q
        0 for a sequence of length 0.
    lse : array [num_seqs, num_q_heads] of float32
        Only with `return_lse`: natural logarithm of the denominator, sinks included; -inf for an empty row.

    Raises
    ------
    ValueError
        If a shape, an option, a length or a block id is out of its range.
    TypeError
        If a dtype is not supported, or host and device arrays are mixed.

    Examples
    --------
    >>> import numpy as np, numba_paged as npg
    >>> keys = np.zeros((3, 2, 1, 2), np.float32)
    >>> values = np.arange(12, dtype=np.float32).reshape(3, 2, 1, 2)
    >>> q = np.ones((1, 1, 2), np.float32)
    >>> tables = np.array([[2, 0]], np.int32)
    >>> npg.decode(q, keys, values, tables, np.array([3], np.int32))  # the mean of slots 4, 5 and 0
    array([[[6., 7.]]], dtype=float32)
    """
    options = scale, soft_cap, window, alibi_slopes, sinks, k_scale, v_scale, True, split_size
    return _attend(q, keys, values, block_tables, lengths, None, options, out, return_lse, validate)


def prefill(q, keys, values, block_tables, lengths, query_starts, *, causal=True, scale=None, soft_cap=None,
            window=None, alibi_slopes=None, sinks=None, k_scale=1.0, v_scale=1.0, split_size=None, out=None,
            return_lse=False, validate=True):
    """Attention of any number of query tokens per sequence, its last ones, over the paged cache.

    Serves whole prompts, chunks of prompts, verification of speculative tokens and mixed batches alike.

    Parameters
    ----------
    q : array [num_tokens, num_q_heads, head_dim] of float32, float16 or bfloat16
        The query tokens of all sequences, one sequence after the other.
    keys, values : array [num_blocks, block_size, num_kv_heads, head_dim]
        One layer of the pool, as in `decode`.
    block_tables : array [num_seqs, max_blocks] of int32
        Position to block; entries past ``ceil(length / block_size)`` are never read.
    lengths : array [num_seqs] of int32
        Tokens in the cache, the query tokens included.
    query_starts : array [num_seqs + 1] of int32
        The query tokens of sequence i are ``query_starts[i]`` up to ``query_starts[i + 1]``.
    causal : bool
        Whether a query sees only the keys up to its own position. Without it a window still bounds how far back it
        sees.
    scale, soft_cap, window, alibi_slopes, sinks, k_scale, v_scale, split_size, out, return_lse, validate
        As in `decode`.

    Returns
    -------
    out : array like q
        0 for a query that sees no key (more query tokens than tokens in the cache).
    lse : array [num_tokens, num_q_heads] of float32
        Only with `return_lse`: natural logarithm of the denominator, sinks included; -inf for an empty row.

    Raises
    ------
    ValueError
        If a shape, an option, a length, a query start or a block id is out of its range.
    TypeError
        If a dtype is not supported, or host and device arrays are mixed.

    Examples
    --------
    >>> import numpy as np, numba_paged as npg
    >>> keys = np.zeros((2, 4, 1, 1), np.float32)
    >>> values = np.arange(8, dtype=np.float32).reshape(2, 4, 1, 1)
    >>> q = np.ones((3, 1, 1), np.float32)
    >>> tables, lengths = np.array([[1]], np.int32), np.array([3], np.int32)
    >>> npg.prefill(q, keys, values, tables, lengths, np.array([0, 3], np.int32)).ravel()
    array([4. , 4.5, 5. ], dtype=float32)
    """
    options = scale, soft_cap, window, alibi_slopes, sinks, k_scale, v_scale, bool(causal), split_size
    return _attend(q, keys, values, block_tables, lengths, query_starts, options, out, return_lse, validate)


def append(k, v, keys, values, slots, *, k_scale=1.0, v_scale=1.0):
    """Write new keys and values into the pool.

    Parameters
    ----------
    k, v : array [num_tokens, num_kv_heads, head_dim] of float32, float16 or bfloat16
        What to write.
    keys, values : array [num_blocks, block_size, num_kv_heads, head_dim]
        One layer of the pool, as in `decode`; written in place.
    slots : array [num_tokens] of int32 or int64
        ``block * block_size + offset`` of each token; -1 writes nothing.
    k_scale, v_scale : float
        What is stored is ``k / k_scale``, rounded to nearest even and saturated to the format's largest finite value
        (NaN stays NaN, and becomes 0 in int8). An unscaled write into the same dtype copies the bits.

    Raises
    ------
    ValueError
        If a shape, a scale or a slot is out of its range, or two tokens have the same slot; nothing was written.
    TypeError
        If a dtype is not supported, or host and device arrays are mixed.

    Examples
    --------
    >>> import numpy as np, numba_paged as npg
    >>> keys, values = np.zeros((2, 2, 2, 4, 1, 8), np.float16)[:, 0]
    >>> k = v = np.ones((2, 1, 8), np.float32)
    >>> npg.append(k, v, keys, values, np.array([5, -1], np.int64))
    >>> np.argwhere(keys[:, :, 0, 0])
    array([[1, 1]])
    """
    options = AttentionOptions(k_scale=k_scale, v_scale=v_scale)
    backend, (k, v, keys, values) = _views(k=k, v=v, keys=keys, values=values)
    checks.check_pool(keys, values, writeable=True)
    checks.check_new(k, v, keys.shape[2:])
    slots = checks.integers(backend, slots, "slots", 1, (np.int64, np.int32))
    check_shape(slots, "slots", k.shape[:1])
    checks.check_slots(slots, *keys.shape[:2])
    backend.append(k, v, keys, values, slots, options.k_scale, options.v_scale)


def copy_blocks(keys, values, sources, targets):
    """Copy whole blocks inside the pool: all reads come before all writes.

    Parameters
    ----------
    keys, values : array [num_blocks, block_size, num_kv_heads, head_dim] or [num_layers, num_blocks, ...]
        One layer of the pool, or all of them; written in place.
    sources, targets : array [num_copies] of int32
        Block ids: ``targets[i]`` becomes what ``sources[i]`` was before the call.

    Raises
    ------
    ValueError
        If a block id is out of its range, or a target is named twice; nothing was written.
    TypeError
        If a dtype is not supported, or host and device arrays are mixed.

    Examples
    --------
    >>> import numpy as np, numba_paged as npg
    >>> keys = np.arange(3, dtype=np.float32).reshape(3, 1, 1, 1)
    >>> npg.copy_blocks(keys, keys.copy(), np.array([0, 1], np.int32), np.array([1, 2], np.int32))
    >>> keys.ravel()
    array([0., 0., 1.], dtype=float32)
    """
    backend, (keys, values) = _views(keys=keys, values=values)
    if len(keys.shape) == 4:
        check_ndim(values, "values", 4)
        keys, values = keys[None], values[None]
    checks.check_pool(keys, values, ndim=5, writeable=True)
    sources, targets = checks.integers(backend, sources, "sources", 1), checks.integers(backend, targets, "targets", 1)
    check_shape(targets, "targets", sources.shape)
    checks.check_copies(sources, targets, keys.shape[1])
    backend.copy_blocks(keys, values, sources, targets)


def merge(outs, lses):
    """Merge attention over disjoint sets of keys into the attention over all of them.

    Parameters
    ----------
    outs : array [num_parts, num_tokens, num_q_heads, head_dim] of float32, float16 or bfloat16
        The outputs over each set.
    lses : array [num_parts, num_tokens, num_q_heads] of float32
        Their log-sum-exp, natural; -inf where a set had no visible key.

    Returns
    -------
    out : array [num_tokens, num_q_heads, head_dim] like outs
        0 where every part is empty.
    lse : array [num_tokens, num_q_heads] of float32
        -inf where every part is empty.

    Raises
    ------
    ValueError
        If a shape does not fit.
    TypeError
        If a dtype is not supported, or host and device arrays are mixed.

    Examples
    --------
    >>> import numpy as np, numba_paged as npg
    >>> outs = np.array([1, 3], np.float32).reshape(2, 1, 1, 1)
    >>> out, lse = npg.merge(outs, np.zeros((2, 1, 1), np.float32))
    >>> float(out[0, 0, 0]), round(float(lse[0, 0]), 4)
    (2.0, 0.6931)
    """
    backend, (outs, lses) = _views(outs=outs, lses=lses)
    check_ndim(outs, "outs", 4)
    format_of(outs.dtype, "outs", QUERY_FORMATS)
    format_of(lses.dtype, "lses", ("float32",))
    check_shape(lses, "lses", outs.shape[:3])
    if outs.shape[0] < 1:
        raise ValueError("outs must have at least 1 part, got 0")
    check_last_axis(outs, "outs")
    with backend.on(outs=outs, lses=lses):
        out, lse = backend.empty(outs.shape[1:], outs.dtype), backend.empty(outs.shape[1:3], _FLOAT32)
        backend.merge(outs, lses, out, lse)
    return out, lse


def _views(**arrays):
    """The backend of the place where the arrays live, and its views of them."""
    backend = load_backend(common_place(**arrays))
    return backend, [backend.view(array, name) for name, array in arrays.items()]


def _attend(q, keys, values, block_tables, lengths, query_starts, options, out, return_lse, validate):
    """Decode (without query_starts) and prefill, on the device of the arrays."""
    if type(q) is type(keys) is type(values) is np.ndarray and (out is None or type(out) is np.ndarray):
        out, lse = _attend_here(load_backend("cpu"), q, keys, values, block_tables, lengths, query_starts, options, out,
                                return_lse, validate)
        return (out, lse) if return_lse else out
    backend, (q_view, keys, values) = _views(q=q, keys=keys, values=values)
    out_view = None if out is None else _out_view(backend, out, q)
    with backend.on(q=q_view, keys=keys, values=values, out=out_view):
        out_view, lse = _attend_here(backend, q_view, keys, values, block_tables, lengths, query_starts, options,
                                     out_view, return_lse, validate)
    out = out_view if out is None else out
    return (out, lse) if return_lse else out


def _out_view(backend, out, q):
    if common_place(out=out) != common_place(q=q):
        raise TypeError("host and device arrays are mixed: out is not where q is")
    return backend.view(out, "out")


def _attend_here(backend, q, keys, values, block_tables, lengths, query_starts, options, out, return_lse, validate):
    """Check the arguments, plan, and let the backend work."""
    checks.check_layer(q, keys, values)
    num_tokens, num_q_heads, head_dim = q.shape
    block_size, num_kv_heads = keys.shape[1:3]
    options = _options_of(backend, options, num_q_heads, head_dim)
    block_tables = checks.integers(backend, block_tables, "block_tables", 2)
    lengths = checks.integers(backend, lengths, "lengths", 1)
    check_shape(lengths, "lengths", block_tables.shape[:1])
    most_queries = 1
    if query_starts is None:
        if num_tokens != lengths.size:
            raise ValueError(f"q must have one token per sequence, got {num_tokens} tokens and {lengths.size} lengths")
        query_starts = np.arange(num_tokens + 1, dtype=np.int32)
    else:
        query_starts = _query_starts(backend, query_starts, lengths.size, num_tokens)
        most_queries = int(np.diff(query_starts).max(initial=0))
    if validate:
        checks.check_tables(block_tables, query_starts, lengths, *keys.shape[:2], options.window)
    if out is None:
        out = backend.empty(q.shape, q.dtype)
    else:
        checks.check_out(out, q)
    lse = backend.empty((num_tokens, num_q_heads), _FLOAT32) if return_lse else None
    cut = partial(cut_work, block_size=block_size, num_kv_heads=num_kv_heads, causal=options.causal,
                  tiling=backend.tiling(num_q_heads // num_kv_heads, most_queries), window=options.window,
                  split_size=options.split_size)
    backend.attend(q, keys, values, Plan(query_starts, lengths, block_tables, cut), options, out, lse)
    return out, lse


def _options_of(backend, options, num_q_heads, head_dim):
    """The `AttentionOptions` of a call, its arrays where the backend computes."""
    scale, soft_cap, window, slopes, sinks, *rest = options
    if slopes is None and sinks is None:
        try:
            return _plain_options(head_dim, *options)
        except TypeError:  # what cannot be hashed is no number: below they say so themselves
            pass
    slopes, sinks = checks.alibi_slopes(backend, slopes, num_q_heads), checks.sinks(backend, sinks, num_q_heads)
    return AttentionOptions(scale_of(scale, head_dim), soft_cap, window, slopes, sinks, *rest)


@lru_cache(typed=True)
def _plain_options(head_dim, scale, *rest):
    """Options without arrays: most calls are like the last one."""
    return AttentionOptions(scale_of(scale, head_dim), *rest)


def _query_starts(backend, query_starts, num_seqs, num_tokens):
    query_starts = checks.integers(backend, query_starts, "query_starts", 1)
    check_shape(query_starts, "query_starts", (num_seqs + 1,))
    checks.check_query_starts(query_starts, num_tokens)
    return query_starts
