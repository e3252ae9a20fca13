"""Data is read where it lies, and goes straight where it must."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait

import dtrain
from dtrain.models import Linear, Logistic
from dtrain.runtime.data import Parts
from dtrain.runtime.inputfile import FileRef
from dtrain.runtime.rows import ArrayRef, Rows

RNG = np.random.default_rng(0)
X = RNG.standard_normal((400, 5)).astype(np.float32)
Y = (X @ np.arange(5, dtype=np.float32)).astype(np.float32)


def fit(client, model=None, x=X, y=Y, **arguments):
    arguments = {"batch_size": 16, "epochs": 2, "client": client, "progress": False, **arguments}
    return dtrain.fit(model or Linear(5), x, y, **arguments)


def bits(result):
    return {name: value.tobytes() for name, value in result.params.items()}


@pytest.mark.cluster
def test_persisted_chunks_are_not_copied_or_moved(forked):
    """Each chunk stays where it was, once, though parts are cut through chunks."""
    before = {}
    dX = da.from_array(X, chunks=(90, -1)).persist()
    dy = da.from_array(Y, chunks=70).persist()
    wait([dX, dy])
    before = forked.who_has([dX, dy])
    plain = fit(forked)
    assert bits(fit(forked, x=dX, y=dy)) == bits(plain)
    assert forked.who_has([dX, dy]) == before
    assert all(len(who) == 1 for who in before.values())


@pytest.mark.cluster
def test_chunks_all_on_the_other_worker(forked):
    """A replica far from its rows reads them batch by batch, and gets the same bits."""
    one = sorted(forked.scheduler_info()["workers"])[0]
    dX = da.from_array(X, chunks=(50, -1))
    dX, dy = forked.persist([dX, da.from_array(Y, chunks=50)], workers=[one])
    wait([dX, dy])
    assert {who for whos in forked.who_has(dX).values() for who in whos} == {one}
    plain = fit(forked, replicas=2, validation_split=0.25, metrics=["mse"])
    far = fit(forked, x=dX, y=dy, replicas=2, validation_split=0.25, metrics=["mse"])
    assert bits(far) == bits(plain)
    assert far.metrics["val_mse"] == plain.metrics["val_mse"]
    stolen = fit(forked, x=dX, y=dy, replicas=2, mode=dtrain.Async())
    assert stolen.ledger.samples == [400, 400]


def test_nothing_stays_on_the_cluster(threaded):
    """After the job the workers hold none of its data, nor its result."""
    scheduler = threaded.cluster.scheduler
    before = set(scheduler.tasks)
    fit(threaded)
    from tests.conftest import until

    until(lambda: set(scheduler.tasks) <= before, 30, f"left: {set(scheduler.tasks) - before}")
    assert not [name for name in scheduler.clients if name.startswith("dtrain-data")]


#: What `load` was called with; the workers share this process.
CALLS: list[tuple[int, ...]] = []


def load(block):
    CALLS.append(block.shape)
    return block


def test_lazy_arrays_are_computed_once(threaded):
    CALLS.clear()
    dX = da.from_array(X, chunks=(100, -1)).map_blocks(load, dtype=X.dtype, meta=X[:0])
    assert bits(fit(threaded, x=dX)) == bits(fit(threaded))
    assert sorted(CALLS) == [(100, 5)] * 4


def test_errors_of_the_users_graph_come_up(threaded):
    def load(block):
        raise ZeroDivisionError("this block is broken")

    dX = da.from_array(X, chunks=(100, -1)).map_blocks(load, dtype=X.dtype, meta=X[:0])
    with pytest.raises(ZeroDivisionError, match="broken"):
        fit(threaded, x=dX)


def test_lazy_chunks_along_several_axes_are_merged(threaded):
    assert bits(fit(threaded, x=da.from_array(X, chunks=(100, 2)))) == bits(fit(threaded))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (lambda: da.from_array(X, chunks=(100, 2)).persist(), r"X\.rechunk\(\{1: -1\}\)"),
        (lambda: da.zeros((1 << 23, 16), chunks=(1 << 23, 4)),
         r"X\.rechunk\(\{0: 'auto', 1: -1\}\)"),
        (lambda: da.from_array(X, chunks=(100, -1))[:, da.from_array(X[0], chunks=5) > 0],
         "compute_chunk_sizes"),
    ],
)  # fmt: skip
def test_chunks_that_cannot_be_read_by_rows(threaded, array, words):
    with pytest.raises(dtrain.DataError, match=words):
        fit(threaded, x=array())


@pytest.mark.parametrize("share", [0, 0.3])
@pytest.mark.parametrize("validation", [{}, {"validation_split": 0.25, "metrics": ["mse"]}])
def test_unknown_empty_and_uneven_chunks(threaded, share, validation):
    """Chunks of 0, 1 and many rows, cut elsewhere in y, whose sizes nobody knows beforehand."""
    every = da.from_array(np.ones(400, bool), chunks=400)
    dX = da.from_array(X, chunks=((0, 1, 250, 0, 0, 149, 0), -1))
    dy = da.from_array(Y, chunks=((0, 99, 1, 300),))
    dX, dy = dX[every.rechunk((dX.chunks[0],))], dy[every.rechunk(dy.chunks)]
    assert np.isnan(dX.shape[0])
    plain = fit(threaded, **validation)
    with dask.config.set({"dtrain.data-memory": share}):
        found = fit(threaded, x=dX, y=dy, **validation)
    assert bits(found) == bits(plain)
    assert found.metrics.get("val_mse") == plain.metrics.get("val_mse")


def test_chunks_of_unknown_sizes(threaded):
    """How many rows they have is found where they lie, also that some have none."""
    keep = (X[:, 0] > 0) & ((np.arange(400) < 200) | (np.arange(400) >= 300))
    cut = da.from_array(keep, chunks=100)
    dX, dY = da.from_array(X, chunks=(100, -1))[cut], da.from_array(Y, chunks=100)[cut]
    assert np.isnan(dX.shape[0])
    plain = fit(threaded, x=X[keep], y=Y[keep], validation_split=0.2)
    assert bits(fit(threaded, x=dX, y=dY, validation_split=0.2)) == bits(plain)
    with pytest.raises(dtrain.DataError, match=r"X has \d+ rows and y has 400"):
        fit(threaded, x=dX)
    with pytest.raises(dtrain.DataError, match="X: found partitions of unknown sizes"):
        dtrain.plan(Linear(5), dX, dY, client=threaded)


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["no", "yes"]),
        np.array([3, 7]),
        np.array([-1, 1]),
        np.array([0.0, 1.0]),
        np.array([False, True]),
        np.array(["no", "yes"], dtype=object),
        np.array([0, 1]),
    ],
    ids=str,
)
def test_labels_of_any_kind(threaded, labels):
    y = labels[(Y > 0).astype(int)]
    result = fit(
        threaded, Logistic(5), y=y, epochs=30, optimizer=dtrain.optim.sgd(0.5),
        validation_split=0.2, metrics=["accuracy"],
    )  # fmt: skip
    assert result.metrics["val_accuracy"] > 0.95
    predicted = result.predict(X)
    assert set(np.unique(predicted)) <= set(labels)
    assert np.mean(predicted == y) > 0.95
    proba = result.predict_proba(X)
    assert proba.shape == (400, 2)
    assert np.allclose(proba.sum(axis=1), 1, atol=1e-6)
    assert result.evaluate(X, y)["accuracy"] == np.mean(predicted == y)
    chunked = fit(threaded, Logistic(5), y=da.from_array(np.asarray(y.tolist()), chunks=90),
                  epochs=30, optimizer=dtrain.optim.sgd(0.5), validation_split=0.2)  # fmt: skip
    assert bits(chunked) == bits(result)


def test_targets_in_a_column(threaded):
    assert bits(fit(threaded, y=Y.reshape(-1, 1))) == bits(fit(threaded))
    labels = (Y > 0).astype(int)
    column = fit(threaded, Logistic(5), y=labels.reshape(-1, 1))
    assert bits(column) == bits(fit(threaded, Logistic(5), y=labels))


def test_validation_rows_are_held_out(threaded):
    """A split's loss is that of exactly the seeded random rows, and they are not trained on."""
    from dtrain.machines.plan import split

    result = fit(threaded, validation_split=0.3, seed=4)
    train, valid = split(400, 0.3, 4)
    assert result.history[0]["samples"] == len(train) == 280
    loss = result.evaluate(X[valid], Y[valid])["loss"]
    assert result.metrics["val_loss"] == pytest.approx(loss, rel=1e-5)
    given = fit(threaded, validation_data=(X[valid], Y[valid]), x=X[train], y=Y[train], seed=4)
    assert bits(given) == bits(result)
    assert given.metrics["val_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("fraction", [None, 0.2])
@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_parts_cover_every_row_once(fraction, replicas):
    parts = Parts.of(
        101, None, fraction=fraction, replicas=replicas, batch_size=8, epochs=1, steps=None, seed=3
    )
    train = [parts.epoch_rows(3, 0, i, True) for i in range(replicas)]
    valid = [parts.valid_rows(i) for i in range(replicas)] if fraction else []
    assert sorted(np.concatenate(train + valid).tolist()) == list(range(101))
    sizes = [len(rows) for rows in train]
    assert max(sizes) - min(sizes) <= 1
    for i, rows in enumerate(train):
        start, stop = parts.span(i)
        assert start <= rows.min()
        assert rows.max() < stop


def unaligned(array):
    """The same values at an odd address, as what comes over a network often is."""
    raw = bytearray(array.nbytes + 1)
    view = np.frombuffer(raw, np.uint8, offset=1).view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.flags.aligned
    return view


@pytest.mark.parametrize("make", [unaligned, np.asfortranarray])
def test_rows_of_chunks_that_lie_badly(make):
    """They are copied row by row: never the whole chunk for one batch."""
    import tracemalloc

    array = make(RNG.standard_normal((5000, 40)).astype(np.float32))

    class Service:
        def local_chunks(self, keys):
            return dict.fromkeys(keys, array)

    rows = Rows(ArrayRef((5000, 40), "<f4", ("k",), (0, 5000)), Service(), 1.0)
    rows.open([(0, 5000)])
    out = rows.buffer(16)
    chosen = RNG.integers(0, 5000, 16)
    rows.take(chosen, out, None)
    tracemalloc.start()
    rows.take(chosen, out, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (out == array[chosen]).all()
    assert peak < array.nbytes / 10


@pytest.mark.parametrize("strays", [False, True])
def test_a_file_is_one_chunk_that_has_all_rows(strays):
    """Whatever rows are asked for, nobody else is asked; they are copied from the mapping."""
    memory = np.zeros(4096 + X.nbytes, np.uint8)
    memory[4096:] = X.reshape(-1).view(np.uint8)
    memory.flags.writeable = False

    class Service:
        """Has no other way to rows than this one."""

        def input(self, ref):
            return memory

    ref = ArrayRef(X.shape, "<f4", (), (0, 400), FileRef("x", memory.nbytes, b"", 4096))
    rows = Rows(ref, Service(), 1.0, strays=strays)
    rows.open([(0, 10)])
    assert rows.whole
    out, chosen = rows.buffer(50), RNG.permutation(400)[:50]
    assert rows.request(chosen) is None
    rows.take(chosen, out, None)
    assert out.tobytes() == X[chosen].tobytes()


def test_a_worker_that_reads_nothing_maps_nothing():
    ref = ArrayRef(X.shape, "<f4", (), (0, 400), FileRef("x", 8192, b"", 4096))
    Rows(ref, None, 1.0).open([])


def test_wide_integers_and_other_dtypes_train(threaded):
    pixels = RNG.integers(0, 255, (60, 5)).astype(np.uint8)
    result = fit(threaded, x=pixels, y=pixels.sum(axis=1), optimizer=dtrain.optim.adam(0.1))
    assert np.isfinite(result.history[-1]["loss"])


@pytest.mark.cluster
def test_dask_arrays_need_no_current_client(forked):
    """With the address alone, or with a client that is not the process's current one."""
    from distributed import Client

    address = forked.scheduler.address
    expected = bits(fit(forked))
    dX, dy = da.from_array(X, chunks=(90, -1)), da.from_array(Y, chunks=90)
    with Client(address, set_as_default=False) as own:
        script = f"""
import dask.array as da, numpy as np, dtrain
X = np.random.default_rng(0).standard_normal((400, 5)).astype(np.float32)
Y = (X @ np.arange(5, dtype=np.float32)).astype(np.float32)
dX, dy = da.from_array(X, chunks=(90, -1)), da.from_array(Y, chunks=90)
r = dtrain.fit(dtrain.models.Linear(5), dX, dy, batch_size=16, epochs=2, client={address!r},
               progress=False)
print(sorted((k, v.tobytes().hex()) for k, v in r.params.items()))
"""
        import subprocess
        import sys

        ended = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip() == str(sorted((k, v.hex()) for k, v in expected.items()))
        assert bits(fit(own, x=dX, y=dy)) == expected


def test_chunks_that_no_worker_may_compute_are_told(threaded):
    import dask

    with dask.annotate(resources={"GPU": 1}):
        stuck = da.from_array(X, chunks=(100, -1)).map_blocks(lambda b: b + 0)
        stuck = threaded.persist(stuck, optimize_graph=False)
    with pytest.raises(dtrain.DataError, match="no worker may run"):
        fit(threaded, x=stuck)


@pytest.mark.parametrize("make", [np.asarray, lambda a: da.from_array(a, chunks=100)])
def test_masked_arrays_are_refused(threaded, make):
    masked = np.ma.masked_array(X, X > 1)
    with pytest.raises(dtrain.DataError, match="masked"):
        fit(threaded, x=masked if make is np.asarray else make(masked))


def test_a_chunk_of_another_dtype_than_it_says_is_refused(threaded):
    lying = da.from_array(X, chunks=(100, -1)).map_blocks(
        lambda b: b.astype(str), dtype=X.dtype, meta=X[:0]
    )
    with pytest.raises(dtrain.JobFailed, match="dtype <U") as caught:
        fit(threaded, x=lying)
    assert caught.value.reason == "DATA_ERROR"


def test_a_batch_larger_than_the_data_is_the_data(threaded):
    assert fit(threaded, batch_size=10**12).version == 2


def test_fit_within_a_task(forked):
    """It leaves its thread to the job, and finds the cluster it runs on."""

    def inner(x, y):
        return dtrain.fit(Linear(5), x, y, batch_size=16, epochs=2, progress=False).params

    found = forked.submit(inner, X, Y, pure=False).result(timeout=60)
    assert {k: v.tobytes() for k, v in found.items()} == bits(fit(forked))
