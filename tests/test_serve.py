"""``demo --requests``: every line of a file, continued as if it were the only one."""

import pytest

for library in ("gguf", "tokenizers", "tqdm"):
    pytest.importorskip(library, reason=f"{library} is not installed; the demo extra brings it")

import demo
from tiny_model import Tiny

LINES = ["the cat", "the cat sat on the mat", "a", "the cat sat on the rug and looked at the mat"]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return str(Tiny().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def requests_path(tmp_path):
    path = tmp_path / "requests.txt"
    path.write_text("\n\n".join(LINES) + "\n", encoding="utf-8")
    return str(path)


def run(capsys, tiny_path, *options):
    demo.main(["--model", tiny_path, "--samples", "3", "--tokens", "9", "--block-size", "4", *options])
    return capsys.readouterr().out


def samples(output):
    """The lines of the samples, of all requests."""
    return [line for line in output.split("seed ")[1].split("Speed")[0].split("4 requests")[0].splitlines()
            if line.startswith("   ")]


@pytest.mark.parametrize("blocks, preempted", [([], False), (["--blocks", "16"], True)])
def test_each_line_gets_what_it_would_get_alone(capsys, tiny_path, requests_path, blocks, preempted):
    output = run(capsys, tiny_path, "--requests", requests_path, *blocks)
    alone = [samples(run(capsys, tiny_path, "--prompt", line)) for line in LINES]
    assert samples(output) == sum(alone, [])
    statistics = dict(line.strip().split("  ", 1) for line in output.split("4 requests in")[1].splitlines()[1:])
    assert (statistics["preemptions"].split()[0] != "0,") == preempted
    assert statistics["sampled tokens"].split(",")[0].strip() == str(4 * 3 * 9)
    if blocks:
        assert statistics["most blocks in use"].strip().startswith("16 of 16")


@pytest.mark.parametrize("text, options, message", [
    (None, [], "--requests .*No such file"),
    ("\n \n", [], "--requests .* has no line to continue"),
    ("a\n\n" + "x" * 260, [], "line 3 of .* has 260 tokens; with --tokens 9"),
    ("the cat sat\n", ["--blocks", "2"], "--blocks 2 is too few: the longest request takes 5"),
])
def test_what_cannot_be_served(tiny_path, tmp_path, text, options, message):
    path = tmp_path / "requests.txt"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"^demo: {message}"):
        demo.main(["--model", tiny_path, "--tokens", "9", "--block-size", "4", "--requests", str(path), *options])
