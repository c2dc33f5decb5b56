"""Loads, stores and atomics in every form, vector widths, caches hints, address spaces, faults."""

import numpy as np
import pytest

from ptxrun import Buf, MemoryFault
from ptxrun.tests.ptxcase import elementwise, kernel, launch_pointers, run

rng = np.random.default_rng(13)


def copy(load, store, size, registers="%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8", count=1, target="sm_90a"):
    """A kernel in which each thread copies `size` bytes from a to o by one load and one store."""
    values = registers.split(", ")[:count]
    values = "{" + ", ".join(values) + "}" if count > 1 else values[0]
    body = f"""mad.wide.u32 %d2, %r0, {size}, %d0; mad.wide.u32 %d3, %r0, {size}, %d1;
        {load} {values}, [%d2]; {store} [%d3], {values};"""
    return kernel(body, ["a", "o"], target)


HALVES = "%h1, %h2, %h3, %h4"
WIDE = "%d4, %d5, %d6, %d7"


@pytest.mark.parametrize(
    "load,store,size,registers,count,target",
    [
        ("ld.global.u32", "st.global.u32", 4, None, 1, "sm_80"),
        ("ld.global.b8", "st.global.b8", 1, HALVES, 1, "sm_80"),
        ("ld.global.u16", "st.global.u16", 2, HALVES, 1, "sm_80"),
        ("ld.global.f32", "st.global.f32", 4, "%f1", 1, "sm_80"),
        ("ld.global.f64", "st.global.f64", 8, "%e1", 1, "sm_80"),
        ("ld.global.nc.u32", "st.global.cs.u32", 4, None, 1, "sm_80"),
        ("ld.global.nc.v2.u32", "st.global.v2.u32", 8, None, 2, "sm_80"),
        ("ld.global.nc.v4.u32", "st.global.v4.u32", 16, None, 4, "sm_80"),
        ("ld.global.nc.v4.f32", "st.global.v4.f32", 16, "%f1, %f2, %f3, %f4", 4, "sm_80"),
        ("ld.global.v2.b64", "st.global.v2.b64", 16, WIDE, 2, "sm_80"),
        ("ld.global.v4.b8", "st.global.v4.b8", 4, HALVES, 4, "sm_80"),
        ("ld.global.v2.b16", "st.global.v2.b16", 4, HALVES, 2, "sm_80"),
        ("ld.global.nc.L1::no_allocate.L2::128B.v4.u32", "st.global.v4.u32", 16, None, 4, "sm_80"),
        ("ld.global.nc.L1::no_allocate.L2::256B.v2.b64", "st.global.v2.b64", 16, WIDE, 2, "sm_90a"),
        ("ld.global.cg.v4.u32", "st.global.wt.v4.u32", 16, None, 4, "sm_80"),
        ("ld.global.v8.b32", "st.global.v8.b32", 32, None, 8, "sm_100a"),
        ("ld.global.v4.b64", "st.global.v4.b64", 32, WIDE, 4, "sm_100a"),
        ("ld.v4.u32", "st.v4.u32", 16, None, 4, "sm_80"),
        ("ld.volatile.global.u32", "st.volatile.global.u32", 4, None, 1, "sm_80"),
        ("ld.relaxed.gpu.global.u32", "st.release.gpu.global.u32", 4, None, 1, "sm_80"),
    ],
)
def test_copies(load, store, size, registers, count, target):
    a, out = rng.integers(0, 256, 64 * size).astype(np.uint8), np.zeros(64 * size, np.uint8)
    text = copy(load, store, size, *([registers] if registers else []), count=count, target=target)
    stats = launch_pointers(text, 1, 64, [a, Buf(out, init=False)]).assert_clean().stats
    assert (a == out).all()
    assert stats.loads.requests == stats.stores.requests == 2 and stats.loads.bytes == stats.stores.bytes == a.nbytes
    assert stats.loads.sectors == stats.loads.ideal == stats.stores.sectors == 2 * size


