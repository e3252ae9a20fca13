"""A seeded simulator: the pure machines of a whole small job, joined by a fake network.

``run(seed, **settings)`` draws a job (replicas, shards, workers, rows), what befalls it (its
*fate*) and every delay from one ``random.Random(seed)``, and drives the real machines from the
workers' first hello to the one terminal state.  The network delays, reorders, repeats and loses
messages; whoever asked asks again.  After *every* event the rules of ``design.md`` are checked
(:meth:`World.check`); the first that does not hold raises :class:`Broken`, which names the
seed and tells the last events.

What runs in threads and event loops in ``dtrain.runtime`` is played here by the ``on_*`` (things
that happen) and ``hear_*`` (messages that arrive) methods, as thin as there.  To add a fault:
an event class, its ``on_*`` method, a name in :data:`FATES`, and what it may lead to in
:meth:`World.expect`.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from dtrain import metrics
from dtrain.errors import FencedError, ProtocolError
from dtrain.machines import jobs
from dtrain.machines.cursor import Cursor, Plan, Take, order
from dtrain.machines.jobs import (
    TERMINAL,
    TRANSITIONS,
    HostDone,
    HostFailed,
    HostPlan,
    HostReady,
    JobMachine,
    Launched,
    Reached,
    State,
    WorkerLost,
)
from dtrain.machines.ledger import Ledger
from dtrain.machines.membership import Hello, Joined, Left, Membership
from dtrain.machines.rounds import Rounds, Totals
from dtrain.machines.shard import ShardMachine
from dtrain.messages import (
    Abandon,
    Batch,
    Contribution,
    Failure,
    Flip,
    Push,
    Pushed,
    Reduce,
    Reduced,
    Report,
    Verdict,
)
from dtrain.runtime.placement import place
from dtrain.tree import reduce_into, scratch_needed

#: What befalls a job: nothing; a gradient or loss that is not finite; a worker's death; a
#: cancel; a client that goes (and may return); a worker that never gets ready.
FATES = ("success", "poison", "crash", "cancel", "client", "unready")

#: Numbers in a shard.
WIDTH = 2
#: More events than any job of this size takes: nothing moves any more.
MOST_EVENTS = 12_000
LIMITS = jobs.Limits(prepare_deadline=150.0, stop_grace=60.0, client_lease=20.0)


class Broken(AssertionError):
    """A rule of the design does not hold."""


def state_of(machine: Any) -> dict[str, Any]:
    """A copy of all that a machine knows, to compare; without the functions it was given."""
    return copy.deepcopy({k: v for k, v in vars(machine).items() if not callable(v)})


# -- settings, and what came of them -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The classes that a world is made of; a test puts a broken one in."""

    membership: type[Membership] = Membership
    job: type[JobMachine] = JobMachine
    plan: type[Plan] = Plan
    rounds: type[Rounds] = Rounds
    shard: type[ShardMachine] = ShardMachine
    cursor: type[Cursor] = Cursor


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A job, its fate, and how bad the network is; the last four are odds."""

    mode: str
    fate: str
    workers: int
    replicas: int
    shards: int
    batch_size: int
    rows: int
    epochs: int
    steps: int | None
    shuffle: bool
    late: float
    twice: float
    lost: float
    forged: float
    machines: Machines = Machines()

    @classmethod
    def draw(cls, rng: random.Random, **fixed: Any) -> Settings:
        """Draw what is not ``fixed``."""
        drawn: dict[str, Any] = {
            "mode": "sync",
            "fate": rng.choice(FATES) if rng.random() < 0.4 else "success",
            "workers": rng.randint(1, 5),
            "replicas": rng.randint(1, 6),
            "shards": rng.randint(1, 4),
            "batch_size": rng.randint(1, 4),
            "epochs": rng.randint(1, 3),
            "steps": rng.randint(1, 9) if rng.random() < 0.2 else None,
            "shuffle": rng.random() < 0.3,
            "late": rng.choice([0.0, 0.1, 0.3]),
            "twice": rng.choice([0.0, 0.1, 0.3]),
            "lost": rng.choice([0.0, 0.05, 0.15]),
            "forged": rng.choice([0.0, 0.1]),
        }
        kept = {**drawn, **fixed}
        each, replicas = kept["batch_size"], kept["replicas"]
        # Some parts have one row, so one batch, more than the others; or all are alike.
        rest = rng.choice([0, rng.randrange(replicas), rng.randrange(replicas * each)])
        kept.setdefault("rows", replicas * each * rng.randint(1, 3) + rest)
        return cls(**kept)


@dataclass
class Story:
    """What became of a seed."""

    seed: int
    settings: Settings
    state: State | None = None
    reason: str | None = None
    message: str = ""
    events: int = 0
    steps: int = 0
    #: how often the network and the machines did what: repeated, lost, refused, forged, stolen
    counts: Counter[str] = field(default_factory=Counter)
    #: (time, event): the last ones
    last: deque[tuple[float, Any]] = field(default_factory=lambda: deque(maxlen=25))

    def tell(self) -> str:
        lines = [f"  {now:9.3f}  {repr(event)[:240]}" for now, event in self.last]
        return "\n".join([f"seed {self.seed}: {self.settings}", "the last events:", *lines])


# -- events: what happens, and what is on its way ----------------------------------------------


@dataclass(frozen=True)
class Joins:
    address: str


@dataclass(frozen=True)
class Crashes:
    address: str


@dataclass(frozen=True)
class Ticks:
    pass


@dataclass(frozen=True)
class Tells:
    """Somebody tells the master: a cancel, a client that goes or returns."""

    event: Any


@dataclass(frozen=True)
class Prepared:
    address: str


@dataclass(frozen=True)
class Returned:
    """A host's task has returned."""

    address: str


@dataclass(frozen=True)
class Computed:
    """A host has its gradients of a step (sync); a replica has its batch's (async)."""

    address: str
    step: int
    replica: int | None = None
    batch: Batch | None = None


@dataclass(frozen=True)
class Evaluated:
    address: str
    epoch: int
    last: bool


@dataclass(frozen=True)
class Summed:
    """A shard has done its array maths for a step."""

    shard: int
    command: Reduce


@dataclass(frozen=True)
class Arrives:
    """One copy of a message: ``key`` is who asks for what, the same for all copies."""

    sender: str | None
    to: str | None
    body: Any
    key: Hashable


@dataclass(frozen=True)
class Again:
    """The one who asked looks whether there was an answer."""

    message: Arrives


# -- bodies of messages that are not a machine's event -----------------------------------------


