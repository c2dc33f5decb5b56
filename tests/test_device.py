"""Compiling without a driver, the cache of compiled kernels, launching: what reaches the driver, what is refused."""

import gc
import importlib
import logging
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import ptxrun
import pytest

if ptxrun.missing():
    pytest.skip(ptxrun.missing(), allow_module_level=True)

from cuda_stub import Array, Machine, Status  # noqa: E402
from numba_paged.cuda import compile, cubin_cache  # noqa: E402
from numba_paged.cuda.backend import CudaBackend  # noqa: E402
from numba_paged.cuda.codecs import FLOAT32  # noqa: E402
from numba_paged.cuda.device import OLDEST, CudaDevice, packed  # noqa: E402
from numba_paged.cuda.intrinsics import unary_f32  # noqa: E402
from numba_paged.cuda.memory import store_global  # noqa: E402
from numba_paged.plan import Plan, cut_work  # noqa: E402
from numba_paged.spec import AttentionOptions, AttentionSpec  # noqa: E402
from ptx_device import DeviceArray, PtxDevice  # noqa: E402
from small_kernel import NUM_THREADS, PARAMETERS, scale_kernel  # noqa: E402

CC = (9, 0)


class Owner:
    """Whatever a plan is."""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A cache of compiled kernels that starts empty."""
    monkeypatch.setenv("NUMBA_PAGED_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def cubin():
    """The small kernel's machine code, compiled once."""
    return compile.compile_cubin(scale_kernel(), CC)


@pytest.fixture
def machine(monkeypatch, directory, cubin):
    """One GPU that only keeps a record; every kernel is the small one."""
    monkeypatch.setattr(cubin_cache, "compile_cubin", lambda kernel, cc: cubin)
    machine = Machine(num_parameters=len(PARAMETERS))
    with machine.installed():
        yield machine


# ------------------------------------------------------------------- compiling


@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)])
def test_a_kernel_computes_on_the_ptx_device(cc):
    device = PtxDevice(cc)
    source, target = device.array(np.arange(200, dtype=np.float32)), device.empty(70, np.float32)
    device.launch(scale_kernel(), (3,), (device.address(target), device.address(source), 70, 0.5, 10))
    assert np.array_equal(device.to_host(target, "target"), (10 + 2 * np.arange(70)) * np.float32(0.5))
    (launch,) = device.launches
    assert launch.grid == (3, 1, 1) and launch.arguments["count"] == 70 and launch.result.stats.warps == 3


def test_the_ptx_device_sees_what_a_gpu_hides():
    device, zeros = PtxDevice(CC), np.zeros(10, np.float32)
    written, unwritten = (device.address(x) for x in (device.array(zeros), device.empty(10, np.float32)))
    (table,) = device.upload(zeros).addresses
    with pytest.raises(ptxrun.MemoryFault, match="0 bytes past the end"):
        device.launch(scale_kernel(1), (1,), (unwritten, table, 11, 1.0, 0))
    with pytest.raises(AssertionError, match="never written"):
        device.launch(scale_kernel(1), (1,), (written, device.address(device.empty(10, np.float32)), 1, 1.0, 0))
    with pytest.raises(ptxrun.MemoryFault, match="read-only"):
        device.launch(scale_kernel(1), (1,), (table, written, 1, 1.0, 0))


def test_a_kernel_has_the_name_and_bounds_that_it_was_given(cubin):
    kernel = scale_kernel()
    ptx = compile.compile_ptx(kernel, CC)
    assert ".visible .entry scale(" in ptx and f".maxntid {NUM_THREADS}" in ptx and "minnctapersm" not in ptx
    assert "_ZN" not in ptx  # neither Numba's names, which differ from process to process, nor its variables
    bounded = compile.Kernel("scale", kernel.make, kernel.spec, PARAMETERS, NUM_THREADS, min_blocks=4)
    assert ".minnctapersm 4" in compile.compile_ptx(bounded, CC)
    assert cubin.startswith(b"\x7fELF") and b"scale" in cubin


def test_what_the_assembler_says_is_in_the_error():
    wrong = unary_f32("ex2.nowhere.f32")

    def make(spec):
        def kernel(target):
            store_global(FLOAT32, False, target, (wrong(np.float32(1)),))

        return kernel

    with pytest.raises(RuntimeError, match=r"capability 9\.0: .*Unknown modifier .\.nowhere"):
        compile.compile_cubin(compile.Kernel("wrong", make, 0, {"target": PARAMETERS["target"]}, NUM_THREADS), CC)


