"""Bad input to the functions on arrays: the right error, its message, and nothing changed.

Each table has rows (what is wrong, the changed arguments, the error, what its message must name).
"""

import numpy as np
import pytest

import numba_paged as npg
from backends import CPU
from inputs import Shape, decode_problem, make_pool, prefill_problem

NAN, INF = float("nan"), float("inf")


class OnDevice:
    """Something that says it lives on a GPU."""

    __cuda_array_interface__ = {"shape": (5, 16, 2, 64), "typestr": "<f4", "data": (4096, False), "version": 3}


class OnOtherDevice:
    """Something on a device of another kind (DLPack's ROCm)."""

    def __dlpack_device__(self):
        return 10, 0


def read_only(x):
    """A copy that must not be written."""
    x = x.copy()
    x.flags.writeable = False
    return x


def gaps(x):
    """The same numbers with a last axis that is not contiguous."""
    return np.repeat(x, 2, axis=-1)[..., ::2]


def decode_arguments():
    """Two sequences of 20 and 3 tokens, 4 query heads, 2 kv heads, head_dim 64, blocks of 16."""
    problem = decode_problem(Shape(), [20, 3])
    names = ("q", "keys", "values", "block_tables", "lengths")
    tables = np.ascontiguousarray(problem.block_tables[:, :2])
    return dict(zip(names, problem.replace(block_tables=tables).arguments(), strict=True))


def prefill_arguments():
    """The same with 5 and 2 query tokens."""
    problem = prefill_problem(Shape(), [20, 3], [5, 2])
    names = ("q", "keys", "values", "block_tables", "lengths", "query_starts")
    tables = np.ascontiguousarray(problem.block_tables[:, :2])
    return dict(zip(names, problem.replace(block_tables=tables).arguments(), strict=True))


def append_arguments():
    """Three tokens into a pool of 6 blocks of 16."""
    keys, values = make_pool(Shape(), 6, "NHD", "zero")
    k = np.ones((3, 2, 64), np.float32)
    return {"k": k, "v": k.copy(), "keys": keys, "values": values, "slots": np.array([1, 40, 95])}


def copy_arguments():
    """Two copies in a pool of 6 blocks."""
    keys, values = make_pool(Shape(), 6, "NHD", "zero")
    keys[...], values[...] = 1.0, 2.0
    return {"keys": keys, "values": values, "sources": np.int32([0, 1]), "targets": np.int32([2, 3])}


def merge_arguments():
    """Three parts of two tokens."""
    return {"outs": np.ones((3, 2, 4, 64), np.float32), "lses": np.zeros((3, 2, 4), np.float32)}


