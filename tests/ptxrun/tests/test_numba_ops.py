"""What Numba makes of the operations of an attention kernel, on sm_80, sm_90 and sm_100, against NumPy."""

import math

import ml_dtypes
import numpy as np
import pytest

from ptxrun import Buf, launch, missing

if missing():
    pytest.skip(missing(), allow_module_level=True)

from numba import cuda, float32, int32, types, uint32, uint64

from ptxrun.tests import intrinsics as ptx

TARGETS = [(8, 0), (9, 0), (10, 0)]
pytestmark = pytest.mark.parametrize("cc", TARGETS, ids=["sm_80", "sm_90", "sm_100"])
rng = np.random.default_rng(29)
FULL = 0xFFFFFFFF


def pointers(*arrays):
    return [Buf(a, pointer=True) for a in arrays]


def words(count):
    return rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize("load", ["load4", "load4_invariant", "load_nc"])
def test_16_byte_loads(cc, load):
    get = getattr(ptx, load)

    def kernel(a, out):
        i = uint64(cuda.grid(1)) * uint64(16)
        ptx.prefetch(a + i)
        ptx.store4(out + i, get(a + i))

    a, out = words(256), np.zeros(256, np.uint32)
    result = launch(kernel, 1, 64, pointers(a, out), cc=cc).assert_clean()
    assert (a == out).all() and result.stats.loads.requests == 2 and result.stats.loads.sectors == 32
    assert ("ld.global.nc" in result.ptx) == (load != "load4") and "st.global.v4" in result.ptx


def test_shared_vectors(cc):
    """16-byte accesses of shared memory: 8 words apart they conflict, next to each other not."""

    def kernel(a, out, apart):
        tile = cuda.shared.array(1024, uint32)
        lane = uint32(cuda.threadIdx.x)
        at = ptx.shared_address(tile) + lane * uint32(apart) * uint32(16)
        ptx.store4_shared(at, ptx.load4(a + uint64(lane) * uint64(16)))
        ptx.syncwarp()
        ptx.store4(out + uint64(lane) * uint64(16), ptx.load4_shared(at))

    for apart, conflicts in ((1, 0), (2, 8), (8, 56)):
        a, out = words(128), np.zeros(128, np.uint32)
        stats = launch(kernel, 1, 32, [*pointers(a, out), apart], cc=cc).assert_clean().stats
        assert (a == out).all() and stats.bank_conflicts == conflicts


