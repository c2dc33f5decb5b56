"""The CUDA backend: kernels written in Python, compiled by Numba; only `device` needs a driver."""
