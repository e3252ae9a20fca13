"""What checkpoints cost a job that trains."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table

import dtrain
from benchmarks.faults import Victim, victims
from benchmarks.report import say
from benchmarks.training import at_least
from benchmarks.workloads import WORKLOADS

HELP = "the stall of a checkpoint, and the speed with and without them"

LEGEND = (
    "stall: seconds that training stands still for a save (the copy between two steps); share: of "
    "the time between two saves.  Steps/s in turns of jobs without and with checkpoints."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--every", type=float, default=30.0, help="seconds between two saves; default: 30")
    add("--seconds", type=float, default=100.0, help="of each turn; default: 100")
    add("--turns", type=at_least(1), default=2, help="default: 2")
    add("--workers", type=at_least(1), default=2, help="worker processes; default: 2")
    add("--model", choices=list(WORKLOADS), default="big", help="default: big")


def run(args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"without": [], "with": []}
    stalls: list[float] = []
    took: list[float] = []
    with victims(args.workers) as client, tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            for name in rates:
                options: dict[str, Any] = {}
                if name == "with":
                    place = Path(folder) / str(turn)
                    options["checkpoint"] = dtrain.Checkpoint(place, every=args.every)
                victim = Victim(client, WORKLOADS[args.model], args.workers, **options)
                victim.trains(args.workers)
                began, before = time.monotonic(), victim.committed()[1]
                time.sleep(args.seconds)
                done = victim.committed()[1] - before
                rates[name].append(done / (time.monotonic() - began))
                for event in victim.handle.events():
                    match = re.search(r"in ([0-9.]+) s, a stall of ([0-9.]+) s", event["message"])
                    if match:
                        took.append(float(match[1]))
                        stalls.append(float(match[2]))
                victim.end()
                say(f"turn {turn + 1} of {args.turns}: {name} {rates[name][-1]:.2f} steps/s")
    return {
        "model": args.model,
        "every": args.every,
        "steps_per_s": rates,
        "stalls": stalls,
        "took": took,
        "share": median(stalls) / args.every,
    }


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    title = f"a save every {found['every']:g} s, {found['model']}"
    table = Table("", "median", title=title, caption=LEGEND)
    for name, rates in found["steps_per_s"].items():
        table.add_row(f"steps/s {name}", f"{median(rates):.2f}")
    table.add_row("stall, s", f"{median(found['stalls']):.3f}")
    table.add_row("written in, s", f"{median(found['took']):.2f}")
    table.add_row("share of time", f"{found['share']:.2%}")
    yield table
