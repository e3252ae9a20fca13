"""The lead: where the verdict of a step is recorded, and the batches of async mode are given.

It lives on the host of shard 0 and runs the machines for the master, so that no step waits for
the scheduler.  All methods want the arena's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dtrain.errors import ProtocolError
from dtrain.machines.cursor import Commit, Cursor, Plan, Take
from dtrain.machines.ledger import Ledger
from dtrain.machines.rounds import Rounds, Totals
from dtrain.messages import Batch, Contribution, Pushed, Reduced, Verdict


class SyncLead:
    """Decides the steps of a synchronous job and tells the verdicts to whoever asks."""

    def __init__(self, rounds: Rounds, decided: Callable[[Verdict], None]) -> None:
        self.rounds = rounds
        self._decided = decided
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

    def handle(self, event: Pushed | Reduced) -> None:
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

    def watch(self, step: int, watcher: Callable[[Verdict], None]) -> None:
        """Call ``watcher`` with the verdict of a step, now or once it is recorded."""
        verdict = self.rounds.verdicts.get(step)
        if verdict is not None:
            watcher(verdict)
        elif step >= self.rounds.step:
            self._watchers.append((step, watcher))
        else:
            raise ProtocolError(f"verdict of step {step}: expected step {self.rounds.step}")

    def waiting(self) -> dict[str, Any]:
        since = self.rounds.since
        return {
            "step": self.rounds.step,
            "missing": list(self.rounds.missing()),
            "for": 0.0 if since is None else time.monotonic() - since,
        }


class AsyncLead:
    """Hands out the batches of an asynchronous job and keeps its ledger."""

    def __init__(self, cursor: Cursor, replicas: int) -> None:
        self.cursor = cursor
        self.plan: Plan = cursor.plan
        self.ledger = Ledger()
        self.replicas = replicas
        self.version = 0
        self.loss = float("nan")
        self._totals = Totals()
        #: replica -> (batches committed, when the last one was)
        self.progress: dict[int, tuple[int, float]] = {}

    @property
    def samples(self) -> int:
        return sum(self.ledger.samples)

    def take(self, replica: int, request: int, epoch: int) -> Batch | None:
        event = Take(self.cursor.generation, replica, request, epoch)
        self.progress.setdefault(replica, (0, time.monotonic()))
        return self.cursor.handle(event, time.monotonic())[0]

    def commit(self, contribution: Contribution, batch: Batch, version: int, age: int) -> None:
        if self.cursor.out.get(batch):
            self.ledger.duplicates += 1
            return
        self.cursor.handle(Commit(self.cursor.generation, batch), time.monotonic())
        self.ledger.commit(batch.epoch, contribution.samples, age)
        self.version = max(self.version, version)
        self.loss = contribution.loss
        self._totals.loss += contribution.loss * contribution.weight
        self._totals.weight += contribution.weight
        self._totals.samples += contribution.samples
        count, _ = self.progress.get(contribution.replica, (0, 0.0))
        self.progress[contribution.replica] = (count + 1, time.monotonic())

    def take_totals(self) -> Totals:
        totals, self._totals = self._totals, Totals()
        return totals

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last."""
        if self.plan.steps is not None:
            return self.cursor.handed >= self.plan.steps
        return self.cursor.epoch + 1 >= self.plan.epochs

    def waiting(self) -> dict[str, Any]:
        now = time.monotonic()
        idle = {i: now - last for i, (_, last) in self.progress.items()}
        slow = sorted(i for i, seconds in idle.items() if seconds > 1.0 and self.cursor.left)
        return {
            "step": self.version,
            "missing": slow,
            "for": max((idle[i] for i in slow), default=0.0),
        }
