"""PyTorch's DistributedDataParallel over gloo, in processes of its own."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import DEADLINE, Processes, begin, obey
from benchmarks.report import Turn, blas
from benchmarks.workloads import LEARNING_RATE, MOMENTUM, Workload

#: Steps before the clock starts; those after the first tell how long one takes.
_WARM = 10


class Ddp(Processes):
    """Two ranks: each takes batches of its own half of the rows, a step takes both."""

    name = "ddp"

    def __init__(self, count: int = 2) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dtrain-benchmarks-ddp-")
        store = str(Path(self._folder.name) / "store")
        super().__init__({f"ddp {i}": partial(_serve, i, count, store) for i in range(count)})
        self.about: dict[str, Any] = self.hellos["ddp 0"]

    def turn(self, workload: Workload, seconds: float) -> Turn:
        """Samples/s of all ranks together, from new parameters."""
        for i in range(self.count):
            self.tell(i, (workload, seconds))
        rates = [self.answer(i, seconds) for i in range(self.count)]
        return Turn(sum(rates), rates)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


class Rank:
    """One rank's training from new parameters."""

    def __init__(self, workload: Workload, x: Any, y: Any, rank: int) -> None:
        import torch
        from torch import nn

        torch.manual_seed(workload.seed)
        layers: list[Any] = []
        for a, b in pairwise(workload.widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.net = nn.parallel.DistributedDataParallel(
            nn.Sequential(*layers[:-1]), gradient_as_bucket_view=True
        )
        # fused: the fastest of PyTorch's three ways on a CPU.
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), LEARNING_RATE, momentum=MOMENTUM, fused=True
        )
        self.loss = nn.CrossEntropyLoss()
        self.x, self.y, self.batch = x, y, workload.batch
        self.rng = np.random.default_rng([workload.seed, rank])
        self.at = len(x)

    def step(self) -> None:
        import torch

        if self.at + self.batch > len(self.x):
            self.order, self.at = torch.from_numpy(self.rng.permutation(len(self.x))), 0
        rows = self.order[self.at : self.at + self.batch]
        self.at += self.batch
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.net(self.x[rows]), self.y[rows]).backward()
        self.optimizer.step()


def _serve(rank: int, count: int, store: str, end: Any) -> None:
    """The body of a rank."""
    begin()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=DEADLINE),
    )
    end.send({"torch": torch.__version__, "blas": blas(), "threads": torch.get_num_threads()})
    known: list[Any] = [None, None]

    def act(order: tuple[Workload, float]) -> float:
        workload, seconds = order
        if known[0] != workload:
            x, y = workload.data()
            own = slice(len(x) * rank // count, len(x) * (rank + 1) // count)
            known[:] = workload, (torch.from_numpy(x[own].copy()), torch.from_numpy(y[own].copy()))
        return _rate(Rank(workload, *known[1], rank), seconds)

    obey(end, act)
    dist.destroy_process_group()


def _rate(rank: Rank, seconds: float) -> float:
    """Samples/s of one rank; rank 0 says how many steps fill the time."""
    import torch
    import torch.distributed as dist

    rank.step()
    began = time.perf_counter()
    for _ in range(_WARM):
        rank.step()
    each = (time.perf_counter() - began) / _WARM
    steps = torch.tensor([max(1, round(seconds / each))])
    dist.broadcast(steps, src=0)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(int(steps)):
        rank.step()
    dist.barrier()
    return int(steps) * rank.batch / (time.perf_counter() - began)
