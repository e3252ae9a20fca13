"""Ports to shards of other processes, over Dask's own comms.

One message per shard and step carries the gradients of all replicas of the host as flat
buffers; its reply, once the step is committed, carries the next version.  A gradient's buffer
is written again only after that reply, so it is sent without a copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from distributed.protocol import to_serialize

from dtrain.errors import DeadlineError
from dtrain.machines.cursor import Held
from dtrain.messages import Batch, Closed, Contribution, Measured, Measures, Push, Reduced, Verdict
from dtrain.runtime.lead import unpacked
from dtrain.runtime.updater import cut

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
        self._reply = self._start(self._exchange(step, contributions))

    def hand_over(self, step: int, contributions: tuple[Contribution, ...]) -> Future[Any]:
        """Hand over the gradients alone; done once they have arrived."""
        return self._start(self._exchange(step, contributions, follows=False))

    def follow(self, step: int) -> Future[tuple[int, list[Any]]]:
        """The version after ``step``, or a later one."""
        return self._start(self._exchange(step, ()))

    def _start(self, exchange: Coroutine[Any, Any, Any]) -> Future[Any]:
        found = self._host.service.start(exchange)
        found.add_done_callback(self._notify)
        return found

    def _notify(self, _: Any) -> None:
        arena = self._host.arena
        with arena.lock:
            arena.progress.notify_all()

    async def _exchange(
        self, step: int, contributions: tuple[Contribution, ...], *, follows: bool = True
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
                    wait=settings.poll if follows else 0.0,
                )
            except OSError as error:
                await patience.after(error)
                continue
            if answer is not None:
                return answer[0], answer[1]
            if not follows:
                return step, []
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


class BackupPort:
    """To a shard elsewhere, for steps that do not wait for all replicas."""

    def __init__(self, host: Host, shard: int) -> None:
        self._port = SyncPort(host, shard)
        self._host = host
        self._shard = shard
        self._given: list[Future[Any]] = []
        self._reply: Future[tuple[int, list[Any]]] | None = None
        #: the version that was fetched last, one flat array per range
        self.version = -1
        self.arrays: list[Any] = []

    def give(self, step: int, contribution: Contribution) -> None:
        self._given = [given for given in self._given if not given.done() or given.exception()]
        self._given.append(self._port.hand_over(step, (contribution,)))

    def fetch(self, version: int) -> None:
        """Begin to fetch a version that is at least this one, if it is not here."""
        if self.version < version and self._reply is None:
            self._reply = self._port.follow(version - 1)

    def ready(self, version: int) -> bool:
        # What could not be handed over says why nothing comes.
        failed = any(given.done() and given.exception() for given in self._given)
        return self.version >= version or failed or (self._reply is not None and self._reply.done())

    def settle(self) -> None:
        for given in self._given:
            if given.done():
                given.result(0)
        if self._reply is not None and self._reply.done():
            reply, self._reply = self._reply, None
            self.version, self.arrays = reply.result(0)


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

    def finish(self, replica: int) -> tuple[int, Batch | Held | None]:
        future, into = self._replies.pop(replica)
        self._host.arena.wait(
            future.done,
            self._host.launch.settings.step_deadline,
            lambda: f"shard {self._shard} at {self._peer} has not answered replica {replica}",
        )
        reply = future.result(0)
        for target, source in zip(into, reply["params"], strict=True):
            target[...] = source
        return reply["version"], unpacked(reply["next"])


async def report(host: Host, event: Reduced) -> None:
    """Tell the lead, which is elsewhere, that a shard has a step; and follow its verdict."""
    answer = await _tell_lead(
        host,
        "dtrain_reduced",
        f"no verdict on step {event.step}",
        step=event.step,
        shard=event.shard,
        problem=event.problem,
    )
    if answer is not None:
        generation, step, members, *rest = answer
        _follow(host, lambda: host.arena.shards[event.shard].decide(
            Verdict(generation, step, tuple(members), *rest)
        ))  # fmt: skip


async def measure(host: Host, event: Measured) -> None:
    """Tell the lead, which is elsewhere, a shard's sums of a stage; go on with those of all."""
    answer = await _tell_lead(
        host,
        "dtrain_measured",
        f"no sums of all shards, of stage {event.stage} of step {event.step},",
        step=event.step,
        stage=event.stage,
        shard=event.shard,
        problem=event.problem,
        blocks=to_serialize(event.blocks),
        sums=to_serialize(event.sums),
    )
    if answer is not None:
        measures = Measures(event.generation, event.step, event.stage, *answer)
        _follow(host, lambda: host.arena.shards[event.shard].go_on(measures))


async def closing(host: Host, shard: int, step: int) -> None:
    """Ask the lead, which is elsewhere, whose gradients make a step, for a shard here."""
    members = await _tell_lead(host, "dtrain_closed", f"step {step} is not closed", step=step)
    if members is not None:
        event = Closed(host.generation, step, tuple(members))
        _follow(host, lambda: host.arena.shards[shard].close(event))


async def _tell_lead(host: Host, op: str, lacks: str, **message: Any) -> Any:
    """The lead's answer to a long poll; None: the job is over.  A failure becomes the arena's."""
    settings = host.launch.settings
    until = time.monotonic() + settings.step_deadline
    patience = Patience(host)
    try:
        while host.arena.stopped is None and host.arena.failure is None:
            try:
                answer = await host.service.ask(
                    host.launch.chief.address,
                    op,
                    settings.call_deadline + settings.poll,
                    job=host.launch.job,
                    generation=host.generation,
                    wait=settings.poll,
                    **message,
                )
            except OSError as error:
                await patience.after(error)
                continue
            if answer is not None:
                return answer
            if time.monotonic() > until:
                raise DeadlineError(f"{lacks} from the lead")
    except Exception as error:  # noqa: BLE001 - it is handed to every waiting thread
        with host.arena.lock:
            host.arena.fail(error)
    return None


def _follow(host: Host, act: Callable[[], None]) -> None:
    with host.arena.lock:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - it is handed to every waiting thread
            host.arena.fail(error)
