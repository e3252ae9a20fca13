"""The shared queue: bounded, fair, leased; nothing is lost and nothing comes twice without a death.

The schedules are checked by a plain account of what the answers say, kept beside the machine.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest

from dtrain.errors import FencedError, SpecError
from dtrain.machines.departed import MOST, Departed
from dtrain.machines.items import (
    Ack,
    Acknowledged,
    Answer,
    Close,
    Closed,
    Drop,
    Empty,
    Full,
    Get,
    Gone,
    Item,
    ItemQueue,
    Leased,
    Put,
    Refused,
    Release,
    Relocated,
    Resumed,
    Stored,
    Tick,
    Withdraw,
    Withdrawn,
)
from tests.machines.helpers import ignores, refuses
from tests.sim import state_of

LATER = 100.0


def put(putter, request, nbytes=1, store="w", until=LATER):
    return Put(putter, request, store, nbytes, until)


def get(getter, request, acknowledges=None, until=LATER):
    return Get(getter, request, until, acknowledges)


def tell(queue, *events, now=0.0):
    """Handle events one after the other; returns all commands."""
    return [command for event in events for command in queue.handle(event, now)]


def answers(commands):
    return [(c.holder, c.answer) for c in commands if isinstance(c, Answer)]


def item(number, putter="p", request=None, nbytes=1, store="w"):
    return Item(number, store, putter, number if request is None else request, nbytes)


def full(n=2, capacity=2):
    queue = ItemQueue("q", capacity, 100)
    tell(queue, *(put("p", k) for k in range(n)))
    return queue


# -- in words ----------------------------------------------------------------------------------


def test_items_are_got_in_the_order_of_the_puts_and_acknowledged_by_the_next_get():
    queue = full()
    assert answers(tell(queue, get("g", 0))) == [("g", Leased(item(0)))]
    assert (queue.size, queue.leased, queue.used) == (1, 1, 2)
    commands = tell(queue, get("g", 1, acknowledges=0))
    assert commands == [Drop("w", "p", 0), Answer("g", 1, Leased(item(1)))]
    assert tell(queue, Ack("g", 2, 1)) == [Answer("g", 2, Acknowledged(1)), Drop("w", "p", 1)]
    assert (queue.size, queue.leased, queue.used) == (0, 0, 0)
    assert queue.counts.acknowledged == 2


def test_a_full_queue_lets_the_putters_wait_in_their_order():
    queue = full()
    assert tell(queue, put("a", 0), put("b", 0)) == []
    assert queue.waiting() == ("a", "b")
    # What is leased has left the queue.
    assert answers(tell(queue, get("g", 0))) == [
        ("g", Leased(item(0))),
        ("a", Stored(item(2, "a", 0))),
    ]
    assert answers(tell(queue, get("g", 1, acknowledges=0)))[1] == ("b", Stored(item(3, "b", 0)))


def test_a_small_item_does_not_overtake_a_large_one():
    queue = ItemQueue("q", 10, 10)
    tell(queue, put("p", 0, nbytes=6))
    assert tell(queue, put("large", 0, nbytes=5), put("small", 0, nbytes=1)) == []
    # The bytes of a leased item are still in use.
    assert [a.__class__ for _, a in answers(tell(queue, get("g", 0)))] == [Leased]
    assert [who for who, _ in answers(tell(queue, Ack("g", 1, 0)))] == ["g", "large", "small"]


def test_whoever_stands_behind_a_large_item_goes_on_when_that_gives_up():
    queue = ItemQueue("q", 10, 10)
    tell(queue, put("p", 0, nbytes=6), put("large", 0, nbytes=5, until=1.0), put("small", 0))
    assert queue.deadline == 1.0
    assert tell(queue, Tick(), now=0.9) == []
    assert answers(tell(queue, Tick(), now=1.0)) == [
        ("large", Full()),
        ("small", Stored(item(1, "small", 0))),
    ]


def test_an_item_larger_than_the_queue_is_refused_with_what_was_found_and_expected():
    queue = ItemQueue("q", 10, 10)
    refused, drop = tell(queue, put("p", 0, nbytes=11))
    assert "found an item of 11 bytes, expected at most 10" in refused.answer.problem
    assert drop == Drop("w", "p", 0)
    assert answers(tell(queue, put("p", 1, nbytes=10)))[0][1] == Stored(
        item(0, request=1, nbytes=10)
    )


@pytest.mark.parametrize(("capacity", "nbytes"), [(0, 1), (1, 0), (-1, 5)])
def test_bounds_below_one_are_refused(capacity, nbytes):
    with pytest.raises(SpecError, match="expected 1 or more"):
        ItemQueue("q", capacity, nbytes)


def test_who_does_not_wait_is_answered_at_once():
    queue = full()
    assert answers(tell(queue, put("a", 0, until=0.0))) == [("a", Full())]
    queue = ItemQueue("q", 1, 1)
    assert answers(tell(queue, get("g", 0, until=0.0))) == [("g", Empty())]
    assert queue.waiting() == ()


def test_getters_wait_in_their_order_each_with_its_own_deadline():
    queue = ItemQueue("q", 5, 5)
    assert tell(queue, get("a", 0, until=1.0), get("b", 0, until=9.0), get("c", 0)) == []
    assert answers(tell(queue, Tick(), now=1.0)) == [("a", Empty())]
    assert answers(tell(queue, put("p", 0), now=2.0)) == [
        ("p", Stored(item(0))),
        ("b", Leased(item(0))),
    ]


def test_what_a_dead_getter_held_is_handed_out_again_first_and_in_order():
    queue = full(5, 5)
    tell(queue, get("a", 0), get("b", 0), get("a", 1))
    assert [i.number for i in queue.held("a")] == [0, 2]
    assert tell(queue, Gone("a"), Gone("a")) == []
    got = answers(tell(queue, get("c", 0), get("c", 1), get("c", 2)))
    assert [a for _, a in got] == [Leased(item(0), True), Leased(item(2), True), Leased(item(3))]
    assert queue.counts.redelivered == 2
    refuses(queue, get("a", 2), FencedError, "a, who is gone")


def test_a_release_goes_to_whoever_waits():
    queue = full(1)
    tell(queue, get("a", 0), get("b", 0))
    assert answers(tell(queue, Release("a"))) == [("b", Leased(item(0), True))]
    ignores(queue, Release("a"))
    ignores(queue, Release("nobody"))


def test_items_of_a_dead_store_are_lost_unless_their_getter_has_read_them():
    queue = ItemQueue("q", 5, 5)
    tell(queue, put("p", 0, store="w"), put("p", 1, store="w"), put("p", 2, store="v"))
    tell(queue, put("p", 3, store="w"), get("a", 0), get("b", 0))
    assert tell(queue, Gone("w")) == []
    assert queue.counts.lost == 1
    assert tell(queue, Ack("a", 1, 0)) == [Answer("a", 1, Acknowledged(0))]
    assert answers(tell(queue, Release("b"), get("b", 1))) == [("b", Leased(item(2, store="v")))]
    assert (queue.counts.lost, queue.counts.acknowledged, queue.used) == (2, 1, 1)
    refuses(queue, put("p", 4, store="w"), FencedError, "its store w is gone")


def test_a_put_that_waits_is_told_that_its_store_is_gone():
    queue = full()
    tell(queue, put("a", 0, store="v"))
    ((who, answer),) = answers(tell(queue, Gone("v")))
    assert who == "a"
    assert "store v is gone" in answer.problem
    assert tell(queue, put("a", 0, store="v")) == [Answer("a", 0, answer)]


def test_the_putter_may_die_once_its_item_is_stored_and_not_before():
    queue = full()
    tell(queue, put("a", 0))
    assert tell(queue, Gone("p")) == []
    assert queue.size == 2
    assert tell(queue, Gone("a")) == [Drop("w", "a", 0)]
    assert queue.waiting() == ()


def test_a_closed_queue_is_drained_and_then_says_so():
    queue = full()
    tell(queue, put("a", 0), get("g", 0), put("b", 0))
    assert queue.waiting() == ("b",)
    assert tell(queue, Close()) == [Answer("b", 0, Closed()), Drop("w", "b", 0)]
    ignores(queue, Close())
    assert answers(tell(queue, put("c", 0))) == [("c", Closed())]
    assert isinstance(answers(tell(queue, get("g", 1, acknowledges=0)))[0][1], Leased)
    assert isinstance(answers(tell(queue, get("h", 0)))[0][1], Leased)
    # What another holds may still come back.
    assert tell(queue, get("g", 2, acknowledges=1)) == [Drop("w", "p", 1)]
    assert not queue.drained
    assert answers(tell(queue, Gone("h"))) == [("g", Leased(item(2, "a", 0), True))]
    assert answers(tell(queue, get("g", 3, acknowledges=2))) == [("g", Closed())]
    assert queue.drained


def test_who_alone_holds_the_last_items_of_a_closed_queue_does_not_wait_for_itself():
    queue = full(1)
    tell(queue, Close(), get("g", 0))
    assert answers(tell(queue, get("g", 1))) == [("g", Closed())]
    assert not queue.drained


def test_a_request_that_comes_again_is_recognised():
    queue = full(1, 1)
    assert answers(tell(queue, put("p", 0))) == [("p", Stored(item(0)))]
    assert tell(queue, put("a", 0), put("b", 0), put("a", 0)) == []
    assert queue.waiting() == ("a", "b")
    tell(queue, get("g", 0))
    again = answers(tell(queue, get("g", 0), put("a", 0)))
    assert again == [("g", Leased(item(0))), ("a", Stored(item(1, "a", 0)))]
    assert (queue.size, queue.counts.put, queue.counts.duplicates) == (1, 2, 4)


def test_requests_out_of_order_are_refused():
    queue = full()
    refuses(queue, put("p", 3), match="Put 3 of p: expected request 2")
    refuses(queue, put("p", 0), match="expected request 2")
    refuses(queue, get("p", 1), match="once more")
    refuses(queue, put("new", 1), match="expected request 0")
    refuses(queue, put("p", 2, nbytes=-1), match="-1 bytes")
    tell(queue, put("a", 0))
    refuses(queue, get("a", 1), match="request 0 once more, which waits")
    refuses(queue, get("g", 0, acknowledges=0), match=r"expected one that it holds, which are \[\]")
    tell(queue, get("g", 0))
    refuses(queue, Ack("h", 0, 0), match="acknowledges item 0")


def test_a_request_is_withdrawn_whatever_has_become_of_it():
    queue = full(1, 1)
    tell(queue, put("a", 0))
    assert tell(queue, Withdraw("a", 0)) == [Answer("a", 0, Withdrawn()), Drop("w", "a", 0)]
    # A late copy of it does not come back to life.
    assert answers(tell(queue, put("a", 0), Withdraw("a", 0))) == [("a", Withdrawn())] * 2
    # One that has not arrived yet.
    assert answers(tell(queue, Withdraw("a", 1), put("a", 1))) == [("a", Withdrawn())] * 2
    # What is stored stays stored.
    assert answers(tell(queue, Withdraw("p", 0))) == [("p", Stored(item(0)))]
    # A lease goes back.
    tell(queue, get("g", 0))
    assert answers(tell(queue, Withdraw("g", 0))) == [("g", Withdrawn())]
    assert answers(tell(queue, get("h", 0))) == [("h", Leased(item(0), True))]
    # An acknowledgement that was withdrawn with its get may be said again.
    tell(queue, get("h", 1, acknowledges=0), Withdraw("h", 1))
    assert answers(tell(queue, Ack("h", 2, 0))) == [("h", Acknowledged(0))]
    assert queue.counts.acknowledged == 1


# -- moves -------------------------------------------------------------------------------------


def moved(queue, later=0.0):
    """The queue, as it is elsewhere: its store there is w2."""
    other = pickle.loads(pickle.dumps(queue))
    assert tell(other, Resumed(later), Relocated(other.stored_at("w"), "w2")) == []
    return other


def test_a_queue_that_has_moved_goes_on_as_it_was():
    queue = ItemQueue("q", 2, 100)
    tell(queue, put("p", 0), put("p", 1), get("g", 0), put("r", 0, store="v"))
    tell(queue, put("s", 0, until=50.0))
    other = moved(queue, later=1000.0)
    assert other.deadline == 1050.0
    assert other.asked()["p"] == queue.asked()["p"]
    # Requests that come again are answered as before, but for where the items lie.
    first = item(0, "p", 0, store="w2")
    assert answers(tell(other, get("g", 0))) == [("g", Leased(first))]
    assert tell(other, put("s", 0, store="w2", until=1050.0)) == []
    commands = tell(other, get("g", 1, acknowledges=0))
    assert commands[0] == Drop("w2", "p", 0)
    assert answers(commands)[0] == ("g", Leased(item(1, "p", 1, store="w2")))
    assert answers(commands)[1] == ("s", Stored(item(3, "s", 0, store="w2")))
    assert answers(tell(other, get("h", 0))) == [("h", Leased(item(2, "r", 0, store="v")))]
    # What the old store was is not missed; what another has is.
    tell(other, Gone("w"), Gone("v"), Release("g"), Release("h"))
    assert (other.size, other.leased, other.counts.lost) == (2, 0, 1)


def test_what_is_done_with_on_the_way_is_dropped_where_it_has_come_to():
    queue = ItemQueue("q", 4, 100)
    tell(queue, put("p", 0), put("p", 1), put("p", 2), get("g", 0), get("h", 0))
    items = queue.stored_at("w")
    assert items == {("p", 0), ("p", 1), ("p", 2)}
    tell(queue, Ack("g", 1, 0), Gone("w"))
    # Of those that were queued it is too late; what was read may come back.
    commands = tell(queue, Relocated(items, "x"))
    assert commands == [Drop("x", "p", 0), Drop("x", "p", 2)]
    assert answers(tell(queue, Release("h"), get("i", 0))) == [
        ("i", Leased(item(1, "p", 1, store="x"), again=True))
    ]
    assert queue.counts.lost == 1


def test_the_latest_that_died_are_remembered():
    gone = Departed()
    assert gone.add("a")
    assert not gone.add("a")
    for k in range(MOST - 1):
        gone.add(f"b{k}")
    assert "a" in gone
    gone.add("c")
    assert "a" not in gone
    assert "b0" in gone


# -- ten thousand schedules --------------------------------------------------------------------


class Account:
    """A queue beside what its answers say of every item and every holder."""

    HOLDERS = tuple("abcdef")
    STORES = ("u", "v", "w")

    def __init__(self, seed, machine=ItemQueue):
        self.rng = rng = random.Random(seed)
        self.queue = machine("q", rng.randint(1, 4), rng.randint(3, 12))
        self.now = 0.0
        self.dead = set()
        self.lives = Counter()
        self.last = {}
        #: holder -> its open request, in the order of arrival
        self.putters, self.getters = {}, {}
        self.answered = {}
        #: number -> item that is queued; holder -> {number: item}
        self.queued, self.held = {}, {}
        self.ever_leased, self.acked, self.lost, self.stored = set(), set(), set(), []
        #: bytes that lie at a store: (store, putter, request)
        self.laid = set()
        self.redelivered = self.leases = self.repeats = 0
        self.closed = False
        self.seen = Counter()

    # -- what is done ---------------------------------------------------------------------

    def name(self, letter):
        return f"{letter}{self.lives[letter]}"

    def step(self):
        rng = self.rng
        self.now += rng.choice([0, 0, 0.5, 1])
        kinds = ["put"] * 6 + ["get"] * 6 + ["ack", "again", "again", "tick", "withdraw"]
        kinds += ["release"] * (rng.random() < 0.5) + ["die"] * (rng.random() < 0.5)
        kinds += ["store"] * (rng.random() < 0.4) + ["close"] * (rng.random() < 0.05)
        kinds += ["move"] * (rng.random() < 0.5)
        getattr(self, "do_" + rng.choice(kinds))()

    def idle(self):
        names = [self.name(h) for h in self.HOLDERS]
        return [n for n in names if n not in self.putters and n not in self.getters]

    def ask(self, name, event):
        self.last[name] = event
        self.answered.pop(name, None)
        self.send(event)

    def number(self, name):
        return self.last[name].request + 1 if name in self.last else 0

    def until(self):
        return self.now + self.rng.choice([0, 1, 2, 50])

    def do_put(self):
        names = self.idle()
        if not names:
            return
        name = self.rng.choice(names)
        event = Put(
            name,
            self.number(name),
            self.name(self.rng.choice(self.STORES)),
            self.rng.randint(0, 6),
            self.until(),
        )
        self.laid.add((event.store, name, event.request))
        self.putters[name] = event
        self.ask(name, event)

    def do_get(self):
        names = self.idle()
        if not names:
            return
        name = self.rng.choice(names)
        mine = sorted(self.held.get(name, {}))
        done = self.rng.choice(mine) if mine and self.rng.random() < 0.7 else None
        if done is not None:
            self.acknowledge(name, done)
        self.getters[name] = event = Get(name, self.number(name), self.until(), done)
        self.ask(name, event)

    def do_ack(self):
        for name in self.idle():
            if self.held.get(name):
                done = self.rng.choice(sorted(self.held[name]))
                self.acknowledge(name, done)
                self.ask(name, Ack(name, self.number(name), done))
                return

    def acknowledge(self, name, number):
        del self.held[name][number]
        self.acked.add(number)

    def do_again(self):
        names = [n for n in self.last if n not in self.dead]
        if not names:
            return
        name = self.rng.choice(names)
        # A copy of all that it knows is slow to make.
        looks = self.rng.random() < 0.1
        before = state_of(self.queue) if looks else None
        commands = self.queue.handle(self.last[name], self.now)
        self.repeats += 1
        event = self.last[name]
        known = self.answered.get(name)
        assert commands == ([Answer(name, event.request, known)] if known else [])
        assert self.queue.counts.duplicates == self.repeats
        if looks:
            self.queue.counts.duplicates -= 1
            assert state_of(self.queue) == before
            self.queue.counts.duplicates += 1

    def do_tick(self):
        self.send(Tick())
        late = [w for w in (*self.putters.values(), *self.getters.values()) if w.until <= self.now]
        assert not late

    def do_withdraw(self):
        names = [
            n for n in self.last if n not in self.dead and self.last[n].__class__ in (Put, Get)
        ]
        if not names:
            return
        name = self.rng.choice(names)
        put = self.putters.pop(name, None)
        self.getters.pop(name, None)
        answer = self.answered.get(name)
        if isinstance(answer, Leased):
            one = self.held.get(name, {}).pop(answer.item.number, None)
            if one:
                self.back([one])
        self.ask(name, Withdraw(name, self.last[name].request))
        if put:
            assert (put.store, name, put.request) not in self.laid

    def do_release(self):
        name = self.name(self.rng.choice(self.HOLDERS))
        self.back(list(self.held.pop(name, {}).values()))
        self.send(Release(name))

    def back(self, items):
        for one in items:
            if one.store in self.dead:
                self.lost.add(one.number)
            else:
                self.queued[one.number] = one

    def do_die(self):
        letter = self.rng.choice(self.HOLDERS)
        name = self.name(letter)
        self.lives[letter] += 1
        self.dead.add(name)
        self.putters.pop(name, None)
        self.getters.pop(name, None)
        self.back(list(self.held.pop(name, {}).values()))
        self.send(Gone(name))
        if name in self.last and self.rng.random() < 0.1:
            refuses(self.queue, self.last[name], FencedError)

    def do_store(self):
        letter = self.rng.choice(self.STORES)
        name = self.name(letter)
        self.lives[letter] += 1
        self.dead.add(name)
        self.lost |= {n for n, one in self.queued.items() if one.store == name}
        self.queued = {n: one for n, one in self.queued.items() if one.store != name}
        self.laid = {key for key in self.laid if key[0] != name}
        self.send(Gone(name))

    def do_move(self):
        """The queue goes on elsewhere, and so do all items of one store."""
        letter = self.rng.choice(self.STORES)
        old = self.name(letter)
        self.lives[letter] += 1
        new, items = self.name(letter), self.queue.stored_at(old)

        def moved(one):
            there = (one.putter, one.request) in items
            return replace(one, store=new) if there else one

        self.laid = {(new if k[0] == old and k[1:] in items else k[0], *k[1:]) for k in self.laid}
        self.putters = {name: moved(event) for name, event in self.putters.items()}
        self.last.update(self.putters)
        self.queued = {n: moved(one) for n, one in self.queued.items()}
        self.held = {h: {n: moved(one) for n, one in of.items()} for h, of in self.held.items()}
        self.stored = [moved(one) for one in self.stored]
        self.answered = {
            name: replace(answer, item=moved(answer.item))
            if isinstance(answer, Stored | Leased)
            else answer
            for name, answer in self.answered.items()
        }
        self.queue = pickle.loads(pickle.dumps(self.queue))
        self.send(Relocated(items, new))
        self.seen["moved"] += bool(items)

    def do_close(self):
        self.closed = True
        self.send(Close())

    # -- what is answered -----------------------------------------------------------------

    def send(self, event):
        for command in self.queue.handle(event, self.now):
            if isinstance(command, Drop):
                self.laid.remove((command.store, command.putter, command.request))
                continue
            name, answer = command.holder, command.answer
            assert command.request == self.last[name].request
            assert name not in self.answered, "answered twice"
            assert name not in self.dead
            self.answered[name] = answer
            self.seen[type(answer).__name__] += 1
            getattr(self, "on_" + type(answer).__name__.lower())(name, answer)
        self.check()

    def on_stored(self, name, answer):
        if isinstance(self.last[name], Withdraw):
            assert answer.item in self.stored
            return
        assert name == next(iter(self.putters)), "out of line"
        event = self.putters.pop(name)
        one = answer.item
        assert (one.store, one.putter, one.request, one.nbytes) == (
            event.store,
            name,
            event.request,
            event.nbytes,
        )
        assert one.number == len(self.stored)
        assert not self.closed
        self.stored.append(one)
        self.queued[one.number] = one
        assert len(self.queued) <= self.queue.capacity
        assert self.bytes() <= self.queue.nbytes

    def on_full(self, name, answer):
        assert self.putters.pop(name).until <= self.now

    def on_refused(self, name, answer):
        event = self.putters.pop(name)
        assert event.nbytes > self.queue.nbytes or event.store in self.dead

    def on_leased(self, name, answer):
        assert name == next(iter(self.getters)), "out of line"
        del self.getters[name]
        number = answer.item.number
        assert number == min(self.queued), "not the oldest"
        one = self.queued.pop(number)
        assert answer == Leased(one, number in self.ever_leased)
        self.leases += 1
        self.redelivered += number in self.ever_leased
        self.ever_leased.add(number)
        self.held.setdefault(name, {})[number] = one

    def on_empty(self, name, answer):
        assert self.getters.pop(name).until <= self.now

    def on_closed(self, name, answer):
        assert self.closed
        if self.putters.pop(name, None) is None:
            del self.getters[name]
            assert not self.queued
            assert not any(held for other, held in self.held.items() if other != name)

    def on_acknowledged(self, name, answer):
        assert answer.item in self.acked

    def on_withdrawn(self, name, answer):
        assert isinstance(self.last[name], Withdraw)

    def bytes(self):
        leased = [one for held in self.held.values() for one in held.values()]
        return sum(one.nbytes for one in [*self.queued.values(), *leased])

    def check(self):
        queue, counts = self.queue, self.queue.counts
        leased = [n for held in self.held.values() for n in held]
        # Each item is in one place.
        places = [*self.queued, *leased, *self.acked, *self.lost]
        assert sorted(places) == list(range(len(self.stored)))
        assert (queue.size, queue.leased) == (len(self.queued), len(leased))
        for name, held in self.held.items():
            assert {one.number for one in queue.held(name)} == set(held)
        assert queue.used == self.bytes()
        assert queue.waiting() == (*self.putters, *self.getters)
        waits = [w.until for w in (*self.putters.values(), *self.getters.values())]
        assert queue.deadline == min(waits, default=None)
        assert (counts.put, counts.got) == (len(self.stored), self.leases)
        assert (counts.acknowledged, counts.lost) == (len(self.acked), len(self.lost))
        assert (counts.redelivered, counts.duplicates) == (self.redelivered, self.repeats)
        # The bytes that lie anywhere are those of items, and of puts that wait.
        items = [self.stored[n] for n in [*self.queued, *leased]]
        kept = {(i.store, i.putter, i.request) for i in items if i.store not in self.dead}
        assert self.laid == kept | {(p.store, p.putter, p.request) for p in self.putters.values()}
        # Nobody waits for what is there.
        assert not (self.getters and self.queued)
        if self.putters:
            first = next(iter(self.putters.values()))
            room = self.bytes() + first.nbytes <= queue.nbytes
            assert not (len(self.queued) < queue.capacity and room)
            assert not self.closed
        assert queue.drained == (self.closed and not self.queued and not leased)

    def drain(self):
        """All that is left is got and acknowledged; every wait ends."""
        self.do_close()
        for name in list(self.held):
            self.back(list(self.held.pop(name).values()))
            self.send(Release(name))
        self.now += LATER
        self.do_tick()
        assert not self.putters
        assert not self.getters
        for name in (self.name(h) for h in self.HOLDERS):
            while self.held.get(name):
                self.acknowledge(name, done := min(self.held[name]))
                self.ask(name, Ack(name, self.number(name), done))
        self.lives["z"] += 1
        name, done = self.name("z"), None
        while True:
            self.getters[name] = event = Get(name, self.number(name), self.now, done)
            if done is not None:
                self.acknowledge(name, done)
            self.ask(name, event)
            if self.answered[name] == Closed():
                break
            done = self.answered[name].item.number
        assert self.queue.drained
        assert self.laid == set()
        assert len(self.stored) == len(self.acked) + len(self.lost)


def keep(seeds, machine=ItemQueue):
    """Run schedules; returns how often which answer was given, and the sum of the counts."""
    seen, counts = Counter(), Counter()
    for seed in seeds:
        account = Account(seed, machine)
        try:
            for _ in range(account.rng.randint(5, 45)):
                account.step()
            account.drain()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        seen += account.seen
        counts.update(vars(account.queue.counts))
    return seen, counts


def test_every_schedule_keeps_the_account():
    seen, counts = keep(range(10_000))
    for kind in (Stored, Full, Refused, Leased, Empty, Closed, Acknowledged, Withdrawn):
        assert seen[kind.__name__] > 1000, seen
    assert seen["moved"] > 1000, seen
    assert min(counts.values()) > 1000, counts


def test_without_deaths_and_releases_everything_comes_once_and_in_order():
    for seed in range(300):
        rng = random.Random(seed)
        queue = ItemQueue("q", rng.randint(1, 5), 100)
        todo = {f"p{k}": list(range(8)) for k in range(3)}
        getters = {f"g{k}": [0, None] for k in range(4)}
        got, inbox = [], []
        while len(got) < 24:
            waiting = queue.waiting()
            free = [n for n in [*todo, *getters] if n not in waiting and todo.get(n, True)]
            name = rng.choice(free)
            if name in todo:
                commands = queue.handle(put(name, todo[name].pop(0)), 0.0)
            else:
                request, done = getters[name]
                getters[name] = [request + 1, None]
                commands = queue.handle(get(name, request, done), 0.0)
            for who, answer in answers(commands):
                if isinstance(answer, Leased):
                    got.append(answer.item)
                    getters[who][1] = answer.item.number
            inbox += commands
        assert [one.number for one in got] == list(range(24))
        for putter in todo:
            assert [one.request for one in got if one.putter == putter] == list(range(8))
        assert queue.counts.redelivered == queue.counts.lost == 0


class Forgetful(ItemQueue):
    """Broken: what a dead getter held is gone."""

    def _back(self, items):
        pass


class Unfair(ItemQueue):
    """Broken: a small item overtakes."""

    def _let_in(self):
        for name, wait in list(self._putters.items()):
            if self.used + wait.nbytes <= self.nbytes and self.size < self.capacity:
                self._putters = {name: wait, **self._putters}
                return super()._let_in()
        return []


@pytest.mark.parametrize("broken", [Forgetful, Unfair])
def test_the_account_finds_what_is_broken(broken):
    with pytest.raises(AssertionError, match="seed"):
        keep(range(200), broken)