@pytest.mark.parametrize("ty,dtype", [("s8", np.int8), ("u8", np.uint8), ("s16", np.int16), ("u16", np.uint16)])
def test_narrow_loads_extend(ty, dtype):
    x = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, 64, endpoint=True).astype(dtype)
    body = f"""mad.wide.u32 %d2, %r0, {x.itemsize}, %d0; mad.wide.u32 %d3, %r0, 4, %d1;
        ld.global.{ty} %r1, [%d2]; st.global.u32 [%d3], %r1;"""
    out = np.zeros(64, np.int32)
    launch_pointers(kernel(body, ["a", "o"]), 1, 64, [x, out]).assert_clean()
    assert (out == x).all()


def test_address_spaces():
    """The same bytes through shared and generic addresses, a static and a dynamic shared variable, local memory."""
    body = """.shared .align 4 .b8 fixed[128]; .local .align 4 .b8 own[16];
        mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 4, %d1; ld.global.u32 %r1, [%d2];
        mov.u32 %r2, fixed; mad.lo.u32 %r3, %r0, 4, %r2; st.shared.u32 [%r3], %r1;
        mov.u64 %d4, fixed; cvta.shared.u64 %d5, %d4; mad.wide.u32 %d5, %r0, 4, %d5; ld.u32 %r4, [%d5];
        isspacep.shared %p0, %d5;
        mov.u64 %d6, own; cvta.local.u64 %d7, %d6; st.u32 [%d7+4], %r4; ld.local.u32 %r5, [own+4];
        isspacep.local %p1, %d7;
        mov.u32 %r6, dyn; mad.lo.u32 %r7, %r0, 4, %r6; st.shared.u32 [%r7], %r5; ld.shared.u32 %r8, [%r7];
        cvta.to.global.u64 %d8, %d3; isspacep.global %p2, %d8; and.pred %p0, %p0, %p1; and.pred %p0, %p0, %p2;
        @%p0 st.global.u32 [%d8], %r8;"""
    text = kernel(body, ["a", "o"], head=".extern .shared .align 4 .b8 dyn[];\n")
    a, out = rng.integers(0, 2**31, 32).astype(np.uint32), np.zeros(32, np.uint32)
    launch_pointers(text, 1, 32, [a, out], shared_bytes=128).assert_clean()
    assert (a == out).all()
    with pytest.raises(MemoryFault, match="out-of-bounds shared store"):
        launch_pointers(text, 1, 32, [a, out], shared_bytes=64)


def test_module_variables():
    """A constant table and a global counter that belong to the module."""
    body = """mov.u64 %d2, table; mad.wide.u32 %d3, %r0, 4, %d2; ld.const.u32 %r1, [%d3]; mad.wide.u32 %d4, %r0, 4, %d0;
        st.global.u32 [%d4], %r1; mov.u64 %d5, counter; atom.global.add.u32 %r2, [%d5], 1; ld.const.u32 %r3, [table+8];
        mad.wide.u32 %d6, %r0, 4, %d1; add.u32 %r2, %r2, %r3; st.global.u32 [%d6], %r2;"""
    head = ".const .align 4 .u32 table[4] = {7, 8, 0x9, 10};\n.global .align 4 .u32 counter = 100;\n"
    text = kernel(body, ["a", "o"], head=head)
    first, second = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    launch_pointers(text, 1, 4, [first, second]).assert_clean()
    assert first.tolist() == [7, 8, 9, 10] and sorted(second.tolist()) == [109, 110, 111, 112]


def test_hints_change_nothing():
    body = """prefetch.global.L2 [%i0a]; prefetch.global.L1 [%i0a]; prefetchu.L1 [%i0a];
        createpolicy.fractional.L2::evict_last.b64 %d0, 1.0;
        ld.global.L2::cache_hint.u32 %r1, [%i0a], %d0; membar.gl; fence.acq_rel.gpu; mov.u32 %o0, %r1;"""
    x = rng.integers(0, 2**31, 64).astype(np.uint32)
    (out,) = run(body, [x], [np.uint32])
    assert (out == x).all()


def test_prefetch_of_unmapped_memory_is_harmless():
    run(
        "add.s64 %d1, %i0a, 0x10000000; prefetch.global.L2 [%d1]; mov.u32 %o0, 1;",
        [np.zeros(32, np.uint32)],
        [np.uint32],
    )


