"""The short run on a machine with a GPU: every test marked `gpu`, then decode and prefill against the clock.

    python scripts/check_device.py [--seconds 480] [--no-tests] [--dry-run]

One process, under 8 minutes. Speed is given in GB/s of keys and values, each read once, in % of a device-to-device copy
of the same run, and in TFLOP/s; a prefill is a chunk of queries at the end of the context. Where tensor cores serve a
case, plain cores are timed beside them, and peers where they import. A short table comes last; everything is written to
benchmarks/results. The exit code is 0 if all tests passed and all results were right. With --dry-run the same steps run
on the tests' PTX machine, small and without times.
"""

import argparse
import json
import sys
import time

from device_cases import ROOT, Case, Gpu, Ready, Simulator
from device_peers import Peers

GROUPS = (1, 4, 8)
SIZES = ((1, 1024), (1, 32768), (8, 8192), (64, 1024), (64, 8192))
DRY_GROUPS, DRY_SIZES = (4,), ((1, 33),)
KV_DTYPES = ("float16", "float8_e4m3fn")
OPERATIONS = ("decode", "prefill")
TESTS_SHARE = 0.5
"""Of the time, for the tests."""


class Tests:
    """Counts outcomes, and ends the session when its time is over."""

    def __init__(self, deadline):
        self.deadline = deadline
        self.counts = {"passed": 0, "failed": 0, "skipped": 0, "left out": 0}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1

    def pytest_collection_finish(self, session):
        self.counts["left out"] = len(session.items)

    def pytest_runtest_logfinish(self, nodeid, location):
        self.counts["left out"] -= 1

    def pytest_runtest_protocol(self, item):
        if time.perf_counter() > self.deadline:
            item.session.shouldstop = "no time left for the other tests"


def run_tests(deadline, *arguments):
    """Run the tests marked `gpu`, but for the long sweeps.

    Returns
    -------
    dict of str to int
        How many passed, failed, were skipped and left out; "exit code" is pytest's.
    """
    import pytest

    tests = Tests(deadline)
    marked = ["-q", "-m", "gpu and not long", "--rootdir", str(ROOT), str(ROOT / "tests")]
    code = pytest.main([*(arguments or marked)], plugins=[tests])
    return {**tests.counts, "exit code": int(code)}


def cases(groups, sizes):
    """Every case, the smallest first."""
    for batch, context in sorted(sizes, key=lambda size: size[0] * size[1]):
        for operation in OPERATIONS:
            for kv_dtype in KV_DTYPES:
                for group in groups:
                    yield Case(operation, group, batch, context, kv_dtype)


def measure(place, peers, case, copy):
    """One row: how long a case takes, and whether it is right."""
    ready = Ready(case, place)
    seconds = place.seconds(ready.attend)
    row = {**vars(case), "seconds": seconds, "bytes_per_second": case.num_bytes / seconds,
           "share_of_copy": case.num_bytes / seconds / copy, "flops_per_second": case.num_flops / seconds,
           "host_seconds": place.host_seconds(ready.attend), "plain_seconds": None, "wrong": None}
    try:
        ready.check()
    except AssertionError as error:
        row["wrong"] = str(error)
    if ready.on_tensor_cores:
        row["plain_seconds"] = place.seconds(ready.attend_plain)
    return {**row, "peers": peers.seconds(ready) if peers else {}}


def name(row):
    """A row's case but for the group."""
    return f"{row['operation']:8} {row['batch']:>3} x {row['context']:<6} {row['kv_dtype']:<14}"


def detail(row):
    """All of a row, for people."""
    others = ({} if row["plain_seconds"] is None else {"plain cores": row["plain_seconds"]}) | row["peers"]
    beside = "".join(f"  {other} {seconds * 1e3:.3f} ms" for other, seconds in others.items())
    return (f"{name(row)} group {row['group']}: {row['seconds'] * 1e3:9.3f} ms "
            f"{row['bytes_per_second'] / 1e9:8.0f} GB/s {row['flops_per_second'] / 1e12:8.2f} TFLOP/s, "
            f"host {row['host_seconds'] * 1e6:5.1f} us{beside}"
            f"{'  WRONG: ' + row['wrong'] if row['wrong'] else ''}")


def table(rows):
    """A line for each case, a column for each group: % of a copy, how many times as fast as on plain cores (t), and as
    the fastest peer (x)."""
    lines = {}
    for row in rows:
        cell = f"{100 * row['share_of_copy']:5.0f} %"
        if row["plain_seconds"] is not None:
            cell += f" t{row['plain_seconds'] / row['seconds']:5.2f}"
        if row["peers"]:
            cell += f" x{min(row['peers'].values()) / row['seconds']:5.2f}"
        lines.setdefault(name(row), []).append(f"{'WRONG' if row['wrong'] else cell:>24}")
    groups = "".join(f"{f'group {group}':>24}" for group in dict.fromkeys(row["group"] for row in rows))
    return "\n".join([f"{'':34}{groups}", *(f"{case}{''.join(cells)}" for case, cells in lines.items())])


def report(result):
    """What there is to say at the end."""
    print(f"\n{result['device']}: a copy moves {result['copy_bytes_per_second'] / 1e9:.0f} GB/s, read and written. "
          "Keys and values read, in % of that; how many times as fast as on plain cores (t), as the fastest peer (x):")
    print(table(result["rows"]))
    for peer, reason in result["peers_missing"].items():
        print(f"{peer} is not timed: {reason}")
    if result["cases_left_out"]:
        print(f"{result['cases_left_out']} cases were left out: no time")
    if result["tests"]:
        print("tests: " + ", ".join(f"{count} {what}" for what, count in result["tests"].items()))


def write(result):
    """The result as JSON; returns the file."""
    path = ROOT / "benchmarks" / "results" / f"device-{result['device'].replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def main(arguments=None):
    """Run everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=480, help="the time for everything")
    parser.add_argument("--no-tests", action="store_true", help="only the timings")
    parser.add_argument("--dry-run", action="store_true", help="on the PTX machine, without a GPU")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        place = Simulator() if options.dry_run else Gpu()
    except RuntimeError as error:
        print(f"There is no GPU to check: {error}")
        return 1
    tests = {} if options.no_tests or options.dry_run else run_tests(start + TESTS_SHARE * options.seconds)
    peers = None if options.dry_run else Peers()
    copy, rows, left_out = place.copy_bandwidth(), [], 0
    for case in cases(DRY_GROUPS, DRY_SIZES) if options.dry_run else cases(GROUPS, SIZES):
        if time.perf_counter() - start > 0.95 * options.seconds:
            left_out += 1
            continue
        rows.append(measure(place, peers, case, copy))
        print(detail(rows[-1]), flush=True)
    result = {"device": place.name, "copy_bytes_per_second": copy, "seconds": time.perf_counter() - start,
              "tests": tests, "peers_missing": peers.missing if peers else {}, "cases_left_out": left_out, "rows": rows}
    if not options.dry_run:
        print(f"\nwritten to {write(result)}")
    report(result)
    return 1 if tests.get("exit code", 0) or any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
