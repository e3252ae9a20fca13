"""The tasks of a session's in-graph training: what a step and a train op are on a worker.

A synchronous step is one graph: ``snapshot`` pulls the parameters once, a ``gradient`` for each
replica is computed from them, and ``update`` applies the mean, as one push.  An asynchronous train
op is one task.  Bytes go from worker to worker: the tasks pull and push themselves, and the rows
are where the client has put them.  On a GPU (``Order.device``) only gradients are computed: the
parameters and the batch go there, the gradient comes back.

A task that Dask runs again, after a death, pushes under the same number: it counts once.
"""

from __future__ import annotations

import errno
import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import get_worker

from dtrain.arrays import aligned_bytes, on, quiet, transfer
from dtrain.devices import resolved
from dtrain.errors import ClusterError, DataError, NonFiniteError
from dtrain.layout import Layout
from dtrain.messages import Failure
from dtrain.runtime import blas
from dtrain.runtime.device import Gpu
from dtrain.runtime.sessions.conversation import Conversation, Voice, gather
from dtrain.runtime.sessions.known import Known
from dtrain.runtime.updater import CHUNK, finite
from dtrain.runtime.usercode import UserCodeError, calling, describe
from dtrain.runtime.worker import WorkerService, service_at
from dtrain.tree import reduce_into, scratch_needed, tree_sum


@dataclass(frozen=True)
class Order:
    """Whose variables a task works on, and the number of its push.

    ``seconds`` is what the task may wait for others.
    """

    session: str
    client: str
    generation: int
    voice: str
    push: int
    seconds: float
    #: what random numbers of the model's are keyed by, beside the replica
    rng: int = 0
    #: where gradients are computed, in the words of a job
    device: str = "cpu"


@dataclass(frozen=True)
class Parameters:
    version: int
    flat: np.ndarray


@dataclass(frozen=True)
class Gradient:
    """Of the mean loss over a batch; ``weight``: its samples, or the sum of their weights."""

    replica: int
    loss: float
    weight: float
    flat: np.ndarray


def snapshot(order: Order) -> Parameters:
    """The parameters of all replicas of a step."""
    service, known = _known(order)
    return _pull(service, known, order)


def compute(order: Order, replica: int, batch: Any, params: Parameters) -> Gradient | Failure:
    """A replica's gradient, or what the model has raised: a value, which Dask does not retry."""
    service, known = _known(order)
    return _gradient(known, order, replica, batch, params, _device(service, order))


def update(
    order: Order, params: Parameters, *found: Gradient | Failure
) -> tuple[float, int] | Failure:
    """Apply the mean of gradients, as one; the loss, and the version that has it."""
    gradients = []
    for gradient in found:
        if isinstance(gradient, Failure):
            return gradient
        gradients.append(gradient)
    service, known = _known(order)
    flat, loss = _mean(known, gradients)
    return loss, _push(service, known, order, flat, params.version)


def train(
    order: Order, replica: int, part: Any, batch: tuple[int, int] | None
) -> tuple[float, int] | Failure:
    """Pull, compute and push: an asynchronous train op.

    ``batch``: the number of a batch of the part, from 0, and how many rows each has; after the
    last one comes the first again.  None: the part is one batch.
    """
    service, known = _known(order)
    rows = part if batch is None else _rows(order, replica, part, *batch)
    device = _device(service, order)
    params = _pull(service, known, order)
    return update(order, params, _gradient(known, order, replica, rows, params, device))


def _known(order: Order) -> tuple[WorkerService, Known]:
    address = get_worker().address
    service = service_at(address)
    if service is None:
        raise ClusterError(f"worker {address}: dtrain is not there")
    future = service.start(service.known.find(order.session, order.generation, order.client))
    return service, future.result(order.seconds)


def _device(service: WorkerService, order: Order) -> str:
    device = resolved(order.device, service.devices)
    if device is None:
        # It was meant for a worker that has died since; the client asks anew who has one.
        where = get_worker().address
        raise OSError(errno.ENODEV, f"worker {where} has no device {order.device!r}")
    return device


def _pull(service: WorkerService, known: Known, order: Order) -> Parameters:
    tie, until = known.tie, time.monotonic() + order.seconds
    with tie.voice() as voice:
        talk = Conversation(service.ask, tie, voice, until, known.poll)
        pulled = service.start(talk.pull(range(len(tie.hosts)))).result(order.seconds)
    return Parameters(pulled.version, gather(tie.about, pulled))


def _push(
    service: WorkerService, known: Known, order: Order, flat: np.ndarray, version: int
) -> int:
    voice = Voice(order.voice, pushes=order.push)
    until = time.monotonic() + order.seconds
    talk = Conversation(service.ask, known.tie, voice, until, known.poll)
    return service.start(talk.push(flat, version)).result(order.seconds)


