"""The one verdict of each synchronous step, taken where the lead shard is.

A step commits when all its members' gradients have arrived at the lead and every shard has
summed and applied them into its other buffer without a problem.  The verdict is recorded before
anything flips; asking again gets the recorded one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.ledger import Ledger
from dtrain.messages import Contribution, Decide, Pushed, Reduced, Verdict
from dtrain.tree import tree_sum


@dataclass
class Totals:
    """Sums over the committed steps of an epoch, in step order, as Python floats."""

    loss: float = 0.0
    weight: float = 0.0
    samples: int = 0


class Rounds:
    """Decides the steps of one generation of a synchronous job, one after the other.

    Parameters
    ----------
    generation, step, shards, replicas : int
        ``step`` is the first to decide: the version that replicas read first.
    members : callable of int
        The sorted logical ids that take part in a step.
    epoch_of : callable of int
        The epoch of a step.
    ledger, totals : optional
        What is known of the steps before; empty at the start of a job.
    """

    def __init__(
        self,
        generation: int,
        step: int,
        shards: int,
        replicas: int,
        members: Callable[[int], tuple[int, ...]],
        epoch_of: Callable[[int], int],
        ledger: Ledger | None = None,
        totals: Totals | None = None,
    ) -> None:
        self.generation = generation
        #: the step being decided
        self.step = step
        self.shards = shards
        self.replicas = replicas
        self.ledger = ledger or Ledger()
        self.totals = totals or Totals()
        #: the mean loss of the last committed step
        self.loss = math.nan
        #: the verdicts of the last two steps: a survivor may be one step behind
        self.verdicts: dict[int, Verdict] = {}
        self.arrived: dict[int, Contribution] = {}
        self.reduced: dict[int, Reduced] = {}
        #: when the step began, by the first event that said so
        self.since: float | None = None
        self._members = members
        self._epoch_of = epoch_of
        self._expect()

    def handle(self, event: Pushed | Reduced, now: float) -> list[Decide]:
        self._check(event)
        if event.step < self.step:
            if isinstance(event, Pushed):
                self.ledger.duplicates += len(event.contributions)
            return [Decide(self.verdicts[event.step])]
        if self.since is None:
            self.since = now
        if isinstance(event, Pushed):
            for contribution in event.contributions:
                if contribution.replica in self.arrived:
                    self.ledger.duplicates += 1
                else:
                    self.arrived[contribution.replica] = contribution
        else:
            self.reduced[event.shard] = event
        if self.step in self.verdicts:
            return [Decide(self.verdicts[self.step])]
        if len(self.arrived) < len(self.expected) or len(self.reduced) < self.shards:
            return []
        return [Decide(self._decide())]

    def _decide(self) -> Verdict:
        members = self.expected
        problem = self._problem()
        weights = {i: self.arrived[i].weight for i in members}
        weight = tree_sum(weights, self.replicas)
        verdict = Verdict(self.generation, self.step, members, weight, problem is None, problem)
        self.verdicts[self.step] = verdict
        self.verdicts.pop(self.step - 2, None)
        if problem is not None:
            # A refused step stays the current one: it may never be decided otherwise.
            self.ledger.rejected += len(members)
            return verdict
        epoch = self._epoch_of(self.step)
        for i in members:
            self.ledger.commit(epoch, self.arrived[i].samples, age=0)
        loss = tree_sum({i: self.arrived[i].loss * weights[i] for i in members}, self.replicas)
        self.loss = loss / weight
        self.totals.loss += loss
        self.totals.weight += weight
        self.totals.samples += sum(self.arrived[i].samples for i in members)
        self.step += 1
        self.arrived, self.reduced, self.since = {}, {}, None
        self._expect()
        return verdict

    def _problem(self) -> str | None:
        for i in self.expected:
            c = self.arrived[i]
            if not math.isfinite(c.loss):
                return (
                    f"the loss of replica {i} is {c.loss} at step {self.step} "
                    f"(partition {c.part}, batch {c.batch})"
                )
        problems = (self.reduced[shard].problem for shard in sorted(self.reduced))
        return next((problem for problem in problems if problem is not None), None)

    def _expect(self) -> None:
        self.expected = self._members(self.step)
        self._wanted = frozenset(self.expected)

    def take_totals(self) -> Totals:
        """The sums since they were last taken: one epoch's."""
        totals, self.totals = self.totals, Totals()
        return totals

    def missing(self) -> tuple[int, ...]:
        """The replicas whose gradients the step waits for."""
        return tuple(i for i in self.expected if i not in self.arrived)

    def _check(self, event: Pushed | Reduced) -> None:
        if event.generation != self.generation:
            raise FencedError(
                f"{self._told(event)} is of generation {event.generation}, "
                f"expected {self.generation}"
            )
        if event.step > self.step or (event.step < self.step and event.step not in self.verdicts):
            raise ProtocolError(f"{self._told(event)}: expected step {self.step}")
        if isinstance(event, Reduced) and not 0 <= event.shard < self.shards:
            raise ProtocolError(
                f"{self._told(event)}: "
                f"found shard {event.shard}, expected one of 0..{self.shards - 1}"
            )
        if isinstance(event, Pushed) and event.step == self.step:
            for c in event.contributions:
                if c.replica not in self._wanted:
                    raise ProtocolError(
                        f"{self._told(event)}: "
                        f"replica {c.replica} takes no part in it, "
                        f"expected one of {list(self.expected)}"
                    )

    def _told(self, event: Pushed | Reduced) -> str:
        return f"lead: {type(event).__name__} of step {event.step}"
