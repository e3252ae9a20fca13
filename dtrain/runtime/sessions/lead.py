"""The lead of a session's assigns where it is hosted, and its messages as they travel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines import assigns
from dtrain.machines.assigns import Discard, Lead, Tick


class HostedLead:
    """The lead of a session's assigns: its machine, its clock, and those who wait for answers.

    In the event loop alone.

    Parameters
    ----------
    discard : callable
        Tells all shards what will never be committed.
    """

    def __init__(self, machine: Lead, discard: Callable[[Discard], None]) -> None:
        self.machine = machine
        self._discard = discard
        self._waiters: dict[tuple[str, int, bool], asyncio.Future[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: the deadline that it is for
        self._due: float | None = None
        self.closed = False

    async def ask(self, event: Any, wait: float) -> Any:
        """The answer to a client's message, which may come when others are done; None: not yet."""
        if self.closed:
            raise FencedError(f"lead: generation {self.machine.generation} is over")
        name = event.puller if isinstance(event, assigns.Hold | assigns.Let) else event.writer
        key = name, event.request, isinstance(event, assigns.Hold)
        waiter = self._waiters.setdefault(key, asyncio.get_running_loop().create_future())
        try:
            self.handle(event)
            if isinstance(event, assigns.Let | assigns.GiveUp):
                return None
            if not waiter.done():
                await asyncio.wait([waiter], timeout=wait)
        finally:
            if self._waiters.get(key) is waiter:
                del self._waiters[key]
        return waiter.result() if waiter.done() else None

    def handle(self, event: Any) -> None:
        for command in self.machine.handle(event, time.monotonic()):
            if isinstance(command, Discard):
                self._discard(command)
                continue
            held = isinstance(command.answer, assigns.Held)
            waiter = self._waiters.get((command.client, command.request, held))
            if waiter is not None and not waiter.done():
                waiter.set_result(command.answer)
        self._set_timer()

    def _set_timer(self) -> None:
        deadline = None if self.closed else self.machine.deadline
        if deadline == self._due:
            return  # else who asks again and again would put it off for ever
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = deadline
        if deadline is not None:
            delay = max(deadline - time.monotonic(), 0.0) + 1e-3
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = self._due = None
        self.handle(Tick())

    def close(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(
                    FencedError(f"lead: generation {self.machine.generation} is over")
                )
                waiter.exception()  # also where nobody waits any more


#: The messages that travel, by name; their fields go in order.
_WORDS = {
    cls.__name__: cls
    for cls in (
        assigns.Begin,
        assigns.Commit,
        assigns.GiveUp,
        assigns.Hold,
        assigns.Let,
        assigns.Granted,
        assigns.Committed,
        assigns.Aborted,
        assigns.Held,
        assigns.Prepared,
        assigns.Outdated,
        assigns.Flipped,
        assigns.Applied,
        assigns.Values,
    )
}


def packed(message: Any) -> tuple[str, tuple[Any, ...]] | None:
    """A message of the machines of assigns as it travels."""
    if message is None:
        return None
    return type(message).__name__, tuple(getattr(message, name) for name in message.__slots__)


def unpacked(kind: str, values: Sequence[Any]) -> Any:
    """The message that was :func:`packed`."""
    if kind not in _WORDS:
        raise ProtocolError(f"found the message {kind!r}, expected one of {sorted(_WORDS)}")
    return _WORDS[kind](*values)
