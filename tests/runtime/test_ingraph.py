"""In-graph replication: another way through the same steps, with the same bits."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import contextmanager

import dask
import numpy as np
import pytest
from dask.sizeof import sizeof
from dask.utils import key_split
from distributed import Client, LocalCluster
from distributed.diagnostics.task_stream import TaskStreamPlugin
from distributed.protocol import serialize

import dtrain
from dtrain.messages import Verdict
from dtrain.models import MLP
from dtrain.runtime.tasks import Gradient, GraphShard, Piece, Report, Update
from dtrain.runtime.worker import service_at
from tests.conftest import until

from .conftest import processes
from .test_failures import Own, Raises, RaisesUnreadable
from .test_scheduler_load import count_bytes, counted, own_scheduler

#: Rows that no number of replicas or batches divides.
RNG = np.random.default_rng(11)
X = RNG.standard_normal((107, 6)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(int)

OPTIMIZERS = [dtrain.optim.sgd(1e-2, momentum=0.9), dtrain.optim.adam(1e-2)]


def job(client, model=None, **changes):
    arguments = dict(
        optimizer=dtrain.optim.adam(1e-2),
        replicas=2,
        shards=2,
        batch_size=12,
        epochs=2,
        seed=5,
        replication="in-graph",
        progress=False,
    )
    return dtrain.fit(model or MLP([6, 16, 2]), X, Y, client=client, **{**arguments, **changes})


def told(result):
    """All that both ways have to agree about."""
    timing = ("seconds", "samples_per_s")
    history = [{k: v for k, v in e.items() if k not in timing} for e in result.history]
    params = {name: p.tobytes() for name, p in result.params.items()}
    return params, history, result.ledger, result.version


def same_both_ways(client, **changes):
    between = told(job(client, replication="between-graph", **changes))
    assert told(job(client, **changes)) == between
    return between


@contextmanager
def own_cluster(config):
    """Two workers in this process, with settings of their own."""
    with (
        dask.config.set(config),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def workers_of(client):
    return list(client.cluster.scheduler.workers)


def hosts_of(client):
    """The jobs that have a host in this process still."""
    return [job for w in workers_of(client) for job in service_at(w).hosts]


def nothing_left(client):
    """No task, key or client of a job; called once its result is gone."""
    scheduler = client.cluster.scheduler

    def ours():
        found = [str(k) for k in scheduler.tasks if "dtrain" in str(k)]
        return found + [name for name in scheduler.clients if "driver" in name]

    until(lambda: not ours(), 30, f"left on the scheduler: {ours()}")


# -- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_same_bits_as_between_graph(threaded, replicas, shards, optimizer):
    """Uneven parts: in the last step of an epoch some replicas have no rows, or few."""
    same_both_ways(
        threaded,
        replicas=replicas,
        shards=shards,
        optimizer=optimizer,
        validation_split=0.2,
        metrics=["accuracy", "log_loss"],
    )
    nothing_left(threaded)


def test_ragged_parts(threaded):
    """13 rows over 3 replicas in batches of 2: the quorum of the last step is one replica."""
    arguments = dict(replicas=3, batch_size=2, epochs=3, shuffle=False)

    def fit(**changes):
        return told(
            dtrain.fit(
                MLP([6, 4, 2]), X[:13], Y[:13], client=threaded, progress=False,
                **arguments, **changes,
            )
        )  # fmt: skip

    assert fit(replication="in-graph") == fit()


def test_steps_end_it_in_the_middle_of_an_epoch(threaded):
    _, _, _, version = same_both_ways(threaded, steps=7, validation_split=0.2)
    assert version == 7


IN_STAGES = {
    "clipped": lambda: dtrain.optim.chain(
        dtrain.optim.clip_by_global_norm(0.05), dtrain.optim.adam(1e-2)
    ),
    "lamb": lambda: dtrain.optim.lamb(1e-2),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("optimizer", IN_STAGES)
def test_optimizers_in_several_stages(threaded, optimizer, shards):
    """Sums over all shards between the stages: more tasks, the same bits."""
    same_both_ways(threaded, optimizer=IN_STAGES[optimizer](), shards=shards)
    nothing_left(threaded)


def test_validation_data_and_initial_parameters(threaded):
    first = job(threaded, epochs=1)
    same_both_ways(
        threaded, validation_data=(X[:9], Y[:9]), metrics=["accuracy"], initial=first.params
    )


def test_dropout_is_drawn_alike(threaded):
    """What a model draws follows from the seed, the replica and the step."""

    class Noisy(Own):
        def init(self, rng):
            return {"w": rng.standard_normal(6).astype(np.float32)}

        def loss_and_grads(self, params, batch, *, rng):
            loss, grads = super().loss_and_grads(params, batch)
            noise = rng.standard_normal(6).astype(np.float32)
            return loss, {"w": grads["w"] + 0.1 * noise}

    found = [
        told(dtrain.fit(
            Noisy(), X, X[:, 0], replicas=3, shards=1, batch_size=12, replication=way,
            client=threaded, progress=False,
        ))
        for way in ("in-graph", "between-graph")
    ]  # fmt: skip
    assert found[0] == found[1]


def test_rows_of_chunks_on_other_workers(threaded):
    """Read ahead by the task before, as by the loop of a replica."""
    import dask.array as da

    x, y = (da.from_array(a, chunks=(19, *a.shape[1:])).persist() for a in (X, Y))
    arguments = dict(replicas=3, batch_size=12, epochs=2, validation_split=0.2, progress=False)
    found = [
        told(dtrain.fit(MLP([6, 8, 2]), *rows, replication=way, client=threaded, **arguments))
        for rows, way in [((x, y), "in-graph"), ((X, Y), "in-graph"), ((X, Y), "between-graph")]
    ]
    assert found[0] == found[1] == found[2]


def test_dask_knows_what_its_data_weighs():
    """Or it neither spills nor pauses in time."""
    array = np.zeros(100_000, np.float32)
    for value in (
        Update(Report(0, (), None), [array]),
        Gradient(None, array.view(np.uint8)),
        Piece(None, [array[: len(array)]]),
    ):
        assert sizeof(value) > array.nbytes, value
    # Of a piece that travels, nothing of the rest does.
    _, frames = serialize(Piece(None, [array[:1000]]))
    assert sum(memoryview(frame).nbytes for frame in frames) < 4000 + 1000


def test_more_replicas_than_workers_and_a_worker_with_a_shard_alone(threaded):
    same_both_ways(threaded, replicas=5)
    same_both_ways(threaded, replicas=1, shards=2)


@pytest.mark.cluster
def test_same_bits_on_processes(threaded):
    between = told(job(threaded, replication="between-graph", validation_split=0.2, replicas=3))
    with processes(2, threads=2) as client:
        for shards in (1, 3):
            found = job(client, shards=shards, validation_split=0.2, replicas=3)
            assert told(found) == between
        nothing_left(client)


# -- what is to be seen of it -------------------------------------------------------------------


def test_its_tasks_are_seen_by_name_where_they_belong(threaded):
    scheduler = threaded.cluster.scheduler
    stream = TaskStreamPlugin(scheduler)
    scheduler.add_plugin(stream)
    try:
        job(threaded, steps=4, epochs=1, validation_split=0.2)
        seen = [(t["key"], t["worker"]) for t in stream.buffer]
    finally:
        scheduler.remove_plugin(name=stream.name)
    at, count = defaultdict(set), defaultdict(int)
    for key, worker in seen:
        name = key_split(key)
        if isinstance(key, tuple):
            at[name, key[2:3]].add(worker)
            count[name] += 1
    assert count == {
        "dtrain-first": 2,
        "dtrain-begun": 1,
        "dtrain-gradient": 8,
        "dtrain-piece": 8,  # of each gradient the one shard that is elsewhere
        "dtrain-update": 8,
        "dtrain-verdict": 4,
        "dtrain-evaluation": 2,
        "dtrain-evaluated": 1,
    }
    # Each replica and each shard has one worker all the time, and both workers have both.
    assert all(len(workers) == 1 for workers in at.values())
    for name in ("dtrain-gradient", "dtrain-update", "dtrain-evaluation"):
        assert at[name, (0,)] != at[name, (1,)]


def test_each_step_is_one_graph(threaded):
    scheduler = threaded.cluster.scheduler
    graphs, handle = [], scheduler.stream_handlers["update-graph"]

    async def counting(client, **message):
        graphs.append(client)
        await handle(client=client, **message)

    scheduler.stream_handlers["update-graph"] = counting
    try:
        job(threaded, steps=9, validation_split=0.2, batch_size=10)
    finally:
        scheduler.stream_handlers["update-graph"] = handle
    driver = [client for client in graphs if "driver" in client]
    # One more at the start, and one for the evaluation at the end of each of two epochs.
    assert len(driver) == 9 + 1 + 2


@pytest.mark.cluster
def test_its_bytes_do_not_pass_through_the_scheduler(tmp_path):
    """A hundredfold model moves the same bytes there."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((500, 50)).astype(np.float32), rng.integers(0, 5, 500)
    small, big = MLP([50, 20, 5]), MLP([50, 2000, 5])
    size = {m: sum(p.size for p in m.init(rng).values()) for m in (small, big)}

    def run(client, model):
        client.run_on_scheduler(counted)
        dtrain.fit(
            model, x, y, batch_size=25, steps=10, client=client, progress=False,
            replication="in-graph",
        )  # fmt: skip
        return client.run_on_scheduler(counted)

    with own_scheduler(tmp_path) as client:
        client.run_on_scheduler(count_bytes)
        run(client, small)
        # The least of several: what goes by the clock comes on top in some runs.
        moved = {model: min(run(client, model) for _ in range(3)) for model in (small, big)}
        assert moved[big] == pytest.approx(moved[small], rel=0.05)
        # Less than the parameters once (0.4 MB); what the workers send each other is 18 MB.
        assert moved[big] < 4 * size[big]


