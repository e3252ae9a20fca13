"""Queues that processes share: nothing is lost, nothing comes twice, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask.config
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dtrain
from dtrain.cluster import install
from dtrain.errors import DataError, DeadlineError, FencedError, QueueClosed, QueueLost, SpecError
from dtrain.sessions.queue import LARGE, Queue, open_queue
from tests.conftest import until
from tests.runtime.conftest import processes, within

SESSION = "test"

#: Where dtrain is imported from by other processes.
ROOT = Path(dtrain.__file__).parent.parent


@pytest.fixture
def cluster(threaded: Client) -> Iterator[Client]:
    install(threaded)
    yield threaded
    threaded.sync(threaded.scheduler.dtrain_queues_reset, session=SESSION)


def test_items_of_any_kind_come_out_as_they_went_in(cluster):
    with open_queue(cluster, SESSION, "kinds", 16) as q:
        x = np.arange(6.0).reshape(2, 3)
        for item in (x, {"obs": x.T, "n": 3}, (x, [x, None]), "word", None, {("a", 1): x}):
            q.put(item)
        x[:] = -1  # what was put is a copy
        first = q.get()
        assert first.flags.writeable
        np.testing.assert_array_equal(first, np.arange(6.0).reshape(2, 3))
        second = q.get()
        assert second["n"] == 3
        assert second["obs"].shape == (3, 2)
        third = q.get()
        assert type(third) is tuple
        assert type(third[1]) is list
        assert q.get() == "word"
        assert q.get() is None
        assert list(q.get()) == [("a", 1)]
    assert open_queue(cluster, SESSION, "kinds").stats()["acknowledged"] == 6


def test_a_trainer_and_eight_collectors_lose_and_repeat_nothing(cluster):
    each, collectors = 40, 8
    trainer = open_queue(cluster, SESSION, "experience", 5)

    def collect(number: int) -> None:
        with open_queue(cluster, SESSION, "experience", 5) as q:
            for i in range(each):
                q.put({"collector": number, "i": i, "data": np.full(1000, number * each + i)})

    threads = [
        threading.Thread(target=collect, args=(n,), name=f"dtrain-test-{n}")
        for n in range(collectors)
    ]
    for thread in threads:
        thread.start()
    seen: list[tuple[int, int]] = []
    for _ in range(each * collectors):
        item = trainer.get(timeout=30)
        assert (item["data"] == item["collector"] * each + item["i"]).all()
        seen.append((item["collector"], item["i"]))
    for thread in threads:
        thread.join(30)
    assert Counter(seen) == Counter((c, i) for c in range(collectors) for i in range(each))
    for c in range(collectors):  # first in, first out
        assert [i for who, i in seen if who == c] == list(range(each))
    trainer.close()
    with pytest.raises(QueueClosed):
        trainer.get()
    stats = trainer.stats()
    assert (stats["put"], stats["acknowledged"]) == (each * collectors,) * 2
    assert stats["redelivered"] == stats["lost"] == 0
    assert stats["drained"]
    assert not stats["bytes"]


def test_waits_end_at_their_deadline_and_leave_nothing(cluster):
    with open_queue(cluster, SESSION, "waits", 1) as q:
        with pytest.raises(DeadlineError, match="nothing to be got"):
            q.get(timeout=0)
        with pytest.raises(DeadlineError, match=r"0\.1 s have passed"):
            q.get(timeout="100ms")
        q.put(1)
        with pytest.raises(DeadlineError, match="there is no place; it takes 1 items"):
            q.put(2, timeout=0.1)
        assert q.get(timeout=20) == 1
        with pytest.raises(DeadlineError):
            q.get(timeout=0)
        assert q.stats()["put"] == q.stats()["acknowledged"] == 1
    with pytest.raises(FencedError, match="was left"):
        q.put(3)


def test_a_wait_that_is_longer_than_a_poll_is_answered(cluster, monkeypatch):
    with dask.config.set({"dtrain.poll": "50ms"}):
        q, other = (open_queue(cluster, SESSION, "polls", 1) for _ in range(2))
    timer = threading.Timer(0.4, other.put, ("late",))
    timer.name = "dtrain-test-timer"
    timer.start()
    assert q.get(timeout=10) == "late"
    q.put("first")
    got = []
    timer = threading.Timer(0.4, lambda: (got.append(other.get()), other.done()))
    timer.name = "dtrain-test-timer"
    timer.start()
    q.put("second", timeout=10)
    timer.join(10)
    assert got == ["first"]
    assert q.get() == "second"
    assert q.stats()["duplicates"] > 2  # the polls


def test_close_drains_and_then_says_so(cluster):
    q = open_queue(cluster, SESSION, "closing", 4)
    other = open_queue(cluster, SESSION, "closing")
    for i in range(3):
        q.put(i)
    q.close()
    q.close()
    with pytest.raises(QueueClosed, match="'closing' of session 'test'"):
        q.put(4)
    assert list(other) == [0, 1, 2]
    with pytest.raises(QueueClosed):
        q.get()


def test_who_waits_for_an_item_when_it_is_closed_is_told(cluster):
    q = open_queue(cluster, SESSION, "told", 4)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            open_queue(cluster, SESSION, "told").get(timeout=30)
        except QueueClosed as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name="dtrain-test-wait")
    thread.start()
    while not q.stats()["waiting"]:
        threading.Event().wait(0.01)
    q.close()
    thread.join(10)
    assert len(errors) == 1


def test_it_is_bounded_in_bytes(cluster):
    q = open_queue(cluster, SESSION, "bytes", 100, nbytes="100KiB")
    item = np.zeros(40_000, np.uint8)
    q.put(item)
    q.put(item)
    with pytest.raises(DeadlineError, match="102400 bytes"):
        q.put(item, timeout=0)
    assert len(q.get()) == 40_000
    # What is leased takes memory still.
    with pytest.raises(DeadlineError):
        q.put(item, timeout=0)
    q.done()
    q.put(item, timeout=0)
    with pytest.raises(DataError, match="expected at most 102400"):
        q.put(np.zeros(200_000, np.uint8))
    assert q.size() == 2


def test_what_a_thread_held_that_has_ended_is_handed_out_again(cluster):
    q = open_queue(cluster, SESSION, "ended", 4)
    q.put("x")
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(q.get()), name="dtrain-test-ended")
    thread.start()
    thread.join(10)
    assert got == ["x"]
    assert q.get(timeout=10) == "x"
    assert q.stats()["redelivered"] == 1


def test_a_with_block_that_fails_gives_back_and_one_that_ends_acknowledges(cluster):
    q = open_queue(cluster, SESSION, "blocks", 4)
    q.put(1)
    with pytest.raises(ZeroDivisionError), open_queue(cluster, SESSION, "blocks") as other:
        other.get() / 0
    with open_queue(cluster, SESSION, "blocks") as other:
        assert other.get(timeout=10) == 1
    with pytest.raises(DeadlineError):
        q.get(timeout=0)
    stats = q.stats()
    assert (stats["acknowledged"], stats["redelivered"], stats["leased"]) == (1, 1, 0)


def test_give_back_hands_it_to_the_next(cluster):
    q, other = (open_queue(cluster, SESSION, "back", 4) for _ in range(2))
    q.put("x")
    q.put("y")
    assert q.get() == "x"
    q.give_back()
    assert other.get() == "x"
    assert q.get() == "y"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": 5}, "found capacity=5, expected capacity=4"),
        ({"nbytes": 7}, "found nbytes=7"),
        ({"capacity": 0}, "capacity: found 0"),
        ({"capacity": True}, "capacity: found True"),
        ({"capacity": 2**70}, "capacity: found .*, expected a whole number up to"),
        ({"nbytes": "-1"}, "nbytes: found '-1'"),
        ({"timeout": "soon"}, "timeout: found 'soon'"),
        ({"name": ""}, "queue: found the name ''"),
        ({"name": "other"}, "found none in session 'test'; expected a capacity"),
    ],
)
def test_what_cannot_be_is_refused(cluster, arguments, words):
    open_queue(cluster, SESSION, "made", 4)
    with pytest.raises(SpecError, match=words):
        open_queue(cluster, SESSION, **{"name": "made", **arguments})


def test_what_cannot_be_pickled_is_refused_and_the_queue_goes_on(cluster):
    q = open_queue(cluster, SESSION, "pickles", 4)
    with pytest.raises(DataError, match="found generator, expected what can be pickled"):
        q.put(i for i in range(3))
    q.put("x")
    assert q.get() == "x"


class Known:
    """Can be unpickled where this module says so."""

    here = False

    def __reduce__(self):
        return Known.made, ()

    @staticmethod
    def made() -> str:
        if not Known.here:
            raise ModuleNotFoundError("No module named 'theirs'")
        return "made"


def test_what_cannot_be_unpickled_here_is_told_and_goes_to_whoever_can(cluster, monkeypatch):
    with open_queue(cluster, SESSION, "classes", 4) as q:
        q.put(Known())
        words = r"queue 'classes' .*: found an item that cannot be unpickled here .*'theirs'"
        with pytest.raises(DataError, match=words):
            q.get()
        assert (q.stats()["size"], q.stats()["leased"]) == (1, 0)
        monkeypatch.setattr(Known, "here", True)
        assert q.get() == "made"


def test_a_reset_ends_it_for_those_who_wait(cluster):
    q = open_queue(cluster, SESSION, "reset", 4)
    q.put(np.zeros(100_000))
    timer = threading.Timer(
        0.2, cluster.sync, (cluster.scheduler.dtrain_queues_reset,), {"session": SESSION}
    )
    timer.name = "dtrain-test-timer"
    assert q.get() is not None
    timer.start()
    with pytest.raises(QueueLost, match="was reset"):
        q.get(timeout=30)
    timer.join(10)
    again = open_queue(cluster, SESSION, "reset", 4)
    assert again.size() == 0
    assert services_hold(cluster) == 0


def services_hold(client: Client) -> int:
    """Stored items of all workers; of an in-process cluster."""
    from dtrain.runtime.worker import service_at

    found = 0
    for address in client.scheduler_info()["workers"]:
        service = service_at(address)
        assert service is not None
        found += len(service.queues._stored)
    return found


def test_queues_spread_over_the_workers(cluster):
    hosts = [open_queue(cluster, SESSION, f"q{i}", 1).place.host for i in range(4)]
    assert Counter(hosts) == dict.fromkeys(cluster.scheduler_info()["workers"], 2)


def put_large(name: str, n: int) -> str:
    from distributed import get_client, get_worker

    with open_queue(get_client(), SESSION, name, 8) as q:
        q._near = False  # as if the queue were on another machine
        q.put({"n": n, "data": np.full(LARGE // 4, n, np.float32)})
    return get_worker().address


def test_a_large_item_of_a_task_stays_at_its_worker_until_it_is_got(cluster):
    from dtrain.runtime.worker import service_at

    q = open_queue(cluster, SESSION, "tasks", 8)
    for n, worker in enumerate(cluster.scheduler_info()["workers"]):
        where = cluster.submit(put_large, "tasks", n, workers=[worker], pure=False).result()
        stored = service_at(where).queues._stored
        assert any(uid == q.place.uid for uid, _, _ in stored)
    for n in range(2):
        item = q.get(timeout=10)
        assert item["n"] == n
        assert (item["data"] == n).all()
    q.done()
    end = threading.Event()
    for _ in range(500):
        if services_hold(cluster) == 0:
            break
        end.wait(0.01)
    assert services_hold(cluster) == 0


# -- retirement ------------------------------------------------------------------------------


def test_a_queue_moves_away_from_a_worker_that_is_retired(monkeypatch):
    monkeypatch.setattr("dtrain.runtime.queues.moving._AT_ONCE", 3000)
    with within() as client, dtrain.Session(SESSION, client) as s:
        q = s.queue("moves", 8)
        for n in range(8):
            q.put(np.full(100, n))
        assert q.get()[0] == 0
        with ThreadPoolExecutor(2) as pool:
            blocked = pool.submit(q.put, np.full(100, 8))
            until(lambda: q.stats()["waiting"] == 0, 30, "it has no place")
            blocked.result(10)
            blocked = pool.submit(q.put, np.full(100, 9))
            until(lambda: q.stats()["waiting"] == 1, 30, "it has a place")
            gone, before = q.place.host, q.stats()
            client.retire_workers([gone])
            after = q.stats()
            assert after["host"] == q.place.host != gone
            for key in ("size", "leased", "bytes", "put", "got", "made"):
                assert after[key] == before[key], key
            until(lambda: q.stats()["waiting"] == 1, 30, "it does not wait any more")
            # What was leased before the move is done with after it.
            assert [int(q.get()[0]) for _ in range(9)] == list(range(1, 10))
            blocked.result(10)
        q.done()
        stats = q.stats()
        assert (stats["put"], stats["acknowledged"], stats["lost"], stats["bytes"]) == (
            10,
            10,
            0,
            0,
        )
        assert stats["redelivered"] == 0
        until(lambda: services_hold(client) == 0, 30, "items are left")
        assert frozen(client) == 0
        (listed,) = dtrain.sessions.show(SESSION, client)["queues"]
        assert listed["worker"] == q.place.host
        s.reset()


def frozen(client: Client) -> int:
    """Queues that workers still keep for others; of an in-process cluster."""
    from dtrain.runtime.worker import service_at

    services = map(service_at, client.scheduler_info(-1)["workers"])
    return sum(len(service.queues.moves._frozen) for service in services if service is not None)


def test_whoever_waits_for_an_item_goes_on_waiting_where_the_queue_is_then():
    with within() as client, dtrain.Session(SESSION, client) as s:
        q = s.queue("waits", 8)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(q.get, 30)
            until(lambda: q.stats()["waiting"] == 1, 30, "nobody waits")
            client.retire_workers([q.place.host])
            until(lambda: q.stats()["waiting"] == 1, 30, "nobody waits any more")
            q.put("late")
            assert waits.result(10) == "late"
        s.reset()


def test_what_a_thread_held_that_has_ended_meanwhile_is_handed_out_again():
    with within() as client, dtrain.Session(SESSION, client) as s:
        q = s.queue("ends", 8)
        q.put("item")
        got, end = threading.Event(), threading.Event()

        def hold() -> None:
            q.get()
            got.set()
            end.wait(30)

        holder = threading.Thread(target=hold, name="dtrain-test-holder")
        holder.start()
        assert got.wait(10)
        client.retire_workers([q.place.host])
        end.set()
        holder.join(10)
        assert q.get(timeout=20) == "item"
        s.reset()


def test_a_client_that_has_died_before_a_move_holds_nothing_after_it():
    with within() as client, dtrain.Session(SESSION, client) as s:
        q = s.queue("dies", 8)
        q.put("item")
        with Client(client.scheduler.address, set_as_default=False) as other:
            open_queue(other, SESSION, "dies").get()
        client.retire_workers([q.place.host])
        assert q.get(timeout=20) == "item"
        s.reset()


def test_a_third_worker_takes_over_where_the_second_cannot(monkeypatch):
    from dtrain.runtime.queues.moving import Moves

    plain, failed = Moves.take_over, []

    async def failing(self, **message):
        if not failed:
            failed.append(self._service.address)
            raise DeadlineError("it has not answered")
        return await plain(self, **message)

    monkeypatch.setattr(Moves, "take_over", failing)
    with within() as client, dtrain.Session(SESSION, client) as s:
        q = s.queue("third", 8)
        q.put("item")
        client.retire_workers([q.place.host])
        assert q.get() == "item"
        assert failed
        assert q.place.host not in failed
        s.reset()


def test_a_queue_that_no_worker_can_take_over_is_lost_and_that_is_told(monkeypatch):
    from dtrain.runtime.queues.moving import Moves

    async def failing(self, **message):
        raise DeadlineError("it has not answered")

    monkeypatch.setattr(Moves, "take_over", failing)
    with within() as client, dtrain.Session(SESSION, client) as s:
        q = s.queue("none", 8)
        client.retire_workers([q.place.host])
        with pytest.raises(QueueLost, match=r"as it could not move: .*it has not answered"):
            q.put("item")


def test_what_a_retired_worker_stores_for_a_queue_elsewhere_comes_to_it():
    with within() as client, dtrain.Session(SESSION, client) as s:
        q = s.queue("tasks", 8)
        others = [a for a in client.scheduler_info(-1)["workers"] if a != q.place.host]
        for n, worker in enumerate(others):
            client.submit(put_large, "tasks", n, workers=[worker], pure=False).result(30)
        held = q.get()
        assert held["n"] == 0
        client.retire_workers([others[0], q.place.host])
        item = q.get()
        assert (item["n"], (item["data"] == 1).all()) == (1, True)
        client.submit(put_large, "tasks", 2, workers=[others[1]], pure=False).result(30)
        q.give_back()
        assert [q.get()["n"] for _ in range(2)] == [1, 2]
        q.done()
        stats = q.stats()
        assert (stats["put"], stats["acknowledged"], stats["lost"]) == (3, 3, 0)
        s.reset()


@pytest.mark.cluster
def test_workers_are_retired_while_items_flow_and_each_comes_once():
    with processes(3) as client, dtrain.Session(SESSION, client) as s:
        q, out = s.queue("flow", 16), []
        end = threading.Event()

        def collect(i: int) -> int:
            n = 0
            with open_queue(client, SESSION, "flow") as own:
                while not end.is_set():
                    # Small ones, and some that are lent through memory.
                    own.put({"who": i, "n": n, "x": np.full(10 if n % 3 else 50_000, n)})
                    n += 1
            return n

        def train() -> list[tuple[int, int]]:
            found = []
            with open_queue(client, SESSION, "flow") as own:
                for item in own:
                    assert (item["x"] == item["n"]).all()
                    found.append((item["who"], item["n"]))
                    out.append(1)
            return found

        with ThreadPoolExecutor(5) as pool:
            collectors = [pool.submit(collect, i) for i in range(3)]
            trainers = [pool.submit(train) for _ in range(2)]
            for _ in range(2):
                before = len(out)
                until(lambda before=before: len(out) > before + 50, 60, "nothing flows")
                host = q.stats()["host"]
                client.retire_workers([host])
                assert q.stats()["host"] != host
            before = len(out)
            until(lambda: len(out) > before + 50, 60, "nothing flows any more")
            end.set()
            counts = [c.result(30) for c in collectors]
            q.close()
            found = [pair for t in trainers for pair in t.result(30)]
        assert sorted(found) == [(i, n) for i, count in enumerate(counts) for n in range(count)]
        stats = q.stats()
        assert (stats["put"], stats["lost"], stats["redelivered"]) == (sum(counts), 0, 0)
        s.reset()


def test_two_handles_are_two_holders(cluster):
    a, b = (open_queue(cluster, SESSION, "two", 8) for _ in range(2))
    assert isinstance(a, Queue)
    a.put(1)
    a.put(2)
    assert (a.get(), b.get()) == (1, 2)
    a.leave()
    assert open_queue(cluster, SESSION, "two").get() == 1
    assert "dtrain" not in repr(b)
    assert "'two'" in repr(b)


# -- processes, and their deaths -------------------------------------------------------------------


@pytest.fixture
def three() -> Iterator[Client]:
    """Three worker processes, which deaths do not shrink."""
    with processes(3) as client:
        install(client)
        yield client


def run(client: Client, code: str, session: str = SESSION) -> subprocess.Popen[str]:
    """A client process that has a session ``s``; it says what it has to say on its stdout."""
    begin = "import os, sys, numpy as np, dtrain; s = dtrain.Session(*sys.argv[1:])"
    command = [sys.executable, "-c", f"{begin}\n{code}", session, client.scheduler.address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def said(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=60)
    return out.strip()


def kill(client: Client, address: str, how: int = signal.SIGKILL) -> int:
    pid: int = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, how)
    return pid


COLLECT = """
import threading
def collect(n):
    q = s.queue("experience", 8)
    for i in range(50):
        q.put({"who": n, "i": i, "data": np.full(5000, i)})
