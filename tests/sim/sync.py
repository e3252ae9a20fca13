"""What the two planes of synchronous training share: the reference, a step's maths, the line.

A generation's *line* says for each step of its history which generation has committed it.  A
new generation goes on from its origin's line, whole or cut; whatever an old one still commits
afterwards is in no line that anybody goes on from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from dtrain.machines.jobs import Restored
from dtrain.machines.ledger import Ledger
from dtrain.machines.rounds import Rounds, Totals
from dtrain.messages import Batch, Contribution, Verdict
from dtrain.tree import reduce_into, scratch_needed
from tests.sim.reference import Reference, momentum
from tests.sim.settings import WIDTH, Broken, Settings
from tests.sim.world import Generation, Host, World

COUNTERS = ("late", "rejected", "replayed", "duplicates")
#: The account of a job that begins.
NOTHING = Ledger().to_dict()


class SyncHost(Host):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.step = 0
        #: the epochs whose records were there when it began
        self.recorded = 0
        #: replicas whose gradient of the step is still to be computed
        self.todo: list[int] = []


class SyncWorld(World):
    HOST = SyncHost

    def __init__(self, seed: int, settings: Settings, rng: random.Random) -> None:
        super().__init__(seed, settings, rng)
        self.reference = Reference(self)
        #: (replica, step, shard or None for the loss) that is not finite
        self.taint: tuple[int, int, int | None] | None = None
        if settings.fate == "nonfinite":
            step = rng.randrange(len(self.reference.members))
            where = rng.choice([None, *range(settings.shards)])
            self.taint = (rng.choice(self.reference.members[step]), step, where)

    # -- a host's loop -------------------------------------------------------------------------

    def opens(self, host: SyncHost, step: int, recorded: int) -> bool:
        host.step, host.recorded = step, recorded
        host.epoch = min(recorded, self.plan.locate(step)[0])
        return True

    def goes(self, host: SyncHost) -> None:
        """To what a new generation owes first, to its end, or to the next step."""
        step, plan = host.step, self.plan
        owed = self.recovery.owed(plan, step, host.recorded)
        if owed is not None:
            host.epoch = owed
            host.recorded = owed + 1
            self.evaluate(host, owed, step == plan.total_steps)
        elif step == plan.total_steps:
            self.barrier(host, host.epoch, "finished")
        else:
            host.epoch = plan.locate(step)[0]
            self.steps(host)

    def steps(self, host: SyncHost) -> None:
        """The host's part of a step begins."""
        members = self.plan.members(host.step)
        host.todo = [i for i in host.plan.replicas if i in members]
        self.next_replica(host)

    def next_replica(self, host: SyncHost) -> None:
        raise NotImplementedError

    def committed(self, host: SyncHost) -> None:
        """The host has seen its step commit."""
        step = host.step
        host.step += 1
        if self.plan.ends_epoch(step):
            host.recorded = host.epoch + 1
            self.evaluate(host, host.epoch, host.step == self.plan.total_steps)
        else:
            self.steps(host)

    def batch(self, replica: int, step: int) -> Batch:
        epoch, index = self.plan.locate(step)
        return Batch(epoch, replica, index)

    def gradient(
        self, replica: int, step: int, params: list[list[float]]
    ) -> tuple[Contribution, list[list[float]]]:
        """A replica's part in a step, from the parameters that it read."""
        if params != self.reference.params[step]:
            raise Broken(f"step {step} was computed from other parameters than version {step}")
        index = self.plan.locate(step)[1]
        if self.plan.samples(replica, index) != self.reference.rows[step].get(replica):
            raise Broken(f"replica {replica} has another batch at step {step}")
        loss, grads = self.reference.found[step][replica]
        if self.taint is not None and self.taint[:2] == (replica, step):
            where = self.taint[2]
            loss = math.inf if where is None else loss
            grads = [[math.nan] * WIDTH if s == where else g for s, g in enumerate(grads)]
        rows = self.reference.rows[step][replica]
        weight = rows / self.settings.batch_size
        return Contribution(replica, weight, rows, loss, replica, index), grads

    def update(
        self,
        step: int,
        members: tuple[int, ...],
        weights: tuple[float, ...],
        grads: dict[int, list[float]],
        params: list[list[float]],
        slots: list[list[float]],
    ) -> str | None:
        """Sum and apply into the other buffer; the problem, if it must not be committed."""
        leaves = {i: np.array(grads[i]) for i in members}
        out = np.empty(WIDTH)
        many = scratch_needed(members, weights, self.settings.replicas)
        scratch = [np.empty(WIDTH) for _ in range(many)]
        reduce_into(members, weights, self.settings.replicas, leaves, out, scratch)
        if not np.isfinite(out).all():
            bad = [i for i in members if not np.isfinite(leaves[i]).all()]
            return f"the gradient of replica {bad[0]} is not finite at step {step}"
        old, new = step % 2, (step + 1) % 2
        params[new], slots[new] = momentum(params[old], slots[old], out.tolist())
        return None

    # -- the lead ------------------------------------------------------------------------------

    def accounted(
        self, step: int, known: Mapping[str, Any] | None, replayed: int
    ) -> dict[str, Any]:
        """The whole account of a state found in memory: it follows from the number of steps.

        How often something came late or again does not; that is ``known``, as of some time before.
        """
        ledger = self.settings.machines.ledger.of_steps(self.plan, step)
        for name in COUNTERS:
            setattr(ledger, name, (known or {}).get(name, 0))
        ledger.replayed += replayed
        return ledger.to_dict()

    def rounds(self, gen: Generation, restored: Restored, totals: Totals) -> Rounds:
        """The lead's machine for a generation: its own account begins with what was found."""
        machines, s = self.settings.machines, self.settings
        ledger = machines.ledger.from_dict(restored.ledger)
        return machines.rounds(
            gen.number,
            restored.step,
            s.shards,
            s.replicas,
            self.plan.members,
            lambda step: self.plan.locate(step)[0],
            ledger=ledger,
            totals=replace(totals),
        )

    def of_epoch(self, step: int, recorded: int, totals: Totals) -> Totals:
        """What the epoch at hand has so far: nothing, once its record is there."""
        fresh = step == 0 or self.plan.ends_epoch(step - 1)
        owed = self.recovery.owed(self.plan, step, recorded) is not None
        return Totals() if fresh and not owed else replace(totals)

    def account(self, host: SyncHost) -> dict[str, Any]:
        rounds = host.gen.plane.rounds
        totals = rounds.take_totals()
        self.check_ledger(rounds.ledger, rounds.step)
        return {
            "step": rounds.step,
            "train": asdict(totals),
            "ledger": rounds.ledger.to_dict(),
        }

    # -- the line ------------------------------------------------------------------------------

    def commits(self, gen: Generation, verdict: Verdict, rounds: Rounds) -> None:
        """A verdict is recorded: the commit of its step, if it says so."""
        step, reference = verdict.step, self.reference
        if verdict.members != reference.members[step]:
            raise Broken(f"{verdict}: expected members {reference.members[step]}")
        tainted = self.taint is not None and self.taint[1] == step
        if verdict.ok == tainted or (verdict.problem is None) == tainted:
            raise Broken(f"{verdict} of a step that is {'not ' * tainted}finite")
        if tainted:
            if f"replica {self.taint[0]} is" not in verdict.problem:
                raise Broken(f"{verdict} does not name replica {self.taint[0]}")
            if rounds.ledger.rejected < len(verdict.members):
                raise Broken(f"{rounds.ledger}: expected {len(verdict.members)} rejected")
            return
        if len(gen.line) != step:
            raise Broken(f"generation {gen.number} commits step {step} at version {len(gen.line)}")
        gen.line.append(gen.number)
        self.check_ledger(rounds.ledger, step + 1)

    def check_ledger(self, ledger: Ledger, step: int) -> None:
        applied, samples = self.reference.applied[step], self.reference.samples[step]
        if ledger.samples != samples:
            raise Broken(f"{ledger}: expected samples {samples}")
        if ledger.applied != applied or ledger.staleness.get(0, 0) != applied:
            raise Broken(f"{ledger}: expected {applied} applied")
        if ledger.late or min(ledger.replayed, ledger.duplicates, ledger.rejected) < 0:
            raise Broken(f"{ledger}: gradients that nobody has sent")

    def goes_on(self, gen: Generation, restored: Restored, params: list[list[float]]) -> None:
        """A chief has found what to go on with: all that was committed, or it says what is lost."""
        step, origin = restored.step, gen.origin
        if gen.number != self.job.generation:
            return  # It comes too late, and will be told so.
        if params != self.reference.params[step]:
            raise Broken(f"version {step} was recovered as {params}")
        self.check_ledger(Ledger.from_dict(restored.ledger), step)
        before = [] if origin is None else self.generations[origin.generation].line
        newer = [g for g in self.generations.values() if g.line and g.line[-1] == g.number]
        last = max((g.number for g in newer), default=0)
        if restored.source == "memory":
            if step != len(before):
                raise Broken(f"{restored}: expected version {len(before)}, which is committed")
            if last > origin.generation:
                raise Broken(f"{restored} of generation {origin.generation}: {last} has committed")
        elif len(before) != step + restored.lost or restored.lost < 0:
            raise Broken(f"{restored}: expected {len(before) - step} steps lost")
        elif gen.number > 1 and before and not self.cut:
            raise Broken(f"{restored}, and nobody has died")
        gen.line = list(before[:step])
        self.story.counts[restored.source] += gen.number > 1
        self.story.counts["rolled back"] += restored.lost > 0

    def check_success(self, gen: Generation) -> None:
        total, reference = len(self.reference.members), self.reference
        self.story.steps = len(gen.line)
        if len(gen.line) != total:
            raise Broken(f"{len(gen.line)} steps are committed at the end, expected {total}")
        if gen.line != sorted(gen.line):
            raise Broken(f"generations that ended have committed: {gen.line}")
        found = self.final(gen)
        if found != reference.params[total]:
            raise Broken(f"the result is {found}, expected {reference.params[total]}")
        if [record["loss"] for record in self.job.history] != reference.losses:
            raise Broken(f"the losses of {self.job.history}, expected {reference.losses}")
        samples = [record["samples"] for record in self.job.history]
        if samples != reference.samples[total]:
            raise Broken(f"the samples of {self.job.history}: expected {reference.samples[total]}")
        self.check_ledger(Ledger.from_dict(self.job.ledger), total)
        if self.settings.steps is None and set(reference.samples[total]) != {self.settings.rows}:
            raise Broken(f"{reference.samples[total]} samples of {self.settings.rows} rows")
        told = sum("steps are lost" in words for _, _, words in self.job.story)
        if told < (self.job.restored.lost > 0):
            raise Broken(f"a rollback is not told: {self.job.story}")

    def final(self, gen: Generation) -> list[list[float]]:
        raise NotImplementedError
