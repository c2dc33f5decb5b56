"""The backends that every test body runs on: the one place that lists them."""

from contextlib import nullcontext

import numpy as np


class CPU:
    """NumPy arrays on the CPU backend."""

    name = "cpu"
    marks = ()

    def active(self):
        """What must hold while a test uses the backend; a test is skipped by raising here."""
        return nullcontext()

    def asarray(self, x):
        """A NumPy array as the backend takes it, strides kept."""
        return x

    def asnumpy(self, x):
        """The backend's array on the host."""
        assert isinstance(x, np.ndarray)
        return x

    def weight_rounding(self, q_dtype, kv_dtype):
        """Half a unit in the last place of the format that carries the softmax weights into p·V (0: float32)."""
        return 0.0


BACKENDS = (CPU(),)
