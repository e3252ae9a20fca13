"""Whole jobs under a bad network, seed by seed; and machines that are broken on purpose.

A failing seed prints its number, its settings and the last events.  Add it to ``REGRESSIONS``
with the words of what it found, and run it alone with ``tests.sim.run(seed, mode=...)``.

``pytest -m slow tests/machines/test_sim.py`` runs many more; ``SOAK_SEEDS`` says how many.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dtrain.machines.cursor import Cursor
from dtrain.machines.jobs import (
    Change,
    HostDone,
    HostReady,
    JobMachine,
    Launched,
    Origin,
    Reached,
    State,
    WorkerLost,
)
from dtrain.machines.ledger import Ledger
from dtrain.machines.membership import Beat, Finding, Membership, Presence, Probed
from dtrain.machines.plan import Plan
from dtrain.machines.rounds import Rounds
from dtrain.machines.shard import Phase, ShardMachine
from dtrain.messages import Decide, Flip, Pushed, Reduced, Report, Verdict
from tests.sim import FATES, Broken, Machines, Recovery, run

SHM: dict[str, Any] = {"mode": "sync", "transport": "shm"}
COMM: dict[str, Any] = {"mode": "sync", "transport": "comm"}
ASYNC: dict[str, Any] = {"mode": "async"}
#: The three planes, and how many seeds each gets in CI: two thousand in all.
PLANES = [
    pytest.param(SHM, 700, id="shm"),
    pytest.param(COMM, 700, id="comm"),
    pytest.param(ASYNC, 600, id="async"),
]
SOAK = int(os.environ.get("SOAK_SEEDS", "50000"))

#: (plane, seed) of what was found by chance.
REGRESSIONS: list[tuple[dict[str, Any], int]] = []

#: What a run may end in.
ENDS = {
    (State.SUCCEEDED, None),
    (State.CANCELLED, "CANCELLED"),
    (State.FAILED, "NON_FINITE"),
    (State.FAILED, "WORKERS_LOST"),
    (State.FAILED, "DEADLINE"),
    (State.FAILED, "DATA_ERROR"),
}


def many(plane, seeds):
    """Run seeds; returns what happened how often, the ends, and the fates."""
    counts, ends, fates = Counter(), Counter(), Counter()
    for seed in seeds:
        story = run(seed, **plane)
        counts.update(story.counts)
        ends[story.state, story.reason] += 1
        fates[story.settings.fate] += 1
        counts["generations"] += story.generations - 1
    return counts, ends, fates


@pytest.mark.parametrize(("plane", "seeds"), PLANES)
def test_the_rules_hold_for_every_seed(plane, seeds):
    counts, ends, fates = many(plane, range(seeds))
    # What the seeds are for has happened, and often.
    assert set(fates) == set(FATES)
    for what in ("repeated", "lost", "fenced", "forged", "losses", "generations", "woken"):
        assert counts[what] > 100, (what, counts)
    for what in ("fenced workers", "memory", "found"):
        assert counts[what] > 50, (what, counts)
    assert counts["ends before it has opened"] > 10, counts
    for state in State:
        if state not in (State.QUEUED, State.SUCCEEDED, State.FAILED, State.CANCELLED):
            assert counts[f"dies while {state}"], (state, counts)
    if plane is COMM:
        for what in ("refused", "rolled back", "checkpoint", "start", "unreachable"):
            assert counts[what] > 20, (what, counts)
        assert counts["verdict reused"], counts
    else:
        assert sum(n for what, n in counts.items() if what.startswith("dies at")) > 20
        assert not counts["rolled back"]
    if plane is ASYNC:
        assert counts["stolen"] > 100
        assert counts["duplicates"] > 10
    # Without marks in a file that outlives its writer, who kills is not known.
    assert set(ends) == ENDS - ({(State.FAILED, "DATA_ERROR")} if plane is COMM else set())


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("plane", "share"), PLANES)
def test_the_rules_hold_for_very_many_seeds(plane, share):
    many(plane, range(1_000_000, 1_000_000 + SOAK * share // 2_000))


def test_what_was_found_once_stays_away():
    for plane, seed in REGRESSIONS:
        run(seed, **plane)


@pytest.mark.parametrize(("plane", "seeds"), PLANES)
def test_a_seed_is_one_story(plane, seeds):
    first, second = run(7, fate="chaos", **plane), run(7, fate="chaos", **plane)
    assert list(first.last) == list(second.last)
    assert (first.events, first.steps, first.counts) == (
        second.events,
        second.steps,
        second.counts,
    )
    assert run(8, fate="chaos", **plane).last != first.last


@pytest.mark.parametrize(("plane", "seeds"), PLANES)
def test_the_worst_network_changes_no_bit(plane, seeds):
    # Every run is held to the same plain reference, bit for bit.
    bad = {"late": 0.5, "twice": 0.5, "lost": 0.4, "forged": 0.3, "looked": 0.5}
    for seed in range(20):
        story = run(seed, fate="success", replicas=5, shards=3, workers=4, **bad, **plane)
        assert story.state is State.SUCCEEDED
        assert story.steps > 0


@pytest.mark.parametrize(("plane", "seeds"), PLANES)
def test_slow_workers_are_waited_for(plane, seeds):
    for seed in range(30):
        story = run(seed, fate="slow", **plane)
        assert story.state is State.SUCCEEDED


# -- the checks can fail -----------------------------------------------------------------------


class FlipsEarly(ShardMachine):
    """Does not wait for the verdict."""

    def handle(self, event, now):
        commands = super().handle(event, now)
        if isinstance(event, Reduced) and isinstance(commands[0], Report):
            self.version += 1
            commands.append(Flip(self.version))
        return commands


class FlipsRefused(ShardMachine):
    """Takes every verdict for a commit."""

    def handle(self, event, now):
        if isinstance(event, Verdict):
            event = replace(event, ok=True, applied=True)
        return super().handle(event, now)


class TakesOldGradients(ShardMachine):
    """Has no memory of what is committed: a repeat counts for the step at hand."""

    def new(self, event):
        if self.phase is not Phase.GATHERING:
            return ()
        return tuple(c for c in event.contributions if c.replica in self.expected)


class ReducesTwice(ShardMachine):
    """Drops the dedupe of the step at hand: a repeat sets off the sum again."""

    def new(self, event):
        return event.contributions if event.step == self.version else ()


class GoesBack(ShardMachine):
    """Takes a verdict that comes again for the order to return to it."""

    def handle(self, event, now):
        commands = super().handle(event, now)
        if isinstance(event, Verdict) and event.step < self.version and not commands:
            self.version = event.step
        return commands


class HasNoFence(ShardMachine):
    def handle(self, event, now):
        return super().handle(replace(event, generation=self.generation), now)


class RefusesTooLate(ShardMachine):
    """Notes the push that it then refuses."""

    def handle(self, event, now):
        if isinstance(event, Pushed):
            self.repeated += 1
        return super().handle(event, now)


class DecidesTwice(Rounds):
    """Has another verdict for who asks again."""

    def handle(self, event, now):
        known = event.step in self.verdicts
        commands = super().handle(event, now)
        return [Decide(replace(c.verdict, ok=False)) if known else c for c in commands]


class ForgetsVerdicts(Rounds):
    """Says nothing to who asks again."""

    def handle(self, event, now):
        known = event.step in self.verdicts
        commands = super().handle(event, now)
        return [] if known else commands


class CountsAgain(Rounds):
    """A repeat of a committed step is committed again."""

    def handle(self, event, now):
        if isinstance(event, Pushed) and event.step < self.step:
            for c in event.contributions:
                self.ledger.commit(self._epoch_of(event.step), c.samples, age=0)
        return super().handle(event, now)


class LosesRepeats(Rounds):
    """Keeps no account of what comes again after the commit."""

    def handle(self, event, now):
        before = self.ledger.duplicates
        commands = super().handle(event, now)
        if event.step < self.step and commands:
            self.ledger.duplicates = before
        return commands


class WaitsForNoShard(Rounds):
    """Decides as soon as the gradients are in."""

    def handle(self, event, now):
        if isinstance(event, Pushed) and event.step == self.step:
            for shard in range(self.shards):
                self.reduced.setdefault(shard, Reduced(self.generation, self.step, shard))
        return super().handle(event, now)


class BlindToNan(Rounds):
    """Commits whatever the shards and the losses are."""

    def _problem(self, members):
        return None


class LosesTheLoss(Rounds):
    """The loss of a step is not in its epoch's."""

    def _decide(self, members):
        before = self.totals.loss
        verdict = super()._decide(members)
        self.totals.loss = before
        return verdict


