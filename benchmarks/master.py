"""The pure machines of the master, of the lead and of a shard, driven with simulated workers.

No cluster, no network: what the machines themselves cost, how it grows with the number of workers,
and which messages would have come to whom.  ``docs/scale.md`` goes on from here on paper.
"""

from __future__ import annotations

import argparse
import gc
import math
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from statistics import median
from typing import Any

from distributed.protocol import dumps
from distributed.scheduler import heartbeat_interval
from rich.console import RenderableType
from rich.table import Table

import dtrain
from benchmarks.report import say
from benchmarks.training import at_least
from benchmarks.workloads import WORKLOADS
from dtrain import metrics
from dtrain.config import settings
from dtrain.job import Job
from dtrain.machines.cursor import Cursor, Take
from dtrain.machines.jobs import (
    HostDone,
    HostPlan,
    HostReady,
    JobMachine,
    Launched,
    Limits,
    Reached,
    State,
)
from dtrain.machines.membership import Beat, Hello, Joined, Membership
from dtrain.machines.plan import Plan
from dtrain.machines.rounds import Rounds
from dtrain.machines.shard import ShardMachine
from dtrain.messages import Contribution, Pushed, Reduced, Verdict
from dtrain.runtime.data import DataPlan
from dtrain.runtime.launch import Launch
from dtrain.runtime.placement import place
from dtrain.runtime.rows import ArrayRef

HELP = "events/s, memory and messages of the machines with 10 to 10,000 simulated workers"

WORKERS = (10, 100, 1_000, 10_000)
#: Runs of one size: so many workers in all, but no more runs than that.
_ENOUGH, _RUNS = 2_000, 50
#: From this exponent on growth is called faster than linear: half-way to quadratic.  Caches, and
#: constants at small sizes, stay below it.
_LINEAR = 1.5
#: Batches of an epoch of each replica.
_BATCHES = 100
JOB = "0123abcd"

