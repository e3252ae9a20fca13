"""Replicas compute on the device that the job names, in every mode, and say so."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager

import dask.config
import numpy as np
import pytest
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster

import dtrain
from dtrain.layout import Layout
from dtrain.machines.membership import Hello, Joined, Membership
from dtrain.runtime.device import Gpu
from tests.conftest import until
from tests.gpu import KINDS, cupy_of, stand_in

from .conftest import processes

#: What must give the same bits as on the CPU, on a device whose arithmetic is the CPU's.
SYNCHRONOUS = {
    "sync": {},
    "two shards": {"shards": 2},
    "in-graph": {"replication": "in-graph"},
    "clipped": {
        "optimizer": dtrain.optim.chain(
            dtrain.optim.clip_by_global_norm(0.5), dtrain.optim.adam(3e-3)
        )
    },
}


def job(digits, client, model=None, **changes):
    X, y = digits
    arguments = dict(
        optimizer=dtrain.optim.adam(3e-3),
        replicas=4,
        batch_size=24,
        epochs=2,
        validation_split=0.2,
        metrics=["accuracy", "log_loss"],
        seed=7,
        client=client,
    )
    model = dtrain.models.MLP([64, 32, 10]) if model is None else model
    handle = dtrain.submit(model, X, y, **{**arguments, **changes})
    handle.wait(120)
    return handle.result(), handle.status()["devices"]


def cluster(workers=2):
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=None
    )


@pytest.fixture(scope="module", params=KINDS)
def gpus(request):
    """Two workers in this process, and the CuPy that they compute with."""
    with cupy_of(request.param) as module, cluster() as made, Client(made) as client:
        yield client, module


def same(found, expected, cupy):
    """The same bits; of a real GPU about the same numbers."""
    for name, value in expected.params.items():
        if hasattr(cupy, "crossed"):
            assert found.params[name].tobytes() == value.tobytes()
        else:
            gap = np.linalg.norm(found.params[name] - value)
            assert gap <= 0.02 * np.linalg.norm(value), name
    assert found.version == expected.version
    for one, other in zip(found.history, expected.history, strict=True):
        assert one["samples"] == other["samples"]
        for key in ("loss", "val_loss", "val_log_loss"):
            assert one[key] == pytest.approx(other[key], rel=1e-2)
        assert one["val_accuracy"] == pytest.approx(other["val_accuracy"], abs=0.02)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous(digits, gpus, name):
    client, cupy = gpus
    expected, devices = job(digits, client, device="cpu", **SYNCHRONOUS[name])
    assert devices == dict.fromkeys("0123", "cpu")
    found, devices = job(digits, client, device="cuda", **SYNCHRONOUS[name])
    assert devices == dict.fromkeys("0123", "cuda:0")
    same(found, expected, cupy)


def test_auto_is_a_gpu_where_there_is_one_and_a_scope_says_otherwise(digits, gpus):
    client, _ = gpus
    with dtrain.device("auto"):
        assert job(digits, client, epochs=1)[1] == dict.fromkeys("0123", "cuda:0")
    with dtrain.device("cpu"):
        assert job(digits, client, epochs=1)[1] == dict.fromkeys("0123", "cpu")


@pytest.mark.parametrize("mode", [dtrain.Async(), dtrain.Async(max_staleness=1)], ids=repr)
def test_asynchronous(digits, gpus, mode):
    client, cupy = gpus
    arguments = dict(mode=mode, replicas=1, epochs=3)
    expected, _ = job(digits, client, device="cpu", **arguments)
    found, devices = job(digits, client, device="cuda", **arguments)
    assert devices == {"0": "cuda:0"}
    same(found, expected, cupy)
    several, _ = job(digits, client, device="cuda", mode=mode, epochs=6)
    assert several.metrics["val_accuracy"] > 0.85
    assert several.ledger.applied == several.version


def test_with_backups(digits, gpus):
    client, _ = gpus
    found, devices = job(digits, client, device="cuda", mode=dtrain.Sync(backups=1), epochs=8)
    assert devices == dict.fromkeys("0123", "cuda:0")
    assert found.metrics["val_accuracy"] > 0.85


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
@pytest.mark.parametrize("kind", KINDS)
def test_worker_processes(digits, kind, transport):
    """Shared memory between them, and the network between them."""
    with cupy_of(kind) as cupy, processes(2, **{"dtrain.transport": transport}) as client:
        expected, _ = job(digits, client, device="cpu")
        found, devices = job(digits, client, device="cuda")
        assert devices == dict.fromkeys("0123", "cuda:0")
        same(found, expected, cupy)
        for mode in (dtrain.Async(), dtrain.Sync(backups=1)):
            result, devices = job(digits, client, device="cuda", mode=mode, epochs=6)
            assert devices == dict.fromkeys("0123", "cuda:0")
            assert result.metrics["val_accuracy"] > 0.8


# -- what a model gets -------------------------------------------------------------------------


class Ridge:
    """A model of a user's own; it returns its gradient, in memory of the host if it likes."""

    task = "regression"

    def __init__(self, module, on=None, host=False):
        self.module, self.on, self.host = module, on, host

    def init(self, rng):
        return {"w": np.zeros(64, np.float32)}

    def loss_and_grads(self, params, batch, *, rng=None):
        x, y = batch
        self.see(params["w"], x, y)
        residual = x @ params["w"] - y
        gradient = (2 * x.T @ residual / len(y)).astype(np.float32)
        if self.host and not isinstance(gradient, np.ndarray):
            gradient = gradient.get()
        return np.mean(residual**2), {"w": gradient}

    def predict(self, params, x):
        self.see(params["w"], x)
        return x @ params["w"]

    def see(self, *arrays):
        for array in arrays:
            if type(array).__module__.partition(".")[0] != self.module:
                raise TypeError(f"found an array of {type(array).__module__}")
        if self.on is not None:
            import cupy

            if cupy.cuda.runtime.getDevice() != self.on:
                raise ValueError(f"found device {cupy.cuda.runtime.getDevice()}")


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("changes", [{}, {"mode": dtrain.Async()}, {"replication": "in-graph"}])
def test_a_model_of_ones_own_gets_arrays_of_the_device(digits, gpus, changes, host):
    client, _ = gpus
    arguments = dict(metrics=["mse"], replicas=1, epochs=3, **changes)
    data = digits[0], digits[1].astype(np.float32)
    expected, _ = job(data, client, Ridge("numpy"), device="cpu", **arguments)
    found, _ = job(data, client, Ridge("cupy", host=host), device="cuda", **arguments)
    np.testing.assert_allclose(found.params["w"], expected.params["w"], rtol=1e-3, atol=1e-4)
    assert found.metrics["val_mse"] == pytest.approx(expected.metrics["val_mse"], rel=1e-3)


