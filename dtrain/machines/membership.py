"""Who is in, and which of them can train.

A worker joins (Dask says so), then its worker plugin says hello with the version of dtrain it
found there, or with the error it met.  Only a worker with the master's own version is ready.

A ready worker has a lease, which its heartbeats renew.  When it runs out the worker is *probed*:
a neighbour on its machine is asked what its process does.  If that is stopped, twice in a row, or
gone, the worker is fenced: it has no part in anything until it is heard of again, and is then as
good as new.  A process that runs is slow, not dead: user code may hold the GIL for long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dtrain.devices import resolved
from dtrain.errors import ProtocolError

#: Seconds between two probes of a worker that is not heard of.
PROBES = 0.5


class Presence(Enum):
    JOINED = "has not said hello"
    READY = "ready"
    REFUSED = "refused"
    FENCED = "does not run"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Joined:
    address: str
    name: str


@dataclass(frozen=True, slots=True)
class Hello:
    address: str
    version: str | None
    problem: str | None = None
    #: the BLAS there, in words
    blas: str = ""
    #: what a neighbour finds its process by, opaque here
    process: Any = None
    #: what its replicas may compute on, and why no GPU is among it, in words
    devices: tuple[str, ...] = ("cpu",)
    no_gpu: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat with the worker's own summary of its jobs."""

    address: str
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Left:
    address: str


@dataclass(frozen=True, slots=True)
class Look:
    """Time has passed; ``lease``: seconds without a heartbeat that a worker may take."""

    lease: float


class Finding(Enum):
    """What a neighbour says of a worker's process."""

    RUNS = "runs"
    STOPPED = "is stopped"
    GONE = "is gone"
    UNKNOWN = "cannot be seen"


@dataclass(frozen=True, slots=True)
class Probed:
    address: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker's thread is in user code without end, and holds up a job."""

    address: str
    words: str


@dataclass(frozen=True, slots=True)
class Retiring:
    """A worker is about to be retired (or is not, after all)."""

    address: str
    retiring: bool = True


@dataclass(frozen=True, slots=True)
class Lost:
    """Command: a worker is gone; ``name`` is how people know it."""

    address: str
    name: str
    why: str = "is gone"


@dataclass(frozen=True, slots=True)
class Probe:
    """Command: ask a neighbour what the worker's process does."""

    address: str


@dataclass(frozen=True, slots=True)
class Found:
    """Command: another worker can train."""

    address: str


Event = Joined | Hello | Beat | Left | Look | Probed | Stuck | Retiring
Command = Lost | Probe | Found


@dataclass
class Member:
    address: str
    name: str
    joined: float
    presence: Presence = Presence.JOINED
    version: str | None = None
    problem: str | None = None
    blas: str = ""
    process: Any = None
    devices: tuple[str, ...] = ("cpu",)
    no_gpu: str = ""
    beat: float | None = None
    #: when it was last probed, and what was found
    probed: float | None = None
    finding: Finding | None = None
    #: why it has no part in anything although it is heard of, in words
    stuck: str | None = None
    retiring: bool = False
    summary: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"worker {self.name} ({self.address})" if self.name else f"worker {self.address}"


