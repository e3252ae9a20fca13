"""Asynchronous exchanges in shared memory: the pushing replica applies, under a shard's lock.

Each replica has its own copy of the parameters, renewed shard by shard under the same lock:
parameters that others write to in place cannot be read in place.  Batches are taken from the
cursor in the file, under a lock of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dtrain.arrays import quiet
from dtrain.machines.cursor import Cursor, Held, Take
from dtrain.messages import Batch, Contribution
from dtrain.runtime.arena import Stopped
from dtrain.runtime.link import Copies, behind, why_held
from dtrain.runtime.points import at_point
from dtrain.runtime.transport.shm import Link
from dtrain.runtime.transport.shmfile import (
    ACC_LOSS,
    ACC_REJECTED,
    ACC_SAMPLES,
    ACC_WEIGHT,
    AGES,
    APPLIED,
    APPLYING,
    COUNT,
    EPOCH,
    LINE,
    SHARD_VERSION,
    Turns,
)

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class AsyncLink(Copies, Link):
    """Asynchronous exchanges in the shared file: the pushing replica applies, under a lock.

    Each replica has its own copy of the parameters, renewed shard by shard under the same lock:
    parameters that others write to in place cannot be read in place.
    """

    def __init__(self, host: Host) -> None:
        Copies.__init__(self, host)
        Link.__init__(self, host)
        arena = self._arena
        self._updaters = {s: arena.updater(s) for s in range(self._plan.shards)}
        self._turn_lock = self._plan.shards
        self._cursor = Cursor(
            host.parts.plan, host.generation, max_staleness=host.launch.spec.max_staleness
        )
        self._turns = Turns(self._words, self._plan, len(self._cursor.state))
        self._bounded = host.launch.spec.max_staleness is not None

    def take(self, replica: int, epoch: int, *, again: bool = False) -> Batch | Held | None:
        """The next batch of a replica in an epoch, or for whom it has to wait; then ``again``."""
        event = Take(self._host.generation, replica, self.requests[replica], epoch)
        self._acquire(self._turn_lock)
        try:
            self._cursor.state = self._turns.load()
            answer = self._cursor.handle(event, time.monotonic())[0]
            self._turns.store(self._cursor.state)
        finally:
            self._arena.locks.release(self._turn_lock)
        if not isinstance(answer, Held):
            self.requests[replica] += 1
        if self._bounded:
            # Clocks have moved, and whoever is held looks again.
            if not again or answer is None:
                self._bells.ring_others()
            if isinstance(answer, Batch):
                self.pull(replica)  # what was read before it was one's turn is too old
        return answer

    def wait(self, held: Mapping[int, Held], epoch: int) -> dict[int, Batch | None]:
        """Until one of those that are held has its answer."""
        found: dict[int, Batch | None] = {}
        latest = dict(held)

        def ready() -> bool:
            for replica in held:
                answer = self.take(replica, epoch, again=True)
                if isinstance(answer, Held):
                    latest[replica] = answer
                else:
                    found[replica] = answer
            return bool(found)

        with self._host.activity.waiting(
            self.version(min(held)), lambda: behind(latest), sorted(held)
        ):
            self._bells.wait(
                ready,
                self._arena.check,
                self._host.launch.settings.step_deadline,
                lambda: why_held(latest),
            )
        return found

    def push(self, replica: int, contribution: Contribution, epoch: int) -> Batch | Held | None:
        """Apply the replica's gradient, renew its parameters; returns its next batch."""
        at = self._plan.mark_line + replica * LINE
        number = self.requests[replica]
        self._words[at + APPLYING] = number
        age, version = self._exchange(replica, push=True, pull=not self._bounded)
        self._account(replica, contribution, epoch, age)
        self._words[at + APPLIED] = number
        self._host.commit(contribution, epoch, age, version)
        return self.take(replica, epoch)

    def skip(self, replica: int, epoch: int) -> Batch | Held | None:
        """Forgo the replica's gradient, renew its parameters; returns its next batch."""
        self._words[self._account_of(replica, epoch) + ACC_REJECTED] += 1
        at = self._plan.mark_line + replica * LINE
        self._words[at + APPLYING] = self._words[at + APPLIED] = self.requests[replica]
        self.pull(replica)
        return self.take(replica, epoch)

    def _account(self, replica: int, contribution: Contribution, epoch: int, age: int) -> None:
        """What outlives this process of the account that its host keeps."""
        at = self._account_of(replica, epoch)
        words, reals = self._words, self._reals
        words[at + COUNT] += 1
        words[at + ACC_SAMPLES] += contribution.samples
        reals[at + ACC_WEIGHT] += contribution.weight
        reals[at + ACC_LOSS] += contribution.loss * contribution.weight
        words[at + ACC_REJECTED + 1 + min(age, AGES - 1)] += 1

    def _account_of(self, replica: int, epoch: int) -> int:
        """Where the replica's account of an epoch begins, cleared if it is of another one."""
        at = self._plan.account + replica * self._plan.account_words
        if self._words[at + EPOCH] != epoch + 1:
            for word in range(at, at + self._plan.account_words):
                self._words[word] = 0
            self._words[at + EPOCH] = epoch + 1
        return at

    def pull(self, replica: int) -> None:
        """Renew the replica's parameters."""
        self._exchange(replica, push=False, pull=True)

    @property
    def exhausted(self) -> bool:
        """Whether the epoch that ends is the job's last."""
        self._cursor.state = self._turns.load()
        return self._cursor.exhausted

    def _forgo(self, replica: int) -> None:
        """Nothing of this gradient has been applied, and nothing will be."""
        at = self._plan.mark_line + replica * LINE
        self._words[at + APPLYING] = self._words[at + APPLIED]
        raise Stopped("its generation of the job has ended")

    def _acquire(self, number: int) -> None:
        deadline = self._host.launch.settings.step_deadline
        self._arena.locks.acquire(number, deadline, self._arena.check)

    def _exchange(self, replica: int, *, push: bool, pull: bool) -> tuple[int, int]:
        """The age of the gradient, and the version of the lead shard."""
        age = lead = 0
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
                if shard == self.lead_shard:
                    age = version - self.versions[replica, shard]
                if push:
                    at_point("applying")
                    with quiet():
                        self._updaters[shard].apply(version + 1, self.flat_grads[replica, shard])
                    version += 1
                    words[at] = version
                if shard == self.lead_shard:
                    lead = version
                if pull:
                    params = self._updaters[shard].params[0]
                    for source, target in zip(params, self.into[replica, shard], strict=True):
                        np.copyto(target, source)
                    self.versions[replica, shard] = version
            finally:
                self._arena.locks.release(shard)
        return age, lead
