"""What callers pass to the manager for a batch, as arrays: handles, token ids, counts; refused if they are not that."""

import functools

import numpy as np

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
"""The dtypes that arrays of integers nearly always have: compared by identity, and not looked up for each new array."""

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


def _integers(values, name):
    """A copy-free array with one axis, of whole numbers."""
    values = np.asarray(values)
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers, got {values.dtype.name}")
    if values.ndim != 1:
        raise ValueError(f"{name} must have 1 axis, got shape {values.shape}")
    return values


def handles(seqs, name):
    """Handles of sequences.

    Parameters
    ----------
    seqs : sequence of int, or int
        One or more.
    name : str
        What to call them in the error.

    Returns
    -------
    numpy.ndarray of int64, [num_seqs]
        A copy, that a plan may keep.

    Raises
    ------
    TypeError
        If they are not whole numbers.
    ValueError
        If there is more than one axis.
    """
    if type(seqs) is np.ndarray and seqs.dtype is INT64 and seqs.ndim == 1:
        return seqs.copy()
    return np.array(_integers(np.atleast_1d(seqs), name), np.int64)


@functools.lru_cache(1024)
def _one_count(count):
    return np.array((count,), np.int64)


def new_counts(num_new, num_seqs):
    """How many new tokens a plan has.

    Parameters
    ----------
    num_new : int or sequence of int, [num_seqs]
        The counts, or one for all.
    num_seqs : int
        How many there may be.

    Returns
    -------
    numpy.ndarray of int64, [num_seqs] or [1]

    Raises
    ------
    TypeError
        If they are not whole numbers.
    ValueError
        If there are more or fewer than sequences.
    """
    if type(num_new) is int:
        return _one_count(num_new)
    counts = _integers(np.atleast_1d(num_new), "num_new")
    if counts.size != num_seqs and np.ndim(num_new):
        raise ValueError(f"num_new must be one count, or one for each of {num_seqs} sequences, got {counts.size}")
    return np.ascontiguousarray(counts, np.int64)


def no_twins(seqs, name):
    """Raise if a handle is there twice.

    Parameters
    ----------
    seqs : int64 [num_seqs]
        Handles.
    name : str
        What to call them in the error.

    Raises
    ------
    ValueError
        If one is.
    """
    unique, counts = np.unique(seqs, return_counts=True)
    if unique.size < seqs.size:
        raise ValueError(f"{name} names sequence {unique[counts.argmax()]} twice")


def token_ids(tokens, name, size=None):
    """Token ids.

    Parameters
    ----------
    tokens : sequence of int, [num_tokens]
        The ids.
    name : str
        What to call them in the error.
    size : int, optional
        How many there must be, one for each new position of a plan.

    Returns
    -------
    numpy.ndarray of int32, [num_tokens]
        The caller's own memory where it is int32 already.

    Raises
    ------
    TypeError
        If they are not whole numbers.
    ValueError
        If there are more or fewer, or one is out of range for 32 bits.
    """
    is_ready = type(tokens) is np.ndarray and tokens.dtype is INT32 and tokens.ndim == 1 and tokens.flags.c_contiguous
    if not is_ready:
        tokens = _integers(tokens, name)
    if size is not None and tokens.size != size:
        raise ValueError(f"{name} must have {size} ids, one for each new position, got {tokens.size}")
    if is_ready:
        return tokens
    if tokens.dtype != INT32 and tokens.size and not (tokens.min() >= _LOWEST and tokens.max() <= _HIGHEST):
        index = int(np.flatnonzero((tokens < _LOWEST) | (tokens > _HIGHEST))[0])
        raise ValueError(f"{name}[{index}] is {tokens[index]}, out of range for a token id of 32 bits")
    return np.ascontiguousarray(tokens, np.int32)


def accepted_counts(accepted, query_starts):
    """How many of each sequence's new tokens stay.

    Parameters
    ----------
    accepted : sequence of int, [num_seqs]
        The counts.
    query_starts : int32 [num_seqs + 1]
        As in `Plan`.

    Returns
    -------
    numpy.ndarray of int64, [num_seqs]

    Raises
    ------
    TypeError
        If they are not whole numbers.
    ValueError
        If there are more or fewer than sequences, or one is out of its range.
    """
    accepted, num_new = _integers(accepted, "accepted"), np.diff(query_starts)
    if accepted.size != num_new.size:
        raise ValueError(f"accepted must have {num_new.size} counts, one for each sequence, got {accepted.size}")
    bad = np.flatnonzero((accepted < 0) | (accepted > num_new))
    if bad.size:
        row = int(bad[0])
        raise ValueError(f"accepted[{row}] is {accepted[row]}, out of range for {num_new[row]} new tokens")
    return accepted.astype(np.int64)