ATTEND = [
    ("q has 2 axes", lambda a: {"q": a["q"][0]}, ValueError, r"\bq\b.*3.*\(4, 64\)"),
    ("q float64", lambda a: {"q": a["q"].astype(float)}, TypeError, r"\bq\b.*float64.*float32"),
    ("q int8", lambda a: {"q": a["q"].astype(np.int8)}, TypeError, r"\bq\b.*int8"),
    ("q of another byte order", lambda a: {"q": a["q"].astype(">f4")}, TypeError, r"\bq\b.*byte order"),
    ("q a list", lambda a: {"q": a["q"].tolist()}, TypeError, r"\bq\b.*list"),
    ("q None", lambda a: {"q": None}, TypeError, r"\bq\b"),
    ("q of another head_dim", lambda a: {"q": a["q"][..., :32].copy()}, ValueError, r"\bq\b.*64.*32"),
    ("q with gaps", lambda a: {"q": gaps(a["q"])}, ValueError, r"\bq\b.*contiguous.*strides"),
    ("q of 3 heads", lambda a: {"q": a["q"][:, :3].copy()}, ValueError, r"num_q_heads.*num_kv_heads.*3.*2"),
    ("q of no head", lambda a: {"q": a["q"][:, :0].copy()}, ValueError, r"num_q_heads.*0"),
    ("too few queries", lambda a: {"q": a["q"][:1].copy()}, ValueError, r"(\bq\b|query_starts).*1"),
    ("keys 3 axes", lambda a: {"keys": a["keys"][0]}, ValueError, r"keys.*4.*\(16, 2, 64\)"),
    ("keys float64", lambda a: {"keys": a["keys"].astype(float)}, TypeError, r"keys.*float64"),
    ("keys uint8", lambda a: {"keys": np.zeros(a["keys"].shape, np.uint8)}, TypeError, r"keys.*uint8"),
    ("keys of another byte order", lambda a: {"keys": a["keys"].astype(">f4")}, TypeError, r"keys.*byte order"),
    ("keys with gaps", lambda a: {"keys": gaps(a["keys"])}, ValueError, r"keys.*contiguous.*strides"),
    ("values with gaps", lambda a: {"values": gaps(a["values"])}, ValueError, r"values.*contiguous"),
    ("values float16", lambda a: {"values": a["values"].astype(np.float16)}, TypeError, r"values.*float32.*float16"),
    ("values fewer blocks", lambda a: {"values": a["values"][1:]}, ValueError, r"values.*shape"),
    ("values narrower", lambda a: {"values": a["values"][..., :32]}, ValueError, r"values.*64.*32"),
    ("blocks of no slot", lambda a: {n: a[n][:, :0] for n in ("keys", "values")}, ValueError, r"keys.*slot"),
    ("keys on a device", lambda a: {"keys": OnDevice()}, TypeError, r"mixed.*q on cpu.*keys on cuda"),
    ("q on a device", lambda a: {"q": OnDevice()}, TypeError, r"mixed"),
    ("keys on another device", lambda a: {"keys": OnOtherDevice()}, TypeError, r"keys.*device type 10"),
    ("tables int64", lambda a: {"block_tables": a["block_tables"].astype(int)}, TypeError, r"tables.*int32.*int64"),
    ("tables float", lambda a: {"block_tables": a["block_tables"] * 1.0}, TypeError, r"block_tables.*int32.*float"),
    ("tables 1 axis", lambda a: {"block_tables": a["block_tables"][0]}, ValueError, r"block_tables.*2"),
    ("tables of 3 rows", lambda a: {"block_tables": a["block_tables"][[0, 1, 1]]}, ValueError, r"lengths.*3.*2"),
    ("block id -1", lambda a: {"block_tables": np.int32([[0, -1], [1, 0]])}, ValueError, r"tables\[0, 1\].*-1.*6"),
    ("block id 6", lambda a: {"block_tables": np.int32([[0, 1], [6, 9]])}, ValueError, r"tables\[1, 0\].*6.*6 b"),
    ("lengths int64", lambda a: {"lengths": a["lengths"].astype(int)}, TypeError, r"lengths.*int32.*int64"),
    ("lengths float", lambda a: {"lengths": a["lengths"] * 1.0}, TypeError, r"lengths.*int32.*float"),
    ("lengths 2 axes", lambda a: {"lengths": a["lengths"][None]}, ValueError, r"lengths.*1"),
    ("lengths of 1 row", lambda a: {"lengths": a["lengths"][:1]}, ValueError, r"lengths.*\(2,\).*\(1,\)"),
    ("length -1", lambda a: {"lengths": np.int32([20, -1])}, ValueError, r"lengths\[1\].*-1.*32"),
    ("length 33", lambda a: {"lengths": np.int32([33, 3])}, ValueError, r"lengths\[0\].*33.*32"),
    ("scale NaN", lambda a: {"scale": NAN}, ValueError, r"scale.*finite.*nan"),
    ("scale inf", lambda a: {"scale": INF}, ValueError, r"scale.*finite.*inf"),
    ("scale past float32", lambda a: {"scale": 1e39}, ValueError, r"scale.*float32.*1e\+39"),
    ("scale text", lambda a: {"scale": "x"}, TypeError, r"scale.*number.*str"),
    ("soft_cap 0", lambda a: {"soft_cap": 0.0}, ValueError, r"soft_cap.*> 0.*0"),
    ("soft_cap -5", lambda a: {"soft_cap": -5.0}, ValueError, r"soft_cap.*> 0.*-5"),
    ("soft_cap NaN", lambda a: {"soft_cap": NAN}, ValueError, r"soft_cap.*nan"),
    ("soft_cap inf", lambda a: {"soft_cap": INF}, ValueError, r"soft_cap.*finite.*inf"),
    ("window 0", lambda a: {"window": 0}, ValueError, r"window.*1.*0"),
    ("window -1", lambda a: {"window": -1}, ValueError, r"window.*1.*-1"),
    ("window 2.5", lambda a: {"window": 2.5}, ValueError, r"window.*whole.*2\.5"),
    ("window True", lambda a: {"window": True}, ValueError, r"window.*True"),
    ("window inf", lambda a: {"window": INF}, ValueError, r"window.*inf"),
    ("window NaN", lambda a: {"window": NAN}, ValueError, r"window.*nan"),
    ("window text", lambda a: {"window": "x"}, (TypeError, ValueError), r"window.*x"),
    ("split_size 0", lambda a: {"split_size": 0}, ValueError, r"split_size.*1.*0"),
    ("split_size -16", lambda a: {"split_size": -16}, ValueError, r"split_size.*1.*-16"),
    ("k_scale 0", lambda a: {"k_scale": 0.0}, ValueError, r"k_scale.*> 0.*0"),
    ("k_scale 0 in float32", lambda a: {"k_scale": 1e-50}, ValueError, r"k_scale.*> 0.*float32.*1e-50"),
    ("k_scale NaN", lambda a: {"k_scale": NAN}, ValueError, r"k_scale.*nan"),
    ("v_scale -1", lambda a: {"v_scale": -1.0}, ValueError, r"v_scale.*> 0.*-1"),
    ("v_scale inf", lambda a: {"v_scale": INF}, ValueError, r"v_scale.*finite.*inf"),
    ("3 slopes", lambda a: {"alibi_slopes": np.ones(3, np.float32)}, ValueError, r"alibi_slopes.*\(4,\).*\(3,\)"),
    ("slopes 2 axes", lambda a: {"alibi_slopes": np.ones((1, 4), np.float32)}, ValueError, r"alibi_slopes.*\(4,\)"),
    ("slope NaN", lambda a: {"alibi_slopes": np.float32([0, 1, NAN, 0])}, ValueError, r"alibi_slopes\[2\].*(NaN|nan)"),
    ("slope inf", lambda a: {"alibi_slopes": np.float32([0, INF, 0, 0])}, ValueError, r"alibi_slopes\[1\].*inf"),
    ("slope -inf", lambda a: {"alibi_slopes": np.float32([0, 0, 0, -INF])}, ValueError, r"alibi_slopes\[3\].*-inf"),
    ("5 sinks", lambda a: {"sinks": np.ones(5, np.float32)}, ValueError, r"sinks.*\(4,\).*\(5,\)"),
    ("sink NaN", lambda a: {"sinks": np.float32([NAN, 0, 0, 0])}, ValueError, r"sinks\[0\].*(NaN|nan)"),
    ("sink inf", lambda a: {"sinks": np.float32([0, 0, 0, INF])}, ValueError, r"sinks\[3\].*inf"),
    ("sinks of text", lambda a: {"sinks": np.array(list("abcd"))}, TypeError, r"sinks"),
    ("out too small", lambda a: {"out": np.zeros_like(a["q"][1:])}, ValueError, r"out.*shape"),
    ("out narrower", lambda a: {"out": np.zeros_like(a["q"][..., 1:])}, ValueError, r"out.*64.*63"),
    ("out float16", lambda a: {"out": a["q"].astype(np.float16)}, TypeError, r"out.*float32.*float16"),
    ("out read-only", lambda a: {"out": read_only(a["q"])}, ValueError, r"out.*read-only"),
    ("out with gaps", lambda a: {"out": gaps(a["q"])}, ValueError, r"out.*contiguous"),
    ("out on a device", lambda a: {"out": OnDevice()}, TypeError, r"mixed|out"),
    ("an unknown option", lambda a: {"soft_max": 1.0}, TypeError, r"soft_max"),
]

