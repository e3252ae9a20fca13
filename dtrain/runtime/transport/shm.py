"""Shared memory between the processes of one machine: nothing is copied, nothing is sent.

All hosts of the job map one file.  Parameters are read in place, gradients are written in place;
what crosses is a flag and the ring of a doorbell.  A step goes like this:

1. a replica has computed into its gradient, writes its line of the header, then its flag, and
   rings the others;
2. whoever waits and sees all flags claims a shard by its lock, sums and applies it into the
   other buffer, and sets the shard's flag;
3. the lead, once all shards' flags are set, records the verdict and then the version, and rings.

What lies where in the file, and how the next generation reads it: :mod:`.shmfile`.

Flags are plain stores: only where stores are seen in their order (x86-64) is this transport
used.  A process that dies in step 2 lets go of its lock, and the next one does the shard again:
it reads one buffer and writes the other, so doing it twice does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.arrays import quiet
from dtrain.errors import ProtocolError
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor, Take
from dtrain.messages import Batch, Contribution, Pushed, Reduced
from dtrain.optim import Optimizer
from dtrain.partition import ShardPlan
from dtrain.runtime.arena import Arena, Stopped, poisoned
from dtrain.runtime.link import Copies
from dtrain.runtime.points import at_point
from dtrain.runtime.shards import StepRefused, Updater, cut, describe_culprit
from dtrain.runtime.transport.segment import Bells, Locks, Segment
from dtrain.runtime.transport.shmfile import (
    ACC_LOSS,
    ACC_SAMPLES,
    ACC_WEIGHT,
    AGES,
    APPLIED,
    APPLYING,
    BATCH,
    COUNT,
    CULPRIT,
    EPOCH,
    LINE,
    LOSS,
    MARK_EPOCH,
    MARK_INDEX,
    MARK_PART,
    PART,
    PUSHED,
    REDUCED,
    SAMPLES,
    SHARD_VERSION,
    SOUND,
    WEIGHT,
    FilePlan,
    Reader,
    write_totals,
)

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class SharedArena(Arena):
    """One process's view of the file, and its way to wait for the others."""

    def __init__(
        self,
        layout: Layout,
        optimizer: Optimizer,
        shards: ShardPlan,
        replicas: int,
        segment: Segment,
        *,
        sync: bool,
    ) -> None:
        self.plan = FilePlan(layout, optimizer, replicas, len(shards.shards), sync=sync)
        self.segment = segment
        memory = segment.memory
        size = layout.nbytes
        super().__init__(layout, [memory[at : at + size] for at in self.plan.params])
        self.optimizer = optimizer
        self.shard_plan = shards
        self.sync = sync
        header = memory[: self.plan.header]
        self.words = memoryview(header.data).cast("q")
        self.reals = memoryview(header.data).cast("d")
        self.slots = [
            {name: memory[at : at + size] for name, at in slots.items()}
            for slots in self.plan.slots
        ]
        self.flat_grads = [memory[at : at + size] for at in self.plan.grads]
        #: one per shard, and the last one for the cursor
        self.locks = Locks(segment.path, len(shards.shards) + 1)

    def check(self) -> None:
        """Also where the process was stopped, and nobody could tell it that all is over."""
        self.commits()
        super().check()

    def commits(self) -> None:
        if self.words[self.plan.fence]:
            raise Stopped("its generation of the job has ended")

    def mark(self, replica: int, batch: Batch) -> None:
        at = self.plan.mark_line + replica * LINE
        self.words[at + MARK_PART] = batch.part
        self.words[at + MARK_INDEX] = batch.index
        self.words[at + MARK_EPOCH] = batch.epoch + 1

    def unmark(self, replica: int) -> None:
        self.words[self.plan.mark_line + replica * LINE + MARK_EPOCH] = 0

    def reader(self) -> Reader:
        """To copy what is committed, while the training goes on around it."""
        memory, plan = self.segment.memory, self.plan
        return Reader(memory, plan, self.layout, self.shard_plan, self.locks)

    def add_replicas(self, replicas: Any) -> None:
        if not self.sync:
            super().add_replicas(replicas)
            return
        for replica in replicas:
            self.grads[replica] = self.flat_grads[replica]
            self.grad_views[replica] = poisoned(self.layout.views(self.flat_grads[replica]))

    def updater(self, shard: int) -> Updater:
        ranges = self.shard_plan.shards[shard].ranges
        slots = [
            [
                {name: buffer[r.start : r.stop].view(r.dtype) for name, buffer in slots.items()}
                for r in ranges
            ]
            for slots in self.slots
        ]
        params = [cut(buffer, ranges) for buffer in self.buffers]
        return Updater(ranges, self.optimizer, self.plan.replicas, params, slots)

    def close(self, deadline: float = 5.0) -> None:
        super().close(deadline)
        self.locks.close()
        # Drop what looks into the file, so that it is unmapped here.
        self.words.release()
        self.reals.release()
        self.buffers, self.views, self.slots, self.flat_grads = [], [], [], []
        self.grads, self.grad_views = {}, {}
        self.segment.close()


