"""How a client talks to the shards of a session: pulls, pushes and assigns, seen through.

A *tie* is what a client knows of one generation of the variables.  Each conversation (a pull, a
push, an assign) has a *voice*, a name and numbers of its own, so that a client may have several at
a time, from threads.  Runs in an event loop; bytes go straight to the workers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from distributed.protocol import to_serialize

from dtrain.arrays import aligned_bytes
from dtrain.errors import DeadlineError
from dtrain.machines.assigns import (
    Again,
    Done,
    Failed,
    GiveUp,
    Let,
    Prepare,
    Puller,
    ToLead,
    Writer,
)
from dtrain.machines.assigns import Take as TakeCommand
from dtrain.partition import Shard
from dtrain.runtime.buffers import Buffers
from dtrain.runtime.queues.lending import WORTH, Lent, lent_again
from dtrain.runtime.sessions.lead import packed, unpacked
from dtrain.runtime.sessions.shards import About, Content
from dtrain.runtime.updater import cut, finite

#: Seconds before a worker that could not be reached is asked again.
RETRY = 0.05

#: Bytes of lent memory that a voice keeps for what it says next.
_KEPT_BYTES = 1 << 26


class NotLentError(Exception):
    """What is lent cannot be had by a worker of a shard."""


class Call(Protocol):
    """Asks a worker: see :func:`dtrain.runtime.rpc.ask`."""

    async def __call__(self, address: str, op: str, deadline: float, **message: Any) -> Any: ...


@dataclass
class Voice:
    """One conversation at a time; its pulls, pushes and assigns are numbered from 0."""

    name: str
    pulls: int = 0
    pushes: int = 0
    assigns: int = 0
    #: what it has lent last: nobody reads that any more once its conversation has ended
    memory: Lent | None = None

    def lend(self, flat: np.ndarray) -> dict[str, Any] | None:
        """Lend a copy of a buffer for the next conversation; None: there is no such memory."""
        self.memory = lent_again(self.memory, [flat])
        return None if self.memory is None else self.memory.told()


def speaker(voice: str) -> str:
    """The client whose voice it is; of voices that push."""
    return voice.rpartition(".")[0]


class Voices:
    """The voices of a client, for all generations of one origin; from any thread.

    They have to outlive a generation: what one has pushed is known by its name and its numbers
    also where the shards are then, so that a push that comes again counts once.

    Parameters
    ----------
    prefix : str
        Of their names.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._free: list[Voice] = []
        self._made = 0
        self._lock = threading.Lock()

    def take(self) -> Voice:
        """A voice that nobody else has until it is given back."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self._made += 1
            return Voice(f"{self._prefix}.{self._made}")

    def give_back(self, voice: Voice) -> None:
        """Its conversation has ended well; one that has not is not used again."""
        if voice.memory is not None and voice.memory.capacity > _KEPT_BYTES:
            voice.memory.close()
            voice.memory = None
        with self._lock:
            self._free.append(voice)


@dataclass
class Tie:
    """One generation of a session's variables, as a client has them."""

    session: str
    client: str
    origin: int
    generation: int
    #: shard -> the worker that has it
    hosts: tuple[str, ...]
    about: About
    voices: Voices
    #: the newest assign that is known to be committed
    committed: int = 0
    #: workers that cannot open what is lent here, or the other way round
    far: set[str] = field(default_factory=set)
    #: workers whose memory has been read from here
    proven: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def voice(self) -> Iterator[Voice]:
        """A voice for one conversation."""
        voice = self.voices.take()
        yield voice
        self.voices.give_back(voice)

    def near(self, host: str) -> bool:
        """Whether memory may be lent between here and a worker, as far as is known."""
        return host not in self.far and not host.startswith("inproc:")

    def has_read(self, pulled: Pulled, well: bool) -> None:
        """What was lent has been read, or has not: updates overtake it now and then, but always
        only where the worker is on another machine."""
        hosts = {self.hosts[index] for index, reply in pulled.shards.items() if "lent" in reply}
        (self.proven if well else self.far).update(hosts if well else hosts - self.proven)

    def learn(self, committed: int) -> None:
        with self._lock:
            self.committed = max(self.committed, committed)


class Pulled(NamedTuple):
    """What shards have answered a pull: shard -> its message, all as of one assign."""

    number: int
    version: int
    shards: dict[int, dict[str, Any]]


