"""What a step costs without a model, and how fast parameters travel, beside raw TCP."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from distributed import Client
from rich.console import RenderableType
from rich.table import Table

import dtrain
from benchmarks import notes, remote, report
from benchmarks.ours import cluster, fitted, idle_cores, worker_blas
from benchmarks.report import Turn, say
from benchmarks.training import at_least
from benchmarks.workloads import WORKLOADS
from dtrain.models import MLP

HELP = "microseconds of an empty synchronous step; GB/s of a pull and a push, beside raw TCP"

#: The model whose parameters an empty step has.
SMALL = WORKLOADS["small"]
#: Bytes: a factor of 8 from one to the next, 1 KiB to 256 MiB.
SIZES = tuple(1 << power for power in range(10, 29, 3))
#: A step over the network takes so much longer that it gets fewer of them.
FEWER = 20
STEP_LEGEND = (
    f"An empty synchronous step: {SMALL.parameters:,} parameters, momentum SGD, a model that "
    "returns at once (zero gradients), batches of one row; a replica and a shard on each worker "
    "process.  Medians of interleaved turns: from call to call of the model, in the steady part."
)
REMOTE_LEGEND = (
    "A replica and its shard in two worker processes of this machine.  pull: fetch all "
    "parameters; push and pull: send a gradient, fetch all parameters (dtrain has no push without "
    "an answer), without the optimizer's maths.  dtrain: over Dask's comms, with everything that "
    "a replica does; tcp: the same bytes in the same processes over a plain socket, into memory "
    "that is there already.  GB/s: bytes of both directions; medians of interleaved turns; 1 GB "
    "is 10^9 bytes."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=5, help="turns of each side; default: 5")
    add(
        "--steps",
        type=at_least(FEWER * 10),
        default=20_000,
        help=f"empty steps of a turn; a {FEWER}th of them over comm; default: 20000",
    )
    add("--largest", type=at_least(SIZES[0]), default=SIZES[-1], help="bytes; default: 256 MiB")
    add("--seconds", type=float, default=0.5, help="of a turn of a transfer; default: 0.5")


def run(args: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        shared = stack.enter_context(cluster(2))
        comm = stack.enter_context(cluster(2, transport="comm"))
        found: dict[str, Any] = {
            "settings": {key: getattr(args, key) for key in ("rounds", "steps", "seconds")},
            "blas": worker_blas(shared),
            "idle_cores": idle_cores(shared) + idle_cores(comm),
            "step": _steps(args, shared, comm),
            "remote": remote.measured(
                [size for size in SIZES if size <= args.largest], args.rounds, args.seconds, comm
            ),
        }
    return found


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    step = found["step"]
    table = Table()
    table.add_column("an empty step")
    table.add_column("µs", justify="right")
    for side, each in step["us"].items():
        table.add_row(side, f"{each:,.1f}")
    yield table
    yield STEP_LEGEND
    if not step["shared"]["shared memory"]:
        yield "WARNING: the workers do not share memory; that side went over comm too"
    yield remote.table(found["remote"])
    yield REMOTE_LEGEND
    yield f"The two clusters, idle, take {found['idle_cores']:.2f} cores."


class Empty(MLP):
    """A model whose gradient is zero, written at its first step alone."""

    def loss_and_grads(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        notes.note()
        if np.isnan(next(iter(out.values())).flat[0]):
            for view in out.values():
                view.fill(0)
        return 0.0, out


def _steps(args: argparse.Namespace, shared: Client, comm: Client) -> dict[str, Any]:
    few = args.steps // FEWER
    sides: dict[str, tuple[int, int, Client]] = {
        "shared memory": (2, args.steps, shared),
        "comm": (2, few, comm),
        "1 worker": (1, args.steps, shared),
    }
    turns: dict[str, Callable[[], Turn]] = {
        side: partial(_empty, *of) for side, of in sides.items()
    }
    found = report.summary(
        report.interleaved(turns, args.rounds, say, "steps/s"),
        {"comm over shared memory": ("comm", "shared memory")},
    )
    return {
        "parameters": SMALL.parameters,
        **found,
        "us": {side: 1e6 / rate for side, rate in found["medians"].items()},
        "shared": {side: _shared(client) for side, (n, _, client) in sides.items() if n > 1},
    }


def _empty(replicas: int, steps: int, client: Client) -> Turn:
    """Steps/s of an empty job; the mean of its processes, which keep step."""
    rows = steps * replicas
    x = np.zeros((rows, SMALL.widths[0]), np.float32)
    y = np.arange(rows) % SMALL.widths[-1]
    client.run(notes.forget)
    fitted(
        Empty(SMALL.widths),
        SMALL,
        x,
        y,
        mode=dtrain.Sync(),
        replicas=replicas,
        epochs=1,
        client=client,
        batch=1,
    )
    # The first third is not steady yet.
    found = client.run(notes.steps_per_s, steps // 3).values()
    rates = [rate for rate in found if rate is not None]
    return Turn(sum(rates) / len(rates), rates)


def _shared(client: Client) -> bool:
    """Whether all jobs of several workers went over shared memory."""

    def look(dask_scheduler: Any) -> bool:
        machines = [job.machine for job in dask_scheduler.extensions["dtrain"].jobs.values()]
        return all(machine.shared for machine in machines if len(machine.hosts) > 1)

    found: bool = client.run_on_scheduler(look)
    return found
