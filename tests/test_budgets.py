"""What the compiled CUDA kernels may cost: one table of budgets, read from cubins and from counters of the PTX machine.

Raising a budget needs a reason beside it. Counters are exact; nothing here is timed.
"""

import functools
import re

import numpy as np
import ptxrun
import pytest

if ptxrun.missing():
    pytest.skip(ptxrun.missing(), allow_module_level=True)

import cubin  # noqa: E402
from compiled import cubin_of  # noqa: E402
from covering import pairwise  # noqa: E402
from inputs import Shape, decode_problem  # noqa: E402
from numba_paged.cuda import append, codecs, decode, merge, prefill  # noqa: E402
from numba_paged.cuda.backend import CudaBackend  # noqa: E402
from numba_paged.cuda.warp import AttendSpec  # noqa: E402
from ptx_device import DeviceArray, PtxDevice, used_for_device_arrays  # noqa: E402

CCS = ((8, 0), (9, 0), (10, 0))

BUDGETS = {
    # SASS instructions of a warp for one token of a kv head: head_dim 128, 16-bit, decode, by group size. Of these, 8
    # per query head multiply and add, 8 convert.
    "instructions per token": {1: 30, 4: 64, 8: 111},
    # Bytes of keys and values: distinct ones loaded, and all that were asked for, over those of the visible tokens.
    "distinct": 1.0,
    "asked": {1: 1.0, 4: 1.0, 8: 1.0, 12: 1.0, 16: 2.0},  # 16 heads are two tiles of 8
    # Sectors of 32 bytes over the fewest that hold the bytes, keys and values.
    "sectors": 1.0,
    # Extra passes through the banks of shared memory in the loops, by what copies, reads and writes tiles and weights.
    # Only where a row is no whole number of sectors copies collide, since eight rows at once would read half sectors.
    "bank conflicts": 0,
    # Bytes of keys and values on their way to a multiprocessor whose warps all wait.
    "bytes in flight": 32 << 10,
    "local loads and stores": 0,
    "bytes of stack": 0,
}


def attend_spec(group, head_dim=128, kv="float16", block_size=16, cc=(9, 0), q="float16", **flags):
    """An `AttendSpec` for pools that allow the widest accesses."""
    row = head_dim * codecs.ITEMSIZE[codecs.code_of(kv)]
    return AttendSpec(codecs.code_of(q), codecs.code_of(kv, cc), head_dim, group, block_size, min(16, row & -row), **flags)


@functools.cache
def machine_code(kernel, cc):
    """(resources, code, labels) of a kernel."""
    compiled = cubin_of(kernel, cc)
    return cubin.resources(compiled, kernel.name), *cubin.disassemble(compiled, kernel.name)


# ------------------------------------------------------------------- machine code

EVERY_OPTION = {"has_cap": True, "has_bias": True, "has_window": True, "has_sinks": True}
SPECS = [
    dict(group=1), dict(group=4), dict(group=8), dict(group=12, **EVERY_OPTION), dict(group=8, head_dim=256, kv="float32"),
    dict(group=4, kv="float8_e4m3fn"), dict(group=7, head_dim=100, kv="bfloat16", block_size=17),
    dict(group=16, head_dim=192, kv="int8", **EVERY_OPTION), dict(group=5, head_dim=64, block_size=8),
]  # fmt: skip
MORE_SPECS = [
    {**row.pop("flags"), **row} for row in pairwise(
        group=(1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16), head_dim=(2, 8, 20, 64, 80, 96, 100, 112, 128, 192, 256),
        kv=("float32", "float16", "float8_e4m3fn", "int8"), block_size=(1, 8, 16, 17, 256), flags=({}, EVERY_OPTION))
]  # fmt: skip


def assert_no_local_memory(kernel, cc):
    used, code, _ = machine_code(kernel, cc)
    local = [i.opcode for i in code if i.name in ("LDL", "STL")]
    assert len(local) <= BUDGETS["local loads and stores"] and used.stack <= BUDGETS["bytes of stack"]


