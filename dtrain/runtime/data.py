"""Training data where it lies: rows of chunks that Dask workers hold, or of a mapped file.

A Dask array is a list of chunks along its first axis, each a key of the cluster, in the memory of a
worker or in a file on its disk (:mod:`dtrain.runtime.spool`).  Before it
begins, a replica copies the rows of its part beside itself, once, if there is room for them.  Else
it reads the chunks of its own worker in place, and asks the workers that hold the others for just
the rows of the next batch.  A NumPy array lies whole in a file of the machine
(:mod:`dtrain.runtime.inputfile`): that is one chunk, and all its rows are here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.utils import offload

from dtrain.errors import DataError
from dtrain.frames import Columns
from dtrain.machines.plan import Plan, cuts, order, split
from dtrain.runtime.inputfile import PIECE, FileRef, array_at, fetch_rows
from dtrain.runtime.spool import Spooled, as_rows

if TYPE_CHECKING:
    from dtrain.runtime.worker import WorkerService

#: Rows of one evaluation batch.
EVALUATION_ROWS = 1024

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


@dataclass(frozen=True)
class DataPlan:
    """What a job trains and validates on.

    ``classes`` are the labels in the order of their class indices, or None where the labels
    are indices themselves (or numbers to regress on).  ``encoded``: indices stand in ``y`` already.

    ``w`` are what the rows count, whose mean over all rows is ``mean_weight``; None: all the same.

    ``fields`` is the record that each row of ``x`` is, where ``x`` is a dict of arrays.

    ``functions`` are the metrics that are a user's own, by name, pickled.

    ``columns`` are those of the frame that ``x`` was made of, if it was one.

    ``file`` is the name of the file that has the job's NumPy arrays, ``holders`` the workers that
    had it when the job was submitted.  ``blobs`` are further arrays in it, see :func:`read_blob`.
    """

    x: ArrayRef
    y: ArrayRef
    classification: bool
    classes: np.ndarray | None
    w: ArrayRef | None = None
    valid_x: ArrayRef | None = None
    valid_y: ArrayRef | None = None
    valid_w: ArrayRef | None = None
    mean_weight: float = 1.0
    columns: Columns | None = None
    fields: np.dtype | None = None
    encoded: bool = False
    functions: bytes | None = None
    file: str | None = None
    holders: tuple[str, ...] = ()
    blobs: Mapping[str, Mapping[str, ArrayRef]] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[ArrayRef, ...]:
        every = (self.x, self.y, self.w, self.valid_x, self.valid_y, self.valid_w)
        return tuple(array for array in every if array is not None)

    def about(self, metrics: Sequence[str]) -> dict[str, Any]:
        """What a result has to know of its data."""
        return {
            "classes": self.classes,
            "classification": self.classification,
            "columns": self.columns,
            "metrics": list(metrics),
            "functions": self.functions,
        }


@dataclass(frozen=True)
class Parts:
    """Which rows each logical replica trains and validates on; the same on every worker.

    ``train`` and ``valid`` are global row numbers, or None for all rows as they lie.
    """

    plan: Plan
    train: np.ndarray | None
    valid: np.ndarray | None
    valid_bounds: tuple[int, ...]

    @classmethod
    def of(
        cls,
        rows: int,
        valid_rows: int | None,
        *,
        fraction: float | None,
        replicas: int,
        batch_size: int,
        epochs: int,
        steps: int | None,
        seed: int,
    ) -> Parts:
        train = valid = None
        bounds: tuple[int, ...] = (0,) * (replicas + 1)
        if fraction is not None:
            train, valid = split(rows, fraction, seed)
            rows = len(train)
        plan = Plan(rows, replicas, batch_size, epochs, steps)
        if train is not None and valid is not None:
            # Validation rows go with the training rows they lie between.
            inner = [int(np.searchsorted(valid, train[b])) for b in plan.bounds[1:-1]]
            bounds = (0, *inner, len(valid))
        elif valid_rows is not None:
            bounds = cuts(valid_rows, replicas)
        return cls(plan, train, valid, bounds)

    def span(self, part: int) -> tuple[int, int]:
        """The global rows, first and past the last, that a part's training rows lie in."""
        start, stop = self.plan.bounds[part], self.plan.bounds[part + 1]
        if self.train is None:
            return start, stop
        return int(self.train[start]), int(self.train[stop - 1]) + 1

    def epoch_rows(self, seed: int, epoch: int, part: int, shuffle: bool) -> np.ndarray:
        """The global rows of a part in an epoch's order; int64."""
        start, stop = self.plan.bounds[part], self.plan.bounds[part + 1]
        rows = np.arange(start, stop) if self.train is None else self.train[start:stop]
        mixed = order(seed, epoch, part, stop - start, shuffle)
        return rows if mixed is None else rows[mixed]

    def valid_rows(self, part: int) -> np.ndarray:
        start, stop = self.valid_bounds[part], self.valid_bounds[part + 1]
        return np.arange(start, stop) if self.valid is None else self.valid[start:stop]


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


