"""Asynchronous training: samples/s beside the other sides, and beside a replica that is slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from distributed import Client
from rich.console import RenderableType

import dtrain
from benchmarks import report, slow, sync, training
from benchmarks.ours import fitted, steady
from benchmarks.report import Turn
from benchmarks.training import REPLICAS, Bench
from benchmarks.workloads import Workload

HELP = "samples/s of asynchronous training, 2 replicas, and with one of them slowed"

RATIOS = {
    "over plain": ("dtrain async", "plain"),
    "over plain x2": ("dtrain async", "plain x2"),
    "over sync": ("dtrain async", "dtrain sync"),
    "over ddp": ("dtrain async", "ddp"),
    "over tf": ("dtrain async", "tf"),
}
#: The name of the ratio that ``--slow`` adds.
KEPT = "other replica kept"
LEGEND = (
    "Samples/s: medians of interleaved turns.  plain: a NumPy loop in one process; plain x2: two "
    "that share nothing, the machine's limit; dtrain sync and dtrain async: 2 replicas on 2 worker "
    "processes; ddp: PyTorch's DistributedDataParallel over gloo, 2 processes, which is "
    "synchronous; tf: TensorFlow's ParameterServerStrategy, 2 workers and 1 server.  over X: the "
    "median of dtrain async over X's."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    training.arguments(parser)
    parser.add_argument(
        "--slow",
        type=training.at_least(2),
        metavar="TIMES",
        help="measure the other replica too while one computes each gradient so often",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    return training.run(args, measured)


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield report.rates_table(found["workloads"])
    yield LEGEND
    yield from training.idle(found)
    if "slow" in found["workloads"][0]:
        yield slow.table(found["workloads"])
        yield slow.LEGEND


def measured(bench: Bench, workload: Workload) -> dict[str, Any]:
    args, client = bench.args, bench.client
    x, y = workload.data()
    model = dtrain.models.MLP(workload.widths)
    ours: dict[str, Callable[[], Turn]] = {
        "dtrain sync": partial(sync.turn, model, workload, x, y, REPLICAS, args.epochs, client),
        "dtrain async": partial(turn, model, workload, x, y, args.epochs, client),
    }
    found = training.beside(bench, workload, ours, RATIOS)
    if args.slow is not None:
        found["slow"] = slow.measured(workload, x, y, args.slow, args.rounds, client)
        found["ratios"][KEPT] = found["slow"]["kept"]["epoch"]
    return found


def turn(
    model: Any, workload: Workload, x: np.ndarray, y: np.ndarray, epochs: int, client: Client
) -> Turn:
    """The steady state of an asynchronous job."""
    mode = dtrain.Async()
    return steady(
        fitted(model, workload, x, y, mode=mode, replicas=REPLICAS, epochs=epochs, client=client)
    )
