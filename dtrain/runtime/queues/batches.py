"""The batches of a shared reader: which rows, and reading them on a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dtrain.config import settings
from dtrain.machines.plan import Plan, order
from dtrain.runtime.queues.parcel import pack
from dtrain.runtime.rows import ArrayRef, Rows, Waits

if TYPE_CHECKING:
    from dtrain.runtime.worker import WorkerService

#: Orders of epochs that are kept: one that ends, and the one that begins.
_ORDERS = 2


@dataclass(frozen=True)
class Batching:
    """Which rows a reader's batches have; batch ``k`` is the ``k``-th of all epochs' together.

    The order of an epoch's rows follows from (seed, epoch) alone; its last batch may be ragged.

    ``file`` is the name of the file that has the NumPy arrays, ``holders`` the workers that had it
    when the reader was made.
    """

    arrays: tuple[ArrayRef, ...]
    batch_size: int
    epochs: int
    seed: int
    shuffle: bool
    file: str | None = None
    holders: tuple[str, ...] = ()

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.arrays[0].rows, 1, self.batch_size, self.epochs)

    @property
    def total(self) -> int:
        """Batches of all epochs."""
        return self.epochs * self.plan.batches_per_epoch

    def order(self, epoch: int) -> np.ndarray:
        """The rows in an epoch's order; int64, shape (rows,)."""
        rows = self.plan.rows
        mixed = order(self.seed, epoch, 0, rows, self.shuffle)
        return np.arange(rows) if mixed is None else mixed

    def locate(self, number: int) -> tuple[int, slice]:
        """The epoch of a batch, and where in the epoch's order its rows stand."""
        epoch, index = divmod(number, self.plan.batches_per_epoch)
        return epoch, slice(index * self.batch_size, (index + 1) * self.batch_size)

    def keys(self) -> Iterator[str]:
        """The chunks that must stay in memory."""
        for array in self.arrays:
            yield from array.keys


class BatchReader:
    """Reads the batches of a reader on a worker, from any thread but the event loop's.

    Chunks that the worker holds are read in place, rows of others come from whoever has them.
    """

    def __init__(self, batching: Batching, service: WorkerService) -> None:
        config = settings()
        self.batching = batching
        self._rows = [
            Rows(
                array,
                service,
                config.call_deadline,
                strays=True,
                holders=batching.holders,
                waits=Waits(config.prepare_deadline),
            )
            for array in batching.arrays
        ]
        self._lock = threading.Lock()
        self._open = False
        self._orders: dict[int, np.ndarray] = {}

    def read(self, number: int) -> tuple[np.ndarray, ...]:
        """Copies of a batch's rows, of each array: shape (n, ...).

        Raises
        ------
        DataError
            Rows were in the memory of a worker that has died, and cannot be computed anew.
        """
        rows = self._rows_of(number)
        pending = [reader.request(rows) for reader in self._rows]
        found = []
        for reader, coming in zip(self._rows, pending, strict=True):
            out = reader.buffer(len(rows))
            reader.take(rows, out, coming)
            found.append(out)
        return tuple(found)

    def parcel(self, number: int) -> np.ndarray:
        """The same, as it travels."""
        return pack(self.read(number))

    def _rows_of(self, number: int) -> np.ndarray:
        epoch, at = self.batching.locate(number)
        with self._lock:
            if not self._open:
                for reader in self._rows:
                    reader.open([(0, self.batching.plan.rows)])
                self._open = True
            if epoch not in self._orders:
                self._orders[epoch] = self.batching.order(epoch)
                for old in sorted(self._orders)[:-_ORDERS]:
                    del self._orders[old]
            # An epoch that has just been dropped: a batch of it has come back late.
            whole = self._orders.get(epoch)
        return (self.batching.order(epoch) if whole is None else whole)[at]
