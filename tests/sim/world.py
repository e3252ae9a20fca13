"""The master, and the control plane of the hosts.

What runs in threads and event loops in ``dtrain.runtime`` is played here by the ``on_*`` (things
that happen) and ``hear_*`` (messages that arrive) methods, as thin as there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dtrain import metrics
from dtrain.errors import FencedError, ProtocolError
from dtrain.machines import jobs, membership
from dtrain.machines.jobs import (
    HostDone,
    HostFailed,
    HostPlan,
    HostReady,
    JobMachine,
    Launched,
    Origin,
    Reached,
    Restored,
    State,
    WorkerLost,
)
from dtrain.machines.membership import Finding, Hello, Joined, Left, Presence
from dtrain.machines.plan import order
from dtrain.messages import Batch, Failure
from dtrain.partition import assign
from dtrain.runtime.placement import place
from tests.sim.checks import Checks
from tests.sim.faults import Faults
from tests.sim.network import Arrives, Does, Local, Network, Process
from tests.sim.settings import LEASE, Broken, Settings, state_of

# -- bodies of messages that are not a machine's event -----------------------------------------


@dataclass(slots=True)
class Start:
    plan: HostPlan


@dataclass(slots=True)
class Go:
    """The master's answer to a question; ``step`` and ``recorded`` to one that is ready."""

    key: tuple[Any, ...]
    stop: bool = False
    step: int = 0
    recorded: int = 0


@dataclass(slots=True)
class Over:
    """A host is to leave; its generation has ended; ``over``: so has the job, for good."""

    why: str
    over: bool = False


@dataclass
class Generation:
    """One choice of hosts, and what they were launched with."""

    number: int
    hosts: tuple[HostPlan, ...]
    origin: Origin | None
    #: what the master knew at the launch
    ledger: dict[str, Any] | None
    #: for each committed step, the generation that committed it
    line: list[int] = field(default_factory=list)
    #: whether another one has gone on from its last version
    taken: bool = False
    #: what the data plane keeps
    plane: Any = None

    def __post_init__(self) -> None:
        self.chief = self.hosts[0].address
        self.at_shard = {shard: h.address for h in self.hosts for shard in h.shards}


class Host:
    """One worker's share of a generation."""

    def __init__(self, plan: HostPlan, gen: Generation) -> None:
        self.plan = plan
        self.address = plan.address
        self.gen = gen
        self.epoch = 0
        #: out of its loop, and whether it has let go of all that it had
        self.over = False
        self.empty = False


