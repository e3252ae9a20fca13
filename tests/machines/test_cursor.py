"""The plan of the data, and who takes which batch: each exactly once per epoch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import DataError, FencedError
from dtrain.machines.cursor import Cursor, Take
from dtrain.machines.plan import Plan, cuts, order, split
from dtrain.messages import Batch
from tests.machines.helpers import refuses
from tests.sim import state_of


@st.composite
def plans(draw, most_steps=None):
    replicas = draw(st.integers(1, 7))
    rows = draw(st.integers(replicas, 60))
    steps = None if most_steps is None else draw(st.integers(1, most_steps))
    return Plan(rows, replicas, draw(st.integers(1, 9)), draw(st.integers(1, 3)), steps)


def batch_rows(plan, part, index):
    start = plan.bounds[part] + index * plan.batch_size
    return range(start, start + plan.samples(part, index))


# -- the plan ----------------------------------------------------------------------------------


@given(st.integers(0, 10**12), st.integers(1, 100))
def test_cuts_are_contiguous_and_near_equal(rows, parts):
    bounds = cuts(rows, parts)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == rows
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 0


@given(plans())
def test_every_row_is_in_one_batch_of_an_epoch(plan):
    seen = [
        row
        for part in range(plan.replicas)
        for index in range(plan.batches(part))
        for row in batch_rows(plan, part, index)
    ]
    assert seen == list(range(plan.rows))
    for part in range(plan.replicas):
        full = [plan.samples(part, index) for index in range(plan.batches(part) - 1)]
        assert full == [plan.batch_size] * len(full)
        assert 1 <= plan.samples(part, plan.batches(part) - 1) <= plan.batch_size
    assert plan.batches_per_epoch == sum(plan.batches(p) for p in range(plan.replicas))


@given(plans())
def test_the_steps_of_an_epoch_take_every_batch_once_and_nobody_without_data(plan):
    taken = []
    before = set(range(plan.replicas))
    for index in range(plan.steps_per_epoch):
        members = plan.members(index)
        assert members, "a step of nobody"
        assert list(members) == sorted(set(members))
        assert set(members) <= before, "who has left the quorum comes back within the epoch"
        before = set(members)
        taken += [(part, index) for part in members]
    expected = [(p, i) for p in range(plan.replicas) for i in range(plan.batches(p))]
    assert sorted(taken) == expected
    assert plan.members(plan.steps_per_epoch) == tuple(range(plan.replicas))


def test_a_replica_without_data_leaves_the_quorum():
    plan = Plan(rows=11, replicas=3, batch_size=2, epochs=2)
    assert plan.bounds == (0, 3, 7, 11)
    plan = Plan(rows=13, replicas=3, batch_size=2, epochs=2)
    assert [plan.size(p) for p in range(3)] == [4, 4, 5]
    assert [plan.members(step) for step in range(6)] == [(0, 1, 2), (0, 1, 2), (2,)] * 2
    assert [plan.ends_epoch(step) for step in range(6)] == [False, False, True] * 2
    assert [plan.locate(step) for step in (0, 2, 3, 5)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert plan.samples(2, 2) == 1


@given(plans(most_steps=20))
def test_steps_override_epochs_and_the_last_step_ends_its_epoch(plan):
    assert plan.total_steps == plan.steps
    ends = [step for step in range(plan.total_steps) if plan.ends_epoch(step)]
    assert ends[-1] == plan.total_steps - 1
    assert len(ends) == -(-plan.steps // plan.steps_per_epoch)


@given(plans())
def test_without_steps_the_epochs_count(plan):
    assert plan.total_steps == plan.epochs * plan.steps_per_epoch
    ends = [step for step in range(plan.total_steps) if plan.ends_epoch(step)]
    assert len(ends) == plan.epochs


def test_fewer_rows_than_replicas_is_an_error_in_words():
    assert Plan(3, 3, 8, 1).members(0) == (0, 1, 2)
    with pytest.raises(DataError, match="found 2 rows to train on for 3 replicas"):
        Plan(2, 3, 8, 1)


@given(st.integers(0, 2**31), st.integers(0, 3), st.integers(0, 5), st.integers(1, 50))
def test_an_order_is_a_permutation_that_seed_epoch_and_part_decide(seed, epoch, part, size):
    assert order(seed, epoch, part, size, shuffle=False) is None
    mixed = order(seed, epoch, part, size, shuffle=True)
    assert sorted(mixed) == list(range(size))
    assert mixed.dtype == np.int64
    assert mixed.tolist() == order(seed, epoch, part, size, shuffle=True).tolist()


def test_orders_differ_between_seeds_epochs_and_parts():
    found = {
        tuple(order(seed, epoch, part, 30, True))
        for seed in range(2)
        for epoch in range(3)
        for part in range(3)
    }
    assert len(found) == 18


@given(st.integers(2, 300), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_a_split_keeps_every_row_once(rows, fraction, seed):
    held = round(rows * fraction)
    if not 0 < held < rows:
        with pytest.raises(DataError, match="at least one row"):
            split(rows, fraction, seed)
        return
    train, valid = split(rows, fraction, seed)
    assert len(valid) == held
    assert sorted([*train, *valid]) == list(range(rows))
    assert train.tolist() == sorted(train)
    assert valid.tolist() == sorted(valid)
    again = split(rows, fraction, seed)
    assert [a.tolist() for a in again] == [train.tolist(), valid.tolist()]


def test_a_split_is_random_and_has_a_stream_of_its_own():
    _, valid = split(1000, 0.2, 7)
    assert valid.tolist() != split(1000, 0.2, 8)[1].tolist()
    assert valid.tolist() != list(range(800, 1000))
    # Not the numbers that the shuffle of the first part begins with.
    assert valid.tolist() != sorted(order(7, 0, 0, 1000, True)[:200])


@pytest.mark.parametrize("fraction", [0.0, 0.04, 0.96, 1.0])
def test_a_split_without_rows_on_one_side_is_refused(fraction):
    with pytest.raises(DataError, match="expected at least one row for validation"):
        split(10, fraction, 0)


# -- the cursor --------------------------------------------------------------------------------


class Replicas:
    """All replicas of an asynchronous job, each at a point of its own; they ask again at will."""

    def __init__(self, cursor, rng):
        self.cursor, self.rng = cursor, rng
        self.request = dict.fromkeys(range(cursor.plan.replicas), 0)
        #: replica -> its epoch's answers so far; None at the end: it has no more
        self.answers = {i: [] for i in self.request}
        self.taken = []

    def take(self, i, epoch):
        event = Take(1, i, self.request[i], epoch)
        (batch,) = self.cursor.handle(event, 0.0)
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            before = state_of(self.cursor)
            assert self.cursor.handle(event, 0.0) == [batch]
            assert state_of(self.cursor) == before
        self.request[i] += 1
        self.answers[i].append(batch)
        if batch is not None:
            assert batch.epoch == epoch
            self.taken.append(batch)

    def epoch(self, epoch):
        """Run an epoch in a random order; returns its batches."""
        self.taken = []
        active = set(self.request)
        while active:
            i = self.rng.choice(sorted(active))
            self.take(i, epoch)
            # Asking anew says that the batch before is applied.
            if self.answers[i][-1] is None:
                active.discard(i)
            else:
                assert not self.cursor.drained
        assert self.cursor.drained
        assert self.cursor.left == self.cursor.open == 0
        return self.taken


@settings(max_examples=60, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_each_batch_is_handed_out_once_per_epoch_whoever_asks_and_however_often(plan, rng):
    cursor = Cursor(plan, 1)
    replicas = Replicas(cursor, rng)
    every = {(p, i) for p in range(plan.replicas) for i in range(plan.batches(p))}
    for epoch in range(plan.epochs):
        taken = replicas.epoch(epoch)
        assert len(taken) == len(every)
        assert {(b.part, b.index) for b in taken} == every
        assert sum(plan.samples(b.part, b.index) for b in taken) == plan.rows
        assert cursor.handed == (epoch + 1) * len(every)


@settings(max_examples=60, deadline=None)
@given(plans(most_steps=40), st.randoms(use_true_random=False))
def test_a_limit_of_steps_ends_the_epoch_early_and_no_batch_comes_twice(plan, rng):
    cursor = Cursor(plan, 1)
    replicas = Replicas(cursor, rng)
    handed, epoch = 0, 0
    while handed < plan.steps:
        taken = replicas.epoch(epoch)
        assert len(set(taken)) == len(taken)
        assert len(taken) == min(plan.batches_per_epoch, plan.steps - handed)
        handed += len(taken)
        epoch += 1
    assert cursor.handed == plan.steps
    assert replicas.epoch(epoch) == []


def take(cursor, replica, request, epoch=0):
    (batch,) = cursor.handle(Take(1, replica, request, epoch), 0.0)
    return batch


def test_a_replica_takes_its_own_part_in_order_then_from_the_end_of_the_fullest():
    cursor = Cursor(Plan(rows=24, replicas=3, batch_size=2, epochs=1), 1)
    assert [take(cursor, 0, n).index for n in range(4)] == [0, 1, 2, 3]
    assert take(cursor, 1, 0) == Batch(0, 1, 0)
    # Replica 2 has not begun: it has the most left.
    assert take(cursor, 0, 4) == Batch(0, 2, 3)
    # Now 1 and 2 have three left each: the lower id.
    assert take(cursor, 0, 5) == Batch(0, 1, 3)
    assert take(cursor, 0, 6) == Batch(0, 2, 2)
    assert take(cursor, 0, 7) == Batch(0, 1, 2)
    # What was stolen is not handed to its owner.
    assert take(cursor, 2, 0) == Batch(0, 2, 0)
    assert take(cursor, 2, 1) == Batch(0, 2, 1)
    assert take(cursor, 2, 2) == Batch(0, 1, 1)
    assert cursor.left == 0
    assert [take(cursor, i, n) for i, n in ((0, 8), (1, 1))] == [None] * 2
    assert not cursor.drained
    assert take(cursor, 2, 3) is None
    assert cursor.drained


def drained():
    """A cursor whose first epoch is over, of two replicas with one batch each."""
    cursor = Cursor(Plan(rows=4, replicas=2, batch_size=2, epochs=2), 1)
    assert None not in [take(cursor, 0, 0), take(cursor, 1, 0)]
    assert [take(cursor, 0, 1), take(cursor, 1, 1)] == [None, None]
    assert cursor.drained
    return cursor


def test_a_new_epoch_begins_only_when_all_of_the_last_is_applied():
    cursor = Cursor(Plan(rows=4, replicas=2, batch_size=2, epochs=2), 1)
    early = Take(1, 1, 0, 1)
    refuses(cursor, early, match="epoch 0 has 2 batches left and 0 open")
    take(cursor, 0, 0)
    refuses(cursor, early, match="1 batches left and 1 open")
    take(cursor, 0, 1)
    refuses(cursor, early, match="0 batches left and 1 open")
    assert take(cursor, 0, 2) is None
    assert cursor.handle(early, 0.0) == [Batch(1, 1, 0)]
    assert cursor.epoch == 1


def test_a_cursor_goes_on_from_the_state_of_another():
    """Whoever shares the numbers shares the cursor."""
    plan = Plan(rows=40, replicas=3, batch_size=3, epochs=2)
    words = memoryview(bytearray(8 * Cursor.words(3))).cast("q")
    alone, first, second = Cursor(plan, 1), Cursor(plan, 1, words), Cursor(plan, 1, words)
    for n in range(4):
        for i in range(3):
            shared = (first, second)[(n + i) % 2]
            assert take(shared, i, n) == take(alone, i, n)
            assert take(first, i, n) == take(second, i, n)
    assert list(words) == list(alone.state)


def test_a_retry_is_answered_across_the_end_of_an_epoch():
    cursor = drained()
    assert take(cursor, 0, 2, epoch=1) == Batch(1, 0, 0)
    # Replica 1 has not asked in this epoch yet; its last answer is still known.
    assert take(cursor, 1, 1) is None
    assert take(cursor, 1, 2, epoch=1) == Batch(1, 1, 0)


@pytest.mark.parametrize(
    ("event", "match"),
    [
        (Take(1, 0, 5, 0), "expected 2"),
        (Take(1, 0, 0, 0), "expected 2"),
        (Take(1, 0, -1, 0), "expected 2"),
        (Take(1, 2, 0, 0), r"one of 0\.\.1"),
        (Take(1, -1, 0, 0), r"one of 0\.\.1"),
        (Take(1, 0, 2, 2), "asks for epoch 2"),
        (Take(1, 2, 0, 1), r"one of 0\.\.1"),
    ],
)
def test_illegal_events_change_nothing(event, match):
    refuses(drained(), event, match=match)


def test_nothing_of_a_past_epoch_is_handed_out():
    cursor = drained()
    assert take(cursor, 0, 2, epoch=1) == Batch(1, 0, 0)
    # A request of the epoch before must not get a batch of this one.
    refuses(cursor, Take(1, 1, 2, 0), match="asks for epoch 0: epoch 1")


@pytest.mark.parametrize("event", [Take(0, 0, 2, 1), Take(2, 0, 1, 0)])
def test_another_generation_is_fenced(event):
    refuses(drained(), event, FencedError, match="expected generation 1")


# -- a new generation --------------------------------------------------------------------------


class Generations:
    """An asynchronous job whose generations end at any time; what is applied is known."""

    def __init__(self, plan, rng):
        self.plan, self.rng = plan, rng
        self.cursor = Cursor(plan, 1)
        self.applied = []
        self.begin(0)

    def begin(self, epoch):
        every = range(self.plan.replicas)
        self.epoch = epoch
        self.request = dict.fromkeys(every, 0)
        #: what each has and has not applied
        self.has = dict.fromkeys(every)
        self.active = set(every)

    def turn(self):
        """One replica applies what it has, or takes another; at the end, the next epoch begins."""
        if not self.active:
            self.epoch += 1
            self.active = set(self.request)
        i = self.rng.choice(sorted(self.active))
        if self.has[i] is not None:
            self.applied.append(self.has[i])
            self.has[i] = None
            return
        event = Take(self.cursor.generation, i, self.request[i], self.epoch)
        (batch,) = self.cursor.handle(event, 0.0)
        self.request[i] += 1
        self.has[i] = batch
        if batch is None:
            self.active.discard(i)

    def end(self):
        """Everybody dies; who has applied the last batch that it was given is known."""
        asked = {i for i in self.request if self.cursor.outstanding(i) is not None}
        done = {i for i in asked if self.has[i] is None}
        back = {self.has[i] for i in asked - done}
        before = list(self.cursor.state)
        words = Cursor.recovered(self.plan, self.cursor.state, done)
        assert list(self.cursor.state) == before, "the old state was changed"
        assert len(words) == Cursor.words(self.plan.replicas)
        old, self.cursor = self.cursor, Cursor(self.plan, self.cursor.generation + 1, words)
        cursor = self.cursor
        assert (cursor.epoch, cursor.open) == (old.epoch, 0)
        assert cursor.handed == old.handed - len(back) == len(self.applied)
        assert cursor.left == old.left + len(back)
        for i in range(self.plan.replicas):
            assert cursor.outstanding(i) is None
            assert cursor.requested(i) == 0
        self.begin(self.epoch)
        if self.epoch > cursor.epoch:
            # All had passed the barrier, and nobody had asked for more.
            assert back == set()
        return back

    @property
    def over(self):
        if self.plan.steps is not None:
            return len(self.applied) == self.plan.steps
        return len(self.applied) == self.plan.epochs * self.plan.batches_per_epoch


@settings(max_examples=150, deadline=None)
@given(plans() | plans(most_steps=40), st.randoms(use_true_random=False))
def test_each_batch_is_applied_once_whenever_generations_end(plan, rng):
    job = Generations(plan, rng)
    ends = rng.randint(1, 8)
    for _ in range(10_000):
        if job.over:
            break
        job.turn()
        if ends and rng.random() < 0.2:
            ends -= 1
            job.end()
    assert job.over
    assert len(set(job.applied)) == len(job.applied)
    for epoch in range(job.epoch):
        mine = {(b.part, b.index) for b in job.applied if b.epoch == epoch}
        assert mine == {(p, i) for p in range(plan.replicas) for i in range(plan.batches(p))}
    # One more death, and still there is nothing left to do.
    job.end()
    assert job.cursor.left == 0
    assert job.cursor.exhausted


def test_what_came_back_is_taken_first_by_whoever_asks():
    plan = Plan(rows=24, replicas=3, batch_size=2, epochs=1)
    cursor = Cursor(plan, 1)
    assert [take(cursor, i, 0).part for i in range(3)] == [0, 1, 2]
    assert take(cursor, 0, 1) == Batch(0, 0, 1)
    # Replica 1 has applied its batch; the others have not.
    words = Cursor.recovered(plan, cursor.state, {1})
    after = Cursor(plan, 1, words)
    assert after.left == 10
    assert {take(after, 1, 0), take(after, 1, 1)} == {Batch(0, 0, 1), Batch(0, 2, 0)}
    # Then its own part goes on where it was.
    assert take(after, 1, 2) == Batch(0, 1, 1)
    assert take(after, 0, 0) == Batch(0, 0, 2)
    assert take(after, 2, 0) == Batch(0, 2, 1)


def test_what_is_outstanding_and_applied_does_not_come_again():
    plan = Plan(rows=4, replicas=2, batch_size=2, epochs=1)
    cursor = Cursor(plan, 1)
    take(cursor, 0, 0), take(cursor, 1, 0)
    after = Cursor(plan, 1, Cursor.recovered(plan, cursor.state, {0, 1}))
    assert after.drained
    assert [take(after, i, 0) for i in range(2)] == [None, None]


def test_a_pool_outlives_a_second_death():
    plan = Plan(rows=12, replicas=3, batch_size=2, epochs=1)
    cursor = Cursor(plan, 1)
    for i in range(3):
        take(cursor, i, 0)
    cursor = Cursor(plan, 1, Cursor.recovered(plan, cursor.state, ()))
    # Two of the pool's three are out again when the next death comes.
    first = {take(cursor, 0, 0), take(cursor, 1, 0)}
    cursor = Cursor(plan, 1, Cursor.recovered(plan, cursor.state, {1}))
    handed = [take(cursor, 2, n) for n in range(5)]
    assert None not in handed
    assert len(set(handed)) == 5
    assert len(first & set(handed)) == 1
    assert take(cursor, 2, 5) is None


def test_a_last_answer_of_the_epoch_before_does_not_come_back():
    cursor = Cursor(Plan(rows=4, replicas=2, batch_size=2, epochs=2), 1)
    take(cursor, 0, 0), take(cursor, 1, 0)
    assert [take(cursor, 0, 1), take(cursor, 1, 1)] == [None, None]
    assert take(cursor, 0, 2, epoch=1) == Batch(1, 0, 0)
    # Replica 1 has not begun: its last answer was "no more".
    after = Cursor(cursor.plan, 1, Cursor.recovered(cursor.plan, cursor.state, ()))
    assert after.left == 2
    assert {take(after, 1, 0, epoch=1), take(after, 1, 1, epoch=1)} == {
        Batch(1, 0, 0),
        Batch(1, 1, 0),
    }


def test_a_new_generation_does_not_begin_an_epoch_while_a_batch_lies_in_the_pool():
    plan = Plan(rows=4, replicas=2, batch_size=2, epochs=2)
    cursor = Cursor(plan, 1)
    take(cursor, 0, 0), take(cursor, 1, 0)
    after = Cursor(plan, 1, Cursor.recovered(plan, cursor.state, {0}))
    refuses(after, Take(1, 0, 0, 1), match="epoch 0 has 1 batches left and 0 open")
    assert take(after, 0, 0) == Batch(0, 1, 0)
