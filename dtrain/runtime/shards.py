"""Variable shards where they are hosted: buffers, optimizer, and the machine that rules them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dtrain.arrays import aligned_bytes, quiet, xp_of
from dtrain.errors import ProtocolError
from dtrain.machines.shard import Phase, ShardMachine
from dtrain.messages import Abandon, Contribution, Flip, Pushed, Reduce, Reduced, Report, Verdict
from dtrain.optim import Optimizer
from dtrain.partition import Range, Shard
from dtrain.runtime.arena import Arena
from dtrain.runtime.points import at_point
from dtrain.tree import reduce_into, scratch_needed

#: Elements per piece of work: several passes over 128 KiB of float32 stay in the L2 cache.
CHUNK = 1 << 15

#: One flat array per range of a shard.
Flat = Sequence[Any]

#: The same, each cut into pieces of work.
Pieces = Sequence[Sequence[Any]]


class StepRefused(Exception):
    """A gradient or a loss of the step was not finite; the message names whose."""


def cut(buffer: Any, ranges: Sequence[Range]) -> list[Any]:
    """The typed flat views of a whole-model buffer that belong to a shard."""
    return [buffer[r.start : r.stop].view(r.dtype) for r in ranges]


def finite(array: Any) -> bool:
    """Whether all elements are finite; one pass, no temporary array in the usual case."""
    if math.isfinite(float(array.dot(array))):
        return True
    # The sum of squares overflows before the elements do.
    return bool(xp_of(array).isfinite(array).all())


class Updater:
    """The array maths of one shard: sums gradients, checks them, applies the optimizer.

    It keeps no state but scratch; versions are its caller's.

    Parameters
    ----------
    params : sequence of list of ndarray
        One flat array per range, for each of the buffers.
    slots : sequence of list of dict of str to ndarray
        The optimizer's slots, likewise.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        optimizer: Optimizer,
        replicas: int,
        params: Sequence[Flat],
        slots: Sequence[Sequence[Mapping[str, Any]]],
    ) -> None:
        self.ranges = ranges
        self.optimizer = optimizer
        self.replicas = replicas
        self.params = params
        self.slots = slots
        self._scratch: dict[str, list[Any]] = {}
        self._cuts: dict[tuple[int, int], list[tuple[Any, Any, Any, Any]]] = {}

    def pieces(self, flat: Flat) -> Pieces:
        """A gradient, cut as :meth:`reduce` takes it; views."""
        return [[array[a : a + CHUNK] for a in range(0, array.size, CHUNK)] for array in flat]

    def reduce(
        self,
        step: int,
        members: tuple[int, ...],
        weights: tuple[float, ...],
        leaves: Mapping[int, Pieces],
    ) -> int | None:
        """Apply the mean gradient of ``members`` to the buffer of ``step``, into the other one.

        Returns None, or whose gradient is not finite; -1 if only their sum is not.
        """
        extra = scratch_needed(members, weights, self.replicas)
        for k, r in enumerate(self.ranges):
            buffers = self._buffers(r.dtype, extra)
            for c, (params, slots, out, out_slots) in enumerate(self._slices(step % 2, k)):
                n = params.size
                grad, *work = buffers if n == CHUNK else [x[:n] for x in buffers]
                pieces = {i: leaves[i][k][c] for i in members}
                reduce_into(members, weights, self.replicas, pieces, grad, work, xp_of(params))
                if not finite(grad):
                    wrong = (i for i in members if not all(map(finite, leaves[i][k])))
                    return next(wrong, -1)
                self.optimizer.update(step + 1, grad, params, slots, out, out_slots, work)
        return None

    def _slices(self, old: int, k: int) -> list[tuple[Any, Any, Any, Any]]:
        """What each chunk of a range reads and writes, by the buffer that it reads; made once."""
        if (old, k) not in self._cuts:
            new = 1 - old

            def cut_at(a: int) -> tuple[Any, Any, Any, Any]:
                b = a + CHUNK
                slots, out_slots = self.slots[old][k], self.slots[new][k]
                return (
                    self.params[old][k][a:b],
                    {name: slot[a:b] for name, slot in slots.items()},
                    self.params[new][k][a:b],
                    {name: slot[a:b] for name, slot in out_slots.items()},
                )

            size = self.params[old][k].size
            self._cuts[old, k] = [cut_at(a) for a in range(0, size, CHUNK)]
        return self._cuts[old, k]

    def apply(self, step: int, grads: Flat) -> None:
        """Apply one gradient in place, as update number ``step`` (from 1)."""
        for k, r in enumerate(self.ranges):
            buffers = self._buffers(r.dtype, 0)
            params, slots = self.params[0][k], self.slots[0][k]
            for a in range(0, params.size, CHUNK):
                b = min(a + CHUNK, params.size)
                # The optimizer may write to its gradient; the replica's is not its to write to.
                grad, *work = (x[: b - a] for x in buffers)
                grad[...] = grads[k][a:b]
                views = {name: slot[a:b] for name, slot in slots.items()}
                self.optimizer.update(step, grad, params[a:b], views, params[a:b], views, work)

    def _buffers(self, dtype: str, extra: int) -> list[Any]:
        count = 1 + max(extra, self.optimizer.scratch)
        known = self._scratch.get(dtype, [])
        if len(known) < count:
            known = self._scratch[dtype] = [np.empty(CHUNK, dtype) for _ in range(count)]
        return known


