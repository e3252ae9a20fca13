"""Readers that processes share by name: whoever asks next gets the next batch of rows.

Each batch is handed out once per epoch.  As with a queue it is a lease: the next one that the same
thread asks for says that it is done with, and what somebody had who dies is handed out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.pickle import dumps, loads

from dtrain.checks import flag
from dtrain.cluster import Control
from dtrain.config import settings
from dtrain.errors import DataError, QueueClosed, SpecError
from dtrain.inputs import is_sized, placed
from dtrain.runtime.queues.batches import Batching, BatchReader
from dtrain.sessions.shared import TIMEOUT, Place, Shared, life_of, locate, timeout_of
from dtrain.sources import array_of
from dtrain.sources.ready import ready
from dtrain.spec import whole

if TYPE_CHECKING:
    from distributed import Client


class Reader(Shared):
    """The batches of one array, or of X and y; :meth:`dtrain.Session.reader` opens it.

    Which rows a batch has follows from the seed, the epoch and its number alone; who gets it, from
    who asks first.  A batch of the next epoch may be handed out while others still work on those
    of this one; nobody is told that all is over before every batch is done with.
    """

    def __init__(
        self, client: Client, session: str, name: str, place: Place, life: str, timeout: float
    ) -> None:
        super().__init__(client, session, name, "reader", place, life, timeout)
        assert place.batching is not None
        self.batching: Batching = loads(place.batching)
        self._reader = None if self._service is None else BatchReader(self.batching, self._service)

    @property
    def batches(self) -> int:
        """Batches of all epochs together."""
        return self.batching.total

    def get(self, timeout: float | str | None = None) -> Any:
        """The next batch: ``X`` of shape (n, ...), or ``(X, y)``; the arrays are the caller's own.

        The last batch of an epoch may have fewer rows than the others.

        Parameters
        ----------
        timeout : float or str, optional
            Seconds to wait, 0 for not at all; None: as the handle was opened with.  There is
            something to wait for only when all batches are handed out and some may come back.

        Raises
        ------
        QueueClosed
            Every batch of every epoch is done with.
        DeadlineError
            All batches are handed out; somebody still has some, and may die.
        DataError
            Rows were in the memory of a worker that has died, and cannot be computed anew.
        QueueLost
            The reader is gone, with the worker that kept it or by a reset.
        """
        here = self._reader is not None
        answer = self._take(timeout, bare=here)
        if self._reader is not None:
            try:
                rows = self._reader.read(answer["request"])
            except BaseException:
                self.give_back()
                raise
        else:
            rows = answer["value"]
        return rows[0] if len(rows) == 1 else tuple(rows)

    def __iter__(self) -> Iterator[Any]:
        """Batches until all are done with; each is done with when the next is wanted."""
        while True:
            try:
                batch = self.get()
            except QueueClosed:
                return
            yield batch


def open_reader(
    client: Client,
    session: str,
    name: str,
    X: Any = None,
    y: Any = None,
    *,
    batch_size: int = 32,
    epochs: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    timeout: float | str = TIMEOUT,
    known: Shared | None = None,
) -> Reader:
    """Open a reader of a session; it is made if there is none of that name.

    Parameters
    ----------
    client : distributed.Client
        Of a cluster that has dtrain.
    session, name : str
    X : ndarray or dask.array.Array, optional
        Shape (rows, ...); None: the reader must be there already, and nothing else matters.
        NumPy arrays are copied to the workers' machines by whoever comes first; Dask arrays are
        persisted, and stay where they lie as long as the reader does.
    y : ndarray or dask.array.Array, optional
        Shape (rows, ...).
    batch_size, epochs : int
    seed : int
        The order of the rows; with ``shuffle=False`` they come as they lie.
    timeout : float or str
        How long a get waits that does not say so itself.
    known : Reader, optional
        A handle that is returned if it still is one of this reader.

    Raises
    ------
    SpecError
        There is one of another make, or there is none and no X is given.
    DataError
        X and y do not fit each other.
    StorageError, ClusterError, DeadlineError
        A worker, which is named, could not be given the data.
    """
    waits = timeout_of(timeout, 0.0)
    life = life_of(known)
    terms = None
    arrays: list[Any] = []
    if X is not None:
        arrays = _checked(X, y)
        terms = {
            "batch_size": whole("batch_size", batch_size),
            "epochs": whole("epochs", epochs),
            "seed": whole("seed", seed, least=0),
            "shuffle": flag("shuffle", shuffle),
            "shapes": tuple(tuple(map(int, array.shape)) for array in arrays),
            "dtypes": tuple(np.dtype(array.dtype).str for array in arrays),
        }
    place = locate(client, session, "reader", name, life, terms=None)
    if place is None and terms is None:
        raise SpecError(
            f"reader {name!r}: found none in session {session!r}; expected X, to make it"
        )
    if terms is not None:
        # There may be one by now: then it is compared with, and the data taken back.
        place = _made(client, session, name, life, arrays, terms, there=place is not None)
    assert place is not None
    if isinstance(known, Reader) and known.serves(place):
        return known
    return Reader(client, session, name, place, life, waits)


def _made(
    client: Client,
    session: str,
    name: str,
    life: str,
    arrays: list[Any],
    terms: dict[str, Any],
    *,
    there: bool,
) -> Place:
    """The reader's place, of one that is made of the arrays if there is none."""
    where = ("reader", name)
    if there:
        place = locate(client, session, *where, life, terms=terms, batching=None)
        assert place is not None
        return place
    held: list[Any] = []
    arrays = ready(client, arrays, held)
    _check_rows(arrays)
    control = Control(client)
    info = control.call("dtrain_info", settings().call_deadline)
    workers = [address for address, _ in info["ready"]]
    named = {str(i): array for i, array in enumerate(arrays)}

    refs, delivery = placed(client, workers, {"": named}, stacklevel=9)
    batching = Batching(
        tuple(refs[""][key] for key in named),
        terms["batch_size"],
        terms["epochs"],
        terms["seed"],
        terms["shuffle"],
        file=None if delivery is None else delivery.file.name,
        holders=() if delivery is None else tuple(workers),
    )
    mine = False
    try:
        place = locate(
            client,
            session,
            *where,
            life,
            terms=terms,
            batching=dumps(batching),
            keys=tuple(batching.keys()),
            file=batching.file,
        )
        assert place is not None
        mine = place.mine
    finally:
        if delivery is not None and not mine:
            delivery.discard()
    return place


def _checked(x: Any, y: Any) -> list[Any]:
    """X, and y if there is one: arrays of as many rows each."""
    arrays = [array_of(x, "X")] + ([] if y is None else [array_of(y, "y", labels=True)])
    if arrays[0].dtype.names is not None:
        raise DataError("X: found a dict, expected one array")
    _check_rows(arrays)
    return arrays


def _check_rows(arrays: list[Any]) -> None:
    """As many in each, as far as their numbers are known."""
    if not all(map(is_sized, arrays)):
        return
    if not arrays[0].shape[0]:
        raise DataError("X: found 0 rows, expected one or more")
    if len(arrays) == 2 and arrays[0].shape[0] != arrays[1].shape[0]:
        raise DataError(
            f"X has {arrays[0].shape[0]} rows and y has {arrays[1].shape[0]}, expected as many"
        )
