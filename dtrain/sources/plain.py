"""NumPy arrays, and what becomes one."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtrain.errors import DataError


def takes(value: Any) -> bool:
    return True


def rows(value: Any, name: str, labels: bool) -> np.ndarray:
    if hasattr(value, "__dask_graph__"):
        raise DataError(
            f"{name}: found {type(value).__name__}, expected an array or a frame, of NumPy, pandas "
            f"or Dask"
        )
    if np.ma.isMaskedArray(value):
        raise DataError(f"{name}: found a masked array, expected one without masked values")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{name}: found {type(value).__name__}: {error}") from None
    if array.ndim == 0 or (array.dtype == object and array.size and not _strings(array)):
        raise DataError(f"{name}: found {type(value).__name__}, expected an array of rows")
    return array.astype(str) if array.dtype == object else array


def _strings(array: np.ndarray) -> bool:
    return all(isinstance(v, str) for v in array.ravel())
