"""What a backend does, and how one is found: nothing is imported before it is asked for."""

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .plan import Plan, Tiling
from .spec import AttentionOptions

BACKENDS = {"cpu": ("numba_paged.cpu.backend", "CpuBackend"), "cuda": ("numba_paged.cuda.backend", "CudaBackend")}


class Backend(Protocol):
    """What a backend does. Arguments were checked by the caller; arrays are of the backend's own kind."""

    name: str

    def on(self, **arrays) -> AbstractContextManager:
        """Make the device of these arrays the current one while a call lasts; None does not count."""

    def view(self, array, name) -> Any:
        """The backend's own kind of array over the caller's memory, nothing copied; `name` is for the error."""

    def array(self, values) -> Any:
        """A NumPy array brought to where the backend computes."""

    def to_host(self, array, name) -> Any:
        """An array of the backend's place as NumPy."""

    def empty(self, shape, dtype) -> Any:
        """An array where the backend computes, not filled."""

    def zeros(self, shape, dtype) -> Any:
        """An array of zeros where the backend computes."""

    def tiling(self, group, max_queries) -> Tiling:
        """How work is to be cut for a group size and the longest run of query tokens of a sequence."""

    def append(self, k, v, keys, values, slots, k_scale, v_scale, plan=None) -> None:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to the slots of one layer; slot -1 writes nothing.

        With the plan whose slots they are, a backend may bring them to its device once for all layers.
        """

    def copy_blocks(self, keys, values, sources, targets) -> None:
        """Copy whole blocks of pools [num_layers, num_blocks, ...], all reads before all writes."""

    def read_blocks(self, pool, blocks) -> np.ndarray:
        """The bits of whole blocks of a pool [num_layers, num_blocks, ...], as integers (`Format.bits`) on the host."""

    def write_blocks(self, pool, blocks, bits) -> None:
        """Write what `read_blocks` gave into blocks of the pool."""

    def attend(self, q, keys, values, plan: Plan, options: AttentionOptions, out, lse) -> None:
        """Attend q over one layer of the pool as the plan says; fill out and, unless it is None, lse."""

    def merge(self, outs, lses, out, lse) -> None:
        """Merge partials [num_parts, num_tokens, num_q_heads, head_dim] into out and lse."""


@functools.cache
def load_backend(name) -> Backend:
    """The backend of that name, made on first use and kept.

    Parameters
    ----------
    name : {"auto", "cpu", "cuda"}
        Which; "auto" is CUDA where CuPy and a device are there, else the CPU.

    Returns
    -------
    Backend

    Raises
    ------
    ValueError
        If there is no backend of that name.
    RuntimeError
        If what it needs is not installed, or there is no device.
    """
    if name == "auto":
        return _load_best()
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}; got {name!r}")
    module, cls = BACKENDS[name]
    try:
        return getattr(importlib.import_module(module), cls)()
    except ImportError as error:
        raise RuntimeError(f"backend {name!r} cannot be loaded: {error}; "
                           f"CUDA needs numba_paged[cuda12x] or numba_paged[cuda13x]") from error


def _load_best():
    if importlib.util.find_spec("cupy") is None:
        return load_backend("cpu")
    try:
        return load_backend("cuda")
    except RuntimeError:  # CuPy without a device
        return load_backend("cpu")
