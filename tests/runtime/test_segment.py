"""The shared file by itself: where it lies, who may open it, who removes it; locks and bells."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dtrain.optim
from dtrain.errors import DeadlineError, StorageError
from dtrain.layout import Layout
from dtrain.runtime.transport import meeting, segment, shmfile
from dtrain.runtime.transport.segment import Bells, Locks, Segment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

NAME = f"dtrain-{os.getuid()}"

#: What another process runs: each line that comes is a piece of Python; it answers ``result``.
LOOP = """
import json, os, sys, time
from pathlib import Path
from dtrain.runtime.transport import segment
names = {"os": os, "time": time, "Path": Path, "segment": segment}
for line in sys.stdin:
    exec(json.loads(line), names)
    print(json.dumps(names.pop("result", None)), flush=True)
"""


class Other:
    """Another process, which does what it is told."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, code: str) -> None:
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._process.stdout.readline())

    def do(self, code: str) -> Any:
        self.start(code)
        return self.answer()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def nothing() -> None:
    """A check that never objects."""


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Stand for /dev/shm and for the temporary directory."""
    found = tmp_path / "memory", tmp_path / "disk"
    for root in found:
        root.mkdir()
    monkeypatch.setattr(segment, "_roots", lambda: list(found))
    return found


@pytest.fixture
def made(roots: tuple[Path, Path]) -> Iterator[Segment]:
    """A segment of two pages."""
    made = Segment.create("job", 8192)
    yield made
    made.close()
    segment.unlink(made.path)


def age(file: Path, seconds: float = 61) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then), follow_symlinks=False)


def beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")


# -- the directory -----------------------------------------------------------------------------


def test_it_lies_in_memory_and_is_for_this_user_alone():
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm cannot be written here")
    made = Segment.create("test-segment", 8192)
    try:
        place = made.path.parent
        assert place == Path("/dev/shm") / NAME
        found = place.lstat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.getuid())
        locks, bells = Locks(made.path, 1), Bells(made.path, 0, 2)
        files = segment._files(place)[made.path.name]
        assert len(files) == 5
        for file in files:
            found = file.lstat()
            assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.getuid()), file
        locks.close()
        bells.close()
    finally:
        made.close()
        segment.unlink(made.path)
    assert not made.path.exists()


def test_it_lies_in_the_temporary_directory_where_memory_cannot_be_written(tmp_path, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm" and real(path, mode))
    monkeypatch.setattr(segment.tempfile, "tempdir", str(tmp_path))
    made = Segment.create("job", 8192)
    assert made.path.parent == tmp_path / NAME
    made.close()
    segment.unlink(made.path)
    assert os.listdir(tmp_path) == []


def test_without_any_place_it_says_so(monkeypatch):
    def nowhere():
        raise FileNotFoundError("no usable temporary directory found")

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(segment.tempfile, "gettempdir", nowhere)
    with pytest.raises(StorageError, match="neither /dev/shm nor a temporary directory"):
        Segment.create("job", 8192)
    assert segment.sweep_all() == []


def symlink(place: Path) -> None:
    place.with_name("elsewhere").mkdir(mode=0o700)
    place.symlink_to(place.with_name("elsewhere"))


def dangling(place: Path) -> None:
    place.symlink_to(place.with_name("nowhere"))


def open_to_others(place: Path) -> None:
    place.mkdir()
    place.chmod(0o750)


def somebody_elses(place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)


def a_file(place: Path) -> None:
    place.write_text("")


WRONG = [symlink, dangling, open_to_others, somebody_elses, a_file]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_our_own_directory_is_refused(roots, wrong):
    """It is left as it is; the next place is taken, and without one the reason is told."""
    wrong(roots[0] / NAME)
    before = sorted(roots[0].rglob("*"))
    made = Segment.create("job", 8192)
    made.close()
    assert made.path.parent == roots[1] / NAME
    segment.unlink(made.path)
    wrong(roots[1] / NAME)
    with pytest.raises(StorageError, match=rf"{NAME}: found mode .* expected a directory of user"):
        Segment.create("job", 8192)
    assert sorted(roots[0].rglob("*")) == before


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_our_own_directory_is_not_swept(roots, wrong):
    place = roots[0] / NAME
    wrong(place)
    old = place / "old.held"
    if place.is_dir():
        old.write_text("")
        age(old)
    before = sorted(roots[0].rglob("*"))
    assert segment.sweep_all() == []
    assert sorted(roots[0].rglob("*")) == before


def test_the_directory_goes_with_the_last_file(made):
    second = Segment.create("job", 8192)
    second.close()
    segment.unlink(second.path)
    assert made.path.parent.is_dir()
    made.close()
    segment.unlink(made.path)
    assert not made.path.parent.exists()


def test_another_job_may_take_the_directory_along(roots, monkeypatch):
    """It ends between our look at the directory and our first file in it."""
    real, calls = segment._create, []

    def create(path, nbytes=0):
        calls.append(path)
        if len(calls) == 1:
            path.parent.rmdir()
        real(path, nbytes)

    monkeypatch.setattr(segment, "_create", create)
    made = Segment.create("job", 8192)
    assert len(calls) == 3
    made.close()
    segment.unlink(made.path)


def test_jobs_that_begin_and_end_at_once_do_not_disturb_each_other(roots):
    code = f"""
