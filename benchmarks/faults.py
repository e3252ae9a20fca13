"""A job to do harm to: a cluster, a long synchronous job, and what it has committed, from outside.

What is committed is read from the job's shared file, so that looking costs the job nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask.config
import numpy as np
from distributed import Client

import dtrain
from benchmarks.ours import cluster
from benchmarks.workloads import LEARNING_RATE, MOMENTUM, Workload
from dtrain.layout import Layout
from dtrain.models import MLP
from dtrain.runtime.transport import segment
from dtrain.runtime.transport.shmfile import FilePlan

#: Far from the end of any measurement.
EPOCHS = 10**6


class Victim:
    """A long job on a cluster of worker processes."""

    def __init__(self, client: Client, workload: Workload, replicas: int, **options: Any) -> None:
        self.client = client
        x, y = workload.data()
        optimizer = dtrain.optim.sgd(LEARNING_RATE, momentum=MOMENTUM)
        model = MLP(workload.widths)
        arguments: dict[str, Any] = {
            "optimizer": optimizer,
            "replicas": replicas,
            "shards": replicas,
            "batch_size": workload.batch,
            "epochs": EPOCHS,
            "recovery": dtrain.Recovery(max_losses=10**6),
            "client": client,
        }
        self.handle = dtrain.submit(model, x, y, **arguments | options)
        layout = Layout.of(model.init(np.random.default_rng(0)))
        self._plan = FilePlan(layout, optimizer, replicas, replicas, sync=True)

    def committed(self) -> tuple[int, int]:
        """The newest generation that has a file, and the last step that was committed there."""
        found = (0, 0)
        for place in segment.places():
            for file in place.glob(f"{self.handle.id}-g*"):
                if "." in file.name:
                    continue
                generation = int(file.name.rpartition("-")[0].rpartition("-g")[2])
                try:
                    with file.open("rb") as opened:
                        word = os.pread(opened.fileno(), 8, self._plan.verdict * 8)
                except FileNotFoundError:
                    continue
                found = max(found, (generation, int.from_bytes(word, "little")))
        return found

    def trains(self, workers: int, seconds: float = 60.0) -> None:
        """Wait until it does, on all of its workers."""
        self._until(
            lambda: (
                (status := self.handle.status())["state"] == "RUNNING"
                and len(set(status["replicas"].values())) == workers
            ),
            seconds,
        )
        step = self.committed()[1]
        self._until(lambda: self.committed()[1] > step + 3, seconds)

    def goes_on(self, seconds: float = 60.0) -> float:
        """Wait for the next committed step of another generation; when that was."""
        generation, step = self.committed()

        def gone_on() -> bool:
            now = self.committed()
            return now[0] > generation and now[1] > step

        self._until(gone_on, seconds)
        return time.monotonic()

    def _until(self, ready: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > until:
                raise SystemExit(f"after {seconds:.0f} s: {self.handle.why_waiting()}")
            time.sleep(0.001)

    def pids(self) -> list[int]:
        """Of the workers of the job, the chief's first."""
        where = self.handle.status()
        order = list(dict.fromkeys([where["shards"]["0"], *where["replicas"].values()]))
        # Asked of the master, which is in this process: a worker may be dead or stopped by now.
        members = self.client.cluster.scheduler.extensions["dtrain"].membership.members
        return [members[a].process["pid"] for a in order if a in members]

    def end(self) -> None:
        self.handle.cancel()
        self.handle.wait(timeout=30, progress=False)


@contextmanager
def victims(workers: int) -> Iterator[Client]:
    """A cluster whose workers come back, however often they die."""
    lasting = {"distributed.deploy.lost-worker-timeout": "1 hour"}
    with dask.config.set(lasting), cluster(workers) as client:
        yield client


def strike(kind: str, pids: list[int]) -> list[int]:
    """Do harm to a job's workers; those that are only stopped are returned."""
    if kind == "all":
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return []
    # Where there is only the chief, it is the chief's.
    pid = pids[0] if kind == "chief" else pids[-1]
    os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    return [pid] if kind == "stop" else []


def wake(stopped: list[int]) -> None:
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
