"""What every test is held to: it leaves no process, thread, port or shared-memory file."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import dtrain

#: Threads that Dask and the standard library keep after a cluster has closed.  None of ours is
#: here: dtrain's are called ``dtrain-...``, and its tasks leave Dask's pools idle.
KEPT_THREADS = re.compile(
    r"(\d+-)?Dask-|zarr_io|AsyncProcess|IO loop|Profile|QueueFeederThread|TCP-Executor|Tornado"
    r"|ThreadPoolExecutor|WorkerMemory|asyncio_|event_loop_thread"
)

#: Seconds that a process or a thread has to be gone after a test.
GRACE = 30.0


def processes() -> set[int]:
    """Our children, and theirs, that are alive; the interpreter's own helper is not counted."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                continue
            if any("resource_tracker" in word or "forkserver" in word for word in child.cmdline()):
                continue
        except psutil.NoSuchProcess:
            continue
        found.add(child.pid)
    return found


def threads() -> set[str]:
    return {
        f"{t.name} ({t.ident})"
        for t in threading.enumerate()
        if t is not threading.main_thread() and not KEPT_THREADS.match(t.name)
    }


def ports() -> set[int]:
    return {
        c.laddr.port
        for c in psutil.Process().net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    }


def shared_memory() -> set[str]:
    """Ours, and what multiprocessing would make; other programs' files are their own affair."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    found = {name for name in names if name.startswith(("dtrain", "psm_"))}
    # The input of jobs lies in the temporary directory, where others have files of any name.
    for root in ("/dev/shm", tempfile.gettempdir()):
        ours = Path(root, f"dtrain-{os.getuid()}")
        found |= {str(file) for file in (ours, *ours.glob("*")) if file.exists()}
    return found


CHECKS: dict[str, Callable[[], set]] = {
    "processes": processes,
    "threads": threads,
    "ports": ports,
    "shared-memory files": shared_memory,
}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves anything; what dies within the grace time is forgiven."""
    before = {name: look() for name, look in CHECKS.items()}
    yield
    until = time.monotonic() + GRACE
    while left := {n: more for n, look in CHECKS.items() if (more := look() - before[n])}:
        if time.monotonic() > until:
            pytest.fail(f"left behind {GRACE:.0f} s after the test: {left}")
        threading.Event().wait(0.02)


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Jobs compute on the CPU, also where there is a GPU, unless a test says otherwise."""
    with dtrain.device("cpu"):
        yield


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """The real UCI digits that scikit-learn ships: float32 (1797, 64) in 0..1, and labels."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    X, y = datasets.load_digits(return_X_y=True)
    return (X / 16).astype(np.float32), y


@pytest.fixture(scope="session")
def mnist() -> dict[str, np.ndarray]:
    """The real MNIST, where DTRAIN_DATA says it is."""
    folder = os.environ.get("DTRAIN_DATA")
    if not folder or not (Path(folder) / "mnist.npz").exists():
        pytest.skip("MNIST is not here: DTRAIN_DATA names no folder with mnist.npz")
    with np.load(Path(folder) / "mnist.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a state, with a deadline."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"after {seconds:g} s: {what}")
        threading.Event().wait(0.01)
