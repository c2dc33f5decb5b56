"""The demo's model: right against float64 arithmetic, and over a paged cache it writes what it writes without any."""

import numpy as np
import pytest

import numba_paged as npg
from tolerances import assert_within, rounding

for library in ("gguf", "tokenizers"):
    pytest.importorskip(library, reason=f"{library} is not installed; the demo extra brings it")

from gguf import GGMLQuantizationType as Storage

from generate import step
from gguf_file import ModelFileError, packaged_model
from model import Model
from tiny_model import Tiny, attention

BLOCK_SIZES = [1, 16, 64]
MODELS = [(model, block_size) for model in ("tiny", "smollm2") for block_size in BLOCK_SIZES]
# The real model carries the main claim; the tiny one goes through every combination.
FEWER = [case for case in MODELS if case[0] == "tiny" or case[1] == 16]
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time there was"]
LONG_PROMPT = ("A key-value cache holds what a model has computed of the tokens that it has seen. Paged attention "
               "keeps it in blocks, so that sequences of any length can share one pool of memory, and")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Model(Tiny().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="module")
def smollm2():
    try:
        return Model(packaged_model())
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.fixture
def model(request):
    return request.getfixturevalue(request.param)


def dense(layer, q, k, v):
    """The attention of one whole sequence without a cache."""
    return attention(q, k, v).astype(np.float32)


