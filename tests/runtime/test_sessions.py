"""Sessions on a cluster: variables by name, for any number of clients."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from distributed import Client, get_client

import dtrain
from dtrain import (
    CheckpointError,
    DataError,
    DeadlineError,
    FencedError,
    NonFiniteError,
    Session,
    SessionLost,
    SpecError,
    StorageError,
    optim,
)
from dtrain.models import MLP
from dtrain.sessions.creation import LEAST_SHARD
from tests.conftest import until
from tests.runtime.conftest import cut_a_push, processes, within
from tests.runtime.shared import Traced

LAYERS = [6, 16, 3]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


@contextmanager
def opened(client: Client, name: str, optimizer=None, shards: int = 3) -> Iterator[Session]:
    with Session(name, client=client, timeout=30) as s:
        partitioner = dtrain.FixedShards(shards)
        s.create(MLP(LAYERS), optimizer=optimizer or optim.sgd(0.5), partitioner=partitioner)
        try:
            yield s
        finally:
            s.reset()


@pytest.fixture
def session(threaded: Client, name: str) -> Iterator[Session]:
    with opened(threaded, name) as s:
        yield s


def like(params: dict[str, np.ndarray], value: float) -> dict[str, np.ndarray]:
    return {n: np.full_like(p, value) for n, p in params.items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for n, value in expected.items():
        np.testing.assert_array_equal(found[n], value)


# -- one session -----------------------------------------------------------------------------


def test_the_initial_values_are_the_models_own(session):
    snap = session.pull()
    assert snap.version == 0
    same(snap.params, MLP(LAYERS).init(np.random.default_rng(0)))


def test_another_session_of_the_name_sees_what_one_writes(session, threaded, name):
    before = session.pull().params
    with Session(name, client=threaded) as other:
        assert other.push(like(before, 1.0)) == 1
        after = session.pull()
    assert after.version == 1
    same(after.params, {n: value - np.float32(0.5) for n, value in before.items()})


def test_an_assign_is_seen_and_its_version_too(session):
    version = session.assign(like(session.pull().params, 7.0))
    snap = session.pull()
    assert snap.version == version == 1
    assert all((p == 7).all() for p in snap.params.values())


def test_what_was_pulled_is_ones_own(session):
    first = session.pull().params
    for p in first.values():
        p[...] = 99
    same(session.pull().params, MLP(LAYERS).init(np.random.default_rng(0)))


def test_some_variables_alone(session):
    every = session.pull().params
    names = list(every)[1:3]
    same(session.pull(names=names).params, {n: every[n] for n in names})
    with pytest.raises(SpecError, match="'nothing', expected some of"):
        session.pull(names=["nothing"])
    with pytest.raises(SpecError, match="expected a list of names"):
        session.pull(names="W0")


def test_the_variables_tile_the_model_and_say_where_they_are(session, threaded):
    params, found = session.pull().params, session.variables()
    workers = set(threaded.scheduler_info(-1)["workers"])
    for n, value in params.items():
        own = [entry for entry in found if entry["name"] == n]
        assert [e["rows"][0] for e in own] == [0, *(e["rows"][1] for e in own[:-1])]
        assert own[-1]["rows"][1] == value.shape[0]
        assert sum(e["bytes"] for e in own) == value.nbytes
        assert {e["shape"] for e in own} == {value.shape}
        assert {e["dtype"] for e in own} == {"float32"}
    assert {e["shard"] for e in found} == {0, 1, 2}
    assert {e["worker"] for e in found} == workers


class Table:
    """So many parameters, and no gradient."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"table": np.ones((self.nbytes >> 10, 256), np.float32)}

    def loss_and_grads(self, params, batch, *, out=None):
        raise NotImplementedError


@pytest.mark.parametrize(("mib", "shards"), [(1, 1), (4, 1), (7, 1), (8, 2), (40, 2)])
def test_by_default_no_shard_is_small(threaded, name, mib, shards):
    """And there are no more than workers."""
    with Session(name, client=threaded) as s:
        s.create(Table(mib << 20), optimizer=optim.sgd(0.5))
        found = s.variables()
        assert len(found) == len({e["worker"] for e in found}) == shards
        assert min(e["bytes"] for e in found) >= min(mib << 20, LEAST_SHARD)
        s.reset()


def test_small_sessions_share_the_workers_also_once_one_is_retired(name):
    """They have one shard each."""
    with within(4) as client, ExitStack() as stack:
        made = [stack.enter_context(Session(f"{name} {n}", client=client)) for n in range(12)]
        gone, *others = client.scheduler_info(-1)["workers"]
        for s in made:
            s.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
        before = Counter(s.variables()[0]["worker"] for s in made)
        client.retire_workers([gone])
        after = Counter(s.variables()[0]["worker"] for s in made)
    assert before == dict.fromkeys([gone, *others], 3)
    assert after == dict.fromkeys(others, 4)


