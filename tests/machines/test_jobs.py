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
    POISON,
    TERMINAL,
    TRANSITIONS,
    Cancel,
    Change,
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
    Noted,
    Origin,
    Place,
    Reached,
    Restored,
    State,
    Stop,
    Tick,
    WorkerLost,
    lead_shard,
)
from dtrain.machines.ledger import Ledger
from dtrain.messages import Batch, Failure
from tests.machines.helpers import ignores, refuses
from tests.sim import state_of

LIMITS = Limits(
    prepare_deadline=30.0,
    stop_grace=10.0,
    client_lease=60.0,
    max_losses=4,
    min_workers=2,
    recovery_deadline=100.0,
)
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


def reached(address, epoch=0, phase="evaluated", generation=1, **payload):
    if address == A:
        payload.setdefault("ledger", LEDGER)
    return Reached(generation, address, epoch, phase, {"epoch": epoch, **payload})


def failed(address=B, reason="USER_ERROR", message="KeyError: 'x'"):
    return HostFailed(1, address, Failure(reason, message))


def tell(machine, *events, now=0.0):
    """Handle events one after the other; returns all commands."""
    return [command for event in events for command in machine.handle(event, now)]


def opened(machine):
    """Events: all hosts of the generation have opened their memory."""
    return [reached(h.address, 0, "opened", machine.generation) for h in machine.hosts]


