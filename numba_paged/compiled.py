"""How the host's loops are compiled."""

from numba import njit

bare = njit(cache=True, _nrt=False)
"""For functions that make and return no arrays: without the counting of references to those they are given, which would
take ten times as long as the loops themselves. (Numba's own sorting is compiled like this.)"""

making = njit(cache=True)
"""For functions that make arrays: they leave the loops to bare ones."""
