"""Inputs that broke other kernels, sections F to H: shapes, layouts, options, padded steps. See `test_cases.py`."""

import numpy as np
import pytest

import numba_paged as npg
import reference
import tolerances
from inputs import Shape, decode_problem, normal, place, prefill_problem, sequences

KINDS = ("decode", "prefill")


def make(kind, shape, lengths, num_queries=4, **placement):
    """A decode problem, or a prefill with up to `num_queries` queries a sequence."""
    if kind == "decode":
        return decode_problem(shape, lengths, **placement)
    return prefill_problem(shape, lengths, np.minimum(lengths, num_queries), **placement)


@pytest.mark.parametrize("head_dim", [1, 7, 32, 80, 96, 100, 112, 120, 144, 192, 250, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_case_38_head_dims(backend, kind, head_dim):
    """No silent use of the first 64 or 128 lanes (vllm-project/vllm#302)."""
    problem = make(kind, Shape(4, 2, head_dim, 16, "float16", "float16"), [37, 5])
    problem.check(backend)
    if head_dim > 1:  # the last lane counts in the scores, and is written
        keys = problem.keys.copy()
        keys[..., :-1] = 0
        got = problem.replace(keys=keys).check(backend)
        assert (got.out[..., -1] != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_case_38_past_256_is_refused(backend, kind):
    """The error names the bound."""
    with pytest.raises(ValueError, match="head_dim.*256.*257"):
        make(kind, Shape(head_dim=257), [5]).attend(backend)


@pytest.mark.parametrize("heads", [(28, 4), (48, 8), (96, 8), (5, 1), (6, 1), (7, 1), (12, 1), (96, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_case_39_groups_that_are_no_power_of_two(backend, kind, heads):
    """As if the kv heads were repeated (sgl-project/sglang#23135)."""
    problem = make(kind, Shape(*heads, 64, 16, "float16", "float16"), [50, 17])
    got = problem.check(backend)
    group = heads[0] // heads[1]
    repeated = {"keys": np.repeat(problem.keys, group, axis=2), "values": np.repeat(problem.values, group, axis=2)}
    many = problem.replace(shape=Shape(heads[0], heads[0], 64, 16, "float16", "float16"), **repeated).check(backend)
    np.testing.assert_allclose(many.lse, got.lse, atol=1e-5)


@pytest.mark.parametrize("heads", [(33, 2), (3, 2), (2, 4), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_case_40_heads_that_do_not_divide(backend, kind, heads):
    """Refused by name before anything runs (fla-org/flash-linear-attention#1029)."""
    problem = make(kind, Shape(heads[1], heads[1]), [5])
    q = np.zeros((len(problem.q), heads[0], 64), np.float32)
    with pytest.raises(ValueError, match=rf"num_q_heads.*num_kv_heads.*{heads[0]}.*{heads[1]}"):
        problem.replace(q=q).attend(backend)


@pytest.mark.parametrize("kind", KINDS)
def test_case_41_block_sizes(backend, kind):
    """The same sequences in blocks of any size (sgl-project/sglang-jax#1075)."""
    rows = sequences(Shape(), [1000, 16, 545, 1], [9, 9, 9, 1] if kind == "prefill" else 1)
    outs = []
    for block_size in (1, 3, 16, 17, 32, 64, 256, 544, 784):
        outs.append(place(Shape(block_size=block_size), rows, decode=kind == "decode").check(backend).out)
    np.testing.assert_allclose(np.stack(outs), np.broadcast_to(outs[0], (9, *outs[0].shape)), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
def test_case_43_query_is_a_view_of_a_fused_projection(backend, kind, q_dtype):
    """q = qkv[:, :num_q_heads * head_dim] gives what its copy gives (flashinfer-ai/flashinfer#311)."""
    problem = make(kind, Shape(q_dtype=q_dtype), [37, 5, 0])
    want = problem.check(backend)
    qkv = np.full((len(problem.q), (4 + 2 + 2) * 64), np.nan, np.float32).astype(problem.q.dtype)
    qkv[:, : 4 * 64] = problem.q.reshape(len(problem.q), -1)
    view = backend.asarray(qkv)[:, : 4 * 64].reshape(-1, 4, 64)
    heads_first = backend.asarray(problem.q.swapaxes(0, 1).copy()).swapaxes(0, 1)
    function = npg.decode if kind == "decode" else npg.prefill
    for q in (view, heads_first):
        out = function(q, *map(backend.asarray, problem.arguments()[1:]))
        assert backend.asnumpy(out).tobytes() == want.out.tobytes()


@pytest.mark.parametrize("num_queries, num_keys", [(2, 3), (1, 5), (3, 3), (16, 17), (7, 40)])
def test_case_44_causal_where_queries_are_the_last_positions(backend, num_queries, num_keys):
    """2 queries, 3 keys: row 0 sees keys 0 and 1, row 1 all (gittensor-ai-lab/sparkinfer#4)."""
    problem = prefill_problem(Shape(2, 2, 64, 4), [num_keys], [num_queries])
    one_hot = np.zeros_like(problem.values)
    position = np.arange(num_keys)
    one_hot[problem.block_tables[0, position // 4], position % 4, :, position] = 1.0
    weights = problem.replace(values=one_hot).check(backend).out
    seen = np.arange(64) <= np.arange(num_keys - num_queries, num_keys)[:, None]
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(seen[:, None], weights.shape))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length, window", [(10, 3), (10, 1), (17, 16), (17, 17), (60, 33)])
def test_case_45_window_counts_the_own_key(backend, kind, length, window):
    """Window 3 at length 10 sees 7, 8, 9 (lightseekorg/tokenspeed#578)."""
    problem = make(kind, Shape(2, 2, 64, 4), [length], 2)
    one_hot = np.zeros_like(problem.values)
    position = np.arange(length)
    one_hot[problem.block_tables[0, position // 4], position % 4, :, position] = 1.0
    weights = problem.replace(values=one_hot).check(backend, window=window).out
    for row, last in zip(weights, range(length - len(weights), length), strict=True):
        for head in row:
            assert np.flatnonzero(head).tolist() == list(range(max(0, last - window + 1), last + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_case_47_no_option_is_ignored(backend, kind):
    """Soft caps and windows bound per call change the result, in any order of calls (sgl-project/sglang#33915)."""
    problem = make(kind, Shape(), [60, 30])
    settings = [{}, {"soft_cap": 0.5}, {"soft_cap": 5.0}, {}, {"window": 8}, {"window": 9}, {"soft_cap": 0.5}]
    outs = [problem.check(backend, **options).out for options in settings]
    assert outs[0].tobytes() == outs[3].tobytes() and outs[1].tobytes() == outs[6].tobytes()
    distinct = [outs[i] for i in (0, 1, 2, 4, 5)]
    assert all(np.abs(a - b).max() > 1e-3 for i, a in enumerate(distinct) for b in distinct[:i])


@pytest.mark.parametrize("kind", KINDS)
def test_case_47_unknown_option_raises(backend, kind):
    """A misspelt option is no option."""
    with pytest.raises(TypeError, match="softcap"):
        make(kind, Shape(), [5]).attend(backend, softcap=5.0)


@pytest.mark.parametrize("kind", KINDS)
def test_case_48_cap_before_mask(backend, kind):
    """A capped mask would let a hidden key in: cap 5, raw scores of 100 (flashinfer-ai/flashinfer#350)."""
    problem = make(kind, Shape(2, 2, 64, 4), [10], 2)
    position = np.arange(10)
    keys, values = np.zeros_like(problem.keys), np.zeros_like(problem.values)
    keys[...] = problem.q.dtype.type(100 / 8)
    values[problem.block_tables[0, position // 4], position % 4, :, position] = 1.0
    options = {"window": 4, "soft_cap": 5.0, "alibi_slopes": np.float32([0.5, 1.0])}
    got = problem.replace(q=np.ones_like(problem.q), keys=keys, values=values).check(backend, **options)
    last = got.out[-1]
    assert (last[:, :6] == 0).all() and (last[:, 10:] == 0).all() and (last[:, 6:10] > 0).all()
    np.testing.assert_allclose(last[0, 9] / last[0, 8], np.exp(0.5), rtol=1e-5)  # the bias is not capped


@pytest.mark.parametrize("kind", KINDS)
def test_case_49_slopes_of_a_rank(backend, kind):
    """Heads 8 to 15 of 16 on this rank: the slopes are the caller's, bias slope · (j - i) (vllm-project/vllm#945)."""
    slopes = (2.0 ** -(np.arange(1, 17) / 2)).astype(np.float32)
    rows = sequences(Shape(16, 16, 32), [40, 7], [3, 3] if kind == "prefill" else 1)
    whole = place(Shape(16, 16, 32), rows, decode=kind == "decode")
    want = whole.check(backend, alibi_slopes=slopes)
    half = {"keys": whole.keys[:, :, 8:].copy(), "values": whole.values[:, :, 8:].copy()}
    rank = whole.replace(shape=Shape(8, 8, 32), q=whole.q[:, 8:].copy(), **half)
    got = rank.check(backend, alibi_slopes=slopes[8:].copy())
    np.testing.assert_allclose(got.out, want.out[:, 8:], atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "float16"])
@pytest.mark.parametrize("path", ["decode", "prefill", "chunk after a prefix", "splits"])
def test_case_51_scales_on_every_path(backend, path, kv_dtype):
    """k_scale 0.25, v_scale 0.5, applied once each (flashinfer-ai/flashinfer#1023)."""
    shape = Shape(q_dtype="bfloat16", kv_dtype=kv_dtype)
    num_queries = {"prefill": 90, "chunk after a prefix": 30}.get(path)
    problem = decode_problem(shape, [90]) if num_queries is None else prefill_problem(shape, [90], num_queries)
    if kv_dtype == "int8":
        problem = problem.replace(keys=problem.keys // 16, values=problem.values // 16)
    options = {"k_scale": 0.25, "v_scale": 0.5, **({"split_size": 32} if path == "splits" else {})}
    got = problem.check(backend, **options)
    dequantised = {"keys": problem.keys.astype(np.float32) * 0.25, "values": problem.values.astype(np.float32) * 0.5}
    plain = problem.replace(shape=Shape(q_dtype="bfloat16"), scales={}, **dequantised).check(backend)
    np.testing.assert_allclose(got.lse, plain.lse, atol=1e-4)


def test_case_54_padding_rows_of_a_fixed_batch(backend):
    """8 rows, 5 real: the others have length 0, slot -1 and old tables (sgl-project/sglang#1469)."""
    shape = Shape()
    rows = sequences(shape, [33, 1, 16, 100, 7])
    eager = place(shape, rows)
    want = eager.check(backend, split_size=64)
    tables = np.concatenate([eager.block_tables, np.zeros((3, eager.block_tables.shape[1]), np.int32)])
    q = np.concatenate([eager.q, np.full((3, 4, 64), np.nan, np.float32)])
    lengths = np.concatenate([eager.lengths, np.zeros(3, np.int32)])
    padded = eager.replace(q=q, block_tables=tables, lengths=lengths)
    got = padded.attend(backend, split_size=64)
    assert got.out[:5].tobytes() == want.out.tobytes() and (got.out[5:] == 0).all()
    keys, values = backend.asarray(eager.keys.copy()), backend.asarray(eager.values.copy())
    slots = np.full(8, -1)
    slots[:5] = [t[(n - 1) // 16] * 16 + (n - 1) % 16 for t, n in zip(eager.block_tables, eager.lengths, strict=True)]
    k = normal((8, 2, 64), "float32", np.random.default_rng(0))
    npg.append(*map(backend.asarray, (k, k)), keys, values, backend.asarray(slots))
    np.testing.assert_array_equal(backend.asnumpy(keys), reference.append(k, eager.keys, slots))
    tolerances.assert_within(backend.asnumpy(values)[slots[:5] // 16, slots[:5] % 16], k[:5].astype(float), 0, "values")
