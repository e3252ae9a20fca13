"""What a synchronous update of the mnist model is made of: ``python -m benchmarks.update``.

One process, one BLAS thread, no cluster: the whole update, and the same with one part left out
at a time, beside the plain loop's update in place.  Medians, in microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import numpy as np

from dtrain.arrays import aligned_bytes
from dtrain.layout import Layout
from dtrain.models import MLP
from dtrain.optim import sgd
from dtrain.partition import partition
from dtrain.runtime.shards import private_slots
from dtrain.runtime.updater import Updater, cut


def median(call: Callable[[int], object], times: int = 60) -> float:
    spent = []
    for step in range(times):
        begun = time.perf_counter()
        call(step)
        spent.append(time.perf_counter() - begun)
    return float(np.median(spent) * 1e6)


def main() -> None:
    params = MLP([784, 512, 512, 10]).init(np.random.default_rng(0))
    layout = Layout.of(params)
    shard = partition(layout, 1).shards[0]
    ranges = shard.ranges
    optimizer = sgd(0.01, momentum=0.9)
    buffers = [aligned_bytes(layout.nbytes) for _ in range(2)]
    layout.write(buffers[0], params)
    both = [cut(buffer, ranges) for buffer in buffers]
    gradients = [cut(aligned_bytes(layout.nbytes), ranges) for _ in range(2)]
    for gradient in gradients:
        gradient[0][:] = 1e-3
    for replicas in (1, 2):
        members, weights = tuple(range(replicas)), (1.0,) * replicas
        two = Updater(shard, layout, optimizer, replicas, both, private_slots(optimizer, ranges, 2))
        slots = private_slots(optimizer, ranges, 1)
        one = Updater(shard, layout, optimizer, replicas, [both[0]] * 2, slots * 2)
        pieces = {i: two.pieces(gradients[i]) for i in members}

        def run(step: int, *, updater: Updater = two) -> None:
            updater.reduce(step, members, weights, pieces)  # noqa: B023 - called at once

        found = {"all of it": median(run)}
        with patch("dtrain.runtime.updater.finite", lambda array: True):
            found["without the check for finite values"] = median(run)
        with patch("dtrain.runtime.updater.reduce_into", lambda *args: None):
            found["without the sum (one replica: the copy)"] = median(run)
        found["in place, not into a second buffer"] = median(partial(run, updater=one))
        for words, spent in found.items():
            print(f"{replicas} replica(s), {words}: {spent:.0f} us")
    p, g = both[0][0], gradients[0][0]
    v, work = np.zeros_like(p), np.empty_like(p)

    def plain(step: int) -> None:
        np.multiply(v, np.float32(0.9), out=v)
        np.add(v, g, out=v)
        np.multiply(v, np.float32(0.01), out=work)
        np.subtract(p, work, out=p)

    print(f"plain, in place, whole arrays: {median(plain):.0f} us")


if __name__ == "__main__":
    main()
