"""Which worker keeps which queue and reader: the master's part, which never sees an item.

A worker is chosen when a queue is first wanted, the one that keeps the fewest; whoever opens the
queue is told.  If that worker dies the queue is gone, with what was in it: who waits is told by
:class:`~dtrain.errors.QueueLost`, and whoever opens it again makes it anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtrain.config import Settings
from dtrain.errors import ClusterError, DataError, DTrainError, FencedError, QueueLost, SpecError
from dtrain.runtime.rpc import ask

if TYPE_CHECKING:
    from distributed import Scheduler

    from dtrain.machines.membership import Membership

logger = logging.getLogger("dtrain.master")

#: Queues that are over and are remembered, for those who still ask for them.
_OVER = 1000

#: Seconds between two tries to tell a worker something that it must know.
_RETRY = 1.0


@dataclass
class Entry:
    """A queue or a reader of a session."""

    uid: str
    session: str
    name: str
    kind: str
    #: what it was made with, told to those who want it with something else
    terms: dict[str, Any]
    #: the pickled :class:`~dtrain.runtime.queues.batches.Batching` of a reader, opaque here
    batching: bytes | None
    #: keys of chunks, and the name of a file, that are there for this reader
    keys: list[Any]
    file: str | None
    #: when it was made; Unix seconds
    since: float = field(default_factory=time.time)
    #: how often a queue of this name was made; all but the last were lost
    made: int = 1
    host: str = ""
    #: handle -> the client that it is of
    lives: dict[str, str] = field(default_factory=dict)
    begun: asyncio.Task[None] | None = None
    #: while it moves to another worker
    moving: asyncio.Task[None] | None = None
    #: since when nobody has it open
    unused: float = 0.0

    @property
    def hold(self) -> str:
        """The name under which the scheduler keeps the chunks."""
        return f"dtrain-{self.kind}-{self.uid}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of session {self.session!r}"


class Directory:
    """The queues and readers of all sessions, by name."""

    def __init__(
        self,
        scheduler: Scheduler,
        membership: Membership,
        settings: Settings,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._scheduler = scheduler
        self._membership = membership
        self._settings = settings
        self._spawn = spawn
        self._entries: dict[tuple[str, str, str], Entry] = {}
        #: why the queues that are over are over
        self._over: dict[str, str] = {}
        #: (session, kind, name) -> how often it was made
        self._made: dict[tuple[str, str, str], int] = {}
        #: what is still being let go of on workers
        self._forgetting: set[asyncio.Task[None]] = set()
        self.handlers = {
            "dtrain_queue": self.open,
            "dtrain_queue_check": self.check,
            "dtrain_queue_left": self.left,
            "dtrain_queues": self.list_queues,
            "dtrain_queues_reset": self.reset,
        }

    # -- handlers --------------------------------------------------------------------------------

    async def open(
        self,
        session: str,
        name: str,
        kind: str,
        client: str,
        life: str,
        terms: dict[str, Any] | None,
        defaults: dict[str, Any] | None = None,
        batching: bytes | None = None,
        keys: tuple[Any, ...] = (),
        file: str | None = None,
    ) -> dict[str, Any] | None:
        """Where the queue is; it is made if there is none.

        ``terms`` are what it is to be like, None for what does not matter; with ``defaults`` it is
        made.  The answer is None if there is none, and a term is missing to make it.
        """
        if client not in self._scheduler.clients:
            raise FencedError(f"client {client}: not connected to {self._scheduler.address}")
        key = (session, kind, name)
        entry = self._entries.get(key)
        mine = entry is None
        if entry is None:
            made_with = {
                k: v if v is not None else (defaults or {}).get(k)
                for k, v in (terms or {"": None}).items()
            }
            if None in made_with.values():
                return None
            lost = [k for k in keys if k not in self._scheduler.tasks]
            if lost:
                raise DataError(f"chunk {lost[0]!r} is not on the cluster; expected it persisted")
            self._made[key] = self._made.get(key, 0) + 1
            uid = uuid.uuid4().hex
            entry = Entry(uid, session, name, kind, made_with, batching, list(keys), file)
            entry.made = self._made[key]
            self._entries[key] = entry
            self._scheduler.client_desires_keys(entry.keys, entry.hold)
            entry.begun = self._spawn(self._begin(key, entry))
        assert entry.begun is not None
        await asyncio.shield(entry.begun)
        differ = [k for k, v in (terms or {}).items() if v is not None and entry.terms[k] != v]
        if differ:
            found = ", ".join(f"{k}={terms[k]!r}" for k in differ if terms)
            expected = ", ".join(f"{k}={entry.terms[k]!r}" for k in differ)
            raise SpecError(f"{entry}: found {found}, expected {expected}, as it was made")
        if self._entries.get(key) is not entry:
            raise QueueLost(self._over.get(entry.uid, f"{entry}: it is over"))
        if client not in self._scheduler.clients:
            raise FencedError(f"client {client}: its connection was lost")
        entry.lives[life] = client
        return {
            "uid": entry.uid,
            "host": entry.host,
            "terms": entry.terms,
            "batching": entry.batching,
            "made": entry.made,
            "mine": mine,
        }

    def check(self, queue: str) -> str:
        """The worker that keeps a queue: QueueLost, with the reason, if none does."""
        for entry in self._entries.values():
            if entry.uid == queue:
                return entry.host
        raise QueueLost(self._over.get(queue, f"queue {queue}: not on this cluster"))

    def left(self, queue: str, life: str) -> None:
        """A handle is closed, and has told the queue's worker itself."""
        for entry in self._entries.values():
            if entry.uid == queue:
                entry.lives.pop(life, None)

    def list_queues(self, session: str | None = None) -> list[dict[str, Any]]:
        """Names, kinds and workers of a session's queues and readers; None: of all sessions."""
        return [
            {
                "session": e.session,
                "name": e.name,
                "kind": e.kind,
                "queue": e.uid,
                "worker": e.host,
                "since": e.since,
                "made": e.made,
                "terms": e.terms,
                "handles": len(e.lives),
            }
            for e in self._entries.values()
            if session is None or e.session == session
        ]

    async def reset(self, session: str) -> int:
        """End a session's queues and readers, with what is in them; how many there were.

        Nothing of them is left on any worker that answers.
        """
        ours = [key for key in self._entries if key[0] == session]
        for key in ours:
            self._end(key, f"{self._entries[key]}: it was reset")
        for key in [key for key in self._made if key[0] == session]:
            del self._made[key]
        if self._forgetting:
            await asyncio.wait(set(self._forgetting))
        return len(ours)

    # -- moves -----------------------------------------------------------------------------------

    async def move_away(self, addresses: Collection[str], until: float) -> None:
        """Queues, and the items of others, leave workers that are about to leave.

        Where nobody stays who could have them, they go with their workers.
        """
        if not self._candidates():
            return
        moves = []
        for key, entry in self._entries.items():
            if entry.host in addresses or entry.moving is not None:
                entry.moving = self._spawn(self._move(key, entry, entry.moving, until))
                moves.append(entry.moving)
        if moves:
            await asyncio.wait(moves)
        hosts = sorted({entry.host for entry in self._entries.values()} - set(addresses))
        found = await asyncio.gather(
            *(
                ask(
                    self._scheduler.rpc(host),
                    "dtrain_queue_gather",
                    max(until - time.monotonic(), 0.0),
                    address=address,
                )
                for host in hosts
                for address in addresses
            ),
            return_exceptions=True,
        )
        for problem in found:
            if isinstance(problem, OSError | DTrainError):
                # What could not be had is lost with its worker, and counted.
                logger.warning("items of workers that are about to leave: %s", problem)
            elif isinstance(problem, BaseException):
                raise problem

    async def _move(
        self,
        key: tuple[str, str, str],
        entry: Entry,
        before: asyncio.Task[None] | None,
        until: float,
    ) -> None:
        """Once it is made, and any move before is over; if it is still on a worker that leaves."""
        try:
            await asyncio.wait([task for task in (entry.begun, before) if task is not None])
            if entry.host not in self._candidates():
                await self._move_from(key, entry, entry.host, until)
        finally:
            if entry.moving is asyncio.current_task():
                entry.moving = None

    async def _move_from(
        self, key: tuple[str, str, str], entry: Entry, source: str, until: float
    ) -> None:
        """To the worker that keeps the fewest; if it does not answer, to the next."""
        problem = "no worker is there"
        for address in self._candidates():
            left = until - time.monotonic()
            if self._entries.get(key) is not entry or left <= 0:
                break
            try:
                await ask(
                    self._scheduler.rpc(address),
                    "dtrain_queue_take_over",
                    left,
                    queue=entry.uid,
                    batching=entry.batching,
                    source=source,
                )
            except (OSError, DTrainError) as error:
                problem = f"{address}: {error}"
                logger.warning("%s: not moved from %s: %s", entry, source, problem)
            else:
                if self._entries.get(key) is entry:
                    entry.host = address
                    self._spawn(self._insist(source, "dtrain_queue_moved", {"queue": entry.uid}))
                    return
            why = self._over.get(entry.uid, f"{entry}: it is kept by another worker")
            told = {"queue": entry.uid, "why": why}
            self._spawn(self._insist(address, "dtrain_queue_forget", told))
        if self._entries.get(key) is entry:
            self._end(key, f"{entry}: gone with worker {source}, as it could not move: {problem}")

    # -- what befalls ----------------------------------------------------------------------------

    def lose_worker(self, address: str) -> None:
        """A worker has died, or is fenced: the queues that it kept are gone."""
        for key, entry in list(self._entries.items()):
            if entry.host == address:
                words = f"{entry}: gone with worker {address}, which kept it, and all that it held"
                logger.warning("%s", words)
                self._end(key, words)
        for host in {entry.host for entry in self._entries.values() if entry.host}:
            self._spawn(self._insist(host, "dtrain_queue_store_gone", {"address": address}))

    def lose_client(self, client: str) -> None:
        """What the threads of a client held is handed out again."""
        for entry in self._entries.values():
            lives = [life for life, of in entry.lives.items() if of == client]
            if lives:
                for life in lives:
                    del entry.lives[life]
                self._spawn(self._tell_left(entry, lives))

    def tick(self, now: float, in_use: Collection[str]) -> None:
        """End what nobody has had open for a session's time to live.

        ``in_use`` are sessions that somebody has for something else.
        """
        for key, entry in list(self._entries.items()):
            if entry.lives or entry.session in in_use or not entry.unused:
                entry.unused = now
            elif now - entry.unused > self._settings.session_ttl:
                self._end(key, f"{entry}: nobody has had it open for the session's time to live")

    @property
    def files(self) -> set[str]:
        """Names of the files that readers need."""
        return {entry.file for entry in self._entries.values() if entry.file is not None}

    # -- acting ----------------------------------------------------------------------------------

    async def _begin(self, key: tuple[str, str, str], entry: Entry) -> None:
        """On the worker that keeps the fewest; if it does not answer, on the next."""
        problem = "the cluster has no workers that can"
        for address in self._candidates():
            entry.host = address
            try:
                await ask(
                    self._scheduler.rpc(address),
                    "dtrain_queue_begin",
                    self._settings.call_deadline,
                    queue=entry.uid,
                    name=f"{entry.session}/{entry.name}",
                    capacity=entry.terms.get("capacity") or 1,
                    nbytes=entry.terms.get("nbytes") or 1,
                    batching=entry.batching,
                )
                return
            except SpecError:
                self._end(key, f"{entry}: it could not be made")
                raise
            except (OSError, DTrainError) as error:
                problem = f"{address}: {error}"
            if self._entries.get(key) is not entry:
                raise QueueLost(self._over[entry.uid])
        self._end(key, f"{entry}: it could not be made")
        raise ClusterError(f"{entry}: no worker keeps it; {problem}")

    def _candidates(self) -> list[str]:
        kept = [entry.host for entry in self._entries.values()]
        ready = [member.address for member in self._membership.ready()]
        return sorted(ready, key=kept.count)

    def _end(self, key: tuple[str, str, str], why: str) -> None:
        entry = self._entries.pop(key)
        self._over[entry.uid] = why
        while len(self._over) > _OVER:
            del self._over[next(iter(self._over))]
        self._scheduler.client_releases_keys(entry.keys, entry.hold)
        task = self._spawn(self._forget(entry, why))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _forget(self, entry: Entry, why: str) -> None:
        """No worker keeps anything of it; one that cannot answer now is not waited for."""
        calls = []
        for address in self._scheduler.workers:
            peer = self._scheduler.rpc(address)
            deadline = self._settings.call_deadline
            calls.append(ask(peer, "dtrain_queue_forget", deadline, queue=entry.uid, why=why))
            if entry.file is not None:
                calls.append(ask(peer, "dtrain_forget_input", deadline, name=entry.file))
        for problem in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(problem, Exception):
                logger.info("%s: %s", entry, problem)

    async def _tell_left(self, entry: Entry, lives: list[str]) -> None:
        """Tell the worker that keeps a queue who has left, and once more if it moves meanwhile."""
        told, host = {"queue": entry.uid, "lives": lives}, ""
        while host != entry.host or entry.moving is not None:
            if entry.moving is not None:
                await asyncio.wait({entry.moving})
            host = entry.host
            await self._insist(host, "dtrain_queue_leave", told)

    async def _insist(self, address: str, op: str, message: dict[str, Any]) -> None:
        """Tell a worker until it has heard, or is gone."""
        while address in self._scheduler.workers:
            try:
                peer = self._scheduler.rpc(address)
                await ask(peer, op, self._settings.call_deadline, **message)
                return
            except (OSError, DTrainError) as error:
                logger.info("%s: %s: %s", address, op, error)
                await asyncio.sleep(_RETRY)