def test_a_called_function():
    """A call with a parameter and a result, inlined by the linker; the function returns in two places."""
    head = """.func (.param .b32 result) triple(.param .b32 x) { .reg .b32 %r<3>; .reg .pred %p<2>;
        ld.param.b32 %r1, [x];
        setp.eq.u32 %p1, %r1, 5; @%p1 bra FIVE; mul.lo.u32 %r2, %r1, 3; st.param.b32 [result], %r2; ret;
        FIVE: mov.u32 %r2, 500; st.param.b32 [result], %r2; ret; }\n"""
    body = """mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 4, %d1; ld.global.u32 %r1, [%d2];
        { .param .b32 in; .param .b32 back; st.param.b32 [in], %r1; call.uni (back), triple, (in);
        ld.param.b32 %r2, [back]; }
        st.global.u32 [%d3], %r2;"""
    a, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    launch_pointers(kernel(body, ["a", "o"], head=head), 1, 32, [a, out]).assert_clean()
    assert (out == np.where(a == 5, 500, 3 * a)).all()


# -- atomics --------------------------------------------------------------------
def atomic(form, dtype, count=4):
    """64 threads apply an atomic to cell tid % count of `a`, with their own number as the operand."""
    size = np.dtype(dtype).itemsize
    letter = {2: "h", 4: "f" if np.dtype(dtype).kind == "f" else "r", 8: "e" if np.dtype(dtype).kind == "f" else "d"}[
        size
    ]
    value = {"h": "cvt.rn.f16.u32 %h1, %r0;", "f": "cvt.rn.f32.u32 %f1, %r0;", "r": "mov.b32 %r1, %r0;",
             "e": "cvt.rn.f64.u32 %e1, %r0;",
             "d": "cvt.u64.u32 %d9, %r0; mov.b64 %d10, %d9;"}[letter]
    operand = "%d10" if letter == "d" else f"%{letter}1"
    result = {"h": "%h2", "f": "%f2", "r": "%r2", "e": "%e2", "d": "%d11"}[letter]
    out = (
        f"mad.wide.u32 %d3, %r0, {size}, %d1; st.global.b{8 * size} [%d3], {result};" if form.startswith("atom") else ""
    )
    dest = f"{result}, " if form.startswith("atom") else ""
    return kernel(
        f"{value} and.b32 %r3, %r0, {count - 1}; mad.wide.u32 %d2, %r3, {size}, %d0; "
        f"{form} {dest}[%d2], {operand}; {out}",
        ["a", "o"],
    )


@pytest.mark.parametrize(
    "name,ty,dtype,f",
    [("add", "u32", np.uint32, np.add), ("add", "u64", np.uint64, np.add), ("add", "f32", np.float32, np.add),
     ("add", "f64", np.float64, np.add), ("add.noftz", "f16", np.float16, np.add), ("max", "s32", np.int32, np.maximum),
     ("min", "u32", np.uint32, np.minimum), ("max", "u64", np.uint64, np.maximum),
     ("and", "b32", np.uint32, np.bitwise_and),
     ("or", "b32", np.uint32, np.bitwise_or), ("xor", "b64", np.uint64, np.bitwise_xor)],
)
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_atomics_collide_one_after_the_other(name, ty, dtype, f, order):
    start = np.full(4, 12, dtype)
    for kind in ("red", "atom"):
        cells, found = start.copy(), np.zeros(64, dtype)
        launch_pointers(
            atomic(f"{kind}.global.{name}.{ty}", dtype), 1, 64, [cells, found], atomic_order=order
        ).assert_clean()
        for cell in range(4):
            turn = np.arange(cell, 64, 4)[:: 1 if order == "forward" else -1]
            expected = start[cell]
            for thread in turn:
                if kind == "atom":
                    assert found[thread] == expected
                expected = f(expected, dtype(thread))
            assert cells[cell] == expected


