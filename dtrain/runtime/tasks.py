"""What the tasks of an in-graph step do, each on its worker; :mod:`.ingraph` makes graphs of them.

A task finds its job's host in the worker's process and works with what that has prepared.  What
goes wrong is a value like any other: the failure of one task is the result of all that depend on
it, up to the verdict, so that Dask has nothing to retry and the user's exception arrives as it
was raised.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dtrain.arrays import aligned_bytes, quiet
from dtrain.errors import DeadlineError, ProtocolError
from dtrain.messages import Batch, Contribution, Failure, Verdict
from dtrain.partition import Range
from dtrain.runtime.arena import Stopped, frozen, poisoned
from dtrain.runtime.points import at_point
from dtrain.runtime.shards import Contents, describe_culprit
from dtrain.runtime.updater import Updater, cut, make_work
from dtrain.runtime.usercode import describe

if TYPE_CHECKING:
    from dtrain.runtime.replica import Trainer


@dataclass(frozen=True, slots=True)
class At:
    """Which step a task belongs to."""

    job: str
    generation: int
    step: int


# What tasks hand on.  Tuples, because Dask looks into those to know how many bytes they are.


class Gradient(NamedTuple):
    """Of one replica; ``flat`` is of the model's layout, uint8 of shape (layout.nbytes,)."""

    contribution: Contribution
    flat: Any


class Piece(NamedTuple):
    """What a shard gets of a gradient: one flat array per range."""

    contribution: Contribution
    arrays: list[Any]


class Report(NamedTuple):
    """What a shard says of a step; ``problem`` if it must not be."""

    shard: int
    contributions: tuple[Contribution, ...]
    problem: str | None


class Update(NamedTuple):
    """A shard's next version: the parameters, one flat array per range."""

    report: Report
    params: list[Any]


class Passed(NamedTuple):
    """A shard is through a stage of the optimizer that is not its last.

    ``sums``, float64 of shape (sums, blocks), are those over its blocks, ``blocks`` their numbers
    within the model.
    """

    report: Report
    blocks: Any
    sums: Any


class Outcome(NamedTuple):
    """Of a step, from all its shards."""

    reports: tuple[Report, ...]
    sound: bool


class GraphShard:
    """The newest versions of a shard, where it is updated: its slots, which nobody else reads,
    and references to the parameters, which are Dask's data.

    A checkpoint, the result and the next generation are gathered from here, as from any other
    shard (:mod:`.handover`).  All methods want the arena's lock held.
    """

    def __init__(self, index: int, version: int, contents: Contents) -> None:
        self.index = index
        #: the newest version that is known to be committed
        self.version = version
        #: that one, and the one after it if it is ready
        self._known = {version: contents}
        #: between two stages of a step: what goes on with the work, and where the result will be
        self.under_way: tuple[Updater, Contents] | None = None

    def begin(self, step: int) -> Contents:
        """A graph updates the version of ``step``, which is committed therefore."""
        if step not in self._known:
            raise ProtocolError(
                f"shard {self.index}: step {step} is to begin, found version {self.version}"
            )
        self.version = step
        self._known = {step: self._known[step]}
        return self._known[step]

    def add(self, version: int, contents: Contents) -> None:
        """The next version is ready, for the verdict to come."""
        self._known[version] = contents

    def skip(self, step: int) -> None:
        """``step`` is refused, for all shards: the next version is the same."""
        self._known[step + 1] = self._known[step]

    def decide(self, verdict: Verdict) -> None:
        """Where the lead is, the verdict is known at once."""
        if verdict.ok:
            self.version = verdict.step + 1

    def contents(self, version: int) -> Contents:
        """What the shard is at a version that it has; not to be written to."""
        if version < self.version or version not in self._known:
            raise ProtocolError(
                f"shard {self.index}: version {version} is wanted, found {sorted(self._known)}"
            )
        return self._known[version]


class Ended(NamedTuple):
    """The end of an epoch, as the host of a replica sees it."""

    epoch: int
    step: int
    valid: dict[str, Any] | None
    last: bool