def test_half_conversions(cc):
    def kernel(pairs, out, back, bfloat):
        i = cuda.grid(1)
        x = ptx.half2_to_floats(pairs[i])
        y = ptx.half2_by_ir(pairs[i])
        out[4 * i] = x[0]
        out[4 * i + 1] = x[1]
        out[4 * i + 2] = y[0]
        out[4 * i + 3] = y[1]
        back[i] = ptx.floats_to_half2(x[0], x[1])
        bfloat[i] = ptx.floats_to_bfloat2(x[0], x[1])

    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)][: 2 * 128 * 240]
    out, back, bfloat = (
        np.zeros((len(halves) // 2, 2, 2), np.float32),
        np.zeros(len(halves) // 2, np.uint32),
        np.zeros(len(halves) // 2, np.uint32),
    )
    launch(kernel, 240, 128, [halves.view(np.uint32), out.ravel(), back, bfloat], cc=cc).assert_clean()
    assert (out == halves.astype(np.float32).reshape(-1, 1, 2)).all() and (back == halves.view(np.uint32)).all()
    assert (bfloat.view(np.uint16) == halves.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)).all()


def test_float8_conversions(cc):
    def kernel(codes, halves, singles, packed):
        i = cuda.grid(1)
        halves[i, 0] = ptx.e4m3_to_half2(codes[i])
        halves[i, 1] = ptx.e5m2_to_half2(codes[i])
        packed[i, 0] = ptx.floats_to_e4m3(singles[i, 0], singles[i, 1])
        packed[i, 1] = ptx.floats_to_e5m2(singles[i, 0], singles[i, 1])

    codes = np.arange(256, dtype=np.uint8).repeat(2).view(np.uint16)
    singles = (rng.standard_normal((256, 2)) * 200).astype(np.float32)
    halves, packed = np.zeros((256, 2), np.uint32), np.zeros((256, 2), np.uint16)
    args = [codes, halves, singles, packed]
    if cc == (8, 0):  # no such instruction there
        with pytest.raises(ValueError, match="requires .target sm_89"):
            launch(kernel, 2, 128, args, cc=cc)
        return
    launch(kernel, 2, 128, args, cc=cc).assert_clean()
    for column, dtype, top in ((0, ml_dtypes.float8_e4m3fn, 448), (1, ml_dtypes.float8_e5m2, 57344)):
        got, expected = (
            halves[:, column].copy().view(np.float16).reshape(-1, 2),
            np.arange(256, dtype=np.uint8).view(dtype).astype(np.float16),
        )
        assert np.array_equal(got, np.stack([expected, expected], 1), equal_nan=True)
        assert (
            packed[:, column].copy().view(np.uint8).reshape(-1, 2)
            == np.clip(singles, -top, top).astype(dtype).view(np.uint8)
        ).all()


def test_special_functions(cc):
    def kernel(x, out):
        i = cuda.grid(1)
        out[0, i] = ptx.exp2(x[i])
        out[1, i] = ptx.tanh(x[i])
        out[2, i] = ptx.reciprocal(x[i])
        out[3, i] = math.exp(x[i])
        out[4, i] = math.tanh(x[i])
        out[5, i] = math.log(abs(x[i]))
        out[6, i] = float32(1) / x[i]
        out[7, i] = math.sqrt(abs(x[i]))
        out[8, i] = ptx.fma(x[i], x[i], float32(-2))
        out[9, i] = math.log2(abs(x[i]))
        out[10, i] = math.floor(x[i])
        out[11, i] = min(max(x[i], float32(-1)), float32(1))
        out[12, i] = 2.0 ** x[i]

    x = np.linspace(-8, 8, 128).astype(np.float32)
    out = np.zeros((13, 128), np.float32)
    launch(kernel, 1, 128, [x, out], cc=cc).assert_clean()
    d = x.astype(np.float64)
    references = [
        np.exp2, np.tanh, np.reciprocal, np.exp, np.tanh, lambda v: np.log(abs(v)), np.reciprocal,
        lambda v: np.sqrt(abs(v)), lambda v: v * v - 2, lambda v: np.log2(abs(v)), np.floor,
        lambda v: np.clip(v, -1, 1), np.exp2,
    ]
    for row, reference in zip(out, references):
        assert np.allclose(row, reference(d), rtol=4e-7, atol=1e-7), references.index(reference)


@pytest.mark.parametrize("fastmath", [False, True])
def test_fastmath(cc, fastmath):
    """math.exp, division and sqrt in both modes (libdevice's, with and without .ftz and .approx)."""

    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = math.exp(x[i]) / (float32(1) + math.sqrt(x[i])) + math.tanh(x[i])

    x, out = np.linspace(0.01, 5, 128).astype(np.float32), np.zeros(128, np.float32)
    result = launch(kernel, 1, 128, [x, out], cc=cc, compile_options={"fastmath": fastmath}).assert_clean()
    d = x.astype(np.float64)
    assert np.allclose(out, np.exp(d) / (1 + np.sqrt(d)) + np.tanh(d), rtol=2e-6)
    assert ("tanh.approx" in result.ptx) == fastmath


def test_integer_dialects(cc):
    """Signed and unsigned index arithmetic, division, comparison, 64-bit products, floor division of negatives."""

    def kernel(x, out):
        i = cuda.grid(1)
        v = x[i]
        out[0, i] = v // 7 + v % 7 * 1000
        out[1, i] = (uint32(v) * uint32(2654435761)) >> uint32(13)
        out[2, i] = uint64(uint32(v)) * uint64(1 << 33) + uint64(i)
        out[3, i] = (v << 3) ^ (v >> 2) | (v & 0xFF)
        out[4, i] = cuda.popc(uint32(v)) + cuda.clz(uint32(v)) * 100 + cuda.ffs(v) * 10000
        out[5, i] = cuda.brev(uint32(v)) >> uint32(24)
        out[6, i] = cuda.selp(v > 3, 1, 2) + (v if v > 0 else -v)
        out[7, i] = x[(i * 37 + 5) % x.size]

    x = rng.integers(-100, 100, 64).astype(np.int32)
    out = np.zeros((8, 64), np.int64)
    launch(kernel, 1, 64, [x, out], cc=cc).assert_clean()
    for i, v in enumerate(x.tolist()):
        u = v & 0xFFFFFFFF
        assert out[0, i] == v // 7 + v % 7 * 1000 and out[1, i] == u * 2654435761 >> 13
        assert int(out[2, i]) & 2**64 - 1 == (u * 2**33 + i) & 2**64 - 1 and out[3, i] == (v << 3) ^ (v >> 2) | (
            v & 0xFF
        )
        assert out[4, i] == u.bit_count() + (32 - u.bit_length()) * 100 + (u & -u).bit_length() * 10000
        assert out[5, i] == int(f"{u:032b}"[::-1], 2) >> 24 and out[6, i] == (1 if v > 3 else 2) + abs(v)
        assert out[7, i] == x[(i * 37 + 5) % 64]


def test_warp_and_block_api(cc):
    def kernel(x, out):
        t = cuda.threadIdx.x
        v = x[t]
        out[0, t] = cuda.ballot_sync(FULL, v > 3)
        out[1, t] = cuda.match_any_sync(FULL, v)
        out[2, t] = cuda.all_sync(FULL, v >= 0) + 2 * cuda.any_sync(FULL, v == 7) + 4 * cuda.eq_sync(FULL, v > 100)
        out[3, t] = cuda.syncthreads_count(int32(v > 3))
        out[4, t] = cuda.syncthreads_and(int32(v >= 0)) + 2 * cuda.syncthreads_or(int32(v == 99))
        out[5, t] = cuda.shfl_down_sync(FULL, v, 3) * 1000 + cuda.shfl_up_sync(FULL, v, 2)
        out[6, t] = cuda.shfl_xor_sync(FULL, v, 5) * 1000 + cuda.shfl_sync(FULL, v, 9)
        out[7, t] = cuda.activemask()
        out[8, t] = cuda.lanemask_lt()

    x, out = rng.integers(0, 9, 64).astype(np.int32), np.zeros((9, 64), np.int64)
    launch(kernel, 1, 64, [x, out], cc=cc).assert_clean()
    for t in range(64):
        w, lane = x[t // 32 * 32 :][:32], t % 32
        assert out[0, t] & FULL == sum(1 << i for i in range(32) if w[i] > 3)
        assert out[1, t] & FULL == sum(1 << i for i in range(32) if w[i] == x[t])
        assert out[2, t] == 1 + 2 * (w == 7).any() + 4 and out[3, t] == (x > 3).sum() and out[4, t] == 1
        assert out[5, t] == w[lane + 3 if lane < 29 else lane] * 1000 + w[lane - 2 if lane > 1 else lane]
        assert out[6, t] == w[lane ^ 5] * 1000 + w[9]
        assert out[7, t] & FULL == FULL and out[8, t] == 2**lane - 1


def test_shared_atomics(cc):
    """Float atomic.max is a compare-and-swap loop."""

    def kernel(x, out):
        histogram = cuda.shared.array(9, int32)
        largest = cuda.shared.array(1, float32)
        t = cuda.threadIdx.x
        if t < 9:
            histogram[t] = 0
        if t == 0:
            largest[0] = float32(-1e30)
        cuda.syncthreads()
        cuda.atomic.add(histogram, x[t], 1)
        cuda.atomic.max(largest, 0, float32(x[t]))
        cuda.syncthreads()
        if t < 9:
            out[t] = histogram[t]
        if t == 9:
            out[t] = int32(largest[0])

    x, out = rng.integers(0, 9, 128).astype(np.int32), np.zeros(10, np.int32)
    launch(kernel, 1, 128, [x, out], cc=cc).assert_clean()
    assert out[:9].tolist() == np.bincount(x, minlength=9).tolist() and out[9] == x.max()


def test_dynamic_shared_and_local_memory(cc):
    def kernel(a, out):
        tile = cuda.shared.array(0, float32)
        own = cuda.local.array(8, float32)
        t = cuda.threadIdx.x
        tile[t] = a[t]
        for i in range(8):
            own[(i * t) % 8] = float32(i)  # some entries stay as they are: numba zero-fills
        cuda.syncthreads()
        out[t] = tile[63 - t] + own[(t + 1) % 8]

    a, out = rng.standard_normal(64).astype(np.float32), np.zeros(64, np.float32)
    launch(kernel, 1, 64, [a, out], shared_bytes=256, cc=cc).assert_clean()
    last = [max([i for i in range(8) if i * t % 8 == (t + 1) % 8], default=0) for t in range(64)]
    assert (out == a[::-1] + np.array(last, np.float32)).all()
    with pytest.raises(Exception, match="out-of-bounds shared store"):
        launch(kernel, 1, 64, [a, out], shared_bytes=128, cc=cc)


def test_global_race(cc):
    def kernel(a, out):
        out[0] = a[cuda.blockIdx.x]

    a, out = rng.standard_normal(4).astype(np.float32), np.zeros(1, np.float32)
    assert launch(kernel, 4, 1, [a, out], cc=cc, global_races=True, exited_lanes="allow").of("race")
    launch(kernel, 4, 1, [a, out], cc=cc).assert_clean()


def pipeline(fault):
    """A two-stage cp.async pipeline over tiles of 512 floats; `fault` leaves something out."""

    def kernel(a, out, num_tiles):
        tile = cuda.shared.array((2, 512), float32)
        t = cuda.threadIdx.x
        at = ptx.shared_address(tile) + uint32(t) * uint32(16)
        source = ptx.address(a) + uint64(t) * uint64(16)
        ptx.copy16(at, source)
        ptx.copy_commit()
        total = float32(0)
        for i in range(num_tiles):
            if i + 1 < num_tiles:
                ptx.copy16(at + uint32((i + 1) % 2) * uint32(2048), source + uint64(i + 1) * uint64(2048))
            ptx.copy_commit()
            if fault != "no wait":
                ptx.copy_wait1()
            if fault != "no barrier after the wait":
                cuda.syncthreads()
            for j in range(4):
                total += tile[i % 2, (t + 1) % 128 + 128 * j]
            if fault != "no barrier before the refill":
                cuda.syncthreads()
        ptx.copy_wait0()
        out[t] = total

    return kernel


def test_async_pipeline(cc):
    a, out = rng.standard_normal(512 * 5).astype(np.float32), np.zeros(128, np.float32)
    stats = launch(pipeline(""), 1, 128, [a, out, 5], cc=cc).assert_clean().stats
    assert np.allclose(out, np.roll(a.reshape(5, 4, 128).sum((0, 1)), -1), atol=1e-4)
    assert stats.by_class["cp.async"] and stats.by_buffer["#0"].loaded == a.nbytes


@pytest.mark.parametrize(
    "fault,kind",
    [("no wait", "cp.async"), ("no barrier after the wait", "race"), ("no barrier before the refill", "race")],
)
def test_async_pipeline_faults(cc, fault, kind):
    a, out = rng.standard_normal(512 * 5).astype(np.float32), np.zeros(128, np.float32)
    assert launch(pipeline(fault), 1, 128, [a, out, 5], cc=cc).of(kind)


def test_zero_filled_tail(cc):
    """Rows past the end are zero in shared memory without being read."""

    def kernel(a, out, rows):
        tile = cuda.shared.array(128, uint32)
        t = uint32(cuda.threadIdx.x)
        at = ptx.shared_address(tile) + t * uint32(16)
        ptx.copy16_zero_fill(at, a + uint64(t) * uint64(16), uint32(16) if t < rows else uint32(0))
        ptx.copy_commit()
        ptx.copy_wait0()
        ptx.store4(out + uint64(t) * uint64(16), ptx.load4_shared(at))

    a, out = words(4 * 20).reshape(20, 4), np.full((32, 4), 7, np.uint32)
    launch(kernel, 1, 32, [*pointers(a, out), np.uint32(20)], cc=cc).assert_clean()
    assert (out[:20] == a).all() and (out[20:] == 0).all()


@pytest.mark.parametrize("ty", ["half", "bfloat"])
def test_scores_on_tensor_cores(cc, ty):
    """O = softmax2(Q K^T) V for one tile: ldmatrix, mma, exp2, pack, ldmatrix.trans, mma.

    q [16, 64], k, v [16, 64] 16-bit, one warp;
        scores are not scaled. The weights p go into the second product in 16 bits.
    """
    mma, pack = (ptx.mma_half, ptx.floats_to_half2) if ty == "half" else (ptx.mma_bfloat, ptx.floats_to_bfloat2)

    def kernel(q, k, v, out):
        tile = cuda.shared.array(3 * 512, uint32)
        lane = uint32(cuda.threadIdx.x)
        base = ptx.shared_address(tile)
        for i in range(4):
            offset = lane * uint32(16) + uint32(i) * uint32(512)
            ptx.copy16(base + offset, q + uint64(offset))
            ptx.copy16(base + offset + uint32(2048), k + uint64(offset))
            ptx.copy16(base + offset + uint32(4096), v + uint64(offset))
        ptx.copy_commit()
        ptx.copy_wait0()
        ptx.syncwarp()
        zero = float32(0)
        s0 = (zero, zero, zero, zero)
        s1 = (zero, zero, zero, zero)
        row = (lane & uint32(15)) * uint32(128) + (lane >> uint32(4)) * uint32(16)
        for step in range(4):
            a = ptx.ldmatrix4(base + row + uint32(step * 32))
            b = ptx.ldmatrix4(base + uint32(2048) + row + uint32(step * 32))
            s0 = mma(a[0], a[1], a[2], a[3], b[0], b[2], s0[0], s0[1], s0[2], s0[3])
            s1 = mma(a[0], a[1], a[2], a[3], b[1], b[3], s1[0], s1[1], s1[2], s1[3])
        m0 = max(max(s0[0], s0[1]), max(s1[0], s1[1]))
        m1 = max(max(s0[2], s0[3]), max(s1[2], s1[3]))
        for step in range(2):
            m0 = max(m0, ptx.shuffle_xor(m0, uint32(1 << step)))
            m1 = max(m1, ptx.shuffle_xor(m1, uint32(1 << step)))
        p0 = (ptx.exp2(s0[0] - m0), ptx.exp2(s0[1] - m0), ptx.exp2(s0[2] - m1), ptx.exp2(s0[3] - m1))
        p1 = (ptx.exp2(s1[0] - m0), ptx.exp2(s1[1] - m0), ptx.exp2(s1[2] - m1), ptx.exp2(s1[3] - m1))
        t0 = p0[0] + p0[1] + p1[0] + p1[1]
        t1 = p0[2] + p0[3] + p1[2] + p1[3]
        for step in range(2):
            t0 += ptx.shuffle_xor(t0, uint32(1 << step))
            t1 += ptx.shuffle_xor(t1, uint32(1 << step))
        r0 = ptx.reciprocal(t0)
        r1 = ptx.reciprocal(t1)
        a0 = pack(p0[0], p0[1])
        a1 = pack(p0[2], p0[3])
        a2 = pack(p1[0], p1[1])
        a3 = pack(p1[2], p1[3])
        for j in range(4):
            b = ptx.ldmatrix4_trans(base + uint32(4096) + row + uint32(j * 32))
            x = mma(a0, a1, a2, a3, b[0], b[1], zero, zero, zero, zero)
            y = mma(a0, a1, a2, a3, b[2], b[3], zero, zero, zero, zero)
            g = lane >> uint32(2)
            c = uint32(j * 16) + (lane & uint32(3)) * uint32(2)
            out[g, c] = x[0] * r0
            out[g, c + uint32(1)] = x[1] * r0
            out[g + uint32(8), c] = x[2] * r1
            out[g + uint32(8), c + uint32(1)] = x[3] * r1
            out[g, c + uint32(8)] = y[0] * r0
            out[g, c + uint32(9)] = y[1] * r0
            out[g + uint32(8), c + uint32(8)] = y[2] * r1
            out[g + uint32(8), c + uint32(9)] = y[3] * r1

    dtype = np.float16 if ty == "half" else ml_dtypes.bfloat16
    q, k, v = ((rng.standard_normal((16, 64)) * 0.5).astype(dtype) for _ in range(3))
    out = np.full((16, 64), np.nan, np.float32)
    bits = [x.view(np.uint16) for x in (q, k, v)]
    sig = types.void(types.uint64, types.uint64, types.uint64, types.float32[:, ::1])
    stats = launch(kernel, 1, 32, [*pointers(*bits), out], sig=sig, cc=cc).assert_clean().stats
    s = q.astype(np.float64) @ k.astype(np.float64).T
    p = np.exp2(s - s.max(1, keepdims=True))
    expected = p @ v.astype(np.float64) / p.sum(1, keepdims=True)
    assert np.abs(out - expected).max() < (2e-3 if ty == "half" else 1.5e-2)
    assert stats.by_class["mma"] == 16 and stats.by_class["ldmatrix"] == 12 and stats.distinct_loaded == 3 * 2048


def test_half_arrays_of_numba(cc):
    """float16 operators are CUDA C++ functions; the kernel is linked by nvJitLink."""

    def kernel(a, b, out):
        i = cuda.grid(1)
        out[i] = a[i] * b[i] + a[i]

    a, b = (rng.standard_normal(64).astype(np.float16) for _ in range(2))
    out = np.zeros(64, np.float16)
    launch(kernel, 1, 64, [a, b, out], cc=cc).assert_clean()
    exact = a.astype(np.float64) * b + a
    assert np.abs(out - exact).max() <= 2 * 2.0**-11 * np.abs(exact).max() + 1e-3


def test_packed_half_arithmetic(cc):
    def kernel(a, b, out):
        i = cuda.grid(1)
        out[i] = ptx.fma_half2(a[i], b[i], a[i])

    a, b = (rng.standard_normal(128).astype(np.float16) for _ in range(2))
    out = np.zeros(64, np.uint32)
    launch(kernel, 1, 64, [a.view(np.uint32), b.view(np.uint32), out], cc=cc).assert_clean()
    assert (out.view(np.float16) == (a.astype(np.float64) * b + a).astype(np.float16)).all()
