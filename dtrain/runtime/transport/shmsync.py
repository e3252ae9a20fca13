"""Synchronous steps in shared memory: flags, claimed shards, and one verdict at the lead.

A step goes like this:

1. a replica has computed into its gradient, writes its line of the header, then its flag, and
   rings the others;
2. whoever waits and sees all flags claims a shard by its lock, sums and applies it into the
   other buffer, and sets the shard's flag; once for each stage of the optimizer;
3. the lead, once all shards' flags are set, records the verdict and then the version, and rings.

A process that dies in step 2 lets go of its lock, and the next one does the shard again: it reads
one buffer and writes the other, so doing it twice does no harm.  A later stage reads what it
writes, and is left alone: the death ends the generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dtrain.arrays import quiet
from dtrain.errors import ProtocolError
from dtrain.messages import Contribution, Pushed, Reduced
from dtrain.runtime.points import at_point
from dtrain.runtime.shards import StepRefused, describe_culprit
from dtrain.runtime.transport.shm import Link
from dtrain.runtime.transport.shmfile import (
    BATCH,
    BEGUN,
    CULPRIT,
    LINE,
    LOSS,
    PART,
    PUSHED,
    SAMPLES,
    SOUND,
    THROUGH,
    WEIGHT,
    write_totals,
)
from dtrain.runtime.updater import cut

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class SyncLink(Link):
    """Synchronous steps in the shared file."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.version = host.begin.step
        shards = range(self._plan.shards)
        # Our own shards first: each host begins with others than its neighbours.
        self._order = sorted(shards, key=lambda s: (s not in host.plan.shards, s))
        self._updaters = {s: self._arena.updater(s) for s in shards}
        self._leaves = {
            s: {
                i: self._updaters[s].pieces(cut(buffer, self._arena.shard_plan.shards[s].ranges))
                for i, buffer in enumerate(self._arena.flat_grads)
            }
            for s in shards
        }
        self._stages = self._plan.stages
        self._lines = [self._plan.shard_line + shard * LINE for shard in shards]
        self._variables = host.layout.block_variables
        #: the last factors that were found, and of which step and stage
        self._resolved: tuple[tuple[int, int], Any] = ((-1, 0), None)
        self._lead = host.arena.lead
        self._chief = self._hosts.index(host.launch.chief.address)

    @property
    def params(self) -> Mapping[str, Any]:
        """Read-only views of the version that the next step reads."""
        return self._arena.views[self.version % 2]

    def grads(self, replica: int) -> Mapping[str, Any]:
        """The views to write a replica's gradient to."""
        return self._arena.grad_views[replica]

    def exchange(self, contributions: tuple[Contribution, ...]) -> None:
        """Hand over the gradients of this step; returns when the next version can be read."""
        step = self.version
        for contribution in contributions:
            self._write(contribution, step)
        if contributions:
            self._bells.ring_others()
        at_point("waiting")
        members = self._host.parts.plan.members(step)
        with self._host.activity.waiting(step, lambda: self.missing(step, members)):
            self._bells.wait(
                lambda: self._turn(step, members),
                self._arena.check,
                self._host.launch.settings.step_deadline,
                lambda: f"step {step} has not committed; {self._why(step, members)}",
            )
        self.version = step + 1

    def _write(self, c: Contribution, step: int) -> None:
        """What belongs to a gradient of a step."""
        words, reals = self._words, self._reals
        line = self._plan.replica_line + c.replica * LINE
        words[line + SAMPLES] = c.samples
        words[line + PART] = c.part
        words[line + BATCH] = c.batch
        reals[line + WEIGHT] = c.weight
        reals[line + LOSS] = c.loss
        # The flag last: who sees it sees all that was stored before, the gradient too.
        words[line + PUSHED] = step + 1

    def _turn(self, step: int, members: tuple[int, ...]) -> bool:
        """Do what there is to do for this step; returns whether it has committed."""
        words = self._words
        if words[self._plan.version] > step:
            return True
        first = self._plan.replica_line
        if any(words[first + i * LINE + PUSHED] <= step for i in members):
            return False
        if self._work(step, members) and self._lead is not None:
            self._decide(step, members)
            return True
        return bool(words[self._plan.version] > step)

    def _work(self, step: int, members: tuple[int, ...]) -> bool:
        """Claim the shards that nobody works on, and take them on by a stage each.

        Returns whether all are through, whoever did it.
        """
        words, at, stages = self._words, self._lines, self._stages
        while True:
            # A stage begins where all shards are through the one before.
            stage = min(words[a + THROUGH] for a in at) - step * stages
            if stage >= stages:
                return True
            done = step * stages + stage
            worked = False
            for shard in self._order:
                if words[at[shard] + THROUGH] > done or not self._arena.locks.try_acquire(shard):
                    continue
                try:
                    if words[at[shard] + THROUGH] == done:
                        worked |= self._pass(shard, step, stage, members)
                finally:
                    self._arena.locks.release(shard)
            if not worked:
                return False

    def _pass(self, shard: int, step: int, stage: int, members: tuple[int, ...]) -> bool:
        """One stage of a shard; False if it cannot be done."""
        words, at = self._words, self._lines[shard]
        done = step * self._stages + stage
        if stage > 0:
            if words[at + BEGUN] > done:
                # Whoever began it has died, and it cannot be done twice: the step will be cut.
                return False
            words[at + BEGUN] = done + 1
        last = stage + 1 == self._stages
        sums = None if last else self._updaters[shard].no_sums()
        at_point("applying")
        with quiet():
            if stage == 0:
                culprit = self._reduce(shard, step, members, sums)
                words[at + CULPRIT] = SOUND if culprit is None else culprit
            elif not self._refused():
                self._updaters[shard].go_on(stage, step, self._factors(step, stage), sums)
        if sums is not None:
            self._arena.sums[stage][:, self._updaters[shard].blocks] = sums
        # The flag last: who sees it sees all that was stored before.
        words[at + THROUGH] = done + 1
        if not last:
            self._bells.ring_others()
        elif self._lead is None:
            self._bells.ring(self._chief)
        return True

    def _reduce(self, shard: int, step: int, members: tuple[int, ...], sums: Any) -> int | None:
        reals = self._reals
        line = self._plan.replica_line
        weights = tuple(reals[line + i * LINE + WEIGHT] for i in members)
        return self._updaters[shard].reduce(step, members, weights, self._leaves[shard], sums)

    def _refused(self) -> bool:
        """Whether some shard has found that the step must not be; all have been through the first
        stage."""
        return any(self._words[at + CULPRIT] != SOUND for at in self._lines)

    def _factors(self, step: int, stage: int) -> Any:
        """What the sums of the stage before mean for all blocks; the same wherever it is found."""
        if self._resolved[0] != (step, stage):
            factors = self._arena.optimizer.resolve(
                stage - 1, self._arena.sums[stage - 1], self._variables
            )
            self._resolved = (step, stage), factors
        return self._resolved[1]

    def _decide(self, step: int, members: tuple[int, ...]) -> None:
        """At the lead: record the verdict, then let everyone see the version."""
        contributions = tuple(self._contribution(i) for i in members)
        generation = self._host.generation
        with self._arena.lock:
            # Several hosts of this process see that all is done; one of them decides.
            if self._lead.version > step:
                return
            self._arena.commits()
            self._lead.handle(Pushed(generation, step, contributions))
            for shard in range(self._plan.shards):
                problem = self._problem(shard, step, contributions)
                self._lead.handle(Reduced(generation, step, shard, problem))
            verdict = self._lead.verdict(step)
            if verdict is None:
                raise ProtocolError(f"step {step}: all shards have reported, but no verdict")
            if not verdict.ok:
                raise StepRefused(verdict.problem)
            if not verdict.applied:
                for updater in self._updaters.values():
                    updater.keep(step)
            rounds = self._lead.rounds
            write_totals(
                self._words,
                self._reals,
                self._plan,
                step + 1,
                rounds.totals,
                rounds.ledger,
                applied=verdict.applied,
            )
            # From here on the step is committed, whoever dies.
            self._words[self._plan.verdict] = step + 1
            at_point("flipping")
            self._words[self._plan.version] = step + 1
        self._bells.ring_others()

    def _contribution(self, replica: int) -> Contribution:
        words, reals = self._words, self._reals
        line = self._plan.replica_line + replica * LINE
        return Contribution(
            replica,
            reals[line + WEIGHT],
            words[line + SAMPLES],
            reals[line + LOSS],
            words[line + PART],
            words[line + BATCH],
        )

    def _problem(
        self, shard: int, step: int, contributions: tuple[Contribution, ...]
    ) -> str | None:
        culprit = self._words[self._plan.shard_line + shard * LINE + CULPRIT]
        if culprit == SOUND:
            return None
        c = next((c for c in contributions if c.replica == culprit), None)
        return describe_culprit(c, step)

    def missing(self, step: int, members: tuple[int, ...]) -> list[int]:
        """Whose gradients a step waits for."""
        line = self._plan.replica_line
        return [i for i in members if self._words[line + i * LINE + PUSHED] <= step]

    def _why(self, step: int, members: tuple[int, ...]) -> str:
        missing = self.missing(step, members)
        return f"waiting for the gradients of replicas {missing}" if missing else "applying"
