"""What is fixed before the first step: the attention's geometry, and the options of one call."""

from dataclasses import dataclass
from numbers import Real
from typing import Any

from .formats import FORMATS, format_of

MAX_HEAD_DIM = 256
"""The kernels keep a head's accumulator in registers; past this they would spill."""

SMALLEST_FLOAT32 = 2.0**-149
"""Positive numbers below are 0 to the kernels."""

NO_WINDOW = 2**31 - 1
"""The window that hides nothing: no sequence is longer."""


def _count(name, value):
    if isinstance(value, bool) or not isinstance(value, Real) or value % 1 != 0 or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
    return int(value)


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
    _count("num_kv_heads", num_kv_heads)
    _count("head_dim", head_dim)
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")


def check_number(name, value, *, positive=False):
    """A finite float, or a `ValueError` that names the argument and the bound.

    Parameters
    ----------
    name : str
        The argument's name.
    value : float
        What was given.
    positive : bool
        Whether zero and below are refused too.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If it is not finite, or not positive where it must be, as a float32.
    TypeError
        If it is not a number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}") from None
    if not abs(number) <= FORMATS["float32"].max or (positive and number < SMALLEST_FLOAT32):
        raise ValueError(f"{name} must be finite{' and > 0' if positive else ''} in float32, got {value!r}")
    return number


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
            "block_size": _count("block_size", self.block_size),
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
        object.__setattr__(self, "scale", check_number("scale", self.scale))
        for name in ("k_scale", "v_scale"):
            object.__setattr__(self, name, check_number(name, getattr(self, name), positive=True))
        if self.soft_cap is not None:
            object.__setattr__(self, "soft_cap", check_number("soft_cap", self.soft_cap, positive=True))
        for name in ("window", "split_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _count(name, getattr(self, name)))
