"""What a job trains on: which rows are whose, and the batches that they make.

How rows are read, wherever they lie, is in :mod:`dtrain.runtime.rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.frames import Columns
from dtrain.machines.plan import Plan, cuts, order, split
from dtrain.runtime.inputfile import PIECE, array_at
from dtrain.runtime.rows import ArrayRef, Pending, Rows, Waits

if TYPE_CHECKING:
    from dtrain.runtime.worker import WorkerService

#: Rows of one evaluation batch.
EVALUATION_ROWS = 1024


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
