"""The CUDA kernels by themselves, as compiled PTX on the CPU: what tests that know nothing of kernels cannot see."""

import re
from dataclasses import dataclass
from unittest import mock

import numpy as np
import ptxrun
import pytest

if ptxrun.missing():
    pytest.skip(ptxrun.missing(), allow_module_level=True)

import numba_paged as npg  # noqa: E402
import ptx_device  # noqa: E402
import reference  # noqa: E402
from compiled import ptx_of  # noqa: E402
from inputs import DTYPES, Shape, decode_problem, normal, prefill_problem  # noqa: E402
from numba_paged.cuda import backend, codecs, decode, layout, prefill  # noqa: E402
from numba_paged.cuda.codecs import FLOAT32  # noqa: E402
from numba_paged.cuda.compile import Kernel  # noqa: E402
from numba_paged.cuda.intrinsics import thread_index  # noqa: E402
from numba_paged.cuda.memory import load_global, store_global  # noqa: E402
from numba_paged.cuda.registers import each  # noqa: E402
from numba_paged.cuda.warp import U64, AttendSpec, tanh  # noqa: E402
from ptx_device import DeviceArray, OnPtx, PtxDevice, used_for_device_arrays  # noqa: E402

CCS = ((8, 0), (9, 0), (10, 0))
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")


@pytest.fixture(params=CCS, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def on_ptx(request):
    return OnPtx(request.param)


# ------------------------------------------------------------------- number formats


@dataclass(frozen=True)
class ConvertSpec:
    """From one format to another, `width` numbers a thread; `saturate` past the largest."""

    source: int
    target: int
    width: int
    saturate: bool


def make_convert(spec):
    """target[i] = source[i]; one run of `width` numbers a thread."""
    source_code, target_code, width, saturate = spec.source, spec.target, spec.width, spec.saturate
    source_bytes, target_bytes = (codecs.ITEMSIZE[code] * width for code in (source_code, target_code))

    def convert(target, source):
        thread = U64(thread_index())
        numbers = load_global(source_code, width, source + thread * U64(source_bytes))
        store_global(target_code, saturate, target + thread * U64(target_bytes), numbers)

    return convert


def run_convert(device, source, dtype, width, saturate=False):
    """A NumPy array in another format, by a kernel."""
    codes = [codecs.code_of(d.name, device.compute_capability) for d in (source.dtype, dtype)]
    spec = ConvertSpec(*codes, width, saturate)
    threads = 256
    assert source.size % (threads * width) == 0
    kernel = Kernel("convert", make_convert, spec, {"target": U64, "source": U64}, threads)
    target = device.empty(source.shape, dtype)
    per_launch = threads * width
    for first in range(0, source.size, per_launch):
        part = slice(first, first + per_launch)
        device.launch(kernel, (1,), (device.address(target[part]), device.address(device.array(source[part]))))
    return target.host


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("width", [1, 4])
def test_every_byte_is_decoded(on_ptx, name, width):
    codes = np.resize(np.arange(256, dtype=np.uint8), 256 * width).view(DTYPES[name])
    np.testing.assert_array_equal(run_convert(on_ptx.device, codes, np.dtype(np.float32), width), codes.astype(np.float32))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_halves_are_decoded(on_ptx, name):
    rng = np.random.default_rng(0)
    special = [0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7E00, 0x8000, 0x8001, 0xFC00, 0x7F7F, 0x7F80, 0x7FC0, 0xFF80]
    bits = np.r_[special, rng.integers(0, 2**16, 2048 - len(special))].astype(np.uint16)
    numbers = bits.view(DTYPES[name])
    np.testing.assert_array_equal(run_convert(on_ptx.device, numbers, np.dtype(np.float32), 8), numbers.astype(np.float32))


def hard_numbers(name):
    """float32 around every number of a format (of 16 bits: some), ties, and what is past the largest."""
    rng = np.random.default_rng(1)
    dtype = DTYPES[name]
    if dtype.itemsize == 1:
        bits = np.arange(256, dtype=np.uint8)
    else:
        bits = rng.integers(0, 2**16, 320).astype(np.uint16)
    stored = bits.view(dtype).astype(np.float32)
    stored = np.sort(stored[np.isfinite(stored)])
    ties = (stored[1:] + stored[:-1]) / 2
    near = [np.nextafter(x, np.float32(s * np.inf), dtype=np.float32) for x in (stored, ties) for s in (1, -1)]
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-38, 127.5, -128.5, 126.5]
    numbers = np.r_[stored, ties, *near, special].astype(np.float32)
    return np.resize(numbers, -(-numbers.size // 1024) * 1024)


@pytest.mark.parametrize("name", ["float16", "bfloat16", *NARROW])
def test_numbers_are_rounded_to_nearest_even_and_saturate(on_ptx, name):
    numbers = hard_numbers(name)
    stored = run_convert(on_ptx.device, numbers, DTYPES[name], 4, saturate=True)
    got = stored.astype(np.float32)
    np.testing.assert_array_equal(got, reference.quantise(numbers, 1.0, DTYPES[name]).astype(np.float32))
    if name != "int8":
        np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(numbers[got == 0]))


def make_tanh(spec):
    """target[i] = tanh(source[i]), four numbers a thread."""

    def kernel(target, source):
        at = U64(thread_index()) * U64(16)
        store_global(FLOAT32, False, target + at, each(tanh, load_global(FLOAT32, 4, source + at)))

    return kernel


def test_tanh_is_good_to_a_few_units(on_ptx):
    """The tolerance of the soft cap counts on 8 · 2**-24 (`tolerances.OPERATIONS`)."""
    x = np.r_[np.linspace(-12, 12, 1000), np.linspace(-1e-3, 1e-3, 20), 0, np.inf, -np.inf, 1e30].astype(np.float32)
    device, kernel = on_ptx.device, Kernel("tanh", make_tanh, 0, {"target": U64, "source": U64}, 256)
    target = device.empty(x.shape, x.dtype)
    device.launch(kernel, (1,), (device.address(target), device.address(device.array(x))))
    assert np.abs(target.host - np.tanh(x.astype(np.float64))).max() < 8 * 2.0**-24


# ------------------------------------------------------------------- layouts


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 15])
def test_layouts_have_no_bank_conflicts_and_reach_every_number(rows):
    for code in (codecs.FLOAT32, codecs.FLOAT16, codecs.E4M3):
        for head_dim in range(1, 257, 1 if rows == 4 else 7):
            for tile_bytes in (decode.TILE_BYTES, prefill.TILE_BYTES):
                check_layout(layout.tile_layout(head_dim, code, rows, tile_bytes), head_dim)