segment._roots = lambda: [Path({str(roots[0])!r})]
for _ in range(300):
    made = segment.Segment.create("job", 4096)
    made.close()
    segment.unlink(made.path)
result = "done"
"""
    with Other() as one, Other() as two:
        one.start(code)
        two.start(code)
        assert one.answer() == two.answer() == "done"
    assert os.listdir(roots[0]) == []


# -- room --------------------------------------------------------------------------------------


def no_space(monkeypatch, *roots: Path, number: int = errno.ENOSPC) -> None:
    """What is reserved under these roots finds the device full."""
    real = os.posix_fallocate

    def reserve(handle, offset, size):
        file = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if size > 4096 and any(file.is_relative_to(root) for root in roots):
            raise OSError(number, os.strerror(number))
        real(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EOPNOTSUPP])
def test_full_memory_falls_back_to_the_disk(roots, monkeypatch, number):
    no_space(monkeypatch, roots[0], number=number)
    made = Segment.create("job", 8192)
    assert made.path.parent == roots[1] / NAME
    assert os.listdir(roots[0]) == []
    made.close()
    segment.unlink(made.path)


def test_both_full_is_an_error_in_words(roots, monkeypatch):
    no_space(monkeypatch, *roots)
    before = handles()
    with pytest.raises(StorageError) as caught:
        Segment.create("job", 12_000_000)
    text = str(caught.value)
    assert "shared memory of 12 MB" in text
    for root in roots:
        assert f"{root}: No space left on device" in text
        assert os.listdir(root) == []
    assert handles() == before


@contextmanager
def small_tmpfs(place: Path, options: str) -> Iterator[None]:
    if os.getuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip(f"mount is refused here: {answer.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("options", ["size=1m", "nr_inodes=1", "nr_inodes=2", "nr_inodes=3"])
def test_a_really_full_tmpfs(roots, options):
    """Its bytes, or its inodes: not even the directory fits then, or not the second file."""
    with small_tmpfs(roots[0], options):
        made = Segment.create("job", 2 << 20)
        assert made.path.parent == roots[1] / NAME
        assert os.listdir(roots[0]) == []
        # Its space is reserved: no SIGBUS can come of this.
        made.memory[segment.TOKEN :] = 1
        with small_tmpfs(roots[1], options), pytest.raises(StorageError, match="No space left"):
            Segment.create("job", 2 << 20)
        made.close()
        segment.unlink(made.path)


def test_space_is_reserved_when_it_is_made(made):
    assert made.path.stat().st_blocks * 512 >= 8192


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "a/b", "..", ".", "", "*", "?", "[a]", "a.held", "nul\0", "ü", "x" * 999],
)
def test_a_hostile_name_stays_in_the_directory(roots, name):
    bystander = Segment.create("bystander", 8192)
    made = Segment.create(name, 8192)
    assert made.path.parent == roots[0] / NAME
    assert made.path.is_file()
    assert segment.shares(str(made.path), 8192, made.token)
    made.close()
    segment.remove(name)
    # Neither the removal nor anything before it has reached elsewhere.
    assert segment._files(roots[0] / NAME).keys() == {bystander.path.name}
    assert len(list(roots[0].parent.rglob("*"))) == 2 + 1 + 2
    bystander.close()
    segment.unlink(bystander.path)


def test_remove_takes_all_of_a_name_and_nothing_else(roots):
    others = [Segment.create(name, 8192) for name in ("job-1", "jo", "job-0123456789abcdef", "JOB")]
    mine = [Segment.create("job", 8192) for _ in range(2)]
    Locks(mine[0].path, 1).close()
    segment.remove("job")
    assert segment._files(roots[0] / NAME).keys() == {other.path.name for other in others}
    for each in (*others, *mine):
        each.close()
        segment.unlink(each.path)


def test_a_host_removes_the_file_that_it_was_told_of(roots, tmp_path, monkeypatch):
    """Its chief may have another temporary directory."""
    made = Segment.create("job-g1", 8192)
    monkeypatch.setattr(segment, "_roots", lambda: [tmp_path])
    met = meeting.Meeting(str(made.path), 8192, made.token, {})
    launch = SimpleNamespace(job="job")
    meeting.leave(SimpleNamespace(meeting=met, launch=launch, generation=1))
    assert os.listdir(roots[0]) == []
    made.close()


# -- whether it is the same file ---------------------------------------------------------------


def test_shares_the_very_file(made):
    assert segment.shares(str(made.path), 8192, made.token)
    with Other() as other:
        question = f"segment.shares({str(made.path)!r}, 8192, bytes({list(made.token)}))"
        assert other.do(f"result = {question}") is True


def test_tokens_differ():
    assert len(segment.machine()) == 16
    # Else two machines with one network file system would take it for their memory.
    assert not sys.platform.startswith("linux") or any(segment.machine())


def test_does_not_share_anything_else(made, tmp_path):
    token = made.token
    path = str(made.path)
    other = Segment.create("job", 8192)
    assert not segment.shares(str(other.path), 8192, token)
    assert not segment.shares(path, 8192, other.token)
    assert not segment.shares(path, 8192, b"")
    assert not segment.shares(path, 4096, token)
    assert not segment.shares(path + "0", 8192, token)
    assert not segment.shares(str(made.path.parent), 8192, token)
    assert not segment.shares("nul\0", 8192, token)
    os.mkfifo(tmp_path / "fifo")
    assert not segment.shares(str(tmp_path / "fifo"), 8192, token)
    other.close()
    segment.unlink(other.path)


def test_does_not_share_with_another_machine(made, monkeypatch):
    """The same file on a network file system is not the same memory."""
    monkeypatch.setattr(segment, "machine", lambda: bytes(15) + b"?")
    assert not segment.shares(str(made.path), 8192, made.token)


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_does_not_share_what_it_may_not_write(monkeypatch, mode):
    """To read is not enough: it is to be mapped for writing."""
    with TemporaryDirectory() as folder, Other() as other:
        monkeypatch.setattr(segment, "_roots", lambda: [Path(folder)])
        made = Segment.create("job", 8192)
        made.path.chmod(mode)
        if os.getuid() == 0:
            for above in made.path.parents[:2]:
                above.chmod(0o755)
            other.do("os.seteuid(65534)")
        if mode:
            assert other.do(f"result = len(Path({str(made.path)!r}).read_bytes())") == 8192
        question = f"segment.shares({str(made.path)!r}, 8192, bytes({list(made.token)}))"
        assert other.do(f"result = {question}") is False
        made.close()


# -- mapping -----------------------------------------------------------------------------------


def test_what_one_process_writes_another_reads(made):
    with Other() as other:
        other.do(f"there = segment.Segment(Path({str(made.path)!r}), 8192)")
        made.memory[5000] = 77
        assert other.do("result = int(there.memory[5000])") == 77
        other.do("there.memory[5001] = 78")
        assert made.memory[5001] == 78


def test_views_outlive_the_file(made):
    view = made.memory[4096:]
    view[0] = 5
    before = handles()
    made.close()
    made.close()
    segment.unlink(made.path)
    assert view[0] == 5
    del view
    # The lock's handle, and with the last view the mapping's own.
    assert handles() == before - 2


def test_read_only(made):
    again = Segment(made.path, 8192, writable=False)
    made.memory[5000] = 9
    assert again.memory[5000] == 9
    with pytest.raises(ValueError, match="read-only"):
        again.memory[5000] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        again.memory.flags.writeable = True
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sorted(line.split()[1] for line in maps if line.endswith(str(made.path))) == [
        "r--s",
        "rw-s",
    ]
    again.close()


def test_nobody_shares_it_before_it_is_signed(roots):
    made = Segment.create_as("input-1", 8192, owner=OWNER, disk_first=True)
    assert made.path == roots[1] / NAME / "input-1"
    secret = bytes(range(16))
    assert not segment.is_it(str(made.path), 8192, segment.proof(secret))
    made.sign(secret)
    assert made.token == segment.proof(secret)
    assert segment.is_it(str(made.path), 8192, segment.proof(secret))
    assert not segment.is_it(str(made.path), 8192, segment.proof(bytes(16)))
    made.close()
    segment.discard("input")
    segment.discard("../input-1")
    assert made.path.exists()
    segment.discard("input-1")
    segment.discard("input-1")
    assert os.listdir(roots[1]) == []


def test_what_is_of_that_name_already_is_left_alone(roots):
    """On a disk that two machines share it is the other one's."""
    other = Segment.create_as("input-1", 8192, disk_first=True)
    made = Segment.create_as("input-1", 8192, disk_first=True)
    assert (other.path.parent.parent, made.path.parent.parent) == (roots[1], roots[0])
    assert segment._files(other.path.parent).keys() == {"input-1"}
    other.close()
    made.close()
    segment.discard("input-1")


