"""Asynchronous training in shared memory: a cursor in the file, and replicas at their own pace.

A gradient is a whole number and a shard its sum, so that what is applied twice, or not at all,
is seen in the result.  The account lies in the file too.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from dtrain.machines.cursor import Cursor, Take
from dtrain.machines.jobs import Restored
from dtrain.machines.ledger import Ledger
from dtrain.machines.rounds import Totals
from dtrain.messages import Batch
from tests.sim.recovery import APPLIED, APPLYING, IDLE
from tests.sim.settings import Broken, Settings
from tests.sim.world import Generation, Host, World


@dataclass
class Shard:
    value: int = 0
    version: int = 0
    #: batch -> how often it is in the value
    applied: Counter[Batch] = field(default_factory=Counter)
    #: who has the lock
    lock: str | None = None


@dataclass
class File:
    """What lies in the file of a generation."""

    cursor: Cursor
    shards: list[Shard]
    ledger: Ledger
    totals: dict[int, Totals]
    #: replica -> what its word says, and of which request
    words: list[tuple[str, int]]
    #: what has been accounted for
    committed: set[Batch]
    #: what a replica has in user code
    marks: dict[int, Batch | None] = field(default_factory=dict)
    #: the newest generation whose chief has begun to copy it: nobody takes or applies any more
    closed: int = 0
    removed: bool = False
    #: batch -> the request of this generation that it answered
    handed: dict[Batch, tuple[int, int]] = field(default_factory=dict)


class AsyncHost(Host):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: replica -> the number of its next request, and the version it has pulled
        self.requests = dict.fromkeys(self.plan.replicas, 0)
        self.versions = dict.fromkeys(self.plan.replicas, 0)
        #: replicas that train in this epoch
        self.busy: set[int] = set()
        self.recorded = 0
        #: a chief's copy
        self.copy: File | None = None


class AsyncWorld(World):
    HOST = AsyncHost
    POINTS = (
        "prepared", "closing", "copied", "take", "computed", "stores", "stored", "evaluated",
        "handed", "returned",
    )  # fmt: skip

    # What is applied in part is applied whole before a host leaves.
    LAST = ("handed", "returned", "stores", "stored")

    def __init__(self, seed: int, settings: Settings, rng: random.Random) -> None:
        super().__init__(seed, settings, rng)
        s = settings
        self.numbers = [rng.randrange(1 << 40) for _ in range(s.rows)]
        self.pace = [rng.choice([1, 1, 1, 6]) for _ in range(s.replicas)]
        self.taint = self.victim() if s.fate == "nonfinite" else None
        #: barriers that were looked at
        self.passed: set[tuple[int, int, str]] = set()

    def grad(self, batch: Batch, shard: int) -> int:
        return (shard + 1) * sum(self.numbers[row] for row in self.rows(batch))

    # -- recovery ------------------------------------------------------------------------------

    def recover(self, host: AsyncHost) -> None:
        gen, s = host.gen, self.settings
        if gen.origin is None:
            state = [0] * Cursor.words(s.replicas)
            shards = [Shard() for _ in range(s.shards)]
            words = [(IDLE, -1)] * s.replicas
            cursor = s.machines.cursor(self.plan, gen.number, state)
            gen.plane = File(cursor, shards, Ledger(), {}, words, set())
            self.is_ready(host, Restored(0, "start", ledger=gen.plane.ledger.to_dict()))
            return
        old = self.origin(host)
        if old is not None:
            if self.recovery.fences:
                old.closed = max(old.closed, gen.number)
            self.soon(host, "closing", 0)

    def origin(self, host: AsyncHost) -> File | None:
        """The file to copy; None: it is gone, and so is the generation that wants it."""
        gen = host.gen
        file = self.generations[gen.origin.meeting].plane
        if file is None:
            raise Broken(f"generation {gen.origin.generation} has left no file")
        if not file.removed:
            return file
        if gen.number == self.job.generation:
            raise Broken(f"the file of generation {gen.origin.generation} is gone, and needed")
        self.leave(host)
        return None

    def on_closing(self, host: AsyncHost, tries: int) -> None:
        """Whoever applies may end that; who does not run is not waited for."""
        old = self.origin(host)
        if old is None:
            return
        applying = [i for i, word in enumerate(old.words) if word[0] == APPLYING]
        if applying and tries < 10 and any(map(self.runs, host.gen.origin.hosts)):
            self.soon(host, "closing", tries + 1, within=0.5)
            return
        # The cursor and the words before the shards: what is applied meanwhile comes again.
        host.copy = copy.deepcopy(old)
        self.generations[host.gen.origin.generation].taken = True
        host.copy.shards = []
        self.soon(host, "copied")

    def runs(self, plan: Any) -> bool:
        process = self.processes[plan.address]
        return not process.dead and not process.held

    def on_copied(self, host: AsyncHost) -> None:
        old, mine, gen = self.origin(host), host.copy, host.gen
        if old is None:
            return
        shard = copy.deepcopy(old.shards[len(mine.shards)])
        shard.lock = None
        mine.shards.append(shard)
        if len(mine.shards) < self.settings.shards:
            self.soon(host, "copied")
            return
        s, recovery = self.settings, self.recovery
        asked = [self.asked(mine.cursor, i) for i in range(s.replicas)]
        done = recovery.applied(mine.words, asked)
        duplicates = recovery.again(mine.words, asked)
        suspects = [m for i in gen.origin.dead if (m := mine.marks.get(i)) is not None]
        machines = s.machines
        state = machines.cursor.recovered(self.plan, mine.cursor.state, done)
        mine.cursor = machines.cursor(self.plan, gen.number, state)
        mine.ledger.duplicates += duplicates
        mine.words = [(IDLE, -1)] * s.replicas
        mine.handed, mine.marks, mine.closed = {}, {}, 0
        gen.plane = mine
        self.story.counts["memory"] += 1
        self.story.counts["duplicates"] += duplicates
        suspects = tuple(dict.fromkeys(suspects))
        restored = Restored(0, "memory", ledger=mine.ledger.to_dict(), suspects=suspects)
        self.is_ready(host, restored)

    def asked(self, cursor: Cursor, replica: int) -> int:
        """The number of a replica's last request."""
        return cursor.requested(replica) - 1

    def command(self, event: Any, repeat: bool = False) -> bool:
        taken = super().command(event, repeat)
        number = self.job.generation
        for epoch, phase in self.job.settled:
            if (number, epoch, phase) not in self.passed:
                self.passed.add((number, epoch, phase))
                self.settled(self.generations[number], epoch, phase)
        return taken

    def settled(self, gen: Generation, epoch: int, phase: str) -> None:
        """Looks at a barrier, once."""
        if phase == "opened":
            if gen.origin is not None:
                self.generations[gen.origin.generation].plane.removed = True
        elif phase in ("trained", "evaluated"):
            file = gen.plane
            mine = {b for b in file.handed if b.epoch == epoch}
            everywhere = all(mine <= set(shard.applied) for shard in file.shards)
            if file.cursor.left or not everywhere or not mine <= file.committed:
                raise Broken(f"the end of epoch {epoch} ({phase}) was settled before it had ended")

    def opens(self, host: AsyncHost, step: int, recorded: int) -> bool:
        file = host.gen.plane
        if file.removed:
            if host.gen.number == self.job.generation:
                raise Broken(f"generation {host.gen.number} opens a file that is gone")
            return False
        host.epoch = host.recorded = recorded
        return True

    # -- a host's loop -------------------------------------------------------------------------

    def goes(self, host: AsyncHost) -> None:
        cursor = host.gen.plane.cursor
        if host.recorded > cursor.epoch and cursor.exhausted:
            self.barrier(host, host.epoch, "finished")
            return
        host.busy = set(host.plan.replicas)
        for replica in host.plan.replicas:
            self.soon(host, "take", replica)

    def on_take(self, host: AsyncHost, replica: int) -> None:
        file, number = host.gen.plane, host.gen.number
        if file.closed:
            self.leave(host)
            return
        request = host.requests[replica]
        host.requests[replica] += 1
        take = Take(number, replica, request, host.epoch)
        batch = self.tell(file.cursor, take)[0]
        if self.rng.random() < self.settings.twice and self.tell(file.cursor, take)[0] != batch:
            raise Broken(f"request {(replica, request)} was answered twice")
        if batch is None:
            host.busy.discard(replica)
            if not host.busy:
                self.barrier(host, host.epoch, "trained")
            return
        self.hands_out(host, file, batch, (replica, request))
        file.marks[replica] = batch
        host.versions[replica] = file.shards[0].version
        self.soon(host, "computed", replica, request, batch, within=1.5 * self.pace[replica])

    def hands_out(self, host: AsyncHost, file: File, batch: Batch, asked: tuple[int, int]) -> None:
        """A batch goes to one request alone, not once it is applied, and no epoch begins early."""
        self.story.counts["stolen"] += batch.part != asked[0]
        if batch in file.handed:
            raise Broken(f"{batch} was handed to {file.handed[batch]}, and now to {asked}")
        if batch in file.committed:
            raise Broken(f"{batch} was handed out, and it is applied")
        file.handed[batch] = asked
        if batch.epoch != host.epoch or batch.epoch > len(self.job.history):
            raise Broken(f"{batch} was handed out before its epoch")

    def on_computed(self, host: AsyncHost, replica: int, request: int, batch: Batch) -> None:
        file = host.gen.plane
        if batch == self.killer:
            self.on_crash(host.address)
            return
        file.marks[replica] = None
        if file.closed:
            self.leave(host)
            return
        if batch == self.taint:
            words = f"the gradient of replica {replica} is not finite ({batch})"
            self.fail(host, "NON_FINITE", words)
            return
        if host.gen.taken:
            raise Broken(f"generation {host.gen.number} applies, and another has gone on from it")
        file.words[replica] = (APPLYING, request)
        self.soon(host, "stores", replica, request, batch, 0, within=0.1)

    def on_stores(self, host: AsyncHost, replica: int, request: int, batch: Batch, k: int) -> None:
        """The lock of the next shard: a dead process has let go of it."""
        file = host.gen.plane
        shard = file.shards[(replica + k) % self.settings.shards]
        holder = self.processes[shard.lock] if shard.lock is not None else None
        if holder is not None and not holder.dead:
            # One that is stopped is waited for, but not for ever.
            if not (holder.held and (host.over or file.closed or self.over)):
                self.soon(host, "stores", replica, request, batch, k)
            return
        shard.lock = host.address
        self.soon(host, "stored", replica, request, batch, k, within=0.2)

    def on_stored(self, host: AsyncHost, replica: int, request: int, batch: Batch, k: int) -> None:
        file, index = host.gen.plane, (replica + k) % self.settings.shards
        shard = file.shards[index]
        shard.value += self.grad(batch, index)
        shard.applied[batch] += 1
        shard.version += 1
        shard.lock = None
        if k + 1 < self.settings.shards:
            self.soon(host, "stores", replica, request, batch, k + 1, within=0.1)
            return
        file.words[replica] = (APPLIED, request)
        samples = self.plan.samples(batch.part, batch.index)
        age = file.shards[0].version - 1 - host.versions[replica]
        file.ledger.commit(batch.epoch, samples, max(age, 0))
        totals = file.totals.setdefault(batch.epoch, Totals())
        totals.loss += 1.0
        totals.weight += 1.0
        totals.samples += samples
        if batch in file.committed:
            raise Broken(f"{batch} is accounted for twice")
        file.committed.add(batch)
        self.soon(host, "take", replica)

    def account(self, host: AsyncHost) -> dict[str, Any]:
        file = host.gen.plane
        totals = file.totals.get(host.epoch, Totals(math.nan))
        ledger = file.ledger
        self.check_ledger(file)
        return {"train": asdict(totals), "ledger": ledger.to_dict(), "last": file.cursor.exhausted}

    # -- the rules -----------------------------------------------------------------------------

    def in_user_code(self, address: str) -> list[Batch]:
        found = []
        for number, host in self.processes[address].hosts.items():
            file = self.generations[number].plane
            marks = file.marks if file is not None else {}
            found += [marks[i] for i in host.plan.replicas if marks.get(i) is not None]
        return list(dict.fromkeys(found))

    def check_ledger(self, file: File) -> None:
        ledger = file.ledger
        samples = [0] * len(ledger.samples)
        for batch in file.committed:
            samples[batch.epoch] += self.plan.samples(batch.part, batch.index)
        if ledger.samples != samples:
            raise Broken(f"{ledger}: expected samples {samples}")
        applied = len(file.committed)
        if ledger.applied != applied or sum(ledger.staleness.values()) != applied:
            raise Broken(f"{ledger}: expected {applied} applied")

    def check_success(self, gen: Generation) -> None:
        s, file = self.settings, gen.plane
        self.story.steps = len(file.committed)
        self.check_ledger(file)
        if s.steps is None:
            if file.ledger.samples != [s.rows] * s.epochs:
                raise Broken(f"{file.ledger}: expected {s.rows} samples in each epoch")
            if len(file.committed) != s.epochs * self.plan.batches_per_epoch:
                raise Broken(f"{len(file.committed)} batches are applied")
        elif len(file.committed) != s.steps:
            raise Broken(f"{len(file.committed)} batches are applied, expected {s.steps}")
        if [r["samples"] for r in self.job.history] != file.ledger.samples:
            raise Broken(f"the samples of {self.job.history}, expected {file.ledger.samples}")
        if self.job.ledger != file.ledger.to_dict():
            raise Broken(f"the job's ledger is {self.job.ledger}, the file's {file.ledger}")
        for index, shard in enumerate(file.shards):
            more = sum(shard.applied.values()) - len(shard.applied)
            # What a death has cut is applied again; nothing else, and all at least once.
            if set(shard.applied) != file.committed or more > file.ledger.duplicates:
                raise Broken(f"shard {index} has {shard.applied}, expected {file.ledger}")
            total = sum(self.grad(batch, index) * n for batch, n in shard.applied.items())
            if shard.value != total:
                raise Broken(f"shard {index} is {shard.value}, expected {total}")
        if file.ledger.duplicates and not self.cut:
            raise Broken(f"{file.ledger}: duplicates, and nobody has died")
