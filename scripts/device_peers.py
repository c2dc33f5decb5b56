"""Other attention kernels on the same device, where they import: what ours is timed beside.

Each peer gets the same lengths and number of bytes. FlashInfer reads our pool; FlashAttention wants blocks of at least
256 tokens, PyTorch's SDPA contiguous keys and values: they get random ones of their own.
"""

import importlib

from device_cases import BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS

NUM_BYTES_OF_WORKSPACE = 256 << 20
FLASH_BLOCK = 256


def _torch(array):
    """A CuPy array as a tensor; float8 by way of its bits."""
    import torch

    bits = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}.get(array.dtype.name)
    return torch.from_dlpack(array) if bits is None else torch.from_dlpack(array.view("u1")).view(bits)


def flashinfer(ready):
    """FlashInfer's paged wrappers, planned ahead."""
    import flashinfer
    import torch

    case = ready.case
    decode = case.operation == "decode"
    blocks = ready.tables.shape[1]
    workspace = torch.empty(NUM_BYTES_OF_WORKSPACE, dtype=torch.uint8, device="cuda")
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
    indices = torch.from_numpy(ready.tables.ravel()).cuda()
    last = torch.full((case.batch,), (case.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device="cuda")
    q, pools = _torch(ready.q), tuple(_torch(pool) for pool in ready.pools)
    heads = (case.group * NUM_KV_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": pools[0].dtype}
    if decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=case.group >= 4)
        wrapper.plan(starts * blocks, indices, last, *heads, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(starts * case.num_queries, starts * blocks, indices, last, *heads, causal=True, **dtypes)
    return lambda: wrapper.run(q, pools)


def flash_attention(ready):
    """FlashAttention's kernel for paged caches."""
    import flash_attn
    import torch

    case = ready.case
    blocks = -(-case.context // FLASH_BLOCK)
    shape = (case.batch * blocks, FLASH_BLOCK, NUM_KV_HEADS, HEAD_DIM)
    keys, values = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(2))
    q = _torch(ready.q).reshape(case.batch, case.num_queries, -1, HEAD_DIM)
    tables = torch.randperm(case.batch * blocks, dtype=torch.int32, device="cuda").reshape(case.batch, blocks)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
    return lambda: flash_attn.flash_attn_with_kvcache(q, keys, values, cache_seqlens=lengths, block_table=tables,
                                                      causal=True)


def sdpa(ready):
    """PyTorch's scaled_dot_product_attention on contiguous keys and values."""
    import torch

    case = ready.case
    shape = (case.batch, NUM_KV_HEADS, case.context, HEAD_DIM)
    k, v = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(2))
    q = _torch(ready.q).reshape(case.batch, case.num_queries, -1, HEAD_DIM).transpose(1, 2)
    mask = None
    if case.num_queries > 1:
        mask = torch.ones(case.num_queries, case.context, dtype=torch.bool, device="cuda")
        mask = mask.tril(case.context - case.num_queries)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, attn_mask=mask, enable_gqa=True)


PEERS = {  # name: module, function, formats of the pool
    "FlashInfer": ("flashinfer", flashinfer, ("float16", "float8_e4m3fn")),
    "FlashAttention": ("flash_attn", flash_attention, ("float16",)),
    "SDPA": ("torch", sdpa, ("float16",)),
}


class Peers:
    """The peers that work here.

    Attributes
    ----------
    missing : dict of str to str
        Why the others do not.
    """

    def __init__(self):
        self.found, self.missing = {}, {}
        for name, (module, make, formats) in PEERS.items():
            try:
                importlib.import_module(module)
            except Exception as error:  # an import of a CUDA extension may fail in any way
                self.missing[name] = f"{type(error).__name__}: {error}"
            else:
                self.found[name] = make, formats

    def seconds(self, ready):
        """The median times of the peers that can do a case; one that fails is not asked again."""
        times = {}
        for name, (make, formats) in list(self.found.items()):
            if ready.case.kv_dtype in formats:
                try:
                    times[name] = ready.place.seconds(make(ready))
                except Exception as error:  # a peer's failure is the peer's
                    self.missing[name] = f"{type(error).__name__}: {error}"
                    del self.found[name]
        return times
