"""Rows where they lie: chunks that Dask workers hold, or a mapped file.

A Dask array is a list of chunks along its first axis, each a key of the cluster, in the memory of a
worker or in a file on its disk (:mod:`dtrain.runtime.spool`).  Before it begins, a replica copies
the rows of its part beside itself, once, if there is room for them.  Else it reads the chunks of
its own worker in place, and asks the workers that hold the others for just the rows of the next
batch.  A NumPy array lies whole in a file of the machine (:mod:`dtrain.runtime.inputfile`): that is
one chunk, and all its rows are here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.utils import offload

from dtrain.errors import DataError
from dtrain.runtime.inputfile import PIECE, FileRef, array_at, fetch_rows
from dtrain.runtime.spool import Spooled, as_rows

if TYPE_CHECKING:
    from dtrain.runtime.worker import WorkerService

#: What of a worker's memory limit, and of a worker that has none, the copies of rows may take.
_ROOM, _ROOM_BYTES = 0.2, 1 << 30

#: Seconds between two looks, while rows are on their way, whether they are still wanted.
_SLICE = 0.5


@dataclass(frozen=True)
class ArrayRef:
    """An array on the cluster: ``keys[i]`` is rows ``starts[i]`` to ``starts[i + 1]``.

    With a ``file`` it lies there, in row order, and there are no keys.
    """

    shape: tuple[int, ...]
    dtype: str
    keys: tuple[Any, ...]
    starts: tuple[int, ...]
    file: FileRef | None = None

    @property
    def rows(self) -> int:
        return self.shape[0]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The same memory of a contiguous array as uint8, shape (rows, bytes of a row)."""
    flat: np.ndarray = array.reshape(-1).view(np.uint8)
    return flat.reshape(len(array), array.itemsize * (array[:1].size or 1))


@dataclass(frozen=True)
class Waits:
    """How rows of other workers are waited for.

    ``patience``: seconds until chunks that were lost are computed anew; ``check`` is called
    meanwhile, and raises when waiting has lost its sense.
    """

    patience: float
    check: Callable[[], None] = lambda: None


