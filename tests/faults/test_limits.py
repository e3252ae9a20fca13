"""What ends a job for good, and how it says so; what does not although it looks like it."""

from __future__ import annotations

import os
import signal
import time

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dtrain
from tests.runtime.conftest import processes

from .harness import (
    FEATURES,
    ROWS,
    Fault,
    Paced,
    X,
    Y,
    arm,
    finished,
    once,
    paced,
    run,
    same,
    struck,
    submit,
    watch,
    whole_again,
)

pytestmark = pytest.mark.cluster

#: What a row has that no worker survives.
MARK = 1e6


class Poisoned(Paced):
    """A marked row kills the process that has it, or raises."""

    how = 0

    def pause(self, batch):
        if (batch[0] == MARK).any():
            if self.how:
                os.kill(os.getpid(), self.how)
            raise ValueError("a marked row")
        super().pause(batch)


@pytest.fixture
def poison():
    """All rows of one part are marked: nobody can train on any of its batches."""
    found = X.copy()
    found[ROWS // 2 : 3 * ROWS // 4 - 10] = MARK
    return found


@pytest.mark.parametrize(
    "where",
    [
        "three",
        pytest.param(
            "apart",
            marks=[
                pytest.mark.slow,
                pytest.mark.xfail(
                    strict=True, reason="over the network nobody knows what the dead had in hand"
                ),
            ],
        ),
    ],
)
def test_a_batch_that_kills_its_worker_is_named(request, poison, where):
    client = request.getfixturevalue(where)
    story = run(client, paced(Poisoned, how=int(signal.SIGSEGV)), poison, shuffle=False)
    assert story.status["state"] == "FAILED"
    assert story.status["reason"] == "DATA_ERROR", story
    assert "batch 0 of partition 2 in epoch 1 has killed its worker 3 times" in str(story)
    assert story.status["losses"] == 3


def test_a_batch_that_raises_is_told_at_once(three, poison):
    handle = submit(three, paced(Poisoned), poison, shuffle=False)
    with pytest.raises(ValueError, match="a marked row") as caught:
        handle.result(timeout=20)
    notes = "".join(caught.value.__notes__)
    assert "partition 2" in notes
    assert "batch 0" in notes
    story = finished(handle)
    assert (story.status["losses"], story.status["generation"]) == (0, 1)


class Swells(Paced):
    """Takes memory until it is killed for it, once."""

    def pause(self, batch):
        if once(self.hold):
            taken = []
            while True:
                taken.append(np.ones(2**21))
                time.sleep(0.01)
        time.sleep(self.pace)


def test_a_worker_that_its_nanny_kills_for_its_memory(tmp_path):
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit="500MB",
            dashboard_address=None,
            silence_logs=50,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        story = run(client, paced(Swells, hold=tmp_path / "swollen"))
        same(story)
        assert story.status["losses"] == 1


def test_no_loss_is_allowed(three, tmp_path):
    """And the job says which was the one too many."""
    arm(three, tmp_path, Fault("writing", "plain"))
    story = run(three, recovery=dtrain.Recovery(max_losses=0))
    assert story.status["state"] == "FAILED"
    assert story.status["reason"] == "WORKERS_LOST"
    assert "loss 1, expected at most 0" in story.status["message"]
    assert "replicas [2]" in story.status["message"]
    (blow,) = struck(tmp_path)
    assert story.events[-1]["time"] - blow.at < 10


def test_one_loss_is_allowed(three, tmp_path):
    arm(three, tmp_path, Fault("writing", "plain", nth=4))
    same(run(three, recovery=dtrain.Recovery(max_losses=1)))
    whole_again(three, 3)
    arm(three, tmp_path, Fault("writing", "plain", nth=4, with_it=1))
    story = run(three, recovery=dtrain.Recovery(max_losses=1))
    assert story.status["state"] == "FAILED"
    assert "loss 2, expected at most 1" in story.status["message"]


def test_too_few_workers_are_waited_for_but_not_for_ever(tmp_path):
    with processes(2) as client:
        handle = submit(
            client,
            paced(pace=0.02),
            recovery=dtrain.Recovery(min_workers=2, deadline="1s"),
        )
        watch(handle, lambda: handle.status()["step"] > 3)
        # One is stopped: it does not come back, and one is too few.
        pid = client.run(os.getpid)[handle.status()["replicas"]["1"]]
        os.kill(pid, signal.SIGSTOP)
        try:
            story = finished(handle)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert story.status["reason"] == "WORKERS_LOST"
        assert "after 1 s there are fewer than 2 workers" in story.status["message"]
        assert "replicas [" in story.status["message"]


def test_too_few_workers_go_on_once_there_are_enough(three, tmp_path):
    arm(three, tmp_path, Fault("writing", "plain"))
    story = run(three, recovery=dtrain.Recovery(min_workers=3))
    same(story)
    assert story.said("generation 2 on 3 workers")


def test_numpy_input_survives_the_death_of_all_that_got_it(three, tmp_path):
    """Its file is read again by those that are started anew, for epochs yet to come."""
    arm(three, tmp_path, Fault("flipping", "chief", with_it=2))
    handle = submit(three)
    story = finished(handle)
    same(story)
    assert story.status["losses"] == 3


def test_dask_arrays_are_computed_again(three, tmp_path):
    """Those that the dead one had, by Dask itself; replicas are where their rows are."""
    x = da.from_array(X, chunks=(60, FEATURES))
    y = da.from_array(Y, chunks=60)
    arm(three, tmp_path, Fault("writing", "chief", nth=12))
    story = run(three, paced(pace=0.01), x, y)
    same(story)
    assert len(struck(tmp_path)) == 1
    assert story.status["losses"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("others", [1, 2])
def test_dask_arrays_are_computed_again_when_several_die(three, tmp_path, others):
    x = da.from_array(X, chunks=(60, FEATURES))
    y = da.from_array(Y, chunks=60)
    arm(three, tmp_path, Fault("writing", "chief", nth=12, with_it=others))
    story = run(three, paced(pace=0.01), x, y)
    same(story)
    # Replicas are where their rows are: maybe not at all workers.
    assert 1 <= story.status["losses"] <= others + 1
