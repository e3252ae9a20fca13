"""The master: a scheduler plugin that decides; it never carries a parameter or waits in a step.

It owns the pure machines (:mod:`dtrain.machines.membership`, :mod:`dtrain.machines.jobs`) and
acts on their commands.  A client inside the scheduler submits the hosts' tasks and holds every
key that a job needs, so that a job outlives whoever submitted it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import platform
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.client import FuturesCancelledError, _wait
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import heartbeat_interval

from dtrain import metrics
from dtrain._version import __version__
from dtrain.config import Settings, settings
from dtrain.errors import ClusterError, DataError, JobNotFound
from dtrain.machines.cursor import cuts
from dtrain.machines.jobs import (
    Cancel,
    ClientBack,
    ClientGone,
    Command,
    End,
    Event,
    HostDone,
    HostFailed,
    HostReady,
    JobMachine,
    Launched,
    Limits,
    Reached,
    State,
    Tick,
    WorkerLost,
)
from dtrain.machines.jobs import Launch as LaunchCommand
from dtrain.machines.jobs import Stop as StopCommand
from dtrain.machines.membership import Beat, Hello, Joined, Left, Membership
from dtrain.messages import Failure
from dtrain.runtime.data import ArrayRef
from dtrain.runtime.launch import Launch
from dtrain.runtime.placement import place
from dtrain.runtime.record import Record
from dtrain.runtime.rpc import answering, ask
from dtrain.runtime.stub import NAME, worker_plugin
from dtrain.spec import JobSpec

if TYPE_CHECKING:
    from distributed import Client, Scheduler

logger = logging.getLogger("dtrain.master")

#: Ended jobs that are remembered.
_KEPT = 1000

#: Seconds between two looks at leases, deadlines and heartbeats.
_TICK = 0.25


class Master(SchedulerPlugin):
    """Coordinates: who is in, which jobs run where, when they stop."""

    name = NAME
    #: a second one by this name is dropped, and the first goes on
    idempotent = True

    def __init__(self) -> None:
        self.jobs: dict[str, Record] = {}

    # -- life ----------------------------------------------------------------------------------

    async def start(self, scheduler: Scheduler) -> None:
        from distributed.protocol.pickle import dumps

        self.settings: Settings = settings()
        first = scheduler.extensions.setdefault(NAME, self)
        if first is not self:
            # Two clients install at once: this one is dropped as soon as the other is there.
            until = self._now() + self.settings.call_deadline
            while NAME not in scheduler.plugins and self._now() < until:
                await asyncio.sleep(0.01)
            return
        self.scheduler = scheduler
        self.membership = Membership(__version__, self.settings.hello_deadline)
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.handlers = {
            "dtrain_info": self.info,
            "dtrain_hello": self.hello,
            "dtrain_submit": self.submit,
            "dtrain_status": self.status,
            "dtrain_jobs": self.list_jobs,
            "dtrain_cancel": self.cancel,
            "dtrain_release": self.release,
            "dtrain_stuck": self.stuck,
            "dtrain_attach": self.attach,
            "dtrain_ready": self.ready,
            "dtrain_barrier": self.barrier,
            "dtrain_failed": self.failed,
        }
        for op, handler in self.handlers.items():
            scheduler.handlers[op] = answering(handler)
        for ws in scheduler.workers.values():
            self.membership.handle(Joined(ws.address, _name(scheduler, ws.address)), self._now())
        self._spawn(self._watch())
        await scheduler.register_worker_plugin(
            None, dumps(worker_plugin()), name=NAME, idempotent=False
        )

    async def before_close(self) -> None:
        self.scheduler.extensions.pop(NAME, None)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            client, self._client = self._client, None
            await asyncio.wait_for(client._close(fast=True), 5)

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)
        return task

    @staticmethod
    def _now() -> float:
        return time.monotonic()

    async def _own_client(self) -> Client:
        """The client that submits and holds; made when first wanted, never during start-up."""
        from distributed import Client

        async with self._opening:
            if self._client is None:
                self._client = await asyncio.wait_for(
                    Client(
                        self.scheduler.address,
                        asynchronous=True,
                        set_as_default=False,
                        security=self.scheduler.security,
                        name="dtrain-master",
                    ),
                    self.settings.call_deadline,
                )
        return self._client

    # -- what Dask tells us --------------------------------------------------------------------

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        if worker not in scheduler.workers:
            return
        self.membership.handle(Joined(worker, _name(scheduler, worker)), self._now())

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        for lost in self.membership.handle(Left(worker), self._now()):
            for record in list(self.jobs.values()):
                self._handle(record, WorkerLost(lost.address))
                future = record.futures.pop(lost.address, None)
                if future is not None:
                    future.release()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for record in self.jobs.values():
            if client in record.owners:
                record.owners.discard(client)
                if not record.owners:
                    self._handle(record, ClientGone())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            now = self._now()
            for address, member in list(self.membership.members.items()):
                ws = self.scheduler.workers.get(address)
                if ws is None:
                    self.remove_worker(self.scheduler, address)
                    continue
                summary = ws.metrics.get("dtrain")
                if summary is not None and summary is not member.summary:
                    self.membership.handle(Beat(address, summary), now)
                    self._progress(address, summary)
            for record in list(self.jobs.values()):
                self._handle(record, Tick())
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Drop ended jobs whose time is over, and the oldest beyond the number that is kept."""
        ended = [r for r in self.jobs.values() if r.machine.terminal]
        for number, record in enumerate(ended):
            old = now - record.machine.entered > self.settings.result_ttl
            if old or number < len(ended) - _KEPT:
                for future in record.futures.values():
                    future.release()
                del self.jobs[record.id]

    def _progress(self, address: str, summary: Mapping[str, Any]) -> None:
        for job, report in summary.items():
            record = self.jobs.get(job)
            if record is not None and not record.machine.terminal:
                record.reports[address] = {**report, "at": self._now()}

    # -- acting on the machines ----------------------------------------------------------------

    def _handle(self, record: Record, event: Event) -> None:
        machine = record.machine
        before = machine.state, len(machine.settled)
        for command in machine.handle(event, self._now()):
            self._act(record, command)
        # Whoever waits is woken when something is settled, not by each that arrives.
        if (machine.state, len(machine.settled)) != before:
            self._spawn(self._announce(record))

    def _act(self, record: Record, command: Command) -> None:
        if isinstance(command, LaunchCommand):
            self._spawn(self._launch(record))
        elif isinstance(command, StopCommand):
            for address in command.addresses:
                self._spawn(self._stop_host(record, address, command.why))
        elif isinstance(command, End):
            self._spawn(self._end(record))

    async def _announce(self, record: Record) -> None:
        async with record.changed:
            record.changed.notify_all()

    async def _launch(self, record: Record) -> None:
        """Submit one pinned task for each host; the master alone may try again."""
        from dtrain.runtime.replica import run_host

        machine = record.machine
        assert record.data is not None  # it is let go of at the end
        launch = Launch(
            job=record.id,
            generation=machine.generation,
            spec=record.spec,
            model=record.model,
            data=record.data,
            hosts=machine.hosts,
            settings=self.settings,
        )
        try:
            client = await self._own_client()
            for number, host in enumerate(machine.hosts):
                record.futures[host.address] = client.submit(
                    run_host,
                    launch,
                    key=f"dtrain-{record.id}-g{machine.generation}-h{number}",
                    workers=[host.address],
                    allow_other_workers=False,
                    retries=0,
                    pure=False,
                )
        except Exception as error:  # noqa: BLE001 - it becomes the job's failure
            failure = Failure("CONTROLLER", f"launch: {type(error).__name__}: {error}")
            self._handle(record, HostFailed(machine.generation, machine.hosts[0].address, failure))
            return
        record.watchers = [
            self._spawn(self._watch_task(record, host.address, machine.generation))
            for host in machine.hosts
        ]

    async def _watch_task(self, record: Record, address: str, generation: int) -> None:
        future = record.futures[address]
        # Not `distributed.wait`: in a process with another client it would block on that one.
        # Not `await future`: it would bring the result to the scheduler.
        try:
            await _wait([future])
        except FuturesCancelledError:
            return  # The cluster closes or restarts: the loss of the worker tells the job.
        if future.status == "error":
            error = await future.exception()
            words = f"its task on {address} raised {type(error).__name__}: {error}"
            self._handle(record, HostFailed(generation, address, Failure("CONTROLLER", words)))
        self._handle(record, HostDone(generation, address))

    async def _stop_host(self, record: Record, address: str, why: str) -> None:
        ws = self.scheduler.workers.get(address)
        if ws is None:
            return
        try:
            await ask(
                self.scheduler.rpc(address),
                "dtrain_stop",
                self.settings.call_deadline,
                job=record.id,
                generation=record.machine.generation,
                why=why,
            )
        except Exception as error:  # noqa: BLE001 - the grace time ends the job all the same
            if address in self.scheduler.workers:
                logger.warning("job %s: %s was not told to stop: %s", record.id, address, error)

    async def _end(self, record: Record) -> None:
        """Let go of what a terminal job held; of a success, keep the chief's result."""
        keep = record.machine.state is State.SUCCEEDED
        chief = record.machine.hosts[0].address if record.machine.hosts else None
        for address in list(record.futures):
            if not (keep and address == chief):
                record.futures.pop(address).release()
        for watcher in record.watchers:
            watcher.cancel()
        self._let_go(record)
        record.model, record.data = b"", None
        await self._announce(record)

    def _let_go(self, record: Record) -> None:
        if record.hold in self.scheduler.clients:
            self.scheduler.remove_client(record.hold)

    # -- handlers for clients ------------------------------------------------------------------

    async def info(self, settle: bool = False) -> dict[str, Any]:
        """Versions, and which workers can train; ``settle``: once all have said hello or should."""
        while settle and self.membership.pending(self._now()):
            await asyncio.sleep(0.02)
        return {
            "version": __version__,
            "python": platform.python_version(),
            "address": self.scheduler.address,
            "ready": [[m.address, m.name] for m in self.membership.ready()],
            "problems": [[str(m), problem] for m, problem in self.membership.problems()],
            "versions": {m.address: m.version for m in self.membership.members.values()},
            "blas": {m.address: m.blas for m in self.membership.members.values()},
        }

    def submit(
        self, spec: dict[str, Any], model: bytes, data: bytes, client: str | None
    ) -> dict[str, Any]:
        """Take a job; it is launched at once.  The client holds its keys until this answers."""
        from distributed.protocol.pickle import loads

        plan = loads(data)
        asked = JobSpec.from_dict(spec)
        ready = self.membership.ready()
        if not ready:
            raise ClusterError(f"no worker can train; {self._problems()}")
        keys = [key for array in plan.arrays for key in array.keys]
        lost = [key for key in keys if key not in self.scheduler.tasks]
        if lost:
            raise DataError(f"chunk {lost[0]!r} is not on the cluster; expected it persisted")
        id = f"{_slug(asked.name)}{uuid.uuid4().hex[:8]}"
        replicas = asked.replicas or len(ready)
        shards = asked.shards or len(ready)
        resolved = asked.resolved(replicas=replicas, shards=shards)
        machine = JobMachine(
            id,
            Limits(
                prepare_deadline=self.settings.prepare_deadline,
                stop_grace=self.settings.stop_grace,
                client_lease=self.settings.client_lease,
            ),
            self._now(),
            functools.partial(metrics.epoch_record, replicas=replicas),
        )
        record = Record(machine, resolved, client, plan)
        record.model = model
        self.scheduler.client_desires_keys(keys, record.hold)
        self.jobs[id] = record
        hosts = place(ready, replicas, shards, self._local_bytes(plan.x, replicas))
        self._handle(record, Launched(hosts))
        return self._describe(record)

    def _problems(self) -> str:
        problems = [f"{member}: {problem}" for member, problem in self.membership.problems()]
        return "; ".join(problems) or "the cluster has no workers"

    def _local_bytes(self, x: ArrayRef, replicas: int) -> dict[int, dict[str, int]]:
        """Replica -> address -> rows of its part there.

        A part is taken as a share of all rows here; a validation split moves it by a few.
        """
        bounds = cuts(x.rows, replicas)
        found: dict[int, dict[str, int]] = {i: {} for i in range(replicas)}
        part = 0
        for number, key in enumerate(x.keys):
            start, stop = x.starts[number], x.starts[number + 1]
            while part + 1 < replicas and bounds[part + 1] <= start:
                part += 1
            ts = self.scheduler.tasks.get(key)
            addresses = [ws.address for ws in ts.who_has] if ts is not None and ts.who_has else []
            for i in range(part, replicas):
                if bounds[i] >= stop:
                    break
                rows = min(stop, bounds[i + 1]) - max(start, bounds[i])
                for address in addresses:
                    found[i][address] = found[i].get(address, 0) + rows
        return found

    async def status(
        self, job: str, wait: float = 0.0, seen: str | None = None, brief: bool = False
    ) -> dict[str, Any]:
        """The job's status; with ``wait`` only once its state is not ``seen``, or time is out."""
        record = self._record(job)
        if wait and record.machine.state == seen:
            async with record.changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(
                        record.changed.wait_for(lambda: record.machine.state != seen), wait
                    )
        return self._describe(record, brief=brief and not record.machine.terminal)

    def list_jobs(self) -> list[dict[str, Any]]:
        return [self._describe(record, brief=True) for record in self.jobs.values()]

    def cancel(self, job: str, why: str) -> dict[str, Any]:
        record = self._record(job)
        self._handle(record, Cancel(why))
        return self._describe(record)

    def stuck(self) -> list[str]:
        """Some tasks that no worker may run."""
        return [str(ts.key) for ts in list(self.scheduler.unrunnable)[:3]]

    def release(self, job: str) -> None:
        """Let go of the result of an ended job."""
        record = self._record(job)
        if record.machine.terminal:
            for future in record.futures.values():
                future.release()
            record.futures.clear()

    def attach(self, job: str, client: str | None) -> dict[str, Any]:
        """A client has come (back) to a job; an attached job lives on with it."""
        record = self._record(job)
        if record.attached and client is not None and not record.machine.terminal:
            record.owners.add(client)
            self._handle(record, ClientBack())
        return self._describe(record)

    def _record(self, job: str) -> Record:
        if job not in self.jobs:
            known = ", ".join(list(self.jobs)[-5:]) or "none"
            raise JobNotFound(f"job {job!r}: not on this cluster; the last ones here: {known}")
        return self.jobs[job]

    def _describe(self, record: Record, *, brief: bool = False) -> dict[str, Any]:
        beat = heartbeat_interval(len(self.scheduler.workers))
        stall = self.settings.stall
        return record.describe(self._now(), stall, stall + 2 * beat, brief=brief)

    # -- handlers for hosts --------------------------------------------------------------------

    async def hello(
        self, address: str, version: str | None, problem: str | None = None, blas: str = ""
    ) -> None:
        if address not in self.membership.members:
            self.add_worker(self.scheduler, address)
        if address not in self.membership.members:
            return
        self.membership.handle(Hello(address, version, problem, blas), self._now())
        if problem or version != __version__:
            member = self.membership.members[address]
            logger.warning("%s cannot train: %s", member, member.problem)

    async def ready(
        self, job: str, generation: int, address: str, shared: bool, wait: float
    ) -> dict[str, Any]:
        record = self._record(job)
        self._handle(record, HostReady(generation, address, shared))
        return await self._answer(
            record,
            wait,
            lambda m: m.state in (State.RUNNING, State.STOPPING),
            lambda m: {"shared": m.shared},
        )

    async def barrier(
        self,
        job: str,
        generation: int,
        address: str,
        epoch: int,
        phase: str,
        payload: dict[str, Any],
        wait: float,
    ) -> dict[str, Any]:
        record = self._record(job)
        if record.machine.host(address).replicas or phase == "opened":
            self._handle(record, Reached(generation, address, epoch, phase, payload))
        key = (epoch, phase)
        return await self._answer(
            record,
            wait,
            lambda m: key in m.settled,
            # At the end the chief writes the history beside the parameters.
            lambda m: {"stop": m.settled[key], "history": m.history if m.settled[key] else None},
        )

    async def _answer(self, record: Record, wait: float, go: Any, extra: Any) -> dict[str, Any]:
        """A long poll: ``go`` with what is decided, ``over`` with why the job stops, or neither."""
        machine = record.machine

        def over() -> bool:
            return machine.terminal or (
                machine.outcome is not None and machine.outcome.state is not State.SUCCEEDED
            )

        def settled() -> bool:
            return over() or go(machine)

        if not settled():
            async with record.changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(record.changed.wait_for(settled), wait)
        if over():
            failure = machine.outcome.failure if machine.outcome else None
            return {"go": False, "over": failure.message if failure else "it has ended"}
        if go(machine):
            return {"go": True, "over": None, **extra(machine)}
        return {"go": False, "over": None}

    async def failed(
        self, job: str, generation: int, address: str, failure: dict[str, Any]
    ) -> None:
        self._handle(self._record(job), HostFailed(generation, address, Failure(**failure)))


def _name(scheduler: Scheduler, address: str) -> str:
    """The name that somebody gave a worker; Dask's own is its address."""
    name = str(scheduler.workers[address].name)
    return "" if name == address else name


def _slug(name: str | None) -> str:
    """A readable beginning for an id: letters, digits and dashes alone."""
    if not name:
        return ""
    text = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower())
    return f"{text.strip('-')[:24].strip('-')}-".lstrip("-")


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("dtrain master", exc_info=task.exception())
