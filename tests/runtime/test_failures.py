"""What goes wrong ends within seconds, with one clear error, and leaves the cluster usable."""

from __future__ import annotations

import os
import re
import signal
import threading

import numpy as np
import pytest

import dtrain
from dtrain.models import Linear, Logistic
from tests.conftest import until

from .conftest import processes

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 4)).astype(np.float32)
Y = X @ np.arange(4, dtype=np.float32)
LABELS = (Y > 0).astype(int)
NO_LOSS = dtrain.Recovery(max_losses=0)


def fit(client, model=None, x=X, y=Y, **arguments):
    arguments = {"batch_size": 10, "client": client, "progress": False, **arguments}
    return dtrain.fit(model or Linear(4), x, y, **arguments)


class Own:
    """A model of one's own, the least that there can be."""

    def init(self, rng):
        return {"w": np.zeros(4, np.float32)}

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        x, y = batch
        residual = x @ params["w"] - y
        return float(np.mean(residual**2)), {"w": (2 * x.T @ residual / len(y)).astype(np.float32)}

    def predict(self, params, x):
        return x @ params["w"]


class Raises(Own):
    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        raise KeyError("no such feature")


class Unreadable(Exception):
    """An exception that cannot be pickled back."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


class RaisesUnreadable(Own):
    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        raise Unreadable("one", "two")


class NoInit(Own):
    def init(self, rng):
        raise RuntimeError("no weights today")


def answers(grads, loss=0.5):
    class Answers(Own):
        def loss_and_grads(self, params, batch, *, out=None, rng=None):
            return loss, grads

    return Answers()


def test_a_model_of_ones_own(threaded):
    result = fit(threaded, Own(), epochs=40, optimizer=dtrain.optim.sgd(0.1))
    assert np.allclose(result.params["w"], np.arange(4), atol=1e-3)
    assert np.allclose(result.predict(X), Y, atol=1e-2)


def test_a_model_without_rng_and_out(threaded):
    class Plain(Own):
        def loss_and_grads(self, params, batch):
            return super().loss_and_grads(params, batch)

    result = fit(threaded, Plain(), epochs=40, optimizer=dtrain.optim.sgd(0.1))
    assert np.allclose(result.params["w"], np.arange(4), atol=1e-3)


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_user_exception_comes_up_as_itself(threaded, mode):
    with pytest.raises(KeyError, match="no such feature") as caught:
        fit(threaded, Raises(), mode=mode)
    notes = "".join(caught.value.__notes__)
    assert "Remote traceback" in notes
    assert "in loss_and_grads" in notes
    assert "replica " in notes
    assert "step 0" in notes


def test_user_exception_that_cannot_travel_comes_as_words(threaded):
    with pytest.raises(dtrain.JobFailed, match="Unreadable: one two") as caught:
        fit(threaded, RaisesUnreadable())
    assert caught.value.reason == "USER_ERROR"


def test_init_that_raises(threaded):
    with pytest.raises(RuntimeError, match="no weights today"):
        fit(threaded, NoInit())


def nowhere(sizes, workers):
    raise LookupError("no place today")


def too_few(sizes, workers):
    return [0]


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (nowhere, LookupError, "no place today"),
        (
            too_few,
            dtrain.SpecError,
            r"returned \[0\], expected 2 indices, one for each shard, from",
        ),
        (lambda s, w: [1, 1], dtrain.SpecError, "expected at least one shard at worker 0, inproc:"),
        (lambda s, w: [0, 2], dtrain.SpecError, "expected 2 indices.*from 0 to 1 .2 workers."),
    ],
)
def test_a_placement_that_cannot_be_fails_the_job(threaded, function, kind, words):
    with pytest.raises(kind, match=words) as caught:
        fit(threaded, shards=2, placement=function)
    assert "placement of the shards" in "".join(caught.value.__notes__)
    job = dtrain.jobs(threaded)[-1].status()
    assert (job["state"], job["reason"]) == ("FAILED", "USER_ERROR")


def test_a_placement_that_cannot_be_pickled_is_refused(threaded):
    lock = threading.Lock()
    with pytest.raises(dtrain.SpecError, match="placement: found a function that cannot be pickl"):
        fit(threaded, placement=lambda sizes, workers: lock and [0])


@pytest.mark.parametrize(
    ("grads", "words"),
    [
        ({}, "w"),
        ({"w": np.zeros(3, np.float32)}, r"\(3,\).*\(4,\)"),
        ({"w": np.zeros(4)}, "float64.*float32"),
        ({"w": np.zeros(4, np.float32), "b": np.zeros(1, np.float32)}, "b"),
    ],
)
def test_wrong_gradients_are_refused(threaded, grads, words):
    with pytest.raises(Exception, match=words) as caught:
        fit(threaded, answers(grads))
    assert "replica" in "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)


def test_an_answer_that_is_no_pair(threaded):
    class Odd(Own):
        def loss_and_grads(self, params, batch, *, out=None, rng=None):
            return None

    with pytest.raises(Exception, match=r"expected a pair \(loss, grads\)"):
        fit(threaded, Odd())


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_nan_in_the_data_names_replica_partition_and_step(threaded, mode):
    bad = X.copy()
    bad[47, 2] = np.nan  # in the second of two parts
    with pytest.raises(dtrain.NonFiniteError) as caught:
        fit(threaded, x=bad, mode=mode, replicas=2, shuffle=False)
    text = str(caught.value)
    # In asynchronous mode the other one may have taken the batch from the end of the part.
    assert "replica 1" in text or (mode == dtrain.Async() and "replica 0" in text)
    assert "partition 1" in text
    assert "step" in text
    assert caught.value.reason == "NON_FINITE"


def test_a_gradient_that_is_not_finite_while_its_loss_is(threaded):
    grads = {"w": np.array([0, np.inf, 0, 0], np.float32)}
    with pytest.raises(dtrain.NonFiniteError, match=r"gradient of replica 0 .* step 0"):
        fit(threaded, answers(grads))


def test_large_but_finite_gradients_are_taken(threaded):
    """Their sum of squares overflows; they do not."""
    grads = {"w": np.full(4, 1e30, np.float32)}
    result = fit(threaded, answers(grads), optimizer=dtrain.optim.sgd(1e-30), steps=2)
    assert np.isfinite(result.params["w"]).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": Y[:-1]}, "60 rows.*59"),
        ({"x": X[:, :3]}, "3.*4"),
        ({"x": X[:, 0]}, r"reshape\(-1, 1\)"),
        ({"y": np.zeros((60, 2), np.float32)}, r"\(60, 2\)"),
        ({"model": Logistic(4), "y": np.zeros((60, 2), int)}, r"\(60, 2\)"),
        ({"model": Logistic(4), "y": np.arange(60)}, "60 different labels"),
        ({"x": X[:1], "y": Y[:1], "replicas": 2}, "found 1 rows to train on for 2 replicas"),
        ({"x": X.astype(complex)}, "complex"),
        ({"x": [["a"] * 4] * 60}, "numbers"),
        ({"model": Logistic(4), "y": np.where(LABELS == 1, np.nan, 0.0)}, "NaN"),
        ({"y": None}, "None"),
        (
            {"model": Logistic(4), "y": LABELS, "validation_data": (X, LABELS + 1)},
            "label 2",
        ),
        ({"validation_data": (X[:, :2], Y)}, "validation X"),
        ({"x": X[:2], "y": Y[:2], "validation_split": 0.1}, "validation_split"),
    ],
)
def test_bad_data_is_told_before_anything_starts(threaded, changes, words):
    before = len(dtrain.jobs(threaded))
    with pytest.raises(dtrain.DataError, match=words):
        fit(threaded, **changes)
    assert len(dtrain.jobs(threaded)) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"replicas": -1}, "replicas"),
        ({"steps": 0}, "steps"),
        ({"seed": -3}, "seed"),
        ({"mode": "sync"}, "mode"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"metrics": ["accuracy"], "validation_split": 0.2}, "accuracy"),
        ({"metrics": ["mse"]}, "validation"),
        ({"metrics": "mse", "validation_split": 0.2}, "list"),
        ({"validation_split": 1.5}, "validation_split"),
        ({"validation_split": 0.2, "validation_data": (X, Y)}, "both"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"model": object()}, "init"),
        ({"name": "a\nb"}, "name"),
        ({"shuffle": 1}, "shuffle"),
        ({"client": 3}, "client"),
    ],
)
def test_bad_arguments_are_told_by_name(threaded, changes, words):
    with pytest.raises(dtrain.SpecError, match=words):
        fit(changes.pop("client", threaded), **changes)


def test_output_that_is_something_else_is_not_touched(threaded, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(dtrain.SpecError, match=r"precious\.txt"):
        fit(threaded, output=tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_output_that_cannot_be_written_is_a_storage_failure(threaded, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(dtrain.JobFailed) as caught:
        fit(threaded, output=tmp_path / "file" / "model")
    assert caught.value.reason == "STORAGE"
    assert "file" in str(caught.value)


class Endless(Own):
    """Trains until it is stopped."""


def endless(client, **arguments):
    arguments = {"epochs": 10**6, "batch_size": 10, "client": client, **arguments}
    handle = dtrain.submit(Endless(), X, Y, **arguments)
    until(lambda: handle.status()["step"] > 0, 40, "no step yet")
    return handle


@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
def test_cancel(threaded, mode):
    handle = endless(threaded, mode=mode)
    assert handle.state == "RUNNING"
    handle.cancel()
    assert handle.wait(timeout=30) == "CANCELLED"
    with pytest.raises(dtrain.JobCancelled):
        handle.result()
    handle.cancel()
    assert handle.state == "CANCELLED"


def test_two_jobs_at_once_get_the_results_of_one(threaded):
    alone = fit(threaded, epochs=5)
    first = dtrain.submit(Linear(4), X, Y, batch_size=10, epochs=5, client=threaded)
    second = dtrain.submit(Linear(4), X, Y, batch_size=10, epochs=5, client=threaded)
    for handle in (first, second):
        found = handle.result(timeout=30)
        assert found.params["weight"].tobytes() == alone.params["weight"].tobytes()


def kill(client, address):
    os.kill(client.run(os.getpid, workers=[address])[address], signal.SIGKILL)


@pytest.mark.cluster
@pytest.mark.parametrize("mode", [dtrain.Sync(), dtrain.Async()])
@pytest.mark.parametrize("which", ["chief", "other"])
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_a_killed_worker_ends_a_job_that_may_lose_none_and_is_named(mode, which, transport):
    """Never a hang; the cluster takes the next job when the worker is back."""
    with processes(2, **{"dtrain.transport": transport}) as client:
        handle = endless(client, mode=mode, recovery=NO_LOSS)
        where = handle.status()["replicas"]
        victim = where["0" if which == "chief" else "1"]
        kill(client, victim)
        with pytest.raises(dtrain.WorkersLost) as caught:
            handle.result(timeout=10)
        assert victim in str(caught.value)
        assert "replicas" in str(caught.value)
        assert "expected at most 0" in str(caught.value)
        assert caught.value.reason == "WORKERS_LOST"
        client.wait_for_workers(2, timeout=30)
        assert fit(client, epochs=2, replicas=2).version == 6


class Gated(Own):
    """Of use to those who want to do something in mid job: it waits at its batches for a file.

    The first ten batches of each process pass.
    """

    def __init__(self, gate):
        self.gate, self.passed = gate, 0

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        self.passed += 1
        while self.passed > 10 and not self.gate.exists():
            threading.Event().wait(0.01)
        return super().loss_and_grads(params, batch, out=out, rng=rng)


def gated(client, folder, **arguments):
    """A job of 60 steps that has taken some, and takes no more until the gate is open."""
    gate = folder / "gate"
    arguments = {"batch_size": 10, "epochs": 20, "replicas": 2, "client": client} | arguments
    handle = dtrain.submit(Gated(gate), X, Y, optimizer=dtrain.optim.sgd(0.1), **arguments)
    until(lambda: handle.status()["step"] > 5, 40, "no step yet")
    return handle, gate


def words(handle):
    """All that has happened to a job."""
    return "; ".join(event["message"] for event in handle.events())


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_a_job_goes_on_when_its_chief_is_killed(threaded, tmp_path, transport):
    """With the bits of a job that lost nobody; without shared memory from the start again."""
    base = fit(threaded, Own(), epochs=20, replicas=2, optimizer=dtrain.optim.sgd(0.1))
    with processes(2, **{"dtrain.transport": transport}) as client:
        handle, gate = gated(client, tmp_path)
        victim = handle.status()["replicas"]["0"]
        kill(client, victim)
        gate.touch()
        result, told = handle.result(timeout=30), words(handle)
        assert handle.status()["losses"] == 1
    assert result.params["w"].tobytes() == base.params["w"].tobytes()
    assert [e["loss"] for e in result.history] == [e["loss"] for e in base.history]
    assert result.ledger.samples == [60] * 20
    assert result.ledger.applied == base.ledger.applied
    assert victim in told
    assert ("from memory" if transport == "auto" else "from start") in told


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_an_asynchronous_job_goes_on_when_its_chief_is_killed(tmp_path, transport):
    """Every row is used once in each epoch; what was applied twice is counted."""
    with processes(2, **{"dtrain.transport": transport}) as client:
        handle, gate = gated(client, tmp_path, mode=dtrain.Async())
        kill(client, handle.status()["replicas"]["0"])
        gate.touch()
        result, told = handle.result(timeout=30), words(handle)
    ledger = result.ledger
    assert len(result.history) == 20
    assert ledger.samples == [60] * 20
    assert result.version == ledger.applied + ledger.duplicates
    assert ("from memory" if transport == "auto" else "from start") in told


class Stuck(Own):
    """Its second replica never comes back from user code, until it is told to."""

    def loss_and_grads(self, params, batch, *, out=None, rng=None):
        if batch[0][0, 0] < 0:
            GATE.wait(30)
        return super().loss_and_grads(params, batch, out=out, rng=rng)


GATE = threading.Event()


def test_why_waiting_names_the_one_that_is_waited_for(threaded):
    x = np.abs(X)
    x[30:, 0] = -1
    GATE.clear()
    handle = dtrain.submit(Stuck(), x, Y, batch_size=10, replicas=2, client=threaded)
    try:
        until(
            lambda: re.search("step 0 .*replica 1 on worker", handle.why_waiting()),
            8,
            "the stalled replica is not named",
        )
        # It hangs in user code: the job ends all the same, and says where it hangs.
        handle.cancel()
        assert handle.wait(timeout=30) == "CANCELLED"
    finally:
        GATE.set()


@pytest.mark.cluster
def test_an_attached_job_ends_with_its_client():
    from distributed import Client

    with processes(1, **{"dtrain.client-lease": "500ms"}) as client:
        guest = Client(client.scheduler.address, set_as_default=False)
        attached = endless(guest, detach=False)
        detached = endless(guest, detach=True)
        guest.close()
        mine = dtrain.attach(attached.id, client.scheduler.address)
        assert mine.wait(timeout=30) == "CANCELLED"
        assert "client" in mine.status()["message"]
        other = dtrain.attach(detached.id, client)
        assert other.state == "RUNNING"
        other.cancel()
        assert other.wait(timeout=30) == "CANCELLED"


@pytest.mark.cluster
def test_a_guest_that_leaves_does_not_take_an_attached_job_with_it():
    from distributed import Client

    with processes(1, **{"dtrain.client-lease": "300ms"}) as client:
        handle = endless(client, detach=False)
        with Client(client.scheduler.address, set_as_default=False) as guest:
            assert dtrain.attach(handle.id, guest).state == "RUNNING"
        seconds = handle.status()["seconds"]
        until(lambda: handle.status()["seconds"] > seconds + 1, 30, "no time passes")
        assert handle.state == "RUNNING"
        handle.cancel()
        handle.wait(timeout=30)


@pytest.mark.cluster
def test_a_client_that_comes_back_keeps_its_job():
    from distributed import Client

    with processes(1, **{"dtrain.client-lease": "3s"}) as client:
        guest = Client(client.scheduler.address, set_as_default=False)
        handle = endless(guest, detach=False)
        guest.close()
        again = dtrain.attach(handle.id, client)
        until(lambda: again.status()["seconds"] > 4, 30, "no time passes")
        assert again.state == "RUNNING"
        again.cancel()
        again.wait(timeout=30)


def test_the_status_has_the_steps_in_all_from_the_start(threaded):
    for mode, total in ((dtrain.Sync(), 3 * 10**6), (dtrain.Async(), 6 * 10**6)):
        handle = endless(threaded, mode=mode, replicas=2)
        assert handle.status()["total_steps"] == total
        handle.cancel()
        handle.wait(timeout=30)


def test_a_saved_output_has_its_history(threaded, tmp_path):
    result = fit(threaded, epochs=3, output=tmp_path / "model")
    assert dtrain.load(tmp_path / "model").history == result.history


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((None, {}), "loss: found None"),
        ((0.5, None), "gradients: found NoneType, expected a dict"),
        ((0.5, {}), "w"),
        (None, r"expected a pair \(loss, grads\)"),
    ],
)
def test_an_odd_answer_is_told(threaded, answer, words):
    class Odd(Own):
        def loss_and_grads(self, params, batch, *, out=None, rng=None):
            return answer

    with pytest.raises(Exception, match=words):
        fit(threaded, Odd())


def test_a_gradient_that_is_never_written_is_refused(threaded):
    class Forgets(Own):
        def loss_and_grads(self, params, batch, *, out=None, rng=None):
            return 0.5, out

    with pytest.raises(dtrain.NonFiniteError, match="gradient of replica 0"):
        fit(threaded, Forgets())


def test_user_code_that_exits_is_a_failure_of_its_job(threaded):
    class Exits(Own):
        def loss_and_grads(self, params, batch, *, out=None, rng=None):
            raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        fit(threaded, Exits())
    assert "replica" in "".join(caught.value.__notes__)


def test_predictions_of_another_length_are_told(threaded):
    class Short(Own):
        def predict(self, params, x):
            return np.zeros(3)

    with pytest.raises(dtrain.DataError, match=r"found shape \(3,\), expected"):
        fit(threaded, Short(), validation_split=0.5, metrics=["mse"])


@pytest.mark.parametrize("key", ["epochs", "batch_size", "steps", "seed"])
def test_numbers_beyond_all_bounds_are_told(threaded, key):
    with pytest.raises(dtrain.SpecError, match=key):
        fit(threaded, **{key: 10**30})


def test_models_that_cannot_be_are_told(threaded):
    with pytest.raises(dtrain.SpecError, match=r"expected an object: Own\(\.\.\.\)"):
        fit(threaded, Own)
    held = Own()
    held.lock = threading.Lock()
    with pytest.raises(dtrain.SpecError, match="cannot be pickled"):
        fit(threaded, held)


class frozen:
    """For a ``with`` block a worker's process does not run."""

    def __init__(self, client, address):
        self._pid = client.run(os.getpid, workers=[address])[address]

    def __enter__(self):
        os.kill(self._pid, signal.SIGSTOP)

    def __exit__(self, *error):
        os.kill(self._pid, signal.SIGCONT)


