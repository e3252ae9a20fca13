"""A dict of arrays reaches a model of one's own as a dict, the same from everywhere."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

import dtrain
from dtrain.errors import DataError
from dtrain.models import Linear

RNG = np.random.default_rng(0)
DENSE = RNG.standard_normal((120, 3)).astype(np.float32)
KIND = RNG.integers(0, 4, 120).astype(np.int8)
Y = (DENSE.sum(axis=1) + KIND).astype(np.float32)
X = {"dense": DENSE, "kind": KIND}


class Two:
    """A weight for each dense feature, and a value for each kind."""

    def init(self, rng):
        return {"w": np.zeros(3, np.float32), "table": np.zeros(4, np.float32)}

    def predict(self, params, x):
        assert set(x) == {"dense", "kind"}
        assert (x["dense"].dtype, x["kind"].dtype) == (np.float32, np.int8)
        return x["dense"] @ params["w"] + params["table"][x["kind"]]

    def loss_and_grads(self, params, batch):
        x, y = batch
        r = (self.predict(params, x) - y) / len(y)
        table = np.bincount(x["kind"], r, minlength=4).astype(np.float32)
        return float(np.mean((r * len(y)) ** 2)), {"w": 2 * x["dense"].T @ r, "table": 2 * table}


def fit(client, x, y=Y, **arguments):
    arguments = {"validation_split": 0.25, "metrics": ["mse"], "epochs": 60, **arguments}
    result = dtrain.fit(
        Two(), x, y, optimizer=dtrain.optim.sgd(0.1), batch_size=16, client=client,
        progress=False, **arguments,
    )  # fmt: skip
    return {k: v.tobytes() for k, v in result.params.items()}, result


def lazy(dense=(50, -1), kind=30):
    return {"dense": da.from_array(DENSE, chunks=dense), "kind": da.from_array(KIND, chunks=kind)}


def test_a_dict_of_arrays(threaded):
    plain, result = fit(threaded, X)
    assert result.metrics["val_mse"] < 1e-3
    assert result.ledger.samples == [90] * 60
    assert fit(threaded, lazy())[0] == plain
    every = da.from_array(np.ones(120, bool), chunks=30)
    dense, kind = lazy((30, -1)).values()
    with dask.config.set({"dtrain.data-memory": 0}):
        assert fit(threaded, {"dense": dense[every], "kind": kind[every]})[0] == plain


def test_predictions_of_a_dict(threaded):
    _, result = fit(threaded, X, epochs=5)
    eager = result.predict(X)
    # Sums over other numbers of rows at once round differently.
    np.testing.assert_allclose(result.predict(lazy((30, -1))).compute(), eager, rtol=1e-5)
    found = result.evaluate(X, Y)["mse"]
    assert found == pytest.approx(np.mean((eager - Y) ** 2), rel=1e-5)
    again = result.evaluate(lazy((30, -1)), da.from_array(Y, chunks=30))["mse"]
    assert again == pytest.approx(found)


@pytest.mark.cluster
def test_records_of_another_worker(forked):
    one = sorted(forked.scheduler_info()["workers"])[0]
    far = dict(zip(X, forked.persist(list(lazy().values()), workers=[one]), strict=True))
    assert fit(forked, far, replicas=2, epochs=2)[0] == fit(forked, X, replicas=2, epochs=2)[0]


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ({}, "X: found an empty dict"),
        ({"dense": DENSE, "kind": KIND[:9]}, "X: found .*'kind': 9} rows"),
        ({"dense": DENSE, "kind": lazy()["kind"]}, "X: found 'kind' of Dask and 'dense' in the"),
        ({"dense": DENSE, "kind": KIND.astype(str)}, r"X\['kind'\]: found dtype <U"),
        ({"dense": {"a": DENSE}}, r"X\['dense'\]: found dict"),
    ],
)  # fmt: skip
def test_what_is_refused(threaded, x, words):
    with pytest.raises(DataError, match=words):
        fit(threaded, x)


def test_validation_and_built_in_models(threaded):
    with pytest.raises(DataError, match=r"validation X: found the inputs \('dense',\)"):
        fit(threaded, X, validation_split=None, validation_data=({"dense": DENSE}, Y))
    with pytest.raises(DataError, match="X: found a dict, expected one array for Linear"):
        dtrain.fit(Linear(3), X, Y, client=threaded, progress=False)
