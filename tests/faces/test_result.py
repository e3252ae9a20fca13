"""What training gives back: predictions, evaluation, the saved model."""

from __future__ import annotations

import json
import stat

import dask.array as da
import numpy as np
import pytest

import dtrain
from dtrain.models import MLP, Linear, Logistic
from dtrain.result import Result

RNG = np.random.default_rng(0)
X = RNG.standard_normal((50, 4)).astype(np.float32)


def result(model, classes=None, metric_names=(), **changes):
    params = model.init(np.random.default_rng(3))
    params = {k: v + np.float32(0.1) for k, v in params.items()}
    values = dict(
        model=model,
        params=params,
        version=7,
        history=[{"epoch": 1, "loss": 0.5}],
        metrics={"loss": 0.5},
        ledger=None,
        classes=classes,
        classification=model.task == "classification",
        metric_names=metric_names,
    )
    return Result(**{**values, **changes})


CLASSIFIER = result(MLP([4, 6, 3]), np.array(["ant", "bee", "cat"]), ("accuracy", "log_loss"))
REGRESSOR = result(Linear(4, n_outputs=2), metric_names=("mse", "r2"))


def test_labels_come_back_as_they_were():
    scores = CLASSIFIER.scores(X)
    assert scores.shape == (50, 3)
    assert (CLASSIFIER.predict(X) == CLASSIFIER.classes[scores.argmax(axis=1)]).all()
    proba = CLASSIFIER.predict_proba(X)
    assert (proba.argmax(axis=1) == scores.argmax(axis=1)).all()
    assert np.allclose(proba.sum(axis=1), 1, atol=1e-6)


def test_extreme_scores_keep_probabilities_finite():
    wild = result(Logistic(4, n_classes=3))
    wild.params = {k: v * np.float32(1e6) + 1 for k, v in wild.params.items()}
    assert np.isfinite(wild.predict_proba(X)).all()


@pytest.mark.parametrize("chunks", [(50, -1), (7, -1), ((1, 49), -1)])
@pytest.mark.parametrize("who", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_dask_input_is_lazy_and_gives_the_same(who, chunks):
    dX = da.from_array(X, chunks=chunks)
    lazy = who.predict(dX)
    assert isinstance(lazy, da.Array)
    expected = who.predict(X)
    assert lazy.dtype == expected.dtype
    assert lazy.shape == expected.shape
    assert lazy.chunks[0] == dX.chunks[0]
    found = lazy.compute()
    if expected.dtype.kind == "f":
        assert np.allclose(found, expected, atol=1e-6)
    else:
        assert (found == expected).all()
    if who.classification:
        assert np.allclose(who.predict_proba(dX).compute(), who.predict_proba(X), atol=1e-6)


def test_dask_chunks_along_columns_are_refused():
    with pytest.raises(dtrain.DataError, match="chunks of rows"):
        CLASSIFIER.predict(da.from_array(X, chunks=(10, 2)))


def test_evaluate_is_exact_in_blocks():
    y = np.array(["ant", "bee", "cat"])[RNG.integers(0, 3, 50)]
    eager = CLASSIFIER.evaluate(X, y)
    assert set(eager) == {"loss", "accuracy", "log_loss"}
    assert eager["accuracy"] == np.mean(CLASSIFIER.predict(X) == y)
    assert eager["loss"] == pytest.approx(eager["log_loss"], rel=1e-5)
    lazy = CLASSIFIER.evaluate(da.from_array(X, chunks=(9, -1)), da.from_array(y, chunks=9))
    assert lazy == pytest.approx(eager, rel=1e-6)
    empty = da.concatenate([da.from_array(X[:0], chunks=(0, -1)), da.from_array(X, chunks=(9, -1))])
    none = da.concatenate([da.from_array(y[:0], chunks=0), da.from_array(y, chunks=9)])
    assert CLASSIFIER.evaluate(empty, none) == pytest.approx(eager, rel=1e-6)
    assert CLASSIFIER.evaluate(da.from_array(X, chunks=(9, -1)), y) == pytest.approx(eager)
    assert CLASSIFIER.evaluate(X, da.from_array(y, chunks=20)) == pytest.approx(eager)
    with pytest.raises(dtrain.DataError, match="same chunks"):
        CLASSIFIER.evaluate(da.from_array(X, chunks=(9, -1)), da.from_array(y, chunks=10))
    with pytest.raises(dtrain.DataError, match="dog"):
        CLASSIFIER.evaluate(X, np.where(y == "ant", "dog", y))


def test_regression_metrics_against_their_definitions():
    y = RNG.standard_normal((50, 2))
    found = REGRESSOR.evaluate(X, y)
    residual = REGRESSOR.predict(X) - y
    assert found["mse"] == pytest.approx(np.mean(residual**2), rel=1e-5)
    assert found["r2"] == pytest.approx(
        1 - np.sum(residual**2) / np.sum((y - y.mean()) ** 2), rel=1e-5
    )


def test_regression_has_no_probabilities():
    with pytest.raises(dtrain.SpecError, match="regression"):
        REGRESSOR.predict_proba(X)


@pytest.mark.parametrize("who", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_save_and_load(who, tmp_path):
    place = who.save(tmp_path / "deep" / "model")
    back = dtrain.load(place)
    assert {k: v.tobytes() for k, v in back.params.items()} == {
        k: v.tobytes() for k, v in who.params.items()
    }
    assert back.model == who.model
    assert back.version == 7
    assert back.history == who.history
    assert (back.predict(X) == who.predict(X)).all()
    assert {p.name for p in place.iterdir()} == {"model.json", "params.safetensors"}
    for file in place.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in place.parent.iterdir()] == ["model"]


def test_saving_again_replaces_a_model_and_nothing_else(tmp_path):
    place = CLASSIFIER.save(tmp_path / "model")
    REGRESSOR.save(place)
    assert dtrain.load(place).model == REGRESSOR.model
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(dtrain.SpecError, match=r"notes\.txt"):
        CLASSIFIER.save(tmp_path / "other")


def test_a_damaged_model_is_told(tmp_path):
    place = CLASSIFIER.save(tmp_path / "model")
    params = place / "params.safetensors"
    raw = bytearray(params.read_bytes())
    raw[-3] ^= 0x10
    params.write_bytes(raw)
    with pytest.raises(dtrain.ModelFileError, match="damaged"):
        dtrain.load(place)
    params.unlink()
    with pytest.raises(dtrain.ModelFileError, match="missing"):
        dtrain.load(place)
    (place / "model.json").write_text("{")
    with pytest.raises(dtrain.ModelFileError, match="model"):
        dtrain.load(place)
    with pytest.raises(dtrain.ModelFileError, match="no saved model"):
        dtrain.load(tmp_path / "nowhere")


def test_a_manifest_of_another_format_is_told(tmp_path):
    place = CLASSIFIER.save(tmp_path / "model")
    manifest = json.loads((place / "model.json").read_text())
    (place / "model.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(dtrain.ModelFileError, match="format 99, expected 1"):
        dtrain.load(place)


class Bare:
    """A model without config: it cannot be rebuilt from disk."""

    task = "regression"

    def init(self, rng):
        return {"w": np.zeros(4, np.float32)}

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        raise NotImplementedError

    def predict(self, params, x):
        return x @ params["w"]


def test_a_model_without_config_wants_the_model(tmp_path):
    place = result(Bare()).save(tmp_path / "model")
    with pytest.raises(dtrain.SpecError, match=r"load\(path, model="):
        dtrain.load(place)
    assert dtrain.load(place, model=Bare()).predict(X).shape == (50,)
