"""Checkpoints of sessions, written and read by the worker that has the lead.

It is a client of the shards like any other: it pulls all of them, with the optimizer's slots, as of
one assign; and puts back what it has read by an assign.  Files are read and written in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dtrain.arrays import aligned_bytes
from dtrain.config import settings
from dtrain.errors import CheckpointError, FencedError, StorageError
from dtrain.runtime import checkpoint
from dtrain.runtime.rpc import ask
from dtrain.runtime.sessions.conversation import Conversation, Pulled, Tie, Voices, gather
from dtrain.runtime.sessions.shards import Content, read
from dtrain.runtime.sessions.worker import Containers, Hosted
from dtrain.runtime.updater import cut

if TYPE_CHECKING:
    from distributed import Worker


class Keeper:
    """Saves and restores the sessions whose lead is on this worker.

    Parameters
    ----------
    worker : distributed.Worker
    containers : Containers
    """

    def __init__(self, worker: Worker, containers: Containers) -> None:
        self._worker = worker
        self._containers = containers
        #: of the sessions of a moment: their ties, for as long as they are hosted
        self._ties: dict[str, tuple[Hosted, Tie]] = {}
        #: one at a time: two that save to one place would be in each other's way
        self._turn = asyncio.Lock()
        self.handlers: dict[str, Callable[..., Any]] = {
            "dtrain_session_save": self.save,
            "dtrain_session_load": self.load,
        }

    async def save(
        self, session: str, generation: int, where: str, keep: int, seconds: float
    ) -> str:
        """Write a checkpoint, tell the master, and return its place."""
        async with self._turn:
            hosted, tie = self._tie(session, generation)
            with tie.voice() as voice:
                talk = Conversation(
                    self._ask, tie, voice, time.monotonic() + seconds, settings().poll
                )
                pulled = await talk.pull(range(len(tie.hosts)), op="dtrain_session_contents")
            entry = await asyncio.to_thread(self._write, hosted, tie, pulled, where, keep)
        await ask(
            self._worker.scheduler,
            "dtrain_session_saved",
            settings().call_deadline,
            session=session,
            generation=generation,
            source=where,
            step=pulled.version,
        )
        return f"{entry.where.rstrip('/')}/{entry.name}"

    async def load(self, session: str, generation: int, where: str, seconds: float) -> int:
        """Assign what the newest checkpoint in a place has; a version that has it."""
        until = time.monotonic() + seconds
        hosted, tie = self._tie(session, generation)
        snapshot = await asyncio.to_thread(read, where, hosted.about)
        contents = {shard.index: Content.of(snapshot, shard) for shard in hosted.about.plan.shards}
        with tie.voice() as voice:
            talk = Conversation(self._ask, tie, voice, until, settings().poll)
            return await talk.assign(contents)

    async def _ask(self, address: str, op: str, deadline: float, **message: Any) -> Any:
        return await ask(self._worker.rpc(address), op, deadline, **message)

    def _tie(self, session: str, generation: int) -> tuple[Hosted, Tie]:
        hosted = self._containers.hosted(session, generation)
        self._ties = {
            name: found
            for name, found in self._ties.items()
            if self._containers.sessions.get(name) is found[0]
        }
        if session not in self._ties:
            name = f"keeper@{self._worker.address}"
            about, voices = hosted.about, Voices(name)
            tie = Tie(session, name, generation, generation, hosted.hosts, about, voices)
            self._ties[session] = hosted, tie
        return self._ties[session]

    def _write(
        self, hosted: Hosted, tie: Tie, pulled: Pulled, where: str, keep: int
    ) -> checkpoint.Entry:
        about = hosted.about

        def fence() -> None:
            if self._containers.sessions.get(tie.session) is not hosted:
                raise FencedError(
                    f"session {tie.session}: generation {tie.generation} has ended meanwhile"
                )

        # The newest is what was written last: after a restoration versions come again.
        try:
            there = [entry.step for entry in checkpoint.entries(where, verify=False)]
        except CheckpointError as error:
            raise StorageError(str(error)) from error
        snapshot = checkpoint.Snapshot(
            step=max(pulled.version, max(there, default=-1) + 1),
            layout=about.layout,
            params=gather(about, pulled),
            slots={name: _slot(hosted, pulled, name) for name in about.optimizer.slots},
            shards=about.plan,
            state={
                "version": pulled.version,
                "pushes": min(reply["step"] for reply in pulled.shards.values()),
                # Shard -> which pushes are in it, so that one that comes again counts once.
                "pushed": {str(k): pulled.shards[k]["pushed"] for k in sorted(pulled.shards)},
            },
            about={
                "job": f"session {tie.session}",
                "optimizer": about.optimizer.to_dict(),
                "seed": about.seed,
            },
        )
        return checkpoint.save(where, snapshot, keep=keep, fence=fence)


def _slot(hosted: Hosted, pulled: Pulled, name: str) -> np.ndarray:
    """One of the optimizer's slots, in a flat buffer as the parameters are."""
    buffer = aligned_bytes(hosted.about.layout.nbytes)
    for index, reply in pulled.shards.items():
        of: Mapping[str, Any] = reply["slots"]
        ranges = hosted.about.plan.shards[index].ranges
        for target, source in zip(cut(buffer, ranges), of[name], strict=True):
            target[...] = source
    return np.asarray(buffer)
