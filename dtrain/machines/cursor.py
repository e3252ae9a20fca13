"""Who takes which batch: of asynchronous jobs, and of synchronous ones with backups.

:class:`Batches` hands out whole batches, each once per epoch; :class:`Cursor` says when a replica
gets one in async mode, :mod:`.quorum` in sync mode with backups.
"""

from __future__ import annotations

from collections.abc import Collection, MutableSequence, Sequence
from dataclasses import dataclass

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.plan import Plan
from dtrain.messages import Batch


class Batches:
    """Hands out the batches of one epoch after the other, each once per epoch.

    A replica gets the batches of its own part in order; one that is done takes whole batches
    from the end of the part with the most left.  Batches that came back lie in a pool, and
    whoever takes next takes them from there.

    Parameters
    ----------
    plan : Plan
    state : mutable sequence of int
        The first :meth:`words` of them are this class's, the others its heirs'.  A replica has
        one batch at a time, so that no more than ``plan.replicas`` of them can come back.
    """

    #: The words before those of the parts and of the pool.
    _EPOCH, _TAKEN, _POOLED = range(3)
    _PARTS = 3

    def __init__(self, plan: Plan, state: MutableSequence[int] | memoryview) -> None:
        self.plan = plan
        self.state = state
        self._pool = self._PARTS + plan.replicas * 2

    @staticmethod
    def words(replicas: int) -> int:
        """How many numbers the state for so many replicas has."""
        return Batches._PARTS + replicas * 4

    @property
    def epoch(self) -> int:
        return self.state[self._EPOCH]

    @property
    def left(self) -> int:
        """Batches of this epoch that nobody has taken, or that came back."""
        return self.plan.batches_per_epoch - self.state[self._TAKEN]

    @property
    def whole(self) -> bool:
        """Whether all of the epoch's batches are taken, not only as many as ``steps`` wants."""
        return self.state[self._TAKEN] == self.plan.batches_per_epoch

    def _begin(self, epoch: int) -> None:
        """All batches are there again."""
        self.state[self._EPOCH], self.state[self._TAKEN], self.state[self._POOLED] = epoch, 0, 0
        for at in range(self._PARTS, self._pool):
            self.state[at] = 0

    def _take(self, replica: int) -> Batch:
        batch = self._next(replica)
        self.state[self._TAKEN] += 1
        return batch

    def _give_back(self, batch: Batch) -> None:
        at = self._pool + 2 * self.state[self._POOLED]
        self.state[at], self.state[at + 1] = batch.part, batch.index
        self.state[self._POOLED] += 1
        self.state[self._TAKEN] -= 1

    def _next(self, replica: int) -> Batch:
        if self.state[self._POOLED]:
            self.state[self._POOLED] -= 1
            at = self._pool + 2 * self.state[self._POOLED]
            return Batch(self.epoch, self.state[at], self.state[at + 1])
        # A part's words: how many of its batches are taken from its start, and from its end.
        if self._left_of(replica):
            at = self._PARTS + replica * 2
            self.state[at] += 1
            return Batch(self.epoch, replica, self.state[at] - 1)
        fullest = max(range(self.plan.replicas), key=lambda p: (self._left_of(p), -p))
        at = self._PARTS + fullest * 2 + 1
        self.state[at] += 1
        return Batch(self.epoch, fullest, self.plan.batches(fullest) - self.state[at])

    def _left_of(self, part: int) -> int:
        at = self._PARTS + part * 2
        return self.plan.batches(part) - self.state[at] - self.state[at + 1]


@dataclass(frozen=True, slots=True)
class Take:
    """A replica asks for its ``request``-th batch of the job (from 0); a retry repeats it.

    It asks once the gradient of its batch before has been applied.
    """

    generation: int
    replica: int
    request: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Held:
    """No batch yet: the replica is too far ahead of ``behind``, the slowest ones, sorted.

    It asks again, by the same number, until it is answered.
    """

    behind: tuple[int, ...]


# The words of a replica: how many requests it has made, the answer to the last of them, and its
# clock.
_REQUESTS, _ANSWERED, _AT_EPOCH, _AT_PART, _AT_INDEX, _CLOCK = range(6)
_WIDTH = 6
# What it was answered: that there is no more (or it has not asked), a batch; or its last batch is
# applied and the request after it is held.
_NOTHING, _BATCH, _HELD = range(3)