# -- what goes wrong ----------------------------------------------------------------------------


def test_a_users_exception_comes_up_as_itself(threaded):
    with pytest.raises(KeyError, match="no such feature") as caught:
        job(threaded, Raises())
    notes = "".join(caught.value.__notes__)
    for words in ("Remote traceback", "in loss_and_grads", "replica ", "step 0", "worker "):
        assert words in notes
    nothing_left(threaded)


def test_a_users_exception_that_cannot_travel_comes_as_words(threaded):
    with pytest.raises(dtrain.JobFailed, match="Unreadable: one two") as caught:
        job(threaded, RaisesUnreadable())
    assert caught.value.reason == "USER_ERROR"


def test_wrong_gradients_are_refused(threaded):
    class Wrong(Own):
        def loss_and_grads(self, params, batch, *, out=None, rng=None):
            return 0.5, {"w": np.zeros(3, np.float32)}

    with pytest.raises(Exception, match=r"\(3,\).*\(4,\)") as caught:
        job(threaded, Wrong(), shards=1)
    assert "replica" in "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)


def test_an_error_in_the_evaluation(threaded):
    class Fails(MLP):
        def predict(self, params, x):
            raise LookupError("no such class")

    with pytest.raises(LookupError, match="no such class"):
        job(threaded, Fails([6, 4, 2]), validation_split=0.2, metrics=["accuracy"])
    nothing_left(threaded)