OPTIMIZERS = [
    optim.adam(0.01),
    optim.sgd(0.1, momentum=0.9),
    optim.chain(optim.clip_by_global_norm(0.1), optim.clip(0.01), optim.adam(0.01)),
    optim.lamb(0.01),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adam", "momentum", "clipped", "lamb"])
def test_pushes_on_three_shards_are_those_on_one(threaded, name, optimizer):
    rng = np.random.default_rng(1)
    with opened(threaded, name, optimizer, 3) as s, opened(threaded, "one", optimizer, 1) as one:
        for _ in range(5):
            shapes = one.pull().params
            grads = {n: rng.standard_normal(p.shape).astype(np.float32) for n, p in shapes.items()}
            kept = {n: g.copy() for n, g in grads.items()}
            s.push(grads)
            one.push(grads)
            same(grads, kept)
        found = s.pull()
        assert found.version == 5
        same(found.params, one.pull().params)
        start = MLP(LAYERS).init(np.random.default_rng(0))
        assert all((found.params[n] != value).any() for n, value in start.items())


# -- what is refused -------------------------------------------------------------------------


def bad(params):
    """Gradients that cannot be, and what is said of them."""
    good, first = like(params, 1.0), next(iter(params))
    last = list(params)[-1]
    yield {n: g for n, g in good.items() if n != last}, f"'{last}' is missing"
    yield {**good, "more": good[last]}, "'more' is unknown"
    yield {**good, last: np.ones(99, np.float32)}, f"'{last}': found float32 of shape"
    yield {**good, first: good[first].astype(np.float64)}, f"'{first}': found float64"
    yield [1, 2], "expected a dict of arrays"


def test_bad_gradients_are_refused_before_any_shard_applies(session):
    before = session.pull()
    for grads, words in bad(before.params):
        for wait in (True, False):
            with pytest.raises(DataError, match=words):
                session.push(grads, wait=wait)
    wrong = {**like(before.params, 1.0), "dense1.bias": np.full(3, np.nan, np.float32)}
    with pytest.raises(NonFiniteError, match=r"'dense1\.bias': found values that are not finite"):
        session.push(wrong)
    after = session.pull()
    assert after.version == 0
    same(after.params, before.params)


def test_bad_parameters_are_refused_before_any_shard_has_them(session):
    before = session.pull()
    for params, words in bad(before.params):
        with pytest.raises(DataError, match=words):
            session.assign(params)
    assert session.pull().version == 0


def test_another_model_optimizer_or_seed_is_refused(session, threaded, name):
    wrong = {
        "model": (MLP([6, 8, 3]), optim.sgd(0.5), 0),
        "optimizer": (MLP(LAYERS), optim.sgd(0.25), 0),
        "seed": (MLP(LAYERS), optim.sgd(0.5), 1),
    }
    with Session(name, client=threaded) as other:
        for model, optimizer, seed in wrong.values():
            with pytest.raises(SpecError, match=r"found .*MLP.*, expected .*MLP"):
                other.create(model, optimizer=optimizer, seed=seed)
        other.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
        assert other.pull().version == 0


def test_whoever_cannot_create_tells_why_and_the_next_one_creates(threaded, name):
    class Broken(MLP):
        def init(self, rng):
            raise ZeroDivisionError("no values")

    with Session(name, client=threaded, timeout=20) as first:
        with pytest.raises(ZeroDivisionError, match="no values"):
            first.create(Broken(LAYERS), optimizer=optim.sgd(0.5))
        with opened(threaded, name) as second:
            same(first.pull().params, second.pull().params)


def test_names_of_any_kind(threaded):
    for odd in ("../../etc/passwd", "a b\n", "\N{SNOWMAN}"):
        with opened(threaded, odd) as s:
            assert s.pull().version == 0
    for wrong in ("", 7, "x" * 201):
        with pytest.raises(SpecError, match="name"), Session(wrong, client=threaded) as s:
            s.pull()


# -- several clients -------------------------------------------------------------------------


def test_whoever_does_not_create_waits_and_is_told_in_vain_of_what(threaded, name):
    with Session(name, client=threaded) as s:
        with pytest.raises(DeadlineError, match="nobody has created it"):
            s.pull(timeout=0.3)
        found = []
        waiting = threading.Thread(target=lambda: found.append(s.pull(timeout=20)))
        waiting.start()
        with opened(threaded, name) as other:
            waiting.join(20)
            same(found[0].params, other.pull().params)


def test_a_pull_under_a_storm_of_assigns_never_mixes_two(session, threaded, name, monkeypatch):
    plain = session._to.ask_worker

    async def late(address, op, deadline, **message):
        """The shards hear of a pull one after the other, and assigns come in between."""
        if op == "dtrain_session_pull":
            await asyncio.sleep(0.01 * message["shard"])
        return await plain(address, op, deadline, **message)

    monkeypatch.setattr(session._to, "ask_worker", late)
    shapes = session.pull().params
    session.assign(like(shapes, 0.0))
    stop = threading.Event()

    def storm(number: int) -> None:
        with Session(name, client=threaded) as own:
            value = float(number)
            while not stop.is_set():
                own.assign(like(shapes, value))
                value += 2

    writers = [threading.Thread(target=storm, args=(n,)) for n in (1, 2)]
    for writer in writers:
        writer.start()
    try:
        seen, version = set(), 0
        for _ in range(60):
            snap = session.pull()
            values = {float(x) for p in snap.params.values() for x in np.unique(p)}
            assert len(values) == 1, f"a mixture of {sorted(values)}"
            assert snap.version >= version
            version = snap.version
            seen |= values
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert len(seen) > 10


def test_pushes_of_many_threads_are_each_whole_and_none_is_lost(session, threaded, name):
    shapes = session.pull().params
    session.assign(like(shapes, 0.0))
    shard_of = {(e["name"], e["rows"]): e["shard"] for e in session.variables()}

    def push() -> None:
        for _ in range(10):
            session.push(like(shapes, -2.0))

    pushers = [threading.Thread(target=push) for _ in range(4)]
    for pusher in pushers:
        pusher.start()
    while any(p.is_alive() for p in pushers):
        found = session.pull().params
        for shard in range(3):
            values = {
                float(x)
                for (n, (a, b)), k in shard_of.items()
                if k == shard
                for x in np.unique(found[n][a:b])
            }
            assert len(values) == 1, f"shard {shard} is torn: {values}"
    for pusher in pushers:
        pusher.join()
    same(session.pull().params, like(shapes, 40.0))


def test_pushes_that_nobody_waits_for_are_done_when_it_closes(session, threaded, name):
    shapes = session.pull().params
    session.assign(like(shapes, 0.0))
    with Session(name, client=threaded) as other:
        for _ in range(20):
            assert other.push(like(shapes, -2.0), wait=False) is None
    same(session.pull().params, like(shapes, 20.0))


@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "not"])
def test_a_push_whose_answer_is_lost_is_sent_again_and_counts_once(session, monkeypatch, wait):
    shapes = session.pull().params
    session.assign(like(shapes, 0.0))
    plain, lost = session._to.ask_worker, []

    async def losing(address, op, deadline, **message):
        answer = await plain(address, op, deadline, **message)
        if op == "dtrain_session_push" and message["shard"] == 1 and not lost:
            lost.append(message["request"])
            raise OSError("the connection is gone")
        return answer

    monkeypatch.setattr(session._to, "ask_worker", losing)
    session.push(like(shapes, -2.0), wait=wait)
    session._finish()
    assert lost == [0]
    same(session.pull().params, like(shapes, 1.0))
    shards = dtrain.sessions.show(session.name)["shards"]
    assert [shards[k]["duplicates"] for k in range(3)] == [1, 1, 1]


