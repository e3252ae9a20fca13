"""Handles of queues and readers: leases, and requests that count once.

Items go from whoever puts them to the worker that keeps the queue, and from there to whoever gets
them.  The scheduler sees none of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self, TypeVar

import numpy as np

from dtrain.checks import number, shared_name
from dtrain.cluster import Control, check_caller
from dtrain.config import seconds, settings
from dtrain.errors import (
    ClusterError,
    DataError,
    DeadlineError,
    DTrainError,
    FencedError,
    QueueClosed,
    QueueLost,
    SpecError,
)
from dtrain.runtime import rpc
from dtrain.runtime.buffers import Buffers
from dtrain.runtime.queues.lending import Lender, Lent
from dtrain.runtime.queues.parcel import opened, unpack
from dtrain.runtime.worker import WorkerService, service_at

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")

#: How long a put or a get waits, unless it is said otherwise.
TIMEOUT = "60s"

#: Seconds between two tries to reach a worker that does not answer.
_RETRY = 0.05

#: Seconds that a worker may be late before the master is asked whether it is still there.
_LATE = 1.0


@dataclass(frozen=True)
class Place:
    """Where a queue or reader is, as the master says."""

    uid: str
    host: str
    terms: dict[str, Any]
    batching: bytes | None
    made: int
    #: whether it was made for whoever asked
    mine: bool


def locate(
    client: Client, session: str, kind: str, name: str, life: str, **made_with: Any
) -> Place | None:
    """Where it is; it is made if there are ``terms`` to make it with, else None is returned.

    What is None in the ``terms`` is not asked for; whoever makes it takes the ``defaults`` there.
    """
    shared_name("session", session)
    shared_name(kind, name)
    control = Control(client)
    deadline = 2 * settings().call_deadline
    found = control.call(
        "dtrain_queue",
        deadline,
        session=session,
        kind=kind,
        name=name,
        client=control.client_id,
        life=life,
        **made_with,
    )
    return None if found is None else Place(**found)


def timeout_of(value: float | str | None, default: float) -> float:
    """Seconds; 0 is for now or never, None for the default."""
    if value is None:
        return default
    return seconds("timeout", value) if isinstance(value, str) else number("timeout", value)


@dataclass
class _Where:
    """The place as it is known now, for a handle and for what outlives it."""

    place: Place

    async def follow(self, client: Client, deadline: float) -> bool:
        """Ask the master for the place; whether it is another.  QueueLost if there is none."""
        found = await rpc.ask(
            client.scheduler, "dtrain_queue_check", deadline, queue=self.place.uid
        )
        moved = bool(found != self.place.host)
        if moved:
            self.place = replace(self.place, host=found)
        return moved


class _Holder:
    """One thread's side of a queue: what it holds, and how many requests it has made."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.request = 0
        #: the item that it has got and is not known to be done with
        self.held: int | None = None
        #: a request was given up, and nobody knows what has come of it
        self.unsettled = False
        #: what had come of the last one that was given up
        self.outcome = ""
        self.lender = Lender()


