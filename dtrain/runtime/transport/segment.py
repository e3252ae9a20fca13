"""A file of shared memory for the processes of one machine, with its locks and doorbells.

The file is mapped by every process that shares it.  It lies in a directory of our own (0700),
under ``/dev/shm`` where that has room, else in the temporary directory; it is 0600 and its
space is reserved when it is made, so that a full disk is an error at once and never a SIGBUS
later.  Whether two processes share a machine is found out by opening it, not by host names,
which containers share or hide.

Files, for a segment called ``x``: ``x`` is mapped, ``x.held`` is locked by all who have it
mapped and says whose it is, ``x.locks`` has the locks of its parts, and ``x.bell0``, ``x.bell1``,
... are the doorbells.

A file may outlive all who have it mapped, to be found by those who come after them: its owner is
the scheduler of its job, and a sweep spares it as long as that one wants it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import re
import secrets
import select
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from dtrain.errors import DeadlineError, StorageError

#: Stores by one process are seen in their order by another on these; elsewhere flags could be
#: seen before the data that they stand for.
ORDERED = platform.machine().lower() in ("x86_64", "amd64")

#: Bytes at the start of a segment that prove that two processes see the same file: random ones,
#: and those of the running kernel.
TOKEN = 32

#: Seconds for which a sweep leaves a file alone: it may be between its making and its first
#: holder.
YOUNG = 60.0

#: Seconds that one wait on a doorbell lasts at the most, before the caller looks around.
SLICE = 1.0

#: Looks at the state, giving up the processor in between, before a wait blocks.
SPINS = 30

#: How often a file is made anew because the last one of another job took the directory along.
_TRIES = 100

#: The longest that a wait for a lock sleeps between two looks.
_NAP = 1e-3

#: Seconds that an owner has to take a connection, and that all of them have in one sweep.
_ANSWER = 1.0
_ANSWERS = 3.0

#: Seconds for which a connection is to hold: that of a process being killed is taken, and reset.
_HOLDS = 0.5

#: The most bytes of an owner's address that are read.
_ADDRESS = 1000

#: Whether a sweep leaves a file, by its name and its owner.
Spare = Callable[[str, str], bool]


@cache
def machine() -> bytes:
    """16 bytes that differ between running kernels; zeros where they do not say.

    A file of the temporary directory may lie on a network file system: two machines then see the
    same file, and not the same memory.
    """
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


def _roots() -> list[Path]:
    """Where our directory can be; the best place first."""
    found = [Path("/dev/shm")] if os.access("/dev/shm", os.W_OK) else []
    with suppress(FileNotFoundError):
        found.append(Path(tempfile.gettempdir()))
    if not found:
        raise StorageError("neither /dev/shm nor a temporary directory can be written to")
    return found


def _place(root: Path) -> Path:
    return root / f"dtrain-{os.getuid()}"


def _is_ours(found: os.stat_result) -> bool:
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not stat.S_IMODE(found.st_mode) & 0o077
    )


def directory(root: str | Path | None = None) -> Path:
    """Our own directory under ``root`` (None: the best place), for this user alone.

    It is made if it is not there.  Raises StorageError if something else, or somebody else's,
    is in its place.
    """
    place = _place(Path(root) if root is not None else _roots()[0])
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if not _is_ours(found):
        raise StorageError(
            f"{place}: found mode {stat.filemode(found.st_mode)} of user {found.st_uid}, "
            f"expected a directory of user {os.getuid()} that nobody else can enter"
        )
    return place


def places() -> list[Path]:
    """Where segments of ours may lie: the directories that are there, and are ours."""
    found = []
    with suppress(StorageError):
        for place in map(_place, _roots()):
            with suppress(OSError):
                if _is_ours(place.lstat()):
                    found.append(place)
    return found


class Segment:
    """One process's mapping of the shared file.

    Attributes
    ----------
    path : pathlib.Path
    memory : ndarray of uint8, shape (nbytes,)
        Read-only if it was not opened for writing.
    """

    def __init__(self, path: Path, nbytes: int, writable: bool = True) -> None:
        self.path = path
        # Held while mapped; a sweep takes only files that nobody holds.
        self._held = _hold(path)
        mode, access = (
            (os.O_RDWR, mmap.ACCESS_WRITE) if writable else (os.O_RDONLY, mmap.ACCESS_READ)
        )
        try:
            handle = os.open(path, mode | os.O_CLOEXEC)
            try:
                self._map: mmap.mmap | None = mmap.mmap(handle, nbytes, access=access)
            finally:
                os.close(handle)
        except BaseException:
            os.close(self._held)
            raise
        self.memory = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(
        cls, name: str, nbytes: int, *, owner: str = "", disk_first: bool = False
    ) -> Segment:
        """Make a new file of ``nbytes``; falls back to the disk where memory has no room.

        Parameters
        ----------
        name : str
            The beginning of the file's name.
        nbytes : int
        owner : str
            The address of the scheduler whose job it is, for :func:`sweep`.
        disk_first : bool
            The temporary directory is the better place, and memory the second.

        Raises
        ------
        StorageError
            Neither has room, or what should be our directory is not.
        """
        full = f"{_word(name)}-{secrets.token_hex(8)}"
        made = cls.create_as(full, nbytes, owner=owner, disk_first=disk_first)
        made.sign(secrets.token_bytes(TOKEN - 16))
        return made

    @classmethod
    def create_as(
        cls, full: str, nbytes: int, *, owner: str = "", disk_first: bool = False
    ) -> Segment:
        """The same with the whole name of the file; nobody can share it until it is signed."""
        problems = []
        for root in reversed(_roots()) if disk_first else _roots():
            try:
                return cls._make(root, full, nbytes, owner)
            except OSError as error:
                problems.append(f"{root}: {error.strerror or error}")
        kind = "a file" if disk_first else "shared memory"
        reasons = "; ".join(problems)
        raise StorageError(f"{kind} of {nbytes / 1e6:.0f} MB has no place: {reasons}")

    @classmethod
    def _make(cls, root: Path, name: str, nbytes: int, owner: str) -> Segment:
        path = _place(root) / name
        spare = sparing_answerers()
        for left in reversed(range(_TRIES)):
            try:
                sweep(directory(root), spare)
                # Again: the sweep, or another job's end, may have removed an empty one.
                directory(root)
                _create(_beside(path, "held"))
                break
            except FileNotFoundError:
                if not left:
                    raise
        try:
            if owner:
                _beside(path, "held").write_text(owner)
            _create(path, nbytes)
            return cls(path, nbytes)
        except BaseException:
            unlink(path)
            raise

    def sign(self, secret: bytes) -> None:
        """Write the proof: ``secret``, of 16 bytes, and those of this machine."""
        self.memory[:TOKEN] = np.frombuffer(proof(secret), np.uint8)

    def renew(self) -> None:
        """Be young again: a sweep leaves it for a while, also if nobody holds it any more."""
        os.utime(self._held)

    @property
    def token(self) -> bytes:
        return self.memory[:TOKEN].tobytes()

    def close(self) -> None:
        """Let go of the mapping; arrays that still look into it keep it alive until they go."""
        self.memory = np.empty(0, np.uint8)
        if self._map is not None:
            # Views of it that are still referred to keep it: it is unmapped with the last.
            with suppress(BufferError):
                self._map.close()
            self._map = None
            os.close(self._held)


def proof(secret: bytes) -> bytes:
    """What a file that was signed with ``secret`` on this machine begins with."""
    return secret + machine()


def machine_of(token: bytes) -> bytes:
    """The machine on which a file with this proof was made; see :func:`machine`."""
    return token[-16:]


def shares(path: str, nbytes: int, token: bytes) -> bool:
    """Whether this process can map the very file that another one made, in the same memory."""
    return is_it(path, nbytes, token, os.O_RDWR)


def is_it(path: str, nbytes: int, token: bytes, mode: int = os.O_RDONLY) -> bool:
    """Whether a file that can be opened like that has the size and the proof."""
    try:
        handle = os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return False
    try:
        found = os.fstat(handle)
        return (
            stat.S_ISREG(found.st_mode)
            and found.st_size == nbytes
            and os.pread(handle, TOKEN, 0) == token
            and token[-16:] == machine()
        )
    except OSError:
        return False
    finally:
        os.close(handle)


def _hold(path: Path) -> int:
    """A handle that keeps sweeps away from the file."""
    handle = os.open(_beside(path, "held"), os.O_RDWR | os.O_CLOEXEC)
    try:
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A sweep has it for an instant, to see whether anybody holds it.
                if not left:
                    raise
                time.sleep(_NAP)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _word(name: str) -> str:
    """What of a name can be in a file's name, whatever it is: letters, digits, dashes."""
    return re.sub(r"[^A-Za-z0-9-]", "-", name)[:100]


