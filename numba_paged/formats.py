"""The number formats of queries and of the pool: one table.

A compiler that does not know a format sees its bits as an unsigned integer of the same width (`Format.bits`); the
host sees the `ml_dtypes` dtype (`Format.dtype`).
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """How one number is stored.

    Attributes
    ----------
    name : str
        The dtype's name, as NumPy prints it.
    dtype : numpy.dtype
        What arrays on the host have.
    bits : numpy.dtype
        The integer of the same width that carries the bits where a compiler does not know the dtype.
    max : float
        The largest finite value; writing saturates to it.
    """

    name: str
    dtype: np.dtype
    bits: np.dtype
    max: float

    @property
    def itemsize(self):
        """Bytes per number."""
        return self.dtype.itemsize


def _format(dtype, bits, largest):
    dtype = np.dtype(dtype)
    return Format(dtype.name, dtype, np.dtype(bits), float(largest))


FORMATS = {
    f.name: f
    for f in (
        _format(np.float32, np.uint32, np.finfo(np.float32).max),
        _format(np.float16, np.uint16, 65504),
        _format(ml_dtypes.bfloat16, np.uint16, ml_dtypes.finfo(ml_dtypes.bfloat16).max),
        _format(ml_dtypes.float8_e4m3fn, np.uint8, 448),
        _format(ml_dtypes.float8_e5m2, np.uint8, 57344),
        _format(np.int8, np.int8, 127),
    )
}
"""Every format a pool may have, by name."""

QUERY_FORMATS = ("float32", "float16", "bfloat16")
"""The formats of queries, of new keys and values, and of outputs."""


def format_of(dtype, argument="kv_dtype", allowed=tuple(FORMATS)):
    """The `Format` of a dtype or of its name.

    Parameters
    ----------
    dtype : dtype-like
        A NumPy or ml_dtypes dtype, or its name.
    argument : str
        What to call it in the error.
    allowed : tuple of str
        The names that are accepted.

    Returns
    -------
    Format

    Raises
    ------
    TypeError
        If it is none of the allowed formats, or in another byte order than the machine's.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if not isinstance(dtype, str) and not np.dtype(dtype).isnative:
        raise TypeError(f"{argument}: dtype {name} is not in the machine's byte order")
    if name not in allowed:
        raise TypeError(f"{argument}: dtype {name} is not supported; use one of {', '.join(allowed)}")
    return FORMATS[name]
