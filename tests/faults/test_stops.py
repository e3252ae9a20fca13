"""Processes that are stopped, hang, or only seem to."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

import dtrain
from tests.conftest import processes as children
from tests.conftest import until
from tests.runtime.conftest import processes

from .harness import (
    Fault,
    Paced,
    arm,
    finished,
    hold_gil,
    once,
    paced,
    reference,
    run,
    same,
    struck,
    submit,
    told,
    watch,
)
from .test_kills import PASSES, matrix

pytestmark = pytest.mark.cluster


@contextmanager
def woken(folder):
    """Nobody stays stopped, whatever becomes of the test."""
    try:
        yield
    finally:
        for one in struck(folder):
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGCONT)


@contextmanager
def holding(path):
    """A job with this file goes on slowly until the block is over."""
    path.write_text("")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def fenced(handle):
    return any("is stopped" in e["message"] for e in handle.events())


def used_again(handle):
    return any("can go on with more workers" in e["message"] for e in handle.events())


def settled(handle):
    """It runs, after all that has happened to it so far."""
    return handle.state == "RUNNING"


def stop_and_wake(client, folder, fault, **changes):
    """Stopped, fenced, woken, and used again while the job is still there.

    Three replicas: with one worker less one of them does the work of two.
    """
    changes = {"replicas": 3, **changes}
    with holding(folder / "hold") as hold, woken(folder):
        arm(client, folder, fault)
        handle = submit(client, paced(hold=hold), **changes)
        seen = watch(handle, lambda: fenced(handle) and settled(handle))
        assert handle.status()["state"] == "RUNNING", told(handle)
        (blow,) = struck(folder)
        os.kill(blow.pid, signal.SIGCONT)
        watch(handle, lambda: used_again(handle) and settled(handle), 30, seen)
        hold.unlink()
        return finished(handle, seen), blow


STOPS = [pair for pair in PASSES if pair[1] in ("writing", "applying", "flipping", "waiting")]


@pytest.mark.parametrize(("role", "point"), matrix(STOPS, [("chief", "flipping")]))
def test_a_stopped_process_is_fenced_and_does_no_harm(three, tmp_path, role, point):
    """It wakes up in the middle of a step that others have long done; then it is used again."""
    nth = 3 if point == "applying" else 9
    story, blow = stop_and_wake(three, tmp_path, Fault(point, role, "SIGSTOP", nth))
    same(story, replicas=3)
    assert story.status["losses"] == len(story.losses) == 1
    assert not story.said("from (start|checkpoint)")
    (loss,) = story.losses
    assert "its process is stopped" in loss["message"]
    noticed = loss["time"] - blow.at
    print(f"fenced after {noticed:.2f} s")
    assert noticed < 5
    # The very process: nobody has had to start it again.
    assert blow.pid in three.run(os.getpid).values()


@pytest.mark.parametrize("role", ["chief", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_stopped_process_in_asynchronous_mode(three, tmp_path, role):
    fault = Fault("writing", role, "SIGSTOP")
    story, _ = stop_and_wake(three, tmp_path, fault, mode=dtrain.Async(), epochs=8)
    ledger, whole = story.result.ledger, reference(replicas=3, epochs=8).ledger
    assert ledger.applied + ledger.duplicates >= whole.applied, ledger
    assert all(a >= b for a, b in zip(ledger.samples, whole.samples, strict=True)), ledger


@pytest.mark.slow
@pytest.mark.parametrize("role", ["chief", "host", "plain"])
def test_a_stopped_process_where_memory_is_not_shared(apart, tmp_path, role):
    """Its late messages belong to another generation, and are refused."""
    folder = tmp_path / "faults"
    folder.mkdir()
    kept = dtrain.Checkpoint(tmp_path / "saved", every=4)
    story, _ = stop_and_wake(apart, folder, Fault("writing", role, "SIGSTOP"), checkpoint=kept)
    same(story, replicas=3)
    assert story.status["losses"] == 1


@pytest.mark.slow
def test_all_are_stopped_and_wake_up(three, tmp_path):
    """Nobody is left to go on with; that is waited for."""
    with woken(tmp_path):
        arm(three, tmp_path, Fault("waiting", "chief", "SIGSTOP", with_it=2))
        handle = submit(three)
        seen = watch(handle, lambda: handle.status()["losses"] == 3)
        for pid in stopped():
            os.kill(pid, signal.SIGCONT)
        same(finished(handle, seen))


def stopped():
    """Our children that are stopped."""
    children = psutil.Process().children(recursive=True)
    return [p.pid for p in children if p.status() == psutil.STATUS_STOPPED]


def test_the_step_in_the_status_does_not_go_back(three, tmp_path):
    """People see it, and nothing was lost."""
    with holding(tmp_path / "hold") as hold:
        handle = submit(three, paced(hold=hold))
        seen = watch(handle, lambda: handle.status()["step"] > 2)
        victim = handle.status()["replicas"]["2"]
        os.kill(three.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
        watch(handle, lambda: handle.status()["generation"] == 2 and settled(handle), 30, seen)
        seen.append((time.time(), 2, handle.status()["step"]))
        hold.unlink()
        finished(handle, seen)
        steps = [step for _, _, step in seen]
        assert steps == sorted(steps), steps


class Greedy(Paced):
    """Holds the GIL for longer than any lease, once."""

    def pause(self, batch):
        if once(self.hold):
            hold_gil(6)


def test_a_call_that_holds_the_gil_is_slow_not_dead(three, tmp_path):
    began = time.monotonic()
    story = run(three, paced(Greedy, hold=tmp_path / "held"))
    assert time.monotonic() - began > 6
    same(story)
    assert story.status["losses"] == 0
    assert story.status["generation"] == 1


@pytest.mark.slow
def test_a_call_that_holds_the_gil_where_memory_is_not_shared(apart, tmp_path):
    story = run(apart, paced(Greedy, hold=tmp_path / "held"))
    same(story)
    assert (story.status["losses"], story.status["generation"]) == (0, 1)


class Hangs(Paced):
    """Does not come back, once, after a good start."""

    calls = 0

    def pause(self, batch):
        self.calls += 1
        time.sleep(self.pace)
        if self.calls == 20 and once(self.hold):
            time.sleep(600)


def test_user_code_that_hangs_is_given_up_and_its_worker_started_anew(tmp_path):
    with processes(2, **{"dtrain.progress-deadline": "2s", "dtrain.stop-grace": "1s"}) as client:
        before = children()
        story = run(client, paced(Hangs, hold=tmp_path / "hung"))
        same(story)
        assert story.said("has been in user code for [0-9]+ s, with replica")
        assert story.status["losses"] == 1
        until(lambda: len(children() - before) == 1, 40, "not started anew")