def job(state=State.QUEUED, now=0.0):
    """A job in a state; STOPPING: about to be FAILED; RECOVERING: without hosts, generation 2.

    One that is RUNNING has opened, and so had those that came after it.
    """
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
    tell(machine, *opened(machine), now=now)
    if state is State.RUNNING:
        return machine
    if state is State.RECOVERING:
        tell(machine, Change("a wish"), now=now)
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
        "PREPARING": {"RUNNING", "RECOVERING", "STOPPING"},
        "RUNNING": {"RECOVERING", "STOPPING"},
        "RECOVERING": {"RUNNING", "STOPPING"},
        "STOPPING": {"RECOVERING", "SUCCEEDED", "FAILED", "CANCELLED"},
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
    *(
        (state, Launched(HOSTS), "launched while")
        for state in LIVE
        if state not in (State.QUEUED, State.RECOVERING)
    ),
    *(
        (state, event, "is not one of its hosts")
        for state in LIVE
        if state is not State.RECOVERING
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
@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("event", [HostReady(1, A), reached(A), failed(A), HostDone(1, A)])
def test_another_generation_is_fenced_in_every_state(state, more, event):
    machine = job(state)
    other = replace(event, generation=machine.generation + more)
    match = f"of generation {other.generation}, expected {machine.generation}"
    refuses(machine, other, FencedError, match=match)


EVERY = [
    Launched(HOSTS),
    HostReady(1, A),
    reached(A, last=True),
    failed(A),
    HostDone(1, A),
    WorkerLost(A),
    Change("a wish"),
    Noted(1, "a checkpoint is written", 3),
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
    assert machine.settled[0, "trained"] is False
    assert machine.history == []
    assert machine.state is State.RUNNING


# -- the ways to failure -----------------------------------------------------------------------


def test_the_prepare_deadline_names_the_hosts_that_are_not_ready():
    machine = job(State.PREPARING)
    tell(machine, HostReady(1, A))
    ignores(machine, Tick(), now=29.9)
    (stop,) = machine.handle(Tick(), 30.0)
    assert stop == Stop((A, B, C), 1, machine.outcome.failure.message, over=True)
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
    assert machine.handle(failed(), 1.0) == [Stop((A, B, C), 1, "KeyError: 'x'", over=True)]
    assert machine.state is State.STOPPING
    # What follows from it is not the reason.
    tell(machine, failed(A, "WORKERS_LOST", "peer closed"), HostDone(1, B), WorkerLost(A), now=2.0)
    assert machine.handle(HostDone(1, C), 3.0) == [End(State.FAILED)]
    assert machine.outcome.failure == Failure("USER_ERROR", "KeyError: 'x'")
    assert machine.story[-1][2] == "KeyError: 'x'"


def test_a_worker_without_a_part_in_the_job_may_go():
    for state in LIVE:
        ignores(job(state), WorkerLost("x:1"))


@pytest.mark.parametrize("state", [State.PREPARING, State.RUNNING])
def test_a_task_that_returns_early_is_a_loss_that_names_it(state):
    """Its worker is closing, say; the others go on."""
    machine = job(state)
    stop, place = machine.handle(HostDone(1, B), 1.0)
    assert stop.addresses == (A, C)
    assert place == Place()
    assert machine.losses == 1
    assert "the task of worker bert (b:1) returned before" in machine.story[-1][2]


def test_tasks_that_return_early_again_and_again_end_the_job():
    machine = JobMachine("j1", replace(LIMITS, max_losses=0), 0.0, record)
    tell(machine, Launched((CHIEF,)))
    assert machine.handle(HostDone(1, A), 1.0) == [End(State.FAILED)]
    assert machine.outcome.failure.reason == "WORKERS_LOST"


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


def test_others_may_die_after_the_last_barrier():
    machine = succeeding()
    assert tell(machine, WorkerLost(B), WorkerLost(C)) == []
    assert machine.handle(HostDone(1, A), 1.0) == [End(State.SUCCEEDED)]
    assert machine.losses == 0


def test_the_others_may_go_once_their_tasks_have_returned():
    machine = succeeding()
    tell(machine, HostDone(1, B), WorkerLost(B))
    assert tell(machine, HostDone(1, A), HostDone(1, C)) == [End(State.SUCCEEDED)]


def test_a_failure_after_the_last_barrier_is_a_failure():
    machine = succeeding()
    tell(machine, HostDone(1, B), HostDone(1, C))
    assert machine.handle(failed(A, "STORAGE", "disk full"), 1.0) == [
        Stop((A,), 1, "disk full", over=True)
    ]
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
    assert machine.handle(Cancel("wrong data"), 1.0) == [
        Stop((A, B, C), 1, "wrong data", over=True)
    ]
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


# -- generations -------------------------------------------------------------------------------

#: The hosts of a second generation: one that is left, and one that has come.
NEW = (HostPlan("b:1", "bert", (0, 1), (0,)), HostPlan("d:1", "dora", (2,), (1,)))
D = "d:1"
RECORD = {"epoch": 1, "samples": 8, "of": 2}


def ready(machine, restored=None, shared=False, meeting=None):
    """Events: all hosts of the generation are ready, the chief with what it has found."""
    chief, *others = machine.hosts
    found = restored or Restored(0, "memory" if machine.origin else "start")
    number = machine.generation
    return [
        HostReady(number, chief.address, shared, found, meeting),
        *(HostReady(number, h.address, shared) for h in others),
    ]


def runs(machine, restored=None, hosts=NEW, now=0.0, **how):
    """The next generation of a job that is placing, up to its running: nobody has opened."""
    assert machine.placing
    tell(machine, Launched(hosts), now=now)
    return tell(machine, *ready(machine, restored, **how), now=now)


def again(machine, restored=None, hosts=NEW, now=0.0, **how):
    """The next generation of a job that is placing, until all have opened."""
    commands = runs(machine, restored, hosts, now, **how)
    return commands + tell(machine, *opened(machine), now=now)


@pytest.mark.parametrize("state", [State.PREPARING, State.RUNNING])
def test_a_lost_worker_begins_a_generation_and_is_named_with_its_work(state):
    machine = job(state)
    words = "worker bert (b:1) is gone; it had replicas [1, 2] and shards []"
    assert machine.handle(WorkerLost(B), 1.0) == [Stop((A, C), 1, words, over=False), Place()]
    assert machine.state is State.RECOVERING
    assert machine.story[-1] == (1.0, State.RECOVERING, words)
    assert (machine.generation, machine.losses) == (2, 1)
    assert machine.placing
    assert machine.waiting() == []
    assert not machine.shared
    # It is lost once, and nobody of the old generation is heard.
    ignores(machine, WorkerLost(B), now=2.0)
    for event in (HostReady(1, A), reached(A), failed(A), HostDone(1, A)):
        refuses(machine, event, FencedError, match="of generation 1, expected 2")
    assert machine.handle(Launched(NEW), 3.0) == [Launch(NEW)]
    assert not machine.placing
    assert machine.waiting() == list(NEW)
    assert machine.story[-1] == (3.0, State.RECOVERING, "generation 2 on 2 workers")
    refuses(machine, Launched(NEW), match="launched while RECOVERING")
    assert tell(machine, *ready(machine), now=4.0) == []
    assert machine.state is State.RUNNING


def test_why_a_worker_was_fenced_is_told():
    machine = job(State.RUNNING)
    machine.handle(WorkerLost(B, "has not been heard of for 6.0 s"), 1.0)
    assert machine.story[-1][2].startswith("worker bert (b:1) has not been heard of for 6.0 s; it")


def test_a_wish_begins_a_generation_that_costs_no_loss():
    machine = job(State.RUNNING)
    commands = machine.handle(Change("worker d:1 has joined"), 1.0)
    assert commands == [Stop((A, B, C), 1, "worker d:1 has joined", over=False), Place()]
    assert (machine.generation, machine.losses) == (2, 0)
    assert machine.origin == Origin(1, HOSTS)
    again(machine)
    assert machine.state is State.RUNNING
    assert machine.origin == Origin(2, NEW)


def test_a_wish_while_others_get_ready_begins_anew():
    machine = job(State.RECOVERING)
    tell(machine, Launched(NEW), now=5.0)
    stop, place = machine.handle(Change("another wish"), 6.0)
    assert (stop.addresses, stop.generation, place) == ((B, D), 2, Place())
    assert machine.generation == 3


def test_a_wish_while_workers_are_missing_does_not_put_off_the_deadline():
    machine = job(State.RECOVERING)
    for now in range(0, 100, 10):
        assert machine.handle(Change("worker d:1 has joined"), float(now)) == [Place()]
    assert machine.generation == 2
    assert machine.handle(Tick(), 100.0) == [End(State.FAILED)]
    assert machine.outcome.failure.reason == "WORKERS_LOST"


@pytest.mark.parametrize("state", [State.QUEUED, State.STOPPING])
def test_a_wish_before_the_launch_or_at_the_end_changes_nothing(state):
    ignores(job(state), Change("a wish"))


def test_place_is_repeated_until_there_are_workers_or_the_deadline_has_come():
    machine = job(State.RUNNING)
    machine.handle(WorkerLost(B), 10.0)
    for now in (11.0, 50.0, 109.9):
        before = state_of(machine)
        assert machine.handle(Tick(), now) == [Place()]
        assert state_of(machine) == before
    assert machine.handle(Tick(), 110.0) == [End(State.FAILED)]
    assert machine.outcome.failure == Failure(
        "WORKERS_LOST",
        "after 100 s there are fewer than 2 workers that can go on; "
        "worker bert (b:1) is gone; it had replicas [1, 2] and shards []",
    )
    # Through STOPPING, like every end.
    assert [state for _, state, _ in machine.story[-2:]] == [State.STOPPING, State.FAILED]


def test_a_new_generation_has_the_time_of_a_first_one_to_get_ready():
    machine = job(State.RECOVERING)
    tell(machine, Launched(NEW), now=90.0)
    tell(machine, HostReady(2, B), now=95.0)
    ignores(machine, Tick(), now=119.9)
    (stop,) = machine.handle(Tick(), 120.0)
    assert stop == Stop((B, D), 2, machine.outcome.failure.message, over=True)
    assert machine.outcome.failure.reason == "DEADLINE"
    assert "these workers are not ready: worker dora (d:1)" in machine.outcome.failure.message


def test_workers_that_are_missing_once_more_are_waited_for_anew():
    machine = job(State.RECOVERING)
    tell(machine, Launched(NEW), now=10.0)
    machine.handle(WorkerLost(D), 20.0)
    assert machine.handle(Tick(), 119.9) == [Place()]
    assert machine.handle(Tick(), 120.0) == [End(State.FAILED)]


def test_more_losses_than_may_be_are_a_failure_that_says_so():
    machine = job(State.RUNNING)
    for number in range(1, LIMITS.max_losses + 1):
        victim = machine.hosts[0].address
        commands = machine.handle(WorkerLost(victim), float(number))
        assert [type(c) for c in commands] == [Stop, Place]
        assert machine.losses == number
        again(machine, now=float(number))
        # A wish is none.
        machine.handle(Change("a wish"), float(number))
        again(machine, now=float(number))
    (stop,) = machine.handle(WorkerLost(D), 9.0)
    assert (stop.addresses, stop.over) == ((B,), True)
    assert machine.outcome.failure.reason == "WORKERS_LOST"
    assert machine.outcome.failure.message.endswith("; that is loss 5, expected at most 4")
    assert machine.handle(HostDone(machine.generation, B), 9.5) == [End(State.FAILED)]


def test_the_last_worker_of_a_budget_ends_the_job_at_once():
    machine = JobMachine("j1", replace(LIMITS, max_losses=0), 0.0, record)
    tell(machine, Launched((CHIEF,)), HostReady(1, A))
    assert machine.handle(WorkerLost(A), 1.0) == [End(State.FAILED)]
    assert "that is loss 1, expected at most 0" in machine.story[-1][2]


def test_a_host_that_cannot_reach_another_is_a_loss_too():
    machine = job(State.RUNNING)
    stop, place = machine.handle(failed(A, "WORKERS_LOST", "cannot reach b:1"), 1.0)
    # Also the one that has said so is told to leave.
    assert stop == Stop((A, B, C), 1, "worker anna (a:1): cannot reach b:1", over=False)
    assert place == Place()
    assert machine.losses == 1


def test_several_deaths_begin_one_generation_each():
    machine = job(State.RUNNING)
    machine.handle(WorkerLost(A), 1.0)
    # The second is noticed before anybody is chosen, or when it was chosen again.
    ignores(machine, WorkerLost(B), now=1.1)
    tell(machine, Launched(NEW), now=1.2)
    stop, place = machine.handle(WorkerLost(B), 1.3)
    assert (stop.addresses, stop.generation, place) == ((D,), 2, Place())
    assert (machine.generation, machine.losses) == (3, 2)


@pytest.mark.parametrize("state", [State.PREPARING, State.RUNNING, State.RECOVERING])
def test_a_cancel_while_it_recovers_ends_it(state):
    machine = job(state)
    machine.handle(Change("a wish"), 0.0)
    assert machine.handle(Cancel("no"), 1.0) == [End(State.CANCELLED)]
    machine = job(State.RECOVERING)
    tell(machine, Launched(NEW))
    assert machine.handle(Cancel("no"), 1.0) == [Stop((B, D), 2, "no", over=True)]
    assert tell(machine, HostDone(2, B), HostDone(2, D)) == [End(State.CANCELLED)]


def test_an_old_generations_word_cannot_end_a_job():
    machine = job(State.RUNNING)
    machine.handle(WorkerLost(B), 1.0)
    again(machine)
    for event in (failed(A), HostDone(1, A), reached(A, last=True)):
        refuses(machine, event, FencedError)
    assert machine.state is State.RUNNING


# -- what a generation begins with -------------------------------------------------------------


def test_the_origin_is_the_newest_generation_that_has_opened():
    machine = job(State.PREPARING)
    machine.handle(WorkerLost(B), 0.0)
    assert machine.origin is None
    again(machine, shared=True, meeting="file 2")
    assert machine.origin == Origin(2, NEW, "file 2")
    machine.handle(WorkerLost(D), 1.0)
    assert machine.origin == Origin(2, NEW, "file 2", dead=(2,))
    # The third comes to nothing: its file has nothing that the second's has not.
    tell(machine, Launched(HOSTS), HostReady(3, A, True, Restored(4, "memory"), "file 3"))
    machine.handle(WorkerLost(C), 2.0)
    assert machine.origin == Origin(2, NEW, "file 2", dead=(2,))
    again(machine, shared=True, meeting="file 4")
    assert machine.origin == Origin(4, NEW, "file 4")


def test_memory_that_not_all_can_open_is_no_place_to_meet():
    machine = job(State.RECOVERING)
    tell(machine, Launched(NEW))
    tell(machine, HostReady(2, B, True, Restored(1, "memory"), "file"), HostReady(2, D, False))
    assert machine.state is State.RUNNING
    assert not machine.shared
    tell(machine, *opened(machine))
    assert machine.origin == Origin(2, NEW, None)


def test_only_the_chief_says_what_was_found_and_only_once():
    machine = job(State.RECOVERING)
    tell(machine, Launched(NEW))
    tell(machine, HostReady(2, D, restored=Restored(9, "start")))
    assert machine.restored is None
    tell(machine, HostReady(2, B, restored=Restored(7, "memory")))
    tell(machine, HostReady(2, B, restored=Restored(8, "memory")))
    assert machine.restored.step == 7
    told = [words for _, _, words in machine.story if "goes on" in words]
    assert told == ["goes on from step 7, from memory"]


def test_history_stays_true_where_memory_was_found():
    machine = job(State.RUNNING)
    tell(machine, reached(A), reached(B), now=2.0)
    history, ledger = list(machine.history), machine.ledger
    machine.handle(WorkerLost(C), 3.0)
    again(machine, Restored(3, "memory"))
    assert (machine.history, machine.ledger) == (history, ledger)


@pytest.mark.parametrize("source", ["checkpoint", "start"])
def test_a_rollback_takes_back_what_was_recorded_and_says_what_is_lost(source):
    machine = job(State.RUNNING)
    for epoch in range(3):
        tell(machine, reached(A, epoch), reached(B, epoch), now=1.0 + epoch)
    assert len(machine.history) == 3
    machine.handle(WorkerLost(C), 5.0)
    known = (RECORD,) if source == "checkpoint" else ()
    account = {**LEDGER, "applied": 1}
    again(machine, Restored(4, source, known, account, lost=5), now=6.0)
    assert machine.history == list(known)
    assert machine.ledger == account
    words = f"goes on from step 4, from {source}, 5 steps are lost"
    assert (6.0, State.RECOVERING, words) in machine.story
    # What comes next is recorded after it.
    epoch = len(known)
    tell(machine, reached(B, epoch, generation=2), reached(D, epoch, generation=2), now=7.0)
    assert [r["epoch"] for r in machine.history] == [*range(1, epoch + 1), epoch + 1]


def test_a_rollback_of_a_generation_that_never_ran_takes_nothing_back():
    """The next one may find the memory after all, and its history has to go with it."""
    machine = job(State.RUNNING)
    tell(machine, reached(A), reached(B), now=1.0)
    machine.handle(WorkerLost(C), 2.0)
    tell(machine, Launched(NEW), HostReady(2, B, restored=Restored(0, "start", lost=3)), now=3.0)
    machine.handle(WorkerLost(D), 4.0)
    again(machine, Restored(3, "memory"), hosts=HOSTS, now=5.0)
    assert machine.state is State.RUNNING
    assert [r["epoch"] for r in machine.history] == [1]


@pytest.mark.parametrize("source", ["memory", "checkpoint", "start"])
@pytest.mark.parametrize("some", [(), (B,), (D,)])
@pytest.mark.parametrize("end", [WorkerLost(D), Change("a wish"), failed(B, "WORKERS_LOST")])
def test_a_generation_that_dies_before_all_have_opened_leaves_things_as_they_were(
    source, some, end
):
    """The one before it still has the state, and what belongs to it."""
    machine = job(State.RUNNING)
    tell(machine, reached(A), reached(B), now=1.0)
    machine.handle(WorkerLost(B), 2.0)
    was = Origin(1, HOSTS, dead=SECOND.replicas), list(machine.history), machine.ledger
    assert (machine.origin, machine.history, machine.ledger) == was
    assert len(machine.history) == 1
    found = Restored(1, source, (), {**LEDGER, "replayed": 2}, lost=2)
    runs(machine, found, now=3.0, shared=True, meeting="file 2")
    tell(machine, *(reached(a, 0, "opened", 2) for a in some), now=4.0)
    assert machine.state is State.RUNNING
    assert (machine.origin, machine.history, machine.ledger) == was
    machine.handle(replace(end, generation=2) if isinstance(end, HostFailed) else end, 5.0)
    assert machine.placing
    # Also those who have died: they had nothing of that generation in user code.
    assert (machine.origin, machine.history, machine.ledger) == was
    # The next one opens, and only then is it the one that counts.
    runs(machine, Restored(3, "memory", ledger=LEDGER), HOSTS, now=6.0)
    assert (machine.origin, machine.history, machine.ledger) == was
    tell(machine, *opened(machine), now=7.0)
    assert machine.origin == Origin(3, HOSTS)
    assert (machine.history, machine.ledger) == (was[1], LEDGER)


def test_what_was_found_in_memory_is_taken_over_once_all_have_opened():
    machine = job(State.RUNNING)
    tell(machine, reached(A), reached(B), now=1.0)
    history = list(machine.history)
    machine.handle(WorkerLost(C), 2.0)
    account = {**LEDGER, "applied": 5, "replayed": 1}
    runs(machine, Restored(3, "memory", ledger=account), now=3.0)
    first, last = opened(machine)
    tell(machine, first, now=4.0)
    assert machine.ledger == LEDGER
    tell(machine, last, now=5.0)
    assert (machine.history, machine.ledger) == (history, account)
    # Once: a repeat is of a barrier that is settled.
    ignores(machine, first, now=6.0)


def test_a_first_generation_may_begin_from_a_checkpoint():
    machine = job(State.PREPARING)
    tell(machine, *ready(machine, Restored(4, "checkpoint", (RECORD,), LEDGER)), now=1.0)
    assert (machine.history, machine.ledger, machine.origin) == ([], None, None)
    tell(machine, *opened(machine), now=1.0)
    assert machine.history == [RECORD]
    assert machine.ledger == LEDGER
    assert "goes on from step 4, from checkpoint" in [words for _, _, words in machine.story]


def test_barriers_are_a_generations_own():
    machine = job(State.PREPARING)
    tell(machine, *ready(machine))
    tell(machine, reached(A, phase="opened"), reached(B, phase="opened"))
    assert machine.settled == {}
    tell(machine, reached(C, phase="opened"))
    assert machine.settled == {(0, "opened"): False}
    tell(machine, reached(A), now=1.0)
    machine.handle(WorkerLost(C), 2.0)
    assert (machine.settled, machine.reached) == ({}, {})
    again(machine)
    tell(machine, reached(B, generation=2), now=3.0)
    assert machine.history == []
    tell(machine, reached(D, generation=2), now=4.0)
    assert [r["epoch"] for r in machine.history] == [1]


def test_a_barrier_is_reached_only_while_it_runs():
    machine = job(State.RECOVERING)
    tell(machine, Launched(NEW))
    ignores(machine, reached(B, generation=2))


# -- the chief dies before it has handed over the result ---------------------------------------


@pytest.mark.parametrize("returned", [False, True])
def test_the_result_dies_with_the_chief_and_is_made_again(returned):
    machine = succeeding()
    history = list(machine.history)
    if returned:
        tell(machine, HostDone(1, A))
    left = (B, C)
    words = "worker anna (a:1) is gone; it had replicas [0] and shards [0]"
    commands = machine.handle(WorkerLost(A), 1.0)
    assert commands == [Stop(left, 1, words, over=False), Place()]
    assert machine.state is State.RECOVERING
    assert machine.outcome is None
    assert machine.losses == 1
    assert machine.history == history
    # It had nothing in user code: all was done.
    assert machine.origin == Origin(1, HOSTS, dead=CHIEF.replicas)
    again(machine, Restored(3, "memory"))
    tell(machine, reached(B, 1, "finished", generation=2), now=2.0)
    assert machine.state is State.RUNNING
    tell(machine, reached(D, 1, "finished", generation=2), now=2.0)
    assert machine.settled[1, "finished"] is True
    assert machine.state is State.STOPPING
    assert machine.history == history
    assert tell(machine, HostDone(2, D), HostDone(2, B)) == [End(State.SUCCEEDED)]


def test_the_chief_of_a_failing_job_may_die():
    machine = job(State.STOPPING)
    assert tell(machine, WorkerLost(A)) == []
    assert machine.state is State.STOPPING
    assert tell(machine, HostDone(1, B), HostDone(1, C)) == [End(State.FAILED)]
    assert machine.losses == 0


def test_a_chief_too_many_after_success_is_a_failure():
    machine = JobMachine("j1", replace(LIMITS, max_losses=0), 0.0, record)
    tell(machine, Launched(HOSTS), *(HostReady(1, h.address) for h in HOSTS))
    tell(machine, reached(A, last=True), reached(B))
    (stop,) = machine.handle(WorkerLost(A), 1.0)
    assert (stop.addresses, stop.over) == ((B, C), True)
    assert tell(machine, HostDone(1, B), HostDone(1, C)) == [End(State.FAILED)]
    assert machine.outcome.failure.reason == "WORKERS_LOST"


# -- poison ------------------------------------------------------------------------------------

BAD, GOOD = Batch(1, 2, 3), Batch(1, 0, 3)


def suspect(machine, *batches, victim=D):
    """A death with these batches in user code, and the next generation until it has opened."""
    machine.handle(WorkerLost(victim), 0.0)
    return again(machine, Restored(5, "memory", suspects=batches))


def test_the_same_batch_at_three_deaths_is_a_failure_that_names_it():
    machine = job(State.RECOVERING)
    again(machine)
    assert suspect(machine, BAD, GOOD) == []
    assert suspect(machine, BAD) == []
    assert machine.deaths == {BAD: 2, GOOD: 1}
    assert machine.state is State.RUNNING
    machine.handle(WorkerLost(D), 0.0)
    tell(machine, Launched(NEW))
    number = machine.generation
    found = HostReady(number, B, restored=Restored(5, "memory", suspects=(GOOD, BAD)))
    words = f"batch 3 of partition 2 in epoch 2 has killed its worker {POISON} times"
    assert machine.handle(found, 1.0) == [Stop((B, D), number, words, over=True)]
    assert machine.outcome.failure == Failure("DATA_ERROR", words)
    assert tell(machine, HostDone(number, B), HostDone(number, D)) == [End(State.FAILED)]


def test_a_suspect_counts_once_for_the_generation_that_it_ended():
    machine = job(State.RECOVERING)
    again(machine)
    machine.handle(WorkerLost(D), 0.0)
    for _ in range(3):
        # Each finds the same marks in the file of the last that opened, and comes to nothing.
        tell(machine, Launched(NEW))
        number = machine.generation
        tell(machine, HostReady(number, B, restored=Restored(5, "memory", suspects=(BAD,))))
        assert machine.deaths == {BAD: 1}
        machine.handle(Change("a wish"), 0.0)
    again(machine, Restored(5, "memory", suspects=(BAD,)))
    assert machine.deaths == {BAD: 1}
    # That one has opened: the next time is another.
    suspect(machine, BAD)
    assert machine.deaths == {BAD: 2}


def test_a_batch_that_came_through_is_still_remembered():
    """Deaths are not counted in a row: who kills one time in two is poison too."""
    machine = job(State.RECOVERING)
    again(machine)
    suspect(machine, BAD)
    suspect(machine, GOOD)
    suspect(machine, BAD)
    assert machine.deaths == {BAD: 2, GOOD: 1}


def test_what_is_to_be_remembered_is_told():
    machine = job(State.RUNNING)
    assert machine.handle(Noted(1, "no checkpoint: disk full"), 1.0) == []
    assert machine.story[-1] == (1.0, State.RUNNING, "no checkpoint: disk full")
    assert machine.saved is None
    machine.handle(Noted(1, "checkpoint at step 4", 4), 2.0)
    assert machine.saved == 4
    refuses(machine, Noted(2, "of another generation"), FencedError)


# -- whatever comes ----------------------------------------------------------------------------

spots = st.sampled_from([A, B, C, D, "x:1"])
epochs = st.integers(0, 2)
#: How far behind, or ahead, of the job's generation an event is; most are of it.
lags = st.sampled_from([0, 0, 0, 0, 0, -1, 1])
founds = st.one_of(
    st.none(),
    st.builds(
        Restored,
        st.integers(0, 9),
        st.sampled_from(["memory", "checkpoint", "start"]),
        ledger=st.sampled_from([None, LEDGER]),
        lost=st.integers(0, 3),
        suspects=st.sampled_from([(), (BAD,), (BAD, GOOD)]),
    ),
)
events = st.one_of(
    st.builds(Launched, st.sampled_from([HOSTS, NEW])),
    st.builds(HostReady, lags, spots, st.booleans(), founds),
    st.builds(
        reached,
        spots,
        epochs,
        st.sampled_from(["opened", "trained", "evaluated", "evaluated", "finished"]),
        lags,
        last=st.booleans(),
    ),
    st.builds(
        HostFailed,
        lags,
        spots,
        st.builds(Failure, st.sampled_from(["USER_ERROR", "WORKERS_LOST"]), st.just("no")),
    ),
    st.builds(HostDone, lags, spots),
    st.builds(WorkerLost, spots),
    st.builds(Change, st.just("a wish")),
    st.builds(Noted, lags, st.just("noted"), st.none()),
    st.builds(Cancel, st.just("no")),
    st.just(ClientGone()),
    st.just(ClientBack()),
    st.just(Tick()),
    # All that the present state waits for, which chance would rarely bring about.
    st.sampled_from(["ready", "opened", "epoch", "last", "finished", "done"]),
)


def at_hand(machine, event):
    """The events behind a word, and the generation of the job for a lag."""
    number = machine.generation
    if not isinstance(event, str):
        if hasattr(event, "generation"):
            event = replace(event, generation=number + event.generation)
        return [event]
    if event == "ready":
        if not machine.hosts:
            return [Launched(NEW)]
        return ready(machine)
    if event == "opened":
        return opened(machine)
    if event == "done":
        return [HostDone(number, h.address) for h in machine.hosts]
    training = [h.address for h in machine.hosts if h.replicas]
    epoch = len(machine.history)
    phase = event if event == "finished" else "evaluated"
    return [reached(a, epoch, phase, number, last=event == "last") for a in training]


def check(machine, was, event, commands, stopped):
    """What holds after every event."""
    states = [state for _, state, _ in machine.story]
    pairs = [(a, b) for a, b in pairwise(states) if a is not b]
    assert all(after in TRANSITIONS[before] for before, after in pairs)
    assert states[-1] is machine.state
    times = [now for now, _, _ in machine.story]
    assert times == sorted(times)
    assert (machine.outcome is not None) == (machine.state is State.STOPPING or machine.terminal)
    if machine.terminal:
        assert machine.outcome.state is machine.state
        assert (machine.outcome.failure is None) == (machine.state is State.SUCCEEDED)
    # A new generation has a reason, tells the old one, and asks for hosts.
    began = machine.generation - was["generation"]
    assert began in (0, 1)
    assert machine.losses - was["losses"] in (0, 1)
    if began:
        assert isinstance(event, WorkerLost | HostFailed | HostDone | Change)
        assert commands[-1] == Place()
        assert machine.placing
        assert [machine.ready, machine.done] == [set(), set()]
        assert [machine.reached, machine.settled] == [{}, {}]
        left = {h.address for h in was["hosts"]} - was["done"]
        if isinstance(event, WorkerLost | HostDone):
            left.discard(event.address)
        told = [a for c in commands if isinstance(c, Stop) for a in c.addresses]
        assert set(told) == left
    assert machine.placing or Place() not in commands
    assert machine.losses <= LIMITS.max_losses or machine.outcome is not None
    for command in commands:
        if isinstance(command, Stop):
            assert command.addresses
            assert command.generation == was["generation"]
            assert command.over == (machine.outcome is not None)
            stopped.update((command.generation, a) for a in command.addresses)
    if machine.outcome is not None and machine.outcome.state is not State.SUCCEEDED:
        # Whoever has not returned has been told to stop.
        left = {h.address for h in machine.hosts} - machine.done
        assert {(machine.generation, a) for a in left} <= stopped
    # What the job goes on from, and what is recorded, changes at a barrier of all alone.
    open_now = isinstance(event, Reached) and event.phase == "opened"
    if machine.origin is not None:
        assert machine.origin.generation <= machine.generation
        before = was["origin"]
        if before is None or before.generation != machine.origin.generation:
            assert open_now
            assert machine.origin == Origin(machine.generation, machine.hosts)
        elif before != machine.origin:
            assert isinstance(event, WorkerLost)
            assert before.generation == was["generation"]
    if (machine.history, machine.ledger) != (was["history"], was["ledger"]):
        assert open_now or (isinstance(event, Reached) and event.phase == "evaluated")
    assert max(machine.deaths.values(), default=0) <= POISON
    assert not set(machine.reached) & set(machine.settled)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 1.0, 20.0])), max_size=60))
