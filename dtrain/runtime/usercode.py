"""Telling the user's errors from our own, and carrying them to the client."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import cloudpickle

from dtrain.errors import CheckpointError, DataError, DeadlineError, DTrainError, StorageError
from dtrain.messages import Failure


class UserCodeError(Exception):
    """Something that the user gave us has raised; the cause is what it raised."""


class FailureTold(Exception):
    """A failure that has been described where it happened, at another worker maybe."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Mark errors inside as the user's; ``what`` says which call it was."""
    try:
        yield
    except Exception as error:
        raise UserCodeError(what) from error


def describe(error: BaseException, where: str) -> Failure:
    """The failure of a job that ``error`` on a host (``where``) means."""
    from dtrain.runtime.shards import StepRefused

    if isinstance(error, FailureTold):
        return error.failure
    text = "".join(traceback.format_exception(error))
    if isinstance(error, StepRefused):
        return Failure("NON_FINITE", str(error))
    if isinstance(error, UserCodeError) and error.__cause__ is not None:
        cause = error.__cause__
        text = "".join(traceback.format_exception(cause))
        words = f"{type(cause).__name__}: {cause} ({error}, at {where})"
        return Failure("USER_ERROR", words, text, _pickled(cause))
    if isinstance(error, DataError):
        return Failure("DATA_ERROR", f"{error} (at {where})", text)
    if isinstance(error, StorageError | CheckpointError):
        return Failure("STORAGE", f"{error} (at {where})", text)
    if isinstance(error, DeadlineError):
        return Failure("DEADLINE", f"{error} (at {where})", text)
    if isinstance(error, OSError) and not isinstance(error, DTrainError):
        return Failure("WORKERS_LOST", f"{error} (seen from {where})", text)
    return Failure("CONTROLLER", f"{type(error).__name__}: {error} (at {where})", text)


def _pickled(error: BaseException) -> bytes | None:
    """The exception for the client alone; None if it cannot travel (its words still do)."""
    try:
        data: bytes = cloudpickle.dumps(error)
        return data if isinstance(cloudpickle.loads(data), BaseException) else None
    except Exception:  # noqa: BLE001 - user's class; the message and the traceback travel anyway
        return None
