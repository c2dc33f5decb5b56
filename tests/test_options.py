"""Every option and their crosses against the oracle; each is shown to change the result."""

import numpy as np
import pytest

from covering import pairwise
from inputs import Shape, decode_problem, prefill_problem

SHAPE = Shape(num_q_heads=6, num_kv_heads=2, head_dim=32, block_size=8)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625, 0.0, -0.1], np.float32)
SINKS = np.array([0.0, 2.0, -1.0, 30.0, -30.0, 4.0], np.float32)
LENGTHS = [90, 0, 8, 33, 1]
SINGLE = {
    "scale": 0.7,
    "soft_cap": 1.5,
    "window": 7,
    "alibi_slopes": SLOPES,
    "sinks": SINKS,
    "k_scale": 0.25,
    "v_scale": 0.5,
}


def make(kind, shape=SHAPE):
    """A decode or a prefill problem with ragged lengths."""
    if kind == "decode":
        return decode_problem(shape, LENGTHS)
    return prefill_problem(shape, LENGTHS, [12, 0, 8, 5, 1])


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("name", SINGLE)
def test_each_option_is_honoured(backend, kind, name):
    problem = make(kind)
    plain = problem.check(backend)
    got = problem.check(backend, **{name: SINGLE[name]})
    assert np.abs(got.out - plain.out).max() > 0.01
    seen = np.isfinite(plain.lse)
    assert (np.abs(got.lse[seen] - plain.lse[seen]).max() > 0.01) == (name != "v_scale")


def test_non_causal_is_honoured(backend):
    problem = make("prefill")
    assert np.abs(problem.check(backend, causal=False).out - problem.check(backend).out).max() > 0.01


FEATURES = {
    "soft_cap": [None, 1.5, 30.0],
    "window": [None, 1, 8, 13, 1000],
    "alibi_slopes": [None, SLOPES],
    "sinks": [None, SINKS],
    "scale": [None, 0.4, -0.2],
    "split_size": [None, 16, 24],
    "causal": [True, False],
    "kind": ["decode", "prefill"],
}


def label(row):
    """The options that are on."""
    return "-".join(n if isinstance(v, np.ndarray) else f"{v}" for n, v in row.items() if v is not None)


def check_cross(backend, row):
    """Attend with the row's options and pool format."""
    row = dict(row)
    kind, kv_dtype, causal = row.pop("kind"), row.pop("kv_dtype"), row.pop("causal")
    options = {name: value for name, value in row.items() if value is not None}
    if kind == "prefill":
        options["causal"] = causal
    if kv_dtype == "float8_e5m2":
        options.update(k_scale=0.5, v_scale=3.0)
    make(kind, Shape(6, 2, 32, 8, "float16", kv_dtype)).check(backend, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", pairwise(kv_dtype=["float32", "int8", "float8_e5m2"], **FEATURES), ids=label)
def test_options_cross(backend, row):
    check_cross(backend, row)


@pytest.mark.long  # each pool format with each set of features is a kernel to compile
@pytest.mark.parametrize("row", pairwise(kv_dtype=["float16", "bfloat16"], **FEATURES), ids=label)
def test_options_cross_16_bit_pools(backend, row):
    check_cross(backend, row)


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 24, 89, 90, 91, 10**9, 2**70])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_windows(backend, window, kind):
    make(kind).check(backend, window=window)
    make(kind).check(backend, window=window, split_size=16)


def test_a_split_longer_than_any_sequence(backend):
    make("prefill").check(backend, split_size=2**70)


def test_window_of_one_is_the_own_value(backend):
    problem = decode_problem(SHAPE, [90, 8, 1])
    got = problem.check(backend, window=1)
    for row, length in enumerate(problem.lengths):
        last = problem.values[problem.block_tables[row, (length - 1) // 8], (length - 1) % 8]
        np.testing.assert_array_equal(got.out[row], np.repeat(last, 3, axis=0))


@pytest.mark.parametrize("window", [1, 9, 100])
def test_window_bounds_only_the_past_where_not_causal(backend, window):
    """Query i sees every key after i - window, the later ones too."""
    make("prefill").check(backend, window=window, causal=False)


def test_sinks_are_added_once_after_all_splits(backend):
    problem = decode_problem(SHAPE, [800])
    whole = problem.check(backend, sinks=SINKS, split_size=800)
    split = problem.check(backend, sinks=SINKS, split_size=40)
    np.testing.assert_allclose(split.lse, whole.lse, atol=1e-5)


def test_a_sink_that_says_nothing(backend):
    problem = make("decode")
    silent = problem.check(backend, sinks=np.full(6, -np.inf, np.float32))
    np.testing.assert_allclose(silent.out, problem.attend(backend).out, atol=1e-6)


def test_large_scores_do_not_overflow(backend):
    problem = make("prefill")
    problem.check(backend, scale=300.0)
    problem.check(backend, scale=300.0, soft_cap=20.0)


def test_scale_of_zero_is_the_mean(backend):
    problem = decode_problem(SHAPE, [21])
    got = problem.check(backend, scale=0.0)
    np.testing.assert_allclose(got.lse, np.log(21), rtol=1e-6)


def test_scales_multiply_what_is_stored(backend):
    """k_scale and v_scale give what dequantised pools of float32 give without them."""
    problem = make("prefill", Shape(6, 2, 32, 8, "float32", "float8_e4m3fn"))
    got = problem.check(backend, k_scale=0.125, v_scale=4.0)
    keys, values = (problem.keys.astype(np.float32) * 0.125, problem.values.astype(np.float32) * 4.0)
    plain = problem.replace(keys=keys, values=values, shape=Shape(6, 2, 32, 8)).check(backend)
    np.testing.assert_allclose(got.out, plain.out, atol=1e-5)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_split_size_is_rounded_up_to_blocks(backend, kind):
    problem = make(kind)
    got, rounded = problem.check(backend, split_size=9), problem.check(backend, split_size=16)
    assert got.out.tobytes() == rounded.out.tobytes() and got.lse.tobytes() == rounded.lse.tobytes()


def test_options_take_numpy_numbers(backend):
    problem = make("decode")
    problem.check(backend, scale=np.float64(0.5), soft_cap=np.float32(2.0), window=np.int32(5), split_size=np.int64(8))
