"""Readers that processes share: each batch once per epoch, in an order that the seed decides."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import dtrain
from dtrain.errors import DataError, DeadlineError, QueueClosed, QueueLost, SpecError
from tests.runtime.conftest import processes, within
from tests.runtime.test_queues import kill, run, said

ROWS = 101
X = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
Y = np.arange(ROWS) * 10


@pytest.fixture
def session(threaded: Client) -> Iterator[dtrain.Session]:
    with dtrain.Session("reading", threaded) as s:
        s.queue("so that there is something to reset", 1)
        yield s
        s.reset()


@pytest.mark.parametrize("lying", ["numpy", "dask"])
@pytest.mark.parametrize("alone", [False, True])
def test_each_row_comes_once_per_epoch_in_an_order_that_the_seed_decides(session, lying, alone):
    x, y = (X, Y) if lying == "numpy" else (da.from_array(X, chunks=(40, 3)), da.from_array(Y, 25))
    options = {"batch_size": 8, "epochs": 2, "seed": 5}
    rows = []
    for name in ("a", "b"):
        with session.reader(name, x, None if alone else y, **options) as r:
            assert r.batches == 26
            batches = list(r)
        assert len(batches) == 26
        taken = [b if alone else b[0] for b in batches]
        assert [len(b) for b in taken] == ([8] * 12 + [5]) * 2
        if not alone:
            for bx, by in batches:
                np.testing.assert_array_equal(bx[:, 0] / 3 * 10, by)
        rows.append(np.concatenate(taken)[:, 0] / 3)
    np.testing.assert_array_equal(rows[0], rows[1])
    first, second = rows[0][:ROWS], rows[0][ROWS:]
    for epoch in (first, second):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(ROWS))
    assert (first != second).any()
    assert (first != np.arange(ROWS)).any()


def test_without_shuffling_rows_come_as_they_lie(session):
    got = np.concatenate(list(session.reader("plain", X, batch_size=10, shuffle=False)))
    np.testing.assert_array_equal(got, X)


def test_whoever_asks_next_gets_the_next_batch(session, threaded):
    session.reader("shared", X, Y, batch_size=2, epochs=3)
    seen: list[int] = []
    counts: list[int] = []

    def read() -> None:
        with dtrain.Session("reading", threaded) as other:
            n = 0
            for _, by in other.reader("shared"):
                seen.extend((by // 10).tolist())
                n += 1
            counts.append(n)

    threads = [threading.Thread(target=read, name=f"dtrain-test-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == sorted(list(range(ROWS)) * 3)
    assert sum(counts) == 3 * 51
    assert all(counts)
    stats = session.reader("shared").stats()
    assert (stats["acknowledged"], stats["left"], stats["redelivered"]) == (153, 0, 0)


def test_what_a_reader_held_that_has_died_is_handed_out_again(session, threaded):
    r = session.reader("died", X, batch_size=50, shuffle=False)
    with Client(threaded.scheduler.address, set_as_default=False) as other:
        lost = dtrain.Session("reading", other).reader("died").get()
    np.testing.assert_array_equal(lost, X[:50])
    got = list(r)
    assert sorted(np.concatenate(got)[:, 0].tolist()) == X[:, 0].tolist()
    assert r.stats()["redelivered"] == 1


def test_nobody_is_told_that_it_is_over_while_a_batch_may_come_back(session, threaded):
    r = session.reader("over", X, batch_size=200)
    with dtrain.Session("reading", threaded) as other:
        assert len(other.reader("over").get()) == ROWS
        with pytest.raises(DeadlineError):
            r.get(timeout=0.1)
    # It was left, not given up: closing a session says that what it has is done with.
    with pytest.raises(QueueClosed):
        r.get(timeout=10)


def read_all(name: str) -> list[int]:
    with dtrain.Session("reading") as s:
        return [int(v) for _, by in s.reader(name) for v in by // 10]


@pytest.mark.parametrize("lying", ["numpy", "dask"])
def test_tasks_read_where_the_rows_lie(session, threaded, lying):
    x, y = (X, Y) if lying == "numpy" else (da.from_array(X, chunks=(40, 3)), da.from_array(Y, 25))
    session.reader("tasks", x, y, batch_size=3)
    futures = [
        threaded.submit(read_all, "tasks", workers=[w], pure=False)
        for w in threaded.scheduler_info()["workers"]
    ]
    found = threaded.gather(futures)
    assert sorted(row for some in found for row in some) == list(range(ROWS))


@pytest.mark.parametrize("lying", ["numpy", "dask"])
def test_a_reader_moves_away_from_a_worker_that_is_retired(lying):
    x = X if lying == "numpy" else da.from_array(X, chunks=(40, 3))
    with within() as client, dtrain.Session("reading", client) as s:
        r = s.reader("moves", x, batch_size=10, epochs=2, shuffle=False)
        got = [r.get() for _ in range(3)]
        gone = r.place.host
        client.retire_workers([gone])
        with dtrain.Session("reading", client) as own, own.reader("moves") as other:
            assert other.place.host != gone
            got.append(other.get())
        got += list(r)
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate([X, X]))
        stats = r.stats()
        assert (stats["acknowledged"], stats["redelivered"], stats["left"]) == (22, 0, 0)
        assert (stats["host"], stats["made"]) == (r.place.host, 1)
        s.reset()


def test_chunks_stay_as_long_as_the_reader_does(session, threaded):
    with Client(threaded.scheduler.address, set_as_default=False) as other:
        x = da.from_array(X, chunks=(40, 3))
        dtrain.Session("reading", other).reader("kept", x, batch_size=40, shuffle=False)
        del x
    got = np.concatenate(list(session.reader("kept")))
    np.testing.assert_array_equal(got, X)
    session.reset()
    session.queue("something", 1)
    for _ in range(500):
        if not threaded.sync(threaded.scheduler.who_has):
            break
        threading.Event().wait(0.01)
    assert not threaded.sync(threaded.scheduler.who_has)


def test_a_reset_removes_the_file_and_tells_who_waits(session):
    r = session.reader("file", X, batch_size=100)
    name = r.batching.file
    assert name is not None
    paths = [f"{root}/dtrain-{os.getuid()}/{name}" for root in ("/dev/shm", "/tmp")]
    session.reset()
    assert not any(os.path.exists(path) for path in paths)
    with pytest.raises(QueueLost, match="reset"):
        r.get()
    assert len(session.reader("file", X, batch_size=100).get()) == 100


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"X": None, "name": "none"}, SpecError, "found none in session 'reading'; expected X"),
        ({"batch_size": 9}, SpecError, "found batch_size=9, expected batch_size=8"),
        ({"X": X[:50]}, SpecError, r"found shapes=\(\(50, 3\),\)"),
        ({"y": Y}, SpecError, "found shapes="),
        ({"y": Y[:5]}, DataError, "X has 101 rows and y has 5"),
        ({"X": "words"}, DataError, "expected an array of rows"),
        ({"epochs": 0}, SpecError, "epochs: found 0"),
        ({"batch_size": 1.5}, SpecError, "batch_size: found 1.5"),
        ({"shuffle": 1}, SpecError, "shuffle: found 1"),
        ({"X": X[:0], "name": "empty"}, DataError, "0 rows"),
    ],
)
def test_what_cannot_be_is_refused(session, arguments, error, words):
    session.reader("made", X, batch_size=8)
    with pytest.raises(error, match=words):
        session.reader(**{"name": "made", "X": X, "batch_size": 8, **arguments})


@pytest.mark.cluster
def test_readers_in_processes_of_which_one_is_killed_and_chunks_are_lost():
    with processes(3) as client, dtrain.Session("reading", client) as s:
        x = da.from_array(X, chunks=(20, 3))
        r = s.reader("kills", x, batch_size=4, epochs=2)
        code = "r = s.reader('kills'); a = r.get(); a = r.get(); print(a[0, 0]); sys.stdout.flush()"
        reader = run(client, f"{code}; os._exit(9)", "reading")
        assert said(reader)
        other = next(a for a in client.scheduler_info()["workers"] if a != r.place.host)
        kill(client, other)
        rows = np.concatenate(list(r))[:, 0] / 3
        # It had said that it was done with the first one.
        assert len(rows) == 2 * ROWS - 4
        stats = r.stats()
        assert (stats["acknowledged"], stats["redelivered"], stats["left"]) == (52, 1, 0)
