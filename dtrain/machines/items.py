"""A bounded queue that is shared by name, and whose items are leased.

The machine knows of an item where its bytes lie (its *store*, a worker) and how many they are; it
never sees them.  A putter lays the bytes down at the store first, under its own name and the
number of its request, and then asks for a place; from the answer :class:`Stored` on the item is
the queue's, whatever becomes of the putter.  A getter is leased an item, and acknowledges it with
its next request; what it has not acknowledged when it dies is handed out again.

A *holder* asks for one thing at a time, and numbers its requests from 0 (puts and gets alike), so
that one that comes again is recognised: it is answered as before, or keeps its place in the line.
A client whose threads ask at the same time is as many holders.  The name of a holder or of a
store stands for one life of it; it never comes again.

Items are numbered as they are stored, and whoever gets next gets the lowest number that nobody
holds: first in, first out, but for what came back.

A queue moves to another worker as it is, with all that is known of its holders: whoever waits asks
again there, and keeps its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dtrain.errors import FencedError, ProtocolError, SpecError
from dtrain.machines.departed import Departed


@dataclass(frozen=True, slots=True)
class Item:
    """One item: its bytes lie at ``store``, under the putter's name and the request's number."""

    number: int
    store: str
    putter: str
    request: int
    nbytes: int


# -- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Put:
    """``putter`` has laid ``nbytes`` down at ``store``; it waits for a place until ``until``."""

    putter: str
    request: int
    store: str
    nbytes: int
    until: float


@dataclass(frozen=True, slots=True)
class Get:
    """``getter`` wants an item, and waits for it until ``until``.

    ``acknowledges`` is the number of an item that it holds and is done with.
    """

    getter: str
    request: int
    until: float
    acknowledges: int | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """``getter`` is done with an item that it holds, and wants no other."""

    getter: str
    request: int
    item: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """``holder`` gives up its request of that number, answered or not, arrived or not.

    A wait ends; an item that was leased in answer goes back.  What was stored stays stored, and
    what was acknowledged stays acknowledged: the answer says so.
    """

    holder: str
    request: int


@dataclass(frozen=True, slots=True)
class Release:
    """``getter`` gives back all that it holds; it cannot be had, or not now."""

    getter: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A client or a worker has died, or has left: it holds nothing and stores nothing any more."""

    holder: str


@dataclass(frozen=True, slots=True)
class Close:
    """No more is put; what is there may still be got.  Closing twice is closing once."""


@dataclass(frozen=True, slots=True)
class Relocated:
    """The bytes of these items, each told by its putter and request, lie at ``store`` now."""

    items: frozenset[tuple[str, int]]
    store: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The machine goes on where the clock is so many seconds ahead of the one that it had."""

    later: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


_Request = Put | Get | Ack | Withdraw
Event = Put | Get | Ack | Withdraw | Release | Gone | Close | Relocated | Resumed | Tick

# -- answers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """The item is the queue's."""

    item: Item


@dataclass(frozen=True, slots=True)
class Full:
    """There was no place until the deadline."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The item cannot be taken, in words: it is too large, or its store is gone."""

    problem: str


@dataclass(frozen=True, slots=True)
class Leased:
    """The item is the getter's until it acknowledges it; ``again``: it was leased before."""

    item: Item
    again: bool = False


@dataclass(frozen=True, slots=True)
class Empty:
    """There was no item until the deadline."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The queue is closed; to a getter: and nothing will come any more."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    item: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The request has come to nothing, and will not."""


Reply = Stored | Full | Refused | Leased | Empty | Closed | Acknowledged | Withdrawn

# -- commands -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a request, be it the one that has just come or one that has waited."""

    holder: str
    request: int
    answer: Reply


@dataclass(frozen=True, slots=True)
class Drop:
    """The bytes that ``putter`` has laid down at ``store`` for its request are not needed."""

    store: str
    putter: str
    request: int


Command = Answer | Drop