def test_a_model_that_mixes_arrays_raises_where_the_user_is(digits, gpus):
    class Mixed(Ridge):
        def loss_and_grads(self, params, batch, *, rng=None):
            return super().loss_and_grads({"w": np.zeros(64)}, batch)

    client, _ = gpus
    data = digits[0], digits[1].astype(np.float32)
    with pytest.raises(TypeError, match="found an array of numpy"):
        job(data, client, Mixed("cupy"), device="cuda", metrics=["mse"])


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()], ids=repr)
def test_a_gradient_that_is_not_finite_is_seen(digits, gpus, mode):
    X, y = digits
    X = X.copy()
    X[700] = np.nan
    with pytest.raises(dtrain.NonFiniteError, match="replica"):
        job((X, y), gpus[0], device="cuda", mode=mode)


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()], ids=repr)
def test_a_gradient_that_is_not_written_is_refused(digits, gpus, mode):
    class Forgets(Ridge):
        def loss_and_grads(self, params, batch, *, out=None, rng=None):
            return 0.0, out

    data = digits[0], digits[1].astype(np.float32)
    with pytest.raises(dtrain.NonFiniteError):
        job(data, gpus[0], Forgets("cupy"), device="cuda", mode=mode, metrics=["mse"])


@pytest.mark.parametrize(
    "changes", [{}, {"mode": dtrain.Async()}, {"replication": "in-graph"}], ids=repr
)
def test_the_number_selects_the_gpu_of_the_replica_s_thread(digits, changes):
    data = digits[0], digits[1].astype(np.float32)
    with stand_in() as cupy, cluster(1) as made, Client(made) as client:
        model = Ridge("cupy", on=1)
        _, devices = job(data, client, model, device="cuda:1", metrics=["mse"], **changes)
        assert set(devices.values()) == {"cuda:1"}
        assert cupy.cuda.runtime.getDevice() == 0
        # Nor is a task's thread left on it.
        assert client.submit(cupy.cuda.runtime.getDevice, pure=False).result(10) == 0