def assert_wide_copies(kernel, cc):
    """Keys and values come by accesses of `copy_bytes`; asynchronous ones have at least 4."""
    _, code, _ = machine_code(kernel, cc)
    wanted = {kernel.spec.copy_bytes} if kernel.spec.copy_bytes >= 4 else set()
    assert {i.access_bytes for i in code if i.name == "LDGSTS"} == wanted


@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("facts", SPECS, ids=lambda facts: "-".join(map(str, facts.values())))
def test_attention_stays_in_registers_and_copies_wide(facts, cc):
    spec = attend_spec(cc=cc, **facts)
    for kernel in (decode.decode_kernel(spec), prefill.prefill_kernel(spec)):
        assert_no_local_memory(kernel, cc)
        assert_wide_copies(kernel, cc)


@pytest.mark.long
@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("facts", MORE_SPECS, ids=lambda facts: "-".join(map(str, facts.values())))
def test_attention_stays_in_registers_everywhere(facts, cc):
    test_attention_stays_in_registers_and_copies_wide(facts, cc)


@pytest.mark.parametrize("cc", CCS)
def test_the_other_kernels_stay_in_registers(cc):
    f16, e4m3 = codecs.FLOAT16, codecs.code_of("float8_e4m3fn", cc)
    for kernel in (append.append_kernel(append.AppendSpec(f16, f16, 8, 128, 16, 8, False)),
                   append.append_kernel(append.AppendSpec(f16, e4m3, 8, 128, 16, 8, True)),
                   append.copy_kernel(append.CopySpec(16, 8, 256, 16)),
                   merge.merge_kernel(merge.MergeSpec(codecs.FLOAT32, f16, 128, 4, True))):
        assert_no_local_memory(kernel, cc)


