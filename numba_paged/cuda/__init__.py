"""The CUDA backend: kernels written in Python, compiled by Numba; only `device` needs a driver."""

import importlib.util

if importlib.util.find_spec("numba_cuda") is None:  # Numba's own numba.cuda is older and lacks what the kernels use
    raise ImportError("numba-cuda is not installed", name="numba_cuda")
