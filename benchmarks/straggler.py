"""What a slow replica costs: synchronous, with a backup, with bounded staleness, asynchronous."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
from distributed import Client, get_worker
from rich.console import RenderableType
from rich.table import Table

import dtrain
from benchmarks.faults import victims
from benchmarks.report import say
from benchmarks.training import at_least
from dtrain.models import MLP

HELP = "samples/s while one of the replicas is slow: Sync, Sync(backups=1), bounded, Async"

WIDTHS, BATCH = [64, 128, 10], 32

LEGEND = (
    "samples/s of the second epoch, medians of interleaved turns; every sample of it is applied.  "
    "A replica sleeps for --pause seconds in each gradient, the slow one --times as long, on a "
    "worker that hosts a shard as all do.  over sync: the ratio of the medians.  late: gradients "
    "that were dropped; age: the oldest that was applied."
)


class Sleepy(MLP):
    """An MLP that takes its time, most of it on one worker."""

    def __init__(self, widths: list[int], slow: str, pause: float, times: float) -> None:
        super().__init__(widths)
        self.slow, self.pause, self.times = slow, pause, times

    def loss_and_grads(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.pause * (self.times if get_worker().address == self.slow else 1.0))
        return super().loss_and_grads(*args, **kwargs)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replicas", type=at_least(2), default=4, help="one on each worker process; default: 4")
    add("--steps", type=at_least(1), default=20, help="of an epoch without backups; default: 20")
    add("--pause", type=float, default=0.02, help="seconds of a gradient; default: 0.02")
    add("--times", type=float, default=10.0, help="how much longer the slow one's; default: 10")
    add("--bound", type=at_least(0), default=4, help="max_staleness; default: 4")
    add("--rounds", type=at_least(1), default=3, help="turns of each; default: 3")


def run(args: argparse.Namespace) -> dict[str, Any]:
    modes = {
        "Sync()": dtrain.Sync(),
        "Sync(backups=1)": dtrain.Sync(backups=1),
        f"Async(max_staleness={args.bound})": dtrain.Async(max_staleness=args.bound),
        "Async()": dtrain.Async(),
    }
    found: dict[str, dict[str, list[float]]] = {
        name: {"samples_per_s": [], "late": [], "age": []} for name in modes
    }
    with victims(args.replicas) as client:
        for number in range(args.rounds):
            for name, mode in modes.items():
                result = trained(client, args, mode)
                found[name]["samples_per_s"].append(result.history[1]["samples_per_s"])
                found[name]["late"].append(result.ledger.late)
                found[name]["age"].append(max(result.ledger.staleness))
            say(f"round {number + 1} of {args.rounds}")
    return {"arguments": vars_of(args), "modes": found}


def vars_of(args: argparse.Namespace) -> dict[str, Any]:
    return {n: getattr(args, n) for n in ("replicas", "steps", "pause", "times", "bound", "rounds")}


def trained(client: Client, args: argparse.Namespace, mode: Any) -> dtrain.Result:
    rng = np.random.default_rng(0)
    rows = args.steps * BATCH * args.replicas
    x = rng.standard_normal((rows, WIDTHS[0])).astype(np.float32)
    slow = sorted(client.scheduler_info(-1)["workers"])[-1]
    return dtrain.fit(
        Sleepy(WIDTHS, slow, args.pause, args.times),
        x,
        np.arange(rows) % WIDTHS[-1],
        mode=mode,
        replicas=args.replicas,
        shards=args.replicas,
        batch_size=BATCH,
        epochs=2,
        client=client,
        progress=False,
    )


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    table = Table(title="one slow replica", caption=LEGEND)
    table.add_column("mode")
    for heading in ("samples/s", "over sync", "late", "age"):
        table.add_column(heading, justify="right")
    modes = found["modes"]
    sync = median(modes["Sync()"]["samples_per_s"])
    for name, of in modes.items():
        rate = median(of["samples_per_s"])
        table.add_row(
            name,
            f"{rate:,.0f}",
            f"{rate / sync:.2f}",
            f"{median(of['late']):.0f}",
            f"{max(of['age']):.0f}",
        )
    yield table
