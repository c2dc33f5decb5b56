"""What is fixed before the first step: the attention's geometry, and the options of one call."""

from dataclasses import dataclass
from typing import Any

from .formats import FORMATS, format_of
from .scalars import finite_number, whole_number

MAX_HEAD_DIM = 256
"""The kernels keep a head's accumulator in registers; past this they would spill."""

NO_WINDOW = 2**31 - 1
"""The window that hides nothing: no sequence is longer."""


def check_heads(num_q_heads, num_kv_heads, head_dim):
    """Refuse a geometry that no kernel can serve.

    Parameters
    ----------
    num_q_heads, num_kv_heads, head_dim : int
        As in `AttentionSpec`.

    Raises
    ------
    ValueError
        If ``num_q_heads % num_kv_heads != 0``, or a count or `head_dim` is out of range.
    """
    whole_number("num_kv_heads", num_kv_heads)
    whole_number("head_dim", head_dim, high=MAX_HEAD_DIM)
    if whole_number("num_q_heads", num_q_heads) % num_kv_heads:
        raise ValueError(f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}")


def scale_of(scale, head_dim):
    """The softmax scale, ``head_dim ** -0.5`` where none is given."""
    return head_dim**-0.5 if scale is None else scale


@dataclass(frozen=True)
class AttentionSpec:
    """The geometry and the standing options of a model's attention; hashable, checked when made.

    Parameters
    ----------
    num_q_heads : int
        Query heads, a multiple of `num_kv_heads`.
    num_kv_heads : int
        Heads of keys and values.
    head_dim : int
        Numbers per head, 1 to 256; multiples of 8 are the fast ones.
    block_size : int
        Slots per block.
    kv_dtype : dtype-like
        The format of the pool; kept as its name.
    scale : float, optional
        What scores are multiplied with; ``head_dim ** -0.5`` if not given.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    window : int, optional
        How many keys a query sees, its own included.

    Raises
    ------
    ValueError
        If a number is out of its range.
    TypeError
        If the format is not one of the pool's.

    Examples
    --------
    >>> spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    >>> spec.group, spec.kv_dtype
    (4, 'float16')
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    kv_dtype: str = "float16"
    scale: float | None = None
    soft_cap: float | None = None
    window: int | None = None

    def __post_init__(self):
        check_heads(self.num_q_heads, self.num_kv_heads, self.head_dim)
        options = AttentionOptions(scale_of(self.scale, self.head_dim), self.soft_cap, self.window)
        fixed = {
            "num_q_heads": int(self.num_q_heads),
            "num_kv_heads": int(self.num_kv_heads),
            "head_dim": int(self.head_dim),
            "block_size": whole_number("block_size", self.block_size),
            "kv_dtype": format_of(self.kv_dtype).name,
            "scale": options.scale,
            "soft_cap": options.soft_cap,
            "window": options.window,
        }
        for name, value in fixed.items():
            object.__setattr__(self, name, value)

    @property
    def group(self):
        """Query heads that share one kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_format(self):
        """The `Format` of the pool."""
        return FORMATS[self.kv_dtype]


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """What one attention call does beyond softmax(q k) v; checked when made.

    Parameters
    ----------
    scale : float
        What scores are multiplied with.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    window : int, optional
        How many keys a query sees, its own included.
    alibi_slopes, sinks : array [num_q_heads] of float32, optional
        Bias per position, and extra logit in the denominator, per query head.
    k_scale, v_scale : float
        What stored keys and values are multiplied with when read.
    causal : bool
        Whether a query sees only the keys up to its own position.
    split_size : int, optional
        A fixed length of the splits, in tokens.

    Raises
    ------
    ValueError
        If a number is out of its range.
    TypeError
        If something is not a number.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    window: int | None = None
    alibi_slopes: Any = None
    sinks: Any = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    causal: bool = True
    split_size: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "scale", finite_number("scale", self.scale))
        for name in ("k_scale", "v_scale"):
            object.__setattr__(self, name, finite_number(name, getattr(self, name), positive=True))
        if self.soft_cap is not None:
            object.__setattr__(self, "soft_cap", finite_number("soft_cap", self.soft_cap, positive=True))
        for name in ("window", "split_size"):
            if getattr(self, name) is not None:  # no sequence is longer than NO_WINDOW, so that more is the same
                object.__setattr__(self, name, min(whole_number(name, getattr(self, name)), NO_WINDOW))