#: The first feature of rows that a step must not be made of.
BAD = 99.0


class Poisoned(MLP):
    """Its gradient is not finite where the first feature says so; or its loss."""

    what = "gradient"

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        x, y = batch
        bad = (x[:, 0] == BAD).any()
        loss, grads = super().loss_and_grads(params, (np.where(x == BAD, 0, x), y), out=out)
        if bad and self.what == "gradient":
            next(iter(grads.values()))[...] = np.inf
        return (np.nan if bad and self.what == "loss" else loss), grads


class Ignoring(Poisoned):
    what = "nothing"


class BadLoss(Poisoned):
    what = "loss"


def with_a_bad_row(client, kind, row, **changes):
    x = X[:96].copy()
    x[row, 0] = BAD
    arguments = dict(
        replicas=2, shards=2, batch_size=12, epochs=1, shuffle=False, client=client,
        optimizer=dtrain.optim.sgd(0.1), progress=False,
    )  # fmt: skip
    return dtrain.fit(kind([6, 16, 2]), x, Y[:96], **{**arguments, **changes})


@pytest.mark.parametrize("kind", [Poisoned, BadLoss])
def test_what_is_not_finite_fails_the_job_in_the_same_words(threaded, kind):
    words = []
    for way in ("in-graph", "between-graph"):
        with pytest.raises(dtrain.NonFiniteError) as caught:
            with_a_bad_row(threaded, kind, 48 + 30, replication=way)
        words.append(str(caught.value).partition(": ")[2])
    assert words[0] == words[1]
    assert "replica 1" in words[0]
    assert "step 2" in words[0]
    nothing_left(threaded)


