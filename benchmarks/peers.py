"""What others make of the same case, as far as they are installed: each peer is a function, or is left out."""

import importlib.util

import numpy as np


def torch_peers(case, causal=False):
    """torch: gather + scaled dot product attention, and the same over a contiguous cache (no paging).

    Parameters
    ----------
    case : common.Case
        All its sequences must have the same length and number of queries.
    causal : bool
        Whether the queries are several and see only what comes before them.

    Returns
    -------
    dict of str to callable
        Empty without torch, or where it does not know the format.
    """
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if case.keys.dtype.name not in kinds or case.q.dtype != case.keys.dtype:
        return {}
    kind = kinds[case.keys.dtype.name]

    def tensor(array):
        bits = array.view({4: np.int32, 2: np.int16}[array.itemsize])
        return torch.from_numpy(bits).view(kind)

    num_seqs, length = len(case.lengths), int(case.lengths[0])
    count = int(case.query_starts[1])
    q = tensor(case.q).reshape(num_seqs, count, *case.q.shape[1:]).transpose(1, 2)
    keys, values = tensor(case.keys), tensor(case.values)
    tables = torch.from_numpy(case.tables.astype(np.int64))
    mask = None
    if causal:
        mask = torch.arange(length) <= torch.arange(length - count, length)[:, None]

    def gather(pool):
        return pool[tables].reshape(num_seqs, -1, *pool.shape[2:])[:, :length].transpose(1, 2)

    contiguous = gather(keys).contiguous(), gather(values).contiguous()
    is_square = causal and count == length
    how = {"is_causal": True} if is_square else {"attn_mask": mask}
    return {
        "torch gather + SDPA": lambda: attention(q, gather(keys), gather(values), enable_gqa=True, **how),
        "torch SDPA, contiguous": lambda: attention(q, *contiguous, enable_gqa=True, **how),
    }
