"""The same synchronous job in one plain loop: no machines, no messages, no shards that differ."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from dtrain.machines.plan import order
from tests.sim.settings import WIDTH

if TYPE_CHECKING:
    from tests.sim.world import World

Grads = list[list[float]]


def gradient(data: list[float], rows: list[int], params: Grads) -> tuple[float, Grads]:
    """The loss of a batch, and its gradient shard by shard: plain floats, far from associative."""
    n = len(rows)
    grads = [
        [sum(data[r] * (2 * s + k + 1) - 0.3 * p for r in rows) / n for k, p in enumerate(shard)]
        for s, shard in enumerate(params)
    ]
    return sum(data[r] ** 2 for r in rows) / n + grads[0][0] ** 2, grads


def momentum(
    params: list[float], slots: list[float], grad: list[float]
) -> tuple[list[float], list[float]]:
    moved = [0.9 * m + g for m, g in zip(slots, grad, strict=True)]
    return [p - 0.1 * m for p, m in zip(params, moved, strict=True)], moved


def plain_tree(terms: dict[int, float], lo: int, hi: int) -> float | None:
    """The definition of the fixed binary tree, once more and in words as short as it has."""
    if hi - lo == 1:
        return terms.get(lo)
    mid = (lo + hi + 1) // 2
    left, right = plain_tree(terms, lo, mid), plain_tree(terms, mid, hi)
    if left is None or right is None:
        return right if left is None else left
    return left + right


def plain_mean(terms: dict[int, float], weights: dict[int, float], replicas: int) -> float:
    if len(terms) == 1:
        return next(iter(terms.values()))
    total = plain_tree(weights, 0, replicas)
    mean = plain_tree({i: g * weights[i] for i, g in terms.items()}, 0, replicas)
    return mean if total == 1.0 else mean * (1.0 / total)


class Reference:
    """What a fault-free job comes to.

    ``params``, ``samples`` and ``applied`` are by version, ``members``, ``found`` (replica ->
    loss and gradient) and ``rows`` (replica -> how many) by step, ``losses`` by epoch.
    """

    def __init__(self, world: World) -> None:
        s, n = world.settings, world.settings.replicas
        params = [[0.5 * k - shard for k in range(WIDTH)] for shard in range(s.shards)]
        slots = [[0.0] * WIDTH for _ in params]
        self.params = [copy.deepcopy(params)]
        self.samples: list[list[int]] = [[]]
        self.applied = [0]
        self.members: list[tuple[int, ...]] = []
        self.found: list[dict[int, tuple[float, Grads]]] = []
        self.rows: list[dict[int, int]] = []
        self.losses: list[float] = []
        epoch = 0
        while epoch < s.epochs if s.steps is None else len(self.members) < s.steps:
            batches = [self._batches(world, epoch, part) for part in range(n)]
            loss_sum, weight_sum = 0.0, 0.0
            for index in range(max(map(len, batches))):
                mine = {i: b[index] for i, b in enumerate(batches) if index < len(b)}
                found = {i: gradient(world.data, rows, params) for i, rows in mine.items()}
                weights = {i: len(rows) / s.batch_size for i, rows in mine.items()}
                for shard in range(s.shards):
                    mean = [
                        plain_mean({i: g[shard][k] for i, (_, g) in found.items()}, weights, n)
                        for k in range(WIDTH)
                    ]
                    params[shard], slots[shard] = momentum(params[shard], slots[shard], mean)
                loss_sum += plain_tree({i: f[0] * weights[i] for i, f in found.items()}, 0, n)
                weight_sum += plain_tree(weights, 0, n)
                samples = [*self.samples[-1], *[0] * (epoch + 1 - len(self.samples[-1]))]
                samples[epoch] += sum(map(len, mine.values()))
                self.samples.append(samples)
                self.applied.append(self.applied[-1] + len(mine))
                self.params.append(copy.deepcopy(params))
                self.members.append(tuple(mine))
                self.found.append(found)
                self.rows.append({i: len(rows) for i, rows in mine.items()})
                if len(self.members) == s.steps:
                    break
            self.losses.append(loss_sum / weight_sum)
            epoch += 1

    @staticmethod
    def _batches(world: World, epoch: int, part: int) -> list[list[int]]:
        s = world.settings
        rows = list(range(s.rows * part // s.replicas, s.rows * (part + 1) // s.replicas))
        if s.shuffle:
            rows = [rows[i] for i in order(world.seed, epoch, part, len(rows), True)]
        return [rows[a : a + s.batch_size] for a in range(0, len(rows), s.batch_size)]