def test_what_goes_wrong_with_a_push_that_nobody_waits_for_is_told_later(threaded, name):
    with Session(name, client=threaded) as s, Session(name, client=threaded) as other:
        s.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
        params = s.pull().params
        other.pull()
        s.reset()
        assert other.push(like(params, 1.0), wait=False) is None
        with pytest.raises(FencedError, match="ended"):
            until(lambda: other._settle(0), 30, "nothing is told")


def test_an_older_generation_is_refused_by_the_shards(session):
    tie = session._to.attached(time.monotonic() + 5)
    message = {"client": "x", "voice": "x.1", "shard": 0, "request": 0, "committed": 0}
    for generation in (tie.generation - 1, tie.generation + 1):
        asked = session._to.ask_worker(
            tie.hosts[0],
            "dtrain_session_pull",
            5.0,
            session=session.name,
            generation=generation,
            wanted=None,
            **message,
        )
        with pytest.raises(FencedError, match=f"generation {generation} is not at"):
            session._to.start(asked).result(5)


def test_a_reset_fences_all_handles_and_frees_the_name(threaded, name):
    with ExitStack() as stack:
        first, second = (stack.enter_context(Session(name, client=threaded)) for _ in range(2))
        first.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
        params = second.pull().params
        first.reset()
        for call in (
            second.pull,
            lambda: second.push(like(params, 1.0)),
            lambda: second.assign(params),
        ):
            with pytest.raises(FencedError, match="ended"):
                call()
        services = hosted(threaded)
        assert all(name not in found for found in services.values())
        # What is created under the name then is not what the old handle has had.
        first.create(MLP([6, 3]), optimizer=optim.adam())
        with pytest.raises(FencedError):
            second.pull()
        second.create(MLP([6, 3]), optimizer=optim.adam())
        same(second.pull().params, first.pull().params)
        first.reset()


def hosted(client: Client) -> dict[str, list[str]]:
    """Worker -> the sessions that have something there."""

    def look() -> list[str]:
        from distributed import get_worker

        from dtrain.runtime.worker import service_at

        return list(service_at(get_worker().address).containers.sessions)

    workers = list(client.scheduler_info(-1)["workers"])
    futures = {w: client.submit(look, workers=[w], pure=False) for w in workers}
    return {w: f.result(20) for w, f in futures.items()}


def test_a_session_within_a_task_on_a_worker(session, threaded, name):
    def add(name: str) -> int:
        with Session(name) as own:
            assert get_client() is not None
            snap = own.pull()
            return own.push(like(snap.params, 1.0), version=snap.version)

    versions = threaded.gather([threaded.submit(add, name, pure=False) for _ in range(3)])
    assert sorted(versions)[-1] == 3
    assert session.pull().version == 3