# -- the copies --------------------------------------------------------------------------------


def test_parameters_cross_once_for_each_version_and_gradients_once_for_each_batch():
    layout = Layout.of({"a": np.ones((3, 5), np.float32), "b": np.ones(2, np.float64)})
    host, out = (layout.views(np.zeros(layout.nbytes, np.uint8)) for _ in range(2))
    batch = np.ones((2, 2)), np.arange(2)

    def step(gpu, version):
        with gpu.step(version, host, batch, out) as (params, (x, y), views):
            assert {type(a).__module__ for a in (params["a"], x, y, views["b"])} == {"cupy"}
            for name, view in views.items():
                view[...] = params[name] + 1

    with stand_in() as cupy:
        gpu = Gpu("cuda:1", layout)
        assert np.isnan(gpu.grads["a"]._values).all()
        before = dict(cupy.crossed)
        for version in (4, 4, 5):
            host["a"].fill(version)
            step(gpu, version)
            assert (out["a"] == version + 1).all()
        assert cupy.crossed["set"] - before["set"] == 2
        assert cupy.crossed["get"] - before["get"] == 3
        # Of an asynchronous replica nobody knows, and they are copied each time.
        for _ in range(2):
            step(gpu, None)
        assert cupy.crossed["set"] - before["set"] == 4
        # A batch that fails leaves what was there.
        batch = np.ones((2, 2)), np.arange(2, dtype=object)
        with pytest.raises(dtrain.DataError):
            step(gpu, 6)
        assert (out["a"] == 6).all()


def test_rows_that_a_gpu_cannot_have_are_refused():
    layout = Layout.of({"a": np.ones(3, np.float32)})
    with stand_in():
        gpu = Gpu("cuda:0", layout)
        assert gpu.batch(np.ones(2), None)[1] is None
        with pytest.raises(dtrain.DataError, match="y: found dtype <U1, expected numbers, as the"):
            gpu.batch(np.ones(2), np.array(["a", "b"]))


# -- who has such a device ---------------------------------------------------------------------


def test_workers_without_the_device_are_left_out():
    table = Membership("1", 10.0)
    for address, devices in {"a": ("cpu",), "b": ("cpu", "cuda:0"), "c": ("cpu",)}.items():
        table.handle(Joined(address, ""), 0.0)
        table.handle(Hello(address, "1", devices=devices), 1.0)
    assert [m.address for m in table.able("cuda")] == ["b"]
    assert [m.address for m in table.able("auto")] == ["a", "b", "c"]
    assert [m.address for m in table.able("cpu")] == ["a", "b", "c"]
    assert table.able("cuda:1") == []


