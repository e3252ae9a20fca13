"""Assigns over several shards, pushes and pulls, under a network that delays, repeats and loses."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from dtrain.errors import FencedError
from dtrain.machines.assigns import (
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
    Lead,
    Let,
    Limits,
    Outdated,
    Prepare,
    Prepared,
    Pull,
    Puller,
    Push,
    Shard,
    Take,
    Tick,
    ToLead,
    ToShard,
    Values,
    Writer,
)
from tests.machines.helpers import ignores, refuses

LIMITS = Limits(write=30.0, hold=10.0)
LATER = 1000.0


def tell(machine, *events, now=0.0):
    return [command for event in events for command in machine.handle(event, now)]


# -- the lead ----------------------------------------------------------------------------------


def begin(writer, request=0, until=LATER):
    return Begin(1, writer, request, until)


def commit(writer, request=0, number=1):
    return Commit(1, writer, request, number)


def test_writers_take_turns_in_their_order():
    lead = Lead(1, LIMITS)
    assert tell(lead, begin("a"), begin("b"), begin("c")) == [Answer("a", 0, Granted(1, 0))]
    assert lead.writer == "a"
    assert tell(lead, commit("a", 0)) == [
        Answer("a", 0, Committed(1)),
        Answer("b", 0, Granted(2, 1)),
    ]
    assert lead.committed == 1


def test_what_comes_again_is_answered_as_before_whatever_has_become_of_it():
    lead = Lead(1, LIMITS)
    granted = tell(lead, begin("a"))
    assert tell(lead, begin("a")) == granted
    tell(lead, begin("b"))
    ignores(lead, begin("b"))
    tell(lead, commit("a", 0))
    over = [Answer("a", 0, Committed(1))]
    assert tell(lead, begin("a"), commit("a", 0), GiveUp(1, "a", 0)) == over * 3
    assert lead.committed == 1
    tell(lead, begin("a", 1), commit("b", 0, 2), commit("a", 1, 3))
    ignores(lead, begin("a", 0))
    ignores(lead, commit("a", 0))


def test_a_writer_that_is_too_slow_has_written_nothing():
    lead = Lead(1, LIMITS)
    tell(lead, begin("a"), begin("b"))
    assert lead.deadline == 30.0
    assert tell(lead, Tick(), now=29.9) == []
    aborted, discard, granted = tell(lead, Tick(), now=30.0)
    assert "after 30 s" in aborted.answer.why
    # Its number never comes again.
    assert (discard, granted) == (Discard(1, 1, 0), Answer("b", 0, Granted(2, 0)))
    assert tell(lead, commit("a", 0)) == [aborted]


def test_a_turn_that_does_not_come_in_time_is_refused_with_the_writer_that_has_it():
    lead = Lead(1, LIMITS)
    tell(lead, begin("a"), begin("b", until=5.0))
    (late,) = tell(lead, begin("c", until=0.0))
    assert "it was a's" in late.answer.why
    (late,) = tell(lead, Tick(), now=5.0)
    assert (late.client, type(late.answer)) == ("b", Aborted)


def test_the_assign_of_a_dead_writer_is_given_up_unless_all_shards_have_it():
    lead = Lead(1, LIMITS)
    tell(lead, begin("a"), begin("b"))
    assert tell(lead, Gone("a")) == [Discard(1, 1, 0), Answer("b", 0, Granted(2, 0))]
    tell(lead, Hold(1, "p", 0, 0), commit("b", 0, 2), begin("c"), Gone("b"))
    assert tell(lead, Let(1, "p", 0, 0)) == [Answer("c", 0, Granted(3, 2))]
    assert lead.committed == 2


def test_a_commit_waits_for_the_holds_before_it_and_later_holds_wait_for_it():
    lead = Lead(1, LIMITS)
    tell(lead, begin("a"))
    assert tell(lead, Hold(1, "p", 0, 0)) == [Answer("p", 0, Held(0, 0))]
    assert tell(lead, commit("a", 0), Hold(1, "q", 5, 2)) == []
    assert tell(lead, Let(1, "p", 0, 0)) == [
        Answer("a", 0, Committed(1)),
        Answer("q", 5, Held(2, 1)),
    ]
    # A late copy of a hold that is over holds nothing back.
    ignores(lead, Hold(1, "p", 0, 0))


@pytest.mark.parametrize("end", [Tick(), Gone("p")])
def test_a_hold_lapses_and_ends_with_its_puller(end):
    lead = Lead(1, LIMITS)
    tell(lead, begin("a"), Hold(1, "p", 0, 0), commit("a", 0))
    # Asking again does not make it longer.
    tell(lead, Hold(1, "p", 0, 0), now=5.0)
    assert lead.deadline == 10.0
    answers = tell(lead, end, now=10.0)
    assert answers[0] == Answer("a", 0, Committed(1))


def test_the_lead_refuses_what_is_out_of_order_or_of_another_generation():
    lead = Lead(1, LIMITS)
    tell(lead, begin("a"), begin("b"))
    refuses(lead, begin("a", 1), match="its assign 0 is not over")
    refuses(lead, begin("b", 1), match="its assign 0 is not over")
    refuses(lead, commit("b", 0), match="found the turn of a")
    refuses(lead, commit("c", 0), match="found the turn of a")
    refuses(lead, commit("a", 0, 2), match="assign 2: found the turn of a, assign 1")
    refuses(lead, Begin(2, "c", 0, 1.0), FencedError, "generation 2, expected 1")


# -- a shard -----------------------------------------------------------------------------------


def prepare(number, committed=0, client="a", request=0):
    return Prepare(1, client, request, number, committed)


def pull(committed):
    return Pull(1, "p", 0, committed)


def test_a_shard_flips_once_it_hears_that_what_it_has_prepared_is_committed():
    shard = Shard(3, 1)
    assert tell(shard, prepare(1)) == [Keep(1), Answer("a", 0, Prepared(3, 1))]
    assert tell(shard, pull(0)) == [Answer("p", 0, Values(3, 0, 0))]
    assert tell(shard, pull(1)) == [Flip(1), Answer("p", 0, Values(3, 1, 1))]
    assert tell(shard, Know(1, "a", 0, 1)) == [Answer("a", 0, Flipped(3, 1))]
    # A message that knows less is answered with what is there.
    assert tell(shard, pull(0)) == [Answer("p", 0, Values(3, 1, 1))]


@pytest.mark.parametrize("event", [Know(1, "p", 0, 1), Push(1, "p", 0, 1), prepare(2, 1)])
def test_whoever_comes_tells_a_shard_what_is_committed(event):
    shard = Shard(0, 1)
    tell(shard, prepare(1))
    assert tell(shard, event)[0] == Flip(1)
    assert shard.number == 1


def test_a_shard_keeps_one_assign_beside_its_own_and_lets_go_of_what_was_given_up():
    shard = Shard(0, 1)
    tell(shard, prepare(1))
    assert tell(shard, prepare(2))[:2] == [Drop(1), Keep(2)]
    assert tell(shard, prepare(1)) == [Answer("a", 0, Outdated(0, 1))]
    assert tell(shard, prepare(2)) == [Answer("a", 0, Prepared(0, 2))]
    assert tell(shard, Discard(1, 1, 0)) == []
    assert tell(shard, Discard(1, 2, 0)) == [Drop(2)]
    assert tell(shard, prepare(2)) == [Answer("a", 0, Outdated(0, 2))]
    assert tell(shard, prepare(3))[0] == Keep(3)
    assert tell(shard, Discard(1, 2, 0)) == []
    assert shard.prepared == 3


def test_what_is_discarded_never_is_what_was_committed_before():
    shard = Shard(0, 1)
    tell(shard, prepare(4))
    # Assign 5 was given up before this shard has heard that 4 is committed.
    assert tell(shard, Discard(1, 5, 4)) == [Flip(4)]


def test_a_push_is_applied_once_also_when_pushes_overtake_each_other():
    shard = Shard(0, 1)
    commands = tell(shard, *(Push(1, "a", n, 0) for n in (0, 2, 0, 2, 1, 1)))
    assert sum(isinstance(c, Apply) for c in commands) == 3
    assert (shard.version, shard.duplicates) == (3, 3)
    assert commands[-1] == Answer("a", 1, Applied(0, 0, 3))


def test_what_has_moved_or_was_restored_knows_the_pushes_that_are_in_it():
    shard = Shard(0, 1)
    tell(shard, *(Push(1, name, n, 0) for name, n in [("a", 0), ("b", 0), ("a", 1), ("b", 2)]))
    assert shard.pushed == (("a", 2, ()), ("b", 1, (2,)))
    moved = Shard(0, 2, version=shard.version, pushed=shard.pushed)
    commands = tell(moved, *(Push(2, name, n, 0) for name, n in [("a", 1), ("b", 2), ("b", 1)]))
    assert [c for c in commands if isinstance(c, Apply)] == [Apply(5)]
    assert moved.pushed == (("a", 2, ()), ("b", 3, ()))


def test_what_was_lost_with_a_generation_is_not_waited_for():
    """Pushes 5 to 9 came after the checkpoint; the client goes on with 10."""
    shard = Shard(0, 2, pushed=[("a", 5, ())])
    commands = tell(shard, *(Push(2, "a", n, 0) for n in range(10, 1000)))
    assert sum(isinstance(c, Apply) for c in commands) == 990
    assert shard.pushed == (("a", 1000, ()),)
    assert shard.duplicates == 0


def test_a_shard_remembers_those_that_pushed_last(monkeypatch):
    monkeypatch.setattr("dtrain.machines.assigns.shard.MOST", 2)
    shard = Shard(0, 1)
    tell(shard, *(Push(1, name, n, 0) for name, n in [("a", 0), ("b", 0), ("a", 1), ("c", 0)]))
    assert [name for name, *_ in shard.pushed] == ["a", "c"]


def test_a_shard_refuses_what_it_has_not_prepared_and_other_generations():
    shard = Shard(0, 1)
    tell(shard, prepare(1))
    refuses(shard, pull(2), match="assign 2 is committed: found 1 prepared on top of 0")
    refuses(shard, Push(2, "a", 0, 0), FencedError, "generation 2, expected 1")


# -- a puller ----------------------------------------------------------------------------------


def test_a_pull_of_shards_that_agree_is_one_round_and_asks_nobody_else():
    puller = Puller("p", 0, 1, (0, 1), committed=4)
    assert tell(puller, Again()) == [ToShard(s, Pull(1, "p", 0, 4)) for s in (0, 1)]
    assert tell(puller, Values(0, 5, 9), Values(1, 5, 7)) == [Take(0), Take(1), Done(5)]
    assert puller.rounds == 1


def test_a_pull_asks_those_behind_once_more_and_at_last_holds():
    puller = Puller("p", 0, 1, (0, 1), patience=2)
    tell(puller, Values(0, 0, 0))
    assert tell(puller, Values(1, 1, 0)) == [Take(1), ToShard(0, Pull(1, "p", 0, 1))]
    assert tell(puller, Values(1, 1, 0), Values(0, 0, 0)) == []
    assert tell(puller, Values(0, 2, 0)) == [Take(0), ToLead(Hold(1, "p", 0, 0))]
    assert tell(puller, Again()) == [ToLead(Hold(1, "p", 0, 0))]
    # What the lead holds may be newer than all that was seen.
    asked = [ToShard(s, Pull(1, "p", 0, 3)) for s in (0, 1)]
    assert tell(puller, Held(0, 3)) == asked
    commands = tell(puller, Held(0, 3), Values(0, 3, 0), Values(1, 3, 0))
    assert commands == [Take(0), Take(1), ToLead(Let(1, "p", 0, 0)), Done(3)]
    ignores(puller, Again())


# -- all together ------------------------------------------------------------------------------


@dataclass
class Store:
    """A shard's parameters: which assign they are of, and which pushes they have."""

    machine: Shard
    token: object = "initial"
    aside: dict = field(default_factory=dict)
    applied: Counter = field(default_factory=Counter)