class Rows:
    """Reads rows of an :class:`ArrayRef`, by global number, from a worker's thread."""

    def __init__(
        self,
        ref: ArrayRef,
        service: WorkerService,
        deadline: float,
        *,
        strays: bool = False,
        holders: Sequence[str] = (),
        waits: Waits | None = None,
    ) -> None:
        self.ref = ref
        self._service = service
        self._deadline = deadline
        self._waits = waits or Waits(deadline)
        #: the workers that have the array's file, for one whose machine has not
        self._holders = holders
        self._starts = np.asarray(ref.starts)
        #: chunk number -> the chunk itself, where this worker holds it
        self._here: dict[int, np.ndarray] = {}
        #: the same, as rows of bytes, where its rows are contiguous
        self._bytes: dict[int, np.ndarray] = {}
        #: the chunks of these that are on disk
        self._spooled: dict[int, Spooled] = {}
        #: rows of spans that were copied: first, past the last, the copy as rows of bytes
        self._copies: list[tuple[int, int, np.ndarray]] = []
        #: rows outside the opened spans may be asked for, too
        self._strays = strays
        self._span = (ref.rows, 0)
        self._whole = False

    def open(self, spans: Sequence[tuple[int, int]]) -> None:
        """Take hold of the local chunks that ``spans`` of rows touch."""
        if self.ref.file is not None:
            if spans:
                self._open_file(self.ref.file)
            return
        wanted: set[int] = set()
        for start, stop in spans:
            if stop > start:
                first, last = self._chunk_of(np.array([start, stop - 1]))
                wanted.update(range(int(first), int(last) + 1))
        starts = self.ref.starts
        keys = {i: self.ref.keys[i] for i in sorted(wanted) if starts[i] < starts[i + 1]}
        for i, held in self._service.local_chunks(keys).items():
            chunk = as_rows(held)
            if isinstance(held, Spooled):
                self._spooled[i] = held
            self._check(i, chunk)
            self._here[i] = chunk
            if chunk.flags.c_contiguous and not chunk.dtype.hasobject:
                self._bytes[i] = as_bytes(chunk)
        start, stop = self._span
        for a, b in spans:
            start, stop = min(start, a), max(stop, b)
        self._span = (start, stop)
        i = next(iter(self._here), -1)
        self._whole = not self._strays and (
            len(self._here) == 1 and self.ref.starts[i] <= start and stop <= self.ref.starts[i + 1]
        )

    def copy(self, spans: Sequence[tuple[int, int]], room: int) -> int:
        """Have the rows of the opened ``spans`` in one piece each; the bytes that this takes.

        Nothing is copied where one piece has them, or where they take more than ``room`` bytes.
        """
        spans = [(start, stop) for start, stop in spans if stop > start]
        row = self.buffer(1).nbytes
        taken = sum(stop - start for start, stop in spans) * row
        if self._whole or self.ref.file is not None or taken > room:
            return 0
        step = max(PIECE // max(row, 1), 1)
        for start, stop in spans:
            copy = self.buffer(stop - start)
            for first in range(start, stop, step):
                some = np.arange(first, min(first + step, stop))
                out = copy[first - start : first - start + len(some)]
                self.take(some, out, self.request(some))
            self._copies.append((start, stop, as_bytes(copy)))
        self._whole = not self._strays
        return taken

    def _copied(self, rows: np.ndarray) -> tuple[int, np.ndarray] | None:
        """The first row of the copy that has all of ``rows``, and its rows as bytes."""
        if self._whole and len(self._copies) == 1:
            return self._copies[0][0], self._copies[0][2]
        if self._copies:
            least, most = rows.min(), rows.max()
            for start, stop, flat in self._copies:
                if start <= least and most < stop:
                    return start, flat
        return None

    def _open_file(self, file: FileRef) -> None:
        """The one chunk that has all rows, also strays; nothing if it is not on this machine."""
        memory = self._service.input(file)
        if memory is not None:
            self._here[0] = array_at(memory, file.offset, self.ref.shape, self.ref.dtype)
            self._bytes[0] = as_bytes(self._here[0])
            self._whole = True

    def _check(self, i: int, chunk: Any) -> None:
        rows = self.ref.starts[i + 1] - self.ref.starts[i]
        expected = (rows, *self.ref.shape[1:])
        found = getattr(chunk, "shape", None)
        dtype = getattr(chunk, "dtype", None)
        if (
            found != expected
            or dtype != np.dtype(self.ref.dtype)
            or np.ma.isMaskedArray(chunk)
            or not isinstance(chunk, np.ndarray)
        ):
            raise DataError(
                f"chunk {i} ({self.ref.keys[i]!r}): found {type(chunk).__name__} of shape {found} "
                f"and dtype {dtype}, expected an array of shape {expected} and dtype "
                f"{self.ref.dtype}"
            )

    def _chunk_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def buffer(self, rows: int) -> np.ndarray:
        return np.empty((rows, *self.ref.shape[1:]), self.ref.dtype)

    @property
    def whole(self) -> bool:
        """Whether the one chunk that is here has all rows that are read."""
        return self._whole

    def request(self, rows: np.ndarray) -> Pending | None:
        """Ask other workers for those of ``rows`` that are not here; None if all are."""
        if self._whole or self._copied(rows) is not None:
            return None
        if len(self._here) == 1 and self._only(rows) is not None:
            return None
        if self.ref.file is not None:
            call = fetch_rows(self._service, self.ref, rows, self._holders, self._deadline)
            return Pending({self.ref.file.name: slice(None)}, self._service.start(call))
        chunks = self._chunk_of(rows)
        away = {int(c) for c in np.unique(chunks)} - self._here.keys()
        if not away:
            return None
        wanted = {}
        for c in sorted(away):
            at = np.flatnonzero(chunks == c)
            wanted[c] = (at, rows[at] - self._starts[c])
        keys = {c: self.ref.keys[c] for c in wanted}
        future = self._service.fetch_rows(
            {keys[c]: local for c, (_, local) in wanted.items()},
            self._deadline,
            self._waits.patience,
        )
        return Pending({keys[c]: at for c, (at, _) in wanted.items()}, future)

    def _only(self, rows: np.ndarray) -> tuple[int, int] | None:
        """The one local chunk and its start, if it has all of ``rows``."""
        (i,) = self._here
        start, stop = self.ref.starts[i], self.ref.starts[i + 1]
        if self._whole:
            return i, start
        if rows.min() >= start and rows.max() < stop:
            return i, start
        return None

    def _copy(self, i: int, local: np.ndarray, out: np.ndarray) -> None:
        """Rows of a local chunk, by their numbers in it, to contiguous ``out``."""
        if i in self._bytes:
            # Bytes, because what came over the network need not be aligned, and np.take makes a
            # copy of the whole of an unaligned array first.  mode="clip" lets it write straight
            # to `out`; the rows are in range by construction.
            self._bytes[i].take(local, axis=0, out=as_bytes(out), mode="clip")
        else:
            out[...] = self._here[i][local]
        if i in self._spooled:
            self._spooled[i].was_read(len(local))

    def take(self, rows: np.ndarray, out: np.ndarray, pending: Pending | None) -> None:
        """Write ``rows`` to ``out``, shape (len(rows), ...), in their order."""
        if pending is None and (copied := self._copied(rows)) is not None:
            start, flat = copied
            flat.take(rows - start if start else rows, axis=0, out=as_bytes(out), mode="clip")
            return
        if pending is None and len(self._here) == 1:
            only = self._only(rows)
            if only is not None:
                i, start = only
                self._copy(i, rows - start if start else rows, out)
                return
        chunks = self._chunk_of(rows)
        for c in np.unique(chunks):
            if int(c) in self._here:
                at = np.flatnonzero(chunks == c)
                out[at] = self._here[int(c)][rows[at] - self._starts[c]]
                if int(c) in self._spooled:
                    self._spooled[int(c)].was_read(len(at))
        if pending is not None:
            # A little longer than what fetches them may take: its own error says more.
            longest = max(self._deadline, self._waits.patience) + 1.0
            for key, values in pending.result(longest, self._waits.check).items():
                out[pending.at[key]] = values


def room_for_copies(limit: int | None) -> int:
    """How many bytes of rows a job may copy at a worker of that memory limit."""
    return int(_ROOM * limit) if limit else _ROOM_BYTES


@dataclass
class Pending:
    """Rows on their way: key of the chunk, or name of the file -> positions in the batch."""

    at: Mapping[Any, np.ndarray | slice]
    future: Future[dict[Any, np.ndarray]]

    def result(self, deadline: float, check: Callable[[], None]) -> dict[Any, np.ndarray]:
        until = time.monotonic() + deadline
        while not wait([self.future], timeout=_SLICE).done:
            try:
                check()
            except BaseException:
                self.future.cancel()
                raise
            if time.monotonic() > until:
                break
        return self.future.result(0)


async def read_rows(
    data: Mapping[Any, Any], wanted: Mapping[Any, np.ndarray]
) -> dict[Any, np.ndarray]:
    """Copies of rows of chunks, made off the event loop."""
    chunks = {key: data[key] for key in wanted}

    def read() -> dict[Any, np.ndarray]:
        found = {}
        for key, chunk in chunks.items():
            found[key] = np.ascontiguousarray(as_rows(chunk)[wanted[key]])
            if isinstance(chunk, Spooled):
                chunk.was_read(len(found[key]))
        return found

    return await offload(read)
