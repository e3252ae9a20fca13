"""Where a session's steps and train ops compute."""

from __future__ import annotations

import os

import numpy as np
import pytest
from distributed import Client, get_worker

import dtrain
from dtrain import Session, SpecError, optim
from dtrain.runtime.worker import service_at
from tests.gpu import KINDS, cupy_of, stand_in

from .test_device import Ridge, cluster, uneven


@pytest.fixture(scope="module", params=KINDS)
def gpus(request):
    """Two workers in this process, and the CuPy that they compute with."""
    with cupy_of(request.param) as module, cluster() as made, Client(made) as client:
        yield client, module


@pytest.fixture
def name(request):
    return request.node.name


class Weighed(Ridge):
    """Takes batches of any form."""

    def loss_and_grads(self, params, batch, *, rng=None):
        rows = list(batch.values()) if isinstance(batch, dict) else list(batch)
        self.see(*rows)
        return super().loss_and_grads(params, rows[:2])


def some(rows, seed):
    rng = np.random.default_rng(seed)
    return rng.random((rows, 64), np.float32), rng.random(rows, np.float32)


def train(client, name, module, on=None, host=False, **created):
    """Two steps and two train ops, of batches of each form; the losses and the parameters."""
    (x, y), (a, b) = some(24, 1), some(8, 2)
    with Session(name, client=client, timeout=30) as s:
        s.create(
            Weighed(module, on, host),
            optimizer=optim.adam(0.1),
            partitioner=dtrain.FixedShards(1),
            **created,
        )
        try:
            losses = [s.step([(x, y), {"x": a, "y": b}]) for _ in range(2)]
            (op,) = s.train_ops([(x, y, np.ones(24, np.float32))], batch_size=12)
            losses += [op(), op()]
            assert {entry["device"] for entry in s.variables()} == {"cpu"}
            return losses, s.pull().params["w"]
        finally:
            s.reset()


@pytest.mark.parametrize("host", [False, True], ids=["", "gradients in host memory"])
def test_steps_and_train_ops_on_a_gpu_are_those_on_the_cpu(gpus, name, host):
    client, cupy = gpus
    expected, w = train(client, name, "numpy", device="cpu")
    found, there = train(client, name, "cupy", 0, host, device="cuda")
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    np.testing.assert_allclose(there, w, rtol=1e-3, atol=1e-4)
    if hasattr(cupy, "crossed"):
        assert there.tobytes() == w.tobytes()
        assert found == expected


def test_parameters_and_gradients_cross_in_one_piece_each(name):
    with stand_in() as cupy, cluster(1) as made, Client(made) as client:
        before = dict(cupy.crossed)
        train(client, name, "cupy", device="cuda")
        # Of two replicas in two steps, and two train ops.
        assert cupy.crossed["set"] - before["set"] == 6
        assert cupy.crossed["get"] - before["get"] == 6


def test_the_number_selects_the_gpu(name):
    with stand_in() as cupy, cluster(1) as made, Client(made) as client:
        train(client, name, "cupy", 1, device="cuda:1")
        assert client.submit(cupy.cuda.runtime.getDevice, pure=False).result(10) == 0


def test_a_block_says_where_as_it_does_of_jobs(gpus, name):
    client, _ = gpus
    with dtrain.device("cuda"):
        train(client, name, "cupy")
        train(client, name, "numpy", device="cpu")
    with dtrain.device("auto"):
        train(client, name, "cupy")
    # That of the create, wherever the steps are; who has only attached is asked then.
    x, y = some(8, 1)
    with (
        Session(name, client=client, timeout=30) as s,
        Session(name, client=client, timeout=30) as other,
    ):
        with dtrain.device("cuda"):
            s.create(Ridge("cupy"), optimizer=optim.sgd(0.1))
        s.step([(x, y)])
        with pytest.raises(TypeError, match="found an array of numpy"):
            other.step([(x, y)])
        with dtrain.device("cuda"):
            other.step([(x, y)])
            (op,) = other.train_ops([(x, y)])
        op()
        assert s.pull().version == 3
        s.reset()