@pytest.mark.cluster
def test_a_frozen_worker_is_named_by_why_until_its_lease_runs_out():
    with processes(2, **{"dtrain.lease": "1 hour"}) as client:
        handle = endless(client)
        victim = handle.status()["replicas"]["1"]
        with frozen(client, victim):
            until(lambda: "not heard of" in handle.why_waiting(), 15, handle.why_waiting())
            assert victim in handle.why_waiting()
            assert handle.state == "RUNNING"
        step = handle.status()["step"]
        until(lambda: handle.status()["step"] > step, 30, "it does not go on")
        assert handle.status()["generation"] == 1
        handle.cancel()
        handle.wait(timeout=20)


@pytest.mark.cluster
def test_a_frozen_worker_ends_a_job_that_may_lose_none():
    with processes(2) as client:
        handle = endless(client, recovery=NO_LOSS)
        victim = handle.status()["replicas"]["1"]
        with frozen(client, victim):
            with pytest.raises(dtrain.WorkersLost) as caught:
                handle.result(timeout=15)
            assert victim in str(caught.value)
        until(lambda: len(client.run(os.getpid)) == 2, 30, "it is not back")
        assert fit(client, epochs=2, replicas=2).version == 6


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_a_job_goes_on_without_a_frozen_worker(threaded, tmp_path, transport):
    """What the worker does when it wakes up changes nothing any more."""
    base = fit(threaded, Own(), epochs=20, replicas=2, optimizer=dtrain.optim.sgd(0.1))
    with processes(2, **{"dtrain.transport": transport}) as client:
        handle, gate = gated(client, tmp_path)
        victim = handle.status()["replicas"]["1"]
        with frozen(client, victim):
            until(lambda: handle.status()["generation"] > 1, 30, "it is not missed")
            gate.touch()
            result = handle.result(timeout=30)
        assert result.params["w"].tobytes() == base.params["w"].tobytes()
        assert [e["loss"] for e in result.history] == [e["loss"] for e in base.history]
        assert result.ledger.samples == [60] * 20
        assert victim in words(handle)
        until(lambda: len(client.run(os.getpid)) == 2, 30, "it is not back")
        assert fit(client, epochs=2, replicas=2).version == 6


@pytest.mark.cluster
def test_a_result_outlives_its_worker_but_not_all_that_have_it():
    with processes(2) as client:
        done = dtrain.submit(Linear(4), X, Y, batch_size=10, client=client)
        done.wait(timeout=20)
        for address in client.run(os.getpid):
            params = dtrain.attach(done.id, client).result(timeout=20).params
            assert np.isfinite(params["weight"]).all()
            kill(client, address)
            until(lambda a=address: a not in client.scheduler_info(-1)["workers"], 30, "is there")
        with pytest.raises(dtrain.JobFailed, match="no worker holds its result any more"):
            dtrain.attach(done.id, client).result(timeout=20)