class World:
    """Clients that assign, push and pull one thing after the other; all chance is the seed's."""

    def __init__(
        self, seed, *, loss=0.0, slow=0.0, deaths=0, shard=Shard, lead=Lead, puller=Puller
    ):
        self.rng = rng = random.Random(seed)
        self.loss, self.slow, self.Puller = loss, slow, puller
        self.now, self.queue, self.scheduled = 0.0, [], 0
        self.shards = [Store(shard(k, 1)) for k in range(rng.randint(1, 4))]
        self.lead = lead(1, LIMITS)
        names = [f"c{k}" for k in range(rng.randint(1, 5))]
        #: the mix of a storm: what a client does next
        self.mix = rng.choice(["apu", "aaap", "ap", "appp", "au", "apuuuu"])
        self.left = {name: rng.randint(1, 10) for name in names}
        self.numbers = {name: Counter() for name in names}
        self.known = dict.fromkeys(names, 0)
        self.op, self.taken = {}, {}
        #: assign number -> who has written it; the newest that is over; tokens that are not
        self.tokens, self.over, self.failed = {0: "initial"}, 0, set()
        self.floor, self.counts, self.rounds = {}, Counter(), Counter()
        self.alive = set(names)
        for name in names:
            self.after(rng.random(), self.next, name)
        for name in rng.sample(names, min(deaths, len(names))):
            self.after(rng.uniform(0, 15), self.die, name)
        self.after(0.5, self.tick)

    def after(self, delay, what, *args):
        self.scheduled += 1
        heapq.heappush(self.queue, (self.now + delay, self.scheduled, what, args))

    def run(self):
        while self.queue:
            self.now, _, what, args = heapq.heappop(self.queue)
            assert self.now < 3000, "somebody waits for ever"
            what(*args)
        self.finish()
        return self

    def finish(self):
        assert not self.op
        assert self.lead.writer is None
        assert not self.lead._holds
        assert self.lead.deadline is None
        for store in self.shards:
            assert len(store.aside) <= 1
            assert all(count == 1 for count in store.applied.values())

    def send(self, what, *args):
        """Some copies on their way, each for itself."""
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            if self.rng.random() >= self.loss:
                # The slowest are those that others must be able to do without.
                slow = self.slow * (3 if isinstance(args[-1], Know) else 1)
                delay = self.rng.random()
                if self.rng.random() < slow:
                    delay = self.rng.uniform(1, 8)
                self.after(delay, what, *args)

    def tick(self):
        self.from_lead(self.lead.handle(Tick(), self.now))
        if self.op or self.lead.deadline is not None or any(self.left[n] for n in self.alive):
            self.after(0.5, self.tick)

    # -- clients --------------------------------------------------------------------------

    def next(self, name):
        if name not in self.alive or not self.left[name]:
            return
        self.left[name] -= 1
        kind = self.rng.choice(self.mix)
        request = self.numbers[name][kind]
        self.numbers[name][kind] += 1
        shards = range(len(self.shards))
        self.floor[name] = max(self.over, self.known[name])
        if kind == "a":
            machine = Writer(name, request, 1, shards, self.now + 200)
        elif kind == "p":
            some = self.rng.sample(shards, self.rng.randint(1, len(shards)))
            patience = self.rng.choice([1, 2])
            machine = self.Puller(name, request, 1, some, self.known[name], patience)
            self.taken[name] = {}
        else:
            machine = None
        self.op[name] = [kind, request, machine, set(shards)]
        self.again(name, kind, request)

    def again(self, name, kind, request):
        op = self.op.get(name)
        if name not in self.alive or op is None or op[:2] != [kind, request]:
            return
        if kind == "u":
            for shard in sorted(op[3]):
                self.send(self.at_shard, shard, Push(1, name, request, self.known[name]))
        else:
            self.do(name, op[2].handle(Again(), self.now))
        self.after(3.0, self.again, name, kind, request)

    def do(self, name, commands, values=None):
        for command in commands:
            if isinstance(command, ToLead):
                self.send(self.at_lead, command.message)
            elif isinstance(command, ToShard):
                self.send(self.at_shard, command.shard, command.message)
            elif isinstance(command, Take):
                self.taken[name][command.shard] = values
            else:
                self.ended(name, command)

    def ended(self, name, outcome):
        kind, request, machine, _ = self.op.pop(name)
        self.after(self.rng.random() * 0.3, self.next, name)
        if isinstance(outcome, Failed):
            self.counts["failed"] += 1
            self.failed.add((name, request))
            assert (name, request) not in self.tokens.values()
            return
        self.counts[kind] += 1
        number = outcome.number
        assert number >= self.floor[name], "it sees less than was over before it began"
        self.known[name] = max(self.known[name], number)
        if kind == "a":
            assert self.tokens[number] == (name, request)
            assert all(store.machine.number >= number for store in self.shards)
            self.over = max(self.over, number)
            return
        tokens = set(self.taken.pop(name).values())
        assert len(tokens) == 1, f"a pull mixes {tokens}"
        assert tokens == {self.tokens[number]}
        self.rounds[machine.rounds - machine.patience] += 1

    def die(self, name):
        self.alive.discard(name)
        if self.op.pop(name, None):
            self.counts["died at work"] += 1
        for shard in range(len(self.shards)):
            self.after(self.rng.uniform(0.1, 2), self.at_shard, shard, Gone(name))
        self.after(self.rng.uniform(0.1, 2), self.at_lead, Gone(name))

    def at_client(self, name, request, answer, values):
        if name not in self.alive or name not in self.op:
            return
        kind, current, machine, missing = self.op[name]
        of = {Values: "p", Held: "p", Applied: "u"}.get(type(answer), "a")
        if (of, request) != (kind, current):
            return
        if kind != "u":
            self.do(name, machine.handle(answer, self.now), values)
            return
        assert answer.number >= self.floor[name] or answer.shard not in missing
        missing.discard(answer.shard)
        if not missing:
            del self.op[name]
            self.counts["u"] += 1
            self.after(self.rng.random() * 0.3, self.next, name)

    # -- the lead and the shards ----------------------------------------------------------

    def at_lead(self, message):
        self.from_lead(self.hear(self.lead, message))

    def hear(self, machine, message):
        """A late copy of what a dead client has sent is refused."""
        try:
            return machine.handle(message, self.now)
        except FencedError:
            names = [getattr(message, role, None) for role in ("writer", "puller", "client")]
            assert not self.alive & set(names)
            self.counts["fenced"] += 1
            return []

    def from_lead(self, commands):
        for command in commands:
            if isinstance(command, Discard):
                for shard in range(len(self.shards)):
                    self.send(self.at_shard, shard, command)
                continue
            if isinstance(command.answer, Committed):
                token = command.client, command.request
                assert token not in self.failed
                assert self.tokens.setdefault(command.answer.number, token) == token
            elif isinstance(command.answer, Held):
                self.counts["holds"] += 1
            self.send(self.at_client, command.client, command.request, command.answer, None)

    def at_shard(self, shard, message):
        store = self.shards[shard]
        for command in self.hear(store.machine, message):
            if isinstance(command, Keep):
                store.aside[command.number] = message.client, message.request
            elif isinstance(command, Drop):
                del store.aside[command.number]
            elif isinstance(command, Flip):
                store.token = store.aside.pop(command.number)
                assert self.tokens.setdefault(command.number, store.token) == store.token
                assert command.number <= self.lead.committed
            elif isinstance(command, Apply):
                store.applied[message.client, message.request] += 1
            else:
                answer = command.answer
                self.send(self.at_client, command.client, command.request, answer, store.token)


