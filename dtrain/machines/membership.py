"""Who is in: the workers of the cluster, and which of them can train.

A worker joins (Dask says so), then its worker plugin says hello with the version of dtrain it
found there, or with the error it met.  Only a worker with the master's own version is ready.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dtrain.errors import ProtocolError


class Presence(Enum):
    JOINED = "has not said hello"
    READY = "ready"
    REFUSED = "refused"
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


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat with the worker's own summary of its jobs."""

    address: str
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Left:
    address: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Command: a worker is gone; ``name`` is how people know it."""

    address: str
    name: str


@dataclass
class Member:
    address: str
    name: str
    joined: float
    presence: Presence = Presence.JOINED
    version: str | None = None
    problem: str | None = None
    blas: str = ""
    beat: float | None = None
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
    """

    def __init__(self, version: str, hello_deadline: float) -> None:
        self.version = version
        self.hello_deadline = hello_deadline
        #: in order of joining
        self.members: dict[str, Member] = {}

    def handle(self, event: Joined | Hello | Beat | Left, now: float) -> list[Lost]:
        if isinstance(event, Joined):
            self.members[event.address] = Member(event.address, event.name, now)
            return []
        member = self.members.get(event.address)
        if isinstance(event, Left):
            if member is None:
                return []
            del self.members[event.address]
            member.presence = Presence.LEFT
            return [Lost(member.address, member.name)]
        if member is None:
            raise ProtocolError(
                f"{type(event).__name__} of {event.address}: expected a worker that has joined"
            )
        if isinstance(event, Beat):
            member.beat, member.summary = now, event.summary
            return []
        member.version, member.problem = event.version, event.problem
        member.blas = event.blas
        if event.problem is None and event.version != self.version:
            member.problem = f"has dtrain {event.version}, expected {self.version}"
        member.presence = Presence.REFUSED if member.problem else Presence.READY
        return []

    def ready(self) -> list[Member]:
        return [m for m in self.members.values() if m.presence is Presence.READY]

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
            elif m.presence is Presence.JOINED:
                found.append((m, "the worker plugin of dtrain has not said hello there"))
        return found
