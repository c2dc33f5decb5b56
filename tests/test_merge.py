"""merge: parts of one attention put together, against the oracle."""

import numpy as np
import pytest

import numba_paged as npg
import reference
import tolerances
from inputs import DTYPES, Q_DTYPES, Shape, decode_problem, normal


def parts(num_parts, dtype, seed=0, spread=5.0, num_tokens=6, heads=3, head_dim=20):
    """Random partials: (outs, lses)."""
    rng = np.random.default_rng(seed)
    outs = normal((num_parts, num_tokens, heads, head_dim), dtype, rng)
    return outs, (spread * rng.standard_normal((num_parts, num_tokens, heads))).astype(np.float32)


def check(backend, outs, lses):
    """Merge and compare; returns (out, lse) on the host."""
    out, lse = map(backend.asnumpy, npg.merge(backend.asarray(outs), backend.asarray(lses)))
    assert out.dtype == outs.dtype and lse.dtype == np.float32
    tolerances.assert_merged(out, lse, reference.merge(outs, lses), outs, lses)
    return out, lse


@pytest.mark.parametrize("dtype", Q_DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 33])
@pytest.mark.parametrize("spread", [0.0, 5.0, 200.0])
def test_merge(backend, num_parts, dtype, spread):
    check(backend, *parts(num_parts, dtype, spread=spread))


@pytest.mark.parametrize("head_dim", [1, 2, 64, 100, 256])
def test_head_dims(backend, head_dim):
    check(backend, *parts(4, "float32", head_dim=head_dim))


def test_one_part_is_itself(backend):
    outs, lses = parts(1, "float32")
    out, lse = check(backend, outs, lses)
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])


@pytest.mark.parametrize("rubbish", [0.0, np.nan, np.inf])
def test_empty_parts_weigh_nothing(backend, rubbish):
    outs, lses = parts(3, "float16")
    lses[1, 2:] = -np.inf
    outs[1, 2:] = rubbish
    lses[:, 4] = -np.inf
    outs[:, 4] = rubbish
    out, lse = check(backend, outs, lses)
    assert (out[4] == 0).all() and (lse[4] == -np.inf).all()


def test_log_sum_exp_far_from_zero(backend):
    outs, lses = parts(3, "float32")
    for offset in (-5000.0, 5000.0):
        check(backend, outs, lses + np.float32(offset))


def test_base_e(backend):
    """Two equal parts add log(2), natural."""
    outs, lses = np.zeros((2, 1, 1, 4), np.float32), np.zeros((2, 1, 1), np.float32)
    assert check(backend, outs, lses)[1] == pytest.approx(0.6931472)


def test_no_token(backend):
    out, lse = check(backend, np.zeros((2, 0, 4, 8), np.float32), np.zeros((2, 0, 4), np.float32))
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)


def test_views(backend):
    """Parts stacked on another axis, heads sliced."""
    outs, lses = parts(4, "float32", heads=8)
    there_outs = backend.asarray(outs.swapaxes(0, 1).copy()).swapaxes(0, 1)[:, :, 2:5]
    there_lses = backend.asarray(lses.swapaxes(0, 2).copy()).swapaxes(0, 2)[:, :, 2:5]
    outs, lses = outs[:, :, 2:5], lses[:, :, 2:5]
    got = map(backend.asnumpy, npg.merge(there_outs, there_lses))
    tolerances.assert_merged(*got, reference.merge(outs, lses), outs, lses)


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_attention_over_disjoint_blocks_merges_to_the_whole(backend, q_dtype):
    shape = Shape(q_dtype=q_dtype)
    whole = decode_problem(shape, [160, 100])
    prefix = whole.replace(lengths=np.int32([64, 64]))
    suffix = whole.replace(lengths=whole.lengths - 64, block_tables=whole.block_tables[:, 4:].copy())
    outs, lses = (np.stack(x) for x in zip(prefix.check(backend), suffix.check(backend), strict=True))
    out, lse = check(backend, outs, lses)
    want = whole.expected()
    step = tolerances.half_unit_in_last_place(1.0, DTYPES[q_dtype])  # the parts were rounded, too
    np.testing.assert_allclose(out.astype(np.float64), want.out, atol=4 * step)
    np.testing.assert_allclose(lse, want.lse, atol=1e-5)
