"""The oracle against the definition written out, and the tolerances against faults that they must catch."""

import math

import ml_dtypes
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

import reference
import tolerances
from inputs import DTYPES, Shape, decode_problem, normal, prefill_problem

OPTIONS = [
    {},
    {"scale": 0.3},
    {"soft_cap": 2.0},
    {"window": 3},
    {"causal": False},
    {"causal": False, "window": 2},
    {"alibi_slopes": np.array([0.5, 0.1, 0.0, -0.3])},
    {"sinks": np.array([0.0, 3.0, -2.0, 50.0])},
    {"soft_cap": 1.0, "window": 4, "alibi_slopes": np.full(4, 0.25), "sinks": np.ones(4), "scale": 1.0},
]


def by_hand(q, k, v, i, head, *, scale=None, soft_cap=None, window=None, alibi_slopes=None, sinks=None, causal=True):
    """One row of attention, one number at a time: (out, lse)."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    kv_head = head // (q.shape[1] // k.shape[1])
    position = len(k) - len(q) + i
    scores, seen = [], []
    for j in range(len(k)):
        if (causal and j > position) or (window is not None and j <= position - window):
            continue
        score = scale * math.fsum(float(a) * float(b) for a, b in zip(q[i, head], k[j, kv_head], strict=True))
        score = score if soft_cap is None else soft_cap * math.tanh(score / soft_cap)
        scores.append(score + (0.0 if alibi_slopes is None else alibi_slopes[head] * (j - position)))
        seen.append(v[j, kv_head].astype(float))
    if not scores:
        return np.zeros(q.shape[2]), -np.inf
    logits = scores if sinks is None else [*scores, sinks[head]]
    return softmax(logits)[: len(seen)] @ np.array(seen), logsumexp(logits)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("num_queries, num_keys", [(1, 6), (3, 6), (6, 6), (5, 2), (2, 0), (0, 4)])
def test_oracle_is_the_definition(options, num_queries, num_keys):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((num_queries, 4, 3))
    k, v = rng.standard_normal((2, num_keys, 2, 3))
    out, lse = reference.attention(q, k, v, **options)
    for i in range(num_queries):
        for head in range(4):
            want_out, want_lse = by_hand(q, k, v, i, head, **options)
            np.testing.assert_allclose(out[i, head], want_out, rtol=1e-13, atol=1e-14)
            np.testing.assert_allclose(lse[i, head], want_lse, rtol=1e-13, atol=1e-14)


def test_oracle_gathers_through_the_tables():
    shape = Shape(num_q_heads=2, num_kv_heads=1, head_dim=4, block_size=4)
    problem = prefill_problem(shape, lengths=[9, 0, 4], num_queries=[2, 0, 3])
    got = problem.expected()
    pieces = []
    for row in (0, 2):
        length, table = problem.lengths[row], problem.block_tables[row]
        k, v = (
            np.array([pool[table[j // 4], j % 4] for j in range(length)]) for pool in (problem.keys, problem.values)
        )
        start, stop = problem.query_starts[row : row + 2]
        pieces.append(reference.attention(problem.q[start:stop], k, v)[0])
    np.testing.assert_array_equal(got.out, np.concatenate(pieces))


def test_merge_of_parts_is_the_whole():
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 10, 2, 4))
    parts = [reference.attention(q, k[a:b], v[a:b], causal=False) for a, b in [(0, 3), (3, 3), (3, 10)]]
    whole = reference.attention(q, k, v, causal=False)
    for got, want in zip(reference.merge(*zip(*parts, strict=True)), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_quantise_rounds_to_the_nearest_even(name):
    dtype = DTYPES[name]
    width = np.uint8 if dtype.itemsize == 1 else np.uint16
    every = np.arange(2 ** (8 * dtype.itemsize)).astype(width).view(dtype)
    grid = np.unique(every[np.isfinite(every.astype(np.float32))].astype(np.float64))
    rng = np.random.default_rng(3)
    halfway = (grid[1:] + grid[:-1])[:: len(grid) // 200] / 2
    x = np.concatenate([rng.standard_normal(500) * 10.0 ** rng.integers(-3, 6, 500), halfway]).astype(np.float32)
    got = reference.quantise(x, 1.0, dtype).astype(np.float64)
    upper = np.clip(np.searchsorted(grid, x.astype(np.float64)), 1, len(grid) - 1)
    below, above = grid[upper - 1], grid[upper]
    nearest = np.where(x - below < above - x, below, above)
    tie = (x.astype(np.float64) - below) == (above - x.astype(np.float64))
    even = np.where(below.astype(dtype).view(width) % 2 == 0, below, above)
    np.testing.assert_array_equal(got, np.where(tie, even, nearest))
    assert tie.sum() > 50


def test_quantise_saturates_and_keeps_what_it_may():
    x = np.array([np.nan, np.inf, -np.inf, 1e6, -1e6, 0.5, 1.5, 2.5, -0.5], np.float32)
    np.testing.assert_array_equal(reference.quantise(x, 1.0, np.int8), [0, 127, -128, 127, -128, 0, 2, 2, 0])
    fp8 = reference.quantise(x, 1.0, ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(fp8, [np.nan, 448, -448, 448, -448, 0.5, 1.5, 2.5, -0.5])
    np.testing.assert_array_equal(reference.quantise(x, 1.0, np.float32), x)
    np.testing.assert_array_equal(reference.quantise(np.float32([1, 7]), 4.0, np.int8), [0, 2])


def in_float32(problem, fault=None, num_splits=3, **options):
    """Decode in plain float32 NumPy, in splits that merge; `fault` breaks one thing."""
    half = ml_dtypes.bfloat16
    outs, lses = [], []
    for row, length in enumerate(problem.lengths):
        seen = length - 1 if fault == "a key too few" else length
        k, v = (reference.gather(p, problem.block_tables[row], seen) for p in (problem.keys, problem.values))
        group = problem.shape.num_q_heads // problem.shape.num_kv_heads
        k, v = (np.repeat(x.astype(np.float32), group, axis=1) for x in (k, v))
        window = options.get("window")
        if window is not None:
            first = max(0, length - window - (fault == "a key too many"))
            k, v = k[first:], v[first:]
        scale = np.float32(1 if fault == "no scale" else problem.shape.head_dim**-0.5)
        s = np.einsum("hd,jhd->hj", problem.q[row].astype(np.float32), k) * scale
        s = s.astype(half).astype(np.float32) if fault == "scores in bfloat16" else s
        parts = []
        for at in np.array_split(np.arange(len(k)), num_splits):
            peak = s[:, at].max(axis=1)
            p = np.exp(s[:, at] - peak[:, None])
            out = np.einsum("hj,jhd->hd", p, v[at]) / p.sum(axis=1)[:, None]
            out = out.astype(half).astype(np.float32) if fault == "partials in bfloat16" else out
            parts.append((out, peak + np.log(p.sum(axis=1))))
        out, lse = reference.merge(*(np.stack(x) for x in zip(*parts, strict=True)))
        outs.append(out)
        lses.append(lse / np.log(2) if fault == "base 2" else lse)
    q_dtype = DTYPES[problem.shape.q_dtype]
    out = np.stack(outs).astype(np.float32)
    out = out.astype(half) if fault == "rounded twice" else out
    return out.astype(q_dtype), np.stack(lses).astype(np.float32)


FAULTS = ["no scale", "a key too few", "a key too many", "scores in bfloat16", "partials in bfloat16", "base 2"]


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
def test_tolerances_pass_float32_and_catch_faults(fault, q_dtype):
    shape = Shape(num_q_heads=4, num_kv_heads=2, head_dim=128, q_dtype=q_dtype)
    problem = decode_problem(shape, [1000, 300])
    options = {"window": 200}
    want = problem.expected(**options)
    got = in_float32(problem, fault, **options)
    if fault is None:
        tolerances.assert_attention(*got, want, DTYPES[q_dtype], 128)
    else:
        with pytest.raises(AssertionError, match="elements are off"):
            tolerances.assert_attention(*got, want, DTYPES[q_dtype], 128)


def test_tolerances_catch_a_second_rounding():
    problem = decode_problem(Shape(head_dim=128, q_dtype="float16"), [500])
    with pytest.raises(AssertionError, match="out"):
        tolerances.assert_attention(*in_float32(problem, "rounded twice"), problem.expected(), DTYPES["float16"], 128)


def test_tolerance_in_numbers():
    """What the docstring of `tolerances` says of standard normal inputs."""
    problem = decode_problem(Shape(head_dim=128), [1000])
    tolerance = tolerances.out_tolerance(problem.expected(), np.float32, 128)
    assert 2e-5 < tolerance.max() < 3e-5


def test_half_unit_in_last_place():
    for name in ("float32", "float16", "bfloat16"):
        x = np.abs(normal(200, name, np.random.default_rng(4)))
        want = np.spacing(x).astype(np.float64) / 2
        np.testing.assert_array_equal(tolerances.half_unit_in_last_place(x.astype(np.float64), DTYPES[name]), want)