@dataclass(frozen=True)
class Start:
    pass


@dataclass(frozen=True)
class Go:
    """The master's answer to (what, address, ...)."""

    key: tuple[Any, ...]
    stop: bool = False


@dataclass(frozen=True)
class Over:
    why: str


@dataclass(frozen=True)
class Gradients:
    """Gradients for a shard; without an event it only asks for the version after ``step``."""

    shard: int
    step: int
    event: Pushed | None
    grads: dict[int, list[float]]


@dataclass(frozen=True)
class Committed:
    shard: int
    version: int
    params: tuple[float, ...]


@dataclass(frozen=True)
class Decided:
    shard: int
    verdict: Verdict


@dataclass(frozen=True)
class Given:
    """The lead's answer to a Take."""

    replica: int
    request: int
    batch: Batch | None


@dataclass(frozen=True)
class Exchange:
    """An asynchronous push and pull at one shard."""

    shard: int
    push: Push
    batch: Batch


@dataclass(frozen=True)
class Exchanged:
    shard: int
    replica: int
    request: int
    version: int
    batch: Batch | None


@dataclass
class Host:
    """One worker's share of the job."""

    plan: HostPlan
    epoch: int = 0
    over: bool = False


# -- the world: the network and the control plane ----------------------------------------------


class World:
    """Everything but the data plane, which is the subclass's.

    Parameters
    ----------
    seed : int
        Only to be told.
    settings : Settings
    rng : random.Random
        All chance comes from here.
    """

    def __init__(self, seed: int, settings: Settings, rng: random.Random) -> None:
        self.settings = settings
        self.rng = rng
        self.now = 0.0
        self.story = Story(seed, settings)
        self.queue: list[tuple[float, int, Any]] = []
        self._scheduled = 0
        #: keys of what has arrived once, and of what is asked and not answered
        self.arrived: set[Hashable] = set()
        self.open: set[Hashable] = set()
        self.dead: set[str] = set()
        self.membership = settings.machines.membership("1", hello_deadline=30.0)
        self.job: JobMachine | None = None
        self.hosts: dict[str, Host] = {}
        #: questions to the master that it has no answer to yet
        self.polls: dict[tuple[Any, ...], str] = {}
        #: the host that never gets ready
        self.stuck: str | None = None
        #: the end that the job cannot escape, once its fate has struck
        self.must: tuple[str, str | None] | None = None
        self.ends = 0
        self.ended: State | None = None
        self.seed = rng.getrandbits(16)
        self.data = [rng.uniform(-1.0, 1.0) for _ in range(settings.rows)]
        s = settings
        self.plan = s.machines.plan(s.rows, s.replicas, s.batch_size, s.epochs, s.steps)

    def run(self) -> Story:
        for number in range(self.settings.workers):
            self.after(self.rng.uniform(0, 3), Joins(f"w{number}"))
        self.after(3.0, Ticks())
        try:
            while self.queue:
                self.now, _, event = heapq.heappop(self.queue)
                self.story.last.append((self.now, event))
                self.story.events += 1
                if self.story.events > MOST_EVENTS:
                    raise Broken("nothing moves any more, and the job has not ended")
                getattr(self, f"on_{type(event).__name__.lower()}")(event)
                self.check_control()
                self.check()
            self.finish()
        except Exception as error:
            what = str(error) if isinstance(error, Broken) else repr(error)
            raise Broken(f"{what}\n{self.story.tell()}") from error
        return self.story

    # -- time and the network ------------------------------------------------------------------

    def after(self, delay: float, event: Any) -> None:
        self._scheduled += 1
        heapq.heappush(self.queue, (self.now + delay, self._scheduled, event))

    def send(
        self, sender: str | None, to: str | None, body: Any, key: Hashable, *, sure: bool = False
    ) -> None:
        """Put copies of a message on their way: one, two, or (unless ``sure``) none."""
        if sender in self.dead:
            return
        copies = 1 + (self.rng.random() < self.settings.twice)
        if not sure and self.rng.random() < self.settings.lost:
            self.story.counts["lost"] += 1
            copies = 0
        for _ in range(copies):
            slow = self.rng.random() < self.settings.late
            delay = self.rng.uniform(1, 20) if slow else self.rng.random()
            self.after(delay, Arrives(sender, to, body, key))

    def ask(self, sender: str, to: str | None, body: Any, key: Hashable) -> None:
        """Send, and send again until :meth:`answered`."""
        self.open.add(key)
        self.send(sender, to, body, key)
        self.after(self.rng.uniform(4, 8), Again(Arrives(sender, to, body, key)))

    def answered(self, key: Hashable) -> bool:
        """Close a question; False if it was closed before."""
        if key not in self.open:
            return False
        self.open.discard(key)
        return True

    def on_again(self, event: Again) -> None:
        message = event.message
        sender = message.sender
        if message.key not in self.open or sender in self.dead or self.ended is not None:
            return
        host = self.hosts.get(sender)
        if host is not None and host.over:
            return
        self.ask(sender, message.to, self.shorter(message), message.key)

    def shorter(self, message: Arrives) -> Any:
        """The body of a question that is asked again."""
        return message.body

    def on_arrives(self, message: Arrives) -> None:
        if message.to in self.dead:
            return
        repeat = message.key in self.arrived
        self.arrived.add(message.key)
        self.story.counts["repeated"] += repeat
        hear = getattr(self, f"hear_{type(message.body).__name__.lower()}")
        if message.to is None:
            hear(message, repeat)
            return
        host = self.hosts.get(message.to)
        if host is not None and not host.over:
            hear(host, message, repeat)

    # -- telling a machine ---------------------------------------------------------------------

    def tell(self, machine: Any, event: Any, repeat: bool = False) -> list[Any] | None:
        """Its commands; None if it refuses, which only a repeat may be, and changes nothing."""
        self.forge(machine, event)
        before = state_of(machine) if repeat else None
        try:
            return machine.handle(event, self.now)
        except (FencedError, ProtocolError) as error:
            if before is None:
                raise Broken(f"refused at its first arrival: {event}: {error}") from error
            if state_of(machine) != before:
                raise Broken(f"{event} was refused, and changed {type(machine).__name__}") from None
            self.story.counts["refused"] += 1
            return None

    def forge(self, machine: Any, event: Any) -> None:
        """First offer the same event of an old generation, and of a step to come."""
        if not hasattr(event, "generation") or self.rng.random() >= self.settings.forged:
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

    # -- the master ----------------------------------------------------------------------------

    def on_joins(self, event: Joins) -> None:
        self.tell(self.membership, Joined(event.address, event.address.upper()))
        odd = self.rng.random() if event.address != "w0" else 1.0
        if odd < 0.05:
            return  # says nothing
        hello = Hello(event.address, "0" if odd < 0.1 else "1", "no disk" if odd < 0.03 else None)
        self.ask(event.address, None, hello, ("hello", event.address))

    def hear_hello(self, message: Arrives, repeat: bool) -> None:
        self.answered(message.key)
        if message.body.address in self.membership.members:
            self.tell(self.membership, message.body, repeat)

    def on_ticks(self, event: Ticks) -> None:
        if self.job is None:
            if not self.membership.pending(self.now):
                self.submit()
        else:
            self.command(jobs.Tick())
        if self.ended is None:
            self.after(1.0, event)

    def submit(self) -> None:
        s = self.settings
        ready = self.membership.ready()
        hosts = place(ready, s.replicas, s.shards, {})
        record = partial(metrics.epoch_record, replicas=s.replicas)
        self.job = s.machines.job("job", LIMITS, self.now, record)
        self.hosts = {h.address: Host(h) for h in hosts}
        self.chief = hosts[0].address
        self.at_shard = {shard: h.address for h in hosts for shard in h.shards}
        self.build()
        self.decree()
        self.command(Launched(hosts))

    def decree(self) -> None:
        """Schedule the job's fate."""
        fate, rng = self.settings.fate, self.rng
        if fate == "crash":
            self.after(rng.uniform(0, 25), Crashes(rng.choice(list(self.membership.members))))
        elif fate == "cancel":
            self.after(rng.uniform(0, 40), Tells(jobs.Cancel("somebody cancelled it")))
        elif fate == "client":
            gone, away = rng.uniform(0, 20), rng.uniform(1, 1.5 * LIMITS.client_lease)
            self.after(gone, Tells(jobs.ClientGone()))
            self.after(gone + away, Tells(jobs.ClientBack()))
            if away < LIMITS.client_lease:
                self.must = ("SUCCEEDED", None)
        elif fate == "unready":
            self.stuck = rng.choice(list(self.hosts))

    def on_tells(self, event: Tells) -> None:
        if isinstance(event.event, jobs.Cancel) and self.job.outcome is None:
            self.must = ("CANCELLED", "CANCELLED")
        self.command(event.event)

    def on_crashes(self, event: Crashes) -> None:
        if self.needs(event.address):
            self.must = ("FAILED", "WORKERS_LOST")
        self.dead.add(event.address)
        for lost in self.tell(self.membership, Left(event.address)):
            self.command(WorkerLost(lost.address))

    def needs(self, address: str) -> bool:
        """Whether the job cannot do without a worker: in training all hosts, then the chief."""
        if address not in self.hosts or address in self.job.done:
            return False
        return self.job.outcome is None or address == self.chief

    def command(self, event: Any, repeat: bool = False) -> None:
        """Tell the job, do as it says, and answer who waits for what it now knows."""
        for command in self.tell(self.job, event, repeat) or ():
            if isinstance(command, jobs.Launch):
                for host in command.hosts:
                    self.send(None, host.address, Start(), ("start", host.address), sure=True)
            elif isinstance(command, jobs.Stop):
                for address in command.addresses:
                    self.send(None, address, Over(command.why), ("stop", address))
            else:
                self.ends += 1
                if command.state is not self.job.state:
                    raise Broken(f"{command} of a job that is {self.job.state}")
        for key in list(self.polls):
            self.poll(key)

    def poll(self, key: tuple[Any, ...]) -> None:
        """Answer a question to the master, if it can be."""
        job, address = self.job, self.polls[key]
        outcome = job.outcome
        if job.terminal or (outcome is not None and outcome.state is not State.SUCCEEDED):
            answer: Any = Over("it has ended")
        elif key[0] == "ready" and job.state in (State.RUNNING, State.STOPPING):
            answer = Go(key)
        elif key[0] == "barrier" and key[2:] in job.settled:
            answer = Go(key, job.settled[key[2:]])
        else:
            return
        del self.polls[key]
        self.send(None, address, answer, ("answer", key))

    def hear_hostready(self, message: Arrives, repeat: bool) -> None:
        self.polls[message.key] = message.sender
        self.command(message.body, repeat)

    def hear_reached(self, message: Arrives, repeat: bool) -> None:
        self.polls[message.key] = message.sender
        if self.hosts[message.sender].plan.replicas:
            self.command(message.body, repeat)
        else:
            self.poll(message.key)

    def hear_hostfailed(self, message: Arrives, repeat: bool) -> None:
        self.command(message.body, repeat)
        if not repeat:
            self.after(self.rng.random(), Returned(message.sender))

    def hear_hostdone(self, message: Arrives, repeat: bool) -> None:
        self.command(message.body, repeat)

    # -- the hosts -----------------------------------------------------------------------------

    def hear_start(self, host: Host, message: Arrives, repeat: bool) -> None:
        if not repeat and host.plan.address != self.stuck:
            self.after(self.rng.uniform(0.1, 3), Prepared(host.plan.address))

    def on_prepared(self, event: Prepared) -> None:
        address = event.address
        if address not in self.dead and not self.hosts[address].over:
            ready = HostReady(self.job.generation, address)
            self.ask(address, None, ready, ("ready", address))

    def hear_go(self, host: Host, message: Arrives, repeat: bool) -> None:
        go: Go = message.body
        if not self.answered(go.key):
            return
        if go.key[0] == "ready":
            self.begin(host)
            return
        _, _, epoch, phase = go.key
        if phase == "trained":
            self.evaluate(host, epoch)
        elif go.stop:
            self.leave(host)
        else:
            host.epoch = epoch + 1
            self.begin(host)

    def hear_over(self, host: Host, message: Arrives, repeat: bool) -> None:
        self.leave(host)

    def leave(self, host: Host) -> None:
        """Out of its loop: nothing reaches it any more, and its task returns."""
        host.over = True
        self.after(self.rng.random(), Returned(host.plan.address))

    def on_returned(self, event: Returned) -> None:
        done = HostDone(self.job.generation, event.address)
        self.send(event.address, None, done, ("done", event.address), sure=True)

    def fail(self, host: Host, problem: str) -> None:
        if host.over:
            return
        host.over = True
        address = host.plan.address
        failed = HostFailed(self.job.generation, address, Failure("NON_FINITE", problem))
        self.send(address, None, failed, ("failed", address), sure=True)

    def compute(self, address: str, step: int, *of: Any) -> None:
        self.after(self.rng.uniform(0.1, 1.5), Computed(address, step, *of))

    def evaluate(self, host: Host, epoch: int, last: bool = False) -> None:
        self.after(self.rng.random(), Evaluated(host.plan.address, epoch, last))

    def on_evaluated(self, event: Evaluated) -> None:
        if self.gone(event.address):
            return
        host = self.hosts[event.address]
        payload: dict[str, Any] = {"epoch": event.epoch, "step": 0, "last": event.last}
        if event.address == self.chief:
            payload |= self.account()
        self.barrier(host, event.epoch, "evaluated", payload)

    def barrier(self, host: Host, epoch: int, phase: str, payload: dict[str, Any]) -> None:
        address = host.plan.address
        reached = Reached(self.job.generation, address, epoch, phase, payload)
        self.ask(address, None, reached, ("barrier", address, epoch, phase))

    def rows(self, batch: Batch) -> list[int]:
        start, size = self.plan.bounds[batch.part], self.plan.size(batch.part)
        mixed = order(self.seed, batch.epoch, batch.part, size, self.settings.shuffle)
        rows = range(size) if mixed is None else mixed.tolist()
        a = batch.index * self.settings.batch_size
        return [start + row for row in rows[a : a + self.settings.batch_size]]

    def gone(self, address: str) -> bool:
        return address in self.dead or self.hosts[address].over

    # -- what the modes add --------------------------------------------------------------------

    def build(self) -> None:
        """Make the machines of the data plane."""
        raise NotImplementedError

    def begin(self, host: Host) -> None:
        """The host's loop begins, or begins another epoch."""
        raise NotImplementedError

    def account(self) -> dict[str, Any]:
        """What the chief adds to the epoch's record."""
        raise NotImplementedError

    def check(self) -> None:
        """The rules of the data plane, after every event."""
        raise NotImplementedError

    def check_success(self) -> None:
        """What a job that succeeded has done."""
        raise NotImplementedError

    # -- the rules of the control plane --------------------------------------------------------

    def check_control(self) -> None:
        job = self.job
        if job is None:
            return
        if self.ended is not None and job.state is not self.ended:
            raise Broken(f"the job was {self.ended} and became {job.state}")
        if job.terminal:
            self.ended = job.state
        if self.ends != job.terminal:
            raise Broken(f"{self.ends} ends of a job that is {job.state}")
        if [record["epoch"] for record in job.history] != list(range(1, len(job.history) + 1)):
            raise Broken(f"the epochs of the history: {job.history}")

    def finish(self) -> None:
        """Nothing is left to happen."""
        if self.ended is None:
            raise Broken("the job has not ended")
        job, story = self.job, self.story
        states = [state for _, state, _ in job.story]
        for before, after in pairwise(states):
            if after not in TRANSITIONS[before]:
                raise Broken(f"the job's story has {before} before {after}")
        if sum(state in TERMINAL for state in states) != 1 or states[-1] is not job.state:
            raise Broken(f"the job's story ends otherwise: {job.story}")
        failure = job.outcome.failure
        story.state, story.steps = job.state, self.steps_done()
        story.reason = failure.reason if failure else None
        story.message = failure.message if failure else ""
        found = (str(story.state), story.reason)
        if found not in self.expect():
            raise Broken(f"found {found} ({story.message}), expected one of {self.expect()}")
        if job.state is State.SUCCEEDED:
            self.check_success()

    def steps_done(self) -> int:
        raise NotImplementedError

    def expect(self) -> Iterable[tuple[str, str | None]]:
        """The ends that the fate may lead to."""
        if self.must is not None:
            return [self.must]
        success = ("SUCCEEDED", None)
        return {
            "poison": [("FAILED", "NON_FINITE")],
            "unready": [("FAILED", "DEADLINE")],
            # Whether the lease ran out before the job's end is the job's to know.
            "client": [success, ("CANCELLED", "CANCELLED")],
        }.get(self.settings.fate, [success])


