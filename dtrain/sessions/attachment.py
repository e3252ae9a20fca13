"""How one session object is attached to the container of its name, and stays so."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dtrain.checks import shared_name
from dtrain.cluster import Control, check_caller, current_client, install, open_client
from dtrain.config import scheduler_address, seconds, settings
from dtrain.errors import (
    ClusterError,
    DeadlineError,
    DTrainError,
    FencedError,
    SessionLost,
    SpecError,
)
from dtrain.runtime.buffers import Buffers
from dtrain.runtime.rpc import ask, opened
from dtrain.runtime.sessions.conversation import RETRY, Conversation, Tie, Voice, Voices, lend
from dtrain.runtime.sessions.shards import About

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")

#: Beats within a lease.
_BEATS = 4

#: Seconds that a worker may be late before the master is asked whether there is sense in waiting.
_LATE = 1.0


class Attachment:
    """A client of a session: what it knows of the variables, and how it speaks with their hosts.

    A *tie* is one generation of the variables; where it has ended, what was begun is done anew
    with the next.  Requests to the master that have to wait are long polls.  Its methods may be
    called from several threads.

    Parameters
    ----------
    name : str
        Of the session.
    client : distributed.Client or str, optional
        See :class:`dtrain.Session`.
    timeout : float or str
        Seconds that a call may take that does not say so itself.

    Attributes
    ----------
    id : str
        Its own name, which stands for one life of it.
    client : distributed.Client
    lock : threading.RLock
        Held while it attaches: one request at a time.
    origin : int or None
        The variables that it has had; None: it takes what is there.
    closed : bool
    """

    def __init__(self, name: str, client: Client | str | None, timeout: float | str) -> None:
        self.name = shared_name("session", name)
        self.timeout = seconds("timeout", timeout)
        self._stack = ExitStack()
        self.client = self._connected(client)
        try:
            self.control = Control(self.client)
            install(self.client)
        except BaseException:
            self._stack.close()
            raise
        self.settings = settings()
        self.id = f"{self.client.id}-{uuid.uuid4().hex[:8]}"
        self.lock = threading.RLock()
        self.origin: int | None = None
        self.closed = False
        #: what is pulled, pushed and assigned is laid out in
        self.buffers = Buffers()
        self._requests = 0
        self._tie: Tie | None = None
        #: the last that there was, which may still be the one
        self._former: Tie | None = None
        self._beats: Future[Any] = self.start(self._beat())

    def _connected(self, client: Client | str | None) -> Client:
        target = client
        if target is None:
            target = current_client() or scheduler_address()
        if target is None:
            raise ClusterError(
                "no cluster is named: expected a client, a current client, or DTRAIN_SCHEDULER"
            )
        if isinstance(target, str):
            target = open_client(target)
            self._stack.callback(target.close, timeout=5)
        return target

    def leave(self) -> None:
        """The master is told, and what was opened for it is closed."""
        self.closed = True
        if self.client.status != "closed":  # else its event loop is over, and they are with it
            self._beats.cancel()
        with suppress(ClusterError, DeadlineError):
            # A cluster that does not answer finds out by itself, by the lease.
            self.control.call("dtrain_session_leave", session=self.name, client=self.id)
        self._stack.close()

    def check_open(self) -> None:
        check_caller(self.client, f"session {self.name}")
        if self.closed:
            raise SpecError(f"session {self.name}: found it closed, expected an open one")

    def forget(self) -> None:
        """Whatever there is next is taken."""
        self._tie, self.origin = None, None

    def attached(self, until: float) -> Tie:
        """The variables as they are now, or were when it last asked; waits for them."""
        self.check_open()
        tie = self._tie
        if tie is not None:
            return tie
        with self.lock:
            if self._tie is None:
                found = self.ask_master("dtrain_session_attach", until, origin=self.origin)
                self.take(found)
            assert self._tie is not None
            return self._tie

    def take(self, found: Mapping[str, Any]) -> None:
        """The answer to a request: the variables, or why there are none."""
        kind = found["kind"]
        if kind == "ready":
            former = self._former
            self.origin = found["origin"]
            if former is not None and former.generation == found["generation"]:
                self._tie = former
                return
            same = former is not None and former.origin == self.origin
            self._tie = self._former = Tie(
                self.name,
                self.id,
                found["origin"],
                found["generation"],
                tuple(found["hosts"]),
                About.of(found["about"]),
                former.voices if former is not None and same else Voices(self.id),
            )
            return
        errors = {"refused": SpecError, "late": DeadlineError, "lost": SessionLost}
        raise errors.get(kind, FencedError)(found["problem"])

    def renew(self, tie: Tie) -> None:
        """These were refused, or not reached, or may have moved: ask anew."""
        with self.lock:
            if self._tie is tie:
                self._tie = None

    def ask_master(self, op: str, until: float, **message: Any) -> Any:
        """A request that may have to wait."""
        self._requests += 1
        allowed = max(until - time.monotonic(), 0.0)
        while True:
            found = self.call(
                op,
                wait=self.settings.poll,
                client=self.id,
                owner=self.client.id,
                request=self._requests,
                seconds=allowed,
                **message,
            )
            if found is not None:
                return found
            if time.monotonic() > until + self.settings.call_deadline:
                raise DeadlineError(f"session {self.name}: {op} was not answered in time")

    def call(self, op: str, *, wait: float | None = None, **message: Any) -> Any:
        if wait is not None:
            message["wait"] = wait
        deadline = self.settings.call_deadline + (wait or 0.0)
        return self.control.call(op, deadline, session=self.name, **message)

    # -- talking to the shards ---------------------------------------------------------------

    def converse(
        self,
        what: Callable[[Conversation, Tie], Coroutine[Any, Any, T]],
        timeout: float | str | None,
        lends: np.ndarray | None = None,
    ) -> T:
        """Talk to the shards, in the client's event loop: see :meth:`persist`.

        ``lends``: a buffer of bytes that is lent to those who are on this machine.
        """

        def talk(tie: Tie, voice: Voice, until: float) -> T:
            lent = None if lends is None else lend(tie, voice, lends)
            return self.start(self.talk(what, tie, voice, until, lent)).result()

        return self.persist(talk, self.until(timeout))

    async def talk(
        self,
        what: Callable[[Conversation, Tie], Coroutine[Any, Any, T]],
        tie: Tie,
        voice: Voice,
        until: float,
        lent: dict[str, Any] | None = None,
    ) -> T:
        poll = self.settings.poll
        return await what(Conversation(self.ask_worker, tie, voice, until, poll, lent), tie)

    def persist(
        self,
        what: Callable[[Tie, Voice, float], T],
        until: float,
        tie: Tie | None = None,
        voice: Voice | None = None,
    ) -> T:
        """Do it with the variables as they are; anew where a generation of them has ended.

        As long as they are of one origin it has the same voice, so that what comes twice is
        recognised, also by shards that have moved or were restored.
        """
        while True:
            now = self.attached(until)
            if voice is None or tie is None or now.voices is not tie.voices:
                voice = now.voices.take()
            tie = now
            try:
                result = what(tie, voice, until)
            except (DTrainError, OSError, CancelledError) as error:
                if isinstance(error, DTrainError) and not isinstance(error, FencedError):
                    raise
                # The master knows whether they are elsewhere now, or are no more.
                if time.monotonic() > until:
                    raise DeadlineError(f"session {self.name}: {error}") from error
                self.renew(tie)
                threading.Event().wait(RETRY)
            else:
                tie.voices.give_back(voice)
                return result

    async def ask_worker(self, address: str, op: str, deadline: float, **message: Any) -> Any:
        """Ask a worker about a generation; FencedError as soon as that is known to be over.

        The worker may have left, and Dask tries to reach it for long.
        """
        call = asyncio.ensure_future(ask(self.client.rpc(address), op, deadline, **message))
        try:
            while not (await asyncio.wait([call], timeout=_LATE))[0]:
                with suppress(OSError, DeadlineError):
                    # A master that does not answer says nothing.
                    await ask(
                        self.client.scheduler,
                        "dtrain_session_check",
                        self.settings.call_deadline,
                        session=message["session"],
                        generation=message["generation"],
                    )
        finally:
            call.cancel()
        return call.result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the client's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.client.loop.asyncio_loop)

    async def _beat(self) -> None:
        """Tell the master that this client is there, as long as it is."""
        lease = self.settings.session_lease
        while True:
            await asyncio.sleep(lease / _BEATS)
            tie = self._tie
            message = {"session": self.name, "client": self.id, "owner": self.client.id}
            with suppress(OSError, DTrainError):
                # The next one may arrive; if none does the master takes it for gone.
                answer = await asyncio.wait_for(
                    self.client.scheduler.dtrain_session_beat(
                        origin=None if tie is None else tie.origin, **message
                    ),
                    lease,
                )
                opened(answer, "dtrain_session_beat")

    def until(self, timeout: float | str | None) -> float:
        return time.monotonic() + (self.timeout if timeout is None else seconds("timeout", timeout))
