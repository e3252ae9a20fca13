"""What a host's replicas see of the whole model: all shards through their ports, as one.

In shared memory there are no ports: :mod:`dtrain.runtime.transport.shm` has links of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from dtrain.arrays import aligned_bytes
from dtrain.messages import Batch, Contribution, Push
from dtrain.runtime.arena import frozen
from dtrain.runtime.shards import cut
from dtrain.runtime.transport import AsyncPort, SyncPort, open_port

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


class Copies:
    """Each asynchronous replica's own copy of the parameters, replaced shard by shard.

    It has nothing in it before the first pull.
    """

    def __init__(self, host: Host) -> None:
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
        return self.versions[replica, 0]


class AsyncLink(Copies):
    """Asynchronous: push to all shards, each answers with its newest parameters."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._host = host
        # Remote shards first: their messages travel while the local ones are worked on.
        self._order = sorted(host.shards, key=lambda s: (s in host.arena.shards, s))
        self._ports = {s: cast(AsyncPort, open_port(host, s)) for s in host.shards}

    def take(self, replica: int, epoch: int) -> Batch | None:
        """The first batch of a replica in an epoch."""
        request = self.requests[replica]
        self.requests[replica] += 1
        return self._host.take(replica, request, epoch)

    def push(self, replica: int, contribution: Contribution, epoch: int) -> Batch | None:
        """Apply the replica's gradient, renew its parameters; returns its next batch."""
        return self._exchange(replica, contribution, epoch)

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last; at the chief."""
        return bool(self._host.arena.lead.exhausted)

    def pull(self, replica: int) -> None:
        """Renew the replica's parameters."""
        self._exchange(replica, None, 0)

    def _exchange(
        self, replica: int, contribution: Contribution | None, epoch: int
    ) -> Batch | None:
        request = self.requests[replica]
        if contribution is not None:
            self.requests[replica] += 1
        for shard in self._order:
            grads = None if contribution is None else self.flat_grads[replica, shard]
            version = self.versions[replica, shard]
            push = Push(replica, request, version, contribution, epoch, grads)
            self._ports[shard].start(push, self.into[replica, shard])
        following = None
        for shard in self._order:
            version, batch = self._ports[shard].finish(replica)
            self.versions[replica, shard] = version
            if shard == 0:
                following = batch
        return following

    def close(self) -> None:
        """Nothing of its own to let go of."""
