"""numba_paged: a paged KV cache and the attention that reads it, for NumPy, CuPy and Numba.

The host decides, a plan carries, a kernel obeys: sequence state is NumPy on the host, one step's decisions are one
immutable `Plan`, and the kernels of a backend read the pool through it.
"""

from .attention import append, copy_blocks, decode, merge, prefill
from .blocks import BlockPool
from .errors import CorruptState, OutOfBlocks, UnknownSequence
from .kv_cache import PagedKVCache
from .plan import Plan
from .scheduler import Request, Scheduler, Step
from .sizing import blocks_that_fit, contiguous_bytes, kv_bytes_per_token, waste
from .spec import AttentionSpec
from .stats import CacheStats

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "BlockPool",
    "CacheStats",
    "CorruptState",
    "OutOfBlocks",
    "PagedKVCache",
    "Plan",
    "Request",
    "Scheduler",
    "Step",
    "UnknownSequence",
    "append",
    "blocks_that_fit",
    "contiguous_bytes",
    "copy_blocks",
    "decode",
    "kv_bytes_per_token",
    "merge",
    "prefill",
    "waste",
]
