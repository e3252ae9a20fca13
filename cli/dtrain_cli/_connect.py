"""Which cluster a command works on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from dtrain_cli._signals import sparing_children

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
    from dtrain.errors import ClusterError

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

    with ExitStack() as stack:
        if address is None:
            with sparing_children():
                client = stack.enter_context(dtrain.connect(None, workers=workers))
        else:
            client = stack.enter_context(dtrain.connect(address))
        yield client


def embedded_workers(replicas: int | None) -> int:
    """As many processes as replicas (two where none are asked for), but no more than CPUs."""
    return max(1, min(replicas or 2, os.cpu_count() or 1))
