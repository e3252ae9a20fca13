"""What the thread of a host does, as others may see it: for heartbeats, and for people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dtrain.messages import Batch

#: So many of the replicas that are waited for are named in a report.
_NAMED = 16


class _Over:
    """Leaves a block: what was going on in it is over.

    Not a generator: a step enters two blocks, and that costs more than what they do.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._end()


class Activity:
    """Written by the host's thread, read by its worker's event loop.

    Parameters
    ----------
    replicas : sequence of int
        Those of the host.
    """

    def __init__(self, replicas: Sequence[int]) -> None:
        self._replicas = replicas
        #: replica -> the gradients that it has computed in this generation
        self.steps: dict[int, int] = dict.fromkeys(replicas, 0)
        #: the replica that is in user code, its step, its batch, and since when
        self._computing: tuple[int, int, Batch, float] | None = None
        #: what else the thread does that may take long, in words, and since when
        self._doing: tuple[str, float] | None = None
        #: the barrier that it has reached, and since when
        self._barrier: tuple[int, str, float] | None = None
        #: the step that it waits for, the replicas that wait, for whom, and since when
        self._waits: tuple[int, Sequence[int], Callable[[], Sequence[int]], float] | None = None
        #: held for a moment by whoever looks at what the thread may be about to close
        self.glance = threading.Lock()
        self._done, self._left = _Over(self._end_doing), _Over(self._end_barrier)
        self._resumed = _Over(self._end_waiting)

    # -- by the host's thread ------------------------------------------------------------------

    def computing(self, replica: int, step: int, batch: Batch) -> None:
        """A replica goes into user code."""
        self._computing = replica, step, batch, time.monotonic()

    def computed(self, replica: int) -> float:
        """It has come back, with a gradient: a local step more; returns the seconds spent."""
        assert self._computing is not None
        spent = time.monotonic() - self._computing[-1]
        self.steps[replica] += 1
        self._computing = None
        return spent

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Inside, the thread does something that may take long; ``what`` says so to people."""
        self._doing = what, time.monotonic()
        return self._done

    def _end_doing(self) -> None:
        self._doing = None

    def at_barrier(self, epoch: int, phase: str) -> AbstractContextManager[None]:
        """Inside, it waits for all hosts."""
        self._barrier = epoch, phase, time.monotonic()
        return self._left

    def _end_barrier(self) -> None:
        self._barrier = None

    def waiting(
        self, step: int, missing: Callable[[], Sequence[int]], who: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """Inside, the thread waits for the replicas that ``missing`` tells of at any time.

        ``missing`` is called by another thread, and never once this one has left.  ``who`` waits:
        all replicas of the host if not given.
        """
        who = self._replicas if who is None else who
        self._waits = step, who, missing, time.monotonic()
        return self._resumed

    def _end_waiting(self) -> None:
        with self.glance:
            self._waits = None

    # -- by the event loop ---------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Small, and no lock is held long; call it with :attr:`glance` held.

        ``computing``: the replica in user code, for how many seconds, its step, and of its batch
        the partition and the index.  ``doing``: what else, in words, and for how long.
        ``barrier``: which one it has reached, its epoch and phase, and since how many seconds.
        ``waiting``: ``step``, ``who`` waits for it, for which ``replicas`` (the first of them, and
        how many ``more``; none: nobody is known of here), and for how many ``seconds``.
        """
        now = time.monotonic()
        computing, doing, barrier = self._computing, self._doing, self._barrier
        found: dict[str, Any] = {
            "steps": {str(i): count for i, count in self.steps.items()},
            "computing": None,
        }
        if computing is not None:
            replica, step, batch, since = computing
            found["computing"] = [replica, now - since, step, batch.part, batch.index]
        if doing is not None:
            found["doing"] = [doing[0], now - doing[1]]
        if barrier is not None:
            found["barrier"] = [*barrier[:2], now - barrier[2]]
        if self._waits is not None:
            step, who, missing, since = self._waits
            replicas = list(missing())
            found["waiting"] = {
                "step": step,
                "who": list(who),
                "replicas": replicas[:_NAMED],
                "more": len(replicas[_NAMED:]),
                "seconds": now - since,
            }
        return found
