"""Bounded staleness: nobody runs away from the slowest, and somebody can always go on."""

from __future__ import annotations

import random

import pytest

from dtrain.errors import ProtocolError
from dtrain.machines.cursor import Cursor, Held, Take
from dtrain.machines.plan import Plan
from dtrain.messages import Batch
from tests.machines.helpers import refuses
from tests.sim import state_of

SCHEDULES = 10_000


def small_plan(rng, replicas):
    each = rng.randint(1, 3)
    rows = replicas * each * rng.randint(1, 4) + rng.randrange(replicas * each)
    steps = rng.randint(1, 30) if rng.random() < 0.3 else None
    return Plan(rows, replicas, each, rng.randint(1, 2), steps)


class Job:
    """Replicas at speeds of their own: each pulls and is given, computes, applies, asks again."""

    def __init__(self, seed, cursor_class=Cursor):
        self.rng = rng = random.Random(seed)
        self.replicas = rng.randint(1, 6)
        self.bound = rng.randint(0, 5)
        self.plan = small_plan(rng, self.replicas)
        self.make = lambda generation, state: cursor_class(
            self.plan, generation, state, max_staleness=self.bound
        )
        self.cursor = self.make(1, None)
        self.speed = [rng.choice([1.0, 1.0, 3.0, 10.0]) for _ in range(self.replicas)]
        self.deaths = rng.choice([0, 0, 1, 3])
        #: updates of all, ever, and the batches that they were made of, in order
        self.updates, self.applied = 0, []
        self.ages, self.held, self.epoch = [], 0, 0
        self.begin()

    def begin(self):
        """A new generation, or a new epoch: everybody pulls anew."""
        every = range(self.replicas)
        self.request = {i: self.cursor.requested(i) for i in every}
        #: what each has applied, told or not
        self.clock = dict.fromkeys(every, 0)
        self.has, self.active = dict.fromkeys(every), set(every)

    def run(self):
        for _ in range(5_000):
            if not self.active:
                if self.over:
                    return
                self.epoch += 1
                self.begin()
            self.turn()
            if self.deaths and self.rng.random() < 0.02:
                self.deaths -= 1
                self.die()
        raise AssertionError("it does not end")

    @property
    def over(self):
        return self.cursor.exhausted and self.cursor.left == 0

    def turn(self):
        """One goes on, drawn by its speed."""
        assert self.can_go_on()
        ready = sorted(self.active)
        (i,) = self.rng.choices(ready, [self.speed[i] for i in ready])
        if self.has[i] is not None:
            self.apply(i)
        if self.rng.random() < 0.7:
            self.ask(i)

    def can_go_on(self):
        """Somebody has a batch, or is answered once all have said what they have applied."""
        if any(self.has[i] is not None for i in self.active):
            return True
        ahead = self.make(self.cursor.generation, list(self.cursor.state))
        for i in [*self.active, *self.active]:
            take = Take(ahead.generation, i, self.request[i], self.epoch)
            if not isinstance(ahead.handle(take, 0.0)[0], Held):
                return True
        return False

    def apply(self, i):
        batch, since = self.has[i]
        self.ages.append(self.updates - since)
        self.updates += 1
        self.clock[i] += 1
        self.applied.append(batch)
        self.has[i] = None

    def ask(self, i):
        """Whoever asks, asks again at will."""
        take = Take(self.cursor.generation, i, self.request[i], self.epoch)
        (answer,) = self.cursor.handle(take, 0.0)
        if self.rng.random() < 0.2:
            before = list(self.cursor.state)
            assert self.cursor.handle(take, 0.0) == [answer]
            assert self.cursor.state == before
        if isinstance(answer, Held):
            self.held += 1
            assert answer.behind == self.slowest()
            assert i not in answer.behind
            assert self.cursor.outstanding(i) is None
            return
        self.request[i] += 1
        if answer is None:
            self.active.discard(i)
            return
        assert self.clock[i] - min(self.clock.values()) <= self.bound
        assert self.cursor.clock(i) == self.clock[i]
        self.has[i] = (answer, self.updates)

    def slowest(self):
        clocks = [self.cursor.clock(j) for j in range(self.replicas)]
        return tuple(j for j, clock in enumerate(clocks) if clock == min(clocks))

    def die(self):
        """All processes; who has applied its last batch is known, or not before it asks."""
        every = range(self.replicas)
        done = {i for i in every if self.cursor.outstanding(i) and self.has[i] is None}
        words = Cursor.recovered(self.plan, self.cursor.state, done)
        self.cursor = self.make(self.cursor.generation + 1, words)
        assert [self.cursor.clock(i) for i in every] == [0] * self.replicas
        self.begin()

    def check(self):
        bound = (self.replicas - 1) * (2 * self.bound + 1)
        assert max(self.ages, default=0) <= bound
        assert len(set(self.applied)) == len(self.applied)
        every = {(p, n) for p in range(self.replicas) for n in range(self.plan.batches(p))}
        for epoch in range(self.epoch):
            assert {(b.part, b.index) for b in self.applied if b.epoch == epoch} == every
        wanted = self.plan.steps or self.plan.epochs * len(every)
        assert len(self.applied) == wanted