def test_numba_still_asks_the_real_device_afterwards(monkeypatch):
    def real():
        raise RuntimeError("the real one")

    monkeypatch.setattr(compile.dispatcher, "get_current_device", real)
    compile.compile_ptx(scale_kernel(), CC)
    assert compile.dispatcher.get_current_device is real and gc.isenabled()


# ------------------------------------------------------------------- the cache on disk

IN_ANOTHER_PROCESS = """
import time
from numba_paged.cuda import cubin_cache
from small_kernel import scale_kernel
cubin_cache.compile_cubin = lambda kernel, cc: exit("compiled again")
start = time.perf_counter()
print(len(cubin_cache.load_cubin(scale_kernel(), (9, 0))))
"""


def test_another_process_finds_the_kernel(directory, cubin, monkeypatch):
    monkeypatch.setattr(cubin_cache, "compile_cubin", lambda kernel, cc: cubin)
    cubin_cache.load_cubin(scale_kernel(), CC)
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    found = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], env={**os.environ, "PYTHONPATH": paths},
                           capture_output=True, text=True, check=False)
    assert found.stdout.strip() == str(len(cubin)), found.stderr


def test_what_is_compiled_is_said_once(directory, cubin, monkeypatch, caplog):
    monkeypatch.setattr(cubin_cache, "compile_cubin", lambda kernel, cc: cubin)
    with caplog.at_level(logging.INFO, "numba_paged"):
        assert cubin_cache.load_cubin(scale_kernel(), CC) == cubin
        assert cubin_cache.load_cubin(scale_kernel(), CC) == cubin
    assert [r.getMessage()[:9] for r in caplog.records] == ["compiling", "compiled "]
    assert "compiling scale for compute capability 9.0: ScaleSpec(stride=2)" in caplog.text


def test_the_key_holds_all_that_decides_the_code():
    kernel = scale_kernel()
    others = [scale_kernel(3)]
    for name, value in (("name", "scales"), ("num_threads", 64), ("min_blocks", 2), ("make", lambda spec: None),
                        ("parameters", dict(reversed(PARAMETERS.items())))):
        facts = {**vars(kernel), name: value}
        others.append(compile.Kernel(**facts))
    keys = [cubin_cache.kernel_key(k, CC) for k in (kernel, *others)] + [cubin_cache.kernel_key(kernel, (8, 0))]
    assert len(set(keys)) == len(keys)
    assert cubin_cache.kernel_key(scale_kernel(), CC) == keys[0] == cubin_cache.kernel_key(scale_kernel(2, 1 << 16), CC)


@pytest.fixture
def changed(monkeypatch):
    """Lets a source file read as if a line were added to it."""
    read = Path.read_text

    def change(name):
        def altered(self, *args):
            return read(self, *args) + ("# another" if self.name == name else "")

        monkeypatch.setattr(Path, "read_text", altered)
        cubin_cache._sources.cache_clear()

    yield change
    cubin_cache._sources.cache_clear()


@pytest.mark.parametrize("name", ["small_kernel.py", "codecs.py", "formats.py", "compile.py"])
def test_a_change_of_the_source_is_another_kernel(changed, name):
    before = cubin_cache.kernel_key(scale_kernel(), CC)
    changed(name)
    assert cubin_cache.kernel_key(scale_kernel(), CC) != before


def test_a_change_elsewhere_is_the_same_kernel(changed):
    before = cubin_cache.kernel_key(scale_kernel(), CC)
    changed("blocks.py")
    assert cubin_cache.kernel_key(scale_kernel(), CC) == before


def test_a_new_compiler_is_another_kernel(monkeypatch):
    before = cubin_cache.kernel_key(scale_kernel(), CC)
    monkeypatch.setattr(cubin_cache, "_compilers", lambda: [("numba-cuda", "99.0")])
    assert cubin_cache.kernel_key(scale_kernel(), CC) != before


