"""Shared memory between the processes of one machine: nothing is copied, nothing is sent.

All hosts of the job map one file.  Parameters are read in place, gradients are written in place;
what crosses is a flag and the ring of a doorbell.  How a step goes: :mod:`.shmsync`,
:mod:`.shmquorum` with backups, :mod:`.shmasync`.  What lies where in the file, and how the next
generation reads it: :mod:`.shmfile`.

Flags are plain stores: only where stores are seen in their order (x86-64) is this transport
used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.layout import Layout
from dtrain.messages import Batch
from dtrain.optim import Optimizer
from dtrain.partition import ShardPlan
from dtrain.runtime.arena import Arena, Stopped, poisoned
from dtrain.runtime.transport.segment import Bells, Locks, Segment
from dtrain.runtime.transport.shmfile import (
    LINE,
    MARK_EPOCH,
    MARK_INDEX,
    MARK_PART,
    FilePlan,
    Reader,
)
from dtrain.runtime.updater import Updater, cut

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
        #: what a stage of the optimizer leaves for the next; None where there is but one
        self.between: Any = None
        if self.plan.stages > 1:
            self.between = memory[self.plan.work : self.plan.work + size]
        #: the sums of all stages but the last
        start, shape = self.plan.sums, self.plan.sums_shape
        self.sums: Any = header.view(np.float64)[start : start + math.prod(shape)].reshape(shape)
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

    @contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Inside, nobody else takes a batch, arrives or commits."""
        self.locks.acquire(self.plan.shards, deadline, self.check)
        try:
            yield
        finally:
            self.locks.release(self.plan.shards)

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
        return Updater(
            self.shard_plan.shards[shard],
            self.layout,
            self.optimizer if self.sync else self.optimizer.inner,
            self.plan.replicas,
            params,
            slots,
            None if self.between is None else cut(self.between, ranges),
        )

    def close(self, deadline: float = 5.0) -> None:
        super().close(deadline)
        self.locks.close()
        # Drop what looks into the file, so that it is unmapped here.
        self.words.release()
        self.reals.release()
        self.buffers, self.views, self.slots, self.flat_grads = [], [], [], []
        self.between = self.sums = None
        self.grads, self.grad_views = {}, {}
        self.segment.close()


class Link:
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
