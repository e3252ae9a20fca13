"""One shard's versions: it sums ahead, reports, and flips on the verdict alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.errors import FencedError
from dtrain.machines.plan import Plan
from dtrain.machines.shard import LEGAL, Phase, ShardMachine
from dtrain.messages import (
    Abandon,
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
from tests.machines.helpers import ignores, refuses

#: Replica 0 has one batch in an epoch, replica 1 has two: the second step is replica 1's alone.
PLAN = Plan(rows=5, replicas=2, batch_size=2, epochs=3)


def part(replica, weight=1.0):
    return Contribution(replica, weight, 2, 0.5, replica, 0)


def pushed(step, *replicas):
    return Pushed(3, step, tuple(part(i) for i in replicas))


def verdict(step, ok=True):
    return Verdict(3, step, (0, 1), 2.0, ok, None if ok else "not finite")


def shard(phase=Phase.GATHERING, version=2):
    """A shard at a version at which both replicas take part, in a phase."""
    machine = ShardMachine(1, 3, version, PLAN.members)
    assert machine.expected == (0, 1)
    if phase is not Phase.GATHERING:
        machine.handle(pushed(version, 0, 1), 0.0)
    if phase in (Phase.REPORTED, Phase.REFUSED):
        machine.handle(Reduced(3, version, 1), 0.0)
    if phase is Phase.REFUSED:
        machine.handle(verdict(version, ok=False), 0.0)
    assert machine.phase is phase
    return machine


EVENTS = {
    Pushed: pushed(2, 0, 1),
    Closed: Closed(3, 2, (0, 1)),
    Reduced: Reduced(3, 2, 1),
    Verdict: verdict(2),
}


def test_a_step_from_the_first_gradient_to_the_flip():
    machine = shard()
    assert machine.handle(pushed(2, 1), 0.0) == []
    assert machine.missing == (0,)
    assert machine.handle(Pushed(3, 2, (part(0, 0.5),)), 0.0) == [Reduce(2, (0, 1), (0.5, 1.0))]
    report = Reduced(3, 2, 1)
    assert machine.handle(report, 0.0) == [Report(report)]
    assert machine.version == 2, "nothing flips before the verdict"
    assert machine.handle(verdict(2), 0.0) == [Flip(3)]
    assert (machine.version, machine.phase, machine.gathered) == (3, Phase.GATHERING, {})
    # Step 3 is replica 1's alone.
    assert machine.missing == (1,)
    assert machine.handle(pushed(3, 1), 0.0) == [Reduce(3, (1,), (1.0,))]


def test_a_refused_step_flips_nothing():
    machine = shard(Phase.REPORTED)
    assert machine.handle(verdict(2, ok=False), 0.0) == [Abandon(2, "not finite")]
    assert (machine.version, machine.phase) == (2, Phase.REFUSED)
    for event in (verdict(2), verdict(2, ok=False), pushed(2, 0), Reduced(3, 2, 1)):
        refuses(machine, event, match="not expected while refused")


def test_a_problem_is_reported_to_the_lead_who_alone_decides():
    machine = shard(Phase.REDUCING)
    event = Reduced(3, 2, 1, "the gradient of replica 0 is not finite")
    assert machine.handle(event, 0.0) == [Report(event)]
    assert machine.phase is Phase.REPORTED


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("kind", EVENTS)
def test_the_table_of_what_is_legal(phase, kind):
    machine = shard(phase)
    event = EVENTS[kind]
    if phase in LEGAL[kind]:
        machine.handle(event, 0.0)
    else:
        refuses(machine, event, match=f"not expected while {phase.value}")


def test_the_table_says_what_it_should():
    # Written out once more, so that a change of the table is a change here too.
    words = {kind.__name__: {phase.name for phase in phases} for kind, phases in LEGAL.items()}
    assert words == {
        "Pushed": {"GATHERING", "REDUCING", "REPORTED"},
        "Closed": {"GATHERING", "REDUCING", "REPORTED"},
        "Reduced": {"REDUCING"},
        "Verdict": {"REPORTED"},
    }


@pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.REDUCING, Phase.REPORTED])
def test_a_gradient_that_comes_again_is_counted_and_not_taken(phase):
    machine = shard(phase)
    if phase is Phase.GATHERING:
        machine.handle(pushed(2, 0), 0.0)
        first = machine.gathered[0]
        again = Pushed(3, 2, (replace(first, loss=9.0),))
    else:
        again = pushed(2, 0)
    assert machine.new(again) == ()
    assert machine.handle(again, 0.0) == []
    assert machine.repeated == 1
    assert machine.phase is phase
    assert machine.gathered[0].loss == 0.5


def test_only_what_is_new_of_a_push_is_taken():
    machine = shard()
    machine.handle(pushed(2, 0), 0.0)
    assert [c.replica for c in machine.new(pushed(2, 0, 1))] == [1]
    assert machine.handle(pushed(2, 0, 1), 0.0) == [Reduce(2, (0, 1), (1.0, 1.0))]
    assert machine.repeated == 1


@pytest.mark.parametrize("phase", Phase)
def test_repeats_of_the_committed_step_are_answered_in_every_phase(phase):
    machine = shard(phase)
    ignores(machine, verdict(1))
    ignores(machine, Closed(3, 1, (1,)))
    again = pushed(1, 0, 1)
    assert machine.new(again) == ()
    assert machine.handle(again, 0.0) == []
    assert machine.repeated == 2
    assert machine.version == 2
    assert machine.phase is phase


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(
    ("event", "match"),
    [
        (pushed(3, 1), "Pushed of step 3: expected step 1 or 2"),
        (pushed(0, 1), "Pushed of step 0: expected step 1 or 2"),
        (verdict(3), "Verdict of step 3: expected step 1 or 2"),
        (verdict(0), "Verdict of step 0: expected step 1 or 2"),
        (Closed(3, 3, (1,)), "Closed of step 3: expected step 1 or 2"),
        (Closed(3, 0, (1,)), "Closed of step 0: expected step 1 or 2"),
        (Reduced(3, 1, 1), "Reduced of step 1: expected step 2"),
        (Reduced(3, 3, 1), "Reduced of step 3: expected step 2"),
    ],
)
def test_steps_out_of_reach_are_refused_in_every_phase(phase, event, match):
    refuses(shard(phase), event, match=f"shard 1: {match}")


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("generation", [2, 4])
@pytest.mark.parametrize("kind", EVENTS)
def test_another_generation_is_fenced_in_every_phase(phase, generation, kind):
    event = replace(EVENTS[kind], generation=generation)
    refuses(shard(phase), event, FencedError, match=f"of generation {generation}, expected 3")


def test_who_takes_no_part_is_refused_and_so_is_what_came_with_it():
    machine = shard()
    machine.handle(pushed(2, 0, 1), 0.0)
    machine.handle(Reduced(3, 2, 1), 0.0)
    machine.handle(verdict(2), 0.0)
    refuses(machine, pushed(3, 1, 0), match=r"replica 0 takes no part in it, expected one of \[1\]")
    refuses(machine, pushed(3, 5), match="replica 5 takes no part")


def test_a_step_that_is_not_applied_keeps_what_was_and_moves_on():
    machine = shard(Phase.REPORTED)
    skipped = replace(verdict(2), applied=False, problem="not finite")
    assert machine.handle(skipped, 0.0) == [Keep(3)]
    assert (machine.version, machine.phase, machine.gathered) == (3, Phase.GATHERING, {})
    ignores(machine, skipped)
    assert machine.handle(pushed(3, 1), 0.0) == [Reduce(3, (1,), (1.0,))]


# -- with backups ------------------------------------------------------------------------------


def open_shard(version=2):
    """A shard whose steps have members only once they are closed."""
    machine = ShardMachine(1, 3, version, lambda step: None)
    assert machine.expected is None
    return machine


def test_a_step_sums_the_gradients_of_those_that_it_is_closed_with():
    machine = open_shard()
    for i in (5, 0, 3):
        assert machine.handle(pushed(2, i), 0.0) == []
    assert machine.missing == ()
    assert machine.handle(Closed(3, 2, (0, 3)), 0.0) == [Reduce(2, (0, 3), (1.0, 1.0))]
    assert set(machine.gathered) == {0, 3}, "who is no member has left something"
    # Another comes too late, and what is closed is closed.
    ignores(machine, pushed(2, 1))
    ignores(machine, pushed(2, 5))
    ignores(machine, Closed(3, 2, (0, 3)))
    refuses(machine, Closed(3, 2, (0, 5)), match=r"found members \[0, 5\], expected \[0, 3\]")
    machine.handle(Reduced(3, 2, 1), 0.0)
    ignores(machine, Closed(3, 2, (0, 3)))
    assert machine.handle(verdict(2), 0.0) == [Flip(3)]
    assert machine.expected is None


def test_a_closed_step_waits_for_its_members_and_takes_nobody_else():
    machine = open_shard()
    assert machine.handle(pushed(2, 4), 0.0) == []
    assert machine.handle(Closed(3, 2, (0, 4)), 0.0) == []
    assert machine.missing == (0,)
    assert machine.new(pushed(2, 1)) == ()
    ignores(machine, pushed(2, 1))
    assert [c.replica for c in machine.new(pushed(2, 0, 1, 4))] == [0]
    assert machine.handle(pushed(2, 0, 1, 4), 0.0) == [Reduce(2, (0, 4), (1.0, 1.0))]
    assert machine.repeated == 1, "the late one is no repeat"


@pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.REDUCING, Phase.REPORTED])
def test_a_gradient_may_be_many_steps_late(phase):
    machine = open_shard(version=7)
    if phase is not Phase.GATHERING:
        machine.handle(pushed(7, 0), 0.0)
        machine.handle(Closed(3, 7, (0,)), 0.0)
    if phase is Phase.REPORTED:
        machine.handle(Reduced(3, 7, 1), 0.0)
    assert machine.phase is phase
    for step in (0, 3, 6):
        assert machine.new(pushed(step, 1)) == ()
        ignores(machine, pushed(step, 1))
    for event in (pushed(8, 1), pushed(-1, 1)):
        refuses(machine, event, match="expected step 6 or 7")


@pytest.mark.parametrize("members", [(), (3, 0), (0, 0), (-1, 0)])
def test_a_step_is_not_closed_with_nobody_or_with_nonsense(members):
    machine = open_shard()
    machine.handle(pushed(2, 0), 0.0)
    refuses(machine, Closed(3, 2, members), match="expected some, in their order")


def test_a_step_with_members_of_its_own_is_closed_with_none_other():
    machine = shard()
    ignores(machine, Closed(3, 2, (0, 1)))
    refuses(machine, Closed(3, 2, (1,)), match=r"found members \[1\], expected \[0, 1\]")
