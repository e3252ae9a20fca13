"""What all sides train: a model's widths, a batch, and random data from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

LEARNING_RATE = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class Workload:
    """A relu network with cross-entropy, trained by SGD with momentum.

    Attributes
    ----------
    widths : tuple of int
        Features, hidden widths, classes.
    batch : int
        Rows of one gradient.
    steps : int
        Batches in an epoch; an epoch takes dtrain one to three seconds on two slow cores.
    """

    name: str
    widths: tuple[int, ...]
    batch: int
    steps: int
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.steps * self.batch

    @property
    def parameters(self) -> int:
        return sum((a + 1) * b for a, b in pairwise(self.widths))

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Features, float32 of shape (rows, features), and class indices, int64 of (rows,)."""
        rng = np.random.default_rng(self.seed)
        x = rng.standard_normal((self.rows, self.widths[0]), dtype=np.float32)
        return x, rng.integers(0, self.widths[-1], self.rows)

    def sized(self, steps: int | None, parts: int) -> Workload:
        """The same with that many batches in an epoch, rounded up to whole ones for each part."""
        steps = self.steps if steps is None else steps
        return replace(self, steps=-(-steps // parts) * parts)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("small", (64, 128, 10), batch=32, steps=3000),
        Workload("mnist", (784, 512, 512, 10), batch=64, steps=600),
        Workload("big", (1024, 2048, 2048, 1000), batch=64, steps=40),
    )
}