def clipped(rule):
    return dtrain.optim.chain(dtrain.optim.clip_by_global_norm(0.05), rule)


@pytest.mark.parametrize("made", [lambda rule: rule, clipped], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", [Poisoned, BadLoss])
def test_a_step_that_is_not_finite_can_be_skipped(threaded, kind, made):
    """As if the rate of that step had been 0; and it is counted."""
    rule, still = made(dtrain.optim.sgd(0.1)), dtrain.optim.piecewise([2, 3], [0.1, 0.0, 0.1])
    skipping = dict(
        recovery=dtrain.Recovery(on_non_finite="skip"), replication="in-graph", optimizer=rule
    )
    result = with_a_bad_row(threaded, kind, 48 + 30, **skipping)
    rule = made(dtrain.optim.sgd(still))
    expected = with_a_bad_row(threaded, Ignoring, 48 + 30, optimizer=rule)
    for name, value in expected.params.items():
        assert result.params[name].tobytes() == value.tobytes(), name
    assert result.version == expected.version == 4
    assert (result.ledger.rejected, result.ledger.applied) == (2, 6)
    assert result.ledger.samples == [96 - 24]
    assert np.isfinite(result.history[0]["loss"])
    nothing_left(threaded)


class Slow(MLP):
    began = threading.Event()

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        self.began.set()
        time.sleep(0.05)
        return super().loss_and_grads(params, batch, out=out, rng=rng)


def test_cancel(threaded):
    Slow.began.clear()
    handle = dtrain.submit(
        Slow([6, 4, 2]), X, Y, batch_size=5, epochs=1000, replication="in-graph", client=threaded
    )
    until(lambda: handle.status()["step"] > 2, 60, "no steps")
    began = time.monotonic()
    handle.cancel()
    assert handle.wait(timeout=20) == "CANCELLED"
    assert time.monotonic() - began < 25
    assert not any("driver" in t.name for t in threading.enumerate())
    nothing_left(threaded)
    assert told(job(threaded, epochs=1))


def test_its_status_tells_of_its_steps(threaded):
    handle = dtrain.submit(
        Slow([6, 4, 2]), X, Y, batch_size=5, epochs=1000, replication="in-graph", client=threaded
    )
    until(lambda: handle.status()["step"] > 2, 60, "no steps")
    assert handle.status()["loss"] > 0
    handle.cancel()
    handle.wait(timeout=20)


FREE = threading.Event()


def held():
    """Somebody else's task."""
    return FREE.wait(30)


def test_what_does_not_run_has_a_deadline():
    """Its tasks wait behind others' on a worker that has no thread for them."""
    FREE.clear()
    with own_cluster({"dtrain.step-deadline": "2s"}) as client:
        handle = dtrain.submit(
            Slow([6, 4, 2]), X, Y, batch_size=5, epochs=1000, replication="in-graph", client=client
        )
        until(lambda: handle.status()["step"] > 2, 60, "no steps")
        busy = [client.submit(held, workers=[w], pure=False) for w in workers_of(client)]
        try:
            assert handle.wait(timeout=20) == "FAILED"
            with pytest.raises(dtrain.JobFailed, match="threads busy with other tasks") as caught:
                handle.result()
            assert caught.value.reason == "DEADLINE"
        finally:
            FREE.set()
        assert all(future.result(timeout=10) for future in busy)


def test_nothing_is_lost_when_a_worker_is_retired(threaded):
    """Its shard goes from memory to memory, though the futures of the state are gone."""
    with own_cluster({}) as client:
        handle = dtrain.submit(
            Slow([6, 16, 2]), X, Y, optimizer=dtrain.optim.adam(1e-2), replicas=2, shards=2,
            batch_size=12, epochs=6, seed=5, replication="in-graph", client=client,
        )  # fmt: skip
        until(lambda: handle.status()["step"] > 5, 60, "no steps")
        client.retire_workers(workers_of(client)[1:])
        result = handle.result(timeout=60)
        words = [event["message"] for event in handle.events()]
        assert any("from memory" in said for said in words), words
        assert handle.status()["losses"] == 0
        handle.release()
        nothing_left(client)
    expected = job(threaded, replication="between-graph", epochs=6)
    assert told(result) == told(expected)


# -- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("in-graph", "in-graph"),
        ("in-graph", "between-graph"),
        ("between-graph", "in-graph"),
    ],
)
def test_it_goes_on_from_a_checkpoint(threaded, tmp_path, before, after):
    """Of either way, in the middle of an epoch, slots and all."""
    place = dtrain.Checkpoint(tmp_path / "ckpt", every=3)
    job(threaded, steps=7, checkpoint=place, replication=before)
    assert dtrain.checkpoints.find(place.dir)[0]["step"] == 7
    resumed = job(threaded, checkpoint=place, resume=True, replication=after, shards=3)
    assert told(resumed)[:3] == told(job(threaded, replication="between-graph"))[:3]


