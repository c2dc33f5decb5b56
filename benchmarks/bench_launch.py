"""Launching: what a decode call through a prepared plan costs the host, the driver's own work left out.

    python benchmarks/bench_launch.py [--quick]

CuPy and the driver are stand-ins that return at once (tests/cuda_stub.py), so no GPU is needed, and what remains is the
library's share: checking devices, looking up tables and kernels, packing arguments. Each figure is the median over
rounds that ran undisturbed (`common.sample`) of a loop's mean; a decode that is split is two launches.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import common  # noqa: E402
from cuda_stub import Array, Machine, Status  # noqa: E402
from numba_paged.cuda import device  # noqa: E402
from numba_paged.plan import Plan, cut_work  # noqa: E402
from numba_paged.spec import AttentionOptions  # noqa: E402

BUDGET = 15e-6
"""Seconds of host time that a launch may cost."""

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16


def decode_call(backend, batch, context, group=4):
    """A decode call through a plan that is prepared."""
    blocks = -(-context // BLOCK_SIZE)
    pool = (batch * blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = (Array(np.zeros(pool, np.float16)) for _ in range(2))
    keys, values = (Array(x.host.swapaxes(1, 2)) for x in (keys, values))
    q, out = (Array(np.zeros((batch, group * NUM_KV_HEADS, HEAD_DIM), np.float16)) for _ in range(2))
    starts, lengths = np.arange(batch + 1, dtype=np.int32), np.full(batch, context, np.int32)
    tables = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
    tiling = backend.tiling(group, 1)
    plan = Plan(starts, lengths, tables, lambda *cut: cut_work(*cut, BLOCK_SIZE, NUM_KV_HEADS, tiling))
    options = AttentionOptions(HEAD_DIM**-0.5)

    def call():
        backend.attend(q, keys, values, plan, options, out, None)

    return call


def count_launches(machine, call):
    """How many launches a call is."""
    call()
    machine.launches.clear()
    call()
    return len(machine.launches)


def seconds(call, rounds, count):
    """What a call takes."""

    def many():
        for _ in range(count):
            call()

    return float(np.nanmedian(common.paired({"calls": many}, rounds)["calls"])) / count


def main(arguments=None):
    """Print the table; returns the exit code: 1 if a launch is over the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    rounds, count = (5, 50) if parser.parse_args(arguments).quick else (41, 50)
    machine, worst = Machine(), 0.0
    cubins = mock.patch.object(device, "load_cubin", lambda kernel, cc: kernel.name.encode())
    with cubins, machine.installed() as driver:
        from numba_paged.cuda.backend import CudaBackend

        backend = CudaBackend()
        for batch, context in ((1, 1024), (1, 32768), (8, 8192), (64, 1024)):
            call = decode_call(backend, batch, context)
            launches = count_launches(machine, call)
            with mock.patch.object(driver, "cuLaunchKernel", lambda *arguments: (Status.CUDA_SUCCESS,)):
                taken = seconds(call, rounds, count)
            worst = max(worst, taken / launches)
            print(f"batch {batch:>2} x {context:<5}: {taken * 1e6:6.1f} us a call, {launches} launches, "
                  f"{taken / launches * 1e6:5.1f} us each")
    print(f"the most: {worst * 1e6:.1f} us a launch; the budget is {BUDGET * 1e6:.0f} us")
    return int(worst > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
