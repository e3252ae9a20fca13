"""The life of a job: a table of states, one terminal state, and the reason for it.

The machine of one job lives in the master.  It launches hosts (workers with replicas, shards or
both), waits until all are ready, settles the barriers at the ends of epochs, and stops.

Whenever the hosts change, by a death or by somebody's wish, a new *generation* begins: those
that are left of the old one are told to leave, hosts are chosen anew, the chief finds the last
committed version, and training goes on from there.  What an old generation still says is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.ledger import Ledger
from dtrain.messages import Batch, Failure

#: So much of a job's story is kept: its beginning, and the latest.
_STORY = 1000

#: How often one batch may have been in user code when its worker died.
POISON = 3


class State(StrEnum):
    QUEUED = "QUEUED"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


#: A terminal state has no way out.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREPARING, State.STOPPING}),
    State.PREPARING: frozenset({State.RUNNING, State.RECOVERING, State.STOPPING}),
    State.RUNNING: frozenset({State.RECOVERING, State.STOPPING}),
    State.RECOVERING: frozenset({State.RUNNING, State.STOPPING}),
    # Back, if the chief dies before it has handed over the result.
    State.STOPPING: frozenset({State.RECOVERING, State.SUCCEEDED, State.FAILED, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
TERMINAL = frozenset(state for state, ways in TRANSITIONS.items() if not ways)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What one worker does for a job; its shards are placed once the chief knows the model."""

    address: str
    name: str
    replicas: tuple[int, ...]
    shards: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"worker {self.name} ({self.address})" if self.name else f"worker {self.address}"


def with_shards(hosts: Sequence[HostPlan], where: Sequence[int]) -> tuple[HostPlan, ...]:
    """The hosts with the shards that are placed on them: shard -> index of its host."""
    own: list[list[int]] = [[] for _ in hosts]
    for shard, host in enumerate(where):
        own[host].append(shard)
    return tuple(
        replace(host, shards=tuple(shards)) for host, shards in zip(hosts, own, strict=True)
    )


def lead_shard(hosts: Sequence[HostPlan]) -> int:
    """The first shard of the chief: beside it are the verdicts, or the cursor."""
    return min(hosts[0].shards)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a chief begins its generation with.

    ``source`` says where it was found: ``"memory"`` (the last committed version, nothing lost),
    ``"checkpoint"`` (with the history and the ledger of then), or ``"start"`` (the initial
    values).  ``lost``: steps that had been committed, and are not in it.  ``suspects`` are the
    batches that were in user code when their workers died.
    """

    step: int
    source: str
    history: tuple[dict[str, Any], ...] = ()
    ledger: dict[str, Any] | None = None
    lost: int = 0
    suspects: tuple[Batch, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the generation before this one has left its state.

    ``meeting`` is where its shared memory is, opaque here; None: in the memory of ``hosts``.
    ``dead`` are the replicas of the worker whose death has ended it.
    """

    generation: int
    hosts: tuple[HostPlan, ...]
    meeting: Any = None
    dead: tuple[int, ...] = ()


# -- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched:
    """The hosts of a generation are chosen; the first is the chief, and will have shards."""

    hosts: tuple[HostPlan, ...]


@dataclass(frozen=True, slots=True)
class HostReady:
    """A host has all it needs; ``shared``: it can open the chief's shared memory.

    The chief says with it what it has begun with, where its shared memory is, and which host
    (its index) has each shard.
    """

    generation: int
    address: str
    shared: bool = False
    restored: Restored | None = None
    meeting: Any = None
    placed: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """A host has reached a barrier; ``payload`` is what it adds to the epoch's record."""

    generation: int
    address: str
    epoch: int
    phase: str
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostFailed:
    generation: int
    address: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class HostDone:
    """The task of a host has returned."""

    generation: int
    address: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker has died, or was fenced because it does not run any more."""

    address: str
    why: str = "is gone"


@dataclass(frozen=True, slots=True)
class Change:
    """Others are to do the work: a worker has joined, or is about to leave."""

    why: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Something to be remembered of a job, in words; ``saved``: the step of a checkpoint."""

    generation: int
    words: str
    saved: int | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    why: str


@dataclass(frozen=True, slots=True)
class ClientGone:
    pass


