"""In-graph training of a session: its steps and train ops, as tasks of Dask."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import cloudpickle
import numpy as np

from dtrain.devices import check_device, current_device
from dtrain.errors import ClusterError, DataError, DeadlineError, DTrainError, JobFailed, SpecError
from dtrain.messages import Failure
from dtrain.runtime.sessions import ops
from dtrain.runtime.sessions.conversation import RETRY, Tie, Voice
from dtrain.sessions.attachment import Attachment


class Graphs:
    """Submits the tasks of one session object.

    Parameters
    ----------
    attachment : Attachment
    """

    def __init__(self, attachment: Attachment) -> None:
        self._to = attachment
        #: numbers the steps, for what random numbers are keyed by
        self._steps = itertools.count()
        #: where gradients are computed; None: as the block says in which that is asked for
        self._device: str | None = None

    def use(self, device: str | None) -> None:
        """Compute on a device from now on; None: on that of the innermost block.

        Raises
        ------
        SpecError
            For another word, or if no worker has such a device.
        """
        wanted = current_device() if device is None else check_device(device)
        if wanted not in ("auto", "cpu"):  # which all workers have
            self.workers(None, wanted)
        self._device = wanted

    def device(self) -> str:
        return self._device or current_device()

    def number(self) -> int:
        """That of the next step."""
        return next(self._steps)

    def step(self, batches: Sequence[Any], timeout: float | str | None) -> float:
        """One synchronous step; see :meth:`dtrain.Session.step`."""
        number, device = self.number(), self.device()

        def once(tie: Tie, voice: Voice, until: float) -> float | Failure:
            order = self.order(tie, voice, until, number, device)
            workers = self.workers(tie, device)
            at = [workers[i % len(workers)] for i in range(len(batches))]
            placed = self.place(list(zip(batches, at, strict=True)), until)
            lead = tie.hosts[0]
            snapshot = self.submit(ops.snapshot, lead, order)
            found = [
                self.submit(ops.compute, address, order, replica, batch, snapshot)
                for replica, (batch, address) in enumerate(zip(placed, at, strict=True))
            ]
            end = self.submit(ops.update, lead, order, snapshot, *found)
            return self.outcome(end, voice, until)

        return loss_of(self._to.persist(once, self._to.until(timeout)))

    def workers(self, tie: Tie | None, device: str) -> list[str]:
        """Those that have the device now: asked anew, as one that has died would be waited for.

        FencedError if the generation is over, as its hosts may have left.
        """
        generation = None if tie is None else tie.generation
        asked = self._to.call("dtrain_session_workers", device=device, generation=generation)
        found: list[str] = list(asked)
        if not found:
            raise ClusterError(f"session {self._to.name}: no worker is there")
        return found

    def order(self, tie: Tie, voice: Voice, until: float, number: int, device: str) -> ops.Order:
        left = max(until - time.monotonic(), RETRY)
        return ops.Order(
            session=self._to.name,
            client=self._to.id,
            generation=tie.generation,
            voice=voice.name,
            push=voice.pushes,
            seconds=left,
            rng=number,
            device=device,
        )

    def submit(self, task: Callable[..., Any], worker: str, order: ops.Order, *args: Any) -> Any:
        return self._to.client.submit(
            task,
            order,
            *args,
            key=f"dtrain-{task.__name__}-{uuid.uuid4().hex}",
            workers=[worker],
            allow_other_workers=True,
            pure=False,
        )

    def outcome(self, future: Any, voice: Voice, until: float) -> float | Failure:
        """The loss that a task has come to, once its push is applied; or the user's error."""
        try:
            with _thread_lent():
                found = future.result(timeout=max(until - time.monotonic(), RETRY))
        except TimeoutError as error:
            if isinstance(error, DTrainError):
                raise
            raise DeadlineError(
                f"session {self._to.name}: {future.key} has not ended in time; are the threads of "
                f"the workers busy with other tasks?"
            ) from None
        finally:
            future.release()
        if isinstance(found, Failure):
            return found
        voice.pushes += 1
        loss: float = found[0]
        return loss

    def place(self, batches: Sequence[tuple[Any, str]], until: float) -> list[Any]:
        """Put the arrays of batches on workers, straight; each batch with Futures in it."""
        from dask.base import is_dask_collection
        from distributed import Future as DaskFuture

        client = self._to.client

        async def put(batch: Any, worker: str) -> Any:
            named = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
            here = {
                k: v
                for k, v in named.items()
                if not isinstance(v, DaskFuture) and not is_dask_collection(v)
            }
            kept = {
                k: client.compute(v) if is_dask_collection(v) else v
                for k, v in named.items()
                if k not in here
            }
            if here:
                futures = await client._scatter(
                    list(here.values()), workers=[worker], direct=True, hash=False
                )
                kept |= dict(zip(here, futures, strict=True))
            if isinstance(batch, Mapping):
                return {k: kept[k] for k in named}
            return tuple(kept[k] for k in named)

        async def put_all() -> list[Any]:
            work = asyncio.gather(*(put(batch, worker) for batch, worker in batches))
            return await asyncio.wait_for(work, max(until - time.monotonic(), RETRY))

        return self._to.start(put_all()).result()


