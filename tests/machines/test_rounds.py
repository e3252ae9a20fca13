"""The lead: one verdict for each step, recorded before it is told, and the same ever after."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import FencedError
from dtrain.machines.ledger import Ledger
from dtrain.machines.plan import Plan
from dtrain.machines.rounds import Rounds, Totals
from dtrain.messages import Closed, Contribution, Decide, Pushed, Reduced, Verdict
from tests.machines.helpers import ignores, refuses

#: Replica 0 has one batch in an epoch, replica 1 has two: the second step is replica 1's alone.
PLAN = Plan(rows=5, replicas=2, batch_size=2, epochs=3)


def rounds(plan=PLAN, shards=2, step=0):
    return Rounds(3, step, shards, plan.replicas, plan.members, lambda step: plan.locate(step)[0])


def part(replica, loss=1.0, weight=1.0, samples=2):
    return Contribution(replica, weight, samples, loss, replica, 0)


def pushed(step, *parts):
    return Pushed(3, step, parts)


def commit(machine, *parts, step=None):
    """All that a step wants; returns the verdict."""
    step = machine.step if step is None else step
    parts = parts or tuple(part(i) for i in machine.expected)
    for p in parts:
        assert machine.handle(pushed(step, p), 0.0) == []
    for shard in range(machine.shards - 1):
        assert machine.handle(Reduced(3, step, shard), 0.0) == []
    (decide,) = machine.handle(Reduced(3, step, machine.shards - 1), 0.0)
    return decide.verdict


def test_the_verdict_waits_for_all_gradients_and_all_shards_in_any_order():
    events = [pushed(0, part(0)), pushed(0, part(1)), Reduced(3, 0, 0), Reduced(3, 0, 1)]
    for arrival in permutations(events):
        machine = rounds()
        for event in arrival[:-1]:
            assert machine.handle(event, 0.0) == []
            assert machine.verdicts == {}
        (decide,) = machine.handle(arrival[-1], 0.0)
        assert decide == Decide(Verdict(3, 0, (0, 1), 2.0, True))
        assert machine.step == 1
        assert machine.verdicts[0] == decide.verdict


def test_a_replica_without_data_is_not_waited_for():
    machine = rounds()
    commit(machine)
    assert machine.expected == (1,)
    assert machine.missing() == (1,)
    assert commit(machine) == Verdict(3, 1, (1,), 1.0, True)
    assert machine.expected == (0, 1)


def test_repeats_are_counted_and_change_no_sum():
    machine = rounds()
    machine.handle(pushed(0, part(0)), 0.0)
    machine.handle(pushed(0, part(0), part(1)), 0.0)
    assert machine.ledger.duplicates == 1
    machine.handle(Reduced(3, 0, 0), 0.0)
    machine.handle(Reduced(3, 0, 0), 0.0)
    assert machine.verdicts == {}
    machine.handle(Reduced(3, 0, 1), 0.0)
    # After the commit too: whether a repeat is counted does not depend on when it comes.
    machine.handle(pushed(0, part(0), part(1)), 0.0)
    assert machine.ledger.duplicates == 3
    assert machine.ledger.applied == 2
    assert machine.ledger.samples == [4]


def test_the_recorded_verdict_is_told_again_and_never_another():
    machine = rounds()
    verdict = commit(machine)
    for event in (pushed(0, part(0, loss=math.nan)), Reduced(3, 0, 1, "too late to refuse")):
        assert machine.handle(event, 0.0) == [Decide(verdict)]
    commit(machine)
    # A survivor may be one step behind; nobody can be two.
    assert machine.handle(Reduced(3, 0, 1), 0.0) == [Decide(verdict)]
    commit(machine)
    refuses(machine, Reduced(3, 0, 1), match="expected step 3")


@pytest.mark.parametrize(
    ("loss", "problem", "words"),
    [
        (math.nan, None, "the loss of replica 1 is nan at step 0 (partition 1, batch 0)"),
        (math.inf, None, "the loss of replica 1 is inf at step 0 (partition 1, batch 0)"),
        (1.0, "the gradient of replica 0 is not finite", "the gradient of replica 0 is not finite"),
        (math.nan, "a gradient too", "the loss of replica 1 is nan at step 0"),
    ],
)
def test_a_refused_step_commits_nothing_and_stays_refused(loss, problem, words):
    machine = rounds()
    machine.handle(pushed(0, part(0), part(1, loss=loss)), 0.0)
    machine.handle(Reduced(3, 0, 0), 0.0)
    (decide,) = machine.handle(Reduced(3, 0, 1, problem), 0.0)
    verdict = decide.verdict
    assert not verdict.ok
    assert words in verdict.problem
    assert machine.step == 0
    assert (machine.ledger.applied, machine.ledger.rejected) == (0, 2)
    assert machine.ledger.samples == []
    assert machine.totals.samples == 0
    # Nothing that comes again, not even a sound report, makes it otherwise.
    for event in (Reduced(3, 0, 1), pushed(0, part(0), part(1)), Reduced(3, 0, 0)):
        assert machine.handle(event, 0.0) == [Decide(verdict)]
    assert machine.step == 0
    assert machine.ledger.rejected == 2
    refuses(machine, Reduced(3, 1, 0), match="expected step 0")


def test_the_first_shard_with_a_problem_is_named_whoever_reports_first():
    for arrival in permutations([Reduced(3, 0, 0, "of 0"), Reduced(3, 0, 1, "of 1")]):
        machine = rounds()
        machine.handle(pushed(0, part(0), part(1)), 0.0)
        machine.handle(arrival[0], 0.0)
        (decide,) = machine.handle(arrival[1], 0.0)
        assert decide.verdict.problem == "of 0"


def test_losses_are_weighted_means_and_totals_are_an_epochs():
    machine = rounds()
    verdict = commit(machine, part(0, loss=1.0), part(1, loss=4.0, weight=0.5, samples=1))
    assert verdict.weight == 1.5
    assert machine.loss == (1.0 + 4.0 * 0.5) / 1.5
    commit(machine, part(1, loss=2.0))
    totals = machine.take_totals()
    assert (totals.loss, totals.weight, totals.samples) == (5.0, 2.5, 5)
    assert machine.take_totals().samples == 0
    commit(machine)
    assert machine.ledger.samples == [5, 4]
    assert machine.ledger.staleness == {0: 5}


@settings(max_examples=50)
@given(st.lists(st.floats(-1e6, 1e6), min_size=7, max_size=7), st.randoms(use_true_random=False))
def test_sums_have_the_same_bits_in_every_order_of_arrival(losses, rng):
    plan = Plan(rows=14, replicas=7, batch_size=2, epochs=1)
    found = set()
    for _ in range(4):
        machine = rounds(plan)
        parts = [part(i, loss, weight=1 / (i + 1)) for i, loss in enumerate(losses)]
        events = [pushed(0, p) for p in parts] + [Reduced(3, 0, shard) for shard in (0, 1)]
        for event in rng.sample(events, len(events)):
            machine.handle(event, 0.0)
        assert machine.step == 1
        found.add((machine.loss, machine.totals.loss, machine.verdicts[0].weight))
    assert len(found) == 1


@pytest.mark.parametrize("generation", [0, 2, 4])
def test_another_generation_is_fenced(generation):
    machine = rounds()
    machine.handle(pushed(0, part(0)), 0.0)
    for event in (pushed(0, part(1)), Reduced(3, 0, 0), pushed(9, part(1))):
        other = replace(event, generation=generation)
        refuses(machine, other, FencedError, match=f"of generation {generation}, expected 3")


@pytest.mark.parametrize(
    ("event", "match"),
    [
        (pushed(2, part(1)), "Pushed of step 2: expected step 1"),
        (pushed(-1, part(1)), "Pushed of step -1: expected step 1"),
        (Reduced(3, 2, 0), "Reduced of step 2: expected step 1"),
        (pushed(1, part(0)), r"replica 0 takes no part in it, expected one of \[1\]"),
        (pushed(1, part(1), part(0)), "replica 0 takes no part"),
        (pushed(1, part(2)), "replica 2 takes no part"),
        (Reduced(3, 1, 2), r"found shard 2, expected one of 0\.\.1"),
        (Reduced(3, 1, -1), "found shard -1"),
        (Reduced(3, 0, 7), "found shard 7"),
    ],
)
def test_illegal_events_change_nothing(event, match):
    machine = rounds()
    commit(machine)
    refuses(machine, event, match=match)


def test_it_begins_where_it_is_told_and_knows_since_when_it_waits():
    machine = rounds(step=4)
    assert machine.expected == (0, 1)
    assert machine.since is None
    machine.handle(pushed(4, part(1)), 7.0)
    machine.handle(Reduced(3, 4, 0), 8.0)
    assert machine.since == 7.0
    assert machine.missing() == (0,)
    machine.handle(Reduced(3, 4, 1), 8.5)
    (decide,) = machine.handle(pushed(4, part(0)), 9.0)
    assert decide.verdict.step == 4
    assert machine.since is None
    assert machine.ledger.samples == [0, 0, 4]
    refuses(machine, Reduced(3, 3, 0), match="expected step 5")


@settings(max_examples=100)
@given(st.integers(0, 12), st.lists(st.floats(-1e6, 1e6), min_size=28, max_size=28))
def test_a_generation_that_goes_on_is_a_job_that_was_never_cut(cut, losses):
    """Its account, its sums and its verdicts have the same bits, wherever the cut was."""
    plan = Plan(rows=13, replicas=3, batch_size=2, epochs=4)
    drawn = iter(losses)
    known = {(step, i): next(drawn) for step in range(12) for i in plan.members(step)}

    def train(machine, until):
        told = []
        while machine.step < until:
            step = machine.step
            index = plan.locate(step)[1]
            parts = [
                part(i, known[step, i], samples=plan.samples(i, index)) for i in machine.expected
            ]
            told.append(commit(machine, *parts))
            if plan.ends_epoch(step):
                machine.take_totals()
        return told

    whole = rounds(plan)
    told = train(whole, 12)
    first = rounds(plan)
    train(first, cut)
    account, totals = Ledger.of_steps(plan, cut), replace(first.totals)
    second = Rounds(
        3,
        cut,
        2,
        plan.replicas,
        plan.members,
        lambda step: plan.locate(step)[0],
        ledger=account,
        totals=totals,
    )
    assert train(second, 12) == told[cut:]
    assert second.ledger == whole.ledger
    assert second.ledger is account
    assert second.totals == whole.totals


def test_the_counters_of_the_steps_before_are_kept():
    ledger = Ledger(applied=7, samples=[5, 4], duplicates=3, replayed=2, staleness=Counter({0: 7}))
    machine = Rounds(
        3, 3, 1, 2, PLAN.members, lambda step: PLAN.locate(step)[0], ledger, Totals(1.5, 2.0, 4)
    )
    commit(machine, part(1, loss=1.0))
    machine.handle(pushed(3, part(1)), 0.0)
    assert machine.ledger == Ledger(
        applied=8, samples=[5, 6], duplicates=4, replayed=2, staleness=Counter({0: 8})
    )
    assert machine.take_totals() == Totals(2.5, 3.0, 6)


# -- a step with a problem is passed over ------------------------------------------------------


@pytest.mark.parametrize(("loss", "problem"), [(math.nan, None), (3.0, "a gradient is not finite")])
def test_a_skipped_step_is_rejected_and_the_next_one_begins(loss, problem):
    machine = rounds()
    machine.skip = True
    commit(machine, part(0, loss=2.0), part(1, loss=4.0))
    before = replace(machine.totals)
    machine.handle(pushed(1, part(1, loss=loss)), 0.0)
    machine.handle(Reduced(3, 1, 0), 0.0)
    (decide,) = machine.handle(Reduced(3, 1, 1, problem), 0.0)
    verdict = decide.verdict
    assert (verdict.ok, verdict.applied, verdict.members) == (True, False, (1,))
    assert verdict.problem == (
        problem or "the loss of replica 1 is nan at step 1 (partition 1, batch 0)"
    )
    assert machine.step == 2
    assert (machine.ledger.applied, machine.ledger.rejected) == (2, 1)
    assert machine.ledger.samples == [4]
    assert (machine.totals, machine.loss) == (before, 3.0)
    # Asked again it is the same one, and the next step is as any other.
    assert machine.handle(Reduced(3, 1, 1), 0.0) == [decide]
    assert commit(machine) == Verdict(3, 2, (0, 1), 2.0, True)
    assert machine.ledger.samples == [4, 4]


def test_whether_a_step_is_skipped_is_told_when_it_is_made():
    machine = Rounds(3, 0, 1, 2, PLAN.members, lambda step: 0, skip=True)
    machine.handle(pushed(0, part(0), part(1)), 0.0)
    (decide,) = machine.handle(Reduced(3, 0, 0, "not finite"), 0.0)
    assert decide == Decide(Verdict(3, 0, (0, 1), 2.0, True, "not finite", applied=False))


def test_a_step_that_is_not_skipped_is_neither_gone_on_from_nor_applied():
    machine = rounds()
    machine.handle(pushed(0, part(0), part(1)), 0.0)
    machine.handle(Reduced(3, 0, 0), 0.0)
    (decide,) = machine.handle(Reduced(3, 0, 1, "not finite"), 0.0)
    assert (decide.verdict.ok, decide.verdict.applied) == (False, False)


# -- with backups ------------------------------------------------------------------------------


def with_backups(step=0):
    """Four replicas and two shards; who makes a step is known once it is closed."""
    machine = Rounds(3, step, 2, 4, lambda step: None, lambda step: step // 4)
    assert machine.expected is None
    return machine


def test_no_verdict_before_the_step_is_closed_whatever_else_is_there():
    events = [
        *(pushed(0, part(i, loss=i)) for i in (0, 2, 3)),
        Closed(3, 0, (0, 2)),
        Reduced(3, 0, 0),
        Reduced(3, 0, 1),
    ]
    for arrival in permutations(events):
        machine = with_backups()
        decided = None
        for n, event in enumerate(arrival):
            assert machine.missing() == () or Closed(3, 0, (0, 2)) in arrival[:n]
            answer = machine.handle(event, 0.0)
            if decided is None and answer:
                assert {*events} - {*arrival[: n + 1]} <= {events[2]}
                (decided,) = answer
        assert decided == Decide(Verdict(3, 0, (0, 2), 2.0, True))
        assert machine.loss == 1.0
        assert machine.ledger == Ledger(applied=2, samples=[4], staleness=Counter({0: 2}))
        assert machine.expected is None
        assert machine.arrived == {}


def test_it_waits_for_the_members_and_drops_the_others():
    machine = with_backups()
    machine.handle(pushed(0, part(3)), 0.0)
    machine.handle(pushed(0, part(1)), 0.0)
    assert machine.missing() == ()
    assert machine.handle(Closed(3, 0, (0, 1)), 0.0) == []
    assert machine.missing() == (0,)
    assert set(machine.arrived) == {1}
    ignores(machine, pushed(0, part(2)))
    ignores(machine, Closed(3, 0, (0, 1)))
    assert machine.ledger.duplicates == 0


def test_a_gradient_may_be_many_steps_late_and_is_no_repeat():
    machine = with_backups()
    for step in range(4):
        machine.handle(Closed(3, step, (0, 1)), 0.0)
        commit(machine, part(0), part(1))
    ignores(machine, pushed(0, part(3)))
    ignores(machine, pushed(1, part(0)))
    before = replace(machine.ledger)
    assert machine.handle(pushed(3, part(3)), 0.0) == [Decide(machine.verdicts[3])]
    assert machine.ledger == before
    machine.handle(pushed(3, part(1), part(2)), 0.0)
    assert machine.ledger.duplicates == 1
    assert machine.handle(Closed(3, 3, (0, 1)), 0.0) == [Decide(machine.verdicts[3])]


@pytest.mark.parametrize(
    ("event", "match"),
    [
        (Closed(3, 2, ()), r"found members \[\], expected some of \[0, 1, 2, 3\], in this order"),
        (Closed(3, 2, (1, 0)), r"found members \[1, 0\]"),
        (Closed(3, 2, (0, 0)), r"found members \[0, 0\]"),
        (Closed(3, 2, (0, 4)), r"found members \[0, 4\]"),
        (Closed(3, 3, (0, 1)), "Closed of step 3: expected step 2"),
        (Closed(3, -1, (0, 1)), "Closed of step -1: expected step 2"),
        (Closed(3, 1, (0, 2)), r"found members \[0, 2\], expected \[0, 1\]"),
        (pushed(2, part(4)), r"replica 4 takes no part in it, expected one of \[0, 1, 2, 3\]"),
        (pushed(3, part(0)), "Pushed of step 3: expected step 2"),
        (pushed(-1, part(0)), "Pushed of step -1: expected step 2"),
        (Reduced(3, -1, 0), "Reduced of step -1: expected step 2"),
    ],
)
def test_illegal_events_of_a_step_with_backups_change_nothing(event, match):
    machine = with_backups()
    for step in range(2):
        machine.handle(Closed(3, step, (0, 1)), 0.0)
        commit(machine, part(0), part(1))
    machine.handle(pushed(2, part(0)), 0.0)
    refuses(machine, event, match=match)
    refuses(machine, replace(event, generation=2), FencedError, match="of generation 2, expected 3")


def test_a_step_is_closed_once():
    machine = with_backups()
    machine.handle(Closed(3, 0, (0, 1)), 0.0)
    refuses(machine, Closed(3, 0, (0, 2)), match=r"found members \[0, 2\], expected \[0, 1\]")
    # So is one whose members the plan knows.
    refuses(rounds(), Closed(3, 0, (0,)), match=r"found members \[0\], expected \[0, 1\]")
    assert rounds().handle(Closed(3, 0, (0, 1)), 0.0) == []


def test_a_skipped_step_rejects_the_members_alone():
    machine = Rounds(3, 0, 1, 4, lambda step: None, lambda step: 0, skip=True)
    machine.handle(pushed(0, *map(part, range(3))), 0.0)
    machine.handle(Closed(3, 0, (0, 2)), 0.0)
    (decide,) = machine.handle(Reduced(3, 0, 0, "not finite"), 0.0)
    assert decide == Decide(Verdict(3, 0, (0, 2), 2.0, True, "not finite", applied=False))
    assert (machine.ledger.applied, machine.ledger.rejected, machine.step) == (0, 2, 1)


def test_the_loss_of_one_that_is_no_member_is_nobodys_problem():
    machine = with_backups()
    machine.handle(pushed(0, part(3, loss=math.nan)), 0.0)
    machine.handle(Closed(3, 0, (0, 1)), 0.0)
    assert commit(machine, part(0), part(1)).ok