class _Link:
    """What the two kinds of link share: the arena, the doorbell, the way to wait."""

    def __init__(self, host: Host) -> None:
        assert isinstance(host.arena, SharedArena)
        self._host = host
        self._arena = host.arena
        self._words = host.arena.words
        self._reals = host.arena.reals
        self._plan = host.arena.plan
        #: those that wait: without replicas there is nothing to wait for
        self._hosts = [h.address for h in host.launch.hosts if h.replicas]
        mine = self._hosts.index(host.plan.address)
        self._bells = Bells(host.arena.segment.path, mine, len(self._hosts))
        # The bells alone, not the link: it would keep the file mapped for as long as the host.
        host.on_stop(self._bells.ring_mine)

    def close(self) -> None:
        self._bells.close()


class SyncLink(_Link):
    """Synchronous steps in the shared file."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.version = host.begin.step
        shards = range(self._plan.shards)
        # Our own shards first: each host begins with others than its neighbours.
        self._order = sorted(shards, key=lambda s: (s not in host.plan.shards, s))
        self._updaters = {s: self._arena.updater(s) for s in shards}
        self._leaves = {
            s: {
                i: self._updaters[s].pieces(cut(buffer, self._arena.shard_plan.shards[s].ranges))
                for i, buffer in enumerate(self._arena.flat_grads)
            }
            for s in shards
        }
        self._lead = host.arena.lead
        self._chief = self._hosts.index(host.launch.chief.address)

    @property
    def params(self) -> Mapping[str, Any]:
        """Read-only views of the version that the next step reads."""
        return self._arena.views[self.version % 2]

    def grads(self, replica: int) -> Mapping[str, Any]:
        """The views to write a replica's gradient to."""
        return self._arena.grad_views[replica]

    def exchange(self, contributions: tuple[Contribution, ...]) -> None:
        """Hand over the gradients of this step; returns when the next version can be read."""
        step = self.version
        words, reals = self._words, self._reals
        for c in contributions:
            line = self._plan.replica_line + c.replica * LINE
            words[line + SAMPLES] = c.samples
            words[line + PART] = c.part
            words[line + BATCH] = c.batch
            reals[line + WEIGHT] = c.weight
            reals[line + LOSS] = c.loss
            # The flag last: who sees it sees all that was stored before, the gradient too.
            words[line + PUSHED] = step + 1
        if contributions:
            self._bells.ring_others()
        at_point("waiting")
        members = self._host.parts.plan.members(step)
        self._bells.wait(
            lambda: self._turn(step, members),
            self._arena.check,
            self._host.launch.settings.step_deadline,
            lambda: f"step {step} has not committed; {self._why(step, members)}",
        )
        self.version = step + 1

    def _turn(self, step: int, members: tuple[int, ...]) -> bool:
        """Do what there is to do for this step; returns whether it has committed."""
        words = self._words
        if words[self._plan.version] > step:
            return True
        first = self._plan.replica_line
        if any(words[first + i * LINE + PUSHED] <= step for i in members):
            return False
        line = self._plan.shard_line
        for shard in self._order:
            if words[line + shard * LINE + REDUCED] <= step and self._arena.locks.try_acquire(
                shard
            ):
                try:
                    if words[line + shard * LINE + REDUCED] <= step:
                        self._reduce(shard, step, members)
                finally:
                    self._arena.locks.release(shard)
        if self._lead is not None and all(
            words[line + shard * LINE + REDUCED] > step for shard in self._order
        ):
            self._decide(step, members)
            return True
        return bool(words[self._plan.version] > step)

    def _reduce(self, shard: int, step: int, members: tuple[int, ...]) -> None:
        reals = self._reals
        line = self._plan.replica_line
        weights = tuple(reals[line + i * LINE + WEIGHT] for i in members)
        at_point("applying")
        with quiet():
            culprit = self._updaters[shard].reduce(step, members, weights, self._leaves[shard])
        at = self._plan.shard_line + shard * LINE
        self._words[at + CULPRIT] = SOUND if culprit is None else culprit
        self._words[at + REDUCED] = step + 1
        if self._lead is None:
            self._bells.ring(self._chief)

    def _decide(self, step: int, members: tuple[int, ...]) -> None:
        """At the lead: record the verdict, then let everyone see the version."""
        contributions = tuple(self._contribution(i) for i in members)
        generation = self._host.generation
        with self._arena.lock:
            # Several hosts of this process see that all is done; one of them decides.
            if self._lead.version > step:
                return
            self._arena.commits()
            self._lead.handle(Pushed(generation, step, contributions))
            for shard in range(self._plan.shards):
                problem = self._problem(shard, step, contributions)
                self._lead.handle(Reduced(generation, step, shard, problem))
            verdict = self._lead.verdict(step)
            if verdict is None:
                raise ProtocolError(f"step {step}: all shards have reported, but no verdict")
            if not verdict.ok:
                raise StepRefused(verdict.problem)
            totals = self._lead.rounds.totals
            write_totals(self._words, self._reals, self._plan, step + 1, totals)
            # From here on the step is committed, whoever dies.
            self._words[self._plan.verdict] = step + 1
            at_point("flipping")
            self._words[self._plan.version] = step + 1
        self._bells.ring_others()

    def _contribution(self, replica: int) -> Contribution:
        words, reals = self._words, self._reals
        line = self._plan.replica_line + replica * LINE
        return Contribution(
            replica,
            reals[line + WEIGHT],
            words[line + SAMPLES],
            reals[line + LOSS],
            words[line + PART],
            words[line + BATCH],
        )

    def _problem(
        self, shard: int, step: int, contributions: tuple[Contribution, ...]
    ) -> str | None:
        culprit = self._words[self._plan.shard_line + shard * LINE + CULPRIT]
        if culprit == SOUND:
            return None
        c = next((c for c in contributions if c.replica == culprit), None)
        return describe_culprit(c, step)

    def missing(self, step: int, members: tuple[int, ...]) -> list[int]:
        """Whose gradients a step waits for."""
        line = self._plan.replica_line
        return [i for i in members if self._words[line + i * LINE + PUSHED] <= step]

    def _why(self, step: int, members: tuple[int, ...]) -> str:
        missing = self.missing(step, members)
        return f"waiting for the gradients of replicas {missing}" if missing else "applying"


