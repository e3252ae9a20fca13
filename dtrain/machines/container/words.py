"""What the container of a session hears, answers, and has its shell do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    EMPTY = "EMPTY"
    CREATING = "CREATING"
    READY = "READY"
    MOVING = "MOVING"
    RESTORING = "RESTORING"
    LOST = "LOST"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.EMPTY: frozenset({State.CREATING}),
    State.CREATING: frozenset({State.READY, State.EMPTY}),
    State.READY: frozenset({State.MOVING, State.RESTORING, State.LOST, State.EMPTY}),
    State.MOVING: frozenset({State.READY, State.RESTORING, State.LOST, State.EMPTY}),
    State.RESTORING: frozenset({State.READY, State.LOST, State.EMPTY}),
    State.LOST: frozenset({State.RESTORING, State.EMPTY}),
}

# -- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """``client`` wants the variables of ``spec``, and creates them if nobody has.

    ``spec`` is a fingerprint of the model, the optimizer and the seed.  The name of a client
    stands for one life of it.  It asks for one thing at a time, and numbers what it asks for:
    a request that comes again keeps its place, or is answered as before.
    """

    client: str
    request: int
    spec: str
    until: float


@dataclass(frozen=True, slots=True)
class Attach:
    """``client`` wants the variables, whatever they are, and creates none.

    ``origin``: those that it had before; None: any.
    """

    client: str
    request: int
    until: float
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class Created:
    """The chief has initialised the variables; ``hosts``: shard -> the worker that has it."""

    client: str
    generation: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The chief cannot initialise the variables: it knows why itself, and the next one tries."""

    client: str
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of the variables is complete; ``source`` is where, opaque here."""

    generation: int
    source: Any
    step: int


@dataclass(frozen=True, slots=True)
class Restore:
    """``client`` wants lost variables restored from ``source``, opaque here.

    Variables that are there are restored by an assign, and the session does not change.
    """

    client: str
    request: int
    source: Any
    until: float


@dataclass(frozen=True, slots=True)
class Restored:
    """The workers have restored the variables; ``hosts``: shard -> the worker that has it."""

    generation: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotRestored:
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Reset:
    """End the variables of ``origin`` (see :attr:`Container.current`); others stay."""

    client: str
    request: int
    origin: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A client is there, with variables of ``origin`` or with none."""

    client: str
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A client has died, or has left."""

    client: str
    why: str = "is gone"


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker has died, or was fenced because it does not run any more."""

    address: str
    why: str = "is gone"


@dataclass(frozen=True, slots=True)
class Leaving:
    """Workers are about to leave, and others could have their shards; or they stay after all."""

    addresses: tuple[str, ...]
    leaving: bool = True


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the shards are moving to; ``hosts``: shard -> the worker that is to have it."""

    generation: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """All shards are where they were :class:`Placed`."""

    generation: int


@dataclass(frozen=True, slots=True)
class NotMoved:
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Request = Create | Attach | Restore
Event = (
    Create
    | Attach
    | Created
    | Failed
    | Saved
    | Restore
    | Restored
    | NotRestored
    | Reset
    | Beat
    | Gone
    | WorkerLost
    | Leaving
    | Placed
    | Moved
    | NotMoved
    | Tick
)

# -- answers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Initialise:
    """The client is the chief of ``generation``: it places and initialises the variables."""

    generation: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The variables are there; ``chief``: who has initialised them."""

    origin: int
    generation: int
    hosts: tuple[str, ...]
    spec: str
    chief: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It cannot be: other variables are there under this name; what was found and expected."""

    problem: str


@dataclass(frozen=True, slots=True)
class Late:
    """The deadline is over; the words name whom it has waited for."""

    problem: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The variables are lost, with a worker; the words name it, and what helps."""

    problem: str


@dataclass(frozen=True, slots=True)
class Over:
    """The variables of ``origin`` have ended, by a reset or their time to live."""

    origin: int
    why: str


Reply = Initialise | Ready | Refused | Late | Lost | Over

# -- commands -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a request, be it the one that has just come or one that has waited."""

    client: str
    request: int
    answer: Reply


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell these clients, which have attached, what has become of their variables."""

    clients: tuple[str, ...]
    news: Ready | Lost | Over


@dataclass(frozen=True, slots=True)
class Reload:
    """Place the shards of ``generation`` on workers, and fill them from ``source``."""

    generation: int
    source: Any


@dataclass(frozen=True, slots=True)
class Move:
    """Freeze the shards of ``former`` where they are, and have them as ``generation`` elsewhere.

    ``hosts``: shard -> the worker that has it; those of ``leaving`` are to have none.
    """

    generation: int
    former: int
    hosts: tuple[str, ...]
    leaving: frozenset[str]


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of all shards of this generation and those before; all later words are fenced."""

    generation: int


Command = Answer | Tell | Reload | Move | Drop


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds.

    Attributes
    ----------
    client_lease : float
        How long a client may be silent.
    time_to_live : float
        How long the variables stay after the last client has left.
    restore_deadline : float
        How long the workers have to restore them, or to move them.
    """

    client_lease: float = 10.0
    time_to_live: float = 7 * 86400.0
    restore_deadline: float = 600.0
