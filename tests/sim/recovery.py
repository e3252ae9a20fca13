"""What a new generation's chief makes of what the one before has left.

These are the few decisions of a recovery that no machine takes.  They stand here, apart from the
worlds that follow them, so that a test can put a broken one in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dtrain.machines.plan import Plan
from dtrain.machines.shard import Phase

#: What a replica's word of an asynchronous file says of a request.
IDLE, APPLYING, APPLIED = "idle", "applying", "applied"


class Recovery:
    #: an old generation commits nothing once a new one has begun to read what it has left
    fences = True

    def committed(self, file: Any) -> int:
        """The version to copy: the verdict is the commit, also before the version has flipped."""
        return file.word

    def intact(self, file: Any, version: int) -> bool:
        """Whether a copy is whole: who was not told, or wakes up, may have stored meanwhile."""
        return file.word == version

    def version(self, found: Iterable[tuple[int, Phase]]) -> int:
        """The version of shards that are frozen: a verdict that one has followed holds for all."""
        return max(version for version, _ in found)

    def follows(self, version: int, found: tuple[int, Phase]) -> bool:
        """Whether a frozen shard has that version: as its own, or reported for the verdict."""
        return found[0] == version or (found[0] == version - 1 and found[1] is Phase.REPORTED)

    def totals(self, lead: Any) -> Any:
        """A frozen lead's sums of the epoch: also where a host has taken them to its barrier."""
        return lead.totals

    def owed(self, plan: Plan, step: int, recorded: int) -> int | None:
        """The epoch whose steps are all done, and whose record is not there yet."""
        epoch, index = plan.locate(step)
        done = epoch + (step == plan.total_steps and index > 0)
        return done - 1 if done > recorded else None

    def applied(self, words: Sequence[tuple[str, int]], asked: Sequence[int]) -> set[int]:
        """The replicas whose last batch is known to be applied: the last, not one before it."""
        return {i for i, word in enumerate(words) if word == (APPLIED, asked[i])}

    def again(self, words: Sequence[tuple[str, int]], asked: Sequence[int]) -> int:
        """How many batches come again that may have been applied, in part."""
        return sum(word == (APPLYING, asked[i]) for i, word in enumerate(words))
