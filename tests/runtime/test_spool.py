"""Rows that go through a file of the worker: the same bits, no memory, nothing left."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
from distributed.sizeof import sizeof

import dtrain
from dtrain.errors import DataError, StorageError
from dtrain.models import Linear
from dtrain.runtime import spool
from dtrain.runtime.spool import Spooled, SpoolFile, as_rows, spooled
from tests.conftest import until
from tests.runtime.conftest import processes

ROWS = np.arange(3000, dtype=np.float32).reshape(1000, 3)


def descriptors() -> set[str]:
    """The open files of this process that are spools."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if "dtrain-spool-" in target:
            found.add(target)
    return found


def test_rows_come_back(tmp_path):
    file = SpoolFile(str(tmp_path))
    some = [ROWS, ROWS[:0], ROWS[:7].astype("<i2"), np.array(["a", "bcd"])]
    chunks = [Spooled(rows, file) for rows in some]
    for rows, chunk in zip(some, chunks, strict=True):
        np.testing.assert_array_equal(chunk.rows, rows)
        assert (chunk.rows.dtype, len(chunk), chunk.shape) == (rows.dtype, len(rows), rows.shape)
        assert not chunk.rows.flags.writeable or not len(rows)
    assert list(tmp_path.iterdir()) == [], "the file has a name, and would outlive a kill"


def test_it_goes_with_the_last_chunk():
    before = descriptors()
    one, two = spooled(ROWS), spooled(ROWS[::2])
    assert one.file is two.file
    assert len(descriptors() - before) == 1
    view = one.rows
    del one, two
    gc.collect()
    np.testing.assert_array_equal(view, ROWS)
    del view
    gc.collect()
    assert descriptors() == before


def test_a_chunk_that_is_sent_takes_its_rows_along_and_counts_as_little():
    chunk = spooled(ROWS)
    again = pickle.loads(pickle.dumps(chunk))
    np.testing.assert_array_equal(as_rows(again), ROWS)
    assert again._start != chunk._start
    assert sizeof(chunk) < 1000 < ROWS.nbytes


@pytest.mark.parametrize("rows", [np.array([None]), [1, 2], np.ma.masked_array([1], [True])])
def test_what_is_no_array_of_numbers_is_refused(rows):
    with pytest.raises(DataError, match="expected an array of numbers"):
        spooled(rows)


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = SpoolFile(str(tmp_path))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"12000 bytes could not be written.*No space left"):
        file.append(ROWS)


def test_what_was_read_does_not_stay_in_memory(tmp_path):
    """64 MiB may be mapped; here 200 are read, twice."""
    file = SpoolFile(str(tmp_path))
    chunk = Spooled(np.zeros((200, 1 << 18), np.float32), file)
    process, rows, most = psutil.Process(), chunk.rows, 0
    before = process.memory_info().rss
    for _ in range(2):
        for i in range(200):
            assert rows[i].sum() == 0
            chunk.was_read(1)
            most = max(most, process.memory_info().rss - before)
    assert most < spool.MAPPED * 1.5


class Peaks:
    """The most memory that each worker process has had, and what Dask has spilled."""

    def __init__(self, client):
        self.client = client

    def __enter__(self):
        self.pids = list(self.client.run(os.getpid).values())
        self.before = {pid: psutil.Process(pid).memory_info().rss for pid in self.pids}
        self.most = dict.fromkeys(self.pids, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dtrain-test-peaks")
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.01):
            for pid in self.pids:
                rss = psutil.Process(pid).memory_info().rss
                self.most[pid] = max(self.most[pid], rss - self.before[pid])

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()

    def spilled(self):
        def count(dask_worker):
            return getattr(dask_worker.data, "spilled_total", (0, 0))[1]

        return sum(self.client.run(count).values())


def rows(block_info=None):
    """A chunk of 4 MiB that follows from its place alone."""
    ((start, stop), _) = block_info[None]["array-location"]
    return np.random.default_rng(start).standard_normal((stop - start, 256), np.float32)


def large(chunks):
    X = da.map_blocks(
        rows, chunks=((4096,) * chunks, (256,)), dtype=np.float32, meta=np.empty((0, 0), np.float32)
    )
    return X, X.sum(axis=1)


@pytest.mark.cluster
def test_twice_the_workers_memory():
    """1,120 MiB for two workers of 280 MiB: nothing is spilled, and nobody is killed."""
    limit = 280 << 20
    with processes(2, memory_limit=limit) as client:
        X, y = large(280)
        assert X.nbytes >= 2 * 2 * limit * 0.99
        dtrain.fit(Linear(256), *large(2), client=client, progress=False)
        pids = set(client.run(os.getpid).values())
        with Peaks(client) as peaks:
            result = dtrain.fit(
                Linear(256), X, y, client=client, batch_size=4096, progress=False, shuffle=False
            )
        assert result.ledger.samples == [280 * 4096]
        assert peaks.spilled() == 0
        assert max(peaks.most.values()) < 120 << 20
        assert set(client.run(os.getpid).values()) == pids, "a worker was killed for its memory"


@pytest.mark.cluster
def test_a_lost_workers_chunks_are_computed_anew():
    """The death of a worker takes its file along; Dask writes the chunks again, elsewhere."""
    X, y = large(6)
    fit = {"batch_size": 256, "epochs": 12, "replicas": 2}
    with processes(2) as client, dask.config.set({"dtrain.data-memory": 0}):
        plain = dtrain.fit(Linear(256), X, y, client=client, progress=False, **fit)
        handle = dtrain.submit(Linear(256), X, y, client=client, detach=False, **fit)
        until(lambda: handle.status()["epoch"] >= 1, 60, "no epoch is over")
        before = client.run(os.getpid)
        os.kill(next(iter(before.values())), signal.SIGKILL)
        result = handle.result(timeout=120)
        assert client.run(os.getpid) != before
        handle.release()
    assert result.ledger.samples == [6 * 4096] * 12
    assert {k: v.tobytes() for k, v in result.params.items()} == {
        k: v.tobytes() for k, v in plain.params.items()
    }