def test_the_variables_outlive_their_client_for_their_time_to_live(threaded, name):
    with Session(name, client=threaded) as s:
        s.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
        s.push(like(s.pull().params, 1.0))
    with Session(name, client=threaded) as s:
        assert s.pull().version == 1
    scheduler = threaded.cluster.scheduler
    container = scheduler.extensions["dtrain"].sessions.named[name].container
    object.__setattr__(container.limits, "time_to_live", 0.2)
    until(
        lambda: name not in scheduler.extensions["dtrain"].sessions.named,
        10,
        "the session is there, though nobody has come within its time to live",
    )
    until(lambda: all(name not in of for of in hosted(threaded).values()), 30, "shards are left")


def test_a_closed_session_says_so(threaded, name):
    s = Session(name, client=threaded)
    s.close()
    s.close()
    with pytest.raises(SpecError, match="found it closed"):
        s.pull()


def test_a_writer_that_dies_on_the_way_holds_nobody_up(session, threaded, name):
    from dtrain.machines.assigns import Begin
    from dtrain.runtime.sessions.lead import packed

    shapes = session.pull().params
    other = Session(name, client=threaded)
    other.pull()
    tie = other._to._tie
    kind, values = packed(Begin(tie.generation, f"{other._to.id}.9", 0, 60.0))
    message = {"session": name, "generation": tie.generation, "client": other._to.id}
    message |= {"voice": f"{other._to.id}.9", "kind": kind, "message": values, "wait": 1.0}
    granted = other._to.start(
        other._to.ask_worker(tie.hosts[0], "dtrain_session_lead", 5.0, **message)
    )
    assert granted.result(5)[0] == "Granted"
    with pytest.raises(DeadlineError, match="nothing was assigned"):
        session.assign(like(shapes, 1.0), timeout=0.5)
    other.close()
    session.assign(like(shapes, 2.0), timeout=10)
    same(session.pull().params, like(shapes, 2.0))


def test_who_asks_the_lead_all_the_time_does_not_put_off_its_deadline():
    from dtrain.machines.assigns import Aborted, Begin, Granted, Lead, Limits
    from dtrain.runtime.sessions.lead import HostedLead

    async def ask() -> None:
        lead, began = HostedLead(Lead(1, Limits()), lambda _: None), time.monotonic()
        assert isinstance(await lead.ask(Begin(1, "first", 0, began + 60.0), 1.0), Granted)
        late = Begin(1, "second", 0, began + 1.0)
        assert await lead.ask(late, 0.0) is None
        timer = lead._timer
        assert await lead.ask(late, 0.0) is None
        assert lead._timer is timer
        assert isinstance(await lead.ask(late, 10.0), Aborted)
        assert time.monotonic() - began < 5
        lead.close()

    asyncio.run(ask())


# -- in-graph training -----------------------------------------------------------------------


def some(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 6)).astype(np.float32), rng.integers(0, 3, rows)


def alone(optimizer, batches, steps):
    """The same steps, on the union of the batches, in this thread."""
    model = MLP(LAYERS)
    params = model.init(np.random.default_rng(0))
    slots = {n: optimizer.init(p.reshape(-1)) for n, p in params.items()}
    union = tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    losses = []
    for t in range(1, steps + 1):
        loss, grads = model.loss_and_grads(params, union)
        losses.append(loss)
        for n, p in params.items():
            flat, grad = p.reshape(-1), np.array(grads[n]).reshape(-1)
            scratch = [np.empty_like(flat) for _ in range(optimizer.scratch)]
            optimizer.update(t, grad, flat, slots[n], flat, slots[n], scratch)
    return params, losses


def test_a_step_is_one_update_of_the_mean_over_all_replicas(threaded, name):
    optimizer, batches = optim.adam(0.01), [some(32, 1), some(8, 2), some(16, 3)]
    with opened(threaded, name, optimizer) as s:
        losses = [s.step(batches) for _ in range(4)]
        snap = s.pull()
    expected, wanted = alone(optimizer, batches, 4)
    assert snap.version == 4
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for n, value in expected.items():
        np.testing.assert_allclose(snap.params[n], value, rtol=1e-4, atol=1e-6)


def test_a_step_of_futures_and_dask_arrays_is_the_same(threaded, name):
    da = pytest.importorskip("dask.array")
    x, y = some(16)
    with opened(threaded, name) as s, opened(threaded, "other") as other:
        s.step([(x, y), (x, y)])
        there = threaded.submit(np.copy, x)
        other.step([(there, y), (da.from_array(x, chunks=5), da.from_array(y, chunks=7))])
        same(s.pull().params, other.pull().params)


def test_the_steps_of_a_clipped_optimizer_clip_the_mean(threaded, name):
    optimizer = optim.chain(optim.clip_by_global_norm(0.01), optim.sgd(1.0))
    with opened(threaded, name, optimizer) as s:
        before = s.pull().params
        s.step([some(16, 1), some(16, 2)])
        after = s.pull().params
    moved = np.sqrt(sum(((after[n] - before[n]) ** 2).sum() for n in before))
    np.testing.assert_allclose(moved, 0.01, rtol=1e-4)


