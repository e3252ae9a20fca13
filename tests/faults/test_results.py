"""What becomes of the result of a job that has ended, when workers die."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest

import dtrain
from dtrain.runtime.transport import meeting
from tests.conftest import until

from .harness import Story, files_of, same, submit, watch, whole_again

pytestmark = pytest.mark.cluster


@contextmanager
def succeeded(client):
    """A job that is over, and whose result nobody has fetched; nothing is left of it after that."""
    handle = submit(client)
    watch(handle)
    assert handle.state == "SUCCEEDED"
    key, _ = handle._described()["result"]
    try:
        yield handle, key
    finally:
        settled(client, key)
        handle.release()
        meeting.forget(handle.id)


def settled(client, key):
    ends = ("memory", "erred", "no-worker", "released")
    until(lambda: client.run_on_scheduler(fate, key) in ends, 30, "it is still computed")


def holders(handle, client):
    key, _ = handle._described()["result"]
    return client.sync(client.scheduler.who_has, keys=[key])[key]


def kill(client, address):
    pid = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, signal.SIGKILL)
    until(lambda: address not in client.scheduler_info()["workers"], 30, "it is still there")
    whole_again(client, 3)


def test_a_result_outlives_the_worker_that_has_it(three):
    with succeeded(three) as (handle, _):
        # Dask thins out copies every two seconds: the next time is now.
        three.amm.run_once()
        _, where = handle._described()["result"]
        kill(three, where)
        result = handle.result(timeout=10)
        same(Story(handle, result, handle.status(), handle.events()))


def drop(address, key, dask_scheduler):
    """What Dask's memory manager does where there are two copies."""
    dask_scheduler.request_remove_replicas(address, [key], stimulus_id="test")


def fate(key, dask_scheduler):
    return dask_scheduler.tasks[key].state


def test_a_job_that_is_over_does_not_begin_again(three):
    """Its chief lives, and all that have its result die: it is lost, and told to be."""
    with succeeded(three) as (handle, key):
        chief = handle.status()["shards"]["0"]
        three.run_on_scheduler(drop, chief, key)
        until(lambda: chief not in holders(handle, three), 30, "it is still there")
        for address in holders(handle, three):
            kill(three, address)
        settled(three, key)
        assert not files_of(three.scheduler.address)
        with pytest.raises(dtrain.JobFailed, match="no worker holds its result any more"):
            handle.result(timeout=10)
