"""What befalls a job: workers that die, stop, hang, come and go, and what people wish."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from dtrain.machines import jobs, membership
from dtrain.machines.jobs import State
from dtrain.messages import Batch
from tests.sim.network import Does
from tests.sim.settings import Settings

if TYPE_CHECKING:
    pass


class Faults:
    """Beside what they strike; :class:`~tests.sim.world.World` is both."""

    def __init__(self, seed: int, settings: Settings, rng: random.Random) -> None:
        super().__init__(seed, settings, rng)
        #: the host that never gets ready
        self.stuck: str | None = None
        #: workers that are about to leave -> until when they wait to be let go
        self.retiring: dict[str, float] = {}
        #: the batch that kills its worker
        self.killer: Batch | None = None
        #: odds that a dead worker comes back
        self.comes_back = rng.choice([0.3, 0.9])
        #: whether anybody has died, or was held
        self.cut = False

    def decree(self) -> None:
        """Schedule the job's fate."""
        fate, rng = self.settings.fate, self.rng
        many = {"crash": 1, "crashes": 4, "chief": 2, "losses": 4, "few": 1}.get(fate, 0)
        kinds = Counter({"chief" if fate == "chief" else "crash": many})
        if fate == "chaos":
            every = ["crash", "chief", "stop", "slow", "stuck", "join", "retire"]
            kinds.update(rng.choices(every, k=5))
        elif fate in ("cancel", "client"):
            kinds["crash"] = rng.randint(0, 1)
        elif fate in ("stop", "slow", "stuck", "join", "retire"):
            kinds[fate] = rng.randint(1, 3)
        at = rng.uniform(0, 25)
        for kind in kinds.elements():
            self.after(at, Does("strike", (kind,)))
            # At once, soon after, or whenever.
            at = rng.choice([at, at + rng.random(), rng.uniform(0, 40)])
        if fate == "point" or (fate == "chaos" and rng.random() < 0.5):
            how = rng.choice(["dies", "dies", "stops"])
            self.trap = (rng.choice(self.POINTS), rng.randrange(8), how)
        elif fate == "cancel":
            self.after(rng.uniform(0, 40), Does("told", (jobs.Cancel("somebody cancelled it"),)))
        elif fate == "client":
            gone, away = rng.uniform(0, 20), rng.uniform(1, 30)
            self.after(gone, Does("told", (jobs.ClientGone(),)))
            self.after(gone + away, Does("told", (jobs.ClientBack(),)))
        elif fate == "killer":
            self.comes_back = 1.0
            self.killer = self.victim()

    def victim(self) -> Batch:
        """A batch that is surely trained on."""
        epoch = self.rng.randrange(self.settings.epochs) if self.settings.steps is None else 0
        part = self.rng.randrange(self.settings.replicas)
        if self.settings.steps is None:
            return Batch(epoch, part, self.rng.randrange(self.plan.batches(part)))
        return Batch(epoch, part, 0)

    def on_told(self, event: Any) -> None:
        self.command(event)

    def on_strike(self, kind: str) -> None:
        if kind == "join":
            self.on_join()
            return
        alive = [p.address for p in self.processes.values() if not p.dead and not p.held]
        chosen = [h.address for h in self.job.hosts if h.address in alive]
        if not alive or self.over:
            return
        first = kind == "chief" and chosen
        address = chosen[0] if first else self.rng.choice(chosen or alive)
        self.story.counts[kind] += 1
        if kind in ("crash", "chief"):
            self.on_crash(address)
        elif kind == "retire":
            self.members(membership.Retiring(address))
            self.retiring[address] = self.now + 90
            if address in self.job._hosts:
                self.command(jobs.Change(f"worker {address} is about to leave"))
        elif kind == "stop":
            self.on_stop(address)
        else:
            self.hold(address, kind)
            late = self.rng.uniform(5, 40)
            # Where it is given up its nanny starts it again, if it has one.
            end = "crash" if kind == "stuck" and self.rng.random() < 0.5 else "wake"
            self.after(late, Does(end, (address,)))
            if kind == "stuck":
                self.after(8.0, Does("given_up", (address,)))

    def on_given_up(self, address: str) -> None:
        """The master sees no progress where a replica is in user code."""
        process = self.processes[address]
        if process.held == "stuck" and not process.dead and address in self.job._hosts:
            self.story.counts["given up"] += 1
            self.died(address)
            self.members(membership.Stuck(address, "has been in user code for 8 s"))

    def on_crash(self, address: str) -> None:
        if self.processes[address].dead:
            return
        super().on_crash(address)
        self.cut = True
        if self.job is not None:
            self.story.counts[f"dies while {self.job.state}"] += 1
        self.died(address)
        self.after(self.rng.choice([0.03, 0.03, 4.0]) + self.rng.random(), Does("left", (address,)))
        if self.rng.random() < self.comes_back:
            late = 60.0 if self.settings.fate == "few" else 5.0
            self.after(self.rng.uniform(0.5, late), Does("join"))

    def hold(self, address: str, how: str) -> None:
        super().hold(address, how)
        self.cut = True

    def on_stop(self, address: str) -> None:
        self.hold(address, "stopped")
        if self.rng.random() < 0.7:
            self.after(self.rng.uniform(1, 25), Does("wake", (address,)))

    def retire(self) -> None:
        """Those who are about to leave do so once they are let go, or cannot wait any longer."""
        for address, until in list(self.retiring.items()):
            if self.let_go(address):
                del self.retiring[address]
                self.processes[address].dead = True
                self.on_left(address)
            elif self.now > until:
                del self.retiring[address]
                self.on_crash(address)

    def let_go(self, address: str) -> bool:
        """Whether a worker that is about to leave has nothing that anybody needs."""
        job = self.job
        moves = job.state is State.RECOVERING
        return job.terminal or not (moves or address in job._hosts)