def test_what_a_gpu_cannot_have_is_refused(gpus, name):
    client, _ = gpus
    x, y = some(4, 1)
    with Session(name, client=client, timeout=30) as s:
        s.create(Ridge("cupy"), optimizer=optim.sgd(0.1), device="cuda")
        with pytest.raises(dtrain.DataError, match="y: found dtype <U1, expected numbers"):
            s.step([(x, y), (x, np.array(list("abcd")))])
        with pytest.raises(dtrain.NonFiniteError, match="replica 0"):
            s.step([(x * np.float32("nan"), y)])
        assert s.pull().version == 0
        s.reset()


def test_none_has_it_and_nothing_is_created(threaded, name):
    with Session(name, client=threaded, timeout=30) as s:
        for wrong, words in (
            ("cuda", r"device: found 'cuda', expected a worker that has it, but .* has cpu "),
            ("gpu", "device: found 'gpu', expected 'cpu', 'cuda', "),
            (7, "device: found 7, expected"),
        ):
            with pytest.raises(SpecError, match=words):
                s.create(Ridge("numpy"), optimizer=optim.sgd(0.1), device=wrong)
        with dtrain.device("cuda"), pytest.raises(SpecError, match="device: found 'cuda'"):
            s.create(Ridge("numpy"), optimizer=optim.sgd(0.1))
        assert name not in [one["name"] for one in dtrain.sessions.find(threaded)]
        # With that nothing of the session has changed.
        s.create(Ridge("numpy"), optimizer=optim.sgd(0.1))
        s.step([some(8, 1)])
        with dtrain.device("cuda"), Session(name, client=threaded) as other:
            with pytest.raises(SpecError, match="device: found 'cuda'"):
                other.step([some(8, 1)])
            assert other.pull().version == 1
        s.reset()


def test_a_task_that_has_come_to_a_worker_without_it_is_sent_again(name):
    with (
        stand_in(),
        cluster(1) as made,
        Client(made) as client,
        Session(name, client=client, timeout=20) as s,
    ):
        s.create(Ridge("cupy"), optimizer=optim.sgd(0.1), device="cuda")
        (op,) = s.train_ops([some(8, 1)])
        (address,) = client.scheduler_info(-1)["workers"]
        service = service_at(address)
        asked = []

        class Devices(tuple):
            """As if the first two tasks had come to a worker that has none."""

            def __contains__(self, device):
                asked.append(device)
                return len(asked) > 2 and super().__contains__(device)

        service.devices = Devices(service.devices)
        s.step([some(8, 1)])
        assert len(asked) == 3
        del asked[:]
        op()
        assert len(asked) == 3
        assert s.pull().version == 2
        s.reset()


class Told(Ridge):
    """Leaves word of the worker at which it computes."""

    def __init__(self, module, folder):
        super().__init__(module)
        self.folder = folder

    def loss_and_grads(self, params, batch, *, rng=None):
        open(os.path.join(self.folder, get_worker().address.rpartition(":")[2]), "w").close()
        return super().loss_and_grads(params, batch)


@pytest.mark.cluster
def test_only_the_worker_that_has_it_computes(name, tmp_path):
    with uneven() as client, Session(name, client=client, timeout=60) as s:
        able = [w["where"] for w in dtrain.doctor(client)["workers"] if len(w["devices"]) > 1]
        s.create(
            Told("cupy", str(tmp_path)),
            optimizer=optim.sgd(0.1),
            device="cuda",
            partitioner=dtrain.FixedShards(2),
        )
        s.step([some(8, n) for n in range(4)])
        for op in s.train_ops([some(8, n) for n in range(3)]):
            op()
        assert [able[0].rpartition(":")[2].rstrip(")")] == os.listdir(tmp_path)
        assert len({entry["worker"] for entry in s.variables()}) == 2
        assert s.pull().version == 4