class World(Faults, Checks, Network):
    """Everything but the data plane, which is the subclass's."""

    FIRST = (Start, Over)
    #: where a worker may die or stop
    POINTS: tuple[str, ...] = ()
    HOST: type[Host] = Host

    def __init__(self, seed: int, settings: Settings, rng: random.Random) -> None:
        super().__init__(seed, settings, rng)
        s = settings
        self.membership = s.machines.membership("1", hello_deadline=30.0, mute_deadline=30.0)
        self.recovery = s.machines.recovery()
        self.job: JobMachine | None = None
        self.generations: dict[int, Generation] = {}
        #: questions to the master that it has no answer to yet
        self.polls: dict[tuple[Any, ...], str] = {}
        #: those who were told to leave: once, for nobody knows that it was not heard
        self.told: set[tuple[Any, ...]] = set()
        self.seed = rng.getrandbits(16)
        self.data = [rng.uniform(-1.0, 1.0) for _ in range(s.rows)]
        self.plan = s.machines.plan(s.rows, s.replicas, s.batch_size, s.epochs, s.steps)
        #: odds that one more worker is asked to take part
        self.grows = rng.choice([0.0, 0.8])
        #: seconds that a host takes to get ready, at most; the old ones may still be at work
        self.haste = rng.choice([0.3, 3.0])
        self.joined = 0

    def begin(self) -> None:
        for _ in range(self.settings.workers):
            self.after(self.rng.uniform(0, 2), Does("join"))
        self.after(2.0, Does("tick"))

    # -- telling a machine ---------------------------------------------------------------------

    def tell(self, machine: Any, event: Any, repeat: bool = False) -> list[Any] | None:
        """Its commands; None if it refuses, which changes nothing.

        It must refuse what is of another generation, and nothing else but repeats.
        """
        if self.settings.forged and self.rng.random() < self.settings.forged:
            self.forge(machine, event)
        mine = getattr(machine, "generation", None)
        old = getattr(event, "generation", mine) != mine
        looked = (old or repeat) and self.rng.random() < self.settings.looked
        before = state_of(machine) if looked else None
        try:
            commands = machine.handle(event, self.now)
        except (FencedError, ProtocolError) as error:
            if not (old if isinstance(error, FencedError) else repeat):
                raise Broken(f"refused at its first arrival: {event}: {error}") from error
            if looked and state_of(machine) != before:
                raise Broken(f"{event} was refused, and changed {type(machine).__name__}") from None
            self.story.counts["fenced" if old else "refused"] += 1
            return None
        if old:
            raise Broken(f"{type(machine).__name__} of generation {mine} took {event}")
        return commands

    def forge(self, machine: Any, event: Any) -> None:
        """First offer the same event of an old generation, and of a step to come."""
        mine = getattr(machine, "generation", None)
        if getattr(event, "generation", None) != mine or mine is None:
            return
        forged: list[tuple[Any, type[Exception]]] = [
            (replace(event, generation=event.generation - 1), FencedError)
        ]
        if hasattr(event, "step"):
            forged.append((replace(event, step=event.step + 1000), ProtocolError))
        if hasattr(event, "request"):
            forged.append((replace(event, request=event.request + 1000), ProtocolError))
        before = state_of(machine)
        for bad, error in forged:
            try:
                machine.handle(bad, self.now)
            except error:
                self.story.counts["forged"] += 1
            else:
                raise Broken(f"{type(machine).__name__} took {bad}")
        if state_of(machine) != before:
            raise Broken(f"a refused {type(event).__name__} changed {type(machine).__name__}")

    # -- the master: who is in -----------------------------------------------------------------

    def on_join(self) -> None:
        self.joined += 1
        address = f"w{self.joined}"
        self.processes[address] = Process(address)
        self.tell(self.membership, Joined(address, address.upper()))
        odd = (
            self.rng.random()
            if self.settings.min_workers < self.joined <= self.settings.workers
            else 1.0
        )
        if odd < 0.02:
            return  # says nothing
        version, problem = "0" if odd < 0.05 else "1", "no disk" if odd < 0.03 else None
        hello = Hello(address, version, problem)
        self.after(self.rng.uniform(0.1, 2), Does("hello", (hello,), address))

    def on_hello(self, hello: Hello) -> None:
        self.findings.pop(hello.address, None)
        if hello.address in self.membership.members:
            self.members(hello)
            if self.rng.random() < self.settings.twice:
                self.members(hello)

    def members(self, event: Any) -> None:
        """Tell the membership, and do as it says."""
        for command in self.tell(self.membership, event):
            if isinstance(command, membership.Probe):
                self.after(self.rng.uniform(0.01, 0.4), Does("probed", (command.address,)))
            elif isinstance(command, membership.Found):
                self.found(command.address)
            elif self.job is not None:
                self.command(WorkerLost(command.address, command.why))

    def found(self, address: str) -> None:
        """Another worker can train: it may be given a part of the work."""
        self.story.counts["found"] += 1
        job = self.job
        if job is None or job.terminal or address in job._hosts:
            return
        if len(job.hosts) < self.settings.replicas and self.rng.random() < self.grows:
            self.command(jobs.Change(f"worker {address} has joined"))

    def on_probed(self, address: str) -> None:
        """A neighbour has looked at a worker's process."""
        process = self.processes[address]
        finding = Finding.RUNS
        if process.dead:
            finding = Finding.GONE
        elif process.held == "stopped":
            finding = Finding.STOPPED
        if self.rng.random() < 0.1:
            finding = Finding.UNKNOWN
        member = self.membership.members.get(address)
        before = member.presence if member else None
        self.findings.setdefault(address, []).append(finding)
        self.members(membership.Probed(address, finding))
        if member and member.presence is Presence.FENCED and before is Presence.READY:
            self.fenced(address, process, finding)

    def on_left(self, address: str) -> None:
        self.members(Left(address))

    def on_tick(self) -> None:
        for process in list(self.processes.values()):
            address = process.address
            muted = process.held and process.held != "stuck"
            if process.dead or muted or address not in self.membership.members:
                continue
            summary = {str(n): "" for n, host in process.hosts.items() if not host.over}
            self.members(membership.Beat(address, summary))
            self.findings.pop(address, None)
            self.heard_of(address, bool(summary))
            self.tell_again(process)
        self.members(membership.Look(LEASE))
        self.retire()
        if self.job is None:
            if self.now > 4.0 and not self.membership.pending(self.now):
                self.submit()
        else:
            self.command(jobs.Tick())
        if not self.over:
            self.after(1.0, Does("tick"))

    def tell_again(self, process: Process) -> None:
        """One that did not hear that its generation has ended says so with its heartbeat."""
        for number, host in process.hosts.items():
            key = ("stop", number, process.address)
            if not host.over and number < self.job.generation and key not in self.told:
                self.told.add(key)
                self.send(None, process.address, number, Over("it has ended"), key)

    # -- the master: the job -------------------------------------------------------------------

    def submit(self) -> None:
        ready, s = self.membership.ready(), self.settings
        if len(ready) < self.settings.min_workers:
            return
        record = partial(metrics.epoch_record, replicas=s.replicas)
        self.job = s.machines.job("job", s.limits, self.now, record)
        self.decree()
        self.launch(ready)

    def launch(self, ready: list[membership.Member]) -> None:
        hosts = place(ready, self.settings.replicas, self.settings.shards, {})
        where = assign([1] * self.settings.shards, [h.address for h in hosts], "round-robin")
        hosts = jobs.with_shards(hosts, where)
        self.chosen(hosts)
        job = self.job
        self.generations[job.generation] = Generation(job.generation, hosts, job.origin, job.ledger)
        self.story.generations = max(self.story.generations, job.generation)
        if self.settings.fate == "unready" and self.stuck is None:
            self.stuck = self.rng.choice(hosts).address
        self.command(Launched(hosts))

    def command(self, event: Any, repeat: bool = False) -> bool:
        """Tell the job, do as it says, and answer who waits for what it now knows.

        False: it is of an old generation.
        """
        job = self.job
        self.before(event)
        commands = self.tell(job, event, repeat)
        if commands is None and event.generation != job.generation:
            return False
        self.behind(event, commands or [])
        for command in commands or ():
            if isinstance(command, jobs.Launch):
                for host in command.hosts:
                    key = ("start", job.generation, host.address)
                    self.send(None, host.address, job.generation, Start(host), key, sure=True)
            elif isinstance(command, jobs.Stop):
                for address in command.addresses:
                    body = Over(command.why, command.over)
                    key = ("stop", command.generation, address)
                    self.told.add(key)
                    self.send(None, address, command.generation, body, key)
            elif isinstance(command, jobs.Place):
                ready = self.membership.ready()
                if job.placing and len(ready) >= max(self.settings.min_workers, 1):
                    self.launch(ready)
            else:
                self.end(command)
        for key in list(self.polls):
            self.poll(key)
        return True

    def poll(self, key: tuple[Any, ...]) -> None:
        """Answer a question to the master, if it can be; its key: (what, generation, ...)."""
        job = self.job
        address = self.polls.get(key)
        if address is None:
            return
        outcome = job.outcome
        answer: Any = None
        what, generation = key[:2]
        if job.terminal or generation != job.generation:
            answer = Over("it has ended")
        elif outcome is not None and outcome.state is not State.SUCCEEDED:
            answer = Over("it is about to end")
        elif what == "ready" and job.state in (State.RUNNING, State.STOPPING):
            found = job.restored
            # The chief says so: the master itself takes it over once all have opened.
            recorded = job.history if found.source == "memory" else found.history
            answer = Go(key, step=found.step, recorded=len(recorded))
        elif what == "end" and outcome is not None:
            answer = Go(key, stop=True)
        elif what == "barrier" and key[3:] in job.settled:
            answer = Go(key, job.settled[key[3:]])
        if answer is not None:
            del self.polls[key]
            self.send(None, address, generation, answer, ("answer", key))

    def hear_hostready(self, message: Arrives, repeat: bool) -> None:
        self.said.add((message.generation, message.sender))
        self.asks(message, repeat)

    def hear_reached(self, message: Arrives, repeat: bool) -> None:
        self.asks(message, repeat)

    def hear_str(self, message: Arrives, repeat: bool) -> None:
        """A host without replicas asks for the end."""
        self.polls[message.key] = message.sender
        self.poll(message.key)

    def asks(self, message: Arrives, repeat: bool) -> None:
        self.polls[message.key] = message.sender
        if not self.command(message.body, repeat):
            self.poll(message.key)

    def hear_hostfailed(self, message: Arrives, repeat: bool) -> None:
        self.command(message.body, repeat)

    def hear_hostdone(self, message: Arrives, repeat: bool) -> None:
        self.command(message.body, repeat)

    # -- the hosts -----------------------------------------------------------------------------

    def hear_start(self, host: Host, message: Arrives, repeat: bool) -> None:
        """It has begun, or was told to leave before."""

    def first_start(self, message: Arrives) -> None:
        process, gen = self.processes[message.at], self.generations[message.generation]
        host = self.HOST(message.body.plan, gen)
        process.hosts[gen.number] = host
        if host.address != self.stuck:
            self.soon(host, "prepared", within=self.haste)

    def hear_over(self, host: Host, message: Arrives, repeat: bool) -> None:
        host.empty = host.empty or message.body.over
        self.leave(host)

    def first_over(self, message: Arrives) -> None:
        """It is told to leave before it is told to begin."""
        gen = self.generations[message.generation]
        host = self.HOST(next(h for h in gen.hosts if h.address == message.at), gen)
        self.processes[message.at].hosts[gen.number] = host
        self.leave(host)

    def on_prepared(self, host: Host) -> None:
        if host.address == host.gen.chief:
            self.recover(host)
        else:
            self.is_ready(host)

    def is_ready(self, host: Host, restored: Restored | None = None) -> None:
        number, shared = host.gen.number, self.settings.transport == "shm"
        meeting = number if restored is not None else None
        ready = HostReady(number, host.address, shared, restored, meeting)
        self.ask(host, None, ready, ("ready", number, host.address))

    def hear_go(self, host: Host, message: Arrives, repeat: bool) -> None:
        go: Go = message.body
        if not self.answered(go.key) or host.over:
            return
        what, phase = go.key[0], go.key[-1]
        if what == "ready":
            if self.opens(host, go.step, go.recorded):
                self.barrier(host, host.epoch, "opened")
            else:
                self.leave(host)
        elif go.stop:
            self.hand_over(host)
        elif phase == "opened":
            if not host.plan.replicas:
                key = ("end", host.gen.number, host.address)
                self.ask(host, None, "is it over?", key)
            else:
                self.goes(host)
        elif phase == "trained":
            self.evaluate(host, host.epoch)
        else:
            host.epoch += 1
            self.goes(host)

    def hand_over(self, host: Host) -> None:
        """It is done: the chief writes the result before it returns."""
        host.over = True
        self.soon(host, "handed", within=3 if host.address == host.gen.chief else 0.5)

    def on_handed(self, host: Host) -> None:
        self.on_returned(host)

    def leave(self, host: Host) -> None:
        """Out of its loop: its task returns."""
        if not host.over:
            host.over = True
            self.soon(host, "returned", within=1)

    def on_returned(self, host: Host) -> None:
        done = HostDone(host.gen.number, host.address)
        key = ("done", host.gen.number, host.address)
        self.send(host.address, None, host.gen.number, done, key, sure=True)

    def fail(self, host: Host, reason: str, problem: str) -> None:
        if host.over:
            return
        number = host.gen.number
        failed = HostFailed(number, host.address, Failure(reason, problem))
        key = ("failed", number, host.address)
        self.send(host.address, None, number, failed, key, sure=True)
        # Its task returns afterwards, once the master has answered.
        host.over = True
        self.after(16.0, Local(host.address, number, "returned"))

    def unreachable(self, host: Host, message: Arrives) -> None:
        self.story.counts["unreachable"] += 1
        self.fail(host, "WORKERS_LOST", f"cannot reach worker {message.at}")

    def evaluate(self, host: Host, epoch: int, last: bool = False) -> None:
        self.soon(host, "evaluated", epoch, last, within=1)

    def on_evaluated(self, host: Host, epoch: int, last: bool) -> None:
        payload: dict[str, Any] = {"epoch": epoch, "step": 0, "last": last}
        if host.address == host.gen.chief:
            payload |= self.account(host)
        self.barrier(host, epoch, "evaluated", payload)

    def barrier(
        self, host: Host, epoch: int, phase: str, payload: dict[str, Any] | None = None
    ) -> None:
        number, address = host.gen.number, host.address
        reached = Reached(number, address, epoch, phase, payload or {})
        self.ask(host, None, reached, ("barrier", number, address, epoch, phase))

    def rows(self, batch: Batch) -> list[int]:
        start, size = self.plan.bounds[batch.part], self.plan.size(batch.part)
        mixed = order(self.seed, batch.epoch, batch.part, size, self.settings.shuffle)
        rows = range(size) if mixed is None else mixed.tolist()
        a = batch.index * self.settings.batch_size
        return [start + row for row in rows[a : a + self.settings.batch_size]]

    # -- what the data planes add --------------------------------------------------------------

    def recover(self, host: Host) -> None:
        """The chief looks for the last committed version, and says :meth:`is_ready`."""
        raise NotImplementedError

    def opens(self, host: Host, step: int, recorded: int) -> bool:
        """All hosts are ready: it opens what the chief has made, if that is still there."""
        raise NotImplementedError

    def goes(self, host: Host) -> None:
        """The host's loop begins, or begins another epoch."""
        raise NotImplementedError

    def account(self, host: Host) -> dict[str, Any]:
        """What the chief adds to the epoch's record."""
        raise NotImplementedError