class Greedy:
    """Sequences in one paged cache, each of which goes on with its most likely token.

    The ids of a sequence are in `tokens`, the ones that went through the model and the ones that have not yet.
    """

    def __init__(self, model, block_size):
        geometry = model.geometry
        spec = npg.AttentionSpec(geometry.num_q_heads, geometry.num_kv_heads, geometry.head_dim, block_size=block_size,
                                 kv_dtype="float32")
        self.model, self.tokens = model, {}
        self.cache = npg.PagedKVCache(spec, geometry.num_layers, num_blocks=512 // block_size + 8, backend="cpu")

    def add(self, prompt):
        seq = self.cache.add()
        self.tokens[seq] = list(self.model.tokenizer.encode(prompt).ids)
        return seq

    def fork(self, seq, next_token):
        """A copy that goes on with another token than the one picked last."""
        child = self.cache.fork(seq)
        self.tokens[child] = self.tokens[seq][:-1] + [next_token]
        return child

    def truncate(self, seq, length, next_token):
        """Back to `length` tokens, from where it goes on with another token."""
        self.cache.truncate(seq, length)
        self.cache.check()
        self.tokens[seq][length:] = [next_token]

    def advance(self, counts):
        """One step over the next `counts` tokens of each sequence; one that has no more of them gets a new one."""
        new = {seq: self.tokens[seq][self.cache.length(seq):][:count] for seq, count in counts.items()}
        plan = self.cache.plan(list(new), num_new=[len(tokens) for tokens in new.values()])
        logits = step(self.model, self.cache, plan, sum(new.values(), []))
        self.cache.check()
        for seq, row in zip(new, logits):
            if self.cache.length(seq) == len(self.tokens[seq]):
                self.tokens[seq].append(int(row.argmax()))

    def prefill(self, *seqs):
        self.advance({seq: len(self.tokens[seq]) for seq in seqs})

    def decode(self, *seqs, steps):
        for _ in range(steps):
            self.advance(dict.fromkeys(seqs, 1))

    def check(self, seq, num_given):
        """Every token past the first `num_given` is the one that follows without any cache."""
        tokens = self.tokens[seq]
        rows = np.arange(num_given - 1, len(tokens) - 1)
        logits = self.model.forward(tokens[:-1], np.arange(len(tokens) - 1), dense, rows)
        assert tokens[num_given:] == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("model, block_size", MODELS, indirect=["model"])
def test_greedy_text_is_that_of_no_cache(model, block_size):
    greedy = Greedy(model, block_size)
    seqs = [greedy.add(prompt) for prompt in PROMPTS]
    num_given = [len(greedy.tokens[seq]) for seq in seqs]
    greedy.prefill(*seqs)
    greedy.decode(*seqs, steps=31)
    for seq, given in zip(seqs, num_given):
        assert len(greedy.tokens[seq]) == given + 32
        greedy.check(seq, given)


@pytest.mark.parametrize("model, block_size", FEWER, indirect=["model"])
def test_a_prompt_in_chunks_while_others_decode(model, block_size):
    greedy = Greedy(model, block_size)
    early, other, late = (greedy.add(prompt) for prompt in (*PROMPTS[:2], LONG_PROMPT))
    num_given = {seq: len(greedy.tokens[seq]) for seq in (early, other, late)}
    greedy.prefill(early)
    greedy.advance({early: 1, other: num_given[other]})
    for chunk in (1, 7, 16, num_given[late]):
        greedy.advance({other: 1, late: chunk, early: 1})
    assert greedy.cache.length(late) == num_given[late]
    greedy.decode(late, early, other, steps=6)
    for seq, given in num_given.items():
        greedy.check(seq, given)


@pytest.mark.parametrize("model, block_size", FEWER, indirect=["model"])
def test_after_fork_and_truncate(model, block_size):
    greedy = Greedy(model, block_size)
    parent = greedy.add(LONG_PROMPT)
    given = len(greedy.tokens[parent])
    greedy.prefill(parent)
    greedy.decode(parent, steps=3)
    other_token = model.tokenizer.encode("!").ids[0]
    child = greedy.fork(parent, other_token)
    num_forked = len(greedy.tokens[child])
    assert greedy.cache.stats().num_shared > 0
    greedy.decode(parent, child, steps=5)
    greedy.check(parent, given)
    greedy.check(child, num_forked)
    greedy.truncate(parent, given - 3, other_token)
    greedy.decode(child, parent, steps=9)
    greedy.check(child, num_forked)
    greedy.check(parent, given - 2)


def test_smollm2_knows_the_capital(smollm2):
    greedy = Greedy(smollm2, block_size=16)
    seq = greedy.add(PROMPTS[0])
    greedy.prefill(seq)
    greedy.decode(seq, steps=1)
    assert smollm2.tokenizer.decode(greedy.tokens[seq]) == "The capital of France is Paris."


@pytest.mark.parametrize("tiny", [
    pytest.param(Tiny(), id="plain"),
    pytest.param(Tiny(tied=True), id="tied embeddings"),
    pytest.param(Tiny(rope_factors=True), id="rope factors"),
    pytest.param(Tiny(num_kv_heads=1, rope_base=100000.0), id="one kv head"),
    pytest.param(Tiny(num_kv_heads=4), id="no groups"),
    pytest.param(Tiny(num_q_heads=3, num_kv_heads=3, head_dim=8), id="own head_dim"),
    pytest.param(Tiny(storage=Storage.F16), id="F16"),
    pytest.param(Tiny(storage=Storage.Q8_0), id="Q8_0"),
    pytest.param(Tiny(storage=Storage.Q4_1), id="Q4_1"),
])
def test_forward_is_float64_arithmetic(tiny, tmp_path):
    tokens = np.random.default_rng(1).integers(3, 259, size=40)
    model, want = Model(tiny.write(tmp_path / "tiny.gguf")), tiny.logits(tokens)
    got = model.forward(tokens, np.arange(40), dense, last=np.arange(40))
    # Seven products a layer and the last one, each off by the rounding of a sum of at most feed_forward_size terms.
    tolerance = (7 * tiny.num_layers + 1) * rounding(tiny.feed_forward_size) * np.abs(want).max()
    assert_within(got, want, np.full(want.shape, tolerance), "logits")


def test_forward_gives_the_rows_that_are_asked_for(tiny):
    tokens = np.arange(3, 23)
    logits = tiny.forward(tokens, np.arange(20), dense, last=np.arange(20))
    some = tiny.forward(tokens, np.arange(20), dense, last=[19, 4])
    np.testing.assert_allclose(some, logits[[19, 4]], atol=rounding(64) * np.abs(logits).max())
