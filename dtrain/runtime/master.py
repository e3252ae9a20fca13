"""The master: a scheduler plugin that decides; it never carries a parameter or waits in a step.

It owns the pure machines (:mod:`dtrain.machines.membership`, :mod:`dtrain.machines.jobs`) and
hears what Dask, clients and hosts have to say.  :mod:`.dispatch` acts on the machines' commands,
:mod:`.watch` looks after the workers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import platform
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import heartbeat_interval

from dtrain import metrics
from dtrain._version import __version__
from dtrain.callbacks import enough, policies
from dtrain.config import Settings, seconds, settings
from dtrain.devices import lacking
from dtrain.errors import ClusterError, DataError, JobNotFound, SessionNotFound
from dtrain.machines.jobs import (
    Cancel,
    Change,
    ClientBack,
    ClientGone,
    Command,
    End,
    Event,
    HostFailed,
    HostReady,
    JobMachine,
    Limits,
    Noted,
    Place,
    Reached,
    State,
    Tick,
    WorkerLost,
)
from dtrain.machines.jobs import Launch as LaunchCommand
from dtrain.machines.jobs import Stop as StopCommand
from dtrain.machines.membership import (
    Beat,
    Found,
    Hello,
    Joined,
    Left,
    Lost,
    Membership,
    Retiring,
    Stuck,
)
from dtrain.messages import Failure
from dtrain.runtime import frames
from dtrain.runtime.dispatch import FORGET, Dispatch
from dtrain.runtime.placement import better
from dtrain.runtime.queues.master import Directory
from dtrain.runtime.record import Record
from dtrain.runtime.rpc import answering
from dtrain.runtime.sessions.master import Sessions
from dtrain.runtime.stub import NAME, worker_plugin
from dtrain.runtime.transport.meeting import forget
from dtrain.runtime.transport.segment import discard
from dtrain.runtime.watch import Retirement, Watch
from dtrain.spec import JobSpec

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dtrain.master")

#: Ended jobs that are remembered.
_KEPT = 1000

#: Seconds between two looks at leases, deadlines and heartbeats.
_TICK = 0.25

#: Seconds for which no worker must have come before jobs spread to new ones: they often come
#: together.
_SETTLED = 0.5

#: Steps of its usual length that a replica may be in user code before it is given up.
_STEPS = 10


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
            until = self.now() + self.settings.call_deadline
            while NAME not in scheduler.plugins and self.now() < until:
                await asyncio.sleep(0.01)
            return
        self.scheduler = scheduler
        frames.guard()
        self.membership = Membership(
            __version__, self.settings.hello_deadline, self.settings.progress_deadline
        )
        self.watch = Watch(scheduler, self.membership, self.settings, self._lose, self.spawn)
        self.retirement = Retirement(scheduler, self.membership, self._leave, self._found)
        #: when the last worker came that can train
        self._came = 0.0
        self.dispatch = Dispatch(self)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.directory = Directory(scheduler, self.membership, self.settings, self.spawn)
        self.sessions = Sessions(
            scheduler, self.membership, self.settings, self.spawn, self.directory.list_queues
        )
        self.handlers = {
            **self.directory.handlers,
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
            "dtrain_note": self.note,
            "dtrain_newest": self.newest,
            "dtrain_history": self.history,
            "dtrain_alive": self.alive,
            "dtrain_events": self.events,
            "dtrain_lost": self.lost,
            "dtrain_leaving": self.leaving,
            **self.sessions.handlers,
            "dtrain_session_reset": self.reset_session,
        }
        for op, handler in self.handlers.items():
            scheduler.handlers[op] = answering(handler)
        for ws in scheduler.workers.values():
            self.membership.handle(Joined(ws.address, _name(scheduler, ws.address)), self.now())
        self.spawn(self._watch())
        await scheduler.register_worker_plugin(
            None, dumps(worker_plugin()), name=NAME, idempotent=False
        )

    async def before_close(self) -> None:
        self.scheduler.extensions.pop(NAME, None)
        self.retirement.undo()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Nobody goes on with a job without its master.
        for record in self.jobs.values():
            # Here, not in a thread: when a script just ends there are no threads to be had.
            forget(record.id)
            if record.file is not None:
                discard(record.file)
        for file in self.directory.files:
            discard(file)
        await self.dispatch.close()

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)
        return task

    @staticmethod
    def now() -> float:
        return time.monotonic()

    # -- what Dask tells us --------------------------------------------------------------------

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        if worker not in scheduler.workers:
            return
        self.membership.handle(Joined(worker, _name(scheduler, worker)), self.now())

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        for lost in self.membership.handle(Left(worker), self.now()):
            assert isinstance(lost, Lost)
            self._lose(lost)

    def _lose(self, lost: Lost) -> None:
        """A worker is gone, or fenced: its jobs go on without it."""
        self.directory.lose_worker(lost.address)
        for record in list(self.jobs.values()):
            generation = record.machine.generation
            self.handle(record, WorkerLost(lost.address, lost.why))
            if record.machine.generation == generation and lost.address in record.futures:
                record.futures.pop(lost.address).release()
        self.sessions.lose(lost.address, lost.why)
        if lost.address in self.scheduler.workers:
            self.dispatch.renew(lost.address)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self.directory.lose_client(client)
        for record in self.jobs.values():
            if client in record.owners:
                record.owners.discard(client)
                if not record.owners:
                    self.handle(record, ClientGone())
        self.sessions.remove_client(client)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            now = self.now()
            for address, member in list(self.membership.members.items()):
                ws = self.scheduler.workers.get(address)
                if ws is None:
                    self.remove_worker(self.scheduler, address)
                    continue
                summary = ws.metrics.get("dtrain")
                if summary is not None and summary is not member.summary:
                    self._found(self.membership.handle(Beat(address, summary), now))
                    self._progress(address, summary)
            self.watch.look(now, _TICK)
            for record in list(self.jobs.values()):
                self.handle(record, Tick())
                if record.machine.state is State.RUNNING:
                    self._give_up_hanging(record, now)
                    self._spread(record, now)
            self._forget(now)
            self.sessions.tick()
            self.directory.tick(now, self.sessions.in_use)

    def _found(self, commands: Any) -> None:
        for command in commands:
            if isinstance(command, Found):
                self._came = self.now()
                self.sessions.stays(command.address)

    def _give_up_hanging(self, record: Record, now: float) -> None:
        """A replica that is in user code without end holds up all others."""
        settings = self.settings
        found = record.hanging(now, settings.progress_deadline, settings.step_deadline, _STEPS)
        for address, words in found:
            for command in self.membership.handle(Stuck(address, words), now):
                assert isinstance(command, Lost)
                logger.warning("job %s: worker %s %s", record.id, address, words)
                self._lose(command)

    def _spread(self, record: Record, now: float) -> None:
        """Replicas move to workers that have come, where that takes load off others."""
        if now - self._came < _SETTLED or record.spread == self._came:
            return
        record.spread = self._came
        machine = record.machine
        here = {h.address for h in machine.hosts}
        fresh = [
            m
            for m in self.membership.able(record.spec.device)
            if m.address not in here and self.dispatch.idle(m)
        ]
        if fresh and better(machine.hosts, len(here) + len(fresh), record.replicas):
            names = ", ".join(map(str, fresh))
            self.handle(record, Change(f"can go on with more workers: {names}"))

    async def _leave(self, addresses: list[str]) -> None:
        """Jobs and sessions leave these workers; returns once they are gone, or cannot go."""
        until = self.now() + self.settings.prepare_deadline
        # All of them are told first, so that none waits for another.
        leaving = [r for r in list(self.jobs.values()) if self._leave_one(r, addresses)]
        moving = [
            self.spawn(self.sessions.move_away(addresses, until)),
            self.spawn(self.directory.move_away(addresses, until)),
        ]
        for record in leaving:
            await self._until(record, lambda m: m.state is not State.RECOVERING or m.placing, until)
        await asyncio.wait(moving)
        if set(self.scheduler.workers) <= set(addresses):
            # Nobody stays who could keep a result.  Dask would find that it cannot move them, and
            # tell workers that are closing already to run on, which then close twice.
            for record in self.jobs.values():
                if record.machine.terminal:
                    self.dispatch.release(record)

    def _leave_one(self, record: Record, addresses: list[str]) -> bool:
        """A job leaves these workers; whether it has, or has had, a part on them."""
        machine, origin = record.machine, record.machine.origin
        hosts = [h for h in machine.hosts if h.address in addresses]
        needed = () if origin is None or machine.state is State.RUNNING else origin.hosts
        if machine.terminal or not (hosts or any(h.address in addresses for h in needed)):
            return False
        if hosts:
            self.handle(record, Change(f"about to leave: {', '.join(map(str, hosts))}"))
        return True

    async def _until(self, record: Record, settled: Any, until: float) -> None:
        async with record.changed:
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    record.changed.wait_for(lambda: settled(record.machine)),
                    max(until - self.now(), 0.01),
                )

    def _forget(self, now: float) -> None:
        """Drop ended jobs whose time is over, and the oldest beyond the number that is kept."""
        ended = [r for r in self.jobs.values() if r.machine.terminal]
        for number, record in enumerate(ended):
            old = now - record.machine.entered > self.settings.result_ttl
            if old or number < len(ended) - _KEPT:
                self.dispatch.release(record)
                del self.jobs[record.id]

    def _progress(self, address: str, summary: Mapping[str, Any]) -> None:
        for job, report in summary.items():
            record = self.jobs.get(job)
            if record is None or report["generation"] > record.machine.generation:
                continue
            if record.machine.terminal or report["generation"] < record.machine.generation:
                # It was stopped when the others were told, and has woken up.
                self._tell_again(record, address, report["generation"])
            else:
                record.heard(address, report, self.now())

    def _tell_again(self, record: Record, address: str, generation: int) -> None:
        if record.told.get(address) != generation:
            record.told[address] = generation
            why = "another generation of the job has begun"
            over = record.machine.terminal
            self.spawn(self.dispatch.stop_host(record, address, generation, why, over))

    # -- acting on the machines ----------------------------------------------------------------

    def handle(self, record: Record, event: Event) -> None:
        machine = record.machine
        before = machine.state, machine.generation, len(machine.settled), bool(machine.hosts)
        origin = machine.origin
        for command in machine.handle(event, self.now()):
            self._act(record, command)
        # Whoever waits is woken when something is settled, not by each that arrives.
        if origin is not None and machine.origin is not origin and machine.generation == before[1]:
            self.spawn(self.dispatch.drop_former(record))
        now = machine.state, machine.generation, len(machine.settled), bool(machine.hosts)
        if now != before:
            self.spawn(self.announce(record))

    def _act(self, record: Record, command: Command) -> None:
        if isinstance(command, Place):
            self.dispatch.place(record)
        elif isinstance(command, LaunchCommand):
            self.spawn(self.dispatch.launch(record))
        elif isinstance(command, StopCommand):
            for address in command.addresses:
                record.told[address] = command.generation
                self.spawn(
                    self.dispatch.stop_host(
                        record, address, command.generation, command.why, command.over
                    )
                )
        elif isinstance(command, End):
            self.spawn(self.dispatch.end(record))

    async def announce(self, record: Record) -> None:
        async with record.changed:
            record.changed.notify_all()

    # -- handlers for clients ------------------------------------------------------------------

    async def info(self, settle: bool = False) -> dict[str, Any]:
        """Versions, and which workers can train; ``settle``: once all have said hello or should."""
        while settle and self.membership.pending(self.now()):
            await asyncio.sleep(0.02)
        return {
            "version": __version__,
            "python": platform.python_version(),
            "address": self.scheduler.address,
            "ready": [[m.address, m.name] for m in self.membership.ready()],
            "problems": [[str(m), problem] for m, problem in self.membership.problems()],
            "versions": {m.address: m.version for m in self.membership.members.values()},
            "blas": {m.address: m.blas for m in self.membership.members.values()},
            "devices": {
                m.address: [list(m.devices), m.no_gpu] for m in self.membership.members.values()
            },
        }

    def submit(
        self,
        spec: dict[str, Any],
        model: bytes,
        data: bytes,
        client: str | None,
        placement: bytes | None = None,
    ) -> dict[str, Any]:
        """Take a job; it is launched at once.  The client holds its keys until this answers."""
        from distributed.protocol.pickle import loads

        plan = loads(data)
        asked = JobSpec.from_dict(spec)
        every, ready = self.membership.ready(), self.membership.able(asked.device)
        if not every:
            raise ClusterError(f"no worker can train; {self._problems()}")
        if not ready:
            raise lacking(asked.device, [(str(m), m.devices, m.no_gpu) for m in every])
        least = asked.recovery.min_workers
        if len(ready) < least:
            raise ClusterError(
                f"found {len(ready)} workers that can train on device {asked.device!r}, "
                f"expected at least {least} (recovery.min_workers)"
            )
        keys = [key for array in plan.arrays for key in array.keys]
        lost = [key for key in keys if key not in self.scheduler.tasks]
        if lost:
            raise DataError(f"chunk {lost[0]!r} is not on the cluster; expected it persisted")
        id = f"{_slug(asked.name)}{uuid.uuid4().hex[:8]}"
        replicas = asked.replicas or len(ready)
        resolved = asked.resolved(replicas=replicas, workers=len(ready))
        machine = JobMachine(
            id,
            Limits(
                prepare_deadline=self.settings.prepare_deadline,
                stop_grace=self.settings.stop_grace,
                client_lease=self.settings.client_lease,
                max_losses=asked.recovery.max_losses,
                min_workers=asked.recovery.min_workers,
                recovery_deadline=seconds("recovery.deadline", asked.recovery.deadline),
            ),
            self.now(),
            functools.partial(metrics.epoch_record, replicas=replicas),
            functools.partial(enough, policies(asked)),
        )
        record = Record(machine, resolved, client, plan)
        record.model, record.placement = model, placement
        self.scheduler.client_desires_keys(keys, record.hold)
        self.jobs[id] = record
        self.dispatch.place(record)
        return self._describe(record)

    def _problems(self) -> str:
        problems = [f"{member}: {problem}" for member, problem in self.membership.problems()]
        return "; ".join(problems) or "the cluster has no workers"

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
        if record.machine.terminal:
            # Whoever hears of the end finds nothing of the job left.
            with suppress(TimeoutError):
                await asyncio.wait_for(record.clean.wait(), 2 * FORGET)
        return self._describe(record, brief=brief and not record.machine.terminal)

    def events(self, job: str) -> list[dict[str, Any]]:
        """All that has happened to a job."""
        return self._record(job).events()

    def list_jobs(self) -> list[dict[str, Any]]:
        return [self._describe(record, brief=True) for record in self.jobs.values()]

    def cancel(self, job: str, why: str) -> dict[str, Any]:
        record = self._record(job)
        self.handle(record, Cancel(why))
        return self._describe(record)

    def stuck(self) -> list[str]:
        """Some tasks that no worker may run."""
        return [str(ts.key) for ts in list(self.scheduler.unrunnable)[:3]]

    def release(self, job: str) -> None:
        """Let go of the result of an ended job."""
        record = self._record(job)
        if record.machine.terminal:
            self.dispatch.release(record)

    def attach(self, job: str, client: str | None) -> dict[str, Any]:
        """A client has come (back) to a job; an attached job lives on with it."""
        record = self._record(job)
        if record.attached and client is not None and not record.machine.terminal:
            record.owners.add(client)
            self.handle(record, ClientBack())
        return self._describe(record)

    def _record(self, job: str) -> Record:
        if job not in self.jobs:
            known = ", ".join(list(self.jobs)[-5:]) or "none"
            raise JobNotFound(f"job {job!r}: not on this cluster; the last ones here: {known}")
        return self.jobs[job]

    def _describe(self, record: Record, *, brief: bool = False) -> dict[str, Any]:
        beat = heartbeat_interval(len(self.scheduler.workers))
        stall = self.settings.stall
        described = record.describe(self.now(), stall, stall + 2 * beat, brief=brief)
        if record.machine.state is State.SUCCEEDED:
            described["result"] = self._where(record)
        return described

    def _where(self, record: Record) -> tuple[Any, str] | None:
        """The key of a job's result, and the worker that has it: the chief, or that of the copy."""
        chief = record.machine.hosts[0].address
        for key in record.result_keys:
            ts = self.scheduler.tasks.get(key)
            holders = sorted(ws.address for ws in (ts.who_has or ())) if ts is not None else []
            if holders:
                return key, chief if chief in holders else holders[0]
        return None

    async def reset_session(self, session: str, **message: Any) -> None:
        """End a session's variables, its queues and its readers; nothing of them is left."""
        ended = await self.directory.reset(session)
        try:
            await self.sessions.reset(session, **message)
        except SessionNotFound:
            # It may never have had variables.
            if not ended:
                raise

    # -- handlers for hosts --------------------------------------------------------------------

    async def hello(
        self,
        address: str,
        version: str | None,
        problem: str | None = None,
        blas: str = "",
        process: dict[str, Any] | None = None,
        devices: Sequence[str] = ("cpu",),
        no_gpu: str = "",
    ) -> None:
        if address not in self.membership.members:
            self.add_worker(self.scheduler, address)
        if address not in self.membership.members:
            return
        event = Hello(address, version, problem, blas, process, tuple(devices), no_gpu)
        self._found(self.membership.handle(event, self.now()))
        if problem or version != __version__:
            member = self.membership.members[address]
            logger.warning("%s cannot train: %s", member, member.problem)

    async def ready(
        self,
        job: str,
        generation: int,
        address: str,
        shared: bool,
        wait: float,
        device: str = "cpu",
        restored: dict[str, Any] | None = None,
        meeting: dict[str, Any] | None = None,
        shards: dict[str, list[int]] | None = None,
    ) -> dict[str, Any]:
        record = self._record(job)
        found = None if restored is None else record.restored(restored)
        placed = None
        if generation == record.machine.generation:
            record.devices[address] = device
        if shards is not None:
            placed = tuple(shards["hosts"])
            if generation == record.machine.generation:
                record.shard_bytes = shards["bytes"]
        self.handle(record, HostReady(generation, address, shared, found, meeting, placed))
        return await self._answer(
            record,
            generation,
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
        record.check(generation)
        record.count(generation, payload.get("steps", {}))
        training = bool(record.machine.host(address).replicas)
        if training or phase == "opened":
            self.handle(record, Reached(generation, address, epoch, phase, payload))
        key = (epoch, phase)

        def settled(m: JobMachine) -> bool:
            # Those without replicas do not see that there is nothing left to do.
            return key in m.settled or (not training and m.outcome is not None)

        def extra(m: JobMachine) -> dict[str, Any]:
            recorded = phase == "evaluated" and training
            return {
                "stop": m.settled.get(key, True),
                "record": m.history[epoch] if recorded else None,
                "ledger": m.ledger if recorded else None,
            }

        return await self._answer(record, generation, wait, settled, extra)

    async def _answer(
        self, record: Record, generation: int, wait: float, go: Any, extra: Any
    ) -> dict[str, Any]:
        """A long poll: ``go`` with what is decided, ``over`` with why the job stops, or neither."""
        machine = record.machine

        def over() -> bool:
            return machine.terminal or (
                machine.outcome is not None and machine.outcome.state is not State.SUCCEEDED
            )

        def settled() -> bool:
            return machine.generation != generation or over() or go(machine)

        if not settled():
            async with record.changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(record.changed.wait_for(settled), wait)
        record.check(generation)
        if over():
            failure = machine.outcome.failure if machine.outcome else None
            return {"go": False, "over": failure.message if failure else "it has ended"}
        if go(machine):
            return {"go": True, "over": None, **extra(machine)}
        return {"go": False, "over": None}

    async def failed(
        self, job: str, generation: int, address: str, failure: dict[str, Any]
    ) -> None:
        self.handle(self._record(job), HostFailed(generation, address, Failure(**failure)))

    def leaving(self, address: str) -> None:
        """A worker is closing, and nobody has retired it: its jobs leave it at once."""
        self.membership.handle(Retiring(address), self.now())
        for record in list(self.jobs.values()):
            self._leave_one(record, [address])

    def note(self, job: str, generation: int, words: str, saved: int | None) -> None:
        self.handle(self._record(job), Noted(generation, words, saved))

    def newest(self, job: str, generation: int) -> None:
        """Whether a host may still write for its job: FencedError if not."""
        self._record(job).check(generation)

    def lost(self, keys: list[Any]) -> str | None:
        """Why chunks will never be in memory again, in words; None: they are, or will be."""
        for key in keys:
            ts = self.scheduler.tasks.get(key)
            if ts is None or ts.state == "forgotten":
                return (
                    f"chunk {key!r} was in the memory of a worker that has died; expected data "
                    "that can be computed anew"
                )
            if ts.state == "erred":
                return (
                    f"chunk {key!r} was lost, and computing it anew has failed: {ts.exception_text}"
                )
        return None

    def history(self, job: str, generation: int) -> dict[str, Any]:
        """The epochs that are over, and the account of gradients as of then; for a chief."""
        record = self._record(job)
        record.check(generation)
        return {"history": record.machine.history, "ledger": record.machine.ledger}

    def alive(self, names: list[str]) -> list[str]:
        """Which of these files belong to jobs that are not over, or to readers."""
        live = [record for record in self.jobs.values() if not record.clean.is_set()]
        files = {record.file for record in live} | self.directory.files
        return [
            name
            for name in names
            if name in files or any(name.startswith(f"{record.id}-g") for record in live)
        ]


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
