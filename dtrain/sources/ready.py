"""Dask arrays made ready to be read: in the workers' memory, or in files on their disks.

What is in memory already is read in place.  What is lazy is computed once: it stays in memory if
its size is known and within ``data-memory`` of what the workers may use; else each chunk goes to
a file of the worker that computes it (:mod:`dtrain.runtime.spool`).
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.cluster import Control
from dtrain.config import settings
from dtrain.errors import DataError, DeadlineError, JobFailed
from dtrain.runtime.spool import as_rows, spooled
from dtrain.sources.chunks import is_persisted, sized, takes

if TYPE_CHECKING:
    from distributed import Client


def ready(client: Client, arrays: list[Any], held: list[Any]) -> list[Any]:
    """Dask arrays, computed, with chunks of known sizes; others as they are.

    ``held`` gets what keeps them on the cluster.  The chunks of a spooled array are
    :class:`dtrain.runtime.spool.Spooled`.

    Raises
    ------
    DataError
        No worker may run a task of theirs, or a chunk is not what its array promises.
    DeadlineError
        They are not computed within ``data-deadline``.
    """
    from distributed import futures_of

    lazy = [a for a in arrays if takes(a)]
    if not lazy:
        return arrays
    spool = _is_too_large(client, [a for a in lazy if not is_persisted(a)])
    computed = iter(client.persist([_on_disk(a) if spool else a for a in lazy]))
    arrays = [next(computed) if takes(a) else a for a in arrays]
    futures = futures_of([a for a in arrays if takes(a)])
    _wait_for_chunks(client, futures)
    for future in futures:
        if future.status == "error":
            raise client.sync(future._exception)
        if future.status != "finished":
            raise JobFailed(f"data: chunk {future.key!r} is {future.status}, expected it computed")
    arrays = [_counted(client, a) if takes(a) else a for a in arrays]
    held.extend(futures)
    held.extend(arrays)
    return arrays


def _is_too_large(client: Client, lazy: list[Any]) -> bool:
    """Whether it would take more of the workers' memory than it may, or nobody knows."""
    if not lazy:
        return False
    share = settings().data_memory
    limits = client.sync(client.scheduler.identity, n_workers=-1)["workers"].values()
    # A worker without a limit has 0, or None.
    if all(not worker["memory_limit"] for worker in limits) and share:
        return False
    room = share * sum(worker["memory_limit"] or 0 for worker in limits)
    return not sum(array.nbytes for array in lazy) <= room


def _on_disk(array: Any) -> Any:
    """Its chunks in files, unless they are in memory, or are objects, whose size nobody knows."""
    if is_persisted(array) or array.dtype.hasobject:
        return array
    return array.map_blocks(spooled, dtype=array.dtype, meta=array._meta)


def _counted(client: Client, array: Any) -> Any:
    """With the number of rows of each chunk, found where the chunk lies."""
    if not any(math.isnan(rows) for rows in array.chunks[0]):
        return array
    shapes = on_chunks(client, array, np.shape)
    width = tuple(array.shape[1:])
    for number, shape in enumerate(shapes):
        if shape[0] and shape[1:] != width:
            raise DataError(f"chunk {number}: found shape {shape}, expected rows of shape {width}")
    return sized(array, tuple(int(shape[0]) for shape in shapes))


def on_chunks(client: Client, array: Any, function: Any) -> list[Any]:
    """What a function says of the rows of each chunk, called where the chunk lies."""
    from dask import delayed

    asked = [delayed(_asked, pure=False)(function, b) for b in array.to_delayed().ravel()]
    answers: list[Any] = client.gather(client.compute(asked), direct=True)
    return answers


def _asked(function: Any, chunk: Any) -> Any:
    return function(as_rows(chunk))


def _wait_for_chunks(client: Client, futures: list[Any]) -> None:
    """Until all are computed or have failed.

    Computing may take its time; but tasks that no worker may run are told at once, and after
    ``data-deadline`` the rest is.
    """
    # Not `distributed.wait`: it wants a client that is the process's current one.
    from distributed.client import _wait

    config = settings()
    until = time.monotonic() + config.data_deadline
    control = Control(client)
    while True:
        try:
            client.sync(_wait, futures, timeout=config.poll)
            return
        except TimeoutError:
            pending = [f.key for f in futures if f.status == "pending"]
        stuck = control.call("dtrain_stuck")
        if stuck:
            raise DataError(
                f"data: {len(pending)} chunks wait for tasks that no worker may run, such as "
                f"{stuck[0]}; expected workers that satisfy their restrictions"
            )
        if time.monotonic() > until:
            raise DeadlineError(
                f"data: after {config.data_deadline:.0f} s {len(pending)} of {len(futures)} chunks "
                f"are not computed, such as {pending[0]!r}"
            )
