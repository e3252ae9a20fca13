"""A dict of arrays, for models of several inputs: one array whose rows are records.

The fields of a record lie side by side, each aligned, so that a row is read in one piece.  A
model gets them apart again, as a dict of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrain.errors import DataError
from dtrain.sources import chunks, frames, plain


def takes(value: Any) -> bool:
    return isinstance(value, Mapping)


def rows(value: Mapping[str, Any], name: str, labels: bool) -> Any:
    if labels or not value:
        raise DataError(f"{name}: found {'a' if value else 'an empty'} dict, expected arrays")
    arrays = {}
    for key, one in value.items():
        where = f"{name}[{key!r}]"
        if not isinstance(key, str) or takes(one):
            raise DataError(f"{where}: found {type(one).__name__}, expected names of arrays")
        kind = next(kind for kind in (frames, chunks, plain) if kind.takes(one))
        arrays[key] = kind.rows(one, where, False)
        if arrays[key].dtype.kind not in "fiub":
            raise DataError(f"{where}: found dtype {arrays[key].dtype}, expected numbers")
    lazy = [key for key, array in arrays.items() if chunks.takes(array)]
    if lazy and len(lazy) < len(arrays):
        other = next(key for key in arrays if key not in lazy)
        raise DataError(
            f"{name}: found {lazy[0]!r} of Dask and {other!r} in the client's memory, expected all "
            f"of one kind"
        )
    known = {key: array.shape[0] for key, array in arrays.items()}
    sizes = {n for n in known.values() if not math.isnan(n)}
    if len(sizes) > 1:
        raise DataError(f"{name}: found {known} rows, expected as many in each array")
    record = np.dtype(
        [(key, array.dtype, array.shape[1:]) for key, array in arrays.items()], align=True
    )
    if not lazy:
        return packed(*arrays.values(), record=record, name=name)
    return _lazily(arrays, record, name)


def _lazily(arrays: Mapping[str, Any], record: np.dtype, name: str) -> Any:
    import dask.array as da

    first = next(iter(arrays.values()))
    cut = []
    for key, array in arrays.items():
        if any(map(math.isnan, (array.shape[0], first.shape[0]))):
            if array.numblocks[0] != first.numblocks[0]:
                raise DataError(
                    f"{name}[{key!r}]: found {array.numblocks[0]} chunks of unknown sizes, "
                    f"expected {first.numblocks[0]} as in the first array"
                )
        elif array.chunks[0] != first.chunks[0]:
            array = array.rechunk({0: first.chunks[0]})
        cut.append(array)
    pairs = [part for array in cut for part in (array, "i" + "jklmnopq"[: array.ndim - 1])]
    return da.blockwise(
        packed,
        "i",
        *pairs,
        record=record,
        name=None,
        concatenate=True,
        align_arrays=False,
        dtype=record,
        meta=np.empty(0, record),
    )


def packed(*arrays: np.ndarray, record: np.dtype, name: str = "X") -> np.ndarray:
    """Records of the rows of some arrays; shape (n,)."""
    if len({len(array) for array in arrays}) > 1:
        found = [len(array) for array in arrays]
        raise DataError(f"{name}: found chunks of {found} rows, expected as many in each array")
    out = np.zeros(len(arrays[0]), record)
    assert record.names is not None
    for key, array in zip(record.names, arrays, strict=True):
        out[key] = array
    return out
