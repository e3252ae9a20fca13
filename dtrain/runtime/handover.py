"""Taking over the shards that lie in the memory of other processes.

Where hosts do not share memory, a shard lives in its host's process alone.  When hosts change
while all of them live, the next chief *freezes* the old ones: from then on nothing is committed
there.  Shards differ by one version at most then.  Where one has the next version, the verdict
of the step was recorded, so that all others have it too, in their other buffer: the step is
finished, not replayed.  A checkpoint is gathered in the same way, between two steps, unfrozen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dtrain.arrays import aligned_bytes
from dtrain.errors import DTrainError, ProtocolError
from dtrain.layout import Layout
from dtrain.machines.cursor import Cursor
from dtrain.machines.jobs import HostPlan, lead_shard
from dtrain.machines.ledger import Ledger
from dtrain.machines.quorum import Quorum
from dtrain.runtime.state import State, fresh_slots
from dtrain.runtime.updater import cut

if TYPE_CHECKING:
    from dtrain.runtime.host import Host

logger = logging.getLogger("dtrain.worker")


def ended(host: Host) -> State | None:
    """What the generation before has left in its processes; None if a part of it is gone."""
    origin = host.launch.origin
    assert origin is not None
    try:
        return _gather(host, origin.generation, origin.hosts, freeze=True)
    except (OSError, DTrainError) as error:
        words = "job %s: the state of generation %d is not in memory any more: %s"
        logger.warning(words, host.launch.job, origin.generation, error)
        return None


def running(host: Host) -> State:
    """What the host's own generation has committed; at a step's boundary, by the chief."""
    return _gather(host, host.generation, host.launch.hosts, freeze=False)


def _gather(host: Host, generation: int, hosts: Sequence[HostPlan], *, freeze: bool) -> State:
    reports = {}
    for one in hosts:
        try:
            reports[one.address] = _call(
                host, one.address, "dtrain_report", generation, freeze=freeze
            )
        except (OSError, DTrainError):
            # It is not needed unless it has shards; accounts are at the lead.
            if one.shards:
                raise
    if freeze:  # else it is the host's own generation, which knows it
        host.layout_known(Layout.from_dict(next(iter(reports.values()))["layout"]))
    layout = host.layout
    # The padding between variables is as it was at the start.
    slots = fresh_slots(host.optimizer, layout)
    state = State(layout=layout, params=aligned_bytes(layout.nbytes), slots=slots, source="memory")
    version = max(v for report in reports.values() for v in report["versions"].values())
    # A shard that has not heard that a step is passed over has its update ready, for nothing.
    passed_over = any(version - 1 in report["passed_over"] for report in reports.values())
    found = {}
    for address, report in reports.items():
        for shard, own in report["versions"].items():
            if int(shard) not in found:
                wanted = [own, version] if passed_over and own < version else [version]
                found[int(shard)] = _take(host, address, generation, int(shard), wanted, state)
    missing = [s for s in range(len(host.shard_plan.shards)) if s not in found]
    if missing:
        raise DTrainError(f"shards {missing} are nowhere")
    if not host.synchronous:
        state.versions = [found[shard] for shard in sorted(found)]
    state.step = found[lead_shard(hosts)]
    _join_accounts(host, state, list(reports.values()), freeze=freeze)
    return state


def _take(
    host: Host, address: str, generation: int, shard: int, wanted: list[int], state: State
) -> int:
    """Copy a shard to its place, at the first of these versions that it still has.

    In asynchronous mode at its newest.
    """
    version, *others = wanted
    try:
        found = _call(host, address, "dtrain_shard", generation, shard=shard, version=version)
    except ProtocolError:
        if not others:
            raise
        # It has heard of the verdict since it was asked.
        return _take(host, address, generation, shard, others, state)
    ranges = host.shard_plan.shards[shard].ranges
    for target, source in zip(cut(state.params, ranges), found["params"], strict=True):
        target[...] = source
    for name, arrays in found["slots"].items():
        for target, source in zip(cut(state.slots[name], ranges), arrays, strict=True):
            target[...] = source
    return int(found["version"])


def _join_accounts(
    host: Host, state: State, reports: list[dict[str, Any]], *, freeze: bool
) -> None:
    accounts = [r["account"] for r in reports if r["account"] is not None]
    state.ledger = Ledger.total(a["ledger"] for a in accounts)
    for account in accounts:
        state.totals.loss += account["totals"]["loss"]
        state.totals.weight += account["totals"]["weight"]
        state.totals.samples += account["totals"]["samples"]
    cursor = next((r["cursor"] for r in reports if r["cursor"] is not None), None)
    if cursor is None:
        return
    plan = host.parts.plan
    if host.backups:
        state.cursor = Quorum.recovered(plan, cursor, state.step)
        return
    known = Cursor(plan, 0, list(cursor))
    for replica in range(plan.replicas):
        # The lead shard's exchange hands out the next batch, so what is still out is not known
        # to be applied there; another shard may have it.
        request = known.requested(replica)
        if freeze and known.outstanding(replica) is not None:
            state.ledger.duplicates += any(r["applied"][str(replica)] >= request for r in reports)
    state.cursor = Cursor.recovered(plan, cursor, ())


def _call(host: Host, address: str, op: str, generation: int, **message: Any) -> Any:
    """Ask a host of a generation; straight where it is in this very process."""
    from dtrain.runtime.worker import service_at

    service = service_at(address)
    if service is not None:
        old = service.of_generation(host.launch.job, generation)
        return getattr(old.answers, op.removeprefix("dtrain_"))(**message)
    return host.calls.ask(address, op, generation=generation, **message)
