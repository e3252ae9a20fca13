"""A seeded simulator: the pure machines of a whole small job, joined by a fake network.

``run(seed, **settings)`` draws a job (replicas, shards, workers, rows), what befalls it (its
*fate*) and every delay from one ``random.Random(seed)``, and drives the real machines from the
workers' first hello to the one terminal state.  The network delays, reorders, repeats and loses
messages; processes die, stop and wake up, at any point of what they do; workers come and go.
The rules of ``design.md`` are checked where something changes; the first that does not hold
raises :class:`Broken`, which names the seed and tells the last events.

The modules: ``settings`` (what is drawn), ``network`` (time, processes, messages), ``world`` (the
master, the control plane), ``faults`` (what befalls), ``checks`` (the rules of the control plane),
``recovery`` (what a new generation makes of an old one), and the data planes: ``shm`` and ``comm``
(both ``sync``, held to ``reference``) and ``asynchronous``.

To add a fault: a name in :data:`FATES`, a kind in ``Faults.on_strike``, and what it may lead to
in ``Checks.check_end``.  To add a point where a process may die: a name in ``POINTS``.
"""

from __future__ import annotations

import random
from typing import Any

from tests.sim.asynchronous import AsyncWorld
from tests.sim.comm import CommWorld
from tests.sim.recovery import Recovery
from tests.sim.settings import FATES, Broken, Machines, Settings, Story, state_of
from tests.sim.shm import ShmWorld

__all__ = ["FATES", "Broken", "Machines", "Recovery", "Settings", "Story", "run", "state_of"]

WORLDS = {"shm": ShmWorld, "comm": CommWorld}


def run(seed: int, **fixed: Any) -> Story:
    """Simulate the job of a seed to its end; ``fixed`` settings are not drawn."""
    rng = random.Random(seed)
    settings = Settings.draw(rng, **fixed)
    world = AsyncWorld if settings.mode == "async" else WORLDS[settings.transport]
    return world(seed, settings, rng).run()
