"""A shard between two assigns."""

from __future__ import annotations

from collections.abc import Iterable

from dtrain.errors import ProtocolError
from dtrain.machines.assigns.words import (
    Answer,
    Applied,
    Apply,
    Discard,
    Drop,
    Flip,
    Flipped,
    Gone,
    Keep,
    Know,
    Outdated,
    Prepare,
    Prepared,
    Pull,
    Push,
    ShardCommand,
    Values,
    check_sender,
)
from dtrain.machines.departed import Departed

#: Of so many clients a shard knows which of their pushes it has, those that pushed last.
MOST = 10_000

#: So many pushes of a client may come before one that was sent earlier; what is missing then was
#: lost with a generation whose variables went back to a checkpoint, and does not come any more.
_AHEAD = 100

#: A client, and which of its pushes a shard has: all below a number, and some that are not.
Known = tuple[str, int, tuple[int, ...]]


class Shard:
    """One shard's parameters as of one assign, and what the next one has prepared.

    Parameters
    ----------
    index, generation : int
    number : int
        The assign that it is as of.
    version : int
        Assigns and pushes that it has had.
    pushed : iterable of tuple
        Which pushes are in it, as :attr:`pushed` of the shard that it goes on from.
    """

    def __init__(
        self,
        index: int,
        generation: int,
        number: int = 0,
        version: int = 0,
        pushed: Iterable[Known] = (),
    ) -> None:
        self.index = index
        self.generation = generation
        self.number = number
        self.version = version
        #: the assign that is prepared
        self.prepared: int | None = None
        #: what is prepared up to here comes too late
        self._discarded = number - 1
        #: client -> all its pushes below this have come, and those that came out of order
        self._pushed = {name: (below, set(ahead)) for name, below, ahead in pushed}
        self._gone = Departed()
        #: pushes that came more than once
        self.duplicates = 0

    @property
    def pushed(self) -> tuple[Known, ...]:
        """Which pushes it has, of each client; who pushed last is the last."""
        return tuple((n, below, tuple(sorted(a))) for n, (below, a) in self._pushed.items())

    def handle(
        self, event: Prepare | Know | Push | Pull | Discard | Gone, now: float
    ) -> list[ShardCommand]:
        """What to do, in this order, and under the shard's lock as one.

        Raises
        ------
        FencedError
            A message of another generation, or of a client that is gone.
        ProtocolError
            An assign is said to be committed that this shard has not prepared.
        """
        check_sender(f"shard {self.index}", event, self.generation, self._gone)
        if isinstance(event, Gone):
            self._gone.add(event.client)
            self._pushed.pop(event.client, None)
            return []
        commands = self._learn(event)
        if isinstance(event, Discard):
            self._discarded = max(self._discarded, event.number)
            return commands + (self._drop() if (self.prepared or 0) <= event.number else [])
        if isinstance(event, Prepare):
            return commands + self._prepare(event)
        if isinstance(event, Push):
            return commands + self._push(event)
        answer: Values | Flipped = Flipped(self.index, self.number)
        if isinstance(event, Pull):
            answer = Values(self.index, self.number, self.version)
        return [*commands, Answer(event.client, event.request, answer)]

    def _learn(self, event: Prepare | Know | Push | Pull | Discard) -> list[ShardCommand]:
        """Flip, if the sender knows more."""
        if event.committed <= self.number:
            return []
        if event.committed != self.prepared:
            raise ProtocolError(
                f"shard {self.index}: {type(event).__name__} says that assign {event.committed} "
                f"is committed: found {self.prepared} prepared on top of {self.number}"
            )
        self.number, self.prepared = event.committed, None
        self.version += 1
        return [Flip(self.number)]

    def _prepare(self, event: Prepare) -> list[ShardCommand]:
        answer: Prepared | Outdated = Prepared(self.index, event.number)
        commands: list[ShardCommand] = []
        if event.number < max(self.number, self._discarded + 1, self.prepared or 0):
            answer = Outdated(self.index, event.number)
        elif event.number not in (self.number, self.prepared):
            commands = [*self._drop(), Keep(event.number)]
            self.prepared = event.number
        return [*commands, Answer(event.client, event.request, answer)]

    def _drop(self) -> list[ShardCommand]:
        if self.prepared is None:
            return []
        number, self.prepared = self.prepared, None
        return [Drop(number)]

    def _push(self, event: Push) -> list[ShardCommand]:
        below, ahead = self._pushed.pop(event.client, (0, set()))
        if event.request < below or event.request in ahead:
            self.duplicates += 1
            commands: list[ShardCommand] = []
        else:
            self.version += 1
            ahead.add(event.request)
            if len(ahead) > _AHEAD:
                below = min(ahead)
            while below in ahead:
                ahead.remove(below)
                below += 1
            commands = [Apply(self.version)]
        self._pushed[event.client] = below, ahead
        if len(self._pushed) > MOST:
            del self._pushed[next(iter(self._pushed))]
        answer = Applied(self.index, self.number, self.version)
        return [*commands, Answer(event.client, event.request, answer)]
