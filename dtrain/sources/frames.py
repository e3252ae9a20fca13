"""Data frames and their columns, of pandas and Dask: an array of numbers is made of each.

What a column becomes is said in :mod:`dtrain.frames`.  Of a Dask frame the workers make it,
partition by partition, and how many rows these have is not known before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dtrain.frames import Columns, is_frame, is_series, target


def takes(value: Any) -> bool:
    return is_frame(value) or is_series(value)


def rows(value: Any, name: str, labels: bool) -> Any:
    if is_frame(value) and not (labels and len(value.columns) == 1):
        return encoded(value, Columns.of(value, name), name)
    if is_frame(value):
        value = value[value.columns[0]]
    if not hasattr(value, "__dask_graph__"):
        return target(value, name)
    return _partitions(value, target, name, (), target(value._meta, name).dtype)


def encoded(frame: Any, columns: Columns, name: str) -> Any:
    """The features of a frame that has these columns, whatever else it has."""
    if not hasattr(frame, "__dask_graph__"):
        return columns.encode(frame, name)
    if all(column in frame.columns for column in columns.names):
        frame = frame[list(columns.names)]
    return _partitions(frame, columns.encode, name, (columns.width,), columns.dtype)


def _partitions(
    frame: Any,
    encode: Callable[[Any, str], np.ndarray],
    name: str,
    tail: tuple[int, ...],
    dtype: Any,
) -> Any:
    """A Dask array of what ``encode`` makes of each partition."""
    import dask.array as da
    from dask import delayed

    made = delayed(encode, pure=True)
    shape = (math.nan, *tail)
    return da.concatenate(
        [da.from_delayed(made(part, name), shape, dtype) for part in frame.to_delayed()],
        allow_unknown_chunksizes=True,
    )