first = int(os.environ["FIRST"])
threads = [threading.Thread(target=collect, args=(first + k,)) for k in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
"""


@pytest.mark.cluster
def test_collectors_in_processes_and_a_trainer(forked, monkeypatch):
    with dtrain.Session(SESSION, forked) as s:
        q = s.queue("experience", 8)
        collectors = []
        for first in (0, 4):
            monkeypatch.setenv("FIRST", str(first))
            collectors.append(run(forked, COLLECT))
        seen = [(item["who"], item["i"]) for item in (q.get() for _ in range(400))]
        assert [said(process) for process in collectors] == ["", ""]
        assert sorted(seen) == [(who, i) for who in range(8) for i in range(50)]
        q.close()
        with pytest.raises(QueueClosed):
            q.get()
        stats = q.stats()
        assert (stats["put"], stats["got"], stats["lost"]) == (400, 400, 0)
        s.reset()


@pytest.mark.cluster
def test_an_item_outlives_who_has_put_it_and_who_has_got_it(forked):
    with dtrain.Session(SESSION, forked) as s:
        q = s.queue("deaths", 8)
        put = run(forked, "s.queue('deaths').put(np.arange(300_000.)); os._exit(9)")
        assert said(put) == ""
        assert put.returncode == 9
        assert q.size() == 1
        got = run(forked, "x = s.queue('deaths').get(); print(x.sum(), flush=True); os._exit(9)")
        assert float(said(got)) == np.arange(300_000.0).sum()
        np.testing.assert_array_equal(q.get(timeout=30), np.arange(300_000.0))
        q.done()
        stats = q.stats()
        assert (stats["redelivered"], stats["acknowledged"], stats["lost"]) == (1, 1, 0)
        s.reset()


@pytest.mark.cluster
def test_what_a_killed_worker_stored_is_lost_and_counted_and_the_rest_is_not(three):
    with dtrain.Session(SESSION, three) as s:
        q = s.queue("stores", 8)
        others = [a for a in three.scheduler_info()["workers"] if a != q.place.host]
        for n, worker in enumerate(others):
            three.submit(put_large, "stores", n, workers=[worker], pure=False).result(30)
        q.put("small")
        assert q.size() == 3
        kill(three, others[0])
        until(lambda: q.stats()["lost"] == 1, 40, "nothing was lost")
        assert q.get()["n"] == 1
        assert q.get() == "small"
        q.done()
        stats = q.stats()
        assert (stats["put"], stats["acknowledged"], stats["lost"]) == (3, 2, 1)
        assert stats["bytes"] == 0


@pytest.mark.cluster
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_queue_goes_with_its_worker_and_is_made_anew(three, how):
    with dtrain.Session(SESSION, three) as s:
        q = s.queue("host", 8)
        q.put("lost")
        q.get()
        began = time.monotonic()
        killer = threading.Timer(0.3, kill, (three, q.place.host, how))
        killer.name = "dtrain-test-killer"
        killer.start()
        with pytest.raises(QueueLost, match=f"gone with worker {q.place.host}"):
            q.get(timeout=60)
        assert time.monotonic() - began < 30
        killer.join(10)
        with pytest.raises(QueueLost):
            q.put("x")
        again = s.queue("host", 8)
        assert again.stats()["made"] == 2
        again.put("x")
        assert again.get() == "x"


def test_the_scheduler_hears_nothing_of_items(cluster):
    heard: list[str] = []
    scheduler = cluster.cluster.scheduler
    q = open_queue(cluster, SESSION, "quiet", 4)
    before = dict(scheduler.handlers)

    def listening(op: str, handler: Callable[..., object]) -> Callable[..., object]:
        def listen(*args: object, **message: object) -> object:
            heard.append(op)
            return handler(*args, **message)

        return listen

    scheduler.handlers.update(
        {op: listening(op, before[op]) for op in before if "dtrain_queue" in op}
    )
    try:
        for i in range(20):
            q.put(np.full(10_000, i))
            assert q.get()[0] == i
        assert heard == []
        open_queue(cluster, SESSION, "quiet")
        assert heard == ["dtrain_queue"]
    finally:
        scheduler.handlers.update(before)


def test_what_nobody_has_open_ends_with_the_sessions_time_to_live():
    config = {"dtrain.session-ttl": "500ms", "dtrain.session-lease": "1s"}
    with (
        dask.config.set(config),
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as local,
        Client(local, set_as_default=False) as client,
    ):
        with dtrain.Session(SESSION, client) as s:
            queue = s.queue("old", 4)
            queue.put(np.zeros(1000))
            threading.Event().wait(1.5)
            assert queue.size() == 1
        directory = local.scheduler.plugins["dtrain"].directory
        until(lambda: not directory.list_queues(), 30, "it is there still")
        until(lambda: not services_hold(client), 30, "its items are there still")
        with pytest.raises(SpecError, match="found none"):
            open_queue(client, SESSION, "old")
