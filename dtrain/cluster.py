"""Finding a cluster, and putting dtrain on it."""

from __future__ import annotations

import ast
import asyncio
import functools
import logging
import os
import platform
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from dtrain._version import __version__
from dtrain.config import settings, temporary_directory
from dtrain.devices import lacking, resolved
from dtrain.errors import ClusterError, DTrainError, SpecError
from dtrain.runtime.rpc import opened

if TYPE_CHECKING:
    from distributed import Client


#: Seconds between two looks at a client that is being made.
_STEP = 0.005

#: What a client is that can be asked.
_OPEN = ("running", "connecting")

_NO_CLIENT = "client: found {found}, expected a Client or an address"


class Control:
    """Asks the master, through a Client or straight to an address.

    Parameters
    ----------
    target : distributed.Client or str
    """

    def __init__(self, target: Client | str) -> None:
        from distributed import Client

        if isinstance(target, Client):
            if target.asynchronous:
                raise SpecError(
                    "client: found an asynchronous Client, expected a synchronous one "
                    "(call dtrain from a thread, or with the address of the scheduler)"
                )
            check_own(target, "client")
            if target.status not in _OPEN:
                raise ClusterError(f"client: found it {target.status}, expected a running one")
        elif not isinstance(target, str):
            raise SpecError(_NO_CLIENT.format(found=type(target).__name__))
        self.target = target

    @property
    def address(self) -> str:
        if isinstance(self.target, str):
            return self.target
        return str(self.target.scheduler.address) if self.target.scheduler else "?"

    @property
    def client_id(self) -> str | None:
        return None if isinstance(self.target, str) else self.target.id

    def call(self, op: str, deadline: float | None = None, **message: Any) -> Any:
        """The master's answer; ClusterError if there is none."""
        answer = self.raw(op, deadline, **message)
        if answer is None:
            raise ClusterError(
                f"{self.address}: dtrain is not installed on this cluster; no job has run there"
            )
        return opened(answer, f"{op} at {self.address}")

    def raw(self, op: str, deadline: float | None = None, **message: Any) -> Any:
        seconds = deadline or settings().call_deadline
        try:
            if isinstance(self.target, str):
                return _run(_call_address(self.target, op, seconds, message))
            check_caller(self.target, op)
            return self.target.sync(_call_client, self.target, op, seconds, message)
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, DTrainError):
                raise
            raise _no_answer(self.address, error) from None
        except (ValueError, RuntimeError) as error:
            if isinstance(error, DTrainError):
                raise
            raise ClusterError(f"{self.address}: {error}") from None


#: Clients of a process that this one was forked from.
_inherited: weakref.WeakSet[Client] = weakref.WeakSet()


def _forked() -> None:
    """Note the clients that came along: the threads of their event loops did not."""
    if "distributed.client" in sys.modules:
        _inherited.update(sys.modules["distributed.client"].Client._instances)


os.register_at_fork(after_in_child=_forked)


def check_own(client: Client, what: str) -> None:
    """Refuse a client that came along with a fork: it would wait for ever."""
    if client in _inherited:
        raise SpecError(
            f"{what}: found a client of the process that this one was forked from, expected one "
            f"of its own: Client({client.scheduler.address if client.scheduler else '...'!r})"
        )


def check_caller(client: Client, what: str) -> None:
    """Refuse to wait where nobody answers: a client that is closed, or its own event loop."""
    check_own(client, what)
    if client.status not in _OPEN:
        raise ClusterError(f"{what}: found its client {client.status}, expected a running one")
    if client.asynchronous:
        raise SpecError(
            f"{what}: found it called in the event loop of its client, expected a thread "
            f"(asyncio.to_thread)"
        )


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, also where a loop runs already (a notebook): there, in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, "dtrain-call") as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _call_client(client: Client, op: str, seconds: float, message: dict[str, Any]) -> Any:
    if client.scheduler is None or client.status != "running":
        raise OSError(f"the client is {client.status}")
    return await asyncio.wait_for(getattr(client.scheduler, op)(**message), seconds)


