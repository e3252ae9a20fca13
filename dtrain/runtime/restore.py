"""What a generation begins with: found by its chief, in the best place that has it.

1. Memory: the file or the processes of the generation before; nothing is lost.
2. The last checkpoint: the steps since are lost, and are trained again.
3. The start: the model's initial values, or those that were handed in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.arrays import aligned_bytes
from dtrain.errors import CheckpointError, DataError
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor
from dtrain.machines.jobs import lead_shard
from dtrain.machines.ledger import Ledger
from dtrain.machines.quorum import Quorum, with_quorum
from dtrain.machines.rounds import Totals
from dtrain.optim import Optimizer
from dtrain.runtime import checkpoint, handover
from dtrain.runtime.checkpoint import Entry, Snapshot
from dtrain.runtime.data import read_blob
from dtrain.runtime.modelfile import describe_model
from dtrain.runtime.state import State, fresh_slots
from dtrain.runtime.transport import segment
from dtrain.runtime.transport.meeting import Meeting
from dtrain.runtime.transport.shmfile import FilePlan, Reader
from dtrain.runtime.usercode import calling

if TYPE_CHECKING:
    from dtrain.runtime.host import Host

logger = logging.getLogger("dtrain.worker")

#: Seconds that those who still write to the file of an ended generation are waited for.
_PATIENCE = 1.0

#: What has to be the same for a job to go on as if it had never stopped.
_SAME = ("mode", "replicas", "batch_size", "shuffle", "seed", "validation_split")


def restore(host: Host) -> State:
    """The state that the host's generation begins with; by the chief, before anybody trains."""
    origin, spec = host.launch.origin, host.launch.spec
    if origin is not None:
        # Not in the launch, which goes to everybody: it may be long.
        told = host.calls.ask_master("dtrain_history")
        host.history = list(told["history"])
        host.base = Ledger.from_dict(told["ledger"]) if told["ledger"] else Ledger()
        state = _from_file(host) if origin.meeting is not None else handover.ended(host)
        if state is not None:
            return _accounted(host, state)
    initial = _initial(host)
    if spec.checkpoint is not None and (spec.resume or host.generation > 1):
        entry = checkpoint.latest(str(spec.checkpoint.dir))
        if entry is not None:
            return _from_checkpoint(host, entry, initial)
    return initial


# -- memory -------------------------------------------------------------------------------------


def _from_file(host: Host) -> State | None:
    """From the shared file of the generation before; None if it cannot be opened from here."""
    origin = host.launch.origin
    assert origin is not None
    met = Meeting(**origin.meeting)
    if not segment.shares(met.path, met.nbytes, met.token):
        logger.warning("job %s: %s cannot be opened any more", host.launch.job, met.path)
        return None
    host.layout_known(Layout.from_dict(met.layout))
    path, shards = Path(met.path), len(host.shard_plan.shards)
    file = FilePlan(
        host.layout, host.optimizer, host.launch.replicas, shards, sync=host.synchronous
    )
    mapped = segment.Segment(path, met.nbytes)
    locks = segment.Locks(path, shards + 1)
    try:
        reader = Reader(mapped.memory, file, host.layout, host.shard_plan, locks)
        reader.end(origin.dead, _PATIENCE)
        if host.synchronous:
            state = (
                reader.with_quorum(host.parts.plan, _PATIENCE)
                if host.backups
                else reader.sync(_PATIENCE)
            )
            found = state.ledger
            state.ledger = replace(
                host.base,
                applied=found.applied,
                rejected=found.rejected,
                replayed=host.base.replayed + reader.pushed(state.step),
            )
        else:
            epoch = len(host.history)
            lead = lead_shard(origin.hosts)
            state, partly = reader.asynchronous(host.parts.plan, epoch, lead, _PATIENCE)
            state.ledger.duplicates = partly
            state.ledger = Ledger.total([host.base.to_dict(), state.ledger.to_dict()])
        state.suspects = reader.suspects(origin.dead)
        return state
    finally:
        locks.close()
        del reader
        mapped.close()


def _accounted(host: Host, state: State) -> State:
    """What was found in memory, with the account and the history that belong to it."""
    plan, history = host.parts.plan, tuple(host.history)
    if host.backups:
        assert state.cursor is not None
        quorum = Quorum(plan, 0, host.launch.spec.backups, list(state.cursor))
        state.ledger = with_quorum(state.ledger, quorum, state.ledger)
        if quorum.epoch < len(history) or not quorum.account().samples:
            state.totals = Totals()
    elif host.synchronous:
        # All that is committed follows from the number of steps; how often something came late
        # or again, or was passed over, does not.  The driver of an in-graph job has it all.
        if not host.in_graph:
            ledger = Ledger.of_steps(plan, state.step)
            for name in ("late", "rejected", "replayed", "duplicates"):
                setattr(ledger, name, getattr(state.ledger, name))
            if ledger.rejected:
                _without_rejected(ledger, state)
            state.ledger = ledger
        if plan.locate(state.step) == (len(history), 0):
            state.totals = Totals()  # the master has the record of all that is committed
    state.history = history
    return state


def _without_rejected(ledger: Ledger, state: State) -> None:
    """Some steps were passed over: they have no part in what is applied and committed."""
    ledger.applied -= ledger.rejected
    ledger.staleness[0] = ledger.applied
    known, last = state.ledger.samples, len(ledger.samples) - 1
    for epoch in range(last):
        ledger.samples[epoch] = known[epoch]
    if ledger.samples:
        # The sums begin anew once the epoch is on record, and then that is complete.
        recorded = known[last] if last < len(known) else 0
        ledger.samples[last] = max(state.totals.samples, recorded)


