"""What is left of a job's speed when its workers keep dying."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from benchmarks.faults import Victim, strike, victims
from benchmarks.report import say
from benchmarks.training import at_least
from benchmarks.workloads import WORKLOADS

HELP = "useful steps under one kill every few seconds, over the rate without"

LEGEND = (
    "Steps/s of one job on one cluster, in turns: undisturbed, and with the SIGKILL of a random "
    "worker every so many seconds, which its nanny starts again.  goodput: the medians' ratio."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--every", type=float, default=10.0, help="seconds between two kills; default: 10")
    add("--kills", type=at_least(1), default=30, help="default: 30, so 5 minutes of the default")
    add("--turns", type=at_least(1), default=3, help="default: 3, so 10 kills in each")
    add("--workers", type=at_least(2), default=2, help="worker processes; default: 2")
    add("--model", choices=list(WORKLOADS), default="mnist", help="default: mnist")
    add("--seed", type=int, default=0, help="of the choice of workers; default: 0")


def run(args: argparse.Namespace) -> dict[str, Any]:
    dice = random.Random(args.seed)
    rates: dict[str, list[float]] = {"undisturbed": [], "killed": []}
    each = -(-args.kills // args.turns)
    with victims(args.workers) as client:
        victim = Victim(client, WORKLOADS[args.model], args.workers)
        for turn in range(args.turns):
            victim.trains(args.workers)
            rates["undisturbed"].append(_rate(victim, 2 * args.every))
            rates["killed"].append(_killed(victim, args.every, each, dice))
            say(f"turn {turn + 1} of {args.turns}: { {k: v[-1] for k, v in rates.items()} }")
        status = victim.handle.status()
        victim.end()
    return {
        "workers": args.workers,
        "model": args.model,
        "every": args.every,
        "steps_per_s": rates,
        "goodput": median(rates["killed"]) / median(rates["undisturbed"]),
        "losses": status["losses"],
        "replayed": status["ledger"]["replayed"],
    }


def _rate(victim: Victim, seconds: float) -> float:
    began, before = time.monotonic(), victim.committed()[1]
    time.sleep(seconds)
    return (victim.committed()[1] - before) / (time.monotonic() - began)


def _killed(victim: Victim, every: float, kills: int, dice: random.Random) -> float:
    began, before = time.monotonic(), victim.committed()[1]
    for number in range(kills):
        kind = dice.choice(("worker", "chief"))
        strike(kind, victim.pids())
        time.sleep(max(0.0, began + (number + 1) * every - time.monotonic()))
    return (victim.committed()[1] - before) / (time.monotonic() - began)


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    table = Table("", "steps/s", title=f"a kill every {found['every']:g} s", caption=LEGEND)
    for name, rates in found["steps_per_s"].items():
        table.add_row(name, f"{median(rates):,.1f}")
    table.add_row("goodput", f"{found['goodput']:.3f}")
    yield table
