"""``plan``: where the variables, the replicas and the rows of a job will be, before it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import format_bytes

from dtrain.cluster import able, connect, current_client, install
from dtrain.errors import SpecError
from dtrain.inputs import checked, taken
from dtrain.job import Job
from dtrain.layout import Layout
from dtrain.machines.jobs import HostPlan, with_shards
from dtrain.machines.membership import Member
from dtrain.optim import Optimizer
from dtrain.partition import ShardPlan, assign, imbalance, partitioner_of, rows_of, split
from dtrain.runtime.data import Parts
from dtrain.runtime.placement import place
from dtrain.runtime.transport.shmfile import FilePlan
from dtrain.spec import JobSpec
from dtrain.starting import preflight
from dtrain.training import job_of

if TYPE_CHECKING:
    from distributed import Client


@dataclass(frozen=True)
class VariablePlan:
    """Where a variable goes: ``pieces`` are (shard, first row, row after the last)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker will have.

    Attributes
    ----------
    worker, name : str
        Its address, and the name that somebody gave it.
    shards, replicas : tuple of int
    bytes : int
        Of its shards' parameters.
    rows : int
        Rows that its replicas train on.
    memory : int
        Bytes that it needs where it does not share memory with the others: parameters, the slots
        of its shards, and a gradient for each of its replicas.
    """

    worker: str
    name: str
    shards: tuple[int, ...]
    bytes: int
    replicas: tuple[int, ...]
    rows: int
    memory: int


@dataclass(frozen=True)
class Plan:
    """What a job will be on its workers; ``str()`` has it in words.

    Attributes
    ----------
    variables : tuple of VariablePlan
    shards : tuple of int
        The size of each in bytes, padding included.
    workers : tuple of WorkerPlan
        The first is the chief.
    imbalance : float
        By how much the worker with the most bytes is above the mean: 0.1 is 10 %.
    shared_memory : int
        Bytes of the file in shared memory that the workers of one machine have together, where
        all are on one: parameters and slots (twice in synchronous mode), and there a gradient for
        each replica.  Dask counts it as each worker's own.
    """

    variables: tuple[VariablePlan, ...]
    shards: tuple[int, ...]
    workers: tuple[WorkerPlan, ...]
    imbalance: float
    shared_memory: int

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {
            "variables": [
                {
                    **asdict(v),
                    "shape": list(v.shape),
                    "pieces": [{"shard": s, "rows": [a, b]} for s, a, b in v.pieces],
                }
                for v in self.variables
            ],
            "shards": list(self.shards),
            "workers": [
                {**asdict(w), "shards": list(w.shards), "replicas": list(w.replicas)}
                for w in self.workers
            ],
            "imbalance": self.imbalance,
            "shared_memory": self.shared_memory,
        }

    def __str__(self) -> str:
        variables = [
            [v.name, str(v.shape), v.dtype, format_bytes(v.bytes), _pieces(v)]
            for v in self.variables
        ]
        workers = [
            [
                w.name or w.worker,
                _numbers(w.shards),
                format_bytes(w.bytes),
                _numbers(w.replicas),
                str(w.rows),
                format_bytes(w.memory),
            ]
            for w in self.workers
        ]
        machine = format_bytes(self.shared_memory)
        return "\n".join(
            [
                *_table(["VARIABLE", "SHAPE", "DTYPE", "SIZE", "SHARDS (ROWS)"], variables),
                "",
                *_table(["WORKER", "SHARDS", "SIZE", "REPLICAS", "ROWS", "MEMORY"], workers),
                "",
                f"imbalance {self.imbalance:.1%}; on one machine all workers share {machine} "
                f"in place of each one's memory",
            ]
        )


def plan(
    model: Any,
    X: Any = None,
    y: Any = None,
    *,
    client: Client | str | None = None,
    workers: int | None = None,
    **arguments: Any,
) -> Plan:
    """Tell where the variables, replicas and rows of a job would be; starts nothing.

    Takes the arguments of :func:`dtrain.fit`, or a whole :class:`dtrain.Job`.  Dask arrays are not
    computed: their replicas move to where the chunks will be.

    Parameters
    ----------
    model : object
        A model, or a whole :class:`dtrain.Job`.
    X, y : array
        See :class:`dtrain.Job`.
    client : Client or str, optional
        The cluster that it is planned for, or the address of its scheduler.  None: the current
        client's, else the embedded one that :func:`dtrain.fit` would have.
    workers : int, optional
        So many workers of no cluster at all, in place of that.
    **arguments
        The other fields of a :class:`dtrain.Job`.

    Returns
    -------
    Plan

    Raises
    ------
    SpecError, DataError, CheckpointError
        What :func:`dtrain.submit` would raise; and a SpecError where the model's ``init`` or a
        function for the placement raises, or answers what it must not.
    ClusterError
        No cluster at the address, or no worker there that can train.
    """
    job = job_of(model, X, y, arguments)
    if client is not None and workers is not None:
        raise SpecError("client and workers: found both, expected one")
    if workers is None and (client is not None or current_client() is not None):
        with connect(client) as found:
            ready = able(install(found), job.device or "auto")
            resumed = preflight(job, found, ready[0][0])
        members = [Member(address, name, 0.0) for address, name in ready]
    else:
        count = workers or (job.replicas and min(job.replicas, _cores())) or _cores()
        members, resumed = [Member(f"worker {i}", "", 0.0) for i in range(count)], None
    replicas = job.replicas or resumed or len(members)
    spec = job.spec(detach=True).resolved(replicas=replicas, workers=len(members))
    parts = checked(job, taken(job)[0], replicas)
    layout = _layout(job)
    shards = split(spec, layout)
    hosts = place(members, replicas, partitioner_of(spec).most, {})
    return _planned(spec, layout, shards, _placed(job, shards, hosts), parts)


def _layout(job: Job) -> Layout:
    try:
        params = job.model.init(np.random.default_rng(job.seed))
    except Exception as error:
        raise SpecError(f"model: its init raised {type(error).__name__}: {error}") from error
    return Layout.of(params)


def _placed(job: Job, shards: ShardPlan, hosts: Sequence[HostPlan]) -> tuple[HostPlan, ...]:
    sizes, addresses = [s.nbytes for s in shards.shards], [h.address for h in hosts]
    try:
        return with_shards(hosts, assign(sizes, addresses, job.placement))
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(
            f"placement: its function raised {type(error).__name__}: {error}"
        ) from error


def _planned(
    spec: JobSpec, layout: Layout, shards: ShardPlan, hosts: Sequence[HostPlan], parts: Parts
) -> Plan:
    sizes = tuple(shard.nbytes for shard in shards.shards)
    pieces: dict[str, list[tuple[int, int, int]]] = {v.name: [] for v in layout.variables}
    for shard in shards.shards:
        for name, start, stop in rows_of(layout, shard):
            pieces[name].append((shard.index, start, stop))
    optimizer, sync = Optimizer.from_dict(spec.optimizer), spec.mode == "sync"
    bounds = parts.plan.bounds
    workers = []
    for host in hosts:
        own = sum(sizes[s] for s in host.shards)
        # Asynchronous replicas have copies of the parameters beside their gradients.
        per_replica = layout.nbytes * (1 if sync else 2)
        state = (2 if sync else 1) * (layout.nbytes + len(optimizer.slots) * own)
        # With backups each host reads a copy; between two stages of the optimizer lies a gradient.
        state += (layout.nbytes if spec.backups else 0) + (own if optimizer.stages > 1 else 0)
        workers.append(
            WorkerPlan(
                worker=host.address,
                name=host.name,
                shards=host.shards,
                bytes=own,
                replicas=host.replicas,
                rows=sum(bounds[i + 1] - bounds[i] for i in host.replicas),
                memory=state + len(host.replicas) * per_replica,
            )
        )
    file = FilePlan(layout, optimizer, parts.plan.replicas, len(sizes), sync=sync)
    return Plan(
        variables=tuple(
            VariablePlan(v.name, v.shape, v.dtype, v.nbytes, tuple(pieces[v.name]))
            for v in layout.variables
        ),
        shards=sizes,
        workers=tuple(workers),
        imbalance=imbalance([w.bytes for w in workers]),
        shared_memory=file.nbytes,
    )


def _cores() -> int:
    return os.cpu_count() or 1


# -- words -------------------------------------------------------------------------------------

#: So many of a list are shown.
_SHOWN = 8


def _shortened(words: Sequence[str]) -> str:
    rest = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "") or "-"


def _numbers(numbers: Sequence[int]) -> str:
    return _shortened([str(n) for n in numbers])


def _pieces(variable: VariablePlan) -> str:
    if len(variable.pieces) == 1:
        return str(variable.pieces[0][0])
    return _shortened([f"{shard} ({a}-{b - 1})" for shard, a, b in variable.pieces])


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in [headings, *rows]
    ]
