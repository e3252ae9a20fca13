"""Time, processes that die and stop, and a network that delays, reorders, repeats and loses."""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tests.sim.settings import MOST_EVENTS, Broken, Settings, Story

# Events and messages are made by the thousand, so they are not frozen; nothing changes them.


@dataclass(slots=True)
class Does:
    """Something happens to the world, the master or a process: ``on_<what>`` is called."""

    what: str
    args: tuple[Any, ...] = ()
    at: str | None = None


@dataclass(slots=True)
class Local:
    """A host has done something: ``on_<what>`` is called with it."""

    at: str
    generation: int
    what: str
    args: tuple[Any, ...] = ()


@dataclass(slots=True)
class Arrives:
    """One copy of a message to a host, or to the master (``at`` is None).

    ``sender`` and ``generation`` are the host's that sends or gets it; ``key`` is who asks for
    what, the same for all copies.
    """

    sender: str | None
    at: str | None
    generation: int
    body: Any
    key: Hashable


@dataclass(slots=True)
class Again:
    """The one who asked looks whether there was an answer."""

    at: str | None
    message: Arrives


@dataclass(slots=True)
class Process:
    """A worker's process, and the hosts in it: one of each generation that it has a part in."""

    address: str
    dead: bool = False
    #: "stopped", "slow" or "stuck": it does nothing, and what happens to it waits
    held: str = ""
    backlog: list[Any] = field(default_factory=list)
    hosts: dict[int, Any] = field(default_factory=dict)


class Network:
    """Events in the order of their times.

    Parameters
    ----------
    seed : int
        Only to be told.
    settings : Settings
    rng : random.Random
        All chance comes from here.
    """

    #: the kinds of messages that may reach a process without a host: ``first_<kind>`` is called
    FIRST: tuple[type, ...] = ()
    #: what a host does also when it is told to leave
    LAST: tuple[str, ...] = ("handed", "returned")

    def __init__(self, seed: int, settings: Settings, rng: random.Random) -> None:
        self.settings = settings
        self.rng = rng
        self.now = 0.0
        self.story = Story(seed, settings)
        self.queue: list[tuple[float, int, Any]] = []
        self._scheduled = 0
        self.processes: dict[str, Process] = {}
        #: keys of what has arrived once, and of what is asked and not answered
        self.arrived: set[Hashable] = set()
        self.open: set[Hashable] = set()
        #: what a host is about to do -> how many times more until it dies, or stops, there
        self.trap: tuple[str, int, str] | None = None
        self.over = False

    def run(self) -> Story:
        self.begin()
        story, queue = self.story, self.queue
        try:
            while queue:
                self.now, _, event = heapq.heappop(queue)
                story.events += 1
                if story.events > MOST_EVENTS:
                    raise Broken("nothing moves any more, and the job has not ended")
                self.happen(event)
            self.finish()
        except Exception as error:
            what = str(error) if isinstance(error, Broken) else repr(error)
            raise Broken(f"{what}\n{story.tell()}") from error
        return story

    def begin(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    # -- time ----------------------------------------------------------------------------------

    def after(self, delay: float, event: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self.queue, (self.now + delay, self._scheduled, event))

    def soon(self, host: Any, what: str, *args: Any, within: float = 0.3) -> None:
        """A host's next doing."""
        event = Local(host.address, host.gen.number, what, args)
        self.after(self.rng.random() * within, event)

    def happen(self, event: Any) -> None:
        if event.at is not None:
            process = self.processes[event.at]
            if process.dead:
                return
            if process.held:
                process.backlog.append(event)
                return
        self.story.last.append((self.now, event))
        if isinstance(event, Local):
            host = process.hosts[event.generation]
            if self.trap is not None and event.what == self.trap[0] and self.caught(event):
                return
            if not host.over or event.what in self.LAST:
                getattr(self, "on_" + event.what)(host, *event.args)
        elif isinstance(event, Arrives):
            self.on_arrives(event)
        elif isinstance(event, Does):
            getattr(self, "on_" + event.what)(*event.args)
        else:
            self.on_again(event.message)

    def caught(self, event: Local) -> bool:
        """Whether this is the point where the process dies or stops."""
        what, more, how = self.trap
        if more:
            self.trap = (what, more - 1, how)
            return False
        self.trap = None
        self.story.counts[f"{how} at {what}"] += 1
        if how == "dies":
            self.on_crash(event.at)
            return True
        self.on_stop(event.at)
        self.processes[event.at].backlog.append(event)
        return True

    # -- processes -----------------------------------------------------------------------------

    def on_crash(self, address: str) -> None:
        """A process dies; the subclass tells who notices."""
        self.processes[address].dead = True

    def on_stop(self, address: str) -> None:
        raise NotImplementedError

    def hold(self, address: str, how: str) -> None:
        process = self.processes[address]
        if not process.dead:
            process.held = how

    def on_wake(self, address: str) -> None:
        """It goes on where it was: all that came meanwhile comes now."""
        process = self.processes[address]
        if process.dead:
            return
        self.story.counts["woken"] += 1
        process.held = ""
        waited, process.backlog = process.backlog, []
        for number, event in enumerate(waited):
            self.after(0.001 * number, event)

    # -- messages ------------------------------------------------------------------------------

    def send(
        self,
        sender: str | None,
        to: str | None,
        generation: int,
        body: Any,
        key: Hashable,
        *,
        sure: bool = False,
    ) -> None:
        """Put copies of a message on their way: one, two, or (unless ``sure``) none."""
        rng, s = self.rng, self.settings
        if not sure and rng.random() < s.lost:
            self.story.counts["lost"] += 1
            return
        message = Arrives(sender, to, generation, body, key)
        for _ in range(1 + (rng.random() < s.twice)):
            slow = rng.random() < s.late
            self.after(rng.uniform(1, 15) if slow else rng.random() * 0.5, message)

    def ask(self, host: Any, to: str | None, body: Any, key: Hashable) -> None:
        """Send, and send again until :meth:`answered`."""
        self.open.add(key)
        number = host.gen.number
        self.send(host.address, to, number, body, key)
        message = Arrives(host.address, to, number, body, key)
        self.after(self.rng.uniform(4, 8), Again(host.address, message))

    def answered(self, key: Hashable) -> bool:
        """Close a question; False if it was closed before."""
        if key not in self.open:
            return False
        self.open.discard(key)
        return True

    def on_again(self, message: Arrives) -> None:
        host = self.processes[message.sender].hosts[message.generation]
        if message.key not in self.open or host.over or self.over:
            return
        if message.at is not None and self.processes[message.at].dead:
            self.unreachable(host, message)
            return
        self.ask(host, message.at, self.shorter(message), message.key)

    def unreachable(self, host: Any, message: Arrives) -> None:
        """Whom a host has asked is dead."""
        raise NotImplementedError

    def shorter(self, message: Arrives) -> Any:
        """The body of a question that is asked again."""
        return message.body

    def on_arrives(self, message: Arrives) -> None:
        repeat = message.key in self.arrived
        if repeat:
            self.story.counts["repeated"] += 1
        else:
            self.arrived.add(message.key)
        kind = type(message.body).__name__.lower()
        if message.at is None:
            getattr(self, "hear_" + kind)(message, repeat)
            return
        host = self.processes[message.at].hosts.get(message.generation)
        if host is not None:
            getattr(self, "hear_" + kind)(host, message, repeat)
        elif isinstance(message.body, self.FIRST):
            getattr(self, "first_" + kind)(message)
