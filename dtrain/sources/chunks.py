"""Dask arrays: chunks of whole rows, of any and of unknown sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dtrain.errors import DataError

#: The most bytes that a chunk may have once its pieces along the other axes are put together.
MERGED = 256 << 20


def takes(value: Any) -> bool:
    # A Delayed has attributes of every name but those that begin with a line.
    return all(hasattr(value, name) for name in ("__dask_graph__", "chunks", "_meta"))


def rows(array: Any, name: str, labels: bool) -> Any:
    if np.ma.isMaskedArray(array._meta):
        raise DataError(f"{name}: found a masked array, expected one without masked values")
    if array.ndim == 0:
        raise DataError(f"{name}: found a dask array without axes, expected an array of rows")
    if any(math.isnan(n) for n in array.shape[1:]):
        raise DataError(
            f"{name}: found an unknown number of columns {array.shape}, expected a known one; "
            f"call {name}.compute_chunk_sizes() first"
        )
    if all(len(sizes) == 1 for sizes in array.chunks[1:]):
        return array
    return _merged(array, name)


def _merged(array: Any, name: str) -> Any:
    """With whole rows in each chunk, where that moves nothing that lies in memory already."""
    whole = dict.fromkeys(range(1, array.ndim), -1)
    found = f"{name}: found chunks along several axes {array.chunks}"
    if is_persisted(array):
        raise DataError(
            f"{found} that are in memory, expected chunks of rows alone; "
            f"call {name}.rechunk({whole})"
        )
    tallest = max(array.chunks[0])
    nbytes = tallest * math.prod(array.shape[1:]) * array.dtype.itemsize
    if not nbytes <= MERGED:
        call = (
            f"{name}.compute_chunk_sizes().rechunk({whole})"
            if math.isnan(nbytes)
            else f"{name}.rechunk({ {0: 'auto', **whole} })"
        )
        raise DataError(
            f"{found} whose merged chunks would have {nbytes} bytes, expected chunks of whole "
            f"rows of at most {MERGED}; call {call}"
        )
    return array.rechunk(whole)


def is_persisted(array: Any) -> bool:
    """Whether every chunk is computed on a cluster, or being computed there, and held."""
    from distributed import Future, futures_of

    return len(futures_of(array)) >= array.npartitions and all(
        isinstance(getattr(value, "value", value), Future) for value in array.dask.values()
    )


def sized(array: Any, sizes: tuple[int, ...]) -> Any:
    """The same chunks, whose numbers of rows are known now."""
    import dask.array as da

    return da.Array(
        array.dask, array.name, (sizes, *array.chunks[1:]), dtype=array.dtype, meta=array._meta
    )