@pytest.mark.parametrize("replicas", [1, 2])
def test_once_more_when_all_is_done_changes_nothing(threaded, tmp_path, replicas):
    """With one replica, the other worker has a shard alone."""
    arguments = dict(checkpoint=dtrain.Checkpoint(tmp_path / "ckpt", every=3), replicas=replicas)
    first = told(job(threaded, **arguments))
    began = time.monotonic()
    assert told(job(threaded, resume=True, **arguments)) == first
    # Nobody waits for tasks that will never come.
    until(lambda: not hosts_of(threaded), 20, f"still here: {hosts_of(threaded)}")
    assert time.monotonic() - began < 25
    nothing_left(threaded)


# -- the versions of a shard --------------------------------------------------------------------


def verdict_of(step, *, ok=True):
    return Verdict(1, step, (0,), 1.0, ok, None if ok else "not finite")


def test_a_version_is_committed_by_its_verdict_or_by_whoever_builds_on_it():
    shard = GraphShard(0, 4, "four")
    shard.begin(4)
    shard.add(5, "five")
    # Ready for the verdict: the lead may have recorded it, so that the next generation wants it.
    assert (shard.version, shard.contents(4), shard.contents(5)) == (4, "four", "five")
    shard.decide(verdict_of(4))
    assert shard.version == 5
    with pytest.raises(dtrain.DTrainError, match="version 4 is wanted"):
        shard.contents(4)
    other = GraphShard(1, 4, "four")
    other.begin(4)
    other.add(5, "five")
    assert other.begin(5) == "five"
    assert other.version == 5
    with pytest.raises(dtrain.DTrainError, match="version 6 is wanted"):
        other.contents(6)


def test_what_is_refused_is_no_version():
    """Passed over before the verdict: whoever takes over then finds the version before."""
    shard = GraphShard(0, 4, "four")
    shard.begin(4)
    shard.add(5, "five")
    shard.decide(verdict_of(4, ok=False))
    assert shard.version == 4
    shard.skip(4)
    assert (shard.version, shard.contents(5)) == (4, "four")
    shard.decide(verdict_of(4))
    assert shard.version == 5
    assert shard.begin(5) == "four"


def test_a_step_that_is_not_next_is_an_error():
    with pytest.raises(dtrain.DTrainError, match="step 6 is to begin, found version 4"):
        GraphShard(0, 4, "four").begin(6)
