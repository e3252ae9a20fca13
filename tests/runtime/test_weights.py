"""What rows count: in the gradient, the loss and the metrics, the same on whatever runs it."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from sklearn import metrics as reference

import dtrain
from dtrain.errors import DataError, SpecError
from dtrain.models import MLP, Linear, Logistic

RNG = np.random.default_rng(4)
X = RNG.standard_normal((203, 5)).astype(np.float32)
Y = (X @ np.arange(5, dtype=np.float32)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)
#: some count nothing, and whole batches do
W = np.where(np.arange(203) < 60, 0, RNG.integers(0, 4, 203)).astype(np.float32)


def fit(client, model=None, x=X, y=Y, **arguments):
    arguments = dict(batch_size=7, epochs=2, client=client, progress=False, **arguments)
    return dtrain.fit(model or Linear(5), x, y, **arguments)


def bits(result):
    timing = ("seconds", "samples_per_s")
    history = [{k: v for k, v in e.items() if k not in timing} for e in result.history]
    return {name: value.tobytes() for name, value in result.params.items()}, history


def test_whole_weights_are_as_many_rows(threaded):
    """One step over all rows: that of a row as often as it counts."""
    model = Linear(5, dtype="float64")
    one = dict(steps=1, shuffle=False, replicas=2, optimizer=dtrain.optim.sgd(0.1))
    repeated = np.repeat(np.arange(203), W.astype(int))
    plain = dtrain.fit(
        model, X[repeated], Y[repeated], batch_size=1000, client=threaded, progress=False, **one
    )
    weighted = dtrain.fit(
        model, X, Y, sample_weight=W, batch_size=1000, client=threaded, progress=False, **one
    )
    for name, value in plain.params.items():
        assert weighted.params[name] == pytest.approx(value, rel=1e-6)
    assert weighted.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=1e-6)
    assert weighted.ledger.samples == [203]


def test_rows_that_count_nothing_are_as_if_they_were_not_there(threaded):
    """Whatever is in them."""
    strange = X.copy()
    strange[W == 0] = 100.0
    plain = fit(threaded, sample_weight=W, replicas=3)
    assert bits(fit(threaded, x=strange, sample_weight=W, replicas=3)) == bits(plain)
    assert bits(fit(threaded, x=strange, replicas=3)) != bits(plain)


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_only_their_proportions_matter(threaded, mode):
    arguments = dict(mode=mode, replicas=1 if mode == dtrain.Async() else 3)
    plain = bits(fit(threaded, sample_weight=W, **arguments))
    assert bits(fit(threaded, sample_weight=W * 2.0**20, **arguments)) == plain


@pytest.mark.parametrize("changes", [{}, {"replication": "in-graph"}], ids=["between", "in-graph"])
def test_the_same_bits_everywhere(anywhere, threaded_bits, changes):
    found = bits(weighted(anywhere, **changes))
    assert found == threaded_bits
    x, y = da.from_array(X, chunks=(31, -1)), da.from_array(LABELS, chunks=40)
    w = da.from_array(W, chunks=17)
    lying = weighted(anywhere, x, y, w, **changes)
    assert bits(lying)[0].keys() == found[0].keys()
    for name, value in weighted(anywhere).params.items():
        assert lying.params[name] == pytest.approx(value, rel=1e-4, abs=1e-6)


def weighted(client, x=X, y=LABELS, w=W, **changes):
    return fit(
        client, MLP([5, 8, 3]), x, y, sample_weight=w, replicas=4, shards=2, validation_split=0.2,
        metrics=["accuracy", "log_loss"], **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def threaded_bits(threaded):
    return bits(weighted(threaded))


def test_validation_rows_count_as_they_say(threaded):
    """The metrics are scikit-learn's, with its sample_weight."""
    result = fit(
        threaded, Logistic(5, 3), y=LABELS, validation_data=(X, LABELS, W), replicas=3,
        metrics=["accuracy", "log_loss"],
    )  # fmt: skip
    expected = reference.accuracy_score(LABELS, result.predict(X), sample_weight=W)
    assert result.metrics["val_accuracy"] == pytest.approx(expected, rel=1e-12)
    logs = reference.log_loss(LABELS, result.predict_proba(X), sample_weight=W)
    assert result.metrics["val_log_loss"] == pytest.approx(logs, rel=1e-5)
    assert result.metrics["val_loss"] == pytest.approx(logs, rel=1e-5)
    again = result.evaluate(da.from_array(X, chunks=(50, -1)), LABELS, sample_weight=W)
    assert again["accuracy"] == result.evaluate(X, LABELS, W)["accuracy"] == pytest.approx(expected)
    assert again["accuracy"] != pytest.approx(result.evaluate(X, LABELS)["accuracy"])


def test_regression_metrics_with_weights(threaded):
    names = {
        "mae": reference.mean_absolute_error,
        "mse": reference.mean_squared_error,
        "r2": reference.r2_score,
    }
    result = fit(threaded, validation_data=(X, Y, W), metrics=list(names), replicas=2)
    for name, function in names.items():
        expected = function(Y, result.predict(X), sample_weight=W)
        assert result.metrics[f"val_{name}"] == pytest.approx(expected, rel=1e-6)


class Pair(Linear):
    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        x, y = batch
        return super().loss_and_grads(params, (x, y), out=out)


def test_a_model_that_takes_no_weights_says_where(threaded):
    with pytest.raises(ValueError, match="too many values to unpack"):
        fit(threaded, Pair(5), sample_weight=W)


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (W[:-1], r"sample_weight: found shape \(202,\), expected \(203,\), one for each row of X"),
        (W[:, None], r"sample_weight: found shape \(203, 1\), expected \(203,\)"),
        (W - 1, r"sample_weight: found -1\.0, expected finite weights that are not negative"),
        (np.where(W > 2, np.nan, W), "sample_weight: found nan, expected finite weights"),
        (np.where(W > 2, np.inf, W), "sample_weight: found inf, expected finite weights"),
        (W * 0, "sample_weight: found zeros alone"),
        (W.astype(str), "sample_weight: found dtype <U32, expected numbers"),
        (da.from_array(W - 1, chunks=20), r"sample_weight: found -1\.0, expected finite"),
        (da.from_array(W * np.float32(np.nan), chunks=20), "sample_weight: found nan, expected"),
    ],
)
def test_weights_that_are_none(threaded, w, words):
    with pytest.raises(DataError, match=words):
        fit(threaded, sample_weight=w)


def test_validation_data_of_another_length(threaded):
    with pytest.raises(SpecError, match=r"validation_data: found tuple, expected \(X, y\), or"):
        fit(threaded, validation_data=(X,))
    with pytest.raises(DataError, match=r"validation weights: found shape \(3,\), expected"):
        fit(threaded, validation_data=(X, Y, W[:3]))
