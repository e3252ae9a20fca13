from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.errors import ProtocolError
from dtrain.machines.membership import Beat, Hello, Joined, Left, Lost, Membership, Presence
from tests.machines.helpers import ignores, refuses
from tests.sim import state_of

A, B = "tcp://10.0.0.1:1", "tcp://10.0.0.1:2"


def table(*events):
    machine = Membership("1.2", hello_deadline=10.0)
    for now, event in enumerate(events):
        machine.handle(event, float(now))
    return machine


def test_a_worker_with_the_masters_version_is_ready():
    machine = table(Joined(A, "a"), Joined(B, "b"), Hello(A, "1.2"))
    assert [m.address for m in machine.ready()] == [A]
    assert [(m.address, words) for m, words in machine.problems()] == [
        (B, "the worker plugin of dtrain has not said hello there")
    ]
    assert str(machine.members[A]) == f"worker a ({A})"


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (Hello(A, "1.1"), "has dtrain 1.1, expected 1.2"),
        (Hello(A, None), "has dtrain None, expected 1.2"),
        (Hello(A, None, "ModuleNotFoundError: dtrain"), "ModuleNotFoundError: dtrain"),
        (Hello(A, "1.2", "no disk"), "no disk"),
    ],
)
def test_another_is_refused_and_the_reason_is_told(hello, words):
    machine = table(Joined(A, "a"), hello)
    assert machine.ready() == []
    assert machine.members[A].presence is Presence.REFUSED
    assert [(m.address, found) for m, found in machine.problems()] == [(A, words)]


def test_a_later_hello_counts():
    machine = table(Joined(A, "a"), Hello(A, "1.1"), Hello(A, "1.2"))
    assert [m.address for m in machine.ready()] == [A]
    assert machine.problems() == []


def test_ready_workers_come_in_the_order_of_joining():
    machine = table(Joined(B, "b"), Joined(A, "a"), Hello(A, "1.2"), Hello(B, "1.2"))
    assert [m.address for m in machine.ready()] == [B, A]


def test_a_hello_is_waited_for_until_its_deadline():
    machine = table(Joined(A, "a"), Joined(B, "b"))
    assert [m.address for m in machine.pending(5.0)] == [A, B]
    assert [m.address for m in machine.pending(10.0)] == [B]
    machine.handle(Hello(B, "1.2"), 6.0)
    assert [m.address for m in machine.pending(7.0)] == [A]
    assert machine.pending(10.0) == []


def test_who_leaves_is_lost_once_by_name():
    machine = table(Joined(A, "a"), Hello(A, "1.2"))
    member = machine.members[A]
    assert machine.handle(Left(A), 3.0) == [Lost(A, "a")]
    assert member.presence is Presence.LEFT
    assert machine.members == {}
    ignores(machine, Left(A))
    refuses(machine, Hello(A, "1.2"), match=f"Hello of {A}: expected a worker that has joined")
    refuses(machine, Beat(A, {}), match="Beat of")


def test_one_that_comes_back_has_to_say_hello_again():
    machine = table(Joined(A, "a"), Hello(A, "1.2"), Left(A), Joined(A, "a"))
    assert machine.ready() == []
    assert machine.members[A].joined == 3.0


def test_a_heartbeat_keeps_its_time_and_its_summary():
    machine = table(Joined(A, "a"), Beat(A, {"job": 1}))
    assert machine.members[A].beat == 1.0
    assert machine.members[A].summary == {"job": 1}
    assert machine.members[A].presence is Presence.JOINED


addresses = st.sampled_from([A, B])
happenings = st.lists(
    st.one_of(
        st.builds(Joined, addresses, st.just("n")),
        st.builds(Hello, addresses, st.sampled_from(["1.1", "1.2"]), st.none()),
        st.builds(Beat, addresses, st.just({})),
        st.builds(Left, addresses),
    )
)


@given(happenings)
def test_only_workers_that_are_here_are_in_the_table(events):
    machine = table()
    here = set()
    for now, event in enumerate(events):
        before = state_of(machine)
        try:
            lost = machine.handle(event, float(now))
        except ProtocolError:
            assert event.address not in here
            assert state_of(machine) == before
            continue
        left = {event.address} & here if isinstance(event, Left) else set()
        assert {x.address for x in lost} == left
        here = here - left if isinstance(event, Left) else here | {event.address}
        assert set(machine.members) == here
        assert {m.address for m in machine.ready()} <= here
        assert all(m.version == "1.2" for m in machine.ready())