def many(seeds, **settings):
    counts, rounds = Counter(), Counter()
    for seed in seeds:
        try:
            world = World(seed, **settings).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {settings}: {error!r}") from error
        counts += world.counts
        rounds += world.rounds
    return counts, rounds


def test_a_pull_never_mixes_two_assigns_and_its_first_hold_is_its_last():
    counts, rounds = many(range(1500))
    assert set(rounds) == {-1, 0, 1}
    assert rounds[1] > 200
    assert counts["failed"] == 0
    assert min(counts["a"], counts["p"], counts["u"]) > 3000, counts


def test_what_is_lost_is_sent_again_and_nothing_is_done_twice():
    counts, rounds = many(range(1000), loss=0.2, slow=0.2)
    assert counts["failed"] < counts["a"] / 10
    assert min(counts["a"], counts["p"], counts["u"]) > 2000, counts
    # Where a message of its only hold's round is lost twice, the hold lapses, and another follows.
    assert sum(rounds[k] for k in rounds if k > 1) < counts["p"] / 100


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_the_death_of_a_client_in_the_middle_leaves_nobody_waiting(loss):
    counts, _ = many(range(1500), loss=loss, slow=0.2, deaths=3)
    assert counts["died at work"] > 1000
    assert counts["fenced"] > 100
    assert min(counts["a"], counts["p"], counts["u"]) > 2000, counts