async def _call_address(address: str, op: str, seconds: float, message: dict[str, Any]) -> Any:
    from distributed.core import connect, send_recv
    from distributed.security import Security

    check_address(address)
    arguments = Security().get_connection_args("client")
    deadline = settings().connect_deadline
    connecting = connect(address, timeout=deadline, **arguments)
    try:
        # Dask's own deadline is for the connection, not for the first word of who took it.
        comm = await asyncio.wait_for(connecting, deadline + 0.5)
    except TimeoutError:
        raise OSError("what takes the connection does not speak as a scheduler does") from None
    try:
        return await asyncio.wait_for(send_recv(comm, op=op, **message), seconds)
    finally:
        await comm.close()


def check_address(address: str) -> None:
    """Raise SpecError for what no scheduler can have as its address.

    A Client of such an address would fail only when it is closed, after ten seconds.
    """
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.comm.registry import get_backend
    from distributed.security import Security

    try:
        scheme, location = parse_address(address)
        get_backend(scheme)
        if scheme in ("tcp", "tls", "ws", "wss"):
            parse_host_port(location)
    except ValueError as error:
        raise SpecError(
            f"{address}: found no address ({error}), expected one like tcp://127.0.0.1:8786"
        ) from None
    if scheme == "tls" and not Security().get_connection_args("client").get("ssl_context"):
        raise SpecError(
            f"{address}: found no TLS certificates, expected them in Dask's configuration "
            f"(distributed.comm.tls.ca-file, .client.cert and .client.key)"
        )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _no_answer(address: str, error: BaseException) -> ClusterError:
    """Dask says that it has tried for so long; what it met is behind that."""
    while isinstance(error.__cause__, OSError):
        error = error.__cause__
    words = str(error) or "not in time"
    return ClusterError(f"{address}: no scheduler answers there ({words})")


def install(client: Client) -> dict[str, Any]:
    """Put dtrain on the client's cluster if it is not there; returns the master's own account.

    Raises ClusterError if dtrain is missing or of another version on the scheduler, or if no
    worker can train.  Workers without dtrain are left alone, and out.
    """
    control = Control(client)
    # Registered without asking first: Dask would log a question that it has no handler for.
    _register(client, control)
    config = settings()
    info = control.call("dtrain_info", config.hello_deadline + config.call_deadline, settle=True)
    if info["version"] != __version__:
        raise ClusterError(
            f"scheduler {control.address}: has dtrain {info['version']}, expected {__version__}, "
            f"the version here"
        )
    if not info["ready"]:
        found = "; ".join(f"{member}: {problem}" for member, problem in info["problems"])
        raise ClusterError(
            f"{control.address}: no worker can train; {found or 'it has no workers'}"
        )
    return dict(info)


def able(info: Mapping[str, Any], device: str) -> list[tuple[str, str]]:
    """Of the master's own account the workers, address and name, that have a job's device.

    Raises SpecError, which tells what each has, if none does.
    """
    found = [
        (address, name)
        for address, name in info["ready"]
        if resolved(device, info["devices"][address][0]) is not None
    ]
    if not found:
        names = {a: f"worker {n} ({a})" if n else f"worker {a}" for a, n in info["ready"]}
        raise lacking(device, [(names[a], *info["devices"][a]) for a in names])
    return found


def _register(client: Client, control: Control) -> None:
    from dtrain.runtime.master import Master

    deadline = settings().hello_deadline + settings().call_deadline

    async def register() -> None:
        await asyncio.wait_for(client.register_plugin(Master()), deadline)

    try:
        client.sync(register)
    except ModuleNotFoundError as error:
        raise ClusterError(
            f"scheduler {control.address}: dtrain cannot be imported there ({error}); "
            f"install dtrain {__version__} on that machine"
        ) from None
    except (TimeoutError, OSError) as error:
        raise ClusterError(
            f"scheduler {control.address}: dtrain could not be started there ({_words(error)})"
        ) from None


