"""What a job is, frozen: modes and the spec that travels to the master."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dtrain.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Synchronous replicas: each step aggregates the gradients of all replicas, then updates once.

    The same job gives the same bits, whatever the workers, transports and shards.
    """


@dataclass(frozen=True, kw_only=True)
class Async:
    """Asynchronous replicas: every gradient is applied as it arrives, and nobody waits."""


Mode = Sync | Async


def mode_name(mode: Mode) -> str:
    return "sync" if isinstance(mode, Sync) else "async"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Everything about a job but its model and its data.

    It is small, made of plain values, and travels through the scheduler.
    """

    mode: str = "sync"
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    replicas: int | None = None
    shards: int | None = None
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

    def __post_init__(self) -> None:
        for key in ("replicas", "shards", "steps"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, whole(key, getattr(self, key)))
        for key in ("batch_size", "epochs"):
            object.__setattr__(self, key, whole(key, getattr(self, key)))
        object.__setattr__(self, "seed", whole("seed", self.seed, least=0))
        if self.mode not in ("sync", "async"):
            raise SpecError(f"mode: found {self.mode!r}, expected 'sync' or 'async'")
        if not isinstance(self.shuffle, bool):
            raise SpecError(f"shuffle: found {self.shuffle!r}, expected True or False")
        fraction = self.validation_split
        if fraction is not None and not (isinstance(fraction, float) and 0 < fraction < 1):
            raise SpecError(
                f"validation_split: found {fraction!r}, expected a fraction between 0 and 1"
            )
        if self.name is not None:
            check_name(self.name)
        object.__setattr__(self, "metrics", tuple(self.metrics))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "optimizer": dict(self.optimizer), "metrics": list(self.metrics)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> JobSpec:
        return cls(**{**values, "metrics": tuple(values["metrics"])})

    def resolved(self, *, replicas: int, shards: int) -> JobSpec:
        return replace(self, replicas=replicas, shards=shards)


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
