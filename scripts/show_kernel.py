"""What a kernel is made of, without a GPU: registers, stack, SASS of the inner loop, counters, bytes in flight.

    python scripts/show_kernel.py SPEC [SPEC ...]

A SPEC is an operation and facts, by commas: ``decode``, ``prefill,group=8,kv=float8_e4m3fn``, ``decode,cc=10.0``.
Facts and what they are if left out: cc=9.0 group=4 head_dim=128 block=16 q=float16 kv=float16 length=1000 queries=1 (33
for prefill) kv_heads=1, and the options of `numba_paged.decode` that are numbers (window, soft_cap, split_size). The
attention runs on the tests' PTX machine; every kernel that it launches is shown, and why it was chosen. Of a decode, so
is what one more token in the cache costs, beside the figure of a kernel on plain cores without sharing among the heads
of a group: vLLM's paged_attention_v2, 31.5 warp instructions for each query head (nvcc 13.0, head_dim 128, 16 bits).
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import cubin as machine_code  # noqa: E402
import numba_paged as npg  # noqa: E402
from numba_paged.cuda.backend import CudaBackend  # noqa: E402
from numba_paged.cuda.choose import choose, item_sizes  # noqa: E402
from numba_paged.cuda.compile import compile_cubin  # noqa: E402
from numba_paged.cuda.warp import AttendSpec  # noqa: E402
from numba_paged.formats import FORMATS  # noqa: E402
from ptx_device import DeviceArray, PtxDevice, used_for_device_arrays  # noqa: E402

FACTS = {"cc": "9.0", "group": 4, "head_dim": 128, "block": 16, "q": "float16", "kv": "float16", "length": 1000,
         "queries": 1, "kv_heads": 1}
VLLM_V2 = 31.5
"""Warp instructions of vLLM's paged_attention_v2 for a token of keys and values and one query head."""

OPTIONS = {"window": int, "soft_cap": float, "split_size": int}


def parse(text):
    """An operation, its facts and its options from a SPEC; ValueError says what is wrong with it."""
    operation, *pairs = text.split(",")
    if operation not in ("decode", "prefill"):
        raise ValueError(f"{text}: the operation must be decode or prefill, got {operation!r}")
    facts, options = {**FACTS, "queries": 33 if operation == "prefill" else 1}, {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name in OPTIONS:
            options[name] = OPTIONS[name](value)
        elif name in facts:
            facts[name] = type(facts[name])(value)
        else:
            raise ValueError(f"{text}: {name!r} is none of {', '.join((*FACTS, *OPTIONS))}")
    return operation, facts, options


def launch(operation, facts, options):
    """Run one attention call on the PTX machine; returns the device, which knows what was launched."""
    device = PtxDevice(tuple(map(int, facts["cc"].split("."))), num_multiprocessors=1)
    rng = np.random.default_rng(0)
    blocks = -(-facts["length"] // facts["block"])
    pool = (blocks, facts["kv_heads"], facts["block"], facts["head_dim"])
    keys, values = (rng.standard_normal(pool, np.float32).astype(FORMATS[facts["kv"]].dtype).swapaxes(1, 2)
                    for _ in range(2))
    q = rng.standard_normal((facts["queries"], facts["group"] * facts["kv_heads"], facts["head_dim"]), np.float32)
    for name, array in (("keys", keys), ("values", values)):
        device.memory.add(array, name=name)
    tables, lengths = rng.permutation(blocks).astype(np.int32)[None], np.array([facts["length"]], np.int32)
    arrays = [DeviceArray(x) for x in (q.astype(FORMATS[facts["q"]].dtype), keys, values)]
    with used_for_device_arrays(CudaBackend(device)):
        if operation == "decode":
            npg.decode(*arrays, tables, lengths, **options)
        else:
            npg.prefill(*arrays, tables, lengths, np.array([0, facts["queries"]], np.int32), **options)
    return device


def bytes_in_flight(result, num_warps, loop):
    """About how many bytes of global memory so many warps are waiting for at once, and how that was found.

    Where copies are asynchronous, a warp waits for its oldest group while the younger ones are on their way; the size
    of a group is the mean of the run. Elsewhere it is what one turn of the inner loop asks for.
    """
    stats = result.stats
    groups = sum(n for i, n in zip(stats.instrs, stats.warp_counts, strict=True) if i.op == "cp.async.commit_group")
    if not groups:
        return num_warps * machine_code.loaded_bytes(loop), "a turn of the inner loop"
    copied = sum(count.bytes for pc, count in stats.global_access.items() if stats.instrs[pc].op.startswith("cp.async"))
    younger = max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", result.ptx)), default=0)
    return num_warps * (younger + 1) * copied // groups, f"{younger + 1} groups of copies of {copied // groups} bytes"


def reason(kernel, cc):
    """Why a kernel was chosen, as text; empty for one that does not attend."""
    spec = getattr(kernel.spec, "attend", kernel.spec)
    if not isinstance(spec, AttendSpec):
        return ""
    choices = (choose(spec, cc, size) for size in item_sizes(spec.group, spec.head_dim, 64))
    return next(f"\n  {choice.why}" for choice in choices if choice.kernel is kernel)


def compare(facts):
    """What a decode pays for one more token of a sequence, ours and vLLM's, as text."""
    devices = [launch("decode", {**facts, "length": length}, {"split_size": length}) for length in (512, 1024)]
    counts = [sum(run.result.stats.warp_instructions for run in device.launches) for device in devices]
    ours, theirs = (counts[1] - counts[0]) / 512 / facts["kv_heads"], VLLM_V2 * facts["group"]
    return (f"one more token of a kv head, group {facts['group']}: {ours:.1f} warp instructions (PTX, executed); "
            f"vLLM v2 {theirs:.1f} (SASS)\n")


def describe(kernel, result, cc):
    """What there is to say of a kernel, as text."""
    cubin = compile_cubin(kernel, cc)
    used = machine_code.resources(cubin, kernel.name)
    code, labels = machine_code.disassemble(cubin, kernel.name)
    loop = machine_code.main_loop(code, labels)
    blocks = machine_code.resident_blocks(cc, used.registers, kernel.num_threads, kernel.shared_bytes)
    warps = blocks * kernel.num_threads // machine_code.WARP
    flying, found = bytes_in_flight(result, warps, loop)
    spills = sum(count for opcode, count in machine_code.mix(code).items() if opcode[:3] in ("LDL", "STL"))
    shown = ", ".join(f"{opcode} {count}" for opcode, count in machine_code.mix(loop).items())
    return f"""{kernel.name} for compute capability {cc[0]}.{cc[1]}: {kernel.spec}{reason(kernel, cc)}
  {used.registers} registers, {used.stack} bytes of stack, {spills} local loads and stores, {len(code)} instructions
  a block: {kernel.num_threads} threads, {kernel.shared_bytes} bytes of shared memory; {blocks} ({warps} warps) fit
  inner loop, {len(loop)} instructions: {shown or "none that loads"}
  about {flying} bytes in flight on a multiprocessor: {found} a warp
  on the PTX machine: {result.stats.report(top=5).replace(chr(10), chr(10) + "    ")}
"""


def main(arguments=None):
    """Show kernels; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="+")
    try:
        for text in parser.parse_args(arguments).spec:
            operation, facts, options = parse(text)
            device = launch(operation, facts, options)
            for kernel in dict.fromkeys(run.kernel for run in device.launches):
                result = next(run.result for run in device.launches if run.kernel is kernel)
                print(describe(kernel, result, device.compute_capability))
            if operation == "decode" and not options:
                print(compare(facts))
    except (ValueError, FileNotFoundError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
