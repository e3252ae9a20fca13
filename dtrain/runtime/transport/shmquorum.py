"""Synchronous steps with backups in the shared file: whoever has the lock of turns decides.

What :class:`~dtrain.machines.quorum.Quorum` knows lies in the file, as do the sums of the epoch.
So a step needs nobody in particular, not even the chief, which may be the slow one: a replica
that has no batch waits for the step, and works on its shards and its verdict meanwhile.

A slow replica would read parameters that others write to: each host has a copy of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtrain.arrays import aligned_bytes
from dtrain.machines.ledger import Ledger
from dtrain.machines.quorum import (
    Accepted,
    Answer,
    Arrive,
    Behind,
    Committed,
    EpochDone,
    Join,
    Pass,
    Quorum,
    with_quorum,
)
from dtrain.machines.rounds import Rounds, Totals
from dtrain.messages import Batch, Contribution, Pushed, Reduced
from dtrain.runtime.arena import frozen
from dtrain.runtime.points import at_point
from dtrain.runtime.shards import StepRefused
from dtrain.runtime.transport.shm import SharedArena
from dtrain.runtime.transport.shmfile import (
    LAST,
    OF_EPOCH,
    SUM_APPLIED,
    SUM_LOSS,
    SUM_REJECTED,
    SUM_SAMPLES,
    SUM_WEIGHT,
    Turns,
    write_totals,
)
from dtrain.runtime.transport.shmsync import SyncLink

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class BackupLink(SyncLink):
    """Synchronous steps that do not wait for everybody."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._spec = host.launch.spec
        self._quorum = Quorum(host.parts.plan, host.generation, self._spec.backups)
        self._turns = Turns(self._words, self._plan, len(self._quorum.state))
        self._turn_lock = self._plan.shards
        #: the copy that the replicas of this host read
        self._buffer = aligned_bytes(host.layout.nbytes)
        self._own = frozen(host.layout.views(self._buffer))
        self.version = -1
        #: replica -> the step that it has last had an answer for
        self._answered = dict.fromkeys(host.plan.replicas, -1)
        #: the last closed step, and its members
        self._closed: tuple[int, tuple[int, ...]] = (-1, ())

    @property
    def params(self) -> Mapping[str, Any]:
        """Read-only views of this host's copy."""
        return self._own

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last."""
        self._quorum.state = self._turns.load()
        return self._quorum.exhausted

    def renew(self) -> None:
        """Copy the newest version."""
        words = self._words
        while words[self._plan.version] != self.version:
            version = words[self._plan.version]
            self._buffer[:] = self._arena.buffers[version % 2]
            # The next step but one writes where this was read.
            if words[self._plan.version] == version:
                self.version = version

    def due(self, replica: int) -> bool:
        """Whether the step at hand is another than the one that the replica is done with."""
        return self._words[self._plan.version] > self._answered[replica]

    def join(self, replica: int, epoch: int) -> Batch | Pass | EpochDone:
        """A batch for the step at hand, with the parameters for it."""
        while True:
            self.renew()
            answer = self._tell(Join(self._host.generation, replica, self.version, epoch))
            if isinstance(answer, EpochDone):
                return answer  # the next epoch begins with this very step
            if isinstance(answer, Batch | Pass):
                self._answered[replica] = self.version
                return answer
            assert isinstance(answer, Behind)
            self._arena.check()

    def arrive(self, contribution: Contribution) -> None:
        """The replica's gradient is there, for the step of the version that it has read."""
        self._write(contribution, self.version)
        event = Arrive(self._host.generation, contribution.replica, self.version)
        answer = self._tell(event)
        if isinstance(answer, Accepted) and answer.members is not None:
            self._bells.ring_others()

    def wait(self) -> None:
        """Until there is a step that some replica of this host is not done with."""
        step = min(self._answered.values())
        at_point("waiting")
        with self._host.activity.waiting(step, self._quorum_misses):
            self._bells.wait(
                lambda: self._look(step),
                self._arena.check,
                self._host.launch.settings.step_deadline,
                lambda: f"step {step} has not committed; {self._why_open()}",
            )

    def _tell(self, event: Join | Arrive) -> Answer:
        deadline = self._host.launch.settings.step_deadline
        self._arena.locks.acquire(self._turn_lock, deadline, self._arena.check)
        try:
            before = self._turns.load()
            self._quorum.state = list(before)
            answer = self._quorum.handle(event, time.monotonic())[0]
            if self._quorum.state != before:
                self._turns.store(self._quorum.state)
            return answer
        finally:
            self._arena.locks.release(self._turn_lock)

    # -- whoever waits, works ------------------------------------------------------------------

    def _look(self, step: int) -> bool:
        if self._words[self._plan.version] > step:
            return True
        if self._closed[0] != step:
            self._quorum.state = self._turns.load()
            if self._quorum.step != step or self._quorum.members is None:
                return False
            self._closed = step, self._quorum.members
        members = self._closed[1]
        if self._work(step, members):
            self._conclude(step, members)
        return bool(self._words[self._plan.version] > step)

    def _conclude(self, step: int, members: tuple[int, ...]) -> None:
        """Record the verdict, then let everyone see the version; by one, whoever is first."""
        deadline = self._host.launch.settings.step_deadline
        self._arena.locks.acquire(self._turn_lock, deadline, self._arena.check)
        try:
            self._arena.commits()
            if self._words[self._plan.version] > step:
                return
            self._quorum.state = self._turns.load()
            if self._quorum.step == step:
                self._decide_with(step, members)
            # Else whoever did has died since, and this is all that was left to do.
            self._words[self._plan.version] = step + 1
        finally:
            self._arena.locks.release(self._turn_lock)
        self._bells.ring_others()

    def _decide_with(self, step: int, members: tuple[int, ...]) -> None:
        generation, epoch = self._host.generation, self._quorum.epoch
        ledger, totals = self._sums(step, epoch)
        skip = self._spec.recovery.on_non_finite == "skip"
        rounds = Rounds(
            generation,
            step,
            self._plan.shards,
            self._plan.replicas,
            lambda at: members if at == step else None,
            lambda at: epoch,
            ledger,
            totals,
            skip=skip,
        )
        contributions = tuple(self._contribution(i) for i in members)
        rounds.handle(Pushed(generation, step, contributions), 0.0)
        for shard in range(self._plan.shards):
            problem = self._problem(shard, step, contributions)
            rounds.handle(Reduced(generation, step, shard, problem), 0.0)
        verdict = rounds.verdicts[step]
        if not verdict.ok:
            raise StepRefused(verdict.problem)
        if not verdict.applied:
            self._host.passed_over(verdict.problem or "")
            for updater in self._updaters.values():
                updater.keep(step)
        write_totals(
            self._words,
            self._reals,
            self._plan,
            step + 1,
            rounds.totals,
            rounds.ledger,
            applied=verdict.applied,
            epoch=epoch,
            loss=rounds.loss,
        )
        # From here on the step is committed, whoever dies.
        self._words[self._plan.verdict] = step + 1
        at_point("flipping")
        self._quorum.handle(Committed(generation, step, verdict.applied), 0.0)
        self._turns.store(self._quorum.state)

    def _sums(self, step: int, epoch: int) -> tuple[Ledger, Totals]:
        """The account as of a step: what of it a verdict adds to."""
        return read_ledger(self._words, self._plan, step), read_totals(
            self._words, self._reals, self._plan, step, epoch
        )

    # -- for people ----------------------------------------------------------------------------

    def _quorum_misses(self) -> tuple[int, ...]:
        quorum = Quorum(self._host.parts.plan, 0, self._spec.backups, self._turns.load())
        return quorum.missing()

    def _why_open(self) -> str:
        missing = list(self._quorum_misses())
        return f"waiting for the gradients of replicas {missing}" if missing else "applying"


