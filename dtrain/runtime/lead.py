"""The lead: where the verdict of a step is recorded, and the batches of async mode are given.

It lives on the chief, beside its first shard (the lead shard), and runs the machines for the
master, so that no step waits for the scheduler.  All methods want the arena's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dtrain.errors import ProtocolError
from dtrain.machines.cursor import Cursor, Held, Take
from dtrain.machines.exchange import Exchange
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
)
from dtrain.machines.rounds import Rounds, Totals
from dtrain.messages import (
    Batch,
    Closed,
    Contribution,
    Measured,
    Measures,
    Pushed,
    Reduced,
    Verdict,
)


class SyncLead:
    """Decides the steps of a synchronous job and tells the verdicts to whoever asks."""

    def __init__(
        self,
        rounds: Rounds,
        decided: Callable[[Verdict], None],
        measured: Callable[[Measures], None],
        commits: Callable[[], None],
    ) -> None:
        self.rounds = rounds
        #: between two stages of the optimizer
        self.exchange = Exchange(rounds.generation, rounds.shards)
        #: raises if nothing may be committed any more
        self._commits = commits
        self._decided = decided
        self._measured = measured
        self._measuring: list[tuple[tuple[int, int], Callable[[Measures], None]]] = []
        self._watchers: list[tuple[int, Callable[[Verdict], None]]] = []

    @property
    def ledger(self) -> Ledger:
        return self.rounds.ledger

    @property
    def version(self) -> int:
        return self.rounds.step

    @property
    def loss(self) -> float:
        return self.rounds.loss

    @property
    def samples(self) -> int:
        return sum(self.ledger.samples)

    def take_totals(self) -> Totals:
        return self.rounds.take_totals()

    def handle(self, event: Pushed | Closed | Reduced) -> None:
        self._commits()
        known = event.step in self.rounds.verdicts
        commands = self.rounds.handle(event, time.monotonic())
        if known:
            return
        for command in commands:
            verdict = command.verdict
            self._decided(verdict)
            due = [w for step, w in self._watchers if step == verdict.step]
            self._watchers = [(s, w) for s, w in self._watchers if s != verdict.step]
            for watcher in due:
                watcher(verdict)

    def measure(self, event: Measured) -> None:
        """A shard has been through a stage; all are told once all have."""
        self._commits()
        known = self.exchange.last
        for measures in self.exchange.handle(event, time.monotonic()):
            if measures is known:
                return
            self._measured(measures)
            key = measures.step, measures.stage
            due = [w for at, w in self._measuring if at == key]
            self._measuring = [(at, w) for at, w in self._measuring if at != key]
            for watcher in due:
                watcher(measures)

    def watch_measures(self, step: int, stage: int, watcher: Callable[[Measures], None]) -> None:
        """Call ``watcher`` with the sums of a stage, now or once all shards' have come."""
        last = self.exchange.last
        if last is not None and (last.step, last.stage) == (step, stage):
            watcher(last)
        else:
            self._measuring.append(((step, stage), watcher))

    def verdict(self, step: int) -> Verdict | None:
        """The recorded verdict of a step, if there is one."""
        return self.rounds.verdicts.get(step)

    def watch(self, step: int, watcher: Callable[[Verdict], None]) -> None:
        """Call ``watcher`` with the verdict of a step, now or once it is recorded."""
        verdict = self.rounds.verdicts.get(step)
        if verdict is not None:
            watcher(verdict)
        elif step >= self.rounds.step:
            self._watchers.append((step, watcher))
        else:
            raise ProtocolError(f"verdict of step {step}: expected step {self.rounds.step}")


