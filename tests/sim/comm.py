"""Synchronous steps over messages: shards, and the lead, live and die with their processes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dtrain.machines.jobs import Restored
from dtrain.machines.rounds import Rounds, Totals
from dtrain.machines.shard import Phase, ShardMachine
from dtrain.messages import (
    Abandon,
    Contribution,
    Flip,
    Pushed,
    Reduce,
    Reduced,
    Report,
    Verdict,
)
from tests.sim.network import Arrives, Local
from tests.sim.settings import WIDTH, Broken
from tests.sim.sync import NOTHING, SyncHost, SyncWorld
from tests.sim.world import Generation, Over


@dataclass(slots=True)
class Gradients:
    """Gradients for a shard; without an event it only asks for the version after ``step``."""

    shard: int
    step: int
    event: Pushed | None
    grads: dict[int, list[float]]


@dataclass(slots=True)
class Committed:
    shard: int
    version: int
    params: list[float]


@dataclass(slots=True)
class Decided:
    shard: int
    verdict: Verdict


@dataclass(slots=True)
class Freeze:
    """A new chief asks for what a host has; it says nothing in its generation any more."""

    chief: str
    generation: int


@dataclass(slots=True)
class Frozen:
    """What a frozen host has: of each shard both buffers; where the lead was, its account."""

    address: str
    #: index -> version, phase, parameters, slots
    shards: dict[int, tuple[int, Phase, list[list[float]], list[list[float]]]]
    lead: tuple[Totals, dict[str, Any], int] | None


@dataclass
class Shard:
    """A shard's two buffers beside its machine."""

    machine: ShardMachine
    #: by version modulo 2
    params: list[list[float]]
    slots: list[list[float]]
    #: replica -> (step, gradient)
    grads: dict[int, tuple[int, list[float]]] = field(default_factory=dict)
    #: host -> the version it waits for
    waiting: dict[str, int] = field(default_factory=dict)
    #: the newest version that anybody has seen
    seen: int = 0


@dataclass
class Plane:
    rounds: Rounds
    shards: list[Shard]
    totals: Totals
    #: verdicts as they were told first, and the shards whose hosts wait for one
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    reporters: dict[int, set[int]] = field(default_factory=dict)
    #: contributions that the lead has taken, repeats too; those that it began with
    told: int = 0
    before: int = 0
    #: its hosts have let go of it, for all of the next generation have opened theirs
    dropped: bool = False


@dataclass
class Checkpoint:
    step: int
    totals: Totals
    history: tuple[dict[str, Any], ...]
    ledger: dict[str, Any]
    #: shard -> parameters and slots; whole once all are there
    pieces: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)


class CommHost(SyncHost):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: whether it has its shards
        self.opened = False
        self.frozen = False
        self.pushed = False
        self.have: dict[int, int] = {}
        self.params: dict[int, list[float]] = {}
        self.parts: list[Contribution] = []
        self.grads: dict[int, list[list[float]]] = {}
        #: a chief's: what it has found, and whether it has begun
        self.found: dict[str, Frozen] = {}
        self.began = False


