"""What a job is, frozen: modes and the spec that travels to the master."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from typing import Any

from dtrain.config import seconds
from dtrain.devices import check_device
from dtrain.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Synchronous replicas: each step aggregates the gradients of the replicas, then updates once.

    Parameters
    ----------
    backups : int
        Replicas that a step does not wait for (Chen et al., 2016, "Revisiting distributed
        synchronous SGD").  Of R replicas the first R - backups that have a gradient make the step;
        a late one is dropped and counted, never applied, and its rows are trained on later in the
        epoch.  With 0 the same job gives the same bits, whatever the workers, transports and
        shards; else it depends on who arrives when.
    """

    backups: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "backups", whole("mode.backups", self.backups, least=0))


@dataclass(frozen=True, kw_only=True)
class Async:
    """Asynchronous replicas: every gradient is applied as it arrives.

    Parameters
    ----------
    max_staleness : int, optional
        No replica begins a step while it is more than so many steps ahead of the slowest (stale
        synchronous parallel: Ho et al., 2013).  A gradient's age is then at most
        (R - 1)(2 max_staleness + 1) updates.  None: nobody ever waits.
    """

    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None:
            bound = whole("mode.max_staleness", self.max_staleness, least=0)
            object.__setattr__(self, "max_staleness", bound)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How much may be lost before a job is.

    Parameters
    ----------
    max_losses : int
        Workers that may be lost, over the whole job.
    min_workers : int
        Workers without which nothing goes on: fewer are waited for.
    deadline : str or float
        How long they are waited for: seconds, or a time such as ``"10min"``.
    on_non_finite : str
        What a loss or a gradient that is NaN or infinite means: ``"fail"`` ends the job;
        ``"skip"`` refuses that step (or, in asynchronous mode, that gradient) for all shards,
        counts it as rejected, and goes on.
    """

    max_losses: int = 10
    min_workers: int = 1
    deadline: str | float = "10min"
    on_non_finite: str = "fail"

    def __post_init__(self) -> None:
        one_of("recovery.on_non_finite", self.on_non_finite, ("fail", "skip"))
        losses = whole("recovery.max_losses", self.max_losses, least=0)
        object.__setattr__(self, "max_losses", losses)
        workers = whole("recovery.min_workers", self.min_workers)
        object.__setattr__(self, "min_workers", workers)
        seconds("recovery.deadline", self.deadline)


@dataclass(frozen=True)
class Checkpoint:
    """Where a job saves its state, how often, and how many are kept.

    Parameters
    ----------
    dir : path or URL
        A directory that all workers see, or any URL of fsspec.
    every : str, float or int
        A time between two saves, such as ``"30s"`` or 30.0 (seconds); or a whole number of steps.
    keep : int
        The newest so many are kept.
    """

    dir: str | os.PathLike[str]
    every: str | float = "30s"
    keep: int = 3

    def __post_init__(self) -> None:
        place = os.fspath(self.dir) if isinstance(self.dir, str | os.PathLike) else None
        if not isinstance(place, str) or not place:
            raise SpecError(f"checkpoint.dir: found {self.dir!r}, expected a path or a URL")
        object.__setattr__(self, "dir", place if "://" in place else os.path.abspath(place))
        if place.startswith("memory:"):
            raise SpecError(
                f"checkpoint.dir: found {place!r}, expected a place that outlives its process"
            )
        every: Any = self.every
        if isinstance(every, Integral):
            object.__setattr__(self, "every", whole("checkpoint.every", every))
        else:
            seconds("checkpoint.every", self.every)
        object.__setattr__(self, "keep", whole("checkpoint.keep", self.keep))

    @property
    def steps(self) -> int | None:
        """Steps between two saves, if it counts in steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def seconds(self) -> float | None:
        """Seconds between two saves, if it counts in time."""
        return None if self.steps is not None else seconds("checkpoint.every", self.every)


Mode = Sync | Async

#: How shards are placed on workers, beside by a function of the user's.
PLACEMENTS = ("greedy", "round-robin")