def test_train_ops_train_from_threads_at_the_same_time(threaded, name, digits):
    X, y = digits
    model = MLP([64, 32, 10])
    with Session(name, client=threaded) as s:
        s.create(model, optimizer=optim.sgd(0.2), partitioner=dtrain.FixedShards(2))
        parts = [(X[:800], y[:800]), (X[800:1600], y[800:1600])]
        ops = s.train_ops(parts, batch_size=50)
        first = model.loss(s.pull().params, (X[1600:], y[1600:]))
        losses: dict[int, list[float]] = {0: [], 1: []}

        def loop(replica: int) -> None:
            for _ in range(40):
                losses[replica].append(ops[replica]())

        loops = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
        for one in loops:
            one.start()
        for one in loops:
            one.join()
        snap = s.pull()
        assert snap.version == 80
        assert model.loss(snap.params, (X[1600:], y[1600:])) < first / 2
        assert all(np.mean(found[-5:]) < np.mean(found[:5]) / 2 for found in losses.values())
        s.reset()


def test_steps_within_tasks_that_take_all_threads(session, threaded, name):
    def train(name: str, seed: int) -> list[float]:
        with Session(name, timeout=20) as own:
            (op,) = own.train_ops([some(16, seed)])
            return [own.step([some(16, seed), some(16, seed)]), op(), op()]

    found = threaded.gather([threaded.submit(train, name, seed, pure=False) for seed in range(4)])
    assert np.isfinite(found).all()
    assert session.pull().version == 12


def test_a_train_op_cuts_rows_of_what_is_elsewhere(session, threaded, name):
    """Also where the first array is: 20 rows by 8 are batches of 8, 8 and 4, and then the first."""
    x, y = some(20)
    there = threaded.scatter([x, y])
    parts = [
        (x, y),
        tuple(there),
        (da.from_array(x, chunks=(7, 6)), y),
        (there[0], y),
    ]
    found = []
    for part in parts:
        with Session(f"{name} {len(found)}", client=threaded) as own:
            own.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
            (op,) = own.train_ops([part], batch_size=8)
            found.append([op() for _ in range(5)])
            own.reset()
    with Session(f"{name} alone", client=threaded) as own:
        own.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
        cuts = [slice(0, 8), slice(8, 16), slice(16, 20), slice(0, 8), slice(8, 16)]
        expected = [own.step([(x[cut], y[cut])]) for cut in cuts]
        own.reset()
    assert found == [expected] * len(parts)


def test_a_train_op_of_an_iterator_takes_its_batches(session):
    batches = [some(8, seed) for seed in range(3)]
    (op,) = session.train_ops([iter(batches)])
    for _ in range(3):
        op()
    with pytest.raises(StopIteration):
        op()
    assert session.pull().version == 3


class Odd(MLP):
    """Raises, or has gradients that cannot be, if its labels say so."""

    def loss_and_grads(self, params, batch, *, out=None):
        loss, grads = super().loss_and_grads(params, (batch[0], batch[1] % 3))
        if batch[1][0] == 0:
            raise FileNotFoundError("no such thing")
        if batch[1][0] == 1:
            grads = {n: g * np.float32("inf") for n, g in grads.items()}
        return loss, {"one": 1} if batch[1][0] == 2 else grads


@pytest.mark.parametrize(
    ("label", "error", "words"),
    [
        (0, FileNotFoundError, "no such thing"),
        (1, NonFiniteError, "replica 1: its loss or gradient is not finite"),
        (2, DataError, "replica 1: .*is missing"),
    ],
)
def test_what_goes_wrong_in_a_step_is_told_and_nothing_is_applied(
    threaded, name, label, error, words
):
    x, y = some(8)
    with Session(name, client=threaded, timeout=30) as s:
        s.create(Odd(LAYERS), optimizer=optim.sgd(0.5))
        with pytest.raises(error, match=words) as told:
            s.step([(x, np.full_like(y, 3)), (x, np.full_like(y, label))])
        (op,) = s.train_ops([(x, np.full_like(y, label))])
        with pytest.raises(error):
            op()
        assert s.pull().version == 0
        s.reset()
    if label == 0:
        assert any("Remote traceback" in note for note in told.value.__notes__)


def test_batches_that_cannot_be_are_refused(session):
    x, y = some(4)
    for wrong in ([], (x,), {"x": x}, [x], [(x, y, y, y)]):
        with pytest.raises(SpecError, match="batches"):
            session.step(wrong)
        with pytest.raises(SpecError, match="parts"):
            session.train_ops(wrong)


# -- checkpoints -----------------------------------------------------------------------------


def test_a_restored_session_goes_on_as_if_nothing_had_been(threaded, name, tmp_path):
    optimizer, batches = optim.adam(0.01), [some(16, 1), some(16, 2)]
    with opened(threaded, name, optimizer) as s:
        for _ in range(3):
            s.step(batches)
        place = s.checkpoint(tmp_path / "ckpt")
        assert place == str(tmp_path / "ckpt" / "step-00000003")
        saved = s.pull().params
        for _ in range(2):
            s.step(batches)
        wanted = s.pull()
        s.restore(tmp_path / "ckpt")
        same(s.pull().params, saved)
        for _ in range(2):
            s.step(batches)
        found = s.pull()
        same(found.params, wanted.params)
        assert found.version > wanted.version
    # Another session, of another number of shards, after the first has ended.
    with opened(threaded, name, optimizer, shards=2) as s:
        s.restore(tmp_path / "ckpt")
        for _ in range(2):
            s.step(batches)
        same(s.pull().params, wanted.params)


