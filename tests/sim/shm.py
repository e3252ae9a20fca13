"""Synchronous steps in shared memory: one file for each generation, which outlives everybody."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from dtrain.machines.jobs import Restored
from dtrain.machines.rounds import Rounds, Totals
from dtrain.messages import Batch, Contribution, Pushed, Reduced
from tests.sim.settings import WIDTH, Broken
from tests.sim.sync import NOTHING, SyncHost, SyncWorld
from tests.sim.world import Generation

NAN = [math.nan] * WIDTH


@dataclass
class File:
    """What lies in the file; whoever has it open may store into it, dead generation or not."""

    #: the verdict: this many steps are committed; and the version that readers see
    word: int
    version: int
    #: by version modulo 2
    params: list[list[list[float]]]
    slots: list[list[list[float]]]
    totals: list[Totals]
    #: replica -> steps pushed, its part and its gradient, and what it has in user code
    pushed: dict[int, int] = field(default_factory=dict)
    parts: dict[int, Contribution] = field(default_factory=dict)
    grads: dict[int, list[list[float]]] = field(default_factory=dict)
    marks: dict[int, Batch | None] = field(default_factory=dict)
    #: shard -> who has its lock, steps applied, and what is wrong with it
    locks: dict[int, str] = field(default_factory=dict)
    reduced: dict[int, int] = field(default_factory=dict)
    problems: dict[int, str | None] = field(default_factory=dict)
    removed: bool = False
    #: the lead's, in the memory of the chief
    rounds: Rounds | None = None


class ShmHost(SyncHost):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waits = False
        #: whether a turn of its is on the way
        self.rung = False
        self.busy = False
        #: the copy that a chief is making
        self.copy: list[Any] = []


class ShmWorld(SyncWorld):
    HOST = ShmHost
    POINTS = (
        "prepared", "copied", "computed", "written", "turn", "applied", "flip", "evaluated",
        "handed", "returned",
    )  # fmt: skip

    # -- recovery ------------------------------------------------------------------------------

    def recover(self, host: ShmHost) -> None:
        gen = host.gen
        if gen.origin is None:
            first = self.reference.params[0]
            slots = [[0.0] * WIDTH for _ in first]
            self.made(host, Restored(0, "start", ledger=NOTHING), first, slots, Totals())
            return
        file = self.origin(gen)
        if file is None:
            self.leave(host)
            return
        host.copy = [self.recovery.committed(file), [], []]
        self.soon(host, "copied", 0, within=1)

    def origin(self, gen: Generation) -> File | None:
        """The file to copy; None: it is gone, and so is the generation that wants it."""
        file = self.generations[gen.origin.meeting].plane
        if file is None:
            raise Broken(f"generation {gen.origin.generation} has left no file")
        if not file.removed:
            return file
        if gen.number == self.job.generation:
            raise Broken(f"the file of generation {gen.origin.generation} is gone, and needed")
        return None

    def on_copied(self, host: ShmHost, shard: int) -> None:
        """Shard by shard, for others may store meanwhile; then again, if they did."""
        file, gen = self.origin(host.gen), host.gen
        if file is None:
            self.leave(host)
            return
        version, params, slots = host.copy
        params.append(list(file.params[version % 2][shard]))
        slots.append(list(file.slots[version % 2][shard]))
        if len(params) < self.settings.shards:
            self.soon(host, "copied", shard + 1, within=1)
            return
        if not self.recovery.intact(file, version):
            self.story.counts["copied again"] += 1
            self.recover(host)
            return
        members = self.plan.members(version) if version < self.plan.total_steps else ()
        replayed = sum(file.pushed.get(i, 0) > version for i in members)
        marks = [file.marks.get(i) for i in gen.origin.dead]
        suspects = tuple(dict.fromkeys(m for m in marks if m is not None))
        ledger = self.accounted(version, gen.ledger, replayed)
        restored = Restored(version, "memory", ledger=ledger, suspects=suspects)
        self.made(host, restored, params, slots, file.totals[version % 2])

    def made(
        self,
        host: ShmHost,
        restored: Restored,
        params: list[list[float]],
        slots: list[list[float]],
        totals: Totals,
    ) -> None:
        """The file of this generation."""
        gen, step = host.gen, restored.step
        self.goes_on(gen, restored, params)
        nothing = [list(NAN) for _ in params]
        both = [[list(p) for p in params], nothing]
        moved = [[list(p) for p in slots], [list(p) for p in nothing]]
        if step % 2:
            both.reverse()
            moved.reverse()
        totals = self.of_epoch(step, len(self.job.history), totals)
        file = File(step, step, both, moved, [replace(totals), replace(totals)])
        file.rounds = self.rounds(gen, restored, totals)
        gen.plane = file
        self.is_ready(host, restored)

    def poll(self, key: tuple[Any, ...]) -> None:
        super().poll(key)
        # Everyone has opened the new file: nobody needs the old one.
        gen = self.generations.get(self.job.generation)
        opened = key[0] == "barrier" and key[-1] == "opened" and self.opened
        if opened and gen is not None and gen.origin is not None:
            self.generations[gen.origin.generation].plane.removed = True

    def opens(self, host: ShmHost, step: int, recorded: int) -> bool:
        file = host.gen.plane
        if file.removed:
            if host.gen.number == self.job.generation:
                raise Broken(f"generation {host.gen.number} opens a file that is gone")
            return False
        if file.word != step:
            raise Broken(f"generation {host.gen.number} opens version {file.word}, not {step}")
        return super().opens(host, step, recorded)

    # -- a step --------------------------------------------------------------------------------

    def next_replica(self, host: ShmHost) -> None:
        if not host.todo:
            host.waits = True
            self.ring(host.gen)
            return
        replica = host.todo.pop(0)
        host.gen.plane.marks[replica] = self.batch(replica, host.step)
        self.soon(host, "computed", replica, within=1.5)

    def on_computed(self, host: ShmHost, replica: int) -> None:
        file, step = host.gen.plane, host.step
        if file.marks[replica] == self.killer:
            self.on_crash(host.address)
            return
        part, grads = self.gradient(replica, step, file.params[step % 2])
        # It is written in place, so it may be found half written.
        file.grads[replica] = [list(NAN) for _ in grads]
        file.parts[replica] = part
        self.soon(host, "written", replica, grads, within=0.1)

    def on_written(self, host: ShmHost, replica: int, grads: list[list[float]]) -> None:
        file = host.gen.plane
        file.grads[replica] = grads
        file.marks[replica] = None
        file.pushed[replica] = host.step + 1
        self.next_replica(host)

    def hosts(self, gen: Generation) -> Iterator[ShmHost]:
        for plan in gen.hosts:
            host = self.processes[plan.address].hosts.get(gen.number)
            if host is not None:
                yield host

    def ring(self, gen: Generation) -> None:
        for host in self.hosts(gen):
            if host.waits and not host.rung and not host.busy:
                host.rung = True
                self.soon(host, "turn")

    def on_turn(self, host: ShmHost) -> None:
        """Whoever waits, works: a shard that nobody has, or the verdict."""
        host.rung = False
        file, step, gen = host.gen.plane, host.step, host.gen
        if not host.waits:
            return
        if file.version > step:
            host.waits = False
            self.committed(host)
            return
        members = self.plan.members(step)
        if any(file.pushed.get(i, 0) <= step for i in members):
            return
        for shard in range(self.settings.shards):
            if file.reduced.get(shard, 0) <= step and shard not in file.locks:
                file.locks[shard] = host.address
                host.busy = True
                # The other buffer, from here on, is neither version.
                file.params[(step + 1) % 2][shard] = list(NAN)
                self.soon(host, "applied", shard, step, members, within=0.4)
                return
        done = all(file.reduced.get(shard, 0) > step for shard in range(self.settings.shards))
        if done and host.address == gen.chief and file.word == step:
            self.decide(host, step, members)

    def on_applied(self, host: ShmHost, shard: int, step: int, members: tuple[int, ...]) -> None:
        file = host.gen.plane
        weights = tuple(file.parts[i].weight for i in members)
        for i in members:
            if file.pushed[i] != step + 1:
                raise Broken(f"step {step} has replica {i}'s gradient of step {file.pushed[i] - 1}")
        mine = {i: file.grads[i][shard] for i in members}
        params, slots = [b[shard] for b in file.params], [b[shard] for b in file.slots]
        file.problems[shard] = self.update(step, members, weights, mine, params, slots)
        for k in range(2):
            file.params[k][shard], file.slots[k][shard] = params[k], slots[k]
        file.reduced[shard] = step + 1
        del file.locks[shard]
        host.busy = False
        self.ring(host.gen)

    def decide(self, host: ShmHost, step: int, members: tuple[int, ...]) -> None:
        """At the lead: the totals, then the verdict (the commit); the version flips after it."""
        gen, file = host.gen, host.gen.plane
        rounds = file.rounds
        self.tell(rounds, Pushed(gen.number, step, tuple(file.parts[i] for i in members)))
        for shard in range(self.settings.shards):
            event = Reduced(gen.number, step, shard, file.problems[shard])
            decided = self.tell(rounds, event)
        if not decided:
            raise Broken(f"no verdict of step {step}, and all is in")
        verdict = decided[0].verdict
        self.commits(gen, verdict, rounds)
        if not verdict.ok:
            self.fail(host, "NON_FINITE", verdict.problem)
            return
        file.totals[(step + 1) % 2] = replace(rounds.totals)
        file.word = step + 1
        found = file.params[(step + 1) % 2]
        if found != self.reference.params[step + 1]:
            raise Broken(
                f"version {step + 1} is {found}, expected {self.reference.params[step + 1]}"
            )
        host.busy = True
        self.soon(host, "flip", within=0.1)

    def on_flip(self, host: ShmHost) -> None:
        host.gen.plane.version = host.gen.plane.word
        host.busy = False
        self.ring(host.gen)

    # -- the rules -----------------------------------------------------------------------------

    def in_user_code(self, address: str) -> list[Batch]:
        found = []
        for number, host in self.processes[address].hosts.items():
            file = self.generations[number].plane
            marks = file.marks if file is not None else {}
            found += [marks[i] for i in host.plan.replicas if marks.get(i) is not None]
        return list(dict.fromkeys(found))

    def final(self, gen: Generation) -> list[list[float]]:
        file = gen.plane
        return file.params[file.word % 2]