def jobs(count, cursor_class=Cursor):
    """So many of them, run and checked."""
    for seed in range(count):
        job = Job(seed, cursor_class)
        try:
            job.run()
            job.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        yield job


def test_nobody_is_too_far_ahead_no_gradient_too_old_and_each_batch_comes_once():
    held = old = died = 0
    for job in jobs(SCHEDULES):
        held += job.held
        # Older than where all go at one pace.
        old += max(job.ages) > 2 * (job.replicas - 1)
        died += job.cursor.generation > 1
    assert held > SCHEDULES
    assert old > SCHEDULES // 20
    assert died > SCHEDULES // 20


class Lets(Cursor):
    """Holds nobody."""

    def _behind(self, replica):
        return ()


class HoldsAtTheEnd(Cursor):
    """Has whoever is too far ahead wait, though there is no more."""

    def handle(self, event, now):
        behind = self._behind(event.replica)
        return [Held(behind)] if behind and self.left == 0 else super().handle(event, now)


class HoldsWithoutNoting(Cursor):
    """That the batch before is applied is noted once the next is given."""

    def _behind(self, replica):
        behind = super()._behind(replica)
        if behind:
            # As if nothing had been said.
            self.state[self._at(replica) + 5] -= 1
        return behind


class ClocksGoOn(Cursor):
    """Clocks are those of the job, not of the epoch."""

    def _begin(self, epoch):
        clocks = [self.state[self._at(i) + 5] for i in range(self.plan.replicas)]
        super()._begin(epoch)
        for i, clock in enumerate(clocks):
            self.state[self._at(i) + 5] = clock


@pytest.mark.parametrize("broken", [Lets, HoldsAtTheEnd, HoldsWithoutNoting, ClocksGoOn])
def test_a_cursor_that_is_wrong_is_found_out(broken):
    with pytest.raises((AssertionError, ProtocolError)):
        list(jobs(300, broken))


# -- each answer -------------------------------------------------------------------------------


def cursor(replicas=3, rows=24, bound=1, epochs=1):
    return Cursor(Plan(rows, replicas, 2, epochs), 1, max_staleness=bound)


def take(machine, replica, request, epoch=0):
    (answer,) = machine.handle(Take(1, replica, request, epoch), 0.0)
    return answer


