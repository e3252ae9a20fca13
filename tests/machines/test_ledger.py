from __future__ import annotations

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.machines.ledger import Ledger
from dtrain.machines.plan import Plan

commits = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 64), st.integers(0, 9)))


@given(commits)
def test_every_commit_is_in_the_account(made):
    ledger = Ledger()
    for epoch, samples, age in made:
        ledger.commit(epoch, samples, age)
    assert ledger.applied == len(made)
    assert sum(ledger.samples) == sum(samples for _, samples, _ in made)
    assert len(ledger.samples) == max((epoch + 1 for epoch, _, _ in made), default=0)
    for epoch, total in enumerate(ledger.samples):
        assert total == sum(samples for e, samples, _ in made if e == epoch)
    assert ledger.staleness == Counter(age for _, _, age in made)
    assert (ledger.late, ledger.rejected, ledger.replayed, ledger.duplicates) == (0, 0, 0, 0)


@given(commits, st.integers(0, 9))
def test_it_travels_as_json(made, duplicates):
    ledger = Ledger(duplicates=duplicates, rejected=2)
    for commit in made:
        ledger.commit(*commit)
    there = json.loads(json.dumps(ledger.to_dict()))
    assert Ledger.from_dict(there) == ledger


def test_what_was_told_does_not_change_later():
    ledger = Ledger()
    ledger.commit(0, 3, 1)
    told = ledger.to_dict()
    ledger.commit(0, 3, 0)
    assert told["samples"] == [3]
    assert told["staleness"] == {1: 1}
    assert ledger.to_dict()["staleness"] == {0: 1, 1: 1}
    again = Ledger.from_dict(told)
    again.commit(1, 5, 0)
    assert told["samples"] == [3]


def test_accounts_of_several_hosts_add_up():
    first, second = Ledger(), Ledger()
    first.commit(0, 8, age=0)
    first.commit(1, 4, age=2)
    second.commit(0, 5, age=2)
    second.duplicates = 3
    whole = Ledger.total([first.to_dict(), second.to_dict()])
    assert (whole.applied, whole.duplicates, whole.samples) == (3, 3, [13, 4])
    assert dict(whole.staleness) == {0: 1, 2: 2}
    assert Ledger.total([]) == Ledger()


@st.composite
def plans(draw):
    replicas = draw(st.integers(1, 6))
    rows = draw(st.integers(replicas, 50))
    steps = draw(st.none() | st.integers(1, 40))
    return Plan(rows, replicas, draw(st.integers(1, 9)), draw(st.integers(1, 4)), steps)


@settings(max_examples=300, deadline=None)
@given(plans(), st.data())
def test_the_account_of_the_first_steps_is_that_of_committing_them_one_by_one(plan, data):
    steps = data.draw(st.integers(0, plan.total_steps))
    one_by_one = Ledger()
    for step in range(steps):
        epoch, index = divmod(step, plan.steps_per_epoch)
        for part in range(plan.replicas):
            if index < plan.batches(part):
                one_by_one.commit(epoch, plan.samples(part, index), age=0)
    found = Ledger.of_steps(plan, steps)
    assert found.to_dict() == one_by_one.to_dict()
    assert found == one_by_one
    # Nothing that it is made of is shared with another.
    found.commit(9, 1, 0)
    assert Ledger.of_steps(plan, steps) == one_by_one


@given(commits)
def test_what_is_added_at_once_is_what_was_committed_one_by_one(made):
    one_by_one, at_once = Ledger(), Ledger()
    for epoch, samples, age in made:
        one_by_one.commit(epoch, samples, age)
    for epoch in range(5):
        mine = [(samples, age) for e, samples, age in made if e == epoch]
        if mine:
            at_once.add(epoch, sum(n for n, _ in mine), Counter(age for _, age in mine))
    assert at_once == one_by_one