# -- synchronous -------------------------------------------------------------------------------


def gradient(
    data: list[float], rows: list[int], params: list[list[float]]
) -> tuple[float, list[list[float]]]:
    """The loss of a batch, and its gradient shard by shard: plain floats, far from associative."""
    n = len(rows)
    grads = [
        [sum(data[r] * (2 * s + k + 1) - 0.3 * p for r in rows) / n for k, p in enumerate(shard)]
        for s, shard in enumerate(params)
    ]
    return sum(data[r] ** 2 for r in rows) / n + grads[0][0] ** 2, grads


def momentum(
    params: list[float], slots: list[float], grad: list[float]
) -> tuple[list[float], list[float]]:
    moved = [0.9 * m + g for m, g in zip(slots, grad, strict=True)]
    return [p - 0.1 * m for p, m in zip(params, moved, strict=True)], moved


def plain_tree(terms: dict[int, float], lo: int, hi: int) -> float | None:
    """The definition of the fixed binary tree, once more and in words as short as it has."""
    if hi - lo == 1:
        return terms.get(lo)
    mid = (lo + hi + 1) // 2
    left, right = plain_tree(terms, lo, mid), plain_tree(terms, mid, hi)
    if left is None or right is None:
        return right if left is None else left
    return left + right


def plain_mean(terms: dict[int, float], weights: dict[int, float], replicas: int) -> float:
    if len(terms) == 1:
        return next(iter(terms.values()))
    total = plain_tree(weights, 0, replicas)
    mean = plain_tree({i: g * weights[i] for i, g in terms.items()}, 0, replicas)
    return mean if total == 1.0 else mean * (1.0 / total)