@contextmanager
def connect(address: Client | str | None = None, *, workers: int | None = None) -> Iterator[Client]:
    """A client for the length of a ``with`` block; closes what it opened, and only that.

    Parameters
    ----------
    address : Client or str or None
        A Client is used as it is.  None: the current client, else an embedded LocalCluster on
        loopback, of one-thread worker processes.
    workers : int or None
        How many workers an embedded cluster has; None: one per core.

    Raises
    ------
    ClusterError
        Nothing answers at the address.
    """
    from distributed import Client

    if isinstance(address, Client):
        yield address
        return
    if address is None:
        current = current_client()
        if current is not None:
            yield current
            return
        with _embedded(workers) as client:
            yield client
        return
    if not isinstance(address, str):
        raise SpecError(_NO_CLIENT.format(found=type(address).__name__))
    client = open_client(address)
    try:
        yield client
    finally:
        client.close(timeout=5)


def current_client() -> Client | None:
    """The current client: this process's, or within a Dask task the one of its cluster."""
    from distributed import get_client
    from distributed.client import default_client
    from distributed.worker import thread_state

    try:
        found: Client = (
            get_client() if hasattr(thread_state, "execution_state") else default_client()
        )
    except ValueError:
        return None
    if not found.asynchronous:
        # The first task of a worker makes the client of all its tasks, and may just be at it.
        until = time.monotonic() + settings().connect_deadline
        while found.status in ("newly-created", "connecting") and time.monotonic() < until:
            threading.Event().wait(_STEP)
    return found


