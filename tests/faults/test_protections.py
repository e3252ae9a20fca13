"""Each protection matters: with it turned off, the check that it is for fails."""

from __future__ import annotations

import copy
import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import dtrain
from dtrain.cluster import install
from dtrain.machines.membership import Finding
from dtrain.runtime import process
from tests.runtime.conftest import processes

from .harness import (
    Fault,
    arm,
    check,
    finished,
    paced,
    reference,
    run,
    same,
    struck,
    submit,
    watch,
    whole_again,
)
from .test_limits import Poisoned, poison
from .test_stops import Greedy, fenced, holding, settled, woken

__all__ = ["poison"]  # a fixture

pytestmark = pytest.mark.cluster

#: In a worker: how to undo what was broken there.
_undo: list = []


def _put(owner, name, value):
    original = owner.__dict__[name]
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, original))


def _heal():
    while _undo:
        _undo.pop()()


@contextmanager
def broken(client, protection):
    """All worker processes without it; what was started anew has it again."""
    client.run(protection)
    try:
        yield
    finally:
        client.wait_for_workers(3, timeout=60)
        client.run(_heal)


def no_verdict():
    """The next generation takes the buffer that was being written."""
    from dtrain.runtime.transport.shmfile import Reader

    original = Reader._copy
    _put(Reader, "_copy", lambda self, state, piece, which: original(self, state, piece, 1 - which))


def no_mark():
    """Nobody knows which batch a dead process had in user code."""
    from dtrain.runtime.transport.shm import SharedArena

    _put(SharedArena, "mark", lambda self, replica, batch: None)


def no_return():
    """What a dead replica had in hand is not handed out again."""
    from dtrain.machines.cursor import Cursor

    _put(Cursor, "_give_back", lambda self, batch: None)


def no_fence():
    """Whoever was fenced, and wakes up, may still write checkpoints."""
    from dtrain.runtime.calls import Calls

    _put(Calls, "still_ours", lambda self: None)


def test_the_buffer_of_the_verdict(three, tmp_path):
    with broken(three, no_verdict):
        arm(three, tmp_path, Fault("applying", "plain", nth=3))
        story = run(three)
        assert story.status["losses"] == 1
        with pytest.raises(AssertionError, match="other bits"):
            same(story)


def test_the_mark_of_a_batch_in_user_code(three, poison):
    with broken(three, no_mark):
        model = paced(Poisoned, how=int(signal.SIGSEGV))
        few = dtrain.Recovery(max_losses=3)
        story = run(three, model, poison, shuffle=False, recovery=few)
        assert story.status["reason"] == "WORKERS_LOST"
        assert "has killed its worker" not in str(story)


def test_the_batches_that_come_back(three, tmp_path):
    with broken(three, no_return):
        arm(three, tmp_path, Fault("computing", "plain"))
        story = run(three, mode=dtrain.Async())
        assert story.result.ledger.applied < reference().ledger.applied


def test_the_look_at_the_process(three, tmp_path, monkeypatch):
    """Silence alone would fence a process that is only busy."""
    monkeypatch.setattr(process, "look", lambda known: Finding.STOPPED)
    story = run(three, paced(Greedy, hold=tmp_path / "held"))
    assert story.status["losses"] >= 1


@pytest.mark.parametrize("fence", [True, False])
def test_the_fence_before_a_checkpoint(three, tmp_path, fence):
    """A chief that was stopped in a save finds others in its place."""
    place, folder = tmp_path / "saved", tmp_path / "faults"
    folder.mkdir()
    protection = _heal if fence else no_fence
    with broken(three, protection), woken(folder), holding(tmp_path / "hold") as hold:
        arm(three, folder, Fault("saving", "chief", "SIGSTOP", nth=2))
        kept = dtrain.Checkpoint(place, every=4, keep=99)
        handle = submit(three, paced(pace=0.01, hold=hold), checkpoint=kept)
        seen = watch(handle, lambda: fenced(handle) and settled(handle))
        late = place / "step-00000008"
        assert not late.exists()
        (blow,) = struck(folder)
        os.kill(blow.pid, signal.SIGCONT)
        hold.unlink()
        same(finished(handle, seen))
        assert late.exists() is not fence


def test_the_move_before_a_retirement(tmp_path):
    with processes(2) as client:
        install(client)
        client.cluster.scheduler.extensions["dtrain"].retirement.undo()
        handle = submit(client, paced(pace=0.02))
        seen = watch(handle, lambda: handle.status()["step"] > 0)
        client.retire_workers([handle.status()["shards"]["1"]])
        assert finished(handle, seen).status["losses"] == 1


def doubled(story):
    story.events.append(story.events[-1])


def undone(story):
    at = story.events[-1]["time"]
    words = "goes on from step 1, from memory"
    story.events.insert(-1, {"time": at, "state": "STOPPING", "message": words})


def backwards(story):
    story.seen.append((0.0, 1, 0))


def unnamed(story):
    words = "somebody is gone; it had replicas [] and shards []"
    story.events.insert(-1, {"time": 0.0, "state": "STOPPING", "message": words})


def miscounted(story):
    story.result.ledger.applied += 1


def short(story):
    story.result.ledger.samples[1] -= 1


def spoilt(story):
    story.result.params["dense0.weight"][0, 0] = np.nan


@pytest.fixture(scope="module")
def sound(_three):
    whole_again(_three, 3)
    return run(_three)


@pytest.mark.parametrize("lie", [doubled, undone, backwards, unnamed, miscounted, short, spoilt])
def test_the_checks_are_not_blind(sound, lie):
    result = copy.deepcopy(sound.result)
    told = replace(sound, events=list(sound.events), seen=list(sound.seen), result=result)
    check(told)
    lie(told)
    with pytest.raises(AssertionError):
        check(told)