def mode_name(mode: Mode) -> str:
    return "sync" if isinstance(mode, Sync) else "async"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Everything about a job but its model and its data.

    It is small, made of plain values, and travels through the scheduler.
    """

    mode: str = "sync"
    backups: int = 0
    max_staleness: int | None = None
    replication: str = "between-graph"
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    replicas: int | None = None
    shards: int | None = None
    partitioner: Mapping[str, Any] | None = None
    #: ``"function"``: one of the user's, which travels beside the spec
    placement: str = "greedy"
    device: str = "auto"
    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None
    shuffle: bool = True
    seed: int = 0
    validation_split: float | None = None
    metrics: tuple[str, ...] = ()
    name: str | None = None
    output: str | None = None
    detach: bool = True
    recovery: Recovery = field(default_factory=Recovery)
    checkpoint: Checkpoint | None = None
    resume: bool = False
    #: what decides when it is enough: the fields of :class:`dtrain.EarlyStopping`
    stopping: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for key in ("replicas", "shards", "steps"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, whole(key, getattr(self, key)))
        for key in ("batch_size", "epochs"):
            object.__setattr__(self, key, whole(key, getattr(self, key)))
        object.__setattr__(self, "seed", whole("seed", self.seed, least=0))
        one_of("mode", self.mode, ("sync", "async"))
        if self.partitioner is not None and self.shards is not None:
            raise SpecError("partitioner and shards: found both, expected one")
        one_of("placement", self.placement, (*PLACEMENTS, "function"))
        check_device(self.device)
        one_of("replication", self.replication, ("between-graph", "in-graph"))
        if self.replication == "in-graph" and (self.mode == "async" or self.backups):
            raise SpecError(
                "replication: found 'in-graph' with another mode than Sync(), expected "
                "'between-graph', or Sync() without backups: an in-graph step has all replicas"
            )
        if self.replicas is not None and self.backups >= self.replicas:
            raise SpecError(
                f"mode.backups: found {self.backups} with {self.replicas} replicas, "
                f"expected fewer backups than replicas"
            )
        for key in ("shuffle", "resume"):
            if not isinstance(getattr(self, key), bool):
                raise SpecError(f"{key}: found {getattr(self, key)!r}, expected True or False")
        for key, kind in (("recovery", Recovery), ("checkpoint", Checkpoint)):
            found = getattr(self, key)
            if not isinstance(found, kind) and not (key == "checkpoint" and found is None):
                raise SpecError(f"{key}: found {found!r}, expected a dtrain.{kind.__name__}(...)")
        if self.resume and self.checkpoint is None:
            raise SpecError("resume: found it without a checkpoint, expected checkpoint=...")
        fraction = self.validation_split
        if fraction is not None and not (isinstance(fraction, float) and 0 < fraction < 1):
            raise SpecError(
                f"validation_split: found {fraction!r}, expected a fraction between 0 and 1"
            )
        if self.name is not None:
            check_name(self.name)
        object.__setattr__(self, "metrics", tuple(self.metrics))

    def to_dict(self) -> dict[str, Any]:
        own = {
            "optimizer": dict(self.optimizer),
            "partitioner": None if self.partitioner is None else dict(self.partitioner),
            "metrics": list(self.metrics),
            "stopping": [dict(policy) for policy in self.stopping],
        }
        return {**asdict(self), **own}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JobSpec:
        checkpoint = values["checkpoint"]
        return cls(
            **{
                **values,
                "metrics": tuple(values["metrics"]),
                "stopping": tuple(values.get("stopping", ())),
                "recovery": Recovery(**values["recovery"]),
                "checkpoint": None if checkpoint is None else Checkpoint(**checkpoint),
            }
        )

    def resolved(self, *, replicas: int, workers: int) -> JobSpec:
        """With as many replicas, and by default a shard for each of so many workers."""
        shards = self.shards or (workers if self.partitioner is None else None)
        return replace(self, replicas=replicas, shards=shards)


def one_of(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    """``value`` if it is among those allowed, or a SpecError that names ``key``."""
    if value not in allowed:
        expected = ", ".join(map(repr, allowed[:-1])) + f" or {allowed[-1]!r}"
        raise SpecError(f"{key}: found {value!r}, expected {expected}")
    return str(value)


#: What all that carry numbers can carry.
_MOST = 2**53


def whole(key: str, value: Any, *, least: int = 1) -> int:
    """``value`` as an int, or a SpecError that names ``key``."""
    try:
        number = None if isinstance(value, bool) else int(value)
        exact = number is not None and math.isfinite(value) and number == value
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact or number is None or number < least:
        raise SpecError(f"{key}: found {value!r}, expected a whole number from {least} up")
    if number > _MOST:
        raise SpecError(f"{key}: found {value!r:.40}, expected a whole number up to {_MOST}")
    return number


def check_name(name: Any) -> str:
    """A label is one line of at most 200 printable characters; it never becomes a path."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\x00-\x1f\x7f]{1,200}", name):
        raise SpecError(f"name: found {name!r}, expected one line of 1 to 200 printable characters")
    return name
