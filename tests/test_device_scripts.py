"""The scripts for machines with a GPU, as far as they go without one: on the PTX machine, and on made-up results."""

import argparse
import json
from contextlib import contextmanager, nullcontext

import numpy as np
import ptxrun
import pytest

if ptxrun.missing():
    pytest.skip(ptxrun.missing(), allow_module_level=True)

import check_device  # noqa: E402
import cubin  # noqa: E402
import device_cases  # noqa: E402
import device_peers  # noqa: E402
import profile_decode  # noqa: E402
import show_kernel  # noqa: E402
from numba_paged.cuda.compile import compile_cubin  # noqa: E402
from small_kernel import scale_kernel  # noqa: E402


@pytest.fixture
def small(monkeypatch):
    """One case an operation."""
    monkeypatch.setattr(check_device, "KV_DTYPES", ("float16",))


@pytest.fixture
def no_gpu(monkeypatch):
    """What a machine without a GPU says."""

    def load(name):
        raise RuntimeError("there is no NVIDIA driver on this machine")

    monkeypatch.setattr(device_cases, "load_backend", load)


# ------------------------------------------------------------------- check_device.py


@pytest.mark.parametrize("main", [check_device.main, profile_decode.main])
def test_without_a_gpu_it_says_so(no_gpu, capsys, main):
    assert main([]) == 1
    assert "There is no GPU" in capsys.readouterr().out


def test_the_dry_run_computes_and_checks(small, capsys):
    assert check_device.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("decode", "prefill")) for line in printed) == 4  # as they come, and in the table
    assert printed[-3].split() == ["group", "4"] and printed[-1].startswith("prefill")


def test_a_wrong_result_is_found(small, monkeypatch, capsys):
    def attend(ready):
        ready.backend.attend(ready.q, ready.keys, ready.values, ready.plan, ready.options, ready.out, None)
        ready.out.host[-1, 0, 0] += np.float16(0.01)

    monkeypatch.setattr(check_device, "OPERATIONS", ("decode",))
    monkeypatch.setattr(device_cases.Ready, "attend", attend)
    assert check_device.main(["--dry-run"]) == 1
    assert "WRONG: out[0, 0, 0] is" in capsys.readouterr().out


