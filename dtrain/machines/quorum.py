"""Synchronous steps that do not wait for everybody: who takes which batch, and who makes a step.

Backup replicas, after Chen et al. (2016, "Revisiting distributed synchronous SGD"): a step is
made of the first R - b gradients of R replicas that arrive.  A late one is dropped and counted,
never applied, and its batch is handed out again within the epoch.

A step goes: :class:`Join` (a batch for each), :class:`Arrive` (the last that is wanted closes the
step and fixes its members), :class:`Committed` (the verdict of :mod:`dtrain.machines.rounds`).
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.cursor import Batches
from dtrain.machines.ledger import Ledger
from dtrain.machines.plan import Plan
from dtrain.messages import Batch

# -- what a quorum is told ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A replica has the parameters of version ``step`` and wants a batch for that step."""

    generation: int
    replica: int
    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Arrive:
    """The gradient of a replica's batch of ``step`` is there."""

    generation: int
    replica: int
    step: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The verdict of a closed step; not ``applied``: its batches are used up without an update."""

    generation: int
    step: int
    applied: bool = True


# -- what it answers ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Behind:
    """The current step is another: read its parameters first.

    One that has read the next version already asks again: its verdict has yet to be told here.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Pass:
    """Nothing is left to take in this step; in the next, late ones' batches may have come back."""


@dataclass(frozen=True, slots=True)
class EpochDone:
    """All batches of the epoch are committed, or all steps of the job are done."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The gradient is one of the step's; ``members``: whose are, sorted, once that is known."""

    members: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Late:
    """The gradient came after its step was closed: it is dropped."""

    step: int


Answer = Batch | Behind | Pass | EpochDone | Accepted | Late


class Tally(NamedTuple):
    """What became of an epoch's gradients, and how many samples are committed.

    ``late`` counts from the beginning of the job: one may come after its epoch is over.
    """

    applied: int
    rejected: int
    late: int
    samples: int


# The words after those of the batches, before those of the replicas.
_STEP, _CLOSED, _APPLIED, _REJECTED, _LATE, _SAMPLES = range(6)
_HEAD = 6
# The words of a replica: what it does; its last batch, and the step of it plus one; the last two
# steps that its gradient was accepted for, plus one each.
_STATUS, _GIVEN, _AT_PART, _AT_INDEX, _MEMBER, _BEFORE = range(6)
_WIDTH = 6
# What a replica does in the current step: nothing yet, or nothing yet and it still owes the
# gradient of an earlier one; it has a batch; its gradient is there; it has nothing to do.
_AWAY, _OWES, _HOLDS, _ARRIVED, _PASSED = range(5)


