"""Faults at named points of a job, and what has to hold whatever they hit.

A :class:`Fault` is armed in the worker processes before its job is submitted: at the n-th passing
of a point, the process that has a certain role in the job's first generation does something to
itself, or to others as well.  It notes that it did, and when.  :func:`run` submits a job, watches
its steps until it ends, and checks the invariants of the whole story.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from distributed import Client, LocalCluster

import dtrain
from dtrain.cluster import install
from dtrain.machines.jobs import TERMINAL, TRANSITIONS, State
from dtrain.runtime import points
from tests.conftest import until

#: Rows that no number of replicas or batches divides.
ROWS, FEATURES = 603, 6
RNG = np.random.default_rng(5)
X = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(int)
TRAINED = ROWS - round(ROWS * 0.2)

#: Seconds that a job of this suite may take, at the most, on a busy machine.
LONG = 90.0


class Paced(dtrain.models.MLP):
    """An MLP whose batches take a while; slower yet for as long as the file ``hold`` is there.

    Bits do not depend on time: so a test keeps a job going until it has seen what it wants.
    """

    pace = 0.004
    hold = ""

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        self.pause(batch)
        return super().loss_and_grads(params, batch, out=out, rng=rng)

    def pause(self, batch):
        time.sleep(0.1 if self.hold and os.path.exists(self.hold) else self.pace)


def once(marker: str | Path) -> bool:
    """Whether this is the first time, over all processes."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def hold_gil(seconds: int) -> None:
    """Sleep in C without letting go of the interpreter."""
    ctypes.PyDLL(None).sleep(seconds)


def paced(kind: type = Paced, **attributes):
    model = kind([FEATURES, 12, 2])
    for name, value in attributes.items():
        setattr(model, name, value if isinstance(value, float | int) else str(value))
    return model


JOB = dict(
    optimizer=dtrain.optim.adam(1e-2),
    replicas=4,
    shards=2,
    batch_size=10,
    epochs=4,
    validation_split=0.2,
    metrics=["accuracy"],
    seed=3,
)
#: steps in all: of 483 rows the longest part has 121
STEPS = 4 * 13


