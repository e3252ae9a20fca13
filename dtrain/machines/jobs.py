"""The life of a job: a table of states, one terminal state, and the reason for it.

The machine of one job lives in the master.  It launches hosts (workers with replicas, shards or
both), waits until all are ready, settles the barriers at the ends of epochs, and stops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.ledger import Ledger
from dtrain.messages import Failure


class State(StrEnum):
    QUEUED = "QUEUED"
    PREPARING = "PREPARING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


#: A terminal state has no way out.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREPARING, State.STOPPING}),
    State.PREPARING: frozenset({State.RUNNING, State.STOPPING}),
    State.RUNNING: frozenset({State.STOPPING}),
    State.STOPPING: frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
TERMINAL = frozenset(state for state, ways in TRANSITIONS.items() if not ways)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What one worker does for a job."""

    address: str
    name: str
    replicas: tuple[int, ...]
    shards: tuple[int, ...]

    def __str__(self) -> str:
        return f"worker {self.name} ({self.address})" if self.name else f"worker {self.address}"


# -- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched:
    """The hosts of the job are chosen; the first is the chief and has the lead shard."""

    hosts: tuple[HostPlan, ...]


@dataclass(frozen=True, slots=True)
class HostReady:
    """A host has all it needs; ``shared``: it can open the chief's shared memory."""

    generation: int
    address: str
    shared: bool = False


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
    address: str


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
    | Cancel
    | ClientGone
    | ClientBack
    | Tick
)

# -- commands -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    hosts: tuple[HostPlan, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Tell these hosts to leave their loops."""

    addresses: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class End:
    """The job is terminal: let go of what it held."""

    state: State


Command = Launch | Stop | End


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds."""

    prepare_deadline: float
    stop_grace: float
    client_lease: float


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
    """

    def __init__(
        self,
        id: str,
        limits: Limits,
        now: float,
        record: Callable[[list[dict[str, Any]]], dict[str, Any]],
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
        self.outcome: Outcome | None = None
        #: (epoch, phase) -> address -> payload, until all have reached it
        self.reached: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
        #: (epoch, phase) -> whether to stop; kept, so that a repeated call is answered
        self.settled: dict[tuple[int, str], bool] = {}
        self.history: list[dict[str, Any]] = []
        #: the account of gradients as of the last epoch's end
        self.ledger: dict[str, Any] | None = None
        #: when it entered its state, or failed after all while it stopped
        self.entered = now
        self.submitted = now
        self.epoch_began = now
        #: until when the client may come back; None while it is there, or needs not be
        self.lease: float | None = None
        #: (time, state, words)
        self.story: list[tuple[float, State, str]] = [(now, State.QUEUED, "submitted")]
        self._record = record

    # -- what others ask -------------------------------------------------------------------

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def ended(self) -> float | None:
        return self.entered if self.terminal else None

    def host(self, address: str) -> HostPlan:
        if address not in self._hosts:
            raise ProtocolError(f"job {self.id}: {address} is not one of its hosts")
        return self._hosts[address]

    @property
    def shared(self) -> bool:
        """Whether all hosts share a machine's memory."""
        return len(self.sharing) == len(self.hosts)

    def waiting(self) -> list[HostPlan]:
        """The hosts that the present state waits for."""
        if self.state is State.PREPARING:
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
        self.story.append((now, state, words))

    def _launched(self, event: Launched, now: float) -> list[Command]:
        if self.state is not State.QUEUED:
            raise ProtocolError(f"job {self.id}: launched while {self.state}")
        self.hosts = event.hosts
        self._hosts = {h.address: h for h in event.hosts}
        self._training = sum(bool(h.replicas) for h in event.hosts)
        self._enter(State.PREPARING, now, f"on {len(event.hosts)} workers")
        return [Launch(event.hosts)]

    def _host_ready(self, event: HostReady, now: float) -> list[Command]:
        self.host(event.address)
        self.ready.add(event.address)
        if event.shared:
            self.sharing.add(event.address)
        if self.state is State.PREPARING and len(self.ready) == len(self.hosts):
            self._enter(State.RUNNING, now, "all workers are ready")
            self.epoch_began = now
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
        last = False
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
        self.settled[key] = last
        if last:
            self.outcome = Outcome(State.SUCCEEDED)
            self._enter(State.STOPPING, now, f"trained for {len(self.history)} epochs")
        return []

    def _host_failed(self, event: HostFailed, now: float) -> list[Command]:
        self.host(event.address)
        return self._fail(event.failure, now)

    def _host_done(self, event: HostDone, now: float) -> list[Command]:
        host = self.host(event.address)
        self.done.add(event.address)
        commands: list[Command] = []
        if self.outcome is None:
            failure = Failure("CONTROLLER", f"the task of {host} returned before its job had ended")
            commands = self._fail(failure, now)
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
        commands: list[Command] = []
        if self.outcome is None or (self.outcome.state is State.SUCCEEDED and chief):
            work = f"replicas {list(host.replicas)} and shards {list(host.shards)}"
            failure = Failure("WORKERS_LOST", f"{host} is gone; it had {work}")
            self.outcome = None
            commands = self._fail(failure, now)
        return commands + self._finish_if_done(now)

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
        if self.state is State.PREPARING and spent >= self.limits.prepare_deadline:
            names = ", ".join(str(h) for h in self.waiting())
            words = (
                f"after {spent:.0f} s these workers are not ready: {names}; "
                f"are their threads busy with other tasks?"
            )
            return self._fail(Failure("DEADLINE", words), now)
        if self.state is not State.STOPPING or spent < self.limits.stop_grace:
            return []
        assert self.outcome is not None
        if self.outcome.state is State.SUCCEEDED and self.hosts[0].address not in self.done:
            # The chief may still be writing the result; it is bounded by its own deadlines.
            return []
        return self._end(now, late=self.waiting())

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
        return [Stop(left, why)]

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
    Cancel: JobMachine._cancel,
    ClientGone: JobMachine._client_gone,
    ClientBack: JobMachine._client_back,
    Tick: JobMachine._tick,
}
