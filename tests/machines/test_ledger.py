from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dtrain.machines.ledger import Ledger

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