def _create(path: Path, nbytes: int = 0) -> None:
    """Make a file with all its space; where that fails it may be there all the same."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        _remove_empty(path.parent)
        raise
    try:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, nbytes)
        else:
            os.ftruncate(handle, nbytes)
    finally:
        os.close(handle)


def _remove_empty(place: Path) -> None:
    with suppress(OSError):
        place.rmdir()


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")


def _files(place: Path) -> dict[str, list[Path]]:
    """The files in our directory by the segment they belong to; none if it is not there."""
    found: dict[str, list[Path]] = {}
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return found
    for name in names:
        found.setdefault(name.partition(".")[0], []).append(place / name)
    return found


def unlink(path: Path) -> None:
    """Remove a segment and what lies beside it; those who have it mapped keep it."""
    held = _beside(path, "held")
    # The lock last: what an interrupted removal leaves is found by it.
    for file in (*(f for f in _files(path.parent).get(path.name, ()) if f != held), held):
        file.unlink(missing_ok=True)
    # The directory goes with the last one in it.
    _remove_empty(path.parent)


def remove_where(wanted: Callable[[str], bool]) -> None:
    """Remove all segments whose names are wanted."""
    for place in places():
        for found in _files(place):
            if wanted(found):
                unlink(place / found)


def remove(name: str) -> None:
    """Remove all segments that were created by that name."""
    wanted = re.compile(re.escape(_word(name)) + "-[0-9a-f]{16}")
    for place in places():
        for found in _files(place):
            if wanted.fullmatch(found):
                unlink(place / found)


def discard(full: str) -> None:
    """Remove the segment whose file has that very name, wherever it is."""
    if full and full == _word(full):
        for place in places():
            unlink(place / full)


def owned() -> list[str]:
    """The names of the segments here that have an owner."""
    return [
        name
        for place in places()
        for name in _files(place)
        if _owner(_beside(place / name, "held"))
    ]


def _owner(held: Path) -> str:
    """Whose a segment is; nothing if nobody said so, or it has gone."""
    try:
        with held.open("rb") as file:
            return file.read(_ADDRESS).decode(errors="replace").strip()
    except OSError:
        return ""


def answers(address: str) -> bool:
    """Whether something takes connections at an address of Dask, within a second, and holds them.

    A Dask scheduler speaks first, but not where TLS or HTTP is spoken, and not if it is busy.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "inproc":
        return _lives(rest)
    if scheme not in ("tcp", "tls", "ws", "wss"):
        # What cannot be asked is taken to be there: a file too many is better than one too few.
        return True
    try:
        parts = urlsplit(address)
        place = parts.hostname, parts.port
        if place[0] is None or place[1] is None:
            return False
        with socket.create_connection((place[0], place[1]), timeout=_ANSWER) as connection:
            connection.settimeout(_HOLDS)
            with suppress(TimeoutError):
                return bool(connection.recv(1))
    except (OSError, ValueError):
        return False
    return True


