"""Every error dtrain raises, in one tree.

::

    DTrainError
    |-- SpecError          what was asked for cannot be: before anything starts
    |-- DataError          the data cannot be trained on (shapes, lengths, labels)
    |-- GradientError      a model's loss or gradients are not what they have to be
    |-- ClusterError       no cluster there, or dtrain is missing or of another version on it
    |-- JobNotFound        no job of that id on this cluster
    |-- SessionNotFound    no session of that name on this cluster
    |-- SessionLost        the variables of a session went with a worker
    |-- JobFailed          a job ended without a result
    |   |-- NonFiniteError     a loss or gradient became NaN or infinite
    |   |-- WorkersLost        a worker that the job needed has died
    |   `-- JobCancelled       somebody cancelled it
    |-- DeadlineError      a wait ran out; names who was waited for
    |-- QueueClosed        the queue is closed, and what was in it has been taken
    |-- QueueLost          the queue or reader is gone with the worker that kept it, or was reset
    |-- FencedError        a message of an older generation of a job, or of a session that was reset
    |-- ProtocolError      a message that is illegal in the state it met
    |-- StorageError       a result could not be written
    |-- ModelFileError     a saved model is not readable
    `-- CheckpointError    a checkpoint cannot be read, or does not fit what is to be resumed

Each message names what was found and what was expected.

``ClusterWarning``, a UserWarning, is for a cluster that can do what is asked, but not as well as
it seems: a worker without dtrain, say.
"""

from __future__ import annotations


class DTrainError(Exception):
    """The root of all errors of dtrain."""


class SpecError(DTrainError, ValueError):
    """What was asked for cannot be: an unknown key, a wrong value, a file that is not there."""


class DataError(DTrainError, ValueError):
    """The data cannot be trained on: shapes, lengths or labels do not fit."""


class GradientError(DTrainError, ValueError):
    """What a model returned is not a loss and a gradient for each of its parameters."""


class ClusterError(DTrainError):
    """No cluster answers there, or dtrain is missing or of another version on it."""


class ClusterWarning(UserWarning):
    """The cluster can do it, but not as well as it seems; names the worker and the reason."""


class JobNotFound(DTrainError, LookupError):
    """There is no job of that id on this cluster."""


class SessionNotFound(DTrainError, LookupError):
    """There is no session of that name on this cluster."""


class SessionLost(DTrainError):
    """The variables of a session went with a worker; restore them, or reset the session."""


class DeadlineError(DTrainError, TimeoutError):
    """A wait ran out. The message names what was waited for, and whom."""


class FencedError(DTrainError):
    """The message belongs to an older generation of its job or session and was refused."""


class QueueClosed(DTrainError):
    """The queue is closed: nothing is put any more, and what was put has been taken."""


class QueueLost(DTrainError):
    """The queue or reader is gone, with the worker that kept it or by a reset; says which."""


class ProtocolError(DTrainError):
    """The message is illegal in the state that it met; nothing was changed."""


class StorageError(DTrainError, OSError):
    """A result could not be written; names the place and the reason."""


class ModelFileError(DTrainError, OSError):
    """A saved model cannot be read: files missing, damaged, or of another format."""


class CheckpointError(DTrainError, OSError):
    """A checkpoint cannot be read, or does not fit what is to be resumed; says what is wrong."""


class JobFailed(DTrainError):
    """A job ended without a result.

    Parameters
    ----------
    message : str
        What happened, in words.
    job : str
        The id of the job.
    reason : str
        One of ``USER_ERROR DATA_ERROR NON_FINITE WORKERS_LOST STORAGE DEADLINE CONTROLLER``,
        or ``CANCELLED``.
    """

    def __init__(self, message: str, job: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.job = job
        self.reason = reason

    def __reduce__(self) -> tuple[type[JobFailed], tuple[str, str, str]]:
        return type(self), (str(self), self.job, self.reason)


class NonFiniteError(JobFailed):
    """A loss or a gradient became NaN or infinite; replica, partition and step are named."""


class WorkersLost(JobFailed):
    """A worker that the job needed has died; it is named."""


class JobCancelled(JobFailed):
    """Somebody cancelled the job, or its client went away."""
