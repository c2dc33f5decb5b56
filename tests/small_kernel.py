"""A kernel of a few lines, with a parameter of every kind, to try what compiles, keeps and launches kernels."""

from dataclasses import dataclass

from numba.cuda import types

from numba_paged.cuda.codecs import FLOAT32
from numba_paged.cuda.compile import Kernel
from numba_paged.cuda.intrinsics import block_x, thread_index
from numba_paged.cuda.memory import load_global, store_global

PARAMETERS = {"target": types.uint64, "source": types.uint64, "count": types.uint32, "factor": types.float32,
              "first": types.int32}
NUM_THREADS = 32


@dataclass(frozen=True)
class ScaleSpec:
    """`stride`: numbers from one source to the next."""

    stride: int


def make_scale(spec):
    """target[i] = source[first + stride · i] · factor for i < count; one thread a number."""
    stride, num_threads = spec.stride, NUM_THREADS

    def scale(target, source, count, factor, first):
        index = types.uint32(block_x() * types.uint32(num_threads) + thread_index())
        if index < count:
            at = types.uint64(types.uint32(first) + index * types.uint32(stride))
            (number,) = load_global(FLOAT32, 1, source + at * types.uint64(4))
            store_global(FLOAT32, False, target + types.uint64(index) * types.uint64(4), (number * factor,))

    return scale


def scale_kernel(stride=2, shared_bytes=0):
    """The kernel for a stride."""
    return Kernel("scale", make_scale, ScaleSpec(stride), PARAMETERS, NUM_THREADS, shared_bytes)
