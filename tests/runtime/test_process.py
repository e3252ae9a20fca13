"""What a neighbour sees of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dtrain.machines.membership import Finding
from dtrain.runtime import process
from tests.conftest import until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

SCRIPT = "from dtrain.runtime import process; print(process.identity()); input()"


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen, dict]]:
    """Another process, and what it says it is."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child, eval(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def test_one_that_runs_is_stopped_and_goes_on(other):
    child, known = other
    assert process.look(known) is Finding.RUNS
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: process.look(known) is Finding.STOPPED, 20, "not seen to be stopped")
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: process.look(known) is Finding.RUNS, 20, "not seen to run")


def test_one_that_has_died(other):
    child, known = other
    child.kill()
    until(lambda: process.look(known) is Finding.GONE, 20, "a zombie is not seen to be gone")
    child.wait()
    assert process.look(known) is Finding.GONE


def test_a_number_that_another_process_has_now():
    mine = process.identity()
    assert process.look(mine) is Finding.RUNS
    assert process.look({**mine, "began": "1"}) is Finding.GONE


def test_one_of_another_machine_cannot_be_seen():
    mine = process.identity()
    assert process.look({**mine, "machine": "another"}) is Finding.UNKNOWN
    assert not process.same_machine(mine, {**mine, "machine": "another"})
    assert process.same_machine(mine, dict(mine))


def test_where_there_is_nothing_to_see_it_by():
    mine = process.identity()
    assert process.look({**mine, "began": None}) is Finding.UNKNOWN
    assert not process.same_machine(mine, None)
    assert not process.same_machine(None, mine)
