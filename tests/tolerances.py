"""How far a right result may be from the oracle: derived once here, used by every test, loosened by none.

Inputs are exact: the oracle reads the same stored numbers. What remains is the rounding of the library's own float32
arithmetic, u = 2**-24 an operation, and one rounding of `out` to the dtype of q.

A sum of n rounded terms is off by at most ``rounding(n) * sum(|terms|)``, ``rounding(n) = u * min(n, 4 * sqrt(n))``:
n for any order of summation, 4·sqrt(n) because rounding errors of changing sign add like a random walk, and four
standard deviations are missed once in 3000 sums even if every error had its largest size (Higham and Mary, "A new
approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019).

==============  =====================================================================================================
score           rounding(head_dim) · size, size = scale·sum|q·k| + |bias|, independent from key to key; and OPERATIONS
                roundings of a number no larger than it (scale, k_scale, log2 e, bias, subtracted maximum)
soft cap        its slope is at most 1, so the score's error passes; tanh adds OPERATIONS · u · cap
weight p        relative: the error of its score, and OPERATIONS · u for exp2 (at most 2 units in the last place) and
                for the rescaling of earlier tiles and splits
out             a weight's error moves the numerator and the normaliser: e times sum p·(v - out). Independent errors e
                give 4 · e · sqrt(sum (p·(|v| + |out|))²), others 2 · e · sum p·|v|, which also bounds the former
sum of p·v      (rounding(n) + OPERATIONS · u) · sum p·|v| for the n visible keys, v_scale and the merge
weights held    tensor cores take p in 16 bits, w = half a unit in the last place of that format (0 for float32), an
in 16 bits      independent error of each weight
rounding to q   half a unit in the last place of q's dtype at |out|
lse             the score's error, rounding(n) + OPERATIONS · u for the sum and the logarithm, 2 · u · |lse|
==============  =====================================================================================================

In numbers, for head_dim 128, 1000 keys and standard normal q, k, v: out ± 2.5e-5 in float32. A key too many is off by
4e-2 there, scores or partials in bfloat16 by 7e-4 (`test_reference.py` holds the tolerances against such faults).
"""

import ml_dtypes
import numpy as np

UNIT = 2.0**-24
DEVIATIONS = 4.0
OPERATIONS = 8.0


def rounding(n):
    """Relative error of a float32 sum of n terms."""
    n = np.asarray(n, np.float64)
    return UNIT * np.minimum(n, DEVIATIONS * np.sqrt(n))


def half_unit_in_last_place(x, dtype):
    """Half the distance between numbers of `dtype` at |x|."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**info.minexp)))
    return 0.5 * 2.0 ** (exponent - info.nmant)


def tensor_weight_rounding(q_dtype, kv_dtype):
    """The w of the module where queries and pool of these formats may meet on tensor cores (0: they never do)."""
    operand = "bfloat16" if kv_dtype == "bfloat16" else "float16"
    if kv_dtype in ("float32", "int8") or q_dtype not in (operand, "bfloat16"):
        return 0.0
    return 2.0**-9 if operand == "bfloat16" else 2.0**-12


def score_errors(expected, head_dim, soft_cap=None):
    """Absolute errors of a row's largest score, independent and common to its keys; each [num_tokens, num_q_heads]."""
    common = OPERATIONS * UNIT * (expected.score_size + (soft_cap or 0.0))
    return rounding(head_dim) * expected.score_size, common


def out_tolerance(expected, q_dtype, head_dim, soft_cap=None, weight_rounding=0.0):
    """Absolute tolerance of every element of `out`."""
    independent, common = (e[..., None] for e in score_errors(expected, head_dim, soft_cap))
    summed = rounding(expected.visible)[:, None, None] + OPERATIONS * UNIT
    error = np.minimum(DEVIATIONS * independent * expected.value_norm, 2 * independent * expected.value_size)
    error = error + (2 * (common + OPERATIONS * UNIT) + summed) * expected.value_size
    error = error + DEVIATIONS * weight_rounding * expected.value_norm
    return error + half_unit_in_last_place(np.abs(expected.out) + error, q_dtype)


def lse_tolerance(expected, head_dim, soft_cap=None):
    """Absolute tolerance of every element of `lse`."""
    summed = rounding(expected.visible)[:, None] + OPERATIONS * UNIT
    size = np.where(np.isfinite(expected.lse), np.abs(expected.lse), 0.0)
    return sum(score_errors(expected, head_dim, soft_cap)) + summed + 2 * UNIT * size


def assert_within(got, want, tolerance, name):
    """Every element of `got` within its tolerance of `want`; infinities must agree, NaN never passes."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, f"{name} has shape {got.shape}, the oracle {want.shape}"
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=name)
    error = np.abs(got - np.where(infinite, 0.0, want))
    wrong = ~infinite & ~(error <= tolerance)
    if wrong.any():
        at = np.unravel_index(np.argmax(np.where(wrong, error / tolerance, 0.0)), wrong.shape)
        worst = f"{name}{[int(i) for i in at]} is {got[at]:.9g}, should be {want[at]:.9g} ± {tolerance[at]:.2g}"
        raise AssertionError(f"{worst}; {wrong.sum()} of {wrong.size} elements are off")


def assert_attention(out, lse, expected, q_dtype, head_dim, soft_cap=None, weight_rounding=0.0):
    """Both results of an attention call agree with the oracle."""
    assert_within(out, expected.out, out_tolerance(expected, q_dtype, head_dim, soft_cap, weight_rounding), "out")
    assert_within(lse, expected.lse, lse_tolerance(expected, head_dim, soft_cap), "lse")


def assert_merged(out, lse, expected, outs, lses):
    """A merge agrees with the oracle's: relative errors 2 · u · |lse| + OPERATIONS · u of a weight, and the sums."""
    want_out, want_lse = expected
    outs, lses = np.asarray(outs).astype(np.float64), np.asarray(lses, np.float64)
    present = np.isfinite(lses)
    weights = np.where(present, np.exp(lses - np.where(np.isfinite(want_lse), want_lse, 0.0)), 0.0)
    weight = (2 * np.where(present, np.abs(lses), 0.0) + OPERATIONS) * UNIT
    summed = rounding(len(outs)) + OPERATIONS * UNIT
    size = (weights * (2 * weight + summed))[..., None] * np.where(weights[..., None] > 0, np.abs(outs), 0.0)
    error = size.sum(axis=0)
    assert_within(out, want_out, error + half_unit_in_last_place(np.abs(want_out) + error, out.dtype), "out")
    assert_within(lse, want_lse, weight.max(axis=0) + summed, "lse")
