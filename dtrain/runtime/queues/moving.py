"""How a queue goes from one worker to another, and stored items to the worker that keeps it.

The worker that takes over asks the old one, which from then on answers nobody: whoever waits there
is told to look elsewhere, asks again, and keeps its place.  The bytes follow, some at a time.  The
old worker keeps all until the queue is elsewhere, so that a third can take over where the second
dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.pickle import dumps, loads

from dtrain.config import settings
from dtrain.errors import DTrainError, QueueLost
from dtrain.machines.items import Relocated, Resumed
from dtrain.runtime.queues.lending import Lent
from dtrain.runtime.queues.parcel import enveloped, opened

if TYPE_CHECKING:
    from dtrain.runtime.queues.worker import Hosted, Queues
    from dtrain.runtime.worker import WorkerService

#: Bytes of items that travel in one message, if one alone has not more.
_AT_ONCE = 1 << 26

#: An item of a queue: who has put it, and its request's number.
_Item = tuple[str, int]


@dataclass
class Frozen:
    """A queue that others take over: its state as it travels, and the bytes of its items."""

    state: dict[str, Any]
    stored: dict[_Item, np.ndarray | Lent]


class Moves:
    """What a worker hands over of its queues, and takes over from others.

    Parameters
    ----------
    queues : Queues
    service : WorkerService
    """

    def __init__(self, queues: Queues, service: WorkerService) -> None:
        self._queues = queues
        self._service = service
        self._frozen: dict[str, Frozen] = {}
        self.handlers: dict[str, Callable[..., Any]] = {
            "dtrain_queue_take_over": self.take_over,
            "dtrain_queue_freeze": self.freeze,
            "dtrain_queue_handed": self.handed,
            "dtrain_queue_moved": self.forget,
            "dtrain_queue_gather": self.gather,
        }

    def forget(self, queue: str) -> bool:
        """It is elsewhere, or over."""
        self._frozen.pop(queue, None)
        return True

    def close(self) -> None:
        self._frozen.clear()

    def stored(self, queue: str, putter: str, request: int) -> np.ndarray | Lent | None:
        """The bytes of an item of a queue that has gone, for who was told that they are here."""
        frozen = self._frozen.get(queue)
        return None if frozen is None else frozen.stored.get((putter, request))

    # -- where it was ----------------------------------------------------------------------------

    def freeze(self, queue: str) -> dict[str, Any]:
        """The state of a queue that goes: nothing is put or got here any more."""
        if queue not in self._frozen:
            hosted, stored = self._queues.release_queue(queue)
            state = {
                "machine": dumps(hosted.machine),
                "store": self._queues.store,
                "stores": sorted(hosted.stores),
                "left": dumps(hosted.left),
                "fed": hosted.fed,
                "clock": time.monotonic(),
                "items": [[*item, parcel.nbytes] for item, parcel in stored.items()],
            }
            self._frozen[queue] = Frozen(state, stored)
        return self._frozen[queue].state

    async def handed(self, queue: str, items: Iterable[_Item]) -> list[Any]:
        """The bytes of some items of a queue that goes."""
        frozen = self._frozen.get(queue)
        if frozen is None:
            raise QueueLost(f"queue {queue}: not at {self._service.address} any more")
        found = [frozen.stored[putter, request] for putter, request in items]
        return [
            enveloped(await asyncio.to_thread(of.read) if isinstance(of, Lent) else of)
            for of in found
        ]

    # -- where it is to be -----------------------------------------------------------------------

    async def take_over(self, queue: str, batching: bytes | None, source: str) -> bool:
        """Keep a queue that another worker has kept so far."""
        if self._queues.keeps(queue):
            return True
        state = await self._ask(source, "dtrain_queue_freeze", queue=queue)
        some: list[_Item] = []
        items: dict[_Item, np.ndarray] = {}
        size = 0
        for putter, request, nbytes in state["items"]:
            if some and size + nbytes > _AT_ONCE:
                items |= await self._fetch(source, queue, some)
                some, size = [], 0
            some.append((putter, request))
            size += nbytes
        if some:
            items |= await self._fetch(source, queue, some)
        if self._queues.keeps(queue):
            return True  # it was asked twice
        machine = loads(state["machine"])
        now = time.monotonic()
        # By another clock; and what the move has taken is nobody's fault.
        machine.handle(Resumed(now - state["clock"]), now)
        here = machine.stored_at(state["store"]) & items.keys()
        machine.handle(Relocated(here, self._queues.store), now)
        kept = {item: items[item] for item in here}
        hosted = self._queues.adopt_queue(queue, machine, batching, state["fed"], kept)
        hosted.go_on({*state["stores"], self._queues.store}, loads(state["left"]))
        return True

    async def _fetch(self, source: str, queue: str, items: list[_Item]) -> dict[_Item, np.ndarray]:
        found = await self._ask(source, "dtrain_queue_handed", queue=queue, items=items)
        return {item: opened(parcel) for item, parcel in zip(items, found, strict=True)}

    async def gather(self, address: str) -> int:
        """Have the items here that a worker stores for queues of this one; how many there were.

        One that cannot be had is lost with that worker, and is counted then.
        """
        count = 0
        for uid, hosted in self._queues.kept():
            for store in [s for s in hosted.stores if s.partition(" ")[0] == address]:
                if store != self._queues.store:
                    count += await self._gather(uid, hosted, store)
        return count

    async def _gather(self, queue: str, hosted: Hosted, store: str) -> int:
        address, count = store.partition(" ")[0], 0
        failed: set[_Item] = set()
        while items := sorted(hosted.machine.stored_at(store) - failed):
            for putter, request in items:
                message = {"queue": queue, "putter": putter, "request": request}
                try:
                    found = await self._ask(address, "dtrain_queue_item", **message)
                except DTrainError:
                    # Its getter is done with it meanwhile, or its putter has taken it back.
                    failed.add((putter, request))
                    continue
                if not self._queues.keeps(queue):
                    return count
                self._queues.lay((queue, putter, request), opened(found["parcel"]))
                hosted.handle(Relocated(frozenset({(putter, request)}), self._queues.store))
                hosted.stores.add(self._queues.store)
                hosted.renew()
                # The worker may stay after all.
                self._queues.drop_at(store, (queue, putter, request))
                count += 1
        return count

    async def _ask(self, address: str, op: str, **message: Any) -> Any:
        deadline = settings().call_deadline
        return await self._service.ask(address, op, deadline, **message)