class WaitsForTheExhausted(Plan):
    """Whoever has run out of data is waited for all the same."""

    def members(self, step):
        return tuple(range(self.replicas))


class DropsTheRagged(Plan):
    """The last batch of a part is left out."""

    def batches(self, part):
        return max(1, self.size(part) // self.batch_size)


class ForgetsAnswers(Cursor):
    """Who asks again gets another batch."""

    def handle(self, event, now):
        at = self._at(event.replica)
        requests, answered = self.state[at], self.state[at + 1]
        if requests - 1 == event.request and answered:
            self.state[at], self.state[at + 1] = requests - 1, 0
        return super().handle(event, now)


class StealsWithoutTaking(Cursor):
    """The stolen batch stays with its owner."""

    def _next(self, replica):
        state = list(self.state)
        batch = super()._next(replica)
        if batch.part != replica:
            self.state[:] = state
        return batch


class HandsOutOneLess(Cursor):
    """Believes that a batch is gone which nobody has had."""

    @property
    def left(self):
        return max(0, super().left - (self.handed < self.plan.batches_per_epoch))


class NoFence(JobMachine):
    """Hears whatever generation speaks."""

    def handle(self, event, now):
        if hasattr(event, "generation"):
            event = replace(event, generation=self.generation)
        return super().handle(event, now)


class SettlesWithTheFirst(JobMachine):
    """A barrier is settled by whoever reaches it first."""

    def handle(self, event, now):
        training = self._training
        if isinstance(event, Reached) and event.phase == "trained":
            self._training = 1
        try:
            return super().handle(event, now)
        finally:
            self._training = self._training if isinstance(event, Launched) else training


class KeepsBarriers(JobMachine):
    """What an old generation has settled is settled for the new one."""

    def _recover(self, why, now):
        settled = self.settled
        commands = super()._recover(why, now)
        self.settled = settled
        return commands


class RunsWithoutAll(JobMachine):
    """Does not wait until all hosts are ready."""

    def handle(self, event, now):
        if isinstance(event, HostReady) and self.hosts and event.restored is not None:
            self.ready.update(h.address for h in self.hosts)
        return super().handle(event, now)


class ComesBack(JobMachine):
    """A terminal job is changed by what comes late."""

    def handle(self, event, now):
        commands = super().handle(event, now)
        if self.terminal and isinstance(event, HostDone) and not commands:
            self.state = State.FAILED if self.state is State.SUCCEEDED else State.SUCCEEDED
        return commands


class IgnoresDeaths(JobMachine):
    def handle(self, event, now):
        return [] if isinstance(event, WorkerLost) else super().handle(event, now)


class CountsNoLosses(JobMachine):
    def _lose(self, words, now):
        commands = super()._lose(words, now)
        self.losses = 0
        return commands


class RisesAgain(JobMachine):
    """A job that is about to end goes on when a worker comes."""

    def handle(self, event, now):
        if isinstance(event, Change) and self.state is State.STOPPING:
            return self._recover(event.why, now)
        return super().handle(event, now)


class HasNoBudget(JobMachine):
    """Goes on however many workers were lost."""

    def _lose(self, words, now):
        self.losses += 1
        return self._recover(words, now)


class WaitsForWorkersForEver(JobMachine):
    def _placing(self, now, spent):
        return super()._placing(now, 0.0)


class CountsNoPoison(JobMachine):
    def _found(self, restored, now):
        return super()._found(replace(restored, suspects=()), now)


class CountsPoisonTwice(JobMachine):
    """Blames a batch again when a recovery is repeated."""

    def _found(self, restored, now):
        self._suspected.clear()
        return super()._found(restored, now)


class KeepsHistory(JobMachine):
    """A rollback takes nothing back."""

    def handle(self, event, now):
        history = list(self.history)
        commands = super().handle(event, now)
        if isinstance(event, Reached) and event.phase == "opened" and self.generation > 1:
            self.history = history
        return commands


class KeepsItsFirstOrigin(JobMachine):
    """Looks for the state where it was at the first death."""

    def handle(self, event, now):
        before = self.origin
        commands = super().handle(event, now)
        if before is not None and isinstance(event, Reached) and event.phase == "opened":
            self.origin = before
        return commands


class FindsItsOriginTooEarly(JobMachine):
    """Takes a generation for the newest state before it has run."""

    def handle(self, event, now):
        commands = super().handle(event, now)
        if isinstance(event, Launched) and self.origin is not None:
            self.origin = replace(self.origin, generation=self.generation, meeting=self.generation)
        return commands


class FindsItsOriginWhileItOpens(JobMachine):
    """Takes a generation for the newest state once all are ready, and not all have opened."""

    def handle(self, event, now):
        commands = super().handle(event, now)
        if isinstance(event, HostReady) and self.state is State.RUNNING:
            self.origin = Origin(self.generation, self.hosts, self._meeting)
        return commands


class TakesOverTooEarly(JobMachine):
    """Takes over what the chief has found once all are ready, and not all have opened."""

    def handle(self, event, now):
        commands = super().handle(event, now)
        if isinstance(event, HostReady) and self.state is State.RUNNING:
            self._opened()
        return commands


class LosesTheAccount(JobMachine):
    """Goes on with the account of the last epoch's end."""

    def _opened(self):
        before = self.ledger
        super()._opened()
        self.ledger = before


class NeverLetsBack(Membership):
    """Who was fenced once is out for good."""

    def handle(self, event, now):
        member = self.members.get(getattr(event, "address", None))
        if isinstance(event, Beat) and member and member.presence is Presence.FENCED:
            return []
        return super().handle(event, now)


class FencesTheSlow(Membership):
    """A process that runs and is not heard of is taken for a stopped one."""

    def handle(self, event, now):
        if isinstance(event, Probed) and event.finding is Finding.RUNS:
            event = replace(event, finding=Finding.STOPPED)
        return super().handle(event, now)


class FencesAtOnce(Membership):
    """One look is enough."""

    def handle(self, event, now):
        if isinstance(event, Probed) and event.finding is Finding.STOPPED:
            self.members[event.address].finding = event.finding
        return super().handle(event, now)


class GivesWorkToTheLeaving(Membership):
    def ready(self):
        return [m for m in self.members.values() if m.presence is Presence.READY]


class NeverFences(Membership):
    """Nobody is asked after, and Dask sees no stopped process."""

    def _look(self, event, now):
        return []


class GivesNothingBack(Cursor):
    """What the dead had is not trained on."""

    def _give_back(self, batch):
        pass


class GivesBackTwice(Cursor):
    def _give_back(self, batch):
        super()._give_back(batch)
        super()._give_back(batch)


class GivesBackTheApplied(Cursor):
    """Forgets what is known to be applied."""

    @classmethod
    def recovered(cls, plan, state, done):
        return super().recovered(plan, state, ())


class BeginsAnew(Ledger):
    """The account of a new generation knows nothing of the steps before."""

    @classmethod
    def of_steps(cls, plan, steps):
        return cls()


class LetsTheOldGoOn(Recovery):
    """Reads what an old generation has, and does not stop it."""

    fences = False


class CopiesWhatIsApplied(Recovery):
    """Takes the other buffer once all shards have applied, before there is a verdict."""

    def committed(self, file):
        return min(file.reduced.values(), default=file.word)

    def intact(self, file, version):
        return True


class CopiesWhatIsSeen(Recovery):
    """Takes the version that readers see, which flips after the verdict."""

    def committed(self, file):
        return file.version

    def intact(self, file, version):
        return True


class CopiesTorn(Recovery):
    """Does not look whether anybody has stored while it copied."""

    def intact(self, file, version):
        return True


class ReplaysTheVerdict(Recovery):
    """Goes on from the version that all shards have, although one has followed a verdict."""

    def version(self, found):
        return min(version for version, _ in found)

    def follows(self, version, found):
        return True


class LosesTheSums(Recovery):
    """The sums of the epoch are gone once a host has taken them to its barrier."""

    def totals(self, lead):
        return lead.rounds.totals


class NeverEvaluates(Recovery):
    """Forgets the record of an epoch whose steps are all done."""

    def owed(self, plan, step, recorded):
        return None


class EvaluatesTwice(Recovery):
    """Makes the record of the last epoch again."""

    def owed(self, plan, step, recorded):
        epoch, index = plan.locate(step)
        return epoch - 1 if epoch and not index else super().owed(plan, step, recorded)


class TakesOneForAnother(Recovery):
    """Takes the word of a replica's batch before for the last one's."""

    def applied(self, words, asked):
        return {i for i, word in enumerate(words) if word[0] == "applied"}


class CountsNoDuplicates(Recovery):
    def again(self, words, asked):
        return 0


#: Who is stopped can go on alone when it wakes up, and while its state is copied.
ALONE = {"workers": 3, "replicas": 1, "shards": 4, "min_workers": 1}

#: Where each is put, who it is, the words of the rule that catches it, and what shows it.
BROKEN: list[tuple[dict[str, Any], str, type, str, dict[str, Any]]] = [
    (COMM, "shard", FlipsEarly, "with the verdict None", {}),
    (COMM, "shard", FlipsRefused, "with the verdict Verdict(", {"fate": "nonfinite"}),
    (COMM, "shard", TakesOldGradients, "gradient of step", {}),
    (COMM, "shard", ReducesTwice, "not expected while", {}),
    (COMM, "shard", GoesBack, "a shard went from version", {}),
    (COMM, "shard", HasNoFence, "HasNoFence took", {}),
    (COMM, "shard", RefusesTooLate, "changed RefusesTooLate", {}),
    (COMM, "rounds", DecidesTwice, "two verdicts", {}),
    (COMM, "rounds", ForgetsVerdicts, "no answer to", {}),
    (COMM, "rounds", CountsAgain, "expected samples", {}),
    (COMM, "rounds", LosesRepeats, "expected an account of", {}),
    (COMM, "rounds", WaitsForNoShard, "refused at its first arrival", {}),
    (COMM, "rounds", BlindToNan, "of a step that is not finite", {"fate": "nonfinite"}),
    (SHM, "rounds", BlindToNan, "of a step that is not finite", {"fate": "nonfinite"}),
    (SHM, "rounds", LosesTheLoss, "the losses of", {}),
    (COMM, "plan", WaitsForTheExhausted, "has another batch", {}),
    (SHM, "plan", DropsTheRagged, "expected members", {}),
    (SHM, "job", NoFence, "took", {"fate": "chaos"}),
    (COMM, "job", NoFence, "took", {"fate": "chaos"}),
    (ASYNC, "job", SettlesWithTheFirst, "was settled before it had ended", {}),
    (ASYNC, "job", KeepsBarriers, "and needed", {"fate": "crashes"}),
    (SHM, "job", RunsWithoutAll, "the job runs without", {}),
    (SHM, "job", ComesBack, "and became", {}),
    (SHM, "job", IgnoresDeaths, "is not told", {"fate": "crash"}),
    (SHM, "job", CountsNoLosses, "0 losses, expected 1", {"fate": "crash"}),
    (SHM, "job", RisesAgain, "of a job that had ended", {"fate": "chaos"}),
    (SHM, "job", HasNoBudget, "losses: RECOVERING", {"fate": "losses"}),
    (SHM, "job", WaitsForWorkersForEver, "the job has not ended", {"fate": "few"}),
    (SHM, "job", CountsNoPoison, "expected DATA_ERROR", {"fate": "killer"}),
    (ASYNC, "job", CountsNoPoison, "expected DATA_ERROR", {"fate": "killer"}),
    (SHM, "job", CountsPoisonTwice, "for no cause", {"fate": "killer"}),
    (COMM, "job", KeepsHistory, "the epochs of the history", {"fate": "crashes"}),
    (SHM, "job", KeepsItsFirstOrigin, "and needed", {"fate": "crashes"}),
    (COMM, "job", KeepsItsFirstOrigin, "and needed", {"fate": "crashes"}),
    (SHM, "job", FindsItsOriginTooEarly, "has left no file", {"fate": "crashes"}),
    (COMM, "job", FindsItsOriginWhileItOpens, "and needed", {"fate": "crashes"}),
    (COMM, "job", TakesOverTooEarly, "changed what is recorded", {"fate": "crashes"}),
    (SHM, "job", LosesTheAccount, "the account is", {"fate": "crash"}),
    (SHM, "membership", NeverLetsBack, "and still fenced", {"fate": "stop"}),
    (COMM, "membership", FencesTheSlow, "was fenced, and it runs", {"fate": "slow"}),
    (SHM, "membership", FencesAtOnce, "was fenced after", {"fate": "stop"}),
    (COMM, "membership", GivesWorkToTheLeaving, "are about to leave", {"fate": "retire"}),
    (SHM, "membership", NeverFences, "the job has not ended", {"fate": "stop"}),
    (ASYNC, "cursor", ForgetsAnswers, "was answered twice", {}),
    (ASYNC, "cursor", StealsWithoutTaking, "was handed to", {}),
    (ASYNC, "cursor", HandsOutOneLess, "samples in each epoch", {}),
    (ASYNC, "cursor", GivesNothingBack, "samples in each epoch", {"fate": "crash"}),
    (ASYNC, "cursor", GivesBackTwice, "was handed to", {"fate": "crash"}),
    (ASYNC, "cursor", GivesBackTheApplied, "and it is applied", {"fate": "crash"}),
    (SHM, "ledger", BeginsAnew, "expected samples", {"fate": "crash"}),
    (COMM, "recovery", LetsTheOldGoOn, "and another has gone on", {"fate": "stop", **ALONE}),
    (ASYNC, "recovery", LetsTheOldGoOn, "and another has gone on", {"fate": "stop", **ALONE}),
    (SHM, "recovery", CopiesWhatIsApplied, "which is committed", {"fate": "point"}),
    (SHM, "recovery", CopiesWhatIsSeen, "which is committed", {"fate": "point"}),
    (SHM, "recovery", CopiesTorn, "which is committed", {"fate": "stop", **ALONE}),
    (COMM, "recovery", ReplaysTheVerdict, "which is committed", {"fate": "join"}),
    (COMM, "recovery", LosesTheSums, "the losses of", {"fate": "retire"}),
    (SHM, "recovery", NeverEvaluates, "the epochs of the history", {"fate": "point"}),
    (SHM, "recovery", EvaluatesTwice, "the epochs of the history", {"fate": "point"}),
    (ASYNC, "recovery", TakesOneForAnother, "samples in each epoch", {"fate": "crash"}),
    (ASYNC, "recovery", CountsNoDuplicates, "", {"fate": "point"}),
]


@pytest.mark.parametrize(
    ("plane", "kind", "broken", "words", "shown"),
    [pytest.param(*case, id=f"{case[2].__name__}-{case[0].get('transport')}") for case in BROKEN],
)
def test_a_broken_machine_is_caught(plane, kind, broken, words, shown):
    """Within some seeds, by the rule that it breaks, and with all that is needed to see it."""
    caught = []
    for seed in range(400):
        try:
            run(seed, machines=Machines(**{kind: broken}), **plane, **shown)
        except Broken as error:
            caught.append(str(error))
            if words in caught[-1].splitlines()[0]:
                break
    else:
        found = Counter(c.splitlines()[0] for c in caught).most_common(5)
        pytest.fail(f"not caught by {words!r}: {found}")
    assert f"seed {seed}: Settings(" in caught[-1]
    assert "the last events:" in caught[-1]
    assert len(caught[-1].splitlines()) > 5
