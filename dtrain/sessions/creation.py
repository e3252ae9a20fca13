"""Creation of a session's variables: what they are, and their initial values on the workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np
from distributed.protocol import to_serialize

from dtrain.errors import ClusterError, DTrainError, FencedError, NonFiniteError, SpecError
from dtrain.layout import Layout
from dtrain.optim import Optimizer
from dtrain.partition import MinSize, Partitioner, PlacementFunction, assign
from dtrain.runtime.modelfile import describe_model
from dtrain.runtime.rpc import ask
from dtrain.runtime.sessions.conversation import RETRY, finite_flat
from dtrain.runtime.sessions.shards import About
from dtrain.runtime.updater import cut
from dtrain.sessions.attachment import Attachment

#: Bytes of a shard at least, where no partitioner says otherwise: to ask one shard more takes a
#: call as long as to copy 2 to 4 MiB through lent memory.
LEAST_SHARD = 1 << 22


def create(
    to: Attachment,
    model: Any,
    optimizer: Optimizer,
    seed: int,
    partitioner: Partitioner | None,
    placement: str | PlacementFunction,
    until: float,
) -> None:
    """Create the variables, or attach to them; see :meth:`dtrain.Session.create`."""
    if isinstance(model, type) or not callable(getattr(model, "init", None)):
        raise SpecError(
            f"model: found {type(model).__name__} {model!r:.80}, expected an object with a method "
            f"init(rng)"
        )
    spec = _fingerprint(model, optimizer, seed)
    with to.lock:
        to.check_open()
        to.forget()
        while True:
            found = to.ask_master("dtrain_session_create", until, spec=spec)
            if found["kind"] != "initialise":
                break
            try:
                about = _initial(
                    to.name, model, optimizer, seed, partitioner, len(found["workers"])
                )
                _initialise(to, found, *about, model, placement, until)
            except FencedError:
                continue  # somebody else creates them: this one was taken for dead
            except BaseException as error:
                with suppress(DTrainError, OSError):
                    # Else the next one waits for the end of the lease.
                    to.call(
                        "dtrain_session_failed",
                        client=to.id,
                        generation=found["generation"],
                        why=f"{type(error).__name__}: {error}",
                    )
                raise
        to.take(found)


def _initialise(
    to: Attachment,
    found: Mapping[str, Any],
    about: About,
    flat: np.ndarray,
    model: Any,
    placement: str | PlacementFunction,
    until: float,
) -> None:
    """As the chief: place the shards, and tell all that they are there."""
    generation, workers = found["generation"], found["workers"]
    if not workers:
        raise ClusterError(f"session {to.name}: no worker is there to host its variables")
    sizes = [shard.nbytes for shard in about.plan.shards]
    hosts = [workers[index] for index in assign(sizes, workers, placement)]
    raw, pickled = about.raw(), _pickled(model)

    async def place() -> None:
        await asyncio.gather(
            *(
                ask(
                    to.client.rpc(hosts[shard.index]),
                    "dtrain_session_open",
                    max(until - time.monotonic(), RETRY),
                    session=to.name,
                    generation=generation,
                    about=raw,
                    hosts=hosts,
                    shard=shard.index,
                    params=[to_serialize(a) for a in cut(flat, shard.ranges)],
                )
                for shard in about.plan.shards
            )
        )

    to.start(place()).result()
    to.call(
        "dtrain_session_created",
        client=to.id,
        generation=generation,
        hosts=hosts,
        about=raw,
        model=pickled,
        sizes=sizes,
        placement=placement if isinstance(placement, str) else "greedy",
    )


def _pickled(model: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(model))
    except Exception as error:
        raise SpecError(
            f"model: found a {type(model).__name__} that cannot be pickled "
            f"({type(error).__name__}: {error}), expected one that can travel to the workers"
        ) from error


def _initial(
    session: str,
    model: Any,
    optimizer: Optimizer,
    seed: int,
    partitioner: Partitioner | None,
    workers: int,
) -> tuple[About, np.ndarray]:
    """What the variables are, and their initial values in a flat buffer."""
    params = model.init(np.random.default_rng(seed))
    layout = Layout.of(params)
    # An update that needs the norms of whole variables is made of one shard alone.
    cutting = layout.uncut if optimizer.inner.stages > 1 else layout
    plan = (partitioner or MinSize(LEAST_SHARD, max(workers, 1))).split(cutting)
    about = About(layout, plan, optimizer, seed)
    try:
        return about, finite_flat(about, params)
    except FloatingPointError as error:
        words = f"session {session}: init of the model: {error}"
        raise NonFiniteError(words, reason="NON_FINITE") from None


def _fingerprint(model: Any, optimizer: Optimizer, seed: int) -> str:
    """What a session's variables are told apart by, in words: the same in all processes."""
    about = describe_model(model)
    kind = f"{type(model).__module__}:{type(model).__qualname__}"
    values = "" if about is None else ", ".join(f"{k}={v!r}" for k, v in about["config"].items())
    return f"{kind}({values}), {optimizer!r}, seed {seed}"