def read_ledger(words: Any, plan: Any, step: int) -> Ledger:
    at = plan.totals[step % 2]
    return Ledger(applied=int(words[at + SUM_APPLIED]), rejected=int(words[at + SUM_REJECTED]))


def read_totals(words: Any, reals: Any, plan: Any, step: int, epoch: int) -> Totals:
    """The sums of an epoch: none, where the last step is not of it."""
    at = plan.totals[step % 2]
    if words[at + OF_EPOCH] != epoch + 1:
        return Totals()
    return Totals(
        float(reals[at + SUM_LOSS]), float(reals[at + SUM_WEIGHT]), int(words[at + SUM_SAMPLES])
    )


class QuorumAccount:
    """The chief's account of the job's gradients, as it lies in the file."""

    def __init__(self, host: Host) -> None:
        assert isinstance(host.arena, SharedArena)
        self._host = host
        self._arena = host.arena
        self._job = host.parts.plan
        self._turns = Turns(self._arena.words, self._arena.plan, Quorum.words(self._job.replicas))

    @property
    def version(self) -> int:
        return int(self._arena.words[self._arena.plan.version])

    @property
    def loss(self) -> float:
        return float(self._arena.reals[self._arena.plan.totals[self.version % 2] + LAST])

    @property
    def ledger(self) -> Ledger:
        quorum = Quorum(self._job, 0, 0, self._turns.load())
        ledger = read_ledger(self._arena.words, self._arena.plan, self.version)
        return with_quorum(ledger, quorum, self._host.base)

    @property
    def samples(self) -> int:
        return sum(self.ledger.samples)

    def take_totals(self) -> Totals:
        """The sums of the epoch at hand."""
        quorum = Quorum(self._job, 0, 0, self._turns.load())
        arena = self._arena
        return read_totals(arena.words, arena.reals, arena.plan, self.version, quorum.epoch)
