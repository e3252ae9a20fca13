"""Clusters for the runtime's tests: in this process, and of real worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import dask.config
import pytest
from distributed import Client, LocalCluster


@pytest.fixture(scope="module")
def threaded() -> Iterator[Client]:
    """Two workers in this very process."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def forked() -> Iterator[Client]:
    """Two worker processes of one thread each."""
    with processes(2) as client:
        yield client


class processes:
    """A cluster of worker processes for a ``with`` block; deaths do not shrink it."""

    def __init__(self, workers: int, threads: int = 1, **config: object) -> None:
        self._config = dask.config.set(
            {"distributed.deploy.lost-worker-timeout": "1 hour", **config}
        )
        self._workers, self._threads = workers, threads

    def __enter__(self) -> Client:
        self._config.__enter__()
        self._cluster = LocalCluster(
            n_workers=self._workers,
            threads_per_worker=self._threads,
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
