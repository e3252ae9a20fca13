"""What a worker hosts of sessions: shards, and the lead of each session's assigns.

The lead is with the first shard, and does no array maths.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol import to_serialize
from distributed.utils import offload

from dtrain.config import settings
from dtrain.errors import DTrainError, FencedError
from dtrain.machines import assigns
from dtrain.machines.assigns import Discard, Gone, Know, Lead, Prepare, Pull, Push
from dtrain.runtime.queues.lending import WORTH
from dtrain.runtime.rpc import ask
from dtrain.runtime.sessions.conversation import (
    Conversation,
    NotLentError,
    Tie,
    Voice,
    Voices,
    parts,
    speaker,
)
from dtrain.runtime.sessions.lead import HostedLead, packed, unpacked
from dtrain.runtime.sessions.shards import AT_ONCE, About, Content, HostedShard, pushed, read

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dtrain.sessions")

#: Of so many sessions it is remembered which of their generations are over, the latest.
_FENCES = 10_000


@dataclass
class Hosted:
    """What this worker has of one session."""

    generation: int
    about: About
    #: shard -> the worker that has it
    hosts: tuple[str, ...]
    shards: dict[int, HostedShard] = field(default_factory=dict)
    lead: HostedLead | None = None
    #: client -> the names under which it has spoken here: one for each of its conversations
    voices: dict[str, set[str]] = field(default_factory=dict)


class Containers:
    """What a worker hosts of sessions.

    Parameters
    ----------
    worker : distributed.Worker
    forget : callable
        Told of a session whose generation has ended, and maybe of a client of it that has left.
    """

    def __init__(self, worker: Worker, forget: Callable[..., None] = lambda *_: None) -> None:
        self.worker = worker
        self._forget = forget
        self.address: str = worker.address
        self.sessions: dict[str, Hosted] = {}
        #: generations that are frozen here, for those who take their shards over
        self._frozen: dict[str, Hosted] = {}
        #: session -> the newest of its generations that is over
        self._over: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.handlers: dict[str, Callable[..., Any]] = {
            "dtrain_session_open": self.open,
            "dtrain_session_reload": self.reload,
            "dtrain_session_freeze": self.freeze,
            "dtrain_session_take_over": self.take_over,
            "dtrain_session_handed": self.handed,
            "dtrain_session_drop": self.drop,
            "dtrain_session_gone": self.gone,
            "dtrain_session_lead": self.lead,
            "dtrain_session_pull": self.pull,
            "dtrain_session_push": self.push,
            "dtrain_session_assign": self.assign,
            "dtrain_session_prepare": self.prepare,
            "dtrain_session_know": self.know,
            "dtrain_session_discard": self.discard,
            "dtrain_session_contents": self.contents,
            "dtrain_session_state": self.state,
        }

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for name in list(self.sessions):
            self._close(name)
        self._frozen.clear()

    def _close(self, session: str) -> None:
        hosted = self.sessions.pop(session)
        if hosted.lead is not None:
            hosted.lead.close()

    # -- creation and end --------------------------------------------------------------------

    async def open(
        self,
        session: str,
        generation: int,
        about: bytes,
        hosts: Sequence[str],
        shard: int,
        params: list[np.ndarray],
    ) -> None:
        """Host a shard of a new generation, as its chief has initialised it."""
        hosted = self._open(session, generation, about, hosts)
        await self._host(session, hosted, shard, Content(params))

    async def reload(
        self, session: str, generation: int, about: bytes, hosts: Sequence[str], source: str
    ) -> None:
        """Host this worker's shards of a new generation, as a checkpoint has them."""
        hosted = self._open(session, generation, about, hosts)
        snapshot = await asyncio.to_thread(read, source, hosted.about)
        version = int(snapshot.state["version"])
        for shard in hosted.about.plan.shards:
            if hosts[shard.index] == self.address:
                content = Content.of(snapshot, shard)
                known = pushed(snapshot, hosted.about, shard.index)
                await self._host(session, hosted, shard.index, content, version, known)

    def _open(self, session: str, generation: int, about: bytes, hosts: Sequence[str]) -> Hosted:
        self._check_fence(session, generation)
        hosted = self.sessions.get(session)
        if hosted is not None and hosted.generation < generation:
            self._close(session)
            hosted = None
        if hosted is None:
            hosted = Hosted(generation, About.of(about), tuple(hosts))
            self.sessions[session] = hosted
        elif hosted.generation > generation:
            raise self._fenced(session, generation)
        return hosted

    async def _host(
        self,
        session: str,
        hosted: Hosted,
        index: int,
        content: Content,
        version: int = 0,
        known: Iterable[Any] = (),
    ) -> HostedShard:
        plan = hosted.about.plan.shards[index]
        machine = assigns.Shard(index, hosted.generation, version=version, pushed=known)
        for voice, *_ in machine.pushed:
            hosted.voices.setdefault(speaker(voice), set()).add(voice)
        shard = await offload(lambda: HostedShard(plan, hosted.about, machine, content))
        if self.sessions.get(session) is not hosted:
            raise self._fenced(session, hosted.generation)
        hosted.shards[index] = shard
        if index == 0 and hosted.lead is None:

            def tell(event: Discard) -> None:
                task = asyncio.ensure_future(self._tell_shards(session, hosted, event))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            hosted.lead = HostedLead(Lead(hosted.generation, assigns.Limits()), tell)
        return shard

    # -- moves -------------------------------------------------------------------------------

    async def freeze(self, session: str, generation: int, committed: int | None = None) -> int:
        """Nothing is applied or answered here any more; the newest assign that is committed.

        Asked first is the worker that has the lead, which knows it.
        """
        hosted = self._frozen.get(session)
        if hosted is None or hosted.generation != generation:
            hosted = self.hosted(session, generation)
            if committed is None and hosted.lead is None:
                raise self._fenced(session, generation)
            self._close(session)
            self._frozen[session] = hosted
        if hosted.lead is not None:
            committed = hosted.lead.machine.committed
        assert committed is not None
        for shard in hosted.shards.values():
            await offload(shard.freeze, committed)
        return committed

    async def take_over(
        self,
        session: str,
        generation: int,
        about: bytes,
        hosts: Sequence[str],
        former: int,
        sources: Sequence[str],
    ) -> None:
        """Host this worker's shards of a new generation, as they are frozen at ``sources``."""
        hosted = self._open(session, generation, about, hosts)
        for index, source in enumerate(sources):
            if hosts[index] != self.address or index in hosted.shards:
                continue
            message = {"session": session, "generation": former, "shard": index}
            found = await ask(
                self.worker.rpc(source), "dtrain_session_handed", settings().prepare_deadline,
                **message,
            )  # fmt: skip
            content = Content(found["params"], found["slots"], found["step"])
            shard = await self._host(
                session, hosted, index, content, found["version"], found["pushed"]
            )
            shard.machine.duplicates = found["duplicates"]
            shard.ages.update(found["ages"])

    async def handed(self, session: str, generation: int, shard: int) -> dict[str, Any]:
        """A frozen shard, for the worker that takes it over."""
        hosted = self._frozen.get(session)
        if hosted is None or hosted.generation != generation or shard not in hosted.shards:
            raise self._fenced(session, generation)
        accounts, (params, slots) = await offload(hosted.shards[shard].handed)
        return {
            **accounts,
            "params": [to_serialize(a) for a in params],
            "slots": {name: [to_serialize(a) for a in of] for name, of in slots.items()},
        }

    # -- ends --------------------------------------------------------------------------------

    async def drop(self, session: str, generation: int) -> None:
        """This generation and those before are over."""
        self._over[session] = max(self._over.pop(session, 0), generation)
        while len(self._over) > _FENCES:
            del self._over[next(iter(self._over))]
        self._forget(session)
        hosted = self.sessions.get(session)
        if hosted is not None and hosted.generation <= generation:
            self._close(session)
        frozen = self._frozen.get(session)
        if frozen is not None and frozen.generation <= generation:
            del self._frozen[session]

    async def gone(self, session: str, client: str) -> None:
        """A client has left or died: what it holds back or has begun goes on without it."""
        self._forget(session, client)
        hosted = self.sessions.get(session)
        if hosted is None:
            return
        for voice in hosted.voices.pop(client, ()):
            event = Gone(voice)
            if hosted.lead is not None:
                hosted.lead.handle(event)
            for shard in hosted.shards.values():
                await offload(shard.hear, event)

    def _check_fence(self, session: str, generation: int) -> None:
        if generation <= self._over.get(session, 0):
            raise self._fenced(session, generation)

    def _fenced(self, session: str, generation: int) -> FencedError:
        return FencedError(f"session {session}: generation {generation} is not at {self.address}")

    # -- messages to the lead and to shards --------------------------------------------------

    def hosted(self, session: str, generation: int) -> Hosted:
        """What is here of a generation; FencedError if nothing is."""
        hosted = self.sessions.get(session)
        if hosted is None or hosted.generation != generation:
            raise self._fenced(session, generation)
        return hosted

    def _find(self, session: str, generation: int, client: str, voice: str) -> Hosted:
        hosted = self.hosted(session, generation)
        hosted.voices.setdefault(client, set()).add(voice)
        return hosted

    def _shard(
        self, session: str, generation: int, shard: int, client: str, voice: str
    ) -> HostedShard:
        found = self._find(session, generation, client, voice).shards.get(shard)
        if found is None:
            raise FencedError(f"session {session}: shard {shard} is not at {self.address}")
        return found

    async def lead(
        self, session: str, generation: int, client: str, voice: str, kind: str,
        message: Sequence[Any], wait: float,
    ) -> tuple[str, tuple[Any, ...]] | None:  # fmt: skip
        """A message to the lead, and its answer; None: not yet, or it has none.

        The ``until`` of a Begin is how many seconds are left.
        """
        lead = self._find(session, generation, client, voice).lead
        if lead is None:
            raise FencedError(f"session {session}: its lead is not at {self.address}")
        event = unpacked(kind, message)
        if isinstance(event, assigns.Begin):
            event = replace(event, until=time.monotonic() + event.until)
        return packed(await lead.ask(event, wait))

    async def pull(
        self, session: str, generation: int, client: str, voice: str, shard: int,
        request: int, committed: int, wanted: Sequence[Sequence[int]] | None, near: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """The parameters, or where who is ``near``, on this machine, can read them."""
        found = self._shard(session, generation, shard, client, voice)
        event = Pull(generation, voice, request, committed)
        if near and wanted is None:
            most = found.nbytes if found.lent(event) else AT_ONCE
            answer, lent = await found.do(lambda: found.lend(event), at_once=most)
            if lent is not None:
                return {"answer": packed(answer), "lent": lent}
            # The same pull once more: it is answered as of now.
        answer, arrays = await found.do(lambda: found.pull(event, wanted), at_once=WORTH)
        return {"answer": packed(answer), "params": [to_serialize(a) for a in arrays]}

    async def push(
        self, session: str, generation: int, client: str, voice: str, shard: int,
        request: int, committed: int, version: int | None,
        grads: list[np.ndarray] | None = None, lent: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Gradients come along, or are ``lent``; None: what is lent cannot be had from here."""
        found = self._shard(session, generation, shard, client, voice)
        event = Push(generation, voice, request, committed)

        def push() -> Any:
            own = grads if lent is None else found.borrowed(lent)
            return None if own is None else found.push(event, version, own)

        return packed(await offload(push))

    async def prepare(
        self, session: str, generation: int, client: str, voice: str, shard: int,
        request: int, number: int, committed: int, params: list[np.ndarray] | None = None,
        slots: dict[str, list[np.ndarray]] | None = None, step: int = 0,
        lent: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Parameters come along, or are ``lent``; None: what is lent cannot be had from here."""
        found = self._shard(session, generation, shard, client, voice)
        event = Prepare(generation, voice, request, number, committed)

        def prepare() -> Any:
            own = params if lent is None else found.borrowed(lent)
            return None if own is None else found.prepare(event, Content(own, slots, step))

        return packed(await found.do(prepare))

    async def assign(
        self, session: str, generation: int, client: str, voice: str,
        request: int, seconds: float, poll: float,
        flat: bytes | None = None, lent: dict[str, Any] | None = None,
    ) -> tuple[int, int] | None:  # fmt: skip
        """Where the lead is: see an assign through for a client, of few bytes or of ``lent`` ones.

        The version, and the assign's number; None: what is lent cannot be had by all shards, and
        nothing was assigned.
        """
        hosted = self._find(session, generation, client, voice)
        # The voice is the client's own, which takes care of its numbers.
        own, until = Voice(voice, assigns=request), time.monotonic() + seconds
        tie = Tie(
            session, client, generation, generation, hosted.hosts, hosted.about, Voices(voice)
        )
        talk = Conversation(self._say, tie, own, until, poll, lent)
        buffer = None if flat is None else np.frombuffer(flat, np.uint8)
        try:
            version = await talk.assign({} if buffer is None else parts(hosted.about, buffer))
        except NotLentError:
            return None
        return version, tie.committed

    async def _say(self, address: str, op: str, deadline: float, **message: Any) -> Any:
        """Ask a worker, which may be this one."""
        if address == self.address:
            if message.get("params") is not None:
                message["params"] = [wrapped.data for wrapped in message["params"]]
            return await self.handlers[op](**message)
        return await ask(self.worker.rpc(address), op, deadline, **message)

    async def know(
        self, session: str, generation: int, client: str, voice: str, shard: int,
        request: int, committed: int,
    ) -> tuple[Any, int]:  # fmt: skip
        """The answer, and a version of the shard that has the assign."""
        found = self._shard(session, generation, shard, client, voice)
        event = Know(generation, voice, request, committed)
        answer = await found.do(lambda: found.hear(event))
        return packed(answer), found.machine.version

    async def contents(
        self, session: str, generation: int, client: str, voice: str, shard: int,
        request: int, committed: int,
    ) -> dict[str, Any]:  # fmt: skip
        """As a pull, with the optimizer's slots."""
        found = self._shard(session, generation, shard, client, voice)
        event = Pull(generation, voice, request, committed)
        answer, accounts, (params, slots) = await offload(found.contents, event)
        return {
            "answer": packed(answer),
            "step": accounts["step"],
            "pushed": accounts["pushed"],
            "params": [to_serialize(a) for a in params],
            "slots": {name: [to_serialize(a) for a in of] for name, of in slots.items()},
        }

    async def discard(self, session: str, generation: int, number: int, committed: int) -> None:
        """From the lead: what is prepared up to ``number`` will never be."""
        hosted = self.hosted(session, generation)
        for shard in hosted.shards.values():
            await offload(shard.hear, Discard(generation, number, committed))

    async def state(self, session: str, generation: int) -> dict[int, dict[str, Any]]:
        """Of each shard here its version, its assign, and the ages of gradients."""
        hosted = self.hosted(session, generation)
        return {
            index: {
                "version": shard.machine.version,
                "assign": shard.machine.number,
                "pushes": shard.step,
                "duplicates": shard.machine.duplicates,
                "staleness": dict(shard.ages),
            }
            for index, shard in hosted.shards.items()
        }

    async def _tell_shards(self, session: str, hosted: Hosted, event: Discard) -> None:
        message = {
            "session": session,
            "generation": event.generation,
            "number": event.number,
            "committed": event.committed,
        }
        for address in sorted(set(hosted.hosts)):
            try:
                await ask(self.worker.rpc(address), "dtrain_session_discard", 15.0, **message)
            except (OSError, DTrainError) as error:
                # What is prepared there goes with the next assign.
                logger.info("session %s: %s was not told to discard: %s", session, address, error)
