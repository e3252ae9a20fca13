"""The worker service: one per Dask worker; hosts the shards and replicas of jobs there.

Handlers run in the worker's event loop and never do array maths.  Replicas run in threads of
Dask tasks; what they need of the loop they get through :meth:`WorkerService.start`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from distributed.protocol import to_serialize
from distributed.utils import offload

from dtrain._version import __version__
from dtrain.arrays import devices
from dtrain.errors import DataError, DTrainError, FencedError
from dtrain.machines.quorum import Join
from dtrain.messages import Contribution, Measured, Push, Reduced
from dtrain.runtime import blas, frames, process
from dtrain.runtime.best import Bests
from dtrain.runtime.inputfile import FileRef, InputFiles
from dtrain.runtime.queues.worker import Queues
from dtrain.runtime.rows import read_rows
from dtrain.runtime.rpc import answering, ask
from dtrain.runtime.sessions.keeping import Keeper
from dtrain.runtime.sessions.known import Acquaintance
from dtrain.runtime.sessions.worker import Containers
from dtrain.runtime.transport.meeting import forget
from dtrain.runtime.transport.segment import Spare, answers, owned, sparing_answerers, sweep_all

if TYPE_CHECKING:
    from distributed import Worker

    from dtrain.runtime.host import Host
    from dtrain.runtime.launch import Launch

logger = logging.getLogger("dtrain.worker")

#: Seconds that a replica has to leave its loop when its worker closes; Dask gives it about 4.
_LEAVE = 2.0

#: Seconds that finding the GPUs may take, which imports CuPy; the master waits for the hello.
_FIND = 8.0

#: Seconds between two looks for a chunk that is being computed anew.
_RETRY = 0.1

#: How many jobs that were stopped are remembered.
_STOPS = 100

#: The services of this process, by their worker's address: several workers may share a process.
_services: weakref.WeakValueDictionary[str, WorkerService] = weakref.WeakValueDictionary()


def service_at(address: str) -> WorkerService | None:
    """The service of a worker in this very process."""
    return _services.get(address)


class WorkerService:
    """What dtrain is on one worker.

    Parameters
    ----------
    worker : distributed.Worker
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.address: str = worker.address
        #: what a replica may compute on here, and why no GPU is among it, in words
        self.devices: tuple[str, ...] = ("cpu",)
        self.no_gpu = ""
        #: job id -> its newest generation here
        self.hosts: dict[str, Host] = {}
        #: (job id, generation) -> one that has ended, whose shards the newest may have to take over
        self.former: dict[tuple[str, int], Host] = {}
        #: the jobs that had a part here, until the master says that they are over
        self._jobs: set[str] = set()
        #: job id -> seconds that its user code takes here, on the average of late
        self.usual: dict[str, float] = {}
        #: job id -> up to which generation it was stopped, maybe before it began here, and why
        self._stops: dict[str, tuple[int, str, bool]] = {}
        self._arrival = asyncio.Condition()
        #: chunk -> the worker it was last seen at; a hint, renewed when it fails
        self._holders: dict[Any, str] = {}
        self.files = InputFiles(self.address, self._scheduler_address)
        self.queues = Queues(self)
        self.known = Acquaintance(worker)
        self.containers = Containers(worker, self.known.forget)
        #: the parameters of the best epochs of jobs
        self.bests = Bests(self)
        self.handlers = {
            **self.bests.handlers,
            **self.queues.handlers,
            **self.containers.handlers,
            **Keeper(worker, self.containers).handlers,
            "dtrain_stop": self.stop,
            "dtrain_initial": self.initial,
            "dtrain_first": self.first,
            "dtrain_report": self.report,
            "dtrain_shard": self.shard,
            "dtrain_drop": self.drop,
            "dtrain_forget": self.forget,
            "dtrain_look": self.look,
            "dtrain_push": self.push,
            "dtrain_reduced": self.reduced,
            "dtrain_measured": self.measured,
            "dtrain_closed": self.closed,
            "dtrain_join": self.join,
            "dtrain_push_pull": self.push_pull,
            "dtrain_take": self.take,
            "dtrain_rows": self.rows,
            "dtrain_open_input": self.files.open_input,
            "dtrain_begin_input": self.files.begin_input,
            "dtrain_write_input": self.files.write_input,
            "dtrain_end_input": self.files.end_input,
            "dtrain_forget_input": self.files.forget_input,
            "dtrain_input_rows": self.files.input_rows,
        }

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Install the handlers and say hello to the master."""
        _services[self.address] = self
        frames.guard()
        for op, handler in self.handlers.items():
            self.worker.handlers[op] = answering(cast(Callable[..., Any], handler))
        self.worker.metrics["dtrain"] = self.summary
        # What jobs before left here, whose workers all died at once.
        for swept in await offload(sweep_all, await self._spare()):
            logger.info("%s: removed shared memory that nobody holds: %s", self.address, swept)
        words = await offload(blas.describe)
        self.devices, self.no_gpu = await self._find_devices()
        await ask(
            self.worker.scheduler,
            "dtrain_hello",
            10.0,
            address=self.address,
            version=__version__,
            blas=words,
            process=process.identity(),
            devices=list(self.devices),
            no_gpu=self.no_gpu,
        )

    @staticmethod
    async def _find_devices() -> tuple[tuple[str, ...], str]:
        try:
            return await asyncio.wait_for(offload(devices), _FIND)
        except TimeoutError:
            return ("cpu",), f"CuPy has not found any in {_FIND:g} s"

    async def close(self) -> None:
        """Leave no job and no thread behind; late messages still get a typed refusal."""
        self.worker.metrics.pop("dtrain", None)
        # Asked first: Dask gives a worker that closes a few seconds in all.
        shared = bool(self._jobs or self.files.names)
        alone = shared and not await _away(answers, self._scheduler_address())
        if self.hosts and not alone:
            # Not a loss, if the master hears of it in time.
            with suppress(OSError, DTrainError):
                await self.ask_master("dtrain_leaving", _LEAVE, address=self.address)
        _services.pop(self.address, None)
        self.queues.close()
        self.containers.close()
        # What is shared outlives this worker, for those that go on; without a scheduler nobody can.
        if alone:
            for job in self._jobs:
                await _away(forget, job)
            for name in self.files.names:
                await _away(self.files.forget, name)
        for host in list(self.hosts.values()):
            host.stop("its worker is closing", over=alone)
            # What a thread still looks at is not closed under it; the process goes soon anyway.
            left = await _away(host.left.wait, _LEAVE)
            await _away(host.close if left else host.abandon)
        self.hosts.clear()
        self.former.clear()
        await _away(self.files.close)

    async def _spare(self) -> Spare:
        """What a sweep leaves: the files of jobs that are not over, here or on another cluster.

        Workers that are started anew will want them, though nobody has them mapped now.
        """
        names = await offload(owned)
        alive: set[str] | None = set()
        if names:
            try:
                found = await ask(self.worker.scheduler, "dtrain_alive", 10.0, names=names)
                alive = set(found)
            except (OSError, DTrainError):
                alive = None
        answering, own = sparing_answerers(), self._scheduler_address()

        def spare(name: str, owner: str) -> bool:
            if not owner:
                return False
            # One that has come since the question was asked is left to the next sweep.
            if alive is None or name in alive or name not in names:
                return True
            return owner != own and answering(name, owner)

        return spare

    def _scheduler_address(self) -> str:
        return str(self.worker.scheduler.address)

    async def summary(self, worker: Any) -> dict[str, Any]:
        """What the heartbeat carries to the master, free of charge."""
        return {job: host.summary() for job, host in self.hosts.items()}

    @property
    def memory_limit(self) -> int | None:
        """Bytes that Dask allows the worker; None: no limit."""
        return self.worker.memory_manager.memory_limit or None

    # -- for the threads of replicas -----------------------------------------------------------

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the worker's event loop; from any thread.

        Unlike asyncio's own way from thread to loop, whoever cancels the answer is not told by the
        loop of an error that comes all the same.
        """
        answer: Future[Any] = Future()
        loop = self.worker.loop.asyncio_loop

        def begin() -> None:
            task = asyncio.ensure_future(coroutine)
            answer.add_done_callback(
                lambda a: a.cancelled() and loop.call_soon_threadsafe(task.cancel)
            )
            task.add_done_callback(lambda _: _pass_on(task, answer))

        loop.call_soon_threadsafe(begin)
        return answer

    async def ask(self, address: str, op: str, deadline: float, **message: Any) -> Any:
        return await ask(self.worker.rpc(address), op, deadline, **message)

    async def ask_master(self, op: str, deadline: float, **message: Any) -> Any:
        return await ask(self.worker.scheduler, op, deadline, **message)

    def adopt(self, launch: Launch) -> Host:
        """Open a host for this worker's share of a job; called by the job's task."""
        from dtrain.runtime.host import Host

        known = self.hosts.get(launch.job)
        if known is not None and known.launch.generation >= launch.generation:
            raise FencedError(
                f"job {launch.job}: launch of generation {launch.generation}, "
                f"expected one after {known.launch.generation}"
            )
        host = Host(self, launch)
        self.hosts[launch.job] = host
        self._jobs.add(launch.job)
        # Whoever had a chunk may have died since.
        self._holders.clear()
        generation, why, over = self._stops.get(launch.job, (0, "", False))
        if generation >= launch.generation:
            host.stop(why, over=over)
        self.start(self._announce())
        if known is not None:
            self._succeed(known, launch)
        return host

    def _succeed(self, known: Host, launch: Launch) -> None:
        """A new generation begins where another still is: that one leaves first, if it can.

        User code cannot be told to leave; after the grace time the two are here together.
        """
        if known.has_shards:
            self.former[launch.job, known.generation] = known
        known.stop("another generation of the job has begun", over=False)
        known.left.wait(launch.settings.stop_grace)

    def drop_former(self, host: Host) -> None:
        """The generation of ``host`` has begun: nobody needs the one before any more."""
        self._drop(host.launch.job, host.generation)

    def _drop(self, job: str, before: float) -> None:
        for key in [key for key in self.former if key[0] == job and key[1] < before]:
            del self.former[key]

    def of_generation(self, job: str, generation: int) -> Host:
        """The host of a generation of a job, also of one that has ended."""
        for host in (self.hosts.get(job), self.former.get((job, generation))):
            if host is not None and host.launch.generation == generation:
                return host
        raise FencedError(f"job {job}, generation {generation}: not at {self.address}")

    def release(self, host: Host) -> None:
        host.close()
        if self.hosts.get(host.launch.job) is host:
            del self.hosts[host.launch.job]
            if host.has_shards:
                # The next generation may want what it has committed.
                self.former[host.launch.job, host.generation] = host
        if not self.hosts:
            self._holders.clear()

    async def _announce(self) -> None:
        async with self._arrival:
            self._arrival.notify_all()

    def local_chunks(self, keys: Mapping[int, Any]) -> dict[int, Any]:
        """Those of the chunks that this worker holds; the very objects, not copies."""

        async def find() -> dict[int, Any]:
            return {i: self.worker.data[key] for i, key in keys.items() if key in self.worker.data}

        return self.start(find()).result(60.0)

    def input(self, ref: FileRef) -> np.ndarray | None:
        """The bytes of a job's input file, mapped; None if it is not on this machine."""
        return self.files.open(ref)

    def fetch_rows(
        self, wanted: Mapping[Any, np.ndarray], deadline: float, patience: float
    ) -> Future[dict[Any, np.ndarray]]:
        """Rows of chunks, wherever they are; ``patience``: seconds for those that were lost."""
        return self.start(self._fetch_rows(wanted, deadline, patience))

    async def _fetch_rows(
        self, wanted: Mapping[Any, np.ndarray], deadline: float, patience: float
    ) -> dict[Any, np.ndarray]:
        here = {key: rows for key, rows in wanted.items() if key in self.worker.data}
        found = await read_rows(self.worker.data, here)
        away = [key for key in wanted if key not in here]
        until = time.monotonic() + patience
        while away:
            try:
                found.update(await self._fetch_away(away, wanted, deadline))
                break
            except (OSError, DataError) as error:
                # A chunk may have moved, or be lost: Dask computes it anew, if it can.
                for key in away:
                    self._holders.pop(key, None)
                lost = await self.ask_master("dtrain_lost", deadline, keys=away)
                if lost is not None or time.monotonic() > until:
                    raise DataError(lost or str(error)) from error
            await asyncio.sleep(_RETRY)
        return found

    async def _fetch_away(
        self, keys: Sequence[Any], wanted: Mapping[Any, np.ndarray], deadline: float
    ) -> dict[Any, np.ndarray]:
        """Rows of chunks at other workers, where they were last seen."""
        unknown = [key for key in keys if key not in self._holders]
        if unknown:
            question = self.worker.scheduler.who_has(keys=unknown)
            where = await asyncio.wait_for(question, deadline)
            for key in unknown:
                holders = sorted(where.get(key, ()))
                if not holders:
                    raise DataError(f"chunk {key!r} is on no worker; expected it in memory")
                self._holders[key] = holders[0]
        by_peer: dict[str, list[Any]] = {}
        for key in keys:
            by_peer.setdefault(self._holders[key], []).append(key)
        answers = await asyncio.gather(
            *(
                self.ask(
                    peer,
                    "dtrain_rows",
                    deadline,
                    keys=some,
                    rows=[to_serialize(wanted[key]) for key in some],
                )
                for peer, some in by_peer.items()
            )
        )
        found: dict[Any, np.ndarray] = {}
        for some, arrays in zip(by_peer.values(), answers, strict=True):
            found.update(zip(some, arrays, strict=True))
        return found

    # -- handlers: in the event loop -----------------------------------------------------------

    async def _present(self, job: str, generation: int, seconds: float) -> bool:
        """Whether that generation, or a later one, is here; waits for it."""

        def found() -> bool:
            host = self.hosts.get(job)
            return host is not None and host.launch.generation >= generation

        async with self._arrival:
            if not found():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._arrival.wait_for(found), max(seconds, 1e-3))
            return found()

    async def _host(self, job: str, generation: int, deadline: float = 0.0) -> Host:
        """The host of that generation; waits for its task to start, up to ``deadline``."""

        if not await self._present(job, generation, deadline):
            raise FencedError(f"job {job}, generation {generation}: not at {self.address}")
        host = self.hosts[job]
        if host.launch.generation != generation:
            raise FencedError(
                f"job {job}: message of generation {generation}, expected {host.launch.generation}"
            )
        return host

    async def stop(self, job: str, generation: int, why: str, over: bool) -> None:
        self._stops[job] = generation, why, over
        while len(self._stops) > _STOPS:
            del self._stops[next(iter(self._stops))]
        host = self.hosts.get(job)
        if host is not None and host.launch.generation <= generation:
            host.stop(why, over=over)

    async def drop(self, job: str, before: int) -> None:
        """Another generation has what those before it had committed."""
        self._drop(job, before)

    async def forget(self, job: str, data: str | None) -> None:
        """The job has ended: nothing of it is left on this machine."""
        self._jobs.discard(job)
        self.usual.pop(job, None)
        self.bests.drop(job)
        self._drop(job, math.inf)
        await offload(forget, job)
        if data is not None:
            await self.files.forget_input(data)

    def look(self, processes: list[dict[str, Any]]) -> list[str]:
        """What processes of this machine do; asked by the master of a neighbour."""
        return [process.look(known).value for known in processes]

    async def initial(self, job: str, generation: int, wait: float) -> dict[str, Any] | None:
        """Where the generation begins, and where its hosts meet, from the chief; None: not yet."""
        if not await self._present(job, generation, wait):
            return None  # its task has not begun; the master has a deadline for that
        host = await self._host(job, generation)
        return await host.answers.initial(wait)

    async def first(self, job: str, generation: int, shards: list[int]) -> dict[str, Any]:
        """The parameters that the generation begins with, and the slots of some shards."""
        return (await self._host(job, generation)).answers.first(shards)

    async def report(self, job: str, generation: int, freeze: bool) -> dict[str, Any]:
        return self.of_generation(job, generation).answers.report(freeze=freeze)

    async def shard(self, job: str, generation: int, shard: int, version: int) -> dict[str, Any]:
        host = self.of_generation(job, generation)
        found = await offload(host.answers.shard, shard, version)
        return {
            "version": found["version"],
            "params": [to_serialize(a) for a in found["params"]],
            "slots": {name: [to_serialize(a) for a in of] for name, of in found["slots"].items()},
        }

    async def push(
        self,
        job: str,
        generation: int,
        step: int,
        shard: int,
        contributions: list[tuple[Any, ...]],
        grads: list[list[np.ndarray]],
        wait: float,
    ) -> list[Any] | None:
        """Take gradients of ``step``; answer with the next version of the shard; None: not yet."""
        host = await self._host(job, generation, wait)
        parts = tuple(Contribution(*c) for c in contributions)
        return await host.answers.pushed(shard, step, parts, grads, wait)

    async def reduced(
        self, job: str, generation: int, step: int, shard: int, problem: str | None, wait: float
    ) -> list[Any] | None:
        """A shard's report to the lead; answered with the verdict; None: not yet."""
        host = await self._host(job, generation, wait)
        return await host.answers.reported(Reduced(generation, step, shard, problem), wait)

    async def measured(
        self,
        job: str,
        generation: int,
        step: int,
        stage: int,
        shard: int,
        problem: str | None,
        blocks: np.ndarray,
        sums: np.ndarray,
        wait: float,
    ) -> list[Any] | None:
        """A shard's sums, to the lead; answered with those of all shards; None: not yet."""
        host = await self._host(job, generation, wait)
        event = Measured(generation, step, stage, shard, problem, blocks, sums)
        return await host.answers.measured(event, wait)

    async def closed(
        self, job: str, generation: int, step: int, wait: float
    ) -> tuple[int, ...] | None:
        """Whose gradients make a step, from the lead (with backups); None: not known yet."""
        host = await self._host(job, generation, wait)
        return await host.answers.closed(step, wait)

    async def join(self, job: str, generation: int, replica: int, step: int, epoch: int) -> Any:
        """A replica's batch of a step, from the lead (with backups)."""
        host = await self._host(job, generation, 1.0)
        return host.answers.joined(Join(generation, replica, step, epoch))

    async def push_pull(
        self,
        job: str,
        generation: int,
        shard: int,
        replica: int,
        request: int,
        version: int,
        contribution: tuple[Any, ...] | None,
        epoch: int,
        grads: list[np.ndarray] | None,
    ) -> dict[str, Any]:
        """Apply a gradient at once (asynchronous mode) and answer with the parameters."""
        host = await self._host(job, generation, 1.0)
        push = Push(
            replica,
            request,
            version,
            None if contribution is None else Contribution(*contribution),
            epoch,
            grads,
        )
        reply = await offload(lambda: host.answers.push_pulled(shard, push))
        return {**reply, "params": [to_serialize(array) for array in reply["params"]]}

    async def take(
        self, job: str, generation: int, replica: int, request: int, epoch: int, wait: float
    ) -> Any:
        """The next batch of a replica (asynchronous mode); it may have to wait for others."""
        host = await self._host(job, generation, 1.0)
        return await host.answers.taken(replica, request, epoch, wait)

    async def rows(self, keys: list[Any], rows: list[np.ndarray]) -> list[Any]:
        """Rows of chunks that this worker holds."""
        missing = [key for key in keys if key not in self.worker.data]
        if missing:
            raise DataError(f"chunk {missing[0]!r} is not at {self.address} any more")
        found = await read_rows(self.worker.data, dict(zip(keys, rows, strict=True)))
        return [to_serialize(found[key]) for key in keys]


def _pass_on(task: asyncio.Future[Any], answer: Future[Any]) -> None:
    """What a task has come to, to whoever waits in a thread, if anybody does still."""
    if task.cancelled():
        answer.cancel()
        return
    error = task.exception()
    if not answer.set_running_or_notify_cancel():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


async def _away(function: Callable[..., Any], *args: Any) -> Any:
    """Run it off the event loop; or in it, where a script just ends and has no more threads."""
    try:
        return await offload(function, *args)
    except RuntimeError as error:
        if "cannot schedule new futures" not in str(error):
            raise
        return function(*args)
