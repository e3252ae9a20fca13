"""Saves a job now and then: copied between two steps, written by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from dtrain.errors import DTrainError
from dtrain.runtime import checkpoint
from dtrain.runtime.points import at_point
from dtrain.runtime.restore import snapshot
from dtrain.runtime.state import State

if TYPE_CHECKING:
    from dtrain.runtime.host import Host

logger = logging.getLogger("dtrain.checkpoint")


class Saver:
    """The checkpoints of a job, at its chief.

    A save that fails is told, loudly, and training goes on: the checkpoint before stays valid.
    One save at a time: what falls due meanwhile is saved when that has ended.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        plan = host.launch.spec.checkpoint
        self._plan = plan if host.is_chief else None
        self._last = host.begin.step
        self._due_at = time.monotonic() + ((plan.seconds if plan else None) or 0.0)
        self._thread: threading.Thread | None = None

    def look(self, step: int) -> None:
        """Between two steps: save if it is time to."""
        if self._plan is not None and self._due(step) and not self._busy():
            self._save(step)

    def _due(self, step: int) -> bool:
        assert self._plan is not None
        if step == self._last:
            return False
        every = self._plan.steps
        if every is not None:
            return step // every > self._last // every
        return time.monotonic() >= self._due_at

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _save(self, step: int) -> None:
        assert self._plan is not None
        began = time.monotonic()
        self._due_at = began + (self._plan.seconds or 0.0)
        try:
            state = self._host.copy_state()
        except (OSError, DTrainError) as error:
            # Hosts that died meanwhile, say: the next generation will save.
            self._host.calls.tell(f"step {step} could not be copied for a checkpoint: {error}")
            return
        # Others may have gone on since the chief has last looked.
        self._last = state.step
        name = f"dtrain-save-{self._host.launch.job}"
        stall = time.monotonic() - began
        self._thread = threading.Thread(
            target=self._write, args=(state, stall), name=name, daemon=True
        )
        self._thread.start()

    def _write(self, state: State, stall: float) -> None:
        assert self._plan is not None
        began = time.monotonic()
        try:
            at_point("saving")
            entry = checkpoint.save(
                str(self._plan.dir),
                snapshot(self._host, state),
                keep=self._plan.keep,
                fence=self._host.calls.still_ours,
            )
        except Exception as error:  # noqa: BLE001 - told; the training must not end by it
            if self._host.calls.stopped is None:
                logger.error("job %s: %s", self._host.launch.job, error)
                self._host.calls.tell(f"the checkpoint of step {state.step} failed: {error}")
            return
        took = time.monotonic() - began
        words = (
            f"saved {entry.name}, {entry.nbytes} bytes in {took:.2f} s, a stall of {stall:.3f} s"
        )
        self._host.calls.tell(words, saved=state.step)

    def finish(self, step: int) -> None:
        """At the end of the training: what has not been saved yet is."""
        if self._plan is None:
            return
        deadline = self._host.launch.settings.step_deadline
        self.wait(deadline)
        if step != self._last and not self._busy():
            self._save(step)
        self.wait(deadline)

    def wait(self, seconds: float) -> None:
        """Until what is being saved is; no longer."""
        if self._thread is not None:
            self._thread.join(seconds)
