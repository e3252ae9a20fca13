"""Watches over the workers for the master: leases, probes, replicas that hang, retirement.

Dask notices a killed worker at once, but takes a stopped one for a living one for minutes.  What
is silent is looked at from beside it; what is fenced has no part in any job until it is heard of.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.scheduler import heartbeat_interval

from dtrain.config import Settings
from dtrain.errors import DTrainError
from dtrain.machines.membership import (
    Finding,
    Look,
    Lost,
    Member,
    Membership,
    Probe,
    Probed,
    Retiring,
)
from dtrain.runtime import process
from dtrain.runtime.rpc import ask

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dtrain.master")

#: Heartbeats that a worker may miss, at the least, before its lease runs out.
_HEARTBEATS = 4

#: Seconds that a neighbour has to say what a process does.
_PROBE = 2.0

#: The master's own loop has been held up if it comes so many seconds late.
_STALL = 0.5


class Watch:
    """The leases of the workers.

    Parameters
    ----------
    lost : callable of Lost
        Told of each worker that is fenced.
    spawn : callable
        Starts a coroutine that the master keeps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        membership: Membership,
        settings: Settings,
        lost: Callable[[Lost], None],
        spawn: Callable[[Any], Any],
    ) -> None:
        self.scheduler = scheduler
        self.membership = membership
        self.settings = settings
        self._lost = lost
        self._spawn = spawn
        self._here = process.identity()
        self._looked = time.monotonic()
        #: leases are not looked at before this time: nobody could be heard
        self._excused = 0.0

    @property
    def lease(self) -> float:
        beats = _HEARTBEATS * heartbeat_interval(len(self.scheduler.workers))
        return max(self.settings.lease, beats)

    def look(self, now: float, tick: float) -> None:
        """Probe those whose leases have run out; once in a ``tick`` of seconds."""
        late, self._looked = now - self._looked - tick, now
        if late > _STALL:
            # What the workers said meanwhile waits to be read.
            self._excused = now + self.lease / 2
        if now < self._excused:
            return
        for command in self.membership.handle(Look(self.lease), now):
            assert isinstance(command, Probe)
            self._spawn(self._probe(command.address))

    async def _probe(self, address: str) -> None:
        member = self.membership.members.get(address)
        if member is None:
            return
        finding = await self._seen(member)
        for command in self.membership.handle(Probed(address, finding), time.monotonic()):
            if isinstance(command, Lost):
                logger.warning("%s %s", member, command.why)
                self._lost(command)

    async def _seen(self, member: Member) -> Finding:
        """What the worker's process does, by one that can see it."""
        if process.same_machine(member.process, self._here):
            return process.look(member.process)
        for other in self.membership.ready():
            if other is member or not process.same_machine(other.process, member.process):
                continue
            try:
                peer = self.scheduler.rpc(other.address)
                found = await ask(peer, "dtrain_look", _PROBE, processes=[member.process])
                return Finding(found[0])
            except (OSError, DTrainError, ValueError) as error:
                logger.info("%s cannot tell of %s: %s", other, member, error)
        return Finding.UNKNOWN


class Retirement:
    """Moves what jobs have on a worker before Dask retires it.

    ``client.retire_workers``, ``cluster.scale``, adaptive clusters and ``close_gracefully`` all
    come through the scheduler's handler, which this stands in front of.

    Parameters
    ----------
    leave : callable of list of str
        Has the jobs leave workers; returns what to await until they have.
    found : callable
        Told what the membership says of those that stay after all.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        membership: Membership,
        leave: Callable[[list[str]], Any],
        found: Callable[[Any], None],
    ) -> None:
        self.scheduler = scheduler
        self.membership = membership
        self._leave = leave
        self._found = found
        self._original = scheduler.handlers["retire_workers"]
        scheduler.handlers["retire_workers"] = self.retire

    def undo(self) -> None:
        self.scheduler.handlers["retire_workers"] = self._original

    async def retire(self, **message: Any) -> Any:
        addresses = self._addresses(message)
        now = time.monotonic()
        for address in addresses:
            self.membership.handle(Retiring(address), now)
        try:
            await self._leave(addresses)
            answer = self._original(**message)
            return await answer if asyncio.iscoroutine(answer) else answer
        finally:
            # Those that have not gone, after all, are as good as before.
            for address in addresses:
                ws = self.scheduler.workers.get(address)
                if ws is not None and ws.status.name == "running":
                    event = Retiring(address, False)
                    self._found(self.membership.handle(event, time.monotonic()))

    def _addresses(self, message: dict[str, Any]) -> list[str]:
        """Whom it is about; the same ones are then named to Dask."""
        workers = self.scheduler.workers
        if message.get("workers") is not None:
            # A cluster that is scaled down puts names there.
            aliases = self.scheduler.aliases
            found = [w if w in workers else aliases.get(w) for w in message["workers"]]
            message["workers"] = [address for address in found if address in workers]
            return list(message["workers"])
        if message.get("names") is not None:
            names = {str(name) for name in message["names"]}
            return [ws.address for ws in workers.values() if str(ws.name) in names]
        fixed = ("workers", "names", "close_workers", "remove", "stimulus_id")
        choice = {key: message.pop(key) for key in list(message) if key not in fixed}
        chosen: list[str] = self.scheduler.workers_to_close(**choice)
        message["workers"] = chosen
        return chosen
