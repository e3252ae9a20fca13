"""Where everything lies in the shared file of a generation: how it is begun, and read when over.

The recorded verdict of a step is its commit.  A generation that has ended is read from its file
by the next one, as of the last verdict; who still runs then, or wakes up later, can only store
into the old file, which nobody reads any more.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from dtrain.arrays import ALIGNMENT, aligned_bytes
from dtrain.errors import DeadlineError
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor
from dtrain.machines.ledger import Ledger
from dtrain.machines.plan import Plan
from dtrain.machines.quorum import Quorum
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
# The sums of the epoch, the gradients of the whole job that were applied and rejected, whether the
# last step was passed over, the epoch of it from 1, and its loss.
SUM_LOSS, SUM_WEIGHT, SUM_SAMPLES, SUM_APPLIED, SUM_REJECTED, PASSED_OVER, OF_EPOCH, LAST = range(8)
# The words of a replica's line.
PUSHED, SAMPLES, PART, BATCH, WEIGHT, LOSS = range(6)
# The words of a replica's second line: the batch that is in user code (its epoch from 1; 0 if none
# is), and the gradients that are being applied and have been.
MARK_EPOCH, MARK_PART, MARK_INDEX, APPLYING, APPLIED = range(5)
# The words of a replica's account of an epoch (asynchronous): the epoch, gradients, sums, and how
# many gradients there were of each age; the last counts all that are older.
EPOCH, COUNT, ACC_SAMPLES, ACC_WEIGHT, ACC_LOSS, ACC_REJECTED = range(6)
AGES = 122
# The words of a shard's line.  The last two count stages of the optimizer over all steps: those
# that somebody has begun, and those that the shard is through; most optimizers have one a step.
CULPRIT, SHARD_VERSION, BEGUN, THROUGH = range(4)
#: What a shard's line says where no gradient is to blame, and where only their sum is.
SOUND, OVERFLOW = -2, -1


class FilePlan:
    """Where everything lies in the file; the same in every process.

    Header (token, heads, totals, two lines per replica, a line per shard, twice the state of the
    cursor or the quorum, an account per replica, sums of stages), then the buffers of parameters,
    the buffers of each slot, in sync mode a gradient per replica, and what one stage of the
    optimizer leaves for the next.
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
        self.turns = self.shard_line + shards * LINE
        self.turn_words = max(Cursor.words(replicas), Quorum.words(replicas))
        half = -(-self.turn_words // LINE) * LINE
        #: where the two copies of the numbers begin that whoever has the lock of turns changes
        self.halves = (self.turns + LINE, self.turns + LINE + half)
        self.account = self.halves[1] + half
        self.account_words = ACC_REJECTED + 1 + AGES
        accounts = 0 if sync else replicas * self.account_words
        #: the sums that the stages of the optimizer leave, of all blocks: a table for each stage
        self.stages = optimizer.stages if sync else 1
        self.sums = self.account + accounts
        self.sums_shape = (self.stages - 1, optimizer.sums, len(layout.blocks))
        header = (self.sums + math.prod(self.sums_shape)) * _WORD
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
        at += len(self.grads) * size
        #: what one stage leaves for the next
        self.work = at
        self.nbytes = at + (size if self.stages > 1 else 0)


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
    reals = memory[: plan.header].view(np.float64)
    epoch = len(state.history)
    write_totals(words, reals, plan, state.step, state.totals, state.ledger, epoch=epoch)
    versions = state.versions or [state.step] * plan.shards
    for shard in range(plan.shards):
        words[plan.shard_line + shard * LINE + CULPRIT] = SOUND
        words[plan.shard_line + shard * LINE + SHARD_VERSION] = versions[shard]
        words[plan.shard_line + shard * LINE + THROUGH] = state.step * plan.stages
    if state.cursor is not None:
        Turns(words, plan, len(state.cursor)).store(state.cursor)


class Turns:
    """The state of a cursor or a quorum, changed as a whole or not at all, whoever dies when.

    There are two copies, and a word that says which of them counts: the other one is written,
    and then the word.  Who stores has the lock of turns.

    Parameters
    ----------
    words : array or memoryview of int64
        The header of the file.
    count : int
        How many numbers the state has.
    """

    def __init__(self, words: Any, plan: FilePlan, count: int) -> None:
        self._words = words
        self._which = plan.turns
        self._halves = [slice(at, at + count) for at in plan.halves]

    def load(self) -> list[int]:
        """The numbers as they were stored last; also without the lock."""
        while True:
            which = self._words[self._which]
            found: list[int] = self._words[self._halves[which]].tolist()
            if self._words[self._which] == which:
                return found

    def store(self, numbers: Iterable[int]) -> None:
        other = 1 - self._words[self._which]
        self._words[self._halves[other]] = array("q", numbers)
        self._words[self._which] = other


def write_totals(
    words: Any,
    reals: Any,
    plan: FilePlan,
    step: int,
    totals: Totals,
    ledger: Ledger,
    *,
    applied: bool = True,
    epoch: int = 0,
    loss: float = math.nan,
) -> None:
    """What belongs to version ``step``, before its verdict is recorded."""
    at = plan.totals[step % 2]
    reals[at + SUM_LOSS], reals[at + SUM_WEIGHT] = totals.loss, totals.weight
    words[at + SUM_SAMPLES] = totals.samples
    words[at + SUM_APPLIED], words[at + SUM_REJECTED] = ledger.applied, ledger.rejected
    words[at + PASSED_OVER] = not applied
    words[at + OF_EPOCH], reals[at + LAST] = epoch + 1, loss


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
            at = self.file.totals[step % 2]
            state.ledger.applied = int(self.words[at + SUM_APPLIED])
            state.ledger.rejected = int(self.words[at + SUM_REJECTED])
            if self.words[self.file.verdict] == step:
                return state
            if time.monotonic() > until:
                raise DeadlineError(f"after {deadline:g} s the file still changes under its reader")

    def with_quorum(self, plan: Plan, deadline: float) -> State:
        """Likewise, with the state of the quorum; its account is in the ledger."""
        turns = Turns(self.words, self.file, Quorum.words(self.file.replicas))
        until = time.monotonic() + deadline
        while True:
            numbers, state = turns.load(), self.sync(deadline)
            # It is stored after the verdict, and knows the step then or one less.
            if state.step - Quorum(plan, 0, 0, numbers).step in (0, 1):
                break
            if time.monotonic() > until:
                raise DeadlineError(f"after {deadline:g} s the file still changes under its reader")
        applied = not self.words[self.file.totals[state.step % 2] + PASSED_OVER]
        state.cursor = Quorum.recovered(plan, numbers, state.step, applied)
        return state

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

    def asynchronous(self, plan: Plan, epoch: int, lead: int, deadline: float) -> tuple[State, int]:
        """The state, and how many gradients are in it that are not known to be.

        First what is known to be applied, then each shard under its lock: a gradient that is
        applied in between is not known to be, and its batch is trained again.  ``epoch`` is the
        one whose account is not the master's yet.
        """
        file, state = self.file, self._empty()
        held = self._hold(file.shards, deadline)
        words = Turns(self.words, file, Cursor.words(file.replicas)).load()
        self._let_go(file.shards, held)
        asked = Cursor(plan, 0, words)
        marks = self.words[file.mark_line : file.shard_line].reshape(file.replicas, LINE).tolist()
        every = range(file.replicas)
        done = [i for i in every if marks[i][APPLIED] >= asked.requested(i)]
        partly = [i for i in every if i not in done and marks[i][APPLYING] >= asked.requested(i)]
        state.cursor = Cursor.recovered(plan, words, done)
        self._accounts(state, epoch)
        state.versions = [self._shard(state, shard, deadline) for shard in range(file.shards)]
        state.step = state.versions[lead]
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
            ages = self.words[at + ACC_REJECTED + 1 : at + self.file.account_words].tolist()
            samples = int(self.words[at + ACC_SAMPLES])
            ledger.add(epoch, samples, {age: n for age, n in enumerate(ages) if n})
            ledger.rejected += int(self.words[at + ACC_REJECTED])
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
