"""What people hand in as X and y, one module for each kind, and what it comes to: arrays of rows.

Every kind becomes a NumPy array, or a Dask array whose chunks are rows.  A kind is a module with
``takes(value)``, whether it is of that kind, and ``rows(value, name, labels)``; its place in
:data:`KINDS` says who is asked first.  :mod:`dtrain.sources.ready` brings Dask arrays to where
they can be read: into the workers' memory, or onto their disks.
"""

from __future__ import annotations

from typing import Any

from dtrain.frames import Columns, is_frame
from dtrain.sources import chunks, fields, frames, plain

#: Who is asked, in this order; the last takes everything.
KINDS = (fields, frames, chunks, plain)

is_dask = chunks.takes


def features_of(value: Any, columns: Columns | None, name: str) -> Any:
    """Features as an array; those of a frame as its ``columns`` were when a model was trained.

    None: as they are.
    """
    if columns is None or not is_frame(value):
        return array_of(value, name)
    return frames.encoded(value, columns, name)


def array_of(value: Any, name: str, *, labels: bool = False) -> Any:
    """A NumPy or Dask array of rows; nothing is computed.

    Parameters
    ----------
    value : array, frame or series of NumPy, pandas or Dask; nested lists; or dict of these
    name : str
        What errors call it.
    labels : bool
        It may be text: one label for each row.

    Raises
    ------
    DataError
        Says what was found, what was expected, and what to call.
    """
    kind = next(kind for kind in KINDS if kind.takes(value))
    return kind.rows(value, name, labels)
