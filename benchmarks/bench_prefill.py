"""Prefill: prompts and chunks of prompts over a paged cache, in GFLOP/s, against others.

    python benchmarks/bench_prefill.py [--quick]

Every result is compared with a float64 oracle first. Then competitors take turns (`common.paired`). Only what the
causal mask leaves counts as work. Peers that are installed join in (`peers`).
"""

import argparse

import numpy as np

import common
import numba_paged as npg
import peers


def measure(label, lengths, num_queries, dtype, rounds):
    """Check, time and print one case."""
    case = common.make_case(lengths, num_queries, dtype=dtype)
    q, keys, values, tables, lengths, starts = case
    out = npg.prefill(q, keys, values, tables, lengths, starts)
    error = common.check(case, out)
    functions = {"ours": lambda: npg.prefill(q, keys, values, tables, lengths, starts, out=out)}
    times = common.paired(functions | peers.agreeing(case, out, causal=True), rounds)
    ours = np.median(times["ours"])
    others = "  ".join(f"{name} {common.ratio(times[name], times['ours']):.2f}x" for name in times if name != "ours")
    print(f"{dtype:14s} {label:34s} error {error:.0e} {ours * 1e3:9.1f} ms {case.num_operations / ours / 1e9:6.0f} GFLOP/s  "
          f"{others}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short prompt in each format, within a minute")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if line := peers.missing():
        print(line)
    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn"):
        if arguments.quick:
            measure("512 tokens", [512], 512, dtype, 3)
            continue
        measure("2048 tokens", [2048], 2048, dtype, arguments.rounds)
        measure("256 tokens after 3840", [4096], 256, dtype, arguments.rounds)
        measure("8 prompts of 512", [512] * 8, 512, dtype, arguments.rounds)
    print(common.summary())


if __name__ == "__main__":
    main()