DECODE = [
    ("lengths for 3", lambda a: {"lengths": np.int32([1, 1, 1])}, ValueError, r"lengths"),
    ("causal", lambda a: {"causal": False}, TypeError, r"causal"),
]

PREFILL = [
    ("starts at 1", lambda a: {"query_starts": np.int32([1, 5, 7])}, ValueError, r"query_starts\[0\].*0.*1"),
    ("starts fall", lambda a: {"query_starts": np.int32([0, 8, 7])}, ValueError, r"query_starts.*\[1\].*8.*7"),
    ("starts too short", lambda a: {"query_starts": np.int32([0, 5, 6])}, ValueError, r"query_starts.*7.*6"),
    ("starts past q", lambda a: {"query_starts": np.int32([0, 5, 8])}, ValueError, r"query_starts.*7.*8"),
    ("2 starts", lambda a: {"query_starts": np.int32([0, 7])}, ValueError, r"query_starts.*\(3,\).*\(2,\)"),
    ("starts int64", lambda a: {"query_starts": np.array([0, 5, 7])}, TypeError, r"query_starts.*int32.*int64"),
    ("starts 2 axes", lambda a: {"query_starts": np.int32([[0, 5, 7]])}, ValueError, r"query_starts.*1"),
]

APPEND = [
    ("k of another head_dim", lambda a: {"k": a["k"][..., :32].copy()}, ValueError, r"^k\b.*64.*32"),
    ("k of 3 heads", lambda a: {"k": np.ones((3, 3, 64), np.float32)}, ValueError, r"^k\b.*\(3, 2, 64\).*\(3, 3, 64\)"),
    ("k 2 axes", lambda a: {"k": a["k"][0]}, ValueError, r"^k\b.*3"),
    ("k float64", lambda a: {n: a[n].astype(float) for n in "kv"}, TypeError, r"^k\b.*float64"),
    ("k int8", lambda a: {n: a[n].astype(np.int8) for n in "kv"}, TypeError, r"^k\b.*int8"),
    ("k with gaps", lambda a: {"k": gaps(a["k"])}, ValueError, r"^k\b.*contiguous"),
    ("v shorter", lambda a: {"v": a["v"][:2]}, ValueError, r"^v\b.*3.*2"),
    ("v float16", lambda a: {"v": a["v"].astype(np.float16)}, TypeError, r"^v\b.*float32.*float16"),
    ("v with gaps", lambda a: {"v": gaps(a["v"])}, ValueError, r"^v\b.*contiguous"),
    ("values float16", lambda a: {"values": a["values"].astype(np.float16)}, TypeError, r"values.*float32.*float16"),
    ("values fewer", lambda a: {"values": a["values"][1:]}, ValueError, r"values.*6.*5"),
    ("keys read-only", lambda a: {"keys": read_only(a["keys"])}, ValueError, r"keys.*read-only"),
    ("values read-only", lambda a: {"values": read_only(a["values"])}, ValueError, r"values.*read-only"),
    ("keys on a device", lambda a: {"keys": OnDevice()}, TypeError, r"mixed.*k on cpu.*keys on cuda"),
    ("4 slots", lambda a: {"slots": np.arange(4)}, ValueError, r"slots.*\(3,\).*\(4,\)"),
    ("slots 2 axes", lambda a: {"slots": np.array([[1, 2, 3]])}, ValueError, r"slots.*1"),
    ("slots float", lambda a: {"slots": np.array([1.0, 2.0, 3.0])}, TypeError, r"slots.*float64"),
    ("slots uint64", lambda a: {"slots": np.array([1, 2, 3], np.uint64)}, TypeError, r"slots.*uint64"),
    ("slot -2", lambda a: {"slots": np.array([1, 2, -2])}, ValueError, r"slots\[2\].*-2.*96"),
    ("slot 96", lambda a: {"slots": np.array([1, 96, 3])}, ValueError, r"slots\[1\].*96.*96"),
    ("slot 2**40", lambda a: {"slots": np.array([2**40, 1, 2])}, ValueError, rf"slots\[0\].*{2**40}.*96"),
    ("a slot twice", lambda a: {"slots": np.array([7, 3, 7])}, ValueError, r"slots\[0\].*slots\[2\].*7"),
    ("k_scale 0", lambda a: {"k_scale": 0.0}, ValueError, r"k_scale.*> 0.*0"),
    ("v_scale NaN", lambda a: {"v_scale": NAN}, ValueError, r"v_scale.*nan"),
    ("v_scale text", lambda a: {"v_scale": "x"}, TypeError, r"v_scale.*number"),
]

