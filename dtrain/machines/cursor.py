"""Which rows, when: the plan of a job's data, and who takes which batch.

The rows are cut once into as many near-equal contiguous *parts* as the job has logical
replicas.  In sync mode replica i trains on part i and everything follows from (seed, epoch,
part).  In async mode the :class:`Cursor` hands out whole batches, each once per epoch.
"""

from __future__ import annotations

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


def split(rows: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeded random rows for validation, and the rest for training; both sorted, int64."""
    held = round(rows * fraction)
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
                f"{self.rows} training rows for {self.replicas} replicas: "
                f"expected at least one row for each replica"
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

    @property
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
    """A replica asks for its ``request``-th batch of the job (from 0); a retry repeats it."""

    generation: int
    replica: int
    request: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A batch's gradient was applied."""

    generation: int
    batch: Batch


class Cursor:
    """Hands out the batches of an asynchronous job, each once per epoch.

    A replica gets the batches of its own part in order; one that is done takes whole batches
    from the end of the part with the most left.
    """

    def __init__(self, plan: Plan, generation: int) -> None:
        self.plan = plan
        self.generation = generation
        self.epoch = 0
        #: batches handed out over all epochs
        self.handed = 0
        #: batch -> True once committed; this epoch's only
        self.out: dict[Batch, bool] = {}
        #: replica -> (number of its last request, what was answered)
        self.answers: dict[int, tuple[int, Batch | None]] = {}
        self._fill()

    def _fill(self) -> None:
        #: part -> [next index, stop index]
        self.rest = [[0, self.plan.batches(part)] for part in range(self.plan.replicas)]
        self.out = {}

    @property
    def left(self) -> int:
        """Batches of this epoch that nobody has taken yet."""
        left = sum(stop - start for start, stop in self.rest)
        if self.plan.steps is not None:
            left = min(left, self.plan.steps - self.handed)
        return left

    @property
    def committed(self) -> int:
        return sum(self.out.values())

    @property
    def drained(self) -> bool:
        """All of the epoch's batches are taken and committed."""
        return self.left == 0 and all(self.out.values())

    def handle(self, event: Take | Commit, now: float) -> list[Batch | None]:
        """The batch for a :class:`Take` (None: the epoch has no more); nothing for a Commit."""
        if event.generation != self.generation:
            raise FencedError(
                f"{type(event).__name__} of generation {event.generation}: "
                f"expected generation {self.generation}"
            )
        if isinstance(event, Take):
            return [self._take(event)]
        if event.batch not in self.out:
            raise ProtocolError(f"commit of {event.batch}: expected a batch that was handed out")
        self.out[event.batch] = True
        return []

    def _take(self, event: Take) -> Batch | None:
        if not 0 <= event.replica < self.plan.replicas:
            raise ProtocolError(
                f"replica {event.replica} asks for a batch: "
                f"expected one of 0..{self.plan.replicas - 1}"
            )
        number, answer = self.answers.get(event.replica, (-1, None))
        if event.request == number:
            return answer
        if event.request != number + 1:
            raise ProtocolError(
                f"replica {event.replica} asks for batch {event.request}: expected {number + 1}"
            )
        if event.epoch != self.epoch:
            if event.epoch != self.epoch + 1 or not self.drained:
                raise ProtocolError(
                    f"replica {event.replica} asks for epoch {event.epoch}: epoch {self.epoch} "
                    f"has {self.left} batches left and {self.committed} committed"
                )
            self.epoch = event.epoch
            self._fill()
        batch = self._next(event.replica) if self.left else None
        if batch is not None:
            self.handed += 1
            self.out[batch] = False
        self.answers[event.replica] = (event.request, batch)
        return batch

    def _next(self, replica: int) -> Batch:
        start, stop = self.rest[replica]
        if start < stop:
            self.rest[replica][0] += 1
            return Batch(self.epoch, replica, start)
        slowest = max(range(self.plan.replicas), key=lambda p: (self._left_of(p), -p))
        self.rest[slowest][1] -= 1
        return Batch(self.epoch, slowest, self.rest[slowest][1])

    def _left_of(self, part: int) -> int:
        start, stop = self.rest[part]
        return stop - start
