"""Metrics of validation rows: ours beside scikit-learn's, and functions of one's own."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from sklearn.metrics import top_k_accuracy_score

import dtrain
from dtrain import metrics
from dtrain.errors import DataError, SpecError
from dtrain.models import MLP, Linear

RNG = np.random.default_rng(8)
X = RNG.standard_normal((300, 6)).astype(np.float32)
LABELS = np.argmax(X[:, :5] + RNG.normal(size=(300, 5)) / 2, axis=1)
W = RNG.integers(0, 3, 300).astype(float)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("w", [None, W])
def test_the_k_largest_scores_as_scikit_learn_has_it(k, w):
    scores = RNG.normal(size=(300, 5))
    name = f"top_{k}_accuracy"
    found = metrics.value(name, metrics.sums(name, scores, LABELS, w))
    assert found == pytest.approx(top_k_accuracy_score(LABELS, scores, k=k, sample_weight=w))


def test_the_k_largest_of_two_classes_with_one_score():
    scores, y = np.array([1.0, -1.0, 2.0]), np.array([1, 1, 0])
    assert metrics.sums("top_1_accuracy", scores, y) == (3.0, 1.0)
    assert metrics.sums("top_2_accuracy", scores, y) == (3.0, 3.0)


def brier(y, scores):
    """A number for each row."""
    found = metrics.probabilities(scores)
    return ((found - np.eye(5)[y]) ** 2).sum(axis=1)


def mean_brier(y, scores):
    return brier(y, scores).mean()


def fit(client, **arguments):
    arguments = dict(
        batch_size=16, epochs=2, client=client, progress=False, validation_split=0.3,
        replicas=3, **arguments,
    )  # fmt: skip
    return dtrain.fit(MLP([6, 8, 5]), X, LABELS, **arguments)


@pytest.mark.cluster
@pytest.mark.parametrize("replication", ["between-graph", "in-graph"])
def test_functions_and_names_together(forked, replication):
    wanted = ["accuracy", brier, "top_2_accuracy", mean_brier]
    result = fit(forked, metrics=wanted, replication=replication)
    history = result.history[-1]
    assert history["val_brier"] == pytest.approx(history["val_mean_brier"], rel=1e-9)
    assert 0 < history["val_accuracy"] < history["val_top_2_accuracy"] <= 1
    found = result.evaluate(X, LABELS)
    assert found["brier"] == pytest.approx(brier(LABELS, result.scores(X)).mean())
    lazy = result.evaluate(da.from_array(X, chunks=(70, -1)), da.from_array(LABELS, chunks=70))
    assert lazy == pytest.approx(found)


def test_another_process_has_the_functions_too_but_no_file(threaded, tmp_path):
    handle = dtrain.submit(
        MLP([6, 8, 5]), X, LABELS, metrics=[brier, "accuracy"], validation_split=0.3,
        client=threaded,
    )  # fmt: skip
    assert handle.wait(timeout=30) == "SUCCEEDED"
    result = dtrain.attach(handle.id, threaded).result()
    assert set(result.evaluate(X, LABELS)) == {"loss", "brier", "accuracy"}
    result.save(tmp_path / "model")
    assert set(dtrain.load(tmp_path / "model").evaluate(X, LABELS)) == {"loss", "accuracy"}


def wrong(y, scores):
    return scores


def raises(y, scores):
    raise LookupError("not today")


def test_what_functions_may_not_do(threaded):
    with pytest.raises(DataError, match=r"metric wrong: found float32 of shape \(\d+, 5\), expect"):
        fit(threaded, metrics=[wrong])
    with pytest.raises(LookupError, match="not today"):
        fit(threaded, metrics=[raises])
    with pytest.raises(DataError, match="metric mean_brier: found one number for all rows"):
        fit(threaded, metrics=[mean_brier], sample_weight=W + 1)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (["top_0_accuracy"], "found 'top_0_accuracy'.*accuracy, log_loss or top_<k>_accuracy"),
        ([lambda y, scores: y], "expected a function with a name of its own"),
        ([brier, brier], "found 'brier' twice"),
        (["accuracy", "accuracy"], "found 'accuracy' twice"),
        ([3], "found 3, expected some of accuracy, log_loss"),
    ],
)
def test_metrics_that_are_none(threaded, wanted, words):
    with pytest.raises(SpecError, match=words):
        fit(threaded, metrics=wanted)


def test_the_k_largest_are_of_classes(threaded):
    with pytest.raises(SpecError, match="found 'top_2_accuracy', expected some of mae, mse, r2"):
        dtrain.Job(Linear(6), X, LABELS, metrics=["top_2_accuracy"], validation_split=0.1)
