"""Arrays in and out: NumPy, CuPy, DLPack and the CUDA array interface; shapes, dtypes, strides. Nothing is copied."""

import numpy as np

_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 3, 13)  # device, pinned host and managed memory of CUDA


def place_of(array, name="array"):
    """Where an array lives: what decides which backend runs.

    Parameters
    ----------
    array : object
        A NumPy array, or anything with ``__cuda_array_interface__`` or ``__dlpack__``.
    name : str
        The argument's name, for the error.

    Returns
    -------
    {"cpu", "cuda"}

    Raises
    ------
    TypeError
        If it is no array, or lives on another kind of device.
    """
    if isinstance(array, np.ndarray):
        return "cpu"
    if hasattr(array, "__cuda_array_interface__"):
        return "cuda"
    if hasattr(array, "__dlpack_device__"):
        device = int(array.__dlpack_device__()[0])
        if device == _DLPACK_CPU:
            return "cpu"
        if device in _DLPACK_CUDA:
            return "cuda"
        raise TypeError(f"{name} lives on DLPack device type {device}; only CPU and CUDA arrays are supported")
    raise TypeError(f"{name} must be a NumPy or CuPy array, or have __dlpack__ or __cuda_array_interface__; "
                    f"got {type(array).__name__}")


def common_place(**arrays):
    """The one place where all the given arrays live; those that are None do not count.

    Parameters
    ----------
    **arrays : object
        Arrays by argument name.

    Returns
    -------
    {"cpu", "cuda"}

    Raises
    ------
    TypeError
        If one is no array, or host and device arrays are mixed.
    """
    for array in arrays.values():
        if type(array) is not np.ndarray:
            break
    else:
        return "cpu"
    places = {name: place_of(array, name) for name, array in arrays.items() if array is not None}
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise TypeError(f"host and device arrays are mixed: {listed}")
    return next(iter(places.values()))


def host_array(array, name="array"):
    """A NumPy view of an array on the host.

    Parameters
    ----------
    array : object
        A NumPy array, or a host object with ``__dlpack__``.
    name : str
        The argument's name, for the error.

    Returns
    -------
    numpy.ndarray

    Raises
    ------
    TypeError
        If it cannot be seen as one (a format that NumPy's DLPack does not know, for example).
    """
    if isinstance(array, np.ndarray):
        return array
    try:
        return np.from_dlpack(array)
    except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
        raise TypeError(f"{name}: {type(array).__name__} cannot be viewed as a NumPy array: {error}") from error


def host_integers(values, name, ndim, dtypes=(np.int32,)):
    """Tables, lengths and slots as a NumPy array of one of the given integer dtypes.

    Parameters
    ----------
    values : array or nested sequence of int
        Arrays must have the dtype already; Python numbers are converted.
    name : str
        The argument's name, for the errors.
    ndim : int
        How many axes it must have.
    dtypes : tuple of dtype-like
        What is accepted; Python numbers become the first.

    Returns
    -------
    numpy.ndarray

    Raises
    ------
    TypeError
        If the dtype is another.
    ValueError
        If the number of axes is another.
    """
    if isinstance(values, (list, tuple, range)):
        array = _from_sequence(values, name, dtypes[0])
    else:
        array = host_array(values, name)
    if array.dtype not in dtypes:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {array.dtype.name}")
    check_ndim(array, name, ndim)
    return array


def _from_sequence(values, name, dtype):
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold whole numbers, got {array.dtype.name}")
    bounds = np.iinfo(dtype)
    if array.size and not (bounds.min <= array.min() and array.max() <= bounds.max):
        raise ValueError(f"{name} holds a number outside of {np.dtype(dtype).name}: {array.min()}..{array.max()}")
    return array.astype(dtype)


def host_floats(values, name, size, lowest):
    """One float32 per query head (slopes, sinks), or None.

    Parameters
    ----------
    values : array or sequence of float, or None
        What was given.
    name : str
        The argument's name, for the errors.
    size : int
        The number of query heads.
    lowest : float
        The lowest that one may be; the highest is the largest finite float32.

    Returns
    -------
    numpy.ndarray of float32, [size], or None

    Raises
    ------
    TypeError
        If it does not hold numbers.
    ValueError
        If its shape is another, or one is NaN or out of range.
    """
    if values is None:
        return None
    array = np.asarray(values) if isinstance(values, (list, tuple)) else host_array(values, name)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold floats, got {array.dtype.name}")
    check_shape(array, name, (size,))
    array = np.ascontiguousarray(array, np.float32)
    bad = np.flatnonzero(~((array >= lowest) & (array < np.inf)))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}, must be from {lowest} to less than infinity")
    return array


def check_ndim(array, name, ndim):
    """Refuse an array with another number of axes.

    Parameters
    ----------
    array : array
        With ``shape``.
    name : str
        The argument's name, for the error.
    ndim : int
        Axes that it must have.

    Raises
    ------
    ValueError
        If it has another number of axes.
    """
    if len(array.shape) != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {tuple(array.shape)}")


def check_shape(array, name, shape):
    """Refuse an array of another shape.

    Parameters
    ----------
    array : array
        With ``shape``.
    name : str
        The argument's name, for the error.
    shape : tuple of int
        What it must be.

    Raises
    ------
    ValueError
        If it is another.
    """
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(array.shape)}")


def check_last_axis(array, name):
    """Refuse an array whose last axis is not contiguous: the kernels read it in runs.

    Parameters
    ----------
    array : array
        With ``shape``, ``strides`` in bytes and ``dtype``.
    name : str
        The argument's name, for the error.

    Raises
    ------
    ValueError
        If neighbours on the last axis are not neighbours in memory.
    """
    if array.shape[-1] > 1 and array.size and array.strides[-1] != array.dtype.itemsize:
        raise ValueError(f"{name}: the last axis must be contiguous, got strides {tuple(array.strides)} bytes "
                         f"for items of {array.dtype.itemsize}")