class CommWorld(SyncWorld):
    HOST = CommHost
    POINTS = ("prepared", "computed", "summed", "evaluated", "handed", "returned", "gives_up")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.checkpoints: dict[int, Checkpoint] = {}
        #: the newest that is whole
        self.saved: Checkpoint | None = None

    # -- recovery ------------------------------------------------------------------------------

    def recover(self, host: CommHost) -> None:
        origin = host.gen.origin
        if origin is None:
            self.start(host)
            return
        number = host.gen.number
        for plan in origin.hosts:
            body = Freeze(host.address, origin.generation)
            self.ask(host, plan.address, body, ("freeze", number, plan.address))
        self.soon(host, "gives_up", within=1)
        self.after(60.0, Local(host.address, number, "gives_up", (True,)))

    def hear_freeze(self, host: CommHost, message: Arrives, repeat: bool) -> None:
        """At an old host; the message comes to the generation that it names."""
        gen, plane = host.gen, host.gen.plane
        if plane is None or plane.dropped or not host.opened:
            number = message.body.generation
            if (
                number == self.job.generation
                and not self.processes[message.sender].hosts[number].began
            ):
                raise Broken(f"the shards of generation {gen.number} are gone, and needed")
            return  # who has asked is gone too, or has them
        host.frozen = self.recovery.fences
        shards = {}
        for index in host.plan.shards:
            shard = plane.shards[index]
            machine = shard.machine
            both = copy.deepcopy((shard.params, shard.slots))
            shards[index] = (machine.version, machine.phase, *both)
        lead = None
        if host.address == gen.chief:
            rounds = plane.rounds
            totals = replace(self.recovery.totals(plane))
            lead = (totals, rounds.ledger.to_dict(), len(rounds.arrived))
        body = Frozen(host.address, shards, lead)
        chief = message.sender
        self.send(host.address, chief, message.body.generation, body, ("frozen", message.key))

    def on_arrives(self, message: Arrives) -> None:
        # The two that go from one generation to another.
        if isinstance(message.body, Freeze):
            old = self.processes[message.at].hosts.get(message.body.generation)
            body = Freeze(message.sender, message.generation)
            self.arrived.add(message.key)
            if old is not None and not old.empty:
                self.hear_freeze(old, replace(message, body=body), False)
            return
        super().on_arrives(message)

    def hear_frozen(self, host: CommHost, message: Arrives, repeat: bool) -> None:
        body: Frozen = message.body
        self.answered(("freeze", host.gen.number, body.address))
        if body.address not in host.found:
            host.found[body.address] = body
            self.on_gives_up(host)

    def unreachable(self, host: CommHost, message: Arrives) -> None:
        if isinstance(message.body, Freeze):
            self.answered(message.key)
            self.on_gives_up(host)
        else:
            super().unreachable(host, message)

    def on_gives_up(self, host: CommHost, late: bool = False) -> None:
        """Whether all that can answer have answered; then it is memory, or a checkpoint."""
        origin = host.gen.origin
        missing = [h for h in origin.hosts if h.address not in host.found]
        if host.began or host.over:
            return
        if missing and not late and not all(self.processes[h.address].dead for h in missing):
            return
        for plan in origin.hosts:
            self.answered(("freeze", host.gen.number, plan.address))
        if any(h.shards for h in missing):
            self.start(host)
            return
        shards = {i: s for found in host.found.values() for i, s in found.shards.items()}
        heads = {i: (s[0], s[1]) for i, s in shards.items()}
        version = self.recovery.version(heads.values())
        for index, head in heads.items():
            if not self.recovery.follows(version, head):
                raise Broken(f"shard {index} is {head}, and another at version {version}")
        params = [shards[i][2][version % 2] for i in sorted(shards)]
        slots = [shards[i][3][version % 2] for i in sorted(shards)]
        totals, known, replayed = host.found[origin.hosts[0].address].lead
        old = self.generations[origin.generation]
        old.taken = True
        self.story.counts["verdict reused"] += len({v for v, _ in heads.values()}) > 1
        ledger = self.accounted(version, known, replayed)
        self.made(host, Restored(version, "memory", ledger=ledger), params, slots, totals)

    def start(self, host: CommHost) -> None:
        """The memory is gone: the last checkpoint, else the initial values."""
        origin, found = host.gen.origin, self.saved
        before = len(self.generations[origin.generation].line) if origin else 0
        if found is None:
            first = self.reference.params[0]
            restored = Restored(0, "start", ledger=NOTHING, lost=before)
            self.made(host, restored, first, [[0.0] * WIDTH for _ in first], Totals())
            return
        pieces = [found.pieces[i] for i in range(self.settings.shards)]
        lost = before - found.step
        restored = Restored(found.step, "checkpoint", found.history, found.ledger, lost)
        params, slots = [p[0] for p in pieces], [p[1] for p in pieces]
        self.made(host, restored, params, slots, found.totals)

    def made(
        self,
        host: CommHost,
        restored: Restored,
        params: list[list[float]],
        slots: list[list[float]],
        totals: Totals,
    ) -> None:
        """The shards of this generation."""
        host.began = True
        gen, step, machines = host.gen, restored.step, self.settings.machines
        self.goes_on(gen, restored, params)
        recorded = len(self.job.history if restored.source == "memory" else restored.history)
        totals = self.of_epoch(step, recorded, totals)
        shards = []
        for index, (mine, moved) in enumerate(zip(params, slots, strict=True)):
            both = [list(mine), [math.nan] * WIDTH], [list(moved), [math.nan] * WIDTH]
            if step % 2:
                both[0].reverse()
                both[1].reverse()
            machine = machines.shard(index, gen.number, step, self.plan.members)
            shards.append(Shard(machine, *both))
        rounds = self.rounds(gen, restored, totals)
        gen.plane = Plane(rounds, shards, replace(totals), before=rounds.ledger.duplicates)
        self.is_ready(host, restored)

    def command(self, event: Any, repeat: bool = False) -> bool:
        taken = super().command(event, repeat)
        if self.opened:
            # Everyone has its shards: nobody needs those of the hosts before.
            for number, gen in self.generations.items():
                if number < self.job.generation and gen.plane is not None:
                    gen.plane.dropped = True
        return taken

    def save(self, gen: Generation, shard: Shard, version: int) -> None:
        """A shard adds its piece to the checkpoint of a version."""
        cadence = self.settings.cadence
        if not cadence or version % cadence or gen.number != self.job.generation:
            return
        found = self.checkpoints.get(version)
        if found is None:
            epochs = self.plan.locate(version - 1)[0]
            history = tuple(self.job.history[:epochs])
            ledger = gen.plane.rounds.ledger.to_dict()
            found = Checkpoint(version, replace(gen.plane.totals), history, ledger)
            self.checkpoints[version] = found
        index = shard.machine.index
        found.pieces[index] = (list(shard.params[version % 2]), list(shard.slots[version % 2]))
        whole = len(found.pieces) == self.settings.shards
        if whole and (self.saved is None or self.saved.step < version):
            self.saved = found

    # -- a host's loop -------------------------------------------------------------------------

    def opens(self, host: CommHost, step: int, recorded: int) -> bool:
        host.opened = True
        shards = host.gen.plane.shards
        host.have = dict.fromkeys(range(len(shards)), step)
        host.params = {i: list(s.params[step % 2]) for i, s in enumerate(shards)}
        return super().opens(host, step, recorded)

    def next_replica(self, host: CommHost) -> None:
        if host.todo:
            self.soon(host, "computed", host.todo.pop(0), within=1.5)
            return
        parts, grads, step = host.parts, host.grads, host.step
        host.parts, host.grads = [], {}
        for shard in range(self.settings.shards):
            self.push(host, step, shard, parts, {i: g[shard] for i, g in grads.items()})
        host.pushed = True
        self.move(host)

    def on_computed(self, host: CommHost, replica: int) -> None:
        if self.killer is not None and self.batch(replica, host.step) == self.killer:
            self.on_crash(host.address)
            return
        params = [host.params[s] for s in range(self.settings.shards)]
        part, host.grads[replica] = self.gradient(replica, host.step, params)
        host.parts.append(part)
        self.next_replica(host)

    def push(
        self,
        host: CommHost,
        step: int,
        shard: int,
        parts: list[Contribution],
        grads: dict[int, list[float]],
    ) -> None:
        """One message with all gradients of the host, or one for each replica."""
        if not parts and host.have[shard] > step:
            return
        apart = parts and self.rng.random() < 0.3
        groups = [[part] for part in parts] if apart else [parts]
        gen = host.gen
        for number, group in enumerate(groups):
            event = Pushed(gen.number, step, tuple(group)) if group else None
            key = ("push", gen.number, host.address, step, shard, number)
            self.ask(host, gen.at_shard[shard], Gradients(shard, step, event, grads), key)

    def shorter(self, message: Arrives) -> Any:
        body = message.body
        # Once its gradients have arrived, a host only waits for the others'.
        if isinstance(body, Gradients) and message.key in self.arrived and self.rng.random() < 0.5:
            return replace(body, event=None, grads={})
        return body

    def hear_committed(self, host: CommHost, message: Arrives, repeat: bool) -> None:
        body: Committed = message.body
        if host.over or body.version <= host.have.get(body.shard, body.version):
            return
        host.have[body.shard], host.params[body.shard] = body.version, list(body.params)
        self.move(host)

    def move(self, host: CommHost) -> None:
        """To the next step, once all shards have committed this one."""
        step = host.step
        if not host.pushed or min(host.have.values()) <= step:
            return
        mine = ("push", host.gen.number, host.address, step)
        self.open = {k for k in self.open if k[:4] != mine}
        host.pushed = False
        self.committed(host)

    # -- shards --------------------------------------------------------------------------------

    def refuses(self, host: CommHost, message: Arrives) -> bool:
        """A host that is frozen, or out of its loop, answers nothing but that."""
        if host.frozen:
            answer = Over("its generation has ended")
            key = ("refused", message.key)
            self.send(host.address, message.sender, message.generation, answer, key)
        return host.over or host.frozen or host.gen.plane is None

    def hear_gradients(self, host: CommHost, message: Arrives, repeat: bool) -> None:
        if self.refuses(host, message):
            return
        body: Gradients = message.body
        gen = host.gen
        shard = gen.plane.shards[body.shard]
        if body.event is not None:
            if body.shard == 0:
                self.lead_hears(gen, body.event, repeat)
            fresh = shard.machine.new(body.event)
            commands = self.tell(shard.machine, body.event, repeat)
            if commands is None:
                return
            for c in fresh:
                shard.grads[c.replica] = (body.step, body.grads[c.replica])
            self.act(gen, shard, commands)
        sender = message.sender
        shard.waiting[sender] = max(shard.waiting.get(sender, 0), body.step + 1)
        self.serve(gen, shard)

    def serve(self, gen: Generation, shard: Shard) -> None:
        """Answer the hosts whose version is committed."""
        index, version = shard.machine.index, shard.machine.version
        body = Committed(index, version, list(shard.params[version % 2]))
        for address in [a for a, wanted in shard.waiting.items() if wanted <= version]:
            del shard.waiting[address]
            key = ("committed", gen.number, address, index, version)
            self.send(gen.at_shard[index], address, gen.number, body, key)

    def act(self, gen: Generation, shard: Shard, commands: Iterable[Any] | None) -> None:
        index = shard.machine.index
        for command in commands or ():
            host = self.processes[gen.at_shard[index]].hosts[gen.number]
            if isinstance(command, Reduce):
                self.soon(host, "summed", index, command, within=1)
            elif isinstance(command, Report):
                self.report(host, shard, command.event)
            elif isinstance(command, Flip):
                self.flip(gen, shard, command.version)
            else:
                assert isinstance(command, Abandon)
                self.fail(host, "NON_FINITE", command.problem)

    def flip(self, gen: Generation, shard: Shard, version: int) -> None:
        index = shard.machine.index
        if gen.taken:
            raise Broken(f"generation {gen.number} commits, and another has gone on from it")
        verdict = gen.plane.verdicts.get(version - 1)
        if verdict is None or not verdict.ok or shard.machine.version != version:
            raise Broken(f"shard {index} is at version {version} with the verdict {verdict}")
        if not gen.plane.rounds.step - 1 <= version <= gen.plane.rounds.step:
            raise Broken(f"shard {index} is at {version}, the lead at {gen.plane.rounds.step}")
        if shard.params[version % 2] != self.reference.params[version][index]:
            raise Broken(
                f"shard {index}, version {version}: {shard.params[version % 2]}, "
                f"expected {self.reference.params[version][index]}"
            )
        shard.grads, shard.seen = {}, version
        self.save(gen, shard, version)
        self.serve(gen, shard)

    def on_summed(self, host: CommHost, index: int, command: Reduce) -> None:
        gen, step = host.gen, command.step
        if host.frozen:
            return
        shard = gen.plane.shards[index]
        for i in command.members:
            if shard.grads[i][0] != step:
                raise Broken(f"step {step} has replica {i}'s gradient of step {shard.grads[i][0]}")
        mine = {i: shard.grads[i][1] for i in command.members}
        problem = self.update(
            step, command.members, command.weights, mine, shard.params, shard.slots
        )
        self.act(gen, shard, self.tell(shard.machine, Reduced(gen.number, step, index, problem)))

    def report(self, host: CommHost, shard: Shard, event: Reduced) -> None:
        """To the lead: at once where it is, else by message."""
        if host.address == host.gen.chief:
            self.lead_hears(host.gen, event, repeat=False)
        else:
            key = ("report", host.gen.number, event.shard, event.step)
            self.ask(host, host.gen.chief, event, key)

    def hear_decided(self, host: CommHost, message: Arrives, repeat: bool) -> None:
        if self.refuses(host, message):
            return
        body: Decided = message.body
        gen = host.gen
        shard = gen.plane.shards[body.shard]
        self.answered(("report", gen.number, body.shard, body.verdict.step))
        self.act(gen, shard, self.tell(shard.machine, body.verdict, repeat))
        if shard.machine.version < shard.seen:
            raise Broken(f"a shard went from version {shard.seen} to {shard.machine.version}")

    # -- the lead ------------------------------------------------------------------------------

    def hear_reduced(self, host: CommHost, message: Arrives, repeat: bool) -> None:
        if self.refuses(host, message):
            return
        event: Reduced = message.body
        host.gen.plane.reporters.setdefault(event.step, set()).add(event.shard)
        self.lead_hears(host.gen, event, repeat)
        self.publish(host.gen, event.step)

    def lead_hears(self, gen: Generation, event: Pushed | Reduced, repeat: bool) -> None:
        plane = gen.plane
        commands = self.tell(plane.rounds, event, repeat)
        if commands == [] and event.step in plane.verdicts:
            raise Broken(f"no answer to {event}: expected {plane.verdicts[event.step]}")
        if commands is not None and isinstance(event, Pushed):
            plane.told += len(event.contributions)
        for command in commands or ():
            verdict = command.verdict
            known = plane.verdicts.get(verdict.step)
            if known is not None:
                if known != verdict:
                    raise Broken(f"two verdicts: {known} and {verdict}")
                continue
            # Recorded now, and told at once to the shards beside the lead.
            plane.verdicts[verdict.step] = verdict
            if gen.taken:
                raise Broken(f"generation {gen.number} commits, and another has gone on from it")
            self.commits(gen, verdict, plane.rounds)
            plane.totals = replace(plane.rounds.totals)
            for shard in plane.shards:
                if gen.at_shard[shard.machine.index] == gen.chief:
                    self.act(gen, shard, self.tell(shard.machine, verdict))
            self.publish(gen, verdict.step)
        ledger, before = plane.rounds.ledger, plane.before
        mine = sum(g == gen.number for g in gen.line)
        members = self.reference.members[len(gen.line) - mine : len(gen.line)]
        applied = sum(map(len, members))
        account = applied + ledger.duplicates - before + len(plane.rounds.arrived)
        if account != plane.told:
            raise Broken(f"{ledger}: expected an account of {plane.told} gradients")

    def publish(self, gen: Generation, step: int) -> None:
        """Tell a verdict to those who reported."""
        if step in gen.plane.verdicts:
            for index in sorted(gen.plane.reporters.pop(step, ())):
                body = Decided(index, gen.plane.verdicts[step])
                key = ("verdict", gen.number, index, step)
                self.send(gen.chief, gen.at_shard[index], gen.number, body, key)

    def final(self, gen: Generation) -> list[list[float]]:
        return [s.params[s.machine.version % 2] for s in gen.plane.shards]
