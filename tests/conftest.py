"""The backend that a test body runs on, and when the long sweeps run."""

import os
from collections import Counter

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: its threads would contend with those of the kernels

import pytest  # noqa: E402

from backends import BACKENDS  # noqa: E402


@pytest.fixture(params=[pytest.param(b, id=b.id, marks=b.marks) for b in BACKENDS])
def backend(request):
    """Makes the arrays of a call and reads its results; see `backends.py`."""
    with request.param.active():
        yield request.param


def mark_long_rows(items):
    """Of a test marked `sampled(n)`, mark all but every n-th row `long` on a backend that compiles a kernel for each."""
    seen = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        backend = item.callspec.params["backend"] if sampled else None
        if sampled and backend.name == "cuda":
            rows = item.parent.nodeid, item.originalname, backend.id
            if seen[rows] % sampled.args[0]:
                item.add_marker(pytest.mark.long)
            seen[rows] += 1


def pytest_collection_modifyitems(config, items):
    """Leave out the tests marked `long` unless an expression (``-m long``) chooses."""
    mark_long_rows(items)
    if not config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_terminal_summary(terminalreporter):
    """Say why tests were skipped, each reason once: without a GPU half of the tests have the same."""
    for reason, count in Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())).items():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