@pytest.mark.parametrize("damage", [
    lambda whole: b"",
    lambda whole: whole[:20],
    lambda whole: whole[:-1],
    lambda whole: whole[:40] + b"?" + whole[41:],
])  # fmt: skip
def test_a_damaged_file_is_made_anew(tmp_path, damage):
    path = tmp_path / "kernel.cubin"
    assert cubin_cache.kept(path, lambda: b"machine code" * 5) == b"machine code" * 5
    path.write_bytes(damage(path.read_bytes()))
    assert cubin_cache.kept(path, lambda: b"new") == b"new"
    assert cubin_cache.kept(path, lambda: b"not asked") == b"new"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert cubin_cache.kept(tmp_path / "file" / "kernel.cubin", lambda: b"code") == b"code"
    assert "not kept" in caplog.text


def test_many_writers_leave_one_whole_file(tmp_path):
    path, together, found = tmp_path / "kernel.cubin", threading.Barrier(8), []

    def work():
        together.wait()
        found.append(cubin_cache.kept(path, lambda: b"code" * 10000))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"code" * 10000] * 8
    assert list(tmp_path.iterdir()) == [path]


def test_the_cache_is_where_the_platform_has_it(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_PAGED_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if os.name == "posix":
        assert cubin_cache.cache_directory() == tmp_path / "numba_paged"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cubin_cache.cache_directory() == tmp_path / "home" / ".cache" / "numba_paged"


# ------------------------------------------------------------------- launching


def test_arguments_reach_the_driver(machine):
    device = CudaDevice()
    device.launch(scale_kernel(), (5, 2), (1 << 40, 2**64 - 1, 7, 0.5, -3))
    ((gpu, grid, block, shared_bytes, stream, arguments),) = machine.launches
    assert (gpu, grid, block, shared_bytes, stream) == (0, (5, 2, 1), (NUM_THREADS, 1, 1), 0, 7)
    read = [struct.unpack_from(code, a)[0] for code, a in zip("QQIfi", arguments, strict=True)]
    assert read == [1 << 40, 2**64 - 1, 7, 0.5, -3]


def test_a_kernel_is_loaded_once_for_each_gpu(machine, monkeypatch):
    machine.capabilities = ((9, 0), (8, 0))
    device, kernel = CudaDevice(), scale_kernel(shared_bytes=100_000)
    device.prepare(kernel)
    for gpu in (0, 1, 1, 0):
        with device.on(x=Array(np.zeros(1), gpu), nothing=None):
            assert device.compute_capability == machine.capabilities[gpu]
            device.launch(kernel, (1,), (0, 0, 0, 0.0, 0))
    assert machine.loaded == [(0, "scale"), (1, "scale")] and machine.limits == [100_000] * 2
    assert [launch[0] for launch in machine.launches] == [0, 1, 1, 0] and machine.launches[0][3] == 100_000
    assert len(list(cubin_cache.cache_directory().iterdir())) == 2  # one for each compute capability


def test_a_launch_is_on_the_current_stream(machine):
    device, kernel = CudaDevice(), scale_kernel()
    for machine.stream in (0, 11, 12):
        device.launch(kernel, (1,), (0, 0, 0, 0.0, 0))
    assert [launch[4] for launch in machine.launches] == [0, 11, 12]


def test_a_grid_without_blocks_is_no_launch(machine):
    CudaDevice().launch(scale_kernel(), (4, 0), (0, 0, 0, 0.0, 0))
    assert not machine.launches


def test_threads_do_not_mix_their_arguments(machine):
    device, kernel, together = CudaDevice(), scale_kernel(), threading.Barrier(4)
    device.prepare(kernel)
    machine.before_launch = together.wait  # all have packed theirs before the driver reads one
    threads = [threading.Thread(target=device.launch, args=(kernel, (1,), (i, i, i, float(i), i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(struct.unpack_from("Q", launch[5][0])[0] for launch in machine.launches) == [0, 1, 2, 3]
    assert all(struct.unpack_from("Q", launch[5][0])[0] == struct.unpack_from("i", launch[5][4])[0]
               for launch in machine.launches)


def test_packed_arrays_keep_their_bytes_and_start_aligned():
    arrays = [np.arange(3, dtype=np.int32), np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2], np.zeros(0, np.int32),
              np.array([7], np.uint8)]
    together, starts = packed(arrays)
    assert starts == [0, 16, 64, 64] and together.size == 80
    for array, start in zip(arrays, starts, strict=True):
        assert together[start : start + array.nbytes].tobytes() == array.tobytes()


def test_a_plans_tables_are_uploaded_once_for_each_stream(machine):
    device, owner, lengths = CudaDevice(), Owner(), np.arange(5, dtype=np.int32)
    first = device.tables(owner, lengths, lengths)
    assert device.tables(owner, lengths, lengths) == first and first[1] - first[0] == 32
    machine.stream = 8
    assert device.tables(owner, lengths, lengths) != first
    assert len(device._uploads) == 1
    del owner
    assert len(device._uploads) == 0


def test_tables_of_two_plans_are_two_copies(machine):
    """Case 53: a plan's tables stay as they were when the next plan's are uploaded, or the host's buffer is reused."""
    device, plans, table = CudaDevice(), (Owner(), Owner()), np.array([5], np.int32)
    first = device.tables(plans[0], table)
    table[0] = 6
    second = device.tables(plans[1], table)
    memory = [device._uploads[plan]["work", 0, machine.stream].memory.host.view(np.int32)[0] for plan in plans]
    assert first != second and memory == [5, 6]


def test_slots_of_a_plan_travel_once_for_all_layers():
    device = PtxDevice(CC)
    backend = CudaBackend(device)
    new = device.array(np.ones((2, 1, 8), np.float32))
    starts, lengths, tables = np.array([0, 2], np.int32), np.array([2], np.int32), np.zeros((1, 1), np.int32)
    plan = Plan(starts, lengths, tables, None, slots=np.array([3, 1]))
    with mock.patch.object(device, "upload", wraps=device.upload) as upload:
        for layer in range(3):
            keys, values = device.zeros((1, 4, 1, 8), np.float32), device.zeros((1, 4, 1, 8), np.float32)
            backend.append(new, new, keys, values, plan.slots, 1.0, 1.0, plan)
            assert keys.host[0, :, 0, 0].tolist() == values.host[0, :, 0, 0].tolist() == [0, 1, 0, 1]
    assert upload.call_count == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "int64"])
def test_arrays_of_every_format_go_there_and_back(machine, dtype):
    device, values = CudaDevice(), np.arange(12).reshape(3, 4).astype(getattr(ml_dtypes, dtype, dtype))
    there = device.array(values)
    assert isinstance(there, Array) and there.dtype == values.dtype
    back = device.to_host(there, "x")
    assert isinstance(back, np.ndarray) and back.dtype == values.dtype and np.array_equal(back, values)


# ------------------------------------------------------------------- the backend on it


@pytest.fixture
def gpus(monkeypatch, directory):
    """Two GPUs, and what is compiled for them: (name, compute capability)."""
    compiled = []

    def compile_cubin(kernel, cc):
        compiled.append((kernel.name, cc))
        return kernel.name.encode()

    monkeypatch.setattr(cubin_cache, "compile_cubin", compile_cubin)
    machine = Machine(((9, 0), (8, 0)))
    with machine.installed():
        yield machine, compiled


def attend(backend, gpu, num_new=1):
    """Append and attend on a GPU, two sequences of 600 tokens; the second has `num_new` queries."""
    def array(*shape):
        return Array(np.zeros(shape, np.float16), gpu)

    keys, values = array(80, 16, 2, 64), array(80, 16, 2, 64)
    starts, lengths = np.array([0, 1, 1 + num_new], np.int32), np.array([600, 600], np.int32)
    tables = np.arange(76, dtype=np.int32).reshape(2, 38)
    plan = Plan(starts, lengths, tables, lambda *cut: cut_work(*cut, 16, 2, backend.tiling(4, num_new)))
    q, k = array(1 + num_new, 8, 64), array(1 + num_new, 2, 64)
    backend.append(k, k, keys, values, np.arange(1 + num_new), 1.0, 1.0)
    backend.attend(q, keys, values, plan, AttentionOptions(0.125), array(*q.shape), None)


def test_calls_run_on_the_gpu_of_the_arrays(gpus):
    """Case 52."""
    machine, compiled = gpus
    backend = CudaBackend()
    for gpu in (1, 0):
        machine.launches.clear()
        compiled.clear()
        attend(backend, gpu)
        assert {launch[0] for launch in machine.launches} == {gpu} and machine.gpu == 0
        assert {cc for _, cc in compiled} == {machine.capabilities[gpu]}


def test_the_first_call_compiles_nothing_after_a_warmup(gpus):
    machine, compiled = gpus
    backend = CudaBackend()
    backend.warmup(AttentionSpec(8, 2, 64))
    assert {name for name, _ in compiled} >= {"decode_mma", "prefill_mma", "append", "merge"} and not machine.launches
    compiled.clear()
    attend(backend, 0)
    attend(backend, 0, num_new=20)
    assert machine.launches and not compiled


# ------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("facts", "message"), [
    ({"driver": 0}, "there is no NVIDIA driver"),
    ({"driver": 12040, "count_fails": True}, r"driver is for CUDA 12\.4, CuPy for CUDA 13\.0"),
    ({"count_fails": True}, "gives no CUDA device: cudaErrorNoDevice"),
    ({"capabilities": ()}, "no CUDA device; CUDA_VISIBLE_DEVICES"),
    ({"version": "13.6.0"}, r"CuPy 13\.6\.0 is too old"),
    ({"capabilities": ((7, 5),)}, r"GPU 0 has compute capability 7\.5; .*asynchronous copies.*bfloat16.* need 8\.0"),
])  # fmt: skip
def test_what_is_missing_is_named(facts, message):
    with Machine(**facts).installed(), pytest.raises(RuntimeError, match=message):
        CudaDevice()


