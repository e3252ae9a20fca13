"""Tables and stores by their path: what a spec file names is what the workers read."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dtrain
from dtrain.datafiles import Unreadable, Wanted, read
from dtrain.specfile import load_job

pd = pytest.importorskip("pandas", reason="pandas is not installed (the extra dataframe)")
dd = pytest.importorskip("dask.dataframe", reason="dask.dataframe wants pandas and pyarrow")

RNG = np.random.default_rng(2)
FRAME = pd.DataFrame(RNG.normal(size=(90, 3)).astype(np.float32), columns=["a", "b", "y"])
FRAME["w"] = np.arange(90.0)
#: What all the tables here are as arrays: columns b and a.
X, Y, W = FRAME[["b", "a"]].to_numpy(), FRAME["y"].to_numpy(), FRAME["w"].to_numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows in all kinds of files."""
    place = tmp_path_factory.mktemp("data")
    frame = dd.from_pandas(FRAME, npartitions=3)
    frame.to_parquet(place / "rows.parquet")
    (place / "parts").mkdir()
    for part in range(3):
        some = FRAME[part * 30 : part * 30 + 30]
        some.to_parquet(place / "parts" / f"{part}.parquet")
        some.to_csv(place / "parts" / f"{part}.csv", index=False)
    FRAME.to_csv(place / "rows.csv.gz", index=False)
    np.savez(place / "rows.npz", a=FRAME["a"], b=FRAME["b"], y=Y, w=W)
    np.save(place / "rows.npy", FRAME.to_numpy())
    return place


@pytest.fixture(scope="module")
def zarr_store(folder):
    pytest.importorskip("zarr", reason="zarr is not installed (the extra zarr)")
    for name in FRAME:
        da.from_array(FRAME[name].to_numpy(), chunks=30).to_zarr(
            str(folder / "rows.zarr"), component=name
        )
    wide = da.from_array(X, chunks=(30, 1))
    wide.to_zarr(str(folder / "rows.zarr"), component="X")


TABLES = ["rows.parquet", "parts/*.parquet", "parts/*.csv", "rows.csv.gz", "rows.npz"]


@pytest.mark.parametrize("path", TABLES)
def test_columns_by_their_names(folder, path):
    x, y, w = read(path, folder, Wanted(["b", "a"], "y", "w"))
    np.testing.assert_allclose(np.asarray(x), X, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(y), Y, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(w), W)
    assert len(read(path, folder, Wanted(["b", "a"], "y"))) == 2


@pytest.mark.parametrize("features", [["b", "a"], "X"])
def test_arrays_of_a_zarr_store(folder, zarr_store, features):
    x, y, w = read("rows.zarr", folder, Wanted(features, "y", "w"))
    assert isinstance(x, da.Array)
    np.testing.assert_array_equal(x.compute(), X)
    np.testing.assert_array_equal(y.compute(), Y)
    np.testing.assert_array_equal(w.compute(), W)


def test_columns_by_their_index(folder):
    x, y, w = read("rows.npy", folder, Wanted([1, 0], 2, -1))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    np.testing.assert_array_equal(w, W)
    assert read("rows.npy", folder, Wanted(None, 2, 3))[0].shape == (90, 2)


def test_all_other_columns_are_features(folder):
    assert list(read("rows.parquet", folder, Wanted(None, "y", "w"))[0].columns) == ["a", "b"]
    assert list(read("rows.parquet", folder, Wanted(None, "y"))[0].columns) == ["a", "b", "w"]


def test_a_url(folder):
    x, _ = read(f"file://{folder}/rows.parquet", folder, Wanted(["b", "a"], "y"))
    np.testing.assert_array_equal(np.asarray(x), X)


@pytest.mark.parametrize(
    ("path", "wanted", "key", "words"),
    [
        ("rows.txt", Wanted(), None, "found 'rows.txt', expected .* that ends in .npz, .npy, .par"),
        ("none.parquet", Wanted(), None, "there is no file .*none.parquet"),
        ("none/*.csv", Wanted(), None, r"there is no file .*none/\*.csv"),
        ("rows.parquet", Wanted(), "target", "not given; expected one of .*: a, b, y, w"),
        ("rows.parquet", Wanted(None, "z"), "target", "found 'z', expected .*: a, b, y, w"),
        ("rows.parquet", Wanted(["aa"], "y"), "features", "'aa' .did you mean 'a'"),
        ("rows.parquet", Wanted(["a", "y"], "y"), "features", "found 'y', which is the target"),
        ("rows.parquet", Wanted(None, "y", "v"), "sample_weight", "found 'v', expected"),
        ("rows.npy", Wanted(None, 2, 9), "sample_weight", "found 9, expected the index"),
        ("rows.npy", Wanted([0, 3], 2, 3), "features", "found column 3, which is the weights"),
        ("broken.parquet", Wanted(None, "y"), None, "broken.parquet cannot be read: "),
        ("rows.npz", Wanted(["a"], "y", "v"), "sample_weight", "found 'v', expected an array"),
    ],
)
def test_what_is_wrong_is_told(folder, path, wanted, key, words):
    (folder / "broken.parquet").write_bytes(b"nothing")
    with pytest.raises(Unreadable, match=words) as caught:
        read(path, folder, wanted)
    assert caught.value.key == key


def test_without_pandas_it_says_what_to_install(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "dask.dataframe", None)
    with pytest.raises(Unreadable, match=r"takes pandas and pyarrow.*dtrain\[dataframe\]"):
        read("rows.parquet", folder, Wanted(None, "y"))


SPEC = """
[model]
kind = "linear"
n_features = 2
[data]
path = "{path}"
features = ["b", "a"]
target = "y"
sample_weight = "w"
validation = "{validation}"
[train]
epochs = 2
batch_size = 8
metrics = ["mse"]
"""


@pytest.mark.cluster
def test_a_job_of_a_spec_file_is_trained_where_the_rows_are_read(folder):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        found = []
        for path in ("parts/*.parquet", "rows.npz"):
            (folder / "spec.toml").write_text(SPEC.format(path=path, validation=path))
            found.append(dtrain.fit(load_job(folder / "spec.toml"), client=client, progress=False))
        assert found[0].history[-1]["samples"] == 90
        assert found[0].metrics["val_mse"] == found[1].metrics["val_mse"]
        for name, value in found[0].params.items():
            np.testing.assert_array_equal(value, found[1].params[name])
