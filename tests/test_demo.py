"""The demo's command: what it prints, how it samples, and what it says of options that cannot be."""

import numpy as np
import pytest

for library in ("gguf", "tokenizers", "tqdm"):
    pytest.importorskip(library, reason=f"{library} is not installed; the demo extra brings it")

import demo
import report
from generate import Sampling
from tiny_model import Tiny

@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return str(Tiny().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def rows(output):
    """The rows of the table: label -> values."""
    cells = (line.split("  ") for line in output.splitlines() if line.startswith("  "))
    return {line[1]: [cell.strip() for cell in line[2:] if cell.strip()] for line in cells}


@pytest.mark.parametrize("block_size, used, shared", [(16, ["2", "4"], ["2", "1"]), (32, ["1", "3"], ["1", "0"])])
def test_the_table_counts_blocks(capsys, tiny_path, block_size, used, shared):
    # 20 tokens of prompt; each of 3 samples stores 9 of its 10 tokens (its last never goes through the model).
    demo.main(["--model", tiny_path, "--prompt", "abcdefghijklmnopqrst", "--samples", "3", "--tokens", "10",
               "--top-k", "1", "--block-size", str(block_size)])
    output = capsys.readouterr().out
    table = rows(output)
    block_bytes = block_size * 2 * 2 * 2 * 16 * 4
    assert table["blocks used"] == used and table["blocks shared"] == shared
    assert table["tokens"] == ["60", "87"]
    assert table["blocks copied on write"] == ["0", "2"]
    assert table["bytes used"] == [report.size(int(count) * block_bytes) for count in used]
    assert f"would reserve\n  {report.size(3 * 256 * 2 * 2 * 2 * 16 * 4)}: " in output


def test_a_seed_repeats_the_text(capsys, tiny_path):
    def samples(*options):
        demo.main(["--model", tiny_path, "--prompt", "the", "--tokens", "8", *options])
        return capsys.readouterr().out.split("Speed")[0]

    assert samples("--seed", "1") == samples("--seed", "1") != samples("--seed", "2").replace("seed 2", "seed 1")


def test_one_token_and_the_smallest_pool(capsys, tiny_path):
    demo.main(["--model", tiny_path, "--prompt", "a", "--tokens", "1", "--samples", "1", "--block-size", "1"])
    assert rows(capsys.readouterr().out)["tokens"] == ["1", "1"]


@pytest.mark.parametrize("options, message", [
    (["--prompt", ""], "--prompt is empty"),
    (["--prompt", "x" * 250], "--prompt has 250 tokens; with --tokens 40 they are 290, more than the 256 of"),
    (["--model", "/no/such.gguf"], "/no/such.gguf: cannot be opened"),
])
def test_what_does_not_fit_the_model(tiny_path, options, message):
    with pytest.raises(SystemExit, match="^demo: " + message):
        demo.main(["--model", tiny_path, *options])


@pytest.mark.parametrize("option, value, message", [
    ("--samples", "0", "must be at least 1, got 0"), ("--tokens", "many", "invalid int value: 'many'"),
    ("--temperature", "-1", "must be at least 0, got -1"), ("--temperature", "nan", "must be at least 0, got nan"),
    ("--block-size", "1.5", "invalid int value: '1.5'"), ("--top-k", "-3", "must be at least 0, got -3"),
])
def test_options_out_of_range(capsys, option, value, message):
    with pytest.raises(SystemExit, match="2"):
        demo.main([option, value])
    assert f"argument {option}: {message}" in capsys.readouterr().err


def test_sampling_follows_the_softmax_of_the_most_likely():
    logits, num_draws = np.log(np.array([0.05, 0.5, 0.15, 0.3])), 4000
    stream = Sampling(1.0, 3, 0).streams(1)[0]
    picks = np.array([Sampling(1.0, 3, 0).pick(logits, stream) for _ in range(num_draws)])
    shares = np.bincount(picks, minlength=4) / num_draws
    want = np.array([0, 0.5, 0.15, 0.3]) / 0.95
    assert (np.abs(shares - want) <= 4 * np.sqrt(want * (1 - want) / num_draws)).all()


def test_sampling_at_the_edges():
    logits = np.array([0.0, 3.0, 1.0], np.float32)
    stream = np.random.default_rng(0)
    assert Sampling(0.0, 40, 0).pick(logits, stream) == Sampling(5.0, 1, 0).pick(logits, stream) == 1
    assert {Sampling(1e4, 0, 0).pick(logits, stream) for _ in range(60)} == {0, 1, 2}


@pytest.mark.parametrize("num_bytes, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (720 * 2**20, "720 MiB"),
                                             (3 * 2**30 // 2, "1.5 GiB")])
def test_sizes_for_people(num_bytes, text):
    assert report.size(num_bytes) == text
