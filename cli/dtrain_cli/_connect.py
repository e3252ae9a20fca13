"""Which cluster a command works on."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from dtrain_cli._signals import on_leaving, sparing_children

Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        envvar="DTRAIN_SCHEDULER",
        metavar="ADDR",
        help="The address of the cluster, like tcp://127.0.0.1:8786. "
        "Without it: Dask's own setting scheduler-address.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")
]


def find_address(given: str | None) -> str | None:
    """The address that the user means, or None."""
    import dask.config

    return given or dask.config.get("scheduler-address", None) or None


def need_address(given: str | None) -> str:
    """For verbs that look at jobs: by its address, never as one of its clients.

    An attached job lives as long as one of its clients; we are not to be one of them.
    """
    from dtrain import ClusterError

    address = find_address(given)
    if address is None:
        raise ClusterError(
            "no cluster is named: give --scheduler ADDR, or set DTRAIN_SCHEDULER "
            "(`dtrain cluster start` starts a cluster and prints its address)"
        )
    return address


@contextmanager
def connected(address: str | None, *, workers: int | None = None) -> Iterator[Any]:
    """A client of the cluster there, or of an embedded one for the length of the command."""
    import dtrain

    quiet()
    with ExitStack() as stack:
        if address is None:
            stack.enter_context(folder_of_ours())
            with sparing_children():
                client = stack.enter_context(dtrain.connect(None, workers=workers))
            forget = getattr(getattr(client, "cluster", None), "forget_jobs", None)
            if forget is not None:  # it is not a client that the user's own modules have made
                stack.enter_context(on_leaving(forget))
        else:
            client = stack.enter_context(dtrain.connect(address))
        yield client


def quiet() -> None:
    """What Dask logs in this process from now on is not shown: our own errors tell it."""
    import distributed  # noqa: F401 - it makes the handlers

    for handler in logging.getLogger("distributed").handlers:
        handler.setLevel(logging.CRITICAL)


@contextmanager
def folder_of_ours() -> Iterator[None]:
    """Where Dask puts its files meanwhile; gone afterwards, also if we leave at once."""
    import dask.config

    place = dask.config.get("temporary-directory", None)
    with (
        tempfile.TemporaryDirectory(prefix="dtrain-", dir=place) as folder,
        on_leaving(lambda: shutil.rmtree(folder, ignore_errors=True)),
        dask.config.set({"temporary-directory": folder}),
    ):
        yield


def embedded_workers(replicas: int | None) -> int:
    """As many processes as replicas (two where none are asked for), but no more than CPUs."""
    return max(1, min(replicas or 2, os.cpu_count() or 1))