def test_the_tests_are_counted_and_end_in_time(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text("def test_a(): pass\ndef test_b(): assert False\n")
    arguments = ("-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    assert check_device.run_tests(float("inf"), *arguments) == {
        "passed": 1, "failed": 1, "skipped": 0, "left out": 0, "exit code": 1}  # fmt: skip
    counts = check_device.run_tests(0, *arguments)
    assert counts["left out"] == 1 and counts["exit code"] != 0


def row(group, seconds, peers=(), wrong=None):
    """A result."""
    case = device_cases.Case("decode", group, 8, 8192, "float16")
    return {**vars(case), "seconds": seconds, "bytes_per_second": case.num_bytes / seconds, "share_of_copy": 0.5,
            "plain_seconds": 3e-3 if group > 1 else None, "flops_per_second": case.num_flops / seconds,
            "host_seconds": 9e-6, "wrong": wrong, "peers": dict(peers)}


def test_the_table_has_a_line_for_each_case():
    rows = [row(1, 1e-3, {"FlashInfer": 2e-3, "SDPA": 1.5e-3}), row(4, 1e-3, wrong="out[0] is 1"), row(8, 1e-3)]
    head, line = check_device.table(rows).splitlines()
    assert head.split() == ["group", "1", "group", "4", "group", "8"]
    assert line.split() == ["decode", "8", "x", "8192", "float16", "50", "%", "x", "1.50", "WRONG", "50", "%", "t", "3.00"]
    assert "plain cores 3.000 ms" in check_device.detail(rows[2])
    assert "FlashInfer 2.000 ms" in check_device.detail(rows[0]) and "WRONG: out[0]" in check_device.detail(rows[1])


def test_the_result_is_written_as_json(tmp_path, monkeypatch):
    monkeypatch.setattr(check_device, "ROOT", tmp_path)
    result = {"device": "NVIDIA H100", "rows": [row(1, 1e-3)]}
    path = check_device.write(result)
    assert path == tmp_path / "benchmarks" / "results" / "device-NVIDIA-H100.json"
    assert json.loads(path.read_text()) == result


def test_work_of_a_case():
    decode, prefill = (device_cases.Case(o, 4, 2, 1024, "float8_e4m3fn") for o in ("decode", "prefill"))
    assert decode.num_bytes == prefill.num_bytes == 2 * 1024 * 2 * 8 * 128
    assert decode.num_flops == 2 * 32 * 1024 * 4 * 128
    pairs = sum(1024 - 512 + 1 + i for i in range(512))  # the visible keys of each query of the chunk
    assert prefill.num_flops == 2 * 32 * pairs * 4 * 128


def test_peers_that_are_missing_or_fail_are_named(monkeypatch):
    def fails(ready):
        raise ValueError("not this one")

    table = {"there": ("json", lambda ready: len, ("float16",)), "fails": ("json", fails, ("float16",)),
             "other format": ("json", fails, ("int8",)), "gone": ("no_such_module", fails, ("float16",))}
    monkeypatch.setattr(device_peers, "PEERS", table)
    peers = device_peers.Peers()
    ready = argparse.Namespace(case=device_cases.Case("decode", 1, 1, 16, "float16"),
                               place=argparse.Namespace(seconds=lambda function: 0.5))
    assert peers.seconds(ready) == peers.seconds(ready) == {"there": 0.5}
    assert set(peers.missing) == {"gone", "fails"} and "not this one" in peers.missing["fails"]


# ------------------------------------------------------------------- profile_decode.py


def test_the_profile_has_a_range_for_every_part():
    ranges, recording = [], []

    @contextmanager
    def profile():
        recording.append(len(ranges))
        yield
        recording.append(len(ranges))

    def span(name):
        ranges.append(name)
        return nullcontext()

    options = argparse.Namespace(batch=2, context=20, group=4, layers=2, warmup=1, steps=2, kv_dtype="float16")
    profile_decode.run(device_cases.Simulator().backend, options, span, profile)
    assert ranges == ["step", "plan", "layer 0", "layer 1"] * 3 and recording == [4, 12]


# ------------------------------------------------------------------- show_kernel.py


def test_a_kernel_is_shown(capsys):
    assert show_kernel.main(["decode,length=100,kv_heads=2"]) == 0
    text = capsys.readouterr().out
    for part in ("decode_mma for compute capability 9.0", "columns of products", "vLLM v2 126.0",
                 "registers, 0 bytes of stack, 0 local", "inner loop", "LDGSTS", "bytes in flight", "warp instructions",
                 "keys: loaded"):
        assert part in text


@pytest.mark.parametrize(("spec", "message"), [
    ("merge", "must be decode or prefill, got 'merge'"),
    ("decode,heads=3", "'heads' is none of cc, group"),
    ("decode,group=x", "invalid literal"),
])  # fmt: skip
def test_a_bad_spec_is_named(capsys, spec, message):
    assert show_kernel.main([spec]) == 1
    assert message in capsys.readouterr().out


def test_facts_and_options_of_a_spec():
    assert show_kernel.parse("prefill") == ("prefill", {**show_kernel.FACTS, "queries": 33}, {})
    operation, facts, options = show_kernel.parse("decode,cc=10.0,group=8,kv=int8,window=9,soft_cap=5")
    assert (operation, facts["cc"], facts["group"], facts["kv"]) == ("decode", "10.0", 8, "int8")
    assert options == {"window": 9, "soft_cap": 5.0}


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(cubin.sysconfig, "get_paths", lambda: {"purelib": "/nowhere"})
    monkeypatch.setattr(cubin.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        cubin.tool("nvdisasm")


def tools_are_there():
    try:
        return bool(cubin.tool("nvdisasm") and cubin.tool("cuobjdump"))
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not tools_are_there(), reason="nvdisasm and cuobjdump are not installed")
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)])
def test_machine_code_is_read(cc):
    code = compile_cubin(scale_kernel(), cc)
    used = cubin.resources(code, "scale")
    assert 0 < used.registers <= 32 and used.stack == used.local == 0
    instructions, labels = cubin.disassemble(code, "scale")
    kinds = cubin.mix(instructions)
    assert sum(kinds.values()) == len(instructions) > 10 and kinds["EXIT"] >= 1
    assert [i.access_bytes for i in instructions if i.name in ("LDG", "STG")] == [4, 4]
    assert cubin.main_loop(instructions, labels) == []


def test_loops_and_what_they_load():
    names = "MOV LDG.E.128.CONSTANT LDGSTS.E.BYPASS.LTC128B.128 LDG.E.U16 LDG.E.64 LDG.E BRA EXIT"
    code = [cubin.Instruction(16 * i, name, "`(.L_x_0)" if name == "BRA" else "")
            for i, name in enumerate(names.split())]
    (loop,) = cubin.loops(code, {".L_x_0": 16})
    assert loop == code[1:7] == cubin.main_loop(code, {".L_x_0": 16})
    assert cubin.loaded_bytes(loop) == 32 * (16 + 16 + 2 + 8 + 4)
    assert cubin.loops(code, {".L_x_0": 112}) == []


@pytest.mark.parametrize(("facts", "blocks"), [
    (((9, 0), 32, 128, 0), 16),  # 64 warps
    (((9, 0), 32, 32, 0), 32),  # 32 blocks
    (((9, 0), 128, 128, 0), 4),  # 65536 registers
    (((9, 0), 168, 128, 0), 3),
    (((9, 0), 32, 128, 96 << 10), 2),  # 228 KiB of shared memory, less 1 KiB a block
    (((9, 0), 32, 128, 227 << 10), 1),
    (((8, 6), 32, 128, 0), 12),  # 48 warps
])  # fmt: skip
def test_resident_blocks(facts, blocks):
    assert cubin.resident_blocks(*facts) == blocks
