"""What a score becomes and which keys a query sees: written once, compiled for each target.

Scores are kept in base 2, so that one `exp2` makes a weight: ``weight = 2 ** (score - max)``. The order is: scale, soft
cap, bias, mask (design of Gemma 2's soft cap, arXiv:2408.00118, and of ALiBi, arXiv:2108.12409).

Plain Python: `numba.njit` and `numba.cuda.jit(device=True)` both take these functions as they are.
"""

import numpy as np

LOG2E = 1.4426950408889634
"""Natural to base-2 logarithm."""

LN2 = 0.6931471805599453
"""Base-2 to natural logarithm."""


def score_factors(scale, k_scale, soft_cap):
    """The two numbers that every score is multiplied with, before and after the cap.

    Parameters
    ----------
    scale, k_scale : float
        The softmax scale, and the scale of the stored keys.
    soft_cap : float or None
        The soft cap.

    Returns
    -------
    (numpy.float32, numpy.float32)
        ``(inner, outer)`` for the function of `make_score`.
    """
    if soft_cap is None:
        return np.float32(scale * k_scale * LOG2E), np.float32(1.0)
    return np.float32(scale * k_scale / soft_cap), np.float32(soft_cap * LOG2E)


def make_score(has_cap, has_bias, tanh):
    """The function that turns a dot product into a score in base 2; features that are off cost nothing.

    Parameters
    ----------
    has_cap, has_bias : bool
        Which features the function has; the others' branches are pruned at compile time.
    tanh : callable
        The target's hyperbolic tangent of a float32.

    Returns
    -------
    callable
        ``score(dot, inner, outer, slope, distance)``, all float32, where `slope` is already in base 2 and `distance`
        is the key's position less the query's.
    """

    def score(dot, inner, outer, slope, distance):
        if has_cap:
            dot = tanh(dot * inner) * outer
        else:
            dot = dot * inner
        if has_bias:
            dot = dot + slope * distance
        return dot

    return score


def visible_start(position, window):
    """The first key position that the query at `position` sees.

    Parameters
    ----------
    position : int
        The query's position; may be negative in a row with fewer keys than queries.
    window : int
        Visible keys, the query's own included; `NO_WINDOW` for all.

    Returns
    -------
    int
    """
    return max(0, position + 1 - window)


def visible_stop(position, length, causal):
    """One past the last key position that the query at `position` sees.

    Parameters
    ----------
    position : int
        The query's position; negative where it sees nothing.
    length : int
        Tokens in the cache.
    causal : bool
        Whether later keys are hidden.

    Returns
    -------
    int
    """
    if causal:
        return max(0, min(length, position + 1))
    return length
