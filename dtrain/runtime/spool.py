"""Rows that are computed once and do not stay in memory: a file of each worker, on its disk.

A chunk of a lazy Dask array that is spooled is written to the file of the worker that computed
it, by that very task; what the task returns, and Dask keeps, is a :class:`Spooled`, of a few bytes.
So Dask has nothing to spill, knows where each chunk is, and computes a lost worker's chunks anew.
A chunk that Dask moves (a worker that is retired) takes its rows along, into the receiver's file.

The file is in the worker's local directory and has no name there once it is open: the system
removes it when the last chunk has gone, or the process, however it ends.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
import weakref
from typing import Any

import numpy as np

from dtrain.errors import DataError, StorageError

#: Bytes of a file that may stay mapped after they were read; they count as the worker's memory.
MAPPED = 64 << 20

#: What one access maps: Linux maps the neighbours of a page with it.
_AROUND = 64 << 10

#: Each chunk begins on a multiple of this, which is enough for any dtype.
_ALIGN = 64

#: directory -> the file that is being written there; it goes with the last of its chunks
_files: weakref.WeakValueDictionary[str, SpoolFile] = weakref.WeakValueDictionary()
_mutex = threading.Lock()


class SpoolFile:
    """A file without a name that only grows: written past its end, read through mappings.

    Parameters
    ----------
    directory : str
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            descriptor, path = tempfile.mkstemp(prefix="dtrain-spool-", dir=directory)  # 0600
            os.unlink(path)
        except OSError as error:
            raise StorageError(f"spool in {directory}: {error}") from error
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        #: guards what follows
        self._lock = threading.Lock()
        self._end = 0
        self._map: mmap.mmap | None = None
        self._read = 0

    def append(self, rows: np.ndarray) -> int:
        """Write the bytes of a contiguous array; returns where they begin."""
        with self._lock:
            start = self._end
            self._end = -(-(start + rows.nbytes) // _ALIGN) * _ALIGN
        left, at = rows.reshape(-1).view(np.uint8).data, start
        try:
            # Not through a mapping: that would count as the process's memory, and a full disk
            # would be a signal and not an error.
            while len(left):
                written = os.pwrite(self._file.fileno(), left, at)
                left, at = left[written:], at + written
        except OSError as error:
            raise StorageError(
                f"spool in {self.directory}: {rows.nbytes} bytes could not be written: {error}"
            ) from error
        return start

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes that have been written; read-only."""
        with self._lock:
            if self._map is None or len(self._map) < stop:
                # What is read of the mapping before keeps that one alive.
                size = os.fstat(self._file.fileno()).st_size
                self._map = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ)
            return memoryview(self._map)[start:stop]

    def was_read(self, rows: int, nbytes: int) -> None:
        """Say that rows were read; lets go of what is mapped when that may be too much.

        The system keeps the pages for whoever reads them next, as long as it has memory.
        """
        with self._lock:
            self._read += rows * _AROUND + nbytes
            if self._read < MAPPED or self._map is None:
                return
            self._read = 0
            if len(self._map) > MAPPED and hasattr(mmap, "MADV_DONTNEED"):
                self._map.madvise(mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class Spooled:
    """A chunk of rows in a file of this process; pickling it sends the rows themselves."""

    def __init__(self, rows: np.ndarray, file: SpoolFile) -> None:
        self.shape, self.dtype, self.file = rows.shape, rows.dtype, file
        self._start = file.append(rows) if rows.nbytes else 0

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def rows(self) -> np.ndarray:
        """The rows; read-only, and valid as long as there is a reference to them."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if not nbytes:
            return np.empty(self.shape, self.dtype)
        view = self.file.view(self._start, self._start + nbytes)
        return np.frombuffer(view, np.uint8).view(self.dtype).reshape(self.shape)

    def was_read(self, rows: int) -> None:
        """See :meth:`SpoolFile.was_read`."""
        self.file.was_read(rows, rows * self.dtype.itemsize * math.prod(self.shape[1:]))

    def __sizeof__(self) -> int:
        return 200

    def __reduce__(self) -> tuple[Any, ...]:
        return spooled, (self.rows,)


def spooled(rows: Any) -> Spooled:
    """Write a chunk to the file of this worker.

    Raises
    ------
    DataError
        What was computed is no array of numbers or fixed-width strings.
    StorageError
        The disk is full.
    """
    if isinstance(rows, Spooled):
        return rows
    if not isinstance(rows, np.ndarray) or np.ma.isMaskedArray(rows) or rows.dtype.hasobject:
        raise DataError(
            f"found a chunk that is a {type(rows).__name__} of dtype "
            f"{getattr(rows, 'dtype', None)}, expected an array of numbers"
        )
    directory = _directory()
    with _mutex:
        file = _files.get(directory)
        if file is None:
            file = _files[directory] = SpoolFile(directory)
    return Spooled(np.ascontiguousarray(rows), file)


def _directory() -> str:
    """That of the worker whose task or message this is."""
    from distributed import get_worker

    try:
        return str(get_worker().local_directory)
    except ValueError:
        return tempfile.gettempdir()


def as_rows(chunk: Any) -> Any:
    """A chunk as an array of rows, whether it is in memory or spooled; records are plain bytes."""
    rows = chunk.rows if isinstance(chunk, Spooled) else chunk
    if isinstance(rows, np.ndarray) and rows.dtype.names is not None:
        return rows.view(rows.dtype.str)
    return rows
