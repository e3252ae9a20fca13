"""The one seam between NumPy and CuPy: only here is cupy imported, and only when it is needed."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from dtrain.devices import check_device, number_of
from dtrain.errors import SpecError

#: A ``numpy.ndarray`` or a ``cupy.ndarray``.
Array: TypeAlias = Any

#: Bytes.  Every variable, segment and slot starts on a multiple of it: a cache line, so that two
#: threads never write the same line, and the widest vector register.
ALIGNMENT = 64


def namespace(device: str) -> ModuleType:
    """The array module of a device.

    Parameters
    ----------
    device : str
        ``"cpu"``, ``"cuda"``, ``"cuda:<number>"``, or ``"auto"``: a GPU if CuPy finds one, else
        the CPU.

    Returns
    -------
    module
        ``numpy`` or ``cupy``.

    Raises
    ------
    SpecError
        For another word, or a GPU that is not there.
    """
    if check_device(device) == "cpu":
        return np
    cupy = _cupy()
    if device == "auto":
        return np if isinstance(cupy, str) else cupy
    if isinstance(cupy, str):
        raise SpecError(f"device: found {device!r}, expected a CUDA device here, but {cupy}")
    count = cupy.cuda.runtime.getDeviceCount()
    if number_of(device) >= count:
        raise SpecError(f"device: found {device!r}, expected a number below {count}")
    return cupy


def devices() -> tuple[tuple[str, ...], str]:
    """The devices of this process, and why no GPU is among them, in words.

    Returns
    -------
    tuple of str
        ``"cpu"``, and ``"cuda:<number>"`` for each GPU that CuPy can use.
    str
        Empty where there is one.
    """
    cupy = _cupy()
    if isinstance(cupy, str):
        return ("cpu",), cupy
    count = cupy.cuda.runtime.getDeviceCount()
    return ("cpu", *(f"cuda:{number}" for number in range(count))), ""


def on(device: str) -> AbstractContextManager[Any]:
    """A context in which a device, ``"cpu"`` or ``"cuda:<number>"``, is this thread's own."""
    xp = namespace(device)
    return nullcontext() if xp is np else xp.cuda.Device(number_of(device))


def xp_of(array: Array) -> ModuleType:
    """The module that ``array`` belongs to: ``cupy`` for its arrays, ``numpy`` for all else."""
    if type(array) is np.ndarray:
        return np
    # Whoever holds a CuPy array has imported cupy; nobody else pays for the import.
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def to_numpy(array: Array) -> np.ndarray:
    """``array`` in host memory, as a plain ``numpy.ndarray``; no copy if it is one already."""
    xp = xp_of(array)
    return np.asarray(array) if xp is np else xp.asnumpy(array)


def as_array(values: Array, xp: ModuleType = np) -> Array:
    """``values`` as an array of ``xp``; no copy if it is one already."""
    return to_numpy(values) if xp is np else xp.asarray(values)


def copy_into(target: Array, source: Array) -> None:
    """Copy ``source`` into ``target`` of the same shape, cast to its dtype, from either device."""
    xp = xp_of(target)
    xp.copyto(target, as_array(source, xp), casting="unsafe")


def transfer(target: Array, source: Array) -> None:
    """Copy between the host and a GPU, with nothing between; both C-contiguous, of one dtype."""
    if xp_of(target) is np:
        source.get(out=target)
    else:
        target.set(source)


def aligned_bytes(nbytes: int, xp: ModuleType = np) -> Array:
    """A zeroed buffer whose data starts on a multiple of :data:`ALIGNMENT` bytes.

    Returns
    -------
    ndarray of uint8, shape (nbytes,)
    """
    raw = xp.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    skip = -address(raw) % ALIGNMENT
    return raw[skip : skip + nbytes]


def address(array: Array) -> int:
    """Where the data of ``array`` starts, in bytes."""
    return int(array.ctypes.data if xp_of(array) is np else array.data.ptr)


def quiet() -> np.errstate:
    """A context in which NumPy does not warn: NaN and infinities flow on to whoever checks them."""
    return np.errstate(all="ignore")


def _cupy() -> Any:
    """The module ``cupy`` if a GPU can be used, else a string that says why not."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    except Exception as error:  # noqa: BLE001 - an installation that is broken is none
        return f"CuPy cannot be imported: {type(error).__name__}: {error}"
    try:
        return cupy if cupy.cuda.is_available() else "CuPy finds none"
    except Exception as error:  # noqa: BLE001 - of CUDA's own kinds: an old driver, say
        return f"CuPy finds none: {type(error).__name__}: {error}"