# -- the start ----------------------------------------------------------------------------------


def _initial(host: Host) -> State:
    spec = host.launch.spec
    with calling("init of the model"):
        params = host.model.init(np.random.default_rng(spec.seed))
        layout = Layout.of(params)
    buffer = aligned_bytes(layout.nbytes)
    layout.write(buffer, params)
    service, deadline = host.service, host.launch.settings.data_deadline
    given = read_blob(host.launch.data, "initial", service, deadline)
    if given is not None:
        try:
            layout.write(buffer, given)
        except ValueError as error:
            raise DataError(f"initial: {error}") from None
    host.layout_known(layout)
    return State(layout=layout, params=buffer, slots=fresh_slots(host.optimizer, layout))


# -- checkpoints --------------------------------------------------------------------------------


def snapshot(host: Host, state: State) -> Snapshot:
    """A state as a checkpoint keeps it."""
    spec, totals = host.launch.spec, asdict(state.totals)
    return Snapshot(
        step=state.step,
        layout=state.layout,
        params=state.params,
        slots=state.slots,
        shards=host.shard_plan,
        state={
            "cursor": state.cursor,
            "versions": state.versions,
            # All randomness is keyed by the seed, the replica and the step or the epoch.
            "rng": {"seed": spec.seed, "step": state.step},
            "totals": totals,
            "ledger": state.ledger.to_dict(),
            "history": list(state.history),
        },
        about=_about(host),
    )


def _about(host: Host) -> dict[str, Any]:
    launch = host.launch
    return {
        "job": launch.job,
        "generation": launch.generation,
        "spec": launch.spec.to_dict(),
        "model": describe_model(host.model),
        "rows": launch.data.x.rows,
        "features": list(launch.data.x.shape[1:]),
    }


def _from_checkpoint(host: Host, entry: Entry, initial: State) -> State:
    found = checkpoint.load(entry, fill=host.optimizer.initial)
    _check(host, entry, found, initial)
    state = found.state
    plan = host.parts.plan
    cursor, totals = state["cursor"], Totals(**state["totals"])
    history = tuple(state["history"])
    if host.synchronous and not host.backups and plan.locate(found.step) == (len(history), 0):
        totals = Totals()
    if host.backups and cursor is not None and Quorum(plan, 0, 0, cursor).epoch < len(history):
        totals = Totals()
    versions = state["versions"]
    if found.shards != host.shard_plan:
        versions = None
    return State(
        layout=found.layout,
        params=found.params,
        slots=found.slots,
        step=found.step,
        versions=versions,
        cursor=_resumed(host, cursor, found.step),
        totals=totals,
        ledger=Ledger.from_dict(state["ledger"]),
        source="checkpoint",
        history=history,
    )


def _resumed(host: Host, cursor: list[int] | None, step: int) -> list[int] | None:
    plan = host.parts.plan
    if cursor is None:
        return None
    if host.backups:
        return Quorum.recovered(plan, cursor, step)
    return Cursor.recovered(plan, cursor, ())


def _check(host: Host, entry: Entry, found: Snapshot, initial: State) -> None:
    """Raise CheckpointError unless the job can go on from it as if it had never stopped."""
    problem = difference(found.about, host.launch.spec.to_dict(), host.launch.data.x.rows)
    was, wanted = found.layout.to_dict(), initial.layout.to_dict()
    if problem is None and was != wanted:
        problem = _differs("variables", _named(was), _named(wanted))
    total = host.parts.plan.total_steps
    known = host.synchronous and (not host.backups or host.launch.spec.steps is not None)
    if problem is None and known and found.step > total:
        problem = f"it is at step {found.step}, expected at most {total}, the job's last"
    if problem is not None:
        raise CheckpointError(f"{entry.where}/{entry.name}: {problem}")


def difference(about: Mapping[str, Any], spec: Mapping[str, Any], rows: int | None) -> str | None:
    """Why a job of this spec cannot go on from a checkpoint, in words; None if it can.

    ``rows`` is None where it is not known yet.
    """
    pairs = [(name, about["spec"].get(name), spec[name]) for name in _SAME]
    was, wanted = about["spec"].get("backups", 0), spec["backups"]
    if about["spec"]["mode"] == spec["mode"] and bool(was) != bool(wanted):
        # Which batches are left follows from the number of steps in the one case alone.
        return _differs("backups", was, wanted)
    for name, was, wanted in [
        *pairs,
        ("rows", about["rows"], about["rows"] if rows is None else rows),
    ]:
        if was != wanted:
            return _differs(name, was, wanted)
    was, wanted = about["spec"]["optimizer"], spec["optimizer"]
    if sorted(Optimizer.from_dict(was).slots) != sorted(Optimizer.from_dict(wanted).slots):
        # Its numbers, a learning rate say, may be others; what it has gathered may not.
        return _differs("optimizer", was, wanted)
    return None


def _differs(name: str, was: Any, wanted: Any) -> str:
    return (
        f"it has {name} {_short(was)}, expected {_short(wanted)}, those of the job that is to go "
        f"on from it"
    )


def _named(layout: Mapping[str, Any]) -> dict[str, Any]:
    return {v["name"]: (v["dtype"], *v["shape"]) for v in layout["variables"]}


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) < 200 else repr(value)[:200] + "..."
