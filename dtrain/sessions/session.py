"""A session: variables that any process of a cluster attaches to by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from dtrain.errors import (
    ClusterError,
    DataError,
    DTrainError,
    NonFiniteError,
    SessionLost,
    SessionNotFound,
    SpecError,
)
from dtrain.optim import Optimizer
from dtrain.optim._base import optimizer_from
from dtrain.partition import Partitioner, PlacementFunction, check_placement
from dtrain.runtime.sessions.conversation import (
    RETRY,
    Conversation,
    Tie,
    Voice,
    finite_flat,
    gather,
    gradient,
    lend,
    wanted_bytes,
)
from dtrain.sessions.attachment import Attachment
from dtrain.sessions.creation import create
from dtrain.sessions.ingraph import Graphs, TrainOp, check_rows, checked_batch
from dtrain.sessions.overview import described
from dtrain.sessions.queue import Queue, open_queue
from dtrain.sessions.reader import Reader, open_reader
from dtrain.sessions.shared import TIMEOUT, Shared
from dtrain.spec import whole

if TYPE_CHECKING:
    from distributed import Client

#: Pushes that nobody waits for, of one session object; one more waits for the oldest.
_UNDER_WAY = 8


@dataclass(frozen=True)
class Snapshot:
    """Parameters as of one moment between two assigns.

    Attributes
    ----------
    version : int
        Updates (pushes and assigns) that each shard has had at least.  It falls only where a
        worker was lost, and the variables go on from a checkpoint.
    params : dict of str to ndarray
        Private copies, in the order of the model.
    """

    version: int
    params: dict[str, np.ndarray]


class Session:
    """The container of a name: all sessions of it, in any process, have the same variables.

    A context manager.  The variables outlive it: they end by :meth:`reset`, or the time to live
    (setting ``session-ttl``) after the last client has left.  Its methods may be called from
    several threads at a time.

    Parameters
    ----------
    name : str
        1 to 200 characters, of any kind.
    client : distributed.Client or str, optional
        A Client or the address of a scheduler.  None: the current client, also within a task on a
        worker; else the address that the environment or Dask's configuration names.
    timeout : float or str
        Seconds that each call may take, waiting included, unless it says otherwise.

    Raises
    ------
    ClusterError
        No cluster is there, or none of its workers has dtrain.
    """

    def __init__(
        self, name: str, client: Client | str | None = None, *, timeout: float | str = 60.0
    ) -> None:
        self._to = Attachment(name, client, timeout)
        self._graphs = Graphs(self._to)
        #: those that nobody has waited for, and what sees each to its end
        self._pushes: list[tuple[Future[int], Callable[[], int]]] = []
        #: (kind, name) -> the handle of a queue or reader that was opened last
        self._shared: dict[tuple[str, str], Shared] = {}

    @property
    def name(self) -> str:
        return self._to.name

    def __repr__(self) -> str:
        return f"<dtrain session {self.name!r} at {self._to.control.address}>"

    def __reduce__(self) -> Never:
        raise SpecError(
            f"session {self.name}: found it on its way to another process, expected its name "
            f"alone: it is opened there by Session({self.name!r})"
        )

    # -- life --------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # What it was at work on is handed out again.
        for shared in self._shared.values():
            shared.leave()
        # What the block has raised is not to be hidden.
        with suppress(DTrainError, OSError):
            self.close()

    def close(self) -> None:
        """Leave the session, whose variables stay; pushes that nobody has waited for are done.

        What this thread has got from its queues and readers is done with; what other threads have
        is handed out again.

        Raises
        ------
        DTrainError
            One of these has failed.
        """
        if self._to.closed:
            return
        if self._to.client.status == "closed":
            # There is nobody to tell, and no event loop in which a push could end.
            self._to.leave()
            if self._pushes:
                raise ClusterError(
                    f"session {self.name}: its client was closed before the session; pushes under "
                    f"way, of which nothing is known: {len(self._pushes)}"
                )
            return
        self._to.check_open()
        with ExitStack() as last:
            last.callback(self._to.leave)
            for shared in self._shared.values():
                last.push(shared)
            self._finish()

    def _finish(self) -> None:
        """All pushes are over; the first error of theirs is raised then."""
        errors: list[BaseException] = []
        while self._pushes:
            try:
                self._settle(0)
            except (DTrainError, OSError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def create(
        self,
        model: Any,
        *,
        optimizer: Optimizer | Mapping[str, Any],
        seed: int = 0,
        partitioner: Partitioner | None = None,
        placement: str | PlacementFunction = "greedy",
        device: str | None = None,
        timeout: float | str | None = None,
    ) -> Session:
        """Create the variables, or attach to those that another process has created.

        The first that comes creates; all others wait for it.  If it dies on the way, the next one
        creates.

        Parameters
        ----------
        model : object
            As :func:`dtrain.fit` takes it.
        optimizer : Optimizer
            What :meth:`push` and :meth:`step` apply gradients with.
        seed : int
            Of the initial values.
        partitioner : Partitioner, optional
            How many shards there are.  None: as many as workers, but none of less than 4 MiB, so
            that small variables lie in one, which is asked faster than several.  Sessions with
            few shards have them on different workers, where those have the fewest bytes.
        placement : str or callable
            As in :func:`dtrain.fit`.
        device : str, optional
            Where :meth:`step` and :meth:`train_ops` of this object compute gradients, in the words
            of :class:`dtrain.device`: each that attaches says so for itself.  None: that of the
            innermost block, else "auto".  The variables are in host memory in any case.

        Returns
        -------
        Session
            This one.

        Raises
        ------
        SpecError
            Variables of another model, optimizer or seed are there under this name; the model
            cannot have variables; or no worker has the device.
        NonFiniteError
            The model's initial values are not finite; nothing is created.
        DeadlineError
            They were not there in time; it names who was to create them.
        SessionLost
            They were there, and went with a worker.
        FencedError
            The session was reset meanwhile.
        """
        made = optimizer_from("optimizer", optimizer)
        whole("seed", seed, least=0)
        if partitioner is not None and not isinstance(partitioner, Partitioner):
            raise SpecError(
                f"partitioner: found {partitioner!r}, expected dtrain.FixedShards(...), "
                f"dtrain.MinSize(...) or dtrain.MaxSize(...)"
            )
        if not callable(placement):
            check_placement(placement)
        self._to.check_open()
        self._graphs.use(device)
        create(self._to, model, made, seed, partitioner, placement, self._to.until(timeout))
        return self

    def reset(self) -> None:
        """End the variables, for all that have them: their next call raises FencedError.

        The session's queues and readers end with them: whoever waits there is told by QueueLost.

        Once this returns nothing of them is left, and the name is free for others.
        """
        to = self._to
        with to.lock:
            to.check_open()
            with suppress(SessionNotFound):  # then there is nothing
                to.call("dtrain_session_reset", client=to.id, origin=to.origin)
            to.forget()

    # -- variables ---------------------------------------------------------------------------

    def pull(
        self, names: Collection[str] | None = None, *, timeout: float | str | None = None
    ) -> Snapshot:
        """Copies of the parameters; what an assign has written is in it whole or not at all.

        Parameters
        ----------
        names : collection of str, optional
            Only these variables; only what they take travels.

        Raises
        ------
        SpecError
            A name that the model does not have.
        DeadlineError, SessionLost, FencedError
            As :meth:`create`.
        """
        if names is not None:
            names = _names(names)

        near = True

        async def pull(conversation: Conversation, tie: Tie) -> Any:
            about = tie.about
            wanted = None
            if names is not None:
                known = [v.name for v in about.layout.variables]
                unknown = [name for name in names if name not in known]
                if unknown:
                    raise SpecError(f"names: found {unknown[0]!r}, expected some of {known}")
                wanted = wanted_bytes(about, names)
            shards = range(len(tie.hosts)) if wanted is None else sorted(wanted)
            return tie, wanted, await conversation.pull(shards, wanted, near=near)

        until = self._to.until(timeout)
        tie, wanted, pulled = self._to.converse(pull, timeout)
        try:
            flat = gather(tie.about, pulled, wanted, self._to.buffers)
            tie.has_read(pulled, well=True)
        except OSError:
            # What is sent is there.
            tie.has_read(pulled, well=False)
            near = False
            left = max(until - time.monotonic(), RETRY)
            tie, wanted, pulled = self._to.converse(pull, left)
            flat = gather(tie.about, pulled, wanted, self._to.buffers)
        views = tie.about.layout.views(flat)
        params = {n: v for n, v in views.items() if names is None or n in names}
        return Snapshot(pulled.version, params)

    def push(
        self,
        grads: Mapping[str, Any],
        version: int | None = None,
        wait: bool = True,
        *,
        timeout: float | str | None = None,
    ) -> int | None:
        """Apply a gradient through the optimizer, at once, whole at each shard.

        Parameters
        ----------
        grads : mapping of str to ndarray
            One for each variable, of its shape and dtype; it may be written to once this returns.
        version : int, optional
            That of the snapshot that it was computed from: its age is counted, see
            :func:`dtrain.sessions.show`.
        wait : bool
            Return once it is applied.  Else at once, unless there are many under way: what goes
            wrong is raised by the next push, or by :meth:`close`.

        Returns
        -------
        int or None
            A version that has it; None if it is not waited for.

        Raises
        ------
        DataError
            Names the variable that is missing, unknown, or of a wrong shape or dtype.
            No shard applies any of it.
        NonFiniteError
            Names the variable that is not finite.  Likewise.
        DeadlineError, SessionLost, FencedError
            As :meth:`create`.  Some shards may have applied it, others not.
        """
        if version is not None:
            whole("version", version, least=0)
        self._to.check_open()
        self._settle(_UNDER_WAY - 1)
        tie = self._to.attached(self._to.until(timeout))
        try:
            flat = gradient(tie.about, grads, self._to.buffers)
        except ValueError as error:
            raise DataError(f"session {self.name}: grads: {error}") from None
        except FloatingPointError as error:
            raise self._not_finite("grads", error) from None

        async def push(conversation: Conversation, tie: Tie) -> int:
            return await conversation.push(flat, version)

        if wait:
            return self._to.converse(push, timeout, lends=flat)
        voice, until = tie.voices.take(), self._to.until(timeout)
        begun = self._to.start(self._to.talk(push, tie, voice, until, lend(tie, voice, flat)))

        def end(tie: Tie, own: Voice, until: float) -> int:
            """What has begun, to its end; only if that fails is it done as any other."""
            if own is voice and not ended:
                ended.append(True)
                return begun.result()
            lent = lend(tie, own, flat)
            return self._to.start(self._to.talk(push, tie, own, until, lent)).result()

        ended: list[bool] = []
        with self._to.lock:
            self._pushes.append((begun, lambda: self._to.persist(end, until, tie, voice)))
        return None

    def _not_finite(self, what: str, error: FloatingPointError) -> NonFiniteError:
        return NonFiniteError(f"session {self.name}: {what}: {error}", reason="NON_FINITE")

    def assign(self, params: Mapping[str, Any], *, timeout: float | str | None = None) -> int:
        """Put parameters in the place of those that are there; all others see all of it, or none.

        What the optimizer has gathered stays.

        Parameters
        ----------
        params : mapping of str to ndarray
            One for each variable, of its shape and dtype.

        Returns
        -------
        int
            A version that has it.

        Raises
        ------
        DataError
            Names the variable that is missing, unknown, or of a wrong shape or dtype.
        NonFiniteError
            Names the variable that is not finite.  Either way nothing was assigned.
        DeadlineError, SessionLost, FencedError
            As :meth:`create`.  If its turn has not come in time nothing was assigned.
        """
        tie = self._to.attached(self._to.until(timeout))
        try:
            flat = finite_flat(tie.about, params, self._to.buffers)
        except ValueError as error:
            raise DataError(f"session {self.name}: params: {error}") from None
        except FloatingPointError as error:
            raise self._not_finite("params", error) from None

        async def put(conversation: Conversation, tie: Tie) -> int:
            return await conversation.put(flat)

        return self._to.converse(put, timeout, lends=flat)

    # -- in-graph training -------------------------------------------------------------------

    def step(self, batches: Sequence[Any], *, timeout: float | str | None = None) -> float:
        """One synchronous step: a gradient of each batch on a worker, and one update of the mean.

        In-graph replication: tasks of Dask, which are in its task stream by name.  All replicas
        compute from the same parameters; the mean weighs each by its samples, and is added up in
        a fixed order.

        Parameters
        ----------
        batches : sequence
            One for each replica: ``(x, y)``, ``(x, y, weights)``, or a dict of arrays.  NumPy
            arrays go straight to the replica's worker; Futures and Dask collections stay where
            they are.

        Returns
        -------
        float
            The mean loss, before the update.

        Raises
        ------
        Exception
            The model's own, with the remote traceback in a note.
        DataError
            A gradient of the model does not fit its variables.
        NonFiniteError
            A loss or a gradient is not finite; the replica is named, and nothing is applied.
        DeadlineError, SessionLost, FencedError
            As :meth:`create`.
        """
        made = [
            checked_batch(f"batches[{i}]", batch)
            for i, batch in enumerate(_one_each("batches", batches))
        ]
        return self._graphs.step(made, timeout)

    def train_ops(self, parts: Sequence[Any], *, batch_size: int | None = None) -> list[TrainOp]:
        """An asynchronous train op for each replica, to be called from threads at the same time.

        In-graph replication: each call is a task on the replica's worker, which pulls the
        parameters, computes a gradient of the next batch, and pushes it at once.

        Parameters
        ----------
        parts : sequence
            One for each replica: ``(x, y)``, ``(x, y, weights)`` or a dict of arrays, as
            :meth:`step` takes them, which goes to the replica's worker once; or an iterator of
            batches, of which each call takes the next.
        batch_size : int, optional
            Rows for each call, one batch after the other and then from the start again; None: all
            of the part.  Not for iterators.  The task cuts them, so that Futures will do, too;
            DataError from the call if they have no rows, or not as many in each array.

        Returns
        -------
        list of callable
            Each returns the loss of its batch before the update, and raises what :meth:`step`
            does; StopIteration where its iterator has ended.
        """
        self._to.check_open()
        if batch_size is not None:
            whole("batch_size", batch_size)
        made = []
        for replica, part in enumerate(_one_each("parts", parts)):
            if not hasattr(part, "__next__"):
                part = checked_batch(f"parts[{replica}]", part)
                if batch_size is not None:
                    check_rows(f"parts[{replica}]", part)
            elif batch_size is not None:
                raise SpecError(
                    f"batch_size: found {batch_size}, expected None where parts[{replica}] is an "
                    f"iterator of batches"
                )
            made.append(TrainOp(self._to, self._graphs, replica, part, batch_size))
        return made

    # -- checkpoints -------------------------------------------------------------------------

    def checkpoint(
        self, path: str | os.PathLike[str], *, keep: int = 3, timeout: float | str | None = None
    ) -> str:
        """Write the variables, and what the optimizer has gathered; as of one assign.

        If a worker with shards is lost later, the variables go on from the newest checkpoint.

        Parameters
        ----------
        path : path
            A folder, or a URL that fsspec knows; of the workers, which write and read it.
        keep : int
            How many checkpoints stay there.

        Returns
        -------
        str
            The place of this one.

        Raises
        ------
        StorageError
            It cannot be written; older ones stay.
        DeadlineError, SessionLost, FencedError
            As :meth:`create`.
        """
        where = _absolute(path)
        whole("keep", keep)
        return self._keep("dtrain_session_save", timeout, where=where, keep=keep)

    def restore(self, path: str | os.PathLike[str], *, timeout: float | str | None = None) -> None:
        """Go on from the newest checkpoint in ``path``; seen whole or not at all.

        Also where the variables were lost with a worker.  They have been created before, with
        the same model and optimizer; the number of shards may be another.

        Raises
        ------
        CheckpointError
            There is none, or it does not fit.
        DeadlineError, SessionLost, FencedError
            As :meth:`create`; SessionLost, if lost variables cannot be restored from there.
        """
        where, until = _absolute(path), self._to.until(timeout)
        try:
            self._keep("dtrain_session_load", max(until - time.monotonic(), RETRY), where=where)
        except SessionLost:
            with self._to.lock:
                self._to.take(self._to.ask_master("dtrain_session_restore", until, source=where))

    def _keep(self, op: str, timeout: float | str | None, **message: Any) -> Any:
        """Have the worker with the lead do something."""

        async def tell(conversation: Conversation, tie: Tie) -> Any:
            left = max(until - time.monotonic(), RETRY)
            return await self._to.ask_worker(
                tie.hosts[0],
                op,
                left + self._to.settings.poll,
                session=self.name,
                generation=tie.generation,
                seconds=left,
                **message,
            )

        until = self._to.until(timeout)
        return self._to.converse(tell, timeout)

    def variables(self) -> list[dict[str, Any]]:
        """Where each variable lies: an entry for each part of it that a shard has.

        Returns
        -------
        list of dict
            ``name``; ``shape`` and ``dtype`` of the whole variable; ``device``; ``shard``;
            ``rows``, the first and the one after the last; ``worker``, its address; ``bytes``.
        """
        until = self._to.until(None)
        # Whoever has not spoken to them since does not know that they have moved.
        self._to.renew(self._to.attached(until))
        tie = self._to.attached(until)
        return described(tie.about, tie.hosts)

    def _settle(self, most: int) -> None:
        """Wait until no more than so many pushes are under way; raises what has gone wrong."""
        while True:
            with self._to.lock:
                ready = [entry for entry in self._pushes if entry[0].done()]
                if not ready and len(self._pushes) > most:
                    ready = self._pushes[:1]
                if not ready:
                    return
                self._pushes = [entry for entry in self._pushes if entry not in ready]
            for number, (_, end) in enumerate(ready):
                try:
                    end()
                except BaseException:
                    with self._to.lock:
                        self._pushes = ready[number + 1 :] + self._pushes
                    raise

    # -- queues and readers ------------------------------------------------------------------

    def queue(
        self,
        name: str,
        capacity: int | None = None,
        *,
        nbytes: int | str | None = None,
        timeout: float | str = TIMEOUT,
    ) -> Queue:
        """A bounded queue that all processes of the session share: :class:`dtrain.queues.Queue`.

        It is made by whoever comes first, and its handle is left when the session is closed.

        Parameters
        ----------
        name : str
        capacity : int, optional
            Items that may wait to be got; needed by whoever comes first.
        nbytes : int or str, optional
            Bytes that all items together may have; 256 MiB if whoever comes first does not say.
        timeout : float or str
            How long a put or get waits that does not say so itself.

        Raises
        ------
        SpecError
            There is one with other bounds, or there is none and no capacity is given.
        """
        self._to.check_open()
        with self._to.lock:
            known = self._shared.get(("queue", name))
            found = open_queue(
                self._to.client,
                self.name,
                name,
                capacity,
                nbytes=nbytes,
                timeout=timeout,
                known=known,
            )
            self._shared["queue", name] = found
        return found

    def reader(
        self,
        name: str,
        X: Any = None,
        y: Any = None,
        *,
        batch_size: int = 32,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        timeout: float | str = TIMEOUT,
    ) -> Reader:
        """Batches of rows, shared: whoever asks next gets the next; :class:`dtrain.readers.Reader`.

        Parameters
        ----------
        name : str
        X, y : ndarray or dask.array.Array, optional
            Shapes (rows, ...).  Without X the reader must be there already.
        batch_size, epochs : int
        seed : int
            The order of the rows; with ``shuffle=False`` they come as they lie.
        timeout : float or str
            How long a get waits that does not say so itself.

        Raises
        ------
        SpecError
            There is one of another make, or there is none and no X is given.
        DataError
            X and y do not fit each other.
        """
        self._to.check_open()
        with self._to.lock:
            known = self._shared.get(("reader", name))
            found = open_reader(
                self._to.client,
                self.name,
                name,
                X,
                y,
                batch_size=batch_size,
                epochs=epochs,
                seed=seed,
                shuffle=shuffle,
                timeout=timeout,
                known=known,
            )
            self._shared["reader", name] = found
        return found


def _one_each(key: str, found: Any) -> Sequence[Any]:
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise SpecError(
            f"{key}: found {type(found).__name__} {found!r:.60}, expected a list of one for each "
            f"replica"
        )
    return found


def _names(found: Any) -> list[str]:
    names = [] if isinstance(found, str) or not isinstance(found, Iterable) else list(found)
    if not names:
        raise SpecError(f"names: found {found!r:.80}, expected a list of names")
    return names


def _absolute(path: str | os.PathLike[str]) -> str:
    place = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(place, str) or not place:
        raise SpecError(f"path: found {path!r:.80}, expected a folder or a URL")
    return place if "://" in place else os.path.abspath(place)