def test_cupy_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"CuPy cannot be imported.*numba_paged\[cuda13x\]"):
        CudaDevice()


def test_numba_cuda_that_is_missing_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "numba_paged.cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="numba-cuda is not installed"):
        importlib.import_module("numba_paged.cuda")


def test_the_oldest_device_is_enough():
    with Machine((OLDEST,)).installed():
        assert CudaDevice().compute_capability == OLDEST and CudaDevice().num_multiprocessors == 132


def test_arrays_of_two_gpus_are_refused(machine):
    arrays = {"q": Array(np.zeros(1), 0), "keys": Array(np.zeros(1), 1), "lse": None}
    with pytest.raises(TypeError, match="several GPUs are mixed: q on GPU 0, keys on GPU 1"):
        CudaDevice().on(**arrays)


def test_host_arrays_are_refused(machine):
    with pytest.raises(TypeError, match="host and device arrays are mixed: q is on the host"):
        CudaDevice().view(np.zeros(3), "q")


def test_an_array_that_cupy_cannot_take_over_is_named(machine):
    class Tensor:
        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self):
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"keys: Tensor cannot be viewed.*dtype code: 10.*float8_e4m3fn"):
        CudaDevice().view(Tensor(), "keys")


def test_an_array_of_the_interface_is_taken_over(machine):
    assert isinstance(CudaDevice().view(DeviceArray(np.zeros(3, np.float32)), "q"), Array)