@contextmanager
def uneven():
    """A client of two worker processes: the first has no GPU, the second one has one.

    CUDA's own variable says so to each.
    """
    workers = {
        number: {
            "cls": Nanny,
            "options": {
                "nthreads": 1,
                "dashboard_address": None,
                "env": {"CUDA_VISIBLE_DEVICES": devices},
            },
        }
        for number, devices in enumerate(("", "3"))
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": None, "port": 0}}
    lasting = {"distributed.deploy.lost-worker-timeout": "1 hour"}
    with (
        stand_in(),
        dask.config.set(lasting),
        SpecCluster(workers, scheduler) as made,
        Client(made) as client,
    ):
        yield client


@pytest.mark.cluster
def test_replicas_run_only_where_the_device_is(digits):
    with uneven() as client:
        found = {
            worker["where"]: (worker["devices"], worker["no_gpu"])
            for worker in dtrain.doctor(client)["workers"]
        }
        assert sorted(found.values(), key=str) == [
            (["cpu", "cuda:0"], None),
            (["cpu"], "CuPy finds none"),
        ]
        _, devices = job(digits, client, replicas=None, device="cuda", epochs=1)
        assert devices == {"0": "cuda:0"}  # a replica for each worker that can
        _, devices = job(digits, client, device="cuda", epochs=1)
        assert devices == dict.fromkeys("0123", "cuda:0")
        _, devices = job(digits, client, device="auto", epochs=1)
        assert sorted(devices.values()) == ["cpu", "cpu", "cuda:0", "cuda:0"]
        with pytest.raises(dtrain.SpecError) as caught:
            job(digits, client, device="cuda:1")
        text = str(caught.value)
        assert text.startswith("device: found 'cuda:1', expected a worker that has it, but ")
        assert "has cpu (CuPy finds none)" in text
        assert "has cpu and cuda:0" in text


@pytest.mark.cluster
def test_a_job_waits_for_a_worker_with_its_device(digits):
    """The only one dies, and its nanny brings it back: the others were no place to go on."""
    X, y = digits
    arguments = dict(replicas=2, batch_size=24, epochs=300, seed=3)
    with uneven() as client:
        model = dtrain.models.MLP([64, 32, 10])
        expected = dtrain.fit(model, X, y, device="cpu", client=client, **arguments)
        handle = dtrain.submit(model, X, y, device="cuda", client=client, **arguments)
        until(lambda: handle.status()["step"] > 0, 60, "it has not begun")
        (where,) = set(handle.status()["replicas"].values())
        (pid,) = client.run(os.getpid, workers=[where]).values()
        os.kill(pid, signal.SIGKILL)
        words = "waiting for 1 worker with device 'cuda'"
        until(lambda: words in handle.why_waiting(), 60, f"why does not say: {words}")
        handle.wait(120)
        status = handle.status()
        assert status["losses"] == 1
        assert status["devices"] == {"0": "cuda:0", "1": "cuda:0"}
        assert where not in status["replicas"].values()
        result = handle.result()
        for name, value in expected.params.items():
            assert result.params[name].tobytes() == value.tobytes()


def test_none_has_it(digits, threaded, monkeypatch):
    X, y = digits
    for start in (dtrain.submit, dtrain.plan):
        with pytest.raises(dtrain.SpecError, match=r"device: found 'cuda', expected .* has cpu "):
            start(dtrain.models.MLP([64, 10]), X, y, device="cuda", client=threaded)
    # The master sees to it by itself.
    monkeypatch.setattr("dtrain.training.able", lambda info, device: info["ready"])
    with pytest.raises(dtrain.SpecError, match=r"device: found 'cuda', expected .* has cpu "):
        dtrain.submit(dtrain.models.MLP([64, 10]), X, y, device="cuda", client=threaded)
    assert dtrain.jobs(threaded) == []


def test_a_worker_that_is_slow_to_find_its_gpus_has_none(monkeypatch):
    from dtrain.runtime import worker

    go = threading.Event()
    monkeypatch.setattr(worker, "_FIND", 0.05)
    monkeypatch.setattr(worker, "devices", lambda: go.wait(30))
    try:
        with cluster(1) as made, Client(made) as client:
            (found,) = dtrain.doctor(client)["workers"]
            assert found["devices"] == ["cpu"]
            assert found["no_gpu"] == "CuPy has not found any in 0.05 s"
            assert found["ok"]
            go.set()
    finally:
        go.set()
