"""Numbers that a caller gives: refused with a message that names the argument, the value and the bound."""

from numbers import Real

import numpy as np

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SMALLEST_FLOAT32 = 2.0**-149
"""Positive numbers below it are 0 to the kernels."""


def whole_number(name, value, low=1, high=None):
    """A count or a size as an int.

    Parameters
    ----------
    name : str
        The argument's name.
    value : int
        What was given; a float that is whole is taken too.
    low, high : int
        The bounds, both included; no upper bound if it is None.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If it is not a whole number within the bounds.
    """
    if type(value) is not int:
        whole = not isinstance(value, (bool, np.bool_)) and isinstance(value, (Real, np.number)) and value % 1 == 0
        if not whole:  # NaN and infinity leave a remainder that is no number
            raise ValueError(f"{name} must be a whole number {_bounds(low, high)}, got {value!r}")
        value = int(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be a whole number {_bounds(low, high)}, got {value!r}")
    return value


def _bounds(low, high):
    return f">= {low}" if high is None else f"from {low} to {high}"


def finite_number(name, value, *, positive=False):
    """A number that is finite as a float32.

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
    if not abs(number) <= LARGEST_FLOAT32 or (positive and number < SMALLEST_FLOAT32):
        raise ValueError(f"{name} must be finite{' and > 0' if positive else ''} in float32, got {value!r}")
    return number
