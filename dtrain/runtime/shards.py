"""Variable shards where they are hosted: buffers, optimizer, and the machine that rules them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dtrain.arrays import aligned_bytes, quiet
from dtrain.errors import ProtocolError
from dtrain.layout import Layout
from dtrain.machines.shard import Phase, ShardMachine
from dtrain.messages import (
    Abandon,
    Closed,
    Contribution,
    Flip,
    Keep,
    Measured,
    Measures,
    Pushed,
    Reduce,
    Reduced,
    Report,
    Verdict,
)
from dtrain.optim import Optimizer
from dtrain.partition import Range, Shard
from dtrain.runtime.arena import Arena
from dtrain.runtime.points import at_point
from dtrain.runtime.updater import Flat, Pieces, Updater, cut, make_work


class StepRefused(Exception):
    """A gradient or a loss of the step was not finite; the message names whose."""


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
    layout : Layout
        Of the whole model.
    report : callable
        Tells the lead that a step is reduced; called with the arena's lock held.
    measured : callable
        Tells the lead the sums of a stage of the optimizer that is not its last; likewise.
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
        layout: Layout,
        publish: bool,
        report: Callable[[Reduced], None],
        measured: Callable[[Measured], None],
        slots: Mapping[str, Flat] | None = None,
    ) -> None:
        self.arena = arena
        self.index = shard.index
        self.ranges = shard.ranges
        self.machine = machine
        self.publish = publish
        self._report = report
        self._measured = measured
        self._optimizer = optimizer
        self._params = [cut(buffer, shard.ranges) for buffer in arena.buffers]
        self._slots = private_slots(optimizer, shard.ranges, 2)
        fill_slots(self._slots[machine.version % 2], slots)
        work = make_work(shard.ranges) if optimizer.stages > 1 else None
        self._updater = Updater(shard, layout, optimizer, replicas, self._params, self._slots, work)
        self._layout = layout
        #: replica -> its gradient of the step being gathered
        self._grads: dict[int, Pieces] = {}
        #: the last step that the lead was asked about
        self._asked = -1
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
        self._begin(commands, busy=busy)

    def asks(self, step: int) -> bool:
        """Whether the lead is to be asked whose gradients make the step at hand; once a step."""
        machine = self.machine
        if step != machine.version or machine.expected is not None or self._asked == step:
            return False
        self._asked = step
        return True

    def close(self, event: Closed) -> None:
        """It is known whose gradients make the step."""
        self.arena.commits()
        self._begin(self.machine.handle(event, time.monotonic()))

    def _begin(self, commands: Sequence[Any], *, busy: bool = False) -> None:
        for command in commands:
            assert isinstance(command, Reduce)
            self.arena.queue(partial(self._reduce, command), busy=busy)

    def decide(self, verdict: Verdict) -> None:
        self.arena.commits()
        for command in self.machine.handle(verdict, time.monotonic()):
            if isinstance(command, Abandon):
                self.arena.fail(StepRefused(command.problem))
            elif isinstance(command, Flip | Keep):
                self._grads = {}
                if isinstance(command, Keep):
                    self._keep(verdict.step)
                self.published, self._pending = self._pending, None
                self.arena.progress.notify_all()
                due = [w for at, w in self._watchers if at <= command.version]
                self._watchers = [(at, w) for at, w in self._watchers if at > command.version]
                for watcher in due:
                    watcher()

    def _keep(self, step: int) -> None:
        """The step is passed over; array maths under the lock, but as seldom as that."""
        self._updater.keep(step)
        if self.publish:
            self._pending = [p.copy() for p in self._params[(step + 1) % 2]]

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
            sums = None if self._optimizer.stages == 1 else self._updater.no_sums()
            culprit = self._updater.reduce(
                step, command.members, command.weights, self._grads, sums
            )
        problem = None
        if culprit is not None:
            problem = describe_culprit(self.machine.gathered.get(culprit), step)
        if sums is None:
            self._reduced(step, problem)
        else:
            self._exchange(step, 0, problem, sums)

    def _exchange(self, step: int, stage: int, problem: str | None, sums: Any) -> None:
        """Tell the lead the sums of this shard; it answers with those of all, see :meth:`go_on`."""
        event = Measured(
            self.machine.generation, step, stage, self.index, problem, self._updater.blocks, sums
        )
        with self.arena.lock:
            self.arena.commits()
            self._measured(event)

    def go_on(self, measures: Measures) -> None:
        """All shards have been through a stage; with the arena's lock held."""
        self.arena.queue(partial(self._next_stage, measures))

    def _next_stage(self, measures: Measures) -> None:
        step, index = measures.step, measures.stage + 1
        if measures.problem is not None:
            # Some shard has refused the step, which says so itself.
            own = measures.problem if measures.shard == self.index else None
            self._reduced(step, own)
            return
        last = index + 1 == self._optimizer.stages
        at_point("applying")
        with quiet():
            factors = self._optimizer.resolve(
                measures.stage, measures.sums, self._layout.block_variables
            )
            sums = None if last else self._updater.no_sums()
            self._updater.go_on(index, step, factors, sums)
        if sums is None:
            self._reduced(step, None)
        else:
            self._exchange(step, index, None, sums)

    def _reduced(self, step: int, problem: str | None) -> None:
        """The next version lies in the other buffer, or never will."""
        if self.publish and problem is None:
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
        layout: Layout,
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
        self._updater = Updater(shard, layout, optimizer.inner, 1, [self._params], self._slots)

    def push_pull(
        self,
        replica: int,
        request: int,
        version: int,
        grads: Flat | None,
        into: Flat,
        applied: Callable[[int, int, bool], None],
    ) -> int:
        """Apply ``grads`` (if any), copy the parameters to ``into``; returns their version.

        ``request`` numbers the gradients of a replica; one that comes again is not applied
        again.  ``version`` is the one that the gradient was computed from.  In between
        ``applied`` is told the version, the age of the gradient (the updates applied between its
        pull and its apply), and whether it was applied just now.
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
            applied(self.version, age, fresh)
            for source, target in zip(self._params, into, strict=True):
                target[...] = source
            return self.version

    @property
    def last(self) -> Mapping[int, int]:
        """Replica -> the number of its last gradient that was applied here."""
        return self._last

    def contents(self) -> tuple[int, Contents]:
        """The version, and what the shard is then; array maths."""
        with self._lock:
            return self.version, contents(self._params, self._slots[0])
