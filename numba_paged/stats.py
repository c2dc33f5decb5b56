"""CacheStats: how a cache is used, at one moment."""

from dataclasses import dataclass

from .blocks import NUM_COPIED, NUM_EVICTED
from .sequences import SWAPPED


@dataclass(frozen=True)
class CacheStats:
    """How a cache is used, at one moment; what is counted, is counted since the cache was made.

    Attributes
    ----------
    num_blocks, num_free, num_cached, num_used : int
        Blocks in all; of these free, kept for their prefix but held by nobody, and in use.
    num_shared : int
        Blocks in use that more than one sequence or open plan holds.
    num_sequences : int
        Living sequences, those that are swapped out included.
    num_tokens : int
        Tokens of the sequences in the pool; shared ones are counted once per sequence, those out of a window not at
        all.
    num_wasted : int
        Slots in the blocks of these sequences that hold no token, again once per sequence.
    block_bytes : int
        Bytes that one block takes, keys and values of all layers.
    num_copied : int
        Blocks copied on write.
    num_evicted : int
        Cached blocks that were given to others.
    num_queried, num_hits : int
        Token ids given to `add`, and of these the tokens that were in the cache.
    num_requeried, num_rehits : int
        The same for `resume`: prompts that are computed again after a preemption.
    num_host_blocks, num_host_free : int
        Blocks in the host pool, and of these free.
    num_swapped_out, num_swapped_in : int
        Blocks moved to the host pool, and back.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int
    num_sequences: int
    num_tokens: int
    num_wasted: int
    block_bytes: int
    num_copied: int
    num_evicted: int
    num_queried: int
    num_hits: int
    num_requeried: int
    num_rehits: int
    num_host_blocks: int
    num_host_free: int
    num_swapped_out: int
    num_swapped_in: int


def collect(pool, sequences, prefixes, host, bytes_per_token):
    """The statistics of a cache's parts.

    Parameters
    ----------
    pool : BlockPool
        The blocks.
    sequences : SequenceTables
        The sequences.
    prefixes : PrefixCache
        The prefix index.
    host : HostPool or None
        The blocks on the host.
    bytes_per_token : int
        Bytes that one token takes, keys and values of all layers.

    Returns
    -------
    CacheStats
    """
    resident, block_size = sequences.in_pool(), sequences.block_size
    hidden = sequences.starts[resident] * block_size
    num_tokens = int((sequences.lengths[resident] - hidden).sum())
    return CacheStats(
        num_blocks=pool.num_blocks,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_used=pool.num_blocks - pool.num_available,
        num_shared=int((pool.refs > 1).sum()),
        num_sequences=int((resident | (sequences.states == SWAPPED)).sum()),
        num_tokens=num_tokens,
        num_wasted=int((sequences.num_blocks[resident] * block_size - hidden).sum()) - num_tokens,
        block_bytes=bytes_per_token * block_size,
        num_copied=int(pool.counts[NUM_COPIED]),
        num_evicted=int(pool.counts[NUM_EVICTED]),
        num_queried=prefixes.queried[False],
        num_hits=prefixes.hits[False],
        num_requeried=prefixes.queried[True],
        num_rehits=prefixes.hits[True],
        num_host_blocks=host.blocks.num_blocks if host else 0,
        num_host_free=host.blocks.num_free if host else 0,
        num_swapped_out=host.num_moved_out if host else 0,
        num_swapped_in=host.num_moved_in if host else 0,
    )
