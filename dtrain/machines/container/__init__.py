"""The life of a named session: who creates its variables, who waits, and what becomes of them.

The first client that wants to create becomes the *chief*: it is told to initialise, and all who
come after it wait, each with a deadline, and are told whom they have waited for.  If the chief
dies, is not heard of within its lease, or cannot do it, the next in the line is the chief.  Each
chief has a *generation* of its own, so that what an old one still says is refused, here and at
the shards: within one generation the variables are initialised once, and only by its chief.

The variables outlive the clients.  They end by :class:`Reset`, or a time to live after the last
client has left; a later session of the same name has another *origin*, the generation in which its
variables were created, and whoever still holds the old one is told.  If a worker with shards is
lost, the variables are restored from the newest checkpoint, in a new generation of the same
origin; without one they are lost, and stay so until somebody restores or resets them: what was
trained is not silently begun again.

A worker that is about to leave takes nothing along: its shards *move*, in a new generation of the
same origin.  The old hosts are frozen first, each new one fetches its shards from them, and only
when all have theirs does the generation begin.  Until then the old hosts keep what they have, so
that a move may be tried again where a new host dies; if an old one dies, it was a loss.
"""

from __future__ import annotations

from dtrain.machines.container.machine import Container
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
    Reset,
    Restore,
    Restored,
    Saved,
    State,
    Tell,
    Tick,
    WorkerLost,
)

__all__ = [
    "TRANSITIONS",
    "Answer",
    "Attach",
    "Beat",
    "Command",
    "Container",
    "Create",
    "Created",
    "Drop",
    "Event",
    "Failed",
    "Gone",
    "Initialise",
    "Late",
    "Leaving",
    "Limits",
    "Lost",
    "Move",
    "Moved",
    "NotMoved",
    "NotRestored",
    "Over",
    "Placed",
    "Ready",
    "Refused",
    "Reload",
    "Reply",
    "Reset",
    "Restore",
    "Restored",
    "Saved",
    "State",
    "Tell",
    "Tick",
    "WorkerLost",
]
