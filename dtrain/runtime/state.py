"""All that a job is at one step: what a generation begins with, and what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.arrays import aligned_bytes
from dtrain.layout import Layout
from dtrain.machines.ledger import Ledger
from dtrain.machines.rounds import Totals
from dtrain.messages import Batch
from dtrain.optim import Optimizer


@dataclass(kw_only=True)
class State:
    """A job at one step.

    Attributes
    ----------
    step : int
        Updates applied at the lead shard.
    params, slots : flat buffers of ``layout``, uint8 of shape (layout.nbytes,)
    versions : list of int, or None
        Updates applied at each shard, where they differ (asynchronous mode).
    cursor : list of int, or None
        Of :class:`dtrain.machines.cursor.Cursor`, in asynchronous mode.
    totals : Totals
        Sums over the epoch so far.
    ledger : Ledger
    source : str
        ``"memory"``, ``"checkpoint"`` or ``"start"``.
    history : tuple of dict
        The epochs that are over.
    suspects : tuple of Batch
        What was in user code when its worker died.
    """

    layout: Layout
    params: Any
    slots: Mapping[str, Any]
    step: int = 0
    versions: list[int] | None = None
    cursor: list[int] | None = None
    totals: Totals = field(default_factory=Totals)
    ledger: Ledger = field(default_factory=Ledger)
    source: str = "start"
    history: tuple[dict[str, Any], ...] = ()
    suspects: tuple[Batch, ...] = ()


def fresh_slots(optimizer: Optimizer, layout: Layout) -> dict[str, Any]:
    """The optimizer's slots as they are before the first step; flat buffers."""
    slots = {}
    for name in optimizer.slots:
        buffer = aligned_bytes(layout.nbytes)
        for segment in layout.segments:
            buffer[segment.start : segment.stop].view(segment.dtype)[:] = optimizer.initial[name]
        slots[name] = buffer
    return slots


@dataclass(frozen=True)
class Begin:
    """What all hosts of a generation have to know of where it begins."""

    step: int
    versions: tuple[int, ...]
    #: epochs whose record the master has
    epochs: int
    #: nothing is left to do but to hand over the result
    finished: bool = False
