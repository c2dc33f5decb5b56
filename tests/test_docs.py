"""What the package promises: its public names, their signatures, numpydoc docstrings, and examples that run."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

import numba_paged as npg

ROOT = Path(npg.__file__).parent
PUBLIC = {
    "decode", "prefill", "append", "copy_blocks", "merge",
    "AttentionSpec", "BlockPool", "PagedKVCache", "CacheStats", "Plan", "Scheduler", "Request", "Step",
    "OutOfBlocks", "UnknownSequence", "CorruptState",
    "kv_bytes_per_token", "blocks_that_fit", "contiguous_bytes", "waste",
}  # fmt: skip

ATTEND = (
    "scale=None, soft_cap=None, window=None, alibi_slopes=None, sinks=None, k_scale=1.0, v_scale=1.0, "
    "split_size=None, out=None, return_lse=False, validate=True"
)
SIGNATURES = {
    "decode": f"(q, keys, values, block_tables, lengths, *, {ATTEND})",
    "prefill": f"(q, keys, values, block_tables, lengths, query_starts, *, causal=True, {ATTEND})",
    "append": "(k, v, keys, values, slots, *, k_scale=1.0, v_scale=1.0)",
    "copy_blocks": "(keys, values, sources, targets)",
    "merge": "(outs, lses)",
    "AttentionSpec": (
        "(num_q_heads, num_kv_heads, head_dim, block_size=16, kv_dtype='float16', "
        "scale=None, soft_cap=None, window=None)"
    ),
    "BlockPool": "(num_blocks)",
    "BlockPool.allocate": "(self, n)",
    "BlockPool.share": "(self, blocks)",
    "BlockPool.release": "(self, blocks)",
    "BlockPool.check": "(self)",
    "PagedKVCache": (
        "(spec, num_layers, num_blocks, backend='auto', prefix_caching=True, max_sequences=1024, max_length=None, "
        "num_host_blocks=0, split_size=None)"
    ),
    "PagedKVCache.add": "(self, tokens=None, salt=None)",
    "PagedKVCache.fork": "(self, seq)",
    "PagedKVCache.plan": "(self, seqs, num_new=1, num_lookahead=0)",
    "PagedKVCache.commit": "(self, plan, tokens=None, accepted=None)",
    "PagedKVCache.rollback": "(self, plan)",
    "PagedKVCache.keys": "(self, layer)",
    "PagedKVCache.values": "(self, layer)",
    "PagedKVCache.truncate": "(self, seq, length)",
    "PagedKVCache.length": "(self, seq)",
    "PagedKVCache.check": "(self)",
    "PagedKVCache.stats": "(self)",
}


def plain(signature):
    """A signature without annotations."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_public_names():
    assert set(npg.__all__) == PUBLIC and len(npg.__all__) == len(PUBLIC)
    assert list(npg.__all__) == sorted(npg.__all__)
    assert all(hasattr(npg, name) for name in PUBLIC)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    target = npg
    for part in name.split("."):
        target = getattr(target, part)
    assert plain(inspect.signature(target)) == SIGNATURES[name]


def test_attend_begins_as_designed():
    assert list(inspect.signature(npg.PagedKVCache.attend).parameters)[:6] == ["self", "layer", "q", "k", "v", "plan"]


def modules():
    """Every module that can be imported here; what needs CuPy cannot everywhere."""
    for info in pkgutil.walk_packages([str(ROOT)], "numba_paged."):
        try:
            yield importlib.import_module(info.name)
        except ImportError as error:
            assert error.name and error.name.split(".")[0] in ("cupy", "numba_cuda", "cuda"), error


MODULES = [npg, *modules()]


def documented():
    """(label, object) of every public function, class and method of every module."""
    for module in MODULES:
        for name, item in vars(module).items():
            if name.startswith("_") or getattr(item, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(item) or inspect.isclass(item):
                yield f"{module.__name__}.{name}", item
            if inspect.isclass(item):
                for method_name, method in vars(item).items():
                    if not method_name.startswith("_") and inspect.isfunction(method):
                        yield f"{module.__name__}.{name}.{method_name}", method


DOCUMENTED = dict(documented())


def sections(docstring):
    """The sections of a numpydoc string: heading to lines."""
    lines = inspect.cleandoc(docstring).splitlines()
    starts = [i for i in range(len(lines) - 1) if lines[i] and re.fullmatch("-{3,}", lines[i + 1])]
    stops = [*starts[1:], len(lines)][: len(starts)]
    return {lines[a]: lines[a + 2 : b] for a, b in zip(starts, stops, strict=True)}


def described(lines):
    """The parameter names of a section, in order: lines that are not indented, before a colon."""
    heads = [line.split(" : ")[0] for line in lines if line and not line.startswith(" ")]
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


@pytest.mark.parametrize("label", DOCUMENTED)
def test_parameters_are_described(label):
    item = DOCUMENTED[label]
    assert item.__doc__, "no docstring"
    found = sections(item.__doc__)
    if inspect.isclass(item) and dataclasses.is_dataclass(item):
        shown = described([*found.get("Parameters", ()), *found.get("Attributes", ())])
        assert shown in ([], [field.name for field in dataclasses.fields(item) if not field.name.startswith("_")])
    elif "Parameters" in found:
        function = item.__init__ if inspect.isclass(item) else item
        parameters = [name for name in inspect.signature(function).parameters if name != "self"]
        assert described(found["Parameters"]) == parameters


def public_callables():
    """(label, object) of what `npg` offers: functions, classes, and the classes' methods."""
    for name in npg.__all__:
        item = getattr(npg, name)
        if inspect.isclass(item) and issubclass(item, Exception):
            continue
        yield name, item
        for method_name, method in vars(item).items() if inspect.isclass(item) else ():
            if not method_name.startswith("_") and inspect.isfunction(method):
                yield f"{name}.{method_name}", method


@pytest.mark.parametrize("label, item", list(public_callables()), ids=lambda x: x if isinstance(x, str) else "")
def test_public_docstrings_are_complete(label, item):
    found = sections(item.__doc__)
    function = item.__init__ if inspect.isclass(item) and not dataclasses.is_dataclass(item) else item
    if [p for p in inspect.signature(function).parameters if p != "self"]:
        assert "Parameters" in found or "Attributes" in found
    if inspect.isfunction(item) and "." not in label:
        assert "Raises" in found and "Examples" in found
    if inspect.isfunction(item) and any(isinstance(n, ast.Return) and n.value for n in ast.walk(parsed(item))):
        assert "Returns" in found


def parsed(function):
    """A function's syntax tree."""
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_examples_run(module):
    assert doctest.testmod(module).failed == 0
