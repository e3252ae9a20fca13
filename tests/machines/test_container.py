"""A named session: created once, whoever comes, dies or is silent; nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

import pytest

from dtrain.errors import FencedError, ProtocolError
from dtrain.machines.container import (
    TRANSITIONS,
    Answer,
    Attach,
    Beat,
    Container,
    Create,
    Created,
    Drop,
    Failed,
    Gone,
    Initialise,
    Late,
    Leaving,
    Limits,
    Move,
    Moved,
    NotMoved,
    NotRestored,
    Over,
    Placed,
    Ready,
    Refused,
    Reload,
    Reset,
    Restore,
    Restored,
    Saved,
    State,
    Tell,
    Tick,
    WorkerLost,
)
from tests.machines.helpers import ignores, refuses
from tests.sim import state_of

LIMITS = Limits(client_lease=10.0, time_to_live=100.0, restore_deadline=50.0)
LATER = 1000.0


def tell(box, *events, now=0.0):
    return [command for event in events for command in box.handle(event, now)]


def create(client, request=0, spec="mlp", until=LATER):
    return Create(client, request, spec, until)


def attach(client, request=0, origin=None, until=LATER):
    return Attach(client, request, until, origin)


def ready(generation=1, origin=1, hosts=("v", "w"), chief="a"):
    return Ready(origin, generation, hosts, "mlp", chief)


def box(state=State.EMPTY, *clients):
    made = Container("ctr", LIMITS, 0.0)
    if state is State.EMPTY:
        return made
    tell(made, create("a"), *(create(c) for c in clients))
    if state is State.CREATING:
        return made
    tell(made, Created("a", 1, ("v", "w")))
    if state is State.READY:
        return made
    if state is State.RESTORING:
        tell(made, Saved(1, "ckpt", 7))
    tell(made, Leaving(("w",)) if state is State.MOVING else WorkerLost("w"))
    assert made.state is state
    return made


# -- creation ----------------------------------------------------------------------------------


def test_the_first_creates_and_the_others_wait_and_are_told():
    made = box()
    assert tell(made, attach("early")) == []
    assert tell(made, create("a")) == [Answer("a", 0, Initialise(1))]
    assert tell(made, create("b"), attach("c")) == []
    assert made.waiting() == ("early", "b", "c")
    commands = tell(made, Created("a", 1, ("v", "w")))
    assert commands == [Answer(c, 0, ready()) for c in ("early", "a", "b", "c")]
    assert tell(made, create("d")) == [Answer("d", 0, ready())]
    assert [state for _, state, _ in made.story] == [State.EMPTY, State.CREATING, State.READY]


def test_requests_that_come_again_create_nothing():
    made = box(State.CREATING, "b")
    assert tell(made, create("a")) == [Answer("a", 0, Initialise(1))]
    ignores(made, create("b"))
    tell(made, Created("a", 1, ("v", "w")))
    assert tell(made, create("a"), create("b")) == [Answer(c, 0, ready()) for c in "ab"]
    ignores(made, Created("a", 1, ("v", "w")))
    # A late copy, after the variables have ended, begins no new ones.
    tell(made, Reset("c", 0, 1))
    assert [type(c.answer) for c in tell(made, create("a"))] == [Over]
    assert made.state is State.EMPTY
    assert tell(made, create("a", 1)) == [Answer("a", 1, Initialise(2))]
    assert [type(c.answer) for c in tell(made, create("a"))] == [Over]
    tell(made, Created("a", 2, ("v", "w")))
    refuses(made, create("a", 0), match="Create 0 of a: expected 1 once more, or 2")


@pytest.mark.parametrize("end", [Gone("a"), Failed("a", 1, "ValueError: x")])
def test_the_next_in_line_takes_over_in_a_generation_of_its_own(end):
    made = box(State.CREATING, "b", "c")
    assert tell(made, end) == [Drop(1), Answer("b", 0, Initialise(2))]
    refuses(made, Created("a", 1, ("v",)), FencedError)
    commands = tell(made, Created("b", 2, ("v", "w")))
    assert commands == [Answer(c, 0, ready(2, 2, chief="b")) for c in "bc"]


def test_a_chief_that_is_silent_for_its_lease_is_deposed_and_may_come_again():
    made = box(State.CREATING, "b")
    tell(made, Beat("a"), Beat("b"), now=9.0)
    assert tell(made, Tick(), now=18.9) == []
    tell(made, Beat("b"), now=18.9)
    assert tell(made, Tick(), now=19.0) == [Drop(1), Answer("b", 0, Initialise(2))]
    refuses(made, Created("a", 1, ("v",)), FencedError, "generation 1, expected 2")
    assert tell(made, create("a"), now=19.0) == []
    assert made.waiting() == ("a",)


def test_with_nobody_left_it_is_empty_and_any_spec_will_do():
    made = box(State.CREATING)
    assert tell(made, Gone("a")) == [Drop(1)]
    assert made.idle
    assert tell(made, create("b", spec="linear")) == [Answer("b", 0, Initialise(2))]
    refuses(made, create("a"), FencedError, "a, who is gone")


def test_another_spec_is_refused_with_what_was_found_and_expected():
    made = box(State.CREATING)
    (refused,) = tell(made, create("b", spec="linear"))
    assert refused.answer == Refused("session ctr: found linear, expected mlp, a's")
    made = box(State.READY)
    (refused,) = tell(made, create("b", spec="linear"))
    assert "found linear, expected mlp, which a has created" in refused.answer.problem
    assert made.state is State.READY


def test_who_waits_too_long_is_told_for_whom():
    made = box(State.CREATING)
    assert tell(made, create("b", until=5.0)) == []
    assert made.deadline == 5.0
    (late,) = tell(made, Tick(), now=5.0)
    assert late == Answer("b", 0, Late("session ctr: a is initialising it"))
    (late,) = tell(box(), attach("c", until=0.0))
    assert late.answer == Late("session ctr: nobody has created it")


def test_shards_on_a_worker_that_died_meanwhile_are_made_again():
    made = box(State.CREATING, "b")
    tell(made, WorkerLost("w"))
    assert tell(made, Created("a", 1, ("v", "w"))) == [Drop(1), Answer("a", 0, Initialise(2))]
    assert len(tell(made, Created("a", 2, ("v", "v")))) == 2


def test_who_asks_for_something_else_gives_up_what_it_has_asked_for():
    made = box(State.CREATING, "b")
    assert tell(made, create("b", 1)) == []
    assert tell(made, create("c")) == []
    commands = tell(made, create("a", 1, spec="linear"))
    assert commands[:2] == [Drop(1), Answer("b", 1, Initialise(2))]
    assert isinstance(commands[2].answer, Refused)
    assert made.waiting() == ("c",)


def test_only_the_chief_creates_and_only_once():
    made = box(State.CREATING, "b")
    refuses(made, Created("b", 1, ("v",)), match="Created of b: found it CREATING, expected")
    refuses(made, Failed("b", 1, "x"), match="expected its chief a")
    refuses(made, Created("a", 1, ()), match="found no shards")
    refuses(made, create("b", until=1.0), match="once more")
    made = box(State.READY)
    refuses(made, Created("a", 1, ("v",)), match="found it READY")


# -- loss --------------------------------------------------------------------------------------


def test_a_lost_shard_is_restored_from_the_newest_checkpoint():
    made = box(State.READY, "b")
    tell(made, Saved(1, "old", 3), Saved(1, "ckpt", 7))
    ignores(made, WorkerLost("x"))
    assert tell(made, WorkerLost("w")) == [Drop(1), Reload(2, "ckpt")]
    assert "shards [1]; goes on from the checkpoint of step 7" in made.story[-1][2]
    # Who comes now waits; who is there is told, and is still of the same origin.
    assert tell(made, attach("b", 1, origin=1)) == []
    refuses(made, Restored(1, ("v",)), FencedError)
    news = ready(2, 1, ("v", "x"))
    assert tell(made, Restored(2, ("v", "x"))) == [Tell(("a",), news), Answer("b", 1, news)]
    ignores(made, Restored(2, ("v", "x")))


def test_without_a_checkpoint_the_variables_are_lost_and_all_are_told():
    made = box(State.READY, "b")
    drop, news = tell(made, WorkerLost("w", "is fenced"))
    assert drop == Drop(1)
    assert news.clients == ("a", "b")
    assert "worker w is fenced; it had shards [1], and there is no checkpoint" in news.news.problem
    # Nothing is silently begun again.
    assert tell(made, create("c")) == [Answer("c", 0, news.news)]
    assert tell(made, Reset("c", 1, 1))[0].answer.origin == 1
    assert tell(made, create("c", 2)) == [Answer("c", 2, Initialise(3))]


def test_lost_variables_come_back_from_a_checkpoint_that_somebody_names():
    made = box(State.LOST)
    assert tell(made, Restore("b", 0, "ckpt", LATER)) == [Drop(2), Reload(3, "ckpt")]
    assert tell(made, Restore("b", 0, "ckpt", LATER)) == []
    (refused,) = tell(made, Restore("c", 0, "other", LATER))
    assert "found it RESTORING, expected variables that were lost" in refused.answer.problem
    commands = tell(made, Restored(3, ("v",)))
    assert {c.answer for c in commands if isinstance(c, Answer)} == {ready(3, 1, ("v",))}
    (refused,) = tell(box(State.READY), Restore("c", 0, "other", LATER))
    assert "found it READY" in refused.answer.problem


def test_a_restoration_that_fails_or_takes_too_long_loses_the_variables():
    made = box(State.RESTORING, "b")
    assert tell(made, attach("c")) == []
    commands = tell(made, NotRestored(2, "damaged"))
    assert isinstance(commands[1], Tell)
    assert "cannot be restored: damaged" in commands[2].answer.problem
    made = box(State.RESTORING)
    tell(made, WorkerLost("x"), now=40.0)
    assert tell(made, Restored(2, ("x",)), now=40.0) == [Drop(2), Reload(3, "ckpt")]
    tell(made, Beat("a", 1), now=49.0)
    assert tell(made, Tick(), now=50.0)[0] == Drop(3)
    assert made.state is State.LOST


# -- moves -------------------------------------------------------------------------------------


def move(generation=2, former=1, hosts=("v", "w"), leaving=("w",)):
    return Move(generation, former, hosts, frozenset(leaving))


def test_shards_move_away_from_a_worker_that_is_about_to_leave():
    made = box(State.READY, "b")
    ignores(made, Leaving(()))
    assert tell(made, Leaving(("w", "z"))) == [move(leaving=("w", "z"))]
    assert made.state is State.MOVING
    # Whoever comes waits; what the old generation still says is refused.
    assert tell(made, attach("b", 1, origin=1)) == []
    assert tell(made, attach("c", until=3.0)) == []
    refuses(made, Saved(1, "ckpt", 7), FencedError, "generation 1, expected 2")
    refuses(made, Moved(2), match="found no place, expected Placed")
    (late,) = tell(made, Tick(), now=3.0)
    assert late.answer == Late("session ctr: its shards are moving to other workers")
    assert tell(made, Placed(2, ("v", "x"))) == []
    news = ready(2, 1, ("v", "x"))
    commands = tell(made, Moved(2))
    assert commands == [Drop(1), Tell(("a",), news), Answer("b", 1, news)]
    ignores(made, Moved(2))
    # It leaves, and takes nothing along.
    assert tell(made, WorkerLost("w")) == []
    assert made.hosts == ("v", "x")


def test_a_worker_that_stays_after_all_may_have_shards_again():
    made = box(State.MOVING)
    tell(made, Placed(2, ("v", "x")), Leaving(("x",)))
    assert tell(made, Leaving(("x",), False)) == []
    assert Tell(("a",), ready(2, 1, ("v", "x"))) in tell(made, Moved(2))


def test_who_moved_to_a_worker_that_is_about_to_leave_moves_on_at_once():
    made = box(State.MOVING)
    tell(made, attach("b"))
    tell(made, Placed(2, ("v", "x")), Leaving(("x",)))
    assert tell(made, Moved(2)) == [Drop(1), move(3, 2, ("v", "x"), ("w", "x"))]
    assert made.waiting() == ("b",)
    tell(made, Placed(3, ("v", "v")))
    assert Answer("b", 0, ready(3, 1, ("v", "v"))) in tell(made, Moved(3))


def test_what_was_placed_on_a_worker_that_is_leaving_moves_before_anybody_is_told():
    made = box(State.CREATING, "b")
    assert tell(made, Leaving(("w",))) == []
    assert tell(made, Created("a", 1, ("v", "w"))) == [move()]
    assert made.waiting() == ("a", "b")
    made = box(State.RESTORING)
    tell(made, Leaving(("x",)))
    assert tell(made, Restored(2, ("v", "x"))) == [move(3, 2, ("v", "x"), ("x",))]


@pytest.mark.parametrize("told", [True, False], ids=["heard before", "heard after"])
def test_a_move_goes_elsewhere_where_the_new_host_dies(told):
    made = box(State.MOVING)
    if told:
        tell(made, Placed(2, ("v", "x")))
        assert tell(made, WorkerLost("y")) == []
        assert tell(made, WorkerLost("x")) == [move(3)]
    else:
        tell(made, WorkerLost("x"), Placed(2, ("v", "x")))
        assert tell(made, Moved(2)) == [move(3)]
    # Nothing of the first is dropped: it is all that there is.
    refuses(made, Moved(2), FencedError)
    refuses(made, NotMoved(2, "x"), FencedError)
    tell(made, Placed(3, ("v", "y")))
    assert tell(made, Moved(3))[0] == Drop(2)
    assert made.hosts == ("v", "y")


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("end", ["lost", "tries", "time"])
def test_a_move_that_fails_is_a_loss(saved, end):
    made = box(State.READY, "b")
    if saved:
        tell(made, Saved(1, "ckpt", 7))
    tell(made, Leaving(("w",)), Placed(2, ("v", "x")))
    if end == "lost":
        commands = tell(made, WorkerLost("v"))
    elif end == "tries":
        assert tell(made, NotMoved(2, "no room"), NotMoved(3, "no room")) == [move(3), move(4)]
        commands = tell(made, NotMoved(4, "no room"))
    else:
        tell(made, Beat("a", 1), Beat("b", 1), now=49.0)
        assert made.deadline == 50.0
        commands = tell(made, Tick(), now=50.0)
    generation = 4 if end == "tries" else 2
    if saved:
        assert commands == [Drop(generation), Reload(generation + 1, "ckpt")]
        assert made.state is State.RESTORING
    else:
        assert commands[0] == Drop(generation)
        assert made.state is State.LOST
    words = {
        "lost": "worker v is gone; it had shards [0]",
        "tries": "cannot be moved: no room",
        "time": "cannot be moved within 50 s",
    }
    assert words[end] in made.story[-1][2]
    refuses(made, Moved(generation), FencedError)


def test_only_what_moves_has_moved():
    made = box(State.LOST)
    refuses(made, Placed(2, ("v",)), match="Placed: found it LOST, expected MOVING")
    refuses(made, NotMoved(2, "x"), match="found it LOST, expected MOVING")
    ignores(made, WorkerLost("v"))


# -- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", [State.CREATING, State.READY, State.MOVING, State.RESTORING, State.LOST]
)
def test_a_reset_ends_what_it_names_and_nothing_else(state):
    made = box(state, "b")
    before, origin = made.generation, made.current
    commands = tell(made, Reset("b", 1, origin))
    assert commands[0].answer.why == "session ctr: reset by b"
    assert commands[1] == Drop(before)
    told = [c for c in commands[2:] if isinstance(c, Tell | Answer)]
    assert told
    assert made.state is State.EMPTY
    assert made.generation == before + 1
    tell(made, create("n"))
    generation = made.generation
    assert isinstance(tell(made, Reset("b", 1, origin))[0].answer, Over)
    assert (made.state, made.generation) == (State.CREATING, generation)
    assert isinstance(tell(made, attach("a", 9, origin=origin))[0].answer, Over)


def test_it_lives_for_its_time_after_the_last_client_has_left():
    made = box(State.READY, "b")
    tell(made, Gone("a"), now=5.0)
    assert tell(made, Tick(), now=9.0) == []
    tell(made, Gone("b"), now=9.0)
    assert made.deadline == 109.0
    assert tell(made, Tick(), now=108.9) == []
    assert tell(made, Tick(), now=109.0) == [Drop(1)]
    assert made.idle
    assert "nobody was there for 100 s" in made.story[-1][2]


def test_who_was_silent_and_is_heard_of_again_is_attached():
    made = box(State.READY)
    tell(made, Tick(), now=10.0)
    assert not made.attached
    tell(made, Beat("a", 1), now=50.0)
    assert made.attached == {"a"}
    tell(made, Gone("a"), now=50.0)
    tell(made, Tick(), now=150.0)
    ((news),) = tell(made, Beat("b", 1), now=150.0)
    assert (news.clients, type(news.news)) == (("b",), Over)


def test_the_table_says_what_is_legal():
    for state, ways in TRANSITIONS.items():
        made = box()
        for to in State:
            made.state = state
            if to in ways:
                made._enter(to, 0.0, "")
            else:
                with pytest.raises(ProtocolError, match=f"{state} does not lead to {to}"):
                    made._enter(to, 0.0, "")


# -- schedules ---------------------------------------------------------------------------------


class Crowd:
    """Clients that create, attach, reset, die and fall silent, at random."""

    #: what happens -> how often
    WEIGHTS: ClassVar = {
        "create": 8,
        "attach": 3,
        "chief": 6,
        "die": 1.5,
        "silent": 1,
        "reset": 0.7,
        "worker": 0.7,
        "saved": 1,
        "reload": 3,
        "restore": 1,
        "leave": 1,
        "move": 4,
    }

    def __init__(self, seed, machine=Container):
        self.rng = random.Random(seed)
        self.box = machine("ctr", LIMITS, 0.0)
        self.now, self.lives = 0.0, Counter()
        self.open, self.number = {}, Counter()
        #: client -> the generation that it initialises
        self.chiefs, self.silent = {}, set()
        self.initialised, self.seen, self.reloads = {}, Counter(), []
        self.moves, self.dropped = [], set()
        self.dead_workers = set()
        self.workers = 0

    def name(self, letter):
        return f"{letter}{self.lives[letter]}"

    def everybody(self):
        return [self.name(letter) for letter in "abcd"]

    def send(self, event):
        again = self.rng.random() < 0.2
        for _ in range(1 + again):
            # A copy of all that it knows is slow to make.
            known = state_of(self.box) if self.rng.random() < 0.02 else None
            before = self.box.state
            try:
                commands = self.box.handle(event, self.now)
            except (FencedError, ProtocolError):
                self.seen["refused"] += 1
                if known is not None:
                    assert state_of(self.box) == known, f"{event} is refused, and changes it"
                continue
            assert self.box.state is before or self.box.story[-1][1] is self.box.state
            for command in commands:
                self.hear(command)
        self.check()

    def hear(self, command):
        box = self.box
        if isinstance(command, Reload):
            self.reloads.append(command.generation)
        if isinstance(command, Move):
            self.seen["Move"] += 1
            assert command.generation == box.generation
            assert command.former not in self.dropped, "what is moved was let go of"
            self.moves.append(command)
        if isinstance(command, Drop):
            self.dropped.update(range(command.generation + 1))
            assert box.generation not in self.dropped
        if not isinstance(command, Answer):
            return
        answer, name = command.answer, command.client
        self.seen[type(answer).__name__] += 1
        if isinstance(answer, Initialise):
            owner = self.chiefs.setdefault(answer.generation, name)
            assert owner == name, "two chiefs of one generation"
            assert box.chief == name
            return
        if name in self.open and self.open[name].request == command.request:
            del self.open[name]
        if isinstance(answer, Ready):
            assert answer.generation == box.generation
            assert answer.origin in self.initialised
            assert answer.spec == self.initialised[answer.origin]

    def check(self):
        box = self.box
        for name, event in self.open.items():
            if name in self.silent:
                continue
            assert name in box._waiting, f"{event} is forgotten"
            assert event.until > self.now or box._initialises(name) or self.now < event.until + 2
        if box.state in (State.READY, State.LOST):
            assert not box._waiting
        if box.state is State.EMPTY:
            assert not any(isinstance(w, Create) for w in box._waiting.values())
        if box.state is State.READY:
            assert not self.dead_workers.intersection(box.hosts)
        assert (box.state is State.CREATING) == (box.chief is not None and box.origin is None)

    def step(self):
        rng, box = self.rng, self.box
        self.now += rng.choice([0, 0.1, 1])
        name = rng.choice(self.everybody())
        kind = rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))[0]
        if kind in ("create", "attach") and name not in self.open and name not in self.silent:
            until = self.now + rng.choice([0, 3, 30])
            spec = rng.choice(["mlp"] * 9 + ["linear"])
            request = self.number[name]
            self.number[name] += 1
            new = (
                Create(name, request, spec, until)
                if kind == "create"
                else Attach(name, request, until)
            )
            self.open[name] = new
            self.send(new)
        elif kind == "chief" and self.chiefs:
            generation = rng.choice(sorted(self.chiefs)[-3:])
            chief = self.chiefs[generation]
            if rng.random() < 0.2:
                self.fail(chief, generation)
            else:
                self.initialise(chief, generation)
        elif kind == "die":
            self.lives[name[0]] += 1
            self.open.pop(name, None)
            self.send(Gone(name))
        elif kind == "silent":
            self.silent.add(name)
        elif kind == "reset" and box.current is not None:
            self.open.pop(name, None)
            request = self.number[name]
            self.number[name] += 1
            self.send(Reset(name, request, rng.choice([box.current, box.current - 1])))
        elif kind == "worker":
            hosts = box.hosts or (f"w{self.workers}",)
            if box._move is not None:
                hosts = rng.choice([box._move.hosts, box._move.target or hosts])
            host = rng.choice(hosts)
            self.dead_workers.add(host)
            self.send(WorkerLost(host))
            self.workers += 2
        elif kind == "leave":
            host = rng.choice(box.hosts or (f"w{self.workers}",))
            self.send(Leaving((host,), rng.random() < 0.8))
        elif kind == "move" and self.moves:
            self.move(self.moves[-1])
        elif kind == "saved" and box.state is State.READY:
            self.send(Saved(box.generation, "ckpt", 1))
        elif kind == "restore" and name not in self.open and name not in self.silent:
            request = self.number[name]
            self.number[name] += 1
            self.open[name] = Restore(name, request, rng.choice(["ckpt", "old"]), self.now + 30)
            self.send(self.open[name])
        elif kind == "reload" and self.reloads and rng.random() < 0.2:
            self.send(NotRestored(self.reloads[-1], "damaged"))
        elif kind == "reload" and self.reloads:
            generation = self.reloads[-1]
            self.send(Restored(generation, (f"w{self.workers}", f"w{self.workers + 1}")))
        self.breathe()

    def initialise(self, chief, generation):
        """The chief of a generation has done it: it is counted if it is taken."""
        was = self.box.state, self.box.generation
        spec = self.box.spec
        hosts = (f"w{self.workers}", f"w{self.workers + 1}")
        self.initialised[generation] = spec
        self.send(Created(chief, generation, hosts))
        if self.box.origin == generation and was == (State.CREATING, generation):
            self.seen["initialised"] += 1
            assert not self.dead_workers.intersection(hosts)
        elif self.box.origin != generation:
            del self.initialised[generation]

    def move(self, command):
        """One word of those who do what was commanded last."""
        box, rng = self.box, self.rng
        stay = [h for h in command.hosts if h not in command.leaving]
        if rng.random() < 0.2:
            self.send(NotMoved(command.generation, "no room"))
        elif rng.random() < 0.5:
            self.workers += 1
            hosts = tuple(h if h in stay else f"w{self.workers}" for h in command.hosts)
            self.send(Placed(command.generation, hosts))
        elif box._move is not None and box._move.target and box.generation == command.generation:
            target = box._move.target
            self.send(Moved(command.generation))
            if box.state is State.READY:
                self.seen["moved"] += 1
                assert box.hosts == target

    def fail(self, chief, generation):
        if self.box._initialises(chief) and self.box.generation == generation:
            self.open.pop(chief, None)
        self.send(Failed(chief, generation, "ValueError"))

    def breathe(self):
        for name in self.everybody():
            if name not in self.silent:
                self.send(Beat(name))
            elif name not in self.box.heard:
                # Its lease has lapsed: whatever it waited for, it has to ask anew.
                self.open.pop(name, None)
                self.silent.discard(name)
        for name in [n for n in self.open if n in self.silent]:
            if self.now - self.box.heard.get(name, -99) >= LIMITS.client_lease:
                del self.open[name]
        self.send(Tick())

    def settle(self):
        """Time passes: every wait ends."""
        for _ in range(100):
            self.now += 1.0
            if self.box.state is State.CREATING:
                self.initialise(self.box.chief, self.box.generation)
            self.breathe()
        assert not self.open, self.open
        assert not self.box.waiting()


def crowds(seeds, machine=Container):
    seen = Counter()
    for seed in seeds:
        crowd = Crowd(seed, machine)
        try:
            for _ in range(60):
                crowd.step()
            crowd.settle()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        seen += crowd.seen
    return seen


def test_it_is_initialised_once_per_generation_and_nobody_waits_for_ever():
    seen = crowds(range(1000))
    for what in ("Initialise", "Ready", "Refused", "Late", "Lost", "Over", "initialised"):
        assert seen[what] > 200, seen
    assert min(seen["Move"], seen["moved"]) > 50, seen


class Generous(Container):
    """Broken: the next chief has the generation of the one before."""

    def _depose(self, why, now):
        commands = super()._depose(why, now)
        self.generation -= 1
        return [
            Answer(c.client, c.request, Initialise(self.generation))
            if isinstance(c, Answer) and isinstance(c.answer, Initialise)
            else c
            for c in commands
        ]


class Trusting(Container):
    """Broken: shards may be on workers that have died."""

    def handle(self, event, now):
        return [] if isinstance(event, WorkerLost) else super().handle(event, now)


class Hasty(Container):
    """Broken: what is moved is let go of before it has arrived."""

    def _begin_move(self):
        return [Drop(self._move.former), *super()._begin_move()]


class Forgetful(Container):
    """Broken: who waits for a chief that dies is forgotten."""

    def _elect(self, now):
        return super()._elect(now) if len(self._waiting) == 1 else []


@pytest.mark.parametrize("broken", [Generous, Trusting, Hasty, Forgetful])
def test_the_crowd_finds_what_is_broken(broken):
    with pytest.raises(AssertionError, match="seed"):
        crowds(range(200), broken)
