"""Workers come and go as people wish: nothing is lost, and the bits stay."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from distributed import Client, wait

import dtrain
from tests.conftest import until
from tests.runtime.conftest import processes

from .harness import JOB, files_of, finished, paced, same, submit, told, watch

pytestmark = pytest.mark.cluster


@contextmanager
def cluster(workers, **config):
    with processes(workers, **config) as client:
        yield client.cluster, client


@contextmanager
def going(client, folder, replicas=JOB["replicas"], **changes):
    """A job that goes on slowly until the block is over, which then ends with the same bits."""
    hold = folder / "hold"
    hold.write_text("")
    # Enough steps that it is not over before it is let go, however busy the machine.
    lasting = dict(replicas=replicas, epochs=3 * JOB["epochs"])
    handle = submit(client, paced(hold=hold), **lasting, **changes)
    seen = watch(handle, lambda: handle.status()["step"] > 0)
    yield handle, seen
    print(told(handle))
    hold.unlink()
    story = finished(handle, seen)
    same(story, **lasting)
    assert story.status["losses"] == 0
    assert not story.said("from (start|checkpoint)")


def runs(process):
    """Whether it is there; one that has ended and that no parent has asked after is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def workers_of(handle):
    status = handle.status()
    return set(status["replicas"].values()) | set(status["shards"].values())


def runs_on(handle, count, generation=1):
    status = handle.status()
    return (
        status["state"] == "RUNNING"
        and status["generation"] > generation
        and len(workers_of(handle)) == count
    )


@pytest.mark.parametrize("transport", ["auto", pytest.param("comm", marks=pytest.mark.slow)])
def test_scaled_up_and_down(tmp_path, transport):
    with (
        cluster(1, **{"dtrain.transport": transport}) as (local, client),
        # Six replicas, because with four a third worker would take no load off two.
        going(client, tmp_path, replicas=6) as (handle, seen),
    ):
        local.scale(3)
        watch(handle, lambda: runs_on(handle, 3), 60, seen)
        generation = handle.status()["generation"]
        local.scale(1)
        watch(handle, lambda: runs_on(handle, 1, generation), 60, seen)
        until(lambda: len(client.scheduler_info()["workers"]) == 1, 60, "still there")
        # Moved before it went: there was no loss to notice.
        assert "about to leave: " in told(handle)
        assert "is gone" not in told(handle)


@pytest.mark.parametrize("chief", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_a_worker_is_retired(tmp_path, transport, chief):
    with (
        cluster(2, **{"dtrain.transport": transport}) as (_, client),
        going(client, tmp_path) as (handle, seen),
    ):
        replicas = handle.status()["replicas"]
        leaver = handle.status()["shards"]["0" if chief else "1"]
        assert leaver in replicas.values()
        client.retire_workers([leaver])
        watch(handle, lambda: runs_on(handle, 1), 30, seen)
        assert leaver not in workers_of(handle)


@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_shards_of_a_user_s_placement_move(tmp_path, transport):
    """The function is called anew for the workers that are left."""

    def last_first(sizes, workers):
        return [shard % len(workers) for shard in range(len(sizes))][::-1]

    with (
        cluster(3, **{"dtrain.transport": transport}) as (_, client),
        going(client, tmp_path, shards=4, placement=last_first) as (handle, seen),
    ):
        before = handle.status()["shards"]
        assert before["0"] == before["3"]
        assert len(set(before.values())) == 3
        client.retire_workers([before["1"]])
        watch(handle, lambda: runs_on(handle, 2), 30, seen)
        after = handle.status()["shards"]
        assert after["0"] == after["2"] != after["1"] == after["3"]


@pytest.mark.slow
def test_a_worker_closes_gracefully(tmp_path):
    with cluster(2) as (_, client), going(client, tmp_path) as (handle, seen):
        leaver = handle.status()["shards"]["0"]

        async def close(dask_worker):
            dask_worker.loop.add_callback(dask_worker.close_gracefully)

        client.run(close, workers=[leaver])
        watch(handle, lambda: runs_on(handle, 1), 30, seen)


@pytest.mark.slow
def test_an_adaptive_cluster_keeps_what_is_in_use(tmp_path):
    """It grows by what else there is to do, and shrinks again; the job is moved."""
    with cluster(1) as (local, client), going(client, tmp_path) as (handle, seen):
        local.adapt(minimum=1, maximum=3, interval="200ms", wait_count=2, target_duration="1s")
        work = client.map(lambda i: time.sleep(0.3), range(30), pure=False)
        watch(handle, lambda: len(client.scheduler_info()["workers"]) > 1, 60, seen)
        wait(work, 60)
        work.clear()
        watch(handle, lambda: len(client.scheduler_info()["workers"]) == 1, 60, seen)


# -- those who are not workers ------------------------------------------------------------------

CLIENT = """
import sys, time
import dtrain
from distributed import Client
from tests.faults.harness import paced, submit
from tests.faults import harness
client = Client(sys.argv[1], set_as_default=False)
model = paced(hold=sys.argv[3])
handle = dtrain.submit(
    model, harness.X, harness.Y, client=client, detach=sys.argv[2] == "detached", **harness.JOB
)
print(handle.id, flush=True)
time.sleep(600)
"""


@contextmanager
def elsewhere(address, kind, hold):
    """The id of a job that another process has submitted, and that process."""
    command = [sys.executable, "-c", CLIENT, address, kind, str(hold)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_detached_job_outlives_its_client(tmp_path):
    hold = tmp_path / "hold"
    hold.write_text("")
    with (
        cluster(2, **{"dtrain.client-lease": "500ms"}) as (_, client),
        elsewhere(client.scheduler.address, "detached", hold) as (detached, one),
        elsewhere(client.scheduler.address, "attached", hold) as (attached, other),
    ):
        handle = dtrain.attach(detached, client)
        lost = next(j for j in dtrain.jobs(client) if j.id == attached)
        until(lambda: handle.state == lost.state == "RUNNING", 60, "they do not run")
        for process in (one, other):
            process.send_signal(signal.SIGKILL)
        assert lost.wait(timeout=20) == "CANCELLED"
        assert "its client went away" in lost.status()["message"]
        assert handle.state == "RUNNING"
        hold.unlink()
        same(finished(handle))


def test_without_its_scheduler_nothing_is_left(tmp_path):
    """Workers of a scheduler that is killed go, with all that they had: processes, files."""
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"]
    command += ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(tmp_path / "s.json")]
    scheduler = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    workers = []
    try:
        until((tmp_path / "s.json").exists, 60, "no scheduler")
        file = str(tmp_path / "s.json")
        with Client(scheduler_file=file, set_as_default=False) as client:
            address = client.scheduler.address
            start = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-dashboard"]
            start += ["--nworkers", "2", "--nthreads", "1", "--local-directory", str(tmp_path)]
            workers.append(
                subprocess.Popen(start, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            )
            client.wait_for_workers(2, timeout=60)
            hold = tmp_path / "hold"
            hold.write_text("")
            handle = submit(client, paced(hold=hold))
            until(lambda: handle.status()["step"] > 0, 60, "it does not run")
            assert files_of(address)
            family = psutil.Process(workers[0].pid).children(recursive=True)
            scheduler.kill()
            scheduler.wait()
            until(lambda: not files_of(address), 30, "files are left")
            until(lambda: not any(runs(p) for p in family), 30, "processes are left")
    finally:
        for process in [scheduler, *workers]:
            process.kill()
            process.wait()