LEGEND = (
    "Events/s of each machine, one after the other in one thread, while Python's collector of "
    "garbage stands still; a job has one replica and one shard on each worker.  A step is one "
    "gradient of each replica, and at the lead one report of each shard.  growth: the exponent of "
    "the time of all events, over the last two sizes; 1 is linear."
)
MEMORY_LEGEND = (
    "KiB that Python has allocated for the machines (tracemalloc), with all workers in, and where "
    "a barrier or a step waits for the last of them."
)
MESSAGES_LEGEND = (
    "Messages of a job whose workers are all on hosts of their own, and the bytes of each as Dask "
    "packs it, without gradients and parameters.  A question that is not answered within the "
    "poll is asked again, so these are the least.  A steady step sends the scheduler nothing: "
    "here by construction, on a real cluster by tests/runtime/test_scheduler_load.py.  On one "
    "host, in shared memory, a step has no messages at all."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--workers",
        type=at_least(2),
        action="append",
        help="may be repeated; default: 10, 100, 1000, 10000",
    )
    add(
        "--most",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="leave out a part that would take longer, by its growth so far; default: 60",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for n in sorted(set(args.workers or WORKERS)):
        say(f"{n:,} workers")
        foreseen = {part: expected(found, part, n) for part in (PLACEMENT, BATCHES)}
        left_out = {part: each for part, each in foreseen.items() if each > args.most}
        for part, seconds in left_out.items():
            say(f"{part}: left out; it would take {seconds:,.0f} s")
        found.append(
            {
                "workers": n,
                "parts": _timed(n, set(left_out)),
                "left_out": left_out,
                "memory": _memory(n),
                "messages": messages(n),
            }
        )
    return {
        "settings": {"most": args.most},
        "sizes": found,
        "growth": {part: growth(found, part) for part in found[0]["parts"]},
    }


# -- the machines, driven ----------------------------------------------------------------------


class World:
    """A cluster of ``n`` workers with a job on all of them."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n = n
        self.addresses = [
            f"tcp://10.{i >> 16}.{i >> 8 & 255}.{i & 255}:{32768 + i % 28000}" for i in range(n)
        ]
        # Workers never come in the order of their numbers.
        self.order = list(range(n))
        random.Random(seed).shuffle(self.order)
        self.plan = Plan(rows=n * _BATCHES, replicas=n, batch_size=1, epochs=1)
        self.membership = Membership(dtrain.__version__, hello_deadline=10.0)
        limits = Limits(prepare_deadline=60.0, stop_grace=5.0, client_lease=60.0)
        record = partial(metrics.epoch_record, replicas=n)
        self.job = JobMachine(JOB, limits, 0.0, record)
        self.rounds = Rounds(1, 0, n, n, self.plan.members, lambda step: self.plan.locate(step)[0])
        self.shard = ShardMachine(0, 1, 0, self.plan.members)
        self.cursor = Cursor(self.plan, 1)

    def hosts(self) -> tuple[HostPlan, ...]:
        """Where ``place`` puts a replica and a shard on each worker, without its work."""
        return tuple(HostPlan(a, str(i), (i,), (i,)) for i, a in enumerate(self.addresses))

    # -- events, in the order in which they come ----------------------------------------------

    def hellos(self) -> list[Any]:
        joins = [Joined(self.addresses[i], str(i)) for i in self.order]
        return joins + [Hello(self.addresses[i], dtrain.__version__) for i in self.order]

    def beats(self) -> list[Any]:
        return [Beat(self.addresses[i], summary(i)) for i in self.order]

    def ready(self) -> list[Any]:
        return [HostReady(1, self.addresses[i], False) for i in self.order]

    def reached(self, phase: str) -> list[Any]:
        return [Reached(1, self.addresses[i], 0, phase, payload(phase, i)) for i in self.order]

    def pushes(self) -> list[Any]:
        return [Pushed(1, 0, (Contribution(i, 1.0, 1, 0.5, i, 0),)) for i in self.order]

    def reports(self) -> list[Any]:
        return [Reduced(1, 0, shard) for shard in self.order]

    def flip(self) -> list[Any]:
        """What the one shard does once it has all gradients."""
        verdict = Verdict(1, 0, self.plan.members(0), float(self.n), True)
        return [Reduced(1, 0, 0), verdict]

    def takes(self) -> list[Any]:
        return [Take(1, i, 0, 0) for i in self.order]

    def done(self) -> list[Any]:
        return [HostDone(1, self.addresses[i]) for i in self.order]


#: Parts that no other part needs, and that may be left out.
PLACEMENT, BATCHES = "placement", "async: a batch each"


def life(
    world: World, left_out: Iterable[str] = ()
) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """From the first hello to the end of the job: part, how many events, and what does them."""

    def told(part: str, machine: Any, events: list[Any]) -> tuple[str, int, Callable[[], Any]]:
        return part, len(events), lambda: [machine.handle(event, 0.0) for event in events]

    job = world.job
    yield told("join and hello", world.membership, world.hellos())
    yield told("heartbeats", world.membership, world.beats())
    if PLACEMENT not in left_out:
        yield PLACEMENT, world.n, lambda: place(world.membership.ready(), world.n, world.n, {})
    yield told("launch: all ready", job, [Launched(world.hosts()), *world.ready()])
    yield told("barrier: all opened", job, world.reached("opened"))
    yield told("sync: a step at the lead", world.rounds, [*world.pushes(), *world.reports()])
    yield told("sync: a step at a shard", world.shard, [*world.pushes(), *world.flip()])
    if BATCHES not in left_out:
        yield told(BATCHES, world.cursor, world.takes())
    yield told("barrier: all evaluated", job, world.reached("evaluated"))
    yield told("end: all done", job, world.done())
    assert (world.rounds.step, world.shard.version, job.state) == (1, 1, State.SUCCEEDED)


def _timed(n: int, left_out: Iterable[str]) -> dict[str, dict[str, float]]:
    runs: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for seed in range(min(_RUNS, max(1, _ENOUGH // n))):
        gc.collect()
        for part, events, act in life(World(n, seed), left_out):
            gc.disable()
            began = time.perf_counter()
            try:
                act()
            finally:
                seconds = time.perf_counter() - began
                gc.enable()
            runs.setdefault(part, []).append(seconds)
            counts[part] = events
    found = {}
    for part, seconds in runs.items():
        each, events = median(seconds), counts[part]
        found[part] = {"events": events, "seconds": each, "events_per_s": events / each}
    return found


def growth(sizes: Sequence[Mapping[str, Any]], part: str) -> float | None:
    """The exponent with which the time of a part grows, over the last two sizes it ran with."""
    ran = [(s["workers"], s["parts"][part]["seconds"]) for s in sizes if part in s["parts"]]
    if len(ran) < 2:
        return None
    (n, before), (m, after) = ran[-2:]
    return math.log(after / before) / math.log(m / n)


def expected(sizes: Sequence[Mapping[str, Any]], part: str, n: int) -> float:
    """Seconds that a part will take with ``n`` workers; 0 if nothing is known."""
    exponent = growth(sizes, part)
    ran = [size for size in sizes if part in size["parts"]]
    if exponent is None:
        return 0.0
    return ran[-1]["parts"][part]["seconds"] * (n / ran[-1]["workers"]) ** max(exponent, 1.0)


# -- memory ------------------------------------------------------------------------------------


def _memory(n: int) -> dict[str, int]:
    """Bytes that the machines hold where they wait for the last worker."""
    found: dict[str, int] = {}

    def held(what: str, machine: Any, events: Callable[[], list[Any]]) -> None:
        before = tracemalloc.get_traced_memory()[0]
        for event in events():
            machine.handle(event, 0.0)
        del event
        found[what] = tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        world = World(n)
        held("membership", world.membership, lambda: [*world.hellos(), *world.beats()])
        held("job", world.job, lambda: [Launched(world.hosts()), *world.ready()])
        held("job, in a barrier", world.job, lambda: world.reached("opened")[:-1])
        held("lead, in a step", world.rounds, lambda: [*world.pushes(), *world.reports()[:-1]])
        held("shard, in a step", world.shard, lambda: world.pushes()[:-1])
    finally:
        tracemalloc.stop()
    return found


# -- messages ----------------------------------------------------------------------------------


def summary(i: int) -> dict[str, Any]:
    """What a heartbeat carries of a job, as ``Host.summary`` makes it."""
    computing = [i, 0.001, 1000, i, 0]
    report = {"generation": 1, "epoch": 0, "steps": {str(i): 1000}, "computing": computing}
    return {JOB: report}


def payload(phase: str, i: int) -> dict[str, Any]:
    """What a host adds to a barrier, as ``Trainer`` makes it; the chief has the account."""
    if phase != "evaluated":
        return {}
    steps = {str(i): _BATCHES}
    found: dict[str, Any] = {"epoch": 0, "step": _BATCHES, "last": True, "steps": steps}
    if i == 0:
        found["train"] = {"loss": 0.5, "weight": 1.0, "samples": 1}
    return found


def messages(n: int) -> dict[str, dict[str, Any]]:
    """What, to whom, how often, how many, and the bytes of each."""
    world = World(n)
    address, contribution = world.addresses[-1], Contribution(n - 1, 1.0, 1, 0.5, n - 1, 0)
    asked = {"job": JOB, "generation": 1, "address": address, "wait": settings().poll}
    step = {"job": JOB, "generation": 1, "step": 1000, "shard": n - 1, "wait": settings().poll}
    push = packed("dtrain_push", **step, contributions=[astuple(contribution)], grads=[])
    barrier = {**asked, "epoch": 0, "payload": payload("evaluated", 1)}
    found = {
        "hello": ("scheduler", "job", n, packed("dtrain_hello", address=address, version="0.1.0")),
        "launch": ("workers", "job", n, len(pickle.dumps(_launch(world)))),
        "ready": ("scheduler", "job", n, packed("dtrain_ready", **asked, shared=False)),
        "opened": (
            "scheduler", "job", n,
            packed("dtrain_barrier", **{**barrier, "payload": {}}, phase="opened"),
        ),
        "evaluated": (
            "scheduler", "epoch", n, packed("dtrain_barrier", **barrier, phase="evaluated"),
        ),
        "in a heartbeat": (
            "scheduler", "second", n / heartbeat_interval(n), size(summary(n - 1)),
        ),
        "a steady step": ("scheduler", "step", 0, 0),
        "push": ("lead", "step", n - 1, push),
        "report": (
            "lead", "step", n - 1, packed("dtrain_reduced", **step, problem=None),
        ),
        "push, in all": ("hosts", "step", n * (n - 1), push),
    }  # fmt: skip
    names = ("to", "per", "count", "bytes")
    return {what: dict(zip(names, of, strict=True)) for what, of in found.items()}


def packed(op: str, **message: Any) -> int:
    return size({"op": op, "reply": True, **message})


def size(message: Any) -> int:
    """Bytes of a message over a comm, without the lengths in front of its frames."""
    return sum(len(memoryview(frame).cast("B")) for frame in dumps(message))


def _launch(world: World) -> Launch:
    """What the master sends to each worker for a small model on NumPy rows."""
    n, workload = world.n, WORKLOADS["small"]
    keys = tuple(f"dtrain-data-{JOB}-{i}" for i in range(n))
    x = ArrayRef((world.plan.rows, workload.widths[0]), "float32", keys, world.plan.bounds)
    y = ArrayRef((world.plan.rows,), "int64", keys, world.plan.bounds)
    model = dtrain.models.MLP(workload.widths)
    spec = Job(model, [], [], batch_size=1).spec(detach=True).resolved(replicas=n, workers=n)
    data = DataPlan(x, y, classification=True, classes=None)
    return Launch(
        job=JOB,
        generation=1,
        spec=spec,
        model=pickle.dumps(model),
        data=data,
        hosts=world.hosts(),
        settings=settings(),
    )


# -- tables ------------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    sizes = found["sizes"]
    yield _parts(found)
    yield LEGEND
    steep = {p: g for p, g in found["growth"].items() if g is not None and g > _LINEAR}
    if steep:
        yield f"Faster than linear: {', '.join(f'{p} ({g:.1f})' for p, g in steep.items())}."
    yield _by_size(sizes, "memory, KiB", lambda s: {k: v / 1024 for k, v in s["memory"].items()})
    yield MEMORY_LEGEND
    yield _messages(sizes)
    yield MESSAGES_LEGEND


def _parts(found: Mapping[str, Any]) -> Table:
    sizes = found["sizes"]
    table = _headed("events/s", sizes)
    table.add_column("growth", justify="right")
    for part, exponent in found["growth"].items():
        cells = []
        for size in sizes:
            ran = size["parts"].get(part)
            cells.append("left out" if ran is None else f"{ran['events_per_s']:,.0f}")
        table.add_row(part, *cells, "" if exponent is None else f"{exponent:.2f}")
    return table


def _by_size(
    sizes: Sequence[Mapping[str, Any]], what: str, values: Callable[[Any], Mapping[str, float]]
) -> Table:
    table = _headed(what, sizes)
    columns = [values(size) for size in sizes]
    for name in columns[0]:
        table.add_row(name, *(f"{column[name]:,.0f}" for column in columns))
    return table


def _messages(sizes: Sequence[Mapping[str, Any]]) -> Table:
    table = _headed("messages x bytes", sizes)
    for name, of in sizes[0]["messages"].items():
        cells = (
            f"{m['count']:,.0f} x {m['bytes']:,}" for m in (s["messages"][name] for s in sizes)
        )
        table.add_row(f"{name}, to the {of['to']}, per {of['per']}", *cells)
    return table


def _headed(what: str, sizes: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    table.add_column(what)
    for size in sizes:
        table.add_column(f"{size['workers']:,}", justify="right")
    return table