@dataclass
class Counts:
    """What became of the items: ``put = acknowledged + lost`` + those queued or leased.

    Attributes
    ----------
    put : int
        Items stored.
    got : int
        Leases, the repeated ones of an item too.
    acknowledged : int
        Items that are done with.
    redelivered : int
        Leases of items that were leased before: to one who died, withdrew or gave them back.
    lost : int
        Items whose store died before anybody had acknowledged them.
    duplicates : int
        Requests that came again, and were recognised.
    """

    put: int = 0
    got: int = 0
    acknowledged: int = 0
    redelivered: int = 0
    lost: int = 0
    duplicates: int = 0


@dataclass
class _Holder:
    """What is known of one that asks."""

    #: its last request, and the answer to it; None: it waits
    last: _Request | None = None
    answer: Reply | None = None
    #: what it has acknowledged last; it does not know, if it withdrew the request that did
    done: int | None = None
    #: number -> item that it has leased, in the order of the leases
    held: dict[int, Item] = field(default_factory=dict)


class ItemQueue:
    """The items of one queue, who holds them, and who waits.

    Those that wait are served in the order in which they came, putters and getters each in their
    own line: a small item does not overtake a large one that has no place yet.

    Parameters
    ----------
    name : str
        Only to be told.
    capacity : int
        Items that may be queued.  Those that come back are queued in any case.
    nbytes : int
        Bytes of all items, the leased ones too: their memory is in use until they are
        acknowledged.

    Raises
    ------
    SpecError
        A bound is below 1.
    """

    def __init__(self, name: str, capacity: int, nbytes: int) -> None:
        for key, found in (("capacity", capacity), ("nbytes", nbytes)):
            if found < 1:
                raise SpecError(f"queue {name}: {key}: found {found}, expected 1 or more")
        self.name = name
        self.capacity = capacity
        self.nbytes = nbytes
        self.counts = Counts()
        self.closed = False
        #: bytes of all items that are queued or leased
        self.used = 0
        self._numbered = 0
        #: a heap of (number, item) that nobody holds
        self._queued: list[tuple[int, Item]] = []
        #: numbers of the items that are queued or leased, and were leased before
        self._again: set[int] = set()
        #: numbers of the items that are leased, and whose store is gone
        self._stranded: set[int] = set()
        #: how many items are leased
        self._leased = 0
        self._holders: dict[str, _Holder] = {}
        #: who waits, in order: holder -> its request
        self._putters: dict[str, Put] = {}
        self._getters: dict[str, Get] = {}
        self._gone = Departed()

    # -- what others ask -------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Items that are there to be got."""
        return len(self._queued)

    @property
    def leased(self) -> int:
        """Items that somebody holds and has not acknowledged."""
        return self._leased

    @property
    def drained(self) -> bool:
        """Closed, and every item is acknowledged or lost."""
        return self.closed and not self._queued and not self._leased

    @property
    def deadline(self) -> float | None:
        """When the next wait runs out: a :class:`Tick` is due then."""
        waits = [put.until for put in self._putters.values()]
        waits += [get.until for get in self._getters.values()]
        return min(waits, default=None)

    def held(self, holder: str) -> tuple[Item, ...]:
        """The items that a holder has leased, in the order of the leases."""
        known = self._holders.get(holder)
        return tuple(known.held.values()) if known else ()

    def asked(self) -> dict[str, Put | Get | Ack | Withdraw]:
        """What each holder has asked for last."""
        return {n: holder.last for n, holder in self._holders.items() if holder.last is not None}

    def stored_at(self, store: str) -> frozenset[tuple[str, int]]:
        """The items whose bytes are to be kept there: each its putter and its request."""
        every: list[Item | Put] = [item for _, item in self._queued]
        every += self._putters.values()
        for holder in self._holders.values():
            every += holder.held.values()
        return frozenset((of.putter, of.request) for of in every if of.store == store)

    def waiting(self) -> tuple[str, ...]:
        """Who waits: the putters in their order, then the getters in theirs."""
        return (*self._putters, *self._getters)

    # -- the only mutator ------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """Answers to the event's sender and to others that have waited; and what to let go of.

        Raises
        ------
        FencedError
            The sender, or the store of a put, has died.
        ProtocolError
            A request out of its order, or an item that the sender does not hold.
        """
        return _HANDLERS[type(event)](self, event, now)

    # -- requests --------------------------------------------------------------------------

    def _repeated(self, name: str, event: _Request) -> tuple[_Holder, list[Command] | None]:
        """The holder; and, if the request came again, what is answered.  Checks its number."""
        told = f"queue {self.name}: {type(event).__name__} {event.request} of {name}"
        if name in self._gone:
            raise FencedError(f"{told}, who is gone")
        holder = self._holders.get(name) or _Holder()
        last = holder.last
        if last is not None and event.request == last.request:
            withdrawn = isinstance(last, Withdraw)
            if event == last or withdrawn:
                self.counts.duplicates += 1
                answer = holder.answer
                return holder, [] if answer is None else [Answer(name, last.request, answer)]
            if not isinstance(event, Withdraw):
                raise ProtocolError(f"{told}: found {event}, expected {last} once more")
            return holder, None
        newest = -1 if last is None else last.request
        if last is not None and holder.answer is None:
            raise ProtocolError(f"{told}: expected request {newest} once more, which waits")
        if event.request != newest + 1:
            raise ProtocolError(f"{told}: expected request {newest + 1}")
        return holder, None

    def _take(self, name: str, holder: _Holder, event: _Request) -> None:
        """A request is legal and new: nothing before this line has changed anything."""
        self._holders[name] = holder
        holder.last, holder.answer = event, None

    def _answer(self, name: str, answer: Reply) -> Answer:
        holder = self._holders[name]
        assert holder.last is not None
        holder.answer = answer
        return Answer(name, holder.last.request, answer)

    def _put(self, event: Put, now: float) -> list[Command]:
        holder, repeat = self._repeated(event.putter, event)
        if repeat is not None:
            return repeat
        if event.nbytes < 0:
            raise ProtocolError(f"queue {self.name}: found an item of {event.nbytes} bytes")
        if event.store in self._gone:
            raise FencedError(
                f"queue {self.name}: Put {event.request} of {event.putter}: "
                f"its store {event.store} is gone"
            )
        self._take(event.putter, holder, event)
        if event.nbytes > self.nbytes:
            words = (
                f"queue {self.name}: found an item of {event.nbytes} bytes, "
                f"expected at most {self.nbytes}, which is all that the queue may hold"
            )
            return self._turned_away(event, Refused(words))
        if self.closed:
            return self._turned_away(event, Closed())
        self._putters[event.putter] = event
        commands = self._serve()
        if event.putter in self._putters and event.until <= now:
            commands += self._turned_away(event, Full())
        return commands

    def _get(self, event: Get, now: float) -> list[Command]:
        holder, repeat = self._repeated(event.getter, event)
        if repeat is not None:
            return repeat
        if event.acknowledges is not None:
            self._check_held(holder, event.getter, event.acknowledges)
        self._take(event.getter, holder, event)
        commands = self._done(holder, event.acknowledges)
        self._getters[event.getter] = event
        commands += self._serve()
        if event.getter in self._getters and event.until <= now:
            del self._getters[event.getter]
            commands.append(self._answer(event.getter, Empty()))
        return commands

    def _ack(self, event: Ack, now: float) -> list[Command]:
        holder, repeat = self._repeated(event.getter, event)
        if repeat is not None:
            return repeat
        self._check_held(holder, event.getter, event.item)
        self._take(event.getter, holder, event)
        answer = self._answer(event.getter, Acknowledged(event.item))
        return [answer, *self._done(holder, event.item), *self._serve()]

    def _check_held(self, holder: _Holder, getter: str, number: int) -> None:
        if number not in holder.held and number != holder.done:
            raise ProtocolError(
                f"queue {self.name}: {getter} acknowledges item {number}: "
                f"expected one that it holds, which are {list(holder.held)}"
            )

    def _withdraw(self, event: Withdraw, now: float) -> list[Command]:
        holder, repeat = self._repeated(event.holder, event)
        if repeat is not None:
            return repeat
        answer = holder.answer if holder.last and holder.last.request == event.request else None
        commands: list[Command] = []
        if isinstance(answer, Leased) and answer.item.number in holder.held:
            self._back([holder.held.pop(answer.item.number)])
        kept = answer if isinstance(answer, Stored | Acknowledged) else Withdrawn()
        self._getters.pop(event.holder, None)
        put = self._putters.pop(event.holder, None)
        if put is not None:
            commands += self._drop(put.store, put.putter, put.request)
        self._take(event.holder, holder, event)
        return [self._answer(event.holder, kept), *commands, *self._serve()]

    # -- what befalls ----------------------------------------------------------------------

    def _release(self, event: Release, now: float) -> list[Command]:
        holder = self._holders.get(event.getter)
        if holder is None or not holder.held:
            return []
        back, holder.held = list(holder.held.values()), {}
        self._back(back)
        return self._serve()

    def _die(self, event: Gone, now: float) -> list[Command]:
        if not self._gone.add(event.holder):
            return []
        commands: list[Command] = []
        put = self._putters.pop(event.holder, None)
        if put is not None:
            commands += self._drop(put.store, put.putter, put.request)
        self._getters.pop(event.holder, None)
        # What somebody holds it may have read already: that is lost only when it comes back.
        held = (item for holder in self._holders.values() for item in holder.held.values())
        self._stranded.update(item.number for item in held if item.store == event.holder)
        lost = [item for _, item in self._queued if item.store == event.holder]
        self._queued = [pair for pair in self._queued if pair[1].store != event.holder]
        heapq.heapify(self._queued)
        for item in lost:
            self._lose(item)
        for put in [p for p in self._putters.values() if p.store == event.holder]:
            del self._putters[put.putter]
            words = f"queue {self.name}: the item's store {put.store} is gone"
            commands.append(self._answer(put.putter, Refused(words)))
        holder = self._holders.pop(event.holder, None)
        if holder is not None:
            self._back(list(holder.held.values()))
        return commands + self._serve()

    def _close(self, event: Close, now: float) -> list[Command]:
        self.closed = True
        commands: list[Command] = []
        for put in list(self._putters.values()):
            commands += self._turned_away(put, Closed())
        return commands + self._serve()

    def _relocate(self, event: Relocated, now: float) -> list[Command]:
        found = set()

        def moved(item: Item) -> Item:
            if (item.putter, item.request) not in event.items:
                return item
            found.add((item.putter, item.request))
            self._stranded.discard(item.number)
            return replace(item, store=event.store)

        self._queued = [(number, moved(item)) for number, item in self._queued]
        for holder in self._holders.values():
            holder.held = {number: moved(item) for number, item in holder.held.items()}
        for name, put in self._putters.items():
            if (name, put.request) in event.items:
                found.add((name, put.request))
                self._putters[name] = self._holders[name].last = replace(put, store=event.store)
        for holder in self._holders.values():
            # What was answered is answered so again, but for where it lies.
            answer = holder.answer
            if isinstance(answer, Stored | Leased):
                key = answer.item.putter, answer.item.request
                if key in found:
                    holder.answer = replace(answer, item=replace(answer.item, store=event.store))
        # Whoever wanted these is done with them meanwhile.
        return [Drop(event.store, *key) for key in sorted(event.items - found)]

    def _resume(self, event: Resumed, now: float) -> list[Command]:
        for name, put in self._putters.items():
            put = replace(put, until=put.until + event.later)
            self._putters[name] = self._holders[name].last = put
        for name, get in self._getters.items():
            get = replace(get, until=get.until + event.later)
            self._getters[name] = self._holders[name].last = get
        return []

    def _tick(self, event: Tick, now: float) -> list[Command]:
        commands: list[Command] = []
        for put in [p for p in self._putters.values() if p.until <= now]:
            commands += self._turned_away(put, Full())
        for get in [g for g in self._getters.values() if g.until <= now]:
            del self._getters[get.getter]
            commands.append(self._answer(get.getter, Empty()))
        # Whoever stood behind a large item may have a place now.
        return commands + self._serve()

    # -- what follows ----------------------------------------------------------------------

    def _serve(self) -> list[Command]:
        """Let in whom there is a place for, and hand out what is there."""
        commands: list[Command] = []
        while True:
            served = self._let_in() or self._hand_out()
            if not served:
                break
            commands += served
        return commands + self._tell_the_end()

    def _let_in(self) -> list[Command]:
        """The first putter's item, if there is a place for it."""
        put = next(iter(self._putters.values()), None)
        if put is None or self.size >= self.capacity or self.used + put.nbytes > self.nbytes:
            return []
        del self._putters[put.putter]
        item = Item(self._numbered, put.store, put.putter, put.request, put.nbytes)
        self._numbered += 1
        self.counts.put += 1
        self.used += item.nbytes
        heapq.heappush(self._queued, (item.number, item))
        return [self._answer(put.putter, Stored(item))]

    def _hand_out(self) -> list[Command]:
        """The oldest item, to the first getter."""
        getter = next(iter(self._getters), None)
        if getter is None or not self._queued:
            return []
        del self._getters[getter]
        number, item = heapq.heappop(self._queued)
        again = number in self._again
        self._again.add(number)
        self._holders[getter].held[number] = item
        self._leased += 1
        self.counts.got += 1
        self.counts.redelivered += again
        return [self._answer(getter, Leased(item, again))]

    def _tell_the_end(self) -> list[Command]:
        """Getters for whom nothing can come any more; what others hold may still come back."""
        if not self.closed or self._queued:
            return []
        over = [g for g in self._getters if len(self._holders[g].held) == self._leased]
        for getter in over:
            del self._getters[getter]
        return [self._answer(getter, Closed()) for getter in over]

    def _done(self, holder: _Holder, number: int | None) -> list[Command]:
        """An item that its holder has acknowledged."""
        if number is None or number == holder.done:
            return []
        holder.done = number
        item = holder.held.pop(number)
        self._leased -= 1
        self._forget(item)
        self.counts.acknowledged += 1
        return self._drop(item.store, item.putter, item.request)

    def _back(self, items: list[Item]) -> None:
        """Items that nobody holds any more: to their old places, which are at the front."""
        for item in items:
            self._leased -= 1
            if item.number in self._stranded:
                self._lose(item)
            else:
                heapq.heappush(self._queued, (item.number, item))

    def _lose(self, item: Item) -> None:
        self._forget(item)
        self.counts.lost += 1

    def _forget(self, item: Item) -> None:
        self.used -= item.nbytes
        self._again.discard(item.number)
        self._stranded.discard(item.number)

    def _turned_away(self, put: Put, answer: Reply) -> list[Command]:
        self._putters.pop(put.putter, None)
        return [
            self._answer(put.putter, answer),
            *self._drop(put.store, put.putter, put.request),
        ]

    def _drop(self, store: str, putter: str, request: int) -> list[Command]:
        return [] if store in self._gone else [Drop(store, putter, request)]


_HANDLERS: dict[type, Callable[[ItemQueue, Any, float], list[Command]]] = {
    Put: ItemQueue._put,
    Get: ItemQueue._get,
    Ack: ItemQueue._ack,
    Withdraw: ItemQueue._withdraw,
    Release: ItemQueue._release,
    Gone: ItemQueue._die,
    Close: ItemQueue._close,
    Relocated: ItemQueue._relocate,
    Resumed: ItemQueue._resume,
    Tick: ItemQueue._tick,
}
