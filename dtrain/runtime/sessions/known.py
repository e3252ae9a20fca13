"""What a worker knows of sessions whose tasks it runs: where the shards are, and the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import cloudpickle

from dtrain.config import settings
from dtrain.runtime.device import Gpu
from dtrain.runtime.rpc import ask
from dtrain.runtime.sessions.conversation import Tie, Voices
from dtrain.runtime.sessions.shards import About

if TYPE_CHECKING:
    from distributed import Worker

#: Sessions of clients that are remembered, the latest.
_KEPT = 100


class Known:
    """One generation of a session, for one client whose tasks run here.

    Attributes
    ----------
    tie : Tie
    poll : float
        Seconds that one question waits at the other end.
    """

    def __init__(self, tie: Tie, model: bytes, poll: float) -> None:
        self.tie = tie
        self.poll = poll
        self._pickled = model
        #: device -> what is not in use
        self._free: dict[str, list[tuple[Any, Gpu | None]]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def model(self, device: str) -> Iterator[tuple[Any, Gpu | None]]:
        """A model that no other thread has meanwhile: it may keep scratch arrays.

        And its memory on ``device``; None for ``"cpu"``.
        """
        with self._lock:
            free = self._free.setdefault(device, [])
            found = free.pop() if free else None
        if found is None:
            gpu = None if device == "cpu" else Gpu(device, self.tie.about.layout)
            found = cloudpickle.loads(self._pickled), gpu
        yield found
        with self._lock:
            free.append(found)


class Acquaintance:
    """All that a worker knows of sessions.

    Parameters
    ----------
    worker : distributed.Worker
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._known: dict[tuple[str, str], Known] = {}
        self._asking = asyncio.Lock()

    def forget(self, session: str, client: str | None = None) -> None:
        """A generation has ended, or a client has left."""
        for key in [k for k in self._known if k[0] == session and client in (None, k[1])]:
            del self._known[key]

    async def find(self, session: str, generation: int, client: str) -> Known:
        """What is known of a generation; asks the master where it is not.

        Raises
        ------
        FencedError
            Another generation has begun.
        """
        async with self._asking:
            known = self._known.pop((session, client), None)
            if known is None or known.tie.generation != generation:
                known = await self._ask(session, generation, client)
            self._known[session, client] = known
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
            return known

    async def _ask(self, session: str, generation: int, client: str) -> Known:
        config = settings()
        found = await ask(
            self._worker.scheduler,
            "dtrain_session_lookup",
            config.call_deadline,
            session=session,
            generation=generation,
        )
        tie = Tie(
            session,
            client,
            found["origin"],
            generation,
            tuple(found["hosts"]),
            About.of(found["about"]),
            Voices(f"{client}@{self._worker.address}"),
        )
        return Known(tie, found["model"], config.poll)