def _lives(rest: str) -> bool:
    """Whether the process of ``host/pid/number`` lives."""
    try:
        pid = int(rest.split("/")[1])
        if pid > 0:
            os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, ValueError, IndexError, OverflowError):
        return False
    return pid > 0


def sparing_answerers() -> Spare:
    """For a sweep that cannot ask the owners: what has one that answers is spared.

    Each owner is asked once, and after a few seconds no more: then it is taken to be there.
    """
    known: dict[str, bool] = {}
    until = time.monotonic() + _ANSWERS

    def spare(name: str, owner: str) -> bool:
        if owner and owner not in known:
            known[owner] = time.monotonic() > until or answers(owner)
        return bool(owner) and known[owner]

    return spare


def sweep(place: Path, spare: Spare) -> list[str]:
    """Remove the segments in our directory that nobody holds or wants; returns their names.

    A segment goes if no living process holds it, it is not young, and ``spare(name, owner)`` does
    not want it kept; ``owner`` is empty if nobody said whose it is.  What cannot be removed is
    left to the next sweep.
    """
    gone = []
    for name, files in _files(place).items():
        with suppress(OSError):
            if _sweep(place / name, files, spare):
                gone.append(name)
    _remove_empty(place)
    return gone


def sweep_all(spare: Spare | None = None) -> list[str]:
    """Sweep wherever our directories are; by itself it spares what has an owner that answers."""
    spare = spare or sparing_answerers()
    return [name for place in places() for name in sweep(place, spare)]