COPY = [
    ("source -1", lambda a: {"sources": np.int32([0, -1])}, ValueError, r"sources\[1\].*-1.*6"),
    ("source 6", lambda a: {"sources": np.int32([6, 1])}, ValueError, r"sources\[0\].*6.*6"),
    ("target -1", lambda a: {"targets": np.int32([-1, 3])}, ValueError, r"targets\[0\].*-1.*6"),
    ("target 6", lambda a: {"targets": np.int32([2, 6])}, ValueError, r"targets\[1\].*6.*6"),
    ("a target twice", lambda a: {"targets": np.int32([3, 3])}, ValueError, r"targets.*3"),
    ("3 targets", lambda a: {"targets": np.int32([2, 3, 4])}, ValueError, r"targets.*\(2,\).*\(3,\)"),
    ("sources float", lambda a: {"sources": np.array([0.0, 1.0])}, TypeError, r"sources.*float64"),
    ("sources 2 axes", lambda a: {"sources": np.int32([[0, 1]])}, ValueError, r"sources.*1"),
    ("values fewer", lambda a: {"values": a["values"][1:]}, ValueError, r"values.*6.*5"),
    ("values float16", lambda a: {"values": a["values"].astype(np.float16)}, TypeError, r"values.*float32.*float16"),
    ("keys 3 axes", lambda a: {n: a[n][0] for n in ("keys", "values")}, ValueError, r"keys"),
    ("values read-only", lambda a: {"values": read_only(a["values"])}, ValueError, r"values.*read-only"),
    ("values on a device", lambda a: {"values": OnDevice()}, TypeError, r"mixed.*keys on cpu.*values on cuda"),
]

