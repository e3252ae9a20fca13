"""Clusters for the runtime's tests: in this process, and of real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dask.config
import pytest
from distributed import Client, LocalCluster

from dtrain import Session


@contextmanager
def within(workers: int = 3) -> Iterator[Client]:
    """Workers in this very process, of a test's own: it may retire them."""
    with (
        LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def cut_a_push(s: Session, client: Client, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Once shard 1 has applied the next push, the first shard's worker is retired, and the answer
    is lost; the message that was cut, once it is."""
    victim, plain, cut = s.variables()[0]["worker"], s._to.ask_worker, []

    async def cutting(address, op, deadline, **message):
        answer = await plain(address, op, deadline, **message)
        if op == "dtrain_session_push" and message["shard"] == 1 and not cut:
            cut.append(message)
            await client.scheduler.retire_workers(workers=[victim])
            raise OSError("the connection is gone")
        return answer

    monkeypatch.setattr(s._to, "ask_worker", cutting)
    return cut


@pytest.fixture(scope="module")
def threaded() -> Iterator[Client]:
    """Two workers in this very process."""
    with within(2) as client:
        yield client


@pytest.fixture(scope="module")
def forked() -> Iterator[Client]:
    """Two worker processes of one thread each."""
    with processes(2) as client:
        yield client


@pytest.fixture(
    scope="module",
    params=[
        "threads",
        pytest.param("shm", marks=pytest.mark.cluster),
        pytest.param("comm", marks=pytest.mark.cluster),
    ],
)
def anywhere(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Four workers: in this process, or in four that share memory, or that send everything."""
    if request.param == "threads":
        with within(4) as client:
            yield client
        return
    transport = "auto" if request.param == "shm" else "comm"
    with processes(4, **{"dtrain.transport": transport}) as client:
        yield client


class processes:
    """A cluster of worker processes for a ``with`` block; deaths do not shrink it."""

    def __init__(
        self, workers: int, threads: int = 1, memory_limit: int | str = "auto", **config: object
    ) -> None:
        self._config = dask.config.set(
            {"distributed.deploy.lost-worker-timeout": "1 hour", **config}
        )
        self._workers, self._threads, self._memory = workers, threads, memory_limit

    def __enter__(self) -> Client:
        self._config.__enter__()
        self._cluster = LocalCluster(
            n_workers=self._workers,
            threads_per_worker=self._threads,
            memory_limit=self._memory,
            processes=True,
            dashboard_address=None,
            silence_logs=50,
        )
        self._client = Client(self._cluster)
        return self._client

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._cluster.close()
        self._config.__exit__(*error)
