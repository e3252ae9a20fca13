"""The yardstick: an ordinary training loop in NumPy, in processes of its own.

Nothing of dtrain is used.  The loop keeps to what a good NumPy user does: no allocation of large
arrays in a step, in-place updates, one gather for each batch.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.processes import DEADLINE, Processes, begin, obey
from benchmarks.report import Turn, blas, parts
from benchmarks.workloads import LEARNING_RATE, MOMENTUM, Workload

#: Steps before the clock starts: caches, pages and BLAS's buffers are warm then.
_WARM = 5


class Loop:
    """Forward, backward and momentum SGD of a multi-layer perceptron, written out."""

    def __init__(self, workload: Workload, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y
        self.rng = np.random.default_rng(workload.seed)
        n, widths = workload.batch, workload.widths
        self.weights = [
            self.rng.standard_normal((a, b), dtype=np.float32) * np.float32(np.sqrt(2 / a))
            for a, b in pairwise(widths)
        ]
        self.biases = [np.zeros(b, np.float32) for b in widths[1:]]
        self.params = [*self.weights, *self.biases]
        self.weight_grads = [np.empty_like(w) for w in self.weights]
        self.bias_grads = [np.empty_like(b) for b in self.biases]
        self.grads = [*self.weight_grads, *self.bias_grads]
        self.velocities = [np.zeros_like(p) for p in self.params]
        self.acts = [np.empty((n, k), np.float32) for k in widths]
        self.deltas = [np.empty((n, k), np.float32) for k in widths[:-1]]
        self.masks = [np.empty((n, k), bool) for k in widths[:-1]]
        self.labels = np.empty(n, y.dtype)
        self.each = np.arange(n)
        self.batch, self.at = n, len(x)
        self.loss = float("nan")

    def take(self) -> None:
        """The next batch; a new order at the end of the data."""
        if self.at + self.batch > len(self.x):
            self.order, self.at = self.rng.permutation(len(self.x)), 0
        rows = self.order[self.at : self.at + self.batch]
        self.at += self.batch
        # mode="clip" lets NumPy write straight to `out`.
        np.take(self.x, rows, axis=0, out=self.acts[0], mode="clip")
        np.take(self.y, rows, out=self.labels, mode="clip")

    def gradients(self) -> None:
        """The mean cross-entropy of the batch and its gradient."""
        acts, last = self.acts, len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            z = acts[i + 1]
            np.matmul(acts[i], weight, out=z)
            z += bias
            if i < last:
                np.maximum(z, 0, out=z)
        delta = acts[-1]
        delta -= delta.max(axis=1, keepdims=True)
        np.exp(delta, out=delta)
        delta /= delta.sum(axis=1, keepdims=True)
        self.loss = -float(np.log(delta[self.each, self.labels] + 1e-30).mean())
        delta[self.each, self.labels] -= 1
        delta *= 1 / self.batch
        for i in range(last, -1, -1):
            np.matmul(acts[i].T, delta, out=self.weight_grads[i])
            np.sum(delta, axis=0, out=self.bias_grads[i])
            if i:
                np.matmul(delta, self.weights[i].T, out=self.deltas[i])
                np.greater(acts[i], 0, out=self.masks[i])
                delta = self.deltas[i]
                delta *= self.masks[i]

    def update(self) -> None:
        for param, grad, velocity in zip(self.params, self.grads, self.velocities, strict=True):
            velocity *= MOMENTUM
            velocity += grad
            np.multiply(velocity, LEARNING_RATE, out=grad)
            param -= grad

    def step(self) -> None:
        self.take()
        self.gradients()
        self.update()


@dataclass(frozen=True)
class Order:
    """What a process is told: train for that long, from new parameters."""

    workload: Workload
    seconds: float
    #: wait for the other processes before the clock starts
    together: bool = False
    #: answer with the parts of a step, not with the rate
    split: bool = False


class Loops(Processes):
    """Processes that share nothing but the machine."""

    def __init__(self, count: int) -> None:
        barrier = multiprocessing.get_context("spawn").Barrier(count)
        super().__init__({f"plain {i}": partial(_serve, barrier) for i in range(count)})

    def turn(self, workload: Workload, seconds: float, *, together: bool = False) -> Turn:
        """Samples/s of the first process alone, or of all at once, over the same window."""
        processes = range(self.count if together else 1)
        for i in processes:
            self.tell(i, Order(workload, seconds, together))
        rates = [self.answer(i, seconds) for i in processes]
        return Turn(sum(rates), rates)

    def split(self, workload: Workload, seconds: float) -> dict[str, float]:
        """Milliseconds of the parts of a step, in the first process alone."""
        self.tell(0, Order(workload, seconds, split=True))
        found: dict[str, float] = self.answer(0, seconds)
        return found


def _serve(barrier: Any, end: Any) -> None:
    """The body of a process."""
    begin()
    end.send(blas())
    known: list[Any] = [None, None]

    def act(order: Order) -> Any:
        if known[0] != order.workload:
            known[:] = order.workload, order.workload.data()
        loop = Loop(order.workload, *known[1])
        for _ in range(_WARM):
            loop.step()
        if order.together:
            barrier.wait(DEADLINE)
        return _split(loop, order.seconds) if order.split else _rate(loop, order.seconds)

    obey(end, act)


def _rate(loop: Loop, seconds: float) -> float:
    steps, now = 0, 0.0
    began = time.perf_counter()
    while now < began + seconds:
        loop.step()
        steps += 1
        now = time.perf_counter()
    return steps * loop.batch / (now - began)


def _split(loop: Loop, seconds: float) -> dict[str, float]:
    marks: list[list[float]] = []
    began = time.perf_counter()
    while not marks or marks[-1][-1] < began + seconds:
        mark = [time.perf_counter()]
        for part in (loop.take, loop.gradients, loop.update):
            part()
            mark.append(time.perf_counter())
        marks.append(mark)
    batch, gradients, update = np.diff(marks, axis=1).T * 1e3
    own = batch + update
    return parts(step=gradients + own, gradients=gradients, own=own, waiting=np.zeros(1))
