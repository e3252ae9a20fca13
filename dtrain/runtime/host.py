"""A job's presence on one worker: its shards, its replicas, its way to the others.

How it gets ready is :mod:`.preparation`, what it asks others :mod:`.calls`, and what it answers
them :mod:`.answers`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dtrain.layout import Layout
from dtrain.machines.cursor import Held
from dtrain.machines.jobs import HostPlan, with_shards
from dtrain.machines.ledger import Ledger
from dtrain.machines.quorum import Answer, Join, Quorum, with_quorum
from dtrain.machines.rounds import Totals
from dtrain.messages import (
    Batch,
    Closed,
    Contribution,
    Measured,
    Measures,
    Push,
    Pushed,
    Reduced,
    Verdict,
)
from dtrain.optim import Optimizer
from dtrain.partition import split
from dtrain.runtime import arena as arenas
from dtrain.runtime import handover
from dtrain.runtime.activity import Activity
from dtrain.runtime.answers import Answers
from dtrain.runtime.arena import Arena
from dtrain.runtime.calls import Calls
from dtrain.runtime.data import Feed, Parts
from dtrain.runtime.launch import Launch
from dtrain.runtime.lead import (
    Account,
    AsyncLead,
    QuorumLead,
    SyncLead,
    unpacked_answer,
)
from dtrain.runtime.points import at_point
from dtrain.runtime.saver import Saver
from dtrain.runtime.state import Begin, State, ended_early
from dtrain.runtime.transport import comm, meeting
from dtrain.runtime.transport.meeting import Meeting
from dtrain.runtime.transport.segment import Segment
from dtrain.runtime.transport.shm import SharedArena
from dtrain.runtime.transport.shmquorum import QuorumAccount

if TYPE_CHECKING:
    from dtrain.runtime.tasks import Share
    from dtrain.runtime.worker import WorkerService


#: So many steps that are passed over are told of, by each host of a generation.
_TOLD = 20

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
        #: whether its steps do not wait for all replicas
        self.backups = launch.spec.backups > 0
        self.in_graph = launch.spec.replication == "in-graph"
        #: where its replicas compute: ``"cpu"``, or ``"cuda:<number>"``
        self.device = "cpu"
        self.arena: Arena = None  # type: ignore[assignment]
        # All of these are there once it is prepared, see :mod:`.preparation`.
        #: for each shard, the index of the host that has it
        self.placed: tuple[int, ...] = ()
        self.model: Any = None
        self.optimizer: Optimizer = None  # type: ignore[assignment]
        self.parts: Parts = None  # type: ignore[assignment]
        self.feed: Feed = None  # type: ignore[assignment]
        #: where the processes of this machine meet, if they can; see :mod:`.transport.meeting`
        self.meeting: Meeting | None = None
        #: the chief's own mapping, until the arena is open
        self.made: Segment | None = None
        self.link: Any = None
        #: what the tasks of an in-graph job use of this host
        self.share: Share = None  # type: ignore[assignment]
        self.saver: Saver = None  # type: ignore[assignment]
        #: the gradients that this host accounts for: all of the job's at the chief; in asynchronous
        #: mode each accounts for those that its replicas forgo, in shared memory also for those
        #: that they apply
        self.account: SyncLead | Account | QuorumAccount | None = None
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
        #: what its thread does, for others to see
        self.activity = Activity(self.plan.replicas)
        #: steps or gradients that were passed over, as far as this host has seen to that
        self._passed_over = 0
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
        self.shard_plan = split(self.launch.spec, layout)
        #: all shards of the job; fewer than asked for where the model has fewer blocks
        self.shards = tuple(range(len(self.shard_plan.shards)))

    def shards_placed(self, where: Sequence[int]) -> None:
        """The chief has chosen a host, by its index, for each shard."""
        self.placed = tuple(where)
        self.launch = replace(self.launch, hosts=with_shards(self.launch.hosts, where))
        self.plan = self.launch.host(self.service.address)

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
        with self.activity.at_barrier(epoch, phase):
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
            if self.backups:
                with self.arena.turn(_COPY):
                    state = reader.with_quorum(self.parts.plan, _COPY)
            elif self.synchronous:
                state = reader.sync(_COPY)
            else:
                plan, lead = self.parts.plan, self.launch.lead_shard
                state, _ = reader.asynchronous(plan, len(self.history), lead, _COPY)
                state.ledger = Ledger.total([self.base.to_dict(), state.ledger.to_dict()])
        else:
            with self._nothing_commits():
                state = handover.running(self)
        if self.backups and isinstance(self.arena, SharedArena):
            assert state.cursor is not None
            quorum = Quorum(self.parts.plan, 0, 0, state.cursor)
            state.ledger = with_quorum(state.ledger, quorum, self.base)
        elif self.synchronous:
            assert isinstance(self.account, SyncLead)
            with self.arena.lock:
                state.ledger = Ledger.from_dict(self.account.ledger.to_dict())
                state.totals = replace(self.account.rounds.totals)
        state.history = tuple(self.history)
        self._reopen(state)
        return state

    @contextmanager
    def _nothing_commits(self) -> Iterator[None]:
        """With backups others go on while the chief copies the state; inside, they do not."""
        if not self.backups:
            yield
            return
        lead: QuorumLead = self.arena.lead
        with self.arena.lock:
            lead.pause()
        try:
            yield
        finally:
            with self.arena.lock:
                lead.resume()

    def _reopen(self, state: State) -> None:
        """Where ``steps`` has ended the last epoch early, its record is not the epoch's.

        Whoever goes on from here with more steps goes on with that epoch.
        """
        if ended_early(self.launch.spec, self.parts.plan, state):
            state.history = state.history[:-1]
            state.totals = self.taken

    def computing(self, replica: int, step: int, batch: Batch) -> None:
        """A replica goes into user code."""
        self.arena.mark(replica, batch)
        self.activity.computing(replica, step, batch)
        at_point("computing")

    def computed(self, replica: int) -> None:
        """It has come back, with a gradient."""
        spent = self.activity.computed(replica)
        usual, job = self.service.usual, self.launch.job
        usual[job] = 0.9 * usual.get(job, spent) + 0.1 * spent
        self.arena.unmark(replica)
        at_point("writing")

    def commit(self, contribution: Contribution, epoch: int, age: int, version: int) -> None:
        """Account for an asynchronous gradient that was applied in shared memory."""
        assert isinstance(self.account, Account)
        with self.arena.lock:
            self.account.commit(contribution, epoch, age, version)

    def reject(self, words: str) -> None:
        """Account for an asynchronous gradient that was not finite, and is not applied."""
        assert isinstance(self.account, Account)
        with self.arena.lock:
            self.account.ledger.rejected += 1
        self.passed_over(words)

    def passed_over(self, words: str) -> None:
        """Let people know of what is not applied; the ledger counts what is not told of."""
        self._passed_over += 1
        if self._passed_over <= _TOLD:
            last = "; further ones are only counted" if self._passed_over == _TOLD else ""
            self.calls.tell(f"passed over: {words}{last}")

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
                with self.activity.glance:
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
        if shard == self.launch.lead_shard:
            self.arena.lead.handle(event)
        hosted = self.arena.shards[shard]
        hosted.push(event, grads, busy=busy)
        if self.backups and self.arena.lead is None and hosted.asks(event.step):
            self.service.start(comm.closing(self, shard, event.step))

    def join(self, replica: int, step: int, epoch: int) -> Answer:
        """Ask the lead for a replica's batch of a step (with backups)."""
        if self.arena.lead is not None:
            with self.arena.lock:
                lead: QuorumLead = self.arena.lead
                return lead.join(Join(self.generation, replica, step, epoch))
        chief = self.launch.chief.address
        return unpacked_answer(
            self.calls.ask(chief, "dtrain_join", replica=replica, step=step, epoch=epoch)
        )

    def closed(self, event: Closed) -> None:
        for shard in self.arena.shards.values():
            shard.close(event)

    def reduced(self, event: Reduced) -> None:
        if self.arena.lead is not None:
            self.arena.lead.handle(event)
        else:
            self.service.start(comm.report(self, event))

    def measured(self, event: Measured) -> None:
        if self.arena.lead is not None:
            self.arena.lead.measure(event)
        else:
            self.service.start(comm.measure(self, event))

    def go_on(self, measures: Measures) -> None:
        for shard in self.arena.shards.values():
            shard.go_on(measures)

    def decided(self, verdict: Verdict) -> None:
        if verdict.ok and not verdict.applied:
            self.passed_over(verdict.problem or "")
        for shard in self.arena.shards.values():
            shard.decide(verdict)

    def missing(self) -> Sequence[int]:
        """The replicas that the step waits for, as far as it is known here."""
        lead = self.arena.lead
        if lead is None:
            return ()
        # Until a quorum has closed the step it has no members to miss.
        found: Sequence[int] = (lead.quorum if self.backups else lead.rounds).missing()
        return found

    def why(self) -> str:
        if self.arena.lead is None:
            return f"the lead is at {self.launch.chief}"
        missing = list(self.missing())
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

    def exchanged(self, shard: int, push: Push, into: list[Any]) -> tuple[int, Batch | Held | None]:
        """Apply an asynchronous gradient at a shard of this process; array maths.

        Returns the shard's version, and the replica's next batch if this is the lead shard.
        """
        following: list[Batch | Held | None] = []

        def applied(version: int, age: int, fresh: bool) -> None:
            # Before the parameters are copied: they are not older than the answer.
            if shard != self.launch.lead_shard or push.contribution is None:
                return
            with self.arena.lock:
                lead: AsyncLead = self.arena.lead
                if fresh:
                    lead.account.commit(push.contribution, push.epoch, age, version)
                following.append(lead.take(push.replica, push.request, push.epoch))

        hosted = self.arena.shards[shard]
        version = hosted.push_pull(
            push.replica, push.request, push.version, push.grads, into, applied
        )
        return version, following[0] if following else None

    # -- in the event loop: answering others ---------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """For the heartbeat: small, no lock held long, no array touched."""
        report: dict[str, Any] = {
            "generation": self.generation,
            "epoch": self.epoch,
            "usual": self.service.usual.get(self.launch.job),
        }
        with self.activity.glance:
            report.update(self.activity.report())
            self._add_account(report)
        return report

    def _add_account(self, report: dict[str, Any]) -> None:
        if self.account is None or not self.opened or self.calls.stopped is not None:
            return
        with self.arena.lock:
            report["account"] = {
                "step": self.account.version,
                "loss": self.account.loss,
                "samples": self.account.samples,
                "ledger": self.account.ledger.to_dict(),
            }
