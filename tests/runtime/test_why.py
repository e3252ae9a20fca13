"""Who waits for whom: what ``why`` says of stalls in running jobs, and of rarer cases."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dtrain
from dtrain.machines.jobs import (
    Cancel,
    HostPlan,
    HostReady,
    JobMachine,
    Launched,
    Limits,
    Reached,
    WorkerLost,
)
from dtrain.machines.ledger import Ledger
from dtrain.models import Linear
from dtrain.runtime import arena as arenas
from dtrain.runtime.host import Host
from dtrain.runtime.record import Record
from dtrain.runtime.why import Why
from dtrain.runtime.worker import service_at
from tests.conftest import until

from .conftest import processes

#: No job comes to the end of an epoch while a test looks at it.
X = np.ones((60_000, 3), np.float32)
Y = np.ones(60_000, np.float32)

#: Seconds within which a stalled replica is named at the latest.  The setting ``stall`` and a
#: heartbeat make about 4, where the machine has nothing else to do; what it took is printed.
NAMED = 30.0


class Sleeper(Linear):
    """Sleeps in the workers that the file ``asleep`` names, for as long as it does."""

    def __init__(self, features: int, folder: Path) -> None:
        super().__init__(features)
        self.folder = folder

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        from distributed import get_worker

        time.sleep(0.002)
        address = get_worker().address
        began = self.folder / address.replace("/", "_")
        while address in self._asleep():
            if not began.exists():
                began.touch()
            time.sleep(0.02)
        return super().loss_and_grads(params, batch, out=out, rng=rng)

    def _asleep(self) -> list[str]:
        try:
            return (self.folder / "asleep").read_text().split()
        except FileNotFoundError:
            return []


class Stall:
    """An endless job, some of whose replicas sleep between ``sleep`` and ``wake``."""

    def __init__(self, client: Client, folder: Path, replicas: int, **arguments: Any) -> None:
        self.folder = folder
        self.handle = dtrain.submit(
            Sleeper(3, folder),
            X,
            Y,
            replicas=replicas,
            batch_size=10,
            epochs=1000,
            client=client,
            **arguments,
        )
        until(lambda: self.status()["step"] > 5, 60, "no steps")
        self.worker = self.status()["replicas"]

    def status(self) -> dict[str, Any]:
        return self.handle.status()

    def sleep(self, *replicas: int) -> float:
        """Returns once all of them sleep: since when."""
        workers = [self.worker[str(i)] for i in replicas]
        marks = [self.folder / worker.replace("/", "_") for worker in workers]
        written = self.folder / "writing"
        written.write_text(" ".join(workers))
        written.rename(self.folder / "asleep")
        until(lambda: all(mark.exists() for mark in marks), 40, "they do not fall asleep")
        return max(mark.stat().st_mtime for mark in marks)

    def wake(self) -> None:
        (self.folder / "asleep").unlink(missing_ok=True)

    def says(self, pattern: str) -> None:
        """Who waits is known with their own next heartbeats."""
        why = self.handle.why_waiting
        until(lambda: re.search(pattern, why()), 30, f"{pattern!r} is not found in {why()!r}")

    def named(self, *replicas: int) -> str:
        """The words that name all of them, each with its worker and since when."""
        began = self.sleep(*replicas)
        wanted = [
            re.compile(
                rf"replica {i} on worker \S+ \({re.escape(self.worker[str(i)])}\), "
                r"computing (in a task dtrain-gradient )?for ([0-9.]+) s "
                r"\(step \d+, partition \d+, batch \d+\)"
            )
            for i in replicas
        ]
        words = ""

        def found() -> bool:
            nonlocal words
            words = self.handle.why_waiting()
            return all(one.search(words) for one in wanted)

        until(found, NAMED - (time.time() - began), f"not named within {NAMED} s")
        took = time.time() - began
        print(f"named after {took:.2f} s: {words}")
        for one in wanted:
            told = one.search(words)
            assert told is not None
            assert float(told[2]) == pytest.approx(took, abs=1.0)
        return words


def eventually(look: Callable[[], None], seconds: float = 20.0) -> None:
    """Look until all that it asserts holds: each part of it is told with a heartbeat of its own."""
    end = time.monotonic() + seconds
    while True:
        try:
            return look()
        except AssertionError:
            if time.monotonic() > end:
                raise
        threading.Event().wait(0.1)


@contextmanager
def stalling(client: Client, folder: Path, replicas: int, **arguments: Any) -> Iterator[Stall]:
    stall = Stall(client, folder, replicas, **arguments)
    try:
        yield stall
        stall.wake()
        healthy = "it is running; nobody waits for long"
        why = stall.handle.why_waiting
        until(lambda: why().startswith(healthy), 20, f"it is still named: {why()}")
        step = stall.status()["step"]
        until(lambda: stall.status()["step"] > step + 5, 30, "it does not go on")
    finally:
        stall.wake()
        stall.handle.cancel()
        assert stall.handle.wait(timeout=20) == "CANCELLED"


# -- every mode, in every memory -----------------------------------------------------------------


@pytest.fixture(scope="module")
def four() -> Iterator[Client]:
    """Four workers in this very process."""
    with (
        LocalCluster(
            n_workers=4, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module", params=["auto", "comm"])
def three(request) -> Iterator[Client]:
    """Three worker processes, with and without shared memory."""
    with processes(3, **{"dtrain.transport": request.param}) as client:
        yield client


def sync(stall: Stall, others: list[int]) -> None:
    words = stall.named(1)
    who = f"replicas {', '.join(map(str, others[:-1]))} and {others[-1]} have waited for"
    stall.says(rf"; {who} [0-9.]+ s$")
    status = stall.status()
    step = status["step"]
    assert words.startswith(f"step {step} waits for replica 1 on worker")
    waiting = {entry["replica"]: entry for entry in status["waiting"]}
    assert sorted(waiting) == others
    for replica, entry in waiting.items():
        assert entry["worker"] == stall.worker[str(replica)]
        assert (entry["for"], entry["step"]) == ([1], step)
        assert 2 < entry["seconds"] < NAMED
        assert entry["computing"]["1"] == pytest.approx(entry["seconds"], abs=1.0)
    # Of the step at hand all have their gradient but the one.
    assert status["local_steps"] == {"1": step, **{str(i): step + 1 for i in others}}
    assert "computing for" in status["doing"]["1"]
    assert "waiting for replica 1" in status["doing"]["0"]


def in_graph(stall: Stall, others: list[int]) -> None:
    words = stall.named(1)
    status = stall.status()
    step = status["step"]
    assert words.startswith(f"step {step} waits for replica 1 on worker")
    stall.says(r"; its driver on worker .* has waited for [0-9.]+ s$")
    (entry,) = status["waiting"]
    assert (entry["replica"], entry["for"], entry["step"]) == (None, [1], step)
    assert entry["worker"] == stall.worker["0"]
    assert status["local_steps"] == {"1": step, **{str(i): step + 1 for i in others}}


def backups(stall: Stall, others: list[int]) -> None:
    """One sleeper is no hindrance, two are."""
    replicas = len(others) + 1
    words = stall.named(1, 2)
    status = stall.status()
    wanted = f"step {status['step']} waits for the gradients of {replicas - 1} of {replicas} "
    assert words.startswith(f"{wanted}replicas; not there yet: replica ")
    stall.says(r"not there yet: .* have waited for [0-9.]+ s$" if replicas > 3 else r"has waited")
    for entry in status["waiting"]:
        assert (entry["for"], entry["step"]) == ([1, 2], status["step"])
    assert {e["replica"] for e in status["waiting"]} == {i for i in others if i != 2}


def bounded(stall: Stall, others: list[int]) -> None:
    stall.named(1)
    who = f"replicas {', '.join(map(str, others[:-1]))} and {others[-1]}"
    stall.says(
        rf"at step \d+ {who} are held, more than 1 step ahead of replica 1 on worker .*"
        rf"; {who} have waited for [0-9.]+ s$"
    )
    until(lambda: len(stall.status()["waiting"]) == len(others), 20, "they are not held")
    status = stall.status()
    assert all(entry["for"] == [1] for entry in status["waiting"])
    assert {entry["replica"] for entry in status["waiting"]} == set(others)
    # Whoever computes has applied all its gradients but the one at hand.
    assert sum(status["local_steps"].values()) == status["step"]


def unbounded(stall: Stall, others: list[int]) -> None:
    words = stall.named(1)
    assert words.startswith("nobody waits for it, but this is slow: replica 1 on worker")
    status = stall.status()
    assert status["waiting"] == []
    assert all(status["local_steps"][str(i)] > status["local_steps"]["1"] for i in others)


MODES = [
    pytest.param(sync, {}, id="sync"),
    pytest.param(backups, {"mode": dtrain.Sync(backups=1)}, id="backups"),
    pytest.param(bounded, {"mode": dtrain.Async(max_staleness=1)}, id="bounded"),
    pytest.param(unbounded, {"mode": dtrain.Async()}, id="unbounded"),
    pytest.param(in_graph, {"replication": "in-graph"}, id="in-graph"),
]


@pytest.mark.parametrize(("look", "arguments"), MODES)
def test_a_stall_in_threads(four, tmp_path, look, arguments):
    with stalling(four, tmp_path, 4, **arguments) as stall:
        eventually(lambda: look(stall, [0, 2, 3]))


@pytest.mark.cluster
@pytest.mark.parametrize(("look", "arguments"), MODES)
def test_a_stall_in_processes(three, tmp_path, look, arguments):
    with stalling(three, tmp_path, 3, **arguments) as stall:
        eventually(lambda: look(stall, [0, 2]))


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, {"0": 20, "1": 20, "2": 20, "3": 20}),
        ({"replication": "in-graph"}, {"0": 20, "1": 20, "2": 20, "3": 20}),
        ({"mode": dtrain.Sync(backups=1)}, None),
        ({"mode": dtrain.Async()}, None),
        ({"mode": dtrain.Async(max_staleness=1)}, None),
    ],
)
def test_the_steps_of_all_add_up(four, arguments, steps):
    """At the end of a job, whatever its heartbeats have told."""
    handle = dtrain.submit(
        Linear(3), X[:400], Y[:400], replicas=4, batch_size=10, epochs=2, client=four, **arguments
    )
    assert handle.wait(timeout=30) == "SUCCEEDED"
    status = handle.status()
    assert status["waiting"] == []
    assert status["doing"] == {}
    assert handle.why_waiting() == "it has ended: SUCCEEDED, done"
    ledger = status["ledger"]
    assert sum(status["local_steps"].values()) == ledger["applied"] + ledger["late"]
    assert ledger["applied"] == 80
    assert sorted(status["local_steps"]) == ["0", "1", "2", "3"]
    if steps is not None:
        assert status["local_steps"] == steps


class Looks:
    """Asks the hosts of a worker for their summaries, without a pause, from another thread."""

    going: Looks | None = None

    def __init__(self, address: str) -> None:
        self.failures: list[str] = []
        self.waits = self.longest = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(address,), name="looks")
        self._thread.start()

    def _look(self, address: str) -> None:
        service = service_at(address)
        assert service is not None
        while not self._over.wait(0.0002):
            for host in list(service.hosts.values()):
                began = time.monotonic()
                try:
                    self.waits += "waiting" in host.summary()
                except Exception as error:  # noqa: BLE001 - the test tells of it
                    self.failures.append(repr(error))
                self.longest = max(self.longest, time.monotonic() - began)

    def end(self) -> tuple[list[str], int, float]:
        self._over.set()
        self._thread.join()
        return self.failures, self.waits, self.longest


def begin_looking(dask_worker: Any) -> None:
    Looks.going = Looks(dask_worker.address)


def end_looking() -> Any:
    assert Looks.going is not None
    return Looks.going.end()


@pytest.mark.cluster
def test_a_heartbeat_may_come_at_any_time(three):
    """Also while the thread that waits is leaving, and the file is being unmapped."""
    dtrain.fit(Linear(3), X[:90], Y[:90], replicas=3, client=three, progress=False)  # installs
    three.run(begin_looking)
    try:
        for _, arguments in (mode.values for mode in MODES):
            for _ in range(4):
                dtrain.fit(
                    Linear(3), X[:90], Y[:90], replicas=3, batch_size=5, epochs=2, client=three,
                    progress=False, **arguments,
                )  # fmt: skip
    finally:
        found = three.run(end_looking).values()
    assert [failure for failures, _, _ in found for failure in failures] == []
    assert sum(waits for _, waits, _ in found) > 0
    assert max(longest for _, _, longest in found) < 1.0


@pytest.fixture
def host() -> Host:
    launch = SimpleNamespace(
        job="j",
        generation=1,
        host=lambda address: HostPlan(address, "", (0, 2)),
        spec=SimpleNamespace(mode="sync", backups=0, replication="between-graph"),
    )
    service: Any = SimpleNamespace(address="tcp://a", usual={})
    return Host(service, launch)  # type: ignore[arg-type]


class Slowly:
    """Something that takes its time to answer, until it is let go."""

    def __init__(self) -> None:
        self.asked, self._go = threading.Event(), threading.Event()
        self.answered = False

    def __call__(self) -> list[int]:
        self.asked.set()
        assert self._go.wait(10)
        self.answered = True
        return [1]

    def let_go_soon(self) -> None:
        threading.Timer(0.2, self._go.set).start()


def test_nobody_leaves_while_a_heartbeat_looks(host):
    missing, reports = Slowly(), []
    look = threading.Thread(target=lambda: reports.append(host.summary()))
    with host.activity.waiting(7, missing):
        look.start()
        assert missing.asked.wait(10)
        missing.let_go_soon()
    assert missing.answered
    look.join()
    assert reports[0]["waiting"].pop("seconds") >= 0
    assert reports[0]["waiting"] == {"step": 7, "who": [0, 2], "replicas": [1], "more": 0}
    assert "waiting" not in host.summary()


def test_nothing_is_unmapped_while_a_heartbeat_looks(host, monkeypatch):
    class Account:
        ledger, loss, samples = Ledger(), 0.5, 10
        version = property(lambda _: slowly())

    slowly, closed = Slowly(), []
    monkeypatch.setattr(arenas, "release", lambda key: closed.append(slowly.answered))
    host.arena = SimpleNamespace(lock=threading.Lock())
    host.account, host.opened = Account(), True
    look = threading.Thread(target=host.summary)
    look.start()
    assert slowly.asked.wait(10)
    slowly.let_go_soon()
    host.close()
    assert closed == [True]
    look.join()
    assert "account" not in host.summary()


def test_a_summary_stays_small(host):
    with host.activity.waiting(7, lambda: range(1, 1000)):
        said = host.summary()["waiting"]
    assert (said["replicas"], said["more"]) == (list(range(1, 17)), 983)


# -- on reports made by hand ---------------------------------------------------------------------

HOSTS = (
    HostPlan("tcp://a", "", (0,), (0,)),
    HostPlan("tcp://b", "bee", (1,)),
    HostPlan("tcp://c", "", (2, 3)),
    HostPlan("tcp://d", "", (), (1,)),
)
NOW = 100.0


def machine(state: str = "RUNNING", hosts: tuple[HostPlan, ...] = HOSTS) -> JobMachine:
    limits = Limits(
        prepare_deadline=60.0, stop_grace=60.0, client_lease=60.0,
        max_losses=10, min_workers=1, recovery_deadline=600.0,
    )  # fmt: skip
    found = JobMachine("j", limits, 80.0, lambda payloads: {})
    if state != "QUEUED":
        found.handle(Launched(hosts), 90.0)
    if state not in ("QUEUED", "PREPARING"):
        for host in hosts:
            found.handle(HostReady(1, host.address), 94.0)
    return found


def report(at: float = NOW - 0.4, **said: Any) -> dict[str, Any]:
    return {"generation": 1, "epoch": 0, "steps": {}, "computing": None, "usual": None} | {
        "at": at, **said
    }  # fmt: skip


def waiting(step: int, who: list[int], replicas: list[int], seconds: float, more: int = 0) -> Any:
    return {"step": step, "who": who, "replicas": replicas, "more": more, "seconds": seconds}


def why(machine: JobMachine, reports: dict[str, Any], **spec: Any) -> Why:
    values = {"mode": "sync", "backups": 0, "max_staleness": None, "replication": "between-graph"}
    asked = SimpleNamespace(**values | spec, device="auto", recovery=SimpleNamespace(min_workers=2))
    everyone = {host.address: report() for host in machine.hosts}
    return Why(machine, asked, everyone | reports, NOW, 3.0, 4.0)  # type: ignore[arg-type]


def test_a_step_tells_all_there_is_to_tell():
    found = why(
        machine(),
        {
            "tcp://a": report(waiting=waiting(120, [0], [1], 4.5)),
            "tcp://b": report(computing=[1, 4.8, 120, 1, 7]),
            "tcp://c": report(waiting=waiting(120, [2, 3], [], 4.0)),
        },
    )
    assert found.words() == (
        "step 120 waits for replica 1 on worker bee (tcp://b), computing for 5.2 s "
        "(step 120, partition 1, batch 7); replicas 0, 2 and 3 have waited for 4.9 s"
    )
    assert found.waiting()[0] == {
        "replica": 0,
        "worker": "tcp://a",
        "for": [1],
        "step": 120,
        "barrier": None,
        "seconds": pytest.approx(4.9),
        "computing": {"1": pytest.approx(5.2)},
    }
    # One that does not know for whom it waits is told by the others.
    assert [(w["replica"], w["for"]) for w in found.waiting()] == [(0, [1]), (2, [1]), (3, [1])]
    assert found.doing() == {
        "0": "waiting for replica 1 for 4.9 s",
        "1": "computing for 5.2 s (step 120, partition 1, batch 7)",
        "2": "waiting for step 120 to commit for 4.4 s",
        "3": "waiting for step 120 to commit for 4.4 s",
    }


def test_replicas_of_one_worker_take_turns():
    found = why(
        machine(),
        {
            "tcp://a": report(waiting=waiting(5, [0], [2, 3], 4.0)),
            "tcp://c": report(computing=[2, 4.0, 5, 2, 5]),
        },
    )
    assert found.words() == (
        "step 5 waits for replicas 2 and 3 on worker tcp://c, computing replica 2 for 4.4 s "
        "(step 5, partition 2, batch 5); replica 0 has waited for 4.4 s"
    )
    assert found.doing()["3"] == "waiting for its turn after replica 2"


def test_one_that_reads_for_long_is_named():
    reports = {
        "tcp://a": report(waiting=waiting(5, [0], [1], 4.0)),
        "tcp://b": report(doing=["reading a batch", 4.0]),
    }
    words = why(machine(), reports).words()
    assert words.startswith("step 5 waits for replica 1 on worker bee (tcp://b), reading a batch")


@pytest.mark.parametrize("known", [[1], []])
def test_a_worker_that_is_not_heard_of(known):
    """Where shards lie in the memory of workers, only the lead knows whose gradient is there."""
    reports = {
        "tcp://a": report(waiting=waiting(7, [0], known, 4.0)),
        "tcp://b": report(NOW - 5.0, computing=[1, 0.1, 7, 1, 7]),
    }
    assert why(machine(), reports).words() == (
        "step 7 waits for replica 1 on worker bee (tcp://b), not heard of for 5.0 s; "
        "replica 0 has waited for 4.4 s"
    )


def test_a_worker_with_shards_alone_that_is_not_heard_of():
    account = {"step": 9, "loss": 0.5, "samples": 90, "ledger": {}}
    reports = {"tcp://a": report(account=account), "tcp://d": report(NOW - 6.0)}
    words = why(machine(), reports).words()
    assert words == "step 9 waits for worker tcp://d, not heard of for 6.0 s"


def test_all_wait_though_nobody_computes():
    reports = {
        host.address: report(waiting=waiting(3, list(host.replicas), [], 3.5))
        for host in HOSTS
        if host.replicas
    }
    assert why(machine(), reports).words() == (
        "step 3 has all its gradients, as far as is known: it is being applied, or waits for the "
        "verdict at worker tcp://a; replicas 0, 1, 2 and 3 have waited for 3.9 s"
    )


def test_in_graph_its_tasks_do_not_run():
    reports = {"tcp://a": report(waiting=waiting(3, [], [], 3.5))}
    assert "busy with other tasks" in why(machine(), reports, replication="in-graph").words()


@pytest.mark.parametrize("waited", [4.0, 0.1])
def test_the_end_of_an_epoch(waited):
    found = machine()
    for host in HOSTS[:2]:
        found.handle(Reached(1, host.address, 1, "evaluated", {}), 95.0)
    reports = {
        "tcp://a": report(barrier=[1, "evaluated", waited]),
        "tcp://b": report(barrier=[1, "evaluated", 0.05]),
        "tcp://c": report(doing=["evaluating", 4.6]),
    }
    told = why(found, reports)
    since = "; replicas 0 and 1 have waited for 4.4 s" if waited > 3 else ""
    assert told.words() == (
        "the end of epoch 2 (evaluated) waits for replicas 2 and 3 on worker tcp://c, "
        f"evaluating for 5.0 s{since}"
    )
    first, second = told.waiting()
    assert (first["replica"], first["for"], first["step"]) == (0, [2, 3], None)
    assert first["barrier"] == second["barrier"] == "the end of epoch 2 (evaluated)"


def test_at_the_opening_those_without_replicas_count():
    found = machine()
    for host in HOSTS[:3]:
        found.handle(Reached(1, host.address, 0, "opened", {}), 95.0)
    told = why(found, {})
    assert told.words() == "the opening waits for worker tcp://d, between two steps"
    assert told.waiting()[0]["for"] == ["tcp://d"]


def test_of_many_that_are_late_the_slowest_are_named():
    hosts = tuple(HostPlan(f"tcp://{i}", "", (i,)) for i in range(20))
    found = machine(hosts=hosts)
    found.handle(Reached(1, "tcp://0", 0, "trained", {}), 95.0)
    words = why(found, {"tcp://19": report(computing=[19, 5.0, 3, 19, 3])}).words()
    assert words.startswith("the end of epoch 1 (trained) waits for replica 19 on worker tcp://19")
    assert words.endswith("and 15 more")


def test_one_backup_is_slow_and_nobody_waits():
    reports = {
        # Of this step too it is the last, and the step does not need it.
        "tcp://a": report(waiting=waiting(14, [0], [1, 2], 0.1)),
        "tcp://b": report(computing=[1, 4.0, 12, 1, 3]),
    }
    assert why(machine(), reports, backups=1).words() == (
        "nobody waits for it, but this is slow: replica 1 on worker bee (tcp://b), computing for "
        "4.4 s (step 12, partition 1, batch 3)"
    )


def test_held_and_slow_are_told_apart():
    """Replica 2 is slow, and not yet so far behind that anybody is held for it."""
    reports = {
        "tcp://a": report(waiting=waiting(31, [0], [1], 4.5)),
        "tcp://b": report(computing=[1, 4.8, 29, 1, 7]),
        "tcp://c": report(computing=[2, 3.0, 30, 2, 9]),
    }
    assert why(machine(), reports, mode="async", max_staleness=4).words() == (
        "at step 31 replica 0 is held, more than 4 steps ahead of replica 1 on worker bee "
        "(tcp://b), computing for 5.2 s (step 29, partition 1, batch 7); replica 0 has waited for "
        "4.9 s; slow too: replica 2 on worker tcp://c, computing for 3.4 s "
        "(step 30, partition 2, batch 9)"
    )


def test_nobody_waits():
    found = why(
        machine(),
        {
            "tcp://a": report(waiting=waiting(8, [0], [1], 0.2)),
            "tcp://b": report(computing=[1, 0.2, 8, 1, 8]),
        },
    )
    assert found.words() == (
        "it is running; nobody waits for long: replica 0 is waiting for replica 1 for 0.2 s and "
        "replica 1 is computing for 0.2 s (step 8, partition 1, batch 8) and "
        "replica 2 is between two steps and replica 3 is between two steps"
    )


def test_local_steps_outlive_generations():
    """Each generation begins to count anew; a heartbeat may be older than a barrier."""
    data: Any = SimpleNamespace(x=SimpleNamespace(rows=100), holders=(), file=None)
    spec: Any = SimpleNamespace(
        detach=True, validation_split=None, replicas=2, batch_size=10, epochs=1, steps=None,
        mode="sync", backups=0,
    )  # fmt: skip
    record = Record(machine(), spec, None, data)
    record.heard("tcp://a", report(steps={"0": 4}), NOW)
    record.count(1, {"0": 6, "1": 5})
    record.heard("tcp://a", report(steps={"0": 5}), NOW)
    assert record.local_steps == {"0": 6, "1": 5}
    record.heard("tcp://a", report(generation=2, steps={"0": 1, "1": 0}), NOW)
    record.count(2, {"0": 2})
    assert record.local_steps == {"0": 8, "1": 5}


def test_before_it_runs_and_after():
    assert why(machine("QUEUED"), {}).words() == "queued for 20.0 s, waiting for 2 workers"

    preparing = machine("PREPARING")
    preparing.handle(HostReady(1, "tcp://a"), 94.0)
    preparing.handle(HostReady(1, "tcp://d"), 94.0)
    told = why(preparing, {"tcp://b": report(doing=["opening its data", 9.0])})
    told._reports.pop("tcp://c")  # type: ignore[attr-defined]
    assert told.words() == (
        "preparing for 10.0 s, waiting for worker bee (tcp://b), opening its data for 9.4 s "
        "and worker tcp://c, without a task that has begun for 10.0 s"
    )
    (entry,) = told.waiting()
    assert (entry["replica"], entry["worker"]) == (None, None)
    assert (entry["for"], entry["seconds"]) == (["tcp://b", "tcp://c"], 10.0)

    recovering = machine()
    recovering.handle(WorkerLost("tcp://b"), 97.0)
    assert why(recovering, {}).words() == (
        "recovering for 3.0 s, waiting for 2 workers: worker bee (tcp://b) is gone; it had "
        "replicas [1] and shards []"
    )

    stopping = machine()
    stopping.handle(Cancel("enough"), 98.0)
    told = why(stopping, {"tcp://b": report(computing=[1, 9.0, 4, 1, 4])})
    assert told.words().startswith("stopping for 2.0 s, waiting for worker ")
    assert "worker bee (tcp://b), computing replica 1 for 9.4 s" in told.words()
