"""The life of a job: one table, one terminal state, and the reason for it in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.errors import DTrainError, FencedError, ProtocolError
from dtrain.machines.jobs import (
    TERMINAL,
    TRANSITIONS,
    Cancel,
    ClientBack,
    ClientGone,
    End,
    HostDone,
    HostFailed,
    HostPlan,
    HostReady,
    JobMachine,
    Launch,
    Launched,
    Limits,
    Reached,
    State,
    Stop,
    Tick,
    WorkerLost,
)
from dtrain.machines.ledger import Ledger
from dtrain.messages import Failure
from tests.machines.helpers import ignores, refuses
from tests.sim import state_of

LIMITS = Limits(prepare_deadline=30.0, stop_grace=10.0, client_lease=60.0)
#: The chief with a replica and the lead shard, one with two replicas, one with a shard alone.
CHIEF = HostPlan("a:1", "anna", (0,), (0,))
SECOND = HostPlan("b:1", "bert", (1, 2), ())
SHARDS = HostPlan("c:1", "", (), (1,))
HOSTS = (CHIEF, SECOND, SHARDS)
A, B, C = (host.address for host in HOSTS)
LEDGER = Ledger(applied=3, samples=[8], staleness=Counter({0: 3})).to_dict()
LIVE = [state for state in State if state not in TERMINAL]


def record(payloads):
    return {"epoch": payloads[0]["epoch"] + 1, "samples": 8, "of": len(payloads)}


def reached(address, epoch=0, phase="evaluated", **payload):
    if address == A:
        payload.setdefault("ledger", LEDGER)
    return Reached(1, address, epoch, phase, {"epoch": epoch, **payload})


def failed(address=B, reason="USER_ERROR", message="KeyError: 'x'"):
    return HostFailed(1, address, Failure(reason, message))


def tell(machine, *events, now=0.0):
    """Handle events one after the other; returns all commands."""
    return [command for event in events for command in machine.handle(event, now)]


def job(state=State.QUEUED, now=0.0):
    """A job in a state; STOPPING: about to be FAILED."""
    machine = JobMachine("j1", LIMITS, now, record)
    if state is State.QUEUED:
        return machine
    if state is State.CANCELLED:
        tell(machine, Cancel("changed my mind"), now=now)
        return machine
    tell(machine, Launched(HOSTS), now=now)
    if state is State.PREPARING:
        return machine
    tell(machine, *(HostReady(1, host.address) for host in HOSTS), now=now)
    if state is State.RUNNING:
        return machine
    if state is State.SUCCEEDED:
        tell(machine, reached(A, last=True), reached(B), now=now)
    else:
        tell(machine, failed(), now=now)
    if state is not State.STOPPING:
        tell(machine, *(HostDone(1, host.address) for host in HOSTS), now=now)
    return machine


def succeeding(now=0.0):
    """A job that has settled its last barrier and waits for its hosts to return."""
    machine = job(State.RUNNING, now)
    tell(machine, reached(A, last=True), reached(B), now=now)
    assert machine.state is State.STOPPING
    return machine


# -- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
def test_the_helper_makes_each_state(state):
    assert job(state).state is state


def test_the_table_says_what_it_should():
    # Written out once more, so that a change of the table is a change here too.
    assert {s.value: {t.value for t in ways} for s, ways in TRANSITIONS.items()} == {
        "QUEUED": {"PREPARING", "STOPPING"},
        "PREPARING": {"RUNNING", "STOPPING"},
        "RUNNING": {"STOPPING"},
        "STOPPING": {"SUCCEEDED", "FAILED", "CANCELLED"},
        "SUCCEEDED": set(),
        "FAILED": set(),
        "CANCELLED": set(),
    }
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED} == TERMINAL


@pytest.mark.parametrize("after", State)
@pytest.mark.parametrize("before", State)
def test_only_the_tables_transitions_can_be_made(before, after):
    machine = job(before)
    if after in TRANSITIONS[before]:
        machine._enter(after, 1.0, "because")
        assert machine.state is after
        assert machine.story[-1] == (1.0, after, "because")
        return
    was = state_of(machine)
    with pytest.raises(ProtocolError, match=f"{before} does not lead to {after}"):
        machine._enter(after, 1.0, "because")
    assert state_of(machine) == was


ILLEGAL = [
    *((state, Launched(HOSTS), "launched while") for state in LIVE if state is not State.QUEUED),
    *(
        (state, event, "is not one of its hosts")
        for state in LIVE
        for event in (HostReady(1, "x:1"), failed("x:1"), HostDone(1, "x:1"), reached("x:1"))
    ),
    *(
        (State.QUEUED, event, "is not one of its hosts")
        for event in (HostReady(1, A), failed(A), HostDone(1, A), reached(A))
    ),
    (State.RUNNING, reached(C), "has no replicas and no part in an epoch"),
]


@pytest.mark.parametrize(("state", "event", "match"), ILLEGAL)
def test_illegal_events_change_nothing(state, event, match):
    refuses(job(state), event, match=match)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("generation", [0, 2])
@pytest.mark.parametrize("event", [HostReady(1, A), reached(A), failed(A), HostDone(1, A)])
def test_another_generation_is_fenced_in_every_state(state, generation, event):
    other = replace(event, generation=generation)
    refuses(job(state), other, FencedError, match=f"of generation {generation}, expected 1")


EVERY = [
    Launched(HOSTS),
    HostReady(1, A),
    reached(A, last=True),
    failed(A),
    HostDone(1, A),
    WorkerLost(A),
    Cancel("no"),
    ClientGone(),
    ClientBack(),
    Tick(),
]


@pytest.mark.parametrize("state", sorted(TERMINAL))
@pytest.mark.parametrize("event", EVERY)
def test_a_terminal_job_ignores_everything(state, event):
    ignores(job(state), event, now=1e6)


# -- the way to success ------------------------------------------------------------------------


def test_a_job_from_its_launch_to_its_end():
    machine = JobMachine("j1", LIMITS, 5.0, record)
    assert machine.waiting() == []
    assert machine.handle(Launched(HOSTS), 6.0) == [Launch(HOSTS)]
    assert machine.state is State.PREPARING
    assert machine.waiting() == list(HOSTS)
    assert tell(machine, HostReady(1, B), HostReady(1, B), HostReady(1, A), now=7.0) == []
    assert machine.waiting() == [SHARDS]
    assert machine.handle(HostReady(1, C), 8.0) == []
    assert machine.state is State.RUNNING
    assert tell(machine, reached(A), reached(B), now=10.0) == []
    assert machine.settled == {(0, "evaluated"): False}
    assert machine.state is State.RUNNING
    assert tell(machine, reached(B, 1, last=True), reached(A, 1, last=True), now=14.0) == []
    assert machine.settled[1, "evaluated"] is True
    assert machine.state is State.STOPPING
    assert [r["seconds"] for r in machine.history] == [2.0, 4.0]
    assert [r["samples_per_s"] for r in machine.history] == [4.0, 2.0]
    assert machine.ledger == LEDGER
    assert tell(machine, HostDone(1, C), HostDone(1, B), now=15.0) == []
    assert machine.waiting() == [CHIEF]
    assert machine.handle(HostDone(1, A), 16.0) == [End(State.SUCCEEDED)]
    assert machine.outcome.failure is None
    assert machine.ended == 16.0
    assert [(now, state) for now, state, _ in machine.story] == [
        (5.0, State.QUEUED),
        (6.0, State.PREPARING),
        (8.0, State.RUNNING),
        (14.0, State.STOPPING),
        (16.0, State.SUCCEEDED),
    ]


def test_a_barrier_waits_for_all_hosts_with_replicas_and_takes_the_hosts_in_order():
    seen = []
    machine = JobMachine("j1", LIMITS, 0.0, lambda ps: (seen.append(ps), record(ps))[1])
    tell(machine, Launched(HOSTS), *(HostReady(1, h.address) for h in HOSTS))
    tell(machine, reached(B, mine=1), now=1.0)
    assert machine.settled == {}
    # Repeated, as by a host that asks again.
    tell(machine, reached(B, mine=1), now=2.0)
    assert machine.settled == {}
    tell(machine, reached(A, mine=0), now=3.0)
    assert machine.settled == {(0, "evaluated"): False}
    assert [p["mine"] for p in seen[0]] == [0, 1]
    # After it is settled, a repeat adds nothing.
    ignores(machine, reached(B, mine=1), now=4.0)
    ignores(machine, reached(A, mine=0, last=True), now=4.0)
    assert len(machine.history) == 1


def test_the_first_phase_of_a_barrier_makes_no_record_and_stops_nothing():
    machine = job(State.RUNNING)
    tell(machine, reached(A, phase="trained", last=True), reached(B, phase="trained"))
    assert machine.settled == {(0, "trained"): False}
    assert machine.history == []
    assert machine.state is State.RUNNING


# -- the ways to failure -----------------------------------------------------------------------


def test_the_prepare_deadline_names_the_hosts_that_are_not_ready():
    machine = job(State.PREPARING)
    tell(machine, HostReady(1, A))
    ignores(machine, Tick(), now=29.9)
    assert machine.handle(Tick(), 30.0) == [Stop((A, B, C), machine.outcome.failure.message)]
    assert machine.outcome.state is State.FAILED
    failure = machine.outcome.failure
    assert failure.reason == "DEADLINE"
    assert failure.message == (
        "after 30 s these workers are not ready: worker bert (b:1), worker c:1; "
        "are their threads busy with other tasks?"
    )


def test_the_deadline_is_no_longer_watched_once_all_are_ready():
    ignores(job(State.RUNNING), Tick(), now=1e6)


def test_a_hosts_failure_stops_the_others_and_is_the_jobs_reason():
    machine = job(State.RUNNING)
    assert machine.handle(failed(), 1.0) == [Stop((A, B, C), "KeyError: 'x'")]
    assert machine.state is State.STOPPING
    # What follows from it is not the reason.
    tell(machine, failed(A, "WORKERS_LOST", "peer closed"), HostDone(1, B), WorkerLost(A), now=2.0)
    assert machine.handle(HostDone(1, C), 3.0) == [End(State.FAILED)]
    assert machine.outcome.failure == Failure("USER_ERROR", "KeyError: 'x'")
    assert machine.story[-1][2] == "KeyError: 'x'"


@pytest.mark.parametrize("state", [State.PREPARING, State.RUNNING])
def test_a_lost_worker_is_named_with_its_replicas_and_shards(state):
    machine = job(state)
    (stop,) = machine.handle(WorkerLost(B), 1.0)
    failure = machine.outcome.failure
    assert failure.reason == "WORKERS_LOST"
    assert failure.message == "worker bert (b:1) is gone; it had replicas [1, 2] and shards []"
    assert stop == Stop((A, C), failure.message)
    assert machine.lost == [B]
    # It is not waited for, and it is lost once.
    ignores(machine, WorkerLost(B), now=2.0)
    assert machine.waiting() == [CHIEF, SHARDS]
    assert tell(machine, HostDone(1, A), HostDone(1, C)) == [End(State.FAILED)]


def test_a_worker_without_a_part_in_the_job_may_go():
    for state in LIVE:
        ignores(job(state), WorkerLost("x:1"))


def test_all_workers_lost_ends_the_job_at_once():
    machine = job(State.RUNNING)
    commands = tell(machine, WorkerLost(A), WorkerLost(B), WorkerLost(C))
    assert [type(c) for c in commands] == [Stop, End]
    assert machine.state is State.FAILED
    assert machine.lost == [A, B, C]
    assert machine.outcome.failure.message.startswith("worker anna (a:1) is gone")


@pytest.mark.parametrize("state", [State.PREPARING, State.RUNNING])
def test_a_task_that_returns_early_is_a_failure_that_names_it(state):
    machine = job(state)
    (stop,) = machine.handle(HostDone(1, B), 1.0)
    assert stop.addresses == (A, C)
    assert machine.outcome.failure.reason == "CONTROLLER"
    assert "the task of worker bert (b:1) returned before" in machine.outcome.failure.message


def test_of_one_host_alone_an_early_return_ends_the_job():
    machine = JobMachine("j1", LIMITS, 0.0, record)
    tell(machine, Launched((CHIEF,)))
    assert machine.handle(HostDone(1, A), 1.0) == [End(State.FAILED)]


def test_who_does_not_stop_within_the_grace_time_is_named_and_not_waited_for():
    machine = job(State.RUNNING)
    tell(machine, failed(), HostDone(1, A), now=5.0)
    ignores(machine, Tick(), now=14.9)
    assert machine.handle(Tick(), 15.0) == [End(State.FAILED)]
    assert machine.story[-1][2] == (
        "KeyError: 'x'; still in user code: worker bert (b:1), worker c:1"
    )
    assert machine.outcome.failure.message == "KeyError: 'x'"


# -- success that is not there yet -------------------------------------------------------------


def test_the_grace_time_never_cuts_the_chief_off_from_writing_the_result():
    machine = succeeding()
    tell(machine, HostDone(1, B), HostDone(1, C))
    ignores(machine, Tick(), now=1e6)
    assert machine.handle(HostDone(1, A), 1e6 + 1) == [End(State.SUCCEEDED)]


def test_others_are_not_waited_for_once_the_chief_is_done():
    machine = succeeding()
    tell(machine, HostDone(1, A), now=1.0)
    ignores(machine, Tick(), now=9.0)
    assert machine.handle(Tick(), 10.0) == [End(State.SUCCEEDED)]
    assert machine.story[-1][2] == "done; still in user code: worker bert (b:1), worker c:1"


def test_a_worker_lost_after_the_last_barrier_matters_only_if_it_is_the_chief():
    machine = succeeding()
    assert tell(machine, WorkerLost(B), WorkerLost(C)) == []
    assert machine.handle(HostDone(1, A), 1.0) == [End(State.SUCCEEDED)]
    machine = succeeding()
    (stop,) = machine.handle(WorkerLost(A), 1.0)
    assert stop.addresses == (B, C)
    assert machine.outcome.failure.reason == "WORKERS_LOST"
    assert machine.outcome.failure.message == (
        "worker anna (a:1) is gone; it had replicas [0] and shards [0]"
    )
    assert tell(machine, HostDone(1, B), HostDone(1, C)) == [End(State.FAILED)]


def test_the_result_dies_with_the_chief_also_once_its_task_has_returned():
    machine = succeeding()
    tell(machine, HostDone(1, A))
    tell(machine, WorkerLost(A))
    assert tell(machine, HostDone(1, B), HostDone(1, C)) == [End(State.FAILED)]
    assert machine.outcome.failure.reason == "WORKERS_LOST"


def test_the_others_may_go_once_their_tasks_have_returned():
    machine = succeeding()
    tell(machine, HostDone(1, B), WorkerLost(B))
    assert tell(machine, HostDone(1, A), HostDone(1, C)) == [End(State.SUCCEEDED)]


def test_a_failure_after_the_last_barrier_is_a_failure():
    machine = succeeding()
    tell(machine, HostDone(1, B), HostDone(1, C))
    assert machine.handle(failed(A, "STORAGE", "disk full"), 1.0) == [Stop((A,), "disk full")]
    assert machine.handle(HostDone(1, A), 2.0) == [End(State.FAILED)]
    assert machine.outcome.failure == Failure("STORAGE", "disk full")


def test_the_grace_time_of_such_a_failure_begins_with_it():
    machine = succeeding(now=0.0)
    # The chief writes for longer than the grace time, then fails and is about to return.
    ignores(machine, Tick(), now=50.0)
    tell(machine, failed(A, "STORAGE", "disk full"), now=50.0)
    ignores(machine, Tick(), now=59.9)
    assert machine.handle(Tick(), 60.0) == [End(State.FAILED)]


def test_a_cancel_after_the_last_barrier_is_too_late():
    machine = succeeding()
    ignores(machine, Cancel("too late"))
    tell(machine, ClientGone())
    assert machine.handle(Tick(), 1e6) == []
    assert tell(machine, *(HostDone(1, a) for a in (A, B, C))) == [End(State.SUCCEEDED)]


# -- cancel, and clients -----------------------------------------------------------------------


def test_a_cancel_before_the_launch_ends_the_job_at_once():
    machine = job(State.QUEUED)
    assert machine.handle(Cancel("no"), 1.0) == [End(State.CANCELLED)]
    assert [state for _, state, _ in machine.story] == [
        State.QUEUED,
        State.STOPPING,
        State.CANCELLED,
    ]


@pytest.mark.parametrize("state", [State.PREPARING, State.RUNNING])
def test_a_cancel_stops_the_hosts_and_its_why_is_kept(state):
    machine = job(state)
    assert machine.handle(Cancel("wrong data"), 1.0) == [Stop((A, B, C), "wrong data")]
    ignores(machine, Cancel("again"))
    tell(machine, failed(B, "WORKERS_LOST", "peer closed"), HostDone(1, A), HostDone(1, B), now=2.0)
    assert machine.handle(HostDone(1, C), 3.0) == [End(State.CANCELLED)]
    assert machine.outcome.failure == Failure("CANCELLED", "wrong data")


@pytest.mark.parametrize("state", [State.QUEUED, State.PREPARING, State.RUNNING])
def test_a_client_that_does_not_return_within_its_lease_cancels(state):
    machine = job(state)
    machine.limits = replace(LIMITS, prepare_deadline=1e9)
    assert machine.handle(ClientGone(), 100.0) == []
    assert machine.lease == 160.0
    ignores(machine, Tick(), now=159.9)
    machine.handle(Tick(), 160.0)
    assert machine.outcome.state is State.CANCELLED
    assert machine.outcome.failure.message == "its client went away"


def test_a_client_that_returns_in_time_changes_nothing():
    machine = job(State.RUNNING)
    before = state_of(machine)
    tell(machine, ClientGone(), now=100.0)
    tell(machine, ClientBack(), now=159.0)
    assert state_of(machine) == before
    ignores(machine, Tick(), now=1e6)


# -- whatever comes ----------------------------------------------------------------------------

spots = st.sampled_from([A, B, C, "x:1"])
epochs = st.integers(0, 2)
events = st.one_of(
    st.just(Launched(HOSTS)),
    st.builds(HostReady, st.just(1), spots),
    st.builds(HostReady, st.sampled_from([0, 2]), spots),
    st.builds(
        reached, spots, epochs, st.sampled_from(["trained", "evaluated"]), last=st.booleans()
    ),
    st.builds(failed, spots),
    st.builds(HostDone, st.just(1), spots),
    st.builds(WorkerLost, spots),
    st.builds(Cancel, st.just("no")),
    st.just(ClientGone()),
    st.just(ClientBack()),
    st.just(Tick()),
)
#: Beginnings without which chance would rarely come far.
beginnings = st.sampled_from(
    [
        [],
        [Launched(HOSTS)],
        [Launched(HOSTS), *(HostReady(1, h.address) for h in HOSTS)],
        [
            Launched(HOSTS),
            *(HostReady(1, h.address) for h in HOSTS),
            reached(A, last=True),
            reached(B),
        ],
    ]
)


def check(machine, commands, stopped):
    """What holds after every event."""
    states = [state for _, state, _ in machine.story]
    assert all(after in TRANSITIONS[before] for before, after in pairwise(states))
    assert states[-1] is machine.state
    times = [now for now, _, _ in machine.story]
    assert times == sorted(times)
    assert (machine.outcome is not None) == (machine.state is State.STOPPING or machine.terminal)
    if machine.terminal:
        assert machine.outcome.state is machine.state
        assert (machine.outcome.failure is None) == (machine.state is State.SUCCEEDED)
    for command in commands:
        if isinstance(command, Stop):
            assert command.addresses
            assert not set(command.addresses) & machine.done
            stopped.update(command.addresses)
    if machine.outcome is not None and machine.outcome.state is not State.SUCCEEDED:
        # Whoever has not returned has been told to stop.
        assert {h.address for h in machine.hosts} - machine.done <= stopped
    assert [r["epoch"] for r in machine.history] == [
        epoch + 1 for epoch, phase in machine.settled if phase == "evaluated"
    ]
    assert not set(machine.reached) & set(machine.settled)


@settings(max_examples=300, deadline=None)
@given(beginnings, st.lists(st.tuples(events, st.sampled_from([0.0, 1.0, 20.0])), max_size=40))
def test_any_sequence_of_events_ends_once_and_for_all(beginning, more):
    machine = JobMachine("j1", LIMITS, 0.0, record)
    now, ends, stopped, end = 0.0, 0, set(), None
    for event, passed in [*((event, 0.0) for event in beginning), *more]:
        now += passed
        before = state_of(machine)
        try:
            commands = machine.handle(event, now)
        except DTrainError:
            assert state_of(machine) == before, f"{event} was refused and changed the job"
            continue
        if end is not None:
            assert commands == []
            assert state_of(machine) == before == end
            continue
        ends += sum(isinstance(command, End) for command in commands)
        assert ends == machine.terminal
        check(machine, commands, stopped)
        if machine.terminal:
            end = state_of(machine)
    # However it stands, it can be brought to its end.
    tell(machine, Cancel("enough"), *(WorkerLost(h.address) for h in machine.hosts), now=now)
    assert machine.terminal
