"""Where a job starts: parameters that are handed in, or a checkpoint that it goes on from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.config import settings
from dtrain.errors import CheckpointError, DeadlineError, SpecError
from dtrain.inputs import rows_of
from dtrain.job import Job
from dtrain.result import Result, load
from dtrain.runtime import checkpoint
from dtrain.runtime.restore import difference

if TYPE_CHECKING:
    from distributed import Client


def initial_values(initial: Any) -> dict[str, np.ndarray]:
    """The parameters of a result, a dict, or a saved model; names and shapes are the model's.

    Raises
    ------
    SpecError
        It is none of these.
    ModelFileError
        There is no saved model at the path.
    """
    if isinstance(initial, str | os.PathLike):
        # Its model is not needed, and need not be here.
        initial = load(initial, model=_AnyModel())
    if isinstance(initial, Result):
        initial = initial.params
    if not isinstance(initial, Mapping) or not initial:
        raise SpecError(
            f"initial: found {type(initial).__name__}, expected a Result, a dict of arrays, or the "
            f"path of a saved model"
        )
    return {str(name): np.asarray(value) for name, value in initial.items()}


class _AnyModel:
    """Stands for a model whose parameters alone are wanted."""

    task = "regression"


def preflight(job: Job, client: Client, worker: str) -> int | None:
    """See on a worker whether the place of the checkpoints is as the job expects it.

    Returns
    -------
    int or None
        How many replicas the job had that this one goes on from; None if it begins anew.

    Raises
    ------
    CheckpointError
        There are checkpoints where the job is to begin anew, or they are of another kind of job.
    """
    if job.checkpoint is None:
        return None
    place = str(job.checkpoint.dir)
    found = _ask(client, worker, place)
    if found is None:
        return None
    name, about = found
    if not job.resume:
        raise CheckpointError(
            f"{place}: found the checkpoint {name} of job {about['job']}, expected none; "
            f"resume=True goes on from it"
        )
    replicas: int = about["spec"]["replicas"]
    spec = job.spec(detach=True).resolved(replicas=job.replicas or replicas, workers=1)
    problem = difference(about, spec.to_dict(), rows_of(job.X))
    if problem is not None:
        raise CheckpointError(f"{place}/{name}: {problem}")
    return replicas


def _ask(client: Client, worker: str, place: str) -> tuple[str, dict[str, Any]] | None:
    seconds = settings().call_deadline

    async def ask() -> Any:
        call = client._run(_newest_at, place, workers=[worker])
        return (await asyncio.wait_for(call, seconds))[worker]

    try:
        found: tuple[str, dict[str, Any]] | None = client.sync(ask)
        return found
    except TimeoutError:
        raise DeadlineError(
            f"checkpoint.dir {place}: worker {worker} has not read it in {seconds:.0f} s"
        ) from None


def _newest_at(place: str) -> tuple[str, dict[str, Any]] | None:
    """On a worker: the newest checkpoint there, and what it is about."""
    for entry in checkpoint.entries(place, verify=False):
        if entry.problem is None:
            return entry.name, checkpoint.about(entry)
    return None