def test_no_handle_is_left(roots):
    made = Segment.create("job", 8192)
    before = handles()
    again = Segment(made.path, 8192)
    locks, bells = Locks(made.path, 3), Bells(made.path, 1, 3)
    assert handles() > before
    bells.close()
    bells.close()
    locks.close()
    again.close()
    assert handles() == before
    made.close()
    segment.unlink(made.path)


def test_no_handle_is_left_by_what_fails(made):
    before = handles()
    beside(made.path, "bell2").mkdir()
    with pytest.raises(OSError):
        Bells(made.path, 0, 3)
    beside(made.path, "bell2").rmdir()
    made.path.rename(made.path.with_suffix(".away"))
    with pytest.raises(FileNotFoundError):
        Segment(made.path, 8192)
    made.path.with_suffix(".away").rename(made.path)
    with pytest.raises(ValueError, match="greater than file size"):
        Segment(made.path, 1 << 20)
    assert handles() == before


# -- the sweep ---------------------------------------------------------------------------------


def abandoned(name: str = "job") -> Path:
    """A segment with everything beside it that nobody holds."""
    made = Segment.create(name, 8192)
    Locks(made.path, 1).close()
    Bells(made.path, 0, 2).close()
    made.close()
    age(beside(made.path, "held"))
    return made.path