class Reference:
    """The same job in one plain loop: no machines, no messages, no shards that could differ."""

    def __init__(self, world: World) -> None:
        s, n = world.settings, world.settings.replicas
        params = [[0.5 * k - shard for k in range(WIDTH)] for shard in range(s.shards)]
        slots = [[0.0] * WIDTH for _ in params]
        #: by version
        self.params = [copy.deepcopy(params)]
        self.samples: list[list[int]] = [[]]
        self.applied = [0]
        #: by step
        self.members: list[tuple[int, ...]] = []
        self.ends: list[bool] = []
        #: by epoch
        self.losses: list[float] = []
        epoch = 0
        while epoch < s.epochs if s.steps is None else len(self.members) < s.steps:
            batches = [self._batches(world, epoch, part) for part in range(n)]
            loss_sum, weight_sum = 0.0, 0.0
            for index in range(max(map(len, batches))):
                mine = {i: b[index] for i, b in enumerate(batches) if index < len(b)}
                found = {i: gradient(world.data, rows, params) for i, rows in mine.items()}
                weights = {i: len(rows) / s.batch_size for i, rows in mine.items()}
                for shard in range(s.shards):
                    mean = [
                        plain_mean({i: g[shard][k] for i, (_, g) in found.items()}, weights, n)
                        for k in range(WIDTH)
                    ]
                    params[shard], slots[shard] = momentum(params[shard], slots[shard], mean)
                loss_sum += plain_tree({i: f[0] * weights[i] for i, f in found.items()}, 0, n)
                weight_sum += plain_tree(weights, 0, n)
                samples = [*self.samples[-1], *[0] * (epoch + 1 - len(self.samples[-1]))]
                samples[epoch] += sum(map(len, mine.values()))
                self.samples.append(samples)
                self.applied.append(self.applied[-1] + len(mine))
                self.params.append(copy.deepcopy(params))
                self.members.append(tuple(mine))
                self.ends.append(False)
                if len(self.members) == s.steps:
                    break
            self.ends[-1] = True
            self.losses.append(loss_sum / weight_sum)
            epoch += 1

    @staticmethod
    def _batches(world: World, epoch: int, part: int) -> list[list[int]]:
        s = world.settings
        rows = list(range(s.rows * part // s.replicas, s.rows * (part + 1) // s.replicas))
        if s.shuffle:
            rows = [rows[i] for i in order(world.seed, epoch, part, len(rows), True)]
        return [rows[a : a + s.batch_size] for a in range(0, len(rows), s.batch_size)]


@dataclass
class SyncShard:
    """A shard's two buffers beside its machine."""

    machine: ShardMachine
    #: by version modulo 2
    params: list[list[float]]
    slots: list[list[float]]
    #: replica -> (step, gradient)
    grads: dict[int, tuple[int, list[float]]] = field(default_factory=dict)
    #: host -> the version it waits for
    waiting: dict[str, int] = field(default_factory=dict)
    #: (replica, step) of all gradients that a committed version has in it
    applied: set[tuple[int, int]] = field(default_factory=set)
    #: the replicas in the other buffer
    other: tuple[int, ...] = ()
    seen: int = 0


@dataclass
class SyncHost(Host):
    """A host's copies of the shards, each at a version of its own."""

    step: int = 0
    #: whether the step's gradients (if it has any) are on their way
    pushed: bool = False
    have: dict[int, int] = field(default_factory=dict)
    params: dict[int, list[float]] = field(default_factory=dict)


class SyncWorld(World):
    """Rounds at the lead, a ShardMachine for each shard, and hosts that step together."""

    def build(self) -> None:
        s, generation = self.settings, self.job.generation
        self.reference = Reference(self)
        self.rounds = s.machines.rounds(
            generation,
            0,
            s.shards,
            s.replicas,
            self.plan.members,
            lambda step: self.plan.locate(step)[0],
        )
        first = self.reference.params[0]
        self.shards = [
            SyncShard(
                s.machines.shard(index, generation, 0, self.plan.members),
                [list(first[index]), [math.nan] * WIDTH],
                [[0.0] * WIDTH, [math.nan] * WIDTH],
            )
            for index in range(s.shards)
        ]
        self.hosts = {
            a: SyncHost(
                h.plan,
                have=dict.fromkeys(range(s.shards), 0),
                params={i: list(p) for i, p in enumerate(first)},
            )
            for a, h in self.hosts.items()
        }
        #: what was decided, as it was told first
        self.verdicts: dict[int, Verdict] = {}
        #: contributions that the lead has taken, repeats too
        self.told = 0
        #: step -> the shards whose hosts wait for its verdict
        self.reporters: dict[int, set[int]] = {}
        #: (replica, step, shard or None for the loss) that is not finite
        self.poison: tuple[int, int, int | None] | None = None
        if s.fate == "poison":
            step = self.rng.randrange(len(self.reference.members))
            where = self.rng.choice([None, *range(s.shards)])
            self.poison = (self.rng.choice(self.reference.members[step]), step, where)

    # -- a host's loop -------------------------------------------------------------------------

    def begin(self, host: SyncHost) -> None:
        if host.plan.replicas:
            self.compute(host.plan.address, host.step)
        else:
            self.barrier(host, host.epoch, "evaluated", {})

    def on_computed(self, event: Computed) -> None:
        if self.gone(event.address):
            return
        host, step = self.hosts[event.address], event.step
        epoch, index = self.plan.locate(step)
        mine = [i for i in host.plan.replicas if index < self.plan.batches(i)]
        params = [host.params[s] for s in range(self.settings.shards)]
        if mine and params != self.reference.params[step]:
            raise Broken(f"step {step} was computed from other parameters than version {step}")
        parts, grads = [], {}
        for i in mine:
            rows = self.rows(Batch(epoch, i, index))
            loss, grads[i] = gradient(self.data, rows, params)
            if self.poison is not None and self.poison[:2] == (i, step):
                loss = self.taint(loss, grads[i])
            weight = len(rows) / self.settings.batch_size
            parts.append(Contribution(i, weight, len(rows), loss, i, index))
        for shard in range(self.settings.shards):
            self.push(host, step, shard, parts, {i: g[shard] for i, g in grads.items()})
        host.pushed = True
        self.move(host)

    def taint(self, loss: float, grads: list[list[float]]) -> float:
        where = self.poison[2]
        if where is None:
            return math.inf
        grads[where][-1] = math.nan
        return loss

    def push(
        self,
        host: SyncHost,
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
        for number, group in enumerate(groups):
            event = Pushed(self.job.generation, step, tuple(group)) if group else None
            body = Gradients(shard, step, event, grads)
            address = host.plan.address
            key = ("push", address, step, shard, number)
            self.ask(address, self.at_shard[shard], body, key)

    def shorter(self, message: Arrives) -> Any:
        body = message.body
        # Once its gradients have arrived, a host only waits for the others'.
        if isinstance(body, Gradients) and message.key in self.arrived and self.rng.random() < 0.5:
            return replace(body, event=None, grads={})
        return body

    def hear_committed(self, host: SyncHost, message: Arrives, repeat: bool) -> None:
        body: Committed = message.body
        if body.version <= host.have[body.shard]:
            return
        host.have[body.shard], host.params[body.shard] = body.version, list(body.params)
        self.move(host)

    def move(self, host: SyncHost) -> None:
        """To the next step, once all shards have committed this one."""
        step, address = host.step, host.plan.address
        if not host.pushed or min(host.have.values()) <= step:
            return
        self.open = {k for k in self.open if k[:3] != ("push", address, step)}
        host.step, host.pushed = step + 1, False
        if self.plan.ends_epoch(step):
            epoch = self.plan.locate(step)[0]
            self.evaluate(host, epoch, step + 1 == self.plan.total_steps)
        else:
            self.compute(address, host.step)

    def account(self) -> dict[str, Any]:
        return {
            "step": self.rounds.step,
            "train": asdict(self.rounds.take_totals()),
            "ledger": self.rounds.ledger.to_dict(),
        }

    # -- shards --------------------------------------------------------------------------------

    def hear_gradients(self, host: Host, message: Arrives, repeat: bool) -> None:
        body: Gradients = message.body
        shard = self.shards[body.shard]
        if body.event is not None:
            if body.shard == 0:
                self.lead_hears(body.event, repeat)
            fresh = shard.machine.new(body.event)
            commands = self.tell(shard.machine, body.event, repeat)
            if commands is None:
                return
            for c in fresh:
                shard.grads[c.replica] = (body.step, body.grads[c.replica])
            self.act(shard, commands)
        sender = message.sender
        shard.waiting[sender] = max(shard.waiting.get(sender, 0), body.step + 1)
        self.serve(shard)

    def serve(self, shard: SyncShard) -> None:
        """Answer the hosts whose version is committed."""
        index, version = shard.machine.index, shard.machine.version
        body = Committed(index, version, tuple(shard.params[version % 2]))
        for address in [a for a, wanted in shard.waiting.items() if wanted <= version]:
            del shard.waiting[address]
            key = ("committed", address, index, version)
            self.send(self.at_shard[index], address, body, key)

    def act(self, shard: SyncShard, commands: Iterable[Any] | None) -> None:
        for command in commands or ():
            if isinstance(command, Reduce):
                self.after(self.rng.random(), Summed(shard.machine.index, command))
            elif isinstance(command, Report):
                self.report(shard, command.event)
            elif isinstance(command, Flip):
                self.flip(shard, command)
            else:
                assert isinstance(command, Abandon)
                self.fail(self.hosts[self.at_shard[shard.machine.index]], command.problem)

    def flip(self, shard: SyncShard, command: Flip) -> None:
        step = command.version - 1
        for replica in shard.other:
            if (replica, step) in shard.applied:
                raise Broken(f"replica {replica}, step {step}: applied twice")
            shard.applied.add((replica, step))
        shard.grads, shard.other = {}, ()
        self.serve(shard)

    def on_summed(self, event: Summed) -> None:
        shard, command = self.shards[event.shard], event.command
        if self.gone(self.at_shard[event.shard]):
            return
        step = command.step
        for i in command.members:
            if shard.grads[i][0] != step:
                raise Broken(f"step {step} has replica {i}'s gradient of step {shard.grads[i][0]}")
        leaves = {i: np.array(shard.grads[i][1]) for i in command.members}
        out = np.empty(WIDTH)
        many = scratch_needed(command.members, command.weights, self.settings.replicas)
        scratch = [np.empty(WIDTH) for _ in range(many)]
        members, weights = command.members, command.weights
        reduce_into(members, weights, self.settings.replicas, leaves, out, scratch)
        problem = None
        if np.isfinite(out).all():
            old, new = step % 2, (step + 1) % 2
            shard.params[new], shard.slots[new] = momentum(
                shard.params[old], shard.slots[old], out.tolist()
            )
        else:
            bad = [i for i in members if not np.isfinite(leaves[i]).all()]
            problem = f"the gradient of replica {bad[0]} is not finite at step {step}"
        shard.other = members
        reduced = Reduced(self.job.generation, step, event.shard, problem)
        self.act(shard, self.tell(shard.machine, reduced))

    def report(self, shard: SyncShard, event: Reduced) -> None:
        """To the lead: at once where it is, else by message."""
        address = self.at_shard[shard.machine.index]
        if address == self.chief:
            self.lead_hears(event, repeat=False)
        else:
            self.ask(address, self.chief, event, ("report", event.shard, event.step))

    def hear_decided(self, host: Host, message: Arrives, repeat: bool) -> None:
        body: Decided = message.body
        shard = self.shards[body.shard]
        self.answered(("report", body.shard, body.verdict.step))
        self.act(shard, self.tell(shard.machine, body.verdict, repeat))

    # -- the lead ------------------------------------------------------------------------------

    def hear_reduced(self, host: Host, message: Arrives, repeat: bool) -> None:
        event: Reduced = message.body
        self.reporters.setdefault(event.step, set()).add(event.shard)
        self.lead_hears(event, repeat)
        self.publish(event.step)

    def lead_hears(self, event: Pushed | Reduced, repeat: bool) -> None:
        commands = self.tell(self.rounds, event, repeat)
        if commands == [] and event.step in self.verdicts:
            raise Broken(f"no answer to {event}: expected {self.verdicts[event.step]}")
        if commands is not None and isinstance(event, Pushed):
            self.told += len(event.contributions)
        for command in commands or ():
            verdict = command.verdict
            known = self.verdicts.get(verdict.step)
            if known is not None:
                if known != verdict:
                    raise Broken(f"two verdicts: {known} and {verdict}")
                continue
            # Recorded now, and told at once to the shards beside the lead.
            self.verdicts[verdict.step] = verdict
            self.check_verdict(verdict)
            for shard in self.shards:
                if self.at_shard[shard.machine.index] == self.chief:
                    self.act(shard, self.tell(shard.machine, verdict))
            self.publish(verdict.step)

    def publish(self, step: int) -> None:
        """Tell a verdict to those who reported."""
        if step in self.verdicts:
            for index in sorted(self.reporters.pop(step, ())):
                body = Decided(index, self.verdicts[step])
                self.send(self.chief, self.at_shard[index], body, ("verdict", index, step))

    # -- the rules -----------------------------------------------------------------------------

    def check_verdict(self, verdict: Verdict) -> None:
        step = verdict.step
        if verdict.members != self.reference.members[step]:
            raise Broken(f"{verdict}: expected members {self.reference.members[step]}")
        tainted = self.poison is not None and self.poison[1] == step
        if verdict.ok == tainted or (verdict.problem is None) == tainted:
            raise Broken(f"{verdict} of a step that is {'not ' * tainted}finite")
        if tainted and f"replica {self.poison[0]} is" not in verdict.problem:
            raise Broken(f"{verdict} does not name replica {self.poison[0]}")

    def check(self) -> None:
        if self.job is None:
            return
        step, reference = self.rounds.step, self.reference
        for shard in self.shards:
            version = shard.machine.version
            if version != shard.seen:
                if version != shard.seen + 1:
                    raise Broken(f"a shard went from version {shard.seen} to {version}")
                shard.seen = version
            # Whoever has flipped has a verdict behind it; nobody is left more than one behind.
            verdict = self.verdicts.get(version - 1)
            if version and (verdict is None or not verdict.ok):
                raise Broken(f"a shard is at version {version} with the verdict {verdict}")
            if not step - 1 <= version <= step:
                raise Broken(f"a shard is at version {version}, the lead at {step}")
            index = shard.machine.index
            if shard.params[version % 2] != reference.params[version][index]:
                raise Broken(
                    f"shard {index}, version {version}: {shard.params[version % 2]}, "
                    f"expected {reference.params[version][index]}"
                )
            if len(shard.applied) != reference.applied[version]:
                raise Broken(f"shard {index} has applied {sorted(shard.applied)}")
        self.check_ledger(step)

    def check_ledger(self, step: int) -> None:
        ledger, reference = self.rounds.ledger, self.reference
        if ledger.samples != reference.samples[step]:
            raise Broken(f"{ledger}: expected samples {reference.samples[step]}")
        applied = reference.applied[step]
        if ledger.applied != applied or ledger.staleness.get(0, 0) != applied:
            raise Broken(f"{ledger}: expected {applied} applied")
        refused = self.verdicts.get(step)
        rejected = 0 if refused is None else len(refused.members)
        if (ledger.rejected, ledger.late, ledger.replayed) != (rejected, 0, 0):
            raise Broken(f"{ledger}: expected {rejected} rejected")
        if applied + ledger.duplicates + len(self.rounds.arrived) != self.told:
            raise Broken(f"{ledger}: expected an account of {self.told} gradients")

    def check_success(self) -> None:
        total, reference = len(self.reference.members), self.reference
        found = [shard.machine.version for shard in self.shards]
        if found != [total] * len(found):
            raise Broken(f"versions {found} at the end, expected {total}")
        if [record["loss"] for record in self.job.history] != reference.losses:
            raise Broken(f"the losses of {self.job.history}, expected {reference.losses}")
        if self.job.ledger["samples"] != reference.samples[total]:
            raise Broken(f"{self.job.ledger}: expected {reference.samples[total]}")
        if self.settings.steps is None and set(reference.samples[total]) != {self.settings.rows}:
            raise Broken(f"{reference.samples[total]} samples of {self.settings.rows} rows")

    def steps_done(self) -> int:
        return self.rounds.step


# -- asynchronous ------------------------------------------------------------------------------


@dataclass
class AsyncShard:
    """Each gradient is added as it arrives: a whole number, so that the sum is exact."""

    index: int
    value: int = 0
    version: int = 0
    #: replica -> the number of its last gradient
    last: dict[int, int] = field(default_factory=dict)
    applied: set[Batch] = field(default_factory=set)


@dataclass
class AsyncHost(Host):
    #: replica -> the number of its next request
    requests: dict[int, int] = field(default_factory=dict)
    #: (replica, shard) -> version pulled
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    #: replica -> its next batch, as the lead's shard said
    following: dict[int, Batch | None] = field(default_factory=dict)
    #: replicas that train in this epoch
    busy: set[int] = field(default_factory=set)


class AsyncWorld(World):
    """A Cursor and a ledger at the lead, and replicas that each go at their own pace."""

    def build(self) -> None:
        s = self.settings
        self.cursor = s.machines.cursor(self.plan, self.job.generation)
        self.ledger, self.totals = Ledger(), Totals()
        self.shards = [AsyncShard(index) for index in range(s.shards)]
        self.numbers = [self.rng.randrange(1 << 40) for _ in range(s.rows)]
        self.pace = {i: self.rng.choice([1, 1, 1, 6]) for i in range(s.replicas)}
        self.hosts = {
            a: AsyncHost(h.plan, requests=dict.fromkeys(h.plan.replicas, 0))
            for a, h in self.hosts.items()
        }
        #: batch -> the request that it answered
        self.handed: dict[Batch, tuple[int, int]] = {}
        self.committed: set[Batch] = set()
        #: barriers that were looked at
        self.passed: set[tuple[int, str]] = set()
        self.poison: Batch | None = None
        if s.fate == "poison":
            part = self.rng.randrange(s.replicas)
            epochs = s.epochs if s.steps is None else 1
            epoch = self.rng.randrange(epochs)
            self.poison = Batch(epoch, part, 0)

    def grad(self, batch: Batch, shard: int) -> int:
        return (shard + 1) * sum(self.numbers[row] for row in self.rows(batch))

    # -- a host's loop -------------------------------------------------------------------------

    def begin(self, host: AsyncHost) -> None:
        address = host.plan.address
        if not host.plan.replicas:
            self.barrier(host, host.epoch, "evaluated", {})
        host.busy = set(host.plan.replicas)
        for replica in host.plan.replicas:
            request = host.requests[replica]
            host.requests[replica] += 1
            take = Take(self.job.generation, replica, request, host.epoch)
            self.ask(address, self.chief, take, ("take", replica, request))

    def hear_given(self, host: AsyncHost, message: Arrives, repeat: bool) -> None:
        body: Given = message.body
        if self.answered(("take", body.replica, body.request)):
            self.turn(host, body.replica, body.batch)

    def turn(self, host: AsyncHost, replica: int, batch: Batch | None) -> None:
        if batch is not None:
            pace = self.rng.uniform(0.1, 1.5) * self.pace[replica]
            self.after(pace, Computed(host.plan.address, 0, replica, batch))
            return
        host.busy.discard(replica)
        if not host.busy:
            self.barrier(host, host.epoch, "trained", {})

    def on_computed(self, event: Computed) -> None:
        if self.gone(event.address):
            return
        host, replica, batch = self.hosts[event.address], event.replica, event.batch
        if batch == self.poison:
            self.fail(host, f"the gradient of replica {replica} is not finite ({batch})")
            return
        request = host.requests[replica]
        host.requests[replica] += 1
        samples = len(self.rows(batch))
        weight = samples / self.settings.batch_size
        part = Contribution(replica, weight, samples, 1.0, batch.part, batch.index)
        for shard in range(self.settings.shards):
            version = host.versions.get((replica, shard), 0)
            grad = self.grad(batch, shard)
            push = Push(replica, request, version, part, batch.epoch, grad)
            key = ("exchange", replica, request, shard)
            self.ask(event.address, self.at_shard[shard], Exchange(shard, push, batch), key)

    def hear_exchanged(self, host: AsyncHost, message: Arrives, repeat: bool) -> None:
        body: Exchanged = message.body
        if not self.answered(("exchange", body.replica, body.request, body.shard)):
            return
        replica, request = body.replica, body.request
        host.versions[replica, body.shard] = body.version
        if body.shard == 0:
            host.following[replica] = body.batch
        keys = {("exchange", replica, request, shard) for shard in range(self.settings.shards)}
        if not keys & self.open:
            self.turn(host, replica, host.following.pop(replica))

    def account(self) -> dict[str, Any]:
        totals, self.totals = self.totals, Totals()
        last = self.cursor.epoch + 1 >= self.settings.epochs
        if self.settings.steps is not None:
            last = self.cursor.handed >= self.settings.steps
        return {"train": asdict(totals), "ledger": self.ledger.to_dict(), "last": last}

    # -- shards and the lead -------------------------------------------------------------------

    def hear_exchange(self, host: Host, message: Arrives, repeat: bool) -> None:
        body: Exchange = message.body
        shard, push = self.shards[body.shard], body.push
        age = shard.version - push.version
        if shard.last.get(push.replica, -1) < push.request:
            shard.last[push.replica] = push.request
            if body.batch in shard.applied:
                raise Broken(f"{body.batch} was applied twice at shard {shard.index}")
            shard.applied.add(body.batch)
            shard.value += push.grads
            shard.version += 1
        following = None
        if body.shard == 0:
            if not self.commit(body.batch, push, age, repeat):
                return
            generation = self.job.generation
            take = Take(generation, push.replica, push.request, push.epoch)
            found = self.take(take, repeat)
            if found is None:
                return
            following = found[0]
        answer = Exchanged(shard.index, push.replica, push.request, shard.version, following)
        key = ("exchanged", push.replica, push.request, shard.index)
        self.send(host.plan.address, message.sender, answer, key)

    def commit(self, batch: Batch, push: Push, age: int, repeat: bool) -> bool:
        if batch in self.committed:
            self.ledger.duplicates += 1
            return True
        c = push.contribution
        self.ledger.commit(batch.epoch, c.samples, age)
        self.totals.loss += c.loss * c.weight
        self.totals.weight += c.weight
        self.totals.samples += c.samples
        self.committed.add(batch)
        return True

    def hear_take(self, host: Host, message: Arrives, repeat: bool) -> None:
        take: Take = message.body
        found = self.take(take, repeat)
        if found is not None:
            answer = Given(take.replica, take.request, found[0])
            key = ("given", take.replica, take.request)
            self.send(self.chief, message.sender, answer, key)

    def take(self, take: Take, repeat: bool) -> list[Batch | None] | None:
        """The cursor's answer; a batch goes to one request alone, and no epoch begins early."""
        found = self.tell(self.cursor, take, repeat)
        batch = found[0] if found else None
        if batch is None:
            return found
        asked = (take.replica, take.request)
        if batch not in self.handed:
            if asked in self.handed.values():
                raise Broken(f"request {asked} was answered twice, now with {batch}")
            self.handed[batch] = asked
            self.story.counts["stolen"] += batch.part != take.replica
            before = {b for b in self.handed if b.epoch < batch.epoch}
            if not all(before <= shard.applied for shard in self.shards):
                raise Broken(f"{batch} was handed out before the epoch before it had ended")
            if batch.epoch and (batch.epoch - 1, "evaluated") not in self.job.settled:
                raise Broken(f"{batch} was handed out before the barrier")
        elif self.handed[batch] != asked:
            raise Broken(f"{batch} was handed to {self.handed[batch]}, and now to {asked}")
        return found

    # -- the rules -----------------------------------------------------------------------------

    def check(self) -> None:
        if self.job is None:
            return
        handed = set(self.handed)
        for shard in self.shards:
            if not shard.applied <= handed or shard.version != len(shard.applied):
                raise Broken(f"shard {shard.index}: {shard.version} of {sorted(map(repr, handed))}")
        for epoch, phase in set(self.job.settled) - self.passed:
            self.passed.add((epoch, phase))
            mine = {batch for batch in handed if batch.epoch == epoch}
            if self.cursor.left or not all(mine <= shard.applied for shard in self.shards):
                raise Broken(f"the end of epoch {epoch} ({phase}) was settled before it had ended")
        if self.committed != self.shards[0].applied:
            raise Broken("what the lead's shard has applied is not what was committed")
        samples = [0] * len(self.ledger.samples)
        for batch in self.committed:
            samples[batch.epoch] += self.plan.samples(batch.part, batch.index)
        if self.ledger.samples != samples:
            raise Broken(f"{self.ledger}: expected samples {samples}")
        if self.ledger.applied != len(self.committed):
            raise Broken(f"{self.ledger}: expected {len(self.committed)} applied")
        if sum(self.ledger.staleness.values()) != self.ledger.applied or any(
            age < 0 for age in self.ledger.staleness
        ):
            raise Broken(f"{self.ledger}: the ages")

    def check_success(self) -> None:
        s = self.settings
        per_epoch = Counter(batch.epoch for batch in self.committed)
        if s.steps is None:
            if self.ledger.samples != [s.rows] * s.epochs:
                raise Broken(f"{self.ledger}: expected {s.rows} samples in each epoch")
            if set(per_epoch.values()) != {self.plan.batches_per_epoch}:
                raise Broken(f"batches of each epoch: {per_epoch}")
        elif sum(per_epoch.values()) != s.steps:
            raise Broken(f"{sum(per_epoch.values())} batches, expected {s.steps}")
        for shard in self.shards:
            total = sum(self.grad(batch, shard.index) for batch in self.committed)
            if shard.applied != self.committed or shard.value != total:
                raise Broken(f"shard {shard.index} is {shard.value}, expected {total}")
        if self.job.ledger["samples"] != self.ledger.samples:
            raise Broken(f"the job's ledger is {self.job.ledger}, the lead's {self.ledger}")

    def expect(self) -> Iterable[tuple[str, str | None]]:
        if self.settings.fate == "poison" and self.poison not in self.handed:
            return [("SUCCEEDED", None)]  # the limit of steps came first
        return super().expect()

    def steps_done(self) -> int:
        return len(self.committed)


def run(seed: int, **fixed: Any) -> Story:
    """Simulate the job of a seed to its end; ``fixed`` settings are not drawn."""
    rng = random.Random(seed)
    settings = Settings.draw(rng, **fixed)
    return (SyncWorld if settings.mode == "sync" else AsyncWorld)(seed, settings, rng).run()
