"""The backend that a test body runs on, and when the long sweeps run."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: its threads would contend with those of the kernels

import pytest  # noqa: E402

from backends import BACKENDS  # noqa: E402


@pytest.fixture(params=[pytest.param(b, id=b.name, marks=b.marks) for b in BACKENDS])
def backend(request):
    """Makes the arrays of a call and reads its results; see `backends.py`."""
    with request.param.active():
        yield request.param


def pytest_collection_modifyitems(config, items):
    """Leave out the tests marked `long` unless an expression (``-m long``) chooses."""
    if not config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