def test_sweep_removes_what_nobody_holds(roots):
    path = abandoned()
    assert segment.sweep_all() == [path.name]
    assert os.listdir(roots[0]) == []
    assert segment.sweep_all() == []


def test_sweep_looks_on_the_disk_too(roots, monkeypatch):
    no_space(monkeypatch, roots[0])
    path = abandoned()
    assert path.parent.parent == roots[1]
    assert segment.sweep_all() == [path.name]
    assert os.listdir(roots[1]) == []


def test_sweep_leaves_young_files(roots):
    path = abandoned()
    age(beside(path, "held"), 50)
    assert segment.sweep_all() == []
    assert len(segment._files(path.parent)[path.name]) == 5
    age(beside(path, "held"), 61)
    assert segment.sweep_all() == [path.name]


def test_sweep_leaves_what_a_living_process_holds(roots):
    path = abandoned()
    with Other() as other:
        other.do(f"there = segment.Segment(Path({str(path)!r}), 8192)")
        assert segment.sweep_all() == []
        assert path.exists()
        other.kill()
        assert segment.sweep_all() == [path.name]
    assert os.listdir(roots[0]) == []


def test_sweep_leaves_what_its_maker_still_holds(made):
    """However long it takes the others to get ready."""
    age(beside(made.path, "held"), 3600)
    assert segment.sweep_all() == []
    assert made.path.exists()


