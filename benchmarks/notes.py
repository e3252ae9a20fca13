"""When the model of a process was called: models note it, the client asks for it."""

from __future__ import annotations

import time

#: Of this process: when each call began, seconds.
_begun: list[float] = []


def note() -> None:
    """A call of the model begins."""
    _begun.append(time.perf_counter())


def forget() -> None:
    """Begin anew in this process."""
    _begun.clear()


def steps_per_s(first: int, last: int | None = None) -> float | None:
    """Calls/s from call ``first`` to before ``last``, or to the end; None if there were too few."""
    at = _begun[first:last]
    return None if len(at) < 2 else (len(at) - 1) / (at[-1] - at[0])
