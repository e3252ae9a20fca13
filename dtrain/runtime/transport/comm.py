"""Ports to shards of other processes, over Dask's own comms.

One message per shard and step carries the gradients of all replicas of the host as flat
buffers; its reply, once the step is committed, carries the next version.  A gradient's buffer
is written again only after that reply, so it is sent without a copy.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from distributed.protocol import to_serialize

from dtrain.errors import DeadlineError
from dtrain.messages import Batch, Contribution, Push, Reduced, Verdict
from dtrain.runtime.shards import cut

if TYPE_CHECKING:
    from dtrain.runtime.host import Host

#: Seconds before a peer that could not be reached is asked again.
_RETRY = 0.1


class Patience:
    """With a peer that does not answer: what is asked is recognised, and may be asked again.

    A process whose user code holds the GIL is silent for as long as that takes.  One that cannot
    be reached at all has died, which the master will say soon; if it does not, it is said here.
    """

    def __init__(self, host: Host) -> None:
        settings = host.launch.settings
        self._mute = time.monotonic() + settings.step_deadline
        self._call_deadline = settings.call_deadline
        self._gone: float | None = None

    async def after(self, error: OSError) -> None:
        """Wait a little; raises the error once it has come for too long."""
        now = time.monotonic()
        if isinstance(error, DeadlineError):
            self._gone = None
            if now > self._mute:
                raise error
            return
        if self._gone is None:
            self._gone = now + self._call_deadline
        if now > self._gone:
            raise error
        await asyncio.sleep(_RETRY)


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
        self._have = host.begin.step
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
        patience = Patience(self._host)
        while self._host.arena.stopped is None:
            try:
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
            except OSError as error:
                await patience.after(error)
                continue
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
        future = self._host.service.start(self._exchange(push))
        future.add_done_callback(self._notify)
        self._replies[push.replica] = (future, into)

    async def _exchange(self, push: Push) -> dict[str, Any]:
        host, patience = self._host, Patience(self._host)
        while True:
            try:
                reply: dict[str, Any] = await host.service.ask(
                    self._peer.address,
                    "dtrain_push_pull",
                    host.launch.settings.call_deadline,
                    job=host.launch.job,
                    generation=host.generation,
                    shard=self._shard,
                    replica=push.replica,
                    request=push.request,
                    version=push.version,
                    contribution=None if push.contribution is None else astuple(push.contribution),
                    epoch=push.epoch,
                    grads=None if push.grads is None else [to_serialize(g) for g in push.grads],
                )
            except OSError as error:
                if host.arena.stopped is not None:
                    raise
                await patience.after(error)
            else:
                return reply

    def _notify(self, _: Any) -> None:
        arena = self._host.arena
        with arena.lock:
            arena.progress.notify_all()

    def finish(self, replica: int) -> tuple[int, Batch | None]:
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
        return reply["version"], None if found is None else Batch(*found)


async def report(host: Host, event: Reduced) -> None:
    """Tell the lead, which is elsewhere, that a shard has a step; and follow its verdict."""
    settings = host.launch.settings
    until = time.monotonic() + settings.step_deadline
    patience = Patience(host)
    try:
        while host.arena.stopped is None and host.arena.failure is None:
            try:
                answer = await host.service.ask(
                    host.launch.chief.address,
                    "dtrain_reduced",
                    settings.call_deadline + settings.poll,
                    job=host.launch.job,
                    generation=host.generation,
                    step=event.step,
                    shard=event.shard,
                    problem=event.problem,
                    wait=settings.poll,
                )
            except OSError as error:
                await patience.after(error)
                continue
            if answer is not None:
                generation, step, members, weight, ok, problem = answer
                verdict = Verdict(generation, step, tuple(members), weight, ok, problem)
                with host.arena.lock:
                    host.arena.shards[event.shard].decide(verdict)
                return
            if time.monotonic() > until:
                raise DeadlineError(f"no verdict on step {event.step} from the lead")
    except Exception as error:  # noqa: BLE001 - it is handed to every waiting thread
        with host.arena.lock:
            host.arena.fail(error)
