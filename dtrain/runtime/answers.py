"""What a host answers to others, in its worker's event loop."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol import to_serialize

from dtrain.errors import ProtocolError
from dtrain.machines.cursor import Held
from dtrain.machines.quorum import Join
from dtrain.messages import (
    Closed,
    Contribution,
    Measured,
    Measures,
    Push,
    Pushed,
    Reduced,
    Verdict,
)
from dtrain.runtime.arena import Arena
from dtrain.runtime.lead import (
    Account,
    AsyncLead,
    QuorumLead,
    SyncLead,
    packed,
    packed_answer,
)
from dtrain.runtime.preparation import slots_of
from dtrain.runtime.shards import SyncShard
from dtrain.runtime.transport import meeting
from dtrain.runtime.transport.shm import SharedArena
from dtrain.runtime.transport.shmquorum import QuorumAccount

if TYPE_CHECKING:
    from dtrain.runtime.host import Host


class Answers:
    """Others' questions to one host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._published = asyncio.Event()

    def publish(self) -> None:
        """By the chief: it knows now where the generation begins."""
        self._published.set()

    async def initial(self, wait: float) -> dict[str, Any] | None:
        try:
            await asyncio.wait_for(self._published.wait(), wait)
        except TimeoutError:
            return None
        return {
            "layout": self._host.layout.to_dict(),
            "placed": self._host.placed,
            "begin": asdict(self._host.begin),
            "meeting": meeting.describe(self._host.meeting),
        }

    def first(self, shards: list[int]) -> dict[str, Any]:
        """For those who cannot look into the shared memory, or where there is none."""
        if self._host.state is None:
            raise ProtocolError(f"job {self._host.launch.job}: the generation has begun already")
        slots = slots_of(self._host, self._host.state, shards)
        return {
            "params": to_serialize(self._host.state.params),
            "slots": {
                shard: {name: [to_serialize(a) for a in of] for name, of in slots[shard].items()}
                for shard in shards
            },
        }

    def report(self, *, freeze: bool) -> dict[str, Any]:
        """What the shards here have committed; ``freeze``: nothing is committed after that."""
        if self._host.arena is None or isinstance(self._host.arena, SharedArena):
            raise ProtocolError(
                f"job {self._host.launch.job}: no shards of its own at {self._host.plan}"
            )
        with self._host.arena.lock:
            self._host.arena.frozen = self._host.arena.frozen or freeze
            shards, lead, account = (
                self._host.arena.shards,
                self._host.arena.lead,
                self._host.account,
            )
            assert not isinstance(account, QuorumAccount)  # that is in shared memory
            # A shard's last gradients are asked for by the replica, to know what was applied.
            applied = {
                str(replica): max((s.last.get(replica, -1) for s in shards.values()), default=-1)
                for replica in range(
                    self._host.launch.replicas if not self._host.synchronous else 0
                )
            }
            return {
                "layout": self._host.layout.to_dict(),
                "versions": {str(index): shard.version for index, shard in shards.items()},
                "applied": applied,
                "cursor": _turns(lead),
                "passed_over": _passed_over(lead),
                "account": None if account is None else self._account(account),
            }

    def _account(self, account: SyncLead | Account) -> dict[str, Any]:
        totals = account.rounds.totals if isinstance(account, SyncLead) else account.totals
        if not self._host.recorded:
            # The epoch's sums are taken, and its record is not made yet: it will be made anew.
            totals = self._host.taken
        return {"ledger": account.ledger.to_dict(), "totals": asdict(totals)}

    def shard(self, shard: int, version: int) -> dict[str, Any]:
        """Copies of a shard at a version, or in asynchronous mode at its newest; array maths."""
        hosted = self._host.arena.shards[shard]
        if self._host.synchronous:
            with self._host.arena.lock:
                params, slots = hosted.contents(version)
        else:
            version, (params, slots) = hosted.contents()
        return {"version": version, "params": params, "slots": slots}

    def _arena(self, shard: int) -> Arena:
        if self._host.arena is None or shard not in self._host.arena.shards:
            raise ProtocolError(f"job {self._host.launch.job}: shard {shard} is not at this worker")
        return self._host.arena

    async def pushed(
        self,
        shard: int,
        step: int,
        contributions: tuple[Contribution, ...],
        grads: list[list[np.ndarray]],
        wait: float,
    ) -> list[Any] | None:
        arena = self._arena(shard)
        hosted: SyncShard = arena.shards[shard]
        committed = _Signal()
        with arena.lock:
            if contributions:
                event = Pushed(self._host.generation, step, contributions)
                by_replica = {
                    c.replica: hosted.pieces(arrays)
                    for c, arrays in zip(contributions, grads, strict=True)
                }
                self._host.deliver(shard, event, by_replica)
            hosted.watch(step + 1, committed.set)
        if not await committed.wait(wait):
            return None
        with arena.lock:
            version, published = hosted.version, hosted.published
        assert published is not None
        return [version, [to_serialize(array) for array in published]]

    async def reported(self, event: Reduced, wait: float) -> list[Any] | None:
        decided = _Signal()
        with self._host.arena.lock:
            lead: SyncLead = self._host.arena.lead
            lead.handle(event)
            lead.watch(event.step, decided.set)
        if not await decided.wait(wait):
            return None
        v: Verdict = decided.value
        return [v.generation, v.step, v.members, v.weight, v.ok, v.problem, v.applied]

    async def measured(self, event: Measured, wait: float) -> list[Any] | None:
        complete = _Signal()
        with self._host.arena.lock:
            lead: SyncLead = self._host.arena.lead
            lead.measure(event)
            lead.watch_measures(event.step, event.stage, complete.set)
        if not await complete.wait(wait):
            return None
        found: Measures = complete.value
        return [
            None if found.sums is None else to_serialize(found.sums),
            found.problem,
            found.shard,
        ]

    def joined(self, event: Join) -> Any:
        with self._host.arena.lock:
            lead: QuorumLead = self._host.arena.lead
            return packed_answer(lead.join(event))

    async def closed(self, step: int, wait: float) -> tuple[int, ...] | None:
        known = _Signal()
        with self._host.arena.lock:
            lead: QuorumLead = self._host.arena.lead
            lead.watch_closed(step, known.set)
        if not await known.wait(wait):
            return None
        found: Closed = known.value
        return found.members

    async def taken(self, replica: int, request: int, epoch: int, wait: float) -> Any:
        """The next batch, or for whom the replica has to wait, if it still has to by then."""
        until = asyncio.get_running_loop().time() + wait
        while True:
            moved = _Signal()
            with self._host.arena.lock:
                lead: AsyncLead = self._host.arena.lead
                answer = lead.take(replica, request, epoch)
                if isinstance(answer, Held):
                    lead.watch(moved.set)
            left = until - asyncio.get_running_loop().time()
            if not isinstance(answer, Held) or left <= 0 or not await moved.wait(left):
                return packed(answer)

    def push_pulled(self, shard: int, push: Push) -> dict[str, Any]:
        """Off the event loop."""
        self._arena(shard)
        ranges = self._host.shard_plan.shards[shard].ranges
        into = [np.empty((r.stop - r.start) // np.dtype(r.dtype).itemsize, r.dtype) for r in ranges]
        version, following = self._host.exchanged(shard, push, into)
        return {"version": version, "next": packed(following), "params": into}


def _turns(lead: Any) -> list[int] | None:
    """The state of the cursor or of the quorum at the lead."""
    if isinstance(lead, QuorumLead):
        return list(lead.quorum.state)
    return list(lead.cursor.state) if isinstance(lead, AsyncLead) else None


def _passed_over(lead: Any) -> list[int]:
    """The steps of late whose version is the one before, as far as the lead knows."""
    verdicts = lead.rounds.verdicts.values() if isinstance(lead, SyncLead) else ()
    return [verdict.step for verdict in verdicts if verdict.ok and not verdict.applied]


class _Signal:
    """Set from any thread, awaited in the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.value: Any = None

    def set(self, value: Any = None) -> None:
        self.value = value
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return False
        return True