def test_a_new_job_sweeps(roots):
    path = abandoned()
    made = Segment.create("next", 8192)
    assert not path.exists()
    assert segment._files(roots[0] / NAME).keys() == {made.path.name}
    made.close()
    segment.unlink(made.path)


def test_nobody_gets_hold_of_what_is_being_swept(roots, monkeypatch):
    path = abandoned()
    real, found = segment.unlink, []

    def unlink(what):
        with pytest.raises(BlockingIOError):
            Segment(what, 8192)
        found.append(what)
        real(what)

    monkeypatch.setattr(segment, "unlink", unlink)
    segment.sweep_all()
    assert found == [path]


def test_sweep_finishes_an_interrupted_removal(roots, monkeypatch):
    """Whenever it was interrupted, what is left is found, and goes."""
    real = Path.unlink
    for allowed in range(5):
        path = abandoned()
        left = iter(range(allowed))

        def unlink(file, missing_ok=False, left=left):
            next(left)
            real(file, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
        with suppress(StopIteration):
            segment.unlink(path)
        monkeypatch.undo()
        monkeypatch.setattr(segment, "_roots", lambda: list(roots))
        assert segment.sweep_all() == [path.name]
        assert os.listdir(roots[0]) == []


OWNER = "tcp://10.0.0.1:8786"


def owned_by(owner: str, name: str = "job") -> Path:
    made = Segment.create(name, 8192, owner=owner)
    made.close()
    age(beside(made.path, "held"))
    return made.path


def test_sweep_spares_what_is_wanted(roots):
    """It asks by name and owner, and only for what it would remove."""
    paths = [owned_by(owner, str(number)) for number, owner in enumerate(("", OWNER, OWNER))]
    young = owned_by(OWNER, "young")
    age(beside(young, "held"), 50)
    held = Segment(owned_by(OWNER, "held"), 8192)
    paths[0] = owned_by("", "0")
    asked = []

    def spare(name: str, owner: str) -> bool:
        asked.append((name, owner))
        return name == paths[1].name

    assert segment.sweep_all(spare) == [paths[0].name, paths[2].name]
    assert sorted(asked) == [(paths[0].name, ""), (paths[1].name, OWNER), (paths[2].name, OWNER)]
    assert {paths[1].name, young.name, held.path.name} == set(segment._files(roots[0] / NAME))
    assert set(segment.owned()) == {paths[1].name, young.name, held.path.name}
    held.close()
    for path in (paths[1], young, held.path):
        segment.discard(path.name)
    assert os.listdir(roots[0]) == []


def test_sweep_spares_who_opens_it_while_its_owner_is_asked(roots):
    path, opened = owned_by(OWNER), []

    def spare(name: str, owner: str) -> bool:
        opened.append(Segment(path, 8192))
        return False

    assert segment.sweep_all(spare) == []
    assert path.exists()
    opened[0].close()
    assert segment.sweep_all(lambda name, owner: False) == [path.name]


def test_to_open_waits_for_a_sweep_that_just_looks(made, monkeypatch):
    """A sweep has the lock for an instant, to see whether anybody holds the file."""
    made.close()
    looks = os.open(beside(made.path, "held"), os.O_RDWR)
    fcntl.flock(looks, fcntl.LOCK_EX)
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            fcntl.flock(looks, fcntl.LOCK_UN)

    monkeypatch.setattr(segment.time, "sleep", sleep)
    again = Segment(made.path, 8192)
    assert len(naps) == 3
    again.close()
    os.close(looks)


@contextmanager
def listening(family: socket.AddressFamily = socket.AF_INET) -> Iterator[int]:
    with socket.create_server(("localhost", 0), family=family) as server:
        yield server.getsockname()[1]


def test_a_new_job_spares_what_has_an_owner_that_answers(roots):
    with listening() as port:
        path = owned_by(f"tcp://localhost:{port}")
        dead, nobodys = owned_by("tcp://localhost:1", "dead"), owned_by("", "nobody")
        made = Segment.create("next", 8192)
        assert set(segment._files(roots[0] / NAME)) == {path.name, made.path.name}
        assert not dead.exists()
        assert not nobodys.exists()
        made.close()
        segment.unlink(made.path)
    assert segment.sweep_all() == [path.name]


def test_each_owner_is_asked_once_and_not_without_end(monkeypatch):
    asked = []

    def answers(address):
        asked.append(address)
        return False

    monkeypatch.setattr(segment, "answers", answers)
    monkeypatch.setattr(segment, "_ANSWERS", 60.0)
    spare = segment.sparing_answerers()
    assert not spare("a", "tcp://a:1")
    assert not spare("b", "tcp://a:1")
    assert not spare("c", "")
    assert asked == ["tcp://a:1"]
    monkeypatch.setattr(segment, "_ANSWERS", -1.0)
    assert segment.sparing_answerers()("d", "tcp://d:1"), "no time left: taken to be there"
    assert asked == ["tcp://a:1"]


@pytest.mark.parametrize("scheme", ["tcp", "tls", "ws", "wss"])
def test_who_answers(scheme, monkeypatch):
    with listening() as port:
        address = f"{scheme}://localhost:{port}"
        assert segment.answers(address)
    assert not segment.answers(address)

    def silent(place, timeout):
        assert place == ("localhost", port)
        assert timeout == 1.0
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    assert not segment.answers(address)


def test_one_that_takes_a_connection_and_drops_it_does_not_answer():
    with socket.create_server(("localhost", 0)) as server:
        address = f"tcp://localhost:{server.getsockname()[1]}"
        dropping = threading.Thread(target=lambda: server.accept()[0].close())
        dropping.start()
        assert not segment.answers(address)
        dropping.join(10)
        greeting = threading.Thread(target=lambda: server.accept()[0].sendall(b"x"))
        greeting.start()
        assert segment.answers(address)
        greeting.join(10)


def test_who_answers_at_other_addresses():
    if socket.has_ipv6:
        with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            assert segment.answers(f"tcp://[::1]:{server.getsockname()[1]}")
    with Other() as other:
        pid = other.do("result = os.getpid()")
        assert segment.answers(f"inproc://127.0.0.1/{pid}/1")
        other.kill()
        assert not segment.answers(f"inproc://127.0.0.1/{pid}/1")
    for wrong in ("inproc://x", "inproc://x/y/1", "inproc://x/0/1", "inproc://x/-1/1"):
        assert not segment.answers(wrong)
    for wrong in ("tcp://", "tcp://host", "tcp://host:port", "tcp://localhost:99999"):
        assert not segment.answers(wrong)
    # What it cannot ask is spared.
    assert segment.answers("ucx://10.0.0.1:8786")


def test_a_segment_says_whose_it_is_to_this_user_alone(roots):
    path = owned_by(OWNER)
    held = beside(path, "held")
    assert held.read_text() == OWNER
    assert stat.S_IMODE(held.lstat().st_mode) == 0o600
    segment.unlink(path)
    path = owned_by("")
    assert beside(path, "held").read_text() == ""
    assert segment.owned() == []
    segment.unlink(path)


def test_no_room_for_the_owner_is_no_room(roots, monkeypatch):
    real = Path.write_text

    def write_text(path, text):
        if path.is_relative_to(roots[0]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, text)

    monkeypatch.setattr(Path, "write_text", write_text)
    path = owned_by(OWNER)
    assert path.parent.parent == roots[1]
    assert os.listdir(roots[0]) == []
    segment.unlink(path)


def test_sweep_removes_locks_and_bells_of_no_segment(roots):
    """A host that opened them just when the job ended, and was killed."""
    path = segment.directory(roots[0]) / "job-g1-0123456789abcdef"
    Locks(path, 1).close()
    Bells(path, 0, 1).close()
    age(beside(path, "locks"))
    assert segment.sweep_all() == [], "the bell is young"
    age(beside(path, "bell0"))
    assert segment.sweep_all() == [path.name]
    assert os.listdir(roots[0]) == []


def test_sweep_is_not_stopped_by_what_it_cannot_remove(roots):
    odd = segment.directory(roots[0]) / "a.held"
    odd.mkdir()
    (odd / "x").write_text("")
    age(odd)
    paths = [abandoned("0"), abandoned("z")]
    # The last one swept the first.
    assert not paths[0].exists()
    assert segment.sweep_all() == [paths[1].name]
    assert odd.is_dir()


# -- locks -------------------------------------------------------------------------------------


def test_a_lock_excludes_other_threads(made):
    locks = Locks(made.path, 2)
    assert locks.try_acquire(0)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(locks.try_acquire(0)))
    thread.start()
    thread.join()
    assert found == [False]
    assert locks.try_acquire(1), "another one is free"
    locks.release(0)
    assert locks.try_acquire(0)
    locks.close()


