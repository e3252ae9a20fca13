"""The sums that shards exchange between two stages of an optimizer, gathered at the lead."""

from __future__ import annotations

import numpy as np

from dtrain.errors import FencedError, ProtocolError
from dtrain.messages import Measured, Measures


class Exchange:
    """Joins what all shards have summed over their blocks, stage by stage.

    Parameters
    ----------
    generation, shards : int
    """

    def __init__(self, generation: int, shards: int) -> None:
        self.generation = generation
        self.shards = shards
        #: (step, stage) being gathered, and what has come of it
        self.at = (-1, 0)
        self.gathered: dict[int, Measured] = {}
        #: the last answer, for those who ask again
        self.last: Measures | None = None

    def handle(self, event: Measured, now: float) -> list[Measures]:
        """All sums of a stage, once all shards' have come; told again to whoever repeats."""
        if event.generation != self.generation:
            raise FencedError(
                f"lead: sums of generation {event.generation}, expected {self.generation}"
            )
        if not 0 <= event.shard < self.shards:
            raise ProtocolError(
                f"lead: sums of shard {event.shard}, expected one of 0..{self.shards - 1}"
            )
        key = event.step, event.stage
        if self.last is not None and key == (self.last.step, self.last.stage):
            return [self.last]
        if key < self.at or (self.gathered and key != self.at):
            raise ProtocolError(
                f"lead: sums of step {event.step}, stage {event.stage}: expected step "
                f"{self.at[0]}, stage {self.at[1]}"
            )
        self.at = key
        self.gathered[event.shard] = event
        if len(self.gathered) < self.shards:
            return []
        self.last = self._joined()
        self.gathered = {}
        return [self.last]

    def _joined(self) -> Measures:
        step, stage = self.at
        parts = [self.gathered[shard] for shard in sorted(self.gathered)]
        refused = next((part for part in parts if part.problem is not None), None)
        if refused is not None:
            return Measures(
                self.generation, step, stage, problem=refused.problem, shard=refused.shard
            )
        whole = np.empty((len(parts[0].sums), sum(len(part.blocks) for part in parts)))
        for part in parts:
            whole[:, part.blocks] = part.sums
        return Measures(self.generation, step, stage, whole)
