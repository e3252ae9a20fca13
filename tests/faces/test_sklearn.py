"""The estimators are what scikit-learn takes for such."""

from __future__ import annotations

import pickle

import dask.array as da
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed (the extra sklearn)")

from distributed import Client, LocalCluster
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import dtrain
from dtrain.cluster import current_client
from dtrain.sklearn import DTrainClassifier, DTrainRegressor

RNG = np.random.default_rng(1)
X = RNG.normal(size=(240, 4))
LABELS = np.where(X[:, 0] + X[:, 1] > 0, "up", "down")
Y = X @ np.arange(4.0)
FAST = dict(optimizer=dtrain.optim.adam(0.02), random_state=0)


def test_without_a_client_workers_of_this_process_train():
    """Before any other test has a client."""
    assert current_client() is None
    model = DTrainClassifier(epochs=10, replicas=2, **FAST).fit(X, LABELS)
    assert model.result_.ledger.samples == [240] * 10
    assert model.score(X, LABELS) > 0.9
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


@pytest.fixture(scope="module")
def client():
    """Two workers in this very process."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@parametrize_with_checks([DTrainClassifier(), DTrainRegressor()])
def test_scikit_learn_s_own_checks(estimator, check, client):
    check(estimator)


def test_in_a_pipeline_and_a_grid_search(client):
    scaled = make_pipeline(StandardScaler(), DTrainClassifier(epochs=5, **FAST))
    search = GridSearchCV(
        scaled,
        {"dtrainclassifier__hidden_layer_sizes": [(), (8,)], "dtrainclassifier__l2": [0.0, 10.0]},
        cv=3,
    ).fit(X * 100, LABELS)
    assert search.best_params_["dtrainclassifier__l2"] == 0.0
    assert search.best_score_ > 0.9
    fresh = clone(search.best_estimator_)
    assert not hasattr(fresh[-1], "result_")
    fresh.set_params(dtrainclassifier__epochs=1).fit(X * 100, LABELS)
    assert len(fresh[-1].history_) == 1
    assert set(fresh.predict(X)) <= {"up", "down"}


def test_the_same_seed_gives_the_same_model(client):
    first, again = (DTrainRegressor(epochs=2, **FAST).fit(X, Y) for _ in range(2))
    np.testing.assert_array_equal(first.predict(X), again.predict(X))
    other = clone(first).set_params(random_state=1).fit(X, Y)
    assert not np.array_equal(first.predict(X), other.predict(X))


def test_dask_arrays_stay_where_they_lie(client):
    dX, labels = da.from_array(X, chunks=(70, -1)), da.from_array(LABELS, chunks=70)
    model = DTrainClassifier(epochs=20, **FAST).fit(dX, labels)
    assert model.classes_.tolist() == ["down", "up"]
    assert model.n_features_in_ == 4
    said = model.predict(dX)
    assert isinstance(said, da.Array)
    np.testing.assert_array_equal(said.compute(), model.predict(X))
    score = model.score(dX, labels)
    assert score == pytest.approx(model.score(X, LABELS)) == np.mean(model.predict(X) == LABELS)
    assert score > 0.9
    assert model.predict_proba(dX).compute().sum(axis=1) == pytest.approx(1)
    unknown = dX[dX[:, 0] > 0]
    assert len(model.predict(unknown).compute()) == np.count_nonzero(X[:, 0] > 0)


def test_frames_with_categories(client):
    pd = pytest.importorskip("pandas", reason="pandas is not installed (the extra dataframe)")
    dd = pytest.importorskip("dask.dataframe", reason="dask.dataframe wants pyarrow")
    frame = pd.DataFrame({"a": X[:, 0], "kind": pd.Categorical(np.where(X[:, 1] > 0, "b", "c"))})
    y = pd.Series(X[:, 0] + (X[:, 1] > 0), name="y")
    eager = DTrainRegressor((), epochs=40, **FAST).fit(frame, y)
    assert eager.feature_names_in_.tolist() == ["a", "kind"]
    assert eager.score(frame, y) > 0.95
    lazy = dd.from_pandas(frame.assign(y=y), npartitions=3)
    other = clone(eager).fit(lazy[["a", "kind"]], lazy["y"])
    np.testing.assert_array_equal(other.predict(frame), eager.predict(frame))
    assert other.score(lazy, lazy["y"]) == pytest.approx(eager.score(frame, y))


def test_partial_fit_goes_on(client):
    model = DTrainClassifier(optimizer=dtrain.optim.sgd(0.01), random_state=0)
    scores = []
    for _ in range(3):
        for part in range(4):
            rows = slice(part * 60, part * 60 + 60)
            model.partial_fit(X[rows], LABELS[rows], classes=["up", "down"])
        scores.append(model.score(X, LABELS))
    assert scores[0] < scores[-1]
    with pytest.raises(ValueError, match=r"classes: found .* expected those of the first call"):
        model.partial_fit(X, LABELS, classes=["up", "left"])
    with pytest.raises(ValueError, match="y: found the label 'left', expected one of"):
        model.partial_fit(X[:2], ["up", "left"])


def test_a_first_part_may_lack_a_class(client):
    model = DTrainClassifier(**FAST).partial_fit(X[:5], ["up"] * 5, classes=["down", "up"])
    assert model.predict_proba(X).shape == (240, 2)


def test_weights_count(client):
    w = np.where(LABELS == "up", 0.0, 1.0)
    model = DTrainClassifier(epochs=5, **FAST).fit(X, LABELS, sample_weight=w)
    assert set(model.predict(X)) == {"down"}
    assert model.score(X, LABELS, sample_weight=w) == 1.0


def test_a_client_that_no_clone_could_have(client):
    with pytest.raises(ValueError, match="client: found Client, expected the address of a sched"):
        DTrainClassifier(client=client).fit(X, LABELS)


def test_the_address_of_a_scheduler(client):
    model = DTrainRegressor((), epochs=1, client=client.scheduler.address, random_state=0)
    assert model.fit(X, Y).result_.version > 0
