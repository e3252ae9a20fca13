"""A job's presence on one worker: its shards, its replicas, its way to the others.

How it gets ready is :mod:`.preparation`, what it asks others :mod:`.calls`, and what it answers
them :mod:`.answers`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor
from dtrain.machines.jobs import HostPlan
from dtrain.machines.ledger import Ledger
from dtrain.machines.rounds import Totals
from dtrain.messages import Batch, Contribution, Push, Pushed, Reduced, Verdict
from dtrain.optim import Optimizer
from dtrain.partition import partition
from dtrain.runtime import arena as arenas
from dtrain.runtime import handover
from dtrain.runtime.answers import Answers
from dtrain.runtime.arena import Arena
from dtrain.runtime.calls import Calls
from dtrain.runtime.data import Feed, Parts
from dtrain.runtime.launch import Launch
from dtrain.runtime.lead import Account, AsyncLead, SyncLead
from dtrain.runtime.points import at_point
from dtrain.runtime.saver import Saver
from dtrain.runtime.state import Begin, State
from dtrain.runtime.transport import comm, meeting
from dtrain.runtime.transport.meeting import Meeting
from dtrain.runtime.transport.segment import Segment
from dtrain.runtime.transport.shm import SharedArena

if TYPE_CHECKING:
    from dtrain.runtime.worker import WorkerService


#: Seconds that a copy of what is committed may take to come out whole.
_COPY = 1.0


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
        self.arena: Arena = None  # type: ignore[assignment]
        # All of these are there once it is prepared, see :mod:`.preparation`.
        self.model: Any = None
        self.optimizer: Optimizer = None  # type: ignore[assignment]
        self.parts: Parts = None  # type: ignore[assignment]
        self.feed: Feed = None  # type: ignore[assignment]
        #: where the processes of this machine meet, if they can; see :mod:`.transport.meeting`
        self.meeting: Meeting | None = None
        #: the chief's own mapping, until the arena is open
        self.made: Segment | None = None
        self.link: Any = None
        self.saver: Saver = None  # type: ignore[assignment]
        #: the gradients that this host accounts for: all of the job's at the chief; but those of
        #: its own replicas in asynchronous mode in shared memory
        self.account: SyncLead | Account | None = None
        #: what the generation begins with: all of it at the chief, until all have it
        self.state: State | None = None
        self.begin: Begin = None  # type: ignore[assignment]
        #: the records of the epochs that are over, and the account of gradients as of then
        self.history: list[dict[str, Any]] = []
        self.base = Ledger()
        #: the sums of the last epoch, and whether the master has them on record
        self.taken = Totals()
        self.recorded = True
        self.epoch = 0
        self._steps: dict[int, int] = dict.fromkeys(self.plan.replicas, 0)
        #: the replica that is in user code, and since when
        self._computing: tuple[int, float] | None = None
        self._on_stop: list[Callable[[], None]] = []
        #: set once the thread of the host's task has left
        self.left = threading.Event()
        self._over = False
        #: whether it has its part in the arena of its process
        self.opened = False
        self._closing = threading.Lock()
        #: what it asks others, and what it answers
        self.calls = Calls(service, launch)
        self.answers = Answers(self)

    @property
    def is_chief(self) -> bool:
        return self.launch.chief.address == self.service.address

    # -- in the task's thread: preparing, which is :mod:`.preparation` -------------------------

    def layout_known(self, layout: Layout) -> None:
        self.layout = layout
        self.shard_plan = partition(layout, self.launch.spec.shards or 1)
        #: all shards of the job; fewer than asked for where the model has fewer blocks
        self.shards = tuple(range(len(self.shard_plan.shards)))

    def unmake(self) -> None:
        """The chief has mapped the file as everybody has."""
        if self.made is not None:
            self.made.close()
            self.made = None

    # -- in the task's thread: training --------------------------------------------------------

    def check(self) -> None:
        """Raise if the job is to stop or has failed; between steps."""
        self.arena.check()

    def barrier(self, epoch: int, phase: str, payload: dict[str, Any] | None = None) -> bool:
        """Wait for all hosts at the end of an epoch; returns whether the master says stop."""
        what = f"the end of epoch {epoch + 1} ({phase})"
        message = {"epoch": epoch, "phase": phase, "payload": payload or {}}
        answer = self.calls.wait_for("dtrain_barrier", what, **message)
        if answer["record"] is not None:
            self.recorded = True
            self.history.append(answer["record"])
            self.base = Ledger.from_dict(answer["ledger"])
        return bool(answer["stop"])

    def copy_state(self) -> State:
        """What the job has committed; by the chief, between two of its steps."""
        if isinstance(self.arena, SharedArena):
            reader = self.arena.reader()
            if self.synchronous:
                state = reader.sync(_COPY)
            else:
                state, _ = reader.asynchronous(self.parts.plan, len(self.history), _COPY)
                state.ledger = Ledger.total([self.base.to_dict(), state.ledger.to_dict()])
        else:
            state = handover.running(self)
        if self.synchronous:
            assert isinstance(self.account, SyncLead)
            with self.arena.lock:
                state.ledger = Ledger.from_dict(self.account.ledger.to_dict())
                state.totals = replace(self.account.rounds.totals)
        state.history = tuple(self.history)
        self._reopen(state)
        return state

    def _reopen(self, state: State) -> None:
        """Where ``steps`` has ended the last epoch early, its record is not the epoch's.

        Whoever goes on from here with more steps goes on with that epoch.
        """
        plan, epochs = self.parts.plan, len(state.history)
        if self.synchronous:
            epoch, index = plan.locate(state.step)
            early = index > 0 and epochs > epoch
        else:
            assert state.cursor is not None
            cursor = Cursor(plan, self.generation, state.cursor)
            early = epochs > cursor.epoch and not cursor.whole
        if early:
            state.history = state.history[:-1]
            state.totals = self.taken

    def take(self, replica: int, request: int, epoch: int) -> Batch | None:
        """The next batch of a replica, from the lead (asynchronous mode)."""
        if self.arena.lead is not None:
            with self.arena.lock:
                return self.arena.lead.take(replica, request, epoch)
        found = self.calls.ask(
            self.launch.chief.address,
            "dtrain_take",
            replica=replica,
            request=request,
            epoch=epoch,
        )
        return None if found is None else Batch(*found)

    def computing(self, replica: int, batch: Batch) -> None:
        """A replica goes into user code."""
        self.arena.mark(replica, batch)
        self._computing = (replica, time.monotonic())
        at_point("computing")

    def computed(self, replica: int) -> None:
        """It has come back, with a gradient: a local step more."""
        assert self._computing is not None
        spent = time.monotonic() - self._computing[1]
        usual, job = self.service.usual, self.launch.job
        usual[job] = 0.9 * usual.get(job, spent) + 0.1 * spent
        self._steps[replica] += 1
        self._computing = None
        self.arena.unmark(replica)
        at_point("writing")

    def commit(self, contribution: Contribution, epoch: int, age: int, version: int) -> None:
        """Account for an asynchronous gradient that was applied in shared memory."""
        assert isinstance(self.account, Account)
        with self.arena.lock:
            self.account.commit(contribution, epoch, age, version)

    def take_account(self) -> dict[str, Any]:
        """What this host adds to the epoch's record: sums, and the ledger so far."""
        if self.account is None:
            return {}
        with self.arena.lock:
            totals = self.taken = self.account.take_totals()
            self.recorded = False
            return {"train": asdict(totals), "ledger": self.account.ledger.to_dict()}

    def close(self) -> None:
        """Let go of everything; the last host of the process closes the arena."""
        with self._closing:
            if self.link is not None:
                self.link.close()
                self.link = None
            if self.opened:
                self.opened = False
                arenas.release((self.launch.job, self.generation))
            self.unmake()
            self.state = None
            # What looks into the input file, or it stays mapped until Python collects garbage.
            self.feed = None  # type: ignore[assignment]
            if self._over:
                meeting.forget(self.launch.job)

    def abandon(self) -> None:
        """Its worker closes while its thread is still in user code: nobody else will tidy up."""
        if self._over:
            meeting.forget(self.launch.job)

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

    def reduced(self, event: Reduced) -> None:
        if self.arena.lead is not None:
            self.arena.lead.handle(event)
        else:
            self.service.start(comm.report(self, event))

    def decided(self, verdict: Verdict) -> None:
        for shard in self.arena.shards.values():
            shard.decide(verdict)

    def why(self) -> str:
        lead = self.arena.lead
        if lead is None:
            return f"the lead is at {self.launch.chief}"
        missing = list(lead.rounds.missing())
        return f"waiting for the gradients of replicas {missing}" if missing else "applying"

    # -- any thread ----------------------------------------------------------------------------

    @property
    def has_shards(self) -> bool:
        """Whether the only place of some shards is the memory of this process."""
        arena = self.arena
        return not (self._over or arena is None or isinstance(arena, SharedArena))

    def stop(self, why: str, *, over: bool) -> None:
        """Leave the loop; ``over``: the job has ended, not only this generation of it."""
        self.calls.stop(why)
        self._over = self._over or over
        if self.arena is not None:
            with self.arena.lock:
                self.arena.stop(why)
        for callback in list(self._on_stop):
            callback()

    def stopped_within(self, seconds: float) -> bool:
        """Whether the master stops the job in that time; how a peer's death is told apart."""
        until = time.monotonic() + seconds
        while self.calls.stopped is None and time.monotonic() < until:
            time.sleep(0.02)
        return self.calls.stopped is not None

    def exchanged(self, shard: int, push: Push, into: list[Any]) -> tuple[int, Batch | None]:
        """Apply an asynchronous gradient at a shard of this process; array maths.

        Returns the shard's version, and the replica's next batch if this is the lead shard.
        """
        hosted = self.arena.shards[shard]
        version, age, fresh = hosted.push_pull(
            push.replica, push.request, push.version, push.grads, into
        )
        if shard != 0 or push.contribution is None:
            return version, None
        with self.arena.lock:
            lead: AsyncLead = self.arena.lead
            if fresh:
                lead.account.commit(push.contribution, push.epoch, age, version)
            following = lead.take(push.replica, push.request, push.epoch)
        return version, following

    # -- in the event loop: answering others ---------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """For the heartbeat: small, no lock held long, no array touched."""
        now = time.monotonic()
        computing = self._computing
        report: dict[str, Any] = {
            "generation": self.generation,
            "epoch": self.epoch,
            "steps": {str(i): count for i, count in self._steps.items()},
            "computing": None if computing is None else [computing[0], now - computing[1]],
            "usual": self.service.usual.get(self.launch.job),
        }
        if self.account is not None and self.arena is not None and self.calls.stopped is None:
            with self.arena.lock:
                report["account"] = {
                    "step": self.account.version,
                    "loss": self.account.loss,
                    "samples": self.account.samples,
                    "ledger": self.account.ledger.to_dict(),
                }
        return report
