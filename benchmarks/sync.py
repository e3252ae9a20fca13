"""Synchronous training: samples/s of dtrain and of plain loops, and their ratios."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from distributed import Client, LocalCluster
from rich.console import RenderableType

import dtrain
from benchmarks import environment, report, where
from benchmarks.plain import Processes
from benchmarks.report import Turn, say
from benchmarks.workloads import LEARNING_RATE, MOMENTUM, WORKLOADS, Workload

HELP = "samples/s of synchronous training, 1 and 2 replicas, beside plain NumPy loops"

REPLICAS = (1, 2)
#: Each is a median over a median.
RATIOS = (("dtrain 2", "plain"), ("dtrain 2", "plain x2"), ("dtrain 1", "plain"))
LEGEND = (
    "Samples/s: medians of interleaved turns, and ratios of medians. plain: a NumPy loop in one "
    "process; plain x2: two that share nothing, the machine's limit; dtrain N: N replicas on N "
    "worker processes."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", action="append", choices=list(WORKLOADS), help="may be repeated; default: all")
    add("--rounds", type=at_least(1), default=5, help="turns of each side; default: 5")
    add("--steps", type=at_least(1), help="batches in an epoch, of all replicas together")
    add(
        "--epochs",
        type=at_least(2),
        default=3,
        help="of a turn of dtrain; the first does not count; default: 3",
    )
    add("--seconds", type=float, default=2.0, help="of a turn of a plain loop; default: 2")
    add("--where", action="store_true", help="measure the parts of a step too")


def at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"found {text}, expected at least {least}")
        return int(text)

    return whole


def run(args: argparse.Namespace) -> dict[str, Any]:
    names = list(dict.fromkeys(args.model or WORKLOADS))
    chosen = [WORKLOADS[name].sized(args.steps, max(REPLICAS)) for name in names]
    # The loops first: Dask puts variables for its workers into the environment of this process.
    with Processes(2) as processes, cluster(max(REPLICAS)) as client:
        found: dict[str, Any] = {
            "settings": {key: getattr(args, key) for key in ("rounds", "epochs", "seconds")},
            "blas": {**processes.blas, **worker_blas(client)},
            "idle_cores": idle_cores(client),
            "workloads": [],
        }
        for workload in chosen:
            say(f"{workload.name}: {workload.rows:,} rows, {workload.parameters:,} parameters")
            found["workloads"].append(_measured(workload, args, processes, client))
    return found


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield report.rates_table(found["workloads"])
    yield LEGEND
    yield f"While the plain loops run, the idle cluster takes {found['idle_cores']:.2f} cores."
    if "where" in found["workloads"][0]:
        yield where.table(found["workloads"])
        yield where.LEGEND


def _measured(
    workload: Workload, args: argparse.Namespace, processes: Processes, client: Client
) -> dict[str, Any]:
    x, y = workload.data()
    model = dtrain.models.MLP(workload.widths)
    sides: dict[str, Callable[[], Turn]] = {
        "plain": partial(processes.turn, workload, args.seconds),
        "plain x2": partial(processes.turn, workload, args.seconds, together=True),
    }
    for n in REPLICAS:
        sides[f"dtrain {n}"] = partial(fitted, model, workload, x, y, n, args.epochs, client)
    turns = report.interleaved(sides, args.rounds, say)
    found = {
        "name": workload.name,
        "widths": list(workload.widths),
        "batch": workload.batch,
        "rows": workload.rows,
        "parameters": workload.parameters,
        **report.summary(turns, RATIOS),
    }
    if args.where:
        found["where"] = {"plain": processes.split(workload, args.seconds)}
        timed = where.Timed(workload.widths)
        for n in REPLICAS:
            client.run(where.forget)
            fitted(timed, workload, x, y, n, args.epochs, client)
            found["where"][f"dtrain {n}"] = where.mean(client.run(where.split))
    return found


def fitted(
    model: Any,
    workload: Workload,
    x: np.ndarray,
    y: np.ndarray,
    replicas: int,
    epochs: int,
    client: Client,
) -> Turn:
    """A job of so many replicas, each with a shard on a worker of its own; its steady state."""
    result = dtrain.fit(
        model,
        x,
        y,
        optimizer=dtrain.optim.sgd(LEARNING_RATE, momentum=MOMENTUM),
        mode=dtrain.Sync(),
        replicas=replicas,
        shards=replicas,
        batch_size=workload.batch,
        epochs=epochs,
        client=client,
        progress=False,
    )
    later = result.history[1:]
    samples, seconds = (sum(epoch[key] for epoch in later) for key in ("samples", "seconds"))
    return Turn(samples / seconds, [epoch["samples_per_s"] for epoch in later])


# -- the cluster ---------------------------------------------------------------------------------


@contextmanager
def cluster(workers: int) -> Iterator[Client]:
    """Worker processes of one thread, started in the settled environment."""
    environment.check()
    with (
        tempfile.TemporaryDirectory(prefix="dtrain-benchmarks-") as directory,
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            local_directory=directory,
            silence_logs=40,
        ) as started,
        Client(started) as client,
    ):
        client.run(environment.check)
        yield client


def worker_blas(client: Client) -> dict[str, list[dict[str, Any]]]:
    return {f"worker {i}": found for i, found in enumerate(client.run(report.blas).values())}


def idle_cores(client: Client, seconds: float = 1.0) -> float:
    """How many cores a cluster without work uses, the scheduler in this process included."""

    def used() -> float:
        return time.process_time() + sum(client.run(time.process_time).values())

    before, began = used(), time.perf_counter()
    time.sleep(seconds)
    return (used() - before) / (time.perf_counter() - began)