class Membership:
    """The table of workers.

    Parameters
    ----------
    version : str
        The master's own version of dtrain.
    hello_deadline : float
        Seconds that a worker has for its hello.
    mute_deadline : float
        Seconds after which a worker that nobody can see is fenced.
    """

    def __init__(
        self, version: str, hello_deadline: float, mute_deadline: float = float("inf")
    ) -> None:
        self.version = version
        self.hello_deadline = hello_deadline
        self.mute_deadline = mute_deadline
        #: in order of joining
        self.members: dict[str, Member] = {}

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, Joined):
            self.members[event.address] = Member(event.address, event.name, now)
            return []
        if isinstance(event, Look):
            return self._look(event, now)
        member = self.members.get(event.address)
        if isinstance(event, Left):
            if member is None:
                return []
            del self.members[event.address]
            member.presence = Presence.LEFT
            return [Lost(member.address, member.name)]
        if isinstance(event, Probed | Retiring | Stuck):
            if member is None:
                return []
            if isinstance(event, Probed):
                return self._probed(member, event.finding, now)
            if isinstance(event, Stuck):
                if member.presence is not Presence.READY:
                    return []
                member.stuck, member.presence = event.words, Presence.FENCED
                return [Lost(member.address, member.name, event.words)]
            back = member.retiring and not event.retiring
            member.retiring = event.retiring
            return [Found(member.address)] if back and member.presence is Presence.READY else []
        if member is None:
            raise ProtocolError(
                f"{type(event).__name__} of {event.address}: expected a worker that has joined"
            )
        return (
            self._beat(member, event, now)
            if isinstance(event, Beat)
            else self._hello(member, event, now)
        )

    def _beat(self, member: Member, event: Beat, now: float) -> list[Command]:
        member.beat, member.summary = now, event.summary
        member.probed = member.finding = None
        if member.presence is not Presence.FENCED or (member.stuck and event.summary):
            return []  # what it is stuck in is still there
        member.stuck = None
        member.presence = Presence.READY
        return [Found(member.address)]

    def _hello(self, member: Member, event: Hello, now: float) -> list[Command]:
        member.version, member.problem = event.version, event.problem
        member.blas, member.process = event.blas, event.process
        member.devices, member.no_gpu = event.devices, event.no_gpu
        member.beat = now
        member.probed = member.finding = member.stuck = None
        was = member.presence
        if event.problem is None and event.version != self.version:
            member.problem = f"has dtrain {event.version}, expected {self.version}"
        member.presence = Presence.REFUSED if member.problem else Presence.READY
        if member.problem or was is Presence.READY:
            return []
        return [Found(member.address)]

    def _look(self, event: Look, now: float) -> list[Command]:
        """Probe those whose leases have run out, and again after half a second."""
        due: list[Command] = []
        for m in self.members.values():
            silent = m.presence is Presence.READY and now - (m.beat or m.joined) > event.lease
            if silent and (m.probed is None or now - m.probed >= PROBES):
                m.probed = now
                due.append(Probe(m.address))
        return due

    def _probed(self, member: Member, finding: Finding, now: float) -> list[Command]:
        # A heartbeat may have come while the neighbour looked.
        if member.presence is not Presence.READY or member.probed is None:
            return []
        before, member.finding = member.finding, finding
        stopped = finding is Finding.STOPPED and before is Finding.STOPPED
        silent = now - (member.beat or member.joined)
        mute = finding is Finding.UNKNOWN and silent >= self.mute_deadline
        if not (stopped or mute or finding is Finding.GONE):
            return []
        member.presence = Presence.FENCED
        words = f"has not been heard of for {silent:.1f} s, and its process {finding.value}"
        return [Lost(member.address, member.name, words)]

    def ready(self) -> list[Member]:
        """Those that can train; not those that are about to leave."""
        every = self.members.values()
        return [m for m in every if m.presence is Presence.READY and not m.retiring]

    def able(self, device: str) -> list[Member]:
        """Those of them that have the device of a job."""
        return [m for m in self.ready() if resolved(device, m.devices) is not None]

    def pending(self, now: float) -> list[Member]:
        """Workers that may still say hello in time."""
        return [
            m
            for m in self.members.values()
            if m.presence is Presence.JOINED and now - m.joined < self.hello_deadline
        ]

    def problems(self) -> list[tuple[Member, str]]:
        """Workers that cannot train, each with the reason in words."""
        found = []
        for m in self.members.values():
            if m.presence is Presence.REFUSED:
                found.append((m, m.problem or "refused"))
            elif m.presence is Presence.FENCED:
                unheard = f"its process {m.finding.value}" if m.finding else "is not heard of"
                found.append((m, m.stuck or unheard))
            elif m.presence is Presence.JOINED:
                found.append((m, "the worker plugin of dtrain has not said hello there"))
        return found
