"""How long a death holds up a synchronous job: until the next committed step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from benchmarks.faults import Victim, strike, victims, wake
from benchmarks.report import say
from benchmarks.training import at_least
from benchmarks.workloads import WORKLOADS

HELP = "seconds from a death to the next committed step, for each kind of death"

KINDS = {
    "worker": "SIGKILL of a worker that is not the chief",
    "chief": "SIGKILL of the chief, with the lead shard",
    "all": "SIGKILL of all workers at once: those started anew find the file",
    "stop": "SIGSTOP of a worker, which is woken afterwards",
}
LEGEND = (
    "Seconds from the signal to the first step that is committed by another generation, read from "
    "the shared file; over all runs, each on a job that trains on all its workers."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kind", action="append", choices=list(KINDS), help="may be repeated; default: all")
    add("--runs", type=at_least(1), default=20, help="of each kind; default: 20")
    add("--workers", type=at_least(2), default=3, help="worker processes; default: 3")
    add("--model", choices=list(WORKLOADS), default="mnist", help="default: mnist")


def run(args: argparse.Namespace) -> dict[str, Any]:
    kinds = args.kind or list(KINDS)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with victims(args.workers) as client:
        victim = Victim(client, WORKLOADS[args.model], args.workers)
        for number in range(args.runs):
            for kind in kinds:
                victim.trains(args.workers)
                pids = victim.pids()
                began = time.monotonic()
                stopped = strike(kind, pids)
                found[kind].append(victim.goes_on() - began)
                wake(stopped)
                say(f"run {number + 1} of {args.runs}: {kind} {found[kind][-1]:.3f} s")
        victim.end()
    return {"workers": args.workers, "model": args.model, "seconds": found}


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    table = Table("what", "median, s", "maximum, s", "runs", title="recovery", caption=LEGEND)
    for kind, seconds in found["seconds"].items():
        row = f"{median(seconds):.3f}", f"{max(seconds):.3f}", str(len(seconds))
        table.add_row(KINDS[kind], *row)
    yield table
