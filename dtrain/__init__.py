"""Data-parallel training as a service inside a Dask cluster.

The main path of a job, module by module::

    training.fit -> runtime.master -> machines.rounds -> runtime.replica -> models
                 -> runtime.transport -> machines.shard -> optim

``ARCHITECTURE.md`` has the floors: a module imports only from floors below its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dtrain._version import __version__

if TYPE_CHECKING:
    from dtrain import checkpoints, models, optim, sessions
    from dtrain.callbacks import Callback, EarlyStopping
    from dtrain.cluster import connect, doctor
    from dtrain.devices import device
    from dtrain.errors import (
        ClusterError,
        ClusterWarning,
        DataError,
        DeadlineError,
        DTrainError,
        FencedError,
        GradientError,
        JobCancelled,
        JobFailed,
        JobNotFound,
        ModelFileError,
        NonFiniteError,
        ProtocolError,
        QueueClosed,
        QueueLost,
        SessionLost,
        SessionNotFound,
        SpecError,
        StorageError,
        WorkersLost,
    )
    from dtrain.handle import Handle, attach, jobs
    from dtrain.job import Job
    from dtrain.machines.ledger import Ledger
    from dtrain.partition import FixedShards, MaxSize, MinSize
    from dtrain.planning import Plan, plan
    from dtrain.result import Result, load
    from dtrain.sessions.session import Session, Snapshot
    from dtrain.spec import Async, Checkpoint, Recovery, Sync
    from dtrain.specfile import load_job
    from dtrain.training import fit, submit

#: Public name -> the module that has it.  They are loaded when first used: ``import dtrain``
#: costs milliseconds, on a worker and in the CLI.
_HOMES = {
    "Async": "dtrain.spec",
    "Callback": "dtrain.callbacks",
    "Checkpoint": "dtrain.spec",
    "CheckpointError": "dtrain.errors",
    "ClusterError": "dtrain.errors",
    "ClusterWarning": "dtrain.errors",
    "DTrainError": "dtrain.errors",
    "DataError": "dtrain.errors",
    "DeadlineError": "dtrain.errors",
    "EarlyStopping": "dtrain.callbacks",
    "FencedError": "dtrain.errors",
    "GradientError": "dtrain.errors",
    "FixedShards": "dtrain.partition",
    "Handle": "dtrain.handle",
    "Job": "dtrain.job",
    "JobCancelled": "dtrain.errors",
    "JobFailed": "dtrain.errors",
    "JobNotFound": "dtrain.errors",
    "Ledger": "dtrain.machines.ledger",
    "MaxSize": "dtrain.partition",
    "MinSize": "dtrain.partition",
    "ModelFileError": "dtrain.errors",
    "NonFiniteError": "dtrain.errors",
    "Plan": "dtrain.planning",
    "ProtocolError": "dtrain.errors",
    "QueueClosed": "dtrain.errors",
    "QueueLost": "dtrain.errors",
    "Recovery": "dtrain.spec",
    "Result": "dtrain.result",
    "Session": "dtrain.sessions.session",
    "SessionLost": "dtrain.errors",
    "SessionNotFound": "dtrain.errors",
    "Snapshot": "dtrain.sessions.session",
    "SpecError": "dtrain.errors",
    "StorageError": "dtrain.errors",
    "Sync": "dtrain.spec",
    "WorkersLost": "dtrain.errors",
    "attach": "dtrain.handle",
    "connect": "dtrain.cluster",
    "device": "dtrain.devices",
    "doctor": "dtrain.cluster",
    "fit": "dtrain.training",
    "jobs": "dtrain.handle",
    "load": "dtrain.result",
    "load_job": "dtrain.specfile",
    "plan": "dtrain.planning",
    "submit": "dtrain.training",
}

__all__ = [
    "Async",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "ClusterError",
    "ClusterWarning",
    "DTrainError",
    "DataError",
    "DeadlineError",
    "EarlyStopping",
    "FencedError",
    "FixedShards",
    "GradientError",
    "Handle",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobNotFound",
    "Ledger",
    "MaxSize",
    "MinSize",
    "ModelFileError",
    "NonFiniteError",
    "Plan",
    "ProtocolError",
    "QueueClosed",
    "QueueLost",
    "Recovery",
    "Result",
    "Session",
    "SessionLost",
    "SessionNotFound",
    "Snapshot",
    "SpecError",
    "StorageError",
    "Sync",
    "WorkersLost",
    "__version__",
    "attach",
    "checkpoints",
    "connect",
    "device",
    "doctor",
    "fit",
    "jobs",
    "load",
    "load_job",
    "models",
    "optim",
    "plan",
    "sessions",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name in ("checkpoints", "models", "optim", "sessions"):
        return importlib.import_module(f"dtrain.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