def test_any_sequence_of_events_ends_once_and_for_all(more):
    machine = JobMachine("j1", LIMITS, 0.0, record)
    now, ends, stopped, end = 0.0, 0, set(), None
    for drawn, passed in more:
        now += passed
        for event in at_hand(machine, drawn):
            before = state_of(machine)
            if isinstance(event, HostReady) and event.restored and machine.origin is None:
                # Nobody can have been in user code yet.
                event = replace(event, restored=replace(event.restored, suspects=()))
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
            check(machine, before, event, commands, stopped)
            if machine.terminal:
                end = state_of(machine)
    # However it stands, it can be brought to its end.
    tell(machine, Cancel("enough"), now=now)
    for host in machine.hosts:
        machine.handle(HostDone(machine.generation, host.address), now)
    assert machine.terminal


# -- shards are placed by the chief --------------------------------------------------------------


def test_the_chief_says_who_has_which_shard():
    """They are known from then on: to the status, in the words of a loss, and where it goes on."""
    machine = JobMachine("j1", LIMITS, 0.0, record)
    bare = tuple(replace(host, shards=()) for host in HOSTS)
    tell(machine, Launched(bare), HostReady(1, B))
    assert [h.shards for h in machine.hosts] == [(), (), ()]
    begin = Restored(0, "start")
    tell(machine, HostReady(1, A, restored=begin, placed=(2, 0, 1, 0)), HostReady(1, C))
    placed = [(1, 3), (2,), (0,)]
    assert [h.shards for h in machine.hosts] == placed
    assert machine.host(C).shards == (0,)
    # Asked again, because the answer was late: nothing changes.
    tell(machine, HostReady(1, A, restored=begin, placed=(0, 0, 0, 0)))
    assert [h.shards for h in machine.hosts] == placed
    tell(machine, *opened(machine), WorkerLost(A))
    assert machine.story[-1][2].endswith("it had replicas [0] and shards [1, 3]")
    assert [h.shards for h in machine.origin.hosts] == placed
    assert lead_shard(machine.origin.hosts) == 1


def test_only_the_chief_places_shards():
    machine = JobMachine("j1", LIMITS, 0.0, record)
    tell(machine, Launched(HOSTS), HostReady(1, B, restored=Restored(0, "start"), placed=(1, 1)))
    assert machine.hosts == HOSTS
