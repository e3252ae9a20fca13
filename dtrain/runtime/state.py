"""All that a job is at one step: what a generation begins with, and what a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.arrays import aligned_bytes
from dtrain.callbacks import enough, policies
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor
from dtrain.machines.ledger import Ledger
from dtrain.machines.plan import Plan
from dtrain.machines.quorum import Quorum
from dtrain.machines.rounds import Totals
from dtrain.messages import Batch
from dtrain.optim import Optimizer
from dtrain.spec import JobSpec


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


def finished(spec: JobSpec, plan: Plan, state: State) -> bool:
    """Whether nothing is left to do but to hand over the result."""
    epochs = len(state.history)
    if enough(policies(spec), state.history) is not None:
        return True
    if spec.backups:
        quorum = Quorum(plan, 0, spec.backups, _mutable(state.cursor))
        return quorum.exhausted and quorum.done and epochs > quorum.epoch
    if spec.mode == "sync":
        return state.step >= plan.total_steps and not unrecorded(plan, epochs, state.step)
    cursor = Cursor(plan, 0, _mutable(state.cursor))
    return cursor.exhausted and cursor.left == 0 and epochs > cursor.epoch


def ended_early(spec: JobSpec, plan: Plan, state: State) -> bool:
    """Whether the epoch on record that is the last is not whole: ``steps`` has ended it."""
    epochs = len(state.history)
    if spec.backups:
        quorum = Quorum(plan, 0, spec.backups, _mutable(state.cursor))
        return epochs > quorum.epoch and not quorum.complete
    if spec.mode == "sync":
        epoch, index = plan.locate(state.step)
        return index > 0 and epochs > epoch
    cursor = Cursor(plan, 0, _mutable(state.cursor))
    return epochs > cursor.epoch and not cursor.whole


def _mutable(numbers: Sequence[int] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)


def unrecorded(plan: Plan, epochs: int, step: int) -> bool:
    """Whether ``step`` is the end of an epoch that is not among the ``epochs`` on record."""
    return step > 0 and plan.ends_epoch(step - 1) and plan.locate(step - 1)[0] >= epochs
