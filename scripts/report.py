"""What the demo prints: the texts, how fast they came, and what the cache held."""

import os
import shutil
import sys
import textwrap

import numba_paged as npg


def bold(text):
    plain = "NO_COLOR" in os.environ or not sys.stdout.isatty()
    return text if plain else f"\033[1m{text}\033[0m"


def counted(number, noun):
    """``2 samples``, ``1 sample``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(num_bytes):
    """A number of bytes for people."""
    exponent = min(max(0, (int(num_bytes).bit_length() - 1) // 10), 4)
    return f"{num_bytes / 1024**exponent:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


def print_samples(prompt, continuations):
    """The texts, wrapped to the terminal; the prompt stands before each."""
    width = max(20, shutil.get_terminal_size().columns - 8)
    for index, continuation in enumerate(continuations, 1):
        pieces = [textwrap.wrap(line, width) or [""] for line in (prompt + continuation).rstrip().splitlines()]
        text = "\n      ".join(sum(pieces, []))
        if text.startswith(prompt):
            text = bold(prompt) + text[len(prompt):]
        print(f"  {index:2}  {text}\n")


def print_speed(num_prompt_tokens, generation):
    """How long the prompt and the samples took."""
    print(bold("Speed"))
    print(f"  prompt   {num_prompt_tokens:5} tokens, once for all samples, in {generation.prefill_seconds:.2f} s")
    if generation.num_decoded:
        speed = generation.num_decoded / generation.decode_seconds
        print(f"  samples  {generation.num_decoded:5} tokens, all samples together, "
              f"in {generation.decode_seconds:.2f} s: {speed:.1f} tokens/s")
    print()


def print_cache(geometry, block_size, generation):
    """The table of what the cache held, against what contiguous caches reserve."""
    states = (generation.forked, generation.finished)
    block_bytes = generation.finished.block_bytes
    rows = [
        ("", ["after the fork", "at the end"]),
        ("tokens", [state.num_tokens for state in states]),
        ("blocks used", [state.num_used for state in states]),
        ("blocks shared", [state.num_shared for state in states]),
        ("blocks copied on write", [state.num_copied for state in states]),
        ("bytes used", [size(state.num_used * block_bytes) for state in states]),
    ]
    print(bold(f"KV cache: blocks of {counted(block_size, 'token')}, {size(block_bytes)} each "
               "(keys and values, all layers)"))
    for label, values in rows:
        print(f"  {label:<24}" + "".join(f"{value:>18}" for value in values))
    num_samples, length = len(generation.samples), geometry.context_length
    reserved = npg.contiguous_bytes(num_samples, length, geometry.num_layers, geometry.num_kv_heads, geometry.head_dim,
                                    "float32")
    ratio = reserved / (generation.finished.num_used * block_bytes)
    print(f"\n  {counted(num_samples, 'contiguous cache')} of {length} tokens (the model's context) would reserve\n"
          f"  {size(reserved)}: {ratio:.0f} times as much.")
