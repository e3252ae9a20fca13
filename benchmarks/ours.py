"""dtrain's side: a cluster of worker processes, and jobs on it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask.config
import numpy as np
from distributed import Client, LocalCluster

import dtrain
from benchmarks import environment, report
from benchmarks.report import Turn
from benchmarks.workloads import LEARNING_RATE, MOMENTUM, Workload
from dtrain.cluster import install


@contextmanager
def cluster(workers: int, **settings: str) -> Iterator[Client]:
    """Worker processes of one thread, started in the settled environment, with dtrain on them.

    ``settings`` are of the section ``dtrain:`` of Dask's configuration, for this cluster alone.
    """
    environment.check()
    with (
        tempfile.TemporaryDirectory(prefix="dtrain-benchmarks-") as directory,
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            # Else it would want port 8787 all the same, and warn where that is taken.
            scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
            local_directory=directory,
            silence_logs=40,
        ) as started,
        Client(started, set_as_default=False) as client,
    ):
        client.run(environment.check)
        # The master reads its settings here, once.
        with dask.config.set({f"dtrain.{name}": value for name, value in settings.items()}):
            install(client)
        yield client


def fitted(
    model: Any,
    workload: Workload,
    x: np.ndarray,
    y: np.ndarray,
    *,
    mode: dtrain.Sync | dtrain.Async,
    replicas: int,
    epochs: int,
    client: Client,
    batch: int | None = None,
) -> dtrain.Result:
    """A job of so many replicas, each with a shard on a worker of its own."""
    return dtrain.fit(
        model,
        x,
        y,
        optimizer=dtrain.optim.sgd(LEARNING_RATE, momentum=MOMENTUM),
        mode=mode,
        replicas=replicas,
        shards=replicas,
        batch_size=workload.batch if batch is None else batch,
        epochs=epochs,
        client=client,
        progress=False,
    )


def steady(result: dtrain.Result) -> Turn:
    """Samples/s over all epochs but the first."""
    later = result.history[1:]
    samples, seconds = (sum(epoch[key] for epoch in later) for key in ("samples", "seconds"))
    return Turn(samples / seconds, [epoch["samples_per_s"] for epoch in later])


def worker_blas(client: Client) -> dict[str, list[dict[str, Any]]]:
    return {f"worker {i}": found for i, found in enumerate(client.run(report.blas).values())}


def idle_cores(client: Client, seconds: float = 1.0) -> float:
    """How many cores a cluster without work uses, the scheduler in this process included."""

    def used() -> float:
        return time.process_time() + sum(client.run(time.process_time).values())

    before, began = used(), time.perf_counter()
    time.sleep(seconds)
    return (used() - before) / (time.perf_counter() - began)
