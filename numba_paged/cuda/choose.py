"""Which attention kernel a call gets, and why: the one place that knows all of them.

============================  ========================================================================================
`prefill`                     every format, head_dim, block size and alignment
`decode`                      the same, one query token; the only one for a group of 1, where a product of 8 columns
                              would have one of use
`decode_mma`, `prefill_mma`   tensor cores, if `RULES` hold: `decode_mma` where all rows (query heads of a kv head, times
                              query tokens) are columns of one or two products, `prefill_mma` for more rows
============================  ========================================================================================

A prefix that several sequences share is attended by what serves the rows of all of them: each of these but `decode`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from . import decode, prefill
from .codecs import BFLOAT16, E4M3, E4M3_PORTABLE, E5M2, FLOAT16
from .compile import Kernel
from .decode_mma import DecodeMmaSpec, decode_mma_kernel
from .prefill_mma import NUM_ROWS, prefill_mma_kernel
from .tensor import operand_code
from .tensor_rows import needs_factors


@dataclass(frozen=True)
class Rule:
    """``holds(spec, cc)`` says whether tensor cores can serve an `AttendSpec`; if not, `otherwise` is the reason."""

    holds: Callable
    otherwise: str


RULES = (
    Rule(lambda spec, cc: spec.kv_code in (FLOAT16, BFLOAT16, E4M3, E5M2, E4M3_PORTABLE),
         "the pool's format is neither of 16 bits nor float8"),
    Rule(lambda spec, cc: spec.kv_code != E4M3_PORTABLE,
         "converting float8_e4m3fn in registers needs compute capability 8.9"),
    Rule(lambda spec, cc: spec.query_code == operand_code(spec.kv_code) or needs_factors(spec),
         "queries would be rounded to the format of the product"),
    Rule(lambda spec, cc: spec.head_dim % 16 == 0, "head_dim is not a multiple of 16"),
    Rule(lambda spec, cc: spec.block_size % 8 == 0, "block_size is not a multiple of 8"),
    Rule(lambda spec, cc: spec.copy_bytes == 16, "the pool's rows, strides or addresses are not multiples of 16 bytes"),
)
"""What the tensor-core kernels need. Pools of float16 and float8 enter products as float16, those of bfloat16 as such."""


@dataclass(frozen=True)
class Choice:
    """A kernel, how many blocks it takes for each kv head of an item, and the reason it was chosen."""

    kernel: Kernel
    blocks_per_head: int
    why: str


def most_rows(head_dim):
    """Query rows that `decode_mma` serves with one reading of keys and values: their sums fill the registers."""
    return 16 if head_dim <= 128 else 8


def item_sizes(group, head_dim, most):
    """The most query tokens of the items that go to one kernel, in ascending order; items of up to `most` are the last.

    One query token; a few, whose rows are columns of a product; and more. So which kernel an item gets depends on
    nothing but the item.
    """
    few = max(1, most_rows(head_dim) // group)
    return 1, few, max(few, most)


@functools.cache
def choose_plain(spec, cc, num_queries, why="plain cores were asked for"):
    """As `choose`, without tensor cores."""
    if num_queries == 1:
        return Choice(decode.decode_kernel(spec), decode.decode_shape(spec).num_tiles, why)
    return Choice(prefill.prefill_kernel(spec), 1, why)


@functools.cache
def choose(spec, cc, num_queries):
    """The kernel for items of up to `num_queries` query tokens.

    Parameters
    ----------
    spec : AttendSpec
        What is attended.
    cc : (int, int)
        Compute capability.
    num_queries : int
        The most query tokens of an item; 1 is decode.

    Returns
    -------
    Choice

    Examples
    --------
    >>> from numba_paged.cuda.warp import AttendSpec
    >>> spec = AttendSpec(FLOAT16, FLOAT16, head_dim=128, group=4, block_size=16, copy_bytes=16)
    >>> choose(spec, (9, 0), 1).kernel.name, choose(spec, (9, 0), 16).kernel.name
    ('decode_mma', 'prefill_mma')
    """
    broken = next((rule for rule in RULES if not rule.holds(spec, cc)), None)
    if broken:
        return choose_plain(spec, cc, num_queries, f"plain cores: {broken.otherwise}")
    rows = spec.group * num_queries
    if rows == 1:
        return choose_plain(spec, cc, num_queries, "plain cores: a product would have one column, of one query head")
    if rows <= most_rows(spec.head_dim):
        kernel = decode_mma_kernel(DecodeMmaSpec(spec, -(-rows // 8)))
        return Choice(kernel, 1, f"tensor cores: {rows} query rows are columns of products")
    kernel = prefill_mma_kernel(spec)
    return Choice(kernel, -(-rows // NUM_ROWS), f"tensor cores: {rows} query rows are rows of products")