class Conversation:
    """One voice's talk with the shards of a session.

    Parameters
    ----------
    call : Call
    tie : Tie
    voice : Voice
    until : float
        The deadline of all of it, by ``time.monotonic()``.
    poll : float
        Seconds that one question waits at the other end.
    lent : dict, optional
        Where the whole buffer that is pushed or assigned can be read, see
        :class:`dtrain.runtime.queues.lending.Lent`.
    """

    def __init__(
        self,
        call: Call,
        tie: Tie,
        voice: Voice,
        until: float,
        poll: float,
        lent: dict[str, Any] | None = None,
    ) -> None:
        self._call = call
        self._tie = tie
        self._voice = voice
        self._until = until
        self._poll = poll
        self._lent = lent

    # -- what clients want -------------------------------------------------------------------

    async def pull(
        self,
        shards: Iterable[int],
        wanted: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        op: str = "dtrain_session_pull",
        *,
        near: bool = False,
    ) -> Pulled:
        """Shards as of one assign; ``wanted``: of each some bytes of the model alone.

        ``near``: shards on this machine may lend what they have.
        """
        tie, voice = self._tie, self._voice
        puller = Puller(voice.name, voice.pulls, tie.generation, shards, tie.committed)
        voice.pulls += 1

        async def to_shard(shard: int, message: Any) -> tuple[Any, Any]:
            extra: dict[str, Any] = {}
            if op == "dtrain_session_pull":
                extra["wanted"] = None if wanted is None else wanted[shard]
                if near and tie.about.plan.shards[shard].nbytes >= WORTH:
                    extra["near"] = tie.near(tie.hosts[shard])
            reply = await self._tell(
                shard, op, request=message.request, committed=message.committed, **extra
            )
            return unpacked(*reply["answer"]), reply

        taken: dict[int, Any] = {}
        number = await self._see_through(puller, to_shard, taken)
        assert isinstance(number, Done)
        tie.learn(number.number)
        version = min(reply["answer"][1][2] for reply in taken.values())
        return Pulled(number.number, version, taken)

    async def push(self, flat: np.ndarray, version: int | None) -> int:
        """Apply a gradient, a whole buffer of the layout, at all shards; the version that has it.

        If it fails on the way, shards that were reached have it, and others have not; tried again
        with the same voice, it has the same number, and each applies it once.
        """
        tie, voice = self._tie, self._voice
        request, committed = voice.pushes, tie.committed

        async def to_shard(shard: Shard) -> Any:
            host, lent = tie.hosts[shard.index], self._lent
            told: dict[str, Any] = {"request": request, "committed": committed}
            told["version"] = version
            if lent is not None and tie.near(host):
                answer = await self._tell(shard.index, "dtrain_session_push", lent=lent, **told)
                if answer is not None:
                    return answer
                tie.far.add(host)
            told["grads"] = [to_serialize(a) for a in cut(flat, shard.ranges)]
            return await self._tell(shard.index, "dtrain_session_push", **told)

        answers = await _all(to_shard(shard) for shard in tie.about.plan.shards)
        voice.pushes = request + 1
        applied = [unpacked(*answer) for answer in answers]
        tie.learn(max(a.number for a in applied))
        return min(a.version for a in applied)

    async def put(self, flat: np.ndarray) -> int:
        """Assign a whole buffer of the layout, as :meth:`assign` does.

        Where few bytes are to be sent, or they are lent, the lead's worker sees it through: that
        is one message, and not four after each other.
        """
        tie, voice = self._tie, self._voice
        few = flat.nbytes < WORTH
        if few or (self._lent is not None and all(map(tie.near, tie.hosts))):
            request, voice.assigns = voice.assigns, voice.assigns + 1
            found = await self._ask(
                tie.hosts[0],
                "dtrain_session_assign",
                self._until + self._poll,
                request=request,
                seconds=max(self._until - time.monotonic(), 0.0),
                poll=self._poll,
                **({"flat": flat.tobytes()} if few else {"lent": self._lent}),
            )
            if found is not None:
                version, number = found
                tie.learn(number)
                return int(version)
            tie.far.update(tie.hosts)
        self._lent = None
        return await self.assign(parts(tie.about, flat))

    async def assign(self, contents: Mapping[int, Content]) -> int:
        """Give all shards these contents: seen whole or not at all; a version that has it.

        If a buffer is lent the shards read that instead.

        Raises
        ------
        DeadlineError
            Its turn has not come, or not all shards have taken it: nothing of it is seen.
        NotLentError
            A worker cannot read what is lent; nothing of it is seen.
        """
        tie, voice, lent = self._tie, self._voice, self._lent
        shards = range(len(tie.hosts))
        writer = Writer(voice.name, voice.assigns, tie.generation, shards, self._until)
        voice.assigns += 1
        versions: dict[int, int] = {}

        async def to_shard(shard: int, message: Any) -> tuple[Any, Any]:
            if isinstance(message, Prepare) and lent is not None:
                reply = await self._tell(
                    shard,
                    "dtrain_session_prepare",
                    request=message.request,
                    number=message.number,
                    committed=message.committed,
                    lent=lent,
                )
                if reply is None:
                    raise NotLentError(tie.hosts[shard])
            elif isinstance(message, Prepare):
                content = contents[shard]
                slots = content.slots
                reply = await self._tell(
                    shard,
                    "dtrain_session_prepare",
                    request=message.request,
                    number=message.number,
                    committed=message.committed,
                    params=[to_serialize(a) for a in content.params],
                    slots=None if slots is None else {
                        name: [to_serialize(a) for a in of] for name, of in slots.items()
                    },
                    step=content.step,
                )  # fmt: skip
            else:
                reply, versions[shard] = await self._tell(
                    shard,
                    "dtrain_session_know",
                    request=message.request,
                    committed=message.committed,
                )
            return unpacked(*reply), None

        try:
            outcome = await self._see_through(writer, to_shard, {})
        except BaseException:
            # Else the lead waits for it, and so do all other writers.
            give_up = GiveUp(tie.generation, writer.client, writer.request)
            spoken = asyncio.ensure_future(self._to_lead(give_up, time.monotonic() + self._poll))
            spoken.add_done_callback(_heard)
            raise
        if isinstance(outcome, Failed):
            raise DeadlineError(f"session {tie.session}: nothing was assigned: {outcome.why}")
        tie.learn(outcome.number)
        return min(versions.values())

    # -- seeing it through -------------------------------------------------------------------

    async def _see_through(
        self,
        machine: Puller | Writer,
        to_shard: Callable[[int, Any], Any],
        taken: dict[int, Any],
    ) -> Done | Failed:
        """Send what the machine wants sent until it has an outcome."""
        sent: set[asyncio.Task[tuple[Any, Any]]] = set()
        commands: list[Any] = list(machine.handle(Again(), time.monotonic()))
        try:
            while True:
                said = [
                    self._to_lead(c.message)
                    if isinstance(c, ToLead)
                    else to_shard(c.shard, c.message)
                    for c in commands
                    if not isinstance(c, TakeCommand | Done | Failed)
                ]
                if len(said) == 1 and not sent and machine.outcome is None:
                    # One question at a time needs no task; it has a deadline of its own.
                    commands = _hear(machine, await said[0], taken)
                    continue
                last = {asyncio.ensure_future(each) for each in said}
                sent |= last
                if machine.outcome is not None:
                    # What is still said has no answer, and is said in vain if it does not arrive.
                    if last:
                        await asyncio.wait(last, timeout=self._poll)
                    return machine.outcome
                # The other end has the same deadline, and is to say itself that it is over.
                left = max(self._until - time.monotonic(), 0.0) + self._poll
                done, sent = await asyncio.wait(
                    sent, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise self._late("has not been answered")
                for task in done:
                    # Several may have failed, and the first alone is told of.
                    _heard(task)
                commands = [c for task in done for c in _hear(machine, task.result(), taken)]
        finally:
            for task in sent:
                task.cancel()
                task.add_done_callback(_heard)

    async def _to_lead(self, message: Any, until: float | None = None) -> tuple[Any, None]:
        """The lead's answer, once it has one; to a client's last word there is none."""
        until = self._until if until is None else until
        kind, values = packed(message) or ("", ())
        if kind == "Begin":
            # The clocks of two machines have nothing in common: what is left of it travels.
            values = (*values[:-1], max(until - time.monotonic(), 0.0))
        while True:
            # At the deadline the lead itself has something to say.
            wait = min(self._poll, max(until - time.monotonic(), RETRY))
            answer = await self._ask(
                self._tie.hosts[0],
                "dtrain_session_lead",
                until,
                kind=kind,
                message=values,
                wait=wait,
            )
            if answer is not None:
                return unpacked(*answer), None
            if isinstance(message, Let | GiveUp):
                return None, None
            if time.monotonic() > until + self._poll:
                raise self._late(f"has had no answer of the lead at {self._tie.hosts[0]}")

    async def _tell(self, shard: int, op: str, **message: Any) -> Any:
        """Ask the worker of a shard."""
        return await self._ask(self._tie.hosts[shard], op, self._until, shard=shard, **message)

    async def _ask(self, address: str, op: str, until: float, **message: Any) -> Any:
        tie = self._tie
        return await self._call(
            address,
            op,
            max(until - time.monotonic(), 0.0) + self._poll,
            session=tie.session,
            generation=tie.generation,
            client=tie.client,
            voice=self._voice.name,
            **message,
        )

    def _late(self, words: str) -> DeadlineError:
        return DeadlineError(f"session {self._tie.session}: {self._voice.name} {words}")


def _hear(machine: Puller | Writer, answer: tuple[Any, Any], taken: dict[int, Any]) -> list[Any]:
    """Tell the machine of an answer, and take what it takes; its commands."""
    event, reply = answer
    commands: list[Any] = [] if event is None else list(machine.handle(event, time.monotonic()))
    for command in commands:
        if isinstance(command, TakeCommand):
            taken[command.shard] = reply
    return commands


def _heard(task: asyncio.Task[Any]) -> None:
    """Its error is that of another, or of no consequence any more."""
    if not task.cancelled():
        task.exception()


async def _all(coroutines: Iterable[Any]) -> list[Any]:
    """Their results; the first error once all are over, so that none goes on behind its back."""
    found = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


# -- numbers: not in an event loop -----------------------------------------------------------


def lend(tie: Tie, voice: Voice, flat: np.ndarray) -> dict[str, Any] | None:
    """Lend a buffer for a conversation; None: it is not worth it, or nobody could read it."""
    if flat.nbytes < WORTH or not any(map(tie.near, tie.hosts)):
        return None
    return voice.lend(flat)


def flatten(about: About, arrays: Mapping[str, Any], buffers: Buffers | None = None) -> np.ndarray:
    """A private flat buffer of named arrays; ValueError if they are not the model's."""
    layout = about.layout
    if buffers is None:
        buffer = aligned_bytes(layout.nbytes)
    else:
        buffer, end = buffers.room(layout.nbytes), 0
        # Norms and checks go over the padding, too.
        for v in sorted(layout.variables, key=lambda v: v.offset):
            buffer[end : v.offset] = 0
            end = v.offset + v.nbytes
        buffer[end:] = 0
    layout.write(buffer, arrays)
    return np.asarray(buffer)


def finite_flat(
    about: About, arrays: Mapping[str, Any], buffers: Buffers | None = None
) -> np.ndarray:
    """As :func:`flatten`; FloatingPointError names the array that is not finite."""
    buffer, layout = flatten(about, arrays, buffers), about.layout
    if not all(finite(buffer[s.start : s.stop].view(s.dtype)) for s in layout.segments):
        bad = next(n for n, view in layout.views(buffer).items() if not np.isfinite(view).all())
        raise FloatingPointError(f"{bad!r}: found values that are not finite, expected none")
    return buffer


def gradient(about: About, grads: Mapping[str, Any], buffers: Buffers | None = None) -> np.ndarray:
    """A gradient as it is pushed: flat, finite, and behind the optimizer's transforms.

    Raises
    ------
    ValueError
        Names the variable that is missing, unknown, or of a wrong shape or dtype.
    FloatingPointError
        Names the variable that is not finite.
    """
    buffer = finite_flat(about, grads, buffers)
    if about.optimizer.transforms:
        layout = about.layout
        segments = [buffer[s.start : s.stop].view(s.dtype) for s in layout.segments]
        about.optimizer.transform(segments, layout.block_starts)
    return buffer


def wanted_bytes(about: About, names: Iterable[str]) -> dict[int, list[tuple[int, int]]]:
    """Of each shard that holds something of these variables, its bytes of them."""
    spans = [(v.offset, v.offset + v.nbytes) for v in about.layout.variables if v.name in names]
    found: dict[int, list[tuple[int, int]]] = {}
    for shard in about.plan.shards:
        for r in shard.ranges:
            for start, stop in spans:
                a, b = max(start, r.start), min(stop, r.stop)
                if a < b:
                    found.setdefault(shard.index, []).append((a, b))
    return found


def gather(
    about: About,
    pulled: Pulled,
    wanted: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    buffers: Buffers | None = None,
) -> np.ndarray:
    """A flat buffer of what was pulled.

    Raises
    ------
    OSError
        What a shard lends cannot be read from here, or not any more.
    """
    nbytes = about.layout.nbytes
    buffer = aligned_bytes(nbytes) if buffers is None else buffers.room(nbytes)
    for index, reply in pulled.shards.items():
        shard = about.plan.shards[index]
        spans = wanted[index] if wanted else [(r.start, r.stop) for r in shard.ranges]
        if "lent" in reply:
            lent = Lent.borrowed(reply["lent"])
            if lent is None:
                raise OSError(f"shard {index}: what it lends cannot be opened from here")
            outs, at = [], 0
            for start, stop in spans:
                outs.append((at, buffer[start:stop]))
                at += stop - start
            with closing(lent):
                lent.fill(outs)
            continue
        for (start, stop), array in zip(spans, reply["params"], strict=True):
            buffer[start:stop].view(array.dtype)[...] = array
    return np.asarray(buffer)


def parts(about: About, flat: np.ndarray) -> dict[int, Content]:
    """A flat buffer, cut for the shards."""
    return {shard.index: Content(cut(flat, shard.ranges)) for shard in about.plan.shards}
