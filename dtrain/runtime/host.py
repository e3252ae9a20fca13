"""A job's presence on one worker: its shards, its replicas, its way to the others.

The upper part runs in the thread of the host's Dask task, the lower part answers the others in
the worker's event loop.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol import to_serialize

from dtrain.arrays import aligned_bytes
from dtrain.errors import DeadlineError, ProtocolError
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor
from dtrain.machines.jobs import HostPlan
from dtrain.machines.rounds import Rounds
from dtrain.machines.shard import ShardMachine
from dtrain.messages import Batch, Contribution, Push, Pushed, Reduced, Verdict
from dtrain.optim import Optimizer
from dtrain.partition import partition
from dtrain.runtime import arena as arenas
from dtrain.runtime.arena import Arena, Stopped
from dtrain.runtime.data import Feed, Parts
from dtrain.runtime.launch import Launch
from dtrain.runtime.lead import Account, AsyncLead, SyncLead
from dtrain.runtime.modelfile import check_writable
from dtrain.runtime.shards import AsyncShard, SyncShard
from dtrain.runtime.transport import meeting, open_link
from dtrain.runtime.transport.meeting import Meeting
from dtrain.runtime.transport.segment import Segment
from dtrain.runtime.usercode import calling

if TYPE_CHECKING:
    from dtrain.runtime.worker import WorkerService


class Host:
    """One worker's share of one generation of a job.

    Parameters
    ----------
    service : WorkerService
    launch : Launch
    """

    def __init__(self, service: WorkerService, launch: Launch) -> None:
        self.service = service
        self.launch = launch
        self.generation = launch.generation
        self.plan: HostPlan = launch.host(service.address)
        self.synchronous = launch.spec.mode == "sync"
        self.arena: Arena = None  # type: ignore[assignment]  # until `prepare`
        self.model: Any = None
        self.feed: Feed = None  # type: ignore[assignment]  # until `prepare`
        #: where the processes of this machine meet, if they can; see :mod:`.transport.meeting`
        self.meeting: Meeting | None = None
        #: the chief's own mapping, until the arena is open
        self._made: Segment | None = None
        self.link: Any = None
        #: the gradients that this host accounts for: all of a synchronous job's at the chief,
        #: its own replicas' in asynchronous mode
        self.account: SyncLead | Account | None = None
        #: the job's history, once the master has said stop
        self.history: list[dict[str, Any]] | None = None
        self.epoch = 0
        self._steps: dict[int, int] = dict.fromkeys(self.plan.replicas, 0)
        #: the replica that is in user code, and since when
        self._computing: tuple[int, float] | None = None
        self._on_stop: list[Callable[[], None]] = []
        #: the questions that threads wait for; cancelled when the job is to stop
        self._asked: set[Future[Any]] = set()
        #: set once the thread of the host's task has left
        self.left = threading.Event()
        self._stopped: str | None = None
        self._open = False
        self._closing = threading.Lock()
        self._published = asyncio.Event()

    @property
    def is_chief(self) -> bool:
        return self.launch.chief.address == self.service.address

    # -- in the task's thread: preparing -------------------------------------------------------

    def prepare(self) -> None:
        """Get the model, the parameters, the shards and the data; return when all are ready."""
        spec, data = self.launch.spec, self.launch.data
        if self.is_chief and spec.output is not None:
            check_writable(spec.output)
        with calling("loading the model"):
            self.model = pickle.loads(self.launch.model)
        self.optimizer = Optimizer.from_dict(spec.optimizer)
        if self.is_chief:
            self._initialise()
        else:
            self._fetch()
        self.parts = Parts.of(
            data.x.rows,
            None if data.valid_x is None else data.valid_x.rows,
            fraction=spec.validation_split,
            replicas=self.launch.replicas,
            batch_size=spec.batch_size,
            epochs=spec.epochs,
            steps=spec.steps,
            seed=spec.seed,
        )
        self.feed = Feed(
            data, self.parts, self.service, spec.seed, spec.shuffle,
            self.launch.settings.call_deadline, strays=not self.synchronous,
        )  # fmt: skip
        self.feed.open(self.plan.replicas)
        answer = self._wait_for(
            "dtrain_ready", f"job {self.launch.job} to start", shared=self.meeting is not None
        )
        self._open_arena(shared=answer["shared"])
        # A link looks for the shards, and so all of them must be there.
        self.barrier(0, "opened")
        if self.plan.replicas:
            self.link = open_link(self)
        # Everybody has the first version by now; it is a whole model's worth of memory.
        self.initial_buffer = None

    def _layout_known(self, layout: Layout, buffer: Any) -> None:
        self.layout, self.initial_buffer = layout, buffer
        self.shard_plan = partition(layout, self.launch.spec.shards or 1)
        #: all shards of the job; fewer than asked for where the model has fewer blocks
        self.shards = tuple(range(len(self.shard_plan.shards)))

    def _open_arena(self, *, shared: bool) -> None:
        def make() -> Arena:
            if shared and self.meeting is not None:
                return meeting.join(self, self.meeting)
            return Arena.private(self.layout, self.initial_buffer, 2 if self.synchronous else 1)

        if not shared and self._made is not None:
            meeting.leave(self)
        self.arena = arenas.acquire((self.launch.job, self.generation), make)
        self._open = True
        self._unmake()
        with self.arena.lock:
            if self._stopped is not None:
                self.arena.stop(self._stopped)
        self.arena.add_replicas(self.plan.replicas)
        self._lead(shared=shared)
        if not shared:
            self._host_shards()
            if self.plan.shards:
                self.arena.start(f"dtrain-shards-{self.launch.job}")

    def _initialise(self) -> None:
        rng = np.random.default_rng(self.launch.spec.seed)
        with calling("init of the model"):
            params = self.model.init(rng)
            layout = Layout.of(params)
        buffer = aligned_bytes(layout.nbytes)
        layout.write(buffer, params)
        self._layout_known(layout, buffer)
        called = meeting.call(self)
        if called is not None:
            self.meeting, self._made = called
        self.service.worker.loop.add_callback(self._published.set)

    def _unmake(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def _fetch(self) -> None:
        settings = self.launch.settings
        until = time.monotonic() + settings.prepare_deadline
        chief = self.launch.chief
        while time.monotonic() < until:
            self._check()
            answer = self._answer(
                self.service.ask(
                    chief.address,
                    "dtrain_initial",
                    settings.prepare_deadline,
                    job=self.launch.job,
                    generation=self.generation,
                    wait=settings.poll,
                ),
                settings.prepare_deadline,
            )
            if answer is not None:
                self._layout_known(Layout.from_dict(answer["layout"]), answer["buffer"])
                self.meeting = meeting.find(answer["meeting"])
                return
        raise DeadlineError(
            f"the chief, {chief}, has not initialised the variables "
            f"in {settings.prepare_deadline:.0f} s"
        )

    def _host_shards(self) -> None:
        plan = self.parts.plan
        for index in self.plan.shards:
            if index >= len(self.shards):
                continue
            shard = self.shard_plan.shards[index]
            hosted: SyncShard | AsyncShard
            if self.synchronous:
                hosted = SyncShard(
                    self.arena,
                    shard,
                    ShardMachine(index, self.generation, 0, plan.members),
                    self.optimizer,
                    self.launch.replicas,
                    publish=self._read_from_afar(),
                    report=self._report,
                )
            else:
                hosted = AsyncShard(self.arena, shard, self.optimizer)
            self.arena.shards[index] = hosted

    def _lead(self, *, shared: bool) -> None:
        """The chief has the lead: it runs the machine of the steps, or of the batches."""
        plan = self.parts.plan
        if not self.synchronous:
            self.account = Account()
        if not self.is_chief:
            return
        if not self.synchronous:
            # In shared memory the cursor lies there too, and everyone takes from it.
            self.arena.lead = None if shared else AsyncLead(Cursor(plan, self.generation))
            return
        rounds = Rounds(
            self.generation,
            0,
            len(self.shards),
            self.launch.replicas,
            plan.members,
            lambda step: plan.locate(step)[0],
        )
        self.account = self.arena.lead = SyncLead(rounds, self._decided)

    def _read_from_afar(self) -> bool:
        from dtrain.runtime.worker import service_at

        return any(h.replicas and service_at(h.address) is None for h in self.launch.hosts)

    # -- in the task's thread: training --------------------------------------------------------

    def check(self) -> None:
        """Raise if the job is to stop or has failed; between steps."""
        self.arena.check()

    def _check(self) -> None:
        if self._stopped is not None:
            raise Stopped(self._stopped)

    def _answer(self, question: Coroutine[Any, Any, Any], deadline: float) -> Any:
        """The answer to a question that has this deadline; Stopped as soon as the job stops.

        A peer that has died would keep us for as long as Dask tries to reach it.
        """
        asked = self.service.start(question)
        self._asked.add(asked)
        try:
            if self._stopped is not None:
                asked.cancel()
            return asked.result(deadline + 1)
        except CancelledError:
            self._check()
            raise
        finally:
            self._asked.discard(asked)

    def barrier(self, epoch: int, phase: str, payload: dict[str, Any] | None = None) -> bool:
        """Wait for all hosts at the end of an epoch; returns whether the master says stop."""
        what = f"the end of epoch {epoch + 1} ({phase})"
        message = {"epoch": epoch, "phase": phase, "payload": payload or {}}
        answer = self._wait_for("dtrain_barrier", what, **message)
        self.history = answer["history"]
        return bool(answer["stop"])

    def _wait_for(self, op: str, what: str, **message: Any) -> Any:
        """Ask the master until it has an answer; each call is short, the whole has a deadline."""
        settings = self.launch.settings
        until = time.monotonic() + settings.step_deadline
        while time.monotonic() < until:
            self._check()
            answer = self._answer(
                self.service.ask_master(
                    op,
                    settings.call_deadline + settings.poll,
                    job=self.launch.job,
                    generation=self.generation,
                    address=self.service.address,
                    wait=settings.poll,
                    **message,
                ),
                settings.call_deadline + settings.poll,
            )
            if answer["over"] is not None:
                raise Stopped(answer["over"])
            if answer["go"]:
                return answer
        raise DeadlineError(f"after {settings.step_deadline:.0f} s, still waiting for {what}")

    def take(self, replica: int, request: int, epoch: int) -> Batch | None:
        """The next batch of a replica, from the lead (asynchronous mode)."""
        if self.arena.lead is not None:
            with self.arena.lock:
                return self.arena.lead.take(replica, request, epoch)
        deadline = self.launch.settings.call_deadline
        found = self._answer(
            self.service.ask(
                self.launch.chief.address,
                "dtrain_take",
                deadline,
                job=self.launch.job,
                generation=self.generation,
                replica=replica,
                request=request,
                epoch=epoch,
            ),
            deadline,
        )
        return None if found is None else Batch(*found)

    def computing(self, replica: int) -> None:
        """A replica goes into user code."""
        self._computing = (replica, time.monotonic())

    def computed(self, replica: int) -> None:
        """It has come back, with a gradient: a local step more."""
        self._steps[replica] += 1
        self._computing = None

    def commit(self, contribution: Contribution, epoch: int, age: int, version: int) -> None:
        """Account for an asynchronous gradient that was applied."""
        assert isinstance(self.account, Account)
        with self.arena.lock:
            self.account.commit(contribution, epoch, age, version)

    def take_account(self) -> dict[str, Any]:
        """What this host adds to the epoch's record: sums, and the ledger so far."""
        if self.account is None:
            return {}
        with self.arena.lock:
            totals = self.account.take_totals()
            return {"train": asdict(totals), "ledger": self.account.ledger.to_dict()}

    def close(self) -> None:
        """Let go of everything; the last host of the process closes the arena."""
        with self._closing:
            if self.link is not None:
                self.link.close()
                self.link = None
            if self._open:
                self._open = False
                arenas.release((self.launch.job, self.generation))
            self._unmake()
            meeting.leave(self)

    def abandon(self) -> None:
        """Its worker closes while its thread is still in user code: nobody else will tidy up."""
        meeting.leave(self)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Called, from another thread, when the job is to stop."""
        self._on_stop.append(callback)

    # -- with the arena's lock held ------------------------------------------------------------

    def deliver(
        self, shard: int, event: Pushed, grads: dict[int, Any], *, busy: bool = False
    ) -> None:
        """Gradients for a shard of this process, from a local replica or from afar."""
        if shard == 0:
            self.arena.lead.handle(event)
        self.arena.shards[shard].push(event, grads, busy=busy)

    def _report(self, event: Reduced) -> None:
        if self.arena.lead is not None:
            self.arena.lead.handle(event)
        else:
            self.service.start(self._send_report(event))

    def _decided(self, verdict: Verdict) -> None:
        for shard in self.arena.shards.values():
            shard.decide(verdict)

    def why(self) -> str:
        lead = self.arena.lead
        if lead is None:
            return f"the lead is at {self.launch.chief}"
        missing = list(lead.rounds.missing())
        return f"waiting for the gradients of replicas {missing}" if missing else "applying"

    # -- any thread ----------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        self._stopped = why
        if self.arena is not None:
            with self.arena.lock:
                self.arena.stop(why)
        for asked in list(self._asked):
            asked.cancel()
        for callback in list(self._on_stop):
            callback()

    def stopped_within(self, seconds: float) -> bool:
        """Whether the master stops the job in that time; how a peer's death is told apart."""
        until = time.monotonic() + seconds
        while self._stopped is None and time.monotonic() < until:
            time.sleep(0.02)
        return self._stopped is not None

    def exchanged(self, shard: int, push: Push, into: list[Any]) -> tuple[int, int, Batch | None]:
        """Apply an asynchronous gradient at a shard of this process; array maths.

        Returns the shard's version, the age of the gradient, and the replica's next batch if
        this is the lead shard.
        """
        hosted = self.arena.shards[shard]
        version, age = hosted.push_pull(push.replica, push.request, push.version, push.grads, into)
        if shard != 0 or push.contribution is None:
            return version, age, None
        with self.arena.lock:
            following = self.arena.lead.take(push.replica, push.request, push.epoch)
        return version, age, following

    # -- in the event loop: answering others ---------------------------------------------------

    async def initial(self, wait: float) -> tuple[Layout, Any, Meeting | None] | None:
        try:
            await asyncio.wait_for(self._published.wait(), wait)
        except TimeoutError:
            return None
        return self.layout, self.initial_buffer, self.meeting

    def _arena(self, shard: int) -> Arena:
        if self.arena is None or shard not in self.arena.shards:
            raise ProtocolError(f"job {self.launch.job}: shard {shard} is not at this worker")
        return self.arena

    async def pushed(
        self,
        shard: int,
        step: int,
        contributions: tuple[Contribution, ...],
        grads: list[list[np.ndarray]],
        wait: float,
    ) -> list[Any] | None:
        arena = self._arena(shard)
        hosted: SyncShard = arena.shards[shard]
        committed = _Signal()
        with arena.lock:
            if contributions:
                event = Pushed(self.generation, step, contributions)
                by_replica = {
                    c.replica: hosted.pieces(arrays)
                    for c, arrays in zip(contributions, grads, strict=True)
                }
                self.deliver(shard, event, by_replica)
            hosted.watch(step + 1, committed.set)
        if not await committed.wait(wait):
            return None
        with arena.lock:
            version, published = hosted.version, hosted.published
        assert published is not None
        return [version, [to_serialize(array) for array in published]]

    async def reported(self, event: Reduced, wait: float) -> list[Any] | None:
        decided = _Signal()
        with self.arena.lock:
            lead: SyncLead = self.arena.lead
            lead.handle(event)
            lead.watch(event.step, decided.set)
        if not await decided.wait(wait):
            return None
        v: Verdict = decided.value
        return [v.generation, v.step, v.members, v.weight, v.ok, v.problem]

    async def _send_report(self, event: Reduced) -> None:
        settings = self.launch.settings
        until = time.monotonic() + settings.step_deadline
        try:
            while self.arena.stopped is None and self.arena.failure is None:
                answer = await self.service.ask(
                    self.launch.chief.address,
                    "dtrain_reduced",
                    settings.call_deadline + settings.poll,
                    job=self.launch.job,
                    generation=self.generation,
                    step=event.step,
                    shard=event.shard,
                    problem=event.problem,
                    wait=settings.poll,
                )
                if answer is not None:
                    generation, step, members, weight, ok, problem = answer
                    verdict = Verdict(generation, step, tuple(members), weight, ok, problem)
                    with self.arena.lock:
                        self.arena.shards[event.shard].decide(verdict)
                    return
                if time.monotonic() > until:
                    raise DeadlineError(f"no verdict on step {event.step} from the lead")
        except Exception as error:  # noqa: BLE001 - it is handed to every waiting thread
            with self.arena.lock:
                self.arena.fail(error)

    def taken(self, replica: int, request: int, epoch: int) -> tuple[int, int, int] | None:
        with self.arena.lock:
            batch = self.arena.lead.take(replica, request, epoch)
        return None if batch is None else (batch.epoch, batch.part, batch.index)

    def push_pulled(self, shard: int, push: Push) -> dict[str, Any]:
        """Off the event loop."""
        self._arena(shard)
        ranges = self.shard_plan.shards[shard].ranges
        into = [np.empty((r.stop - r.start) // np.dtype(r.dtype).itemsize, r.dtype) for r in ranges]
        version, age, batch = self.exchanged(shard, push, into)
        following = None if batch is None else (batch.epoch, batch.part, batch.index)
        return {"version": version, "age": age, "next": following, "params": into}

    def summary(self) -> dict[str, Any]:
        """For the heartbeat: small, no lock held long, no array touched."""
        now = time.monotonic()
        computing = self._computing
        report: dict[str, Any] = {
            "generation": self.generation,
            "epoch": self.epoch,
            "steps": {str(i): count for i, count in self._steps.items()},
            "computing": None if computing is None else [computing[0], now - computing[1]],
        }
        if self.account is not None and self.arena is not None:
            with self.arena.lock:
                report["account"] = {
                    "step": self.account.version,
                    "loss": self.account.loss,
                    "samples": self.account.samples,
                    "ledger": self.account.ledger.to_dict(),
                }
        return report


class _Signal:
    """Set from any thread, awaited in the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.value: Any = None

    def set(self, value: Any = None) -> None:
        self.value = value
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return False
        return True
