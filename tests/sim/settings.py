"""A simulated job's settings, what befalls it, and the story of what became of it."""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from dtrain.machines.cursor import Cursor
from dtrain.machines.jobs import JobMachine, Limits, State
from dtrain.machines.ledger import Ledger
from dtrain.machines.membership import Membership
from dtrain.machines.plan import Plan
from dtrain.machines.rounds import Rounds
from dtrain.machines.shard import ShardMachine
from tests.sim.recovery import Recovery

#: What befalls a job, and what it means.  An odd is how often it is drawn.
FATES: dict[str, int] = {
    "success": 12,  # nothing, but for the network
    "crash": 8,  # a worker dies
    "crashes": 6,  # several die, at once or one soon after the other
    "chief": 6,  # the chief dies, and the next one may too
    "point": 16,  # a worker dies, or stops, at one point of its loop
    "stop": 8,  # a process is stopped, and may wake up after it was fenced
    "slow": 4,  # user code holds the GIL: not heard of, but it runs
    "stuck": 4,  # user code does not return, and is given up
    "join": 5,  # workers come later
    "retire": 5,  # workers are about to leave, and leave
    "chaos": 10,  # all of this together
    "killer": 4,  # a batch kills its worker, whoever has it
    "losses": 3,  # more workers die than may
    "few": 3,  # too few workers are left
    "nonfinite": 3,  # a gradient or a loss is not finite
    "cancel": 3,
    "client": 2,  # the client goes, and may return
    "unready": 2,  # a worker never gets ready
}
MODES = ("sync", "async")

#: Numbers in a shard.
WIDTH = 2
#: More events than any job of this size takes: nothing moves any more.
MOST_EVENTS = 30_000
#: Seconds without a heartbeat that a worker may take.
LEASE = 4.0


class Broken(AssertionError):
    """A rule of the design does not hold."""


def state_of(machine: Any) -> dict[str, Any]:
    """A copy of all that a machine knows, to compare; without the functions it was given."""
    return copy.deepcopy({k: v for k, v in vars(machine).items() if not callable(v)})


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The classes that a world is made of; a test puts a broken one in."""

    membership: type[Membership] = Membership
    job: type[JobMachine] = JobMachine
    plan: type[Plan] = Plan
    rounds: type[Rounds] = Rounds
    shard: type[ShardMachine] = ShardMachine
    cursor: type[Cursor] = Cursor
    ledger: type[Ledger] = Ledger
    recovery: type[Recovery] = Recovery


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A job, its fate, and how bad the network is; the last five are odds."""

    mode: str
    transport: str
    fate: str
    workers: int
    replicas: int
    shards: int
    batch_size: int
    rows: int
    epochs: int
    steps: int | None
    shuffle: bool
    #: steps between two checkpoints; 0: none (over messages alone)
    cadence: int
    min_workers: int
    max_losses: int
    late: float
    twice: float
    lost: float
    forged: float
    #: that a refusal's effect on the machine is looked at
    looked: float
    machines: Machines = Machines()

    @classmethod
    def draw(cls, rng: random.Random, **fixed: Any) -> Settings:
        """Draw what is not ``fixed``."""
        fates = list(FATES)
        fate = fixed.get("fate") or rng.choices(fates, list(FATES.values()))[0]
        workers = rng.randint(1, 5)
        drawn: dict[str, Any] = {
            "mode": "sync",
            "transport": rng.choice(["shm", "comm"]),
            "fate": fate,
            "workers": workers,
            "replicas": rng.randint(1, 6),
            "shards": rng.randint(1, 4),
            "batch_size": rng.randint(1, 3),
            "epochs": rng.randint(1, 3),
            "steps": rng.randint(1, 9) if rng.random() < 0.2 else None,
            "shuffle": rng.random() < 0.3,
            "cadence": rng.choice([0, 1, 2, 3]),
            "min_workers": workers if fate == "few" else rng.choice([1, 1, min(2, workers)]),
            "max_losses": rng.randint(0, 1) if fate == "losses" else 10,
            "late": rng.choice([0.0, 0.05, 0.2]),
            "twice": rng.choice([0.0, 0.05, 0.2]),
            "lost": rng.choice([0.0, 0.05, 0.1]),
            "forged": rng.choice([0.0, 0.02]),
            "looked": 0.05,
        }
        kept = {**drawn, **fixed}
        if kept["mode"] == "async":
            kept["transport"] = "shm"
            if fate in ("killer", "nonfinite"):
                # Else the limit may come before the batch.
                kept["steps"] = None
        each, replicas = kept["batch_size"], kept["replicas"]
        # Some parts have one row, so one batch, more than the others; or all are alike.
        rest = rng.choice([0, rng.randrange(replicas), rng.randrange(replicas * each)])
        kept.setdefault("rows", replicas * each * rng.randint(1, 3) + rest)
        return cls(**kept)

    @property
    def limits(self) -> Limits:
        return Limits(
            prepare_deadline=150.0,
            stop_grace=60.0,
            client_lease=20.0,
            max_losses=self.max_losses,
            min_workers=self.min_workers,
            recovery_deadline=100.0,
        )


@dataclass
class Story:
    """What became of a seed."""

    seed: int
    settings: Settings
    state: State | None = None
    reason: str | None = None
    message: str = ""
    events: int = 0
    steps: int = 0
    generations: int = 0
    #: how often the network, the workers and the machines did what
    counts: Counter[str] = field(default_factory=Counter)
    #: (time, event): the last ones
    last: deque[tuple[float, Any]] = field(default_factory=lambda: deque(maxlen=40))

    def tell(self) -> str:
        lines = [f"  {now:9.3f}  {repr(event)[:240]}" for now, event in self.last]
        return "\n".join([f"seed {self.seed}: {self.settings}", "the last events:", *lines])
