"""The tensor-core kernels: right results, what they cost, and when they are chosen.

The kernels' PTX runs on the CPU, checked for races and for reads of what nobody wrote; all that no sequence owns is NaN.
"""

import functools

import numpy as np
import ptxrun
import pytest

if ptxrun.missing():
    pytest.skip(ptxrun.missing(), allow_module_level=True)

import cubin  # noqa: E402
import numba_paged as npg  # noqa: E402
import tolerances  # noqa: E402
from compiled import cubin_of  # noqa: E402
from covering import pairwise  # noqa: E402
from inputs import Shape, decode_problem, prefill_problem  # noqa: E402
from numba_paged import plan  # noqa: E402
from numba_paged.cuda.backend import CudaBackend  # noqa: E402
from numba_paged.cuda.choose import choose, most_rows  # noqa: E402
from numba_paged.cuda.codecs import code_of  # noqa: E402
from numba_paged.cuda.warp import AttendSpec  # noqa: E402
from ptx_device import OnPtx, PtxDevice  # noqa: E402
from tensor_launch import attend, check  # noqa: E402

CCS = ((8, 0), (9, 0), (10, 0))
FORMATS = (("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float16"), ("float16", "float8_e4m3fn"),
           ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"), ("bfloat16", "float8_e5m2"))
OPTIONS = ("none", "window", "soft_cap", "alibi", "sinks", "scales", "all")

BUDGETS = {
    # PTX instructions of a warp for one more token, by group, head_dim and pool; counted between two lengths.
    "decode": {(4, 128, "float16"): 14, (8, 128, "bfloat16"): 14, (16, 128, "float16"): 24, (4, 64, "float16"): 10,
               (4, 128, "float8"): 18},
    # Of the instructions of the prefill loop that do not move memory, the share of the tensor cores.
    "prefill": 0.25,
    "bytes in flight": 32 << 10,
}


def option_values(name, num_heads):
    """Options of a call by the name of their set."""
    slopes = (2.0 ** -np.arange(1, num_heads + 1)).astype(np.float32)
    sinks = np.linspace(-2, 2, num_heads, dtype=np.float32)
    every = {"window": 37, "soft_cap": 5.0, "alibi_slopes": slopes, "sinks": sinks}
    sets = {"none": {}, "window": {"window": 20}, "soft_cap": {"soft_cap": 3.0}, "alibi": {"alibi_slopes": slopes},
            "sinks": {"sinks": sinks}, "scales": {"scale": -0.3, "k_scale": 0.5, "v_scale": 2.0}, "all": every}
    return sets[name]


def case_of(row, num_kv_heads=2):
    """(shape, cc, options) of a row of a matrix."""
    q_dtype, kv_dtype = row["formats"]
    cc = (9, 0) if kv_dtype == "float8_e4m3fn" and row["cc"] == (8, 0) else row["cc"]
    shape = Shape(row["group"] * num_kv_heads, num_kv_heads, row["head_dim"], row["block_size"], q_dtype, kv_dtype)
    return shape, cc, {**option_values(row["options"], shape.num_q_heads), "split_size": row["split_size"]}


def decode_case(row):
    shape, cc, options = case_of(row)
    lengths = [0, 1, row["block_size"], row["block_size"] + 1, 150]
    return check(decode_problem(shape, lengths, layout=row["layout"]), cc, **options)


def prefill_case(row, rows):
    """Items of up to `rows` query rows: a few are columns of a product, many are rows."""
    shape, cc, options = case_of(row, num_kv_heads=1)
    lengths, num_queries = [0, 1, 40, 70, 150], [0, 1, 9, 70 if rows == 64 else 5, 11]
    problem = prefill_problem(shape, lengths, num_queries, layout=row["layout"])
    return check(problem, cc, max(1, rows // row["group"]), causal=row["causal"], **options)


FEW = ({"cc": (8, 0), "formats": FORMATS[0], "group": 4, "head_dim": 128, "block_size": 16, "layout": "NHD",
        "options": "none", "split_size": None, "causal": True},
       {"cc": (10, 0), "formats": FORMATS[4], "group": 12, "head_dim": 80, "block_size": 24, "layout": "HND",
        "options": "all", "split_size": 64, "causal": True},
       {"cc": (9, 0), "formats": FORMATS[1], "group": 7, "head_dim": 192, "block_size": 64, "layout": "joint",
        "options": "window", "split_size": 64, "causal": False},
       {"cc": (9, 0), "formats": FORMATS[5], "group": 2, "head_dim": 256, "block_size": 8, "layout": "HND",
        "options": "scales", "split_size": None, "causal": True})
MANY = pairwise(cc=CCS, formats=FORMATS, group=(2, 3, 4, 5, 6, 7, 8, 12, 16, 20), head_dim=tuple(range(16, 257, 16)),
                block_size=(8, 16, 24, 32, 64, 256), layout=("NHD", "HND", "joint"), options=OPTIONS,
                split_size=(None, 64), causal=(True, False))


@pytest.mark.parametrize("row", FEW)
def test_decode(row):
    assert decode_case(row).kernel.name == "decode_mma"


@pytest.mark.parametrize("row", FEW)
def test_prefill(row):
    assert prefill_case(row, 64).kernel.name == "prefill_mma"


@pytest.mark.parametrize("row", FEW[:2])
def test_few_query_tokens(row):
    """Several query tokens of a sequence, as in the verification of speculated ones, share one reading of the keys."""
    assert prefill_case(row, 16).kernel.name == "decode_mma"


@pytest.mark.long
@pytest.mark.parametrize("row", MANY, ids=lambda row: "-".join(map(str, row.values())))
def test_matrix(row):
    decode_case(row)
    prefill_case(row, 16)
    prefill_case(row, 64)


@pytest.mark.parametrize("poison", ["inf", "largest"])
def test_unwritten_slots(poison):
    """Nothing of them is read: a weight of 0 times infinity would be NaN."""
    check(decode_problem(Shape(8, 2, 64, 32, "float16", "float16"), [1, 33, 70], poison=poison))


def poison_tokens(problem, name, tokens, dims, number):
    """The problem with a number written to some tokens of the first sequence."""
    pool, tokens = getattr(problem, name).copy(), np.asarray(tokens)
    at = problem.block_tables[0, tokens // problem.shape.block_size], tokens % problem.shape.block_size
    for dim in dims:
        pool[(*at, 0, dim)] = number
    return problem.replace(**{name: pool})


@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("formats, number", [
    (FORMATS[0], np.inf), (FORMATS[0], -np.inf), (FORMATS[1], np.nan), (FORMATS[1], -np.inf), (FORMATS[3], np.nan),
    (FORMATS[5], np.inf),
], ids=str)  # fmt: skip
def test_rows_are_not_touched_by_what_only_others_see(rows, name, formats, number):
    """The causal edge and the window's: what a token holds reaches those rows that see it, be it infinite or NaN."""
    length, num_queries, window, dims = 150, rows // 2, 60, (0, 5, 17, 46)
    problem = prefill_problem(Shape(2, 1, 48, 16, *formats), [length], num_queries)
    positions = np.arange(length - num_queries, length)
    tokens = np.array([positions[0] - window + 1, positions[-1]])
    poisoned = poison_tokens(problem, name, tokens, dims, number)
    out, lse, launch = attend(poisoned, query_tile=num_queries, window=window)
    assert launch.kernel.name == ("prefill_mma" if rows > 16 else "decode_mma")
    distances = positions[:, None] - tokens
    seen = ((distances >= 0) & (distances < window)).any(axis=1)
    assert 0 < seen.sum() < len(seen)
    expected = problem.expected(window=window)
    hit = np.zeros(out.shape, bool)
    hit[np.ix_(seen, range(2), dims if name == "values" else range(48))] = True
    lse_hit = hit.any(axis=2) & (name == "keys")
    if name == "values":
        np.testing.assert_array_equal(out[hit].astype(np.float32), np.float32(number))
    tolerances.assert_attention(np.where(hit, expected.out, out), np.where(lse_hit, expected.lse, lse), expected,
                                problem.q.dtype, 48, None, tolerances.tensor_weight_rounding(*formats))


def test_both_infinities_are_nan():
    problem = prefill_problem(Shape(2, 1, 16, 16, "float16", "float16"), [40], 4)
    problem = poison_tokens(poison_tokens(problem, "values", [37], [3], np.inf), "values", [38], [3], -np.inf)
    out, _, _ = attend(problem, query_tile=4)
    assert np.isfinite(out[:1]).all() and (out[1, :, 3] == np.inf).all() and np.isnan(out[2:, :, 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=2)).all()


def test_weights_far_below_the_largest():
    """Thousands of keys, each of weight 2**-20, add up beside one of weight 1."""
    problem = decode_problem(Shape(2, 1, 16, 16, "float16", "float16"), [2048])
    keys, values = np.zeros_like(problem.keys), np.ones_like(problem.values)
    keys[problem.block_tables[0, 0], 0], values[problem.block_tables[0, 0], 0] = 1, 0
    problem = problem.replace(q=np.ones_like(problem.q), keys=keys, values=values)
    out, _, _ = attend(problem, scale=20 * np.log(2) / 16)
    np.testing.assert_allclose(out.astype(float), 2047 * 2.0**-20, rtol=2e-3)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_queries_beyond_float16(size):
    """bfloat16 queries against a float8 pool: each row is brought into the range of float16 by a power of two."""
    problem = decode_problem(Shape(4, 1, 64, 16, "bfloat16", "float8_e5m2"), [40])
    q = (problem.q.astype(np.float32) * np.float32(size)).astype(problem.q.dtype)
    check(problem.replace(q=q), scale=0.1 / size)


def test_far_blocks():
    """Byte offsets past 2**32: block ids whose products with the stride do not fit 32 bits."""
    near = decode_problem(Shape(4, 1, 128, 16, "float16", "float16"), [40])
    ids = np.array([2**20 + 3, 2**21 - 1, 2**20 - 1], np.int32)
    pools = []
    for pool in (near.keys, near.values):
        far = ptxrun.virtual_array((2**21, *pool.shape[1:]), pool.dtype)
        far[ids] = pool[near.block_tables[0, :3]]
        pools.append(far)
    tables = near.block_tables.copy()
    tables[0, :3] = ids
    got, _, _ = attend(near.replace(keys=pools[0], values=pools[1], block_tables=tables), pool_rows=ids.tolist())
    np.testing.assert_array_equal(got, attend(near)[0])


# -------------------------------------------------------------------------------------------------------------- budgets


@functools.cache
def run(kind, length, group=4, head_dim=128, q="float16", kv="float16", layout="HND", cc=(9, 0), num_kv_heads=1):
    """Counters of a launch over one sequence: one query token, or the last 64 query rows of a prefill."""
    shape = Shape(group * num_kv_heads, num_kv_heads, head_dim, 16, q, kv)
    if kind == "decode":
        return check(decode_problem(shape, [length], layout=layout), cc).result.stats
    return check(prefill_problem(shape, [length], 64 // group, layout=layout), cc, 64 // group).result.stats


def added(kind, lengths, **facts):
    """{instruction class: warp instructions} that the second length adds to the first, and bank conflicts."""
    short, long = (run(kind, length, **facts) for length in lengths)
    counts = {name: count - short.by_class.get(name, 0) for name, count in long.by_class.items()}
    assert long.bank_conflicts == short.bank_conflicts
    return counts


@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("facts, budget", BUDGETS["decode"].items(), ids=str)
def test_decode_instructions(facts, budget, cc):
    group, head_dim, kv = facts
    if kv == "float8":
        kv = "float8_e5m2" if cc < (8, 9) else "float8_e4m3fn"
    q = kv if kv in ("float16", "bfloat16") else "float16"
    counts = added("decode", (512, 1024), group=group, head_dim=head_dim, q=q, kv=kv, cc=cc)
    assert sum(counts.values()) / 512 <= budget


def test_layouts_cost_the_same():
    counts = [sum(added("decode", (512, 1024), layout=layout, num_kv_heads=2).values()) for layout in ("NHD", "HND")]
    assert max(counts) <= 1.03 * min(counts)


@pytest.mark.parametrize("group", [2, 8, 16])
def test_decode_traffic(group):
    """Keys and values are asked for once, in whole sectors, each table entry by one warp."""
    stats = run("decode", 1024, group=group)
    for name in ("keys", "values"):
        count = stats.by_buffer[name]
        assert count.loaded == count.distinct_loaded == 1024 * 128 * 2
    copies = [c for pc, c in stats.global_access.items() if stats.instrs[pc].op.startswith("cp.async")]
    assert copies and all(c.sectors == c.ideal for c in copies)


@pytest.mark.parametrize("cc", CCS)
def test_prefill_instructions(cc):
    counts = added("prefill", (1024, 2048), cc=cc)
    memory = sum(n for name, n in counts.items() if name in ("cp.async", "ldmatrix") or name.startswith(("ld.", "st.")))
    assert counts["mma"] >= BUDGETS["prefill"] * (sum(counts.values()) - memory)


@pytest.mark.parametrize("window", [None, 40])
def test_prefill_traffic(window):
    """A query tile asks for the keys that its rows see, once, and for no others."""
    problem = prefill_problem(Shape(4, 1, 64, 16, "float16", "float16"), [160], 160)
    stats = check(problem, query_tile=16, window=window).result.stats
    first = np.arange(0, 160, 16)
    seen = first + 16 - (0 if window is None else np.maximum(0, first + 1 - window))
    assert stats.by_buffer["keys"].loaded == stats.by_buffer["values"].loaded == seen.sum() * 64 * 2


# --------------------------------------------------------------------------------------------------------- machine code


def spec_of(q="float16", kv="float16", head_dim=128, group=4, block_size=16, copy_bytes=16, cc=(9, 0), **flags):
    return AttendSpec(code_of(q), code_of(kv, cc), head_dim, group, block_size, copy_bytes, **flags)


def fits(spec, cc, num_queries):
    """A kernel spills nothing, and its resident warps keep enough bytes on their way."""
    kernel = choose(spec, cc, num_queries).kernel
    code = cubin_of(kernel, cc)
    used = cubin.resources(code, kernel.name)
    assert (used.stack, used.local) == (0, 0)
    blocks = cubin.resident_blocks(cc, used.registers, kernel.num_threads, kernel.shared_bytes)
    row = spec.head_dim * (2 if spec.kv_code in (code_of("float16"), code_of("bfloat16")) else 1)
    tokens = kernel.num_threads // 2  # of a tile: 16 a warp; two tiles are on their way
    if kernel.name == "prefill_mma" and spec.head_dim > 128:
        tokens //= 2
    return blocks * 2 * tokens * row


EVERY = {"has_cap": True, "has_bias": True, "has_window": True, "has_sinks": True}


@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("num_queries", [1, 16])
def test_machine_code(cc, num_queries):
    assert fits(spec_of(cc=cc), cc, num_queries) >= BUDGETS["bytes in flight"]
    fits(spec_of(q="bfloat16", head_dim=256, cc=cc, **EVERY), cc, num_queries)


@pytest.mark.long
@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 176, 256])
@pytest.mark.parametrize("flags", [{}, EVERY], ids=["plain", "every"])
def test_machine_code_matrix(cc, formats, head_dim, flags):
    q, kv = formats
    if cc < (8, 9) and kv == "float8_e4m3fn":
        pytest.skip("needs compute capability 8.9")
    for group, num_queries in ((4, 1), (16, 1), (4, 16)):
        fits(spec_of(q, kv, head_dim, group, cc=cc, **flags), cc, num_queries)


# ----------------------------------------------------------------------------------------------------------- the choice

TABLE = [  # facts of a spec, query tokens, the kernel, a word of the reason
    ({}, 1, "decode_mma", "columns"),
    ({"group": 1}, 1, "decode", "one column"),
    ({"group": 1}, 2, "decode_mma", "columns"),
    ({"group": 4}, 4, "decode_mma", "columns"),
    ({"group": 4}, 5, "prefill_mma", "rows"),
    ({"group": 32}, 1, "prefill_mma", "rows"),
    ({"group": 16, "head_dim": 256}, 1, "prefill_mma", "rows"),
    ({"kv": "int8"}, 1, "decode", "format"),
    ({"q": "float32", "kv": "float32"}, 16, "prefill", "format"),
    ({"q": "float32"}, 1, "decode", "rounded"),
    ({"q": "float16", "kv": "bfloat16"}, 1, "decode", "rounded"),
    ({"q": "bfloat16", "kv": "float8_e4m3fn"}, 1, "decode_mma", "columns"),
    ({"kv": "float8_e4m3fn", "cc": (8, 0)}, 1, "decode", "8.9"),
    ({"kv": "float8_e5m2", "cc": (8, 0)}, 1, "decode_mma", "columns"),
    ({"head_dim": 72}, 1, "decode", "head_dim"),
    ({"block_size": 12}, 1, "decode", "block_size"),
    ({"copy_bytes": 8}, 1, "decode", "16 bytes"),
]


@pytest.mark.parametrize("facts, num_queries, name, word", TABLE)
def test_choice(facts, num_queries, name, word):
    choice = choose(spec_of(**facts), facts.get("cc", (9, 0)), num_queries)
    assert choice.kernel.name == name and word in choice.why


def test_choice_covers_all_rows():
    """A block for each run of rows that a kernel serves."""
    assert [choose(spec_of(group=g), (9, 0), 1).blocks_per_head for g in (2, 16, 64, 65)] == [1, 1, 1, 2]
    assert (most_rows(128), most_rows(144)) == (16, 8)


# ------------------------------------------------------------------------------------------------------ shared prefixes


def shared_problem(shape, prefixes, lengths, num_queries=1, seed=0):
    """A batch in which the sequences of equal `prefixes` (tokens, name) have those first tokens in the same blocks."""
    problem = prefill_problem(shape, lengths, num_queries, seed=seed)
    tables = problem.block_tables.copy()
    for seq, prefix in enumerate(prefixes):
        blocks = prefix[0] // shape.block_size
        tables[seq, :blocks] = tables[prefixes.index(prefix), :blocks]
    return problem.replace(block_tables=tables)


def attend_shared(problem, cc=(9, 0), num_multiprocessors=4, **options):
    """(out, lse, launches) of a call on a backend of its own, checked against the oracle; pools are named."""
    on_ptx = OnPtx(cc, num_multiprocessors)
    on_ptx.device.memory.add(problem.keys, name="keys")
    on_ptx.device.memory.add(problem.values, name="values")
    on_ptx.check(problem, **options)
    return on_ptx.device.launches


def gathers(launches):
    """The kernels that attend shared prefixes."""
    specs = [(launch.kernel.name, getattr(launch.kernel.spec, "attend", launch.kernel.spec)) for launch in launches]
    return [name for name, spec in specs if getattr(spec, "gathered", False)]


@pytest.mark.parametrize("cc", CCS)
def test_a_shared_prefix_is_read_once(cc):
    """16 sequences that share 1024 of 1100 tokens."""
    problem = shared_problem(Shape(4, 1, 64, 16, "float16", "float16"), [(1024, "a")] * 16, [1100] * 16)
    launches = attend_shared(problem, cc)
    assert gathers(launches) == ["prefill_mma"]
    for name in ("keys", "values"):
        loaded = sum(launch.result.stats.by_buffer[name].loaded for launch in launches
                     if name in launch.result.stats.by_buffer)
        assert loaded <= 1.1 * (1024 + 16 * 76) * 64 * 2


@pytest.mark.parametrize("options", ["none", "window", "soft_cap", "alibi", "sinks", "scales"])
@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[4], ("float32", "float16"), ("float16", "int8")], ids="-".join)
def test_shared_prefixes_in_any_order(formats, options, monkeypatch):
    """Two groups among others, several query tokens, on every kernel: the same results."""
    monkeypatch.setattr(plan, "MIN_SAVED", 1)
    prefixes = [(64, "a"), (0, "x"), (96, "b"), (64, "a"), (96, "b"), (0, "y"), (64, "a"), (96, "b")]
    problem = shared_problem(Shape(4, 2, 48, 16, *formats), prefixes, [70, 33, 120, 90, 97, 5, 81, 200],
                             [1, 2, 1, 3, 1, 5, 1, 1])
    given = {**option_values(options, 4)}
    if options == "window":
        given = {"window": 85}  # hides a part of the longer ones
    launches = attend_shared(problem, **given)
    tensor = tolerances.tensor_weight_rounding(*formats) > 0
    assert gathers(launches) == (["decode_mma"] if tensor else ["prefill"])


def test_a_few_sequences_share_columns(monkeypatch):
    """Two sequences of a group of 4 are 8 columns of a product."""
    monkeypatch.setattr(plan, "MIN_SAVED", 1)
    problem = shared_problem(Shape(4, 1, 64, 16, "float16", "float16"), [(128, "a")] * 2, [140, 160])
    assert gathers(attend_shared(problem)) == ["decode_mma"]
    assert not gathers(attend_shared(problem, split_size=64))


def test_warmup_prepares_what_shared_prefixes_need():
    device = PtxDevice((9, 0))
    prepared = []
    device.prepare = prepared.append
    CudaBackend(device).warmup(npg.AttentionSpec(4, 1, 64, 16, "float16"))
    problem = shared_problem(Shape(4, 1, 64, 16, "float16", "float16"), [(1024, "a")] * 5, [1040] * 5)
    assert {launch.kernel for launch in attend_shared(problem)} <= set(prepared)