class AsyncLink(Copies, _Link):
    """Asynchronous exchanges in the shared file: the pushing replica applies, under a lock.

    Each replica has its own copy of the parameters, renewed shard by shard under the same lock:
    parameters that others write to in place cannot be read in place.
    """

    def __init__(self, host: Host) -> None:
        Copies.__init__(self, host)
        _Link.__init__(self, host)
        arena = self._arena
        self._updaters = {s: arena.updater(s) for s in range(self._plan.shards)}
        self._cursor_lock = self._plan.shards
        state = self._words[self._plan.cursor : self._plan.cursor + self._plan.cursor_words]
        self._cursor = Cursor(host.parts.plan, host.generation, state)

    def take(self, replica: int, epoch: int) -> Batch | None:
        """The next batch of a replica in an epoch."""
        request = self.requests[replica]
        self.requests[replica] += 1
        self._acquire(self._cursor_lock)
        try:
            event = Take(self._host.generation, replica, request, epoch)
            return self._cursor.handle(event, time.monotonic())[0]
        finally:
            self._arena.locks.release(self._cursor_lock)

    def push(self, replica: int, contribution: Contribution, epoch: int) -> Batch | None:
        """Apply the replica's gradient, renew its parameters; returns its next batch."""
        at = self._plan.mark_line + replica * LINE
        number = self.requests[replica]
        self._words[at + APPLYING] = number
        age = self._exchange(replica, push=True)
        self._account(replica, contribution, epoch, age)
        self._words[at + APPLIED] = number
        self._host.commit(contribution, epoch, age, self.versions[replica, 0])
        return self.take(replica, epoch)

    def _account(self, replica: int, contribution: Contribution, epoch: int, age: int) -> None:
        """What outlives this process of the account that its host keeps."""
        at = self._plan.account + replica * self._plan.account_words
        words, reals = self._words, self._reals
        if words[at + EPOCH] != epoch + 1:
            for word in range(at, at + self._plan.account_words):
                words[word] = 0
            words[at + EPOCH] = epoch + 1
        words[at + COUNT] += 1
        words[at + ACC_SAMPLES] += contribution.samples
        reals[at + ACC_WEIGHT] += contribution.weight
        reals[at + ACC_LOSS] += contribution.loss * contribution.weight
        words[at + ACC_LOSS + 1 + min(age, AGES - 1)] += 1

    def pull(self, replica: int) -> None:
        """Renew the replica's parameters."""
        self._exchange(replica, push=False)

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last."""
        return self._cursor.exhausted

    def _forgo(self, replica: int) -> None:
        """Nothing of this gradient has been applied, and nothing will be."""
        at = self._plan.mark_line + replica * LINE
        self._words[at + APPLYING] = self._words[at + APPLIED]
        raise Stopped("its generation of the job has ended")

    def _acquire(self, number: int) -> None:
        deadline = self._host.launch.settings.step_deadline
        self._arena.locks.acquire(number, deadline, self._arena.check)

    def _exchange(self, replica: int, *, push: bool) -> int:
        age = 0
        count = self._plan.shards
        words = self._words
        for k in range(count):
            # Each replica begins at another shard, so that they seldom want the same one.
            shard = (replica + k) % count
            at = self._plan.shard_line + shard * LINE + SHARD_VERSION
            self._acquire(shard)
            try:
                # Once the next generation reads the file, nothing of a gradient may be applied.
                if k == 0 and push and words[self._plan.fence]:
                    self._forgo(replica)
                version = words[at]
                if shard == 0:
                    age = version - self.versions[replica, 0]
                if push:
                    at_point("applying")
                    with quiet():
                        self._updaters[shard].apply(version + 1, self.flat_grads[replica, shard])
                    version += 1
                    words[at] = version
                params = self._updaters[shard].params[0]
                for source, target in zip(params, self.into[replica, shard], strict=True):
                    np.copyto(target, source)
                self.versions[replica, shard] = version
            finally:
                self._arena.locks.release(shard)
        return age
