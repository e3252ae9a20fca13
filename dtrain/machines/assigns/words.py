"""What the machines of assigns tell each other, and what they have their shells do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtrain.errors import FencedError
from dtrain.machines.departed import Departed

# -- messages to the lead -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """``writer`` wants to assign, and waits for its turn until ``until``.

    A writer assigns one thing after the other; its requests are numbered from 0.
    """

    generation: int
    writer: str
    request: int
    until: float


@dataclass(frozen=True, slots=True)
class Commit:
    """Every shard has prepared the writer's assign, which is ``number``."""

    generation: int
    writer: str
    request: int
    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The writer does not go on with its assign; too late if it is committed."""

    generation: int
    writer: str
    request: int


@dataclass(frozen=True, slots=True)
class Hold:
    """``puller`` wants no assign to be committed until it has read all shards.

    ``nth`` counts the holds of one pull; one that has lapsed is followed by another.
    """

    generation: int
    puller: str
    request: int
    nth: int


@dataclass(frozen=True, slots=True)
class Let:
    """The puller has read all shards."""

    generation: int
    puller: str
    request: int
    nth: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A client has died, or has left; to the lead and to the shards."""

    client: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# -- the lead's answers, and what it tells the shards ----------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """The writer's assign has this number; ``committed`` is the newest before it."""

    number: int
    committed: int


@dataclass(frozen=True, slots=True)
class Committed:
    number: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """The assign has not been, and will not be; nothing of it is seen anywhere."""

    why: str


@dataclass(frozen=True, slots=True)
class Held:
    """No assign after ``committed`` is committed for the moment."""

    nth: int
    committed: int


@dataclass(frozen=True, slots=True)
class Discard:
    """To all shards: what is prepared after ``committed``, up to ``number``, never will be."""

    generation: int
    number: int
    committed: int


# -- messages to a shard, and its answers ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """The shard's part of an assign; the values travel beside it."""

    generation: int
    client: str
    request: int
    number: int
    committed: int


@dataclass(frozen=True, slots=True)
class Know:
    """``committed`` is committed, and the shard says when it has flipped to it."""

    generation: int
    client: str
    request: int
    committed: int


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient for the shard; ``request`` numbers the pushes of a client, from 0."""

    generation: int
    client: str
    request: int
    committed: int


@dataclass(frozen=True, slots=True)
class Pull:
    generation: int
    client: str
    request: int
    committed: int


@dataclass(frozen=True, slots=True)
class Prepared:
    shard: int
    number: int


@dataclass(frozen=True, slots=True)
class Outdated:
    """The assign was given up before this reached the shard."""

    shard: int
    number: int


@dataclass(frozen=True, slots=True)
class Flipped:
    """The shard is as of ``number``, or newer."""

    shard: int
    number: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The push is in ``version`` of the shard, which is as of assign ``number``."""

    shard: int
    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Values:
    """The shard's parameters as of assign ``number``; they travel beside it."""

    shard: int
    number: int
    version: int


# -- commands -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a client's request; beside :class:`Values` go the parameters of this very moment."""

    client: str
    request: int
    answer: Any


@dataclass(frozen=True, slots=True)
class Keep:
    """Command of a shard: put the values aside as what ``number`` has prepared."""

    number: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Command of a shard: let go of what ``number`` has prepared."""

    number: int


@dataclass(frozen=True, slots=True)
class Flip:
    """Command of a shard: what ``number`` has prepared are now the parameters."""

    number: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Command of a shard: apply the gradient that came with the push; it makes ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class ToLead:
    """Command of a client's machine: send it to the lead."""

    message: Begin | Commit | GiveUp | Hold | Let


@dataclass(frozen=True, slots=True)
class ToShard:
    """Command of a client's machine: send it to a shard."""

    shard: int
    message: Prepare | Know | Pull


@dataclass(frozen=True, slots=True)
class Take:
    """Command of a puller: these values of a shard count; drop older ones of it."""

    shard: int


@dataclass(frozen=True, slots=True)
class Done:
    """Command of a client's machine: it is over; all is as of assign ``number``."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Command of a writer: nothing was assigned; a new request may be tried."""

    why: str


@dataclass(frozen=True, slots=True)
class Again:
    """To a client's machine: there was no answer for too long; all that is open is sent again."""


LeadCommand = Answer | Discard
ShardCommand = Keep | Drop | Flip | Apply | Answer
WriterCommand = ToLead | ToShard | Done | Failed
PullerCommand = ToLead | ToShard | Take | Done


def check_sender(who: str, event: Any, expected: int, gone: Departed) -> None:
    """A message is of this generation, and of somebody who is still there."""
    told = f"{who}: {type(event).__name__}"
    found = getattr(event, "generation", expected)
    if found != expected:
        raise FencedError(f"{told} of generation {found}, expected {expected}")
    for role in ("writer", "puller", "client"):
        name = getattr(event, role, None)
        if name in gone and not isinstance(event, Gone):
            raise FencedError(f"{told} of {name}, who is gone")
