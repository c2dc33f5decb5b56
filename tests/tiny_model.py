"""A tiny random model of the Llama family, as a GGUF file and, independently, as float64 arithmetic: the oracle."""

from dataclasses import dataclass

import gguf
import numpy as np
from tokenizers import pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MARKUP = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
TOKENS = MARKUP + ALPHABET + ["".join(pair) for pair in MERGES]


@dataclass(frozen=True)
class Tiny:
    """What one file holds."""

    num_layers: int = 2
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    feed_forward_size: int = 96
    context_length: int = 256
    rope_base: float = 10000.0
    tied: bool = False
    rope_factors: bool = False
    storage: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32

    def shapes(self):
        """Names and shapes of the tensors, in the file's order."""
        hidden, inner = self.hidden_size, self.feed_forward_size
        q_size, kv_size = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = {"token_embd.weight": (len(TOKENS), hidden), "output_norm.weight": (hidden,)}
        if not self.tied:
            shapes["output.weight"] = (len(TOKENS), hidden)
        if self.rope_factors:
            shapes["rope_freqs.weight"] = (self.head_dim // 2,)
        for layer in range(self.num_layers):
            of_layer = {"attn_norm": (hidden,), "attn_q": (q_size, hidden), "attn_k": (kv_size, hidden),
                        "attn_v": (kv_size, hidden), "attn_output": (hidden, q_size), "ffn_norm": (hidden,),
                        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
            shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
        return shapes

    def weights(self, seed=0):
        """Random weights, as they are after storage; q and k rows in the order of the papers, not the file's."""
        random = np.random.default_rng(seed)
        weights = {}
        for name, shape in self.shapes().items():
            if len(shape) == 1:
                weights[name] = random.uniform(0.5, 2.0, shape).astype(np.float32)
            else:
                values = random.standard_normal(shape) * (1.0 if name == "token_embd.weight" else shape[1] ** -0.5)
                stored = gguf.quants.quantize(values.astype(np.float32), self.storage)
                weights[name] = gguf.quants.dequantize(stored, self.storage)
        return weights

    def metadata(self):
        """Keys of the architecture, and their values."""
        metadata = {
            "block_count": self.num_layers, "context_length": self.context_length,
            "embedding_length": self.hidden_size, "feed_forward_length": self.feed_forward_size,
            "attention.head_count": self.num_q_heads, "attention.head_count_kv": self.num_kv_heads,
            "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": self.rope_base,
        }
        if self.num_q_heads * self.head_dim != self.hidden_size:
            metadata |= {"attention.key_length": self.head_dim, "attention.value_length": self.head_dim}
        return metadata

    def write(self, path, *, architecture="llama", metadata=(), tokenizer=(), tensors=(), leave_out=(), seed=0):
        """Writes the file; the options replace, add or leave out parts of it, to make it a wrong one."""
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in (self.metadata() | dict(metadata)).items():
            _add(writer, f"{architecture}.{key}", value, leave_out)
        words = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": [" ".join(pair) for pair in MERGES],
                 "token_type": [3] * len(MARKUP) + [1] * (len(TOKENS) - len(MARKUP)), "eos_token_id": 2}
        for key, value in (words | dict(tokenizer)).items():
            _add(writer, f"tokenizer.ggml.{key}", value, leave_out)
        heads = {"attn_q": self.num_q_heads, "attn_k": self.num_kv_heads}
        weights = self.weights(seed) | dict(tensors)
        for name in weights.keys() - set(leave_out):
            weight, storage = weights[name], self.storage
            if name.split(".")[-2] in heads and weight.ndim == 2:
                weight = interleave(weight, heads[name.split(".")[-2]])
            if weight.ndim == 1 or name in dict(tensors):
                writer.add_tensor(name, weight)
            else:
                writer.add_tensor(name, gguf.quants.quantize(weight, storage), raw_dtype=storage)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def logits(self, tokens, seed=0):
        """The logits after each token of one sequence, in float64, from scratch: [num_tokens, vocab_size]."""
        w = {name: weight.astype(np.float64) for name, weight in self.weights(seed).items()}
        x = w["token_embd.weight"][tokens]
        for layer in range(self.num_layers):
            def weight(name):
                return w[f"blk.{layer}.{name}.weight"]

            h = _norm(x, weight("attn_norm"))
            q, k, v = (_heads(h @ weight(f"attn_{name}").T, self.head_dim) for name in "qkv")
            out = attention(self._turned(q, w), self._turned(k, w), v)
            x = x + out.reshape(len(x), -1) @ weight("attn_output").T
            h = _norm(x, weight("ffn_norm"))
            gate = h @ weight("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ weight("ffn_up").T)) @ weight("ffn_down").T
        return _norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T

    def _turned(self, x, w):
        """Rotary positions in the papers' order: element i of a head is paired with element i + head_dim / 2."""
        half = self.head_dim // 2
        frequency = self.rope_base ** (-np.arange(half) / half) / w.get("rope_freqs.weight", np.ones(half))
        angle = (np.arange(len(x))[:, None] * frequency)[:, None, :]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def attention(q, k, v):
    """Causal attention of one whole sequence in float64; q is [num_tokens, num_q_heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)))
    scores = np.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(axis=-1, keepdims=True), v)


def interleave(weight, num_heads):
    """The rows of a q or k matrix in the order of GGUF files of this architecture: pairs that turn, side by side."""
    return weight.reshape(num_heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def _norm(x, weight):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight


def _heads(x, head_dim):
    return x.reshape(len(x), -1, head_dim)


def _add(writer, key, value, leave_out):
    if key in leave_out:
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}
    add[type(value)](key, value)
