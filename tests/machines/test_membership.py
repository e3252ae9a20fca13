from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import ProtocolError
from dtrain.machines.membership import (
    PROBES,
    Beat,
    Finding,
    Found,
    Hello,
    Joined,
    Left,
    Look,
    Lost,
    Membership,
    Presence,
    Probe,
    Probed,
    Retiring,
    Stuck,
)
from tests.machines.helpers import ignores, refuses
from tests.sim import state_of

A, B = "tcp://10.0.0.1:1", "tcp://10.0.0.1:2"


def table(*events):
    machine = Membership("1.2", hello_deadline=10.0, mute_deadline=30.0)
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


# -- who can train -----------------------------------------------------------------------------


def test_a_hello_of_one_that_can_train_is_news_once():
    machine = table(Joined(A, "a"))
    assert machine.handle(Hello(A, "1.2"), 1.0) == [Found(A)]
    # Repeated, as by a worker whose first was not answered.
    assert machine.handle(Hello(A, "1.2"), 2.0) == []
    assert machine.handle(Hello(A, "1.1"), 3.0) == []
    assert machine.handle(Hello(A, "1.2"), 4.0) == [Found(A)]


def test_who_is_about_to_leave_gets_nothing_new():
    machine = table(Joined(A, "a"), Hello(A, "1.2"), Joined(B, "b"), Hello(B, "1.2"))
    assert machine.handle(Retiring(A), 4.0) == []
    assert [m.address for m in machine.ready()] == [B]
    assert machine.members[A].presence is Presence.READY
    assert machine.problems() == []
    machine.handle(Retiring(A, False), 5.0)
    assert [m.address for m in machine.ready()] == [A, B]
    ignores(machine, Retiring("tcp://10.0.0.9:1"))


# -- leases ------------------------------------------------------------------------------------

LEASE = 4.0


def silent(now=10.0, *, beat=0.0):
    """A worker whose lease has run out, and who is being probed for the first time."""
    machine = table(Joined(A, "a"))
    machine.handle(Hello(A, "1.2", process=(1, 2)), beat)
    assert machine.handle(Look(LEASE), beat + LEASE) == []
    assert machine.handle(Look(LEASE), now) == [Probe(A)]
    return machine


def test_a_lease_runs_from_the_last_that_was_heard():
    machine = table(Joined(A, "a"), Hello(A, "1.2"))
    ignores(machine, Look(LEASE), now=5.0)
    machine.handle(Beat(A, {}), 5.0)
    ignores(machine, Look(LEASE), now=9.0)
    assert machine.handle(Look(LEASE), 9.1) == [Probe(A)]
    assert machine.members[A].process is None


def test_only_those_that_could_train_are_probed():
    machine = table(Joined(A, "a"), Joined(B, "b"), Hello(B, "1.1"))
    ignores(machine, Look(LEASE), now=1e6)


def test_probes_have_a_pause_between_them():
    machine = silent(10.0)
    ignores(machine, Look(LEASE), now=10.0 + PROBES - 0.1)
    assert machine.handle(Look(LEASE), 10.0 + PROBES) == [Probe(A)]
    ignores(machine, Look(LEASE), now=10.0 + PROBES + 0.1)


def test_a_process_that_is_stopped_twice_in_a_row_is_fenced():
    machine = silent(10.0)
    assert machine.handle(Probed(A, Finding.STOPPED), 10.1) == []
    assert [m.address for m in machine.ready()] == [A]
    assert machine.handle(Look(LEASE), 10.6) == [Probe(A)]
    words = "has not been heard of for 10.7 s, and its process is stopped"
    assert machine.handle(Probed(A, Finding.STOPPED), 10.7) == [Lost(A, "a", words)]
    assert machine.members[A].presence is Presence.FENCED
    assert machine.ready() == []
    assert [words for _, words in machine.problems()] == ["its process is stopped"]
    # It is lost once, and not asked after any more.
    ignores(machine, Probed(A, Finding.STOPPED), now=11.0)
    ignores(machine, Look(LEASE), now=1e6)


def test_a_process_that_is_gone_is_fenced_at_once():
    machine = silent(10.0)
    (lost,) = machine.handle(Probed(A, Finding.GONE), 10.1)
    assert lost.why == "has not been heard of for 10.1 s, and its process is gone"
    # And is lost again once Dask says so: whoever was told first knows it already.
    assert machine.handle(Left(A), 11.0) == [Lost(A, "a")]


@pytest.mark.parametrize("between", [Finding.RUNS, Finding.UNKNOWN])
def test_stopped_twice_but_not_in_a_row_is_not_stopped(between):
    machine = silent(10.0)
    for k, finding in enumerate([Finding.STOPPED, between, Finding.STOPPED]):
        assert machine.handle(Probed(A, finding), 10.1 + k) == []
    assert [m.address for m in machine.ready()] == [A]


def test_a_process_that_runs_is_slow_for_as_long_as_it_likes():
    machine = silent(10.0)
    for k in range(1000):
        assert machine.handle(Probed(A, Finding.RUNS), 10.0 + k) == []
        assert machine.handle(Look(LEASE), 10.9 + k) == [Probe(A)]
    assert [m.address for m in machine.ready()] == [A]


def test_a_process_that_nobody_can_see_is_fenced_when_it_was_mute_for_long():
    machine = silent(10.0)
    assert machine.handle(Probed(A, Finding.UNKNOWN), 29.9) == []
    (lost,) = machine.handle(Probed(A, Finding.UNKNOWN), 30.0)
    assert lost.why == "has not been heard of for 30.0 s, and its process cannot be seen"
    without = Membership("1.2", 10.0)
    for event in (Joined(A, "a"), Hello(A, "1.2")):
        without.handle(event, 0.0)
    without.handle(Look(LEASE), 1e6)
    assert without.handle(Probed(A, Finding.UNKNOWN), 1e6) == []


