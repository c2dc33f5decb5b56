"""The rules of the house that a machine can hold: floors of imports, no driver touched, sizes of files."""

import ast
import graphlib
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import numba_paged as npg

ROOT = Path(npg.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ALL_FILES = [p for top in ("numba_paged", "tests", "benchmarks", "scripts") for p in (ROOT.parent / top).rglob("*.py")]
FLOORS = {
    "__init__": 5,
    "scheduler": 4,
    "kv_cache": 4,
    "attention": 4,
    "draw": 3,
    "invariants": 3,
    "prefix_cache": 3,
    "stats": 3,
    "steps": 3,
    "swap": 3,
    "checks": 3,
    "cpu": 3,
    "cuda": 3,
    "plan": 2,
    "blocks": 2,
    "sequences": 2,
    "backend": 2,
    "arrays": 1,
    "batches": 1,
    "compiled": 1,
    "shared_prefix": 1,
    "scalars": 0,
    "spec": 0,
    "formats": 0,
    "score": 0,
    "softmax": 0,
    "sizing": 0,
    "errors": 0,
}
HOST_STATE = {"blocks", "sequences", "prefix_cache", "steps", "swap", "scheduler", "kv_cache"}
DRIVER_MODULES = {
    "cupy", "cupyx", "torch", "ctypes", "pynvml", "numba.cuda.cudadrv", "cuda.core", "cuda.bindings.driver",
    "cuda.bindings.runtime",
}  # fmt: skip
DRIVER_CALLS = {
    "current_context", "get_current_device", "select_device", "list_devices", "gpus", "is_available", "detect", "close",
    "synchronize", "stream", "default_stream", "external_stream", "event", "to_device", "device_array", "pinned_array",
    "mapped_array", "as_cuda_array", "from_cuda_array_interface",
}  # fmt: skip
LARGEST_FILE = 280
LARGEST_FUNCTION = 70
LONGEST_LINE = 125
NO_CODE = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()}


def names(path):
    """Test ids: paths from the repository's root."""
    return str(path.relative_to(ROOT.parent))


def imports(path, run_time_only=True):
    """(full name, line) of every import; those under ``if TYPE_CHECKING`` do not run."""
    package = ["numba_paged", *path.relative_to(ROOT).with_suffix("").parts]
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if run_time_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def unit(full_name):
    """The module or backend package of numba_paged that a full name lies in, or None."""
    parts = full_name.split(".")
    return parts[1] if parts[0] == "numba_paged" and len(parts) > 1 else None


def own_unit(path):
    """The same for a file."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=names)
def test_imports_never_point_up(path):
    own = own_unit(path)
    assert own in FLOORS, f"{own} has no floor: add it to the table"
    for full_name, line in imports(path):
        other = unit(full_name)
        if other is not None:
            assert FLOORS[other] <= FLOORS[own], f"{names(path)}:{line} imports {full_name} from floor {FLOORS[other]}"


def test_imports_never_run_in_a_circle():
    below = {own: set() for own in FLOORS}
    for path in FILES:
        below[own_unit(path)] |= {unit(name) for name, _ in imports(path)} - {None, own_unit(path)}
    graphlib.TopologicalSorter(below).prepare()  # raises CycleError with the circle


@pytest.mark.parametrize("path", [p for p in FILES if own_unit(p) in ("cpu", "cuda")], ids=names)
def test_kernels_know_neither_the_host_state_nor_each_other(path):
    forbidden = HOST_STATE | ({"cpu", "cuda"} - {own_unit(path)})
    assert not [f"{line}: {name}" for name, line in imports(path, run_time_only=False) if unit(name) in forbidden]


@pytest.mark.parametrize("path", FILES, ids=names)
def test_only_the_device_file_touches_a_driver(path):
    where = str(path.relative_to(ROOT))
    if where == "cuda/device.py":
        return
    forbidden = DRIVER_MODULES - ({"ctypes"} if where == "cpu/threads.py" else set())  # it loads a threading library
    for full_name, line in imports(path, run_time_only=False):
        assert not [m for m in forbidden if f"{full_name}.".startswith(f"{m}.")], f"{where}:{line} imports {full_name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "cuda":
            assert node.attr not in DRIVER_CALLS, f"{where}:{node.lineno} uses cuda.{node.attr}"


def test_import_touches_no_cuda():
    code = "import sys, numba_paged; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    modules = loaded.stdout.split()
    assert "numba_paged" in modules
    unwanted = ("numba.cuda", "numba_cuda", "cupy", "cuda", "torch", "numba_paged.cuda", "numba_paged.cpu")
    assert not [m for m in modules if any(f"{m}.".startswith(f"{name}.") for name in unwanted)]


def extent(node):
    """The numbers of a node's lines."""
    return set(range(node.lineno, node.end_lineno + 1))


def code_lines(path):
    """The numbers of the lines that hold code: no comment, no docstring, not blank."""
    docstrings = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= extent(node)
    with tokenize.open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in NO_CODE]
    return {line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docstrings


@pytest.mark.parametrize("path", FILES, ids=names)
def test_files_and_functions_are_small(path):
    lines = code_lines(path)
    assert len(lines) <= LARGEST_FILE
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n is not node]
            own = (lines & extent(node)).difference(*map(extent, inner))
            assert len(own) <= LARGEST_FUNCTION, f"{node.name} has {len(own)} lines of code"


@pytest.mark.parametrize("path", ALL_FILES, ids=names)
def test_lines(path):
    text = path.read_text()
    long = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > LONGEST_LINE]
    assert not long
    assert not re.search(r"\b(TO)(DO)\b|\b(FIX)(ME)\b", text)
