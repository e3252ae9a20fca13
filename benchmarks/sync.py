"""Synchronous training: samples/s of dtrain, of plain loops and of peers, and their ratios."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from distributed import Client
from rich.console import RenderableType

import dtrain
from benchmarks import report, training, where
from benchmarks.ours import fitted, steady
from benchmarks.report import Turn
from benchmarks.training import REPLICAS, Bench
from benchmarks.workloads import Workload

HELP = "samples/s of synchronous training, 1 and 2 replicas, beside plain NumPy loops and peers"

SIDES = tuple(range(1, REPLICAS + 1))
#: Each is a median over a median.
RATIOS = {
    "over plain": ("dtrain 2", "plain"),
    "over plain x2": ("dtrain 2", "plain x2"),
    "1 replica over plain": ("dtrain 1", "plain"),
    "over ddp": ("dtrain 2", "ddp"),
    "over tf": ("dtrain 2", "tf"),
}
LEGEND = (
    "Samples/s: medians of interleaved turns.  plain: a NumPy loop in one process; plain x2: two "
    "that share nothing, the machine's limit; dtrain N: N replicas on N worker processes; ddp: "
    "PyTorch's DistributedDataParallel over gloo, 2 processes; tf: TensorFlow's "
    "ParameterServerStrategy, which is asynchronous.  over X: the median of dtrain 2 over X's."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    training.arguments(parser)
    parser.add_argument("--where", action="store_true", help="measure the parts of a step too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    return training.run(args, measured)


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield report.rates_table(found["workloads"])
    yield LEGEND
    yield from training.idle(found)
    if "where" in found["workloads"][0]:
        yield where.table(found["workloads"])
        yield where.LEGEND


def measured(bench: Bench, workload: Workload) -> dict[str, Any]:
    args, client = bench.args, bench.client
    x, y = workload.data()
    model = dtrain.models.MLP(workload.widths)
    ours: dict[str, Callable[[], Turn]] = {
        f"dtrain {n}": partial(turn, model, workload, x, y, n, args.epochs, client) for n in SIDES
    }
    found = training.beside(bench, workload, ours, RATIOS)
    if args.where:
        found["where"] = {"plain": bench.loops.split(workload, args.seconds)}
        timed = where.Timed(workload.widths)
        for n in SIDES:
            client.run(where.forget)
            turn(timed, workload, x, y, n, args.epochs, client)
            found["where"][f"dtrain {n}"] = where.mean(client.run(where.split))
    return found


def turn(
    model: Any,
    workload: Workload,
    x: np.ndarray,
    y: np.ndarray,
    replicas: int,
    epochs: int,
    client: Client,
) -> Turn:
    """The steady state of a synchronous job."""
    mode = dtrain.Sync()
    return steady(
        fitted(model, workload, x, y, mode=mode, replicas=replicas, epochs=epochs, client=client)
    )
