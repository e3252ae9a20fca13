"""Where everything lies in the shared file of a generation: how it is begun, and read when over.

The recorded verdict of a step is its commit.  A generation that has ended is read from its file
by the next one, as of the last verdict; who still runs then, or wakes up later, can only store
into the old file, which nobody reads any more.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dtrain.arrays import ALIGNMENT, aligned_bytes
from dtrain.errors import DeadlineError
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor, Plan
from dtrain.machines.ledger import Ledger
from dtrain.machines.rounds import Totals
from dtrain.messages import Batch
from dtrain.optim import Optimizer
from dtrain.partition import ShardPlan
from dtrain.runtime.state import State
from dtrain.runtime.transport.segment import TOKEN, Locks

_WORD = 8
#: Words of a line: a cache line, so that no two writers share one.
LINE = ALIGNMENT // _WORD

# The words of a line of totals, of which there are two: one is whole while the other is written.
SUM_LOSS, SUM_WEIGHT, SUM_SAMPLES = range(3)
# The words of a replica's line.
PUSHED, SAMPLES, PART, BATCH, WEIGHT, LOSS = range(6)
# The words of a replica's second line: the batch that is in user code (its epoch from 1; 0 if none
# is), and the gradients that are being applied and have been.
MARK_EPOCH, MARK_PART, MARK_INDEX, APPLYING, APPLIED = range(5)
# The words of a replica's account of an epoch (asynchronous): the epoch, gradients, sums, and how
# many gradients there were of each age; the last counts all that are older.
EPOCH, COUNT, ACC_SAMPLES, ACC_WEIGHT, ACC_LOSS = range(5)
AGES = 123
# The words of a shard's line.
REDUCED, CULPRIT, SHARD_VERSION = range(3)
#: What a shard's line says where no gradient is to blame, and where only their sum is.
SOUND, OVERFLOW = -2, -1


class FilePlan:
    """Where everything lies in the file; the same in every process.

    Header (token, heads, totals, two lines per replica, a line per shard, the cursor, an account
    per replica), then the buffers of parameters, the buffers of each slot, and in sync mode a
    gradient per replica.
    """

    def __init__(
        self, layout: Layout, optimizer: Optimizer, replicas: int, shards: int, *, sync: bool
    ) -> None:
        self.replicas = replicas
        self.shards = shards
        self.version = -(-TOKEN // ALIGNMENT) * LINE
        self.verdict = self.version + LINE
        self.fence = self.verdict + LINE
        self.totals = [self.fence + LINE, self.fence + 2 * LINE]
        self.replica_line = self.fence + 3 * LINE
        self.mark_line = self.replica_line + replicas * LINE
        self.shard_line = self.mark_line + replicas * LINE
        self.cursor = self.shard_line + shards * LINE
        self.cursor_words = Cursor.words(replicas)
        self.account = -(-(self.cursor + self.cursor_words) // LINE) * LINE
        self.account_words = ACC_LOSS + 1 + AGES
        accounts = 0 if sync else replicas * self.account_words
        header = (self.account + accounts) * _WORD
        self.header = -(-header // 4096) * 4096
        self.buffers = 2 if sync else 1
        size = -(-layout.nbytes // 4096) * 4096
        self.params = [self.header + i * size for i in range(self.buffers)]
        at = self.header + self.buffers * size
        self.slots: list[dict[str, int]] = []
        for _ in range(self.buffers):
            self.slots.append({name: at + k * size for k, name in enumerate(optimizer.slots)})
            at += len(optimizer.slots) * size
        self.grads = [at + i * size for i in range(replicas if sync else 0)]
        self.nbytes = at + len(self.grads) * size


def initialise(memory: Any, plan: FilePlan, state: State) -> None:
    """By the chief, before anybody else looks: what the generation begins with."""
    size = state.layout.nbytes
    now = state.step % 2 if plan.buffers == 2 else 0
    at = plan.params[now]
    memory[at : at + size] = state.params
    for name, at in plan.slots[now].items():
        memory[at : at + size] = state.slots[name]
    words = memory[: plan.header].view(np.int64)
    words[plan.version] = words[plan.verdict] = state.step
    write_totals(words, memory[: plan.header].view(np.float64), plan, state.step, state.totals)
    versions = state.versions or [state.step] * plan.shards
    for shard in range(plan.shards):
        words[plan.shard_line + shard * LINE + CULPRIT] = SOUND
        words[plan.shard_line + shard * LINE + SHARD_VERSION] = versions[shard]
    if state.cursor is not None:
        words[plan.cursor : plan.cursor + plan.cursor_words] = state.cursor


def write_totals(words: Any, reals: Any, plan: FilePlan, step: int, totals: Totals) -> None:
    at = plan.totals[step % 2]
    reals[at + SUM_LOSS], reals[at + SUM_WEIGHT] = totals.loss, totals.weight
    words[at + SUM_SAMPLES] = totals.samples


class Reader:
    """Makes private copies of what is committed in a file, whoever writes to it meanwhile.

    Parameters
    ----------
    memory : ndarray of uint8
        The file.
    """

    def __init__(
        self, memory: Any, file: FilePlan, layout: Layout, shards: ShardPlan, locks: Locks
    ) -> None:
        self.memory, self.file, self.layout, self.shards = memory, file, layout, shards
        self.locks = locks
        header = memory[: file.header]
        self.words, self.reals = header.view(np.int64), header.view(np.float64)

    def end(self, dead: tuple[int, ...], patience: float) -> None:
        """The generation is over: who lives, and is about to apply a gradient, finishes that."""
        self.words[self.file.fence] = 1
        until = time.monotonic() + patience
        living = [i for i in range(self.file.replicas) if i not in dead]
        while any(map(self._applying, living)) and time.monotonic() < until:
            time.sleep(0.001)

    def _applying(self, replica: int) -> bool:
        at = self.file.mark_line + replica * LINE
        return bool(self.words[at + APPLYING] != self.words[at + APPLIED])

    def suspects(self, replicas: tuple[int, ...]) -> tuple[Batch, ...]:
        """The batches that these replicas had in user code."""
        found = []
        for replica in replicas:
            at = self.file.mark_line + replica * LINE
            epoch = int(self.words[at + MARK_EPOCH])
            if epoch:
                part, index = self.words[at + MARK_PART], self.words[at + MARK_INDEX]
                found.append(Batch(epoch - 1, int(part), int(index)))
        return tuple(found)

    # -- synchronous ---------------------------------------------------------------------------

    def sync(self, deadline: float) -> State:
        """The buffer of the last verdict: nobody writes to it until after the next verdict."""
        state = self._empty()
        until = time.monotonic() + deadline
        while True:
            step = int(self.words[self.file.verdict])
            self._copy(state, slice(None), step % 2)
            state.step, state.totals = step, self._totals(step)
            if self.words[self.file.verdict] == step:
                return state
            if time.monotonic() > until:
                raise DeadlineError(f"after {deadline:g} s the file still changes under its reader")

    def pushed(self, step: int) -> int:
        """How many gradients of a step had arrived."""
        first = self.file.replica_line + PUSHED
        last = self.file.mark_line
        return int((self.words[first:last:LINE] == step + 1).sum())

    def _totals(self, step: int) -> Totals:
        at = self.file.totals[step % 2]
        return Totals(
            float(self.reals[at + SUM_LOSS]),
            float(self.reals[at + SUM_WEIGHT]),
            int(self.words[at + SUM_SAMPLES]),
        )

    # -- asynchronous --------------------------------------------------------------------------

    def asynchronous(self, plan: Plan, epoch: int, deadline: float) -> tuple[State, int]:
        """The state, and how many gradients are in it that are not known to be.

        First what is known to be applied, then each shard under its lock: a gradient that is
        applied in between is not known to be, and its batch is trained again.  ``epoch`` is the
        one whose account is not the master's yet.
        """
        file, state = self.file, self._empty()
        held = self._hold(file.shards, deadline)
        words = self.words[file.cursor : file.cursor + file.cursor_words].tolist()
        self._let_go(file.shards, held)
        asked = Cursor(plan, 0, words)
        marks = self.words[file.mark_line : file.shard_line].reshape(file.replicas, LINE).tolist()
        every = range(file.replicas)
        done = [i for i in every if marks[i][APPLIED] >= asked.requested(i)]
        partly = [i for i in every if i not in done and marks[i][APPLYING] >= asked.requested(i)]
        state.cursor = Cursor.recovered(plan, words, done)
        self._accounts(state, epoch)
        state.versions = [self._shard(state, shard, deadline) for shard in range(file.shards)]
        state.step = state.versions[0]
        return state, len(partly)

    def _shard(self, state: State, shard: int, deadline: float) -> int:
        held = self._hold(shard, deadline)
        try:
            for r in self.shards.shards[shard].ranges:
                self._copy(state, slice(r.start, r.stop), 0)
            return int(self.words[self.file.shard_line + shard * LINE + SHARD_VERSION])
        finally:
            self._let_go(shard, held)

    def _hold(self, number: int, deadline: float) -> bool:
        """Take a lock; not for ever: its holder may have been stopped."""
        try:
            self.locks.acquire(number, deadline, lambda: None)
        except DeadlineError:
            return False
        return True

    def _let_go(self, number: int, held: bool) -> None:
        if held:
            self.locks.release(number)

    def _accounts(self, state: State, epoch: int) -> None:
        """Add the replicas' accounts of an epoch."""
        ledger, totals = state.ledger, state.totals
        for replica in range(self.file.replicas):
            at = self.file.account + replica * self.file.account_words
            if self.words[at + EPOCH] != epoch + 1:
                continue
            ages = self.words[at + ACC_LOSS + 1 : at + self.file.account_words].tolist()
            samples = int(self.words[at + ACC_SAMPLES])
            ledger.add(epoch, samples, {age: n for age, n in enumerate(ages) if n})
            totals.samples += samples
            totals.weight += float(self.reals[at + ACC_WEIGHT])
            totals.loss += float(self.reals[at + ACC_LOSS])

    # -- both ----------------------------------------------------------------------------------

    def _empty(self) -> State:
        size = self.layout.nbytes
        return State(
            layout=self.layout,
            params=aligned_bytes(size),
            slots={name: aligned_bytes(size) for name in self.file.slots[0]},
            ledger=Ledger(),
            source="memory",
        )

    def _copy(self, state: State, piece: slice, which: int) -> None:
        size = self.layout.nbytes
        at = self.file.params[which]
        np.copyto(state.params[piece], self.memory[at : at + size][piece])
        for name, at in self.file.slots[which].items():
            np.copyto(state.slots[name][piece], self.memory[at : at + size][piece])
