"""Checkpoints under fire: saves that are cut off, a full disk, damaged files; and going on."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import pytest

import dtrain
from dtrain.runtime import checkpoint, files

from .harness import (
    STEPS,
    Fault,
    arm,
    finished,
    once,
    paced,
    run,
    same,
    struck,
    submit,
    watch,
)

pytestmark = pytest.mark.cluster


def _die_at(number: int, folder: str) -> None:
    """In a worker: die before the ``number``-th operation of its saves."""
    done = 0
    original = files._step

    def step(operation: str, path: object) -> None:
        nonlocal done
        done += 1
        if done == number and once(f"{folder}/died-at-{number}"):
            with open(f"{folder}/last", "w") as last:
                last.write(f"{operation} {path}")
            os.kill(os.getpid(), signal.SIGKILL)

    files._step = step
    files._original = original


def _heal() -> None:
    files._step = getattr(files, "_original", files._step)


@pytest.fixture
def saver(three):
    yield three
    three.wait_for_workers(3, timeout=60)
    three.run(_heal)


def valid(place):
    return [e for e in dtrain.checkpoints.verify(place) if e["problem"] is None]


#: Operations of a first save: directories, two parts, a manifest, names.
OPERATIONS = 24
CI = (6, 9, 12)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=[] if n in CI else [pytest.mark.slow])
        for n in range(1, OPERATIONS + 1)
    ],
)
def test_a_save_that_is_cut_off(saver, tmp_path, number):
    """At each write, sync and rename: the newest that is there verifies, and the job goes on."""
    place = tmp_path / "saved"
    saver.run(_die_at, number, str(tmp_path))
    kept = dtrain.Checkpoint(place, every=4)
    handle = submit(saver, paced(pace=0.01), checkpoint=kept)
    seen = watch(handle, lambda: bool(handle.status()["losses"]))
    newest = checkpoint.latest(str(place))  # also in the middle of the recovery
    assert newest is None or newest.problem is None
    story = finished(handle, seen)
    assert (tmp_path / "last").exists(), f"there are fewer than {number} operations"
    print((tmp_path / "last").read_text())
    same(story)
    found = valid(place)
    assert found[0]["step"] == STEPS
    assert len(found) <= 3
    # What the dead one was writing has a hidden name, and goes when an hour has passed.
    rest = [f for f in os.listdir(place) if not f.startswith("step-")]
    assert all(f.startswith(".step-") for f in rest)
    assert len(rest) <= 1


@pytest.fixture
def small(tmp_path):
    """A real file system of 200 KB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k,mode=0777", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place):
    handle = os.open(place / "filler", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(handle, b"x" * 1024)
    os.close(handle)


def test_a_full_disk(three, small, tmp_path):
    """Training goes on, the error is told, what was saved before stays valid."""
    place, hold = small / "saved", tmp_path / "hold"
    hold.write_text("")
    kept = dtrain.Checkpoint(place, every=4)
    handle = submit(three, paced(hold=hold), checkpoint=kept)
    seen = watch(handle, lambda: handle.status()["saved"] is not None)
    fill(small)
    watch(handle, lambda: any("failed" in e["message"] for e in handle.events()), 30, seen)
    hold.unlink()
    story = finished(handle, seen)
    same(story)
    assert story.said("the checkpoint of step [0-9]+ failed: .*No space left")
    assert story.status["losses"] == 0
    found = valid(place)
    assert found
    assert found[0]["step"] < STEPS


@pytest.mark.parametrize(
    ("workers", "shards"),
    [(3, 2), (1, 3), pytest.param(2, 1, marks=pytest.mark.slow)],
)
def test_going_on_gives_the_bits_of_a_job_that_never_stopped(three, tmp_path, workers, shards):
    """Also on fewer workers, and with other shards; the order of the data included."""
    kept = dtrain.Checkpoint(tmp_path / "saved", every=4)
    handle = submit(three, paced(pace=0.02), checkpoint=kept)
    seen = watch(handle, lambda: (handle.status()["saved"] or 0) >= 8)
    handle.cancel()
    assert handle.wait(timeout=20) == "CANCELLED"
    assert handle.status()["saved"] < STEPS
    del seen
    chosen = Chosen(three, workers)
    with chosen as client:
        story = run(client, checkpoint=kept, resume=True, shards=shards)
    same(story, **({} if shards == 2 else {"shards": shards}))
    assert story.said("goes on from step [1-9][0-9]*, from checkpoint")


class Chosen:
    """The cluster itself, or a smaller one beside it."""

    def __init__(self, client, workers):
        self.client, self.workers, self.own = client, workers, None

    def __enter__(self):
        if self.workers == 3:
            return self.client
        from tests.runtime.conftest import processes

        self.own = processes(self.workers)
        return self.own.__enter__()

    def __exit__(self, *error):
        if self.own is not None:
            self.own.__exit__(*error)


def flip(file):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize("damage", [flip, truncate])
@pytest.mark.parametrize("what", ["part-00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_set_aside(three, tmp_path, damage, what):
    place = tmp_path / "saved"
    kept = dtrain.Checkpoint(place, every=4)
    run(three, steps=STEPS // 2, epochs=4, checkpoint=kept)
    newest, before = valid(place)[:2]
    damage(place / newest["name"] / what)
    story = run(three, checkpoint=kept, resume=True)
    same(story)
    assert story.said(f"goes on from step {before['step']}, from checkpoint")


def test_a_job_that_went_on_survives_a_death_as_well(three, tmp_path):
    kept = dtrain.Checkpoint(tmp_path / "saved", every=4)
    run(three, steps=STEPS // 2, epochs=4, checkpoint=kept)
    faults = tmp_path / "faults"
    faults.mkdir()
    arm(three, faults, Fault("writing", "chief"))
    story = run(three, checkpoint=kept, resume=True)
    assert len(struck(faults)) == 1
    same(story)
    assert story.status["losses"] == 1