class Share:
    """What the tasks of a job use of its host."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._host = trainer.host
        #: one task at a time is in user code here: models and feeds are not made for more
        self._turn = threading.Lock()
        self._closed = False
        self._buffer: Any = None
        self._views: Mapping[str, Any] = {}
        #: which version lies in the buffer
        self._version: int | None = None
        self._news = threading.Condition()
        self._ended: Ended | None = None
        #: when the last task came
        self._heard = time.monotonic()
        self._host.on_stop(self._wake)

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def close(self) -> None:
        """No task begins any more; returns once none is in user code.

        Without a deadline, as in the other loops: user code cannot be told to leave, and what it
        looks at stays.  The master ends the job, or the worker, without waiting.
        """
        self._closed = True
        with self._turn:
            self._views, self._buffer = {}, None

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        with self._turn:
            self._host.check()
            if self._closed:
                raise Stopped("its host has left")
            yield

    def heard(self) -> None:
        self._heard = time.monotonic()

    # -- in the thread of a task ---------------------------------------------------------------

    def first(self, step: int, shard: int) -> Update:
        """What a shard begins with."""
        with self._host.arena.lock:
            params, _ = self._host.arena.shards[shard].contents(step)
        return Update(Report(shard, (), None), params)

    def gradient(self, step: int, replica: int, shards: Sequence[Update]) -> Gradient:
        host, trainer = self._host, self._trainer
        epoch, index = trainer.plan.locate(step)
        with self._in_turn():
            params = self.params(step, shards)
            flat = aligned_bytes(host.layout.nbytes)
            out = poisoned(host.layout.views(flat))
            host.epoch = epoch
            batch = Batch(epoch, replica, index)
            contribution = trainer.compute(replica, step, batch, params, out)
            trainer.read_ahead(step + 1, (replica,))
        return Gradient(contribution, flat)

    def params(self, version: int, shards: Sequence[Update]) -> Mapping[str, Any]:
        """Read-only named views of a version, aligned as in any other loop; valid for one turn."""
        if self._version != version:
            self._version = None
            if self._buffer is None:
                self._buffer = aligned_bytes(self._host.layout.nbytes)
                self._views = frozen(self._host.layout.views(self._buffer))
            for shard, found in zip(self._host.shard_plan.shards, shards, strict=True):
                into = cut(self._buffer, shard.ranges)
                for target, source in zip(into, found.params, strict=True):
                    target[...] = source
            self._version = version
        return self._views

    def piece(self, shard: int, gradient: Gradient) -> Piece:
        ranges = self._host.shard_plan.shards[shard].ranges
        return Piece(gradient.contribution, cut(gradient.flat, ranges))

    def update(
        self, step: int, shard: int, before: Update, parts: Sequence[Piece | Gradient]
    ) -> Update | Passed:
        """The weighted mean of the gradients, in the tree's order, and the optimizer.

        Or its first stage, if it has several.
        """
        host, optimizer = self._host, self._host.optimizer
        kept: GraphShard = host.arena.shards[shard]
        with host.arena.lock:
            host.arena.commits()
            _, old_slots = kept.begin(step)
        at_point("applying")
        ranges = host.shard_plan.shards[shard].ranges
        # A gradient that was computed here has not been cut.
        grads = {
            part.contribution.replica: part.arrays
            if isinstance(part, Piece)
            else cut(part.flat, ranges)
            for part in parts
        }
        contributions = tuple(part.contribution for part in parts)
        # What is sent must not be written to, so that each version has memory of its own.
        params = _fresh(ranges)
        slots = {name: _fresh(ranges) for name in optimizer.slots}
        buffers = [(before.params, old_slots), (params, slots)]
        even, odd = buffers if step % 2 == 0 else reversed(buffers)
        updater = Updater(
            host.shard_plan.shards[shard],
            host.layout,
            optimizer,
            host.launch.replicas,
            [even[0], odd[0]],
            [_by_range(even[1], ranges), _by_range(odd[1], ranges)],
            make_work(ranges) if optimizer.stages > 1 else None,
        )
        sums = updater.no_sums() if optimizer.stages > 1 else None
        with quiet():
            culprit = updater.reduce(
                step,
                tuple(c.replica for c in contributions),
                tuple(c.weight for c in contributions),
                {replica: updater.pieces(arrays) for replica, arrays in grads.items()},
                sums,
            )
        problem = None
        if culprit is not None:
            whose = next((c for c in contributions if c.replica == culprit), None)
            problem = describe_culprit(whose, step)
        report = Report(shard, contributions, problem)
        if sums is not None:
            kept.under_way = updater, (params, slots)
            return Passed(report, updater.blocks, sums)
        return self._updated(step, kept, report, (params, slots))

    def go_on(self, step: int, shard: int, stage: int, others: Sequence[Passed]) -> Update | Passed:
        """A further stage, with the sums of all shards over their blocks."""
        host, optimizer = self._host, self._host.optimizer
        kept: GraphShard = host.arena.shards[shard]
        assert kept.under_way is not None
        updater, contents = kept.under_way
        report = others[shard].report
        if any(passed.report.problem is not None for passed in others):
            # Nothing goes on with it, and it is no version.
            kept.under_way = None
            return Update(report, contents[0])
        whole = np.empty((optimizer.sums, sum(len(passed.blocks) for passed in others)))
        for passed in others:
            whole[:, passed.blocks] = passed.sums
        last = stage + 1 == optimizer.stages
        sums = None if last else updater.no_sums()
        with quiet():
            factors = optimizer.resolve(stage - 1, whole, host.layout.block_variables)
            updater.go_on(stage, step, factors, sums)
        if sums is not None:
            return Passed(report, updater.blocks, sums)
        return self._updated(step, kept, report, contents)

    def _updated(self, step: int, kept: GraphShard, report: Report, contents: Contents) -> Update:
        kept.under_way = None
        with self._host.arena.lock:
            self._host.arena.commits()
            if report.problem is None:
                kept.add(step + 1, contents)
        return Update(report, contents[0])

    def skip(self, step: int, shard: int) -> None:
        with self._host.arena.lock:
            self._host.arena.commits()
            self._host.arena.shards[shard].skip(step)

    def evaluate(self, step: int, epoch: int, last: bool, shards: Sequence[Update]) -> None:
        """This host's part of the evaluation; its thread takes it to the barrier."""
        valid = None
        if shards:
            with self._in_turn():
                valid = self._trainer.scores(step, self.params(step, shards))
        with self._news:
            self._ended = Ended(epoch, step, valid, last)
            self._news.notify_all()

    # -- in the host's thread ------------------------------------------------------------------

    def ended(self) -> Ended:
        """The next end of an epoch; raises Stopped, or DeadlineError if no task comes any more."""
        settings = self._host.launch.settings
        # The driver has a deadline for each step, and says more of it; this one is for its silence.
        patience = 2 * settings.step_deadline
        self.heard()
        while True:
            self._host.check()
            with self._news:
                if self._ended is not None:
                    found, self._ended = self._ended, None
                    return found
                if time.monotonic() - self._heard > patience:
                    raise DeadlineError(
                        f"no task of job {self._host.launch.job} has come for {patience:.0f} s"
                    )
                if self._host.calls.stopped is None:
                    self._news.wait(settings.poll)


