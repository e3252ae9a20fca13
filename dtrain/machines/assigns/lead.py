"""Grants the numbers of assigns, and commits them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtrain.errors import ProtocolError
from dtrain.machines.assigns.words import (
    Aborted,
    Answer,
    Begin,
    Commit,
    Committed,
    Discard,
    GiveUp,
    Gone,
    Granted,
    Held,
    Hold,
    LeadCommand,
    Let,
    Tick,
    check_sender,
)
from dtrain.machines.departed import Departed

#: A pull's request, and which of its holds.
_Nth = tuple[int, int]
_NEVER: _Nth = (-1, -1)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds.

    Attributes
    ----------
    write : float
        What a writer has from its grant until every shard has prepared its assign.
    hold : float
        What a puller may hold back commits for.
    """

    write: float = 30.0
    hold: float = 1.0


@dataclass
class _Turn:
    """The assign whose turn it is."""

    writer: str
    request: int
    number: int
    until: float
    #: every shard has prepared it; only holds keep it from being committed
    ready: bool = False
    #: its writer has died since
    left: bool = False


class Lead:
    """Grants the numbers of assigns, one at a time, and commits them.

    Writers take turns in the order in which they came.  A commit waits for those who hold at the
    time; who wants to hold later waits for the commit, so that neither starves the other.

    Parameters
    ----------
    generation : int
    limits : Limits
    committed : int
        The newest assign that is committed; that of the initial values is 0.
    """

    def __init__(self, generation: int, limits: Limits, committed: int = 0) -> None:
        self.generation = generation
        self.limits = limits
        self.committed = committed
        self._numbered = committed
        self._turn: _Turn | None = None
        #: who waits for a turn, in order
        self._waiting: dict[str, Begin] = {}
        #: writer -> its last request that is over, and what it was answered
        self._over: dict[str, tuple[int, Committed | Aborted]] = {}
        #: puller -> its hold, and until when
        self._holds: dict[str, tuple[_Nth, float]] = {}
        #: who wants to hold once the commit is through, in order
        self._later: dict[str, _Nth] = {}
        #: puller -> its last hold that is over
        self._let: dict[str, _Nth] = {}
        self._gone = Departed()

    @property
    def deadline(self) -> float | None:
        """When the next deadline is: a :class:`Tick` is due then."""
        dates = [begin.until for begin in self._waiting.values()]
        dates += [until for _, until in self._holds.values()]
        if self._turn is not None and not self._turn.ready:
            dates.append(self._turn.until)
        return min(dates, default=None)

    @property
    def writer(self) -> str | None:
        """Whose turn it is."""
        return self._turn.writer if self._turn else None

    def handle(
        self, event: Begin | Commit | GiveUp | Hold | Let | Gone | Tick, now: float
    ) -> list[LeadCommand]:
        """Answers to the event's sender and to others that have waited; and what to discard.

        Raises
        ------
        FencedError
            A message of another generation, or of a client that is gone.
        ProtocolError
            A request out of its order.
        """
        check_sender("lead", event, self.generation, self._gone)
        return _LEAD[type(event)](self, event, now)

    def _begin(self, event: Begin, now: float) -> list[LeadCommand]:
        over = self._answered(event)
        if over is not None:
            return over
        turn = self._own_turn(event)
        if turn is not None:
            return [self._granted(turn)]
        if event.writer in self._waiting:
            return []
        self._waiting[event.writer] = event
        commands = self._next(now)
        if event.writer in self._waiting and event.until <= now:
            del self._waiting[event.writer]
            commands.append(self._abort(event.writer, event.request, self._late()))
        return commands

    def _commit(self, event: Commit, now: float) -> list[LeadCommand]:
        over = self._answered(event)
        if over is not None:
            return over
        turn = self._own_turn(event)
        if turn is None or turn.number != event.number:
            raise ProtocolError(
                f"lead: Commit {event.request} of {event.writer}, assign {event.number}: found "
                f"the turn of {self.writer}, assign {turn.number if turn else self.committed}"
            )
        turn.ready = True
        return self._next(now)

    def _give_up(self, event: GiveUp, now: float) -> list[LeadCommand]:
        over = self._answered(event)
        if over is not None:
            return over
        self._own_turn(event)
        return self._withdraw(event.writer, event.request, "it was given up", now)

    def _own_turn(self, event: Begin | Commit | GiveUp) -> _Turn | None:
        """The turn of a message's writer, if it has it; checks that it asks in order."""
        turn, waits = self._turn, self._waiting.get(event.writer)
        own = turn if turn is not None and turn.writer == event.writer else None
        open_ = own.request if own else waits.request if waits else event.request
        if open_ != event.request:
            raise ProtocolError(
                f"lead: {type(event).__name__} {event.request} of {event.writer}: "
                f"its assign {open_} is not over"
            )
        return own

    def _answered(self, event: Begin | Commit | GiveUp) -> list[LeadCommand] | None:
        """What a request that is over was answered; None if it is not."""
        last = self._over.get(event.writer)
        if last is None or event.request > last[0]:
            return None
        if event.request < last[0]:
            return []
        return [Answer(event.writer, event.request, last[1])]

    def _withdraw(self, writer: str, request: int, why: str, now: float) -> list[LeadCommand]:
        """An assign that its writer does not go on with, in whatever state it is."""
        turn = self._turn
        self._waiting.pop(writer, None)
        commands: list[LeadCommand] = [self._abort(writer, request, why)]
        if turn is not None and turn.writer == writer:
            self._turn = None
            commands.append(Discard(self.generation, turn.number, self.committed))
        return commands + self._next(now)

    def _hold(self, event: Hold, now: float) -> list[LeadCommand]:
        hold = event.request, event.nth
        if hold <= self._let.get(event.puller, _NEVER):
            return []
        self._later[event.puller] = hold
        return self._next(now)

    def _release(self, event: Let, now: float) -> list[LeadCommand]:
        hold = event.request, event.nth
        if hold > self._let.get(event.puller, _NEVER):
            self._let[event.puller] = hold
            self._later.pop(event.puller, None)
            self._holds.pop(event.puller, None)
        return self._next(now)

    def _die(self, event: Gone, now: float) -> list[LeadCommand]:
        name = event.client
        if not self._gone.add(name):
            return []
        self._later.pop(name, None)
        self._holds.pop(name, None)
        self._let.pop(name, None)
        self._waiting.pop(name, None)
        self._over.pop(name, None)
        commands: list[LeadCommand] = []
        turn = self._turn
        if turn is not None and turn.writer == name:
            # Every shard has prepared what is ready: that goes on without its writer.
            turn.left = True
            if not turn.ready:
                self._turn = None
                commands.append(Discard(self.generation, turn.number, self.committed))
        return commands + self._next(now)

    def _tick(self, event: Tick, now: float) -> list[LeadCommand]:
        commands: list[LeadCommand] = []
        self._holds = {p: hold for p, hold in self._holds.items() if hold[1] > now}
        turn = self._turn
        if turn is not None and not turn.ready and turn.until <= now:
            why = f"not all shards had prepared it after {self.limits.write:g} s"
            commands += self._withdraw(turn.writer, turn.request, why, now)
        for begin in [b for b in self._waiting.values() if b.until <= now]:
            del self._waiting[begin.writer]
            commands.append(self._abort(begin.writer, begin.request, self._late()))
        return commands + self._next(now)

    def _late(self) -> str:
        return f"its turn had not come until its deadline; it was {self.writer}'s"

    def _next(self, now: float) -> list[LeadCommand]:
        """Commit what is ready, let pullers hold, and give the next writer its turn."""
        commands: list[LeadCommand] = []
        turn = self._turn
        if turn is not None and turn.ready and not self._holds:
            self.committed = turn.number
            self._turn = None
            if not turn.left:
                committed = Committed(turn.number)
                self._over[turn.writer] = turn.request, committed
                commands.append(Answer(turn.writer, turn.request, committed))
        if self._turn is None or not self._turn.ready:
            for puller, hold in self._later.items():
                held = self._holds.get(puller)
                if held is None or held[0] != hold:
                    self._holds[puller] = hold, now + self.limits.hold
                request, nth = hold
                commands.append(Answer(puller, request, Held(nth, self.committed)))
            self._later.clear()
        if self._turn is None and self._waiting:
            begin = self._waiting.pop(next(iter(self._waiting)))
            self._numbered += 1
            until = now + self.limits.write
            self._turn = _Turn(begin.writer, begin.request, self._numbered, until)
            commands.append(self._granted(self._turn))
        return commands

    def _granted(self, turn: _Turn) -> Answer:
        return Answer(turn.writer, turn.request, Granted(turn.number, self.committed))

    def _abort(self, writer: str, request: int, why: str) -> Answer:
        aborted = Aborted(why)
        self._over[writer] = (request, aborted)
        return Answer(writer, request, aborted)


_LEAD: dict[type, Callable[[Lead, Any, float], list[LeadCommand]]] = {
    Begin: Lead._begin,
    Commit: Lead._commit,
    GiveUp: Lead._give_up,
    Hold: Lead._hold,
    Let: Lead._release,
    Gone: Lead._die,
    Tick: Lead._tick,
}
