"""Acts on the decisions about jobs: places, launches and stops their hosts, and tidies up.

A client inside the scheduler submits the hosts' tasks and holds every key that a job needs, so
that a job outlives whoever submitted it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributed.client import FuturesCancelledError, _wait
from distributed.utils import offload

from dtrain.machines.jobs import HostDone, HostFailed, Launched, Origin, State
from dtrain.machines.membership import Member, Presence
from dtrain.machines.plan import cuts
from dtrain.messages import Failure
from dtrain.runtime import process
from dtrain.runtime.launch import Launch
from dtrain.runtime.placement import place
from dtrain.runtime.record import Record
from dtrain.runtime.rpc import ask
from dtrain.runtime.transport import segment
from dtrain.runtime.transport.meeting import forget
from dtrain.runtime.transport.segment import discard

if TYPE_CHECKING:
    from distributed import Client

    from dtrain.runtime.master import Master

logger = logging.getLogger("dtrain.master")

#: Seconds that a worker has to let go of what is left of a job.
FORGET = 5.0


class Dispatch:
    """The hands of the master."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self._client: Client | None = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await asyncio.wait_for(client._close(fast=True), 5)

    async def own_client(self) -> Client:
        """The client that submits and holds; made when first wanted, never during start-up."""
        from distributed import Client

        async with self._opening:
            if self._client is None:
                self._client = await asyncio.wait_for(
                    Client(
                        self.master.scheduler.address,
                        asynchronous=True,
                        set_as_default=False,
                        security=self.master.scheduler.security,
                        name="dtrain-master",
                    ),
                    self.master.settings.call_deadline,
                )
        return self._client

    # -- hosts come ----------------------------------------------------------------------------

    def place(self, record: Record) -> None:
        """Choose the hosts of a generation, if there are enough workers by now."""
        if record.futures:
            self.release(record)
        record.reports.clear()
        recovery = record.spec.recovery
        ready = self.master.membership.able(record.spec.device)
        if record.machine.generation > 1:
            # One that is held by other tasks has no thread for ours; but better that than none.
            ready = [m for m in ready if self.idle(m) or m.address in record.touched] or ready
        if len(ready) < recovery.min_workers:
            return
        origin = record.machine.origin
        near = functools.partial(_near, origin)
        hosts = place(ready, record.replicas, record.most_shards, self.local_rows(record), near)
        record.touched.update(h.address for h in hosts)
        self.master.handle(record, Launched(hosts))

    def local_rows(self, record: Record) -> dict[int, dict[str, int]]:
        """Replica -> address -> rows of its part there.

        A part is taken as a share of all rows here; a validation split moves it by a few.
        """
        assert record.data is not None
        x, replicas = record.data.x, record.replicas
        bounds = cuts(x.rows, replicas)
        found: dict[int, dict[str, int]] = {i: {} for i in range(replicas)}
        part = 0
        for number, key in enumerate(x.keys):
            start, stop = x.starts[number], x.starts[number + 1]
            while part + 1 < replicas and bounds[part + 1] <= start:
                part += 1
            ts = self.master.scheduler.tasks.get(key)
            addresses = [ws.address for ws in ts.who_has] if ts is not None and ts.who_has else []
            for i in range(part, replicas):
                if bounds[i] >= stop:
                    break
                rows = min(stop, bounds[i + 1]) - max(start, bounds[i])
                for address in addresses:
                    found[i][address] = found[i].get(address, 0) + rows
        return found

    def idle(self, member: Any) -> bool:
        """Whether a worker has a thread to spare, or a host's task would wait there for ever."""
        ws = self.master.scheduler.workers[member.address]
        return len(ws.processing) - len(ws.long_running) < ws.nthreads

    def _origin(self, record: Record) -> Origin | None:
        """Where the chief looks for the state; not at workers that are known to be gone."""
        origin = record.machine.origin
        if origin is None or origin.meeting is not None:
            return origin
        members = self.master.membership.members
        here = tuple(
            h
            for h in origin.hosts
            if h.address in members and members[h.address].presence is Presence.READY
        )
        gone = [h for h in origin.hosts if h not in here and h.shards]
        return None if gone else replace(origin, hosts=here)

    async def launch(self, record: Record) -> None:
        """Submit one pinned task for each host; the master alone may try again."""
        from dtrain.runtime.replica import run_host

        machine = record.machine
        assert record.data is not None  # it is let go of at the end
        launch = Launch(
            job=record.id,
            generation=machine.generation,
            spec=record.spec,
            model=record.model,
            placement=record.placement,
            data=record.data,
            hosts=machine.hosts,
            settings=self.master.settings,
            origin=self._origin(record),
        )
        generation = machine.generation
        try:
            client = await self.own_client()
            if machine.generation != generation or machine.terminal:
                return
            for number, host in enumerate(launch.hosts):
                record.futures[host.address] = client.submit(
                    run_host,
                    launch,
                    key=f"dtrain-{record.id}-g{generation}-h{number}",
                    workers=[host.address],
                    allow_other_workers=False,
                    retries=0,
                    pure=False,
                )
        except Exception as error:  # noqa: BLE001 - it becomes the job's failure
            failure = Failure("CONTROLLER", f"launch: {type(error).__name__}: {error}")
            self.master.handle(record, HostFailed(generation, launch.chief.address, failure))
            return
        record.watchers = [
            self.master.spawn(self._watch_task(record, host.address, generation))
            for host in launch.hosts
        ]

    async def _watch_task(self, record: Record, address: str, generation: int) -> None:
        future = record.futures[address]
        # Not `distributed.wait`: in a process with another client it would block on that one.
        # Not `await future`: it would bring the result to the scheduler.
        try:
            await _wait([future])
        except FuturesCancelledError:
            return  # The cluster closes or restarts: the loss of the worker tells the job.
        if record.machine.generation != generation:
            return
        if future.status == "error":
            error = await future.exception()
            words = f"its task on {address} raised {type(error).__name__}: {error}"
            self.master.handle(
                record, HostFailed(generation, address, Failure("CONTROLLER", words))
            )
        self.master.handle(record, HostDone(generation, address))

    # -- and go --------------------------------------------------------------------------------

    async def stop_host(
        self, record: Record, address: str, generation: int, why: str, over: bool
    ) -> None:
        ws = self.master.scheduler.workers.get(address)
        if ws is None:
            return
        try:
            await ask(
                self.master.scheduler.rpc(address),
                "dtrain_stop",
                self.master.settings.call_deadline,
                job=record.id,
                generation=generation,
                why=why,
                over=over,
            )
        except Exception as error:  # noqa: BLE001 - the grace time ends the job all the same
            if over and address in self.master.scheduler.workers:
                logger.warning("job %s: %s was not told to stop: %s", record.id, address, error)

    async def drop_former(self, record: Record) -> None:
        """Those that have no part any more may let go of what they still have for others."""
        before = record.machine.generation
        hosts = {h.address for h in record.machine.hosts}
        await self._ask_all(record.touched - hosts, "dtrain_drop", job=record.id, before=before)

    async def end(self, record: Record) -> None:
        """Let go of what a terminal job held; of a success, keep the chief's result."""
        keep = record.machine.state is State.SUCCEEDED
        chief = record.machine.hosts[0].address if record.machine.hosts else None
        for address in list(record.futures):
            if not (keep and address == chief):
                record.futures.pop(address).release()
        for watcher in record.watchers:
            watcher.cancel()
        self._let_go(record)
        record.model, record.placement, record.data = b"", None, None
        await self._forget_job(record)
        if keep and not record.attached:
            await self._keep_twice(record)
        # Wherever Dask moves it: a worker that has a result can be retired like any other.
        found = [key for key in record.result_keys if key in self.master.scheduler.tasks]
        self.master.scheduler.set_restrictions({key: set() for key in found})
        record.clean.set()
        await self.master.announce(record)

    async def _forget_job(self, record: Record) -> None:
        """Nothing of it is left in the memory or on the disks of the machines that it was on."""
        holders = record.touched | record.holders
        await self._ask_all(holders, "dtrain_forget", job=record.id, data=record.file)
        # The workers of this machine may all be gone.
        await offload(forget, record.id)
        if record.file is not None:
            await offload(discard, record.file)

    async def _keep_twice(self, record: Record) -> None:
        """A result outlives the worker that has it: another one gets a copy, under its own key.

        A second replica of the same key would not do: Dask's memory manager drops it.
        """
        chief = record.machine.hosts[0].address
        others = [m.address for m in self.master.membership.ready() if m.address != chief]
        result = record.futures.get(chief)
        if result is None or not others:
            return
        try:
            client = await self.own_client()
            record.copy = client.submit(
                _same,
                result,
                key=f"dtrain-{record.id}-copy",
                workers=others[:1],
                allow_other_workers=False,
                retries=0,
                pure=False,
            )
            await asyncio.wait_for(_wait([record.copy]), self.master.settings.call_deadline)
            # On its way it was taken for a replica of the first one; of two Dask may drop either.
            self.master.scheduler.request_remove_replicas(
                others[0], [result.key], stimulus_id=f"dtrain-copied-{record.id}"
            )
        except (OSError, TimeoutError, KeyError, ValueError, FuturesCancelledError) as error:
            logger.warning("job %s: its result is at one worker alone: %s", record.id, error)

    def _let_go(self, record: Record) -> None:
        if record.hold in self.master.scheduler.clients:
            self.master.scheduler.remove_client(record.hold)

    def release(self, record: Record) -> None:
        """Let go of a job's tasks and of its result."""
        if self._client is not None:
            # At once: the client's own word comes a little later.
            keys = record.result_keys
            self.master.scheduler.client_releases_keys(keys=keys, client=self._client.id)
        for watcher in record.watchers:
            watcher.cancel()
        for future in record.futures.values():
            future.release()
        if record.copy is not None:
            record.copy.release()
        record.watchers, record.futures, record.copy = [], {}, None

    async def _ask_all(self, addresses: set[str], op: str, **message: Any) -> None:
        """Of those that are there; what they do not hear is in the log."""
        members = self.master.membership.members
        asked = [
            ask(self.master.scheduler.rpc(address), op, FORGET, **message)
            for address in sorted(addresses)
            if address in members and members[address].presence is not Presence.FENCED
        ]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(error, BaseException):
                logger.warning("%s: %s", op, error)

    # -- workers that do not run ---------------------------------------------------------------

    def renew(self, address: str) -> None:
        """Have a fenced worker started again, where waiting for it to come back would not do.

        It may be the only one with chunks that a job needs: without it Dask has them made anew.
        Or its thread may be in user code without end: then only if a nanny brings it back.
        """
        ws = self.master.scheduler.workers[address]
        plans = [r.data for r in self.master.jobs.values() if r.data is not None]
        keys = {key for plan in plans for array in plan.arrays for key in array.keys}
        if any(ts.key in keys and len(ts.who_has or ()) == 1 for ts in ws.has_what):
            self.master.spawn(self._restart(address, "it alone has data that a job needs"))
        elif ws.nanny and self.master.membership.members[address].stuck:
            self.master.spawn(self._restart(address, "its user code does not return"))

    async def _restart(self, address: str, why: str) -> None:
        logger.warning("worker %s is started again: %s", address, why)
        try:
            await asyncio.wait_for(
                self.master.scheduler.restart_workers(
                    [address],
                    timeout=self.master.settings.stop_grace,
                    wait_for_workers=False,
                    on_error="return",
                    stimulus_id=f"dtrain-restart-{time.time()}",
                ),
                2 * self.master.settings.stop_grace,
            )
        except (OSError, TimeoutError) as error:
            logger.warning("worker %s could not be restarted: %s", address, error)


def _same(result: Any) -> Any:
    """The task of a copy: the very object, at another worker."""
    return result


def _near(origin: Origin | None, member: Member) -> bool:
    """Whether a worker is on the machine whose memory has the state, as far as that is known."""
    if origin is None or origin.meeting is None or not member.process:
        return True
    return process.on_machine(member.process, segment.machine_of(origin.meeting["token"]))
