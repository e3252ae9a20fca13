"""Where a job may begin: a checkpoint that fits, parameters of one's own, workers enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dtrain

RNG = np.random.default_rng(4)
X = RNG.normal(size=(90, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


def fit(client: Any, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "optimizer": dtrain.optim.adam(0.01),
        "replicas": 2,
        "batch_size": 10,
        "epochs": 4,
    }
    arguments |= {"client": client, "progress": False} | changes
    return dtrain.fit(dtrain.models.MLP([5, 8, 2]), X, Y, **arguments)


def bits(result: Any) -> Any:
    timing = ("seconds", "samples_per_s")
    history = [{k: v for k, v in e.items() if k not in timing} for e in result.history]
    return {name: p.tobytes() for name, p in result.params.items()}, history


@pytest.fixture
def place(threaded, tmp_path):
    """Checkpoints of a job that was ended in the middle of its second epoch."""
    fit(threaded, steps=7, checkpoint=dtrain.Checkpoint(tmp_path / "ckpt", every=3))
    return dtrain.Checkpoint(tmp_path / "ckpt", every=1000)


@pytest.mark.parametrize("changes", [{}, {"shards": 1}, {"replicas": None}])
def test_it_goes_on_as_if_it_had_never_stopped(threaded, place, changes):
    # A save that is still being written puts off the next one.
    assert dtrain.checkpoints.find(place.dir)[0]["step"] == 7
    resumed = fit(threaded, checkpoint=place, resume=True, **changes)
    assert bits(resumed) == bits(fit(threaded))
    assert resumed.ledger.samples == [90] * 4


def test_where_shards_are_cut_does_not_matter(threaded, place, monkeypatch):
    """Blocks of another size, as another version may have them, and as many shards as before."""
    assert dtrain.checkpoints.find(place.dir)[0]["step"] == 7
    whole = fit(threaded)
    monkeypatch.setattr("dtrain.layout.BLOCKS", 2)
    assert bits(fit(threaded, checkpoint=place, resume=True)) == bits(whole)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_nor_in_asynchronous_mode(threaded, tmp_path, monkeypatch, shards):
    where = dtrain.Checkpoint(tmp_path / "free", every=1000)
    changes = {"mode": dtrain.Async(), "checkpoint": where}
    fit(threaded, steps=7, **changes)
    monkeypatch.setattr("dtrain.layout.BLOCKS", 2)
    resumed = fit(threaded, resume=True, shards=shards, **changes)
    assert resumed.ledger.samples == [90] * 4
    assert resumed.version == resumed.ledger.applied


def test_once_more_when_all_is_done_changes_nothing(threaded, place):
    first = fit(threaded, checkpoint=place, resume=True)
    assert bits(fit(threaded, checkpoint=place, resume=True)) == bits(first)


def test_where_there_is_none_it_begins_anew(threaded, tmp_path):
    fresh = dtrain.Checkpoint(tmp_path / "fresh")
    assert bits(fit(threaded, checkpoint=fresh, resume=True)) == bits(fit(threaded))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resume": False}, "found the checkpoint step-00000007"),
        ({"seed": 1}, "it has seed 0, expected 1"),
        ({"replicas": 3}, "it has replicas 2, expected 3"),
        ({"batch_size": 9}, "it has batch_size 10, expected 9"),
        ({"mode": dtrain.Async()}, "it has mode 'sync', expected 'async'"),
        ({"optimizer": dtrain.optim.sgd(0.1)}, "it has optimizer"),
    ],
)
def test_another_job_is_refused_before_it_starts(threaded, place, changes, words):
    before = len(dtrain.jobs(threaded))
    with pytest.raises(dtrain.CheckpointError, match=words):
        fit(threaded, checkpoint=place, **{"resume": True} | changes)
    assert len(dtrain.jobs(threaded)) == before
    assert all(e["problem"] is None for e in dtrain.checkpoints.verify(place.dir))


def test_fewer_steps_than_it_has_are_an_error(threaded, place):
    with pytest.raises(dtrain.JobFailed, match="it is at step 7, expected at most 5"):
        fit(threaded, checkpoint=place, resume=True, steps=5)


def test_another_learning_rate_is_allowed(threaded, place):
    slower = fit(threaded, checkpoint=place, resume=True, optimizer=dtrain.optim.adam(1e-9))
    at_seven = fit(threaded, steps=7)
    for name, value in slower.params.items():
        np.testing.assert_allclose(value, at_seven.params[name], atol=1e-6)


def test_parameters_of_ones_own(threaded, tmp_path):
    result = fit(threaded, epochs=1)
    result.save(tmp_path / "model")
    given = [fit(threaded, initial=i) for i in (result, result.params, tmp_path / "model")]
    assert len({str(bits(g)) for g in given}) == 1
    assert bits(given[0]) != bits(fit(threaded))


@pytest.mark.parametrize(
    ("initial", "error", "words"),
    [
        (3, dtrain.SpecError, "initial: found int"),
        ({}, dtrain.SpecError, "initial: found dict"),
        ("nowhere", dtrain.ModelFileError, "no saved model there"),
        ({"w": np.zeros(3, np.float32)}, dtrain.JobFailed, "initial: .* is missing"),
    ],
)
def test_what_is_no_set_of_parameters(threaded, initial, error, words):
    with pytest.raises(error, match=words):
        fit(threaded, initial=initial)


def test_workers_enough_from_the_start(threaded):
    with pytest.raises(dtrain.ClusterError, match=r"found 2 .* at least 3 .*min_workers"):
        fit(threaded, recovery=dtrain.Recovery(min_workers=3))
