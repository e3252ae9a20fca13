"""What a host's replicas see of the whole model: all shards through their ports, as one.

In shared memory there are no ports: :mod:`dtrain.runtime.transport.shm` has links of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from dtrain.arrays import aligned_bytes
from dtrain.errors import DeadlineError
from dtrain.machines.cursor import Held
from dtrain.machines.quorum import Behind, EpochDone, Pass
from dtrain.messages import Batch, Contribution, Push
from dtrain.runtime.arena import frozen
from dtrain.runtime.lead import unpacked
from dtrain.runtime.transport import AsyncPort, BackupPort, SyncPort, open_port
from dtrain.runtime.updater import cut

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class SyncLink:
    """Synchronous: push a step, wait for its commit, read the next version in place."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._arena = host.arena
        # Remote shards first: their messages travel while the local ones are worked on.
        shards = sorted(host.shards, key=lambda s: (s in host.arena.shards, s))
        self._ports = [cast(SyncPort, open_port(host, shard)) for shard in shards]
        self.version = host.begin.step

    @property
    def params(self) -> Mapping[str, Any]:
        """Read-only views of the version that the next step reads."""
        return self._arena.views[self.version % 2]

    def grads(self, replica: int) -> Mapping[str, Any]:
        """The views to write a replica's gradient to."""
        return self._arena.grad_views[replica]

    def exchange(self, contributions: tuple[Contribution, ...]) -> None:
        """Hand over the gradients of this step; returns when the next version can be read."""
        step = self.version
        for port in self._ports:
            port.push(step, contributions)
        with self._host.activity.waiting(step, self._host.missing):
            self._arena.wait(
                lambda: all(port.ready(step + 1) for port in self._ports),
                self._host.launch.settings.step_deadline,
                lambda: f"step {step} has not committed; {self._host.why()}",
            )
        for port in self._ports:
            port.settle(step + 1)
        self.version = step + 1

    def close(self) -> None:
        """Nothing of its own to let go of."""


class BackupLink:
    """Synchronous steps that do not wait for everybody.

    A slow replica reads a version that others are past: each host has a copy of its own, all
    shards of it at one version.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._arena = host.arena
        self._ports = {s: cast(BackupPort, open_port(host, s)) for s in host.shards}
        self._buffer = aligned_bytes(host.layout.nbytes)
        self._views = frozen(host.layout.views(self._buffer))
        self._into = {s: cut(self._buffer, host.shard_plan.shards[s].ranges) for s in host.shards}
        self.version = -1
        #: the newest version that is known of
        self._newest = host.begin.step
        #: replica -> the step that it has last had an answer for
        self._answered = dict.fromkeys(host.plan.replicas, -1)

    @property
    def params(self) -> Mapping[str, Any]:
        """Read-only views of this host's copy."""
        return self._views

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last; at the chief."""
        return bool(self._arena.lead.exhausted)

    def grads(self, replica: int) -> Mapping[str, Any]:
        """The views to write a replica's gradient to."""
        return self._arena.grad_views[replica]

    def renew(self) -> None:
        """Copy the newest version, the same of all shards."""
        while self.version < self._newest:
            self._fetch(self._newest)
            versions = [port.version for port in self._ports.values()]
            self._newest = max(versions)
            if min(versions) < self._newest:
                continue
            for shard, port in self._ports.items():
                for target, source in zip(self._into[shard], port.arrays, strict=True):
                    target[...] = source
            self.version = self._newest

    def _fetch(self, version: int) -> None:
        ports = self._ports.values()
        for port in ports:
            port.fetch(version)
        self._arena.wait(
            lambda: all(port.ready(version) for port in ports),
            self._host.launch.settings.step_deadline,
            lambda: f"step {version - 1} has not committed; {self._host.why()}",
        )
        for port in ports:
            port.settle()

    def due(self, replica: int) -> bool:
        """Whether the step at hand is another than the one that the replica is done with."""
        return self._newest > self._answered[replica]

    def join(self, replica: int, epoch: int) -> Batch | Pass | EpochDone:
        """A batch for the step at hand, with the parameters for it."""
        while True:
            self.renew()
            answer = self._host.join(replica, self.version, epoch)
            if isinstance(answer, EpochDone):
                return answer  # the next epoch begins with this very step
            if isinstance(answer, Batch | Pass):
                self._answered[replica] = self.version
                return answer
            assert isinstance(answer, Behind)
            self._newest = max(self._newest, answer.step)
            self._arena.check()

    def arrive(self, contribution: Contribution) -> None:
        """The replica's gradient is there, for the step of the version that it has read."""
        for port in self._ports.values():
            port.give(self.version, contribution)

    def wait(self) -> None:
        """Until there is a step that some replica of this host is not done with."""
        step = min(self._answered.values())
        if self._newest <= step:
            with self._host.activity.waiting(step, self._host.missing):
                self._fetch(step + 1)
            self._newest = max(port.version for port in self._ports.values())

    def close(self) -> None:
        """Nothing of its own to let go of."""


def behind(held: Mapping[int, Held]) -> list[int]:
    """The replicas that those that are held wait for, sorted."""
    return sorted({replica for of in list(held.values()) for replica in of.behind})


def why_held(held: Mapping[int, Held]) -> str:
    return " and ".join(
        f"replica {replica} waits for replicas {list(of.behind)}, which are too far behind"
        for replica, of in held.items()
    )