def test_a_lock_excludes_other_processes(made):
    locks = Locks(made.path, 2)
    with Other() as other:
        other.do(f"locks = segment.Locks(Path({str(made.path)!r}), 2)")
        assert other.do("result = locks.try_acquire(0)") is True
        assert not locks.try_acquire(0)
        assert locks.try_acquire(1)
        assert other.do("result = locks.try_acquire(1)") is False
        other.do("locks.release(0)")
        assert locks.try_acquire(0)
    locks.close()


COUNT = """
import threading
import numpy as np
there = segment.Segment(Path({path!r}), 8192)
locks = segment.Locks(there.path, 1)
count = there.memory[4096:4104].view(np.int64)
def add():
    for _ in range(400):
        locks.acquire(0, 30, lambda: None)
        seen = count[0]
        os.sched_yield()
        count[0] = seen + 1
        locks.release(0)
threads = [threading.Thread(target=add) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
result = "done"
"""


def test_nothing_is_lost_between_threads_and_processes(made):
    with Other() as one, Other() as two:
        for other in (one, two):
            other.start(COUNT.format(path=str(made.path)))
        assert one.answer() == two.answer() == "done"
    assert made.memory[4096:4104].view(np.int64)[0] == 2 * 2 * 400


def test_a_lock_falls_with_its_killed_owner(made):
    """Also while a process that it forked lives on, with all that it has open."""
    locks = Locks(made.path, 1)
    with Other() as other:
        code = f"locks = segment.Locks(Path({str(made.path)!r}), 1); result = locks.try_acquire(0)"
        assert other.do(code) is True
        child = other.do("import signal; result = os.fork() or signal.pause()")
        try:
            assert not locks.try_acquire(0)
            other.kill()
            locks.acquire(0, 5, nothing)
        finally:
            os.kill(child, signal.SIGKILL)
    locks.close()


