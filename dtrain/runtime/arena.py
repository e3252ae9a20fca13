"""A job's memory in one process, and how its threads wait for each other.

The hosts of a job that share a process share an arena: parameters are read in place and
gradients are written in place.  Threads that wait for a version work meanwhile: a shard's sums
and updates are queued here, and whoever waits takes them; a thread of the arena's own is the
fallback when nobody waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from dtrain.arrays import aligned_bytes
from dtrain.errors import DeadlineError, FencedError
from dtrain.layout import Layout, Views
from dtrain.messages import Batch

#: The fallback thread looks after this many seconds whether the arena was closed under it.
_IDLE = 1.0


class Stopped(Exception):
    """The job was told to stop; not an error."""


class Arena:
    """Memory and meeting point of the hosts of one generation of a job in this process.

    Parameters
    ----------
    layout : Layout
    buffers : list of ndarray of uint8, shape (layout.nbytes,)
        The parameters: two (synchronous: double-buffered) or one (asynchronous: updated in
        place).  The first holds the first version.
    """

    def __init__(self, layout: Layout, buffers: list[Any]) -> None:
        self.layout = layout
        self.buffers = buffers
        #: read-only named views of each buffer
        self.views = [frozen(layout.views(buffer)) for buffer in self.buffers]
        #: replica -> the flat buffer that its gradient is written to
        self.grads: dict[int, Any] = {}
        #: replica -> named views of that buffer
        self.grad_views: dict[int, Views] = {}
        #: guards every machine of the job in this process; never held during array maths
        self.lock = threading.Lock()
        #: replicas wait here for versions, and take work
        self.progress = threading.Condition(self.lock)
        #: the fallback thread waits here for work
        self.labour = threading.Condition(self.lock)
        self.work: deque[Callable[[], None]] = deque()
        self.waiting = 0
        self.failure: BaseException | None = None
        self.stopped: str | None = None
        self.closed = False
        #: the next generation reads the shards: nothing may commit any more
        self.frozen = False
        #: the shards hosted in this process, and the lead if it is among them
        self.shards: dict[int, Any] = {}
        self.lead: Any = None
        self._thread: threading.Thread | None = None

    @classmethod
    def private(cls, layout: Layout, params: Any, buffers: int, step: int) -> Arena:
        """In memory of this process alone; ``params`` are those of version ``step``."""
        made = [aligned_bytes(layout.nbytes) for _ in range(buffers)]
        made[step % buffers][:] = params
        return cls(layout, made)

    def mark(self, replica: int, batch: Batch) -> None:
        """A replica goes into user code with a batch; kept where others can see it, if anywhere."""

    def unmark(self, replica: int) -> None:
        """It has come back."""

    def add_replicas(self, replicas: Iterable[int]) -> None:
        for replica in replicas:
            buffer = aligned_bytes(self.layout.nbytes)
            self.grads[replica] = buffer
            self.grad_views[replica] = poisoned(self.layout.views(buffer))

    # -- waiting and working (threads; never the event loop) ---------------------------------

    def wait(self, ready: Callable[[], bool], deadline: float, what: Callable[[], str]) -> None:
        """Return once ``ready()``; work meanwhile.

        ``ready`` is called with the lock held.  Raises :class:`Stopped` when the job is told to
        stop, the failure of any thread of the job, or DeadlineError after ``deadline`` seconds.
        """
        until = time.monotonic() + deadline
        with self.lock:
            while not ready():
                self._raise_if_over()
                if self.work:
                    self._labour(self.work.popleft())
                    continue
                left = until - time.monotonic()
                if left <= 0:
                    raise DeadlineError(f"after {deadline:.0f} s: {what()}")
                self.waiting += 1
                try:
                    self.progress.wait(min(left, _IDLE))
                finally:
                    self.waiting -= 1

    def _labour(self, task: Callable[[], None]) -> None:
        """Run one piece of work without the lock; its failure becomes the job's."""
        self.lock.release()
        failure: BaseException | None = None
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - it is handed to every waiting thread
            failure = error
        finally:
            self.lock.acquire()
        if failure is not None:
            self.fail(failure)

    def _raise_if_over(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.stopped is not None:
            raise Stopped(self.stopped)

    def check(self) -> None:
        """Raise if the job is to stop or has failed; called between steps."""
        if self.failure is not None or self.stopped is not None:
            with self.lock:
                self._raise_if_over()

    # -- all with the lock held --------------------------------------------------------------

    def commits(self) -> None:
        """Raise unless something may still be committed here."""
        if self.frozen:
            raise FencedError("its generation of the job has ended")

    def queue(self, task: Callable[[], None], *, busy: bool = False) -> None:
        """Add work; ``busy``: the caller is about to wait and will take it itself."""
        self.work.append(task)
        if busy:
            return
        if self.waiting:
            self.progress.notify()
        else:
            self.labour.notify()

    def fail(self, error: BaseException) -> None:
        """Latch the first failure and wake everyone."""
        if self.failure is None:
            self.failure = error
        self.progress.notify_all()

    def stop(self, why: str) -> None:
        if self.stopped is None:
            self.stopped = why
        self.progress.notify_all()

    # -- the fallback thread -----------------------------------------------------------------

    def start(self, name: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self.lock:
            while not self.closed:
                if self.work:
                    self._labour(self.work.popleft())
                else:
                    self.labour.wait(_IDLE)

    def close(self, deadline: float = 5.0) -> None:
        with self.lock:
            self.closed = True
            self.labour.notify_all()
            self.progress.notify_all()
        if self._thread is not None:
            self._thread.join(deadline)


#: (job, generation) -> the arena of this process and how many hosts share it
_shared: dict[tuple[str, int], tuple[Arena, int]] = {}
_shared_lock = threading.Lock()


def acquire(key: tuple[str, int], make: Callable[[], Arena]) -> Arena:
    """The arena of a generation of a job in this process; made by the first host that asks."""
    with _shared_lock:
        arena, hosts = _shared.get(key, (None, 0))
        if arena is None:
            arena = make()
        _shared[key] = (arena, hosts + 1)
        return arena


def release(key: tuple[str, int]) -> None:
    """Let go of it; the last host closes it."""
    with _shared_lock:
        arena, hosts = _shared.pop(key)
        if hosts > 1:
            _shared[key] = (arena, hosts - 1)
            return
    arena.close()


def poisoned(views: Views) -> Views:
    """Fill gradients with NaN: one that a model forgets to write is refused, not taken for 0."""
    for view in views.values():
        view.fill(float("nan"))
    return views


def frozen(views: Views) -> Views:
    """The same views, read-only where the array library can say so."""
    for view in views.values():
        if hasattr(view, "setflags"):
            view.setflags(write=False)
    return views
