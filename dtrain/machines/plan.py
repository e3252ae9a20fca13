"""Which rows, when: the plan of a job's data.

The rows are cut once into as many near-equal contiguous *parts* as the job has logical
replicas.  In sync mode replica i trains on part i and everything follows from (seed, epoch,
part).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dtrain.errors import DataError

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