def test_arguments_that_do_not_fit_are_named(machine):
    device, kernel = CudaDevice(), scale_kernel()
    with pytest.raises(ValueError, match=r"scale: count is 4294967296, which is no uint32"):
        device.launch(kernel, (1,), (0, 0, 1 << 32, 1.0, 0))
    with pytest.raises(ValueError, match=r"scale: first is 0\.5, which is no int32"):
        device.launch(kernel, (1,), (0, 0, 1, 1.0, 0.5))
    with pytest.raises(TypeError, match="scale takes 5 arguments, got 3"):
        device.launch(kernel, (1,), (0, 0, 1))
    assert not machine.launches


def test_too_much_shared_memory_is_named(machine):
    with pytest.raises(RuntimeError, match=r"scale needs 300000 bytes of shared memory, GPU 0 has 232448: ScaleSpec"):
        CudaDevice().prepare(scale_kernel(shared_bytes=300_000))


def test_what_the_driver_answers_is_in_the_error(machine):
    device, kernel = CudaDevice(), scale_kernel()
    machine.answer = Status.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(RuntimeError, match="cannot load scale: CUDA_ERROR_INVALID_IMAGE"):
        device.prepare(kernel)
    machine.answer = Status.CUDA_SUCCESS
    device.prepare(kernel)
    machine.answer = Status.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(RuntimeError, match="cannot launch scale with 3 x 1 x 1 blocks: CUDA_ERROR_INVALID_IMAGE"):
        device.launch(kernel, (3,), (0, 0, 0, 0.0, 0))
