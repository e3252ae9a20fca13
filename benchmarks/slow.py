"""One of two asynchronous replicas is slow: what the other one keeps of its speed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from distributed import Client
from rich.table import Table

import dtrain
from benchmarks import notes
from benchmarks.ours import fitted
from benchmarks.report import say
from benchmarks.workloads import Workload
from dtrain.models import MLP

LEGEND = (
    "Steps/s of one of two replicas, medians of interleaved turns: while the other is as fast "
    "(even), and while it computes each gradient as often as said (slow).  kept: slow over even.  "
    "own part: while it takes the batches of its own rows; epoch: to the end, with the batches "
    "that it takes from the slow one's rows."
)


class Uneven(MLP):
    """An MLP that notes when it is called, and that computes ``times`` times in one process."""

    def __init__(self, widths: Sequence[int], slow: int, times: int) -> None:
        super().__init__(widths)
        self.slow, self.times = slow, times

    def loss_and_grads(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        notes.note()
        for _ in range(self.times if os.getpid() == self.slow else 1):
            answer = super().loss_and_grads(*args, out=out, **kwargs)
        return answer


def measured(
    workload: Workload, x: np.ndarray, y: np.ndarray, times: int, rounds: int, client: Client
) -> dict[str, Any]:
    """Plain values: the other replica's steps/s, even and slow, and what it kept."""
    pids = client.run(os.getpid)
    slow, other = pids
    jobs = {"even": 1, "slow": times}
    found: dict[str, dict[str, list[float]]] = {
        name: {window: [] for window in ("epoch", "own part")} for name in jobs
    }
    # Its own rows are half of them.  The first third of its batches is not steady yet.
    own = workload.steps // 2
    windows = {"epoch": (own // 3, None), "own part": (own // 3, own)}
    for number in range(rounds):
        for name, repeats in jobs.items():
            client.run(notes.forget)
            model = Uneven(workload.widths, pids[slow], repeats)
            # One epoch: at the end of each, all wait for the slow one's last batch.
            mode = dtrain.Async()
            fitted(model, workload, x, y, mode=mode, replicas=2, epochs=1, client=client)
            for window, (first, last) in windows.items():
                rate = client.run(notes.steps_per_s, first, last, workers=[other])[other]
                if rate is None:
                    raise RuntimeError(
                        f"--slow: the replica at {other} took too few batches of "
                        f"{workload.steps}; more --steps are wanted"
                    )
                found[name][window].append(rate)
            say(
                f"round {number + 1} of {rounds}: the other replica, {name}: "
                f"{found[name]['epoch'][-1]:,.1f} steps/s"
            )
    medians = {
        name: {window: median(rates) for window, rates in of.items()} for name, of in found.items()
    }
    return {
        "times": times,
        "steps_per_s": found,
        "medians": medians,
        "kept": {w: medians["slow"][w] / medians["even"][w] for w in windows},
    }


def table(workloads: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each model and window."""
    table = Table()
    for heading in ("model", "over"):
        table.add_column(heading)
    times = workloads[0]["slow"]["times"]
    for heading in ("even, steps/s", f"slow {times}x, steps/s", "kept"):
        table.add_column(heading, justify="right")
    for workload in workloads:
        found = workload["slow"]
        for window, kept in found["kept"].items():
            even, slow = (found["medians"][name][window] for name in ("even", "slow"))
            table.add_row(workload["name"], window, f"{even:,.1f}", f"{slow:,.1f}", f"{kept:.2f}")
        table.add_section()
    return table
