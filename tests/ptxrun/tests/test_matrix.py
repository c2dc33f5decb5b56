"""Tensor-core instructions against NumPy: fragments laid out by hand from the tables of the PTX ISA."""

import ml_dtypes
import numpy as np
import pytest

from ptxrun.tests.ptxcase import kernel, launch_pointers

rng = np.random.default_rng(5)
HALF = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
DTYPE = {
    **HALF,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}


def fragment(matrix, lane, row):
    """(row, column) elements of an 8x8 fragment that a lane holds."""
    return matrix[row, 2 * (lane % 4)], matrix[row, 2 * (lane % 4) + 1]


def registers(prefix, count):
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_movmatrix_transposes(target):
    body = """mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 4, %d1; ld.global.u32 %r1, [%d2];
        movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1; st.global.u32 [%d3], %r2;"""
    matrices, out = rng.integers(0, 65536, (2, 8, 8)).astype(np.uint16), np.zeros((64, 2), np.uint16)
    held = np.array([fragment(matrices[t // 32], t % 32, t % 32 // 4) for t in range(64)], np.uint16)
    launch_pointers(kernel(body, ["a", "o"], target), 1, 64, [held, out]).assert_clean()
    for thread in range(64):
        assert tuple(out[thread]) == fragment(matrices[thread // 32].T, thread % 32, thread % 32 // 4)


def test_a_transposed_product_feeds_the_next_mma():
    """P = A @ B comes out as an accumulator is laid out; packed and transposed, it is the next product's B operand.

    That is what a decode kernel does with its softmax weights: S^T = K Q^T, then O^T = V^T P^T.
    """
    body = """mad.wide.u32 %d3, %r0, 16, %d0; mad.wide.u32 %d4, %r0, 8, %d1; mad.wide.u32 %d5, %r0, 16, %d2;
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d3]; ld.global.v2.b32 {%r5, %r6}, [%d4];
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r1, %r2, %r3, %r4}, {%r5, %r6},
            {0f00000000, 0f00000000, 0f00000000, 0f00000000};
        cvt.rn.f16x2.f32 %r7, %f1, %f0; cvt.rn.f16x2.f32 %r8, %f3, %f2;
        movmatrix.sync.aligned.m8n8.trans.b16 %r9, %r7; movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r8;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f4, %f5, %f6, %f7}, {%r1, %r2, %r3, %r4}, {%r9, %r10},
            {0f00000000, 0f00000000, 0f00000000, 0f00000000};
        st.global.v4.f32 [%d5], {%f4, %f5, %f6, %f7};"""
    body = body.replace("{0f00000000, 0f00000000, 0f00000000, 0f00000000}", "{%f8, %f8, %f8, %f8}")
    a, b = (rng.integers(-3, 4, s).astype(np.float16) for s in ((16, 16), (16, 8)))
    out = np.zeros((32, 4), np.float32)
    held = [a_registers(a), b_registers(b), out]
    launch_pointers(kernel("mov.f32 %f8, 0f00000000;" + body, ["a", "b", "o"]), 1, 32, held).assert_clean()
    assert (accumulator(out) == a.astype(np.float32) @ (a.astype(np.float32) @ b.astype(np.float32))).all()


def a_registers(a):
    """A [16, k] as lanes hold it: [32, registers, elements a register]."""
    per = 4 // a.itemsize
    held = np.zeros((32, 2 * a.shape[1] // (4 * per), per), a.dtype)
    for lane in range(32):
        for r in range(held.shape[1]):
            for e in range(per):
                held[lane, r, e] = a[lane // 4 + 8 * (r % 2), r // 2 * 4 * per + lane % 4 * per + e]
    return held


def b_registers(b):
    """B [k, 8] as lanes hold it."""
    per = 4 // b.itemsize
    held = np.zeros((32, b.shape[0] // (4 * per), per), b.dtype)
    for lane in range(32):
        for r in range(held.shape[1]):
            for e in range(per):
                held[lane, r, e] = b[r * 4 * per + lane % 4 * per + e, lane // 4]
    return held


def accumulator(held):
    """The [16, 8] result that lanes hold as [32, 4]."""
    d = np.zeros((16, 8), held.dtype)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        d[g, 2 * t : 2 * t + 2], d[g + 8, 2 * t : 2 * t + 2] = held[lane, :2], held[lane, 2:]
    return d


@pytest.mark.parametrize(
    "ty,depth,result",
    [("f16", 16, "f32"), ("bf16", 16, "f32"), ("f16", 8, "f32"), ("bf16", 8, "f32"), ("tf32", 8, "f32"),
     ("tf32", 4, "f32"),
     ("e4m3", 32, "f32"), ("e5m2", 32, "f32"), ("s8", 32, "s32"), ("s8", 16, "s32"), ("u8", 32, "s32")],
)
def test_mma(ty, depth, result):
    low = 0 if ty == "u8" else -4
    a, b = (rng.integers(low, 5, s).astype(DTYPE[ty]) for s in ((16, depth), (depth, 8)))
    c = rng.integers(-9, 9, (16, 8)).astype(np.float32 if result == "f32" else np.int32)
    held = a_registers(a), b_registers(b)
    num_a, num_b = held[0].shape[1], held[1].shape[1]
    vector = {1: "", 2: ".v2", 4: ".v4"}
    body = f"""mad.wide.u32 %d4, %r0, {4 * num_a}, %d0; mad.wide.u32 %d5, %r0, {4 * num_b}, %d1;
        mad.wide.u32 %d6, %r0, 16, %d2; mad.wide.u32 %d7, %r0, 16, %d3;
        .reg .{"f32" if result == "f32" else "b32"} %c<8>;
        .reg .b32 %x<4>; .reg .b32 %y<2>;
        ld.global{vector[num_a]}.b32 {registers("x", num_a) if num_a > 1 else "%x0"}, [%d4];
        ld.global{vector[num_b]}.b32 {registers("y", num_b) if num_b > 1 else "%y0"}, [%d5];
        ld.global.v4.b32 {registers("c", 4)}, [%d6];
        mma.sync.aligned.m16n8k{depth}.row.col.{result}.{ty}.{ty}.{result} {{%c4, %c5, %c6, %c7}},
            {registers("x", num_a)}, {registers("y", num_b)}, {registers("c", 4)};
        st.global.v4.b32 [%d7], {{%c4, %c5, %c6, %c7}};"""
    held_c, out = np.zeros((32, 4), c.dtype), np.zeros((32, 4), c.dtype)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        held_c[lane] = *c[g, 2 * t : 2 * t + 2], *c[g + 8, 2 * t : 2 * t + 2]
    launch_pointers(kernel(body, ["a", "b", "c", "o"]), 1, 32, [*held, held_c, out]).assert_clean()
    assert (accumulator(out) == a.astype(np.float64) @ b.astype(np.float64) + c).all()


def test_mma_with_half_accumulators():
    a, b = (rng.integers(-4, 5, s).astype(np.float16) for s in ((16, 16), (16, 8)))
    body = """mad.wide.u32 %d3, %r0, 16, %d0; mad.wide.u32 %d4, %r0, 8, %d1; mad.wide.u32 %d5, %r0, 8, %d2;
        mov.b32 %r7, 0x3c003c00;
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d3]; ld.global.v2.b32 {%r5, %r6}, [%d4];
        mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r8, %r9}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7, %r7};
        st.global.v2.b32 [%d5], {%r8, %r9};"""
    out = np.zeros((32, 4), np.float16)
    launch_pointers(kernel(body, ["a", "b", "o"]), 1, 32, [a_registers(a), b_registers(b), out]).assert_clean()
    assert (accumulator(out) == a.astype(np.float32) @ b.astype(np.float32) + 1).all()


def test_mma_rounds_once():
    """1 + 2**-12 summed sixteen times in float16 would stay 1."""
    a, b = np.full((16, 16), 2.0**-6, np.float16), np.full((16, 8), 2.0**-6, np.float16)
    body = """mad.wide.u32 %d3, %r0, 16, %d0; mad.wide.u32 %d4, %r0, 8, %d1; mad.wide.u32 %d5, %r0, 16, %d2;
        mov.f32 %f8, 0f3F800000;
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d3]; ld.global.v2.b32 {%r5, %r6}, [%d4];
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r1, %r2, %r3, %r4}, {%r5, %r6},
            {%f8, %f8, %f8, %f8}; st.global.v4.f32 [%d5], {%f0, %f1, %f2, %f3};"""
    out = np.zeros((32, 4), np.float32)
    launch_pointers(kernel(body, ["a", "b", "o"]), 1, 32, [a_registers(a), b_registers(b), out]).assert_clean()
    assert (out == np.float32(1 + 16 * 2.0**-12)).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(count, transposed):
    """Rows lie at the addresses of lanes 0-7, 8-15, ...: here in reverse order and 48 bytes apart."""
    outs = [f"%r{20 + i}" for i in range(count)]
    stored = "; ".join(f"st.global.b32 [%d3+{4 * i}], {r}" for i, r in enumerate(outs))
    body = f""".shared .align 16 .b8 sm[1536]; mov.u32 %r1, sm; mad.wide.u32 %d2, %r0, 16, %d0;
        ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d2]; mad.lo.u32 %r6, %r0, 48, %r1;
        st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}};
        bar.warp.sync -1; sub.u32 %r7, {8 * count - 1}, %r0; mad.lo.u32 %r8, %r7, 48, %r1;
        ldmatrix.sync.aligned.m8n8.x{count}{".trans" if transposed else ""}.shared.b16 {{{", ".join(outs)}}}, [%r8];
        mad.wide.u32 %d3, %r0, {4 * count}, %d1; {stored};"""
    rows, out = rng.integers(0, 65536, (32, 8)).astype(np.uint16), np.zeros((32, count, 2), np.uint16)
    launch_pointers(kernel(body, ["a", "o"]), 1, 32, [rows, out]).assert_clean()
    matrices = rows[: 8 * count][::-1].reshape(count, 8, 8)
    for lane in range(32):
        for i in range(count):
            matrix = matrices[i].T if transposed else matrices[i]
            assert tuple(out[lane, i]) == fragment(matrix, lane, lane // 4)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_undoes_ldmatrix(transposed):
    trans = ".trans" if transposed else ""
    body = f""".shared .align 16 .b8 sm[1024]; mov.u32 %r1, sm; mad.wide.u32 %d2, %r0, 16, %d0;
        mad.lo.u32 %r6, %r0, 16, %r1;
        ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d2]; st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r7, %r8, %r9, %r10}}, [%r6];
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r6+512], {{%r7, %r8, %r9, %r10}}; bar.warp.sync -1;
        ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r6+512]; mad.wide.u32 %d3, %r0, 16, %d1;
        st.global.v4.b32 [%d3], {{%r2, %r3, %r4, %r5}};"""
    rows, out = rng.integers(0, 65536, (32, 8)).astype(np.uint16), np.zeros((32, 8), np.uint16)
    launch_pointers(kernel(body, ["a", "o"]), 1, 32, [rows, out]).assert_clean()
    assert (out == rows).all()
