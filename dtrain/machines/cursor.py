"""Which rows, when: the plan of a job's data, and who takes which batch.

The rows are cut once into as many near-equal contiguous *parts* as the job has logical
replicas.  In sync mode replica i trains on part i and everything follows from (seed, epoch,
part).  In async mode the :class:`Cursor` hands out whole batches, each once per epoch.
"""

from __future__ import annotations

from collections.abc import Collection, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dtrain.errors import DataError, FencedError, ProtocolError
from dtrain.messages import Batch

#: Keeps the streams of the generators apart that share a seed.
_ORDER, _SPLIT = 1, 2


def cuts(rows: int, parts: int) -> tuple[int, ...]:
    """The bounds of ``parts`` near-equal contiguous parts: sizes differ by one at most."""
    return tuple(rows * i // parts for i in range(parts + 1))


def order(seed: int, epoch: int, part: int, size: int, shuffle: bool) -> np.ndarray | None:
    """The order of a part's rows in an epoch: a permutation of int64, or None for as they lie."""
    if not shuffle:
        return None
    return np.random.default_rng([seed, _ORDER, epoch, part]).permutation(size)


def len_of_split(rows: int, fraction: float | None) -> int:
    """How many rows a fraction holds out for validation."""
    return 0 if fraction is None else round(rows * fraction)


def split(rows: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeded random rows for validation, and the rest for training; both sorted, int64."""
    held = len_of_split(rows, fraction)
    if not 0 < held < rows:
        raise DataError(
            f"validation_split: {fraction} of {rows} rows is {held}, "
            f"expected at least one row for validation and one for training"
        )
    mixed = np.random.default_rng([seed, _SPLIT]).permutation(rows)
    return np.sort(mixed[held:]), np.sort(mixed[:held])


@dataclass(frozen=True)
class Plan:
    """The frozen plan of a job's data: everything about batches that the sizes decide.

    Parameters
    ----------
    rows : int
        Training rows in all.
    replicas, batch_size, epochs : int
    steps : int or None
        The number of steps in all; overrides ``epochs``.
    """

    rows: int
    replicas: int
    batch_size: int
    epochs: int
    steps: int | None = None
    bounds: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.rows < self.replicas:
            raise DataError(
                f"found {self.rows} rows to train on for {self.replicas} replicas, "
                f"expected at least one for each"
            )
        object.__setattr__(self, "bounds", cuts(self.rows, self.replicas))

    def size(self, part: int) -> int:
        return self.bounds[part + 1] - self.bounds[part]

    def batches(self, part: int) -> int:
        """How many batches a part has in an epoch; the last may be ragged."""
        return -(-self.size(part) // self.batch_size)

    def samples(self, part: int, index: int) -> int:
        """How many rows batch ``index`` of ``part`` has."""
        return min(self.batch_size, self.size(part) - index * self.batch_size)

    @cached_property
    def steps_per_epoch(self) -> int:
        return max(self.batches(part) for part in range(self.replicas))

    @cached_property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.replicas))

    @cached_property
    def _full(self) -> int:
        """Steps of an epoch that every replica takes part in."""
        return min(self.batches(part) for part in range(self.replicas))

    @cached_property
    def batches_per_epoch(self) -> int:
        return sum(self.batches(part) for part in range(self.replicas))

    # -- sync: a step is one batch of every replica that has one left --------------------

    @property
    def total_steps(self) -> int:
        """Synchronous steps in all."""
        return self.steps if self.steps is not None else self.epochs * self.steps_per_epoch

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch (from 0) of a synchronous step, and its index within the epoch."""
        return divmod(step, self.steps_per_epoch)

    def members(self, step: int) -> tuple[int, ...]:
        """Who takes part in a synchronous step: a replica without data leaves the quorum."""
        index = step % self.steps_per_epoch
        if index < self._full:
            return self._all
        return tuple(part for part in range(self.replicas) if index < self.batches(part))

    def ends_epoch(self, step: int) -> bool:
        """Whether a synchronous step is the last of its epoch, or of the job."""
        return (step + 1) % self.steps_per_epoch == 0 or step + 1 == self.total_steps


@dataclass(frozen=True, slots=True)
class Take:
    """A replica asks for its ``request``-th batch of the job (from 0); a retry repeats it.

    It asks once the gradient of its batch before has been applied.
    """

    generation: int
    replica: int
    request: int
    epoch: int


# The words of a cursor's state, before those of the parts, of the replicas and of the pool.
_EPOCH, _HANDED, _OPEN, _TAKEN, _POOLED = range(5)
_HEAD = 5
# The words of a replica: how many requests it has made, and the answer to the last of them.
_REQUESTS, _ANSWERED, _AT_EPOCH, _AT_PART, _AT_INDEX = range(5)
_WIDTH = 5


class Cursor:
    """Hands out the batches of an asynchronous job, each once per epoch.

    A replica gets the batches of its own part in order; one that is done takes whole batches
    from the end of the part with the most left.  Batches that came back after a death lie in a
    pool, and whoever asks next takes them from there.

    Parameters
    ----------
    plan : Plan
    generation : int
    state : mutable sequence of int, optional
        :meth:`words` numbers that hold all there is to know: zeros where a cursor begins, or
        another cursor's, which goes on from there.  Whoever shares them takes turns.
    """

    def __init__(
        self, plan: Plan, generation: int, state: MutableSequence[int] | memoryview | None = None
    ) -> None:
        self.plan = plan
        self.generation = generation
        self.state = [0] * self.words(plan.replicas) if state is None else state
        self._parts = _HEAD
        self._replicas = _HEAD + plan.replicas * 2
        self._pool = self._replicas + plan.replicas * _WIDTH

    @staticmethod
    def words(replicas: int) -> int:
        """How many numbers the state of a cursor for so many replicas has."""
        return _HEAD + replicas * (2 + _WIDTH + 2)

    @classmethod
    def recovered(
        cls, plan: Plan, state: Sequence[int] | memoryview, done: Collection[int]
    ) -> list[int]:
        """The state that a new generation goes on with.

        What a replica had and has not seen applied goes back to the pool, unless the replica is
        among ``done``: those whose last batch is known to be applied.  Requests start from 0.
        """
        words = list(state)
        cursor = cls(plan, 0, words)
        for replica in range(plan.replicas):
            batch = cursor.outstanding(replica)
            if batch is not None and batch.epoch == cursor.epoch and replica not in done:
                cursor._give_back(batch)
            at = cursor._replicas + replica * _WIDTH
            words[at : at + _WIDTH] = [0] * _WIDTH
        words[_OPEN] = 0
        return words

    def requested(self, replica: int) -> int:
        """How many requests a replica has made."""
        return self.state[self._replicas + replica * _WIDTH + _REQUESTS]

    def outstanding(self, replica: int) -> Batch | None:
        """The last batch that a replica was given, if it was given one."""
        return self._answer(self._replicas + replica * _WIDTH)

    @property
    def epoch(self) -> int:
        return self.state[_EPOCH]

    @property
    def handed(self) -> int:
        """Batches handed out over all epochs."""
        return self.state[_HANDED]

    @property
    def left(self) -> int:
        """Batches of this epoch that nobody has taken yet."""
        left = self.plan.batches_per_epoch - self.state[_TAKEN]
        if self.plan.steps is not None:
            left = min(left, self.plan.steps - self.handed)
        return left

    @property
    def whole(self) -> bool:
        """Whether all of the epoch's batches are taken, not only as many as ``steps`` wants."""
        return self.state[_TAKEN] == self.plan.batches_per_epoch

    @property
    def open(self) -> int:
        """Batches that are taken and not known to be applied."""
        return self.state[_OPEN]

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

    def handle(self, event: Take, now: float) -> list[Batch | None]:
        """The batch for a request; None: the epoch has no more."""
        state = self.state
        if event.generation != self.generation:
            raise FencedError(
                f"Take of generation {event.generation}: expected generation {self.generation}"
            )
        if not 0 <= event.replica < self.plan.replicas:
            raise ProtocolError(
                f"replica {event.replica} asks for a batch: "
                f"expected one of 0..{self.plan.replicas - 1}"
            )
        at = self._replicas + event.replica * _WIDTH
        number = state[at + _REQUESTS] - 1
        if event.request == number:
            return [self._answer(at)]
        if event.request != number + 1:
            raise ProtocolError(
                f"replica {event.replica} asks for batch {event.request}: expected {number + 1}"
            )
        # Asking anew says that the last batch is done.
        still = self.open - state[at + _ANSWERED]
        if event.epoch != self.epoch:
            if event.epoch != self.epoch + 1 or self.left or still:
                raise ProtocolError(
                    f"replica {event.replica} asks for epoch {event.epoch}: epoch {self.epoch} "
                    f"has {self.left} batches left and {still} open"
                )
            state[_EPOCH], state[_TAKEN] = event.epoch, 0
            for part in range(self.plan.replicas):
                state[self._parts + part * 2] = state[self._parts + part * 2 + 1] = 0
        batch = self._next(event.replica) if self.left else None
        state[_OPEN] = still + (batch is not None)
        state[at + _REQUESTS] = event.request + 1
        state[at + _ANSWERED] = int(batch is not None)
        if batch is not None:
            state[_HANDED] += 1
            state[_TAKEN] += 1
            state[at + _AT_EPOCH], state[at + _AT_PART] = batch.epoch, batch.part
            state[at + _AT_INDEX] = batch.index
        return [batch]

    def _answer(self, at: int) -> Batch | None:
        if not self.state[at + _ANSWERED]:
            return None
        return Batch(*(self.state[at + k] for k in (_AT_EPOCH, _AT_PART, _AT_INDEX)))

    def _give_back(self, batch: Batch) -> None:
        at = self._pool + 2 * self.state[_POOLED]
        self.state[at], self.state[at + 1] = batch.part, batch.index
        self.state[_POOLED] += 1
        self.state[_TAKEN] -= 1
        self.state[_HANDED] -= 1

    def _next(self, replica: int) -> Batch:
        if self.state[_POOLED]:
            self.state[_POOLED] -= 1
            at = self._pool + 2 * self.state[_POOLED]
            return Batch(self.epoch, self.state[at], self.state[at + 1])
        # A part's words: how many of its batches are taken from its start, and from its end.
        if self._left_of(replica):
            at = self._parts + replica * 2
            self.state[at] += 1
            return Batch(self.epoch, replica, self.state[at] - 1)
        slowest = max(range(self.plan.replicas), key=lambda p: (self._left_of(p), -p))
        at = self._parts + slowest * 2 + 1
        self.state[at] += 1
        return Batch(self.epoch, slowest, self.plan.batches(slowest) - self.state[at])

    def _left_of(self, part: int) -> int:
        at = self._parts + part * 2
        return self.plan.batches(part) - self.state[at] - self.state[at + 1]
