"""Asynchronous training: every gradient applied once, the account exact, and it learns."""

from __future__ import annotations

import numpy as np
import pytest

import dtrain
from dtrain.models import MLP, Linear

from .conftest import processes


def check_digits(digits, client):
    X, y = digits
    result = dtrain.fit(
        MLP([64, 128, 10]),
        X,
        y,
        optimizer=dtrain.optim.adam(3e-3),
        mode=dtrain.Async(),
        epochs=15,
        validation_split=0.2,
        metrics=["accuracy"],
        client=client,
        progress=False,
    )
    assert result.metrics["val_accuracy"] >= 0.95
    ledger = result.ledger
    per_epoch = sum(-(-size // 32) for size in (719, 719))
    assert ledger.applied == result.version == 15 * per_epoch
    assert (ledger.late, ledger.rejected, ledger.replayed, ledger.duplicates) == (0, 0, 0, 0)
    assert ledger.samples == [1438] * 15
    assert sum(ledger.staleness.values()) == ledger.applied
    assert max(ledger.staleness) > 0, "two replicas never overlapped"
    assert [e["samples"] for e in result.history] == [1438] * 15


def test_digits(digits, threaded):
    check_digits(digits, threaded)


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_digits_on_processes(digits, transport):
    with processes(2, **{"dtrain.transport": transport}) as client:
        check_digits(digits, client)


def lead_last(sizes, workers):
    """All shards but the last are at the last worker: that one is the lead shard."""
    return [len(workers) - 1] * (len(sizes) - 1) + [0]


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_the_lead_is_the_first_shard_of_the_chief_whichever_that_is(digits, transport):
    X, y = digits
    with processes(2, **{"dtrain.transport": transport}) as client:
        handle = dtrain.submit(
            MLP([64, 128, 10]), X, y, mode=dtrain.Async(), epochs=3, shards=4,
            placement=lead_last, client=client,
        )  # fmt: skip
        handle.wait(timeout=60, progress=False)
        status, result = handle.status(), handle.result()
    assert len({status["shards"][s] for s in "012"}) == 1
    assert status["shards"]["3"] == status["replicas"]["0"] != status["shards"]["0"]
    assert result.ledger.samples == [1797] * 3
    assert result.ledger.applied == result.version == sum(result.ledger.staleness.values())


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (1, 3), (5, 2), (2, 4)])
def test_accounts_add_up(threaded, replicas, shards):
    """More replicas than workers, ragged parts, several shards."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((103, 6))
    y = X @ rng.standard_normal(6)
    result = dtrain.fit(
        Linear(6, dtype="float64"), X, y, optimizer=dtrain.optim.sgd(0.02), mode=dtrain.Async(),
        replicas=replicas, shards=shards, batch_size=7, epochs=30, client=threaded, progress=False,
    )  # fmt: skip
    assert result.ledger.samples == [103] * 30
    assert sum(result.ledger.staleness.values()) == result.ledger.applied == result.version
    assert result.history[-1]["loss"] < 1e-2 * result.history[0]["loss"]


def test_one_replica_is_plain_sgd(threaded):
    """Without another replica there is no staleness: the bits of one process."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((64, 5))
    y = X @ rng.standard_normal(5)
    arguments = dict(
        optimizer=dtrain.optim.sgd(0.05, momentum=0.9), replicas=1, batch_size=10, epochs=3,
        client=threaded, progress=False,
    )  # fmt: skip
    model = Linear(5, dtype="float64")
    found = dtrain.fit(model, X, y, mode=dtrain.Async(), **arguments)
    expected = dtrain.fit(model, X, y, mode=dtrain.Sync(), **arguments)
    for name, value in expected.params.items():
        assert value.tobytes() == found.params[name].tobytes()
    assert dict(found.ledger.staleness) == {0: 21}


def test_steps_end_it(threaded):
    rng = np.random.default_rng(2)
    X, y = rng.standard_normal((100, 3)), rng.standard_normal(100)
    result = dtrain.fit(
        Linear(3), X, y, mode=dtrain.Async(), replicas=3, batch_size=10, steps=17,
        client=threaded, progress=False,
    )  # fmt: skip
    assert result.version == result.ledger.applied == 17


class Slow(Linear):
    """The replica that gets a marked row takes its time, by waiting for the other."""

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        import threading

        if batch[0][0, 0] < 0:
            threading.Event().wait(0.05)
        return super().loss_and_grads(params, batch, out=out, rng=rng)


def test_a_done_replica_takes_the_slow_ones_rest(threaded):
    """Nobody waits for a slow replica but at the end of the epoch; every row is used once."""
    X = np.ones((80, 2), np.float32)
    X[40:, 0] = -1
    y = np.zeros(80, np.float32)
    result = dtrain.fit(
        Slow(2), X, y, mode=dtrain.Async(), replicas=2, batch_size=4, shuffle=False,
        client=threaded, progress=False,
    )  # fmt: skip
    assert result.ledger.samples == [80]
    assert result.ledger.applied == 20
