"""The CPU backend: Numba kernels over NumPy arrays. Nothing is imported before `backend.load_backend` asks for it."""
