"""Data frames of pandas and Dask: trained on where they lie, and predicted on with their index."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from dask import delayed

import dtrain
from dtrain.errors import DataError
from dtrain.models import MLP, Linear, Logistic

pd = pytest.importorskip("pandas", reason="pandas is not installed (the extra dataframe)")
dd = pytest.importorskip("dask.dataframe", reason="dask.dataframe wants pandas and pyarrow")

RNG = np.random.default_rng(3)
ROWS = 300
FRAME = pd.DataFrame(
    {
        "size": RNG.normal(size=ROWS).astype(np.float32),
        "count": pd.array(RNG.integers(0, 5, ROWS), dtype="Int16"),
        "colour": pd.Categorical(RNG.choice(["red", "green", "blue"], ROWS)),
    },
    # An index that is neither sorted nor unique.
    index=RNG.integers(0, 50, ROWS),
)
FRAME["price"] = (FRAME["size"] * 2 + FRAME["count"].astype("float32")).astype("float32")
FRAME["kind"] = np.where(FRAME["price"] > 2, "dear", np.where(FRAME["price"] > 0, "fair", "low"))
FEATURES = ["size", "count", "colour"]
WIDTH = 5


def array(frame=FRAME):
    colours = [frame["colour"] == name for name in ("blue", "green", "red")]
    return np.stack([frame["size"], frame["count"], *colours], axis=1).astype(np.float32)


def lazy(parts=4):
    """Partitions of different sizes, one of them empty, in the order of the frame."""
    cuts = np.linspace(0, ROWS, parts + 1).astype(int)
    frames = [FRAME.iloc[a:b] for a, b in pairwise(cuts)]
    frames.insert(1, FRAME.iloc[:0])
    return dd.from_map(lambda frame: frame, frames, meta=FRAME.iloc[:0])


def fit(client, model, X, y, **arguments):
    arguments = dict(batch_size=16, epochs=2, client=client, progress=False, **arguments)
    return dtrain.fit(model, X, y, **arguments)


def bits(result):
    timing = ("seconds", "samples_per_s")
    history = [{k: v for k, v in e.items() if k not in timing} for e in result.history]
    return {name: value.tobytes() for name, value in result.params.items()}, history


def test_a_frame_is_the_array_of_its_columns(threaded):
    arguments = dict(validation_split=0.2, metrics=["mse"])
    plain = bits(fit(threaded, Linear(WIDTH), array(), FRAME["price"].to_numpy(), **arguments))
    found = fit(threaded, Linear(WIDTH), FRAME[FEATURES], FRAME["price"], **arguments)
    assert bits(found) == plain
    frame = lazy()
    found = fit(threaded, Linear(WIDTH), frame[FEATURES], frame["price"], **arguments)
    assert bits(found) == plain
    found = fit(threaded, Linear(WIDTH), frame[FEATURES].persist(), frame[["price"]], **arguments)
    assert bits(found) == plain


@pytest.mark.cluster
def test_labels_and_weights_of_a_frame_on_processes(forked):
    weights = np.where(FRAME["size"] > 0, 2.0, 1.0)
    plain = fit(
        forked, MLP([WIDTH, 8, 3]), array(), FRAME["kind"].to_numpy().astype(str),
        sample_weight=weights, metrics=["accuracy"], validation_data=(array(), FRAME["kind"]),
    )  # fmt: skip
    frame = lazy()
    found = fit(
        forked, MLP([WIDTH, 8, 3]), frame[FEATURES], frame["kind"],
        sample_weight=(frame["size"] > 0).astype(float) + 1,
        metrics=["accuracy"], validation_data=(frame[FEATURES], frame["kind"]),
    )  # fmt: skip
    assert bits(found) == bits(plain)
    assert found.classes.tolist() == ["dear", "fair", "low"]
    assert found.predict(FRAME[FEATURES]).isin(["dear", "fair", "low"]).all()


@pytest.fixture(scope="module")
def classifier(threaded):
    return fit(
        threaded, Logistic(WIDTH, 3), FRAME[FEATURES], FRAME["kind"], metrics=["accuracy"],
        validation_split=0.1,
    )  # fmt: skip


def test_what_is_said_of_a_frame_has_its_index(threaded, classifier):
    eager = classifier.predict(FRAME)
    assert isinstance(eager, pd.Series)
    pd.testing.assert_index_equal(eager.index, FRAME.index)
    np.testing.assert_array_equal(eager, classifier.predict(array()))
    frame = lazy()
    said = classifier.predict(frame)
    assert isinstance(said, dd.Series)
    pd.testing.assert_series_equal(said.compute(), eager, check_dtype=False)
    assert said._meta.dtype.kind == eager.dtype.kind
    proba = classifier.predict_proba(frame)
    assert list(proba.columns) == ["dear", "fair", "low"]
    pd.testing.assert_frame_equal(
        proba.compute(), classifier.predict_proba(FRAME), check_column_type=False
    )
    # Back into the frame, beside what it is about.
    right = frame.assign(said=said)
    right = (right["said"] == right["kind"]).mean().compute()
    assert right == pytest.approx(classifier.evaluate(array(), FRAME["kind"])["accuracy"])
    for X, y in ((frame, frame["kind"]), (frame, frame[["kind"]]), (FRAME, FRAME["kind"])):
        assert classifier.evaluate(X, y)["accuracy"] == pytest.approx(right)


def test_a_loaded_model_knows_its_columns(classifier, tmp_path):
    classifier.save(tmp_path / "model")
    loaded = dtrain.load(tmp_path / "model")
    assert loaded.columns == classifier.columns
    mixed = FRAME[["kind", "colour", "count", "size"]]
    pd.testing.assert_series_equal(loaded.predict(mixed), classifier.predict(FRAME))
    with pytest.raises(DataError, match="X: found no column 'colour', expected 3"):
        loaded.predict(FRAME[["size", "count"]])
    with pytest.raises(DataError, match="X: found no column 'colour', expected 3"):
        loaded.predict(lazy()[["size", "count"]])


def test_one_node_has_the_model_however_many_blocks_there_are(classifier):
    said = classifier.predict(lazy(8))
    graph = dict(said.optimize().__dask_graph__())
    assert sum("dtrain-model" in str(key) for key in graph) == 1
    again = classifier.predict_proba(lazy(8)).optimize().__dask_graph__()
    named = {key for key in dict(again) if "dtrain-model" in str(key)}
    assert named == {key for key in graph if "dtrain-model" in str(key)}


def unknown(frame):
    return frame.assign(colour=frame["colour"].astype(object).astype("category"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            unknown,
            r"X: column 'colour': found categories that are not known .* \.cat\.as_known\(\)",
        ),
        (
            lambda f: f.assign(when=dd.to_datetime(f["size"])),
            "X: column 'when': found dtype dateti",
        ),
        (lambda f: f.assign(size=f["kind"]), "X: column 'size': found dtype (object|str)"),
    ],
)
def test_columns_that_are_refused_before_anything_is_computed(threaded, change, words):
    frame = change(uncomputable())
    with pytest.raises(DataError, match=words):
        fit(threaded, Linear(WIDTH), frame.drop(columns=["price", "kind"]), frame["price"])


def uncomputable():
    def never(frame):
        raise AssertionError("it was computed")

    return lazy().map_partitions(never, meta=FRAME.iloc[:0])


def test_what_is_neither_an_array_nor_a_frame(threaded):
    with pytest.raises(DataError, match="X: found Delayed, expected an array or a frame"):
        fit(threaded, Linear(WIDTH), delayed(lambda: FRAME)(), FRAME["price"])
    with pytest.raises(DataError, match="y: found Delayed, expected an array or a frame"):
        fit(threaded, Linear(WIDTH), FRAME[FEATURES], delayed(lambda: FRAME)())


def test_missing_values_that_no_number_stands_for_are_named(threaded):
    frame = dd.from_pandas(
        FRAME.assign(count=FRAME["count"].where(FRAME["count"] > 0)).reset_index(), npartitions=3
    )
    with pytest.raises(DataError, match=r"X: column 'count': found missing values in Int16"):
        fit(threaded, Linear(WIDTH), frame[FEATURES], frame["price"])


def test_the_model_is_to_fit_before_anything_is_computed(threaded):
    with pytest.raises(DataError, match=r"expected 4 features"):
        fit(threaded, Linear(4), uncomputable()[FEATURES], uncomputable()["price"])
