"""The life of a session as a table: what each event does in each state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.container.words import (
    TRANSITIONS,
    Answer,
    Attach,
    Beat,
    Command,
    Create,
    Created,
    Drop,
    Event,
    Failed,
    Gone,
    Initialise,
    Late,
    Leaving,
    Limits,
    Lost,
    Move,
    Moved,
    NotMoved,
    NotRestored,
    Over,
    Placed,
    Ready,
    Refused,
    Reload,
    Reply,
    Request,
    Reset,
    Restore,
    Restored,
    Saved,
    State,
    Tell,
    Tick,
    WorkerLost,
)
from dtrain.machines.departed import Departed

#: So much of a session's story is kept: its beginning, and the latest.
_STORY = 1000

#: How often a move is tried while all that it moves is still there.
_TRIES = 3


@dataclass
class _Under:
    """A move that is under way: from where, to where, and which try it is."""

    former: int
    hosts: tuple[str, ...]
    target: tuple[str, ...] = ()
    tries: int = 1


class Container:
    """The session of one name.

    Parameters
    ----------
    name : str
    limits : Limits
    now : float
    generation : int
        Greater than all that were ever told of this name.
    """

    def __init__(self, name: str, limits: Limits, now: float, generation: int = 1) -> None:
        self.name = name
        self.limits = limits
        self.state = State.EMPTY
        self.generation = generation
        #: the generation in which the variables were created; None: there are none yet
        self.origin: int | None = None
        #: what is being created, or was
        self.spec: str | None = None
        #: who initialises the variables, or has
        self.chief: str | None = None
        #: shard -> its worker
        self.hosts: tuple[str, ...] = ()
        #: the newest checkpoint, and its step
        self.saved: tuple[Any, int] | None = None
        #: why the variables are lost, in words
        self.problem = ""
        #: client -> when it was last heard of; those that have the variables, or wait for them
        self.heard: dict[str, float] = {}
        self.attached: set[str] = set()
        #: who waits, in order; the chief, while it initialises, is the first
        self._waiting: dict[str, Request] = {}
        #: client -> its last request that was answered, and how
        self._answered: dict[str, tuple[int, Reply]] = {}
        self._gone = Departed()
        #: workers lost while shards are placed
        self._lost_workers: set[str] = set()
        #: workers that are about to leave
        self._leaving: set[str] = set()
        #: the move, while it is MOVING
        self._move: _Under | None = None
        #: since when nobody is there
        self._alone: float | None = now
        self.entered = now
        self.story: list[tuple[float, State, str]] = [(now, State.EMPTY, "named")]

    # -- what others ask -------------------------------------------------------------------

    @property
    def current(self) -> int | None:
        """What a reset must name: the origin of the variables, or the generation being created."""
        return self.generation if self.state is State.CREATING else self.origin

    @property
    def placed(self) -> tuple[str, ...]:
        """Shard -> the worker that has it, or is to have it once a move is done."""
        return self.hosts if self._move is None else self._move.target

    @property
    def idle(self) -> bool:
        """Nothing is there and nobody waits: it may be forgotten, all but its generation."""
        return self.state is State.EMPTY and not self._waiting

    @property
    def deadline(self) -> float | None:
        """When the next deadline is: a :class:`Tick` is due then."""
        dates = [wait.until for name, wait in self._waiting.items() if not self._initialises(name)]
        dates += [heard + self.limits.client_lease for heard in self.heard.values()]
        if self.state in (State.MOVING, State.RESTORING):
            dates.append(self.entered + self.limits.restore_deadline)
        elif self._alone is not None and self.state is not State.EMPTY:
            dates.append(self._alone + self.limits.time_to_live)
        return min(dates, default=None)

    def waiting(self) -> tuple[str, ...]:
        """The clients that wait, in their order, without the chief."""
        return tuple(name for name in self._waiting if not self._initialises(name))

    def _initialises(self, client: str) -> bool:
        return self.state is State.CREATING and client == self.chief

    # -- the only mutator ------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Answers to the event's sender and to others; what to place and what to let go of.

        Raises
        ------
        FencedError
            The sender is gone, or speaks of another generation.
        ProtocolError
            The event is illegal in this state.
        """
        client = getattr(event, "client", None)
        told = f"session {self.name}: {type(event).__name__}"
        if client in self._gone and not isinstance(event, Gone):
            raise FencedError(f"{told} of {client}, who is gone")
        found = getattr(event, "generation", self.generation)
        if found != self.generation:
            raise FencedError(f"{told} of generation {found}, expected {self.generation}")
        commands = self._repeated(event)
        if not commands:
            commands = self._superseded(event, now) + _HANDLERS[type(event)](self, event, now)
        for command in commands:
            if isinstance(command, Answer) and not isinstance(command.answer, Initialise):
                self._answered[command.client] = command.request, command.answer
        if client in self.heard:
            self.heard[client] = now
        if self.attached or self._waiting:
            self._alone = None
        elif self._alone is None:
            self._alone = now
        return commands

    def _repeated(self, event: Event) -> list[Command]:
        """What a request that was answered, and comes again, is answered."""
        if not isinstance(event, Request):
            return []
        request, answer = self._answered.get(event.client, (-1, None))
        if answer is None or event.request > request:
            return []
        if event.request < request:
            raise ProtocolError(
                f"session {self.name}: {type(event).__name__} {event.request} of {event.client}: "
                f"expected {request} once more, or {request + 1}"
            )
        if isinstance(answer, Ready):
            if answer.origin != self.origin:
                answer = Over(answer.origin, f"session {self.name}: these variables have ended")
            elif self.state is not State.READY:
                return []  # it waits for them once more, or hears that they are lost
            else:
                answer = self._ready()
        return [Answer(event.client, request, answer)]

    def _superseded(self, event: Event, now: float) -> list[Command]:
        """Who asks for something else does not wait any more, nor initialise."""
        if not isinstance(event, Request):
            return []
        before = self._waiting.get(event.client)
        if before is None or before == event:
            return []
        if event.request <= before.request:
            raise ProtocolError(
                f"session {self.name}: {event.client}: found {event}, expected {before} once more"
            )
        chief = self._initialises(event.client)
        self._forget(event.client)
        return self._depose(f"{event.client} has given up, and was the chief", now) if chief else []

    def _enter(self, state: State, now: float, words: str) -> None:
        if state not in TRANSITIONS[self.state]:
            raise ProtocolError(
                f"session {self.name}: {self.state} does not lead to {state} ({words})"
            )
        self.state, self.entered = state, now
        self._tell(now, words)

    def _tell(self, now: float, words: str) -> None:
        self.story.append((now, self.state, words))
        if len(self.story) > _STORY:
            del self.story[1]

    # -- those that come -------------------------------------------------------------------

    def _create(self, event: Create, now: float) -> list[Command]:
        if self.spec is not None and event.spec != self.spec:
            words = f"session {self.name}: found {event.spec}, expected {self.spec}, "
            words += f"which {self.chief} has created" if self.origin else f"{self.chief}'s"
            return [Answer(event.client, event.request, Refused(words))]
        if self._initialises(event.client) and self._waiting[event.client] == event:
            return [Answer(event.client, event.request, Initialise(self.generation))]
        return self._wait(event, now)

    def _attach(self, event: Attach, now: float) -> list[Command]:
        if event.origin is not None and event.origin != self.origin:
            words = f"session {self.name}: these variables have ended"
            return [Answer(event.client, event.request, Over(event.origin, words))]
        return self._wait(event, now)

    def _wait(self, event: Request, now: float) -> list[Command]:
        """The answer to a client, if there is one; else it waits."""
        self.heard[event.client] = now
        if self.state is State.READY:
            self.attached.add(event.client)
            return [Answer(event.client, event.request, self._ready())]
        if self.state is State.LOST:
            self.attached.add(event.client)
            return [Answer(event.client, event.request, Lost(self.problem))]
        self._waiting[event.client] = event
        commands = self._elect(now)
        if event.client in self.waiting() and event.until <= now:
            commands.append(self._late(event))
        return commands

    def _ready(self) -> Ready:
        assert self.origin is not None
        assert self.spec is not None
        assert self.chief is not None
        return Ready(self.origin, self.generation, self.hosts, self.spec, self.chief)

    def _late(self, event: Request) -> Answer:
        self._forget(event.client)
        words = {
            State.EMPTY: "nobody has created it",
            State.CREATING: f"{self.chief} is initialising it",
            State.MOVING: "its shards are moving to other workers",
            State.RESTORING: "the workers are restoring it",
        }[self.state]
        return Answer(event.client, event.request, Late(f"session {self.name}: {words}"))

    def _overdue(self, now: float) -> list[Command]:
        """Those whose deadline is over wait no longer."""
        waits = [self._waiting[client] for client in self.waiting()]
        return [self._late(wait) for wait in waits if wait.until <= now]

    def _forget(self, client: str) -> None:
        """Who does not wait any more, and may have been attached before."""
        del self._waiting[client]
        if client not in self.attached:
            self.heard.pop(client, None)

    # -- creation --------------------------------------------------------------------------

    def _elect(self, now: float) -> list[Command]:
        """The first that wants to create is the chief, if there is none."""
        if self.state is not State.EMPTY:
            return []
        first = next((w for w in self._waiting.values() if isinstance(w, Create)), None)
        if first is None:
            return []
        self.chief, self.spec = first.client, first.spec
        self._enter(State.CREATING, now, f"{self.chief} initialises generation {self.generation}")
        commands: list[Command] = [Answer(first.client, first.request, Initialise(self.generation))]
        # Those that have waited with another spec cannot have it any more.
        for wait in list(self._waiting.values()):
            if isinstance(wait, Create) and wait.spec != self.spec:
                self._forget(wait.client)
                words = f"session {self.name}: found {wait.spec}, expected {self.spec}, "
                words += f"{self.chief}'s"
                commands.append(Answer(wait.client, wait.request, Refused(words)))
        return commands

    def _depose(self, why: str, now: float) -> list[Command]:
        """The chief does not go on; the next one begins anew, in a generation of its own."""
        old, self.chief, self.spec = self.generation, None, None
        self.generation += 1
        self._lost_workers = set()
        self._enter(State.EMPTY, now, why)
        return [Drop(old), *self._elect(now)]

    def _created(self, event: Created, now: float) -> list[Command]:
        if self.state is State.READY and event.client == self.chief and event.hosts == self.hosts:
            return []
        self._check_chief(event)
        if not event.hosts:
            raise ProtocolError(f"session {self.name}: Created: found no shards")
        dead = sorted(self._lost_workers.intersection(event.hosts))
        if dead:
            # The same chief begins anew: it is still the first that waits.
            return self._depose(f"worker {dead[0]} is gone, and had shards", now)
        self.hosts, self.origin = event.hosts, self.generation
        self._enter(State.READY, now, f"initialised by {self.chief}")
        moving = self._leave_workers(now)
        # The chief has had no deadline so far.
        return moving + self._overdue(now) if moving else self._answer_all()

    def _failed(self, event: Failed, now: float) -> list[Command]:
        self._check_chief(event)
        # It knows; a late copy of its request does not make it the chief once more.
        request = self._waiting[event.client].request
        self._answered[event.client] = request, Refused(f"session {self.name}: {event.why}")
        self._forget(event.client)
        return self._depose(f"{event.client} cannot initialise it: {event.why}", now)

    def _check_chief(self, event: Created | Failed) -> None:
        if not self._initialises(event.client):
            raise ProtocolError(
                f"session {self.name}: {type(event).__name__} of {event.client}: "
                f"found it {self.state}, expected its chief {self.chief} while {State.CREATING}"
            )

    def _answer_all(self) -> list[Command]:
        """The variables are there, for all who have waited."""
        waits, self._waiting = list(self._waiting.values()), {}
        self.attached.update(wait.client for wait in waits)
        return [Answer(wait.client, wait.request, self._ready()) for wait in waits]

    # -- moves -----------------------------------------------------------------------------

    def _workers_leave(self, event: Leaving, now: float) -> list[Command]:
        if not event.leaving:
            self._leaving.difference_update(event.addresses)
            return []
        self._leaving.update(event.addresses)
        return self._leave_workers(now) if self.state is State.READY else []

    def _leave_workers(self, now: float) -> list[Command]:
        """Shards move away from those that are about to leave; nothing, if none is there."""
        leaving = sorted(self._leaving.intersection(self.hosts))
        if not leaving:
            return []
        self._move = _Under(self.generation, self.hosts)
        self._enter(State.MOVING, now, f"moves its shards away from {', '.join(leaving)}")
        return self._begin_move()

    def _begin_move(self) -> list[Command]:
        """A generation of its own for each try: what an old one still says is refused."""
        assert self._move is not None
        self.generation += 1
        self.hosts, self._lost_workers = (), set()
        move = self._move
        return [Move(self.generation, move.former, move.hosts, frozenset(self._leaving))]

    def _placed(self, event: Placed, now: float) -> list[Command]:
        self._check_moving(event).target = event.hosts
        return []

    def _moved(self, event: Moved, now: float) -> list[Command]:
        if self.state is State.READY:
            return []
        move = self._check_moving(event)
        if not move.target:
            raise ProtocolError(f"session {self.name}: Moved: found no place, expected Placed")
        dead = sorted(self._lost_workers.intersection(move.target))
        if dead:
            return self._move_again(f"worker {dead[0]} is gone, and had shards", now)
        self.hosts, self._move = move.target, None
        self._enter(State.READY, now, f"moved to {len(set(self.hosts))} workers")
        # What is let go of first is not in the way of the next move.
        drop = Drop(self.generation - 1)
        return [drop, *(self._leave_workers(now) or self._tell_all())]

    def _not_moved(self, event: NotMoved, now: float) -> list[Command]:
        self._check_moving(event)
        return self._move_again(event.why, now)

    def _move_again(self, why: str, now: float) -> list[Command]:
        """All that is to be moved is still there, and frozen: elsewhere it may go better."""
        assert self._move is not None
        if self._move.tries >= _TRIES:
            return self._fall(f"its shards cannot be moved: {why}", now)
        self._move.tries += 1
        self._move.target = ()
        self._tell(now, f"moves its shards once more: {why}")
        return self._begin_move()

    def _check_moving(self, event: Placed | Moved | NotMoved) -> _Under:
        if self._move is None:
            raise ProtocolError(
                f"session {self.name}: {type(event).__name__}: found it {self.state}, "
                f"expected {State.MOVING}"
            )
        return self._move

    # -- loss and restoration --------------------------------------------------------------

    def _saved(self, event: Saved, now: float) -> list[Command]:
        if self.state is not State.READY:
            raise ProtocolError(f"session {self.name}: Saved: found it {self.state}")
        self.saved = event.source, event.step
        self._tell(now, f"saved at step {event.step}")
        return []

    def _worker_lost(self, event: WorkerLost, now: float) -> list[Command]:
        self._leaving.discard(event.address)
        if self.state in (State.CREATING, State.RESTORING, State.MOVING):
            self._lost_workers.add(event.address)
        hosts = self.hosts
        if self._move is not None:
            hosts = self._move.hosts
            if event.address in self._move.target and event.address not in hosts:
                words = f"worker {event.address} {event.why}, and was to have shards"
                return self._move_again(words, now)
        elif self.state is not State.READY:
            return []
        shards = [k for k, host in enumerate(hosts) if host == event.address]
        if not shards:
            return []
        return self._fall(f"worker {event.address} {event.why}; it had shards {shards}", now)

    def _fall(self, words: str, now: float) -> list[Command]:
        """Shards are gone: back to the newest checkpoint, if there is one."""
        if self.saved is None:
            return self._lose(f"{words}, and there is no checkpoint", now)
        source, step = self.saved
        return self._reload(source, f"{words}; goes on from the checkpoint of step {step}", now)

    def _reload(self, source: Any, words: str, now: float) -> list[Command]:
        old = self.generation
        self.generation += 1
        self.hosts, self._lost_workers, self._move = (), set(), None
        self.saved = source, self.saved[1] if self.saved and self.saved[0] == source else 0
        if self.state is State.RESTORING:
            self._tell(now, words)
        else:
            self._enter(State.RESTORING, now, words)
        return [Drop(old), Reload(self.generation, source)]

    def _restore(self, event: Restore, now: float) -> list[Command]:
        if self.state is State.LOST:
            words = f"{event.client} restores it from {event.source}"
            commands = self._reload(event.source, words, now)
            return commands + self._wait(event, now)
        if self.saved is not None and self.saved[0] == event.source:
            # It came again, or somebody else was quicker.
            return self._wait(event, now)
        words = f"session {self.name}: found it {self.state}, expected variables that were lost"
        return [Answer(event.client, event.request, Refused(words))]

    def _restored(self, event: Restored, now: float) -> list[Command]:
        if self.state is State.READY and event.hosts == self.hosts:
            return []
        self._check_restoring(event)
        dead = sorted(self._lost_workers.intersection(event.hosts))
        if dead:
            assert self.saved is not None
            return self._reload(self.saved[0], f"worker {dead[0]} is gone, and had shards", now)
        self.hosts = event.hosts
        self._enter(State.READY, now, f"restored on {len(set(event.hosts))} workers")
        return self._leave_workers(now) or self._tell_all()

    def _tell_all(self) -> list[Command]:
        """Where the variables are now: for those that have them, and for all who have waited."""
        others = tuple(sorted(self.attached - set(self._waiting)))
        told: list[Command] = [Tell(others, self._ready())] if others else []
        return told + self._answer_all()

    def _not_restored(self, event: NotRestored, now: float) -> list[Command]:
        self._check_restoring(event)
        return self._lose(f"it cannot be restored: {event.why}", now)

    def _check_restoring(self, event: Restored | NotRestored) -> None:
        if self.state is not State.RESTORING:
            raise ProtocolError(
                f"session {self.name}: {type(event).__name__}: found it {self.state}, "
                f"expected {State.RESTORING}"
            )

    def _lose(self, why: str, now: float) -> list[Command]:
        """The variables are lost: all are told, those that wait too."""
        self._enter(State.LOST, now, why)
        self.hosts, self._move = (), None
        self.problem = f"session {self.name}: {why}; restore it, or reset it"
        old = self.generation
        self.generation += 1
        others = tuple(sorted(self.attached - set(self._waiting)))
        waits, self._waiting = list(self._waiting.values()), {}
        self.attached.update(wait.client for wait in waits)
        news = Lost(self.problem)
        commands: list[Command] = [Answer(w.client, w.request, news) for w in waits]
        return [Drop(old), *([Tell(others, news)] if others else []), *commands]

    # -- ends ------------------------------------------------------------------------------

    def _reset(self, event: Reset, now: float) -> list[Command]:
        over = Over(event.origin, f"session {self.name}: reset by {event.client}")
        commands: list[Command] = []
        if event.origin == self.current:
            commands = self._end(event.client, over, now)
        return [Answer(event.client, event.request, over), *commands, *self._elect(now)]

    def _end(self, by: str | None, over: Over, now: float) -> list[Command]:
        """The variables end; whoever waits for them is told, and so are those that have them."""
        waits, self._waiting = list(self._waiting.values()), {}
        others = tuple(sorted(self.attached - {wait.client for wait in waits} - {by}))
        self.attached, self.heard = set(), {}
        self.origin = self.spec = self.chief = self.saved = None
        self.hosts, self.problem, self._lost_workers, self._move = (), "", set(), None
        old = self.generation
        self.generation += 1
        self._enter(State.EMPTY, now, over.why)
        commands: list[Command] = [Answer(w.client, w.request, over) for w in waits]
        return [Drop(old), *([Tell(others, over)] if others else []), *commands]

    def _beat(self, event: Beat, now: float) -> list[Command]:
        if event.origin is None:
            return []
        if event.origin != self.origin:
            words = f"session {self.name}: these variables have ended"
            return [Tell((event.client,), Over(event.origin, words))]
        # It may have been silent for longer than its lease.
        self.attached.add(event.client)
        self.heard[event.client] = now
        return []

    def _die(self, event: Gone, now: float) -> list[Command]:
        if not self._gone.add(event.client):
            return []
        self._answered.pop(event.client, None)
        return self._leave(event.client, event.why, now)

    def _leave(self, client: str, why: str, now: float) -> list[Command]:
        self.attached.discard(client)
        self.heard.pop(client, None)
        chief = self._initialises(client)
        self._waiting.pop(client, None)
        return self._depose(f"{client} {why}, and was the chief", now) if chief else []

    def _tick(self, event: Tick, now: float) -> list[Command]:
        commands: list[Command] = []
        lease = self.limits.client_lease
        for client, heard in list(self.heard.items()):
            if now - heard >= lease and client in self.heard:
                words = f"has not been heard of for {now - heard:.1f} s"
                commands += self._leave(client, words, now)
        commands += self._overdue(now)
        spent = now - self.entered
        if self.state is State.RESTORING and spent >= self.limits.restore_deadline:
            commands += self._lose(f"it cannot be restored within {spent:.0f} s", now)
        elif self.state is State.MOVING and spent >= self.limits.restore_deadline:
            commands += self._fall(f"its shards cannot be moved within {spent:.0f} s", now)
        alone = self._alone is not None and not self.attached and not self._waiting
        if alone and self.origin is not None and self.state in (State.READY, State.LOST):
            assert self._alone is not None
            if now - self._alone >= self.limits.time_to_live:
                words = f"session {self.name}: nobody was there for {now - self._alone:.0f} s"
                commands += self._end(None, Over(self.origin, words), now)
        return commands


_HANDLERS: dict[type, Callable[[Container, Any, float], list[Command]]] = {
    Create: Container._create,
    Attach: Container._attach,
    Created: Container._created,
    Failed: Container._failed,
    Saved: Container._saved,
    Restore: Container._restore,
    Restored: Container._restored,
    NotRestored: Container._not_restored,
    Reset: Container._reset,
    Beat: Container._beat,
    Gone: Container._die,
    WorkerLost: Container._worker_lost,
    Leaving: Container._workers_leave,
    Placed: Container._placed,
    Moved: Container._moved,
    NotMoved: Container._not_moved,
    Tick: Container._tick,
}