@pytest.mark.parametrize("heard", [Beat(A, {}), Hello(A, "1.2")])
def test_who_is_heard_of_while_a_neighbour_looks_is_not_fenced(heard):
    machine = silent(10.0)
    machine.handle(Probed(A, Finding.STOPPED), 10.1)
    machine.handle(Look(LEASE), 10.6)
    machine.handle(heard, 10.7)
    ignores(machine, Probed(A, Finding.STOPPED), now=10.8)
    ignores(machine, Probed(A, Finding.GONE), now=10.8)
    # And what was found before does not count any more.
    assert machine.handle(Look(LEASE), 20.0) == [Probe(A)]
    assert machine.handle(Probed(A, Finding.STOPPED), 20.1) == []
    assert [m.address for m in machine.ready()] == [A]


@pytest.mark.parametrize("heard", [Beat(A, {}), Hello(A, "1.2")])
def test_a_fenced_worker_that_is_heard_of_is_as_good_as_new(heard):
    machine = silent(10.0)
    machine.handle(Probed(A, Finding.GONE), 10.1)
    assert machine.handle(heard, 20.0) == [Found(A)]
    assert [m.address for m in machine.ready()] == [A]
    assert machine.problems() == []
    ignores(machine, Look(LEASE), now=24.0)
    # It can be lost again.
    machine.handle(Look(LEASE), 30.0)
    assert machine.handle(Probed(A, Finding.STOPPED), 30.1) == []
    assert [type(c) for c in machine.handle(Probed(A, Finding.STOPPED), 30.6)] == [Lost]


def test_the_answer_of_a_neighbour_may_come_too_late():
    machine = silent(10.0)
    machine.handle(Left(A), 11.0)
    ignores(machine, Probed(A, Finding.GONE))
    machine.handle(Joined(A, "a"), 12.0)
    ignores(machine, Probed(A, Finding.GONE))


def test_one_that_is_stuck_is_lost_until_it_says_that_nothing_holds_it():
    machine = table(Joined(A, "a"), Hello(A, "1.2"))
    words = "has been in user code for 60 s"
    assert machine.handle(Stuck(A, words), 5.0) == [Lost(A, "a", words)]
    assert [found for _, found in machine.problems()] == [words]
    ignores(machine, Stuck(A, "again"))
    assert machine.handle(Beat(A, {"job": 1}), 6.0) == []
    assert machine.ready() == []
    assert machine.handle(Beat(A, {}), 7.0) == [Found(A)]
    # The same summary later means nothing of the kind.
    machine.handle(Look(LEASE), 20.0)
    machine.handle(Probed(A, Finding.GONE), 20.1)
    assert machine.handle(Beat(A, {"job": 1}), 21.0) == [Found(A)]


@pytest.mark.parametrize("hello", [None, Hello(A, "1.1")])
def test_one_that_never_could_train_is_not_stuck(hello):
    machine = table(Joined(A, "a"), *([hello] if hello else []))
    ignores(machine, Stuck(A, "has been in user code for 60 s"))
    machine.handle(Beat(A, {}), 9.0)
    assert machine.ready() == []


# -- whatever comes ----------------------------------------------------------------------------

addresses = st.sampled_from([A, B])
happenings = st.lists(
    st.tuples(
        st.one_of(
            st.builds(Joined, addresses, st.just("n")),
            st.builds(Hello, addresses, st.sampled_from(["1.1", "1.2", "1.2"]), st.none()),
            st.builds(Beat, addresses, st.sampled_from([{}, {"job": 1}])),
            st.builds(Left, addresses),
            st.builds(Look, st.just(LEASE)),
            st.builds(Probed, addresses, st.sampled_from(Finding)),
            st.builds(Stuck, addresses, st.just("is stuck")),
            st.builds(Retiring, addresses, st.booleans()),
        ),
        st.sampled_from([0.1, 1.0, 10.0]),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(happenings)
def test_only_workers_that_are_here_are_in_the_table_and_none_is_lost_that_runs(events):
    machine = table()
    here, could, now, heard = set(), set(), 0.0, {}
    for event, passed in events:
        now += passed
        before = state_of(machine)
        try:
            commands = machine.handle(event, now)
        except ProtocolError:
            assert event.address not in here
            assert state_of(machine) == before
            continue
        if isinstance(event, Left):
            here.discard(event.address)
        elif isinstance(event, Joined):
            here.add(event.address)
        if isinstance(event, Joined | Beat | Hello):
            heard[event.address] = now
        assert set(machine.members) == here
        ready = {m.address for m in machine.members.values() if m.presence is Presence.READY}
        assert all(machine.members[a].version == "1.2" for a in ready)
        # Who comes and goes is told, and a cause has its effect at once.
        told = {c.address for c in commands if isinstance(c, Found)}
        assert told >= ready - could - {event.address if isinstance(event, Joined) else ""}
        gone = {c.address for c in commands if isinstance(c, Lost)}
        assert gone <= could | ({event.address} if isinstance(event, Left) else set())
        if gone and isinstance(event, Probed):
            assert event.finding is not Finding.RUNS
            assert now - heard[event.address] > LEASE
        for command in commands:
            if isinstance(command, Probe):
                assert now - heard[command.address] > LEASE
        if isinstance(event, Beat) and not event.summary:
            assert machine.members[event.address].presence is not Presence.FENCED
        could = ready
