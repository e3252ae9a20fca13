"""Ports to shards of the same process: views of the same arena, nothing is copied or sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtrain.machines.cursor import Held
from dtrain.messages import Batch, Contribution, Push, Pushed
from dtrain.runtime.updater import cut

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class SyncPort:
    def __init__(self, host: Host, shard: int) -> None:
        self._host = host
        self._shard = host.arena.shards[shard]
        self._grads = {
            replica: self._shard.pieces(cut(host.arena.grads[replica], self._shard.ranges))
            for replica in host.plan.replicas
        }

    def push(
        self, step: int, contributions: tuple[Contribution, ...], *, busy: bool = True
    ) -> None:
        """``busy``: the caller is about to wait."""
        if contributions:
            event = Pushed(self._host.generation, step, contributions)
            with self._host.arena.lock:
                self._host.deliver(self._shard.index, event, self._grads, busy=busy)

    def ready(self, version: int) -> bool:
        return bool(self._shard.version >= version)

    def settle(self, version: int) -> None:
        pass


class BackupPort:
    """To a shard here, for steps that do not wait for all replicas."""

    def __init__(self, host: Host, shard: int) -> None:
        self._port = SyncPort(host, shard)
        self._host = host
        self._shard = host.arena.shards[shard]
        self.version = -1
        self.arrays: list[Any] = []

    def give(self, step: int, contribution: Contribution) -> None:
        # Whoever has another replica to compute for does not wait before that.
        last = contribution.replica == self._host.plan.replicas[-1]
        self._port.push(step, (contribution,), busy=last)

    def fetch(self, version: int) -> None:
        """It is here as soon as it is committed."""

    def ready(self, version: int) -> bool:
        return bool(self._shard.version >= version)

    def settle(self) -> None:
        # A private copy, which nobody writes to.
        with self._host.arena.lock:
            self.version, self.arrays = self._shard.version, self._shard.published


class AsyncPort:
    """The pushing replica's own thread applies the gradient, under the shard's lock."""

    def __init__(self, host: Host, shard: int) -> None:
        self._host = host
        self._shard = shard
        self._replies: dict[int, tuple[int, Batch | Held | None]] = {}

    def start(self, push: Push, into: list[Any]) -> None:
        self._replies[push.replica] = self._host.exchanged(self._shard, push, into)

    def finish(self, replica: int) -> tuple[int, Batch | Held | None]:
        return self._replies.pop(replica)
