"""Compiling without a GPU: one lowering for all targets, and the table of what a target has."""

import re

import numpy as np
import pytest

from ptxrun import Buf, PtxUnsupported, SparseBuf, assemble, compile_kernel, launch, missing
from ptxrun.compiler import signature
from ptxrun.targets import lowest_target
from ptxrun.tests.ptxcase import HEADER, SCRATCH

if missing():
    pytest.skip(missing(), allow_module_level=True)

from numba import cuda, float32

from ptxrun.tests import intrinsics, kernels

SIGNATURE = "void(float32[::1], float32[::1], float32[::1])"
TARGETS = [(8, 0), (9, 0), (10, 0)]


def without_counters(ptx):
    """PTX with the numbers that numba counts up in the process taken out of the names."""
    return re.sub(r"_cudapy_smem_\d+|_ZN[\w$.]+|_ZZN[\w$.]+", "NAME", ptx)


@pytest.mark.parametrize("cc", TARGETS)
def test_one_lowering_serves_every_target(cc):
    """The PTX is what cuda.compile_ptx gives for the target, although the kernel was lowered once for sm_90."""

    def kernel(a, b, out):
        tile = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        tile[t] = a[t]
        cuda.syncthreads()
        out[t] = tile[63 - t] / b[t] + cuda.shfl_xor_sync(0xFFFFFFFF, a[t], 1)

    mine = compile_kernel(kernel, SIGNATURE, cc)
    theirs, _ = cuda.compile_ptx(kernel, SIGNATURE, cc=cc)
    assert without_counters(mine) == without_counters(theirs) and f".target sm_{cc[0]}{cc[1]}" in mine


def test_options_of_a_dispatcher_are_kept():
    def kernel(a, b, out):
        out[0] = a[0] / b[0]

    plain, fast = (compile_kernel(cuda.jit(kernel, **o), SIGNATURE) for o in ({}, {"fastmath": True}))
    assert "div.approx" in fast and "div.approx" not in plain
    assert ".maxntid 96" in compile_kernel(cuda.jit(kernel, launch_bounds=96), SIGNATURE)


def test_kernels_that_do_not_assemble_are_refused():
    bad = intrinsics.inline("elect.sync $0|p, 0xffffffff;", "r", "")

    def kernel(a, b, out):
        out[0] = float32(bad())

    with pytest.raises(ValueError, match="(?s)sm_90a: ptxas .*Unknown symbol 'p'"):
        compile_kernel(kernel, SIGNATURE)


def test_the_same_call_again_compiles_nothing():
    first = compile_kernel(kernels.add, SIGNATURE)
    assert (
        compile_kernel(kernels.add, SIGNATURE) is first
        and compile_kernel(kernels.add, SIGNATURE, fastmath=True) is not first
    )


def test_lto():
    """The text that nvJitLink writes after link-time optimisation runs, too."""
    a, b, out = (np.arange(64, dtype=np.float32) for _ in range(3))
    launch(kernels.add, 1, 64, [a, b, out], compile_options={"lto": True}).assert_clean()
    assert (out == a + b).all()


# -- targets --------------------------------------------------------------------------
F4 = "{%f1,%f2,%f3,%f4}"
SOURCES = {  # an instruction in its shortest valid form, and registers it needs
    "cp.async.wait_all;": 80,
    "cvt.rn.f16x2.e4m3x2 %r1, %h1;": 89,
    "cvt.rn.satfinite.e5m2x2.f32 %h1, %f1, %f2;": 89,
    "cvt.rn.f16x2.f32 %r1, %f1, %f2;": 80,
    "cvt.rn.bf16x2.f32 %r1, %f1, %f2;": 80,
    "cvt.rn.bf16.f32 %h1, %f1;": 80,
    "cvt.f32.bf16 %f1, %h1;": 80,
    "cvt.rna.tf32.f32 %r1, %f1;": 80,
    "setp.lt.bf16 %p1, %h1, %h2;": 90,
    "neg.bf16x2 %r1, %r2;": 80,
    "add.rn.f32x2 %d1, %d2, %d3;": 100,
    "add.bf16x2 %r1, %r2, %r3;": 90,
    "mul.bf16 %h1, %h2, %h3;": 90,
    "fma.rn.bf16x2 %r1, %r2, %r3, %r4;": 80,
    "max.f16x2 %r1, %r2, %r3;": 80,
    "min.bf16 %h1, %h2, %h3;": 80,
    "max.NaN.f32 %f1, %f2, %f3;": 80,
    "ex2.approx.ftz.bf16x2 %r1, %r2;": 90,
    "tanh.approx.bf16 %h1, %h2;": 90,
    "ex2.approx.f16 %h1, %h2;": 75,
    "tanh.approx.f32 %f1, %f2;": 75,
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];": 75,
    "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;": 75,
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};": 90,
    f"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {F4}, {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, {F4};": 89,
    f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {F4}, {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, {F4};": 80,
    f"mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {F4}, {{%r1,%r2}}, {{%r5}}, {F4};": 80,
    f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {F4}, {{%r1,%r2}}, {{%r5}}, {F4};": 75,
    "redux.sync.add.s32 %r1, %r2, -1;": 80,
    "elect.sync %r1|%p1, -1;": 90,
    "red.global.add.noftz.bf16x2 [%d0], %r1;": 90,
    "griddepcontrol.wait;": 90,
    "ld.global.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%d0];": 100,
    "st.global.v8.b32 [%d0], {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8};": 100,
}
KNOWN = (75, 80, 86, 89, 90, 100)


@pytest.mark.parametrize("instruction,lowest", SOURCES.items(), ids=lambda v: str(v).split()[0])
def test_the_table_of_targets_agrees_with_the_assembler(instruction, lowest):
    assert lowest_target(instruction.split()[0].rstrip(";")) == lowest
    for sm in KNOWN:
        if abs(KNOWN.index(sm) - KNOWN.index(lowest)) <= 1:
            text = (
                HEADER.format(target=f"sm_{sm}")
                + f".visible .entry k(.param .u64 a)\n{{ {SCRATCH} ld.param.u64 %d0, [a]; {instruction} ret; }}\n"
            )
            if sm >= lowest:
                assemble(text, f"sm_{sm}")
            else:
                with pytest.raises(ValueError):
                    assemble(text, f"sm_{sm}")
                with pytest.raises(PtxUnsupported, match=f"needs sm_{lowest}, the target is sm_{sm}"):
                    launch(text, 1, 32, [0])


def test_unknown_instructions_say_where():
    text = (
        HEADER.format(target="sm_90a")
        + f".visible .entry k()\n{{\n{SCRATCH}\nvabsdiff.u32.u32.u32 %r1, %r2, %r3, %r4;\nret; }}\n"
    )
    with pytest.raises(PtxUnsupported, match='opcode at PTX line 7: "vabsdiff'):
        launch(text, 1, 32, [])


def test_signature_from_the_arguments():
    args = [
        np.zeros(3, np.float32),
        np.zeros((2, 3))[:, ::2],
        np.int32(1),
        Buf(np.zeros(2), pointer=True),
        SparseBuf(64),
    ]
    kinds = signature(args).args
    assert [(k.ndim, k.layout, str(k.dtype)) for k in kinds[:2]] == [(1, "C", "float32"), (2, "A", "float64")]
    assert list(map(str, kinds[2:])) == ["int32", "uint64", "uint64"]