# -- faults -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """At the ``nth`` passing of ``point``, the process with ``role`` does ``act``.

    role: ``chief``; ``host``: it has shards and is not the chief; ``plain``: replicas alone.
    act: ``SIGKILL``, ``SIGSTOP``, ``SIGSEGV``, sent to itself, or ``raise``.  ``with_it``: how
    many others it takes along.
    """

    point: str
    role: str = "chief"
    act: str = "SIGKILL"
    nth: int = 9
    with_it: int = 0

    def __str__(self) -> str:
        return f"{self.act}-{self.role}-{self.point}" + (f"+{self.with_it}" * bool(self.with_it))


def host_here():
    """The newest host of the only job in this process."""
    from dtrain.runtime import worker

    hosts = [h for service in worker._services.values() for h in service.hosts.values()]
    return hosts[-1] if hosts else None


def role_of(host) -> str:
    if host.is_chief:
        return "chief"
    return "host" if host.plan.shards else "plain"


class Armed:
    """The hook of one process."""

    def __init__(self, faults: tuple[Fault, ...], folder: str, pids: tuple[int, ...]) -> None:
        self.faults, self.folder = faults, Path(folder)
        self.others = [pid for pid in pids if pid != os.getpid()]
        self.passed = dict.fromkeys(faults, 0)

    def __call__(self, name: str) -> None:
        host = host_here()
        if host is None or host.generation != 1:
            return
        for fault in self.faults:
            if fault.point == name and fault.role == role_of(host):
                self.passed[fault] += 1
                if self.passed[fault] == fault.nth:
                    self.strike(fault)

    def strike(self, fault: Fault) -> None:
        struck = self.folder / f"struck-{fault.role}-{os.getpid()}"
        struck.write_text(repr(time.time()))
        if fault.act == "raise":
            raise RuntimeError(f"struck at {fault.point}")
        number = getattr(signal, fault.act)
        for pid in [*self.others[: fault.with_it], os.getpid()]:
            os.kill(pid, number)


def _install(faults: tuple[Fault, ...], folder: str, pids: tuple[int, ...]) -> None:
    points.hook = Armed(faults, folder, pids)


def _disarm() -> None:
    points.hook = None


def arm(client: Client, folder: Path, *faults: Fault) -> None:
    """Arm all workers; those that are started anew later are not."""
    pids = tuple(client.run(os.getpid).values())
    client.run(_install, faults, str(folder), pids)


@dataclass(frozen=True)
class Struck:
    role: str
    pid: int
    at: float


def struck(folder: Path) -> list[Struck]:
    """What has been done so far."""
    found = []
    for file in sorted(folder.glob("struck-*")):
        _, role, pid = file.name.split("-")
        with suppress(ValueError):  # being written
            found.append(Struck(role, int(pid), float(file.read_text())))
    return found


# -- clusters -----------------------------------------------------------------------------------


def whole_again(client: Client, workers: int) -> None:
    """All workers are back, have dtrain, and nothing is armed."""
    client.wait_for_workers(workers, timeout=60)

    def ready() -> bool:
        found = install(client)["ready"]
        return len(found) == workers

    until(ready, 60, f"no {workers} workers are ready")
    client.run(_disarm)


def files_of(address: str) -> set[str]:
    """The files whose owner is the scheduler at ``address``; other clusters have their own."""
    found = set()
    for root in {"/dev/shm", tempfile.gettempdir()}:
        for held in Path(root, f"dtrain-{os.getuid()}").glob("*.held"):
            with suppress(OSError):
                if held.read_text() == address:
                    found.add(str(held))
    return found


# -- a job and its story ------------------------------------------------------------------------


@dataclass
class Story:
    """A job that has ended, and what was seen of it meanwhile."""

    handle: dtrain.Handle
    result: dtrain.Result | None
    status: dict
    events: list[dict]
    #: (time, generation, step), in the order in which they were seen
    seen: list[tuple[float, int, int]] = field(default_factory=list)

    def said(self, pattern: str) -> list[dict]:
        return [e for e in self.events if re.search(pattern, e["message"])]

    @property
    def losses(self) -> list[dict]:
        return [e for e in self.events if "it had replicas" in e["message"]]

    def __str__(self) -> str:
        began = self.events[0]["time"]
        lines = [f"{e['time'] - began:7.3f} {e['state']}: {e['message']}" for e in self.events]
        return "\n".join(lines)


def submit(client: Client, model=None, x=X, y=Y, **changes) -> dtrain.Handle:
    model = model if model is not None else paced()
    return dtrain.submit(model, x, y, client=client, **{**JOB, **changes})


def watch(handle: dtrain.Handle, condition=lambda: False, seconds: float = LONG, seen=None):
    """Look at a job until it ends or a condition holds; what was seen of its steps."""
    seen = [] if seen is None else seen

    def look() -> bool:
        status = handle.status()
        seen.append((time.time(), status["generation"], status["step"]))
        return status["state"] in TERMINAL or condition()

    try:
        until(look, seconds, "the job neither ends nor gets there")
    except BaseException:
        print(told(handle))
        raise
    return seen


def told(handle: dtrain.Handle) -> str:
    events = handle.events()
    story = Story(handle, None, {}, events)
    return f"{story}\n{handle.why_waiting()}"


def finished(handle: dtrain.Handle, seen=None) -> Story:
    """The whole story of a job that has ended by now, or will, and that it holds together."""
    seen = watch(handle, seen=seen)
    status = handle.status()
    result = handle.result(timeout=10) if status["state"] == "SUCCEEDED" else None
    # The faults of the next test are not to hit it; `test_results` is about that.
    handle.release()
    story = Story(handle, result, status, handle.events(), seen)
    print(story)
    check(story)
    return story


def run(client: Client, model=None, x=X, y=Y, **changes) -> Story:
    return finished(submit(client, model, x, y, **changes))


def check(story: Story) -> None:
    """What holds for every job, whatever has hit it."""
    states = [State(e["state"]) for e in story.events]
    assert [s for s in states if s in TERMINAL] == states[-1:], f"one end, the last\n{story}"
    for before, after in pairwise(states):
        assert after is before or after in TRANSITIONS[before], f"{before} -> {after}\n{story}"
    assert len({round(e["time"], 6) for e in story.events}) > 1
    for loss in story.losses:
        # Which worker, what it had, and how that is known.
        assert re.search(r"worker .*tcp://\S+\) (is gone|has )", loss["message"]), loss
        assert re.search(r"replicas \[.*\] and shards \[.*\]", loss["message"]), loss
    _check_steps(story)
    if story.result is not None:
        _check_account(story)


def _check_steps(story: Story) -> None:
    """No committed step is undone unless the story says so."""
    for event in story.said("goes on from step"):
        match = re.search(r"from step (\d+), from (\w+)(, (\d+) steps)?", event["message"])
        step, source, lost = int(match[1]), match[2], int(match[4] or 0)
        before = [s for at, _, s in story.seen if at < event["time"]]
        newest = max(before, default=0)
        if source == "memory":
            assert step >= newest, f"at {newest}, and then: {event['message']}\n{story}"
            assert not lost
        elif story.status["mode"] == "sync":
            assert step + lost >= newest, f"at {newest}, and then: {event['message']}\n{story}"
    if story.said("from (checkpoint|start)"):
        return
    for generation in range(1, story.status["generation"] + 1):
        steps = [s for _, g, s in story.seen if g == generation]
        assert steps == sorted(steps), f"steps of generation {generation}: {steps}\n{story}"


def _check_account(story: Story) -> None:
    ledger, result = story.result.ledger, story.result
    assert ledger.applied == sum(ledger.staleness.values()), ledger
    if story.status["mode"] == "sync":
        assert ledger.samples == [e["samples"] for e in result.history]
        assert len(set(ledger.samples)) == 1, ledger  # whole epochs
        assert dict(ledger.staleness) == {0: ledger.applied}
        assert result.version == result.history[-1]["step"]
    assert [e["epoch"] for e in result.history] == list(range(1, len(result.history) + 1))
    assert all(np.isfinite(p).all() for p in result.params.values())


def bits(result: dtrain.Result):
    """Everything of a result that must not depend on what ran it, or what hit it."""
    timing = ("seconds", "samples_per_s")
    history = [{k: v for k, v in e.items() if k not in timing} for e in result.history]
    return {name: p.tobytes() for name, p in result.params.items()}, history


_references: dict = {}


def reference(**changes) -> dtrain.Result:
    """The same job, and nothing happens to it; in threads, as bits do not depend on that."""
    key = repr(sorted(changes.items()))
    if key not in _references:
        with (
            LocalCluster(
                n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            model = dtrain.models.MLP([FEATURES, 12, 2])
            arguments = {**JOB, **changes, "client": client, "progress": False}
            _references[key] = dtrain.fit(model, X, Y, **arguments)
    return _references[key]


def same(story: Story, **changes) -> None:
    """The result has the bits of a run without faults, and its account."""
    assert story.result is not None, f"{story}"
    expected = reference(**changes)
    assert bits(story.result) == bits(expected), f"other bits\n{story}"
    ledger = story.result.ledger
    assert (ledger.applied, ledger.samples) == (expected.ledger.applied, expected.ledger.samples)
