"""Clusters that live on from fault to fault, and what nobody may leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import dask
import pytest
from distributed import Client

from dtrain.cluster import install
from tests.conftest import GRACE, ports, processes, threads
from tests.faults import harness
from tests.runtime import conftest as runtime


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """As everywhere, but a worker that was killed and is back is the same as before."""
    called = getattr(request.node, "callspec", None)
    wanted = {*request.fixturenames, *(called.params.values() if called else ())}
    names = [name for name in ("three", "apart") if name in wanted]
    addresses = [request.getfixturevalue(n).scheduler.address for n in names]
    looks = {"processes": lambda: len(processes()), "threads": threads, "ports": ports}
    before = {name: look() for name, look in looks.items()}
    yield

    def left() -> dict:
        found = {}
        if (more := looks["processes"]()) > before["processes"]:
            found["processes"] = f"{more}, before {before['processes']}"
        for name in ("threads", "ports"):
            if more := looks[name]() - before[name]:
                found[name] = more
        files = set().union(*map(harness.files_of, addresses))
        return {**found, "files": files} if files else found

    until = time.monotonic() + GRACE
    while more := left():
        if time.monotonic() > until:
            pytest.fail(f"left behind {GRACE:.0f} s after the test: {more}")
        threading.Event().wait(0.02)


@contextmanager
def lasting(workers: int, transport: str) -> Iterator[Client]:
    """A cluster for many tests; its settings are its own, and not those of clusters beside it."""
    with ExitStack() as stack:
        with dask.config.set({"dtrain.transport": transport}):
            client = stack.enter_context(runtime.processes(workers))
            install(client)
        yield client


@pytest.fixture(scope="package")
def _three() -> Iterator[Client]:
    with lasting(3, "auto") as client:
        yield client


@pytest.fixture
def three(_three: Client) -> Client:
    """Three workers that share memory: with four replicas and two shards every role is there."""
    harness.whole_again(_three, 3)
    return _three


@pytest.fixture(scope="package")
def _apart() -> Iterator[Client]:
    with lasting(3, "comm") as client:
        yield client


@pytest.fixture
def apart(_apart: Client) -> Client:
    """Three workers that send each other everything."""
    harness.whole_again(_apart, 3)
    return _apart