@dataclass(frozen=True, slots=True)
class ClientBack:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Launched
    | HostReady
    | Reached
    | HostFailed
    | HostDone
    | WorkerLost
    | Change
    | Noted
    | Cancel
    | ClientGone
    | ClientBack
    | Tick
)

# -- commands -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Choose hosts among the workers that are ready, as soon as there are enough of them."""


@dataclass(frozen=True, slots=True)
class Launch:
    hosts: tuple[HostPlan, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell these hosts of a generation to leave their loops; ``over``: the job has ended."""

    addresses: tuple[str, ...]
    generation: int
    why: str
    over: bool


@dataclass(frozen=True, slots=True)
class End:
    """The job is terminal: let go of what it held."""

    state: State


Command = Place | Launch | Stop | End


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds."""

    prepare_deadline: float
    stop_grace: float
    client_lease: float
    #: workers that may be lost
    max_losses: int = 10
    #: workers without which nothing goes on
    min_workers: int = 1
    #: how long too few workers are waited for
    recovery_deadline: float = 600.0


@dataclass
class Outcome:
    """What a stopping job will have become."""

    state: State
    failure: Failure | None = None


class JobMachine:
    """One job.

    Parameters
    ----------
    id : str
    limits : Limits
    record : callable
        Makes the epoch's record (a dict of plain values) of the payloads of all hosts that
        have replicas, in the order of the hosts; pure.
    enough : callable
        Why the job is to end after these records, in words; None: it is not.  Pure.
    """

    def __init__(
        self,
        id: str,
        limits: Limits,
        now: float,
        record: Callable[[list[dict[str, Any]]], dict[str, Any]],
        enough: Callable[[list[dict[str, Any]]], str | None] = lambda history: None,
    ) -> None:
        self.id = id
        self.limits = limits
        self.state = State.QUEUED
        self.generation = 1
        self.hosts: tuple[HostPlan, ...] = ()
        self._hosts: dict[str, HostPlan] = {}
        #: how many hosts have replicas
        self._training = 0
        self.ready: set[str] = set()
        #: the hosts that can open the chief's shared memory
        self.sharing: set[str] = set()
        self.done: set[str] = set()
        self.lost: list[str] = []
        #: the workers lost, of all generations
        self.losses = 0
        #: where the newest generation that has opened keeps its state
        self.origin: Origin | None = None
        #: its chief's shared memory, until all hosts are ready
        self._meeting: Any = None
        self.restored: Restored | None = None
        #: batch -> how often it was in user code when its worker died
        self.deaths: Counter[Batch] = Counter()
        #: batch -> the generation whose end it was last blamed for
        self._suspected: dict[Batch, int] = {}
        self.outcome: Outcome | None = None
        #: (epoch, phase) -> address -> payload, until all have reached it
        self.reached: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
        #: (epoch, phase) -> whether to stop; kept for the generation, so that a repeated call is
        #: answered
        self.settled: dict[tuple[int, str], bool] = {}
        self.history: list[dict[str, Any]] = []
        #: the account of gradients as of the last epoch's end
        self.ledger: dict[str, Any] | None = None
        #: the step of the last checkpoint that was committed
        self.saved: int | None = None
        #: when it entered its state, or failed after all while it stopped
        self.entered = now
        self.submitted = now
        self.epoch_began = now
        #: until when the client may come back; None while it is there, or needs not be
        self.lease: float | None = None
        #: (time, state, words)
        self.story: list[tuple[float, State, str]] = [(now, State.QUEUED, "submitted")]
        self._record = record
        self._enough = enough

    # -- what others ask -------------------------------------------------------------------

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def ended(self) -> float | None:
        return self.entered if self.terminal else None

    @property
    def placing(self) -> bool:
        """Whether it waits for workers to go on with."""
        return self.state is State.RECOVERING and not self.hosts

    def host(self, address: str) -> HostPlan:
        if address not in self._hosts:
            raise ProtocolError(f"job {self.id}: {address} is not one of its hosts")
        return self._hosts[address]

    @property
    def shared(self) -> bool:
        """Whether all hosts share a machine's memory."""
        return bool(self.hosts) and len(self.sharing) == len(self.hosts)

    def waiting(self) -> list[HostPlan]:
        """The hosts that the present state waits for."""
        if self.state in (State.PREPARING, State.RECOVERING):
            return [h for h in self.hosts if h.address not in self.ready]
        if self.state is State.STOPPING:
            return [h for h in self.hosts if h.address not in self.done]
        return []

    # -- the only mutator ------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        generation = getattr(event, "generation", self.generation)
        if generation != self.generation:
            raise FencedError(
                f"job {self.id}: {type(event).__name__} of generation {generation}, "
                f"expected {self.generation}"
            )
        if self.terminal:
            return []
        return _HANDLERS[type(event)](self, event, now)

    def _enter(self, state: State, now: float, words: str) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ProtocolError(f"job {self.id}: {self.state} does not lead to {state} ({words})")
        self.state, self.entered = state, now
        self._tell(now, words)

    def _tell(self, now: float, words: str) -> None:
        self.story.append((now, self.state, words))
        if len(self.story) > _STORY:
            del self.story[1]  # a year of checkpoints is a long story

    def _launched(self, event: Launched, now: float) -> list[Command]:
        if self.state is not State.QUEUED and not self.placing:
            raise ProtocolError(f"job {self.id}: launched while {self.state}")
        self._choose(event.hosts)
        self._training = sum(bool(h.replicas) for h in event.hosts)
        if self.state is State.QUEUED:
            self._enter(State.PREPARING, now, f"on {len(event.hosts)} workers")
        else:
            self.entered = now
            self._tell(now, f"generation {self.generation} on {len(event.hosts)} workers")
        return [Launch(event.hosts)]

    def _choose(self, hosts: tuple[HostPlan, ...]) -> None:
        self.hosts = hosts
        self._hosts = {h.address: h for h in hosts}

    def _host_ready(self, event: HostReady, now: float) -> list[Command]:
        host = self.host(event.address)
        self.ready.add(event.address)
        if event.shared:
            self.sharing.add(event.address)
        chief = self.hosts[0].address == host.address
        if chief and event.restored is not None and self.restored is None:
            commands = self._found(event.restored, now)
            self._meeting = event.meeting
            if event.placed is not None:
                self._choose(with_shards(self.hosts, event.placed))
            if commands:
                return commands
        waits = self.state in (State.PREPARING, State.RECOVERING)
        if not waits or len(self.ready) < len(self.hosts):
            return []
        if self.state is State.PREPARING:
            self.epoch_began = now
        self._enter(State.RUNNING, now, "all workers are ready")
        return []

    def _opened(self) -> None:
        """All hosts have their memory: from here on the state of the job is there, not before."""
        if self.restored is not None:
            if self.restored.source != "memory":
                # What was recorded since is not true any more.
                self.history = list(self.restored.history)
                self.ledger = None
            # What the next generation adds to: this one's own account begins with it.
            self.ledger = self.restored.ledger or self.ledger
        self.origin = Origin(self.generation, self.hosts, self._meeting if self.shared else None)

    def _found(self, restored: Restored, now: float) -> list[Command]:
        """The chief has found the state to go on with."""
        self.restored = restored
        if self.generation > 1 or restored.step:
            lost = f", {restored.lost} steps are lost" if restored.lost else ""
            self._tell(now, f"goes on from step {restored.step}, from {restored.source}{lost}")
        for batch in restored.suspects:
            # The next generation may find the same suspects again, if this one comes to nothing.
            assert self.origin is not None
            if self._suspected.get(batch) == self.origin.generation:
                continue
            self._suspected[batch] = self.origin.generation
            self.deaths[batch] += 1
            if self.deaths[batch] >= POISON:
                words = (
                    f"batch {batch.index} of partition {batch.part} in epoch {batch.epoch + 1} "
                    f"has killed its worker {POISON} times"
                )
                return self._fail(Failure("DATA_ERROR", words), now)
        return []

    def _reached(self, event: Reached, now: float) -> list[Command]:
        host = self.host(event.address)
        key = (event.epoch, event.phase)
        if key in self.settled or self.state is not State.RUNNING:
            return []
        # All hosts open together; only those with replicas have a part in an epoch.
        everyone = event.phase == "opened"
        if not host.replicas and not everyone:
            raise ProtocolError(f"job {self.id}: {host} has no replicas and no part in an epoch")
        self.reached.setdefault(key, {})[event.address] = event.payload
        payloads = self.reached[key]
        if len(payloads) < (len(self.hosts) if everyone else self._training):
            return []
        del self.reached[key]
        if everyone:
            self._opened()
        # "finished": a new generation that finds nothing left to do.
        last, why = event.phase == "finished", None
        if event.phase == "evaluated":
            ordered = [payloads[h.address] for h in self.hosts if h.address in payloads]
            record = self._record(ordered)
            seconds = max(now - self.epoch_began, 1e-9)
            record["seconds"] = seconds
            record["samples_per_s"] = record["samples"] / seconds
            self.history.append(record)
            accounts = [p["ledger"] for p in ordered if p.get("ledger") is not None]
            self.ledger = Ledger.total(accounts).to_dict()
            self.epoch_began = now
            last = any(payload.get("last") for payload in ordered)
            if not record["samples"] and self.ledger["rejected"]:
                words = (
                    f"every step of epoch {event.epoch + 1} was passed over: no loss or gradient "
                    f"of it was finite"
                )
                return self._fail(Failure("NON_FINITE", words), now)
        if event.phase in ("evaluated", "finished"):
            why = self._enough(self.history)
        self.settled[key] = last or why is not None
        if self.settled[key]:
            self._succeed(now, why)
        return []

    def _succeed(self, now: float, why: str | None) -> None:
        self.outcome = Outcome(State.SUCCEEDED)
        words = f"trained for {len(self.history)} epochs"
        self._enter(State.STOPPING, now, words if why is None else f"{words}: {why}")

    def _host_failed(self, event: HostFailed, now: float) -> list[Command]:
        host = self.host(event.address)
        if event.failure.reason == "WORKERS_LOST" and self.outcome is None:
            # It cannot reach another, which nobody else has missed yet.
            return self._lose(f"{host}: {event.failure.message}", now)
        return self._fail(event.failure, now)

    def _host_done(self, event: HostDone, now: float) -> list[Command]:
        host = self.host(event.address)
        self.done.add(event.address)
        commands: list[Command] = []
        if self.outcome is None:
            return self._lose(f"the task of {host} returned before its job had ended", now)
        return commands + self._finish_if_done(now)

    def _worker_lost(self, event: WorkerLost, now: float) -> list[Command]:
        if event.address not in self._hosts or event.address in self.lost:
            return []
        host = self.host(event.address)
        self.lost.append(event.address)
        # The chief holds the result, also once its task is done.
        chief = self.hosts[0].address == event.address
        if event.address in self.done and not chief:
            return []
        self.done.add(event.address)
        succeeding = self.outcome is not None and self.outcome.state is State.SUCCEEDED
        if self.outcome is not None and not (succeeding and chief):
            return self._finish_if_done(now)
        work = f"replicas {list(host.replicas)} and shards {list(host.shards)}"
        if self.origin is not None and self.origin.generation == self.generation:
            self.origin = replace(self.origin, dead=host.replicas)
        return self._lose(f"{host} {event.why}; it had {work}", now)

    def _lose(self, words: str, now: float) -> list[Command]:
        self.losses += 1
        if self.losses > self.limits.max_losses:
            self.outcome = None
            words += f"; that is loss {self.losses}, expected at most {self.limits.max_losses}"
            commands = self._fail(Failure("WORKERS_LOST", words), now)
            return commands or self._finish_if_done(now)
        return self._recover(words, now)

    def _change(self, event: Change, now: float) -> list[Command]:
        if self.outcome is not None or self.state is State.QUEUED:
            return []
        if self.placing:
            # Nobody does the work yet; the deadline goes on.
            return [Place()]
        return self._recover(event.why, now)

    def _recover(self, why: str, now: float) -> list[Command]:
        """A new generation: the old one is told to leave, and hosts are chosen anew."""
        left = tuple(h.address for h in self.hosts if h.address not in self.done)
        commands: list[Command] = []
        if left:
            commands.append(Stop(left, self.generation, why, over=False))
        self.generation += 1
        self.outcome = None
        self.hosts, self._hosts, self._training = (), {}, 0
        self.ready, self.sharing, self.done = set(), set(), set()
        self.reached, self.settled, self.lost = {}, {}, []
        self.restored = self._meeting = None
        if self.state is State.RECOVERING:
            self.entered = now
            self._tell(now, why)
        else:
            self._enter(State.RECOVERING, now, why)
        return [*commands, Place()]

    def _noted(self, event: Noted, now: float) -> list[Command]:
        self._tell(now, event.words)
        if event.saved is not None:
            self.saved = event.saved
        return []

    def _cancel(self, event: Cancel, now: float) -> list[Command]:
        if self.outcome is not None:
            return []
        return self._stop(Outcome(State.CANCELLED, Failure("CANCELLED", event.why)), now)

    def _client_gone(self, event: ClientGone, now: float) -> list[Command]:
        self.lease = now + self.limits.client_lease
        return []

    def _client_back(self, event: ClientBack, now: float) -> list[Command]:
        self.lease = None
        return []

    def _tick(self, event: Tick, now: float) -> list[Command]:
        if self.lease is not None and now >= self.lease and self.outcome is None:
            return self._cancel(Cancel("its client went away"), now)
        spent = now - self.entered
        if self.placing:
            return self._placing(now, spent)
        waits = self.state in (State.PREPARING, State.RECOVERING)
        if waits and spent >= self.limits.prepare_deadline:
            names = ", ".join(str(h) for h in self.waiting())
            words = (
                f"after {spent:.0f} s these workers are not ready: {names}; "
                f"are their threads busy with other tasks?"
            )
            return self._fail(Failure("DEADLINE", words), now)
        if self.state is not State.STOPPING or spent < self.limits.stop_grace:
            return []
        assert self.outcome is not None
        succeeds = self.outcome.state is State.SUCCEEDED
        if succeeds and self.hosts[0].address not in self.done:
            # The chief may still be writing the result; it is bounded by its own deadlines.
            return []
        return self._end(now, late=self.waiting())

    def _placing(self, now: float, spent: float) -> list[Command]:
        if spent < self.limits.recovery_deadline:
            return [Place()]
        words = (
            f"after {spent:.0f} s there are fewer than {self.limits.min_workers} workers that can "
            f"go on; {self.story[-1][2]}"
        )
        return self._fail(Failure("WORKERS_LOST", words), now)

    # -- ends ------------------------------------------------------------------------------

    def _fail(self, failure: Failure, now: float) -> list[Command]:
        if self.outcome is not None and self.outcome.state is not State.SUCCEEDED:
            return []
        return self._stop(Outcome(State.FAILED, failure), now)

    def _stop(self, outcome: Outcome, now: float) -> list[Command]:
        self.outcome = outcome
        why = outcome.failure.message if outcome.failure else ""
        if self.state is not State.STOPPING:
            self._enter(State.STOPPING, now, why)
        else:
            # It was about to succeed: the grace time begins now that the hosts are told.
            self.entered = now
        left = tuple(h.address for h in self.hosts if h.address not in self.done)
        if not left:
            return self._end(now)
        return [Stop(left, self.generation, why, over=True)]

    def _finish_if_done(self, now: float) -> list[Command]:
        over = self.state is State.STOPPING and len(self.done) >= len(self.hosts)
        return self._end(now) if over else []

    def _end(self, now: float, late: list[HostPlan] | None = None) -> list[Command]:
        assert self.outcome is not None
        words = self.outcome.failure.message if self.outcome.failure else "done"
        if late:
            words += f"; still in user code: {', '.join(str(h) for h in late)}"
        self._enter(self.outcome.state, now, words)
        return [End(self.state)]


_HANDLERS: dict[type, Callable[[JobMachine, Any, float], list[Command]]] = {
    Launched: JobMachine._launched,
    HostReady: JobMachine._host_ready,
    Reached: JobMachine._reached,
    HostFailed: JobMachine._host_failed,
    HostDone: JobMachine._host_done,
    WorkerLost: JobMachine._worker_lost,
    Change: JobMachine._change,
    Noted: JobMachine._noted,
    Cancel: JobMachine._cancel,
    ClientGone: JobMachine._client_gone,
    ClientBack: JobMachine._client_back,
    Tick: JobMachine._tick,
}
