"""An assign and a pull, as their clients see them through."""

from __future__ import annotations

from collections.abc import Iterable

from dtrain.machines.assigns.words import (
    Aborted,
    Again,
    Begin,
    Commit,
    Committed,
    Done,
    Failed,
    Flipped,
    GiveUp,
    Granted,
    Held,
    Hold,
    Know,
    Let,
    Outdated,
    Prepare,
    Prepared,
    Pull,
    PullerCommand,
    Take,
    ToLead,
    ToShard,
    Values,
    WriterCommand,
)


class Writer:
    """One assign, as its client sees it through; begin with :class:`Again`.

    Parameters
    ----------
    client : str
    request : int
        Numbers the assigns of a client, from 0.
    generation : int
    shards : sequence of int
        All shards, also those that it writes nothing to.
    until : float
        The deadline for its turn.
    """

    def __init__(
        self, client: str, request: int, generation: int, shards: Iterable[int], until: float
    ) -> None:
        self.client = client
        self.request = request
        self.generation = generation
        self.shards = tuple(shards)
        self.until = until
        self.number: int | None = None
        self.outcome: Done | Failed | None = None
        self._before = 0
        #: the shards whose answer is missing, and to what: to Prepare, or to Know
        self._missing: set[int] = set()
        self._committed = False

    def handle(
        self,
        event: Again | Granted | Prepared | Outdated | Committed | Aborted | Flipped,
        now: float,
    ) -> list[WriterCommand]:
        """What to send; at last a :class:`Done` or a :class:`Failed`.

        Answers of an earlier assign of this client must not be given to it.
        """
        if self.outcome is not None:
            return []
        if isinstance(event, Again):
            return self._open()
        if isinstance(event, Granted):
            if self.number is not None:
                return []
            self.number, self._before = event.number, event.committed
            self._missing = set(self.shards)
            return self._open()
        if isinstance(event, Committed):
            if self._committed:
                return []
            self.number, self._committed = event.number, True
            self._missing = set(self.shards)
            return self._open()
        if isinstance(event, Aborted):
            self.outcome = Failed(event.why)
            return [self.outcome]
        return self._heard(event)

    def _heard(self, event: Prepared | Outdated | Flipped) -> list[WriterCommand]:
        """A shard has answered."""
        expected = Flipped if self._committed else (Prepared, Outdated)
        if not isinstance(event, expected) or event.shard not in self._missing:
            return []
        if isinstance(event, Outdated):
            self.outcome = Failed(f"shard {event.shard} was told that it was given up")
            message = GiveUp(self.generation, self.client, self.request)
            return [ToLead(message), self.outcome]
        self._missing.discard(event.shard)
        if self._missing:
            return []
        if not self._committed:
            return self._open()
        assert self.number is not None
        self.outcome = Done(self.number)
        return [self.outcome]

    def _open(self) -> list[WriterCommand]:
        """What there is no answer to yet."""
        own = self.generation, self.client, self.request
        if self.number is None:
            return [ToLead(Begin(*own, self.until))]
        if self._committed:
            return [ToShard(s, Know(*own, self.number)) for s in sorted(self._missing)]
        if self._missing:
            message = Prepare(*own, self.number, self._before)
            return [ToShard(s, message) for s in sorted(self._missing)]
        return [ToLead(Commit(*own, self.number))]


class Puller:
    """One pull, as its client sees it through; begin with :class:`Again`.

    Parameters
    ----------
    client : str
    request : int
        Numbers the pulls of a client, from 0.
    generation : int
    shards : sequence of int
        Those that it reads.
    committed : int
        The newest assign that the client knows to be committed; nothing older is taken.
    patience : int
        Rounds before it has commits held back.
    """

    def __init__(
        self,
        client: str,
        request: int,
        generation: int,
        shards: Iterable[int],
        committed: int = 0,
        patience: int = 2,
    ) -> None:
        self.client = client
        self.request = request
        self.generation = generation
        self.shards = tuple(shards)
        self.patience = patience
        self.outcome: Done | None = None
        #: the newest assign that it knows to be committed
        self.committed = committed
        #: shard -> the assign that its values are as of
        self.numbers: dict[int, int] = {}
        #: how often it has asked shards
        self.rounds = 1
        self._missing = set(self.shards)
        #: how many holds it has asked for
        self._holds = 0
        #: whether it waits for the lead's answer to that
        self._asked = False

    def handle(self, event: Again | Values | Held, now: float) -> list[PullerCommand]:
        """What to send and what to take; at last a :class:`Done`."""
        if self.outcome is not None:
            return []
        if isinstance(event, Again):
            return self._open()
        if isinstance(event, Held):
            if not self._asked or event.nth != self._holds - 1:
                return []
            self._asked = False
            self.committed = max(self.committed, event.committed)
            return self._round()
        if event.shard not in self._missing or event.number < self.committed:
            return []
        self._missing.discard(event.shard)
        self.numbers[event.shard] = event.number
        commands: list[PullerCommand] = [Take(event.shard)]
        if self._missing:
            return commands
        self.committed = max(self.numbers.values())
        if min(self.numbers.values()) == self.committed:
            self.outcome = Done(self.committed)
            return [*commands, *self._let_go(), self.outcome]
        if self.rounds < self.patience:
            return commands + self._round()
        commands += self._let_go()
        self._asked = True
        self._holds += 1
        return commands + self._open()

    def _round(self) -> list[PullerCommand]:
        self.rounds += 1
        self._missing = {s for s in self.shards if self.numbers[s] < self.committed}
        return self._open()

    def _let_go(self) -> list[PullerCommand]:
        if not self._holds:
            return []
        return [ToLead(Let(self.generation, self.client, self.request, self._holds - 1))]

    def _open(self) -> list[PullerCommand]:
        """What there is no answer to yet."""
        if self._asked:
            return [ToLead(Hold(self.generation, self.client, self.request, self._holds - 1))]
        message = Pull(self.generation, self.client, self.request, self.committed)
        return [ToShard(s, message) for s in sorted(self._missing)]
