"""What looks at the epochs of a job: what decides when it is enough, and what people watch with.

What decides is a pure function of the job's history, which every state and every checkpoint has:
so nothing of it can be lost with a worker, and whoever goes on decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtrain.checks import choice, flag, number
from dtrain.errors import SpecError
from dtrain.metrics import larger_is_better
from dtrain.spec import JobSpec, whole

if TYPE_CHECKING:
    from dtrain.handle import Handle
    from dtrain.result import Result

History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EarlyStopping:
    """End a job once a value of its epochs does not get better any more; as Keras's.

    Parameters
    ----------
    monitor : str
        The value: ``"loss"``, ``"val_loss"`` or ``"val_<metric>"``.
    patience : int
        So many epochs without a better value are one too many.
    min_delta : float
        By how much a better value is better, at the least.
    restore_best : bool
        The result has the parameters of the best epoch, whether the job was ended by this or not;
        else those of the last.
    mode : {"auto", "min", "max"}
        Which values are better; "auto": as the metric has it.

    Raises
    ------
    SpecError
        Names the argument, what was found and what was expected.
    """

    monitor: str = "val_loss"
    patience: int = 2
    min_delta: float = 0.0
    restore_best: bool = True
    mode: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str):
            raise SpecError(f"EarlyStopping: monitor: found {self.monitor!r}, expected a name")
        object.__setattr__(
            self, "patience", whole("EarlyStopping: patience", self.patience, least=0)
        )
        object.__setattr__(self, "min_delta", number("EarlyStopping: min_delta", self.min_delta))
        flag("EarlyStopping: restore_best", self.restore_best)
        choice("EarlyStopping: mode", self.mode, ("auto", "min", "max"))

    def checked(self, values: Sequence[str]) -> EarlyStopping:
        """With the mode that "auto" means, for a job whose epochs have these values."""
        if self.monitor not in values:
            raise SpecError(
                f"EarlyStopping: monitor: found {self.monitor!r}, expected one of "
                f"{', '.join(map(repr, values))}"
            )
        if self.mode != "auto":
            return self
        larger = larger_is_better(self.monitor.removeprefix("val_"))
        if larger is None:
            raise SpecError(
                f"EarlyStopping: mode: found 'auto' for {self.monitor!r}, a function of one's own, "
                f"expected 'min' or 'max'"
            )
        return EarlyStopping(
            self.monitor,
            self.patience,
            self.min_delta,
            self.restore_best,
            "max" if larger else "min",
        )

    def best(self, history: History) -> int | None:
        """The index of the epoch with the best value; None if no value is a number."""
        sign, best, found = (1.0 if self.mode == "min" else -1.0), math.inf, None
        for index, record in enumerate(history):
            value = sign * record[self.monitor]
            # A NaN is never better.
            if value < best - (self.min_delta if found is not None else 0.0):
                best, found = value, index
        return found

    def enough(self, history: History) -> str | None:
        """Why the job is to end after these epochs, in words; None: it is not."""
        if not history:
            return None
        best = self.best(history)
        waited = len(history) - 1 - (-1 if best is None else best)
        if waited < max(self.patience, 1):
            return None
        since = "has not been a number" if best is None else f"was best in epoch {best + 1}"
        return f"{self.monitor} {since}"


def policies(spec: JobSpec) -> tuple[EarlyStopping, ...]:
    """What decides when a job is enough."""
    return tuple(EarlyStopping(**fields) for fields in spec.stopping)


def enough(policies: Sequence[EarlyStopping], history: History) -> str | None:
    """The first of the reasons to end, if there is one."""
    return next((why for policy in policies if (why := policy.enough(history))), None)


def best(policies: Sequence[EarlyStopping], history: History) -> int | None:
    """The epoch whose parameters the result is to have; None: the last, whichever it is."""
    restoring = next((policy for policy in policies if policy.restore_best), None)
    return None if restoring is None else restoring.best(history)


class Callback:
    """Watches a job from the process that waits for it; override what is wanted.

    The methods are called by ``fit``, or by ``wait`` and ``result`` of the handle that ``submit``
    has returned, in the order of what they tell of.  An error that one of them raises ends the
    wait; ``fit`` then cancels the job.
    """

    def on_start(self, job: Handle) -> None:
        """The job has been submitted."""

    def on_step(self, step: int, logs: dict[str, Any]) -> None:
        """It has come to this step; of the steps between two looks, the last.  ``logs``: loss."""

    def on_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch, counted from 1, is over; ``logs`` is its record in the history."""

    def on_event(self, event: dict[str, Any]) -> None:
        """Something has happened: ``time``, ``state``, ``message``."""

    def on_end(self, result: Result) -> None:
        """It has succeeded."""