def test_to_acquire_has_a_deadline(made):
    locks = Locks(made.path, 1)
    locks.try_acquire(0)
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=r"after 0\.1 s, lock 0"):
        locks.acquire(0, 0.1, nothing)
    assert 0.1 <= time.monotonic() - begun < 5
    locks.close()


def test_to_acquire_may_be_given_up(made):
    locks = Locks(made.path, 1)
    locks.try_acquire(0)

    def check():
        raise KeyError("no use any more")

    with pytest.raises(KeyError, match="no use any more"):
        locks.acquire(0, 60, check)
    locks.close()


# -- bells -------------------------------------------------------------------------------------

PING = """
segment.SLICE = 60.0
there = segment.Segment(Path({path!r}), 8192)
bells = segment.Bells(there.path, 1, 2)
for turn in range({turns}):
    bells.wait(lambda: there.memory[5000] > turn, lambda: None, 50, lambda: "no ping")
    there.memory[5001] = turn + 1
    bells.ring_others()
result = "done"
"""


def test_a_ring_wakes_another_process(made, monkeypatch):
    """Nobody looks by himself before the minute is over: each turn takes a ring each way."""
    monkeypatch.setattr(segment, "SLICE", 60.0)
    monkeypatch.setattr(segment, "SPINS", 1)
    turns, begun = 200, time.monotonic()
    bells = Bells(made.path, 0, 2)
    with Other() as other:
        other.start(PING.format(path=str(made.path), turns=turns))
        for turn in range(turns):
            made.memory[5000] = turn + 1
            bells.ring(1)
            bells.wait(lambda turn=turn: made.memory[5001] > turn, nothing, 50, lambda: "no pong")
        assert other.answer() == "done"
    assert time.monotonic() - begun < 20
    bells.close()


