"""Random faults for a long time: the same bits at the end, and nothing that grows."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import psutil
from distributed import Client
from rich.console import RenderableType
from rich.table import Table

import dtrain
from benchmarks.faults import Victim, strike, victims, wake
from benchmarks.recovery import KINDS
from benchmarks.report import say
from benchmarks.training import at_least
from benchmarks.workloads import WORKLOADS
from dtrain.runtime.transport import segment

HELP = "random faults for minutes: the same bits as without, and no growth"

#: The share of its undisturbed speed that a job keeps under these faults, about.
_USEFUL = 0.65

LEGEND = (
    "Of the process with the scheduler, and of shared memory: after the first third, and at the "
    "end.  bits: whether the parameters are those of a job without faults."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, help="default: 20")
    add("--workers", type=at_least(2), default=2, help="worker processes; default: 2")
    add("--model", choices=list(WORKLOADS), default="mnist", help="default: mnist")
    add("--seed", type=int, default=0, help="of the faults; default: 0")


def run(args: argparse.Namespace) -> dict[str, Any]:
    dice, workload = random.Random(args.seed), WORKLOADS[args.model]
    faults: dict[str, int] = dict.fromkeys(KINDS, 0)
    seen: list[dict[str, int]] = []
    with victims(args.workers) as client:
        epochs = _epochs(client, args, 60 * args.minutes)
        victim = Victim(client, workload, args.workers, epochs=epochs)
        began = time.monotonic()
        while victim.handle.state not in ("SUCCEEDED", "FAILED", "CANCELLED"):
            time.sleep(dice.uniform(0.5, 6.0))
            status = victim.handle.status()
            if status["state"] != "RUNNING":
                continue  # between two generations, or at the end
            pids = victim.pids()
            kind = dice.choice(list(KINDS))
            stopped = strike(kind, pids)
            faults[kind] += 1
            if stopped:
                time.sleep(dice.uniform(0.0, 8.0))
                wake(stopped)
            seen.append(_used(victim))
            say(f"{time.monotonic() - began:.0f} s: {kind}; {seen[-1]}")
        result = victim.handle.result(timeout=60)
        base = Victim(client, workload, args.workers, epochs=epochs).handle.result(timeout=3600)
    same = all(np.array_equal(result.params[n], base.params[n]) for n in base.params)
    return {
        "faults": faults,
        "epochs": epochs,
        "steps": result.version,
        "same_bits": same,
        "samples": result.ledger.samples == base.ledger.samples,
        "first_third": seen[len(seen) // 3],
        "end": seen[-1],
        "left": sorted(os.listdir(p)[0] for p in segment.places() if os.listdir(p)),
    }


def _epochs(client: Client, args: argparse.Namespace, seconds: float) -> int:
    """About so many as a job does in that time, faults and all."""
    victim = Victim(client, WORKLOADS[args.model], args.workers, epochs=3)
    result: dtrain.Result = victim.handle.result(timeout=600)
    return max(3, int(_USEFUL * seconds / result.history[-1]["seconds"]))


def _used(victim: Victim) -> dict[str, int]:
    mine = psutil.Process()
    files = [f for place in segment.places() for f in place.iterdir()]
    return {
        "rss_mb": mine.memory_info().rss >> 20,
        "handles": mine.num_fds(),
        "threads": mine.num_threads(),
        "files": len(files),
        "shared_mb": sum(f.stat().st_size for f in files if f.exists()) >> 20,
    }


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    table = Table("", "after a third", "at the end", title="soak", caption=LEGEND)
    for name, before in found["first_third"].items():
        table.add_row(name, str(before), str(found["end"][name]))
    table.add_row("same bits", "", str(found["same_bits"]))
    table.add_row("faults", "", str(sum(found["faults"].values())))
    yield table
