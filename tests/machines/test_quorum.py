"""Steps that do not wait for everybody: each batch once, late ones never, and no deadlock."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import replace

import pytest

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.cursor import Batches
from dtrain.machines.plan import Plan
from dtrain.machines.quorum import (
    _AWAY,
    _OWES,
    Accepted,
    Arrive,
    Behind,
    Committed,
    EpochDone,
    Join,
    Late,
    Pass,
    Quorum,
    Tally,
)
from dtrain.messages import Batch
from tests.machines.helpers import ignores, refuses

SCHEDULES = 10_000


def small_plan(rng, replicas):
    each = rng.randint(1, 3)
    rows = replicas * each * rng.randint(1, 2) + rng.randrange(replicas * each)
    steps = rng.randint(1, 12) if rng.random() < 0.3 else None
    return Plan(rows, replicas, each, rng.randint(1, 2), steps)


class Job:
    """Replicas, a lead that decides, and what has really become of every batch.

    A replica joins with the newest version, computes and arrives; a closed step gets a verdict,
    which is the truth at once and is told to the quorum later.  All die at any moment.
    """

    def __init__(self, seed, quorum_class=Quorum):
        self.rng = rng = random.Random(seed)
        self.replicas = rng.randint(1, 6)
        self.backups = rng.randrange(self.replicas)
        self.plan = small_plan(rng, self.replicas)
        self.quorum_class = quorum_class
        self.words = [0] * Quorum.words(self.replicas)
        self.speed = [rng.choice([1.0, 1.0, 3.0, 0.1]) for _ in range(self.replicas)]
        self.deaths = rng.choice([0, 0, 1, 3])
        self.rejects = rng.choice([0.0, 0.0, 0.2])
        self.generation, self.epoch = 0, 0
        #: of each step: its epoch, whether it was applied, its batches
        self.steps = []
        #: all their batches
        self.used = set()
        #: of this epoch: batches handed out, lost with the dead, late
        self.handed = self.lost = self.late = 0
        #: late ones of the epochs before
        self.earlier = 0
        self.counts = Counter()
        self.begin()

    @property
    def every(self):
        return range(self.replicas)

    @property
    def version(self):
        """Steps whose verdict is recorded."""
        return len(self.steps)

    def begin(self):
        """A new generation: everybody reads first."""
        self.generation += 1
        self.sent = []
        #: what each does: "reads", (step, batch) it computes for, ("waits", step) or "done"
        self.does = dict.fromkeys(self.every, "reads")
        #: what each has, as far as it is not used up or given back; who has dropped a gradient
        self.has, self.dropped = dict.fromkeys(self.every), set()
        self.members = None

    def tell(self, event):
        """Copies the words out, handles the event, and stores them as one transaction."""
        words = list(self.words)
        quorum = self.quorum_class(self.plan, self.generation, self.backups, words)
        answers = quorum.handle(event, 0.0)
        if self.rng.random() < 0.2:
            before = list(words)
            assert quorum.handle(event, 0.0) == answers
            assert words == before, f"{event} came twice and counted twice"
        self.words = words
        answer = answers[0] if answers else None
        if self.rng.random() < 0.2 and not isinstance(answer, Behind):
            self.sent.append(event)
        return answer

    def look(self):
        return self.quorum_class(self.plan, self.generation, self.backups, self.words)

    # -- what happens ------------------------------------------------------------------------

    def run(self):
        for _ in range(3_000):
            if all(does == "done" for does in self.does.values()) and self.next_epoch():
                return
            self.turn()
            if self.deaths and self.rng.random() < 0.03:
                self.deaths -= 1
                self.die()
        raise AssertionError("it does not end")

    def turn(self):
        quorum = self.look()
        decides = quorum.members is not None
        ready = [i for i in self.every if self.goes_on(i, quorum)]
        assert ready or decides, f"a deadlock: {self.does}, missing {quorum.missing()}"
        if decides and (not ready or self.rng.random() < 0.3):
            self.decide(quorum)
            return
        (i,) = self.rng.choices(ready, [self.speed[i] for i in ready])
        does = self.does[i]
        if does == "reads" or does[0] == "waits":
            self.join(i)
        else:
            self.computes(i, *does)
        if self.sent and self.rng.random() < 0.1:
            self.resend()

    def goes_on(self, i, quorum):
        """Whether a replica has anything to do but to wait for others."""
        does = self.does[i]
        if does == "done":
            return False
        if does == "reads":
            # It asks in vain until the verdict that it has read is told.
            return quorum.step == self.version
        return does[0] != "waits" or does[1] < self.version

    def join(self, i):
        step = self.version
        answer = self.tell(Join(self.generation, i, step, self.epoch))
        self.late += i in self.dropped
        self.dropped.discard(i)
        if isinstance(answer, Batch):
            assert answer.epoch == self.epoch
            assert answer not in self.used, f"{answer} is handed out, and committed"
            assert answer not in self.has.values(), f"{answer} is handed out twice"
            self.handed += 1
            self.has[i], self.does[i] = answer, (step, answer)
        elif answer == EpochDone():
            self.does[i] = "done"
        else:
            assert answer == Pass()
            self.counts["passed"] += 1
            self.does[i] = ("waits", step)

    def computes(self, i, step, batch):
        if step < self.version and self.rng.random() < 0.2:
            # It sees that the step is over, and goes on without its gradient.
            self.does[i] = "reads"
            self.dropped.add(i)
            return
        answer = self.tell(Arrive(self.generation, i, step))
        if isinstance(answer, Late):
            assert answer == Late(step)
            assert step < self.version or i not in self.members
            self.late += 1
            self.has[i], self.does[i] = None, "reads"
            return
        assert isinstance(answer, Accepted)
        self.does[i] = ("waits", step)
        if answer.members is not None:
            self.closed(i, step, answer.members)

    def closed(self, i, step, members):
        """As many as the rule says, by another count of it."""
        assert self.members is None
        assert i in members
        left = self.plan.batches_per_epoch - sum(
            len(batches) for epoch, _, batches in self.steps if epoch == self.epoch
        )
        assert len(members) == max(1, min(self.replicas - self.backups, left))
        assert list(members) == sorted(set(members))
        assert all(self.does[j] == ("waits", step) for j in members)
        self.members = members
        self.counts["short"] += len(members) < self.replicas

    def decide(self, quorum):
        """The verdict first, and then the quorum hears of it, unless all die in between."""
        assert quorum.members == self.members
        for j in self.members:
            event = Arrive(self.generation, j, quorum.step)
            assert self.tell(event) == Accepted(self.members)
        applied = self.rng.random() >= self.rejects
        batches = {j: self.has[j] for j in self.members}
        assert None not in batches.values()
        assert not self.used & set(batches.values()), "a batch is committed twice"
        self.steps.append((self.epoch, applied, batches))
        self.used |= set(batches.values())
        if self.deaths and self.rng.random() < 0.2:
            self.counts["died before the store"] += 1
            self.deaths -= 1
            self.die()
            return
        if self.rng.random() < 0.3:
            # Somebody reads the new version before the quorum has heard of it.
            for i in self.every:
                event = Join(self.generation, i, self.version, self.epoch)
                assert self.tell(event) == Behind(quorum.step)
        assert self.tell(Committed(self.generation, quorum.step, applied)) is None
        assert self.look().step == self.version
        for i in self.every:
            # What members had is used; what the others have has gone back.
            self.has[i] = None
        self.members = None

    def resend(self):
        """A message that comes again, however late, changes no account."""
        event = self.rng.choice(self.sent)
        before = self.look().account(), self.look().left, self.look().step
        self.tell(event)
        assert (self.look().account(), self.look().left, self.look().step) == before
        self.counts["sent again"] += 1

    def die(self):
        """A new generation goes on from the words, and from the verdicts that are recorded."""
        for i in self.every:
            does = self.does[i]
            if does in ("reads", "done"):
                continue
            step = does[1] if does[0] == "waits" else does[0]
            computes = does[0] != "waits"
            member = self.has[i] is not None and step == self.version
            self.lost += computes or member
        self.lost += len(self.dropped)
        step = self.version
        applied = self.steps[-1][1] if self.steps else True
        before = list(self.words)
        words = self.quorum_class.recovered(self.plan, self.words, step, applied)
        assert self.words == before, "the old state was changed"
        assert len(words) == len(before)
        self.words = words
        self.begin()
        quorum = self.look()
        assert (quorum.step, quorum.members) == (step, None)
        used = sum(len(batches) for epoch, _, batches in self.steps if epoch == quorum.epoch)
        assert quorum.left == self.plan.batches_per_epoch - used
        self.counts["died"] += 1

    def next_epoch(self):
        """Begins it, or says that the job is over."""
        quorum = self.look()
        if quorum.epoch == self.epoch:
            self.check_epoch(quorum)
        if quorum.exhausted and quorum.epoch == self.epoch:
            return True
        self.epoch += 1
        self.earlier += self.late
        self.handed = self.lost = self.late = 0
        self.does = dict.fromkeys(self.every, "reads")
        return False

    def check_epoch(self, quorum):
        mine = [(applied, b) for e, applied, b in self.steps if e == self.epoch]
        batches = [batch for _, had in mine for batch in had.values()]
        assert len(set(batches)) == len(batches)
        ended = self.plan.steps is not None and self.version >= self.plan.steps
        every = {(p, n) for p in self.every for n in range(self.plan.batches(p))}
        if not ended:
            assert {(b.part, b.index) for b in batches} == every
        applied = [batch for ok, had in mine if ok for batch in had.values()]
        samples = sum(self.plan.samples(b.part, b.index) for b in applied)
        if len(applied) == len(every):
            assert samples == self.plan.rows
        rejected = len(batches) - len(applied)
        assert quorum.account() == Tally(len(applied), rejected, self.earlier + self.late, samples)
        assert self.handed == len(batches) + self.late + self.lost
        assert quorum.missing() == ()
        self.counts["late"] += self.late
        self.counts["rejected"] += rejected
        self.counts["epochs"] += 1


def jobs(count, quorum_class=Quorum):
    """So many of them, run and checked."""
    for seed in range(count):
        job = Job(seed, quorum_class)
        try:
            job.run()
        except (AssertionError, ProtocolError, IndexError) as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        yield job


def test_each_batch_is_committed_once_late_ones_never_and_somebody_can_always_go_on():
    counts = Counter()
    for job in jobs(SCHEDULES):
        counts += job.counts
    for what in ("passed", "short", "late", "rejected", "died", "sent again"):
        assert counts[what] > SCHEDULES // 20, (what, counts)
    assert counts["died before the store"] > SCHEDULES // 50
    assert counts["epochs"] > SCHEDULES


class LosesTheLate(Quorum):
    """What a late one had is not handed out again."""

    def _give_back(self, batch):
        pass


class GivesBackTwice(Quorum):
    def _give_back(self, batch):
        super()._give_back(batch)
        super()._give_back(batch)


class WaitsForTheExhausted(Quorum):
    """Wants as many gradients as ever, whether or not there is data for them."""

    def _enough(self):
        return self.plan.replicas - self.backups


class ClosesEarly(Quorum):
    def _enough(self):
        return super()._enough() - 1


class CountsRepeats(Quorum):
    """Counts a late gradient as often as it comes."""

    def _arrived(self, event):
        answer = super()._arrived(event)
        if isinstance(answer, Late) and self._status(event.replica) == _AWAY:
            self.state[self._at(event.replica)] = _OWES
        return answer


class TakesTheRejected(Quorum):
    def _commit(self, applied):
        super()._commit(True)


class ForgetsTheVerdict(Quorum):
    """A step whose verdict is recorded, and not told, is made again."""

    @classmethod
    def recovered(cls, plan, state, step, applied=True):
        known = cls(plan, 0, 0, list(state)).step
        words = super().recovered(plan, state, known, applied)
        words[Batches.words(plan.replicas)] = step
        return words


class GivesNothingBackAfterDeath(Quorum):
    @classmethod
    def recovered(cls, plan, state, step, applied=True):
        words = super().recovered(plan, state, step, applied)
        words[1:3] = state[1:3]
        return words


@pytest.mark.parametrize(
    "broken",
    [
        LosesTheLate,
        GivesBackTwice,
        WaitsForTheExhausted,
        ClosesEarly,
        CountsRepeats,
        TakesTheRejected,
        ForgetsTheVerdict,
        GivesNothingBackAfterDeath,
    ],
)
def test_a_quorum_that_is_wrong_is_found_out(broken):
    with pytest.raises(AssertionError, match="seed"):
        list(jobs(200, broken))


# -- what it is for ----------------------------------------------------------------------------


def time_of_epoch(backups, slow=10.0):
    """The simulated time of an epoch of four replicas, one slower; how many were late."""
    plan = Plan(rows=240, replicas=4, batch_size=1, epochs=1)
    quorum = Quorum(plan, 1, backups)
    pace = [1.0, 1.0, 1.0, slow]
    now, idle, heap = 0.0, set(range(4)), []
    while True:
        for i in sorted(idle):
            (answer,) = quorum.handle(Join(1, i, quorum.step, 0), now)
            if answer == EpochDone():
                assert quorum.account().samples == plan.rows
                return now, quorum.account().late
            if isinstance(answer, Batch):
                idle.discard(i)
                heapq.heappush(heap, (now + pace[i], i, quorum.step))
        now, i, step = heapq.heappop(heap)
        (answer,) = quorum.handle(Arrive(1, i, step), now)
        if isinstance(answer, Late):
            idle.add(i)
        elif answer.members is not None:
            quorum.handle(Committed(1, step), now)
            idle |= set(answer.members)


def test_a_slow_replica_does_not_set_the_pace():
    (waits, _), (goes_on, late) = time_of_epoch(0), time_of_epoch(1)
    assert waits == 60 * 10.0
    assert goes_on < waits / 2.5
    assert late > 0
    # Without a slow one a backup only costs.
    assert time_of_epoch(0, slow=1.0) == (60.0, 0)
    assert time_of_epoch(1, slow=1.0)[0] >= 60.0


# -- each answer -------------------------------------------------------------------------------

#: Two batches for each of three replicas.
PLAN = Plan(rows=12, replicas=3, batch_size=2, epochs=2)


def tell(quorum, event):
    (answer,) = quorum.handle(event, 0.0)
    return answer


def joins(quorum, *replicas, epoch=0):
    return [tell(quorum, Join(1, i, quorum.step, epoch)) for i in replicas]


def arrives(quorum, *replicas):
    return [tell(quorum, Arrive(1, i, quorum.step)) for i in replicas]


def commits(quorum, applied=True):
    assert quorum.handle(Committed(1, quorum.step, applied), 0.0) == []


def step_of(quorum, *replicas, applied=True):
    """A step that is made by those; the others have not joined."""
    joins(quorum, *replicas)
    answers = arrives(quorum, *replicas)
    assert answers[-1] == Accepted(tuple(sorted(replicas)))
    commits(quorum, applied)


def test_a_step_with_a_backup_from_the_first_batch_to_the_verdict():
    quorum = Quorum(PLAN, 1, 1)
    assert joins(quorum, 2, 0, 1) == [Batch(0, 2, 0), Batch(0, 0, 0), Batch(0, 1, 0)]
    assert joins(quorum, 0) == [Batch(0, 0, 0)]
    assert quorum.left == 3
    assert quorum.missing() == (0, 1, 2)
    assert arrives(quorum, 2) == [Accepted(None)]
    assert (quorum.members, quorum.missing()) == (None, (0, 1))
    assert arrives(quorum, 0) == [Accepted((0, 2))]
    assert (quorum.members, quorum.missing()) == ((0, 2), ())
    # Asking again gets the same; one that is not of them is late, once.
    assert arrives(quorum, 2, 0, 1, 1) == [Accepted((0, 2)), Accepted((0, 2)), Late(0), Late(0)]
    commits(quorum)
    assert (quorum.step, quorum.members) == (1, None)
    assert quorum.account() == Tally(applied=2, rejected=0, late=1, samples=4)
    # What replica 1 had is taken first, by whoever asks.
    assert joins(quorum, 2, 1, 0) == [Batch(0, 1, 0), Batch(0, 1, 1), Batch(0, 0, 1)]


def test_without_backups_all_are_waited_for():
    quorum = Quorum(PLAN, 1, 0)
    joins(quorum, 0, 1)
    assert arrives(quorum, 0, 1) == [Accepted(None), Accepted(None)]
    assert quorum.missing() == (2,)
    joins(quorum, 2)
    assert arrives(quorum, 2) == [Accepted((0, 1, 2))]


def test_the_members_of_a_step_are_told_until_the_next_is_made():
    quorum = Quorum(PLAN, 1, 1)
    joins(quorum, 0, 1)
    assert arrives(quorum, 0, 1) == [Accepted(None), Accepted((0, 1))]
    commits(quorum)
    assert tell(quorum, Arrive(1, 0, 0)) == Accepted((0, 1))
    joins(quorum, 1, 2)
    arrives(quorum, 1)
    # Replica 1 is of both.
    assert [tell(quorum, Arrive(1, i, 0)) for i in (0, 1)] == [Accepted((0, 1))] * 2
    arrives(quorum, 2), commits(quorum)
    assert tell(quorum, Arrive(1, 0, 0)) == Behind(2)
    assert quorum.account().late == 0


def test_a_late_gradient_is_dropped_and_counted_once_however_late_it_comes():
    quorum = Quorum(PLAN, 1, 1)
    joins(quorum, 2)
    step_of(quorum, 0, 1)
    assert quorum.left == 4
    step_of(quorum, 0, 1)
    assert quorum.account() == Tally(applied=4, rejected=0, late=0, samples=8)
    assert tell(quorum, Join(1, 2, 0, 0)) == Behind(2)
    for _ in range(3):
        assert tell(quorum, Arrive(1, 2, 0)) == Late(0)
        assert quorum.account().late == 1
    assert joins(quorum, 2) == [Batch(0, 2, 1)]
    assert tell(quorum, Arrive(1, 2, 0)) == Late(0)
    assert quorum.account().late == 1


def test_who_goes_on_without_the_gradient_it_owes_has_dropped_it():
    quorum = Quorum(PLAN, 1, 1)
    joins(quorum, 2)
    step_of(quorum, 0, 1)
    assert joins(quorum, 2) == [Batch(0, 2, 0)]
    assert quorum.account().late == 1
    # Should it come after all, it is dropped, and counted already.
    assert tell(quorum, Arrive(1, 2, 0)) == Late(0)
    assert joins(quorum, 2) == [Batch(0, 2, 0)]
    assert quorum.account().late == 1


def test_who_finds_nothing_to_take_passes_until_the_next_step():
    quorum = Quorum(Plan(rows=4, replicas=3, batch_size=2, epochs=1), 1, 1)
    # Three batches, as each part has one; one of two is late.
    joins(quorum, 0, 1, 2)
    arrives(quorum, 0, 1), commits(quorum)
    assert joins(quorum, 0) == [Batch(0, 2, 0)]
    assert quorum.missing() == (0,)
    assert joins(quorum, 1, 1) == [Pass(), Pass()]
    # Replica 2's gradient is late, and it finds nothing either.
    assert tell(quorum, Arrive(1, 2, 0)) == Late(0)
    assert joins(quorum, 2) == [Pass()]
    assert arrives(quorum, 0) == [Accepted((0,))]
    commits(quorum)
    assert joins(quorum, 0, 1, 2) == [EpochDone()] * 3
    assert quorum.account() == Tally(applied=3, rejected=0, late=1, samples=4)
    assert quorum.exhausted


def test_a_closed_step_gives_no_batch():
    quorum = Quorum(PLAN, 1, 1)
    joins(quorum, 0, 1)
    arrives(quorum, 0, 1)
    assert joins(quorum, 2) == [Pass()]
    commits(quorum)
    assert joins(quorum, 2) == [Batch(0, 2, 0)]


def test_another_version_is_to_be_read_first():
    quorum = Quorum(PLAN, 1, 1)
    step_of(quorum, 0, 1)
    joins(quorum, 0, 1)
    arrives(quorum, 0, 1)
    assert tell(quorum, Join(1, 2, 0, 0)) == Behind(1)
    # The verdict of step 1 is seen by its parameters before it is told here.
    assert tell(quorum, Join(1, 2, 2, 0)) == Behind(1)
    commits(quorum)
    assert tell(quorum, Join(1, 2, 2, 0)) == Batch(0, 2, 0)


def test_a_rejected_step_uses_its_batches_up():
    quorum = Quorum(PLAN, 1, 0)
    step_of(quorum, 0, 1, 2, applied=False)
    assert quorum.account() == Tally(applied=0, rejected=3, late=0, samples=0)
    step_of(quorum, 0, 1, 2)
    assert joins(quorum, 0) == [EpochDone()]
    assert quorum.account() == Tally(applied=3, rejected=3, late=0, samples=6)


def test_the_next_epoch_begins_with_all_batches_and_an_empty_account():
    quorum = Quorum(PLAN, 1, 0)
    step_of(quorum, 0, 1, 2), step_of(quorum, 0, 1, 2)
    assert quorum.whole
    assert not quorum.exhausted
    assert joins(quorum, 1, epoch=1) == [Batch(1, 1, 0)]
    assert (quorum.epoch, quorum.left, quorum.exhausted) == (1, 5, True)
    assert quorum.account() == Tally(0, 0, 0, 0)
    # One that has not heard of the end yet.
    assert joins(quorum, 0, epoch=0) == [EpochDone()]
    assert joins(quorum, 0, epoch=1) == [Batch(1, 0, 0)]


def test_a_limit_of_steps_ends_the_job():
    quorum = Quorum(replace(PLAN, steps=1), 1, 0)
    assert not quorum.exhausted
    step_of(quorum, 0, 1, 2)
    assert quorum.exhausted
    assert not quorum.whole
    assert joins(quorum, 0) == [EpochDone()]
    refuses(quorum, Join(1, 0, 1, 1), match="found epoch 1, expected 0: it is the last")


def test_a_verdict_that_comes_again_is_known():
    quorum = Quorum(PLAN, 1, 0)
    step_of(quorum, 0, 1, 2)
    for applied in (True, False):
        ignores(quorum, Committed(1, 0, applied))


def test_it_goes_on_from_the_state_of_another():
    words = memoryview(bytearray(8 * Quorum.words(3))).cast("q")
    first, second = (Quorum(PLAN, 1, 1, words) for _ in range(2))
    joins(first, 0), joins(second, 1)
    assert arrives(first, 1) == [Accepted(None)]
    assert arrives(second, 0) == [Accepted((0, 1))]
    commits(first)
    assert second.step == 1
    alone = Quorum(PLAN, 1, 1)
    joins(alone, 0, 1), arrives(alone, 1, 0), commits(alone)
    assert list(words) == list(alone.state)


# -- a new generation --------------------------------------------------------------------------


def half_made():
    """Step 1: replica 0's gradient is there, replica 1 has a batch, replica 2 owes step 0's."""
    quorum = Quorum(PLAN, 1, 1)
    joins(quorum, 2)
    step_of(quorum, 0, 1)
    joins(quorum, 0, 1), arrives(quorum, 0)
    return quorum


def test_what_is_held_and_not_committed_comes_back_in_a_new_generation():
    quorum = half_made()
    words = Quorum.recovered(PLAN, quorum.state, 1)
    after = Quorum(PLAN, 2, 1, words)
    assert (after.step, after.left, after.members) == (1, 4, None)
    assert after.account() == quorum.account()
    taken = [tell(after, Join(2, i, 1, 0)) for i in range(3)]
    # The first two were out, the third goes on with its own part.
    assert taken == [Batch(0, 1, 1), Batch(0, 2, 0), Batch(0, 2, 1)]


@pytest.mark.parametrize("applied", [True, False])
def test_a_verdict_that_was_recorded_and_not_stored_is_a_commit(applied):
    quorum = half_made()
    arrives(quorum, 1)
    assert quorum.members == (0, 1)
    for step, left in ((1, 4), (2, 2)):
        after = Quorum(PLAN, 2, 1, Quorum.recovered(PLAN, quorum.state, step, applied))
        assert (after.step, after.left, after.members) == (step, left, None)
    used = (4, 0, 0, 8) if applied else (2, 2, 0, 4)
    assert after.account() == Tally(*used)


@pytest.mark.parametrize(("step", "match"), [(0, "at least 1"), (2, "open"), (3, "step 1")])
def test_a_state_of_another_step_is_refused(step, match):
    quorum = half_made()
    before = list(quorum.state)
    with pytest.raises(ProtocolError, match=match):
        Quorum.recovered(PLAN, quorum.state, step)
    assert quorum.state == before


# -- what is illegal ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "match"),
    [
        (Join(1, 3, 1, 0), r"Join of step 1: found replica 3, expected one of 0\.\.2"),
        (Join(1, -1, 1, 0), "found replica -1"),
        (Join(1, 2, 2, 0), "Join of step 2 by replica 2: expected step 1"),
        (Join(1, 2, -1, 0), "Join of step -1 by replica 2: expected step 1"),
        (Join(1, 2, 1, 1), "found epoch 1, expected 0: 4 of its batches are not committed"),
        (Join(1, 2, 1, 2), "found epoch 2, expected 0 or 1"),
        (Join(1, 2, 1, -1), "found epoch -1, expected 0 or 1"),
        (Arrive(1, 3, 1), "Arrive of step 1: found replica 3"),
        (Arrive(1, 2, 1), r"by replica 2: it has no batch of that step \(its last: 0\)"),
        (Arrive(1, 0, 2), r"by replica 0: it has no batch of that step \(its last: 1\)"),
        (Arrive(1, 0, -1), "Arrive of step -1"),
        (Committed(1, 1), "Committed of step 1: found step 1 open, expected it closed"),
        (Committed(1, 2), "Committed of step 2: found step 1 open"),
    ],
)
def test_illegal_events_change_nothing(event, match):
    refuses(half_made(), event, match=match)


def test_only_the_closed_step_can_be_committed():
    quorum = half_made()
    arrives(quorum, 1)
    refuses(quorum, Committed(1, 2), match="Committed of step 2: found step 1 closed")
    refuses(quorum, Join(1, 2, 3, 0), match="expected step 1")


@pytest.mark.parametrize("event", [Join(1, 2, 1, 0), Arrive(1, 1, 1), Committed(1, 0)])
@pytest.mark.parametrize("generation", [0, 2])
def test_another_generation_is_fenced(event, generation):
    other = replace(event, generation=generation)
    refuses(half_made(), other, FencedError, match=f"of generation {generation}, expected 1")
