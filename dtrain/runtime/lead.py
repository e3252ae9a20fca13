"""The lead: where the verdict of a step is recorded, and the batches of async mode are given.

It lives on the host of shard 0 and runs the machines for the master, so that no step waits for
the scheduler.  All methods want the arena's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dtrain.errors import ProtocolError
from dtrain.machines.cursor import Cursor, Take
from dtrain.machines.ledger import Ledger
from dtrain.machines.rounds import Rounds, Totals
from dtrain.messages import Batch, Contribution, Pushed, Reduced, Verdict


class SyncLead:
    """Decides the steps of a synchronous job and tells the verdicts to whoever asks."""

    def __init__(
        self, rounds: Rounds, decided: Callable[[Verdict], None], commits: Callable[[], None]
    ) -> None:
        self.rounds = rounds
        #: raises if nothing may be committed any more
        self._commits = commits
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


class AsyncLead:
    """Hands out the batches of an asynchronous job."""

    def __init__(self, cursor: Cursor, commits: Callable[[], None], account: Account) -> None:
        self.cursor = cursor
        #: of all gradients: each passes through the lead shard
        self.account = account
        self._commits = commits

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last."""
        return self.cursor.exhausted

    def take(self, replica: int, request: int, epoch: int) -> Batch | None:
        self._commits()
        event = Take(self.cursor.generation, replica, request, epoch)
        return self.cursor.handle(event, time.monotonic())[0]


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
        self.version = version
        self.loss = contribution.loss
        self.totals.loss += contribution.loss * contribution.weight
        self.totals.weight += contribution.weight
        self.totals.samples += contribution.samples

    def take_totals(self) -> Totals:
        totals, self.totals = self.totals, Totals()
        return totals
