"""The worker service: one per Dask worker; hosts the shards and replicas of jobs there.

Handlers run in the worker's event loop and never do array maths.  Replicas run in threads of
Dask tasks; what they need of the loop they get through :meth:`WorkerService.start`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from distributed.protocol import to_serialize
from distributed.utils import offload

from dtrain._version import __version__
from dtrain.errors import DataError, FencedError
from dtrain.messages import Contribution, Push, Reduced
from dtrain.runtime import blas
from dtrain.runtime.data import read_rows
from dtrain.runtime.rpc import answering, ask
from dtrain.runtime.transport.meeting import describe, forget
from dtrain.runtime.transport.segment import sweep_all

if TYPE_CHECKING:
    from distributed import Worker

    from dtrain.runtime.host import Host
    from dtrain.runtime.launch import Launch

logger = logging.getLogger("dtrain.worker")

#: Seconds that a replica has to leave its loop when its worker closes; Dask gives it about 4.
_LEAVE = 2.0

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
        #: job id -> its newest generation here
        self.hosts: dict[str, Host] = {}
        #: job id -> up to which generation it was stopped, maybe before it began here, and why
        self._stops: dict[str, tuple[int, str]] = {}
        self._arrival = asyncio.Condition()
        #: chunk -> the worker it was last seen at; a hint, renewed when it fails
        self._holders: dict[Any, str] = {}
        self.handlers = {
            "dtrain_stop": self.stop,
            "dtrain_initial": self.initial,
            "dtrain_push": self.push,
            "dtrain_reduced": self.reduced,
            "dtrain_push_pull": self.push_pull,
            "dtrain_take": self.take,
            "dtrain_rows": self.rows,
        }

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Install the handlers and say hello to the master."""
        _services[self.address] = self
        for op, handler in self.handlers.items():
            self.worker.handlers[op] = answering(cast(Callable[..., Any], handler))
        self.worker.metrics["dtrain"] = self.summary
        # What jobs before left here, whose workers all died at once.
        for swept in await offload(sweep_all):
            logger.info("%s: removed shared memory that nobody holds: %s", self.address, swept)
        await ask(
            self.worker.scheduler,
            "dtrain_hello",
            10.0,
            address=self.address,
            version=__version__,
            blas=await offload(blas.describe),
        )

    async def close(self) -> None:
        """Leave no job and no thread behind; late messages still get a typed refusal."""
        self.worker.metrics.pop("dtrain", None)
        _services.pop(self.address, None)
        for host in list(self.hosts.values()):
            host.stop("its worker is closing")
            # What a thread still looks at is not closed under it; the process goes soon anyway.
            left = await offload(lambda host=host: host.left.wait(_LEAVE))
            await offload(host.close if left else host.abandon)
        self.hosts.clear()

    async def summary(self, worker: Any) -> dict[str, Any]:
        """What the heartbeat carries to the master, free of charge."""
        return {job: host.summary() for job, host in self.hosts.items()}

    @property
    def memory_limit(self) -> int | None:
        """Bytes that Dask allows the worker; None: no limit."""
        return self.worker.memory_manager.memory_limit or None

    # -- for the threads of replicas -----------------------------------------------------------

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the worker's event loop; from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.worker.loop.asyncio_loop)

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
        generation, why = self._stops.get(launch.job, (0, ""))
        if generation >= launch.generation:
            host.stop(why)
        self.start(self._announce())
        return host

    def release(self, host: Host) -> None:
        host.close()
        if self.hosts.get(host.launch.job) is host:
            del self.hosts[host.launch.job]
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

    def fetch_rows(
        self, wanted: Mapping[Any, np.ndarray], deadline: float
    ) -> Future[dict[Any, np.ndarray]]:
        """Rows of chunks, wherever they are."""
        return self.start(self._fetch_rows(wanted, deadline))

    async def _fetch_rows(
        self, wanted: Mapping[Any, np.ndarray], deadline: float
    ) -> dict[Any, np.ndarray]:
        here = {key: rows for key, rows in wanted.items() if key in self.worker.data}
        found = await read_rows(self.worker.data, here)
        away = [key for key in wanted if key not in here]
        if not away:
            return found
        try:
            found.update(await self._fetch_away(away, wanted, deadline))
        except (OSError, DataError):
            # A chunk may have moved: Dask computes lost ones anew elsewhere.  Look once more.
            for key in away:
                self._holders.pop(key, None)
            found.update(await self._fetch_away(away, wanted, deadline))
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

    async def stop(self, job: str, generation: int, why: str) -> None:
        self._stops[job] = generation, why
        while len(self._stops) > _STOPS:
            del self._stops[next(iter(self._stops))]
        host = self.hosts.get(job)
        if host is None:
            # Its task has not begun here; a chief that has died may have left a file all the same.
            await offload(forget, job, generation)
        elif host.launch.generation <= generation:
            host.stop(why)

    async def initial(self, job: str, generation: int, wait: float) -> dict[str, Any] | None:
        """The layout and the first version of the parameters, from the chief; None: not yet."""
        if not await self._present(job, generation, wait):
            return None  # its task has not begun; the master has a deadline for that
        host = await self._host(job, generation)
        values = await host.initial(wait)
        if values is None:
            return None
        layout, buffer, met = values
        return {
            "layout": layout.to_dict(),
            "buffer": to_serialize(buffer),
            "meeting": describe(met),
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
        return await host.pushed(shard, step, parts, grads, wait)

    async def reduced(
        self, job: str, generation: int, step: int, shard: int, problem: str | None, wait: float
    ) -> list[Any] | None:
        """A shard's report to the lead; answered with the verdict; None: not yet."""
        host = await self._host(job, generation, wait)
        return await host.reported(Reduced(generation, step, shard, problem), wait)

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
        reply = await offload(lambda: host.push_pulled(shard, push))
        return {**reply, "params": [to_serialize(array) for array in reply["params"]]}

    async def take(
        self, job: str, generation: int, replica: int, request: int, epoch: int
    ) -> tuple[int, int, int] | None:
        """The next batch of a replica (asynchronous mode)."""
        host = await self._host(job, generation, 1.0)
        return host.taken(replica, request, epoch)

    async def rows(self, keys: list[Any], rows: list[np.ndarray]) -> list[Any]:
        """Rows of chunks that this worker holds."""
        missing = [key for key in keys if key not in self.worker.data]
        if missing:
            raise DataError(f"chunk {missing[0]!r} is not at {self.address} any more")
        found = await read_rows(self.worker.data, dict(zip(keys, rows, strict=True)))
        return [to_serialize(found[key]) for key in keys]