def open_client(address: str) -> Client:
    from distributed import Client

    # A Client would wait without end for the first word of what takes connections and is mute.
    Control(address).raw("echo", settings().connect_deadline, data="")
    try:
        return Client(address, timeout=settings().connect_deadline, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise _no_answer(address, error) from None


@contextmanager
def _embedded(workers: int | None) -> Iterator[Client]:
    """A LocalCluster of our own, closed at the end, whatever happens."""
    from distributed import Client, LocalCluster

    check_main_guard()
    with (
        tempfile.TemporaryDirectory(prefix="dtrain-", dir=temporary_directory()) as folder,
        _quiet(folder),
        ExitStack() as stack,
    ):
        # An interrupt that was held comes when the inner block ends: all is on the stack by then.
        with _interrupts_held():
            cluster = LocalCluster(
                n_workers=workers or os.cpu_count() or 1,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                dashboard_address=None,
                # Its bare HTTP server takes any port, not one that another cluster wants.
                scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
                silence_logs=logging.CRITICAL,
                preload=[_MUTE],
            )
            stack.callback(cluster.close, timeout=10)
            # Also for whoever leaves at once, as the CLI does when it is interrupted twice.
            cluster.forget_jobs = functools.partial(_forget_jobs, cluster)
            client = Client(cluster, set_as_default=False)
            stack.callback(client.close, timeout=5)
            stack.callback(cluster.forget_jobs)
        yield client


#: Run by each worker process as it starts.  One that is started again, after a death, just when
#: all is closed would tell of its lost connection in a traceback.
_MUTE = "import logging; logging.getLogger('tornado.application').setLevel(logging.CRITICAL + 1)"


def _forget_jobs(cluster: Any) -> None:
    """Remove what the jobs of an embedded cluster share in memory.

    They do it themselves when they end, but not when all their workers are killed.
    """
    from dtrain.runtime.transport.meeting import forget
    from dtrain.runtime.transport.segment import discard

    master = cluster.scheduler.extensions.get("dtrain")
    jobs = {} if master is None else dict(master.jobs)
    for job, record in jobs.items():
        forget(job)
        if record.file is not None:
            discard(record.file)


@contextmanager
def _quiet(folder: str) -> Iterator[None]:
    """Files in ``folder``; and what goes wrong is told by errors, not by logs of two processes."""
    import dask.config

    log = logging.getLogger("dtrain")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        wanted = {
            "distributed.worker.daemon": True,
            "temporary-directory": folder,
            # Two deaths in short order would take a worker's place away for good.
            "distributed.deploy.lost-worker-timeout": "1 hour",
        }
        with dask.config.set(wanted):
            yield
    finally:
        log.setLevel(level)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start worker processes with SIGINT blocked: a Ctrl-C on the terminal is for us alone.

    It would reach them too, and they would die with tracebacks before they can be closed.
    """
    import signal
    import threading
    from multiprocessing import resource_tracker

    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "pthread_sigmask"
    ):
        yield
        return
    # It is started lazily, and its start unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_main_guard() -> None:
    """Raise unless the script that calls us may start processes.

    A worker process imports the main script again; what the script does without an
    ``if __name__ == "__main__":`` around it would then be done in every worker, without end.
    """
    import multiprocessing

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SpecError(_GUARD.format(where="this script"))
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script and getattr(main, "__spec__", None) is None and not os.path.exists(script):
        raise SpecError(
            f"{script}: found no such file, expected the script in a file to start an embedded "
            f"cluster from it: worker processes import it again"
        )
    frame: Any = sys._getframe()
    while frame is not None:
        names = frame.f_globals
        if frame.f_code.co_name == "<module>" and names.get("__name__") == "__main__":
            file = names.get("__file__")
            if file and os.path.isfile(file) and not _guarded(file, frame.f_lineno):
                raise SpecError(_GUARD.format(where=f"{file}, line {frame.f_lineno}"))
        frame = frame.f_back


_GUARD = (
    "{where}: it starts an embedded cluster without the guard that worker processes need; "
    'put the code under:  if __name__ == "__main__":'
)


def _guarded(file: str, line: int) -> bool:
    """Whether ``line`` of a script stands within an ``if`` about ``__name__``."""
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return True
    for node in tree.body:
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            if not isinstance(node, ast.If):
                return False
            return any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
    return True


def doctor(client: Client | str) -> dict[str, Any]:
    """Versions on the client, the scheduler and each worker, and what is wrong with them.

    Returns
    -------
    dict
        ``client``, ``scheduler``: dicts; ``workers``: a list of such.  Each has ``where,
        python, dtrain, dask, distributed, numpy, ok, problem``; a worker has three more:
        ``blas``, its library and threads in words; ``devices``, a list of what its replicas may
        compute on; and ``no_gpu``, why no GPU is among these, in words.
    """
    with connect(client) as opened_client:
        problem: str | None = None
        try:
            install(opened_client)
        except ClusterError as error:
            problem = str(error)
        versions = opened_client.get_versions(check=False)
        info = Control(opened_client).raw("dtrain_info") or {"value": None}
        value = info.get("value") or {"version": None, "versions": {}, "problems": []}
        here = _entry("client", versions["client"], __version__, None, None)
        address = str(opened_client.scheduler.address)
        if value["version"] and versions["workers"]:
            problem = None  # its own lines tell
        scheduler = _entry(
            f"scheduler {address}", versions["scheduler"], value["version"], problem, here
        )
        wrong = dict(value["problems"])
        names = {w: a["name"] for w, a in opened_client.scheduler_info(-1)["workers"].items()}
        workers = []
        for address, found in sorted(versions["workers"].items()):
            said = next((words for member, words in wrong.items() if address in member), None)
            if said is None and address not in value["versions"]:
                said = "has not been asked: the scheduler cannot run dtrain"
            name = names.get(address, address)
            where = f"worker {address}" if name == address else f"worker {name} ({address})"
            entry = _entry(where, found, value["versions"].get(address), said, here)
            devices, no_gpu = value.get("devices", {}).get(address) or (None, None)
            workers.append(
                {
                    **entry,
                    "blas": value.get("blas", {}).get(address) or None,
                    "devices": devices and list(devices),
                    "no_gpu": no_gpu or None,
                }
            )
        return {"client": here, "scheduler": scheduler, "workers": workers}


def _entry(
    where: str,
    versions: dict[str, Any] | str | None,
    dtrain: str | None,
    problem: str | None,
    client: dict[str, Any] | None,
) -> dict[str, Any]:
    packages = versions.get("packages", {}) if isinstance(versions, dict) else {}
    entry: dict[str, Any] = {
        "where": where,
        "python": packages.get("python", platform.python_version() if client is None else None),
        "dtrain": dtrain,
        **{name: packages.get(name) for name in ("dask", "distributed", "numpy")},
    }
    if problem is None and client is not None:
        for name in ("dtrain", "dask", "distributed"):
            if entry[name] != client[name]:
                problem = f"has {name} {entry[name]}, expected {client[name]}, the client's version"
                break
    return {**entry, "ok": problem is None, "problem": problem}