def test_the_newest_checkpoint_is_the_one_that_was_written_last(session, tmp_path):
    shapes = session.pull().params
    session.push(like(shapes, 1.0))
    session.checkpoint(tmp_path)
    session.push(like(shapes, 1.0))
    session.checkpoint(tmp_path)
    session.restore(tmp_path)
    session.reset()
    session.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
    session.assign(like(shapes, 5.0))
    session.checkpoint(tmp_path)
    session.assign(like(shapes, 6.0))
    session.restore(tmp_path)
    same(session.pull().params, like(shapes, 5.0))
    assert len(dtrain.checkpoints.verify(tmp_path)) == 3
    assert dtrain.sessions.show(session.name)["saved"][0] == str(tmp_path)


def test_checkpoints_that_do_not_fit_are_refused(session, threaded, tmp_path):
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        session.restore(tmp_path / "none")
    with opened(threaded, "other", optim.adam()) as other:
        other.checkpoint(tmp_path / "adam")
    with Session("third", client=threaded) as third:
        third.create(MLP([6, 3]), optimizer=optim.sgd(0.5))
        third.checkpoint(tmp_path / "small")
        third.reset()
    before = session.pull()
    with pytest.raises(CheckpointError, match=r"found the optimizer .*adam.*, expected .*sgd"):
        session.restore(tmp_path / "adam")
    with pytest.raises(CheckpointError, match=r"found the variables .*, expected"):
        session.restore(tmp_path / "small")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        session.checkpoint(tmp_path / "file")
    after = session.pull()
    assert after.version == before.version
    same(after.params, before.params)


# -- client processes ------------------------------------------------------------------------