class Shared:
    """One handle of a queue or reader: asks the worker that keeps it.

    Each thread is a holder of its own; what a thread held that has ended is handed out again.

    Parameters
    ----------
    client : distributed.Client
    session, name : str
    kind : str
        "queue" or "reader".
    place : Place
    life : str
        The name of this handle, known to the master.
    timeout : float
        Seconds that a call waits which does not say how long.
    """

    def __init__(
        self,
        client: Client,
        session: str,
        name: str,
        kind: str,
        place: Place,
        life: str,
        timeout: float,
    ) -> None:
        self.session, self.name, self.kind = session, name, kind
        self._where = _Where(place)
        self._client = client
        self.life = life
        self._timeout = timeout
        self._settings = settings()
        self._local = threading.local()
        self._threads = 0
        self._lock = threading.Lock()
        self.left = False
        #: whether the queue's worker is on this machine, as far as is known
        self._near = not place.host.startswith("inproc:")
        #: the worker's own service, where this is a task on one
        self._service = _service_here()
        #: what items are read to
        self._buffers = Buffers()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of session {self.session!r}"

    def __repr__(self) -> str:
        return f"<{self} at {self.place.host}>"

    def __reduce__(self) -> Never:
        raise SpecError(
            f"{self}: found it on its way to another process, expected its name alone: it is "
            f"opened there by {self.kind}({self.name!r}) of a Session({self.session!r})"
        )

    @property
    def place(self) -> Place:
        """Where it is, as far as is known: it moves when its worker is retired."""
        return self._where.place

    def serves(self, place: Place) -> bool:
        """Whether this handle may be used on for what is there."""
        return self.place.uid == place.uid and not self.left

    # -- leases ----------------------------------------------------------------------------------

    def done(self) -> None:
        """What this thread got last is done with; nothing, if it holds nothing."""
        holder = self._holder()
        self._settle(holder)
        if holder.held is not None:
            self._request(holder, "ack", self._settings.call_deadline, {"item": holder.held})
            holder.held = None

    def give_back(self) -> None:
        """What this thread got last is handed out again, to whoever comes first."""
        holder = self._holder()
        if holder.held is not None:
            self._call("release", self._settings.call_deadline, holder=holder.name)
            holder.held = None

    def leave(self) -> None:
        """Let go of it: what any thread of this handle still holds is handed out again.

        The queue or reader goes on; it is this handle that cannot be used any more.
        """
        if self.left or self._client.status != "running":
            return
        self.left = True
        with suppress(QueueLost, ClusterError, DeadlineError, FencedError):
            self._call("leave", self._settings.call_deadline, lives=[self.life])
            control = Control(self._client)
            control.call("dtrain_queue_left", queue=self.place.uid, life=self.life)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None and not self.left:
                with suppress(QueueLost):
                    self.done()
        finally:
            self.leave()

    def stats(self) -> dict[str, Any]:
        """What there is and what has become of it; see ``docs/queues.md``."""
        found: dict[str, Any] = self._call("stats", self._settings.call_deadline)
        return {**found, "host": self.place.host, "made": self.place.made}

    # -- requests: what a holder asks for, once, however often it is sent ------------------------

    def _take(self, timeout: float | str | None, *, bare: bool) -> dict[str, Any]:
        """Lease the next item: the worker's answer, which says where it is."""
        holder = self._holder()
        waits = timeout_of(timeout, self._timeout)
        self._settle(holder)
        until = time.monotonic() + waits
        while True:
            left = max(until - time.monotonic(), 0.0)
            done = holder.held
            message = {"acknowledges": done, "bare": bare, "near": self._near}
            answer = self._request(holder, "get", left, message)
            holder.held = None
            kind = answer["kind"]
            if kind == "leased":
                holder.held = answer["item"]
                if bare or self._open(answer):
                    return answer
                # It goes back; it is lost if its store is, and the next one comes.
                self.give_back()
                self._pause()
                if time.monotonic() < until:
                    continue
                kind = "empty"
            if kind == "closed":
                raise QueueClosed(f"{self}: it is closed, and all that was in it is taken")
            raise DeadlineError(f"{self}: {waits:g} s have passed, and there is nothing to be got")

    def _open(self, answer: dict[str, Any]) -> bool:
        """Set the answer's ``value``, from where its bytes are; False: nobody answers there."""
        try:
            parcel, own = self._bytes_of(answer)
        except (OSError, QueueLost):
            return False
        try:
            answer["value"] = unpack(parcel, own=own, buffers=self._buffers)
        except BaseException as error:
            # Somebody else may be able to: a class may be known there.
            self.give_back()
            if not isinstance(error, Exception) or isinstance(error, MemoryError):
                raise
            raise DataError(
                f"{self}: found an item that cannot be unpickled here "
                f"({type(error).__name__}: {error}); it was given back"
            ) from error
        return True

    def _bytes_of(self, answer: dict[str, Any]) -> tuple[np.ndarray, bool]:
        """An item's bytes, and whether they are our own copy; OSError if they cannot be had."""
        if "parcel" in answer:
            return opened(answer["parcel"]), False
        if "lent" in answer:
            borrowed = Lent.borrowed(answer["lent"])
            if borrowed is not None:
                with closing(borrowed):
                    return borrowed.read(self._buffers.room(borrowed.nbytes)), True
            self._near = False
        message = {"queue": self.place.uid, "putter": answer["putter"]}
        message["request"] = answer["request"]
        service = self._service
        if service is not None and answer["store"] == service.queues.store:
            stored = service.queues.stored((*message.values(),))
            if isinstance(stored, np.ndarray):
                return stored, False
        peer = self._client.rpc(answer["store"].partition(" ")[0])
        deadline = self._settings.call_deadline
        found = self._start(rpc.ask(peer, "dtrain_queue_item", deadline, **message)).result()
        return opened(found["parcel"]), False

    def _pause(self) -> None:
        threading.Event().wait(_RETRY)

    def _holder(self) -> _Holder:
        """This thread's; a new one for each thread, so that a name stands for one life."""
        if self.left:
            raise FencedError(f"{self}: this handle was left, expected one that is in use")
        check_caller(self._client, str(self))
        holder: _Holder | None = getattr(self._local, "holder", None)
        if holder is None:
            with self._lock:
                self._threads += 1
                number = self._threads
            holder = self._local.holder = _Holder(f"{self.life}/{number}")
            asks = (self._client, self._where, self._settings.call_deadline, holder.name)
            weakref.finalize(holder, _let_go, *asks).atexit = False
        return holder

    def _request(
        self,
        holder: _Holder,
        op: str,
        waits: float,
        message: dict[str, Any],
        *,
        again: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Ask for something under the next number; what was not answered is given up first.

        An answer that is one of ``again`` says that the request has not been taken: its number is
        for the next one.
        """
        self._settle(holder)
        holder.unsettled = True
        try:
            message.update(holder=holder.name, request=holder.request)
            if op in ("put", "get"):
                message["seconds"] = waits
            answer: dict[str, Any] = self._answered(op, waits, message)
        except (QueueLost, FencedError):
            # There is nobody to give it up to.
            raise
        except BaseException as error:
            with suppress(OSError, DTrainError):
                self._settle(holder)
            kept = not holder.unsettled and holder.outcome in ("stored", "acknowledged")
            if kept and isinstance(error, DeadlineError):
                return {"kind": holder.outcome}
            raise
        holder.unsettled = False
        holder.request += answer["kind"] not in again
        return answer

    def _settle(self, holder: _Holder) -> None:
        """Give up a request of which nobody knows what has become."""
        if not holder.unsettled:
            return
        message = {"holder": holder.name, "request": holder.request}
        answer = self._answered("withdraw", self._settings.call_deadline, message)
        holder.outcome = answer["kind"]
        holder.unsettled = False
        holder.request += 1

    def _call(self, op: str, waits: float, **message: Any) -> Any:
        check_caller(self._client, str(self))
        return self._answered(op, waits, message)

    # -- calls: the thread that asks waits, so that in the event loop there is one task for each ---

    def _answered(self, op: str, waits: float, message: dict[str, Any]) -> Any:
        """The worker's answer, however long it takes, up to ``waits`` and the time for a call."""
        config = self._settings
        until = time.monotonic() + waits + config.call_deadline
        if op in ("put", "get", "ack", "withdraw"):
            message["wait"] = config.poll
        problem: object = "it has not answered"
        while True:
            host = self.place.host
            try:
                answer = self._ask(op, message)
                if answer is not None:
                    return answer
                # It is there, and waits for its turn.
                message.pop("item", None)
            except FencedError:
                # The master knows why.
                self._check()
                raise
            except QueueLost as error:
                problem = error
                self._follow(host, until)
            except OSError as error:
                problem = error
                self._check()
                self._pause()
            if time.monotonic() > until:
                raise DeadlineError(f"{self}: worker {host}: {op}: {problem}")

    def _ask(self, op: str, message: Mapping[str, Any]) -> Any:
        """One call; while it is late the master is asked whether there is any sense in waiting."""
        wait = message.get("wait", 0.0)
        late = time.monotonic() + wait + self._settings.call_deadline
        op = f"dtrain_queue_{op}"
        # Without `rpc.ask`, whose deadline costs as much as the call.
        host = self.place.host
        peer = self._client.rpc(host)
        call = self._start(getattr(peer, op)(queue=self.place.uid, **message))
        try:
            while not _over(call, wait + _LATE):
                self._check()
                if self.place.host != host:
                    raise OSError(f"it has moved to {self.place.host}")
                if time.monotonic() > late:
                    raise DeadlineError("it has not answered")
        finally:
            call.cancel()
        return rpc.opened(call.result(), f"{op} at {host}")

    def _follow(self, host: str, until: float) -> None:
        """It is not at ``host``: wait for the master to say where it is, or why it is nowhere.

        That worker is about to go, and would be asked in vain.
        """
        self._check()
        while self.place.host == host and time.monotonic() < until:
            self._pause()
            self._check()

    def _check(self) -> None:
        """Raises QueueLost if the queue is gone; a master that does not answer says nothing."""
        with suppress(OSError):
            asked = self._where.follow(self._client, self._settings.call_deadline)
            if self._start(asked).result():
                self._near = not self.place.host.startswith("inproc:")

    def _start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it in the client's event loop."""
        return asyncio.run_coroutine_threadsafe(call, self._client.loop.asyncio_loop)


def _over(call: Future[Any], seconds: float) -> bool:
    """Whether it has ended by then, well or not."""
    # Not by `concurrent.futures.wait`, which takes several times as long where one is waited for.
    with suppress(TimeoutError):
        call.exception(seconds)
    return call.done()


def _let_go(client: Client, where: _Where, deadline: float, holder: str) -> None:
    """A thread has ended, or nobody has the handle any more: what it held is handed out again.

    Called in whichever thread notices, so that it must not wait.
    """
    if client.status != "running":
        return

    async def release() -> None:
        # If it cannot be told now, it hears of it when the client goes.
        until = time.monotonic() + deadline
        message = {"queue": where.place.uid, "holder": holder}
        with suppress(OSError, DTrainError):
            while time.monotonic() < until:
                # Nobody may have asked for long, and it may be moving right now.
                await where.follow(client, deadline)
                try:
                    peer = client.rpc(where.place.host)
                    await rpc.ask(peer, "dtrain_queue_release", deadline, **message)
                    return
                except QueueLost:
                    await asyncio.sleep(_RETRY)

    client.loop.add_callback(release)


def _service_here() -> WorkerService | None:
    """The service of the worker on which this is a task; None outside of tasks."""
    from distributed.worker import thread_state

    if not hasattr(thread_state, "execution_state"):
        return None
    return service_at(thread_state.execution_state["worker"].address)


def life_of(known: Shared | None) -> str:
    """The name of a handle that is to be opened: that of one which may be used on, or a new one."""
    return uuid.uuid4().hex if known is None or known.left else known.life
