"""Queues that processes share by name: bounded, with deadlines, and nothing is lost on the way.

An item belongs to the queue once ``put`` has returned, whatever becomes of whoever put it.  What
``get`` returns is a *lease*: the next ``get`` of the same thread says that it is done with, as
``done``, ``close`` and the end of a ``with`` block do; what somebody held who dies is handed out
again.  So every item is worked on at least once, and exactly once as long as nobody dies.

Items go from whoever puts them to the worker that keeps the queue, and from there to whoever gets
them.  A large one that a task on a worker puts stays with that worker until it is got.  The
scheduler sees none of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.config import nbytes as parse_nbytes
from dtrain.errors import DataError, DeadlineError, FencedError, QueueClosed, QueueLost, SpecError
from dtrain.runtime.queues.lending import WORTH
from dtrain.runtime.queues.parcel import enveloped, joined, pieces
from dtrain.runtime.worker import WorkerService
from dtrain.sessions.shared import TIMEOUT, Shared, life_of, locate, timeout_of
from dtrain.spec import whole

if TYPE_CHECKING:
    from distributed import Client

#: Bytes that a queue may hold, unless it is said otherwise.
NBYTES = "256MiB"

#: Bytes from which an item that a task puts stays at its own worker, if that is on another machine
#: than the queue's: it travels once then, but whoever gets it has to ask twice.
LARGE = 1 << 22


class Queue(Shared):
    """A bounded queue that processes share by name; :meth:`dtrain.Session.queue` opens it.

    Threads may use one handle at the same time; each holds what it has got itself.  A handle
    cannot be sent to another process: open the queue there.

    Attributes
    ----------
    capacity : int
        Items that may wait to be got.
    nbytes : int
        Bytes of all items that wait, or are got and not done with.  Beyond them there is at most
        one item of everybody who waits for a place.
    """

    @property
    def capacity(self) -> int:
        return int(self.place.terms["capacity"])

    @property
    def nbytes(self) -> int:
        return int(self.place.terms["nbytes"])

    def put(self, item: Any, timeout: float | str | None = None) -> None:
        """Put an item; once this has returned it is the queue's, whatever becomes of us.

        Parameters
        ----------
        item : object
            An array, a dict, tuple or list of arrays, or whatever can be pickled.  It is copied.
        timeout : float or str, optional
            Seconds to wait for a place, 0 for not at all; None: as the handle was opened with.

        Raises
        ------
        QueueClosed
            Somebody has closed the queue.
        DeadlineError
            There was no place in time; the item is not in the queue.
        DataError
            The item is larger than the whole queue may be, or cannot be pickled.
        QueueLost
            The queue is gone, with the worker that kept it or by a reset.
        """
        waits = timeout_of(timeout, self._timeout)
        parts = pieces(item)
        until = time.monotonic() + waits
        answer = self._lend(parts, waits)
        if answer is None:
            parcel = joined(parts)
            left = max(until - time.monotonic(), 0.0)
            stays = self._stays(parcel)
            if stays is not None:
                answer = self._lay(parcel, stays, left)
            else:
                sent = {"nbytes": parcel.nbytes, "item": enveloped(parcel)}
                answer = self._request(self._holder(), "put", left, sent)
        kind = answer["kind"]
        if kind == "full":
            raise DeadlineError(
                f"{self}: {waits:g} s have passed, and there is no place; "
                f"it takes {self.capacity} items and {self.nbytes} bytes"
            )
        if kind == "closed":
            raise QueueClosed(f"{self}: it is closed")
        if kind == "refused":
            raise DataError(f"{self}: {answer['problem']}")

    def _lend(self, parts: Sequence[np.ndarray], waits: float) -> dict[str, Any] | None:
        """Have the queue's worker open the memory that the item is in; None: it cannot."""
        nbytes = sum(part.nbytes for part in parts)
        if not self._near or nbytes < WORTH:
            return None
        holder = self._holder()
        self._settle(holder)
        number = holder.request
        lent = holder.lender.lend(parts)
        if lent is None:
            return None
        message = {"nbytes": nbytes, "lent": lent.told()}
        try:
            answer = self._request(holder, "put", waits, message, again=("send",))
        except BaseException:
            lent.close()
            raise
        if answer["kind"] == "send":
            lent.close()
            self._near = answer["near"]
            return None
        holder.lender.keep(number, lent)
        holder.lender.back(answer.get("free", ()))
        return answer

    def _lay(self, parcel: np.ndarray, service: WorkerService, waits: float) -> dict[str, Any]:
        """Leave the item at this task's own worker, and tell the queue's where it is."""
        holder = self._holder()
        self._settle(holder)
        key = (self.place.uid, holder.name, holder.request)
        service.queues.lay(key, parcel)
        message = {"nbytes": parcel.nbytes, "store": service.queues.store}
        try:
            answer = self._request(holder, "put", waits, message)
        except BaseException as error:
            over = isinstance(error, QueueLost | FencedError)
            given_up = not holder.unsettled and holder.outcome != "stored"
            if over or given_up:
                service.queues.lift(key)
            raise
        if answer["kind"] != "stored":
            service.queues.lift(key)
        return answer

    def _stays(self, parcel: np.ndarray) -> WorkerService | None:
        """The worker whose task puts the item, if it is to stay there."""
        service = self._service
        if service is None or service.address == self.place.host or parcel.nbytes < LARGE:
            return None
        return service

    def get(self, timeout: float | str | None = None) -> Any:
        """The next item, first in, first out; what this thread got before is done with.

        Parameters
        ----------
        timeout : float or str, optional
            As for :meth:`put`.

        Raises
        ------
        QueueClosed
            The queue is closed, and all items are taken and done with.
        DeadlineError
            There was none in time.
        DataError
            It cannot be unpickled here; it is given back.
        QueueLost
            The queue is gone, with the worker that kept it or by a reset.
        """
        return self._take(timeout, bare=False)["value"]

    def __iter__(self) -> Iterator[Any]:
        """Items until the queue is closed and empty; each is done with when the next is wanted."""
        while True:
            try:
                item = self.get()
            except QueueClosed:
                return
            yield item

    def close(self) -> None:
        """Nobody puts any more; what is there can still be got.

        What this thread holds is done with.  Closing it twice is closing it once.
        """
        self.done()
        self._call("close", self._settings.call_deadline)

    def size(self) -> int:
        """Items that can be got at this moment."""
        return int(self.stats()["size"])


