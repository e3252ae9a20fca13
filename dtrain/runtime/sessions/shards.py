"""A shard of a session where it is hosted, and what all who have to do with it know of it.

It lives without a task: array maths runs off the event loop, under the shard's lock, and what its
machine (:class:`dtrain.machines.assigns.Shard`) decides is done there as one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from distributed.utils import offload

from dtrain.arrays import ALIGNMENT, aligned_bytes, quiet
from dtrain.errors import CheckpointError, FencedError, ProtocolError
from dtrain.layout import Layout
from dtrain.machines import assigns
from dtrain.machines.assigns import (
    Answer,
    Apply,
    Discard,
    Drop,
    Flip,
    Gone,
    Keep,
    Know,
    Prepare,
    Pull,
    Push,
)
from dtrain.optim import Optimizer
from dtrain.partition import Range, Shard, ShardPlan
from dtrain.runtime import checkpoint
from dtrain.runtime.buffers import Buffers
from dtrain.runtime.points import at_point
from dtrain.runtime.queues.lending import Lent, lent_again
from dtrain.runtime.shards import Contents, contents, fill_slots, private_slots
from dtrain.runtime.updater import Flat, Updater, cut

T = TypeVar("T")

#: Copies of its parameters that a shard lends at most, and their bytes; it lends one in any case.
_LENT, _LENT_BYTES = 4, 1 << 26

#: To have a thread of its own copy a shard takes longer than to copy so many bytes, in memory
#: that has been in use before.
AT_ONCE = 1 << 20


@dataclass(frozen=True)
class About:
    """What the variables of a session are: the same for all who have to do with them."""

    layout: Layout
    plan: ShardPlan
    optimizer: Optimizer
    seed: int

    @classmethod
    def of(cls, raw: bytes) -> About:
        values = json.loads(raw)
        return cls(
            Layout.from_dict(values["layout"]),
            ShardPlan.from_dict(values["plan"]),
            Optimizer.from_dict(values["optimizer"]),
            values["seed"],
        )

    def raw(self) -> bytes:
        """Bytes from which :meth:`of` makes an equal one."""
        values = {
            "layout": self.layout.to_dict(),
            "plan": self.plan.to_dict(),
            "optimizer": self.optimizer.to_dict(),
            "seed": self.seed,
        }
        return json.dumps(values).encode()


@dataclass(frozen=True)
class Content:
    """What a shard is to be: flat arrays for its ranges, and what the optimizer has gathered.

    ``slots``: slot name -> a flat array for each range; None: those that are there stay, and so
    does ``step``, the number of gradients that they have seen.
    """

    params: Flat
    slots: Mapping[str, Flat] | None = None
    step: int = 0

    @classmethod
    def of(cls, snapshot: checkpoint.Snapshot, shard: Shard) -> Content:
        """A shard's part of a checkpoint; views."""
        return cls(
            cut(snapshot.params, shard.ranges),
            {name: cut(slot, shard.ranges) for name, slot in snapshot.slots.items()},
            int(snapshot.state["pushes"]),
        )


