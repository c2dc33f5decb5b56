"""The memory arithmetic of a KV cache, in bytes and blocks; no arrays are made.

Source: section 2 of the vLLM paper (arXiv:2309.06180) for what contiguous caches waste.
"""

import math

import numpy as np

from .formats import format_of
from .scalars import whole_number


def num_blocks_for(length, block_size):
    """Blocks that hold `length` tokens: ``ceil(length / block_size)``; works on arrays too.

    Parameters
    ----------
    length : int or array of int
        Tokens.
    block_size : int
        Slots per block.

    Returns
    -------
    int or array of int

    Examples
    --------
    >>> num_blocks_for(200, 16)
    13
    """
    return -(-length // block_size)


def kv_bytes_per_token(num_layers, num_kv_heads, head_dim, kv_dtype="float16"):
    """Bytes that the keys and values of one token take in all layers.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        The model's geometry.
    kv_dtype : dtype-like
        The format of the pool.

    Returns
    -------
    int
        ``2 * num_layers * num_kv_heads * head_dim * itemsize``.

    Raises
    ------
    ValueError
        If a count is not a whole number >= 1.
    TypeError
        If the format is not one of the pool's.

    Examples
    --------
    >>> kv_bytes_per_token(32, 8, 128, "float16")
    131072
    """
    counts = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return 2 * math.prod(whole_number(*item) for item in counts.items()) * format_of(kv_dtype).itemsize


def blocks_that_fit(num_bytes, block_size, num_layers, num_kv_heads, head_dim, kv_dtype="float16"):
    """How many blocks (each holding `block_size` tokens in all layers) fit into a budget of bytes.

    Parameters
    ----------
    num_bytes : int
        The budget in bytes.
    block_size : int
        Slots per block.
    num_layers, num_kv_heads, head_dim : int
        The model's geometry.
    kv_dtype : dtype-like
        The format of the pool.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If a count is not a whole number >= 1, or the budget is negative.

    Examples
    --------
    >>> blocks_that_fit(2**30, 16, 32, 8, 128, "float16")
    512
    """
    per_token = kv_bytes_per_token(num_layers, num_kv_heads, head_dim, kv_dtype)
    return whole_number("num_bytes", num_bytes, low=0) // (whole_number("block_size", block_size) * per_token)


def contiguous_bytes(num_seqs, max_length, num_layers, num_kv_heads, head_dim, kv_dtype="float16"):
    """Bytes that contiguous caches reserve: every sequence gets room for `max_length` tokens.

    Parameters
    ----------
    num_seqs : int
        Sequences held at the same time.
    max_length : int
        The longest length that one may reach, in tokens.
    num_layers, num_kv_heads, head_dim : int
        The model's geometry.
    kv_dtype : dtype-like
        The format of the caches.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If a count is not a whole number >= 1.

    Examples
    --------
    >>> contiguous_bytes(1, 4096, 32, 8, 128, "float16") // 2**20
    512
    """
    per_token = kv_bytes_per_token(num_layers, num_kv_heads, head_dim, kv_dtype)
    return whole_number("num_seqs", num_seqs) * whole_number("max_length", max_length) * per_token


def waste(lengths, block_size):
    """Slots allocated but not holding a token, per sequence: never more than ``block_size - 1``.

    Parameters
    ----------
    lengths : int or array of int, [num_seqs]
        Tokens per sequence.
    block_size : int
        Slots per block.

    Returns
    -------
    int or array of int
        Slots.

    Raises
    ------
    ValueError
        If a length is negative or the block size not a whole number >= 1.

    Examples
    --------
    >>> waste([5, 16, 0], 16)
    array([11,  0,  0])
    """
    block_size = whole_number("block_size", block_size)
    lengths = np.asarray(lengths)
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"lengths must be >= 0, got {lengths.min()}")
    wasted = num_blocks_for(lengths, block_size) * block_size - lengths
    return wasted if lengths.ndim else int(wasted)