# -- the rules can fail ------------------------------------------------------------------------


class Hasty(Shard):
    """Broken: a shard flips to what is prepared, before it is committed."""

    def _prepare(self, event):
        commands = super()._prepare(event)
        if self.prepared is not None:
            self.number, self.prepared = self.prepared, None
            commands.insert(-1, Flip(self.number))
        return commands


class Deaf(Shard):
    """Broken: a push does not tell what is committed."""

    def _learn(self, event):
        return [] if isinstance(event, Push) else super()._learn(event)


class Forgetful(Shard):
    """Broken: a push that comes again is applied again."""

    def _push(self, event):
        self._pushed.clear()
        return super()._push(event)


class Amnesic(Shard):
    """Broken: what is discarded may have been committed."""

    def _learn(self, event):
        return [] if isinstance(event, Discard) else super()._learn(event)


class Content(Puller):
    """Broken: whatever the shards answered will do."""

    def _round(self):
        self.outcome = Done(self.committed)
        return [self.outcome]


class Careless(Lead):
    """Broken: a writer that is late may commit all the same."""

    def _answered(self, event):
        over = super()._answered(event)
        aborted = over and isinstance(over[0].answer, Aborted)
        if aborted and isinstance(event, Commit):
            self.committed = self._numbered
            return [Answer(event.writer, event.request, Committed(self._numbered))]
        return over


@pytest.mark.parametrize(
    "broken",
    [
        {"shard": Hasty},
        {"shard": Amnesic, "deaths": 3},
        {"shard": Deaf, "slow": 0.3},
        {"shard": Forgetful},
        {"puller": Content},
        {"lead": Careless, "loss": 0.6},
    ],
)
def test_the_simulator_finds_what_is_broken(broken):
    with pytest.raises(AssertionError, match="seed"):
        many(range(400), **broken)