class HostedShard:
    """One shard of a session: parameters, slots, and what an assign has prepared.

    Its lock is held during array maths, so the event loop never waits for it.
    """

    def __init__(
        self, shard: Shard, about: About, machine: assigns.Shard, content: Content
    ) -> None:
        optimizer = about.optimizer.inner
        self.index = shard.index
        self.ranges = shard.ranges
        self.machine = machine
        #: gradients that the optimizer has seen
        self.step = content.step
        #: age of a gradient -> how many were as old: pushes applied between its pull and itself
        self.ages: dict[int, int] = {}
        #: reentrant: the event loop tries it, and then calls what takes it
        self._lock = threading.RLock()
        self._params = [aligned_bytes(r.stop - r.start).view(r.dtype) for r in shard.ranges]
        self._slots = private_slots(optimizer, shard.ranges, 1)
        self.nbytes = sum(p.nbytes for p in self._params)
        self._updater = Updater(shard, about.layout, optimizer, 1, [self._params], self._slots)
        self._prepared: Content | None = None
        self._frozen = False
        #: memory that is lent to those who pull, the newest last, and the version that it has
        self._lent: list[Lent] = []
        self._lent_version: int | None = None
        #: what lent gradients and parameters are copied to
        self._buffers = Buffers()
        self.check(content.params)
        self._fill(content)

    def check(self, flat: Flat) -> None:
        """Refuse what is not a flat array for each range; nothing is changed then."""
        found = [(str(a.dtype), a.size) for a in flat]
        expected = [(r.dtype, _size(r)) for r in self.ranges]
        if found != expected:
            raise ProtocolError(f"shard {self.index}: found arrays {found}, expected {expected}")

    def pull(self, event: Pull, wanted: Sequence[Sequence[int]] | None) -> tuple[Any, Flat]:
        """The answer, and copies of the parameters, or of some bytes of the whole model alone."""
        with self._lock:
            answer = self._obey(event)
            if wanted is None:
                return answer, [p.copy() for p in self._params]
            return answer, [self._part(start, stop).copy() for start, stop in wanted]

    def lend(self, event: Pull) -> tuple[Any, dict[str, Any] | None]:
        """The answer, and where a copy of the parameters can be read; None: there is no memory.

        All that pull the same version read the same copy.  Its memory is used again when there
        are some newer ones: who has not read it by then is told, and pulls without.
        """
        with self._lock:
            answer = self._obey(event)
            version = self.machine.version
            if self._lent_version != version:
                most = min(max(_LENT_BYTES // self.nbytes, 1), _LENT)
                oldest = self._lent.pop(0) if len(self._lent) >= most else None
                made = lent_again(oldest, [p.view(np.uint8) for p in self._params])
                if made is None:
                    self._lent_version = None
                    return answer, None
                self._lent.append(made)
                self._lent_version = version
            return answer, self._lent[-1].told()

    async def do(self, what: Callable[[], T], *, at_once: int = AT_ONCE) -> T:
        """Call it: here if nobody is at the shard, and it has ``at_once`` bytes at most; or else
        in a thread, which is as if so many bytes were copied."""
        if self.nbytes <= at_once and self._lock.acquire(blocking=False):
            try:
                return what()
            finally:
                self._lock.release()
        return await offload(what)

    def lent(self, event: Pull) -> bool:
        """Whether a pull is answered by what is lent already."""
        current = self._lent_version == self.machine.version
        return current and event.committed <= self.machine.number

    def borrowed(self, told: dict[str, Any]) -> Flat | None:
        """A copy of this shard's part of a whole buffer that is lent; None: it cannot be had."""
        lent = Lent.borrowed(told)
        if lent is None:
            return None
        sizes = [-(-(r.stop - r.start) // ALIGNMENT) * ALIGNMENT for r in self.ranges]
        buffer, outs, at = self._buffers.room(sum(sizes)), [], 0
        for r, size in zip(self.ranges, sizes, strict=True):
            outs.append((r.start, buffer[at : at + r.stop - r.start]))
            at += size
        with closing(lent):
            try:
                lent.fill(outs)
            except OSError:
                return None
        return [out.view(r.dtype) for (_, out), r in zip(outs, self.ranges, strict=True)]

    def push(self, event: Push, version: int | None, grads: Flat) -> Any:
        self.check(grads)
        with self._lock:
            before, steps = self.machine.version, self.step
            answer = self._obey(event, grads=grads)
            if version is not None and self.step > steps:
                age = max(before - version, 0)
                self.ages[age] = self.ages.get(age, 0) + 1
            return answer

    def prepare(self, event: Prepare, content: Content) -> Any:
        self.check(content.params)
        with self._lock:
            return self._obey(event, content=content)

    def hear(self, event: Know | Discard | Gone) -> Any:
        with self._lock:
            return self._obey(event)

    def contents(self, event: Pull) -> tuple[Any, dict[str, Any], Contents]:
        """The answer to a pull, what there was besides, and copies of all with the slots."""
        with self._lock:
            answer = self._obey(event)
            return answer, self._accounts(), contents(self._params, self._slots[0])

    def freeze(self, committed: int) -> None:
        """Be as of the newest assign, and stay so: nothing is applied or answered any more."""
        with self._lock:
            if not self._frozen:
                self._obey(Know(self.machine.generation, "", 0, committed))
                self._frozen = True

    def handed(self) -> tuple[dict[str, Any], Contents]:
        """All that there is of a frozen shard, for whoever has it next; copies."""
        with self._lock:
            if not self._frozen:
                raise ProtocolError(f"shard {self.index}: found it in use, expected it frozen")
            accounts = {
                **self._accounts(),
                "duplicates": self.machine.duplicates,
                "ages": dict(self.ages),
            }
            return accounts, contents(self._params, self._slots[0])

    def _accounts(self) -> dict[str, Any]:
        return {
            "version": self.machine.version,
            "step": self.step,
            "pushed": self.machine.pushed,
        }

    def _obey(self, event: Any, grads: Flat = (), content: Content | None = None) -> Any:
        """What the machine answers, once all that it commands is done."""
        if self._frozen:
            raise FencedError(f"shard {self.index}: it is moving to another worker")
        answer = None
        for command in self.machine.handle(event, time.monotonic()):
            if isinstance(command, Keep):
                self._prepared = content
            elif isinstance(command, Drop):
                self._prepared = None
            elif isinstance(command, Flip):
                assert self._prepared is not None
                self._fill(self._prepared)
                self._prepared = None
            elif isinstance(command, Apply):
                at_point("applying")
                with quiet():
                    self._updater.apply(self.step + 1, grads)
                self.step += 1
            elif isinstance(command, Answer):
                answer = command.answer
        return answer

    def _fill(self, content: Content) -> None:
        for target, source in zip(self._params, content.params, strict=True):
            target[...] = source
        if content.slots is not None:
            fill_slots(self._slots[0], content.slots)
            self.step = content.step

    def _part(self, start: int, stop: int) -> Any:
        """The bytes of the model from ``start`` to ``stop``, which are of one range."""
        for r, array in zip(self.ranges, self._params, strict=True):
            if r.start <= start and stop <= r.stop:
                size = array.itemsize
                return array[(start - r.start) // size : (stop - r.start) // size]
        raise ProtocolError(
            f"shard {self.index}: bytes {start} to {stop} are wanted, found {self.ranges}"
        )


def _size(r: Range) -> int:
    return (r.stop - r.start) // np.dtype(r.dtype).itemsize


def read(where: str, about: About) -> checkpoint.Snapshot:
    """The newest checkpoint in a place.

    Raises
    ------
    CheckpointError
        There is none, or it is not of these variables and this optimizer.
    """
    entry = checkpoint.latest(where)
    if entry is None:
        raise CheckpointError(f"{where}: found no checkpoint that verifies, expected one")
    found = checkpoint.about(entry).get("optimizer")
    expected = json.loads(json.dumps(about.optimizer.to_dict()))
    if found != expected:
        raise CheckpointError(
            f"{where}/{entry.name}: found the optimizer {found}, expected {expected}"
        )
    snapshot = checkpoint.load(entry, fill=about.optimizer.initial)
    if snapshot.layout.to_dict() != about.layout.to_dict():
        raise CheckpointError(
            f"{where}/{entry.name}: found the variables {_names(snapshot.layout)}, "
            f"expected {_names(about.layout)}"
        )
    if not {"version", "pushes"} <= set(snapshot.state):
        raise CheckpointError(f"{where}/{entry.name}: found one of a job, expected a session's")
    return snapshot


def pushed(snapshot: checkpoint.Snapshot, about: About, shard: int) -> list[assigns.Known]:
    """Which pushes are in a shard of a checkpoint; none are known if it was cut otherwise."""
    if snapshot.shards.to_dict() != about.plan.to_dict():
        return []
    found = snapshot.state.get("pushed", {}).get(str(shard), [])
    return [(name, below, tuple(ahead)) for name, below, ahead in found]


def _names(layout: Layout) -> str:
    return ", ".join(f"{v.name} {v.dtype}{list(v.shape)}" for v in layout.variables)