def _gradient(
    known: Known, order: Order, replica: int, batch: Any, params: Parameters, device: str
) -> Gradient | Failure:
    about = known.tie.about
    weight = _weight(batch)
    views = about.layout.views(params.flat)
    for view in views.values():
        view.flags.writeable = False
    with known.model(device) as (model, gpu), blas.one_thread(), quiet(), on(device):
        there: Mapping[str, Any] = views
        if gpu is not None:
            there, batch = gpu.params(None, views), _moved(gpu, batch)
        kwargs = {}
        if _takes_rng(model):
            kwargs["rng"] = np.random.default_rng([about.seed, order.rng, replica])
        try:
            with calling(f"loss_and_grads of the model: replica {replica}"):
                loss, grads = model.loss_and_grads(there, batch, **kwargs)
                loss = float(loss)
        except UserCodeError as error:
            return describe(error, get_worker().address)
        try:
            flat = _written(about.layout, grads, gpu)
        except ValueError as error:
            raise DataError(f"session {order.session}: replica {replica}: {error}") from None
    sound = all(finite(flat[s.start : s.stop].view(s.dtype)) for s in about.layout.segments)
    if not sound or not np.isfinite(loss):
        raise NonFiniteError(
            f"session {order.session}: replica {replica}: its loss or gradient is not finite at "
            f"version {params.version}; nothing was applied",
            reason="NON_FINITE",
        )
    return Gradient(replica, loss, weight, flat)


def _written(layout: Layout, grads: Any, gpu: Gpu | None) -> np.ndarray:
    """A gradient in host memory, as one flat buffer; it leaves a GPU in one piece."""
    flat: np.ndarray = aligned_bytes(layout.nbytes)
    if gpu is None:
        layout.write(flat, grads)
    else:
        layout.write(gpu.grads.flat, grads)
        transfer(flat, gpu.grads.flat)
    return flat


def _moved(gpu: Gpu, batch: Any) -> Any:
    """A batch on the GPU."""
    if isinstance(batch, Mapping):
        return {name: gpu.there(str(name), array) for name, array in batch.items()}
    names = ("X", "y", "weights")
    return tuple(gpu.there(name, array) for name, array in zip(names, batch, strict=False))


def _takes_rng(model: Any) -> bool:
    accepted = inspect.signature(model.loss_and_grads).parameters
    return "rng" in accepted and getattr(model, "uses_rng", True)


def _arrays(batch: Any) -> list[Any]:
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)


def _weight(batch: Any) -> float:
    """The samples of a batch, or the sum of their weights: the third of ``(x, y, w)``."""
    arrays = _arrays(batch)
    if not isinstance(batch, Mapping) and len(arrays) == 3:
        return float(np.sum(arrays[2]))
    return float(len(arrays[0]))


def _rows(order: Order, replica: int, part: Any, number: int, size: int) -> Any:
    """A batch of a part, whose rows are known here alone: some may be what a Future stands for."""
    where = f"session {order.session}: replica {replica}: batch_size: "
    try:
        counts = [len(array) for array in _arrays(part)]
    except TypeError as error:
        raise DataError(f"{where}found a part without rows, expected arrays ({error})") from None
    if len(set(counts)) > 1 or not counts[0]:
        raise DataError(f"{where}found arrays of {counts} rows, expected as many in each, and some")
    start = number % -(-counts[0] // size) * size
    stop = start + size
    if isinstance(part, Mapping):
        return {name: array[start:stop] for name, array in part.items()}
    return tuple(array[start:stop] for array in part)


def _mean(known: Known, found: Sequence[Gradient]) -> tuple[np.ndarray, float]:
    """The weighted mean, in the tree's order, behind the optimizer's transforms; and the loss."""
    about = known.tie.about
    largest = max(g.weight for g in found)
    if not largest > 0:
        raise DataError("a step: found batches without samples or weight, expected some")
    members = tuple(range(len(found)))
    weights = [g.weight / largest for g in found]
    flat = np.asarray(aligned_bytes(about.layout.nbytes))
    segments = []
    with quiet():
        for s in about.layout.segments:
            out = flat[s.start : s.stop].view(s.dtype)
            leaves = {i: g.flat[s.start : s.stop].view(s.dtype) for i, g in enumerate(found)}
            spare = scratch_needed(members, weights, len(found))
            scratch = [np.empty(min(CHUNK, out.size), out.dtype) for _ in range(spare)]
            for a in range(0, out.size, CHUNK):
                part = slice(a, min(a + CHUNK, out.size))
                n = part.stop - a
                cut = {i: leaf[part] for i, leaf in leaves.items()}
                reduce_into(members, weights, len(found), cut, out[part], [x[:n] for x in scratch])
            segments.append(out)
        if not all(map(finite, segments)):
            raise NonFiniteError("the sum of the gradients overflows", reason="NON_FINITE")
        about.optimizer.transform(segments, about.layout.block_starts)
    total = tree_sum(dict(enumerate(weights)), len(found))
    losses = {i: w * g.loss for i, (w, g) in enumerate(zip(weights, found, strict=True))}
    return flat, tree_sum(losses, len(found)) / total
