"""The one verdict of each synchronous step, taken where the lead shard is.

A step commits when all its members' gradients have arrived at the lead and every shard has
summed and applied them into its other buffer without a problem.  The verdict is recorded before
anything flips; asking again gets the recorded one.  With backups the members are those that the
quorum (:mod:`dtrain.machines.quorum`) has closed the step with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.ledger import Ledger
from dtrain.messages import Closed, Contribution, Decide, Pushed, Reduced, Verdict
from dtrain.tree import tree_sum


@dataclass
class Totals:
    """Sums over the applied steps of an epoch, in step order, as Python floats."""

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
        The sorted logical ids that take part in a step; None: whose gradients arrive first, as
        :class:`dtrain.messages.Closed` will say.  Until then the gradient of any replica is
        taken; those of others than the members, and of steps long over, are left out.
    epoch_of : callable of int
        The epoch of a step.
    ledger, totals : optional
        What is known of the steps before; empty at the start of a job.
    skip : bool
        Whether a step with a problem (a loss or a gradient that is not finite) is passed over: it
        is rejected, the parameters stay as they are, and the next one begins.  Else it is refused
        and stays the current one for ever.
    """

    def __init__(
        self,
        generation: int,
        step: int,
        shards: int,
        replicas: int,
        members: Callable[[int], tuple[int, ...] | None],
        epoch_of: Callable[[int], int],
        ledger: Ledger | None = None,
        totals: Totals | None = None,
        *,
        skip: bool = False,
    ) -> None:
        self.generation = generation
        #: the step being decided
        self.step = step
        self.shards = shards
        self.replicas = replicas
        self.skip = skip
        self.ledger = ledger or Ledger()
        self.totals = totals or Totals()
        #: the mean loss of the last applied step
        self.loss = math.nan
        #: the verdicts of the last two steps: a survivor may be one step behind
        self.verdicts: dict[int, Verdict] = {}
        self.arrived: dict[int, Contribution] = {}
        self.reduced: dict[int, Reduced] = {}
        #: when the step began, by the first event that said so
        self.since: float | None = None
        self._members = members
        self._epoch_of = epoch_of
        #: who takes part in the step; None: the quorum is open
        self.expected: tuple[int, ...] | None = None
        #: whether a quorum decides who takes part: then a gradient may come late
        self.backups = False
        self._expect()

    def handle(self, event: Pushed | Closed | Reduced, now: float) -> list[Decide]:
        self._check(event)
        if event.step < self.step:
            return self._over(event)
        if self.since is None:
            self.since = now
        if isinstance(event, Pushed):
            for contribution in event.contributions:
                if contribution.replica in self.arrived:
                    self.ledger.duplicates += 1
                elif self.expected is None or contribution.replica in self._wanted:
                    self.arrived[contribution.replica] = contribution
        elif isinstance(event, Closed):
            self._close(event.members)
        else:
            self.reduced[event.shard] = event
        if self.step in self.verdicts:
            return [Decide(self.verdicts[self.step])]
        if self.expected is None or len(self.arrived) < len(self.expected):
            return []
        if len(self.reduced) < self.shards:
            return []
        return [Decide(self._decide(self.expected))]

    def _over(self, event: Pushed | Closed | Reduced) -> list[Decide]:
        """The recorded verdict; of a step whose verdict is forgotten, nothing."""
        verdict = self.verdicts.get(event.step)
        if verdict is None:
            return []
        if isinstance(event, Pushed):
            again = [c for c in event.contributions if c.replica in verdict.members]
            self.ledger.duplicates += len(again)
        return [Decide(verdict)]

    def _close(self, members: tuple[int, ...]) -> None:
        self.expected, self._wanted = members, frozenset(members)
        self.arrived = {i: c for i, c in self.arrived.items() if i in self._wanted}

    def _decide(self, members: tuple[int, ...]) -> Verdict:
        problem = self._problem(members)
        weights = {i: self.arrived[i].weight for i in members}
        weight = tree_sum(weights, self.replicas)
        applied = problem is None
        ok = applied or self.skip
        verdict = Verdict(self.generation, self.step, members, weight, ok, problem, applied)
        self.verdicts[self.step] = verdict
        self.verdicts.pop(self.step - 2, None)
        if applied:
            self._account(members, weights, weight)
        else:
            self.ledger.rejected += len(members)
        # A refused step stays the current one: it may never be decided otherwise.
        if ok:
            self.step += 1
            self.arrived, self.reduced, self.since = {}, {}, None
            self._expect()
        return verdict

    def _account(self, members: tuple[int, ...], weights: dict[int, float], weight: float) -> None:
        epoch = self._epoch_of(self.step)
        for i in members:
            self.ledger.commit(epoch, self.arrived[i].samples, age=0)
        loss = tree_sum({i: self.arrived[i].loss * weights[i] for i in members}, self.replicas)
        self.loss = loss / weight if weight else 0.0
        self.totals.loss += loss
        self.totals.weight += weight
        self.totals.samples += sum(self.arrived[i].samples for i in members)

    def _problem(self, members: tuple[int, ...]) -> str | None:
        for i in members:
            c = self.arrived[i]
            if not math.isfinite(c.loss):
                return describe_loss(c, self.step)
        problems = (self.reduced[shard].problem for shard in sorted(self.reduced))
        return next((problem for problem in problems if problem is not None), None)

    def _expect(self) -> None:
        self.expected = self._members(self.step)
        self._wanted = frozenset(self.expected or ())
        self.backups = self.backups or self.expected is None

    def take_totals(self) -> Totals:
        """The sums since they were last taken: one epoch's."""
        totals, self.totals = self.totals, Totals()
        return totals

    def missing(self) -> tuple[int, ...]:
        """The replicas whose gradients the step waits for; none while nobody is named."""
        return tuple(i for i in self.expected or () if i not in self.arrived)

    def _check(self, event: Pushed | Closed | Reduced) -> None:
        if event.generation != self.generation:
            raise FencedError(
                f"{self._told(event)} is of generation {event.generation}, "
                f"expected {self.generation}"
            )
        known = event.step == self.step or event.step in self.verdicts
        if not known and not (self.backups and self._may_be_late(event)):
            raise ProtocolError(f"{self._told(event)}: expected step {self.step}")
        if isinstance(event, Reduced) and not 0 <= event.shard < self.shards:
            raise ProtocolError(
                f"{self._told(event)}: "
                f"found shard {event.shard}, expected one of 0..{self.shards - 1}"
            )
        if isinstance(event, Pushed) and event.step == self.step:
            self._check_part(event)
        if isinstance(event, Closed):
            self._check_members(event)

    def _may_be_late(self, event: Pushed | Closed | Reduced) -> bool:
        return isinstance(event, Pushed) and 0 <= event.step < self.step

    def _check_part(self, event: Pushed) -> None:
        every = range(self.replicas)
        expected = every if self.backups else self.expected or ()
        for c in event.contributions:
            if c.replica not in expected:
                raise ProtocolError(
                    f"{self._told(event)}: "
                    f"replica {c.replica} takes no part in it, "
                    f"expected one of {list(expected)}"
                )

    def _check_members(self, event: Closed) -> None:
        """A step is closed once, with somebody, and whoever says so again says the same."""
        found = event.members
        verdict = self.verdicts.get(event.step)
        expected = self.expected if verdict is None else verdict.members
        if expected is not None and found != expected:
            raise ProtocolError(
                f"{self._told(event)}: found members {list(found)}, expected {list(expected)}"
            )
        if not found or list(found) != sorted(set(found) & set(range(self.replicas))):
            raise ProtocolError(
                f"{self._told(event)}: found members {list(found)}, "
                f"expected some of {list(range(self.replicas))}, in this order"
            )

    def _told(self, event: Pushed | Closed | Reduced) -> str:
        return f"lead: {type(event).__name__} of step {event.step}"


def describe_loss(c: Contribution, step: int) -> str:
    """Whose loss is not finite, in words."""
    return (
        f"the loss of replica {c.replica} is {c.loss} at step {step} "
        f"(partition {c.part}, batch {c.batch})"
    )
