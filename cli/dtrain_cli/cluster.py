"""The verbs on clusters."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Annotated

import typer

from dtrain_cli._connect import embedded_workers, folder_of_ours, quiet
from dtrain_cli._output import command
from dtrain_cli._signals import interruptible, sparing_children

_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")

#: How long a cluster that is stopped waits for a job to be cancelled, in seconds.
_CANCEL_WAIT = 5.0

app = typer.Typer(no_args_is_help=True, help="A cluster on this machine.", rich_markup_mode=None)


@app.callback()
def cluster() -> None:
    """A cluster on this machine."""


@app.command()
def start(
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes.", show_default="one per CPU")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    dashboard: Annotated[
        str, typer.Option(metavar="[HOST]:PORT", help="Where Dask's dashboard is; port 0: any.")
    ] = ":8787",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The scheduler's port; 0: any.")
    ] = 8786,
) -> None:
    """Start a cluster on this machine and keep it until Ctrl-C.

    It listens on 127.0.0.1 alone: whoever reaches a Dask port can run code.

    \b
    Example:
      dtrain cluster start --workers 4
      DTRAIN_SCHEDULER=tcp://127.0.0.1:8786 dtrain submit digits.toml   (in another terminal)
    """
    with command(as_json=False):
        stop = threading.Event()
        with interruptible(stop.set), folder_of_ours():
            _serve(workers, threads, _dashboard_address(dashboard), port, stop)


def _dashboard_address(text: str) -> str:
    from dtrain import SpecError

    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise SpecError(f"--dashboard: found {text!r}, expected [HOST]:PORT, like :8787")
    return f"{host or '127.0.0.1'}:{port}"


#: Run by each worker process as it starts.  At the end of the cluster one that has data which no
#: other can take is closed just as it is asked to retire, and would call that an error.
_SPARE = """
import logging
logging.getLogger("distributed.worker").addFilter(
    lambda record: not str(record.msg).startswith("Invalid Worker.status transition")
)
"""


def _serve(
    workers: int | None, threads: int, dashboard: str, port: int, stop: threading.Event
) -> None:
    import os

    import dask.config
    from distributed import LocalCluster

    from dtrain import ClusterError

    logging.getLogger("distributed.deploy.spec").setLevel(logging.ERROR)  # it is told below
    # Two deaths in short order would take a worker's place away for good.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})
    try:
        with sparing_children():
            cluster = LocalCluster(
                n_workers=workers or embedded_workers(os.cpu_count()),
                threads_per_worker=threads,
                host="127.0.0.1",
                scheduler_port=port,
                dashboard_address=dashboard,
                preload=[_SPARE],
            )
    except (OSError, RuntimeError) as error:
        raise ClusterError(
            f"the cluster did not start: {_root(error)}; found --port {port}, "
            f"expected one that is free, or 0 for any"
        ) from error
    with cluster:
        address = str(cluster.scheduler_address)
        typer.echo(f"scheduler  {address}")
        typer.echo(f"dashboard  {cluster.dashboard_link}")
        typer.echo(f"to use it  export DTRAIN_SCHEDULER={address}")
        typer.echo("Ctrl-C stops it.", err=True)
        stop.wait()
        _wind_down(address)


def _root(error: BaseException) -> BaseException:
    """What it all began with: Dask wraps that several times."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _wind_down(address: str) -> None:
    """End the jobs, so that the workers can close in order, and be quiet about what gets lost."""
    import dtrain

    quiet()
    with suppress(dtrain.DTrainError):
        left = [handle for handle in dtrain.jobs(address) if handle.state not in _ENDED]
        for handle in left:
            typer.echo(f"cancelling job {handle.id}; again to leave at once", err=True)
            handle.cancel()
        for handle in left:
            handle.wait(timeout=_CANCEL_WAIT, progress=False)