class Cursor(Batches):
    """Hands out the batches of an asynchronous job, and holds back who is too far ahead.

    With ``max_staleness`` it is the stale synchronous parallel of Ho et al. (2013, "More
    effective distributed ML via a stale synchronous parallel parameter server").  The clock of a
    replica is the number of its batches that were applied since the epoch began.  A replica gets
    a batch only if its clock is at most ``max_staleness`` ahead of the slowest; one that has not
    asked yet stands at 0.  Nobody waits for one that has left the epoch: it was told that there
    is no more, and so is everybody after it, however far ahead.  While a replica works on a batch
    no other applies more than ``2 * max_staleness + 1``, so (R - 1)(2 max_staleness + 1) updates
    at most come between the answer and the apply.  For this to be a gradient's age the parameters
    must not be older than the answer: who was held reads them anew.  The slowest is never held,
    so somebody can always go on.

    Parameters
    ----------
    plan : Plan
    generation : int
    state : mutable sequence of int, optional
        :meth:`words` numbers that hold all there is to know: zeros where a cursor begins, or
        another cursor's, which goes on from there.  Whoever shares them takes turns.
    max_staleness : int, optional
        None: nobody is ever held.
    """

    def __init__(
        self,
        plan: Plan,
        generation: int,
        state: MutableSequence[int] | memoryview | None = None,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(plan, [0] * self.words(plan.replicas) if state is None else state)
        self.generation = generation
        self.max_staleness = max_staleness
        self._handed = Batches.words(plan.replicas)
        self._open = self._handed + 1
        self._replicas = self._open + 1

    @staticmethod
    def words(replicas: int) -> int:
        """How many numbers the state of a cursor for so many replicas has."""
        return Batches.words(replicas) + 2 + replicas * _WIDTH

    @classmethod
    def recovered(
        cls, plan: Plan, state: Sequence[int] | memoryview, done: Collection[int]
    ) -> list[int]:
        """The state that a new generation goes on with.

        What a replica had and has not seen applied goes back to the pool, unless the replica is
        among ``done``: those whose last batch is known to be applied.  Requests and clocks start
        from 0.
        """
        words = list(state)
        cursor = cls(plan, 0, words)
        for replica in range(plan.replicas):
            batch = cursor.outstanding(replica)
            if batch is not None and batch.epoch == cursor.epoch and replica not in done:
                cursor._give_back(batch)
            at = cursor._at(replica)
            words[at : at + _WIDTH] = [0] * _WIDTH
        words[cursor._open] = 0
        return words

    def requested(self, replica: int) -> int:
        """How many requests of a replica were answered."""
        return self.state[self._at(replica) + _REQUESTS]

    def outstanding(self, replica: int) -> Batch | None:
        """The batch that a replica has and is not known to have been applied, if there is one."""
        return self._answer(self._at(replica))

    def clock(self, replica: int) -> int:
        """How many batches of a replica are known to have been applied in this epoch."""
        return self.state[self._at(replica) + _CLOCK]

    @property
    def clocks(self) -> list[int | None]:
        """Those of all replicas."""
        return [self.clock(replica) for replica in range(self.plan.replicas)]

    @property
    def handed(self) -> int:
        """Batches handed out over all epochs, without those that came back."""
        return self.state[self._handed]

    @property
    def left(self) -> int:
        """Batches of this epoch that nobody has taken yet."""
        left = super().left
        if self.plan.steps is not None:
            left = min(left, self.plan.steps - self.handed)
        return left

    @property
    def open(self) -> int:
        """Batches that are taken and not known to be applied."""
        return self.state[self._open]

    @property
    def drained(self) -> bool:
        """All of the epoch's batches are taken and applied."""
        return self.left == 0 and self.open == 0

    @property
    def exhausted(self) -> bool:
        """Whether this epoch is the job's last."""
        if self.plan.steps is not None:
            return self.handed >= self.plan.steps
        return self.epoch + 1 >= self.plan.epochs

    def handle(self, event: Take, now: float) -> list[Batch | Held | None]:
        """One answer to a request: a :class:`Batch`, None (the epoch has no more), or `Held`."""
        state, at = self.state, self._at(event.replica)
        self._check(event)
        if event.request == self.requested(event.replica) - 1:
            return [self._answer(at)]
        # Asking anew says that the last batch is done.
        done = state[at + _ANSWERED] == _BATCH
        still = self.open - done
        if event.epoch != self.epoch:
            if event.epoch != self.epoch + 1 or self.left or still:
                raise ProtocolError(
                    f"replica {event.replica} asks for epoch {event.epoch}: epoch {self.epoch} "
                    f"has {self.left} batches left and {still} open"
                )
            self._begin(event.epoch)
        else:
            state[at + _CLOCK] += done
        state[self._open] = still
        behind = self._behind(event.replica) if self.left else ()
        if behind:
            state[at + _ANSWERED] = _HELD
            return [Held(behind)]
        state[at + _REQUESTS] = event.request + 1
        if not self.left:
            state[at + _ANSWERED] = _NOTHING
            return [None]
        batch = self._take(event.replica)
        state[self._handed] += 1
        state[self._open] += 1
        state[at + _ANSWERED] = _BATCH
        state[at + _AT_EPOCH], state[at + _AT_PART] = batch.epoch, batch.part
        state[at + _AT_INDEX] = batch.index
        return [batch]

    def _check(self, event: Take) -> None:
        if event.generation != self.generation:
            raise FencedError(
                f"Take of generation {event.generation}: expected generation {self.generation}"
            )
        if not 0 <= event.replica < self.plan.replicas:
            raise ProtocolError(
                f"replica {event.replica} asks for a batch: "
                f"expected one of 0..{self.plan.replicas - 1}"
            )
        number = self.requested(event.replica)
        # Whose request is held does not ask for what came before it.
        held = self.state[self._at(event.replica) + _ANSWERED] == _HELD
        if event.request != number and (held or event.request != number - 1):
            raise ProtocolError(
                f"replica {event.replica} asks for batch {event.request}: expected {number}"
            )

    def _behind(self, replica: int) -> tuple[int, ...]:
        """The slowest, if the replica is too far ahead of them."""
        if self.max_staleness is None:
            return ()
        clocks = [self.clock(i) for i in range(self.plan.replicas)]
        slowest = min(clocks)
        if clocks[replica] - slowest <= self.max_staleness:
            return ()
        return tuple(i for i, clock in enumerate(clocks) if clock == slowest)

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        for replica in range(self.plan.replicas):
            self.state[self._at(replica) + _CLOCK] = 0

    def _give_back(self, batch: Batch) -> None:
        super()._give_back(batch)
        self.state[self._handed] -= 1

    def _at(self, replica: int) -> int:
        return self._replicas + replica * _WIDTH

    def _answer(self, at: int) -> Batch | None:
        if self.state[at + _ANSWERED] != _BATCH:
            return None
        return Batch(*(self.state[at + k] for k in (_AT_EPOCH, _AT_PART, _AT_INDEX)))
