"""A language model of the Llama family in plain NumPy: everything but the attention, which the caller brings."""

from dataclasses import dataclass

import numpy as np

from gguf_file import GGUFFile
from tokenizer import end_tokens, load_tokenizer

# Metadata that changes what a model computes in ways that `Model.forward` lacks, with the value that changes nothing.
NEUTRAL = {"rope.scaling.type": "none", "expert_count": 0, "attention.sliding_window": 0}


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model, all from the metadata of its file."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    feed_forward_size: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_base: float

    @classmethod
    def of(cls, file):
        """Reads and checks the metadata of a GGUFFile; raises ModelFileError."""
        architecture = file.value("general.architecture", str)
        if architecture != "llama":
            raise file.error(f"its architecture is {architecture!r}; only 'llama' is supported")
        for key, neutral in NEUTRAL.items():
            value = file.value(f"llama.{key}", type(neutral), neutral)
            if value != neutral:
                raise file.error(f"metadata key 'llama.{key}' is {value!r}, which is not supported")
        num_q_heads, hidden_size = file.count("llama.attention.head_count"), file.count("llama.embedding_length")
        geometry = cls(
            num_layers=file.count("llama.block_count"),
            num_q_heads=num_q_heads,
            num_kv_heads=file.count("llama.attention.head_count_kv", num_q_heads),
            head_dim=file.count("llama.attention.key_length", hidden_size // num_q_heads),
            hidden_size=hidden_size,
            feed_forward_size=file.count("llama.feed_forward_length"),
            vocab_size=len(file.texts("tokenizer.ggml.tokens")),
            context_length=file.count("llama.context_length"),
            norm_epsilon=file.value("llama.attention.layer_norm_rms_epsilon", float),
            rope_base=file.value("llama.rope.freq_base", float, 10000.0))
        geometry._check(file)
        return geometry

    def _check(self, file):
        if self.num_q_heads % self.num_kv_heads:
            raise file.error(f"its {self.num_q_heads} query heads cannot share {self.num_kv_heads} kv heads")
        if self.head_dim % 2:
            raise file.error(f"its head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if not 0 < self.rope_base < np.inf:
            raise file.error(f"metadata key 'llama.rope.freq_base' must be positive, got {self.rope_base}")
        for key in ("rope.dimension_count", "attention.value_length"):
            if (value := file.count(f"llama.{key}", self.head_dim)) != self.head_dim:
                raise file.error(f"metadata key 'llama.{key}' must equal head_dim {self.head_dim}, got {value}")


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. A matrix is [outputs, inputs]; what multiplies the same input is stacked into one."""

    attention_norm: np.ndarray  # [hidden_size]
    qkv: np.ndarray  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attention_out: np.ndarray  # [hidden_size, num_q_heads * head_dim]
    feed_forward_norm: np.ndarray  # [hidden_size]
    gate_up: np.ndarray  # [2 * feed_forward_size, hidden_size]
    down: np.ndarray  # [hidden_size, feed_forward_size]

    @classmethod
    def of(cls, file, index, geometry):
        """Reads layer `index` of a GGUFFile; raises ModelFileError."""
        def weight(name, *shape):
            return file.tensor(f"blk.{index}.{name}.weight", shape)

        hidden, inner = geometry.hidden_size, geometry.feed_forward_size
        q_size, kv_size = (heads * geometry.head_dim for heads in (geometry.num_q_heads, geometry.num_kv_heads))
        return cls(
            attention_norm=weight("attn_norm", hidden),
            qkv=np.concatenate([weight("attn_q", q_size, hidden), weight("attn_k", kv_size, hidden),
                                weight("attn_v", kv_size, hidden)]),
            attention_out=weight("attn_output", hidden, q_size),
            feed_forward_norm=weight("ffn_norm", hidden),
            gate_up=np.concatenate([weight("ffn_gate", inner, hidden), weight("ffn_up", inner, hidden)]),
            down=weight("ffn_down", hidden, inner))


class Model:
    """A model of the Llama family: RMSNorm, rotary positions, grouped query heads, SwiGLU; all in float32.

    Parameters
    ----------
    path : str or Path
        A GGUF file of architecture "llama".
    progress : callable, optional
        Wraps the iterable of layers while they are read, to show how far it is; for example ``tqdm``.

    Attributes
    ----------
    geometry : Geometry
    tokenizer : tokenizers.Tokenizer
    end_tokens : set of int
        The ids after which a text is over.

    Raises
    ------
    ModelFileError
        If the file cannot be used; the message says why.

    Source: Llama (arXiv:2302.13971), rotary positions (arXiv:2104.09864), grouped-query attention (arXiv:2305.13245).
    """

    def __init__(self, path, progress=iter):
        file = GGUFFile(path)
        self.geometry = geometry = Geometry.of(file)
        self.tokenizer, self.end_tokens = load_tokenizer(file), end_tokens(file)
        self._layers = [Layer.of(file, index, geometry) for index in progress(range(geometry.num_layers))]
        self._output_norm = file.tensor("output_norm.weight", (geometry.hidden_size,))
        shape = (geometry.vocab_size, geometry.hidden_size)
        self._embedding = file.tensor("token_embd.weight", shape)
        tied = not file.has_tensor("output.weight")
        self._output = self._embedding if tied else file.tensor("output.weight", shape)
        self._frequencies = geometry.rope_base ** (-np.arange(0, geometry.head_dim, 2) / geometry.head_dim)
        if file.has_tensor("rope_freqs.weight"):  # how Llama 3.1 stretches its context
            self._frequencies /= file.tensor("rope_freqs.weight", self._frequencies.shape)
        file.check_all_used()

    def forward(self, tokens, positions, attend, last):
        """Runs the model over new tokens, of any number of sequences, laid end to end.

        Parameters
        ----------
        tokens : array of int, [num_tokens]
            Token ids.
        positions : array of int, [num_tokens]
            The index of each token in its own sequence.
        attend : callable
            ``attend(layer, q, k, v) -> out``: the attention of one layer over these tokens and whatever came before.
            q and out are [num_tokens, num_q_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]; float32.
        last : array of int, [num_rows]
            The rows, among the tokens, that logits are wanted for.

        Returns
        -------
        array of float32, [num_rows, vocab_size]
            The logits of the token that follows each of those rows.
        """
        epsilon = self.geometry.norm_epsilon
        angles = np.asarray(positions)[:, None] * self._frequencies
        rotation = np.exp(1j * angles).astype(np.complex64)[:, None, :]  # one turn for all heads
        x = self._embedding[np.asarray(tokens)]
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, rms_norm(x, layer.attention_norm, epsilon), rotation)
            out = attend(index, q, k, v)
            x += linear(out.reshape(len(x), -1), layer.attention_out)
            gate, up = np.split(linear(rms_norm(x, layer.feed_forward_norm, epsilon), layer.gate_up), 2, axis=1)
            x += linear(silu(gate) * up, layer.down)
        return linear(rms_norm(x[np.asarray(last)], self._output_norm, epsilon), self._output)

    def _qkv(self, layer, x, rotation):
        sizes = self.geometry
        num_rotated = sizes.num_q_heads + sizes.num_kv_heads
        qkv = linear(x, layer.qkv).reshape(len(x), -1, sizes.head_dim)
        qk = rotate(qkv[:, :num_rotated], rotation)
        return qk[:, :sizes.num_q_heads], qk[:, sizes.num_q_heads:], qkv[:, num_rotated:]


def linear(x, weight):
    """``x @ weight.T`` for x [num_tokens, inputs] and weight [outputs, inputs], C-contiguous.

    BLAS repacks the right-hand matrix of a product, so the large one goes to the left.
    """
    return np.ascontiguousarray((weight @ x.T).T)


def rms_norm(x, weight, epsilon):
    """Each row of x, scaled to root mean square 1, times `weight`."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def silu(x):
    """``x * sigmoid(x)``, by way of tanh, which cannot overflow."""
    return x * (np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1)))


def rotate(x, rotation):
    """Rotary positions: each pair of neighbours in a head is a complex number, turned by its position's angle.

    GGUF files of this architecture hold the rows of the q and k matrices in the order that makes the pairs neighbours
    (elsewhere a pair is ``(i, i + head_dim / 2)``); q · k does not depend on that order.
    """
    return (x.view(np.complex64) * rotation).view(np.float32)