def apart(rows: np.ndarray, fields: np.dtype | None) -> Any:
    """Rows as a model gets them: the arrays of a dict by name, where they are records."""
    if fields is None:
        return rows
    # What has travelled is plain bytes.
    records = rows if rows.dtype.names is not None else rows.view(fields)
    return {name: np.ascontiguousarray(records[name]) for name in fields.names or ()}


class Encoder:
    """Targets as the model wants them: class indices (int64), or numbers as they are."""

    def __init__(self, data: DataPlan) -> None:
        self._classification = data.classification
        self._classes = None if data.encoded else data.classes

    def __call__(self, y: np.ndarray) -> np.ndarray:
        if not self._classification:
            return y
        if y.ndim == 2:
            y = y[:, 0]
        if self._classes is None:
            return y.astype(np.int64, copy=False)
        return np.searchsorted(self._classes, y)


class Feed:
    """The batches of the replicas of one worker: read-ahead by one, buffers reused.

    A batch is ``(x, y)``, or ``(x, y, w)`` if the rows have weights.

    ``strays``: batches of other replicas' parts are read, too (asynchronous mode).
    What :meth:`batch` returns is valid until the next call for the same replica.
    """

    def __init__(
        self, data: DataPlan, parts: Parts, service: WorkerService, seed: int, shuffle: bool,
        deadline: float, *, strays: bool, waits: Waits | None = None,
    ) -> None:  # fmt: skip
        self.parts = parts
        self._seed, self._shuffle = seed, shuffle

        def rows_of(refs: tuple[ArrayRef | None, ...], *, strays: bool) -> tuple[Rows, ...]:
            return tuple(
                Rows(ref, service, deadline, strays=strays, holders=data.holders, waits=waits)
                for ref in refs
                if ref is not None
            )

        self._train = rows_of((data.x, data.y, data.w), strays=strays)
        self._encode = Encoder(data)
        self._fields = data.fields
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._buffers: dict[int, tuple[np.ndarray, ...]] = {}
        self._ahead: dict[tuple[int, int, int], tuple[Pending | None, ...]] = {}
        self._valid = self._train
        if data.valid_x is not None:
            self._valid = rows_of((data.valid_x, data.valid_y, data.valid_w), strays=False)

    def open(self, replicas: Sequence[int], room: int) -> None:
        """Take hold of the local chunks of these replicas' parts, or copy the rows of the parts.

        ``room``: bytes that the copies may take.
        """
        train = [self.parts.span(part) for part in replicas]
        held = [rows for part in replicas if len(rows := self.parts.valid_rows(part))]
        valid = [(int(rows[0]), int(rows[-1]) + 1) for rows in held]
        arrays = [(array, train) for array in self._train]
        if self._valid is not self._train:
            arrays += [(array, valid) for array in self._valid]
        elif valid:
            # Those held out lie between the others, or just beside them.
            both = [self._around(part) for part in replicas]
            arrays = [(array, both) for array in self._train]
        for array, spans in arrays:
            array.open(spans)
            room -= array.copy(spans, room)

    def _around(self, part: int) -> tuple[int, int]:
        """The rows that a part's training and validation rows lie in."""
        start, stop = self.parts.span(part)
        rows = self.parts.valid_rows(part)
        if not len(rows):
            return start, stop
        return min(start, int(rows[0])), max(stop, int(rows[-1]) + 1)

    def _rows(self, epoch: int, part: int, index: int) -> np.ndarray:
        known = self._orders.get(part)
        if known is None or known[0] != epoch:
            rows = self.parts.epoch_rows(self._seed, epoch, part, self._shuffle)
            known = self._orders[part] = (epoch, rows)
        size = self.parts.plan.batch_size
        return known[1][index * size : (index + 1) * size]

    def ahead(self, epoch: int, part: int, index: int) -> None:
        """Start reading a batch that will be wanted soon; costs nothing where it lies here."""
        if all(array.whole for array in self._train):
            return
        rows = self._rows(epoch, part, index)
        pending = tuple(array.request(rows) for array in self._train)
        if any(one is not None for one in pending):
            self._ahead[epoch, part, index] = pending

    def batch(self, replica: int, epoch: int, part: int, index: int) -> tuple[np.ndarray, ...]:
        """Features, shape (n, ...); encoded targets, shape (n,) or (n, outputs); weights, (n,)."""
        rows = self._rows(epoch, part, index)
        pending = self._ahead.pop((epoch, part, index), None)
        if pending is None:
            pending = tuple(array.request(rows) for array in self._train)
        if replica not in self._buffers:
            plan = self.parts.plan
            size = min(plan.batch_size, max(map(plan.size, range(plan.replicas))))
            self._buffers[replica] = tuple(array.buffer(size) for array in self._train)
        buffers = self._buffers[replica]
        if len(rows) != len(buffers[0]):
            buffers = tuple(buffer[: len(rows)] for buffer in buffers)
        for array, buffer, one in zip(self._train, buffers, pending, strict=True):
            array.take(rows, buffer, one)
        return self._encoded(buffers)

    def validation(self, part: int) -> Iterator[tuple[np.ndarray, ...]]:
        """The validation batches of a part, in order."""
        rows = self.parts.valid_rows(part)
        for start in range(0, len(rows), EVALUATION_ROWS):
            some = rows[start : start + EVALUATION_ROWS]
            buffers = tuple(array.buffer(len(some)) for array in self._valid)
            for array, buffer in zip(self._valid, buffers, strict=True):
                array.take(some, buffer, array.request(some))
            yield self._encoded(buffers)

    def _encoded(self, batch: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return (apart(batch[0], self._fields), self._encode(batch[1]), *batch[2:])


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


def read_blob(
    plan: DataPlan, name: str, service: WorkerService, deadline: float
) -> dict[str, np.ndarray] | None:
    """Copies of the arrays that came with a job under that name; None if none did.

    Called from a replica's thread.  Each answer of another worker may take ``deadline`` seconds;
    DataError if none has the file.
    """
    refs = plan.blobs.get(name)
    if refs is None:
        return None
    return {key: _read(ref, plan.holders, service, deadline) for key, ref in refs.items()}


def _read(
    ref: ArrayRef, holders: Sequence[str], service: WorkerService, deadline: float
) -> np.ndarray:
    """The whole of an array in a file."""
    assert ref.file is not None
    memory = service.input(ref.file)
    if memory is not None:
        return np.array(array_at(memory, ref.file.offset, ref.shape, ref.dtype))
    shape = ref.shape or (1,)
    rows = Rows(replace(ref, shape=shape, starts=(0, shape[0])), service, deadline, holders=holders)
    out = rows.buffer(shape[0])
    step = max(PIECE // max(out[:1].nbytes, 1), 1)
    for start in range(0, shape[0], step):
        some = np.arange(start, min(start + step, shape[0]))
        rows.take(some, out[start : start + len(some)], rows.request(some))
    return out.reshape(ref.shape)
