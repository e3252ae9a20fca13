"""The versions of one shard under synchronous training.

A shard holds two buffers.  It gathers the gradients of the members of a step, sums and applies
them into the other buffer, reports to the lead, and flips on the verdict alone.  With backups it
gathers whatever comes until the step is closed, and sums the gradients of its members.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from dtrain.errors import FencedError, ProtocolError
from dtrain.messages import (
    Abandon,
    Closed,
    Contribution,
    Flip,
    Keep,
    Pushed,
    Reduce,
    Reduced,
    Report,
    Verdict,
)


class Phase(Enum):
    GATHERING = "gathering gradients"
    REDUCING = "summing and applying"
    REPORTED = "waiting for the verdict"
    REFUSED = "refused"


#: Which events are legal in which phase; a push of the committed step before is always a repeat.
LEGAL: dict[type, frozenset[Phase]] = {
    Pushed: frozenset(Phase) - {Phase.REFUSED},
    Closed: frozenset(Phase) - {Phase.REFUSED},
    Reduced: frozenset({Phase.REDUCING}),
    Verdict: frozenset({Phase.REPORTED}),
}

Event = Pushed | Closed | Reduced | Verdict
Command = Reduce | Report | Flip | Keep | Abandon


class ShardMachine:
    """One shard's versions.

    Parameters
    ----------
    index, generation, version : int
    members : callable of int
        The sorted logical ids that take part in a step; None: :class:`dtrain.messages.Closed`
        will say.  Until then the gradient of any replica is gathered; those of others than the
        members, and of earlier steps, are ignored.
    """

    def __init__(
        self,
        index: int,
        generation: int,
        version: int,
        members: Callable[[int], tuple[int, ...] | None],
    ) -> None:
        self.index = index
        self.generation = generation
        #: the committed version; readers see this one
        self.version = version
        self.phase = Phase.GATHERING
        #: replica -> its part in the step being gathered
        self.gathered: dict[int, Contribution] = {}
        #: gradients that came more than once
        self.repeated = 0
        #: who takes part in the step; None: the quorum is open
        self.expected: tuple[int, ...] | None = None
        #: whether a quorum decides who takes part: then a gradient may come late
        self.backups = False
        self._members = members
        self._expect()

    def _expect(self) -> None:
        self.expected = self._members(self.version)
        self._wanted = frozenset(self.expected or ())
        self.backups = self.backups or self.expected is None

    @property
    def missing(self) -> tuple[int, ...]:
        """Whose gradients the step still waits for; nobody's while nobody is named."""
        return tuple(i for i in self.expected or () if i not in self.gathered)

    def new(self, event: Pushed) -> tuple[Contribution, ...]:
        """Those contributions of a push that would be taken: not repeats, not late or committed."""
        if event.step != self.version or self.phase is not Phase.GATHERING:
            return ()
        fresh = (c for c in event.contributions if c.replica not in self.gathered)
        return tuple(c for c in fresh if self.expected is None or c.replica in self._wanted)

    def handle(self, event: Event, now: float) -> list[Command]:
        self._check(event)
        if isinstance(event, Pushed):
            return self._pushed(event)
        if event.step < self.version:
            return []
        if isinstance(event, Closed):
            return self._closed(event)
        if isinstance(event, Reduced):
            self.phase = Phase.REPORTED
            return [Report(event)]
        if not event.ok:
            self.phase = Phase.REFUSED
            return [Abandon(event.step, event.problem or "refused")]
        self.version += 1
        self.phase = Phase.GATHERING
        self.gathered = {}
        self._expect()
        return [Flip(self.version) if event.applied else Keep(self.version)]

    def _pushed(self, event: Pushed) -> list[Command]:
        fresh = self.new(event)
        self.repeated += self._repeats(event, fresh)
        for contribution in fresh:
            self.gathered[contribution.replica] = contribution
        return self._reduce() if fresh else []

    def _repeats(self, event: Pushed, fresh: tuple[Contribution, ...]) -> int:
        """How many gradients of a push are here already; with backups a late one is no repeat."""
        if not self.backups:
            return len(event.contributions) - len(fresh)
        if event.step < self.version:
            return 0
        return sum(c.replica in self.gathered for c in event.contributions)

    def _closed(self, event: Closed) -> list[Command]:
        if self.expected is not None:
            return []
        self.expected, self._wanted = event.members, frozenset(event.members)
        self.gathered = {i: c for i, c in self.gathered.items() if i in self._wanted}
        return self._reduce()

    def _reduce(self) -> list[Command]:
        if self.expected is None or len(self.gathered) < len(self.expected):
            return []
        self.phase = Phase.REDUCING
        weights = tuple(self.gathered[i].weight for i in self.expected)
        return [Reduce(self.version, self.expected, weights)]

    def _check(self, event: Event) -> None:
        if event.generation != self.generation:
            raise FencedError(
                f"{self._told(event)} is of generation {event.generation}, "
                f"expected {self.generation}"
            )
        # A repeat of the committed step is answered, not refused: the reply may have been lost.
        oldest = self.version if isinstance(event, Reduced) else self.version - 1
        late = self.backups and isinstance(event, Pushed) and event.step >= 0
        if not (late or oldest <= event.step) or event.step > self.version:
            raise ProtocolError(
                f"{self._told(event)}: expected step "
                f"{oldest if oldest == self.version else f'{oldest} or'} "
                f"{self.version}, {self.phase.value}"
            )
        if event.step < self.version:
            return
        if self.phase not in LEGAL[type(event)]:
            raise ProtocolError(f"{self._told(event)}: not expected while {self.phase.value}")
        if isinstance(event, Pushed) and not self.backups:
            for contribution in event.contributions:
                if contribution.replica not in self._wanted:
                    raise ProtocolError(
                        f"{self._told(event)}: "
                        f"replica {contribution.replica} takes no part in it, "
                        f"expected one of {list(self.expected or ())}"
                    )
        if isinstance(event, Closed):
            self._check_members(event)

    def _check_members(self, event: Closed) -> None:
        """A step is closed once, with somebody, and whoever says so again says the same."""
        found = event.members
        if self.expected is not None and found != self.expected:
            raise ProtocolError(
                f"{self._told(event)}: found members {list(found)}, expected {list(self.expected)}"
            )
        if not found or list(found) != sorted({i for i in found if i >= 0}):
            raise ProtocolError(
                f"{self._told(event)}: found members {list(found)}, expected some, in their order"
            )

    def _told(self, event: Event) -> str:
        return f"shard {self.index}: {type(event).__name__} of step {event.step}"
