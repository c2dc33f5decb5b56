"""The CPU kernels beside each other: vector widths, the plain kernel, threads, the disk cache, the threading layer."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from backends import CPU
from inputs import Q_DTYPES, Shape, decode_problem, prefill_problem
from numba_paged.backend import load_backend
from numba_paged.cpu import launch, machine, threads

ROOT = Path(__file__).parent.parent
BACKEND = CPU()
CODE = {
    "features": "from numba_paged.cpu import machine; print(machine.LANES, machine.HAS_BFLOAT16_DOT)",
    "misses": """
from inputs import Shape, decode_problem, prefill_problem
from backends import CPU
from numba.core import event
with event.install_recorder("numba:compile") as recorder:
    decode_problem(Shape(), [40]).check(CPU())
    prefill_problem(Shape(), [40], 40).check(CPU())
print(sum("numba_paged/cpu" in str(e.data["dispatcher"].py_func.__code__.co_filename) for _, e in recorder.buffer))
""",
    "layer": """
from inputs import Shape, decode_problem
from backends import CPU
import numba
decode_problem(Shape(), [40]).check(CPU())
print(numba.threading_layer())
""",
}


def run(code, **environment):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": paths, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def problems(shape):
    """Ragged decode, and prefill with few and with many query rows."""
    yield decode_problem(shape, [1, 0, 17, 33, 100])
    yield prefill_problem(shape, [1, 2, 40, 100], [1, 5, 3, 70])


@pytest.fixture(params=[0, 8, pytest.param(4, marks=pytest.mark.long)])
def lanes(request, monkeypatch):
    """The kernels of another vector width than the machine's, as far as it can run them; 0 is the plain one."""
    if request.param > machine.LANES:
        pytest.skip(f"vectors of {request.param} numbers: this machine has {machine.LANES}")
    monkeypatch.setattr(launch, "LANES", request.param)
    monkeypatch.setattr(launch, "HAS_BFLOAT16_DOT", False)


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("float16", "float8_e5m2", "int8")]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn", *LONG])
def test_every_vector_width(lanes, kv_dtype):
    q_dtype = kv_dtype if kv_dtype in Q_DTYPES else "float32"
    for head_dim, group in ((80, 3), (8, 1)):
        for problem in problems(Shape(2 * group, 2, head_dim, 16, q_dtype, kv_dtype)):
            problem.check(BACKEND)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9])
def test_every_register_tile(group):
    """Query heads in fours, pairs and ones."""
    for problem in problems(Shape(2 * group, 2, 48)):
        problem.check(BACKEND)


def test_options_on_every_vector_width(lanes):
    heads = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    for options in ({"window": 9}, {"soft_cap": 2.0, "alibi_slopes": heads}, {"sinks": heads, "split_size": 32}):
        for problem in problems(Shape()):
            problem.check(BACKEND, **options)


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_no_result_depends_on_the_number_of_threads(q_dtype):
    every = numba.get_num_threads()
    for problem in problems(Shape(q_dtype=q_dtype, kv_dtype=q_dtype)):
        want = problem.attend(BACKEND, split_size=32)
        try:
            numba.set_num_threads(1)
            got = problem.attend(BACKEND, split_size=32)
        finally:
            numba.set_num_threads(every)
        assert got.out.tobytes() == want.out.tobytes() and got.lse.tobytes() == want.lse.tobytes()


def test_hidden_nan_in_a_tile_that_others_see():
    """The kernel for few rows: each row over its own keys."""
    problem = prefill_problem(Shape(), [40], 6)
    at = problem.block_tables[0, 2], 37 % 16
    problem.keys[at] = problem.values[at] = np.nan
    hit = np.isnan(problem.attend(BACKEND).out).any(axis=(1, 2))
    np.testing.assert_array_equal(hit, [False, False, False, True, True, True])


def test_numba_cpu_name_chooses_the_kernels():
    """No vector code for a generic processor, vectors of 8 where there is AVX2 alone."""
    assert run(CODE["features"], NUMBA_CPU_NAME="generic")[0] in ("0", "4")
    features = run(CODE["features"], NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+fma,+f16c")
    if machine.LANES >= 8:
        assert features == ["8", "False"]


def test_a_generic_processor_gets_right_results(tmp_path):
    run(CODE["layer"], NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR=str(tmp_path))


def test_a_second_process_compiles_nothing(tmp_path):
    assert int(run(CODE["misses"], NUMBA_CACHE_DIR=str(tmp_path))[-1]) > 0
    assert run(CODE["misses"], NUMBA_CACHE_DIR=str(tmp_path)) == ["0"]


@pytest.mark.skipif(not threads.load_tbb(), reason="the wheel tbb is not installed")
def test_tbb_carries_the_threads():
    assert run(CODE["layer"], NUMBA_THREADING_LAYER="default") == ["tbb"]


def test_the_user_chooses_the_threading_layer():
    assert run(CODE["layer"], NUMBA_THREADING_LAYER="workqueue") == ["workqueue"]


def huge_pages():
    """Whether the system gives huge pages to those who ask for them."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not huge_pages(), reason="the system offers no huge pages")
def test_a_large_pool_is_on_huge_pages():
    """A quarter is proof that they were asked for; the rest may find none free."""
    pool = load_backend("cpu").zeros((1 << 27,), np.uint8)
    pool[:] = 1
    address, inside, found = pool.ctypes.data, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, stop = (int(edge, 16) for edge in first.split("-"))
            inside = start < address + pool.nbytes and address < stop
        elif inside and first == "AnonHugePages:":
            found += int(line.split()[1]) << 10
    assert found > pool.nbytes // 4
