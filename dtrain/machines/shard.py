"""The versions of one shard under synchronous training.

A shard holds two buffers.  It gathers the gradients of the members of a step, sums and applies
them into the other buffer, reports to the lead, and flips on the verdict alone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from dtrain.errors import FencedError, ProtocolError
from dtrain.messages import Abandon, Contribution, Flip, Pushed, Reduce, Reduced, Report, Verdict


class Phase(Enum):
    GATHERING = "gathering gradients"
    REDUCING = "summing and applying"
    REPORTED = "waiting for the verdict"
    REFUSED = "refused"


#: Which events are legal in which phase; a push of the committed step before is always a repeat.
LEGAL: dict[type, frozenset[Phase]] = {
    Pushed: frozenset(Phase) - {Phase.REFUSED},
    Reduced: frozenset({Phase.REDUCING}),
    Verdict: frozenset({Phase.REPORTED}),
}

Command = Reduce | Report | Flip | Abandon


class ShardMachine:
    """One shard's versions.

    Parameters
    ----------
    index, generation, version : int
    members : callable of int
        The sorted logical ids that take part in a step.
    """

    def __init__(
        self, index: int, generation: int, version: int, members: Callable[[int], tuple[int, ...]]
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
        self._members = members
        self._expect()

    def _expect(self) -> None:
        self.expected = self._members(self.version)
        self._wanted = frozenset(self.expected)

    @property
    def missing(self) -> tuple[int, ...]:
        """Whose gradients the step still waits for."""
        return tuple(i for i in self.expected if i not in self.gathered)

    def new(self, event: Pushed) -> tuple[Contribution, ...]:
        """Those contributions of a push that would be taken: not repeats, not committed."""
        if event.step != self.version or self.phase is not Phase.GATHERING:
            return ()
        return tuple(c for c in event.contributions if c.replica not in self.gathered)

    def handle(self, event: Pushed | Reduced | Verdict, now: float) -> list[Command]:
        self._check(event)
        if isinstance(event, Pushed):
            return self._pushed(event)
        if event.step < self.version:
            return []
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
        return [Flip(self.version)]

    def _pushed(self, event: Pushed) -> list[Command]:
        fresh = self.new(event)
        self.repeated += len(event.contributions) - len(fresh)
        for contribution in fresh:
            self.gathered[contribution.replica] = contribution
        if not fresh or len(self.gathered) < len(self.expected):
            return []
        self.phase = Phase.REDUCING
        weights = tuple(self.gathered[i].weight for i in self.expected)
        return [Reduce(self.version, self.expected, weights)]

    def _check(self, event: Pushed | Reduced | Verdict) -> None:
        if event.generation != self.generation:
            raise FencedError(
                f"{self._told(event)} is of generation {event.generation}, "
                f"expected {self.generation}"
            )
        # A repeat of the committed step is answered, not refused: the reply may have been lost.
        oldest = self.version if isinstance(event, Reduced) else self.version - 1
        if not oldest <= event.step <= self.version:
            raise ProtocolError(
                f"{self._told(event)}: expected step "
                f"{oldest if oldest == self.version else f'{oldest} or'} "
                f"{self.version}, {self.phase.value}"
            )
        if event.step == self.version and self.phase not in LEGAL[type(event)]:
            raise ProtocolError(f"{self._told(event)}: not expected while {self.phase.value}")
        if isinstance(event, Pushed) and event.step == self.version:
            for contribution in event.contributions:
                if contribution.replica not in self._wanted:
                    raise ProtocolError(
                        f"{self._told(event)}: "
                        f"replica {contribution.replica} takes no part in it, "
                        f"expected one of {list(self.expected)}"
                    )

    def _told(self, event: Pushed | Reduced | Verdict) -> str:
        return f"shard {self.index}: {type(event).__name__} of step {event.step}"
