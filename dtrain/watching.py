"""Tells callbacks of a job, as far as it is seen from the process that waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtrain.callbacks import Callback

if TYPE_CHECKING:
    from dtrain.handle import Handle
    from dtrain.result import Result


class Watch:
    """What the callbacks of a job have been told already.

    Parameters
    ----------
    job : Handle
    callbacks : sequence of Callback
    """

    def __init__(self, job: Handle, callbacks: Sequence[Callback]) -> None:
        self._job = job
        self._callbacks = tuple(callbacks)
        self._began = self._ended = False
        self._step = self._epochs = self._events = 0

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def look(self) -> None:
        """Tell of all that is new, in the order of each kind; an error of a callback goes on."""
        if not self._began:
            self._began = True
            self._tell("on_start", self._job)
        events, status = self._job.events(), self._job.status()
        for event in events[self._events :]:
            self._tell("on_event", event)
        self._events = len(events)
        # What was recorded since a checkpoint that a job has gone back to comes once more.
        self._epochs = min(self._epochs, len(status["history"]))
        for record in status["history"][self._epochs :]:
            self._tell("on_epoch", record["epoch"], dict(record))
        self._epochs = len(status["history"])
        if status["step"] != self._step:
            self._step = status["step"]
            self._tell("on_step", self._step, {"loss": status["loss"]})

    def end(self, result: Result) -> None:
        """The job has succeeded."""
        if not self._ended:
            self._ended = True
            self._tell("on_end", result)

    def _tell(self, what: str, *said: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, what)(*said)