MERGE = [
    ("outs 3 axes", lambda a: {"outs": a["outs"][0]}, ValueError, r"outs.*4"),
    ("outs float64", lambda a: {"outs": a["outs"].astype(float)}, TypeError, r"outs.*float64"),
    ("lses float64", lambda a: {"lses": a["lses"].astype(float)}, TypeError, r"lses.*float64"),
    ("lses float16", lambda a: {"lses": a["lses"].astype(np.float16)}, TypeError, r"lses.*float16"),
    ("lses of 2 parts", lambda a: {"lses": a["lses"][:2]}, ValueError, r"lses.*\(3, 2, 4\).*\(2, 2, 4\)"),
    ("no part", lambda a: {n: a[n][:0] for n in a}, ValueError, r"outs.*1.*0"),
    ("outs with gaps", lambda a: {"outs": gaps(a["outs"])}, ValueError, r"outs.*contiguous"),
    ("lses on a device", lambda a: {"lses": OnDevice()}, TypeError, r"mixed.*outs on cpu.*lses on cuda"),
]

CASES = [
    pytest.param(function, arguments, *row[1:], id=f"{function.__name__}: {row[0]}")
    for function, arguments, rows in (
        (npg.decode, decode_arguments, ATTEND + DECODE),
        (npg.prefill, prefill_arguments, ATTEND + PREFILL),
        (npg.append, append_arguments, APPEND),
        (npg.copy_blocks, copy_arguments, COPY),
        (npg.merge, merge_arguments, MERGE),
    )
    for row in rows
]


HOST = [case for case in CASES if case.id.endswith(("read-only", "on a device", "on another device"))]
"""Read-only arrays are NumPy's alone, and those said to be on a device have no memory."""


def placed(backend, arguments):
    """Arrays where the backend wants them."""
    return {name: backend.asarray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def assert_refused(backend, function, arguments, error, message):
    """A call fails with the error, and its arrays stay as they were."""
    arrays = {name: x for name, x in arguments.items() if hasattr(x, "dtype")}
    before = {name: backend.asnumpy(x).tobytes() for name, x in arrays.items()}
    with pytest.raises(error, match=message):
        function(**arguments)
    assert before == {name: backend.asnumpy(x).tobytes() for name, x in arrays.items()}


@pytest.mark.parametrize("function, arguments, change, error, message", [case for case in CASES if case not in HOST])
def test_bad_input(backend, function, arguments, change, error, message):
    arguments = arguments()
    assert_refused(backend, function, placed(backend, {**arguments, **change(arguments)}), error, message)


@pytest.mark.parametrize("function, arguments, change, error, message", HOST)
def test_bad_host_input(function, arguments, change, error, message):
    arguments = arguments()
    assert_refused(CPU(), function, {**arguments, **change(arguments)}, error, message)


@pytest.mark.parametrize(
    "function, arguments",
    [
        (npg.decode, decode_arguments),
        (npg.prefill, prefill_arguments),
        (npg.append, append_arguments),
        (npg.copy_blocks, copy_arguments),
        (npg.merge, merge_arguments),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_arguments_that_the_tables_spoil_are_good(backend, function, arguments):
    function(**placed(backend, arguments()))
