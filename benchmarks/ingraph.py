"""What a step costs whose parts are tasks of a Dask graph."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client
from distributed.client import _wait
from rich.console import RenderableType
from rich.table import Table

import dtrain
from benchmarks.faults import victims
from benchmarks.report import say
from benchmarks.training import at_least

HELP = "milliseconds of an almost empty step, between-graph and in-graph, beside a bare Dask graph"

#: An MLP with next to nothing to compute.
WIDTHS, BATCH = [20, 8, 2], 20

LEGEND = (
    "ms per step, medians of interleaved turns; one replica on each worker.  bare graph: tasks "
    "that do nothing, in a graph of the same shape from a client in the scheduler's process; "
    "Dask's streams send once in 2 to 10 ms."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=at_least(1), default=2, help="worker processes; default: 2")
    add("--shards", type=at_least(1), nargs="+", default=[1, 2], help="default: 1 2")
    add("--steps", type=at_least(1), default=150, help="of a turn; default: 150")
    add("--rounds", type=at_least(1), default=5, help="turns of each; default: 5")


def run(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    with victims(args.workers) as client:
        sides: dict[str, Callable[[int], float]] = {
            "between-graph": lambda shards: trained(client, args, shards, "between-graph"),
            "in-graph": lambda shards: trained(client, args, shards, "in-graph"),
            "bare graph": lambda shards: bare(client, args, shards),
        }
        for number in range(args.rounds):
            for shards in args.shards:
                rates = found.setdefault(str(shards), {name: [] for name in sides})
                for name, side in sides.items():
                    rates[name].append(side(shards))
            say(f"round {number + 1} of {args.rounds}")
    return {"workers": args.workers, "steps": args.steps, "ms_per_step": found}


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    names = list(next(iter(found["ms_per_step"].values())))
    table = Table("shards", *names, title="ms per step", caption=LEGEND)
    for shards, rates in found["ms_per_step"].items():
        table.add_row(shards, *(f"{median(rates[name]):.2f}" for name in names))
    yield table


def trained(client: Client, args: argparse.Namespace, shards: int, way: str) -> float:
    """The second epoch of a job: in the first one everything is new."""
    rng = np.random.default_rng(0)
    rows = args.steps * BATCH * args.workers
    x = rng.standard_normal((rows, WIDTHS[0])).astype(np.float32)
    result = dtrain.fit(
        dtrain.models.MLP(WIDTHS),
        x,
        (x[:, 0] > 0).astype(int),
        replicas=args.workers,
        shards=shards,
        batch_size=BATCH,
        epochs=2,
        replication=way,
        client=client,
        progress=False,
    )
    return 1e3 * result.history[1]["seconds"] / args.steps


def bare(client: Client, args: argparse.Namespace, shards: int) -> float:
    """The same tasks, without anything in them."""
    address, workers = client.scheduler.address, sorted(client.scheduler_info(-1)["workers"])
    return asyncio.run(_bare(address, workers, args.steps, shards))


async def _bare(address: str, workers: list[str], steps: int, shards: int) -> float:
    async with Client(address, asynchronous=True, set_as_default=False) as client:
        state: list[Any] = []
        old: list[Any] = []
        for step in range(2 * steps):
            if step == steps:
                began = time.perf_counter()
            graph, keys = _graph(workers, step, shards, [f.key for f in state])
            verdict, *fresh = client.get(graph, keys, sync=False)
            for future in old:
                future.release()
            await _wait([verdict])
            old, state = [verdict, *state], fresh
        return 1e3 * (time.perf_counter() - began) / steps


def _graph(workers: list[str], step: int, shards: int, state: list[Any]) -> Any:
    """As :class:`dtrain.runtime.ingraph.Driver` makes it; and what is to be kept of it."""
    tasks: dict[Any, Any] = {}
    places: dict[Any, list[str]] = {}

    def add(name: str, where: str, *args: Any) -> Any:
        key = (f"bare-{name}", step, len(tasks))
        tasks[key], places[key] = Task(key, _nothing, *args), [where]
        return TaskRef(key)

    gradients = [add("gradient", where, *map(TaskRef, state)) for where in workers]
    homes = [workers[shard % len(workers)] for shard in range(shards)]
    updates = [
        add("update", home, *(
            gradient if shards == 1 or home == where else add("piece", where, gradient)
            for where, gradient in zip(workers, gradients, strict=True)
        ))
        for home in homes
    ]  # fmt: skip
    verdict = add("verdict", workers[0], *updates)
    notes = {"workers": places.__getitem__, "allow_other_workers": False}
    layer = MaterializedLayer(tasks, annotations=notes)
    keys = [verdict.key, *(update.key for update in updates)]
    return HighLevelGraph({"bare": layer}, {"bare": set()}), keys


def _nothing(*args: Any) -> None:
    pass