class Copies:
    """Each asynchronous replica's own copy of the parameters, replaced shard by shard.

    It has nothing in it before the first pull.
    """

    def __init__(self, host: Host) -> None:
        self.lead_shard = host.launch.lead_shard
        self._grad_views = host.arena.grad_views
        self._views: dict[int, Mapping[str, Any]] = {}
        #: (replica, shard) -> the flat views of the copy that belong to the shard
        self.into: dict[tuple[int, int], list[Any]] = {}
        #: likewise of the replica's gradient
        self.flat_grads: dict[tuple[int, int], list[Any]] = {}
        #: likewise the version of the shard that the copy has
        self.versions: dict[tuple[int, int], int] = {}
        #: replica -> the number of its next request
        self.requests = dict.fromkeys(host.plan.replicas, 0)
        for replica in host.plan.replicas:
            buffer = aligned_bytes(host.layout.nbytes)
            self._views[replica] = frozen(host.layout.views(buffer))
            for shard in host.shards:
                ranges = host.shard_plan.shards[shard].ranges
                self.into[replica, shard] = cut(buffer, ranges)
                self.flat_grads[replica, shard] = cut(host.arena.grads[replica], ranges)
                self.versions[replica, shard] = host.begin.versions[shard]

    def params(self, replica: int) -> Mapping[str, Any]:
        """Read-only views of the replica's own copy."""
        return self._views[replica]

    def grads(self, replica: int) -> Mapping[str, Any]:
        """The views to write a replica's gradient to."""
        return self._grad_views[replica]

    def version(self, replica: int) -> int:
        """Updates applied at the lead shard, as far as this replica's copy has them."""
        return self.versions[replica, self.lead_shard]


class AsyncLink(Copies):
    """Asynchronous: push to all shards, each answers with its newest parameters."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._host = host
        self._arena = host.arena
        # Remote shards first: their messages travel while the local ones are worked on.
        self._order = sorted(host.shards, key=lambda s: (s in host.arena.shards, s))
        self._ports = {s: cast(AsyncPort, open_port(host, s)) for s in host.shards}

    def take(self, replica: int, epoch: int) -> Batch | Held | None:
        """The next batch of a replica in an epoch, or for whom it has to wait."""
        if self._arena.lead is None:
            answer = self._ask(replica, epoch)
        else:
            with self._arena.lock:
                answer = self._arena.lead.take(replica, self.requests[replica], epoch)
        if isinstance(answer, Held):
            return answer
        self.requests[replica] += 1
        if answer is not None and self._host.launch.spec.max_staleness is not None:
            self.pull(replica)  # what was read before it was one's turn is too old
        return answer

    def wait(self, held: Mapping[int, Held], epoch: int) -> dict[int, Batch | None]:
        """Until one of those that are held has its answer."""
        latest = dict(held)
        with self._host.activity.waiting(
            self.version(min(held)), lambda: behind(latest), sorted(held)
        ):
            found = self._until_one(latest, epoch)
        for replica, batch in found.items():
            self.requests[replica] += 1
            if batch is not None:
                self.pull(replica)  # what was read before it was one's turn is too old
        return found

    def _until_one(self, held: dict[int, Held], epoch: int) -> dict[int, Batch | None]:
        """Ask again for those that are held; ``held`` keeps up with whom they wait for."""
        settings, lead = self._host.launch.settings, self._arena.lead
        found: dict[int, Batch | None] = {}

        def ready(wait: float = 0.0) -> bool:
            for replica in list(held):
                answer = (
                    self._ask(replica, epoch, wait)
                    if lead is None
                    else lead.take(replica, self.requests[replica], epoch)
                )
                if isinstance(answer, Held):
                    held[replica] = answer
                else:
                    found[replica] = answer
            return bool(found)

        if lead is not None:
            self._arena.wait(ready, settings.step_deadline, lambda: why_held(held))
            return found
        until = time.monotonic() + settings.step_deadline
        while not ready(settings.poll / len(held)):
            self._host.check()
            if time.monotonic() > until:
                raise DeadlineError(f"after {settings.step_deadline:g} s: {why_held(held)}")
        return found

    def _ask(self, replica: int, epoch: int, wait: float = 0.0) -> Batch | Held | None:
        """Ask the lead, which is elsewhere; it may wait there for others to get on."""
        answer = self._host.calls.ask(
            self._host.launch.chief.address,
            "dtrain_take",
            replica=replica,
            request=self.requests[replica],
            epoch=epoch,
            wait=wait,
        )
        return unpacked(answer)

    def push(self, replica: int, contribution: Contribution, epoch: int) -> Batch | Held | None:
        """Apply the replica's gradient, renew its parameters; returns its next batch."""
        answer = self._exchange(replica, contribution, epoch)
        if isinstance(answer, Held):
            self.requests[replica] -= 1
        return answer

    def skip(self, replica: int, epoch: int) -> Batch | Held | None:
        """Forgo the replica's gradient, renew its parameters; returns its next batch."""
        self.pull(replica)
        return self.take(replica, epoch)

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last; at the chief."""
        return bool(self._arena.lead.exhausted)

    def pull(self, replica: int) -> None:
        """Renew the replica's parameters."""
        self._exchange(replica, None, 0)

    def _exchange(
        self, replica: int, contribution: Contribution | None, epoch: int
    ) -> Batch | Held | None:
        request = self.requests[replica]
        if contribution is not None:
            self.requests[replica] += 1
        for shard in self._order:
            grads = None if contribution is None else self.flat_grads[replica, shard]
            version = self.versions[replica, shard]
            push = Push(replica, request, version, contribution, epoch, grads)
            self._ports[shard].start(push, self.into[replica, shard])
        following: Batch | Held | None = None
        for shard in self._order:
            version, batch = self._ports[shard].finish(replica)
            self.versions[replica, shard] = version
            if shard == self.lead_shard:
                following = batch
        return following

    def close(self) -> None:
        """Nothing of its own to let go of."""