def test_a_wait_has_a_deadline(made):
    bells = Bells(made.path, 0, 1)
    with pytest.raises(DeadlineError, match=r"after 0\.1 s: step 3 waits for replica 1"):
        bells.wait(lambda: False, nothing, 0.1, lambda: "step 3 waits for replica 1")
    bells.close()


def test_a_wait_is_given_up_at_once_when_another_thread_rings(made, monkeypatch):
    monkeypatch.setattr(segment, "SLICE", 60.0)
    bells = Bells(made.path, 0, 1)
    stopped, waits = threading.Event(), threading.Event()

    def check():
        if stopped.is_set():
            raise KeyError("stopped")
        waits.set()

    def stop():
        waits.wait(10)
        stopped.set()
        bells.ring_mine()

    thread = threading.Thread(target=stop)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(KeyError, match="stopped"):
        bells.wait(lambda: False, check, 50, lambda: "?")
    assert time.monotonic() - begun < 20
    thread.join()
    bells.close()


def test_a_full_bell_does_not_block_who_rings(made):
    bells = Bells(made.path, 0, 2)
    listener = Bells(made.path, 1, 2)
    for _ in range(70_000):  # a FIFO holds 65,536 bytes
        bells.ring(1)
    rang = iter([False] * segment.SPINS + [False, True])
    listener.wait(lambda: next(rang), nothing, 5, lambda: "not woken")
    # What is left is taken away, and then it sleeps: it does not look without end.
    looks = itertools.count()
    with pytest.raises(DeadlineError):
        listener.wait(lambda: next(looks) < 0, nothing, 0.2, lambda: "nobody rings")
    assert next(looks) < segment.SPINS + 2 * 65_536 // 4096
    bells.close()
    listener.close()


def test_to_ring_a_closed_bell_is_harmless(made):
    """Its handle's number may be another file's by then."""
    bells = Bells(made.path, 0, 1)
    known = list(bells._handles)
    bells.close()
    read, write = os.pipe()
    while write < max(known):
        os.close(read)
        read, write = os.dup(write), os.dup(write)
    assert set(known) & {read, write}, "the number is not used again"
    bells.ring_mine()
    poll = select.poll()
    poll.register(read, select.POLLIN)
    assert poll.poll(0) == []
    os.close(read)
    os.close(write)


def test_a_bell_is_not_closed_under_who_rings_it(made, monkeypatch):
    bells = Bells(made.path, 0, 1)
    real, ringing, go = os.write, threading.Event(), threading.Event()

    def write(handle, data):
        ringing.set()
        go.wait(10)
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)
    ringer = threading.Thread(target=bells.ring_mine)
    closer = threading.Thread(target=bells.close)
    ringer.start()
    assert ringing.wait(10)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    assert set(map(str, bells._handles)) <= set(os.listdir("/proc/self/fd"))
    go.set()
    closer.join(10)
    ringer.join(10)
    assert bells._handles == []


# -- the plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_no_two_writers_share_a_cache_line_and_nothing_overlaps(sync):
    layout = Layout.of({"w": np.zeros((300, 7), np.float32), "b": np.zeros(3)})
    optimizer = dtrain.optim.adam(1e-3)
    plan = shmfile.FilePlan(layout, optimizer, 3, 2, sync=sync)
    lines = [plan.version, plan.verdict, plan.fence, *plan.totals]
    lines += [plan.replica_line + i * shmfile.LINE for i in range(3)]
    lines += [plan.mark_line + i * shmfile.LINE for i in range(3)]
    lines += [plan.shard_line + i * shmfile.LINE for i in range(2)]
    lines += [plan.turns, *plan.halves]
    assert [line * 8 % 64 for line in lines] == [0] * len(lines)
    assert lines == sorted(lines)
    assert lines[0] * 8 >= segment.TOKEN
    assert (lines[-1] + plan.turn_words) * 8 <= plan.header
    parts = [*plan.params, *(at for slots in plan.slots for at in slots.values()), *plan.grads]
    assert len(parts) == (2 * 3 + 3 if sync else 3)
    ends = [*sorted(parts)[1:], plan.nbytes]
    assert min(parts) == plan.header
    assert all(b - a >= layout.nbytes for a, b in zip(sorted(parts), ends, strict=True))
    assert all(at % 4096 == 0 for at in parts)
