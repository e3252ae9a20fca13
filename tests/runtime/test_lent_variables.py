"""A session's variables through memory that is lent on one machine: the same as sent."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dtrain
from dtrain import Session, optim
from dtrain.runtime.queues.lending import Lent
from dtrain.runtime.sessions import conversation
from dtrain.sessions import session as of_sessions
from tests.conftest import until
from tests.runtime.conftest import cut_a_push, processes

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create here")


class Odd:
    """Variables of lengths that leave padding between them; a gradient is what is pushed."""

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        shapes = {"a": (1001, 37), "b": (3,), "c": (501, 129), "d": (1,)}
        return {n: rng.standard_normal(shape).astype("f4") for n, shape in shapes.items()}

    def loss_and_grads(self, params: Any, batch: Any, *, out: Any = None) -> Any:
        raise NotImplementedError


@contextmanager
def by_sockets(workers: int) -> Iterator[Client]:
    """Workers in this process that are reached by sockets, as if they were in others."""
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            host="127.0.0.1",
            dashboard_address=None,
            # Else it would want port 8787 all the same, and warn where that is taken.
            scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def wired() -> Iterator[Client]:
    with by_sockets(2) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture(params=[1, 2])
def session(wired: Client, name: str, request: pytest.FixtureRequest) -> Iterator[Session]:
    with Session(name, client=wired, timeout=30) as s:
        clipped = optim.chain(optim.clip_by_global_norm(5.0), optim.adam(0.01))
        s.create(Odd(), optimizer=clipped, partitioner=dtrain.FixedShards(request.param))
        try:
            yield s
        finally:
            s.reset()


def like(params: dict[str, np.ndarray], value: float) -> dict[str, np.ndarray]:
    return {n: np.full_like(p, value) for n, p in params.items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for n, value in expected.items():
        np.testing.assert_array_equal(found[n], value)


def tie_of(session: Session) -> conversation.Tie:
    session.pull()
    tie = session._to._tie
    assert tie is not None
    return tie


def put_afar(session: Session) -> None:
    """As if all workers were on other machines."""
    tie = tie_of(session)
    tie.proven.clear()
    tie.far.update(tie.hosts)


def seen(session: Session) -> list[dict[str, np.ndarray]]:
    """What it has after each of some assigns and pushes."""
    rng = np.random.default_rng(1)
    start = Odd().init(rng)
    found = []
    session.assign(start)
    for step in range(6):
        session.push({n: rng.standard_normal(p.shape).astype("f4") for n, p in start.items()})
        found.append(session.pull().params)
        session.push(Odd().init(rng), wait=False)
        session._finish()
        if step == 3:
            session.assign(found[0])
        found.append(session.pull().params)
    return found


def test_lent_and_sent_are_the_same_bits(session, wired, name):
    by_lending = seen(session)
    assert tie_of(session).proven == set(tie_of(session).hosts)
    with Session(f"{name} afar", client=wired) as afar:
        clipped = optim.chain(optim.clip_by_global_norm(5.0), optim.adam(0.01))
        afar.create(Odd(), optimizer=clipped, partitioner=dtrain.FixedShards(2))
        put_afar(afar)
        by_sending = seen(afar)
        assert not tie_of(afar).proven
        afar.reset()
    for found, expected in zip(by_lending, by_sending, strict=True):
        same(found, expected)


def test_what_was_pulled_is_ones_own_and_stays_as_it_was(session):
    first = session.pull().params
    second = session.pull().params
    for p in first.values():
        p[...] = 99
    kept = {n: p.copy() for n, p in second.items()}
    for value in range(8):
        session.assign(like(second, value))
        same(session.pull().params, like(second, value))
    same(second, kept)
    assert all((p == 99).all() for p in first.values())


def test_what_is_assigned_or_pushed_may_be_written_to_at_once(session):
    params = like(session.pull().params, 1.0)
    session.assign(params)
    params["a"][...] = 7
    assert (session.pull().params["a"] == 1).all()


def test_workers_that_cannot_open_it_are_sent_it(session, monkeypatch):
    shapes = session.pull().params
    monkeypatch.setattr(Lent, "borrowed", lambda told: None)
    tie = tie_of(session)
    tie.proven.clear()
    tie.far.clear()
    version = session.assign(like(shapes, 3.0))
    assert tie.far == set(tie.hosts)
    assert session.pull().version == version == 1
    same(session.pull().params, like(shapes, 3.0))
    tie.far.clear()
    assert session.push(like(shapes, 1.0)) == 2
    assert tie.far == set(tie.hosts)
    tie.far.clear()
    after = session.pull()
    assert tie.far == set(tie.hosts)
    assert after.version == 2
    assert all((p < 3).all() for p in after.params.values())


def test_a_pull_that_updates_have_overtaken_is_sent(session, monkeypatch):
    shapes = session.pull().params
    session.assign(like(shapes, 2.0))
    plain, values, how = of_sessions.gather, itertools.count(3.0), []

    def late(about, pulled, *args):
        """Read once the memory has been lent again several times: whoever is lent it is late."""
        with monkeypatch.context() as within:
            within.setattr(of_sessions, "gather", plain)
            for _ in range(9):
                session.assign(like(shapes, next(values)))
                session.pull()
        came = {key for reply in pulled.shards.values() for key in reply} & {"lent", "params"}
        try:
            found = plain(about, pulled, *args)
        except OSError:
            how.append((came, "overtaken"))
            raise
        how.append((came, "read"))
        return found

    with monkeypatch.context() as slow:
        slow.setattr(of_sessions, "gather", late)
        found = session.pull().params
    assert how == [({"lent"}, "overtaken"), ({"params"}, "read")]
    # As of when it was asked again: what has come since is not in it.
    same(found, like(shapes, 11.0))
    same(session.pull().params, like(shapes, 20.0))
    assert not tie_of(session).far


def test_a_pull_under_a_storm_never_mixes_two(session, wired, name):
    shapes = session.pull().params
    session.assign(like(shapes, 0.0))
    stop = threading.Event()

    def storm(number: int) -> None:
        with Session(name, client=wired) as own:
            value = float(number)
            while not stop.is_set():
                own.assign(like(shapes, value))
                value += 2

    writers = [threading.Thread(target=storm, args=(n,)) for n in (1, 2)]
    for writer in writers:
        writer.start()
    try:
        found = set()
        for _ in range(60):
            values = {float(x) for p in session.pull().params.values() for x in np.unique(p)}
            assert len(values) == 1, f"a mixture of {sorted(values)}"
            found |= values
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert len(found) > 10


def test_no_descriptor_is_left(wired, name):
    def memories() -> int:
        gc.collect()
        names = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue  # that of the listing itself
        return sum("memfd:dtrain" in each for each in names)

    before = memories()
    with Session(name, client=wired) as s:
        s.create(Odd(), optimizer=optim.sgd(0.1))
        for _ in range(10):
            s.assign(s.pull().params)
            s.push(s.pull().params)
        assert before < memories() <= before + 20
        s.reset()
    del s
    assert memories() == before


# -- where shards move, or die ---------------------------------------------------------------


@contextmanager
def opened(client: Client, name: str, shards: int = 3) -> Iterator[Session]:
    """A push of -2 adds 1."""
    with Session(name, client=client, timeout=30) as s:
        s.create(Odd(), optimizer=optim.sgd(0.5), partitioner=dtrain.FixedShards(shards))
        yield s


@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "not"])
def test_a_push_that_was_lent_and_cut_by_a_retirement_counts_once(name, monkeypatch, wait):
    with by_sockets(3) as client, opened(client, name) as s:
        shapes = s.pull().params
        s.assign(like(shapes, 0.0))
        cut = cut_a_push(s, client, monkeypatch)
        s.push(like(shapes, -2.0), wait=wait)
        s._finish()
        assert ["lent" in message for message in cut] == [True]
        same(s.pull().params, like(shapes, 1.0))
        shards = dtrain.sessions.show(name, client)["shards"]
        assert [shards[k]["duplicates"] for k in range(3)] == [1, 1, 1]


def test_a_pull_whose_shards_move_before_it_is_read(name, monkeypatch):
    """What they have lent goes with them; the new ones lend again."""
    with by_sockets(3) as client, opened(client, name) as s:
        shapes = s.pull().params
        s.assign(like(shapes, 1.0))
        victim, plain, told = s.variables()[0]["worker"], of_sessions.gather, []

        def late(about, pulled, *args):
            if not told:
                told.extend(reply["lent"] for reply in pulled.shards.values())
                client.retire_workers([victim])
                with Session(name, client=client) as other:
                    other.push(like(shapes, -2.0))
                gc.collect()
                assert not any(map(Lent.borrowed, told))
            return plain(about, pulled, *args)

        monkeypatch.setattr(of_sessions, "gather", late)
        same(s.pull().params, like(shapes, 2.0))
        assert len(told) == 3
        tie = tie_of(s)
        assert victim not in tie.hosts
        assert (tie.far, tie.proven) == (set(), set(tie.hosts))


def test_nothing_is_mixed_or_lost_while_workers_are_retired(name):
    with by_sockets(4) as client, opened(client, name) as s, opened(client, f"{name} +") as more:
        shapes = s.pull().params
        s.assign(like(shapes, 0.0))
        more.assign(like(shapes, 0.0))
        stop, counts, errors = threading.Event(), [0, 0, 0], []

        def assign(value: int) -> None:
            s.assign(like(shapes, float(value)))

        def pull(_: int) -> None:
            values = {float(x) for p in s.pull().params.values() for x in np.unique(p)}
            assert len(values) == 1, f"a mixture of {sorted(values)}"

        def push(_: int) -> None:
            more.push(like(shapes, -2.0))

        def loop(i: int, what: Any) -> None:
            try:
                while not stop.is_set():
                    what(counts[i] + 1)
                    counts[i] += 1
            except BaseException as error:
                errors.append(error)
                raise

        def go_on() -> None:
            before = counts.copy()
            until(lambda: errors or all(map(int.__gt__, counts, before)), 60, "nothing is done")

        calls = (assign, pull, push)
        threads = [threading.Thread(target=loop, args=each) for each in enumerate(calls)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                go_on()
                client.retire_workers([s.variables()[0]["worker"]])
            go_on()
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not errors
        same(s.pull().params, like(shapes, float(counts[0])))
        same(more.pull().params, like(shapes, float(counts[2])))
        assert not tie_of(s).far
        assert tie_of(s).proven == set(tie_of(s).hosts)


@pytest.mark.cluster
def test_a_pull_whose_worker_dies_before_it_is_read(name, tmp_path, monkeypatch):
    with processes(3) as client, opened(client, name) as s:
        shapes = s.pull().params
        s.assign(like(shapes, 1.0))
        s.checkpoint(tmp_path)
        s.push(like(shapes, -2.0))
        plain, told = of_sessions.gather, []

        def late(about, pulled, *args):
            if not told:
                told.extend(reply["lent"] for reply in pulled.shards.values())
                pid = told[0]["pid"]
                os.kill(pid, signal.SIGKILL)
                until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"), 40, "it is still there")
            return plain(about, pulled, *args)

        monkeypatch.setattr(of_sessions, "gather", late)
        same(s.pull().params, like(shapes, 1.0))
        assert len(told) == 3
        s.push(like(shapes, -2.0))
        same(s.pull().params, like(shapes, 2.0))
