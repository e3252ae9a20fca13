"""The plan of a job before it starts."""

from __future__ import annotations

import json

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dtrain

X = np.random.default_rng(0).standard_normal((1001, 64), dtype="float32")
Y = np.arange(1001) % 10
MODEL = dtrain.models.MLP([64, 128, 10])


def test_a_plan_has_every_row_of_every_variable_and_of_the_data_once():
    found = dtrain.plan(MODEL, X, Y, workers=3, replicas=5, validation_split=0.2)
    assert [v.name for v in found.variables] == list(MODEL.init(np.random.default_rng(0)))
    for variable in found.variables:
        at = 0
        for _, start, stop in variable.pieces:
            assert start == at
            at = stop
        assert at == variable.shape[0]
    assert sorted(s for w in found.workers for s in w.shards) == list(range(len(found.shards)))
    assert sorted(i for w in found.workers for i in w.replicas) == list(range(5))
    assert sum(w.bytes for w in found.workers) == sum(found.shards)
    assert sum(w.rows for w in found.workers) == 1001 - 200
    assert found.imbalance < 0.1


def test_a_large_variable_is_split_and_a_plan_says_so():
    model = dtrain.models.MLP([64, 128, 10])
    found = dtrain.plan(model, X, Y, workers=2)
    (large,) = (v for v in found.variables if v.shape == (64, 128))
    assert len(large.pieces) == 2
    assert f"0 (0-{large.pieces[0][2] - 1}), 1 (" in str(found)


def test_memory_is_twice_the_state_and_a_gradient_for_each_replica():
    found = dtrain.plan(MODEL, X, Y, workers=2, replicas=4, optimizer=dtrain.optim.adam())
    size = sum(found.shards)
    pages = 2 * (1 + 2) + 4
    assert pages * size <= found.shared_memory <= pages * (size + 4096) + 8192
    for worker in found.workers:
        assert worker.memory == 2 * (size + 2 * worker.bytes) + 2 * size


def test_a_plan_in_plain_values_and_in_words():
    found = dtrain.plan(MODEL, X, Y, workers=2, partitioner=dtrain.FixedShards(3))
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert set(found.to_dict()) == {"variables", "shards", "workers", "imbalance", "shared_memory"}
    for words in ("VARIABLE", "float32", "(64, 128)", "worker 1", "imbalance", "REPLICAS"):
        assert words in str(found)


def test_nothing_is_computed_and_a_whole_job_does():
    def never(block):
        raise AssertionError("computed")

    x = da.zeros((100, 64), chunks=(50, -1), dtype="float32").map_blocks(never, dtype="float32")
    job = dtrain.Job(MODEL, x, np.arange(100) % 10, placement="round-robin", shards=4)
    found = dtrain.plan(job, workers=2)
    assert [w.shards for w in found.workers] == [(0, 2), (1, 3)]
    assert [w.rows for w in found.workers] == [50, 50]


class Raises:
    def init(self, rng):
        raise RuntimeError("no")

    def loss_and_grads(self, params, batch):
        raise AssertionError

    def predict(self, params, x):
        raise AssertionError


def broken(sizes, workers):
    raise KeyError("where")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": Raises()}, dtrain.SpecError, "model: its init raised RuntimeError: no"),
        ({"placement": broken}, dtrain.SpecError, "placement: its function raised KeyError"),
        ({"placement": lambda s, w: [1] * len(s)}, dtrain.SpecError, "which has the lead"),
        ({"replicas": 2000}, dtrain.DataError, "rows"),
        ({"client": "tcp://127.0.0.1:1"}, dtrain.SpecError, "client and workers: found both"),
    ],
)
def test_what_cannot_be_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        dtrain.plan(**{"model": MODEL, "X": X, "y": Y, "workers": 2, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partitioner": 3}, r"partitioner: found 3, expected dtrain.FixedShards"),
        ({"partitioner": dtrain.FixedShards(2), "shards": 2}, "partitioner and shards: found both"),
        ({"placement": "best"}, "placement: found 'best', expected 'greedy' or 'round-robin'"),
        ({"placement": "function"}, "placement: found 'function'"),
    ],
)
def test_a_job_refuses_what_is_none(change, message):
    with pytest.raises(dtrain.SpecError, match=message):
        dtrain.Job(MODEL, X, Y, **change)


@pytest.mark.parametrize("placement", ["greedy", "round-robin"])
def test_the_job_is_as_it_was_planned(placement):
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        job = dtrain.Job(MODEL, X, Y, partitioner=dtrain.MaxSize("9kB"), placement=placement)
        planned = dtrain.plan(job, client=client)
        assert not dtrain.jobs(client)
        handle = dtrain.submit(job, client=client)
        handle.wait(timeout=60, progress=False)
        status = handle.status()
    assert [status["placement"][str(s)]["bytes"] for s in range(len(planned.shards))] == list(
        planned.shards
    )
    for worker in planned.workers:
        own = [int(s) for s, p in status["placement"].items() if p["worker"] == worker.worker]
        assert tuple(own) == worker.shards
    assert status["imbalance"] == pytest.approx(planned.imbalance)
    assert status["shards"] == {s: p["worker"] for s, p in status["placement"].items()}