def open_queue(
    client: Client,
    session: str,
    name: str,
    capacity: int | None = None,
    *,
    nbytes: int | str | None = None,
    timeout: float | str = TIMEOUT,
    known: Shared | None = None,
) -> Queue:
    """Open a queue of a session; it is made if there is none of that name.

    Parameters
    ----------
    client : distributed.Client
        Of a cluster that has dtrain.
    session, name : str
    capacity : int, optional
        Items that may wait to be got; needed by whoever comes first.
    nbytes : int or str, optional
        Bytes that all items together may have; 256 MiB, if whoever comes first does not say.
    timeout : float or str
        How long a put or get waits that does not say so itself.
    known : Queue, optional
        A handle that is returned if it still is one of this queue.

    Raises
    ------
    SpecError
        There is one with another capacity, or there is none and the capacity is not given.
    ClusterError
        No worker can keep it.
    """
    if capacity is not None:
        capacity = whole(f"queue {name!r}: capacity", capacity)
    waits = timeout_of(timeout, 0.0)
    life = life_of(known)
    place = locate(
        client,
        session,
        "queue",
        name,
        life,
        terms={
            "capacity": capacity,
            "nbytes": None if nbytes is None else parse_nbytes("nbytes", nbytes),
        },
        defaults={"nbytes": parse_nbytes("nbytes", NBYTES)},
    )
    if place is None:
        raise SpecError(
            f"queue {name!r}: found none in session {session!r}; expected a capacity, to make it"
        )
    if isinstance(known, Queue) and known.serves(place):
        return known
    return Queue(client, session, name, "queue", place, life, waits)
