"""Jobs that end once it is enough, with the best parameters; and callbacks that watch."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import dtrain
from dtrain import EarlyStopping
from tests.conftest import until

from .conftest import processes

X = np.zeros((32, 1), np.float32)
Y = np.zeros(32, np.float32)


class Climb:
    """Its parameter is the number of its steps; the best one is 20."""

    task = "regression"

    def __init__(self, hold=""):
        self.hold = str(hold)

    def init(self, rng):
        return {"w": np.zeros(1, np.float32)}

    def loss_and_grads(self, params, batch):
        # From 26 on it takes its time, as long as the file is there.
        while self.hold and params["w"][0] >= 26 and os.path.exists(self.hold):
            time.sleep(0.01)
        return 1.0, {"w": -np.ones(1, np.float32)}

    def predict(self, params, x):
        return np.zeros(len(x), np.float32)

    def loss(self, params, batch):
        return float(abs(params["w"][0] - 20))


def job(client, model=None, **arguments):
    """Eight steps for each epoch: the values are 12, 4, 4, 12 ..."""
    arguments = {
        "optimizer": dtrain.optim.sgd(1.0), "replicas": 2, "batch_size": 2, "epochs": 20,
        "validation_data": (X[:3], Y[:3]), "callbacks": [EarlyStopping()], **arguments,
    }  # fmt: skip
    return dtrain.submit(model or Climb(), X, Y, client=client, **arguments)


MODES = [
    {},
    {"replication": "in-graph"},
    {"mode": dtrain.Async(), "batch_size": 4},
]


@pytest.mark.parametrize("arguments", MODES, ids=["sync", "in-graph", "async"])
def test_it_ends_with_the_best(anywhere, arguments):
    handle = job(anywhere, **arguments)
    result = handle.result(timeout=60)
    assert [record["val_loss"] for record in result.history] == [12, 4, 4, 12]
    assert (result.params["w"][0], result.version) == (16, 16)
    assert handle.events()[-1]["state"] == "SUCCEEDED"
    told = [event["message"] for event in handle.events()]
    assert "trained for 4 epochs: val_loss was best in epoch 2" in told
    kept = anywhere.run(lambda dask_worker: _kept(dask_worker.address))
    assert set(kept.values()) == {0}


def _kept(address):
    from dtrain.runtime.worker import service_at

    return len(service_at(address).bests._of)


def test_without_restoring_it_has_the_last(threaded):
    result = job(threaded, callbacks=[EarlyStopping(restore_best=False)]).result(timeout=60)
    assert (result.params["w"][0], result.version) == (32, 32)


def test_the_best_is_restored_also_where_the_job_ended_by_itself(threaded):
    result = job(threaded, epochs=4, callbacks=[EarlyStopping(patience=9)]).result(timeout=60)
    assert len(result.history) == 4
    assert (result.params["w"][0], result.version) == (16, 16)


def test_the_saved_model_is_the_best_too(threaded, tmp_path):
    result = job(threaded, output=tmp_path / "model").result(timeout=60)
    loaded = dtrain.load(result.output, model=Climb())
    assert (loaded.params["w"][0], loaded.version) == (16, 16)


def test_a_job_that_was_ended_goes_on_with_more_patience(threaded, tmp_path):
    place = {"checkpoint": dtrain.Checkpoint(tmp_path / "kept", every=8)}
    assert len(job(threaded, **place).result(timeout=60).history) == 4
    again = job(threaded, resume=True, **place).result(timeout=60)
    assert len(again.history) == 4
    more = [EarlyStopping(patience=3, restore_best=False)]
    longer = job(threaded, resume=True, callbacks=more, **place).result(timeout=60)
    assert [record["epoch"] for record in longer.history] == [1, 2, 3, 4, 5]
    assert longer.params["w"][0] == 40


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_the_best_outlives_the_worker_of_the_chief(tmp_path, transport):
    hold = tmp_path / "hold"
    hold.write_text("")
    place = dtrain.Checkpoint(tmp_path / "kept", every=4)
    with processes(2, **{"dtrain.transport": transport}) as client:
        handle = job(client, Climb(hold), checkpoint=place)
        until(lambda: len(handle.status()["history"]) >= 3, 60, "no third epoch")
        pids = client.run(os.getpid)
        os.kill(pids[handle.status()["replicas"]["0"]], signal.SIGKILL)
        until(lambda: handle.status()["losses"] == 1, 60, "it is not missed")
        hold.unlink()
        result = handle.result(timeout=90)
        handle.release()
    assert (result.params["w"][0], result.version) == (16, 16)
    assert [record["val_loss"] for record in result.history] == [12, 4, 4, 12]


class Seen(dtrain.Callback):
    def __init__(self):
        self.told = []

    def on_start(self, job):
        self.told.append(("start", job.id))

    def on_step(self, step, logs):
        self.told.append(("step", step, set(logs)))

    def on_epoch(self, epoch, logs):
        self.told.append(("epoch", epoch, logs["val_loss"]))

    def on_event(self, event):
        self.told.append(("event", event["state"]))

    def on_end(self, result):
        self.told.append(("end", result.version))


def test_callbacks_see_all_of_it(threaded):
    seen = Seen()
    result = dtrain.fit(
        Climb(), X, Y, optimizer=dtrain.optim.sgd(1.0), batch_size=2, epochs=20, replicas=2,
        validation_data=(X[:3], Y[:3]), callbacks=[EarlyStopping(), seen], client=threaded,
        progress=False,
    )  # fmt: skip
    assert seen.told[0][0] == "start"
    assert seen.told[-1] == ("end", 16)
    epochs = [said[1:] for said in seen.told if said[0] == "epoch"]
    assert epochs == [(1, 12), (2, 4), (3, 4), (4, 12)]
    states = [said[1] for said in seen.told if said[0] == "event"]
    assert (states[0], states[-1]) == ("QUEUED", "SUCCEEDED")
    steps = [said[1] for said in seen.told if said[0] == "step"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 32
    assert result.version == 16


class Raises(dtrain.Callback):
    def on_epoch(self, epoch, logs):
        raise LookupError("enough of it")


def test_an_error_of_a_callback_ends_the_job(threaded):
    with pytest.raises(LookupError, match="enough of it"):
        dtrain.fit(
            Climb(), X, Y, batch_size=2, epochs=100_000, client=threaded, progress=False,
            callbacks=[Raises()],
        )  # fmt: skip
    newest = dtrain.jobs(threaded)[-1]
    assert newest.wait(timeout=30) == "CANCELLED"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(callbacks=[EarlyStopping("val_mse")]), "monitor: found 'val_mse', expected one of"),
        (dict(callbacks=[3]), r"callbacks: found 3, expected dtrain.EarlyStopping\(...\) or a"),
        (dict(validation_data=None), "monitor: found 'val_loss', expected one of 'loss'"),
    ],
)
def test_callbacks_that_cannot_be(threaded, arguments, words):
    with pytest.raises(dtrain.SpecError, match=words):
        job(threaded, **arguments)