def private_slots(
    optimizer: Optimizer, ranges: Sequence[Range], buffers: int
) -> list[list[dict[str, Any]]]:
    """The optimizer's slots of a shard in memory of this process, ``buffers`` times."""
    return [
        [dict(optimizer.init(aligned_bytes(r.stop - r.start).view(r.dtype))) for r in ranges]
        for _ in range(buffers)
    ]


def fill_slots(slots: Sequence[Mapping[str, Any]], values: Mapping[str, Flat] | None) -> None:
    """Begin with these; ``values``: slot name -> one flat array per range."""
    for name, arrays in (values or {}).items():
        for target, source in zip(slots, arrays, strict=True):
            target[name][...] = source


#: What a shard is at one version: its parameters, one flat array per range, and likewise its slots.
Contents = tuple[list[Any], dict[str, list[Any]]]


def contents(params: Flat, slots: Sequence[Mapping[str, Any]]) -> Contents:
    """Private copies."""
    names = slots[0] if slots else ()
    return [p.copy() for p in params], {n: [of[n].copy() for of in slots] for n in names}


class SyncShard:
    """A shard under synchronous training: double-buffered, flipped by the step's verdict.

    Parameters
    ----------
    publish : bool
        Whether somebody reads the shard from afar: a private copy of each version is made for
        it, because what is being sent must not be written to.
    report : callable
        Tells the lead that a step is reduced; called with the arena's lock held.
    slots : mapping of str to list of ndarray, optional
        What the optimizer has gathered so far; as at the start if not given.
    """

    def __init__(
        self,
        arena: Arena,
        shard: Shard,
        machine: ShardMachine,
        optimizer: Optimizer,
        replicas: int,
        *,
        publish: bool,
        report: Callable[[Reduced], None],
        slots: Mapping[str, Flat] | None = None,
    ) -> None:
        self.arena = arena
        self.index = shard.index
        self.ranges = shard.ranges
        self.machine = machine
        self.publish = publish
        self._report = report
        self._params = [cut(buffer, shard.ranges) for buffer in arena.buffers]
        self._slots = private_slots(optimizer, shard.ranges, 2)
        fill_slots(self._slots[machine.version % 2], slots)
        self._updater = Updater(shard.ranges, optimizer, replicas, self._params, self._slots)
        #: replica -> its gradient of the step being gathered
        self._grads: dict[int, Pieces] = {}
        self._pending: Flat | None = None
        #: a private copy of the committed version, if somebody reads from afar
        self.published: Flat | None = None
        self._watchers: list[tuple[int, Callable[[], None]]] = []
        if publish:
            self.published = [p.copy() for p in self._params[machine.version % 2]]

    @property
    def version(self) -> int:
        return self.machine.version

    # -- with the arena's lock held ----------------------------------------------------------

    def pieces(self, flat: Flat) -> Pieces:
        """A gradient, cut as :meth:`push` takes it; views."""
        return self._updater.pieces(flat)

    @property
    def reported(self) -> bool:
        """Whether the version after this one lies in the other buffer, for the verdict to come."""
        return self.machine.phase is Phase.REPORTED

    def contents(self, version: int) -> Contents:
        """What the shard is at a version that it has."""
        if version != self.version and not (version == self.version + 1 and self.reported):
            raise ProtocolError(
                f"shard {self.index}: version {version} is wanted, found {self.version}, "
                f"{self.machine.phase.value}"
            )
        return contents(self._params[version % 2], self._slots[version % 2])

    def push(self, event: Pushed, grads: Mapping[int, Pieces], *, busy: bool = False) -> None:
        self.arena.commits()
        fresh = self.machine.new(event)
        commands = self.machine.handle(event, time.monotonic())
        for contribution in fresh:
            self._grads[contribution.replica] = grads[contribution.replica]
        for command in commands:
            assert isinstance(command, Reduce)
            self.arena.queue(partial(self._reduce, command), busy=busy)

    def decide(self, verdict: Verdict) -> None:
        self.arena.commits()
        for command in self.machine.handle(verdict, time.monotonic()):
            if isinstance(command, Abandon):
                self.arena.fail(StepRefused(command.problem))
            elif isinstance(command, Flip):
                self._grads = {}
                self.published, self._pending = self._pending, None
                self.arena.progress.notify_all()
                due = [w for at, w in self._watchers if at <= command.version]
                self._watchers = [(at, w) for at, w in self._watchers if at > command.version]
                for watcher in due:
                    watcher()

    def watch(self, version: int, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` once the version is committed."""
        if self.version >= version:
            watcher()
        else:
            self._watchers.append((version, watcher))

    # -- array maths: in whichever thread takes the work, without the lock -------------------

    def _reduce(self, command: Reduce) -> None:
        step = command.step
        at_point("applying")
        with quiet():
            culprit = self._updater.reduce(step, command.members, command.weights, self._grads)
        problem = None
        if culprit is not None:
            problem = describe_culprit(self.machine.gathered.get(culprit), step)
        elif self.publish:
            self._pending = [p.copy() for p in self._params[(step + 1) % 2]]
        event = Reduced(self.machine.generation, step, self.index, problem)
        with self.arena.lock:
            self.arena.commits()
            for answer in self.machine.handle(event, time.monotonic()):
                assert isinstance(answer, Report)
                self._report(answer.event)


def describe_culprit(c: Contribution | None, step: int) -> str:
    """Whose gradient is not finite, in words; None: no single one's."""
    if c is None:
        return f"the sum of the gradients overflows at step {step}"
    return (
        f"the gradient of replica {c.replica} is not finite at step {step} "
        f"(partition {c.part}, batch {c.batch})"
    )


class AsyncShard:
    """A shard under asynchronous training: each gradient is applied, in place, as it arrives.

    Its lock is held during array maths, so it is never taken in the event loop.
    """

    def __init__(
        self,
        arena: Arena,
        shard: Shard,
        optimizer: Optimizer,
        *,
        version: int = 0,
        slots: Mapping[str, Flat] | None = None,
    ) -> None:
        self.arena = arena
        self.index = shard.index
        self.ranges = shard.ranges
        #: updates applied
        self.version = version
        #: replica -> the number of its last gradient, so that a repeated one is recognised
        self._last: dict[int, int] = {}
        self._lock = threading.Lock()
        self._params = cut(arena.buffers[0], shard.ranges)
        self._slots = private_slots(optimizer, shard.ranges, 1)
        fill_slots(self._slots[0], slots)
        self._updater = Updater(shard.ranges, optimizer, 1, [self._params], self._slots)

    def push_pull(
        self, replica: int, request: int, version: int, grads: Flat | None, into: Flat
    ) -> tuple[int, int, bool]:
        """Apply ``grads`` (if any), copy the parameters to ``into``.

        ``request`` numbers the gradients of a replica; one that comes again is not applied
        again.  ``version`` is the one that the gradient was computed from.  Returns the version
        copied, the age of the gradient (the updates applied between its pull and its apply), and
        whether it was applied just now.
        """
        with self._lock:
            self.arena.commits()
            age = self.version - version
            fresh = grads is not None and self._last.get(replica, -1) < request
            if grads is not None and fresh:
                self._last[replica] = request
                at_point("applying")
                with quiet():
                    self._updater.apply(self.version + 1, grads)
                self.version += 1
            for source, target in zip(self._params, into, strict=True):
                target[...] = source
            return self.version, age, fresh

    @property
    def last(self) -> Mapping[int, int]:
        """Replica -> the number of its last gradient that was applied here."""
        return self._last

    def contents(self) -> tuple[int, Contents]:
        """The version, and what the shard is then; array maths."""
        with self._lock:
            return self.version, contents(self._params, self._slots[0])
