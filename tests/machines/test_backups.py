"""The quorum, the lead and the shards of a job with backups, joined by a slow network."""

from __future__ import annotations

import math
import random
from collections import Counter

from dtrain.machines.plan import Plan
from dtrain.machines.quorum import Accepted, Arrive, Committed, EpochDone, Join, Late, Pass, Quorum
from dtrain.machines.rounds import Rounds
from dtrain.machines.shard import ShardMachine
from dtrain.messages import (
    Batch,
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

JOBS = 2_000
LEAD = -1


class Job:
    """One epoch; a message takes any time, and a gradient comes once more now and then."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.replicas, shards = rng.randint(1, 5), rng.randint(1, 3)
        each = rng.randint(1, 2)
        rows = self.replicas * each * rng.randint(1, 3) + rng.randrange(self.replicas * each)
        self.plan = Plan(rows, self.replicas, each, 1)
        self.quorum = Quorum(self.plan, 1, rng.randrange(self.replicas))
        self.rounds = Rounds(
            1, 0, shards, self.replicas, lambda step: None, lambda step: 0, skip=True
        )
        self.shards = [ShardMachine(k, 1, 0, lambda step: None) for k in range(shards)]
        #: of each shard: the batches in it, by version; what is summed and not flipped yet
        self.values = [[] for _ in self.shards]
        self.pending = [()] * shards
        #: what each replica computes for, and whose gradient of a step is of which batch
        self.computes = dict.fromkeys(range(self.replicas))
        #: the version that each waits for before it joins again
        self.wants = dict.fromkeys(range(self.replicas), 0)
        self.batches = {}
        self.bad = {(0, n) for n in range(3) if rng.random() < 0.2}
        #: those who have been told that the epoch is over; (to, event), under way
        self.done, self.network = set(), []
        self.counts = Counter()

    def run(self):
        for _ in range(5_000):
            if len(self.done) == self.replicas and not self.network:
                return
            if self.network and self.rng.random() < 0.7:
                self.deliver(*self.network.pop(self.rng.randrange(len(self.network))))
            else:
                self.goes(self.rng.randrange(self.replicas))
        raise AssertionError("it does not end")

    # -- replicas ----------------------------------------------------------------------------

    def goes(self, i):
        if i in self.done:
            return
        if self.computes[i] is None:
            versions = {shard.version for shard in self.shards}
            if len(versions) == 1 and min(versions) >= self.wants[i]:
                self.joins(i, versions.pop())
        elif self.rng.random() < (0.02 if i == 0 else 0.5):
            step, batch = self.computes[i]
            self.pushes(i, step, batch)

    def joins(self, i, step):
        (answer,) = self.quorum.handle(Join(1, i, step, 0), 0.0)
        if isinstance(answer, Batch):
            self.computes[i] = (step, answer)
            self.batches[step, i] = answer
        elif answer == EpochDone():
            self.done.add(i)
        else:
            self.counts["passed"] += answer == Pass()
            self.wants[i] = step + (answer == Pass())

    def pushes(self, i, step, batch):
        loss = math.nan if (batch.part, batch.index) in self.bad else 1.0
        samples = self.plan.samples(batch.part, batch.index)
        part = Contribution(i, samples / self.plan.batch_size, samples, loss, *self.key(batch))
        for to in [LEAD, *range(len(self.shards))]:
            self.network += [(to, Pushed(1, step, (part,)))] * self.rng.choice([1, 1, 2])
        (answer,) = self.quorum.handle(Arrive(1, i, step), 0.0)
        self.computes[i] = None
        if answer == Late(step):
            self.counts["late"] += 1
            self.counts["very late"] += step < self.quorum.step - 1
            return
        assert isinstance(answer, Accepted)
        self.wants[i] = step + 1
        if answer.members is not None:
            closed = Closed(1, step, answer.members)
            self.network += [(to, closed) for to in [LEAD, *range(len(self.shards))]]

    def key(self, batch):
        return batch.part, batch.index

    # -- the lead and the shards -------------------------------------------------------------

    def deliver(self, to, event):
        if to != LEAD:
            self.tell_shard(to, event)
            return
        known = event.step in self.rounds.verdicts
        for command in self.rounds.handle(event, 0.0):
            if not known:
                verdict = command.verdict
                assert verdict.members == self.quorum.members
                self.quorum.handle(Committed(1, verdict.step, verdict.applied), 0.0)
                self.network += [(k, verdict) for k in range(len(self.shards))]

    def tell_shard(self, k, event):
        shard = self.shards[k]
        for command in shard.handle(event, 0.0):
            if isinstance(command, Reduce):
                assert command.members == self.quorum.members
                assert set(shard.gathered) == set(command.members)
                self.pending[k] = [self.batches[command.step, i] for i in command.members]
                self.network.append((k, Reduced(1, command.step, k)))
            elif isinstance(command, Report):
                self.network.append((LEAD, command.event))
            elif isinstance(command, Flip):
                self.values[k] += self.pending[k]
            else:
                assert isinstance(event, Verdict)
                assert not event.applied
                assert command == Keep(event.step + 1)

    def check(self):
        every = {(p, n) for p in range(self.replicas) for n in range(self.plan.batches(p))}
        tally = self.quorum.account()
        for value in self.values:
            assert value == self.values[0]
            had = [self.key(batch) for batch in value]
            assert len(set(had)) == len(had) == tally.applied
            assert not set(had) & self.bad
            assert tally.samples == sum(self.plan.samples(*key) for key in had)
        assert tally.applied + tally.rejected == len(every)
        assert tally.late == self.counts["late"]
        ledger = self.rounds.ledger
        assert (ledger.applied, ledger.rejected) == (tally.applied, tally.rejected)
        assert sum(ledger.samples) == tally.samples == self.rounds.totals.samples
        assert {shard.version for shard in self.shards} == {self.rounds.step}
        assert self.rounds.step == self.quorum.step
        self.counts["rejected"] += tally.rejected


def test_quorum_lead_and_shards_agree_on_who_has_made_which_step():
    counts = Counter()
    for seed in range(JOBS):
        job = Job(seed)
        try:
            job.run()
            job.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts += job.counts
    for what in ("passed", "late", "very late", "rejected"):
        assert counts[what] > JOBS // 20, (what, counts)
