"""Continues a prompt several times with a small language model: NumPy, and attention over a paged KV cache."""

import argparse
import math
import os
import sys

import numba_paged as npg
from numba_paged.sizing import num_blocks_for
from tqdm import tqdm

from generate import Sampling, generate, step
from gguf_file import ModelFileError, packaged_model
from model import Model
from report import bold, counted, print_cache, print_samples, print_speed
from serve import print_requests, print_service, serve


WARM_UP_LENGTH = 3


class DemoError(ValueError):
    """Options that do not fit the model."""


def number(kind, least):
    """An argparse type: a finite number of `kind`, at least `least`."""
    def parse(text):
        value = kind(text)
        if not math.isfinite(value) or value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number at all
    return parse


def parse_options(arguments):
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    add = parser.add_argument
    add("--prompt", default="The capital of France is", help="the text to continue (default: %(default)r)")
    add("--chat", action="store_true", help="give the prompt to the model as a user's message, in its chat format")
    add("--samples", type=number(int, 1), default=2, metavar="N", help="continuations (default: %(default)s)")
    add("--tokens", type=number(int, 1), default=40, metavar="N", help="most tokens in each (default: %(default)s)")
    add("--temperature", type=number(float, 0), default=0.7, metavar="T",
        help="0 always takes the most likely token; higher is more random (default: %(default)s)")
    add("--top-k", type=number(int, 0), default=40, metavar="K",
        help="draw from the K most likely tokens, 0 for all (default: %(default)s)")
    add("--seed", type=number(int, 0), default=3, metavar="N", help="of the random numbers (default: %(default)s)")
    add("--model", metavar="PATH", help="a GGUF file of a Llama-like model (default: SmolLM2-135M-Instruct)")
    add("--requests", metavar="FILE", help="continue every line of a text file instead, as many at a time as fit")
    add("--blocks", type=number(int, 1), metavar="N", help="of the pool for --requests (default: 8 of the longest fit)")
    add("--block-size", type=number(int, 1), default=16, metavar="N", help="tokens in a block (default: %(default)s)")
    return parser.parse_args(arguments)


def make_cache(geometry, block_size, num_blocks, num_sequences):
    """A cache of float32 keys and values."""
    spec = npg.AttentionSpec(geometry.num_q_heads, geometry.num_kv_heads, geometry.head_dim, block_size=block_size,
                             kv_dtype="float32")
    # The model is NumPy, so its keys and values are on the host, whatever else the machine has.
    return npg.PagedKVCache(spec, geometry.num_layers, num_blocks, backend="cpu", max_sequences=num_sequences)


def warm_up(model, cache):
    """Compiles the kernels before the clock runs: a prefill and a decode step of a sequence that is then dropped."""
    seq = cache.add()
    for num_new in (WARM_UP_LENGTH - 1, 1):
        step(model, cache, cache.plan([seq], num_new=num_new), [0] * num_new)
    cache.free(seq)


def encode_prompt(model, options, text, name="--prompt"):
    """The token ids of a prompt, checked against the model."""
    if options.chat:
        if model.tokenizer.token_to_id("<|im_start|>") is None:
            raise DemoError("--chat needs a model that knows ChatML; this one has no <|im_start|> in its vocabulary")
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    prompt = model.tokenizer.encode(text).ids
    if not prompt:
        raise DemoError(f"{name} is empty: there is nothing to continue")
    length, most = len(prompt) + options.tokens, model.geometry.context_length
    if length > most:
        raise DemoError(f"{name} has {len(prompt)} tokens; with --tokens {options.tokens} they are {length}, "
                        f"more than the {most} of the model's context")
    return prompt


def load_model(path):
    """Reads the model, and says which."""
    print(f"Reading {os.path.basename(path)} ...")
    model = Model(path, progress=lambda layers: tqdm(layers, "  layers", unit="layer", leave=False, disable=None))
    geometry = model.geometry
    print(f"  {geometry.num_layers} layers, {geometry.num_q_heads} query heads over {geometry.num_kv_heads} kv heads, "
          f"head_dim {geometry.head_dim}")
    return model


def blocks_for(options, prompt):
    """Blocks that a prompt and one continuation take at most."""
    return num_blocks_for(max(len(prompt) + options.tokens, WARM_UP_LENGTH), options.block_size)


def run(model, sampling, options):
    """Several continuations of one prompt."""
    prompt = encode_prompt(model, options, options.prompt)
    num_blocks = options.samples * blocks_for(options, prompt)
    cache = make_cache(model.geometry, options.block_size, num_blocks, options.samples)
    warm_up(model, cache)
    with tqdm(total=options.samples * options.tokens, desc="Sampling", unit="token", leave=False, disable=None) as bar:
        generation = generate(model, cache, prompt, options.samples, options.tokens, sampling, bar.update)

    print(f"\n{bold(counted(options.samples, 'sample'))} (temperature {options.temperature:g}, seed {options.seed})\n")
    print_samples("" if options.chat else options.prompt, map(model.tokenizer.decode, generation.samples))
    print_speed(len(prompt), generation)
    print_cache(model.geometry, options.block_size, generation)


def read_lines(path):
    """The lines of a text file that are not empty: {number: text}."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = {number: line.strip() for number, line in enumerate(file, 1) if line.strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"--requests {path}: {error}") from error
    if not lines:
        raise DemoError(f"--requests {path} has no line to continue")
    return lines


def run_requests(model, sampling, options):
    """Several continuations of each line of a file, as many at a time as the pool holds."""
    lines = read_lines(options.requests)
    prompts = [encode_prompt(model, options, text, f"line {number} of {options.requests}")
               for number, text in lines.items()]
    longest = max(blocks_for(options, prompt) for prompt in prompts)
    num_blocks, num_sequences = options.blocks or 8 * longest, max(32, options.samples)
    if num_blocks < longest:
        raise DemoError(f"--blocks {num_blocks} is too few: the longest request takes {longest}")
    cache = make_cache(model.geometry, options.block_size, num_blocks, num_sequences)
    warm_up(model, cache)
    scheduler = npg.Scheduler(cache, max_batch_tokens=max(512, num_sequences), max_batch_size=num_sequences)
    requests = [npg.Request(prompt, options.tokens, n=options.samples, stop_tokens=model.end_tokens)
                for prompt in prompts]
    with tqdm(total=len(prompts) * options.samples * options.tokens, desc="Serving", unit="token", leave=False,
              disable=None) as bar:
        service = serve(model, scheduler, requests, sampling, lambda step: bar.update(len(step.samples)))

    print(f"\n{bold('Samples')} (temperature {options.temperature:g}, seed {options.seed})\n")
    print_requests([""] * len(lines) if options.chat else lines.values(), requests, model.tokenizer.decode)
    print_service(requests, service)


def main(arguments=None):
    options = parse_options(arguments)
    try:
        model = load_model(options.model or packaged_model())
        sampling = Sampling(options.temperature, options.top_k, options.seed)
        (run_requests if options.requests else run)(model, sampling, options)
    except (ModelFileError, DemoError) as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
