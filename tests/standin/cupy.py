"""A stand-in for CuPy where there is no GPU.  It is imported as ``cupy``, see ``tests/gpu.py``.

Its arrays hold NumPy's, so that results have the same bits, and refuse what CuPy's refuse: to mix
with arrays of the host, and to become one without being asked.  They are on the device that was
the thread's own when they were made, and refuse to be used on another.  ``CUDA_VISIBLE_DEVICES``
says how many devices there are, as ever.
"""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

_thread = threading.local()

#: How many whole arrays have crossed by :meth:`ndarray.set` and :meth:`ndarray.get`, and how many
#: bytes were handed to :func:`asarray`.
crossed = {"set": 0, "get": 0, "asarray": 0}


def _current() -> int:
    return getattr(_thread, "device", 0)


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """Wraps an array of NumPy; what it cannot do by itself, that does."""

    __hash__ = None

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self._device = _current()

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _call(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _call(function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("setflags", "ctypes", "base"):
            raise AttributeError(f"the stand-in for CuPy's arrays has no {name}")
        found = getattr(self._values, name)
        if not callable(found):
            return _there(found)
        return lambda *args, **kwargs: _call(getattr(_here(self), name), args, kwargs)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self._values.ctypes.data)

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        crossed["get"] += 1
        values = _here(self)
        if out is None:
            return values.copy()
        _fits(out, values)
        np.copyto(out, values)
        return out

    def set(self, values: np.ndarray) -> None:
        crossed["set"] += 1
        _fits(values, _here(self))
        np.copyto(self._values, values)

    def __getitem__(self, key: Any) -> Any:
        return _there(_here(self)[_here(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        _here(self)[_here(key)] = _here(value)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Any:
        return map(_there, _here(self))

    def __float__(self) -> float:
        return float(_here(self))

    def __int__(self) -> int:
        return int(_here(self))

    def __bool__(self) -> bool:
        return bool(_here(self))

    def __repr__(self) -> str:
        return f"stand-in on {self._device}: {self._values!r}"


def _here(value: Any) -> Any:
    """What NumPy is to work with; refuses arrays that are not of this device."""
    if isinstance(value, ndarray):
        if value._device != _current():
            raise ValueError(f"an array of device {value._device} is used on {_current()}")
        return value._values
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, tuple | list):
        return type(value)(map(_here, value))
    if isinstance(value, dict):
        return {key: _here(item) for key, item in value.items()}
    return value


def _there(value: Any) -> Any:
    # As CuPy's: a reduction to one number is an array without axes.
    if isinstance(value, np.ndarray | np.generic):
        return ndarray(np.asarray(value))
    return tuple(map(_there, value)) if type(value) is tuple and _has_arrays(value) else value


def _has_arrays(values: tuple) -> bool:
    return any(isinstance(value, np.ndarray) for value in values)


def _call(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = function(*_here(args), **_here(kwargs))
    out = kwargs.get("out")
    if out is None:
        return _there(result)
    return out[0] if isinstance(out, tuple) else out


def _fits(host: Any, there: np.ndarray) -> None:
    assert isinstance(host, np.ndarray), type(host)
    assert host.flags.c_contiguous
    assert there.flags.c_contiguous
    assert (host.dtype, host.shape) == (there.dtype, there.shape)


def asarray(values: Any, dtype: Any = None) -> ndarray:
    if isinstance(values, ndarray):
        return ndarray(np.asarray(_here(values), dtype))
    found = np.array(values, dtype)
    if found.dtype.kind not in "biufc":
        raise ValueError(f"Unsupported dtype {found.dtype}")
    crossed["asarray"] += found.nbytes
    return ndarray(found)


array = asarray


def asnumpy(values: ndarray) -> np.ndarray:
    return values.get()


class _Device:
    def __init__(self, number: int) -> None:
        self.id = number
        self._before: list[int] = []

    def __enter__(self) -> _Device:
        if not 0 <= self.id < _count():
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._before.append(_current())
        _thread.device = self.id
        return self

    def __exit__(self, *error: object) -> None:
        _thread.device = self._before.pop()


def _count() -> int:
    return len([word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if word])


cuda = SimpleNamespace(
    Device=_Device,
    is_available=lambda: _count() > 0,
    runtime=SimpleNamespace(getDeviceCount=_count, getDevice=_current),
)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    found = getattr(np, name)
    if isinstance(found, type) or not callable(found):
        return found
    return lambda *args, **kwargs: _call(found, args, kwargs)
