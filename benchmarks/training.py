"""What the commands that train share: arguments, the sides beside dtrain, ratios, a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Client

from benchmarks import peers, report
from benchmarks.ours import cluster, idle_cores, worker_blas
from benchmarks.peers import Peer
from benchmarks.plain import Loops
from benchmarks.report import Turn, say
from benchmarks.workloads import WORKLOADS, Workload

#: Replicas of a job at the most, and so the workers of the cluster.
REPLICAS = 2


@dataclass(frozen=True)
class Bench:
    """Everything that runs while a command does."""

    args: argparse.Namespace
    loops: Loops
    peers: Sequence[Peer]
    client: Client


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", action="append", choices=list(WORKLOADS), help="may be repeated; default: all")
    add("--rounds", type=at_least(1), default=5, help="turns of each side; default: 5")
    add("--steps", type=at_least(1), help="batches in an epoch, of all replicas together")
    add(
        "--epochs",
        type=at_least(2),
        default=3,
        help="of a turn of dtrain; the first does not count; default: 3",
    )
    add("--seconds", type=float, default=2.0, help="of a turn of the other sides; default: 2")
    peers.arguments(parser)


def at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"found {text}, expected at least {least}")
        return int(text)

    return whole


def run(
    args: argparse.Namespace, measured: Callable[[Bench, Workload], dict[str, Any]]
) -> dict[str, Any]:
    """Open all sides, and measure each of the models."""
    names = list(dict.fromkeys(args.model or WORKLOADS))
    chosen = [WORKLOADS[name].sized(args.steps, REPLICAS) for name in names]
    with ExitStack() as stack:
        # The others first: Dask puts variables for its workers into the environment of this
        # process.
        loops: Loops = stack.enter_context(Loops(REPLICAS))
        others, left_out = peers.opened(args, stack)
        client = stack.enter_context(cluster(REPLICAS))
        bench = Bench(args, loops, others, client)
        return {
            "settings": {key: getattr(args, key) for key in ("rounds", "epochs", "seconds")},
            "blas": {**loops.hellos, **worker_blas(client)},
            "peers": {peer.name: peer.about for peer in others},
            "left_out": left_out,
            "idle_cores": {
                "dtrain": idle_cores(client),
                **{peer.name: report.cores_of(peer.pids()) for peer in others},
            },
            "workloads": [_measured(bench, workload, measured) for workload in chosen],
        }


def _measured(
    bench: Bench, workload: Workload, measured: Callable[[Bench, Workload], dict[str, Any]]
) -> dict[str, Any]:
    say(f"{workload.name}: {workload.rows:,} rows, {workload.parameters:,} parameters")
    return {
        "name": workload.name,
        "widths": list(workload.widths),
        "batch": workload.batch,
        "rows": workload.rows,
        "parameters": workload.parameters,
        **measured(bench, workload),
    }


def beside(
    bench: Bench,
    workload: Workload,
    ours: Mapping[str, Callable[[], Turn]],
    ratios: Mapping[str, tuple[str, str]],
) -> dict[str, Any]:
    """Turns of the plain loops, of the peers and of our sides, interleaved."""
    args, loops = bench.args, bench.loops
    sides: dict[str, Callable[[], Turn]] = {
        "plain": partial(loops.turn, workload, args.seconds),
        "plain x2": partial(loops.turn, workload, args.seconds, together=True),
    }
    for peer in bench.peers:
        sides[peer.name] = partial(peer.turn, workload, args.seconds)
    turns = report.interleaved({**sides, **ours}, args.rounds, say)
    return report.summary(turns, ratios)


def idle(found: Mapping[str, Any]) -> list[str]:
    """What took no part, and what the sides take while it is not their turn."""
    cores = ", ".join(f"{name} {cores:.2f}" for name, cores in found["idle_cores"].items())
    return [*found["left_out"], f"Cores taken by a side while it is not its turn: {cores}."]