class Others:
    """Client processes that start together."""

    def __init__(
        self, count: int, address: str, name: str, folder: Path, seconds: float, *where: str
    ) -> None:
        command = [sys.executable, "-m", "tests.runtime.shared", address, name, str(folder)]
        self.processes = [
            subprocess.Popen(
                [*command, str(seconds), *where],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Others:
        for process in self.processes:
            assert process.stdout.readline() == "up\n"
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def ends(self) -> list[str]:
        found = []
        for process in self.processes:
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            found.append(out.strip())
        return found


def created_once(client: Client, name: str, folder: Path) -> None:
    folder.mkdir()
    with Others(2, client.scheduler.address, name, folder, 0.0) as others:
        found = others.ends()
    assert len(list(folder.glob("begun-*"))) == 1
    assert found[0] == found[1]
    with Session(name, client=client, timeout=20) as s:
        assert [float(s.pull().params["b"][0])] == eval(found[0])
        s.reset()


@pytest.mark.cluster
def test_two_processes_at_once_create_once(forked, name, tmp_path):
    for number in range(3):
        created_once(forked, name, tmp_path / str(number))


@pytest.mark.cluster
@pytest.mark.slow
def test_two_processes_at_once_create_once_twenty_times(forked, name, tmp_path):
    for number in range(20):
        created_once(forked, name, tmp_path / str(number))


@pytest.mark.cluster
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_chief_that_dies_on_the_way_is_replaced(name, tmp_path, how):
    # Who is killed is missed at once, who is stopped when the lease is over.
    lease = 30.0 if how is signal.SIGKILL else 2.0
    config = {"dtrain.session-lease": lease}
    with processes(2, **config) as client, Session(name, client=client, timeout=60) as s:
        with Others(1, client.scheduler.address, name, tmp_path, 600.0) as others:
            until(lambda: list(tmp_path.glob("begun-*")), 40, "nobody initialises")
            others.processes[0].send_signal(how)
            began = time.monotonic()
            s.create(Traced(str(tmp_path)), optimizer=optim.sgd(1.0))
            took = time.monotonic() - began
        assert len(list(tmp_path.glob("begun-*"))) == 2
        assert took < max(lease, 20.0)
        value = s.pull().params["w"][0, 0]
        assert all((p == value).all() for p in s.pull().params.values())


@pytest.mark.cluster
def test_a_pull_from_afar_under_a_storm_never_mixes_two(forked, name):
    def storm(name: str, value: float, seconds: float) -> int:
        count, end = 0, time.monotonic() + seconds
        with Session(name) as own:
            shapes = own.pull().params
            while time.monotonic() < end:
                own.assign({n: np.full_like(p, value) for n, p in shapes.items()})
                value += 2
                count += 1
        return count

    with opened(forked, name) as s:
        s.assign(like(s.pull().params, 0.0))
        writers = [forked.submit(storm, name, v, 2.0, pure=False) for v in (1.0, 2.0)]
        seen = set()
        while not all(writer.done() for writer in writers):
            values = {float(x) for p in s.pull().params.values() for x in np.unique(p)}
            assert len(values) == 1, f"a mixture of {sorted(values)}"
            seen |= values
        assert sum(forked.gather(writers)) > 20
        assert len(seen) > 10


@pytest.mark.cluster
def test_a_worker_with_shards_that_dies_takes_them_along_and_that_is_told(name):
    with processes(2) as client, opened(client, name) as s:
        params = s.pull().params
        victim = s.variables()[0]["worker"]
        kill(client, victim)
        for call in (s.pull, lambda: s.push(like(params, 1.0)), lambda: s.assign(params)):
            with pytest.raises(SessionLost, match=f"worker {victim} .*had shards.*restore it"):
                call()
        s.reset()
        s.create(MLP(LAYERS), optimizer=optim.sgd(0.5))
        same(s.pull().params, params)


@pytest.mark.cluster
def test_lost_variables_go_on_from_a_checkpoint(name, tmp_path):
    with processes(2) as client, opened(client, name, optim.adam(0.01)) as s:
        batches = [some(16, 1), some(16, 2)]
        s.step(batches)
        s.checkpoint(tmp_path)
        saved = s.pull()
        (op,) = s.train_ops([some(16, 3)])
        op()
        kill(client, s.variables()[0]["worker"])
        # By itself, in the generation after that; what came after the checkpoint is lost.
        found = s.pull()
        assert found.version == saved.version == 1
        same(found.params, saved.params)
        kill(client, s.variables()[0]["worker"])
        op()
        s.step(batches)
        assert s.pull().version == 3
        story = [e["message"] for e in dtrain.sessions.show(name, client)["events"]]
        assert sum("goes on from the checkpoint of step 1" in words for words in story) == 2


@pytest.mark.cluster
def test_variables_lost_without_a_checkpoint_are_restored_by_hand(name, tmp_path):
    with processes(2) as client, opened(client, name) as s:
        params = s.pull().params
        with opened(client, "other") as other:
            other.assign(like(params, 3.0))
            other.checkpoint(tmp_path)
        kill(client, s.variables()[0]["worker"])
        with pytest.raises(SessionLost):
            s.pull()
        with pytest.raises(SessionLost, match=r"cannot be restored: .*found no checkpoint"):
            s.restore(tmp_path / "none")
        s.restore(tmp_path)
        same(s.pull().params, like(params, 3.0))


# -- retirement ------------------------------------------------------------------------------


def story(s: Session, client: Client) -> list[str]:
    return [e["message"] for e in dtrain.sessions.show(s.name, client)["events"]]


def services(client: Client) -> list:
    from dtrain.runtime.worker import service_at

    return [service_at(address) for address in client.scheduler_info(-1)["workers"]]


def test_a_worker_that_is_retired_takes_nothing_along(name):
    with within() as client, opened(client, name, optim.adam(0.01)) as s:
        grads = [like(s.pull().params, value) for value in (1.0, -2.0, 3.0, 0.5)]
        for n, grad in enumerate(grads):
            assert s.push(grad, version=n) == n + 1
            if n in (0, 2):
                # The lead's worker, and then one of those that have its shards now.
                gone = s.variables()[0]["worker"]
                client.retire_workers([gone])
                places = {v["worker"] for v in s.variables()}
                assert gone not in places
                assert places <= set(client.scheduler_info(-1)["workers"])
        snap, shards = s.pull(), dtrain.sessions.show(name, client)["shards"]
        assert snap.version == 4
        assert [shards[k]["pushes"] for k in range(3)] == [4, 4, 4]
        assert [shards[k]["staleness"] for k in range(3)] == [{0: 4}] * 3
        assert sum("moved to" in words for words in story(s, client)) == 2
        assert not any(service.containers._frozen for service in services(client))
        with opened(client, "another", optim.adam(0.01)) as other:
            for grad in grads:
                other.push(grad)
            same(snap.params, other.pull().params)


def test_an_assign_that_is_committed_moves_and_one_that_is_not_is_done_after(name):
    with within() as client, opened(client, name) as s:
        shapes, stop, seen = s.pull().params, threading.Event(), []

        def write() -> None:
            value = 0.0
            while not stop.is_set():
                value += 1.0
                s.assign(like(shapes, value))
                seen.append(value)

        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(2):
            before = len(seen)
            client.retire_workers([s.variables()[0]["worker"]])
            until(lambda before=before: len(seen) > before + 2, 40, "nothing was assigned")
        stop.set()
        writer.join(30)
        same(s.pull().params, like(shapes, seen[-1]))


@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "not"])
def test_a_push_that_was_cut_by_a_retirement_counts_once(name, monkeypatch, wait):
    with within() as client, opened(client, name) as s:
        shapes = s.pull().params
        s.assign(like(shapes, 0.0))
        cut = cut_a_push(s, client, monkeypatch)
        s.push(like(shapes, -2.0), wait=wait)
        s._finish()
        assert len(cut) == 1
        same(s.pull().params, like(shapes, 1.0))
        shards = dtrain.sessions.show(name, client)["shards"]
        assert [shards[k]["duplicates"] for k in range(3)] == [1, 1, 1]


