"""Ports to shards of other processes, over Dask's own comms.

One message per shard and step carries the gradients of all replicas of the host as flat
buffers; its reply, once the step is committed, carries the next version.  A gradient's buffer
is written again only after that reply, so it is sent without a copy.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from distributed.protocol import to_serialize

from dtrain.errors import DeadlineError
from dtrain.messages import Batch, Contribution, Push
from dtrain.runtime.shards import cut

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class SyncPort:
    def __init__(self, host: Host, shard: int) -> None:
        self._host = host
        self._shard = shard
        self._peer = host.launch.host_of_shard(shard)
        ranges = host.shard_plan.shards[shard].ranges
        self._grads = {
            replica: cut(host.arena.grads[replica], ranges) for replica in host.plan.replicas
        }
        self._params = [cut(buffer, ranges) for buffer in host.arena.buffers]
        #: the newest version in the arena
        self._have = 0
        self._reply: Future[tuple[int, list[Any]]] | None = None

    def push(self, step: int, contributions: tuple[Contribution, ...]) -> None:
        if self._have > step and not contributions:
            return
        self._reply = self._host.service.start(self._exchange(step, contributions))
        self._reply.add_done_callback(self._notify)

    def _notify(self, _: Any) -> None:
        arena = self._host.arena
        with arena.lock:
            arena.progress.notify_all()

    async def _exchange(
        self, step: int, contributions: tuple[Contribution, ...]
    ) -> tuple[int, list[Any]]:
        settings = self._host.launch.settings
        until = time.monotonic() + settings.step_deadline
        grads = [[to_serialize(g) for g in self._grads[c.replica]] for c in contributions]
        while self._host.arena.stopped is None:
            answer = await self._host.service.ask(
                self._peer.address,
                "dtrain_push",
                settings.call_deadline + settings.poll,
                job=self._host.launch.job,
                generation=self._host.generation,
                step=step,
                shard=self._shard,
                contributions=[astuple(c) for c in contributions],
                grads=grads,
                wait=settings.poll,
            )
            if answer is not None:
                return answer[0], answer[1]
            if time.monotonic() > until:
                break
            # The gradients have arrived; what is left is to wait for the others'.
            contributions, grads = (), []
        raise DeadlineError(
            f"shard {self._shard} at {self._peer} has not committed step {step} "
            f"in {settings.step_deadline:.0f} s"
        )

    def ready(self, version: int) -> bool:
        return self._have >= version or (self._reply is not None and self._reply.done())

    def settle(self, version: int) -> None:
        if self._have >= version:
            return
        assert self._reply is not None
        found, arrays = self._reply.result(0)
        for target, source in zip(self._params[found % 2], arrays, strict=True):
            target[...] = source
        self._have = found


class AsyncPort:
    def __init__(self, host: Host, shard: int) -> None:
        self._host = host
        self._shard = shard
        self._peer = host.launch.host_of_shard(shard)
        self._replies: dict[int, tuple[Future[dict[str, Any]], list[Any]]] = {}

    def start(self, push: Push, into: list[Any]) -> None:
        call = self._host.service.ask(
            self._peer.address,
            "dtrain_push_pull",
            self._host.launch.settings.step_deadline,
            job=self._host.launch.job,
            generation=self._host.generation,
            shard=self._shard,
            replica=push.replica,
            request=push.request,
            version=push.version,
            contribution=None if push.contribution is None else astuple(push.contribution),
            epoch=push.epoch,
            grads=None if push.grads is None else [to_serialize(g) for g in push.grads],
        )
        future = self._host.service.start(call)
        future.add_done_callback(self._notify)
        self._replies[push.replica] = (future, into)

    def _notify(self, _: Any) -> None:
        arena = self._host.arena
        with arena.lock:
            arena.progress.notify_all()

    def finish(self, replica: int) -> tuple[int, int, Batch | None]:
        future, into = self._replies.pop(replica)
        self._host.arena.wait(
            future.done,
            self._host.launch.settings.step_deadline,
            lambda: f"shard {self._shard} at {self._peer} has not answered replica {replica}",
        )
        reply = future.result(0)
        for target, source in zip(into, reply["params"], strict=True):
            target[...] = source
        found = reply["next"]
        return reply["version"], reply["age"], None if found is None else Batch(*found)