class QuorumLead(SyncLead):
    """Decides the steps of a synchronous job with backups: whose gradients make them, too.

    Parameters
    ----------
    closed : callable
        Told whose gradients make the step, as soon as that is known.
    """

    def __init__(
        self,
        quorum: Quorum,
        rounds: Rounds,
        decided: Callable[[Verdict], None],
        measured: Callable[[Measures], None],
        closed: Callable[[Closed], None],
        commits: Callable[[], None],
    ) -> None:
        super().__init__(rounds, self._conclude, measured, commits)
        self.quorum = quorum
        self._then = decided
        self._closed = closed
        self._closing: list[tuple[int, Callable[[Closed], None]]] = []
        #: the last step that was closed
        self._last: Closed | None = None
        #: what shards have reported while nothing may be decided; None: it may
        self._put_off: list[Reduced] | None = None

    @property
    def ledger(self) -> Ledger:
        self.rounds.ledger.late = self.quorum.account().late
        return self.rounds.ledger

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last."""
        return self.quorum.exhausted

    def join(self, event: Join) -> Answer:
        self._commits()
        return self.quorum.handle(event, time.monotonic())[0]

    def handle(self, event: Pushed | Closed | Reduced) -> None:
        if isinstance(event, Reduced) and self._put_off is not None:
            self._put_off.append(event)
            return
        if not isinstance(event, Pushed):
            super().handle(event)
            return
        self._commits()
        for contribution in event.contributions:
            arrive = Arrive(event.generation, contribution.replica, event.step)
            answer = self.quorum.handle(arrive, time.monotonic())[0]
            if not isinstance(answer, Accepted):
                continue
            super().handle(Pushed(event.generation, event.step, (contribution,)))
            if answer.members is not None and self.rounds.expected is None:
                self._close(Closed(event.generation, event.step, answer.members))

    def pause(self) -> None:
        """No step commits from here on, until :meth:`resume`."""
        self._put_off = []

    def resume(self) -> None:
        events, self._put_off = self._put_off or [], None
        for event in events:
            super().handle(event)

    def _close(self, event: Closed) -> None:
        self._last = event
        super().handle(event)
        self._closed(event)
        due = [w for step, w in self._closing if step == event.step]
        self._closing = [(s, w) for s, w in self._closing if s != event.step]
        for watcher in due:
            watcher(event)

    def watch_closed(self, step: int, watcher: Callable[[Closed], None]) -> None:
        """Call ``watcher`` once it is known whose gradients make a step."""
        if self._last is not None and self._last.step == step:
            watcher(self._last)
        else:
            self._closing.append((step, watcher))

    def _conclude(self, verdict: Verdict) -> None:
        if verdict.ok:
            event = Committed(verdict.generation, verdict.step, verdict.applied)
            self.quorum.handle(event, time.monotonic())
        self._then(verdict)


class AsyncLead:
    """Hands out the batches of an asynchronous job."""

    def __init__(
        self,
        cursor: Cursor,
        commits: Callable[[], None],
        account: Account,
        moved: Callable[[], None],
    ) -> None:
        self.cursor = cursor
        #: of all gradients: each passes through the lead shard
        self.account = account
        self._commits = commits
        self._moved = moved
        self._watchers: list[Callable[[], None]] = []

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last."""
        return self.cursor.exhausted

    def take(self, replica: int, request: int, epoch: int) -> Batch | Held | None:
        """The answer to a request; whoever is held may be less so now."""
        self._commits()
        bounded = self.cursor.max_staleness is not None
        before = self.cursor.clocks if bounded else []
        event = Take(self.cursor.generation, replica, request, epoch)
        answer: Batch | Held | None = self.cursor.handle(event, time.monotonic())[0]
        if bounded and self.cursor.clocks != before:
            self._moved()
            watchers, self._watchers = self._watchers, []
            for watcher in watchers:
                watcher()
        return answer

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` once some replica's clock has moved."""
        self._watchers.append(watcher)


def packed(answer: Batch | Held | None) -> Any:
    """An answer to a request for a batch, as it travels."""
    if isinstance(answer, Batch):
        return answer.epoch, answer.part, answer.index
    return None if answer is None else {"behind": list(answer.behind)}


def unpacked(found: Any) -> Batch | Held | None:
    if isinstance(found, dict):
        return Held(tuple(found["behind"]))
    return None if found is None else Batch(*found)


#: The answers to a join that are but a word, as they travel.
_WORDS: dict[str, Answer] = {"pass": Pass(), "done": EpochDone()}


def packed_answer(answer: Answer) -> Any:
    """An answer to a join, as it travels."""
    if isinstance(answer, Batch):
        return answer.epoch, answer.part, answer.index
    if isinstance(answer, Behind):
        return answer.step
    return next(word for word, meant in _WORDS.items() if meant == answer)


def unpacked_answer(found: Any) -> Answer:
    if isinstance(found, str):
        return _WORDS[found]
    return Behind(found) if isinstance(found, int) else Batch(*found)


class Account:
    """What became of asynchronous gradients: of a job's, or of one host's replicas."""

    def __init__(
        self, ledger: Ledger | None = None, totals: Totals | None = None, version: int = 0
    ) -> None:
        self.ledger = ledger or Ledger()
        self.totals = totals or Totals()
        self.version = version
        self.loss = float("nan")

    @property
    def samples(self) -> int:
        return sum(self.ledger.samples)

    def commit(self, contribution: Contribution, epoch: int, age: int, version: int) -> None:
        """A gradient was applied as update ``version`` of the lead shard."""
        self.ledger.commit(epoch, contribution.samples, age)
        # After a recovery the lead shard may be another, which is a few updates behind.
        self.version = max(self.version, version)
        self.loss = contribution.loss
        self.totals.loss += contribution.loss * contribution.weight
        self.totals.weight += contribution.weight
        self.totals.samples += contribution.samples

    def take_totals(self) -> Totals:
        totals, self.totals = self.totals, Totals()
        return totals