def _sweep(path: Path, files: list[Path], spare: Spare) -> bool:
    held = _beside(path, "held")
    try:
        handle = os.open(held, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Somebody has removed the segment while another opened its locks or bells.
        if _young(max(file.lstat().st_mtime for file in files)):
            return False
        unlink(path)
        return True
    try:
        if _young(os.fstat(handle).st_mtime):
            return False
        # BlockingIOError: somebody holds it.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Not locked while the owner is asked: that takes time, and who wants it would be refused.
        fcntl.flock(handle, fcntl.LOCK_UN)
        if spare(path.name, _owner(held)):
            return False
        # Kept until all is gone.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlink(path)
    finally:
        os.close(handle)
    return True


def _young(made: float) -> bool:
    return time.time() - made < YOUNG


class Locks:
    """Exclusive locks between threads and processes, by number.

    A record lock on a file kept for it alone: it falls with its process.  It is the process's,
    not the thread's, so a thread lock comes first.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._threads = [threading.Lock() for _ in range(count)]
        self._handle = os.open(_beside(path, "locks"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_acquire(self, number: int) -> bool:
        if not self._threads[number].acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            self._threads[number].release()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def acquire(self, number: int, deadline: float, check: Callable[[], None]) -> None:
        """Until it is ours; ``check`` raises when waiting has lost its sense."""
        spins, nap = 0, 5e-5
        until = time.monotonic() + deadline
        while not self.try_acquire(number):
            spins += 1
            if spins < 200:
                os.sched_yield()
                continue
            check()
            if time.monotonic() > until:
                raise DeadlineError(f"after {deadline:g} s, lock {number} is still another's")
            time.sleep(nap)
            nap = min(nap * 1.1, _NAP)

    def release(self, number: int) -> None:
        fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, number)
        self._threads[number].release()

    def close(self) -> None:
        os.close(self._handle)


class Bells:
    """One doorbell for each host: a FIFO that others write a byte to.

    ``mine`` is the number of the one that :meth:`wait` listens to.
    """

    def __init__(self, path: Path, mine: int, count: int) -> None:
        self._mine = mine
        #: guards ``_handles`` against :meth:`ring_mine` of another thread
        self._mutex = threading.Lock()
        self._handles: list[int] = []
        try:
            for number in range(count):
                name = _beside(path, f"bell{number}")
                with suppress(FileExistsError):
                    os.mkfifo(name, 0o600)
                self._handles.append(os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._handles[mine], select.POLLIN)

    def ring(self, number: int) -> None:
        # It may be full of rings already: whoever sleeps there will wake all the same.
        with suppress(BlockingIOError):
            os.write(self._handles[number], b"!")

    def ring_others(self) -> None:
        for number in range(len(self._handles)):
            if number != self._mine:
                self.ring(number)

    def ring_mine(self) -> None:
        """Wake our own :meth:`wait`; from any thread, also once it is closed."""
        with self._mutex:
            if self._handles:
                self.ring(self._mine)

    def wait(
        self,
        ready: Callable[[], Any],
        check: Callable[[], None],
        deadline: float,
        what: Callable[[], str],
    ) -> None:
        """Until ``ready()``: look a few times, then sleep until the bell rings.

        ``check`` is called once in a while, and raises when waiting has lost its sense.
        Raises DeadlineError, which says ``what``, after ``deadline`` seconds.
        """
        for _ in range(SPINS):
            if ready():
                return
            os.sched_yield()
        until = time.monotonic() + deadline
        while not ready():
            check()
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"after {deadline:g} s: {what()}")
            if self._poll.poll(min(left, SLICE) * 1000):
                with suppress(BlockingIOError):
                    os.read(self._handles[self._mine], 4096)

    def close(self) -> None:
        with self._mutex:
            handles, self._handles = self._handles, []
            for handle in handles:
                os.close(handle)