class Quorum(Batches):
    """The batches and the members of the steps of a synchronous job with backups.

    A step closes at an arrival, when as many gradients are there as ``max(1, min(R - backups,
    arrived + holding + min(left, waiting)))``.  ``holding`` have a batch whose gradient is not
    there, ``waiting`` have neither joined nor passed, ``left`` batches are nobody's.  So one
    without data leaves the quorum, and nobody waits for a gradient that will not come.

    The batch of one who is not a member of a committed step goes back to the pool at once: its
    gradient can only come too late.  It counts as late when it arrives, or when its replica joins
    another step without it.

    Parameters
    ----------
    plan : Plan
        ``plan.steps`` counts steps, not batches.
    generation : int
    backups : int
        How many replicas a step does not wait for.
    state : mutable sequence of int, optional
        :meth:`words` numbers that hold all there is to know: zeros where a job begins, or another
        quorum's, which goes on from there.  Whoever shares them takes turns, and stores them after
        an event as a whole or not at all.
    """

    def __init__(
        self,
        plan: Plan,
        generation: int,
        backups: int,
        state: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        super().__init__(plan, [0] * self.words(plan.replicas) if state is None else state)
        self.generation = generation
        self.backups = backups
        self._head = Batches.words(plan.replicas)
        self._replicas = self._head + _HEAD

    @staticmethod
    def words(replicas: int) -> int:
        """How many numbers the state of a quorum for so many replicas has."""
        return Batches.words(replicas) + _HEAD + replicas * _WIDTH

    @classmethod
    def recovered(
        cls,
        plan: Plan,
        state: Sequence[int] | memoryview,
        step: int,
        applied: bool = True,
    ) -> list[int]:
        """The state that a new generation goes on with.

        ``step`` steps are known to be committed.  If that is one more than the state knows, the
        closed step is committed first (``applied``, or rejected): its verdict was recorded, but
        not here.  What is held and not committed goes back to the pool; nobody has joined.

        Raises
        ------
        ProtocolError
            The state is of another step.
        """
        words = list(state)
        quorum = cls(plan, 0, 0, words)
        if step != quorum.step:
            if step < quorum.step:
                raise ProtocolError(
                    f"quorum: found {step} steps committed, expected at least {quorum.step}"
                )
            quorum.handle(Committed(0, step - 1, applied), 0.0)
        for replica in range(plan.replicas):
            if quorum._status(replica) in (_HOLDS, _ARRIVED):
                quorum._give_back(quorum._batch(replica))
            at = quorum._at(replica)
            words[at : at + _WIDTH] = [0] * _WIDTH
        words[quorum._head + _CLOSED] = 0
        return words

    @property
    def step(self) -> int:
        """The step that is made: so many are committed."""
        return self.state[self._head + _STEP]

    @property
    def members(self) -> tuple[int, ...] | None:
        """Whose gradients make the current step, sorted; None while it is open."""
        return self._with(_ARRIVED) if self.closed else None

    @property
    def closed(self) -> bool:
        """Whether it is decided whose gradients make the current step."""
        return bool(self.state[self._head + _CLOSED])

    @property
    def done(self) -> bool:
        """All batches of the epoch are committed, or all steps of the job are done."""
        return self.complete or (self.plan.steps is not None and self.step >= self.plan.steps)

    @property
    def complete(self) -> bool:
        """All batches of the epoch are committed."""
        tally = self.account()
        return tally.applied + tally.rejected == self.plan.batches_per_epoch

    @property
    def exhausted(self) -> bool:
        """Whether this epoch is the job's last."""
        if self.plan.steps is not None:
            return self.step >= self.plan.steps
        return self.epoch + 1 >= self.plan.epochs

    def account(self) -> Tally:
        """What became of the gradients of this epoch."""
        at = self._head
        return Tally(*(self.state[at + k] for k in (_APPLIED, _REJECTED, _LATE, _SAMPLES)))

    def missing(self) -> tuple[int, ...]:
        """The replicas whose gradients the step may wait for, sorted; backups are among them."""
        if self.closed or self.done:
            return ()
        return self._with(_HOLDS, _AWAY, _OWES) if self.left else self._with(_HOLDS)

    def handle(self, event: Join | Arrive | Committed, now: float) -> list[Answer]:
        """One answer to a replica's event; none to a verdict.

        A repeat gets the same answer, and is counted once.  To ``Join``: :class:`Batch`,
        :class:`Behind`, :class:`Pass` or :class:`EpochDone`; in the next epoch (which the first to
        join it begins) once this one is done.  To ``Arrive``: :class:`Accepted` or :class:`Late`;
        :class:`Behind` to a member of a step so old that its members are forgotten.

        Raises
        ------
        FencedError
            The event is of another generation.
        ProtocolError
            It is of a step or an epoch that is not there yet, or of a batch that was not given.
        """
        self._check(event)
        if isinstance(event, Committed):
            if event.step == self.step:
                self._commit(event.applied)
            return []
        if isinstance(event, Arrive):
            return [self._arrived(event)]
        return [self._joined(event)]

    # -- a batch for each --------------------------------------------------------------------

    def _joined(self, event: Join) -> Answer:
        replica, at = event.replica, self._at(event.replica)
        if event.epoch < self.epoch:
            return EpochDone()
        if event.step != self.step:
            return Behind(self.step)
        if event.epoch > self.epoch:
            self._begin(event.epoch)
        if self._status(replica) in (_HOLDS, _ARRIVED):
            return self._batch(replica)
        if self._status(replica) == _OWES:
            # Who goes on without the gradient that it owes has dropped it.
            self._late(replica, _AWAY)
        if self.done:
            return EpochDone()
        if self._status(replica) == _PASSED or self.closed or not self.left:
            self.state[at + _STATUS] = _PASSED
            return Pass()
        batch = self._take(replica)
        self.state[at + _STATUS], self.state[at + _GIVEN] = _HOLDS, self.step + 1
        self.state[at + _AT_PART], self.state[at + _AT_INDEX] = batch.part, batch.index
        return batch

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        for word in (_APPLIED, _REJECTED, _SAMPLES):
            self.state[self._head + word] = 0

    # -- whose gradients make the step -------------------------------------------------------

    def _arrived(self, event: Arrive) -> Answer:
        replica, step, at = event.replica, event.step, self._at(event.replica)
        if step + 1 in (self.state[at + _MEMBER], self.state[at + _BEFORE]):
            return self._again(step)
        status = self._status(replica)
        if status == _HOLDS and step == self.step:
            if self.closed:
                self._give_back(self._batch(replica))
                return self._late(replica, _PASSED)
            self.state[at + _STATUS] = _ARRIVED
            self.state[at + _BEFORE] = self.state[at + _MEMBER]
            self.state[at + _MEMBER] = step + 1
            closes = len(self._with(_ARRIVED)) >= self._enough()
            self.state[self._head + _CLOSED] = int(closes)
            return Accepted(self.members)
        if status == _OWES and step + 1 == self.state[at + _GIVEN]:
            return self._late(replica, _AWAY)
        return Late(step)

    def _again(self, step: int) -> Answer:
        """To one whose gradient was accepted; who made a step is known until the next is made."""
        if step == self.step:
            return Accepted(self.members)
        if step < self.step - 1:
            return Behind(self.step)
        words, every = (_MEMBER, _BEFORE), range(self.plan.replicas)
        made = (i for i in every if step + 1 in [self.state[self._at(i) + w] for w in words])
        return Accepted(tuple(made))

    def _late(self, replica: int, status: int) -> Late:
        at = self._at(replica)
        self.state[self._head + _LATE] += 1
        self.state[at + _STATUS] = status
        return Late(self.state[at + _GIVEN] - 1)

    def _enough(self) -> int:
        """How many gradients close the step."""
        there = len(self._with(_ARRIVED, _HOLDS))
        waiting = len(self._with(_AWAY, _OWES))
        return max(1, min(self.plan.replicas - self.backups, there + min(self.left, waiting)))

    def _commit(self, applied: bool) -> None:
        state, head = self.state, self._head
        for replica in range(self.plan.replicas):
            at, status = self._at(replica), self._status(replica)
            if status == _ARRIVED:
                state[head + (_APPLIED if applied else _REJECTED)] += 1
                if applied:
                    batch = self._batch(replica)
                    state[head + _SAMPLES] += self.plan.samples(batch.part, batch.index)
            elif status == _HOLDS:
                self._give_back(self._batch(replica))
            state[at + _STATUS] = _OWES if status in (_HOLDS, _OWES) else _AWAY
        state[head + _STEP] += 1
        state[head + _CLOSED] = 0

    # -- what is legal -----------------------------------------------------------------------

    def _check(self, event: Join | Arrive | Committed) -> None:
        told = f"quorum: {type(event).__name__} of step {event.step}"
        if event.generation != self.generation:
            raise FencedError(
                f"{told} is of generation {event.generation}, expected {self.generation}"
            )
        if isinstance(event, Committed):
            if event.step > self.step or (event.step == self.step and not self.closed):
                state = "closed" if self.closed else "open"
                raise ProtocolError(f"{told}: found step {self.step} {state}, expected it closed")
            return
        if not 0 <= event.replica < self.plan.replicas:
            raise ProtocolError(
                f"{told}: found replica {event.replica}, "
                f"expected one of 0..{self.plan.replicas - 1}"
            )
        told = f"{told} by replica {event.replica}"
        if isinstance(event, Arrive):
            given = self.state[self._at(event.replica) + _GIVEN] - 1
            if not 0 <= event.step <= given:
                raise ProtocolError(f"{told}: it has no batch of that step (its last: {given})")
            return
        # The verdict of a closed step may be seen before it is told here.
        if not 0 <= event.step <= self.step + self.closed:
            raise ProtocolError(f"{told}: expected step {self.step}")
        if not 0 <= event.epoch <= self.epoch + 1:
            raise ProtocolError(
                f"{told}: found epoch {event.epoch}, expected {self.epoch} or {self.epoch + 1}"
            )
        if event.epoch > self.epoch and (not self.done or self.exhausted):
            left = self.plan.batches_per_epoch - sum(self.account()[:2])
            raise ProtocolError(
                f"{told}: found epoch {event.epoch}, expected {self.epoch}: "
                f"{'it is the last' if self.done else f'{left} of its batches are not committed'}"
            )

    # -- the words ---------------------------------------------------------------------------

    def _at(self, replica: int) -> int:
        return self._replicas + replica * _WIDTH

    def _status(self, replica: int) -> int:
        return self.state[self._at(replica) + _STATUS]

    def _with(self, *statuses: int) -> tuple[int, ...]:
        found = self.state[self._replicas + _STATUS :: _WIDTH]
        return tuple(i for i, status in enumerate(found) if status in statuses)

    def _batch(self, replica: int) -> Batch:
        at = self._at(replica)
        return Batch(self.epoch, self.state[at + _AT_PART], self.state[at + _AT_INDEX])


def with_quorum(ledger: Ledger, quorum: Quorum, base: Ledger) -> Ledger:
    """The whole account: of what was applied and rejected, and of what a quorum knows.

    ``base`` is an earlier one, which has all epochs before this one.
    """
    tally = quorum.account()
    ledger.late = tally.late
    ledger.samples = [*base.samples[: quorum.epoch], tally.samples]
    ledger.staleness[0] = ledger.applied
    ledger.replayed, ledger.duplicates = base.replayed, base.duplicates
    return ledger
