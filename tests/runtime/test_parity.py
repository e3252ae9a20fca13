"""Synchronous training with R replicas equals plain training on the concatenated batch."""

from __future__ import annotations

import numpy as np
import pytest

import dtrain
from dtrain.models import MLP, Linear, Logistic

from .reference import difference, train

ROWS, FEATURES = 211, 7


def problem(kind: str, dtype: str):
    """A model and data of ROWS rows that it can learn."""
    rng = np.random.default_rng(5)
    X = rng.standard_normal((ROWS, FEATURES)).astype(dtype)
    if kind == "linear":
        y = (X @ rng.standard_normal((FEATURES, 2)) + 0.1).astype(dtype)
        return Linear(FEATURES, n_outputs=2, dtype=dtype), X, y
    labels = np.argmax(X @ rng.standard_normal((FEATURES, 4)), axis=1)
    if kind == "logistic":
        return Logistic(FEATURES, n_classes=4, l2=0.01, dtype=dtype), X, labels
    return MLP([FEATURES, 9, 4], activation="tanh", dtype=dtype), X, labels


@pytest.mark.parametrize("kind", ["linear", "logistic", "mlp"])
@pytest.mark.parametrize(("replicas", "batch_size"), [(1, 16), (2, 16), (3, 13)])
@pytest.mark.parametrize(
    ("dtype", "optimizer", "bound"), [("float32", "sgd", 1e-5), ("float64", "adam", 1e-9)]
)
def test_parity(threaded, kind, replicas, batch_size, dtype, optimizer, bound):
    """100 steps over parts of uneven size whose last batches are ragged."""
    model, X, y = problem(kind, dtype)
    lr = 0.05 if optimizer == "sgd" else 0.01
    result = dtrain.fit(
        model,
        X,
        y,
        optimizer=getattr(dtrain.optim, optimizer)(lr),
        replicas=replicas,
        batch_size=batch_size,
        steps=100,
        client=threaded,
        progress=False,
    )
    expected, losses = train(
        model, optimizer, X, y, replicas=replicas, batch_size=batch_size, steps=100, lr=lr
    )
    assert result.version == 100
    assert difference(result.params, expected) < bound
    assert np.mean(losses[-10:]) < losses[0]
    assert result.history[0]["loss"] == pytest.approx(
        expected_epoch_loss(losses, replicas, batch_size), rel=1e-4
    )


def expected_epoch_loss(losses, replicas, batch_size):
    """The mean loss over the samples of the first epoch."""
    from dtrain.machines.cursor import Plan

    plan = Plan(ROWS, replicas, batch_size, 1, 100)
    weights = [
        sum(plan.samples(part, step) for part in plan.members(step))
        for step in range(plan.steps_per_epoch)
    ]
    return np.average(losses[: plan.steps_per_epoch], weights=weights)


@pytest.mark.parametrize("chunks", [(100, 7, 104), (1, 210), (53, 53, 53, 52)])
def test_parity_with_uneven_chunks(threaded, chunks):
    """Dask arrays, cut anywhere, give the bits of the NumPy array."""
    import dask.array as da

    model, X, y = problem("mlp", "float32")
    arguments = dict(replicas=2, batch_size=16, steps=60, client=threaded, progress=False)
    plain = dtrain.fit(model, X, y, optimizer=dtrain.optim.sgd(0.05), **arguments)
    dX, dy = (da.from_array(a, chunks=(chunks, *a.shape[1:])).persist() for a in (X, y))
    chunked = dtrain.fit(model, dX, dy, optimizer=dtrain.optim.sgd(0.05), **arguments)
    for name, value in plain.params.items():
        assert value.tobytes() == chunked.params[name].tobytes()
    assert [e["loss"] for e in plain.history] == [e["loss"] for e in chunked.history]


def test_dask_chunks_of_x_and_y_may_differ(threaded):
    import dask.array as da

    model, X, y = problem("logistic", "float32")
    arguments = dict(replicas=2, batch_size=16, steps=20, client=threaded, progress=False)
    plain = dtrain.fit(model, X, y, **arguments)
    mixed = dtrain.fit(
        model, da.from_array(X, chunks=(40, -1)), da.from_array(y, chunks=64), **arguments
    )
    for name, value in plain.params.items():
        assert value.tobytes() == mixed.params[name].tobytes()


def test_no_shuffle_takes_rows_as_they_lie(threaded):
    model, X, y = problem("linear", "float64")
    arguments = dict(replicas=2, batch_size=20, steps=12)
    result = dtrain.fit(
        model, X, y, optimizer=dtrain.optim.sgd(0.05), shuffle=False, client=threaded,
        progress=False, **arguments,
    )  # fmt: skip
    expected, _ = train(model, "sgd", X, y, shuffle=False, **arguments)
    assert difference(result.params, expected) < 1e-12