class TrainOp:
    """One replica's asynchronous train op: see :meth:`Session.train_ops`.

    Calls of one op come one after the other; those of several may come at the same time.
    """

    def __init__(
        self, to: Attachment, graphs: Graphs, replica: int, part: Any, batch_size: int | None
    ) -> None:
        # Of the thread that has made it: a block is not of those that will call it.
        self._device = graphs.device()
        self._to = to
        self._graphs = graphs
        self._replica = replica
        self._part = part
        self._batch_size = batch_size
        #: batches that were begun
        self._batches = 0
        #: the part on its worker, and which that is
        self._placed: tuple[Any, str] | None = None
        self._lock = threading.Lock()

    def __call__(self, *, timeout: float | str | None = None) -> float:
        to, graphs = self._to, self._graphs
        with self._lock:
            if hasattr(self._part, "__next__"):
                batch = checked_batch("a batch", next(self._part))
                self._placed = None
                which = None
            else:
                batch, which = self._part, self._rows()
            number = graphs.number()

            def once(tie: Tie, voice: Voice, until: float) -> float | Failure:
                workers = graphs.workers(tie, self._device)
                if self._placed is None or self._placed[1] not in workers:
                    worker = workers[self._replica % len(workers)]
                    (placed,) = graphs.place([(batch, worker)], until)
                    self._placed = placed, worker
                placed, worker = self._placed
                order = graphs.order(tie, voice, until, number, self._device)
                future = graphs.submit(ops.train, worker, order, self._replica, placed, which)
                try:
                    return graphs.outcome(future, voice, until)
                except (OSError, CancelledError):
                    # Its rows may have gone with their worker.
                    self._placed = None
                    raise

            return loss_of(to.persist(once, to.until(timeout)))

    def _rows(self) -> tuple[int, int] | None:
        """The number of the next batch, and how many rows it has; None: all that there are."""
        if self._batch_size is None:
            return None
        number, self._batches = self._batches, self._batches + 1
        return number, self._batch_size


@contextmanager
def _thread_lent() -> Iterator[None]:
    """Within a task on a worker: its thread may do the tasks that are waited for."""
    from distributed import rejoin, secede
    from distributed.threadpoolexecutor import thread_state

    pool = getattr(thread_state, "executor", None)
    if pool is None or threading.current_thread() not in pool._threads:
        yield
        return
    secede()
    try:
        yield
    finally:
        rejoin()


def checked_batch(key: str, batch: Any) -> Any:
    """A batch whose arrays can be told apart: a dict, or a tuple of two or three of equal rows.

    What is elsewhere, Futures and Dask collections, is taken as it is.
    """
    if isinstance(batch, Mapping) and batch:
        return {name: _array(f"{key}[{name!r}]", value) for name, value in batch.items()}
    if isinstance(batch, tuple | list) and len(batch) in (2, 3):
        names = ("x", "y", "weights")
        made = tuple(_array(f"{key}: {n}", v) for n, v in zip(names, batch, strict=False))
        _equal_rows(key, made)
        return made
    raise SpecError(
        f"{key}: found {type(batch).__name__} {batch!r:.60}, expected (x, y), (x, y, weights) or "
        f"a dict of arrays"
    )


def _array(key: str, value: Any) -> Any:
    from dask.base import is_dask_collection
    from distributed import Future as DaskFuture

    if isinstance(value, DaskFuture) or is_dask_collection(value):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{key}: found {type(value).__name__}, expected an array ({error})"
        ) from None
    if not array.ndim:
        raise DataError(f"{key}: found {value!r:.60}, expected an array whose first axis is rows")
    return array


def _equal_rows(key: str, arrays: Collection[Any]) -> None:
    rows = [array.shape[0] for array in arrays if isinstance(array, np.ndarray)]
    if len(set(rows)) > 1:
        raise DataError(f"{key}: found arrays of {rows} rows, expected as many in each")


def check_rows(key: str, part: Any) -> None:
    """Refuse a part that cannot be cut into batches of rows, as far as its arrays are here.

    Where those are that are elsewhere, the task checks them, too.
    """
    arrays = list(part.values() if isinstance(part, Mapping) else part)
    _equal_rows(key, arrays)
    if any(isinstance(array, np.ndarray) and not len(array) for array in arrays):
        raise DataError(f"{key}: found no rows, expected some")


def loss_of(found: float | Failure) -> float:
    """A loss; what the user's code has raised on a worker is raised, as itself if it can travel."""
    if not isinstance(found, Failure):
        return found
    if found.exception is None:
        raise JobFailed(f"{found.message}\n\n{found.traceback}", reason=found.reason)
    # A Dask peer is fully trusted.
    error: BaseException = cloudpickle.loads(found.exception)
    error.add_note(f"{found.message}\n\nRemote traceback:\n{found.traceback}")
    raise error
