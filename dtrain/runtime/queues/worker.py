"""The queues of sessions, on a worker: the machines of those kept here, and stored items.

One worker keeps the machine of a queue (:class:`dtrain.machines.items.ItemQueue`); it stores what
clients put.  What a task on a worker puts may stay with that worker, and then only its length
comes here.  A reader is such a queue, too: its items are the numbers of batches, in order, which
nobody has to store.

Whoever asks is a *holder*: one thread of one *life*, a client's handle of the queue.  Answers
that have to wait are long polls; asked again by the same number, they are the same answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.protocol.pickle import loads

from dtrain.config import settings
from dtrain.errors import DTrainError, FencedError, ProtocolError, QueueLost
from dtrain.machines.departed import Departed
from dtrain.machines.items import (
    Ack,
    Acknowledged,
    Answer,
    Close,
    Closed,
    Drop,
    Empty,
    Event,
    Full,
    Get,
    Gone,
    Item,
    ItemQueue,
    Leased,
    Put,
    Refused,
    Release,
    Reply,
    Stored,
    Tick,
    Withdraw,
    Withdrawn,
)
from dtrain.runtime.queues.batches import Batching, BatchReader
from dtrain.runtime.queues.lending import Lent
from dtrain.runtime.queues.moving import Moves
from dtrain.runtime.queues.parcel import enveloped, opened

if TYPE_CHECKING:
    from dtrain.runtime.worker import WorkerService

logger = logging.getLogger("dtrain.worker")

#: An item in a store: the queue, who has put it, and its request's number.
Key = tuple[str, str, int]

#: Seconds between two tries to tell a store what it need not keep.
_RETRY = 1.0

#: Items in lent memory that a worker has at most: each takes a descriptor.
_MOST_LENT = 256

#: Batches of a reader that lie ready to be handed out; they are numbers alone.
_AHEAD = 2

#: Who puts the batches of a reader into its queue, and where they are stored.
_NOBODY = ""


class Hosted:
    """One queue whose machine is here: its waits, its clock, and what its commands bring about."""

    def __init__(self, uid: str, machine: ItemQueue, queues: Queues) -> None:
        self.uid = uid
        self.machine = machine
        self._queues = queues
        #: holder -> its newest request, so that one that comes again keeps its deadline
        self._asked: dict[str, Put | Get | Ack | Withdraw] = {}
        self._answers: dict[tuple[str, int], asyncio.Future[Reply]] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: handles that have left, or whose client has died
        self._left = Departed()
        #: every store that an item was put at
        self.stores: set[str] = set()
        #: of a reader's, the batches that were put
        self.fed = 0

    def fresh(self, holder: str, request: int) -> bool:
        """Whether a request has not come before."""
        known = self._asked.get(holder)
        return known is None or known.request < request

    async def ask(self, event: Put | Get | Ack | Withdraw, wait: float) -> Reply | None:
        """The machine's answer; None: not yet, ask again."""
        holder, request = _sender(event), event.request
        if holder.partition("/")[0] in self._left:
            raise FencedError(
                f"queue {self.machine.name}: {holder} has left, or its client was lost; "
                f"what it held is handed out again"
            )
        known = self._asked.get(holder)
        if known is not None and known.request == request and type(known) is type(event):
            event = known
        key = holder, request
        future = self._answers.get(key)
        if future is None or future.done():
            future = self._answers[key] = asyncio.get_running_loop().create_future()
        try:
            self.handle(event)
        except DTrainError:
            self._answers.pop(key, None)
            raise
        self._asked[holder] = event
        if not future.done():
            await asyncio.wait([future], timeout=wait)
        if not future.done():
            return None
        self._answers.pop(key, None)
        return future.result()

    def handle(self, event: Event) -> None:
        """Tell the machine, and do what it commands."""
        self._act(self.machine.handle(event, time.monotonic()))
        self._set_timer()

    def _act(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Answer):
                future = self._answers.get((command.holder, command.request))
                if future is not None and not future.done():
                    future.set_result(command.answer)
            elif isinstance(command, Drop):
                self._queues.drop_at(command.store, (self.uid, command.putter, command.request))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.machine.deadline is not None:
            delay = self.machine.deadline - time.monotonic()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(delay, 0.0), self.handle, Tick())

    def leave(self, life: str) -> None:
        """A handle is closed, or its client has died: what its threads hold is handed out again."""
        self._left.add(life)
        for holder in [h for h in self._asked if h.partition("/")[0] == life]:
            del self._asked[holder]
            for key in [k for k in self._answers if k[0] == holder]:
                _fail(
                    self._answers.pop(key),
                    FencedError(f"queue {self.machine.name}: {holder} has left"),
                )
            self.handle(Gone(holder))

    def lose_store(self, address: str) -> None:
        """A worker has died: what it stored is lost."""
        for store in [s for s in self.stores if _address(s) == address]:
            self.stores.discard(store)
            self.handle(Gone(store))

    @property
    def left(self) -> Departed:
        return self._left

    def go_on(self, stores: set[str], left: Departed) -> None:
        """It has come from another worker."""
        self.stores, self._left = stores, left
        self.renew()
        self._set_timer()

    def renew(self) -> None:
        """The machine has changed what it was asked for."""
        self._asked = self.machine.asked()

    def stats(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "size": machine.size,
            "leased": machine.leased,
            "bytes": machine.used,
            "capacity": machine.capacity,
            "nbytes": machine.nbytes,
            "waiting": len(machine.waiting()),
            "closed": machine.closed,
            "drained": machine.drained,
            **asdict(machine.counts),
        }

    async def payload(self, item: Item, near: bool) -> dict[str, Any]:
        """The item's bytes, if they are here, or how they are borrowed by who is ``near``."""
        stored = self._queues.stored((self.uid, item.putter, item.request))
        return {} if stored is None else await _handed(stored, near)

    def end(self, why: str) -> None:
        """Nobody is answered any more, but for that it is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future in self._answers.values():
            _fail(future, QueueLost(f"queue {self.machine.name}: {why}"))
        self._answers.clear()


class HostedReader(Hosted):
    """A reader: what is put and taken are the numbers of batches, from first to last."""

    def __init__(
        self, uid: str, machine: ItemQueue, batching: Batching, queues: Queues, fed: int = 0
    ) -> None:
        super().__init__(uid, machine, queues)
        self.batching = batching
        self.fed = fed
        self._reader: BatchReader | None = None
        self._feed()

    def handle(self, event: Event) -> None:
        super().handle(event)
        self._feed()

    def _feed(self) -> None:
        """Batches come as fast as they are taken."""
        while self.fed < self.batching.total and self.machine.size < _AHEAD:
            now = time.monotonic()
            put = Put(_NOBODY, self.fed, _NOBODY, 0, now)
            self.fed += 1
            self._act(self.machine.handle(put, now))
        if self.fed == self.batching.total and not self.machine.closed:
            super().handle(Close())

    def stats(self) -> dict[str, Any]:
        found = super().stats()
        for key in ("bytes", "capacity", "nbytes", "closed", "lost", "size", "put"):
            del found[key]
        return {
            "batches": self.batching.total,
            "left": self.batching.total - self.machine.counts.acknowledged,
            **found,
        }

    async def payload(self, item: Item, near: bool) -> dict[str, Any]:
        """The rows of the batch, read in a thread: they may come from other workers."""
        if self._reader is None:
            self._reader = self._queues.batch_reader(self.batching)
        parcel = await asyncio.to_thread(self._reader.parcel, item.request)
        return {"parcel": enveloped(parcel)}


class Queues:
    """What a worker has of queues: those it keeps, and items of those and of others."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service
        #: this store: a worker that is started again at the same address is another
        self.store = f"{service.address} {uuid.uuid4().hex[:8]}"
        self._hosted: dict[str, Hosted] = {}
        self._stored: dict[Key, np.ndarray | Lent] = {}
        #: (queue, putter) -> the numbers of items whose lent memory is not needed any more
        self._freed: dict[tuple[str, str], list[int]] = {}
        #: address -> what the store there need not keep, and has not been told
        self._owed: dict[str, list[Key]] = defaultdict(list)
        self._tellers: dict[str, asyncio.Task[None]] = {}
        self.moves = Moves(self, service)
        self.handlers = {
            **self.moves.handlers,
            "dtrain_queue_begin": self.begin,
            "dtrain_queue_put": self.put,
            "dtrain_queue_get": self.get,
            "dtrain_queue_ack": self.ack,
            "dtrain_queue_withdraw": self.withdraw,
            "dtrain_queue_release": self.release,
            "dtrain_queue_close": self.close_queue,
            "dtrain_queue_stats": self.stats,
            "dtrain_queue_item": self.item,
            "dtrain_queue_drop": self.drop,
            "dtrain_queue_leave": self.leave,
            "dtrain_queue_store_gone": self.store_gone,
            "dtrain_queue_forget": self.forget,
        }

    def close(self) -> None:
        """The worker closes: whoever waits here is told."""
        for hosted in self._hosted.values():
            hosted.end("the worker that kept it has closed")
        for teller in self._tellers.values():
            teller.cancel()
        self._hosted.clear()
        self._stored.clear()
        self.moves.close()

    # -- also for the threads of this worker -----------------------------------------------------

    def lay(self, key: Key, parcel: np.ndarray | Lent) -> None:
        """Store an item's bytes; nobody writes to them from now on."""
        self._stored[key] = parcel

    def lift(self, key: Key) -> None:
        """An item that was laid down is not needed."""
        stored = self._stored.pop(key, None)
        if isinstance(stored, Lent):
            stored.close()
            queue, putter, request = key
            freed = self._freed.setdefault((queue, putter), [])
            freed.append(request)
            del freed[:-_MOST_LENT]

    def stored(self, key: Key) -> np.ndarray | Lent | None:
        return self._stored.get(key)

    @property
    def _lent(self) -> int:
        """Items for each of which a descriptor is open."""
        return sum(isinstance(stored, Lent) for stored in self._stored.values())

    def batch_reader(self, batching: Batching) -> BatchReader:
        return BatchReader(batching, self._service)

    # -- queues that come and go -----------------------------------------------------------------

    def keeps(self, queue: str) -> bool:
        return queue in self._hosted

    def kept(self) -> list[tuple[str, Hosted]]:
        return list(self._hosted.items())

    def adopt_queue(
        self,
        queue: str,
        machine: ItemQueue,
        batching: bytes | None,
        fed: int = 0,
        items: Mapping[tuple[str, int], np.ndarray] = MappingProxyType({}),
    ) -> Hosted:
        """Keep a queue, or a reader, from now on; its items are told by putter and request."""
        for (putter, request), parcel in items.items():
            self.lay((queue, putter, request), parcel)
        if batching is not None:
            hosted: Hosted = HostedReader(queue, machine, loads(batching), self, fed)
        else:
            hosted = Hosted(queue, machine, self)
        self._hosted[queue] = hosted
        return hosted

    def release_queue(self, queue: str) -> tuple[Hosted, dict[tuple[str, int], np.ndarray | Lent]]:
        """Keep a queue no longer: what there was of it, and of its items here."""
        hosted = self._at(queue)
        del self._hosted[queue]
        hosted.end("it is moving to another worker")
        keys = [key for key in self._stored if key[0] == queue]
        return hosted, {key[1:]: self._stored.pop(key) for key in keys}

    # -- handlers: in the event loop -------------------------------------------------------------

    def begin(
        self, queue: str, name: str, capacity: int, nbytes: int, batching: bytes | None = None
    ) -> None:
        """Keep a queue, or a reader; begun twice it is begun once."""
        if queue in self._hosted:
            return
        if batching is not None:
            capacity, nbytes = _AHEAD, 1
        self.adopt_queue(queue, ItemQueue(name, capacity, nbytes), batching)

    async def put(
        self,
        queue: str,
        holder: str,
        request: int,
        seconds: float,
        wait: float,
        nbytes: int,
        store: str | None = None,
        item: bytes | np.ndarray | None = None,
        lent: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """A place for an item, which comes along, is ``lent``, or lies at ``store``.

        The answer is "send" where what is lent cannot be opened, or too many are already.
        """
        hosted = self._at(queue)
        fresh = hosted.fresh(holder, request)
        key = (queue, holder, request)
        if fresh and lent is not None:
            many = self._lent >= _MOST_LENT
            borrowed = None if many else Lent.borrowed(lent)
            if borrowed is None:
                return {"kind": "send", "near": many}
            self.lay(key, borrowed)
        elif fresh and item is not None:
            self.lay(key, opened(item))
        elif fresh and store is None:
            raise ProtocolError(f"queue {queue}: a put without an item or where it lies")
        where = self.store if store is None else store
        hosted.stores.add(where)
        put = Put(holder, request, where, nbytes, time.monotonic() + seconds)
        try:
            told = _told(await hosted.ask(put, wait))
            if told is not None and lent is not None:
                told["free"] = self._freed.pop((queue, holder), [])
            return told
        except DTrainError:
            if fresh:
                self.lift(key)
            raise

    async def get(
        self,
        queue: str,
        holder: str,
        request: int,
        seconds: float,
        wait: float,
        acknowledges: int | None,
        bare: bool = False,
        near: bool = False,
    ) -> dict[str, Any] | None:
        """The next item; its bytes come along if they are here, and it is not wanted ``bare``.

        To whoever is ``near``, on this machine, they are lent.
        """
        hosted = self._at(queue)
        get = Get(holder, request, time.monotonic() + seconds, acknowledges)
        answer = await hosted.ask(get, wait)
        told = _told(answer)
        if isinstance(answer, Leased) and told is not None and not bare:
            told.update(await hosted.payload(answer.item, near))
        return told

    async def ack(self, queue: str, holder: str, request: int, item: int, wait: float) -> Any:
        return _told(await self._at(queue).ask(Ack(holder, request, item), wait))

    async def withdraw(self, queue: str, holder: str, request: int, wait: float) -> Any:
        return _told(await self._at(queue).ask(Withdraw(holder, request), wait))

    def release(self, queue: str, holder: str) -> bool:
        """What a holder has not acknowledged is handed out again."""
        self._at(queue).handle(Release(holder))
        return True

    def close_queue(self, queue: str) -> bool:
        self._at(queue).handle(Close())
        return True

    def stats(self, queue: str) -> dict[str, Any]:
        return self._at(queue).stats()

    async def item(self, queue: str, putter: str, request: int) -> dict[str, Any]:
        """The bytes of an item that is stored here."""
        stored = self.stored((queue, putter, request))
        if stored is None:
            stored = self.moves.stored(queue, putter, request)
        if stored is None:
            raise QueueLost(
                f"queue {queue}: item {request} of {putter} is not at {self._service.address}"
            )
        return await _handed(stored, near=False)

    def drop(self, keys: list[Key]) -> bool:
        for queue, putter, request in keys:
            self.lift((queue, putter, request))
        return True

    def leave(self, queue: str, lives: list[str]) -> bool:
        """Handles are closed, or their clients have died."""
        hosted = self._hosted.get(queue)
        if hosted is not None:
            for life in lives:
                hosted.leave(life)
        for key in [k for k in self._freed if k[0] == queue and k[1].partition("/")[0] in lives]:
            del self._freed[key]
        return True

    def store_gone(self, address: str) -> bool:
        """A worker has died that may have stored items of queues here."""
        self._owed.pop(address, None)
        for hosted in self._hosted.values():
            hosted.lose_store(address)
        return True

    def forget(self, queue: str, why: str) -> bool:
        """A queue is over, here or elsewhere: nothing of it stays on this worker."""
        hosted = self._hosted.pop(queue, None)
        if hosted is not None:
            hosted.end(why)
        self.moves.forget(queue)
        for key in [key for key in self._stored if key[0] == queue]:
            del self._stored[key]
        for pair in [pair for pair in self._freed if pair[0] == queue]:
            del self._freed[pair]
        return True

    def _at(self, queue: str) -> Hosted:
        if queue not in self._hosted:
            raise QueueLost(f"queue {queue}: not at {self._service.address} any more")
        return self._hosted[queue]

    # -- what other stores need not keep ---------------------------------------------------------

    def drop_at(self, store: str, key: Key) -> None:
        if store == self.store:
            self.lift(key)
        elif store != _NOBODY:
            address = _address(store)
            self._owed[address].append(key)
            if address not in self._tellers:
                teller = asyncio.ensure_future(self._tell(address))
                self._tellers[address] = teller
                teller.add_done_callback(lambda _: self._tellers.pop(address, None))

    async def _tell(self, address: str) -> None:
        """Until the store has heard, or is gone: it would keep the bytes for ever."""
        deadline = settings().call_deadline
        while keys := self._owed.pop(address, None):
            try:
                await self._service.ask(address, "dtrain_queue_drop", deadline, keys=keys)
            except (OSError, DTrainError) as error:
                logger.debug("%s: not told to drop %d items: %s", address, len(keys), error)
                self._owed[address] = [*keys, *self._owed.pop(address, [])]
                await asyncio.sleep(_RETRY)


async def _handed(stored: np.ndarray | Lent, near: bool) -> dict[str, Any]:
    """An item's bytes as they go to whoever gets it, or how they are borrowed."""
    if isinstance(stored, Lent):
        if near:
            return {"lent": stored.told()}
        stored = await asyncio.to_thread(stored.read)
    return {"parcel": enveloped(stored)}


def _fail(future: asyncio.Future[Reply], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Maybe nobody waits for it at this moment.
        future.exception()


def _sender(event: Put | Get | Ack | Withdraw) -> str:
    if isinstance(event, Put):
        return event.putter
    return event.holder if isinstance(event, Withdraw) else event.getter


def _address(store: str) -> str:
    return store.partition(" ")[0]


#: How an answer is called on its way.
_WORDS: dict[type, str] = {
    Stored: "stored",
    Full: "full",
    Refused: "refused",
    Leased: "leased",
    Empty: "empty",
    Closed: "closed",
    Acknowledged: "acknowledged",
    Withdrawn: "withdrawn",
}


def _told(answer: Reply | None) -> dict[str, Any] | None:
    if answer is None:
        return None
    told: dict[str, Any] = {"kind": _WORDS[type(answer)]}
    if isinstance(answer, Refused):
        told["problem"] = answer.problem
    elif isinstance(answer, Leased):
        item = answer.item
        told.update(item=item.number, again=answer.again)
        told.update(store=item.store, putter=item.putter, request=item.request)
    return told