def _fresh(ranges: Sequence[Range]) -> list[Any]:
    return [aligned_bytes(r.stop - r.start).view(r.dtype) for r in ranges]


def _by_range(slots: Mapping[str, list[Any]], ranges: Sequence[Range]) -> list[dict[str, Any]]:
    return [{name: arrays[k] for name, arrays in slots.items()} for k in range(len(ranges))]


# -- the tasks themselves -----------------------------------------------------------------------


def _task(body: Callable[..., Any]) -> Callable[..., Any]:
    """A task that works with its host's share; failures come in and go out as values."""

    @functools.wraps(body)
    def run(at: At, *args: Any) -> Any:
        from distributed import get_worker

        from dtrain.runtime.worker import service_at

        failure = next((arg for arg in args if isinstance(arg, Failure)), None)
        if failure is not None:
            return failure
        where = get_worker().address
        try:
            service = service_at(where)
            if service is None:
                raise ConnectionError(f"worker {where} has no dtrain service any more")
            host = service.of_generation(at.job, at.generation)
            where = str(host.plan)
            host.check()
            host.share.heard()
            return body(host.share, at, *args)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - it is told
            return describe(error, where)

    return run


@_task
def first(share: Share, at: At, shard: int) -> Update:
    return share.first(at.step, shard)


@_task
def gradient(share: Share, at: At, replica: int, *shards: Update) -> Gradient:
    return share.gradient(at.step, replica, shards)


@_task
def piece(share: Share, at: At, shard: int, whole: Gradient) -> Piece:
    return share.piece(shard, whole)


@_task
def update(
    share: Share, at: At, shard: int, before: Update, *parts: Piece | Gradient
) -> Update | Passed:
    return share.update(at.step, shard, before, parts)


@_task
def go_on(share: Share, at: At, shard: int, stage: int, *shards: Passed) -> Update | Passed:
    return share.go_on(at.step, shard, stage, shards)


@_task
def verdict(share: Share, at: At, *shards: Update) -> Outcome:
    reports = tuple(shard.report for shard in shards)
    sound = all(math.isfinite(c.loss) for c in reports[0].contributions)
    return Outcome(reports, sound and all(r.problem is None for r in reports))


@_task
def skip(share: Share, at: At, shard: int) -> None:
    share.skip(at.step, shard)


@_task
def evaluate(share: Share, at: At, epoch: int, last: bool, *shards: Update) -> None:
    share.evaluate(at.step, epoch, last, shards)


@_task
def settled(share: Share, at: At, *parts: Any) -> None:
    """All of what came before it is done."""