def test_exchange_and_compare():
    body = """atom.global.exch.b32 %r1, [%d0], %r0; atom.global.cas.b32 %r2, [%d0+4], 0, %r0;
        atom.global.inc.u32 %r3, [%d0+8], 5;
        atom.global.dec.u32 %r4, [%d0+12], 5; mad.wide.u32 %d2, %r0, 16, %d1;
        st.global.v4.u32 [%d2], {%r1, %r2, %r3, %r4};"""
    cells, out = np.array([99, 0, 0, 3], np.uint32), np.zeros((32, 4), np.uint32)
    launch_pointers(kernel(body, ["a", "o"]), 1, 32, [cells, out]).assert_clean()
    assert out[:, 0].tolist() == [99, *range(31)] and cells[0] == 31
    assert out[:, 1].tolist() == [0, 0] + [1] * 30 and cells[1] == 1
    assert out[:, 2].tolist() == [i % 6 for i in range(32)] and out[:6, 3].tolist() == [3, 2, 1, 0, 5, 4]


def test_packed_half_atomics():
    cells = np.zeros(2, np.float16)
    body = "cvt.rn.f32.u32 %f1, %r0; cvt.rn.f16x2.f32 %r1, %f1, 0f3F800000; red.global.add.noftz.f16x2 [%d0], %r1;"
    body = body.replace("0f3F800000", "%f2").replace("cvt.rn.f16x2", "mov.f32 %f2, 0f3F800000; cvt.rn.f16x2", 1)
    launch_pointers(kernel(body, ["a"]), 1, 32, [cells]).assert_clean()
    assert cells.tolist() == [32, 31 * 16]


# -- faults ------------------------------------------------------------------------
def test_out_of_bounds_names_thread_buffer_and_line():
    text = elementwise("mov.u32 %o0, %i0;", [4], [4])
    with pytest.raises(MemoryFault) as error:
        launch_pointers(text, 1, 128, [Buf(np.zeros(100, np.uint32), name="table"), np.zeros(128, np.uint32)])
    message = str(error.value)
    for part in (
        "global load of 4 bytes",
        "0 bytes past the end of buffer table of 400 bytes",
        "28 threads",
        "thread (100, 0, 0)",
        "PTX line",
    ):
        assert part in message
    assert error.value.thread == ((0, 0, 0), (100, 0, 0)) and "ld.global" in error.value.instr.text


def test_misaligned():
    raw = np.zeros(4 * 33, np.uint8)
    with pytest.raises(MemoryFault, match="misaligned global load of 4 bytes"):
        launch_pointers(elementwise("mov.u32 %o0, %i0;", [4], [4]), 1, 32, [raw[2:130], np.zeros(32, np.uint32)])


def test_read_only():
    out = np.zeros(32, np.uint32)
    for readonly in (Buf(out, readonly=True), np.broadcast_to(out, (2, 32))[0]):
        with pytest.raises(MemoryFault, match="read-only"):
            launch_pointers(elementwise("mov.u32 %o0, %i0;", [4], [4]), 1, 32, [np.ones(32, np.uint32), readonly])
    assert (out == 0).all()


def test_uninitialised():
    init = np.ones(32, bool)
    init[[3, 7]] = False
    text = elementwise("mov.u32 %o0, %i0;", [4], [4])
    result = launch_pointers(
        text, 1, 32, [Buf(np.zeros(32, np.uint32), init=init), Buf(np.zeros(32, np.uint32), init=False)]
    )
    (hazard,) = result.of("uninit")
    assert hazard.count == 2 and hazard.thread[1] == (3, 0, 0)


def test_coherence_of_the_read_only_path():
    """ld.global.nc of bytes that the kernel writes, before or after."""
    before = "mad.wide.u32 %d2, %r0, 4, %d0; ld.global.nc.u32 %r1, [%d2]; st.global.u32 [%d2], %r1;"
    after = "mad.wide.u32 %d2, %r0, 4, %d0; st.global.u32 [%d2], %r0; ld.global.nc.u32 %r1, [%d2];"
    for body in (before, after):
        result = launch_pointers(kernel(body, ["a"]), 1, 32, [np.zeros(32, np.uint32)])
        assert [h.kind for h in result.hazards] == ["nc-coherence"]
    plain = before.replace(".nc", "")
    launch_pointers(kernel(plain, ["a"]), 1, 32, [np.zeros(32, np.uint32)]).assert_clean()
