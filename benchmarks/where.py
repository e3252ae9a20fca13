"""Where the time of a step goes, seen from the model: nothing in dtrain is changed for it.

A model that notes its calls runs in a job of its own, apart from those whose rates count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.report import parts
from dtrain.models import MLP

LEGEND = (
    "Medians of a step's parts. gradients: the model's loss and gradients; the rest, between two "
    "calls of it, is own work where the replica's thread runs (it reads the batch, sums, updates), "
    "and waiting where it does not (for other threads, the other replica, the system)."
)

#: Of this process: for each call its begin and end, and the thread's CPU time at both, seconds.
_calls: list[tuple[float, float, float, float]] = []


class Timed(MLP):
    """An MLP that notes when it is called."""

    def loss_and_grads(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        began, cpu = time.perf_counter(), time.thread_time()
        answer = super().loss_and_grads(*args, out=out, **kwargs)
        _calls.append((began, time.perf_counter(), cpu, time.thread_time()))
        return answer


def forget() -> None:
    """Begin anew in this process."""
    _calls.clear()


def split() -> dict[str, float] | None:
    """Milliseconds of the parts of a step in this process; None if no model ran here."""
    if not _calls:
        return None
    # The first third is not steady yet.
    began, ended, cpu_began, cpu_ended = np.array(_calls[len(_calls) // 3 :]).T * 1e3
    between, own = began[1:] - ended[:-1], cpu_began[1:] - cpu_ended[:-1]
    waiting = np.maximum(between - own, 0)
    return parts(step=np.diff(began), gradients=ended - began, own=own, waiting=waiting)


def mean(splits: Mapping[str, dict[str, float] | None]) -> dict[str, float]:
    """Over the processes in which a model ran."""
    there = [found for found in splits.values() if found is not None]
    return {part: sum(found[part] for found in there) / len(there) for part in there[0]}


def table(workloads: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each workload and side."""
    table = Table()
    for heading in ("model", "side"):
        table.add_column(heading)
    for heading in workloads[0]["where"]["plain"]:
        table.add_column(f"{heading}, ms", justify="right")
    for workload in workloads:
        for side, found in workload["where"].items():
            table.add_row(workload["name"], side, *(f"{ms:.3f}" for ms in found.values()))
        table.add_section()
    return table