def test_a_move_that_fails_is_tried_again_from_what_is_frozen(name, monkeypatch):
    from dtrain.runtime.sessions.worker import Containers

    plain, failed = Containers.handed, []

    async def failing(self, **message):
        if not failed:
            failed.append(message["shard"])
            raise DeadlineError("it has not answered")
        return await plain(self, **message)

    monkeypatch.setattr(Containers, "handed", failing)
    with within() as client, opened(client, name) as s:
        params = s.pull().params
        s.push(like(params, 1.0))
        client.retire_workers([s.variables()[0]["worker"]])
        same(s.pull().params, {n: p - np.float32(0.5) for n, p in params.items()})
        assert failed
        assert "moves its shards once more: it has not answered" in story(s, client)


@pytest.mark.cluster
@pytest.mark.parametrize("call", ["push", "step"])
def test_who_has_been_idle_meanwhile_does_not_wait_for_a_worker_that_has_left(name, call):
    with processes(3) as client, opened(client, name) as s:
        params = s.pull().params
        gone = s.variables()[0]["worker"]
        client.retire_workers([gone])
        until(lambda: gone not in client.scheduler_info(-1)["workers"], 40, "it is still there")
        began = time.monotonic()
        if call == "push":
            s.push(like(params, 1.0))
        else:
            s.step([some(16)])
        # Dask itself tries to reach a worker for half a minute.
        assert time.monotonic() - began < 25
        assert s.pull().version == 1


@pytest.mark.cluster
def test_steps_and_train_ops_go_on_while_workers_are_retired(name):
    with processes(3) as client, opened(client, name) as s, ThreadPoolExecutor(2) as pool:
        stop, counts = threading.Event(), [0, 0]
        (op,) = s.train_ops([some(16, 3)])
        calls = [lambda: s.step([some(16, 1), some(16, 2)]), op]

        def train(i: int) -> None:
            while not stop.is_set():
                calls[i]()
                counts[i] += 1

        def more() -> None:
            before = counts.copy()

            def trained() -> bool:
                return all(map(int.__gt__, counts, before)) or any(f.done() for f in trains)

            until(trained, 60, "nothing is trained")

        trains = [pool.submit(train, i) for i in range(2)]
        for _ in range(2):
            more()
            client.retire_workers([s.variables()[0]["worker"]])
        more()
        stop.set()
        for future in trains:
            future.result(60)
        assert s.pull().version == sum(counts)


def test_where_nobody_stays_nothing_moves_and_nobody_waits(name):
    with within(2) as client, opened(client, name) as s:
        before = time.monotonic()
        client.retire_workers(list(client.scheduler_info(-1)["workers"]), close_workers=False)
        assert time.monotonic() - before < 25
        assert "moves" not in " ".join(story(s, client))


@pytest.mark.cluster
def test_workers_are_retired_while_threads_push_and_every_push_counts_once(name):
    with processes(3) as client, opened(client, name, shards=4) as s:
        shapes, stop = s.pull().params, threading.Event()
        s.assign(like(shapes, 0.0))
        counts = [0, 0, 0]

        def push(i: int) -> None:
            with Session(name, client=client, timeout=30) as own:
                while not stop.is_set():
                    own.push(like(shapes, -2.0))
                    counts[i] += 1

        threads = [threading.Thread(target=push, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            before = sum(counts)
            until(lambda before=before: sum(counts) > before + 30, 60, "nothing is pushed")
            client.retire_workers([s.variables()[0]["worker"]])
        before = sum(counts)
        until(lambda: sum(counts) > before + 30, 60, "nothing is pushed any more")
        stop.set()
        for thread in threads:
            thread.join(60)
        same(s.pull().params, like(shapes, float(sum(counts))))
        assert len({v["worker"] for v in s.variables()}) == 1


@pytest.mark.cluster
def test_a_push_that_was_cut_by_a_loss_counts_once_also_if_the_checkpoint_has_it(
    name, tmp_path, monkeypatch
):
    with processes(2) as client, opened(client, name) as s, Session(name, client=client) as other:
        shapes = s.pull().params
        s.assign(like(shapes, 0.0))
        s.push(like(shapes, -2.0))
        victim, plain, cut = s.variables()[0]["worker"], s._to.ask_worker, []

        def lose() -> None:
            other.checkpoint(tmp_path)
            kill(client, victim)

        async def cutting(address, op, deadline, **message):
            answer = await plain(address, op, deadline, **message)
            if op == "dtrain_session_push" and message["shard"] == 0 and not cut:
                cut.append(message["voice"])
                await asyncio.to_thread(lose)
                raise OSError("the connection is gone")
            return answer

        monkeypatch.setattr(s._to, "ask_worker", cutting)
        s.push(like(shapes, -2.0))
        assert len(cut) == 1
        assert any("goes on from the checkpoint" in words for words in story(s, client))
        same(s.pull().params, like(shapes, 2.0))
        s.push(like(shapes, -2.0))
        same(s.pull().params, like(shapes, 3.0))


def kill(client: Client, address: str) -> None:
    """And wait until the cluster has its workers again."""
    os.kill(client.run(os.getpid, workers=[address])[address], signal.SIGKILL)
    until(lambda: address not in client.scheduler_info(-1)["workers"], 40, "it is still there")
    client.wait_for_workers(2, 30)
