"""The master's part in named sessions: who has created what, and where it lies.

It keeps a :class:`~dtrain.machines.container.Container` for each name, and never sees a parameter:
what a session's variables are (``about``) and its model are bytes that it hands on unopened.
Runs in the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtrain.checks import shared_name
from dtrain.config import Settings
from dtrain.devices import lacking
from dtrain.errors import ClusterError, DTrainError, FencedError, SessionNotFound
from dtrain.machines.container import (
    Answer,
    Attach,
    Beat,
    Command,
    Container,
    Create,
    Created,
    Drop,
    Event,
    Failed,
    Gone,
    Initialise,
    Leaving,
    Limits,
    Move,
    Moved,
    NotMoved,
    NotRestored,
    Placed,
    Ready,
    Reload,
    Reply,
    Reset,
    Restore,
    Restored,
    Saved,
    State,
    Tick,
    WorkerLost,
)
from dtrain.machines.membership import Membership, Presence
from dtrain.partition import assign
from dtrain.runtime.rpc import ask

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dtrain.sessions")

#: Seconds before a move that has failed is tried again: who has died is heard of meanwhile.
_RETRY = 0.5

_Key = tuple[str, int]


@dataclass
class Named:
    """A session as the master knows it, beside its machine."""

    container: Container
    #: when it was first named; Unix seconds
    since: float
    #: what the variables are, in bytes that their clients and workers alone open
    about: bytes = b""
    model: bytes = b""
    #: shard -> bytes, and how shards are placed: a rule's name, never a user's function
    sizes: tuple[int, ...] = ()
    placement: str = "greedy"
    #: client of the session -> the Dask client that it is with
    owners: dict[str, str] = field(default_factory=dict)
    #: client -> its request that waits, and until when
    until: dict[str, tuple[int, float]] = field(default_factory=dict)
    answers: dict[_Key, asyncio.Future[Reply]] = field(default_factory=dict)
    #: what is still being let go of on workers
    dropping: set[asyncio.Task[Any]] = field(default_factory=set)
    #: its moves that are under way
    moves: set[asyncio.Task[Any]] = field(default_factory=set)


class Sessions:
    """All sessions of a cluster.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    membership : Membership
    settings : Settings
    spawn : callable
        Runs a coroutine in the scheduler's loop, until the master closes.
    queues : callable
        All queues and readers, as :class:`dtrain.runtime.queues.master.Directory` lists them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        membership: Membership,
        settings: Settings,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        queues: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self.scheduler = scheduler
        self.membership = membership
        self.settings = settings
        self.spawn = spawn
        self.queues = queues
        self.named: dict[str, Named] = {}
        #: above all generations of sessions that are forgotten
        self._generation = 1
        self.handlers: dict[str, Callable[..., Any]] = {
            "dtrain_session_create": self.create,
            "dtrain_session_attach": self.attach,
            "dtrain_session_created": self.created,
            "dtrain_session_failed": self.failed,
            "dtrain_session_saved": self.saved,
            "dtrain_session_restore": self.restore,
            "dtrain_session_beat": self.beat,
            "dtrain_session_leave": self.leave,
            "dtrain_session_reset": self.reset,
            "dtrain_session_lookup": self.lookup,
            "dtrain_session_workers": self.workers_for,
            "dtrain_session_check": self.check,
            "dtrain_session": self.describe,
            "dtrain_sessions": self.list_sessions,
        }

    @staticmethod
    def now() -> float:
        return time.monotonic()

    @property
    def in_use(self) -> set[str]:
        """Sessions that some client is attached to."""
        return {name for name, named in self.named.items() if named.owners}

    # -- what the master hears ---------------------------------------------------------------

    def remove_client(self, owner: str) -> None:
        """A Dask client is gone, and with it all that it has had of sessions."""
        for named in list(self.named.values()):
            for client in [c for c, of in named.owners.items() if of == owner]:
                self._gone(named, client, "is gone")

    def lose(self, address: str, why: str) -> None:
        for named in list(self.named.values()):
            self.handle(named, WorkerLost(address, why))

    def stays(self, address: str) -> None:
        """A worker that was about to leave does not, or a new one has come."""
        for named in list(self.named.values()):
            self.handle(named, Leaving((address,), False))

    async def move_away(self, addresses: Collection[str], until: float) -> None:
        """Shards move away from workers; returns once none is there, or it cannot be.

        Where nobody stays who could have them, nothing moves.
        """
        if not self.workers(""):
            return
        for named in list(self.named.values()):
            self.handle(named, Leaving(tuple(addresses)))
        for named in list(self.named.values()):
            while named.moves and named.container.state is State.MOVING and self.now() < until:
                await asyncio.wait(set(named.moves), timeout=until - self.now())

    def tick(self) -> None:
        now = self.now()
        for named in list(self.named.values()):
            deadline = named.container.deadline
            if deadline is not None and deadline <= now:
                self.handle(named, Tick())
            self._forget(named)

    def _forget(self, named: Named) -> None:
        """Of a session with nothing in it, all but that its generations were told."""
        container = named.container
        if container.idle and not named.dropping and not named.answers:
            self._generation = max(self._generation, container.generation)
            self.named.pop(container.name, None)

    # -- acting on the machine ---------------------------------------------------------------

    def handle(self, named: Named, event: Event) -> None:
        for command in named.container.handle(event, self.now()):
            self._act(named, command)

    def _act(self, named: Named, command: Command) -> None:
        name = named.container.name
        if isinstance(command, Answer):
            waiter = named.answers.get((command.client, command.request))
            if waiter is not None and not waiter.done():
                waiter.set_result(command.answer)
        elif isinstance(command, Drop):
            self._until_dropped(
                named,
                self._tell_all("dtrain_session_drop", session=name, generation=command.generation),
            )
        elif isinstance(command, Reload):
            self.spawn(self._reload(named, command))
        elif isinstance(command, Move):
            task = self.spawn(self._move(named, command))
            named.moves.add(task)
            task.add_done_callback(named.moves.discard)
        # Tell is nobody's task: the workers refuse those that have attached, who then ask anew.

    def _until_dropped(self, named: Named, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self.spawn(coroutine)
        named.dropping.add(task)
        task.add_done_callback(named.dropping.discard)

    async def _tell_all(self, op: str, **message: Any) -> None:
        """Tell all workers; one that does not answer has nothing to say in sessions any more."""
        every = self.membership.members.values()
        there = [m.address for m in every if m.presence is Presence.READY]
        await asyncio.gather(*(self._tell(address, op, message) for address in there))

    async def _tell(self, address: str, op: str, message: dict[str, Any]) -> Any:
        """A worker's answer; None if it has none."""
        try:
            return await ask(
                self.scheduler.rpc(address), op, self.settings.call_deadline, **message
            )
        except (OSError, DTrainError) as error:
            logger.info("worker %s has not answered %s: %s", address, op, error)
            return None

    async def _reload(self, named: Named, command: Reload) -> None:
        """Have workers fill shards from a checkpoint that they can read."""
        container, generation = named.container, command.generation
        try:
            workers = self._hosts(container.name)
            if not workers:
                raise ClusterError("no worker is there")
            where = assign(named.sizes, workers, named.placement)
            hosts = tuple(workers[index] for index in where)
            await asyncio.gather(
                *(
                    ask(
                        self.scheduler.rpc(address),
                        "dtrain_session_reload",
                        self.settings.prepare_deadline,
                        session=container.name,
                        generation=generation,
                        about=named.about,
                        hosts=hosts,
                        source=command.source,
                    )
                    for address in sorted(set(hosts))
                )
            )
        except (OSError, DTrainError) as error:
            event: Restored | NotRestored = NotRestored(generation, str(error))
        else:
            event = Restored(generation, hosts)
        if container.generation == generation and container.state is State.RESTORING:
            self.handle(named, event)

    async def _move(self, named: Named, command: Move) -> None:
        """Have workers fetch shards from those that have them, which are frozen first."""
        container, generation = named.container, command.generation

        def current() -> bool:
            return container.generation == generation and container.state is State.MOVING

        async def tell(address: str, op: str, **message: Any) -> Any:
            deadline = self.settings.prepare_deadline
            peer = self.scheduler.rpc(address)
            return await ask(peer, op, deadline, session=container.name, **message)

        async def freeze(address: str, **known: int) -> int:
            return int(
                await tell(address, "dtrain_session_freeze", generation=command.former, **known)
            )

        lead, *others = dict.fromkeys(command.hosts)
        try:
            hosts = self._elsewhere(named, command)
            self.handle(named, Placed(generation, hosts))
            # The lead first: nothing is committed any more, and all shards are as of the same.
            committed = await freeze(lead)
            await asyncio.gather(*(freeze(address, committed=committed) for address in others))
            await asyncio.gather(
                *(
                    tell(
                        address,
                        "dtrain_session_take_over",
                        generation=generation,
                        about=named.about,
                        hosts=hosts,
                        former=command.former,
                        sources=command.hosts,
                    )
                    for address in sorted(set(hosts))
                )
            )
        except (OSError, DTrainError) as error:
            await asyncio.sleep(_RETRY)
            event: Moved | NotMoved = NotMoved(generation, str(error))
        else:
            event = Moved(generation)
        if current():
            self.handle(named, event)

    def _elsewhere(self, named: Named, command: Move) -> tuple[str, ...]:
        """Shards stay where they are, but for those that move: each to whoever has the least."""
        every = [member.address for member in self.membership.ready()]
        loads = {address: 0 for address in every if address not in command.leaving}
        if not loads:
            raise ClusterError("no worker is there")
        others = self._loads(named.container.name)
        hosts = list(command.hosts)
        staying = [k for k, host in enumerate(hosts) if host in loads]
        for shard in staying:
            loads[hosts[shard]] += named.sizes[shard]
        going = [k for k in range(len(hosts)) if k not in staying]
        for shard in sorted(going, key=lambda k: -named.sizes[k]):
            hosts[shard] = min(loads, key=lambda address: (loads[address], others[address]))
            loads[hosts[shard]] += named.sizes[shard]
        return tuple(hosts)

    def _gone(self, named: Named, client: str, why: str) -> None:
        """A client has left, or has died; its words on the way are refused from now on."""
        named.owners.pop(client, None)
        named.until.pop(client, None)
        self.handle(named, Gone(client, why))
        # Also those without shards: they may have run tasks for it.
        coroutine = self._tell_all(
            "dtrain_session_gone", session=named.container.name, client=client
        )
        self._until_dropped(named, coroutine)

    # -- handlers for clients ----------------------------------------------------------------

    async def create(
        self, session: str, client: str, owner: str, request: int, spec: str, seconds: float,
        wait: float,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Who creates the variables, or where they are; None: not known yet, ask again."""
        named = self._name(session)
        until = self._until(named, client, request, seconds)
        return await self._request(named, Create(client, request, spec, until), owner, wait)

    async def attach(
        self, session: str, client: str, owner: str, request: int, origin: int | None,
        seconds: float, wait: float,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Where the variables are; None: not known yet, ask again."""
        named = self._name(session)
        until = self._until(named, client, request, seconds)
        return await self._request(named, Attach(client, request, until, origin), owner, wait)

    async def restore(
        self, session: str, client: str, owner: str, request: int, source: str, seconds: float,
        wait: float,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Have lost variables restored; answered as an attach is."""
        named = self._name(session)
        until = self._until(named, client, request, seconds)
        return await self._request(named, Restore(client, request, source, until), owner, wait)

    def created(
        self,
        session: str,
        client: str,
        generation: int,
        hosts: Iterable[str],
        about: bytes,
        model: bytes,
        sizes: Iterable[int],
        placement: str,
    ) -> None:
        """The chief has initialised all shards."""
        named = self._found(session)
        if named.container.generation == generation:
            # Known before anybody is answered; refused below if it is not the chief's.
            named.about, named.model = about, model
            named.sizes, named.placement = tuple(sizes), placement
        self.handle(named, Created(client, generation, tuple(hosts)))

    def failed(self, session: str, client: str, generation: int, why: str) -> None:
        self.handle(self._found(session), Failed(client, generation, why))

    def saved(self, session: str, generation: int, source: str, step: int) -> None:
        self.handle(self._found(session), Saved(generation, source, step))

    def beat(self, session: str, client: str, owner: str, origin: int | None) -> None:
        named = self.named.get(session)
        if named is not None:
            named.owners[client] = owner
            self.handle(named, Beat(client, origin))

    def leave(self, session: str, client: str) -> None:
        named = self.named.get(session)
        if named is not None:
            self._gone(named, client, "has left")

    async def reset(self, session: str, client: str, origin: int | None = None) -> None:
        """End the variables, or those of ``origin`` alone; nothing of them is left."""
        named = self._found(session)
        origin = named.container.current if origin is None else origin
        if origin is not None:
            # Nobody waits for its answer under a number: it is this one.
            self.handle(named, Reset(client, 0, origin))
        if named.dropping:
            await asyncio.wait(set(named.dropping))
        self._forget(named)

    def workers(self, session: str, device: str = "cpu") -> list[str]:
        """Those that can run tasks of a session on a device; SpecError if none of them has it."""
        every, able = self.membership.ready(), self.membership.able(device)
        if every and not able:
            raise lacking(device, [(str(m), m.devices, m.no_gpu) for m in every])
        return [m.address for m in able]

    def _hosts(self, session: str) -> list[str]:
        """Those that may have its shards, in the order in which they are to be taken.

        A small session has one shard, and the sessions of a cluster share all its workers: first
        are those with the fewest bytes of others, and of these not the same for each name, as some
        may be created at the same time.
        """
        workers, loads = self.workers(session), self._loads(session)
        start = zlib.crc32(session.encode()) % max(len(workers), 1)
        return sorted(workers[start:] + workers[:start], key=lambda address: loads[address])

    def _loads(self, session: str) -> Counter[str]:
        """Worker -> bytes of shards that other sessions have there."""
        loads: Counter[str] = Counter()
        for name, named in self.named.items():
            if name != session:
                for host, nbytes in zip(named.container.placed, named.sizes, strict=False):
                    loads[host] += nbytes
        return loads

    def workers_for(self, session: str, generation: int | None, device: str) -> list[str]:
        """The same, for a client that knows of this generation, or of none yet."""
        if generation is not None:
            self.check(session, generation)
        return self.workers(session, device)

    def check(self, session: str, generation: int) -> None:
        """FencedError, unless the variables are there in this generation."""
        self._current(session, generation)

    def _current(self, session: str, generation: int) -> Named:
        named = self.named.get(session)
        if named is None:
            raise FencedError(f"session {session}: generation {generation} is over")
        container = named.container
        if container.generation != generation or container.state is not State.READY:
            raise FencedError(
                f"session {session}: generation {generation} is wanted, found "
                f"{container.generation}, {container.state}"
            )
        return named

    def lookup(self, session: str, generation: int) -> dict[str, Any]:
        """For a worker that runs tasks of a session: where its shards are, and its model."""
        named = self._current(session, generation)
        container = named.container
        return {
            "origin": container.origin,
            "hosts": list(container.hosts),
            "about": named.about,
            "model": named.model,
        }

    def list_sessions(self) -> list[dict[str, Any]]:
        """All sessions; ``queues``: how many queues and readers each has."""
        shared: dict[str, list[dict[str, Any]]] = {}
        for queue in self.queues():
            shared.setdefault(queue["session"], []).append(queue)
        every = [of for of in self.named.values() if not of.container.idle]
        known = {named.container.name for named in every}
        every += [self._only(name, of) for name, of in shared.items() if name not in known]
        return [
            {**self._brief(named), "queues": len(shared.get(named.container.name, ()))}
            for named in every
        ]

    def _only(self, session: str, queues: Iterable[dict[str, Any]]) -> Named:
        """A session that has queues and readers, and no variables."""
        return self._new(session, min(queue["since"] for queue in queues))

    async def describe(self, session: str) -> dict[str, Any]:
        """All that is known of a session, here and by its workers; ``about`` is opaque."""
        queues = [queue for queue in self.queues() if queue["session"] == session]
        only = queues and session not in self.named
        named = self._only(session, queues) if only else self._found(session)
        container = named.container
        shards: dict[int, dict[str, Any]] = {}
        message = {"session": session, "generation": container.generation}
        hosts = sorted(set(container.hosts))
        for of_worker in await asyncio.gather(
            *(self._tell(address, "dtrain_session_state", message) for address in hosts)
        ):
            shards.update(of_worker or {})
        now, clock = self.now(), time.time()
        return {
            **self._brief(named),
            "queues": queues,
            "waiting": list(container.waiting()),
            "about": named.about,
            "shards": shards,
            "saved": list(container.saved) if container.saved else None,
            "events": [
                {"time": clock - (now - when), "state": state.value, "message": words}
                for when, state, words in container.story
            ],
        }

    def _brief(self, named: Named) -> dict[str, Any]:
        container = named.container
        return {
            "name": container.name,
            "state": container.state.value,
            "spec": container.spec,
            "chief": container.chief,
            "generation": container.generation,
            "origin": container.origin,
            "clients": len(container.attached),
            "hosts": list(container.hosts),
            "bytes": sum(named.sizes) if container.hosts else 0,
            "problem": container.problem or None,
            "since": named.since,
        }

    # -- requests ----------------------------------------------------------------------------

    def _name(self, session: str) -> Named:
        shared_name("session", session)
        if session not in self.named:
            self.named[session] = self._new(session, time.time())
        return self.named[session]

    def _new(self, session: str, since: float) -> Named:
        limits = Limits(
            client_lease=self.settings.session_lease,
            time_to_live=self.settings.session_ttl,
            restore_deadline=self.settings.prepare_deadline,
        )
        begun = self.now() - (time.time() - since)
        return Named(Container(session, limits, begun, self._generation), since)

    def _found(self, session: str) -> Named:
        if session not in self.named:
            known = ", ".join(list(self.named)[-5:]) or "none"
            raise SessionNotFound(f"session {session!r}: not on this cluster; here are: {known}")
        return self.named[session]

    def _until(self, named: Named, client: str, request: int, seconds: float) -> float:
        """The deadline of a request, which is the same when it comes again."""
        number, until = named.until.get(client, (-1, 0.0))
        if number != request:
            until = self.now() + seconds
            named.until[client] = request, until
        return until

    async def _request(
        self, named: Named, event: Create | Attach | Restore, owner: str, wait: float
    ) -> dict[str, Any] | None:
        """A long poll."""
        key = event.client, event.request
        waiter = named.answers.setdefault(key, asyncio.get_running_loop().create_future())
        named.owners[event.client] = owner
        try:
            self.handle(named, event)
            await asyncio.wait([waiter], timeout=wait)
        finally:
            # What comes once nobody waits is answered when it is asked again.
            if named.answers.get(key) is waiter:
                del named.answers[key]
        return self._told(named, waiter.result()) if waiter.done() else None

    def _told(self, named: Named, reply: Reply) -> dict[str, Any]:
        if isinstance(reply, Initialise):
            workers = self._hosts(named.container.name)
            return {"kind": "initialise", "generation": reply.generation, "workers": workers}
        if isinstance(reply, Ready):
            return {
                "kind": "ready",
                "origin": reply.origin,
                "generation": reply.generation,
                "hosts": list(reply.hosts),
                "spec": reply.spec,
                "chief": reply.chief,
                "about": named.about,
            }
        words = getattr(reply, "problem", None) or getattr(reply, "why", "")
        return {"kind": type(reply).__name__.lower(), "problem": words}