def check_layout(shape, head_dim):
    assert shape.pitch % 16 == 0 and shape.pitch >= shape.row == head_dim * shape.itemsize
    assert shape.tokens * shape.parts == layout.WARP == shape.groups * shape.dim_lanes and shape.tokens % shape.groups == 0
    lanes = range(layout.WARP)
    score = [lane % shape.tokens * shape.pitch + lane // shape.tokens * 16 for lane in lanes]
    run = shape.width * shape.itemsize
    value = [lane // shape.dim_lanes * shape.pitch + lane % shape.dim_lanes * run for lane in lanes]
    assert layout.wavefronts(score, 16) == 4
    assert layout.wavefronts(value, run) == max(1, run // 4 if run > 4 else 1)
    owned = {(unit * shape.dim_lanes + lane) * shape.width + i for unit in range(shape.units)
             for lane in range(shape.dim_lanes) for i in range(shape.width)}
    assert owned >= set(range(head_dim))
    chunks = {(part + shape.parts * i) for part in range(shape.parts) for i in range(shape.chunks)}
    assert chunks >= set(range(-(-shape.row // 16)))
    assert 16 * len(chunks) <= shape.pitch and len(owned) * shape.itemsize <= shape.pitch


def test_wavefronts_are_counted_as_the_machine_does():
    assert layout.wavefronts([4 * i for i in range(32)], 4) == 1
    assert layout.wavefronts([8 * i for i in range(32)], 4) == 2
    assert layout.wavefronts([0] * 32, 4) == 1
    assert layout.wavefronts([128 * i for i in range(32)], 4) == 32
    assert layout.wavefronts([16 * i for i in range(32)], 16) == 4
    assert layout.wavefronts([256 * i for i in range(32)], 16) == 32


# ------------------------------------------------------------------- addresses


@pytest.mark.parametrize("block", [2**27 // 2048, 2**17 + 3, 2**20 + 1])
def test_blocks_past_the_reach_of_32_bits(block):
    """A block's element offset passes 2**27, 2**31 and 2**33 (its byte offset twice that): ids are widened first."""
    on_ptx, shape = OnPtx(), Shape(2, 1, 64, 256, "float16", "float16")
    problem = decode_problem(shape, [300])
    here = problem.block_tables[0, :2]
    far = np.array([block, block + 1])
    pools = []
    for pool in (problem.keys, problem.values):
        big = ptxrun.virtual_array((block + 2, *pool.shape[1:]), pool.dtype)
        big[far] = pool[here]
        on_ptx.device.memory.add(big, rows=far)
        pools.append(big)
    tables = np.full_like(problem.block_tables, -1)
    tables[0, :2] = far
    moved = problem.replace(keys=pools[0], values=pools[1], block_tables=tables)
    with used_for_device_arrays(on_ptx.backend):
        got, want = moved.attend(on_ptx), problem.attend(on_ptx)
    np.testing.assert_array_equal(got.out, want.out)


@pytest.mark.parametrize("attend, shift", [
    (decode_problem, 0), (decode_problem, 8), (decode_problem, 4), (decode_problem, 2),
    (lambda *a: prefill_problem(*a, 3), 4), (lambda *a: prefill_problem(*a, 3), 2),
])  # fmt: skip
def test_accesses_are_as_wide_as_the_pool_allows(attend, shift):
    """Pools whose rows begin `shift` bytes past a multiple of 16 are read in narrower accesses, and read right."""
    on_ptx = OnPtx((10, 0))
    problem = attend(Shape(2, 1, 64, 16, "float16", "float16"), [40, 7])
    pools = []
    for pool in (problem.keys, problem.values):
        memory = np.zeros(pool.nbytes + 32, np.uint8)
        start = -memory.ctypes.data % 16 + shift
        moved = memory[start : start + pool.nbytes].view(pool.dtype).reshape(pool.shape)
        moved[...] = pool
        pools.append(moved)
    on_ptx.check(problem.replace(keys=pools[0], values=pools[1]))
    spec = on_ptx.device.launches[0].kernel.spec
    assert getattr(spec, "attend", spec).copy_bytes == (shift or 16)


def test_grids_of_items_wrap_to_the_z_axis():
    on_ptx = OnPtx()
    with mock.patch.object(backend, "MAX_GRID_Y", 3):
        on_ptx.check(decode_problem(Shape(2, 2, 8, 4), [1, 5, 9, 2, 3, 30, 4]))
        on_ptx.check(prefill_problem(Shape(2, 2, 8, 4), [4, 5, 9, 2, 3], 2))
    assert [launch.grid for launch in on_ptx.device.launches] == [(2, 3, 3), (2, 3, 2)]


@pytest.mark.parametrize("name", ["keys", "q"])
def test_strides_that_do_not_fit_are_refused(name):
    on_ptx = OnPtx()
    problem = decode_problem(Shape(4, 2, 8, 4), [9, 3])
    reversed_array = getattr(problem, name)[::-1]
    with used_for_device_arrays(on_ptx.backend), pytest.raises(ValueError, match=f"^{name}: .*strides"):
        problem.replace(**{name: reversed_array}).attend(on_ptx)


# ------------------------------------------------------------------- what is read


def mark_written(on_ptx, problem):
    """Only slots below the lengths hold data; the machine fails on any read of another, masked or not."""
    written = np.zeros(problem.keys.shape, bool)
    for table, length in zip(problem.block_tables, problem.lengths, strict=True):
        at = np.arange(length)
        written[table[at // problem.shape.block_size], at % problem.shape.block_size] = True
    for pool in (problem.keys, problem.values):
        on_ptx.device.memory.add(pool, init=written)


@pytest.mark.parametrize("kv_dtype, head_dim, block_size, cc", [
    ("float16", 128, 16, (9, 0)), ("float8_e4m3fn", 20, 8, (8, 0)), ("float32", 96, 17, (10, 0)), ("bfloat16", 3, 1, (9, 0)),
])  # fmt: skip
def test_no_unwritten_slot_is_read(kv_dtype, head_dim, block_size, cc):
    on_ptx, shape = OnPtx(cc), Shape(4, 2, head_dim, block_size, "float16", kv_dtype)
    for problem in (decode_problem(shape, [1, 15, 33, 70]), prefill_problem(shape, [9, 70, 19], [9, 30, 3])):
        mark_written(on_ptx, problem)
        on_ptx.check(problem)


@pytest.mark.parametrize("attend, options", [(decode_problem, {}), (lambda *a: prefill_problem(*a, 10), {"causal": False})])
def test_what_the_window_hides_is_not_read(attend, options):
    """The first block in sight is partly hidden: its hidden slots are not read either."""
    on_ptx = OnPtx()
    problem = attend(Shape(2, 1, 64, 16, "float16", "float16"), [100])
    last_hidden = 100 - (1 if problem.query_starts is None else 10) - 20 + 1
    seen = np.zeros(problem.keys.shape, bool)
    at = np.arange(last_hidden, 100)
    seen[problem.block_tables[0, at // 16], at % 16] = True
    for pool in (problem.keys, problem.values):
        on_ptx.device.memory.add(pool, init=seen)
    on_ptx.check(problem, window=20, **options)


def test_a_row_is_not_touched_by_what_only_others_see():
    """In one tile of prefill, the values of later tokens and of those behind the window are hidden from some rows."""
    on_ptx = OnPtx()
    shape = Shape(2, 1, 64, 16, "float32", "float16")
    problem = prefill_problem(shape, [40], 12)
    values = problem.values.copy()
    values[problem.block_tables[0, 39 // 16], 39 % 16] = np.nan  # the last token: only the last row sees it
    values[problem.block_tables[0, 1], 3] = np.nan  # token 19: of the rows 28 to 39 only the first sees it, with window 10
    with used_for_device_arrays(on_ptx.backend):
        got = problem.replace(values=values).attend(on_ptx, window=10)
        want = problem.attend(on_ptx, window=10)
    np.testing.assert_array_equal(got.out[1:-1], want.out[1:-1])
    assert np.isnan(got.out[[0, -1]]).all()


# ------------------------------------------------------------------- barriers

WAITS = re.compile(r"^\s*(bar\.(warp\.)?sync|cp\.async\.wait_group)\b[^;]*;$", re.MULTILINE)


@pytest.mark.parametrize("query_dtype", ["float32", "float16"])
@pytest.mark.parametrize("make", [decode_problem, lambda *args: prefill_problem(*args, [70, 20, 50])])
def test_case_55_missing_barriers(make, query_dtype):
    """Without any one of a kernel's barriers and waits a race is found, so that with all of them there is none.

    Up to three are not missed here, as they guard what a problem this small does not have (a second run of rows), what
    only other head_dims need, or wait for the copies of the last tiles, which are none.
    """
    problem = make(Shape(2, 1, 64, 16, query_dtype, "float16"), [140, 400, 50])
    on_ptx, verdicts = OnPtx(), []
    on_ptx.check(problem)
    kernel = on_ptx.device.launches[0].kernel
    whole = ptx_of(kernel, (9, 0))
    for wait in WAITS.finditer(whole):
        without = whole[: wait.start()] + whole[wait.end() :]
        with mock.patch.object(ptx_device, "ptx_of", lambda k, cc, text=without: text if k is kernel else ptx_of(k, cc)):
            try:
                OnPtx().check(problem)
            except AssertionError as error:
                verdicts.append(str(error))
            else:
                verdicts.append("clean")
    assert len(verdicts) >= 7 and verdicts.count("clean") <= 3
    assert all(verdict == "clean" or "race" in verdict or "cp.async" in verdict for verdict in verdicts), verdicts


# ------------------------------------------------------------------- append, copies, merges


def test_copies_in_a_ring_and_in_a_chain_go_through_spare_blocks():
    on_ptx = OnPtx()
    rng = np.random.default_rng(0)
    keys, values = (normal((2, 7, 4, 2, 10), "bfloat16", rng) for _ in range(2))
    sources, targets = np.array([0, 1, 2, 3, 4, 6], np.int32), np.array([1, 2, 0, 4, 5, 6], np.int32)
    want = [np.stack([reference.copy_blocks(layer, sources, targets) for layer in pool]) for pool in (keys, values)]
    with used_for_device_arrays(on_ptx.backend):
        npg.copy_blocks(DeviceArray(keys), DeviceArray(values), sources, targets)
    for got, expected in zip((keys, values), want, strict=True):
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))
    assert [launch.kernel.name for launch in on_ptx.device.launches] == ["copy"] * 3


def test_copies_without_chains_are_one_launch_for_all_layers():
    on_ptx = OnPtx()
    keys, values = (np.arange(3 * 4 * 2 * 8, dtype=np.float32).reshape(3, 4, 2, 1, 8) for _ in range(2))
    with used_for_device_arrays(on_ptx.backend):
        npg.copy_blocks(DeviceArray(keys), DeviceArray(values), np.array([0, 1], np.int32), np.array([2, 3], np.int32))
    np.testing.assert_array_equal(keys[:, 2:], keys[:, :2])
    assert len(on_ptx.device.launches) == 1


def test_appends_are_as_wide_as_the_arrays_allow():
    on_ptx, rng = OnPtx(), np.random.default_rng(0)
    for head_dim, q_dtype, kv_dtype, width in ((64, "float16", "float16", 8), (64, "float32", "float8_e4m3fn", 4),
                                               (20, "bfloat16", "float32", 4), (3, "float16", "int8", 1)):
        k, v = (normal((5, 2, head_dim), q_dtype, rng) for _ in range(2))
        pools = [np.zeros((3, 4, 2, head_dim), DTYPES[kv_dtype]) for _ in range(2)]
        slots = np.array([3, -1, 11, 0, 4])
        want = [reference.append(new, pool, slots) for new, pool in zip((k, v), pools, strict=True)]
        with used_for_device_arrays(on_ptx.backend):
            npg.append(*map(DeviceArray, (k, v, *pools)), slots)
        for got, expected in zip(pools, want, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
        assert on_ptx.device.launches[-1].kernel.spec.width == width


def test_sinks_are_added_once_however_many_splits():
    on_ptx = OnPtx()
    rng = np.random.default_rng(0)
    problem = decode_problem(Shape(6, 2, 64, 16, "float16", "float16"), [200, 40, 0])
    sinks = rng.standard_normal(6).astype(np.float32)
    for split_size in (None, 48, 16):
        on_ptx.check(problem, sinks=sinks, split_size=split_size)
    names = [launch.kernel.name for launch in on_ptx.device.launches]
    assert names == ["decode_mma", "merge"] * 3


def test_a_batch_of_both_kinds_is_decoded_and_prefilled():
    """Sequences with one query token take the decode kernel in any batch, so that they give the same bits in all."""
    on_ptx = OnPtx()
    on_ptx.check(prefill_problem(Shape(4, 2, 32, 8), [30, 17, 25], [1, 9, 1]))
    assert [launch.kernel.name for launch in on_ptx.device.launches] == ["decode", "prefill"]


def test_groups_beyond_the_rows_of_a_block():
    """A group of 70 heads takes two runs of rows in prefill, and eight tiles of heads in decode."""
    on_ptx = OnPtx()
    on_ptx.check(prefill_problem(Shape(70, 1, 16, 8, "float32", "float16"), [9], 2))
    on_ptx.check(decode_problem(Shape(70, 1, 16, 8, "float32", "float16"), [9, 40]))


@pytest.mark.parametrize("group", [1, 8, 12, 16, 17])
def test_a_kv_head_is_read_by_as_few_blocks_as_can_be(group):
    shape = decode.decode_shape(AttendSpec(codecs.FLOAT16, codecs.FLOAT16, 128, group, 16, 16))
    assert shape.num_tiles == max(1, group // 8) and shape.num_rows * shape.num_tiles >= group
    assert shape.num_rows >= min(8, group)


def test_warmup_prepares_what_calls_need():
    on_ptx = OnPtx()
    with mock.patch.object(on_ptx.device, "prepare") as prepare:
        on_ptx.backend.warmup(npg.AttentionSpec(4, 2, 64, 16, "float16"), q_dtype="float16")
    ready = {call.args[0] for call in prepare.call_args_list}
    shape = Shape(4, 2, 64, 16, "float16", "float16")
    on_ptx.check(decode_problem(shape, [300, 20], ), split_size=64)
    on_ptx.check(prefill_problem(shape, [20], 7))
    k = v = np.ones((1, 2, 64), np.float16)
    pools = [np.zeros((1, 16, 2, 64), np.float16) for _ in range(2)]
    with used_for_device_arrays(on_ptx.backend):
        npg.append(*map(DeviceArray, (k, v, *pools)), np.array([0]))
    assert {launch.kernel for launch in on_ptx.device.launches} <= ready


def test_kernels_of_equal_specs_are_the_same():
    spec = AttendSpec(codecs.FLOAT16, codecs.FLOAT16, 64, 4, 16, 16)
    again = AttendSpec(codecs.FLOAT16, codecs.FLOAT16, 64, 4, 16, 16)
    assert decode.decode_kernel(spec) is decode.decode_kernel(again)
    assert prefill.prefill_kernel(spec) is prefill.prefill_kernel(again)
