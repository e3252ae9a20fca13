"""What a session refuses: a clear error, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import cloudpickle
import numpy as np
import pytest
from distributed import Client

import dtrain
from dtrain import ClusterError, DataError, NonFiniteError, Session, SpecError, optim
from dtrain.cluster import current_client
from dtrain.models import MLP

X = np.random.default_rng(0).random((8, 6), np.float32)
Y = np.arange(8) % 3


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def session(threaded: Client, name: str) -> Iterator[Session]:
    """Of which nothing may have changed at the end."""
    with Session(name, client=threaded, timeout=20) as s:
        s.create(MLP([6, 3]), optimizer=optim.sgd(0.5), partitioner=dtrain.FixedShards(2))
        before = s.pull()
        yield s
        after = s.pull()
        assert after.version == before.version
        for n, value in before.params.items():
            assert after.params[n].tobytes() == value.tobytes()
        s.reset()


# -- names -----------------------------------------------------------------------------------


ODD = ["a/b", "..", "../../etc/passwd", "<script>alert(1)</script>", "a\0b", " ", "é" * 200]


@pytest.mark.parametrize("odd", ODD)
def test_names_of_any_kind_are_names(threaded, odd):
    with Session(odd, client=threaded, timeout=20) as s:
        s.create(MLP([6, 3]), optimizer=optim.sgd(0.5))
        q = s.queue(odd, 4)
        q.put(1)
        assert q.get() == 1
        q.done()
        r = s.reader(odd, np.arange(6.0), shuffle=False)
        np.testing.assert_array_equal(r.get(), range(6))
        r.done()
        assert dtrain.sessions.show(odd, threaded)["name"] == odd
        s.reset()


@pytest.mark.parametrize("wrong", ["", "x" * 201, "\ud800", b"x", None, 7, ("a",)])
def test_what_is_no_name_is_refused(session, threaded, wrong):
    opening = {
        "session": lambda: Session(wrong, client=threaded),
        "queue": lambda: session.queue(wrong, 4),
        "reader": lambda: session.reader(wrong, X),
    }
    for kind, open_it in opening.items():
        with pytest.raises(SpecError, match=f"^{kind}: found the name .*, expected "):
            open_it()
    assert dtrain.sessions.show(session.name)["queues"] == []


# -- variables -------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [[], "dense0.bias", 7, [7], ["nothing"]])
def test_names_of_variables(session, names):
    with pytest.raises(SpecError, match=r"^names: found .*, expected "):
        session.pull(names)
    assert list(session.pull(n for n in ["dense0.bias"]).params) == ["dense0.bias"]


@pytest.mark.parametrize("version", ["x", -1, 1.5, True])
@pytest.mark.parametrize("wait", [True, False])
def test_a_version_that_is_none_is_refused_before_any_shard_applies(session, version, wait):
    grads = {n: np.ones_like(p) for n, p in session.pull().params.items()}
    with pytest.raises(SpecError, match=r"^version: found .*, expected a whole number from 0 up"):
        session.push(grads, version=version, wait=wait)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_refused(session, value):
    params = session.pull().params
    params["dense0.bias"][1] = value
    words = r"params: 'dense0\.bias': found values that are not finite"
    with pytest.raises(NonFiniteError, match=words):
        session.assign(params)


def test_initial_values_that_are_not_finite_are_refused(threaded, name):
    class Broken(MLP):
        def init(self, rng):
            return {n: value * np.nan for n, value in super().init(rng).items()}

    with Session(name, client=threaded, timeout=20) as s:
        with pytest.raises(NonFiniteError, match=r"init of the model: 'dense0\.weight': found"):
            s.create(Broken([6, 3]), optimizer=optim.sgd(0.5))
        s.create(MLP([6, 3]), optimizer=optim.sgd(0.5))
        s.reset()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": "x"}, "seed: found 'x', expected a whole number from 0 up"),
        ({"seed": -1}, "seed: found -1, expected a whole number from 0 up"),
        ({"partitioner": 3}, "partitioner: found 3, expected dtrain.FixedShards"),
        ({"placement": "near"}, "placement: found 'near', expected 'greedy' or 'round-robin'"),
        ({"placement": lambda sizes, workers: [9] * len(sizes)}, r"its function returned \[9\]"),
        ({"optimizer": 7}, "optimizer: found 7, expected an optimizer"),
        ({"timeout": -1}, "timeout: found -1, expected a time above zero"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_created_leaves_the_name_free(threaded, name, arguments, words):
    with Session(name, client=threaded, timeout=20) as s:
        with pytest.raises(SpecError, match=words):
            s.create(MLP([6, 3]), **{"optimizer": optim.sgd(0.5), **arguments})
        s.create(MLP([6, 8, 3]), optimizer=optim.adam())
        s.reset()


class Holding(MLP):
    """A model that has a lock."""

    def __init__(self, layers):
        super().__init__(layers)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (None, "model: found NoneType None, expected an object with a method init"),
        (7, "model: found int 7, expected an object with a method init"),
        (MLP, "model: found ABCMeta <class .*MLP'>, expected an object with a method init"),
        (Holding([6, 3]), "model: found a Holding that cannot be pickled .*lock"),
    ],
    ids=["none", "number", "class", "lock"],
)
def test_what_is_no_model_leaves_the_name_free(threaded, name, model, words):
    with Session(name, client=threaded, timeout=20) as s:
        with pytest.raises(SpecError, match=words):
            s.create(model, optimizer=optim.sgd(0.5))
        s.create(MLP([6, 3]), optimizer=optim.sgd(0.5))
        s.reset()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": "x"}, "seed: found 'x', expected a whole number from 0 up"),
        ({"seed": 1.5}, "seed: found 1.5, expected a whole number from 0 up"),
        ({"seed": -1}, "seed: found -1, expected a whole number from 0 up"),
        ({"batch_size": 2**70}, "batch_size: found .*, expected a whole number up to"),
        ({"epochs": 0}, "epochs: found 0, expected a whole number from 1 up"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_reader_of_wrong_numbers(session, arguments, words):
    with pytest.raises(SpecError, match=words):
        session.reader("rows", X, Y, **arguments)
    assert dtrain.sessions.show(session.name)["queues"] == []


# -- other processes -------------------------------------------------------------------------


def test_handles_cannot_be_sent(session):
    handles = {
        "Session": session,
        "queue": session.queue("items", 4),
        "reader": session.reader("rows", X, Y),
    }
    for word, handle in handles.items():
        words = rf"on its way to another process, expected its name alone: .*{word}\("
        with pytest.raises(SpecError, match=words):
            cloudpickle.dumps(handle)
        with pytest.raises(SpecError, match=words):
            pickle.dumps(handle)


def test_a_forked_process_is_refused_what_would_never_be_answered(session, threaded):
    queue = session.queue("items", 4)
    calls = (
        session.pull,
        lambda: queue.put(1),
        queue.stats,
        lambda: Session("another", client=threaded),
        lambda: dtrain.jobs(threaded),
    )
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        for call in calls:
            try:
                call()
            except SpecError as error:
                os.write(write, f"{error}\n".encode())
        os._exit(0)
    os.close(write)
    with open(read) as told:
        lines = told.read().splitlines()
    assert os.waitpid(pid, 0)[1] == 0
    assert len(lines) == len(calls)
    for line in lines:
        assert "found a client of the process that this one was forked from" in line
    queue.put(1)
    assert queue.get() == 1


def test_a_client_that_is_closed_is_told_and_what_it_had_can_be_closed(session, threaded):
    own = Client(threaded.scheduler.address)
    s = Session(session.name, client=own)
    queue = s.queue("items", 4)
    s.pull()
    own.close()
    for call in (s.pull, s.variables, queue.get, queue.stats, queue.close, s.reset):
        with pytest.raises(ClusterError, match="found its client closed, expected a running one"):
            call()
    s.close()
    s.close()
    queue.leave()


def test_pushes_under_way_when_a_client_is_closed_are_told(session, threaded):
    own = Client(threaded.scheduler.address)
    s = Session(session.name, client=own)
    grads = {n: np.zeros_like(p) for n, p in s.pull().params.items()}
    s._pushes.append((Future(), lambda: 0))  # one that cannot end any more
    own.close()
    with pytest.raises(ClusterError, match="of which nothing is known: 1"):
        s.close()
    s.close()
    with pytest.raises(ClusterError, match="found its client closed"):
        s.push(grads)


@pytest.mark.parametrize("path", [7, None, b"there", ""])
def test_a_path_that_is_none(session, path):
    for call in (session.checkpoint, session.restore):
        with pytest.raises(SpecError, match=r"^path: found .*, expected a folder or a URL"):
            call(path)


# -- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found", [None, 7, np.zeros((2, 2)), (b for b in [(X, Y)]), [], {}, {"x": X}, "xy"]
)
def test_what_is_no_list_of_batches(session, found):
    with pytest.raises(SpecError, match=r"(?s)^batches: found .*, expected a list of one for each"):
        session.step(found)
    with pytest.raises(SpecError, match=r"(?s)^parts: found .*, expected a list of one for each"):
        session.train_ops(found)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (X, r"\[1\]: found ndarray .*, expected \(x, y\)"),
        ((X,), r"\[1\]: found tuple .*, expected \(x, y\)"),
        ({}, r"\[1\]: found dict .*, expected \(x, y\)"),
        ((X, Y[:3]), r"\[1\]: found arrays of \[8, 3\] rows, expected as many in each"),
        ((X, Y, np.ones(3)), r"\[1\]: found arrays of \[8, 8, 3\] rows"),
        ((1.0, 2.0), r"\[1\]: x: found 1.0, expected an array whose first axis is rows"),
        ((None, Y), r"\[1\]: x: found None, expected an array"),
        (([[1], [1, 2]], Y[:2]), r"\[1\]: x: found list, expected an array"),
        ({"x": X, "y": 3}, r"\[1\]\['y'\]: found 3, expected an array"),
    ],
)
def test_a_batch_that_cannot_be(session, batch, words):
    for call in (session.step, session.train_ops):
        with pytest.raises((SpecError, DataError), match=words):
            call([(X, Y), batch])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X[:, :3], Y), "found 3 features, expected 6"),
        ((X[:0], Y[:0]), "expected at least one row"),
        ((X, Y + 7), "found class indices from 7 to 9, expected 0 to 2"),
        ((np.array(["a"] * 8), Y), "found 1 features, expected 6"),
        ((X * np.float32("nan"), Y), "replica 1: its loss or gradient is not finite"),
    ],
)
def test_a_batch_that_the_model_cannot_have(session, batch, words):
    with pytest.raises((DataError, NonFiniteError), match=words):
        session.step([(X, Y), batch])
    (op,) = session.train_ops([batch])
    with pytest.raises((DataError, NonFiniteError), match=words.replace("replica 1", "replica 0")):
        op()


def test_parts_that_cannot_be_cut_into_rows(session, threaded):
    x, few = threaded.scatter([X, Y[:3]])
    for part, rows in (((x, few), r"\[8, 3\]"), ({"x": X, "y": few}, r"\[8, 3\]")):
        (op,) = session.train_ops([part], batch_size=4)
        with pytest.raises(DataError, match=rf"replica 0: batch_size: found arrays of {rows} rows"):
            op()
    (op,) = session.train_ops([(x, threaded.submit(int, 7))], batch_size=4)
    with pytest.raises(DataError, match="batch_size: found a part without rows, expected arrays"):
        op()
    assert session.pull().version == 0
    with pytest.raises(DataError, match=r"parts\[0\]: found no rows"):
        session.train_ops([(X[:0], Y[:0])], batch_size=4)
    with pytest.raises(DataError, match=r"parts\[0\]: found arrays of \[8, 3\] rows"):
        session.train_ops([{"x": X, "y": Y[:3]}], batch_size=4)
    for size in (0, 2.5, True, "x"):
        with pytest.raises(SpecError, match="batch_size: found"):
            session.train_ops([(X, Y)], batch_size=size)


# -- where it is called ----------------------------------------------------------------------


def test_a_closed_session_refuses_everything(threaded, name):
    s = Session(name, client=threaded, timeout=20)
    s.create(MLP([6, 3]), optimizer=optim.sgd(0.5))
    (op,) = s.train_ops([(X, Y)])
    params, queue = s.pull().params, s.queue("q", 4)
    queue.put("kept")
    s.close()
    for call in (
        s.pull,
        s.variables,
        s.reset,
        op,
        lambda: s.push(params),
        lambda: s.assign(params),
        lambda: s.step([(X, Y)]),
        lambda: s.train_ops([(X, Y)]),
        lambda: s.queue("q"),
        lambda: s.reader("r", X),
        lambda: s.checkpoint("there"),
        lambda: s.restore("there"),
        lambda: s.create(MLP([6, 3]), optimizer=optim.sgd(0.5)),
    ):
        with pytest.raises(SpecError, match=f"session {name}: found it closed, expected an open"):
            call()
    with pytest.raises(dtrain.FencedError, match="this handle was left"):
        queue.get()
    with Session(name, client=threaded) as again:
        assert again.pull().version == 0
        assert again.queue("q").get() == "kept"
        again.reset()


def test_an_asynchronous_client_is_refused(threaded):
    async def look() -> None:
        async with Client(threaded.scheduler.address, asynchronous=True) as client:
            for found in (client, None):
                with pytest.raises(SpecError, match="found an asynchronous Client, expected a syn"):
                    Session("async", client=found)

    asyncio.run(look())


def test_within_the_clients_own_event_loop_it_is_refused_and_goes_on_elsewhere(session, threaded):
    queue = session.queue("q", 4)
    params = session.pull().params
    calls = (
        session.pull,
        session.variables,
        session.reset,
        session.close,
        lambda: session.assign(params),
        lambda: session.step([(X, Y)]),
        lambda: queue.put(1),
        lambda: queue.get(),
        lambda: session.queue("other", 4),
    )

    async def inside() -> list[str]:
        told = []
        for call in calls:
            with pytest.raises(SpecError) as caught:
                call()
            told.append(str(caught.value))
        return told

    loop = threaded.loop.asyncio_loop
    told = asyncio.run_coroutine_threadsafe(inside(), loop).result(20)
    assert all("in the event loop of its client, expected a thread" in words for words in told)
    queue.put(1, timeout=20)
    assert queue.get(timeout=20) == 1

    async def task() -> None:
        Session("within")

    with pytest.raises(SpecError, match="found an asynchronous Client"):
        threaded.submit(task, pure=False).result(20)


def test_a_client_that_another_task_is_just_making_is_waited_for(threaded, monkeypatch):
    def version(name: str) -> int:
        with Session(name, timeout=20) as s:
            return s.pull().version

    class Made:
        """As the default client is while it starts, in the thread of another task."""

        def __init__(self, client: Client) -> None:
            self.__dict__.update(client=client, looks=0)

        def __getattr__(self, key: str) -> object:
            return getattr(self.client, key)

        @property
        def status(self) -> str:
            self.__dict__["looks"] += 1
            return "newly-created" if self.looks < 3 else self.client.status

    made = Made(threaded)
    monkeypatch.setattr("distributed.client.default_client", lambda: made)
    assert current_client() is made
    assert made.looks == 3
    monkeypatch.undo()
    with Session("started", client=threaded) as s:
        s.create(MLP([6, 3]), optimizer=optim.sgd(0.5))
        tasks = [threaded.submit(version, "started", pure=False) for _ in range(4)]
        assert threaded.gather(tasks) == [0] * 4
        s.reset()


def test_in_a_notebook_whose_loop_is_another_one_it_works(session):
    """And an address alone will do."""

    async def cell() -> tuple[int, int]:
        here = session.pull().version
        with Session(session.name, client=session._to.control.address) as other:
            return here, other.pull().version

    assert asyncio.run(cell()) == (0, 0)