def test_who_is_too_far_ahead_is_held_until_the_slowest_has_moved():
    machine = cursor()
    assert take(machine, 0, 0) == Batch(0, 0, 0)
    assert take(machine, 0, 1) == Batch(0, 0, 1)
    # Two are applied, and the others have not begun.
    assert take(machine, 0, 2) == Held((1, 2))
    assert take(machine, 0, 2) == Held((1, 2))
    assert take(machine, 1, 0) == Batch(0, 1, 0)
    assert take(machine, 1, 1) == Batch(0, 1, 1)
    assert take(machine, 0, 2) == Held((2,))
    take(machine, 2, 0)
    assert take(machine, 0, 2) == Held((2,))
    take(machine, 2, 1)
    assert take(machine, 0, 2) == Batch(0, 0, 2)


def test_a_held_request_says_all_the_same_that_the_batch_before_is_applied():
    machine = cursor(replicas=2, bound=0)
    take(machine, 0, 0), take(machine, 1, 0)
    assert machine.open == 2
    assert take(machine, 0, 1) == Held((1,))
    assert (machine.open, machine.clock(0), machine.outstanding(0)) == (1, 1, None)
    before = state_of(machine)
    assert take(machine, 0, 1) == Held((1,))
    assert state_of(machine) == before, "it was counted twice"
    # Replica 1 is not held: it is level with what replica 0 has said.
    assert take(machine, 1, 1) == Batch(0, 1, 1)
    assert take(machine, 0, 1) == Batch(0, 0, 1)


def test_a_held_replica_asks_for_nothing_else():
    machine = cursor(replicas=2, bound=0)
    take(machine, 0, 0)
    assert take(machine, 0, 1) == Held((1,))
    for request in (0, 2, -1):
        refuses(machine, Take(1, 0, request, 0), match=f"asks for batch {request}: expected 1")


def test_without_a_bound_nobody_is_held():
    machine = cursor(bound=None)
    assert [take(machine, 0, n) for n in range(12)].count(None) == 0
    assert take(machine, 0, 12) is None


def test_who_has_left_the_epoch_is_not_waited_for():
    machine = Cursor(Plan(6, 3, 1, 2, steps=4), 1, max_staleness=1)
    for i, n in ((0, 0), (1, 0), (0, 1), (1, 1)):
        assert take(machine, i, n) is not None
    # Replica 2 leaves at 0, and the others two ahead of it.
    assert take(machine, 2, 0) is None
    assert [take(machine, i, 2) for i in (0, 1)] == [None, None]
    assert [machine.clock(i) for i in range(3)] == [2, 2, 0]


def test_clocks_begin_anew_with_the_epoch():
    machine = Cursor(Plan(4, 2, 1, 2), 1, max_staleness=3)
    for n in range(4):
        take(machine, 0, n)
    assert (take(machine, 0, 4), take(machine, 1, 0)) == (None, None)
    assert (machine.clock(0), machine.clock(1)) == (4, 0)
    assert take(machine, 0, 5, epoch=1) == Batch(1, 0, 0)
    assert (machine.clock(0), machine.clock(1)) == (0, 0)


def test_clocks_begin_anew_with_the_generation():
    machine = cursor(bound=0)
    take(machine, 0, 0)
    assert take(machine, 0, 1) == Held((1, 2))
    words = Cursor.recovered(machine.plan, machine.state, ())
    after = Cursor(machine.plan, 1, words, max_staleness=0)
    assert [after.clock(i) for i in range(3)] == [0, 0, 0]
    # What it had was applied: it had asked for more.
    assert take(after, 0, 0) == Batch(0, 0, 1)
    assert after.left == 10


def test_the_state_is_shared_by_whoever_looks_at_it():
    words = memoryview(bytearray(8 * Cursor.words(2))).cast("q")
    plan = Plan(8, 2, 1, 1)
    first, second = (Cursor(plan, 1, words, max_staleness=0) for _ in range(2))
    take(first, 0, 0)
    assert take(second, 0, 1) == take(first, 0, 1) == Held((1,))
    take(second, 1, 0)
    assert take(first, 1, 1) == Batch(0, 1, 1)
    assert take(second, 0, 1) == Batch(0, 0, 1)
