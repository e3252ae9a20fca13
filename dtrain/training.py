"""``fit`` and ``submit``: from a model and its data to a job on a cluster.

The main path from here: :mod:`dtrain.inputs` puts the data on the workers,
:mod:`dtrain.runtime.master` launches one task per host, :mod:`dtrain.runtime.replica` is its
loop, :mod:`dtrain.runtime.transport` takes gradients to :mod:`dtrain.runtime.shards`.
"""

from __future__ import annotations

import io
import warnings
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

from dtrain.checks import did_you_mean
from dtrain.cluster import Control, able, connect, install
from dtrain.config import settings
from dtrain.errors import ClusterWarning, SpecError
from dtrain.handle import Handle
from dtrain.inputs import prepare
from dtrain.job import FIELDS, Job
from dtrain.result import Result
from dtrain.runtime.modelfile import check_target
from dtrain.starting import initial_values, preflight

if TYPE_CHECKING:
    from distributed import Client


def fit(
    model: Any,
    X: Any = None,
    y: Any = None,
    *,
    client: Client | str | None = None,
    progress: bool | None = None,
    **arguments: Any,
) -> Result:
    """Train a model and wait for it.

    Parameters
    ----------
    model : object
        A model, or a whole :class:`Job`.
    X, y : array
        See :class:`Job`.
    client : Client or str, optional
        A client, or the address of a scheduler.  None: the current client, else an embedded
        cluster on this machine for the length of the call.
    progress : bool, optional
        Draw a progress bar on stderr; None: if that is a terminal.
    **arguments
        The other fields of a :class:`Job`.

    Returns
    -------
    Result

    Raises
    ------
    SpecError, DataError
        Before anything starts.
    ClusterError
        No cluster, or dtrain is missing or of another version on it.
    JobFailed
        Or a subclass; or the user's own exception where user code failed.
    """
    job = job_of(model, X, y, arguments)
    _check(job)
    workers = job.replicas and min(job.replicas, _cores())
    with _out_of_the_pool(), connect(client, workers=workers) as found:
        handle = submit(job, client=found, detach=False)
        try:
            handle.wait(progress=progress)
        except BaseException:
            _cancel_quietly(handle)
            raise
        result = handle.result()
        handle.release()
        return result


def submit(
    model: Any,
    X: Any = None,
    y: Any = None,
    *,
    client: Client | str | None = None,
    detach: bool = True,
    **arguments: Any,
) -> Handle:
    """Start a job and return at once.

    Takes the arguments of :func:`fit`, or a whole :class:`Job`.  A detached job runs on without
    its client; with ``detach=False`` it ends with it.

    Returns
    -------
    Handle
    """
    job = job_of(model, X, y, arguments)
    _check(job)
    target = _running(client)
    info = install(target)
    for member, problem in info["problems"]:
        warnings.warn(f"{member} is left out: {problem}", ClusterWarning, stacklevel=2)
    workers = [address for address, _ in able(info, job.device or "auto")]
    resumed = preflight(job, target, workers[0])
    replicas = job.replicas or resumed or len(workers)
    spec = job.spec(detach=detach).resolved(replicas=replicas, workers=len(workers))
    model_bytes = _pickled("model", job.model)
    placement = _pickled("placement", job.placement) if callable(job.placement) else None
    blobs = None if job.initial is None else {"initial": initial_values(job.initial)}
    functions = _pickled("metrics", job.functions) if job.functions else None
    inputs = prepare(job, target, workers, replicas, blobs=blobs)
    control = Control(target)
    try:
        described = control.call(
            "dtrain_submit",
            settings().prepare_deadline,
            spec=spec.to_dict(),
            model=model_bytes,
            placement=placement,
            data=cloudpickle.dumps(replace(inputs.plan, functions=functions)),
            client=control.client_id,
        )
    except BaseException:
        inputs.discard()
        raise
    return Handle(described["id"], target, job.model, job.watchers)


def job_of(model: Any, X: Any, y: Any, arguments: dict[str, Any]) -> Job:
    """The job that fit and submit are called for: a whole one, or its fields."""
    if isinstance(model, Job):
        if X is not None or y is not None or arguments:
            raise SpecError("a Job: found further arguments, expected them within the Job")
        return model
    for name in arguments:
        if name not in FIELDS:
            raise SpecError(f"{name}: no such argument{did_you_mean(name, FIELDS)}")
    if X is None:
        raise SpecError("X: found None, expected an array of rows")
    return Job(model, X, y, **arguments)


def _check(job: Job) -> None:
    if job.output is not None:
        check_target(job.output)


def _pickled(what: str, given: Any) -> bytes:
    """By value where the workers cannot import it, with the names of its files.

    By these a remote traceback shows the user's own lines; cloudpickle by itself drops them.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(given)
    except Exception as error:
        raise SpecError(
            f"{what}: found a {type(given).__name__} that cannot be pickled "
            f"({type(error).__name__}: {error}), expected one that can travel to the workers"
        ) from error
    return buffer.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if a == "<dynamic-code>" else a for a in arguments)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def _running(client: Client | str | None) -> Client:
    """A client that outlives this call; submit has no cluster of its own."""
    from distributed import Client
    from distributed.client import default_client

    from dtrain.cluster import open_client

    if isinstance(client, Client):
        return client
    if isinstance(client, str):
        return open_client(client)
    if client is not None:
        raise SpecError(f"client: found {type(client).__name__}, expected a Client or an address")
    try:
        found: Client = default_client()
        return found
    except ValueError:
        raise SpecError(
            "client: found none, expected a Client or an address; "
            "fit runs on an embedded cluster, submit needs one that lives on"
        ) from None


@contextmanager
def _out_of_the_pool() -> Iterator[None]:
    """Within a Dask task: give its thread back for the time being, as the job may need it."""
    from distributed import rejoin, secede
    from distributed.worker import thread_state

    if not hasattr(thread_state, "execution_state"):
        yield
        return
    secede()
    try:
        yield
    finally:
        rejoin()


def _cancel_quietly(handle: Handle) -> None:
    """On the way out of an interrupt: the first error is the one to tell."""
    from contextlib import suppress

    with suppress(Exception):
        handle.cancel()
        handle.wait(timeout=settings().stop_grace + 1, progress=False)


def _cores() -> int:
    import os

    return os.cpu_count() or 1
