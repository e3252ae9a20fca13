"""Assigns over several shards: what one wrote is seen whole or not at all, and pulls do not wait.

An assign has a number.  A shard has the parameters as of one assign, with all pushes since; and
perhaps, beside them, what the next assign has *prepared*.  Four machines:

1. :class:`Writer` (a client's) asks the lead for a number, prepares every shard, asks the lead to
   commit, and lets every shard know.  Only then is the assign over for its client.
2. :class:`Lead` grants one number at a time and never again; that it has committed a number is the
   one decision.  A writer that dies or is too slow before that has written nothing.
3. :class:`Shard` flips to what is prepared as soon as it hears that it is committed.  *Every*
   message to a shard says which assign its sender knows to be committed, so that nobody sees less
   than it has seen elsewhere, and no push goes to parameters that its sender knows to be over.
4. :class:`Puller` (a client's) asks all shards at once, and is done when they are all as of the
   same assign.  Else it asks those that are behind once more.  The assigns may overtake it
   again and again; after ``patience`` rounds it has the lead hold back the next commit, and the
   round after that is its last, unless it takes longer than a hold lasts.

This is a two-phase commit (Gray, 1978, "Notes on data base operating systems") whose coordinator
is the lead, and whose second phase travels with whatever is said next.  It takes no locks: pushes
go on while an assign is prepared, and a pull holds back assigns alone.

A push is whole at each shard.  If it is under way while an assign commits, some shards may have
applied it before, where the assign overwrites it, and others after.

Lost messages are sent again by the clients (:class:`Again`), and all that comes again is
recognised.  When a worker with shards is lost, or leaves, a new generation begins with new
machines; a shard's knows which pushes are in what it goes on from, so that they are recognised.
"""

from __future__ import annotations

from dtrain.machines.assigns.clients import Puller, Writer
from dtrain.machines.assigns.lead import Lead, Limits
from dtrain.machines.assigns.shard import Known, Shard
from dtrain.machines.assigns.words import (
    Aborted,
    Again,
    Answer,
    Applied,
    Apply,
    Begin,
    Commit,
    Committed,
    Discard,
    Done,
    Drop,
    Failed,
    Flip,
    Flipped,
    GiveUp,
    Gone,
    Granted,
    Held,
    Hold,
    Keep,
    Know,
    Let,
    Outdated,
    Prepare,
    Prepared,
    Pull,
    Push,
    Take,
    Tick,
    ToLead,
    ToShard,
    Values,
)

__all__ = [
    "Aborted",
    "Again",
    "Answer",
    "Applied",
    "Apply",
    "Begin",
    "Commit",
    "Committed",
    "Discard",
    "Done",
    "Drop",
    "Failed",
    "Flip",
    "Flipped",
    "GiveUp",
    "Gone",
    "Granted",
    "Held",
    "Hold",
    "Keep",
    "Know",
    "Known",
    "Lead",
    "Let",
    "Limits",
    "Outdated",
    "Prepare",
    "Prepared",
    "Pull",
    "Puller",
    "Push",
    "Shard",
    "Take",
    "Tick",
    "ToLead",
    "ToShard",
    "Values",
    "Writer",
]