def instructions_per_token(kernel, shape, cc):
    """SASS instructions of a warp's loop for one token, of a tile that is wholly visible.

    The loop over tiles has a branch for tiles that are not (their copies are predicated), and inner loops over the
    numbers of the head and over the tokens; how often those turn follows from their multiply-adds.
    """
    _, code, labels = machine_code(kernel, cc)
    tile_loop = cubin.main_loop(code, labels)
    inner = [loop for loop in cubin.loops(tile_loop, labels) if len(loop) < len(tile_loop)]
    inner = sorted((loop for loop in inner if multiply_adds(loop)), key=lambda loop: loop[0].address)
    layout = shape.layout
    needed = [shape.num_rows * layout.chunks * layout.chunk_numbers,
              shape.num_rows * layout.numbers * layout.tokens // layout.groups]
    outside = {i.address for i in tile_loop} - {i.address for loop in inner for i in loop}
    count = sum(len(block) for block in basic_blocks(tile_loop, labels)
                if block[0].address in outside and not any(is_predicated_copy(i) for i in block))
    if len(inner) == 1 and multiply_adds(inner[0]) % needed[0]:
        needed = needed[::-1] if needed[1] % multiply_adds(inner[0]) == 0 and needed[0] % multiply_adds(inner[0]) else needed
    return (count + sum(len(loop) * n / multiply_adds(loop) for loop, n in zip(inner, needed))) / layout.tokens


def multiply_adds(code):
    return sum(i.name == "FFMA" for i in code)


def is_predicated_copy(instruction):
    return instruction.name == "LDGSTS" and re.search(r",\s*!?U?P\d", instruction.operands) is not None


def basic_blocks(code, labels):
    """Runs of instructions without a branch into or out of them."""
    targets, blocks = set(labels.values()), [[]]
    for i in code:
        if i.address in targets:
            blocks.append([])
        blocks[-1].append(i)
        if i.name in ("BRA", "EXIT"):
            blocks.append([])
    return [block for block in blocks if block]


@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("group", BUDGETS["instructions per token"])
def test_instructions_per_token(group, cc):
    spec = attend_spec(group)
    counted = instructions_per_token(decode.decode_kernel(spec), decode.decode_shape(spec), cc)
    least = 8 + 8 * group  # conversions, multiply-adds
    assert least < counted <= BUDGETS["instructions per token"][group]


@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("facts", SPECS, ids=lambda facts: "-".join(map(str, facts.values())))
def test_bytes_in_flight(facts, cc):
    """Two of the three tiles of each warp's ring are on their way while it works on one."""
    spec = attend_spec(cc=cc, **facts)
    kernel, shape = decode.decode_kernel(spec), decode.decode_shape(spec)
    used, _, _ = machine_code(kernel, cc)
    blocks = cubin.resident_blocks(cc, used.registers, kernel.num_threads, kernel.shared_bytes)
    flying = blocks * shape.num_warps * 2 * shape.layout.tokens * shape.layout.row
    assert flying >= BUDGETS["bytes in flight"]


# ------------------------------------------------------------------- counters of a run


@functools.cache
def run_decode(group, cc=(9, 0), length=1000, options=(), **facts):
    """(launch, bytes of the visible keys) of a decode of one sequence, float32 queries, pools and launch named."""
    shape = Shape(group, 1, facts.get("head_dim", 128), facts.get("block_size", 16), "float32", facts.get("kv", "float16"))
    problem = decode_problem(shape, [length], layout="HND")
    device = PtxDevice(cc)
    device.memory.add(problem.keys, name="keys")
    device.memory.add(problem.values, name="values")

    class Arrays:
        asarray, asnumpy = staticmethod(DeviceArray), staticmethod(lambda array: array.host)

        def weight_rounding(self, *dtypes):
            return 0.0

    with used_for_device_arrays(CudaBackend(device)):
        problem.check(Arrays(), split_size=length, **dict(options))
    (launch,) = device.launches
    return launch, length * shape.head_dim * problem.keys.itemsize


@pytest.mark.parametrize("group", BUDGETS["asked"])
def test_keys_and_values_are_read_once_a_group(group):
    launch, needed = run_decode(group)
    for name in ("keys", "values"):
        count = launch.result.stats.by_buffer[name]
        assert count.distinct_loaded <= BUDGETS["distinct"] * needed
        assert needed <= count.loaded <= BUDGETS["asked"][group] * needed


@pytest.mark.parametrize("facts", [{}, {"kv": "float8_e4m3fn"}, {"head_dim": 64, "block_size": 17}, {"head_dim": 80},
                                   {"head_dim": 96, "block_size": 8}, {"head_dim": 96, "kv": "float8_e4m3fn"}],
                         ids=lambda facts: "-".join(map(str, facts.values())) or "128")
@pytest.mark.parametrize("cc", CCS)
def test_copies_fill_their_sectors_and_banks_do_not_collide(facts, cc):
    launch, _ = run_decode(4, cc, **facts)
    stats = launch.result.stats
    copies = [count for pc, count in stats.global_access.items() if stats.instrs[pc].op.startswith("cp.async")]
    sectors, ideal = sum(c.sectors for c in copies), sum(c.ideal for c in copies)
    assert sectors <= BUDGETS["sectors"] * ideal or sectors * 32 <= 1.02 * sum(c.bytes for c in copies)
    busiest = max(c.requests for pc, c in stats.shared_access.items() if stats.instrs[pc].name == "ld")
    loops = [c for c in stats.shared_access.values() if c.requests >= busiest // 4]
    assert loops and sum(c.wavefronts - c.ideal for c in loops) == BUDGETS["bank conflicts"]


@pytest.mark.parametrize("cc", CCS[1:])
def test_options_cost_nothing_where_they_are_off(cc):
    """Each option adds instructions where it is on; without any, none of its instructions is there."""
    slopes, sinks = np.full(4, 0.1, np.float32), np.zeros(4, np.float32)
    launch, _ = run_decode(4, cc, 300)
    plain = launch.result.stats
    for name, value in (("soft_cap", 5.0), ("window", 299), ("alibi_slopes", slopes), ("sinks", sinks)):
        with_option = run_option(name, value, cc)
        assert with_option.warp_instructions > plain.warp_instructions, name
    classes = plain.by_class
    exponentials = 4 * 2 * -(-300 // 16)  # decay and weight, a head and tile
    assert classes["sfu"] <= exponentials + 64  # and the merging of the warps


def run_option(name, value, cc):
    launch, _ = run_decode.__wrapped__(4, cc, 300, options=((name, value),))
    return launch.result.stats
