"""A client process of a session, for tests that start several: see ``test_sessions``.

    python -m tests.runtime.shared ADDRESS NAME FOLDER SECONDS [placing]

It says ``up``, waits for a line on stdin, creates, and prints what it has pulled.  Each
initialisation leaves a file in the folder, and takes so many seconds; with ``placing`` they pass
once the first shard is at its worker and the others are not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from pathlib import Path

import numpy as np

import dtrain
from dtrain.sessions import creation


class Traced:
    """A model whose initialisation leaves a trace, and differs from one to the next."""

    def __init__(self, folder: str, seconds: float = 0.0) -> None:
        self.folder = folder
        self.seconds = seconds

    def config(self) -> dict[str, str]:
        return {"folder": self.folder}

    def init(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        Path(self.folder, f"begun-{os.getpid()}-{uuid.uuid4().hex}").touch()
        time.sleep(self.seconds)
        value = int.from_bytes(os.urandom(2), "big")
        return {"w": np.full((40, 4), value, np.float32), "b": np.full(4, value, np.float32)}

    def loss_and_grads(self, params, batch):
        raise NotImplementedError

    def predict(self, params, x):
        raise NotImplementedError


def placing(folder: str, seconds: float) -> None:
    """From now on all shards but the first one take so long on their way to a worker."""
    plain = creation.ask

    async def ask(peer, op, deadline, **message):
        if message["shard"]:
            Path(folder, "placing").touch()
            await asyncio.sleep(seconds)
        return await plain(peer, op, deadline, **message)

    creation.ask = ask


def main(address: str, name: str, folder: str, seconds: str, where: str = "") -> None:
    if where == "placing":
        placing(folder, float(seconds))
        seconds = "0"
    with dtrain.Session(name, client=address, timeout=30) as session:
        print("up", flush=True)
        sys.stdin.readline()
        session.create(
            Traced(folder, float(seconds)),
            optimizer=dtrain.optim.sgd(1.0),
            partitioner=dtrain.FixedShards(3),
        )
        params = session.pull().params
        found = {float(x) for p in params.values() for x in np.unique(p)}
        print(sorted(found), flush=True)


if __name__ == "__main__":
    # By its name, so that all processes mean the same class.
    from tests.runtime import shared

    shared.main(*sys.argv[1:])
