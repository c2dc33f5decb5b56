"""How the parts of one softmax are put together: written once, compiled for each target.

A partial is (out, lse): the attention over some of the keys, and the natural logarithm of the sum of its exponentials.
Partials over disjoint keys merge exactly: each weighs ``exp(lse - max)``, so nothing overflows, and one without keys
(lse -inf) weighs nothing (online softmax, arXiv:1805.02867; over splits, arXiv:2205.14135).

Plain Python: `numba.njit` and `numba.cuda.jit(device=True)` both take these functions as they are.
"""

import numpy as np

NEG_INF = np.float32(-np.inf)
"""A score that is masked, and the lse of a row that sees no key: a true infinity, not a large number."""

_ZERO = np.float32(0.0)


def anchor(maximum):
    """What to subtract before exponentiating: the maximum, or 0 while no key was visible.

    Parameters
    ----------
    maximum : float32
        A running maximum; -inf as long as everything was masked.

    Returns
    -------
    float32
        Finite, so that a masked score less the anchor is -inf (weight 0) and never (-inf) - (-inf) = NaN.
    """
    return _ZERO if maximum == NEG_INF else maximum


def make_add_sink(exp, log):
    """The function that adds a sink, an extra logit in the denominator, to a finished row.

    Parameters
    ----------
    exp, log : callable
        The target's natural exponential and logarithm of a float32.

    Returns
    -------
    callable
        ``add_sink(lse, sink) -> (lse, factor)``: the new lse, and what the row's out is multiplied with. A row that
        saw no key stays as it is.
    """

    def add_sink(lse, sink):
        if lse == NEG_INF:
            return lse, _ZERO
        top = max(lse, sink)
        total = top + log(exp(lse - top) + exp(sink - top))
        return total, exp(lse - total)

    return add_sink
