"""A file of shared memory for the processes of one machine, with its locks and doorbells.

The file is mapped by every process that shares it.  It lies in a directory of our own (0700),
under ``/dev/shm`` where that has room, else in the temporary directory; it is 0600 and its
space is reserved when it is made, so that a full disk is an error at once and never a SIGBUS
later.  Whether two processes share a machine is found out by opening it, not by host names,
which containers share or hide.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import secrets
import select
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.errors import DeadlineError, StorageError

#: Stores by one process are seen in their order by another on these; elsewhere flags could be
#: seen before the data that they stand for.
ORDERED = platform.machine().lower() in ("x86_64", "amd64")

#: Bytes at the start of a segment that prove that two processes see the same file.
TOKEN = 32

#: Seconds that one wait on a doorbell lasts at the most, before the caller looks around.
SLICE = 1.0

#: Looks at the state, giving up the processor in between, before a wait blocks.
SPINS = 30


def directory(base: str | None = None) -> Path:
    """Our own directory, for this user alone; made if it is not there.

    Raises StorageError if somebody else's is in its place.
    """
    root = Path(base) if base else Path("/dev/shm")
    if base is None and not os.access(root, os.W_OK):
        root = Path(tempfile.gettempdir())
    place = root / f"dtrain-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise StorageError(
            f"{place}: found mode {stat.filemode(found.st_mode)} of user {found.st_uid}, "
            f"expected a directory of user {os.getuid()} that nobody else can enter"
        )
    return place


class Segment:
    """One process's mapping of the shared file.

    Attributes
    ----------
    path : pathlib.Path
    memory : ndarray of uint8, shape (nbytes,)
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map: mmap.mmap | None = mmap.mmap(handle, nbytes)
        finally:
            os.close(handle)
        # Held while mapped; a sweep takes only files that nobody holds.
        self._held = os.open(_beside(path, "held"), os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.memory = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, job: str, nbytes: int) -> Segment:
        """Make a new file of ``nbytes``; falls back to the disk where memory has no room.

        Raises StorageError where neither has.
        """
        problem: OSError | None = None
        for base in (None, tempfile.gettempdir()):
            sweep(directory(base))
            # Made again: a sweep, or another job's end, removes an empty one.
            place = directory(base)
            # The job's id is made of letters, digits and dashes by the master.
            path = place / f"{job}-{secrets.token_hex(8)}"
            try:
                _reserve(_beside(path, "held"), 1)
                _reserve(path, nbytes)
                segment = cls(path, nbytes)
            except OSError as error:
                problem = error
                unlink(path)
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
                    continue
                raise StorageError(f"shared memory {path}: {error}") from error
            segment.memory[:TOKEN] = np.frombuffer(secrets.token_bytes(TOKEN), np.uint8)
            return segment
        raise StorageError(
            f"shared memory of {nbytes / 1e6:.0f} MB fits neither in /dev/shm nor in "
            f"{tempfile.gettempdir()}: {problem}"
        )

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


def shares(path: str, nbytes: int, token: bytes) -> bool:
    """Whether this process sees the very file that another one made."""
    try:
        with open(path, "rb") as file:
            return file.read(TOKEN) == token and os.fstat(file.fileno()).st_size == nbytes
    except OSError:
        return False


def _reserve(path: Path, nbytes: int) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, nbytes)
        else:
            os.ftruncate(handle, nbytes)
    finally:
        os.close(handle)


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")


def unlink(path: Path) -> None:
    """Remove a segment and what lies beside it; those who have it mapped keep it."""
    for file in (path, *path.parent.glob(f"{path.name}.*")):
        file.unlink(missing_ok=True)
    # The directory goes with the last one in it.
    with suppress(OSError):
        path.parent.rmdir()


def sweep(place: Path) -> list[str]:
    """Remove the segments in our directory that no living process holds."""
    gone = []
    for lock in place.glob("*.held"):
        path = lock.with_suffix("")
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            # Young ones may be between their making and their first holder.
            if time.time() - os.fstat(handle).st_mtime < 60:
                continue
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)
        unlink(path)
        gone.append(path.name)
    return gone


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
        spins = 0
        until = time.monotonic() + deadline
        while not self.try_acquire(number):
            spins += 1
            if spins < 200:
                os.sched_yield()
                continue
            check()
            if time.monotonic() > until:
                raise DeadlineError(f"lock {number} was not to be had in {deadline:.0f} s")
            time.sleep(5e-5)

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
        self._handles = []
        for number in range(count):
            name = _beside(path, f"bell{number}")
            with suppress(FileExistsError):
                os.mkfifo(name, 0o600)
            self._handles.append(os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
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
                raise DeadlineError(f"after {deadline:.0f} s: {what()}")
            if self._poll.poll(min(left, SLICE) * 1000):
                with suppress(BlockingIOError):
                    os.read(self._handles[self._mine], 4096)

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles = []
